//! Moves items together at the end of a page (`compactify_tuples`, `storage/page/bufpage.c`, PostgreSQL 18).
//!
//! One look at all line pointers, in their order, gives the items their new places and finds the runs of items that
//! stay neighbours; then each run is moved in one go. Nothing is written below the new `pd_upper`, so the result does
//! not depend on the order of the moves.

use arrayvec::ArrayVec;
use walrider_layout::BLCKSZ;
use walrider_layout::page::{ITEM_ID_SIZE, PAGE_HEADER_SIZE, PageMut};

use crate::RedoError;

/// Most line pointers for which there is room on a page.
const MAX_LINE_POINTERS: usize = (BLCKSZ - PAGE_HEADER_SIZE) / ITEM_ID_SIZE;

/// Bytes that are moved in one go.
#[derive(Clone, Copy)]
struct Run {
    from: u16,
    to: u16,
    len: u16,
}

impl Run {
    fn from(&self) -> std::ops::Range<usize> {
        self.from.into()..self.end()
    }

    fn end(&self) -> usize {
        usize::from(self.from) + usize::from(self.len)
    }
}

/// A compaction: first of the line pointers, then of what they lead to. Offsets are of any value until the end.
pub(super) struct Compaction {
    upper: i32,
    special: i32,
    /// Where the last item lies.
    head: i32,
    /// Where the run that it belongs to ends.
    tail: i32,
    /// Where it goes.
    to: i32,
    /// Negative if an item did not lie between `upper` and `special`.
    outside: i32,
    runs: ArrayVec<Run, { MAX_LINE_POINTERS + 1 }>,
}

impl Compaction {
    /// Of items between these two offsets of the page.
    #[inline]
    pub(super) fn new(upper: usize, special: usize) -> Compaction {
        let (upper, special) = (upper as i32, special as i32);
        Compaction { upper, special, head: special, tail: special, to: special, outside: 0, runs: ArrayVec::new() }
    }

    /// The last item's offset; the end of the page's items before the first.
    #[inline]
    pub(super) fn head(&self) -> u32 {
        self.head as u32
    }

    /// Takes the item of the next line pointer, and gives its new offset. Neither may exceed 15 bits.
    #[inline]
    pub(super) fn item(&mut self, offset: u32, aligned_len: u32) -> u32 {
        let (offset, len) = (offset as i32, aligned_len as i32);
        let end = offset + len;
        // Collected instead of acted upon: wrong offsets are rare, and a branch costs as much as all the rest.
        self.outside |= (offset - self.upper) | (self.special - end);
        if end != self.head {
            self.end_run();
            self.tail = end;
        }
        self.head = offset;
        self.to -= len;
        self.to as u32 & 0x7FFF
    }

    #[inline]
    fn end_run(&mut self) {
        let run = Run { from: self.head as u16, to: self.to as u16, len: (self.tail - self.head) as u16 };
        // Cannot fail: a page has no more line pointers.
        let _ = self.runs.try_push(run);
    }

    /// Moves the items. The line pointers end at `lower`.
    ///
    /// # Errors
    /// When an item was not where items are, or when they are longer than the page.
    #[inline]
    pub(super) fn finish(mut self, page: &mut PageMut<'_>, lower: usize) -> Result<(), RedoError> {
        if self.outside < 0 {
            return Err(RedoError::CorruptPage("line pointer leads outside the page's items"));
        }
        if self.to < lower as i32 {
            return Err(RedoError::CorruptPage("items are longer than the page"));
        }
        self.end_run();
        // A run can be moved at once if all later ones lie below its new place.
        let (mut at_once, mut end, mut top) = (self.runs.len(), 0, 0);
        for (index, run) in self.runs.iter().enumerate().rev() {
            let is_free = usize::from(run.to) >= end;
            end = end.max(run.end());
            if !is_free {
                (at_once, top) = (index, end);
            }
        }
        let (at_once, later) = self.runs.split_at(at_once);
        for run in at_once.iter().filter(|run| run.from != run.to) {
            page.0.copy_within(run.from(), run.to.into());
        }
        if !later.is_empty() {
            move_through_copy(page, later, self.upper as usize..top);
        }
        page.set_upper(self.to as usize);
        Ok(())
    }
}

/// Moves runs out of a copy of the part of the page where they lie.
#[cold]
fn move_through_copy(page: &mut PageMut<'_>, runs: &[Run], part: std::ops::Range<usize>) {
    // Not cleared first: that would take as long as the copy.
    let mut copy: ArrayVec<u8, BLCKSZ> = ArrayVec::new();
    // Cannot fail: a part of a page is not longer than a page.
    let _ = copy.try_extend_from_slice(&page.0[part.clone()]);
    for run in runs {
        let from = run.from();
        page.0[run.to.into()..][..run.len.into()]
            .copy_from_slice(&copy[from.start - part.start..from.end - part.start]);
    }
}
