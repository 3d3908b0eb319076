//! The upstream session: a connection to a PostgreSQL server, and the WAL it streams.
//!
//! This crate never interprets WAL, and knows nothing of replay.

pub mod board;
pub mod connect;
pub mod error;
pub mod line;
pub mod positions;
pub mod streaming;
pub mod upstream;
