//! The order of transaction ids, which wrap around (`access/transam/transam.c`, PostgreSQL 18).

use crate::TransactionId;

/// The smallest id of an ordinary transaction (`FirstNormalTransactionId`); smaller ones are special.
pub const FIRST_NORMAL_XID: TransactionId = 3;

/// Whether `a` is logically before `b` (`TransactionIdPrecedes`): modulo 2^32, except that special ids are before all
/// ordinary ones.
#[inline]
pub fn precedes(a: TransactionId, b: TransactionId) -> bool {
    if a < FIRST_NORMAL_XID || b < FIRST_NORMAL_XID { a < b } else { (a.wrapping_sub(b) as i32) < 0 }
}
