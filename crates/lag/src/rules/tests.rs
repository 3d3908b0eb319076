//! Rules whose conditions are hard to make for real, on samples made by hand. The others are tried in `tests/test_doctor.py`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;

/// Ten seconds of a primary that writes 1 MB/s, and a standby that replays what `replaying` says and is `behind` bytes.
fn series(behind: u64, replaying: &Value, primary: &Value, standby: &Value) -> Series {
    let lsn = |at: u64| format!("0/{at:X}");
    let merged = |mut object: Value, more: &Value| {
        for (key, value) in more.as_object().expect("an object") {
            object[key] = value.clone();
        }
        object
    };
    let mut series = Series::default();
    for second in 0..=10_u64 {
        let (time, flushed) = (1_000.0 + second as f64, (100 + second) << 20);
        let replayed = lsn(flushed - behind);
        let sender = json!({"application_name": "s", "state": "streaming", "sent_lsn": lsn(flushed), "write_lsn": lsn(flushed),
                            "flush_lsn": lsn(flushed), "replay_lsn": replayed});
        let primary = merged(
            json!({"now": time, "version": 180_006, "sees_all": true, "flush_lsn": lsn(flushed), "replication": [sender]}),
            primary,
        );
        let standby = merged(
            json!({"now": time, "version": 180_006, "sees_all": true, "in_recovery": true, "cluster_name": "s",
                   "replay_lsn": replayed, "receive_lsn": lsn(flushed), "receiver": {"flushed_lsn": lsn(flushed)}}),
            standby,
        );
        let sample = json!({"schema_version": 1, "time": time, "servers": [
            {"name": "p:1", "answered_at": time, "server": primary},
            {"name": "s:1", "answered_at": time, "server": standby, "replaying": replaying},
        ]});
        series.add(serde_json::from_value(sample).expect("a sample"));
    }
    series
}

fn found(series: &Series) -> BTreeMap<&'static str, Finding> {
    series.findings().into_iter().map(|finding| (finding.rule, finding)).collect()
}

#[test]
fn a_standby_that_keeps_up_with_ease_is_no_finding() {
    let idle = json!({"Activity:RecoveryWalStream": 9, "": 1});
    assert_eq!(series(0, &idle, &json!({}), &json!({})).findings(), []);
}

#[test]
fn what_replay_does_is_what_its_lag_is_owed_to() {
    for (replaying, rule) in [
        (json!({"": 10}), "lag_replay_cpu"),
        (json!({"": 3, "IO:DataFileRead": 7}), "lag_replay_read"),
        (json!({"": 3, "IO:DataFileExtend": 7}), "lag_replay_write"),
        (json!({"IO:RestoreCommand": 5}), "lag_wal_fetch"),
        (json!({"IPC:RecoveryConflictSnapshot": 5}), "lag_conflict"),
        (json!({"IPC:SomethingNew": 5}), "lag_replay_other"),
    ] {
        let found = found(&series(4 << 20, &replaying, &json!({}), &json!({})));
        assert_eq!(found.keys().collect::<Vec<_>>(), [&rule], "{found:?}");
    }
}

#[test]
fn replay_near_its_limit_is_told_before_it_lags() {
    let busy = found(&series(512 << 10, &json!({"": 9, "Activity:RecoveryWalStream": 1}), &json!({}), &json!({})));
    assert!(busy["little_headroom"].what.contains("above 1138 kB/s"), "{busy:?}");
}

#[test]
fn reading_ahead_is_advised_where_replay_waits_for_reads_and_does_not() {
    let reads = json!({"": 3, "IO:DataFileRead": 7});
    let with = |setting: &str| {
        let settings = json!({"settings": {"recovery_prefetch": setting, "maintenance_io_concurrency": "10"}});
        found(&series(4 << 20, &reads, &json!({}), &settings)).contains_key("recovery_prefetch")
    };
    assert!(with("off") && !with("try"));
}

#[test]
fn what_a_version_or_a_library_costs_is_told() {
    let old = json!({"version": 130_020, "settings": {"shared_preload_libraries": "pgaudit"}});
    let idle = json!({"Activity:RecoveryWalStream": 9});
    let found = found(&series(0, &idle, &old, &old));
    assert_eq!(found.keys().collect::<Vec<_>>(), [&"file_sizes", &"pgaudit"]);
}

#[test]
fn replay_that_is_mostly_system_calls_and_an_audited_host_are_told() {
    let with = |user: f64, system: f64, auditd: bool| {
        let mut series = series(0, &json!({"": 9}), &json!({}), &json!({}));
        for (second, sample) in series.samples.iter_mut().enumerate() {
            let at = |share: f64| share * second as f64;
            sample.servers[1].process = serde_json::from_value(json!({
                "pid": 7, "state": "R", "user_seconds": at(user), "system_seconds": at(system), "read_calls": 1000 * second,
                "write_calls": 0, "auditd": auditd,
            }))
            .unwrap();
        }
        let mut rules: Vec<_> = found(&series).into_keys().filter(|rule| *rule != "little_headroom").collect();
        rules.sort_unstable();
        rules
    };
    assert_eq!(with(0.2, 0.7, true), ["auditd", "system_calls"]);
    assert_eq!(with(0.7, 0.2, false), [""; 0]);
    assert_eq!(with(0.1, 0.2, false), [""; 0]);
}

#[test]
fn settings_that_cost_replay_time_are_told_where_it_computes() {
    let settings = json!({"settings": {"data_checksums": "on", "wal_compression": "pglz"}});
    let evidence = |replaying: &Value| {
        let (_, finding) = found(&series(4 << 20, replaying, &settings, &json!({}))).pop_first().unwrap();
        finding.evidence.join("; ")
    };
    let said = evidence(&json!({"": 9}));
    assert!(said.contains("data_checksums = on") && said.contains("pglz (lz4"), "{said}");
    assert!(!evidence(&json!({"IO:DataFileRead": 9})).contains("checksums"));
}

/// Found by a review: two standbys without a name of their own are both "walreceiver", and the lag of the one that keeps up was taken for
/// that of the other, too.
#[test]
fn two_of_one_name_are_two() {
    let replays = |share: u32| json!({"": share, "Activity:RecoveryWalStream": 10 - share});
    let mut both = series(4 << 20, &replays(10), &json!({}), &json!({}));
    both.views.clear();
    let mut series = Series::default();
    for mut sample in std::mem::take(&mut both.samples) {
        let mut healthy = sample.servers[1].clone();
        healthy.name = "healthy:1".into();
        healthy.replaying = serde_json::from_value(replays(1)).unwrap();
        let server = healthy.server.as_mut().unwrap();
        server.replay_lsn = server.receive_lsn;
        let primary = sample.servers[0].server.as_mut().unwrap();
        let mut sender = primary.replication[0].clone();
        sender.replay_lsn = primary.flush_lsn;
        primary.replication.insert(0, sender);
        sample.servers.insert(1, healthy);
        series.add(sample);
    }
    let found = found(&series);
    assert_eq!(found.keys().collect::<Vec<_>>(), [&"lag_replay_cpu"], "{found:?}");
}

#[test]
fn an_archiver_that_is_off_fails_no_more() {
    let with = |mode: &str| {
        let archiver = json!({"settings": {"archive_mode": mode}, "archiver": {"failed": 3, "last_failed_at": 2.0, "last_archived_at": 1.0}});
        found(&series(0, &json!({"Activity:RecoveryWalStream": 9}), &archiver, &json!({})))
            .contains_key("archiver_fails")
    };
    assert!(with("on") && !with("off"));
}
