//! PostgreSQL's write-ahead log: bytes in, records out; the table of resource managers, and what each record says.
//!
//! This crate never touches a file, socket, clock or thread: the caller hands the bytes in.

pub mod crc;
pub mod decode;
pub mod describe;
pub mod encode;
pub mod image;
pub mod pglz;
pub mod record;
pub mod records;
pub mod rmgr;
pub mod stats;
pub mod strip;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
