//! `pg_commit_ts`: when each transaction committed, and where it came from (`access/transam/commit_ts.c`,
//! PostgreSQL 18).

use walrider_datadir::slru::Slru;
use walrider_layout::bytes::{put_u16, put_u64};
use walrider_layout::control::CheckPoint;
use walrider_layout::xid::precedes;
use walrider_layout::{BLCKSZ, TransactionId};

use super::GlobalError;
use super::pages::Pages;
use super::xid::page_precedes;

/// Bytes per transaction (`SizeOfCommitTimestampEntry`): eight of time, two of origin.
const ENTRY_SIZE: usize = 10;
/// Transactions per page (`COMMIT_TS_XACTS_PER_PAGE`); the last two bytes of a page stay unused.
pub const XACTS_PER_PAGE: u32 = (BLCKSZ / ENTRY_SIZE) as u32;
/// Highest page number that a transaction id leads to.
const LAST_PAGE: u64 = (u32::MAX / XACTS_PER_PAGE) as u64;

/// Page, and byte within it (`TransactionIdToCTsPage`, `TransactionIdToCTsEntry`).
#[inline]
fn place(xid: TransactionId) -> (u64, usize) {
    (u64::from(xid / XACTS_PER_PAGE), (xid % XACTS_PER_PAGE) as usize * ENTRY_SIZE)
}

/// The commit timestamps.
pub(super) struct CommitTs {
    pub(super) slru: Pages,
    /// Commits are recorded (`commitTsActive`): as the primary's `track_commit_timestamp`, whatever the standby's.
    active: bool,
    /// The transactions whose entries can be asked for, both inclusive (`oldestCommitTsXid`, `newestCommitTsXid`); 0 if
    /// there are none.
    pub(super) oldest: TransactionId,
    pub(super) newest: TransactionId,
}

impl CommitTs {
    /// `StartupCommitTs`, if the control file says that the primary tracked them.
    pub(super) fn start(slru: Slru, track: bool, checkpoint: &CheckPoint) -> Result<CommitTs, GlobalError> {
        let (oldest, newest) = (checkpoint.oldest_commit_ts_xid, checkpoint.newest_commit_ts_xid);
        let mut commit_ts = CommitTs { slru: Pages::new(slru), active: false, oldest, newest };
        commit_ts.set_active(track, checkpoint.next_xid as TransactionId)?;
        Ok(commit_ts)
    }

    /// Whether commits are recorded.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.active
    }

    /// `CommitTsParameterChange`. Going on makes the page of the next transaction if it is missing, since the primary
    /// logged nothing while it was off (`ActivateCommitTs`). Going off removes everything; `DeactivateCommitTs` removes
    /// the files only, so that buffers not yet written come back as files with entries that nobody can read
    /// (docs/formats.md). Rejected: to do the same, which would take stock's buffers and its choice of which to evict.
    pub(super) fn set_active(&mut self, track: bool, next_xid: TransactionId) -> Result<(), GlobalError> {
        match (self.active, track) {
            (false, true) => {
                let (page, _) = place(next_xid);
                if self.oldest == 0 {
                    (self.oldest, self.newest) = (next_xid, next_xid);
                }
                if !self.slru.exists(page)? {
                    self.slru.zero_page(page)?;
                }
            }
            (true, false) => {
                (self.oldest, self.newest) = (0, 0);
                self.slru.remove_segments(|_| true)?;
            }
            _ => {}
        }
        self.active = track;
        Ok(())
    }

    /// Records one commit, of a transaction or subtransaction (`TransactionIdSetCommitTs`).
    #[inline]
    pub(super) fn set(&mut self, xid: TransactionId, time: i64, origin: u16) -> Result<(), GlobalError> {
        let (page, at) = place(xid);
        let bytes = self.slru.page_mut(page)?;
        put_u64(bytes, at, time as u64);
        put_u16(bytes, at + 8, origin);
        if precedes(self.newest, xid) {
            self.newest = xid;
        }
        Ok(())
    }

    /// `COMMIT_TS_ZEROPAGE` (`commit_ts_redo`).
    pub(super) fn zero_page(&mut self, page: i64) -> Result<(), GlobalError> {
        self.slru.zero_page(super::page_number(page, LAST_PAGE)?)?;
        Ok(())
    }

    /// `COMMIT_TS_TRUNCATE` (`commit_ts_redo`, which makes `SimpleLruTruncate` believe any cutoff).
    pub(super) fn truncate(&mut self, cutoff: i64, oldest: TransactionId) -> Result<(), GlobalError> {
        if self.oldest != 0 && precedes(self.oldest, oldest) {
            self.oldest = oldest;
        }
        let cutoff = super::page_number(cutoff, LAST_PAGE)?;
        self.slru.truncate(cutoff, |page, cutoff| page_precedes(page, cutoff, XACTS_PER_PAGE))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit_ts(dir: &tempfile::TempDir, track: bool, next_xid: TransactionId) -> CommitTs {
        let checkpoint = CheckPoint { next_xid: next_xid.into(), ..CheckPoint::default() };
        CommitTs::start(Slru::new(dir.path(), 8), track, &checkpoint).unwrap()
    }

    #[test]
    fn entries_at_the_borders_of_pages_and_segments() {
        let dir = tempfile::tempdir().unwrap();
        let mut commit_ts = commit_ts(&dir, true, 700);
        for page in [1, 31, 32] {
            commit_ts.zero_page(page).unwrap();
        }
        commit_ts.set(818, 0x0102_0304_0506_0708, 0x0A0B).unwrap();
        commit_ts.set(819, -1, 0).unwrap();
        commit_ts.set(32 * 819, 5, 6).unwrap();
        commit_ts.slru.sync().unwrap();
        let first = std::fs::read(dir.path().join("0000")).unwrap();
        assert_eq!(first[8180..8192], [8, 7, 6, 5, 4, 3, 2, 1, 0x0B, 0x0A, 0, 0]);
        assert_eq!(first[8192..8203], [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0]);
        assert_eq!(std::fs::read(dir.path().join("0001")).unwrap()[..10], [5, 0, 0, 0, 0, 0, 0, 0, 6, 0]);
        commit_ts.set(u32::MAX, 1, 1).unwrap();
    }

    #[test]
    fn going_on_makes_the_current_page_and_going_off_removes_everything() {
        let dir = tempfile::tempdir().unwrap();
        let mut commit_ts = commit_ts(&dir, false, 100);
        assert!(!commit_ts.is_active());
        commit_ts.set_active(true, 33 * 819 + 5).unwrap();
        commit_ts.set(33 * 819 + 5, 9, 0).unwrap();
        commit_ts.set(33 * 819 + 7, 9, 0).unwrap();
        commit_ts.set(33 * 819 + 6, 9, 0).unwrap();
        assert_eq!((commit_ts.oldest, commit_ts.newest), (33 * 819 + 5, 33 * 819 + 7));
        commit_ts.truncate(33, 33 * 819 + 6).unwrap();
        assert_eq!(commit_ts.oldest, 33 * 819 + 6);
        commit_ts.slru.sync().unwrap();
        assert_eq!(dir.path().join("0001").metadata().unwrap().len(), 2 * BLCKSZ as u64);
        commit_ts.set_active(true, 90 * 819).unwrap();
        assert!(!commit_ts.slru.exists(90).unwrap(), "on already");
        commit_ts.set(33 * 819 + 6, 9, 0).unwrap();
        commit_ts.zero_page(34).unwrap();
        commit_ts.set(34 * 819, 9, 0).unwrap();
        commit_ts.set_active(false, 0).unwrap();
        assert_eq!((commit_ts.oldest, commit_ts.newest), (0, 0));
        commit_ts.set_active(true, 34 * 819).unwrap();
        commit_ts.slru.sync().unwrap();
        let file = std::fs::read(dir.path().join("0001")).unwrap();
        assert_eq!(file.len(), 3 * BLCKSZ);
        assert!(file.iter().all(|&byte| byte == 0), "what was recorded before is gone, written or not");
    }

    #[test]
    fn an_existing_page_is_not_cleared_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = commit_ts(&dir, true, 10);
        first.set(5, 42, 0).unwrap();
        first.slru.sync().unwrap();
        let mut again = commit_ts(&dir, true, 10);
        assert_eq!(again.slru.page(0).unwrap()[50], 42);
    }
}
