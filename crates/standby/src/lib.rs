//! A live standby of a stock primary: a thread that receives, one that makes durable, and replay, brought together; and
//! `walrider receive`, which does without replay.
//!
//! This crate never reads a command line, and never interprets WAL.

mod admit;
mod error;
mod follower;
mod receive;
mod receiver;
mod repeats;
mod settings;
mod standby;

pub use error::StandbyError;
pub use follower::{PAUSE_FILE, PROMOTE_FILE};
pub use receive::{Receive, ReceiveSettings};
pub use settings::{EarlyMode, Settings, describe_primary};
pub use standby::{Outcome, Standby};
pub use walrider_receive::connect::ConnectError;
pub use walrider_replay::startup::Summary;
