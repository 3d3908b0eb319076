//! `walrider receive`: WAL into a directory, acknowledged when written and when durable; nothing is replayed
//! (`StreamLog`, `bin/pg_basebackup/pg_receivewal.c`, PostgreSQL 18).

use std::fs::File;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use tracing::Level;
use walrider_archive::archiver::{Archiver, ArchiverSettings};
use walrider_datadir::DataDirError;
use walrider_datadir::config::{Unit, parse_number};
use walrider_datadir::durable::read_file;
use walrider_layout::history::{MAX_HISTORY_BYTES, TimelineHistory, history_file_name};
use walrider_layout::positions::WalPositions;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_observe::status::{Command, LastError, StandbyStatus, State, Time};
use walrider_relay::origin::Identity;
use walrider_session::{ConnectError, ConnectOptions, Connection, Start};
use walrider_spool::{ArchiveStatus, Spool, SpoolOptions, streaming_start};
use walrider_stream::board::Board;
use walrider_stream::error::ReceiveError;

use walrider_stream::streaming::{End, Streaming};
use walrider_stream::timelines::check_next;
use walrider_stream::upstream::{Early, Expected, Opened, Slot, Upstream, slot_position};
use walrider_wire::pulse::Timing;

use crate::archiving;
use crate::error::StandbyError;
use crate::machine::{FIRST_PAUSE, Task};
use crate::relay::{self, Relay};
use crate::repeats::Repeats;
use crate::standby::spool_status;

/// What a receiver locks in its directory.
pub const LOCK_FILE: &str = "walrider.receive.lock";
/// `ERRCODE_DUPLICATE_OBJECT` (`errcodes.txt`).
const DUPLICATE_OBJECT: &str = "42710";

/// What `walrider receive` is told.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceiveSettings {
    /// Where segments go.
    pub directory: PathBuf,
    /// The server's connection string; what it leaves out is taken from the environment.
    pub primary: Option<String>,
    /// The replication slot.
    pub slot: Option<String>,
    /// Make the slot at first.
    pub create_slot: bool,
    /// That it is there already is no error.
    pub if_not_exists: bool,
    /// Where segments are archived, if anywhere.
    pub archive: Option<ArchiverSettings>,
    /// Connect again when the connection is lost.
    pub reconnect: bool,
    /// End once WAL up to there is received.
    pub end: Option<Lsn>,
    /// A report at least this often; zero: never.
    pub status_interval: Duration,
    /// A server that is silent for so long is lost; zero: never.
    pub receiver_timeout: Duration,
    /// Pause between attempts to connect.
    pub retry_interval: Duration,
    /// `application_name` where the connection string has none.
    pub application_name_fallback: String,
}

/// A receiver. Clones are the same one.
#[derive(Clone)]
pub struct Receive(Arc<Inner>);

struct Inner {
    settings: ReceiveSettings,
    board: Arc<Board>,
    spool: OnceLock<Arc<Spool>>,
    archiver: OnceLock<Archiver>,
    shown: Mutex<StandbyStatus>,
    changed: Condvar,
    /// Who serves what is received, if anybody does.
    relay: OnceLock<Arc<Relay>>,
    /// Nobody else receives there, and takes our files for what a crash has left.
    _lock: File,
}

impl Receive {
    /// One that has not begun. The directory is its own from now on; before that nothing is asked of the primary, as to make a slot.
    ///
    /// # Errors
    /// A connection string that is none; there is no such directory, another has it, or the system gives no event descriptor.
    pub fn new(settings: ReceiveSettings) -> Result<Receive, StandbyError> {
        let primary = settings.primary.as_deref().unwrap_or_default();
        ConnectOptions::resolve(primary, &settings.application_name_fallback).map_err(ReceiveError::from)?;
        let lock = relay::lock(&settings.directory, LOCK_FILE)?;
        let timing = Timing { status_interval: settings.status_interval, timeout: settings.receiver_timeout };
        let board = Board::new(timing)
            .map_err(|source| StandbyError::System { operation: "make an event descriptor", source })?;
        let shown = StandbyStatus {
            command: Command::Receive,
            data_dir: settings.directory.display().to_string(),
            slot: settings.slot.clone(),
            ..StandbyStatus::new()
        };
        Ok(Receive(Arc::new(Inner {
            settings,
            board: Arc::new(board),
            spool: OnceLock::new(),
            archiver: OnceLock::new(),
            shown: Mutex::new(shown),
            changed: Condvar::new(),
            relay: OnceLock::new(),
            _lock: lock,
        })))
    }

    /// Has what is received served, too. To be called before [`Receive::run`].
    pub(crate) fn relay(&self, relay: Arc<Relay>) {
        self.0.show(|shown| shown.command = Command::Relay);
        let _ = self.0.relay.set(relay);
    }

    /// What the primary is told, and when.
    pub(crate) fn board(&self) -> &Arc<Board> {
        &self.0.board
    }

    /// Receives until it is stopped, the end is reached, or it fails. All that was received is durable then.
    ///
    /// # Errors
    /// What keeps it from going on, or any failure if it is not to connect again.
    pub fn run(&self) -> Result<(), StandbyError> {
        let result = self.0.run();
        let flushed = match self.0.spool.get() {
            Some(spool) => spool.wait_flushed(spool.written()).map_err(StandbyError::from),
            None => Ok(()),
        };
        let result = result.and(flushed);
        self.0.show(|shown| shown.state = if result.is_ok() { State::Stopped } else { State::Failed });
        result
    }

    /// Stops; [`Receive::run`] returns.
    pub fn stop(&self) {
        self.0.board.end(true);
        // Under the lock, so that who is about to wait sees it.
        drop(self.0.shown.lock().expect("no panic while locked"));
        self.0.changed.notify_all();
    }

    /// How it stands.
    pub fn status(&self) -> StandbyStatus {
        let inner = &*self.0;
        let mut status = inner.shown.lock().expect("no panic while locked").clone();
        status.time = Time::now();
        if status.state == State::Streaming && inner.board.disk_full() {
            status.state = State::WaitingForDisk;
        }
        let (sent, heard) = inner.board.last_message();
        status.last_message_sent = Time::from_timestamptz(sent);
        status.last_message_received = Time::from_timestamptz(heard);
        let mut positions = WalPositions::default();
        if let Some(spool) = inner.spool.get() {
            status.timeline = NonZeroU32::new(spool.timeline().0);
            status.spool = spool_status(&spool.stats());
            let (horizon, received) = (inner.board.horizon(), inner.board.received());
            positions = WalPositions { horizon, received, ..spool.positions() };
        }
        if let Some(relay) = inner.relay.get() {
            status.downstreams = relay.downstreams();
            status.slots = relay.slots();
        }
        status.archiver = archiving::status(inner.archiver.get());
        status.at(&positions, Lsn::INVALID, Lsn::INVALID, None)
    }
}

impl Inner {
    fn show(&self, change: impl FnOnce(&mut StandbyStatus)) {
        change(&mut self.shown.lock().expect("no panic while locked"));
    }

    fn run(&self) -> Result<(), StandbyError> {
        let mut repeats = Repeats::default();
        let result = self.sessions(&mut repeats);
        repeats.settle();
        result
    }

    /// One session after the other.
    fn sessions(&self, repeats: &mut Repeats) -> Result<(), StandbyError> {
        let mut creates_slot = self.settings.create_slot;
        let mut system_identifier = self.serve_what_is_there()?;
        let mut next = None;
        while !self.board.ends() {
            self.show(|shown| shown.state = State::Connecting);
            let error = match self.session(&mut next, &mut creates_slot, &mut system_identifier, repeats) {
                Ok(()) => continue,
                Err(_) if self.board.ends() => break,
                Err(error) => error,
            };
            let is_first = self.shown.lock().expect("no panic while locked").connections == 0;
            let never_heals = matches!(&error, StandbyError::Receive(error) if error.never_heals());
            let is_final = match &error {
                // Behind one name there may be an old primary for a while.
                StandbyError::Receive(ReceiveError::OldTimeline { .. }) => false,
                StandbyError::Receive(error) => error.is_final() || error.is_missing_wal() || (never_heals && is_first),
                _ => true,
            };
            if is_final || !self.settings.reconnect {
                return Err(error);
            }
            let level = if never_heals { Level::ERROR } else { Level::WARN };
            let interval = self.settings.retry_interval.as_secs_f64();
            repeats.say(level, &format!("{error}; connecting again in {interval} s"));
            let message = error.to_string();
            let mut shown = self.shown.lock().expect("no panic while locked");
            shown.last_error = Some(LastError { time: Time::now(), message });
            shown.connected_since = None;
            shown.state = State::Connecting;
            drop(shown);
            self.pause(self.settings.retry_interval);
        }
        Ok(())
    }

    /// Waits so long, or until it is stopped.
    fn pause(&self, time: Duration) {
        let shown = self.shown.lock().expect("no panic while locked");
        let waits = |_: &mut StandbyStatus| !self.board.ends();
        drop(self.changed.wait_timeout_while(shown, time, waits).expect("no panic while locked"));
    }

    /// One session, to its end. `next`: where to go on, if that is known.
    fn session(
        &self,
        next: &mut Option<Task>,
        creates_slot: &mut bool,
        system_identifier: &mut Option<u64>,
        repeats: &mut Repeats,
    ) -> Result<(), StandbyError> {
        let mut opened = self.open(*creates_slot, *system_identifier, repeats)?;
        *creates_slot = false;
        *system_identifier = Some(opened.identity.system_identifier);
        let size = segment_size(&mut opened.connection)?;
        let spool = self.open_spool(size)?;
        if let Some(relay) = self.relay.get() {
            let server_version = opened.connection.parameter("server_version").unwrap_or_default().to_owned();
            relay.serve(Identity { system_identifier: opened.identity.system_identifier, server_version }, spool)?;
        }
        let task = match *next {
            Some(task) => task,
            None => self.start(&mut opened, spool)?,
        };
        let has = |name: &str| self.settings.directory.join(name).exists();
        opened.fetch_histories(task.timeline, has, |timeline, contents| spool.write_history(timeline, contents))?;
        let task = self.within_history(task, opened.identity.timeline, size)?;
        let mut writer = spool.start_at(task.timeline, task.start)?;
        *next = Some(task);
        if let Some(relay) = self.relay.get() {
            relay.session_begins(&mut opened)?;
        }
        let (identity, start) = (&opened.identity, task.start);
        if identity.timeline == task.timeline && identity.flushed < start {
            return Err(ReceiveError::Behind { flushed: identity.flushed, start }.into());
        }
        let slot = opened.slot.as_deref();
        let start = opened.connection.start_replication(slot, task.start, task.timeline).map_err(ReceiveError::from)?;
        let end = match start {
            Start::Ended(branch) => {
                // A server that leads from one timeline to the next, and has WAL of none, is not asked without a pause.
                self.pause(FIRST_PAUSE);
                End::Timeline(branch)
            }
            Start::Streaming => {
                self.show(|shown| {
                    shown.state = State::Streaming;
                    shown.connected_since = Some(Time::now());
                    shown.connections += 1;
                });
                repeats.settle();
                tracing::info!("starting log streaming at {} (timeline {})", task.start, task.timeline);
                let streaming = Streaming::new(&mut writer, &self.board).until(self.settings.end);
                let ended = streaming.run(opened.connection, spool, opened.identity.flushed);
                debug_assert!(task.start <= spool.written(), "what was received stays");
                *next = Some(Task { start: spool.written(), ..task });
                ended?
            }
        };
        match end {
            End::Asked => self.board.end(true),
            End::Timeline(Some((timeline, at))) => {
                check_next(task.timeline, spool.written(), (timeline, at))?;
                tracing::info!("switched to timeline {timeline} at {at}");
                let size = spool.segment_size();
                *next = Some(Task { start: size.start_of(size.segment_of(at)), timeline });
            }
            End::Timeline(None) => return Err(ReceiveError::Closed.into()),
        }
        Ok(())
    }

    fn open(
        &self,
        creates_slot: bool,
        system_identifier: Option<u64>,
        repeats: &mut Repeats,
    ) -> Result<Opened, StandbyError> {
        let settings = &self.settings;
        let conninfo = settings.primary.as_deref().unwrap_or_default();
        let mut connect =
            ConnectOptions::resolve(conninfo, &settings.application_name_fallback).map_err(ReceiveError::from)?;
        for warning in connect.warnings() {
            repeats.say(Level::WARN, warning);
        }
        connect.interrupt_with(self.board.end_fd());
        connect.give_up_after(settings.receiver_timeout);
        let application_name = Some(connect.application_name().to_owned());
        let upstream = Upstream {
            connect,
            expected: Expected { system_identifier, major: None },
            early: Early::Off,
            slot: match settings.slot.clone() {
                Some(name) => Slot::Named { name, create: creates_slot && settings.if_not_exists },
                None => Slot::None,
            },
        };
        let mut opened = upstream.open()?;
        if let Some(slot) = settings.slot.as_ref().filter(|_| creates_slot && !settings.if_not_exists) {
            opened.connection.create_physical_slot(slot, false).map_err(|error| {
                // Time does not help, and an archiver that seems to run must receive.
                match error.is_sqlstate(DUPLICATE_OBJECT) {
                    true => DataDirError::Refused(format!("{error}; --if-not-exists uses one that is there")).into(),
                    false => StandbyError::from(ReceiveError::from(error)),
                }
            })?;
        }
        self.show(|shown| {
            shown.primary = Some(opened.connection.peer().to_owned());
            shown.application_name = application_name;
            shown.system_identifier = Some(opened.identity.system_identifier);
        });
        Ok(opened)
    }

    /// A relay serves what an earlier run has received before its primary is reached, which may be gone. Returns which cluster that is.
    fn serve_what_is_there(&self) -> Result<Option<u64>, StandbyError> {
        let Some(relay) = self.relay.get() else { return Ok(None) };
        let Some((identity, size)) = relay.known()? else { return Ok(None) };
        let system_identifier = identity.system_identifier;
        relay.serve(identity, self.open_spool(size)?)?;
        Ok(Some(system_identifier))
    }

    fn open_spool(&self, segment_size: SegmentSize) -> Result<&Arc<Spool>, StandbyError> {
        if let Some(spool) = self.spool.get() {
            return Ok(spool);
        }
        let archive = self.settings.archive.as_ref();
        let options = SpoolOptions {
            directory: self.settings.directory.clone(),
            segment_size,
            archive_status: if archive.is_some() { ArchiveStatus::Ready } else { ArchiveStatus::None },
            partial: true,
            group_access: false,
            max_recycled: 0,
        };
        let spool = Spool::open(options.clone())?;
        if let Some(archiver) = archiving::start(archive, &options, &spool)? {
            let _ = self.archiver.set(archiver);
        }
        let board = self.board.clone();
        spool.on_flushed(Box::new(move |_| board.tell()));
        Ok(self.spool.get_or_init(|| spool))
    }

    /// Where to begin: past what the directory has, else where the slot stands, else at the segment that is being
    /// written (`FindStreamingStart`, `StreamLog`).
    /// Where to go on if the server has gone over to another timeline before what was received of this one, in the same segment: the beginning of a
    /// record whose end nobody has. Then the segment comes again, as after a start, and as a walreceiver has it each time.
    fn within_history(&self, task: Task, timeline: TimelineId, size: SegmentSize) -> Result<Task, StandbyError> {
        if timeline == task.timeline {
            return Ok(task);
        }
        let path = self.settings.directory.join(history_file_name(timeline));
        let Some(contents) = read_file(&path, MAX_HISTORY_BYTES)? else { return Ok(task) };
        let text = String::from_utf8_lossy(&contents);
        let history =
            TimelineHistory::parse(timeline, &text).map_err(|error| DataDirError::corrupt(&path, error.to_string()))?;
        let start = match history.switch_point(task.timeline) {
            Some(at) if at < task.start && size.segment_of(at) == size.segment_of(task.start) => {
                size.start_of(size.segment_of(at))
            }
            _ => task.start,
        };
        Ok(Task { start, ..task })
    }

    fn start(&self, opened: &mut Opened, spool: &Spool) -> Result<Task, StandbyError> {
        let size = spool.segment_size();
        let (timeline, at) = match streaming_start(&self.settings.directory, size)? {
            Some(found) => found,
            None => match &self.settings.slot {
                Some(slot) => slot_position(&mut opened.connection, slot)?,
                None => None,
            }
            .unwrap_or((opened.identity.timeline, opened.identity.flushed)),
        };
        Ok(Task { start: size.start_of(size.segment_of(at)), timeline })
    }
}

/// The size of the server's segments (`RetrieveWalSegSize`, `streamutil.c`).
fn segment_size(connection: &mut Connection) -> Result<SegmentSize, ReceiveError> {
    let rows = connection.simple_query("SHOW wal_segment_size")?;
    let value = rows.first().and_then(|row| row.first()).and_then(|value| value.as_deref()).unwrap_or_default();
    let text = String::from_utf8_lossy(value);
    let bytes = parse_number(&text, Unit::Bytes).and_then(|bytes| u32::try_from(bytes).ok());
    bytes.and_then(SegmentSize::new).ok_or_else(|| {
        ConnectError::Protocol(format!("the server says that its WAL segments have a size of \"{text}\"")).into()
    })
}
