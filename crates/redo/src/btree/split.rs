//! Redo of page splits (`btree_xlog_split` in `access/nbtree/nbtxlog.c`, PostgreSQL 18).

use walrider_layout::page::Page;
use walrider_layout::{OffsetNumber, PageBytes, maxalign};
use walrider_wal::records::btree::Split;

use super::page::{self, BTP_INCOMPLETE_SPLIT, BTP_LEAF, Opaque, P_HIKEY, P_NONE};
use super::{SHORT, posting};
use crate::index_tuple::{self, TID_SIZE, Tid};
use crate::items::add_index_item;
use crate::special::Special;
use crate::{BlockRedo, RedoError};

fn parse(redo: &BlockRedo<'_, '_>) -> Result<Split, RedoError> {
    Split::parse(redo.record.main_data).ok_or(SHORT)
}

/// Takes one tuple, with its padding, from the front of block data.
fn take_tuple<'d>(data: &mut &'d [u8]) -> Result<&'d [u8], RedoError> {
    let (tuple, rest) = data.split_at_checked(maxalign(index_tuple::tuple_size(data)?)).ok_or(SHORT)?;
    *data = rest;
    Ok(tuple)
}

/// The tuples of the left page, one behind the other.
struct LeftPage<'r, 'p, 'x> {
    redo: &'x mut BlockRedo<'r, 'p>,
    next: OffsetNumber,
}

impl LeftPage<'_, '_, '_> {
    fn push(&mut self, item: &[u8]) -> Result<(), RedoError> {
        add_index_item(&mut self.redo.page, item, self.next)?;
        self.next += 1;
        Ok(())
    }

    /// Where the last pushed item is.
    fn last(&mut self) -> &mut [u8] {
        let upper = self.redo.page.get().upper();
        &mut self.redo.page.0[upper..]
    }
}

/// Block 0: the page that was split keeps the items on the left, and perhaps the new one.
///
/// It is rewritten, in the order of line pointers, as PostgreSQL does. If the new tuple's TID falls into a posting
/// list, the list takes it and gives its last TID to the new tuple; that list is on the left, even where the new tuple
/// goes right.
pub fn left(redo: &mut BlockRedo<'_, '_>, new_item_on_left: bool) -> Result<(), RedoError> {
    if !redo.needs_redo()? {
        return Ok(());
    }
    let split = parse(redo)?;
    let right = redo.block_number(1)?;
    let mut data = redo.block.data;
    let has_new_item = new_item_on_left || split.posting != 0;
    let new_item = if has_new_item { take_tuple(&mut data)? } else { &[] };
    let high_key = take_tuple(&mut data)?;
    if !data.is_empty() {
        return Err(RedoError::DataLength("left page of a split"));
    }

    let mut opaque = Opaque::of(redo.page.get())?;
    let old: PageBytes = *redo.page.0;
    let old = Page(&old);
    redo.page.init(Opaque::SIZE);
    let mut left = LeftPage { redo, next: P_HIKEY };
    left.push(high_key)?;
    let replaced = if split.posting == 0 { 0 } else { split.new_item.wrapping_sub(1) };
    let mut new_tid: Option<Tid> = None;
    let mut number = opaque.first_data_key();
    loop {
        if new_item_on_left && number == split.new_item {
            left.push(new_item)?;
            if split.posting != 0 {
                let tid = new_tid.ok_or(RedoError::CorruptRecord("posting list of a split is not on the left"))?;
                left.last()[..TID_SIZE].copy_from_slice(&tid);
            }
        }
        if number >= split.first_right {
            break;
        }
        let item = index_tuple::item(old, number)?;
        if number == replaced {
            let size = maxalign(index_tuple::tuple_size(item)?);
            left.push(item.get(..size).ok_or(RedoError::LinePointer(number))?)?;
            new_tid = Some(posting::swap(&mut left.last()[..size], index_tuple::tid(new_item)?, split.posting)?);
        } else {
            left.push(item)?;
        }
        number += 1;
    }
    if split.posting != 0 && new_tid.is_none() {
        return Err(RedoError::CorruptRecord("posting list of a split is not on the left"));
    }
    opaque.flags = BTP_INCOMPLETE_SPLIT | leaf_flag(&split);
    opaque.next = right;
    opaque.cycle_id = 0;
    opaque.put(&mut redo.page);
    redo.changed();
    Ok(())
}

fn leaf_flag(split: &Split) -> u16 {
    if split.level == 0 { BTP_LEAF } else { 0 }
}

/// Block 1: the new page on the right comes whole with the record.
pub fn right(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let split = parse(redo)?;
    let prev = redo.block_number(0)?;
    let next = redo.record.block(2).map_or(P_NONE, |block| block.block);
    redo.init_with(&Opaque { prev, next, level: split.level, flags: leaf_flag(&split), cycle_id: 0 })?;
    page::restore_items(&mut redo.page, redo.block.data)?;
    redo.changed();
    Ok(())
}

/// Block 2: what was to the right of the old page has a new left sibling.
pub fn next(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    let right = redo.block_number(1)?;
    redo.change_special(|opaque: &mut Opaque| opaque.prev = right)
}

#[cfg(test)]
mod tests {
    use walrider_layout::bytes::put_u16;
    use walrider_layout::page::PageMut;
    use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major};
    use walrider_wal::records::btree::{XLOG_BTREE_SPLIT_L, XLOG_BTREE_SPLIT_R};
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    use super::*;
    use crate::{Effects, Env, Target, redo_block};

    fn plain(key: u8, tid: u16) -> Vec<u8> {
        let mut tuple = vec![key; 16];
        tuple[..TID_SIZE].copy_from_slice(&index_tuple::make_tid(7, tid));
        put_u16(&mut tuple, 6, 16);
        tuple
    }

    fn posting_list(key: u8, tids: &[u16]) -> Vec<u8> {
        let mut tuple = vec![key; 16];
        tuple[..TID_SIZE].copy_from_slice(&index_tuple::make_tid(16, tids.len() as u16 | 0x2000));
        tids.iter().for_each(|tid| tuple.extend(index_tuple::make_tid(7, *tid)));
        tuple.resize(maxalign(tuple.len()), 0);
        let size = tuple.len() as u16;
        put_u16(&mut tuple, 6, size | page::INDEX_ALT_TID_MASK);
        tuple
    }

    /// Splits a leaf whose third item is a posting list of 3, 5, 7, 9, into which TID 6 goes; the items on the left.
    fn split_at(info: u8, first_right: u8, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut bytes = [0; BLCKSZ];
        let mut page = PageMut(&mut bytes);
        page.init(Opaque::SIZE);
        Opaque { next: 8, flags: BTP_LEAF, cycle_id: 5, ..Opaque::default() }.put(&mut page);
        let items = [plain(9, 1), plain(1, 1), posting_list(2, &[3, 5, 7, 9]), plain(3, 1), plain(4, 1)];
        for (item, number) in items.iter().zip(1..) {
            add_index_item(&mut page, item, number).unwrap();
        }
        let record = RecordBuilder::new(RmgrId::BTREE, info)
            .main_data([0, 0, 0, 0, first_right, 0, 4, 0, 2, 0])
            .block(0, TEST_REL, ForkNumber::Main, 3)
            .data(data.concat())
            .block(1, TEST_REL, ForkNumber::Main, 20)
            .build();
        let record = RecordBuilder::parse(&record, Lsn(0x28));
        let env = Env { major: Major::V18, hint_bits_are_logged: true };
        let mut target = Target { bytes: &mut bytes, exists: true, dirty: false };
        redo_block(&record, &record.blocks[0], &mut target, &env, &mut Effects::default()).unwrap();
        let page = Page(&bytes);
        let opaque = Opaque::of(page).unwrap();
        assert_eq!((opaque.next, opaque.flags, opaque.cycle_id), (20, BTP_LEAF | BTP_INCOMPLETE_SPLIT, 0));
        (1..=page.max_offset()).map(|number| index_tuple::item(page, number).unwrap().to_vec()).collect()
    }

    #[test]
    fn a_posting_list_on_the_left_passes_its_last_tid_to_the_new_tuple() {
        let items = split_at(XLOG_BTREE_SPLIT_L, 5, &[plain(2, 6), plain(4, 1)]);
        assert_eq!(items, [plain(4, 1), plain(1, 1), posting_list(2, &[3, 5, 6, 7]), plain(2, 9), plain(3, 1)]);
    }

    /// The new tuple is the first one on the right, and in the record only for the sake of the list.
    #[test]
    fn a_posting_list_that_is_last_on_the_left_is_changed_too() {
        let items = split_at(XLOG_BTREE_SPLIT_R, 4, &[plain(2, 6), plain(2, 9)]);
        assert_eq!(items, [plain(2, 9), plain(1, 1), posting_list(2, &[3, 5, 6, 7])]);
    }
}
