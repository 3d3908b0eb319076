//! Redo of BRIN indexes (`access/brin/brin_xlog.c`, PostgreSQL 18; the same in 17).
//!
//! PostgreSQL redoes all pages of a record in one go. Nothing that it does to one of them depends on what another one
//! holds: the range map's page gets the new tuple's TID, which is the block number of another page of the record and a
//! line pointer number from the record. So each page is redone alone here.
//!
//! Where the page of a new tuple does not exist, PostgreSQL takes its block number from a buffer that it does not have.
//! Ours is that of the record, in this case too. It cannot matter: such an index is dropped later.

use walrider_layout::bytes::{put_u16, put_u32, u16_at};
use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber};
use walrider_wal::records::brin::*;

use crate::index_tuple::{TID_SIZE, Tid, make_tid};
use crate::items::{self, AtExisting, ItemsOf};
use crate::{BlockRedo, RedoError, mask};

/// The kind of a page, in its last two bytes (`access/brin_page.h`): the metapage, the first of three.
pub const BRIN_PAGETYPE_META: u16 = 0xF091;
const BRIN_PAGETYPE_REVMAP: u16 = 0xF092;
/// A page of tuples, the last of three.
pub const BRIN_PAGETYPE_REGULAR: u16 = 0xF093;
/// Bytes of the special space (`sizeof(BrinSpecialSpace)`).
const SPECIAL_SIZE: usize = 8;
/// Where in it the flags are, and that of a page which is being emptied.
const FLAGS: usize = 4;
const BRIN_EVACUATE_PAGE: u8 = 1 << 0;

/// The metapage (`BrinMetaPageData`).
const BRIN_META_MAGIC: u32 = 0xA810_9CFA;
const META_SIZE: usize = 16;
/// Where in it `lastRevmapPage` is.
const LAST_REVMAP_PAGE: usize = 12;

/// Entries on a page of the range map.
const REVMAP_PAGE_MAXITEMS: u32 = ((BLCKSZ - PAGE_HEADER_SIZE - SPECIAL_SIZE) / TID_SIZE) as u32;

const SHORT: RedoError = RedoError::DataLength("BRIN record");

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let main_data = redo.record.main_data;
    match (redo.info() & XLOG_BRIN_OPMASK, redo.block.id) {
        (XLOG_BRIN_CREATE_INDEX, 0) => create_index(redo),
        (XLOG_BRIN_INSERT, id @ 0..=1) => insert(redo, id, &Insert::parse(main_data).ok_or(SHORT)?),
        (XLOG_BRIN_UPDATE, id @ 0..=1) => insert(redo, id, &Update::parse(main_data).ok_or(SHORT)?.insert),
        (XLOG_BRIN_UPDATE, 2) => delete_tuple(redo, Update::parse(main_data).ok_or(SHORT)?.old_offset),
        (XLOG_BRIN_SAMEPAGE_UPDATE, 0) => samepage_update(redo),
        (XLOG_BRIN_REVMAP_EXTEND, 0) => extend_revmap(redo),
        (XLOG_BRIN_REVMAP_EXTEND, 1) => init_page(redo, BRIN_PAGETYPE_REVMAP),
        (XLOG_BRIN_DESUMMARIZE, 0) => {
            let range = Desummarize::parse(main_data).ok_or(SHORT)?;
            set_range(redo, range.pages_per_range, range.heap_block, make_tid(BlockNumber::MAX, 0))
        }
        (XLOG_BRIN_DESUMMARIZE, 1) => delete_tuple(redo, Desummarize::parse(main_data).ok_or(SHORT)?.offset),
        (operation, id) if identify(operation).is_some() => Err(RedoError::BlockReference(id)),
        _ => Err(RedoError::UnknownType(redo.info())),
    }
}

/// What may differ between two pages (`brin_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    mask::header(page);
    let special = page.get().special();
    if special < PAGE_HEADER_SIZE || special + SPECIAL_SIZE > BLCKSZ {
        return Err(RedoError::CorruptPage("header offsets make no sense"));
    }
    let has_lower = page.get().lower() > PAGE_HEADER_SIZE;
    match u16_at(page.0, special + SPECIAL_SIZE - 2) {
        BRIN_PAGETYPE_REGULAR => mask::unused_space(page)?,
        BRIN_PAGETYPE_META if has_lower => mask::unused_space(page)?,
        _ => {}
    }
    page.0[special + FLAGS] &= !BRIN_EVACUATE_PAGE;
    Ok(())
}

/// Initialises a page (`XLogInitBufferForRedo`, `brin_page_init`).
fn init_page(redo: &mut BlockRedo<'_, '_>, page_type: u16) -> Result<(), RedoError> {
    redo.init_page(SPECIAL_SIZE)?;
    put_u16(redo.page.0, BLCKSZ - 2, page_type);
    redo.changed();
    Ok(())
}

/// Block 0 of CREATE_INDEX (`brin_xlog_createidx`, `brin_metapage_init`).
fn create_index(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let CreateIndex { pages_per_range, version } = CreateIndex::parse(redo.record.main_data).ok_or(SHORT)?;
    init_page(redo, BRIN_PAGETYPE_META)?;
    let meta = &mut redo.page.0[PAGE_HEADER_SIZE..][..META_SIZE];
    put_u32(meta, 0, BRIN_META_MAGIC);
    put_u32(meta, 4, version.into());
    put_u32(meta, 8, pages_per_range);
    set_lower_of_meta(&mut redo.page);
    Ok(())
}

/// Else a full-page image would leave the metadata out.
fn set_lower_of_meta(page: &mut PageMut<'_>) {
    page.set_lower(PAGE_HEADER_SIZE + META_SIZE);
}

/// Blocks 0 and 1 of INSERT and UPDATE: the new tuple, and the entry of its range (`brin_xlog_insert_update`).
fn insert(redo: &mut BlockRedo<'_, '_>, id: u8, insert: &Insert) -> Result<(), RedoError> {
    if id == 1 {
        let tid = make_tid(redo.block_number(0)?, insert.offset);
        return set_range(redo, insert.pages_per_range, insert.heap_block, tid);
    }
    if redo.info() & XLOG_BRIN_INIT_PAGE != 0 {
        init_page(redo, BRIN_PAGETYPE_REGULAR)?;
    } else if !redo.needs_redo()? {
        return Ok(());
    }
    if insert.offset == 0 {
        return Err(RedoError::LinePointer(0));
    }
    items::add_item(&mut redo.page, redo.block.data, insert.offset, AtExisting::Overwrite, ItemsOf::Index)?;
    redo.changed();
    Ok(())
}

/// Enters the tuple of a range into the map (`brinSetHeapBlockItemptr`).
fn set_range(
    redo: &mut BlockRedo<'_, '_>,
    pages_per_range: BlockNumber,
    heap_block: BlockNumber,
    tid: Tid,
) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        const EMPTY: RedoError = RedoError::CorruptRecord("BRIN range of no pages");
        let range = heap_block.checked_div(pages_per_range).ok_or(EMPTY)?;
        let at = PAGE_HEADER_SIZE + TID_SIZE * (range % REVMAP_PAGE_MAXITEMS) as usize;
        redo.page.0[at..at + TID_SIZE].copy_from_slice(&tid);
        redo.changed();
    }
    Ok(())
}

/// Block 2 of UPDATE and block 1 of DESUMMARIZE.
fn delete_tuple(redo: &mut BlockRedo<'_, '_>, offset: u16) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        items::index_tuple_delete_no_compact(&mut redo.page, offset)?;
        redo.changed();
    }
    Ok(())
}

/// Block 0 of SAMEPAGE_UPDATE (`brin_xlog_samepage_update`).
fn samepage_update(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let SamepageUpdate { offset } = SamepageUpdate::parse(redo.record.main_data).ok_or(SHORT)?;
        items::index_tuple_overwrite(&mut redo.page, offset, redo.block.data)?;
        redo.changed();
    }
    Ok(())
}

/// Block 0 of REVMAP_EXTEND (`brin_xlog_revmap_extend`).
fn extend_revmap(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let RevmapExtend { target } = RevmapExtend::parse(redo.record.main_data).ok_or(SHORT)?;
        put_u32(redo.page.0, PAGE_HEADER_SIZE + LAST_REVMAP_PAGE, target);
        // Indexes that came from a release before 11 may have a wrong one.
        set_lower_of_meta(&mut redo.page);
        redo.changed();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Effects, Env, Target, redo_block};
    use walrider_layout::page::Page;
    use walrider_layout::{ForkNumber, Lsn, Major, PageBytes};
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    fn redo_one(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> Result<(), RedoError> {
        let bytes = builder.build();
        let record = RecordBuilder::parse(&bytes, Lsn(0x28));
        let env = Env { major: Major::V18, hint_bits_are_logged: true };
        let mut target = Target { bytes: page, exists: true, dirty: false };
        redo_block(&record, record.block(id).unwrap(), &mut target, &env, &mut Effects::default()).map(drop)
    }

    /// Redoes a block of a record with this main data: the range map's page, as a record just began it.
    fn on_revmap(info: u8, id: u8, main: &[u32], tuple_block: u32) -> Result<PageBytes, RedoError> {
        let mut page = [0xEE; BLCKSZ];
        let begin = RecordBuilder::new(RmgrId::BRIN, XLOG_BRIN_REVMAP_EXTEND)
            .main_data([2, 0, 0, 0])
            .block(1, TEST_REL, ForkNumber::Main, 2)
            .will_init();
        redo_one(&begin, 1, &mut page)?;
        PageMut(&mut page).set_lsn(Lsn(0));
        let main: Vec<u8> = main.iter().flat_map(|number| number.to_le_bytes()).collect();
        let (first, second) = if id == 0 { (2, 9) } else { (tuple_block, 2) };
        let record = RecordBuilder::new(RmgrId::BRIN, info)
            .main_data(main)
            .block(0, TEST_REL, ForkNumber::Main, first)
            .block(1, TEST_REL, ForkNumber::Main, second);
        redo_one(&record, id, &mut page)?;
        Ok(page)
    }

    #[test]
    fn the_range_map_has_1360_entries_on_a_page() {
        assert_eq!(REVMAP_PAGE_MAXITEMS, 1360);
        // The last range of a page, of four heap pages each: line pointer 3 of block 0x10002.
        let page = on_revmap(XLOG_BRIN_INSERT, 1, &[4 * (3 * 1360 - 1) + 2, 4, 3], 0x1_0002).unwrap();
        assert_eq!(page[BLCKSZ - 8 - 6..], [1, 0, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0x92, 0xF0]);
        // The first of the next one is summarized no longer.
        let page = on_revmap(XLOG_BRIN_DESUMMARIZE, 0, &[4, 4 * 3 * 1360, 3], 0).unwrap();
        assert_eq!(page[PAGE_HEADER_SIZE..][..8], [0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0]);
        assert!(on_revmap(XLOG_BRIN_INSERT, 1, &[8, 0, 3], 9).is_err());
    }

    #[test]
    fn the_metapage_tells_the_last_page_of_the_range_map() {
        let mut page = [0xEE; BLCKSZ];
        let create = RecordBuilder::new(RmgrId::BRIN, XLOG_BRIN_CREATE_INDEX)
            .main_data([128, 0, 0, 0, 1, 0])
            .block(0, TEST_REL, ForkNumber::Main, 0)
            .will_init();
        redo_one(&create, 0, &mut page).unwrap();
        assert_eq!(page[24..40], [0xFA, 0x9C, 0x10, 0xA8, 1, 0, 0, 0, 128, 0, 0, 0, 0, 0, 0, 0]);
        // As a release before 11 left it.
        PageMut(&mut page).set_lower(PAGE_HEADER_SIZE);
        PageMut(&mut page).set_lsn(Lsn(0));
        let extend = RecordBuilder::new(RmgrId::BRIN, XLOG_BRIN_REVMAP_EXTEND).main_data([1, 0, 0, 0]).block(
            0,
            TEST_REL,
            ForkNumber::Main,
            0,
        );
        redo_one(&extend, 0, &mut page).unwrap();
        assert_eq!((page[36], Page(&page).lower()), (1, 40));
    }
}
