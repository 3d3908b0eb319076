//! The target's side of `apply`: sessions, replication origins, what is durable there, and who waits for whom.

use std::collections::VecDeque;

use walrider_layout::Lsn;
use walrider_session::{ConnectOptions, Connection, SystemIdentity};
use walrider_wire::command::quote_literal;

use crate::apply::Settings;
use crate::error::ApplyError;

/// Longest name of an origin, in bytes (`RepOriginId` names, `MAX_RONAME_LEN`, PostgreSQL 18); without it the limit is that of gids.
const MAX_ORIGIN: usize = 100;

/// Where the target's transactions say how far they are.
///
/// It cannot be told from the replication origins: a transaction that is aborted moves its session's origin too, to what
/// `pg_replication_origin_xact_setup` was given (`RecordTransactionAbort`, xact.c; native apply resets its session's origin first, which
/// SQL cannot when a session is terminated). A row is changed by what commits, and by nothing else.
pub const PROGRESS: &str = "walrider_logical.progress";

/// Name of its schema, and of itself.
pub const PROGRESS_NAMES: (&str, &str) = ("walrider_logical", "progress");

/// What the role must be allowed to call.
pub const FUNCTIONS: [&str; 7] = [
    "pg_replication_origin_create(text)",
    "pg_replication_origin_oid(text)",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_session_reset()",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
    "pg_replication_origin_progress(text, boolean)",
    "pg_show_replication_origin_status()",
];

fn make_progress(control: &mut Connection) -> Result<(), ApplyError> {
    let schema = PROGRESS_NAMES.0;
    let find = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = '{schema}' AND c.relname = '{}')",
        PROGRESS_NAMES.1
    );
    let [is_there] = control.query_row(&find)?;
    let is_there = is_there.as_deref() == Some(b"t");
    let use_it = format!("SELECT FROM {PROGRESS} LIMIT 0");
    let make = format!(
        "CREATE SCHEMA IF NOT EXISTS {schema}; CREATE TABLE IF NOT EXISTS {PROGRESS} (origin pg_catalog.text NOT NULL, \
         part pg_catalog.text NOT NULL, lsn pg_catalog.pg_lsn NOT NULL, PRIMARY KEY (origin, part)) WITH (fillfactor = 20)"
    );
    match control.simple_query(if is_there { &use_it } else { &make }) {
        Err(error) if error.is_sqlstate("42501") => Err(ApplyError::Refused(format!(
            "target: {error}; the role keeps its progress there: {}",
            if is_there {
                "GRANT USAGE ON SCHEMA walrider_logical TO it, and SELECT, INSERT, UPDATE, DELETE ON walrider_logical.progress"
            } else {
                "GRANT CREATE ON DATABASE to it"
            }
        ))),
        done => Ok(done.map(|_| ())?),
    }
}

/// The row of a worker.
pub fn part(number: usize) -> String {
    number.to_string()
}

/// The row of a transaction that was prepared.
pub fn prepared_part(xid: u32) -> String {
    format!("prepared {xid}")
}

/// The row that tells that it was prepared here. Other than [`prepared_part`], which is a part of it, it is there from then on.
pub fn was_prepared_part(xid: u32) -> String {
    format!("prepared {xid} here")
}

/// What the session's next commit says of the publisher's: where it ends, and when that was, in microseconds since 2000-01-01.
/// Both are expressions.
pub fn xact_setup_sql(lsn: &str, time: &str) -> String {
    format!(
        "SELECT pg_catalog.pg_replication_origin_xact_setup({lsn}::pg_catalog.pg_lsn, \
         pg_catalog.timestamptz '2000-01-01 00:00:00+00' + {time}::pg_catalog.int8 * interval '1 microsecond')"
    )
}

/// Says how far a part is. It never goes back: what was prepared before the slot was made comes with positions from then.
pub fn progress_sql(origin: &str, part: &str, lsn: &str) -> String {
    let (origin, part) = (quote_literal(origin), quote_literal(part));
    format!(
        "INSERT INTO {PROGRESS} AS p (origin, part, lsn) VALUES ({origin}, {part}, {lsn}) \
         ON CONFLICT (origin, part) DO UPDATE SET lsn = greatest(p.lsn, excluded.lsn)"
    )
}

/// What the names of our origins begin with; a number follows.
fn prefix(origin: &str) -> String {
    format!("walrider_{origin}_")
}

/// Name of the replication origin of a session, by what they have in common.
pub fn name_of(origin: &str, number: usize) -> String {
    format!("{}{number}", prefix(origin))
}

/// That an origin of `pg_replication_origin` is ours, as SQL. "a_1" begins with "a_", and so does the first origin of "a_1".
pub fn is_ours_sql(origin: &str) -> String {
    let prefix = quote_literal(&prefix(origin));
    format!(
        "(pg_catalog.starts_with(roname, {prefix}) \
         AND pg_catalog.substr(roname, pg_catalog.length({prefix}) + 1) ~ '^[0-9]+$')"
    )
}

/// Makes an origin, if there is none; no row if there was one. `origin` is a literal.
pub fn create_sql(origin: &str) -> String {
    format!(
        "SELECT pg_catalog.pg_replication_origin_create({origin}) \
         WHERE pg_catalog.pg_replication_origin_oid({origin}) IS NULL"
    )
}

/// As native apply has it (`InitializeLogRepWorker`, worker.c; `libpqrcv_connect`), and nothing ends a session that waits.
pub fn set_up_session(connection: &mut Connection, synchronous_commit: bool) -> Result<(), ApplyError> {
    let synchronous = if synchronous_commit { "on" } else { "off" };
    let replica = connection.simple_query("SET session_replication_role = 'replica'");
    if replica.as_ref().is_err_and(|error| error.is_sqlstate("42501")) {
        return Err(ApplyError::Refused(
            "the target's role may not set session_replication_role; as a superuser there, \
             GRANT SET ON PARAMETER session_replication_role TO it"
                .into(),
        ));
    }
    replica?;
    connection.simple_query(&format!(
        "SET client_encoding = 'UTF8'; SET search_path = ''; SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; \
         SET extra_float_digits = 3; SET row_security = off; SET statement_timeout = 0; SET lock_timeout = 0; \
         SET transaction_timeout = 0; SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0; \
         SET plan_cache_mode = force_generic_plan; SET standard_conforming_strings = on; \
         SET default_transaction_read_only = off; SET synchronous_commit = {synchronous}"
    ))?;
    // A backend that waits for a lock or executes for long notices that we are gone, and gives our origin back. Not every system can tell.
    let notices = connection.simple_query("SET client_connection_check_interval = '1s'");
    if notices.as_ref().is_err_and(|error| !error.is_sqlstate("22023")) {
        notices?;
    }
    Ok(())
}

/// A session for each worker, which holds its origin; and its backend's process id.
pub fn open_sessions(
    control: &mut Connection,
    target: &ConnectOptions,
    settings: &Settings,
) -> Result<Vec<(Connection, i32)>, ApplyError> {
    if settings.origin.len() > MAX_ORIGIN {
        return Err(ApplyError::Refused(format!("the name \"{}\" is too long for an origin", settings.origin)));
    }
    let [is_standby] = control.query_row("SELECT pg_catalog.pg_is_in_recovery()")?;
    if is_standby.as_deref() == Some(b"t") {
        return Err(ApplyError::Refused(
            "the target is a standby, which nothing can be applied to; name its primary".into(),
        ));
    }
    make_progress(control)?;
    let origins: Vec<String> =
        (0..settings.jobs).map(|number| quote_literal(&name_of(&settings.origin, number))).collect();
    for origin in &origins {
        control.simple_query(&create_sql(origin)).map_err(explain)?;
    }
    let open = |origin: &String| -> Result<(Connection, i32), ApplyError> {
        let mut connection = Connection::open(target)?;
        set_up_session(&mut connection, settings.synchronous_commit)?;
        connection
            .simple_query(&format!("SELECT pg_catalog.pg_replication_origin_session_setup({origin})"))
            .map_err(explain)?;
        let [pid] = connection.query_row("SELECT pg_catalog.pg_backend_pid()")?;
        Ok((connection, parsed(pid).unwrap_or(0)))
    };
    // Side by side: each takes some round trips, and a process of the server's that starts.
    std::thread::scope(|scope| {
        let threads: Vec<_> = origins.iter().map(|origin| scope.spawn(|| open(origin))).collect();
        let ended = || ApplyError::System("open a session", std::io::Error::other("a thread panicked"));
        threads.into_iter().map(|thread| thread.join().map_err(|_| ended())?).collect()
    })
}

fn explain(error: walrider_session::ConnectError) -> ApplyError {
    if error.is_sqlstate("42501") {
        return ApplyError::Refused(format!(
            "target: {error}; as a superuser there, GRANT EXECUTE ON FUNCTION {} TO the role, and SELECT ON pg_replication_origin, \
             pg_replication_origin_status",
            FUNCTIONS.join(", ")
        ));
    }
    // configuration_limit_exceeded, or no free origin
    if error.is_sqlstate("53400") || error.is_sqlstate("53000") {
        return ApplyError::Refused(format!(
            "target: {error}; each of --jobs needs a replication origin: raise max_active_replication_origins there \
             (max_replication_slots before PostgreSQL 18), or use fewer"
        ));
    }
    error.into()
}

/// Where to go on: what has committed, and is durable on return. Nobody must hold one of our origins, those of an earlier run with more
/// workers among them: a session that is left from it may commit yet.
pub fn start(control: &mut Connection, settings: &Settings) -> Result<Lsn, ApplyError> {
    let rows = control
        .simple_query(&format!(
            "SELECT roname FROM pg_catalog.pg_replication_origin WHERE {}",
            is_ours_sql(&settings.origin)
        ))
        .map_err(explain)?;
    let held: Vec<String> = (0..settings.jobs).map(|number| name_of(&settings.origin, number)).collect();
    for row in &rows {
        let Some(name) = row[0].as_deref().and_then(|name| std::str::from_utf8(name).ok()) else { continue };
        if held.iter().any(|held| held == name) {
            continue;
        }
        let name = quote_literal(name);
        let hold = format!(
            "SELECT pg_catalog.pg_replication_origin_session_setup({name}); \
             SELECT pg_catalog.pg_replication_origin_session_reset()"
        );
        control.simple_query(&hold).map_err(explain)?;
    }
    let origin = quote_literal(&settings.origin);
    let [last] = control.query_row(&format!(
        "SELECT max(lsn) FROM {PROGRESS} WHERE origin = {origin} AND NOT pg_catalog.starts_with(part, 'prepared ')"
    ))?;
    // Commits that are seen need not be durable; the publisher forgets what it is told of.
    flush(control, settings)?;
    Ok(parsed(last).unwrap_or(Lsn(0)))
}

/// The progress must be that of a slot of this publisher: what is before it would be left out.
pub fn check_publisher(
    control: &mut Connection,
    settings: &Settings,
    publisher: &SystemIdentity,
    start: Lsn,
) -> Result<(), ApplyError> {
    let (origin, own) = (quote_literal(&settings.origin), system_part(publisher.system_identifier));
    let ask =
        format!("SELECT part FROM {PROGRESS} WHERE origin = {origin} AND pg_catalog.starts_with(part, 'system ')");
    let known = control.simple_query(&ask)?;
    let known = known.first().and_then(|row| Some(String::from_utf8_lossy(row.first()?.as_deref()?).into_owned()));
    let behind = start > publisher.flushed;
    let why = match &known {
        Some(known) if *known == own => {
            if behind {
                tracing::warn!(
                    "the publisher is at {}, and the target has its transactions up to {start}: was it a failover that lost some? \
                     what comes before {start} is left out",
                    publisher.flushed
                );
            }
            return Ok(());
        }
        Some(known) => format!("it is that of {known}, and the publisher is {own}"),
        None if behind => format!("the publisher is at {} only", publisher.flushed),
        None => return Ok(control.simple_query(&progress_sql(&settings.origin, &own, "'0/0'")).map(drop)?),
    };
    Err(ApplyError::Refused(format!(
        "the target has the progress of another publisher for \"{}\", up to {start}, before which all would be left out: {why}. Choose \
         another --origin; or, if the target has all that is before this slot's position, as after a new copy or pg_upgrade of the publisher, \
         DELETE FROM {PROGRESS} WHERE origin = {origin} on the target",
        settings.origin
    )))
}

/// The row that tells whose positions the others have.
fn system_part(system_identifier: u64) -> String {
    format!("system {system_identifier}")
}

/// A slot with two phases needs a target that can prepare.
pub fn check_prepared(control: &mut Connection) -> Result<(), ApplyError> {
    let [most] = control.query_row("SHOW max_prepared_transactions")?;
    if most.as_deref() == Some(b"0") {
        return Err(ApplyError::Refused(
            "the slot sends prepared transactions, and the target has max_prepared_transactions = 0; raise it there"
                .into(),
        ));
    }
    Ok(())
}

/// Makes durable all that was committed with our origins.
pub fn flush(control: &mut Connection, settings: &Settings) -> Result<(), ApplyError> {
    let flush = format!(
        "SELECT pg_catalog.pg_replication_origin_progress(roname, true) FROM pg_catalog.pg_replication_origin WHERE {}",
        is_ours_sql(&settings.origin)
    );
    control.simple_query(&flush).map_err(explain)?;
    Ok(())
}

/// What a value of an answer says; null, and what it is not, is none.
fn parsed<T: std::str::FromStr>(value: Option<Vec<u8>>) -> Option<T> {
    std::str::from_utf8(&value?).ok()?.parse().ok()
}

/// Who a backend waits for, and who these wait for: it may be a session that is not ours, which waits for one of ours.
pub fn blocking_pids(control: &mut Connection, pid: i32) -> Result<Vec<i32>, ApplyError> {
    let rows = control.simple_query(&format!(
        "WITH RECURSIVE waits (pid) AS (SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids({pid})) \
         UNION SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(waits.pid)) FROM waits) SELECT pid FROM waits"
    ))?;
    Ok(rows.into_iter().filter_map(|mut row| parsed(row.pop()?)).collect())
}

/// Cancels what a backend executes.
pub fn cancel(control: &mut Connection, pid: i32) -> Result<(), ApplyError> {
    control.simple_query(&format!("SELECT pg_catalog.pg_cancel_backend({pid})"))?;
    Ok(())
}

/// What of our commits is durable on the target.
#[derive(Debug)]
pub struct Durable {
    synchronous: bool,
    position: Lsn,
    /// WAL of the target up to here holds all up to there on the publisher; both grow.
    waiting: VecDeque<(Lsn, Lsn)>,
}

impl Durable {
    /// Everything up to `start` is.
    pub fn new(synchronous: bool, start: Lsn) -> Durable {
        Durable { synchronous, position: start, waiting: VecDeque::new() }
    }

    /// Up to where on the publisher.
    pub fn position(&self) -> Lsn {
        self.position
    }

    /// Whether something is applied and not durable.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Asks the target, if there is anything to ask. `applied`: all up to there has committed.
    pub fn look(&mut self, control: &mut Connection, settings: &Settings, applied: Lsn) -> Result<(), ApplyError> {
        if self.synchronous {
            self.position = applied;
            return Ok(());
        }
        let known = self.waiting.back().map_or(self.position, |last| last.1);
        if applied <= known && self.waiting.is_empty() {
            return Ok(());
        }
        let prefix = quote_literal(&prefix(&settings.origin));
        let [local, flushed] = control.query_row(&format!(
            "SELECT max(local_lsn), pg_catalog.pg_current_wal_flush_lsn() FROM pg_catalog.pg_replication_origin_status \
             WHERE pg_catalog.starts_with(external_id, {prefix})"
        ))?;
        if applied > known {
            // None of ours has written anything: then nothing has to be durable.
            self.waiting.push_back((parsed(local).unwrap_or(Lsn(0)), applied));
        }
        let flushed = parsed(flushed).unwrap_or(Lsn(0));
        while self.waiting.front().is_some_and(|(local, _)| *local <= flushed) {
            self.position = self.waiting.pop_front().expect("there is one").1;
        }
        Ok(())
    }
}
