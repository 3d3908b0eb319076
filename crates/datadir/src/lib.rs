//! PostgreSQL's data directory: its files, who may work on it, its settings, and the order of fsync.
//!
//! This crate never interprets WAL or the contents of relation pages. The threads that it starts only wait for
//! devices ([`behind`], [`sync`]).

pub mod backup_label;
pub mod behind;
pub mod command;
pub mod config;
pub mod descriptors;
pub mod directories;
pub mod durable;
mod error;
pub mod held;
pub mod lock;
pub mod mappings;
pub mod open;
pub mod origins;
pub mod recovery_settings;
pub mod relation;
pub mod relmap;
pub mod slots;
pub mod slru;
pub mod sync;
pub mod timestamp;
pub mod twophase;
pub mod unlogged;
pub mod wal_dir;
pub mod wal_file;
pub mod watch;

pub use error::{DataDirError, Result};
pub use open::DataDir;
