//! Records of the heap: what `access/heapam_xlog.h` lays out for `RM_HEAP_ID`, and its description
//! (`access/rmgrdesc/heapdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::{Reader, u16_at, u32_at};
use walrider_layout::{Major, OffsetNumber, Oid, TransactionId};

use super::standby::Invalidations;
use crate::record::Record;

/// Record type: a tuple inserted.
pub const XLOG_HEAP_INSERT: u8 = 0x00;
/// Record type: a tuple deleted.
pub const XLOG_HEAP_DELETE: u8 = 0x10;
/// Record type: a tuple updated; the new version needs index entries.
pub const XLOG_HEAP_UPDATE: u8 = 0x20;
/// Record type: TRUNCATE, for logical decoding only.
pub const XLOG_HEAP_TRUNCATE: u8 = 0x30;
/// Record type: a tuple updated within its page, without index entries.
pub const XLOG_HEAP_HOT_UPDATE: u8 = 0x40;
/// Record type: a speculative insertion confirmed.
pub const XLOG_HEAP_CONFIRM: u8 = 0x50;
/// Record type: a tuple locked.
pub const XLOG_HEAP_LOCK: u8 = 0x60;
/// Record type: a tuple overwritten in place.
pub const XLOG_HEAP_INPLACE: u8 = 0x70;

/// The bits of the record type, in both heap resource managers.
pub const XLOG_HEAP_OPMASK: u8 = 0x70;
/// With INSERT, UPDATE, HOT_UPDATE and MULTI_INSERT: the page is initialised.
pub const XLOG_HEAP_INIT_PAGE: u8 = 0x80;

/// INSERT, MULTI_INSERT: `PD_ALL_VISIBLE` was cleared.
pub const XLH_INSERT_ALL_VISIBLE_CLEARED: u8 = 1 << 0;
/// MULTI_INSERT: every tuple is frozen, and so visible to all.
pub const XLH_INSERT_ALL_FROZEN_SET: u8 = 1 << 5;

/// UPDATE: `PD_ALL_VISIBLE` was cleared on the old page.
pub const XLH_UPDATE_OLD_ALL_VISIBLE_CLEARED: u8 = 1 << 0;
/// UPDATE: `PD_ALL_VISIBLE` was cleared on the new page.
pub const XLH_UPDATE_NEW_ALL_VISIBLE_CLEARED: u8 = 1 << 1;
/// UPDATE: the new tuple begins with bytes of the old one.
pub const XLH_UPDATE_PREFIX_FROM_OLD: u8 = 1 << 5;
/// UPDATE: the new tuple ends with bytes of the old one.
pub const XLH_UPDATE_SUFFIX_FROM_OLD: u8 = 1 << 6;

/// DELETE: `PD_ALL_VISIBLE` was cleared.
pub const XLH_DELETE_ALL_VISIBLE_CLEARED: u8 = 1 << 0;
/// DELETE: a speculative insertion is taken back.
pub const XLH_DELETE_IS_SUPER: u8 = 1 << 3;
/// DELETE: the row moved to another partition.
pub const XLH_DELETE_IS_PARTITION_MOVE: u8 = 1 << 4;

/// LOCK, LOCK_UPDATED: the all-frozen bit was cleared.
pub const XLH_LOCK_ALL_FROZEN_CLEARED: u8 = 1 << 0;

/// `infobits_set`: xmax is a multixact.
pub const XLHL_XMAX_IS_MULTI: u8 = 0x01;
/// `infobits_set`: xmax only locks.
pub const XLHL_XMAX_LOCK_ONLY: u8 = 0x02;
/// `infobits_set`: xmax locks exclusively.
pub const XLHL_XMAX_EXCL_LOCK: u8 = 0x04;
/// `infobits_set`: xmax locks the key, shared.
pub const XLHL_XMAX_KEYSHR_LOCK: u8 = 0x08;
/// `infobits_set`: key columns were changed, or the tuple was deleted.
pub const XLHL_KEYS_UPDATED: u8 = 0x10;

/// Block reference of the heap page in INSERT, MULTI_INSERT, DELETE, LOCK, LOCK_UPDATED, CONFIRM, INPLACE and PRUNE
/// (`HEAP_…_BLKREF_HEAP`).
pub const BLKREF_HEAP: u8 = 0;
/// Block reference of the visibility map page in INSERT, MULTI_INSERT, DELETE, LOCK and LOCK_UPDATED
/// (`HEAP_…_BLKREF_VM`).
pub const BLKREF_VM: u8 = 1;
/// UPDATE: the page of the new tuple (`HEAP_UPDATE_BLKREF_HEAP_NEW`).
pub const UPDATE_BLKREF_HEAP_NEW: u8 = 0;
/// UPDATE: the page of the old tuple, where that is another (`HEAP_UPDATE_BLKREF_HEAP_OLD`).
pub const UPDATE_BLKREF_HEAP_OLD: u8 = 1;
/// UPDATE: the visibility map page of the new page (`HEAP_UPDATE_BLKREF_VM_NEW`).
pub const UPDATE_BLKREF_VM_NEW: u8 = 2;
/// UPDATE: the visibility map page of the old page (`HEAP_UPDATE_BLKREF_VM_OLD`).
pub const UPDATE_BLKREF_VM_OLD: u8 = 3;

/// What INSERT says (`xl_heap_insert`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insert {
    /// Line pointer of the new tuple.
    pub number: OffsetNumber,
    /// `XLH_INSERT_…`.
    pub flags: u8,
}

impl Insert {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &[u8]) -> Option<Insert> {
        let main: &[u8; 3] = main.first_chunk()?;
        Some(Insert { number: u16_at(main, 0), flags: main[2] })
    }
}

/// What DELETE says (`xl_heap_delete`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delete {
    /// The new xmax.
    pub xmax: TransactionId,
    /// Line pointer of the tuple.
    pub number: OffsetNumber,
    /// `XLHL_…`.
    pub infobits: u8,
    /// `XLH_DELETE_…`.
    pub flags: u8,
}

impl Delete {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &[u8]) -> Option<Delete> {
        let main: &[u8; 8] = main.first_chunk()?;
        Some(Delete { xmax: u32_at(main, 0), number: u16_at(main, 4), infobits: main[6], flags: main[7] })
    }
}

/// What UPDATE and HOT_UPDATE say (`xl_heap_update`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// The old tuple's new xmax.
    pub old_xmax: TransactionId,
    /// Line pointer of the old tuple.
    pub old_number: OffsetNumber,
    /// `XLHL_…`, for the old tuple.
    pub old_infobits: u8,
    /// `XLH_UPDATE_…`.
    pub flags: u8,
    /// The new tuple's xmax.
    pub new_xmax: TransactionId,
    /// Line pointer of the new tuple.
    pub new_number: OffsetNumber,
}

impl Update {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &[u8]) -> Option<Update> {
        let main: &[u8; 14] = main.first_chunk()?;
        Some(Update {
            old_xmax: u32_at(main, 0),
            old_number: u16_at(main, 4),
            old_infobits: main[6],
            flags: main[7],
            new_xmax: u32_at(main, 8),
            new_number: u16_at(main, 12),
        })
    }
}

/// What LOCK and LOCK_UPDATED say (`xl_heap_lock`, `xl_heap_lock_updated`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The new xmax, which may be a multixact.
    pub xmax: TransactionId,
    /// Line pointer of the tuple.
    pub number: OffsetNumber,
    /// `XLHL_…`.
    pub infobits: u8,
    /// `XLH_LOCK_…`.
    pub flags: u8,
}

impl Lock {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &[u8]) -> Option<Lock> {
        let main: &[u8; 8] = main.first_chunk()?;
        Some(Lock { xmax: u32_at(main, 0), number: u16_at(main, 4), infobits: main[6], flags: main[7] })
    }

    /// Appends the description.
    pub(super) fn describe(&self, out: &mut String) {
        let _ = write!(out, "xmax: {}, off: {}, ", self.xmax, self.number);
        describe_infobits(self.infobits, "infobits", out);
        let _ = write!(out, ", flags: 0x{:02X}", self.flags);
    }
}

/// What CONFIRM says (`xl_heap_confirm`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirm {
    /// Line pointer of the tuple.
    pub number: OffsetNumber,
}

impl Confirm {
    /// Reads the main data; `None` if it is too short.
    pub fn parse(main: &[u8]) -> Option<Confirm> {
        Some(Confirm { number: Reader::new(main).u16()? })
    }
}

/// What INPLACE says (`xl_heap_inplace`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inplace<'a> {
    /// Line pointer of the tuple.
    pub number: OffsetNumber,
    /// What becomes invalid. Nothing before 18, where the commit record says it.
    pub invalidations: Option<Invalidations<'a>>,
}

impl<'a> Inplace<'a> {
    /// Reads the main data; `None` if it is too short.
    pub fn parse(major: Major, main: &'a [u8]) -> Option<Inplace<'a>> {
        let mut reader = Reader::new(main);
        let number = reader.u16()?;
        let mut invalidations = None;
        if major.format().inplace_has_invalidations {
            reader.take(2)?;
            invalidations = Some(Invalidations::parse(reader.rest())?);
        }
        Some(Inplace { number, invalidations })
    }
}

/// What TRUNCATE says (`xl_heap_truncate`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate<'a> {
    /// The database.
    pub database: Oid,
    /// 1 cascade, 2 restart sequences.
    pub flags: u8,
    /// The tables' object identifiers, four bytes each.
    pub relids: &'a [[u8; 4]],
}

impl<'a> Truncate<'a> {
    /// Reads the main data; `None` if it is too short.
    pub fn parse(main: &'a [u8]) -> Option<Truncate<'a>> {
        let (fixed, rest) = main.split_first_chunk::<12>()?;
        let count = usize::try_from(u32_at(fixed, 4)).ok()?;
        Some(Truncate { database: u32_at(fixed, 0), flags: fixed[8], relids: rest.as_chunks().0.get(..count)? })
    }
}

/// The part of a tuple's header that records carry (`xl_heap_header`); it stands before the tuple's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapHeader {
    /// `t_infomask2`.
    pub infomask2: u16,
    /// `t_infomask`.
    pub infomask: u16,
    /// `t_hoff`: bytes from the beginning of the tuple to its data.
    pub hoff: u8,
}

impl HeapHeader {
    /// Splits off the header at the front of `bytes`; `None` if they are too few.
    #[inline]
    pub fn split(bytes: &[u8]) -> Option<(HeapHeader, &[u8])> {
        let (fixed, rest) = bytes.split_first_chunk::<5>()?;
        Some((HeapHeader { infomask2: u16_at(fixed, 0), infomask: u16_at(fixed, 2), hoff: fixed[4] }, rest))
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    Some(match info & 0xF0 {
        XLOG_HEAP_INSERT => "INSERT",
        0x80 => "INSERT+INIT",
        XLOG_HEAP_DELETE => "DELETE",
        XLOG_HEAP_UPDATE => "UPDATE",
        0xA0 => "UPDATE+INIT",
        XLOG_HEAP_HOT_UPDATE => "HOT_UPDATE",
        0xC0 => "HOT_UPDATE+INIT",
        XLOG_HEAP_TRUNCATE => "TRUNCATE",
        XLOG_HEAP_CONFIRM => "HEAP_CONFIRM",
        XLOG_HEAP_LOCK => "LOCK",
        XLOG_HEAP_INPLACE => "INPLACE",
        _ => return None,
    })
}

/// Appends what the record says (`heap_desc`).
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record, out);
}

fn try_describe(record: &Record<'_>, out: &mut String) -> Option<()> {
    let main = record.main_data;
    // Writing to a string cannot fail.
    match record.info() & XLOG_HEAP_OPMASK {
        XLOG_HEAP_INSERT => {
            let insert = Insert::parse(main)?;
            let _ = write!(out, "off: {}, flags: 0x{:02X}", insert.number, insert.flags);
        }
        XLOG_HEAP_DELETE => {
            let delete = Delete::parse(main)?;
            let _ = write!(out, "xmax: {}, off: {}, ", delete.xmax, delete.number);
            describe_infobits(delete.infobits, "infobits", out);
            let _ = write!(out, ", flags: 0x{:02X}", delete.flags);
        }
        XLOG_HEAP_UPDATE | XLOG_HEAP_HOT_UPDATE => {
            let update = Update::parse(main)?;
            let _ = write!(out, "old_xmax: {}, old_off: {}, ", update.old_xmax, update.old_number);
            describe_infobits(update.old_infobits, "old_infobits", out);
            let Update { flags, new_xmax, new_number, .. } = update;
            let _ = write!(out, ", flags: 0x{flags:02X}, new_xmax: {new_xmax}, new_off: {new_number}");
        }
        XLOG_HEAP_TRUNCATE => {
            let truncate = Truncate::parse(main)?;
            let names = [(1, "CASCADE"), (2, "RESTART_SEQS")];
            describe_flags(truncate.flags, &names, "flags", out);
            let _ = write!(out, ", nrelids: {}, relids:", truncate.relids.len());
            describe_array(truncate.relids, out, |relid, out| {
                let _ = write!(out, "{}", u32::from_le_bytes(*relid));
            });
        }
        XLOG_HEAP_CONFIRM => {
            let _ = write!(out, "off: {}", Confirm::parse(main)?.number);
        }
        XLOG_HEAP_LOCK => Lock::parse(main)?.describe(out),
        XLOG_HEAP_INPLACE => {
            let inplace = Inplace::parse(record.major, main)?;
            let _ = write!(out, "off: {}", inplace.number);
            if let Some(invalidations) = inplace.invalidations {
                invalidations.describe(out);
            }
        }
        _ => {}
    }
    Some(())
}

fn describe_infobits(infobits: u8, name: &str, out: &mut String) {
    let names = [
        (XLHL_XMAX_IS_MULTI, "IS_MULTI"),
        (XLHL_XMAX_LOCK_ONLY, "LOCK_ONLY"),
        (XLHL_XMAX_EXCL_LOCK, "EXCL_LOCK"),
        (XLHL_XMAX_KEYSHR_LOCK, "KEYSHR_LOCK"),
        (XLHL_KEYS_UPDATED, "KEYS_UPDATED"),
    ];
    describe_flags(infobits, &names, name, out);
}

fn describe_flags(flags: u8, names: &[(u8, &str)], name: &str, out: &mut String) {
    let _ = write!(out, "{name}: [");
    let mut separator = "";
    for (_, flag) in names.iter().filter(|(bit, _)| flags & bit != 0) {
        let _ = write!(out, "{separator}{flag}");
        separator = ", ";
    }
    out.push(']');
}

/// Appends a list as ` [a, b]` (`array_desc`, `access/rmgrdesc/rmgrdesc_utils.c`).
pub(super) fn describe_array<T>(items: &[T], out: &mut String, mut describe_item: impl FnMut(&T, &mut String)) {
    out.push_str(" [");
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        describe_item(item, out);
    }
    out.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::RecordBuilder;
    use walrider_layout::Lsn;

    fn described_as(major: Major, info: u8, main: &[u8]) -> String {
        let bytes = RecordBuilder::new(RmgrId::HEAP, info).main_data(main).build();
        let mut out = String::new();
        describe(&RecordBuilder::parse_as(major, &bytes, Lsn(40)), &mut out);
        out
    }

    fn described(info: u8, main: &[u8]) -> String {
        described_as(Major::V18, info, main)
    }

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        assert_eq!(described(0x80, &[3, 0, 8]), "off: 3, flags: 0x08");
        assert_eq!(
            described(XLOG_HEAP_DELETE, &[0xE7, 2, 0, 0, 9, 0, 0x10, 1]),
            "xmax: 743, off: 9, infobits: [KEYS_UPDATED], flags: 0x01"
        );
        assert_eq!(
            described(XLOG_HEAP_HOT_UPDATE, &[1, 0, 0, 0, 2, 0, 0, 0x60, 3, 0, 0, 0, 4, 0]),
            "old_xmax: 1, old_off: 2, old_infobits: [], flags: 0x60, new_xmax: 3, new_off: 4"
        );
        assert_eq!(
            described(XLOG_HEAP_LOCK, &[1, 0, 0, 0, 2, 0, 0x06, 0]),
            "xmax: 1, off: 2, infobits: [LOCK_ONLY, EXCL_LOCK], flags: 0x00"
        );
        assert_eq!(
            described(XLOG_HEAP_TRUNCATE, &[5, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 2, 1, 0, 0]),
            "flags: [CASCADE], nrelids: 2, relids: [257, 258]"
        );
        let mut inplace = vec![7, 0, 0, 0, 5, 0, 0, 0, 0x7F, 6, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0];
        inplace.extend([55, 0, 0, 0, 5, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0]);
        inplace.extend([0xFE, 0, 0, 0, 5, 0, 0, 0, 0xEB, 4, 0, 0, 0, 0, 0, 0]);
        assert_eq!(
            described(XLOG_HEAP_INPLACE, &inplace),
            "off: 7; relcache init file inval dbid 5 tsid 1663; inval msgs: catcache 55 relcache 1259"
        );
        assert_eq!(described_as(Major::V17, XLOG_HEAP_INPLACE, &[7, 0]), "off: 7");
        assert_eq!(described(XLOG_HEAP_INPLACE, &[7, 0]), "");
    }

    #[test]
    fn short_data_describes_nothing() {
        for info in (0..=0x70).step_by(0x10) {
            assert_eq!(described(info, &[]), "");
            assert_eq!(described(info, &[1]), "");
        }
    }
}
