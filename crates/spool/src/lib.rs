//! WAL as it arrives: segments in a directory, written by one thread, made durable by another, and recycled, named
//! and sized as PostgreSQL does. `docs/spool.md` argues what a crash leaves.
//!
//! This crate never looks into WAL, talks to nobody, and knows nothing of replay.

mod archive_status;
pub mod decide;
mod early;
mod error;
pub mod files;
mod flusher;
mod prepare;
mod remove;
mod restored;
mod spool;
mod start;
mod state;
mod stats;
mod tail;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod work;
mod writer;

pub use archive_status::ArchiveStatus;
pub use error::{Result, SpoolError};
pub use remove::{Hold, Removed};
pub use restored::Judgement;
pub use spool::{Spool, SpoolOptions};
pub use start::streaming_start;
pub use state::max_unsynced;
pub use stats::{FSYNC_BUCKETS_MICROS, SpoolStats};
pub use tail::Tail;
pub use work::{Step, Worker};
pub use writer::Writer;
