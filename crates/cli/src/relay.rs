//! `walrider relay`.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use walrider_standby::{Relay, StandbyError};

use crate::receive::UpstreamArgs;
use crate::service::{self, ServiceError, Wish};
use crate::serving::{ServingError, ServingOptions};
use crate::values::parse_size;

const DEFAULT_WAL_KEEP_SIZE: u64 = 1 << 30;

/// Receive WAL into a directory, and serve it to PostgreSQL standbys, pg_receivewal and other relays
///
/// The primary has one stream, across the distance once. Standbys have the relay as their primary_conninfo, with slots of the
/// relay if they like; what they tell of their queries (hot_standby_feedback) goes on to the primary. They get only what is durable
/// on the primary. When the primary dies, the relay serves on what it has, and follows the new timeline from wherever CONNINFO
/// leads.
///
/// Commits of the primary wait for the relay's own disk, unless --ack-write, --ack-flush or --ack-apply name standbys. It answers
/// remote_apply only with --ack-apply: it applies nothing itself.
///
/// It needs --listen and --access. The primary knows it by the application_name of CONNINFO, which is "walrider" unless given.
/// SIGHUP, or walrider reload, reads --access and the certificates again.
#[derive(Args)]
pub struct RelayArgs {
    #[command(flatten)]
    pub upstream: UpstreamArgs,
    #[command(flatten)]
    serving: ServingOptions,
    /// WAL that stays although no slot needs it, as wal_keep_size; what is older is removed [default: 1GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    wal_keep_size: Option<u64>,
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Service(#[from] ServiceError),
    #[error(transparent)]
    Receive(#[from] StandbyError),
    #[error(transparent)]
    Serving(#[from] ServingError),
}

/// Runs the command.
pub fn run(args: RelayArgs) -> ExitCode {
    args.upstream.begin("relay");
    match relay(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            let is_usage = match &error {
                RunError::Receive(error) => error.is_usage(),
                RunError::Serving(_) => true,
                RunError::Service(_) => false,
            };
            ExitCode::from(if is_usage { 2 } else { 1 })
        }
    }
}

fn relay(args: RelayArgs) -> Result<(), RunError> {
    let serving = args.serving.resolve(args.wal_keep_size.unwrap_or(DEFAULT_WAL_KEEP_SIZE))?;
    let (settings, files) = serving.ok_or(ServingError::Refused("a relay needs --listen and --access"))?;
    if args.wal_keep_size.is_none() {
        Relay::refuse_anothers_wal(args.upstream.directory())?;
    }
    let http = args.upstream.http();
    let receive = args.upstream.settings().map_err(StandbyError::from)?;
    let (receive, relay) = Relay::start(receive, settings, files.read()?)?;
    let (told, served, observed) = (receive.clone(), relay.clone(), receive.clone());
    let _http = service::start(http.as_deref(), Arc::new(move || observed.status()), move |wish| match wish {
        Wish::Stop => {
            served.stop();
            told.stop();
        }
        Wish::Reload => files.reload(&served),
        Wish::Promote | Wish::Look => {}
    })?;
    let ended = receive.run();
    relay.stop();
    Ok(ended?)
}
