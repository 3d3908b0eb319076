//! What an insertion into a leaf brings, as far as the record tells: entries with their posting lists, items of a posting
//! tree's leaf (`access/ginblock.h`, `GinFormTuple` in `access/gin/ginentrypage.c`, PostgreSQL 18).

use walrider_layout::BlockNumber;
use walrider_layout::bytes::u16_at;
use walrider_wal::records::gin::{Action, InsertEntry, RecompressDataLeaf};

use super::{SHORT, posting};
use crate::RedoError;
use crate::index_tuple::{self, TID_SIZE};

/// Instead of a number of items: the entry leads to a posting tree (`GIN_TREE_POSTING`).
const TREE_POSTING: u16 = 0xFFFF;
/// The items are compressed; the other bits tell where they are (`GIN_ITUP_COMPRESSED`).
const COMPRESSED: u32 = 1 << 31;

/// Shows the heap blocks of all items in an insertion's block data: of those that are new, and of others that it rewrites.
///
/// # Errors
/// When they are not in the data: it is too short, leads to a posting tree, or is as PostgreSQL before 9.4 wrote it.
pub fn heap_blocks(data: &[u8], of_posting_tree: bool, mut see: impl FnMut(BlockNumber)) -> Result<(), RedoError> {
    if !of_posting_tree {
        return entry(InsertEntry::parse(data).ok_or(SHORT)?.tuple, see);
    }
    for action in RecompressDataLeaf::parse(data).ok_or(SHORT)?.actions() {
        match action.ok_or(SHORT)?.action {
            Action::Delete => {}
            Action::Insert(list) | Action::Replace(list) => posting::each(list, |item| see(posting::block(item)))?,
            Action::AddItems(items) => {
                for item in items {
                    see(index_tuple::downlink(item)?);
                }
            }
            Action::Unknown(_) => return Err(RedoError::CorruptRecord("unknown action on a posting list segment")),
        }
    }
    Ok(())
}

fn entry(tuple: &[u8], mut see: impl FnMut(BlockNumber)) -> Result<(), RedoError> {
    let tid = index_tuple::tid(tuple)?;
    let (place, count) = (index_tuple::downlink(&tid)?, u16_at(&tid, TID_SIZE - 2));
    match count {
        0 => Ok(()),
        TREE_POSTING => Err(RedoError::CorruptRecord("entry leads to a posting tree")),
        _ if place & COMPRESSED == 0 => Err(RedoError::CorruptRecord("items of an entry are not compressed")),
        _ => {
            let list = tuple.get((place & !COMPRESSED) as usize..).ok_or(SHORT)?;
            posting::each(list, |item| see(posting::block(item)))
        }
    }
}
