"""A standby whose network, disk or own life fails: nothing is lost, it says so, and it goes on by itself."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.loads.bank import Bank, connect
from tests.lab.loads.commit import TABLE, Commit
from tests.lab.oracle.compare import compare
from tests.lab.server.cluster import controldata, format_lsn, parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Stock, Walrider, wait_position, wait_streaming
from tests.lab.waiting import wait_for

KILLS = int(os.environ.get("WALRIDER_STANDBY_KILLS", "8"))


class Pair:
    """A primary under load, a standby behind a proxy, and a stock standby beside it that nothing happens to."""

    def __init__(self, primary, work, kind, rng, *options, disk=None):
        self.primary, self.rng = primary, rng
        primary.psql(TABLE, options=LOCALLY)
        self.bank = Bank(rng.randrange(1 << 30))
        self.bank.found(primary)
        self.network = Proxy(primary.port)
        arguments = dict(disk=disk) if disk else {}
        self.ours = kind(standby.clone(primary, work / "ours", self.network.port), *options, **arguments)
        self.stock = Stock(standby.clone(primary, work / "stock", name="stock"))

    def __enter__(self):
        for follower in (self.ours, self.stock):
            follower.start()
        wait_streaming(self.primary)
        self.bank.open(self.primary)
        return self

    def __exit__(self, *_exception):
        self.network.close()
        self.ours.kill()
        self.stock.kill()
        self.primary.kill()

    def bulk(self):
        """Some megabytes of WAL, committed here alone."""
        with connect(self.primary, synchronous_commit="local") as connection:
            connection.execute("INSERT INTO t (v) SELECT repeat('b', 200) FROM generate_series(1, 20000)")

    def goes_on(self, commits=50, timeout=60):
        """Commits are acknowledged again, or still."""
        self.bank.wait_acknowledged(len(self.bank.books.acknowledged) + commits, timeout)

    def finish(self):
        """End the load, stop the primary, and compare both directories; then the books in ours."""
        self.bank.close()
        wait_position(self.primary)
        wait_position(self.primary, name="stock")
        self.primary.stop()
        final = self.primary.controldata()["Latest checkpoint location"]
        replayed = format_lsn(parse_lsn(final) + 1)
        if isinstance(self.ours, Walrider):
            self.ours.wait_replayed(replayed)
        time.sleep(1)       # the stock standby has no word for it; that it has replayed it, its control file says
        for follower in (self.ours, self.stock):
            follower.stop()
            assert controldata(follower.data_dir)["Latest checkpoint location"] == final
        compare(self.ours.data_dir, self.stock.data_dir)
        self.ours.start()
        self.ours.promote()
        with self.ours.serve() as promoted:
            return self.bank.audit(promoted)


def test_killed_and_started_again(primary, work, kind, rng):
    """SIGKILL at random moments under load; each time it goes on where it was."""
    with Pair(primary, work, kind, rng) as pair:
        for _ in range(KILLS):
            pair.goes_on(5)
            if rng.random() < 0.5:
                pair.bulk()
            time.sleep(rng.uniform(0, 0.5))
            pair.ours.kill()
            if rng.random() < 0.3:
                pair.ours.start()       # killed again before it is anywhere
                time.sleep(rng.uniform(0, 0.1))
                pair.ours.kill()
            pair.ours.start()
            wait_streaming(primary)
        pair.goes_on()
        print(pair.finish())


def test_promoted_while_old_wal_comes_again(primary, work, kind, rng):
    """After a start, WAL comes from the beginning of the segment: behind what `pg_wal` has, and was replayed.  A promotion
    at that moment took for its end what had come, and did not find what it had replayed."""
    with Pair(primary, work, kind, rng) as pair:
        pair.goes_on()
        pair.bank.close()
        wait_position(primary)
        pair.ours.stop()
        pair.network.throttle(down=4000)
        pair.ours.start()
        wait_streaming(primary)
        end = pair.ours.position("written")
        assert end < pair.ours.position("replayed"), "no test of anything: all of the segment is there again"
        pair.ours.promote()
        with pair.ours.serve() as promoted:
            print(pair.bank.audit(promoted))


def test_the_network_is_cut(primary, work, kind, rng):
    """Resets at random moments, and a time without any connection: it comes back by itself."""
    with Pair(primary, work, kind, rng) as pair:
        for _ in range(6):
            pair.goes_on(5)
            pair.bulk()
            time.sleep(rng.uniform(0, 0.3))
            assert pair.network.cut() > 0
        pair.goes_on(5)
        pair.network.cut(refuse=True)
        wait_for(lambda: standby.replication(primary) is None, "no connection")
        pair.bulk()
        pair.network.restore()
        pair.goes_on()
        wait_streaming(primary)
        print(pair.finish())


def test_the_network_is_slow(primary, work, kind, rng):
    """Delayed both ways and throttled, commits take as long as the network does and no longer; nothing piles up."""
    with Pair(primary, work, kind, rng) as pair:
        pair.goes_on()
        pair.network.delay(up_ms=20, down_ms=20)
        pair.goes_on(5)
        pair.bank.books.latencies.clear()
        pair.goes_on(60)
        times = sorted(seconds for _, seconds in pair.bank.books.latencies)
        assert times[0] > 0.039, "the delay is there"
        # A round trip, and what this machine takes to do the rest; not one round trip for each of several commits in flight.
        assert times[len(times) // 2] < 0.4, times
        pair.network.delay()
        pair.network.throttle(down=4 << 20)
        for _ in range(3):
            pair.bulk()
        if kind is Walrider:
            memory = int(re.search(r"VmHWM:\s+(\d+) kB", open(f"/proc/{pair.ours.process.pid}/status").read())[1]) >> 10
            print(f"{memory} MB at most")
        pair.goes_on(20, timeout=120)
        pair.network.throttle()
        pair.goes_on()
        print(pair.finish())


def test_the_network_is_silent(primary, work, kind, rng):
    """A connection that says nothing is given up after wal_receiver_timeout, and made anew."""
    options = () if kind is Stock else ("--receiver-timeout", "2s")
    with Pair(primary, work, kind, rng, *options) as pair:
        if kind is Stock:
            pair.ours.settings = dict(wal_receiver_timeout="2s")
            pair.ours.stop()
            pair.ours.start()
            wait_streaming(primary)
        pair.goes_on(5)
        pair.network.silence()
        before = pair.network.state()["bytes"]
        time.sleep(4)
        assert pair.network.state()["bytes"] == before
        assert re.search("terminating .*(timeout|in time)", pair.ours.log_text()), pair.ours.log_tail()
        pair.network.restore()
        pair.goes_on()
        wait_streaming(primary)
        print(pair.finish())


@pytest.mark.parametrize("what", ["all", "new"])
def test_the_disk_is_full(primary, work, rng, what):
    """It stops receiving and says so; nothing is lost, nothing more is acknowledged; with space it goes on by itself."""
    disk = Disk(work / "shim", "pg_wal/")
    with Pair(primary, work, Walrider, rng, disk=disk) as pair:
        for _ in range(2):
            pair.goes_on(20)
            disk.fill(what)
            for _ in range(6 if what == "new" else 1):      # beyond the segments that are there already
                pair.bulk()
            pair.ours.wait_state("waiting for disk")
            code, reason = pair.ours.get("/health")
            assert code == 503, reason
            time.sleep(0.5)     # what was on its way is acknowledged
            count = len(pair.bank.books.acknowledged)
            time.sleep(1)
            assert len(pair.bank.books.acknowledged) == count, "a commit was acknowledged though there is no room for it"
            assert pair.ours.process.poll() is None, pair.ours.log_tail()
            disk.clear()
            pair.goes_on()
            pair.ours.wait_state("streaming")
        assert re.search("No space left on device", pair.ours.log_text()), pair.ours.log_tail()
        print(pair.finish())


def test_killed_while_the_disk_is_full(primary, work, rng):
    """What was acknowledged before is there after a promotion without a primary."""
    disk = Disk(work / "shim", "pg_wal/")
    with Pair(primary, work, Walrider, rng, disk=disk) as pair:
        pair.goes_on(50)
        disk.fill()
        pair.bulk()
        pair.ours.wait_state("waiting for disk")
        primary.kill()
        pair.ours.kill()
        pair.bank.close()
        disk.clear()
        pair.ours.start()
        pair.ours.promote()
        with pair.ours.serve() as promoted:
            print(pair.bank.audit(promoted))


def thread_status(pid, name):
    """/proc/PID/task/TID/status of the thread of that name, its numbers."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    [text] = [text for text in texts if text.startswith(f"Name:\t{name}\n")]
    return {field: int(value) for field, value in re.findall(r"^(\w+):\t(\d+)$", text, re.MULTILINE)}


def median(primary, level, commits):
    """Milliseconds that a commit took, one after the other."""
    with connect(primary, synchronous_commit=level) as connection:
        times = []
        for _ in range(commits):
            begun = time.perf_counter()
            connection.execute("INSERT INTO t (v) VALUES ('timed')")
            times.append(1000 * (time.perf_counter() - begun))
    return sorted(times)[commits // 2]


@pytest.mark.alone
def test_who_has_news_tells_them(primary, work):
    """A flush is told by the flusher while the receiver sleeps: that wakes for what comes, once for a commit, and not for the flush."""
    disk = Disk(work / "shim", "pg_wal/")
    primary.psql(TABLE, options=LOCALLY)
    with Walrider(standby.clone(primary, work / "ours"), disk=disk).start() as follower:
        wait_streaming(primary)
        disk.fsync_takes(5)
        median(primary, "on", 10)
        sleeps = lambda: thread_status(follower.process.pid, "receiver")["voluntary_ctxt_switches"]
        before = sleeps()
        assert median(primary, "on", 100) > 5, "the shim works"
        slept = sleeps() - before
        print(f"the receiver slept {slept} times in 100 commits")
        assert 100 <= slept < 150


@pytest.mark.alone
def test_a_slow_fsync_does_not_delay_remote_write(primary, work):
    """With 50 ms for each fsync of the standby's WAL, `on` takes them and the median of `remote_write` does not move.

    What stock PostgreSQL does here is not asked: its `remote_write` may wait for the fsync of an earlier commit.
    """
    disk = Disk(work / "shim", "pg_wal/")
    primary.psql(TABLE, options=LOCALLY)
    with Walrider(standby.clone(primary, work / "ours"), disk=disk).start():
        wait_streaming(primary)
        before = {level: median(primary, level, 100) for level in ("remote_write", "on")}
        disk.fsync_takes(50)
        after = {level: median(primary, level, 100 if level == "remote_write" else 20) for level in ("remote_write", "on")}
        print(f"medians in ms: {before}, with 50 ms more for each fsync {after}")
        assert after["on"] > 50, "the shim works"
        assert after["remote_write"] < before["remote_write"] + 25
        assert after["on"] < before["on"] + 150, "at most the fsync that is under way and its own"
        # By order, not by time: while a commit waits for its flush, later ones are acknowledged as written.
        disk.hold_fsync()
        held = Commit(primary, "on")
        for _ in range(20):
            Commit(primary, "remote_write").wait()
        assert not held.done
        disk.hold_fsync(False)
        held.wait()
