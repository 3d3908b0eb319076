//! Redo of SP-GiST indexes (`access/spgist/spgxlog.c`, PostgreSQL 18).
//!
//! Everything that redo of a record does to a page follows from the record, from the numbers of its blocks, and from
//! what that page holds: a tuple that moves is in the record in full, as are all line pointers, and a downlink or a
//! redirection needs only the number of the other block. So each page is redone alone here. PostgreSQL orders the
//! pages of a record (new tuples before links to them) only for readers that run at the same time. No page is touched
//! that the record does not refer to, and none that was restored from an image or already has the change.

mod page;

use walrider_layout::OffsetNumber;
use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_wal::records::spgist::{
    AddLeaf, AddNode, Downlink, MoveLeafs, PickSplit, SplitTuple, VacuumLeaf, VacuumRedirect, VacuumRoot,
    XLOG_SPGIST_ADD_LEAF, XLOG_SPGIST_ADD_NODE, XLOG_SPGIST_MOVE_LEAFS, XLOG_SPGIST_PICKSPLIT, XLOG_SPGIST_SPLIT_TUPLE,
    XLOG_SPGIST_VACUUM_LEAF, XLOG_SPGIST_VACUUM_REDIRECT, XLOG_SPGIST_VACUUM_ROOT,
};

use crate::items::index_multi_delete;
use crate::{BlockRedo, RedoError, mask};
pub use page::SPGIST_PAGE_ID;
use page::{DeadTuple, Opaque, SPGIST_LEAF, SPGIST_NULLS};

const SHORT: RedoError = RedoError::DataLength("SP-GiST record");

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match (redo.info(), redo.block.id) {
        (XLOG_SPGIST_ADD_LEAF, 0) => add_leaf(redo),
        (XLOG_SPGIST_ADD_LEAF, 1) => add_leaf_parent(redo),
        (XLOG_SPGIST_MOVE_LEAFS, 0) => move_leafs_src(redo),
        (XLOG_SPGIST_MOVE_LEAFS, 1) => move_leafs_dest(redo),
        (XLOG_SPGIST_MOVE_LEAFS, 2) => move_leafs_parent(redo),
        (XLOG_SPGIST_ADD_NODE, 0) => add_node(redo),
        (XLOG_SPGIST_ADD_NODE, 1) => add_node_new(redo),
        (XLOG_SPGIST_ADD_NODE, 2) => add_node_parent(redo),
        (XLOG_SPGIST_SPLIT_TUPLE, 0) => split_tuple_prefix(redo),
        (XLOG_SPGIST_SPLIT_TUPLE, 1) => split_tuple_postfix(redo),
        (XLOG_SPGIST_PICKSPLIT, 0) => pick_split_src(redo),
        (XLOG_SPGIST_PICKSPLIT, 1) => pick_split_dest(redo),
        (XLOG_SPGIST_PICKSPLIT, 2) => pick_split_inner(redo),
        (XLOG_SPGIST_PICKSPLIT, 3) => pick_split_parent(redo),
        (XLOG_SPGIST_VACUUM_LEAF, 0) => vacuum_leaf(redo),
        (XLOG_SPGIST_VACUUM_ROOT, 0) => vacuum_root(redo),
        (XLOG_SPGIST_VACUUM_REDIRECT, 0) => vacuum_redirect(redo),
        (info, id) if walrider_wal::records::spgist::identify(info).is_some() => Err(RedoError::BlockReference(id)),
        (info, _) => Err(RedoError::UnknownType(info)),
    }
}

/// What may differ between two pages (`spg_mask`).
pub(crate) fn mask(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    mask::header(page);
    if page.get().lower() >= PAGE_HEADER_SIZE { mask::unused_space(page) } else { Ok(()) }
}

/// Whether the page is to be changed; one that the record calls new is initialised (`SpGistInitBuffer`).
fn begin(redo: &mut BlockRedo<'_, '_>, new_page: bool, flags: u16) -> Result<bool, RedoError> {
    if !new_page {
        return redo.needs_redo();
    }
    redo.init_with(&Opaque { flags, ..Opaque::default() })?;
    Ok(true)
}

/// As [`begin`], for a leaf page.
fn begin_leaf(redo: &mut BlockRedo<'_, '_>, new_page: bool, stores_nulls: bool) -> Result<bool, RedoError> {
    begin(redo, new_page, SPGIST_LEAF | nulls_flag(stores_nulls))
}

fn nulls_flag(stores_nulls: bool) -> u16 {
    if stores_nulls { SPGIST_NULLS } else { 0 }
}

/// A page of which only a downlink changes: it now leads to a line pointer of another of the record's blocks.
fn update_parent(
    redo: &mut BlockRedo<'_, '_>,
    downlink: Downlink,
    child: u8,
    offset: OffsetNumber,
) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let child = redo.block_number(child)?;
        page::update_node_link(&mut redo.page, downlink, child, offset)?;
        redo.changed();
    }
    Ok(())
}

/// Block 0 of `ADD_LEAF` (`spgRedoAddLeaf`): the new tuple becomes the second of its chain, or replaces a dead tuple.
fn add_leaf(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let add = AddLeaf::parse(redo.record.main_data).ok_or(SHORT)?;
    if begin_leaf(redo, add.new_page, add.stores_nulls)? {
        if add.leaf == add.head {
            page::replace(&mut redo.page, add.tuple, add.leaf)?;
        } else {
            page::add_or_replace(&mut redo.page, add.tuple, add.leaf)?;
            if add.head != 0 {
                page::set_next_offset(&mut redo.page, add.head, add.leaf)?;
            }
        }
        redo.changed();
    }
    Ok(())
}

/// Block 1 of `ADD_LEAF`.
fn add_leaf_parent(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let add = AddLeaf::parse(redo.record.main_data).ok_or(SHORT)?;
    if add.downlink.parent == 0 {
        return Err(RedoError::BlockReference(1));
    }
    update_parent(redo, add.downlink, 0, add.leaf)
}

fn parse_move_leafs<'r>(redo: &BlockRedo<'r, '_>) -> Result<(MoveLeafs<'r>, OffsetNumber), RedoError> {
    let moves = MoveLeafs::parse(redo.record.main_data).ok_or(SHORT)?;
    Ok((moves, moves.head().ok_or(SHORT)?))
}

/// Block 0 of `MOVE_LEAFS` (`spgRedoMoveLeafs`): where the chain was.
fn move_leafs_src(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let (moves, head) = parse_move_leafs(redo)?;
        let moved = DeadTuple::moved_to(redo.block_number(1)?, head, moves.state);
        page::multi_delete(&mut redo.page, moves.deleted, moved, DeadTuple::Placeholder)?;
        redo.changed();
    }
    Ok(())
}

/// Block 1 of `MOVE_LEAFS`: where the chain is now, with one more tuple.
fn move_leafs_dest(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let (moves, _) = parse_move_leafs(redo)?;
    if begin_leaf(redo, moves.new_page, moves.stores_nulls)? {
        for insertion in moves.insertions() {
            let (offset, tuple) = insertion.ok_or(SHORT)?;
            page::add_or_replace(&mut redo.page, tuple, offset)?;
        }
        redo.changed();
    }
    Ok(())
}

/// Block 2 of `MOVE_LEAFS`.
fn move_leafs_parent(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let (moves, head) = parse_move_leafs(redo)?;
    update_parent(redo, moves.downlink, 1, head)
}

/// Block 0 of `ADD_NODE` (`spgRedoAddNode`): the inner tuple grows in its place, or leaves for block 1.
fn add_node(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let add = AddNode::parse(redo.record.main_data).ok_or(SHORT)?;
        let page = &mut redo.page;
        match redo.record.block(1) {
            None => page::replace(page, add.tuple, add.offset)?,
            Some(new) => {
                let moved = DeadTuple::moved_to(new.block, add.new_offset, add.state);
                page::replace(page, &moved.to_bytes(), add.offset)?;
                moved.count(page)?;
                if add.parent_block == 0 {
                    page::update_node_link(page, add.downlink, new.block, add.new_offset)?;
                }
            }
        }
        redo.changed();
    }
    Ok(())
}

/// Block 1 of `ADD_NODE`: where the inner tuple moves to. The parent's page may be named here, but PostgreSQL 17 and 18
/// never choose it: `SpGistGetBuffer` passes over a page that is locked, as the parent's is by then.
fn add_node_new(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let add = AddNode::parse(redo.record.main_data).ok_or(SHORT)?;
    if begin(redo, add.new_page, 0)? {
        page::add_or_replace(&mut redo.page, add.tuple, add.new_offset)?;
        if add.parent_block == 1 {
            page::update_node_link(&mut redo.page, add.downlink, redo.block.block, add.new_offset)?;
        }
        redo.changed();
    }
    Ok(())
}

/// Block 2 of `ADD_NODE`.
fn add_node_parent(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let add = AddNode::parse(redo.record.main_data).ok_or(SHORT)?;
    if add.parent_block != 2 {
        return Err(RedoError::BlockReference(2));
    }
    update_parent(redo, add.downlink, 1, add.new_offset)
}

/// Block 0 of `SPLIT_TUPLE` (`spgRedoSplitTuple`): the prefix replaces the tuple that is split.
fn split_tuple_prefix(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let split = SplitTuple::parse(redo.record.main_data).ok_or(SHORT)?;
        page::replace(&mut redo.page, split.prefix, split.prefix_offset)?;
        if split.postfix_block_same {
            page::add_or_replace(&mut redo.page, split.postfix, split.postfix_offset)?;
        }
        redo.changed();
    }
    Ok(())
}

/// Block 1 of `SPLIT_TUPLE`: the postfix, if it has no room beside the prefix.
fn split_tuple_postfix(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let split = SplitTuple::parse(redo.record.main_data).ok_or(SHORT)?;
    if split.postfix_block_same {
        return Err(RedoError::BlockReference(1));
    }
    if begin(redo, split.new_page, 0)? {
        page::add_or_replace(&mut redo.page, split.postfix, split.postfix_offset)?;
        redo.changed();
    }
    Ok(())
}

fn parse_pick_split<'r>(redo: &BlockRedo<'r, '_>) -> Result<PickSplit<'r>, RedoError> {
    PickSplit::parse(redo.record.main_data).ok_or(SHORT)
}

/// Block 0 of `PICKSPLIT` (`spgRedoPickSplit`): the leaf page whose tuples get an inner tuple above them. Without one,
/// the root is split.
fn pick_split_src(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let split = parse_pick_split(redo)?;
    if split.is_root_split {
        return Err(RedoError::BlockReference(0));
    }
    if begin_leaf(redo, split.init_src, split.stores_nulls)? {
        if !split.init_src {
            let moved = DeadTuple::moved_to(redo.block_number(2)?, split.inner_offset, split.state);
            page::multi_delete(&mut redo.page, split.deleted, moved, DeadTuple::Placeholder)?;
        }
        add_leaf_tuples(redo, &split, false)?;
        redo.changed();
    }
    Ok(())
}

/// Block 1 of `PICKSPLIT`: another leaf page, for tuples that lack room on the first one.
fn pick_split_dest(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let split = parse_pick_split(redo)?;
    if begin_leaf(redo, split.init_dest, split.stores_nulls)? {
        add_leaf_tuples(redo, &split, true)?;
        redo.changed();
    }
    Ok(())
}

fn add_leaf_tuples(redo: &mut BlockRedo<'_, '_>, split: &PickSplit<'_>, on_dest: bool) -> Result<(), RedoError> {
    for insertion in split.insertions(on_dest) {
        let (offset, tuple) = insertion.ok_or(SHORT)?;
        page::add_or_replace(&mut redo.page, tuple, offset)?;
    }
    Ok(())
}

/// Block 2 of `PICKSPLIT`: the new inner tuple's page.
fn pick_split_inner(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let split = parse_pick_split(redo)?;
    if begin(redo, split.init_inner, nulls_flag(split.stores_nulls))? {
        page::add_or_replace(&mut redo.page, split.inner, split.inner_offset)?;
        if split.inner_is_parent {
            page::update_node_link(&mut redo.page, split.downlink, redo.block.block, split.inner_offset)?;
        }
        redo.changed();
    }
    Ok(())
}

/// Block 3 of `PICKSPLIT`.
fn pick_split_parent(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let split = parse_pick_split(redo)?;
    update_parent(redo, split.downlink, 2, split.inner_offset)
}

/// Block 0 of `VACUUM_LEAF` (`spgRedoVacuumLeaf`). Where the head of a chain goes, a later tuple moves to its place.
fn vacuum_leaf(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let vacuum = VacuumLeaf::parse(redo.record.main_data).ok_or(SHORT)?;
        let page = &mut redo.page;
        page::multi_delete(page, vacuum.dead, DeadTuple::Dead, DeadTuple::Dead)?;
        page::multi_delete(page, vacuum.placeholders, DeadTuple::Placeholder, DeadTuple::Placeholder)?;
        for (src, dest) in vacuum.move_src.iter().zip(vacuum.move_dest.iter()) {
            page::swap_line_pointers(page, src, dest)?;
        }
        page::multi_delete(page, vacuum.move_src, DeadTuple::Placeholder, DeadTuple::Placeholder)?;
        for (src, dest) in vacuum.chain_src.iter().zip(vacuum.chain_dest.iter()) {
            page::set_next_offset(page, src, dest)?;
        }
        redo.changed();
    }
    Ok(())
}

/// Block 0 of `VACUUM_ROOT` (`spgRedoVacuumRoot`): nothing refers to tuples of a root that is a leaf.
fn vacuum_root(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let vacuum = VacuumRoot::parse(redo.record.main_data).ok_or(SHORT)?;
        index_multi_delete(&mut redo.page, vacuum.deleted.iter())?;
        redo.changed();
    }
    Ok(())
}

/// Block 0 of `VACUUM_REDIRECT` (`spgRedoVacuumRedirect`).
fn vacuum_redirect(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let vacuum = VacuumRedirect::parse(redo.record.main_data).ok_or(SHORT)?;
        for number in vacuum.to_placeholder.iter() {
            page::redirection_to_placeholder(&mut redo.page, number)?;
        }
        if vacuum.first_placeholder != 0 {
            page::delete_last_placeholders(&mut redo.page, vacuum.first_placeholder)?;
        }
        redo.changed();
    }
    Ok(())
}

#[cfg(test)]
mod tests;
