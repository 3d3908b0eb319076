//! What servers are asked, one question for each version. The answer is one JSON object: a [`crate::sample::Server`].

/// Settings that are looked at.
const SETTINGS: &[&str] = &[
    "archive_command",
    "archive_mode",
    "archive_timeout",
    "checkpoint_completion_target",
    "checkpoint_timeout",
    "commit_delay",
    "data_checksums",
    "fsync",
    "full_page_writes",
    "hot_standby",
    "hot_standby_feedback",
    "maintenance_io_concurrency",
    "max_slot_wal_keep_size",
    "max_standby_archive_delay",
    "max_standby_streaming_delay",
    "max_wal_senders",
    "max_wal_size",
    "min_wal_size",
    "primary_slot_name",
    "recovery_min_apply_delay",
    "recovery_prefetch",
    "restore_command",
    "shared_buffers",
    "shared_preload_libraries",
    "synchronous_commit",
    "synchronous_standby_names",
    "track_io_timing",
    "track_wal_io_timing",
    "wal_buffers",
    "wal_compression",
    "wal_decode_buffer_size",
    "wal_keep_size",
    "wal_level",
    "wal_log_hints",
    "wal_receiver_status_interval",
    "wal_receiver_timeout",
    "wal_segment_size",
    "wal_sender_timeout",
];

/// What a session is set to first: it never waits for long, and does not show up as load.
pub fn set_up(timeout_ms: u128) -> String {
    format!(
        "SET statement_timeout = {timeout_ms}; SET lock_timeout = {timeout_ms}; SET search_path = pg_catalog; \
         SET client_encoding = 'UTF8'; SET DateStyle = 'ISO'; SET default_transaction_read_only = on"
    )
}

/// What the processes that replay and that receive wait for right now: `startup` or `walreceiver`, and `Type:Event`, empty for
/// nothing.
pub const WAITS: &str = "SELECT backend_type, coalesce(wait_event_type || ':' || wait_event, '') FROM pg_stat_activity \
                         WHERE backend_type IN ('startup', 'walreceiver')";

/// Everything, from a server of this version (`server_version_num`).
pub fn everything(version: u32) -> String {
    let since = |major: u32, text: &str| if version >= major * 10_000 { text.to_owned() } else { String::new() };
    let before = |major: u32, text: &str| if version < major * 10_000 { text.to_owned() } else { String::new() };
    let settings = SETTINGS.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    let mut parts = vec![
        "'now', extract(epoch FROM clock_timestamp())".to_owned(),
        "'version', current_setting('server_version_num')::int".to_owned(),
        "'in_recovery', pg_is_in_recovery()".to_owned(),
        "'started_at', extract(epoch FROM pg_postmaster_start_time())".to_owned(),
        "'system_identifier', (SELECT system_identifier::text FROM pg_control_system())".to_owned(),
        "'cluster_name', nullif(current_setting('cluster_name'), '')".to_owned(),
        "'insert_lsn', CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_insert_lsn() END".to_owned(),
        "'flush_lsn', CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn() END".to_owned(),
        "'receive_lsn', pg_last_wal_receive_lsn()".to_owned(),
        "'replay_lsn', pg_last_wal_replay_lsn()".to_owned(),
        "'replayed_commit', extract(epoch FROM pg_last_xact_replay_timestamp())".to_owned(),
        "'paused', CASE WHEN pg_is_in_recovery() THEN pg_is_wal_replay_paused() END".to_owned(),
        "'sees_all', pg_has_role('pg_read_all_stats', 'USAGE')".to_owned(),
        REPLICATION.to_owned(),
        format!(
            "'slots', (SELECT coalesce(json_agg(s), '[]') FROM (SELECT slot_name, slot_type, active, restart_lsn, \
             wal_status, safe_wal_size FROM pg_replication_slots ORDER BY slot_name) s)"
        ),
        RECEIVER.to_owned(),
        "'startup', (SELECT json_build_object('pid', pid, 'wait', wait_event_type || ':' || wait_event) FROM a \
         WHERE backend_type = 'startup')"
            .to_owned(),
        "'sync_waiters', (SELECT count(*) FROM a WHERE wait_event = 'SyncRep')".to_owned(),
        "'active', (SELECT coalesce(json_object_agg(w, n), '{}') FROM (SELECT coalesce(wait_event_type || ':' || wait_event, '') \
         AS w, count(*) AS n FROM a WHERE state = 'active' AND pid <> pg_backend_pid() AND backend_type = 'client backend' \
         GROUP BY 1) g)"
            .to_owned(),
        since(14, "'wal', (SELECT json_build_object('records', wal_records, 'fpi', wal_fpi, 'bytes', wal_bytes::bigint, \
                   'buffers_full', wal_buffers_full) FROM pg_stat_wal)"),
        since(17, "'checkpoints', (SELECT json_build_object('timed', num_timed + restartpoints_timed, 'requested', \
                   num_requested + restartpoints_req) FROM pg_stat_checkpointer)"),
        before(17, "'checkpoints', (SELECT json_build_object('timed', checkpoints_timed, 'requested', checkpoints_req) \
                    FROM pg_stat_bgwriter)"),
        format!(
            "'conflicts', (SELECT json_build_object('tablespace', sum(confl_tablespace), 'lock', sum(confl_lock), 'snapshot', \
             sum(confl_snapshot), 'bufferpin', sum(confl_bufferpin), 'deadlock', sum(confl_deadlock){}) FROM \
             pg_stat_database_conflicts)",
            since(16, ", 'logicalslot', sum(confl_active_logicalslot)")
        ),
        since(15, "'prefetch', (SELECT json_build_object('prefetch', prefetch, 'hit', hit, 'block_distance', block_distance, \
                   'io_depth', io_depth) FROM pg_stat_recovery_prefetch)"),
        "'archiver', (SELECT json_build_object('archived', archived_count, 'failed', failed_count, 'last_failed_wal', \
         last_failed_wal, 'last_failed_at', extract(epoch FROM last_failed_time), 'last_archived_at', \
         extract(epoch FROM last_archived_time)) FROM pg_stat_archiver)"
            .to_owned(),
        "'commits', (SELECT sum(xact_commit)::bigint FROM pg_stat_database)".to_owned(),
        format!(
            "'settings', (SELECT json_object_agg(name, setting) FROM pg_settings WHERE name IN ({settings}))"
        ),
        "'extensions', (SELECT coalesce(json_agg(extname), '[]') FROM pg_extension)".to_owned(),
    ];
    parts.retain(|part| !part.is_empty());
    // What is null is left out. MATERIALIZED: the sessions are looked at once.
    format!(
        "WITH a AS MATERIALIZED (SELECT * FROM pg_stat_activity) SELECT json_strip_nulls(json_build_object({}))",
        parts.join(", ")
    )
}

const REPLICATION: &str = "'replication', (SELECT coalesce(json_agg(w), '[]') FROM (SELECT r.pid, r.application_name, \
     host(r.client_addr) AS client_addr, r.state, r.sync_state, s.slot_name AS slot, r.sent_lsn, r.write_lsn, r.flush_lsn, \
     r.replay_lsn, extract(epoch FROM r.write_lag) AS write_lag, extract(epoch FROM r.flush_lag) AS flush_lag, \
     extract(epoch FROM r.replay_lag) AS replay_lag, extract(epoch FROM clock_timestamp() - r.reply_time) AS reply_age, \
     a.wait_event_type || ':' || a.wait_event AS wait, coalesce(s.slot_type = 'logical', false) AS logical \
     FROM pg_stat_replication r LEFT JOIN a USING (pid) LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid \
     ORDER BY r.application_name, r.pid) w)";

// The connection string has no password there.
const RECEIVER: &str = "'receiver', (SELECT json_build_object('pid', v.pid, 'status', v.status, 'written_lsn', v.written_lsn, \
     'flushed_lsn', v.flushed_lsn, 'latest_end_lsn', v.latest_end_lsn, 'sent_at', extract(epoch FROM v.last_msg_send_time), \
     'received_at', extract(epoch FROM v.last_msg_receipt_time), 'slot_name', v.slot_name, 'sender_host', v.sender_host, \
     'sender_port', v.sender_port, 'application_name', \
     substring(v.conninfo FROM 'application_name=''?((?:[^'' ])+)'), 'wait', a.wait_event_type || ':' || a.wait_event) \
     FROM pg_stat_wal_receiver v LEFT JOIN a USING (pid))";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_server_is_not_asked_for_what_it_does_not_have() {
        let (old, new) = (everything(130_020), everything(180_006));
        for view in ["pg_stat_wal)", "pg_stat_checkpointer", "pg_stat_recovery_prefetch", "confl_active_logicalslot"] {
            assert!(!old.contains(view) && new.contains(view), "{view}");
        }
        assert!(old.contains("pg_stat_bgwriter") && !new.contains("pg_stat_bgwriter"));
        assert!(!new.contains(", ,") && !old.contains(", ,"));
    }
}
