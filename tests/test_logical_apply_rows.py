"""`walrider logical apply`: which row a change is of, and what is left out of a batch.

Not tried: composite types and arrays in rows that are found by all they hold; commit times of prepared transactions.
"""

import pytest

from tests.lab.logical.apply import Apply, assert_equal, make_publisher, make_target, publish


@pytest.fixture
def pair(work):
    """A publisher and a target, running, without tables."""
    with make_publisher(work / "publisher").start() as publisher, make_target(work / "target").start() as target:
        yield publisher, target


def on_both(pair, sql):
    """The same tables on both sides."""
    for server in pair:
        server.psql(sql)


def apply_beside(pair, work, change, *options):
    """What was there is applied; then what `change` does. The conflicts that there were, by kind."""
    publisher, target = pair
    with Apply(work, publisher, target, *options).start() as apply:
        apply.wait_caught_up()
        change()
        apply.wait_caught_up()
        status = apply.status()
        apply.stop()
    return {kind: times for kind, times in status["conflicts"].items() if times}


@pytest.mark.parametrize("jobs", ["1", "4"])
def test_what_is_left_out_is_of_one_batch(pair, work, jobs):
    """A row that conflicted was left out; and then each row that had its number in a later batch, of the same session, without a word."""
    publisher, target = pair
    on_both(pair, "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text); INSERT INTO t VALUES (1, 1, 'x')")
    publish(publisher)
    target.psql("INSERT INTO t VALUES (100000, 7, 'theirs')")
    publisher.psql("UPDATE t SET u = 7 WHERE id = 1")
    # Each a batch of its own, executed beside others, and large ones by parts.
    publisher.psql("".join(f"INSERT INTO t VALUES ({n}, {n + 10}, 'x');\n" for n in range(2, 400)))
    publisher.psql("INSERT INTO t SELECT n, n + 10, 'x' FROM generate_series(1000, 4000) n")
    options = ("--on-conflict", "skip", "--jobs", jobs, "--batch", "1", "--streaming", "off")
    assert apply_beside(pair, work, lambda: None, *options) == {"update_exists": 1}
    assert target.value("SELECT count(*) FROM t WHERE v = 'x'") == publisher.value("SELECT count(*) FROM t")


def test_the_end_of_a_large_transaction_has_no_table(pair, work):
    """Its beginning was executed, and waited for its end for ever, open on the target, whoever asked it to stop."""
    publisher, target = pair
    on_both(pair, "CREATE TABLE a (id int)")
    publisher.psql("CREATE TABLE missing (id int)")
    publish(publisher)
    publisher.psql("BEGIN; INSERT INTO a SELECT generate_series(1, 3000); INSERT INTO missing VALUES (1); COMMIT")
    apply = Apply(work, publisher, target, "--streaming", "off", "--log-level", "debug")
    code, log = apply.run()
    assert code == 1 and 'has no table "public.missing"' in log and "is executed while it comes" in log, log
    assert target.value("SELECT count(*) FROM a") == "0"
    target.psql("CREATE TABLE missing (id int)")
    with apply.start():
        apply.wait_caught_up()
        apply.stop()
    assert_equal(publisher, target, ("a", "missing"))


def test_keys_of_types_of_extensions(pair, work):
    """The `=` of such a type is where its extension is, which is not in search_path: each UPDATE ended apply. And citext is not text."""
    publisher, target = pair
    on_both(pair, "CREATE SCHEMA \"its Own\"; CREATE EXTENSION ltree SCHEMA \"its Own\"; CREATE EXTENSION citext; "
                  "CREATE TABLE p (k \"its Own\".ltree PRIMARY KEY, v int); CREATE TABLE c (k citext PRIMARY KEY, v int); "
                  "CREATE TABLE f (k \"its Own\".ltree, v int); ALTER TABLE f REPLICA IDENTITY FULL")
    publish(publisher)
    rows = " SELECT {} || n, 0 FROM generate_series(1, 60) n"
    publisher.psql(f"INSERT INTO c {rows.format(chr(39) + 'Key' + chr(39))}; "
                   "INSERT INTO p SELECT ('top.k' || n)::\"its Own\".ltree, 0 FROM generate_series(1, 60) n; INSERT INTO f SELECT * FROM p")

    def change():
        target.psql("UPDATE c SET k = upper(k::text)")
        # Some one by one, many in arrays.
        for table in "pcf":
            publisher.psql(f"UPDATE {table} SET v = 1; UPDATE {table} SET v = 2 WHERE k::text LIKE '%1'; DELETE FROM {table} WHERE k::text LIKE '%2'")

    assert apply_beside(pair, work, change) == {}
    assert_equal(publisher, target, ("p", "f", "c"), "lower(k::text), v")


def test_whole_rows_are_found_by_the_primary_key(pair, work):
    """With REPLICA IDENTITY FULL on the publisher. A row that was changed on the target was not found any more: the publisher's change was skipped,
    and all later ones. And a column GENERATED ALWAYS AS IDENTITY was to be set to what it is, which is an error."""
    publisher, target = pair
    on_both(pair, "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int, w text); ALTER TABLE t REPLICA IDENTITY FULL")
    publish(publisher)
    publisher.psql("INSERT INTO t (v, w) SELECT 0, 'w' FROM generate_series(1, 9)")

    def change():
        target.psql("UPDATE t SET v = 5 WHERE id IN (1, 2)")
        publisher.psql("UPDATE t SET v = 6 WHERE id = 1; DELETE FROM t WHERE id = 2; UPDATE t SET w = 'x'")

    assert apply_beside(pair, work, change) == {}
    assert_equal(publisher, target, ("t",))


def test_whole_rows_and_a_deferrable_key(pair, work):
    """While a transaction moves such keys, several rows may have one: a row is found by all it holds then, as by native apply."""
    publisher, target = pair
    on_both(pair, "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, v int); ALTER TABLE t REPLICA IDENTITY FULL")
    publish(publisher)
    publisher.psql("INSERT INTO t SELECT n, n FROM generate_series(1, 9) n")
    move = "BEGIN; SET CONSTRAINTS ALL DEFERRED; UPDATE t SET id = id + 1; COMMIT"
    assert apply_beside(pair, work, lambda: publisher.psql(move)) == {}
    assert_equal(publisher, target, ("t",))


def test_skipping_where_a_key_is_deferrable(pair, work):
    """ON CONFLICT DO NOTHING does not take such a key: what was executed row by row for another row's sake ended apply."""
    publisher, target = pair
    on_both(pair, "CREATE TABLE d (id int PRIMARY KEY, u int UNIQUE DEFERRABLE, "
                  "EXCLUDE USING btree (u WITH =) DEFERRABLE); CREATE TABLE t (id int PRIMARY KEY, v int)")
    publish(publisher)
    publisher.psql("INSERT INTO t SELECT n, 0 FROM generate_series(1, 9) n; INSERT INTO d VALUES (1, 1)")

    def change():
        target.psql("INSERT INTO d VALUES (7, 7)")
        publisher.psql("BEGIN; UPDATE t SET v = 1; INSERT INTO d VALUES (2, 2), (7, 70), (3, 3); COMMIT")

    assert apply_beside(pair, work, change, "--on-conflict", "skip") == {"insert_exists": 1}
    assert target.psql("SELECT * FROM d ORDER BY id") == [["1", "1"], ["2", "2"], ["3", "3"], ["7", "7"]]
