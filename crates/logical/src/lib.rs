//! Logical replication: the messages of `pgoutput` and `walrider_pgoutput`, and the connection that they come from; and what they
//! tell, applied to another server.
//!
//! This crate never reads a command line, and prints nothing.

pub mod apply;
pub mod assemble;
mod batch;
mod coalesce;
mod conflict;
pub mod copy;
mod counters;
mod error;
mod hashed;
pub mod journal;
pub mod json;
pub mod keys;
mod kind;
mod last_update;
pub mod measure;
pub mod message;
mod open_batch;
mod origins;
mod progress;
mod reader;
pub mod schedule;
pub mod setup;
pub mod source;
mod sql;
mod statements;
mod status;
pub mod stream;
mod target;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tuple;
mod turn;
pub mod types;
mod wake;
mod worker;
