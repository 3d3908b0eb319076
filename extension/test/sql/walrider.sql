-- The SQL surface; what a stream does is tested where there is a client for it.
CREATE EXTENSION walrider;
SELECT extversion, extrelocatable, extnamespace::regnamespace FROM pg_extension WHERE extname = 'walrider';
SELECT oid::regprocedure, prokind FROM pg_proc WHERE pronamespace = 'walrider'::regnamespace ORDER BY proname;
\d+ walrider.stat_early_stream
SELECT * FROM walrider.stat_early_stream;

-- not for everybody
SELECT has_function_privilege('public', 'walrider.stream_wal(pg_lsn, int, name)', 'EXECUTE') AS public,
       has_schema_privilege('public', 'walrider', 'USAGE') AS schema,
       has_table_privilege('public', 'walrider.stat_early_stream', 'SELECT') AS view,
       has_table_privilege('pg_read_all_stats', 'walrider.stat_early_stream', 'SELECT') AS stats;

-- only in a walsender
CALL walrider.stream_wal('0/1', 1);
CALL walrider.stream_wal('0/1', 1, 'slot');
CALL walrider.stream_wal('0/1');

-- settings
SELECT name, setting, unit, context, vartype, min_val, max_val FROM pg_settings
  WHERE name LIKE 'walrider.%' AND name NOT LIKE '%redo%' ORDER BY 1;
SET walrider.early = off;
SHOW walrider.early;
RESET walrider.early;
SET walrider.max_ahead = '1MB';
SET walrider.max_ahead = '64kB';
SET walrider.poll_interval = 100;
SET walrider.unknown = 1;

-- again: nothing is in the way
DROP EXTENSION walrider;
CREATE EXTENSION walrider;
DROP EXTENSION walrider;
