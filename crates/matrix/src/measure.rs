//! One run on servers that are there: the load, until the standby has replayed all of it; and what that took.

use std::path::{Path, PathBuf};
use std::time::Instant;

use walrider_lag::collect::is_local;
use walrider_lag::host;
use walrider_layout::Lsn;
use walrider_observe::client::get_status;
use walrider_session::{ConnectOptions, Connection};

use crate::figures::Outcome;
use crate::program::wait_for;
use crate::{Conditions, Result, RunError, load};

/// How to know what a standby has replayed.
pub enum Standby {
    /// There is none.
    None,
    /// By the primary's word about this `application_name`. After a commit at `remote_apply` the standby tells it at once.
    ByPrimary(String),
    /// By its own.
    Server(Box<Connection>),
    /// By that of a Walrider, at this host and port.
    Walrider(String),
}

/// Processes on this machine whose time is measured, by their ids.
#[derive(Clone, Copy)]
pub enum Process {
    /// A postmaster and all of its.
    Postgres(u32),
    /// `walrider standby`.
    Walrider(u32),
}

impl Process {
    /// Of the server of a connection, if that is on this machine.
    pub fn of(connection: &mut Connection) -> Result<Option<Process>> {
        let pid = one(connection, "SELECT pg_backend_pid()")?.parse().ok().filter(|_| is_local(connection.peer()));
        Ok(pid.and_then(host::parent).map(Process::Postgres))
    }

    fn cpu_seconds(self) -> Option<f64> {
        let (Process::Postgres(pid) | Process::Walrider(pid)) = self;
        host::tree_seconds(pid)
    }

    /// How long replay was busy.
    fn replay_seconds(self) -> Option<f64> {
        match self {
            Process::Postgres(postmaster) => {
                let startup = host::children(postmaster).into_iter().find_map(|pid| host::process(pid, "startup"))?;
                Some(startup.user_seconds + startup.system_seconds + startup.block_io_seconds)
            }
            Process::Walrider(pid) => host::unnamed_threads_seconds(pid),
        }
    }
}

/// The servers of a run.
pub struct Servers<'a> {
    /// To the primary.
    pub primary: Connection,
    /// Where the load connects.
    pub options: ConnectOptions,
    /// The same for programs of PostgreSQL's.
    pub conninfo: String,
    /// Where these programs are, if not on the PATH.
    pub bindir: Option<&'a Path>,
    /// What they say goes there.
    pub log: PathBuf,
    /// What replays.
    pub standby: Standby,
    /// Of the primary.
    pub primary_process: Option<Process>,
    /// Of the standby.
    pub standby_process: Option<Process>,
    /// Whether all goes on: an error if a server has ended, or somebody wants us to.
    pub goes_on: &'a mut dyn FnMut() -> Result<()>,
}

impl Servers<'_> {
    /// Makes a run.
    pub fn measure(&mut self, conditions: &Conditions) -> Result<Outcome> {
        self.primary.set_response_timeout(Some(conditions.timeout));
        let mark = self.mark()?;
        self.catch_up(mark, conditions)?;
        let before = (self.inserted()?, self.primary_cpu(), self.standby_cpu(), self.replay());
        let loaded = load::run(conditions, self)?;
        let ended = Instant::now();
        let (primary_cpu, inserted) = (self.primary_cpu(), self.inserted()?);
        let replayed = self.replayed()?;
        let mark = self.mark()?;
        let has_standby = self.catch_up(mark, conditions)?;
        let catch_up = ended.elapsed().as_secs_f64();
        let since = |now: Option<f64>, before: Option<f64>| Some(now? - before?);
        Ok(Outcome {
            operations: loaded.operations,
            load_seconds: loaded.seconds,
            wal_bytes: inserted.0.saturating_sub(before.0.0),
            primary_cpu_seconds: since(primary_cpu, before.1),
            standby_cpu_seconds: since(self.standby_cpu(), before.2),
            replay_busy_seconds: since(self.replay(), before.3),
            lag_bytes: replayed.map(|replayed| inserted.0.saturating_sub(replayed.0)),
            catch_up_seconds: has_standby.then_some(catch_up),
            server_version: self.primary.server_version_num(),
        })
    }

    fn primary_cpu(&self) -> Option<f64> {
        self.primary_process?.cpu_seconds()
    }

    fn standby_cpu(&self) -> Option<f64> {
        self.standby_process?.cpu_seconds()
    }

    fn replay(&self) -> Option<f64> {
        self.standby_process?.replay_seconds()
    }

    fn inserted(&mut self) -> Result<Lsn> {
        lsn(&one(&mut self.primary, "SELECT pg_current_wal_insert_lsn()")?)
    }

    /// Commits something that the standby tells of when it has replayed it; where that was.
    fn mark(&mut self) -> Result<Lsn> {
        self.primary.simple_query("SET synchronous_commit = remote_apply")?;
        lsn(&one(&mut self.primary, "SELECT pg_logical_emit_message(true, 'walrider', '')")?)
    }

    /// Waits until all up to `end` is replayed; whether there is a standby.
    fn catch_up(&mut self, end: Lsn, conditions: &Conditions) -> Result<bool> {
        if matches!(self.standby, Standby::None) {
            return Ok(false);
        }
        let mut seen = None;
        let deadline = Instant::now() + conditions.timeout;
        loop {
            if let Some(replayed) = self.replayed()? {
                if replayed.0 >= end.0 {
                    return Ok(true);
                }
                seen = Some(replayed);
            }
            (self.goes_on)()?;
            if Instant::now() >= deadline {
                let seen = seen.map_or_else(|| "nothing".to_owned(), |lsn| format!("up to {lsn}"));
                let waited = conditions.timeout.as_secs_f64();
                return Err(RunError::failed(format!("the standby has replayed {seen} of {end} after {waited} s")));
            }
            std::thread::sleep(crate::program::LOOK_INTERVAL);
        }
    }

    /// What the standby has replayed, as far as is known.
    fn replayed(&mut self) -> Result<Option<Lsn>> {
        let said = match &mut self.standby {
            Standby::None => return Ok(None),
            Standby::Walrider(address) => {
                let status = get_status(address).map_err(RunError::io(format!("ask http://{address}/status")))?.0;
                return Ok(status.positions.replayed.lsn);
            }
            Standby::Server(connection) => text(connection, "SELECT pg_last_wal_replay_lsn()")?,
            Standby::ByPrimary(name) => {
                let question = format!("SELECT replay_lsn FROM pg_stat_replication WHERE application_name = '{name}'");
                text(&mut self.primary, &question)?
            }
        };
        said.map(|said| lsn(&said)).transpose()
    }

    /// Waits until the primary sends to the standby as it writes.
    pub fn wait_streaming(&mut self, name: &str, conditions: &Conditions) -> Result<()> {
        let question = format!("SELECT state FROM pg_stat_replication WHERE application_name = '{name}'");
        let primary = &mut self.primary;
        wait_for("the standby to connect and stream", conditions.timeout, self.goes_on, &mut || {
            Ok(text(primary, &question)?.filter(|state| state == "streaming"))
        })?;
        Ok(())
    }
}

/// The only value of an answer, if there is a row and it is not null.
pub fn text(connection: &mut Connection, query: &str) -> Result<Option<String>> {
    let row = connection.simple_query(query)?.into_iter().next();
    Ok(row.and_then(|row| row.into_iter().next().flatten()).map(|value| String::from_utf8_lossy(&value).into_owned()))
}

/// The same of one that must be there.
pub fn one(connection: &mut Connection, query: &str) -> Result<String> {
    text(connection, query)?.ok_or_else(|| RunError::failed(format!("no answer to {query}")))
}

fn lsn(text: &str) -> Result<Lsn> {
    text.parse().map_err(|_| RunError::failed(format!("\"{text}\" is no position")))
}
