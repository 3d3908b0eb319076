//! Bytes that make no sense, or nearly do: every parser answers with an error or goes through.
//!
//! The test prints its seed; `WALRIDER_SEED` sets it, `WALRIDER_FUZZ_SECONDS` how long it runs. The same inputs,
//! driven by coverage, are under `fuzz/`.

mod drive;
mod serve;

use walrider_layout::Lsn;
use walrider_seed::Random;
use walrider_wire::frontend;
use walrider_wire::stream::{HotStandbyFeedback, StatusUpdate, Streamed};

/// A second or two.
const ROUNDS: u64 = 20_000;

/// What makes sense, to be changed.
fn valid() -> Vec<Vec<u8>> {
    let mut cases = Vec::new();
    let mut add = |build: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        build(&mut bytes);
        let mut framed = Vec::new();
        frontend::copy_data(&mut framed, &bytes);
        cases.extend([bytes, framed]);
    };
    add(&|out| Streamed::XLogData { start: Lsn(1), wal_end: Lsn(2), send_time: 3, data: b"wal" }.encode(out));
    add(&|out| Streamed::Keepalive { wal_end: Lsn(2), send_time: 3, reply_requested: true }.encode(out));
    add(&|out| StatusUpdate { write: Lsn(3), ..StatusUpdate::default() }.encode(out));
    add(&|out| HotStandbyFeedback::default().encode(out));
    for bytes in [
        b"SERROR\0C58P01\0Mm\0Dd\0Hh\0\0".as_slice(),
        b"\0\0\0\x0aSCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0",
        b"\0\x02\0\0\0\x01a\xff\xff\xff\xff",
        b"\0\x01name\0\0\0\0\0\0\0\0\0\0\x19\xff\xff\xff\xff\xff\xff\0\0",
        b"server_version\x0018.6\0",
        b"host=a,b port='1,2' password='x\\'y' sslmode=require",
        b"u%20x:p%40@[::1]:5432,/db?application_name=a%2Fb&ssl=true&",
        b"[s]\nhost=a\nport=1\n[t]\n",
        b"h:5432:replication:u:p\\:q\n*:*:*:*:r",
    ] {
        add(&|out| out.extend(bytes));
    }
    cases
}

#[test]
fn messages_and_strings_with_some_bytes_changed() {
    let cases = valid();
    cases.iter().for_each(|case| drive::everything(case));
    walrider_seed::rounds(ROUNDS, |seed| {
        drive::everything(&Random(seed).spoiled(&cases, b"'\\= %:@/?&[]\n\0*,"));
    });
}

/// What clients say that makes sense.
fn asked() -> Vec<Vec<u8>> {
    let mut opening = Vec::new();
    let parameters = [("user", "u"), ("replication", "true"), ("_pq_.x", "")];
    frontend::startup(&mut opening, frontend::PROTOCOL_3_2, &parameters);
    let mut cases = vec![opening.clone(), opening[4..].to_vec(), frontend::SSL_REQUEST.to_vec()];
    cases.push(b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\0\x01key!".to_vec());
    for text in [
        "IDENTIFY_SYSTEM;",
        "READ_REPLICATION_SLOT \"s\"",
        "CREATE_REPLICATION_SLOT s TEMPORARY PHYSICAL RESERVE_WAL",
        "CREATE_REPLICATION_SLOT s LOGICAL p (SNAPSHOT 'nothing', TWO_PHASE true, FAILOVER 0)",
        "DROP_REPLICATION_SLOT s WAIT",
        "ALTER_REPLICATION_SLOT s (FAILOVER false)",
        "START_REPLICATION SLOT \"s\" PHYSICAL 1/A0 TIMELINE 2",
        "START_REPLICATION SLOT s LOGICAL 1/A0 (\"proto_version\" '4', a '''')",
        "TIMELINE_HISTORY 2",
        "SHOW a.b",
        "BASE_BACKUP (LABEL 'x', PROGRESS, WAIT 0)",
        "UPLOAD_MANIFEST",
    ] {
        let mut session = opening.clone();
        frontend::query(&mut session, text);
        cases.extend([text.into(), session]);
    }
    let mut rest = opening;
    frontend::sasl_initial_response(&mut rest, "SCRAM-SHA-256", b"n,,n=,r=x");
    frontend::password(&mut rest, b"pw");
    let mut status = Vec::new();
    StatusUpdate::default().encode(&mut status);
    frontend::copy_data(&mut rest, &status);
    frontend::copy_done(&mut rest);
    frontend::terminate(&mut rest);
    cases.push(rest);
    cases
}

#[test]
fn questions_of_clients_with_some_bytes_changed() {
    let cases = asked();
    cases.iter().for_each(|case| serve::everything(case));
    walrider_seed::rounds(ROUNDS, |seed| {
        serve::everything(&Random(seed).spoiled(&cases, b"'\"(), ;\n\0*/0.A"));
    });
}
