//! Streams that make no sense, or nearly do: the decoder answers with an error or goes through.
//!
//! The test prints its seed; `WALRIDER_SEED` sets it, `WALRIDER_FUZZ_SECONDS` how long it runs. The same inputs,
//! driven by coverage, are under `fuzz/`.

mod drive;

use walrider_layout::Lsn;
use walrider_logical::message::{Message, OldTuple, Prepare, Type, Value};
use walrider_logical::testing::{encode, relation_ids, table, tuple};
use walrider_seed::Random;

/// A second or two.
const ROUNDS: u64 = 20_000;

/// Streams that make sense, to be changed.
fn valid() -> Vec<Vec<u8>> {
    let mut bytes = Vec::new();
    let row = tuple(&mut bytes, &[Value::Text(b"12"), Value::Null, Value::UnchangedToast, Value::Binary(b"\0\x01")]);
    let prepare = Prepare { prepare_lsn: Lsn(1), end_lsn: Lsn(2), prepare_time: 3, xid: 4, gid: "gid" };
    let changes = |xid, relation| {
        [
            Message::Type { xid, described: Type { oid: 16500, namespace: "public", name: "mood" } },
            Message::Relation { xid, relation: table(relation, "t", &["a", "b", "c"]) },
            Message::Insert { xid, relation, new: row },
            Message::Update { xid, relation, old: Some(OldTuple::Key(row)), new: row },
            Message::Update { xid, relation, old: None, new: row },
            Message::Delete { xid, relation, old: OldTuple::Full(row) },
            Message::Truncate {
                xid,
                cascade: true,
                restart_identity: true,
                relations: relation_ids(&[[0; 4], [9; 4]]),
            },
            Message::Logical { xid, transactional: true, lsn: Lsn(5), prefix: "p", content: b"content" },
        ]
    };
    let around = |first: Message<'static>, xid, last: Message<'static>| {
        let mut stream = vec![first, Message::Origin { lsn: Lsn(7), name: "o" }];
        stream.extend(changes(xid, 16384));
        stream.push(last);
        stream
    };
    let begin = Message::Begin { final_lsn: Lsn(1), commit_time: 2, xid: 3 };
    let commit = Message::Commit { commit_lsn: Lsn(1), end_lsn: Lsn(2), commit_time: 2 };
    let mut two_phases = around(Message::BeginPrepare(prepare), None, Message::Prepare(prepare));
    let (commit_lsn, end_lsn, commit_time, xid, gid) = (Lsn(1), Lsn(2), 3, 4, "gid");
    two_phases.push(Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid });
    let (prepare_end_lsn, prepare_time, rollback_time) = (Lsn(1), 3, 4);
    two_phases.push(Message::RollbackPrepared { prepare_end_lsn, end_lsn, prepare_time, rollback_time, xid, gid });
    let mut chunks = around(Message::StreamStart { xid, first: true }, Some(5), Message::StreamStop);
    chunks.push(Message::StreamAbort { xid, subxid: 5, abort: None });
    chunks.push(Message::StreamAbort { xid, subxid: 4, abort: Some((Lsn(1), 2)) });
    chunks.push(Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time });
    chunks.push(Message::StreamPrepare(prepare));
    let framed = |messages: &Vec<Message<'_>>| -> Vec<u8> {
        let bodies = messages.iter().map(encode);
        bodies.flat_map(|body| [(body.len() as u16).to_be_bytes().to_vec(), body].concat()).collect()
    };
    [around(begin, None, commit), two_phases, chunks].iter().map(framed).collect()
}

#[test]
fn streams_with_some_bytes_changed() {
    let cases = valid();
    cases.iter().for_each(|case| drive::everything(case));
    walrider_seed::rounds(ROUNDS, |seed| {
        drive::everything(&Random(seed).spoiled(&cases, b"BCORYIUDTMbPKrSEcApNtnu"));
    });
}
