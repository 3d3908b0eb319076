//! `walrider relay`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use walrider_relay::acks::{Acks, Quorum};
use walrider_relay::rules::{Rules, RulesError};
use walrider_relay::scram::Mock;
use walrider_relay::service::{Access, ServiceSettings, random_key};
use walrider_relay::tls::{Acceptor, TlsError};
use walrider_standby::{Receive, Relay, RelaySettings, StandbyError};

use crate::receive::UpstreamArgs;
use crate::service::{self, ServiceError, Wish};
use crate::values::{parse_duration, parse_size};

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
/// SIGHUP, or walrider reload, reads --access and the certificates again.
#[derive(Args)]
pub struct RelayArgs {
    #[command(flatten)]
    upstream: UpstreamArgs,
    /// Where to listen, as in 0.0.0.0:5432; may be repeated
    #[arg(short, long, value_name = "HOST:PORT", required = true)]
    listen: Vec<String>,
    /// Who is served, and how they prove who they are: rules in TOML, as pg_hba.conf has them; see the manual
    #[arg(short, long, value_name = "FILE")]
    access: PathBuf,
    /// Certificate of the relay, in PEM: connections can be encrypted
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Certificates of the authorities that clients' certificates are verified with, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_client_ca: Option<PathBuf>,
    /// WAL that stays although no slot needs it, as wal_keep_size
    #[arg(long, value_name = "SIZE", default_value = "1GB", value_parser = parse_size)]
    wal_keep_size: u64,
    /// Most WAL that a slot of the relay holds back, as max_slot_wal_keep_size [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_slot_wal_keep_size: Option<u64>,
    /// Answer remote_write only when these have written, too: ANY 1 (a, b), or ALL (a, b), by application_name
    #[arg(long, value_name = "STANDBYS")]
    ack_write: Option<Quorum>,
    /// Answer synchronous_commit = on only when it is durable on these, too
    #[arg(long, value_name = "STANDBYS")]
    ack_flush: Option<Quorum>,
    /// Answer remote_apply when these have applied
    #[arg(long, value_name = "STANDBYS")]
    ack_apply: Option<Quorum>,
    /// Most connections
    #[arg(long, value_name = "N", default_value_t = 100)]
    max_connections: usize,
    /// Give up a standby that is silent for so long; 0: never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    sender_timeout: Duration,
}

impl RelayArgs {
    /// Where the segments go.
    pub fn directory(&self) -> &Path {
        self.upstream.directory()
    }

    /// Where it serves HTTP, if that was asked for.
    pub fn http(&self) -> Option<String> {
        self.upstream.http()
    }
}

/// Files that say who is served.
#[derive(Clone)]
struct AccessFiles {
    rules: PathBuf,
    tls: Option<(PathBuf, PathBuf, Option<PathBuf>)>,
    /// As long as the process: an answer that changes tells that a user is made up.
    mock_key: [u8; 32],
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Service(#[from] ServiceError),
    #[error(transparent)]
    Receive(#[from] StandbyError),
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// What is wrong with the files that say who is served.
#[derive(Debug, thiserror::Error)]
enum AccessError {
    #[error("could not read \"{}\": {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Rules { path: PathBuf, source: RulesError },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{}: a rule asks for {what}: give {option}", path.display())]
    Missing { path: PathBuf, what: &'static str, option: &'static str },
    #[error("could not generate random bytes")]
    Random,
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
                RunError::Access(_) => true,
                RunError::Service(_) => false,
            };
            ExitCode::from(if is_usage { 2 } else { 1 })
        }
    }
}

fn relay(args: RelayArgs) -> Result<(), RunError> {
    let files = AccessFiles {
        rules: args.access,
        tls: args.tls_certificate.zip(args.tls_key).map(|(certificate, key)| (certificate, key, args.tls_client_ca)),
        mock_key: random_key().ok_or(AccessError::Random)?,
    };
    let settings = RelaySettings {
        listen: args.listen,
        keep: args.wal_keep_size,
        max_slot_keep: args.max_slot_wal_keep_size,
        acks: Acks { write: args.ack_write, flush: args.ack_flush, apply: args.ack_apply },
        service: ServiceSettings {
            max_connections: args.max_connections,
            sender_timeout: args.sender_timeout,
            authentication_timeout: Duration::from_secs(60),
        },
    };
    let http = args.upstream.http();
    let (receive, relay) = Relay::start(args.upstream.settings(), settings, files.read()?)?;
    let (told, served, observed) = (receive.clone(), relay.clone(), receive.clone());
    let _http = service::start(http.as_deref(), Arc::new(move || observed.status()), move |wish| match wish {
        Wish::Stop => stop(&told, &served),
        Wish::Reload => match files.read() {
            Ok(access) => {
                served.set_access(access);
                tracing::info!("read \"{}\" again: it counts for new connections", files.rules.display());
            }
            Err(error) => tracing::error!("{error}; what was read before still counts"),
        },
        Wish::Promote | Wish::Look => {}
    })?;
    let ended = receive.run();
    relay.stop();
    Ok(ended?)
}

fn stop(receive: &Receive, relay: &Relay) {
    relay.stop();
    receive.stop();
}

impl AccessFiles {
    fn read(&self) -> Result<Access, AccessError> {
        let path = &self.rules;
        let text = fs::read_to_string(path).map_err(|source| AccessError::Read { path: path.clone(), source })?;
        let rules = Rules::parse(&text).map_err(|source| AccessError::Rules { path: path.clone(), source })?;
        let missing = |what, option| AccessError::Missing { path: path.clone(), what, option };
        let tls = match &self.tls {
            Some((certificate, key, ca)) => Some(Acceptor::load(certificate, key, ca.as_deref())?),
            None if rules.needs_tls() => return Err(missing("TLS", "--tls-certificate and --tls-key")),
            None => None,
        };
        let has_ca = self.tls.as_ref().is_some_and(|(_, _, ca)| ca.is_some());
        if rules.needs_client_ca() && !has_ca {
            return Err(missing("clients' certificates", "--tls-client-ca"));
        }
        let mock = Mock::new(&self.mock_key, rules.secrets());
        Ok(Access { rules, tls, mock })
    }
}
