//! `--measure`: counts, lag and rates, at intervals and at the end.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use walrider_layout::Lsn;
use walrider_logical::measure::{Counts, Measure, Messages, Transactions};
use walrider_logical::message::{Kind, Message};
use walrider_logical::stream::{Sink, StreamError};
use walrider_session::{ConnectError, ConnectOptions, Connection};

use crate::failure::SCHEMA_VERSION;

/// Where a server's WAL ends: that it has flushed, or replayed.
const SERVER_POSITION: &str = "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() \
                               ELSE pg_catalog.pg_current_wal_flush_lsn() END";
/// How long the server may take to say so.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks a server, over a session of its own, where its WAL ends.
struct Server {
    connect: Result<ConnectOptions, ConnectError>,
    connection: Option<Connection>,
    /// It was said why it cannot be asked.
    told: bool,
}

impl Server {
    /// `None` if it cannot be asked; the first time, that is logged.
    fn position(&mut self) -> Option<Lsn> {
        match self.ask() {
            Ok(position) => Some(position),
            Err(error) => {
                self.connection = None;
                if !std::mem::replace(&mut self.told, true) {
                    tracing::warn!(
                        "could not ask the publisher where its WAL ends, the lag in bytes is not known: {error}"
                    );
                }
                None
            }
        }
    }

    fn ask(&mut self) -> Result<Lsn, String> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let options = self.connect.as_ref().map_err(ToString::to_string)?;
                let mut connection = Connection::open(options).map_err(|error| error.to_string())?;
                connection.set_response_timeout(Some(ANSWER_TIMEOUT));
                none.insert(connection)
            }
        };
        let rows = connection.simple_query(SERVER_POSITION).map_err(|error| error.to_string())?;
        let value = rows.first().and_then(|row| row.first()?.as_deref());
        let position = value.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        position.ok_or_else(|| "no answer".to_owned())
    }
}

/// Counts, and prints what was counted.
pub struct Meter {
    measure: Measure,
    server: Server,
    interval: Duration,
    json: bool,
    began: Instant,
    /// When the interval began, and what was counted then.
    since: (Instant, Messages, Transactions),
    seen: Lsn,
}

impl Meter {
    /// `interval` is between reports; zero: only at the end.
    pub fn new(conninfo: &str, interrupt: &Arc<OwnedFd>, interval: Duration, json: bool) -> Meter {
        let connect = ConnectOptions::resolve_ordinary(conninfo, super::APPLICATION_NAME).map(|mut connect| {
            connect.interrupt_with(interrupt.clone());
            connect.give_up_after(ANSWER_TIMEOUT);
            connect
        });
        let now = Instant::now();
        Meter {
            measure: Measure::new(),
            server: Server { connect, connection: None, told: false },
            interval,
            json,
            began: now,
            since: (now, Messages::default(), Transactions::default()),
            seen: Lsn::INVALID,
        }
    }

    /// Prints all that was counted.
    pub fn finish(mut self) {
        let lag = self.lag();
        if self.json {
            println!(
                "{}",
                self.object(lag, self.rates(self.began, Messages::default(), Transactions::default()), true)
            );
        } else {
            crate::out::say(format_args!("{}", table(self.measure.counts())));
            let rates = self.rates(self.began, Messages::default(), Transactions::default());
            println!("{}", self.sentence(lag, rates));
        }
    }

    fn report(&mut self) {
        let lag = self.lag();
        let (at, messages, transactions) = self.since;
        let rates = self.rates(at, messages, transactions);
        if self.json {
            println!("{}", self.object(lag, rates, false));
        } else {
            println!("{}", self.sentence(lag, rates));
        }
        self.measure.begin_interval();
        self.since = (Instant::now(), self.measure.counts().total(), self.measure.counts().transactions());
    }

    /// What is written and was not received, in bytes.
    fn lag(&mut self) -> Option<u64> {
        let position = self.server.position().filter(|_| self.seen.is_valid())?;
        Some(position.0.saturating_sub(self.seen.0))
    }

    /// Messages, bytes and transactions a second since a moment at which there were so many.
    fn rates(&self, at: Instant, messages: Messages, transactions: Transactions) -> [f64; 3] {
        let (now, counts) = (self.measure.counts().total(), self.measure.counts().transactions().count);
        let seconds = at.elapsed().as_secs_f64().max(1e-6);
        [now.count - messages.count, now.bytes - messages.bytes, counts - transactions.count]
            .map(|difference| (difference as f64 / seconds * 10.0).round() / 10.0)
    }

    fn object(&self, lag: Option<u64>, [messages, bytes, transactions]: [f64; 3], last: bool) -> Value {
        let counts = self.measure.counts();
        let by_kind: BTreeMap<&str, Value> =
            counts.messages.iter().map(|(kind, of)| (kind.name(), counted(*of))).collect();
        let sorts: BTreeMap<&str, Value> = sorts(counts).into_iter().map(|(name, of)| (name, sort(of))).collect();
        let seconds = |delay: Option<i64>| delay.map(|delay| delay as f64 / 1e6);
        json!({
            "schema_version": SCHEMA_VERSION,
            "final": last,
            "seconds": (self.began.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
            "received_lsn": self.seen.is_valid().then(|| self.seen.to_string()),
            "messages": by_kind,
            "total": counted(counts.total()),
            "rows": counts.rows,
            "transactions": sorts,
            "lag_bytes": lag,
            "delay_seconds": { "last": seconds(counts.delay.last), "max": seconds(counts.delay.max) },
            "rates": { "messages": messages, "bytes": bytes, "transactions": transactions },
        })
    }

    fn sentence(&self, lag: Option<u64>, [messages, bytes, transactions]: [f64; 3]) -> String {
        let (counts, seconds) = (self.measure.counts(), self.began.elapsed().as_secs_f64());
        let (total, all) = (counts.total(), counts.transactions());
        let lag = lag.map_or("unknown".to_owned(), |lag| format!("{lag} bytes"));
        let delay = counts.delay.max.map_or("none".to_owned(), |delay| format!("{:.3} s", delay as f64 / 1e6));
        format!(
            "{seconds:.1} s: {} messages ({messages}/s), {} bytes ({bytes}/s), {} transactions ({transactions}/s), {} empty; \
             lag {lag}, longest delay {delay}",
            total.count, total.bytes, all.count, all.empty
        )
    }
}

fn counted(Messages { count, bytes }: Messages) -> Value {
    json!({ "count": count, "bytes": bytes })
}

fn sort(Transactions { count, empty }: Transactions) -> Value {
    json!({ "count": count, "empty": empty })
}

fn sorts(counts: &Counts) -> [(&'static str, Transactions); 4] {
    [
        ("plain", counts.plain),
        ("prepared", counts.prepared),
        ("streamed", counts.streamed),
        ("streamed_aborted", counts.aborted),
    ]
}

/// What was counted, as a table.
fn table(counts: &Counts) -> String {
    let mut text = format!("{:<20}{:>12}{:>16}\n", "message", "count", "bytes");
    let kinds = Kind::ALL.iter().filter_map(|kind| Some((kind.name(), *counts.messages.get(kind)?)));
    for (name, Messages { count, bytes }) in kinds.chain([("total", counts.total())]) {
        text += &format!("{name:<20}{count:>12}{bytes:>16}\n");
    }
    text += &format!("\n{:<20}{:>12}{:>16}\n", "transaction", "count", "empty");
    for (name, Transactions { count, empty }) in sorts(counts) {
        text += &format!("{:<20}{count:>12}{empty:>16}\n", name.replace('_', ", "));
    }
    text + "\n"
}

impl Sink for Meter {
    fn take(&mut self, _lsn: Lsn, send_time: i64, message: &Message<'_>, len: usize) -> Result<(), StreamError> {
        self.measure.count(message, len, send_time);
        Ok(())
    }

    fn pass_on(&mut self, _tend: &mut dyn FnMut() -> Result<(), StreamError>) -> Result<(), StreamError> {
        Ok(())
    }

    fn sync(&mut self) -> Result<(), StreamError> {
        Ok(())
    }

    fn disconnected(&mut self) -> Result<(), StreamError> {
        self.measure.reconnect();
        Ok(())
    }

    fn tick(&mut self, seen: Lsn) -> Option<Duration> {
        self.seen = seen;
        if self.interval.is_zero() {
            return None;
        }
        if self.since.0.elapsed() >= self.interval {
            self.report();
        }
        Some(self.interval.saturating_sub(self.since.0.elapsed()))
    }

    fn closes(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
