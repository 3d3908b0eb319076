//! A live standby of a stock primary: a thread that receives, one that makes durable, and replay, brought together; and
//! `walrider receive`, which does without replay.
//!
//! This crate never reads a command line, and never interprets WAL.

mod admit;
mod error;
pub mod machine;
mod receive;
mod receiver;
mod repeats;
mod settings;
mod shell;
mod standby;

pub use error::StandbyError;
pub use receive::{Receive, ReceiveSettings};
pub use settings::{EarlyMode, Settings, describe_primary};
pub use shell::{PAUSE_FILE, PROMOTE_FILE};
pub use standby::{Outcome, Standby};
pub use walrider_replay::startup::Summary;
pub use walrider_session::ConnectError;
