//! How large requests should be: what a device is seen to do decides.
//!
//! A device allows so many requests a second, and so many bytes. Where requests are what is short, pages that nobody asked for
//! are read along with those between which they lie; where bytes are, they are not. Which it is, nobody tells; so sizes are
//! tried, next to the best one so far, and the one that brings the most pages a second stays.

use std::sync::Mutex;
use std::time::Duration;

use walrider_layout::BLCKSZ;

/// Sizes that are tried, in bytes. The first reads nothing that is not needed.
const SIZES: [usize; 8] = [BLCKSZ, 24 << 10, 48 << 10, 96 << 10, 192 << 10, 384 << 10, 768 << 10, 1 << 20];

/// Pages of which a size is judged.
const LEAST_PAGES: f64 = 2000.0;

/// By how much another size must be better: most devices do not care much, and reading less is always kind to others.
const BETTER: f64 = 1.1;

/// What requests should be like.
#[derive(Clone, Copy, Debug)]
pub struct RequestTarget {
    /// Bytes, on average.
    pub bytes: usize,
    size: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    pages: f64,
    seconds: f64,
}

impl Seen {
    fn rate(self) -> f64 {
        self.pages / self.seconds.max(1e-9)
    }
}

#[derive(Debug, Default)]
struct State {
    /// Of each size, since it was last looked at.
    seen: [Seen; SIZES.len()],
    best: usize,
    /// What is looked at.
    trial: usize,
    /// Whether the next one to look at is larger.
    up: bool,
}

/// The size that is best so far. Shared by all threads.
#[derive(Debug, Default)]
pub struct Gaps {
    state: Mutex<State>,
}

impl Gaps {
    /// What the next requests should be like.
    pub fn target(&self) -> RequestTarget {
        let state = self.state.lock().expect("no panic while locked");
        RequestTarget { bytes: SIZES[state.trial], size: state.trial }
    }

    /// The best size so far, in bytes.
    pub fn best(&self) -> usize {
        SIZES[self.state.lock().expect("no panic while locked").best]
    }

    /// So many pages were read, changed and written with requests like these, in this time.
    pub fn note(&self, target: RequestTarget, pages: usize, took: Duration) {
        let mut state = self.state.lock().expect("no panic while locked");
        let State { seen, best, trial, up } = &mut *state;
        if target.size != *trial {
            return;
        }
        seen[*trial].pages += pages as f64;
        seen[*trial].seconds += took.as_secs_f64();
        if seen[*trial].pages < LEAST_PAGES {
            return;
        }
        if trial == best {
            // Now one next to it.
            *up |= *best == 0;
            *up &= *best + 1 < SIZES.len();
            *trial = if *up { *best + 1 } else { *best - 1 };
        } else {
            let (rate, best_rate) = (seen[*trial].rate(), seen[*best].rate());
            let next = if *up { *trial + 1 } else { trial.wrapping_sub(1) };
            if rate > BETTER * best_rate {
                *best = *trial;
            } else if rate * BETTER > best_rate && next < SIZES.len() {
                // No worse: where pages lie farther apart than that, what is better is behind it.
                *trial = next;
            } else {
                (*up, *trial) = (!*up, *best);
            }
        }
        seen[*trial] = Seen::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `batches` of pages of which each is needed with one chance in `1 / density`, on a device of so many requests and bytes
    /// a second; returns the size that was chosen most of the time at the end.
    fn chosen(requests: f64, bytes: f64, density: f64) -> usize {
        let gaps = Gaps::default();
        let mut best = Vec::new();
        for _ in 0..400 {
            let target = gaps.target();
            let pages = 1000.0;
            // Between needed pages lie 1 / density others.
            let size = target.bytes as f64;
            let needed_bytes = if target.bytes == BLCKSZ { BLCKSZ as f64 } else { BLCKSZ as f64 / density };
            let per_request = if target.bytes == BLCKSZ { 1.0 } else { (size / needed_bytes).max(1.0) };
            let seconds = (pages / per_request / requests).max(pages * needed_bytes / bytes);
            gaps.note(target, pages as usize, Duration::from_secs_f64(seconds));
            best.push(gaps.best());
        }
        best[350]
    }

    #[test]
    fn what_is_short_decides() {
        // 3,000 requests and 125 MB a second, every fourth page: 32 kB for each.
        assert!(chosen(3000.0, 125e6, 0.25) > 32 << 10);
        // A local disk, where requests cost nothing.
        assert_eq!(chosen(1e6, 3e9, 0.25), BLCKSZ);
        // Every hundredth page: what lies between is not worth it.
        assert_eq!(chosen(3000.0, 125e6, 0.01), BLCKSZ);
    }
}
