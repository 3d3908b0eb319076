//! What a standby knows of its WAL, and what it tells the primary and when: the state machine behind `walrider standby` and
//! `walrider receive`, without I/O and without a clock. `tests/model/` checks it.
//!
//! ```text
//! held_durable ≤ held            what came in this session
//! applied ≤ min(held, horizon)   while following; once promoted, all that is held counts
//! ```
//!
//! The horizon is the newest flush position that the primary has told. A stock primary sends what it has flushed, and the
//! horizon never lags behind that. One that sends its WAL early may crash and lose what it sent: that must not be replayed here as
//! long as the primary can come back, and must be replayed when it cannot, because it may hold commits that were
//! acknowledged on our word. What is held past the horizon stays ([`walrider_spool::Tail`]) when a connection is lost, but is
//! not reported in the next session until it has come again: another run of the primary may have something else there.

use std::time::Duration;

use walrider_layout::Lsn;
use walrider_layout::positions::WalPositions;
use walrider_wire::pulse::{Link, Pulse, Timing};

/// What the primary is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Report {
    /// Up to there, WAL is in the operating system here.
    pub write: Lsn,
    /// Up to there, it is durable.
    pub flush: Lsn,
    /// Up to there, it is replayed and durable; zero where nothing is replayed.
    pub apply: Lsn,
    /// An answer is asked for.
    pub reply_requested: bool,
}

/// How far others are whom the primary's commits wait for, too: those that a relay serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// No more is told as written.
    pub write: Lsn,
    /// No more is told as flushed.
    pub flush: Lsn,
    /// No more is told as applied.
    pub apply: Lsn,
}

impl Limit {
    /// Nobody else counts.
    pub const NONE: Limit = Limit { write: Lsn(u64::MAX), flush: Lsn(u64::MAX), apply: Lsn(u64::MAX) };
}

/// The positions of one standby. Times are since any fixed moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Positions {
    timing: Timing,
    /// Those that are told; segments are not known here.
    wal: WalPositions,
    /// No more than that is told.
    limit: Limit,
    /// Of this session.
    session: Session,
}

/// What is forgotten when a session ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Session {
    told: Option<Report>,
    /// A commit was replayed since the last report.
    commit_applied: bool,
    pulse: Pulse,
}

impl Positions {
    /// A standby that holds no WAL yet.
    pub fn new(timing: Timing) -> Positions {
        Positions { timing, wal: WalPositions::default(), limit: Limit::NONE, session: Session::default() }
    }

    /// Other intervals from now on.
    pub fn set_timing(&mut self, timing: Timing) {
        self.timing = timing;
    }

    /// Others count, too, from now on.
    pub fn set_limit(&mut self, limit: Limit) {
        self.limit = limit;
    }

    /// [`WalPositions::held`].
    pub fn held(&self) -> Lsn {
        self.wal.held
    }

    /// [`WalPositions::horizon`].
    pub fn horizon(&self) -> Lsn {
        self.wal.horizon
    }

    /// A session begins: streaming goes on at `start`, which is what can be replayed, and not past the primary's flush position.
    pub fn connect(&mut self, start: Lsn, primary_flushed: Lsn, now: Duration) {
        // What another server has told says nothing of this one.
        self.wal = WalPositions { held: start, held_durable: start, horizon: primary_flushed, ..self.wal };
        self.wal.check();
        self.session = Session { pulse: Pulse::begin(now), ..Session::default() };
    }

    /// A message of the primary has come, with its flush position.
    pub fn heard(&mut self, wal_end: Lsn, reply_requested: bool, now: Duration) {
        self.wal.horizon = self.wal.horizon.max(wal_end);
        self.session.pulse.heard(reply_requested, now);
    }

    /// WAL up to there has got into the operating system.
    pub fn holds(&mut self, upto: Lsn) {
        self.wal.held = self.wal.held.max(upto);
        self.wal.check();
    }

    /// WAL up to there is durable.
    pub fn holds_durably(&mut self, upto: Lsn) {
        self.wal.held_durable = self.wal.held_durable.max(upto);
        self.wal.check();
    }

    /// WAL up to there is replayed; `commits`: a commit was among it.
    pub fn applied(&mut self, upto: Lsn, commits: bool) {
        self.wal.applied = self.wal.applied.max(upto);
        self.session.commit_applied |= commits;
    }

    /// What the others have done: made durable what the spool has up to `held_durable`, which may be more than came in this
    /// session, and replayed.
    pub fn catch_up(&mut self, held_durable: Lsn, (applied, commits): (Lsn, bool)) {
        self.holds_durably(held_durable.min(self.wal.held));
        self.applied(applied, commits);
    }

    /// Whether the primary has been silent for too long, although it was asked for an answer.
    pub fn is_lost(&self, now: Duration) -> bool {
        self.session.pulse.is_lost(self.timing, now)
    }

    /// What to tell the primary now, if anything.
    ///
    /// What moved at writing and flushing is told at once: somebody may be waiting for just that. That replay moved is told
    /// along with it, and by itself once the link is quiet and a commit was replayed: who waits for it waits for a commit,
    /// and while more is coming in, there will be something to tell it with.
    pub fn report(&mut self, link: Link, now: Duration) -> Option<Report> {
        let apply = self.wal.applied.min(self.wal.held_durable).min(self.limit.apply);
        let ping = self.session.pulse.is_ping_due(self.timing, now);
        let write = self.wal.held.min(self.limit.write);
        let flush = self.wal.held_durable.min(self.limit.flush);
        let report = Report { write, flush, apply, reply_requested: ping };
        let moved = match self.session.told {
            None => true,
            Some(told) => {
                let applied = apply > told.apply && self.session.commit_applied && link == Link::Quiet;
                report.write != told.write || report.flush != told.flush || applied
            }
        };
        if !moved && !self.session.pulse.is_due(self.timing, now) {
            return None;
        }
        self.session.told = Some(report);
        self.session.pulse.told(ping, now);
        // What is replayed but not durable yet is still to be told.
        self.session.commit_applied &= apply < self.wal.applied;
        Some(report)
    }

    /// When to look again although nothing happens.
    pub fn deadline(&self) -> Option<Duration> {
        self.session.pulse.deadline(self.timing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Lsn = Lsn(100);
    const SECOND: Duration = Duration::from_secs(1);

    /// A session that has said what it says at first.
    fn connected() -> Positions {
        let mut positions = Positions::new(Timing { status_interval: 10 * SECOND, timeout: 60 * SECOND });
        positions.connect(START, START, Duration::ZERO);
        assert!(positions.report(Link::Quiet, Duration::ZERO).is_some(), "first of all, where it stands");
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), None);
        positions
    }

    fn told(write: u64, flush: u64, apply: u64) -> Option<Report> {
        Some(Report { write: Lsn(write), flush: Lsn(flush), apply: Lsn(apply), reply_requested: false })
    }

    #[test]
    fn each_stage_is_told_when_it_is_reached() {
        let mut positions = connected();
        positions.heard(Lsn(120), false, Duration::ZERO);
        positions.holds(Lsn(120));
        assert_eq!(positions.report(Link::Busy, Duration::ZERO), told(120, 100, 0));
        // Replayed before it is durable: that is no news to somebody who waits for both.
        positions.applied(Lsn(120), true);
        positions.holds_durably(Lsn(120));
        assert_eq!(positions.report(Link::Busy, Duration::ZERO), told(120, 120, 120));
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), None);
    }

    #[test]
    fn replay_alone_is_told_when_the_link_is_quiet_and_a_commit_moved() {
        let mut positions = connected();
        positions.holds(Lsn(120));
        positions.holds_durably(Lsn(120));
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 120, 0));
        positions.applied(Lsn(110), false);
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), None, "no commit");
        positions.applied(Lsn(120), true);
        assert_eq!(positions.report(Link::Busy, Duration::ZERO), None, "more is coming in");
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 120, 120));
    }

    /// The commit was replayed, then reported with something else, before its WAL was durable. Nobody told the primary when
    /// it was.
    #[test]
    fn a_commit_replayed_before_it_is_durable_is_told_later() {
        let mut positions = connected();
        positions.holds(Lsn(120));
        positions.applied(Lsn(120), true);
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 100, 100));
        positions.holds_durably(Lsn(120));
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 120, 120));
    }

    /// What an earlier session brought is held, but another primary, or this one after a crash, may mean something else by it.
    #[test]
    fn a_new_session_reports_what_came_in_it() {
        let mut positions = connected();
        positions.heard(Lsn(110), false, Duration::ZERO);
        positions.holds(Lsn(130));
        positions.holds_durably(Lsn(130));
        positions.connect(Lsn(110), Lsn(105), SECOND);
        assert_eq!(positions.horizon(), Lsn(105), "this primary's own");
        assert_eq!(positions.report(Link::Quiet, SECOND), told(110, 110, 0));
    }

    /// A relay's own spool has it, and those that it serves do not yet.
    #[test]
    fn others_count_where_they_are_asked_for() {
        let mut positions = connected();
        positions.set_limit(Limit { write: Lsn(110), flush: Lsn(105), ..Limit::NONE });
        positions.holds(Lsn(120));
        positions.holds_durably(Lsn(120));
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(110, 105, 0));
        positions.set_limit(Limit { write: Lsn(130), flush: Lsn(110), apply: Lsn(90) });
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 110, 0));
        // A commit that was replayed here long ago is news once it is there, too.
        positions.applied(Lsn(120), true);
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 110, 90));
        positions.set_limit(Limit { write: Lsn(130), flush: Lsn(110), apply: Lsn(120) });
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), told(120, 110, 120));
        assert_eq!(positions.report(Link::Quiet, Duration::ZERO), None);
    }

    #[test]
    fn silence_is_broken() {
        let mut positions = connected();
        assert_eq!(positions.deadline(), Some(10 * SECOND));
        assert_eq!(positions.report(Link::Quiet, 9 * SECOND), None);
        assert_eq!(positions.report(Link::Quiet, 10 * SECOND), told(100, 100, 0));
        let ping = positions.report(Link::Quiet, 30 * SECOND).unwrap();
        assert!(ping.reply_requested);
        assert!(!positions.report(Link::Quiet, 40 * SECOND).unwrap().reply_requested, "once is enough");
        assert!(!positions.is_lost(59 * SECOND));
        assert!(positions.is_lost(60 * SECOND));
        positions.heard(START, true, 59 * SECOND);
        assert!(!positions.is_lost(60 * SECOND));
        assert!(positions.report(Link::Busy, 59 * SECOND).is_some(), "the primary has asked");
        let never = Timing { status_interval: Duration::ZERO, timeout: Duration::ZERO };
        positions.set_timing(never);
        assert_eq!(positions.deadline(), None);
        assert!(!positions.is_lost(1000 * SECOND));
    }
}
