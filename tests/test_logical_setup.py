"""`walrider logical setup`: the copy and the changes after it fit together to the row, and what fails leaves nothing, or says what.

Not tried: networks and TLS (tests/test_standby_tls.py has the connections), tables of more than a few parts, a row of more than 64 MB."""

import os
import re
import signal
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest

from tests.lab.install import program
from tests.lab.server.cluster import PgCluster, ServerError, copy_tree, run
from tests.lab.waiting import wait_for
from tests.lab.walrider import FAILED, start, walrider

SETTINGS = """
wal_level = logical
max_wal_senders = 12
max_connections = 40
max_logical_replication_workers = 8
wal_retrieve_retry_interval = 100ms
autovacuum = off
max_wal_size = 2GB
"""
# What both have; `account` has a generated column, which no one publishes, `big` an identity and more than one part.
TABLES = """
CREATE TABLE account (id int PRIMARY KEY, owner text, balance int NOT NULL, secret text, twice int GENERATED ALWAYS AS (balance * 2) STORED);
CREATE TABLE big (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text NOT NULL, changed int NOT NULL DEFAULT 0);
CREATE TABLE "Odd Name" ("Key" int PRIMARY KEY, "a ""quoted"" one" text);
CREATE TABLE child (id int PRIMARY KEY, account int NOT NULL REFERENCES account);
CREATE TABLE parted (id int, k int, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
"""
SOURCE = TABLES + """
CREATE TABLE parted_0 PARTITION OF parted FOR VALUES IN (0);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1) PARTITION BY RANGE (id);
CREATE TABLE parted_1_all PARTITION OF parted_1 DEFAULT;
"""
TARGET = TABLES + "CREATE TABLE parted_all PARTITION OF parted DEFAULT;"
FILL = r"""
INSERT INTO account SELECT i, 'o' || i, 100, 's' FROM generate_series(1, 200) i;
INSERT INTO big (v) SELECT repeat(md5(i::text), 20) FROM generate_series(1, {big}) i;
INSERT INTO "Odd Name" VALUES (1, E'tab\there, line\nbreak, back\\slash, \\N, \\.'), (2, NULL), (3, ''), (4, 'é');
INSERT INTO child SELECT i, i FROM generate_series(1, 100) i;
INSERT INTO parted SELECT i, i % 2 FROM generate_series(1, 1000) i;
"""
# As the target has them, of the rows and columns that are published.
CONTENTS = {"account": "SELECT id, owner, balance FROM account", "big": "SELECT * FROM big", "odd": 'SELECT * FROM "Odd Name"',
            "child": "SELECT * FROM child WHERE id % 2 = 0", "parted": "SELECT * FROM parted"}
PUBLICATION = """CREATE PUBLICATION p FOR TABLE account (id, owner, balance), big, "Odd Name", child WHERE (id % 2 = 0), parted
WITH (publish_via_partition_root = true)"""
BIG = 110_000       # rows of 700 bytes: two parts


def trust(server):
    """Let it take the plugin, where it wants to be told."""
    if server.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "1":
        server.psql("ALTER SYSTEM SET output_plugin_libraries = 'pgoutput', 'walrider_pgoutput'; SELECT pg_reload_conf()")


def make(directory, name, sql, major, monkeypatch):
    """A server of a major with this schema, running."""
    with monkeypatch.context() as patch:
        patch.setenv("WALRIDER_TEST_MAJOR", major)
        server = PgCluster.init(directory / name, conf=SETTINGS).start()
    trust(server)
    server.psql(sql)
    return server


@pytest.fixture(scope="module")
def template(scratch):
    """A source and a target, stopped; a module's own."""
    for name, sql in (("source", SOURCE), ("target", TARGET)):
        with PgCluster.init(scratch / f"setup-{name}", conf=SETTINGS) as server:
            server.start()
            trust(server)
            server.psql(sql)
            server.stop()
    return scratch


@pytest.fixture
def pair(template, work):
    """A source and a target of their own."""
    servers = [PgCluster(copy_tree(template / f"setup-{name}", work / name)).start() for name in ("source", "target")]
    yield servers
    for server in servers:
        server.kill()


def arguments(source, target, *more):
    """Of a setup that uses the publication p."""
    return ("logical", "setup", "--source", source.dsn(), "--target", target.dsn(), "--publication", "p", "--slot", "s",
            "--subscription", "s", *more)


@contextmanager
def load(source, rng):
    """Two sessions that change rows all the time, until they are told or thrown out; the balances' sum stays. Yields the number of
    transactions so far."""
    done, count, failures = threading.Event(), [0, 0], []

    def work(number, rng):
        with source.session() as session:
            while not done.is_set():
                a, b, amount, row = rng.randint(1, 200), rng.randint(1, 200), rng.randint(1, 50), rng.randint(1, 1000)
                new = 2000 + 2 * count[number] + number
                try:
                    for step in ("BEGIN", f"UPDATE account SET balance = balance - {amount} WHERE id = {min(a, b)}",
                                 f"UPDATE account SET balance = balance + {amount} WHERE id = {max(a, b)}",
                                 f"UPDATE big SET changed = changed + 1 WHERE id = {row}", "INSERT INTO big (v) VALUES ('new')",
                                 f"DELETE FROM big WHERE id = {5000 + new}",
                                 f"INSERT INTO child VALUES ({new}, {a})", f"INSERT INTO parted VALUES ({new}, {new % 2})",
                                 f"UPDATE parted SET k = 1 - k WHERE id = {row}", rng.choice(("COMMIT", "COMMIT", "ROLLBACK"))):
                        session.run(step)
                except (ServerError, OSError) as error:
                    # One in six of those thrown out reads no FATAL: what psql sends meets the end of the server's process.
                    thrown_out = isinstance(error, BrokenPipeError) or re.search(
                        "terminating connection|read-only transaction|connection to server was lost", str(error))
                    if not thrown_out:
                        failures.append(error)
                    return
                count[number] += 1

    threads = [threading.Thread(target=work, args=(number, type(rng)(rng.random()))) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(count)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert not source.log_matches("terminated by signal|PANIC"), source.log_tail()


def caught_up(source, slot="s"):
    """Until the subscriber has all of the source."""
    end = source.value("SELECT pg_current_wal_flush_lsn()")
    wait_for(lambda: source.value(f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots WHERE slot_name = '{slot}'") == "t",
             "the subscriber has caught up")


def compare(source, target):
    """Both have the same, row by row."""
    for name, rows in CONTENTS.items():
        ask = f"SELECT count(*), md5(string_agg(x::text, ',' ORDER BY x::text)) FROM ({rows}) x"
        ours, theirs = target.psql(ask), source.psql(ask)
        assert ours == theirs and int(theirs[0][0]) > 0, name
    assert target.value("SELECT count(*) FROM child WHERE id % 2 = 1") == "0"
    assert target.value("SELECT count(*) FROM account WHERE secret IS NOT NULL OR twice <> balance * 2") == "0"
    assert target.value("SELECT sum(balance) FROM account") == "20000"


def traces(source, target):
    """What a setup may leave."""
    return (source.psql("SELECT slot_name FROM pg_replication_slots"), source.psql("SELECT pubname FROM pg_publication ORDER BY 1"),
            target.psql("SELECT subname FROM pg_subscription"), target.psql("SELECT roname FROM pg_replication_origin"),
            [target.value(f"SELECT count(*) FROM ({rows}) x") for rows in CONTENTS.values()])


NOTHING = ([], [], [], [], ["0"] * len(CONTENTS))


@pytest.mark.every_major
def test_under_load(pair, rng):
    """Copied while rows change, in several parts, with column lists, row filters and partition roots; a dry run changes nothing."""
    source, target = pair
    source.psql(FILL.format(big=BIG))
    source.psql(PUBLICATION)
    dry = walrider(*arguments(source, target, "--dry-run", "--json")).expect().json
    assert (dry["tables"], dry["consistent_lsn"]) == (5, None)
    assert traces(source, target) == ([], [["p"]], [], [], ["0"] * 5)
    with load(source, rng) as transactions:
        wait_for(lambda: transactions() > 20, "some transactions")
        before = transactions()
        done = walrider(*arguments(source, target, "--json", "--jobs", "3", "--two-phase")).expect().json
        during = transactions() - before
        wait_for(lambda: transactions() > before + during + 20, "some more")
    print(f"{during} transactions while {done['rows']} rows were copied in {done['copy_seconds']:.1f} s")
    assert during > 5 and done["rows"] > BIG and not done["publication_created"]
    caught_up(source)
    compare(source, target)
    assert source.psql("SELECT plugin, two_phase FROM pg_replication_slots") == [["walrider_pgoutput", "t"]]
    assert target.psql("SELECT DISTINCT srsubstate FROM pg_subscription_rel") == [["r"]]


# Where partitions are published as themselves.
PARTITIONS = """DROP TABLE parted; CREATE TABLE parted_0 (id int, k int, PRIMARY KEY (id, k));
CREATE TABLE parted_1_all (LIKE parted_0 INCLUDING ALL);"""


@pytest.mark.parametrize("way", [("--subscription", "s"), ("--apply",)])
def test_without_a_copy(pair, work, way):
    """The target has the rows already, and --no-copy leaves them: it gets the changes from then on, and no row twice."""
    source, target = pair
    source.psql(FILL.format(big=10))
    for server in pair:
        server.psql("CREATE TABLE had (id int PRIMARY KEY, v text); INSERT INTO had SELECT i, 'before' FROM generate_series(1, 100) i")
    source.psql("CREATE PUBLICATION p FOR TABLE had")
    command = ("logical", "setup", "--source", source.dsn(), "--target", target.dsn(), "--publication", "p", "--slot", "s")
    refused = walrider(*command, *way)
    assert refused.code == FAILED and "--no-copy" in refused.stderr, refused
    done = walrider(*command, *way, "--no-copy", "--json").expect().json
    assert done["rows"] == 0, done
    source.psql("UPDATE had SET v = 'after' WHERE id <= 10; DELETE FROM had WHERE id = 50; INSERT INTO had VALUES (101, 'after')")
    if way == ("--apply",):
        walrider("logical", "apply", "--source", source.dsn(), "--target", target.dsn(), "-S", "s", "-P", "p", "--until",
                 source.value("SELECT pg_current_wal_insert_lsn()"), timeout=60).expect()
    else:
        caught_up(source)
    ask = "SELECT * FROM had ORDER BY id"
    assert source.psql(ask) == target.psql(ask)


def test_what_is_published(pair):
    """The publication is made: of named tables, of a schema, of all."""
    source, target = pair
    source.psql(FILL.format(big=10))
    target.psql(PARTITIONS)
    for number, (what, tables) in enumerate(((("--tables", "public.account,public.Odd Name"), 2), (("--schema", "public"), 6),
                                             (("--all-tables",), 6))):
        target.psql('TRUNCATE account, child, big, "Odd Name", parted_0, parted_1_all')
        done = walrider("logical", "setup", "--source", source.dsn(), "--target", target.dsn(), "--publication", f"p{number}",
                        "--slot", f"s{number}", "--apply", "--jobs", "1", "--json", *what).expect().json
        assert done["publication_created"] and done["tables"] == tables, done
        assert source.value(f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 's{number}'") == done["consistent_lsn"]
        copied = ["account", '"Odd Name"', "big", "child", "parted_0", "parted_1_all"][:tables]
        assert done["rows"] == sum(int(source.value(f"SELECT count(*) FROM {table}")) for table in copied)
        for table in copied:
            ask = f"SELECT count(*), md5(string_agg(x::text, ',' ORDER BY x::text)) FROM {table} x"
            assert source.psql(ask) == target.psql(ask), table


def test_refused(pair):
    """Whatever is not as it must be is told at once, with what to do, and nothing is changed."""
    source, target = pair
    source.psql(FILL.format(big=10))
    source.psql("CREATE TABLE keyless (v int); CREATE ROLE plain LOGIN; GRANT pg_read_all_data TO plain")
    target.psql("CREATE TABLE keyless (v int); CREATE ROLE plain LOGIN; GRANT pg_create_subscription TO plain; GRANT CREATE ON DATABASE postgres TO plain")
    everything = ("--tables", "public.account,public.big,public.child")

    def refused(*said, more=everything, source_role="", target_role=""):
        result = walrider("logical", "setup", "--source", f"{source.dsn()} {source_role}", "--target", f"{target.dsn()} {target_role}",
                          "--publication", "p", "--slot", "s", "--subscription", "s", *more).expect(FAILED)
        for words in said:
            assert words in result.stderr, result.stderr
        assert "removed" not in result.stderr and result.stdout == ""
        return result

    refused("there is no publication", more=())
    refused('table "public"."keyless" has no replica identity', "REPLICA IDENTITY FULL", more=("--tables", "public.keyless"))
    refused('role "plain" may not create slots: ALTER ROLE "plain" REPLICATION', source_role="user=plain")
    refused("GRANT SET ON PARAMETER session_replication_role", target_role="user=plain")
    target.psql("GRANT SET ON PARAMETER session_replication_role TO plain; GRANT SELECT ON ALL TABLES IN SCHEMA public TO plain")
    refused("GRANT INSERT ON", target_role="user=plain")
    assert traces(source, target) == NOTHING
    target.psql("ALTER TABLE big RENAME TO other; ALTER TABLE account RENAME owner TO name; ALTER TABLE child RENAME account TO old; "
                "ALTER TABLE child ADD account int GENERATED ALWAYS AS (id) STORED")
    refused('there is no table "public"."big"', "pg_dump --schema-only", 'table "public"."account" has no column "owner"',
            'column "account" of "public"."child" is generated there')
    target.psql("ALTER TABLE other RENAME TO big; ALTER TABLE account RENAME name TO owner; ALTER TABLE child DROP account; "
                "ALTER TABLE child RENAME old TO account")
    target.psql("INSERT INTO account VALUES (1, 'x', 1)")
    refused('table "public"."account" is not empty: TRUNCATE "public"."account"')
    target.psql("TRUNCATE account CASCADE")
    source.psql("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    refused('replication slot "s" exists')
    source.psql("SELECT pg_drop_replication_slot('s')")
    source.psql(PUBLICATION)
    refused('publication "p" exists: leave out --tables')
    source.psql("DROP PUBLICATION p")
    refused("could not", more=(*everything, "--connection", "host=/nowhere dbname=postgres"))
    if source.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "1":
        source.psql("ALTER SYSTEM RESET output_plugin_libraries; SELECT pg_reload_conf()")
        wait_for(lambda: "walrider" not in source.value("SHOW output_plugin_libraries"), "reloaded")
        refused("does not trust the output plugin", "walrider_pgoutput', and reload")
    source.psql("ALTER SYSTEM SET wal_level = replica")
    source.restart()
    refused("set wal_level = logical")
    assert traces(source, target) == NOTHING


@contextmanager
def held_up(source, target, *setup):
    """A setup whose copy waits for the target, its slot made; it goes on afterwards, and succeeds."""
    with target.session() as session:
        session.run("BEGIN")
        session.run("LOCK TABLE big IN SHARE MODE")     # It may be read, to see whether it is empty.
        run = start(*setup)
        waits = "SELECT 1 FROM pg_locks WHERE relation = 'big'::regclass AND NOT granted"
        wait_for(lambda: target.psql(waits) or run.poll() is not None, "it copies")
        assert run.poll() is None, run.stderr.read()
        yield
        session.run("ROLLBACK")
    said = run.communicate(timeout=120)
    assert run.returncode == 0, said


def test_a_table_that_is_to_be_rewritten(pair):
    """ALTER TABLE waits until the table is copied, as with pg_dump: what it has rewritten, the copy's snapshot does not see, and no row was
    copied. Rows are written meanwhile."""
    source, target = pair
    source.psql(FILL.format(big=1000) + PUBLICATION)
    with held_up(source, target, *arguments(source, target, "--jobs", "1")):
        with pytest.raises(ServerError, match="lock timeout"):
            source.psql("""SET lock_timeout = '500ms'; ALTER TABLE "Odd Name" ALTER "Key" TYPE bigint""")
        source.psql("UPDATE account SET balance = balance")
    source.psql("""ALTER TABLE "Odd Name" ALTER "Key" TYPE bigint""")
    caught_up(source)
    compare(source, target)


def test_changed_while_it_was_copied(pair):
    """What was changed before the copy of its table has committed is newer than the copy, also by the times of commits."""
    source, target = pair
    target.configure("track_commit_timestamp = on")
    target.restart()
    source.psql(FILL.format(big=1000) + PUBLICATION)
    with held_up(source, target, *arguments(source, target)[:-2], "--apply", "--jobs", "1"):
        source.psql("UPDATE account SET owner = 'late' WHERE id <= 100; DELETE FROM child WHERE id = 2")
    run = walrider("logical", "apply", "--source", source.dsn(), "--target", target.dsn(), "--publication", "p", "--slot", "s",
                   "--on-conflict", "last-update-wins", "--until", source.value("SELECT pg_current_wal_flush_lsn()"), timeout=60).expect()
    compare(source, target)
    assert target.value("SELECT count(*) FROM account WHERE owner = 'late'") == "100", run.stderr


def test_fails_in_the_middle(pair, work):
    """A row that the target does not take, interrupts, a target that is gone, a kill: it takes back what it can, and says the rest."""
    source, target = pair
    source.psql(FILL.format(big=BIG))
    setup = arguments(source, target, "--schema", "public")
    target.psql(PARTITIONS + "CREATE VIEW parted AS SELECT * FROM parted_0; ALTER TABLE big ADD CONSTRAINT small CHECK (id < 100000)")
    said = walrider(*setup).expect(FAILED).stderr
    assert 'could not copy table "public"."big"' in said and 'violates check constraint "small"' in said, said
    assert "removed again: the rows of 6 tables" in said and "nothing is left, start again" in said, said
    assert traces(source, target) == NOTHING
    target.psql("ALTER TABLE big DROP CONSTRAINT small")

    def in_the_middle():
        run = start(*setup)
        wait_for(lambda: target.psql("SELECT 1 FROM pg_stat_progress_copy") or run.poll() is not None, "it copies")
        assert run.poll() is None, run.stderr.read()
        return run

    run = in_the_middle()
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == FAILED and "interrupted" in said and "nothing is left, start again" in said, said
    assert traces(source, target) == NOTHING

    # It waits for a transaction, to make the slot.
    with source.session() as session:
        session.run("BEGIN; INSERT INTO account VALUES (1000, 'o', 0)")
        run = start(*setup)
        wait_for(lambda: source.psql("SELECT active_pid FROM pg_replication_slots WHERE active"), "it waits")
        run.send_signal(signal.SIGINT)
        said = run.communicate(timeout=60)[1]
        assert run.returncode == FAILED and "nothing is left, start again" in said, said
        assert traces(source, target) == NOTHING
        session.run("ROLLBACK")
    assert traces(source, target) == NOTHING

    run = in_the_middle()
    target.kill()
    said = run.communicate(timeout=60)[1]
    assert run.returncode == FAILED, said
    assert 'removed again: replication slot "s" of the source, publication "p" of the source' in said, said
    assert "left, to be removed before the next start: the rows of 6 tables of the target: TRUNCATE" in said, said
    assert traces(source, target.start())[:2] == ([], [])
    target.psql(said.partition("of the target: ")[2].splitlines()[0])

    run = in_the_middle()
    run.kill()
    run.communicate(timeout=60)
    wait_for(lambda: not target.psql("SELECT 1 FROM pg_stat_progress_copy"), "nobody copies")
    said = walrider(*setup).expect(FAILED).stderr
    assert "SELECT pg_drop_replication_slot('s')" in said, said
    source.psql("SELECT pg_drop_replication_slot('s'); DROP PUBLICATION p")
    target.psql('TRUNCATE account, child, big, "Odd Name", parted_0, parted_1_all')
    walrider(*setup).expect()
    caught_up(source)
    assert source.psql("SELECT count(*), sum(changed) FROM big") == target.psql("SELECT count(*), sum(changed) FROM big")


# docs/upgrade.md, step by step

SEQUENCES = """SELECT format('SELECT setval(%L, %s)', format('%I.%I', schemaname, sequencename), last_value)
FROM pg_sequences WHERE last_value IS NOT NULL"""


def switch_over(source, target, until):
    """Stop writing, wait, copy the sequences, write on the other side; when that was."""
    source.psql("ALTER SYSTEM SET default_transaction_read_only = on; SELECT pg_reload_conf()")
    wait_for(lambda: source.value("SHOW default_transaction_read_only") == "on", "read-only")
    source.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()")
    wait_for(lambda: source.psql("SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()") == [],
             "nobody is connected")
    if until:
        until(source.value("SELECT pg_current_wal_flush_lsn()"))
        source.psql("BEGIN READ WRITE; SELECT pg_drop_replication_slot('s'); COMMIT")
    else:
        caught_up(source)
    target.psql("; ".join(row[0] for row in source.psql(SEQUENCES)))
    if not until:
        target.psql("DROP SUBSCRIPTION s")
    wanted = int(source.value("SELECT last_value FROM big_id_seq")) + 1
    assert target.value("INSERT INTO big (v) VALUES ('first') RETURNING id") == str(wanted)
    return time.monotonic()


@contextmanager
def applying(source, target):
    """`walrider logical apply` beside; yields what ends it, when it has everything up to a position."""
    options = ("logical", "apply", "--source", source.dsn(), "--target", target.dsn(), "--publication", "p", "--slot", "s")
    run = start(*options)

    def until(lsn):
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
        walrider(*options, "--until", lsn, timeout=60).expect()

    try:
        yield until
    finally:
        run.kill()
        run.communicate()


@pytest.mark.skipif("WALRIDER_TEST_MAJOR" in os.environ, reason="it needs both majors")
@pytest.mark.parametrize("way", ["subscription", "apply"])
def test_upgrade(work, rng, monkeypatch, way):
    """From 17 to 18 under load: the schema, the copy, the switch-over with sequences; how long nobody could write is measured."""
    source = make(work, "old", SOURCE, "17", monkeypatch)
    target = PgCluster.init(work / "new", conf=SETTINGS).start()
    with source, target:
        assert (source.value("SHOW server_version")[:3], target.value("SHOW server_version")[:3]) == ("17.", "18.")
        trust(target)
        source.psql(FILL.format(big=20_000))
        schema = run([program("pg_dump"), "--schema-only", "-d", source.dsn()]).stdout
        target.psql(re.sub(r"^\\(un)?restrict .*$", "", schema, flags=re.M))
        receiver = ("--subscription", "s") if way == "subscription" else ("--apply",)
        with load(source, rng) as transactions:
            wait_for(lambda: transactions() > 20, "some transactions")
            done = walrider("logical", "setup", "--source", source.dsn(), "--target", target.dsn(), "--publication", "p", "--slot", "s",
                            "--all-tables", "--json", *receiver).expect().json
            applied = applying(source, target) if way == "apply" else nullcontext()
            with applied as until:
                after = transactions()
                wait_for(lambda: transactions() > after + 20, "some more")
                caught_up(source)
                # The switch-over: from the last write on the old server to the first on the new.
                began = time.monotonic()
                downtime = switch_over(source, target, until) - began
        print(f"{done['rows']} rows copied in {done['copy_seconds']:.1f} s; {downtime:.2f} s without writes")
        assert downtime < 10
        target.psql("DELETE FROM big WHERE v = 'first'")
        for table in ("account", "big", '"Odd Name"', "child", "parted"):
            ask = f"SELECT count(*), md5(string_agg(x::text, ',' ORDER BY x::text)) FROM {table} x"
            assert source.psql(ask) == target.psql(ask), table
        assert source.psql("SELECT slot_name FROM pg_replication_slots") == []
