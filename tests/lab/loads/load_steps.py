"""The mixed load's steps inside one server: heap, btree, locks, SLRUs, databases and the rest.

Each step takes the running MixedLoad and leaves the server running. Statements are deterministic
for a given seed and scale, except where sessions race on purpose.
"""

WIDE_KEY = "(SELECT string_agg(md5(g || '-' || i || '-' || :seed), '') FROM generate_series(1, 32) i)"


def schema(load):
    """What exists before the base backup."""
    load.sql("""
        CREATE EXTENSION pageinspect; CREATE EXTENSION pg_visibility; CREATE EXTENSION amcheck;
        CREATE TABLE ledger (id bigint PRIMARY KEY, step text, at timestamptz DEFAULT clock_timestamp());
        CREATE TABLE base (id int PRIMARY KEY, k int, filler text);
        INSERT INTO base SELECT g, g % 100, repeat('b', 40) FROM generate_series(1, :rows) g;
        CREATE INDEX base_k ON base (k);
        CREATE TABLE frozen_base (id int, v text);
        INSERT INTO frozen_base SELECT g, md5(g::text) FROM generate_series(1, :rows) g;
        VACUUM (FREEZE, ANALYZE);
        CREATE PROCEDURE burn_xids(n int) LANGUAGE plpgsql AS $$
        BEGIN FOR i IN 1..n LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$;
        CREATE PROCEDURE burn_multixacts(n int) LANGUAGE plpgsql AS $$
        BEGIN FOR i IN 1..n LOOP PERFORM 1 FROM locked WHERE id = 1 FOR KEY SHARE; COMMIT; END LOOP; END $$;
        CREATE PROCEDURE nest(depth int) LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO base VALUES (1000000 + nextval('nest_ids')::int, depth, 'nested');
          IF depth > 0 THEN
            BEGIN CALL nest(depth - 1); EXCEPTION WHEN division_by_zero THEN NULL; END;
          END IF;
          IF depth < 20 AND depth % 7 = 3 THEN PERFORM 1 / 0; END IF;
        END $$;
        CREATE SEQUENCE nest_ids;
        CREATE TABLE locked (id int PRIMARY KEY, v int, ref text);
        INSERT INTO locked SELECT g, 0, 'r' FROM generate_series(1, 50) g;
        CREATE TABLE doomed (id int PRIMARY KEY, t text);
        INSERT INTO doomed SELECT g, repeat('d', 100) FROM generate_series(1, :rows) g;
        CREATE TABLE shrinking (id int PRIMARY KEY, t text);
        INSERT INTO shrinking SELECT g, repeat('s', 200) FROM generate_series(1, :rows) g;
        VACUUM shrinking;
        CREATE UNLOGGED TABLE unlogged_before (id serial PRIMARY KEY, t text);
        INSERT INTO unlogged_before (t) SELECT 'u' FROM generate_series(1, 100);
    """)
    load.sql("SELECT pg_replication_origin_create('origin_before'); SELECT pg_replication_origin_create('origin_drop')")


def transactions(load):
    """Commits, aborts, savepoints, deep subtransactions."""
    load.sql("""
        BEGIN; INSERT INTO base VALUES (-1, 1, 'kept'); SAVEPOINT a;
        INSERT INTO base VALUES (-2, 1, 'rolled back'); ROLLBACK TO a; INSERT INTO base VALUES (-3, 1, 'kept');
        SAVEPOINT b; UPDATE base SET filler = 'in b' WHERE id = -1; RELEASE b; COMMIT;
        BEGIN; DELETE FROM base WHERE id BETWEEN 1 AND 50; ROLLBACK;
        BEGIN; CREATE TABLE never (id int PRIMARY KEY); INSERT INTO never VALUES (1); ROLLBACK;
        CALL nest(90);
        BEGIN; CALL nest(80); ROLLBACK;
    """)


def copy_and_toast(load):
    """COPY into new and old pages, wide rows, index builds on data just written."""
    rows = load.rows
    text = "".join(f"{n}\t{n % 17}\tcopied row number {n}\n" for n in range(rows))
    load.sql("CREATE TABLE copied (id int, k int, t text); CREATE INDEX copied_k ON copied (k)")
    load.sql(f"COPY copied FROM stdin;\n{text}\\.\n")
    load.sql("DELETE FROM copied WHERE id % 3 = 0; VACUUM copied")
    load.sql(f"COPY copied FROM stdin;\n{text[:len(text) // 2].rsplit(chr(10), 1)[0]}\n\\.\n")
    load.sql("""
        CREATE TABLE wide (id int PRIMARY KEY, t text, u text);
        ALTER TABLE wide ALTER t SET STORAGE EXTERNAL;
        INSERT INTO wide SELECT g, """ + WIDE_KEY + """ || repeat(md5(g::text), 300), repeat('compressible ', 3000)
          FROM generate_series(1, 60) g;
        UPDATE wide SET t = t || 'more' WHERE id % 2 = 0; DELETE FROM wide WHERE id % 5 = 0;
        CREATE INDEX copied_partial ON copied (t) WHERE k = 3;
        CREATE INDEX copied_expression ON copied (lower(t), id);
        CREATE INDEX CONCURRENTLY copied_later ON copied (id) INCLUDE (k);
        REINDEX INDEX CONCURRENTLY copied_k;
        CREATE TABLE as_select AS SELECT * FROM copied WHERE id % 2 = 0;
        CREATE MATERIALIZED VIEW matview AS SELECT k, count(*) FROM copied GROUP BY k;
        REFRESH MATERIALIZED VIEW matview;
    """)


def hot_and_prune(load):
    """HOT chains, pruning on access and by VACUUM, visibility map bits set and cleared."""
    load.sql("""
        CREATE TABLE hot (id int PRIMARY KEY, n int, pad text) WITH (fillfactor = 60);
        INSERT INTO hot SELECT g, 0, repeat('h', 60) FROM generate_series(1, :rows / 4) g;
        VACUUM (FREEZE) hot;
        UPDATE hot SET n = 1; UPDATE hot SET n = 2 WHERE id % 3 = 0;
    """)
    for n in range(3, 12):
        load.sql(f"UPDATE hot SET n = {n} WHERE id <= 500; SELECT count(*) FROM hot WHERE id <= 600")
    load.sql("""
        DELETE FROM hot WHERE id % 4 = 0; VACUUM hot; VACUUM (FREEZE) hot;
        CREATE TABLE big_rows (id int, t text); ALTER TABLE big_rows ALTER t SET STORAGE PLAIN;
        INSERT INTO big_rows SELECT g, repeat('x', 5000) FROM generate_series(1, 40) g;
        UPDATE big_rows SET t = repeat('y', 5100);
        UPDATE frozen_base SET v = v || '!' WHERE id % 100 = 0;
        DELETE FROM frozen_base WHERE id % 101 = 0;
        SELECT * FROM frozen_base WHERE id % 103 = 0 FOR UPDATE;
        INSERT INTO frozen_base VALUES (-1, 'cleared a visibility bit');
        VACUUM frozen_base;
    """)


def btree(load):
    """All of nbtree: splits both ways, posting lists, deletion of pages, the fast root, recycling."""
    load.sql("""
        CREATE TABLE duplicates (k int, v int, t text);
        CREATE INDEX duplicates_k ON duplicates (k);
        CREATE INDEX duplicates_t ON duplicates (t) INCLUDE (v);
        INSERT INTO duplicates SELECT g % 20, g, 'same' FROM generate_series(1, :rows) g;
        DELETE FROM duplicates WHERE v % 2 = 0; VACUUM duplicates;
        INSERT INTO duplicates SELECT g % 20, -g, 'same' FROM generate_series(1, :rows / 2) g;
        CREATE TABLE descending (id int PRIMARY KEY);
        INSERT INTO descending SELECT :rows * 2 - g FROM generate_series(1, :rows * 2 - 1) g;
        CREATE TABLE scattered (id text PRIMARY KEY, n int);
        INSERT INTO scattered SELECT md5(g::text || :seed), g FROM generate_series(1, :rows) g;
        CREATE INDEX scattered_n ON scattered (n, id);
    """)
    # Versions of one logical row pile up in an index that the update does not change: bottom-up deletion.
    load.sql("""
        CREATE TABLE churned (id int PRIMARY KEY, a int, b int);
        CREATE INDEX churned_a ON churned (a); CREATE INDEX churned_b ON churned (b);
        INSERT INTO churned SELECT g, g, g FROM generate_series(1, 300) g;
    """)
    for turn in range(30):
        load.sql(f"UPDATE churned SET b = b + {turn}")
    # Marked dead by an index scan, then removed when the page fills: simple deletion.
    load.sql("""
        CREATE TABLE marked (id int, pad text); CREATE INDEX marked_id ON marked (id);
        INSERT INTO marked SELECT g, 'm' FROM generate_series(1, 2000) g;
        DELETE FROM marked WHERE id BETWEEN 100 AND 400;
    """)
    load.sql("""
        SET enable_seqscan = off; SET enable_bitmapscan = off;
        SELECT count(pad) FROM marked WHERE id BETWEEN 1 AND 500;
        SELECT count(pad) FROM marked WHERE id BETWEEN 1 AND 500;
        INSERT INTO marked SELECT 100 + g % 300, 'again' FROM generate_series(1, 1000) g;
    """)
    _btree_fast_root(load)


def _btree_fast_root(load):
    """A tall index loses all but its rightmost pages, and grows again from the fast root."""
    fill = "INSERT INTO tall SELECT " + WIDE_KEY + ", g FROM generate_series(1, 1200) g;"
    load.sql("""
        CREATE TABLE tall (key text, n int); ALTER TABLE tall ALTER key SET STORAGE PLAIN;
        CREATE INDEX tall_key ON tall (key);
    """ + fill)
    with load.server.session() as holder:   # holds the horizon back: deleted pages cannot be recycled at once
        load.sql("DELETE FROM tall")
        holder.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM base")
        holder.run("COMMIT")
        load.sql("VACUUM tall")
        holder.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM base")
        load.sql(fill)
        load.sql("SELECT pg_current_xact_id()")
        load.sql("DELETE FROM tall WHERE n > 600")
        load.sql("VACUUM tall")
        holder.run("COMMIT")
    load.sql("DELETE FROM tall; VACUUM tall")
    load.sql("CALL burn_xids(10)")
    load.sql("VACUUM tall")
    load.sql(fill + fill)


def truncation(load):
    """Relations that shrink, are truncated, rewritten and dropped in mid-stream."""
    load.sql("""
        DELETE FROM shrinking WHERE id > :rows / 10; VACUUM (TRUNCATE) shrinking;
        INSERT INTO shrinking SELECT g, 'grown again' FROM generate_series(:rows, :rows * 2) g;
        INSERT INTO doomed SELECT g, 'late' FROM generate_series(:rows + 1, :rows + 500) g;
        DROP TABLE doomed;
        CREATE TABLE emptied (id int PRIMARY KEY, t text);
        INSERT INTO emptied SELECT g, repeat('e', 300) FROM generate_series(1, :rows) g;
        BEGIN; TRUNCATE emptied; INSERT INTO emptied VALUES (1, 'after'); COMMIT;
        BEGIN; TRUNCATE emptied; ROLLBACK;
        CREATE TABLE short_lived (id int PRIMARY KEY, t text);
        INSERT INTO short_lived SELECT g, repeat('z', 100) FROM generate_series(1, :rows) g;
        UPDATE short_lived SET t = 'q'; DROP TABLE short_lived;
        BEGIN; CREATE TABLE same_transaction (id int PRIMARY KEY); INSERT INTO same_transaction VALUES (1);
        TRUNCATE same_transaction; INSERT INTO same_transaction VALUES (2); COMMIT;
        BEGIN; TRUNCATE same_transaction; SAVEPOINT s; DROP TABLE same_transaction; ROLLBACK TO s; COMMIT;
        CLUSTER base USING base_k; VACUUM FULL frozen_base; ALTER TABLE scattered ALTER n TYPE bigint;
    """)


def locks(load):
    """Row locks by several sessions: multixacts, updates of locked rows, locked update chains."""
    sessions = [load.server.session() for _ in range(4)]
    try:
        for number, session in enumerate(sessions):
            session.run("BEGIN; SELECT * FROM locked WHERE id <= 20 FOR KEY SHARE")
            session.run(f"SELECT * FROM locked WHERE id BETWEEN {21 + number} AND 25 FOR SHARE")
        sessions[0].run("UPDATE locked SET v = v + 1 WHERE id <= 10")     # no key change: goes ahead
        sessions[1].run("SELECT * FROM locked WHERE id <= 10 FOR KEY SHARE")
        sessions[2].run("SAVEPOINT s; UPDATE locked SET v = v + 1 WHERE id BETWEEN 11 AND 15; ROLLBACK TO s")
        sessions[3].send("DELETE FROM locked WHERE id = 21")              # waits for the sharers
        for session in sessions[:2]:
            session.run("COMMIT")
        sessions[2].run("ROLLBACK")
        sessions[3].wait()
        sessions[3].run("COMMIT")
        # A chain updated by one session and locked, from its old version on, by another.
        sessions[0].run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM locked")
        load.sql("UPDATE locked SET v = v + 100 WHERE id = 30")
        sessions[1].run("BEGIN; UPDATE locked SET v = v + 100 WHERE id = 30")
        sessions[0].run("SELECT * FROM locked WHERE id = 30 FOR KEY SHARE")
        sessions[1].run("COMMIT")
        sessions[0].run("COMMIT")
        # Multixacts of this many make several pages of offsets and members.
        sessions[0].run("BEGIN; SELECT * FROM locked WHERE id = 1 FOR KEY SHARE")
        load.sql("SET synchronous_commit = off; CALL burn_multixacts(2600)")
        sessions[0].run("COMMIT")
    finally:
        for session in sessions:
            session.close()


def upserts(load):
    """Speculative insertion, confirmed and, where two sessions race, aborted."""
    load.sql("CREATE TABLE upserted (id int PRIMARY KEY, n int)")
    script = load.script("upsert.sql", """
        \\set id random(1, 200)
        INSERT INTO upserted VALUES (:id, 1) ON CONFLICT (id) DO UPDATE SET n = upserted.n + 1;
        INSERT INTO upserted VALUES (:id + 1000, 1) ON CONFLICT DO NOTHING;
    """)
    load.server.pgbench("-n", "-c", "4", "-j", "2", "-t", "200", f"--random-seed={load.seed}", "-f", script)


def concurrent(load):
    """Several sessions of small changes at once: interleaved records, HOT, locks, aborts."""
    load.sql("""
        CREATE TABLE hot_spot (id int PRIMARY KEY, n int);
        INSERT INTO hot_spot SELECT g, 0 FROM generate_series(1, 100) g;
        CREATE TABLE feed (id bigserial PRIMARY KEY, a int, b text);
        CREATE INDEX feed_a ON feed (a); CREATE INDEX feed_b ON feed (b);
    """)
    script = load.script("concurrent.sql", """
        \\set id random(1, 100)
        \\set other random(1, 100)
        \\set roll random(1, 10)
        \\set is_one :roll = 1
        \\set is_two :roll = 2
        BEGIN;
        UPDATE hot_spot SET n = n + 1 WHERE id = least(:id, :other);
        SAVEPOINT s;
        INSERT INTO feed (a, b) VALUES (:other, md5(:id::text));
        DELETE FROM feed WHERE id IN (SELECT id FROM feed WHERE a = :id LIMIT 1 FOR UPDATE SKIP LOCKED);
        \\if :is_one
        ROLLBACK TO s;
        \\endif
        UPDATE hot_spot SET n = n + 1 WHERE id = greatest(:id, :other);
        \\if :is_two
        ROLLBACK;
        \\else
        COMMIT;
        \\endif
    """)
    load.server.pgbench("-n", "-c", "4", "-j", "2", "-T", str(load.seconds), f"--random-seed={load.seed}",
                        "-f", script)
    load.sql("VACUUM feed, hot_spot")


def sequences_and_kinds(load):
    """Sequences, unlogged and temporary relations, and changes between them."""
    load.sql("""
        CREATE SEQUENCE counter; SELECT nextval('counter') FROM generate_series(1, 200);
        SELECT setval('counter', 5000); ALTER SEQUENCE counter RESTART 7000; SELECT nextval('counter');
        CREATE TABLE identified (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, t text);
        INSERT INTO identified (t) SELECT 'i' FROM generate_series(1, 100);
        CREATE UNLOGGED TABLE unlogged_late (id serial PRIMARY KEY, t text);
        INSERT INTO unlogged_late (t) SELECT repeat('u', 100) FROM generate_series(1, 500);
        CREATE UNLOGGED SEQUENCE unlogged_counter; SELECT nextval('unlogged_counter');
        CREATE UNLOGGED TABLE becomes_logged (id int PRIMARY KEY);
        INSERT INTO becomes_logged SELECT generate_series(1, 500); ALTER TABLE becomes_logged SET LOGGED;
        CREATE TABLE becomes_unlogged (id int PRIMARY KEY);
        INSERT INTO becomes_unlogged SELECT generate_series(1, 500); ALTER TABLE becomes_unlogged SET UNLOGGED;
        TRUNCATE unlogged_before; DROP TABLE IF EXISTS nothing;
    """)
    load.sql("""
        CREATE TEMP TABLE temporary (id int PRIMARY KEY) ON COMMIT DELETE ROWS;
        INSERT INTO temporary VALUES (1); SELECT count(*) FROM temporary; SELECT count(*) FROM temporary;
    """)


def prepared(load):
    """Two-phase transactions that end; those left open come in `leave_prepared`."""
    load.sql("""
        BEGIN; INSERT INTO base VALUES (-100, 1, 'prepared'); CREATE TABLE from_prepared (id int);
        INSERT INTO from_prepared VALUES (1); PREPARE TRANSACTION 'commits';
        BEGIN; INSERT INTO base VALUES (-101, 1, 'prepared'); SAVEPOINT s;
        CREATE TABLE from_aborted (id int); UPDATE base SET k = 2 WHERE id = 60; PREPARE TRANSACTION 'aborts';
    """)
    load.sql("CHECKPOINT")
    load.sql("COMMIT PREPARED 'commits'; ROLLBACK PREPARED 'aborts'")


def leave_prepared(load, name):
    """A two-phase transaction left open across the hand-over."""
    load.sql(f"""
        CREATE TABLE pending_{name} (id int PRIMARY KEY);
        BEGIN; INSERT INTO pending_{name} SELECT generate_series(1, 50); SAVEPOINT s;
        INSERT INTO pending_{name} VALUES (51); RELEASE s; SELECT * FROM locked WHERE id = 40 FOR SHARE;
        PREPARE TRANSACTION 'left_open_{name}';
    """)
    load.left_open.append(f"left_open_{name}")


def databases(load):
    """Databases made by both strategies, moved between tablespaces, dropped."""
    fill = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 500) g"
    load.sql("CREATE DATABASE by_wal STRATEGY wal_log")
    load.sql(fill, "by_wal")
    load.sql("CREATE DATABASE by_copy STRATEGY file_copy TEMPLATE by_wal")
    load.sql("UPDATE t SET v = 'in the copy'; CREATE INDEX ON t (v)", "by_copy")
    load.sql("CREATE DATABASE copy_of_copy STRATEGY file_copy TEMPLATE by_copy")
    load.sql("CREATE DATABASE dropped_wal STRATEGY wal_log")
    load.sql(fill, "dropped_wal")
    load.sql("CREATE DATABASE dropped_copy STRATEGY file_copy TEMPLATE dropped_wal")
    load.sql("DROP DATABASE dropped_wal")
    load.sql("DROP DATABASE dropped_copy")
    load.sql("VACUUM FULL pg_class; REINDEX TABLE pg_class", "by_wal")


def tablespaces(load):
    """Tablespaces outside (through links) and in place; relations and databases that move."""
    outside, dropped = load.alias / "outside", load.alias / "dropped"
    load.make_location("outside", "dropped")
    load.sql(f"CREATE TABLESPACE outside LOCATION '{outside}'")
    load.sql(f"CREATE TABLESPACE dropped LOCATION '{dropped}'")
    load.sql("CREATE TABLESPACE in_place LOCATION ''")
    load.sql("""
        CREATE TABLE ts_outside (id int PRIMARY KEY, t text) TABLESPACE outside;
        INSERT INTO ts_outside SELECT g, 'o' FROM generate_series(1, 1000) g;
        CREATE TABLE ts_dropped (id int) TABLESPACE dropped; INSERT INTO ts_dropped VALUES (1);
        CREATE TABLE ts_moved (id int, t text); INSERT INTO ts_moved SELECT g, repeat('m', 200) FROM generate_series(1, 2000) g;
        CREATE INDEX ts_moved_id ON ts_moved (id);
        ALTER TABLE ts_moved SET TABLESPACE outside; ALTER INDEX ts_moved_id SET TABLESPACE in_place;
        UPDATE ts_moved SET t = 'moved' WHERE id % 2 = 0; DROP TABLE ts_dropped;
        UPDATE before_table SET t = 'changed' WHERE id % 2 = 0;
    """)
    load.sql("DROP TABLESPACE dropped")
    load.sql("CREATE DATABASE moving TABLESPACE outside STRATEGY wal_log")
    load.sql("CREATE TABLE m (id int PRIMARY KEY); INSERT INTO m SELECT generate_series(1, 300)", "moving")
    load.sql("ALTER DATABASE moving SET TABLESPACE in_place")
    load.sql("INSERT INTO m SELECT generate_series(301, 400)", "moving")


def catalogs(load):
    """Mapped catalogs rewritten, statistics in place, objects of many kinds."""
    load.sql("""
        VACUUM FULL pg_class; VACUUM FULL pg_database; REINDEX TABLE pg_attribute; CLUSTER pg_type USING pg_type_oid_index;
        ANALYZE; CREATE ROLE someone; GRANT SELECT ON base TO someone; COMMENT ON TABLE base IS 'the base';
        CREATE TYPE mood AS ENUM ('sad', 'ok'); ALTER TYPE mood ADD VALUE 'happy';
        CREATE FUNCTION f(i int) RETURNS int LANGUAGE sql AS 'SELECT i + 1';
        CREATE VIEW v AS SELECT * FROM base; CREATE TABLE parent (id int, part int) PARTITION BY LIST (part);
        CREATE TABLE child1 PARTITION OF parent FOR VALUES IN (1);
        CREATE TABLE child2 PARTITION OF parent FOR VALUES IN (2);
        INSERT INTO parent SELECT g, 1 + g % 2 FROM generate_series(1, 500) g; ALTER TABLE parent DETACH PARTITION child2;
        ALTER TABLE base ADD COLUMN added int DEFAULT 5; ALTER TABLE hot DROP COLUMN pad; DROP VIEW v;
        SELECT lo_from_bytea(0, decode(repeat('ab', 50000), 'hex'));
    """)


def oids(load):
    """Enough new OIDs for a NEXTOID record (one for each 8192)."""
    load.sql("SELECT count(lo_create(0)) FROM generate_series(1, 9000); SELECT count(lo_unlink(oid)) FROM pg_largeobject_metadata")


def origins_and_messages(load):
    """Commits with a replication origin, origins advanced and dropped, logical messages."""
    load.sql("""
        SELECT pg_replication_origin_session_setup('origin_before');
        BEGIN; SELECT pg_replication_origin_xact_setup('0/AABBCC00', '2024-05-06 07:08:09+00');
        INSERT INTO base VALUES (-200, 1, 'from elsewhere'); COMMIT;
        BEGIN; SELECT pg_replication_origin_xact_setup('0/AABBDD00', now());
        INSERT INTO base VALUES (-201, 1, 'two-phase from elsewhere'); PREPARE TRANSACTION 'origin';
        SELECT pg_replication_origin_xact_setup('0/AABBEE00', now()); COMMIT PREPARED 'origin';
        SELECT pg_replication_origin_session_reset();
        SELECT pg_replication_origin_create('origin_late');
        SELECT pg_replication_origin_advance('origin_late', '0/12345678');
        SELECT pg_replication_origin_advance('origin_drop', '0/1234'); SELECT pg_replication_origin_drop('origin_drop');
        SELECT pg_logical_emit_message(true, 'walrider', 'transactional');
        SELECT pg_logical_emit_message(false, 'walrider', repeat('not transactional', 1000));
        SELECT pg_logical_emit_message(false, 'walrider', repeat('longer than a segment ', 900000));
    """)


def logical_level(load):
    """Under wal_level = logical: new command ids, invalidations, truncates, rewritten catalogs."""
    load.sql("SELECT pg_create_logical_replication_slot('load', 'pgoutput')")
    load.sql("""
        CREATE TABLE user_catalog (id int PRIMARY KEY, t text) WITH (user_catalog_table = true);
        BEGIN; CREATE TABLE logical_ddl (id int PRIMARY KEY, t text); ALTER TABLE logical_ddl ADD COLUMN n int;
        INSERT INTO logical_ddl SELECT g, 'l', g FROM generate_series(1, 500) g;
        UPDATE logical_ddl SET n = n + 1 WHERE id % 2 = 0; UPDATE logical_ddl SET id = -id WHERE id < 20;
        DELETE FROM logical_ddl WHERE id % 7 = 0; COMMIT;
        INSERT INTO user_catalog SELECT g, 'c' FROM generate_series(1, 500) g;
        UPDATE user_catalog SET t = 'd' WHERE id < 100; VACUUM FULL user_catalog;
        ALTER TABLE base REPLICA IDENTITY FULL; UPDATE base SET k = k + 1 WHERE id % 50 = 0;
        VACUUM FULL pg_class; VACUUM FULL pg_attribute;
        TRUNCATE logical_ddl; INSERT INTO logical_ddl VALUES (1, 'after', 1);
    """)
    load.sql("CHECKPOINT")
    load.sql("SELECT pg_drop_replication_slot('load')")


def freeze(load):
    """Transaction ids burnt, everything frozen, and the SLRUs truncated behind it."""
    load.sql("SET synchronous_commit = off; CALL burn_xids(45000)")
    load.sql("ALTER DATABASE template0 ALLOW_CONNECTIONS true")
    names = [row[0] for row in load.sql("SELECT datname FROM pg_database WHERE datallowconn")]
    for name in names:
        load.sql("SET vacuum_freeze_min_age = 0; SET vacuum_multixact_freeze_min_age = 0; VACUUM (FREEZE)", name)
    load.sql("ALTER DATABASE template0 ALLOW_CONNECTIONS false")
    load.sql("INSERT INTO base VALUES (-300, 1, 'after freezing')")
