//! Index tuples and TIDs, alike in all access methods that use them (`access/itup.h`, `storage/itemptr.h`,
//! PostgreSQL 18).

use walrider_layout::bytes::u16_at;
use walrider_layout::page::Page;
use walrider_layout::{BlockNumber, OffsetNumber};

use crate::RedoError;

/// Bytes of a tuple's header (`sizeof(IndexTupleData)`): a TID and `t_info`.
pub const TUPLE_HEADER_SIZE: usize = 8;
/// Bytes of a TID (`sizeof(ItemPointerData)`).
pub const TID_SIZE: usize = 6;
/// `t_info`: the bits that hold the tuple's size.
pub const INDEX_SIZE_MASK: u16 = 0x1FFF;

/// The bytes of a TID: block number, high half first, and line pointer.
pub type Tid = [u8; TID_SIZE];

const TUPLE: RedoError = RedoError::CorruptPage("index tuple is too short");

/// A line pointer's tuple.
///
/// # Errors
/// When there is none, or it is not on the page.
#[inline]
pub fn item(page: Page<'_>, number: OffsetNumber) -> Result<&[u8], RedoError> {
    page.item_id(number).and_then(|id| page.item(id)).ok_or(RedoError::LinePointer(number))
}

/// The size that a tuple's header states (`IndexTupleSize`).
///
/// # Errors
/// When there are not even the bytes of a header, or the tuple is smaller than one.
#[inline]
pub fn tuple_size(tuple: &[u8]) -> Result<usize, RedoError> {
    let header = tuple.first_chunk::<TUPLE_HEADER_SIZE>().ok_or(TUPLE)?;
    let size = usize::from(u16_at(header, 6) & INDEX_SIZE_MASK);
    if size < TUPLE_HEADER_SIZE { Err(TUPLE) } else { Ok(size) }
}

/// Takes one tuple, as long as its header says, from the front of data.
///
/// # Errors
/// When the data ends before the tuple does.
pub fn take<'d>(data: &mut &'d [u8]) -> Result<&'d [u8], RedoError> {
    let (tuple, rest) = data.split_at_checked(tuple_size(data)?).ok_or(TUPLE)?;
    *data = rest;
    Ok(tuple)
}

/// A tuple's `t_tid`.
///
/// # Errors
/// When there are too few bytes.
pub fn tid(tuple: &[u8]) -> Result<Tid, RedoError> {
    tuple.first_chunk().copied().ok_or(TUPLE)
}

/// A TID or its likes from its two parts.
pub fn make_tid(block: u32, offset: u16) -> Tid {
    let [high, low] = [(block >> 16) as u16, block as u16].map(u16::to_le_bytes);
    let offset = offset.to_le_bytes();
    [high[0], high[1], low[0], low[1], offset[0], offset[1]]
}

/// The block number of a tuple's `t_tid`: the child, in a tuple of an inner page (`ItemPointerGetBlockNumber`).
///
/// # Errors
/// When there are too few bytes.
pub fn downlink(tuple: &[u8]) -> Result<BlockNumber, RedoError> {
    let tid = tid(tuple)?;
    Ok(u32::from(u16_at(&tid, 0)) << 16 | u32::from(u16_at(&tid, 2)))
}

/// Stores it, and leaves the rest of the tuple as it is (`ItemPointerSetBlockNumber`).
///
/// # Errors
/// When there are too few bytes.
pub fn set_downlink(tuple: &mut [u8], block: BlockNumber) -> Result<(), RedoError> {
    let block_part = tuple.first_chunk_mut::<4>().ok_or(TUPLE)?;
    block_part.copy_from_slice(&make_tid(block, 0)[..4]);
    Ok(())
}
