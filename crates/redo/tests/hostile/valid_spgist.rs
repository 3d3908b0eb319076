//! The same of SP-GiST indexes.

use walrider_layout::bytes::put_u16;
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, PageBytes};
use walrider_redo::items::add_index_item;
use walrider_wal::records::spgist::*;
use walrider_wal::rmgr::RmgrId;

use crate::drive::{Case, mark_spgist};
use crate::valid::{block, longs, numbers};

/// An inner tuple with two nodes of 8 and 16 bytes.
fn inner() -> Vec<u8> {
    let mut tuple = [longs(&[2 << 3, 32]), vec![0xFF; 24]].concat();
    put_u16(&mut tuple, 14, 8);
    put_u16(&mut tuple, 22, 16);
    tuple
}

/// A tuple in one of the states that leaf tuples and dead ones have.
fn tuple(state: u32) -> Vec<u8> {
    [longs(&[state | 16 << 2]), numbers(&[0, 0, 9, 1]), longs(&[740])].concat()
}

/// A page that is inner page and leaf page at once: two inner tuples, three leaf tuples, a redirection, two placeholders.
fn page() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let page = &mut PageMut(&mut bytes);
    page.init(8);
    mark_spgist(page, 4);
    let tuples = [inner(), inner(), tuple(0), tuple(0), tuple(0), tuple(1), tuple(3), tuple(3)];
    (1..).zip(tuples).for_each(|(number, tuple)| add_index_item(page, &tuple, number).expect("it fits"));
    bytes
}

/// One case of every kind of change.
pub fn cases() -> Vec<Case> {
    let spgist = |name, info, main: &[&[u8]], init: [Option<bool>; 4]| {
        let blocks = (0..).zip(init).filter_map(|(id, init)| Some(block(id, init?, vec![]))).collect();
        Case { name, rmgr: RmgrId::SPGIST, info, main: main.concat(), blocks, page: page() }
    };
    const OLD: Option<bool> = Some(false);
    const NEW: Option<bool> = Some(true);
    let state = longs(&[740, 0]);
    let add_node = |new: u8, parent_block: u8, offset| {
        [numbers(&[2, offset]), vec![new, parent_block], numbers(&[1, 1, 0]), state.clone(), inner()].concat()
    };
    let pick_split = |root, init: [u8; 3], inner_is_parent, offsets: [u16; 3]| {
        let [delete, insert, inner_offset] = offsets;
        [
            [vec![root, 0], numbers(&[2, 2]), vec![init[0], init[1]], numbers(&[inner_offset]), vec![init[2], 0]]
                .concat(),
            [vec![inner_is_parent, 0], numbers(&[1, 1, 0]), state.clone()].concat(),
            [numbers(&[delete, 3, insert, insert]), vec![0, 1], inner(), tuple(0), tuple(0)].concat(),
        ]
        .concat()
    };
    vec![
        spgist(
            "ADD_LEAF",
            XLOG_SPGIST_ADD_LEAF,
            &[&[0, 0], &numbers(&[7, 3, 1, 1]), &tuple(0)],
            [OLD, OLD, None, None],
        ),
        spgist(
            "ADD_LEAF on a new page",
            XLOG_SPGIST_ADD_LEAF,
            &[&[1, 1], &numbers(&[1, 0, 1, 0]), &tuple(0)],
            [NEW, OLD, None, None],
        ),
        spgist(
            "ADD_LEAF for a dead one",
            XLOG_SPGIST_ADD_LEAF,
            &[&[0, 0], &numbers(&[3, 3, 0, 0]), &tuple(0)],
            [OLD, None, None, None],
        ),
        spgist(
            "MOVE_LEAFS",
            XLOG_SPGIST_MOVE_LEAFS,
            &[
                &[&numbers(&[3])[..], &[0, 0, 0, 0], &numbers(&[1, 1, 0]), &state].concat(),
                &numbers(&[5, 3, 4, 7, 8, 9, 10]),
                &tuple(0).repeat(4),
            ],
            [OLD, OLD, OLD, None],
        ),
        spgist(
            "MOVE_LEAFS for a dead one",
            XLOG_SPGIST_MOVE_LEAFS,
            &[&numbers(&[1]), &[1, 1, 0, 0], &numbers(&[1, 1, 0]), &state, &numbers(&[5, 1]), &tuple(0)],
            [OLD, NEW, OLD, None],
        ),
        spgist("ADD_NODE in place", XLOG_SPGIST_ADD_NODE, &[&add_node(0, 0xFF, 0)], [OLD, None, None, None]),
        spgist("ADD_NODE, old parent", XLOG_SPGIST_ADD_NODE, &[&add_node(1, 0, 1)], [OLD, NEW, None, None]),
        spgist("ADD_NODE, new parent", XLOG_SPGIST_ADD_NODE, &[&add_node(0, 1, 8)], [OLD, OLD, None, None]),
        spgist("ADD_NODE, other parent", XLOG_SPGIST_ADD_NODE, &[&add_node(0, 2, 8)], [OLD, OLD, OLD, None]),
        spgist(
            "SPLIT_TUPLE",
            XLOG_SPGIST_SPLIT_TUPLE,
            &[&numbers(&[2, 7]), &[0, 0], &inner(), &inner()],
            [OLD, OLD, None, None],
        ),
        spgist(
            "SPLIT_TUPLE on one page",
            XLOG_SPGIST_SPLIT_TUPLE,
            &[&numbers(&[2, 7]), &[0, 1], &inner(), &inner()],
            [OLD, None, None, None],
        ),
        spgist("PICKSPLIT", XLOG_SPGIST_PICKSPLIT, &[&pick_split(0, [0; 3], 0, [5, 7, 8])], [OLD; 4]),
        spgist(
            "PICKSPLIT beside the parent",
            XLOG_SPGIST_PICKSPLIT,
            &[&pick_split(0, [1, 1, 0], 1, [5, 1, 8])],
            [NEW, NEW, OLD, None],
        ),
        spgist(
            "PICKSPLIT of the root",
            XLOG_SPGIST_PICKSPLIT,
            &[&pick_split(1, [0, 1, 1], 0, [5, 1, 1])],
            [None, NEW, NEW, None],
        ),
        spgist(
            "VACUUM_LEAF",
            XLOG_SPGIST_VACUUM_LEAF,
            &[&numbers(&[1, 1, 1, 1]), &state, &numbers(&[3, 4, 5, 7, 7, 0])],
            [OLD, None, None, None],
        ),
        spgist(
            "VACUUM_ROOT",
            XLOG_SPGIST_VACUUM_ROOT,
            &[&numbers(&[3, 0]), &state, &numbers(&[3, 4, 5])],
            [OLD, None, None, None],
        ),
        spgist(
            "VACUUM_REDIRECT",
            XLOG_SPGIST_VACUUM_REDIRECT,
            &[&numbers(&[1, 7]), &longs(&[740]), &[0, 0], &numbers(&[6])],
            [OLD, None, None, None],
        ),
    ]
}
