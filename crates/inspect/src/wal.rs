//! What is in some WAL, record by record.

mod files;
mod read;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

use walrider_datadir::DataDirError;
use walrider_layout::history::InvalidHistory;
use walrider_layout::{Lsn, Major};
use walrider_store::StoreError;
use walrider_wal::decode::Invalid;
use walrider_wal::record::InvalidRecord;

pub use read::{Ended, Range, each_record};

/// Why reading failed.
#[derive(Debug, thiserror::Error)]
pub enum WalError {
    /// A file or a directory cannot be read.
    #[error("\"{}\": {}", .0.display(), .1)]
    Io(PathBuf, io::Error),
    /// Nothing there is named like a segment, or none of it belongs to the newest timeline's history.
    #[error("no WAL segments in \"{}\": name a pg_wal or an archive", .0.display())]
    NoSegments(PathBuf),
    /// Some tool has packed it.
    #[error("\"{}\" is compressed: unpack it first", .0.display())]
    Packed(PathBuf),
    /// No file begins with the header of a segment.
    #[error("\"{}\" is not a WAL segment", .0.display())]
    NotWal(PathBuf),
    /// The name does not fit the size that the segments state.
    #[error("\"{}\" is not named like a WAL segment of {} bytes", .0.display(), .1)]
    NotASegmentName(PathBuf, u64),
    /// The magic number of a version that is not supported.
    #[error(
        "\"{}\": WAL of an unsupported version (magic number {:04X}): PostgreSQL {} are supported",
        .0.display(), .1, Major::SUPPORTED
    )]
    Version(PathBuf, u16),
    /// A history file that is none.
    #[error("\"{}\": {}", .0.display(), .1)]
    History(PathBuf, InvalidHistory),
    /// A file is missing, or its end.
    #[error("{what} is missing, but later WAL is there: the record at {at} cannot be read")]
    Missing {
        /// Where a record was expected.
        at: Lsn,
        /// The file that should have it.
        what: String,
    },
    /// WAL that is not valid although more follows.
    #[error("invalid WAL at {at} ({file}): {why}")]
    Damaged {
        /// Where a record was expected.
        at: Lsn,
        /// The file and the offset in it that are to blame.
        file: String,
        /// What is wrong.
        why: Invalid,
    },
    /// A record whose bytes are as they were written, and that makes no sense: its file, and where it begins.
    #[error("invalid record at {1} ({0}): {2}")]
    InvalidRecord(String, Lsn, InvalidRecord),
    /// The end asked for is not reached.
    #[error("WAL ends at {at}, before {end}")]
    EndsEarly {
        /// Where it ends.
        at: Lsn,
        /// The end asked for.
        end: Lsn,
    },
    /// Anything else that the store says.
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for WalError {
    fn from(error: StoreError) -> WalError {
        match error {
            StoreError::File(DataDirError::Io { path, source, .. }) => WalError::Io(path, source),
            error => WalError::Store(error),
        }
    }
}
