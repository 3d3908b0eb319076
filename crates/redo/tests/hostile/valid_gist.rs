//! The same of GiST indexes, and generic records.

use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::add_index_item;
use walrider_wal::records::gist::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::{Block, Case, mark_gist};
use crate::valid::{block, longs, numbers};

fn tuple(key: u8) -> Vec<u8> {
    [vec![0, 0, 7, 0, 0xFF, 0xFF, 16, 0], vec![key; 8]].concat()
}

/// A leaf with so many tuples.
fn leaf(count: u8) -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(16);
    mark_gist(page, 1);
    (1..=count).for_each(|key| add_index_item(page, &tuple(key), key.into()).expect("it fits"));
    bytes
}

/// One case of every kind of change, the deletion of a leaf apart: that needs a page without tuples.
pub fn cases() -> Vec<Case> {
    let gist = |name, info, main, blocks| Case { name, rmgr: RmgrId::GIST, info, main, blocks, page: leaf(8) };
    let half = |number, will_init| block(number, will_init, [longs(&[2]), tuple(1), tuple(2)].concat());
    let deletion = || [longs(&[740, 0]), numbers(&[3])].concat();
    let splitting = longs(&[7, 0, 0x10, 2, 0x0002_0001, 1]);
    vec![
        gist(
            "one for one",
            XLOG_GIST_PAGE_UPDATE,
            numbers(&[1, 1]),
            vec![block(0, false, [numbers(&[3]), tuple(9)].concat()), block(1, false, vec![])],
        ),
        gist(
            "PAGE_UPDATE",
            XLOG_GIST_PAGE_UPDATE,
            numbers(&[3, 2]),
            vec![block(0, false, [numbers(&[1, 3, 4]), tuple(9), tuple(10)].concat())],
        ),
        gist(
            "DELETE",
            XLOG_GIST_DELETE,
            [longs(&[740]), numbers(&[2, 0, 5, 6])].concat(),
            vec![block(0, false, vec![])],
        ),
        gist(
            "PAGE_SPLIT",
            XLOG_GIST_PAGE_SPLIT,
            splitting.clone(),
            vec![block(0, false, vec![]), half(1, true), half(2, true)],
        ),
        gist(
            "PAGE_SPLIT of the root",
            XLOG_GIST_PAGE_SPLIT,
            splitting,
            vec![Block { number: 0, ..half(1, true) }, half(2, true)],
        ),
        gist("PAGE_DELETE, parent", XLOG_GIST_PAGE_DELETE, deletion(), vec![block(1, false, vec![])]),
        Case {
            name: "PAGE_DELETE, leaf",
            rmgr: RmgrId::GIST,
            info: XLOG_GIST_PAGE_DELETE,
            main: deletion(),
            blocks: vec![block(0, false, vec![])],
            page: leaf(0),
        },
        Case {
            name: "Generic",
            rmgr: RmgrId::GENERIC,
            info: 0,
            main: vec![],
            blocks: vec![block(0, false, numbers(&[40, 2, 7, 8190, 2, 9])), block(2, false, vec![])],
            page: leaf(8),
        },
    ]
}
