//! Redo of the log's own records (`xlog_redo` in `access/transam/xlog.c`, PostgreSQL 18): of them only those that
//! consist of full-page images refer to blocks.

use walrider_wal::records;

use crate::{BlockRedo, Outcome, RedoError};

/// Record type: images because of hint bits; may have none where `full_page_writes` is off.
const XLOG_FPI_FOR_HINT: u8 = 0xA0;
/// Record type: images, always.
const XLOG_FPI: u8 = 0xB0;

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
        info if records::xlog::identify(info).is_some() => Err(RedoError::BlockReference(redo.block.id)),
        info => Err(RedoError::UnknownType(info)),
    }
}
