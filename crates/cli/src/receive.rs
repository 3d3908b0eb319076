//! `walrider receive`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tracing_subscriber::filter::LevelFilter;
use walrider_archive::ArchiveError;
use walrider_layout::Lsn;
use walrider_standby::{Receive, ReceiveSettings, StandbyError, describe_primary};

use crate::archiving::ArchivingOptions;
use crate::logging::{self, LogFormat, parse_level};
use crate::service::{self, ServiceError, Wish};
use crate::values::{parse_duration, parse_slot};

/// `application_name` where the connection string has none.
const APPLICATION_NAME: &str = "walrider";

/// Receive WAL into a directory and acknowledge it, without replaying it, as pg_receivewal --synchronous does
///
/// Segments are named as in pg_wal; the one being written ends in .partial. WAL goes on where the directory ends; in an
/// empty one, where the slot stands, else at the primary's position. Writing never waits for an fsync, so
/// synchronous_commit = remote_write does not either. The application_name is "walrider" unless CONNINFO says otherwise.
///
/// SIGTERM and SIGINT stop it, and what came in is durable then.
#[derive(Args)]
pub struct ReceiveArgs {
    #[command(flatten)]
    pub upstream: UpstreamArgs,
    /// End when the connection is lost
    #[arg(short, long)]
    no_loop: bool,
    /// End when everything up to this position is durable
    #[arg(short = 'E', long, value_name = "LSN")]
    endpos: Option<Lsn>,
}

/// What `walrider receive` and `walrider relay` are told alike.
#[derive(Args)]
pub struct UpstreamArgs {
    /// How to connect to the primary; libpq's PG… variables, password and service files count too
    #[arg(short, long, value_name = "CONNINFO")]
    dbname: Option<String>,
    /// Where the segments go
    #[arg(short = 'D', long, value_name = "DIRECTORY")]
    directory: PathBuf,
    /// Replication slot of the primary
    #[arg(short = 'S', long, value_name = "NAME", value_parser = parse_slot)]
    slot: Option<String>,
    /// Create the slot first
    #[arg(long, requires = "slot")]
    create_slot: bool,
    /// With --create-slot: do not fail if the slot is there
    #[arg(long, requires = "create_slot")]
    if_not_exists: bool,
    #[command(flatten)]
    archiving: ArchivingOptions,
    /// Tell the primary at least this often how far it is; 0: only when something moved or it asks
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    status_interval: Duration,
    /// Give up a connection that is silent for so long; 0: never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    receiver_timeout: Duration,
    /// Wait so long before connecting again
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    retry_interval: Duration,
    /// Serve /metrics, /health and /status there, as in 127.0.0.1:9187
    #[arg(long, value_name = "ADDR:PORT")]
    http: Option<String>,
    /// Form of the log, on stderr
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text")]
    log_format: LogFormat,
    /// How much is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = parse_level)]
    log_level: LevelFilter,
}

impl UpstreamArgs {
    /// Where the segments go.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where it serves HTTP, if that was asked for.
    pub fn http(&self) -> Option<String> {
        self.http.clone()
    }

    /// Starts the log, and says what begins.
    pub fn begin(&self, command: &str) {
        logging::start(self.log_format, self.log_level);
        tracing::info!(
            "starting walrider {command} {}: directory \"{}\", primary {}, {}",
            env!("CARGO_PKG_VERSION"),
            self.directory.display(),
            describe_primary(self.dbname.as_deref().unwrap_or_default(), APPLICATION_NAME),
            self.slot.as_ref().map_or("no slot".to_owned(), |slot| format!("slot \"{slot}\""))
        );
    }

    /// What receiving is told: it connects again and again, and has no end.
    ///
    /// # Errors
    /// Options that do not go together.
    pub fn settings(self) -> Result<ReceiveSettings, ArchiveError> {
        Ok(ReceiveSettings {
            archive: self.archiving.resolve()?,
            directory: self.directory,
            primary: self.dbname,
            slot: self.slot.filter(|name| !name.is_empty()),
            create_slot: self.create_slot,
            if_not_exists: self.if_not_exists,
            reconnect: true,
            end: None,
            status_interval: self.status_interval,
            receiver_timeout: self.receiver_timeout,
            retry_interval: self.retry_interval,
            application_name_fallback: APPLICATION_NAME.to_owned(),
        })
    }
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Service(#[from] ServiceError),
    #[error(transparent)]
    Receive(#[from] StandbyError),
}

/// Runs the command.
pub fn run(args: ReceiveArgs) -> ExitCode {
    args.upstream.begin("receive");
    match receive(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            let is_usage = matches!(&error, RunError::Receive(error) if error.is_usage());
            ExitCode::from(if is_usage { 2 } else { 1 })
        }
    }
}

fn receive(args: ReceiveArgs) -> Result<(), RunError> {
    let http = args.upstream.http();
    let settings = args.upstream.settings().map_err(StandbyError::from)?;
    let receive = Receive::new(ReceiveSettings { reconnect: !args.no_loop, end: args.endpos, ..settings })?;
    let (told, observed) = (receive.clone(), receive.clone());
    let _http = service::start(http.as_deref(), Arc::new(move || observed.status()), move |wish| {
        // There is nothing to reload, to promote or to pause.
        if wish == Wish::Stop {
            told.stop();
        }
    })?;
    Ok(receive.run()?)
}
