//! Records of GiST indexes (`access/gistxlog.h`, `access/rmgrdesc/gistdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::RelFileLocator;
use walrider_layout::bytes::Reader;

use super::parts::{Item, true_false};
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

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record.info(), Reader::new(record.main_data), out);
}

fn try_describe(info: u8, mut data: Reader<'_>, out: &mut String) -> Option<()> {
    let _ = match info {
        XLOG_GIST_DELETE => {
            let (horizon, items, catalog) = (data.u32()?, data.u16()?, true_false(data.bool()?));
            write!(out, "delete: snapshotConflictHorizon {horizon}, nitems: {items}, isCatalogRel {catalog}")
        }
        XLOG_GIST_PAGE_REUSE => {
            let rel = RelFileLocator::read(&data.array::<12>()?);
            let (block, xid, epoch) = (data.u32()?, data.u32()?, data.u32()?);
            let catalog = true_false(data.bool()?);
            write!(out, "rel {rel}; blk {block}; snapshotConflictHorizon {epoch}:{xid}, isCatalogRel {catalog}")
        }
        XLOG_GIST_PAGE_SPLIT => {
            data.take(18)?;
            write!(out, "page_split: splits to {} pages", data.u16()?)
        }
        XLOG_GIST_PAGE_DELETE => {
            let (xid, epoch, downlink) = (data.u32()?, data.u32()?, data.u16()?);
            write!(out, "deleteXid {epoch}:{xid}; downlink {downlink}")
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
            described(XLOG_GIST_DELETE, &[740, 2]),
            "delete: snapshotConflictHorizon 740, nitems: 2, isCatalogRel F"
        );
        assert_eq!(described(XLOG_GIST_PAGE_SPLIT, &[0, 0, 0, 0, 0x0003_0000, 0]), "page_split: splits to 3 pages");
        assert_eq!(described(XLOG_GIST_PAGE_DELETE, &[740, 1, 4]), "deleteXid 1:740; downlink 4");
        assert_eq!(described(XLOG_GIST_PAGE_UPDATE, &[1]), "");
    }
}
