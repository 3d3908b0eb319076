//! Where replay stops: recovery targets (`recoveryStopsBefore`, `recoveryStopsAfter` in
//! `access/transam/xlogrecovery.c`, PostgreSQL 18).

use walrider_datadir::recovery_settings::RecoveryTarget::{self, Name, Time, Xid};
use walrider_layout::Lsn;
use walrider_wal::record::Record;
use walrider_wal::records::{xact, xlog};
use walrider_wal::rmgr::RmgrId;

/// A recovery target with `recovery_target_inclusive`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryStop {
    /// The target; none means all WAL that there is.
    pub target: Option<RecoveryTarget>,
    /// The record that is the target is replayed, too. Means nothing for some targets, as in PostgreSQL.
    pub inclusive: bool,
}

impl RecoveryStop {
    /// Everything.
    pub fn end_of_wal() -> RecoveryStop {
        RecoveryStop { target: None, inclusive: true }
    }

    /// First LSN whose record stops replay for its position alone; with it whether the record is still replayed.
    pub fn lsn_limit(&self) -> Option<(Lsn, bool)> {
        match self.target {
            Some(RecoveryTarget::Lsn(lsn)) => Some((lsn, self.inclusive)),
            _ => None,
        }
    }

    /// Whether replay stops before this record, which is one of those that are replayed in order.
    pub fn stops_before(&self, record: &Record<'_>) -> bool {
        match self.target {
            Some(Xid(xid)) if !self.inclusive => transaction_end(record).is_some_and(|end| end.0 == xid),
            Some(Time(time)) => {
                transaction_end(record).is_some_and(|end| end.1 > time.0 || (!self.inclusive && end.1 == time.0))
            }
            _ => false,
        }
    }

    /// Whether replay stops after this record, which is one of those that are replayed in order.
    pub fn stops_after(&self, record: &Record<'_>) -> bool {
        match &self.target {
            Some(Name(name)) => restore_point_name(record).is_some_and(|found| found == name.as_bytes()),
            Some(Xid(xid)) if self.inclusive => transaction_end(record).is_some_and(|end| end.0 == *xid),
            _ => false,
        }
    }
}

/// The transaction that a record ends, prepared ones included, and when (`recoveryStopsBefore`).
fn transaction_end(record: &Record<'_>) -> Option<(u32, i64)> {
    if record.header.rmgr == RmgrId::XACT { xact::transaction_end(record) } else { None }
}

fn restore_point_name<'a>(record: &Record<'a>) -> Option<&'a [u8]> {
    if record.header.rmgr != RmgrId::XLOG || record.info() != xlog::XLOG_RESTORE_POINT {
        return None;
    }
    xlog::RestorePoint::parse(record.main_data).map(|point| point.name)
}
