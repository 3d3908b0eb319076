//! PostgreSQL's data directory: its files, who may work on it, its settings, and the order of fsync.
//!
//! This crate never interprets WAL or the contents of relation pages, and starts no threads.

pub mod durable;
mod error;
pub mod lock;
pub mod relation;
pub mod slru;

pub use error::{DataDirError, Result};
