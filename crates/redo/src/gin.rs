//! Redo of GIN indexes (`access/gin/ginxlog.c`, PostgreSQL 18; the same in 17).
//!
//! A GIN index is a tree of entries (keys), trees of items for entries with many of them (data pages), and a list of
//! pages with tuples that wait to be moved there. PostgreSQL redoes all pages of a record in one go, but each of them
//! from the record alone: the pages of a split and vacuumed entry pages are images, the metapage and pages that begin
//! or leave the list are rebuilt, and of other pages the record has all that is needed, block numbers of siblings
//! and children included. So each page is redone alone here. The order in which PostgreSQL locks the pages matters only
//! to readers that run at the same time. Nothing is done to a page after an image of it, or if it is newer, but for
//! pages that are rebuilt in either case.

mod brought;
mod page;
mod posting;
mod recompress;

use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_wal::records::gin::{
    CreatePostingTree, DeleteListPages, DeletePage, Insert, InsertDataInternal, InsertEntry, InsertListPage, META_SIZE,
    Split, UpdateMeta, XLOG_GIN_CREATE_PTREE, XLOG_GIN_DELETE_LISTPAGE, XLOG_GIN_DELETE_PAGE, XLOG_GIN_INSERT,
    XLOG_GIN_INSERT_LISTPAGE, XLOG_GIN_SPLIT, XLOG_GIN_UPDATE_META_PAGE, XLOG_GIN_VACUUM_DATA_LEAF_PAGE,
    XLOG_GIN_VACUUM_PAGE, identify,
};

use crate::index_tuple::{make_tid, tuple_size};
use crate::items::{add_index_item, append_index_tuples, index_tuple_delete};
use crate::special::Special;
use crate::{BlockRedo, Outcome, RedoError, mask};
pub use brought::heap_blocks;
use page::{
    GIN_COMPRESSED, GIN_DATA, GIN_DELETED, GIN_INCOMPLETE_SPLIT, GIN_LEAF, GIN_LIST, GIN_LIST_FULLROW, INVALID_BLOCK,
    Opaque,
};

const SHORT: RedoError = RedoError::DataLength("GIN record");

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info(), redo.block.id) {
        (XLOG_GIN_CREATE_PTREE, 0) => create_posting_tree(redo),
        (XLOG_GIN_INSERT, 0) => insert(redo),
        (XLOG_GIN_INSERT, 1) => insert_child(redo),
        (XLOG_GIN_SPLIT, 0 | 1) => restored(redo),
        (XLOG_GIN_SPLIT, 2) => split_root(redo),
        (XLOG_GIN_SPLIT, 3) => split_child(redo),
        (XLOG_GIN_VACUUM_PAGE, 0) => restored(redo),
        (XLOG_GIN_VACUUM_DATA_LEAF_PAGE, 0) => vacuum_data_leaf(redo),
        (XLOG_GIN_DELETE_PAGE, id @ 0..=2) => delete_page(redo, id),
        (XLOG_GIN_UPDATE_META_PAGE, 0) => update_meta(redo),
        (XLOG_GIN_UPDATE_META_PAGE, 1) => update_list_tail(redo),
        (XLOG_GIN_INSERT_LISTPAGE, 0) => insert_list_page(redo),
        (XLOG_GIN_DELETE_LISTPAGE, id) => delete_list_pages(redo, id),
        (info, id) if identify(info).is_some() => Err(RedoError::BlockReference(id)),
        (info, _) => Err(RedoError::UnknownType(info)),
    }
}

/// What may differ between two pages (`gin_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    mask::header(page);
    if Opaque::of(page.get())?.flags & GIN_DELETED != 0 {
        mask::content(page);
        return Ok(());
    }
    // Pages of old versions do not tell where their contents end.
    if page.get().lower() > PAGE_HEADER_SIZE { mask::unused_space(page) } else { Ok(()) }
}

/// Block 0 of `CREATE_PTREE` (`ginRedoCreatePTree`).
fn create_posting_tree(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let CreatePostingTree { posting_lists } = CreatePostingTree::parse(redo.record.main_data).ok_or(SHORT)?;
    redo.init_with(&Opaque { flags: GIN_DATA | GIN_LEAF | GIN_COMPRESSED, ..Opaque::default() })?;
    page::put_data(&mut redo.page, posting_lists)?;
    redo.changed();
    Ok(())
}

/// Block 0 of `INSERT` (`ginRedoInsert`).
fn insert(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let Insert { place, children } = Insert::parse(redo.record.main_data).ok_or(SHORT)?;
        let right_child = children.map(|(_, right)| right);
        let opaque = Opaque::of(redo.page.get())?;
        if opaque.is_data() != place.is_data || opaque.is_leaf() != place.is_leaf {
            return Err(RedoError::CorruptPage("GIN page is not of the kind that the record says"));
        }
        match right_child {
            _ if !place.is_data => insert_entry(redo, right_child.filter(|&right| right != INVALID_BLOCK))?,
            None => recompress::redo(redo, opaque)?,
            Some(right_child) => {
                let InsertDataInternal { offset, new_item } =
                    InsertDataInternal::parse(redo.block.data).ok_or(SHORT)?;
                page::insert_posting_item(&mut redo.page, opaque, offset, &new_item, right_child)?;
            }
        }
        redo.changed();
    }
    Ok(())
}

/// A new tuple in the entry tree (`ginRedoInsertEntry`). On an inner page it takes the place of one that now leads to
/// the right half of the split child; on a leaf it may replace the one with the same key.
fn insert_entry(redo: &mut BlockRedo<'_, '_>, right_child: Option<u32>) -> Result<(), RedoError> {
    let InsertEntry { offset, is_delete, tuple } = InsertEntry::parse(redo.block.data).ok_or(SHORT)?;
    if tuple_size(tuple)? != tuple.len() {
        return Err(RedoError::DataLength("new index tuple"));
    }
    if let Some(right_child) = right_child {
        let id = redo.page.get().item_id(offset);
        let old = id.and_then(|id| redo.page.item_mut(id)).and_then(|item| item.first_chunk_mut());
        *old.ok_or(RedoError::LinePointer(offset))? = make_tid(right_child, 0);
    }
    if is_delete {
        index_tuple_delete(&mut redo.page, offset)?;
    }
    add_index_item(&mut redo.page, tuple, offset)
}

/// Block 1 of `INSERT`: the child whose split the new downlink completes (`ginRedoClearIncompleteSplit`).
fn insert_child(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if Insert::parse(redo.record.main_data).ok_or(SHORT)?.place.is_leaf {
        return Err(RedoError::BlockReference(1));
    }
    clear_incomplete_split(redo)
}

fn clear_incomplete_split(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    redo.change_special(|opaque: &mut Opaque| opaque.flags &= !GIN_INCOMPLETE_SPLIT)
}

/// A block that always has an image (`ginRedoSplit`, `ginRedoVacuumPage`).
fn restored(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? || redo.outcome != Outcome::Restored {
        return Err(RedoError::CorruptRecord("no full-page image to be restored"));
    }
    Ok(())
}

/// Block 2 of `SPLIT`: the root, if it was split.
fn split_root(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if !Split::parse(redo.record.main_data).ok_or(SHORT)?.is_root {
        return Err(RedoError::BlockReference(2));
    }
    restored(redo)
}

/// Block 3 of `SPLIT`: the child whose split the new downlink completes.
fn split_child(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if Split::parse(redo.record.main_data).ok_or(SHORT)?.place.is_leaf {
        return Err(RedoError::BlockReference(3));
    }
    clear_incomplete_split(redo)
}

/// Block 0 of `VACUUM_DATA_LEAF_PAGE` (`ginRedoVacuumDataLeafPage`).
fn vacuum_data_leaf(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let opaque = Opaque::of(redo.page.get())?;
        if !opaque.is_data() || !opaque.is_leaf() {
            return Err(RedoError::CorruptPage("GIN page is no leaf of a posting tree"));
        }
        recompress::redo(redo, opaque)?;
        redo.changed();
    }
    Ok(())
}

/// Blocks of `DELETE_PAGE` (`ginRedoDeletePage`): the page that goes, its parent, its left sibling.
fn delete_page(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let delete = DeletePage::parse(redo.record.main_data).ok_or(SHORT)?;
        let mut opaque = Opaque::of(redo.page.get())?;
        if !opaque.is_data() {
            return Err(RedoError::CorruptPage("GIN page does not belong to a posting tree"));
        }
        match id {
            0 => {
                opaque.flags |= GIN_DELETED;
                redo.page.set_prune_xid(delete.delete_xid);
            }
            1 => page::delete_posting_item(&mut redo.page, &mut opaque, delete.parent_offset)?,
            _ => opaque.right_link = delete.right_link,
        }
        opaque.put(&mut redo.page);
        redo.changed();
    }
    Ok(())
}

/// Block 0 of `UPDATE_META_PAGE` (`ginRedoUpdateMetapage`).
fn update_meta(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let UpdateMeta { metadata, .. } = UpdateMeta::parse(redo.record.main_data).ok_or(SHORT)?;
    restore_meta(redo, &metadata)
}

fn restore_meta(redo: &mut BlockRedo<'_, '_>, metadata: &[u8; META_SIZE]) -> Result<(), RedoError> {
    redo.init_with(&Opaque { flags: page::GIN_META, ..Opaque::default() })?;
    page::put_meta(&mut redo.page, metadata);
    redo.changed();
    Ok(())
}

/// Block 1 of `UPDATE_META_PAGE`: the last page of the pending list gets tuples, or a right sibling.
fn update_list_tail(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let UpdateMeta { prev_tail, new_right_link, ntuples, .. } =
        UpdateMeta::parse(redo.record.main_data).ok_or(SHORT)?;
    if ntuples <= 0 {
        // Without a page before the new one there should be no such block.
        return match prev_tail {
            INVALID_BLOCK => Err(RedoError::BlockReference(1)),
            _ => redo.change_special(|opaque: &mut Opaque| opaque.right_link = new_right_link),
        };
    }
    if redo.needs_redo()? {
        append_tuples(redo, ntuples)?;
        // All of them are of one heap tuple.
        redo.changed_special(|opaque: &mut Opaque| opaque.max_offset = opaque.max_offset.wrapping_add(1))?;
    }
    Ok(())
}

/// Appends the tuples of the block data to a page of the pending list.
fn append_tuples(redo: &mut BlockRedo<'_, '_>, ntuples: i32) -> Result<(), RedoError> {
    let added = append_index_tuples(&mut redo.page, redo.block.data)?;
    if usize::try_from(ntuples) == Ok(added) {
        Ok(())
    } else {
        Err(RedoError::DataLength("tuples of a page of the pending list"))
    }
}

/// Block 0 of `INSERT_LISTPAGE` (`ginRedoInsertListPage`).
fn insert_list_page(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let InsertListPage { right_link, ntuples } = InsertListPage::parse(redo.record.main_data).ok_or(SHORT)?;
    // A heap tuple whose index tuples fill several pages counts on the last of them.
    let (flags, max_offset) =
        if right_link == INVALID_BLOCK { (GIN_LIST | GIN_LIST_FULLROW, 1) } else { (GIN_LIST, 0) };
    redo.init_with(&Opaque { right_link, max_offset, flags })?;
    append_tuples(redo, ntuples)?;
    redo.changed();
    Ok(())
}

/// Blocks of `DELETE_LISTPAGE` (`ginRedoDeleteListPages`): the metapage, and pages that leave the pending list.
fn delete_list_pages(redo: &mut BlockRedo<'_, '_>, id: u8) -> Result<(), RedoError> {
    let DeleteListPages { metadata, ndeleted } = DeleteListPages::parse(redo.record.main_data).ok_or(SHORT)?;
    match id {
        0 => restore_meta(redo, &metadata),
        id if i32::from(id) > ndeleted => Err(RedoError::BlockReference(id)),
        _ => {
            redo.init_with(&Opaque { flags: GIN_DELETED, ..Opaque::default() })?;
            redo.changed();
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
