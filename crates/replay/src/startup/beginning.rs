//! Where recovery begins (`InitWalRecovery`, `access/transam/xlogrecovery.c`, PostgreSQL 18).

use walrider_datadir::DataDir;
use walrider_layout::control::{CheckPoint, ControlFile, DbState};
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};
use walrider_store::read::ReadWal;
use walrider_store::source::Source;
use walrider_wal::decode::{Invalid, WalFormat};
use walrider_wal::record::Record;
use walrider_wal::records::xlog;
use walrider_wal::rmgr::RmgrId;

use crate::error::ReplayError;
use crate::follow::missing;
use crate::load::{Ending, read_record};
use crate::upstream::{Upstream, Wanted};

/// Where recovery begins.
pub(super) struct Beginning {
    /// The checkpoint record.
    pub at: Lsn,
    timeline: TimelineId,
    pub checkpoint: CheckPoint,
    /// The first record to replay.
    pub start: Lsn,
}

impl Beginning {
    /// Finds it; where there is no WAL for it yet, and somebody who brings some, waits for that. A promotion is refused then, as
    /// PostgreSQL does (`ReadCheckpointRecord` fails for it): nothing was replayed, and nothing is changed.
    pub fn wait_for(
        data_dir: &DataDir,
        source: &Source,
        format: &WalFormat,
        upstream: Option<&dyn Upstream>,
    ) -> Result<Beginning, ReplayError> {
        let from = match data_dir.label() {
            Some(label) => label.start_lsn,
            None => data_dir.control().checkpoint_copy.redo,
        };
        // Where the checkpoint record is in the first segment, the next ones are fetched beside that.
        let size = data_dir.control().segment_size;
        let at = data_dir.label().map_or(data_dir.control().checkpoint, |label| label.checkpoint);
        if size.segment_of(at) == size.segment_of(from) {
            source.release_before(from);
        }
        loop {
            // Asked before: what comes in until nothing more does is looked at.
            let wanted = upstream.map(Upstream::wanted);
            let (why, upstream) = match (Beginning::find(data_dir, source, format), upstream) {
                (Err(ReplayError::Refused(why)), Some(upstream)) if wanted != Some(Wanted::Stop) => (why, upstream),
                (found, _) => return found,
            };
            if wanted == Some(Wanted::Promote) {
                return Err(ReplayError::Refused(format!(
                    "there is nothing to promote yet: {why}. The directory is as it was, and a standby started on it goes on \
                     receiving"
                )));
            }
            upstream.wait(missing(source, format, from, from)?, &why)?;
            source.close_all();
        }
    }

    /// Reads the checkpoint record that `backup_label`, or else `pg_control`, names.
    fn find(data_dir: &DataDir, source: &Source, format: &WalFormat) -> Result<Beginning, ReplayError> {
        let (at, timeline, named_by) = match data_dir.label() {
            Some(label) => (label.checkpoint, label.start_timeline, "backup_label"),
            None => (data_dir.control().checkpoint, data_dir.control().checkpoint_copy.timeline, "pg_control"),
        };
        let failed = |why: String| {
            ReplayError::Refused(format!(
                "could not locate the checkpoint record at {at}, which {named_by} names: {}: {why}; recovery cannot begin \
                 without WAL from there on",
                source.describe(at)
            ))
        };
        let stretch = read_record(source, format, at).map_err(|ending| match ending {
            Ending::Failed(error) => error,
            Ending::Ends { why: Invalid::Incomplete, .. } => failed("no such file, or it ends before".into()),
            Ending::Ends { why, .. } => failed(why.to_string()),
            Ending::Goes(next) => failed(format!("the next record is at {next}")),
        })?;
        let place = *stretch.places().first().ok_or_else(|| failed("there is no record".into()))?;
        let span = stretch.span(place);
        let record = Record::parse(format.major, stretch.bytes(place), span.lsn, span.end)
            .map_err(|why| failed(why.to_string()))?;
        let is_checkpoint = record.header.rmgr == RmgrId::XLOG
            && [xlog::XLOG_CHECKPOINT_ONLINE, xlog::XLOG_CHECKPOINT_SHUTDOWN].contains(&record.info());
        let checkpoint = CheckPoint::parse(record.main_data)
            .filter(|_| is_checkpoint)
            .ok_or_else(|| failed("the record there is none of a checkpoint".into()))?;
        if checkpoint.redo > at || (record.info() == xlog::XLOG_CHECKPOINT_SHUTDOWN && checkpoint.redo != at) {
            return Err(failed(format!("its redo position {} makes no sense", checkpoint.redo)));
        }
        let start = if checkpoint.redo < at { checkpoint.redo } else { span.end };
        source.release_before(start);
        if start < at
            && let Err(ending) = read_record(source, format, start)
        {
            let why = match ending {
                Ending::Ends { why, .. } => why.to_string(),
                Ending::Failed(error) => error.to_string(),
                Ending::Goes(_) => "there is no record".into(),
            };
            return Err(ReplayError::Refused(format!(
                "could not find redo location {start} referenced by the checkpoint record at {at}: {}: {why}",
                source.describe(start)
            )));
        }
        Ok(Beginning { at, timeline, checkpoint, start })
    }

    /// The directory must lie on the way to the target timeline (`InitWalRecovery`).
    pub fn check_history(&self, data_dir: &DataDir, history: &TimelineHistory) -> Result<(), ReplayError> {
        let target = history.target();
        if history.timeline_at(self.at) != self.timeline {
            return Err(ReplayError::Refused(format!(
                "requested timeline {target} is not a child of this directory's history: its checkpoint at {} is on \
                 timeline {}, but the requested one left that at {}",
                self.at,
                self.timeline,
                history.switch_point(self.timeline).map_or("no point".into(), |lsn| lsn.to_string())
            )));
        }
        let control = data_dir.control();
        let min = control.min_recovery_point;
        if min.is_valid() && history.timeline_at(Lsn(min.0 - 1)) != control.min_recovery_point_timeline {
            return Err(ReplayError::Refused(format!(
                "requested timeline {target} does not contain minimum recovery point {min} on timeline {}",
                control.min_recovery_point_timeline
            )));
        }
        Ok(())
    }

    /// Puts the beginning into the control file, and `backup_label` away: from then on the directory says by itself
    /// where recovery begins, for PostgreSQL and Walrider alike.
    pub fn enter_recovery(&self, data_dir: &mut DataDir, archive_recovery: bool) -> Result<(), ReplayError> {
        let mut control: ControlFile = data_dir.control().clone();
        let clean = [DbState::ShutDown, DbState::ShutDownInRecovery].contains(&control.state);
        if !clean {
            // What an earlier run wrote last may not be durable, and will not be written again.
            data_dir.sync()?;
        }
        data_dir.directories().remove_relation_caches()?;
        data_dir.apply_tablespace_map()?;
        control.state = if archive_recovery { DbState::InArchiveRecovery } else { DbState::InCrashRecovery };
        control.checkpoint = self.at;
        control.checkpoint_copy = self.checkpoint;
        if archive_recovery && control.min_recovery_point < self.checkpoint.redo {
            control.min_recovery_point = self.checkpoint.redo;
            control.min_recovery_point_timeline = self.checkpoint.timeline;
        }
        if let Some(label) = data_dir.label() {
            control.backup_start_point = self.checkpoint.redo;
            control.backup_end_required = label.streamed;
            if label.from_standby {
                control.backup_end_point = control.min_recovery_point;
            }
        }
        data_dir.write_control(control)?;
        Ok(data_dir.retire_label()?)
    }
}
