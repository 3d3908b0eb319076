//! Records of the manager XLOG: counters, checkpoints, timelines, the primary's settings, the end of the base backup
//! (`xlog_redo` in `access/transam/xlog.c`, `xlogrecovery_redo` and `ApplyWalRecord` in
//! `access/transam/xlogrecovery.c`, PostgreSQL 18).

use walrider_layout::control::{CheckPoint, ControlFile};
use walrider_layout::xid::precedes;
use walrider_layout::{Lsn, TimelineId};
use walrider_wal::record::Record;
use walrider_wal::records::xlog::{self, ParameterChange};

use super::action::{Action, SeenCheckpoint};
use super::xid::NextXid;
use super::{GlobalError, Globals, WAL_LEVEL_MINIMAL};

/// The primary's settings in a control file.
pub(super) fn parameters_of(control: &ControlFile) -> ParameterChange {
    ParameterChange {
        max_connections: control.max_connections,
        max_worker_processes: control.max_worker_processes,
        max_wal_senders: control.max_wal_senders,
        max_prepared_xacts: control.max_prepared_xacts,
        max_locks_per_xact: control.max_locks_per_xact,
        wal_level: control.wal_level,
        wal_log_hints: control.wal_log_hints,
        track_commit_timestamp: control.track_commit_timestamp,
    }
}

/// The base backup that the directory comes from, until its end has been passed; then all zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackupState {
    /// Redo position of the backup's checkpoint (`backupStartPoint`).
    pub start: Lsn,
    /// Where the backup ends, if that is known beforehand: taken from a standby (`backupEndPoint`).
    pub end: Lsn,
    /// `XLOG_BACKUP_END` must be passed (`backupEndRequired`).
    pub end_required: bool,
}

impl BackupState {
    pub(super) fn from_control(control: &ControlFile) -> BackupState {
        BackupState {
            start: control.backup_start_point,
            end: control.backup_end_point,
            end_required: control.backup_end_required,
        }
    }

    /// Whether the directory is in the middle of a backup: it is not consistent, whatever `minRecoveryPoint` says
    /// (`CheckRecoveryConsistency`).
    pub fn is_open(&self) -> bool {
        self.start.is_valid() || self.end_required
    }
}

impl Globals {
    /// The backup that the directory comes from.
    pub fn backup(&self) -> &BackupState {
        &self.backup
    }

    /// Everything up to `end` has been replayed: says whether a backup taken from a standby, whose end is a position and
    /// not a record, has now been passed (`CheckRecoveryConsistency`). As for [`Action::BackupEnded`].
    pub fn passed(&mut self, end: Lsn) -> bool {
        let ended = self.backup.end.is_valid() && self.backup.end <= end;
        if ended {
            self.backup = BackupState::default();
        }
        ended
    }

    /// Puts into the control file what redo has learnt: settings and backup state. The rest is the engine's: state,
    /// checkpoint, `minRecoveryPoint`.
    pub fn apply_to(&self, control: &mut ControlFile) {
        let parameters = &self.parameters;
        control.max_connections = parameters.max_connections;
        control.max_worker_processes = parameters.max_worker_processes;
        control.max_wal_senders = parameters.max_wal_senders;
        control.max_prepared_xacts = parameters.max_prepared_xacts;
        control.max_locks_per_xact = parameters.max_locks_per_xact;
        control.wal_level = parameters.wal_level;
        control.wal_log_hints = parameters.wal_log_hints;
        control.track_commit_timestamp = parameters.track_commit_timestamp;
        control.backup_start_point = self.backup.start;
        control.backup_end_point = self.backup.end;
        control.backup_end_required = self.backup.end_required;
    }

    /// The body of the checkpoint record that ends recovery at `redo`, on a new timeline, at `time` in seconds since 1970: what
    /// is known here at the end of the last record (`CreateCheckPoint`). Nothing runs then but prepared transactions.
    pub fn end_of_recovery(&self, redo: Lsn, timeline: TimelineId, time: i64) -> CheckPoint {
        // A subtransaction of one that is prepared need not have written anything by itself (`PrescanPreparedTransactions`).
        let mut next_xid = self.next_xid;
        self.prepared.iter().for_each(|prepared| next_xid.advance_past(prepared.newest));
        CheckPoint {
            redo,
            timeline,
            previous_timeline: self.timeline,
            full_page_writes: self.full_page_writes,
            // Of the WAL so far. A server that is set to another one logs that when it starts (`XLogReportParameters`).
            wal_level: self.parameters.wal_level,
            next_xid: next_xid.0,
            next_oid: self.next_oid,
            next_multi: self.multixacts.next_multi,
            next_multi_offset: self.multixacts.next_offset,
            oldest_xid: self.oldest_xid.0,
            oldest_xid_db: self.oldest_xid.1,
            oldest_multi: self.multixacts.oldest.0,
            oldest_multi_db: self.multixacts.oldest.1,
            time,
            oldest_commit_ts_xid: self.commit_ts.oldest,
            newest_commit_ts_xid: self.commit_ts.newest,
            oldest_active_xid: 0,
            padding: [0; 11],
        }
    }

    /// `xlog_redo`, and the part of it that is in `xlogrecovery.c`.
    pub(super) fn redo_xlog(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        let data = record.main_data;
        match record.info() {
            xlog::XLOG_CHECKPOINT_SHUTDOWN => return self.redo_checkpoint(record, true),
            xlog::XLOG_CHECKPOINT_ONLINE => return self.redo_checkpoint(record, false),
            xlog::XLOG_NEXTOID => {
                self.next_oid = xlog::NextOid::parse(data).ok_or(GlobalError::DataLength("next oid"))?.next_oid;
            }
            xlog::XLOG_BACKUP_END => {
                let ended = xlog::BackupEnd::parse(data).ok_or(GlobalError::DataLength("end of backup"))?;
                // There may be others, of backups that are not this one.
                if self.backup.start.is_valid() && ended.start == self.backup.start {
                    self.backup = BackupState::default();
                    return Ok(vec![Action::BackupEnded]);
                }
            }
            xlog::XLOG_PARAMETER_CHANGE => {
                self.parameters = ParameterChange::parse(data).ok_or(GlobalError::DataLength("settings"))?;
                // A crash is recovered from on such WAL: what is not in it was made durable with its commit.
                if self.archive_recovery && self.parameters.wal_level == WAL_LEVEL_MINIMAL {
                    return Err(GlobalError::MinimalWal);
                }
                self.commit_ts.set_active(self.parameters.track_commit_timestamp, self.next_xid.xid())?;
                return Ok(vec![Action::ParametersChanged]);
            }
            xlog::XLOG_FPW_CHANGE => {
                let change = xlog::FpwChange::parse(data).ok_or(GlobalError::DataLength("full_page_writes"))?;
                self.full_page_writes = change.full_page_writes;
                if !change.full_page_writes {
                    self.full_page_writes_off = Some(record.lsn);
                }
            }
            xlog::XLOG_END_OF_RECOVERY => {
                let end = xlog::EndOfRecovery::parse(data).ok_or(GlobalError::DataLength("end of recovery"))?;
                return Ok(self.switch_timeline(end.timeline, end.previous_timeline).into_iter().collect());
            }
            xlog::XLOG_OVERWRITE_CONTRECORD => {
                let parsed = xlog::OverwriteContrecord::parse(data);
                let overwritten = parsed.ok_or(GlobalError::DataLength("overwritten record"))?.overwritten_lsn;
                return Ok(vec![Action::OverwriteContrecord { overwritten }]);
            }
            // Images are pages, restore points are for the recovery target, the others only say something.
            xlog::XLOG_NOOP
            | xlog::XLOG_SWITCH
            | xlog::XLOG_RESTORE_POINT
            | xlog::XLOG_FPI
            | xlog::XLOG_FPI_FOR_HINT
            | xlog::XLOG_CHECKPOINT_REDO => {}
            _ => return Err(GlobalError::UnknownType(record.header.info)),
        }
        Ok(Vec::new())
    }

    fn redo_checkpoint(&mut self, record: &Record<'_>, shutdown: bool) -> Result<Vec<Action>, GlobalError> {
        let body = CheckPoint::parse(record.main_data).ok_or(GlobalError::DataLength("checkpoint"))?;
        let mut actions = Vec::new();
        if shutdown {
            actions.extend(self.switch_timeline(body.timeline, body.previous_timeline));
            if self.archive_recovery && self.backup.start.is_valid() && !self.backup.end.is_valid() {
                return Err(GlobalError::BackupCanceled(self.backup.start));
            }
            // Nothing was running: the counters are exact.
            self.next_xid = NextXid(body.next_xid);
            self.next_oid = body.next_oid;
            self.multixacts.next_multi = body.next_multi;
            self.multixacts.next_offset = body.next_multi_offset;
            self.oldest_xid = (body.oldest_xid, body.oldest_xid_db);
        } else {
            if body.timeline != self.timeline {
                return Err(GlobalError::Timeline { found: body.timeline, expected: self.timeline });
            }
            // They are from the beginning of the checkpoint; records since then may have said more.
            self.next_xid = self.next_xid.max(NextXid(body.next_xid));
            self.multixacts.advance_next(body.next_multi, body.next_multi_offset);
            if precedes(self.oldest_xid.0, body.oldest_xid) {
                self.oldest_xid = (body.oldest_xid, body.oldest_xid_db);
            }
        }
        self.multixacts.advance_oldest(body.oldest_multi, body.oldest_multi_db);
        let seen = SeenCheckpoint { lsn: record.lsn, end: record.end, shutdown, body };
        self.latest_checkpoint = Some(seen);
        actions.push(Action::Checkpoint(seen));
        Ok(actions)
    }

    fn switch_timeline(&mut self, to: TimelineId, previous: TimelineId) -> Option<Action> {
        let from = std::mem::replace(&mut self.timeline, to);
        (from != to).then_some(Action::SwitchTimeline { from, to, previous })
    }
}
