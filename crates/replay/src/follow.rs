//! Following WAL that is still being written: replays what there is, and waits for more.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::timestamp::TimestampTz;
use walrider_datadir::watch::{Watch, Woken};
use walrider_layout::wal::page_of;
use walrider_layout::{Lsn, XLOG_BLCKSZ};

use crate::engine::{Engine, Flow, Stop};
use crate::error::ReplayError;
use crate::source::Source;
use crate::stats::Stats;
use crate::upstream::{News, Upstream, Wanted};

/// How often to look for more where changes have shown by themselves: in case that one does not.
const SAFETY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look where they have not: on a network file system, or through a link into another directory.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often to run `restore_command` (`wal_retrieve_retry_interval`).
const COMMAND_INTERVAL: Duration = Duration::from_secs(5);
/// Whether the WAL is damaged where it ends is looked at after this time, and must be so twice: what is being written, in
/// whatever order, looks damaged for a moment.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Then it is looked at from time to time, less and less often, but at least this often.
const LONGEST_SETTLE_TIME: Duration = Duration::from_secs(60);

/// Replays until there is a reason to stop that waiting does not cure. `latest`: goes over to a new timeline when one
/// branches off. `upstream`: who brings the WAL; without, it comes into the source's directories by itself.
///
/// # Errors
/// As [`Engine::run`].
pub fn follow(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    upstream: Option<Arc<dyn Upstream>>,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    match upstream {
        Some(upstream) => follow_upstream(engine, source, latest, &*upstream, progress),
        None => follow_directories(engine, source, latest, progress),
    }
}

/// Follows whoever brings WAL, as it is wanted.
fn follow_upstream(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    upstream: &dyn Upstream,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    let mut news = News::Perhaps;
    // When replay last got on.
    let mut since = Instant::now();
    let mut damaged = None;
    loop {
        let wanted = upstream.wanted();
        match wanted {
            Wanted::Stop => return Ok(Stop::Interrupted),
            Wanted::Pause => {
                // WAL is received all the same.
                wait_for_more(engine, source, upstream, "replay is paused")?;
                upstream.sleep(SAFETY_INTERVAL);
                continue;
            }
            Wanted::Follow | Wanted::Promote => {}
        }
        match news {
            News::More => source.forget_missing(),
            News::Perhaps => source.close_all(),
        }
        let delay = Some(upstream.min_apply_delay()).filter(|delay| !delay.is_zero() && wanted == Wanted::Follow);
        engine.commits_wait_from(delay.map(|delay| TimestampTz::from(SystemTime::now() - delay)));
        let before = engine.replayed();
        // What streams in has no gaps: where it is not valid for long, it is damaged. What lies there from before may have
        // some, and is streamed again.
        let more = upstream.visible() > Lsn(before.0 + 2 * XLOG_BLCKSZ as u64);
        engine.look_past(!upstream.uses_archives() && more && since.elapsed() >= SETTLE_TIME);
        let stop = engine.run(progress)?;
        if engine.replayed() > before {
            (since, damaged) = (Instant::now(), None);
        }
        match stop {
            // Promoted in the middle of something, the whole of what there is counts.
            Stop::EndOfWal { why } if wanted == Wanted::Promote && news == News::Perhaps => {
                if engine.replayed() == before && !upstream.release(engine.used(), source.history().target())? {
                    return Ok(Stop::EndOfWal { why });
                }
            }
            Stop::EndOfWal { .. } if wanted == Wanted::Promote => news = News::Perhaps,
            Stop::EndOfWal { why } => {
                news = wait_for_more(engine, source, upstream, &why)?;
                if news == News::Perhaps && latest {
                    look_for_timeline(engine, source)?;
                }
            }
            // Being written just now, perhaps.
            Stop::Corrupt { lsn, .. } if damaged != Some(lsn) => (since, damaged) = (Instant::now(), Some(lsn)),
            Stop::ApplyDelay { committed } => {
                let due = SystemTime::now() - delay.unwrap_or_default();
                let micros = committed.0.saturating_sub(TimestampTz::from(due).0);
                upstream.sleep(Duration::from_micros(micros.max(0) as u64).min(SAFETY_INTERVAL));
                news = News::More;
            }
            Stop::Interrupted => {}
            stop => return Ok(stop),
        }
    }
}

/// Waits until somebody has brought more.
fn wait_for_more(
    engine: &Engine<'_>,
    source: &Source,
    upstream: &dyn Upstream,
    why: &str,
) -> Result<News, ReplayError> {
    let needed = engine.needed();
    // A page on which timelines part is whole in the file of the new one, and is read from there only.
    let timeline = source.history().timeline_at(Lsn(page_of(needed).0 + XLOG_BLCKSZ as u64 - 1));
    upstream.wait(engine.replayed(), needed, timeline, why)
}

/// Follows what is written into the source's directories.
fn follow_directories(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    let mut waiting = Waiting::new(source);
    // When the WAL's end was new, or last looked at, and how long to leave it alone from then on.
    let (mut since, mut settle) = (Instant::now(), SETTLE_TIME);
    let mut damaged = None;
    loop {
        let before = engine.replayed();
        let looks = since.elapsed() >= settle;
        engine.look_past(looks);
        let stop = engine.run(progress)?;
        let more = engine.replayed() > before;
        waiting.note(more);
        match &stop {
            Stop::EndOfWal { .. } if more => (since, settle, damaged) = (Instant::now(), SETTLE_TIME, None),
            Stop::EndOfWal { .. } if looks => {
                (since, settle, damaged) = (Instant::now(), LONGEST_SETTLE_TIME.min(2 * settle), None);
            }
            Stop::EndOfWal { .. } => {}
            // Being written just now, perhaps.
            Stop::Corrupt { lsn, .. } if damaged != Some(*lsn) => {
                (since, settle, damaged) = (Instant::now(), SETTLE_TIME, Some(*lsn));
            }
            _ => return Ok(stop),
        }
        if progress(&engine.stats, engine.replayed()) == Flow::Stop {
            return Ok(Stop::Interrupted);
        }
        if waiting.wait(source) != Woken::Written && latest {
            look_for_timeline(engine, source)?;
        }
    }
}

/// Goes over to the newest timeline, if it leads through where replay stands (`rescanLatestTimeLine`).
fn look_for_timeline(engine: &mut Engine<'_>, source: &Source) -> Result<(), ReplayError> {
    let target = source.history().target();
    let newest = source.newest_timeline(target)?;
    if newest == target {
        return Ok(());
    }
    let history = source.read_history(newest)?;
    if history.switch_point(target).is_some_and(|switch| switch >= engine.replayed()) {
        engine.set_history(history.clone());
        source.set_history(history);
    }
    Ok(())
}

/// How to learn that there may be more WAL.
struct Waiting {
    watch: Watch,
    commands: bool,
    /// What came last showed by itself.
    shows: bool,
    woken: Woken,
}

impl Waiting {
    fn new(source: &Source) -> Waiting {
        // Fetching changes pg_wal: we would wake ourselves.
        let commands = source.runs_commands();
        let watch = Watch::new(if commands { Vec::new() } else { source.directories() });
        // What was found before may have changed meanwhile.
        source.close_all();
        Waiting { watch, commands, shows: false, woken: Woken::Timeout }
    }

    /// Notes whether there was more WAL after the last wait.
    fn note(&mut self, more: bool) {
        if more {
            self.shows = self.woken != Woken::Timeout;
        }
    }

    /// Waits until there may be more WAL, and has the source look again for what may have changed.
    fn wait(&mut self, source: &Source) -> Woken {
        self.woken = self.watch.wait(match self {
            Waiting { commands: true, .. } => COMMAND_INTERVAL,
            Waiting { shows: true, .. } => SAFETY_INTERVAL,
            _ => POLL_INTERVAL,
        });
        if self.woken != Woken::Written {
            source.close_all();
        }
        self.woken
    }
}
