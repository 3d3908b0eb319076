//! Why applying ends.

use std::io;

use walrider_layout::Lsn;
use walrider_session::ConnectError;

use crate::assemble::AssembleError;
use crate::source::SourceError;

/// Why `apply` ended, or has to connect again. Texts say what to do.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The connection to the publisher.
    #[error("publisher: {0}")]
    Source(#[from] SourceError),
    /// A connection to the target.
    #[error("target: {0}")]
    Target(#[from] ConnectError),
    /// What the publisher sent.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// A table of the target does not fit.
    #[error("{0}")]
    Schema(String),
    /// A row that cannot be applied.
    #[error("{0}")]
    Conflict(String),
    /// The set-up is wrong.
    #[error("{0}")]
    Refused(String),
    /// A file or thread.
    #[error("could not {0}: {1}")]
    System(&'static str, #[source] io::Error),
    /// What the publisher could not decode is behind.
    #[error("what the publisher could not decode is likely to be behind: it streams as usual again")]
    Usual,
    /// A transaction that was begun before all of it had come: the one that commits here.
    #[error(
        "the large transaction that committed at {0} is applied at once when all of it has come: it met another, or a conflict"
    )]
    Whole(Lsn),
    /// It is to stop.
    #[error("interrupted")]
    Stopped,
}

/// Sessions or servers that end, and come again (`errcodes.txt`): 57P01 to 57P05, class 08, too many connections.
const COMES_AGAIN: [&str; 7] = ["57P01", "57P02", "57P03", "57P05", "53300", "55006", "40001"];

impl ApplyError {
    /// Whether it is worth connecting again.
    pub fn can_heal(&self) -> bool {
        match self {
            _ if self.is_internal() => true,
            ApplyError::Source(SourceError::Connect(error)) | ApplyError::Target(error) => can_heal(error),
            ApplyError::Source(SourceError::Silent | SourceError::Closed | SourceError::InUse { .. }) => true,
            ApplyError::Usual | ApplyError::Whole(_) => true,
            _ => false,
        }
    }
}

impl ApplyError {
    /// Whether the publisher failed in itself (`internal_error`), as decoding may. It may be passing, so it is tried again a few times.
    pub fn is_internal(&self) -> bool {
        matches!(self, ApplyError::Source(SourceError::Connect(error)) if error.is_sqlstate("XX000"))
    }

    /// Whether its waiting was ended.
    pub fn is_interrupted(&self) -> bool {
        matches!(
            self,
            ApplyError::Source(SourceError::Connect(ConnectError::Interrupted))
                | ApplyError::Target(ConnectError::Interrupted)
        )
    }

    /// Whether a slot or an origin is in use by somebody else (`object_in_use`).
    pub fn is_in_use(&self) -> bool {
        match self {
            ApplyError::Source(SourceError::InUse { .. }) => true,
            ApplyError::Source(SourceError::Connect(error)) | ApplyError::Target(error) => error.is_sqlstate("55006"),
            _ => false,
        }
    }
}

impl From<io::Error> for ApplyError {
    fn from(error: io::Error) -> ApplyError {
        ApplyError::System("read changes back from a temporary file", error)
    }
}

fn can_heal(error: &ConnectError) -> bool {
    match error {
        ConnectError::Io { .. } | ConnectError::Closed | ConnectError::Timeout | ConnectError::Target(_) => true,
        ConnectError::Server(message) => {
            message.code.starts_with("08")
                || message.code.starts_with("53")
                || COMES_AGAIN.contains(&message.code.as_str())
        }
        ConnectError::Open(attempts) => attempts.iter().any(|attempt| can_heal(&attempt.error)),
        _ => false,
    }
}
