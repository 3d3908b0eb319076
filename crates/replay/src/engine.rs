//! The engine: takes planned stretches in batches through the partitions, and does what is not a page in its place.
//!
//! A batch is a run of records without anything that pages of it must not be exchanged with. All its page
//! operations are done first, then its changes of free space maps, then its file actions. Then its end is where the
//! directory stands, and [`crate::restartpoint`] may write it down.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use walrider_datadir::directories::{Directories, Missing};
use walrider_datadir::recovery_settings::RecoveryTarget;
use walrider_datadir::relation::RelationFiles;
use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::history::TimelineHistory;
use walrider_layout::{BLCKSZ, Lsn, RelFileLocator, TimelineId, TransactionId};
use walrider_wal::decode::{Span, Stretch};
use walrider_wal::record::{InvalidRecord, Record, RecordHeader};
use walrider_wal::records::xact;
use walrider_wal::rmgr::RmgrId;

use crate::actions;
use crate::batch::{Batch, loaded_end};
use crate::error::{ReplayError, page_name, type_name};
use crate::globals::{Action, GlobalError, Globals};
use crate::load::{Ending, Loader, ReadWal};
use crate::pages::{Pages, is_small};
use crate::partition::{PageSettings, Part, Partition, Shared};
use crate::plan::{Global, Obstacle, PARTITIONS, Planned};
use crate::rels::{PageKey, RelTable};
use crate::restartpoint::Recovery;
use crate::spread::{Spread, Step};
use crate::stats::Stats;
use crate::target::RecoveryStop;

/// Fewest pages that the cache may be limited to: a record has at most 33 blocks and as many maps.
const MIN_PAGES: usize = 512;

/// Least time for a restartpoint between two batches.
const LEAST_RESTARTPOINT_STEP: Duration = Duration::from_millis(2);

/// Most WAL in the first batch.
const FIRST_BATCH_BYTES: u64 = 16 << 20;

/// How memory is shared.
#[derive(Clone, Copy, Debug)]
pub struct MemoryShares {
    /// Bytes for pages.
    pub page_bytes: u64,
    /// Most bytes of WAL in one batch.
    pub batch_bytes: u64,
}

/// What the engine works with.
pub struct Settings {
    /// What the work on pages depends on.
    pub pages: PageSettings,
    /// How memory is shared while all pages fit.
    pub ample: MemoryShares,
    /// And once they did not.
    pub short: MemoryShares,
    /// Bytes of WAL in one stretch.
    pub window_bytes: u64,
    /// Where to stop.
    pub stop: RecoveryStop,
    /// `allow_in_place_tablespaces`: tablespaces may be directories in `pg_tblspc`.
    pub allow_in_place_tablespaces: bool,
}

/// What whoever watches the progress wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    Continue,
    /// Stop at the end of this batch.
    Stop,
}

/// Why replay stopped. The directory is at the end of the last record that was replayed.
#[derive(Debug)]
pub enum Stop {
    /// The recovery target was reached.
    Target,
    /// The WAL ends here: no valid record follows.
    EndOfWal {
        /// What was found instead of a record.
        why: String,
    },
    /// The WAL may end here, or not: the archive is out of reach.
    Outage {
        /// What says so.
        why: String,
    },
    /// The next record has no redo here. PostgreSQL takes over.
    Unsupported {
        /// Where it is.
        lsn: Lsn,
        /// Resource manager and type.
        record: String,
        /// The first relation it refers to.
        relation: Option<RelFileLocator>,
    },
    /// Somebody asked to stop.
    Interrupted,
    /// The next record is a commit that is not to be replayed yet ([`Engine::commits_wait_from`]).
    ApplyDelay {
        /// When it was made.
        committed: TimestampTz,
    },
    /// The next record, or the WAL there, is damaged although more follows.
    Corrupt {
        /// Where.
        lsn: Lsn,
        /// File and reason.
        why: String,
    },
}

/// Replays WAL onto a data directory.
pub struct Engine<'a> {
    settings: Settings,
    source: &'a dyn ReadWal,
    files: &'a Arc<RelationFiles>,
    rels: RelTable,
    partitions: Vec<Partition>,
    globals: Globals,
    recovery: Recovery,
    directories: Directories,
    loader: Loader,
    queue: VecDeque<Planned>,
    /// Pages that a record expected and that were not there; dropped or truncated later, or the WAL is at fault.
    invalid: BTreeSet<PageKey>,
    batch: u64,
    /// How many stretches there are to a batch.
    stretches: usize,
    /// The pages of some batch did not fit into memory.
    is_short: bool,
    /// End of the last record that was replayed (`lastReplayedEndRecPtr`).
    replayed: Lsn,
    /// The same, but before what an `XLOG_SWITCH` leaves unused.
    used: Lsn,
    /// Where it begins (`lastReplayedReadRecPtr`); not valid before the first.
    last_record: Lsn,
    /// Where the WAL was found to end: nothing of it from there on.
    needed: Lsn,
    /// A restartpoint that is being made.
    spread: Option<Spread>,
    /// Records of the queue that were passed over because their continuation was never written, in order, and the last one
    /// before.
    overwritten: Vec<Lsn>,
    looks_past: bool,
    /// Commits made later than this are not replayed yet.
    commits_until: Option<TimestampTz>,
    /// Counters.
    pub stats: Stats,
}

impl<'a> Engine<'a> {
    /// Begins with the record at `start`.
    pub fn new(
        settings: Settings,
        source: &'a dyn ReadWal,
        files: &'a Arc<RelationFiles>,
        globals: Globals,
        recovery: Recovery,
        loader: Loader,
    ) -> Engine<'a> {
        let replayed = loader.position();
        // Slabs of up to 4 MB, but small where memory is: each partition has one that is not full.
        let slab_pages = (settings.ample.page_bytes as usize / BLCKSZ / PARTITIONS / 32).clamp(8, 512);
        let stretches = (settings.ample.batch_bytes.min(FIRST_BATCH_BYTES) / settings.window_bytes).max(1) as usize;
        Engine {
            settings,
            source,
            files,
            rels: RelTable::default(),
            partitions: (0..PARTITIONS).map(|_| Partition::new(slab_pages)).collect(),
            globals,
            directories: recovery.data_dir().directories(),
            recovery,
            loader,
            queue: VecDeque::new(),
            invalid: BTreeSet::new(),
            batch: 0,
            stretches,
            is_short: false,
            replayed,
            used: replayed,
            last_record: Lsn::INVALID,
            needed: replayed,
            spread: None,
            overwritten: Vec::new(),
            looks_past: true,
            commits_until: None,
            stats: Stats::default(),
        }
    }

    /// End of the last record that was replayed.
    pub fn replayed(&self) -> Lsn {
        self.replayed
    }

    /// The same, but before the rest of the segment that an `XLOG_SWITCH` leaves unused.
    pub fn used(&self) -> Lsn {
        self.used
    }

    /// Where the last record that was replayed begins; `None` before the first.
    pub fn last_record(&self) -> Option<Lsn> {
        self.last_record.is_valid().then_some(self.last_record)
    }

    /// Where replay needs more WAL to go on: past [`Engine::replayed`] if a record was found in part.
    pub fn needed(&self) -> Lsn {
        self.needed.max(self.replayed)
    }

    /// Whether to look, at the end of valid WAL, if it goes on past that, and is damaged there. At first it is.
    pub fn look_past(&mut self, look: bool) {
        self.looks_past = look;
    }

    /// Lets transactions that were committed later than this wait (`recoveryApplyDelay`); [`Engine::run`] stops before them.
    pub fn commits_wait_from(&mut self, time: Option<TimestampTz>) {
        self.commits_until = time;
    }

    /// Follows these timelines from now on.
    pub fn set_history(&mut self, history: TimelineHistory) {
        self.recovery.set_history(history);
    }

    /// Timeline of the last record that was replayed.
    pub fn timeline(&self) -> TimelineId {
        self.recovery.timeline()
    }

    /// What is known about recovery.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Both sides of what a restartpoint writes down.
    pub(crate) fn globals_and_recovery(&mut self) -> (&mut Globals, &mut Recovery) {
        (&mut self.globals, &mut self.recovery)
    }

    /// Replays until there is a reason to stop. At the end of WAL it can be called again, when there is more.
    ///
    /// # Errors
    /// What [`ReplayError`] lists. No page of the batch that failed has been written, unless memory was short; files may
    /// have been made, or made longer.
    pub fn run(&mut self, progress: &mut dyn FnMut(&Stats, Lsn) -> Flow) -> Result<Stop, ReplayError> {
        loop {
            let stretches = self.stretches;
            if self.queue.is_empty() {
                let started = Instant::now();
                self.queue.extend(self.loader.load(stretches, self.source, &self.rels));
                self.stats.load += started.elapsed();
            }
            if self.queue.is_empty() {
                self.work_on_restartpoint(Duration::ZERO)?;
                if !self.last_record.is_valid() {
                    // Nobody was told yet where the directory stands.
                    self.stats.consistent = self.is_consistent();
                    progress(&self.stats, self.replayed);
                }
                return self.ending();
            }
            let batch_started = Instant::now();
            let mut batch = self.sequence()?;
            // Where memory is short, it is the records of one batch that need it most.
            let ahead = if self.is_short { 0 } else { stretches };
            let missing = ahead.saturating_sub(self.queue.len() - batch.upto.len());
            let was_short = self.is_short;
            let loaded = self.apply(&batch, missing)?;
            if self.is_short && !was_short {
                self.empty_partitions()?;
            }
            self.queue.extend(loaded);
            self.finish(&mut batch)?;
            if batch.upto.len() == stretches {
                self.size_batches();
            }
            self.retire(&batch.upto);
            self.globals.passed(self.replayed);
            self.check_invalid()?;
            self.stats.consistent = self.is_consistent();
            let flow = progress(&self.stats, self.replayed);
            if let Some(stop) = batch.stop {
                return Ok(stop);
            }
            if flow == Flow::Stop {
                return Ok(Stop::Interrupted);
            }
            self.work_on_restartpoint(batch_started.elapsed())?;
        }
    }

    /// Gives the memory for pages back: from now on there is less for them.
    fn empty_partitions(&mut self) -> Result<(), ReplayError> {
        let shared = Shared { rels: &self.rels, files: self.files, settings: self.settings.pages };
        let emptied = self.partitions.par_iter_mut().map(|partition| partition.empty(&shared));
        self.stats.pages_evicted += emptied.try_reduce(|| 0, |a, b| Ok(a + b))?;
        Ok(())
    }

    fn shares(&self) -> &MemoryShares {
        if self.is_short { &self.settings.short } else { &self.settings.ample }
    }

    /// Larger batches visit each page less often, but need memory of their own: they grow as long as one visits more bytes of
    /// pages than it has of WAL.
    fn size_batches(&mut self) {
        let most = (self.shares().batch_bytes / self.settings.window_bytes).max(1) as usize;
        let visited: usize = self.partitions.iter().map(Partition::visited).sum();
        if (visited * BLCKSZ) as u64 > self.stretches as u64 * self.settings.window_bytes {
            self.stretches = (2 * self.stretches).min(most);
        }
    }

    /// Why the loader has no more.
    fn ending(&mut self) -> Result<Stop, ReplayError> {
        match self.loader.take_ending() {
            Some(Ending::Ends { at, page, why }) => {
                // The file to look at is the one where the record should go on.
                self.needed = page.max(at);
                let file = self.source.describe(self.needed);
                // After a crash, pages past the end may have got to the disk although ones before them did not.
                let looks = self.looks_past && self.recovery.is_archive_recovery();
                if looks && self.loader.goes_on_past(page, self.source)? {
                    return Ok(Stop::Corrupt { lsn: at, why: format!("{file}: {why}") });
                }
                Ok(Stop::EndOfWal { why: format!("{file}: {why}") })
            }
            Some(Ending::Failed(error)) => Err(error),
            Some(Ending::Goes(at)) => {
                self.needed = at;
                Ok(Stop::EndOfWal { why: format!("no WAL from {at} on") })
            }
            None => Ok(Stop::EndOfWal { why: "no more WAL".into() }),
        }
    }

    /// Takes the records that are replayed in order, up to the end of the next batch.
    fn sequence(&mut self) -> Result<Batch, ReplayError> {
        let started = Instant::now();
        let mut batch = Batch::default();
        let mut queue = std::mem::take(&mut self.queue);
        let mut result = Ok(());
        for planned in &queue {
            self.pass_over(&planned.stretch);
            match self.sequence_stretch(planned, &mut batch) {
                Ok((upto, ends)) => {
                    if let Some(record) = batch.last_commit.take().and_then(|number| self.record(planned, number).ok())
                    {
                        self.stats.note_commit(&record);
                    }
                    batch.upto.push(upto);
                    if ends {
                        break;
                    }
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        std::mem::swap(&mut self.queue, &mut queue);
        self.stats.sequence += started.elapsed();
        result.map(|()| batch)
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
    fn sequence_stretch(&mut self, planned: &Planned, batch: &mut Batch) -> Result<(u32, bool), ReplayError> {
        let places = planned.stretch.places();
        let mut limit = places.len() as u32;
        let mut stop = None;
        if let Some((number, obstacle)) = &planned.plan.obstacle {
            limit = *number;
            stop = Some(self.obstacle(planned, *number, obstacle));
        }
        if let Some((lsn, inclusive)) = self.settings.stop.lsn_limit() {
            let at = places.partition_point(|&place| planned.stretch.span(place).lsn < lsn) as u32;
            if at < places.len() as u32 && at + u32::from(inclusive) <= limit {
                limit = at + u32::from(inclusive);
                stop = Some(Stop::Target);
            }
        }
        let mut consistent_at = self.consistency_limit(planned, planned.done);
        let first = planned.plan.globals.partition_point(|global| global.number < planned.done);
        let commits_are_plain = self.commits_until.is_none()
            && matches!(self.settings.stop.target, None | Some(RecoveryTarget::Lsn(_) | RecoveryTarget::Name(_)));
        for &Global { number, newest_xid, commit } in &planned.plan.globals[first..] {
            if number >= limit || consistent_at.is_some_and(|at| number >= at) {
                break;
            }
            if let Some(commit) = commit.filter(|_| commits_are_plain) {
                self.advance_next_xid(newest_xid);
                if let Err(error) = self.globals.commit(&commit) {
                    return Err(match self.record(planned, number) {
                        Ok(record) => ReplayError::in_global(&record, error),
                        Err(_) => error.into(),
                    });
                }
                self.stats.transactions += 1;
                batch.last_commit = Some(number);
                self.flush_globals(planned, number)?;
                continue;
            }
            let record = self
                .record(planned, number)
                .map_err(|(lsn, error)| ReplayError::CorruptWal(format!("record at {lsn}: {error}")))?;
            if self.settings.stop.stops_before(&record) {
                self.advance_up_to(planned, number);
                batch.stop = Some(Stop::Target);
                return Ok((number, true));
            }
            if let Some(committed) = self.waits(&record) {
                self.advance_up_to(planned, number);
                batch.stop = Some(Stop::ApplyDelay { committed });
                return Ok((number, true));
            }
            self.advance_next_xid(newest_xid);
            let actions = match self.globals.redo(&record) {
                Ok(actions) => actions,
                Err(GlobalError::UnknownType(_)) => {
                    batch.stop = Some(self.obstacle(planned, number, &Obstacle::Unsupported));
                    return Ok((number, true));
                }
                Err(error) => return Err(ReplayError::in_global(&record, error)),
            };
            self.stats.count_global(&record);
            self.flush_globals(planned, number)?;
            let mut barrier = false;
            for action in actions {
                barrier |= self.take_action(action, &record, batch)?;
            }
            if self.settings.stop.stops_after(&record) {
                batch.stop = Some(Stop::Target);
                return Ok((number + 1, true));
            }
            if barrier {
                return Ok((number + 1, true));
            }
            if self.settings.stop.target == Some(RecoveryTarget::Immediate) {
                consistent_at = self.consistency_limit(planned, number + 1);
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
    fn waits(&self, record: &Record<'_>) -> Option<TimestampTz> {
        let until = self.commits_until.filter(|_| record.header.rmgr == RmgrId::XACT && self.is_consistent())?;
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
    fn consistency_limit(&self, planned: &Planned, from: u32) -> Option<u32> {
        if self.settings.stop.target != Some(RecoveryTarget::Immediate) {
            return None;
        }
        let point = self.recovery.consistency_point(self.globals.backup())?;
        if from == 0 && self.replayed >= point {
            return Some(0);
        }
        let places = planned.stretch.places();
        let at = places.partition_point(|&place| planned.stretch.span(place).end < point) as u32;
        (at < places.len() as u32).then(|| (at + 1).max(from))
    }

    /// The record of this number in a stretch, or where it is and what is wrong with it.
    fn record<'p>(&self, planned: &'p Planned, number: u32) -> Result<Record<'p>, (Lsn, InvalidRecord)> {
        let mut record = Record::empty(self.loader.format().major);
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
    fn take_action(&mut self, action: Action, record: &Record<'_>, batch: &mut Batch) -> Result<bool, ReplayError> {
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

    /// Does the batch's page operations, and loads `missing` more stretches meanwhile.
    fn apply(&mut self, batch: &Batch, missing: usize) -> Result<Vec<Planned>, ReplayError> {
        let queue = std::mem::take(&mut self.queue);
        let parts: Vec<Part<'_>> =
            queue.iter().zip(&batch.upto).map(|(planned, &upto)| Part::new(planned, planned.done, upto)).collect();
        let mut dropped = vec![false; if batch.drops.is_empty() { 0 } else { self.rels.len() }];
        for rel in &batch.drops {
            for fork in walrider_layout::ForkNumber::ALL {
                if let Some(number) = self.rels.find(*rel, fork) {
                    dropped[number as usize] = true;
                }
            }
        }
        let budget = ((self.shares().page_bytes / BLCKSZ as u64) as usize).max(MIN_PAGES);
        let end = batch.end(&queue).unwrap_or(self.replayed);
        // Both sides are borrowed apart, so that they can run side by side.
        let mut pages = Pages {
            partitions: &mut self.partitions,
            shared: Shared { rels: &self.rels, files: self.files, settings: self.settings.pages },
            budget,
            is_short: &mut self.is_short,
            batch: &mut self.batch,
            invalid: &mut self.invalid,
            stats: &mut self.stats,
            recovery: &mut self.recovery,
        };
        let (loader, source, rels) = (&mut self.loader, self.source, &self.rels);
        let (applied, loaded) = match is_small(&parts) {
            true => (pages.apply(&parts, &dropped, end), Vec::new()),
            false => rayon::join(|| pages.apply(&parts, &dropped, end), || loader.load_ready(missing, source, rels)),
        };
        drop(parts);
        self.queue = queue;
        applied?;
        Ok(loaded)
    }

    /// Up to where it is certain that replay gets, as far as the WAL does.
    fn certain_until(&self) -> Option<Lsn> {
        match &self.settings.stop.target {
            _ if self.commits_until.is_some() => None,
            Some(RecoveryTarget::Lsn(target)) => Some(*target),
            Some(_) => None,
            None => Some(Lsn(u64::MAX)),
        }
    }

    /// Does the batch's file actions. They cannot be taken back, so `minRecoveryPoint` covers them first.
    fn finish(&mut self, batch: &mut Batch) -> Result<(), ReplayError> {
        if batch.actions.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let end = batch.end(&self.queue).unwrap_or(self.replayed);
        let ahead = self.certain_until().and_then(|limit| loaded_end(&self.queue, limit)).unwrap_or(end);
        self.recovery.move_min_recovery_point(end, ahead)?;
        // A directory that is not there must come into being later in the WAL, and can only while the directory is not
        // consistent (recovery_create_dbdir).
        let in_place = self.settings.allow_in_place_tablespaces || !self.is_consistent();
        let mut context = actions::Context {
            partitions: &mut self.partitions,
            shared: Shared { rels: &self.rels, files: self.files, settings: self.settings.pages },
            invalid: &mut self.invalid,
            directories: &self.directories,
            missing: if in_place { Missing::Create } else { Missing::Refuse },
        };
        context.discard_relations(&batch.drops);
        for action in batch.actions.drain(..) {
            context.execute(action)?;
        }
        self.stats.actions += started.elapsed();
        Ok(())
    }

    /// Moves past the batch.
    fn retire(&mut self, upto: &[u32]) {
        for &upto in upto {
            let planned = self.queue.front_mut().expect("one stretch for each part");
            if upto > planned.done {
                let last = planned.stretch.place(upto - 1);
                let Span { lsn, end } = planned.stretch.span(last);
                (self.last_record, self.used, self.replayed) = (lsn, planned.stretch.used(last).end, end);
                self.stats.records += u64::from(upto - planned.done);
                planned.done = upto;
            }
            if planned.done as usize == planned.stretch.places().len() {
                let planned = self.queue.pop_front().expect("not empty");
                self.loader.recycle(planned);
            }
        }
    }

    /// Once the directory is consistent, no record may refer to a page that does not exist
    /// (`XLogCheckInvalidPages`).
    fn check_invalid(&self) -> Result<(), ReplayError> {
        match self.first_invalid_page() {
            Some(page) if self.is_consistent() => Err(ReplayError::CorruptWal(format!(
                "at {}: WAL contains references to invalid pages, the first is {page}",
                self.replayed
            ))),
            _ => Ok(()),
        }
    }

    /// Whether the directory is consistent where it stands.
    pub fn is_consistent(&self) -> bool {
        self.recovery.is_consistent(self.globals.backup(), self.replayed)
    }

    /// Whether a server may open the directory where it stands: the end of the base backup is passed, and so is where
    /// the directory stood before; in crash recovery that is at the end of `pg_wal` only.
    pub fn may_end_here(&self) -> bool {
        match self.recovery.is_archive_recovery() {
            true => self.is_consistent(),
            false => !self.globals.backup().is_open() && self.invalid.is_empty(),
        }
    }

    /// The first of the pages that records referred to and that are missing without explanation.
    pub fn first_invalid_page(&self) -> Option<String> {
        self.invalid.first().map(|key| page_name(&self.rels.fork(key.fork()), key.block()))
    }

    /// Begins a restartpoint if one is due, or gets on with the one that is under way: for as long as the last batch took, or a
    /// moment, so that replay hardly waits for it, and it is done after few batches however large they are.
    fn work_on_restartpoint(&mut self, batch_took: Duration) -> Result<(), ReplayError> {
        if self.recovery.must_restart_here() && self.invalid.is_empty() {
            self.restartpoint(false)?;
            self.source.note_restartpoint(self.recovery.control().checkpoint_copy.redo);
            return Ok(());
        }
        if self.spread.is_none() {
            let due = self.recovery.due_restartpoint(self.replayed).filter(|_| self.invalid.is_empty());
            self.spread = due.map(Spread::new);
            return Ok(());
        }
        let started = Instant::now();
        let time = batch_took.max(LEAST_RESTARTPOINT_STEP);
        while self.step_restartpoint()? && started.elapsed() < time {}
        Ok(())
    }

    /// Does one step of the restartpoint that is under way. Whether there is another to do now.
    fn step_restartpoint(&mut self) -> Result<bool, ReplayError> {
        let Some(spread) = &mut self.spread else { return Ok(false) };
        let started = Instant::now();
        match spread.step(self.files)? {
            Step::Write(partitions) => {
                self.recovery.ensure_min_recovery_point(self.replayed)?;
                self.write_back(partitions)?;
                self.stats.write += started.elapsed();
                Ok(true)
            }
            Step::Wait => Ok(false),
            Step::Done => {
                let checkpoint = spread.checkpoint;
                self.spread = None;
                self.recovery.ensure_min_recovery_point(self.replayed)?;
                self.recovery.conclude(&mut self.globals, Some(checkpoint), self.replayed, false)?;
                self.stats.restartpoints += 1;
                self.stats.sync += started.elapsed();
                self.source.note_restartpoint(checkpoint.body.redo);
                Ok(false)
            }
        }
    }

    /// Writes the pages of some partitions.
    fn write_back(&mut self, partitions: Range<usize>) -> Result<(), ReplayError> {
        let shared = Shared { rels: &self.rels, files: self.files, settings: self.settings.pages };
        let written = self.partitions[partitions]
            .par_iter_mut()
            .map(|partition| partition.write_back(&shared, |_| true))
            .try_reduce(|| 0, |a, b| Ok(a + b))?;
        self.stats.pages_written += written;
        Ok(())
    }

    /// Writes all that was replayed to the directory, durably. `finished`: nothing follows, hand over.
    pub fn restartpoint(&mut self, finished: bool) -> Result<(), ReplayError> {
        if let Some(mut spread) = self.spread.take() {
            spread.join()?;
        }
        let started = Instant::now();
        self.recovery.ensure_min_recovery_point(self.replayed)?;
        self.write_back(0..PARTITIONS)?;
        self.stats.write += started.elapsed();
        let started = Instant::now();
        let eligible = self.invalid.is_empty();
        self.recovery.restartpoint(&mut self.globals, self.files, self.replayed, eligible, finished)?;
        self.stats.restartpoints += 1;
        self.stats.sync += started.elapsed();
        Ok(())
    }

    /// PostgreSQL is to find the target at the last record that was replayed, and must replay that again.
    pub fn keep_target(&mut self) {
        self.recovery.keep_last_record(self.replayed);
    }
}
