//! Records built by hand: what a tree goes through when a page is split, and when one is deleted.

use walrider_layout::page::{Page, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, Major, OffsetNumber, PageBytes};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::*;
use crate::index_tuple::{item, make_tid};
use crate::{Effects, Env, Target, redo_block};

const LSN: Lsn = Lsn(0x3_0000_0000);
const NSN: Lsn = Lsn(0x2_0000_0010);

/// Redoes one block of the record. Returns the outcome, and the LSN that a changed page has.
fn apply(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> (Result<Outcome, RedoError>, Lsn) {
    let bytes = builder.build();
    let record = RecordBuilder::parse(&bytes, LSN);
    let env = Env { major: Major::V18, hint_bits_are_logged: true };
    let mut target = Target { bytes: page, exists: true, dirty: false };
    let outcome = redo_block(&record, record.block(id).unwrap(), &mut target, &env, &mut Effects::default());
    (outcome, record.end)
}

/// As [`apply`], where the page needs redo and gets the record's LSN.
fn change(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> Lsn {
    let (outcome, end) = apply(builder, id, page);
    assert_eq!((outcome, Page(page).lsn()), (Ok(Outcome::NeedsRedo), end));
    end
}

/// A tuple of this size, full of one byte, which leads to the block of the same number.
fn tuple(fill: u8, size: u16) -> Vec<u8> {
    let mut tuple = vec![fill; size.into()];
    tuple[..6].copy_from_slice(&make_tid(fill.into(), 0xFFFF));
    tuple[6..8].copy_from_slice(&size.to_le_bytes());
    tuple
}

fn page(flags: u16, tuples: &[Vec<u8>]) -> PageBytes {
    let mut bytes = [0; BLCKSZ];
    let mut page = PageMut(&mut bytes);
    page.init(Opaque::SIZE);
    Opaque { nsn: NSN, right_link: 9, flags }.put(&mut page);
    append_index_tuples(&mut page, &tuples.concat()).unwrap();
    bytes
}

/// Fill byte and offset of every tuple.
fn tuples(page: &PageBytes) -> Vec<(u8, usize)> {
    let page = Page(page);
    let describe = |number| (item(page, number).unwrap()[8], page.item_id(number).unwrap().offset());
    (1..=page.max_offset()).map(describe).collect()
}

fn record(info: u8) -> RecordBuilder {
    RecordBuilder::new(RmgrId::GIST, info)
}

fn main_block(builder: RecordBuilder, id: u8, number: BlockNumber) -> RecordBuilder {
    builder.block(id, TEST_REL, ForkNumber::Main, number)
}

fn update(deleted: &[OffsetNumber], inserted: &[Vec<u8>]) -> RecordBuilder {
    let counts = [deleted.len() as u16, inserted.len() as u16];
    let bytes = |numbers: &[u16]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    main_block(record(XLOG_GIST_PAGE_UPDATE).main_data(bytes(&counts)), 0, 5)
        .data(bytes(deleted))
        .data(inserted.concat())
}

fn split(is_leaf: bool, blocks: &[BlockNumber]) -> RecordBuilder {
    let main = [&7u64.to_le_bytes()[..], &NSN.0.to_le_bytes(), &[is_leaf.into(), 0, blocks.len() as u8, 0, 1, 0, 0, 0]];
    let mut builder = main_block(record(XLOG_GIST_PAGE_SPLIT).main_data(main.concat()), 0, 5);
    for (id, &number) in (1..).zip(blocks) {
        builder = main_block(builder, id, number).will_init().data([2, 0, 0, 0]);
        builder = builder.data(tuple(10 * id, 16)).data(tuple(10 * id + 1, 24));
    }
    builder
}

#[test]
fn one_tuple_for_one_stays_at_its_line_pointer() {
    let old = page(F_LEAF, &[tuple(1, 16), tuple(2, 16), tuple(3, 16)]);
    let mut page = old;
    change(&update(&[2], &[tuple(7, 24)]), 0, &mut page);
    assert_eq!(tuples(&page), [(1, 8160), (7, 8136), (3, 8120)]);
    assert_eq!(Opaque::of(Page(&page)), Opaque::of(Page(&old)), "not a leaf that lost tuples");
}

#[test]
fn several_tuples_go_and_come_at_the_end() {
    let old = [1, 2, 3, 4].map(|fill| tuple(fill, 16));
    let mut leaf = page(F_LEAF, &old);
    change(&update(&[2], &[tuple(7, 16), tuple(8, 16)]), 0, &mut leaf);
    assert_eq!(tuples(&leaf).iter().map(|(fill, _)| *fill).collect::<Vec<_>>(), [1, 3, 4, 7, 8]);
    assert_eq!(Opaque::of(Page(&leaf)).unwrap().flags, F_LEAF | F_TUPLES_DELETED);

    let mut inner = page(0, &old);
    change(&update(&[1, 2, 4], &[]), 0, &mut inner);
    assert_eq!(tuples(&inner), [(3, 8160)]);
    assert_eq!(Opaque::of(Page(&inner)).unwrap().flags, 0);
}

#[test]
fn a_count_that_is_not_that_of_the_tuples_is_an_error() {
    let mut leaf = page(F_LEAF, &[]);
    let one_less = update(&[], &[tuple(7, 16)]).data(tuple(8, 16));
    assert!(matches!(apply(&one_less, 0, &mut leaf).0, Err(RedoError::CorruptRecord(_))));
}

#[test]
fn dead_tuples_go_and_so_does_the_hint_at_them() {
    let mut leaf = page(F_LEAF | F_HAS_GARBAGE, &[tuple(1, 16), tuple(2, 16), tuple(3, 16)]);
    let dead = record(XLOG_GIST_DELETE).main_data([0xE4, 2, 0, 0, 2, 0, 0, 0, 1, 0, 3, 0]);
    change(&main_block(dead, 0, 5), 0, &mut leaf);
    assert_eq!(tuples(&leaf), [(2, 8160)]);
    assert_eq!(Opaque::of(Page(&leaf)).unwrap().flags, F_LEAF | F_TUPLES_DELETED);
}

#[test]
fn pages_of_a_split_form_a_chain_that_searches_follow_for_now() {
    let record = split(true, &[4, 20, 21]);
    let expected = [(1, 20, F_LEAF | F_FOLLOW_RIGHT), (2, 21, F_LEAF | F_FOLLOW_RIGHT), (3, 7, F_LEAF)];
    for (id, right_link, flags) in expected {
        let mut page = [0xAA; BLCKSZ];
        change(&record, id, &mut page);
        assert_eq!(tuples(&page), [(10 * id, 8160), (10 * id + 1, 8136)]);
        assert_eq!(Opaque::of(Page(&page)), Ok(Opaque { nsn: NSN, right_link, flags }));
        assert!(page[Page(&page).lower()..Page(&page).upper()].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_root_split_leaves_nothing_to_follow() {
    let record = split(true, &[GIST_ROOT_BLKNO, 20, 21]);
    for (id, right_link, flags) in [(1, NO_BLOCK, 0), (2, 21, F_LEAF), (3, 7, F_LEAF)] {
        let mut page = [0; BLCKSZ];
        change(&record, id, &mut page);
        assert_eq!(Opaque::of(Page(&page)), Ok(Opaque { nsn: NSN, right_link, flags }));
    }
}

#[test]
fn a_left_child_is_changed_also_behind_its_image() {
    let child = page(F_LEAF | F_FOLLOW_RIGHT, &[tuple(1, 16)]);
    let insert = main_block(update(&[], &[tuple(7, 16)]), 1, 6);
    for (record, id) in [(insert, 1), (split(false, &[4, 20]), 0)] {
        let mut redone = child;
        let end = change(&record, id, &mut redone);
        assert_eq!(Opaque::of(Page(&redone)), Ok(Opaque { nsn: end, right_link: 9, flags: F_LEAF }));
        assert_eq!(apply(&record, id, &mut redone).0, Ok(Outcome::Skip));
    }

    let mut restored = [0; BLCKSZ];
    let with_image = main_block(record(XLOG_GIST_PAGE_UPDATE).main_data([0; 4]), 1, 6).full_image(&child);
    let (outcome, end) = apply(&with_image, 1, &mut restored);
    assert_eq!((outcome, Page(&restored).lsn()), (Ok(Outcome::Restored), end));
    assert_eq!(Opaque::of(Page(&restored)), Ok(Opaque { nsn: end, right_link: 9, flags: F_LEAF }));
}

#[test]
fn a_deleted_page_keeps_its_place_in_the_chain_and_tells_since_when() {
    let main = [&740u64.to_le_bytes()[..], &[2, 0]].concat();
    let record = main_block(main_block(record(XLOG_GIST_PAGE_DELETE).main_data(main), 0, 5), 1, 6);
    let mut leaf = page(F_LEAF | F_TUPLES_DELETED, &[]);
    change(&record, 0, &mut leaf);
    let flags = F_LEAF | F_TUPLES_DELETED | F_DELETED;
    assert_eq!(Opaque::of(Page(&leaf)), Ok(Opaque { nsn: NSN, right_link: 9, flags }));
    assert_eq!((Page(&leaf).lower(), &leaf[24..32]), (32, &740u64.to_le_bytes()[..]));

    let mut parent = page(0, &[tuple(1, 16), tuple(2, 16), tuple(3, 16)]);
    change(&record, 1, &mut parent);
    assert_eq!(tuples(&parent), [(1, 8160), (3, 8144)]);

    let mut not_empty = page(F_LEAF, &[tuple(1, 16)]);
    assert!(matches!(apply(&record, 0, &mut not_empty).0, Err(RedoError::CorruptPage(_))));
}
