//! Redo of GiST indexes (`access/gist/gistxlog.c`, PostgreSQL 18; 17 does the same).
//!
//! PostgreSQL redoes all pages of a record in one go, but nothing that it does to one of them depends on what another
//! one holds: the pages of a split are rewritten from the record, and know each other by block numbers, which the
//! record has; a left child takes the record's LSN; a parent loses the tuple whose line pointer the record names. So
//! each page is redone alone here. The order of pages matters only to readers that run at the same time.

mod page;

use walrider_layout::Lsn;
use walrider_layout::page::PageMut;
use walrider_wal::records::gist::{
    Delete, PageDelete, PageSplit, PageUpdate, XLOG_GIST_DELETE, XLOG_GIST_PAGE_DELETE, XLOG_GIST_PAGE_SPLIT,
    XLOG_GIST_PAGE_UPDATE,
};

use crate::index_tuple;
use crate::items::{append_index_tuples, index_multi_delete, index_tuple_delete, index_tuple_overwrite};
use crate::special::Special;
use crate::{BlockRedo, Outcome, RedoError, mask};
pub use page::GIST_PAGE_ID;
use page::{F_DELETED, F_FOLLOW_RIGHT, F_HAS_GARBAGE, F_LEAF, F_TUPLES_DELETED, GIST_ROOT_BLKNO, NO_BLOCK, Opaque};

const SHORT: RedoError = RedoError::DataLength("GiST record");

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info(), redo.block.id) {
        (XLOG_GIST_PAGE_UPDATE, 0) => page_update(redo),
        (XLOG_GIST_PAGE_UPDATE, 1) | (XLOG_GIST_PAGE_SPLIT, 0) => clear_follow_right(redo),
        (XLOG_GIST_DELETE, 0) => delete(redo),
        (XLOG_GIST_PAGE_SPLIT, id) => page_split(redo, id),
        (XLOG_GIST_PAGE_DELETE, 0) => page_delete_leaf(redo),
        (XLOG_GIST_PAGE_DELETE, 1) => page_delete_parent(redo),
        (XLOG_GIST_PAGE_UPDATE | XLOG_GIST_DELETE | XLOG_GIST_PAGE_DELETE, id) => Err(RedoError::BlockReference(id)),
        (info, _) => Err(RedoError::UnknownType(info)),
    }
}

/// What may differ between two pages (`gist_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    mask::header_and_hole(page)?;
    let mut opaque = Opaque::of(page.get())?;
    if opaque.flags & F_LEAF != 0 {
        mask::lp_flags(page);
    }
    opaque.nsn = Lsn(0);
    // F_FOLLOW_RIGHT is set after the record was written.
    opaque.flags = (opaque.flags | F_FOLLOW_RIGHT) & !F_HAS_GARBAGE;
    opaque.put(page);
    Ok(())
}

/// The left half of a split that now has its downlink (`gistRedoClearFollowRight`).
///
/// Changed also if restored from the record's image: PostgreSQL makes the image before it changes the page, because
/// the node sequence number is the record's own LSN.
fn clear_follow_right(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? || redo.outcome == Outcome::Restored {
        let nsn = redo.record.end;
        redo.changed_special(|opaque: &mut Opaque| {
            opaque.nsn = nsn;
            opaque.flags &= !F_FOLLOW_RIGHT;
        })?;
    }
    Ok(())
}

/// Block 0 of `PAGE_UPDATE` (`gistRedoPageUpdateRecord`).
fn page_update(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let mut opaque = Opaque::of(redo.page.get())?;
        let update = PageUpdate::parse(redo.record.main_data, redo.block.data).ok_or(SHORT)?;
        let PageUpdate { deleted, inserted, mut tuples } = update;
        let mut added = 0;
        match (deleted.iter().next(), deleted.len(), inserted) {
            // One for one: it stays at its line pointer, and others do not move more than they must.
            (Some(number), 1, 1) => {
                index_tuple_overwrite(&mut redo.page, number, index_tuple::take(&mut tuples)?)?;
                added = 1;
            }
            (Some(_), ..) => {
                index_multi_delete(&mut redo.page, deleted.iter())?;
                if opaque.flags & F_LEAF != 0 {
                    opaque.flags |= F_TUPLES_DELETED;
                    opaque.put(&mut redo.page);
                }
            }
            (None, ..) => {}
        }
        added += append_index_tuples(&mut redo.page, tuples)?;
        check_count(added, inserted.into())?;
        redo.changed();
    }
    Ok(())
}

fn check_count(added: usize, stated: usize) -> Result<(), RedoError> {
    if added == stated { Ok(()) } else { Err(RedoError::CorruptRecord("number of tuples is not as stated")) }
}

/// Block 0 of `DELETE` (`gistRedoDeleteRecord`).
///
/// `gistprunepage`, which writes the record, leaves `F_TUPLES_DELETED` as it was, and `gist_mask` does not mask it. So
/// where it was not set, the image of `wal_consistency_checking` differs from what replay makes, PostgreSQL's own too.
fn delete(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Delete { deleted, .. } = Delete::parse(redo.record.main_data).ok_or(SHORT)?;
        index_multi_delete(&mut redo.page, deleted.iter())?;
        redo.changed_special(|opaque: &mut Opaque| opaque.flags = opaque.flags & !F_HAS_GARBAGE | F_TUPLES_DELETED)?;
    }
    Ok(())
}

/// Blocks from 1 on of `PAGE_SPLIT` (`gistRedoPageSplitRecord`): the pages among which the tuples of one are spread, from
/// left to right, each rewritten. If that one was the root, block 1 is the new root, and its children follow.
fn page_split(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let split = PageSplit::parse(redo.record.main_data).ok_or(SHORT)?;
    let is_last = match u16::from(id).cmp(&split.page_count) {
        std::cmp::Ordering::Less => false,
        std::cmp::Ordering::Equal => true,
        std::cmp::Ordering::Greater => return Err(RedoError::BlockReference(id)),
    };
    let is_root = redo.block.block == GIST_ROOT_BLKNO;
    let splits_root = redo.block_number(1)? == GIST_ROOT_BLKNO;

    redo.init_page(Opaque::SIZE)?;
    let (count, tuples) = redo.block.data.split_first_chunk().ok_or(SHORT)?;
    let added = append_index_tuples(&mut redo.page, tuples)?;
    check_count(added, u32::from_le_bytes(*count) as usize)?;
    let leaf = if split.is_leaf && !is_root { F_LEAF } else { 0 };
    let follow_right = if !is_last && !splits_root && split.mark_follow_right { F_FOLLOW_RIGHT } else { 0 };
    let right_link = match (is_root, is_last) {
        (true, _) => NO_BLOCK,
        (false, true) => split.right_link,
        (false, false) => redo.block_number(id + 1)?,
    };
    Opaque { nsn: split.nsn, right_link, flags: leaf | follow_right }.put(&mut redo.page);
    redo.changed();
    Ok(())
}

/// Block 0 of `PAGE_DELETE` (`gistRedoPageDelete`): an empty leaf.
fn page_delete_leaf(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let PageDelete { delete_xid, .. } = PageDelete::parse(redo.record.main_data).ok_or(SHORT)?;
        page::put_delete_xid(&mut redo.page, delete_xid)?;
        redo.changed_special(|opaque: &mut Opaque| opaque.flags |= F_DELETED)?;
    }
    Ok(())
}

/// Block 1 of `PAGE_DELETE`: its parent.
fn page_delete_parent(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let PageDelete { downlink, .. } = PageDelete::parse(redo.record.main_data).ok_or(SHORT)?;
        index_tuple_delete(&mut redo.page, downlink)?;
        redo.changed();
    }
    Ok(())
}

#[cfg(test)]
mod tests;
