//! Posting lists: one leaf tuple with the TIDs of several (`access/nbtree/nbtdedup.c`, PostgreSQL 18).
//!
//! Such a tuple has its key as any other, zeros up to a multiple of 8, and an ascending array of TIDs. Its `t_tid`
//! tells where that array begins and how many TIDs it has.

use arrayvec::ArrayVec;
use walrider_layout::bytes::{put_u16, u16_at};
use walrider_layout::page::{ITEM_ID_SIZE, ItemId, Page, PageMut};
use walrider_layout::{BLCKSZ, OffsetNumber, PageBytes, maxalign};
use walrider_wal::records::btree::{Dedup, Update};

use super::SHORT;
use super::page::{BTP_HAS_GARBAGE, INDEX_ALT_TID_MASK, MAX_ITEM_SIZE, Opaque, P_HIKEY};
use crate::index_tuple::{self, INDEX_SIZE_MASK, TID_SIZE, TUPLE_HEADER_SIZE, Tid};
use crate::items::{add_index_item, index_tuple_overwrite};
use crate::special::Special;
use crate::{BlockRedo, RedoError};

/// `t_tid`, offset part: the tuple has a posting list.
const BT_IS_POSTING: u16 = 0x2000;
/// `t_tid`, offset part: the bits that hold the number of TIDs.
const BT_OFFSET_MASK: u16 = 0x0FFF;

/// Where a leaf tuple's key ends and its TIDs are.
struct Parts<'t> {
    /// The whole tuple, as long as its header says.
    tuple: &'t [u8],
    /// Bytes of the key with its padding; the tuple's size if it has no posting list (`keysize`).
    key_size: usize,
    /// One TID after the other.
    tids: &'t [u8],
    is_posting: bool,
}

impl<'t> Parts<'t> {
    /// Takes a leaf tuple apart; everything is found to lie within it.
    fn of(item: &'t [u8]) -> Result<Parts<'t>, RedoError> {
        let size = index_tuple::tuple_size(item)?;
        let tuple = item.get(..size).ok_or(RedoError::CorruptPage("index tuple is longer than its item"))?;
        let (offset, info) = (u16_at(tuple, 4), u16_at(tuple, 6));
        if info & INDEX_ALT_TID_MASK == 0 || offset & BT_IS_POSTING == 0 {
            return Ok(Parts { tuple, key_size: size, tids: &tuple[..TID_SIZE], is_posting: false });
        }
        let begin = index_tuple::downlink(tuple)? as usize;
        let len = TID_SIZE * usize::from(offset & BT_OFFSET_MASK);
        let tids = tuple.get(begin..).and_then(|tail| tail.get(..len));
        match tids {
            Some(tids) if begin >= TUPLE_HEADER_SIZE => Ok(Parts { tuple, key_size: begin, tids, is_posting: true }),
            _ => Err(RedoError::CorruptPage("posting list does not fit its index tuple")),
        }
    }

    /// How many TIDs there are.
    fn count(&self) -> usize {
        self.tids.len() / TID_SIZE
    }
}

/// Stores in a tuple's header that it has `size` bytes, of which the TIDs begin at `key_size`.
fn make_posting(tuple: &mut [u8], size: usize, key_size: usize, count: usize) {
    tuple[..TID_SIZE].copy_from_slice(&index_tuple::make_tid(key_size as u32, count as u16 | BT_IS_POSTING));
    let info = u16_at(tuple, 6) & !INDEX_SIZE_MASK;
    put_u16(tuple, 6, info | size as u16 | INDEX_ALT_TID_MASK);
}

/// Puts a new TID into a posting list, at a place between others; the last TID falls out and is returned
/// (`_bt_swap_posting`). The tuple's size stays.
///
/// # Errors
/// When the item is not a posting list, or has no such place.
pub fn swap(item: &mut [u8], new: Tid, at: u16) -> Result<Tid, RedoError> {
    let parts = Parts::of(item)?;
    let (begin, count, at) = (parts.key_size, parts.count(), usize::from(at));
    if !parts.is_posting {
        return Err(RedoError::CorruptPage("index tuple to be split has no posting list"));
    }
    if at == 0 || at >= count {
        return Err(RedoError::CorruptRecord("posting list cannot be split there"));
    }
    let tids = &mut item[begin..begin + TID_SIZE * count];
    let last = index_tuple::tid(&tids[TID_SIZE * (count - 1)..])?;
    tids.copy_within(TID_SIZE * at..TID_SIZE * (count - 1), TID_SIZE * (at + 1));
    tids[TID_SIZE * at..][..TID_SIZE].copy_from_slice(&new);
    Ok(last)
}

/// Removes TIDs from a posting list on a page (`btree_xlog_updates`, `_bt_update_posting`). With one TID left the
/// tuple becomes a plain one.
///
/// # Errors
/// When there is no such posting list or TID, or none would be left.
pub fn remove_tids(page: &mut PageMut<'_>, update: &Update<'_>) -> Result<(), RedoError> {
    let Parts { tuple, key_size, tids, is_posting } = Parts::of(index_tuple::item(page.get(), update.offset)?)?;
    if !is_posting {
        return Err(RedoError::CorruptPage("index tuple to be shortened has no posting list"));
    }
    let inconsistent = RedoError::CorruptRecord("TIDs to be removed do not exist, or are out of order");
    let left = (tids.len() / TID_SIZE).checked_sub(update.deleted_tids.len()).filter(|left| *left > 0);
    let left = left.ok_or(inconsistent.clone())?;
    let size = if left > 1 { maxalign(key_size + TID_SIZE * left) } else { key_size };
    // A tuple is shorter than 2^13 bytes, so that neither of these fails.
    let mut new: ArrayVec<u8, BLCKSZ> = ArrayVec::new();
    let no_room = |_| RedoError::NoRoom(size);
    new.try_extend_from_slice(&tuple[..key_size]).map_err(no_room)?;
    let mut deleted = update.deleted_tids.iter().map(usize::from).peekable();
    for (index, tid) in tids.chunks_exact(TID_SIZE).enumerate() {
        if deleted.next_if_eq(&index).is_some() {
            continue;
        }
        if left > 1 {
            new.try_extend_from_slice(tid).map_err(no_room)?;
        } else {
            new[..TID_SIZE].copy_from_slice(tid);
        }
    }
    if deleted.next().is_some() {
        return Err(inconsistent);
    }
    if left > 1 {
        new.try_extend_from_slice(&[0; 8][..size - new.len()]).map_err(no_room)?;
        make_posting(&mut new, size, key_size, left);
    } else {
        let info = u16_at(&new, 6) & !(INDEX_SIZE_MASK | INDEX_ALT_TID_MASK);
        put_u16(&mut new, 6, info | size as u16);
        // The item is stored with its padding; a key ends at a multiple of 8, so that there is none.
        new.try_extend_from_slice(&[0; 8][..maxalign(size) - size]).map_err(no_room)?;
    }
    index_tuple_overwrite(page, update.offset, &new)
}

/// Block 0 of `DEDUP` (`btree_xlog_dedup`): runs of tuples become one each, and the page is rewritten.
pub fn dedup(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        let dedup = Dedup::parse(redo.record.main_data, redo.block.data).ok_or(SHORT)?;
        let mut opaque = Opaque::of(redo.page.get())?;
        let old: PageBytes = *redo.page.0;
        let old = Page(&old);
        redo.page.init(Opaque::SIZE);
        opaque.flags &= !BTP_HAS_GARBAGE;
        opaque.put(&mut redo.page);
        rebuild(&mut redo.page, old, opaque.first_data_key(), &dedup)?;
        redo.changed();
    }
    Ok(())
}

/// Fills an empty page with the old one's tuples, merged where the record says so.
fn rebuild(new: &mut PageMut<'_>, old: Page<'_>, first: OffsetNumber, dedup: &Dedup<'_>) -> Result<(), RedoError> {
    let append = |new: &mut PageMut<'_>, item: &[u8]| {
        let next = new.get().max_offset() + 1;
        add_index_item(new, item, next)
    };
    if first > P_HIKEY {
        append(new, index_tuple::item(old, P_HIKEY)?)?;
    }
    let inconsistent = RedoError::CorruptRecord("deduplication intervals do not fit the page");
    let last = old.max_offset();
    let mut intervals = dedup.intervals().peekable();
    let mut number = first;
    while number <= last {
        let run = match intervals.next_if(|(base, _)| *base == number) {
            Some((_, count)) if count < 2 || count > last - number + 1 => return Err(inconsistent),
            Some((_, count)) => count,
            None => 1,
        };
        if run == 1 {
            append(new, Parts::of(index_tuple::item(old, number)?)?.tuple)?;
        } else {
            merge(new, old, number, run)?;
        }
        number += run;
    }
    if intervals.next().is_some() { Err(inconsistent) } else { Ok(()) }
}

/// Appends one tuple with the TIDs of `run` tuples of the old page (`_bt_dedup_finish_pending`, `_bt_form_posting`).
fn merge(new: &mut PageMut<'_>, old: Page<'_>, first: OffsetNumber, run: u16) -> Result<(), RedoError> {
    let numbers = first..first + run;
    let mut count = 0;
    for number in numbers.clone() {
        count += Parts::of(index_tuple::item(old, number)?)?.count();
    }
    let Parts { tuple: base, key_size, .. } = Parts::of(index_tuple::item(old, first)?)?;
    let size = maxalign(key_size + TID_SIZE * count);
    if size > MAX_ITEM_SIZE || count < 2 {
        return Err(RedoError::CorruptPage("equal index tuples are too many for a posting list"));
    }
    let lower = new.get().lower() + ITEM_ID_SIZE;
    let upper = match new.get().upper().checked_sub(size) {
        Some(upper) if lower <= upper => upper,
        _ => return Err(RedoError::NoRoom(size)),
    };
    let next = new.get().max_offset() + 1;
    new.set_item_id(next, ItemId::normal(upper, size));
    new.set_lower(lower);
    new.set_upper(upper);
    // The page was zeroed, so what is not written is padding.
    let tuple = &mut new.0[upper..upper + size];
    tuple[..key_size].copy_from_slice(&base[..key_size]);
    make_posting(tuple, size, key_size, count);
    let mut at = key_size;
    for number in numbers {
        let tids = Parts::of(index_tuple::item(old, number)?)?.tids;
        tuple[at..at + tids.len()].copy_from_slice(tids);
        at += tids.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tid(number: u16) -> Tid {
        index_tuple::make_tid(7, number)
    }

    /// A tuple with an 8-byte key and these TIDs.
    fn tuple(key: u8, tids: &[u16]) -> Vec<u8> {
        let mut tuple = vec![key; 16];
        put_u16(&mut tuple, 6, 16);
        match tids {
            [one] => tuple[..6].copy_from_slice(&tid(*one)),
            _ => {
                tids.iter().for_each(|one| tuple.extend(tid(*one)));
                tuple.resize(maxalign(tuple.len()), 0);
                let size = tuple.len();
                make_posting(&mut tuple, size, 16, tids.len());
            }
        }
        tuple
    }

    fn page_of(tuples: &[Vec<u8>]) -> PageBytes {
        let mut bytes = [0; BLCKSZ];
        let mut page = PageMut(&mut bytes);
        page.init(Opaque::SIZE);
        for (tuple, number) in tuples.iter().zip(1..) {
            add_index_item(&mut page, tuple, number).unwrap();
        }
        bytes
    }

    #[test]
    fn a_posting_list_is_laid_out_as_postgresql_does() {
        let tuple = tuple(1, &[3, 9]);
        assert_eq!(tuple[..8], [0, 0, 16, 0, 0x02, 0x20, 32, 0x20]);
        assert_eq!(tuple[16..], [0, 0, 7, 0, 3, 0, 0, 0, 7, 0, 9, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn swapping_keeps_order_and_drops_the_last_tid() {
        let mut list = tuple(1, &[2, 4, 6, 8]);
        assert_eq!(swap(&mut list, tid(5), 2), Ok(tid(8)));
        assert_eq!(list, tuple(1, &[2, 4, 5, 6]));
        assert_eq!(swap(&mut list, tid(3), 1), Ok(tid(6)));
        assert_eq!(list, tuple(1, &[2, 3, 4, 5]));
        for at in [0, 4, 500] {
            assert!(swap(&mut list, tid(1), at).is_err());
        }
        assert!(swap(&mut tuple(1, &[2]), tid(1), 1).is_err());
    }

    #[test]
    fn removing_tids_shortens_the_tuple() {
        let numbers: Vec<u8> = [2u16, 1, 3].iter().flat_map(|n| n.to_le_bytes()).collect();
        let removed = |from: &[u16], numbers: &[u8]| {
            let mut bytes = page_of(&[tuple(9, &[1]), tuple(1, from)]);
            let mut data = Vec::from(2u16.to_le_bytes());
            data.extend(numbers);
            let removal = walrider_wal::records::btree::Removal::parse(0, 1, &data).unwrap();
            let update = removal.updates().next().unwrap().unwrap();
            remove_tids(&mut PageMut(&mut bytes), &update).map(|()| bytes)
        };
        let expected = page_of(&[tuple(9, &[1]), tuple(1, &[2, 6])]);
        let shortened = removed(&[2, 4, 6, 8], &numbers).unwrap();
        assert_eq!(index_tuple::item(Page(&shortened), 2).unwrap(), tuple(1, &[2, 6]));
        assert_eq!(Page(&shortened).upper(), Page(&expected).upper());
        let single = removed(&[2, 4, 6], &[2, 0, 0, 0, 1, 0]).unwrap();
        assert_eq!(index_tuple::item(Page(&single), 2).unwrap(), tuple(1, &[6]));
        assert!(removed(&[2, 4], &[2, 0, 0, 0, 1, 0]).is_err());
        assert!(removed(&[2, 4, 6], &[2, 0, 1, 0, 0, 0]).is_err());
        assert!(removed(&[2, 4, 6], &[1, 0, 3, 0]).is_err());
        assert!(removed(&[2], &[0, 0]).is_err());
    }

    #[test]
    fn deduplication_merges_runs() {
        let old = page_of(&[
            tuple(1, &[1]),
            tuple(2, &[2]),
            tuple(2, &[3, 4]),
            tuple(2, &[9]),
            tuple(3, &[5]),
            tuple(4, &[6]),
            tuple(4, &[7]),
        ]);
        let rebuilt = |intervals: &[(u16, u16)]| {
            let data: Vec<u8> =
                intervals.iter().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()].concat()).collect();
            let main = (intervals.len() as u16).to_le_bytes();
            let dedup = Dedup::parse(&main, &data).unwrap();
            let mut new = page_of(&[]);
            rebuild(&mut PageMut(&mut new), Page(&old), 1, &dedup).map(|()| new)
        };
        let expected = page_of(&[tuple(1, &[1]), tuple(2, &[2, 3, 4, 9]), tuple(3, &[5]), tuple(4, &[6, 7])]);
        assert!(rebuilt(&[(2, 3), (6, 2)]).unwrap() == expected);
        assert!(rebuilt(&[]).unwrap() == old);
        for wrong in [[(2, 3), (4, 2)], [(2, 1), (3, 2)], [(2, 3), (6, 3)], [(2, 3), (8, 2)], [(2, 0), (6, 2)]] {
            assert!(rebuilt(&wrong).is_err(), "{wrong:?}");
        }
    }
}
