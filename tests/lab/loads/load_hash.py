"""Steps of the mixed load: hash indexes, every record type of theirs."""


def hash_indexes(load):
    """Buckets that split, chains of overflow pages that grow and are squeezed, dead tuples, builds of all kinds."""
    load.sql("""
        CREATE TABLE hashed (id int, k int, t text) WITH (autovacuum_enabled = off);
        CREATE INDEX hashed_k ON hashed USING hash (k);
        CREATE INDEX hashed_t ON hashed USING hash (t) WITH (fillfactor = 10);
    """)
    _chains(load)
    _dead_tuples(load)
    _builds(load)


def _chains(load):
    """Keys that share a bucket: its overflow pages are emptied, moved together, freed, and used again."""
    load.sql("""
        INSERT INTO hashed SELECT g, g % 50, 'text ' || g % 997 FROM generate_series(1, :rows) g;
        INSERT INTO hashed SELECT g, 7, 'same' FROM generate_series(1, 4000) g;
        DELETE FROM hashed WHERE id % 5 <> 0;
        VACUUM hashed;
        INSERT INTO hashed SELECT g, 7, 'same' FROM generate_series(1, 3000) g;
        CHECKPOINT;
        DELETE FROM hashed WHERE id % 7 <> 0;
        VACUUM hashed;
        INSERT INTO hashed SELECT g, g, g || ' of many' FROM generate_series(1, 4000) g;
        BEGIN; DELETE FROM hashed WHERE id % 2 = 0; INSERT INTO hashed SELECT g, g FROM generate_series(1, 500) g;
        ROLLBACK;
    """)


def _dead_tuples(load):
    """Index scans find tuples dead; an insertion into their full page removes them."""
    load.sql("""
        INSERT INTO hashed SELECT g, 8, 'dies' FROM generate_series(1, 2000) g;
        DELETE FROM hashed WHERE k = 8;
        SET enable_seqscan = off; SET enable_bitmapscan = off;
        SELECT count(id) FROM hashed WHERE k = 8; SELECT count(id) FROM hashed WHERE t = 'dies';
        INSERT INTO hashed SELECT g, 8, 'dies' FROM generate_series(1, 2000) g;
    """)


def _builds(load):
    """Indexes built over rows, concurrently, again, for a part of them; unlogged, truncated and dropped ones."""
    load.sql("""
        CREATE INDEX hashed_id ON hashed USING hash (id);
        CREATE INDEX CONCURRENTLY hashed_part ON hashed USING hash (md5(t)) WHERE k < 20;
        REINDEX INDEX CONCURRENTLY hashed_k; REINDEX INDEX hashed_t;
        CREATE UNLOGGED TABLE hashed_unlogged (k int);
        CREATE INDEX hashed_unlogged_k ON hashed_unlogged USING hash (k);
        INSERT INTO hashed_unlogged SELECT generate_series(1, 1000);
        CREATE TABLE hashed_again (k int); CREATE INDEX hashed_again_k ON hashed_again USING hash (k);
        INSERT INTO hashed_again SELECT generate_series(1, 2000); TRUNCATE hashed_again;
        INSERT INTO hashed_again SELECT generate_series(1, 2000); DELETE FROM hashed_again; VACUUM hashed_again;
        CREATE TABLE hashed_dropped (k int); CREATE INDEX hashed_dropped_k ON hashed_dropped USING hash (k);
        INSERT INTO hashed_dropped SELECT generate_series(1, 2000); DROP TABLE hashed_dropped;
    """)
