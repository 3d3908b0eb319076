//! `walrider logical`.

pub mod apply;
pub mod setup;
pub mod stream;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Logical replication: set it up, read a slot, apply it to another server
#[derive(Args)]
pub struct LogicalArgs {
    #[command(subcommand)]
    command: LogicalCommand,
}

#[derive(Subcommand)]
enum LogicalCommand {
    Setup(setup::SetupArgs),
    Apply(apply::ApplyArgs),
    Stream(stream::StreamArgs),
}

/// Runs the command.
pub fn run(args: LogicalArgs) -> ExitCode {
    match args.command {
        LogicalCommand::Setup(args) => setup::run(args),
        LogicalCommand::Apply(args) => apply::run(args),
        LogicalCommand::Stream(args) => stream::run(args),
    }
}
