//! A connection to a walsender: opening it, commands, streaming.

mod answer;
mod auth;
mod error;
mod files;
mod input;
mod open;
mod options;
mod security;
mod session;
mod socket;
mod tls;
mod transport;
mod value;

pub use error::{ConnectError, FailedAttempt};
pub use options::ConnectOptions;
pub use session::{Connection, CopyEvent, Read, Start, SystemIdentity};

/// Result of this module.
pub type Result<T> = std::result::Result<T, ConnectError>;
