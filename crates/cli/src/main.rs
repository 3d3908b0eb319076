//! The `walrider` command.

/// As the standard library's, which panics when nobody can read what it prints: see [`out`].
macro_rules! println {
    ($($text:tt)*) => { crate::out::say(format_args!("{}\n", format_args!($($text)*))) };
}
/// As the standard library's, which panics when nobody can read what it prints: see [`out`].
macro_rules! eprintln {
    ($($text:tt)*) => { crate::out::complain(format_args!("{}\n", format_args!($($text)*))) };
}

mod compare;
mod logging;
mod out;
mod promote;
mod receive;
mod replay;
mod service;
mod standby;
mod values;
mod wal;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

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
    // A file that would get longer than `ulimit -f` is an error of the write, not the end of this process.
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()) {
        eprintln!("walrider: could not handle signals: {error}");
        return ExitCode::from(1);
    }
    out::exit_code(match Cli::try_parse() {
        Ok(cli) => run(cli.command),
        Err(error) => explain(&error),
    })
}

/// Help, the version, or what is wrong with the command line.
fn explain(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    if !error.use_stderr() {
        out::note(printed.and_then(|()| io::stdout().flush()));
    }
    ExitCode::from(if error.use_stderr() { 2 } else { 0 })
}

fn run(command: Command) -> ExitCode {
    match command {
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
