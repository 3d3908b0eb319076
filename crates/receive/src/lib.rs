//! The upstream session: a connection to a PostgreSQL server, and the WAL it streams.
//!
//! This crate never interprets WAL, and never touches a data directory.

pub mod connect;
