//! Records for hot standbys (`storage/standbydefs.h`, `storage/lockdefs.h`, `access/rmgrdesc/standbydesc.c`,
//! PostgreSQL 18). Offline replay has no use for them.

use std::fmt::Write as _;

use walrider_layout::bytes::{Reader, u32_at};
use walrider_layout::{Oid, TransactionId};

use super::parts::{Invalidation, Item, Items, describe_invalidations};
use crate::record::Record;

/// Record type: tables are locked exclusively.
pub const XLOG_STANDBY_LOCK: u8 = 0x00;
/// Record type: which transactions are running.
pub const XLOG_RUNNING_XACTS: u8 = 0x10;
/// Record type: caches are out of date.
pub const XLOG_INVALIDATIONS: u8 = 0x20;

/// A table locked exclusively (`xl_standby_lock`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Who holds the lock.
    pub xid: TransactionId,
    /// `dbOid`.
    pub database: Oid,
    /// `relOid`: the table's oid, not its file number.
    pub relation: Oid,
}

impl Item for Lock {
    const SIZE: usize = 12;

    fn read(bytes: &[u8]) -> Lock {
        Lock { xid: u32_at(bytes, 0), database: u32_at(bytes, 4), relation: u32_at(bytes, 8) }
    }
}

/// Reads the main data of [`XLOG_STANDBY_LOCK`] (`xl_standby_locks`); `None` if it is too short.
pub fn parse_locks(main_data: &[u8]) -> Option<Items<'_, Lock>> {
    let mut reader = Reader::new(main_data);
    let count = reader.i32()?;
    Items::take(&mut reader, count)
}

/// The data of [`XLOG_RUNNING_XACTS`] (`xl_running_xacts`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningXacts<'a> {
    /// `subxid_overflow`: subtransactions are missing from `subxids`.
    pub subxid_overflow: bool,
    /// `nextXid`.
    pub next_xid: TransactionId,
    /// `oldestRunningXid`.
    pub oldest_running_xid: TransactionId,
    /// `latestCompletedXid`.
    pub latest_completed_xid: TransactionId,
    /// The first `xcnt` of `xids`: transactions.
    pub xids: Items<'a, TransactionId>,
    /// The other `subxcnt` of `xids`: subtransactions.
    pub subxids: Items<'a, TransactionId>,
}

impl<'a> RunningXacts<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<RunningXacts<'a>> {
        let mut reader = Reader::new(main_data);
        let (xids, subxids) = (reader.i32()?, reader.i32()?);
        let subxid_overflow = reader.bool()?;
        reader.take(3)?;
        Some(RunningXacts {
            subxid_overflow,
            next_xid: reader.u32()?,
            oldest_running_xid: reader.u32()?,
            latest_completed_xid: reader.u32()?,
            xids: Items::take(&mut reader, xids)?,
            subxids: Items::take(&mut reader, subxids)?,
        })
    }
}

/// The data of [`XLOG_INVALIDATIONS`] (`xl_invalidations`), and the greater part of heap's INPLACE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidations<'a> {
    /// `dbId`.
    pub database: Oid,
    /// `tsId`.
    pub tablespace: Oid,
    /// `relcacheInitFileInval`.
    pub relcache_init_file: bool,
    /// The messages.
    pub messages: Items<'a, Invalidation>,
}

impl<'a> Invalidations<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<Invalidations<'a>> {
        let mut reader = Reader::new(main_data);
        let (database, tablespace) = (reader.u32()?, reader.u32()?);
        let relcache_init_file = reader.bool()?;
        reader.take(3)?;
        let count = reader.i32()?;
        let messages = Items::take(&mut reader, count)?;
        Some(Invalidations { database, tablespace, relcache_init_file, messages })
    }

    /// Appends what they say.
    pub(super) fn describe(&self, out: &mut String) {
        describe_invalidations(&self.messages, self.database, self.tablespace, self.relcache_init_file, out);
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_STANDBY_LOCK => Some("LOCK"),
        XLOG_RUNNING_XACTS => Some("RUNNING_XACTS"),
        XLOG_INVALIDATIONS => Some("INVALIDATIONS"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        XLOG_STANDBY_LOCK => {
            for Lock { xid, database, relation } in parse_locks(record.main_data).unwrap_or_default().iter() {
                let _ = write!(out, "xid {xid} db {database} rel {relation} ");
            }
        }
        XLOG_RUNNING_XACTS => {
            if let Some(running) = RunningXacts::parse(record.main_data) {
                describe_running(&running, out);
            }
        }
        XLOG_INVALIDATIONS => {
            if let Some(inval) = Invalidations::parse(record.main_data) {
                inval.describe(out);
            }
        }
        _ => {}
    }
}

fn describe_running(running: &RunningXacts<'_>, out: &mut String) {
    let RunningXacts { next_xid, oldest_running_xid, latest_completed_xid, xids, subxids, .. } = running;
    let _ = write!(
        out,
        "nextXid {next_xid} latestCompletedXid {latest_completed_xid} oldestRunningXid {oldest_running_xid}"
    );
    let list = |what: &str, xids: &Items<'_, TransactionId>, out: &mut String| {
        if !xids.is_empty() {
            let _ = write!(out, "; {} {what}:", xids.len());
            xids.iter().for_each(|xid| {
                let _ = write!(out, " {xid}");
            });
        }
    };
    list("xacts", xids, out);
    if running.subxid_overflow {
        out.push_str("; subxid overflowed");
    }
    list("subxacts", subxids, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u32]| described(RmgrId::STANDBY, info, &words(data.iter().copied()));
        assert_eq!(
            described(XLOG_STANDBY_LOCK, &[2, 740, 5, 1259, 741, 5, 1249]),
            "xid 740 db 5 rel 1259 xid 741 db 5 rel 1249 "
        );
        assert_eq!(
            described(XLOG_RUNNING_XACTS, &[0, 0, 0, 742, 742, 741]),
            "nextXid 742 latestCompletedXid 741 oldestRunningXid 742"
        );
        assert_eq!(
            described(XLOG_RUNNING_XACTS, &[1, 2, 1, 742, 739, 741, 739, 740, 738]),
            "nextXid 742 latestCompletedXid 741 oldestRunningXid 739; 1 xacts: 739; subxid overflowed; \
             2 subxacts: 740 738"
        );
        assert_eq!(
            described(XLOG_INVALIDATIONS, &[5, 1663, 1, 2, 55, 5, 1, 0, 0xFE, 5, 1259, 0]),
            "; relcache init file inval dbid 5 tsid 1663; inval msgs: catcache 55 relcache 1259"
        );
    }
}
