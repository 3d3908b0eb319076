//! What is special about pages of a GIN index (`access/ginblock.h`, PostgreSQL 18).
//!
//! Data pages have no line pointers. Behind the header is the largest item that belongs there (the right bound), then
//! posting lists one behind the other on a leaf, and an array of posting items on an inner page.

use walrider_layout::bytes::{put_u16, put_u32, u16_at, u32_at};
use walrider_layout::page::{PAGE_HEADER_SIZE, PageMut};
use walrider_layout::{BlockNumber, OffsetNumber, maxalign};
use walrider_wal::records::gin::{META_SIZE, POSTING_ITEM_SIZE};

use crate::RedoError;
use crate::index_tuple::{TID_SIZE, make_tid};
use crate::special::Special;

/// `flags`: page of a posting tree.
pub const GIN_DATA: u16 = 1 << 0;
/// `flags`: leaf page.
pub const GIN_LEAF: u16 = 1 << 1;
/// `flags`: no longer in the tree or list.
pub const GIN_DELETED: u16 = 1 << 2;
/// `flags`: the metapage.
pub const GIN_META: u16 = 1 << 3;
/// `flags`: page of the pending list.
pub const GIN_LIST: u16 = 1 << 4;
/// `flags`: all tuples of its last heap tuple end on this page.
pub const GIN_LIST_FULLROW: u16 = 1 << 5;
/// `flags`: the right sibling has no downlink yet.
pub const GIN_INCOMPLETE_SPLIT: u16 = 1 << 6;
/// `flags`: items are in posting lists, not in an array as before PostgreSQL 9.4.
pub const GIN_COMPRESSED: u16 = 1 << 7;

/// No block (`InvalidBlockNumber`).
pub const INVALID_BLOCK: BlockNumber = u32::MAX;

/// Where the data of a data page begins (`GinDataPageGetData`).
pub const DATA_AT: usize = PAGE_HEADER_SIZE + maxalign(TID_SIZE);
/// The most bytes of data on a data page (`GinDataPageMaxDataSize`).
pub const MAX_DATA_SIZE: usize = Opaque::AT - DATA_AT;

/// The special space (`GinPageOpaqueData`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opaque {
    /// Right sibling.
    pub right_link: BlockNumber,
    /// Posting items on an inner data page, items on an uncompressed leaf, heap tuples on a page of the pending list.
    pub max_offset: OffsetNumber,
    /// `GIN_…`.
    pub flags: u16,
}

impl Default for Opaque {
    /// Without a sibling (`GinInitPage`).
    fn default() -> Opaque {
        Opaque { right_link: INVALID_BLOCK, max_offset: 0, flags: 0 }
    }
}

impl Special for Opaque {
    const SIZE: usize = 8;
    const NOT_ONE: &'static str = "not a GIN page";

    fn read(bytes: &[u8]) -> Option<Opaque> {
        Some(Opaque { right_link: u32_at(bytes, 0), max_offset: u16_at(bytes, 4), flags: u16_at(bytes, 6) })
    }

    fn store(&self, bytes: &mut [u8]) {
        put_u32(bytes, 0, self.right_link);
        put_u16(bytes, 4, self.max_offset);
        put_u16(bytes, 6, self.flags);
    }
}

impl Opaque {
    /// Whether the page belongs to a posting tree.
    pub fn is_data(&self) -> bool {
        self.flags & GIN_DATA != 0
    }

    /// Whether the page is a leaf.
    pub fn is_leaf(&self) -> bool {
        self.flags & GIN_LEAF != 0
    }
}

/// Fills an initialised metapage (`GinMetaPageData`).
pub fn put_meta(page: &mut PageMut<'_>, metadata: &[u8; META_SIZE]) {
    page.0[PAGE_HEADER_SIZE..][..META_SIZE].copy_from_slice(metadata);
    // Else a full-page image would leave the metadata out.
    page.set_lower(PAGE_HEADER_SIZE + META_SIZE);
}

/// Stores the data of a data page from its beginning; what lay behind stays there (`GinDataPageSetDataSize`).
///
/// # Errors
/// When it does not fit.
pub fn put_data(page: &mut PageMut<'_>, data: &[u8]) -> Result<(), RedoError> {
    if data.len() > MAX_DATA_SIZE {
        return Err(RedoError::NoRoom(data.len()));
    }
    page.0[DATA_AT..][..data.len()].copy_from_slice(data);
    page.set_lower(DATA_AT + data.len());
    Ok(())
}

/// Inserts a posting item; the one that is there leads to the right half of the split child from now on, and moves up
/// with those behind it (`ginRedoInsertData`, `GinDataPageAddPostingItem`).
///
/// # Errors
/// When there is no such posting item, or no room for one more.
pub fn insert_posting_item(
    page: &mut PageMut<'_>,
    mut opaque: Opaque,
    number: OffsetNumber,
    item: &[u8; POSTING_ITEM_SIZE],
    right_child: BlockNumber,
) -> Result<(), RedoError> {
    let (at, end) = posting_item(&opaque, number)?;
    if end + POSTING_ITEM_SIZE > Opaque::AT {
        return Err(RedoError::NoRoom(POSTING_ITEM_SIZE));
    }
    page.0[at..at + 4].copy_from_slice(&make_tid(right_child, 0)[..4]);
    page.0.copy_within(at..end, at + POSTING_ITEM_SIZE);
    page.0[at..at + POSTING_ITEM_SIZE].copy_from_slice(item);
    page.set_lower(end + POSTING_ITEM_SIZE);
    opaque.max_offset += 1;
    opaque.put(page);
    Ok(())
}

/// Removes a posting item, and counts one less (`GinPageDeletePostingItem`).
///
/// # Errors
/// When there is no such posting item.
pub fn delete_posting_item(page: &mut PageMut<'_>, opaque: &mut Opaque, number: OffsetNumber) -> Result<(), RedoError> {
    let (at, end) = posting_item(opaque, number)?;
    page.0.copy_within(at + POSTING_ITEM_SIZE..end, at);
    page.set_lower(end - POSTING_ITEM_SIZE);
    opaque.max_offset -= 1;
    Ok(())
}

/// Where a posting item is, and where the last one ends, both on the page.
fn posting_item(opaque: &Opaque, number: OffsetNumber) -> Result<(usize, usize), RedoError> {
    let end = DATA_AT + POSTING_ITEM_SIZE * usize::from(opaque.max_offset);
    if opaque.is_leaf() || end > Opaque::AT {
        return Err(RedoError::CorruptPage("not an inner page of a posting tree, or with too many posting items"));
    }
    if number == 0 || number > opaque.max_offset {
        return Err(RedoError::CorruptRecord("no such posting item"));
    }
    Ok((DATA_AT + POSTING_ITEM_SIZE * (usize::from(number) - 1), end))
}
