//! From a data directory and a source of WAL to a running engine, and from its end to a directory that PostgreSQL
//! takes over (`InitWalRecovery` in `access/transam/xlogrecovery.c`, `StartupXLOG` in `access/transam/xlog.c`,
//! PostgreSQL 18). Each stage is a type, and what it may change in the directory stands there: `Opened` and `Planned`
//! nothing, `Entered` whatever recovery writes.

mod beginning;
mod options;
mod overrides;

use std::fs;
use std::sync::Arc;
use std::time::Instant;

use walrider_datadir::config::{self, Config, RESTORING};
use walrider_datadir::durable::{list_dir, unlink};
use walrider_datadir::held::shown;
use walrider_datadir::recovery_settings::{RecoverySettings, RecoveryTarget, TargetAction, TargetTimeline};
use walrider_datadir::relation::RelationFiles;
use walrider_datadir::wal_dir::EARLY_PREFIX;
use walrider_datadir::wal_dir::WalDir;
use walrider_datadir::{DataDir, DataDirError};
use walrider_layout::control::DbState;
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};
use walrider_redo::Env;
use walrider_store::driver::FetchStats;
use walrider_store::foreign_archive;
use walrider_store::read::ReadWal;
use walrider_store::restore::remove_old_fetches;
use walrider_store::source::{End, Source};
use walrider_wal::decode::WalFormat;

use self::beginning::Beginning;
pub use self::options::{NamedArchive, Options, Promotion, SpillOptions, Summary};
use self::overrides::{override_settings, places, remove_targets, write_settings};
use crate::end_of_recovery::{Promoted, end_again, end_of_recovery};
use crate::engine::{Engine, Flow, Settings, Stop};
use crate::error::ReplayError;
use crate::follow::{Followed, follow, look_for_timeline};
use crate::globals::{GlobalError, Globals, WAL_LEVEL_MINIMAL};
use crate::load::Loader;
use crate::partition::PageSettings;
use crate::restartpoint::Recovery;
use crate::shares::{MemoryShares, OTHER_BYTES};
use crate::spill::SpillSettings;
use crate::stages::Stage;
use crate::stats::Stats;
use crate::target::RecoveryStop;
use crate::upstream::AsIncoming;

/// Most WAL in one batch: the more, the more of a page's changes are done in one visit, while it is in the processor's
/// cache. Four times as much gained nothing: the memory for it must be touched first, too.
const MAX_BATCH_BYTES: u64 = 64 << 20;
/// Most WAL in one stretch: small enough that two threads share a batch evenly.
const MAX_WINDOW_BYTES: u64 = 2 << 20;
/// Least WAL in one stretch.
const MIN_WINDOW_BYTES: u64 = 128 << 10;

/// Replays WAL onto a data directory and hands it over.
///
/// # Errors
/// What [`ReplayError`] lists. Unless it says otherwise, the same call can be repeated, or PostgreSQL started.
pub fn replay(options: &Options, progress: &mut dyn FnMut(&Stats, Lsn) -> Flow) -> Result<Summary, ReplayError> {
    let started = Instant::now();
    let opened = Opened::open(options)?;
    if opened.needs_nothing() {
        config::let_servers_in(opened.data_dir.path())?;
        return Ok(Summary::nothing_to_do(&opened.data_dir, started));
    }
    let planned = opened.plan()?;
    if let Some(promoted) = planned.end_again()? {
        return Ok(Summary { promoted: Some(promoted), ..Summary::nothing_to_do(&planned.opened.data_dir, started) });
    }
    planned.enter()?.run(started, progress)
}

/// The data directory is locked and read. Nothing in it has changed.
struct Opened<'o> {
    options: &'o Options,
    data_dir: DataDir,
    settings: RecoverySettings,
    /// A signal file, or the command line, asks for recovery from an archive.
    archive_recovery: bool,
}

impl<'o> Opened<'o> {
    fn open(options: &'o Options) -> Result<Opened<'o>, ReplayError> {
        if options.base.is_none() && config::is_half_restored(&options.data_dir)? {
            return Err(ReplayError::Refused(format!(
                "a restore into \"{}\" was interrupted, and it lacks files: run walrider restore again, with --start-over",
                shown(&options.data_dir).display()
            )));
        }
        let data_dir = DataDir::open(&options.data_dir)?;
        if options.base.is_none() {
            // Of a restore that was stopped when all was there.
            unlink(&data_dir.path().join(RESTORING))?;
        }
        if let Some(upstream) = &options.upstream {
            upstream.admit(&data_dir)?;
        }
        let config = Config::read(data_dir.path(), options.config_file.as_deref())?;
        let mut settings = RecoverySettings::from_config(&config, data_dir.control().major)?;
        if let Some(command) = &options.restore_command {
            settings.restore_command = Some(command.clone()).filter(|command| !command.is_empty());
        }
        let archive_recovery = data_dir.signals().archive_recovery() || asks_for_archive_recovery(options, &data_dir);
        Ok(Opened { options, data_dir, settings, archive_recovery })
    }

    /// A primary that was shut down cleanly needs no recovery, unless somebody asks for it (`InitWalRecovery`).
    fn needs_nothing(&self) -> bool {
        let was_shut_down = self.data_dir.control().state == DbState::ShutDown;
        was_shut_down && !self.archive_recovery && self.data_dir.label().is_none()
    }

    /// Decides what is replayed, from where, and to where.
    fn plan(mut self) -> Result<Planned<'o>, ReplayError> {
        let Opened { options, data_dir, settings, archive_recovery } = &mut self;
        refuse_crashed_without_end(data_dir, *archive_recovery)?;
        if !*archive_recovery {
            // Left over from an earlier recovery; in crash recovery no server looks at it (recoveryStopsBefore).
            settings.target = None;
        }
        if *archive_recovery && data_dir.control().wal_level == WAL_LEVEL_MINIMAL {
            return Err(ReplayError::Refused(GlobalError::MinimalWal.to_string()));
        }
        if let Some(wal) = &options.wal {
            foreign_archive::refuse(wal)?;
            if !options.follow {
                foreign_archive::refuse_empty(wal)?;
            }
        }
        let wanted = override_settings(options, settings)?;
        let control = data_dir.control();
        let format = WalFormat {
            major: control.major,
            segment_size: control.segment_size,
            system_identifier: Some(control.system_identifier),
        };
        let source = Source::new(
            places(options, data_dir, settings, *archive_recovery),
            control.segment_size,
            TimelineHistory::alone(TimelineId(1)),
        )
        .brought_by(options.upstream.clone().map(AsIncoming::of));
        remove_old_fetches(data_dir.path())?;
        if settings.target.is_some() {
            WalDir::new(data_dir.path(), control.segment_size).undo_beginning(current_timeline(data_dir))?;
        }
        let history = choose_history(&source, data_dir, settings, *archive_recovery)?;
        let promotes = promotes(options, settings);
        if promotes {
            refuse_what_a_standby_holds(data_dir)?;
        }
        Ok(Planned { opened: self, wanted, source, history, format, promotes })
    }
}

/// It is known what is replayed, from where, and to where. In the directory nothing has changed.
struct Planned<'o> {
    opened: Opened<'o>,
    /// What PostgreSQL must be told to finish at the same place.
    wanted: Vec<(String, String)>,
    source: Source,
    history: TimelineHistory,
    format: WalFormat,
    /// Recovery ends where replay does.
    promotes: bool,
}

impl<'o> Planned<'o> {
    /// Finishes a promotion that was stopped at its end, if there was one.
    fn end_again(&self) -> Result<Option<Promoted>, ReplayError> {
        let Opened { data_dir, settings, .. } = &self.opened;
        let mut unset = || remove_targets(data_dir.path(), &self.wanted).map(drop);
        match self.promotes {
            true => end_again(data_dir, &self.source, &self.format, settings, self.history.target(), &mut unset),
            false => Ok(None),
        }
    }

    /// Finds the beginning, and writes into the directory that it is in recovery from there on.
    fn enter(self) -> Result<Entered<'o>, ReplayError> {
        let Planned { opened, wanted, source, history, format, promotes } = self;
        let Opened { options, mut data_dir, settings, archive_recovery } = opened;
        source.set_history(history.clone());
        if archive_recovery && options.upstream.is_none() {
            keep_histories(&source, &data_dir)?;
        }
        // A backup has an end to reach, whatever asked for its recovery (InArchiveRecovery).
        let in_archive_recovery = archive_recovery || data_dir.label().is_some();
        let begin = Beginning::wait_for(&data_dir, &source, &format, options.upstream.as_deref())?;
        begin.check_history(&data_dir, &history)?;
        source.note_restartpoint(begin.checkpoint.redo);
        let settings_written = if archive_recovery { write_settings(&data_dir, options, &wanted)? } else { Vec::new() };
        begin.enter_recovery(&mut data_dir, in_archive_recovery)?;
        let mut globals = Globals::open(data_dir.path(), data_dir.control(), archive_recovery)
            .map_err(|error| ReplayError::Refused(format!("could not begin at {}: {error}", begin.start)))?;
        globals.remove_stale_files()?;
        if options.base.is_none() {
            config::let_servers_in(data_dir.path())?;
        }
        let files = Arc::new(data_dir.relation_files());
        let recovery = Recovery::new(data_dir, history, begin.checkpoint.timeline, in_archive_recovery)
            .with_restartpoints(options.restartpoints)
            .durable_by(options.upstream.clone());
        let start = begin.start;
        Ok(Entered {
            options,
            settings,
            archive_recovery,
            promotes,
            source,
            format,
            start,
            wanted,
            settings_written,
            globals,
            recovery,
            files,
        })
    }
}

/// The directory says that it is in recovery, and where that begins.
struct Entered<'o> {
    options: &'o Options,
    settings: RecoverySettings,
    archive_recovery: bool,
    promotes: bool,
    source: Source,
    format: WalFormat,
    /// The first record to replay.
    start: Lsn,
    /// What the command line says, as settings; and of these, what was written.
    wanted: Vec<(String, String)>,
    settings_written: Vec<(String, String)>,
    globals: Globals,
    recovery: Recovery,
    files: Arc<RelationFiles>,
}

impl Entered<'_> {
    /// Replays, and hands the directory over.
    fn run(self, started: Instant, progress: &mut dyn FnMut(&Stats, Lsn) -> Flow) -> Result<Summary, ReplayError> {
        let engine_settings = self.engine_settings()?;
        let Entered { options, settings, mut settings_written, archive_recovery, promotes, source, .. } = self;
        let loader = Loader::new(self.format, engine_settings.window_bytes, self.start);
        let mut engine = Engine::new(engine_settings, &source, &self.files, self.globals, self.recovery, loader);
        let (stages, mut waiting) = (engine.stats.stages.clone(), None);
        source.on_wait(move |waits| {
            drop(waiting.take());
            waiting = waits.then(|| stages.enter(Stage::Fetch));
        });
        let redo_started = Instant::now();
        let Followed { stop, promotes: told } = match options.follow {
            true => {
                let latest = archive_recovery && settings.target_timeline == TargetTimeline::Latest;
                follow(&mut engine, &source, latest, options.upstream.clone(), progress)?
            }
            false => {
                let counts = promotes || settings.target.is_some();
                let latest = archive_recovery && settings.target_timeline == TargetTimeline::Latest;
                let stop = run_to_end(&mut engine, &source, latest, counts, progress)?;
                Followed { stop, promotes: false }
            }
        };
        let redo = redo_started.elapsed();
        if !promotes && matches!(stop, Stop::Target) && settings.target_action != TargetAction::Shutdown {
            engine.keep_target();
        }
        let refusal =
            source.refusal(engine.needed()).filter(|_| matches!(stop, Stop::EndOfWal { .. } | Stop::Outage { .. }));
        keep_partial_segments(&source, &engine)?;
        hand_over(&mut engine, &stop, settings.target.as_ref())?;
        // Before it is consistent, the backup's label may ask for older WAL than the control file.
        if !options.follow && engine.may_end_here() {
            let control = engine.recovery().control();
            let wal_dir = WalDir::new(engine.recovery().data_dir().path(), control.segment_size);
            wal_dir.remove_before_gap(control.checkpoint_copy.redo)?;
        }
        let promoted = match stop {
            Stop::Target | Stop::EndOfWal { .. } if promotes || told => {
                let data_dir = engine.recovery().data_dir().path().to_owned();
                let mut unset_targets = || {
                    let removed = remove_targets(&data_dir, &self.wanted)?;
                    settings_written.retain(|(name, _)| !removed.contains(name));
                    Ok(())
                };
                Some(end_of_recovery(&mut engine, &source, &settings, &mut unset_targets)?)
            }
            _ => None,
        };
        let (control, end) = (engine.recovery().control(), engine.replayed());
        let again_bytes = if promoted.is_some() { 0 } else { end.0.saturating_sub(control.checkpoint_copy.redo.0) };
        Ok(Summary {
            stop: Some(stop),
            start: self.start,
            end,
            again_bytes,
            timeline: engine.timeline(),
            checkpoint: control.checkpoint,
            redo,
            total: started.elapsed(),
            promoted,
            settings_written,
            stats: std::mem::take(&mut engine.stats),
            // So many may run, also if there is no command.
            fetch: FetchStats { jobs: options.fetch_jobs, ..source.fetch_stats() },
            refusal,
        })
    }

    /// Memory of a batch that is larger than it: of what the program itself leaves, an eighth gathers what becomes chunks, a
    /// quarter holds them, and another is for the passes; the rest is for the next WAL, and what it is put apart into.
    fn spill_settings(&self) -> Result<SpillSettings, ReplayError> {
        let all = self.options.memory_bytes;
        let memory = all.saturating_sub(OTHER_BYTES).max(all / 2);
        let data_dir = self.recovery.data_dir().path();
        let options = &self.options.spill;
        let directory = options.directory.clone().unwrap_or(data_dir.join(TEMPORARY_FILES));
        let on = if options.directory.is_some() { &directory } else { data_dir };
        let stat = rustix::fs::statvfs(on)
            .map_err(|error| DataDirError::io("look for room in", on.to_owned(), error.into()))?;
        let coming = self.options.base.as_ref().filter(|_| options.directory.is_none()).map_or(0, |base| base.bytes());
        let free = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_sub(coming);
        Ok(SpillSettings {
            file_bytes: options.bytes.unwrap_or(free / 2),
            always: options.always,
            directory,
            memory_bytes: memory / 4,
            gather_bytes: memory / 8,
            // What gathers is gone by then, and so is the WAL that was loaded.
            pass_bytes: (memory / 8 * 3 / rayon::current_num_threads() as u64).max(1 << 20) as usize,
            write_bytes: memory / 16,
        })
    }

    fn engine_settings(&self) -> Result<Settings, ReplayError> {
        let control = self.recovery.control();
        let (window_bytes, shares) = share_memory(self.options.memory_bytes);
        let hint_bits_are_logged = control.data_checksums() || self.settings.wal_log_hints;
        Ok(Settings {
            pages: PageSettings {
                env: Env { major: control.major, hint_bits_are_logged },
                checksums: control.data_checksums(),
                verify_images: self.options.verify_images,
            },
            shares,
            window_bytes,
            spill: self.spill_settings()?,
            base: self.options.base.clone(),
            stop: RecoveryStop { target: self.settings.target.clone(), inclusive: self.settings.target_inclusive },
            allow_in_place_tablespaces: self.settings.allow_in_place_tablespaces,
            new_tablespaces: self.options.new_tablespaces.clone(),
        })
    }
}

/// Where temporary files of servers are, which every base backup leaves out, and a server empties at its start
/// (`RemovePgTempFiles`, `storage/file/fd.c`).
pub(crate) const TEMPORARY_FILES: &str = "base/pgsql_tmp";

/// Keeps the history files of the timelines that are read in `pg_wal`: the end of recovery needs them, when the archive may be out of reach
/// (`KeepFileRestoredFromArchive`, `restoreTimeLineHistoryFiles`).
fn keep_histories(source: &Source, data_dir: &DataDir) -> Result<(), ReplayError> {
    let wal_dir = WalDir::new(data_dir.path(), data_dir.control().segment_size);
    // The first has none.
    for entry in source.history().newest_first().filter(|entry| entry.timeline > TimelineId(1)) {
        if let Some((_, contents)) = source.history_file(entry.timeline)? {
            wal_dir.keep_history(entry.timeline, &contents)?;
        }
    }
    Ok(())
}

/// Replays to where there is a reason to stop. The end of the WAL is one if the archive is there, and has no more. `counts`:
/// so much depends on that end that it must be proven; where the `latest` timeline is wanted, there is no later one then, either: the
/// command may have failed for its history at the beginning.
fn run_to_end(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    counts: bool,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    loop {
        let stop = engine.run(progress)?;
        let Stop::EndOfWal { .. } = stop else { return Ok(stop) };
        match source.confirm_end(engine.needed(), counts)? {
            End::Confirmed if latest && counts && source.fetches() && look_for_timeline(engine, source)? => {
                keep_histories(source, engine.recovery().data_dir())?;
            }
            End::Confirmed => return Ok(stop),
            End::GoesOn => {}
            End::Unknown(why) => return Ok(Stop::Outage { why }),
        }
    }
}

/// Bytes of WAL in one stretch, and how memory is shared between pages and batches. While pages fit, a batch takes up to four times its
/// WAL, with the operations that it is made into, and while one is applied, the next is decoded.
fn share_memory(memory_bytes: u64) -> (u64, MemoryShares) {
    let batch_bytes = (memory_bytes / 32).clamp(2 * MIN_WINDOW_BYTES, MAX_BATCH_BYTES);
    let window_bytes = 1 << (batch_bytes / 4).clamp(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES).ilog2();
    let page_bytes = memory_bytes.saturating_sub(8 * batch_bytes + OTHER_BYTES);
    let shares = MemoryShares { all_bytes: memory_bytes, page_bytes, batch_bytes };
    (window_bytes, shares)
}

/// Whether the command line asks for recovery from an archive: the `pg_wal` of a directory that is no base backup is not
/// one.
fn asks_for_archive_recovery(options: &Options, data_dir: &DataDir) -> bool {
    let pg_wal = fs::canonicalize(data_dir.path().join("pg_wal")).ok();
    let is_backup = data_dir.label().is_some();
    let archive = options.archive.is_some()
        || options.wal.as_ref().is_some_and(|wal| is_backup || fs::canonicalize(wal).ok() != pg_wal);
    let promotes = options.promotion == Promotion::Always;
    archive || promotes || options.target.is_some() || options.timeline.is_some() || options.upstream.is_some()
}

/// Whether recovery ends where replay does, as far as options and configuration tell: always if that was asked for; else where a
/// server would end it by itself, having reached the target (`recoveryTargetAction`, `PerformWalRecovery`).
fn promotes(options: &Options, settings: &RecoverySettings) -> bool {
    match options.promotion {
        Promotion::Always => true,
        Promotion::Never => false,
        Promotion::AsConfigured => {
            let ends = settings.target.is_some() && settings.target_action == TargetAction::Promote;
            ends && options.upstream.is_none() && !options.follow
        }
    }
}

/// A crashed primary that is to go on from an archive: PostgreSQL first replays all of `pg_wal`, because nothing tells
/// where the directory is consistent. That is two recoveries; we do one.
fn refuse_crashed_without_end(data_dir: &DataDir, archive_recovery: bool) -> Result<(), ReplayError> {
    let control = data_dir.control();
    let knows_end = data_dir.label().is_some()
        || control.min_recovery_point.is_valid()
        || control.backup_end_required
        || control.backup_end_point.is_valid()
        || control.state == DbState::ShutDown;
    if archive_recovery && !knows_end {
        return Err(ReplayError::Refused(format!(
            "\"{}\" is of a server that crashed, and has no backup_label: nothing tells where it becomes consistent. \
             Replay its own pg_wal first (no --wal, no target, no recovery.signal or standby.signal)",
            shown(data_dir.path()).display()
        )));
    }
    Ok(())
}

/// Whether a standby has left WAL in `pg_wal` that it had received before its primary had flushed it, and that nothing has replaced.
///
/// # Errors
/// `pg_wal` cannot be read.
pub fn holds_what_was_early(data_dir: &std::path::Path) -> Result<bool, DataDirError> {
    let files = list_dir(&data_dir.join("pg_wal"))?;
    Ok(files.iter().any(|file| file.file_name().to_string_lossy().starts_with(EARLY_PREFIX)))
}

/// A standby may hold WAL that belongs to a promotion, and that only a standby can tell from what does not.
fn refuse_what_a_standby_holds(data_dir: &DataDir) -> Result<(), ReplayError> {
    if holds_what_was_early(data_dir.path())? {
        return Err(ReplayError::Refused(format!(
            "\"{}\" is of a standby that has received WAL before its primary had flushed it, which belongs to a promotion: \
             start walrider standby on it, and promote that",
            shown(data_dir.path()).display()
        )));
    }
    Ok(())
}

/// The newest timeline that the directory knows to be its own.
fn current_timeline(data_dir: &DataDir) -> TimelineId {
    let control = data_dir.control();
    let current = control.min_recovery_point_timeline.max(control.checkpoint_copy.timeline);
    data_dir.label().map_or(current, |label| current.max(label.start_timeline))
}

/// The timelines to follow (`validateRecoveryParameters`, `rescanLatestTimeLine`).
fn choose_history(
    source: &Source,
    data_dir: &DataDir,
    settings: &RecoverySettings,
    archive_recovery: bool,
) -> Result<TimelineHistory, ReplayError> {
    let current = current_timeline(data_dir);
    let target = match settings.target_timeline {
        _ if !archive_recovery => current,
        TargetTimeline::Current => current,
        TargetTimeline::Latest => source.newest_timeline(current)?,
        TargetTimeline::Number(number) => {
            if number > TimelineId(1) && !source.has_history(number)? {
                return Err(ReplayError::Refused(format!(
                    "recovery target timeline {number} does not exist: its history file is not in the WAL source"
                )));
            }
            number
        }
    };
    Ok(source.read_history(target)?)
}

/// Makes everything durable, and says what keeps PostgreSQL from finishing, if anything does.
fn hand_over(engine: &mut Engine<'_>, stop: &Stop, goal: Option<&RecoveryTarget>) -> Result<(), ReplayError> {
    let consistent = engine.may_end_here();
    let complete = matches!(stop, Stop::Target | Stop::EndOfWal { .. });
    engine.restartpoint(consistent)?;
    let replayed = engine.replayed();
    if complete && !consistent {
        if let Some(page) = engine.first_invalid_page() {
            return Err(ReplayError::CorruptWal(format!(
                "WAL up to {replayed} contains references to invalid pages, the first is {page}: the directory lacks what \
                 it should have, or WAL is missing"
            )));
        }
        let what = if goal.is_some() { "the recovery target lies" } else { "WAL ends" };
        let least = engine.recovery().control().min_recovery_point;
        let least = if least > replayed { format!(", and at least to {least}") } else { String::new() };
        return Err(ReplayError::Refused(format!(
            "{what} before the directory is consistent: replay stands at {replayed}, and must get past the end of the \
             base backup{least}; give it WAL, or a target, behind that"
        )));
    }
    if let Stop::EndOfWal { why } = stop
        && let Some(goal) = goal
    {
        let goal = goal.parameter();
        return Err(ReplayError::Refused(format!(
            "WAL ended at {replayed} before the configured recovery target was reached ({goal}; {why}); add WAL and try again"
        )));
    }
    Ok(())
}

/// PostgreSQL does not read `.partial` files: it gets what it needs of them under their full name, in `pg_wal`.
fn keep_partial_segments(source: &Source, engine: &Engine<'_>) -> Result<(), ReplayError> {
    let recovery = engine.recovery();
    let size = recovery.control().segment_size;
    let first = size.segment_of(recovery.control().checkpoint_copy.redo);
    let last = size.segment_of(Lsn(engine.replayed().0.saturating_sub(1)));
    for segment in first..=last {
        let Some((path, timeline)) = source.partial_file(size.start_of(segment))? else { continue };
        let name = size.file_name(timeline, segment);
        walrider_datadir::durable::copy_file(&path, &recovery.data_dir().path().join("pg_wal").join(name))?;
    }
    Ok(())
}
