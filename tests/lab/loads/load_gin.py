"""The mixed load's step for GIN indexes: every type of record, whatever `:rows` is."""


def gin(load):
    """Entry trees, posting trees and pending lists: insertions, splits, VACUUM, deleted pages."""
    load.sql("CREATE EXTENSION IF NOT EXISTS btree_gin; CREATE EXTENSION IF NOT EXISTS pg_trgm")
    posting_trees(load)
    large_trees(load)
    pending_lists(load)
    wide_keys(load)
    builds(load)


def posting_trees(load):
    """Keys that most rows have, and keys that few rows have; gaps that fill again."""
    load.sql("""
        CREATE TABLE gin_tags (id int, tags int[]);
        CREATE INDEX gin_tags_direct ON gin_tags USING gin (tags) WITH (fastupdate = off);
        INSERT INTO gin_tags SELECT g, ARRAY[1, 100 + (g * 7919 + :seed) % (:rows / 8), CASE WHEN g % 5 = 0 THEN 7 END]
            FROM generate_series(1, :rows / 2) g;
        INSERT INTO gin_tags SELECT g, CASE g % 3 WHEN 0 THEN '{}' WHEN 1 THEN '{NULL}'::int[] END
            FROM generate_series(1, 300) g;
        DELETE FROM gin_tags WHERE id % 3 = 0; VACUUM gin_tags;
        INSERT INTO gin_tags SELECT g, ARRAY[1, g] FROM generate_series(1, :rows / 8) g;
        CHECKPOINT;
        UPDATE gin_tags SET tags = tags || 1 || 99 WHERE id % 17 = 0;
        DELETE FROM gin_tags WHERE id > 100 AND id < :rows / 3; VACUUM gin_tags;
        INSERT INTO gin_tags SELECT g, ARRAY[1, 3] FROM generate_series(1, :rows / 8) g;
    """)


def large_trees(load):
    """Posting trees of several leaves, most of which VACUUM deletes, and which grow again out of the pending list, with
    a new one beside them. An image of a page for each of so many rows would be too much WAL, so rows have none even if
    the load wants them."""
    load.sql("""
        SET wal_consistency_checking = '';
        CREATE TABLE gin_flags AS SELECT g AS id, ARRAY[1, 2, 3 + g % 2] AS flags FROM generate_series(1, 40000) g;
        CREATE INDEX gin_flags_flags ON gin_flags USING gin (flags);
        DELETE FROM gin_flags WHERE id BETWEEN 100 AND 39900;
        RESET wal_consistency_checking; VACUUM gin_flags; SET wal_consistency_checking = '';
        INSERT INTO gin_flags SELECT g, '{1, 5, 6, 7}' FROM generate_series(1, 20000) g;
        RESET wal_consistency_checking; VACUUM gin_flags;
        ALTER INDEX gin_flags_flags SET (fastupdate = off);
        DELETE FROM gin_flags WHERE id % 100 = 0; VACUUM gin_flags;
        INSERT INTO gin_flags SELECT g, '{1, 2, 5}' FROM generate_series(1, 400) g;
    """)


def pending_lists(load):
    """Tuples that go to the list first, rows that fill several of its pages, a list that grows out of its limit."""
    load.sql("""
        CREATE TABLE gin_docs (id int, words tsvector, doc jsonb, text text);
        CREATE INDEX gin_docs_words ON gin_docs USING gin (words) WITH (gin_pending_list_limit = 64);
        CREATE INDEX gin_docs_doc ON gin_docs USING gin (doc);
        CREATE INDEX gin_docs_path ON gin_docs USING gin (doc jsonb_path_ops) WITH (fastupdate = off);
        CREATE INDEX gin_docs_multi ON gin_docs USING gin (id, text gin_trgm_ops, doc);
        INSERT INTO gin_docs SELECT g, to_tsvector('simple', string_agg(md5((g * 31 + i + :seed)::text), ' ')),
            jsonb_object_agg('k' || i, md5((g + i)::text)), string_agg(md5((g - i)::text), ' ')
            FROM generate_series(1, :rows / 200) g, generate_series(1, 10) i GROUP BY g;
        INSERT INTO gin_docs SELECT -n, to_tsvector('simple', string_agg(md5(i::text), ' ')), NULL, NULL
            FROM generate_series(1, 3) n, generate_series(1, 1000) i GROUP BY n;
        INSERT INTO gin_docs SELECT g, 'a:1 b:2', '{"a": 1}', 'abc' FROM generate_series(1, :rows / 20) g;
        SELECT gin_clean_pending_list('gin_docs_doc');
        DELETE FROM gin_docs WHERE id % 2 = 0; VACUUM gin_docs;
        BEGIN; INSERT INTO gin_docs SELECT g, 'c:1', '[2]', 'def' FROM generate_series(1, 100) g; ROLLBACK;
    """)


def wide_keys(load):
    """Keys of which few fit on a page: splits of inner pages of the entry tree, too."""
    load.sql("""
        CREATE TABLE gin_wide (keys text[]);
        CREATE INDEX gin_wide_keys ON gin_wide USING gin (keys) WITH (fastupdate = off);
        INSERT INTO gin_wide SELECT ARRAY[(SELECT string_agg(md5((g * 100 + i + :seed)::text), '')
            FROM generate_series(1, 60) i)] FROM generate_series(1, 100) g;
        INSERT INTO gin_wide SELECT keys FROM gin_wide;
        DELETE FROM gin_wide WHERE ctid > '(5,0)'; VACUUM gin_wide;
    """)


def builds(load):
    """Indexes built over what is there, and beside their users."""
    load.sql("""
        CREATE INDEX CONCURRENTLY gin_tags_later ON gin_tags USING gin (id, tags);
        REINDEX INDEX CONCURRENTLY gin_docs_multi;
        CREATE UNLOGGED TABLE gin_unlogged (tags int[]); CREATE INDEX ON gin_unlogged USING gin (tags);
        INSERT INTO gin_unlogged VALUES ('{1, 2}');
        TRUNCATE gin_wide; INSERT INTO gin_wide VALUES ('{a, b}');
    """)
