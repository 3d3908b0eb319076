"""Each rule of docs/readable.md is broken on purpose, in a library built for it, and a test must see that: `make planted-readable`.

Where a test is made for the rule, the library as it is passes it before.  Not tried: rule 11, which nobody could see broken.
"""

import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from tests.lab import extension, install
from tests.lab.seed import seed
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, ServerError, format_lsn, parse_lsn
from tests.lab.standby import readable, watched
from tests.lab.standby.standby import wait_position
from tests.lab.waiting import NotYet, wait_for
from tests.lab.walrider import walrider

READ = {6: "a prune waits for snapshots", 8: "an index entry comes after its heap tuple",
        9: "a map's bit is cleared before the entry comes", 10: "a multixact is not met before it is there"}
REPLAYED = {3: "files come and go between slices", 5: "what follows a record in place waits for it", 12: "a record half done is not done again",
            14: "what the slice before has left to do is done first", 15: "nothing of a slice is walked before all of it is done",
            18: "decoded records are where workers see them"}
SEEN = (AssertionError, ServerError, psycopg.Error)
WHOLE = {"shared_preload_libraries": "walrider", "walrider.redo_workers": 2}
SOME_ROWS = "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 300) i"


def broken(rule, work):
    """The library without this rule."""
    library = work / "broken.so"
    extension.build(install.major(), cflags=f"-DWALRIDER_BREAK={rule}", into=library)
    return {**WHOLE, "shared_preload_libraries": library}


@contextmanager
def noticed(rule, what, *kinds):
    """What is inside fails. That something took too long says nothing: a rule that is broken on purpose may cost time."""
    with pytest.raises(kinds or SEEN) as seen:
        yield
    assert not isinstance(seen.value, NotYet), seen.value
    print(f"rule {rule}, {what}: {str(seen.value)[:300]}")


@pytest.mark.parametrize("rule", READ)
def test_readers_notice(rule, primary_template, work):
    """Within a minute, or in one of three tries."""
    def tries():
        for number in range(3):
            readable.watched(primary_template, work / str(number), 60, f"{seed()}/{rule}/{number}", hot_standby_feedback="off",
                             max_standby_streaming_delay="3s", **{"walrider.redo_slice": 4000}, **broken(rule, work))
    for number in range(3):
        (work / str(number)).mkdir()
    with noticed(rule, READ[rule]):
        tries()


@pytest.mark.parametrize("rule", REPLAYED)
def test_pages_differ(rule, plain, work):
    """Or the server ends."""
    with noticed(rule, REPLAYED[rule]):
        readable.same_pages(plain, work, **broken(rule, work))


@pytest.mark.parametrize("rule, what", [(4, "minRecoveryPoint goes before"), (41, "pages wait for it to be on disk")])
def test_pages_are_past_the_minimum(rule, what, plain, work, rng):
    """Rule 4, and its second half."""
    with noticed(rule, what, AssertionError):
        readable.killed(plain, work, 30, rng, **broken(rule, work))


@contextmanager
def pair(template, work, **settings):
    """A primary, and a standby that redoes early, whom nobody's question stops."""
    with watched.primary_of(template, work, readable.PRIMARY) as primary:
        with watched.hot(primary, work, **readable.EARLY | {"max_standby_streaming_delay": "-1"} | settings) as follower:
            yield primary, follower.server


@contextmanager
def backlog(primary, server):
    """What is written meanwhile is all there before any of it is replayed."""
    server.psql("SELECT pg_wal_replay_pause()")
    wait_for(lambda: server.value("SELECT pg_get_wal_replay_pause_state()") == "paused", server.log_tail)
    yield
    wait_position(primary, stage="flush")
    server.psql("SELECT pg_wal_replay_resume()")


def stops_at_its_target(plain, _template, work, **settings):
    """Rule 1. A recovery up to a record in the midst of others ends with the pages of that moment."""
    target = format_lsn(parse_lsn(plain.target("concurrent")["lsn"]) - 100_000)
    servers = []
    for name, own in (("stock", {}), ("early", {**readable.EARLY, **settings})):
        server = recovery.prepare(plain.backup, plain.archive, work / name, plain.directory, target=("lsn", target), action="promote")
        with server:
            recovery.recover_and_promote(server, **own)
            server.stop()
        recovery.pin_tablespaces(server.data_dir)
        servers.append(server)
    found = walrider("compare", "--json", "--first", 100000, servers[1].data_dir, servers[0].data_dir).json
    # The times at which they were promoted.
    assert not (wrong := [it for it in found["first"] if it["class"] != "control"]), wrong[:5]


def gives_no_xid_again(_plain, template, work, **settings):
    """Rule 2. After a promotion, no xid comes that is on a page already: of a transaction that never ended, and whose records nobody walked."""
    with pair(template, work, **settings) as (primary, server), primary.session() as first, primary.session() as second:
        with backlog(primary, server):
            first.run("BEGIN; " + SOME_ROWS)
            second.run("BEGIN; " + SOME_ROWS)
            last, = second.run("SELECT pg_current_xact_id()")
            first.run(SOME_ROWS + "; COMMIT")
        wait_position(primary)
        primary.kill()
        server.psql("SELECT pg_promote()")
        assert int(server.value("SELECT pg_current_xact_id()")) > int(last)


def leaves_pinned_pages_alone(_plain, template, work, **settings):
    """Rule 7. A text that a query has in hand stays where it is while the query has its page pinned."""
    with pair(template, work, **settings) as (primary, server):
        primary.psql("CREATE TABLE pinned (id int, v text); INSERT INTO pinned SELECT i, repeat(md5(i::text), 5) FROM generate_series(1, 30) i;"
                     "DELETE FROM pinned WHERE id <= 10")
        wait_position(primary)
        with server.session() as reader:
            with backlog(primary, server):
                primary.psql(SOME_ROWS + "; VACUUM pinned; " + SOME_ROWS)
                reader.send("SELECT count(*) FROM pinned WHERE CASE WHEN pg_sleep(0.1) IS NOT NULL THEN v <> repeat(md5(id::text), 5) END")
                wait_for(lambda: server.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == "1", server.log_tail)
            assert reader.wait() == ["0"]


def finds_damage(_plain, _template, work, **settings):
    """Rule 13. A page that is not what a record's image says ends recovery."""
    primary = PgCluster.init(work / "primary", work / "archive", checksums=False, conf="wal_level = replica\nfull_page_writes = off\nautovacuum = off\n")
    with primary.start():
        primary.psql("CREATE TABLE t (id int, v text); CREATE TABLE checked (id int, v text);"
                     "INSERT INTO checked SELECT i, 'checked ' || i FROM generate_series(1, 40) i")
        primary.basebackup(work / "backup")
        primary.psql(SOME_ROWS + "; SET wal_consistency_checking = 'heap'; UPDATE checked SET v = 'changed' WHERE id <= 20;"
                     "RESET wal_consistency_checking;" + SOME_ROWS)
        file, end = primary.value("SELECT pg_relation_filepath('checked')"), primary.lsn()
        primary.stop()
        primary.complete_archive()
    server = recovery.prepare(work / "backup", work / "archive", work / "early", signal="standby.signal")
    page = (server.data_dir / file).read_bytes()
    assert page.count(b"checked 30") == 1
    (server.data_dir / file).write_bytes(page.replace(b"checked 30", b"damaged 30"))

    def is_over():
        if server.process.poll() is None:
            found = server.psql("SELECT pg_last_wal_replay_lsn()", check=False)
            return found and parse_lsn(found[0][0]) >= parse_lsn(end)
        return True
    with server:
        server.launch(**{**readable.CATCH_UP, **readable.EARLY, **settings})
        wait_for(is_over, server.log_tail)
        if server.process.poll() is not None:
            server.wait_end()
        assert server.log_matches("inconsistent page found"), "nobody has found the damage"


def outlives_its_workers(plain, _template, work, **settings):
    """Rule 16. Workers that are terminated leave no work half done that the startup process waits for."""
    server = readable.prepare(plain, work / "early")
    with server.start(**{**readable.CATCH_UP, **readable.EARLY, **settings, "walrider.redo_slice": "64", "walrider.redo_workers": "6"}):
        before, since = None, time.monotonic()
        while not readable.has_caught_up(plain, server):
            server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'walrider redo worker'")
            if (now := server.value("SELECT pg_last_wal_replay_lsn()")) != before:
                before, since = now, time.monotonic()
            waits = server.value("SELECT coalesce(max(wait_event), '') FROM pg_stat_activity WHERE backend_type = 'startup'")
            assert waits != "WalriderRedo" or time.monotonic() < since + 15, f"waits for nobody at {now}"


def holds_no_removed_file(_plain, template, work, **settings):
    """Rule 17. Workers close what was removed."""
    scattered = "UPDATE {} SET v = v + 1 WHERE id % 7 = 0"

    def removed():
        files = []
        for pid in readable.processes(server, "walrider redo worker"):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    files.append(os.readlink(link))
        return [file for file in files if file.endswith("(deleted)") and "/base/" in file]

    # Few buffers, so that workers read and write pages themselves.
    with pair(template, work, shared_buffers="1MB", **settings) as (primary, server):
        for name in ("gone", "stays"):
            primary.psql(f"CREATE TABLE {name} (id int, v int, filler text) WITH (fillfactor = 50);"
                         f"INSERT INTO {name} SELECT i, 0, repeat('x', 400) FROM generate_series(1, 20000) i")
        for name in ("gone", "stays"):
            with backlog(primary, server):
                primary.psql(scattered.format(name))
            wait_position(primary)
            if name == "gone":
                assert any("/base/" in os.readlink(link) for pid in readable.processes(server, "walrider redo worker")
                           for link in Path(f"/proc/{pid}/fd").iterdir()), "no worker has opened a file"
                primary.psql("DROP TABLE gone; CHECKPOINT")
                wait_position(primary)
        assert not (found := removed()), found


def waits_for_the_reader(server):
    """Replay does, because of a snapshot."""
    wait_for(lambda: server.value("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'startup' AND wait_event = 'RecoveryConflictSnapshot'") == "1",
             server.log_tail)


def takes_no_row_for_another(_plain, template, work, **settings):
    """Rule 8. While a prune waits for a reader, the entry of the row that comes in that place is not there for him: GIN does not look at
    the row again."""
    with pair(template, work, **settings) as (primary, server):
        # On several leaves: the entries that vacuum removes are not where the new ones come.
        primary.psql("CREATE TABLE keyed (keys int[]); CREATE INDEX ON keyed USING gin (keys) WITH (fastupdate = off);"
                     "INSERT INTO keyed SELECT ARRAY[g] FROM generate_series(100, 3000) g; INSERT INTO keyed SELECT ARRAY[1] FROM generate_series(1, 10)")
        wait_position(primary)
        with server.session() as reader:
            reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SET LOCAL enable_seqscan = off; SELECT count(*) FROM keyed")
            primary.psql("DELETE FROM keyed WHERE keys = ARRAY[1];" + SOME_ROWS)
            with backlog(primary, server):
                primary.psql(SOME_ROWS + "; VACUUM (INDEX_CLEANUP on, TRUNCATE off) keyed; INSERT INTO keyed SELECT ARRAY[2999] FROM generate_series(1, 10);" + SOME_ROWS)
                assert primary.value("SELECT count(DISTINCT (ctid::text::point)[0]) FROM keyed WHERE keys = ARRAY[2999]") == "1"
            waits_for_the_reader(server)
            for key, rows in ((2999, "1"), (1, "10")):
                assert reader.run(f"SELECT count(*) FROM keyed WHERE keys @> ARRAY[{key}]") == [rows], key
        wait_position(primary)


def has_trees_before_entries(_plain, template, work, **settings):
    """Rule 19. While replay waits for a reader, another one finds by GIN what there is, although an entry is to become a posting tree."""
    by_key = "SET enable_seqscan = off; SELECT count(*) FROM keyed WHERE keys @> ARRAY[1]"
    with pair(template, work, **settings) as (primary, server):
        # Nearly as many items as an entry holds.
        primary.psql("CREATE TABLE keyed (keys int[]); CREATE INDEX ON keyed USING gin (keys) WITH (fastupdate = off);"
                     "INSERT INTO keyed SELECT ARRAY[1] FROM generate_series(1, 2600);"
                     "CREATE TABLE killed (id int); CREATE INDEX ON killed ((repeat('k', 100) || id::text));"
                     "INSERT INTO killed SELECT generate_series(1, 55)")
        # Hints on catalogs would be logged: any heap page that waits in the slice has this entry wait, too.
        primary.psql("VACUUM")
        wait_position(primary)
        with server.session() as reader:
            reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM killed")
            primary.psql("DELETE FROM killed WHERE id < 50")
            primary.psql("SET enable_seqscan = off; SET enable_bitmapscan = off; SELECT count(*) FROM killed WHERE repeat('k', 100) || id::text > 'k'")
            primary.psql(SOME_ROWS)
            with backlog(primary, server):
                # The leaf is full: dead entries go, which the reader may need.
                primary.psql(SOME_ROWS + "; INSERT INTO killed SELECT generate_series(101, 120);"
                             "INSERT INTO keyed SELECT ARRAY[1] FROM generate_series(1, 200)")
            waits_for_the_reader(server)
            assert server.value(by_key) == "2600"
        wait_position(primary)
        assert server.value(by_key) == "2800"


SCENARIOS = {1: stops_at_its_target, 2: gives_no_xid_again, 7: leaves_pinned_pages_alone, 8: takes_no_row_for_another, 13: finds_damage, 16: outlives_its_workers,
             17: holds_no_removed_file, 19: has_trees_before_entries}


@pytest.mark.parametrize("rule", SCENARIOS)
def test_made_for_it(rule, plain, primary_template, work):
    """With the rule it holds, without it does not."""
    for name in ("with", "without"):
        (work / name).mkdir()
    SCENARIOS[rule](plain, primary_template, work / "with", **WHOLE)
    with noticed(rule, SCENARIOS[rule].__name__):
        SCENARIOS[rule](plain, primary_template, work / "without", **broken(rule, work))
