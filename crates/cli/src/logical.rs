//! `walrider logical`.

pub mod apply;
pub mod stream;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Logical replication: from a slot of the publisher, to another server
#[derive(Args)]
pub struct LogicalArgs {
    #[command(subcommand)]
    command: LogicalCommand,
}

#[derive(Subcommand)]
enum LogicalCommand {
    Apply(apply::ApplyArgs),
    Stream(stream::StreamArgs),
}

/// Runs the command.
pub fn run(args: LogicalArgs) -> ExitCode {
    match args.command {
        LogicalCommand::Apply(args) => apply::run(args),
        LogicalCommand::Stream(args) => stream::run(args),
    }
}
