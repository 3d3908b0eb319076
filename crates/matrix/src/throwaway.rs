//! A run on servers of its own: made, started, stopped and removed, whatever happens in between.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use tempfile::TempDir;
use walrider_session::{ConnectOptions, Connection};

use crate::figures::Outcome;
use crate::measure::{Process, Servers, Standby};
use crate::plan::{BINDIR, DATA_CHECKSUMS, STANDBY};
use crate::program::{self, Running, postgres_program, wait_for};
use crate::{Conditions, Result, RunError, load};

/// `application_name` of the standby, and its slot.
const NAME: &str = "bench";
/// They name sockets; nobody listens on a port.
const PRIMARY_PORT: u16 = 5432;
const STANDBY_PORT: u16 = 5433;
/// Longest path of a directory for sockets (`UNIXSOCK_PATH_BUFLEN`, `libpq/pqcomm.h`, less the socket's own name).
const MAX_SOCKET_DIR: usize = 90;

/// Where runs are made, and with what.
pub struct Place {
    /// Directories are made in this one.
    pub work_dir: PathBuf,
    /// The program of `walrider standby`.
    pub walrider: PathBuf,
}

/// The servers; what is first is dropped first.
struct Pair {
    standby: Option<Running>,
    primary: Running,
}

impl Pair {
    fn check(&mut self) -> Result<()> {
        self.primary.check()?;
        self.standby.as_mut().map_or(Ok(()), Running::check)
    }
}

/// What is special in a run's settings, and the rest.
struct Settings<'a> {
    bindir: Option<&'a Path>,
    data_checksums: Option<&'a str>,
    standby: &'a str,
    configuration: String,
}

impl Settings<'_> {
    fn of(settings: &[(String, String)]) -> Settings<'_> {
        let get = |wanted: &str| settings.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
        let standby = get(STANDBY).unwrap_or("stock");
        let special = [BINDIR, DATA_CHECKSUMS, STANDBY];
        let mut configuration: String = settings
            .iter()
            .filter(|(name, _)| !special.contains(&name.as_str()))
            .map(|(name, value)| format!("{name} = {}\n", quoted(value)))
            .collect();
        // Else no level of synchronous_commit would differ from "local".
        if get("synchronous_commit").is_some() && get("synchronous_standby_names").is_none() && standby != "none" {
            configuration += &format!("synchronous_standby_names = '{NAME}'\n");
        }
        Settings { bindir: get(BINDIR).map(Path::new), data_checksums: get(DATA_CHECKSUMS), standby, configuration }
    }
}

/// Makes a run with these settings.
///
/// # Errors
/// [`RunError::Interrupted`], or what failed, with the last lines of the servers' logs. Nothing is left either way.
pub fn run(place: &Place, settings: &[(String, String)], conditions: &Conditions) -> Result<Outcome> {
    let what = format!("make a directory in \"{}\"", place.work_dir.display());
    let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(&place.work_dir).map_err(RunError::io(what))?;
    let outcome = attempt(place, dir.path(), &Settings::of(settings), conditions);
    let outcome = outcome.map_err(|error| error.with_log(|| logs(dir.path())));
    let shown = dir.path().display().to_string();
    dir.close().map_err(RunError::io(format!("remove \"{shown}\"")))?;
    outcome
}

fn logs(dir: &Path) -> Vec<String> {
    let of = |name: &str| {
        let lines = program::last_lines(&dir.join(format!("{name}.log")));
        lines.into_iter().map(|line| format!("{name}: {line}")).collect::<Vec<_>>()
    };
    ["primary", "standby"].into_iter().flat_map(of).collect()
}

fn attempt(place: &Place, dir: &Path, settings: &Settings<'_>, conditions: &Conditions) -> Result<Outcome> {
    let timeout = conditions.timeout;
    let log = |name: &str| dir.join(format!("{name}.log"));
    // The sockets' own directory, where this one's path is too long; it goes with the run.
    let short = dir.as_os_str().len() > MAX_SOCKET_DIR;
    let sockets = short.then(|| TempDir::with_prefix("bench-")).transpose();
    let sockets = sockets.map_err(RunError::io("make a directory for sockets".to_owned()))?;
    let socket_dir = sockets.as_ref().map_or(dir, TempDir::path).display().to_string();
    let conninfo = |port: u16, more: &str| format!("host={} port={port} user=postgres{more}", quoted_word(&socket_dir));
    let primary_info = conninfo(PRIMARY_PORT, " dbname=postgres");

    let primary_dir = dir.join("primary");
    initdb(settings, &primary_dir, &log("initdb"), conditions)?;
    let ours = format!(
        "listen_addresses = ''\nport = {PRIMARY_PORT}\nunix_socket_directories = {}\n",
        quoted(&format!("\"{socket_dir}\""))
    );
    configure(&primary_dir, &format!("{}{ours}", settings.configuration))?;
    let server = |dir: &Path, name: &str| {
        let mut command = postgres_program(settings.bindir, "postgres");
        Running::start(command.arg("-D").arg(dir), &format!("the {name}"), &log(name), Signal::QUIT)
    };
    let mut pair = Pair { primary: server(&primary_dir, "primary")?, standby: None };
    let mut options = ConnectOptions::resolve_ordinary_with(&primary_info, "walrider bench", &|_| None)?;
    options.give_up_after(timeout);
    let primary = &mut pair.primary;
    let started = &mut || primary.check().and_then(|()| conditions.stop.check());
    let mut connection =
        wait_for("the primary to start", timeout, started, &mut || Ok(Connection::open(&options).ok()))?;
    load::prepare(conditions, &mut connection, &primary_info, settings.bindir, &log("prepare"))?;

    let mut standby = Standby::None;
    if settings.standby != "none" {
        let standby_dir = dir.join("standby");
        let mut backup = postgres_program(settings.bindir, "pg_basebackup");
        backup.args(["-d", &primary_info, "-X", "stream", "-c", "fast", "-C", "-S", NAME, "--no-sync", "-D"]);
        program::run(backup.arg(&standby_dir), "pg_basebackup", &log("backup"), timeout, &conditions.stop)?;
        let primary_conninfo = quoted(&conninfo(PRIMARY_PORT, &format!(" application_name={NAME}")));
        let follows = format!("primary_conninfo = {primary_conninfo}\nprimary_slot_name = '{NAME}'\n");
        configure(&standby_dir, &format!("port = {STANDBY_PORT}\nsynchronous_standby_names = ''\n{follows}"))?;
        let signal = standby_dir.join("standby.signal");
        std::fs::write(&signal, "").map_err(RunError::io(format!("write \"{}\"", signal.display())))?;
        pair.standby = Some(if settings.standby == "walrider" {
            let mut command = Command::new(&place.walrider);
            Running::start(
                command.arg("standby").arg("-D").arg(&standby_dir),
                "the standby",
                &log("standby"),
                Signal::KILL,
            )?
        } else {
            server(&standby_dir, "standby")?
        });
        standby = Standby::ByPrimary(NAME.to_owned());
    }
    let of_standby = |running: &Running| match settings.standby {
        "walrider" => Process::Walrider(running.pid()),
        _ => Process::Postgres(running.pid()),
    };
    let mut servers = Servers {
        primary: connection,
        options,
        conninfo: primary_info,
        bindir: settings.bindir,
        log: log("pgbench"),
        primary_process: Some(Process::Postgres(pair.primary.pid())),
        standby_process: pair.standby.as_ref().map(of_standby),
        standby,
        goes_on: &mut || pair.check().and_then(|()| conditions.stop.check()),
    };
    if settings.standby != "none" {
        servers.wait_streaming(NAME, conditions)?;
    }
    servers.measure(conditions)
}

fn initdb(settings: &Settings<'_>, dir: &Path, log: &Path, conditions: &Conditions) -> Result<()> {
    let mut command = postgres_program(settings.bindir, "initdb");
    command.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync", "-D"]).arg(dir);
    match settings.data_checksums {
        Some("on") => _ = command.arg("--data-checksums"),
        // The default before 18, where there is no option for it.
        Some(_) if major(settings.bindir, log, conditions)? >= 18 => _ = command.arg("--no-data-checksums"),
        _ => (),
    }
    program::run(&mut command, "initdb", log, conditions.timeout, &conditions.stop)
}

/// Of the server's programs.
fn major(bindir: Option<&Path>, log: &Path, conditions: &Conditions) -> Result<u32> {
    let said = log.with_extension("version");
    let mut command = postgres_program(bindir, "initdb");
    program::run(command.arg("--version"), "initdb --version", &said, conditions.timeout, &conditions.stop)?;
    let text = std::fs::read_to_string(&said).unwrap_or_default();
    let number = text.rsplit(' ').next().unwrap_or_default();
    let digits = number.trim_end().split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().map_err(|_| RunError::failed(format!("\"{}\" tells no version of initdb", text.trim_end())))
}

/// Appends settings: the last one counts.
fn configure(dir: &Path, text: &str) -> Result<()> {
    let path = dir.join("postgresql.conf");
    let file = std::fs::OpenOptions::new().append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(RunError::io(format!("write \"{}\"", path.display())))
}

/// As a value in postgresql.conf.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\\', "\\\\").replace('\'', "''"))
}

/// As a value in a connection string.
fn quoted_word(value: &str) -> String {
    format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(of: &[(&str, &str)]) -> Vec<(String, String)> {
        of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_special_is_no_setting() {
        let given = settings(&[("bindir", "/b"), ("data_checksums", "off"), ("standby", "walrider"), ("a", "it's \\")]);
        let found = Settings::of(&given);
        assert_eq!(
            (found.bindir, found.data_checksums, found.standby),
            (Some(Path::new("/b")), Some("off"), "walrider")
        );
        assert_eq!(found.configuration, "a = 'it''s \\\\'\n");
    }

    #[test]
    fn commits_wait_where_their_waiting_is_varied() {
        let names = |of: &[(&str, &str)]| {
            let of = settings(of);
            Settings::of(&of).configuration.lines().filter(|line| line.starts_with("synchronous_standby_names")).count()
        };
        assert_eq!(names(&[("synchronous_commit", "on")]), 1);
        assert_eq!(names(&[("synchronous_commit", "on"), ("synchronous_standby_names", "")]), 1);
        assert_eq!(names(&[("synchronous_commit", "on"), ("standby", "none")]), 0);
        assert_eq!(names(&[("wal_compression", "on")]), 0);
    }
}
