//! Why a standby ends.

use std::path::PathBuf;

use walrider_datadir::DataDirError;
use walrider_layout::Lsn;
use walrider_replay::error::ReplayError;
use walrider_session::ConnectError;
use walrider_spool::SpoolError;
use walrider_stream::error::ReceiveError;

/// What ends a standby, or keeps it from starting.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// Replay failed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A file of the data directory.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// Storing WAL failed.
    #[error(transparent)]
    Spool(#[from] SpoolError),
    /// Receiving failed, and is not tried again.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// WAL is damaged.
    #[error("WAL is corrupt at {lsn}: {why}; remove that file and start again, it is received once more")]
    Corrupt {
        /// Where.
        lsn: Lsn,
        /// File and reason.
        why: String,
    },
    /// A record without redo.
    #[error(
        "stopped cleanly before the record at {lsn}: there is no redo for {record} yet. PostgreSQL, started on the directory, \
         goes on from there"
    )]
    Unsupported {
        /// Where.
        lsn: Lsn,
        /// Resource manager and type.
        record: String,
    },
    /// The directory is no standby's, or not one of this primary.
    #[error("{0}")]
    NotAStandby(String),
    /// The server was not started.
    #[error("the directory was promoted, but \"{}\" could not start a server on it: {why}", program.display())]
    NotStarted {
        /// `pg_ctl`.
        program: PathBuf,
        /// What came of it.
        why: String,
    },
    /// Threads or descriptors.
    #[error("could not {operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl StandbyError {
    /// Whether the input is corrupt (exit code 4).
    pub fn is_corruption(&self) -> bool {
        match self {
            StandbyError::Replay(error) => error.is_corruption(),
            StandbyError::Corrupt { .. } => true,
            _ => false,
        }
    }

    /// Whether it was told something that cannot be (exit code 2).
    pub fn is_usage(&self) -> bool {
        matches!(self, StandbyError::Receive(ReceiveError::Connect(ConnectError::Config(_))))
    }

    /// Whether it stopped cleanly before a record that is not supported (exit code 3).
    pub fn is_unsupported(&self) -> bool {
        matches!(self, StandbyError::Unsupported { .. })
    }
}
