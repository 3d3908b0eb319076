//! Serves WAL to PostgreSQL standbys by PostgreSQL's protocol.
//!
//! Who is served is decided in three steps: [`rules`] say which proof is asked for, [`tls`] encrypts and verifies a client's
//! certificate, [`scram`] verifies a password without ever seeing it. None of these opens a socket.
//!
//! [`server`] accepts connections. Each is a `session` with a thread of its own: `auth` asks who it is, the walsender's commands are
//! answered, `sender` streams from the [`origin`], the spool's segments, and [`backup`] sends a data directory, if there is one. [`service`] is what they share: [`slots`], and what those
//! [`downstream`] have told.

pub mod acks;
mod auth;
pub mod backup;
pub mod downstream;
mod link;
pub mod origin;
mod refusal;
pub mod rules;
pub mod scram;
mod sender;
pub mod server;
pub mod service;
mod session;
pub mod slots;
pub mod tls;
