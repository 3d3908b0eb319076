//! Following WAL that is still being written: replays what there is, and waits for more.

use std::time::{Duration, Instant};

use walrider_datadir::watch::{Watch, Woken};
use walrider_layout::Lsn;

use crate::engine::{Engine, Flow, Stop};
use crate::error::ReplayError;
use crate::source::Source;
use crate::stats::Stats;

/// Stretches of WAL while following: it comes in small pieces.
const WINDOW_BYTES: u64 = 128 << 10;
/// How often to look for more where changes have shown by themselves: in case that one does not.
const SAFETY_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look where they have not: on a network file system, or through a link into another directory.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often to run `restore_command` (`wal_retrieve_retry_interval`).
const COMMAND_INTERVAL: Duration = Duration::from_secs(5);
/// WAL that looks damaged is, if it still does after this time: what is written out of order, or moves while we read,
/// looks so for a moment.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// Replays until there is a reason to stop that waiting does not cure. `latest`: goes over to a new timeline when one
/// branches off.
///
/// # Errors
/// As [`Engine::run`].
pub fn follow(
    engine: &mut Engine<'_>,
    source: &Source,
    latest: bool,
    progress: &mut dyn FnMut(&Stats, Lsn) -> Flow,
) -> Result<Stop, ReplayError> {
    let mut waiting = Waiting::new(source);
    let mut damaged: Option<(Lsn, Instant)> = None;
    loop {
        let before = engine.replayed();
        let stop = engine.run(progress)?;
        waiting.note(engine.replayed() > before);
        match &stop {
            Stop::EndOfWal { .. } => damaged = None,
            Stop::Corrupt { lsn, .. } => {
                let since = damaged.filter(|(at, _)| at == lsn).map_or_else(Instant::now, |(_, since)| since);
                if since.elapsed() >= SETTLE_TIME {
                    return Ok(stop);
                }
                damaged = Some((*lsn, since));
            }
            _ => return Ok(stop),
        }
        engine.set_window(WINDOW_BYTES);
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
