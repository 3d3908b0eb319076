//! A connection to a walsender: opening it, commands, streaming.

mod auth;
mod error;
mod files;
mod input;
mod open;
mod options;
mod session;
mod socket;
mod tls;
mod transport;

pub use error::{ConnectError, FailedAttempt};
pub use options::ConnectOptions;
pub use session::{Connection, CopyEvent, Read, Start, SystemIdentity};

/// Result of this module.
pub type Result<T> = std::result::Result<T, ConnectError>;
