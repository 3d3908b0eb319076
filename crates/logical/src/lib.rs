//! Logical replication: the messages of `pgoutput` and `walrider_pgoutput`, and the connection that they come from.
//!
//! This crate never reads a command line, and prints nothing.

pub mod journal;
pub mod json;
mod kind;
pub mod measure;
pub mod message;
mod pulse;
pub mod source;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tuple;
pub mod types;
