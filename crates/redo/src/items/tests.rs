//! Pages small enough to compute by hand.

use walrider_layout::bytes::put_u16;

use super::*;

/// An empty page with `special` bytes of special space, whose hole is full of `0xEE`.
fn empty_page(special: usize) -> Box<[u8; BLCKSZ]> {
    let mut bytes = Box::new([0; BLCKSZ]);
    let mut page = PageMut(&mut bytes);
    page.init(special);
    let (lower, upper) = (page.get().lower(), page.get().upper());
    bytes[lower..upper].fill(0xEE);
    bytes
}

fn push(bytes: &mut [u8; BLCKSZ], item: &[u8]) -> OffsetNumber {
    add_item(&mut PageMut(bytes), item, 0, AtExisting::Overwrite, ItemsOf::Heap).unwrap()
}

fn items(bytes: &[u8; BLCKSZ]) -> Vec<(usize, Vec<u8>)> {
    let page = Page(bytes);
    let ids = (1..=page.max_offset()).map(|number| page.item_id(number).unwrap());
    ids.map(|id| (id.offset(), page.item(id).unwrap_or(&[]).to_vec())).collect()
}

#[test]
fn items_are_added_from_the_end_and_padding_stays_stale() {
    let mut bytes = empty_page(0);
    assert_eq!(push(&mut bytes, &[1; 13]), 1);
    assert_eq!(push(&mut bytes, &[2; 8]), 2);
    let page = Page(&bytes);
    assert_eq!((page.lower(), page.upper()), (32, 8192 - 24));
    assert_eq!(items(&bytes), [(8176, vec![1; 13]), (8168, vec![2; 8])]);
    assert_eq!(&bytes[8176 + 13..], [0xEE; 3]);
}

#[test]
fn shifting_moves_line_pointers_up_but_not_items() {
    let mut bytes = empty_page(16);
    for byte in [1, 3] {
        push(&mut bytes, &[byte; 8]);
    }
    let mut page = PageMut(&mut bytes);
    assert_eq!(add_item(&mut page, &[2; 8], 2, AtExisting::Shift, ItemsOf::Index), Ok(2));
    assert_eq!(items(&bytes), [(8168, vec![1; 8]), (8152, vec![2; 8]), (8160, vec![3; 8])]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut bytes = empty_page(0);
    let before = bytes.clone();
    let mut page = PageMut(&mut bytes);
    let mut add = |len: usize, number| add_item(&mut page, &vec![0; len], number, AtExisting::Overwrite, ItemsOf::Heap);
    assert_eq!(add(8165, 0), Err(RedoError::NoRoom(8165)));
    assert_eq!(add(40_000, 0), Err(RedoError::NoRoom(40_000)));
    assert_eq!(add(8, 2), Err(RedoError::OffsetBeyondEnd(2)));
    assert!(bytes == before, "a refused item changed the page");
    push(&mut bytes, &[1; 8]);
    let mut page = PageMut(&mut bytes);
    assert!(add_item(&mut page, &[1; 8], 1, AtExisting::Overwrite, ItemsOf::Heap).is_err());
}

#[test]
fn free_line_pointers_are_found_through_the_hint_only() {
    let mut bytes = empty_page(0);
    for byte in 1..=3 {
        push(&mut bytes, &[byte; 8]);
    }
    PageMut(&mut bytes).set_item_id(2, ItemId::UNUSED);
    assert_eq!(push(&mut bytes, &[4; 8]), 4);
    PageMut(&mut bytes).set_flags(PD_HAS_FREE_LINES);
    assert_eq!(push(&mut bytes, &[5; 8]), 2);
    assert_eq!(Page(&bytes).flags(), PD_HAS_FREE_LINES);
    assert_eq!(push(&mut bytes, &[6; 8]), 5);
    assert_eq!(Page(&bytes).flags(), 0);
}

#[test]
fn a_heap_page_has_at_most_291_line_pointers() {
    let mut bytes = empty_page(0);
    for _ in 0..MAX_HEAP_TUPLES_PER_PAGE {
        push(&mut bytes, &[1; 8]);
    }
    assert_eq!(MAX_HEAP_TUPLES_PER_PAGE, 291);
    let mut page = PageMut(&mut bytes);
    let added = add_item(&mut page, &[1; 8], 0, AtExisting::Overwrite, ItemsOf::Heap);
    assert_eq!(added, Err(RedoError::OffsetBeyondEnd(292)));
    assert_eq!(heap_free_space(page.get()), 0);
    page.set_item_id(7, ItemId::UNUSED);
    assert_eq!(heap_free_space(page.get()), 0);
    page.set_flags(PD_HAS_FREE_LINES);
    assert_eq!(heap_free_space(page.get()), 8168 - 291 * 12 - 4);
}

#[test]
fn compaction_of_descending_items_keeps_the_hole() {
    let mut bytes = empty_page(0);
    for byte in 1..=5 {
        push(&mut bytes, &[byte; 13]);
    }
    let before = bytes.clone();
    let mut page = PageMut(&mut bytes);
    page.set_item_id(2, ItemId::UNUSED);
    page.set_item_id(3, ItemId::redirect(4));
    page.set_item_id(5, ItemId::UNUSED);
    repair_fragmentation(&mut page).unwrap();
    let page = Page(&bytes);
    assert_eq!((page.lower(), page.upper(), page.flags()), (24 + 16, 8160, PD_HAS_FREE_LINES));
    let ids = [1, 2, 3, 4].map(|number| page.item_id(number).unwrap());
    assert_eq!(ids, [ItemId::normal(8176, 13), ItemId::UNUSED, ItemId::redirect(4), ItemId::normal(8160, 13)]);
    // The tuple with its stale padding, moved from where the fourth one lay.
    assert_eq!(bytes[8160..8176], before[8128..8144]);
    assert!(bytes[44..8160] == before[44..8160], "the hole was touched");
}

#[test]
fn compaction_in_any_order_sorts_by_line_pointer() {
    let mut bytes = empty_page(0);
    for byte in 1..=4 {
        push(&mut bytes, &[byte; 16]);
    }
    let mut page = PageMut(&mut bytes);
    let (second, third) = (page.get().item_id(2).unwrap(), page.get().item_id(3).unwrap());
    page.set_item_id(2, third);
    page.set_item_id(3, second);
    page.set_item_id(1, ItemId::DEAD);
    repair_fragmentation(&mut page).unwrap();
    assert_eq!(items(&bytes)[1..], [(8176, vec![3; 16]), (8160, vec![2; 16]), (8144, vec![4; 16])]);
    assert_eq!(Page(&bytes).flags(), 0);
    assert_eq!(Page(&bytes).upper(), 8144);
}

#[test]
fn compaction_of_nothing_frees_everything() {
    let mut bytes = empty_page(8);
    push(&mut bytes, &[1; 100]);
    let mut page = PageMut(&mut bytes);
    page.set_item_id(1, ItemId::UNUSED);
    repair_fragmentation(&mut page).unwrap();
    assert_eq!((page.get().lower(), page.get().upper()), (24, 8184));
}

#[test]
fn truncation_leaves_one_line_pointer() {
    let mut bytes = empty_page(0);
    for byte in 1..=4 {
        push(&mut bytes, &[byte; 16]);
    }
    let mut page = PageMut(&mut bytes);
    for number in [1, 3, 4] {
        page.set_item_id(number, ItemId::UNUSED);
    }
    truncate_line_pointers(&mut page);
    assert_eq!((page.get().max_offset(), page.get().flags()), (2, PD_HAS_FREE_LINES));
    page.set_item_id(2, ItemId::UNUSED);
    truncate_line_pointers(&mut page);
    assert_eq!((page.get().max_offset(), page.get().flags()), (1, PD_HAS_FREE_LINES));
    page.set_item_id(1, ItemId::DEAD);
    truncate_line_pointers(&mut page);
    assert_eq!((page.get().max_offset(), page.get().flags()), (1, 0));
}

#[test]
fn two_deletions_keep_the_order_of_items_and_three_sort_it() {
    let mut bytes = empty_page(16);
    for byte in [1, 2, 3, 4, 5] {
        push(&mut bytes, &[byte; 8]);
    }
    // The sixth item goes to the front: items no longer descend.
    add_item(&mut PageMut(&mut bytes), &[9; 8], 1, AtExisting::Shift, ItemsOf::Index).unwrap();
    let mut two = bytes.clone();
    index_multi_delete(&mut PageMut(&mut two), [2, 4].into_iter()).unwrap();
    let at = |offset, byte| (offset, vec![byte; 8]);
    assert_eq!(items(&two), [at(8144, 9), at(8168, 2), at(8160, 4), at(8152, 5)]);
    let mut three = bytes.clone();
    index_multi_delete(&mut PageMut(&mut three), [2, 4, 5].into_iter()).unwrap();
    assert_eq!(items(&three), [at(8168, 9), at(8160, 2), at(8152, 5)]);
    for wrong in [[4, 2, 5], [2, 2, 3], [0, 1, 2], [5, 6, 7]] {
        let mut page = bytes.clone();
        assert!(index_multi_delete(&mut PageMut(&mut page), wrong.into_iter()).is_err(), "{wrong:?}");
    }
}

#[test]
fn deletion_without_compaction_keeps_numbers() {
    let mut bytes = empty_page(16);
    for byte in [1, 2, 3] {
        push(&mut bytes, &[byte; 8]);
    }
    let mut page = PageMut(&mut bytes);
    index_tuple_delete_no_compact(&mut page, 1).unwrap();
    assert_eq!(page.get().item_id(1), Some(ItemId::UNUSED));
    assert_eq!(page.get().item_id(3), Some(ItemId::normal(8160, 8)));
    index_tuple_delete_no_compact(&mut page, 3).unwrap();
    assert_eq!((page.get().max_offset(), page.get().upper()), (2, 8168));
    assert_eq!(index_tuple_delete_no_compact(&mut page, 1), Err(RedoError::LinePointer(1)));
}

#[test]
fn overwriting_moves_what_lies_below() {
    let mut bytes = empty_page(16);
    for byte in [1, 2, 3] {
        push(&mut bytes, &[byte; 16]);
    }
    let mut page = PageMut(&mut bytes);
    let id = page.get().item_id(2).unwrap();
    page.set_item_id(2, id.with_state(ItemState::Dead));
    index_tuple_overwrite(&mut page, 2, &[7; 21]).unwrap();
    assert_eq!(page.get().item_id(2).unwrap().state(), ItemState::Dead);
    let at = |offset, byte, len| (offset, vec![byte; len]);
    assert_eq!(items(&bytes), [at(8160, 1, 16), at(8136, 7, 21), at(8120, 3, 16)]);
    index_tuple_overwrite(&mut PageMut(&mut bytes), 2, &[8; 5]).unwrap();
    assert_eq!(items(&bytes), [at(8160, 1, 16), at(8152, 8, 5), at(8136, 3, 16)]);
    let error = index_tuple_overwrite(&mut PageMut(&mut bytes), 3, &[0; 8192]);
    assert_eq!(error, Err(RedoError::NoRoom(8192)));
}

#[test]
fn corrupt_pages_are_errors() {
    let mut bytes = empty_page(16);
    for byte in [1, 2, 3, 4] {
        push(&mut bytes, &[byte; 16]);
    }
    let all_fail = |bytes: &[u8; BLCKSZ]| {
        let mut page = *bytes;
        assert!(repair_fragmentation(&mut PageMut(&mut page)).is_err());
        let mut page = *bytes;
        assert!(index_multi_delete(&mut PageMut(&mut page), [1, 2, 3].into_iter()).is_err());
        let mut page = *bytes;
        assert!(index_tuple_delete(&mut PageMut(&mut page), 4).is_err());
        let mut page = *bytes;
        assert!(index_tuple_overwrite(&mut PageMut(&mut page), 4, &[1]).is_err());
    };
    for id in [ItemId::normal(100, 16), ItemId::normal(8168, 16), ItemId::normal(8160, 32_767)] {
        let mut page = bytes.clone();
        PageMut(&mut page).set_item_id(4, id);
        all_fail(&page);
    }
    for (at, value) in [(12, 20), (12, 8192), (14, 30), (14, 8200), (16, 8195), (16, 100)] {
        let mut page = bytes.clone();
        put_u16(&mut *page, at, value);
        all_fail(&page);
        let added = add_item(&mut PageMut(&mut page), &[1], 0, AtExisting::Overwrite, ItemsOf::Index);
        assert!(added.is_err());
    }
}
