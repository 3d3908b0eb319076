//! Where the lag of a standby is: what servers are asked, what two samples of it come to, and what to do about it.
//!
//! [`sample`], [`query`], [`split`], [`slots`], [`content`] and [`rules`] are pure; [`collect`] has the connections, the clock and the
//! threads, [`host`] the processes of this machine. Nothing here changes anything on a server.

pub mod collect;
pub mod content;
pub mod host;
pub mod query;
pub mod rules;
pub mod sample;
pub mod slots;
pub mod split;
pub mod words;
