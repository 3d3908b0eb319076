"""Steps of the mixed load: BRIN indexes, every record type of theirs."""


def brin(load):
    """Ranges summarized while rows come and by hand, forgotten, and moved when the range map needs their page."""
    load.sql("""
        CREATE TABLE ranges (id int, v text, n int8, r int4range, ip inet)
          WITH (fillfactor = 10, autovacuum_enabled = off);
        ALTER TABLE ranges ALTER v SET STORAGE PLAIN;
        CREATE INDEX ranges_id ON ranges USING brin (id) WITH (pages_per_range = 1);
        CREATE INDEX ranges_v ON ranges USING brin (v) WITH (pages_per_range = 1, autosummarize = on);
        CREATE INDEX ranges_multi ON ranges USING brin (n int8_minmax_multi_ops, ip inet_minmax_multi_ops)
          WITH (pages_per_range = 2);
        CREATE INDEX ranges_bloom ON ranges USING brin (v text_bloom_ops, id int4_bloom_ops)
          WITH (pages_per_range = 16);
        CREATE INDEX ranges_inclusion ON ranges USING brin (r range_inclusion_ops, ip inet_inclusion_ops)
          WITH (pages_per_range = 3);
        CREATE PROCEDURE add_ranges(first int, last int, wide int) LANGUAGE SQL AS $$
          INSERT INTO ranges SELECT g, repeat(chr(40 + g % 80), 200 + g % wide), g * 7919 % 10007,
            int4range(g, g + 10), '10.0.0.0'::inet + g FROM generate_series(first, last) g $$;
    """)
    _summaries(load)
    _builds(load)


def _summaries(load):
    """A row to a heap page or two: with a range for each page, 1360 fill a page of the range map."""
    load.sql("""
        CALL add_ranges(1, 800, 300); VACUUM ranges;
        CALL add_ranges(801, 2000, 500);
        SELECT brin_summarize_new_values('ranges_id'), brin_summarize_new_values('ranges_v'),
          brin_summarize_new_values('ranges_multi');
        UPDATE ranges SET v = repeat(chr(40 + id % 80), 700), id = id * 3 WHERE id % 13 = 0;
        CHECKPOINT;
        DO $$ BEGIN
          FOR i IN 0..1500 BY 5 LOOP
            PERFORM brin_desummarize_range('ranges_id', i), brin_desummarize_range('ranges_v', i);
            PERFORM brin_desummarize_range('ranges_inclusion', i);
          END LOOP;
          FOR i IN 0..1500 BY 10 LOOP PERFORM brin_summarize_range('ranges_id', i); END LOOP;
        END $$;
        SELECT brin_summarize_new_values('ranges_v');
        DELETE FROM ranges WHERE id % 3 = 0; VACUUM ranges;
        CALL add_ranges(1, 800, 600); VACUUM ranges;
    """)


def _builds(load):
    """Indexes built over rows, again, concurrently; unlogged, truncated and dropped ones."""
    load.sql("""
        CREATE INDEX ranges_built ON ranges USING brin (id, v, n) WITH (pages_per_range = 1);
        REINDEX INDEX CONCURRENTLY ranges_v; REINDEX INDEX ranges_multi;
        CREATE UNLOGGED TABLE ranges_unlogged (k int);
        CREATE INDEX ranges_unlogged_k ON ranges_unlogged USING brin (k);
        INSERT INTO ranges_unlogged SELECT generate_series(1, 1000);
        CREATE TABLE ranges_again (k int); CREATE INDEX ranges_again_k ON ranges_again USING brin (k);
        INSERT INTO ranges_again SELECT generate_series(1, :rows); VACUUM ranges_again; TRUNCATE ranges_again;
        INSERT INTO ranges_again SELECT generate_series(1, :rows);
        CREATE TABLE ranges_dropped (k int) WITH (fillfactor = 10);
        CREATE INDEX ranges_dropped_k ON ranges_dropped USING brin (k) WITH (pages_per_range = 1);
        INSERT INTO ranges_dropped SELECT generate_series(1, :rows); VACUUM ranges_dropped; DROP TABLE ranges_dropped;
    """)
