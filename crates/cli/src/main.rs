//! The `walrider` command.

/// As the standard library's, which panics when nobody can read what it prints: see [`out`].
macro_rules! println {
    ($($text:tt)*) => { crate::out::say(format_args!("{}\n", format_args!($($text)*))) };
}
/// As the standard library's, which panics when nobody can read what it prints: see [`out`].
macro_rules! eprintln {
    ($($text:tt)*) => { crate::out::complain(format_args!("{}\n", format_args!($($text)*))) };
}

mod archiving;
mod backup;
mod bench;
mod compare;
mod control;
mod doctor;
mod failure;
mod help;
mod logging;
mod logical;
mod out;
mod promote;
mod receive;
mod relay;
mod replay;
mod restore;
mod running;
mod service;
mod serving;
mod standby;
mod top;
mod values;
mod wal;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{FromArgMatches, Parser, Subcommand};

use failure::{Exit, Failure};

/// A replication engine for PostgreSQL
///
/// Exit codes: 0 done; 1 something has to be set right first, the message says what; 2 wrong usage; 3 replay stopped cleanly
/// before a record that Walrider does not support; 4 the input is damaged; 5 a difference or a problem was found. status and wal get
/// have codes of their own.
///
/// Errors are lines "walrider: error: ..." on stderr. With --json there is an object with "error" on stdout as well.
#[derive(Parser)]
#[command(name = "walrider", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(replay::ReplayArgs),
    Restore(Box<restore::RestoreArgs>),
    Backup(backup::BackupArgs),
    Standby(Box<standby::StandbyArgs>),
    Promote(promote::PromoteArgs),
    /// Pause replay of a running standby; it goes on receiving
    Pause(promote::TellArgs),
    /// Resume replay of a running standby
    Resume(promote::TellArgs),
    Receive(receive::ReceiveArgs),
    Relay(Box<relay::RelayArgs>),
    Logical(Box<logical::LogicalArgs>),
    Status(control::StatusArgs),
    Stop(control::StopArgs),
    /// Tell a running standby or relay to read its configuration again
    Reload(promote::TellArgs),
    Top(top::TopArgs),
    ExplainLag(top::ExplainLagArgs),
    Doctor(doctor::DoctorArgs),
    Bench(Box<bench::BenchArgs>),
    /// Compare two data directories page by page, as PostgreSQL sees them
    Compare(compare::CompareArgs),
    Wal(wal::WalArgs),
    Completions(help::CompletionsArgs),
    #[command(hide = true)]
    Man(help::ManArgs),
}

fn main() -> ExitCode {
    walrider_replay::memory::give_back();
    // A file that would get longer than `ulimit -f` is an error of the write, not the end of this process.
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()) {
        return Failure::new(Exit::Refused, format!("could not handle signals: {error}")).complain();
    }
    let parsed = help::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    out::exit_code(match parsed {
        Ok(cli) => run(cli.command),
        Err(error) => usage(&error),
    })
}

fn run(command: Command) -> ExitCode {
    match command {
        Command::Replay(args) => replay::run(args),
        Command::Restore(args) => restore::run(*args),
        Command::Backup(args) => backup::run(args),
        Command::Standby(args) => standby::run(*args),
        Command::Promote(args) => promote::run(&args),
        Command::Pause(args) => promote::pause(&args),
        Command::Resume(args) => promote::resume(&args),
        Command::Receive(args) => receive::run(args),
        Command::Relay(args) => relay::run(*args),
        Command::Logical(args) => logical::run(*args),
        Command::Status(args) => control::status(&args),
        Command::Stop(args) => control::stop(&args),
        Command::Reload(args) => control::reload(&args),
        Command::Top(args) => top::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::ExplainLag(args) => top::explain(&args),
        Command::Compare(args) => compare::run(args),
        Command::Wal(args) => wal::run(args),
        Command::Completions(args) => help::completions(&args),
        Command::Man(args) => help::man(&args),
    }
}

/// Help and version as clap prints them; what was wrong in the form of all errors, followed by the usage.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let Some(message) = text.strip_prefix("error: ").filter(|_| error.use_stderr()) else {
        // Asked for, or for want of a command.
        let printed = error.print();
        if error.use_stderr() {
            return Exit::Usage.into();
        }
        out::note(printed.and_then(|()| io::stdout().flush()));
        return ExitCode::SUCCESS;
    };
    let failure = Failure::new(Exit::Usage, message.trim_end());
    if let Some(code) = wal::asks_for_wal() {
        return failure.with_code(code).complain();
    }
    failure.tell(std::env::args_os().any(|word| word == "--json"))
}
