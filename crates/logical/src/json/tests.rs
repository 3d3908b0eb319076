use serde_json::{Value as Json, json};

use super::*;
use crate::message::{Decoder, Protocol, Type};
use crate::testing::{encode, relation_ids, table, tuple};

/// The lines of a stream, and where it may be gone on from after each message.
struct Reader {
    lines: Lines,
    decoder: Decoder,
}

impl Reader {
    fn new() -> Reader {
        Reader { lines: Lines::new(), decoder: Decoder::new(Protocol::V4) }
    }

    fn read(&mut self, message: &Message<'_>) -> Result<(Json, Option<Lsn>), JsonError> {
        let bytes = encode(message);
        let message = self.decoder.decode(&bytes).unwrap();
        let mut out = Vec::new();
        self.lines.write(Lsn(0x10), &message, &mut out)?;
        let end = message.complete_at();
        if out.is_empty() {
            return Ok((Json::Null, end));
        }
        assert!(out.ends_with(b"}\n") && out.iter().filter(|byte| **byte == b'\n').count() == 1);
        Ok((serde_json::from_slice(&out).unwrap(), end))
    }

    /// One that ends nothing.
    fn line(&mut self, message: &Message<'_>) -> Json {
        let (line, end) = self.read(message).unwrap();
        assert_eq!(end, None);
        line
    }
}

const BEGIN: Message<'static> = Message::Begin { final_lsn: Lsn(0x20), commit_time: 0, xid: 7 };
const COMMIT: Message<'static> = Message::Commit { commit_lsn: Lsn(0x20), end_lsn: Lsn(0x28), commit_time: 1 };

#[test]
fn a_transaction_line_by_line() {
    let mut reader = Reader::new();
    let when = "2000-01-01T00:00:00Z";
    assert_eq!(reader.line(&BEGIN), json!({"kind": "begin", "xid": 7, "commit_lsn": "0/20", "commit_time": when}));
    let mut relation = table(16384, "t\"", &["b", "n", "x"]);
    (relation.columns[1].type_oid, relation.columns[2].type_oid) = (16, 1700);
    relation.columns[3].type_oid = 16500;
    let described = Type { oid: 16500, namespace: "s", name: "mood" };
    assert_eq!(reader.line(&Message::Type { xid: None, described }), Json::Null);
    let line = reader.line(&Message::Relation { xid: None, relation });
    assert_eq!(line["columns"][1], json!({"name": "b", "type": "bool", "oid": 16, "typmod": -1, "key": false}));
    assert_eq!((&line["table"], &line["columns"][3]["type"]), (&json!("t\""), &json!("s.mood")));
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let new = tuple(&mut a, &[Value::Text(b"1"), Value::Text(b"t"), Value::Text(b"-1.50"), Value::UnchangedToast]);
    let old = tuple(&mut b, &[Value::Text(b"0"), Value::Null, Value::Null, Value::Null]);
    let update = Message::Update { xid: None, relation: 16384, old: Some(OldTuple::Key(old)), new };
    let expected = json!({"kind": "update", "xid": 7, "lsn": "0/10", "schema": "public", "table": "t\"", "key": {"id": "0"},
        "new": {"id": "1", "b": true, "n": -1.5}, "unchanged": ["x"]});
    assert_eq!(reader.line(&update), expected);
    let delete = Message::Delete { xid: None, relation: 16384, old: OldTuple::Full(new) };
    let line = reader.line(&delete);
    assert_eq!((&line["old"], &line["old_unchanged"]), (&json!({"id": "1", "b": true, "n": -1.5}), &json!(["x"])));
    let ids = [16384u32.to_be_bytes()];
    let relations = relation_ids(&ids);
    let line = reader.line(&Message::Truncate { xid: None, cascade: true, restart_identity: false, relations });
    assert_eq!(line["tables"], json!([{"schema": "public", "table": "t\""}]));
    let end = reader.read(&COMMIT).unwrap();
    let expected = json!({"kind": "commit", "xid": 7, "commit_lsn": "0/20", "end_lsn": "0/28",
        "commit_time": "2000-01-01T00:00:00.000001Z"});
    assert_eq!(end, (expected, Some(Lsn(0x28))));
}

#[test]
fn what_is_no_text_is_written_in_hexadecimal_digits() {
    let mut reader = Reader::new();
    reader.line(&BEGIN);
    reader.line(&Message::Relation { xid: None, relation: table(16384, "t", &["a", "b"]) });
    let mut bytes = Vec::new();
    let new = tuple(&mut bytes, &[Value::Text(b"\n\"\\\x01"), Value::Text(b"\xff"), Value::Binary(b"\x0aa")]);
    let line = reader.line(&Message::Insert { xid: None, relation: 16384, new });
    assert_eq!(line["new"], json!({"id": "\n\"\\\u{1}", "a": "ff", "b": "0a61"}));
    assert_eq!(line["hex"], json!(["a", "b"]));
    let message =
        |transactional, content| Message::Logical { xid: None, transactional, lsn: Lsn(5), prefix: "p", content };
    let line = reader.line(&message(true, b"\xff"));
    assert_eq!((&line["xid"], &line["content"], &line["hex"]), (&json!(7), &json!("ff"), &json!(true)));
    reader.read(&COMMIT).unwrap();
    let expected = json!({"kind": "message", "lsn": "0/5", "transactional": false, "prefix": "p", "content": "c"});
    assert_eq!(reader.read(&message(false, b"c")).unwrap(), (expected, Some(Lsn(6))));
}

#[test]
fn a_change_that_does_not_fit_its_table_is_refused() {
    let mut reader = Reader::new();
    reader.line(&BEGIN);
    let mut bytes = Vec::new();
    let new = tuple(&mut bytes, &[Value::Null]);
    let insert = |relation| Message::Insert { xid: None, relation, new };
    assert_eq!(reader.read(&insert(16384)), Err(JsonError::UnknownRelation(16384)));
    reader.line(&Message::Relation { xid: None, relation: table(16384, "t", &["a"]) });
    assert_eq!(reader.read(&insert(16384)), Err(JsonError::Columns { relation: 16384, sent: 1, described: 2 }));
    let ids = [[0; 4]];
    let relations = relation_ids(&ids);
    let truncate = Message::Truncate { xid: None, cascade: false, restart_identity: false, relations };
    assert_eq!(reader.read(&truncate), Err(JsonError::UnknownRelation(0)));
}

/// A transaction in progress may have altered a table that others still see as it was.
#[test]
fn tables_of_a_transaction_in_progress_are_its_own_until_it_is_committed() {
    let mut reader = Reader::new();
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let before = tuple(&mut a, &[Value::Text(b"1")]);
    let after = tuple(&mut b, &[Value::Text(b"1"), Value::Null]);
    let insert = |xid, new| Message::Insert { xid, relation: 16384, new };
    let start = |first| Message::StreamStart { xid: 9, first };
    reader.line(&BEGIN);
    reader.line(&Message::Relation { xid: None, relation: table(16384, "t", &[]) });
    reader.read(&COMMIT).unwrap();
    reader.line(&start(true));
    reader.line(&Message::Relation { xid: Some(10), relation: table(16384, "t", &["new"]) });
    let line = reader.line(&insert(Some(10), after));
    assert_eq!((&line["xid"], &line["subxid"]), (&json!(9), &json!(10)));
    assert_eq!(reader.lines.open(), Some(9));
    assert_eq!(reader.line(&Message::StreamStop), json!({"kind": "stream_stop", "xid": 9}));
    reader.line(&BEGIN);
    reader.line(&insert(None, before));
    reader.read(&COMMIT).unwrap();
    reader.line(&start(false));
    assert!(reader.line(&insert(Some(9), after)).get("subxid").is_none());
    reader.line(&Message::StreamStop);
    let abort = reader.line(&Message::StreamAbort { xid: 9, subxid: 10, abort: Some((Lsn(1), 0)) });
    assert_eq!((&abort["subxid"], &abort["abort_lsn"]), (&json!(10), &json!("0/1")));
    let commit = Message::StreamCommit { xid: 9, commit_lsn: Lsn(0x30), end_lsn: Lsn(0x38), commit_time: 0 };
    assert_eq!(reader.read(&commit).unwrap().1, Some(Lsn(0x38)));
    reader.line(&BEGIN);
    reader.line(&insert(None, after));
    reader.read(&COMMIT).unwrap();
    reader.line(&start(true));
    reader.line(&Message::Relation { xid: Some(9), relation: table(16384, "t", &[]) });
    reader.line(&Message::StreamStop);
    reader.line(&Message::StreamAbort { xid: 9, subxid: 9, abort: None });
    reader.line(&BEGIN);
    reader.line(&insert(None, after));
}

#[test]
fn two_phases_end_twice() {
    let mut reader = Reader::new();
    let prepare = Prepare { prepare_lsn: Lsn(0x20), end_lsn: Lsn(0x28), prepare_time: 0, xid: 7, gid: "g" };
    assert_eq!(reader.line(&Message::BeginPrepare(prepare))["kind"], "begin_prepare");
    let (line, end) = reader.read(&Message::Prepare(prepare)).unwrap();
    assert_eq!((&line["gid"], &line["end_lsn"], end), (&json!("g"), &json!("0/28"), Some(Lsn(0x28))));
    assert_eq!(reader.lines.open(), None);
    let (commit_lsn, end_lsn, commit_time, xid, gid) = (Lsn(0x30), Lsn(0x38), 0, 7, "g");
    let (line, end) = reader.read(&Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid }).unwrap();
    assert_eq!((&line["kind"], end), (&json!("commit_prepared"), Some(end_lsn)));
    let (prepare_end_lsn, prepare_time, rollback_time) = (Lsn(0x28), 0, 1);
    let rollback = Message::RollbackPrepared { prepare_end_lsn, end_lsn, prepare_time, rollback_time, xid, gid };
    let (line, end) = reader.read(&rollback).unwrap();
    assert_eq!((&line["prepare_end_lsn"], end), (&json!("0/28"), Some(end_lsn)));
    assert_eq!(reader.read(&Message::StreamPrepare(prepare)).unwrap().1, Some(Lsn(0x28)));
}

#[test]
fn numbers_are_those_of_json() {
    for number in ["0", "-1", "10", "0.10", "1e+20", "-1.5e-07", "12345678901234567890.123"] {
        assert!(is_number(number.as_bytes()), "{number}");
        assert!(serde_json::from_str::<serde_json::Number>(number).is_ok(), "{number}");
    }
    for other in ["", "-", "NaN", "Infinity", "-Infinity", "01", ".5", "1.", "1e", "1e+", "1 ", "1x", "+1"] {
        assert!(!is_number(other.as_bytes()), "{other}");
        assert!(serde_json::from_str::<serde_json::Number>(other.trim_end_matches(' ')).is_err() || other == "1 ");
    }
    assert_eq!(timestamp(-1), "1999-12-31T23:59:59.999999Z");
    assert_eq!(timestamp(i64::MAX), i64::MAX.to_string());
}
