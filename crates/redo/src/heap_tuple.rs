//! The header of a heap tuple (`HeapTupleHeaderData`, `access/htup_details.h`, PostgreSQL 18), and building tuples
//! from what records carry of them.

use std::ops::Range;

use walrider_layout::bytes::{put_u16, put_u32, u16_at};
use walrider_layout::page::{ITEM_ID_SIZE, ItemState, PAGE_HEADER_SIZE, Page, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, OffsetNumber, PageBytes, TransactionId, maxalign};
use walrider_wal::records::heap::{
    HeapHeader, XLHL_KEYS_UPDATED, XLHL_XMAX_EXCL_LOCK, XLHL_XMAX_IS_MULTI, XLHL_XMAX_KEYSHR_LOCK, XLHL_XMAX_LOCK_ONLY,
};

use crate::RedoError;
use crate::items::{self, AtExisting, ItemsOf};

/// Bytes of the fixed header (`SizeofHeapTupleHeader`).
pub const TUPLE_HEADER_SIZE: usize = 23;
/// Longest tuple, header included (`MaxHeapTupleSize`).
pub const MAX_TUPLE_SIZE: usize = BLCKSZ - maxalign(PAGE_HEADER_SIZE + ITEM_ID_SIZE);

const T_XMIN: usize = 0;
const T_XMAX: usize = 4;
/// `t_cid`, or `t_xvac` of tuples that VACUUM FULL before 9.0 moved.
const T_FIELD3: usize = 8;
const T_CTID: usize = 12;
const T_INFOMASK2: usize = 18;
const T_INFOMASK: usize = 20;
const T_HOFF: usize = 22;

const HEAP_XMAX_KEYSHR_LOCK: u16 = 0x0010;
const HEAP_COMBOCID: u16 = 0x0020;
const HEAP_XMAX_EXCL_LOCK: u16 = 0x0040;
const HEAP_XMAX_LOCK_ONLY: u16 = 0x0080;
const HEAP_LOCK_MASK: u16 = HEAP_XMAX_EXCL_LOCK | HEAP_XMAX_KEYSHR_LOCK;
const HEAP_XMIN_FROZEN: u16 = 0x0300;
const HEAP_XMAX_COMMITTED: u16 = 0x0400;
const HEAP_XMAX_INVALID: u16 = 0x0800;
const HEAP_XMAX_IS_MULTI: u16 = 0x1000;
const HEAP_MOVED: u16 = 0x4000 | 0x8000;
/// All that says what xmin and xmax mean.
const HEAP_XACT_MASK: u16 = 0xFFF0;
/// All that says what xmax means.
const HEAP_XMAX_BITS: u16 =
    HEAP_XMAX_COMMITTED | HEAP_XMAX_INVALID | HEAP_XMAX_IS_MULTI | HEAP_LOCK_MASK | HEAP_XMAX_LOCK_ONLY;

const HEAP_KEYS_UPDATED: u16 = 0x2000;
const HEAP_HOT_UPDATED: u16 = 0x4000;

const TOO_LONG: RedoError = RedoError::CorruptRecord("parts of a tuple are longer than the tuple");

/// Line pointer in `t_ctid` while an insertion is speculative (`SpecTokenOffsetNumber`).
const SPECULATIVE_TOKEN: OffsetNumber = 0xFFFE;
/// `t_ctid` of a row that moved to another partition (`MovedPartitionsBlockNumber`, `MovedPartitionsOffsetNumber`).
pub const MOVED_PARTITIONS: (BlockNumber, OffsetNumber) = (BlockNumber::MAX, 0xFFFD);

/// Where the tuple lies that a line pointer leads to, header and data: on the page, and not in its header.
///
/// # Errors
/// When there is no such line pointer, or it is not one to a tuple, or to one without room for a header.
#[inline]
pub fn tuple_at(page: Page<'_>, number: OffsetNumber) -> Result<Range<usize>, RedoError> {
    match page.item_id(number) {
        Some(id) if id.state() == ItemState::Normal && id.len() >= TUPLE_HEADER_SIZE => {
            let at = id.offset()..id.offset() + id.len();
            if at.start >= PAGE_HEADER_SIZE && at.end <= BLCKSZ {
                return Ok(at);
            }
            Err(RedoError::CorruptPage("tuple leads outside the page"))
        }
        _ => Err(RedoError::LinePointer(number)),
    }
}

/// The tuple that a line pointer leads to.
///
/// # Errors
/// As [`tuple_at`].
#[inline]
pub fn tuple_mut<'p>(page: &'p mut PageMut<'_>, number: OffsetNumber) -> Result<&'p mut [u8], RedoError> {
    let at = tuple_at(page.get(), number)?;
    Ok(&mut page.0[at])
}

/// The header of the tuple that a line pointer leads to.
///
/// # Errors
/// As [`tuple_mut`].
#[inline]
pub fn header_mut<'p>(page: &'p mut PageMut<'_>, number: OffsetNumber) -> Result<HeaderMut<'p>, RedoError> {
    let tuple = tuple_mut(page, number)?;
    Ok(HeaderMut(tuple.first_chunk_mut().ok_or(RedoError::LinePointer(number))?))
}

/// Bytes from the beginning of a tuple to its data (`t_hoff`). The tuple has a header.
#[inline]
pub fn hoff(tuple: &[u8]) -> usize {
    usize::from(tuple[T_HOFF])
}

/// Changes the header of a tuple.
pub struct HeaderMut<'p>(pub(crate) &'p mut [u8; TUPLE_HEADER_SIZE]);

impl HeaderMut<'_> {
    /// `HeapTupleHeaderSetXmin`.
    #[inline]
    pub fn set_xmin(&mut self, xid: TransactionId) {
        put_u32(self.0, T_XMIN, xid);
    }

    /// `HeapTupleHeaderSetXmax`.
    #[inline]
    pub fn set_xmax(&mut self, xid: TransactionId) {
        put_u32(self.0, T_XMAX, xid);
    }

    /// `HeapTupleHeaderSetXvac`.
    pub fn set_xvac(&mut self, xid: TransactionId) {
        put_u32(self.0, T_FIELD3, xid);
    }

    /// Stores the command id that all redo stores (`HeapTupleHeaderSetCmax(tuple, FirstCommandId, false)`).
    #[inline]
    pub fn set_first_command(&mut self) {
        put_u32(self.0, T_FIELD3, 0);
        self.set_infomask(self.infomask() & !HEAP_COMBOCID);
    }

    /// `t_ctid`: the tuple itself, or its next version.
    #[inline]
    pub fn set_ctid(&mut self, (block, number): (BlockNumber, OffsetNumber)) {
        put_ctid(self.0, block, number);
    }

    #[inline]
    fn infomask(&self) -> u16 {
        u16_at(self.0, T_INFOMASK)
    }

    /// Stores `t_infomask`.
    #[inline]
    pub fn set_infomask(&mut self, infomask: u16) {
        put_u16(self.0, T_INFOMASK, infomask);
    }

    /// Stores `t_infomask2`.
    #[inline]
    pub fn set_infomask2(&mut self, infomask2: u16) {
        put_u16(self.0, T_INFOMASK2, infomask2);
    }

    /// Replaces what the header says about the meaning of xmax (`HEAP_XMAX_BITS`, `HEAP_MOVED` and
    /// `HEAP_KEYS_UPDATED` cleared, then `fix_infomask_from_infobits` of `access/heap/heapam_xlog.c`).
    #[inline]
    pub fn set_infobits(&mut self, infobits: u8) {
        let bit = |set: u8, bit: u16| if infobits & set != 0 { bit } else { 0 };
        let infomask = self.infomask() & !(HEAP_XMAX_BITS | HEAP_MOVED)
            | bit(XLHL_XMAX_IS_MULTI, HEAP_XMAX_IS_MULTI)
            | bit(XLHL_XMAX_LOCK_ONLY, HEAP_XMAX_LOCK_ONLY)
            | bit(XLHL_XMAX_EXCL_LOCK, HEAP_XMAX_EXCL_LOCK)
            | bit(XLHL_XMAX_KEYSHR_LOCK, HEAP_XMAX_KEYSHR_LOCK);
        self.set_infomask(infomask);
        let infomask2 = u16_at(self.0, T_INFOMASK2) & !HEAP_KEYS_UPDATED | bit(XLHL_KEYS_UPDATED, HEAP_KEYS_UPDATED);
        self.set_infomask2(infomask2);
    }

    /// Says whether the next version is a heap-only tuple on the same page (`HEAP_HOT_UPDATED`).
    #[inline]
    pub fn set_hot_updated(&mut self, hot: bool) {
        let infomask2 = u16_at(self.0, T_INFOMASK2) & !HEAP_HOT_UPDATED;
        self.set_infomask2(if hot { infomask2 | HEAP_HOT_UPDATED } else { infomask2 });
    }

    /// Blanks what may differ between the headers of one tuple, which is at this place (`heap_mask`).
    pub fn mask(&mut self, block: BlockNumber, number: OffsetNumber) {
        let infomask = self.infomask();
        let frozen = infomask & HEAP_XMIN_FROZEN == HEAP_XMIN_FROZEN;
        let hints = if frozen { HEAP_XMAX_COMMITTED | HEAP_XMAX_INVALID } else { HEAP_XACT_MASK };
        self.set_infomask(infomask & !hints);
        // Redo stores FirstCommandId.
        put_u32(self.0, T_FIELD3, 0);
        // Redo of a speculative insertion does not know the token, and stores the tuple's own place.
        if u16_at(self.0, T_CTID + 4) == SPECULATIVE_TOKEN {
            self.set_ctid((block, number));
        }
    }

    /// Whether xmax only locks (`HEAP_XMAX_IS_LOCKED_ONLY`), by the mask alone.
    #[inline]
    pub fn xmax_only_locks(&self) -> bool {
        let infomask = self.infomask();
        infomask & HEAP_XMAX_LOCK_ONLY != 0 || infomask & (HEAP_XMAX_IS_MULTI | HEAP_LOCK_MASK) == HEAP_XMAX_EXCL_LOCK
    }
}

/// A block number in a tuple identifier is stored as two halves, high first.
#[inline]
fn put_ctid(header: &mut [u8; TUPLE_HEADER_SIZE], block: BlockNumber, number: OffsetNumber) {
    put_u16(header, T_CTID, (block >> 16) as u16);
    put_u16(header, T_CTID + 2, block as u16);
    put_u16(header, T_CTID + 4, number);
}

/// A tuple just added to a page, which is filled from the front.
pub struct NewTuple<'p> {
    page: &'p mut PageBytes,
    at: usize,
    end: usize,
}

impl<'p> NewTuple<'p> {
    /// Adds a tuple of this length, header included, to the page.
    ///
    /// # Errors
    /// When the line pointer is not free or there is no room.
    #[inline]
    pub fn add(page: &'p mut PageMut<'_>, number: OffsetNumber, len: usize) -> Result<NewTuple<'p>, RedoError> {
        if number == 0 {
            return Err(RedoError::LinePointer(number));
        }
        let (_, at) = items::make_item(page, len, number, AtExisting::Overwrite, ItemsOf::Heap)?;
        Ok(NewTuple { page: page.0, at, end: at + len })
    }

    /// Stores the header: what the record carries of it, and what follows from elsewhere in the record.
    ///
    /// # Errors
    /// When the tuple is shorter than a header.
    #[inline]
    pub fn header(
        &mut self,
        carried: &HeapHeader,
        xmin: TransactionId,
        xmax: TransactionId,
        ctid: (BlockNumber, OffsetNumber),
    ) -> Result<(), RedoError> {
        let mut header = [0; TUPLE_HEADER_SIZE];
        put_u32(&mut header, T_XMIN, xmin);
        put_u32(&mut header, T_XMAX, xmax);
        put_ctid(&mut header, ctid.0, ctid.1);
        put_u16(&mut header, T_INFOMASK2, carried.infomask2);
        put_u16(&mut header, T_INFOMASK, carried.infomask & !HEAP_COMBOCID);
        header[T_HOFF] = carried.hoff;
        self.push(&header)
    }

    /// Stores the next bytes: of the null bitmap, its padding, or data.
    ///
    /// # Errors
    /// When they are more than the tuple has.
    #[inline]
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), RedoError> {
        self.next(bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    /// As [`NewTuple::push`], of bytes of the page.
    ///
    /// # Errors
    /// Also when they do not lie on the page.
    #[inline]
    pub fn push_from_page(&mut self, at: usize, len: usize) -> Result<(), RedoError> {
        let to = self.at;
        self.next(len)?;
        if at + len > BLCKSZ {
            return Err(TOO_LONG);
        }
        self.page.copy_within(at..at + len, to);
        Ok(())
    }

    #[inline]
    fn next(&mut self, len: usize) -> Result<&mut [u8], RedoError> {
        let at = self.at;
        if len > self.end - at {
            return Err(TOO_LONG);
        }
        self.at += len;
        self.page.get_mut(at..at + len).ok_or(TOO_LONG)
    }
}
