"""`walrider receive`, and the directory of a relay: who has it, and what is asked of the primary before.

What is received, acknowledged and served, tests/test_standby.py and tests/test_relay.py try. Not tried: a directory on NFS.
"""

import time

import pytest

from tests.lab.loads.commit import TABLE
from tests.lab.standby import standby
from tests.lab.standby.relay import Relay
from tests.lab.standby.standby import LOCALLY, conninfo, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import FAILED, binary, walrider

SLOTS = "SELECT count(*) FROM pg_replication_slots"


@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


def command(table, directory, *options):
    """A receiver that soon tries again."""
    return [binary(), "receive", "-d", conninfo(table.port), "-D", directory, "--retry-interval", "200ms", *options]


def test_one_at_a_time(table, work):
    """Another ends, a relay too, and the first goes on. Found by a review: the second took the files of the first for what a crash had left."""
    wal = work / "wal"
    wal.mkdir()
    first = standby.Standby(wal)
    with first.spawn(command(table, wal, "-S", "s", "--create-slot", "--if-not-exists")):
        wait_streaming(table)
        for name in ("receive", "relay"):
            more = () if name == "receive" else ("--listen", "127.0.0.1:0", "--access", work / "rules", "--wal-keep-size", "1GB")
            (work / "rules").write_text('[[allow]]\nfrom = ["loopback"]\nmethod = "trust"\n')
            done = walrider(name, "-d", conninfo(table.port), "-D", wal, *more, timeout=30)
            assert done.code == FAILED and "another walrider receives into" in done.stderr, done
        for _ in range(3):
            table.psql("SELECT pg_switch_wal(); INSERT INTO t (v) VALUES ('x')", options=LOCALLY)
        end = table.wal_end()
        wait_for(lambda: table.value(f"SELECT flush_lsn >= '{end}' FROM pg_stat_replication") == "t", first.log_tail)
        first.stop()
    done = walrider("status", "-D", wal)
    assert done.code == 3, "nothing runs, and there is no data directory"


def test_a_slot_is_made_for_a_directory_that_is_there(table, work):
    """Else it would keep WAL for nobody."""
    done = walrider("receive", "-d", conninfo(table.port), "-D", work / "no-such", "-S", "s", "--create-slot", timeout=30)
    assert done.code == FAILED and "no-such" in done.stderr, done
    assert table.value(SLOTS) == "0"


def test_a_slot_that_is_there_already(table, work):
    """With --create-slot alone that is an error, and no reason to try again and again while nothing is received."""
    table.psql("SELECT pg_create_physical_replication_slot('s')", options=LOCALLY)
    done = walrider("receive", "-d", conninfo(table.port), "-D", work, "-S", "s", "--create-slot", timeout=30)
    assert done.code == FAILED and "--if-not-exists" in done.stderr, done


def test_a_primary_on_an_older_timeline(table, work):
    """As the one that was left, behind a name that leads there for a while: it is asked again."""
    wal = work / "wal"
    wal.mkdir()
    (wal / "000000020000000000000003.partial").write_bytes(bytes(1 << 20))
    receiver = standby.Standby(wal)
    with receiver.spawn(command(table, wal)):
        wait_for(lambda: "is behind recovery timeline 2" in receiver.log_text() and "connecting again" in receiver.log_text(), receiver.log_tail)
        time.sleep(1)
        assert receiver.process.poll() is None
        receiver.stop()


def test_a_relay_removes_nothing_of_others(table, work):
    """Segments that no relay has received are somebody's archive: it is told how much is to stay, or refuses."""
    archive = work / "archive"
    archive.mkdir()
    segment = archive / "000000010000000000000001"
    segment.write_bytes(bytes(1 << 20))
    relay = Relay(archive, table.port)
    with relay.launch():
        relay.wait_end(30)
    assert "a relay removes what is older than --wal-keep-size" in relay.log_text() and segment.exists()
    with Relay(archive, table.port, "--wal-keep-size", "1TB").launch() as relay:
        wait_for(lambda: "listening on" in relay.log_text(), relay.log_tail)
