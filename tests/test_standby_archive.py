"""A standby that is cut off, and goes on out of an archive: what it has in pg_wal is WAL all the same, for those that it serves and
for its own archive, as with PostgreSQL (`KeepFileRestoredFromArchive`).

It had nothing but what had been prepared for the stream: a segment half received, zeros, older segments under new names. It served these to
a standby behind it, and archived them.

Not tried: a power cut or a kill while a segment is kept, a full disk then (the simulator has both), and an archive that is another cluster's.
"""

import re
import shutil
from contextlib import contextmanager

import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.loads.commit import TABLE
from tests.lab.standby.archiving import archiver, get, switch, wait_archived
from tests.lab.standby.relay import Relay, ask, behind, rows, that_serves, wait_replayed, write
from tests.lab.standby.standby import LOCALLY, Walrider, clone, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for


@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


class Archive:
    """Whole segments, put there by us."""

    def __init__(self, primary, directory):
        directory.mkdir()
        self.primary, self.directory = primary, directory
        self.command = f"cp '{directory}'/%f %p"

    def complete(self):
        """All that the primary has; where that ends."""
        end = self.primary.wal_end()
        last = self.primary.value("SELECT pg_walfile_name(pg_switch_wal())")
        for file in (self.primary.data_dir / "pg_wal").iterdir():
            if (re.fullmatch("[0-9A-F]{24}", file.name) and file.name <= last) or file.name.endswith(".history"):
                shutil.copy(file, self.directory)
        return end

    def check(self, directory, first, last):
        """All segments from one to another are there as they are here, or not any more."""
        found = 0
        for number in range(int(first, 16), int(last, 16) + 1):
            name = f"{number:024X}"
            here, there = self.directory / name, directory / name
            if there.exists():
                found += 1
                assert there.read_bytes() == here.read_bytes(), name
        assert found > 0


def with_recycled(table, standby):
    """Older segments lie under the names of future ones."""
    recycled = lambda: standby.status()["spool"]["segments_recycled"]
    for _ in range(20):
        write(table, 10000)
        table.psql("CHECKPOINT", options=LOCALLY)
        wait_position(table)
        if recycled() > 4:
            return
    raise AssertionError(standby.status())


@contextmanager
def cut_off(table, work, *options):
    """A standby that serves, has older segments under the names of future ones, and is cut off; a stock one behind it; the way to the primary."""
    table.psql("ALTER SYSTEM SET wal_keep_size = '1GB'; SELECT pg_reload_conf()", options=LOCALLY)
    with Proxy(table.port) as network, \
            that_serves(clone(table, work / "serving", network.port), work / "access.toml", *options).start() as serving:
        wait_streaming(table)
        with_recycled(table, serving)
        ask(serving, "CREATE_REPLICATION_SLOT a PHYSICAL RESERVE_WAL")
        with behind(table, work / "a", serving, "a", "a") as a:
            # Half a segment is sent.
            wait_replayed(a, write(table, 10))
            network.cut(refuse=True)
            yield serving, a, network
            network.restore()
            wait_replayed(a, write(table, 20000))
            assert rows(a) == rows(table)
            for wrong in ("already been removed", "resource manager", "unexpected pageaddr", "error reading result"):
                assert wrong not in a.log_tail(200), a.log_tail(200)


def test_it_is_served(table, work):
    """To a standby that it has sent half a segment."""
    archive = Archive(table, work / "archive")
    with cut_off(table, work, "--restore-command", archive.command) as (serving, a, network):
        first = table.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
        for _ in range(4):
            write(table, 20000)
        end = archive.complete()
        last = table.value("SELECT pg_walfile_name(pg_current_wal_lsn() - 1)")
        serving.wait_replayed(end)
        wait_replayed(a, end)
        assert rows(a) == rows(table)
        archive.check(serving.data_dir / "pg_wal", first, last)
        archive.check(a.data_dir / "pg_wal", first, last)
        network.restore()
        wait_streaming(table)


def test_a_segment_that_is_received_elsewhere_is_served(table, work):
    """Of a directory in which somebody else receives: what its `.partial` segment has, too."""
    with Relay(work / "relay", table.port, name="relay").start() as relay:
        wait_streaming(table, "relay")
        with cut_off(table, work, "--wal", relay.data_dir) as (serving, a, network):
            for count in (100, 20000, 200):
                end = write(table, count)
                serving.wait_replayed(end)
                wait_replayed(a, end)
            assert rows(a) == rows(table)
            network.restore()
            wait_streaming(table)


def test_another_timeline_is_served(table, work):
    """The primary is restored and promoted, which the standby learns from the archive alone; and so does who is behind it."""
    archive = Archive(table, work / "archive")
    with cut_off(table, work, "--restore-command", archive.command) as (serving, a, _):
        write(table, 5000)
        table.stop()
        (table.data_dir / "standby.signal").touch()
        start_primary(table)
        wait_for(lambda: table.value("SELECT pg_is_in_recovery()") == "t", table.log_tail)
        assert table.psql("SELECT pg_promote()", options=LOCALLY) == [["t"]]
        for _ in range(3):
            write(table, 20000)
        end = archive.complete()
        assert (archive.directory / "00000002.history").exists()
        serving.wait_replayed(end)
        wait_replayed(a, end)
        assert rows(a) == rows(table)


def test_it_is_archived(table, work):
    """By a standby with an archive of its own: all that was received, and all that came from elsewhere."""
    archive, own = Archive(table, work / "archive"), work / "own"
    own.mkdir()
    table.psql("ALTER SYSTEM SET wal_keep_size = '1GB'; SELECT pg_reload_conf()", options=LOCALLY)
    options = ("--restore-command", archive.command, "--archive", own, "--status-interval", "1s", "--restartpoint-wal", "4MB",
               "--restartpoint-interval", "1s", "--wal-keep", "0")
    with Proxy(table.port) as network, Walrider(clone(table, work / "standby", network.port), *options).start() as standby:
        wait_streaming(table)
        with_recycled(table, standby)
        first = table.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
        network.cut(refuse=True)
        for _ in range(4):
            write(table, 20000)
        end = archive.complete()
        standby.wait_replayed(end)
        # Started again, it has the primary send what follows, and no more what it had itself got half of.
        standby.stop()
        standby.start()
        standby.wait_replayed(end)
        network.restore()
        wait_streaming(table)
        for _ in range(4):
            write(table, 20000)
            table.psql("CHECKPOINT", options=LOCALLY)
        wait_position(table)
        archive.complete()
        last = switch(table)
        archive.complete()
        wait_archived(standby, last)
        assert archiver(standby)["failed_count"] == 0, archiver(standby)
    to = work / "segment"
    for number in range(int(first, 16), int(last, 16) + 1):
        name = f"{number:024X}"
        assert get(own, name, to) == (archive.directory / name).read_bytes(), name
