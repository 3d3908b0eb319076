//! What can go wrong with a data directory.

use std::io;
use std::path::PathBuf;

/// A data directory cannot be used, read or written.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The operating system refused.
    #[error("could not {operation} \"{}\": {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl DataDirError {
    /// The operating system refused `operation` on `path`.
    pub fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> DataDirError {
        DataDirError::Io { operation, path: path.into(), source }
    }
}
