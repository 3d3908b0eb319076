//! Why a backup cannot be read, or made.

use std::path::Path;

use walrider_datadir::DataDirError;
use walrider_datadir::held::shown;
use walrider_store::StoreError;

use crate::header::TooLong;
use crate::manifest::ManifestError;

/// Why it is not done.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A file or a directory.
    #[error(transparent)]
    File(#[from] DataDirError),
    /// A file of the backup is not what it was, or not what it should be.
    #[error("file \"{file}\" of the backup {reason}")]
    Damaged {
        /// Its name below the data directory, or that of an archive.
        file: String,
        /// What is wrong with it, as the end of a sentence.
        reason: String,
    },
    /// WAL that is needed.
    #[error(transparent)]
    Wal(#[from] StoreError),
    /// What goes into a manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// What goes into an archive.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// Who was to change pages failed.
    #[error("{0}")]
    Pages(Box<dyn std::error::Error + Send + Sync>),
    /// Anything that the user has to set right first.
    #[error("{0}")]
    Refused(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, BackupError>;

impl BackupError {
    pub(crate) fn damaged(file: impl Into<String>, reason: impl Into<String>) -> BackupError {
        BackupError::Damaged { file: file.into(), reason: reason.into() }
    }

    /// Whether the cause is damaged input rather than the machine or the user.
    pub fn is_corruption(&self) -> bool {
        match self {
            BackupError::Damaged { .. } | BackupError::Wal(StoreError::Corrupt(_)) => true,
            BackupError::File(error) | BackupError::Wal(StoreError::File(error)) => error.is_corruption(),
            _ => false,
        }
    }
}

/// Adds operation and path to the operating system's errors.
pub(crate) trait IoContext<T> {
    fn context(self, operation: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> IoContext<T> for std::result::Result<T, E> {
    fn context(self, operation: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| DataDirError::io(operation, path, error.into()).into())
    }
}

/// A path for a message.
pub(crate) fn quoted(path: &Path) -> String {
    format!("\"{}\"", shown(path).display())
}
