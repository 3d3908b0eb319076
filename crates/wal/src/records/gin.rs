//! Records of GIN indexes (`access/ginxlog.h`, `access/rmgrdesc/gindesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{BlockNumber, OffsetNumber, TransactionId};

use super::parts::true_false;
use crate::record::Record;

/// Record type: a posting tree begins.
pub const XLOG_GIN_CREATE_PTREE: u8 = 0x10;
/// Record type: an insertion that splits nothing.
pub const XLOG_GIN_INSERT: u8 = 0x20;
/// Record type: a page split.
pub const XLOG_GIN_SPLIT: u8 = 0x30;
/// Record type: a page of the entry tree vacuumed.
pub const XLOG_GIN_VACUUM_PAGE: u8 = 0x40;
/// Record type: a page of a posting tree deleted.
pub const XLOG_GIN_DELETE_PAGE: u8 = 0x50;
/// Record type: the meta page updated.
pub const XLOG_GIN_UPDATE_META_PAGE: u8 = 0x60;
/// Record type: a page of the pending list begins.
pub const XLOG_GIN_INSERT_LISTPAGE: u8 = 0x70;
/// Record type: pages of the pending list deleted.
pub const XLOG_GIN_DELETE_LISTPAGE: u8 = 0x80;
/// Record type: a leaf of a posting tree vacuumed.
pub const XLOG_GIN_VACUUM_DATA_LEAF_PAGE: u8 = 0x90;

const GIN_INSERT_ISDATA: u16 = 0x01;
const GIN_INSERT_ISLEAF: u16 = 0x02;
const GIN_SPLIT_ROOT: u16 = 0x04;

/// Bytes of what the metapage says (`GinMetaPageData`, `access/ginblock.h`).
pub const META_SIZE: usize = 56;
/// Bytes of a child's block number with its key, on an inner page of a posting tree (`PostingItem`).
pub const POSTING_ITEM_SIZE: usize = 10;
/// Bytes of a posting list before its encoded items: the first item and how many bytes follow (`GinPostingList`).
pub const POSTING_LIST_HEADER_SIZE: usize = 8;
/// Bytes of an item (`ItemPointerData`).
const ITEM_SIZE: usize = 6;

/// Which page of which tree an insertion or a split is about (`GIN_INSERT_IS…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageKind {
    /// A page of a posting tree, not of the entry tree.
    pub is_data: bool,
    /// A leaf.
    pub is_leaf: bool,
}

impl PageKind {
    fn of(flags: u16) -> PageKind {
        PageKind { is_data: flags & GIN_INSERT_ISDATA != 0, is_leaf: flags & GIN_INSERT_ISLEAF != 0 }
    }

    fn describe(&self, out: &mut String) {
        let _ = write!(out, "isdata: {} isleaf: {}", true_false(self.is_data), true_false(self.is_leaf));
    }
}

/// Main data of `CREATE_PTREE` (`ginxlogCreatePostingTree`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreatePostingTree<'a> {
    /// The posting lists of its first page.
    pub posting_lists: &'a [u8],
}

impl<'a> CreatePostingTree<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<CreatePostingTree<'a>> {
        let mut reader = Reader::new(main_data);
        let size = reader.u32()?;
        Some(CreatePostingTree { posting_lists: reader.take(usize::try_from(size).ok()?)? })
    }
}

/// Main data of `INSERT` (`ginxlogInsert`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insert {
    /// Where.
    pub place: PageKind,
    /// On an inner page: the child that was split, and its new right half.
    pub children: Option<(BlockNumber, BlockNumber)>,
}

impl Insert {
    /// Reads main data; `None` if it is too short.
    #[inline]
    pub fn parse(main_data: &[u8]) -> Option<Insert> {
        let mut reader = Reader::new(main_data);
        let place = PageKind::of(reader.u16()?);
        let children = if place.is_leaf { None } else { Some((block_id(&mut reader)?, block_id(&mut reader)?)) };
        Some(Insert { place, children })
    }
}

/// Block data of `INSERT` into the entry tree (`ginxlogInsertEntry`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InsertEntry<'a> {
    /// Line pointer of the new tuple.
    pub offset: OffsetNumber,
    /// The tuple that is there now goes.
    pub is_delete: bool,
    /// The new tuple.
    pub tuple: &'a [u8],
}

impl<'a> InsertEntry<'a> {
    /// Reads block data; `None` if it is too short.
    #[inline]
    pub fn parse(data: &'a [u8]) -> Option<InsertEntry<'a>> {
        let mut reader = Reader::new(data);
        let (offset, is_delete) = (reader.u16()?, reader.bool()?);
        reader.take(1)?;
        Some(InsertEntry { offset, is_delete, tuple: reader.rest() })
    }
}

/// Block data of `INSERT` into an inner page of a posting tree (`ginxlogInsertDataInternal`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InsertDataInternal {
    /// Number of the new posting item on the page, from 1.
    pub offset: OffsetNumber,
    /// The new posting item.
    pub new_item: [u8; POSTING_ITEM_SIZE],
}

impl InsertDataInternal {
    /// Reads block data; `None` if it is too short.
    pub fn parse(data: &[u8]) -> Option<InsertDataInternal> {
        let mut reader = Reader::new(data);
        Some(InsertDataInternal { offset: reader.u16()?, new_item: reader.array()? })
    }
}

/// Block data of `INSERT` into a leaf of a posting tree, and of `VACUUM_DATA_LEAF_PAGE`: what happens to its segments,
/// which are posting lists that lie one behind the other (`ginxlogRecompressDataLeaf`).
#[derive(Clone, Copy, Debug)]
pub struct RecompressDataLeaf<'a> {
    /// How many actions there are.
    pub count: u16,
    actions: Reader<'a>,
}

/// What happens to a segment (`ginxlogSegmentAction`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentAction<'a> {
    /// The segment, counted from 0 on the page as it was.
    pub segment: u8,
    /// What happens.
    pub action: Action<'a>,
}

/// Kinds of changes to segments (`GIN_SEGMENT_…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action<'a> {
    /// It goes.
    Delete,
    /// This posting list comes before it.
    Insert(&'a [u8]),
    /// This posting list takes its place.
    Replace(&'a [u8]),
    /// It gets these items, too.
    AddItems(&'a [[u8; ITEM_SIZE]]),
    /// Not an action. How long its data is, and so where the next action begins, is unknown.
    Unknown(u8),
}

impl<'a> RecompressDataLeaf<'a> {
    /// Reads block data; `None` if it is too short even for the number of actions.
    pub fn parse(data: &'a [u8]) -> Option<RecompressDataLeaf<'a>> {
        let mut reader = Reader::new(data);
        Some(RecompressDataLeaf { count: reader.u16()?, actions: reader })
    }

    /// The actions, in the order of segments; `None` where the data ends too early.
    pub fn actions(&self) -> impl Iterator<Item = Option<SegmentAction<'a>>> + use<'a> {
        let mut reader = self.actions;
        (0..self.count).map(move |_| SegmentAction::read(&mut reader))
    }
}

impl<'a> SegmentAction<'a> {
    fn read(reader: &mut Reader<'a>) -> Option<SegmentAction<'a>> {
        let (segment, kind) = (reader.u8()?, reader.u8()?);
        let action = match kind {
            1 => Action::Delete,
            2 => Action::Insert(posting_list(reader)?),
            3 => Action::Replace(posting_list(reader)?),
            4 => {
                let count = usize::from(reader.u16()?);
                Action::AddItems(reader.take(ITEM_SIZE * count)?.as_chunks().0)
            }
            kind => Action::Unknown(kind),
        };
        Some(SegmentAction { segment, action })
    }
}

/// Takes a posting list, with the byte that makes its length even (`SizeOfGinPostingList`).
pub fn posting_list<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let mut header = *reader;
    header.take(ITEM_SIZE)?;
    reader.take(POSTING_LIST_HEADER_SIZE + usize::from(header.u16()?).next_multiple_of(2))
}

/// Main data of `SPLIT` (`ginxlogSplit`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Where.
    pub place: PageKind,
    /// The root is split: its contents move to two new pages.
    pub is_root: bool,
}

impl Split {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Split> {
        let mut reader = Reader::new(main_data);
        // The index, and block numbers that redo does not need: images have them.
        reader.take(24)?;
        let flags = reader.u16()?;
        Some(Split { place: PageKind::of(flags), is_root: flags & GIN_SPLIT_ROOT != 0 })
    }
}

/// Main data of `DELETE_PAGE` (`ginxlogDeletePage`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeletePage {
    /// Number of the posting item on the parent.
    pub parent_offset: OffsetNumber,
    /// Right sibling of the page that goes.
    pub right_link: BlockNumber,
    /// The newest transaction that may still be on its way there.
    pub delete_xid: TransactionId,
}

impl DeletePage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<DeletePage> {
        let mut reader = Reader::new(main_data);
        let parent_offset = reader.u16()?;
        reader.take(2)?;
        Some(DeletePage { parent_offset, right_link: reader.u32()?, delete_xid: reader.u32()? })
    }
}

/// Main data of `UPDATE_META_PAGE` (`ginxlogUpdateMeta`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateMeta {
    /// What the metapage says from now on.
    pub metadata: [u8; META_SIZE],
    /// The page that was the pending list's last one; `u32::MAX` if none.
    pub prev_tail: BlockNumber,
    /// The page that now follows it.
    pub new_right_link: BlockNumber,
    /// If greater than 0: how many tuples the last page gets, and then the list gets no page.
    pub ntuples: i32,
}

impl UpdateMeta {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<UpdateMeta> {
        let mut reader = Reader::new(main_data);
        // The index, and bytes that align what follows.
        reader.take(16)?;
        Some(UpdateMeta {
            metadata: reader.array()?,
            prev_tail: reader.u32()?,
            new_right_link: reader.u32()?,
            ntuples: reader.i32()?,
        })
    }
}

/// Main data of `INSERT_LISTPAGE` (`ginxlogInsertListPage`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InsertListPage {
    /// The next page; `u32::MAX` if none.
    pub right_link: BlockNumber,
    /// How many tuples the page has.
    pub ntuples: i32,
}

impl InsertListPage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<InsertListPage> {
        let mut reader = Reader::new(main_data);
        Some(InsertListPage { right_link: reader.u32()?, ntuples: reader.i32()? })
    }
}

/// Main data of `DELETE_LISTPAGE` (`ginxlogDeleteListPages`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteListPages {
    /// What the metapage says from now on.
    pub metadata: [u8; META_SIZE],
    /// How many pages go.
    pub ndeleted: i32,
}

impl DeleteListPages {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<DeleteListPages> {
        let mut reader = Reader::new(main_data);
        Some(DeleteListPages { metadata: reader.array()?, ndeleted: reader.i32()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_GIN_CREATE_PTREE => Some("CREATE_PTREE"),
        XLOG_GIN_INSERT => Some("INSERT"),
        XLOG_GIN_SPLIT => Some("SPLIT"),
        XLOG_GIN_VACUUM_PAGE => Some("VACUUM_PAGE"),
        XLOG_GIN_VACUUM_DATA_LEAF_PAGE => Some("VACUUM_DATA_LEAF_PAGE"),
        XLOG_GIN_DELETE_PAGE => Some("DELETE_PAGE"),
        XLOG_GIN_UPDATE_META_PAGE => Some("UPDATE_META_PAGE"),
        XLOG_GIN_INSERT_LISTPAGE => Some("INSERT_LISTPAGE"),
        XLOG_GIN_DELETE_LISTPAGE => Some("DELETE_LISTPAGE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record, out);
}

fn try_describe(record: &Record<'_>, out: &mut String) -> Option<()> {
    match record.info() {
        XLOG_GIN_INSERT => {
            let Insert { place, children } = Insert::parse(record.main_data)?;
            place.describe(out);
            if let Some((left, right)) = children {
                let _ = write!(out, " children: {left}/{right}");
            }
            let Some(data) = data_unless_image(record, out)? else { return Some(()) };
            if !place.is_data {
                let _ = write!(out, " isdelete: {}", true_false(InsertEntry::parse(data)?.is_delete));
            } else if place.is_leaf {
                describe_recompression(data, out)?;
            } else {
                let item = InsertDataInternal::parse(data)?.new_item;
                let mut item = Reader::new(&item);
                let (child, key_block, key_offset) = (block_id(&mut item)?, block_id(&mut item)?, item.u16()?);
                let _ = write!(out, " pitem: {child}-{key_block}/{key_offset}");
            }
        }
        XLOG_GIN_SPLIT => {
            let Split { place, is_root } = Split::parse(record.main_data)?;
            let _ = write!(out, "isrootsplit: {} ", true_false(is_root));
            place.describe(out);
        }
        XLOG_GIN_VACUUM_DATA_LEAF_PAGE => {
            if let Some(data) = data_unless_image(record, out)? {
                describe_recompression(data, out)?;
            }
        }
        XLOG_GIN_DELETE_LISTPAGE => {
            let _ = write!(out, "ndeleted: {}", DeleteListPages::parse(record.main_data)?.ndeleted);
        }
        _ => {}
    }
    Some(())
}

/// The data of the first block, or nothing but a word if it has an image.
fn data_unless_image<'a>(record: &Record<'a>, out: &mut String) -> Option<Option<&'a [u8]>> {
    let block = record.block(0)?;
    match block.image {
        Some(image) if image.apply() => out.push_str(" (full page image)"),
        Some(_) => out.push_str(" (full page image, for WAL verification)"),
        None => return Some(Some(block.data)),
    }
    Some(None)
}

/// A block number in two halves, the upper one first (`BlockIdData`, `storage/block.h`).
fn block_id(reader: &mut Reader<'_>) -> Option<BlockNumber> {
    let high = reader.u16()?;
    Some(u32::from(high) << 16 | u32::from(reader.u16()?))
}

/// What happens to the segments of a leaf (`desc_recompress_leaf`).
fn describe_recompression(data: &[u8], out: &mut String) -> Option<()> {
    let recompression = RecompressDataLeaf::parse(data)?;
    let _ = write!(out, " {} segments:", recompression.count);
    for action in recompression.actions() {
        let SegmentAction { segment, action } = action?;
        let _ = match action {
            Action::Delete => write!(out, " {segment} (delete)"),
            Action::Insert(_) => write!(out, " {segment} (insert)"),
            Action::Replace(_) => write!(out, " {segment} (replace)"),
            Action::AddItems(items) => write!(out, " {segment} (add {} items)", items.len()),
            Action::Unknown(kind) => {
                let _ = write!(out, " {segment} unknown action {kind} ???");
                return None;
            }
        };
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::{RecordBuilder, TEST_REL};
    use walrider_layout::{ForkNumber, Lsn};

    fn described(info: u8, main: &[u8], block: &[u8]) -> String {
        let builder = RecordBuilder::new(RmgrId::GIN, info).main_data(main);
        let bytes = builder.block(0, TEST_REL, ForkNumber::Main, 7).data(block).build();
        let mut out = String::new();
        describe(&RecordBuilder::parse(&bytes, Lsn(40)), &mut out);
        out
    }

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        assert_eq!(described(XLOG_GIN_INSERT, &[2, 0], &[1, 0, 1, 0]), "isdata: F isleaf: T isdelete: T");
        let internal = [5, 0, 0, 0, 9, 0, 0, 0, 7, 0, 3, 0];
        assert_eq!(
            described(XLOG_GIN_INSERT, &[1, 0, 1, 0, 2, 0, 0, 0, 3, 0], &internal),
            "isdata: T isleaf: F children: 65538/3 pitem: 9-7/3"
        );
        let mut leaf = vec![4, 0, 0, 1, 1, 2];
        leaf.extend([0, 0, 9, 0, 1, 0, 3, 0, 1, 2, 3, 0]);
        leaf.extend([2, 4, 2, 0]);
        leaf.extend([0; 12]);
        leaf.extend([3, 9]);
        assert_eq!(
            described(XLOG_GIN_VACUUM_DATA_LEAF_PAGE, &[], &leaf),
            " 4 segments: 0 (delete) 1 (insert) 2 (add 2 items) 3 unknown action 9 ???"
        );
        let split = [&[0; 24][..], &[6, 0]].concat();
        assert_eq!(described(XLOG_GIN_SPLIT, &split, &[]), "isrootsplit: T isdata: F isleaf: T");
        let deleted = [&[0; 56][..], &[3, 0, 0, 0]].concat();
        assert_eq!(described(XLOG_GIN_DELETE_LISTPAGE, &deleted, &[]), "ndeleted: 3");
    }
}
