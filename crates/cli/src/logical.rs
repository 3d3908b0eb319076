//! `walrider logical`.

mod setup;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Logical replication between two servers
#[derive(Args)]
pub struct LogicalArgs {
    #[command(subcommand)]
    command: LogicalCommand,
}

#[derive(Subcommand)]
enum LogicalCommand {
    Setup(setup::SetupArgs),
}

/// Runs the command.
pub fn run(args: LogicalArgs) -> ExitCode {
    match args.command {
        LogicalCommand::Setup(args) => setup::run(args),
    }
}
