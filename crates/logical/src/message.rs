//! The messages of `pgoutput`, which are those of `walrider_pgoutput` too, in protocol 1 to 4 (`logicalrep_write_…`,
//! `src/backend/replication/logical/proto.c`; "Logical Replication Message Formats" in PostgreSQL's manual; PostgreSQL 17 and 18).
//! Times are microseconds since 2000-01-01 UTC, as `TimestampTz`. Texts are UTF-8, which the connection asks for.

use std::fmt;

use walrider_layout::{Lsn, Oid, TransactionId};
use walrider_wire::WireError;
use walrider_wire::reader::Reader;

pub use crate::kind::Kind;
pub use crate::tuple::{Tuple, Value, Values};

/// What the client has asked for as `proto_version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// Transactions that are committed.
    V1 = 1,
    /// Those that are in progress too (PostgreSQL 14).
    V2 = 2,
    /// Two-phase commit too (15).
    V3 = 3,
    /// The aborts of transactions in progress may say where and when (16).
    V4 = 4,
}

impl Protocol {
    /// Oldest first.
    pub const ALL: [Protocol; 4] = [Protocol::V1, Protocol::V2, Protocol::V3, Protocol::V4];

    /// The protocol of this number, if there is one.
    pub fn from_number(number: u32) -> Option<Protocol> {
        Protocol::ALL.into_iter().find(|protocol| protocol.number() == number)
    }

    /// Its number.
    pub fn number(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

/// What makes a row's old version known (`pg_class.relreplident`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaIdentity {
    /// The primary key.
    Default,
    /// Nothing.
    Nothing,
    /// The whole row.
    Full,
    /// A unique index.
    Index,
}

/// A column of a relation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Whether it is of the replica identity.
    pub key: bool,
    /// Its name.
    pub name: String,
    /// Its type; that of a user-defined one was told before by [`Message::Type`].
    pub type_oid: Oid,
    /// As `pg_attribute.atttypmod`.
    pub type_modifier: i32,
}

/// A table of the publisher, as its rows are sent from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    /// What the changes call it by; with `publish_via_partition_root`, the root's.
    pub id: Oid,
    /// Its schema.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What makes a row known.
    pub identity: ReplicaIdentity,
    /// The columns that are published, in the order of the rows' values.
    pub columns: Vec<Column>,
}

/// A type that is not built in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type<'a> {
    /// What columns call it by.
    pub oid: Oid,
    /// The schema of the type; of a domain, of its base type.
    pub namespace: &'a str,
    /// The name of the type; of a domain, of its base type.
    pub name: &'a str,
}

/// How a row was before an UPDATE or DELETE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldTuple<'a> {
    /// Of its columns, those of the replica identity; the others are null.
    Key(Tuple<'a>),
    /// All of it (`REPLICA IDENTITY FULL`).
    Full(Tuple<'a>),
}

impl<'a> OldTuple<'a> {
    /// The row.
    pub fn tuple(&self) -> &Tuple<'a> {
        let (OldTuple::Key(tuple) | OldTuple::Full(tuple)) = self;
        tuple
    }
}

/// The relations of a TRUNCATE, by [`Relation::id`]; at least none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelationIds<'a>(&'a [[u8; 4]]);

impl<'a> RelationIds<'a> {
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn new(ids: &'a [[u8; 4]]) -> RelationIds<'a> {
        RelationIds(ids)
    }

    /// The ids, in the order in which they were named.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Oid> + use<'a> {
        self.0.iter().map(|id| Oid::from_be_bytes(*id))
    }
}

/// A transaction that is being prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepare<'a> {
    /// Where its PREPARE record begins.
    pub prepare_lsn: Lsn,
    /// Where that ends.
    pub end_lsn: Lsn,
    /// When it was prepared.
    pub prepare_time: i64,
    /// Its id.
    pub xid: TransactionId,
    /// Its global id, at most [`MAX_GID`] bytes.
    pub gid: &'a str,
}

/// Length in bytes of the longest global transaction id (`GIDSIZE`, without the zero).
pub const MAX_GID: usize = 199;

/// A message. In a chunk of a transaction in progress, changes, relations and types have an `xid`: that of the
/// subtransaction, or of the transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A transaction that was committed begins.
    Begin {
        /// Where its COMMIT record begins.
        final_lsn: Lsn,
        /// When it was committed.
        commit_time: i64,
        /// Its id.
        xid: TransactionId,
    },
    /// It is complete.
    Commit {
        /// Where its COMMIT record begins.
        commit_lsn: Lsn,
        /// Where that ends.
        end_lsn: Lsn,
        /// When it was committed.
        commit_time: i64,
    },
    /// The transaction came to the publisher from elsewhere.
    Origin {
        /// Where it was committed there; 0/0 of a transaction in progress.
        lsn: Lsn,
        /// The origin's name at the publisher.
        name: &'a str,
    },
    /// A table, before its first change and after it was altered.
    Relation {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// The table.
        relation: Relation,
    },
    /// A type, before a table that has it.
    Type {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// The type.
        described: Type<'a>,
    },
    /// A row was inserted.
    Insert {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// Of this table.
        relation: Oid,
        /// The row.
        new: Tuple<'a>,
    },
    /// A row was updated.
    Update {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// Of this table.
        relation: Oid,
        /// How it was; a key only if it changed, or is stored outside of the row.
        old: Option<OldTuple<'a>>,
        /// How it is.
        new: Tuple<'a>,
    },
    /// A row was deleted.
    Delete {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// Of this table.
        relation: Oid,
        /// How it was.
        old: OldTuple<'a>,
    },
    /// Tables were emptied.
    Truncate {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// `CASCADE` was said.
        cascade: bool,
        /// `RESTART IDENTITY` was said.
        restart_identity: bool,
        /// The tables, those of a CASCADE included.
        relations: RelationIds<'a>,
    },
    /// What `pg_logical_emit_message` has written.
    Logical {
        /// In a chunk.
        xid: Option<TransactionId>,
        /// It belongs to the transaction; otherwise it stands alone, whatever becomes of that.
        transactional: bool,
        /// Where it stands.
        lsn: Lsn,
        /// What it is for.
        prefix: &'a str,
        /// Any bytes.
        content: &'a [u8],
    },
    /// A transaction that is prepared begins.
    BeginPrepare(Prepare<'a>),
    /// It is complete, and waits for COMMIT PREPARED or ROLLBACK PREPARED.
    Prepare(Prepare<'a>),
    /// A prepared transaction was committed.
    CommitPrepared {
        /// Where the COMMIT PREPARED record begins.
        commit_lsn: Lsn,
        /// Where that ends.
        end_lsn: Lsn,
        /// When.
        commit_time: i64,
        /// Its id.
        xid: TransactionId,
        /// Its global id.
        gid: &'a str,
    },
    /// A prepared transaction was rolled back. It may be one that was never sent.
    RollbackPrepared {
        /// Where its PREPARE record ends.
        prepare_end_lsn: Lsn,
        /// Where the ROLLBACK PREPARED record ends.
        end_lsn: Lsn,
        /// When it was prepared.
        prepare_time: i64,
        /// When it was rolled back.
        rollback_time: i64,
        /// Its id.
        xid: TransactionId,
        /// Its global id.
        gid: &'a str,
    },
    /// A chunk of a transaction in progress begins.
    StreamStart {
        /// The transaction's.
        xid: TransactionId,
        /// It is its first.
        first: bool,
    },
    /// The chunk ends.
    StreamStop,
    /// A transaction that came in chunks was committed.
    StreamCommit {
        /// Its id.
        xid: TransactionId,
        /// Where its COMMIT record begins.
        commit_lsn: Lsn,
        /// Where that ends.
        end_lsn: Lsn,
        /// When.
        commit_time: i64,
    },
    /// A transaction that came in chunks was rolled back, all of it or to a savepoint.
    StreamAbort {
        /// Its id.
        xid: TransactionId,
        /// That of the subtransaction, or the same again.
        subxid: TransactionId,
        /// With `streaming = parallel`: where it was rolled back, and when.
        abort: Option<(Lsn, i64)>,
    },
    /// A transaction that came in chunks was prepared.
    StreamPrepare(Prepare<'a>),
}

impl Message<'_> {
    /// Of what completes something: the position from which to go on when this and all before it is done, as
    /// [`crate::source::SourceOptions::start`]. Transactions in progress are sent again from there on, in full.
    pub fn complete_at(&self) -> Option<Lsn> {
        match self {
            Message::Commit { end_lsn, .. }
            | Message::CommitPrepared { end_lsn, .. }
            | Message::RollbackPrepared { end_lsn, .. }
            | Message::StreamCommit { end_lsn, .. } => Some(*end_lsn),
            Message::Prepare(prepare) | Message::StreamPrepare(prepare) => Some(prepare.end_lsn),
            // Its record begins there; one is sent if it begins at the start or after (`logicalmsg_decode`, `decode.c`).
            Message::Logical { transactional: false, lsn, .. } => Some(Lsn(lsn.0.saturating_add(1))),
            _ => None,
        }
    }

    /// Whether all that was committed, prepared or written before `end` was sent before this message, which came with position
    /// `lsn`: what ends there needs no more of the stream.
    pub fn is_past(&self, lsn: Lsn, end: Lsn) -> bool {
        match self {
            Message::Begin { final_lsn, .. } => *final_lsn >= end,
            Message::BeginPrepare(prepare) | Message::StreamPrepare(prepare) => prepare.prepare_lsn >= end,
            Message::CommitPrepared { commit_lsn, .. } | Message::StreamCommit { commit_lsn, .. } => *commit_lsn >= end,
            Message::RollbackPrepared { end_lsn, .. } => *end_lsn > end,
            Message::Logical { transactional: false, lsn, .. } => *lsn >= end,
            // A chunk is sent when what it holds was read.
            Message::StreamStart { .. } => lsn >= end,
            _ => false,
        }
    }

    /// What kind of message it is.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Begin { .. } => Kind::Begin,
            Message::Commit { .. } => Kind::Commit,
            Message::Origin { .. } => Kind::Origin,
            Message::Relation { .. } => Kind::Relation,
            Message::Type { .. } => Kind::Type,
            Message::Insert { .. } => Kind::Insert,
            Message::Update { .. } => Kind::Update,
            Message::Delete { .. } => Kind::Delete,
            Message::Truncate { .. } => Kind::Truncate,
            Message::Logical { .. } => Kind::Message,
            Message::BeginPrepare(_) => Kind::BeginPrepare,
            Message::Prepare(_) => Kind::Prepare,
            Message::CommitPrepared { .. } => Kind::CommitPrepared,
            Message::RollbackPrepared { .. } => Kind::RollbackPrepared,
            Message::StreamStart { .. } => Kind::StreamStart,
            Message::StreamStop => Kind::StreamStop,
            Message::StreamCommit { .. } => Kind::StreamCommit,
            Message::StreamAbort { .. } => Kind::StreamAbort,
            Message::StreamPrepare(_) => Kind::StreamPrepare,
        }
    }
}

/// What the messages before have begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Outside,
    Transaction,
    Preparing,
    Chunk,
}

impl Place {
    /// Where a message of this kind leaves the stream, if it may come here at all.
    fn after(self, kind: Kind) -> Option<Place> {
        use Place::{Chunk, Outside, Preparing, Transaction};
        match (self, kind) {
            (Outside, Kind::Begin) => Some(Transaction),
            (Outside, Kind::BeginPrepare) => Some(Preparing),
            (Outside, Kind::StreamStart) => Some(Chunk),
            (Transaction, Kind::Commit) | (Preparing, Kind::Prepare) | (Chunk, Kind::StreamStop) => Some(Outside),
            (Outside, Kind::CommitPrepared | Kind::RollbackPrepared) => Some(Outside),
            (Outside, Kind::StreamCommit | Kind::StreamAbort | Kind::StreamPrepare) => Some(Outside),
            // One that is not transactional comes when it is written.
            (here, Kind::Message) => Some(here),
            (Transaction | Preparing | Chunk, Kind::Origin | Kind::Relation | Kind::Type) => Some(self),
            (Transaction | Preparing | Chunk, Kind::Insert | Kind::Update | Kind::Delete | Kind::Truncate) => {
                Some(self)
            }
            _ => None,
        }
    }
}

/// Reads the messages of one connection, in their order: which changes have an `xid` depends on what came before, and a
/// message out of place is an error.
#[derive(Clone, Debug)]
pub struct Decoder {
    protocol: Protocol,
    place: Place,
    /// The values of rows at the end of messages are known to be well-formed.
    checked: bool,
}

impl Decoder {
    /// Streaming begins.
    pub fn new(protocol: Protocol) -> Decoder {
        Decoder { protocol, place: Place::Outside, checked: false }
    }

    /// For changes that [`Decoder::decode`] has read before, without the xid that those in chunks have: in a transaction, without its
    /// BEGIN. `checked`: they are the same bytes, and are not checked again.
    pub(crate) fn again(checked: bool) -> Decoder {
        Decoder { protocol: Protocol::V1, place: Place::Transaction, checked }
    }

    fn last_tuple<'a>(&self, reader: &mut Reader<'a>) -> Result<Tuple<'a>, WireError> {
        if self.checked { Tuple::read_last(reader) } else { Tuple::read(reader) }
    }

    /// Whether the last message leaves a transaction or a chunk open.
    pub fn is_inside(&self) -> bool {
        self.place != Place::Outside
    }

    /// Reads a message.
    ///
    /// # Errors
    /// It is none of this protocol, or has no place here. The connection cannot be used any more.
    pub fn decode<'a>(&mut self, body: &'a [u8]) -> Result<Message<'a>, WireError> {
        let (&tag, rest) = body.split_first().ok_or(WireError::Malformed("logical replication"))?;
        let kind = Kind::from_byte(tag).filter(|kind| kind.since() <= self.protocol);
        let kind = kind.ok_or(WireError::Unexpected(tag))?;
        let after = self.place.after(kind).ok_or(WireError::Unexpected(tag))?;
        let mut reader = Reader::new(rest, kind.name());
        let message = match kind {
            Kind::Origin => Message::Origin { lsn: Lsn(reader.u64()?), name: reader.text()? },
            Kind::Relation | Kind::Type => self.describe(kind, &mut reader)?,
            Kind::Insert | Kind::Update | Kind::Delete | Kind::Truncate | Kind::Message => {
                self.change(kind, &mut reader)?
            }
            _ => self.boundary(kind, &mut reader)?,
        };
        reader.end()?;
        self.place = after;
        Ok(message)
    }

    /// In a chunk, the id that goes before all else.
    fn xid(&self, reader: &mut Reader<'_>) -> Result<Option<TransactionId>, WireError> {
        if self.place == Place::Chunk { valid_xid(reader).map(Some) } else { Ok(None) }
    }

    fn describe<'a>(&self, kind: Kind, reader: &mut Reader<'a>) -> Result<Message<'a>, WireError> {
        let xid = self.xid(reader)?;
        Ok(match kind {
            Kind::Relation => Message::Relation { xid, relation: relation(reader)? },
            _ => {
                let described = Type { oid: reader.u32()?, namespace: namespace(reader)?, name: reader.text()? };
                Message::Type { xid, described }
            }
        })
    }

    fn change<'a>(&self, kind: Kind, reader: &mut Reader<'a>) -> Result<Message<'a>, WireError> {
        let xid = self.xid(reader)?;
        Ok(match kind {
            Kind::Insert => {
                let relation = reader.u32()?;
                let b'N' = reader.u8()? else { return Err(reader.malformed()) };
                Message::Insert { xid, relation, new: self.last_tuple(reader)? }
            }
            Kind::Update => {
                let relation = reader.u32()?;
                let (old, mark) = match reader.u8()? {
                    mark @ (b'K' | b'O') => (Some(old_tuple(mark, reader)?), reader.u8()?),
                    mark => (None, mark),
                };
                let b'N' = mark else { return Err(reader.malformed()) };
                Message::Update { xid, relation, old, new: self.last_tuple(reader)? }
            }
            Kind::Delete => {
                let relation = reader.u32()?;
                let mark = reader.u8()?;
                Message::Delete { xid, relation, old: old_tuple(mark, reader)? }
            }
            Kind::Truncate => {
                let count = reader.u32()?;
                let flags = reader.u8()?;
                let len = usize::try_from(count).ok().and_then(|count| count.checked_mul(4));
                let (ids, _) = reader.take(len.ok_or(reader.malformed())?)?.as_chunks();
                let (cascade, restart_identity) = (flags & 1 != 0, flags & 2 != 0);
                Message::Truncate { xid, cascade, restart_identity, relations: RelationIds(ids) }
            }
            _ => {
                let (flags, lsn, prefix) = (reader.u8()?, Lsn(reader.u64()?), reader.text()?);
                let len = usize::try_from(reader.u32()?).map_err(|_| reader.malformed())?;
                Message::Logical { xid, transactional: flags & 1 != 0, lsn, prefix, content: reader.take(len)? }
            }
        })
    }

    fn boundary<'a>(&self, kind: Kind, reader: &mut Reader<'a>) -> Result<Message<'a>, WireError> {
        Ok(match kind {
            Kind::Begin => {
                Message::Begin { final_lsn: valid_lsn(reader)?, commit_time: reader.i64()?, xid: valid_xid(reader)? }
            }
            Kind::Commit => {
                no_flags(reader)?;
                let (commit_lsn, end_lsn) = (valid_lsn(reader)?, valid_lsn(reader)?);
                Message::Commit { commit_lsn, end_lsn, commit_time: reader.i64()? }
            }
            Kind::BeginPrepare => Message::BeginPrepare(prepare(reader)?),
            Kind::Prepare => {
                no_flags(reader)?;
                Message::Prepare(prepare(reader)?)
            }
            Kind::StreamPrepare => {
                no_flags(reader)?;
                Message::StreamPrepare(prepare(reader)?)
            }
            Kind::CommitPrepared => {
                no_flags(reader)?;
                let Prepare { prepare_lsn: commit_lsn, end_lsn, prepare_time: commit_time, xid, gid } =
                    prepare(reader)?;
                Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid }
            }
            Kind::RollbackPrepared => {
                no_flags(reader)?;
                let (prepare_end_lsn, end_lsn) = (valid_lsn(reader)?, valid_lsn(reader)?);
                let (prepare_time, rollback_time) = (reader.i64()?, reader.i64()?);
                let (xid, gid) = (valid_xid(reader)?, gid(reader)?);
                Message::RollbackPrepared { prepare_end_lsn, end_lsn, prepare_time, rollback_time, xid, gid }
            }
            Kind::StreamStart => Message::StreamStart { xid: valid_xid(reader)?, first: reader.u8()? == 1 },
            Kind::StreamStop => Message::StreamStop,
            Kind::StreamCommit => {
                let xid = valid_xid(reader)?;
                no_flags(reader)?;
                let (commit_lsn, end_lsn) = (valid_lsn(reader)?, valid_lsn(reader)?);
                Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time: reader.i64()? }
            }
            _ => {
                let (xid, subxid) = (valid_xid(reader)?, valid_xid(reader)?);
                // Only where the client has asked for `streaming = parallel`, which needs protocol 4.
                let says_where = self.protocol >= Protocol::V4 && !reader.rest().is_empty();
                let abort = if says_where { Some((Lsn(reader.u64()?), reader.i64()?)) } else { None };
                Message::StreamAbort { xid, subxid, abort }
            }
        })
    }
}

fn relation(reader: &mut Reader<'_>) -> Result<Relation, WireError> {
    let (id, namespace, name) = (reader.u32()?, namespace(reader)?.to_owned(), reader.text()?.to_owned());
    let identity = match reader.u8()? {
        b'd' => ReplicaIdentity::Default,
        b'n' => ReplicaIdentity::Nothing,
        b'f' => ReplicaIdentity::Full,
        b'i' => ReplicaIdentity::Index,
        _ => return Err(reader.malformed()),
    };
    let count = reader.u16()?;
    // What is only claimed takes no memory: a column has at least ten bytes.
    let mut columns = Vec::with_capacity(usize::from(count).min(reader.rest().len() / 10));
    for _ in 0..count {
        columns.push(Column {
            key: reader.u8()? & 1 != 0,
            name: reader.text()?.to_owned(),
            type_oid: reader.u32()?,
            type_modifier: reader.i32()?,
        });
    }
    Ok(Relation { id, namespace, name, identity, columns })
}

/// To save space, `pg_catalog` is sent as nothing (`logicalrep_write_namespace`).
fn namespace<'a>(reader: &mut Reader<'a>) -> Result<&'a str, WireError> {
    Ok(match reader.text()? {
        "" => "pg_catalog",
        name => name,
    })
}

fn old_tuple<'a>(mark: u8, reader: &mut Reader<'a>) -> Result<OldTuple<'a>, WireError> {
    match mark {
        b'K' => Tuple::read(reader).map(OldTuple::Key),
        b'O' => Tuple::read(reader).map(OldTuple::Full),
        _ => Err(reader.malformed()),
    }
}

fn prepare<'a>(reader: &mut Reader<'a>) -> Result<Prepare<'a>, WireError> {
    Ok(Prepare {
        prepare_lsn: valid_lsn(reader)?,
        end_lsn: valid_lsn(reader)?,
        prepare_time: reader.i64()?,
        xid: valid_xid(reader)?,
        gid: gid(reader)?,
    })
}

fn gid<'a>(reader: &mut Reader<'a>) -> Result<&'a str, WireError> {
    let gid = reader.text()?;
    if gid.len() <= MAX_GID { Ok(gid) } else { Err(reader.malformed()) }
}

/// The flags of the messages that end something; none is defined.
fn no_flags(reader: &mut Reader<'_>) -> Result<(), WireError> {
    if reader.u8()? == 0 { Ok(()) } else { Err(reader.malformed()) }
}

fn valid_lsn(reader: &mut Reader<'_>) -> Result<Lsn, WireError> {
    let lsn = Lsn(reader.u64()?);
    if lsn.is_valid() { Ok(lsn) } else { Err(reader.malformed()) }
}

fn valid_xid(reader: &mut Reader<'_>) -> Result<TransactionId, WireError> {
    let xid = reader.u32()?;
    if xid == 0 { Err(reader.malformed()) } else { Ok(xid) }
}

#[cfg(test)]
mod tests;
