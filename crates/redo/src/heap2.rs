//! Redo of this resource manager.

use crate::{BlockRedo, RedoError};

/// Redoes one block.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    Err(RedoError::UnknownType(redo.info()))
}
