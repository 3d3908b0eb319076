//! Records built by hand: what a posting tree, the entry tree and the pending list go through.

use walrider_layout::bytes::{put_u32, u32_at};
use walrider_layout::page::{Page, PageMut};
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major, PageBytes};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::page::{DATA_AT, GIN_META};
use super::posting::{Data, decode, encode};
use super::*;
use crate::index_tuple::item;
use crate::{Effects, Env, Target, redo_block};

const LSN: Lsn = Lsn(0x3_0000_0000);

/// Redoes one block of the record.
fn apply(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> Result<Outcome, RedoError> {
    let bytes = builder.build();
    let record = RecordBuilder::parse(&bytes, LSN);
    let env = Env { major: Major::V18, hint_bits_are_logged: true };
    let mut target = Target { bytes: page, exists: true, dirty: false };
    redo_block(&record, record.block(id).unwrap(), &mut target, &env, &mut Effects::default())
}

/// As [`apply`], where the page needs redo and gets the record's LSN. It loses it again, for the next record.
fn change(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> Opaque {
    assert_eq!(apply(builder, id, page), Ok(Outcome::NeedsRedo));
    assert!(Page(page).lsn() > LSN);
    PageMut(page).set_lsn(Lsn(0));
    Opaque::of(Page(page)).unwrap()
}

fn page(opaque: Opaque) -> PageBytes {
    let mut bytes = [0; BLCKSZ];
    let mut page = PageMut(&mut bytes);
    page.init(Opaque::SIZE);
    opaque.put(&mut page);
    bytes
}

fn flags(flags: u16) -> Opaque {
    Opaque { flags, ..Opaque::default() }
}

fn record(info: u8, main: impl AsRef<[u8]>) -> RecordBuilder {
    RecordBuilder::new(RmgrId::GIN, info).main_data(main)
}

fn block(builder: RecordBuilder, id: u8, data: impl AsRef<[u8]>) -> RecordBuilder {
    builder.block(id, TEST_REL, ForkNumber::Main, 7).data(data)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The posting list of these items, all of block 0 as long as they are below 2048.
fn list(items: &[u64]) -> Vec<u8> {
    let mut data = Data::new();
    encode(items, &mut data).unwrap();
    data.to_vec()
}

/// A tuple of this size, full of one byte.
fn tuple(fill: u8, size: u16) -> Vec<u8> {
    let mut tuple = vec![fill; size.into()];
    tuple[6..8].copy_from_slice(&size.to_le_bytes());
    tuple
}

/// A page with tuples.
fn tuples_page(opaque: Opaque, tuples: &[Vec<u8>]) -> PageBytes {
    let mut page = page(opaque);
    for (number, tuple) in (1..).zip(tuples) {
        add_index_item(&mut PageMut(&mut page), tuple, number).unwrap();
    }
    page
}

/// The tuples of a page.
fn tuples(page: &PageBytes) -> Vec<&[u8]> {
    (1..=Page(page).max_offset()).map(|number| item(Page(page), number).unwrap()).collect()
}

/// The data of a data page.
fn data(page: &PageBytes) -> &[u8] {
    &page[DATA_AT..Page(page).lower()]
}

#[test]
fn posting_lists_are_those_of_postgresql() {
    // Items (0,5), (0,6), (1,1), (70000,3): 5; then 1, 2043, and 143_357_954 further.
    let items = [5, 6, 2049, 70_000 << 11 | 3];
    let bytes = [0, 0, 0, 0, 5, 0, 7, 0, 1, 0xFB, 0x0F, 0x82, 0xF0, 0xAD, 0x44, 0];
    assert_eq!(list(&items), bytes);
    assert_eq!(decode(&bytes), Ok(items.to_vec()));
    let largest = u64::from(u32::MAX) << 11 | 2047;
    assert_eq!(list(&[1, largest]).len(), 8 + 7 + 1, "a number has at most 7 bytes");
    assert_eq!(decode(&list(&[1, largest])), Ok(vec![1, largest]));
    for broken in [&bytes[..14], &bytes[..7], &[0, 0, 0, 0, 5, 8, 0, 0], &[0, 0, 0, 0, 5, 0, 1, 0, 0x80, 0]] {
        assert!(decode(broken).is_err(), "{broken:?}");
    }
    assert!(decode(&[&[0, 0, 0, 0, 5, 0, 8, 0][..], &[0xFF; 8]].concat()).is_err(), "8 bytes for one number");
    assert!(decode(&[&[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 7, 1, 0][..], &[1, 0]].concat()).is_err(), "beyond all blocks");
    assert!(encode(&[5, 5], &mut Data::new()).is_err());
    assert!(encode(&[], &mut Data::new()).is_err());
}

/// The heap blocks that an insertion names, or `None` where the data does not tell.
fn blocks(data: &[u8], of_posting_tree: bool) -> Option<Vec<u32>> {
    let mut found = vec![];
    heap_blocks(data, of_posting_tree, |block| found.push(block)).ok().map(|()| found)
}

#[test]
fn an_insertion_tells_the_heap_blocks_of_its_items() {
    let item = |block: u64| block << 11 | 1;
    let actions = [
        &[4, 0][..],
        &[0, 2],
        &list(&[item(7), item(70_000)]),
        &[1, 4, 2, 0],
        &[0, 0, 9, 0, 1, 0, 1, 0, 0, 0, 1, 0],
        &[2, 1],
        &[3, 3],
        &list(&[item(3)]),
    ]
    .concat();
    assert_eq!(blocks(&actions, true), Some(vec![7, 70_000, 9, 65_536, 3]));
    assert_eq!(blocks(&actions[..20], true), None);
    assert_eq!(blocks(&[], true), None);

    // Two items at byte 16 of the tuple, compressed.
    let entry = |tid: [u8; 6], items: &[u8]| [&[1, 0, 0, 0][..], &tid, &[24, 0], &[0; 8], items].concat();
    let items = list(&[item(5), item(6)]);
    assert_eq!(blocks(&entry([0, 0x80, 16, 0, 2, 0], &items), false), Some(vec![5, 6]));
    assert_eq!(blocks(&entry([0, 0x80, 16, 0, 0, 0], &[]), false), Some(vec![]), "no items yet");
    assert_eq!(blocks(&entry([0, 0x80, 90, 0, 2, 0], &items), false), None, "behind the tuple");
    assert_eq!(blocks(&entry([0, 0, 16, 0, 2, 0], &items), false), None, "not compressed");
    assert_eq!(blocks(&entry([0, 0, 16, 0, 0xFF, 0xFF], &items), false), None, "leads to a posting tree");
    assert_eq!(blocks(&[1, 0], false), None);
}

#[test]
fn a_posting_tree_begins_and_its_leaf_changes() {
    let (a, b, c, d) = (list(&[1, 2]), list(&[10, 20, 30]), list(&[40]), list(&[50, 60, 70, 80, 90]));
    let lists = [&a[..], &b, &c, &d].concat();
    let create = record(XLOG_GIN_CREATE_PTREE, [&words(&[lists.len() as u32])[..], &lists].concat());
    let mut leaf = [0xEE; BLCKSZ];
    let opaque = change(&block(create, 0, []).will_init(), 0, &mut leaf);
    assert_eq!(opaque, flags(GIN_DATA | GIN_LEAF | GIN_COMPRESSED));
    assert_eq!(data(&leaf), lists);

    // Before b comes a list, b gets two items, of which it has one; c goes; d is replaced; at the end come two more.
    let (before_b, new_d, e, f) = (list(&[5]), list(&[90]), list(&[100]), list(&[101, 102]));
    let items = [0, 0, 0, 0, 20, 0, 0, 0, 0, 0, 25, 0];
    let actions =
        [&[6, 0][..], &[1, 2], &before_b, &[1, 4, 2, 0], &items, &[2, 1], &[3, 3], &new_d, &[4, 2], &e, &[4, 2], &f]
            .concat();
    let insert = block(record(XLOG_GIN_INSERT, [3, 0]), 0, &actions);
    let mut inserted = leaf;
    change(&insert, 0, &mut inserted);
    assert_eq!(data(&inserted), [&a[..], &before_b, &list(&[10, 20, 25, 30]), &new_d, &e, &f].concat());

    // The data gets shorter, but what lay behind its new end stays.
    let vacuum = block(record(XLOG_GIN_VACUUM_DATA_LEAF_PAGE, []), 0, [2, 0, 0, 1, 2, 1]);
    let mut vacuumed = leaf;
    change(&vacuum, 0, &mut vacuumed);
    assert_eq!(data(&vacuumed), [&b[..], &d].concat());
    assert_eq!(vacuumed[Page(&vacuumed).lower()..], leaf[Page(&vacuumed).lower()..]);

    for actions in [&[0, 0][..], &[1, 0, 4, 1], &[1, 0, 5, 2], &[2, 0, 1, 1, 0, 1], &[1, 0, 0, 9], &[1, 0, 0, 4, 1, 0]]
    {
        let vacuum = block(record(XLOG_GIN_VACUUM_DATA_LEAF_PAGE, []), 0, actions);
        assert!(apply(&vacuum, 0, &mut leaf.clone()).is_err(), "{actions:?}");
    }
}

/// As `pg_upgrade` may have brought them along: an array of items, with `pd_lower` never set.
#[test]
fn leaves_of_postgresql_9_3_are_compressed_first() {
    let mut leaf = page(Opaque { max_offset: 3, ..flags(GIN_DATA | GIN_LEAF) });
    let items = [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 9, 0, 3, 0]].concat();
    leaf[DATA_AT..DATA_AT + items.len()].copy_from_slice(&items);
    let vacuum = block(record(XLOG_GIN_VACUUM_DATA_LEAF_PAGE, []), 0, [&[1, 0, 0, 3][..], &list(&[2])].concat());
    let opaque = change(&vacuum, 0, &mut leaf);
    assert_eq!(opaque, flags(GIN_DATA | GIN_LEAF | GIN_COMPRESSED));
    let converted = list(&[1, 2, 9 << 11 | 3]);
    assert_eq!(data(&leaf), list(&[2]));
    assert_eq!(leaf[DATA_AT + 8..DATA_AT + converted.len()], converted[8..], "left over from the conversion");

    let mut empty = page(flags(GIN_DATA | GIN_LEAF));
    let insert = block(record(XLOG_GIN_INSERT, [3, 0]), 0, [&[1, 0, 0, 2][..], &list(&[7])].concat());
    change(&insert, 0, &mut empty);
    assert_eq!(data(&empty), list(&[7]));
}

#[test]
fn a_split_child_gets_its_downlink_and_a_deleted_page_loses_it() {
    let posting_item = |child: u8, key: u8| [0, 0, child, 0, 0, 0, key, 0, 1, 0];
    let mut inner = page(Opaque { max_offset: 2, ..flags(GIN_DATA) });
    page::put_data(&mut PageMut(&mut inner), &[posting_item(3, 10), posting_item(4, 20)].concat()).unwrap();
    // The second child, 4, was split at key 15; its right half is block 5.
    let main = [1, 0, 0, 0, 4, 0, 0, 0, 5, 0];
    let insert = |at: u8| block(record(XLOG_GIN_INSERT, main), 0, [&[at, 0][..], &posting_item(4, 15)].concat());
    let split = block(insert(2), 1, []);
    let opaque = change(&split, 0, &mut inner);
    assert_eq!(opaque.max_offset, 3);
    assert_eq!(data(&inner), [posting_item(3, 10), posting_item(4, 15), posting_item(5, 20)].concat());
    let mut child = page(flags(GIN_DATA | GIN_LEAF | GIN_COMPRESSED | GIN_INCOMPLETE_SPLIT));
    assert_eq!(change(&split, 1, &mut child).flags, GIN_DATA | GIN_LEAF | GIN_COMPRESSED);
    for at in [0, 4] {
        assert!(apply(&insert(at), 0, &mut inner.clone()).is_err());
    }

    // Then that one is deleted; page 5 becomes the right sibling of 3.
    let main = [&[2, 0, 0xEE, 0xEE][..], &words(&[5, 777])].concat();
    let delete = block(block(block(record(XLOG_GIN_DELETE_PAGE, main), 0, []), 1, []), 2, []);
    assert_eq!(change(&delete, 1, &mut inner).max_offset, 2);
    assert_eq!(data(&inner), [posting_item(3, 10), posting_item(5, 20)].concat());
    let right_link = 5;
    let mut deleted = page(Opaque { right_link, ..flags(GIN_DATA | GIN_LEAF) });
    let opaque = change(&delete, 0, &mut deleted);
    assert_eq!(opaque, Opaque { right_link, ..flags(GIN_DATA | GIN_LEAF | GIN_DELETED) });
    assert_eq!(Page(&deleted).prune_xid(), 777);
    let mut left = page(Opaque { right_link: 4, ..flags(GIN_DATA | GIN_LEAF) });
    assert_eq!(change(&delete, 2, &mut left).right_link, 5);
}

#[test]
fn entries_are_inserted_and_replaced() {
    let old = [tuple(1, 16), tuple(2, 24), tuple(3, 16)];
    let mut leaf = tuples_page(flags(GIN_LEAF), &old);
    let replace = block(record(XLOG_GIN_INSERT, [2, 0]), 0, [&[2, 0, 1, 0][..], &tuple(9, 32)].concat());
    change(&replace, 0, &mut leaf);
    assert_eq!(tuples(&leaf), [&tuple(1, 16)[..], &tuple(9, 32), &tuple(3, 16)]);

    let mut inner = tuples_page(flags(0), &old);
    let main = [0, 0, 0, 0, 2, 0, 1, 0, 6, 0];
    let insert = block(record(XLOG_GIN_INSERT, main), 0, [&[2, 0, 0, 0][..], &tuple(9, 16)].concat());
    change(&insert, 0, &mut inner);
    let mut moved = tuple(2, 24);
    moved[..6].copy_from_slice(&make_tid(0x1_0006, 0));
    assert_eq!(tuples(&inner), [&tuple(1, 16)[..], &tuple(9, 16), &moved, &tuple(3, 16)]);

    assert!(apply(&insert, 0, &mut leaf).is_err(), "the record says that the page is no leaf");
    let on_leaf = block(replace, 1, []);
    assert_eq!(apply(&on_leaf, 1, &mut leaf), Err(RedoError::BlockReference(1)));
}

#[test]
fn the_pending_list_grows_and_goes() {
    // A heap tuple with entries for more than one page: only the last page has all of it.
    let [first, last] = [8, INVALID_BLOCK].map(|right_link| {
        let list_page = record(XLOG_GIN_INSERT_LISTPAGE, words(&[right_link, 2]));
        block(list_page, 0, [tuple(1, 16), tuple(2, 24)].concat()).will_init()
    });
    let mut page = [0xEE; BLCKSZ];
    assert_eq!(change(&first, 0, &mut page), Opaque { right_link: 8, ..flags(GIN_LIST) });
    let opaque = change(&last, 0, &mut page);
    assert_eq!(opaque, Opaque { max_offset: 1, ..flags(GIN_LIST | GIN_LIST_FULLROW) });
    assert_eq!(tuples(&page), [tuple(1, 16), tuple(2, 24)]);

    let metadata: Vec<u8> = (1..=META_SIZE as u8).collect();
    let update = |prev_tail, new_right_link, ntuples| {
        let main = [&[0xEE; 16], &metadata[..], &words(&[prev_tail, new_right_link, ntuples, 0])].concat();
        block(record(XLOG_GIN_UPDATE_META_PAGE, main), 0, []).will_init()
    };
    let append = block(update(INVALID_BLOCK, INVALID_BLOCK, 1), 1, tuple(3, 16));
    assert_eq!(change(&append, 1, &mut page), Opaque { max_offset: 2, ..opaque });
    assert_eq!(tuples(&page), [tuple(1, 16), tuple(2, 24), tuple(3, 16)]);
    let another = block(update(8, 9, 0), 1, []);
    assert_eq!(change(&another, 1, &mut page), Opaque { right_link: 9, max_offset: 2, ..opaque });
    let mut meta = [0xEE; BLCKSZ];
    assert_eq!(change(&another, 0, &mut meta), flags(GIN_META));
    assert_eq!(meta[24..Page(&meta).lower()], metadata);
    let first_of_all = block(update(INVALID_BLOCK, INVALID_BLOCK, 0), 1, []);
    assert_eq!(apply(&first_of_all, 1, &mut page), Err(RedoError::BlockReference(1)));
    let too_few = block(update(INVALID_BLOCK, INVALID_BLOCK, 2), 1, tuple(3, 16));
    assert!(apply(&too_few, 1, &mut page).is_err());

    let mut delete = block(record(XLOG_GIN_DELETE_LISTPAGE, [&metadata, &words(&[1, 0])[..]].concat()), 0, []);
    delete = block(block(delete.will_init(), 1, []).will_init(), 2, []).will_init();
    assert_eq!(change(&delete, 0, &mut meta), flags(GIN_META));
    assert_eq!(change(&delete, 1, &mut page), flags(GIN_DELETED));
    assert!(Page(&page).is_empty());
    assert_eq!(apply(&delete, 2, &mut page), Err(RedoError::BlockReference(2)));
}

#[test]
fn splits_and_vacuumed_entry_pages_are_images() {
    let image = tuples_page(flags(GIN_LEAF), &[tuple(1, 16)]);
    let mut main = [0; 28];
    put_u32(&mut main, 24, 2);
    for (info, main) in [(XLOG_GIN_SPLIT, &main[..]), (XLOG_GIN_VACUUM_PAGE, &[])] {
        let mut page = [0xEE; BLCKSZ];
        let with_image = block(record(info, main), 0, []).full_image(&image);
        assert_eq!(apply(&with_image, 0, &mut page), Ok(Outcome::Restored));
        assert_eq!(tuples(&page), [tuple(1, 16)]);
        let without = block(record(info, main), 0, []);
        assert!(matches!(apply(&without, 0, &mut page), Err(RedoError::CorruptRecord(_))), "newer, but no image");
    }
    let mut page = image;
    let split = |flags| {
        put_u32(&mut main, 24, flags);
        block(block(record(XLOG_GIN_SPLIT, main), 2, []).full_image(&image), 3, [])
    };
    let [root, leaf] = [4, 2].map(split);
    assert_eq!(apply(&root, 2, &mut page), Ok(Outcome::Restored));
    let mut child = tuples_page(flags(GIN_LEAF | GIN_INCOMPLETE_SPLIT), &[]);
    assert_eq!(change(&root, 3, &mut child).flags, GIN_LEAF);
    assert_eq!(u32_at(&child, BLCKSZ - 8), INVALID_BLOCK);
    assert_eq!(apply(&leaf, 2, &mut page), Err(RedoError::BlockReference(2)));
    assert_eq!(apply(&leaf, 3, &mut child), Err(RedoError::BlockReference(3)));
}
