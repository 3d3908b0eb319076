//! What must be done in order: the records that concern more than a page, one after the other, up to where the batch ends.

use std::collections::VecDeque;

use walrider_datadir::recovery_settings::RecoveryTarget;
use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::{Lsn, Major, TransactionId};
use walrider_store::read::ReadWal;
use walrider_wal::decode::Stretch;
use walrider_wal::record::{InvalidRecord, Record, RecordHeader};
use walrider_wal::records::xact;
use walrider_wal::rmgr::RmgrId;

use crate::batch::Batch;
use crate::cuts::Lengths;
use crate::engine::Stop;
use crate::error::{ReplayError, type_name};
use crate::globals::{Action, GlobalError, Globals};
use crate::plan::{Global, Obstacle, Planned};
use crate::restartpoint::Recovery;
use crate::stages::Stage;
use crate::stats::Stats;
use crate::target::RecoveryStop;

/// What stands before a batch.
pub struct Before<'b> {
    /// The directory, here.
    pub replayed: Lsn,
    /// How long files are, for a batch that may be larger than memory: then truncations may be part of it.
    pub lengths: Option<Lengths<'b>>,
}

/// Replays what is not a page, and decides where batches and replay end.
pub struct Sequencer<'a> {
    source: &'a dyn ReadWal,
    major: Major,
    /// Where to stop.
    stop: RecoveryStop,
    /// What records change that is not a page.
    pub globals: Globals,
    /// Where the directory stands.
    pub recovery: Recovery,
    /// Records of the queue that were passed over because their continuation was never written, in order, and the last one
    /// before.
    overwritten: Vec<Lsn>,
    /// Commits made later than this are not replayed yet.
    pub commits_until: Option<TimestampTz>,
}

impl<'a> Sequencer<'a> {
    /// Nothing is sequenced yet.
    pub fn new(
        source: &'a dyn ReadWal,
        major: Major,
        stop: RecoveryStop,
        globals: Globals,
        recovery: Recovery,
    ) -> Sequencer<'a> {
        Sequencer { source, major, stop, globals, recovery, overwritten: Vec::new(), commits_until: None }
    }

    /// Whether the directory is consistent at `replayed`.
    pub fn is_consistent(&self, replayed: Lsn) -> bool {
        self.recovery.is_consistent(self.globals.backup(), replayed)
    }

    /// Takes the records that are replayed in order, up to the end of the next batch, or more for one that has begun.
    ///
    /// # Errors
    /// What [`ReplayError`] lists.
    pub fn sequence(
        &mut self,
        queue: &VecDeque<Planned>,
        begun: Batch,
        before: &Before<'_>,
        stats: &mut Stats,
    ) -> Result<Batch, ReplayError> {
        let _sequence = stats.stages.enter(Stage::Sequence);
        let mut batch = begun;
        batch.upto.clear();
        for planned in queue {
            self.pass_over(&planned.stretch);
            let (upto, ends) = self.sequence_stretch(planned, &mut batch, before, stats)?;
            if let Some(record) = batch.last_commit.take().and_then(|number| self.record(planned, number).ok()) {
                stats.note_commit(&record);
            }
            batch.upto.push(upto);
            if ends {
                batch.ends = true;
                break;
            }
        }
        Ok(batch)
    }

    /// Up to where it is certain that replay gets, as far as the WAL does.
    pub fn certain_until(&self) -> Option<Lsn> {
        match &self.stop.target {
            _ if self.commits_until.is_some() => None,
            Some(RecoveryTarget::Lsn(target)) => Some(*target),
            Some(_) => None,
            None => Some(Lsn(u64::MAX)),
        }
    }

    /// Notes what a stretch passed over; it may have been asked before.
    fn pass_over(&mut self, stretch: &Stretch) {
        let before = self.overwritten.partition_point(|&lsn| lsn < stretch.start());
        self.overwritten.drain(..before.saturating_sub(1));
        let known = self.overwritten.last().copied().unwrap_or(Lsn::INVALID);
        self.overwritten.extend(stretch.overwritten().iter().filter(|&&lsn| lsn > known));
    }

    /// The record that was passed over last before a position.
    fn overwritten_before(&self, lsn: Lsn) -> Option<Lsn> {
        self.overwritten[..self.overwritten.partition_point(|&overwritten| overwritten < lsn)].last().copied()
    }

    /// Sequences one stretch. Returns the first record past the batch, and whether the batch ends there.
    fn sequence_stretch(
        &mut self,
        planned: &Planned,
        batch: &mut Batch,
        before: &Before<'_>,
        stats: &mut Stats,
    ) -> Result<(u32, bool), ReplayError> {
        let (limit, stop) = self.limit(planned);
        let mut consistent_at = self.consistency_limit(planned, planned.done, before.replayed);
        let first = planned.plan.globals.partition_point(|global| global.number < planned.done);
        let goal = &self.stop.target;
        let commits_are_plain = self.commits_until.is_none()
            && !matches!(goal, Some(RecoveryTarget::Xid(_) | RecoveryTarget::Time(_) | RecoveryTarget::Immediate));
        for &Global { number, newest_xid, commit } in &planned.plan.globals[first..] {
            if number >= limit || consistent_at.is_some_and(|at| number >= at) {
                break;
            }
            if let Some(commit) = commit.filter(|_| commits_are_plain) {
                self.advance_next_xid(newest_xid);
                self.globals.commit(&commit).map_err(|error| match self.record(planned, number) {
                    Ok(record) => ReplayError::in_global(&record, error),
                    Err(_) => error.into(),
                })?;
                stats.transactions += 1;
                batch.last_commit = Some(number);
                self.flush_globals(planned, number)?;
                continue;
            }
            if let Some(upto) = self.sequence_record(planned, number, newest_xid, batch, before, stats)? {
                return Ok((upto, true));
            }
            if self.stop.target == Some(RecoveryTarget::Immediate) {
                consistent_at = self.consistency_limit(planned, number + 1, before.replayed);
            }
        }
        if let Some(at) = consistent_at.filter(|&at| at <= limit) {
            self.advance_up_to(planned, at);
            batch.stop = Some(Stop::Target);
            return Ok((at, true));
        }
        match stop {
            Some(_) => self.advance_up_to(planned, limit),
            None => self.advance_next_xid(planned.plan.newest_xid),
        }
        let ends = stop.is_some();
        batch.stop = stop;
        Ok((limit, ends))
    }

    /// Sequences the record of this number; the newest transaction id up to there is `newest_xid`. Returns the first record past
    /// the batch, if that ends before this record or with it.
    fn sequence_record(
        &mut self,
        planned: &Planned,
        number: u32,
        newest_xid: TransactionId,
        batch: &mut Batch,
        before: &Before<'_>,
        stats: &mut Stats,
    ) -> Result<Option<u32>, ReplayError> {
        let record = self
            .record(planned, number)
            .map_err(|(lsn, error)| ReplayError::CorruptWal(format!("record at {lsn}: {error}")))?;
        if self.stop.stops_before(&record) {
            self.advance_up_to(planned, number);
            batch.stop = Some(Stop::Target);
            return Ok(Some(number));
        }
        if let Some(committed) = self.waits(&record, before.replayed) {
            self.advance_up_to(planned, number);
            batch.stop = Some(Stop::ApplyDelay { committed });
            return Ok(Some(number));
        }
        self.advance_next_xid(newest_xid);
        let actions = match self.globals.redo(&record) {
            Ok(actions) => actions,
            Err(GlobalError::UnknownType(_)) => {
                batch.stop = Some(self.obstacle(planned, number, &Obstacle::Unsupported));
                return Ok(Some(number));
            }
            Err(error) => return Err(ReplayError::in_global(&record, error)),
        };
        stats.count_global(&record);
        self.flush_globals(planned, number)?;
        let mut ends = false;
        for action in actions {
            ends |= self.take_action(action, &record, batch, before)?;
        }
        if self.stop.stops_after(&record) {
            batch.stop = Some(Stop::Target);
            ends = true;
        }
        Ok(ends.then_some(number + 1))
    }

    /// The first record of a stretch that is not replayed whatever the others say, and why.
    fn limit(&self, planned: &Planned) -> (u32, Option<Stop>) {
        let places = planned.stretch.places();
        let (mut limit, mut stop) = (places.len() as u32, None);
        if let Some((number, obstacle)) = &planned.plan.obstacle {
            limit = *number;
            stop = Some(self.obstacle(planned, *number, obstacle));
        }
        if let Some((lsn, inclusive)) = self.stop.lsn_limit() {
            let at = places.partition_point(|&place| planned.stretch.span(place).lsn < lsn) as u32;
            if at < places.len() as u32 && at + u32::from(inclusive) <= limit {
                limit = at + u32::from(inclusive);
                stop = Some(Stop::Target);
            }
        }
        (limit, stop)
    }

    /// Writes what records changed, up to the one of this number, if some of it may be written soon to make room.
    #[inline]
    fn flush_globals(&mut self, planned: &Planned, number: u32) -> Result<(), ReplayError> {
        if self.globals.wants_flush() {
            self.recovery.ensure_min_recovery_point(planned.end_of(number))?;
            self.globals.flush()?;
        }
        Ok(())
    }

    /// When the transaction was committed whose commit this is, if it must wait. An inconsistent directory lets nobody in,
    /// and so nothing waits there.
    fn waits(&self, record: &Record<'_>, replayed: Lsn) -> Option<TimestampTz> {
        let until =
            self.commits_until.filter(|_| record.header.rmgr == RmgrId::XACT && self.is_consistent(replayed))?;
        xact::commit_time(record).map(TimestampTz).filter(|committed| committed.0 > until.0)
    }

    fn advance_next_xid(&mut self, newest_xid: TransactionId) {
        if newest_xid != 0 {
            self.globals.advance_next_xid(newest_xid);
        }
    }

    /// Moves the next transaction id past those of all records up to, not including, the one of this number, and no further:
    /// a server that goes on from here must not hand out an id again that is in a page, nor one whose page of `pg_xact` does not
    /// exist yet. For where replay stops in the middle of a stretch.
    fn advance_up_to(&mut self, planned: &Planned, number: u32) {
        for before in planned.done..number {
            let bytes = planned.stretch.bytes(planned.stretch.place(before));
            self.advance_next_xid(RecordHeader::parse(bytes).map_or(0, |header| header.xid));
        }
    }

    /// With `recovery_target = 'immediate'`: the first record, from `from` on, that is not replayed any more.
    fn consistency_limit(&self, planned: &Planned, from: u32, replayed: Lsn) -> Option<u32> {
        if self.stop.target != Some(RecoveryTarget::Immediate) {
            return None;
        }
        let point = self.recovery.consistency_point(self.globals.backup())?;
        if from == 0 && replayed >= point {
            return Some(0);
        }
        let places = planned.stretch.places();
        let at = places.partition_point(|&place| planned.stretch.span(place).end < point) as u32;
        (at < places.len() as u32).then(|| (at + 1).max(from))
    }

    /// The record of this number in a stretch, or where it is and what is wrong with it.
    fn record<'p>(&self, planned: &'p Planned, number: u32) -> Result<Record<'p>, (Lsn, InvalidRecord)> {
        let mut record = Record::empty(self.major);
        let place = planned.stretch.place(number);
        planned.stretch.read(place, &mut record).map_err(|error| (planned.stretch.span(place).lsn, error))?;
        Ok(record)
    }

    fn obstacle(&self, planned: &Planned, number: u32, obstacle: &Obstacle) -> Stop {
        let lsn = planned.stretch.span(planned.stretch.place(number)).lsn;
        let record = self.record(planned, number);
        match obstacle {
            Obstacle::Unsupported => Stop::Unsupported {
                lsn,
                record: record.as_ref().map(type_name).unwrap_or_default(),
                relation: record.ok().and_then(|record| record.blocks.first().map(|block| block.rel)),
            },
            Obstacle::Corrupt(why) => Stop::Corrupt { lsn, why: format!("{}: {why}", self.source.describe(lsn)) },
        }
    }

    /// Files an action with the batch. True: the batch ends with its record.
    fn take_action(
        &mut self,
        action: Action,
        record: &Record<'_>,
        batch: &mut Batch,
        before: &Before<'_>,
    ) -> Result<bool, ReplayError> {
        if let Action::TruncateRelation { rel, blocks, flags } = action
            && let Some(lengths) = &before.lengths
            && batch.cuts.take(record.end, rel, blocks, flags, lengths)?
        {
            return Ok(false);
        }
        match action {
            Action::Checkpoint(seen) => Ok(self.recovery.saw_checkpoint(seen)),
            Action::SwitchTimeline { from, to, previous } => {
                self.recovery.switch_timeline(from, to, previous, record)?;
                Ok(true)
            }
            Action::OverwriteContrecord { overwritten } => {
                if self.overwritten_before(record.lsn) != Some(overwritten) {
                    return Err(ReplayError::CorruptWal(format!(
                        "at {}: record says that the one at {overwritten} was overwritten, which it was not",
                        record.lsn
                    )));
                }
                Ok(false)
            }
            // Commit timestamps turned off: their files may go with the next transaction (`xlog_redo` does the same).
            Action::ParametersChanged => {
                self.recovery.ensure_min_recovery_point(record.end)?;
                Ok(false)
            }
            Action::BackupEnded => Ok(false),
            Action::CopyDatabase { .. } => {
                self.recovery.copied_database(record.end);
                batch.actions.push(action);
                Ok(true)
            }
            Action::DropRelations(rels) => {
                batch.drop_relations(rels);
                Ok(false)
            }
            // A new relation of the same number: its pages must not be taken for those that were dropped.
            Action::CreateFork { rel, .. } if batch.drops.contains(&rel) => {
                batch.actions.push(action);
                Ok(true)
            }
            Action::CreateFork { .. } | Action::UpdateRelmap { .. } => {
                batch.actions.push(action);
                Ok(false)
            }
            Action::TruncateRelation { .. }
            | Action::CreateDatabase(_)
            | Action::DropDatabase { .. }
            | Action::CreateTablespace { .. }
            | Action::DropTablespace(_) => {
                batch.actions.push(action);
                Ok(true)
            }
        }
    }
}
