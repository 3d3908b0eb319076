//! Posting lists: items (TIDs) in ascending order, compressed (`access/gin/ginpostinglist.c`, PostgreSQL 18).
//!
//! A list has its first item as it is, and then, for each further one, how much larger it is than the one before: as a
//! number made of the block number and 11 bits of offset, of which 7 bits go into each byte, lowest first, and the
//! highest bit of a byte tells that more bytes follow. A zero may follow the last byte, so that all has an even length.

use arrayvec::ArrayVec;
use walrider_layout::BlockNumber;
use walrider_layout::bytes::{put_u16, u16_at};
use walrider_wal::records::gin::POSTING_LIST_HEADER_SIZE;

use super::page::MAX_DATA_SIZE;
use crate::RedoError;
use crate::index_tuple::{self, TID_SIZE, Tid, make_tid};

/// Bits of the offset number (`MaxHeapTuplesPerPageBits`).
const OFFSET_BITS: u32 = 11;
/// Bits of an item.
const ITEM_BITS: u32 = 32 + OFFSET_BITS;

const LIST: RedoError = RedoError::CorruptPage("posting list does not end where it should");
const ITEM: RedoError = RedoError::CorruptPage("items do not ascend, or are no items");

/// The data of a leaf, as it grows.
pub type Data = ArrayVec<u8, MAX_DATA_SIZE>;

/// Appends bytes.
///
/// # Errors
/// When they do not fit.
pub fn append(data: &mut Data, bytes: &[u8]) -> Result<(), RedoError> {
    data.try_extend_from_slice(bytes).map_err(|_| RedoError::NoRoom(bytes.len()))
}

/// Items as numbers (`itemptr_to_uint64`).
///
/// # Errors
/// When an offset has too many bits.
pub fn numbers(items: &[Tid]) -> Result<Vec<u64>, RedoError> {
    items.iter().map(number).collect()
}

fn number(item: &Tid) -> Result<u64, RedoError> {
    let (block, offset) = (index_tuple::downlink(item)?, u16_at(item, 4));
    if offset >> OFFSET_BITS == 0 { Ok(u64::from(block) << OFFSET_BITS | u64::from(offset)) } else { Err(ITEM) }
}

/// The items of a posting list, as numbers (`ginPostingListDecode`).
///
/// # Errors
/// When the list ends within a number, or there is no such item.
pub fn decode(list: &[u8]) -> Result<Vec<u64>, RedoError> {
    let mut items = Vec::with_capacity(list.len());
    each(list, |item| items.push(item))?;
    Ok(items)
}

/// Shows the items of a posting list, as numbers.
///
/// # Errors
/// As [`decode`].
pub fn each(list: &[u8], mut see: impl FnMut(u64)) -> Result<(), RedoError> {
    let (header, rest) = list.split_first_chunk::<POSTING_LIST_HEADER_SIZE>().ok_or(LIST)?;
    let mut bytes = rest.get(..usize::from(u16_at(header, TID_SIZE))).ok_or(LIST)?;
    let mut item = number(&index_tuple::tid(header)?)?;
    see(item);
    while !bytes.is_empty() {
        item += decode_varbyte(&mut bytes)?;
        if item >> ITEM_BITS != 0 {
            return Err(ITEM);
        }
        see(item);
    }
    Ok(())
}

/// The heap block of an item.
pub fn block(item: u64) -> BlockNumber {
    (item >> OFFSET_BITS) as BlockNumber
}

/// Takes one number of at most 49 bits (`decode_varbyte`).
fn decode_varbyte(bytes: &mut &[u8]) -> Result<u64, RedoError> {
    let mut value = 0;
    for shift in (0..ITEM_BITS).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(LIST)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(LIST)
}

/// Appends a posting list of these items (`ginCompressPostingList`).
///
/// # Errors
/// When there are none, when they do not ascend, or when they do not fit.
pub fn encode(items: &[u64], data: &mut Data) -> Result<(), RedoError> {
    let first = *items.first().ok_or(LIST)?;
    let begin = data.len();
    append(data, &make_tid((first >> OFFSET_BITS) as u32, (first & ((1 << OFFSET_BITS) - 1)) as u16))?;
    append(data, &[0; POSTING_LIST_HEADER_SIZE - TID_SIZE])?;
    for pair in items.windows(2) {
        let mut delta = pair[1].checked_sub(pair[0]).filter(|&delta| delta > 0).ok_or(ITEM)?;
        while delta > 0x7F {
            append(data, &[0x80 | delta as u8])?;
            delta >>= 7;
        }
        append(data, &[delta as u8])?;
    }
    let len = data.len() - begin - POSTING_LIST_HEADER_SIZE;
    put_u16(data, begin + TID_SIZE, len as u16);
    if len.is_multiple_of(2) { Ok(()) } else { append(data, &[0]) }
}

/// Two ascending sequences as one; what is in both comes once (`ginMergeItemPointers`).
pub fn merge(a: &[u64], b: &[u64]) -> Vec<u64> {
    let mut merged = [a, b].concat();
    // Finds the two runs, and merges them.
    merged.sort();
    merged.dedup();
    merged
}
