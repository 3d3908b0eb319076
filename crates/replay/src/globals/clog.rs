//! `pg_xact`: two bits of status per transaction (`access/transam/clog.c`, PostgreSQL 18).

use walrider_datadir::slru::Slru;
use walrider_layout::{BLCKSZ, TransactionId};

use super::GlobalError;
use super::pages::Pages;
use super::xid;

/// Transactions per page (`CLOG_XACTS_PER_PAGE`): four in a byte.
pub const XACTS_PER_PAGE: u32 = BLCKSZ as u32 * 4;
/// Highest page number that a transaction id leads to.
const LAST_PAGE: u64 = (u32::MAX / XACTS_PER_PAGE) as u64;

/// How a transaction ended (`XidStatus`). `TRANSACTION_STATUS_SUB_COMMITTED` never outlives the redo of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum XidStatus {
    /// `TRANSACTION_STATUS_COMMITTED`.
    Committed = 1,
    /// `TRANSACTION_STATUS_ABORTED`.
    Aborted = 2,
}

/// Page, byte within it, and shift within that (`TransactionIdToPage`, `TransactionIdToByte`, `TransactionIdToBIndex`).
#[inline]
fn place(xid: TransactionId) -> (u64, usize, u32) {
    (u64::from(xid / XACTS_PER_PAGE), (xid % XACTS_PER_PAGE / 4) as usize, xid % 4 * 2)
}

/// The commit log.
pub(super) struct Clog {
    pub(super) slru: Pages,
    /// What a truncation must not reach (`latest_page_number`).
    latest_page: u64,
}

impl Clog {
    /// `StartupCLOG`: changes no file.
    pub(super) fn start(slru: Slru, next_xid: TransactionId) -> Clog {
        Clog { slru: Pages::new(slru), latest_page: place(next_xid).0 }
    }

    /// Records how a transaction ended (`TransactionIdSetStatusBit`).
    #[inline]
    pub(super) fn set(&mut self, xid: TransactionId, status: XidStatus) -> Result<(), GlobalError> {
        let (page, byte, shift) = place(xid);
        let byte = &mut self.slru.page_mut(page)?[byte];
        *byte = *byte & !(3 << shift) | (status as u8) << shift;
        Ok(())
    }

    /// The two bits (`TransactionIdGetStatus`): 0 in progress, else as [`XidStatus`].
    pub(super) fn get(&mut self, xid: TransactionId) -> Result<u8, GlobalError> {
        let (page, byte, shift) = place(xid);
        Ok(self.slru.page(page)?[byte] >> shift & 3)
    }

    /// `CLOG_ZEROPAGE` (`clog_redo`).
    pub(super) fn zero_page(&mut self, page: i64) -> Result<(), GlobalError> {
        let page = super::page_number(page, LAST_PAGE)?;
        self.slru.zero_page(page)?;
        self.latest_page = page;
        Ok(())
    }

    /// `CLOG_TRUNCATE` (`clog_redo`, `SimpleLruTruncate`): removes the segments before the one with page `cutoff`.
    pub(super) fn truncate(&mut self, cutoff: i64) -> Result<(), GlobalError> {
        let cutoff = super::page_number(cutoff, LAST_PAGE)?;
        let precedes = |page, cutoff| xid::page_precedes(page, cutoff, XACTS_PER_PAGE);
        // As stock: a cutoff past the newest page cannot be meant.
        if !precedes(self.latest_page, cutoff) {
            self.slru.truncate(cutoff, precedes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clog(next_xid: TransactionId) -> (tempfile::TempDir, Clog) {
        let dir = tempfile::tempdir().unwrap();
        let clog = Clog::start(Slru::new(dir.path(), 8), next_xid);
        (dir, clog)
    }

    #[test]
    fn bits_at_the_borders_of_bytes_pages_and_segments() {
        let (dir, mut clog) = clog(3);
        for page in [0, 1, 31, 32] {
            clog.zero_page(page).unwrap();
        }
        let segment = 32 * XACTS_PER_PAGE;
        let xids = [3, 4, XACTS_PER_PAGE - 1, XACTS_PER_PAGE, segment - 1, segment];
        for (nth, &xid) in xids.iter().enumerate() {
            clog.set(xid, if nth % 2 == 0 { XidStatus::Committed } else { XidStatus::Aborted }).unwrap();
        }
        for (nth, &xid) in xids.iter().enumerate() {
            assert_eq!(clog.get(xid).unwrap(), 1 + nth as u8 % 2, "{xid}");
        }
        assert_eq!(clog.get(5).unwrap(), 0);
        clog.slru.sync().unwrap();
        let first = std::fs::read(dir.path().join("0000")).unwrap();
        assert_eq!(first.len(), 32 * BLCKSZ);
        assert_eq!(first[..2], [0b0100_0000, 0b0000_0010]);
        assert_eq!((first[BLCKSZ - 1], first[BLCKSZ], first[32 * BLCKSZ - 1]), (0b0100_0000, 0b10, 0b0100_0000));
        assert_eq!(std::fs::read(dir.path().join("0001")).unwrap()[0], 0b10);
    }

    #[test]
    fn a_status_is_replaced_not_mixed() {
        let (_dir, mut clog) = clog(3);
        clog.set(7, XidStatus::Aborted).unwrap();
        clog.set(7, XidStatus::Committed).unwrap();
        assert_eq!(clog.get(7).unwrap(), 1);
        assert_eq!((clog.get(6).unwrap(), clog.get(8).unwrap()), (0, 0));
    }

    #[test]
    fn truncation_goes_by_age_around_the_end_of_the_numbers() {
        let (dir, mut clog) = clog(100);
        // The newest transactions are of page 0 again; those of the last segment are older.
        for page in [0x1FFDF, 0x1FFFF, 0] {
            clog.zero_page(page).unwrap();
        }
        clog.slru.sync().unwrap();
        clog.truncate(0x1FFE1).unwrap();
        clog.slru.sync().unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["0000", "0FFF"]);
        clog.truncate(40).unwrap();
        clog.slru.sync().unwrap();
        assert!(dir.path().join("0000").exists(), "the newest page is not past the cutoff: that cannot be meant");
    }

    #[test]
    fn impossible_pages_are_refused() {
        let (_dir, mut clog) = clog(3);
        for page in [-1, i64::MIN, 0x20000, i64::MAX] {
            assert!(matches!(clog.zero_page(page), Err(GlobalError::PageNumber(_))), "{page}");
            assert!(matches!(clog.truncate(page), Err(GlobalError::PageNumber(_))), "{page}");
        }
        clog.set(u32::MAX, XidStatus::Committed).unwrap();
    }
}
