//! A base backup whose relations are on their way: they get what the WAL says before they are in the directory.

use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};

use crate::error::ReplayError;

/// Relation files that are not in the data directory yet, all else of it is.
pub trait Base: Send + Sync {
    /// How many bytes they have, as far as that is known.
    fn bytes(&self) -> u64;

    /// Puts all of them there, durably; before they are written, `pages` gets to see them.
    ///
    /// # Errors
    /// Also those of `pages`, which end it.
    fn unpack(&self, pages: &dyn PassPages) -> Result<(), ReplayError>;

    /// How many blocks a fork will have when it is there; `None` if that is not known before.
    fn blocks(&self, rel: RelFileLocator, fork: ForkNumber) -> Option<BlockNumber>;
}

/// Sees the pages of relation files, and changes them.
pub trait PassPages: Sync {
    /// Whole pages of a file, from the block `first` of the fork on. Those of one file come in their order, from one thread at a time.
    ///
    /// # Errors
    /// When they cannot be what they should become.
    fn pass(&self, file: SegmentFile, first: BlockNumber, pages: &mut [u8]) -> Result<(), ReplayError>;

    /// A file has passed; the block behind its last one is `end`.
    fn passed(&self, file: SegmentFile, end: BlockNumber);
}

/// Leaves all pages as they are.
pub struct Unchanged;

impl PassPages for Unchanged {
    fn pass(&self, _: SegmentFile, _: BlockNumber, _: &mut [u8]) -> Result<(), ReplayError> {
        Ok(())
    }

    fn passed(&self, _: SegmentFile, _: BlockNumber) {}
}
