//! A standby's directory, and who replays into it: Walrider alone; or, where it is to be read, Walrider far from the end of WAL and
//! PostgreSQL near it, in turns ([`Turns`] says when).

pub(crate) mod server;

use std::fs::{File, TryLockError};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::DataDirError;
use walrider_datadir::durable::unlink;
use walrider_datadir::held::{HeldDir, shown};
use walrider_datadir::lock;
use walrider_datadir::open::read_control;
use walrider_datadir::slots::{logical_slots, read_slots};
use walrider_layout::Lsn;
use walrider_layout::control::DbState;
use walrider_layout::positions::WalPositions;
use walrider_layout::samples::PositionSamples;
use walrider_observe::status::{LastError, StandbyStatus, State, Time};
use walrider_relay::service::Access;
use walrider_replay::stages::Stage;
use walrider_replay::startup::holds_what_was_early;
use walrider_session::ConnectOptions;

use crate::error::StandbyError;
use crate::relay::{Relay, RelaySettings};
use crate::settings::Settings;
use crate::shell::{PAUSE_FILE, PROMOTE_FILE, PromoteFile};
use crate::standby::{Outcome, Standby};
use crate::turns::Turns;
use server::{Seen, Session};

/// How often to look how far Walrider's replay is behind, and whether a server is there that was started.
const SHORT: Duration = Duration::from_millis(200);
/// How often to ask a server.
const LONG: Duration = Duration::from_secs(1);
/// How long a server that was stopped by somebody may be away: it may be started again.
const RESTART: Duration = Duration::from_secs(3);
/// How long what a killed server has left behind may take to go before we complain.
const LEFT_BEHIND: Duration = Duration::from_secs(60);

/// A standby as a service. Clones are the same one.
#[derive(Clone)]
pub struct Node(Arc<Inner>);

struct Inner {
    /// Keeps the data directory's path in the settings right, and tells who we are while PostgreSQL has the lock file.
    _directory: HeldDir,
    began: Instant,
    started_at: SystemTime,
    /// Left over from an earlier run.
    old_promote: Option<PromoteFile>,
    state: Mutex<NodeState>,
    /// Somebody wishes something.
    wished: Condvar,
    /// Who serves what is received, if anybody does.
    relay: OnceLock<Arc<Relay>>,
}

struct NodeState {
    settings: Settings,
    /// Walrider's turn; else it is PostgreSQL's.
    standby: Option<Standby>,
    /// What PostgreSQL said last in its turn.
    seen: Option<Seen>,
    /// How far the primary was when, by what PostgreSQL said.
    horizons: PositionSamples,
    wishes: Wishes,
    last_error: Option<(SystemTime, String)>,
    /// Since when PostgreSQL receives, in its turn.
    connected_since: Option<SystemTime>,
    /// How often PostgreSQL has had the directory.
    turns: u64,
}

#[derive(Clone, Copy, Default)]
struct Wishes {
    stop: bool,
    promote: bool,
    reload: bool,
    /// Look for the pause file.
    look: bool,
}

/// How PostgreSQL's turn ended.
enum Ended {
    /// And the run with it.
    Over(Box<Outcome>),
    FellBehind,
    Failed,
}

/// What was done in a turn of PostgreSQL's.
#[derive(Default)]
struct Told {
    /// It has answered.
    answered: bool,
    /// It was told to promote itself.
    promote: bool,
    /// Its replay was paused by the file.
    pause: bool,
    /// Somebody has asked to look at the file.
    look: bool,
    /// Why it keeps the directory although it is far behind.
    keeps: bool,
}

impl Told {
    /// Whether the file says otherwise than the server. What somebody else has paused stays so, unless we are asked.
    fn is_to_pause(&self, file: bool, paused: bool) -> bool {
        file != paused && (file || self.pause || self.look)
    }
}

/// Sets a flag when it is dropped.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Node {
    /// One that has not begun.
    ///
    /// # Errors
    /// If the directory cannot be opened.
    pub fn new(mut settings: Settings) -> Result<Node, StandbyError> {
        let directory = HeldDir::open(&settings.data_dir)?;
        settings.data_dir = directory.path().to_owned();
        Ok(Node(Arc::new(Inner {
            _directory: directory,
            began: Instant::now(),
            started_at: SystemTime::now(),
            old_promote: PromoteFile::find(&settings.data_dir.join(PROMOTE_FILE)),
            state: Mutex::new(NodeState {
                settings,
                standby: None,
                seen: None,
                horizons: PositionSamples::default(),
                wishes: Wishes::default(),
                last_error: None,
                connected_since: None,
                turns: 0,
            }),
            wished: Condvar::new(),
            relay: OnceLock::new(),
        })))
    }

    /// Serves what is received to others, too. To be called before [`Node::run`]; not where PostgreSQL has the directory in turns.
    ///
    /// # Errors
    /// Those of [`Relay::listen`].
    pub fn serve(&self, settings: RelaySettings, access: Access) -> Result<Arc<Relay>, StandbyError> {
        let relay = Relay::listen(&self.data_dir(), settings, access)?;
        let _ = self.0.relay.set(relay.clone());
        Ok(relay)
    }

    fn lock(&self) -> MutexGuard<'_, NodeState> {
        self.0.state.lock().expect("no panic while locked")
    }

    fn now(&self) -> Duration {
        self.0.began.elapsed()
    }

    fn settings(&self) -> Settings {
        self.lock().settings.clone()
    }

    /// Follows the primary until it is stopped or promoted, or fails.
    ///
    /// # Errors
    /// What [`StandbyError`] lists.
    pub fn run(&self) -> Result<Outcome, StandbyError> {
        let settings = self.settings();
        let Some(readable) = &settings.readable else { return self.follow(None) };
        let _alone = alone(&settings)?;
        let outcome = self.take_turns(&settings, Turns::new(readable.limits))?;
        if matches!(outcome, Outcome::Promoted(_) | Outcome::ServerPromoted) {
            // PostgreSQL may have promoted itself before it was told how.
            unlink(&settings.data_dir.join(PROMOTE_FILE))?;
            if std::env::var_os("NOTIFY_SOCKET").is_some() {
                // A service manager kills what a service leaves behind.
                tracing::info!("PostgreSQL is stopped, for the service that it has of its own");
                server::stop(&settings)?;
            }
        }
        Ok(outcome)
    }

    fn take_turns(&self, settings: &Settings, mut turns: Turns) -> Result<Outcome, StandbyError> {
        // Of an earlier run, which was killed.
        let mut server = server::running(settings)?.is_some();
        if server && server::is_promoted(settings) {
            let why =
                "a server runs on the directory, and there is no standby.signal: it is a primary's, or about to be";
            return Err(StandbyError::NotAStandby(why.to_owned()));
        }
        loop {
            if !server {
                if let Some(names) = self.logical_slots() {
                    self.complain(format!("PostgreSQL gets the directory at once: {}", why_it_keeps(&names)));
                    while !turns.may_lend(self.now()) {
                        if self.lock().wishes.stop {
                            return Ok(Outcome::ServerStopped);
                        }
                        thread::sleep(SHORT);
                    }
                } else {
                    let outcome = self.follow(Some(&turns))?;
                    if !matches!(outcome, Outcome::Stopped(_)) || self.lock().wishes.stop {
                        return Ok(outcome);
                    }
                }
                server = self.start_server(&mut turns);
                if !server {
                    continue;
                }
            } else {
                tracing::info!("PostgreSQL has the directory, and can be read as soon as it is consistent");
                turns.lend(self.now());
            }
            self.lock().turns = turns.count();
            let ended = self.watch_server(&mut turns)?;
            match ended {
                Ended::Over(outcome) => return Ok(*outcome),
                Ended::FellBehind => turns.fell_behind(self.now()),
                Ended::Failed => turns.failed(self.now()),
            }
            server = false;
            if !self.wait_until_free() {
                return Ok(Outcome::ServerStopped);
            }
        }
    }

    /// Walrider's turn: ends as [`Standby::run`] does, or stopped near the end of WAL.
    fn follow(&self, turns: Option<&Turns>) -> Result<Outcome, StandbyError> {
        let mut state = self.lock();
        let standby = Standby::new(state.settings.clone(), self.0.old_promote)?;
        if let Some(relay) = self.0.relay.get() {
            standby.relay(relay.clone());
        }
        // The first time it is one, or has become one.
        state.settings.make_standby = false;
        state.standby = Some(standby.clone());
        let wishes = state.wishes;
        drop(state);
        if wishes.stop {
            standby.stop();
        }
        if wishes.promote {
            standby.promote();
        }
        let Some(turns) = turns else { return standby.run() };
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let looks = thread::Builder::new().name("turns".to_owned());
            let looks = looks.spawn_scoped(scope, || self.stop_near_the_end(&standby, turns, &over));
            looks.map_err(|source| StandbyError::System { operation: "start a thread", source })?;
            // Also if it panics: the scope waits for that thread.
            let _set = SetAtEnd(&over);
            standby.run()
        })
    }

    /// Stops it when it is near the end of WAL, or has been at the end of what there is for a while without a primary; gives up when
    /// it is over.
    fn stop_near_the_end(&self, standby: &Standby, turns: &Turns, over: &AtomicBool) {
        let (mut waits_since, mut told) = (None, false);
        while !over.load(Ordering::Relaxed) {
            thread::sleep(SHORT);
            let Some(limits) = self.settings().readable.map(|readable| readable.limits) else { return };
            let (status, now) = (standby.status(), self.now());
            let waits = [State::Connecting, State::Recovering].contains(&status.state)
                && status.replay.stage.as_deref() == Some(Stage::Wait.name());
            waits_since = if waits { waits_since.or(Some(now)) } else { None };
            let why = match status.positions.replayed.behind_bytes {
                _ if !status.consistent || !turns.may_lend(now) => continue,
                Some(behind) if status.state == State::Streaming && behind <= limits.within => {
                    format!("replay is {behind} bytes behind")
                }
                _ if waits_since.is_some_and(|since| now - since >= limits.patience) => {
                    if holds_what_was_early(&self.data_dir()).unwrap_or(true) {
                        if !std::mem::replace(&mut told, true) {
                            self.complain(
                                "the primary is away, and there is WAL that it had not flushed when it was received and acknowledged: \
                                 PostgreSQL would not replay that, and gets the directory only when the primary is there; if it is lost, \
                                 walrider promote replays it"
                                    .to_owned(),
                            );
                        }
                        continue;
                    }
                    "all WAL that there is has been replayed, and the primary is away".to_owned()
                }
                _ => continue,
            };
            tracing::info!("{why}: PostgreSQL gets the directory");
            return standby.stop();
        }
    }

    /// PostgreSQL's turn begins; false if it could not.
    fn start_server(&self, turns: &mut Turns) -> bool {
        let settings = {
            let mut state = self.lock();
            state.standby = None;
            state.settings.clone()
        };
        turns.lend(self.now());
        let started = server::start(&settings, false);
        match (started, server::running(&settings)) {
            (_, Ok(Some(_))) => true,
            (started, running) => {
                let why = started.err().or(running.err().map(|error| error.to_string()));
                let why = why.unwrap_or_else(|| "it ended at once; see its log".to_owned());
                self.complain(format!("could not start PostgreSQL, Walrider goes on: {why}"));
                turns.failed(self.now());
                false
            }
        }
    }

    /// PostgreSQL's turn.
    fn watch_server(&self, turns: &mut Turns) -> Result<Ended, StandbyError> {
        let mut session = Session::default();
        let mut told = Told::default();
        let mut interval = SHORT;
        loop {
            let (settings, wishes) = self.wait_for_wishes(interval);
            let readable = settings.readable.as_ref().expect("without it PostgreSQL has no turn");
            turns.set_limits(readable.limits);
            told.look |= wishes.look;
            let Some(lock) = server::running(&settings)? else {
                self.forget();
                match self.server_is_gone(&settings, told.answered)? {
                    Some(ended) => return Ok(ended),
                    None => continue,
                }
            };
            if server::is_promoted(&settings) {
                // It ends recovery, or has ended it. Nobody stops a primary here.
                if server::state(&settings)? == DbState::InProduction {
                    return Ok(Ended::Over(Box::new(Outcome::ServerPromoted)));
                }
                // A wish to stop would not let us wait.
                thread::sleep(SHORT);
                continue;
            }
            if wishes.stop {
                self.forget();
                server::stop(&settings)?;
                return Ok(Ended::Over(Box::new(Outcome::ServerStopped)));
            }
            let promote = wishes.promote || settings.data_dir.join(PROMOTE_FILE).exists();
            if promote && !told.promote && server::state(&settings)? == DbState::InArchiveRecovery {
                told.promote = self.note("have PostgreSQL promoted", server::promote(&settings)).is_some();
            }
            if wishes.reload {
                self.note("have PostgreSQL read its configuration", server::reload(&settings));
            }
            if lock.status != "ready" {
                // It may wait for our session to end.
                session = Session::default();
                self.forget();
                continue;
            }
            interval = LONG;
            let answer = self.note("ask PostgreSQL how far it is", session.ask(readable, &lock));
            // Else it ends recovery just now.
            let Some(seen) = answer.filter(|seen| seen.in_recovery) else {
                self.forget();
                continue;
            };
            if !told.answered {
                tracing::info!("PostgreSQL can be read; it has replayed {}", seen.replayed);
                turns.answers(self.now());
                told.answered = true;
            }
            let pause = settings.data_dir.join(PAUSE_FILE).exists();
            if told.is_to_pause(pause, seen.paused)
                && self.note("pause or resume PostgreSQL's replay", session.pause(readable, &lock, pause)).is_some()
            {
                (told.pause, told.look) = (pause, false);
            }
            let behind = seen.behind();
            self.tell(seen);
            if turns.is_far(behind, self.now()) && !server::is_promoted(&settings) {
                let behind = behind.unwrap_or_default();
                if let Some(names) = self.logical_slots() {
                    if !std::mem::replace(&mut told.keeps, true) {
                        let why = why_it_keeps(&names);
                        self.complain(format!("PostgreSQL is {behind} bytes behind, and keeps the directory: {why}"));
                    }
                    continue;
                }
                tracing::warn!("PostgreSQL is {behind} bytes behind and is stopped: Walrider catches up");
                self.forget();
                server::stop(&settings)?;
                return Ok(Ended::FellBehind);
            }
        }
    }

    /// The logical slots that PostgreSQL has there, as one that was made in its turn: Walrider refuses a directory with such.
    fn logical_slots(&self) -> Option<String> {
        let settings = self.settings();
        let data_dir = &settings.data_dir;
        // Where it is no standby's yet, or PostgreSQL must not have it, the refusal says what is to be done.
        if server::is_promoted(&settings) || holds_what_was_early(data_dir).unwrap_or(true) {
            return None;
        }
        logical_slots(&read_slots(data_dir).ok()?)
    }

    /// What it has said does not hold any more.
    fn forget(&self) {
        let mut state = self.lock();
        (state.seen, state.connected_since) = (None, None);
    }

    fn tell(&self, seen: Seen) {
        let mut state = self.lock();
        state.connected_since = if seen.connected { state.connected_since.or(Some(SystemTime::now())) } else { None };
        state.horizons.note(self.now().as_secs_f64(), seen.horizon());
        state.seen = Some(seen);
    }

    /// Nobody told us to stop it. `None`: it is there again.
    fn server_is_gone(&self, settings: &Settings, answered: bool) -> Result<Option<Ended>, StandbyError> {
        if server::is_promoted(settings) {
            return Ok(Some(Ended::Over(Box::new(Outcome::ServerPromoted))));
        }
        // That is also what Walrider has left, until the server has begun.
        if !answered || server::state(settings)? != DbState::ShutDownInRecovery {
            self.complain("PostgreSQL has crashed, or was killed: Walrider goes on with the directory".to_owned());
            return Ok(Some(Ended::Failed));
        }
        let until = Instant::now() + RESTART;
        while Instant::now() < until {
            if server::running(settings)?.is_some() {
                return Ok(None);
            }
            thread::sleep(SHORT);
        }
        tracing::warn!("PostgreSQL was stopped, and not by Walrider, which ends too");
        Ok(Some(Ended::Over(Box::new(Outcome::ServerStopped))))
    }

    /// What a server that was killed has left behind ends by itself. False: Walrider is to end before.
    fn wait_until_free(&self) -> bool {
        let complain_at = Instant::now() + LEFT_BEHIND;
        let mut told = false;
        while let Err(error) = lock::check_free(&self.settings().data_dir) {
            if self.lock().wishes.stop {
                return false;
            }
            if !told && Instant::now() > complain_at {
                self.complain(format!("Walrider waits for the directory: {error}"));
                told = true;
            }
            thread::sleep(SHORT);
        }
        true
    }

    /// Waits for a wish, or so long. What is done at once is taken away.
    fn wait_for_wishes(&self, time: Duration) -> (Settings, Wishes) {
        let idle = |state: &mut NodeState| {
            let wishes = state.wishes;
            // A promotion waits for the server, which is looked for from time to time.
            !(wishes.stop || wishes.reload || wishes.look)
        };
        let mut state = self.0.wished.wait_timeout_while(self.lock(), time, idle).expect("no panic while locked").0;
        let wishes = state.wishes;
        (state.wishes.reload, state.wishes.look) = (false, false);
        (state.settings.clone(), wishes)
    }

    /// An error that the run survives; it is logged when it is another than the last.
    fn note<T, E: std::fmt::Display>(&self, operation: &str, result: Result<T, E>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let text = format!("could not {operation}: {error}");
                if self.lock().last_error.as_ref().is_none_or(|(_, last)| *last != text) {
                    self.complain(text);
                }
                None
            }
        }
    }

    fn complain(&self, text: String) {
        tracing::error!("{text}");
        self.lock().last_error = Some((SystemTime::now(), text));
    }

    /// The way to the directory that it runs on, whatever its name is by now.
    pub fn data_dir(&self) -> PathBuf {
        self.settings().data_dir
    }

    fn wish(&self, change: impl FnOnce(&mut Wishes), tell: impl FnOnce(&Standby)) {
        let mut state = self.lock();
        change(&mut state.wishes);
        let standby = state.standby.clone();
        drop(state);
        if let Some(standby) = standby {
            tell(&standby);
        }
        self.0.wished.notify_all();
    }

    /// Changes what can change at once, and has PostgreSQL do so in its turn. The directory stays the same.
    pub fn reload(&self, mut settings: Settings) {
        let running = self.settings();
        settings.data_dir = running.data_dir;
        settings.make_standby = running.make_standby;
        // Whether it is read needs a restart.
        if running.readable.is_none() || settings.readable.is_none() {
            (settings.readable, settings.pg_ctl, settings.early) = (running.readable, running.pg_ctl, running.early);
        }
        self.lock().settings = settings.clone();
        self.wish(|wishes| wishes.reload = true, |standby| standby.reload(settings));
    }

    /// Stops cleanly; [`Node::run`] returns.
    pub fn stop(&self) {
        self.wish(|wishes| wishes.stop = true, Standby::stop);
    }

    /// Ends recovery; [`Node::run`] returns.
    pub fn promote(&self) {
        self.wish(|wishes| wishes.promote = true, Standby::promote);
    }

    /// Looks at once for the files in the data directory that ask for promotion or a pause.
    pub fn check_control_files(&self) {
        // In its turn PostgreSQL takes such a file for its own.
        let promote = self.data_dir().join(PROMOTE_FILE).exists();
        let wish = |wishes: &mut Wishes| (wishes.look, wishes.promote) = (true, wishes.promote || promote);
        self.wish(wish, Standby::check_control_files);
    }

    /// How it stands.
    pub fn status(&self) -> StandbyStatus {
        let state = self.lock();
        let last_error = state.last_error.clone().map(|(time, message)| LastError { time: Time(time), message });
        if let Some(standby) = state.standby.clone() {
            let turns = state.turns;
            drop(state);
            let status = standby.status();
            return StandbyStatus {
                started_at: Time(self.0.started_at),
                turns,
                last_error: status.last_error.clone().or(last_error),
                ..status
            };
        }
        let status = StandbyStatus {
            started_at: Time(self.0.started_at),
            turns: state.turns,
            last_error,
            connected_since: state.connected_since.map(Time),
            ..StandbyStatus::new()
        };
        let (settings, seen) = (state.settings.clone(), state.seen.clone());
        let replayed = seen.as_ref().map(|seen| seen.replayed).filter(|replayed| replayed.is_valid());
        let age = replayed.and_then(|replayed| state.horizons.age(replayed, self.now().as_secs_f64()));
        drop(state);
        of_server(&settings, seen, age, status)
    }
}

/// The status in PostgreSQL's turn.
fn of_server(
    settings: &Settings,
    seen: Option<Seen>,
    age: Option<(f64, bool)>,
    status: StandbyStatus,
) -> StandbyStatus {
    let control = read_control(&settings.data_dir).ok();
    let readable = seen.is_some();
    let seen = seen.unwrap_or_default();
    let positions = WalPositions {
        horizon: seen.horizon(),
        received: seen.received,
        // What a walreceiver counts as received it has flushed.
        held: seen.received,
        held_durable: seen.received,
        applied: seen.replayed,
        ..WalPositions::default()
    };
    StandbyStatus {
        state: if readable { State::Readable } else { State::Starting },
        paused: seen.paused,
        consistent: readable,
        data_dir: shown(&settings.data_dir).display().to_string(),
        system_identifier: control.as_ref().map(|control| control.system_identifier),
        timeline: seen
            .timeline
            .or(control.as_ref().and_then(|control| NonZeroU32::new(control.checkpoint_copy.timeline.0))),
        primary: seen.primary,
        slot: seen.slot.or(settings.slot.clone()),
        application_name: name(settings),
        has_primary: settings.primary.is_some(),
        replayed_commit: seen.commit.and_then(Time::from_timestamptz),
        min_apply_delay_seconds: settings.min_apply_delay.as_secs_f64(),
        ..status
    }
    .at(&positions, seen.replayed, control.map_or(Lsn::INVALID, |control| control.checkpoint_copy.redo), age)
}

fn why_it_keeps(slots: &str) -> String {
    format!(
        "it has logical replication slots ({slots}), which Walrider's replay could not keep valid; drop them to have that"
    )
}

/// Of a standby of the primary's: PostgreSQL's is Walrider's.
fn name(settings: &Settings) -> Option<String> {
    let options = ConnectOptions::resolve(settings.primary.as_ref()?, &settings.application_name_fallback).ok()?;
    Some(options.application_name().to_owned())
}

/// Keeps a second one away that would watch the same server; until it is dropped. The file is one that every data directory has.
fn alone(settings: &Settings) -> Result<File, StandbyError> {
    let path = settings.data_dir.join("PG_VERSION");
    let failed = |source| StandbyError::System { operation: "lock file \"PG_VERSION\"", source };
    let file = File::open(path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(failed(error)),
        Err(TryLockError::WouldBlock) => {
            let why = "another walrider standby --readable has the directory: stop that first, with walrider stop";
            Err(DataDirError::Refused(why.to_owned()).into())
        }
    }
}
