//! Which messages there are.

use crate::message::Protocol;

/// The types of messages, as `logicalrep_message_type` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`crate::message::Message::Begin`].
    Begin = b'B',
    /// [`crate::message::Message::Commit`].
    Commit = b'C',
    /// [`crate::message::Message::Origin`].
    Origin = b'O',
    /// [`crate::message::Message::Relation`].
    Relation = b'R',
    /// [`crate::message::Message::Type`].
    Type = b'Y',
    /// [`crate::message::Message::Insert`].
    Insert = b'I',
    /// [`crate::message::Message::Update`].
    Update = b'U',
    /// [`crate::message::Message::Delete`].
    Delete = b'D',
    /// [`crate::message::Message::Truncate`].
    Truncate = b'T',
    /// [`crate::message::Message::Logical`].
    Message = b'M',
    /// [`crate::message::Message::BeginPrepare`].
    BeginPrepare = b'b',
    /// [`crate::message::Message::Prepare`].
    Prepare = b'P',
    /// [`crate::message::Message::CommitPrepared`].
    CommitPrepared = b'K',
    /// [`crate::message::Message::RollbackPrepared`].
    RollbackPrepared = b'r',
    /// [`crate::message::Message::StreamStart`].
    StreamStart = b'S',
    /// [`crate::message::Message::StreamStop`].
    StreamStop = b'E',
    /// [`crate::message::Message::StreamCommit`].
    StreamCommit = b'c',
    /// [`crate::message::Message::StreamAbort`].
    StreamAbort = b'A',
    /// [`crate::message::Message::StreamPrepare`].
    StreamPrepare = b'p',
}

static BY_BYTE: [Option<Kind>; 256] = {
    let mut by_byte = [None; 256];
    let mut at = 0;
    while at < Kind::ALL.len() {
        by_byte[Kind::ALL[at] as usize] = Some(Kind::ALL[at]);
        at += 1;
    }
    by_byte
};

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 19] = [
        Kind::Begin,
        Kind::Commit,
        Kind::Origin,
        Kind::Relation,
        Kind::Type,
        Kind::Insert,
        Kind::Update,
        Kind::Delete,
        Kind::Truncate,
        Kind::Message,
        Kind::BeginPrepare,
        Kind::Prepare,
        Kind::CommitPrepared,
        Kind::RollbackPrepared,
        Kind::StreamStart,
        Kind::StreamStop,
        Kind::StreamCommit,
        Kind::StreamAbort,
        Kind::StreamPrepare,
    ];

    /// The kind of a message with this first byte, if there is one.
    pub fn from_byte(byte: u8) -> Option<Kind> {
        BY_BYTE[usize::from(byte)]
    }

    /// PostgreSQL's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Begin => "BEGIN",
            Kind::Commit => "COMMIT",
            Kind::Origin => "ORIGIN",
            Kind::Relation => "RELATION",
            Kind::Type => "TYPE",
            Kind::Insert => "INSERT",
            Kind::Update => "UPDATE",
            Kind::Delete => "DELETE",
            Kind::Truncate => "TRUNCATE",
            Kind::Message => "MESSAGE",
            Kind::BeginPrepare => "BEGIN PREPARE",
            Kind::Prepare => "PREPARE",
            Kind::CommitPrepared => "COMMIT PREPARED",
            Kind::RollbackPrepared => "ROLLBACK PREPARED",
            Kind::StreamStart => "STREAM START",
            Kind::StreamStop => "STREAM STOP",
            Kind::StreamCommit => "STREAM COMMIT",
            Kind::StreamAbort => "STREAM ABORT",
            Kind::StreamPrepare => "STREAM PREPARE",
        }
    }

    /// The first protocol that has it.
    pub(crate) fn since(self) -> Protocol {
        match self {
            Kind::StreamStart | Kind::StreamStop | Kind::StreamCommit | Kind::StreamAbort => Protocol::V2,
            Kind::BeginPrepare
            | Kind::Prepare
            | Kind::CommitPrepared
            | Kind::RollbackPrepared
            | Kind::StreamPrepare => Protocol::V3,
            _ => Protocol::V1,
        }
    }
}
