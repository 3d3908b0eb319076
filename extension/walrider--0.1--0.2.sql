/* extension/walrider--0.1--0.2.sql */

-- complain if script is sourced in psql, rather than via ALTER EXTENSION
\echo Use "ALTER EXTENSION walrider UPDATE TO '0.2'" to load this file. \quit

CREATE FUNCTION walrider.stat_get_redo(
    OUT active boolean,
    OUT workers integer,
    OUT slices bigint,
    OUT records bigint,
    OUT early bigint,
    OUT skipped bigint,
    OUT in_place bigint,
    OUT partial bigint,
    OUT prune_horizon bigint,
    OUT cleanup_lock bigint,
    OUT entry_first bigint,
    OUT refused bigint,
    OUT visits bigint,
    OUT barriers bigint,
    OUT min_recovery_writes bigint,
    OUT held bigint,
    OUT worker_visits bigint,
    OUT wait_time double precision)
RETURNS record
AS 'MODULE_PATHNAME', 'walrider_stat_get_redo'
LANGUAGE C STRICT VOLATILE PARALLEL SAFE;

CREATE VIEW walrider.stat_redo AS
    SELECT * FROM walrider.stat_get_redo();
GRANT SELECT ON walrider.stat_redo TO PUBLIC;
