//! When the receiving side of a stream speaks although it has no news, and when the sending side counts as lost
//! (`WalReceiverMain`, `replication/walreceiver.c`; `LogicalRepApplyLoop`, `replication/logical/worker.c`; PostgreSQL 18).

use std::time::Duration;

/// How often (`wal_receiver_status_interval`, `wal_receiver_timeout`); zero: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timing {
    /// A report at least this often.
    pub status_interval: Duration,
    /// A sender that is silent for this long is lost; after half of it, it is asked for an answer.
    pub timeout: Duration,
}

/// Whether more is waiting to be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// Nothing at the moment.
    Quiet,
    /// More may be there.
    Busy,
}

/// What was said in a session, and when. Times are since any fixed moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pulse {
    /// The sender wants to hear from us.
    asked: bool,
    /// When it was asked for an answer that it has not given.
    pinged_at: Option<Duration>,
    heard_at: Duration,
    told_at: Duration,
}

impl Pulse {
    /// A session begins.
    pub fn begin(now: Duration) -> Pulse {
        Pulse { asked: false, pinged_at: None, heard_at: now, told_at: now }
    }

    /// Something has come; `asked`: an answer is wanted.
    pub fn heard(&mut self, asked: bool, now: Duration) {
        self.asked |= asked;
        self.heard_at = now;
        self.pinged_at = None;
    }

    /// A report is sent; `ping`: it asks for an answer.
    pub fn told(&mut self, ping: bool, now: Duration) {
        self.told_at = now;
        self.asked = false;
        if ping {
            self.pinged_at = Some(now);
        }
    }

    /// For how long nothing was sent.
    pub fn since_told(&self, now: Duration) -> Duration {
        now.saturating_sub(self.told_at)
    }

    /// Whether to send a report without news.
    pub fn is_due(&self, timing: Timing, now: Duration) -> bool {
        let interval = timing.status_interval;
        self.asked || !interval.is_zero() && self.since_told(now) >= interval || self.is_ping_due(timing, now)
    }

    /// Whether the report is to ask for an answer.
    pub fn is_ping_due(&self, timing: Timing, now: Duration) -> bool {
        let timeout = timing.timeout;
        !timeout.is_zero() && self.pinged_at.is_none() && now.saturating_sub(self.heard_at) >= timeout / 2
    }

    /// Whether the sender has been silent for too long, and has had half of that time to answer: that nobody listened, or
    /// asked, is no fault of its.
    pub fn is_lost(&self, timing: Timing, now: Duration) -> bool {
        !timing.timeout.is_zero() && self.pinged_at.is_some_and(|at| now >= self.lost_at(timing, at))
    }

    fn lost_at(&self, Timing { timeout, .. }: Timing, pinged_at: Duration) -> Duration {
        (self.heard_at + timeout).max(pinged_at + timeout / 2)
    }

    /// When to look again although nothing happens.
    pub fn deadline(&self, timing: Timing) -> Option<Duration> {
        let Timing { status_interval, timeout } = timing;
        let status = (!status_interval.is_zero()).then(|| self.told_at + status_interval);
        let silence = || self.pinged_at.map_or(self.heard_at + timeout / 2, |at| self.lost_at(timing, at));
        [status, (!timeout.is_zero()).then(silence)].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_is_asked_for_and_what_is_due_is_told() {
        let timing = Timing { status_interval: 10 * SECOND, timeout: 60 * SECOND };
        let mut pulse = Pulse::begin(Duration::ZERO);
        assert!(!pulse.is_due(timing, 9 * SECOND) && pulse.is_due(timing, 10 * SECOND));
        assert_eq!(pulse.deadline(timing), Some(10 * SECOND));
        pulse.heard(true, SECOND);
        assert!(pulse.is_due(timing, SECOND), "it has asked");
        pulse.told(false, SECOND);
        assert!(!pulse.is_due(timing, 10 * SECOND) && pulse.is_due(timing, 11 * SECOND));
    }

    #[test]
    fn a_silent_sender_is_asked_and_then_lost() {
        let timing = Timing { status_interval: Duration::ZERO, timeout: 60 * SECOND };
        let mut pulse = Pulse::begin(Duration::ZERO);
        assert_eq!(pulse.deadline(timing), Some(30 * SECOND));
        assert!(!pulse.is_ping_due(timing, 29 * SECOND) && pulse.is_ping_due(timing, 30 * SECOND));
        pulse.told(true, 30 * SECOND);
        assert!(!pulse.is_due(timing, 59 * SECOND), "once is enough");
        assert_eq!(pulse.deadline(timing), Some(60 * SECOND));
        assert!(!pulse.is_lost(timing, 59 * SECOND) && pulse.is_lost(timing, 60 * SECOND));
        pulse.heard(false, 59 * SECOND);
        assert!(!pulse.is_lost(timing, 60 * SECOND));
    }

    /// A disk was full for minutes, or a transaction waited: nothing was read meanwhile, and the first look came too late.
    #[test]
    fn who_was_busy_with_something_else_asks_first() {
        let timing = Timing { status_interval: Duration::ZERO, timeout: 60 * SECOND };
        let mut pulse = Pulse::begin(Duration::ZERO);
        assert!(!pulse.is_lost(timing, 200 * SECOND) && pulse.is_ping_due(timing, 200 * SECOND));
        pulse.told(true, 200 * SECOND);
        assert!(!pulse.is_lost(timing, 229 * SECOND) && pulse.is_lost(timing, 230 * SECOND));
        assert_eq!(pulse.deadline(timing), Some(230 * SECOND));
        let never = Timing { status_interval: Duration::ZERO, timeout: Duration::ZERO };
        assert_eq!((pulse.deadline(never), pulse.is_lost(never, 1000 * SECOND)), (None, false));
    }
}
