use super::*;
use crate::testing::{encode, relation_ids, table, tuple};

const PREPARE: Prepare<'static> =
    Prepare { prepare_lsn: Lsn(0x1_0000_0010), end_lsn: Lsn(0x1_0000_0020), prepare_time: -5, xid: 9, gid: "a gid" };

/// Reads them one after another; each must come out as it went in.
fn all_through(decoder: &mut Decoder, messages: &[Message<'_>]) {
    for message in messages {
        let bytes = encode(message);
        let mut cut = decoder.clone();
        for len in 0..bytes.len() {
            // One message may be the beginning of another: an abort that does not say where.
            match cut.decode(&bytes[..len]) {
                Err(_) => {}
                Ok(shorter) => assert_eq!(encode(&shorter), &bytes[..len], "{message:?}"),
            }
            cut = decoder.clone();
        }
        assert_eq!(cut.decode(&[&bytes[..], b"x"].concat()), Err(WireError::Malformed(message.kind().name())));
        assert_eq!(decoder.decode(&bytes).as_ref(), Ok(message));
    }
}

#[test]
fn a_committed_transaction_with_every_change() {
    let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
    let row = tuple(&mut a, &[Value::Text(b"1"), Value::Null, Value::UnchangedToast, Value::Binary(b"\0\0")]);
    let key = tuple(&mut b, &[Value::Text(b"0"), Value::Null, Value::Null, Value::Null]);
    let none = tuple(&mut c, &[]);
    let (xid, relation) = (None, 16384);
    let ids = [[0, 0, 0x40, 0], [0xff; 4]];
    let mut catalog = table(1259, "pg_class", &["relname"]);
    catalog.namespace = "pg_catalog".into();
    catalog.identity = ReplicaIdentity::Full;
    let messages = [
        Message::Begin { final_lsn: Lsn(1 << 40), commit_time: 7, xid: 3 },
        Message::Origin { lsn: Lsn(0), name: "pg_16390" },
        Message::Type { xid, described: Type { oid: 16500, namespace: "public", name: "mood" } },
        Message::Relation { xid, relation: table(16384, "t", &["a", "", "ü"]) },
        Message::Relation { xid, relation: catalog },
        Message::Insert { xid, relation, new: row },
        Message::Insert { xid, relation, new: none },
        Message::Update { xid, relation, old: None, new: row },
        Message::Update { xid, relation, old: Some(OldTuple::Key(key)), new: row },
        Message::Update { xid, relation, old: Some(OldTuple::Full(row)), new: row },
        Message::Delete { xid, relation, old: OldTuple::Key(key) },
        Message::Delete { xid, relation, old: OldTuple::Full(row) },
        Message::Truncate { xid, cascade: true, restart_identity: false, relations: relation_ids(&ids) },
        Message::Truncate { xid, cascade: false, restart_identity: true, relations: relation_ids(&[]) },
        Message::Logical { xid, transactional: true, lsn: Lsn(5), prefix: "p", content: b"\0\xff" },
        Message::Commit { commit_lsn: Lsn(1 << 40), end_lsn: Lsn(2 << 40), commit_time: 7 },
        Message::Logical { xid, transactional: false, lsn: Lsn(6), prefix: "", content: b"" },
    ];
    for protocol in Protocol::ALL {
        all_through(&mut Decoder::new(protocol), &messages);
    }
    assert_eq!(relation_ids(&ids).iter().collect::<Vec<_>>(), [16384, u32::MAX]);
    let values: Vec<Value<'_>> = row.values().collect();
    assert_eq!(values, [Value::Text(b"1"), Value::Null, Value::UnchangedToast, Value::Binary(b"\0\0")]);
    assert_eq!((row.len(), row.values().len(), none.is_empty()), (4, 4, true));
}

#[test]
fn two_phases() {
    let messages = [
        Message::BeginPrepare(PREPARE),
        Message::Relation { xid: None, relation: table(16384, "t", &[]) },
        Message::Prepare(PREPARE),
        Message::CommitPrepared { commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 3, xid: 9, gid: "a gid" },
        Message::RollbackPrepared {
            prepare_end_lsn: Lsn(1),
            end_lsn: Lsn(2),
            prepare_time: 3,
            rollback_time: 4,
            xid: 9,
            gid: "",
        },
    ];
    all_through(&mut Decoder::new(Protocol::V3), &messages);
    for message in &messages {
        let mut old = Decoder::new(Protocol::V2);
        let bytes = encode(message);
        assert!(message.kind() == Kind::Relation || old.decode(&bytes) == Err(WireError::Unexpected(bytes[0])));
    }
}

#[test]
fn transactions_in_chunks() {
    let mut bytes = Vec::new();
    let row = tuple(&mut bytes, &[Value::Text(b"1")]);
    let xid = Some(10);
    let stop = Message::StreamStop;
    let mut messages = vec![
        Message::StreamStart { xid: 9, first: true },
        Message::Origin { lsn: Lsn(0), name: "o" },
        Message::Type { xid, described: Type { oid: 16500, namespace: "pg_catalog", name: "int4" } },
        Message::Relation { xid, relation: table(16384, "t", &[]) },
        Message::Insert { xid, relation: 16384, new: row },
        Message::Delete { xid, relation: 16384, old: OldTuple::Key(row) },
        Message::Truncate { xid, cascade: false, restart_identity: false, relations: relation_ids(&[[1; 4]]) },
        Message::Logical { xid, transactional: true, lsn: Lsn(5), prefix: "p", content: b"c" },
        stop.clone(),
        Message::StreamStart { xid: 9, first: false },
        stop,
        Message::StreamAbort { xid: 9, subxid: 10, abort: None },
        Message::StreamCommit { xid: 9, commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 3 },
        // Outside of a chunk there is no xid.
        Message::Begin { final_lsn: Lsn(3), commit_time: 7, xid: 3 },
        Message::Insert { xid: None, relation: 16384, new: row },
        Message::Commit { commit_lsn: Lsn(3), end_lsn: Lsn(4), commit_time: 7 },
    ];
    all_through(&mut Decoder::new(Protocol::V2), &messages);
    messages.push(Message::StreamPrepare(PREPARE));
    all_through(&mut Decoder::new(Protocol::V3), &messages);
    let abort = Message::StreamAbort { xid: 9, subxid: 9, abort: Some((Lsn(1), 2)) };
    messages.push(abort.clone());
    all_through(&mut Decoder::new(Protocol::V4), &messages);
    assert!(Decoder::new(Protocol::V3).decode(&encode(&abort)).is_err());
    assert_eq!(Decoder::new(Protocol::V1).decode(&encode(&messages[0])), Err(WireError::Unexpected(b'S')));
}

#[test]
fn a_message_out_of_place_is_refused() {
    let start = Message::StreamStart { xid: 9, first: true };
    let begin = Message::Begin { final_lsn: Lsn(1), commit_time: 0, xid: 3 };
    let commit = Message::Commit { commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 3 };
    let stream_commit = Message::StreamCommit { xid: 9, commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 3 };
    let truncate =
        Message::Truncate { xid: None, cascade: false, restart_identity: false, relations: RelationIds(&[]) };
    let refused: [&[&Message<'_>]; 9] = [
        &[&truncate],
        &[&commit],
        &[&Message::StreamStop],
        &[&Message::Origin { lsn: Lsn(1), name: "o" }],
        &[&begin, &begin],
        &[&begin, &start],
        &[&begin, &Message::Prepare(PREPARE)],
        &[&Message::BeginPrepare(PREPARE), &commit],
        &[&start, &stream_commit],
    ];
    for messages in refused {
        let mut decoder = Decoder::new(Protocol::V4);
        let (last, before) = messages.split_last().unwrap();
        before.iter().for_each(|message| drop(decoder.decode(&encode(message)).unwrap()));
        assert_eq!(decoder.is_inside(), !before.is_empty());
        assert_eq!(decoder.decode(&encode(last)), Err(WireError::Unexpected(last.kind() as u8)), "{messages:?}");
    }
}

#[test]
fn what_postgresql_never_sends_is_refused() {
    let malformed = |body: &[u8], what| {
        let mut decoder = Decoder::new(Protocol::V4);
        let begin = Message::Begin { final_lsn: Lsn(1), commit_time: 0, xid: 3 };
        if what != "BEGIN" {
            decoder.decode(&encode(&begin)).unwrap();
        }
        assert_eq!(decoder.decode(body), Err(WireError::Malformed(what)), "{body:?}");
    };
    malformed(&encode(&Message::Begin { final_lsn: Lsn(0), commit_time: 0, xid: 3 }), "BEGIN");
    malformed(&encode(&Message::Begin { final_lsn: Lsn(1), commit_time: 0, xid: 0 }), "BEGIN");
    malformed(b"I\0\0\x40\0N\xff\xff", "INSERT");
    malformed(b"I\0\0\x40\0O\0\0", "INSERT");
    malformed(b"I\0\0\x40\0N\0\x01t\xff\xff\xff\xff", "INSERT");
    malformed(b"I\0\0\x40\0N\0\x01x", "INSERT");
    malformed(b"U\0\0\x40\0K\0\0K\0\0", "UPDATE");
    malformed(b"D\0\0\x40\0N\0\0", "DELETE");
    malformed(b"T\xff\xff\xff\xff\0\0\0\0\0", "TRUNCATE");
    malformed(b"R\0\0\x40\0s\0t\0x\0\0", "RELATION");
    malformed(b"R\0\0\x40\0s\0\xff\0d\0\0", "RELATION");
    malformed(b"R\0\0\x40\0s\0t\0d\xff\xff", "RELATION");
    malformed(b"C\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01", "COMMIT");
    let mut decoder = Decoder::new(Protocol::V4);
    let long = "g".repeat(MAX_GID + 1);
    let begin = |gid| encode(&Message::BeginPrepare(Prepare { gid, ..PREPARE }));
    assert_eq!(decoder.decode(&begin(&long)), Err(WireError::Malformed("BEGIN PREPARE")));
    assert!(decoder.decode(&begin(&long[1..])).is_ok());
    assert_eq!(decoder.decode(b"Z"), Err(WireError::Unexpected(b'Z')));
    assert_eq!(decoder.decode(b""), Err(WireError::Malformed("logical replication")));
}

#[test]
fn kinds_and_protocols_have_a_number_each() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_byte(kind as u8), Some(kind));
    }
    for protocol in Protocol::ALL {
        assert_eq!(Protocol::from_number(protocol.number()), Some(protocol));
        assert_eq!(protocol.to_string(), protocol.number().to_string());
    }
    assert_eq!((Protocol::from_number(0), Protocol::from_number(5), Kind::from_byte(b'x')), (None, None, None));
}
