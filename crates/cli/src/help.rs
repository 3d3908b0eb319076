//! What `--help` says besides the options' own words: groups, signals, examples; and the man pages and completions that are made
//! of the same.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;

use crate::Cli;
use crate::failure::{Exit, Failure};

/// Headings of the options of [`GROUPED`]; one that is not named here stands under "Options".
const GROUPS: &[(&str, &[&str])] = &[
    ("The backup", &["backup", "tablespace_mapping", "no_manifest", "start_over"]),
    ("Where WAL comes from", &["wal", "restore_command", "fetch_jobs", "timeline"]),
    (
        "Where to stop",
        &[
            "target_lsn",
            "target_time",
            "target_xid",
            "target_name",
            "target_immediate",
            "target_exclusive",
            "target_timeline",
            "endpos",
        ],
    ),
    ("How it ends", &["follow", "promote", "no_promote", "pg_ctl"]),
    (
        "The primary",
        &[
            "primary",
            "dbname",
            "slot",
            "create_slot",
            "if_not_exists",
            "temporary_slot",
            "early",
            "status_interval",
            "receiver_timeout",
            "retry_interval",
            "no_loop",
        ],
    ),
    ("Replay", &["min_apply_delay", "restartpoint_interval", "restartpoint_wal", "wal_keep"]),
    ("To be read", &["readable", "readable_within", "catch_up_beyond", "catch_up_after", "local_conninfo"]),
    ("Resources", &["jobs", "memory"]),
    ("What is asked", &["interval", "wal_content"]),
    ("What is varied", &["vary", "set", "fraction", "repeats", "seed"]),
    ("The load", &["load", "init", "scale", "clients", "time"]),
    ("The servers", &["bindir", "work_dir", "given_primary", "given_standby", "change_settings", "timeout"]),
    (
        "Output",
        &[
            "positions",
            "json",
            "verify_images",
            "http",
            "batch",
            "count",
            "listen",
            "record",
            "output",
            "report",
            "resume",
            "log_format",
            "log_level",
        ],
    ),
];

/// The commands that have them.
const GROUPED: [&str; 6] = ["replay", "restore", "standby", "receive", "top", "bench"];

/// What is said at the end: of `--help`, of the man page.
const AFTER: &[(&str, &str)] = &[
    (
        "replay",
        "Signals:
  SIGINT, SIGTERM  with --follow: stop at the end of a batch, and hand over; else they end it at once, and nothing is lost

Examples:
  walrider replay -D \"$PGDATA\"
      as the directory's own restore_command and recovery_target_* say
  walrider replay -D \"$PGDATA\" --wal /archive --target-time '2026-11-20 14:30:00+00'
  walrider replay -D \"$PGDATA\" --promote
      to the end of the WAL, and a primary on a new timeline then",
    ),
    (
        "restore",
        "Examples:
  walrider restore --backup /backups/sunday --wal /archive -D \"$PGDATA\"
      to the end of the WAL; then start PostgreSQL
  walrider restore --backup /backups/sunday --wal s3://bucket/main -D \"$PGDATA\" --target-time '2026-11-20 14:30:00+00' --promote
  walrider restore --backup /backups/sunday --wal /archive -D \"$PGDATA\" --tablespace-mapping /mnt/old=/mnt/new",
    ),
    (
        "backup",
        "Examples:
  walrider backup roll --backup /backups/sunday --wal /archive --out /backups/monday --format tar --compress zstd",
    ),
    (
        "standby",
        "Signals:
  SIGINT, SIGTERM  stop: restartpoint, and the directory is PostgreSQL's again (walrider stop)
  SIGHUP           read FILE and the directory's configuration again (walrider reload)
  SIGUSR1          promote (walrider promote)
  SIGUSR2          look whether the files walrider.pause and promote are there (walrider pause, resume)

Examples:
  pg_basebackup -R -D \"$PGDATA\" -d 'host=db1 user=replicator' -C -S standby1
  walrider standby -D \"$PGDATA\" --http 127.0.0.1:9187
  walrider standby -D \"$PGDATA\" --primary 'host=db1' --make-standby
      of a base backup without standby.signal; only for the first start
  walrider standby -D \"$PGDATA\" --readable --pg-ctl /usr/lib/postgresql/18/bin/pg_ctl
      one that can be read",
    ),
    (
        "receive",
        "Signals:
  SIGINT, SIGTERM  stop; what came in is durable then (walrider stop)

Examples:
  walrider receive -d 'host=db1 user=replicator' -D /wal -S archive1 --create-slot --if-not-exists",
    ),
    (
        "wal",
        "Examples:
  walrider wal stats /mnt/archive --by rmgr
  archive_command = 'walrider wal put --archive s3://bucket/main %p'
  restore_command = 'walrider wal get --archive s3://bucket/main %f %p'
  walrider wal expire --archive s3://bucket/main --before 000000010000000A000000C0 --dry-run",
    ),
    (
        "compare",
        "Examples:
  walrider compare /backup/a /backup/b --first 100",
    ),
    (
        "status",
        "Examples:
  walrider status -D \"$PGDATA\" --json | jq .status.positions.replayed",
    ),
    (
        "top",
        "Keys:
  q quit, p hold the display, j and k choose a standby, ? explain

Signals:
  SIGINT, SIGTERM, SIGHUP  end; the terminal is as it was

Examples:
  walrider top 'host=db1 user=watcher dbname=postgres' 'host=db2 user=watcher dbname=postgres'
  walrider top 'host=db1 user=watcher dbname=postgres' http://db3:9187 --listen 127.0.0.1:8080
      a walrider standby by its --http; the page is for who reaches the port
  walrider top 'host=db1 user=watcher dbname=postgres' --batch --json -n 5 | jq .view.standbys",
    ),
    (
        "explain-lag",
        "Examples:
  walrider top 'host=db1' 'host=db2' --batch --record lag.jsonl > lag.txt
  walrider explain-lag lag.jsonl",
    ),
    (
        "bench",
        "Signals:
  SIGINT, SIGTERM, SIGHUP  end; servers are stopped and removed, or their settings put back, and --resume goes on

Examples:
  walrider bench -o wal.jsonl --vary wal_compression=off,pglz,lz4,zstd --vary standby=stock,walrider --repeats 3
  walrider bench -o majors.jsonl --vary bindir=/usr/lib/postgresql/17/bin,/usr/lib/postgresql/18/bin --set data_checksums=on
  walrider bench -o sync.jsonl --vary synchronous_commit=off,local,remote_write,on,remote_apply --load pgbench
  walrider bench -o prod.jsonl --primary 'host=db1 dbname=test' --standby 'host=db2 dbname=test'
      one load, measured; nothing is changed but for its tables",
    ),
    (
        "completions",
        "Examples:
  walrider completions bash > /usr/share/bash-completion/completions/walrider
  walrider completions zsh > /usr/share/zsh/site-functions/_walrider
  walrider completions fish > /usr/share/fish/vendor_completions.d/walrider.fish",
    ),
];

/// The command line with all of its help.
pub fn command() -> Command {
    let mut command = Cli::command();
    for name in GROUPED {
        command = command.mut_subcommand(name, |command| {
            command.mut_args(|arg| {
                let id = arg.get_id().as_str();
                match GROUPS.iter().find(|(_, ids)| ids.contains(&id)) {
                    Some((heading, _)) => arg.help_heading(*heading),
                    None => arg,
                }
            })
        });
    }
    for (name, text) in AFTER {
        command = command.mut_subcommand(*name, |command| command.after_long_help(*text));
    }
    command
}

/// Print completions for a shell
#[derive(Args)]
pub struct CompletionsArgs {
    /// Which shell
    shell: Shell,
}

/// Write the man pages into a directory
#[derive(Args)]
pub struct ManArgs {
    /// Where walrider.1, walrider-replay.1 and so on go
    dir: PathBuf,
}

/// Runs `walrider completions`.
pub fn completions(args: &CompletionsArgs) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "walrider", &mut text);
    crate::out::say(format_args!("{}", String::from_utf8_lossy(&text)));
    ExitCode::SUCCESS
}

/// Runs `walrider man`.
pub fn man(args: &ManArgs) -> ExitCode {
    match clap_mangen::generate_to(command(), &args.dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("could not write into \"{}\": {error}", args.dir.display());
            Failure::new(Exit::Refused, message).complain()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn subcommand(name: &str) -> Command {
        let mut command = command();
        command.build();
        command.find_subcommand(name).unwrap().clone()
    }

    #[test]
    fn it_is_sound() {
        command().debug_assert();
    }

    /// Every option that a group names is one, except those that are yet to come.
    #[test]
    fn groups_name_what_there_is() {
        let ids: BTreeSet<String> = GROUPED
            .into_iter()
            .flat_map(|name| subcommand(name).get_arguments().map(|arg| arg.get_id().to_string()).collect::<Vec<_>>())
            .collect();
        for id in GROUPS.iter().flat_map(|(_, ids)| *ids) {
            assert!(ids.contains(*id), "{id}");
        }
    }

    #[test]
    fn help_has_groups_signals_and_examples() {
        for (name, words) in [
            ("replay", &["Where to stop:\n", "Resources:\n", "Signals:\n", "Examples:\n", "SIGTERM"][..]),
            ("standby", &["The primary:\n", "Replay:\n", "Output:\n", "SIGUSR1", "--make-standby\n"]),
            ("receive", &["The primary:\n", "Signals:\n", "Examples:\n"]),
            (
                "bench",
                &["What is varied:\n", "The load:\n", "The servers:\n", "Output:\n", "Signals:\n", "Examples:\n"],
            ),
            ("top", &["Keys:\n", "What is asked:\n", "Output:\n", "Signals:\n", "Examples:\n"]),
        ] {
            let help = subcommand(name).render_long_help().to_string();
            for word in words {
                assert!(help.contains(word), "{name}: {word}\n{help}");
            }
        }
    }

    #[test]
    fn man_pages_and_completions() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(man(&ManArgs { dir: dir.path().to_owned() }), ExitCode::SUCCESS);
        let page = std::fs::read_to_string(dir.path().join("walrider-standby.1")).unwrap();
        assert!(page.starts_with(".ie") || page.contains(".TH walrider-standby 1"), "{page}");
        assert!(page.contains("SIGHUP") && page.contains("min\\-apply\\-delay"), "{page}");
        assert!(dir.path().join("walrider.1").exists() && !dir.path().join("walrider-man.1").exists());
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut command(), "walrider", &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains("make-standby") && text.contains("target-lsn"), "{shell}");
        }
    }
}
