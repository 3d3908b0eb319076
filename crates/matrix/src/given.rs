//! Runs on servers that are there. Their settings are changed only by ALTER SYSTEM, and put back at the end.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use walrider_lag::collect::Target;
use walrider_session::{ConnectOptions, Connection};

use crate::figures::Outcome;
use crate::load::{self, SCHEMA};
use crate::measure::{Process, Servers, Standby, one, text};
use crate::plan::{Factor, Load};
use crate::program::wait_for;
use crate::{Conditions, Result, RunError};

/// Settings that are lists of quoted names: what ALTER SYSTEM has of them cannot be said to it again.
const LISTS_OF_NAMES: [&str; 4] =
    ["search_path", "temp_tablespaces", "session_preload_libraries", "local_preload_libraries"];
/// How long a server may take to read its configuration.
const RELOAD: Duration = Duration::from_secs(30);

/// The servers, and what their settings were.
pub struct Given {
    primary: ConnectOptions,
    conninfo: String,
    standby: Option<Target>,
    bindir: Option<PathBuf>,
    /// To be put back, for each server that settings are changed on: its options, and by name what postgresql.auto.conf had.
    before: Vec<(ConnectOptions, BTreeMap<String, Option<String>>)>,
}

impl Given {
    /// Looks at the servers: whether the factors are settings that a reload changes, and what they are now.
    ///
    /// # Errors
    /// A server cannot be reached, is none that this can be done with, or a factor is none that can be varied there.
    pub fn open(
        primary: &str,
        standby: Option<&str>,
        bindir: Option<PathBuf>,
        factors: &[Factor],
        conditions: &Conditions,
    ) -> Result<Given> {
        let mut options = ConnectOptions::resolve_ordinary(primary, "walrider bench")?;
        options.give_up_after(conditions.timeout);
        let standby = standby.map(|standby| Target::parse(standby, "walrider bench")).transpose()?;
        let mut given = Given { primary: options, conninfo: primary.to_owned(), standby, bindir, before: Vec::new() };
        let mut connection = given.connect(&given.primary, conditions)?;
        if one(&mut connection, "SELECT pg_is_in_recovery()")? == "t" {
            return Err(RunError::failed(format!("{} is a standby", connection.peer())));
        }
        let tables = format!("SELECT 1 FROM pg_namespace WHERE nspname = '{SCHEMA}'");
        if conditions.load == Load::Tables && text(&mut connection, &tables)?.is_some() {
            let message = format!("{} has a schema {SCHEMA}, of a bench that was killed: drop it", connection.peer());
            return Err(RunError::failed(message));
        }
        let mut changed = vec![given.primary.clone()];
        if let Some(Target::Server(options)) = &given.standby {
            let mut connection = given.connect(options, conditions)?;
            if one(&mut connection, "SELECT pg_is_in_recovery()")? != "t" {
                return Err(RunError::failed(format!("{} is no standby", connection.peer())));
            }
            changed.push((**options).clone());
        }
        for options in changed {
            let mut connection = given.connect(&options, conditions)?;
            let before = factors.iter().map(|factor| {
                can_be_varied(&mut connection, factor)?;
                Ok((factor.name.clone(), saved(&mut connection, &factor.name)?))
            });
            let before = before.collect::<Result<_>>()?;
            given.before.push((options, before));
        }
        Ok(given)
    }

    /// What the settings were that are going to be changed, for people.
    pub fn changes(&self) -> Vec<String> {
        let of = |(options, before): &(ConnectOptions, BTreeMap<String, Option<String>>)| {
            let peer = options.peers().join(",");
            let was = |(name, value): (&String, &Option<String>)| match value {
                Some(value) => format!("{peer}: {name} is changed by ALTER SYSTEM; it was set to {}", literal(value)),
                None => format!("{peer}: {name} is changed by ALTER SYSTEM; it was not set by that"),
            };
            before.iter().map(was).collect::<Vec<_>>()
        };
        self.before.iter().flat_map(of).collect()
    }

    /// Makes a run with these settings.
    ///
    /// # Errors
    /// [`RunError::Interrupted`], or what failed. The load's tables are dropped; the settings stay until [`Given::put_back`].
    pub fn run(&self, settings: &[(String, String)], conditions: &Conditions) -> Result<Outcome> {
        for (options, _) in &self.before {
            let mut connection = self.connect(options, conditions)?;
            change(&mut connection, settings.iter().map(|(name, value)| (name.as_str(), Some(value.as_str()))))?;
        }
        let mut connection = self.connect(&self.primary, conditions)?;
        if !settings.is_empty() {
            // All runs begin with as few full-page images behind them.
            connection.simple_query("CHECKPOINT")?;
        }
        if conditions.load == Load::Tables {
            connection.simple_query(&load::tables())?;
        }
        let outcome = self.measure(connection, conditions);
        if conditions.load != Load::Tables {
            return outcome;
        }
        let dropping =
            || Ok(self.connect(&self.primary, conditions)?.simple_query(&format!("DROP SCHEMA {SCHEMA} CASCADE"))?);
        let dropped: Result<_> = dropping();
        // What went wrong first says more.
        outcome.and_then(|outcome| dropped.map(|_| outcome))
    }

    fn measure(&self, mut connection: Connection, conditions: &Conditions) -> Result<Outcome> {
        let (standby, standby_process) = match &self.standby {
            None => (Standby::None, None),
            Some(Target::Walrider(address)) => (Standby::Walrider(address.clone()), walrider_process(address)),
            Some(Target::Server(options)) => {
                let mut connection = self.connect(options, conditions)?;
                let process = Process::of(&mut connection)?;
                (Standby::Server(Box::new(connection)), process)
            }
        };
        let primary_process = Process::of(&mut connection)?;
        let logs = TempDir::with_prefix("bench-").map_err(RunError::io("make a directory".to_owned()))?;
        let mut servers = Servers {
            primary: connection,
            options: self.primary.clone(),
            conninfo: self.conninfo.clone(),
            bindir: self.bindir.as_deref(),
            log: logs.path().join("pgbench"),
            standby,
            primary_process,
            standby_process,
            goes_on: &mut || conditions.stop.check(),
        };
        servers.measure(conditions)
    }

    /// Puts the settings back as they were, and looks whether they are.
    ///
    /// # Errors
    /// For each server where that failed: what to do by hand.
    pub fn put_back(&self, conditions: &Conditions) -> std::result::Result<(), Vec<String>> {
        let failed = self.before.iter().filter(|(_, before)| !before.is_empty()).filter_map(|(options, before)| {
            let attempt = || -> Result<()> {
                let mut connection = self.connect(options, conditions)?;
                change(&mut connection, before.iter().map(|(name, value)| (name.as_str(), value.as_deref())))?;
                for (name, value) in before {
                    if saved(&mut connection, name)? != *value {
                        return Err(RunError::failed(format!("{name} is not as it was")));
                    }
                }
                Ok(())
            };
            let error = attempt().err()?;
            let commands: Vec<String> = before.iter().map(|(name, value)| alter(name, value.as_deref())).collect();
            let by_hand = format!("{}; SELECT pg_reload_conf()", commands.join("; "));
            Some(format!(
                "{}: the settings were not put back: {error}; do it by hand: {by_hand}",
                options.peers().join(",")
            ))
        });
        let failed: Vec<String> = failed.collect();
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    fn connect(&self, options: &ConnectOptions, conditions: &Conditions) -> Result<Connection> {
        let mut connection = Connection::open(options)?;
        connection.set_response_timeout(Some(conditions.timeout));
        Ok(connection)
    }
}

/// Of a Walrider whose status is served on this machine.
fn walrider_process(address: &str) -> Option<Process> {
    let status = walrider_observe::client::get_status(address).ok()?.0;
    walrider_lag::collect::is_local(address).then_some(Process::Walrider(status.pid))
}

/// An error if a reload does not change it.
fn can_be_varied(connection: &mut Connection, factor: &Factor) -> Result<()> {
    let name = &factor.name;
    let context = text(connection, &format!("SELECT context FROM pg_settings WHERE lower(name) = {}", literal(name)))?;
    let why = match context.as_deref() {
        _ if factor.is_special() => "it is no setting that a running server changes",
        _ if LISTS_OF_NAMES.contains(&name.as_str()) => "what it was cannot be put back for sure",
        None => "the server does not know it",
        Some("internal") => "it cannot be changed",
        Some("postmaster") => "the server would have to be restarted",
        Some(_) => return Ok(()),
    };
    Err(RunError::failed(format!("{name} cannot be varied on {}: {why}", connection.peer())))
}

/// What postgresql.auto.conf has of it.
fn saved(connection: &mut Connection, name: &str) -> Result<Option<String>> {
    let name = literal(name);
    let file = "sourcefile = current_setting('data_directory') || '/postgresql.auto.conf'";
    text(
        connection,
        &format!(
            "SELECT setting FROM pg_file_settings WHERE lower(name) = {name} AND {file} ORDER BY seqno DESC LIMIT 1"
        ),
    )
}

/// Changes settings, and waits until the server has read them.
fn change<'a>(connection: &mut Connection, settings: impl Iterator<Item = (&'a str, Option<&'a str>)>) -> Result<()> {
    let commands: Vec<String> = settings.map(|(name, value)| alter(name, value)).collect();
    if commands.is_empty() {
        return Ok(());
    }
    for command in commands {
        connection.simple_query(&command)?;
    }
    // A session reads its configuration when the postmaster has, before its next command.
    let loaded = one(connection, "SELECT pg_conf_load_time()")?;
    connection.simple_query("SELECT pg_reload_conf()")?;
    wait_for("the server to read its configuration", RELOAD, &mut || Ok(()), &mut || {
        Ok(Some(one(connection, "SELECT pg_conf_load_time()")?).filter(|now| *now != loaded))
    })?;
    Ok(())
}

fn alter(name: &str, value: Option<&str>) -> String {
    match value {
        Some(value) => format!("ALTER SYSTEM SET {name} = {}", literal(value)),
        None => format!("ALTER SYSTEM RESET {name}"),
    }
}

/// As a string in SQL.
fn literal(value: &str) -> String {
    let quoted = value.replace('\\', "\\\\").replace('\'', "''");
    format!("{}'{quoted}'", if value.contains('\\') { "E" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        assert_eq!(alter("a", Some("it's")), "ALTER SYSTEM SET a = 'it''s'");
        assert_eq!(alter("a.b", Some("c:\\d")), "ALTER SYSTEM SET a.b = E'c:\\\\d'");
        assert_eq!(alter("a", None), "ALTER SYSTEM RESET a");
    }
}
