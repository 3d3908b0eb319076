//! PostgreSQL on the directory of a standby that is read: started and stopped by `pg_ctl`, asked by SQL.

use std::num::NonZeroU32;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use walrider_datadir::DataDirError;
use walrider_datadir::held::shown;
use walrider_datadir::lock::LockFile;
use walrider_datadir::open::read_control;
use walrider_layout::Lsn;
use walrider_layout::control::DbState;
use walrider_session::{ConnectError, ConnectOptions, Connection};

use crate::error::StandbyError;
use crate::settings::{ReadableSettings, Settings};

/// How long the server may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long `pg_ctl` waits for a start, in seconds. Until the server is consistent may take much longer: that is looked for.
const START_SECONDS: &str = "5";
/// How often to look whether it has ended.
const LOOK: Duration = Duration::from_millis(100);

/// What a server says of itself. Needs no right, but that for `horizon` and `conflict`, null without: `pg_read_all_stats`.
const QUESTION: &str = "\
SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn(), \
 CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_is_wal_replay_paused() END, \
 (SELECT pg_catalog.count(*) > 0 FROM pg_catalog.pg_stat_wal_receiver), \
 (SELECT latest_end_lsn FROM pg_catalog.pg_stat_wal_receiver), (SELECT received_tli FROM pg_catalog.pg_stat_wal_receiver), \
 (SELECT sender_host || ':' || sender_port FROM pg_catalog.pg_stat_wal_receiver), \
 (SELECT slot_name FROM pg_catalog.pg_stat_wal_receiver), \
 (extract(epoch FROM pg_catalog.pg_last_xact_replay_timestamp() - '2000-01-01 00:00:00+00'::timestamptz) * 1000000)::bigint, \
 (SELECT wait_event_type IN ('Lock', 'BufferPin') OR wait_event LIKE 'RecoveryConflict%' \
  FROM pg_catalog.pg_stat_activity WHERE backend_type = 'startup')";

/// How a server stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Seen {
    pub in_recovery: bool,
    pub received: Lsn,
    pub replayed: Lsn,
    pub paused: bool,
    /// It receives.
    pub connected: bool,
    /// What the primary has told of last; [`Lsn::INVALID`] where that is not known.
    pub told: Lsn,
    pub timeline: Option<NonZeroU32>,
    pub primary: Option<String>,
    pub slot: Option<String>,
    /// Commit time of the last transaction replayed, in microseconds since 2000.
    pub commit: Option<i64>,
    /// Replay waits for a query.
    pub conflict: bool,
}

impl Seen {
    /// How far the primary has flushed, at least.
    pub fn horizon(&self) -> Lsn {
        self.told.max(self.received)
    }

    /// Bytes that the speed of replay alone is behind; `None` while something else holds it, or the primary is away: then nobody
    /// could tell when Walrider is near its end.
    pub fn behind(&self) -> Option<u64> {
        let known = self.connected && self.replayed.is_valid() && !self.paused && !self.conflict;
        known.then(|| self.received.0.saturating_sub(self.replayed.0))
    }

    fn of(row: Vec<Option<Vec<u8>>>) -> Option<Seen> {
        let mut columns =
            row.into_iter().map(|column| column.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()));
        let mut next = || columns.next();
        let lsn = |text: Option<String>| text.and_then(|text| text.parse().ok()).unwrap_or(Lsn::INVALID);
        let flag = |text: Option<String>| text.as_deref() == Some("t");
        Some(Seen {
            in_recovery: flag(next()?),
            received: lsn(next()?),
            replayed: lsn(next()?),
            paused: flag(next()?),
            connected: flag(next()?),
            told: lsn(next()?),
            timeline: next()?.and_then(|text| text.parse().ok()),
            primary: next()?,
            slot: next()?,
            commit: next()?.and_then(|text| text.parse().ok()),
            conflict: flag(next()?),
        })
    }
}

/// Whether a server runs on the directory, and what its lock file says.
pub(super) fn running(settings: &Settings) -> Result<Option<LockFile>, DataDirError> {
    LockFile::of_server(&settings.data_dir)
}

/// Whether nothing says any more that the directory is a standby's: recovery has ended, or is about to.
pub(super) fn is_promoted(settings: &Settings) -> bool {
    !settings.data_dir.join("standby.signal").exists()
}

/// What `pg_control` says of the directory.
pub(super) fn state(settings: &Settings) -> Result<DbState, DataDirError> {
    Ok(read_control(&settings.data_dir)?.state)
}

/// Starts a server, and waits a little. It may need longer until it can be asked.
pub(crate) fn start(settings: &Settings, wait: bool) -> Result<(), String> {
    let mut options = vec!["start", "-s", "-w"];
    let config = settings.config_file.as_ref().map(|file| format!("-c config_file='{}'", file.display()));
    if let Some(config) = &config {
        options.extend(["-o", config]);
    }
    if !wait {
        options.extend(["-t", START_SECONDS]);
    }
    pg_ctl(settings, &options)
}

/// Stops it as `pg_ctl stop` does, and waits for its end: sessions are ended, and a restartpoint is made.
pub(super) fn stop(settings: &Settings) -> Result<(), StandbyError> {
    let Some(lock) = running(settings)? else { return Ok(()) };
    let told = tell(settings, &["stop", "-s", "-m", "fast", "-W"]);
    // Somebody else may have been quicker.
    let runs = || Ok::<bool, DataDirError>(running(settings)?.is_some_and(|now| now.pid == lock.pid));
    if told.is_err() && runs()? {
        return told;
    }
    while runs()? {
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Has it promote itself; does not wait.
pub(super) fn promote(settings: &Settings) -> Result<(), StandbyError> {
    tell(settings, &["promote", "-s", "-W"])
}

/// Has it read its configuration again.
pub(super) fn reload(settings: &Settings) -> Result<(), StandbyError> {
    tell(settings, &["reload", "-s"])
}

fn tell(settings: &Settings, options: &[&str]) -> Result<(), StandbyError> {
    pg_ctl(settings, options).map_err(|why| StandbyError::Server { command: options[0].to_owned(), why })
}

/// Runs it. It, and a server that it starts, write where we do.
fn pg_ctl(settings: &Settings, options: &[&str]) -> Result<(), String> {
    let Some(program) = &settings.pg_ctl else { return Err("there is no pg_ctl: name it with --pg-ctl".to_owned()) };
    // The server takes a lock file of its grandparent's for one that is left over (`CreateLockFile`, `miscinit.c`; `start_postmaster`, `pg_ctl.c`
    // tells it who that is). That must not be us: where pg_ctl gave up waiting, the lock may be ours again.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(program);
    // That is for us, not for the server.
    command.env_remove("NOTIFY_SOCKET");
    command.args(options).arg("-D").arg(shown(&settings.data_dir)).stdin(Stdio::null());
    let status = command.status().map_err(|error| format!("could not run \"{}\": {error}", program.display()))?;
    if status.success() { Ok(()) } else { Err(format!("\"{}\": {status}; see the server's log", program.display())) }
}

/// A session with the server, made when it is needed.
#[derive(Default)]
pub(super) struct Session(Option<Connection>);

impl Session {
    /// Asks how it stands.
    pub fn ask(&mut self, settings: &ReadableSettings, lock: &LockFile) -> Result<Seen, ConnectError> {
        let rows = self.query(settings, lock, QUESTION)?;
        let seen = rows.into_iter().next().and_then(Seen::of);
        seen.ok_or_else(|| ConnectError::Protocol("the server's answer has too few columns".to_owned()))
    }

    /// Holds replay, or lets it go on.
    pub fn pause(&mut self, settings: &ReadableSettings, lock: &LockFile, pause: bool) -> Result<(), ConnectError> {
        let function = if pause { "pg_wal_replay_pause" } else { "pg_wal_replay_resume" };
        self.query(settings, lock, &format!("SELECT pg_catalog.{function}()")).map(drop)
    }

    fn query(
        &mut self,
        settings: &ReadableSettings,
        lock: &LockFile,
        query: &str,
    ) -> Result<Vec<Vec<Option<Vec<u8>>>>, ConnectError> {
        let mut connection = match self.0.take() {
            Some(connection) => connection,
            None => connect(settings, lock)?,
        };
        let rows = connection.simple_query(query)?;
        // It is gone after an error.
        self.0 = Some(connection);
        Ok(rows)
    }
}

fn connect(settings: &ReadableSettings, lock: &LockFile) -> Result<Connection, ConnectError> {
    let host = [&lock.socket_dir, &lock.listen_address].into_iter().find(|host| !host.is_empty());
    let host = match host.map(String::as_str) {
        Some("*" | "0.0.0.0" | "::") | None => "localhost",
        Some(host) => host,
    };
    let quoted = host.replace('\\', "\\\\").replace('\'', "\\'");
    // The environment's are for the primary.
    let conninfo = format!(
        "host='{quoted}' hostaddr='' port={} target_session_attrs=any dbname=postgres {}",
        lock.port, settings.local_conninfo
    );
    let mut options = ConnectOptions::resolve_ordinary(&conninfo, "walrider standby")?;
    options.give_up_after(TIMEOUT);
    let mut connection = Connection::open(&options)?;
    connection.set_response_timeout(Some(TIMEOUT));
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(columns: &[Option<&str>]) -> Vec<Option<Vec<u8>>> {
        columns.iter().map(|column| column.map(|text| text.as_bytes().to_vec())).collect()
    }

    #[test]
    fn answers_are_read() {
        let told = [
            Some("t"),
            Some("0/300"),
            Some("0/100"),
            Some("f"),
            Some("t"),
            Some("0/280"),
            Some("2"),
            Some("db1:5432"),
            Some("s"),
            Some("-5"),
            Some("f"),
        ];
        let seen = Seen::of(row(&told)).unwrap();
        assert_eq!((seen.behind(), seen.timeline, seen.commit), (Some(0x200), NonZeroU32::new(2), Some(-5)));
        for (column, text) in [(3, "t"), (4, "f"), (10, "t"), (2, "")] {
            let mut told = told;
            told[column] = Some(text);
            assert_eq!(Seen::of(row(&told)).unwrap().behind(), None, "{column}");
        }
        // Without rights, and while nothing is received.
        let nothing = [Some("t"), None, Some("0/100"), Some("f"), Some("t"), None, None, None, None, None, None];
        assert_eq!(Seen::of(row(&nothing)).unwrap().behind(), Some(0));
        assert_eq!(Seen::of(row(&told[..10])), None);
    }
}
