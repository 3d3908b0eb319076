//! The free space map: per heap block one byte of how much is free, in a tree of maxima
//! (`storage/freespace/freespace.c`, `fsmpage.c`, PostgreSQL 18.6).
//!
//! A page is a binary tree in an array: node `i` has the children `2i+1` and `2i+2`, and holds the larger of their
//! values; the last level are the slots. Pages form a tree of three levels: slots of the lowest level are heap blocks,
//! slots above are pages, whose root's value they repeat. In the file the pages stand in depth-first order.
//!
//! Nothing here looks at page LSNs: the map is not logged, and stale values are repaired by its readers.

use walrider_layout::bytes::put_u32;
use walrider_layout::page::{PAGE_HEADER_SIZE, Page, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, PageBytes};

use crate::heap_tuple::MAX_TUPLE_SIZE;
use crate::{Env, Target};

/// `fp_next_slot`: where the next search begins.
const NEXT_SLOT: usize = PAGE_HEADER_SIZE;
/// `fp_nodes`.
const NODES: usize = PAGE_HEADER_SIZE + 4;
/// Nodes on a page (`NodesPerPage`).
const NODES_PER_PAGE: usize = BLCKSZ - NODES;
/// Nodes above the slots (`NonLeafNodesPerPage`).
const INNER_NODES: usize = BLCKSZ / 2 - 1;
/// Slots of a page (`SlotsPerFSMPage`).
pub const SLOTS_PER_PAGE: usize = NODES_PER_PAGE - INNER_NODES;
/// The level of the root page; the lowest is 0 (`FSM_ROOT_LEVEL`).
const ROOT_LEVEL: u32 = 2;
/// Bytes from one category to the next (`FSM_CAT_STEP`).
const CATEGORY_STEP: usize = BLCKSZ / 256;

/// A page by its level, and its number within that level (`FSMAddress`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    level: u32,
    number: u64,
}

const ROOT: Address = Address { level: ROOT_LEVEL, number: 0 };

impl Address {
    /// The page of the lowest level that has a heap block's slot, and the slot (`fsm_get_location`).
    fn of_heap_block(heap_block: BlockNumber) -> (Address, usize) {
        let number = u64::from(heap_block);
        let slots = SLOTS_PER_PAGE as u64;
        (Address { level: 0, number: number / slots }, (number % slots) as usize)
    }

    /// The page above, and the slot there (`fsm_get_parent`).
    fn parent(self) -> (Address, usize) {
        let slots = SLOTS_PER_PAGE as u64;
        (Address { level: self.level + 1, number: self.number / slots }, (self.number % slots) as usize)
    }

    /// The page below that a slot stands for (`fsm_get_child`).
    fn child(self, slot: usize) -> Address {
        Address { level: self.level - 1, number: self.number * SLOTS_PER_PAGE as u64 + slot as u64 }
    }

    /// Where the page is in the file (`fsm_logical_to_physical`). `None` beyond the last block that a file can have;
    /// no page that covers a heap block is there.
    fn block(self) -> Option<BlockNumber> {
        let slots = SLOTS_PER_PAGE as u64;
        // In depth-first order, all pages of its levels up to the first lowest one below this page come before it.
        let mut first_below = self.number * slots.pow(self.level);
        let mut pages = 0;
        for _ in 0..=ROOT_LEVEL {
            pages += first_below + 1;
            first_below /= slots;
        }
        BlockNumber::try_from(pages - u64::from(self.level) - 1).ok()
    }
}

/// The block of the map, and the slot on it, of a heap block.
pub fn location(heap_block: BlockNumber) -> (BlockNumber, u16) {
    let (address, slot) = Address::of_heap_block(heap_block);
    let block = address.block().expect("the map of the largest heap is far smaller than the largest file");
    (block, slot as u16)
}

/// The category that the map stores for so many free bytes (`fsm_space_avail_to_cat`).
#[inline]
pub fn category(free_bytes: usize) -> u8 {
    // The highest is reserved for pages that any tuple fits on.
    if free_bytes >= MAX_TUPLE_SIZE { 255 } else { (free_bytes / CATEGORY_STEP).min(254) as u8 }
}

/// The value of a slot (`fsm_get_avail`); 0 for one that does not exist.
pub fn get_avail(page: Page<'_>, slot: u16) -> u8 {
    page.0.get(NODES + INNER_NODES + usize::from(slot)).copied().unwrap_or(0)
}

/// The largest value of all slots, as the root of the page's tree says (`fsm_get_max_avail`).
pub fn max_avail(page: Page<'_>) -> u8 {
    page.0[NODES]
}

fn nodes(page: &mut PageBytes) -> &mut [u8; NODES_PER_PAGE] {
    page.last_chunk_mut().expect("the nodes are the end of a page")
}

/// The larger value of the children of a node that is not a leaf; nodes that do not exist have none.
#[inline]
fn of_children(nodes: &[u8; NODES_PER_PAGE], node: usize) -> u8 {
    let child = |at: usize| nodes.get(at).copied().unwrap_or(0);
    child(2 * node + 1).max(child(2 * node + 2))
}

/// Sets a slot's value and what follows from it further up; whether the page was changed (`fsm_set_avail`). A slot
/// that does not exist is ignored.
///
/// A tree whose root then has a smaller value than the slot was corrupt, and is rebuilt.
pub fn set_avail(page: &mut PageMut<'_>, slot: u16, value: u8) -> bool {
    let nodes = nodes(page.0);
    let mut node = INNER_NODES + usize::from(slot);
    if node >= NODES_PER_PAGE || (nodes[node] == value && value <= nodes[0]) {
        return false;
    }
    nodes[node] = value;
    while node > 0 {
        node = (node - 1) / 2;
        let larger = of_children(nodes, node);
        if nodes[node] == larger {
            break;
        }
        nodes[node] = larger;
    }
    if value > nodes[0] {
        rebuild(nodes);
    }
    true
}

/// Zeroes the slots from this one on; whether one had a value (`fsm_truncate_avail`).
pub fn truncate_avail(page: &mut PageMut<'_>, first_slot: u16) -> bool {
    let nodes = nodes(page.0);
    let Some(tail) = nodes.get_mut(INNER_NODES + usize::from(first_slot)..) else { return false };
    let changed = tail.iter().any(|&value| value != 0);
    if changed {
        tail.fill(0);
        rebuild(nodes);
    }
    changed
}

/// Computes all nodes above the slots (`fsm_rebuild_page`).
fn rebuild(nodes: &mut [u8; NODES_PER_PAGE]) {
    for node in (0..INNER_NODES).rev() {
        nodes[node] = of_children(nodes, node);
    }
}

/// Stores what a heap block has free (`XLogRecordPageWithFreeSpace`); `target` and `slot` are from [`location`].
///
/// The change is a real one even where hint bits are logged, and must reach the disk: PostgreSQL does not use
/// `MarkBufferDirtyHint` here, which would drop it during recovery. A page that did not exist comes into being as
/// zeros, and is initialised no earlier than it gets a value: PostgreSQL does not write one that is merely initialised.
pub fn record_free_space(target: &mut Target<'_>, slot: u16, category: u8) {
    if !target.exists {
        target.exists = true;
        target.dirty = true;
    }
    let mut page = PageMut(target.bytes);
    if page.get().is_new() {
        if category == 0 {
            return;
        }
        page.init(0);
    }
    if set_avail(&mut page, slot, category) {
        target.dirty = true;
    }
}

/// The free space map of one relation, while it is truncated.
pub trait FsmFork {
    /// Why a page cannot be had.
    type Error;

    /// How many blocks the fork has; 0 where it does not exist.
    fn blocks(&mut self) -> Result<BlockNumber, Self::Error>;

    /// Lets `change` look at a page that exists, and change it; `None` where the block is beyond the end.
    ///
    /// A change without [`Target::dirty`] may be lost, and PostgreSQL loses it too.
    fn page<R>(
        &mut self,
        block: BlockNumber,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<Option<R>, Self::Error>;
}

/// Zeroes the slots of removed heap blocks on the last page that stays; returns how many blocks of the map stay, or
/// `None` where the map was smaller already and the truncation has nothing to do with it
/// (`FreeSpaceMapPrepareTruncateRel`). `first_removed` is the heap's new size.
///
/// The caller then cuts off the rest of the file, and calls [`vacuum_range`] from `first_removed` on.
///
/// # Errors
/// Those of the fork.
pub fn prepare_truncate<F: FsmFork>(fork: &mut F, first_removed: BlockNumber) -> Result<Option<BlockNumber>, F::Error> {
    let (block, slot) = location(first_removed);
    if slot == 0 {
        return Ok((fork.blocks()? > block).then_some(block));
    }
    let truncated = fork.page(block, |target| truncate_tail(target, slot))?;
    Ok(truncated.map(|()| block + 1))
}

/// Zeroes the slots of removed heap blocks, from `first_slot` on, on the last page that stays.
pub fn truncate_tail(target: &mut Target<'_>, first_slot: u16) {
    let mut page = PageMut(target.bytes);
    if page.get().is_new() {
        page.init(0);
    }
    truncate_avail(&mut page, first_slot);
    // Written back even if no slot had a value, and even where hint bits are logged (MarkBufferDirty).
    target.dirty = true;
}

/// How many blocks a map keeps that has as many as `first_removed` heap blocks ask for, and the slot from which on the last of
/// them is zeroed; 0: none of it, as the map's first removed page begins just there.
pub fn truncation(first_removed: BlockNumber) -> (BlockNumber, u16) {
    let (block, slot) = location(first_removed);
    if slot == 0 { (block, 0) } else { (block + 1, slot) }
}

/// The blocks of the map above the one that has a heap block's slot.
pub fn blocks_above(heap_block: BlockNumber) -> [BlockNumber; 2] {
    let (lowest, _) = Address::of_heap_block(heap_block);
    let (middle, _) = lowest.parent();
    [ROOT, middle].map(|address| address.block().expect("it is before the one below"))
}

/// Whether a page is initialised, and the next search on it begins at its first slot.
pub fn is_settled(page: Page<'_>) -> bool {
    !page.is_new() && page.0[NEXT_SLOT..NODES].iter().all(|&byte| byte == 0)
}

/// Whether a block of the map is above the lowest level: no heap block has its slot there.
pub fn is_upper(block: BlockNumber) -> bool {
    // The root, and then each page of the middle level before those below it.
    block == 0 || (block - 1).is_multiple_of(SLOTS_PER_PAGE as u32 + 1)
}

/// Brings the upper levels up to date for the heap blocks from `start` on, to `end` (exclusive; `BlockNumber::MAX`
/// means all the rest), after the lowest level was changed (`FreeSpaceMapVacuumRange`).
///
/// Resets the next slot of every page that it comes across, without that being a reason to write the page; new values
/// are one unless hint bits are logged (`MarkBufferDirtyHint` does nothing then during recovery). So where hint bits
/// are logged, PostgreSQL writes new values of the upper levels only if the page was to be written anyhow.
///
/// # Errors
/// Those of the fork.
pub fn vacuum_range<F: FsmFork>(fork: &mut F, start: BlockNumber, end: BlockNumber, env: &Env) -> Result<(), F::Error> {
    if end > start {
        vacuum_page(fork, ROOT, start, end - 1, !env.hint_bits_are_logged)?;
    }
    Ok(())
}

/// Brings a page and those below it up to date for the heap blocks from `start` to `last`; returns its largest value,
/// or `None` where the page does not exist (`fsm_vacuum_page`).
fn vacuum_page<F: FsmFork>(
    fork: &mut F,
    address: Address,
    start: BlockNumber,
    last: BlockNumber,
    dirties: bool,
) -> Result<Option<u8>, F::Error> {
    let Some(block) = address.block() else { return Ok(None) };
    if fork.page(block, |_| ())?.is_none() {
        return Ok(None);
    }
    if address.level > 0 {
        let (first_slot, last_slot) = slots_of(address, start, last);
        let mut slot = first_slot;
        while slot <= last_slot {
            let Some(value) = vacuum_page(fork, address.child(slot), start, last, dirties)? else { break };
            set_slots(fork, block, slot, slot, value, dirties)?;
            slot += 1;
        }
        // The first child that does not exist is the last one asked for: all slots from there on become 0.
        if slot <= last_slot {
            set_slots(fork, block, slot, last_slot, 0, dirties)?;
        }
    }
    fork.page(block, reset_next_slot)
}

/// Lets the next search on a page begin at its first slot, which is no reason to write the page; returns the page's largest value.
pub fn reset_next_slot(target: &mut Target<'_>) -> u8 {
    put_u32(target.bytes, NEXT_SLOT, 0);
    max_avail(Page(target.bytes))
}

/// A page whose largest value is this, for [`vacuum_range`] to look at.
pub fn page_with(value: u8) -> PageBytes {
    let mut page = [0; BLCKSZ];
    page[NODES] = value;
    page
}

/// The slots of an upper page for the pages that cover the heap blocks from `start` to `last`; the first is greater than
/// the last where there are none.
fn slots_of(address: Address, start: BlockNumber, last: BlockNumber) -> (usize, usize) {
    let at_level = |heap_block: BlockNumber| {
        let (mut at, mut slot) = Address::of_heap_block(heap_block);
        while at.level < address.level {
            (at, slot) = at.parent();
        }
        (at.number, slot)
    };
    let (start_page, start_slot) = at_level(start);
    let (last_page, last_slot) = at_level(last);
    if start_page > address.number || last_page < address.number {
        return (1, 0);
    }
    (
        if start_page == address.number { start_slot } else { 0 },
        if last_page == address.number { last_slot } else { SLOTS_PER_PAGE - 1 },
    )
}

/// Gives slots of an upper page this value.
fn set_slots<F: FsmFork>(
    fork: &mut F,
    block: BlockNumber,
    first: usize,
    last: usize,
    value: u8,
    dirties: bool,
) -> Result<(), F::Error> {
    fork.page(block, |target| {
        let mut page = PageMut(target.bytes);
        for slot in first as u16..=last as u16 {
            if get_avail(page.get(), slot) == value {
                continue;
            }
            if page.get().is_new() {
                page.init(0);
            }
            set_avail(&mut page, slot, value);
            target.dirty |= dirties;
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::Major;

    #[test]
    fn blocks_are_in_depth_first_order() {
        assert_eq!(SLOTS_PER_PAGE, 4069);
        assert_eq!(location(0), (2, 0));
        assert_eq!(location(4068), (2, 4068));
        assert_eq!(location(4069), (3, 0));
        // Behind the 4069 pages below the first page of the middle level comes the second one of that.
        assert_eq!(location(4069 * 4069 - 1), (4070, 4068));
        assert_eq!(location(4069 * 4069), (4072, 0));
        assert_eq!(ROOT.block(), Some(0));
        assert_eq!(Address { level: 1, number: 0 }.block(), Some(1));
        assert_eq!(Address { level: 1, number: 1 }.block(), Some(4071));
        for block in [0, 1, 4071, 8141] {
            assert!(is_upper(block), "{block}");
        }
        for block in [2, 3, 4070, 4072, 8140, 8142] {
            assert!(!is_upper(block), "{block}");
        }
        assert_eq!([0, 4069 * 4069 - 1, 4069 * 4069].map(blocks_above), [[0, 1], [0, 1], [0, 4071]]);
        assert_eq!((truncation(0), truncation(100), truncation(4069)), ((2, 0), (3, 100), (3, 0)));
        // Every heap block's place exists, even that of the last.
        assert_eq!(location(u32::MAX).0, u32::MAX / 4069 + u32::MAX / (4069 * 4069) + 2);
    }

    #[test]
    fn categories_round_down() {
        for (free, expected) in [(0, 0), (31, 0), (32, 1), (8127, 253), (8128, 254), (8159, 254), (8160, 255)] {
            assert_eq!(category(free), expected, "{free}");
        }
    }

    fn page() -> PageBytes {
        let mut page = [0; BLCKSZ];
        PageMut(&mut page).init(0);
        page
    }

    #[test]
    fn the_root_is_the_largest_slot() {
        let mut bytes = page();
        let mut page = PageMut(&mut bytes);
        assert!(set_avail(&mut page, 0, 9));
        assert!(set_avail(&mut page, 4068, 7));
        assert!(!set_avail(&mut page, 4068, 7));
        assert_eq!(max_avail(page.get()), 9);
        assert!(set_avail(&mut page, 0, 3));
        assert_eq!(max_avail(page.get()), 7);
        assert!(truncate_avail(&mut page, 1));
        assert!(!truncate_avail(&mut page, 1));
        assert_eq!(max_avail(page.get()), 3);
        assert!(!set_avail(&mut page, 4069, 200));
    }

    #[test]
    fn a_torn_tree_is_rebuilt() {
        let mut bytes = page();
        // Agrees with its parent, so that the new value stops here and the root does not learn of it.
        set_avail(&mut PageMut(&mut bytes), 10, 50);
        bytes[NODES] = 0;
        assert!(set_avail(&mut PageMut(&mut bytes), 11, 50));
        assert_eq!(max_avail(Page(&bytes)), 50);
    }

    #[test]
    fn a_page_is_initialised_with_its_first_value() {
        let mut bytes = [0; BLCKSZ];
        let mut target = Target { bytes: &mut bytes, exists: false, dirty: false };
        record_free_space(&mut target, 3, 0);
        assert!(target.exists && target.dirty);
        assert_eq!(*target.bytes, [0; BLCKSZ]);
        target.dirty = false;
        record_free_space(&mut target, 3, 0);
        assert!(!target.dirty);
        record_free_space(&mut target, 3, 8);
        assert!(target.dirty);
        assert_eq!((Page(target.bytes).lower(), get_avail(Page(target.bytes), 3)), (24, 8));
    }

    struct Fork(Vec<(PageBytes, bool)>);

    impl FsmFork for Fork {
        type Error = std::convert::Infallible;

        fn blocks(&mut self) -> Result<BlockNumber, Self::Error> {
            Ok(self.0.len() as BlockNumber)
        }

        fn page<R>(
            &mut self,
            block: BlockNumber,
            change: impl FnOnce(&mut Target<'_>) -> R,
        ) -> Result<Option<R>, Self::Error> {
            let Some((bytes, dirty)) = self.0.get_mut(block as usize) else { return Ok(None) };
            let mut target = Target { bytes, exists: true, dirty: *dirty };
            let result = change(&mut target);
            *dirty = target.dirty;
            Ok(Some(result))
        }
    }

    /// A map of three lowest pages, with the upper levels up to date and every next slot used.
    fn fork() -> Fork {
        let mut fork = Fork(vec![(page(), false); 5]);
        for (block, slot, value) in [(2, 5, 10), (2, 4000, 200), (3, 0, 100), (3, 9, 50), (4, 1, 70)] {
            set_avail(&mut PageMut(&mut fork.0[block].0), slot, value);
        }
        vacuum_range(&mut fork, 0, u32::MAX, &env(false)).unwrap();
        for (bytes, dirty) in &mut fork.0 {
            put_u32(bytes, NEXT_SLOT, 77);
            *dirty = false;
        }
        fork
    }

    fn env(hint_bits_are_logged: bool) -> Env {
        Env { major: Major::V18, hint_bits_are_logged }
    }

    fn slots(fork: &Fork, block: usize, count: u16) -> Vec<u8> {
        (0..count).map(|slot| get_avail(Page(&fork.0[block].0), slot)).collect()
    }

    fn dirty(fork: &Fork) -> Vec<bool> {
        fork.0.iter().map(|page| page.1).collect()
    }

    fn next_slots(fork: &Fork) -> Vec<u8> {
        fork.0.iter().map(|page| page.0[NEXT_SLOT]).collect()
    }

    #[test]
    fn truncation_reaches_the_root() {
        let mut fork = fork();
        assert_eq!(slots(&fork, 1, 3), [200, 100, 70]);
        assert_eq!(slots(&fork, 0, 1), [200]);
        let start = 100;
        assert_eq!(prepare_truncate(&mut fork, start), Ok(Some(3)));
        fork.0.truncate(3);
        assert_eq!(dirty(&fork), [false, false, true]);
        vacuum_range(&mut fork, start, u32::MAX, &env(false)).unwrap();
        assert_eq!(slots(&fork, 1, 3), [10, 0, 0]);
        assert_eq!(max_avail(Page(&fork.0[0].0)), 10);
        assert_eq!(dirty(&fork), [true; 3]);
        assert_eq!(next_slots(&fork), [0; 3]);
    }

    #[test]
    fn truncation_between_two_pages_touches_only_the_levels_above() {
        let mut fork = fork();
        assert_eq!(prepare_truncate(&mut fork, 4069), Ok(Some(3)));
        fork.0.truncate(3);
        vacuum_range(&mut fork, 4069, u32::MAX, &env(false)).unwrap();
        assert_eq!(slots(&fork, 1, 3), [200, 0, 0]);
        assert_eq!(max_avail(Page(&fork.0[0].0)), 200);
        // The root keeps its value, and with it is not written; its next slot is reset all the same.
        assert_eq!(dirty(&fork), [false, true, false]);
        assert_eq!(next_slots(&fork), [0, 0, 77]);
    }

    #[test]
    fn logged_hint_bits_keep_upper_pages_from_being_written() {
        let mut fork = fork();
        assert_eq!(prepare_truncate(&mut fork, 100), Ok(Some(3)));
        fork.0.truncate(3);
        vacuum_range(&mut fork, 100, u32::MAX, &env(true)).unwrap();
        assert_eq!(max_avail(Page(&fork.0[0].0)), 10);
        assert_eq!(dirty(&fork), [false, false, true]);
    }

    #[test]
    fn a_map_that_is_smaller_already_is_left_alone() {
        let mut fork = fork();
        assert_eq!(prepare_truncate(&mut fork, 3 * 4069), Ok(None));
        assert_eq!(prepare_truncate(&mut fork, 3 * 4069 + 1), Ok(None));
        assert_eq!(prepare_truncate(&mut fork, 3 * 4069 - 1), Ok(Some(5)));
        assert_eq!(prepare_truncate(&mut Fork(vec![]), 0), Ok(None));
    }
}
