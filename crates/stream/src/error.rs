//! Why receiving fails.

use std::io;

use walrider_layout::history::{InvalidHistory, MAX_HISTORY_BYTES};
use walrider_layout::{Lsn, TimelineId};
use walrider_session::ConnectError;
use walrider_spool::SpoolError;
use walrider_wire::WireError;

use crate::timelines::MAX_TIMELINES;

/// Why a session with the primary failed.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The connection, or what the server answers.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A message that makes no sense.
    #[error("invalid message from the primary: {0}")]
    Wire(#[from] WireError),
    /// Storing what came.
    #[error(transparent)]
    Spool(#[from] SpoolError),
    /// `wal_receiver_timeout`.
    #[error("terminating the connection: the primary has not answered in time")]
    Silent,
    /// The connection was closed.
    #[error("the primary closed the connection")]
    Closed,
    /// It has less than we have.
    #[error(
        "the server has WAL up to {flushed} only, and it goes on at {start} here: a standby or relay that has just started may yet get there"
    )]
    Behind {
        /// Up to where it has WAL.
        flushed: Lsn,
        /// Where we go on.
        start: Lsn,
    },
    /// The disk was full when the stream ended.
    #[error("the stream ended while the disk was full: what could not be stored is received again")]
    Full,
    /// WAL that does not follow what came before.
    #[error("the primary sent WAL from {start} instead of {expected}")]
    OutOfOrder {
        /// What was due.
        expected: Lsn,
        /// What came.
        start: Lsn,
    },
    /// Waiting for the connection.
    #[error("could not wait for the connection: {0}")]
    Poll(io::Error),
    /// WAL far past what the primary has flushed.
    #[error(
        "the primary has sent WAL up to {received} and flushed it up to {horizon}: more than can be held; lower \
         walrider.max_ahead there"
    )]
    TooFarAhead {
        /// What came.
        received: Lsn,
        /// What it has flushed.
        horizon: Lsn,
    },
    /// The early stream is wanted, and is not to be had.
    #[error("the early stream is not available: {0}")]
    NotEarly(String),
    /// Another cluster.
    #[error(
        "the database system identifier of the primary is {primary}, that of the standby {standby}: it is not a copy of that \
         primary; check the connection string, or make a new base backup"
    )]
    OtherSystem {
        /// What the primary says.
        primary: u64,
        /// What the directory says.
        standby: u64,
    },
    /// Another major version.
    #[error(
        "the primary is of PostgreSQL {primary}, the directory of {standby}: WAL cannot be exchanged between majors"
    )]
    OtherMajor {
        /// The primary's.
        primary: u32,
        /// The directory's.
        standby: u32,
    },
    /// More timelines than there can be.
    #[error(
        "the primary says that it is on timeline {primary}, where the standby is on {standby}: more than \
         {MAX_TIMELINES} promotions in between are not credible; is it the right server? A new base backup has no such gap"
    )]
    TooManyTimelines {
        /// The primary's.
        primary: TimelineId,
        /// The one that is asked for.
        standby: TimelineId,
    },
    /// A next timeline that cannot be the next.
    #[error("the primary ended timeline {timeline} at {ended}, and says that timeline {next} follows it at {begins}")]
    NextTimeline {
        /// The one that ended.
        timeline: TimelineId,
        /// Where the stream ended.
        ended: Lsn,
        /// The one that is said to follow.
        next: TimelineId,
        /// Where that is said to begin.
        begins: Lsn,
    },
    /// A timeline's history file that is none.
    #[error(
        "the primary sent a history file for timeline {timeline} that is none, and nothing of it was stored: {why}"
    )]
    BadHistory {
        /// The timeline that it was asked for.
        timeline: TimelineId,
        /// What is wrong with it.
        why: BadHistory,
    },
    /// The primary is a server that was not promoted when another one was.
    #[error(
        "highest timeline {primary} of the primary is behind recovery timeline {standby}: connect to the server that was \
         promoted"
    )]
    OldTimeline {
        /// The primary's.
        primary: TimelineId,
        /// The one that is asked for.
        standby: TimelineId,
    },
}

/// What is wrong with a history file.
#[derive(Debug, thiserror::Error)]
pub enum BadHistory {
    /// It has another one's name.
    #[error("it calls it \"{}\" instead of \"{expected}\"", name.escape_debug())]
    Name {
        /// What the primary calls it.
        name: String,
        /// What it is called.
        expected: String,
    },
    /// So many bytes.
    #[error("it has {0} bytes, more than {MAX_HISTORY_BYTES}")]
    TooLong(usize),
    /// Its text.
    #[error(transparent)]
    Invalid(#[from] InvalidHistory),
    /// No timeline before.
    #[error("it does not say which timeline this one branched off from")]
    NoParent,
}

impl ReceiveError {
    /// Whether the primary does not have the WAL that was asked for, but an archive may: it was removed, or the primary is
    /// behind or on another branch. Trying again at the same place does not help by itself.
    pub fn is_missing_wal(&self) -> bool {
        match self {
            ReceiveError::Connect(error) => error.is_sqlstate("58P01") || error.is_sqlstate("XX000"),
            ReceiveError::OldTimeline { .. } => true,
            _ => false,
        }
    }

    /// Whether the primary has no early stream for us, though it may stream all the same: there is no such database, nobody may
    /// connect to it, the extension is not there, or it is a relay, which has no databases.
    pub(crate) fn rules_out_early(&self) -> bool {
        match self {
            ReceiveError::NotEarly(_) => true,
            ReceiveError::Connect(error) => {
                // Of a database, pg_hba.conf may want another method than of replication.
                error.is_authentication()
                    || ["0A000", "28000", "3D000", "42501", "55000"].into_iter().any(|state| error.is_sqlstate(state))
            }
            _ => false,
        }
    }

    /// Whether somebody has to set right what we were told, or where we were sent, before a first session: time alone brings
    /// nothing. What the server answers is not among it, but for the name of a slot that cannot be one (42602,
    /// `ReplicationSlotValidateName`).
    pub fn never_heals(&self) -> bool {
        match self {
            ReceiveError::Connect(ConnectError::Config(_)) => true,
            ReceiveError::Connect(error) => error.is_sqlstate("42602"),
            ReceiveError::OtherSystem { .. } | ReceiveError::OtherMajor { .. } => true,
            _ => false,
        }
    }

    /// Whether nothing that time brings, or another primary behind the same name, will help.
    pub fn is_final(&self) -> bool {
        match self {
            ReceiveError::Spool(error) => !matches!(error, SpoolError::Full { .. }),
            _ => false,
        }
    }
}
