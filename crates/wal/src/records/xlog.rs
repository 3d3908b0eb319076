//! Records of the WAL itself: checkpoints, settings, images (`catalog/pg_control.h`, `access/xlog_internal.h`,
//! `access/rmgrdesc/xlogdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::control::CheckPoint;
use walrider_layout::{Lsn, Oid, TimelineId};

use super::parts::{Timestamp, c_string, push_text, wal_level_name};
use crate::record::Record;

/// Record type: a checkpoint at shutdown, or at the end of recovery ([`CheckPoint`]).
pub const XLOG_CHECKPOINT_SHUTDOWN: u8 = 0x00;
/// Record type: a checkpoint while running ([`CheckPoint`]).
pub const XLOG_CHECKPOINT_ONLINE: u8 = 0x10;
/// Record type: nothing.
pub const XLOG_NOOP: u8 = 0x20;
/// Record type: oids up to this one may be in use ([`NextOid`]).
pub const XLOG_NEXTOID: u8 = 0x30;
/// Record type: the rest of the segment is not used.
pub const XLOG_SWITCH: u8 = 0x40;
/// Record type: a backup has ended ([`BackupEnd`]).
pub const XLOG_BACKUP_END: u8 = 0x50;
/// Record type: settings that standbys depend on have changed ([`ParameterChange`]).
pub const XLOG_PARAMETER_CHANGE: u8 = 0x60;
/// Record type: a named point to recover to ([`RestorePoint`]).
pub const XLOG_RESTORE_POINT: u8 = 0x70;
/// Record type: `full_page_writes` has changed ([`FpwChange`]).
pub const XLOG_FPW_CHANGE: u8 = 0x80;
/// Record type: recovery has ended ([`EndOfRecovery`]).
pub const XLOG_END_OF_RECOVERY: u8 = 0x90;
/// Record type: an image, because a hint bit changed.
pub const XLOG_FPI_FOR_HINT: u8 = 0xA0;
/// Record type: images.
pub const XLOG_FPI: u8 = 0xB0;
/// Record type: an unfinished record before this one is void ([`OverwriteContrecord`]).
pub const XLOG_OVERWRITE_CONTRECORD: u8 = 0xD0;
/// Record type: redo of a running checkpoint begins here ([`CheckpointRedo`]).
pub const XLOG_CHECKPOINT_REDO: u8 = 0xE0;

/// The data of [`XLOG_NEXTOID`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextOid {
    /// The counter.
    pub next_oid: Oid,
}

impl NextOid {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<NextOid> {
        Some(NextOid { next_oid: Reader::new(main_data).u32()? })
    }
}

/// The data of [`XLOG_BACKUP_END`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupEnd {
    /// Redo position of the checkpoint that the backup began with.
    pub start: Lsn,
}

impl BackupEnd {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<BackupEnd> {
        Some(BackupEnd { start: Lsn(Reader::new(main_data).u64()?) })
    }
}

/// The data of [`XLOG_PARAMETER_CHANGE`] (`xl_parameter_change`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterChange {
    /// `MaxConnections`.
    pub max_connections: u32,
    /// `max_worker_processes`.
    pub max_worker_processes: u32,
    /// `max_wal_senders`.
    pub max_wal_senders: u32,
    /// `max_prepared_xacts`.
    pub max_prepared_xacts: u32,
    /// `max_locks_per_xact`.
    pub max_locks_per_xact: u32,
    /// `wal_level`: 0 minimal, 1 replica, 2 logical.
    pub wal_level: u32,
    /// `wal_log_hints`.
    pub wal_log_hints: bool,
    /// `track_commit_timestamp`.
    pub track_commit_timestamp: bool,
}

impl ParameterChange {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<ParameterChange> {
        let mut reader = Reader::new(main_data);
        Some(ParameterChange {
            max_connections: reader.u32()?,
            max_worker_processes: reader.u32()?,
            max_wal_senders: reader.u32()?,
            max_prepared_xacts: reader.u32()?,
            max_locks_per_xact: reader.u32()?,
            wal_level: reader.u32()?,
            wal_log_hints: reader.bool()?,
            track_commit_timestamp: reader.bool()?,
        })
    }
}

/// The data of [`XLOG_RESTORE_POINT`] (`xl_restore_point`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestorePoint<'a> {
    /// `rp_time`: in microseconds since 2000-01-01 UTC.
    pub time: i64,
    /// `rp_name`, without the zero.
    pub name: &'a [u8],
}

impl<'a> RestorePoint<'a> {
    /// Reads the main data of a record; `None` if it is too short or the name does not end.
    pub fn parse(main_data: &'a [u8]) -> Option<RestorePoint<'a>> {
        let mut reader = Reader::new(main_data);
        Some(RestorePoint { time: reader.i64()?, name: c_string(reader.rest())? })
    }
}

/// The data of [`XLOG_FPW_CHANGE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FpwChange {
    /// `full_page_writes` from here on.
    pub full_page_writes: bool,
}

impl FpwChange {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<FpwChange> {
        Some(FpwChange { full_page_writes: Reader::new(main_data).bool()? })
    }
}

/// The data of [`XLOG_END_OF_RECOVERY`] (`xl_end_of_recovery`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndOfRecovery {
    /// `end_time`: in microseconds since 2000-01-01 UTC.
    pub time: i64,
    /// `ThisTimeLineID`: the timeline that begins.
    pub timeline: TimelineId,
    /// `PrevTimeLineID`: the one that it branched off from.
    pub previous_timeline: TimelineId,
    /// `wal_level`: 0 minimal, 1 replica, 2 logical.
    pub wal_level: u32,
}

impl EndOfRecovery {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<EndOfRecovery> {
        let mut reader = Reader::new(main_data);
        Some(EndOfRecovery {
            time: reader.i64()?,
            timeline: TimelineId(reader.u32()?),
            previous_timeline: TimelineId(reader.u32()?),
            wal_level: reader.u32()?,
        })
    }
}

/// The data of [`XLOG_OVERWRITE_CONTRECORD`] (`xl_overwrite_contrecord`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverwriteContrecord {
    /// `overwritten_lsn`: where the unfinished record begins.
    pub overwritten_lsn: Lsn,
    /// `overwrite_time`: in microseconds since 2000-01-01 UTC.
    pub time: i64,
}

impl OverwriteContrecord {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<OverwriteContrecord> {
        let mut reader = Reader::new(main_data);
        Some(OverwriteContrecord { overwritten_lsn: Lsn(reader.u64()?), time: reader.i64()? })
    }
}

/// The data of [`XLOG_CHECKPOINT_REDO`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointRedo {
    /// `wal_level`: 0 minimal, 1 replica, 2 logical.
    pub wal_level: u32,
}

impl CheckpointRedo {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<CheckpointRedo> {
        Some(CheckpointRedo { wal_level: Reader::new(main_data).u32()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_CHECKPOINT_SHUTDOWN => Some("CHECKPOINT_SHUTDOWN"),
        XLOG_CHECKPOINT_ONLINE => Some("CHECKPOINT_ONLINE"),
        XLOG_NOOP => Some("NOOP"),
        XLOG_NEXTOID => Some("NEXTOID"),
        XLOG_SWITCH => Some("SWITCH"),
        XLOG_BACKUP_END => Some("BACKUP_END"),
        XLOG_PARAMETER_CHANGE => Some("PARAMETER_CHANGE"),
        XLOG_RESTORE_POINT => Some("RESTORE_POINT"),
        XLOG_FPW_CHANGE => Some("FPW_CHANGE"),
        XLOG_END_OF_RECOVERY => Some("END_OF_RECOVERY"),
        XLOG_FPI_FOR_HINT => Some("FPI_FOR_HINT"),
        XLOG_FPI => Some("FPI"),
        XLOG_OVERWRITE_CONTRECORD => Some("OVERWRITE_CONTRECORD"),
        XLOG_CHECKPOINT_REDO => Some("CHECKPOINT_REDO"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    // Nothing is said about data that does not have the shape of its type.
    let _ = try_describe(record, out);
}

fn try_describe(record: &Record<'_>, out: &mut String) -> Option<()> {
    let data = record.main_data;
    let on_off = |on: bool| if on { "on" } else { "off" };
    let _ = match record.info() {
        XLOG_CHECKPOINT_SHUTDOWN => {
            describe_checkpoint(&CheckPoint::parse(data)?, "shutdown", out);
            Ok(())
        }
        XLOG_CHECKPOINT_ONLINE => {
            describe_checkpoint(&CheckPoint::parse(data)?, "online", out);
            Ok(())
        }
        XLOG_NEXTOID => write!(out, "{}", NextOid::parse(data)?.next_oid),
        XLOG_RESTORE_POINT => {
            push_text(RestorePoint::parse(data)?.name, out);
            Ok(())
        }
        XLOG_BACKUP_END => write!(out, "{}", BackupEnd::parse(data)?.start),
        XLOG_PARAMETER_CHANGE => {
            let change = ParameterChange::parse(data)?;
            let ParameterChange { max_connections, max_worker_processes, max_wal_senders, .. } = change;
            write!(
                out,
                "max_connections={max_connections} max_worker_processes={max_worker_processes} \
                 max_wal_senders={max_wal_senders} max_prepared_xacts={} max_locks_per_xact={} wal_level={} \
                 wal_log_hints={} track_commit_timestamp={}",
                change.max_prepared_xacts,
                change.max_locks_per_xact,
                wal_level_name(change.wal_level),
                on_off(change.wal_log_hints),
                on_off(change.track_commit_timestamp)
            )
        }
        XLOG_FPW_CHANGE => write!(out, "{}", FpwChange::parse(data)?.full_page_writes),
        XLOG_END_OF_RECOVERY => {
            let EndOfRecovery { time, timeline, previous_timeline, wal_level } = EndOfRecovery::parse(data)?;
            let (time, wal_level) = (Timestamp(time), wal_level_name(wal_level));
            write!(out, "tli {timeline}; prev tli {previous_timeline}; time {time}; wal_level {wal_level}")
        }
        XLOG_OVERWRITE_CONTRECORD => {
            let OverwriteContrecord { overwritten_lsn, time } = OverwriteContrecord::parse(data)?;
            write!(out, "lsn {overwritten_lsn}; time {}", Timestamp(time))
        }
        XLOG_CHECKPOINT_REDO => write!(out, "wal_level {}", wal_level_name(CheckpointRedo::parse(data)?.wal_level)),
        _ => Ok(()),
    };
    Some(())
}

fn describe_checkpoint(checkpoint: &CheckPoint, kind: &str, out: &mut String) {
    let CheckPoint { redo, timeline, previous_timeline, full_page_writes, .. } = checkpoint;
    let CheckPoint { next_oid, next_multi, next_multi_offset, oldest_xid, oldest_xid_db, .. } = checkpoint;
    let CheckPoint { oldest_multi, oldest_multi_db, oldest_commit_ts_xid, newest_commit_ts_xid, .. } = checkpoint;
    let (epoch, next_xid) = (checkpoint.next_xid >> 32, checkpoint.next_xid as u32);
    let wal_level = wal_level_name(checkpoint.wal_level);
    let _ = write!(
        out,
        "redo {redo}; tli {timeline}; prev tli {previous_timeline}; fpw {full_page_writes}; wal_level {wal_level}; \
         xid {epoch}:{next_xid}; oid {next_oid}; multi {next_multi}; offset {next_multi_offset}; \
         oldest xid {oldest_xid} in DB {oldest_xid_db}; oldest multi {oldest_multi} in DB {oldest_multi_db}; \
         oldest/newest commit timestamp xid: {oldest_commit_ts_xid}/{newest_commit_ts_xid}; \
         oldest running xid {}; {kind}",
        checkpoint.oldest_active_xid
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u8]| described(RmgrId::XLOG, info, data);
        assert_eq!(described(XLOG_NEXTOID, &words([24576])), "24576");
        assert_eq!(described(XLOG_BACKUP_END, &words([0x28, 1])), "1/28");
        assert_eq!(described(XLOG_FPW_CHANGE, &[1]), "true");
        assert_eq!(described(XLOG_CHECKPOINT_REDO, &words([2])), "wal_level logical");
        assert_eq!(described(XLOG_CHECKPOINT_REDO, &words([3])), "wal_level ?");
        let mut point = vec![0; 72];
        point[8..13].copy_from_slice(b"named");
        assert_eq!(described(XLOG_RESTORE_POINT, &point), "named");
        assert_eq!(
            described(XLOG_PARAMETER_CHANGE, &[&words([100, 8, 10, 0, 64, 1])[..], &[1, 0, 0, 0]].concat()),
            "max_connections=100 max_worker_processes=8 max_wal_senders=10 max_prepared_xacts=0 \
             max_locks_per_xact=64 wal_level=replica wal_log_hints=on track_commit_timestamp=off"
        );
        assert_eq!(
            described(XLOG_END_OF_RECOVERY, &words([0, 0, 2, 1, 1, 0])),
            "tli 2; prev tli 1; time 2000-01-01 00:00:00.000000 UTC; wal_level replica"
        );
        assert_eq!(
            described(XLOG_OVERWRITE_CONTRECORD, &words([0xFFF0, 7, 0, 0])),
            "lsn 7/FFF0; time 2000-01-01 00:00:00.000000 UTC"
        );
        let checkpoint = CheckPoint {
            redo: Lsn(0x1_0000_0028),
            timeline: TimelineId(2),
            previous_timeline: TimelineId(1),
            full_page_writes: true,
            wal_level: 1,
            next_xid: 3 << 32 | 740,
            next_oid: 16384,
            next_multi: 4,
            next_multi_offset: 5,
            oldest_xid: 730,
            oldest_xid_db: 1,
            oldest_multi: 6,
            oldest_multi_db: 7,
            time: 0,
            oldest_commit_ts_xid: 8,
            newest_commit_ts_xid: 9,
            oldest_active_xid: 739,
            padding: [0; 11],
        };
        assert_eq!(
            described(XLOG_CHECKPOINT_ONLINE, &checkpoint.to_bytes()),
            "redo 1/28; tli 2; prev tli 1; fpw true; wal_level replica; xid 3:740; oid 16384; multi 4; offset 5; \
             oldest xid 730 in DB 1; oldest multi 6 in DB 7; oldest/newest commit timestamp xid: 8/9; \
             oldest running xid 739; online"
        );
    }

    #[test]
    fn short_data_says_nothing() {
        for info in (0..=0xF0).step_by(0x10) {
            assert_eq!(described(RmgrId::XLOG, info, &[]), "");
        }
    }
}
