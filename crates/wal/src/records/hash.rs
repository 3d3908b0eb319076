//! Records of hash indexes (`access/hash_xlog.h`, `access/rmgrdesc/hashdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;

use super::parts::{General, true_false};
use crate::record::Record;

/// Record type: the meta page begins.
pub const XLOG_HASH_INIT_META_PAGE: u8 = 0x00;
/// Record type: a bitmap page begins.
pub const XLOG_HASH_INIT_BITMAP_PAGE: u8 = 0x10;
/// Record type: a tuple inserted.
pub const XLOG_HASH_INSERT: u8 = 0x20;
/// Record type: an overflow page added.
pub const XLOG_HASH_ADD_OVFL_PAGE: u8 = 0x30;
/// Record type: a page allocated for a split.
pub const XLOG_HASH_SPLIT_ALLOCATE_PAGE: u8 = 0x40;
/// Record type: a page split.
pub const XLOG_HASH_SPLIT_PAGE: u8 = 0x50;
/// Record type: a split completed.
pub const XLOG_HASH_SPLIT_COMPLETE: u8 = 0x60;
/// Record type: tuples moved from one page to another.
pub const XLOG_HASH_MOVE_PAGE_CONTENTS: u8 = 0x70;
/// Record type: an overflow page emptied into an earlier one, and freed.
pub const XLOG_HASH_SQUEEZE_PAGE: u8 = 0x80;
/// Record type: tuples deleted.
pub const XLOG_HASH_DELETE: u8 = 0x90;
/// Record type: what a split left behind is gone.
pub const XLOG_HASH_SPLIT_CLEANUP: u8 = 0xA0;
/// Record type: the meta page updated after VACUUM.
pub const XLOG_HASH_UPDATE_META_PAGE: u8 = 0xB0;
/// Record type: dead tuples removed from a page.
pub const XLOG_HASH_VACUUM_ONE_PAGE: u8 = 0xC0;

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_HASH_INIT_META_PAGE => Some("INIT_META_PAGE"),
        XLOG_HASH_INIT_BITMAP_PAGE => Some("INIT_BITMAP_PAGE"),
        XLOG_HASH_INSERT => Some("INSERT"),
        XLOG_HASH_ADD_OVFL_PAGE => Some("ADD_OVFL_PAGE"),
        XLOG_HASH_SPLIT_ALLOCATE_PAGE => Some("SPLIT_ALLOCATE_PAGE"),
        XLOG_HASH_SPLIT_PAGE => Some("SPLIT_PAGE"),
        XLOG_HASH_SPLIT_COMPLETE => Some("SPLIT_COMPLETE"),
        XLOG_HASH_MOVE_PAGE_CONTENTS => Some("MOVE_PAGE_CONTENTS"),
        XLOG_HASH_SQUEEZE_PAGE => Some("SQUEEZE_PAGE"),
        XLOG_HASH_DELETE => Some("DELETE"),
        XLOG_HASH_SPLIT_CLEANUP => Some("SPLIT_CLEANUP"),
        XLOG_HASH_UPDATE_META_PAGE => Some("UPDATE_META_PAGE"),
        XLOG_HASH_VACUUM_ONE_PAGE => Some("VACUUM_ONE_PAGE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record.info(), Reader::new(record.main_data), out);
}

fn try_describe(info: u8, mut data: Reader<'_>, out: &mut String) -> Option<()> {
    let _ = match info {
        XLOG_HASH_INIT_META_PAGE => {
            let tuples = General(f64::from_bits(data.u64()?));
            data.take(4)?;
            write!(out, "num_tuples {tuples}, fillfactor {}", data.u16()?)
        }
        XLOG_HASH_INIT_BITMAP_PAGE => write!(out, "bmsize {}", data.u16()?),
        XLOG_HASH_INSERT => write!(out, "off {}", data.u16()?),
        XLOG_HASH_ADD_OVFL_PAGE => {
            let (size, found) = (data.u16()?, data.bool()?);
            write!(out, "bmsize {size}, bmpage_found {}", true_false(found))
        }
        XLOG_HASH_SPLIT_ALLOCATE_PAGE => {
            let bucket = data.u32()?;
            data.take(4)?;
            let flags = data.u8()?;
            let (masks, splitpoint) = (true_false(flags & 1 != 0), true_false(flags & 2 != 0));
            write!(out, "new_bucket {bucket}, meta_page_masks_updated {masks}, issplitpoint_changed {splitpoint}")
        }
        XLOG_HASH_SPLIT_COMPLETE => {
            let (old, new) = (data.u16()?, data.u16()?);
            write!(out, "old_bucket_flag {old}, new_bucket_flag {new}")
        }
        XLOG_HASH_MOVE_PAGE_CONTENTS => {
            let (tuples, primary) = (data.u16()?, data.bool()?);
            write!(out, "ntups {tuples}, is_primary {}", true_false(primary))
        }
        XLOG_HASH_SQUEEZE_PAGE => {
            let (previous, next, tuples, primary) = (data.u32()?, data.u32()?, data.u16()?, data.bool()?);
            let primary = true_false(primary);
            write!(out, "prevblkno {previous}, nextblkno {next}, ntups {tuples}, is_primary {primary}")
        }
        XLOG_HASH_DELETE => {
            let (clear, primary) = (true_false(data.bool()?), true_false(data.bool()?));
            write!(out, "clear_dead_marking {clear}, is_primary {primary}")
        }
        XLOG_HASH_UPDATE_META_PAGE => write!(out, "ntuples {}", General(f64::from_bits(data.u64()?))),
        XLOG_HASH_VACUUM_ONE_PAGE => {
            let (horizon, tuples, catalog) = (data.u32()?, data.u16()?, true_false(data.bool()?));
            write!(out, "ntuples {tuples}, snapshotConflictHorizon {horizon}, isCatalogRel {catalog}")
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
        let described = |info, data: &[u8]| described(RmgrId::HASH, info, data);
        let meta = [&1_234_567.0f64.to_le_bytes()[..], &words([400, 307])].concat();
        assert_eq!(described(XLOG_HASH_INIT_META_PAGE, &meta), "num_tuples 1.23457e+06, fillfactor 307");
        assert_eq!(
            described(XLOG_HASH_SPLIT_ALLOCATE_PAGE, &words([9, 0, 2])[..9]),
            "new_bucket 9, meta_page_masks_updated F, issplitpoint_changed T"
        );
        assert_eq!(
            described(XLOG_HASH_SQUEEZE_PAGE, &words([1, 2, 0x0001_0003])),
            "prevblkno 1, nextblkno 2, ntups 3, is_primary T"
        );
        assert_eq!(
            described(XLOG_HASH_VACUUM_ONE_PAGE, &words([740, 0x0001_0003])),
            "ntuples 3, snapshotConflictHorizon 740, isCatalogRel T"
        );
    }
}
