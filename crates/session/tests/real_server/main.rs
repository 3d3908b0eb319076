//! Connections to PostgreSQL itself: `make test-datadir`, or as an unprivileged user
//! `PG_BINDIR=/usr/lib/postgresql/18/bin cargo test -p walrider-session --test real_server -- --ignored`.

mod pipeline;
mod server;
mod tls;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use server::{Server, connect, failure, resolve};
use walrider_layout::{Lsn, TimelineId};
use walrider_session::{ConnectError, Connection, CopyEvent, Read, Start};
use walrider_wire::stream::{StatusUpdate, Streamed};

/// Receives until `until`, acknowledging everything; returns what came.
fn stream(connection: &mut Connection, start: Lsn, until: Lsn) -> Vec<u8> {
    let mut wal = Vec::new();
    let end = Instant::now() + Duration::from_secs(60);
    while start.0 + (wal.len() as u64) < until.0 {
        assert!(Instant::now() < end, "{} bytes from {start}, {until} wanted", wal.len());
        while start.0 + (wal.len() as u64) < until.0 {
            let Some(event) = connection.next_message().unwrap() else { break };
            let CopyEvent::Data(payload) = event else { panic!("the server ended the stream") };
            if let Streamed::XLogData { start: at, data, .. } = Streamed::parse(payload).unwrap() {
                assert_eq!(at.0, start.0 + wal.len() as u64);
                wal.extend_from_slice(data);
            }
        }
        let at = Lsn(start.0 + wal.len() as u64);
        let mut status = Vec::new();
        StatusUpdate { write: at, flush: at, apply: at, time: 0, reply_requested: false }.encode(&mut status);
        assert!(connection.send_copy_data(&status));
        connection.flush().unwrap();
        if connection.read_some().unwrap() == Read::WouldBlock {
            let mut wanted = PollFlags::IN;
            wanted.set(PollFlags::OUT, connection.wants_write());
            let second = Timespec { tv_sec: 1, tv_nsec: 0 };
            poll(&mut [PollFd::from_borrowed_fd(connection.as_fd(), wanted)], Some(&second)).unwrap();
        }
    }
    wal
}

/// The error that ends a stream without data.
fn stream_failure(connection: &mut Connection) -> ConnectError {
    loop {
        match connection.next_message() {
            Ok(None) => assert_ne!(connection.read_some().unwrap(), Read::Closed),
            Ok(Some(event)) => panic!("{event:?}"),
            Err(error) => return error,
        }
    }
}

#[test]
#[ignore = "needs PostgreSQL"]
fn wal_is_streamed_and_the_session_goes_on() {
    let server = Server::start("wal_level = replica\nmax_wal_senders = 5\nwal_sender_timeout = 5s", "");
    for conninfo in [server.unix("application_name=one"), server.tcp("application_name=one")] {
        let mut connection = connect(&conninfo);
        assert_eq!(connection.server_version_num() / 10_000, server.major());
        assert!(!connection.is_encrypted());
        let identity = connection.identify_system().unwrap();
        assert_eq!(
            identity.system_identifier.to_string(),
            server.sql("SELECT system_identifier FROM pg_control_system()")
        );
        assert_eq!(identity.timeline, TimelineId(1));

        assert!(!connection.slot_exists("S 1").unwrap());
        let error = connection.create_physical_slot("S 1", false).unwrap_err();
        assert!(matches!(&error, ConnectError::Server(message) if message.is("42602")), "{error}");
        let from = connection.create_physical_slot("s1", false).unwrap();
        assert!(from <= identity.flushed && connection.slot_exists("s1").unwrap());
        assert!(connection.create_physical_slot("s1", false).unwrap_err().is_sqlstate("42710"));

        let start = Lsn(identity.flushed.0 & !0xff_ffff);
        assert_eq!(connection.start_replication(Some("s1"), start, TimelineId(1)).unwrap(), Start::Streaming);
        server.sql(
            "DROP TABLE IF EXISTS t; CREATE TABLE t AS SELECT g, repeat('x', 500) FROM generate_series(1, 20000) g",
        );
        let until: Lsn = server.sql("SELECT pg_current_wal_flush_lsn()").parse().unwrap();
        let wal = stream(&mut connection, start, until);
        let path = server.data().join(format!("pg_wal/00000001{:08X}{:08X}", start.0 >> 32, (start.0 as u32) >> 24));
        let file = std::fs::read(path).unwrap();
        let common = wal.len().min(file.len());
        assert!(common > 1 << 20 && wal[..common] == file[..common]);
        let seen = server
            .sql("SELECT count(*) FROM pg_stat_replication WHERE application_name = 'one' AND state = 'streaming'");
        assert_eq!(seen, "1");

        // WAL is under way while we end it.
        server.sql("INSERT INTO t SELECT g, repeat('y', 500) FROM generate_series(1, 20000) g");
        assert_eq!(connection.end_copy().unwrap(), None);
        assert_eq!(connection.identify_system().unwrap().timeline, TimelineId(1));
        let error = connection.start_replication(None, start, TimelineId(7)).unwrap_err();
        assert!(error.to_string().contains("requested timeline 7"), "{error}");
        connection.drop_slot("s1").unwrap();
        let error = connection.start_replication(Some("s1"), start, TimelineId(1)).unwrap_err();
        assert!(error.is_sqlstate("42704"), "{error}");
        let error = connection.timeline_history(TimelineId(9)).unwrap_err();
        assert!(error.is_sqlstate("58P01"), "{error}");
        let error = connection.simple_query("NOT A COMMAND").unwrap_err();
        assert!(error.to_string().contains("cannot execute SQL commands"), "{error}");
        let error = connection.simple_query("IDENTIFY_SYSTEM x").unwrap_err();
        assert!(error.is_sqlstate("42601"), "{error}");

        // The server begins to stream before it looks at the position.
        connection.start_replication(None, Lsn(0xffff_0000_0000), TimelineId(1)).unwrap();
        let error = stream_failure(&mut connection);
        assert!(error.to_string().contains("is ahead of the WAL flush position"), "{error}");
        let error = connection.identify_system().unwrap_err();
        assert!(error.to_string().contains("not ready for a command"), "{error}");
    }
}

#[test]
#[ignore = "needs PostgreSQL"]
fn a_temporary_slot_ends_with_its_session() {
    let server = Server::start("", "");
    let mut connection = connect(&server.unix(""));
    connection.create_physical_slot("temporary", true).unwrap();
    assert_eq!(server.sql("SELECT temporary FROM pg_replication_slots"), "t");
    drop(connection);
    server.wait_for("SELECT count(*) FROM pg_replication_slots", "0");
}

#[test]
#[ignore = "needs PostgreSQL"]
fn removed_wal_is_told_by_its_sqlstate() {
    let server = Server::start("wal_keep_size = 0\nmax_wal_size = 32MB\nmin_wal_size = 32MB", "");
    let mut connection = connect(&server.unix(""));
    let start = Lsn(connection.identify_system().unwrap().flushed.0 & !0xff_ffff);
    for _ in 0..3 {
        server.sql("CREATE TABLE IF NOT EXISTS t (a int); INSERT INTO t VALUES (1); SELECT pg_switch_wal()");
    }
    server.sql("CHECKPOINT");
    let error = match connection.start_replication(None, start, TimelineId(1)) {
        Err(error) => error,
        Ok(_) => stream_failure(&mut connection),
    };
    assert!(error.is_sqlstate("58P01") && error.to_string().contains("has already been removed"), "{error}");
}

#[test]
#[ignore = "needs PostgreSQL"]
fn a_timeline_that_has_ended_names_the_next() {
    let server = Server::start("", "");
    let mut connection = connect(&server.unix(""));
    let start = Lsn(connection.identify_system().unwrap().flushed.0 & !0xff_ffff);
    drop(connection);
    server.promote();
    let mut connection = connect(&server.unix(""));
    assert_eq!(connection.identify_system().unwrap().timeline, TimelineId(2));
    let (name, contents) = connection.timeline_history(TimelineId(2)).unwrap();
    assert_eq!(name, "00000002.history");
    assert_eq!(contents, std::fs::read(server.data().join("pg_wal/00000002.history")).unwrap());
    let switch: Lsn = String::from_utf8_lossy(&contents).split('\t').nth(1).unwrap().parse().unwrap();

    assert_eq!(connection.start_replication(None, start, TimelineId(1)).unwrap(), Start::Streaming);
    let wal = stream(&mut connection, start, switch);
    assert_eq!(start.0 + wal.len() as u64, switch.0, "nothing past the switch");
    loop {
        match connection.next_message().unwrap() {
            Some(CopyEvent::Done) => break,
            Some(CopyEvent::Data(_)) => (),
            None => drop(connection.read_some().unwrap()),
        }
    }
    assert_eq!(connection.end_copy().unwrap(), Some((TimelineId(2), switch)));
    let ended = connection.start_replication(None, switch, TimelineId(1)).unwrap();
    assert_eq!(ended, Start::Ended(Some((TimelineId(2), switch))));
    assert_eq!(connection.start_replication(None, switch, TimelineId(2)).unwrap(), Start::Streaming);
}

#[test]
#[ignore = "needs PostgreSQL"]
fn a_server_that_shuts_down_ends_the_stream() {
    let server = Server::start("", "");
    let mut connection = connect(&server.unix(""));
    let identity = connection.identify_system().unwrap();
    connection.start_replication(None, identity.flushed, identity.timeline).unwrap();
    // Before it is, it is terminated like any backend (HandleWalSndInitStopping, walsender.c).
    server.wait_for("SELECT state FROM pg_stat_replication", "streaming");
    let stopping = std::thread::spawn({
        let stop = server.stopper();
        move || stop("fast")
    });
    // It waits for us to have all of its WAL.
    let mut at = identity.flushed;
    let mut done = false;
    let last = loop {
        match connection.next_message() {
            Ok(Some(CopyEvent::Done)) => {
                done = true;
                break connection.end_copy();
            }
            Ok(Some(CopyEvent::Data(payload))) => {
                if let Streamed::XLogData { start, data, .. } = Streamed::parse(payload).unwrap() {
                    at = Lsn(start.0 + data.len() as u64);
                }
                let mut status = Vec::new();
                StatusUpdate { write: at, flush: at, apply: at, time: 0, reply_requested: false }.encode(&mut status);
                assert!(connection.send_copy_data(&status));
            }
            Ok(None) => {
                connection.flush().unwrap();
                assert_ne!(connection.read_some().unwrap(), Read::Closed);
            }
            Err(error) => break Err(error),
        }
    };
    stopping.join().unwrap();
    assert!(done && matches!(last, Err(ConnectError::Closed | ConnectError::Io { .. })), "{last:?}");
}

#[test]
#[ignore = "needs PostgreSQL"]
fn passwords_are_sent_as_the_server_wants_them_and_never_shown() {
    let hba = "local all postgres trust\nlocal replication scram scram-sha-256\nlocal replication md5 md5\n\
               local replication clear password\nlocal replication trusted trust\n";
    let server = Server::start("", hba);
    for user in ["scram", "md5", "clear", "trusted"] {
        let encryption = if user == "md5" { "md5" } else { "scram-sha-256" };
        let password = "p4ss w\u{f6}rd \\'";
        let literal = "p4ss w\u{f6}rd \\''";
        server.sql(&format!(
            "SET password_encryption = '{encryption}'; CREATE ROLE {user} LOGIN REPLICATION PASSWORD '{literal}'"
        ));
        let quoted = password.replace('\\', "\\\\").replace('\'', "\\'");
        let with = |more: &str| format!("{} user={user} {more}", server.unix_no_user());
        let mut connection = connect(&with(&format!("password='{quoted}'")));
        assert_eq!(connection.identify_system().unwrap().timeline, TimelineId(1));

        let right = format!("password='{quoted}' ");
        let method = match user {
            "scram" => "scram-sha-256",
            "clear" => "password",
            "trusted" => "none",
            other => other,
        };
        connect(&with(&format!("{right}require_auth={method}")));
        let error = failure(&with(&format!("{right}require_auth=!{method}")));
        assert!(error.contains("authentication method requirement"), "{error}");
        if user == "trusted" {
            continue;
        }
        let error = failure(&with("password=wr0ng"));
        assert!(error.contains("password authentication failed") && !error.contains("wr0ng"), "{error}");
        let error = failure(&with(""));
        assert!(error.contains("no password supplied"), "{error}");
        let error = failure(&with(&format!("{right}channel_binding=require")));
        assert!(error.contains("channel binding") && !error.contains("p4ss"), "{error}");
    }
    let error = failure(&format!("{} user=nobody", server.unix_no_user()));
    assert!(error.contains("pg_hba.conf"), "{error}");
}

#[test]
#[ignore = "needs PostgreSQL"]
fn the_server_that_is_there_and_fits_is_taken() {
    let server = Server::start("", "");
    let tcp = server.tcp("");
    let port = server.port();
    let closed = server::free_port();
    let several = format!("host=127.0.0.1,127.0.0.1 port={closed},{port} user=postgres");
    assert_eq!(connect(&several).peer(), format!("127.0.0.1:{port}"));
    let several = format!("host=/nonexistent,localhost port={port} user=postgres load_balance_hosts=random");
    assert_eq!(connect(&several).peer(), format!("localhost:{port}"));
    let error = failure(&format!("hostaddr=127.0.0.1 port={closed} user=postgres"));
    assert!(
        error.contains(&format!("\"127.0.0.1:{closed}\" failed: could not connect: Connection refused")),
        "{error}"
    );
    for attrs in ["any", "primary", "read-write", "prefer-standby"] {
        connect(&format!("{tcp} target_session_attrs={attrs}"));
    }
    for attrs in ["standby", "read-only"] {
        let error = failure(&format!("{tcp} target_session_attrs={attrs}"));
        assert!(error.contains("not in hot standby") || error.contains("not read-only"), "{error}");
    }
    for version in ["3.2", "latest"] {
        connect(&format!("{tcp} max_protocol_version={version}"));
    }
    let needs_3_2 = format!("{tcp} min_protocol_version=3.2");
    if server.major() < 18 {
        assert!(failure(&needs_3_2).contains("server offers protocol 3.0 only"));
    } else {
        connect(&needs_3_2);
    }
    let me = server.os_user();
    connect(&server.unix(&format!("requirepeer={me}")));
    let error = failure(&server.unix("requirepeer=somebody-else"));
    assert!(error.contains("actual peer user name"), "{error}");
    let mut options = resolve(&tcp);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"x").unwrap();
    options.interrupt_with(std::sync::Arc::new(reader));
    assert!(matches!(Connection::open(&options), Err(ConnectError::Interrupted)));
}
