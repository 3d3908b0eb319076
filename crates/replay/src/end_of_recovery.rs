//! The end of recovery: the directory becomes that of a primary which was shut down cleanly, on a new timeline
//! (`StartupXLOG`, `XLogInitNewTimeline`, `CreateCheckPoint`, `CleanupAfterArchiveRecovery` in `access/transam/xlog.c`,
//! `FinishWalRecovery` in `access/transam/xlogrecovery.c`, PostgreSQL 17 and 18). The steps are numbered and argued in
//! docs/crash-safety.md.

use std::io::{self, IoSliceMut, Read};
use std::path::Path;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use walrider_datadir::durable::{list_dir, unlink};
use walrider_datadir::recovery_settings::{RecoverySettings, RecoveryTarget, TargetTimeline};
use walrider_datadir::timestamp::TimestampTz;
use walrider_datadir::unlogged::reset_unlogged_relations;
use walrider_datadir::wal_dir::WalDir;
use walrider_datadir::{DataDir, command, config};
use walrider_layout::control::DbState;
use walrider_layout::history::history_file_name;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId, XLOG_BLCKSZ};
use walrider_store::read::ReadWal;
use walrider_store::source::Source;
use walrider_wal::decode::WalFormat;
use walrider_wal::encode::{PageFormat, append, checkpoint_shutdown, next_record};
use walrider_wal::record::Record;
use walrider_wal::records::xact;
use walrider_wal::rmgr::RmgrId;

use crate::engine::Engine;
use crate::error::ReplayError;
use crate::globals::SeenCheckpoint;
use crate::load::{Ending, read_record};

/// WAL is copied in pieces of this many pages.
const PIECE_PAGES: usize = 32;

/// A directory that is that of a primary now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promoted {
    /// Its timeline.
    pub timeline: TimelineId,
    /// Where that begins: the end of the last record replayed.
    pub switch_point: Lsn,
    /// Its first record, a checkpoint: where PostgreSQL starts.
    pub checkpoint: Lsn,
    /// `recovery_end_command` failed, or the timeline may be another's, too: which keeps nobody from starting.
    pub warnings: Vec<String>,
}

/// Ends recovery where the engine stands: all that was replayed is durable, the directory is consistent, and handed over.
/// A new timeline begins, with a checkpoint; `pg_control` says so last. Stopped before that, the directory is a standby's;
/// from then on it is a primary's.
///
/// # Errors
/// What keeps recovery from ending. The directory can be promoted again, or started by PostgreSQL.
pub fn end_of_recovery(
    engine: &mut Engine<'_>,
    source: &Source,
    settings: &RecoverySettings,
    unset_targets: &mut dyn FnMut() -> Result<(), ReplayError>,
) -> Result<Promoted, ReplayError> {
    let end_command = settings.recovery_end_command.as_deref();
    end_command.map_or(Ok(String::new()), |command| expand_end_command(command, ""))?;
    let switch_point = engine.replayed();
    let last_record = last_record(engine)?;
    let control = engine.recovery().control().clone();
    let format = WalFormat {
        major: control.major,
        segment_size: control.segment_size,
        system_identifier: Some(control.system_identifier),
    };
    let reason = stop_reason(source, &format, settings, switch_point, last_record)?;
    let parent = source.history().target();
    let newest = source.newest_timeline(parent)?;
    let timeline = newest.0.checked_add(1).map(TimelineId).ok_or_else(|| {
        ReplayError::Refused(format!("there is no timeline after {newest}: dump the databases into a new cluster"))
    })?;
    let warnings = source.is_unsure().then(|| {
        format!(
            "the archive is out of reach: if it has {} of an earlier promotion, it will take neither this server's nor its WAL; look \
             there when it is back",
            history_file_name(timeline)
        )
    });
    let warnings = warnings.into_iter().collect();
    let old_timeline = source.timeline_at(Lsn(switch_point.0 - 1));
    let pages = PageFormat {
        major: control.major,
        segment_size: control.segment_size,
        system_identifier: control.system_identifier,
        timeline,
    };

    let data_dir = engine.recovery().data_dir().path().to_owned();
    let directories = engine.recovery().data_dir().directories();
    let (globals, recovery) = engine.globals_and_recovery();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    let lsn = next_record(switch_point, control.segment_size);
    let body = globals.end_of_recovery(lsn, timeline, now);
    let tail = append(&checkpoint_shutdown(last_record, &body), switch_point, &pages);
    let checkpoint = SeenCheckpoint { lsn, end: Lsn(switch_point.0 + tail.len() as u64), shutdown: true, body };

    let wal_dir = WalDir::new(&data_dir, control.segment_size);
    let replayed_timeline = recovery.timeline();
    // Each waits for the disk, and none looks at what the other does.
    let segments = || -> Result<(), ReplayError> {
        wal_dir.remove_timeline(timeline)?;
        keep_old_segment(&wal_dir, source, replayed_timeline, switch_point)?;
        make_segments(&wal_dir, source, control.segment_size, timeline, switch_point, &tail)
    };
    let all_else = || -> Result<(), ReplayError> {
        reset_unlogged_relations(&directories)?;
        remove_runtime_files(&data_dir)?;
        Ok(globals.checkpoint(&checkpoint)?)
    };
    side_by_side(segments, all_else)?;
    if settings.target.is_some() {
        // From here on, until the control file counts, a recovery finds the new timeline, and would pass a target that is a time or lies before a transaction.
        wal_dir.note_beginning(timeline)?;
        config::keep_servers_out(&data_dir)?;
    }
    write_histories(&wal_dir, source, timeline, switch_point, &reason, settings.archiving)?;
    // Of the checkpoint that it will begin with, a server with a signal file could reach neither the target nor the timeline.
    let keep_out = settings.target.is_some() || matches!(settings.target_timeline, TargetTimeline::Number(_));
    recovery.end(globals, &checkpoint, keep_out)?;
    let promoted = Promoted { timeline, switch_point, checkpoint: lsn, warnings };
    finish(&data_dir, &wal_dir, settings, old_timeline, unset_targets, promoted)
}

/// Does `one` in a thread of its own, if there is one to be had, and `other` meanwhile.
fn side_by_side(
    one: impl Fn() -> Result<(), ReplayError> + Sync,
    other: impl FnOnce() -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    thread::scope(|scope| {
        let beside = thread::Builder::new().name("segments".to_owned()).spawn_scoped(scope, &one).ok();
        let done = other();
        let also = match beside {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => one(),
        };
        done.and(also)
    })
}

/// Finishes what an earlier end of recovery began, if the directory is at a new timeline's first checkpoint, nobody has started
/// it since, and there is no WAL behind: what follows the step that counts is done again. `wanted` is the timeline that
/// recovery would follow, the new one or one that led there. `None`: there is recovery to do.
///
/// # Errors
/// As [`end_of_recovery`].
pub fn end_again(
    data_dir: &DataDir,
    source: &Source,
    format: &WalFormat,
    settings: &RecoverySettings,
    wanted: TimelineId,
    unset_targets: &mut dyn FnMut() -> Result<(), ReplayError>,
) -> Result<Option<Promoted>, ReplayError> {
    let control = data_dir.control();
    let body = &control.checkpoint_copy;
    let begins_timeline = body.timeline != body.previous_timeline;
    if control.state != DbState::ShutDown || data_dir.label().is_some() || !begins_timeline {
        return Ok(None);
    }
    let history = source.read_history(body.timeline)?;
    if !history.contains(wanted) {
        return Ok(None);
    }
    source.set_history(history.clone());
    let Some(behind) = end_of_record(source, format, control.checkpoint)? else { return Ok(None) };
    if end_of_record(source, format, behind)?.is_some() {
        return Ok(None);
    }
    let newest = *history.newest_first().next().expect("never empty");
    let old_timeline = history.timeline_at(Lsn(newest.begin.0.saturating_sub(1)));
    let wal_dir = WalDir::new(data_dir.path(), control.segment_size);
    let promoted = Promoted {
        timeline: body.timeline,
        switch_point: newest.begin,
        checkpoint: control.checkpoint,
        warnings: Vec::new(),
    };
    finish(data_dir.path(), &wal_dir, settings, old_timeline, unset_targets, promoted).map(Some)
}

/// Where the record at `lsn` ends, if there is one.
fn end_of_record(source: &Source, format: &WalFormat, lsn: Lsn) -> Result<Option<Lsn>, ReplayError> {
    match read_record(source, format, lsn) {
        Err(Ending::Failed(error)) => Err(error),
        Err(_) => Ok(None),
        Ok(stretch) => Ok(stretch.places().first().map(|&place| stretch.span(place).end)),
    }
}

/// What is left to do in a directory that is a primary's already. Repeatable.
fn finish(
    data_dir: &Path,
    wal_dir: &WalDir,
    settings: &RecoverySettings,
    old_timeline: TimelineId,
    unset_targets: &mut dyn FnMut() -> Result<(), ReplayError>,
    mut promoted: Promoted,
) -> Result<Promoted, ReplayError> {
    config::remove_signals(data_dir)?;
    // Before a server may start, whose backups would have them.
    unset_targets()?;
    config::let_servers_in(data_dir)?;
    wal_dir.forget_beginning()?;
    if let Some(command) = &settings.recovery_end_command {
        let size = wal_dir.segment_size();
        let oldest = size.file_name(promoted.timeline, size.segment_of(promoted.checkpoint));
        if let Err(why) = command::run(data_dir, &expand_end_command(command, &oldest)?) {
            promoted.warnings.push(format!("recovery_end_command \"{command}\": {why}"));
        }
    }
    wal_dir.remove_non_parent(promoted.switch_point, promoted.timeline)?;
    wal_dir.remove_before_gap(promoted.checkpoint)?;
    if settings.archiving {
        wal_dir.archive_partial(promoted.switch_point, old_timeline)?;
    }
    Ok(promoted)
}

/// Where the last record begins: the one that was replayed last, or the checkpoint that recovery begins with and that
/// nothing follows.
fn last_record(engine: &Engine<'_>) -> Result<Lsn, ReplayError> {
    let control = engine.recovery().control();
    let begins_past = control.checkpoint_copy.redo == control.checkpoint;
    engine.last_record().or(begins_past.then_some(control.checkpoint)).ok_or_else(|| {
        ReplayError::Refused(format!(
            "recovery cannot end at {}: not even the checkpoint record at {} was replayed; choose a later target",
            engine.replayed(),
            control.checkpoint
        ))
    })
}

/// Why recovery ends here, for the history file (`getRecoveryStopReason`): byte by byte, lines that end too early included.
fn stop_reason(
    source: &Source,
    format: &WalFormat,
    settings: &RecoverySettings,
    end: Lsn,
    last_record: Lsn,
) -> Result<String, ReplayError> {
    let place = if settings.target_inclusive { "after" } else { "before" };
    Ok(match &settings.target {
        None => "no recovery target specified".to_owned(),
        Some(RecoveryTarget::Immediate) => "reached consistency".to_owned(),
        Some(RecoveryTarget::Name(name)) => format!("at restore point \"{name}\""),
        Some(RecoveryTarget::Xid(xid)) => format!("{place} transaction {xid}"),
        Some(RecoveryTarget::Lsn(_)) if settings.target_inclusive => format!("{place} LSN {last_record}\n"),
        Some(RecoveryTarget::Lsn(_)) => format!("{place} LSN {}\n", stopped_before(source, format, end)?.0),
        // Which is the first that is too late, whether or not the time itself is included.
        Some(RecoveryTarget::Time(_)) => {
            let (_, time) = stopped_before(source, format, end)?;
            format!("before {}\n", TimestampTz(time).in_zone(&settings.timezone))
        }
    })
}

/// The record that was not replayed any more: where it begins, and when its transaction ended, if it ends one.
fn stopped_before(source: &Source, format: &WalFormat, end: Lsn) -> Result<(Lsn, i64), ReplayError> {
    let gone =
        || ReplayError::CorruptWal(format!("at {end}: the record that recovery stopped before is not there any more"));
    let stretch = read_record(source, format, end).map_err(|_| gone())?;
    let place = *stretch.places().first().ok_or_else(gone)?;
    let span = stretch.span(place);
    let record = Record::parse(format.major, stretch.bytes(place), span.lsn, span.end).map_err(|_| gone())?;
    let ended = if record.header.rmgr == RmgrId::XACT { xact::transaction_end(&record) } else { None };
    Ok((span.lsn, ended.map_or(0, |(_, time)| time)))
}

/// Removes what a server that recovers removes: statistics, of relations that may be gone, and exported snapshots
/// (`pgstat_discard_stats`, `DeleteAllExportedSnapshotFiles`).
fn remove_runtime_files(data_dir: &Path) -> Result<(), ReplayError> {
    unlink(&data_dir.join("pg_stat/pgstat.stat"))?;
    for snapshot in list_dir(&data_dir.join("pg_snapshots"))? {
        unlink(&snapshot.path())?;
    }
    Ok(())
}

/// Makes the new timeline's first segment, and the second if the checkpoint record goes on there: the old WAL up to the end
/// of its last record, the tail behind it.
fn make_segments(
    wal_dir: &WalDir,
    source: &Source,
    size: SegmentSize,
    timeline: TimelineId,
    switch_point: Lsn,
    tail: &[u8],
) -> Result<(), ReplayError> {
    let first = size.segment_of(switch_point);
    let next = size.start_of(first + 1);
    let (here, behind) = tail.split_at(tail.len().min((next.0 - switch_point.0) as usize));
    if !behind.is_empty() {
        wal_dir.make_segment(timeline, first + 1, &mut &behind[..])?;
    }
    let old = OldWal::new(source, size.start_of(first), switch_point, switch_point);
    Ok(wal_dir.make_segment(timeline, first, &mut old.chain(here))?)
}

/// Keeps the old timeline's segment within which it is left. A server that finds the new timeline's history reads that one's copy
/// of the segment, and fetches no other; but it reads the state of a transaction that was prepared there, as long as it has
/// not replayed the new timeline's first record, from the file of the old one, in `pg_wal` (`XLogFileReadAnyTLI`,
/// `XlogReadTwoPhaseData`, `XLogReadDetermineTimeline`).
fn keep_old_segment(
    wal_dir: &WalDir,
    source: &Source,
    timeline: TimelineId,
    switch_point: Lsn,
) -> Result<(), ReplayError> {
    let size = wal_dir.segment_size();
    if size.offset_of(switch_point) == 0 {
        return Ok(());
    }
    let segment = size.segment_of(switch_point);
    let begin = size.start_of(segment);
    let mut needed = OldWal::new(source, begin, switch_point, switch_point);
    let mut whole = OldWal::new(source, begin, switch_point, size.start_of(segment + 1));
    Ok(wal_dir.keep_segment(timeline, segment, &mut needed, &mut whole)?)
}

/// The WAL between two positions, as bytes.
struct OldWal<'a> {
    source: &'a Source,
    /// What was not read yet, from the beginning of a page on.
    at: Lsn,
    /// Up to here it must be there.
    replayed: Lsn,
    end: Lsn,
    piece: io::Cursor<Vec<u8>>,
}

impl OldWal<'_> {
    fn new(source: &Source, at: Lsn, replayed: Lsn, end: Lsn) -> OldWal<'_> {
        OldWal { source, at, replayed, end, piece: io::Cursor::default() }
    }
}

impl Read for OldWal<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.piece.position() == self.piece.get_ref().len() as u64 && self.at < self.end {
            let missing = (self.end.0 - self.at.0) as usize;
            let mut bytes = vec![0; missing.next_multiple_of(XLOG_BLCKSZ).min(PIECE_PAGES * XLOG_BLCKSZ)];
            let mut slices: Vec<IoSliceMut<'_>> = bytes.chunks_mut(XLOG_BLCKSZ).map(IoSliceMut::new).collect();
            let got = self.source.read(self.at, &mut slices).map_err(io::Error::other)?;
            if got == 0 && self.at >= self.replayed {
                return Ok(0);
            }
            if got == 0 {
                let file = self.source.describe(self.at);
                return Err(io::Error::other(format!("{file}: what was replayed is not there any more")));
            }
            bytes.truncate(got.min(missing));
            self.at = Lsn(self.at.0 + bytes.len() as u64);
            self.piece = io::Cursor::new(bytes);
        }
        self.piece.read(out)
    }
}

/// Writes the history of the new timeline: what that of its parent says, and where and why it left that. The files of the
/// timelines before are kept, too. (`writeTimeLineHistory`)
fn write_histories(
    wal_dir: &WalDir,
    source: &Source,
    timeline: TimelineId,
    switch_point: Lsn,
    reason: &str,
    archive: bool,
) -> Result<(), ReplayError> {
    let history = source.history();
    let parent = history.target();
    let mut contents = Vec::new();
    for entry in history.newest_first() {
        let Some((_, text)) = source.history_file(entry.timeline)? else { continue };
        wal_dir.keep_history(entry.timeline, &text)?;
        if entry.timeline == parent {
            contents = text;
            contents.push(b'\n');
        }
    }
    if history.parent().is_some() && contents.is_empty() {
        let name = history_file_name(parent);
        return Err(ReplayError::Refused(format!(
            "{name} was there, and is not to be had any more: without it the new timeline's history would lack its ancestors; run the same command again when the archive can be reached"
        )));
    }
    contents.extend_from_slice(format!("{parent}\t{switch_point}\t{reason}\n").as_bytes());
    Ok(wal_dir.write_history(timeline, &contents, archive)?)
}

fn expand_end_command(command: &str, oldest: &str) -> Result<String, ReplayError> {
    command::expand("recovery_end_command", command, &[('r', oldest)]).map_err(ReplayError::Refused)
}
