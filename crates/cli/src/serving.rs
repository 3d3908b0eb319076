//! What `walrider relay` and `walrider standby` are told about those whom they serve.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Deserializer};
use walrider_relay::acks::{Acks, Quorum};
use walrider_relay::rules::{Rules, RulesError};
use walrider_relay::scram::Mock;
use walrider_relay::service::{Access, ServiceSettings, random_key};
use walrider_relay::tls::{Acceptor, TlsError};
use walrider_standby::RelaySettings;

use crate::values::{duration, parse_duration, parse_size, size};

/// Whom to serve, and how. Each flag is a key of the file, with underscores.
#[derive(Args, Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServingOptions {
    /// Where to serve WAL to standbys, as in 0.0.0.0:5432; several with commas
    #[arg(short, long, value_name = "HOST:PORT,...", requires = "access")]
    pub listen: Option<String>,
    /// Who is served, and how they prove who they are: rules in TOML, as pg_hba.conf has them (docs/relay.md)
    #[arg(short, long, value_name = "FILE")]
    pub access: Option<PathBuf>,
    /// Certificate in PEM, so that connections can be encrypted
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities that clients' certificates are verified with, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_client_ca: Option<PathBuf>,
    /// Most WAL that a slot here holds back (max_slot_wal_keep_size) [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(deserialize_with = "size")]
    pub max_slot_wal_keep_size: Option<u64>,
    /// Answer remote_write only when these have written, too: ANY 1 (a, b), or ALL (a, b), by application_name
    #[arg(long, value_name = "STANDBYS")]
    #[serde(deserialize_with = "quorum")]
    pub ack_write: Option<Quorum>,
    /// Answer synchronous_commit = on only when it is durable on these, too
    #[arg(long, value_name = "STANDBYS")]
    #[serde(deserialize_with = "quorum")]
    pub ack_flush: Option<Quorum>,
    /// Answer remote_apply only when these have applied, too
    #[arg(long, value_name = "STANDBYS")]
    #[serde(deserialize_with = "quorum")]
    pub ack_apply: Option<Quorum>,
    /// Most connections [default: 100]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// Give up a standby that is silent for so long; 0: never (wal_sender_timeout) [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub sender_timeout: Option<Duration>,
}

/// Gives the names of all options to a macro.
macro_rules! each_option {
    ($macro:ident) => {
        $macro! {
            listen access tls_certificate tls_key tls_client_ca max_slot_wal_keep_size ack_write ack_flush ack_apply
            max_connections sender_timeout
        }
    };
}

/// What is wrong with them, or with the files that they name.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// A file cannot be read.
    #[error("could not read \"{}\": {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Rules that make no sense.
    #[error("{}: {source}", path.display())]
    Rules {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: RulesError,
    },
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A rule asks for what there is not.
    #[error("{}: a rule asks for {what}: give {option}", path.display())]
    Missing {
        /// The rules.
        path: PathBuf,
        /// What they want.
        what: &'static str,
        /// The option that gives it.
        option: &'static str,
    },
    /// They do not go together.
    #[error("{0}")]
    Refused(&'static str),
    /// The system has none.
    #[error("could not generate random bytes")]
    Random,
}

/// The files that say who is served.
#[derive(Clone)]
pub struct AccessFiles {
    rules: PathBuf,
    tls: Option<(PathBuf, PathBuf, Option<PathBuf>)>,
    /// As long as the process: an answer that changes tells that a user is made up.
    mock_key: [u8; 32],
}

impl ServingOptions {
    /// What this says, and where it says nothing, the other.
    pub fn or(self, other: ServingOptions) -> ServingOptions {
        macro_rules! first {
            ($($field:ident)*) => { ServingOptions { $($field: self.$field.or(other.$field),)* } };
        }
        each_option!(first)
    }

    /// The names of those that `other` has otherwise.
    pub fn differing(&self, other: &ServingOptions) -> Vec<&'static str> {
        macro_rules! compare {
            ($($field:ident)*) => { [$((stringify!($field), self.$field == other.$field)),*] };
        }
        each_option!(compare).into_iter().filter(|(_, same)| !same).map(|(name, _)| name).collect()
    }

    /// How to serve; `None`: nobody is to be served. `keep`: WAL that stays for nobody.
    ///
    /// # Errors
    /// They do not go together.
    pub fn resolve(&self, keep: u64) -> Result<Option<(RelaySettings, AccessFiles)>, ServingError> {
        let listen = self.listen.as_deref().unwrap_or_default().split(',').map(str::trim).filter(|one| !one.is_empty());
        let listen: Vec<String> = listen.map(str::to_owned).collect();
        if listen.is_empty() {
            let rest = ServingOptions { listen: None, ..self.clone() };
            return match rest == ServingOptions::default() {
                true => Ok(None),
                false => Err(ServingError::Refused("listen says where to serve; without it nobody is served")),
            };
        }
        let rules = self
            .access
            .clone()
            .ok_or(ServingError::Refused("listen needs access: the rules that say who is served"))?;
        let tls = match (&self.tls_certificate, &self.tls_key) {
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone(), self.tls_client_ca.clone())),
            (None, None) if self.tls_client_ca.is_none() => None,
            _ => {
                return Err(ServingError::Refused(
                    "tls_certificate and tls_key go together, and tls_client_ca with both",
                ));
            }
        };
        let settings = RelaySettings {
            listen,
            keep,
            max_slot_keep: self.max_slot_wal_keep_size,
            acks: Acks { write: self.ack_write.clone(), flush: self.ack_flush.clone(), apply: self.ack_apply.clone() },
            service: ServiceSettings {
                max_connections: self.max_connections.unwrap_or(100),
                sender_timeout: self.sender_timeout.unwrap_or(Duration::from_secs(60)),
            },
        };
        let mock_key = random_key().ok_or(ServingError::Random)?;
        Ok(Some((settings, AccessFiles { rules, tls, mock_key })))
    }
}

impl AccessFiles {
    /// Where the rules are.
    pub fn rules(&self) -> &Path {
        &self.rules
    }

    /// Reads them.
    ///
    /// # Errors
    /// One cannot be read, or makes no sense.
    pub fn read(&self) -> Result<Access, ServingError> {
        let path = &self.rules;
        let text = fs::read_to_string(path).map_err(|source| ServingError::Read { path: path.clone(), source })?;
        let mode = fs::metadata(path).map(|found| found.permissions().mode());
        if mode.is_ok_and(|mode| mode & 0o077 != 0) {
            tracing::warn!(
                "\"{}\" can be read by others: who has a secret of it can try passwords against that",
                path.display()
            );
        }
        let rules = Rules::parse(&text).map_err(|source| ServingError::Rules { path: path.clone(), source })?;
        let missing = |what, option| ServingError::Missing { path: path.clone(), what, option };
        let tls = match &self.tls {
            Some((certificate, key, ca)) => Some(Acceptor::load(certificate, key, ca.as_deref())?),
            None if rules.needs_tls() => return Err(missing("TLS", "--tls-certificate and --tls-key")),
            None => None,
        };
        if rules.needs_client_ca() && !tls.as_ref().is_some_and(Acceptor::verifies_clients) {
            return Err(missing("clients' certificates", "--tls-client-ca"));
        }
        let mock = Mock::new(&self.mock_key, rules.secrets());
        Ok(Access { rules, tls, mock })
    }

    /// Reads them again for a relay that runs; what is wrong now is said, and what was right before stays.
    pub fn reload(&self, relay: &walrider_standby::Relay) {
        match self.read() {
            Ok(access) => {
                relay.set_access(access);
                tracing::info!("read \"{}\" again: it counts for new connections", self.rules().display());
            }
            Err(error) => tracing::error!("{error}; what was read before still counts"),
        }
    }
}

fn quorum<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Quorum>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}
