//! How far a subscriber is, and when the publisher is told (`send_feedback`, `src/backend/replication/logical/worker.c`,
//! PostgreSQL 18), without a clock.

use std::time::Duration;

use walrider_layout::Lsn;
use walrider_wire::pulse::{Link, Pulse, Timing};

/// While data comes without end, news is told this often.
const BUSY_INTERVAL: Duration = Duration::from_millis(10);

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

/// What the publisher is told in one session. Times are since its beginning.
#[derive(Clone, Debug)]
pub struct Feedback {
    timing: Timing,
    pulse: Pulse,
    progress: Progress,
    told: Option<Progress>,
}

impl Feedback {
    /// Streaming begins; nothing was told yet.
    pub fn new(timing: Timing) -> Feedback {
        Feedback { timing, pulse: Pulse::default(), progress: Progress::default(), told: None }
    }

    /// Something has come; `asked`: an answer is wanted.
    pub fn heard(&mut self, asked: bool, now: Duration) {
        self.pulse.heard(asked, now);
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
        let may_wait = link == Link::Busy && self.pulse.since_told(now) < BUSY_INTERVAL;
        let news = self.told != Some(self.progress) && !may_wait;
        if !news && !self.pulse.is_due(self.timing, now) {
            return None;
        }
        let ping = self.pulse.is_ping_due(self.timing, now);
        self.pulse.told(ping, now);
        self.told = Some(self.progress);
        Some((self.progress, ping))
    }

    /// [`Pulse::is_lost`]
    pub fn is_lost(&self, now: Duration) -> bool {
        self.pulse.is_lost(self.timing, now)
    }

    /// [`Pulse::deadline`]
    pub fn deadline(&self) -> Option<Duration> {
        self.pulse.deadline(self.timing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn progress(written: u64, flushed: u64, applied: u64) -> Progress {
        Progress { written: Lsn(written), flushed: Lsn(flushed), applied: Lsn(applied) }
    }

    #[test]
    fn news_is_told_at_once_where_nothing_else_comes() {
        let mut feedback = Feedback::new(Timing { status_interval: 10 * SECOND, timeout: 60 * SECOND });
        assert_eq!(
            feedback.report(Link::Quiet, Duration::ZERO),
            Some((Progress::default(), false)),
            "that we are there"
        );
        assert_eq!(feedback.report(Link::Quiet, SECOND), None);
        feedback.confirm(progress(30, 20, 10));
        feedback.confirm(progress(30, 10, 0));
        assert_eq!(feedback.told(), Progress::default());
        assert_eq!(feedback.report(Link::Quiet, SECOND), Some((progress(30, 20, 10), false)));
        feedback.confirm(progress(40, 40, 40));
        assert_eq!(feedback.report(Link::Busy, SECOND + BUSY_INTERVAL / 2), None, "it was told a moment ago");
        assert!(feedback.report(Link::Busy, SECOND + BUSY_INTERVAL).is_some());
        assert_eq!(feedback.told(), progress(40, 40, 40));
    }

    #[test]
    fn without_news_it_speaks_where_that_is_due() {
        let mut feedback = Feedback::new(Timing { status_interval: 10 * SECOND, timeout: 60 * SECOND });
        feedback.report(Link::Quiet, Duration::ZERO);
        assert_eq!(feedback.report(Link::Busy, 9 * SECOND), None);
        assert_eq!(feedback.report(Link::Busy, 10 * SECOND), Some((Progress::default(), false)));
        assert_eq!(feedback.report(Link::Quiet, 30 * SECOND), Some((Progress::default(), true)), "nothing has come");
        assert!(feedback.is_lost(60 * SECOND));
    }
}
