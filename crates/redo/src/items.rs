//! Items on a page: insertion, deletion, compaction, free space (`storage/page/bufpage.c`, PostgreSQL 18).

use walrider_layout::OffsetNumber;
use walrider_layout::page::{Page, PageMut};

use crate::RedoError;

/// What kind of page an item is added to (`PAI_IS_HEAP`): a heap page has a limit on line pointers, and reuses free ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemsOf {
    /// A heap page.
    Heap,
    /// An index page.
    Index,
}

/// How an item that goes to a line pointer that exists already is treated (`PAI_OVERWRITE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtExisting {
    /// The line pointer must be free, and is reused.
    Overwrite,
    /// Line pointers from there on move up by one.
    Shift,
}

/// Adds an item at a line pointer number; 0 chooses the next free one. Returns the number (`PageAddItemExtended`).
pub fn add_item(
    _page: &mut PageMut<'_>,
    _item: &[u8],
    _number: OffsetNumber,
    _at_existing: AtExisting,
    _of: ItemsOf,
) -> Result<OffsetNumber, RedoError> {
    Err(RedoError::CorruptPage("not written yet"))
}

/// Moves all tuples together at the end of the page, and drops unused line pointers at the end of the array
/// (`PageRepairFragmentation`).
pub fn repair_fragmentation(_page: &mut PageMut<'_>) -> Result<(), RedoError> {
    Err(RedoError::CorruptPage("not written yet"))
}

/// Drops unused line pointers at the end of the array (`PageTruncateLinePointerArray`).
pub fn truncate_line_pointers(_page: &mut PageMut<'_>) {}

/// Free bytes for one more item with its line pointer (`PageGetFreeSpace`).
pub fn free_space(_page: Page<'_>) -> usize {
    0
}

/// Like [`free_space`], but 0 where no line pointer can be had (`PageGetHeapFreeSpace`).
pub fn heap_free_space(_page: Page<'_>) -> usize {
    0
}
