//! The beginning of a session: the right server, its slot, its timelines.

use walrider_layout::TimelineId;
use walrider_layout::history::history_file_name;

use crate::connect::{ConnectOptions, Connection, SystemIdentity};
use crate::error::ReceiveError;

/// Whom to connect to, and what to expect there.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// How to connect.
    pub connect: ConnectOptions,
    /// The replication slot, if one is used.
    pub slot: Option<String>,
    /// Make the slot if it is not there.
    pub create_slot: bool,
    /// Without a slot of its own, use one that ends with the connection.
    pub temporary_slot: bool,
    /// The system identifier of the directory; none: any.
    pub system_identifier: Option<u64>,
    /// The major version of the directory; none: any.
    pub major: Option<u32>,
}

/// An open session.
pub struct Opened {
    /// The connection.
    pub connection: Connection,
    /// Who is there.
    pub identity: SystemIdentity,
    /// The slot to stream from.
    pub slot: Option<String>,
}

impl Upstream {
    /// Connects, checks that this is the right server, and sees to the slot (`WalReceiverMain`).
    ///
    /// # Errors
    /// No connection, another server, or no slot.
    pub fn open(&self) -> Result<Opened, ReceiveError> {
        let mut connection = Connection::open(&self.connect)?;
        let primary = connection.server_version_num() / 10_000;
        if let Some(standby) = self.major.filter(|&major| major != primary) {
            return Err(ReceiveError::OtherMajor { primary, standby });
        }
        let identity = connection.identify_system()?;
        if let Some(standby) = self.system_identifier.filter(|&known| known != identity.system_identifier) {
            return Err(ReceiveError::OtherSystem { primary: identity.system_identifier, standby });
        }
        let slot = match &self.slot {
            Some(name) => {
                if self.create_slot && !connection.slot_exists(name)? {
                    connection.create_physical_slot(name, false)?;
                    tracing::info!("created replication slot \"{name}\"");
                }
                Some(name.clone())
            }
            None if self.temporary_slot => {
                let name = format!("walrider_{}", std::process::id());
                connection.create_physical_slot(&name, true)?;
                Some(name)
            }
            None => None,
        };
        Ok(Opened { connection, identity, slot })
    }
}

impl Opened {
    /// The history files from one timeline to the primary's, those that `has` does not know
    /// (`WalRcvFetchTimeLineHistoryFiles`).
    ///
    /// # Errors
    /// The primary is on an older timeline, or does not have them.
    pub fn missing_histories(
        &mut self,
        from: TimelineId,
        has: impl Fn(&str) -> bool,
    ) -> Result<Vec<(TimelineId, Vec<u8>)>, ReceiveError> {
        if self.identity.timeline < from {
            return Err(ReceiveError::OldTimeline { primary: self.identity.timeline, standby: from });
        }
        let mut found = Vec::new();
        for timeline in (from.0.max(2)..=self.identity.timeline.0).map(TimelineId) {
            if !has(&history_file_name(timeline)) {
                let (_, contents) = self.connection.timeline_history(timeline)?;
                found.push((timeline, contents));
            }
        }
        Ok(found)
    }
}
