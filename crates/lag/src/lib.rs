//! Where the lag of a standby is: what servers are asked, what two samples of it come to, and what to do about it.
//!
//! [`sample`], [`query`], [`split`] and [`rules`] are pure; [`collect`] has the connections, the clock and the threads. Nothing here changes
//! anything on a server.

pub mod collect;
mod host;
pub mod query;
pub mod rules;
pub mod sample;
pub mod split;
