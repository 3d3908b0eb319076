//! Stores of WAL: finds segments and timeline histories by name, in directories and through `restore_command`, and reads them
//! by position.
//!
//! This crate never changes what a store holds, looks into no record, and knows nothing of recovery's progress but what it is
//! told.

pub mod directory;
pub mod driver;
mod error;
mod fetch;
mod find;
pub mod foreign_archive;
mod partial;
pub mod read;
pub mod restore;
pub mod source;

pub use error::StoreError;
