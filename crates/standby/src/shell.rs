//! The standby around its [`Machine`]: locks, threads, files and the clock, and the standby as replay sees it ([`Upstream`]). What
//! to do is decided there; here it is done.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use walrider_archive::archiver::Archiver;
use walrider_datadir::command;
use walrider_datadir::durable::{read_file, write_file};
use walrider_datadir::held::HeldDir;
use walrider_datadir::open::read_control;
use walrider_datadir::slots::read_slots;
use walrider_datadir::{DataDir, DataDirError};
use walrider_layout::control::ControlFile;
use walrider_layout::history::{TimelineHistory, history_file_name};
use walrider_layout::{Lsn, TimelineId};
use walrider_relay::origin::Identity;
use walrider_replay::error::ReplayError;
use walrider_replay::upstream::{Missing, News, Same, Upstream, Wanted};
use walrider_spool::{ArchiveStatus, Judgement, Spool, SpoolError, SpoolOptions};
use walrider_store::StoreError;
use walrider_store::source::Kept;
use walrider_stream::board::Board;
use walrider_stream::error::ReceiveError;
use walrider_wal::decode::WalFormat;

use crate::admit::admit;
use crate::archiving;
use crate::error::StandbyError;
use crate::machine::{
    Action, Ended, Event, LOOK_INTERVAL, Link, Look, Machine, Next, Rules, Stored, Task, Verdict, Wait,
};
use crate::relay::Relay;
use crate::restored::{Standing, compare, is_full, useless};
use crate::settings::Settings;

/// Most segments that are kept for reuse.
const MAX_RECYCLED: u64 = 16;

/// File in the data directory that asks for promotion, as PostgreSQL has it (`PROMOTE_SIGNAL_FILE`).
pub const PROMOTE_FILE: &str = "promote";
/// File in the data directory from the moment that a promotion has made visible what the primary could have taken back: from
/// then on there is no way back to following it. Holds the timeline that is left.
pub(crate) const PROMOTING_FILE: &str = "walrider.promoting";
/// File in the data directory as long as replay is to pause.
pub const PAUSE_FILE: &str = "walrider.pause";

/// What changes under the lock.
pub(crate) struct State {
    pub machine: Machine,
    /// What [`Verdict::Fatal`] was about, until replay ends with it.
    fatal: Option<StandbyError>,
    pub shown: Shown,
}

/// What is there for the status alone.
#[derive(Default)]
pub(crate) struct Shown {
    pub primary: Option<String>,
    pub application_name: Option<String>,
    pub slot: Option<String>,
    pub connected_since: Option<SystemTime>,
    /// WAL comes before the primary has flushed it.
    pub early: bool,
    pub last_error: Option<(SystemTime, String)>,
    pub checkpoint_redo: Lsn,
}

/// Where WAL goes, and whose it is.
pub(crate) struct Opened {
    pub spool: Arc<Spool>,
    pub system_identifier: u64,
    pub major: u32,
    format: WalFormat,
}

/// The standby's shared state.
pub(crate) struct Shell {
    pub board: Arc<Board>,
    settings: Mutex<Settings>,
    /// Keeps the data directory's path in the settings right.
    _directory: HeldDir,
    state: Mutex<State>,
    /// Whenever the machine has heard something that somebody may wait for.
    changed: Condvar,
    opened: OnceLock<Opened>,
    /// Taken to open it.
    opening: Mutex<()>,
    archive_status: OnceLock<ArchiveStatus>,
    /// Replay has found no more WAL once, and the primary is asked from then on.
    found_the_end: AtomicBool,
    /// Who serves what is received, if anybody does.
    relay: OnceLock<Arc<Relay>>,
    archiver: OnceLock<Archiver>,
    pub started_at: SystemTime,
    old_promote: Option<PromoteFile>,
    /// What the machine's times are since.
    began: Instant,
}

/// How long replay waits for what comes of a session whose connection is there.
const CONNECTING: Duration = Duration::from_secs(5);

/// A promote file: which one it is, and when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromoteFile(u64, i64, i64);

impl PromoteFile {
    /// The one that is there.
    pub fn find(path: &Path) -> Option<PromoteFile> {
        let found = std::fs::metadata(path).ok()?;
        Some(PromoteFile(found.ino(), found.ctime(), found.ctime_nsec()))
    }
}

impl Settings {
    fn rules(&self) -> Rules {
        Rules { has_primary: self.primary.is_some(), retry_interval: self.retry_interval }
    }
}

impl Shell {
    /// One that has not begun.
    pub fn new(
        settings: Settings,
        directory: HeldDir,
        old_promote: Option<PromoteFile>,
    ) -> Result<Shell, StandbyError> {
        let board = Board::new(settings.timing())
            .map_err(|source| StandbyError::System { operation: "make an event descriptor", source })?;
        let machine = Machine::new(settings.rules());
        Ok(Shell {
            board: Arc::new(board),
            settings: Mutex::new(settings),
            _directory: directory,
            state: Mutex::new(State { machine, fatal: None, shown: Shown::default() }),
            changed: Condvar::new(),
            opened: OnceLock::new(),
            opening: Mutex::new(()),
            archive_status: OnceLock::new(),
            found_the_end: AtomicBool::new(false),
            relay: OnceLock::new(),
            archiver: OnceLock::new(),
            started_at: SystemTime::now(),
            old_promote,
            began: Instant::now(),
        })
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Has what is received served, too. To be called before anything is.
    pub fn set_relay(&self, relay: Arc<Relay>) {
        relay.tells(self.board.clone());
        let _ = self.relay.set(relay);
    }

    /// Who serves what is received.
    pub fn relay(&self) -> Option<&Arc<Relay>> {
        self.relay.get()
    }

    /// Who archives what is received.
    pub fn archiver(&self) -> Option<&Archiver> {
        self.archiver.get()
    }

    /// The settings as they are now.
    pub fn settings(&self) -> Settings {
        self.settings.lock().expect("no panic while locked").clone()
    }

    /// What changes.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    /// The spool, once it is open.
    pub fn spool(&self) -> Option<&Arc<Spool>> {
        self.opened.get().map(|opened| &opened.spool)
    }

    /// What there is to receive into; there is, once there was a task.
    pub fn opened(&self) -> Option<&Opened> {
        self.opened.get()
    }

    /// Other settings. What cannot change while it runs stays.
    pub fn reload(&self, new: Settings) {
        let event = {
            let mut settings = self.settings.lock().expect("no panic while locked");
            let event = Event::Reload { rules: new.rules(), reconnects: !settings.keeps_session(&new) };
            *settings = new;
            event
        };
        self.board.set_timing(self.settings().timing());
        self.hear(event);
    }

    /// Tells the machine, does what it says, and wakes all who wait for it.
    pub fn hear(&self, event: Event) {
        let mut state = self.state();
        for action in state.machine.hear(event) {
            match action {
                Action::Log(text) => tracing::info!("{text}"),
                // Under the lock: who allows sessions again has heard the same events.
                Action::EndSession => self.board.end(true),
            }
        }
        drop(state);
        self.notify();
    }

    /// Goes on with a promotion that was interrupted, if one was; the directory's last checkpoint is on `timeline`.
    pub fn resume_promotion(&self, timeline: TimelineId) -> Result<bool, DataDirError> {
        let path = self.settings().data_dir.join(PROMOTING_FILE);
        let left = read_file(&path, 16)?.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok());
        // Else it was finished.
        let resumes = left.is_some_and(|left| TimelineId(left) >= timeline);
        if resumes {
            self.hear(Event::Promote);
        }
        Ok(resumes)
    }

    /// Looks for the files that tell what to do.
    pub fn check_control_files(&self) {
        let data_dir = self.settings().data_dir;
        self.hear(Event::Pause(data_dir.join(PAUSE_FILE).exists()));
        if data_dir.join(PROMOTE_FILE).exists() {
            self.hear(Event::Promote);
        }
    }

    /// Writes why there is no promotion into the file that asked for it, where the command that waits reads it. The next start
    /// does not take it for a request ([`Shell::remove_old_promote_file`]).
    pub fn tell_promoter(&self, error: &StandbyError) {
        let path = self.settings().data_dir.join(PROMOTE_FILE);
        let told = || {
            std::fs::OpenOptions::new().write(true).truncate(true).open(&path)?.write_all(error.to_string().as_bytes())
        };
        match told() {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!("could not write file \"{PROMOTE_FILE}\": {error}");
            }
            _ => {}
        }
    }

    fn notify(&self) {
        self.changed.notify_all();
        if let Some(spool) = self.spool() {
            spool.notify_all();
        }
    }

    /// Makes durable what was received: replay has got less far, and who comes next takes what lies there for durable.
    pub(crate) fn flush_spool(&self) -> Result<(), StandbyError> {
        match self.spool() {
            Some(spool) => Ok(spool.wait_flushed(spool.written())?),
            None => Ok(()),
        }
    }

    /// The spool; opened when first needed: the directory is ours by then.
    fn open_spool(&self) -> Result<&Arc<Spool>, StandbyError> {
        let _one = self.opening.lock().expect("no panic while locked");
        if let Some(spool) = self.spool() {
            return Ok(spool);
        }
        let settings = self.settings();
        let control = read_control(&settings.data_dir)?;
        let options = spool_options(&settings, &control, self.archive_status()?);
        let spool = Spool::open(options.clone())?;
        self.state().shown.checkpoint_redo = control.checkpoint_copy.redo;
        let board = self.board.clone();
        spool.on_flushed(Box::new(move |_| board.tell()));
        if let Some(archiver) = archiving::start(settings.archive.as_ref(), &options, &spool)? {
            let _ = self.archiver.set(archiver);
        }
        let (system_identifier, major) = (control.system_identifier, control.major.number());
        if let Some(relay) = self.relay() {
            // Its clients want to know no more of it.
            let identity = Identity { system_identifier, server_version: major.to_string() };
            let redo = (control.checkpoint_copy.timeline, control.checkpoint_copy.redo);
            relay.serve_standby(identity, &settings.data_dir.join("pg_wal"), &spool, redo)?;
        }
        let format = WalFormat {
            major: control.major,
            segment_size: control.segment_size,
            system_identifier: Some(system_identifier),
        };
        Ok(&self.opened.get_or_init(|| Opened { spool, system_identifier, major, format }).spool)
    }

    /// [`Upstream::keep_restored`].
    fn keep_restored_segment(&self, name: &str, contents: &File, complete: bool) -> Result<Kept, StandbyError> {
        let pg_wal = self.settings().data_dir.join("pg_wal");
        // Nobody gets it from here, and nothing else has its name.
        if self.relay().is_none() && !pg_wal.join(name).exists() && self.archive_status()? != ArchiveStatus::Ready {
            return Ok(Kept::No);
        }
        let spool = self.open_spool()?;
        let format = &self.opened.get().expect("the spool is open").format;
        let archives = self.archive_status()? == ArchiveStatus::Ready;
        let mut standing = Standing::Worse;
        let mut judge = || {
            standing = compare(contents, &pg_wal, name, format)?;
            let replaces = standing == Standing::Better
                && (!complete || contents.metadata()?.len() == format.segment_size.bytes());
            // What is to be archived from here must be whole; else it is looked at when it goes.
            let complete =
                complete && (replaces || standing == Standing::Same) && (!archives || is_full(contents, name, format)?);
            let useless = if replaces { useless(&pg_wal, name, format)? } else { Vec::new() };
            Ok(Judgement { replaces, complete, useless })
        };
        // A session that is about to begin with this segment may fail yet, and the next one begin behind it: then nobody brings it.
        let begun = Instant::now();
        let kept = loop {
            match spool.keep_restored(name, contents, &mut judge) {
                Ok(false) if self.state().machine.link() != Link::Up && begun.elapsed() < CONNECTING => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                kept => break kept,
            }
        };
        match kept {
            // As a restore_command fails. It is tried again.
            Err(error @ SpoolError::Full { .. }) if !self.state().machine.wishes().promotes => {
                tracing::warn!("WAL of the archive must wait: {error}");
                return Ok(Kept::InPgWal);
            }
            Err(SpoolError::Full { .. }) => return Ok(Kept::No),
            kept => drop(kept?),
        };
        Ok(if standing == Standing::Foreign { Kept::No } else { Kept::InPgWal })
    }

    /// What is noted of complete segments, as it was when this began.
    fn archive_status(&self) -> Result<ArchiveStatus, DataDirError> {
        if let Some(known) = self.archive_status.get() {
            return Ok(*known);
        }
        let status = archive_status(&self.settings())?;
        Ok(*self.archive_status.get_or_init(|| status))
    }

    // For the receiver

    /// The next WAL to stream; waits for it. `None`: no more.
    pub fn next_task(&self) -> Option<Task> {
        let mut state = self.state();
        loop {
            let next = state.machine.next_session(self.now());
            if next != Next::Finish {
                self.board.end(false);
            }
            state = match next {
                Next::Begin(task) => return Some(task),
                Next::Sleep(Some(pause)) => self.changed.wait_timeout(state, pause).expect("no panic while locked").0,
                Next::Sleep(None) => self.changed.wait(state).expect("no panic while locked"),
                Next::Finish => {
                    self.changed.notify_all();
                    return None;
                }
            };
        }
    }

    /// WAL streams in from now on. False: it is not wanted any more.
    pub fn session_begins(&self, task: Task, early: bool) -> bool {
        let mut state = self.state();
        let begins = state.machine.session_begins(task, self.now());
        if begins {
            (state.shown.connected_since, state.shown.early) = (Some(SystemTime::now()), early);
        }
        drop(state);
        self.changed.notify_all();
        begins
    }

    /// The session is over. `error` is why, if it failed; it is taken where it is fatal.
    pub fn session_ends(&self, task: Task, spool: &Spool, how: Ended, error: &mut Option<ReceiveError>) -> Verdict {
        let mut state = self.state();
        let verdict = state.machine.session_ends(task, stored(spool), how, self.now());
        (state.shown.connected_since, state.shown.early) = (None, false);
        match verdict {
            Verdict::Fatal => {
                // Replay may be busy for a while before it ends with that.
                if let Some(error) = &error {
                    tracing::error!("receiving has ended: {error}");
                }
                state.fatal = error.take().map(StandbyError::from);
            }
            Verdict::Warn | Verdict::Complain => {
                state.shown.last_error = error.as_ref().map(|error| (SystemTime::now(), error.to_string()));
            }
            Verdict::Expected | Verdict::Note => {}
        }
        drop(state);
        self.notify();
        verdict
    }

    /// Whether replay has found no more WAL once.
    pub fn has_found_the_end(&self) -> bool {
        self.found_the_end.load(Ordering::Relaxed)
    }

    /// What replay is told when it has found nothing more.
    fn news(&self, missing: Missing, why: &str) -> Result<News, StandbyError> {
        self.found_the_end.store(true, Ordering::Relaxed);
        let spool = self.open_spool()?;
        spool.check()?;
        let mut state = self.state();
        match state.machine.wait(missing, stored(spool), spool.segment_size()) {
            Wait::No(news) => Ok(news),
            Wait::EndSession => {
                // Under the lock, as in `hear`.
                self.board.end(true);
                Ok(News::Perhaps)
            }
            Wait::ForWal { past } => {
                // Who changes the machine from now on wakes us.
                let wakes = spool.wakes();
                drop(state);
                let written = spool.wait_written_beyond(past, wakes, LOOK_INTERVAL);
                Ok(self.state().machine.waited(written))
            }
            Wait::ForChange { time, requests } => {
                if requests.is_some() {
                    tracing::debug!("waiting for WAL at {}, timeline {}: {why}", missing.needed, missing.timeline);
                    self.changed.notify_all();
                }
                let waits = |state: &mut State| state.machine.is_quiet();
                drop(self.changed.wait_timeout_while(state, time, waits).expect("no panic while locked"));
                Ok(News::Perhaps)
            }
            Wait::Failed => state.fatal.take().map_or(Ok(News::Perhaps), Err),
        }
    }

    /// Removes what is left over from an earlier run, and not meant for this one (`RemovePromoteSignalFiles`): what was there when the process
    /// began. Clocks do not count.
    fn remove_old_promote_file(&self) {
        let path = self.settings().data_dir.join(PROMOTE_FILE);
        if self.old_promote.is_some()
            && self.old_promote == PromoteFile::find(&path)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!("could not remove file \"{PROMOTE_FILE}\", which is left over: {error}");
        }
    }

    /// Looks for files that tell what to do, from time to time.
    fn look_around(&self) {
        let look = self.state().machine.look(self.now());
        if look == Look::First {
            self.remove_old_promote_file();
        }
        if look != Look::No {
            self.check_control_files();
        }
    }

    /// Runs `archive_cleanup_command`, in a thread of its own. `oldest`: the first segment that is still needed.
    fn clean_up_archive(&self, oldest: String) {
        let Settings { data_dir, archive_cleanup_command: Some(cleanup), .. } = self.settings() else { return };
        let run = move || {
            let line = command::expand("archive_cleanup_command", &cleanup, &[('r', &oldest)]);
            if let Err(error) = line.and_then(|line| command::run(&data_dir, &line)) {
                tracing::warn!("archive_cleanup_command \"{cleanup}\": {error}");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("cleanup".to_owned()).spawn(run) {
            tracing::warn!("could not start a thread for archive_cleanup_command: {error}");
        }
    }
}

/// From where on PostgreSQL's slots need WAL, which it serves again in its next turn; without such turns nobody could drop one
/// (`KeepLogSeg`, `access/transam/xlog.c`).
fn kept_for_slots(settings: &Settings, redo: Lsn) -> Lsn {
    let Some(readable) = &settings.readable else { return redo };
    let slots = match read_slots(&settings.data_dir) {
        Ok(slots) => slots,
        Err(error) => {
            tracing::warn!("all WAL is kept, as it is not known what the replication slots need: {error}");
            return Lsn::INVALID;
        }
    };
    let needed = slots.iter().map(|slot| slot.restart_lsn).filter(|lsn| lsn.is_valid()).min().unwrap_or(redo);
    needed.max(Lsn(redo.0.saturating_sub(readable.max_slot_keep.unwrap_or(u64::MAX))))
}

fn stored(spool: &Spool) -> Stored {
    let (timeline, written) = spool.timeline_and_written();
    Stored { timeline, written }
}

fn spool_options(settings: &Settings, control: &ControlFile, archive_status: ArchiveStatus) -> SpoolOptions {
    SpoolOptions {
        directory: settings.data_dir.join("pg_wal"),
        segment_size: control.segment_size,
        archive_status,
        partial: false,
        group_access: group_access(&settings.data_dir),
        max_recycled: MAX_RECYCLED,
    }
}

/// What is noted of complete segments. The primary archives its own WAL: a server that is started here must not do it again
/// (`XLogWalRcvClose`).
fn archive_status(settings: &Settings) -> Result<ArchiveStatus, DataDirError> {
    if settings.archive.is_some() {
        return Ok(ArchiveStatus::Ready);
    }
    let config = walrider_datadir::config::Config::read(&settings.data_dir, settings.config_file.as_deref())?;
    let always = config.get("archive_mode").is_some_and(|setting| setting.value.eq_ignore_ascii_case("always"));
    Ok(if always { ArchiveStatus::Ready } else { ArchiveStatus::Done })
}

/// Whether the group may read the directory.
fn group_access(data_dir: &std::path::Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(data_dir).is_ok_and(|found| found.mode() & 0o050 == 0o050)
}

impl Upstream for Shell {
    fn admit(&self, data_dir: &DataDir) -> Result<(), ReplayError> {
        Ok(admit(self, data_dir)?)
    }

    fn wanted(&self) -> Wanted {
        self.look_around();
        self.state().machine.wanted()
    }

    fn wait(&self, missing: Missing, why: &str) -> Result<News, ReplayError> {
        self.look_around();
        Ok(self.news(missing, why)?)
    }

    fn release(
        &self,
        used: Lsn,
        timeline: TimelineId,
        history: &TimelineHistory,
        same: &mut Same<'_>,
    ) -> Result<bool, ReplayError> {
        let mut release = || -> Result<bool, StandbyError> {
            let spool = self.open_spool()?;
            if !spool.holds_past(history, used) {
                return Ok(false);
            }
            write_file(&self.settings().data_dir.join(PROMOTING_FILE), format!("{timeline}\n").as_bytes())?;
            let same = |at, bytes: &[u8]| same(at, bytes).map_err(|error| StandbyError::from(ReplayError::from(error)));
            let released = spool.release(history, timeline, used, same)?;
            if !released {
                tracing::warn!(
                    "WAL that the primary had sent early is not what replay has read up to {used}: it does not count"
                );
            }
            if released {
                tracing::info!("WAL up to {} counts, which the primary had sent early", spool.written());
            }
            Ok(released)
        };
        Ok(release()?)
    }

    fn sleep(&self, time: Duration) {
        let state = self.state();
        let before = state.machine.wishes();
        let same = |state: &mut State| state.machine.wishes() == before;
        drop(self.changed.wait_timeout_while(state, time, same).expect("no panic while locked"));
    }

    fn visible(&self) -> Lsn {
        // What lies past the horizon does not get into segments.
        let visible = self.spool().and_then(|spool| self.state().machine.visible(stored(spool)));
        visible.unwrap_or(Lsn(u64::MAX))
    }

    fn streams_from(&self) -> Option<Lsn> {
        self.state().machine.streams_from()
    }

    fn min_apply_delay(&self) -> Duration {
        self.settings.lock().expect("no panic while locked").min_apply_delay
    }

    fn ensure_durable(&self, upto: Lsn) -> Result<(), ReplayError> {
        match self.spool() {
            // What is past all that is written came from elsewhere, or is what an XLOG_SWITCH left unused.
            Some(spool) => Ok(spool.wait_flushed(upto).map_err(StandbyError::from)?),
            None => Ok(()),
        }
    }

    fn keep_history(&self, timeline: TimelineId, contents: &[u8]) -> Result<(), ReplayError> {
        if self.settings().data_dir.join("pg_wal").join(history_file_name(timeline)).exists() {
            return Ok(());
        }
        match self.open_spool()?.write_history(timeline, contents) {
            Err(error @ SpoolError::Full { .. }) => {
                tracing::warn!("the history of timeline {timeline} is not kept: {error}");
                Ok(())
            }
            kept => Ok(kept.map_err(StandbyError::from)?),
        }
    }

    fn keep_restored(&self, name: &str, contents: &File, complete: bool) -> Result<Kept, StoreError> {
        self.keep_restored_segment(name, contents, complete).map_err(|error| StoreError::Refused(error.to_string()))
    }

    fn restartpoint(&self, redo: Lsn, timeline: TimelineId) {
        self.state().shown.checkpoint_redo = redo;
        let Some(spool) = self.spool() else { return };
        let settings = self.settings();
        let keep_from = Lsn(redo.0.saturating_sub(settings.wal_keep_bytes)).min(kept_for_slots(&settings, redo));
        match spool.remove_before(keep_from, timeline) {
            Ok(old) => tracing::info!(
                "restartpoint complete: recovery begins at {redo} now; {} WAL files removed, {} recycled",
                old.removed,
                old.recycled
            ),
            // It is tried again at the next one.
            Err(error) => tracing::warn!("restartpoint at {redo}: old WAL could not be removed: {error}"),
        }
        self.clean_up_archive(spool.segment_size().file_name(timeline, spool.segment_size().segment_of(redo)));
    }
}
