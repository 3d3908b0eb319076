//! From a data directory and a source of WAL to a running engine, and from its end to a directory that PostgreSQL
//! takes over (`InitWalRecovery` in `access/transam/xlogrecovery.c`, `StartupXLOG` in `access/transam/xlog.c`,
//! PostgreSQL 18).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use walrider_datadir::config::{self, Config};
use walrider_datadir::durable::list_dir;
use walrider_datadir::held::shown;
use walrider_datadir::recovery_settings::{RecoverySettings, RecoveryTarget, TargetAction, TargetTimeline};
use walrider_datadir::wal_dir::EARLY_PREFIX;
use walrider_datadir::{DataDir, DataDirError};
use walrider_layout::control::{CheckPoint, ControlFile, DbState};
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};
use walrider_redo::Env;
use walrider_wal::decode::{Invalid, WalFormat};
use walrider_wal::record::Record;
use walrider_wal::records::xlog;
use walrider_wal::rmgr::RmgrId;

use crate::end_of_recovery::{Promoted, end_again, end_of_recovery};
use crate::engine::{Engine, Flow, MemoryShares, Settings, Stop};
use crate::error::ReplayError;
use crate::follow::follow;
use crate::foreign_archive;
use crate::globals::Globals;
use crate::load::{Ending, Loader, ReadWal, read_record};
use crate::partition::PageSettings;
use crate::restartpoint::{Recovery, RestartpointPolicy};
use crate::source::{End, FETCH_PREFIX, FetchStats, Refusal, Source, Store};
use crate::stats::Stats;
use crate::target::RecoveryStop;
use crate::upstream::{Upstream, Wanted};

/// Most WAL in one batch: the more, the more of a page's changes are done in one visit, while it is in the processor's
/// cache. Four times as much gained nothing: the memory for it must be touched first, too.
const MAX_BATCH_BYTES: u64 = 128 << 20;
/// Most WAL in one batch where pages do not fit into memory.
const MAX_SHORT_BATCH_BYTES: u64 = 512 << 20;
/// Most WAL in one stretch: small enough that two threads share a batch evenly.
const MAX_WINDOW_BYTES: u64 = 2 << 20;
/// Least WAL in one stretch.
const MIN_WINDOW_BYTES: u64 = 128 << 10;
/// Memory that is neither pages nor WAL: the program itself, SLRU pages, tables.
const OTHER_BYTES: u64 = 16 << 20;

/// What to replay, where to, how far.
#[derive(Clone)]
pub struct Options {
    /// The data directory.
    pub data_dir: PathBuf,
    /// `postgresql.conf`, where it is not in the data directory.
    pub config_file: Option<PathBuf>,
    /// A directory with WAL; without, what the directory's own configuration says.
    pub wal: Option<PathBuf>,
    /// Where to stop; without, what the configuration says.
    pub target: Option<RecoveryTarget>,
    /// `recovery_target_inclusive`; without, what the configuration says.
    pub inclusive: Option<bool>,
    /// The timeline to follow; without, what the configuration says.
    pub timeline: Option<TargetTimeline>,
    /// Memory for pages and WAL.
    pub memory_bytes: u64,
    /// Compare pages with `wal_consistency_checking` images.
    pub verify_images: bool,
    /// Wait for more WAL at its end.
    pub follow: bool,
    /// Who ends recovery where replay ends, so that the directory becomes that of a primary on a new timeline. Whoever brings
    /// WAL may wish that, too.
    pub promotion: Promotion,
    /// `restore_command`; without, what the configuration says.
    pub restore_command: Option<String>,
    /// How many of these may run at once.
    pub fetch_jobs: usize,
    /// When restartpoints are made.
    pub restartpoints: RestartpointPolicy,
    /// Who brings the WAL: the directory is a standby's. With `follow`.
    pub upstream: Option<Arc<dyn Upstream>>,
}

/// Who ends recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promotion {
    /// We do where a server would as soon as it reaches the target: `recovery_target_action` is `promote`.
    AsConfigured,
    /// We do, at the target or at the end of the WAL.
    Always,
    /// PostgreSQL does, if anybody.
    Never,
}

/// How a replay went.
#[derive(Debug)]
pub struct Summary {
    /// Why it stopped; `None`: the directory was shut down cleanly, and nobody asked for more WAL.
    pub stop: Option<Stop>,
    /// Where it began.
    pub start: Lsn,
    /// End of the last record replayed.
    pub end: Lsn,
    /// Timeline there.
    pub timeline: TimelineId,
    /// The checkpoint record that recovery begins at now.
    pub checkpoint: Lsn,
    /// Bytes of WAL that PostgreSQL replays again when it starts: those past the redo position of that checkpoint.
    pub again_bytes: u64,
    /// Recovery has ended.
    pub promoted: Option<Promoted>,
    /// Counters and stages.
    pub stats: Stats,
    /// What fetching with `restore_command` cost.
    pub fetch: FetchStats,
    /// What `restore_command` said where the WAL was found to end.
    pub refusal: Option<Refusal>,
    /// From the first record to the last page change.
    pub redo: Duration,
    /// All of it, until everything is durable.
    pub total: Duration,
    /// Settings that were written to `postgresql.auto.conf`, so that PostgreSQL finishes at the same place.
    pub settings_written: Vec<(String, String)>,
}

/// Replays WAL onto a data directory and hands it over.
///
/// # Errors
/// What [`ReplayError`] lists. Unless it says otherwise, the same call can be repeated, or PostgreSQL started.
pub fn replay(options: &Options, progress: &mut dyn FnMut(&Stats, Lsn) -> Flow) -> Result<Summary, ReplayError> {
    let started = Instant::now();
    let mut data_dir = DataDir::open(&options.data_dir)?;
    if let Some(upstream) = &options.upstream {
        upstream.admit(&data_dir)?;
    }
    let mut settings = RecoverySettings::from_config(
        &Config::read(data_dir.path(), options.config_file.as_deref())?,
        data_dir.control().major,
    )?;
    if let Some(command) = &options.restore_command {
        settings.restore_command = Some(command.clone()).filter(|command| !command.is_empty());
    }
    let archive_recovery = data_dir.signals().archive_recovery() || asks_for_archive_recovery(options, &data_dir);
    if let Some(summary) = nothing_to_do(&data_dir, archive_recovery, started) {
        config::let_servers_in(data_dir.path())?;
        return Ok(summary);
    }
    refuse_crashed_without_end(&data_dir, archive_recovery)?;
    if !archive_recovery {
        // Left over from an earlier recovery; in crash recovery no server looks at it (recoveryStopsBefore).
        settings.target = None;
    }
    options.wal.as_deref().map_or(Ok(()), foreign_archive::refuse)?;
    let wanted = override_settings(options, &data_dir, &mut settings)?;
    let mut source = Source::new(
        places(options, &data_dir, &settings, archive_recovery),
        data_dir.control().segment_size,
        TimelineHistory::alone(TimelineId(1)),
    )
    .with_fetch_jobs(options.fetch_jobs)
    .brought_by(options.upstream.clone());
    if options.follow {
        source = source.growing();
    }
    remove_old_fetches(data_dir.path())?;
    let history = choose_history(&source, &data_dir, &settings, archive_recovery)?;
    let format = WalFormat {
        major: data_dir.control().major,
        segment_size: data_dir.control().segment_size,
        system_identifier: Some(data_dir.control().system_identifier),
    };
    let promotes = promotes(options, &settings);
    if promotes {
        refuse_what_a_standby_holds(&data_dir)?;
        if let Some(promoted) = end_again(&data_dir, &source, &format, &settings, history.target())? {
            return Ok(Summary { promoted: Some(promoted), ..Summary::nothing_to_do(&data_dir, started) });
        }
    }
    source.set_history(history.clone());
    // A backup has an end to reach, whoever asks for its recovery (InArchiveRecovery).
    let in_archive_recovery = archive_recovery || data_dir.label().is_some();
    let begin = Beginning::wait_for(&data_dir, &source, &format, options.upstream.as_deref())?;
    begin.check_history(&data_dir, &history)?;
    source.note_restartpoint(begin.checkpoint.redo);
    let settings_written = if archive_recovery { write_settings(&data_dir, options, wanted)? } else { Vec::new() };
    begin.enter_recovery(&mut data_dir, in_archive_recovery)?;

    let mut globals = Globals::open(data_dir.path(), data_dir.control(), archive_recovery)
        .map_err(|error| ReplayError::Refused(format!("could not begin at {}: {error}", begin.start)))?;
    globals.remove_stale_files()?;
    config::let_servers_in(data_dir.path())?;
    let files = Arc::new(data_dir.relation_files());
    let control = data_dir.control();
    let (window_bytes, ample, short) = share_memory(options.memory_bytes);
    let engine_settings = Settings {
        pages: PageSettings {
            env: Env { major: control.major, hint_bits_are_logged: control.data_checksums() || settings.wal_log_hints },
            checksums: control.data_checksums(),
            verify_images: options.verify_images,
        },
        ample,
        short,
        window_bytes,
        stop: RecoveryStop { target: settings.target.clone(), inclusive: settings.target_inclusive },
        allow_in_place_tablespaces: settings.allow_in_place_tablespaces,
    };
    let loader = Loader::new(format, window_bytes, begin.start);
    let recovery = Recovery::new(data_dir, history, begin.checkpoint.timeline, in_archive_recovery)
        .with_restartpoints(options.restartpoints)
        .durable_by(options.upstream.clone());
    let mut engine = Engine::new(engine_settings, &source, &files, globals, recovery, loader);
    let redo_started = Instant::now();
    let stop = match options.follow {
        true => {
            let latest = archive_recovery && settings.target_timeline == TargetTimeline::Latest;
            follow(&mut engine, &source, latest, options.upstream.clone(), progress)?
        }
        false => run_to_end(&mut engine, &source, promotes || settings.target.is_some(), progress)?,
    };
    let redo = redo_started.elapsed();
    if !promotes && matches!(stop, Stop::Target) && settings.target_action != TargetAction::Shutdown {
        engine.keep_target();
    }
    let refusal =
        source.refusal(engine.needed()).filter(|_| matches!(stop, Stop::EndOfWal { .. } | Stop::Outage { .. }));
    keep_partial_segments(&source, &engine)?;
    hand_over(&mut engine, &stop, settings.target.is_some())?;
    let promoted = match stop {
        Stop::Target | Stop::EndOfWal { .. } if promotes || promotion_is_wanted(options) => {
            Some(end_of_recovery(&mut engine, &source, &settings)?)
        }
        _ => None,
    };
    let (control, end) = (engine.recovery().control(), engine.replayed());
    let again_bytes = if promoted.is_some() { 0 } else { end.0.saturating_sub(control.checkpoint_copy.redo.0) };
    Ok(Summary {
        stop: Some(stop),
        start: begin.start,
        end,
        again_bytes,
        timeline: engine.timeline(),
        checkpoint: control.checkpoint,
        redo,
        total: started.elapsed(),
        promoted,
        settings_written,
        stats: std::mem::take(&mut engine.stats),
        fetch: source.fetch_stats(),
        refusal,
    })
}

/// Replays to where there is a reason to stop. The end of the WAL is one if the archive is there, and has no more. `counts`:
/// so much depends on that end that it must be proven.
fn run_to_end(
    engine: &mut Engine<'_>,
    source: &Source,
    counts: bool,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    loop {
        let stop = engine.run(progress)?;
        let Stop::EndOfWal { .. } = stop else { return Ok(stop) };
        match source.confirm_end(engine.needed(), counts)? {
            End::Confirmed => return Ok(stop),
            End::GoesOn => {}
            End::Unknown(why) => return Ok(Stop::Outage { why }),
        }
    }
}

/// Bytes of WAL in one stretch, and how memory is shared between pages and batches. A batch takes up to four times its WAL,
/// with the operations that it is made into, and while one is applied, the next is decoded.
///
/// Where pages do not fit, what counts is how seldom each is visited. Then most of the memory is for one batch, of about
/// twice its WAL, and pages pass through the rest of it in file order.
fn share_memory(memory_bytes: u64) -> (u64, MemoryShares, MemoryShares) {
    let batch_bytes = (memory_bytes / 32).clamp(2 * MIN_WINDOW_BYTES, MAX_BATCH_BYTES);
    let window_bytes = 1 << (batch_bytes / 4).clamp(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES).ilog2();
    let ample = MemoryShares { page_bytes: memory_bytes.saturating_sub(8 * batch_bytes + OTHER_BYTES), batch_bytes };
    let batch_bytes =
        (memory_bytes.saturating_sub(2 * OTHER_BYTES) / 8 * 3).clamp(2 * MIN_WINDOW_BYTES, MAX_SHORT_BATCH_BYTES);
    let page_bytes = memory_bytes.saturating_sub(batch_bytes / 4 * 9 + OTHER_BYTES);
    (window_bytes, ample, MemoryShares { page_bytes, batch_bytes })
}

/// Whether the command line asks for recovery from an archive: the `pg_wal` of a directory that is no base backup is not
/// one.
fn asks_for_archive_recovery(options: &Options, data_dir: &DataDir) -> bool {
    let pg_wal = fs::canonicalize(data_dir.path().join("pg_wal")).ok();
    let is_backup = data_dir.label().is_some();
    let archive = options.wal.as_ref().is_some_and(|wal| is_backup || fs::canonicalize(wal).ok() != pg_wal);
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

/// Whether who brings the WAL wants recovery to end.
fn promotion_is_wanted(options: &Options) -> bool {
    options.upstream.as_ref().is_some_and(|upstream| upstream.wanted() == Wanted::Promote)
}

/// A primary that was shut down cleanly needs no recovery, unless somebody asks for it (`InitWalRecovery`).
fn nothing_to_do(data_dir: &DataDir, archive_recovery: bool, started: Instant) -> Option<Summary> {
    let control = data_dir.control();
    if archive_recovery || control.state != DbState::ShutDown || data_dir.label().is_some() {
        return None;
    }
    Some(Summary::nothing_to_do(data_dir, started))
}

impl Summary {
    /// Of a directory that was shut down cleanly.
    fn nothing_to_do(data_dir: &DataDir, started: Instant) -> Summary {
        let control = data_dir.control();
        Summary {
            stop: None,
            start: control.checkpoint,
            end: control.checkpoint,
            timeline: control.checkpoint_copy.timeline,
            checkpoint: control.checkpoint,
            again_bytes: 0,
            promoted: None,
            stats: Stats::default(),
            fetch: FetchStats::default(),
            refusal: None,
            redo: Duration::ZERO,
            total: started.elapsed(),
            settings_written: Vec::new(),
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

/// A standby may hold WAL that belongs to a promotion, and that only a standby can tell from what does not.
fn refuse_what_a_standby_holds(data_dir: &DataDir) -> Result<(), ReplayError> {
    let files = list_dir(&data_dir.path().join("pg_wal"))?;
    if files.iter().any(|file| file.file_name().to_string_lossy().starts_with(EARLY_PREFIX)) {
        return Err(ReplayError::Refused(format!(
            "\"{}\" is of a standby that has received WAL before its primary had flushed it, which belongs to a promotion: \
             start walrider standby on it, and promote that",
            shown(data_dir.path()).display()
        )));
    }
    Ok(())
}

/// Lets the command line override the configuration. Returns what PostgreSQL must be told to finish at the same place.
fn override_settings(
    options: &Options,
    data_dir: &DataDir,
    settings: &mut RecoverySettings,
) -> Result<Vec<(String, String)>, ReplayError> {
    let mut wanted = Vec::new();
    if let Some(target) = &options.target {
        if let Some(configured) = settings.target.as_ref().filter(|old| old.parameter() != target.parameter()) {
            return Err(ReplayError::Refused(format!(
                "{} is set in the configuration of \"{}\", and PostgreSQL allows one recovery target only: remove it, or \
                 give the same target",
                configured.parameter(),
                shown(data_dir.path()).display()
            )));
        }
        settings.target = Some(target.clone());
        let value = match target {
            RecoveryTarget::Immediate => "immediate".into(),
            RecoveryTarget::Lsn(lsn) => lsn.to_string(),
            RecoveryTarget::Name(name) => name.clone(),
            RecoveryTarget::Time(time) => time.to_string(),
            RecoveryTarget::Xid(xid) => xid.to_string(),
        };
        wanted.push((target.parameter().to_owned(), value));
    }
    if let Some(inclusive) = options.inclusive {
        settings.target_inclusive = inclusive;
        wanted.push(("recovery_target_inclusive".into(), if inclusive { "on" } else { "off" }.into()));
    }
    if let Some(timeline) = options.timeline {
        settings.target_timeline = timeline;
        let value = match timeline {
            TargetTimeline::Latest => "latest".into(),
            TargetTimeline::Current => "current".into(),
            TargetTimeline::Number(number) => number.to_string(),
        };
        wanted.push(("recovery_target_timeline".into(), value));
    }
    if let Some(wal) = options.wal.as_ref().filter(|_| settings.restore_command.is_none()) {
        let wal = fs::canonicalize(wal).map_err(|error| DataDirError::io("open", wal, error))?;
        let quoted = wal.display().to_string().replace('%', "%%").replace('\'', "'\\''");
        wanted.push(("restore_command".into(), format!("cp '{quoted}'/%f '%p'")));
    }
    Ok(wanted)
}

/// Writes the signal file and the settings that the command line gave, unless they stand there already.
fn write_settings(
    data_dir: &DataDir,
    options: &Options,
    wanted: Vec<(String, String)>,
) -> Result<Vec<(String, String)>, ReplayError> {
    let configured = Config::read(data_dir.path(), options.config_file.as_deref())?;
    let missing: Vec<(String, String)> = wanted
        .into_iter()
        .filter(|(name, value)| configured.get(name).is_none_or(|setting| setting.value != *value))
        .collect();
    if !missing.is_empty() {
        let pairs: Vec<(&str, &str)> = missing.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        config::set_auto_conf(data_dir.path(), &pairs)?;
    }
    match options.upstream {
        Some(_) => config::write_standby_signal(data_dir.path())?,
        None if !data_dir.signals().archive_recovery() => config::write_recovery_signal(data_dir.path())?,
        None => {}
    }
    Ok(missing)
}

/// Where WAL is looked for: what the command line or `restore_command` says, then `pg_wal`, as PostgreSQL does.
fn places(options: &Options, data_dir: &DataDir, settings: &RecoverySettings, archive_recovery: bool) -> Vec<Store> {
    let mut places = Vec::new();
    if let Some(wal) = &options.wal {
        places.push(Store::Directory(wal.clone()));
    } else if let Some(command) = settings.restore_command.as_ref().filter(|_| archive_recovery) {
        places.push(Store::RestoreCommand { command: command.clone(), data_dir: data_dir.path().to_owned() });
    }
    places.push(Store::Directory(data_dir.path().join("pg_wal")));
    places
}

/// Removes what an earlier run fetched and did not get to remove.
fn remove_old_fetches(data_dir: &Path) -> Result<(), ReplayError> {
    let pg_wal = data_dir.join("pg_wal");
    let entries = fs::read_dir(&pg_wal).map_err(|error| DataDirError::io("open", &pg_wal, error))?;
    for entry in entries {
        let entry = entry.map_err(|error| DataDirError::io("read", &pg_wal, error))?;
        if entry.file_name().to_string_lossy().starts_with(FETCH_PREFIX) {
            fs::remove_file(entry.path()).map_err(|error| DataDirError::io("remove", entry.path(), error))?;
        }
    }
    Ok(())
}

/// The timelines to follow (`validateRecoveryParameters`, `rescanLatestTimeLine`).
fn choose_history(
    source: &Source,
    data_dir: &DataDir,
    settings: &RecoverySettings,
    archive_recovery: bool,
) -> Result<TimelineHistory, ReplayError> {
    let control = data_dir.control();
    let mut current = control.min_recovery_point_timeline.max(control.checkpoint_copy.timeline);
    if let Some(label) = data_dir.label() {
        current = current.max(label.start_timeline);
    }
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
    source.read_history(target)
}

/// Where recovery begins.
struct Beginning {
    /// The checkpoint record.
    at: Lsn,
    timeline: TimelineId,
    checkpoint: CheckPoint,
    /// The first record to replay.
    start: Lsn,
}

impl Beginning {
    /// Finds it; where there is no WAL for it yet, and somebody who brings some, waits for that. A promotion is refused then, as
    /// PostgreSQL does (`ReadCheckpointRecord` fails for it): nothing was replayed, and nothing is changed.
    fn wait_for(
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
            let promotes = upstream.is_some_and(|upstream| upstream.wanted() == Wanted::Promote);
            let error = match (Beginning::find(data_dir, source, format), upstream) {
                (Err(ReplayError::Refused(why)), Some(upstream)) if upstream.wanted() != Wanted::Stop => {
                    (why, upstream)
                }
                (found, _) => return found,
            };
            let (why, upstream) = error;
            if promotes {
                return Err(ReplayError::Refused(format!(
                    "there is nothing to promote yet: {why}. The directory is as it was, and a standby started on it goes on \
                     receiving"
                )));
            }
            upstream.wait(from, from, source.history().timeline_at(from), &why)?;
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
    fn check_history(&self, data_dir: &DataDir, history: &TimelineHistory) -> Result<(), ReplayError> {
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
    /// where recovery begins, whoever goes on with it.
    fn enter_recovery(&self, data_dir: &mut DataDir, archive_recovery: bool) -> Result<(), ReplayError> {
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

/// Makes everything durable, and says what keeps PostgreSQL from finishing, if anything does.
fn hand_over(engine: &mut Engine<'_>, stop: &Stop, has_goal: bool) -> Result<(), ReplayError> {
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
        let what = if has_goal { "the recovery target lies" } else { "WAL ends" };
        return Err(ReplayError::Refused(format!(
            "{what} before the directory is consistent: replay stands at {replayed}, and must get past the end of the \
             base backup and at least to {}; give it WAL, or a target, behind that",
            engine.recovery().control().min_recovery_point
        )));
    }
    if let Stop::EndOfWal { why } = stop
        && has_goal
    {
        return Err(ReplayError::Refused(format!(
            "WAL ended at {replayed} before the configured recovery target was reached ({why}); add WAL and run the same \
             command again"
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
