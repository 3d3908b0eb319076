//! Redo of generic records, by which extensions log their changes (`generic_redo` in
//! `access/transam/generic_xlog.c`, PostgreSQL 18; 17 does the same).
//!
//! Each block carries the bytes that differ on its page, so pages do not need each other. A page that is logged whole
//! comes as an image, a new one always.

use walrider_wal::records::generic::Fragment;

use crate::{BlockRedo, RedoError};

/// Redoes one block: overwrites what the record says, and clears the hole, of which the record says nothing.
///
/// # Errors
/// When the record is inconsistent, or its bytes or the hole lie outside of the page.
pub fn redo(redo: &mut BlockRedo<'_, '_>) -> Result<(), RedoError> {
    if redo.needs_redo()? {
        for fragment in Fragment::all(redo.block.data) {
            let Fragment { offset, bytes } = fragment.ok_or(RedoError::DataLength("generic record"))?;
            let begin = usize::from(offset);
            let place = redo.page.0.get_mut(begin..begin + bytes.len());
            place.ok_or(RedoError::CorruptRecord("bytes beyond the end of the page"))?.copy_from_slice(bytes);
        }
        let hole = redo.page.get().lower()..redo.page.get().upper();
        redo.page.0.get_mut(hole).ok_or(RedoError::CorruptPage("header offsets make no sense"))?.fill(0);
        redo.changed();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use walrider_layout::page::{Page, PageMut};
    use walrider_layout::{BLCKSZ, ForkNumber, Lsn, Major, PageBytes};
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    use super::*;
    use crate::{Effects, Env, Outcome, Target, redo_block};

    fn apply(page: &mut PageBytes, delta: &[u8]) -> Result<Outcome, RedoError> {
        let bytes = RecordBuilder::new(RmgrId::GENERIC, 0).block(0, TEST_REL, ForkNumber::Main, 3).data(delta).build();
        let record = RecordBuilder::parse(&bytes, Lsn(0x100));
        let env = Env { major: Major::V18, hint_bits_are_logged: true };
        let mut target = Target { bytes: page, exists: true, dirty: false };
        redo_block(&record, &record.blocks[0], &mut target, &env, &mut Effects::default())
    }

    #[test]
    fn bytes_are_overwritten_and_the_hole_is_cleared() {
        let mut page = [7; BLCKSZ];
        PageMut(&mut page).init(8);
        page[24..8184].fill(7);
        // The first fragment moves pd_lower, so the hole is that of the page as it has become.
        assert_eq!(apply(&mut page, &[12, 0, 1, 0, 28, 0xFE, 0x1F, 2, 0, 1, 2]), Ok(Outcome::NeedsRedo));
        assert_eq!(Page(&page).lower(), 28);
        assert_eq!(page[24..30], [7, 7, 7, 7, 0, 0]);
        assert!(page[28..8184].iter().all(|&byte| byte == 0));
        assert_eq!(page[8184..], [0, 0, 0, 0, 0, 0, 1, 2]);
        assert!(Page(&page).lsn() > Lsn(0x100));
    }

    #[test]
    fn nothing_is_written_beyond_the_page() {
        let mut page = [0; BLCKSZ];
        PageMut(&mut page).init(8);
        let beyond = apply(&mut page, &[0xFF, 0x1F, 2, 0, 1, 2]);
        assert_eq!(beyond, Err(RedoError::CorruptRecord("bytes beyond the end of the page")));
        let hole_of_negative_length = apply(&mut page, &[12, 0, 4, 0, 0, 1, 32, 0]);
        assert!(matches!(hole_of_negative_length, Err(RedoError::CorruptPage(_))));
    }
}
