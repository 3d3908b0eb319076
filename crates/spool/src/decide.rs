//! What becomes of WAL as it comes: which of it goes into segments, which into the early log, and what it takes back. Decisions
//! only; [`crate::Writer`] carries them out, and the model of `tests/model` in the crate that receives runs them, too.

use walrider_layout::Lsn;

use crate::error::{Result, SpoolError};
use crate::tail::Tail;

/// What the early log has as a whole: all WAL from `covers_from` to `written`, durable up to `flushed`.
///
/// ```text
/// covers_from ≤ written, flushed ≤ written
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LogEnds {
    covers_from: Lsn,
    written: Lsn,
    flushed: Lsn,
}

impl LogEnds {
    /// What an earlier run has left, durably.
    pub fn recovered(tail: &Tail) -> LogEnds {
        LogEnds { covers_from: tail.start(), written: tail.end(), flushed: tail.end() }
    }

    /// Panics where the positions are not in order, in builds with assertions. Called wherever one moves.
    fn check(&self) {
        debug_assert!(self.covers_from <= self.written && self.flushed <= self.written, "{self:?}");
    }

    /// Where what it has ends.
    pub fn written(&self) -> Lsn {
        self.written
    }

    /// Whether all from `from` to `to` is in the log.
    pub fn covers(&self, from: Lsn, to: Lsn) -> bool {
        self.covers_from <= from && to <= self.written
    }

    /// Up to where all is durable, given that it is up to `flushed` in segments.
    pub fn held_durable(&self, flushed: Lsn) -> Lsn {
        if self.covers_from <= flushed { flushed.max(self.flushed) } else { flushed }
    }

    /// An entry of so many bytes is written; one without any takes back what follows `at`.
    pub fn appended(&mut self, at: Lsn, bytes: u64) {
        let LogEnds { covers_from, written, flushed } = *self;
        *self = match bytes {
            0 => LogEnds { covers_from: covers_from.min(at), written: written.min(at), flushed: flushed.min(at) },
            // What is past a gap is not durable, whatever was before it.
            _ if at != written => LogEnds { covers_from: at, written: Lsn(at.0 + bytes), flushed: flushed.min(at) },
            _ => LogEnds { written: Lsn(at.0 + bytes), ..*self },
        };
        self.check();
    }

    /// What was written up to there is durable.
    pub fn synced(&mut self, written: Lsn) {
        // What was taken back meanwhile is not.
        self.flushed = self.flushed.max(written).min(self.written);
        self.check();
    }
}

/// Where `len` bytes end that come at `at`, and are to follow what is held.
///
/// # Errors
/// [`SpoolError::Gap`], [`SpoolError::Overlap`]; bytes past the last LSN.
pub fn end_of(held: Lsn, at: Lsn, len: usize) -> Result<Lsn> {
    match () {
        () if at > held => Err(SpoolError::Gap { written: held, at }),
        () if at < held => Err(SpoolError::Overlap { written: held, at }),
        () => {
            at.0.checked_add(len as u64)
                .map(Lsn)
                .ok_or_else(|| SpoolError::Refused(format!("WAL of {len} bytes at {at} goes past the last LSN")))
        }
    }
}

/// From where on what is held from an earlier session is worth nothing, now that `bytes` have come at `at`: the primary has
/// something else there. That must be durable before anything takes its place.
pub fn taken_back(tail: &Tail, at: Lsn, bytes: &[u8], horizon: Lsn) -> Option<Lsn> {
    let difference = tail.difference(at, bytes);
    let before_tail = tail.start().min(Lsn(at.0 + bytes.len() as u64));
    if !tail.is_empty() && difference != Some(tail.start()) && at < before_tail && horizon < before_tail {
        // What was held began at an earlier horizon: it cannot be of this primary.
        return Some(Lsn::INVALID);
    }
    difference
}

/// Where the parts of WAL end that has come; `at ≤ before ≤ known ≤ settled ≤ end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Up to there it precedes what is held, and was flushed long ago: it goes into segments.
    pub before: Lsn,
    /// Up to there it is held already.
    pub known: Lsn,
    /// Up to there the primary has flushed it, and it goes into segments; the rest goes into the early log.
    pub settled: Lsn,
}

/// Which part of the WAL from `at` to `end` goes where; nothing of it contradicts the `tail` that is held ([`taken_back`]).
/// `flushed` is what is durable in segments.
pub fn parts(tail: &Tail, (at, end): (Lsn, Lsn), horizon: Lsn, log: &LogEnds, flushed: Lsn) -> Parts {
    let (before, known) = match tail.is_empty() {
        true => (at, at),
        false => (tail.start().clamp(at, end), tail.end().clamp(at, end)),
    };
    let settled = if must_log(log, flushed, known) { known } else { horizon.clamp(known, end) };
    debug_assert!(at <= before && before <= known && known <= settled && settled <= end);
    Parts { before, known, settled }
}

/// Whether WAL that comes at `at` goes into the log whatever the horizon: where what the log has before is not durable in
/// segments yet. The log has no gaps then, and nothing that was promised is past one.
fn must_log(log: &LogEnds, flushed: Lsn, at: Lsn) -> bool {
    flushed < at && log.written == at
}

/// Up to where what is held gets into segments, which have it up to `written`: as far as it came in this session and the primary
/// has flushed it.
pub fn settles(written: Lsn, held: Lsn, horizon: Lsn) -> Lsn {
    debug_assert!(written <= held);
    horizon.min(held).max(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(start: u64, bytes: &[u8]) -> Tail {
        let mut tail = Tail::default();
        tail.extend(Lsn(start), bytes);
        tail
    }

    fn split(tail: &Tail, (at, end): (u64, u64), horizon: u64, log: &LogEnds, flushed: u64) -> (u64, u64, u64) {
        let Parts { before, known, settled } = parts(tail, (Lsn(at), Lsn(end)), Lsn(horizon), log, Lsn(flushed));
        (before.0, known.0, settled.0)
    }

    #[test]
    fn wal_goes_into_segments_up_to_the_horizon() {
        let (none, log) = (Tail::default(), LogEnds::default());
        assert_eq!(split(&none, (10, 20), u64::MAX, &log, 10), (10, 10, 20));
        assert_eq!(split(&none, (10, 20), 15, &log, 10), (10, 10, 15));
        assert_eq!(split(&none, (10, 20), 5, &log, 10), (10, 10, 10));
        // The log has no gaps as long as it is needed.
        let mut log = LogEnds::default();
        log.appended(Lsn(5), 5);
        assert_eq!(split(&none, (10, 20), u64::MAX, &log, 9), (10, 10, 10));
        assert_eq!(split(&none, (10, 20), u64::MAX, &log, 10), (10, 10, 20));
        // Part of it is held already, from an earlier session.
        let tail = held(12, b"..");
        assert_eq!(split(&tail, (10, 20), 17, &log, 10), (12, 14, 17));
        assert_eq!(split(&tail, (10, 11), 17, &log, 10), (11, 11, 11));
        assert_eq!(split(&tail, (13, 14), 17, &log, 10), (13, 14, 14));
    }

    #[test]
    fn what_differs_is_taken_back() {
        let tail = held(10, b"abcd");
        assert_eq!(taken_back(&tail, Lsn(10), b"abcdef", Lsn(10)), None);
        assert_eq!(taken_back(&tail, Lsn(10), b"abX", Lsn(10)), Some(Lsn(12)));
        assert_eq!(taken_back(&tail, Lsn(8), b"..ab", Lsn(10)), None, "flushed long ago");
        assert_eq!(taken_back(&tail, Lsn(8), b"..ab", Lsn(9)), Some(Lsn::INVALID), "another primary");
        assert_eq!(taken_back(&Tail::default(), Lsn(8), b"..ab", Lsn(9)), None);
        assert!(matches!(end_of(Lsn(8), Lsn(9), 1), Err(SpoolError::Gap { .. })));
        assert!(matches!(end_of(Lsn(8), Lsn(7), 1), Err(SpoolError::Overlap { .. })));
        assert!(matches!(end_of(Lsn(u64::MAX), Lsn(u64::MAX), 1), Err(SpoolError::Refused(_))));
        assert_eq!(settles(Lsn(3), Lsn(9), Lsn(5)), Lsn(5));
        assert_eq!(settles(Lsn(3), Lsn(9), Lsn(1)), Lsn(3));
    }

    #[test]
    fn the_log_promises_what_it_has_without_gaps() {
        let mut log = LogEnds::default();
        log.appended(Lsn(10), 5);
        let written = log.written();
        log.appended(Lsn(15), 5);
        log.synced(written);
        assert_eq!((log.held_durable(Lsn(10)), log.held_durable(Lsn(9))), (Lsn(15), Lsn(9)));
        log.synced(Lsn(20));
        log.appended(Lsn(12), 0);
        assert_eq!(log.held_durable(Lsn(10)), Lsn(12), "taken back");
        log.synced(Lsn(20));
        assert_eq!(log.held_durable(Lsn(10)), Lsn(12), "before it was durable");
        log.appended(Lsn(30), 1);
        assert_eq!(log.held_durable(Lsn(12)), Lsn(12), "past a gap");
        assert!(log.covers(Lsn(30), Lsn(31)) && !log.covers(Lsn(12), Lsn(31)));
    }
}
