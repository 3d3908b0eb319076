//! PostgreSQL's base backups: what belongs into one, its archives, its manifest; from one to a data directory, and back.
//!
//! This crate never talks to a server, and knows nothing of redo.

pub mod checksum;
mod error;
pub mod header;
mod inventory;
pub mod label;
pub mod manifest;
mod name;
pub mod packing;
pub mod remote;
pub mod roll;
pub mod source;
mod target;
pub mod tree;
pub mod unpack;

pub use error::{BackupError, Result};
pub use source::{Backup, MapLengths};
pub use target::Mapping;
