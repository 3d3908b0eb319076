//! Why a standby ends.

use std::path::PathBuf;

use walrider_archive::ArchiveError;
use walrider_datadir::DataDirError;
use walrider_layout::Lsn;
use walrider_relay::server::ListenError;
use walrider_relay::slots::SlotError;
use walrider_replay::error::ReplayError;
use walrider_session::ConnectError;
use walrider_spool::SpoolError;
use walrider_stream::error::ReceiveError;

/// What ends a standby, or keeps it from starting.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// Replay failed.
    #[error(transparent)]
    Replay(ReplayError),
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
    /// The server on a directory that is read.
    #[error("pg_ctl {command} failed: {why}")]
    Server {
        /// What `pg_ctl` was told.
        command: String,
        /// What came of it.
        why: String,
    },
    /// What is received cannot be archived.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A relay cannot be served from.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The slots of a relay.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// Whose WAL a relay has cannot be told.
    #[error("\"{0}\" is not what Walrider wrote: remove it, and the relay learns it from its primary")]
    Identity(PathBuf),
    /// Threads or descriptors.
    #[error("could not {operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Through replay and back, an error stays what it is.
impl From<StandbyError> for ReplayError {
    fn from(error: StandbyError) -> ReplayError {
        match error {
            StandbyError::Replay(error) => error,
            StandbyError::DataDir(error) => ReplayError::DataDir(error),
            error => ReplayError::Upstream(Box::new(error)),
        }
    }
}

impl From<ReplayError> for StandbyError {
    fn from(error: ReplayError) -> StandbyError {
        match error {
            ReplayError::Upstream(error) => match error.downcast::<StandbyError>() {
                Ok(error) => *error,
                Err(error) => StandbyError::Replay(ReplayError::Upstream(error)),
            },
            error => StandbyError::Replay(error),
        }
    }
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

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    /// It once became text, which nobody could tell from a wish for another directory.
    #[test]
    fn a_failed_fsync_is_one_after_replay_too() {
        let source = Arc::new(io::Error::from(io::ErrorKind::Other));
        let failed = SpoolError::Failed { operation: "fsync file", path: "pg_wal/x".into(), source };
        let said = failed.to_string();
        let replay = ReplayError::from(StandbyError::from(failed));
        assert_eq!(replay.to_string(), said);
        let standby = StandbyError::from(replay);
        assert_eq!(standby.to_string(), said);
        assert!(matches!(standby, StandbyError::Spool(error) if error.is_final()));
    }
}
