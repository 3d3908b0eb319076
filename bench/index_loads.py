"""Loads for the index types: {name: (about, SQL before the base backup, the SQL steps after it)}.

Tables start empty and are narrow, with several indexes of the one type, so that its records are most of the WAL.
Each round inserts, deletes a fifth, and vacuums.
"""


def rounds(table, values, rows, times):
    """Insert, delete and vacuum, so many times."""
    return (f"""INSERT INTO {table} SELECT {values} FROM generate_series(1, ({rows} * :size)::int) g;
                DELETE FROM {table} WHERE random() < 0.2;
                VACUUM {table}""",) * times


def indexes(table, method, columns):
    """An index on each column."""
    return ";".join(f"CREATE INDEX ON {table} USING {method} ({column})" for column in columns)


ARRAY = "ARRAY(SELECT (random() * {})::int FROM generate_series(1, 10) WHERE g > 0)"
GIN_VALUES = f"{ARRAY.format(3000)}, {ARRAY.format(1000000)}"
POINT = "point(random() * 1000, random() * 1000)"

LOADS = {
    "btree": (
        "random keys of four types, deletes, vacuum",
        "CREATE TABLE b (a bigint, u uuid, c int, t text);" + indexes("b", "btree", ("a", "u", "c", "t")),
        rounds("b", "(random() * 1e12)::bigint, gen_random_uuid(), (random() * 2000)::int, md5(random()::text)", 90_000, 8)),
    "hash": (
        "keys of three types, deletes, vacuum",
        "CREATE TABLE h (a bigint, u uuid, t text);" + indexes("h", "hash", ("a", "u", "t")),
        rounds("h", "(random() * 1e12)::bigint, gen_random_uuid(), md5(random()::text)", 90_000, 8)),
    "gin": (
        "arrays of common and of rare keys, fastupdate on and off, deletes, vacuum",
        "CREATE TABLE direct (common int[], rare int[]); CREATE TABLE pending (LIKE direct);"
        "CREATE INDEX ON direct USING gin (common) WITH (fastupdate = off);"
        "CREATE INDEX ON direct USING gin (rare) WITH (fastupdate = off);" + indexes("pending", "gin", ("common", "rare")),
        rounds("direct", GIN_VALUES, 8_000, 4) + rounds("pending", GIN_VALUES, 16_000, 4)),
    "gist": (
        "points, boxes and ranges, deletes, vacuum",
        "CREATE TABLE g (p point, b box, r int4range);" + indexes("g", "gist", ("p", "b", "r")),
        rounds("g", f"{POINT}, box({POINT}, {POINT}), int4range(g, g + (random() * 1000)::int)", 60_000, 6)),
    "spgist": (
        "quad tree, k-d tree and radix tree, deletes, vacuum",
        "CREATE TABLE s (p point, k point, t text);" + indexes("s", "spgist", ("p", "k kd_point_ops", "t")),
        rounds("s", f"{POINT}, {POINT}, 'https://example.org/' || md5(random()::text)", 80_000, 6)),
    "brin": (
        "minmax-multi and bloom on rows that change at random, one page to a range",
        """CREATE TABLE r (id int, a bigint, u uuid, t text) WITH (fillfactor = 50);
           INSERT INTO r SELECT g, g, gen_random_uuid(), md5(g::text) FROM generate_series(1, (200000 * :size)::int) g;
           CREATE INDEX ON r USING brin (a int8_minmax_multi_ops, u uuid_bloom_ops, t text_bloom_ops)
             WITH (pages_per_range = 1);
           VACUUM (ANALYZE)""",
        ("""UPDATE r SET a = (random() * 1e12)::bigint, u = gen_random_uuid(), t = md5(random()::text)
              WHERE random() < 0.5;
            VACUUM r;
            INSERT INTO r SELECT g, g, gen_random_uuid(), md5(g::text)
              FROM generate_series((200000 * :size)::int + :number * 10000 + 1, (200000 * :size)::int + :number * 10000
                                   + (10000 * :size)::int) g;
            SELECT brin_summarize_new_values('r_a_u_t_idx')""",) * 4),
}
