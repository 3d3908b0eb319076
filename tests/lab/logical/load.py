"""A random load of every kind of change that logical replication sends, as one function that pgbench calls."""

TABLES = ("plain", "by_index", "whole", "toasted", "computed", "parted", "only_inserts", "numbered", "decimals", "emptied")

# Both sides have these; `parted` has other partitions on the target.
SCHEMA = """
CREATE TABLE plain (id int PRIMARY KEY, k int UNIQUE, v text);
CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, v text);
CREATE UNIQUE INDEX by_index_key ON by_index (a, b);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
CREATE TABLE whole (x int, y numeric, j json, v text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE toasted (id int PRIMARY KEY, large text, n int);
ALTER TABLE toasted ALTER large SET STORAGE EXTERNAL;
CREATE TABLE computed (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED);
CREATE TABLE parted (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
CREATE TABLE only_inserts (id int, v text);
ALTER TABLE only_inserts REPLICA IDENTITY NOTHING;
CREATE TABLE numbered (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text);
CREATE TABLE decimals (k numeric PRIMARY KEY, v int);
CREATE TABLE emptied (id serial PRIMARY KEY, v int);
"""
PUBLISHER = SCHEMA + """
CREATE TABLE parted_0 PARTITION OF parted FOR VALUES IN (0);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
CREATE FUNCTION change(large boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    kind int := floor(random() * 21);
    one int := floor(random() * 40);
    other int := floor(random() * 40);
    many int := CASE WHEN large THEN 300 ELSE 1 + floor(random() * 4) END;
    word text := md5(random()::text) || E'\\t\\\\n\\n''"';
    dec numeric := (ARRAY[one::numeric, one + 0.0, one + 0.00])[1 + floor(random() * 3)];
BEGIN
    CASE kind
    WHEN 0 THEN INSERT INTO plain SELECT i, i, word FROM generate_series(one * 1000, one * 1000 + many) i ON CONFLICT DO NOTHING;
    WHEN 1 THEN UPDATE plain SET v = word WHERE id BETWEEN one * 1000 AND one * 1000 + many;
    WHEN 2 THEN UPDATE plain SET id = other * 1000 + 500 WHERE id = one * 1000;
    WHEN 3 THEN DELETE FROM plain WHERE id BETWEEN one * 1000 AND one * 1000 + many;
    WHEN 4 THEN UPDATE plain SET k = NULLIF(other * 1000 + 700, 5700) WHERE id = one * 1000;
    WHEN 5 THEN INSERT INTO by_index SELECT i, one, word FROM generate_series(1, many) i ON CONFLICT DO NOTHING;
    WHEN 6 THEN UPDATE by_index SET b = other, v = NULL WHERE a = 1 AND b = one;
    WHEN 7 THEN DELETE FROM by_index WHERE b = one;
    WHEN 8 THEN INSERT INTO whole SELECT NULLIF(one, 7), dec, json_build_object('a', one), word FROM generate_series(1, 2);
    WHEN 9 THEN UPDATE whole SET v = word, x = NULL WHERE ctid = (SELECT ctid FROM whole WHERE x = one LIMIT 1);
    WHEN 10 THEN DELETE FROM whole WHERE ctid = (SELECT ctid FROM whole WHERE x IS NULL OR x = one LIMIT 1);
    WHEN 11 THEN INSERT INTO toasted VALUES (one, repeat(word, 100), other) ON CONFLICT (id) DO UPDATE SET large = excluded.large;
    WHEN 12 THEN UPDATE toasted SET n = n + 1 WHERE id = one;
    WHEN 13 THEN UPDATE toasted SET id = -other WHERE id = one;
    WHEN 14 THEN INSERT INTO computed VALUES (one, other) ON CONFLICT (id) DO UPDATE SET n = excluded.n;
    WHEN 15 THEN INSERT INTO parted SELECT i, one % 2, word FROM generate_series(one, one + many) i ON CONFLICT DO NOTHING;
    WHEN 16 THEN UPDATE parted SET k = 1 - k WHERE id = one;
    WHEN 17 THEN INSERT INTO only_inserts SELECT i, word FROM generate_series(1, many) i;
    WHEN 18 THEN
        IF other < 20 THEN INSERT INTO numbered (v) VALUES (word); ELSE UPDATE numbered SET v = word WHERE id % 40 = one; END IF;
    WHEN 19 THEN
        IF other < 15 THEN INSERT INTO decimals VALUES (dec, other) ON CONFLICT (k) DO UPDATE SET k = excluded.k, v = excluded.v;
        ELSIF other < 30 THEN UPDATE decimals SET v = other, k = dec WHERE k = one;
        ELSE DELETE FROM decimals WHERE k = one;
        END IF;
    ELSE
        IF one = 1 THEN TRUNCATE emptied RESTART IDENTITY;
        ELSE INSERT INTO emptied (v) SELECT i FROM generate_series(1, many) i;
        END IF;
    END CASE;
EXCEPTION WHEN unique_violation OR lock_not_available OR deadlock_detected THEN NULL;
END $$;
CREATE FUNCTION act() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. 1 + floor(random() * 4) LOOP
        BEGIN
            PERFORM change(random() < 0.02);
            IF random() < 0.1 THEN RAISE division_by_zero; END IF;
        EXCEPTION WHEN division_by_zero THEN NULL;
        END;
    END LOOP;
END $$;
ALTER DATABASE postgres SET lock_timeout = '200ms';
"""
TARGET = SCHEMA + """
CREATE TABLE parted_low PARTITION OF parted FOR VALUES IN (0, 5);
CREATE TABLE parted_high PARTITION OF parted DEFAULT;
"""
PLAIN = "SELECT act();\n"
# What is prepared changes something outside of `act`, and before it, as the changes of `act` are all in subtransactions: PostgreSQL
# (17.10, 18.6) cannot decode what was prepared and rolled back if a subtransaction changes rows of a file that it has made itself, by
# TRUNCATE here, before anything is changed outside of subtransactions (docs/logical-apply.md, bench/runs/2026-11-25-soak-logical.txt).
TWO_PHASE = """\\set number random(1, 1000000000)
BEGIN;
INSERT INTO numbered (v) VALUES ('outside');
SELECT act();
PREPARE TRANSACTION 'g:client_id.:number';
SELECT act();
COMMIT PREPARED 'g:client_id.:number';
"""
ROLLED_BACK = """\\set number random(1, 1000000000)
BEGIN;
INSERT INTO numbered (v) VALUES ('outside');
SELECT act();
PREPARE TRANSACTION 'r:client_id.:number';
ROLLBACK PREPARED 'r:client_id.:number';
"""


def scripts(directory, two_phase=True):
    """The load as options of pgbench: files with weights."""
    options = []
    for name, text, weight in (("plain", PLAIN, 30), ("two_phase", TWO_PHASE, 3), ("rolled_back", ROLLED_BACK, 1)):
        if name == "plain" or two_phase:
            path = directory / f"{name}.sql"
            path.write_text(text)
            options += ["-f", f"{path}@{weight}"]
    return options


def run(server, directory, rng, *, transactions=None, seconds=None, clients=4, two_phase=True):
    """Start it; returns its Popen. Prepared transactions that fail with a lock timeout end the client's transaction, not the run."""
    ends = ["-t", str(transactions)] if transactions else ["-T", str(seconds)]
    return server.pgbench_start("-n", "-c", str(clients), "-j", "2", f"--random-seed={rng.randrange(1 << 30)}", "--max-tries=1",
                                *ends, *scripts(directory, two_phase))
