//! Prepared transactions (`access/transam/twophase.c`, PostgreSQL 18).
//!
//! Between restartpoints everything is in memory: a PREPARE adds, its COMMIT or ABORT takes away. A file in
//! `pg_twophase` is written and removed only by a restartpoint, and only for what was prepared before its redo position:
//! PostgreSQL replays the WAL from there, and finds a file for a PREPARE that it still has to replay to be an error.

use std::collections::BTreeMap;

use walrider_layout::{Lsn, TransactionId};

/// A transaction that is prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Its 64-bit id, which names the file (`TwoPhaseFilePath`).
    pub full_xid: u64,
    /// Its global identifier, without the terminating zero.
    pub gid: Vec<u8>,
    /// The newest of its ids, subtransactions' among them.
    pub newest: TransactionId,
    /// Where its state is.
    pub state: State,
}

/// Where the state of a prepared transaction is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// In a file, from before this replay or from a restartpoint (`ondisk`).
    OnDisk,
    /// In memory only.
    InMemory {
        /// One past the end of its PREPARE record (`prepare_end_lsn`).
        end: Lsn,
        /// The main data of the record, which with a checksum is the file.
        data: Box<[u8]>,
    },
}

/// The prepared transactions, by id. Their number is bounded by the primary's `max_prepared_transactions`, and what
/// each takes by the size of a WAL record.
#[derive(Debug, Default)]
pub(super) struct PreparedTransactions {
    by_xid: BTreeMap<TransactionId, Prepared>,
    /// Files of transactions that ended since the last restartpoint. Stock removes them at once; until the
    /// restartpoint a crash of ours leads back to where they were needed.
    stale_files: Vec<u64>,
}

impl PreparedTransactions {
    /// A file that was there at the beginning, of a transaction that is still prepared (`restoreTwoPhaseData`).
    pub(super) fn restore(&mut self, full_xid: u64, gid: Vec<u8>, newest: TransactionId) {
        self.by_xid.insert(full_xid as TransactionId, Prepared { full_xid, gid, newest, state: State::OnDisk });
    }

    /// A file that was there at the beginning but must not be, because its transaction has ended, or begins only later
    /// in the WAL (`ProcessTwoPhaseBuffer`).
    pub(super) fn discard_file(&mut self, full_xid: u64) {
        self.stale_files.push(full_xid);
    }

    /// `XLOG_XACT_PREPARE` (`PrepareRedoAdd`). Says whether it is news: after a crash in the middle of a restartpoint the
    /// file may already be there, and then the record is skipped altogether.
    pub(super) fn prepare(&mut self, full_xid: u64, gid: &[u8], newest: TransactionId, end: Lsn, data: &[u8]) -> bool {
        let xid = full_xid as TransactionId;
        if self.by_xid.get(&xid).is_some_and(|old| old.full_xid == full_xid && old.state == State::OnDisk) {
            return false;
        }
        let state = State::InMemory { end, data: data.into() };
        self.by_xid.insert(xid, Prepared { full_xid, gid: gid.to_vec(), newest, state });
        true
    }

    /// `XLOG_XACT_COMMIT_PREPARED`, `XLOG_XACT_ABORT_PREPARED` (`PrepareRedoRemove`). One that we do not know was
    /// prepared before the WAL began, and its file already removed.
    pub(super) fn finish(&mut self, xid: TransactionId) {
        if let Some(Prepared { full_xid, state: State::OnDisk, .. }) = self.by_xid.remove(&xid) {
            self.stale_files.push(full_xid);
        }
    }

    /// The files that must not be there any more, by 64-bit id.
    pub(super) fn take_stale_files(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.stale_files)
    }

    /// The transactions that a restartpoint with this redo position must write a file for (`CheckPointTwoPhase`).
    pub(super) fn without_file(&self, redo: Lsn) -> Vec<TransactionId> {
        let due = |prepared: &Prepared| matches!(prepared.state, State::InMemory { end, .. } if end <= redo);
        self.by_xid.iter().filter(|(_, prepared)| due(prepared)).map(|(&xid, _)| xid).collect()
    }

    /// The file of a transaction is written.
    pub(super) fn has_file(&mut self, xid: TransactionId) {
        if let Some(prepared) = self.by_xid.get_mut(&xid) {
            prepared.state = State::OnDisk;
        }
    }

    /// The transaction of this id.
    pub(super) fn get(&self, xid: TransactionId) -> Option<&Prepared> {
        self.by_xid.get(&xid)
    }

    /// All of them, by id.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Prepared> {
        self.by_xid.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: u64 = 3 << 32;

    fn on_disk(prepared: &PreparedTransactions, xid: TransactionId) -> bool {
        prepared.get(xid).unwrap().state == State::OnDisk
    }

    #[test]
    fn a_file_is_written_at_the_first_checkpoint_whose_redo_position_has_the_prepare_behind_it() {
        let mut prepared = PreparedTransactions::default();
        assert!(prepared.prepare(EPOCH | 100, b"a", 100, Lsn(1000), b"state a"));
        assert!(prepared.prepare(EPOCH | 101, b"b", 101, Lsn(2000), b"state b"));
        assert_eq!(prepared.without_file(Lsn(999)), [0; 0]);
        assert_eq!(prepared.without_file(Lsn(1000)), [100], "ends exactly at the redo position");
        prepared.has_file(100);
        assert!(on_disk(&prepared, 100) && !on_disk(&prepared, 101));
        assert_eq!(prepared.without_file(Lsn(1999)), [0; 0], "nothing is written twice");
    }

    #[test]
    fn finished_ones_leave_no_file() {
        let mut prepared = PreparedTransactions::default();
        prepared.prepare(EPOCH | 100, b"a", 100, Lsn(1000), b"");
        prepared.finish(100);
        assert_eq!(
            (prepared.take_stale_files(), prepared.without_file(Lsn(5000))),
            (vec![], vec![]),
            "it never had a file"
        );
        prepared.prepare(EPOCH | 101, b"b", 101, Lsn(1000), b"");
        assert_eq!(prepared.without_file(Lsn(5000)), [101]);
        prepared.has_file(101);
        prepared.finish(101);
        prepared.finish(102);
        assert_eq!((prepared.take_stale_files(), prepared.without_file(Lsn(6000))), (vec![EPOCH | 101], vec![]));
        assert_eq!((prepared.take_stale_files(), prepared.without_file(Lsn(7000))), (vec![], vec![]));
    }

    #[test]
    fn a_prepare_whose_file_survived_a_crash_is_skipped() {
        let mut prepared = PreparedTransactions::default();
        prepared.restore(EPOCH | 100, b"a".to_vec(), 100);
        assert!(!prepared.prepare(EPOCH | 100, b"a", 100, Lsn(1000), b"state"));
        assert!(on_disk(&prepared, 100));
        prepared.discard_file(EPOCH | 200);
        assert_eq!(prepared.take_stale_files(), [EPOCH | 200]);
    }
}
