//! Asks servers, each in a thread of its own: one that hangs keeps nobody from the others.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use walrider_layout::Lsn;
use walrider_observe::client::get_status;
use walrider_session::{ConnectError, ConnectOptions, Connection};

use crate::content::{self, WalContent};
use crate::sample::{Process, SCHEMA_VERSION, Sample, Server, ServerSample};
use crate::{host, query};

/// How often a standby is asked what its processes wait for.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long to wait before a server that did not answer is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// What a query on a standby ends in that is in the way of replay (`ERRCODE_T_R_SERIALIZATION_FAILURE`).
const SERIALIZATION_FAILURE: &str = "40001";
/// A standby that cancels more questions in a row does not answer.
const MOST_CANCELLED: u32 = 5;
/// How often a primary is asked what its WAL is made of.
const CONTENT_INTERVAL: Duration = Duration::from_secs(10);
/// How long a server may work on an answer. It ends the question itself then, and the session goes on.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer may take to come.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(6);

/// A server to ask.
#[derive(Clone, Debug)]
pub enum Target {
    /// PostgreSQL.
    Server(Box<ConnectOptions>),
    /// `walrider standby`, at the host and port of its `--http`.
    Walrider(String),
}

impl Target {
    /// `http://HOST:PORT` of a Walrider, or a connection string as libpq takes it; what we call ourselves there unless that says it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str, application_name: &str) -> Result<Target, ConnectError> {
        if let Some(rest) = text.strip_prefix("http://") {
            let address = rest.split('/').next().unwrap_or_default();
            if !address.contains(':') {
                return Err(ConnectError::Config(
                    format!("\"{text}\" has no port: http://HOST:PORT, as of --http").into(),
                ));
            }
            return Ok(Target::Walrider(address.to_owned()));
        }
        let mut options = ConnectOptions::resolve_ordinary(text, application_name)?;
        options.give_up_after(TIMEOUT);
        Ok(Target::Server(Box::new(options)))
    }

    /// Host and port, without user and password.
    pub fn name(&self) -> String {
        match self {
            Target::Server(options) => options.peers().join(","),
            Target::Walrider(address) => address.clone(),
        }
    }
}

/// Asks, until it is dropped.
pub struct Collector {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    interval: Duration,
}

struct Shared {
    servers: Mutex<Latest>,
    /// Somebody has answered, or failed to; or the end.
    told: Condvar,
}

struct Latest {
    samples: Vec<ServerSample>,
    /// Which of them have answered, or failed to.
    heard: Vec<bool>,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Latest> {
        self.servers.lock().expect("no panic while locked")
    }

    /// Waits; whether to go on.
    fn sleep_until(&self, at: Instant) -> bool {
        let mut latest = self.lock();
        while !latest.stop {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            latest = self.told.wait_timeout(latest, left).expect("no panic while locked").0;
        }
        false
    }

    fn tell(&self, number: usize, change: impl FnOnce(&mut ServerSample)) {
        let mut latest = self.lock();
        change(&mut latest.samples[number]);
        latest.heard[number] = true;
        self.told.notify_all();
    }
}

impl Collector {
    /// Begins to ask each of them every `interval`; `wal`: and primaries now and then what their WAL is made of, which costs them more
    /// than all the rest.
    pub fn start(targets: &[Target], interval: Duration, wal: bool) -> Collector {
        let samples =
            targets.iter().map(|target| ServerSample { name: target.name(), ..ServerSample::default() }).collect();
        let latest = Latest { samples, heard: vec![false; targets.len()], stop: false };
        let shared = Arc::new(Shared { servers: Mutex::new(latest), told: Condvar::new() });
        let threads = targets.iter().cloned().enumerate().map(|(number, target)| {
            let watcher = Watcher { shared: shared.clone(), number, interval, wal };
            thread::spawn(move || match target {
                Target::Server(options) => watcher.ask_server(&options),
                Target::Walrider(address) => watcher.ask_walrider(&address),
            })
        });
        Collector { threads: threads.collect(), shared, interval }
    }

    /// What is known now.
    pub fn sample(&self) -> Sample {
        let time = now();
        let mut servers = self.shared.lock().samples.clone();
        for server in &mut servers {
            let silent = time - server.answered_at;
            if server.error.is_none() && silent > (3 * self.interval).as_secs_f64() + 1.0 {
                server.error = Some(match server.answered_at {
                    0.0 => "no answer yet".to_owned(),
                    _ => format!("no answer for {silent:.0} s"),
                });
            }
        }
        Sample { schema_version: SCHEMA_VERSION, time, servers }
    }

    /// Waits until each has answered, or failed to, or for `timeout`.
    pub fn wait(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut latest = self.shared.lock();
        while latest.heard.contains(&false) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            latest = self.shared.told.wait_timeout(latest, left).expect("no panic while locked").0;
        }
    }
}

impl Drop for Collector {
    /// A thread that waits for a server is left to itself: it ends with its answer, or with the process.
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.told.notify_all();
        self.threads.drain(..).filter(JoinHandle::is_finished).for_each(|thread| drop(thread.join()));
    }
}

/// The clock here, in seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

struct Watcher {
    shared: Arc<Shared>,
    number: usize,
    interval: Duration,
    /// To ask what WAL is made of.
    wal: bool,
}

/// Why asking ended.
enum Ended {
    /// It is over.
    Stopped,
    /// A standby cancelled the query for replay.
    Cancelled(String),
    Failed(String),
}

impl From<ConnectError> for Ended {
    fn from(error: ConnectError) -> Ended {
        if is_for_replay(&error) { Ended::Cancelled(error.to_string()) } else { Ended::Failed(error.to_string()) }
    }
}

/// Whether replay was in the way of a query, or of the look into the catalogs that a connection begins with.
fn is_for_replay(error: &ConnectError) -> bool {
    match error {
        ConnectError::Server(message) => message.code == SERIALIZATION_FAILURE,
        ConnectError::Open(attempts) => attempts.iter().any(|attempt| is_for_replay(&attempt.error)),
        _ => false,
    }
}

impl Watcher {
    fn ask_server(&self, options: &ConnectOptions) {
        let mut cancelled = 0;
        loop {
            let begun = Instant::now();
            let (error, pause) = match self.session(options) {
                Ok(()) | Err(Ended::Stopped) => return,
                Err(Ended::Cancelled(error)) => {
                    cancelled = if begun.elapsed() > RETRY_INTERVAL { 1 } else { cancelled + 1 };
                    ((cancelled > MOST_CANCELLED).then_some(error), LOOK_INTERVAL)
                }
                Err(Ended::Failed(error)) => (Some(error), RETRY_INTERVAL),
            };
            if let Some(error) = error {
                self.shared.tell(self.number, |sample| sample.error = Some(error));
            }
            if !self.shared.sleep_until(Instant::now() + pause) {
                return;
            }
        }
    }

    /// Asks on one connection, until that fails.
    fn session(&self, options: &ConnectOptions) -> Result<(), Ended> {
        let mut connection = Connection::open(options)?;
        connection.set_response_timeout(Some(RESPONSE_TIMEOUT));
        connection.simple_query(&query::set_up(TIMEOUT.as_millis()))?;
        // Planning would cost the server more than the answers: prepared, the questions are planned once.
        connection
            .simple_query(&format!("PREPARE everything AS {}", query::everything(connection.server_version_num())))?;
        connection.simple_query(&format!("PREPARE waits AS {}", query::WAITS))?;
        let local = is_local(connection.peer());
        let auditd = local && host::runs("auditd");
        let mut looks = Looks::default();
        let mut content = Content::default();
        let mut next = Instant::now();
        loop {
            let begun = Instant::now();
            let (server, took) = ask(&mut connection)?;
            if let Some(flushed) = server.flush_lsn.filter(|_| self.wal) {
                content.look(&mut connection, flushed)?;
            }
            let watched = server.in_recovery;
            let process =
                server.startup.as_ref().filter(|_| local).and_then(|startup| host::process(startup.pid, "startup"));
            let process = process.map(|process| Process { auditd, ..process });
            if looks.is_empty() && watched {
                looks.look(&mut connection)?;
            }
            let Looks { replaying, receiving } = std::mem::take(&mut looks);
            self.shared.tell(self.number, |sample| {
                *sample = ServerSample {
                    name: std::mem::take(&mut sample.name),
                    answered_at: now() - took / 2.0,
                    took,
                    server: Some(server),
                    replaying,
                    receiving,
                    process,
                    wal: content.last.clone(),
                    ..ServerSample::default()
                };
            });
            next = (next + self.interval).max(begun);
            while watched && Instant::now() + LOOK_INTERVAL < next {
                if !self.shared.sleep_until(Instant::now() + LOOK_INTERVAL) {
                    return Err(Ended::Stopped);
                }
                looks.look(&mut connection)?;
            }
            if !self.shared.sleep_until(next) {
                return Err(Ended::Stopped);
            }
        }
    }

    fn ask_walrider(&self, address: &str) {
        let mut next = Instant::now();
        loop {
            let begun = now();
            let answer = get_status(address);
            self.shared.tell(self.number, |sample| match answer {
                Ok((status, _)) => {
                    let took = now() - begun;
                    (sample.walrider, sample.error) = (Some(status), None);
                    (sample.answered_at, sample.took) = (begun + took / 2.0, took);
                }
                Err(error) => sample.error = Some(format!("no answer from http://{address}/status: {error}")),
            });
            next = (next + self.interval).max(Instant::now());
            if !self.shared.sleep_until(next) {
                return;
            }
        }
    }
}

/// What processes were seen waiting for.
#[derive(Default)]
struct Looks {
    replaying: BTreeMap<String, u32>,
    receiving: BTreeMap<String, u32>,
}

impl Looks {
    fn is_empty(&self) -> bool {
        self.replaying.is_empty() && self.receiving.is_empty()
    }

    fn look(&mut self, connection: &mut Connection) -> Result<(), ConnectError> {
        for row in connection.simple_query("EXECUTE waits")? {
            let mut columns =
                row.into_iter().map(|column| String::from_utf8_lossy(&column.unwrap_or_default()).into_owned());
            let (Some(process), Some(wait)) = (columns.next(), columns.next()) else { continue };
            let seen = if process == "startup" { &mut self.replaying } else { &mut self.receiving };
            *seen.entry(wait).or_default() += 1;
        }
        Ok(())
    }
}

/// What a primary's WAL is made of.
#[derive(Default)]
struct Content {
    last: Option<WalContent>,
    /// When it was looked at, and up to where.
    looked: Option<(Instant, Lsn)>,
}

impl Content {
    /// Looks again if it is time: since the last time, but at most the last [`content::MOST`]. The first time there is nothing yet.
    fn look(&mut self, connection: &mut Connection, flushed: Lsn) -> Result<(), ConnectError> {
        let Some((looked, since)) = self.looked else {
            // The next round has something to look at.
            self.looked = Instant::now().checked_sub(CONTENT_INTERVAL).map(|long_ago| (long_ago, flushed));
            return Ok(());
        };
        if looked.elapsed() < CONTENT_INTERVAL || flushed.0 <= since.0 {
            return Ok(());
        }
        self.looked = Some((Instant::now(), flushed));
        let from = Lsn(since.0.max(flushed.0.saturating_sub(content::MOST)));
        self.last = Some(match Content::ask(connection, from, flushed) {
            Err(ConnectError::Server(error)) => WalContent {
                unseen: Some(format!("what WAL is made of is not seen: {error}")),
                ..WalContent::default()
            },
            other => other?,
        });
        Ok(())
    }

    fn ask(connection: &mut Connection, from: Lsn, to: Lsn) -> Result<WalContent, ConnectError> {
        let rows = connection.simple_query(content::FIND)?;
        let words: Vec<String> = rows
            .into_iter()
            .next()
            .unwrap_or_default()
            .into_iter()
            .map(|column| String::from_utf8_lossy(&column.unwrap_or_default()).into_owned())
            .collect();
        let row = words.first().zip(words.get(1)).map(|(schema, may)| (schema.as_str(), may == "t"));
        let schema = match content::found(row) {
            Ok(schema) => schema,
            Err(why) => return Ok(WalContent::unseen(why)),
        };
        let rows = connection.simple_query(&content::question(connection.server_version_num(), schema, from, to))?;
        let text = rows.first().and_then(|row| row.first()).and_then(|column| column.as_deref()).unwrap_or_default();
        Ok(serde_json::from_slice(text)
            .unwrap_or_else(|error| WalContent::unseen(format!("what WAL is made of is not understood: {error}"))))
    }
}

/// Everything, and how long the answer took in seconds.
fn ask(connection: &mut Connection) -> Result<(Server, f64), Ended> {
    let begun = Instant::now();
    let rows = connection.simple_query("EXECUTE everything")?;
    let took = begun.elapsed().as_secs_f64();
    let text = rows.first().and_then(|row| row.first()).and_then(|column| column.as_deref()).unwrap_or_default();
    let server = serde_json::from_slice(text)
        .map_err(|error| Ended::Failed(format!("{}: an answer that is not understood: {error}", connection.peer())))?;
    Ok((server, took))
}

/// Whether the peer, as [`Connection::peer`] names it, is on this host.
pub fn is_local(peer: &str) -> bool {
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    peer.starts_with('/') || host == "localhost" || host.starts_with("127.") || host == "[::1]"
}

#[cfg(test)]
mod tests {
    use walrider_session::FailedAttempt;
    use walrider_wire::backend::ServerMessage;

    use super::*;

    fn error(code: &str) -> ConnectError {
        ConnectError::Server(ServerMessage { code: code.into(), ..ServerMessage::default() })
    }

    fn at_connecting(code: &str) -> ConnectError {
        ConnectError::Open(vec![FailedAttempt { peer: "/tmp/.s.PGSQL.5432".into(), error: error(code) }])
    }

    #[test]
    fn a_question_that_replay_cancels_is_not_a_server_that_fails() {
        assert!(matches!(error(SERIALIZATION_FAILURE).into(), Ended::Cancelled(_)));
        assert!(matches!(at_connecting(SERIALIZATION_FAILURE).into(), Ended::Cancelled(_)));
        assert!(matches!(error("57P01").into(), Ended::Failed(_)));
        assert!(matches!(at_connecting("57P01").into(), Ended::Failed(_)));
        assert!(matches!(Ended::from(ConnectError::Closed), Ended::Failed(_)));
    }
}
