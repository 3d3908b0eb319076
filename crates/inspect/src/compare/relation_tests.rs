//! Page comparison on pages made here.

use super::*;
use walrider_layout::bytes::put_u16;
use walrider_layout::page::{ItemId, PAGE_HEADER_SIZE, PageMut};

const RULES: Rules = Rules { strict: false, checksums: [false; 2], fsm_may_differ: false };

/// A heap page with one tuple of 32 bytes.
fn heap_page() -> Box<PageBytes> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let mut page = PageMut(&mut bytes);
    page.init(0);
    let upper = BLCKSZ - 32;
    page.set_upper(upper);
    page.set_lower(PAGE_HEADER_SIZE + 4);
    page.set_item_id(1, ItemId::normal(upper, 32));
    bytes[upper..].fill(0x11);
    bytes
}

fn compare(rules: Rules, fork: ForkNumber, a: &[u8], b: &[u8]) -> Tally {
    let mut tally = Tally::new(rules.strict, 10);
    let mut segment = Segment { rules, name: "base/5/16384", fork, tally: &mut tally };
    segment.chunk(100, a, b);
    tally
}

fn main_fork(a: &[u8], b: &[u8]) -> Tally {
    compare(RULES, ForkNumber::Main, a, b)
}

#[test]
fn lsn_and_unused_space_are_masked_content_is_not() {
    let a = heap_page();
    let mut b = a.clone();
    PageMut(&mut b).set_lsn(walrider_layout::Lsn(77));
    b[1000] = 9;
    let tally = main_fork(&a[..], &b[..]);
    assert_eq!((tally.differences(), tally.of(Class::Masked)), (0, 1));
    let strict = compare(Rules { strict: true, ..RULES }, ForkNumber::Main, &a[..], &b[..]);
    assert_eq!((strict.differences(), strict.first[0].offset), (1, Some(4)));

    b[BLCKSZ - 1] ^= 1;
    let tally = main_fork(&a[..], &b[..]);
    assert_eq!((tally.differences(), tally.of(Class::Page)), (1, 1));
    let first = &tally.first[0];
    assert_eq!((first.block, first.offset), (Some(100), Some(BLCKSZ as u32 - 1)));
    assert_eq!((first.a.as_str(), first.b.as_str()), ("11", "10"));
}

#[test]
fn pages_of_two_kinds_differ() {
    let a = heap_page();
    let mut b = Box::new([0; BLCKSZ]);
    PageMut(&mut b).init(16);
    assert_eq!(main_fork(&a[..], &b[..]).of(Class::Page), 1);
    assert_eq!(main_fork(&a[..], &[0; BLCKSZ]).of(Class::Page), 1);
}

#[test]
fn a_longer_file_may_only_have_zero_pages() {
    let page = heap_page();
    let with = |tail: &[u8]| [&page[..], tail].concat();
    let tally = main_fork(&page[..], &with(&[0; 2 * BLCKSZ]));
    assert_eq!((tally.differences(), tally.of(Class::TrailingZero), tally.pages), (0, 2, 3));
    let tally = main_fork(&with(&page[..]), &page[..]);
    assert_eq!((tally.differences(), tally.first[0].block), (1, Some(101)));
    assert_eq!(tally.first[0].b, "past the end");
    assert_eq!(main_fork(&with(&[0; 5]), &page[..]).of(Class::PartialPage), 1);
    assert_eq!(main_fork(&with(&[0; 5]), &with(&[0; 5])).differences(), 0);
}

#[test]
fn a_wrong_checksum_is_found_in_equal_pages_too() {
    let rules = Rules { checksums: [true; 2], ..RULES };
    let mut page = heap_page();
    PageMut(&mut page).update_checksum(100);
    assert_eq!(compare(rules, ForkNumber::Main, &page[..], &page[..]).differences(), 0);
    page[BLCKSZ - 1] ^= 1;
    assert_eq!(compare(rules, ForkNumber::Main, &page[..], &page[..]).of(Class::Checksum), 1);
    // A page that says that it is new must be zero.
    let mut new = Box::new([0; BLCKSZ]);
    assert_eq!(compare(rules, ForkNumber::Main, &new[..], &new[..]).differences(), 0);
    new[500] = 1;
    assert_eq!(compare(rules, ForkNumber::Main, &new[..], &new[..]).of(Class::Checksum), 1);
}

#[test]
fn the_free_space_map_differs_where_postgresql_lets_it() {
    let mut a = Box::new([0; BLCKSZ]);
    PageMut(&mut a).init(0);
    let mut b = a.clone();
    b[FSM_NODES_OFFSET + FSM_INNER_NODES + 7] = 200;
    let may = Rules { fsm_may_differ: true, ..RULES };
    let fork = ForkNumber::FreeSpaceMap;
    let tally = compare(may, fork, &a[..], &b[..]);
    assert_eq!((tally.differences(), tally.of(Class::FsmHint)), (0, 1));
    let tally = compare(RULES, fork, &a[..], &b[..]);
    assert_eq!((tally.differences(), tally.first[0].field.as_str()), (1, "free space of slot 7"));
    // As a page that only one of them has.
    assert_eq!(compare(may, fork, &[], &b[..]).of(Class::FsmHint), 1);
    assert_eq!(compare(RULES, fork, &[], &b[..]).of(Class::Page), 1);
}

#[test]
fn the_visibility_map_is_compared_bit_by_bit() {
    let mut a = Box::new([0; BLCKSZ]);
    PageMut(&mut a).init(0);
    let mut b = a.clone();
    put_u16(&mut *b, 4, 9);
    assert_eq!(compare(RULES, ForkNumber::VisibilityMap, &a[..], &b[..]).of(Class::Masked), 1);
    b[VM_BITS_OFFSET + 3] = 0x10;
    let tally = compare(RULES, ForkNumber::VisibilityMap, &a[..], &b[..]);
    let block = 100 * (BLCKSZ - VM_BITS_OFFSET) * 4 + 3 * 4 + 2;
    assert_eq!(tally.first[0].field, format!("bits of heap block {block}"));
}
