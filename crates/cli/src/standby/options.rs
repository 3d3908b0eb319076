//! The options of `walrider standby`, from all places that they come from: the command line, the file that it names, the
//! data directory's own configuration, and what is built in, in this order.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Deserializer};
use tracing_subscriber::filter::LevelFilter;
use walrider_archive::ArchiveError;
use walrider_datadir::DataDirError;
use walrider_datadir::config::{Config, Setting, Unit};
use walrider_datadir::open::read_version;
use walrider_datadir::recovery_settings::{RecoverySettings, TargetTimeline};
use walrider_replay::startup::SpillOptions;
use walrider_session::ConnectOptions;
use walrider_standby::{ConnectError, EarlyMode, Limits, ReadableSettings, RelaySettings, Settings};

use crate::archiving::ArchivingOptions;
use crate::logging::{LogFormat, parse_level};
use crate::serving::{AccessFiles, ServingError, ServingOptions};
use crate::values::{
    DEFAULT_FETCH_JOBS, MAX_FETCH_JOBS, default_jobs, default_memory, duration, parse_duration, parse_early,
    parse_memory, parse_size, parse_slot, parse_timeline, parsed, size,
};
use crate::wal::named_archive;

/// Longest configuration file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// `application_name` where neither the connection string nor `cluster_name` says one.
const APPLICATION_NAME: &str = "walrider";

/// The same for PostgreSQL (`libpqrcv_connect`, `WalReceiverMain`).
const POSTGRES_NAME: &str = "walreceiver";

/// One layer of options: what it does not say is none. Each flag is a key of the file, with underscores.
#[derive(Args, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StandbyOptions {
    /// The data directory
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    pub data_dir: Option<PathBuf>,
    /// postgresql.conf, where it is not in the data directory (config_file)
    #[arg(long, value_name = "FILE")]
    pub config_file: Option<PathBuf>,
    /// How to connect to the primary (primary_conninfo); libpq's PG… variables, password and service files count too
    #[arg(long, value_name = "CONNINFO")]
    pub primary: Option<String>,
    /// Replication slot of the primary (primary_slot_name)
    #[arg(long, value_name = "NAME", value_parser = parse_slot, conflicts_with = "temporary_slot")]
    #[serde(deserialize_with = "slot")]
    pub slot: Option<String>,
    /// Create the slot if it is not there
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", hide_possible_values = true)]
    pub create_slot: Option<bool>,
    /// Use a slot that goes with the connection (wal_receiver_create_temp_slot)
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", hide_possible_values = true)]
    pub temporary_slot: Option<bool>,
    /// Take WAL before the primary has flushed it, where its extension is installed: auto, on (or fail) or off [default: auto]
    #[arg(long, value_name = "MODE", value_parser = parse_early)]
    #[serde(deserialize_with = "early")]
    pub early: Option<EarlyMode>,
    /// Shell command that fetches WAL from the archive (restore_command)
    #[arg(long, value_name = "CMD", conflicts_with = "wal")]
    pub restore_command: Option<String>,
    /// How many restore_commands run at once; 1 for one that must run alone [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_FETCH_JOBS))]
    pub fetch_jobs: Option<u16>,
    /// Where WAL is that the primary no longer has, instead of restore_command: a directory of segments, or an archive as of walrider wal put, by its directory or URL
    #[arg(long, value_name = "SOURCE")]
    pub wal: Option<PathBuf>,
    /// Tell the primary at least this often how far it is; 0: only when something moved or it asks (wal_receiver_status_interval) [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub status_interval: Option<Duration>,
    /// Give up a connection that is silent for so long; 0: never (wal_receiver_timeout) [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub receiver_timeout: Option<Duration>,
    /// Wait so long before WAL is asked for again (wal_retrieve_retry_interval) [default: 5s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub retry_interval: Option<Duration>,
    /// Replay commits so long after they were made (recovery_min_apply_delay) [default: 0]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub min_apply_delay: Option<Duration>,
    /// Keep this much WAL in pg_wal for others (wal_keep_size) [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(deserialize_with = "size")]
    pub wal_keep: Option<u64>,
    /// Follow this timeline: latest, current, or a number (recovery_target_timeline) [default: latest]
    #[arg(long, value_name = "TIMELINE", value_parser = parse_timeline)]
    #[serde(deserialize_with = "timeline")]
    pub timeline: Option<TargetTimeline>,
    /// Make a restartpoint after this time [default: 5min]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub restartpoint_interval: Option<Duration>,
    /// Make a restartpoint after this much WAL [default: 1GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(deserialize_with = "size")]
    pub restartpoint_wal: Option<u64>,
    /// Serve /metrics, /health and /status there, as in 127.0.0.1:9187
    #[arg(long, value_name = "ADDR:PORT")]
    pub http: Option<String>,
    /// Start PostgreSQL with this pg_ctl once promoted
    #[arg(long, value_name = "PATH")]
    pub pg_ctl: Option<PathBuf>,
    /// Let PostgreSQL have the directory, and be read, while it keeps up; with --pg-ctl
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", hide_possible_values = true)]
    pub readable: Option<bool>,
    /// PostgreSQL gets the directory when replay is no farther behind than this [default: 16MB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(deserialize_with = "size")]
    pub readable_within: Option<u64>,
    /// Walrider gets it back when PostgreSQL is farther behind than this [default: 1GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(deserialize_with = "size")]
    pub catch_up_beyond: Option<u64>,
    /// How long PostgreSQL must be farther behind than that before Walrider takes over [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[serde(deserialize_with = "duration")]
    pub catch_up_after: Option<Duration>,
    /// How to ask PostgreSQL here how far it is, as in "user=monitor"; its socket and port are found, its database is postgres
    #[arg(long, value_name = "CONNINFO")]
    pub local_conninfo: Option<String>,
    /// Threads [default: one per core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// Memory for pages and WAL, as in 512MB [default: a quarter of RAM, or of what its control group allows]
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    #[serde(deserialize_with = "memory")]
    pub memory: Option<u64>,
    /// Most disk space for a batch that is larger than memory, far behind, so that each page is read and written once; 0: visit
    /// pages again and again instead [default: half of what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(deserialize_with = "size")]
    pub spill_size: Option<u64>,
    /// Where that space is [default: base/pgsql_tmp in the data directory]
    #[arg(long, value_name = "DIR")]
    pub spill_dir: Option<PathBuf>,
    /// Whom to serve.
    #[command(flatten)]
    pub serving: ServingOptions,
    /// Where to archive.
    #[command(flatten)]
    pub archiving: ArchivingOptions,
    /// Form of the log, on stderr [default: text]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
    /// How much is logged: error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = parse_level)]
    #[serde(deserialize_with = "level")]
    pub log_level: Option<LevelFilter>,
}

/// Why options are not accepted.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The directory's own configuration.
    #[error(transparent)]
    Directory(#[from] DataDirError),
    /// The file of options could not be read.
    #[error("could not read \"{}\": {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its contents.
    #[error("{}:{line}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong; without the line itself, which may hold a password.
        reason: String,
    },
    /// What they say together.
    #[error("{0}")]
    Refused(String),
    /// Whom to serve.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// Where to archive.
    #[error(transparent)]
    Archiving(#[from] ArchiveError),
    /// The primary's connection string, or what it refers to.
    #[error("the connection string of the primary is wrong: {0}")]
    Conninfo(#[from] ConnectError),
}

impl OptionsError {
    /// Whether what we were told cannot be (exit code 2), whatever the files of the directory say (1).
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            OptionsError::File { .. }
                | OptionsError::Refused(_)
                | OptionsError::Serving(_)
                | OptionsError::Archiving(_)
                | OptionsError::Conninfo(_)
        )
    }
}

/// What a run needs.
#[derive(Clone)]
pub struct Resolved {
    /// For the standby.
    pub settings: Settings,
    /// Threads of replay.
    pub jobs: usize,
    /// Whom to serve, if anybody.
    pub serving: Option<(RelaySettings, AccessFiles)>,
    /// What was said of that.
    pub serving_options: ServingOptions,
    /// Address and port.
    pub http: Option<String>,
    /// Form of the log.
    pub log_format: LogFormat,
    /// Level of the log.
    pub log_level: LevelFilter,
    /// What the user should know about the configuration.
    pub notes: Vec<String>,
}

impl Resolved {
    /// Puts together what the flags, the file `config`, the directory and the defaults say.
    ///
    /// # Errors
    /// If one of them is wrong, or what they say does not go together.
    pub fn load(flags: &StandbyOptions, config: Option<&Path>) -> Result<Resolved, OptionsError> {
        let file = config.map(StandbyOptions::read).transpose()?.unwrap_or_default();
        let given = flags.clone().or(file);
        given.check()?;
        let Some(data_dir) = given.data_dir.clone() else {
            return Err(OptionsError::Refused("no data directory: name it with -D, data_dir or PGDATA".into()));
        };
        // Else its configuration is what is missing.
        read_version(&data_dir)?;
        let configuration = Config::read(&data_dir, given.config_file.as_deref())?;
        let directory = StandbyOptions::of_directory(&data_dir, &configuration)?;
        given.check_readable(&directory, &configuration)?;
        given.or(directory).resolve(data_dir, &configuration)
    }

    /// What this run keeps, although `new` says otherwise: it needs a restart.
    pub fn fixed(&self, new: &Resolved) -> Vec<&'static str> {
        let settings = (&self.settings, &new.settings);
        let is_read = settings.0.readable.is_some() || settings.1.readable.is_some();
        let same = [
            ("archive", settings.0.archive == settings.1.archive),
            ("restore_command", is_read || settings.0.restore_command == settings.1.restore_command),
            ("restartpoint_interval", is_read || settings.0.restartpoint_interval == settings.1.restartpoint_interval),
            ("restartpoint_wal", is_read || settings.0.restartpoint_wal_bytes == settings.1.restartpoint_wal_bytes),
            ("timeline", is_read || settings.0.timeline == settings.1.timeline),
            (
                "wal",
                is_read || (&settings.0.wal, &settings.0.wal_archive) == (&settings.1.wal, &settings.1.wal_archive),
            ),
            ("data_dir", settings.0.data_dir == settings.1.data_dir),
            ("early", is_read || settings.0.early == settings.1.early),
            ("fetch_jobs", settings.0.fetch_jobs == settings.1.fetch_jobs),
            ("http", self.http == new.http),
            ("jobs", self.jobs == new.jobs),
            ("log_format", self.log_format == new.log_format),
            ("memory", settings.0.memory_bytes == settings.1.memory_bytes),
            ("pg_ctl", is_read || settings.0.pg_ctl == settings.1.pg_ctl),
            ("readable", settings.0.readable.is_some() == settings.1.readable.is_some()),
            ("spill_dir", settings.0.spill.directory == settings.1.spill.directory),
            ("spill_size", settings.0.spill.bytes == settings.1.spill.bytes),
        ];
        let differing = same.into_iter().filter(|(_, same)| !same).map(|(name, _)| name);
        differing.chain(self.serving_options.differing(&new.serving_options)).collect()
    }
}

impl StandbyOptions {
    /// Reads a TOML file.
    pub fn read(path: &Path) -> Result<StandbyOptions, OptionsError> {
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
            .map_err(|source| OptionsError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text).map_err(|error| OptionsError::File {
            path: path.to_owned(),
            line: 1 + error.span().map_or(0, |span| text[..span.start].matches('\n').count()),
            reason: error.message().to_owned(),
        })
    }

    /// What the directory's own configuration says (`utils/misc/guc_tables.c`, PostgreSQL 18).
    fn of_directory(data_dir: &Path, config: &Config) -> Result<StandbyOptions, OptionsError> {
        let recovery = RecoverySettings::from_config(config, read_version(data_dir)?)?;
        let number = |name: &str, unit: Unit, unit_value: u64| -> Result<Option<u64>, OptionsError> {
            let Some(setting) = config.get(name) else { return Ok(None) };
            let number = u64::try_from(setting.number(unit)?).ok().filter(|&number| number <= i32::MAX as u64);
            Ok(Some(number.ok_or_else(|| out_of_range(setting))? * unit_value))
        };
        let time = |name: &str, unit: Unit, milliseconds: u64| -> Result<Option<Duration>, OptionsError> {
            Ok(number(name, unit, milliseconds)?.map(Duration::from_millis))
        };
        let slot = config.get("primary_slot_name").filter(|setting| !setting.value.is_empty());
        if let Some(setting) = slot {
            parse_slot(&setting.value).map_err(|reason| invalid(setting, &reason))?;
        }
        Ok(StandbyOptions {
            primary: recovery.primary_conninfo,
            slot: slot.map(|setting| setting.value.clone()),
            temporary_slot: config.get("wal_receiver_create_temp_slot").map(Setting::bool).transpose()?,
            restore_command: recovery.restore_command,
            status_interval: time("wal_receiver_status_interval", Unit::Seconds, 1000)?,
            receiver_timeout: time("wal_receiver_timeout", Unit::Milliseconds, 1)?,
            retry_interval: time("wal_retrieve_retry_interval", Unit::Milliseconds, 1)?,
            min_apply_delay: time("recovery_min_apply_delay", Unit::Milliseconds, 1)?,
            wal_keep: number("wal_keep_size", Unit::Megabytes, 1 << 20)?,
            timeline: Some(recovery.target_timeline),
            ..StandbyOptions::default()
        })
    }

    /// What this layer says, and where it says nothing, the other. Two options of which one excludes the other count
    /// together: who names a directory of WAL does not want the configured command.
    fn or(self, other: StandbyOptions) -> StandbyOptions {
        let named = self.restore_command.is_some() || self.wal.is_some();
        let (restore_command, wal) =
            if named { (self.restore_command, self.wal) } else { (other.restore_command, other.wal) };
        let temporary = self.temporary_slot.or(if self.slot.is_none() { other.temporary_slot } else { None });
        let slot = self.slot.or(if self.temporary_slot == Some(true) { None } else { other.slot });
        macro_rules! first {
            ($($field:ident)*) => {
                StandbyOptions {
                    restore_command,
                    wal,
                    slot,
                    temporary_slot: temporary,
                    serving: self.serving.or(other.serving),
                    archiving: self.archiving.or(other.archiving),
                    $($field: self.$field.or(other.$field),)*
                }
            };
        }
        first! {
            data_dir config_file primary create_slot early status_interval receiver_timeout retry_interval min_apply_delay
            wal_keep timeline restartpoint_interval restartpoint_wal http pg_ctl jobs fetch_jobs memory spill_size
            spill_dir log_format
            log_level readable readable_within catch_up_beyond catch_up_after local_conninfo
        }
    }

    /// What clap checks of flags, for what flags and file say together.
    fn check(&self) -> Result<(), OptionsError> {
        let refused = |reason: &str| Err(OptionsError::Refused(reason.to_owned()));
        if self.restore_command.is_some() && self.wal.is_some() {
            return refused("restore_command and wal exclude each other: name one");
        }
        if self.slot.is_some() && self.temporary_slot == Some(true) {
            return refused("slot and temporary_slot exclude each other: name one");
        }
        if self.jobs == Some(0) {
            return refused("jobs must be at least 1");
        }
        if self.fetch_jobs.is_some_and(|jobs| !(1..=MAX_FETCH_JOBS).contains(&jobs.into())) {
            return refused("fetch_jobs must be from 1 to 256");
        }
        Ok(())
    }

    /// What a standby that is read needs: PostgreSQL goes by the directory's own configuration.
    fn check_readable(&self, directory: &StandbyOptions, config: &Config) -> Result<(), OptionsError> {
        let refused = |reason: &str| Err(OptionsError::Refused(format!("readable {reason}")));
        let delays = |options: &StandbyOptions| options.min_apply_delay.is_some_and(|delay| !delay.is_zero());
        if self.readable != Some(true) {
            let alone = [
                self.readable_within.is_some(),
                self.catch_up_beyond.is_some(),
                self.catch_up_after.is_some(),
                self.local_conninfo.is_some(),
            ];
            return match alone.contains(&true) {
                true => Err(OptionsError::Refused(
                    "readable_within, catch_up_beyond, catch_up_after and local_conninfo are for a standby with readable".into(),
                )),
                false => Ok(()),
            };
        }
        if self.pg_ctl.is_none() {
            return refused("needs pg_ctl: name that of the server");
        }
        if directory.primary.as_ref().is_none_or(String::is_empty) {
            return refused("needs primary_conninfo in the directory's configuration, for PostgreSQL");
        }
        let others = [
            ("primary", self.primary.is_some() && self.primary != directory.primary),
            ("slot", self.slot.is_some() && self.slot != directory.slot),
            ("temporary_slot", self.temporary_slot == Some(true) && directory.temporary_slot != Some(true)),
            ("restore_command", self.restore_command.is_some() && self.restore_command != directory.restore_command),
            ("wal", self.wal.is_some()),
            ("timeline", self.timeline.is_some() && self.timeline != directory.timeline),
        ];
        if let Some((name, _)) = others.iter().find(|(_, differs)| *differs) {
            let reason = format!(
                "goes by the directory's configuration for PostgreSQL, and {name} says otherwise: set it there"
            );
            return refused(&reason);
        }
        if let Some(conninfo) = &self.local_conninfo {
            ConnectOptions::resolve_ordinary(conninfo, APPLICATION_NAME)?;
        }
        if delays(self) || delays(directory) {
            return refused(
                "and min_apply_delay (recovery_min_apply_delay) exclude each other: it would never be near the end",
            );
        }
        if self.early == Some(EarlyMode::On) {
            return refused(
                "and early = on exclude each other: PostgreSQL does not read what the primary has not flushed",
            );
        }
        if config.get("hot_standby").is_some_and(|setting| matches!(setting.bool(), Ok(false))) {
            return refused("needs hot_standby = on");
        }
        let limits = self.limits();
        if limits.patience.is_zero() {
            return refused("needs catch_up_after to be more than 0");
        }
        if limits.within >= limits.beyond {
            return refused("needs readable_within to be less than catch_up_beyond");
        }
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits {
            within: self.readable_within.unwrap_or(16 << 20),
            beyond: self.catch_up_beyond.unwrap_or(1 << 30),
            patience: self.catch_up_after.unwrap_or(Duration::from_secs(10)),
        }
    }

    /// With the defaults for what nobody said.
    fn resolve(self, data_dir: PathBuf, config: &Config) -> Result<Resolved, OptionsError> {
        // Empty is a way to say none, as in postgresql.conf.
        let some = |text: Option<String>| text.filter(|text| !text.is_empty());
        let seconds = Duration::from_secs;
        // -1 is no bound.
        let slot_keep =
            config.get("max_slot_wal_keep_size").map(|setting| setting.number(Unit::Megabytes)).transpose()?;
        let readable = (self.readable == Some(true)).then(|| ReadableSettings {
            limits: self.limits(),
            local_conninfo: self.local_conninfo.clone().unwrap_or_default(),
            max_slot_keep: slot_keep
                .and_then(|megabytes| u64::try_from(megabytes).ok())
                .map(|megabytes| megabytes << 20),
        });
        // Whether PostgreSQL or Walrider has the directory, the primary knows it by one name.
        let name = if readable.is_some() { POSTGRES_NAME } else { APPLICATION_NAME };
        let slot = some(self.slot);
        let create_slot = self.create_slot.unwrap_or(false);
        if create_slot && slot.is_none() {
            return Err(OptionsError::Refused("create_slot needs the name of a slot: set slot".into()));
        }
        let cluster_name = some(config.get("cluster_name").map(|setting| setting.value.clone()));
        let fetch_jobs = self.fetch_jobs.unwrap_or(DEFAULT_FETCH_JOBS).into();
        let wal = self.wal.filter(|path| !path.as_os_str().is_empty());
        let wal_archive =
            wal.as_deref().map(|wal| named_archive(wal, &data_dir, fetch_jobs, true)).transpose()?.flatten();
        let settings = Settings {
            data_dir,
            config_file: self.config_file,
            make_standby: false,
            primary: some(self.primary),
            create_slot,
            // A permanent slot goes before (`RequestXLogStreaming`, `replication/walreceiverfuncs.c`).
            temporary_slot: self.temporary_slot.unwrap_or(false) && slot.is_none(),
            slot,
            // PostgreSQL does not read the log of what the primary has not flushed.
            early: if readable.is_some() { EarlyMode::Off } else { self.early.unwrap_or_default() },
            restore_command: some(self.restore_command),
            archive_cleanup_command: some(config.get("archive_cleanup_command").map(|setting| setting.value.clone())),
            fetch_jobs,
            wal: wal.clone().filter(|_| wal_archive.is_none()),
            wal_archive,
            archive: self.archiving.resolve()?,
            status_interval: self.status_interval.unwrap_or(seconds(10)),
            receiver_timeout: self.receiver_timeout.unwrap_or(seconds(60)),
            retry_interval: self.retry_interval.unwrap_or(seconds(5)),
            min_apply_delay: self.min_apply_delay.unwrap_or(Duration::ZERO),
            wal_keep_bytes: self.wal_keep.unwrap_or(0),
            timeline: self.timeline.unwrap_or_default(),
            restartpoint_interval: self.restartpoint_interval.unwrap_or(seconds(300)),
            restartpoint_wal_bytes: self.restartpoint_wal.unwrap_or(1 << 30),
            memory_bytes: self.memory.unwrap_or_else(default_memory),
            spill: SpillOptions { bytes: self.spill_size, directory: self.spill_dir, always: false },
            pg_ctl: self.pg_ctl,
            readable,
            application_name_fallback: cluster_name.unwrap_or_else(|| name.to_owned()),
        };
        if settings.primary.is_none() && settings.restore_command.is_none() && wal.is_none() {
            return Err(OptionsError::Refused(
                "nothing says where WAL comes from: name the primary (--primary, primary_conninfo), or an archive \
                 (--restore-command, --wal)"
                    .into(),
            ));
        }
        settings.check()?;
        let serving = self.serving.resolve(0)?;
        if serving.is_some() && settings.readable.is_some() {
            let why = "listen and readable exclude each other: in its turn PostgreSQL serves others itself";
            return Err(OptionsError::Refused(why.into()));
        }
        if settings.archive.is_some() && settings.readable.is_some() {
            let why = "archive and readable exclude each other: in its turn PostgreSQL archives nothing, or by its own archive_command";
            return Err(OptionsError::Refused(why.into()));
        }
        let mut notes = Vec::new();
        if settings.readable.is_none()
            && config.get("hot_standby_feedback").is_some_and(|setting| matches!(setting.bool(), Ok(true)))
        {
            notes.push(
                "hot_standby_feedback is on, but nobody reads here while Walrider runs: nothing is fed back".to_owned(),
            );
        }
        Ok(Resolved {
            settings,
            serving,
            serving_options: self.serving,
            jobs: self.jobs.map_or_else(default_jobs, usize::from),
            http: some(self.http),
            log_format: self.log_format.unwrap_or_default(),
            log_level: self.log_level.unwrap_or(LevelFilter::INFO),
            notes,
        })
    }
}

fn invalid(setting: &Setting, reason: &str) -> OptionsError {
    let reason = format!("invalid value for parameter \"{}\": \"{}\"; {reason}", setting.name, setting.value);
    OptionsError::Directory(DataDirError::Config { path: setting.file.clone(), line: setting.line, reason })
}

fn out_of_range(setting: &Setting) -> OptionsError {
    invalid(setting, "it is outside the valid range")
}

fn slot<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    parsed(deserializer, parse_slot)
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    parsed(deserializer, parse_memory)
}

fn timeline<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TargetTimeline>, D::Error> {
    parsed(deserializer, parse_timeline)
}

fn early<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<EarlyMode>, D::Error> {
    parsed(deserializer, parse_early)
}

fn level<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<LevelFilter>, D::Error> {
    parsed(deserializer, parse_level)
}
