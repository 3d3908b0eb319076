//! What is done on the primary.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use walrider_session::{ConnectOptions, Connection};

use crate::measure::Servers;
use crate::plan::Load;
use crate::program::{self, LOOK_INTERVAL, Running, postgres_program};
use crate::{Conditions, Result, RunError};

/// Where the tables of [`Load::Tables`] are.
pub const SCHEMA: &str = "walrider_bench";
/// How many there are, and how many partitions each has, one for a day.
const TABLES: u64 = 5;
const PARTITIONS: u64 = 4;
/// Rows of a transaction.
const ROWS: u64 = 500;
/// For ever.
const LONG: Duration = Duration::from_secs(365 * 86_400);

/// What was done.
pub struct Loaded {
    /// Rows or transactions.
    pub operations: u64,
    /// How long it took.
    pub seconds: f64,
}

/// SQL that makes the tables.
pub fn tables() -> String {
    let table = |nth: u64| {
        let partition = |day: u64| {
            let (from, to) = (1 + day, 2 + day);
            format!(
                "CREATE TABLE {SCHEMA}.t{nth}_{from} PARTITION OF {SCHEMA}.t{nth} \
                 FOR VALUES FROM ('2026-01-{from:02} 00:00:00+00') TO ('2026-01-{to:02} 00:00:00+00');\n"
            )
        };
        let partitions: String = (0..PARTITIONS).map(partition).collect();
        format!(
            "CREATE TABLE {SCHEMA}.t{nth} (ts timestamptz, key bigint, value double precision, note text, PRIMARY KEY (ts, key)) \
             PARTITION BY RANGE (ts);\n{partitions}"
        )
    };
    format!("CREATE SCHEMA {SCHEMA};\n{}", (1..=TABLES).map(table).collect::<String>())
}

/// Makes what the load needs, with a program of PostgreSQL's if need be. There is no standby yet that commits could wait for.
pub fn prepare(
    conditions: &Conditions,
    primary: &mut Connection,
    conninfo: &str,
    bindir: Option<&Path>,
    log: &Path,
) -> Result<()> {
    let mut command;
    match &conditions.load {
        Load::Tables => {
            primary.simple_query("SET synchronous_commit = local")?;
            primary.simple_query(&tables())?;
            return Ok(());
        }
        Load::Pgbench { scale } => {
            command = postgres_program(bindir, "pgbench");
            command.args(["-i", "-q", "-s", &scale.to_string(), conninfo]);
        }
        Load::Script { init: Some(init), .. } => {
            command = postgres_program(bindir, "psql");
            command.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", conninfo, "-f"]).arg(init);
        }
        Load::Script { init: None, .. } => return Ok(()),
    }
    command.env("PGOPTIONS", "-c synchronous_commit=local");
    // However large the tables are to be: it goes on as long as nobody wants it to end.
    program::run(&mut command, "making the tables", log, LONG, &conditions.stop)
}

/// Does it, for as long as it shall take.
pub fn run(conditions: &Conditions, servers: &mut Servers<'_>) -> Result<Loaded> {
    let begun = Instant::now();
    let operations = match &conditions.load {
        Load::Tables => insert(conditions, &servers.options, servers.goes_on)?,
        Load::Pgbench { .. } => pgbench(conditions, servers, None)?,
        Load::Script { file, .. } => pgbench(conditions, servers, Some(file))?,
    };
    Ok(Loaded { operations, seconds: begun.elapsed().as_secs_f64() })
}

/// Inserts with all sessions; how many rows.
fn insert(conditions: &Conditions, options: &ConnectOptions, goes_on: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
    let (interrupted, mut interrupt) = std::io::pipe().map_err(RunError::io("make a pipe".to_owned()))?;
    let mut options = options.clone();
    options.interrupt_with(Arc::new(OwnedFd::from(interrupted)));
    options.give_up_after(conditions.timeout);
    let end = Instant::now() + conditions.duration;
    thread::scope(|scope| {
        let sessions: Vec<_> = (0..u64::from(conditions.clients))
            .map(|client| {
                let options = &options;
                scope.spawn(move || insert_rows(options, client, end))
            })
            .collect();
        let mut wrong = Ok(());
        while sessions.iter().any(|session| !session.is_finished()) {
            wrong = wrong.and_then(|()| goes_on()).and_then(|()| {
                let late = Instant::now() > end + conditions.timeout;
                let waited = conditions.timeout.as_secs_f64();
                if late { Err(RunError::failed(format!("a commit takes longer than {waited} s"))) } else { Ok(()) }
            });
            if wrong.is_err() {
                // All of them see it: nobody reads it.
                interrupt.write_all(b"!").map_err(RunError::io("write to a pipe".to_owned()))?;
                break;
            }
            thread::sleep(LOOK_INTERVAL);
        }
        let rows = sessions.into_iter().map(|session| session.join().expect("it does not panic")).collect::<Vec<_>>();
        wrong?;
        rows.into_iter().sum()
    })
}

/// Inserts with one session until the end; how many rows.
fn insert_rows(options: &ConnectOptions, client: u64, end: Instant) -> Result<u64> {
    let mut connection = Connection::open(options)?;
    let mut pipeline = connection.pipeline()?;
    for nth in 1..=TABLES {
        let text = format!("INSERT INTO {SCHEMA}.t{nth} VALUES ($1, $2, $3, $4)");
        pipeline.prepare(nth, &format!("insert_{nth}"), &text)?;
    }
    done(pipeline.finish()?)?;
    let names: Vec<String> = (1..=TABLES).map(|nth| format!("insert_{nth}")).collect();
    let mut rows = 0;
    while Instant::now() < end {
        // What is between two Syncs is one transaction.
        let mut pipeline = connection.pipeline()?;
        for number in rows..rows + ROWS {
            let row = row(client, number);
            let values = row.each_ref().map(|value| Some(value.as_bytes()));
            pipeline.execute(number, &names[(number % TABLES) as usize], values, Some(1))?;
        }
        done(pipeline.finish()?)?;
        rows += ROWS;
    }
    Ok(rows)
}

fn done(outcome: walrider_session::Outcome) -> Result<()> {
    match outcome.failure {
        Some((_, error)) => Err(RunError::failed(error)),
        None if outcome.unexpected_total > 0 => Err(RunError::failed("an INSERT has not inserted its row")),
        None => Ok(()),
    }
}

/// Row `number` of a session, the same in every run: time, key, value, note. A transaction is in one partition, the next in the next.
fn row(client: u64, number: u64) -> [String; 4] {
    let key = client << 40 | number;
    let day = 1 + number / ROWS % PARTITIONS;
    let (second, microsecond) = (number / 1000 % 86_400, number % 1000 * 1000);
    let mut random = fastrand::Rng::with_seed(key);
    let note = (0..4).map(|_| format!("{:016x}", random.u64(..))).collect::<String>();
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let time = format!("2026-01-{day:02} {hour:02}:{minute:02}:{second:02}.{microsecond:06}+00");
    [time, key.to_string(), (random.f64() * 1e6).to_string(), note]
}

/// Runs pgbench, on a script or its own; how many transactions.
fn pgbench(conditions: &Conditions, servers: &mut Servers<'_>, script: Option<&Path>) -> Result<u64> {
    let (clients, seconds) = (conditions.clients.to_string(), conditions.duration.as_secs().max(1).to_string());
    let threads = thread::available_parallelism().map_or(1, usize::from).min(conditions.clients.into()).to_string();
    let mut command = postgres_program(servers.bindir, "pgbench");
    command.args(["-n", "-M", "prepared", "--random-seed=1", "-c", &clients, "-j", &threads, "-T", &seconds]);
    if let Some(script) = script {
        command.arg("-f").arg(script);
    }
    let log = &servers.log;
    let running = Running::start(command.arg(&servers.conninfo), "pgbench", log, Signal::KILL)?;
    let ended = running.wait(conditions.duration + conditions.timeout, servers.goes_on);
    ended.map_err(|error| error.with_log(|| program::last_lines(log)))?;
    let text = std::fs::read_to_string(log).map_err(RunError::io(format!("read \"{}\"", log.display())))?;
    transactions(&text).ok_or_else(|| RunError::failed("pgbench did not say how many transactions it has made"))
}

/// As pgbench says at its end.
fn transactions(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("number of transactions actually processed: "))?;
    line.split('/').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_of_their_partition_and_the_same_every_time() {
        assert_eq!(row(1, 499)[..2], ["2026-01-01 00:00:00.499000+00", "1099511628275"]);
        assert_eq!(row(0, 500)[..2], ["2026-01-02 00:00:00.500000+00", "500"]);
        assert_eq!(row(0, 86_399_999)[0], "2026-01-04 23:59:59.999000+00");
        assert_eq!(row(2, 7), row(2, 7));
        assert_ne!(row(2, 7)[3], row(3, 7)[3]);
        assert_eq!(row(2, 7)[3].len(), 64);
        assert!(tables().contains(
            "t5_4 PARTITION OF walrider_bench.t5 FOR VALUES FROM ('2026-01-04 00:00:00+00') TO ('2026-01-05"
        ));
    }

    #[test]
    fn what_pgbench_says() {
        let said = "x\nnumber of transactions actually processed: 1234\nnumber of failed transactions: 0 (0.000%)\n";
        assert_eq!(transactions(said), Some(1234));
        assert_eq!(transactions("number of transactions actually processed: 5/10\n"), Some(5));
        assert_eq!(transactions("pgbench: error: x\n"), None);
    }
}
