//! Records of SP-GiST indexes (`access/spgxlog.h`, `access/rmgrdesc/spgdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{OffsetNumber, TransactionId};

use super::parts::{Items, true_false};
use crate::record::Record;

/// Record type: a leaf tuple added.
pub const XLOG_SPGIST_ADD_LEAF: u8 = 0x10;
/// Record type: leaf tuples moved to another page.
pub const XLOG_SPGIST_MOVE_LEAFS: u8 = 0x20;
/// Record type: a node added to an inner tuple.
pub const XLOG_SPGIST_ADD_NODE: u8 = 0x30;
/// Record type: an inner tuple split.
pub const XLOG_SPGIST_SPLIT_TUPLE: u8 = 0x40;
/// Record type: leaf tuples replaced by an inner tuple.
pub const XLOG_SPGIST_PICKSPLIT: u8 = 0x50;
/// Record type: a leaf page vacuumed.
pub const XLOG_SPGIST_VACUUM_LEAF: u8 = 0x60;
/// Record type: a root that is a leaf vacuumed.
pub const XLOG_SPGIST_VACUUM_ROOT: u8 = 0x70;
/// Record type: redirections cleared.
pub const XLOG_SPGIST_VACUUM_REDIRECT: u8 = 0x80;

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_SPGIST_ADD_LEAF => Some("ADD_LEAF"),
        XLOG_SPGIST_MOVE_LEAFS => Some("MOVE_LEAFS"),
        XLOG_SPGIST_ADD_NODE => Some("ADD_NODE"),
        XLOG_SPGIST_SPLIT_TUPLE => Some("SPLIT_TUPLE"),
        XLOG_SPGIST_PICKSPLIT => Some("PICKSPLIT"),
        XLOG_SPGIST_VACUUM_LEAF => Some("VACUUM_LEAF"),
        XLOG_SPGIST_VACUUM_ROOT => Some("VACUUM_ROOT"),
        XLOG_SPGIST_VACUUM_REDIRECT => Some("VACUUM_REDIRECT"),
        _ => None,
    }
}

/// What redo must know to write dead tuples (`spgxlogState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The transaction that redirection tuples name.
    pub redirect_xid: TransactionId,
    /// The index is being built: no scan needs redirections. Builds of PostgreSQL 17 and 18 write no such record, but
    /// log whole pages at their end (`spgbuild`).
    pub is_build: bool,
}

impl State {
    fn take(reader: &mut Reader<'_>) -> Option<State> {
        let state = State { redirect_xid: reader.u32()?, is_build: reader.bool()? };
        reader.take(3)?;
        Some(state)
    }
}

/// A node of an inner tuple, which has the downlink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Downlink {
    /// Line pointer of the inner tuple, 0 if no downlink changes (`offnumParent`).
    pub parent: OffsetNumber,
    /// Which of its nodes, counted from 0 (`nodeI`).
    pub node: u16,
}

impl Downlink {
    fn take(reader: &mut Reader<'_>) -> Option<Downlink> {
        Some(Downlink { parent: reader.u16()?, node: reader.u16()? })
    }
}

/// Takes a leaf tuple from the front; its header tells its size (`SpGistLeafTupleData`, `access/spgist_private.h`).
fn take_leaf_tuple<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    const HEADER_SIZE: usize = 12;
    let size = ({ *reader }.u32()? >> 2) as usize;
    if size < HEADER_SIZE { None } else { reader.take(size) }
}

/// Takes an inner tuple from the front; its header tells its size (`SpGistInnerTupleData`, `access/spgist_private.h`).
fn take_inner_tuple<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    const HEADER_SIZE: usize = 8;
    let mut header = *reader;
    header.u32()?;
    let size = usize::from(header.u16()?);
    if size < HEADER_SIZE { None } else { reader.take(size) }
}

/// Main data of `ADD_LEAF` (`spgxlogAddLeaf`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLeaf<'a> {
    /// The leaf page is new.
    pub new_page: bool,
    /// The page belongs to the tree of nulls.
    pub stores_nulls: bool,
    /// Where the tuple goes.
    pub leaf: OffsetNumber,
    /// The head of the chain, 0 if none; equal to `leaf` where a dead tuple is replaced.
    pub head: OffsetNumber,
    /// The parent's node.
    pub downlink: Downlink,
    /// The new tuple.
    pub tuple: &'a [u8],
}

impl<'a> AddLeaf<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<AddLeaf<'a>> {
        let mut reader = Reader::new(main_data);
        Some(AddLeaf {
            new_page: reader.bool()?,
            stores_nulls: reader.bool()?,
            leaf: reader.u16()?,
            head: reader.u16()?,
            downlink: Downlink::take(&mut reader)?,
            tuple: take_leaf_tuple(&mut reader)?,
        })
    }
}

/// Main data of `MOVE_LEAFS` (`spgxlogMoveLeafs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveLeafs<'a> {
    /// The destination page is new.
    pub new_page: bool,
    /// The only tuple on the source page was a dead one, which is not moved.
    pub replace_dead: bool,
    /// The pages belong to the tree of nulls.
    pub stores_nulls: bool,
    /// The parent's node.
    pub downlink: Downlink,
    /// For the source page's dead tuples.
    pub state: State,
    /// Tuples that leave the source page.
    pub deleted: Items<'a, OffsetNumber>,
    /// Where they, and the new one, go on the destination page; at least one.
    pub inserted: Items<'a, OffsetNumber>,
    tuples: &'a [u8],
}

impl<'a> MoveLeafs<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<MoveLeafs<'a>> {
        let mut reader = Reader::new(main_data);
        let moves = reader.u16()?;
        let (new_page, replace_dead, stores_nulls) = (reader.bool()?, reader.bool()?, reader.bool()?);
        reader.take(1)?;
        let downlink = Downlink::take(&mut reader)?;
        reader.take(2)?;
        Some(MoveLeafs {
            new_page,
            replace_dead,
            stores_nulls,
            downlink,
            state: State::take(&mut reader)?,
            deleted: Items::take(&mut reader, moves.into())?,
            inserted: Items::take(&mut reader, if replace_dead { 1 } else { i32::from(moves) + 1 })?,
            tuples: reader.rest(),
        })
    }

    /// The head of the chain on the destination page, which is its tuple added last.
    pub fn head(&self) -> Option<OffsetNumber> {
        self.inserted.iter().next_back()
    }

    /// Tuples for the destination page, with their line pointers; ends with a `None` where the data ends too early.
    pub fn insertions(&self) -> impl Iterator<Item = Option<(OffsetNumber, &'a [u8])>> + use<'a> {
        let mut reader = Reader::new(self.tuples);
        self.inserted.iter().map(move |offset| Some((offset, take_leaf_tuple(&mut reader)?)))
    }
}

/// Main data of `ADD_NODE` (`spgxlogAddNode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddNode<'a> {
    /// Where the tuple was.
    pub offset: OffsetNumber,
    /// Where it goes on the new page, if it moves there.
    pub new_offset: OffsetNumber,
    /// That page is new.
    pub new_page: bool,
    /// Which of the record's blocks has the parent; -1 if it does not change.
    pub parent_block: i8,
    /// The parent's node.
    pub downlink: Downlink,
    /// For the dead tuple on the old page.
    pub state: State,
    /// The inner tuple with its new node.
    pub tuple: &'a [u8],
}

impl<'a> AddNode<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<AddNode<'a>> {
        let mut reader = Reader::new(main_data);
        let (offset, new_offset) = (reader.u16()?, reader.u16()?);
        let (new_page, parent_block) = (reader.bool()?, reader.u8()? as i8);
        let downlink = Downlink::take(&mut reader)?;
        reader.take(2)?;
        Some(AddNode {
            offset,
            new_offset,
            new_page,
            parent_block,
            downlink,
            state: State::take(&mut reader)?,
            tuple: take_inner_tuple(&mut reader)?,
        })
    }
}

/// Main data of `SPLIT_TUPLE` (`spgxlogSplitTuple`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitTuple<'a> {
    /// Where the prefix tuple replaces the old one.
    pub prefix_offset: OffsetNumber,
    /// Where the postfix tuple goes.
    pub postfix_offset: OffsetNumber,
    /// The postfix tuple's page is new.
    pub new_page: bool,
    /// The postfix tuple goes to the same page.
    pub postfix_block_same: bool,
    /// The upper one of the two tuples.
    pub prefix: &'a [u8],
    /// The lower one.
    pub postfix: &'a [u8],
}

impl<'a> SplitTuple<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<SplitTuple<'a>> {
        let mut reader = Reader::new(main_data);
        Some(SplitTuple {
            prefix_offset: reader.u16()?,
            postfix_offset: reader.u16()?,
            new_page: reader.bool()?,
            postfix_block_same: reader.bool()?,
            prefix: take_inner_tuple(&mut reader)?,
            postfix: take_inner_tuple(&mut reader)?,
        })
    }
}

/// Main data of `PICKSPLIT` (`spgxlogPickSplit`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PickSplit<'a> {
    /// The page that splits is the root, and becomes the inner page.
    pub is_root_split: bool,
    /// The source page is initialised.
    pub init_src: bool,
    /// The destination page is initialised.
    pub init_dest: bool,
    /// Where the new inner tuple goes.
    pub inner_offset: OffsetNumber,
    /// The inner page is initialised.
    pub init_inner: bool,
    /// The pages belong to the tree of nulls.
    pub stores_nulls: bool,
    /// The parent is on the inner page.
    pub inner_is_parent: bool,
    /// The parent's node.
    pub downlink: Downlink,
    /// For the source page's dead tuples.
    pub state: State,
    /// Tuples that leave the source page, as it was before any are added.
    pub deleted: Items<'a, OffsetNumber>,
    inserted: Items<'a, OffsetNumber>,
    /// For each of the inserted ones, 0 if it goes to the source page.
    selectors: &'a [u8],
    /// The new inner tuple.
    pub inner: &'a [u8],
    leaf_tuples: &'a [u8],
}

impl<'a> PickSplit<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<PickSplit<'a>> {
        let mut reader = Reader::new(main_data);
        let is_root_split = reader.bool()?;
        reader.take(1)?;
        let (deleted, inserted) = (reader.u16()?, reader.u16()?);
        let (init_src, init_dest) = (reader.bool()?, reader.bool()?);
        let inner_offset = reader.u16()?;
        let (init_inner, stores_nulls, inner_is_parent) = (reader.bool()?, reader.bool()?, reader.bool()?);
        reader.take(1)?;
        let downlink = Downlink::take(&mut reader)?;
        reader.take(2)?;
        Some(PickSplit {
            is_root_split,
            init_src,
            init_dest,
            inner_offset,
            init_inner,
            stores_nulls,
            inner_is_parent,
            downlink,
            state: State::take(&mut reader)?,
            deleted: Items::take(&mut reader, deleted.into())?,
            inserted: Items::take(&mut reader, inserted.into())?,
            selectors: reader.take(inserted.into())?,
            inner: take_inner_tuple(&mut reader)?,
            leaf_tuples: reader.rest(),
        })
    }

    /// Leaf tuples with their line pointers, for the destination page or for the source page, as they follow each
    /// other; ends with a `None` where the data ends too early.
    pub fn insertions(&self, on_dest: bool) -> impl Iterator<Item = Option<(OffsetNumber, &'a [u8])>> + use<'a> {
        let mut reader = Reader::new(self.leaf_tuples);
        let tuples = self.inserted.iter().map(move |offset| Some((offset, take_leaf_tuple(&mut reader)?)));
        let selected = self.selectors.iter().map(move |&selector| (selector != 0) == on_dest);
        tuples.zip(selected).filter(|(tuple, selected)| *selected || tuple.is_none()).map(|(tuple, _)| tuple)
    }
}

/// Main data of `VACUUM_LEAF` (`spgxlogVacuumLeaf`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VacuumLeaf<'a> {
    /// For dead tuples.
    pub state: State,
    /// Tuples that become dead ones.
    pub dead: Items<'a, OffsetNumber>,
    /// Tuples that become placeholders.
    pub placeholders: Items<'a, OffsetNumber>,
    /// Tuples that move, and leave placeholders behind.
    pub move_src: Items<'a, OffsetNumber>,
    /// Where each of them moves to.
    pub move_dest: Items<'a, OffsetNumber>,
    /// Tuples that get another successor in their chain.
    pub chain_src: Items<'a, OffsetNumber>,
    /// The successor of each, 0 for none.
    pub chain_dest: Items<'a, OffsetNumber>,
}

impl<'a> VacuumLeaf<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<VacuumLeaf<'a>> {
        let mut reader = Reader::new(main_data);
        let (dead, placeholders, moves, chain) = (reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?);
        let state = State::take(&mut reader)?;
        let mut take = |count: u16| Items::take(&mut reader, count.into());
        Some(VacuumLeaf {
            state,
            dead: take(dead)?,
            placeholders: take(placeholders)?,
            move_src: take(moves)?,
            move_dest: take(moves)?,
            chain_src: take(chain)?,
            chain_dest: take(chain)?,
        })
    }
}

/// Main data of `VACUUM_ROOT` (`spgxlogVacuumRoot`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VacuumRoot<'a> {
    /// Tuples that go, ascending.
    pub deleted: Items<'a, OffsetNumber>,
}

impl<'a> VacuumRoot<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<VacuumRoot<'a>> {
        let mut reader = Reader::new(main_data);
        let deleted = reader.u16()?;
        reader.take(2)?;
        State::take(&mut reader)?;
        Some(VacuumRoot { deleted: Items::take(&mut reader, deleted.into())? })
    }
}

/// Main data of `VACUUM_REDIRECT` (`spgxlogVacuumRedirect`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VacuumRedirect<'a> {
    /// From here on the page has only placeholders, which go; 0 for none.
    pub first_placeholder: OffsetNumber,
    /// Newest transaction of a redirection that goes.
    pub snapshot_conflict_horizon: TransactionId,
    /// The index belongs to a catalog.
    pub is_catalog_rel: bool,
    /// Redirections that become placeholders.
    pub to_placeholder: Items<'a, OffsetNumber>,
}

impl<'a> VacuumRedirect<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<VacuumRedirect<'a>> {
        let mut reader = Reader::new(main_data);
        let to_placeholder = reader.u16()?;
        let (first_placeholder, snapshot_conflict_horizon) = (reader.u16()?, reader.u32()?);
        let is_catalog_rel = reader.bool()?;
        reader.take(1)?;
        Some(VacuumRedirect {
            first_placeholder,
            snapshot_conflict_horizon,
            is_catalog_rel,
            to_placeholder: Items::take(&mut reader, to_placeholder.into())?,
        })
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record.info(), record.main_data, out);
}

fn try_describe(info: u8, data: &[u8], out: &mut String) -> Option<()> {
    let _ = match info {
        XLOG_SPGIST_ADD_LEAF => {
            let AddLeaf { new_page, stores_nulls, leaf, head, downlink: Downlink { parent, node }, .. } =
                AddLeaf::parse(data)?;
            let _ = write!(out, "off: {leaf}, headoff: {head}, parentoff: {parent}, nodeI: {node}");
            push_flags(&[(new_page, " (newpage)"), (stores_nulls, " (nulls)")], out)
        }
        XLOG_SPGIST_MOVE_LEAFS => {
            let MoveLeafs { new_page, replace_dead, stores_nulls, downlink, deleted, .. } = MoveLeafs::parse(data)?;
            let (moves, Downlink { parent, node }) = (deleted.len(), downlink);
            let _ = write!(out, "nmoves: {moves}, parentoff: {parent}, nodeI: {node}");
            let flags = [(new_page, " (newpage)"), (replace_dead, " (replacedead)"), (stores_nulls, " (nulls)")];
            push_flags(&flags, out)
        }
        XLOG_SPGIST_ADD_NODE => {
            let AddNode { offset, new_offset, new_page, parent_block, downlink, .. } = AddNode::parse(data)?;
            let Downlink { parent, node } = downlink;
            let _ = write!(
                out,
                "off: {offset}, newoff: {new_offset}, parentBlk: {parent_block}, parentoff: {parent}, nodeI: {node}"
            );
            push_flags(&[(new_page, " (newpage)")], out)
        }
        XLOG_SPGIST_SPLIT_TUPLE => {
            let SplitTuple { prefix_offset, postfix_offset, new_page, postfix_block_same, .. } =
                SplitTuple::parse(data)?;
            let _ = write!(out, "prefixoff: {prefix_offset}, postfixoff: {postfix_offset}");
            push_flags(&[(new_page, " (newpage)"), (postfix_block_same, " (same)")], out)
        }
        XLOG_SPGIST_PICKSPLIT => {
            let split = PickSplit::parse(data)?;
            let (delete, insert, inner) = (split.deleted.len(), split.inserted.len(), split.inner_offset);
            let Downlink { parent, node } = split.downlink;
            let _ = write!(
                out,
                "ndelete: {delete}, ninsert: {insert}, inneroff: {inner}, parentoff: {parent}, nodeI: {node}"
            );
            let flags = [
                (split.inner_is_parent, " (innerIsParent)"),
                (split.stores_nulls, " (nulls)"),
                (split.is_root_split, " (isRootSplit)"),
            ];
            push_flags(&flags, out)
        }
        XLOG_SPGIST_VACUUM_LEAF => {
            let VacuumLeaf { dead, placeholders, move_src, chain_src, .. } = VacuumLeaf::parse(data)?;
            let (dead, placeholders) = (dead.len(), placeholders.len());
            let (moves, chain) = (move_src.len(), chain_src.len());
            write!(out, "ndead: {dead}, nplaceholder: {placeholders}, nmove: {moves}, nchain: {chain}")
        }
        XLOG_SPGIST_VACUUM_ROOT => write!(out, "ndelete: {}", VacuumRoot::parse(data)?.deleted.len()),
        XLOG_SPGIST_VACUUM_REDIRECT => {
            let vacuum = VacuumRedirect::parse(data)?;
            let (placeholders, first) = (vacuum.to_placeholder.len(), vacuum.first_placeholder);
            let horizon = vacuum.snapshot_conflict_horizon;
            let catalog = true_false(vacuum.is_catalog_rel);
            write!(
                out,
                "ntoplaceholder: {placeholders}, firstplaceholder: {first}, snapshotConflictHorizon: {horizon}, \
                 isCatalogRel: {catalog}"
            )
        }
        _ => Ok(()),
    };
    Some(())
}

fn push_flags(flags: &[(bool, &str)], out: &mut String) -> std::fmt::Result {
    flags.iter().filter(|(set, _)| *set).try_for_each(|(_, text)| out.write_str(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::described;
    use crate::rmgr::RmgrId;

    /// The smallest tuples that state their size.
    const LEAF: [u8; 12] = [12 << 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const INNER: [u8; 8] = [0, 0, 0, 0, 8, 0, 0, 0];
    const STATE: [u8; 8] = [0; 8];

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[&[u8]]| described(RmgrId::SPGIST, info, &data.concat());
        assert_eq!(
            described(XLOG_SPGIST_ADD_LEAF, &[&[1, 1, 2, 0, 3, 0, 4, 0, 5, 0], &LEAF]),
            "off: 2, headoff: 3, parentoff: 4, nodeI: 5 (newpage) (nulls)"
        );
        assert_eq!(
            described(XLOG_SPGIST_MOVE_LEAFS, &[&[1, 0, 0, 1, 0, 9, 2, 0, 3, 0, 9, 9], &STATE, &[7, 0, 8, 0], &LEAF]),
            "nmoves: 1, parentoff: 2, nodeI: 3 (replacedead)"
        );
        assert_eq!(
            described(XLOG_SPGIST_ADD_NODE, &[&[1, 0, 2, 0, 0, 0xFF, 3, 0, 4, 0, 9, 9], &STATE, &INNER]),
            "off: 1, newoff: 2, parentBlk: -1, parentoff: 3, nodeI: 4"
        );
        assert_eq!(
            described(XLOG_SPGIST_SPLIT_TUPLE, &[&[1, 0, 2, 0, 0, 1], &INNER, &INNER]),
            "prefixoff: 1, postfixoff: 2 (same)"
        );
        let offsets = [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 0, 0, 1];
        assert_eq!(
            described(
                XLOG_SPGIST_PICKSPLIT,
                &[&[1, 9, 2, 0, 3, 0, 0, 0, 4, 0, 9, 1, 1, 9, 5, 0, 6, 0, 9, 9], &STATE, &offsets, &INNER]
            ),
            "ndelete: 2, ninsert: 3, inneroff: 4, parentoff: 5, nodeI: 6 (innerIsParent) (nulls) (isRootSplit)"
        );
        assert_eq!(
            described(XLOG_SPGIST_VACUUM_LEAF, &[&[1, 0, 0, 0, 1, 0, 0, 0], &STATE, &[1, 0, 2, 0, 3, 0]]),
            "ndead: 1, nplaceholder: 0, nmove: 1, nchain: 0"
        );
        assert_eq!(described(XLOG_SPGIST_VACUUM_ROOT, &[&[1, 0, 9, 9], &STATE, &[3, 0]]), "ndelete: 1");
        assert_eq!(
            described(XLOG_SPGIST_VACUUM_REDIRECT, &[&[1, 0, 2, 0, 3, 0, 0, 0, 0, 9, 1, 0]]),
            "ntoplaceholder: 1, firstplaceholder: 2, snapshotConflictHorizon: 3, isCatalogRel: F"
        );
    }

    #[test]
    fn tuples_of_a_split_are_told_apart_by_their_page() {
        let fixed = [0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 5, 0, 6, 0, 0, 0];
        let mut data = [&fixed[..], &STATE, &[7, 0, 8, 0, 9, 0, 0, 1, 0], &INNER, &LEAF, &LEAF, &LEAF].concat();
        let offsets = |data: &[u8], on_dest| {
            let insertions = PickSplit::parse(data).unwrap().insertions(on_dest);
            insertions.map(|insertion| insertion.map(|(offset, _)| offset)).collect::<Vec<_>>()
        };
        assert_eq!(offsets(&data, false), [Some(7), Some(9)]);
        assert_eq!(offsets(&data, true), [Some(8)]);
        data.pop();
        assert_eq!(offsets(&data, true), [Some(8), None]);
    }
}
