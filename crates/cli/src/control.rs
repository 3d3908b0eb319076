//! `walrider status`, `stop` and `reload`: as `pg_ctl` has them, for what runs here.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use rustix::process::Signal;
use serde_json::{Value, json};
use walrider_datadir::backup_label::BackupLabel;
use walrider_datadir::config::SignalFiles;
use walrider_datadir::open::read_control;
use walrider_layout::control::{ControlFile, DbState};
use walrider_observe::client;
use walrider_observe::status::StandbyStatus;

use crate::Command;
use crate::failure::{self, Exit, Failure, SCHEMA_VERSION};
use crate::out;
use crate::promote::TellArgs;
use crate::running::{ControlError, Kind, Running};
use crate::values::parse_duration;

/// Exit codes of `pg_ctl status` (`do_status`, `bin/pg_ctl/pg_ctl.c`; the Linux Standard Base has them).
const NOT_RUNNING: u8 = 3;
const NO_DIRECTORY: u8 = 4;
/// How often a wait shows that it goes on.
const DOT_INTERVAL: Duration = Duration::from_secs(1);

/// Tell what runs on a directory, and how far it is; without, what the directory is
///
/// Where the process serves HTTP (--http), it is asked how it stands. Exit codes, as of pg_ctl status: 0 walrider runs; 3 it
/// does not; 4 there is no such directory.
#[derive(Args)]
pub struct StatusArgs {
    /// The data directory, or that of walrider receive or relay
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Stop what runs on a directory, cleanly, and wait until it has handed the directory over
///
/// That is walrider standby, replay, receive or relay. A replay without --follow ends at once; nothing is lost, and the same command
/// goes on where it was.
#[derive(Args)]
pub struct StopArgs {
    /// The data directory, or that of walrider receive or relay
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
    #[command(flatten)]
    wait: WaitArgs,
}

/// How long a command waits for what it has asked for.
#[derive(Args)]
pub struct WaitArgs {
    /// How long to wait
    #[arg(short, long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    timeout: Duration,
    /// Do not wait
    #[arg(short = 'W', long)]
    no_wait: bool,
}

impl WaitArgs {
    /// `None`: not at all.
    pub fn timeout(&self) -> Option<Duration> {
        (!self.no_wait).then_some(self.timeout)
    }
}

/// Runs `walrider reload`.
pub fn reload(args: &TellArgs) -> ExitCode {
    let told = Running::expect(&args.data_dir, &[Kind::Standby, Kind::Relay], "standby or relay");
    finish(told.and_then(|standby| standby.signal(Signal::HUP)))
}

/// Runs `walrider stop`.
pub fn stop(args: &StopArgs) -> ExitCode {
    finish(stop_and_wait(&args.data_dir, args.wait.timeout()))
}

/// The exit code of a command that tells a process something.
pub fn finish(result: Result<(), ControlError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => Failure::new(Exit::Refused, error).complain(),
    }
}

fn stop_and_wait(directory: &Path, timeout: Option<Duration>) -> Result<(), ControlError> {
    let running = Running::expect(
        directory,
        &[Kind::Standby, Kind::Replay, Kind::Receive, Kind::Relay],
        "standby, replay, receive or relay",
    )?;
    let (name, pid) = (running.kind.name(), running.pid());
    running.signal(Signal::TERM)?;
    let Some(timeout) = timeout else { return Ok(()) };
    out::say(format_args!("waiting for walrider {name} to stop "));
    let mut left = timeout;
    while !running.wait(left.min(DOT_INTERVAL))? {
        left = left.saturating_sub(DOT_INTERVAL);
        if left.is_zero() {
            out::say(format_args!(" not yet\n"));
            return Err(ControlError::NotYetStopped { command: name, timeout });
        }
        out::say(format_args!("."));
    }
    // Who takes it next has a lock file of its own.
    let left_behind = std::fs::read_to_string(directory.join("postmaster.pid")).unwrap_or_default();
    let was_killed =
        ![Kind::Receive, Kind::Relay].contains(&running.kind) && left_behind.lines().next() == Some(&format!("-{pid}"));
    match running.kind {
        // It has no handler without --follow: the next run takes the lock file over.
        Kind::Replay if was_killed => {
            out::say(format_args!(" done\nwalrider replay ended; the same command goes on where it was\n"));
        }
        _ if was_killed => {
            out::say(format_args!(" failed\n"));
            return Err(ControlError::NotHandedOver(name));
        }
        _ => out::say(format_args!(" done\nwalrider {name} stopped\n")),
    }
    Ok(())
}

/// Runs `walrider status`.
pub fn status(args: &StatusArgs) -> ExitCode {
    let directory = &args.data_dir;
    let fail =
        |error: &dyn std::fmt::Display, code: u8| Failure::new(Exit::Refused, error).with_code(code).tell(args.json);
    if !directory.is_dir() {
        return fail(&format_args!("directory \"{}\" does not exist", directory.display()), NO_DIRECTORY);
    }
    let running = match Running::find(directory) {
        Ok(running) => running,
        Err(error) => return fail(&error, NO_DIRECTORY),
    };
    let receives = running.as_ref().is_some_and(|running| [Kind::Receive, Kind::Relay].contains(&running.kind));
    let control = match read_control(directory) {
        Ok(control) => Some(control),
        // Also one that has stopped.
        Err(_) if receives || is_of_receiver(directory) => None,
        Err(error) => return fail(&error, NO_DIRECTORY),
    };
    let (told, json) = running.as_ref().and_then(ask).unzip();
    if args.json {
        let object = to_json(directory, running.as_ref(), json, control.as_ref());
        println!("{object}");
    } else {
        let text = to_text(directory, running.as_ref(), told.as_ref(), control.as_ref());
        out::say(format_args!("{text}"));
    }
    match running.map(|running| running.kind) {
        Some(Kind::Standby | Kind::Replay | Kind::Receive | Kind::Relay) => ExitCode::SUCCESS,
        _ => ExitCode::from(NOT_RUNNING),
    }
}

/// Whether `walrider receive` or `walrider relay` has worked there.
fn is_of_receiver(directory: &Path) -> bool {
    directory.join(walrider_standby::RECEIVE_LOCK_FILE).exists()
}

/// What a process tells at its own /status, if it was told to serve that: read, and as it is, with what a newer version may add.
fn ask(running: &Running) -> Option<(StandbyStatus, Value)> {
    let address = match running.command()? {
        Command::Standby(args) => args.http(|path| running.path(path))?,
        Command::Receive(args) => args.upstream.http()?,
        Command::Relay(args) => args.upstream.http()?,
        _ => return None,
    };
    match client::get_status(&address) {
        // Somebody else's port, perhaps.
        Ok(told) => Some(told).filter(|(told, _)| u32::try_from(running.pid()) == Ok(told.pid)),
        Err(error) => {
            failure::warning(format_args!("could not ask process {} at \"{address}\": {error}", running.pid()));
            None
        }
    }
}

/// What the directory is to the server that starts on it next (`readRecoverySignalFile`).
fn role(directory: &Path, control: &ControlFile) -> &'static str {
    let signals = SignalFiles::read(directory).unwrap_or_default();
    let in_recovery = [DbState::InArchiveRecovery, DbState::ShutDownInRecovery].contains(&control.state);
    match BackupLabel::read(directory) {
        _ if signals.standby => "standby",
        _ if signals.recovery => "recovery",
        Ok(Some(_)) => "base backup",
        _ if in_recovery => "recovery without signal file",
        _ => "primary",
    }
}

fn to_json(directory: &Path, running: Option<&Running>, told: Option<Value>, control: Option<&ControlFile>) -> Value {
    let lsn = |lsn: walrider_layout::Lsn| lsn.is_valid().then(|| lsn.to_string());
    json!({
        "schema_version": SCHEMA_VERSION,
        "data_dir": directory.display().to_string(),
        "running": running.is_some_and(|running| ![Kind::Postgres, Kind::Other].contains(&running.kind)),
        "process": running.map(|running| json!({
            "pid": running.pid(),
            "command": running.kind.name(),
            "since": running.since.and_then(|time| jiff::Timestamp::try_from(time).ok()).map(|time| time.to_string()),
        })),
        "status": told,
        "directory": control.map(|control| json!({
            "role": role(directory, control),
            "state": control.state.name(),
            "system_identifier": control.system_identifier.to_string(),
            "timeline": control.checkpoint_copy.timeline.0,
            "checkpoint_lsn": lsn(control.checkpoint),
            "redo_lsn": lsn(control.checkpoint_copy.redo),
            "min_recovery_lsn": lsn(control.min_recovery_point),
        })),
    })
}

fn to_text(
    directory: &Path,
    running: Option<&Running>,
    told: Option<&StandbyStatus>,
    control: Option<&ControlFile>,
) -> String {
    let shown = directory.display();
    let mut text = match running {
        Some(running) => {
            let who = match running.kind {
                Kind::Postgres => "PostgreSQL".to_owned(),
                Kind::Other => "neither walrider nor PostgreSQL".to_owned(),
                kind => format!("walrider {}", kind.name()),
            };
            let since = running.since.and_then(|time| jiff::Timestamp::try_from(time).ok());
            let since =
                since.map_or(String::new(), |time| format!(", since {}", time.strftime("%Y-%m-%d %H:%M:%S UTC")));
            format!("{who} runs on \"{shown}\" (process {}{since})\n", running.pid())
        }
        None => format!("nothing runs on \"{shown}\"\n"),
    };
    let mut line = |rest: std::fmt::Arguments<'_>| writeln!(text, "{rest}").expect("a string takes all");
    if let Some(told) = told {
        line(format_args!("state: {}", told.state));
        if let Some(primary) = &told.primary {
            line(format_args!("primary: {primary}, as {}", told.application_name.as_deref().unwrap_or("unknown")));
        }
        for (stage, position) in told.positions.stages() {
            let Some(lsn) = position.lsn else { continue };
            let behind = position.behind_bytes.map_or(String::new(), |behind| format!(" ({behind} bytes behind)"));
            line(format_args!("{stage}: {lsn}{behind}"));
        }
        if let Some(error) = &told.last_error {
            line(format_args!("last error: {}", error.message));
        }
    }
    if let Some(control) = control {
        let checkpoint = &control.checkpoint_copy;
        line(format_args!(
            "directory: {}, \"{}\", timeline {}",
            role(directory, control),
            control.state.name(),
            checkpoint.timeline
        ));
        line(format_args!("recovery begins at: {}", checkpoint.redo));
        if control.min_recovery_point.is_valid() {
            line(format_args!("consistent from: {}", control.min_recovery_point));
        }
    }
    text
}
