//! PostgreSQL's frontend/backend protocol as far as replication needs it: messages, commands, connection strings.
//!
//! This crate never touches a file, socket, clock or thread, and knows `layout` only.

pub mod backend;
pub mod command;
pub mod conninfo;
pub mod error;
mod framing;
pub mod frontend;
pub mod pulse;
pub mod reader;
pub mod replication;
pub mod server;
pub mod stream;

pub use error::WireError;
