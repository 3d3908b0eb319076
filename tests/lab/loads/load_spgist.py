"""The mixed load's steps on SP-GiST indexes, one function for each kind of record that takes effort to get.

Index builds log whole pages, so that each index here is made on an empty table and filled by insertions.
"""


def spgist(load):
    """All record types, with parents, new pages and moves in every combination that inserts can reach."""
    _geometry(load)
    _radix_tree(load)
    _wide_leafs(load)
    _nulls(load)
    _vacuum(load)
    _builds(load)


def _geometry(load):
    """Trees of points, boxes, ranges, networks: ADD_LEAF, MOVE_LEAFS, PICKSPLIT."""
    load.sql("""
        SELECT setseed(1.0 / (1 + :seed));
        CREATE TABLE spg_points (id int, p point, b box, r int4range, i inet);
        CREATE INDEX spg_quad ON spg_points USING spgist (p) INCLUDE (id);
        CREATE INDEX spg_kd ON spg_points USING spgist (p kd_point_ops) WITH (fillfactor = 100);
        CREATE INDEX spg_box ON spg_points USING spgist (b);
        CREATE INDEX spg_polygon ON spg_points USING spgist (polygon(b));
        CREATE INDEX spg_range ON spg_points USING spgist (r);
        CREATE INDEX spg_inet ON spg_points USING spgist (i);
        INSERT INTO spg_points SELECT g, point(x, y), box(point(x, y), point(x + y / 9, y + x / 9)),
            CASE WHEN g % 50 = 0 THEN 'empty' ELSE int4range(x::int, (x + y)::int) END,
            ((g % 200)::text || '.' || (x::int % 256) || '.' || (y::int % 256) || '.0/' || 8 + g % 25)::inet
          FROM (SELECT g, random() * 1000 AS x, random() * 1000 AS y FROM generate_series(1, :rows / 10) g) s;
        INSERT INTO spg_points SELECT g, point(1, 1), box(point(1, 1), point(2, 2)), int4range(1, 2), '1.2.3.4'
          FROM generate_series(1, 700) g;
    """)


def _radix_tree(load):
    """Texts that share prefixes: SPLIT_TUPLE; new labels: ADD_NODE, in place or, on full pages, elsewhere."""
    load.sql("""
        CREATE TABLE spg_texts (t text);
        CREATE INDEX spg_radix ON spg_texts USING spgist (t) WITH (fillfactor = 100);
        INSERT INTO spg_texts SELECT repeat(chr(97 + g % 3), 60) || md5(g::text) FROM generate_series(1, 1500) g;
        INSERT INTO spg_texts SELECT repeat(chr(97 + g % 3), g % 60) || md5(g::text) FROM generate_series(1, 1500) g;
    """)
    # Inner tuples that share a page with their parent get their labels one by one, in turn, and move about.
    load.sql("""
        CREATE TABLE spg_labels (t text);
        CREATE INDEX spg_labels_t ON spg_labels USING spgist (t) WITH (fillfactor = 100);
        INSERT INTO spg_labels SELECT chr(97 + a) || chr(65 + b) || chr(33 + n) || repeat('x', 300)
          FROM generate_series(1, 3) a, generate_series(1, 16) b, generate_series(1, 90) n
          ORDER BY n, md5(a * b || :'seed');
    """)
    # Longer than a page: prefixes take what leaf tuples cannot, on leaf pages that hold nothing yet.
    load.sql("INSERT INTO spg_texts SELECT repeat(md5(g::text), 300 + g) FROM generate_series(1, 40) g")


def _wide_leafs(load):
    """Few tuples on a page: chains move, alone or into the place of a dead one."""
    load.sql("""
        CREATE TABLE spg_wide (id int, t text); ALTER TABLE spg_wide ALTER t SET STORAGE PLAIN;
        CREATE INDEX spg_wide_t ON spg_wide USING spgist (t) WITH (fillfactor = 100);
        INSERT INTO spg_wide SELECT g, md5(g::text) || repeat('w', 300 + g % 7 * 100) FROM generate_series(1, 500) g;
        DELETE FROM spg_wide WHERE id % 5 <> 0;
        VACUUM spg_wide;
        INSERT INTO spg_wide SELECT g, md5(g::text) || repeat('v', 2500 + g % 5 * 200) FROM generate_series(1, 500) g;
    """)


def _nulls(load):
    """The tree of nulls, with included columns of its own."""
    load.sql("""
        CREATE TABLE spg_nulls (p point, n int, t text);
        CREATE INDEX spg_nulls_p ON spg_nulls USING spgist (p) INCLUDE (n, t);
        INSERT INTO spg_nulls SELECT NULL, nullif(g % 3, 0), repeat('n', g % 90) FROM generate_series(1, 1500) g;
        DELETE FROM spg_nulls WHERE n = 1;
        VACUUM spg_nulls;
        INSERT INTO spg_nulls SELECT NULL, g, NULL FROM generate_series(1, 1000) g;
    """)


def _vacuum(load):
    """Leaf pages, roots that are leafs, and redirections that nobody needs any more."""
    load.sql("""
        CREATE TABLE spg_root (p point); CREATE INDEX spg_root_p ON spg_root USING spgist (p);
        INSERT INTO spg_root SELECT point(g, g) FROM generate_series(1, 60) g;
        DELETE FROM spg_root WHERE p[0] > 40 AND p[1] < 43; VACUUM spg_root;
        DELETE FROM spg_root WHERE p[0]::int % 3 = 0; VACUUM spg_root;
        DELETE FROM spg_points WHERE id % 3 = 0; VACUUM spg_points;
        DELETE FROM spg_points WHERE p[0] < 300; VACUUM spg_points;
        DELETE FROM spg_texts WHERE t > '8'; VACUUM spg_texts;
        INSERT INTO spg_points SELECT g, point(g % 71, g % 73), box(point(g, g), point(g % 7, 1)),
            int4range(g, g + 9), '10.0.0.0'::inet + g FROM generate_series(1, :rows / 10) g;
        INSERT INTO spg_texts SELECT md5(g::text) || 'again' FROM generate_series(1, 1500) g;
        DELETE FROM spg_points WHERE p[0] < 50; DELETE FROM spg_texts WHERE t < 'c'; DELETE FROM spg_wide;
        VACUUM spg_points; VACUUM spg_texts; VACUUM spg_wide;
        VACUUM spg_points; VACUUM spg_texts; VACUUM spg_wide; VACUUM spg_nulls;
    """)


def _builds(load):
    """Indexes of rows that are there already: whole pages in WAL, init forks, insertions while the build validates."""
    load.sql("""
        CREATE INDEX spg_built ON spg_texts USING spgist (t);
        REINDEX INDEX spg_quad;
        CREATE UNLOGGED TABLE spg_unlogged AS SELECT p, id FROM spg_points;
        CREATE INDEX spg_unlogged_p ON spg_unlogged USING spgist (p) INCLUDE (id);
        ALTER TABLE spg_unlogged SET LOGGED;
        INSERT INTO spg_unlogged SELECT point(g, -g), g FROM generate_series(1, 500) g;
        CREATE UNLOGGED TABLE spg_lost (p point); CREATE INDEX spg_lost_p ON spg_lost USING spgist (p);
        INSERT INTO spg_lost SELECT point(g, g) FROM generate_series(1, 500) g;
        CREATE INDEX CONCURRENTLY spg_later ON spg_points USING spgist (p);
        REINDEX INDEX CONCURRENTLY spg_kd;
        INSERT INTO spg_points (id, p) SELECT g, point(g % 31, g % 37) FROM generate_series(1, 500) g;
    """)
