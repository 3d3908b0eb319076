//! Redo of the log's own records (`xlog_redo` in `access/transam/xlog.c`, PostgreSQL 18): of them only those that
//! consist of full-page images refer to blocks.

use walrider_wal::record::{BlockRef, Record};
use walrider_wal::records::xlog::{XLOG_FPI, XLOG_FPI_FOR_HINT, identify};

use crate::rmgr::{Class, Touch};
use crate::{BlockRedo, Outcome, RedoError};

/// Redoes one block: the image, if there is one, was restored already.
///
/// # Errors
/// When a record that must have an image has none, or the record type has no blocks.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    match redo.info() {
        XLOG_FPI | XLOG_FPI_FOR_HINT if redo.block.will_init => Err(RedoError::WillInit),
        XLOG_FPI_FOR_HINT if redo.block.image.is_none() => Ok(()),
        XLOG_FPI | XLOG_FPI_FOR_HINT if redo.outcome == Outcome::Restored => Ok(()),
        XLOG_FPI | XLOG_FPI_FOR_HINT => Err(RedoError::CorruptRecord("no full-page image to be restored")),
        info if identify(info).is_some() => Err(RedoError::BlockReference(redo.block.id)),
        info => Err(RedoError::UnknownType(info)),
    }
}

/// Images are pages; all else is not.
#[inline]
pub(crate) fn class(record: &Record<'_>) -> Class {
    if record.blocks.is_empty() { Class::Global } else { Class::Pages }
}

/// A block that was logged because of hint bits, but without its image, as `full_page_writes` was off: PostgreSQL does not
/// look at the page then, which need not exist.
#[inline]
pub(crate) fn touch(record: &Record<'_>, block: &BlockRef<'_>) -> Touch {
    let unchanged = record.info() == XLOG_FPI_FOR_HINT && block.image.is_none();
    if unchanged { Touch::Nothing } else { Touch::Change }
}
