"""The primary dies with WAL that it had not flushed and the standby had: many times, and each time both ends of it.

In every round clients transfer money at all levels of synchronous_commit, beside WAL that nobody waits for, on a primary whose
fsync is slow; then it is killed.  The standby's directory is there twice from then on, as it is and a copy of that moment.  One
of the two is promoted and audited: every acknowledged commit is there.  The other follows the primary, which was started again:
what it had and the primary has not is gone, and the WAL is the primary's, byte by byte.
"""

import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.loads.bank import Bank, connect
from tests.lab.oracle import early
from tests.lab.oracle.early import SEGMENT
from tests.lab.seed import seed
from tests.lab.server import early_primary
from tests.lab.server.cluster import copy_tree, format_lsn, parse_lsn
from tests.lab.server.early_primary import EARLY
from tests.lab.server.recovery import discard
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Walrider, wait_streaming
from tests.lab.waiting import wait_for

SEED = seed()
ROUNDS = int(os.environ.get("WALRIDER_EARLY_ROUNDS", "20"))
# Of the rounds, at least so many leave the standby with WAL that the primary does not have when it is back.
TAILS = 0.2
ROOM = 2 << 30
SETTINGS = "shared_buffers = 16MB\nwal_keep_size = 64MB\nautovacuum = off\n"
NOISE = "INSERT INTO noise SELECT repeat('n', 200) FROM generate_series(1, 40)"


@pytest.fixture
def memory(work):
    """A directory in memory, where there is room for it: each round copies a directory, and three servers sync what they find."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < ROOM:
        yield work
        return
    directory = Path(tempfile.mkdtemp(prefix="walrider-", dir=shared))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Round:
    """One round and its random choices; `story` says what they were."""

    def __init__(self, number, seed=SEED):
        self.rng = random.Random(f"{seed}/early/{number}")
        choose = self.rng.choice
        self.fsync_ms = choose([2, 5, 10, 20])
        self.standby_fsync_ms = choose([0, 0, 2])
        self.network = choose(["near", "near", "far", "far and cut"])
        self.delay_ms = dict(up_ms=self.rng.uniform(0, 5), down_ms=self.rng.uniform(0, 10)) if "far" in self.network else {}
        self.standby_end = choose(["lives", "lives", "killed with it", "killed before"])
        self.promoted = choose(["itself", "its copy"])
        self.how = choose(["command", "signal", "file"])
        self.moment = self.rng.uniform(0.02, 0.3)
        self.story = f"round {number} of seed {seed}: fsync +{self.fsync_ms} ms, the standby's +{self.standby_fsync_ms} ms, " \
                     f"{self.network}, dead after {self.moment:.2f} s, the standby {self.standby_end}, " \
                     f"{self.promoted} promoted by {self.how}"


def crash(server):
    """SIGKILL all of it at one moment: nobody writes any more while others still are killed."""
    for pid in reversed(server.children()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    server.kill()


def switch_point(data_dir):
    """Where the second timeline left the first."""
    history = (data_dir / "pg_wal" / "00000002.history").read_text()
    return parse_lsn(re.match(r"1\t([0-9A-F]+/[0-9A-F]+)\t", history)[1])


def tail(data_dir, start):
    """The WAL of the first timeline from `start` to the end that a promoted directory has given it."""
    end = switch_point(data_dir)
    last = max(start, end // SEGMENT * SEGMENT)
    return b"" if end <= start else early.wal(data_dir, start, last) + early.wal(data_dir, last, end, timeline=2)


class Stage:
    """A primary, a standby, and the bank."""

    def __init__(self, template, work):
        self.work = work
        self.server = early_primary.make_primary(template, work / "early", SETTINGS)
        self.server.psql("CREATE TABLE noise (v text)", options=LOCALLY)
        self.bank = Bank(SEED, tellers=4)
        self.bank.found(self.server)
        self.network = Proxy(self.server.port)
        self.disk = Disk(work / "shim", "pg_wal/")
        self.directory, self.copy = work / "ours", work / "copy"
        standby.clone(self.server, self.directory, self.network.port)
        self.follower = self.standby(self.directory).start()
        wait_streaming(self.server)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.follower.kill()
        self.server.kill()
        self.network.close()

    def standby(self, directory):
        """`walrider standby` on it; restartpoints come soon, or WAL would pile up over the rounds."""
        return Walrider(directory, *EARLY, "--restartpoint-wal", "8MB", disk=self.disk)

    def make_noise(self):
        """WAL that nobody waits for, until the primary is gone."""
        try:
            with connect(self.server, synchronous_commit="off") as connection:
                connection.execute("TRUNCATE noise")
                while True:
                    connection.execute(NOISE)
                    time.sleep(0.002)       # a round's WAL is kept, to be compared
        except psycopg.OperationalError:
            pass

    def disaster(self, chances):
        """Load until the primary is gone; then the standby's directory is copied as of that moment."""
        self.begun = early_primary.flushed(self.server)
        self.server.disk.fsync_takes(chances.fsync_ms)
        self.disk.fsync_takes(chances.standby_fsync_ms)
        self.bank.open(self.server)
        noise = threading.Thread(target=self.make_noise, daemon=True)
        noise.start()
        self.bank.wait_acknowledged(3)
        self.network.delay(**chances.delay_ms)
        time.sleep(chances.moment)
        if chances.standby_end == "killed before":
            self.follower.kill()
            self.follower.start()
            wait_streaming(self.server)
            self.bank.wait_acknowledged(len(self.bank.books.acknowledged) + 3)
        if "cut" in chances.network:
            self.network.cut(refuse=True)
        if chances.standby_end == "killed with it":
            self.follower.kill()
        crash(self.server)
        self.bank.close()
        noise.join()
        self.network.delay()
        for disk in (self.server.disk, self.disk):
            disk.fsync_takes(0)
        if self.follower.process:
            time.sleep(0.02)        # what has arrived is on its way into the files
            self.follower.send_signal(signal.SIGSTOP)
        copy_tree(self.directory, self.copy)
        (self.copy / "postmaster.pid").unlink(missing_ok=True)
        if self.follower.process:
            self.follower.send_signal(signal.SIGCONT)

    def promote(self, follower, how):
        """The server that it becomes; one that was killed is started for it."""
        if follower.process is None:
            follower.start()
        follower.promote(how)
        return follower

    def restart(self):
        """The primary is started again and nobody waits yet."""
        self.network.restore()
        self.server.launch(listen_addresses="127.0.0.1")

    def audit(self, follower):
        """The books in a directory that was promoted; its end.  What it settles, the primary settles."""
        settled = self.bank.settled
        with follower.serve() as promoted:
            found = self.bank.audit(promoted)
        self.bank.settled = settled
        return found

    def follow(self):
        """The standby follows the primary that is back: whose WAL it has, and how much of it is not what it had."""
        self.server.wait_ready()
        if self.follower.process is None:
            self.follower.start()
        wait_streaming(self.server)
        self.follower.wait_replayed(format_lsn(early_primary.flushed(self.server)))
        early.same_wal(self.server, self.directory, self.begun)
        assert self.follower.status()["early"] is True
        self.bank.audit(self.server)

    def round(self, chances):
        """A disaster, and both ends of it; the books, and whether the tail really differed."""
        self.disaster(chances)
        promoted = self.promote(self.follower if chances.promoted == "itself" else self.standby(self.copy), chances.how)
        self.restart()      # not before: who is promoted shall not have heard of it
        found = self.audit(promoted)
        self.server.wait_ready()
        recovered = parse_lsn(self.server.controldata()["Latest checkpoint location"])
        had = tail(promoted.data_dir, recovered)
        has = early.wal(self.server.data_dir, recovered, min(recovered + len(had), early_primary.flushed(self.server)))
        differed = early.first_difference(had[:len(has)], has, recovered) is not None
        discard(promoted.data_dir)
        if chances.promoted == "itself":
            shutil.move(self.copy, self.directory)
            self.follower = self.standby(self.directory)
        self.follow()
        return dict(found, behind=len(had), differed=differed)


def test_the_primary_crashes(primary_template, memory):
    """See above; at the end the directories are compared page by page."""
    sums = dict(sent=0, acknowledged=0, open=0, there=0, behind=0, differed=0)
    with Stage(primary_template, memory) as stage:
        for number in range(ROUNDS):
            chances = Round(number)
            print(chances.story, end=": ", flush=True)
            try:
                begun = time.monotonic()
                found = stage.round(chances)
            except BaseException:
                print(f"\nfailed in {chances.story}\n{stage.follower.log_tail()}")
                raise
            for name, count in found.items():
                sums[name] += count
            print(f"{found}, {time.monotonic() - begun:.1f} s", flush=True)
        stage.server.stop()
        final = parse_lsn(stage.server.controldata()["Latest checkpoint location"])
        stage.follower.wait_replayed(format_lsn(final + 1))
        stage.follower.stop()
        early.same_pages(stage.directory, stage.server.data_dir)
    print(f"{ROUNDS} rounds: {sums}")
    assert sums["acknowledged"] >= 3 * ROUNDS
    assert sums["differed"] >= TAILS * ROUNDS, "the standby hardly ever had what the primary had not: no test of anything"


def test_power_loss_behind_a_switch(primary_template, work):
    """The standby's power fails when the unused rest of a segment is not durable there, so that the file has what it had before it
    was recycled, and what lies behind the segment is held only: it counts at a promotion all the same."""
    server = early_primary.make_primary(primary_template, work / "early", SETTINGS)
    ours = standby.clone(server, work / "ours")
    with server, Walrider(ours, *EARLY).start() as follower:
        server.psql("CREATE TABLE t (v text)", options=LOCALLY)
        wait_streaming(server)
        begun = early_primary.flushed(server)

        def hold(query, upto):
            """Runs it while the primary's fsync is stuck, until the standby has its WAL up to a position."""
            server.disk.hold_fsync()
            waiting = server.session(options=LOCALLY)
            waiting.send(query)
            wait_for(lambda: follower.position("received") > upto, lambda: follower.log_tail())
            return waiting

        next_segment = begun // SEGMENT * SEGMENT + SEGMENT
        waiting = hold("SELECT pg_switch_wal()", next_segment - 1)
        server.disk.hold_fsync(False)
        waiting.wait()
        follower.wait_replayed(format_lsn(next_segment))
        hold("INSERT INTO t VALUES ('behind')", next_segment)
        follower.kill()
        crash(server)

        used = early.valid_records(ours, begun, work)[-1][1]
        assert begun < used < next_segment - SEGMENT // 2
        with open(ours / "pg_wal" / early.segment_name(used), "r+b") as segment:
            segment.seek(used % SEGMENT)
            segment.write(b"an older segment" * 1000)
        follower.start()
        follower.promote()
        with follower.serve() as promoted:
            assert promoted.psql("SELECT v FROM t") == [["behind"]]


def test_the_audit_would_see_it(primary_template, memory):
    """Without what the standby holds behind the horizon, a promotion loses commits that were acknowledged."""
    with Stage(primary_template, memory) as stage:
        for number in range(20):
            chances = Round(number)
            chances.network, chances.delay_ms = "far and cut", dict(up_ms=0, down_ms=20)
            chances.fsync_ms, chances.standby_end, chances.moment = 5, "lives", 0.3
            stage.disaster(chances)
            for file in (stage.copy / "pg_wal").glob("walrider.early.*"):
                file.unlink()
            try:
                stage.audit(stage.promote(stage.standby(stage.copy), chances.how))
            except AssertionError as error:
                assert "acknowledged, but lost" in str(error), error
                return
            discard(stage.copy)
            stage.restart()
            stage.follow()
    pytest.fail("promoted twenty times without its tail, and nothing was lost")
