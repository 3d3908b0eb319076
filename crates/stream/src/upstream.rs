//! The beginning of a session: the right server, its slot, where its stream begins.

use std::sync::atomic::{AtomicU64, Ordering};

use walrider_layout::{Lsn, TimelineId};
use walrider_session::{ConnectError, ConnectOptions, Connection, Start, SystemIdentity};
use walrider_spool::SpoolError;

use crate::error::ReceiveError;
use crate::timelines;

/// Whom to connect to, and what to expect there.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// How to connect.
    pub connect: ConnectOptions,
    /// Which server it must be.
    pub expected: Expected,
    /// Whether WAL is to come before the primary has flushed it.
    pub early: Early,
    /// What makes the primary keep WAL.
    pub slot: Slot,
}

/// What a server must be, so that its WAL fits a directory; none: any.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expected {
    /// The system identifier of the directory.
    pub system_identifier: Option<u64>,
    /// The major version of the directory.
    pub major: Option<u32>,
}

/// The early stream, which is had through a connection to a database.
#[derive(Clone, Debug)]
pub enum Early {
    /// Not wanted.
    Off,
    /// Wanted if it is there; without, WAL is streamed as ever.
    Auto(ConnectOptions),
    /// No other stream will do.
    Required(ConnectOptions),
}

/// A replication slot.
#[derive(Clone, Debug)]
pub enum Slot {
    /// None is used.
    None,
    /// One that stays.
    Named {
        /// Its name.
        name: String,
        /// Make it if it is not there.
        create: bool,
    },
    /// One that ends with the connection.
    Temporary,
}

/// An open session.
pub struct Opened {
    /// The connection.
    pub connection: Connection,
    /// Who is there.
    pub identity: SystemIdentity,
    /// The slot to stream from.
    pub slot: Option<String>,
    /// The primary has the early stream.
    pub early: bool,
    /// Why it has not, where it was asked for.
    pub not_early: Option<ReceiveError>,
}

impl Upstream {
    /// Connects, checks that this is the right server, and sees to the slot (`WalReceiverMain`).
    ///
    /// # Errors
    /// No connection, another server, or no slot.
    pub fn open(&self) -> Result<Opened, ReceiveError> {
        let (mut connection, early, not_early) = self.connect()?;
        let identity = self.identify(&mut connection)?;
        let slot = self.slot(&mut connection)?;
        Ok(Opened { connection, identity, slot, early, not_early })
    }

    /// Connects so that the early stream can be had, if it can be. Whether it can; if it was wanted and cannot, why.
    fn connect(&self) -> Result<(Connection, bool, Option<ReceiveError>), ReceiveError> {
        let not_early = match &self.early {
            Early::Off => None,
            Early::Auto(database) => match connect_early(database) {
                Ok(connection) => return Ok((connection, true, None)),
                Err(error) if error.rules_out_early() => Some(error),
                Err(error) => return Err(error),
            },
            Early::Required(database) => return Ok((connect_early(database)?, true, None)),
        };
        Ok((Connection::open(&self.connect)?, false, not_early))
    }

    /// Who is there, if it is the server that is expected.
    fn identify(&self, connection: &mut Connection) -> Result<SystemIdentity, ReceiveError> {
        let primary = connection.server_version_num() / 10_000;
        if let Some(standby) = self.expected.major.filter(|&major| major != primary) {
            return Err(ReceiveError::OtherMajor { primary, standby });
        }
        let identity = connection.identify_system()?;
        if let Some(standby) = self.expected.system_identifier.filter(|&known| known != identity.system_identifier) {
            return Err(ReceiveError::OtherSystem { primary: identity.system_identifier, standby });
        }
        Ok(identity)
    }

    /// The slot to stream from, made if it is to be.
    fn slot(&self, connection: &mut Connection) -> Result<Option<String>, ReceiveError> {
        match &self.slot {
            Slot::None => Ok(None),
            Slot::Named { name, create } => {
                if *create && !connection.slot_exists(name)? {
                    connection.create_physical_slot(name, false)?;
                    tracing::info!("created replication slot \"{name}\"");
                }
                Ok(Some(name.clone()))
            }
            Slot::Temporary => {
                // The last connection may be lost for us alone, and its slot in use until the primary has noticed that.
                static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
                let number = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
                let name = format!("walrider_{}_{number}", std::process::id());
                connection.create_physical_slot(&name, true)?;
                Ok(Some(name))
            }
        }
    }
}

/// Where a slot stands, if it holds any WAL.
///
/// # Errors
/// No answer.
pub fn slot_position(connection: &mut Connection, slot: &str) -> Result<Option<(TimelineId, Lsn)>, ReceiveError> {
    let rows = connection.simple_query(&walrider_wire::command::read_replication_slot(slot))?;
    let text = |column: usize| {
        let value = rows.first().and_then(|row| row.get(column)).and_then(|value| value.as_deref());
        value.map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    };
    let position = text(1).and_then(|lsn| lsn.parse().ok());
    let timeline = text(2).and_then(|timeline| timeline.parse().ok()).map(TimelineId);
    Ok(timeline.zip(position))
}

fn connect_early(options: &ConnectOptions) -> Result<Connection, ReceiveError> {
    let mut connection = Connection::open(options)?;
    if connection.parameter("in_hot_standby") == Some("on") {
        return Err(ReceiveError::NotEarly("the server is a standby itself".to_owned()));
    }
    if connection.extension_version()?.is_none() {
        let database = options.database();
        return Err(ReceiveError::NotEarly(format!(
            "database \"{database}\" of the primary has no extension \"walrider\"; CREATE EXTENSION walrider there"
        )));
    }
    Ok(connection)
}

impl Opened {
    /// What must be told as flushed at least where commits wait for others, who may have flushed nothing yet.
    ///
    /// A slot follows what is told, backwards too (`PhysicalConfirmReceivedLocation`), and a primary whose slot needs WAL from
    /// the beginning keeps none of its own (`KeepLogSeg`): so what the slot has been told stays. A slot that holds nothing is told
    /// nothing. Without a slot no commit is before 0/1, and a standby that has flushed nothing at all is none to the primary
    /// (`SyncRepGetCandidateStandbys`): then `remote_write` would not be answered either.
    ///
    /// # Errors
    /// No answer.
    pub fn floor(&mut self) -> Result<Lsn, ReceiveError> {
        match self.slot.clone() {
            Some(slot) => Ok(slot_position(&mut self.connection, &slot)?.map_or(Lsn::INVALID, |(_, at)| at)),
            None => Ok(Lsn(1)),
        }
    }

    /// Starts streaming. Whether WAL comes before the primary has flushed it: only on the primary's own timeline.
    ///
    /// # Errors
    /// As [`Connection::start_replication`].
    pub fn start(
        &mut self,
        upstream: &Upstream,
        start: Lsn,
        timeline: TimelineId,
    ) -> Result<(Start, bool), ReceiveError> {
        let slot = self.slot.as_deref();
        if self.early && timeline == self.identity.timeline {
            match self.connection.start_early(slot, start, timeline) {
                Ok(started) => return Ok((started, true)),
                Err(error @ ConnectError::Server(_)) if !matches!(upstream.early, Early::Required(_)) => {
                    tracing::warn!(
                        "the primary refused the early stream ({error}): it sends WAL after it has flushed it, as ever"
                    );
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok((self.connection.start_replication(slot, start, timeline)?, false))
    }

    /// Stores the history files from one timeline to the primary's, those that `has` does not know
    /// (`WalRcvFetchTimeLineHistoryFiles`): see [`timelines::fetch`].
    ///
    /// # Errors
    /// As there, and without an answer.
    pub fn fetch_histories(
        &mut self,
        from: TimelineId,
        has: impl Fn(&str) -> bool,
        store: impl FnMut(TimelineId, &[u8]) -> Result<(), SpoolError>,
    ) -> Result<(), ReceiveError> {
        let ask = |timeline| Ok(self.connection.timeline_history(timeline)?);
        timelines::fetch(from, self.identity.timeline, has, ask, store)
    }
}
