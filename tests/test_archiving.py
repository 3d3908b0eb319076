"""`--archive`: what a relay or a standby receives, archived: restored from there, in an outage, after a crash, across a failover."""

import subprocess
import time

import pytest

from tests.lab.faults.objects import ObjectStore
from tests.lab.loads.commit import TABLE
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, parse_lsn
from tests.lab.standby.archiving import archiver, get, switch, wait_archived
from tests.lab.standby.relay import Relay, hot_standby, rows, wait_replayed, write
from tests.lab.standby.standby import LOCALLY, Walrider, clone, replication, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import binary, walrider


class Environment:
    """What a standby is started with besides ours, as of a disk."""

    def __init__(self, variables):
        self.variables = variables

    def environment(self):
        """As Walrider asks for it."""
        return self.variables


@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


@pytest.fixture
def store():
    """An object store."""
    store = ObjectStore()
    yield store
    store.close()


def recovered(backup, data_dir, place, table):
    """What a backup recovers to from an archive, by PostgreSQL."""
    server = PgCluster(recovery.copy_backup(backup, data_dir))
    command = f"{binary()} wal get --archive {place} --idle 1 %f %p"
    server.configure(f"archive_mode = off\nhot_standby = off\nsynchronous_standby_names = ''\nrestore_command = '{command}'\n",
                     "postgresql.auto.conf")
    (data_dir / "recovery.signal").touch()
    with server:
        server.start()
        return rows(server)


def test_a_relay_archives(table, work):
    """What it archives is the primary's WAL byte by byte, and a backup recovers from there to the end."""
    (work / "archive").mkdir()
    with Relay(work / "relay", table.port, "--archive", work / "archive").start() as relay:
        wait_streaming(table)
        table.basebackup(work / "backup")
        write(table, 30000)
        last = switch(table)
        wait_archived(relay, last)
        told = archiver(relay)
        assert (told["ready_count"], told["failed_count"], told["place"]) == (0, 0, str(work / "archive")), told
        archived = sorted(file.name[:24] for file in (work / "archive/wal/00000001").iterdir())
        assert len(archived) == told["archived_count"] > 2 and archived[-1] == last
        for name in archived:
            assert get(work / "archive", name, work / "got") == (table.data_dir / "pg_wal" / name).read_bytes(), name
        assert f"walrider_archived_total {len(archived)}\n" in relay.get("/metrics")[1]
    assert len(recovered(work / "backup", work / "copy", work / "archive", table)) >= 30000


def test_an_outage_loses_nothing(table, store, work):
    """While the store refuses, WAL stays, whatever --wal-keep-size says, also over SIGKILL; then all is archived, and the WAL goes.
    What the store has with other contents is said, and holds up nothing but itself.
    """
    options = ("--archive", store.url("main"), "--wal-keep-size", "1MB")
    store.status = 403
    with Relay(work / "relay", table.port, *options).launch(store.environment) as relay:
        wait_streaming(table)
        first = switch(table)
        other = table.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
        for _ in range(5):
            write(table, 8000)
        last = switch(table)
        wait_position(table, stage="flush")
        wait_for(lambda: "403" in (archiver(relay)["last_failed_error"] or ""), lambda: f"{archiver(relay)}")
        wait_for(lambda: archiver(relay)["ready_count"] > 4, lambda: f"{archiver(relay)}")
        # It removes WAL once a second.
        time.sleep(2)
        assert (relay.data_dir / first).exists()
        assert "archiving waits" in relay.log_text()
        relay.kill()
        store.objects[f"main/wal/{other[:8]}/{other}.raw"] = b"something else"
        store.status = None
        relay.launch(store.environment)
        wait_for(lambda: not (relay.data_dir / first).exists(), relay.log_tail)
        wait_for(lambda: archiver(relay)["last_failed_wal"] == other, lambda: f"{archiver(relay)}")
        wait_for(lambda: archiver(relay)["ready_count"] == 1, lambda: f"{archiver(relay)}")
        archived = sorted(key.split("/")[-1][:24] for key in store.objects if key.endswith(".zst"))
        assert first in archived and last in archived and other not in archived
        assert (relay.data_dir / other).exists() and f'"{other}" is not archived, and stays' in relay.log_text()


def test_too_much_waits(table, work):
    """--archive-max-keep: what is older is given up, said and counted, and goes; the rest is archived when the directory is there."""
    options = ("--archive", work / "archive", "--archive-max-keep", "3MB", "--wal-keep-size", "0")
    with Relay(work / "relay", table.port, *options).start() as relay:
        wait_streaming(table)
        first = switch(table)
        for _ in range(6):
            write(table, 8000)
        last = switch(table)
        wait_position(table, stage="flush")
        wait_for(lambda: not (relay.data_dir / first).exists(), lambda: f"{archiver(relay)}\n{relay.log_tail()}")
        assert archiver(relay)["given_up_count"] > 0 and f'"{first}" is given up' in relay.log_text()
        (work / "archive").mkdir()
        # Its mark goes with the segment, which nobody needs.
        wait_for(lambda: (found := archiver(relay))["archived_count"] and not found["ready_count"], lambda: f"{archiver(relay)}\n{relay.log_tail()}")
        assert get(work / "archive", last, work / "last")
        assert get(work / "archive", first, work / "got") is None


def test_across_a_failover(table, work):
    """The relay goes over to the promoted standby's timeline: its history and its segments are archived, and the old timeline's last one,
    which is incomplete, is not.  A backup from before recovers through both timelines.
    """
    (work / "archive").mkdir()
    with Relay(work / "relay", table.port, "--archive", work / "archive").start() as relay:
        wait_streaming(table)
        table.basebackup(work / "backup")
        with hot_standby(table, work / "a", relay, "a") as a:
            write(table, 20000)
            switch(table)
            end = write(table, 100)
            wait_replayed(a, end)
            left = table.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
            relay.stop()
            table.kill()
            a.psql("ALTER SYSTEM SET synchronous_standby_names = ''")
            a.psql("SELECT pg_promote()")
            relay.upstream = a.port
            relay.start()
            wait_streaming(a)
            write(a, 100)
            last = switch(a)
            assert last.startswith("00000002")
            wait_archived(relay, last, "00000002.history")
            assert get(work / "archive", "00000002.history", work / "got") == (a.data_dir / "pg_wal/00000002.history").read_bytes()
            assert get(work / "archive", left, work / "got") is None
            there = [tuple(row) for row in rows(a)]
        got = [tuple(row) for row in recovered(work / "backup", work / "copy", work / "archive", table)]
        assert got == there[:len(got)] and len(got) >= 20200


def test_a_standby_archives(table, work):
    """A standby keeps what is not archived through its restartpoints, beside a primary that archives to the same place, and after it is
    promoted the rest is left for the server: marked, and there.
    """
    data_dir = clone(table, work / "standby")
    options = ("--archive", work / "archive", "--restartpoint-wal", "1MB", "--restartpoint-interval", "1s", "--retry-interval", "200ms")
    with Walrider(data_dir, *options).start() as ours:
        wait_streaming(table)
        first = switch(table)
        for _ in range(4):
            write(table, 8000)
            table.psql("CHECKPOINT")
            switch(table)
        wait_position(table)
        wait_for(lambda: ours.status()["replay"]["restartpoints"] >= 2, lambda: f"{ours.status()}")
        assert (data_dir / "pg_wal" / first).exists()
        wait_for(lambda: "No such file or directory" in (archiver(ours)["last_failed_error"] or ""), lambda: f"{archiver(ours)}")
        (work / "archive").mkdir()
        walrider("wal", "put", "--archive", work / "archive", table.data_dir / "pg_wal" / first).expect()
        # What was to be done is found again.
        ours.stop()
        ours.start()
        wait_streaming(table)
        wait_archived(ours, first)
        assert get(work / "archive", first, work / "got") == (table.data_dir / "pg_wal" / first).read_bytes()
        (work / "archive").rename(work / "away")
        last = switch(table)
        wait_position(table)
        table.kill()
        ours.promote()
    assert (data_dir / "pg_wal/archive_status" / f"{last}.ready").exists() and (data_dir / "pg_wal" / last).exists()


def archived_and_gone(table, data_dir, place, environment):
    """A backup, and after it WAL that a relay has archived, and the primary has no more.  How many rows were written, and the last segment
    that is archived."""
    clone(table, data_dir)
    table.psql("ALTER SYSTEM SET wal_keep_size = 0", options=LOCALLY)
    table.psql("SELECT pg_reload_conf()")
    with Relay(data_dir.with_name("relay"), table.port, "--archive", place).launch(environment) as relay:
        wait_streaming(table)
        first = switch(table)
        for _ in range(6):
            write(table, 8000)
            last = switch(table)
        wait_archived(relay, last)
        relay.stop()
    table.psql("CHECKPOINT")
    table.psql("CHECKPOINT")
    wait_for(lambda: not (table.data_dir / "pg_wal" / first).exists(), "the primary removes it")
    return 7 + 6 * 8000, last


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_standby_reads_from_an_archive(table, store, work, kind):
    """--wal: what the primary no longer has comes out of the archive that a relay filled, several at once, and the rest by streaming; while
    the store is away, or empty, the standby waits.
    """
    place = (work / "archive").as_uri() if kind == "directory" else store.url("main")
    (work / "archive").mkdir()
    data_dir = work / "standby"
    count, _ = archived_and_gone(table, data_dir, place, store.environment)
    if kind == "objects":
        store.status = 403
    else:
        (work / "archive").rename(work / "away")
        (work / "archive").mkdir()
    ours = Walrider(data_dir, "--wal", place, "--retry-interval", "200ms", disk=Environment(store.environment))
    with ours.start():
        wait_for(lambda: "the archive is out of reach" in ours.log_text(), ours.log_tail)
        if kind == "objects":
            store.status, store.delay = None, 0.05
        else:
            (work / "archive").rmdir()
            (work / "away").rename(work / "archive")
        write(table, 100)
        wait_position(table)
        if kind == "objects":
            assert store.most > 1
        table.kill()
        ours.promote()
        with ours.serve() as promoted:
            assert promoted.value("SELECT count(*) FROM t") == str(count + 100)


def test_an_archive_that_does_not_answer(table, store, work):
    """It keeps a standby neither from connecting again when its connection is lost nor from being promoted. Found by a review: each took
    some minutes, as one request after the other was repeated."""
    data_dir = work / "standby"
    count, _ = archived_and_gone(table, data_dir, store.url("main"), store.environment)
    ours = Walrider(data_dir, "--wal", store.url("main"), "--retry-interval", "200ms", disk=Environment(store.environment))
    with ours.start():
        wait_position(table)
        store.delay = 300
        before = replication(table)["pid"]
        began = time.monotonic()
        table.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_replication", options=LOCALLY)
        wait_for(lambda: (replication(table) or {}).get("pid", before) != before, ours.log_tail, 300)
        reconnected = time.monotonic() - began
        write(table, 100)
        wait_position(table)
        table.kill()
        began = time.monotonic()
        ours.promote()
        promoted_after = time.monotonic() - began
        with ours.serve() as promoted:
            assert promoted.value("SELECT count(*) FROM t") == str(count + 100)
        store.delay = 0
    print(f"connected again after {reconnected:.1f} s, promoted after {promoted_after:.1f} s")
    assert reconnected < 45 and promoted_after < 45, (reconnected, promoted_after)
    assert "if it has 00000002.history of an earlier promotion" in ours.log_text()


def test_a_gap_is_not_acknowledged(table, store, work):
    """A segment that neither the primary nor the archive has: nothing past it may be told as durable, since it can never be replayed."""
    data_dir = work / "standby"
    _, last = archived_and_gone(table, data_dir, store.url("main"), store.environment)
    write(table, 8000)
    table.psql("CHECKPOINT")
    table.psql("CHECKPOINT")
    gap = (int(last[16:], 16) + 1) << 20
    ours = Walrider(data_dir, "--wal", store.url("main"), "--retry-interval", "200ms", disk=Environment(store.environment))
    with ours.start():
        wait_for(lambda: f"{last[:16]}{gap >> 20:08X} has already been removed" in ours.log_text(), ours.log_tail)
        for _ in range(50):
            row = replication(table)
            assert not row or not row["flush_lsn"] or parse_lsn(row["flush_lsn"]) <= gap, row
            time.sleep(0.1)
