//! Items on a page: insertion, deletion, compaction, free space (`storage/page/bufpage.c`, PostgreSQL 18).
//!
//! The bytes come out as PostgreSQL's do, stale ones included: the hole keeps what lay there before, and so does
//! alignment padding behind a newly added item. Compaction never writes below the new `pd_upper`, so its result
//! depends only on the order in which tuples end up, which is that of their line pointers, last one lowest.

mod compaction;

use walrider_layout::page::{ITEM_ID_SIZE, ItemId, ItemState, PAGE_HEADER_SIZE, PD_HAS_FREE_LINES, Page, PageMut};
use walrider_layout::{BLCKSZ, OffsetNumber, maxalign};

use crate::{RedoError, index_tuple};
use compaction::Compaction;

/// Most line pointers that a heap page may have (`MaxHeapTuplesPerPage`, `access/htup_details.h`): what fits if
/// every tuple is a bare header of 23 bytes.
pub const MAX_HEAP_TUPLES_PER_PAGE: OffsetNumber =
    ((BLCKSZ - PAGE_HEADER_SIZE) / (maxalign(23) + ITEM_ID_SIZE)) as OffsetNumber;

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

const HEADER: RedoError = RedoError::CorruptPage("header offsets make no sense");
const LINE_POINTER: RedoError = RedoError::CorruptPage("line pointer leads outside the page's items");

/// Where the line pointer of this number is.
#[inline]
fn slot(number: OffsetNumber) -> usize {
    PAGE_HEADER_SIZE + ITEM_ID_SIZE * (usize::from(number) - 1)
}

/// The same line pointer to another place.
#[inline]
fn moved(id: ItemId, offset: usize) -> ItemId {
    ItemId(id.0 & !0x7FFF | offset as u32 & 0x7FFF)
}

/// Adds an item at a line pointer number; 0 chooses the next free one. Returns the number (`PageAddItemExtended`).
///
/// # Errors
/// When the line pointer is taken or beyond the end, when there is no room, or when the page header makes no sense.
#[inline]
pub fn add_item(
    page: &mut PageMut<'_>,
    item: &[u8],
    number: OffsetNumber,
    at_existing: AtExisting,
    of: ItemsOf,
) -> Result<OffsetNumber, RedoError> {
    let (number, at) = make_item(page, item.len(), number, at_existing, of)?;
    page.0[at..at + item.len()].copy_from_slice(item);
    Ok(number)
}

/// As [`add_item`], for an item of this length that the caller then stores. Returns its number and where it lies;
/// there are so many bytes from there on.
///
/// # Errors
/// As [`add_item`].
#[inline]
pub(crate) fn make_item(
    page: &mut PageMut<'_>,
    len: usize,
    number: OffsetNumber,
    at_existing: AtExisting,
    of: ItemsOf,
) -> Result<(OffsetNumber, usize), RedoError> {
    let header = page.get();
    if !header.is_sane() {
        return Err(HEADER);
    }
    let (lower, upper) = (header.lower(), header.upper());
    let limit = header.max_offset() + 1;
    let mut shift = false;
    let number = match number {
        0 => choose_free(page, limit),
        _ if number > limit => return Err(RedoError::OffsetBeyondEnd(number)),
        _ if number < limit && at_existing == AtExisting::Shift => {
            shift = true;
            number
        }
        _ => {
            if header.item_id(number).is_some_and(is_taken) {
                return Err(RedoError::CorruptPage("line pointer to be filled is in use"));
            }
            number
        }
    };
    if of == ItemsOf::Heap && number > MAX_HEAP_TUPLES_PER_PAGE {
        return Err(RedoError::OffsetBeyondEnd(number));
    }
    let lower = lower + if number == limit || shift { ITEM_ID_SIZE } else { 0 };
    let upper = match upper.checked_sub(maxalign(len)) {
        Some(upper) if lower <= upper => upper,
        _ => return Err(RedoError::NoRoom(len)),
    };
    if shift {
        page.0.copy_within(slot(number)..slot(limit), slot(number + 1));
    }
    page.set_item_id(number, ItemId::normal(upper, len));
    page.set_lower(lower);
    page.set_upper(upper);
    Ok((number, upper))
}

#[inline]
fn is_taken(id: ItemId) -> bool {
    id.state() != ItemState::Unused || !id.is_empty()
}

/// The first line pointer that is free to use, believing the page's hint as far as PostgreSQL does.
fn choose_free(page: &mut PageMut<'_>, limit: OffsetNumber) -> OffsetNumber {
    let flags = page.get().flags();
    if flags & PD_HAS_FREE_LINES == 0 {
        return limit;
    }
    let free = (1..limit).find(|&number| page.get().item_id(number).is_some_and(|id| !is_taken(id)));
    free.unwrap_or_else(|| {
        page.set_flags(flags & !PD_HAS_FREE_LINES);
        limit
    })
}

/// Moves all tuples together at the end of the page, and drops unused line pointers at the end of the array
/// (`PageRepairFragmentation`).
///
/// # Errors
/// When the header or a line pointer makes no sense, or when the items cannot all fit.
pub fn repair_fragmentation(page: &mut PageMut<'_>) -> Result<(), RedoError> {
    let header = page.get();
    if !header.is_sane() {
        return Err(HEADER);
    }
    let (lower, upper, special) = (header.lower(), header.upper(), header.special());
    let count = header.max_offset();
    let mut compaction = Compaction::new(upper, special);
    let mut unused = 0;
    let mut last_used = 0;
    // No branch depends on what a line pointer is: those without tuples lie about at random.
    for (index, bytes) in line_pointers(page, count).iter_mut().enumerate() {
        let id = u32::from_le_bytes(*bytes);
        let is_used = id & ItemId::STATE_MASK != 0;
        unused += usize::from(!is_used);
        last_used = if is_used { index + 1 } else { last_used };
        let id = ItemId(if is_used { id } else { 0 });
        let offset = if id.is_empty() { compaction.head() } else { id.offset() as u32 };
        let to = compaction.item(offset, maxalign(id.len()) as u32);
        let id = if id.is_empty() { id } else { moved(id, to as usize) };
        *bytes = id.0.to_le_bytes();
    }
    compaction.finish(page, lower)?;
    let unused_at_end = usize::from(count) - last_used;
    if unused_at_end > 0 {
        page.set_lower(lower - ITEM_ID_SIZE * unused_at_end);
    }
    set_has_free_lines(page, unused > unused_at_end);
    Ok(())
}

fn set_has_free_lines(page: &mut PageMut<'_>, has: bool) {
    let flags = page.get().flags() & !PD_HAS_FREE_LINES;
    page.set_flags(if has { flags | PD_HAS_FREE_LINES } else { flags });
}

/// The line pointers of a page whose `pd_lower` was checked.
#[inline]
fn line_pointers<'p>(page: &'p mut PageMut<'_>, count: OffsetNumber) -> &'p mut [[u8; ITEM_ID_SIZE]] {
    page.0[PAGE_HEADER_SIZE..][..ITEM_ID_SIZE * usize::from(count)].as_chunks_mut().0
}

/// Drops unused line pointers at the end of the array, but never the first one (`PageTruncateLinePointerArray`).
pub fn truncate_line_pointers(page: &mut PageMut<'_>) {
    let count = page.get().max_offset();
    let is_unused =
        |number: &OffsetNumber| page.get().item_id(*number).is_some_and(|id| id.state() == ItemState::Unused);
    let keep = (2..=count).rev().find(|number| !is_unused(number)).unwrap_or(count.min(1));
    let has_free = (1..=keep).any(|number| is_unused(&number));
    if keep < count {
        let lower = page.get().lower() - ITEM_ID_SIZE * usize::from(count - keep);
        page.set_lower(lower);
    }
    set_has_free_lines(page, has_free);
}

/// Adds an item to an index page; one that is there already, and all behind it, move up by one line pointer.
///
/// # Errors
/// As [`add_item`].
#[inline]
pub fn add_index_item(page: &mut PageMut<'_>, item: &[u8], number: OffsetNumber) -> Result<(), RedoError> {
    add_item(page, item, number, AtExisting::Shift, ItemsOf::Index).map(drop)
}

/// Adds index tuples, which lie one behind the other without alignment, behind those of the page. Returns how many.
///
/// # Errors
/// When the data does not consist of tuples, or as [`add_item`].
pub fn append_index_tuples(page: &mut PageMut<'_>, mut tuples: &[u8]) -> Result<usize, RedoError> {
    let mut count = 0;
    while !tuples.is_empty() {
        let number = page.get().max_offset() + 1;
        add_index_item(page, index_tuple::take(&mut tuples)?, number)?;
        count += 1;
    }
    Ok(count)
}

/// Free bytes for one more item with its line pointer (`PageGetFreeSpace`).
#[inline]
pub fn free_space(page: Page<'_>) -> usize {
    exact_free_space(page).saturating_sub(ITEM_ID_SIZE)
}

/// Free bytes, as if no line pointer were needed (`PageGetExactFreeSpace`).
#[inline]
pub fn exact_free_space(page: Page<'_>) -> usize {
    page.upper().saturating_sub(page.lower())
}

/// Like [`free_space`], but 0 where no line pointer can be had (`PageGetHeapFreeSpace`).
#[inline]
pub fn heap_free_space(page: Page<'_>) -> usize {
    let space = free_space(page);
    let count = page.max_offset();
    if space == 0 || count < MAX_HEAP_TUPLES_PER_PAGE {
        return space;
    }
    let may_have_free = page.flags() & PD_HAS_FREE_LINES != 0;
    let has_free = || (1..=count).any(|number| page.item_id(number).is_some_and(|id| id.state() == ItemState::Unused));
    if may_have_free && has_free() { space } else { 0 }
}

/// The line pointer of an index item, whose storage is found to lie where items do.
#[inline]
fn index_item(page: Page<'_>, number: OffsetNumber) -> Result<ItemId, RedoError> {
    if !page.is_sane() {
        return Err(HEADER);
    }
    let id = page.item_id(number).filter(|id| !id.is_empty()).ok_or(RedoError::LinePointer(number))?;
    if id.offset() < page.upper() || id.offset() + id.len() > page.special() || !id.offset().is_multiple_of(8) {
        return Err(LINE_POINTER);
    }
    Ok(id)
}

/// Moves all items at or below `offset` by `delta` bytes, in the line pointers only.
fn adjust_offsets(page: &mut PageMut<'_>, offset: usize, delta: isize) {
    let count = page.get().max_offset();
    for bytes in line_pointers(page, count) {
        let id = ItemId(u32::from_le_bytes(*bytes));
        let after = moved(id, id.offset().wrapping_add_signed(delta));
        // Every one is written and no condition is a branch, so that several are done at once: pages have hundreds.
        let moves = !id.is_empty() & (id.offset() <= offset);
        *bytes = if moves { after } else { id }.0.to_le_bytes();
    }
}

/// Removes an index item with its line pointer; later line pointers move down by one (`PageIndexTupleDelete`).
///
/// # Errors
/// When there is no such item, or header or line pointer make no sense.
pub fn index_tuple_delete(page: &mut PageMut<'_>, number: OffsetNumber) -> Result<(), RedoError> {
    let id = index_item(page.get(), number)?;
    let (lower, upper) = (page.get().lower(), page.get().upper());
    page.0.copy_within(slot(number + 1)..lower, slot(number));
    page.set_lower(lower - ITEM_ID_SIZE);
    close_gap(page, upper, id);
    Ok(())
}

/// Gives the storage of a removed item back.
fn close_gap(page: &mut PageMut<'_>, upper: usize, id: ItemId) {
    let len = maxalign(id.len());
    page.0.copy_within(upper..id.offset(), upper + len);
    page.set_upper(upper + len);
    adjust_offsets(page, id.offset(), len as isize);
}

/// Removes an index item but leaves its line pointer, unused, unless it is the last one
/// (`PageIndexTupleDeleteNoCompact`).
///
/// # Errors
/// When there is no such item, or header or line pointer make no sense.
pub fn index_tuple_delete_no_compact(page: &mut PageMut<'_>, number: OffsetNumber) -> Result<(), RedoError> {
    let id = index_item(page.get(), number)?;
    let (lower, upper) = (page.get().lower(), page.get().upper());
    if number < page.get().max_offset() {
        page.set_item_id(number, ItemId::UNUSED);
    } else {
        page.set_lower(lower - ITEM_ID_SIZE);
    }
    close_gap(page, upper, id);
    Ok(())
}

/// Removes index items, whose numbers must ascend (`PageIndexMultiDelete`).
///
/// # Errors
/// When there is no such item, when numbers do not ascend, or header or a line pointer make no sense.
pub fn index_multi_delete<N>(page: &mut PageMut<'_>, numbers: N) -> Result<(), RedoError>
where
    N: DoubleEndedIterator<Item = OffsetNumber> + ExactSizeIterator,
{
    // For up to two items PostgreSQL does not compact, and so keeps the order in which items lie.
    if numbers.len() <= 2 {
        for number in numbers.rev() {
            index_tuple_delete(page, number)?;
        }
        return Ok(());
    }
    let header = page.get();
    if !header.is_sane() {
        return Err(HEADER);
    }
    let (lower, upper, special) = (header.lower(), header.upper(), header.special());
    let count = header.max_offset();
    let mut compaction = Compaction::new(upper, special);
    let mut numbers = numbers;
    let mut next = numbers.next();
    let mut kept = 0;
    let ids = line_pointers(page, count);
    for index in 0..ids.len() {
        let id = ItemId(u32::from_le_bytes(ids[index]));
        if id.offset() < upper || id.offset() + id.len() > special || !id.offset().is_multiple_of(8) {
            return Err(LINE_POINTER);
        }
        if next == Some(index as OffsetNumber + 1) {
            next = numbers.next();
            continue;
        }
        let to = compaction.item(id.offset() as u32, maxalign(id.len()) as u32);
        ids[kept] = moved(id, to as usize).0.to_le_bytes();
        kept += 1;
    }
    if next.is_some() {
        return Err(RedoError::CorruptRecord("index items to be deleted do not exist or are out of order"));
    }
    page.set_lower(PAGE_HEADER_SIZE + ITEM_ID_SIZE * kept);
    compaction.finish(page, lower)
}

/// Replaces an index item where it lies; items below it move if the length changes (`PageIndexTupleOverwrite`).
///
/// # Errors
/// When there is no such item, when the new one does not fit, or header or line pointer make no sense.
pub fn index_tuple_overwrite(page: &mut PageMut<'_>, number: OffsetNumber, item: &[u8]) -> Result<(), RedoError> {
    let id = index_item(page.get(), number)?;
    let (lower, upper) = (page.get().lower(), page.get().upper());
    let (old_len, new_len) = (maxalign(id.len()), maxalign(item.len()));
    if new_len > old_len + (upper - lower) {
        return Err(RedoError::NoRoom(item.len()));
    }
    let delta = old_len as isize - new_len as isize;
    if delta != 0 {
        // Neither sum leaves the page: the item grows by the free space at most.
        let new_upper = upper.wrapping_add_signed(delta);
        page.0.copy_within(upper..id.offset(), new_upper);
        page.set_upper(new_upper);
        adjust_offsets(page, id.offset(), delta);
    }
    let offset = id.offset().wrapping_add_signed(delta);
    let state = (id.state() as u32) << 15;
    page.set_item_id(number, ItemId(offset as u32 | state | (item.len() as u32) << 17));
    page.0[offset..offset + item.len()].copy_from_slice(item);
    Ok(())
}

#[cfg(test)]
mod tests;
