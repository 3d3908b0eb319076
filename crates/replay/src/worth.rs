//! Whether WAL is worth being put apart, and how much of it: what the device is seen to do with pages decides.

use std::time::Duration;

use walrider_layout::BLCKSZ;

/// Bytes of pages visited for a byte of WAL, from which on to visit pages less often is worth putting WAL apart on any device.
const ENOUGH: f64 = 8.0;

/// Seconds of processor time for a byte of WAL that is put apart and taken back, on one thread.
const PROCESSOR: f64 = 2e-9;

/// Of a cache, the part that may be filled before anything has to be written: a quarter of what the system allows
/// (`vm.dirty_background_ratio`, 10 % by default), as other things are written as well.
const TAKEN: u64 = 40;

/// Bytes of pages that are made durable at most to see what visits cost: the system cannot take much more without writing, which is seen as well.
const MOST_DURABLE: u64 = 256 << 20;

/// Seconds of visits that say what they cost, and that are remembered: in less time, a moment in which something else has the processor or the
/// device counts too much.
const KNOWN_SECONDS: f64 = 0.1;
const REMEMBERED_SECONDS: f64 = 0.5;

/// Of the time that the device takes for a byte of a page, what it takes to write and read one of WAL that is put apart: it goes there in order and
/// compressed, which is at least four times as quick each way.
const DEVICE: f64 = 0.25;

/// Bytes a second that few devices take more than: to ask how many it takes is not worth it before.
pub const QUICKEST: u64 = 2 << 30;

/// Whether so much WAL was put apart for relations that fit into memory that they had better come: it took as long as it would take to
/// write them once more, at so many bytes a second, which is what the rest costs if that is replayed in memory. To take back what is
/// put apart takes time as well, but where a device is slow, it is what that waits for.
pub fn is_enough_apart(took: Duration, relation_bytes: u64, bytes_per_second: u64) -> bool {
    took.as_secs_f64() * bytes_per_second as f64 > relation_bytes as f64
}

/// Bytes of pages visited for a byte of WAL, from which on to put WAL apart is worth it, where so many bytes of pages are visited in a second.
fn least(bytes_per_second: f64, threads: usize) -> f64 {
    (PROCESSOR / threads as f64 * bytes_per_second + DEVICE).min(ENOUGH)
}

/// Bytes of pages that WAL changes which is put apart round by round, and of that WAL: of all rounds, and of the last ones.
#[derive(Debug, Default)]
pub struct Changed {
    ever: [f64; 2],
    lately: [f64; 2],
}

impl Changed {
    /// A round changed pages of so many bytes by so much WAL.
    pub fn note(&mut self, page_bytes: u64, wal_bytes: u64) {
        for (at, bytes) in [page_bytes as f64, wal_bytes as f64].into_iter().enumerate() {
            self.ever[at] += bytes;
            self.lately[at] = self.lately[at] / 2.0 + bytes;
        }
    }

    /// Whether they are so few, ever and lately, that to visit them again and again, to read and to write them, costs less than to put the WAL
    /// apart, on a device that takes so many bytes a second.
    pub fn is_seldom(&self, bytes_per_second: u64, threads: usize) -> bool {
        let least = least(bytes_per_second as f64 / 2.0, threads);
        [self.ever, self.lately].iter().all(|[pages, wal]| *pages <= least * wal)
    }
}

/// What visits of pages have cost that do not fit into memory.
#[derive(Debug, Default)]
pub struct Visits {
    pages: f64,
    seconds: f64,
    taken_bytes: u64,
}

impl Visits {
    /// None yet; the system's cache may take so many bytes.
    pub fn new(cache_bytes: u64) -> Visits {
        Visits { taken_bytes: cache_bytes / TAKEN, ..Visits::default() }
    }

    /// Whether enough was noted; what is remembered never becomes less than that again.
    fn is_known(&self) -> bool {
        self.seconds >= KNOWN_SECONDS
    }

    /// Whether those of so many pages must become durable before their time counts: until it is known what visits cost, what the system has
    /// taken and not written says nothing of the device, unless it would take as much again and again.
    pub fn must_be_durable(&self, pages: usize) -> bool {
        let bytes = |pages: usize| (pages * BLCKSZ) as u64;
        !self.is_known() && bytes(self.pages as usize + pages) > self.taken_bytes && bytes(pages) <= MOST_DURABLE
    }

    /// A batch visited so many pages in this time. The last ones count most.
    pub fn note(&mut self, pages: usize, took: Duration) {
        let before = if self.seconds > REMEMBERED_SECONDS { 0.5 } else { 1.0 };
        self.pages = self.pages * before + pages as f64;
        self.seconds = self.seconds * before + took.as_secs_f64();
    }

    /// Bytes of pages visited for a byte of WAL, from which on to put WAL apart is worth it.
    pub fn least(&self, threads: usize) -> f64 {
        if !self.is_known() {
            return ENOUGH;
        }
        least(self.pages * BLCKSZ as f64 / self.seconds, threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quicker_a_device_the_sooner_relations_come() {
        let second = Duration::from_secs(1);
        assert!(!is_enough_apart(second, 650 << 20, 125 << 20));
        assert!(is_enough_apart(second, 650 << 20, 1 << 30));
        // Nothing is known of the device.
        assert!(!is_enough_apart(second, 650 << 20, 0));
    }

    #[test]
    fn relations_that_do_not_fit_come_where_visits_cost_little() {
        let mb = 1 << 20;
        let after = |rounds: &[u64]| {
            let mut changed = Changed::default();
            rounds.iter().for_each(|&bytes| changed.note(bytes * mb, 16 * mb));
            changed
        };
        // An image is a page for as much WAL: it is written twice, where the device is quick.
        assert!(after(&[16; 8]).is_seldom(QUICKEST, 2));
        assert!(!after(&[16; 8]).is_seldom(125 * mb, 2));
        // Updates at random, which leave images at first.
        assert!(!after(&[400; 8]).is_seldom(QUICKEST, 2));
        assert!(!after(&[16, 16, 16, 16, 16, 16, 16, 400]).is_seldom(QUICKEST, 2));
        // And once more, after a checkpoint.
        assert!(!after(&[16, 400, 400, 400, 400, 16, 16, 16]).is_seldom(QUICKEST, 2));
    }

    #[test]
    fn visits_are_made_durable_where_the_cache_does_not_take_them() {
        let mut visits = Visits::new(400 << 20);
        assert!(!visits.must_be_durable(1280) && visits.must_be_durable(1281));
        visits.note(1000, Duration::from_millis(1));
        assert!(visits.must_be_durable(281) && !visits.must_be_durable(1_000_000));
        visits.note(4000, Duration::from_millis(100));
        assert!(!visits.must_be_durable(100_000));
    }

    #[test]
    fn the_slower_a_visit_the_sooner_it_is_avoided() {
        let mut visits = Visits::default();
        assert_eq!(visits.least(2), ENOUGH);
        // A few say nothing.
        visits.note(100, Duration::from_millis(1));
        assert_eq!(visits.least(2), ENOUGH);
        // 3,000 a second: to put a byte apart takes less than to visit one.
        visits.note(6000, Duration::from_secs(2));
        assert!((0.25..0.5).contains(&visits.least(2)), "{}", visits.least(2));
        // As quick as memory: it has to be visited again and again.
        for _ in 0..10 {
            visits.note(1_000_000, Duration::from_secs(2));
        }
        assert!(visits.least(2) > 4.0, "{}", visits.least(2));
        // And slow again.
        for _ in 0..10 {
            visits.note(1000, Duration::from_secs(1));
        }
        assert!(visits.least(2) < 1.0, "{}", visits.least(2));
    }
}
