//! Redo of one block of a decoded WAL record on its page, for C (`include/walrider_redo.h`). The knowledge is
//! [`walrider_redo`]'s; here are only pointers, and what keeps them apart from it.
//!
//! Nothing unwinds into C. Redo works on the page itself: one that fails may leave half a change, so that a caller who wants
//! to go on has a copy.

// An interface to C cannot be had without; each use says why it is sound.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use arrayvec::ArrayVec;
use walrider_layout::{ForkNumber, Lsn, Major, PageBytes, RelFileLocator};
use walrider_redo::{Effects, Env, Outcome, Target, fsm, gin, redo_block};
use walrider_wal::record::{BlockRef, BlockRefs, Image, Record, RecordHeader};
use walrider_wal::rmgr::RmgrId;

/// A panic was caught. The page may be half changed.
pub const PANIC: i32 = -3;
/// The record does not fit the page, which may be half changed.
pub const FAILED: i32 = -2;
/// Not for this interface: unknown major or fork, ids that do not ascend, more than four blocks, or a page that is new, of
/// which only the server may say whether it may be. The page is as it was.
pub const REFUSED: i32 = -1;
/// The page has the change already, or the record does not change it.
pub const SKIPPED: i32 = 0;
/// The page was changed.
pub const CHANGED: i32 = 1;

/// A block reference that is in use (`DecodedBkpBlock`).
#[repr(C)]
#[derive(Debug)]
pub struct WalriderBlock {
    /// `spcOid`.
    pub tablespace: u32,
    /// `dbOid`.
    pub database: u32,
    /// `relNumber`.
    pub relation: u32,
    /// `blkno`.
    pub block: u32,
    /// Number of the reference within the record.
    pub id: u8,
    /// `forknum`.
    pub fork: u8,
    /// Not 0: `BKPBLOCK_WILL_INIT`.
    pub will_init: u8,
    /// Not 0: there is an image.
    pub has_image: u8,
    /// `bimg_info`.
    pub image_info: u8,
    /// Not 0: `has_data`.
    pub has_data: u8,
    /// In bytes from the beginning of the page.
    pub hole_offset: u16,
    /// Bytes, 0 if there is no hole.
    pub hole_len: u16,
    /// The stored image; may be null if `image_len` is 0.
    pub image: *const u8,
    /// Bytes.
    pub image_len: usize,
    /// The block's data; may be null if `data_len` is 0.
    pub data: *const u8,
    /// Bytes.
    pub data_len: usize,
}

/// A decoded record (`DecodedXLogRecord`).
#[repr(C)]
#[derive(Debug)]
pub struct WalriderRecord {
    /// Where it begins.
    pub begin: u64,
    /// `EndRecPtr`: what becomes the page's LSN.
    pub end: u64,
    /// `xl_prev`.
    pub prev: u64,
    /// `xl_tot_len`, bytes.
    pub total_len: u32,
    /// `xl_xid`.
    pub xid: u32,
    /// `toplevel_xid`, 0 if not stated.
    pub toplevel_xid: u32,
    /// `record_origin`.
    pub origin: u16,
    /// `xl_info`.
    pub info: u8,
    /// `xl_rmid`.
    pub rmgr: u8,
    /// The main data; may be null if `main_len` is 0.
    pub main_data: *const u8,
    /// Bytes.
    pub main_len: usize,
    /// Block references in use, by ascending id; may be null if `nblocks` is 0.
    pub blocks: *const WalriderBlock,
    /// How many.
    pub nblocks: usize,
}

// What the header asserts of its structs, too.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<WalriderBlock>() == 64 && size_of::<WalriderRecord>() == 72);

/// A slice that C gave.
///
/// # Safety
/// Unless `len` is 0, `start` must point to `len` initialised values that nobody changes during `'a`.
unsafe fn given<'a, T>(start: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise; a null pointer with length 0 was dealt with.
    unsafe { slice::from_raw_parts(start, len) }
}

/// # Safety
/// As [`walrider_redo_block`], for what `block` points to.
unsafe fn block_ref(block: &WalriderBlock) -> Option<BlockRef<'_>> {
    // SAFETY: the caller's promise, of image and of data.
    let (image, data) = unsafe { (given(block.image, block.image_len), given(block.data, block.data_len)) };
    Some(BlockRef {
        id: block.id,
        rel: RelFileLocator { tablespace: block.tablespace, database: block.database, relation: block.relation },
        fork: ForkNumber::from_number(block.fork)?,
        block: block.block,
        will_init: block.will_init != 0,
        image: (block.has_image != 0).then_some(Image {
            info: block.image_info,
            hole_offset: block.hole_offset,
            hole_len: block.hole_len,
            bytes: image,
        }),
        has_data: block.has_data != 0,
        data,
    })
}

/// # Safety
/// As [`walrider_redo_block`], for what `from` points to.
unsafe fn record(from: &WalriderRecord, major: Major) -> Option<Record<'_>> {
    // SAFETY: the caller's promise, of main data and of blocks.
    let (main_data, blocks) = unsafe { (given(from.main_data, from.main_len), given(from.blocks, from.nblocks)) };
    let mut few = ArrayVec::new();
    for block in blocks {
        // SAFETY: the caller's promise.
        few.try_push(unsafe { block_ref(block) }?).ok()?;
    }
    if !few.is_sorted_by(|one: &BlockRef<'_>, next| one.id < next.id) {
        return None;
    }
    Some(Record {
        major,
        lsn: Lsn(from.begin),
        end: Lsn(from.end),
        header: RecordHeader {
            total_len: from.total_len,
            xid: from.xid,
            prev: Lsn(from.prev),
            info: from.info,
            rmgr: RmgrId(from.rmgr),
            // The server has checked it.
            crc: 0,
        },
        origin: from.origin,
        toplevel_xid: from.toplevel_xid,
        blocks: BlockRefs::Few(few),
        main_data,
    })
}

/// Redoes block `block_id` of the record on `page`, which lies within its file, and answers one of the codes above.
/// `free_bytes` becomes what a heap page now has free, or -1 if the free space map is not to be told.
///
/// # Safety
/// `from` and all it points to are readable and do not change during the call. `page` points to 8192 bytes that only the
/// caller reads or writes meanwhile (a pinned buffer whose content lock is held exclusively). `free_bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn walrider_redo_block(
    from: &WalriderRecord,
    block_id: u8,
    page: &mut PageBytes,
    major: u32,
    hint_bits_are_logged: i32,
    free_bytes: &mut i64,
) -> i32 {
    *free_bytes = -1;
    let major = match major {
        17 => Major::V17,
        18 => Major::V18,
        _ => return REFUSED,
    };
    let redone = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        let Some(record) = (unsafe { record(from, major) }) else { return Err(REFUSED) };
        let Some(block) = record.block(block_id) else { return Err(REFUSED) };
        let mut target = Target { bytes: page, exists: true, dirty: false };
        let env = Env { major, hint_bits_are_logged: hint_bits_are_logged != 0 };
        let mut effects = Effects::default();
        let outcome = redo_block(&record, block, &mut target, &env, &mut effects).map_err(|_| FAILED)?;
        if outcome == Outcome::NotFound {
            return Err(REFUSED);
        }
        let free = effects.free_space.and_then(|free| i64::try_from(free.free_bytes).ok());
        Ok((target.dirty, free))
    }));
    match redone {
        Err(_) => PANIC,
        Ok(Err(code)) => code,
        Ok(Ok((changed, free))) => {
            *free_bytes = free.unwrap_or(-1);
            if changed { CHANGED } else { SKIPPED }
        }
    }
}

/// The block of a heap's free space map that says how much a block of it has free; `u32::MAX` if it has none.
#[unsafe(no_mangle)]
pub extern "C" fn walrider_free_space_block(heap_block: u32) -> u32 {
    catch_unwind(|| fsm::location(heap_block).0).unwrap_or(u32::MAX)
}

/// Has that block, `page`, say that the heap's block has so many bytes free: [`CHANGED`], [`SKIPPED`] or [`PANIC`].
#[unsafe(no_mangle)]
pub extern "C" fn walrider_record_free_space(page: &mut PageBytes, heap_block: u32, free_bytes: usize) -> i32 {
    let recorded = catch_unwind(AssertUnwindSafe(|| {
        let mut target = Target { bytes: page, exists: true, dirty: false };
        fsm::record_free_space(&mut target, fsm::location(heap_block).1, fsm::category(free_bytes));
        target.dirty
    }));
    recorded.map_or(PANIC, |changed| if changed { CHANGED } else { SKIPPED })
}

/// Heap blocks that wait have a bit set, by the low 16 bits of their number.
const WAITS: usize = 1 << 16;

/// Whether an item that an insertion into a leaf of GIN brings is in a heap block that waits, by the low 16 bits of its number;
/// 1 also if the data does not tell.
///
/// # Safety
/// Unless `data_len` is 0, `data` points to so many bytes that nobody changes during the call. `waits` and, unless it is null,
/// `waits_before` have 65536 bits, the lowest of a word first; other processes may set some of them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn walrider_gin_items_wait(
    data: *const u8,
    data_len: usize,
    of_posting_tree: i32,
    waits: *const u32,
    waits_before: *const u32,
) -> i32 {
    let told = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        let data = unsafe { given(data, data_len) };
        let mut found = false;
        gin::heap_blocks(data, of_posting_tree != 0, |block| {
            let (word, bit) = (block as usize % WAITS / 32, block % 32);
            for table in [waits, waits_before] {
                // SAFETY: the caller's promise; the index is less than the table's size. The words are C's, which reads and
                // sets them without order, too: the process that sets a bit has nothing that this process must see now.
                found |= !table.is_null() && unsafe { table.add(word).read_volatile() } >> bit & 1 != 0;
            }
        })
        .map(|()| found)
    }));
    i32::from(!matches!(told, Ok(Ok(false))))
}

#[cfg(test)]
mod tests;
