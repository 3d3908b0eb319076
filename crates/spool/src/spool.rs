//! The spool itself: opened on a directory, asked where it stands.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use walrider_layout::history::{MAX_HISTORY_BYTES, TimelineHistory, history_file_name};
use walrider_layout::positions::WalPositions;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::archive_status::ArchiveStatus;
use crate::early;
use crate::error::{Result, SpoolError};
use crate::files::{Directory, Disk, write_all_at};
use crate::prepare::TEMPORARY_PREFIX;
use crate::state::{Preparation, Shared, State};
use crate::stats::SpoolStats;
use crate::tail::Tail;
use crate::work::{self, Step, Stepped, Worker};
use crate::writer::Writer;

/// What a spool is opened with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpoolOptions {
    /// The directory of the segments: `pg_wal`, or that of `walrider receive`. It must exist.
    pub directory: PathBuf,
    /// The size of segments.
    pub segment_size: SegmentSize,
    /// What is noted of complete files in `archive_status`.
    pub archive_status: ArchiveStatus,
    /// A segment is called `.partial` until it is complete and durable, as `pg_receivewal` does it.
    pub partial: bool,
    /// New files may be read by the group: mode 0640 instead of 0600.
    pub group_access: bool,
    /// Most segments that are kept ready past the one that is written, of those no longer needed; ignored with
    /// `partial`.
    pub max_recycled: u64,
}

/// WAL segments that are written, made durable, kept and removed. Three threads belong to it; they end when it is dropped,
/// after what was written has been flushed.
///
/// What a primary has sent before it flushed it goes into the early log, and into segments only once it has
/// ([`Writer::write_ahead`]). So there are two ends, in bytes, exclusive:
/// ```text
/// flushed ≤ written        of what is in segments
/// held_durable ≤ held      of all that came in this session; flushed ≤ held_durable, written ≤ held
/// ```
pub struct Spool {
    pub(crate) shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Spool {
    /// Opens a directory. What is in it becomes durable, because an earlier run may have been killed before it flushed;
    /// its temporary files are removed.
    ///
    /// # Errors
    /// The directory is not there, or something in it cannot be synced, or threads cannot be started.
    pub fn open(options: SpoolOptions) -> Result<Arc<Spool>> {
        let disk = Disk::new(options.directory.clone(), options.group_access);
        if options.archive_status != ArchiveStatus::None {
            disk.make_directory("archive_status")
                .map_err(|error| SpoolError::io("create directory", disk.path().join("archive_status"), error))?;
        }
        Spool::open_in(Arc::new(disk), options)
    }

    /// [`Spool::open`] on something else than a directory of the operating system. `options.directory` is not looked at.
    ///
    /// # Errors
    /// Those of [`Spool::open`].
    pub fn open_in(directory: Arc<dyn Directory>, options: SpoolOptions) -> Result<Arc<Spool>> {
        let shared = Spool::recover(Shared::new(directory, &options))?;
        // If one thread does not start, dropping the spool ends those before.
        let mut spool = Spool { shared: shared.clone(), threads: Vec::new() };
        for worker in Worker::ALL {
            let (shared, name) = (shared.clone(), worker.thread_name());
            let thread = thread::Builder::new().name(name.into()).spawn(move || {
                let ended = panic::catch_unwind(AssertUnwindSafe(|| work::run(&shared, worker)));
                if ended.is_err() {
                    // Nobody is left waiting for a thread that is gone.
                    shared.fail("go on with", "", io::Error::other(format!("thread {name} panicked")));
                }
            });
            spool.threads.push(thread.map_err(|error| spool.shared.error("start a thread for", "", error))?);
        }
        Ok(Arc::new(spool))
    }

    /// [`Spool::open_in`] without threads, so that a simulator decides what happens when ([`Spool::step`]). A caller that waits for
    /// something has the work done that it takes. Dropped, it leaves undone what is to do, as one that is killed.
    ///
    /// # Errors
    /// Those of [`Spool::open`].
    pub fn open_stepped(directory: Arc<dyn Directory>, options: &SpoolOptions) -> Result<Arc<Spool>> {
        let mut shared = Shared::new(directory, options);
        shared.stepped = Some(Stepped::default());
        Ok(Arc::new(Spool { shared: Spool::recover(shared)?, threads: Vec::new() }))
    }

    /// Has a worker begin something, or end what it has begun; [`Step::Idle`] where threads do that.
    pub fn step(&self, worker: Worker) -> Step {
        self.shared.stepped.as_ref().map_or(Step::Idle, |stepped| stepped.step(&self.shared, worker))
    }

    /// What an earlier run has left.
    fn recover(shared: Shared) -> Result<Arc<Shared>> {
        sync_what_is_there(&shared)?;
        let held = shared.recover_early()?;
        shared.lock().tail = held;
        Ok(Arc::new(shared))
    }

    /// Where receiving (re)starts; all positions and `timeline` are set to it, once all that was written before is
    /// flushed. What the file has before `at` stays; a file that is not there is made of zeros, so `at` should be the
    /// beginning of a segment unless the file has what comes before.
    ///
    /// What is held past `at` in the early log stays until it comes again, or something else does; that of an earlier timeline
    /// until WAL of this one is held.
    ///
    /// # Errors
    /// A position or timeline of zero, or a second writer; the spool has failed.
    pub fn start_at(self: &Arc<Self>, timeline: TimelineId, at: Lsn) -> Result<Writer> {
        if !at.is_valid() || timeline == TimelineId(0) {
            return Err(SpoolError::Refused(format!("WAL cannot begin at {at} on timeline {timeline}")));
        }
        let shared = &self.shared;
        let mut state = shared.lock();
        if state.writer {
            return Err(SpoolError::Refused("WAL has a writer already".into()));
        }
        state.writer = true;
        shared.flush_all(&mut state);
        let is_busy = |state: &State| state.flushing || state.flushed != state.written || state.restoring > 0;
        while state.failed.is_none() && is_busy(&state) {
            state = shared.wait(&shared.on_flushed, state);
        }
        if let Some(failure) = state.failed.clone() {
            state.writer = false;
            return Err(failure.into());
        }
        // A timeline that has ended leaves its last segment as it is: that is complete, too (`WalReceiverMain`).
        let left = (state.timeline, shared.size.segment_of(state.written));
        let left_incomplete = state.timeline_ended && left.0 != timeline && shared.size.offset_of(state.written) != 0;
        state.timeline_ended = false;
        // Its file may have been replaced by one that was restored.
        if matches!(&state.preparation, Preparation::Ready(prepared) if prepared.temporary.is_none()) {
            state.preparation = Preparation::Idle;
        }
        state.unsynced.clear();
        state.timeline = timeline;
        (state.written, state.flushed, state.flush_due, state.held) = (at, at, at, at);
        state.positions();
        state.epoch += 1;
        // What is held of another timeline stays: a later one's waits for that, an earlier one's for the same WAL on this one.
        let same_timeline = state.tail.0 == timeline;
        let mut tail = if same_timeline { std::mem::take(&mut state.tail.1) } else { Tail::default() };
        if !same_timeline || tail.end() <= at {
            // What the log has of it lies in segments, or is of another timeline: nothing of what comes now.
            state.early.restart();
        }
        drop(state);
        shared.wake_all();
        if left_incomplete && !shared.partial {
            shared.note_complete(&shared.names_of(left).1);
        }
        tail.forget_before(at);
        Ok(Writer::new(self.clone(), timeline, at, tail))
    }

    /// What is held, as far as it is on the way to where the history leads.
    fn held_on(&self, history: &TimelineHistory) -> Tail {
        let (timeline, mut tail) = self.shared.lock().tail.clone();
        match history.switch_point(timeline) {
            Some(left) => tail.truncate(left),
            None if timeline == history.target() => {}
            None => tail = Tail::default(),
        }
        tail
    }

    /// Whether anything is held on the way to where the history leads, past `used`.
    pub fn holds_past(&self, history: &TimelineHistory, used: Lsn) -> bool {
        let tail = self.held_on(history);
        !tail.is_empty() && tail.end() > used
    }

    /// A promotion: what is held on the way to where the history leads, past `used`, the end of the last record that replay finds,
    /// gets into segments of `timeline`, which is read there, durably. Whether there was anything. Nobody may be writing. What an
    /// `XLOG_SWITCH` leaves unused lies past `used`: nobody has checked it there, and after a power loss a recycled segment may
    /// still have something older.
    ///
    /// `same` tells whether replay reads these bytes at a position: what is held before `used`. It does not if it has replayed
    /// what somebody else brought since, such as an archive, or a server that was started on the directory.
    ///
    /// # Errors
    /// Those of [`Spool::start_at`] and [`Writer::write`], and of `same`; what is held stays held.
    pub fn release<E: From<SpoolError>>(
        self: &Arc<Self>,
        history: &TimelineHistory,
        timeline: TimelineId,
        used: Lsn,
        same: impl FnOnce(Lsn, &[u8]) -> std::result::Result<bool, E>,
    ) -> std::result::Result<bool, E> {
        let tail = self.held_on(history);
        let from = tail.start().max(used);
        if tail.is_empty() || tail.end() <= from || !same(tail.start(), tail.slice(tail.start(), from))? {
            return Ok(false);
        }
        let mut writer = self.start_at(timeline, from)?;
        writer.write(from, tail.slice(from, tail.end()))?;
        drop(writer);
        self.wait_flushed(tail.end())?;
        self.shared.lock().tail = Default::default();
        Ok(true)
    }

    /// Removes the early log, which is of no use once the directory is promoted.
    ///
    /// # Errors
    /// Trouble with files.
    pub fn remove_early(&self) -> Result<()> {
        let directory = &self.shared.directory;
        let names = directory.names().map_err(|error| self.shared.error("read directory", "", error))?;
        for name in names.iter().filter(|name| early::number_of_name(name).is_some()) {
            directory.remove(name).map_err(|error| self.shared.error("remove file", name, error))?;
        }
        self.shared.sync_directory()
    }

    /// Has the early log made ready, so that nobody waits for its first file.
    pub fn prepare_early(&self) {
        self.shared.prepare_early();
    }

    /// The size of segments.
    pub fn segment_size(&self) -> SegmentSize {
        self.shared.size
    }

    /// How far it is with what has been received; zeros before the first [`Spool::start_at`].
    pub fn positions(&self) -> WalPositions {
        self.shared.lock().positions()
    }

    /// [`WalPositions::written`].
    pub fn written(&self) -> Lsn {
        self.shared.lock().written
    }

    /// [`WalPositions::flushed`].
    pub fn flushed(&self) -> Lsn {
        self.shared.lock().flushed
    }

    /// [`WalPositions::held`].
    pub fn held(&self) -> Lsn {
        self.shared.lock().held
    }

    /// [`WalPositions::held_durable`].
    pub fn held_durable(&self) -> Lsn {
        self.positions().held_durable
    }

    /// [`Spool::timeline`] and [`Spool::written`] of one moment.
    pub fn timeline_and_written(&self) -> (TimelineId, Lsn) {
        let state = self.shared.lock();
        (state.timeline, state.written)
    }

    /// The timeline that is written; zero before the first [`Spool::start_at`].
    pub fn timeline(&self) -> TimelineId {
        self.shared.lock().timeline
    }

    /// The error that ended the spool, if one has.
    ///
    /// # Errors
    /// [`SpoolError::Failed`].
    pub fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// How often [`Spool::notify_all`] was called.
    pub fn wakes(&self) -> u64 {
        self.shared.lock().wakes
    }

    /// Waits until more than `lsn` is written, [`Spool::notify_all`] was called more often than `wakes` times, the spool fails, or the time is
    /// over; returns what is written then.
    pub fn wait_written_beyond(&self, lsn: Lsn, wakes: u64, timeout: Duration) -> Lsn {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.lock();
        while state.written <= lsn && state.wakes == wakes && state.failed.is_none() {
            // Without a deadline (an unthinkable time ahead) an hour at a time.
            let left = deadline.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            state = self.shared.on_written.wait_timeout(state, left).expect("no panic while locked").0;
        }
        state.written
    }

    /// Waits until all before `upto`, or all that is written now if that is less, is durable in segments.
    ///
    /// # Errors
    /// The spool has failed.
    pub fn wait_flushed(&self, upto: Lsn) -> Result<()> {
        let mut state = self.shared.lock();
        let upto = upto.min(state.written);
        let epoch = state.epoch;
        if state.flushed < upto {
            self.shared.flush_all(&mut state);
        }
        // Positions are set again only when all is flushed.
        while state.flushed < upto && state.epoch == epoch {
            if let Some(failure) = state.failed.clone() {
                return Err(failure.into());
            }
            state = self.shared.wait(&self.shared.on_flushed, state);
        }
        Ok(())
    }

    /// Wakes all who wait in [`Spool::wait_written_beyond`].
    pub fn notify_all(&self) {
        self.shared.lock().wakes += 1;
        self.shared.on_written.notify_all();
    }

    /// Has `callback`, beside those before, called with `held_durable` whenever it moved, and when the spool fails, by the thread
    /// that saw it. It should be quick, and not keep the spool alive.
    pub fn on_flushed(&self, callback: Box<dyn Fn(Lsn) + Send + Sync>) {
        self.shared.callbacks.lock().expect("no panic while locked").push(callback.into());
    }

    /// Has `callback`, beside those before, called whenever the writer [announces](crate::Writer::announce) that `written` has moved, by its
    /// thread: it must be quick, and not keep the spool alive.
    pub fn on_written(&self, callback: Box<dyn Fn() + Send + Sync>) {
        self.shared.written_callbacks.lock().expect("no panic while locked").push(callback.into());
    }

    /// Stores the history file of a timeline, durably; replaces one that is there (`WalRcvFetchTimeLineHistoryFiles`,
    /// `replication/walreceiver.c`; `writeTimeLineHistoryFile`, `access/transam/timeline.c`; PostgreSQL 18).
    ///
    /// # Errors
    /// More than [`MAX_HISTORY_BYTES`]; trouble with files: the old file is there, or the new.
    pub fn write_history(&self, timeline: TimelineId, contents: &[u8]) -> Result<()> {
        let shared = &self.shared;
        shared.check()?;
        let name = history_file_name(timeline);
        if contents.len() as u64 > MAX_HISTORY_BYTES {
            return Err(SpoolError::Refused(format!(
                "timeline history file \"{name}\" has {} bytes, more than {MAX_HISTORY_BYTES}",
                contents.len()
            )));
        }
        let temporary = format!("{TEMPORARY_PREFIX}walrider.{name}");
        let written = (|| {
            let file =
                shared.directory.create(&temporary).map_err(|error| shared.error("create", &temporary, error))?;
            write_all_at(&*file, contents, 0).map_err(|error| shared.error("write to file", &temporary, error))?;
            file.sync_all().map_err(|error| shared.error("fsync file", &temporary, error))?;
            shared.directory.rename(&temporary, &name).map_err(|error| shared.error("rename to", &name, error))
        })();
        if written.is_err() {
            // The error that counts is the first one.
            let _ = shared.directory.remove(&temporary);
        }
        written?;
        shared.sync_directory()?;
        shared.note_complete(&name);
        Ok(())
    }

    /// What has been done since the spool was opened.
    pub fn stats(&self) -> SpoolStats {
        self.shared.counters.snapshot()
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake_all();
        for thread in self.threads.drain(..) {
            // The callback may have held the last reference.
            if thread.thread().id() != thread::current().id() {
                // They do not panic; if one did, it has said so.
                let _ = thread.join();
            }
        }
    }
}

/// Makes the segments and history files that are there durable, and removes temporary files (`SyncDataDirectory`, `fd.c`;
/// `RemoveTempXlogFiles`, `xlog.c`). Files of subdirectories, such as `archive_status`, need not be durable.
fn sync_what_is_there(shared: &Shared) -> Result<()> {
    let directory = &*shared.directory;
    for name in directory.names().map_err(|error| shared.error("read directory", "", error))? {
        if name.starts_with(TEMPORARY_PREFIX) {
            directory.remove(&name).map_err(|error| shared.error("remove file", &name, error))?;
        } else if shared.segment_of_name(&name).is_some()
            || name.ends_with(".history")
            || early::number_of_name(&name).is_some()
        {
            let file = directory.open(&name).map_err(|error| shared.error("open file", &name, error))?;
            file.sync_all().map_err(|error| shared.fail("fsync file", &name, error))?;
            if shared.partial && !name.ends_with(".partial") {
                // Its name says that it is complete; an earlier run may have been killed before it noted that, or was not told to.
                shared.note_complete(&name);
            }
        }
    }
    shared.sync_directory()
}
