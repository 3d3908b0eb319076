//! The one error of this crate: what was tried, on which path, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use walrider_layout::control::ControlError;

use crate::held::shown;

/// Something about the data directory that keeps us from going on.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The operating system refused.
    #[error("could not {operation} \"{}\": {source}{}", shown(path).display(), hint(source))]
    Io {
        /// What was tried, as a verb: "read", "fsync", …
        operation: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file's contents make no sense.
    #[error("file \"{}\" is damaged: {reason}", shown(path).display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The control file was not accepted.
    #[error("file \"{}\": {source}", shown(path).display())]
    Control {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ControlError,
    },
    /// A line of a configuration file is wrong.
    #[error("{}:{line}: {reason}", shown(path).display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u32,
        /// What is wrong with it.
        reason: String,
    },
    /// The directory is whole, but we must not or cannot work on it; the text says what to do.
    #[error("{0}")]
    Refused(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, DataDirError>;

impl DataDirError {
    /// The operating system refused `operation` on `path`.
    pub fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> DataDirError {
        DataDirError::Io { operation, path: path.into(), source }
    }

    /// What is in a file cannot be so.
    pub fn corrupt(path: impl Into<PathBuf>, reason: impl Into<String>) -> DataDirError {
        DataDirError::Corrupt { path: path.into(), reason: reason.into() }
    }

    /// Whether the cause is damaged input rather than the machine, the settings or the user.
    pub fn is_corruption(&self) -> bool {
        matches!(self, DataDirError::Corrupt { .. } | DataDirError::Control { .. })
    }
}

/// What to do about the errors that users meet most.
fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; free some space and try again",
        io::ErrorKind::PermissionDenied => "; run as the user that owns the data directory",
        io::ErrorKind::ReadOnlyFilesystem => "; the data directory must be writable",
        _ => "",
    }
}

/// Adds operation and path to the operating system's errors.
pub(crate) trait IoContext<T> {
    fn context(self, operation: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> IoContext<T> for std::result::Result<T, E> {
    fn context(self, operation: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| DataDirError::io(operation, path, error.into()))
    }
}
