//! The `walrider` command.

mod compare;
mod logging;
mod promote;
mod receive;
mod replay;
mod service;
mod standby;
mod values;
mod wal;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A replication engine for PostgreSQL
///
/// Exit codes: 0 done; 1 a difference or failure was found; 2 wrong usage; 3 replay stopped cleanly before a record that
/// Walrider does not support; 4 the input is corrupt.
#[derive(Parser)]
#[command(name = "walrider", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(replay::ReplayArgs),
    Standby(standby::StandbyArgs),
    Promote(promote::PromoteArgs),
    /// Pause replay of a running standby; it goes on receiving
    Pause(promote::PauseArgs),
    /// Resume replay of a running standby
    Resume(promote::PauseArgs),
    Receive(receive::ReceiveArgs),
    /// Compare two data directories page by page, as PostgreSQL sees them
    Compare(compare::CompareArgs),
    /// Look into WAL: what it holds, record by record or in sum
    Wal(wal::WalArgs),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Replay(args) => replay::run(args),
        Command::Standby(args) => standby::run(args),
        Command::Promote(args) => promote::run(&args),
        Command::Pause(args) => promote::pause(&args),
        Command::Resume(args) => promote::resume(&args),
        Command::Receive(args) => receive::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Wal(args) => wal::run(args),
    }
}
