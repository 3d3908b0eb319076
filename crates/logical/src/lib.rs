//! Logical replication: the messages of `pgoutput` and `walrider_pgoutput`, and the connection that they come from.
//!
//! This crate never reads a command line, and prints nothing.

pub mod copy;
mod kind;
pub mod message;
pub mod setup;
mod sql;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tuple;
