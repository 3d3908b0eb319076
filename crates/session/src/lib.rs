//! A client of PostgreSQL's protocol, as libpq is one: it finds a server, secures the connection, authenticates, runs commands,
//! and copies both ways.
//!
//! This crate never looks into what is copied, and starts no thread.

mod answer;
mod auth;
mod connection;
mod error;
mod files;
mod input;
mod open;
mod options;
mod security;
mod socket;
mod tls;
mod transport;
mod value;

pub use connection::{
    Connection, CopyEvent, NewSlot, Outcome, Pipeline, Read, SlotOfDatabase, Start, SystemIdentity, Transaction,
};
pub use error::{ConnectError, FailedAttempt, Reason};
pub use options::ConnectOptions;
pub use tls::end_point as tls_server_end_point;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ConnectError>;
