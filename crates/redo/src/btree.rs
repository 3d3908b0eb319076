//! Redo of B-tree indexes (`access/nbtree/nbtxlog.c`, PostgreSQL 18).
//!
//! PostgreSQL redoes all pages of a record in one go. Nothing that it does to one of them depends on what another one
//! holds, only on the other's block number, which the record has: so each page is redone alone here. The order of
//! pages, and cleanup locks, matter only to readers that run at the same time.

mod page;
mod posting;
mod split;

use walrider_layout::page::PageMut;
use walrider_wal::records::btree::{
    Delete, Insert, MarkPageHalfDead, Metadata, NewRoot, Removal, Split, UnlinkPage, Vacuum, XLOG_BTREE_DEDUP,
    XLOG_BTREE_DELETE, XLOG_BTREE_INSERT_LEAF, XLOG_BTREE_INSERT_META, XLOG_BTREE_INSERT_POST, XLOG_BTREE_INSERT_UPPER,
    XLOG_BTREE_MARK_PAGE_HALFDEAD, XLOG_BTREE_META_CLEANUP, XLOG_BTREE_NEWROOT, XLOG_BTREE_SPLIT_L, XLOG_BTREE_SPLIT_R,
    XLOG_BTREE_UNLINK_PAGE, XLOG_BTREE_UNLINK_PAGE_META, XLOG_BTREE_VACUUM,
};

use crate::index_tuple;
use crate::items::{add_index_item, index_multi_delete, index_tuple_delete};
use crate::special::Special;
use crate::{BlockRedo, RedoError, mask};
use page::{
    BTP_DELETED, BTP_HALF_DEAD, BTP_HAS_FULLXID, BTP_HAS_GARBAGE, BTP_INCOMPLETE_SPLIT, BTP_LEAF, BTP_META, BTP_ROOT,
    BTP_SPLIT_END, Opaque, P_NONE,
};

const SHORT: RedoError = RedoError::DataLength("B-tree record");

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info(), redo.block.id) {
        (XLOG_BTREE_INSERT_LEAF, 0) => insert(redo),
        (XLOG_BTREE_INSERT_UPPER | XLOG_BTREE_INSERT_META, 0) => insert(redo),
        (XLOG_BTREE_INSERT_UPPER | XLOG_BTREE_INSERT_META, 1) => clear_incomplete_split(redo),
        (XLOG_BTREE_INSERT_META, 2) => restore_meta(redo),
        (XLOG_BTREE_INSERT_POST, 0) => insert_into_posting(redo),
        (XLOG_BTREE_SPLIT_L, 0) => split::left(redo, true),
        (XLOG_BTREE_SPLIT_R, 0) => split::left(redo, false),
        (XLOG_BTREE_SPLIT_L | XLOG_BTREE_SPLIT_R, 1) => split::right(redo),
        (XLOG_BTREE_SPLIT_L | XLOG_BTREE_SPLIT_R, 2) => split::next(redo),
        (XLOG_BTREE_SPLIT_L | XLOG_BTREE_SPLIT_R, 3) => split_child(redo),
        (XLOG_BTREE_DEDUP, 0) => posting::dedup(redo),
        (XLOG_BTREE_DELETE, 0) => delete(redo),
        (XLOG_BTREE_VACUUM, 0) => vacuum(redo),
        (XLOG_BTREE_MARK_PAGE_HALFDEAD, 0) => mark_half_dead_leaf(redo),
        (XLOG_BTREE_MARK_PAGE_HALFDEAD, 1) => mark_half_dead_parent(redo),
        (XLOG_BTREE_UNLINK_PAGE | XLOG_BTREE_UNLINK_PAGE_META, id @ 0..=3) => unlink(redo, id),
        (XLOG_BTREE_UNLINK_PAGE_META, 4) => restore_meta(redo),
        (XLOG_BTREE_NEWROOT, 0) => new_root(redo),
        (XLOG_BTREE_NEWROOT, 1) => new_root_child(redo),
        (XLOG_BTREE_NEWROOT, 2) => restore_meta(redo),
        (XLOG_BTREE_META_CLEANUP, 0) => restore_meta(redo),
        (info, id) if walrider_wal::records::btree::identify(info).is_some() => Err(RedoError::BlockReference(id)),
        (info, _) => Err(RedoError::UnknownType(info)),
    }
}

/// What may differ between two pages (`btree_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    mask::header_and_hole(page)?;
    let mut opaque = Opaque::of(page.get())?;
    if opaque.flags & BTP_LEAF != 0 {
        mask::lp_flags(page);
    }
    // Redo of a split leaves BTP_SPLIT_END and the cycle id of the right page empty.
    opaque.flags &= !(BTP_HAS_GARBAGE | BTP_SPLIT_END);
    opaque.cycle_id = 0;
    opaque.put(page);
    Ok(())
}

/// Block 0 of the `INSERT` records without posting list (`btree_xlog_insert`).
#[inline]
fn insert(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Insert { offset } = Insert::parse(redo.record.main_data).ok_or(SHORT)?;
        add_index_item(&mut redo.page, redo.block.data, offset)?;
        redo.changed();
    }
    Ok(())
}

/// Block 0 of `INSERT_POST` (`btree_xlog_insert`): the new tuple's TID goes into the posting list before it, and
/// the list's last TID into the new tuple.
fn insert_into_posting(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Insert { offset } = Insert::parse(redo.record.main_data).ok_or(SHORT)?;
        let (at, tuple) = redo.block.data.split_first_chunk::<2>().ok_or(SHORT)?;
        if index_tuple::tuple_size(tuple)? != tuple.len() {
            return Err(RedoError::DataLength("new index tuple"));
        }
        let number = offset.wrapping_sub(1);
        let id = redo.page.get().item_id(number).ok_or(RedoError::LinePointer(number))?;
        let list = redo.page.item_mut(id).ok_or(RedoError::LinePointer(number))?;
        let tid = posting::swap(list, index_tuple::tid(tuple)?, u16::from_le_bytes(*at))?;
        add_index_item(&mut redo.page, tuple, offset)?;
        // The new tuple is the lowest one.
        let upper = redo.page.get().upper();
        redo.page.0[upper..upper + tid.len()].copy_from_slice(&tid);
        redo.changed();
    }
    Ok(())
}

/// The left half of a split whose right half now has its downlink (`_bt_clear_incomplete_split`).
fn clear_incomplete_split(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    redo.change_special(|opaque: &mut Opaque| opaque.flags &= !BTP_INCOMPLETE_SPLIT)
}

/// The metapage (`_bt_restore_meta`).
fn restore_meta(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let metadata = Metadata::parse(redo.block.data).ok_or(SHORT)?;
    redo.init_with(&Opaque { flags: BTP_META, ..Opaque::default() })?;
    page::put_meta(&mut redo.page, &metadata);
    redo.changed();
    Ok(())
}

/// Block 3 of the `SPLIT` records: the child whose split the new item completes.
fn split_child(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if Split::parse(redo.record.main_data).ok_or(SHORT)?.level == 0 {
        return Err(RedoError::BlockReference(3));
    }
    clear_incomplete_split(redo)
}

/// Block 0 of `VACUUM` (`btree_xlog_vacuum`).
fn vacuum(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Vacuum { deleted, updated } = Vacuum::parse(redo.record.main_data).ok_or(SHORT)?;
        let mut opaque = remove_tuples(redo, deleted, updated)?;
        if redo.record.major.format().vacuum_clears_cycle_id {
            opaque.cycle_id = 0;
        }
        opaque.flags &= !BTP_HAS_GARBAGE;
        opaque.put(&mut redo.page);
        redo.changed();
    }
    Ok(())
}

/// Block 0 of `DELETE` (`btree_xlog_delete`): unlike VACUUM, this says nothing about the vacuum cycle.
fn delete(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Delete { deleted, updated, .. } = Delete::parse(redo.record.main_data).ok_or(SHORT)?;
        let mut opaque = remove_tuples(redo, deleted, updated)?;
        opaque.flags &= !BTP_HAS_GARBAGE;
        opaque.put(&mut redo.page);
        redo.changed();
    }
    Ok(())
}

/// First the posting lists that lose TIDs, then whole tuples: line pointer numbers in the record are those before.
fn remove_tuples(redo: &mut BlockRedo<'_, '_>, deleted: u16, updated: u16) -> Result<Opaque, RedoError> {
    let opaque = Opaque::of(redo.page.get())?;
    let removal = Removal::parse(deleted, updated, redo.block.data).ok_or(SHORT)?;
    for update in removal.updates() {
        posting::remove_tids(&mut redo.page, &update.ok_or(SHORT)?)?;
    }
    if !removal.deleted.is_empty() {
        index_multi_delete(&mut redo.page, removal.deleted.iter())?;
    }
    Ok(opaque)
}

/// Block 0 of `MARK_PAGE_HALFDEAD` (`btree_xlog_mark_page_halfdead`).
fn mark_half_dead_leaf(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let mark = MarkPageHalfDead::parse(redo.record.main_data).ok_or(SHORT)?;
    half_dead_leaf(redo, mark.left, mark.right, mark.top_parent)
}

/// An empty leaf whose high key only tells the topmost page that will be removed with it.
fn half_dead_leaf(redo: &mut BlockRedo<'_, '_>, prev: u32, next: u32, top_parent: u32) -> Result<(), RedoError> {
    redo.init_with(&Opaque { prev, next, flags: BTP_HALF_DEAD | BTP_LEAF, ..Opaque::default() })?;
    add_index_item(&mut redo.page, &page::top_parent_tuple(top_parent), page::P_HIKEY)?;
    redo.changed();
    Ok(())
}

/// Block 1 of `MARK_PAGE_HALFDEAD`: the parent's downlink to the leaf takes over the child of the next downlink,
/// which goes (`btree_xlog_mark_page_halfdead`).
fn mark_half_dead_parent(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let mark = MarkPageHalfDead::parse(redo.record.main_data).ok_or(SHORT)?;
        let number = mark.parent_offset;
        let next = number.checked_add(1).ok_or(RedoError::LinePointer(number))?;
        let right = index_tuple::downlink(index_tuple::item(redo.page.get(), next)?)?;
        let id = redo.page.get().item_id(number).ok_or(RedoError::LinePointer(number))?;
        let tuple = redo.page.item_mut(id).ok_or(RedoError::LinePointer(number))?;
        index_tuple::set_downlink(tuple, right)?;
        index_tuple_delete(&mut redo.page, next)?;
        redo.changed();
    }
    Ok(())
}

/// Blocks 0 to 3 of the `UNLINK_PAGE` records (`btree_xlog_unlink_page`).
fn unlink(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let unlink = UnlinkPage::parse(redo.record.main_data).ok_or(SHORT)?;
    match id {
        0 => {
            let leaf = if unlink.level == 0 { BTP_LEAF } else { 0 };
            redo.init_with(&Opaque {
                prev: unlink.left,
                next: unlink.right,
                level: unlink.level,
                flags: BTP_DELETED | BTP_HAS_FULLXID | leaf,
                cycle_id: 0,
            })?;
            page::put_safe_xid(&mut redo.page, unlink.safe_xid);
            redo.changed();
            Ok(())
        }
        // Without a left sibling there should be no such block.
        1 if unlink.left == P_NONE => Err(RedoError::BlockReference(1)),
        1 => redo.change_special(|opaque: &mut Opaque| opaque.next = unlink.right),
        2 => redo.change_special(|opaque: &mut Opaque| opaque.prev = unlink.left),
        _ => half_dead_leaf(redo, unlink.leaf_left, unlink.leaf_right, unlink.leaf_top_parent),
    }
}

/// Block 0 of `NEWROOT` (`btree_xlog_newroot`).
fn new_root(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let NewRoot { level, .. } = NewRoot::parse(redo.record.main_data).ok_or(SHORT)?;
    let flags = if level == 0 { BTP_ROOT | BTP_LEAF } else { BTP_ROOT };
    redo.init_with(&Opaque { level, flags, ..Opaque::default() })?;
    if level > 0 {
        page::restore_items(&mut redo.page, redo.block.data)?;
    }
    redo.changed();
    Ok(())
}

/// Block 1 of `NEWROOT`: the old root, now a left half with a downlink to the right one.
fn new_root_child(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if NewRoot::parse(redo.record.main_data).ok_or(SHORT)?.level == 0 {
        return Err(RedoError::BlockReference(1));
    }
    clear_incomplete_split(redo)
}

#[cfg(test)]
mod tests {
    use walrider_layout::page::{Page, PageMut};
    use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major};
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    use super::*;
    use crate::{Effects, Env, Target, redo_block};

    #[test]
    fn vacuum_clears_its_cycle_since_18() {
        for (major, cycle_id) in [(Major::V17, 5), (Major::V18, 0)] {
            let mut bytes = [0; BLCKSZ];
            let mut page = PageMut(&mut bytes);
            page.init(Opaque::SIZE);
            Opaque { flags: BTP_HAS_GARBAGE, cycle_id: 5, ..Opaque::default() }.put(&mut page);
            let record = RecordBuilder::new(RmgrId::BTREE, XLOG_BTREE_VACUUM)
                .main_data([0; 4])
                .block(0, TEST_REL, ForkNumber::Main, 3)
                .build();
            let record = RecordBuilder::parse_as(major, &record, Lsn(0x28));
            let env = Env { major, hint_bits_are_logged: true };
            let mut target = Target { bytes: &mut bytes, exists: true, dirty: false };
            redo_block(&record, &record.blocks[0], &mut target, &env, &mut Effects::default()).unwrap();
            let opaque = Opaque::of(Page(&bytes)).unwrap();
            assert_eq!((opaque.flags, opaque.cycle_id), (0, cycle_id), "{major:?}");
        }
    }
}
