/* extension/walrider--0.1.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION walrider" to load this file. \quit

-- It hands out all WAL: whoever may call it sees every change of every database.
CREATE PROCEDURE walrider.stream_wal(start pg_lsn, timeline int, slot name DEFAULT NULL)
AS 'MODULE_PATHNAME', 'walrider_stream_wal'
LANGUAGE C;
REVOKE EXECUTE ON PROCEDURE walrider.stream_wal FROM PUBLIC;

CREATE FUNCTION walrider.stat_get_early_stream(
    OUT pid int,
    OUT early boolean,
    OUT told_lsn pg_lsn,
    OUT sent_bytes bigint,
    OUT early_bytes bigint,
    OUT max_ahead_bytes bigint,
    OUT buffers_bytes bigint,
    OUT disk_bytes bigint,
    OUT disk_reads bigint,
    OUT wal_messages bigint,
    OUT keepalives bigint,
    OUT replies bigint,
    OUT coalesced bigint,
    OUT blocked bigint,
    OUT sleeps bigint,
    OUT polls bigint,
    OUT commit_wakeups bigint)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'walrider_stat_get_early_stream'
LANGUAGE C STRICT VOLATILE PARALLEL RESTRICTED;
REVOKE EXECUTE ON FUNCTION walrider.stat_get_early_stream FROM PUBLIC;
GRANT EXECUTE ON FUNCTION walrider.stat_get_early_stream TO pg_read_all_stats;

CREATE VIEW walrider.stat_early_stream AS
    SELECT s.pid, r.usename, r.application_name, r.client_addr, r.state, r.sent_lsn,
           s.told_lsn, s.early, s.sent_bytes, s.early_bytes, s.max_ahead_bytes, s.buffers_bytes, s.disk_bytes,
           s.disk_reads, s.wal_messages, s.keepalives, s.replies, s.coalesced, s.blocked, s.sleeps, s.polls,
           s.commit_wakeups
    FROM walrider.stat_get_early_stream() AS s
         LEFT JOIN pg_catalog.pg_stat_replication AS r USING (pid);
GRANT SELECT ON walrider.stat_early_stream TO pg_read_all_stats;

GRANT USAGE ON SCHEMA walrider TO PUBLIC;
