"""The mixed load's GiST indexes: every record type of the resource manager, with keys of many sizes."""


def gist(load):
    """Growth from an empty page, dead tuples, pages that empty and are used again, builds of all kinds."""
    _growth(load)
    _deletion(load)
    _dead_tuples(load)
    _builds(load)


def _growth(load):
    """Splits of leaves, of inner pages and of the root; small keys, long ones, several columns."""
    load.sql("""
        CREATE EXTENSION IF NOT EXISTS btree_gist; CREATE EXTENSION IF NOT EXISTS pg_trgm;
        CREATE TABLE places (id int, at point, area box, t text, during int4range);
        CREATE INDEX places_at ON places USING gist (at);
        CREATE INDEX places_area ON places USING gist (area, id) INCLUDE (at) WITH (fillfactor = 60);
        CREATE INDEX places_t ON places USING gist (t gist_trgm_ops (siglen = 500)) WHERE id % 4 = 0;
        CREATE INDEX places_during ON places USING gist (during, id);
        ALTER TABLE places ADD CONSTRAINT apart EXCLUDE USING gist (id WITH =, during WITH &&);
        SELECT setseed(1.0 / (1 + :seed));
        INSERT INTO places SELECT g, point(random() * 1000, random() * 1000),
            box(point(g % 100, g / 100), point(g % 100 + random() * 3, g / 100 + random() * 3)),
            md5(g::text) || md5((-g)::text), int4range(g, g + (random() * 100)::int)
          FROM generate_series(1, :rows / 8) g;
        UPDATE places SET at = point((at)[1], (at)[0]) WHERE id % 5 = 0;
        CREATE TABLE long_keys (id int, t text, b bytea);
        ALTER TABLE long_keys ALTER t SET STORAGE PLAIN, ALTER b SET STORAGE PLAIN;
        CREATE INDEX long_keys_t ON long_keys USING gist (t);
        CREATE INDEX long_keys_b ON long_keys USING gist (b, id);
        INSERT INTO long_keys SELECT g, left(k, 1 + g * 37 % 900), left(k, 1 + g * 53 % 300)::bytea
          FROM generate_series(1, 400) g,
            LATERAL (SELECT string_agg(md5(g || '-' || i || '-' || :seed), '') k FROM generate_series(1, 30) i);
        DELETE FROM long_keys WHERE id % 3 = 0; VACUUM long_keys; INSERT INTO long_keys SELECT * FROM long_keys;
    """)


def _deletion(load):
    """Leaves become empty and leave the tree; once nobody can see them any more, they are used again."""
    load.sql("""
        CREATE TABLE emptying (id int, at point);
        CREATE INDEX emptying_at ON emptying USING gist (at); CREATE INDEX emptying_id ON emptying USING gist (id);
        INSERT INTO emptying SELECT g, point(g % 100, g / 100) FROM generate_series(1, :rows / 4) g;
        DELETE FROM emptying WHERE at <@ box '((0,0),(80,1000))' OR id BETWEEN :rows / 16 AND :rows / 8;
        VACUUM emptying;
        SELECT pg_current_xact_id(); SELECT pg_current_xact_id();
        VACUUM emptying;
        INSERT INTO emptying SELECT g, point(g % 77, g / 77) FROM generate_series(1, :rows / 8) g;
        DELETE FROM emptying WHERE id % 2 = 0;
    """)
    load.sql("CHECKPOINT")
    # Behind the checkpoint, so that pages which change at once with another, too, come as images.
    load.sql("""
        VACUUM emptying; DELETE FROM emptying; VACUUM emptying;
        INSERT INTO emptying SELECT g, point(g % 50, g / 50) FROM generate_series(1, :rows / 8) g;
    """)


def _dead_tuples(load):
    """Marked dead by an index scan, then removed when the page is full."""
    # VACUUM first, to set F_TUPLES_DELETED. Redo of DELETE sets it, but gistprunepage() does not: on a page without it,
    # PostgreSQL's own replay stops with "inconsistent page found" if wal_consistency_checking is on.
    load.sql("""
        CREATE TABLE crossed_out (id int, at point); CREATE INDEX crossed_out_at ON crossed_out USING gist (at);
        INSERT INTO crossed_out SELECT g, point(g % 60, g / 60) FROM generate_series(1, 3600) g;
        DELETE FROM crossed_out WHERE id % 7 = 0; VACUUM crossed_out;
        DELETE FROM crossed_out WHERE id % 3 > 0;
    """)
    load.sql("""
        SET enable_seqscan = off; SET enable_bitmapscan = off;
        SELECT count(id) FROM crossed_out WHERE at <@ box '((0,0),(60,60))';
        SELECT count(id) FROM crossed_out WHERE at <@ box '((0,0),(60,60))';
        INSERT INTO crossed_out SELECT g, point(g % 59, g / 59) FROM generate_series(1, 3500) g;
    """)


def _builds(load):
    """Sorted, by insertion, with buffers, concurrently; of what is not logged, too."""
    load.sql("""
        CREATE INDEX places_sorted ON places USING gist (at);
        CREATE INDEX places_inserted ON places USING gist (area) WITH (buffering = off);
        CREATE INDEX places_buffered ON places USING gist (area, at) WITH (buffering = on);
        CREATE INDEX CONCURRENTLY places_later ON places USING gist (circle(at, id % 10));
        REINDEX INDEX CONCURRENTLY places_at;
        CREATE UNLOGGED TABLE places_unlogged (at point); CREATE INDEX ON places_unlogged USING gist (at);
        INSERT INTO places_unlogged SELECT at FROM places LIMIT 1000;
        BEGIN; CREATE TABLE places_new AS SELECT * FROM places LIMIT 2000;
        CREATE INDEX places_new_at ON places_new USING gist (at);
        INSERT INTO places_new SELECT * FROM places LIMIT 500; TRUNCATE places_new;
        INSERT INTO places_new SELECT * FROM places LIMIT 500; COMMIT;
        INSERT INTO places SELECT -id, at, area, t, during FROM places WHERE id % 2 = 0;
        DELETE FROM places WHERE id % 7 = 0; VACUUM places;
    """)
