//! Why a store fails.

use walrider_datadir::DataDirError;

/// Why WAL could not be found or read. That there is none is no error.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file or a directory.
    #[error(transparent)]
    File(#[from] DataDirError),
    /// What is there is damaged.
    #[error("{0}")]
    Corrupt(String),
    /// Anything that the user has to set right first.
    #[error("{0}")]
    Refused(String),
}
