//! Looks into data directories and WAL: compares two directories, hands out the records of some WAL.
//!
//! This crate never changes what it looks at, and never prints: how findings are told is the caller's affair.

pub mod compare;
pub mod wal;
