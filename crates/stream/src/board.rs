//! What the thread that receives tells the others, and what they tell it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use walrider_layout::Lsn;
use walrider_layout::samples::PositionSamples;
use walrider_wire::pulse::{Link, Timing};
use walrider_wire::stream::HotStandbyFeedback;

use crate::error::ReceiveError;
use crate::line::Line;
use crate::positions::Limit;

/// How often it is noted how far the primary is.
const NOTED_EVERY_MS: u64 = 1000;

/// Shared by all threads of a standby. A thread that changes something that the receiver waits for wakes it.
pub struct Board {
    wake: OwnedFd,
    /// Readable while the session is to end.
    end: Arc<OwnedFd>,
    ends: AtomicBool,
    applied: AtomicU64,
    commits: AtomicBool,
    horizon: AtomicU64,
    /// When it moved, in seconds since `began`, and the milliseconds of the last time that was noted.
    horizons: Mutex<PositionSamples>,
    noted: AtomicU64,
    began: Instant,
    received: AtomicU64,
    reported: AtomicU64,
    sent_at: AtomicI64,
    heard_at: AtomicI64,
    disk_full: AtomicBool,
    timing: Mutex<Timing>,
    /// What those downstream have told, as far as the primary is to know.
    downstream: Mutex<Downstream>,
    /// While the receiver sleeps.
    line: Mutex<Option<Box<Line>>>,
}

/// What those downstream of a relay have told.
#[derive(Clone, Copy)]
struct Downstream {
    limit: Limit,
    feedback: Option<HotStandbyFeedback>,
    /// No less is told as flushed than that, whatever the limit.
    floor: Lsn,
}

impl Board {
    /// An empty one.
    ///
    /// # Errors
    /// When the system gives no event descriptor.
    pub fn new(timing: Timing) -> io::Result<Board> {
        Ok(Board {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            end: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            ends: AtomicBool::new(false),
            applied: AtomicU64::new(0),
            commits: AtomicBool::new(false),
            horizon: AtomicU64::new(0),
            horizons: Mutex::new(PositionSamples::default()),
            noted: AtomicU64::new(0),
            began: Instant::now(),
            received: AtomicU64::new(0),
            reported: AtomicU64::new(0),
            sent_at: AtomicI64::new(0),
            heard_at: AtomicI64::new(0),
            disk_full: AtomicBool::new(false),
            timing: Mutex::new(timing),
            downstream: Mutex::new(Downstream { limit: Limit::NONE, feedback: None, floor: Lsn::INVALID }),
            line: Mutex::new(None),
        })
    }

    /// Readable when somebody has woken the receiver.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Has the receiver look at what changed.
    fn wake(&self) {
        // Full, at 2^64 wakes that nobody has taken: it is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Tells the primary what is new: the caller does while the receiver sleeps, and else the receiver.
    pub fn tell(&self) {
        let told = match self.line.lock().expect("no panic while locked").as_mut() {
            // An error comes again when the receiver does the same.
            Some(line) => self.report(line, Link::Quiet).unwrap_or(false),
            None => false,
        };
        if !told {
            self.wake();
        }
    }

    /// Tells the primary what is new; whether the connection took all of it.
    ///
    /// # Errors
    /// The connection is lost, or the spool has failed. Both stay so.
    pub(crate) fn report(&self, line: &mut Line, link: Link) -> Result<bool, ReceiveError> {
        line.spool.check()?;
        let Downstream { limit, feedback, floor } = *self.downstream.lock().expect("no panic while locked");
        line.positions.set_limit(Limit { flush: limit.flush.max(floor), ..limit });
        line.positions.catch_up(line.spool.held_durable(), self.take_applied());
        line.feed_back(feedback);
        if let Some(report) = line.positions.report(link, line.began.elapsed()) {
            line.send(&report);
            self.set_reported(report.apply);
        }
        Ok(line.connection.flush()?)
    }

    /// Has others tell.
    pub(crate) fn leave(&self, line: Box<Line>) {
        *self.line.lock().expect("no panic while locked") = Some(line);
    }

    /// Has nobody else tell any more: what [`Board::leave`] left.
    pub(crate) fn take(&self) -> Box<Line> {
        self.line.lock().expect("no panic while locked").take().expect("left before")
    }

    /// Takes all wakes so far.
    pub(crate) fn awake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    /// Ends the session, and lets none begin, until told otherwise.
    pub fn end(&self, ends: bool) {
        self.ends.store(ends, Ordering::SeqCst);
        let _ = match ends {
            true => rustix::io::write(&self.end, &1u64.to_ne_bytes()),
            false => rustix::io::read(&self.end, &mut [0; 8]),
        };
        self.wake();
    }

    /// Readable while the session is to end: for a thread that waits for something else.
    pub fn end_fd(&self) -> Arc<OwnedFd> {
        self.end.clone()
    }

    /// Whether the session is to end.
    pub fn ends(&self) -> bool {
        self.ends.load(Ordering::SeqCst)
    }

    /// Replay has got to `upto`; `commits`: a commit was among it. `flushed` tells what is durable: the primary is told if that
    /// is news for it, and otherwise will be when `upto` is durable.
    pub fn applied(&self, upto: Lsn, commits: bool, flushed: impl FnOnce() -> Lsn) {
        self.applied.store(upto.0, Ordering::Release);
        if commits {
            self.commits.store(true, Ordering::Release);
            // Either we see what is flushed, or the one that tells of the flush sees what is applied.
            fence(Ordering::SeqCst);
            if upto <= flushed() {
                self.tell();
            }
        }
    }

    /// What [`Board::applied`] has told, and whether a commit was among it since the last time.
    fn take_applied(&self) -> (Lsn, bool) {
        fence(Ordering::SeqCst);
        // In this order: a commit that is told between the two counts next time.
        let commits = self.commits.swap(false, Ordering::AcqRel);
        (Lsn(self.applied.load(Ordering::Acquire)), commits)
    }

    /// Those downstream have got on: what is told waits for them, and `feedback` is what their queries need.
    /// [`Board::tell`] makes it known.
    pub fn set_downstream(&self, limit: Limit, feedback: Option<HotStandbyFeedback>) {
        let mut downstream = self.downstream.lock().expect("no panic while locked");
        (downstream.limit, downstream.feedback) = (limit, feedback);
    }

    /// Whether what is told as flushed waits for those downstream.
    pub fn limits_flush(&self) -> bool {
        self.downstream.lock().expect("no panic while locked").limit.flush < Limit::NONE.flush
    }

    /// What is told as flushed in the session that begins is never less, although those downstream may not have got so far: see
    /// [`Opened::floor`](crate::upstream::Opened::floor).
    pub fn set_floor(&self, floor: Lsn) {
        self.downstream.lock().expect("no panic while locked").floor = floor;
    }

    /// The primary's newest flush position that it has told.
    pub fn horizon(&self) -> Lsn {
        Lsn(self.horizon.load(Ordering::Acquire))
    }

    pub(crate) fn set_horizon(&self, horizon: Lsn) {
        let before = self.horizon.swap(horizon.0, Ordering::AcqRel);
        if horizon.0 == before {
            return;
        }
        let now = self.began.elapsed();
        if before == 0 || now.as_millis() as u64 >= self.noted.load(Ordering::Relaxed) + NOTED_EVERY_MS {
            self.noted.store(now.as_millis() as u64, Ordering::Relaxed);
            self.horizons.lock().expect("no panic while locked").grow(now.as_secs_f64(), Lsn(before), horizon);
        }
    }

    /// How long ago the primary told that it had flushed more than up to there, in seconds, and whether it was before that was noted, so that
    /// this is the least. `None` before it has told anything.
    pub fn age(&self, position: Lsn) -> Option<(f64, bool)> {
        let (horizons, now) =
            (self.horizons.lock().expect("no panic while locked"), self.began.elapsed().as_secs_f64());
        match horizons.newest()? {
            // It moved soon after that, and has not since.
            (time, newest) if newest <= position && position < self.horizon() => Some((now - time, false)),
            _ => horizons.age(position, now),
        }
    }

    /// Up to where WAL has come over the wire.
    pub fn received(&self) -> Lsn {
        Lsn(self.received.load(Ordering::Relaxed))
    }

    pub(crate) fn set_received(&self, received: Lsn) {
        self.received.store(received.0, Ordering::Relaxed);
    }

    /// What the primary was told as applied.
    pub fn reported(&self) -> Lsn {
        Lsn(self.reported.load(Ordering::Relaxed))
    }

    fn set_reported(&self, reported: Lsn) {
        self.reported.store(reported.0, Ordering::Relaxed);
    }

    /// When the last message was sent, by the primary's clock, and when it came, by ours: microseconds since 2000-01-01 UTC;
    /// zero before the first.
    pub fn last_message(&self) -> (i64, i64) {
        (self.sent_at.load(Ordering::Relaxed), self.heard_at.load(Ordering::Relaxed))
    }

    pub(crate) fn set_last_message(&self, sent_at: i64, heard_at: i64) {
        self.sent_at.store(sent_at, Ordering::Relaxed);
        self.heard_at.store(heard_at, Ordering::Relaxed);
    }

    /// Whether what was received waits for space on the disk.
    pub fn disk_full(&self) -> bool {
        self.disk_full.load(Ordering::Relaxed)
    }

    pub(crate) fn set_disk_full(&self, full: bool) {
        self.disk_full.store(full, Ordering::Relaxed);
    }

    /// When to speak without news.
    pub fn timing(&self) -> Timing {
        *self.timing.lock().expect("no panic while locked")
    }

    /// Changes that, at once.
    pub fn set_timing(&self, timing: Timing) {
        *self.timing.lock().expect("no panic while locked") = timing;
        self.wake();
    }
}
