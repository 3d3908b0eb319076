//! What is not simply a change to a page that the record finds there.

use walrider_layout::bytes::{u16_at, u32_at, u64_at};
use walrider_layout::page::{PAGE_HEADER_SIZE, Page, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, Major, PageBytes};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::*;
use crate::{Effects, Env, Target, redo_block};

const LSN: Lsn = Lsn(0x100_0028);

fn record(info: u8, main: &[u8]) -> RecordBuilder {
    RecordBuilder::new(RmgrId::HASH, info).main_data(main)
}

trait Refer {
    fn refer(self, id: u8, block: BlockNumber) -> Self;
}

impl Refer for RecordBuilder {
    fn refer(self, id: u8, block: BlockNumber) -> RecordBuilder {
        self.block(id, TEST_REL, ForkNumber::Main, block)
    }
}

/// Redoes one block; whether the page was changed.
fn redo_one(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> Result<bool, RedoError> {
    let bytes = builder.build();
    let record = RecordBuilder::parse(&bytes, LSN);
    let env = Env { major: Major::V18, hint_bits_are_logged: true };
    let mut target = Target { bytes: page, exists: true, dirty: false };
    redo_block(&record, record.block(id).unwrap(), &mut target, &env, &mut Effects::default())?;
    assert_eq!(target.dirty, Page(target.bytes).lsn() == record.end);
    Ok(target.dirty)
}

fn bucket() -> PageBytes {
    let mut bytes = [0; BLCKSZ];
    PageMut(&mut bytes).init(Opaque::SIZE);
    Opaque { prevblkno: 7, nextblkno: 20, bucket: 3, flag: 0x22 }.put(&mut PageMut(&mut bytes));
    bytes
}

/// The metapage of an index made for 5000 tuples, 10 in a bucket.
fn meta() -> PageBytes {
    let init = [&5000f64.to_le_bytes()[..], &[0x90, 1, 0, 0, 10, 0]].concat();
    let mut page = [0xEE; BLCKSZ];
    let record = record(XLOG_HASH_INIT_META_PAGE, &init).refer(0, 0).will_init();
    assert_eq!(redo_one(&record, 0, &mut page), Ok(true));
    page
}

fn meta_field(page: &PageBytes, at: usize) -> u32 {
    u32_at(page, PAGE_HEADER_SIZE + at)
}

#[test]
fn the_metapage_begins_with_buckets_for_the_expected_tuples() {
    let page = meta();
    // Magic number and version; no tuples; fill factor, and the sizes of a page and of a bitmap.
    assert_eq!((meta_field(&page, 0), meta_field(&page, 4), u64_at(&page, 32)), (0x0644_0640, 4, 0));
    assert_eq!([40, 42, 44, 46].map(|at| u16_at(&page, at)), [10, 8152, 4096, 15]);
    // 512 buckets, masks, splitpoint, first free, number of bitmaps, function; one overflow page at the splitpoint.
    assert_eq!([24, 28, 32, 36, 40, 44, 48].map(|at| meta_field(&page, at)), [511, 1023, 511, 9, 0, 0, 400]);
    assert_eq!([8, 9, 10].map(|splitpoint| meta_field(&page, 52 + 4 * splitpoint)), [0, 1, 0]);
    assert_eq!(Page(&page).lower(), 4568);
    let special: [u32; 4] = [0, 4, 8, 12].map(|at| u32_at(&page, BLCKSZ - 16 + at));
    assert_eq!(special, [INVALID, INVALID, INVALID, 0xFF80_0008]);
}

#[test]
fn bitmap_pages_are_entered_into_the_metapage() {
    let mut page = meta();
    let first = record(XLOG_HASH_INIT_BITMAP_PAGE, &[0, 16]).refer(0, 513).will_init().refer(1, 0);
    PageMut(&mut page).set_lsn(Lsn(0));
    redo_one(&first, 1, &mut page).unwrap();
    assert_eq!((meta_field(&page, 44), meta_field(&page, 444)), (1, 513));

    // A second one, when all bits of the first are taken: both it and the overflow page behind it are new.
    let next = record(XLOG_HASH_ADD_OVFL_PAGE, &[0, 16, 0]);
    let next = next.refer(0, 700).will_init().data([5, 0, 0, 0]).refer(1, 6).refer(3, 701).will_init();
    let next = next.refer(4, 0).data([1, 128, 0, 0]);
    PageMut(&mut page).set_lsn(Lsn(0));
    redo_one(&next, 4, &mut page).unwrap();
    assert_eq!([40, 44, 448, 52 + 4 * 9].map(|at| meta_field(&page, at)), [32769, 2, 701, 3]);

    redo_one(&next, 3, &mut page).unwrap();
    let bitmap = PAGE_HEADER_SIZE..PAGE_HEADER_SIZE + 4096;
    assert!(page[bitmap.clone()].iter().all(|byte| *byte == 0xFF));
    assert!(page[bitmap.end..BLCKSZ - 16].iter().all(|byte| *byte == 0));
    assert_eq!(Page(&page).lower(), bitmap.end);

    // A page that was used before is only marked as used again.
    let again = record(XLOG_HASH_ADD_OVFL_PAGE, &[0, 16, 1]).refer(0, 700).will_init().refer(1, 6);
    let again = again.refer(2, 513).data([9, 0, 0, 0]).refer(4, 0).data([10, 0, 0, 0]);
    let mut page = meta();
    PageMut(&mut page).set_lsn(Lsn(0));
    redo_one(&again, 4, &mut page).unwrap();
    assert_eq!([40, 44, 52 + 4 * 9].map(|at| meta_field(&page, at)), [10, 0, 1]);
}

#[test]
fn a_split_changes_the_old_bucket_behind_its_image_too() {
    let image = bucket();
    let main = [9, 0, 0, 0, 0x22, 0, 0x12, 0, 0];
    let split = record(XLOG_HASH_SPLIT_ALLOCATE_PAGE, &main).refer(0, 4).full_image(&image).refer(1, 10).will_init();
    let mut page = [0; BLCKSZ];
    redo_one(&split, 0, &mut page).unwrap();
    assert_eq!(Opaque::of(Page(&page)), Ok(Opaque { prevblkno: 9, nextblkno: 20, bucket: 3, flag: 0x22 }));
    redo_one(&split, 1, &mut page).unwrap();
    assert_eq!(Opaque::of(Page(&page)), Ok(Opaque { prevblkno: 9, nextblkno: INVALID, bucket: 9, flag: 0x12 }));

    let complete = record(XLOG_HASH_SPLIT_COMPLETE, &[0x42, 0, 2, 0]).refer(0, 4).full_image(&image).refer(1, 10);
    redo_one(&complete, 0, &mut page).unwrap();
    assert_eq!(Opaque::of(Page(&page)), Ok(Opaque { prevblkno: 7, nextblkno: 20, bucket: 3, flag: 0x42 }));

    let page_of_split = record(XLOG_HASH_SPLIT_PAGE, &[]).refer(0, 4);
    assert_eq!(redo_one(&page_of_split.full_image(&image), 0, &mut page), Ok(true));
    let without_image = record(XLOG_HASH_SPLIT_PAGE, &[]).refer(0, 4);
    assert!(redo_one(&without_image, 0, &mut page).is_err());
}

#[test]
fn a_page_that_is_only_locked_does_not_get_the_lsn() {
    let squeeze = |same_as_prev: u8| {
        let main = [&[5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 1][..], &[same_as_prev]].concat();
        record(XLOG_HASH_SQUEEZE_PAGE, &main).refer(0, 4).refer(1, 4)
    };
    let mut page = bucket();
    assert_eq!(redo_one(&squeeze(0), 0, &mut page), Ok(false));
    assert_eq!(redo_one(&squeeze(0), 1, &mut page), Ok(false));
    assert_eq!(page, bucket());
    assert_eq!(redo_one(&squeeze(1), 1, &mut page), Ok(true));
    assert_eq!(Opaque::of(Page(&page)).map(|opaque| opaque.nextblkno), Ok(6));
}

#[test]
fn a_freed_page_is_initialised_though_the_record_does_not_say_so() {
    let squeeze = record(XLOG_HASH_SQUEEZE_PAGE, &[5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 1, 1]).refer(2, 8);
    let mut page = bucket();
    page[5000] = 1;
    assert_eq!(redo_one(&squeeze, 2, &mut page), Ok(true));
    assert_eq!((page[5000], Opaque::of(Page(&page))), (0, Ok(Opaque::unchained(LH_UNUSED_PAGE))));
}
