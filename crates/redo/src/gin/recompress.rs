//! Changes to the posting lists of a posting tree's leaf, its segments (`ginRedoRecompress`, `access/gin/ginxlog.c`,
//! PostgreSQL 18).
//!
//! PostgreSQL writes to the page from the first changed segment on, and never beyond the new end of the data. So the
//! new data is made aside here and then copied: bytes behind it stay what they were, as with PostgreSQL.

use walrider_layout::bytes::Reader;
use walrider_layout::page::PageMut;
use walrider_wal::records::gin::{Action, RecompressDataLeaf, SegmentAction, posting_list};

use super::SHORT;
use super::page::{DATA_AT, GIN_COMPRESSED, MAX_DATA_SIZE, Opaque, put_data};
use super::posting::{self, Data};
use crate::index_tuple::TID_SIZE;
use crate::special::Special;
use crate::{BlockRedo, RedoError};

const SEGMENT: RedoError = RedoError::CorruptPage("posting list does not end within the page's data");
const NO_SEGMENT: RedoError = RedoError::CorruptRecord("no such segment");

/// Applies the block data to a leaf.
///
/// # Errors
/// When the record's data ends too early or names segments that do not exist, when the page's posting lists are none,
/// or when the new ones do not fit.
pub fn redo(redo: &mut BlockRedo<'_, '_>, opaque: Opaque) -> Result<(), RedoError> {
    let recompression = RecompressDataLeaf::parse(redo.block.data).ok_or(SHORT)?;
    // With no action at all PostgreSQL would leave the page empty. It never writes such a record.
    if recompression.count == 0 {
        return Err(RedoError::CorruptRecord("posting list segments change, but none is named"));
    }
    if opaque.flags & GIN_COMPRESSED == 0 {
        compress_page(&mut redo.page, opaque)?;
    }
    let data = new_data(&redo.page, &recompression)?;
    put_data(&mut redo.page, &data)
}

/// The data of a leaf after all actions.
fn new_data(page: &PageMut<'_>, recompression: &RecompressDataLeaf<'_>) -> Result<Data, RedoError> {
    let mut old = Reader::new(page.0.get(DATA_AT..page.get().lower()).ok_or(SEGMENT)?);
    let mut data = Data::new();
    let mut segment = 0;
    for action in recompression.actions() {
        let SegmentAction { segment: wanted, action } = action.ok_or(SHORT)?;
        while segment < wanted {
            posting::append(&mut data, posting_list(&mut old).ok_or(NO_SEGMENT)?)?;
            segment += 1;
        }
        if segment != wanted {
            return Err(NO_SEGMENT);
        }
        if let Action::Insert(list) = action {
            // Numbers count the old segments only.
            posting::append(&mut data, list)?;
            continue;
        }
        let old_list = posting_list(&mut old).ok_or(NO_SEGMENT)?;
        segment += 1;
        match action {
            Action::Insert(_) | Action::Delete => {}
            Action::Replace(list) => posting::append(&mut data, list)?,
            Action::AddItems(items) => {
                let items = posting::merge(&posting::numbers(items)?, &posting::decode(old_list)?);
                posting::encode(&items, &mut data)?;
            }
            Action::Unknown(_) => return Err(RedoError::CorruptRecord("unknown action on a posting list segment")),
        }
    }
    posting::append(&mut data, old.rest())?;
    Ok(data)
}

/// Compresses a leaf that is still as PostgreSQL before 9.4 left it: an array of items, counted in the special space.
fn compress_page(page: &mut PageMut<'_>, mut opaque: Opaque) -> Result<(), RedoError> {
    let len = TID_SIZE * usize::from(opaque.max_offset);
    let items = page.0[DATA_AT..][..MAX_DATA_SIZE].get(..len).ok_or(SEGMENT)?;
    let mut data = Data::new();
    if !items.is_empty() {
        posting::encode(&posting::numbers(items.as_chunks().0)?, &mut data)?;
    }
    put_data(page, &data)?;
    opaque.flags |= GIN_COMPRESSED;
    opaque.max_offset = 0;
    opaque.put(page);
    Ok(())
}
