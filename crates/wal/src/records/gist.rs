//! Records of GiST indexes (`access/gistxlog.h`, `access/rmgrdesc/gistdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{BlockNumber, Lsn, OffsetNumber, RelFileLocator, TransactionId};

use super::parts::{FullTransactionId, Item, Items, true_false};
use crate::record::Record;

/// Record type: tuples deleted from and inserted into a page.
pub const XLOG_GIST_PAGE_UPDATE: u8 = 0x00;
/// Record type: dead tuples deleted from a leaf.
pub const XLOG_GIST_DELETE: u8 = 0x10;
/// Record type: a deleted page is about to be used again.
pub const XLOG_GIST_PAGE_REUSE: u8 = 0x20;
/// Record type: a page split.
pub const XLOG_GIST_PAGE_SPLIT: u8 = 0x30;
/// Record type: a page deleted.
pub const XLOG_GIST_PAGE_DELETE: u8 = 0x60;
/// Record type: nothing, for the sake of its LSN.
pub const XLOG_GIST_ASSIGN_LSN: u8 = 0x70;

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_GIST_PAGE_UPDATE => Some("PAGE_UPDATE"),
        XLOG_GIST_DELETE => Some("DELETE"),
        XLOG_GIST_PAGE_REUSE => Some("PAGE_REUSE"),
        XLOG_GIST_PAGE_SPLIT => Some("PAGE_SPLIT"),
        XLOG_GIST_PAGE_DELETE => Some("PAGE_DELETE"),
        XLOG_GIST_ASSIGN_LSN => Some("ASSIGN_LSN"),
        _ => None,
    }
}

/// Data of `PAGE_UPDATE` (`gistxlogPageUpdate`, and the data of block 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageUpdate<'a> {
    /// Line pointers of tuples that go.
    pub deleted: Items<'a, OffsetNumber>,
    /// How many tuples come.
    pub inserted: u16,
    /// They, one behind the other.
    pub tuples: &'a [u8],
}

impl<'a> PageUpdate<'a> {
    /// Reads main and block data; `None` where they end too early.
    pub fn parse(main_data: &[u8], data: &'a [u8]) -> Option<PageUpdate<'a>> {
        let (mut main, mut data) = (Reader::new(main_data), Reader::new(data));
        let (deleted, inserted) = (main.u16()?, main.u16()?);
        Some(PageUpdate { deleted: Items::take(&mut data, deleted.into())?, inserted, tuples: data.rest() })
    }
}

/// Main data of `DELETE` (`gistxlogDelete`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delete<'a> {
    /// Newest transaction whose removal these tuples show.
    pub snapshot_conflict_horizon: TransactionId,
    /// The index belongs to a catalog.
    pub is_catalog_rel: bool,
    /// Line pointers of tuples that go.
    pub deleted: Items<'a, OffsetNumber>,
}

impl<'a> Delete<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<Delete<'a>> {
        let mut reader = Reader::new(main_data);
        let (snapshot_conflict_horizon, deleted, is_catalog_rel) = (reader.u32()?, reader.u16()?, reader.bool()?);
        reader.u8()?;
        let deleted = Items::take(&mut reader, deleted.into())?;
        Some(Delete { snapshot_conflict_horizon, is_catalog_rel, deleted })
    }
}

/// Main data of `PAGE_REUSE` (`gistxlogPageReuse`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageReuse {
    /// The index.
    pub rel: RelFileLocator,
    /// The page.
    pub block: BlockNumber,
    /// Newest transaction that could still have come across the page.
    pub snapshot_conflict_horizon: FullTransactionId,
    /// The index belongs to a catalog.
    pub is_catalog_rel: bool,
}

impl PageReuse {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<PageReuse> {
        let mut reader = Reader::new(main_data);
        Some(PageReuse {
            rel: RelFileLocator::read(&reader.array::<12>()?),
            block: reader.u32()?,
            snapshot_conflict_horizon: FullTransactionId(reader.u64()?),
            is_catalog_rel: reader.bool()?,
        })
    }
}

/// Main data of `PAGE_SPLIT` (`gistxlogPageSplit`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSplit {
    /// Right sibling of the page before, and so of the last page after.
    pub right_link: BlockNumber,
    /// Node sequence number of the page before, and so of all after.
    pub nsn: Lsn,
    /// The page was a leaf.
    pub is_leaf: bool,
    /// How many pages there are after: blocks 1 and following.
    pub page_count: u16,
    /// Pages get `F_FOLLOW_RIGHT` until their right siblings have downlinks.
    pub mark_follow_right: bool,
}

impl PageSplit {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<PageSplit> {
        let mut reader = Reader::new(main_data);
        let right_link = reader.u32()?;
        reader.take(4)?;
        let (nsn, is_leaf) = (Lsn(reader.u64()?), reader.bool()?);
        reader.u8()?;
        Some(PageSplit { right_link, nsn, is_leaf, page_count: reader.u16()?, mark_follow_right: reader.bool()? })
    }
}

/// Main data of `PAGE_DELETE` (`gistxlogPageDelete`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDelete {
    /// Newest transaction that could still come across the page.
    pub delete_xid: FullTransactionId,
    /// The parent's tuple that leads to the page.
    pub downlink: OffsetNumber,
}

impl PageDelete {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<PageDelete> {
        let mut reader = Reader::new(main_data);
        Some(PageDelete { delete_xid: FullTransactionId(reader.u64()?), downlink: reader.u16()? })
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record.info(), record.main_data, out);
}

fn try_describe(info: u8, data: &[u8], out: &mut String) -> Option<()> {
    let _ = match info {
        XLOG_GIST_DELETE => {
            let Delete { snapshot_conflict_horizon, is_catalog_rel, deleted } = Delete::parse(data)?;
            let (items, catalog) = (deleted.len(), true_false(is_catalog_rel));
            write!(
                out,
                "delete: snapshotConflictHorizon {snapshot_conflict_horizon}, nitems: {items}, isCatalogRel {catalog}"
            )
        }
        XLOG_GIST_PAGE_REUSE => {
            let PageReuse { rel, block, snapshot_conflict_horizon, is_catalog_rel } = PageReuse::parse(data)?;
            let catalog = true_false(is_catalog_rel);
            write!(
                out,
                "rel {rel}; blk {block}; snapshotConflictHorizon {snapshot_conflict_horizon}, isCatalogRel {catalog}"
            )
        }
        XLOG_GIST_PAGE_SPLIT => write!(out, "page_split: splits to {} pages", PageSplit::parse(data)?.page_count),
        XLOG_GIST_PAGE_DELETE => {
            let PageDelete { delete_xid, downlink } = PageDelete::parse(data)?;
            write!(out, "deleteXid {delete_xid}; downlink {downlink}")
        }
        _ => Ok(()),
    };
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u32]| described(RmgrId::GIST, info, &words(data.iter().copied()));
        assert_eq!(
            described(XLOG_GIST_PAGE_REUSE, &[1663, 5, 16384, 9, 740, 1, 1]),
            "rel 1663/5/16384; blk 9; snapshotConflictHorizon 1:740, isCatalogRel T"
        );
        assert_eq!(
            described(XLOG_GIST_DELETE, &[740, 2, 0x0006_0005]),
            "delete: snapshotConflictHorizon 740, nitems: 2, isCatalogRel F"
        );
        assert_eq!(described(XLOG_GIST_PAGE_SPLIT, &[0, 0, 0, 0, 0x0003_0000, 0]), "page_split: splits to 3 pages");
        assert_eq!(described(XLOG_GIST_PAGE_DELETE, &[740, 1, 4]), "deleteXid 1:740; downlink 4");
        assert_eq!(described(XLOG_GIST_PAGE_UPDATE, &[1]), "");
    }
}
