//! Logical replication: the messages of `pgoutput` and `walrider_pgoutput`, and the connection that they come from; and what they
//! tell, applied to another server.
//!
//! This crate never reads a command line, and prints nothing.

pub mod assemble;
pub mod keys;
pub mod message;
pub mod schedule;
pub mod tuple;
