//! Redo of generic records (`access/transam/generic_xlog.c`, PostgreSQL 18).

use crate::{BlockRedo, RedoError};

/// Redoes one block.
///
/// # Errors
/// When the record has no such block or is inconsistent, or when it does not fit the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    Err(RedoError::UnknownType(redo.info()))
}
