//! Redo of sequences (`seq_redo` in `commands/sequence.c`, PostgreSQL 18).

use walrider_layout::bytes::put_u32;
use walrider_wal::records::seq::{SeqLog, XLOG_SEQ_LOG};

use crate::items::{AtExisting, ItemsOf, add_item};
use crate::{BlockRedo, RedoError};

/// What the special space of a sequence's page holds (`SEQ_MAGIC`).
pub const SEQ_MAGIC: u32 = 0x1717;

/// Redoes one block: the page is rewritten, with its one tuple.
///
/// # Errors
/// When the record type is unknown, or the record inconsistent.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.info() != XLOG_SEQ_LOG {
        return Err(RedoError::UnknownType(redo.info()));
    }
    if redo.block.id != 0 {
        return Err(RedoError::BlockReference(redo.block.id));
    }
    if !redo.block.will_init {
        return Err(RedoError::WillInit);
    }
    let seq = SeqLog::parse(redo.record.main_data).ok_or(RedoError::DataLength("sequence record"))?;
    redo.page.init(size_of::<u32>());
    let special = redo.page.get().special();
    put_u32(redo.page.0, special, SEQ_MAGIC);
    add_item(&mut redo.page, seq.tuple, 1, AtExisting::Shift, ItemsOf::Index)?;
    redo.changed();
    Ok(())
}
