//! What the redo routines leave on small pages made by hand.

use walrider_layout::bytes::{put_u16, put_u32, u16_at};
use walrider_layout::page::{Page, PageMut};
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major, PageBytes};
use walrider_wal::records::spgist::*;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use crate::index_tuple::item;
use crate::items::add_index_item;
use crate::{Effects, Env, Outcome, RedoError, Target, redo_block};

const STATE: [u8; 8] = [0xE4, 2, 0, 0, 0, 0, 0, 0];
const BUILDING: [u8; 8] = [0xE4, 2, 0, 0, 1, 0, 0, 0];
/// A placeholder, and a dead head of a chain.
const PLACEHOLDER: [u8; 16] = [0x43, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0];
const DEAD: [u8; 16] = [0x42, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0];

/// A redirection to a place below block 256 by transaction 740.
fn redirect(block: u8, offset: u8) -> Vec<u8> {
    vec![0x41, 0, 0, 0, 0, 0, 0, 0, block, 0, offset, 0, 0xE4, 2, 0, 0]
}

/// A leaf tuple of 24 bytes and its successor.
fn leaf(key: u8, next: u16) -> Vec<u8> {
    let mut tuple = vec![key; 24];
    put_u32(&mut tuple, 0, 24 << 2);
    put_u16(&mut tuple, 4, next | 0x8000);
    tuple
}

/// An inner tuple with a prefix of 8 bytes and two nodes, with nowhere to go, of 8 and 16 bytes.
fn inner(key: u8) -> Vec<u8> {
    let mut tuple = vec![key; 40];
    put_u32(&mut tuple, 0, 2 << 3 | 8 << 16);
    put_u16(&mut tuple, 4, 40);
    tuple[16..24].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 8, 0]);
    tuple[24..32].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 16, 0]);
    tuple
}

/// The second node leads to a place below block 256.
fn linked(mut tuple: Vec<u8>, block: u8, offset: u8) -> Vec<u8> {
    tuple[24..30].copy_from_slice(&[0, 0, block, 0, offset, 0]);
    tuple
}

fn page(flags: u16, counters: [u16; 2], tuples: &[Vec<u8>]) -> PageBytes {
    let mut bytes = [0; BLCKSZ];
    let mut page = PageMut(&mut bytes);
    page.init(8);
    for (at, value) in [flags, counters[0], counters[1], 0xFF82].into_iter().enumerate() {
        put_u16(page.0, BLCKSZ - 8 + 2 * at, value);
    }
    for (number, tuple) in (1..).zip(tuples) {
        add_index_item(&mut page, tuple, number).unwrap();
    }
    bytes
}

/// Redoes one block of a record with blocks 10, 11, …, some of them new.
fn redo(
    info: u8,
    main: &[&[u8]],
    blocks: &[u8],
    new: &[u8],
    id: u8,
    bytes: &mut PageBytes,
) -> Result<Outcome, RedoError> {
    let mut builder = RecordBuilder::new(RmgrId::SPGIST, info).main_data(main.concat());
    for &block in blocks {
        builder = builder.block(block, TEST_REL, ForkNumber::Main, 10 + u32::from(block));
        if new.contains(&block) {
            builder = builder.will_init();
        }
    }
    let record = builder.build();
    let record = RecordBuilder::parse(&record, Lsn(0x100));
    let block = record.block(id).unwrap();
    let env = Env { major: Major::V18, hint_bits_are_logged: false };
    let mut target = Target { bytes, exists: true, dirty: false };
    let outcome = redo_block(&record, block, &mut target, &env, &mut Effects::default())?;
    assert!(target.dirty);
    assert_eq!(Page(bytes).lsn(), record.end);
    Ok(outcome)
}

/// Flags, and the counters of redirections and placeholders.
fn opaque(bytes: &PageBytes) -> [u16; 3] {
    assert_eq!(u16_at(bytes, BLCKSZ - 2), 0xFF82);
    [0, 2, 4].map(|at| u16_at(bytes, BLCKSZ - 8 + at))
}

fn tuples(bytes: &PageBytes) -> Vec<Vec<u8>> {
    (1..=Page(bytes).max_offset()).map(|number| item(Page(bytes), number).unwrap().to_vec()).collect()
}

#[test]
fn a_leaf_tuple_takes_a_placeholder_and_follows_the_head_of_its_chain() {
    let mut bytes = page(4, [0, 1], &[leaf(1, 3), PLACEHOLDER.to_vec(), leaf(2, 0)]);
    redo(XLOG_SPGIST_ADD_LEAF, &[&[0, 0, 2, 0, 1, 0, 0, 0, 0, 0], &leaf(9, 3)], &[0], &[], 0, &mut bytes).unwrap();
    assert_eq!(tuples(&bytes), [leaf(1, 2), leaf(9, 3), leaf(2, 0)]);
    assert_eq!(opaque(&bytes), [4, 0, 0]);

    let again = redo(XLOG_SPGIST_ADD_LEAF, &[&[0, 0, 3, 0, 1, 0, 0, 0, 0, 0], &leaf(8, 0)], &[0], &[], 0, &mut {
        let mut older = bytes;
        PageMut(&mut older).set_lsn(Lsn(0));
        older
    });
    assert_eq!(again, Err(RedoError::CorruptPage("tuple to be replaced is not a placeholder")));
}

#[test]
fn the_first_leaf_tuple_of_a_chain_has_a_new_page_or_replaces_a_dead_one() {
    let main: [&[u8]; 2] = [&[1, 1, 1, 0, 0, 0, 1, 0, 1, 0], &leaf(9, 0)];
    let mut bytes = [7; BLCKSZ];
    redo(XLOG_SPGIST_ADD_LEAF, &main, &[0, 1], &[0], 0, &mut bytes).unwrap();
    assert_eq!((tuples(&bytes), opaque(&bytes)), (vec![leaf(9, 0)], [12, 0, 0]));
    let mut parent = page(0, [0, 0], &[inner(5)]);
    redo(XLOG_SPGIST_ADD_LEAF, &main, &[0, 1], &[0], 1, &mut parent).unwrap();
    assert_eq!(tuples(&parent), [linked(inner(5), 10, 1)]);

    let mut bytes = page(4, [0, 0], &[DEAD.to_vec(), leaf(1, 0)]);
    let main: [&[u8]; 2] = [&[0, 0, 1, 0, 1, 0, 0, 0, 0, 0], &leaf(9, 0)];
    redo(XLOG_SPGIST_ADD_LEAF, &main, &[0], &[], 0, &mut bytes).unwrap();
    assert_eq!(tuples(&bytes), [leaf(9, 0), leaf(1, 0)]);
}

#[test]
fn a_chain_that_moves_leaves_a_redirection_where_its_head_was() {
    let moves = |state: &[u8]| {
        let fixed = [2, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0];
        [&fixed[..], state, &[3, 0, 1, 0, 1, 0, 2, 0, 3, 0], &leaf(1, 0), &leaf(3, 1), &leaf(9, 2)].concat()
    };
    let before = page(4, [0, 0], &[leaf(1, 0), leaf(2, 0), leaf(3, 1)]);
    let mut src = before;
    redo(XLOG_SPGIST_MOVE_LEAFS, &[&moves(&STATE)], &[0, 1, 2], &[], 0, &mut src).unwrap();
    assert_eq!(tuples(&src), [PLACEHOLDER.to_vec(), leaf(2, 0), redirect(11, 3)]);
    assert_eq!(opaque(&src), [4, 1, 1]);
    let mut src = before;
    redo(XLOG_SPGIST_MOVE_LEAFS, &[&moves(&BUILDING)], &[0, 1, 2], &[], 0, &mut src).unwrap();
    assert_eq!(tuples(&src), [PLACEHOLDER.to_vec(), leaf(2, 0), PLACEHOLDER.to_vec()]);
    assert_eq!(opaque(&src), [4, 0, 2]);

    let mut dest = page(4, [0, 2], &[PLACEHOLDER.to_vec(), PLACEHOLDER.to_vec()]);
    redo(XLOG_SPGIST_MOVE_LEAFS, &[&moves(&STATE)], &[0, 1, 2], &[], 1, &mut dest).unwrap();
    assert_eq!(tuples(&dest), [leaf(1, 0), leaf(3, 1), leaf(9, 2)]);
    assert_eq!(opaque(&dest), [4, 0, 0]);
    let mut parent = page(0, [0, 0], &[inner(5)]);
    redo(XLOG_SPGIST_MOVE_LEAFS, &[&moves(&STATE)], &[0, 1, 2], &[], 2, &mut parent).unwrap();
    assert_eq!(tuples(&parent), [linked(inner(5), 11, 3)]);
}

#[test]
fn an_inner_tuple_grows_where_it_is_or_moves_and_its_parent_may_be_on_any_page() {
    let main = |parent_block: u8, parent: u8| {
        [&[2, 0, 2, 0, 0, parent_block, parent, 0, 1, 0, 0, 0], &STATE[..], &inner(9)].concat()
    };
    let before = page(0, [0, 0], &[inner(1), inner(2)]);
    let redo_on = |main: &[u8], blocks: &[u8], id| {
        let mut bytes = before;
        redo(XLOG_SPGIST_ADD_NODE, &[main], blocks, &[], id, &mut bytes).map(|_| (tuples(&bytes), opaque(&bytes)))
    };
    assert_eq!(redo_on(&main(255, 0), &[0], 0).unwrap(), (vec![inner(1), inner(9)], [0, 0, 0]));
    let moved = vec![inner(1), redirect(11, 2)];
    assert_eq!(redo_on(&main(2, 1), &[0, 1, 2], 0).unwrap(), (moved, [0, 1, 0]));
    let moved_from_parent = vec![linked(inner(1), 11, 2), redirect(11, 2)];
    assert_eq!(redo_on(&main(0, 1), &[0, 1], 0).unwrap(), (moved_from_parent, [0, 1, 0]));
    let only_parent = vec![linked(inner(1), 11, 2), inner(2)];
    assert_eq!(redo_on(&main(2, 1), &[0, 1, 2], 2).unwrap(), (only_parent, [0, 0, 0]));
    assert_eq!(redo_on(&main(0, 1), &[0, 1, 2], 2), Err(RedoError::BlockReference(2)));

    let mut new = page(0, [0, 0], &[inner(7)]);
    redo(XLOG_SPGIST_ADD_NODE, &[&main(1, 1)], &[0, 1], &[], 1, &mut new).unwrap();
    assert_eq!(tuples(&new), [linked(inner(7), 11, 2), inner(9)]);
}

#[test]
fn a_split_tuple_may_part_with_its_lower_half() {
    let main = |same| [&[1, 0, 3, 0, 0, same], &inner(8)[..], &inner(9)].concat();
    let before = page(0, [0, 1], &[inner(1), inner(2), PLACEHOLDER.to_vec()]);
    let redo_on = |same, blocks: &[u8], id| {
        let mut bytes = before;
        redo(XLOG_SPGIST_SPLIT_TUPLE, &[&main(same)], blocks, &[], id, &mut bytes).map(|_| tuples(&bytes))
    };
    assert_eq!(redo_on(1, &[0], 0).unwrap(), [inner(8), inner(2), inner(9)]);
    assert_eq!(redo_on(0, &[0, 1], 0).unwrap(), [inner(8), inner(2), PLACEHOLDER.to_vec()]);
    assert_eq!(redo_on(0, &[0, 1], 1).unwrap(), [inner(1), inner(2), inner(9)]);
    assert_eq!(redo_on(1, &[0, 1], 1), Err(RedoError::BlockReference(1)));
}

/// Deletes tuples 1 and 2; adds one to the source page as number 2, and one to the destination page as number 1.
fn pick_split(root: u8, init: [u8; 3], inner_is_parent: u8) -> Vec<u8> {
    let [src, dest, new_inner] = init;
    let fixed = [root, 0, 2, 0, 2, 0, src, dest, 2, 0, new_inner, 0, inner_is_parent, 0, 1, 0, 1, 0, 0, 0];
    let offsets = [1, 0, 2, 0, 1, 0, 2, 0, 1, 0];
    [&fixed[..], &STATE, &offsets, &inner(9), &leaf(3, 0), &leaf(4, 0)].concat()
}

#[test]
fn a_split_leaf_page_keeps_some_tuples_and_redirects_to_the_new_inner_tuple() {
    let main = pick_split(0, [0, 0, 0], 0);
    let mut src = page(4, [0, 0], &[leaf(1, 2), leaf(2, 0)]);
    redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[0, 1, 2, 3], &[], 0, &mut src).unwrap();
    assert_eq!((tuples(&src), opaque(&src)), (vec![redirect(12, 2), leaf(4, 0)], [4, 1, 0]));
    let mut dest = page(4, [0, 1], &[PLACEHOLDER.to_vec()]);
    redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[0, 1, 2, 3], &[], 1, &mut dest).unwrap();
    assert_eq!((tuples(&dest), opaque(&dest)), (vec![leaf(3, 0)], [4, 0, 0]));
    let mut above = page(0, [0, 0], &[inner(1)]);
    redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[0, 1, 2, 3], &[], 2, &mut above).unwrap();
    assert_eq!(tuples(&above), [inner(1), inner(9)]);
    let mut parent = page(0, [0, 0], &[inner(1)]);
    redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[0, 1, 2, 3], &[], 3, &mut parent).unwrap();
    assert_eq!(tuples(&parent), [linked(inner(1), 12, 2)]);

    let mut both = page(0, [0, 0], &[inner(1)]);
    redo(XLOG_SPGIST_PICKSPLIT, &[&pick_split(0, [0, 0, 0], 1)], &[0, 2], &[], 2, &mut both).unwrap();
    assert_eq!(tuples(&both), [linked(inner(1), 12, 2), inner(9)]);
}

#[test]
fn a_split_root_is_initialised() {
    let mut main = pick_split(1, [0, 1, 1], 0);
    main[8] = 1;
    let mut root = page(4, [0, 0], &[leaf(1, 0)]);
    redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[1, 2], &[1, 2], 2, &mut root).unwrap();
    assert_eq!((tuples(&root), opaque(&root)), (vec![inner(9)], [0, 0, 0]));
    let mut dest = [7; BLCKSZ];
    redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[1, 2], &[1, 2], 1, &mut dest).unwrap();
    assert_eq!((tuples(&dest), opaque(&dest)), (vec![leaf(3, 0)], [4, 0, 0]));
    let src = redo(XLOG_SPGIST_PICKSPLIT, &[&main], &[0, 1, 2], &[1, 2], 0, &mut root);
    assert_eq!(src, Err(RedoError::BlockReference(0)));
}

#[test]
fn vacuum_keeps_the_heads_of_chains_in_place() {
    // Chains 1 to 2, 3, and 4 to 5: the head of the first, all of the second, and the tail of the third go.
    let mut bytes = page(4, [0, 0], &[leaf(1, 2), leaf(2, 0), leaf(3, 0), leaf(4, 5), leaf(5, 0)]);
    let fixed = [1, 0, 1, 0, 1, 0, 1, 0];
    let main: [&[u8]; 3] = [&fixed, &STATE, &[3, 0, 5, 0, 2, 0, 1, 0, 4, 0, 0, 0]];
    redo(XLOG_SPGIST_VACUUM_LEAF, &main, &[0], &[], 0, &mut bytes).unwrap();
    let placeholder = || PLACEHOLDER.to_vec();
    assert_eq!(tuples(&bytes), [leaf(2, 0), placeholder(), DEAD.to_vec(), leaf(4, 0), placeholder()]);
    assert_eq!(opaque(&bytes), [4, 0, 2]);
}

#[test]
fn vacuum_of_a_root_that_is_a_leaf_leaves_nothing_behind() {
    let mut bytes = page(4, [0, 0], &[leaf(1, 0), leaf(2, 0), leaf(3, 0)]);
    redo(XLOG_SPGIST_VACUUM_ROOT, &[&[2, 0, 0, 0], &STATE, &[1, 0, 3, 0]], &[0], &[], 0, &mut bytes).unwrap();
    assert_eq!(tuples(&bytes), [leaf(2, 0)]);
}

#[test]
fn old_redirections_become_placeholders_which_go_at_the_end_of_the_page() {
    let before = page(4, [2, 1], &[redirect(9, 1), leaf(1, 0), PLACEHOLDER.to_vec(), redirect(9, 2)]);
    let mut bytes = before;
    let main = [2, 0, 3, 0, 0xE4, 2, 0, 0, 0, 0, 1, 0, 4, 0];
    redo(XLOG_SPGIST_VACUUM_REDIRECT, &[&main], &[0], &[], 0, &mut bytes).unwrap();
    // The transaction id stays.
    let converted = [&PLACEHOLDER[..12], &[0xE4, 2, 0, 0]].concat();
    assert_eq!(tuples(&bytes), [converted, leaf(1, 0)]);
    assert_eq!(opaque(&bytes), [4, 0, 1]);
    let beyond = [0, 0, 5, 0, 0xE4, 2, 0, 0, 0, 0];
    let result = redo(XLOG_SPGIST_VACUUM_REDIRECT, &[&beyond], &[0], &[], 0, &mut before.clone());
    assert_eq!(result, Err(RedoError::LinePointer(5)));
}
