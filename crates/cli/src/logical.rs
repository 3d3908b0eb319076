//! `walrider logical`.

pub mod apply;
pub mod pause;
pub mod setup;
pub mod stream;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use rustix::process::Signal;

/// Logical replication: set it up, read a slot, apply it to another server
#[derive(Args)]
pub struct LogicalArgs {
    #[command(subcommand)]
    pub command: LogicalCommand,
}

/// What to do with logical replication.
#[derive(Subcommand)]
pub enum LogicalCommand {
    Setup(setup::SetupArgs),
    Apply(apply::ApplyArgs),
    /// Pause a running `walrider logical apply`: it commits what it has begun, begins nothing more, and stays connected
    Pause(pause::WhichArgs),
    /// Have a `walrider logical apply` go on that was paused
    Resume(pause::WhichArgs),
    Stream(stream::StreamArgs),
}

/// Runs the command.
pub fn run(args: LogicalArgs) -> ExitCode {
    match args.command {
        LogicalCommand::Setup(args) => setup::run(args),
        LogicalCommand::Apply(args) => apply::run(args),
        LogicalCommand::Pause(args) => pause::run(&args, Signal::USR2),
        LogicalCommand::Resume(args) => pause::run(&args, Signal::USR1),
        LogicalCommand::Stream(args) => stream::run(args),
    }
}
