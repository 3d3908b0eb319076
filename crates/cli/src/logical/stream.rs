//! `walrider logical stream`.

mod measure;
mod output;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::LevelFilter;
use walrider_layout::Lsn;
use walrider_logical::journal::{Header, Journal};
use walrider_logical::message::Protocol;
use walrider_logical::source::{self, SourceError, SourceOptions, StreamingMode, Timing};
use walrider_logical::stream::{Stream, StreamError, insist};
use walrider_session::{ConnectError, ConnectOptions};

use crate::failure::{Exit, Failure};
use crate::logging::{self, LogFormat, parse_level};
use crate::values::{parse_duration, parse_slot};
use measure::Meter;
use output::Printer;

/// `application_name` where the connection string has none.
const APPLICATION_NAME: &str = "walrider logical stream";

/// Print what a logical slot sends as JSON, an object on each line, or count it
///
/// The slot's plugin is pgoutput or walrider_pgoutput. docs/logical.md says what the lines mean.
///
/// The publisher is told what it need not send again when it was written to the standard output, or is durable in --file. A file
/// goes on after any crash with nothing lost or twice: what is not complete at its end is cut off, and the stream goes on from
/// there.
///
/// SIGTERM and SIGINT stop it cleanly, and so does a reader that closes the standard output.
#[derive(Args)]
pub struct StreamArgs {
    /// How to connect to the publisher, with the slot's database; libpq's PG… variables, password and service files count too
    #[arg(short, long, value_name = "CONNINFO")]
    dbname: Option<String>,
    /// Logical replication slot of the publisher
    #[arg(short = 'S', long, value_name = "NAME", value_parser = parse_slot)]
    slot: String,
    /// Publications, separated by commas; without one, with --create-slot, the slot is made and nothing else
    #[arg(short = 'P', long = "publication", value_name = "NAME", value_delimiter = ',', required_unless_present_any = ["create_slot", "drop_slot"])]
    publications: Vec<String>,
    /// Create the slot first
    #[arg(long)]
    create_slot: bool,
    /// With --create-slot: do not fail if the slot is there
    #[arg(long, requires = "create_slot")]
    if_not_exists: bool,
    /// With --create-slot: the output plugin
    #[arg(long, value_name = "PLUGIN", default_value = "pgoutput", value_parser = source::PLUGINS)]
    plugin: String,
    /// With --create-slot: prepared transactions are sent when they are prepared
    #[arg(short = 't', long, requires = "create_slot")]
    two_phase: bool,
    /// Drop the slot, and nothing else
    #[arg(long, conflicts_with_all = ["create_slot", "publications"])]
    drop_slot: bool,
    /// Version of the plugin's protocol, 1 to 4
    #[arg(long, value_name = "N", default_value = "4", value_parser = parse_protocol)]
    protocol: Protocol,
    /// Whether large transactions are sent while they run: off, on, or parallel (aborts say where and when)
    #[arg(long, value_name = "MODE", value_enum, default_value = "off")]
    streaming: Streaming,
    /// Values in binary form, printed as hexadecimal digits
    #[arg(long)]
    binary: bool,
    /// What pg_logical_emit_message writes, too
    #[arg(long)]
    messages: bool,
    /// Changes that came to the publisher by replication: any, or none of them
    #[arg(long, value_name = "any|none", value_enum, default_value = "any")]
    origin: Origin,
    /// What was committed before this position is not wanted; the slot's position counts if it is later
    #[arg(short = 'I', long, value_name = "LSN", visible_alias = "start", conflicts_with = "file")]
    startpos: Option<Lsn>,
    /// End when everything committed before this position is written
    #[arg(short = 'E', long, value_name = "LSN")]
    endpos: Option<Lsn>,
    /// Write lines into this file, and go on where it ends
    #[arg(short, long, value_name = "FILE", conflicts_with = "measure")]
    file: Option<PathBuf>,
    /// Confirm nothing: all of it comes again next time
    #[arg(long)]
    peek: bool,
    /// Count messages, bytes, transactions and empty ones instead of printing them
    #[arg(long)]
    measure: bool,
    /// With --measure: print so often; 0: only at the end
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    interval: Duration,
    /// With --measure: print JSON objects
    #[arg(long, requires = "measure")]
    json: bool,
    /// End when the connection is lost
    #[arg(short, long)]
    no_loop: bool,
    /// Tell the publisher at least this often how far it is; 0: only when something moved or it asks
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    status_interval: Duration,
    /// Give up a connection that is silent for so long; 0: never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    receiver_timeout: Duration,
    /// Wait so long before connecting again
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    retry_interval: Duration,
    /// Form of the log, on stderr
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text")]
    log_format: LogFormat,
    /// How much is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = parse_level)]
    log_level: LevelFilter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Streaming {
    Off,
    On,
    Parallel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Origin {
    Any,
    None,
}

fn parse_protocol(text: &str) -> Result<Protocol, String> {
    let protocol = text.parse().ok().and_then(Protocol::from_number);
    protocol.ok_or_else(|| "expected a number from 1 to 4".into())
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("{0}")]
    Usage(&'static str),
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("could not handle signals: {0}")]
    Signals(#[from] io::Error),
}

impl From<SourceError> for RunError {
    fn from(error: SourceError) -> RunError {
        StreamError::from(error).into()
    }
}

impl From<ConnectError> for RunError {
    fn from(error: ConnectError) -> RunError {
        SourceError::from(error).into()
    }
}

impl RunError {
    fn exit(&self) -> Exit {
        match self {
            RunError::Usage(_) => Exit::Usage,
            RunError::Stream(StreamError::Source(SourceError::Connect(ConnectError::Config(_)))) => Exit::Usage,
            _ => Exit::Refused,
        }
    }
}

/// Runs the command.
pub fn run(args: StreamArgs) -> ExitCode {
    logging::start(args.log_format, args.log_level);
    let json = args.json;
    match stream(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => Failure::new(error.exit(), &error).tell(json),
    }
}

fn stream(args: StreamArgs) -> Result<(), RunError> {
    args.check()?;
    let interrupt = interrupt()?;
    let conninfo = args.dbname.as_deref().unwrap_or_default();
    let mut connect = ConnectOptions::resolve_for_database(conninfo, APPLICATION_NAME)?;
    connect.interrupt_with(interrupt.clone());
    connect.give_up_after(args.receiver_timeout);
    connect.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    if args.drop_slot {
        return Ok(source::drop_slot(&connect, &args.slot)?);
    }
    if args.create_slot {
        match source::create_slot(&connect, &args.slot, &args.plugin, args.two_phase, args.if_not_exists)? {
            Some(at) => tracing::info!("created replication slot \"{}\" at {at}", args.slot),
            None => tracing::info!("replication slot \"{}\" is there already", args.slot),
        }
        if args.publications.is_empty() {
            return Ok(());
        }
    }
    let mut stream = Stream {
        options: args.options(),
        reconnect: (!args.no_loop).then_some(args.retry_interval),
        end: args.endpos,
        confirm: !args.peek,
        connect,
    };
    if args.measure {
        let mut meter = Meter::new(conninfo, &interrupt, args.interval, args.json);
        let ended = stream.run(&mut meter, &interrupt);
        meter.finish();
        return Ok(ended?);
    }
    let mut printer = match &args.file {
        None => Printer::to_stdout(),
        Some(path) => {
            let ask = || Ok(source::confirmed(&stream.connect, &args.slot)?);
            let Some((system, confirmed)) = insist(stream.reconnect, &interrupt, ask)? else { return Ok(()) };
            let system_identifier = system.system_identifier;
            let database = stream.connect.database().to_owned();
            let journal =
                Journal::open(path, &Header { system_identifier, database, slot: args.slot.clone() }, confirmed);
            let journal = journal.map_err(StreamError::from)?;
            stream.options.system_identifier = Some(system_identifier);
            stream.options.start = journal.resume_at();
            Printer::to_file(journal)
        }
    };
    Ok(stream.run(&mut printer, &interrupt)?)
}

impl StreamArgs {
    /// What clap cannot tell.
    fn check(&self) -> Result<(), RunError> {
        let least = match self.streaming {
            Streaming::Off => Protocol::V1,
            Streaming::On => Protocol::V2,
            Streaming::Parallel => Protocol::V4,
        };
        if self.protocol < least {
            return Err(RunError::Usage("--streaming=on needs --protocol 2 or newer, and parallel needs 4"));
        }
        if self.two_phase && self.protocol < Protocol::V3 {
            return Err(RunError::Usage("--two-phase needs --protocol 3 or newer"));
        }
        if self.slot.is_empty() || self.publications.iter().any(String::is_empty) {
            return Err(RunError::Usage("a name is empty"));
        }
        Ok(())
    }

    fn options(&self) -> SourceOptions {
        SourceOptions {
            slot: self.slot.clone(),
            start: self.startpos.unwrap_or_default(),
            system_identifier: None,
            protocol: self.protocol,
            publications: self.publications.clone(),
            streaming: match self.streaming {
                Streaming::Off => StreamingMode::Off,
                Streaming::On => StreamingMode::On,
                Streaming::Parallel => StreamingMode::Parallel,
            },
            binary: self.binary,
            messages: self.messages,
            any_origin: self.origin == Origin::Any,
            timing: Timing { status_interval: self.status_interval, timeout: self.receiver_timeout },
        }
    }
}

/// Readable from the first SIGINT or SIGTERM on.
fn interrupt() -> io::Result<Arc<OwnedFd>> {
    let (read, write) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGINT, write.try_clone()?)?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGTERM, write)?;
    Ok(Arc::new(read.into()))
}
