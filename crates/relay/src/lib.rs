//! Serves WAL to PostgreSQL standbys by PostgreSQL's protocol.
//!
//! Who is served is decided in three steps: [`rules`] say which proof is asked for, [`tls`] encrypts and verifies a client's
//! certificate, [`scram`] verifies a password without ever seeing it. None of these opens a socket.

pub mod rules;
pub mod scram;
pub mod tls;
