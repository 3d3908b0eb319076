//! What workers count.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::conflict::Kind;

/// Read by the status while workers add to it.
#[derive(Debug, Default)]
pub struct Counters {
    /// Transactions of the publisher that were applied.
    pub transactions: AtomicU64,
    /// Their changes.
    pub changes: AtomicU64,
    /// Transactions of the target.
    pub batches: AtomicU64,
    /// How often one was rolled back to be executed again.
    pub retries: AtomicU64,
    /// Conflicts, by [`Kind`].
    pub conflicts: [AtomicU64; Kind::ALL.len()],
    /// Where the last transaction ends that was applied.
    pub applied: AtomicU64,
    /// When that was committed on the publisher, in microseconds since 2000-01-01.
    pub applied_time: AtomicI64,
    /// Bytes of changes written to files.
    pub spilled_bytes: AtomicU64,
    /// How often a batch was told to give way to an older one.
    pub gave_way: AtomicU64,
}

impl Counters {
    /// Adds to one.
    pub fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// Reads one.
    pub fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}
