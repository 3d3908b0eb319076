//! The one error of this crate: what was tried, on which file, and what to do about it.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

use walrider_datadir::held::shown;
use walrider_layout::Lsn;

/// Something that keeps WAL from being stored.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The operating system refused.
    #[error("could not {operation} \"{}\": {source}", shown(path).display())]
    Io {
        /// What was tried, as a verb: "open", "rename", …
        operation: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// No space is left, or none is allowed (`ENOSPC`, `EDQUOT`, `EFBIG`). No position moved: the same call succeeds once
    /// there is space.
    #[error("could not {operation} \"{}\": {source}; receiving goes on when there is space", shown(path).display())]
    Full {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Durability cannot be had any more: the operating system may have dropped what it failed to write, and would not
    /// say so a second time. Every further call says this; PostgreSQL panics here (`data_sync_elevel`, `fd.c`).
    #[error(
        "could not {operation} \"{}\": {source}; what was not yet flushed may be lost: check the disk and start again",
        shown(path).display()
    )]
    Failed {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// A segment file that cannot be.
    #[error("WAL file \"{}\" has {len} bytes, more than the {segment_size} of a segment: move it away", shown(path).display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The size of segments in bytes.
        segment_size: u64,
    },
    /// WAL was skipped: `at` is past what was written.
    #[error("WAL from {written} to {at} is missing")]
    Gap {
        /// Where the next byte belongs.
        written: Lsn,
        /// Where the bytes were to go.
        at: Lsn,
    },
    /// WAL came a second time: `at` is before what was written.
    #[error("WAL from {at} to {written} is already written")]
    Overlap {
        /// Where the next byte belongs.
        written: Lsn,
        /// Where the bytes were to go.
        at: Lsn,
    },
    /// The call makes no sense as things are; the text says why.
    #[error("{0}")]
    Refused(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, SpoolError>;

impl SpoolError {
    /// The operating system refused; tells apart whether for lack of space.
    pub(crate) fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> SpoolError {
        let path = path.into();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                SpoolError::Full { operation, path, source }
            }
            _ => SpoolError::Io { operation, path, source },
        }
    }

    /// Whether the same call may succeed later, when there is space.
    pub fn is_full(&self) -> bool {
        matches!(self, SpoolError::Full { .. })
    }

    /// Whether the spool is of no use any more.
    pub fn is_final(&self) -> bool {
        matches!(self, SpoolError::Failed { .. })
    }
}

/// The error that ended a spool, to be told again and again.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub operation: &'static str,
    pub path: PathBuf,
    pub source: Arc<io::Error>,
}

impl From<Failure> for SpoolError {
    fn from(failure: Failure) -> SpoolError {
        SpoolError::Failed { operation: failure.operation, path: failure.path, source: failure.source }
    }
}
