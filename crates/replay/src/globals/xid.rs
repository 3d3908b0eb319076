//! Transaction ids that wrap around, and the 64-bit ones that do not (`access/transam/transam.c`,
//! `access/transam/varsup.c`, PostgreSQL 18).

use walrider_layout::TransactionId;
use walrider_layout::xid::{FIRST_NORMAL_XID, precedes};

/// Whether `a` is before `b` modulo 2^32, with no special values (`MultiXactIdPrecedes`, `MultiXactOffsetPrecedes`).
#[inline]
pub fn precedes_modulo(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Whether SLRU page `a` is older than page `b`, for truncation, where a page has `per_page` ids (`CLOGPagePrecedes`,
/// `CommitTsPagePrecedes`). The last id of `b` is compared too, because the page just half the id space away holds
/// ids on both sides.
pub fn page_precedes(a: u64, b: u64, per_page: u32) -> bool {
    // Clear of the special ids.
    let first = |page: u64| (page as u32).wrapping_mul(per_page).wrapping_add(FIRST_NORMAL_XID + 1);
    let (a, b) = (first(a), first(b));
    precedes(a, b) && precedes(a, b.wrapping_add(per_page - 1))
}

/// As [`page_precedes`], for ids that have no special values but may start at `first_id` (`MultiXactOffsetPagePrecedes`
/// with 2, `MultiXactMemberPagePrecedes` with 0).
pub fn page_precedes_modulo(a: u64, b: u64, per_page: u32, first_id: u32) -> bool {
    let first = |page: u64| (page as u32).wrapping_mul(per_page).wrapping_add(first_id);
    let (a, b) = (first(a), first(b));
    precedes_modulo(a, b) && precedes_modulo(a, b.wrapping_add(per_page - 1))
}

/// The next transaction id that the primary will hand out, epoch and all (`TransamVariables->nextXid`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NextXid(pub u64);

impl NextXid {
    /// The lower half (`XidFromFullTransactionId`).
    #[inline]
    pub fn xid(self) -> TransactionId {
        self.0 as TransactionId
    }

    /// Moves past `xid`, if it is not before already (`AdvanceNextFullTransactionIdPastXid`). WAL has 32-bit ids; the
    /// epoch follows from ids that are alive together never spanning more than half of them.
    #[inline]
    pub fn advance_past(&mut self, xid: TransactionId) {
        if !precedes(xid, self.xid()) {
            self.move_past(xid);
        }
    }

    #[cold]
    fn move_past(&mut self, xid: TransactionId) {
        let after = match xid.wrapping_add(1) {
            special if special < FIRST_NORMAL_XID => FIRST_NORMAL_XID,
            after => after,
        };
        let wrapped = u64::from(after < self.xid());
        self.0 = ((self.0 >> 32).wrapping_add(wrapped) << 32) | u64::from(after);
    }

    /// The 64-bit id of a transaction that began before (`FullTransactionIdFromAllowableAt`).
    pub fn full(self, xid: TransactionId) -> u64 {
        if xid < FIRST_NORMAL_XID {
            return xid.into();
        }
        let epoch = (self.0 >> 32) as u32;
        let epoch = if xid > self.xid() { epoch.wrapping_sub(1) } else { epoch };
        u64::from(epoch) << 32 | u64::from(xid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_ids_precede_ordinary_ones() {
        assert!(precedes(1, 3) && precedes(2, u32::MAX) && !precedes(u32::MAX, 2));
        assert!(precedes(u32::MAX, 3) && !precedes(3, u32::MAX));
    }

    #[test]
    fn next_xid_follows_records_and_wraps_into_the_next_epoch() {
        let mut next = NextXid(5 << 32 | 0xFFFF_FFF0);
        next.advance_past(0);
        next.advance_past(100);
        assert_eq!(next.0, 6 << 32 | 101, "100 is after 0xFFFFFFF0, in the next epoch");
        next.advance_past(0xFFFF_FFFE);
        assert_eq!(next.0, 6 << 32 | 101, "an old transaction moves nothing");
        let mut next = NextXid(5 << 32 | 0xFFFF_FFFE);
        next.advance_past(u32::MAX);
        assert_eq!(next.0, 6 << 32 | 3, "special ids are skipped");
        next.advance_past(2);
        assert_eq!(next.0, 6 << 32 | 3);
    }

    #[test]
    fn full_ids_of_the_epoch_before() {
        let next = NextXid(7 << 32 | 50);
        assert_eq!(next.full(49), 7 << 32 | 49);
        assert_eq!(next.full(0xFFFF_0000), 6 << 32 | 0xFFFF_0000);
        assert_eq!(next.full(1), 1);
        assert_eq!(NextXid(50).full(51), u64::from(u32::MAX) << 32 | 51, "nonsense in, no panic");
    }

    #[test]
    fn pages_half_the_id_space_away_are_kept() {
        let per_page = 32_768;
        assert!(page_precedes(0, 1, per_page) && !page_precedes(1, 0, per_page) && !page_precedes(1, 1, per_page));
        let half = (1u64 << 31) / u64::from(per_page);
        assert!(!page_precedes(1, 1 + half, per_page), "holds ids on both sides of the wrap point");
        assert!(page_precedes(2, 1 + half, per_page));
        let last = (1u64 << 32) / u64::from(per_page) - 1;
        assert!(page_precedes(last, 0, per_page) && !page_precedes(0, last, per_page));
    }
}
