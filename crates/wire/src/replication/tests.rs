use super::ReplicationCommand::*;
use super::*;
use crate::command::{self, Snapshot};

fn parsed(text: &str) -> ReplicationCommand {
    ReplicationCommand::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn options(pairs: &[(&str, Option<&str>)]) -> Options {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), value.map(str::to_owned))).collect()
}

/// What our own side sends about a slot.
fn sent(slot: &str) -> Vec<(String, ReplicationCommand)> {
    let slot = || slot.to_owned();
    let snapshot = |name| options(&[("snapshot", Some(name)), ("two_phase", Some("false"))]);
    let logical = |options| CreateLogicalSlot { slot: slot(), plugin: "P".to_owned(), temporary: false, options };
    let physical =
        |temporary| CreatePhysicalSlot { slot: slot(), temporary, options: options(&[("reserve_wal", None)]) };
    vec![
        (command::IDENTIFY_SYSTEM.to_owned(), IdentifySystem),
        (command::read_replication_slot(&slot()), ReadReplicationSlot { slot: slot() }),
        (command::create_physical_slot(&slot(), true), physical(true)),
        (command::create_physical_slot(&slot(), false), physical(false)),
        (command::create_logical_slot(&slot(), "P", false, Snapshot::Nothing), logical(snapshot("nothing"))),
        (command::create_logical_slot(&slot(), "P", false, Snapshot::Export), logical(snapshot("export"))),
        (command::create_logical_slot(&slot(), "P", false, Snapshot::Use), logical(snapshot("use"))),
        (command::drop_replication_slot(&slot(), false), DropReplicationSlot { slot: slot(), wait: false }),
        (command::drop_replication_slot(&slot(), true), DropReplicationSlot { slot: slot(), wait: true }),
        (
            command::start_replication(Some(&slot()), Lsn(0xfedc_ba98_7654_3210), TimelineId(u32::MAX)),
            StartPhysical {
                slot: Some(slot()),
                start: Lsn(0xfedc_ba98_7654_3210),
                timeline: Some(TimelineId(u32::MAX)),
            },
        ),
        (
            command::start_replication(None, Lsn(0), TimelineId(1)),
            StartPhysical { slot: None, start: Lsn(0), timeline: Some(TimelineId(1)) },
        ),
        (
            command::start_logical_replication(&slot(), Lsn(0xA0), &[("Proto", "it's"), ("x\"", "")]),
            StartLogical {
                slot: slot(),
                start: Lsn(0xA0),
                options: options(&[("Proto", Some("it's")), ("x\"", Some(""))]),
            },
        ),
        (
            command::start_logical_replication(&slot(), Lsn(0xA0), &[]),
            StartLogical { slot: slot(), start: Lsn(0xA0), options: vec![] },
        ),
        (command::timeline_history(TimelineId(7)), TimelineHistory(TimelineId(7))),
        (command::slot_of_database("s"), Sql),
        (command::EXTENSION_VERSION.to_owned(), Sql),
        (command::stream_wal(None, Lsn(1), TimelineId(1)), Sql),
    ]
}

#[test]
fn what_we_send_is_understood() {
    for (text, command) in sent("a\"B c") {
        assert_eq!(parsed(&text), command, "{text}");
        let padded = format!(" \t\r\n\u{b}\u{c}{text} ;\n");
        assert_eq!(parsed(&padded), command, "{padded}");
        if command != Sql {
            // One semicolon ends it, and nothing follows.
            for end in [";;", "; x", " x", " -- comment", " /* comment */", ","] {
                let longer = format!("{text}{end}");
                assert!(ReplicationCommand::parse(&longer).is_err(), "{longer}");
            }
        }
    }
}

#[test]
fn every_beginning_of_a_command_is_refused_or_another_command() {
    for (text, command) in sent("aB c").into_iter().filter(|(_, command)| *command != Sql) {
        for end in 0..text.len() {
            match (ReplicationCommand::parse(&text[..end]), &command) {
                (Err(_) | Ok(Sql), _) => (),
                // What is optional is missing, or the number has less digits.
                (Ok(StartPhysical { .. }), StartPhysical { .. })
                | (Ok(StartLogical { .. }), StartLogical { .. })
                | (Ok(CreatePhysicalSlot { .. }), CreatePhysicalSlot { .. })
                | (Ok(CreateLogicalSlot { .. }), CreateLogicalSlot { .. })
                | (Ok(DropReplicationSlot { wait: false, .. }), DropReplicationSlot { wait: true, .. }) => (),
                (other, _) => panic!("{}: {other:?}", &text[..end]),
            }
        }
    }
}

#[test]
fn odd_commands_mean_what_they_mean_to_postgresql() {
    let slot = || "s".to_owned();
    let physical = |start, timeline: Option<u32>| StartPhysical {
        slot: None,
        start: Lsn(start),
        timeline: timeline.map(TimelineId),
    };
    let logical = |pairs: &[_]| CreateLogicalSlot {
        slot: slot(),
        plugin: "p".to_owned(),
        temporary: true,
        options: options(pairs),
    };
    let backup = |pairs: &[_]| BaseBackup { options: options(pairs) };
    let long = "x".repeat(62);
    let cases = [
        ("", Sql),
        (";", Sql),
        ("-- IDENTIFY_SYSTEM", Sql),
        ("/**/ IDENTIFY_SYSTEM", Sql),
        ("\"IDENTIFY_SYSTEM\"", Sql),
        ("'IDENTIFY_SYSTEM'", Sql),
        ("IDENTIFY_SYSTEMS", Sql),
        ("IDENTIFY_SYSTEM$", Sql),
        ("0/0 IDENTIFY_SYSTEM", Sql),
        ("99999999999", Sql),
        ("TIMELINE 1", Sql),
        ("SELECT 'open", Sql),
        ("identify_system;", IdentifySystem),
        ("UPLOAD_MANIFEST", UploadManifest),
        ("SHOW data_directory_mode", Show { name: "data_directory_mode".to_owned() }),
        ("SHOW Walrider . \"Mode\".x", Show { name: "walrider.Mode.x".to_owned() }),
        ("READ_REPLICATION_SLOT S", ReadReplicationSlot { slot: slot() }),
        ("READ_REPLICATION_SLOT \"\"", ReadReplicationSlot { slot: String::new() }),
        ("READ_REPLICATION_SLOT Äß_1$", ReadReplicationSlot { slot: "Äß_1$".to_owned() }),
        // Cut at 63 bytes, but not through a character.
        (&format!("READ_REPLICATION_SLOT {long}Yz"), ReadReplicationSlot { slot: format!("{long}y") }),
        (&format!("READ_REPLICATION_SLOT \"{long}ä\""), ReadReplicationSlot { slot: long.clone() }),
        // Without spaces, the longest word wins.
        ("START_REPLICATION 0/0TIMELINE 1", physical(0, Some(1))),
        ("START_REPLICATION 0/a\tTIMELINE\n002", physical(10, Some(2))),
        ("START_REPLICATION PHYSICAL 000000001/0000000000A0", physical(0x1_0000_00A0, None)),
        ("START_REPLICATION ffffffff/FFFFFFFF", physical(u64::MAX, None)),
        (
            "START_REPLICATION SLOT\"s\"LOGICAL 0/0(a,b'x\n''')",
            StartLogical { slot: slot(), start: Lsn(0), options: options(&[("a", None), ("b", Some("x\n'"))]) },
        ),
        // Of keywords, those in lower case are names too.
        (
            "CREATE_REPLICATION_SLOT temporary temporary physical",
            CreatePhysicalSlot { slot: "temporary".to_owned(), temporary: true, options: vec![] },
        ),
        ("DROP_REPLICATION_SLOT wait WAIT", DropReplicationSlot { slot: "wait".to_owned(), wait: true }),
        (
            "CREATE_REPLICATION_SLOT s PHYSICAL RESERVE_WAL",
            CreatePhysicalSlot { slot: slot(), temporary: false, options: options(&[("reserve_wal", Some("true"))]) },
        ),
        ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL P", logical(&[])),
        (
            "CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL p NOEXPORT_SNAPSHOT TWO_PHASE",
            logical(&[("snapshot", Some("nothing")), ("two_phase", Some("true"))]),
        ),
        (
            "CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL p EXPORT_SNAPSHOT USE_SNAPSHOT",
            logical(&[("snapshot", Some("export")), ("snapshot", Some("use"))]),
        ),
        (
            "CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL p (FAILOVER On, \"X\" 'Y', z 007, SNAPSHOT)",
            logical(&[("failover", Some("on")), ("X", Some("Y")), ("z", Some("7")), ("snapshot", None)]),
        ),
        (
            "ALTER_REPLICATION_SLOT s (FAILOVER false)",
            AlterReplicationSlot { slot: slot(), options: options(&[("failover", Some("false"))]) },
        ),
        ("BASE_BACKUP", backup(&[])),
        (
            "BASE_BACKUP ( LABEL 'pg''x',WAIT 0 , SHOW,show show,TIMELINE_HISTORY \"Q\" );",
            backup(&[
                ("label", Some("pg'x")),
                ("wait", Some("0")),
                ("show", None),
                ("show", Some("show")),
                ("timeline_history", Some("Q")),
            ]),
        ),
    ];
    for (text, command) in cases {
        assert_eq!(parsed(text), command, "{text}");
    }
}

#[test]
fn what_postgresql_refuses_is_refused_with_the_place() {
    let syntax = |at| CommandError::Syntax { at };
    for (text, error) in [
        ("'open", CommandError::Unterminated { at: 1 }),
        (" \"open", CommandError::Unterminated { at: 2 }),
        ("IDENTIFY_SYSTEM -- x", syntax(17)),
        ("IDENTIFY_SYSTEM; IDENTIFY_SYSTEM", syntax(18)),
        ("IDENTIFY_SYSTEM;;", syntax(17)),
        ("READ_REPLICATION_SLOT", CommandError::End),
        ("READ_REPLICATION_SLOT SLOT", syntax(23)),
        ("READ_REPLICATION_SLOT 's'", syntax(23)),
        ("READ_REPLICATION_SLOT \"s''", CommandError::Unterminated { at: 23 }),
        ("READ_REPLICATION_SLOT \"s\"\"", CommandError::Unterminated { at: 23 }),
        ("READ_REPLICATION_SLOT \"s\0\"", CommandError::Unterminated { at: 23 }),
        ("READ_REPLICATION_SLOT s\0", syntax(24)),
        ("SHOW äö.", CommandError::End),
        ("SHOW äö-", syntax(8)),
        ("SHOW transaction isolation level", syntax(18)),
        ("BASE_BACKUP ()", syntax(14)),
        ("BASE_BACKUP (a,)", syntax(16)),
        ("BASE_BACKUP (a b c)", syntax(18)),
        ("BASE_BACKUP (a WAIT)", syntax(16)),
        ("BASE_BACKUP (READ_REPLICATION_SLOT)", syntax(14)),
        ("BASE_BACKUP (a 1/2)", syntax(16)),
        ("BASE_BACKUP (a -1)", syntax(16)),
        ("BASE_BACKUP (a 4294967296)", CommandError::Number { at: 16 }),
        ("BASE_BACKUP (a", CommandError::End),
        ("ALTER_REPLICATION_SLOT s", CommandError::End),
        ("DROP_REPLICATION_SLOT s NOW", syntax(25)),
        ("CREATE_REPLICATION_SLOT s", CommandError::End),
        ("CREATE_REPLICATION_SLOT s LOGICAL", CommandError::End),
        ("CREATE_REPLICATION_SLOT s PHYSICAL (RESERVE_WAL) RESERVE_WAL", syntax(50)),
        ("START_REPLICATION", CommandError::End),
        ("START_REPLICATION 0", syntax(19)),
        ("START_REPLICATION 0 / 0", syntax(19)),
        ("START_REPLICATION 0/", syntax(19)),
        ("START_REPLICATION 0/x", syntax(19)),
        ("START_REPLICATION '0/0'", syntax(19)),
        ("START_REPLICATION 100000000/0", CommandError::Position { at: 19 }),
        ("START_REPLICATION 0/100000000", CommandError::Position { at: 19 }),
        ("START_REPLICATION LOGICAL 0/0", syntax(19)),
        ("START_REPLICATION SLOT 's' 0/0", syntax(24)),
        ("START_REPLICATION SLOT s LOGICAL 0/0 TIMELINE 1", syntax(38)),
        ("START_REPLICATION SLOT s LOGICAL 0/0 ()", syntax(39)),
        ("START_REPLICATION SLOT s LOGICAL 0/0 (a 1)", syntax(41)),
        ("START_REPLICATION SLOT s LOGICAL 0/0 (a b)", syntax(41)),
        ("START_REPLICATION SLOT s LOGICAL 0/0 (SLOT 'b')", syntax(39)),
        // Two texts are not one, as they are in SQL.
        ("START_REPLICATION SLOT\"s\"LOGICAL 0/0(a,b'x'\n'y')", syntax(45)),
        ("START_REPLICATION 0/0 TIMELINE 0", CommandError::Timeline),
        ("START_REPLICATION 0/0 TIMELINE 4294967296", CommandError::Number { at: 32 }),
        ("START_REPLICATION 0/0 TIMELINE -1", syntax(32)),
        ("START_REPLICATION 0/0 (a)", syntax(23)),
        ("TIMELINE_HISTORY 0", CommandError::Timeline),
        ("TIMELINE_HISTORY", CommandError::End),
        ("UPLOAD_MANIFEST (a)", syntax(17)),
    ] {
        assert_eq!(ReplicationCommand::parse(text), Err(error), "{text}");
    }
    assert_eq!(CommandError::Timeline.to_string(), "invalid timeline 0");
    assert_eq!(syntax(3).to_string(), "syntax error at character 3");
    assert_eq!(CommandError::SQLSTATE, "42601");
}

/// A megabyte each; quadratic time would show.
#[test]
fn long_commands_take_time_and_room_as_their_length() {
    let long = |begin: &str, part: &str, end: &str| format!("{begin}{}{end}", part.repeat((1 << 20) / part.len()));
    let BaseBackup { options } = parsed(&long("BASE_BACKUP (a", ",a", ")")) else { panic!("a backup") };
    assert_eq!(options.len(), (1 << 19) + 1);
    let BaseBackup { options } = parsed(&long("BASE_BACKUP (a '", "''", "')")) else { panic!("a backup") };
    assert_eq!(options[0].1.as_ref().map(String::len), Some(1 << 19));
    assert!(matches!(parsed(&long("BASE_BACKUP (a ''", ",a''", ")")), BaseBackup { .. }));
    assert!(matches!(parsed(&long("SHOW a", ".a", "")), Show { name } if name.len() == (1 << 20) + 1));
    for part in ["(", "a", "1", "f/", "1a", "''", "\"", ";", " ", "ä"] {
        for begin in ["", "BASE_BACKUP (", "START_REPLICATION ", "START_REPLICATION SLOT s LOGICAL 0/0 (a "] {
            let _ = ReplicationCommand::parse(&long(begin, part, ""));
        }
    }
}
