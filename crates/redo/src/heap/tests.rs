//! Records built by hand, on pages small enough to compute; and any bytes at all.

use walrider_layout::bytes::{put_u32, u16_at, u32_at};
use walrider_layout::page::Page;
use walrider_layout::{Lsn, Major, OffsetNumber, PageBytes};
use walrider_seed::Random;
use walrider_wal::records::heap2::*;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::{RecordBuilder, TEST_REL};

use super::*;
use crate::{Effects, Env, Target, redo_block};

const LSN: Lsn = Lsn(0x1_0000_0000);
const XID: TransactionId = 741;

fn env(hint_bits_are_logged: bool) -> Env {
    Env { major: Major::V18, hint_bits_are_logged }
}

/// What redo of one block reference comes to.
struct Redone {
    result: Result<Outcome, RedoError>,
    dirty: bool,
    exists: bool,
    free_space: Option<usize>,
}

fn redo_one(builder: &RecordBuilder, id: u8, page: &mut PageBytes, exists: bool, env: &Env) -> Redone {
    let bytes = builder.build();
    let record = RecordBuilder::parse(&bytes, LSN);
    let mut target = Target { bytes: page, exists, dirty: false };
    let mut effects = Effects::default();
    let result = redo_block(&record, record.block(id).unwrap(), &mut target, env, &mut effects);
    Redone {
        result,
        dirty: target.dirty,
        exists: target.exists,
        free_space: effects.free_space.map(|free| free.free_bytes),
    }
}

fn apply(builder: &RecordBuilder, id: u8, page: &mut PageBytes) -> Redone {
    let redone = redo_one(builder, id, page, true, &env(true));
    assert_eq!(redone.result, Ok(Outcome::NeedsRedo));
    redone
}

fn heap_page() -> PageBytes {
    let mut page = [0; BLCKSZ];
    PageMut(&mut page).init(0);
    page
}

fn record(info: u8, main: &[u8]) -> RecordBuilder {
    RecordBuilder::new(RmgrId::HEAP, info).xid(XID).main_data(main).block(0, TEST_REL, ForkNumber::Main, 0x1_0002)
}

/// A tuple header as records carry it: three attributes, xmax invalid, and a combo command id that must not stay.
const CARRIED: [u8; 5] = [3, 0, 0x22, 0x08, 24];

fn inserting(number: u8, flags: u8, info: u8, data: &[u8]) -> RecordBuilder {
    // A byte of padding stands between the fixed header and the data.
    record(info, &[number, 0, flags]).data(CARRIED).data([0]).data(data)
}

fn tuple(page: &PageBytes, number: OffsetNumber) -> &[u8] {
    Page(page).item(Page(page).item_id(number).unwrap()).unwrap()
}

/// xmin, xmax, field3, ctid, infomask2, infomask
fn header(page: &PageBytes, number: OffsetNumber) -> (u32, u32, u32, (u32, u16), u16, u16) {
    let tuple = tuple(page, number);
    let block = u32::from(u16_at(tuple, 12)) << 16 | u32::from(u16_at(tuple, 14));
    let ctid = (block, u16_at(tuple, 16));
    (u32_at(tuple, 0), u32_at(tuple, 4), u32_at(tuple, 8), ctid, u16_at(tuple, 18), u16_at(tuple, 20))
}

#[test]
fn insert_builds_the_tuple_and_reports_only_low_space() {
    let mut page = [0xEE; BLCKSZ];
    let initialising = inserting(1, 0, XLOG_HEAP_INSERT | XLOG_HEAP_INIT_PAGE, b"first").will_init();
    let redone = apply(&initialising, 0, &mut page);
    assert!(redone.dirty);
    assert_eq!(redone.free_space, None);
    assert_eq!(header(&page, 1), (XID, 0, 0, (0x1_0002, 1), 3, 0x0802));
    assert_eq!(&tuple(&page, 1)[22..], b"\x18\0first");
    // Behind the tuple is padding, and nothing of what the page had before.
    assert_eq!(page[BLCKSZ - 32..][29..], [0; 3]);

    PageMut(&mut page).set_flags(PD_ALL_VISIBLE);
    PageMut(&mut page).set_lsn(Lsn(1));
    let long = vec![7; 6600];
    let redone = apply(&inserting(2, XLH_INSERT_ALL_VISIBLE_CLEARED, XLOG_HEAP_INSERT, &long), 0, &mut page);
    assert_eq!(redone.free_space, Some(8192 - 32 - 24 - 8 - 6624 - 4));
    assert_eq!(Page(&page).flags(), 0);

    let again = redo_one(&inserting(3, 0, XLOG_HEAP_INSERT, b"x"), 0, &mut page, true, &env(true));
    assert_eq!(again.result, Ok(Outcome::Skip));
    assert_eq!((again.dirty, again.free_space), (false, None));
}

#[test]
fn initialising_must_be_said_in_both_places() {
    let mut page = heap_page();
    let info = XLOG_HEAP_INSERT | XLOG_HEAP_INIT_PAGE;
    let redone = redo_one(&inserting(1, 0, info, b"x"), 0, &mut page, true, &env(true));
    assert_eq!(redone.result, Err(RedoError::WillInit));
    let redone = redo_one(&inserting(1, 0, XLOG_HEAP_INSERT, b"x").will_init(), 0, &mut page, true, &env(true));
    assert_eq!(redone.result, Err(RedoError::WillInit));
}

/// A page with one tuple, as if it had been inserted long ago.
fn page_with_tuple(data: &[u8]) -> PageBytes {
    let mut page = heap_page();
    apply(&inserting(1, 0, XLOG_HEAP_INSERT, data), 0, &mut page);
    PageMut(&mut page).set_lsn(Lsn(8));
    page
}

#[test]
fn delete_marks_the_tuple_and_the_page() {
    let mut page = page_with_tuple(b"gone");
    PageMut(&mut page).set_flags(PD_ALL_VISIBLE);
    let main = [0xE8, 2, 0, 0, 1, 0, XLHL_KEYS_UPDATED, XLH_DELETE_ALL_VISIBLE_CLEARED];
    apply(&record(XLOG_HEAP_DELETE, &main), 0, &mut page);
    assert_eq!(header(&page, 1), (XID, 744, 0, (0x1_0002, 1), 0x2003, 0x0002));
    assert_eq!((Page(&page).flags(), Page(&page).prune_xid()), (0, XID));

    let mut page = page_with_tuple(b"moved");
    let main = [0xE8, 2, 0, 0, 1, 0, 0, XLH_DELETE_IS_PARTITION_MOVE];
    apply(&record(XLOG_HEAP_DELETE, &main), 0, &mut page);
    assert_eq!(header(&page, 1).3, MOVED_PARTITIONS);

    let mut page = page_with_tuple(b"speculative");
    let main = [0xE8, 2, 0, 0, 1, 0, 0, XLH_DELETE_IS_SUPER];
    apply(&record(XLOG_HEAP_DELETE, &main), 0, &mut page);
    assert_eq!((header(&page, 1).0, header(&page, 1).1), (0, 0));
}

#[test]
fn pruning_waits_for_the_oldest_transaction() {
    let mut page = heap_page();
    let mut page = PageMut(&mut page);
    for (xid, oldest) in [(100, 100), (200, 100), (50, 50), (0xFFFF_FFF0, 0xFFFF_FFF0), (60, 0xFFFF_FFF0), (2, 2)] {
        set_prunable(&mut page, xid);
        assert_eq!(page.get().prune_xid(), oldest);
    }
}

fn updating(info: u8, flags: u8, new_number: u8) -> RecordBuilder {
    record(info, &[0xE9, 2, 0, 0, 1, 0, 0, flags, 0, 0, 0, 0, new_number, 0])
}

#[test]
fn hot_update_takes_the_ends_of_the_old_tuple() {
    let mut page = page_with_tuple(b"beginning middle end");
    let flags = XLH_UPDATE_PREFIX_FROM_OLD | XLH_UPDATE_SUFFIX_FROM_OLD;
    let hot = updating(XLOG_HEAP_HOT_UPDATE, flags, 2).data([10, 0, 4, 0]).data(CARRIED).data([0]).data(b"centre");
    let redone = apply(&hot, 0, &mut page);
    assert_eq!(redone.free_space, None);
    assert_eq!(&tuple(&page, 2)[24..], b"beginning centre end");
    assert_eq!(header(&page, 1), (XID, 745, 0, (0x1_0002, 2), 0x4003, 0x0002));
    assert_eq!(header(&page, 2), (XID, 0, 0, (0x1_0002, 2), 3, 0x0802));

    let mut page = page_with_tuple(b"beginning middle end");
    let hot = updating(XLOG_HEAP_HOT_UPDATE, XLH_UPDATE_SUFFIX_FROM_OLD, 2).data([4, 0]).data(CARRIED).data(b"\0the");
    apply(&hot, 0, &mut page);
    assert_eq!(&tuple(&page, 2)[24..], b"the end");
}

#[test]
fn update_asks_no_more_of_the_old_tuple_than_it_has() {
    for (flags, lens) in [
        (XLH_UPDATE_PREFIX_FROM_OLD, &[4, 0][..]),
        (XLH_UPDATE_SUFFIX_FROM_OLD, &[28, 0]),
        (XLH_UPDATE_PREFIX_FROM_OLD | XLH_UPDATE_SUFFIX_FROM_OLD, &[0xFF, 0xFF, 0xFF, 0xFF]),
    ] {
        let mut page = page_with_tuple(b"abc");
        let hot = updating(XLOG_HEAP_HOT_UPDATE, flags, 2).data(lens).data(CARRIED).data([0]);
        let redone = redo_one(&hot, 0, &mut page, true, &env(true));
        assert!(matches!(redone.result, Err(RedoError::CorruptRecord(_))), "{:?}", redone.result);
    }
}

#[test]
fn update_across_pages_is_redone_page_by_page() {
    let flags = XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED;
    let update =
        updating(XLOG_HEAP_UPDATE, flags, 1).data(CARRIED).data(b"\0new").block(1, TEST_REL, ForkNumber::Main, 9);
    let mut new = heap_page();
    PageMut(&mut new).set_flags(PD_ALL_VISIBLE);
    apply(&update, 0, &mut new);
    assert_eq!(header(&new, 1).3, (0x1_0002, 1));
    assert_eq!(Page(&new).flags(), PD_ALL_VISIBLE);

    let mut old = page_with_tuple(b"old");
    PageMut(&mut old).set_flags(PD_ALL_VISIBLE);
    apply(&update, 1, &mut old);
    assert_eq!(header(&old, 1), (XID, 745, 0, (0x1_0002, 1), 3, 0x0002));
    assert_eq!((Page(&old).flags(), Page(&old).max_offset()), (0, 1));
}

#[test]
fn a_lock_unlinks_the_next_version_only_where_nobody_updates() {
    let mut page = page_with_tuple(b"locked");
    let at = Page(&page).item_id(1).unwrap().offset();
    put_u32(&mut page, at + 12, 5 << 16);
    let updated = [0xE8, 2, 0, 0, 1, 0, XLHL_XMAX_IS_MULTI, 0];
    apply(&record(XLOG_HEAP_LOCK, &updated), 0, &mut page);
    assert_eq!(header(&page, 1), (XID, 744, 0, (5, 1), 3, 0x1002));

    PageMut(&mut page).set_lsn(Lsn(8));
    let only_locked = [0xE8, 2, 0, 0, 1, 0, XLHL_XMAX_LOCK_ONLY | XLHL_XMAX_KEYSHR_LOCK, 0];
    apply(&record(XLOG_HEAP_LOCK, &only_locked), 0, &mut page);
    assert_eq!(header(&page, 1), (XID, 744, 0, (0x1_0002, 1), 3, 0x0092));
    assert_eq!(Page(&page).prune_xid(), 0);
}

#[test]
fn inplace_keeps_the_length() {
    let mut page = page_with_tuple(b"count=1");
    let main = [1, 0, 0, 0, 5, 0, 0, 0, 0x7F, 6, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    apply(&record(XLOG_HEAP_INPLACE, &main).data(b"count=2"), 0, &mut page);
    assert_eq!(&tuple(&page, 1)[24..], b"count=2");
    PageMut(&mut page).set_lsn(Lsn(8));
    let redone = redo_one(&record(XLOG_HEAP_INPLACE, &main).data(b"count=10"), 0, &mut page, true, &env(true));
    assert!(matches!(redone.result, Err(RedoError::CorruptRecord(_))));
}

fn vm_page(bits: &[(BlockNumber, u8)]) -> PageBytes {
    let mut page = heap_page();
    for &(heap_block, bits) in bits {
        vm::set_bits(&mut PageMut(&mut page), heap_block, bits);
    }
    page
}

#[test]
fn a_registered_map_page_gets_the_lsn_only_with_a_change() {
    let main = [0xE8, 2, 0, 0, 1, 0, 0, XLH_DELETE_ALL_VISIBLE_CLEARED];
    let delete = record(XLOG_HEAP_DELETE, &main).block(1, TEST_REL, ForkNumber::VisibilityMap, 2);
    let heap_block = 0x1_0002;
    let mut page = vm_page(&[(heap_block, 3), (heap_block + 1, 3)]);
    assert!(apply(&delete, 1, &mut page).dirty);
    assert_eq!((vm::bits(Page(&page), heap_block), vm::bits(Page(&page), heap_block + 1)), (0, 3));
    assert!(Page(&page).lsn() > LSN);

    let mut page = vm_page(&[(heap_block + 1, 3)]);
    assert!(!apply(&delete, 1, &mut page).dirty);
    assert_eq!(Page(&page).lsn(), Lsn(0));

    let elsewhere = record(XLOG_HEAP_DELETE, &main).block(1, TEST_REL, ForkNumber::VisibilityMap, 3);
    assert!(redo_one(&elsewhere, 1, &mut page, true, &env(true)).result.is_err());
}

#[test]
fn one_map_page_stands_for_both_blocks_of_an_update_if_it_holds_both() {
    let flags = XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED | XLH_UPDATE_NEW_ALL_VISIBLE_CLEARED;
    let new_block = 0x1_0002;
    for (old_block, old_bits) in [(new_block + 5, 0), (60_000, 3), (7, 3)] {
        let update = updating(XLOG_HEAP_UPDATE, flags, 1).block(1, TEST_REL, ForkNumber::Main, old_block).block(
            2,
            TEST_REL,
            ForkNumber::VisibilityMap,
            2,
        );
        let mut page = vm_page(&[(new_block, 3), (old_block, 3)]);
        apply(&update, 2, &mut page);
        // On another page there is nothing to clear: what stands at the same place belongs to another block.
        assert_eq!((vm::bits(Page(&page), new_block), vm::bits(Page(&page), old_block)), (0, old_bits));
        let bytes = update.build();
        let record = RecordBuilder::parse(&bytes, LSN);
        assert!(vm::unregistered_clears(&record).unwrap().is_empty());
    }
}

fn record2(info: u8, main: &[u8]) -> RecordBuilder {
    RecordBuilder::new(RmgrId::HEAP2, info).xid(XID).main_data(main).block(0, TEST_REL, ForkNumber::Main, 0x1_0002)
}

#[test]
fn multi_insert_takes_tuples_at_even_offsets() {
    let data = b"\x02\0\x01\0\0\x08\x18\0a\0\x03\0\x01\0\0\x08\x18\0bc";
    let insert = record2(XLOG_HEAP2_MULTI_INSERT | XLOG_HEAP_INIT_PAGE, &[XLH_INSERT_ALL_FROZEN_SET, 0, 2, 0])
        .will_init()
        .data(data);
    let mut page = [0; BLCKSZ];
    let redone = redo_one(&insert, 0, &mut page, false, &env(true));
    assert_eq!(redone.result, Ok(Outcome::NeedsRedo));
    assert!(redone.exists && redone.dirty);
    assert_eq!((&tuple(&page, 1)[24..], &tuple(&page, 2)[24..]), (&b"a"[..], &b"bc"[..]));
    assert_eq!(header(&page, 2).3, (0x1_0002, 2));
    assert_eq!(Page(&page).flags(), PD_ALL_VISIBLE);

    let too_long = record2(XLOG_HEAP2_MULTI_INSERT, &[0, 0, 2, 0, 1, 0, 2, 0]).data(data).data([0]);
    let mut page = heap_page();
    let redone = redo_one(&too_long, 0, &mut page, true, &env(true));
    assert!(matches!(redone.result, Err(RedoError::DataLength(_))));
}

#[test]
fn prune_frees_and_freezes() {
    let mut page = heap_page();
    for number in 1..=4 {
        apply(&inserting(number, 0, XLOG_HEAP_INSERT, &[number; 8]), 0, &mut page);
        PageMut(&mut page).set_lsn(Lsn(8));
    }
    let flags = XLHP_CLEANUP_LOCK | XLHP_HAS_FREEZE_PLANS | XLHP_HAS_REDIRECTIONS | XLHP_HAS_DEAD_ITEMS;
    let prune = record2(XLOG_HEAP2_PRUNE_VACUUM_SCAN, &[1, flags])
        .data([1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0x0B, 0, 0, 1, 0])
        .data([1, 0, 1, 0, 3, 0])
        .data([1, 0, 2, 0])
        .data([3, 0]);
    let redone = apply(&prune, 0, &mut page);
    let read = Page(&page);
    assert_eq!(read.item_id(1), Some(walrider_layout::page::ItemId::redirect(3)));
    assert_eq!(read.item_id(2), Some(walrider_layout::page::ItemId::DEAD));
    assert_eq!(header(&page, 3), (XID, 0, 0, (0x1_0002, 3), 3, 0x0B00));
    assert_eq!(tuple(&page, 4)[24..], [4; 8]);
    assert_eq!((read.lower(), read.upper()), (40, 8192 - 64));
    assert_eq!(redone.free_space, Some(8192 - 64 - 40 - 4));

    // The map learns of it again, although the page has the change already.
    let again = redo_one(&prune, 0, &mut page, true, &env(true));
    assert_eq!((again.result, again.free_space), (Ok(Outcome::Skip), redone.free_space));
    let missing = redo_one(&prune, 0, &mut [0; BLCKSZ], false, &env(true));
    assert_eq!((missing.result, missing.free_space), (Ok(Outcome::NotFound), None));

    // Second pass: nothing is moved, and the array keeps its end.
    PageMut(&mut page).set_lsn(Lsn(8));
    let cleanup = record2(XLOG_HEAP2_PRUNE_VACUUM_CLEANUP, &[2, XLHP_HAS_NOW_UNUSED_ITEMS]).data([1, 0, 2, 0]);
    apply(&cleanup, 0, &mut page);
    assert_eq!(Page(&page).item_id(2), Some(walrider_layout::page::ItemId::UNUSED));
    assert_eq!((Page(&page).lower(), Page(&page).upper()), (40, 8192 - 64));
}

#[test]
fn prune_refuses_line_pointers_that_do_not_exist() {
    for number in [0u16, 2, 0xFFFF] {
        let mut page = page_with_tuple(b"only");
        let prune = record2(XLOG_HEAP2_PRUNE_ON_ACCESS, &[0, XLHP_CLEANUP_LOCK | XLHP_HAS_NOW_UNUSED_ITEMS])
            .data([1, 0])
            .data(number.to_le_bytes());
        let redone = redo_one(&prune, 0, &mut page, true, &env(true));
        assert_eq!(redone.result, Err(RedoError::LinePointer(number)));
    }
}

fn visible(bits: u8) -> RecordBuilder {
    RecordBuilder::new(RmgrId::HEAP2, XLOG_HEAP2_VISIBLE)
        .main_data([0, 0, 0, 0, bits])
        .block(0, TEST_REL, ForkNumber::VisibilityMap, 2)
        .block(1, TEST_REL, ForkNumber::Main, 0x1_0002)
}

#[test]
fn visible_bumps_the_heap_lsn_only_where_hint_bits_are_logged() {
    for logged in [false, true] {
        let mut page = page_with_tuple(b"seen by all");
        let redone = redo_one(&visible(3), 1, &mut page, true, &env(logged));
        assert_eq!(redone.result, Ok(Outcome::NeedsRedo));
        assert!(redone.dirty);
        assert_eq!(Page(&page).flags(), PD_ALL_VISIBLE);
        assert_eq!(Page(&page).lsn() > LSN, logged);
        assert_eq!(redone.free_space, Some(items::free_space(Page(&page))));
    }
}

#[test]
fn visible_makes_the_map_page_it_needs() {
    let mut page = [0; BLCKSZ];
    let redone = redo_one(&visible(3), 0, &mut page, false, &env(true));
    assert_eq!(redone.result, Ok(Outcome::NeedsRedo));
    assert!(redone.exists && redone.dirty);
    assert_eq!(vm::bits(Page(&page), 0x1_0002), 3);
    assert_eq!((Page(&page).lower(), Page(&page).upper(), Page(&page).special()), (24, 8192, 8192));
    assert!(Page(&page).lsn() > LSN);

    // The bits are there already: not even the LSN changes.
    PageMut(&mut page).set_lsn(Lsn(8));
    let redone = redo_one(&visible(3), 0, &mut page, true, &env(true));
    assert_eq!((redone.result, redone.dirty, Page(&page).lsn()), (Ok(Outcome::NeedsRedo), false, Lsn(8)));
    // Fewer bits are a change to PostgreSQL, although no bit is taken away.
    let redone = redo_one(&visible(1 | 4), 0, &mut page, true, &env(true));
    assert_eq!((redone.dirty, vm::bits(Page(&page), 0x1_0002)), (true, 3));
}

/// Mostly small numbers, which lead further than wild ones.
fn some_bytes(random: &mut Random, max_len: u64) -> Vec<u8> {
    let wild = random.one_in(3);
    (0..random.below(max_len)).map(|_| if wild { random.number() as u8 } else { random.below(6) as u8 }).collect()
}

#[test]
fn any_bytes_give_a_page_or_an_error() {
    let mut random = Random(1);
    let mut applied = 0;
    for _ in 0..60_000 {
        let rmgr = if random.below(2) == 0 { RmgrId::HEAP } else { RmgrId::HEAP2 };
        let mut builder = RecordBuilder::new(rmgr, (random.below(16) as u8) << 4)
            .xid(random.number() as u32)
            .main_data(some_bytes(&mut random, 40));
        let ids: Vec<u8> = (0..4).filter(|_| random.below(3) > 0).collect();
        for &id in &ids {
            let fork = if random.below(2) == 0 { ForkNumber::Main } else { ForkNumber::VisibilityMap };
            builder = builder.block(id, TEST_REL, fork, random.below(3) as u32).data(some_bytes(&mut random, 60));
            if random.below(4) == 0 {
                builder = builder.will_init();
            }
        }
        let mut page = match random.below(3) {
            0 => page_with_tuple(b"some tuple"),
            1 => heap_page(),
            _ => [0; BLCKSZ],
        };
        for _ in 0..random.below(6) {
            let at = if random.below(2) == 0 { 10 + random.below(40) } else { random.below(BLCKSZ as u64) };
            page[at as usize] = random.number() as u8;
        }
        let bytes = builder.build();
        let _ = vm::unregistered_clears(&RecordBuilder::parse(&bytes, LSN));
        for id in ids {
            let mut page = page;
            let redone = redo_one(&builder, id, &mut page, random.below(5) > 0, &env(true));
            applied += usize::from(redone.dirty);
        }
    }
    // Else the test would only show that everything is refused.
    assert!(applied > 1000, "{applied}");
}
