//! Why an archive fails.

use walrider_datadir::DataDirError;

/// Why something was not archived, or not fetched. That an archive does not have a file is no error.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// A file or a directory.
    #[error(transparent)]
    File(#[from] DataDirError),
    /// An object store did not do what it was asked for.
    #[error("could not {operation} \"{object}\": {source}")]
    Store {
        /// What was tried, as a verb.
        operation: &'static str,
        /// On which object, or place.
        object: String,
        /// What the store said.
        source: Box<object_store::Error>,
    },
    /// What is there is not what was put there.
    #[error("\"{object}\" is damaged: {reason}")]
    Damaged {
        /// Which object or file.
        object: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The archive has another file of this name.
    #[error(
        "the archive has \"{object}\" with other contents: two clusters write to it, or an old timeline was continued; \
         nothing was replaced"
    )]
    Different {
        /// The object that is there.
        object: String,
    },
    /// Nothing was ever archived there.
    #[error("there is no archive at \"{place}\": nothing was ever put there, or it is not mounted")]
    Empty {
        /// Where.
        place: String,
    },
    /// Anything that the user has to set right first.
    #[error("{0}")]
    Refused(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ArchiveError>;
