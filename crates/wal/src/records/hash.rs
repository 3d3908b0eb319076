//! Records of hash indexes (`access/hash_xlog.h`, `access/rmgrdesc/hashdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{BlockNumber, OffsetNumber, Oid, TransactionId};

use super::parts::{General, Items, true_false};
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

/// With SPLIT_ALLOCATE_PAGE: the metapage gets other masks.
pub const XLH_SPLIT_META_UPDATE_MASKS: u8 = 1 << 0;
/// With SPLIT_ALLOCATE_PAGE: the metapage gets to the next splitpoint.
pub const XLH_SPLIT_META_UPDATE_SPLITPOINT: u8 = 1 << 1;

/// Main data of `INIT_META_PAGE` (`xl_hash_init_meta_page`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InitMetaPage {
    /// How many tuples are expected.
    pub num_tuples: f64,
    /// The hash function.
    pub procid: Oid,
    /// Tuples per bucket that are aimed at.
    pub ffactor: u16,
}

impl InitMetaPage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<InitMetaPage> {
        let mut reader = Reader::new(main_data);
        Some(InitMetaPage { num_tuples: f64::from_bits(reader.u64()?), procid: reader.u32()?, ffactor: reader.u16()? })
    }
}

/// Main data of `INIT_BITMAP_PAGE` (`xl_hash_init_bitmap_page`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitBitmapPage {
    /// Bytes of the bitmap.
    pub bmsize: u16,
}

impl InitBitmapPage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<InitBitmapPage> {
        Some(InitBitmapPage { bmsize: Reader::new(main_data).u16()? })
    }
}

/// Main data of `INSERT` (`xl_hash_insert`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insert {
    /// Line pointer of the new tuple.
    pub offset: OffsetNumber,
}

impl Insert {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Insert> {
        Some(Insert { offset: Reader::new(main_data).u16()? })
    }
}

/// Main data of `ADD_OVFL_PAGE` (`xl_hash_add_ovfl_page`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddOvflPage {
    /// Bytes of the bitmap on a bitmap page.
    pub bmsize: u16,
    /// The page had been free before: its bit was found on a bitmap page.
    pub bmpage_found: bool,
}

impl AddOvflPage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<AddOvflPage> {
        let mut reader = Reader::new(main_data);
        Some(AddOvflPage { bmsize: reader.u16()?, bmpage_found: reader.bool()? })
    }
}

/// Main data of `SPLIT_ALLOCATE_PAGE` (`xl_hash_split_allocate_page`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitAllocatePage {
    /// The new bucket, from now on the last one.
    pub new_bucket: u32,
    /// What the old bucket's flags become.
    pub old_bucket_flag: u16,
    /// What the new bucket's flags are.
    pub new_bucket_flag: u16,
    /// `XLH_SPLIT_…`
    pub flags: u8,
}

impl SplitAllocatePage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<SplitAllocatePage> {
        let mut reader = Reader::new(main_data);
        Some(SplitAllocatePage {
            new_bucket: reader.u32()?,
            old_bucket_flag: reader.u16()?,
            new_bucket_flag: reader.u16()?,
            flags: reader.u8()?,
        })
    }
}

/// Main data of `SPLIT_COMPLETE` (`xl_hash_split_complete`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitComplete {
    /// What the old bucket's flags become.
    pub old_bucket_flag: u16,
    /// What the new bucket's flags become.
    pub new_bucket_flag: u16,
}

impl SplitComplete {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<SplitComplete> {
        let mut reader = Reader::new(main_data);
        Some(SplitComplete { old_bucket_flag: reader.u16()?, new_bucket_flag: reader.u16()? })
    }
}

/// Main data of `MOVE_PAGE_CONTENTS` (`xl_hash_move_page_contents`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovePageContents {
    /// How many tuples are moved.
    pub ntups: u16,
    /// They go to the bucket's first page.
    pub is_prim_bucket_same_wrt: bool,
}

impl MovePageContents {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<MovePageContents> {
        let mut reader = Reader::new(main_data);
        Some(MovePageContents { ntups: reader.u16()?, is_prim_bucket_same_wrt: reader.bool()? })
    }
}

/// Main data of `SQUEEZE_PAGE` (`xl_hash_squeeze_page`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SqueezePage {
    /// The page before the freed one.
    pub prevblkno: BlockNumber,
    /// The page behind it.
    pub nextblkno: BlockNumber,
    /// How many tuples are moved.
    pub ntups: u16,
    /// They go to the bucket's first page.
    pub is_prim_bucket_same_wrt: bool,
    /// They go to the page before the freed one.
    pub is_prev_bucket_same_wrt: bool,
}

impl SqueezePage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<SqueezePage> {
        let mut reader = Reader::new(main_data);
        Some(SqueezePage {
            prevblkno: reader.u32()?,
            nextblkno: reader.u32()?,
            ntups: reader.u16()?,
            is_prim_bucket_same_wrt: reader.bool()?,
            is_prev_bucket_same_wrt: reader.bool()?,
        })
    }
}

/// Main data of `DELETE` (`xl_hash_delete`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delete {
    /// The page has no dead tuples any more.
    pub clear_dead_marking: bool,
    /// The page is the bucket's first.
    pub is_primary_bucket_page: bool,
}

impl Delete {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Delete> {
        let mut reader = Reader::new(main_data);
        Some(Delete { clear_dead_marking: reader.bool()?, is_primary_bucket_page: reader.bool()? })
    }
}

/// Main data of `UPDATE_META_PAGE` (`xl_hash_update_meta_page`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateMetaPage {
    /// How many tuples the index has.
    pub ntuples: f64,
}

impl UpdateMetaPage {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<UpdateMetaPage> {
        Some(UpdateMetaPage { ntuples: f64::from_bits(Reader::new(main_data).u64()?) })
    }
}

/// Main data of `VACUUM_ONE_PAGE` (`xl_hash_vacuum_one_page`).
#[derive(Clone, Copy, Debug)]
pub struct VacuumOnePage<'a> {
    /// Newest transaction whose removal these tuples show.
    pub snapshot_conflict_horizon: TransactionId,
    /// How many tuples go.
    pub ntuples: u16,
    /// The index belongs to a catalog.
    pub is_catalog_rel: bool,
    offsets: &'a [u8],
}

impl<'a> VacuumOnePage<'a> {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<VacuumOnePage<'a>> {
        let mut reader = Reader::new(main_data);
        let snapshot_conflict_horizon = reader.u32()?;
        let (ntuples, is_catalog_rel) = (reader.u16()?, reader.bool()?);
        reader.take(1)?;
        Some(VacuumOnePage { snapshot_conflict_horizon, ntuples, is_catalog_rel, offsets: reader.rest() })
    }

    /// The line pointers of tuples that go; `None` if the record has fewer.
    pub fn offsets(&self) -> Option<Items<'a, OffsetNumber>> {
        Items::take(&mut Reader::new(self.offsets), self.ntuples.into())
    }
}

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
    let _ = try_describe(record.info(), record.main_data, out);
}

fn try_describe(info: u8, data: &[u8], out: &mut String) -> Option<()> {
    let _ = match info {
        XLOG_HASH_INIT_META_PAGE => {
            let InitMetaPage { num_tuples, ffactor, .. } = InitMetaPage::parse(data)?;
            write!(out, "num_tuples {}, fillfactor {ffactor}", General(num_tuples))
        }
        XLOG_HASH_INIT_BITMAP_PAGE => write!(out, "bmsize {}", InitBitmapPage::parse(data)?.bmsize),
        XLOG_HASH_INSERT => write!(out, "off {}", Insert::parse(data)?.offset),
        XLOG_HASH_ADD_OVFL_PAGE => {
            let AddOvflPage { bmsize, bmpage_found } = AddOvflPage::parse(data)?;
            write!(out, "bmsize {bmsize}, bmpage_found {}", true_false(bmpage_found))
        }
        XLOG_HASH_SPLIT_ALLOCATE_PAGE => {
            let SplitAllocatePage { new_bucket, flags, .. } = SplitAllocatePage::parse(data)?;
            let masks = true_false(flags & XLH_SPLIT_META_UPDATE_MASKS != 0);
            let splitpoint = true_false(flags & XLH_SPLIT_META_UPDATE_SPLITPOINT != 0);
            write!(out, "new_bucket {new_bucket}, meta_page_masks_updated {masks}, issplitpoint_changed {splitpoint}")
        }
        XLOG_HASH_SPLIT_COMPLETE => {
            let SplitComplete { old_bucket_flag, new_bucket_flag } = SplitComplete::parse(data)?;
            write!(out, "old_bucket_flag {old_bucket_flag}, new_bucket_flag {new_bucket_flag}")
        }
        XLOG_HASH_MOVE_PAGE_CONTENTS => {
            let MovePageContents { ntups, is_prim_bucket_same_wrt } = MovePageContents::parse(data)?;
            write!(out, "ntups {ntups}, is_primary {}", true_false(is_prim_bucket_same_wrt))
        }
        XLOG_HASH_SQUEEZE_PAGE => {
            let SqueezePage { prevblkno, nextblkno, ntups, is_prim_bucket_same_wrt, .. } = SqueezePage::parse(data)?;
            let primary = true_false(is_prim_bucket_same_wrt);
            write!(out, "prevblkno {prevblkno}, nextblkno {nextblkno}, ntups {ntups}, is_primary {primary}")
        }
        XLOG_HASH_DELETE => {
            let delete = Delete::parse(data)?;
            let (clear, primary) = (delete.clear_dead_marking, delete.is_primary_bucket_page);
            write!(out, "clear_dead_marking {}, is_primary {}", true_false(clear), true_false(primary))
        }
        XLOG_HASH_UPDATE_META_PAGE => write!(out, "ntuples {}", General(UpdateMetaPage::parse(data)?.ntuples)),
        XLOG_HASH_VACUUM_ONE_PAGE => {
            let VacuumOnePage { snapshot_conflict_horizon: horizon, ntuples, is_catalog_rel, .. } =
                VacuumOnePage::parse(data)?;
            let catalog = true_false(is_catalog_rel);
            write!(out, "ntuples {ntuples}, snapshotConflictHorizon {horizon}, isCatalogRel {catalog}")
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
