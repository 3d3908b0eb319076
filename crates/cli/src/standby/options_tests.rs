//! Tests of how options come together.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use tracing_subscriber::filter::LevelFilter;
use walrider_datadir::recovery_settings::TargetTimeline;
use walrider_layout::TimelineId;

use super::options::{OptionsError, Resolved, StandbyOptions};
use crate::logging::LogFormat;

#[derive(Parser)]
struct Line {
    #[arg(long)]
    config: Option<PathBuf>,
    #[command(flatten)]
    options: StandbyOptions,
}

/// A data directory with this configuration, and a file of options beside it.
struct Configured {
    dir: tempfile::TempDir,
}

impl Configured {
    fn new(postgresql_conf: &str, toml: &str) -> Configured {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::write(data.join("PG_VERSION"), "18\n").unwrap();
        fs::write(data.join("postgresql.conf"), postgresql_conf).unwrap();
        fs::write(dir.path().join("standby.toml"), toml).unwrap();
        Configured { dir }
    }

    fn load(&self, flags: &[&str]) -> Result<Resolved, OptionsError> {
        let (data, config) = (self.dir.path().join("data"), self.dir.path().join("standby.toml"));
        let own = ["standby", "-D", data.to_str().unwrap(), "--config", config.to_str().unwrap()];
        let line = Line::try_parse_from(own.iter().chain(flags)).unwrap();
        Resolved::load(&line.options, line.config.as_deref())
    }

    fn error(&self, flags: &[&str]) -> String {
        self.load(flags).map(|_| ()).unwrap_err().to_string()
    }
}

const PRIMARY: &str = "primary_conninfo = 'host=db1'\n";

#[test]
fn after_pg_basebackup_nothing_is_needed() {
    let conf = "primary_conninfo = 'host=db1 user=repl'\nprimary_slot_name = 's1'\nrestore_command = 'cp /a/%f %p'\n\
                recovery_min_apply_delay = 2s\nwal_receiver_status_interval = 3\nwal_receiver_timeout = 4000\n\
                wal_retrieve_retry_interval = '1min'\nwal_receiver_create_temp_slot = on\nwal_keep_size = 64\n\
                recovery_target_timeline = current\ncluster_name = 'c1'\nhot_standby_feedback = on\n";
    let resolved = Configured::new(conf, "").load(&[]).unwrap();
    let settings = resolved.settings;
    assert_eq!(settings.primary.as_deref(), Some("host=db1 user=repl"));
    assert_eq!((settings.slot.as_deref(), settings.temporary_slot, settings.create_slot), (Some("s1"), false, false));
    assert_eq!(settings.restore_command.as_deref(), Some("cp /a/%f %p"));
    assert_eq!(settings.min_apply_delay, Duration::from_secs(2));
    assert_eq!(settings.status_interval, Duration::from_secs(3));
    assert_eq!(settings.receiver_timeout, Duration::from_secs(4));
    assert_eq!(settings.retry_interval, Duration::from_secs(60));
    assert_eq!(settings.wal_keep_bytes, 64 << 20);
    assert_eq!(settings.timeline, TargetTimeline::Current);
    assert_eq!(settings.application_name_fallback, "c1");
    assert!(resolved.notes[0].contains("hot_standby_feedback"), "{:?}", resolved.notes);
}

#[test]
fn what_is_built_in() {
    let resolved = Configured::new(PRIMARY, "").load(&[]).unwrap();
    let settings = resolved.settings;
    let times = [settings.status_interval, settings.receiver_timeout, settings.retry_interval];
    assert_eq!(times, [10, 60, 5].map(Duration::from_secs));
    assert_eq!((settings.min_apply_delay, settings.restartpoint_interval), (Duration::ZERO, Duration::from_secs(300)));
    assert_eq!((settings.wal_keep_bytes, settings.restartpoint_wal_bytes), (0, 1 << 30));
    assert_eq!((settings.timeline, settings.slot, settings.temporary_slot), (TargetTimeline::Latest, None, false));
    assert_eq!(settings.application_name_fallback, "walrider");
    assert_eq!((resolved.http, resolved.log_format, resolved.log_level), (None, LogFormat::Text, LevelFilter::INFO));
    assert!(resolved.notes.is_empty() && resolved.jobs > 0);
}

#[test]
fn flags_before_file_before_directory() {
    let conf = "primary_conninfo = 'host=directory'\nwal_receiver_timeout = 1s\nwal_retrieve_retry_interval = 1s\n\
                recovery_min_apply_delay = 1s\n";
    let toml = "primary = 'host=file'\nretry_interval = '2s'\nmin_apply_delay = '2s'\ncreate_slot = true\nslot = 'f'\n\
                timeline = 3\nlog_level = 'debug'\nmemory = 33554432\njobs = 2\nfetch_jobs = 3\nspill_size = '1GB'\n";
    let place = Configured::new(conf, toml);
    let resolved = place.load(&["--primary", "host=flag", "--min-apply-delay", "3s"]).unwrap();
    let settings = resolved.settings;
    assert_eq!(settings.primary.as_deref(), Some("host=flag"));
    assert_eq!(settings.receiver_timeout, Duration::from_secs(1));
    assert_eq!(settings.retry_interval, Duration::from_secs(2));
    assert_eq!(settings.min_apply_delay, Duration::from_secs(3));
    assert_eq!(settings.timeline, TargetTimeline::Number(TimelineId(3)));
    assert_eq!((settings.memory_bytes, resolved.jobs, resolved.log_level), (32 << 20, 2, LevelFilter::DEBUG));
    assert_eq!(settings.fetch_jobs, 3);
    assert_eq!(settings.spill.bytes, Some(1 << 30));
    assert!(settings.create_slot);
    assert!(!place.load(&["--create-slot=false"]).unwrap().settings.create_slot);
}

#[test]
fn options_that_exclude_each_other_count_together() {
    let place = Configured::new("restore_command = 'directory'\nprimary_slot_name = 'd'\n", "wal = '/file'\n");
    let source = |flags: &[&str]| {
        let settings = place.load(flags).unwrap().settings;
        (settings.restore_command, settings.wal)
    };
    assert_eq!(source(&[]), (None, Some("/file".into())));
    assert_eq!(source(&["--restore-command", "flag"]), (Some("flag".into()), None));
    let slot = |flags: &[&str]| {
        let settings = place.load(flags).unwrap().settings;
        (settings.slot, settings.temporary_slot)
    };
    assert_eq!(slot(&[]), (Some("d".into()), false));
    assert_eq!(slot(&["--temporary-slot"]), (None, true));
    assert_eq!(slot(&["--temporary-slot=false"]), (Some("d".into()), false));
    assert_eq!(slot(&["--slot", ""]), (None, false));
    let place = Configured::new("wal_receiver_create_temp_slot = on\n".to_owned().as_str(), "primary = 'host=x'\n");
    assert!(place.load(&[]).unwrap().settings.temporary_slot);
    assert!(!place.load(&["--slot", "s"]).unwrap().settings.temporary_slot);
}

#[test]
fn what_does_not_go_together_is_refused() {
    for (toml, flags, expected) in [
        ("wal = '/a'\nrestore_command = 'b'", &[][..], "exclude each other"),
        ("temporary_slot = true\nslot = 'b'", &[], "exclude each other"),
        ("create_slot = true", &[], "create_slot needs the name of a slot"),
        ("jobs = 0", &[], "jobs must be at least 1"),
        ("fetch_jobs = 0", &[], "fetch_jobs must be from 1 to 256"),
        ("", &["--primary", ""], "nothing says where WAL comes from"),
        ("primary = 'host=h colour=red'", &[], "connection string of the primary is wrong: invalid connection option"),
    ] {
        let text = Configured::new(PRIMARY, toml).error(flags);
        assert!(text.contains(expected), "{toml}: {text}");
    }
}

#[test]
fn errors_of_the_file_name_key_and_line_and_keep_secrets() {
    for (toml, line, expected) in [
        ("jobs = 1\nprimry = 'password=secret'", 2, "unknown field `primry`"),
        ("\n\nstatus_interval = 10", 3, "expected a time with its unit"),
        ("memory = '1MB'", 1, "at least 16MB"),
        ("slot = 'A-B'", 1, "lower case letters"),
        ("log_level = 'loud'", 1, "expected error, warn"),
        ("log_format = 'xml'", 1, "unknown variant `xml`"),
        ("timeline = true", 1, "expected a text or a number"),
        ("primary = ['secret']", 1, "invalid type"),
        ("jobs = 1\nprimary = 'password=secret", 2, "literal string"),
        ("primary = 'password=secret' x", 1, ""),
    ] {
        let text = Configured::new(PRIMARY, toml).error(&[]);
        assert!(text.contains(&format!("standby.toml:{line}: ")) && text.contains(expected), "{toml}: {text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn errors_of_the_directory_name_file_and_line() {
    for line in [
        "wal_receiver_timeout = -1",
        "recovery_min_apply_delay = -5",
        "wal_keep_size = 9999999999",
        "wal_receiver_create_temp_slot = maybe",
        "primary_slot_name = 'Not-a-slot'",
        "wal_receiver_status_interval = 1MB",
    ] {
        let text = Configured::new(&format!("{PRIMARY}{line}\n"), "").error(&[]);
        let name = line.split(' ').next().unwrap();
        assert!(text.contains("postgresql.conf:2: ") && text.contains(name), "{text}");
    }
    let place = Configured::new("", "");
    fs::remove_file(place.dir.path().join("data/postgresql.conf")).unwrap();
    assert!(place.error(&["--primary", "x"]).contains("name its postgresql.conf"));
    let error = Resolved::load(&StandbyOptions::default(), None).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no data directory"), "{error}");
}

/// The file knows every flag by its name, and no other key.
#[test]
fn each_flag_has_its_key() {
    let keys_of = |toml: &str| -> BTreeSet<String> {
        let error = Configured::new(PRIMARY, toml).error(&[]);
        error.split('`').skip(3).step_by(2).map(str::to_owned).collect()
    };
    let mut known = keys_of("no_such_key = 1");
    for table in ["serving", "archiving"] {
        assert!(known.remove(table), "a table of its own");
        known.extend(keys_of(&format!("[{table}]\nno_such_key = 1")));
    }
    let command = Line::command();
    let flags: BTreeSet<String> = command
        .get_arguments()
        .filter_map(|argument| argument.get_long())
        .filter(|name| !["help", "config"].contains(name))
        .map(|name| name.replace('-', "_"))
        .collect();
    assert_eq!(flags, known);
}

#[test]
fn each_flag_is_documented() {
    let text = include_str!("../../../../docs/standby.md");
    for flag in Line::command().get_arguments().filter_map(|argument| argument.get_long()) {
        let row = text.lines().any(|line| {
            line.starts_with("| `-") && (line.contains(&format!("--{flag}`")) || line.contains(&format!("--{flag} ")))
        });
        assert!(row || flag == "help", "--{flag}");
    }
}

#[test]
fn what_needs_a_restart_is_told() {
    let place = Configured::new(PRIMARY, "");
    let running = place.load(&[]).unwrap();
    let toml = "archiving.archive = '/a'\nhttp = 'h:1'\njobs = 9\nfetch_jobs = 9\nmemory = '17MB'\nlog_format = 'json'\nlog_level = 'warn'\nretry_interval = '1s'\nspill_dir = '/s'";
    fs::write(place.dir.path().join("standby.toml"), toml).unwrap();
    let new = place.load(&[]).unwrap();
    assert_eq!(running.fixed(&new), ["archive", "fetch_jobs", "http", "jobs", "log_format", "memory", "spill_dir"]);
    assert!(running.fixed(&running.clone()).is_empty());

    let served =
        |ack: &str| format!("pg_ctl = '/p'\n[serving]\nlisten = '127.0.0.1:1'\naccess = '/a'\nack_flush = '{ack}'");
    let write = |text: String| fs::write(place.dir.path().join("standby.toml"), text).unwrap();
    write(served("ANY 1 (a)"));
    let one = place.load(&[]).unwrap();
    assert_eq!(running.fixed(&one), ["pg_ctl", "listen", "access", "ack_flush"]);
    write(served("ALL (a, b)"));
    assert_eq!(one.fixed(&place.load(&[]).unwrap()), ["ack_flush"], "an administrator who tightens it must know");
}

#[test]
fn whom_to_serve_has_a_table_of_its_own() {
    let toml =
        "[serving]\nlisten = '127.0.0.1:1, [::1]:2'\naccess = '/a'\nsender_timeout = '3s'\nack_flush = 'ANY 1 (a)'";
    let resolved = Configured::new(PRIMARY, toml).load(&["--listen", "h:3", "--access", "/b"]).unwrap();
    let (settings, files) = resolved.serving.unwrap();
    assert_eq!(
        (settings.listen, files.rules().to_str()),
        (vec!["h:3".to_owned()], Some("/b")),
        "the command line goes before"
    );
    assert_eq!(settings.service.sender_timeout, Duration::from_secs(3));
    assert!(settings.acks.flush.is_some() && settings.acks.apply.is_none());
    assert!(Configured::new(PRIMARY, "").load(&[]).unwrap().serving.is_none());
    for (toml, expected) in [
        ("[serving]\nlisten = 'h:1'", "access"),
        ("[serving]\naccess = '/a'", "listen"),
        ("[serving]\nlisten = 'h:1'\naccess = '/a'\ntls_key = 'k'", "go together"),
        ("[serving]\nack_apply = 'a'", "names no standbys"),
    ] {
        assert!(Configured::new(PRIMARY, toml).error(&[]).contains(expected), "{toml}");
    }
}

#[test]
fn where_to_archive_has_a_table_of_its_own() {
    let toml = "[archiving]\narchive = 's3://bucket/main'\narchive_compression = 'lz4'\narchive_max_keep = '1GB'";
    let resolved = Configured::new(PRIMARY, toml).load(&["--archive", "/a", "--archive-jobs", "2"]).unwrap();
    let archive = resolved.settings.archive.unwrap();
    assert_eq!((archive.place.to_string().as_str(), archive.jobs, archive.max_keep), ("/a", 2, Some(1 << 30)));
    assert_eq!(archive.packing, walrider_archive::frame::Packing::Lz4);
    assert_eq!(Configured::new(PRIMARY, "").load(&[]).unwrap().settings.archive, None);
    for (toml, expected) in [
        ("[archiving]\narchive = 'a'", "absolute path"),
        ("[archiving]\narchive_jobs = 2", "says where"),
        ("[archiving]\narchive = '/a'\narchive_jobs = 0", "archive_jobs"),
        ("readable = true\npg_ctl = '/p'\n[archiving]\narchive = '/a'", "exclude each other"),
    ] {
        assert!(Configured::new(PRIMARY, toml).error(&[]).contains(expected), "{toml}");
    }
}
