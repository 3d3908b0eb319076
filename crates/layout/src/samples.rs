//! Where a primary was when: how old a position is, and how much WAL is written. Times are in seconds, of any one clock.

use std::collections::VecDeque;

use crate::Lsn;

/// Moments that are remembered of a primary: at one a second an hour, at the two that [`PositionSamples::grow`] notes half of that, then coarser.
const MAX_POINTS: usize = 3600;
/// A clock that goes back by more seconds was set.
const CLOCK_STEP: f64 = 1.0;
/// When the position before was last that, in seconds before it grew.
const JUST_BEFORE: f64 = 1e-3;

/// When the primary had flushed how much.
#[derive(Clone, Debug, Default)]
pub struct PositionSamples {
    points: VecDeque<(f64, u64)>,
}

impl PositionSamples {
    /// At `time`, the primary had flushed up to `flushed`.
    pub fn note(&mut self, time: f64, flushed: Lsn) {
        match self.points.back() {
            // Another server by the same name, or the same after it lost something: what was known is of no use.
            Some(&(_, last)) if flushed.0 < last => self.points.clear(),
            // The clock here was set back: ages would be told as less than they are until it is where it was.
            Some(&(last, _)) if time < last - CLOCK_STEP => self.points.clear(),
            Some(&(last, _)) if time <= last => return,
            _ => {}
        }
        self.points.push_back((time, flushed.0));
        if self.points.len() > MAX_POINTS {
            // Every other one of the older half.
            let mut nth = 0;
            self.points.retain(|_| {
                nth += 1;
                nth > MAX_POINTS / 2 || nth % 2 == 1
            });
        }
    }

    /// At `time`, the primary told that it had flushed up to `flushed`; until then it was `before`, if anything, as far as anybody knows.
    pub fn grow(&mut self, time: f64, before: Lsn, flushed: Lsn) {
        if before.is_valid() {
            self.note(time - JUST_BEFORE, before);
        }
        self.note(time, flushed);
    }

    /// The last that was noted.
    pub fn newest(&self) -> Option<(f64, Lsn)> {
        self.points.back().map(|&(time, lsn)| (time, Lsn(lsn)))
    }

    /// How old a position is at `time`, in seconds, and whether it is older than what is known, so that this is the least.
    pub fn age(&self, position: Lsn, time: f64) -> Option<(f64, bool)> {
        let &(last_time, last) = self.points.back()?;
        if position.0 >= last {
            return Some((0.0, false));
        }
        let next = self.points.partition_point(|&(_, lsn)| lsn <= position.0);
        debug_assert!(next < self.points.len());
        let at = match next.checked_sub(1) {
            None => self.points[0].0,
            Some(before) => {
                // It grew evenly in between, as far as anybody knows.
                let ((from, low), (to, high)) = (self.points[before], self.points[next]);
                from + (to - from) * (position.0 - low) as f64 / (high - low) as f64
            }
        };
        Some(((time.max(last_time) - at).max(0.0), next == 0))
    }

    /// Bytes a second, over the last `seconds`, or since the point before the last if that is longer.
    pub fn rate(&self, seconds: f64) -> Option<f64> {
        let &(to, high) = self.points.back()?;
        let before = || self.points.iter().rev().skip(1);
        let &(from, low) =
            before().take_while(|(time, _)| to - time <= seconds + 0.5).last().or_else(|| before().next())?;
        (to > from).then(|| (high - low) as f64 / (to - from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(points: &[(f64, u64)]) -> PositionSamples {
        let mut samples = PositionSamples::default();
        points.iter().for_each(|&(time, lsn)| samples.note(time, Lsn(lsn)));
        samples
    }

    /// Found by a review: with `--interval 10s` no rate was ever known, and so nothing that never catches up.
    #[test]
    fn looks_that_are_far_apart_have_a_rate() {
        assert_eq!(samples(&[(0.0, 0), (10.0, 1000)]).rate(5.0), Some(100.0));
        assert_eq!(samples(&[(0.0, 0), (10.0, 1000), (11.0, 1000), (12.0, 2000)]).rate(5.0), Some(500.0));
        assert_eq!(samples(&[(0.0, 0)]).rate(5.0), None);
    }

    /// Found by a review: the first commit after a quiet night was as old as the night.
    #[test]
    fn what_is_told_after_a_pause_is_young() {
        let mut samples = PositionSamples::default();
        samples.grow(0.0, Lsn(0), Lsn(1000));
        samples.grow(100.0, Lsn(1000), Lsn(2000));
        let (age, least) = samples.age(Lsn(1000), 103.0).unwrap();
        assert!((3.0..3.1).contains(&age) && !least, "{age}");
    }

    /// Found by a review: until a clock that was set back was where it had been, all was young.
    #[test]
    fn a_clock_that_is_set_back() {
        let mut samples = samples(&[(3600.0, 1000), (3601.0, 2000)]);
        samples.note(0.0, Lsn(3000));
        samples.note(5.0, Lsn(4000));
        assert_eq!(samples.age(Lsn(2000), 5.0), Some((5.0, true)));
        assert_eq!(samples.age(Lsn(3500), 5.0), Some((2.5, false)));
    }
}
