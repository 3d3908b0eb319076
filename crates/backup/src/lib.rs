//! PostgreSQL's base backups: what belongs into one, its archives, its manifest.
//!
//! This crate never talks to a server, and knows nothing of recovery.

pub mod checksum;
pub mod header;
pub mod label;
pub mod manifest;
pub mod tree;
