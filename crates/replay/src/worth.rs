//! Whether WAL is worth being put apart, and how much of it: what the device is seen to do with pages decides.

use std::time::Duration;

use walrider_layout::BLCKSZ;

/// Bytes of pages visited for a byte of WAL, from which on to visit pages less often is worth putting WAL apart on any device.
const ENOUGH: f64 = 8.0;

/// Seconds of processor time for a byte of WAL that is put apart and taken back, on one thread.
const PROCESSOR: f64 = 6e-9;

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

/// What visits of pages have cost that do not fit into memory.
#[derive(Debug, Default)]
pub struct Visits {
    pages: f64,
    seconds: f64,
}

impl Visits {
    /// A batch visited so many pages in this time. The last ones count most.
    pub fn note(&mut self, pages: usize, took: Duration) {
        self.pages = self.pages / 2.0 + pages as f64;
        self.seconds = self.seconds / 2.0 + took.as_secs_f64();
    }

    /// Whether anything was noted.
    pub fn is_known(&self) -> bool {
        self.pages > 0.0
    }

    /// Bytes of pages visited for a byte of WAL, from which on to put WAL apart is worth it.
    pub fn least(&self, threads: usize) -> f64 {
        if !self.is_known() {
            return ENOUGH;
        }
        let visited = self.pages * BLCKSZ as f64;
        let least = PROCESSOR / threads as f64 * visited / self.seconds + DEVICE;
        least.min(ENOUGH)
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
    fn the_slower_a_visit_the_sooner_it_is_avoided() {
        let mut visits = Visits::default();
        assert_eq!(visits.least(2), ENOUGH);
        // 3,000 a second: to put a byte apart takes less than to visit one.
        visits.note(6000, Duration::from_secs(2));
        assert!((0.25..0.5).contains(&visits.least(2)), "{}", visits.least(2));
        // As quick as memory: it has to be visited again and again.
        for _ in 0..10 {
            visits.note(1_000_000, Duration::from_secs(2));
        }
        assert_eq!(visits.least(2), ENOUGH);
        // And slow again.
        for _ in 0..10 {
            visits.note(1000, Duration::from_secs(1));
        }
        assert!(visits.least(2) < 1.0, "{}", visits.least(2));
    }
}
