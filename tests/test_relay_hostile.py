"""Clients that mean harm to a relay, or are broken: the others are served on, and its memory and threads stay bounded.

They have been let in by the rules, where that is said: what is refused before is in test_relay.py.  Not tried: hostile TLS records
(crates/relay/src/tls/tests.rs), floods from several machines, exhausted ports or memory of the machine.
"""

import os
import resource
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.lab.loads.commit import TABLE, Commit
from tests.lab.seed import seed
from tests.lab.standby.relay import Raw, Relay, ask, frame, hot_standby, wait_replayed
from tests.lab.standby.standby import LOCALLY, wait_streaming
from tests.lab.waiting import wait_for

SEED = seed()
MB = 1 << 20
# What a connection may cost, besides a stack that is hardly used: two messages of 64 kB and a little.
EACH = 256 << 10


class Victim:
    """A relay with a standby that is to notice nothing."""

    def __init__(self, primary, work, *options):
        primary.psql(TABLE, options=LOCALLY)
        self.primary, self.work = primary, work
        self.relay = Relay(work / "relay", primary.port, "--ack-apply", "ANY 1 (a)", *options)

    def __enter__(self):
        self.relay.start()
        wait_streaming(self.primary)
        self.standby = hot_standby(self.primary, self.work / "a", self.relay, "a")
        self.receiver = self.standby.value("SELECT pid FROM pg_stat_wal_receiver")
        self.serves()
        self.before = self.relay.memory(), self.relay.threads()
        return self

    def __exit__(self, *_exception):
        self.standby.kill()
        self.relay.kill()

    def serves(self):
        """A commit waits for the standby, over the connection that it has had all along."""
        took = Commit(self.primary, "remote_apply").wait()
        assert self.standby.value("SELECT pid FROM pg_stat_wal_receiver") == self.receiver, self.relay.log_tail()
        return took

    def unharmed(self, memory=16 * MB, threads=0):
        """It serves those who are there and who come, and has grown by this at most."""
        self.serves()
        assert self.relay.process.poll() is None, self.relay.log_tail()
        grown = self.relay.memory() - self.before[0], self.relay.threads() - self.before[1]
        print(f"seed {SEED}: {grown[0] >> 10} kB and {grown[1]} threads more than before")
        assert grown[0] <= memory and grown[1] <= threads, grown

    def settled(self):
        """All who came are gone, and so are their threads."""
        wait_for(lambda: self.relay.threads() <= self.before[1], lambda: f"{self.relay.threads()} threads, {self.before[1]} before")
        assert ask(self.relay, "IDENTIFY_SYSTEM")[0][1] == "1"


@pytest.fixture
def victim(primary, work):
    """One that serves."""
    with Victim(primary, work) as victim:
        yield victim


def pour(raw, data, seconds=4.0, most=256 * MB):
    """Send this over and over, and read nothing; bytes that went. Ends when nothing is taken any more, or the connection is closed."""
    raw.socket.setblocking(False)
    sent, rest, ends = 0, b"", time.monotonic() + seconds
    try:
        while time.monotonic() < ends and sent < most:
            rest = rest or data
            if not select.select([], [raw.socket], [], 1.0)[1]:
                break
            done = raw.socket.send(rest)
            sent, rest = sent + done, rest[done:]
    except OSError:
        pass
    return sent


@contextmanager
def admitted(victim):
    """A client that was let in."""
    with Raw(victim.relay.serves) as raw:
        raw.startup().read_until(b"Z")
        yield raw


def streaming(raw, victim):
    """It streams from now on."""
    position = ask(victim.relay, "IDENTIFY_SYSTEM")[0][2]
    raw.query(f"START_REPLICATION PHYSICAL {position} TIMELINE 1").read_until(b"W")
    return raw


def status(reply_requested=False):
    """A standby's status update, of one that has nothing."""
    return frame(b"d", b"r" + struct.pack(">QQQqB", 0, 0, 0, 0, reply_requested))


def test_random_bytes(victim, rng):
    """Nonsense before a session, in the place of each message, and in the middle of a stream; whole messages of nonsense, too."""
    print(f"seed {SEED}")
    for number in range(300):
        kind = rng.randrange(6)
        with Raw(victim.relay.serves, timeout=10) as raw:
            try:
                junk = rng.randbytes(rng.choice([1, 4, 8, 100, 5000, 100_000]))
                if kind == 0:
                    raw.send(junk)
                elif kind == 1:     # a first packet of a length and version that fit
                    body = struct.pack(">I", rng.choice([3 << 16, 3 << 16 | 2, 80877102, 80877103, 80877104, rng.randrange(1 << 32)])) + junk[:5000]
                    raw.send(struct.pack(">I", len(body) + 4) + body)
                elif kind == 2:
                    raw.startup().send(junk)
                elif kind == 3:
                    raw.startup().read_until(b"Z")
                    for _ in range(rng.randrange(1, 5)):
                        raw.message(rng.choice([b"Q", b"d", b"c", b"f", b"p", b"P", b"B", b"E", b"S", b"H", b"\0"]), junk[:60_000])
                elif kind == 4:
                    streaming(raw.startup(), victim).message(b"d", rng.choice([b"r", b"h", b"p", b""]) + junk[:rng.randrange(100)])
                else:
                    streaming(raw.startup(), victim).send(junk)
                if rng.random() < 0.5:
                    raw.socket.shutdown(socket.SHUT_WR)
                    while raw.socket.recv(65536):
                        pass
            except (OSError, ConnectionError):
                pass            # it was thrown out, as it should be
        if number % 100 == 0:
            victim.serves()
    victim.unharmed(threads=8)
    victim.settled()


def test_half_of_a_startup_packet(victim):
    """Some, as many as may be of one address, send a part of the first packet, byte by byte, and stay: who comes after them is served."""
    whole = struct.pack(">II", 64, 3 << 16) + b"user\0postgres\0replication\0true\0"
    with ExitStack() as stack:
        slow = [stack.enter_context(Raw(victim.relay.serves)) for _ in range(15)]
        for byte in whole:
            for raw in slow:
                raw.send(bytes([byte]))
        for _ in range(5):
            assert ask(victim.relay, "IDENTIFY_SYSTEM")[0][1] == "1"
        assert victim.relay.threads() - victim.before[1] >= 15, "no test of anything"
        victim.unharmed(threads=15, memory=15 * EACH)
    victim.settled()


@contextmanager
def many_files(wanted):
    """This process, and not what it has started, may have so many open; a shell begins with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("says", ["nothing", "who it is"])
def test_a_flood_of_connections(primary, work, says):
    """A thousand connections, against --max-connections 20: no more threads than that and some, those who stream stream on, and when the flood
    is over newcomers are served again.  While it lasts they may be refused, as by a server whose max_connections are used up."""
    with Victim(primary, work, "--max-connections", "20") as victim, many_files(2000):
        refused = 0
        with ExitStack() as stack:
            for _ in range(1000):
                raw = stack.enter_context(Raw(victim.relay.serves))
                if says == "who it is":
                    try:
                        raw.startup()
                    except OSError:
                        refused += 1
            most = victim.relay.threads()
            victim.unharmed(threads=20 + 40, memory=60 * EACH)
            assert len(victim.relay.status()["downstreams"]) <= 20
            # A standby that is there is not thrown out; one that loses its connection now waits for the flood's end.
            assert victim.relay.downstream("a")["streaming"]
        print(f"{most} threads, {refused} refused at once")
        victim.settled()
        assert "too many" in victim.relay.log_text()
        # Not a line for each.
        print(len(victim.relay.log_text().splitlines()), "lines logged")


@pytest.mark.parametrize("query", ["IDENTIFY_SYSTEM", "SHOW wal_segment_size", "SELECT nonsense", "IDENTIFY_SYSTEM nonsense"])
def test_queries_without_end_and_nothing_read(victim, query):
    """A client that was let in asks on and on, and reads no answer: the relay stops to listen to it, as PostgreSQL does, and keeps a bounded
    number of answers."""
    with admitted(victim) as raw:
        sent = pour(raw, frame(b"Q", query.encode() + b"\0") * 1000)
        print(f"{sent >> 10} kB of questions were taken")
        victim.unharmed(threads=1)
    victim.settled()


def test_replies_without_end_and_nothing_read(victim):
    """A downstream that asks for an answer in each of its reports, and reads none: what is kept for it stays bounded."""
    with admitted(victim) as raw:
        streaming(raw, victim)
        sent = pour(raw, status(reply_requested=True) * 1000)
        print(f"{sent >> 10} kB of reports were taken")
        victim.unharmed(threads=1)
    victim.settled()


def test_replies_one_by_one_and_nothing_read(victim):
    """The same, each report by itself, so that there is an answer for each."""
    with admitted(victim) as raw:
        streaming(raw, victim)
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = pour(raw, status(reply_requested=True), seconds=6)
        print(f"{sent // 39} reports were taken")
        victim.unharmed(memory=2 * MB, threads=1)
    victim.settled()


def test_data_after_the_end_of_the_stream(victim):
    """CopyData without end after the client has ended the stream, and after both have; then a command: it is answered."""
    with admitted(victim) as raw:
        streaming(raw, victim).message(b"c").read_until(b"c")
        raw.read_until(b"Z")
        sent = 0
        for _ in range(200):
            raw.send(frame(b"d", b"x" * 60_000) * 5)
            sent += 300_000
        raw.query("IDENTIFY_SYSTEM")
        _, row = raw.read_until(b"D")
        assert row
        victim.unharmed(threads=1)
        print(f"{sent >> 20} MB were taken and dropped")
    with admitted(victim) as raw:
        streaming(raw, victim).message(b"c")
        pour(raw, frame(b"d", b"x" * 60_000), seconds=2)
        victim.unharmed(threads=1)
    victim.settled()


def test_it_starts_to_stream_and_reads_nothing(victim):
    """Many start to stream from the beginning, and read nothing, while much is written: nothing is kept for them."""
    victim.primary.psql("INSERT INTO t (v) SELECT repeat('w', 1000) FROM generate_series(1, 20000)", options=LOCALLY)
    wait_replayed(victim.standby, victim.primary.wal_end())
    begin = min(victim.relay.segments())
    with ExitStack() as stack:
        for _ in range(40):
            raw = stack.enter_context(admitted(victim))
            raw.query(f"START_REPLICATION PHYSICAL 0/{begin << 20:X} TIMELINE 1")
        victim.primary.psql("INSERT INTO t (v) SELECT repeat('w', 1000) FROM generate_series(1, 20000)", options=LOCALLY)
        wait_replayed(victim.standby, victim.primary.wal_end())
        victim.unharmed(threads=40, memory=40 * EACH)
    victim.settled()


def test_slots_without_end(victim):
    """A client makes slots until there are no more to be had: it is told so, the file stays small, and the others have theirs."""
    ask(victim.relay, "CREATE_REPLICATION_SLOT mine PHYSICAL")
    with admitted(victim) as raw:
        told = None
        for number in range(1100):
            tag, body = raw.query(f"CREATE_REPLICATION_SLOT s{number} TEMPORARY PHYSICAL RESERVE_WAL").read_until(b"C", b"E")
            if tag == b"E":
                told = body
                break
            raw.read_until(b"Z")
        assert told and b"all replication slots are in use" in told
        victim.unharmed(threads=1)
        assert (victim.relay.data_dir / "walrider.slots.json").stat().st_size < 1000
    wait_for(lambda: list(victim.relay.slots()) == ["mine"], victim.relay.slots)
    victim.settled()


def test_they_come_and_go(victim, rng):
    """Four threads connect, begin something, and are gone, by reset or in good order: no descriptor, thread or slot is left over."""
    before = len(os.listdir(f"/proc/{victim.relay.process.pid}/fd"))
    ends = time.monotonic() + 4
    counts = []

    def visit(number):
        count = 0
        while time.monotonic() < ends:
            raw = Raw(victim.relay.serves)
            try:
                raw.startup()
                if count % 3:
                    raw.read_until(b"Z")
                if count % 3 == 2:
                    raw.query(f"CREATE_REPLICATION_SLOT v{number} TEMPORARY PHYSICAL RESERVE_WAL").read_until(b"Z")
                if count % 2:
                    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except (OSError, ConnectionError):
                pass
            raw.close()
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(counts) == 4 and sum(counts) > 100, counts
    victim.settled()
    victim.unharmed()
    assert victim.relay.slots() == {}
    # The last connection of ours, and a segment that is made ready, are closed a moment later.
    descriptors = lambda: len(os.listdir(f"/proc/{victim.relay.process.pid}/fd"))
    wait_for(lambda: descriptors() <= before, lambda: f"{sum(counts)} visits; {before} descriptors before, {descriptors()} after", 10)
