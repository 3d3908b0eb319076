//! A live standby of a stock primary: a thread that receives, one that makes durable, and replay, brought together; and
//! `walrider receive` and `walrider relay`, which do without replay.
//!
//! This crate never reads a command line, and never interprets WAL.

mod admit;
mod archiving;
mod error;
pub mod machine;
mod node;
mod receive;
mod receiver;
mod relay;
mod repeats;
mod restored;
mod settings;
mod shell;
mod standby;
mod turns;

pub use error::StandbyError;
pub use node::Node;
pub use receive::{LOCK_FILE as RECEIVE_LOCK_FILE, Receive, ReceiveSettings};
pub use relay::{Relay, RelaySettings};
pub use settings::{EarlyMode, ReadableSettings, Settings, describe_primary};
pub use shell::{PAUSE_FILE, PROMOTE_FILE};
pub use standby::{Outcome, Standby};
pub use turns::Limits;
pub use walrider_replay::startup::Summary;
pub use walrider_session::ConnectError;
