"""Early redo in PostgreSQL's own hot standby: the same pages as without it, nothing that a reader could tell, and crashes.

Not tried: 17, where it is never active; a server with assertions, unless PG_CONFIG names one; hours, unless WALRIDER_READABLE_SECONDS and
WALRIDER_READABLE_ROUNDS say so (`make soak-readable`).  `make planted-readable` breaks the rules one by one.
"""

import os
from types import SimpleNamespace

import pytest

from tests.lab import extension, install
from tests.lab.loads import stress
from tests.lab.oracle.compare import compare
from tests.lab.seed import seed
from tests.lab.server.cluster import PgCluster, controldata, parse_lsn
from tests.lab.standby import readable, standby, watched
from tests.lab.standby.readable import CATCH_UP, EARLY
from tests.lab.waiting import wait_for

pytestmark = pytest.mark.from_major(18, "early redo knows 18.6 alone")

SECONDS = float(os.environ.get("WALRIDER_READABLE_SECONDS", "8"))
READ_SECONDS = float(os.environ.get("WALRIDER_READABLE_SECONDS", "60"))
ROUNDS = int(os.environ.get("WALRIDER_READABLE_ROUNDS", "20"))


def test_the_same_pages(variant, work, rng):
    """Of every load, in slices of any size, with and without workers."""
    workers = rng.choice([0, 1, 3])
    server = readable.same_pages(variant, work, **{"walrider.redo_slice": rng.choice([64, 300, 4000, 8192]), "walrider.redo_workers": workers})
    found = readable.summary(server)
    assert server.log_matches("walrider redoes pages early") and found["early"] > 10000 and (found["by workers"] > 1000) == (workers > 0), found


def test_the_same_pages_where_changes_are_left(plain, work):
    """An eighth of all changes is left to the walk, so that records are finished that were half done."""
    library = work / "leaves.so"
    extension.build(install.major(), cflags="-DWALRIDER_BREAK=100", into=library)
    server = readable.same_pages(plain, work, shared_preload_libraries=library)
    assert readable.summary(server)["partial"] > 10


def test_the_same_pages_of_the_stress(work, rng):
    """Crashes, long records, DDL and every access method, with settings of the primary by the seed.
    Not tried: a standby that is read meanwhile (`test_readers`), and more than one seed."""
    def proof(directory, info, rng, note):
        fixture = SimpleNamespace(directory=directory, backup=directory / "backup", archive=directory / "archive", info=info)
        workers = rng.choice([0, 1, 3])
        server = readable.same_pages(fixture, work, **{"walrider.redo_slice": rng.choice([64, 4000, 8192]), "walrider.redo_workers": workers})
        assert readable.summary(server)["early"] > 1000
        return {}
    stress.run_round(work, rng.randrange(10**6), SECONDS, proof=proof)


@pytest.mark.parametrize("workers", [0, 1])
def test_large_segments(work, workers):
    """A base backup ends with a switch, and early redo begins behind it: 64 MB further, where more WAL is decoded ahead than at first.
    The buffer of the record that was replayed, the switch, was freed too early, and the startup process ended by signal 11:
    the main loop looks at its record once more.  A buffer as large as here goes back to the system at once."""
    with PgCluster.init(work / "primary", work / "archive", wal_segsize_mb=64).start() as primary:
        primary.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        primary.basebackup(work / "backup")
        primary.psql("INSERT INTO t SELECT i, 'a' FROM generate_series(1, 20000) i; UPDATE t SET v = 'b' WHERE id % 2 = 0")
        primary.stop()
        primary.complete_archive()
        info = {"final_checkpoint": primary.controldata()["Latest checkpoint location"]}
    fixture = SimpleNamespace(directory=work, backup=work / "backup", archive=work / "archive", info=info)
    server = readable.same_pages(fixture, work, wal_decode_buffer_size="64MB", **{"walrider.redo_workers": workers})
    assert readable.summary(server)["early"] > 20000


def test_much_wal_that_has_to_wait(plain, work):
    """Early redo begins however much WAL has to be waiting for that: so much is decoded, and there is room for it.
    It was no more than 4 MB, so that a tenth of the slices began.  Not tried: with workers, and a setting that grows meanwhile."""
    server = readable.same_pages(plain, work, **{"walrider.redo_least_wal": "12MB", "walrider.redo_workers": 0})
    # There are sixteen in a segment: none is of more than 1 MB.
    assert readable.summary(server)["slices"] > 8 * len(list(plain.archive.glob("[0-9A-F]" * 24)))


@pytest.mark.parametrize("feedback, workers", [("on", 1), ("off", 3)])
def test_readers(primary_template, work, feedback, workers, rng):
    """In every snapshot all money is there, whichever way it is counted, while replay works off one backlog after the other."""
    found = readable.watched(primary_template, work, READ_SECONDS, f"{seed()}/{feedback}", hot_standby_feedback=feedback,
                             max_standby_streaming_delay="3s" if feedback == "on" else "1s",
                             **{"walrider.redo_slice": rng.choice([64, 300, 4000, 8192]), "walrider.redo_workers": workers})
    # How much that is in so many seconds, the machine says.
    assert found["early"] > 1000 and found["looks"] > 10 and found["worker_visits"] > 10, found


def test_killed(plain, work, rng):
    """Again and again while it catches up."""
    readable.killed(plain, work, ROUNDS, rng)


def test_workers_come_and_go(plain, work):
    """Somebody terminates them and the raiser, as often as they come: replay goes on, and the pages are PostgreSQL's."""
    stock = readable.catch_up(plain, readable.prepare(plain, work / "stock"))
    server = readable.prepare(plain, work / "early")
    server.start(**{**CATCH_UP, **EARLY, "walrider.redo_workers": 3, "walrider.redo_slice": 64})
    ended = 0
    while not readable.has_caught_up(plain, server) or not ended:
        ended += int(server.value("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type LIKE 'walrider r%'"))
    server.psql("CHECKPOINT")
    server.stop()
    compare(server.data_dir, stock.data_dir)
    assert server.log_matches("exited with exit code 1") and readable.summary(server)["early"] > 10000


def test_backup_and_cascade(primary_template, work):
    """Of and from a standby that redoes pages early: nothing is missing there."""
    found = readable.cascaded(primary_template, work, SECONDS / 2, seed())
    assert found["early"] > 100, found


def test_new_timeline(primary_template, work, rng):
    """Promoted in the midst of early redo: all that was received is there, and a standby that follows has it all."""
    found = readable.promoted(primary_template, work, rng.uniform(0.5, SECONDS / 2), seed())
    assert found["early"] > 100, found


def test_new_timeline_within_a_record(primary_template, work):
    """The WAL ends within a record, at a segment's end, when a standby is promoted: one that follows may end as PostgreSQL's does
    (docs/readable.md), and has all once it is started again.

    Not tried: a record that goes over several segments, one that ends within a page of another segment, and a standby that follows by an archive."""
    words = readable.promoted_within_a_record(primary_template, work, seed(), **EARLY)
    assert all("could not open file" in panic for panic in words), words


def test_a_timeline_that_ends_with_a_segment(primary_template, work):
    """A standby that catches up decodes the first record of a new timeline ahead, which is behind the header of a segment. Found by a review:
    what the old timeline ends with was taken for as far as that record, and after a crash the server did not start any more."""
    with watched.primary_of(primary_template, work, readable.PRIMARY) as primary, \
            watched.hot(primary, work, name="first", **readable.WAITS) as first:
        late = standby.clone(primary, work / "late", first.server.port, "late")
        primary.psql("CREATE TABLE more AS SELECT g, repeat(md5(g::text), 10) AS v FROM generate_series(1, 40000) g")
        primary.psql("SELECT pg_switch_wal()")
        end = primary.value("SELECT pg_current_wal_lsn()")
        wait_for(lambda: first.server.value(f"SELECT pg_last_wal_replay_lsn() >= '{end}'") == "t", first.log_tail)
        primary.kill()
        first.server.psql("SELECT pg_promote()")
        wal = first.data_dir / "pg_wal"
        follower = watched.Stock(late, hot_standby="on", restore_command=f"cp {wal}/%f %p", **{**EARLY, **readable.WAITS})
        for _ in range(2):
            with follower.start():
                server = follower.server
                wait_for(lambda: server.psql(f"SELECT pg_last_wal_replay_lsn() > '{end}'", check=False) == [["t"]], server.log_tail)
                assert server.log_matches("walrider redoes pages early")
                follower.kill()
            # Else what comes behind the switch was not decoded ahead, and nothing is tried.
            control = controldata(late)
            assert control["Min recovery ending loc's timeline"] == "1", control
            assert parse_lsn(control["Minimum recovery ending location"]) == parse_lsn(end) & -(1 << 20), control


def test_remote_apply(primary_template, work):
    """A commit that was answered is seen, beside a load of which most is redone early."""
    with watched.primary_of(primary_template, work, readable.PRIMARY) as primary, watched.hot(primary, work, **EARLY, **{"walrider.redo_workers": 1}) as follower:
        primary.psql("CREATE TABLE answered (id int PRIMARY KEY); CREATE EXTENSION walrider")
        primary.configure(f"synchronous_standby_names = '{standby.NAME}'", "postgresql.auto.conf")
        primary.psql("SELECT pg_reload_conf()")
        with watched.load(primary, "UPDATE t SET v = v || 'x' WHERE id % 2 = 0; " + watched.BATCH, pause=0), \
                primary.session(options="-c synchronous_commit=remote_apply") as writer, follower.server.session() as reader:
            for number in range(300):
                writer.run(f"INSERT INTO answered VALUES ({number})")
                assert reader.run(f"SELECT id FROM answered WHERE id = {number}") == [str(number)]
        found = readable.counters(follower.server)
    assert found["early"] > 1000 and found["worker_visits"] > 100, found


@pytest.mark.parametrize("setting, reason", [("recovery_prefetch=on", "recovery_prefetch is not off"),
                                             ("recovery_min_apply_delay=1ms", "recovery_min_apply_delay is set"),
                                             ("hot_standby=off", "hot_standby is off")])
def test_where_it_is_not_safe(plain, work, setting, reason):
    """PostgreSQL replays alone, and the log says why."""
    server = readable.prepare(plain, work / "early")
    name, value = setting.split("=")
    server.launch(**{**CATCH_UP, **EARLY, name: value})
    wait_for(lambda: server.log_matches(f"walrider redoes no pages early: {reason}"), server.log_tail)
    server.kill()
    assert not server.log_matches("walrider redoes pages early")


def test_promotion(plain, work):
    """It becomes a primary that takes writes, whatever was decoded; and the setting changes nothing there."""
    server = readable.prepare(plain, work / "early")
    server.start(**{**CATCH_UP, **EARLY})
    # Without waiting there: replay would wait for that question's snapshot, and the question for replay.
    server.psql("SELECT pg_promote(wait => false)")
    wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", server.log_tail)
    # The startup process says it as it ends, a moment after recovery has.
    wait_for(lambda: server.log_matches("walrider redid"), server.log_tail)
    assert readable.summary(server)["records"] > 0
    server.psql("CREATE TABLE after AS SELECT g FROM generate_series(1, 1000) g; CREATE EXTENSION walrider")
    assert server.value("SELECT active FROM walrider.stat_redo") == "f" and server.value("SELECT count(*) FROM after") == "1000"
    server.stop()
