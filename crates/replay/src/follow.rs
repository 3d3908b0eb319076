//! Following WAL that is still being written: replays what there is, and waits for more.

use std::time::{Duration, Instant};

use walrider_datadir::watch::{Watch, Woken};
use walrider_layout::Lsn;

use crate::engine::{Engine, Flow, Stop};
use crate::error::ReplayError;
use crate::source::Source;
use crate::stats::Stats;

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
    // When the WAL's end was new, or last looked at, and how long to leave it alone from then on.
    let (mut since, mut settle) = (Instant::now(), SETTLE_TIME);
    let mut damaged = None;
    loop {
        let before = engine.replayed();
        let looks = since.elapsed() >= settle;
        engine.look_behind(looks);
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
