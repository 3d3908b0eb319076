//! Where replay stops: recovery targets (`recoveryStopsBefore`, `recoveryStopsAfter` in
//! `access/transam/xlogrecovery.c`, PostgreSQL 18).

use walrider_layout::{Lsn, TransactionId};
use walrider_wal::record::Record;
use walrider_wal::records::{xact, xlog};
use walrider_wal::rmgr::RmgrId;

/// A recovery target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Goal {
    /// All WAL that there is.
    EndOfWal,
    /// `recovery_target = 'immediate'`: as soon as the directory is consistent.
    Immediate,
    /// `recovery_target_lsn`.
    Lsn(Lsn),
    /// `recovery_target_xid`.
    Xid(TransactionId),
    /// `recovery_target_time`, in microseconds since 2000-01-01 UTC.
    Time(i64),
    /// `recovery_target_name`.
    Name(String),
}

/// A recovery target with `recovery_target_inclusive`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryTarget {
    /// The target.
    pub goal: Goal,
    /// The record that is the target is replayed, too. Means nothing for some targets, as in PostgreSQL.
    pub inclusive: bool,
}

impl RecoveryTarget {
    /// Everything.
    pub fn end_of_wal() -> RecoveryTarget {
        RecoveryTarget { goal: Goal::EndOfWal, inclusive: true }
    }

    /// First LSN whose record stops replay for its position alone; with it whether the record is still replayed.
    pub fn lsn_limit(&self) -> Option<(Lsn, bool)> {
        match self.goal {
            Goal::Lsn(lsn) => Some((lsn, self.inclusive)),
            _ => None,
        }
    }

    /// Whether replay stops before this record, which is one of those that are replayed in order.
    pub fn stops_before(&self, record: &Record<'_>) -> bool {
        let Some(end) = transaction_end(record) else { return false };
        match self.goal {
            Goal::Xid(xid) => !self.inclusive && end.xid == xid,
            Goal::Time(time) if self.inclusive => end.time > time,
            Goal::Time(time) => end.time >= time,
            _ => false,
        }
    }

    /// Whether replay stops after this record, which is one of those that are replayed in order.
    pub fn stops_after(&self, record: &Record<'_>) -> bool {
        match &self.goal {
            Goal::Name(name) => restore_point_name(record).is_some_and(|found| found == name.as_bytes()),
            Goal::Xid(xid) => self.inclusive && transaction_end(record).is_some_and(|end| end.xid == *xid),
            _ => false,
        }
    }

    /// The setting as it stands in `postgresql.conf`, for messages.
    pub fn describe(&self) -> String {
        match &self.goal {
            Goal::EndOfWal => "the end of WAL".into(),
            Goal::Immediate => "recovery_target = 'immediate'".into(),
            Goal::Lsn(lsn) => format!("recovery_target_lsn = '{lsn}'"),
            Goal::Xid(xid) => format!("recovery_target_xid = '{xid}'"),
            Goal::Time(_) => "recovery_target_time".into(),
            Goal::Name(name) => format!("recovery_target_name = '{name}'"),
        }
    }
}

struct TransactionEnd {
    xid: TransactionId,
    time: i64,
}

/// The end of a transaction, prepared ones included (`getRecordTimestamp`, `recoveryStopsBefore`).
fn transaction_end(record: &Record<'_>) -> Option<TransactionEnd> {
    if record.header.rmgr != RmgrId::XACT {
        return None;
    }
    xact::transaction_end(record).map(|(xid, time)| TransactionEnd { xid, time })
}

fn restore_point_name<'a>(record: &Record<'a>) -> Option<&'a [u8]> {
    if record.header.rmgr != RmgrId::XLOG || record.info() != xlog::XLOG_RESTORE_POINT {
        return None;
    }
    xlog::RestorePoint::parse(record.main_data).map(|point| point.name)
}
