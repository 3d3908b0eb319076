//! What replay, the receiver and the outside world share of a standby, and the standby as replay sees it
//! ([`Upstream`]).
//!
//! WAL comes from the archive and from `pg_wal` first; once replay runs out of it, it is streamed
//! (`WaitForWALToBecomeAvailable`, `access/transam/xlogrecovery.c`, PostgreSQL 18). Unlike there, a lost connection is made
//! again by the receiver itself, however far replay lags; only if there is nothing left to replay, archives are looked at
//! again in between.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::durable::{read_file, write_file};
use walrider_datadir::held::HeldDir;
use walrider_datadir::open::read_control;
use walrider_datadir::{DataDir, DataDirError};
use walrider_layout::control::ControlFile;
use walrider_layout::{Lsn, TimelineId};
use walrider_receive::board::Board;
use walrider_replay::command;
use walrider_replay::error::ReplayError;
use walrider_replay::upstream::{News, Upstream, Wanted};
use walrider_spool::{ArchiveStatus, Spool, SpoolOptions};

use crate::admit::admit;
use crate::error::StandbyError;
use crate::receiver;
use crate::settings::Settings;

/// Longest wait for WAL before looking around: for files that tell what to do, for timelines.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// First pause after a connection failed; each further one is twice as long, up to `retry_interval`.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Most segments that are kept for reuse.
const MAX_RECYCLED: u64 = 16;

/// File in the data directory that asks for promotion, as PostgreSQL has it (`PROMOTE_SIGNAL_FILE`).
pub const PROMOTE_FILE: &str = "promote";
/// File in the data directory from the moment that a promotion has made visible what the primary could have taken back: from
/// then on there is no way back to following it. Holds the timeline that is left.
pub(crate) const PROMOTING_FILE: &str = "walrider.promoting";
/// File in the data directory as long as replay is to pause.
pub const PAUSE_FILE: &str = "walrider.pause";

/// The connection to the primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// There is none, and nobody works on it.
    #[default]
    Down,
    /// One is being made.
    Connecting,
    /// WAL streams in.
    Up,
}

/// WAL that is to be streamed, from there on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub start: Lsn,
    pub timeline: TimelineId,
}

/// What changes under the lock.
#[derive(Default)]
pub(crate) struct Control {
    pub stops: bool,
    pub promotes: bool,
    pub paused: bool,
    /// What replay asks for.
    request: Option<Task>,
    /// Where the receiver goes on by itself.
    next: Option<Task>,
    pub link: LinkState,
    /// The timeline that `pg_wal` has without gaps up to what is written, if it is streamed.
    stream: Option<TimelineId>,
    /// Not before then.
    attempt_at: Option<Instant>,
    failures: u32,
    /// Sessions, and attempts at one, that have ended; how many of them replay knows of.
    ended: u64,
    ended_seen: u64,
    /// What replay could see when it was last told of news.
    seen: Lsn,
    looked_at: Option<Instant>,
    fatal: Option<StandbyError>,
    /// For the status.
    pub primary: Option<String>,
    pub application_name: Option<String>,
    pub slot: Option<String>,
    pub connected_since: Option<SystemTime>,
    pub connections: u64,
    /// WAL comes before the primary has flushed it.
    pub early: bool,
    pub last_error: Option<(SystemTime, String)>,
    pub system_identifier: u64,
    pub checkpoint_redo: Lsn,
}

/// The standby's shared state.
pub(crate) struct Follower {
    pub board: Arc<Board>,
    settings: Mutex<Settings>,
    /// Keeps the data directory's path in the settings right.
    _directory: HeldDir,
    control: Mutex<Control>,
    changed: Condvar,
    spool: OnceLock<Arc<Spool>>,
    /// WAL streams in, or did until just now: `pg_wal` is all there is.
    streaming: AtomicBool,
    receiver: Mutex<Option<std::thread::JoinHandle<()>>>,
    pub started_at: SystemTime,
    /// For the thread that is started once there is something to receive.
    this: std::sync::Weak<Follower>,
}

impl Follower {
    /// One that has not begun.
    pub fn new(settings: Settings, directory: HeldDir) -> Result<Arc<Follower>, StandbyError> {
        let board = Board::new(settings.timing())
            .map_err(|source| StandbyError::System { operation: "make an event descriptor", source })?;
        Ok(Arc::new_cyclic(|this| Follower {
            board: Arc::new(board),
            settings: Mutex::new(settings),
            _directory: directory,
            control: Mutex::default(),
            changed: Condvar::new(),
            spool: OnceLock::new(),
            streaming: AtomicBool::new(false),
            receiver: Mutex::default(),
            started_at: SystemTime::now(),
            this: this.clone(),
        }))
    }

    /// The settings as they are now.
    pub fn settings(&self) -> Settings {
        self.settings.lock().expect("no panic while locked").clone()
    }

    /// What changes.
    pub fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().expect("no panic while locked")
    }

    /// The spool, once it is open.
    pub fn spool(&self) -> Option<&Arc<Spool>> {
        self.spool.get()
    }

    /// Other settings. What cannot change while it runs stays.
    pub fn reload(&self, new: Settings) {
        let reconnects = {
            let mut settings = self.settings.lock().expect("no panic while locked");
            let reconnects = !settings.keeps_session(&new);
            *settings = new;
            reconnects
        };
        self.board.set_timing(self.settings().timing());
        if reconnects {
            tracing::info!("the connection string or slot has changed: connecting anew");
            let mut control = self.control();
            control.attempt_at = None;
            control.failures = 0;
            self.board.end(true);
        }
        self.notify();
    }

    /// Stops as soon as possible.
    pub fn stop(&self) {
        self.control().stops = true;
        self.board.end(true);
        self.notify();
    }

    /// Ends receiving, and then recovery.
    pub fn promote(&self) {
        let mut control = self.control();
        if !control.promotes {
            tracing::info!("received promote request");
            control.promotes = true;
        }
        drop(control);
        self.board.end(true);
        self.notify();
    }

    /// Pauses replay, or resumes it.
    pub fn pause(&self, paused: bool) {
        let mut control = self.control();
        if control.paused != paused {
            tracing::info!("replay {}", if paused { "is paused; WAL is still received" } else { "goes on" });
            control.paused = paused;
        }
        drop(control);
        self.notify();
    }

    /// Goes on with a promotion that was interrupted, if one was; the directory's last checkpoint is on `timeline`.
    pub fn resume_promotion(&self, timeline: TimelineId) -> Result<bool, DataDirError> {
        let path = self.settings().data_dir.join(PROMOTING_FILE);
        let left = read_file(&path, 16)?.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok());
        // Else it was finished.
        let resumes = left.is_some_and(|left| TimelineId(left) >= timeline);
        if resumes {
            self.promote();
        }
        Ok(resumes)
    }

    /// Looks for the files that tell what to do.
    pub fn check_control_files(&self) {
        let data_dir = self.settings().data_dir;
        self.pause(data_dir.join(PAUSE_FILE).exists());
        if data_dir.join(PROMOTE_FILE).exists() {
            self.promote();
        }
    }

    /// Tells whoever asked for promotion with a file, and waits, why there is none: the file itself says it. The next start
    /// does not take it for a request ([`Follower::remove_old_promote_file`]).
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

    /// Ends the receiver, and waits until it has.
    pub fn join(&self) {
        self.stop();
        let receiver = self.receiver.lock().expect("no panic while locked").take();
        if receiver.is_some_and(|receiver| receiver.join().is_err()) {
            tracing::error!("the receiver panicked");
        }
    }

    fn notify(&self) {
        self.changed.notify_all();
        if let Some(spool) = self.spool.get() {
            spool.notify_all();
        }
    }

    /// The spool; opened, and the receiver started, when first needed: the directory is ours by then.
    fn open_spool(&self) -> Result<&Arc<Spool>, StandbyError> {
        if let Some(spool) = self.spool.get() {
            return Ok(spool);
        }
        let settings = self.settings();
        let control = read_control(&settings.data_dir)?;
        let spool = Spool::open(spool_options(&settings, &control)?)?;
        {
            let mut shown = self.control();
            shown.system_identifier = control.system_identifier;
            shown.checkpoint_redo = control.checkpoint_copy.redo;
        }
        let board = self.board.clone();
        spool.on_flushed(Box::new(move |_| board.tell()));
        let spool = self.spool.get_or_init(|| spool);
        if settings.primary.is_some() {
            let follower = self.this.upgrade().expect("whoever calls has one");
            let thread = std::thread::Builder::new()
                .name("receiver".to_owned())
                .spawn(move || receiver::run(&follower, control.system_identifier, control.major.number()))
                .map_err(|source| StandbyError::System { operation: "start the receiver thread", source })?;
            *self.receiver.lock().expect("no panic while locked") = Some(thread);
        }
        Ok(spool)
    }

    // For the receiver

    /// The next WAL to stream; waits for it. `None`: no more.
    pub fn next_task(&self) -> Option<Task> {
        let mut control = self.control();
        control.link = LinkState::Down;
        loop {
            if control.stops || control.promotes {
                // What comes in may lie past what was replayed from `pg_wal`: from now on that counts, as a whole.
                (control.next, control.stream) = (None, None);
                self.streaming.store(false, Ordering::Release);
                self.changed.notify_all();
                return None;
            }
            // Ended for a new session, which is this one.
            self.board.end(false);
            let now = Instant::now();
            let pause = control.attempt_at.map(|at| at.saturating_duration_since(now)).filter(|pause| !pause.is_zero());
            if pause.is_none()
                && let Some(task) = control.next.take().or(control.request.take())
            {
                control.link = LinkState::Connecting;
                return Some(task);
            }
            control = match pause {
                Some(pause) => self.changed.wait_timeout(control, pause).expect("no panic while locked").0,
                None => self.changed.wait(control).expect("no panic while locked"),
            };
        }
    }

    /// Whether WAL has streamed in in this run: the primary was the right one then, and may become so again.
    pub fn has_streamed(&self) -> bool {
        self.control().connections > 0
    }

    /// WAL streams in from now on. False: it is not wanted any more.
    pub fn stream_begins(&self, timeline: TimelineId, early: bool) -> bool {
        let mut control = self.control();
        if control.stops || control.promotes {
            return false;
        }
        control.link = LinkState::Up;
        control.stream = Some(timeline);
        control.request = None;
        control.attempt_at = None;
        control.seen = Lsn::INVALID;
        control.connected_since = Some(SystemTime::now());
        control.connections += 1;
        control.early = early;
        self.streaming.store(true, Ordering::Release);
        drop(control);
        self.changed.notify_all();
        true
    }

    /// The session is over. `next`: where the receiver goes on by itself; without, replay looks elsewhere and asks again.
    /// `in_vain`: the next one is put off.
    pub fn stream_ends(&self, next: Option<Task>, error: Option<String>, in_vain: bool) {
        let settings = self.settings();
        let mut control = self.control();
        control.next = next;
        control.link = LinkState::Down;
        control.early = false;
        control.ended += 1;
        let lasted = control.connected_since.take().and_then(|since| since.elapsed().ok());
        if in_vain {
            if lasted.is_some_and(|lasted| lasted > settings.retry_interval) {
                control.failures = 0;
            }
            let pause = FIRST_PAUSE.saturating_mul(1 << control.failures.min(16)).min(settings.retry_interval);
            control.attempt_at = Some(Instant::now() + pause);
            control.failures += 1;
        } else {
            control.failures = 0;
        }
        if let Some(error) = error {
            control.last_error = Some((SystemTime::now(), error));
        }
        if next.is_none() {
            control.stream = None;
            self.streaming.store(false, Ordering::Release);
        }
        drop(control);
        self.notify();
    }

    /// Nothing more will come: the standby ends.
    pub fn fail(&self, error: StandbyError) {
        self.control().fatal.get_or_insert(error);
        self.stream_ends(None, None, true);
    }

    /// What replay is told when it has found nothing more.
    fn news(&self, replayed: Lsn, needed: Lsn, timeline: TimelineId, why: &str) -> Result<News, StandbyError> {
        let spool = self.open_spool()?;
        spool.check()?;
        let (has_primary, retry_interval) = {
            let settings = self.settings.lock().expect("no panic while locked");
            (settings.primary.is_some(), settings.retry_interval)
        };
        let mut control = self.control();
        if let Some(error) = control.fatal.take() {
            return Err(error);
        }
        if control.stops || control.promotes {
            return Ok(News::Perhaps);
        }
        if control.stream.is_some() {
            let visible = self.visible();
            if !control.seen.is_valid() {
                // Segments that were found elsewhere, or on the timeline before, may have come anew.
                control.seen = visible;
                return Ok(News::Perhaps);
            }
            if visible <= control.seen {
                if control.link == LinkState::Down && control.stream == Some(timeline) {
                    // All is replayed, and nothing comes: perhaps the archive has more.
                    control.stream = None;
                    control.next = None;
                    self.streaming.store(false, Ordering::Release);
                    return Ok(News::Perhaps);
                }
                let seen = control.seen;
                drop(control);
                spool.wait_written_beyond(seen, LOOK_INTERVAL);
                control = self.control();
            }
            control.seen = control.seen.max(self.visible());
            return Ok(News::More);
        }
        // Why it ended may be that there are new timelines, or that an archive has to help out.
        if control.ended != control.ended_seen {
            control.ended_seen = control.ended;
            return Ok(News::Perhaps);
        }
        if has_primary {
            // What was streamed before is there without gaps.
            let goes_on = spool.timeline() == timeline && spool.written() >= replayed;
            let size = spool.segment_size();
            let start = if goes_on { spool.written() } else { size.start_of(size.segment_of(needed)) };
            if control.request.is_none() && control.link == LinkState::Down {
                tracing::debug!("waiting for WAL at {needed}, timeline {timeline}: {why}");
                control.request = Some(Task { start, timeline });
                self.changed.notify_all();
            }
        }
        let waits = |control: &mut Control| {
            control.stream.is_none() && control.ended == control.ended_seen && !control.stops && !control.promotes
        };
        drop(
            self.changed
                .wait_timeout_while(control, retry_interval.max(FIRST_PAUSE), waits)
                .expect("no panic while locked"),
        );
        Ok(News::Perhaps)
    }

    /// Removes what is left over from an earlier run, and not meant for this one (`RemovePromoteSignalFiles`).
    fn remove_old_promote_file(&self) {
        let path = self.settings().data_dir.join(PROMOTE_FILE);
        let made = std::fs::metadata(&path).and_then(|found| found.modified());
        if made.is_ok_and(|made| made < self.started_at)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!("could not remove file \"{PROMOTE_FILE}\", which is left over: {error}");
        }
    }

    /// Looks for files that tell what to do, from time to time.
    fn look_around(&self) {
        let mut control = self.control();
        if control.looked_at.is_some_and(|at| at.elapsed() < LOOK_INTERVAL) {
            return;
        }
        let first = control.looked_at.replace(Instant::now()).is_none();
        drop(control);
        if first {
            self.remove_old_promote_file();
        }
        self.check_control_files();
    }
}

impl Follower {
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

fn spool_options(settings: &Settings, control: &ControlFile) -> Result<SpoolOptions, DataDirError> {
    let config = walrider_datadir::config::Config::read(&settings.data_dir, settings.config_file.as_deref())?;
    let always = config.get("archive_mode").is_some_and(|setting| setting.value.eq_ignore_ascii_case("always"));
    Ok(SpoolOptions {
        directory: settings.data_dir.join("pg_wal"),
        segment_size: control.segment_size,
        // The primary archives its own WAL: a server that is started here must not do it again (XLogWalRcvClose).
        archive_status: if always { ArchiveStatus::Ready } else { ArchiveStatus::Done },
        partial: false,
        group_access: group_access(&settings.data_dir),
        max_recycled: MAX_RECYCLED,
    })
}

/// Whether the group may read the directory.
fn group_access(data_dir: &std::path::Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(data_dir).is_ok_and(|found| found.mode() & 0o050 == 0o050)
}

impl Upstream for Follower {
    fn admit(&self, data_dir: &DataDir) -> Result<(), ReplayError> {
        admit(self, data_dir).map_err(|error| match error {
            StandbyError::DataDir(error) => ReplayError::DataDir(error),
            error => ReplayError::Refused(error.to_string()),
        })
    }

    fn wanted(&self) -> Wanted {
        self.look_around();
        let control = self.control();
        match () {
            () if control.stops => Wanted::Stop,
            // Only once nothing more comes in.
            () if control.promotes && control.link == LinkState::Down => Wanted::Promote,
            () if control.promotes => Wanted::Follow,
            () if control.paused => Wanted::Pause,
            () => Wanted::Follow,
        }
    }

    fn wait(&self, replayed: Lsn, needed: Lsn, timeline: TimelineId, why: &str) -> Result<News, ReplayError> {
        self.look_around();
        self.news(replayed, needed, timeline, why).map_err(|error| match error {
            StandbyError::Replay(error) => error,
            error => ReplayError::Refused(error.to_string()),
        })
    }

    fn release(&self, used: Lsn, timeline: TimelineId) -> Result<bool, ReplayError> {
        let release = || -> Result<bool, StandbyError> {
            let spool = self.open_spool()?;
            if !spool.holds_past(timeline, used) {
                return Ok(false);
            }
            write_file(&self.settings().data_dir.join(PROMOTING_FILE), format!("{timeline}\n").as_bytes())?;
            let released = spool.release(timeline, used)?;
            if released {
                tracing::info!("WAL up to {} counts, which the primary had sent early", spool.written());
            }
            Ok(released)
        };
        release().map_err(|error| ReplayError::Refused(error.to_string()))
    }

    fn sleep(&self, time: Duration) {
        let control = self.control();
        let (stops, promotes, paused) = (control.stops, control.promotes, control.paused);
        let same =
            |control: &mut Control| (control.stops, control.promotes, control.paused) == (stops, promotes, paused);
        drop(self.changed.wait_timeout_while(control, time, same).expect("no panic while locked"));
    }

    fn visible(&self) -> Lsn {
        match self.spool.get() {
            // What lies past the horizon does not get into segments.
            Some(spool) if self.streaming.load(Ordering::Acquire) => spool.written(),
            _ => Lsn(u64::MAX),
        }
    }

    fn uses_archives(&self) -> bool {
        !self.streaming.load(Ordering::Acquire)
    }

    fn min_apply_delay(&self) -> Duration {
        self.settings.lock().expect("no panic while locked").min_apply_delay
    }

    fn ensure_durable(&self, upto: Lsn) -> Result<(), ReplayError> {
        match self.spool.get() {
            // What is past that came from elsewhere, or was flushed before streaming began anew.
            Some(spool) if upto <= spool.written() => {
                spool.wait_flushed(upto).map_err(|error| ReplayError::Refused(error.to_string()))
            }
            _ => Ok(()),
        }
    }

    fn restartpoint(&self, redo: Lsn, timeline: TimelineId) {
        self.control().checkpoint_redo = redo;
        let Some(spool) = self.spool.get() else { return };
        let keep_from = Lsn(redo.0.saturating_sub(self.settings().wal_keep_bytes));
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
