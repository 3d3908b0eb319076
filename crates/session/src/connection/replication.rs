//! What a walsender understands besides queries (`repl_gram.y`), and `walrider.stream_wal` of the extension.

use walrider_layout::{Lsn, TimelineId};
use walrider_wire::command::{self, Snapshot};
use walrider_wire::frontend;

use super::copy::MAX_ROW;
use super::{Connection, State};
use crate::answer::{next_timeline, text, unexpected_answer};
use crate::{ConnectError, Result};

/// What IDENTIFY_SYSTEM says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemIdentity {
    /// Of the cluster; the same in its control file.
    pub system_identifier: u64,
    /// The timeline that the server is on.
    pub timeline: TimelineId,
    /// Its flush position; of a standby, what it has replayed or received.
    pub flushed: Lsn,
}

/// What came of [`Connection::start_replication`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// WAL follows.
    Streaming,
    /// There is nothing on this timeline from there on: the next one, and where it begins.
    Ended(Option<(TimelineId, Lsn)>),
}

/// A slot as `pg_replication_slots` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotOfDatabase {
    /// Whether it is a logical one.
    pub logical: bool,
    /// Its output plugin; empty for a physical one, as what follows is.
    pub plugin: String,
    /// The database that it decodes.
    pub database: String,
    /// Who uses it.
    pub active_pid: Option<i32>,
    /// Whether it decodes prepared transactions when they are prepared.
    pub two_phase: bool,
    /// What was committed before is not sent any more.
    pub confirmed_flush: Lsn,
    /// Why it cannot be used any more.
    pub invalidation_reason: Option<String>,
    /// Whether a standby keeps it as a copy of its primary's.
    pub synced: bool,
}

/// A logical slot that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSlot {
    /// Decoding begins there; its snapshot shows what was committed before.
    pub consistent_point: Lsn,
    /// The name of the snapshot, if it was to be exported.
    pub snapshot: Option<String>,
}

impl Connection {
    /// Who the server is.
    pub fn identify_system(&mut self) -> Result<SystemIdentity> {
        let rows = self.simple_query(command::IDENTIFY_SYSTEM)?;
        let identity = || {
            let [row] = rows.as_slice() else { return None };
            Some(SystemIdentity {
                system_identifier: text(row, 0)?.parse().ok()?,
                timeline: TimelineId(text(row, 1)?.parse().ok()?),
                flushed: text(row, 2)?.parse().ok()?,
            })
        };
        identity().ok_or_else(|| unexpected_answer("could not identify system"))
    }

    /// The name and contents of a timeline's history file.
    pub fn timeline_history(&mut self, timeline: TimelineId) -> Result<(String, Vec<u8>)> {
        let rows = self.simple_query(&command::timeline_history(timeline))?;
        let file = match rows.as_slice() {
            [row] => text(row, 0).zip(row.get(1).cloned().flatten()),
            _ => None,
        };
        let (name, contents) = file.ok_or_else(|| unexpected_answer("no timeline history file"))?;
        Ok((name.to_owned(), contents))
    }

    /// Makes a physical slot that holds WAL from now on; returns where. That it exists already is SQLSTATE 42710.
    pub fn create_physical_slot(&mut self, name: &str, temporary: bool) -> Result<Lsn> {
        let rows = self.simple_query(&command::create_physical_slot(name, temporary))?;
        let at = rows.first().and_then(|row| text(row, 1)).and_then(|text| text.parse().ok());
        at.ok_or_else(|| unexpected_answer("could not create replication slot"))
    }

    /// Makes a logical slot, on a connection to a database. Waits for all transactions that run, as long as a command may take.
    /// That it exists already is SQLSTATE 42710.
    pub fn create_logical_slot(
        &mut self,
        name: &str,
        plugin: &str,
        two_phase: bool,
        snapshot: Snapshot,
    ) -> Result<NewSlot> {
        let rows = self.simple_query(&command::create_logical_slot(name, plugin, two_phase, snapshot))?;
        let made = rows.first().and_then(|row| {
            let consistent_point = text(row, 1)?.parse().ok()?;
            Some(NewSlot { consistent_point, snapshot: text(row, 2).map(str::to_owned) })
        });
        made.ok_or_else(|| unexpected_answer("could not create replication slot"))
    }

    /// Looks for a slot of any kind and database, on a connection to a database of a server of version 17 or newer.
    pub fn slot_of_database(&mut self, name: &str) -> Result<Option<SlotOfDatabase>> {
        let rows = self.simple_query(&command::slot_of_database(name))?;
        let Some(row) = rows.first() else { return Ok(None) };
        let text = |at| text(row, at);
        let slot = || {
            Some(SlotOfDatabase {
                logical: text(0)? == "logical",
                plugin: text(1).unwrap_or_default().to_owned(),
                database: text(2).unwrap_or_default().to_owned(),
                active_pid: text(3).and_then(|pid| pid.parse().ok()),
                two_phase: text(4)? == "t",
                confirmed_flush: text(5).map_or(Some(Lsn::INVALID), |lsn| lsn.parse().ok())?,
                invalidation_reason: text(6).map(str::to_owned),
                synced: text(7) == Some("t"),
            })
        };
        slot().map(Some).ok_or_else(|| unexpected_answer("could not read replication slot"))
    }

    /// Whether there is a slot of this name. A logical one is an error of the server's.
    pub fn slot_exists(&mut self, name: &str) -> Result<bool> {
        let rows = self.simple_query(&command::read_replication_slot(name))?;
        match rows.first().and_then(|row| row.first()) {
            Some(slot_type) => Ok(slot_type.is_some()),
            None => Err(unexpected_answer("could not read replication slot")),
        }
    }

    /// Drops a slot that nobody uses.
    pub fn drop_slot(&mut self, name: &str) -> Result<()> {
        self.simple_query(&command::drop_replication_slot(name, false)).map(|_| ())
    }

    /// Asks for the WAL of a timeline from `start` on. That it was removed is SQLSTATE 58P01, here or in the stream.
    pub fn start_replication(&mut self, slot: Option<&str>, start: Lsn, timeline: TimelineId) -> Result<Start> {
        self.start(&command::start_replication(slot, start, timeline))
    }

    /// Asks for the WAL of the primary's timeline from `start` on, before the primary has flushed it: `walrider.stream_wal`.
    pub fn start_early(&mut self, slot: Option<&str>, start: Lsn, timeline: TimelineId) -> Result<Start> {
        self.start(&command::stream_wal(slot, start, timeline))
    }

    /// Asks for what a logical slot's plugin makes of the WAL from `start` on, or from where the slot was left.
    pub fn start_logical_replication(&mut self, slot: &str, start: Lsn, options: &[(&str, &str)]) -> Result<()> {
        match self.start(&command::start_logical_replication(slot, start, options))? {
            Start::Streaming => {
                // A change is one message, however long its row.
                self.max_message = MAX_ROW;
                Ok(())
            }
            Start::Ended(_) => Err(unexpected_answer("could not start WAL streaming")),
        }
    }

    /// The version of Walrider's extension in the database, if it is there.
    pub fn extension_version(&mut self) -> Result<Option<String>> {
        let rows = self.simple_query(command::EXTENSION_VERSION)?;
        Ok(rows.first().and_then(|row| text(row, 0)).map(str::to_owned))
    }

    /// Ends the stream from our side, and reads the server's result; WAL that is under way is thrown away. Waits. If the
    /// timeline has ended: the next one and where it begins. [`Connection::start_replication`] can follow. A server that
    /// shuts down closes the connection instead.
    pub fn end_copy(&mut self) -> Result<Option<(TimelineId, Lsn)>> {
        if !matches!(self.state, State::Streaming | State::Ended) {
            return Err(ConnectError::Protocol("the connection is not streaming".to_owned()));
        }
        self.state = State::Busy;
        frontend::copy_done(&mut self.output.0);
        let deadline = self.deadline();
        next_timeline(&self.collect_answer(deadline)?)
    }

    fn start(&mut self, command: &str) -> Result<Start> {
        let deadline = self.begin(command)?;
        let message = self.receive(deadline)?;
        match message.0 {
            b'W' => {
                self.state = State::Streaming;
                Ok(Start::Streaming)
            }
            _ => next_timeline(&self.collect_answer_from(message, deadline)?).map(Start::Ended),
        }
    }
}
