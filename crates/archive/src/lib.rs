//! Archives of WAL for PostgreSQL's `archive_command` and `restore_command`, in a directory or an object store.
//!
//! [`Archive`] puts and gets single files. [`restore`] is what `restore_command` does with it: it hands out what a process in the
//! background ([`ahead`]) has fetched into a [`spool`] before it was asked for. [`archiver`] archives what a directory receives.
//!
//! What an archive holds: `wal/TTTTTTTT/NNNNNNNNNNNNNNNNNNNNNNNN.zst` for a segment of timeline T, `.partial` ones and backup
//! histories beside it, and `wal/TTTTTTTT.history`. Each has a header with its length and checksum ([`frame`]).

pub mod ahead;
pub mod archive;
pub mod archiver;
pub mod check;
pub mod directory;
pub mod driver;
mod error;
pub mod frame;
pub mod name;
pub mod objects;
mod place;
pub mod ranges;
pub mod restore;
pub mod retention;
pub mod spool;
mod temporary;
#[cfg(test)]
mod testing;

pub use archive::{Archive, Put};
pub use error::{ArchiveError, Result};
pub use place::Place;
