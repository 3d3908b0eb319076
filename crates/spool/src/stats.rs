//! What a spool has done, counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Upper bounds, inclusive, of the buckets of [`SpoolStats::fsync_buckets`], in microseconds; the last bucket has none.
pub const FSYNC_BUCKETS_MICROS: [u64; 14] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000];

/// What a spool has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpoolStats {
    /// Bytes of WAL written.
    pub bytes_written: u64,
    /// Calls of `pwrite` for them.
    pub writes: u64,
    /// Bytes of WAL written to the early log before that.
    pub early_bytes: u64,
    /// Calls of `pwrite` for them.
    pub early_writes: u64,
    /// Time in all of these calls, in microseconds.
    pub write_micros: u64,
    /// Calls of `fdatasync` for both.
    pub fsyncs: u64,
    /// Time in these, in microseconds.
    pub fsync_micros: u64,
    /// How many took how long: a count for each of [`FSYNC_BUCKETS_MICROS`], and one for longer.
    pub fsync_buckets: [u64; FSYNC_BUCKETS_MICROS.len() + 1],
    /// Segments filled with zeros ahead of their use.
    pub segments_created: u64,
    /// Segments renamed to future ones.
    pub segments_recycled: u64,
    /// Segments removed.
    pub segments_removed: u64,
    /// How often the writer had to wait for its next segment.
    pub segment_waits: u64,
    /// How long, in microseconds, with a wait that is not over: until that, or one before, was durable.
    pub segment_wait_micros: u64,
    /// Marks in `archive_status` that could not be made. As in PostgreSQL the segment is then archived once more after a
    /// promotion, or marked when it is about to be removed.
    pub archive_status_failures: u64,
}

/// [`SpoolStats`] as they are counted.
#[derive(Default)]
pub(crate) struct Counters {
    pub bytes_written: AtomicU64,
    pub writes: AtomicU64,
    pub early_bytes: AtomicU64,
    pub early_writes: AtomicU64,
    pub write_micros: AtomicU64,
    pub fsyncs: AtomicU64,
    pub fsync_micros: AtomicU64,
    pub fsync_buckets: [AtomicU64; FSYNC_BUCKETS_MICROS.len() + 1],
    pub segments_created: AtomicU64,
    pub segments_recycled: AtomicU64,
    pub segments_removed: AtomicU64,
    pub segment_waits: AtomicU64,
    pub segment_wait: Mutex<Wait>,
    pub archive_status_failures: AtomicU64,
}

/// A wait that happens again and again, and may take long.
#[derive(Default)]
pub(crate) struct Wait {
    over: Duration,
    since: Option<Instant>,
}

impl Wait {
    /// How long it was and is waited.
    fn so_far(&self) -> Duration {
        self.over + self.since.map(|since| since.elapsed()).unwrap_or_default()
    }

    /// Waiting begins, if it has not yet.
    pub fn begin(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// It is over, if it had begun.
    pub fn end(&mut self) {
        self.over = self.so_far();
        self.since = None;
    }
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Adds the time since then, in microseconds.
pub(crate) fn count_time(counter: &AtomicU64, since: Instant) {
    count(counter, u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX));
}

impl Counters {
    /// Waiting for segments.
    pub fn segment_wait(&self) -> MutexGuard<'_, Wait> {
        self.segment_wait.lock().expect("no panic while locked")
    }

    /// Counts an `fdatasync` that took so long.
    pub fn fsync(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        count(&self.fsyncs, 1);
        count(&self.fsync_micros, micros);
        count(&self.fsync_buckets[FSYNC_BUCKETS_MICROS.partition_point(|&bound| bound < micros)], 1);
    }

    /// The counts now; each by itself, not at one instant.
    pub fn snapshot(&self) -> SpoolStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SpoolStats {
            bytes_written: get(&self.bytes_written),
            writes: get(&self.writes),
            early_bytes: get(&self.early_bytes),
            early_writes: get(&self.early_writes),
            write_micros: get(&self.write_micros),
            fsyncs: get(&self.fsyncs),
            fsync_micros: get(&self.fsync_micros),
            fsync_buckets: std::array::from_fn(|bucket| get(&self.fsync_buckets[bucket])),
            segments_created: get(&self.segments_created),
            segments_recycled: get(&self.segments_recycled),
            segments_removed: get(&self.segments_removed),
            segment_waits: get(&self.segment_waits),
            segment_wait_micros: u64::try_from(self.segment_wait().so_far().as_micros()).unwrap_or(u64::MAX),
            archive_status_failures: get(&self.archive_status_failures),
        }
    }
}
