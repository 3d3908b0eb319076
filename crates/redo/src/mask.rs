//! What may differ between two pages that are the same: masks, as `wal_consistency_checking` applies them
//! (`access/common/bufmask.c`, PostgreSQL 18; those of an access method are in its module), and the first difference that
//! remains.

use walrider_layout::page::{ITEM_ID_SIZE, ItemState, PAGE_HEADER_SIZE, Page, PageMut};
use walrider_layout::page::{PD_ALL_VISIBLE, PD_HAS_FREE_LINES, PD_PAGE_FULL};
use walrider_layout::{BLCKSZ, BlockNumber, Lsn, PageBytes, maxalign};
use walrider_wal::image;
use walrider_wal::record::{BlockRef, Record, XLR_CHECK_CONSISTENCY};
use walrider_wal::rmgr::RmgrId;

use crate::{RedoError, rmgr};

/// Blanks what a page may differ in without any record saying so. Resource managers without relation pages, and those of
/// extensions, mask nothing. Of a page that makes no sense, as one full of zeros, a part may stay as it is.
pub fn mask_page(rmgr: RmgrId, page: &mut PageBytes, block: BlockNumber) {
    // PostgreSQL stops with an error here. The caller compares with another page, and sees the difference.
    let _ = rmgr::mask(rmgr, &mut PageMut(page), block);
}

/// What pages without hint bits differ in (`seq_mask`, `generic_mask`).
pub(crate) fn without_hints(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    lsn_and_checksum(page);
    unused_space(page)
}

/// What nearly all pages differ in.
pub(crate) fn header_and_hole(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    header(page);
    unused_space(page)
}

/// `mask_page_lsn_and_checksum`
fn lsn_and_checksum(page: &mut PageMut<'_>) {
    page.set_lsn(Lsn(0));
    page.set_checksum(0);
}

/// `mask_page_lsn_and_checksum`, `mask_page_hint_bits`
pub(crate) fn header(page: &mut PageMut<'_>) {
    lsn_and_checksum(page);
    page.set_prune_xid(0);
    // PD_ALL_VISIBLE: replay leaves it alone on a page that is newer than the record (heap_xlog_visible).
    let flags = page.get().flags() & !(PD_PAGE_FULL | PD_HAS_FREE_LINES | PD_ALL_VISIBLE);
    page.set_flags(flags);
}

/// `mask_unused_space`
pub(crate) fn unused_space(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    let (lower, upper, special) = (page.get().lower(), page.get().upper(), page.get().special());
    if lower > upper || special < upper || lower < PAGE_HEADER_SIZE || special > BLCKSZ {
        return Err(RedoError::CorruptPage("header offsets make no sense"));
    }
    page.0[lower..upper].fill(0);
    Ok(())
}

/// `mask_lp_flags`
pub(crate) fn lp_flags(page: &mut PageMut<'_>) {
    for number in 1..=page.get().max_offset() {
        if let Some(id) = page.get().item_id(number) {
            page.set_item_id(number, id.with_state(ItemState::Unused));
        }
    }
}

/// `mask_page_content`
pub(crate) fn content(page: &mut PageMut<'_>) {
    page.0[PAGE_HEADER_SIZE..].fill(0);
    page.set_lower(0);
    page.set_upper(0);
}

/// Whether a page that a record changed agrees with the image that `wal_consistency_checking` put into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageCheck {
    /// There is nothing to check: no such image, the page was itself restored from the image, or the page is newer.
    Unchecked,
    /// They agree.
    Same,
    /// They differ; where first, in bytes from the beginning of the page, and in which field.
    Different(usize, String),
}

/// Compares a page, right after redo of a record, with the record's image of it (`verifyBackupPageConsistency` in
/// `access/transam/xlogrecovery.c`, PostgreSQL 18).
///
/// # Errors
/// When the image cannot be restored.
pub fn check_image(record: &Record<'_>, block: &BlockRef<'_>, page: &PageBytes) -> Result<ImageCheck, RedoError> {
    let Some(stored) = block.image.filter(|image| !image.apply()) else { return Ok(ImageCheck::Unchecked) };
    if record.header.info & XLR_CHECK_CONSISTENCY == 0 || Page(page).lsn() > record.end {
        return Ok(ImageCheck::Unchecked);
    }
    let mut ours = *page;
    let mut theirs: PageBytes = [0; BLCKSZ];
    image::restore(&stored, &mut theirs)?;
    mask_page(record.header.rmgr, &mut ours, block.block);
    mask_page(record.header.rmgr, &mut theirs, block.block);
    Ok(match first_difference(&ours, &theirs) {
        Some((offset, field)) => ImageCheck::Different(offset, field),
        None => ImageCheck::Same,
    })
}

/// Where two pages first differ, in bytes from their beginning, and the name of the field, going by the first page.
pub fn first_difference(a: &PageBytes, b: &PageBytes) -> Option<(usize, String)> {
    let offset = a.iter().zip(b).position(|(a, b)| a != b)?;
    Some((offset, field_name(Page(a), offset)))
}

fn field_name(page: Page<'_>, offset: usize) -> String {
    let field = match offset {
        0..8 => "pd_lsn",
        8..10 => "pd_checksum",
        10..12 => "pd_flags",
        12..14 => "pd_lower",
        14..16 => "pd_upper",
        16..18 => "pd_special",
        18..20 => "pd_pagesize_version",
        20..24 => "pd_prune_xid",
        _ if !page.is_sane() => return format!("byte {offset}"),
        _ if offset >= page.special() => return format!("special+{}", offset - page.special()),
        _ if offset < page.lower() => {
            return format!("line pointer {}", (offset - PAGE_HEADER_SIZE) / ITEM_ID_SIZE + 1);
        }
        _ if offset < page.upper() => "hole",
        _ => return item_name(page, offset),
    };
    field.to_owned()
}

/// The item, with its padding, that has this byte.
fn item_name(page: Page<'_>, offset: usize) -> String {
    let begin = |number| page.item_id(number).filter(|id| !id.is_empty());
    let item = (1..=page.max_offset()).find_map(|number| {
        let id = begin(number)?;
        (id.offset()..id.offset() + maxalign(id.len())).contains(&offset).then_some((number, id))
    });
    match item {
        Some((number, id)) if offset < id.offset() + id.len() => {
            format!("item {number} at byte {}", offset - id.offset())
        }
        Some((number, _)) => format!("padding of item {number}"),
        None => format!("byte {offset}, which belongs to no item"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::items::{AtExisting, ItemsOf, add_item};
    use walrider_layout::bytes::{put_u16, put_u32, u16_at};

    fn heap_page(tuples: &[[u8; 29]]) -> PageBytes {
        let mut bytes = [0; BLCKSZ];
        let mut page = PageMut(&mut bytes);
        page.init(0);
        for tuple in tuples {
            add_item(&mut page, tuple, 0, AtExisting::Overwrite, ItemsOf::Heap).unwrap();
        }
        bytes
    }

    #[test]
    fn fields_are_named() {
        let page = heap_page(&[[1; 29], [2; 29]]);
        assert_eq!(first_difference(&page, &page), None);
        let name = |offset: usize| {
            let mut other = page;
            other[offset] ^= 1;
            let (at, name) = first_difference(&page, &other).unwrap();
            assert_eq!(at, offset);
            name
        };
        assert_eq!(name(3), "pd_lsn");
        assert_eq!(name(12), "pd_lower");
        assert_eq!(name(30), "line pointer 2");
        assert_eq!(name(100), "hole");
        assert_eq!(name(8192 - 32), "item 1 at byte 0");
        assert_eq!(name(8192 - 64 + 28), "item 2 at byte 28");
        assert_eq!(name(8192 - 1), "padding of item 1");
    }

    #[test]
    fn heap_masks_hints_padding_hole_and_speculative_tokens() {
        let mut tuple = [0; 29];
        put_u16(&mut tuple, 20, 0x0902);
        let a = heap_page(&[tuple]);
        let mut b = heap_page(&[{
            let mut other = tuple;
            put_u16(&mut other, 20, 0x0502);
            put_u16(&mut other, 16, 0xFFFE);
            put_u32(&mut other, 8, 77);
            other
        }]);
        let own_place = heap_page(&[{
            let mut own = tuple;
            put_u32(&mut own, 12, 3 << 16);
            put_u16(&mut own, 16, 1);
            own
        }]);
        let mut masked_a = own_place;
        b[8191] = 9;
        b[5000] = 9;
        PageMut(&mut b).set_lsn(Lsn(99));
        PageMut(&mut b).set_flags(PD_PAGE_FULL);
        mask_page(RmgrId::HEAP, &mut b, 3);
        mask_page(RmgrId::HEAP2, &mut masked_a, 3);
        assert_eq!(first_difference(&masked_a, &b), None);
        let mut masked = a;
        mask_page(RmgrId::HEAP, &mut masked, 3);
        assert_eq!(first_difference(&masked, &b).unwrap().1, "item 1 at byte 14");
    }

    #[test]
    fn frozen_tuples_keep_most_of_their_bits() {
        let mut tuple = [0; 29];
        put_u16(&mut tuple, 20, 0x2B02);
        let mut page = heap_page(&[tuple]);
        mask_page(RmgrId::HEAP, &mut page, 0);
        assert_eq!(u16_at(&page, 8160 + 20), 0x2302);
    }

    #[test]
    fn pages_that_make_no_sense_are_errors() {
        for rmgr in [9, 10, 11, 12, 13, 14, 15, 17, 20].map(RmgrId) {
            let mut page = [0xFF; BLCKSZ];
            assert!(rmgr::mask(rmgr, &mut PageMut(&mut page), 0).is_err(), "{rmgr}");
        }
        let mut page = heap_page(&[[1; 29]]);
        PageMut(&mut page).set_item_id(1, walrider_layout::page::ItemId::normal(8190, 29));
        assert_eq!(rmgr::mask(RmgrId::HEAP, &mut PageMut(&mut page), 0), Err(RedoError::LinePointer(1)));
    }
}
