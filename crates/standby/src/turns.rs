//! When the directory of a standby that is read changes hands: PostgreSQL has it while it keeps up, Walrider's replay while it does
//! not. Decides only; nothing here waits, reads a clock, or knows a server.

use std::time::Duration;

/// PostgreSQL keeps the directory at least so many times [`Limits::patience`], and longer each time that this was too short.
const FIRST_STAY: u32 = 6;
/// And no longer than this for that reason alone.
const LONGEST_STAY: Duration = Duration::from_secs(3600);
/// How long Walrider keeps the directory after a server that ended by itself, or did not start, the first time and at most.
const PAUSES: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// How far behind who has the directory may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// PostgreSQL gets the directory when replay is at most so many bytes of WAL behind.
    pub within: u64,
    /// Walrider gets it back when PostgreSQL's replay is more than so many bytes behind,
    pub beyond: u64,
    /// for so long.
    pub patience: Duration,
}

/// Whose turn it is, and what came of those before. Times are since any beginning.
#[derive(Debug)]
pub struct Turns {
    limits: Limits,
    /// When PostgreSQL's present turn, or its last one, began.
    since: Duration,
    /// Since when it is too far behind.
    far_since: Option<Duration>,
    /// How many times as long as the shortest its turn lasts at least.
    factor: u32,
    /// When it may have the next one.
    not_before: Duration,
    pause: Duration,
    /// How often it has had one.
    count: u64,
}

impl Turns {
    /// Walrider's turn, the first.
    pub fn new(limits: Limits) -> Turns {
        Turns {
            limits,
            since: Duration::ZERO,
            far_since: None,
            factor: 1,
            not_before: Duration::ZERO,
            pause: PAUSES.0,
            count: 0,
        }
    }

    /// Other limits.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    fn stay(&self) -> Duration {
        let first = self.limits.patience.saturating_mul(FIRST_STAY);
        first.saturating_mul(self.factor).min(LONGEST_STAY.max(first))
    }

    /// How often PostgreSQL has had the directory.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether PostgreSQL may have a turn at all.
    pub fn may_lend(&self, now: Duration) -> bool {
        now >= self.not_before
    }

    /// PostgreSQL's turn begins.
    pub fn lend(&mut self, now: Duration) {
        debug_assert!(now >= self.not_before, "a turn at {now:?} before {:?}", self.not_before);
        (self.since, self.far_since) = (now, None);
        self.count += 1;
    }

    /// It answers: from now on counts what its turn has to last. It has been busy with what Walrider had replayed already.
    pub fn answers(&mut self, now: Duration) {
        self.since = now;
    }

    /// Whether it is Walrider's turn now. `behind`: bytes of WAL that PostgreSQL could replay and has not; `None` where they are
    /// not known, or something other than replay's speed holds it.
    pub fn is_far(&mut self, behind: Option<u64>, now: Duration) -> bool {
        let far = behind.is_some_and(|behind| behind > self.limits.beyond);
        self.far_since = if far { self.far_since.or(Some(now)) } else { None };
        let long = self.far_since.is_some_and(|since| now - since >= self.limits.patience);
        long && now - self.since >= self.stay()
    }

    /// PostgreSQL's turn ends since it fell behind. Where that was soon, the next turn is longer: at a load that it cannot
    /// follow, the directory would be moved back and forth without end.
    pub fn fell_behind(&mut self, now: Duration) {
        let soon = now - self.since < self.stay().saturating_mul(2);
        self.factor = if soon { self.factor.saturating_mul(2) } else { 1 };
    }

    /// PostgreSQL's turn has ended by itself, or could not begin.
    pub fn failed(&mut self, now: Duration) {
        let (shortest, longest) = PAUSES;
        self.not_before = now + self.pause;
        self.pause = if now - self.since < longest { (2 * self.pause).min(longest) } else { shortest };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { within: 10, beyond: 100, patience: Duration::from_secs(10) };

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn lent() -> Turns {
        let mut turns = Turns::new(LIMITS);
        turns.lend(s(1));
        turns.answers(s(5));
        turns
    }

    #[test]
    fn it_comes_back_when_postgres_has_been_far_for_long() {
        let mut turns = lent();
        for (behind, at, back) in [
            (Some(1000), 10, false),
            // Before that it may well need as long as this to be where Walrider was.
            (Some(1000), 64, false),
            (Some(1000), 65, true),
            (Some(100), 70, false),
            (Some(101), 80, false),
            (Some(101), 89, false),
            (None, 90, false),
            (Some(101), 91, false),
            (Some(101), 101, true),
        ] {
            assert_eq!(turns.is_far(behind, s(at)), back, "{behind:?} at {at}");
        }
        assert_eq!(turns.count(), 1);
    }

    #[test]
    fn any_patience_can_be_had() {
        let mut turns = Turns::new(Limits { patience: Duration::MAX, ..LIMITS });
        turns.lend(s(0));
        assert!(!turns.is_far(Some(1000), s(1)));
        turns.fell_behind(s(2));
    }

    /// A load that PostgreSQL cannot follow.
    #[test]
    fn turns_become_longer_and_shorter_again() {
        let mut turns = Turns::new(LIMITS);
        let mut now = s(0);
        for stay in [60, 120, 240, 480, 960, 1920, 3600, 3600] {
            turns.lend(now);
            turns.is_far(Some(1000), now);
            assert!(!turns.is_far(Some(1000), now + s(stay - 1)), "{stay}");
            now += s(stay);
            assert!(turns.is_far(Some(1000), now), "{stay}");
            turns.fell_behind(now);
        }
        turns.lend(now);
        now += s(7200);
        turns.fell_behind(now);
        turns.lend(now);
        turns.is_far(Some(1000), now);
        assert!(turns.is_far(Some(1000), now + s(60)));
    }

    #[test]
    fn a_server_that_fails_gets_it_ever_less_often() {
        let mut turns = Turns::new(LIMITS);
        let mut now = s(0);
        for pause in [10, 20, 40, 80, 160, 320, 600, 600] {
            assert!(turns.may_lend(now));
            turns.lend(now);
            turns.failed(now);
            assert!(!turns.may_lend(now + s(pause - 1)), "{pause}");
            now += s(pause);
        }
        turns.lend(now);
        now += s(600);
        turns.failed(now);
        now += s(600);
        turns.lend(now);
        turns.failed(now);
        assert!(turns.may_lend(now + s(10)));
    }
}
