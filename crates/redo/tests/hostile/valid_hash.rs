//! The same of hash indexes. SPLIT_PAGE is not among them: it consists of an image.

use walrider_layout::bytes::{put_u16, put_u32};
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::add_index_item;
use walrider_wal::records::hash::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::{Block, Case};
use crate::valid::{block, longs, numbers};

fn tuple(key: u8) -> Vec<u8> {
    [vec![0, 0, 7, 0, key, 0, 16, 0], vec![key; 4], vec![0; 4]].concat()
}

/// The first page of a bucket, with a few tuples.
fn bucket() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(16);
    put_u16(page.0, BLCKSZ - 4, 0x82);
    put_u16(page.0, BLCKSZ - 2, 0xFF80);
    (1..=8).for_each(|key| add_index_item(page, &tuple(key), key.into()).expect("it fits"));
    bytes
}

/// The metapage of an index of 8 buckets, one overflow page, and one bitmap page.
fn meta() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(16);
    page.set_lower(4568);
    for (at, value) in [(24, 7), (28, 15), (32, 7), (36, 3), (40, 1), (44, 1), (52 + 4 * 3, 2), (444, 9)] {
        put_u32(page.0, 24 + at, value);
    }
    bytes
}

/// One case of every kind of change to pages with tuples, and one to the metapage.
pub fn cases() -> Vec<Case> {
    let case = |name, info, main, blocks, page| Case { name, rmgr: RmgrId::HASH, info, main, blocks, page };
    let hash = |name, info, main, blocks: Vec<Block>| case(name, info, main, blocks, bucket());
    let on_meta = |name, info, main, block: Block| case(name, info, main, vec![block], meta());
    let empty = |id| block(id, false, vec![]);
    let init_meta = [1_000_000f64.to_le_bytes().to_vec(), longs(&[400]), numbers(&[307])].concat();
    let allocate = || [longs(&[8]), numbers(&[0x22, 0x12]), vec![3]].concat();
    let squeeze = |same: [u8; 2]| [longs(&[3, u32::MAX]), numbers(&[2]), same.to_vec()].concat();
    let vacuum = || [longs(&[740]), numbers(&[3, 0, 2, 4, 5])].concat();
    let moved = || [numbers(&[1, 4]), tuple(0), tuple(3)].concat();
    vec![
        hash("INIT_META_PAGE", XLOG_HASH_INIT_META_PAGE, init_meta, vec![block(0, true, vec![])]),
        hash("INIT_BITMAP_PAGE", XLOG_HASH_INIT_BITMAP_PAGE, numbers(&[4096]), vec![block(0, true, vec![])]),
        on_meta("INIT_BITMAP_PAGE, meta", XLOG_HASH_INIT_BITMAP_PAGE, numbers(&[4096]), empty(1)),
        hash("INSERT", XLOG_HASH_INSERT, numbers(&[3]), vec![block(0, false, tuple(2))]),
        on_meta("INSERT, meta", XLOG_HASH_INSERT, numbers(&[3]), empty(1)),
        hash(
            "ADD_OVFL_PAGE",
            XLOG_HASH_ADD_OVFL_PAGE,
            vec![0, 16, 0],
            vec![block(0, true, longs(&[5])), empty(1), block(2, false, longs(&[1])), block(3, true, vec![])],
        ),
        on_meta("ADD_OVFL_PAGE, meta", XLOG_HASH_ADD_OVFL_PAGE, vec![0, 16, 0], block(4, false, longs(&[2]))),
        hash("SPLIT_ALLOCATE_PAGE", XLOG_HASH_SPLIT_ALLOCATE_PAGE, allocate(), vec![empty(0), block(1, true, vec![])]),
        on_meta(
            "SPLIT_ALLOCATE_PAGE, meta",
            XLOG_HASH_SPLIT_ALLOCATE_PAGE,
            allocate(),
            block(2, false, longs(&[15, 31, 4, 2])),
        ),
        hash("SPLIT_COMPLETE", XLOG_HASH_SPLIT_COMPLETE, numbers(&[0x42, 2]), vec![empty(0), empty(1)]),
        hash(
            "MOVE_PAGE_CONTENTS",
            XLOG_HASH_MOVE_PAGE_CONTENTS,
            vec![2, 0, 0],
            vec![empty(0), block(1, false, moved()), block(2, false, numbers(&[1, 3, 7]))],
        ),
        hash(
            "SQUEEZE_PAGE",
            XLOG_HASH_SQUEEZE_PAGE,
            squeeze([0, 0]),
            vec![empty(0), block(1, false, moved()), empty(2), empty(3), empty(4), block(5, false, longs(&[9]))],
        ),
        hash(
            "SQUEEZE_PAGE into the page before",
            XLOG_HASH_SQUEEZE_PAGE,
            squeeze([0, 1]),
            vec![block(1, false, moved())],
        ),
        on_meta("SQUEEZE_PAGE, meta", XLOG_HASH_SQUEEZE_PAGE, squeeze([1, 1]), block(6, false, longs(&[0]))),
        hash("DELETE", XLOG_HASH_DELETE, vec![1, 0], vec![empty(0), block(1, false, numbers(&[2, 3, 8]))]),
        hash("SPLIT_CLEANUP", XLOG_HASH_SPLIT_CLEANUP, vec![], vec![empty(0)]),
        on_meta("UPDATE_META_PAGE", XLOG_HASH_UPDATE_META_PAGE, 42f64.to_le_bytes().to_vec(), empty(0)),
        hash("VACUUM_ONE_PAGE", XLOG_HASH_VACUUM_ONE_PAGE, vacuum(), vec![empty(0)]),
        on_meta("VACUUM_ONE_PAGE, meta", XLOG_HASH_VACUUM_ONE_PAGE, vacuum(), empty(1)),
    ]
}
