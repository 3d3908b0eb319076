//! The visibility map: two bits per heap block (`access/heap/visibilitymap.c`, PostgreSQL 18.6).

use arrayvec::ArrayVec;
use walrider_layout::page::{PAGE_HEADER_SIZE, Page, PageMut};
use walrider_layout::{BLCKSZ, BlockNumber, RelFileLocator};
use walrider_wal::record::Record;
use walrider_wal::records::heap::*;
use walrider_wal::records::heap2::{MultiInsert, XLOG_HEAP2_LOCK_UPDATED, XLOG_HEAP2_MULTI_INSERT};
use walrider_wal::rmgr::RmgrId;

use crate::{RedoError, Target};

/// All tuples of the heap block are visible to everyone (`VISIBILITYMAP_ALL_VISIBLE`).
pub const ALL_VISIBLE: u8 = 0x01;
/// All tuples of the heap block are frozen (`VISIBILITYMAP_ALL_FROZEN`).
pub const ALL_FROZEN: u8 = 0x02;
/// Both bits (`VISIBILITYMAP_VALID_BITS`).
pub const VALID_BITS: u8 = ALL_VISIBLE | ALL_FROZEN;

const HEAP_BLOCKS_PER_BYTE: u32 = 4;
/// Heap blocks whose bits one page of the map holds (`HEAPBLOCKS_PER_PAGE`).
pub const HEAP_BLOCKS_PER_PAGE: u32 = (BLCKSZ - PAGE_HEADER_SIZE) as u32 * HEAP_BLOCKS_PER_BYTE;

/// A bit to clear in the visibility map although the record registers no block of the map: the path that
/// `heap_xlog_vm_clear` and `heap_xlog_update` keep for WAL of earlier minor versions, and for bits that were clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmClear {
    /// The heap.
    pub rel: RelFileLocator,
    /// The heap block.
    pub heap_block: BlockNumber,
    /// The bits ([`ALL_VISIBLE`], [`ALL_FROZEN`]).
    pub bits: u8,
}

/// What a record clears in the visibility map beyond its block references, in this order.
///
/// It is to be cleared at the record's place among the changes of the map's page, whatever becomes of the heap page
/// and of its LSN.
///
/// # Errors
/// When the record's data is too short, or it lacks the heap's block reference.
pub fn unregistered_clears(record: &Record<'_>) -> Result<ArrayVec<VmClear, 2>, RedoError> {
    cleared(record).transpose()?.map_or(Ok(ArrayVec::new()), |flags| flagged_clears(record, flags))
}

/// Whether [`unregistered_clears`] has to be asked at all: nearly no record says that it cleared bits.
#[inline]
pub fn may_clear(record: &Record<'_>) -> bool {
    cleared(record).is_some()
}

/// Which bits such a record clears.
pub(crate) fn bits_cleared(record: &Record<'_>) -> u8 {
    // LOCK has the same number as LOCK_UPDATED of the other manager.
    if record.info() & XLOG_HEAP_OPMASK == XLOG_HEAP_LOCK { ALL_FROZEN } else { VALID_BITS }
}

/// The flags of a record which says that it cleared bits; an error if it ends before them.
#[inline]
pub(crate) fn cleared(record: &Record<'_>) -> Option<Result<u8, RedoError>> {
    let main = record.main_data;
    // The flags, and which of them clear bits.
    let (flags, mask) = match (record.header.rmgr, record.info() & XLOG_HEAP_OPMASK) {
        (RmgrId::HEAP, XLOG_HEAP_INSERT) => (Insert::parse(main).map(|it| it.flags), XLH_INSERT_ALL_VISIBLE_CLEARED),
        (RmgrId::HEAP, XLOG_HEAP_DELETE) => (Delete::parse(main).map(|it| it.flags), XLH_DELETE_ALL_VISIBLE_CLEARED),
        (RmgrId::HEAP, XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE) => {
            let either = XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED | XLH_UPDATE_NEW_ALL_VISIBLE_CLEARED;
            (Update::parse(main).map(|it| it.flags), either)
        }
        (RmgrId::HEAP, XLOG_HEAP_LOCK) | (RmgrId::HEAP2, XLOG_HEAP2_LOCK_UPDATED) => {
            (Lock::parse(main).map(|it| it.flags), XLH_LOCK_ALL_FROZEN_CLEARED)
        }
        (RmgrId::HEAP2, XLOG_HEAP2_MULTI_INSERT) => {
            (MultiInsert::parse(main, true).map(|it| it.flags), XLH_INSERT_ALL_VISIBLE_CLEARED)
        }
        _ => return None,
    };
    let says_so = flags.is_none_or(|flags| flags & mask != 0);
    says_so.then(|| flags.ok_or(RedoError::DataLength("heap record")))
}

/// A record says that bits were cleared: are they in a registered block?
fn flagged_clears(record: &Record<'_>, flags: u8) -> Result<ArrayVec<VmClear, 2>, RedoError> {
    let operation = record.info() & XLOG_HEAP_OPMASK;
    let mut clears = ArrayVec::new();
    let of = |id: u8| record.block(id).ok_or(RedoError::BlockReference(id));
    let heap = of(BLKREF_HEAP)?;
    let is_update = record.header.rmgr == RmgrId::HEAP && matches!(operation, XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE);
    if !is_update {
        if record.block(BLKREF_VM).is_none() {
            clears.push(VmClear { rel: heap.rel, heap_block: heap.block, bits: bits_cleared(record) });
        }
        return Ok(clears);
    }
    // As soon as one map page is registered, the record is of a version that registers all whose bits were set.
    if record.block(UPDATE_BLKREF_VM_NEW).is_none() && record.block(UPDATE_BLKREF_VM_OLD).is_none() {
        if flags & XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED != 0 {
            let old = record.block(UPDATE_BLKREF_HEAP_OLD).unwrap_or(heap);
            clears.push(VmClear { rel: heap.rel, heap_block: old.block, bits: VALID_BITS });
        }
        if flags & XLH_UPDATE_NEW_ALL_VISIBLE_CLEARED != 0 {
            clears.push(VmClear { rel: heap.rel, heap_block: heap.block, bits: VALID_BITS });
        }
    }
    Ok(clears)
}

/// The block of the map that holds the bits of a heap block (`HEAPBLK_TO_MAPBLOCK`).
#[inline]
pub fn map_block(heap_block: BlockNumber) -> BlockNumber {
    heap_block / HEAP_BLOCKS_PER_PAGE
}

/// Where on its page of the map the bits of a heap block are: byte of the page, and shift.
#[inline]
fn place(heap_block: BlockNumber) -> (usize, u32) {
    let within = heap_block % HEAP_BLOCKS_PER_PAGE;
    (PAGE_HEADER_SIZE + (within / HEAP_BLOCKS_PER_BYTE) as usize, within % HEAP_BLOCKS_PER_BYTE * 2)
}

/// The bits of a heap block, on its page of the map (`visibilitymap_get_status`).
#[inline]
pub fn bits(page: Page<'_>, heap_block: BlockNumber) -> u8 {
    let (byte, shift) = place(heap_block);
    page.0[byte] >> shift & VALID_BITS
}

/// Clears bits of a heap block on its page of the map; whether one was set (`visibilitymap_clear_locked`).
#[inline]
pub fn clear_bits(page: &mut PageMut<'_>, heap_block: BlockNumber, bits: u8) -> bool {
    let (byte, shift) = place(heap_block);
    let mask = (bits & VALID_BITS) << shift;
    let was_set = page.0[byte] & mask != 0;
    page.0[byte] &= !mask;
    was_set
}

/// Adds bits of a heap block on its page of the map; false where exactly these were set, and the page counts as
/// unchanged (`visibilitymap_set`).
#[inline]
pub fn set_bits(page: &mut PageMut<'_>, heap_block: BlockNumber, bits: u8) -> bool {
    let (byte, shift) = place(heap_block);
    let bits = bits & VALID_BITS;
    if page.0[byte] >> shift & VALID_BITS == bits {
        return false;
    }
    page.0[byte] |= bits << shift;
    true
}

/// Clears the bits of a heap block, without looking at or setting the page's LSN (`visibilitymap_pin`,
/// `visibilitymap_clear`).
///
/// A page that did not exist comes into being, as zeros: PostgreSQL extends the file with zeros, initialises the page
/// in its buffer, but does not mark that as a change; and no bit can be set on it that would have to be cleared.
pub fn clear_unregistered(target: &mut Target<'_>, clear: &VmClear) {
    if !target.exists {
        target.exists = true;
        target.dirty = true;
        return;
    }
    let mut page = PageMut(target.bytes);
    if !page.get().is_new() && clear_bits(&mut page, clear.heap_block, clear.bits) {
        target.dirty = true;
    }
}

/// How many blocks of the map a truncated heap keeps; `first_removed` is its new size
/// (`visibilitymap_truncation_length`). A map that is no longer than that is left as it is.
pub fn blocks_kept(first_removed: BlockNumber) -> BlockNumber {
    first_removed.div_ceil(HEAP_BLOCKS_PER_PAGE)
}

/// The block of the map that a truncation leaves with removed blocks' bits on it, to be handed to [`truncate_tail`].
/// `None` where the heap's new end coincides with that of a page of the map.
///
/// Where this page does not exist, nothing is left to truncate either (`visibilitymap_prepare_truncate`).
pub fn tail_block(first_removed: BlockNumber) -> Option<BlockNumber> {
    (!first_removed.is_multiple_of(HEAP_BLOCKS_PER_PAGE)).then(|| map_block(first_removed))
}

/// Clears the bits of all heap blocks from `first_removed` on, on the page of the map that holds that block's bits
/// (`visibilitymap_prepare_truncate`). Neither looks at the page's LSN nor sets it; the page is written back even if no
/// bit was set, and is initialised if it is new. A page that does not exist is left alone.
pub fn truncate_tail(target: &mut Target<'_>, first_removed: BlockNumber) {
    if !target.exists {
        return;
    }
    let mut page = PageMut(target.bytes);
    if page.get().is_new() {
        page.init(0);
    }
    let (byte, shift) = place(first_removed);
    page.0[byte + 1..].fill(0);
    page.0[byte] &= (1 << shift) - 1;
    target.dirty = true;
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::{ForkNumber, Lsn};
    use walrider_wal::records::heap2::XLOG_HEAP2_VISIBLE;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    fn clears(rmgr: RmgrId, info: u8, main: &[u8], blocks: &[(u8, ForkNumber, BlockNumber)]) -> Vec<(u32, u8)> {
        let mut builder = RecordBuilder::new(rmgr, info).main_data(main);
        for &(id, fork, block) in blocks {
            builder = builder.block(id, TEST_REL, fork, block);
        }
        let bytes = builder.build();
        let clears = unregistered_clears(&RecordBuilder::parse(&bytes, Lsn(40))).unwrap();
        clears.iter().map(|clear| (clear.heap_block, clear.bits)).collect()
    }

    #[test]
    fn only_flagged_records_without_a_map_block_clear_on_their_own() {
        use ForkNumber::{Main, VisibilityMap};
        let heap = (0, Main, 70_000);
        let map = (1, VisibilityMap, 2);
        for (rmgr, info, unflagged, flagged, bits) in [
            (RmgrId::HEAP, XLOG_HEAP_INSERT, &[1, 0, 0xFE][..], &[1, 0, 1][..], 3),
            (RmgrId::HEAP, XLOG_HEAP_DELETE, &[0, 0, 0, 0, 0, 0, 0, 0xFE], &[0, 0, 0, 0, 0, 0, 0, 1], 3),
            (RmgrId::HEAP, XLOG_HEAP_LOCK, &[0, 0, 0, 0, 0, 0, 0, 0xFE], &[0, 0, 0, 0, 0, 0, 0, 1], 2),
            (RmgrId::HEAP2, XLOG_HEAP2_LOCK_UPDATED, &[0, 0, 0, 0, 0, 0, 0, 0xFE], &[0, 0, 0, 0, 0, 0, 0, 1], 2),
            (RmgrId::HEAP2, XLOG_HEAP2_MULTI_INSERT | 0x80, &[0xFE, 0, 0, 0], &[1, 0, 0, 0], 3),
        ] {
            assert_eq!(clears(rmgr, info, unflagged, &[heap]), []);
            assert_eq!(clears(rmgr, info, flagged, &[heap]), [(70_000, bits)]);
            assert_eq!(clears(rmgr, info, flagged, &[heap, map]), []);
        }
        assert_eq!(clears(RmgrId::HEAP2, XLOG_HEAP2_VISIBLE, &[], &[]), []);
    }

    #[test]
    fn an_update_clears_on_its_own_only_if_it_registers_no_map_block_at_all() {
        use ForkNumber::{Main, VisibilityMap};
        let (new, old) = ((0, Main, 70_000), (1, Main, 7));
        let (map_of_new, map_of_old) = ((2, VisibilityMap, 2), (3, VisibilityMap, 0));
        let main = |flags| [0, 0, 0, 0, 0, 0, 0, flags, 0, 0, 0, 0, 0, 0];
        let of = |flags, blocks: &[_]| clears(RmgrId::HEAP, XLOG_HEAP_UPDATE, &main(flags), blocks);
        assert_eq!(of(0xFC, &[new, old]), []);
        assert_eq!(of(1, &[new, old]), [(7, 3)]);
        assert_eq!(of(2, &[new, old]), [(70_000, 3)]);
        assert_eq!(of(3, &[new, old]), [(7, 3), (70_000, 3)]);
        assert_eq!(of(1, &[new]), [(70_000, 3)]);
        // The other one's bits were clear.
        assert_eq!(of(3, &[new, old, map_of_new]), []);
        assert_eq!(of(3, &[new, old, map_of_old]), []);
    }

    #[test]
    fn short_records_are_errors() {
        for (rmgr, info) in [(RmgrId::HEAP, XLOG_HEAP_INSERT), (RmgrId::HEAP2, XLOG_HEAP2_MULTI_INSERT)] {
            let bytes = RecordBuilder::new(rmgr, info).build();
            assert!(unregistered_clears(&RecordBuilder::parse(&bytes, Lsn(40))).is_err());
        }
    }

    fn clear_on(page: &mut [u8; BLCKSZ], exists: bool, heap_block: BlockNumber) -> (bool, bool) {
        let mut target = Target { bytes: page, exists, dirty: false };
        clear_unregistered(&mut target, &VmClear { rel: TEST_REL, heap_block, bits: VALID_BITS });
        (target.exists, target.dirty)
    }

    #[test]
    fn clearing_dirties_a_page_only_where_a_bit_was_set_or_the_file_grows() {
        let mut page = [0; BLCKSZ];
        assert_eq!(clear_on(&mut page, false, 5), (true, true));
        assert_eq!(page, [0; BLCKSZ]);
        assert_eq!(clear_on(&mut page, true, 5), (true, false));
        assert_eq!(page, [0; BLCKSZ]);
        PageMut(&mut page).init(0);
        set_bits(&mut PageMut(&mut page), 5, ALL_VISIBLE);
        assert_eq!(page[25], 0b0100);
        assert_eq!(clear_on(&mut page, true, 6), (true, false));
        assert_eq!(clear_on(&mut page, true, 5), (true, true));
        assert_eq!((page[25], Page(&page).lsn()), (0, Lsn(0)));
    }

    #[test]
    fn truncation_clears_what_is_behind_the_new_end() {
        let mut page = [0xFF; BLCKSZ];
        let mut target = Target { bytes: &mut page, exists: true, dirty: false };
        truncate_tail(&mut target, HEAP_BLOCKS_PER_PAGE + 6);
        assert!(target.dirty);
        assert_eq!(page[24..28], [0xFF, 0x0F, 0, 0]);
        assert!(page[26..].iter().all(|&byte| byte == 0));
        let mut target = Target { bytes: &mut page, exists: true, dirty: false };
        truncate_tail(&mut target, HEAP_BLOCKS_PER_PAGE - 1);
        assert_eq!(page[24..28], [0xFF, 0x0F, 0, 0]);

        assert_eq!((tail_block(0), blocks_kept(0)), (None, 0));
        assert_eq!((tail_block(1), blocks_kept(1)), (Some(0), 1));
        assert_eq!((tail_block(HEAP_BLOCKS_PER_PAGE), blocks_kept(HEAP_BLOCKS_PER_PAGE)), (None, 1));
        assert_eq!((tail_block(u32::MAX), blocks_kept(u32::MAX)), (Some(131_457), 131_458));
    }
}
