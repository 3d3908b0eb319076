//! What the threads of a spool share: positions, the files between them, and who waits for what.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use walrider_datadir::descriptors::shares;
use walrider_layout::positions::WalPositions;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::archive_status::ArchiveStatus;
use crate::early::Early;
use crate::error::{Failure, Result, SpoolError};
use crate::files::{Directory, SegmentFile};
use crate::stats::{Counters, count};
use crate::tail::Tail;
use crate::work::Stepped;

/// Most segments that are written and not yet durable; then the writer waits. It is the one wait for an fsync there is,
/// at 4 GB (of segments of 16 MB) that the disk lags behind, so that files stay open in a bounded number. Less where few files
/// may be open; the last segment stays, so they are two at least.
pub fn max_unsynced() -> usize {
    shares().unsynced.max(2)
}

/// A segment by timeline and number.
pub(crate) type SegmentId = (TimelineId, u64);

/// A file with WAL in it that may not be durable.
#[derive(Clone)]
pub(crate) struct Unsynced {
    pub segment: u64,
    pub file: Arc<dyn SegmentFile>,
    /// Its name is not durable either.
    pub renamed: bool,
}

/// A segment file that is ready to be written.
pub(crate) struct Prepared {
    pub id: SegmentId,
    pub file: Arc<dyn SegmentFile>,
    /// The name that it has until it is used; its own if `None`.
    pub temporary: Option<String>,
}

/// How far the next segment is.
pub(crate) enum Preparation {
    Idle,
    Wanted(SegmentId),
    Working(SegmentId),
    Ready(Prepared),
    Failed(SpoolError),
}

/// All that changes. Positions are those of [`WalPositions`]; `flushed` and `written` are equal when there is no writer and the
/// flusher is done.
pub(crate) struct State {
    pub timeline: TimelineId,
    pub written: Lsn,
    pub flushed: Lsn,
    /// Up to there somebody waits for the flusher; what lies past may wait for more.
    pub flush_due: Lsn,
    pub held: Lsn,
    pub early: Early,
    /// What is held past `written`, while there is no writer, and its timeline.
    pub tail: (TimelineId, Tail),
    /// The files of `flushed..written`, in order; the last may be durable already.
    pub unsynced: VecDeque<Unsynced>,
    /// The flusher is at it, or files a segment.
    pub flushing: bool,
    /// The segment that is durable, and not yet given its final name and mark.
    pub filing: Option<u64>,
    /// How often the positions were set again.
    pub epoch: u64,
    /// How often all waiters were woken.
    pub wakes: u64,
    /// There is a writer.
    pub writer: bool,
    /// The last writer had all of its timeline from the primary.
    pub timeline_ended: bool,
    /// How many segments that were restored are being put in place; and ever were.
    pub restoring: usize,
    pub restored: u64,
    /// The spool is dropped: flush what there is, and end.
    pub stop: bool,
    pub failed: Option<Failure>,
    pub preparation: Preparation,
}

impl State {
    /// What it knows of positions; called wherever one moves.
    pub fn positions(&self) -> WalPositions {
        let State { written, flushed, held, .. } = *self;
        let held_durable = self.early.ends.held_durable(flushed).min(held);
        let positions = WalPositions { held, held_durable, written, flushed, ..WalPositions::default() };
        positions.check();
        positions
    }
}

/// Called when `held_durable` has moved.
pub(crate) type OnFlushed = Arc<dyn Fn(Lsn) + Send + Sync>;

/// Called when `written` was announced.
pub(crate) type OnWritten = Arc<dyn Fn() + Send + Sync>;

pub(crate) struct Shared {
    pub directory: Arc<dyn Directory>,
    pub size: SegmentSize,
    pub archive_status: ArchiveStatus,
    pub partial: bool,
    pub max_recycled: u64,
    /// Held for moments, never while the system is asked to do something.
    state: Mutex<State>,
    /// `written` has moved, or everybody is to look.
    pub on_written: Condvar,
    /// `flushed` has moved, or the flusher has come to rest.
    pub on_flushed: Condvar,
    /// There is something to flush, or the end.
    pub flush: Condvar,
    /// The same for the early log.
    pub early_work: Condvar,
    /// A segment or a file of the early log is wanted, or the end.
    pub prepare: Condvar,
    /// A segment is prepared, or cannot be.
    pub prepared: Condvar,
    /// Taken between looking whether a name of a segment is free and giving it to a file.
    pub names: Mutex<()>,
    pub callbacks: Mutex<Vec<OnFlushed>>,
    /// Called when `written` was announced.
    pub written_callbacks: Mutex<Vec<OnWritten>>,
    /// Who needs WAL, and from where on, by number.
    pub holds: Mutex<BTreeMap<u64, Lsn>>,
    pub counters: Counters,
    /// There are no threads: a caller that waits has the work done.
    pub stepped: Option<Stepped>,
    /// Quick to look at: `State::failed` is set.
    has_failed: AtomicBool,
}

impl Shared {
    pub fn new(directory: Arc<dyn Directory>, options: &crate::SpoolOptions) -> Shared {
        let state = State {
            timeline: TimelineId(0),
            written: Lsn::INVALID,
            flushed: Lsn::INVALID,
            flush_due: Lsn::INVALID,
            held: Lsn::INVALID,
            early: Early::default(),
            tail: (TimelineId(0), Tail::default()),
            unsynced: VecDeque::new(),
            flushing: false,
            filing: None,
            epoch: 0,
            wakes: 0,
            writer: false,
            timeline_ended: false,
            restoring: 0,
            restored: 0,
            stop: false,
            failed: None,
            preparation: Preparation::Idle,
        };
        Shared {
            directory,
            size: options.segment_size,
            archive_status: options.archive_status,
            partial: options.partial,
            max_recycled: options.max_recycled,
            state: Mutex::new(state),
            on_written: Condvar::new(),
            on_flushed: Condvar::new(),
            flush: Condvar::new(),
            early_work: Condvar::new(),
            prepare: Condvar::new(),
            prepared: Condvar::new(),
            names: Mutex::new(()),
            callbacks: Mutex::default(),
            written_callbacks: Mutex::default(),
            holds: Mutex::default(),
            counters: Counters::default(),
            stepped: None,
            has_failed: AtomicBool::new(false),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    /// Waits to be told, with the lock given away meanwhile.
    pub fn wait<'a>(&'a self, on: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some(stepped) = &self.stepped else { return on.wait(state).expect("no panic while locked") };
        drop(state);
        stepped.step_any(self);
        self.lock()
    }

    /// Wakes everybody, whatever they wait for.
    pub fn wake_all(&self) {
        let segments = [&self.on_written, &self.on_flushed, &self.flush, &self.prepare, &self.prepared];
        segments.into_iter().chain([&self.early_work]).for_each(Condvar::notify_all);
    }

    /// An error if the spool has failed.
    pub fn check(&self) -> Result<()> {
        if !self.has_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        match self.lock().failed.clone() {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        }
    }

    /// Ends the spool: durability of `name` (of the directory itself if empty) cannot be had. The first failure counts.
    pub fn fail(&self, operation: &'static str, name: &str, source: io::Error) -> SpoolError {
        let failure = Failure { operation, path: self.directory.path().join(name), source: Arc::new(source) };
        let mut state = self.lock();
        let failure = state.failed.get_or_insert(failure).clone();
        let flushed = state.flushed;
        self.has_failed.store(true, Ordering::Release);
        drop(state);
        self.wake_all();
        self.call_back(flushed);
        failure.into()
    }

    /// Has the flusher make durable all that is written.
    pub fn flush_all(&self, state: &mut State) {
        if state.flush_due < state.written {
            state.flush_due = state.written;
            self.flush.notify_one();
        }
    }

    /// Tells those who want to know that there is something to look at.
    pub fn call_back(&self, flushed: Lsn) {
        let callbacks = self.callbacks.lock().expect("no panic while locked").clone();
        callbacks.iter().for_each(|callback| callback(flushed));
    }

    /// Makes the names in the directory durable; that this fails is final.
    pub fn sync_directory(&self) -> Result<()> {
        self.directory.sync().map_err(|error| self.fail("fsync directory", "", error))
    }

    /// An error about a file of the directory.
    pub fn error(&self, operation: &'static str, name: &str, source: io::Error) -> SpoolError {
        SpoolError::io(operation, self.directory.path().join(name), source)
    }

    /// The name of a segment's file while it is incomplete, and for good.
    pub fn names_of(&self, (timeline, segment): SegmentId) -> (String, String) {
        let name = self.size.file_name(timeline, segment);
        (if self.partial { format!("{name}.partial") } else { name.clone() }, name)
    }

    /// The segment whose file, complete or `.partial`, has this name.
    pub fn segment_of_name(&self, name: &str) -> Option<SegmentId> {
        self.size.parse_file_name(name.strip_suffix(".partial").unwrap_or(name))
    }

    /// Notes in `archive_status` that a file is complete. That this fails is counted, and no more, as in PostgreSQL.
    pub fn note_complete(&self, name: &str) {
        if self.archive_status.note_complete(&*self.directory, name).is_err() {
            count(&self.counters.archive_status_failures, 1);
        }
    }
}
