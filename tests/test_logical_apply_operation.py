"""`walrider logical apply` in operation: conflicts by time, pause, a role with few rights, full disks, lost connections."""

import os
import re
import time

import pytest

from tests.lab import walrider
from tests.lab.as_user import ROOT
from tests.lab.faults.cutter import AnswerCutter, Cutter
from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.logical import load
from tests.lab.logical.apply import Apply, assert_equal, make_publisher, make_target, publish, running, templates_of
from tests.lab.waiting import wait_for


@pytest.fixture(scope="module")
def templates(scratch):
    """A publisher and a target, stopped, with the tables of the load and without a slot; the target keeps times of commits."""
    times = "track_commit_timestamp = on\n"
    return templates_of(make_publisher(scratch / "operation_publisher", times), make_target(scratch / "operation_target", times))


@pytest.fixture
def pair(templates, work):
    """Both, running, the publisher with a slot; they end with the test."""
    with running(templates, work) as made:
        publish(made[0])
        yield made


def counted(status):
    """The conflicts that were counted, without those that were not."""
    return {kind: count for kind, count in status["conflicts"].items() if count}


# Conflicts

@pytest.mark.every_major
def test_last_update_wins(pair, work):
    """Of two changes of a row, one on each side, the later counts, whichever comes first; what the publisher changes once more needs no
    comparison. Another row's unique value is settled by nobody. Clocks are the machine's, for both."""
    publisher, target = pair
    rows = "INSERT INTO plain SELECT i, NULL, 'first' FROM generate_series(1, 6) i"
    apply = Apply(work, publisher, target, "--on-conflict", "last-update-wins")
    with apply.start():
        publisher.psql(rows)
        apply.wait_caught_up()
        # What only we have written is no conflict, though it was written by several sessions.
        publisher.psql("UPDATE plain SET v = 'second'; UPDATE plain SET v = 'third' WHERE id < 4")
        apply.wait_caught_up()
        assert counted(apply.status()) == {}, apply.status()
        apply.stop()
    # The publisher's are older: the target's stay.
    publisher.psql("UPDATE plain SET v = 'old' WHERE id IN (1, 2); DELETE FROM plain WHERE id = 3; INSERT INTO plain VALUES (10, NULL, 'old')")
    target.psql("UPDATE plain SET v = 'theirs' WHERE id IN (1, 2, 3, 4, 5); INSERT INTO plain VALUES (10, NULL, 'theirs'), (11, NULL, 'theirs')")
    # The publisher's are newer.
    publisher.psql("UPDATE plain SET v = 'new' WHERE id = 4; DELETE FROM plain WHERE id = 5; INSERT INTO plain VALUES (11, NULL, 'new')")
    # Each of these is one after the other's for the same row: the last is a conflict no more.
    publisher.psql("UPDATE plain SET v = 'newest' WHERE id = 1; UPDATE plain SET v = 'newest again' WHERE id = 1")
    with apply.start():
        apply.wait_caught_up()
        assert counted(apply.status()) == dict(update_origin_differs=4, delete_origin_differs=2, insert_exists=2), apply.status()
        target.psql("DELETE FROM plain WHERE id = 6")
        publisher.psql("UPDATE plain SET v = 'gone' WHERE id = 6; DELETE FROM plain WHERE id = 6")
        apply.wait_caught_up()
        apply.stop()
    assert target.psql("SELECT id, v FROM plain ORDER BY id") == [
        ["1", "newest again"], ["2", "theirs"], ["3", "theirs"], ["4", "new"], ["10", "theirs"], ["11", "new"]]
    log = apply.log_text()
    assert 'conflict update_origin_differs: skipped UPDATE of "public.plain", row (id)=(2)' in log, log
    assert 'conflict update_origin_differs: applied all the same UPDATE of "public.plain", row (id)=(4)' in log, log
    assert 'conflict delete_missing: skipped DELETE from "public.plain", row (id)=(6)' in log, log
    target.psql("INSERT INTO plain VALUES (30, 30, 'theirs'), (31, 31, 'theirs')")
    publisher.psql("INSERT INTO plain VALUES (40, 30, 'ours')")
    code, log = apply.run()
    assert code == 1 and "conflict insert_exists" in log and "with which that one's time is not compared" in log, log
    target.configure("track_commit_timestamp = off")
    target.restart()
    code, log = apply.run()
    assert code == 1 and "track_commit_timestamp = off; set it to on there and restart" in log, log


def test_last_update_wins_by_all_kinds_of_keys(pair, work, rng):
    """The load, with nobody else who writes: all tables become equal, row by row; nothing is taken for a conflict."""
    publisher, target = pair
    with Apply(work, publisher, target, "--on-conflict", "last-update-wins").start() as apply:
        pgbench = load.run(publisher, work, rng, transactions=200)
        out = pgbench.communicate(timeout=120)
        assert pgbench.returncode == 0, out
        apply.wait_caught_up()
        assert counted(apply.status()) == {}, apply.status()
        apply.stop()
    assert_equal(publisher, target, load.TABLES)


def test_two_servers_that_replicate_to_each_other(work, rng):
    """With --source-origin none nothing comes back, and with last-update-wins both end with the same rows; walrider_logical's own are the
    publications' too. Rows that are deleted on one side and changed on the other were left out: they may differ."""
    schema = "CREATE TABLE shared (id int PRIMARY KEY, v text); CREATE TABLE said (v text); INSERT INTO shared SELECT i, '' FROM generate_series(1, 20) i"
    times = "track_commit_timestamp = on\nmax_wal_senders = 12\n"
    with make_target(work / "a", times).start() as a, make_target(work / "b", times).start() as b:
        for server, slot in ((a, "to_b"), (b, "to_a")):
            server.psql(schema)
            publish(server, slot=slot, two_phase=False)
        options = "--source-origin", "none", "--on-conflict", "last-update-wins"
        with Apply(work, a, b, *options, name="to_b").start() as to_b, Apply(work, b, a, *options, name="to_a").start() as to_a:
            rounds = 100
            for number in range(rounds):
                for name, server in (("a", a), ("b", b)):
                    server.psql(f"UPDATE shared SET v = '{name}{number}' WHERE id = {rng.randint(1, 20)}; INSERT INTO said VALUES ('{name}{number}')")
            for apply in (to_b, to_a):
                apply.wait_caught_up()
            conflicts = counted(to_b.status()), counted(to_a.status())
            for apply in (to_b, to_a):
                apply.stop()
        assert_equal(a, b, ["shared", "said"])
        assert a.value("SELECT count(*) || ' ' || count(DISTINCT v) FROM said") == f"{2 * rounds} {2 * rounds}"
    print(f"conflicts: {conflicts}")


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_multiple_unique_conflicts(pair, work, policy):
    """Rows in the way by more than one unique key, of a new row and of a changed one, have PostgreSQL 18's name; one key does not."""
    publisher, target = pair
    publisher.psql("INSERT INTO plain VALUES (1, 1, 'a')")
    apply = Apply(work, publisher, target, "--on-conflict", policy)
    with apply.start():
        apply.wait_caught_up()
        apply.stop()
    target.psql("INSERT INTO plain VALUES (2, 2, 'theirs'), (3, 3, 'theirs'), (4, 4, 'theirs')")
    changes = (("INSERT INTO plain VALUES (2, 3, 'ours')", "multiple_unique_conflicts"),
               ("UPDATE plain SET id = 3, k = 4 WHERE id = 1", "multiple_unique_conflicts"),
               ("INSERT INTO plain VALUES (5, 2, 'ours')", "insert_exists"))
    if policy == "error":
        for change, kind in changes:
            publisher.psql(change)
            code, log = apply.run()
            assert code == 1 and f"conflict {kind}:" in log, log
            lsn = re.search(r"--skip (\S+),", log).group(1)
            code, log = apply.run("--skip", lsn, "--until", publisher.value("SELECT pg_current_wal_insert_lsn()"))
            assert code == 0, log
    else:
        with apply.start():
            # One transaction: the rest of it is applied.
            publisher.psql("; ".join(["BEGIN", *(change for change, _ in changes), "INSERT INTO plain VALUES (6, 6, 'ours')", "COMMIT"]))
            apply.wait_caught_up()
            assert counted(apply.status()) == dict(multiple_unique_conflicts=2, insert_exists=1), apply.status()
            assert apply.metrics()['walrider_logical_conflicts_total{kind="multiple_unique_conflicts"}'] == 2
            apply.stop()
    assert target.psql("SELECT id, k, v FROM plain WHERE id < 6 ORDER BY id") == [
        ["1", "1", "a"], ["2", "2", "theirs"], ["3", "3", "theirs"], ["4", "4", "theirs"]]


# Pause

def test_pause(pair, work):
    """Paused, it begins nothing, lets the publisher go, which can be shut down, and says so; it goes on where it was, and ends when it
    is told to, paused or not."""
    publisher, target = pair
    # Tests that run beside this one apply a slot of the same name.
    origin = ("--origin", "walrider_pausing")

    def tell(what):
        return walrider.walrider("logical", what, "-S", "apply", *origin)

    def state(wanted):
        wait_for(lambda: (apply.status() or {}).get("state") == wanted, lambda: f"{wanted}: {apply.status()}")

    with Apply(work, publisher, target, *origin).start() as apply:
        publisher.psql("INSERT INTO plain VALUES (1, 1, 'x')")
        apply.wait_caught_up()
        assert "no walrider logical apply with slot" in walrider.walrider("logical", "pause", "-S", "other").stderr
        assert walrider.walrider("logical", "pause", "-S", "apply", "--origin", "other").code == 1
        for _ in range(2):
            tell("pause").expect()
        state("paused")
        publisher.psql("INSERT INTO plain SELECT i, i, 'x' FROM generate_series(2, 30000) i")
        time.sleep(1)
        assert target.value("SELECT count(*) FROM plain") == "1"
        assert apply.metrics()['walrider_logical_state{state="paused"}'] == 1
        assert publisher.value("SELECT active FROM pg_replication_slots") == "f"
        # A publisher waits for all who are connected, and have not confirmed what it has written.
        publisher.stop("fast")
        publisher.start()
        tell("resume").expect()
        state("streaming")
        apply.wait_caught_up()
        assert target.value("SELECT count(*) FROM plain") == "30000"
        tell("pause").expect()
        state("paused")
        publisher.psql("DELETE FROM plain WHERE id > 1")
        time.sleep(0.3)
        apply.stop()
        assert target.value("SELECT count(*) FROM plain") == "30000"
        apply.start()
        apply.wait_caught_up()
        assert target.value("SELECT count(*) FROM plain") == "1" and apply.status()["state"] == "streaming"
        apply.stop()


# Large transactions that are executed while they come

ROWS = 60000
LARGE = f"INSERT INTO plain SELECT i, i, repeat('x', 300) FROM generate_series(1, {ROWS}) i"


def holders(target):
    """Sessions that have changed the table and not committed."""
    return {pid for pid, in target.psql("SELECT pid FROM pg_locks WHERE relation = 'plain'::regclass AND mode = 'RowExclusiveLock'")}


@pytest.mark.every_major
def test_large_transaction_that_is_still_coming(pair, work):
    """The publisher has committed it, and is kept from sending the rest: the target has executed what came, and shows nothing of it.
    Told to stop, it ends; paused, it finishes what has begun; its publisher lost, it begins once more."""
    publisher, target = pair
    publisher.restart(listen_addresses="127.0.0.1")
    with Proxy(publisher.port) as proxy:
        source = f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres"
        options = ("--origin", "walrider_parts")
        with Apply(work, publisher, target, *options, "--streaming", "off", source=source).start() as apply:
            publisher.psql("INSERT INTO plain VALUES (0, 0, 'x')")
            apply.wait_caught_up()
            proxy.throttle(down=2_000_000)
            publisher.psql(LARGE)
            wait_for(lambda: holders(target), lambda: f"{apply.status()}\n{apply.log_tail(20)}")
            assert target.value("SELECT count(*) FROM plain") == "1"
            # It waits ten seconds at most until the publisher has ended the stream.
            apply.stop(timeout=20)
            assert "ERROR" not in apply.log_text(), apply.log_tail(20)
            wait_for(lambda: not holders(target), lambda: "locks that a stopped one has left")
            assert target.value("SELECT count(*) FROM plain") == "1"
            apply.start()
            wait_for(lambda: holders(target), lambda: f"{apply.status()}\n{apply.log_tail(20)}")
            before = holders(target)
            assert before and proxy.cut() > 0
            wait_for(lambda: holders(target) - before, lambda: f"{apply.status()}\n{apply.log_tail(20)}")
            assert "connecting again" in apply.log_text(), apply.log_text()
            walrider.walrider("logical", "pause", "-S", "apply", *options).expect()
            publisher.psql("INSERT INTO plain VALUES (-1, -1, 'x')")
            time.sleep(0.5)
            proxy.throttle()
            wait_for(lambda: target.value("SELECT count(*) FROM plain") == str(ROWS + 1), lambda: f"{apply.status()}\n{apply.log_tail(20)}")
            assert not holders(target)
            walrider.walrider("logical", "resume", "-S", "apply", *options).expect()
            apply.wait_caught_up()
            assert_equal(publisher, target, ["plain"])
            apply.stop()


def test_large_transaction_that_conflicts(pair, work):
    """A row of the last part is there already: all is read again, and it ends as a small one would, or leaves that row out.  One that
    another part needs to have committed first, and one that two parts change, are applied."""
    publisher, target = pair
    target.psql(f"INSERT INTO plain VALUES ({ROWS}, NULL, 'theirs')")
    publisher.psql(LARGE)
    apply = Apply(work, publisher, target, "--streaming", "off")
    code, log = apply.run()
    assert code == 1 and "is applied at once when all of it has come" in log, log
    assert "conflict insert_exists" in log and f"(id)=({ROWS})" in log, log
    assert target.value("SELECT count(*) FROM plain") == "1"
    with apply.start("--on-conflict", "skip"):
        apply.wait_caught_up()
        assert counted(apply.status()) == dict(insert_exists=1), apply.status()
        apply.stop()
    assert target.value("SELECT count(*) FROM plain WHERE v <> 'theirs'") == str(ROWS - 1)
    target.psql(f"DELETE FROM plain WHERE id = {ROWS}")
    publisher.psql(f"DELETE FROM plain WHERE id = {ROWS}")
    with apply.start("--log-level", "debug"):
        apply.wait_caught_up()
        publisher.psql("BEGIN; UPDATE plain SET v = 'once'; UPDATE plain SET v = v || ' more', k = NULL; DELETE FROM plain WHERE id % 3 = 0; "
                       "TRUNCATE emptied; INSERT INTO plain SELECT i, i, 'again' FROM generate_series(3, 50000, 3) i; COMMIT")
        publisher.psql("UPDATE plain SET v = 'last' WHERE id < 10")
        apply.wait_caught_up()
        apply.stop()
    assert_equal(publisher, target, ["plain"])
    # One for each of the first two runs: the last transaction needed none.
    assert apply.log_text().count("is applied at once") == 2, apply.log_text()
    assert apply.log_text().count("is executed while it comes") == 1, apply.log_text()


# Rights

@pytest.mark.every_major
@pytest.mark.parametrize("policy", ["error", "last-update-wins"])
def test_role_with_few_rights(pair, work, policy):
    """The grants that docs/logical-apply.md names are enough, with the rights to change the tables; and CREATE is needed only once."""
    publisher, target = pair
    text = (ROOT / "docs" / "logical-apply.md").read_text()
    grants = re.search(r"(?m)^      GRANT SET ON(?:.|\n)*?\n\n", text).group(0).replace("DATABASE shop", "DATABASE postgres")
    target.psql("CREATE ROLE walrider LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA public TO walrider")
    target.psql(grants)
    sink = target.dsn().replace("user=postgres", "user=walrider")
    assert sink != target.dsn()
    with Apply(work, publisher, target, "--on-conflict", policy, sink=sink).start() as apply:
        publisher.psql("INSERT INTO plain SELECT i, i, 'x' FROM generate_series(1, 100) i; UPDATE plain SET v = 'y' WHERE id < 50;"
                       "DELETE FROM plain WHERE id = 3; INSERT INTO only_inserts VALUES (1, 'x')")
        publisher.psql("TRUNCATE only_inserts")
        publisher.psql("BEGIN; INSERT INTO plain VALUES (200, 200, 'two'); PREPARE TRANSACTION 'a'")
        publisher.psql("COMMIT PREPARED 'a'")
        apply.wait_caught_up()
        target.psql("REVOKE CREATE ON DATABASE postgres FROM walrider")
        apply.stop()
        apply.start()
        publisher.psql("INSERT INTO plain VALUES (300, 300, 'more')")
        apply.wait_caught_up()
        apply.stop()
    assert_equal(publisher, target, load.TABLES)
    assert target.value("SELECT usesuper FROM pg_user WHERE usename = 'walrider'") == "f"


# Disks

def test_target_full(pair, work):
    """No space for new blocks on the target: it ends with what to do, applies nothing by halves, and goes on when there is space."""
    publisher, target = pair
    disk = Disk(work / "shim", str(target.data_dir / "base"))
    target.stop()
    target.own_environment = disk.environment()
    target.start()
    apply = Apply(work, publisher, target)
    publisher.psql("INSERT INTO plain VALUES (1, 1, 'before')")
    code, log = apply.run("--until", publisher.value("SELECT pg_current_wal_insert_lsn()"))
    assert code == 0, log
    disk.fill("new")
    publisher.psql("INSERT INTO plain SELECT i, i, repeat('x', 500) FROM generate_series(2, 5000) i")
    publisher.psql("UPDATE plain SET v = 'after' WHERE id = 1")
    code, log = apply.run()
    assert code == 1 and "No space left on device" in log and "make room on the target, and start again" in log, log
    assert target.psql("SELECT id, v FROM plain") == [["1", "before"]]
    disk.clear()
    with apply.start():
        apply.wait_caught_up()
        apply.stop()
    assert_equal(publisher, target, ["plain"])


def test_spill_directory_full(pair, work):
    """No file may become as large as a transaction: it ends with what to do, and goes on where files may be larger."""
    publisher, target = pair
    publisher.psql("INSERT INTO plain VALUES (1, 1, 'before')")
    publisher.psql("INSERT INTO plain SELECT i, i, repeat('x', 500) FROM generate_series(2, 5000) i")
    publisher.psql("INSERT INTO plain VALUES (6000, 6000, 'after')")
    command = Apply(work, publisher, target, "--memory", "64kB", "--spill-dir", work).command[1:]
    end = publisher.value("SELECT pg_current_wal_insert_lsn()")
    command = [*command, "--until", end]
    refused = walrider.walrider(*command, file_size_limit=1 << 20, timeout=120).expect(1)
    assert "could not write changes to a temporary file: File too large" in refused.stderr, refused.stderr
    assert "make room, or name another directory with --spill-dir" in refused.stderr
    assert target.value("SELECT count(*) FROM plain") in ("0", "1")
    walrider.walrider(*command, timeout=120).expect()
    assert_equal(publisher, target, ["plain"])
    assert not list(work.glob(".walrider-spill*"))


# Connections

STEPS = dict(source=29, target=17)
BOUNDARIES = """
BEGIN; INSERT INTO plain SELECT i, i, 'round {n}' FROM generate_series({n} * 100, {n} * 100 + 9) i; UPDATE plain SET v = 'x' WHERE id = {n} * 100; COMMIT;
UPDATE plain SET k = NULL WHERE id = {n} * 100 + 1;
BEGIN; INSERT INTO only_inserts SELECT i, repeat('large', 100) FROM generate_series(1, 200) i; SAVEPOINT a; DELETE FROM plain WHERE id = {n} * 100 + 2;
ROLLBACK TO a; DELETE FROM plain WHERE id = {n} * 100 + 3; COMMIT;
BEGIN; INSERT INTO plain VALUES ({n} * 100 + 50, NULL, 'prepared'); PREPARE TRANSACTION 'kept {n}';
COMMIT PREPARED 'kept {n}';
BEGIN; INSERT INTO plain VALUES ({n} * 100 + 51, NULL, 'gone'); PREPARE TRANSACTION 'gone {n}';
ROLLBACK PREPARED 'gone {n}';
TRUNCATE emptied;
INSERT INTO emptied (v) VALUES ({n});
"""


@pytest.mark.parametrize("streaming", ["on", "off"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_boundaries(pair, work, side, streaming):
    """The connection is lost right behind messages of the publisher, or right behind answers of the target, COMMIT's among them, a
    few here, and behind each with WALRIDER_BOUNDARY_STEP=1. It goes on by itself, and both sides have the same rows.  Without streaming, the
    large transaction is executed in two parts."""
    publisher, target = pair
    cutter = Cutter(publisher) if side == "source" else AnswerCutter(target)
    conninfo = f"host=127.0.0.1 port={cutter.port} user=postgres dbname=postgres sslmode=disable"
    options = {"source" if side == "source" else "sink": conninfo}
    cuts, step = 0, int(os.environ.get("WALRIDER_BOUNDARY_STEP") or STEPS[side])
    memory = ["--memory", "16kB"] if streaming == "on" else ["--streaming", "off", "--log-level", "debug"]
    with Apply(work, publisher, target, "--batch", "10", "--jobs", "3", "--spill-dir", work, *memory, **options).start() as apply:
        apply.wait_caught_up()
        for number in range(10_000):
            cutter.arm(1 + number * step)
            publisher.psql(BOUNDARIES.format(n=number + 1))
            apply.wait_caught_up()
            has_cut = cutter.disarm()
            cuts += has_cut
            assert_equal(publisher, target, ("plain", "only_inserts", "emptied"))
            assert target.value("SELECT count(*) FROM pg_prepared_xacts") == "0"
            if not has_cut:
                break
        assert counted(apply.status()) == {}, apply.status()
        apply.stop()
    cutter.close()
    print(f"{side}: {cuts} cuts")
    assert ("is executed while it comes" in apply.log_text()) == (streaming == "off")
    # All of it was walked through, to a cut that never came.
    assert cuts >= 3 and not has_cut


# What the keys do not see

def test_row_not_found_ahead(work):
    """A row that is known by all its columns is changed again and again, and a large value of it stays as it is, which is not sent in new
    versions: what is executed ahead does not find the row yet, and is executed again."""
    table = "CREATE TABLE kept (id int, v int, large text); ALTER TABLE kept ALTER large SET STORAGE EXTERNAL; ALTER TABLE kept REPLICA IDENTITY FULL"
    with make_publisher(work / "publisher").start() as publisher, make_target(work / "target").start() as target:
        for server in (publisher, target):
            server.psql(table)
        publish(publisher, "kept")
        publisher.psql("INSERT INTO kept SELECT i, 0, repeat(md5(i::text), 200) FROM generate_series(1, 3) i")
        publisher.psql("".join(f"UPDATE kept SET v = {n} WHERE id = {1 + n % 3};\n" for n in range(1, 301)))
        with Apply(work, publisher, target, "--batch", "1", "--jobs", "6", "--log-level", "debug").start() as apply:
            apply.wait_caught_up()
            status = apply.status()
            apply.stop()
        assert_equal(publisher, target, ["kept"])
    assert status["retries"] > 10 and counted(status) == {}, status
    assert "executed ahead: a row was not found" in apply.log_text()
