//! Records that make sense, with a page that each of their blocks fits.

use walrider_layout::bytes::{put_u16, put_u32};
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, ForkNumber, PageBytes};
use walrider_redo::items::{AtExisting, ItemsOf, add_item};
use walrider_wal::records::btree::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::{Block, Case};

/// A leaf tuple of 16 bytes, or one with a posting list behind them.
fn leaf_tuple(key: u8, tids: &[u16]) -> Vec<u8> {
    let tid = |number: u16| [[0; 2], [7, 0], number.to_le_bytes()].concat();
    let mut tuple = vec![key; 16];
    put_u16(&mut tuple, 6, 16);
    if let [one] = tids {
        tuple[..6].copy_from_slice(&tid(*one));
        return tuple;
    }
    tids.iter().for_each(|number| tuple.extend(tid(*number)));
    tuple.resize(tuple.len().next_multiple_of(8), 0);
    let size = tuple.len() as u16;
    tuple[..6].copy_from_slice(&[[0, 0], [16, 0], (tids.len() as u16 | 0x2000).to_le_bytes()].concat());
    put_u16(&mut tuple, 6, size | 0x2000);
    tuple
}

/// A leaf with a high key, plain tuples and posting lists.
fn leaf() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(16);
    put_u32(page.0, BLCKSZ - 12, 9);
    put_u16(page.0, BLCKSZ - 4, 1);
    let tuples =
        [(9, &[1][..]), (1, &[1]), (2, &[3, 5, 7, 9]), (2, &[11]), (3, &[1]), (3, &[2, 4]), (4, &[1]), (5, &[1])];
    for (key, tids) in tuples {
        add_item(page, &leaf_tuple(key, tids), 0, AtExisting::Overwrite, ItemsOf::Index).expect("it fits");
    }
    bytes
}

/// A heap page with a few tuples of one integer.
fn heap() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(0);
    for number in 1..=8u16 {
        let mut tuple = [0; 28];
        put_u32(&mut tuple, 0, 700);
        put_u16(&mut tuple, 16, number);
        put_u16(&mut tuple, 18, 1);
        put_u16(&mut tuple, 20, 0x0902);
        tuple[22] = 24;
        add_item(page, &tuple, 0, AtExisting::Overwrite, ItemsOf::Heap).expect("it fits");
    }
    bytes
}

/// Numbers of 2 bytes in a row.
pub fn numbers(numbers: &[u16]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Numbers of 4 bytes in a row.
pub fn longs(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

pub fn block(id: u8, will_init: bool, data: Vec<u8>) -> Block {
    Block { id, fork: ForkNumber::Main, number: 3 + u32::from(id), will_init, data }
}

/// One case of nearly every kind of change.
pub fn cases() -> Vec<Case> {
    let btree = |name, info, main, blocks| Case { name, rmgr: RmgrId::BTREE, info, main, blocks, page: leaf() };
    let heap = |name, info, main, blocks| Case { name, rmgr: RmgrId::HEAP, info, main, blocks, page: heap() };
    let meta = || longs(&[4, 3, 1, 3, 1, 0, 1]);
    let right = || [leaf_tuple(5, &[1]), leaf_tuple(4, &[1]), leaf_tuple(9, &[1])].concat();
    let split = |new_item, posting: u16| [longs(&[0]), numbers(&[7, new_item, posting])].concat();
    let left = |key, tid| [leaf_tuple(key, &[tid]), leaf_tuple(4, &[1])].concat();
    let none = Vec::new;
    vec![
        btree("INSERT_LEAF", XLOG_BTREE_INSERT_LEAF, numbers(&[3]), vec![block(0, false, leaf_tuple(2, &[2]))]),
        btree(
            "INSERT_META",
            XLOG_BTREE_INSERT_META,
            numbers(&[3]),
            vec![block(0, false, leaf_tuple(2, &[2])), block(1, false, none()), block(2, true, meta())],
        ),
        btree(
            "INSERT_POST",
            XLOG_BTREE_INSERT_POST,
            numbers(&[4]),
            vec![block(0, false, [numbers(&[2]), leaf_tuple(2, &[6])].concat())],
        ),
        btree(
            "SPLIT_L",
            XLOG_BTREE_SPLIT_L,
            split(3, 0),
            vec![block(0, false, left(2, 2)), block(1, true, right()), block(2, false, none())],
        ),
        btree(
            "SPLIT_L with posting list",
            XLOG_BTREE_SPLIT_L,
            split(4, 2),
            vec![block(0, false, left(2, 6)), block(1, true, right())],
        ),
        btree(
            "SPLIT_R",
            XLOG_BTREE_SPLIT_R,
            split(8, 0),
            vec![block(0, false, leaf_tuple(4, &[1])), block(1, true, right())],
        ),
        btree("DEDUP", XLOG_BTREE_DEDUP, numbers(&[2]), vec![block(0, false, numbers(&[3, 2, 5, 2]))]),
        btree(
            "DELETE",
            XLOG_BTREE_DELETE,
            [longs(&[700]), numbers(&[3, 1]), vec![0]].concat(),
            vec![block(0, false, numbers(&[2, 4, 5, 3, 2, 0, 2]))],
        ),
        btree("VACUUM", XLOG_BTREE_VACUUM, numbers(&[1, 2]), vec![block(0, false, numbers(&[4, 3, 6, 1, 3, 1, 0]))]),
        btree(
            "MARK_PAGE_HALFDEAD",
            XLOG_BTREE_MARK_PAGE_HALFDEAD,
            [numbers(&[3, 0]), longs(&[5, 4, 6, u32::MAX])].concat(),
            vec![block(0, true, none()), block(1, false, none())],
        ),
        btree(
            "UNLINK_PAGE_META",
            XLOG_BTREE_UNLINK_PAGE_META,
            longs(&[4, 6, 1, 0, 700, 0, 1, 2, 3]),
            vec![
                block(0, true, none()),
                block(1, false, none()),
                block(2, false, none()),
                block(3, true, none()),
                block(4, true, meta()),
            ],
        ),
        btree(
            "NEWROOT",
            XLOG_BTREE_NEWROOT,
            longs(&[3, 1]),
            vec![block(0, true, right()), block(1, false, none()), block(2, true, meta())],
        ),
        heap(
            "INSERT",
            0x00,
            vec![9, 0, 0],
            vec![block(0, false, [numbers(&[1, 0x0802]), vec![24, 0, 42, 0, 0, 0]].concat())],
        ),
        heap("DELETE", 0x10, [longs(&[740]), vec![3, 0, 0, 0]].concat(), vec![block(0, false, none())]),
        heap(
            "HOT_UPDATE",
            0x40,
            [longs(&[740]), vec![3, 0, 0, 0], longs(&[0]), vec![9, 0]].concat(),
            vec![block(0, false, [numbers(&[1, 0x2802]), vec![24, 0, 42, 0, 0, 0]].concat())],
        ),
        heap("LOCK", 0x60, [longs(&[740]), vec![3, 0, 0, 0]].concat(), vec![block(0, false, none())]),
        Case {
            name: "Sequence/LOG",
            rmgr: RmgrId::SEQ,
            info: 0,
            main: [longs(&[1663, 5, 16384]), vec![1; 41]].concat(),
            blocks: vec![block(0, true, none())],
            page: leaf(),
        },
    ]
}
