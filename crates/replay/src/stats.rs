//! Counters of a replay.

use std::time::Duration;

use walrider_datadir::timestamp::TimestampTz;
use walrider_layout::{Lsn, TimelineId};
use walrider_wal::record::Record;
use walrider_wal::records::xact;
use walrider_wal::rmgr::RmgrId;

use crate::partition::ImageDifference;
use crate::stages::Stages;

/// What a replay has done so far.
#[derive(Debug, Default)]
pub struct Stats {
    /// Records replayed.
    pub records: u64,
    /// Transactions committed, prepared ones included.
    pub transactions: u64,
    /// Transactions rolled back.
    pub aborts: u64,
    /// The directory is consistent where it stands.
    pub consistent: bool,
    /// The timeline that it stands on.
    pub timeline: TimelineId,
    /// Where the last record begins that says that the primary writes no full-page images any more, if one did.
    pub full_page_writes_off: Option<Lsn>,
    /// When the last of the transactions was committed, by the primary's clock.
    pub last_commit: Option<TimestampTz>,
    /// Pages read from relation files.
    pub pages_read: u64,
    /// Pages written at restartpoints.
    pub pages_written: u64,
    /// Pages taken out of memory to make room.
    pub pages_evicted: u64,
    /// While a batch that is larger than memory is put apart: how far that has got.
    pub spilled_to: Option<Lsn>,
    /// Most bytes of such a batch in its temporary file.
    pub spilled_bytes: u64,
    /// Of what was put apart for pages that pass, compressed bytes that were sorted, and written once more, for want of memory.
    pub sorted_bytes: u64,
    /// How many such batches there were.
    pub sweeps: u64,
    /// Bytes of requests, on average, that were best for their pages; 0 before the first.
    pub request_bytes: usize,
    /// How far the WAL was put apart when a restore's relations came.
    pub unpacked_at: Option<Lsn>,
    /// Bytes a second that the device took, where a restore had to know; 0: not tried.
    pub write_bytes_per_second: u64,
    /// Images that redo was compared with.
    pub images_verified: u64,
    /// How many of them differed.
    pub image_difference_count: u64,
    /// The first of them.
    pub image_differences: Vec<ImageDifference>,
    /// Restartpoints made.
    pub restartpoints: u64,
    /// Where the time goes.
    pub stages: Stages,
    /// Of applying, what the longest partition of each batch took: more threads than it leaves work for do not help.
    pub apply_longest: Duration,
}

impl Stats {
    /// Notes when a transaction was committed.
    pub fn note_commit(&mut self, record: &Record<'_>) {
        self.last_commit = self.last_commit.max(xact::commit_time(record).map(TimestampTz));
    }

    /// Counts a record that is replayed in order.
    pub fn count_global(&mut self, record: &Record<'_>) {
        if record.header.rmgr == RmgrId::XACT {
            match record.header.info & xact::XLOG_XACT_OPMASK {
                xact::XLOG_XACT_COMMIT | xact::XLOG_XACT_COMMIT_PREPARED => {
                    self.transactions += 1;
                    self.note_commit(record);
                }
                xact::XLOG_XACT_ABORT | xact::XLOG_XACT_ABORT_PREPARED => self.aborts += 1,
                _ => {}
            }
        }
    }
}
