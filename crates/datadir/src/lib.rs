//! PostgreSQL's data directory: relation files, SLRUs, control file, lock, configuration, and the order of fsync.
//!
//! This crate never interprets WAL and decides nothing about recovery.

mod error;
pub mod relation;

pub use error::DataDirError;
