//! Why there is no stream, or none any more.

use std::io;

use walrider_session::ConnectError;
use walrider_wire::WireError;

/// Why a session with the publisher failed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The connection, or what the server answers.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A message that makes no sense.
    #[error("invalid message from the publisher: {0}")]
    Wire(#[from] WireError),
    /// `wal_receiver_timeout`.
    #[error("terminating the connection: the publisher has not answered in time")]
    Silent,
    /// The connection was closed.
    #[error("the publisher closed the connection")]
    Closed,
    /// Waiting for the connection.
    #[error("could not wait for the connection: {0}")]
    Poll(io::Error),
    /// Another major.
    #[error("the publisher is of PostgreSQL {0}; 17 and newer are supported")]
    OldServer(u32),
    /// Another cluster.
    #[error(
        "the publisher's system identifier is {found}, and was {expected}: it is another cluster; connect to the one that was set up with, or set up again"
    )]
    OtherSystem {
        /// Before.
        expected: u64,
        /// Now.
        found: u64,
    },
    /// No such slot.
    #[error("replication slot \"{0}\" does not exist; create it, see \"walrider logical stream --create-slot\"")]
    NoSlot(String),
    /// A physical one.
    #[error(
        "replication slot \"{0}\" is a physical one; logical replication needs a logical one, with a name of its own"
    )]
    Physical(String),
    /// Another plugin.
    #[error(
        "replication slot \"{slot}\" has the output plugin \"{plugin}\"; Walrider reads pgoutput and walrider_pgoutput"
    )]
    Plugin {
        /// The slot.
        slot: String,
        /// Its plugin.
        plugin: String,
    },
    /// Another database.
    #[error(
        "replication slot \"{slot}\" belongs to database \"{database}\", not to \"{connected}\": connect with dbname={database}"
    )]
    Database {
        /// The slot.
        slot: String,
        /// Its database.
        database: String,
        /// Ours.
        connected: String,
    },
    /// Somebody has it.
    #[error(
        "replication slot \"{slot}\" is in use by process {pid} of the publisher; stop its client, or use another slot"
    )]
    InUse {
        /// The slot.
        slot: String,
        /// The walsender.
        pid: i32,
    },
    /// It is lost.
    #[error(
        "replication slot \"{slot}\" was invalidated ({reason}) and cannot be used any more: drop it, make a new one, and copy \
         the tables again"
    )]
    Invalidated {
        /// The slot.
        slot: String,
        /// As `pg_replication_slots` names it.
        reason: String,
    },
    /// A standby's copy of one.
    #[error(
        "replication slot \"{0}\" is a copy that a standby keeps of its primary's: connect to the primary, or use another slot"
    )]
    Synced(String),
    /// It sends what the protocol has not.
    #[error(
        "replication slot \"{0}\" decodes prepared transactions (two_phase), which needs protocol 3 or newer; a slot made without \
         two_phase needs none"
    )]
    TwoPhase(String),
    /// Publications that are not there.
    #[error("publication {} does not exist in database \"{database}\"", listed(.names))]
    NoPublication {
        /// Those, at least one.
        names: Vec<String>,
        /// Where.
        database: String,
    },
    /// The plugin cannot be used.
    #[error("could not create replication slot \"{slot}\": {error}; {hint}")]
    NotCreated {
        /// The slot.
        slot: String,
        /// What the server says.
        error: Box<ConnectError>,
        /// What to do about it.
        hint: &'static str,
    },
}

fn listed(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

impl SourceError {
    /// Whether somebody has to set something right: time alone brings nothing. What the server answers is not among it, but
    /// for names that cannot be any (42602), options that the plugin does not know (22023, 42601), and missing rights (42501).
    pub fn never_heals(&self) -> bool {
        match self {
            SourceError::Connect(ConnectError::Config(_)) => true,
            SourceError::Connect(error) => {
                ["42602", "22023", "42601", "42501"].into_iter().any(|state| error.is_sqlstate(state))
            }
            SourceError::Wire(_) | SourceError::Silent | SourceError::Closed | SourceError::Poll(_) => false,
            SourceError::InUse { .. } => false,
            _ => true,
        }
    }
}
