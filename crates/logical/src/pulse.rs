//! When to tell the publisher how far we are, and when it counts as lost, without a clock (`send_feedback` and
//! `LogicalRepApplyLoop`, `src/backend/replication/logical/worker.c`, PostgreSQL 18).

use std::time::Duration;

use walrider_layout::Lsn;

/// While data comes without end, news is told this often.
const BUSY_INTERVAL: Duration = Duration::from_millis(10);

/// When to speak without anything new to say (`wal_receiver_status_interval`, `wal_receiver_timeout`); zero: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// A report at least this often.
    pub status_interval: Duration,
    /// A publisher that is silent for this long is lost; after half of it, it is asked for an answer.
    pub timeout: Duration,
}

/// How far the subscriber is: everything that was committed before. Ends, exclusive.
///
/// ```text
/// flushed ≤ written, applied ≤ written
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// It was passed on.
    pub written: Lsn,
    /// It is durable: it will not be sent again.
    pub flushed: Lsn,
    /// It can be seen; for `synchronous_commit = remote_apply`.
    pub applied: Lsn,
}

/// Whether more is waiting to be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Nothing at the moment.
    Quiet,
    /// More may be there.
    Busy,
}

/// One session's. Times are since its beginning.
#[derive(Clone, Debug)]
pub struct Pulse {
    timing: Timing,
    progress: Progress,
    told: Option<Progress>,
    /// The publisher wants to hear from us.
    asked: bool,
    /// When it was asked for an answer that it has not given.
    pinged_at: Option<Duration>,
    heard_at: Duration,
    told_at: Duration,
}

impl Pulse {
    /// Streaming begins; nothing was told yet.
    pub fn new(timing: Timing) -> Pulse {
        let (heard_at, told_at) = (Duration::ZERO, Duration::ZERO);
        Pulse { timing, progress: Progress::default(), told: None, asked: false, pinged_at: None, heard_at, told_at }
    }

    /// Something has come; `asked`: an answer is wanted.
    pub fn heard(&mut self, asked: bool, now: Duration) {
        self.asked |= asked;
        self.heard_at = now;
        self.pinged_at = None;
    }

    /// We are that far; what was known before stays known.
    pub fn confirm(&mut self, progress: Progress) {
        let Progress { written, flushed, applied } = progress;
        assert!(flushed <= written && applied <= written, "{progress:?}");
        self.progress.written = self.progress.written.max(written);
        self.progress.flushed = self.progress.flushed.max(flushed);
        self.progress.applied = self.progress.applied.max(applied);
    }

    /// What was told last.
    pub fn told(&self) -> Progress {
        self.told.unwrap_or_default()
    }

    /// What to tell now, if anything, and whether an answer is to be asked for.
    pub fn report(&mut self, link: Link, now: Duration) -> Option<(Progress, bool)> {
        let since = now.saturating_sub(self.told_at);
        let news = self.told != Some(self.progress) && (link == Link::Quiet || since >= BUSY_INTERVAL);
        let due = !self.timing.status_interval.is_zero() && since >= self.timing.status_interval;
        let timeout = self.timing.timeout;
        let ping = !timeout.is_zero() && self.pinged_at.is_none() && now.saturating_sub(self.heard_at) >= timeout / 2;
        if !(news || due || ping || self.asked) {
            return None;
        }
        self.told = Some(self.progress);
        self.told_at = now;
        self.asked = false;
        if ping {
            self.pinged_at = Some(now);
        }
        Some((self.progress, ping))
    }

    /// Whether the publisher has been silent for too long, and has had half of that time to answer: that nobody listened, or
    /// asked, is no fault of its.
    pub fn is_lost(&self, now: Duration) -> bool {
        self.pinged_at.is_some_and(|at| now >= (self.heard_at + self.timing.timeout).max(at + self.timing.timeout / 2))
    }

    /// When to look again although nothing happens.
    pub fn deadline(&self) -> Option<Duration> {
        let Timing { status_interval, timeout } = self.timing;
        let status = Some(self.told_at + status_interval).filter(|_| !status_interval.is_zero());
        let heard = match self.pinged_at {
            None => Some(self.heard_at + timeout / 2).filter(|_| !timeout.is_zero()),
            Some(at) => Some((self.heard_at + timeout).max(at + timeout / 2)),
        };
        [status, heard].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pulse(status_interval: u64, timeout: u64) -> Pulse {
        let seconds = Duration::from_secs;
        Pulse::new(Timing { status_interval: seconds(status_interval), timeout: seconds(timeout) })
    }

    fn progress(written: u64, flushed: u64, applied: u64) -> Progress {
        Progress { written: Lsn(written), flushed: Lsn(flushed), applied: Lsn(applied) }
    }

    #[test]
    fn news_is_told_at_once_where_nothing_else_comes() {
        let mut pulse = pulse(10, 60);
        assert_eq!(pulse.report(Link::Quiet, Duration::ZERO), Some((Progress::default(), false)), "that we are there");
        assert_eq!(pulse.report(Link::Quiet, SECOND), None);
        pulse.confirm(progress(30, 20, 10));
        pulse.confirm(progress(30, 10, 0));
        assert_eq!(pulse.told(), Progress::default());
        assert_eq!(pulse.report(Link::Quiet, SECOND), Some((progress(30, 20, 10), false)));
        pulse.confirm(progress(40, 40, 40));
        assert_eq!(pulse.report(Link::Busy, SECOND + BUSY_INTERVAL / 2), None, "it was told a moment ago");
        assert!(pulse.report(Link::Busy, SECOND + BUSY_INTERVAL).is_some());
        assert_eq!(pulse.told(), progress(40, 40, 40));
    }

    #[test]
    fn what_is_asked_for_and_what_is_due_is_told() {
        let mut pulse = pulse(10, 60);
        pulse.report(Link::Quiet, Duration::ZERO);
        assert_eq!(pulse.deadline(), Some(10 * SECOND));
        pulse.heard(true, SECOND);
        assert!(pulse.report(Link::Busy, SECOND).is_some());
        assert_eq!(pulse.report(Link::Quiet, 11 * SECOND - BUSY_INTERVAL), None);
        assert_eq!(pulse.report(Link::Busy, 11 * SECOND), Some((Progress::default(), false)));
    }

    #[test]
    fn a_silent_publisher_is_asked_and_then_lost() {
        let mut pulse = pulse(0, 60);
        pulse.report(Link::Quiet, Duration::ZERO);
        assert_eq!(pulse.deadline(), Some(30 * SECOND));
        assert_eq!(pulse.report(Link::Quiet, 30 * SECOND), Some((Progress::default(), true)));
        assert_eq!(pulse.deadline(), Some(60 * SECOND));
        assert_eq!(pulse.report(Link::Quiet, 59 * SECOND), None, "once is enough");
        assert!(!pulse.is_lost(59 * SECOND) && pulse.is_lost(60 * SECOND));
        pulse.heard(false, 59 * SECOND);
        assert!(!pulse.is_lost(60 * SECOND));
        // Who was busy with something else for long asks first.
        assert_eq!(pulse.report(Link::Quiet, 200 * SECOND), Some((Progress::default(), true)));
        assert!(!pulse.is_lost(229 * SECOND) && pulse.is_lost(230 * SECOND));
        assert_eq!(pulse.deadline(), Some(230 * SECOND));
        let mut never = Pulse::new(Timing { status_interval: Duration::ZERO, timeout: Duration::ZERO });
        never.report(Link::Quiet, Duration::ZERO);
        assert_eq!((never.deadline(), never.is_lost(1000 * SECOND)), (None, false));
    }
}
