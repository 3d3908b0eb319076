//! What a standby is told.

use std::path::PathBuf;
use std::time::Duration;

use walrider_archive::archiver::ArchiverSettings;
use walrider_datadir::held::shown;
use walrider_datadir::recovery_settings::TargetTimeline;
use walrider_replay::startup::{NamedArchive, SpillOptions};
use walrider_session::{ConnectError, ConnectOptions};
use walrider_wire::pulse::Timing;

use crate::turns::Limits;

/// Whether WAL is to come before the primary has flushed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyMode {
    /// Where the primary has the extension.
    #[default]
    Auto,
    /// Or not at all.
    On,
    /// Never.
    Off,
}

/// How a standby is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadableSettings {
    /// When the directory changes hands.
    pub limits: Limits,
    /// How to connect to the server on the directory, besides host and port, which are found.
    pub local_conninfo: String,
    /// Bytes of WAL that a slot of the server can hold back (`max_slot_wal_keep_size`).
    pub max_slot_keep: Option<u64>,
}

/// What a standby is told. The command line, its file and the directory's own configuration have been brought together.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The data directory.
    pub data_dir: PathBuf,
    /// `postgresql.conf`, where it is not in the data directory.
    pub config_file: Option<PathBuf>,
    /// Make the directory a standby's if nothing says that it is one (`standby.signal`).
    pub make_standby: bool,
    /// The primary's connection string (`primary_conninfo`); none: WAL comes from an archive only.
    pub primary: Option<String>,
    /// The replication slot (`primary_slot_name`).
    pub slot: Option<String>,
    /// Make the slot if it is not there.
    pub create_slot: bool,
    /// Without a slot, use one that ends with the connection (`wal_receiver_create_temp_slot`).
    pub temporary_slot: bool,
    /// WAL before the primary has flushed it.
    pub early: EarlyMode,
    /// `restore_command`; none: there is none.
    pub restore_command: Option<String>,
    /// How many `restore_command`s may run at once.
    pub fetch_jobs: usize,
    /// `archive_cleanup_command`, run at restartpoints; none: there is none.
    pub archive_cleanup_command: Option<String>,
    /// A directory with WAL, in place of `restore_command`.
    pub wal: Option<PathBuf>,
    /// An archive in place of both.
    pub wal_archive: Option<NamedArchive>,
    /// Where what is received is archived, if anywhere.
    pub archive: Option<ArchiverSettings>,
    /// `wal_receiver_status_interval`; zero: never.
    pub status_interval: Duration,
    /// `wal_receiver_timeout`; zero: never.
    pub receiver_timeout: Duration,
    /// Longest pause between attempts to connect, and how often archives are looked at (`wal_retrieve_retry_interval`).
    pub retry_interval: Duration,
    /// `recovery_min_apply_delay`.
    pub min_apply_delay: Duration,
    /// WAL that is kept before what recovery needs, in bytes (`wal_keep_size`).
    pub wal_keep_bytes: u64,
    /// The timeline to follow.
    pub timeline: TargetTimeline,
    /// Time after which a restartpoint is made.
    pub restartpoint_interval: Duration,
    /// WAL after which a restartpoint is made, in bytes.
    pub restartpoint_wal_bytes: u64,
    /// Memory for pages and WAL, in bytes.
    pub memory_bytes: u64,
    /// Where batches go that are larger than memory.
    pub spill: SpillOptions,
    /// `pg_ctl`, to start a server once promoted, and to be read; none: somebody else does.
    pub pg_ctl: Option<PathBuf>,
    /// PostgreSQL has the directory while it keeps up; none: never.
    pub readable: Option<ReadableSettings>,
    /// `application_name` where the connection string has none.
    pub application_name_fallback: String,
}

/// The servers that a connection string names, and how we appear there, for people; without user and password. What is wrong
/// with it is told when it connects.
pub fn describe_primary(conninfo: &str, application_name_fallback: &str) -> String {
    match ConnectOptions::resolve(conninfo, application_name_fallback) {
        Ok(options) => format!("{} as \"{}\"", options.peers().join(", "), options.application_name()),
        Err(_) => "that of a connection string which is wrong".to_owned(),
    }
}

impl EarlyMode {
    /// As the option has it.
    pub fn name(self) -> &'static str {
        match self {
            EarlyMode::Auto => "auto",
            EarlyMode::On => "on",
            EarlyMode::Off => "off",
        }
    }
}

impl Settings {
    /// Whether the connection string, with all that it refers to, can be one.
    ///
    /// # Errors
    /// What is wrong with it, without passwords.
    pub fn check(&self) -> Result<(), ConnectError> {
        let Some(primary) = &self.primary else { return Ok(()) };
        ConnectOptions::resolve(primary, &self.application_name_fallback).map(drop)
    }

    /// In a line: which directory follows whom, and how.
    pub fn describe(&self) -> String {
        let archive = match (&self.wal, &self.wal_archive, &self.restore_command) {
            (Some(wal), ..) => format!("archive \"{}\"", wal.display()),
            (None, Some(archive), _) => format!("archive as by {}", archive.restore_command),
            (None, None, Some(_)) => "archive behind restore_command".to_owned(),
            (None, None, None) => "no archive".to_owned(),
        };
        let Some(primary) = &self.primary else {
            return format!("data directory \"{}\", no primary, {archive}", shown(&self.data_dir).display());
        };
        let slot = match &self.slot {
            Some(slot) => format!("slot \"{slot}\""),
            None if self.temporary_slot => "temporary slot".to_owned(),
            None => "no slot".to_owned(),
        };
        format!(
            "data directory \"{}\", primary {}, {slot}, early stream {}, {archive}",
            shown(&self.data_dir).display(),
            describe_primary(primary, &self.application_name_fallback),
            self.early.name()
        )
    }

    /// When the receiver speaks without news.
    pub(crate) fn timing(&self) -> Timing {
        Timing { status_interval: self.status_interval, timeout: self.receiver_timeout }
    }

    /// Whether a session that began with the other settings can go on with these.
    pub(crate) fn keeps_session(&self, other: &Settings) -> bool {
        let link = |settings: &Settings| {
            (settings.primary.clone(), settings.slot.clone(), settings.create_slot, settings.temporary_slot)
        };
        link(self) == link(other)
            && self.early == other.early
            && self.application_name_fallback == other.application_name_fallback
    }
}
