//! For tests: writes the messages that [`crate::message`] reads, as `pgoutput` does.

use walrider_layout::{Lsn, Oid, TransactionId};
use walrider_wire::reader::Reader;

use crate::message::{Column, Message, OldTuple, Prepare, Relation, RelationIds, ReplicaIdentity, Tuple, Type, Value};

/// A row of these values; its bytes go into `bytes`.
///
/// ```
/// use walrider_logical::message::{Decoder, Message, Protocol, Value};
/// use walrider_logical::testing;
/// let mut bytes = Vec::new();
/// let new = testing::tuple(&mut bytes, &[Value::Text(b"1"), Value::Null]);
/// let insert = Message::Insert { xid: Some(7), relation: 16384, new };
/// let mut decoder = Decoder::new(Protocol::V2);
/// decoder.decode(&testing::encode(&Message::StreamStart { xid: 7, first: true })).unwrap();
/// assert_eq!(decoder.decode(&testing::encode(&insert)), Ok(insert));
/// ```
pub fn tuple<'a>(bytes: &'a mut Vec<u8>, values: &[Value<'_>]) -> Tuple<'a> {
    bytes.clear();
    bytes.extend((values.len() as u16).to_be_bytes());
    for value in values {
        put_value(bytes, *value);
    }
    Tuple::read(&mut Reader::new(bytes, "tuple")).expect("just written")
}

/// A message as it is sent.
pub fn encode(message: &Message<'_>) -> Vec<u8> {
    let mut out = Out(vec![message.kind() as u8]);
    match message {
        Message::Begin { final_lsn, commit_time, xid } => out.lsn(*final_lsn).i64(*commit_time).u32(*xid),
        Message::Commit { commit_lsn, end_lsn, commit_time } => {
            out.u8(0).lsn(*commit_lsn).lsn(*end_lsn).i64(*commit_time)
        }
        Message::Origin { lsn, name } => out.lsn(*lsn).text(name),
        Message::Relation { xid, relation } => out.xid(*xid).relation(relation),
        Message::Type { xid, described: Type { oid, namespace, name } } => {
            out.xid(*xid).u32(*oid).namespace(namespace).text(name)
        }
        Message::Insert { xid, relation, new } => out.xid(*xid).u32(*relation).u8(b'N').tuple(new),
        Message::Update { xid, relation, old, new } => {
            out.xid(*xid).u32(*relation);
            if let Some(old) = old {
                out.old(old);
            }
            out.u8(b'N').tuple(new)
        }
        Message::Delete { xid, relation, old } => out.xid(*xid).u32(*relation).old(old),
        Message::Truncate { xid, cascade, restart_identity, relations } => {
            let flags = u8::from(*cascade) | u8::from(*restart_identity) << 1;
            out.xid(*xid).u32(relations.iter().len() as u32).u8(flags);
            relations.iter().fold(&mut out, |out, id| out.u32(id))
        }
        Message::Logical { xid, transactional, lsn, prefix, content } => {
            out.xid(*xid).u8((*transactional).into()).lsn(*lsn).text(prefix);
            out.u32(content.len() as u32).bytes(content)
        }
        Message::BeginPrepare(prepare) => out.prepare(prepare),
        Message::Prepare(prepare) | Message::StreamPrepare(prepare) => out.u8(0).prepare(prepare),
        Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid } => {
            out.u8(0).lsn(*commit_lsn).lsn(*end_lsn).i64(*commit_time).u32(*xid).text(gid)
        }
        Message::RollbackPrepared { prepare_end_lsn, end_lsn, prepare_time, rollback_time, xid, gid } => {
            out.u8(0).lsn(*prepare_end_lsn).lsn(*end_lsn).i64(*prepare_time).i64(*rollback_time).u32(*xid).text(gid)
        }
        Message::StreamStart { xid, first } => out.u32(*xid).u8((*first).into()),
        Message::StreamStop => &mut out,
        Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time } => {
            out.u32(*xid).u8(0).lsn(*commit_lsn).lsn(*end_lsn).i64(*commit_time)
        }
        Message::StreamAbort { xid, subxid, abort } => {
            out.u32(*xid).u32(*subxid);
            if let Some((lsn, time)) = abort {
                out.lsn(*lsn).i64(*time);
            }
            &mut out
        }
    };
    out.0
}

/// The ids of a TRUNCATE, each in network byte order.
pub fn relation_ids(ids: &[[u8; 4]]) -> RelationIds<'_> {
    RelationIds::new(ids)
}

/// A table with a key `id` and these further columns, all of type `text`.
pub fn table(id: Oid, name: &str, columns: &[&str]) -> Relation {
    let column = |name: &str, key| Column { key, name: name.into(), type_oid: 25, type_modifier: -1 };
    let columns = std::iter::once(column("id", true)).chain(columns.iter().map(|name| column(name, false)));
    Relation {
        id,
        namespace: "public".into(),
        name: name.into(),
        identity: ReplicaIdentity::Default,
        columns: columns.collect(),
    }
}

fn put_value(bytes: &mut Vec<u8>, value: Value<'_>) {
    let (mark, contents) = match value {
        Value::Null => return bytes.push(b'n'),
        Value::UnchangedToast => return bytes.push(b'u'),
        Value::Text(contents) => (b't', contents),
        Value::Binary(contents) => (b'b', contents),
    };
    bytes.push(mark);
    bytes.extend((contents.len() as u32).to_be_bytes());
    bytes.extend(contents);
}

struct Out(Vec<u8>);

impl Out {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Out {
        self.0.extend(bytes);
        self
    }

    fn u8(&mut self, byte: u8) -> &mut Out {
        self.bytes(&[byte])
    }

    fn u32(&mut self, number: u32) -> &mut Out {
        self.bytes(&number.to_be_bytes())
    }

    fn i64(&mut self, number: i64) -> &mut Out {
        self.bytes(&number.to_be_bytes())
    }

    fn lsn(&mut self, lsn: Lsn) -> &mut Out {
        self.bytes(&lsn.0.to_be_bytes())
    }

    fn text(&mut self, text: &str) -> &mut Out {
        self.bytes(text.as_bytes()).u8(0)
    }

    fn namespace(&mut self, name: &str) -> &mut Out {
        self.text(if name == "pg_catalog" { "" } else { name })
    }

    fn xid(&mut self, xid: Option<TransactionId>) -> &mut Out {
        match xid {
            Some(xid) => self.u32(xid),
            None => self,
        }
    }

    fn prepare(&mut self, prepare: &Prepare<'_>) -> &mut Out {
        let &Prepare { prepare_lsn, end_lsn, prepare_time, xid, gid } = prepare;
        self.lsn(prepare_lsn).lsn(end_lsn).i64(prepare_time).u32(xid).text(gid)
    }

    fn relation(&mut self, relation: &Relation) -> &mut Out {
        let identity = match relation.identity {
            ReplicaIdentity::Default => b'd',
            ReplicaIdentity::Nothing => b'n',
            ReplicaIdentity::Full => b'f',
            ReplicaIdentity::Index => b'i',
        };
        self.u32(relation.id).namespace(&relation.namespace).text(&relation.name).u8(identity);
        self.bytes(&(relation.columns.len() as u16).to_be_bytes());
        for column in &relation.columns {
            self.u8(column.key.into()).text(&column.name).u32(column.type_oid);
            self.bytes(&column.type_modifier.to_be_bytes());
        }
        self
    }

    fn tuple(&mut self, tuple: &Tuple<'_>) -> &mut Out {
        self.bytes(&(tuple.len() as u16).to_be_bytes());
        for value in tuple.values() {
            put_value(&mut self.0, value);
        }
        self
    }

    fn old(&mut self, old: &OldTuple<'_>) -> &mut Out {
        let mark = match old {
            OldTuple::Key(_) => b'K',
            OldTuple::Full(_) => b'O',
        };
        self.u8(mark).tuple(old.tuple())
    }
}
