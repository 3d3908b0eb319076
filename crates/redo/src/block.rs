//! What all redo routines share: the outcome of the page, and what redo of one block may do besides changing it
//! (`XLogReadBufferForRedoExtended` in `access/transam/xlogutils.c`, PostgreSQL 18).

use walrider_layout::page::PageMut;
use walrider_layout::{BlockNumber, Major, OffsetNumber, PageBytes, RelFileLocator};
use walrider_wal::image;
use walrider_wal::record::{BlockRef, Record};

use crate::rmgr::{Touch, redo_fn, touch};

/// What of the cluster's settings redo depends on.
#[derive(Clone, Copy, Debug)]
pub struct Env {
    /// The major version that wrote the WAL.
    pub major: Major,
    /// Data checksums are on, or `wal_log_hints` (`XLogHintBitIsNeeded`).
    pub hint_bits_are_logged: bool,
}

/// A page as replay holds it.
pub struct Target<'p> {
    /// The bytes; zeros while the page does not exist.
    pub bytes: &'p mut PageBytes,
    /// The page lies within its file (it may still be all zeros).
    pub exists: bool,
    /// The page must be written back.
    pub dirty: bool,
}

/// What became of the page before redo proper (`XLogRedoAction`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The page already has this change (`BLK_DONE`).
    Skip,
    /// The change is to be applied (`BLK_NEEDS_REDO`).
    NeedsRedo,
    /// The page was restored from the record's image (`BLK_RESTORED`).
    Restored,
    /// The page does not exist, or is all zeros: a later record will have dropped or truncated it (`BLK_NOTFOUND`).
    NotFound,
}

/// What a heap page now has free, for the free space map (`XLogRecordPageWithFreeSpace`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeSpace {
    /// The heap.
    pub rel: RelFileLocator,
    /// The heap block.
    pub block: BlockNumber,
    /// Free bytes on it.
    pub free_bytes: usize,
}

/// What redo of one block does to other pages. Collected here and applied by the caller, in LSN order.
#[derive(Debug, Default)]
pub struct Effects {
    /// Values for the free space map, at most one per record and block.
    pub free_space: Option<FreeSpace>,
}

/// Redo met a page or a record that does not fit what it should do. The caller knows LSN, relation and block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedoError {
    /// The resource manager, or this record type, is not one of ours.
    #[error("no redo for this record type (info 0x{0:02X})")]
    UnknownType(u8),
    /// The record refers to a block that its type does not know, or lacks one.
    #[error("block reference {0} does not belong to this record type, or is missing")]
    BlockReference(u8),
    /// The record's data ends too early or goes on too long.
    #[error("record data does not have the length that its contents require ({0})")]
    DataLength(&'static str),
    /// WILL_INIT and the redo routine must agree.
    #[error("record type and WILL_INIT flag disagree about initialising the page")]
    WillInit,
    /// A full-page image that cannot be restored.
    #[error("full-page image: {0}")]
    Image(#[from] image::ImageError),
    /// The line pointer does not exist or has no tuple.
    #[error("line pointer {0} does not exist or has no storage")]
    LinePointer(OffsetNumber),
    /// A new line pointer would leave a gap.
    #[error("line pointer {0} is beyond the end of the line pointer array")]
    OffsetBeyondEnd(OffsetNumber),
    /// The page has too little room.
    #[error("no room on the page for an item of {0} bytes")]
    NoRoom(usize),
    /// The page's own header or items are inconsistent.
    #[error("page is corrupt: {0}")]
    CorruptPage(&'static str),
    /// The record's contents are inconsistent.
    #[error("record is inconsistent: {0}")]
    CorruptRecord(&'static str),
}

/// One block of one record, being redone.
pub struct BlockRedo<'r, 'p> {
    /// The record.
    pub record: &'r Record<'r>,
    /// The block reference.
    pub block: &'r BlockRef<'r>,
    /// What became of the page so far.
    pub outcome: Outcome,
    /// The page; must be left alone unless `outcome` says [`Outcome::NeedsRedo`] or [`Outcome::Restored`].
    pub page: PageMut<'p>,
    /// Settings of the cluster.
    pub env: &'r Env,
    /// Where effects on other pages go.
    pub effects: &'r mut Effects,
    /// The page was changed.
    pub dirty: bool,
}

impl BlockRedo<'_, '_> {
    /// Marks the page as changed by this record: `PageSetLSN`, `MarkBufferDirty`.
    #[inline]
    pub fn changed(&mut self) {
        self.page.set_lsn(self.record.end);
        self.dirty = true;
    }

    /// Whether the page, which the record expects to exist, is to be changed (`BLK_NEEDS_REDO`).
    ///
    /// # Errors
    /// When the record initialises the page instead.
    #[inline]
    pub fn needs_redo(&self) -> Result<bool, RedoError> {
        if self.block.will_init {
            return Err(RedoError::WillInit);
        }
        Ok(self.outcome == Outcome::NeedsRedo)
    }

    /// Initialises the page, with `special_size` bytes of special space (`XLogInitBufferForRedo`, `PageInit`).
    ///
    /// # Errors
    /// When the record does not say that it initialises the page.
    pub fn init_page(&mut self, special_size: usize) -> Result<(), RedoError> {
        if !self.block.will_init {
            return Err(RedoError::WillInit);
        }
        self.page.init(special_size);
        Ok(())
    }

    /// The number of another of the record's blocks.
    ///
    /// # Errors
    /// When the record does not refer to it.
    pub fn block_number(&self, id: u8) -> Result<BlockNumber, RedoError> {
        Ok(self.record.block(id).ok_or(RedoError::BlockReference(id))?.block)
    }

    /// The record type, without flags that belong to no type.
    #[inline]
    pub fn info(&self) -> u8 {
        self.record.info()
    }
}

/// Redoes one block reference of a record on its page.
///
/// # Errors
/// What [`RedoError`] lists. The page may then be half changed and must be thrown away.
pub fn redo_block(
    record: &Record<'_>,
    block: &BlockRef<'_>,
    target: &mut Target<'_>,
    env: &Env,
    effects: &mut Effects,
) -> Result<Outcome, RedoError> {
    let redo = redo_fn(record.header.rmgr).ok_or(RedoError::UnknownType(record.header.info))?;
    let mut page = PageMut(target.bytes);
    let mut dirty = false;
    let outcome = if let Some(image) = block.image.filter(|image| image.apply()) {
        image::restore(&image, page.0)?;
        target.exists = true;
        dirty = true;
        // A page that is still new must not get an LSN: it would look initialised, and corrupt.
        if !page.get().is_new() {
            page.set_lsn(record.end);
        }
        Outcome::Restored
    } else if block.will_init {
        target.exists = true;
        page.0.fill(0);
        Outcome::NeedsRedo
    } else {
        let zero_on_error = touch(record, block) == Touch::ChangeOrCreate;
        if zero_on_error && !target.exists {
            target.exists = true;
            dirty = true;
        }
        if !target.exists || (page.get().is_new() && !zero_on_error) {
            Outcome::NotFound
        } else if record.end <= page.get().lsn() {
            Outcome::Skip
        } else {
            Outcome::NeedsRedo
        }
    };
    let mut redoing = BlockRedo { record, block, outcome, page, env, effects, dirty };
    redo(&mut redoing)?;
    debug_assert!(
        !redoing.dirty || matches!(outcome, Outcome::NeedsRedo | Outcome::Restored),
        "redo changed a page that was to be left alone"
    );
    target.dirty |= redoing.dirty;
    Ok(outcome)
}
