//! Operations on heap pages.

use walrider_layout::bytes::{put_u16, put_u32};
use walrider_layout::page::{ItemId, PageMut};
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::{AtExisting, ItemsOf, add_item};
use walrider_wal::records::heap::*;
use walrider_wal::records::heap2::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::Case;
use crate::valid::{block, longs, numbers};

/// A row of pgbench's largest table.
const ACCOUNT: usize = 121;

/// A tuple of so many bytes, with its header.
fn tuple(len: usize) -> Vec<u8> {
    let mut tuple: Vec<u8> = (0..len).map(|at| at as u8).collect();
    put_u32(&mut tuple, 0, 700);
    put_u16(&mut tuple, 18, 4);
    put_u16(&mut tuple, 20, 0x0902);
    tuple[22] = 24;
    tuple
}

fn empty() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    PageMut(&mut bytes).init(0);
    bytes
}

fn add(bytes: &mut PageBytes, len: usize, number: u16) {
    add_item(&mut PageMut(bytes), &tuple(len), number, AtExisting::Overwrite, ItemsOf::Heap).expect("it fits");
}

/// A page of so many tuples.
fn filled(count: usize, len: usize) -> Box<PageBytes> {
    let mut bytes = empty();
    (0..count).for_each(|_| add(&mut bytes, len, 0));
    bytes
}

/// Prunes a page of pgbench's accounts on which one row was just updated and so many before: their line pointers lead
/// to those behind all of the rows. If `reused`, the first of these was free, and so got the tuple that lies lowest.
fn prune_account(name: &'static str, updated: u16, reused: bool, variant: u16) -> Case {
    const ROWS: u16 = 59;
    // Another one for each update, as the number of rows is a prime.
    let row = |update: u16| update * (1 + variant) % ROWS + 1;
    let is_redirected = |number: &u16| (1..=updated).any(|update| row(update) == *number);
    let mut order: Vec<u16> = (1..=ROWS + updated + 1).filter(|number| !is_redirected(number)).collect();
    if reused {
        order.retain(|number| *number != ROWS + 1);
        order.push(ROWS + 1);
    }
    let mut bytes = empty();
    PageMut(&mut bytes).set_lower(24 + 4 * usize::from(ROWS + updated + 1));
    order.into_iter().for_each(|number| add(&mut bytes, ACCOUNT, number));
    (1..=updated).for_each(|update| PageMut(&mut bytes).set_item_id(row(update), ItemId::redirect(ROWS + update)));
    prune(name, &[row(updated + 1), ROWS + updated + 1], &[], bytes)
}

/// 200 small tuples of two lengths, added in their order or from the last one on.
fn small(in_order: bool) -> Box<PageBytes> {
    let mut bytes = empty();
    let len = |number: u16| if number.is_multiple_of(3) { 28 } else { 32 };
    if in_order {
        (1..=200).for_each(|number| add(&mut bytes, len(number), number));
        return bytes;
    }
    let page = &mut PageMut(&mut bytes);
    page.set_lower(24 + 4 * 200);
    (1..=200).rev().for_each(|number| add(&mut bytes, len(number), number));
    bytes
}

/// A pruning that may move tuples.
fn prune(name: &'static str, redirected: &[u16], unused: &[u16], page: Box<PageBytes>) -> Case {
    let mut flags = XLHP_CLEANUP_LOCK;
    let mut data = Vec::new();
    if !redirected.is_empty() {
        flags |= XLHP_HAS_REDIRECTIONS;
        data.extend(numbers(&[redirected.len() as u16 / 2]));
        data.extend(numbers(redirected));
    }
    if !unused.is_empty() {
        flags |= XLHP_HAS_NOW_UNUSED_ITEMS;
        data.extend(numbers(&[unused.len() as u16]));
        data.extend(numbers(unused));
    }
    let blocks = vec![block(0, false, data)];
    Case { name, rmgr: RmgrId::HEAP2, info: XLOG_HEAP2_PRUNE_ON_ACCESS, main: vec![0, flags], blocks, page }
}

/// The operations.
pub fn cases() -> Vec<Case> {
    let case = |name, rmgr, info, main, blocks, page| Case { name, rmgr, info, main, blocks, page };
    let heap = |name, info, main, data, page| case(name, RmgrId::HEAP, info, main, vec![block(0, false, data)], page);
    let heap2 = |name, info, main, blocks, page| case(name, RmgrId::HEAP2, info, main, blocks, page);
    let carried = |infomask: u16| [numbers(&[4, infomask]), vec![24]].concat();
    // Of an account, all but its balance and some bytes of its header come from the old tuple.
    let from_old = XLH_UPDATE_PREFIX_FROM_OLD | XLH_UPDATE_SUFFIX_FROM_OLD;
    let update =
        |flags, old, new| [longs(&[740]), numbers(&[old]), vec![0, flags], longs(&[0]), numbers(&[new])].concat();
    let parts = [numbers(&[8, 85]), carried(0x2802), vec![0; 5]].concat();
    let whole = [carried(0x2802), vec![0; ACCOUNT - 23]].concat();
    let history = [carried(0x0802), vec![0; 29]].concat();
    let many = |count: usize| {
        let tuples = (0..count).map(|_| [numbers(&[39]), carried(0x0802), vec![0; 39]].concat());
        tuples.collect::<Vec<_>>().concat()
    };
    let mut cases = vec![
        heap("heap/HOT_UPDATE", XLOG_HEAP_HOT_UPDATE, update(from_old, 9, 61), parts, filled(60, ACCOUNT)),
        heap(
            "heap/HOT_UPDATE, whole tuple",
            XLOG_HEAP_HOT_UPDATE,
            update(0, 9, 61),
            whole.clone(),
            filled(60, ACCOUNT),
        ),
        heap("heap/UPDATE", XLOG_HEAP_UPDATE, update(0, 9, 61), whole, filled(60, ACCOUNT)),
        heap("heap/INSERT", XLOG_HEAP_INSERT, vec![101, 0, 0], history.clone(), filled(100, 52)),
        heap("heap/INSERT of little room", XLOG_HEAP_INSERT, vec![135, 0, 0], history, filled(134, 52)),
        heap("heap/DELETE", XLOG_HEAP_DELETE, [longs(&[740]), numbers(&[9, 0])].concat(), vec![], filled(60, ACCOUNT)),
        heap("heap/LOCK", XLOG_HEAP_LOCK, [longs(&[740]), numbers(&[9, 6])].concat(), vec![], filled(60, ACCOUNT)),
        heap2(
            "heap2/MULTI_INSERT of 60",
            XLOG_HEAP2_MULTI_INSERT,
            [numbers(&[0, 60]), (11..=70).flat_map(u16::to_le_bytes).collect()].concat(),
            vec![block(0, false, many(60))],
            filled(10, 61),
        ),
        heap2(
            "heap2/VISIBLE, heap page",
            XLOG_HEAP2_VISIBLE,
            [longs(&[740]), vec![3]].concat(),
            vec![block(1, false, vec![])],
            filled(60, ACCOUNT),
        ),
    ];
    cases.extend((0..50).map(|variant| prune_account("heap2/PRUNE 1 of 60", variant % 8, false, variant)));
    cases.extend(
        (0..50).map(|variant| prune_account("heap2/PRUNE 1 of 60, out of order", 4 + variant % 6, true, variant)),
    );
    for (name, in_order) in [("heap2/PRUNE 150 of 200", true), ("heap2/PRUNE 150 of 200, reversed", false)] {
        cases.extend((0..50).map(|variant| {
            let mut numbers: Vec<u16> = (1..=200).collect();
            numbers.sort_by_key(|number| number * (2 * variant + 1) % 211);
            prune(name, &[], &numbers[..150], small(in_order))
        }));
    }
    cases
}
