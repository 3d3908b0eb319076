//! `walrider logical apply`: reads a slot, and applies its transactions to another server, many at a time.
//!
//! One thread reads, puts transactions into batches, decides when each may begin, and reports; workers execute them. Nothing is
//! applied twice or lost: each batch moves its worker's row of `walrider_logical.progress` in the same transaction; the commits
//! are in the publisher's order, and so is the target's WAL. So whatever of it survives a crash is a prefix, and the greatest
//! position of these rows is where to go on. Replication origins only keep a second one out, and mark what was applied
//! (`docs/decisions/0015-logical-apply.md` says why).

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use walrider_layout::Lsn;
use walrider_observe::apply::ApplyState;

use crate::copy::raise;
use crate::counters::Counters;
use crate::reader::Reader;
use crate::wake::Wake;

pub use crate::conflict::{Kind as ConflictKind, OnConflict};
pub use crate::error::ApplyError;

/// Between attempts to connect, at least and at most.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Between two looks whether it is still paused; it is woken when it is not.
const WHILE_PAUSED: Duration = Duration::from_secs(1);

/// Internal errors of the publisher, without progress in between.
const MAX_INTERNAL: u32 = 10;
/// After so many of them, and again so many, each change is streamed at once. That decodes with regard to a transaction that is rolled
/// back meanwhile. What is decoded as a whole when it is prepared is not, if the first change is a subtransaction's
/// (`ReorderBufferProcessTXN`, reorderbuffer.c, 18: `SetupCheckXidLive` only where the change's own transaction is marked as prepared).
const IMMEDIATE_FROM: u32 = 2;

/// After so many large transactions that had to be read again, none is begun before all of it has come.
const MAX_WHOLE: u32 = 10;

/// What is applied, from where to where.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Connection string of the publisher, with the slot's database.
    pub source: String,
    /// Connection string of the target.
    pub target: String,
    /// The slot.
    pub slot: String,
    /// The publications.
    pub publications: Vec<String>,
    /// Names the replication origins and prepared transactions on the target.
    pub origin: String,
    /// Also what came to the publisher by replication (`origin = any`).
    pub any_origin: bool,
    /// How many sessions execute.
    pub jobs: usize,
    /// Changes in a batch.
    pub batch_rows: u64,
    /// Bytes in a batch.
    pub batch_bytes: usize,
    /// Bytes of transactions that have not ended.
    pub memory: usize,
    /// Where those go that do not fit.
    pub spill_dir: PathBuf,
    /// What to do with rows that exist.
    pub on_conflict: OnConflict,
    /// End when all transactions up to here were applied.
    pub until: Option<Lsn>,
    /// Leave out the transaction that committed here.
    pub skip: Option<Lsn>,
    /// Whether commits on the target wait until they are durable.
    pub synchronous_commit: bool,
    /// Whether the publisher sends large transactions while they run.
    pub streaming: bool,
    /// How long the slot or an origin may be in use by somebody else before that is an error: sessions of one that was killed
    /// take a while to end.
    pub in_use: Duration,
}

/// Where it stands.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// What it does.
    pub state: ApplyState,
    /// Up to where the publisher has sent or decoded.
    pub received: Lsn,
    /// Durable on the target, and told to the publisher.
    pub flushed: Lsn,
    /// Batches that wait for another.
    pub waiting: u64,
    /// Batches that are executed or wait for their turn.
    pub executing: u64,
    /// Transactions that were read and are in no batch that has committed.
    pub queued: u64,
    /// Everything that was received is applied.
    pub idle: bool,
    /// When it last was so.
    pub was_idle: Option<Instant>,
    /// How often it has connected.
    pub connections: u64,
    /// Why it last had to connect again.
    pub last_error: Option<String>,
    /// The servers.
    pub peers: Option<(String, String)>,
}

/// A run of `apply`; shared with who stops it or asks.
pub struct Apply {
    pub(crate) settings: Settings,
    pub(crate) counters: Arc<Counters>,
    pub(crate) progress: Mutex<Progress>,
    pub(crate) wake: Arc<Wake>,
    stop: AtomicBool,
    paused: AtomicBool,
    immediate: AtomicBool,
    /// Ends the waiting of who connects now.
    connecting: Mutex<Option<Arc<OwnedFd>>>,
    /// Transactions that commit up to here are executed when all of them has come.
    whole_until: AtomicU64,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was told to.
    Stopped,
    /// [`Settings::until`] is reached.
    Reached,
}

impl Apply {
    /// Does nothing yet.
    pub fn new(settings: Settings) -> Result<Arc<Apply>, ApplyError> {
        let wake = Wake::new().map_err(|error| ApplyError::System("make an eventfd", error))?;
        Ok(Arc::new(Apply {
            settings,
            counters: Arc::default(),
            progress: Mutex::default(),
            wake: Arc::new(wake),
            stop: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            immediate: AtomicBool::new(false),
            connecting: Mutex::default(),
            whole_until: AtomicU64::new(0),
        }))
    }

    /// Ends it cleanly: what is under way is committed.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake.wake();
        if let Some(quit) = &*self.connecting.lock().unwrap_or_else(PoisonError::into_inner) {
            raise(quit);
        }
    }

    /// Begins no transaction any more, until it is to go on: what is under way is committed, and the connections end. Both may be asked
    /// for more than once.
    pub fn pause(&self, pause: bool) {
        if self.paused.swap(pause, Ordering::Relaxed) != pause {
            tracing::info!("{}", if pause { "paused" } else { "resumed" });
        }
        self.wake.wake();
    }

    /// Whether it is not to begin anything.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Whether each change is to be streamed at once.
    pub(crate) fn is_immediate(&self) -> bool {
        self.immediate.load(Ordering::Relaxed)
    }

    /// Up to where transactions are executed when all of them has come.
    pub(crate) fn whole_until(&self) -> Lsn {
        Lsn(self.whole_until.load(Ordering::Relaxed))
    }

    /// Whether it is to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Where it stands.
    pub fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes what [`Apply::progress`] tells.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Applies until it is told to stop, [`Settings::until`] is reached, or something has to be set right.
    pub fn run(&self) -> Result<Ended, ApplyError> {
        let mut back_off = BACK_OFF.0;
        let mut in_use: Option<Instant> = None;
        let (mut internal, mut wholes) = (0, 0);
        let result = loop {
            if self.is_stopping() {
                break Ok(Ended::Stopped);
            }
            if self.is_paused() {
                self.note(|progress| (progress.state, progress.idle) = (ApplyState::Paused, false));
                self.sleep(WHILE_PAUSED);
                continue;
            }
            let before = Counters::get(&self.counters.transactions);
            let error = match self.session() {
                Ok(None) => continue,
                Ok(Some(ended)) => break Ok(ended),
                // What was under way is not lost: it is read again next time.
                Err(ApplyError::Stopped) if self.is_stopping() => break Ok(Ended::Stopped),
                Err(error) if self.is_stopping() && (error.can_heal() || error.is_interrupted()) => {
                    tracing::warn!("{error}");
                    break Ok(Ended::Stopped);
                }
                Err(error) => error,
            };
            if !error.can_heal() {
                break Err(error);
            }
            if error.is_in_use() {
                if in_use.get_or_insert_with(Instant::now).elapsed() > self.settings.in_use {
                    let text = format!(
                        "{error}; is another `walrider logical apply` running? if it is to go on, name another slot and --origin"
                    );
                    break Err(ApplyError::Refused(text));
                }
            } else {
                in_use = None;
            }
            if Counters::get(&self.counters.transactions) > before {
                back_off = BACK_OFF.0;
                internal = 0;
            }
            if matches!(error, ApplyError::Usual) {
                tracing::info!("{error}");
                self.immediate.store(false, Ordering::Relaxed);
                continue;
            }
            if let ApplyError::Whole(commit_lsn) = error {
                tracing::info!("{error}");
                wholes += 1;
                let until = if wholes < MAX_WHOLE { commit_lsn } else { Lsn(u64::MAX) };
                self.whole_until.store(until.0, Ordering::Relaxed);
                continue;
            }
            if error.is_internal() {
                internal += 1;
                if internal > MAX_INTERNAL {
                    break Err(match self.settings.streaming {
                        true => error,
                        false => {
                            ApplyError::Refused(format!("{error}; without --streaming off, apply may get past it"))
                        }
                    });
                }
                if internal.is_multiple_of(IMMEDIATE_FROM) && self.settings.streaming {
                    tracing::info!("each change is streamed at once for a while: that may get past it");
                    self.immediate.store(true, Ordering::Relaxed);
                }
            }
            tracing::warn!("{error}; connecting again in {} ms", back_off.as_millis());
            self.note(|progress| {
                progress.state = ApplyState::Connecting;
                progress.last_error = Some(error.to_string());
            });
            self.sleep(back_off);
            back_off = (back_off * 2).min(BACK_OFF.1);
        };
        self.note(|progress| progress.state = if result.is_ok() { ApplyState::Stopped } else { ApplyState::Failed });
        result
    }

    /// Until then, or until it is to stop.
    fn sleep(&self, time: Duration) {
        let end = Instant::now() + time;
        while !self.is_stopping() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let left = Timespec::try_from(left).ok();
            // Whatever comes of it, the time is looked at again.
            let _ = poll(&mut [PollFd::new(&*self.wake, PollFlags::IN)], left.as_ref());
            self.wake.clear();
        }
    }

    /// From connecting to the end of a connection; `None`: it is paused.
    fn session(&self) -> Result<Option<Ended>, ApplyError> {
        let system = |error: rustix::io::Errno| ApplyError::System("make an eventfd", error.into());
        let quit: Arc<OwnedFd> = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(system)?);
        let connecting = |quit| *self.connecting.lock().unwrap_or_else(PoisonError::into_inner) = quit;
        std::thread::scope(|scope| {
            connecting(Some(quit.clone()));
            let started =
                if self.is_stopping() { Err(ApplyError::Stopped) } else { Reader::start(self, scope, quit.clone()) };
            connecting(None);
            let mut reader = started?;
            // Where it was to stop until now, the connections are of no use.
            let result = if self.is_stopping() { Err(ApplyError::Stopped) } else { reader.run() };
            // What is still waiting for the target is not worth waiting for.
            raise(&quit);
            reader.end(result.is_ok());
            result
        })
    }
}
