//! What a spool has done, counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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
    pub fsyncs: AtomicU64,
    pub fsync_micros: AtomicU64,
    pub fsync_buckets: [AtomicU64; FSYNC_BUCKETS_MICROS.len() + 1],
    pub segments_created: AtomicU64,
    pub segments_recycled: AtomicU64,
    pub segments_removed: AtomicU64,
    pub segment_waits: AtomicU64,
    pub archive_status_failures: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counters {
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
            fsyncs: get(&self.fsyncs),
            fsync_micros: get(&self.fsync_micros),
            fsync_buckets: std::array::from_fn(|bucket| get(&self.fsync_buckets[bucket])),
            segments_created: get(&self.segments_created),
            segments_recycled: get(&self.segments_recycled),
            segments_removed: get(&self.segments_removed),
            segment_waits: get(&self.segment_waits),
            archive_status_failures: get(&self.archive_status_failures),
        }
    }
}
