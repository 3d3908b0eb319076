//! A standby, from start to its end.

use std::fs;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use walrider_datadir::config::Config;
use walrider_datadir::open::read_control;
use walrider_datadir::recovery_settings::RecoverySettings;
use walrider_layout::Lsn;
use walrider_layout::positions::WalPositions;
use walrider_observe::status::{self, LastError, StandbyStatus, State, Time};
use walrider_relay::backup::Standing;
use walrider_replay::end_of_recovery::Promoted;
use walrider_replay::engine::{Flow, Stop};
use walrider_replay::restartpoint::RestartpointPolicy;
use walrider_replay::stages::Stages;
use walrider_replay::startup::{Options, Promotion, Summary, replay};
use walrider_replay::stats::Stats;
use walrider_replay::upstream::{Upstream, Wanted};
use walrider_spool::{FSYNC_BUCKETS_MICROS, SpoolStats};

use crate::archiving;
use crate::error::StandbyError;
use crate::machine::{Event, Link};
use crate::node::server;
use crate::receiver;
use crate::relay::Relay;
use crate::settings::Settings;
use crate::shell::{PROMOTE_FILE, PROMOTING_FILE, PromoteFile, Shell};
use walrider_datadir::held::{HeldDir, shown};

/// How a standby ended.
#[derive(Debug)]
pub enum Outcome {
    /// Cleanly; it can be started again.
    Stopped(Summary),
    /// The directory is a primary's now.
    Promoted(Summary),
    /// Cleanly, while PostgreSQL had the directory: it was stopped by us, or by somebody else.
    ServerStopped,
    /// PostgreSQL was promoted, and runs.
    ServerPromoted,
}

/// A standby. Clones are the same one.
#[derive(Clone)]
pub struct Standby(Arc<Inner>);

struct Inner {
    shell: Arc<Shell>,
    replay: Mutex<Replayed>,
}

/// What replay has told last.
#[derive(Default)]
struct Replayed {
    state: Option<State>,
    lsn: Lsn,
    stats: status::Replay,
    stages: Stages,
    commit: Option<i64>,
    consistent: bool,
}

impl Standby {
    /// One that has not begun. `old_promote`: a promote file that counts for nothing.
    ///
    /// # Errors
    /// If the directory cannot be opened, or the system gives no event descriptor.
    pub fn new(mut settings: Settings, old_promote: Option<PromoteFile>) -> Result<Standby, StandbyError> {
        let directory = HeldDir::open(&settings.data_dir)?;
        settings.data_dir = directory.path().to_owned();
        let shell = Arc::new(Shell::new(settings, directory, old_promote)?);
        Ok(Standby(Arc::new(Inner { shell, replay: Mutex::default() })))
    }

    /// Has what is received served, too. To be called before [`Standby::run`].
    pub(crate) fn relay(&self, relay: Arc<Relay>) {
        self.0.shell.set_relay(relay);
    }

    /// Follows the primary until it is stopped or promoted, or fails.
    ///
    /// # Errors
    /// What [`StandbyError`] lists. The directory can be started again, by us or by PostgreSQL, unless it says otherwise.
    pub fn run(&self) -> Result<Outcome, StandbyError> {
        let shell = &self.0.shell;
        let receiver = self.start_receiver()?;
        let result = self.follow();
        let promotes = shell.state().machine.wishes().promotes;
        shell.hear(Event::Stop);
        if receiver.join().is_err() {
            tracing::error!("the receiver panicked");
        }
        let result = match result {
            Ok(outcome @ Outcome::Stopped(_)) => shell.flush_spool().map(|()| outcome),
            other => other,
        };
        if let Err(error) = &result
            && promotes
        {
            shell.tell_promoter(error);
        }
        let state = if result.is_ok() { State::Stopped } else { State::Failed };
        self.0.replay.lock().expect("no panic while locked").state = Some(state);
        result
    }

    /// The thread that waits until there is something to receive.
    fn start_receiver(&self) -> Result<JoinHandle<()>, StandbyError> {
        let shell = self.0.shell.clone();
        // Also without a primary: a reload may name one.
        let thread = thread::Builder::new().name("receiver".to_owned()).spawn(move || receiver::run(&shell));
        thread.map_err(|source| StandbyError::System { operation: "start the receiver thread", source })
    }

    fn follow(&self) -> Result<Outcome, StandbyError> {
        let settings = self.0.shell.settings();
        let control = read_control(&settings.data_dir)?;
        let config = Config::read(&settings.data_dir, settings.config_file.as_deref())?;
        let configured = RecoverySettings::from_config(&config, control.major)?;
        let options = Options {
            data_dir: settings.data_dir.clone(),
            config_file: settings.config_file.clone(),
            wal: settings.wal.clone(),
            archive: settings.wal_archive.clone(),
            configured_target: true,
            target: None,
            inclusive: None,
            timeline: Some(settings.timeline).filter(|&timeline| timeline != configured.target_timeline),
            memory_bytes: settings.memory_bytes,
            spill: settings.spill.clone(),
            base: None,
            new_tablespaces: None,
            verify_images: false,
            follow: true,
            promotion: Promotion::AsConfigured,
            restore_command: Some(settings.restore_command.clone().unwrap_or_default()),
            fetch_jobs: settings.fetch_jobs,
            restartpoints: RestartpointPolicy {
                interval: settings.restartpoint_interval,
                wal_bytes: settings.restartpoint_wal_bytes,
            },
            upstream: Some(self.0.shell.clone()),
        };
        let mut transactions = 0;
        let summary = replay(&options, &mut |stats, lsn| {
            let commits = stats.transactions != transactions;
            transactions = stats.transactions;
            self.progress(stats, lsn, commits)
        })?;
        if let Some(promoted) = summary.promoted.clone() {
            return self.promoted(summary, &promoted, &settings);
        }
        match &summary.stop {
            Some(Stop::Corrupt { lsn, why }) => Err(StandbyError::Corrupt { lsn: *lsn, why: why.clone() }),
            Some(Stop::Unsupported { lsn, record, .. }) => {
                Err(StandbyError::Unsupported { lsn: *lsn, record: record.clone() })
            }
            _ => Ok(Outcome::Stopped(summary)),
        }
    }

    /// A batch is replayed.
    fn progress(&self, stats: &Stats, lsn: Lsn, commits: bool) -> Flow {
        let shell = &self.0.shell;
        // What was not streamed is durable.
        let flushed = || {
            shell.spool().map_or(Lsn(u64::MAX), |spool| if lsn <= spool.written() { spool.held_durable() } else { lsn })
        };
        shell.board.applied(lsn, commits, flushed);
        if let Some(relay) = shell.relay() {
            relay.replayed(Standing {
                replayed: lsn,
                timeline: stats.timeline,
                consistent: stats.consistent,
                full_page_writes_off: stats.full_page_writes_off,
                promotes: shell.state().machine.wishes().promotes,
            });
        }
        let mut replayed = self.0.replay.lock().expect("no panic while locked");
        debug_assert!(replayed.lsn <= lsn, "replay does not go back from {} to {lsn}", replayed.lsn);
        replayed.lsn = lsn;
        replayed.consistent = stats.consistent;
        replayed.commit = stats.last_commit.map(|time| time.0);
        replayed.stats = status::Replay {
            records: stats.records,
            transactions: stats.transactions,
            aborts: stats.aborts,
            pages_read: stats.pages_read,
            pages_written: stats.pages_written,
            restartpoints: stats.restartpoints,
            sweeps: stats.sweeps,
            ..status::Replay::default()
        };
        replayed.stages = stats.stages.clone();
        drop(replayed);
        match shell.wanted() {
            Wanted::Stop | Wanted::Pause => Flow::Stop,
            Wanted::Follow | Wanted::Promote => Flow::Continue,
        }
    }

    /// The directory is a primary's; starts a server on it, if that is wanted.
    fn promoted(&self, summary: Summary, promoted: &Promoted, settings: &Settings) -> Result<Outcome, StandbyError> {
        for name in [PROMOTE_FILE, PROMOTING_FILE] {
            if let Err(error) = fs::remove_file(settings.data_dir.join(name))
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!("could not remove file \"{name}\": {error}");
            }
        }
        if let Some(spool) = self.0.shell.spool()
            && let Err(error) = spool.remove_early()
        {
            tracing::warn!("{error}");
        }
        // The archive may be gone together with the primary: the administrator who asks for a promotion knows that, as PostgreSQL has it.
        if let Some(refusal) = &summary.refusal {
            tracing::info!("the archive had no more WAL when the standby was promoted: {refusal}");
        }
        for warning in &promoted.warnings {
            tracing::warn!("{warning}");
        }
        tracing::info!(
            "promoted: selected new timeline ID: {}, it begins at {}",
            promoted.timeline,
            promoted.switch_point
        );
        if let Some(program) = &settings.pg_ctl {
            let not_started = |why| StandbyError::NotStarted { program: program.clone(), why };
            server::start(settings, true).map_err(not_started)?;
        }
        Ok(Outcome::Promoted(summary))
    }

    /// The way to the directory that it runs on, whatever its name is by now.
    pub fn data_dir(&self) -> PathBuf {
        self.0.shell.settings().data_dir
    }

    /// Changes what can change at once. The directory stays the same.
    pub fn reload(&self, mut settings: Settings) {
        settings.data_dir = self.data_dir();
        self.0.shell.reload(settings);
    }

    /// Stops cleanly; [`Standby::run`] returns.
    pub fn stop(&self) {
        self.0.shell.hear(Event::Stop);
    }

    /// Ends recovery; [`Standby::run`] returns.
    pub fn promote(&self) {
        self.0.shell.hear(Event::Promote);
    }

    /// Looks at once for the files in the data directory that ask for promotion or a pause.
    pub fn check_control_files(&self) {
        self.0.shell.check_control_files();
    }

    /// How it stands.
    pub fn status(&self) -> StandbyStatus {
        let shell = &self.0.shell;
        let settings = shell.settings();
        let state = shell.state();
        let (machine, kept, wishes) = (&state.machine, &state.shown, state.machine.wishes());
        let replayed = self.0.replay.lock().expect("no panic while locked");
        let spool = shell.spool();
        let board = &shell.board;
        let (sent, heard) = board.last_message();
        let now = match replayed.state {
            Some(state) => state,
            None if wishes.promotes => State::Promoting,
            None if board.disk_full() => State::WaitingForDisk,
            None if wishes.paused => State::Paused,
            None => match machine.link() {
                Link::Up => State::Streaming,
                Link::Connecting => State::Connecting,
                Link::Down if shell.has_found_the_end() && settings.primary.is_some() => State::Connecting,
                Link::Down if shell.has_found_the_end() || replayed.lsn.is_valid() => State::Recovering,
                Link::Down => State::Starting,
            },
        };
        let positions = WalPositions {
            horizon: board.horizon(),
            received: board.received(),
            applied: replayed.lsn,
            ..spool.map(|spool| spool.positions()).unwrap_or_default()
        };
        StandbyStatus {
            started_at: Time(shell.started_at),
            state: now,
            paused: wishes.paused,
            data_dir: shown(&settings.data_dir).display().to_string(),
            consistent: replayed.consistent,
            system_identifier: shell.opened().map(|opened| opened.system_identifier),
            timeline: spool.and_then(|spool| NonZeroU32::new(spool.timeline().0)),
            has_primary: settings.primary.is_some(),
            primary: kept.primary.clone(),
            slot: kept.slot.clone().or(settings.slot.clone()),
            application_name: kept.application_name.clone(),
            connected_since: kept.connected_since.map(Time),
            connections: machine.sessions(),
            early: kept.early,
            last_error: kept.last_error.clone().map(|(time, message)| LastError { time: Time(time), message }),
            last_message_sent: Time::from_timestamptz(sent),
            last_message_received: Time::from_timestamptz(heard),
            replayed_commit: replayed.commit.and_then(Time::from_timestamptz),
            min_apply_delay_seconds: settings.min_apply_delay.as_secs_f64(),
            replay: replay_status(&replayed),
            spool: spool.map(|spool| spool_status(&spool.stats())).unwrap_or_default(),
            downstreams: shell.relay().map(|relay| relay.downstreams()).unwrap_or_default(),
            slots: shell.relay().map(|relay| relay.slots()).unwrap_or_default(),
            archiver: archiving::status(shell.archiver()),
            ..StandbyStatus::new()
        }
        .at(
            &positions,
            board.reported(),
            kept.checkpoint_redo,
            board.age(replayed.lsn).filter(|_| replayed.lsn.is_valid()),
        )
    }
}

/// What replay has done, as it is shown.
fn replay_status(replayed: &Replayed) -> status::Replay {
    let stages = &replayed.stages;
    status::Replay {
        stages: stages.times().map(|(stage, time)| (stage.name().to_owned(), time.as_secs_f64())).collect(),
        stage: stages.now().map(|stage| stage.name().to_owned()),
        ..replayed.stats.clone()
    }
}

/// What the spool has done, as it is shown.
pub(crate) fn spool_status(stats: &SpoolStats) -> status::Spool {
    let bounds = FSYNC_BUCKETS_MICROS.map(|micros| micros as f64 / 1e6);
    status::Spool {
        bytes: stats.bytes_written,
        writes: stats.writes,
        early_bytes: stats.early_bytes,
        early_writes: stats.early_writes,
        write_seconds: Duration::from_micros(stats.write_micros).as_secs_f64(),
        // Not `stats.fsyncs`, which may be a moment older: no bucket may have more than all.
        fsyncs: stats.fsync_buckets.iter().sum(),
        fsync_seconds: Duration::from_micros(stats.fsync_micros).as_secs_f64(),
        fsync_buckets: bounds.into_iter().zip(stats.fsync_buckets).collect(),
        segments_created: stats.segments_created,
        segments_recycled: stats.segments_recycled,
        segments_removed: stats.segments_removed,
        segment_waits: stats.segment_waits,
        segment_wait_seconds: Duration::from_micros(stats.segment_wait_micros).as_secs_f64(),
    }
}
