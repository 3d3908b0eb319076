//! Records of B-tree indexes (`access/nbtxlog.h`, `access/rmgrdesc/nbtdesc.c`, PostgreSQL 18).

use std::fmt::Write;

use walrider_layout::bytes::{Reader, u16_at};
use walrider_layout::{BlockNumber, OffsetNumber, RelFileLocator, TransactionId};

use super::parts::{FullTransactionId, Item, Items, true_false};
use crate::record::Record;

/// Record type: a tuple inserted into a leaf page.
pub const XLOG_BTREE_INSERT_LEAF: u8 = 0x00;
/// Record type: a tuple inserted into an inner page, which completes the split of a child.
pub const XLOG_BTREE_INSERT_UPPER: u8 = 0x10;
/// Record type: the same, and the metapage changes.
pub const XLOG_BTREE_INSERT_META: u8 = 0x20;
/// Record type: page split, the new tuple goes left.
pub const XLOG_BTREE_SPLIT_L: u8 = 0x30;
/// Record type: page split, the new tuple goes right.
pub const XLOG_BTREE_SPLIT_R: u8 = 0x40;
/// Record type: a tuple inserted into a leaf page whose TID falls into an existing posting list.
pub const XLOG_BTREE_INSERT_POST: u8 = 0x50;
/// Record type: equal tuples of a leaf page merged into posting lists.
pub const XLOG_BTREE_DEDUP: u8 = 0x60;
/// Record type: tuples removed from a leaf page, other than by VACUUM.
pub const XLOG_BTREE_DELETE: u8 = 0x70;
/// Record type: a half-dead page taken out of the tree.
pub const XLOG_BTREE_UNLINK_PAGE: u8 = 0x80;
/// Record type: the same, and the metapage changes.
pub const XLOG_BTREE_UNLINK_PAGE_META: u8 = 0x90;
/// Record type: a new root page.
pub const XLOG_BTREE_NEWROOT: u8 = 0xA0;
/// Record type: an empty leaf page marked for removal.
pub const XLOG_BTREE_MARK_PAGE_HALFDEAD: u8 = 0xB0;
/// Record type: tuples removed from a leaf page by VACUUM.
pub const XLOG_BTREE_VACUUM: u8 = 0xC0;
/// Record type: a deleted page is used again; only for conflicts on a hot standby.
pub const XLOG_BTREE_REUSE_PAGE: u8 = 0xD0;
/// Record type: VACUUM's figures in the metapage change.
pub const XLOG_BTREE_META_CLEANUP: u8 = 0xE0;

/// What the metapage is rebuilt from (`xl_btree_metadata`), as block data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Version of the index format.
    pub version: u32,
    /// The root page.
    pub root: BlockNumber,
    /// Its level.
    pub level: u32,
    /// The page where searches begin.
    pub fast_root: BlockNumber,
    /// Its level.
    pub fast_level: u32,
    /// Deleted pages that the last clean-up could not recycle.
    pub last_cleanup_num_delpages: u32,
    /// Equal keys always look equal, so that they can share a posting list.
    pub all_equal_image: bool,
}

impl Metadata {
    /// Reads block data; `None` if it is too short.
    pub fn parse(data: &[u8]) -> Option<Metadata> {
        let mut reader = Reader::new(data);
        Some(Metadata {
            version: reader.u32()?,
            root: reader.u32()?,
            level: reader.u32()?,
            fast_root: reader.u32()?,
            fast_level: reader.u32()?,
            last_cleanup_num_delpages: reader.u32()?,
            all_equal_image: reader.bool()?,
        })
    }
}

/// Main data of the `INSERT` records (`xl_btree_insert`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insert {
    /// Line pointer of the new tuple.
    pub offset: OffsetNumber,
}

impl Insert {
    /// Reads main data; `None` if it is too short.
    #[inline]
    pub fn parse(main_data: &[u8]) -> Option<Insert> {
        Some(Insert { offset: Reader::new(main_data).u16()? })
    }
}

/// Main data of the `SPLIT` records (`xl_btree_split`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Level of the page that is split, 0 for a leaf.
    pub level: u32,
    /// The first item of the old page that goes right.
    pub first_right: OffsetNumber,
    /// Where the new item goes, counted on the old page.
    pub new_item: OffsetNumber,
    /// If not 0: where within the posting list before the new item its TID belongs.
    pub posting: u16,
}

impl Split {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Split> {
        let mut reader = Reader::new(main_data);
        Some(Split {
            level: reader.u32()?,
            first_right: reader.u16()?,
            new_item: reader.u16()?,
            posting: reader.u16()?,
        })
    }
}

/// Data of `DEDUP` (`xl_btree_dedup`, and the intervals in the block data).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dedup<'a> {
    intervals: &'a [u8],
}

impl<'a> Dedup<'a> {
    /// How many posting lists the main data announces; `None` if it is too short.
    pub fn count(main_data: &[u8]) -> Option<u16> {
        Reader::new(main_data).u16()
    }

    /// Reads main and block data; `None` where they end too early.
    pub fn parse(main_data: &[u8], data: &'a [u8]) -> Option<Dedup<'a>> {
        let count = Dedup::count(main_data)?;
        Some(Dedup { intervals: data.get(..4 * usize::from(count))? })
    }

    /// Which tuples become one each: the first one's line pointer, and how many (`BTDedupInterval`).
    pub fn intervals(&self) -> impl Iterator<Item = (OffsetNumber, u16)> + use<'a> {
        self.intervals.chunks_exact(4).map(|bytes| (u16_at(bytes, 0), u16_at(bytes, 2)))
    }
}

/// A posting list that loses some of its TIDs (`xl_btree_update`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update<'a> {
    /// The tuple's line pointer.
    pub offset: OffsetNumber,
    /// Which of its TIDs go, counted from 0, ascending.
    pub deleted_tids: Items<'a, u16>,
}

/// Block data of `DELETE` and `VACUUM`: what leaves the page (`xl_btree_delete`, `xl_btree_vacuum`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removal<'a> {
    /// Line pointers of tuples that go.
    pub deleted: Items<'a, u16>,
    updated: Items<'a, u16>,
    updates: &'a [u8],
}

impl<'a> Removal<'a> {
    /// Reads block data; `None` if it is too short.
    pub fn parse(deleted: u16, updated: u16, data: &'a [u8]) -> Option<Removal<'a>> {
        let mut reader = Reader::new(data);
        let deleted = Items::take(&mut reader, deleted.into())?;
        let updated = Items::take(&mut reader, updated.into())?;
        Some(Removal { deleted, updated, updates: reader.rest() })
    }

    /// Posting lists that lose TIDs; ends with a `None` where the data ends too early.
    pub fn updates(&self) -> impl Iterator<Item = Option<Update<'a>>> + use<'a> {
        let mut reader = Reader::new(self.updates);
        self.updated.iter().map(move |offset| {
            let count = reader.u16()?;
            Some(Update { offset, deleted_tids: Items::take(&mut reader, count.into())? })
        })
    }
}

/// Main data of `VACUUM` (`xl_btree_vacuum`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vacuum {
    /// How many tuples go.
    pub deleted: u16,
    /// How many posting lists lose TIDs.
    pub updated: u16,
}

impl Vacuum {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Vacuum> {
        let mut reader = Reader::new(main_data);
        Some(Vacuum { deleted: reader.u16()?, updated: reader.u16()? })
    }
}

/// Main data of `DELETE` (`xl_btree_delete`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delete {
    /// Newest transaction whose removal these tuples show.
    pub snapshot_conflict_horizon: TransactionId,
    /// How many tuples go.
    pub deleted: u16,
    /// How many posting lists lose TIDs.
    pub updated: u16,
    /// The index belongs to a catalog.
    pub is_catalog_rel: bool,
}

impl Delete {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Delete> {
        let mut reader = Reader::new(main_data);
        Some(Delete {
            snapshot_conflict_horizon: reader.u32()?,
            deleted: reader.u16()?,
            updated: reader.u16()?,
            is_catalog_rel: reader.bool()?,
        })
    }
}

/// Main data of `MARK_PAGE_HALFDEAD` (`xl_btree_mark_page_halfdead`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkPageHalfDead {
    /// The downlink in the parent.
    pub parent_offset: OffsetNumber,
    /// The leaf that is to go.
    pub leaf: BlockNumber,
    /// Its left sibling.
    pub left: BlockNumber,
    /// Its right sibling.
    pub right: BlockNumber,
    /// The topmost page that goes with it.
    pub top_parent: BlockNumber,
}

impl MarkPageHalfDead {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<MarkPageHalfDead> {
        let mut reader = Reader::new(main_data);
        let parent_offset = reader.u16()?;
        reader.take(2)?;
        Some(MarkPageHalfDead {
            parent_offset,
            leaf: reader.u32()?,
            left: reader.u32()?,
            right: reader.u32()?,
            top_parent: reader.u32()?,
        })
    }
}

/// Main data of the `UNLINK_PAGE` records (`xl_btree_unlink_page`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnlinkPage {
    /// Left sibling of the page that goes, 0 if none.
    pub left: BlockNumber,
    /// Its right sibling.
    pub right: BlockNumber,
    /// Its level.
    pub level: u32,
    /// When the page may be used again.
    pub safe_xid: FullTransactionId,
    /// Left sibling of the half-dead leaf below.
    pub leaf_left: BlockNumber,
    /// Its right sibling.
    pub leaf_right: BlockNumber,
    /// The next page above it that is to go.
    pub leaf_top_parent: BlockNumber,
}

impl UnlinkPage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<UnlinkPage> {
        let mut reader = Reader::new(main_data);
        let (left, right, level) = (reader.u32()?, reader.u32()?, reader.u32()?);
        reader.take(4)?;
        Some(UnlinkPage {
            left,
            right,
            level,
            safe_xid: FullTransactionId(reader.u64()?),
            leaf_left: reader.u32()?,
            leaf_right: reader.u32()?,
            leaf_top_parent: reader.u32()?,
        })
    }
}

/// Main data of `NEWROOT` (`xl_btree_newroot`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRoot {
    /// The new root.
    pub root: BlockNumber,
    /// Its level, 0 for the first page of an index.
    pub level: u32,
}

impl NewRoot {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<NewRoot> {
        let mut reader = Reader::new(main_data);
        Some(NewRoot { root: reader.u32()?, level: reader.u32()? })
    }
}

/// Main data of `REUSE_PAGE` (`xl_btree_reuse_page`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReusePage {
    /// The index.
    pub rel: RelFileLocator,
    /// The page.
    pub block: BlockNumber,
    /// Newest transaction that may still have been on its way there.
    pub snapshot_conflict_horizon: FullTransactionId,
    /// The index belongs to a catalog.
    pub is_catalog_rel: bool,
}

impl ReusePage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<ReusePage> {
        let mut reader = Reader::new(main_data);
        Some(ReusePage {
            rel: RelFileLocator::read(&reader.array::<12>()?),
            block: reader.u32()?,
            snapshot_conflict_horizon: FullTransactionId(reader.u64()?),
            is_catalog_rel: reader.bool()?,
        })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    Some(match info & 0xF0 {
        XLOG_BTREE_INSERT_LEAF => "INSERT_LEAF",
        XLOG_BTREE_INSERT_UPPER => "INSERT_UPPER",
        XLOG_BTREE_INSERT_META => "INSERT_META",
        XLOG_BTREE_SPLIT_L => "SPLIT_L",
        XLOG_BTREE_SPLIT_R => "SPLIT_R",
        XLOG_BTREE_INSERT_POST => "INSERT_POST",
        XLOG_BTREE_DEDUP => "DEDUP",
        XLOG_BTREE_DELETE => "DELETE",
        XLOG_BTREE_UNLINK_PAGE => "UNLINK_PAGE",
        XLOG_BTREE_UNLINK_PAGE_META => "UNLINK_PAGE_META",
        XLOG_BTREE_NEWROOT => "NEWROOT",
        XLOG_BTREE_MARK_PAGE_HALFDEAD => "MARK_PAGE_HALFDEAD",
        XLOG_BTREE_VACUUM => "VACUUM",
        XLOG_BTREE_REUSE_PAGE => "REUSE_PAGE",
        XLOG_BTREE_META_CLEANUP => "META_CLEANUP",
        _ => return None,
    })
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record, out);
}

fn try_describe(record: &Record<'_>, out: &mut String) -> Option<()> {
    let main = record.main_data;
    match record.info() {
        XLOG_BTREE_INSERT_LEAF | XLOG_BTREE_INSERT_UPPER | XLOG_BTREE_INSERT_META | XLOG_BTREE_INSERT_POST => {
            write!(out, "off: {}", Insert::parse(main)?.offset).ok()
        }
        XLOG_BTREE_SPLIT_L | XLOG_BTREE_SPLIT_R => {
            let Split { level, first_right, new_item, posting } = Split::parse(main)?;
            write!(out, "level: {level}, firstrightoff: {first_right}, newitemoff: {new_item}, postingoff: {posting}")
                .ok()
        }
        XLOG_BTREE_DEDUP => write!(out, "nintervals: {}", Dedup::count(main)?).ok(),
        XLOG_BTREE_VACUUM => {
            let Vacuum { deleted, updated } = Vacuum::parse(main)?;
            write!(out, "ndeleted: {deleted}, nupdated: {updated}").ok()?;
            describe_removal(record, deleted, updated, out)
        }
        XLOG_BTREE_DELETE => {
            let Delete { snapshot_conflict_horizon: horizon, deleted, updated, is_catalog_rel } = Delete::parse(main)?;
            let catalog = true_false(is_catalog_rel);
            write!(
                out,
                "snapshotConflictHorizon: {horizon}, ndeleted: {deleted}, nupdated: {updated}, isCatalogRel: {catalog}"
            )
            .ok()?;
            describe_removal(record, deleted, updated, out)
        }
        XLOG_BTREE_MARK_PAGE_HALFDEAD => {
            let MarkPageHalfDead { leaf, left, right, top_parent, .. } = MarkPageHalfDead::parse(main)?;
            write!(out, "topparent: {top_parent}, leaf: {leaf}, left: {left}, right: {right}").ok()
        }
        XLOG_BTREE_UNLINK_PAGE | XLOG_BTREE_UNLINK_PAGE_META => {
            let page = UnlinkPage::parse(main)?;
            write!(
                out,
                "left: {}, right: {}, level: {}, safexid: {}, leafleft: {}, leafright: {}, leaftopparent: {}",
                page.left, page.right, page.level, page.safe_xid, page.leaf_left, page.leaf_right, page.leaf_top_parent
            )
            .ok()
        }
        XLOG_BTREE_NEWROOT => write!(out, "level: {}", NewRoot::parse(main)?.level).ok(),
        XLOG_BTREE_REUSE_PAGE => {
            let ReusePage { rel, snapshot_conflict_horizon: horizon, is_catalog_rel, .. } = ReusePage::parse(main)?;
            let catalog = true_false(is_catalog_rel);
            write!(out, "rel: {rel}, snapshotConflictHorizon: {horizon}, isCatalogRel: {catalog}").ok()
        }
        XLOG_BTREE_META_CLEANUP => {
            let metadata = Metadata::parse(record.block(0)?.data)?;
            write!(out, "last_cleanup_num_delpages: {}", metadata.last_cleanup_num_delpages).ok()
        }
        _ => None,
    }
}

fn describe_removal(record: &Record<'_>, deleted: u16, updated: u16, out: &mut String) -> Option<()> {
    // With an image there may be no block data.
    let block = record.block(0).filter(|block| block.has_data)?;
    let removal = Removal::parse(deleted, updated, block.data)?;
    write!(out, ", deleted: {}, updated: [", removal.deleted).ok()?;
    for (index, update) in removal.updates().enumerate() {
        let Update { offset, deleted_tids } = update?;
        let separator = if index == 0 { "" } else { ", " };
        let count = deleted_tids.len();
        write!(out, "{separator}{{ off: {offset}, nptids: {count}, ptids: {deleted_tids} }}").ok()?;
    }
    out.push(']');
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::{RecordBuilder, TEST_REL};
    use walrider_layout::{ForkNumber, Lsn};

    fn described(info: u8, main: &[u8], data: &[u8]) -> String {
        let bytes = RecordBuilder::new(RmgrId::BTREE, info)
            .main_data(main)
            .block(0, TEST_REL, ForkNumber::Main, 3)
            .data(data)
            .build();
        let mut out = String::new();
        describe(&RecordBuilder::parse(&bytes, Lsn(0x28)), &mut out);
        out
    }

    /// What pg_waldump 18.6 prints.
    #[test]
    fn removals_are_described_as_pg_waldump_does() {
        assert_eq!(
            described(XLOG_BTREE_DELETE, &[0xF8, 2, 0, 0, 2, 0, 1, 0, 1], &[3, 0, 5, 0, 4, 0, 2, 0, 0, 0, 7, 0]),
            "snapshotConflictHorizon: 760, ndeleted: 2, nupdated: 1, isCatalogRel: T, deleted: [3, 5], \
             updated: [{ off: 4, nptids: 2, ptids: [0, 7] }]"
        );
        assert_eq!(
            described(XLOG_BTREE_VACUUM, &[1, 0, 0, 0], &[9, 0]),
            "ndeleted: 1, nupdated: 0, deleted: [9], updated: []"
        );
        assert_eq!(described(XLOG_BTREE_VACUUM, &[1, 0, 0, 0], &[]), "ndeleted: 1, nupdated: 0");
    }

    #[test]
    fn data_that_ends_too_early_is_not_read() {
        let removal = Removal::parse(0, 2, &[1, 0, 2, 0, 1, 0, 0, 0, 3, 0, 0]).unwrap();
        let updates: Vec<_> = removal.updates().map(|update| update.map(|known| known.offset)).collect();
        assert_eq!(updates, [Some(1), None]);
        assert_eq!(Removal::parse(3, 0, &[0; 5]), None);
        assert_eq!(Dedup::parse(&[2, 0], &[0; 7]), None);
        assert_eq!(UnlinkPage::parse(&[0; 35]), None);
        assert!(UnlinkPage::parse(&[0; 36]).is_some());
    }
}
