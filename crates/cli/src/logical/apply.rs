//! `walrider logical apply`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::LevelFilter;
use walrider_layout::Lsn;
use walrider_logical::apply::{Apply, ApplyError, Ended, OnConflict, Settings};
use walrider_observe::status::Time;

use crate::logging::{self, LogFormat, parse_level};
use crate::service::{self, ServiceError, Wish};
use crate::values::{parse_duration, parse_size, parse_slot};

/// Apply what a logical slot sends to another server, many transactions at a time
///
/// Transactions that touch different rows are executed side by side, and commit in the publisher's order. Several small ones may
/// become one on the target; never a part of one. Replication origins on the target make sure that nothing is applied twice or
/// lost, whatever crashes.
///
/// Both sides have the same tables. `walrider logical setup` makes the publication and the slot, with the copy of the tables that
/// fits to it.
///
/// SIGTERM and SIGINT stop it, and the same command goes on where it stopped. SIGUSR2 pauses it, and SIGUSR1 has it go on, as
/// `walrider logical pause` and `resume` do.
#[derive(Args)]
pub struct ApplyArgs {
    /// How to connect to the publisher, with the database of the slot
    #[arg(long, value_name = "CONNINFO")]
    source: String,
    /// How to connect to the target
    #[arg(long, value_name = "CONNINFO")]
    target: String,
    /// Logical replication slot of the publisher, with the plugin pgoutput or walrider_pgoutput
    #[arg(short = 'S', long, value_name = "NAME", value_parser = parse_slot)]
    pub slot: String,
    /// Publications, separated by commas
    #[arg(short = 'P', long = "publication", value_name = "NAME", value_delimiter = ',', required = true)]
    publications: Vec<String>,
    /// Names the replication origins on the target; the slot's name unless it is given
    #[arg(long, value_name = "NAME", value_parser = parse_slot)]
    pub origin: Option<String>,
    /// How many sessions execute on the target
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// Changes that become one transaction on the target, at most, unless one of the publisher has more
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Memory for transactions that have not ended; what does not fit goes to files
    #[arg(long, value_name = "SIZE", default_value = "64MB", value_parser = parse_size)]
    memory: u64,
    /// Where those files are, which have no name
    #[arg(long, value_name = "DIRECTORY", default_value_os_t = std::env::temp_dir())]
    spill_dir: PathBuf,
    /// What to do with a row that is there already, or with another row's unique value; one that is missing is skipped and counted
    #[arg(long, value_name = "POLICY", value_enum, default_value = "error")]
    on_conflict: Policy,
    /// End when everything up to this position is applied and durable
    #[arg(long, value_name = "LSN")]
    until: Option<Lsn>,
    /// Leave out the transaction that committed at this position, as an error names it
    #[arg(long, value_name = "LSN")]
    skip: Option<Lsn>,
    /// Whether each commit on the target waits until it is durable. The publisher is told only of what is, in any case
    #[arg(long, value_name = "on|off", value_enum, default_value = "off")]
    synchronous_commit: Switch,
    /// Changes that came to the publisher by replication: apply any, or none of them
    #[arg(long, value_name = "any|none", value_enum, default_value = "any")]
    source_origin: SourceOrigin,
    /// Whether the publisher sends large transactions while they run
    #[arg(long, value_name = "on|off", value_enum, default_value = "on")]
    streaming: Switch,
    /// How long the slot or an origin may be in use by somebody else: sessions of one that was killed take a while to end
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration)]
    in_use_timeout: Duration,
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

/// What to do with rows that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    /// Stop, and say which row
    Error,
    /// Leave the change out, and count it
    Skip,
    /// The change counts that was committed later, by the clocks of both servers; the target needs track_commit_timestamp
    LastUpdateWins,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SourceOrigin {
    Any,
    None,
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Service(#[from] ServiceError),
    #[error(transparent)]
    Apply(Box<ApplyError>),
}

impl From<ApplyError> for RunError {
    fn from(error: ApplyError) -> RunError {
        RunError::Apply(Box::new(error))
    }
}

/// Bytes in a batch: enough that a round trip does not count.
const BATCH_BYTES: usize = 4 << 20;

/// Runs the command.
pub fn run(args: ApplyArgs) -> ExitCode {
    logging::start(args.log_format, args.log_level);
    match apply(args) {
        Ok(Ended::Stopped) => {
            tracing::info!("stopped");
            ExitCode::SUCCESS
        }
        Ok(Ended::Reached) => {
            tracing::info!("everything up to the wanted position is applied");
            ExitCode::SUCCESS
        }
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(1)
        }
    }
}

fn apply(args: ApplyArgs) -> Result<Ended, RunError> {
    let started = Time::now();
    let apply = Apply::new(Settings {
        source: args.source,
        target: args.target,
        origin: args.origin.unwrap_or_else(|| args.slot.clone()),
        slot: args.slot,
        publications: args.publications,
        any_origin: args.source_origin == SourceOrigin::Any,
        jobs: args.jobs.into(),
        batch_rows: args.batch.into(),
        batch_bytes: BATCH_BYTES,
        memory: usize::try_from(args.memory).unwrap_or(usize::MAX),
        spill_dir: args.spill_dir,
        on_conflict: match args.on_conflict {
            Policy::Error => OnConflict::Error,
            Policy::Skip => OnConflict::Skip,
            Policy::LastUpdateWins => OnConflict::LastUpdateWins,
        },
        until: args.until,
        skip: args.skip,
        synchronous_commit: args.synchronous_commit == Switch::On,
        streaming: args.streaming == Switch::On,
        in_use: args.in_use_timeout,
    })?;
    let (told, observed) = (apply.clone(), apply.clone());
    let status = Arc::new(move || observed.status(env!("CARGO_PKG_VERSION"), started));
    let _http = service::start(args.http.as_deref(), status, move |wish| match wish {
        Wish::Stop => told.stop(),
        // `walrider logical pause` and `resume`.
        Wish::Look => told.pause(true),
        Wish::Promote => told.pause(false),
        Wish::Reload => {}
    })?;
    Ok(apply.run()?)
}
