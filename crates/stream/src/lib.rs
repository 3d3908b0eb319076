//! WAL from a primary: a session that streams it into the spool, and what the primary is told.
//!
//! This crate never interprets WAL, and knows nothing of replay.

pub mod board;
pub mod error;
pub mod intake;
mod line;
pub mod positions;
pub mod streaming;
pub mod timelines;
pub mod upstream;
