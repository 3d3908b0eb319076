//! The publisher's side of `apply`: its slot, checked, and the messages that come from it.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Instant, SystemTime};

use walrider_layout::Lsn;
use walrider_session::{ConnectError, ConnectOptions, Connection, CopyEvent, Read};
use walrider_wire::stream::{StatusUpdate, Streamed};

use crate::error::ApplyError;
use crate::message::Protocol;
use crate::target::quote_literal;

/// The plugins whose messages we read.
const PLUGINS: [&str; 2] = ["pgoutput", "walrider_pgoutput"];
/// 2000-01-01 in seconds since 1970.
const POSTGRES_EPOCH: u64 = 946_684_800;

/// What the publisher is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The slot.
    pub slot: String,
    /// Publications.
    pub publications: Vec<String>,
    /// Changes that came to the publisher by replication: `any`, or `none` to leave them out.
    pub origin: String,
    /// Whether large transactions are sent while they run.
    pub streaming: bool,
}

/// What came.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A message of the plugin.
    Message(&'a [u8]),
    /// Nothing for us up to here.
    Keepalive {
        /// Up to where the publisher has decoded.
        wal_end: Lsn,
        /// It wants an answer.
        reply_requested: bool,
    },
}

/// A slot that streams.
pub struct Feed {
    connection: Connection,
    /// Whether prepared transactions are sent as such.
    pub two_phase: bool,
    /// What the changes are sent in.
    pub protocol: Protocol,
    /// Up to where the publisher has sent or decoded.
    pub wal_end: Lsn,
    /// When something last came.
    pub heard: Instant,
}

fn microseconds() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (since.as_micros() as i64) - (POSTGRES_EPOCH * 1_000_000) as i64
}

impl Feed {
    /// Connects, checks the slot and the publications, and starts streaming from `start`, or from where the slot was left if that
    /// is later.
    pub fn start(options: &ConnectOptions, wanted: &Wanted, start: Lsn) -> Result<Feed, ApplyError> {
        let source = ApplyError::Source;
        let mut connection = Connection::open(options).map_err(source)?;
        connection.simple_query(
            "SET client_encoding = 'UTF8'; SET datestyle = 'ISO'; SET intervalstyle = 'postgres'; SET extra_float_digits = 3",
        )
        .map_err(source)?;
        let two_phase = check_slot(&mut connection, wanted)?;
        check_publications(&mut connection, wanted)?;
        let protocol = Protocol::V4;
        let names: Vec<String> =
            wanted.publications.iter().map(|name| walrider_wire::command::quote_identifier(name)).collect();
        let names = names.join(",");
        let mut plugin = vec![("proto_version", "4"), ("publication_names", names.as_str())];
        plugin.push(("origin", wanted.origin.as_str()));
        if wanted.streaming {
            plugin.push(("streaming", "on"));
        }
        if two_phase {
            plugin.push(("two_phase", "on"));
        }
        let started = connection.start_logical_replication(&wanted.slot, start, &plugin);
        if let Err(error) = started {
            // object_in_use
            if error.is_sqlstate("55006") {
                return Err(ApplyError::Source(error));
            }
            return Err(source(error));
        }
        Ok(Feed { connection, two_phase, protocol, wal_end: start, heard: Instant::now() })
    }

    /// Host and port, or the socket.
    pub fn peer(&self) -> &str {
        self.connection.peer()
    }

    /// Receives what is there; does not wait. `false`: nothing was.
    pub fn receive(&mut self) -> Result<bool, ApplyError> {
        match self.connection.read_some().map_err(ApplyError::Source)? {
            Read::Bytes(_) => {
                self.heard = Instant::now();
                Ok(true)
            }
            Read::WouldBlock => Ok(false),
            Read::Closed => Err(ApplyError::Source(ConnectError::Closed)),
        }
    }

    /// The next event of what was received.
    pub fn next(&mut self) -> Result<Option<Event<'_>>, ApplyError> {
        let Some(event) = self.connection.next_message().map_err(ApplyError::Source)? else { return Ok(None) };
        let CopyEvent::Data(payload) = event else { return Err(ApplyError::Source(ConnectError::Closed)) };
        match Streamed::parse(payload).map_err(|error| ApplyError::Source(error.into()))? {
            Streamed::XLogData { wal_end, data, .. } => {
                self.wal_end = self.wal_end.max(wal_end);
                Ok(Some(Event::Message(data)))
            }
            Streamed::Keepalive { wal_end, reply_requested, .. } => {
                self.wal_end = self.wal_end.max(wal_end);
                Ok(Some(Event::Keepalive { wal_end, reply_requested }))
            }
        }
    }

    /// Tells the publisher how far we are. Nothing is lost if it is not taken now: the next one says as much.
    pub fn tell(&mut self, write: Lsn, flush: Lsn, apply: Lsn) -> Result<(), ApplyError> {
        let mut payload = Vec::new();
        StatusUpdate { write, flush, apply, time: microseconds(), reply_requested: false }.encode(&mut payload);
        let _ = self.connection.send_copy_data(&payload);
        self.flush()
    }

    /// Sends what could not be sent at once.
    pub fn flush(&mut self) -> Result<(), ApplyError> {
        self.connection.flush().map(|_| ()).map_err(ApplyError::Source)
    }

    /// Whether something waits to be sent.
    pub fn wants_write(&self) -> bool {
        self.connection.wants_write()
    }

    /// Ends the stream, and waits until the publisher has read our last word.
    pub fn end(mut self) {
        // It is only a courtesy: what was told is on its way.
        let _ = self.connection.end_copy();
    }
}

impl AsFd for Feed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Whether it sends prepared transactions as such.
fn check_slot(connection: &mut Connection, wanted: &Wanted) -> Result<bool, ApplyError> {
    let name = &wanted.slot;
    let query = format!(
        "SELECT plugin, two_phase, active, database = pg_catalog.current_database(), database, coalesce(active_pid, 0), \
         wal_status = 'lost' FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
        quote_literal(name)
    );
    let rows = connection.simple_query(&query).map_err(ApplyError::Source)?;
    let refused = |text: String| Err(ApplyError::Refused(text));
    let Some(row) = rows.first() else {
        return refused(format!(
            "the publisher has no replication slot \"{name}\"; `walrider logical setup` makes one, with the copy of the tables \
             that fits to it"
        ));
    };
    let text = |at: usize| String::from_utf8_lossy(row[at].as_deref().unwrap_or_default()).into_owned();
    if row[0].is_none() {
        return refused(format!("replication slot \"{name}\" is a physical one; name a logical one"));
    }
    if !PLUGINS.contains(&text(0).as_str()) {
        let plugins = PLUGINS.join("\" or \"");
        return refused(format!(
            "replication slot \"{name}\" has the plugin \"{}\"; it must be \"{plugins}\"",
            text(0)
        ));
    }
    if text(3) != "t" {
        return refused(format!(
            "replication slot \"{name}\" is one of the database \"{}\"; name that in --source",
            text(4)
        ));
    }
    if text(6) == "t" {
        return refused(format!(
            "replication slot \"{name}\" has lost WAL that it needs (max_slot_wal_keep_size); the target has to be set up again"
        ));
    }
    Ok(text(1) == "t")
}

fn check_publications(connection: &mut Connection, wanted: &Wanted) -> Result<(), ApplyError> {
    let names: Vec<String> = wanted.publications.iter().map(|name| quote_literal(name)).collect();
    let query = format!(
        "SELECT n FROM pg_catalog.unnest(ARRAY[{}]::pg_catalog.text[]) n \
         WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_publication p WHERE p.pubname = n)",
        names.join(", ")
    );
    let missing = connection.simple_query(&query).map_err(ApplyError::Source)?;
    if let Some(name) = missing.first().and_then(|row| row[0].as_ref()) {
        let name = String::from_utf8_lossy(name);
        return Err(ApplyError::Refused(format!(
            "the publisher has no publication \"{name}\"; create it, or name another"
        )));
    }
    Ok(())
}
