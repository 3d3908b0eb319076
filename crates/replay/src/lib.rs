//! Replay: drives WAL from its source through decoding, partitions and redo onto a data directory, and hands that to
//! PostgreSQL.
//!
//! This crate never talks to a server, and knows nothing of command lines.

mod actions;
pub mod base;
mod batch;
mod cuts;
pub mod end_of_recovery;
pub mod engine;
pub mod error;
mod feed;
pub mod follow;
mod frames;
mod gaps;
pub mod globals;
pub mod load;
pub mod memory;
mod pages;
mod partition;
pub mod plan;
pub mod rels;
pub mod restartpoint;
mod sequence;
mod shares;
mod speed;
mod spill;
mod spread;
pub mod stages;
pub mod startup;
pub mod stats;
pub mod target;
pub mod upstream;
mod worth;
