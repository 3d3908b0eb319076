//! The engine: takes planned stretches in batches through the partitions, and does what is not a page in its place.
//!
//! A batch is a run of records without anything that pages of it must not be exchanged with. All its page
//! operations are done first, then its changes of free space maps, then its file actions. Then its end is where the
//! directory stands, and [`crate::restartpoint`] may write it down.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use walrider_datadir::config;
use walrider_datadir::directories::{Directories, Missing};
use walrider_datadir::relation::RelationFiles;
use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::history::TimelineHistory;
use walrider_layout::{BLCKSZ, Lsn, RelFileLocator, TimelineId};
use walrider_store::read::ReadWal;
use walrider_wal::decode::{Span, WalFormat};

use crate::actions;
use crate::base::{Base, Unchanged};
use crate::batch::{Batch, loaded_end};
use crate::cuts::Lengths;
use crate::error::ReplayError;
use crate::feed::Feed;
use crate::globals::Globals;
use crate::load::Loader;
use crate::pages::{Pages, is_small};
use crate::partition::{PageSettings, Part};
use crate::plan::Planned;
use crate::restartpoint::Recovery;
use crate::sequence::{Before, Sequencer};
use crate::shares::MemoryShares;
use crate::speed::write_speed;
use crate::spill::{Spill, SpillSettings};
use crate::spread::{Spread, Step};
use crate::stages::Stage;
use crate::startup::TEMPORARY_FILES;
use crate::stats::Stats;
use crate::target::RecoveryStop;
use crate::worth::{Changed, QUICKEST, is_enough_apart};

/// Least time for a restartpoint between two batches.
const LEAST_RESTARTPOINT_STEP: Duration = Duration::from_millis(2);

/// What the engine works with.
pub struct Settings {
    /// What the work on pages depends on.
    pub pages: PageSettings,
    /// How memory is shared.
    pub shares: MemoryShares,
    /// Bytes of WAL in one stretch.
    pub window_bytes: u64,
    /// Where to stop.
    pub stop: RecoveryStop,
    /// Where batches go that are larger than memory.
    pub spill: SpillSettings,
    /// Relation files that are not in the directory yet.
    pub base: Option<Arc<dyn Base>>,
    /// `allow_in_place_tablespaces`: tablespaces may be directories in `pg_tblspc`.
    pub allow_in_place_tablespaces: bool,
    /// Where tablespaces go that are made, instead of their locations.
    pub new_tablespaces: Option<PathBuf>,
}

/// A batch that is larger than memory, while its records are put apart.
struct Spilling {
    spill: Spill,
    /// What is to be done after its pages.
    batch: Batch,
    /// How long that has taken.
    took: Duration,
    /// The last of its records: where it begins, ends, and ends before what an `XLOG_SWITCH` leaves unused.
    last: Option<(Lsn, Lsn, Lsn)>,
    records: u64,
    /// What that changes of relations of a backup, which are still to come.
    changed: Changed,
}

/// What an observer of the progress wants.
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
    feed: Feed<'a>,
    sequencer: Sequencer<'a>,
    pages: Pages<'a>,
    directories: Directories,
    /// `allow_in_place_tablespaces`.
    in_place_tablespaces: bool,
    /// A restartpoint that is being made.
    spread: Option<Spread>,
    /// Where batches go that are larger than memory.
    spill: SpillSettings,
    /// One that is on its way there.
    spilling: Option<Spilling>,
    /// Relation files that are not in the directory yet: before anything is done to them, they come there.
    base: Option<Arc<dyn Base>>,
    /// The directory was found consistent, and checked then.
    was_consistent: bool,
    /// End of the last record that was replayed (`lastReplayedEndRecPtr`).
    replayed: Lsn,
    /// The same, but before what an `XLOG_SWITCH` leaves unused.
    used: Lsn,
    /// Where it begins (`lastReplayedReadRecPtr`); not valid before the first.
    last_record: Lsn,
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
        let (replayed, major) = (loader.position(), loader.format().major);
        Engine {
            feed: Feed::new(source, loader, settings.window_bytes, settings.shares.batch_bytes),
            directories: recovery.data_dir().directories().with_new_tablespaces(settings.new_tablespaces),
            sequencer: Sequencer::new(source, major, settings.stop, globals, recovery),
            pages: Pages::new(settings.pages, files, settings.shares),
            in_place_tablespaces: settings.allow_in_place_tablespaces,
            spread: None,
            spill: settings.spill,
            spilling: None,
            base: settings.base,
            was_consistent: false,
            replayed,
            used: replayed,
            last_record: Lsn::INVALID,
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

    /// How WAL is checked.
    pub fn format(&self) -> &WalFormat {
        self.feed.loader.format()
    }

    /// Where replay needs more WAL to go on: past [`Engine::replayed`] if a record was found in part.
    pub fn needed(&self) -> Lsn {
        self.feed.needed.max(self.replayed)
    }

    /// Whether to look, at the end of valid WAL, if it goes on past that, and is damaged there. At first it is.
    pub fn look_past(&mut self, look: bool) {
        self.feed.looks_past = look;
    }

    /// Lets transactions that were committed later than this wait (`recoveryApplyDelay`); [`Engine::run`] stops before them.
    pub fn commits_wait_from(&mut self, time: Option<TimestampTz>) {
        self.sequencer.commits_until = time;
    }

    /// Follows these timelines from now on.
    pub fn set_history(&mut self, history: TimelineHistory) {
        self.sequencer.recovery.set_history(history);
    }

    /// Timeline of the last record that was replayed.
    pub fn timeline(&self) -> TimelineId {
        self.sequencer.recovery.timeline()
    }

    /// What is known about recovery.
    pub fn recovery(&self) -> &Recovery {
        &self.sequencer.recovery
    }

    /// Both sides of what a restartpoint writes down.
    pub(crate) fn globals_and_recovery(&mut self) -> (&mut Globals, &mut Recovery) {
        (&mut self.sequencer.globals, &mut self.sequencer.recovery)
    }

    /// Replays until there is a reason to stop. At the end of WAL it can be called again, when there is more.
    ///
    /// # Errors
    /// What [`ReplayError`] lists. No page of the batch that failed has been written, unless memory was short; files may
    /// have been made, or made longer.
    pub fn run(&mut self, progress: &mut dyn FnMut(&Stats, Lsn) -> Flow) -> Result<Stop, ReplayError> {
        loop {
            if !self.feed.fill(self.pages.rels(), &mut self.stats) {
                if let Some(spilling) = self.spilling.take() {
                    self.sweep(spilling)?;
                    progress(&self.stats, self.replayed);
                }
                self.unpack()?;
                let restartpoints = self.stats.restartpoints;
                self.work_on_restartpoint(Duration::ZERO)?;
                if !self.last_record.is_valid() {
                    // A backup from a standby may begin and end at one shutdown checkpoint, with nothing to replay (before its loop,
                    // PerformWalRecovery calls CheckRecoveryConsistency).
                    self.sequencer.globals.passed(self.replayed);
                    // Nobody was told yet where the directory stands.
                    self.tell_where();
                    progress(&self.stats, self.replayed);
                } else if self.stats.restartpoints > restartpoints {
                    progress(&self.stats, self.replayed);
                }
                return self.feed.ending(self.recovery().is_archive_recovery());
            }
            let batch_started = Instant::now();
            let may_spill = self.spilling.is_some() || self.is_worth_spilling();
            let stretches = self.feed.stretches;
            if may_spill && self.spilling.is_none() {
                // Whether a truncation ends the batch depends on what files have.
                self.pages.write_upper_levels(&mut self.sequencer.recovery, self.replayed)?;
            }
            let begun = self.spilling.as_mut().map(|spilling| std::mem::take(&mut spilling.batch)).unwrap_or_default();
            let base = self.base.as_deref();
            let lengths = may_spill.then(|| Lengths {
                rels: self.pages.rels(),
                files: self.pages.files(),
                base,
                env: self.pages.env(),
            });
            let before = Before { replayed: self.replayed, lengths };
            let mut batch = self.sequencer.sequence(&self.feed.queue, begun, &before, &mut self.stats)?;
            assert!(
                !batch.upto.is_empty() && batch.upto.len() <= self.feed.queue.len(),
                "a batch is of what is loaded"
            );
            let is_spilled = self.spilling.is_some() || self.base.is_some() || !batch.cuts.is_empty();
            let stop = if is_spilled || (may_spill && !batch.ends) {
                self.spill(batch, progress)?
            } else {
                self.apply_batch(&mut batch, stretches)?;
                let flow = progress(&self.stats, self.replayed);
                batch.stop.or_else(|| (flow == Flow::Stop).then_some(Stop::Interrupted))
            };
            if let Some(stop) = stop {
                return Ok(stop);
            }
            if self.spilling.is_none() {
                self.work_on_restartpoint(batch_started.elapsed())?;
            }
        }
    }

    /// Has the relation files come into the directory as they are, if they are not there yet.
    fn unpack(&mut self) -> Result<(), ReplayError> {
        match self.base.take() {
            Some(base) => {
                base.unpack(&Unchanged)?;
                Ok(config::let_servers_in(self.recovery().data_dir().path())?)
            }
            None => Ok(()),
        }
    }

    /// Replays a batch that fits into memory; `stretches` make one of the size that is aimed at.
    fn apply_batch(&mut self, batch: &mut Batch, stretches: usize) -> Result<(), ReplayError> {
        // Where memory is short, it is the records of one batch that need it most.
        let ahead = if self.pages.is_short() { 0 } else { stretches };
        let missing = ahead.saturating_sub(self.feed.queue.len() - batch.upto.len());
        let was_short = self.pages.is_short();
        let end = batch.end(&self.feed.queue).unwrap_or(self.replayed);
        let loaded = self.apply(batch, missing)?;
        if self.pages.is_short() && !was_short {
            self.feed.loader.drop_spare();
            self.stats.pages_evicted += self.pages.empty(&mut self.sequencer.recovery, end)?;
        }
        self.feed.queue.extend(loaded);
        self.finish(batch)?;
        let is_all = self.feed.queue.len() == batch.upto.len();
        // Where memory was short, and far less comes now, its share of memory goes back to pages.
        if self.pages.is_short() && is_all && batch.upto.len() <= stretches / 8 {
            self.feed.limit_batches(2 * batch.upto.len() as u64 * self.feed.window_bytes());
            self.share_with_batch(batch.upto.len(), end)?;
        } else if batch.upto.len() == stretches {
            let visited_bytes = (self.pages.visited() * BLCKSZ) as u64;
            self.feed.size_batches(visited_bytes, self.pages.most_batch_bytes());
            self.share_with_batch(stretches, end)?;
        }
        self.retire(&batch.upto);
        self.batch_done()
    }

    /// Where memory is short, shares it between pages and the next batch; the last one was of so many stretches, and ended at `end`.
    fn share_with_batch(&mut self, stretches: usize, end: Lsn) -> Result<(), ReplayError> {
        if self.pages.is_short() {
            let growth = self.feed.stretches as f64 / stretches as f64;
            let loaded = self.feed.queue.iter().map(Planned::held_bytes).sum();
            let recovery = &mut self.sequencer.recovery;
            self.stats.pages_evicted += self.pages.share_with_batch(loaded, growth, recovery, end)?;
            self.feed.room = Some(self.pages.short());
        }
        Ok(())
    }

    /// The directory stands at the end of a batch.
    fn batch_done(&mut self) -> Result<(), ReplayError> {
        self.sequencer.globals.passed(self.replayed);
        self.check_invalid()?;
        if !self.was_consistent && self.is_consistent() {
            self.was_consistent = true;
            if !self.in_place_tablespaces {
                self.directories.refuse_tablespaces_without_links()?;
            }
        }
        self.tell_where();
        Ok(())
    }

    /// Whether pages are visited less often if the next batch becomes larger than memory.
    fn is_worth_spilling(&mut self) -> bool {
        if self.base.is_some() {
            return true;
        }
        if self.spill.file_bytes == 0 || self.sequencer.commits_until.is_some() {
            return false;
        }
        if self.spill.always {
            return true;
        }
        let queue = &self.feed.queue;
        // A standby that keeps up has less, and must not wait for more.
        if queue.len() < self.feed.stretches {
            return false;
        }
        let whole = |planned| Part::new(planned, planned.done, planned.stretch.places().len() as u32);
        let parts: Vec<Part<'_>> = queue.iter().map(whole).collect();
        let is_worth = self.pages.is_worth_spilling(&parts, queue.len() as u64 * self.feed.window_bytes());
        // A batch that was given most of the memory leaves none to be put apart.
        is_worth && !self.feed.limit_batches(self.pages.shares().batch_bytes)
    }

    /// Puts the batch apart, to go on with it; does what has come together if it ends here, or there is no room for more.
    /// Returns why replay stops.
    fn spill(
        &mut self,
        batch: Batch,
        progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
    ) -> Result<Option<Stop>, ReplayError> {
        let mut spilling = match self.spilling.take() {
            Some(spilling) => spilling,
            None => {
                // Its memory is for the batch now.
                self.stats.pages_evicted += self.pages.empty(&mut self.sequencer.recovery, self.replayed)?;
                let spill = match &self.base {
                    Some(base) => Spill::of_base(&self.spill, base.bytes())?,
                    None => Spill::of_files(&self.spill)?,
                };
                Spilling {
                    spill,
                    batch: Batch::default(),
                    took: Duration::ZERO,
                    last: None,
                    records: 0,
                    changed: Changed::default(),
                }
            }
        };
        spilling.batch = batch;
        let spill_stage = self.stats.stages.enter(Stage::Spill);
        let Feed { source, loader, queue, stretches, .. } = &mut self.feed;
        let parts = spilling.batch.parts(queue);
        let changed_bytes = self.base.is_some().then(|| self.pages.changed_bytes(&parts));
        // Reading waits for one disk, and putting apart for another.
        let (rels, missing) = (self.pages.rels().clone(), stretches.saturating_sub(queue.len() - parts.len()));
        let take = || {
            let started = Instant::now();
            spilling.spill.take(&parts, &rels).map(|()| started.elapsed())
        };
        let (took, loaded) = rayon::join(take, || loader.load_ready(missing, *source, &rels));
        spilling.took += took?;
        drop((parts, spill_stage));
        self.feed.queue.extend(loaded);
        let from = spilling.last.map_or(self.replayed, |(_, end, _)| end);
        self.feed.retire(&spilling.batch.upto, |stretch, last, records| {
            let Span { lsn, end } = stretch.span(last);
            spilling.last = Some((lsn, end, stretch.used(last).end));
            spilling.records += u64::from(records);
        });
        let to = spilling.last.map(|(_, end, _)| end);
        if let (Some(bytes), Some(to)) = (changed_bytes, to) {
            spilling.changed.note(bytes, to.0 - from.0);
        }
        self.stats.spilled_to = to;
        self.stats.spilled_bytes = self.stats.spilled_bytes.max(spilling.spill.file_used());
        let flow = progress(&self.stats, self.replayed);
        let ends = spilling.batch.ends || spilling.spill.is_full() || flow == Flow::Stop;
        if ends || self.relations_had_better_come(&spilling) {
            let stop = spilling.batch.stop.take();
            self.sweep(spilling)?;
            let flow = if flow == Flow::Stop { flow } else { progress(&self.stats, self.replayed) };
            return Ok(stop.or_else(|| (flow == Flow::Stop).then_some(Stop::Interrupted)));
        }
        self.spilling = Some(spilling);
        Ok(None)
    }

    /// Whether relations that are still to come had better do so now, and get the rest of the WAL in memory: to put as much of it apart took
    /// so long that what this saves, to write them once more, would have taken less; and they fit, or pages are changed so seldom that they
    /// need not.
    fn relations_had_better_come(&mut self, spilling: &Spilling) -> bool {
        let bytes = self.base.as_ref().map_or(0, |base| base.bytes());
        if bytes == 0 || self.spill.always {
            return false;
        }
        let fit = bytes <= self.pages.shares().page_bytes / 2;
        let is_better = |speed| {
            let seldom = || spilling.changed.is_seldom(speed, rayon::current_num_threads());
            is_enough_apart(spilling.took, bytes, speed) && (fit || seldom())
        };
        if self.stats.write_bytes_per_second == 0 && is_better(QUICKEST) {
            let directory = self.recovery().data_dir().path().join(TEMPORARY_FILES);
            // Where that cannot be tried, pages had better be written once.
            self.stats.write_bytes_per_second = write_speed(&directory, self.spill.write_bytes).unwrap_or(1);
        }
        is_better(self.stats.write_bytes_per_second)
    }

    /// Does what a spilled batch has come to: its pages, each once, then its file actions. Then its end is where the directory stands.
    fn sweep(&mut self, spilling: Spilling) -> Result<(), ReplayError> {
        let Spilling { spill, mut batch, last, records, .. } = spilling;
        self.feed.loader.drop_spare();
        let (lsn, end, used) = last.unwrap_or((self.last_record, self.replayed, self.used));
        let (recovery, stats) = (&mut self.sequencer.recovery, &mut self.stats);
        let needless = self.pages.needless(&batch);
        let base = self.base.take();
        self.pages.sweep(spill, base.as_deref(), &needless, end, recovery, stats)?;
        if base.is_some() {
            config::let_servers_in(recovery.data_dir().path())?;
            stats.unpacked_at = Some(end);
        }
        batch.upto.clear();
        self.do_actions(&mut batch, end)?;
        (self.last_record, self.replayed, self.used) = (lsn, end, used);
        self.stats.records += records;
        self.stats.spilled_to = None;
        self.stats.sweeps += 1;
        self.batch_done()
    }

    /// Does the batch's page operations, and loads `missing` more stretches meanwhile.
    fn apply(&mut self, batch: &Batch, missing: usize) -> Result<Vec<Planned>, ReplayError> {
        let Feed { source, loader, queue, .. } = &mut self.feed;
        let parts = batch.parts(queue);
        let end = batch.end(queue).unwrap_or(self.replayed);
        let rels = self.pages.rels().clone();
        let small = is_small(&parts);
        let (pages, recovery, stats) = (&mut self.pages, &mut self.sequencer.recovery, &mut self.stats);
        let mut apply = || pages.apply(&parts, &batch.drops, end, recovery, stats);
        let (applied, loaded) = match small {
            true => (apply(), Vec::new()),
            false => rayon::join(apply, || loader.load_ready(missing, *source, &rels)),
        };
        applied.map(|()| loaded)
    }

    /// Does the batch's file actions. They cannot be taken back, so `minRecoveryPoint` covers them first.
    fn finish(&mut self, batch: &mut Batch) -> Result<(), ReplayError> {
        let end = batch.end(&self.feed.queue).unwrap_or(self.replayed);
        self.do_actions(batch, end)
    }

    /// Does the file actions of a batch that ends at `end`.
    fn do_actions(&mut self, batch: &mut Batch, end: Lsn) -> Result<(), ReplayError> {
        if batch.actions.is_empty() {
            return Ok(());
        }
        let _actions = self.stats.stages.enter(Stage::Actions);
        let ahead = self.sequencer.certain_until().and_then(|limit| loaded_end(&self.feed.queue, limit)).unwrap_or(end);
        self.sequencer.recovery.move_min_recovery_point(end, ahead)?;
        // A directory that is not there must come into being later in the WAL, and can only while the directory is not
        // consistent (recovery_create_dbdir).
        let in_place = self.in_place_tablespaces || !self.is_consistent();
        let missing = if in_place { Missing::Create } else { Missing::Refuse };
        let (partitions, shared, invalid) = self.pages.split();
        let directories = &self.directories;
        let mut context = actions::Context { partitions, shared, invalid, directories, missing };
        context.discard_relations(&batch.drops);
        for action in batch.actions.drain(..) {
            context.execute(action)?;
        }
        Ok(())
    }

    /// Moves past the batch.
    fn retire(&mut self, upto: &[u32]) {
        self.feed.retire(upto, |stretch, last, records| {
            let Span { lsn, end } = stretch.span(last);
            assert!(self.replayed <= lsn && lsn < end, "{} then {lsn} to {end}", self.replayed);
            (self.last_record, self.used, self.replayed) = (lsn, stretch.used(last).end, end);
            self.stats.records += u64::from(records);
        });
    }

    /// Once the directory is consistent, no record may refer to a page that does not exist
    /// (`XLogCheckInvalidPages`).
    fn check_invalid(&self) -> Result<(), ReplayError> {
        match self.pages.first_invalid() {
            Some(page) if self.is_consistent() => Err(ReplayError::CorruptWal(format!(
                "at {}: WAL contains references to invalid pages, the first is {page}",
                self.replayed
            ))),
            _ => Ok(()),
        }
    }

    /// Puts into the statistics where the directory stands.
    fn tell_where(&mut self) {
        (self.stats.consistent, self.stats.timeline) = (self.is_consistent(), self.timeline());
        self.stats.full_page_writes_off = self.sequencer.globals.full_page_writes_off();
    }

    /// Whether the directory is consistent where it stands.
    pub fn is_consistent(&self) -> bool {
        self.sequencer.is_consistent(self.replayed)
    }

    /// Whether a server may open the directory where it stands: the end of the base backup is passed, and so is where
    /// the directory stood before; in crash recovery that is at the end of `pg_wal` only. A backup whose label does not say
    /// how it was taken counts as consistent before its end, but recovery may not end there (`FinishWalRecovery` and
    /// `StartupXLOG`, "WAL ends before end of online backup").
    pub fn may_end_here(&self) -> bool {
        let is_reached = match self.sequencer.recovery.is_archive_recovery() {
            true => self.is_consistent(),
            false => self.pages.first_invalid().is_none(),
        };
        is_reached && !self.sequencer.globals.backup().is_open()
    }

    /// The first of the pages that records referred to and that are missing without explanation.
    pub fn first_invalid_page(&self) -> Option<String> {
        self.pages.first_invalid()
    }

    /// Begins a restartpoint if one is due, or gets on with the one that is under way: for as long as the last batch took, or a
    /// moment, so that replay hardly waits for it, and it is done after few batches however large they are.
    fn work_on_restartpoint(&mut self, batch_took: Duration) -> Result<(), ReplayError> {
        if self.sequencer.recovery.must_restart_here() && self.pages.first_invalid().is_none() {
            self.restartpoint(false)?;
            self.feed.source.note_restartpoint(self.sequencer.recovery.control().checkpoint_copy.redo);
            return Ok(());
        }
        if self.spread.is_none() {
            let due = self
                .sequencer
                .recovery
                .due_restartpoint(self.replayed)
                .filter(|_| self.pages.first_invalid().is_none());
            self.spread = due.map(Spread::new);
            return Ok(());
        }
        let started = Instant::now();
        let time = batch_took.max(LEAST_RESTARTPOINT_STEP);
        while self.step_restartpoint()? && started.elapsed() < time {}
        Ok(())
    }

    /// Gets on with a restartpoint where there is nothing to replay, until `busy` or until it has to wait.
    ///
    /// # Errors
    /// When something could not be written or made durable.
    pub fn rest(&mut self, busy: impl Fn() -> bool) -> Result<(), ReplayError> {
        while !busy() && self.step_restartpoint()? {}
        Ok(())
    }

    /// Does one step of the restartpoint that is under way. Whether there is another to do now.
    fn step_restartpoint(&mut self) -> Result<bool, ReplayError> {
        let Some(spread) = &mut self.spread else { return Ok(false) };
        match spread.step(self.pages.files())? {
            Step::Write(partitions) => {
                let _write = self.stats.stages.enter(Stage::Write);
                let recovery = &mut self.sequencer.recovery;
                self.stats.pages_written += self.pages.write_back(partitions, recovery, self.replayed)?;
                Ok(true)
            }
            Step::Wait => Ok(false),
            Step::Done => {
                let _sync = self.stats.stages.enter(Stage::Sync);
                let checkpoint = spread.checkpoint;
                self.spread = None;
                self.sequencer.recovery.ensure_min_recovery_point(self.replayed)?;
                self.sequencer.recovery.conclude(
                    &mut self.sequencer.globals,
                    Some(checkpoint),
                    self.replayed,
                    false,
                )?;
                self.stats.restartpoints += 1;
                self.feed.source.note_restartpoint(checkpoint.body.redo);
                Ok(false)
            }
        }
    }

    /// Writes all that was replayed to the directory, durably. `finished`: nothing follows, hand over.
    pub fn restartpoint(&mut self, finished: bool) -> Result<(), ReplayError> {
        if let Some(mut spread) = self.spread.take() {
            spread.join()?;
        }
        let writing = self.stats.stages.enter(Stage::Write);
        let recovery = &mut self.sequencer.recovery;
        self.stats.pages_written += self.pages.write_all(recovery, self.replayed)?;
        if finished {
            // To give memory back takes a while, too, and the device is busy now.
            self.pages.empty(recovery, self.replayed)?;
        }
        drop(writing);
        let _sync = self.stats.stages.enter(Stage::Sync);
        let eligible = self.pages.first_invalid().is_none();
        self.sequencer.recovery.restartpoint(
            &mut self.sequencer.globals,
            self.pages.files(),
            self.replayed,
            eligible,
            finished,
        )?;
        self.stats.restartpoints += 1;
        Ok(())
    }

    /// PostgreSQL is to find the target at the last record that was replayed, and must replay that again.
    pub fn keep_target(&mut self) {
        self.sequencer.recovery.keep_last_record(self.replayed);
    }
}
