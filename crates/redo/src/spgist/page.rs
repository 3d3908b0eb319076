//! What is special about pages and tuples of SP-GiST (`access/spgist_private.h`, PostgreSQL 18).
//!
//! Scans and downlinks refer to tuples by line pointer, so that a tuple which goes leaves a dead one in its place: a
//! redirection to where it went, a dead head of an empty chain, or a placeholder, which new tuples may replace.

use arrayvec::ArrayVec;
use walrider_layout::bytes::{put_u16, put_u32, u16_at, u32_at};
use walrider_layout::page::{ITEM_ID_SIZE, PAGE_HEADER_SIZE, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, OffsetNumber, TransactionId, maxalign};
use walrider_wal::records::parts::Items;
use walrider_wal::records::spgist::{Downlink, State};

use crate::RedoError;
use crate::index_tuple::{TID_SIZE, TUPLE_HEADER_SIZE, Tid, item, make_tid, tuple_size};
use crate::items::{add_index_item, index_multi_delete, index_tuple_delete};
use crate::special::Special;

/// Page flag: leaf page.
pub const SPGIST_LEAF: u16 = 1 << 2;
/// Page flag: page of the tree of nulls.
pub const SPGIST_NULLS: u16 = 1 << 3;

/// Marks the page as one of SP-GiST.
pub const SPGIST_PAGE_ID: u16 = 0xFF82;

/// The special space (`SpGistPageOpaqueData`), without the mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opaque {
    /// `SPGIST_…`.
    pub flags: u16,
    /// Redirections on the page.
    pub n_redirection: u16,
    /// Placeholders on the page.
    pub n_placeholder: u16,
}

impl Special for Opaque {
    const SIZE: usize = 8;
    const NOT_ONE: &'static str = "not an SP-GiST page";

    fn read(bytes: &[u8]) -> Option<Opaque> {
        (u16_at(bytes, 6) == SPGIST_PAGE_ID).then(|| Opaque {
            flags: u16_at(bytes, 0),
            n_redirection: u16_at(bytes, 2),
            n_placeholder: u16_at(bytes, 4),
        })
    }

    fn store(&self, bytes: &mut [u8]) {
        put_u16(bytes, 0, self.flags);
        put_u16(bytes, 2, self.n_redirection);
        put_u16(bytes, 4, self.n_placeholder);
        put_u16(bytes, 6, SPGIST_PAGE_ID);
    }
}

/// Where any tuple has its state, in the lowest two bits.
const TUPSTATE_MASK: u32 = 3;
const SPGIST_REDIRECT: u32 = 1;
const SPGIST_DEAD: u32 = 2;
const SPGIST_PLACEHOLDER: u32 = 3;

/// Where a leaf tuple has its `t_info`, and a dead one its `pointer`.
const T_INFO: usize = 4;
const POINTER: usize = 6;
/// Bytes of a dead tuple (`SGDTSIZE`).
const DEAD_TUPLE_SIZE: usize = 16;
/// A TID that leads nowhere (`ItemPointerSetInvalid`).
const INVALID_TID: Tid = [0xFF, 0xFF, 0xFF, 0xFF, 0, 0];

/// Most tuples on an index page (`MaxIndexTuplesPerPage`, `access/itup.h`).
const MAX_INDEX_TUPLES_PER_PAGE: usize = (BLCKSZ - PAGE_HEADER_SIZE) / (maxalign(TUPLE_HEADER_SIZE + 1) + ITEM_ID_SIZE);

const TUPLE: RedoError = RedoError::CorruptPage("SP-GiST tuple is too short");
const NO_NODE: RedoError = RedoError::CorruptPage("inner tuple does not have the node");

/// Adds to the counters of the special space.
fn count(page: &mut PageMut<'_>, redirections: i16, placeholders: i16) -> Result<(), RedoError> {
    Opaque::change(page, |opaque| {
        opaque.n_redirection = opaque.n_redirection.wrapping_add_signed(redirections);
        opaque.n_placeholder = opaque.n_placeholder.wrapping_add_signed(placeholders);
    })
}

/// The bytes of a tuple, at least as many as any tuple has.
fn tuple_mut<'p>(page: &'p mut PageMut<'_>, number: OffsetNumber) -> Result<&'p mut [u8], RedoError> {
    let id = page.get().item_id(number).ok_or(RedoError::LinePointer(number))?;
    let tuple = page.item_mut(id).ok_or(RedoError::LinePointer(number))?;
    if tuple.len() < TUPLE_HEADER_SIZE { Err(TUPLE) } else { Ok(tuple) }
}

/// What stays in the place of a tuple (`SpGistDeadTupleData`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadTuple {
    /// Tells scans where the tuple is now, and which transaction moved it there.
    Redirect(Tid, TransactionId),
    /// Keeps the downlink to an empty chain valid.
    Dead,
    /// Keeps the numbers of later line pointers.
    Placeholder,
}

impl DeadTuple {
    /// For a tuple that went elsewhere: while the index is being built, nobody will look for it.
    pub fn moved_to(block: BlockNumber, offset: OffsetNumber, state: State) -> DeadTuple {
        match state.is_build {
            true => DeadTuple::Placeholder,
            false => DeadTuple::Redirect(make_tid(block, offset), state.redirect_xid),
        }
    }

    /// The tuple (`spgFormDeadTuple`).
    pub fn to_bytes(self) -> [u8; DEAD_TUPLE_SIZE] {
        let (state, pointer, xid) = match self {
            DeadTuple::Redirect(tid, xid) => (SPGIST_REDIRECT, tid, xid),
            DeadTuple::Dead => (SPGIST_DEAD, INVALID_TID, 0),
            DeadTuple::Placeholder => (SPGIST_PLACEHOLDER, INVALID_TID, 0),
        };
        let mut tuple = [0; DEAD_TUPLE_SIZE];
        put_u32(&mut tuple, 0, state | (DEAD_TUPLE_SIZE as u32) << 2);
        tuple[POINTER..POINTER + TID_SIZE].copy_from_slice(&pointer);
        put_u32(&mut tuple, 12, xid);
        tuple
    }

    /// Counts one more of its kind.
    ///
    /// # Errors
    /// When the page is not one of SP-GiST.
    pub fn count(self, page: &mut PageMut<'_>) -> Result<(), RedoError> {
        match self {
            DeadTuple::Redirect(..) => count(page, 1, 0),
            DeadTuple::Dead => Ok(()),
            DeadTuple::Placeholder => count(page, 0, 1),
        }
    }
}

/// Puts a tuple in the place of another one.
///
/// # Errors
/// When there is none, or no room.
pub fn replace(page: &mut PageMut<'_>, tuple: &[u8], number: OffsetNumber) -> Result<(), RedoError> {
    index_tuple_delete(page, number)?;
    add_index_item(page, tuple, number)
}

/// Adds a tuple behind all others, or in the place of a placeholder (`addOrReplaceTuple`).
///
/// # Errors
/// When there is another tuple, a gap before it, or no room.
pub fn add_or_replace(page: &mut PageMut<'_>, tuple: &[u8], number: OffsetNumber) -> Result<(), RedoError> {
    if number <= page.get().max_offset() {
        let state = item(page.get(), number)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes) & TUPSTATE_MASK);
        if state != Some(SPGIST_PLACEHOLDER) {
            return Err(RedoError::CorruptPage("tuple to be replaced is not a placeholder"));
        }
        count(page, 0, -1)?;
        index_tuple_delete(page, number)?;
    }
    add_index_item(page, tuple, number)
}

/// Replaces tuples by dead ones, the first number's by `first` (`spgPageIndexMultiDelete`).
///
/// # Errors
/// When there is no such tuple, a number comes twice, or the page makes no sense.
pub fn multi_delete(
    page: &mut PageMut<'_>,
    numbers: Items<'_, OffsetNumber>,
    first: DeadTuple,
    rest: DeadTuple,
) -> Result<(), RedoError> {
    let Some(first_number) = numbers.iter().next() else { return Ok(()) };
    let mut sorted: ArrayVec<OffsetNumber, MAX_INDEX_TUPLES_PER_PAGE> = ArrayVec::new();
    for number in numbers.iter() {
        sorted.try_push(number).map_err(|_| RedoError::CorruptRecord("more tuples than fit on a page"))?;
    }
    sorted.sort_unstable();
    index_multi_delete(page, sorted.iter().copied())?;
    for number in sorted {
        let tuple = if number == first_number { first } else { rest };
        add_index_item(page, &tuple.to_bytes(), number)?;
        tuple.count(page)?;
    }
    Ok(())
}

/// Has a node of an inner tuple lead to another place (`spgUpdateNodeLink`).
///
/// # Errors
/// When there is no such tuple or node.
pub fn update_node_link(
    page: &mut PageMut<'_>,
    downlink: Downlink,
    block: BlockNumber,
    offset: OffsetNumber,
) -> Result<(), RedoError> {
    let tuple = tuple_mut(page, downlink.parent)?;
    let header = u32_at(tuple, 0);
    let (nodes, prefix_size) = (header >> 3 & 0x1FFF, (header >> 16) as usize);
    if u32::from(downlink.node) >= nodes {
        return Err(NO_NODE);
    }
    // Nodes lie one behind the other, and begin like an index tuple.
    let mut at = TUPLE_HEADER_SIZE + prefix_size;
    for _ in 0..downlink.node {
        at += tuple_size(tuple.get(at..).ok_or(NO_NODE)?)?;
    }
    tuple.get_mut(at..at + TID_SIZE).ok_or(NO_NODE)?.copy_from_slice(&make_tid(block, offset));
    Ok(())
}

/// Stores a leaf tuple's successor in its chain (`SGLT_SET_NEXTOFFSET`).
///
/// # Errors
/// When there is no such tuple.
pub fn set_next_offset(page: &mut PageMut<'_>, number: OffsetNumber, next: OffsetNumber) -> Result<(), RedoError> {
    const NEXT_OFFSET_MASK: u16 = 0x3FFF;
    let tuple = tuple_mut(page, number)?;
    let info = u16_at(tuple, T_INFO);
    put_u16(tuple, T_INFO, info & !NEXT_OFFSET_MASK | next & NEXT_OFFSET_MASK);
    Ok(())
}

/// Two tuples change places.
///
/// # Errors
/// When there is no such tuple.
pub fn swap_line_pointers(page: &mut PageMut<'_>, a: OffsetNumber, b: OffsetNumber) -> Result<(), RedoError> {
    let id_of_a = page.get().item_id(a).ok_or(RedoError::LinePointer(a))?;
    let id_of_b = page.get().item_id(b).ok_or(RedoError::LinePointer(b))?;
    page.set_item_id(a, id_of_b);
    page.set_item_id(b, id_of_a);
    Ok(())
}

/// No scan follows the redirection any more. Its transaction id stays in the bytes.
///
/// # Errors
/// When there is no such tuple.
pub fn redirection_to_placeholder(page: &mut PageMut<'_>, number: OffsetNumber) -> Result<(), RedoError> {
    let tuple = tuple_mut(page, number)?;
    let header = u32_at(tuple, 0);
    put_u32(tuple, 0, header & !TUPSTATE_MASK | SPGIST_PLACEHOLDER);
    tuple.get_mut(POINTER..POINTER + TID_SIZE).ok_or(TUPLE)?.copy_from_slice(&INVALID_TID);
    count(page, -1, 1)
}

/// Removes all tuples from this line pointer on, which are placeholders.
///
/// # Errors
/// When the page has no such line pointer, or makes no sense.
pub fn delete_last_placeholders(page: &mut PageMut<'_>, first: OffsetNumber) -> Result<(), RedoError> {
    let last = page.get().max_offset();
    if first > last {
        return Err(RedoError::LinePointer(first));
    }
    // Cannot wrap: a page has some hundred line pointers.
    count(page, 0, -((last - first + 1) as i16))?;
    index_multi_delete(page, first..=last)
}
