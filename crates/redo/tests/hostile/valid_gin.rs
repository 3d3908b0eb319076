//! The same of GIN indexes. Pages of a split and vacuumed entry pages are images, and so not among them.

use walrider_layout::bytes::put_u16;
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::add_index_item;
use walrider_wal::records::gin::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::{Case, mark_gin};
use crate::valid::{block, longs, numbers};

const DATA: u16 = 1;
const LEAF: u16 = 2;
const LIST: u16 = 16;
const COMPRESSED: u16 = 128;

fn page(flags: u16) -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(8);
    mark_gin(page, 0, flags);
    bytes
}

fn tuple(key: u8) -> Vec<u8> {
    [vec![0, 0, 7, 0, 1, 0, 16, 0], vec![key; 8]].concat()
}

/// A page of the entry tree or the pending list.
fn tuples(flags: u16) -> Box<PageBytes> {
    let mut bytes = page(flags);
    (1..=8).for_each(|key| add_index_item(&mut PageMut(&mut bytes), &tuple(key), key.into()).expect("it fits"));
    bytes
}

/// A posting list that begins with item (0,`first`).
fn list(first: u8, rest: &[u8]) -> Vec<u8> {
    let mut list = [&[0, 0, 0, 0, first, 0, rest.len() as u8, 0], rest].concat();
    list.resize(list.len().next_multiple_of(2), 0);
    list
}

/// A page of a posting tree.
fn data(flags: u16, count: u16, data: &[u8]) -> Box<PageBytes> {
    let mut bytes = page(DATA | flags);
    bytes[32..32 + data.len()].copy_from_slice(data);
    put_u16(&mut bytes[..], 12, 32 + data.len() as u16);
    mark_gin(&mut PageMut(&mut bytes), count, DATA | flags);
    bytes
}

/// One case of every kind of change.
pub fn cases() -> Vec<Case> {
    let gin = |name, info, main, blocks, page| Case { name, rmgr: RmgrId::GIN, info, main, blocks, page };
    let none = Vec::new;
    let lists =
        || [list(1, &[1, 2, 3]), list(20, &[1, 0x81, 2]), list(200, &[0xFF, 0xFF, 3, 9]), list(210, &[])].concat();
    let leaf = || data(LEAF | COMPRESSED, 0, &lists());
    let inner = || data(0, 3, &[[0, 0, 3, 0, 0, 0, 1, 0, 1, 0]; 3].concat());
    let items = [0, 0, 0, 0, 22, 0, 0, 0, 1, 0, 9, 0];
    let actions =
        || [&[4, 0][..], &[0, 2], &list(1, &[1]), &[1, 4, 2, 0], &items, &[2, 1], &[3, 3], &list(250, &[5])].concat();
    let meta = [7; 56];
    let update = |prev_tail, ntuples| [vec![9; 16], meta.to_vec(), longs(&[prev_tail, 8, ntuples, 0])].concat();
    vec![
        gin(
            "CREATE_PTREE",
            XLOG_GIN_CREATE_PTREE,
            [longs(&[lists().len() as u32]), lists()].concat(),
            vec![block(0, true, none())],
            page(0),
        ),
        gin(
            "INSERT into an entry leaf",
            XLOG_GIN_INSERT,
            numbers(&[LEAF]),
            vec![block(0, false, [numbers(&[3, 1]), tuple(9)].concat())],
            tuples(LEAF),
        ),
        gin(
            "INSERT into an inner entry page",
            XLOG_GIN_INSERT,
            numbers(&[0, 0, 4, 0, 5]),
            vec![block(0, false, [numbers(&[3, 0]), tuple(9)].concat()), block(1, false, none())],
            tuples(0),
        ),
        gin(
            "INSERT into a leaf of a posting tree",
            XLOG_GIN_INSERT,
            numbers(&[DATA | LEAF]),
            vec![block(0, false, actions())],
            leaf(),
        ),
        gin(
            "INSERT into an inner page of a posting tree",
            XLOG_GIN_INSERT,
            numbers(&[DATA, 0, 4, 0, 5]),
            vec![block(0, false, numbers(&[2, 0, 4, 0, 1, 1])), block(1, false, none())],
            inner(),
        ),
        gin(
            "SPLIT, child",
            XLOG_GIN_SPLIT,
            [vec![0; 24], numbers(&[DATA, 0])].concat(),
            vec![block(3, false, none())],
            leaf(),
        ),
        gin("VACUUM_DATA_LEAF_PAGE", XLOG_GIN_VACUUM_DATA_LEAF_PAGE, none(), vec![block(0, false, actions())], leaf()),
        gin(
            "VACUUM_DATA_LEAF_PAGE of 9.3",
            XLOG_GIN_VACUUM_DATA_LEAF_PAGE,
            none(),
            vec![block(0, false, [&[1, 0, 0, 4, 2, 0][..], &items].concat())],
            data(LEAF, 2, &[0, 0, 0, 0, 22, 0, 0, 0, 1, 0, 8, 0]),
        ),
        gin(
            "DELETE_PAGE",
            XLOG_GIN_DELETE_PAGE,
            [numbers(&[2, 0]), longs(&[5, 740])].concat(),
            vec![block(0, false, none()), block(1, false, none()), block(2, false, none())],
            inner(),
        ),
        gin(
            "UPDATE_META_PAGE, more tuples",
            XLOG_GIN_UPDATE_META_PAGE,
            update(u32::MAX, 2),
            vec![block(0, true, none()), block(1, false, [tuple(9), tuple(10)].concat())],
            tuples(LIST),
        ),
        gin(
            "UPDATE_META_PAGE, a new page",
            XLOG_GIN_UPDATE_META_PAGE,
            update(7, 0),
            vec![block(0, true, none()), block(1, false, none())],
            tuples(LIST),
        ),
        gin(
            "INSERT_LISTPAGE",
            XLOG_GIN_INSERT_LISTPAGE,
            longs(&[u32::MAX, 2]),
            vec![block(0, true, [tuple(9), tuple(10)].concat())],
            page(0),
        ),
        gin(
            "DELETE_LISTPAGE",
            XLOG_GIN_DELETE_LISTPAGE,
            [meta.to_vec(), longs(&[2, 0])].concat(),
            vec![block(0, true, none()), block(1, true, none()), block(2, true, none())],
            page(LIST),
        ),
    ]
}
