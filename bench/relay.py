"""What it costs to send WAL on: `walrider relay` beside a stock cascading standby, for 1, 4 and 16 downstreams.

    python3 -m bench.relay [--parts backlog live latency stalled] [--loads bulk pgbench] [--downstreams 1 4 16] [--rounds 5]
                           [--seconds 5] [--megabytes 512] [--binary-of COMMIT] [--save DIR]

*Backlog*: WAL that both have is received from its beginning to its end.  *Live*: the primary is under a load as fast as it can, and all of it
is received meanwhile; only one of the two is connected to it then.  *Latency*: one commit after the other; how much later a downstream has
it than another client that is connected to the primary.  `direct` is a second client there, and says how well this can be told apart at
all.  *Stalled*: the backlog once more, with one downstream that reads nothing.

Downstreams are sockets of one thread here.  They look at the header of each message and have the system throw away what follows, without
copying it (MSG_TRUNC): that costs least, and is the same for both.  They answer as a walreceiver does, at the beginning and whenever
they have taken what was there.

Contenders take turns, and another one is first in each round; the figures are medians.  Processor time of the senders is that of the relay's
threads for downstreams, and of the standby's walsenders; `all` is the whole process and the whole server.  The standby sends
what is durable on its own disk, the relay what it has written.

Not measured: TLS, a network, more cores than this machine has, standbys that replay at the other end.
"""

import argparse
import gc
import multiprocessing
import os
import re
import select
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

from bench.commits import save
from bench.replay import commit, machine, nameless
from tests.lab import install
from tests.lab.server.cluster import PgCluster, format_lsn, parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.early_client import PROTOCOL, now
from tests.lab.standby.relay import Relay

PARTS = ("backlog", "live", "latency", "stalled")
SETTINGS = """
shared_buffers = 256MB
max_wal_senders = 40
max_wal_size = 4GB
min_wal_size = 1GB
wal_keep_size = 4GB
checkpoint_timeout = 1h
autovacuum = off
synchronous_standby_names = ''
log_replication_commands = off
"""
KEPT = "4GB"
TABLE = "CREATE TABLE bulk (id bigint, v text)"
BULK = "INSERT INTO bulk SELECT i, repeat('w', 400) FROM generate_series(1, 2000) i;\n"
LOADS = {"bulk": ("-c", 2), "pgbench": ("-N", "-M", "prepared", "-c", 8)}
SO_TIMESTAMPNS = 35
HEADER = struct.Struct("!cIc")
WAL_HEADER = struct.Struct("!QQq")
ALL_HEADERS = HEADER.size + WAL_HEADER.size
WASTE = bytearray(1 << 20)


class Downstream:
    """A replication connection that throws away what it gets."""

    def __init__(self, port, name):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = dict(user="postgres", replication="true", application_name=name)
        options = b"".join(f"{key}\0{value}\0".encode() for key, value in options.items()) + b"\0"
        self.socket.sendall(struct.pack("!II", 8 + len(options), PROTOCOL) + options)
        self.until(b"Z")
        self.head, self.left = b"", 0       # of a message: its beginning, or how much is to come
        self.start = self.position = 0      # of the WAL that is looked at
        self.moved, self.answered, self.messages = 0.0, 0, 0
        self.arrived = None                 # (position, nanoseconds), where they are wanted

    def exactly(self, length):
        """So many bytes, and not one more."""
        data = self.socket.recv(length, socket.MSG_WAITALL)
        assert len(data) == length, "the server closed the connection"
        return data

    def until(self, wanted):
        """Messages up to one of a type."""
        kind = None
        while kind != wanted:
            kind, length = struct.unpack("!cI", self.exactly(5))
            body = self.exactly(length - 4) if length > 4 else b""
            assert kind != b"E", body

    def ask(self, at):
        """Ask for WAL from there on."""
        query = f"START_REPLICATION PHYSICAL {format_lsn(at)}".encode()
        self.socket.sendall(b"Q" + struct.pack("!I", len(query) + 5) + query + b"\0")
        self.position = at

    def begin(self):
        """Wait until it comes; and answer at once, as a walreceiver does."""
        self.until(b"W")
        self.socket.setblocking(False)
        self.answer()

    def drain(self, at, turns=64):
        """Take what is there, or as much as gives others their turn."""
        try:
            for _ in range(turns):
                if self.left:
                    self.left -= self.waste()
                    if not self.left:
                        self.position, self.moved, self.messages = self.start, at, self.messages + 1
                else:
                    self.listen()
        except BlockingIOError:
            pass
        if self.answered != self.position:
            self.answer()

    def waste(self):
        """Have WAL thrown away; how much."""
        if self.arrived is None:
            return self.socket.recv_into(WASTE, min(self.left, len(WASTE)), socket.MSG_TRUNC)
        length, told, _, _ = self.socket.recvmsg_into([memoryview(WASTE)[:self.left]], 64, socket.MSG_TRUNC)
        # What had come before the system was asked has no time.
        if told and length == self.left:
            seconds, rest = struct.unpack("@qq", told[0][2])
            self.arrived.append((self.start, seconds * 10**9 + rest))
        return length

    def note_arrivals(self):
        """From now on.  The system's clock at which a packet came, so that nobody has to be awake then."""
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.arrived = []

    def listen(self):
        """Take the beginning of a message."""
        wanted = ALL_HEADERS - len(self.head)
        data = self.socket.recv(wanted) if wanted > 0 else b""
        assert data or wanted <= 0, "the server closed the connection"
        self.head += data
        if len(self.head) < HEADER.size:
            return
        kind, length, what = HEADER.unpack_from(self.head)
        assert kind == b"d", self.head
        if what == b"w" and len(self.head) >= ALL_HEADERS:
            size = length + 1 - ALL_HEADERS
            self.start = WAL_HEADER.unpack_from(self.head, HEADER.size)[0] + size
            self.head, self.left = self.head[ALL_HEADERS:], size
        elif what == b"k" and len(self.head) > length:
            if self.head[length]:       # it wants an answer
                self.answered = 0
            self.head = self.head[length + 1:]

    def answer(self):
        """Everything that has come is written, flushed and applied."""
        self.answered = self.position
        with suppress(BlockingIOError):
            body = b"r" + struct.pack("!QQQqB", self.position, self.position, self.position, now(), 0)
            self.socket.sendall(b"d" + struct.pack("!I", len(body) + 4) + body)

    def close(self):
        """Hang up."""
        self.socket.close()


@contextmanager
def connected(port, count, name="d"):
    """So many downstreams."""
    found = []
    try:
        for number in range(count):
            found.append(Downstream(port, f"{name}{number}"))
        yield found
    finally:
        for one in found:
            one.close()


def begin(downstreams, start):
    """All of them at once."""
    for one in downstreams:
        one.ask(start)
    for one in downstreams:
        one.begin()


def receive(downstreams, finished, timeout=300):
    """Take what comes until that is so."""
    deadline = time.monotonic() + timeout
    with select.epoll() as epoll:
        numbers = {one.socket.fileno(): one for one in downstreams}
        for number in numbers:
            epoll.register(number, select.EPOLLIN)
        while not finished():
            ready = epoll.poll(0.02)
            at = time.monotonic()
            for number, _ in ready:
                numbers[number].drain(at)
            assert at < deadline, [format_lsn(one.position) for one in downstreams]


def has(downstreams, end):
    """Whether all of them have it up to there."""
    return lambda: all(one.position >= end for one in downstreams)


def used(pid):
    """Seconds of processor of a process, with those of its threads that have ended (the clock that clock_getcpuclockid(3) names)."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def title(pid):
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def memory(pids):
    """MB of memory that these processes have: their share of what several have, and what is of their own alone."""
    found = dict(memory_mb=0.0, own_mb=0.0)
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            for name, field in (("memory_mb", "Pss"), ("own_mb", "Pss_Anon")):
                found[name] += int(re.search(rf"^{field}: +(\d+)", text, re.MULTILINE)[1]) / 1024
    return found


class Contender:
    """One of those that send WAL on."""

    def __init__(self, name, primary):
        self.name, self.primary = name, primary

    def __exit__(self, *_exception):
        self.kill()

    def __enter__(self):
        return self

    def look(self):
        """Seconds of processor so far, of those who send and of all, each by its number."""
        return dict(senders=self.senders(), all={pid: used(pid) for pid in self.pids()})

    def since(self, before, sent=1e9):
        """What those who are there have used since, for each GB that was sent."""
        after = self.look()
        total = {name: sum(spent - before[name].get(pid, 0) for pid, spent in all_of.items()) for name, all_of in after.items()}
        return {f"{name}_s_per_gb": seconds / (sent / 1e9) for name, seconds in total.items()}

    def caught_up(self):
        """Wait until it has what the primary has, and has replayed that if it does so."""
        standby.wait_streaming(self.primary, self.name, 120)
        standby.wait_position(self.primary, stage=self.stage, name=self.name, timeout=300)


class OurRelay(Contender):
    """`walrider relay`."""

    stage = "flush"

    def __init__(self, primary, directory):
        super().__init__("relay", primary)
        self.there = Relay(directory, primary.port, "--wal-keep-size", KEPT, name=self.name)
        self.port, self.kill, self.stop = self.there.serves, self.there.kill, self.there.stop

    def start(self):
        """Start it, and wait until it streams."""
        self.there.start()
        self.caught_up()

    def pids(self):
        """Its processes."""
        return [self.there.process.pid]

    def senders(self):
        """Seconds of processor of the threads that send."""
        found = {}
        for task in Path(f"/proc/{self.there.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                if (task / "comm").read_text().strip() == "relay-send":
                    found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        return found

    def memory(self):
        """In MB."""
        return memory(self.pids())


class Stock(Contender):
    """A hot standby that serves others."""

    stage = "replay"

    def __init__(self, primary, directory):
        super().__init__("stock", primary)
        self.there = PgCluster(standby.clone(primary, directory, name=self.name))
        self.port, self.kill, self.stop = self.there.port, self.there.kill, self.there.stop

    def start(self):
        """Start it, and wait until it has replayed what there is."""
        standby.start_primary(self.there, hot_standby="on")
        self.caught_up()

    def pids(self):
        """Its processes."""
        return [self.there.process.pid, *self.there.children()]

    def walsenders(self):
        """Those of them that send."""
        return [pid for pid in self.there.children() if title(pid).startswith("postgres: walsender")]

    def senders(self):
        """Seconds of processor of the walsenders."""
        return {pid: used(pid) for pid in self.walsenders()}

    def memory(self):
        """In MB; and of the walsenders alone."""
        return {**memory(self.pids()), **{f"senders_{name}": value for name, value in memory(self.walsenders()).items()}}


class Direct(Contender):
    """The primary itself."""

    def __init__(self, primary):
        super().__init__("direct", primary)
        self.port = primary.port

    def start(self):
        """It is there."""

    def stop(self):
        """It stays."""

    def kill(self):
        """The same."""


def background(port, count, start, ready):
    """Downstreams that are there, in a process of their own, until it is ended."""
    with connected(port, count, "other") as others:
        begin(others, start)
        ready.set()
        receive(others, lambda: False, 600)


class Bench:
    """The primary, and those that stand between it and others."""

    def __init__(self, scratch, args, stack):
        self.scratch, self.args, self.runs = scratch, args, []
        self.primary = standby.make_primary(scratch / "primary", SETTINGS, wal_segsize_mb=16)
        stack.enter_context(standby.start_primary(self.primary))
        self.primary.pgbench("-i", "-s", args.scale, "-q")
        self.primary.psql(TABLE)
        self.script = scratch / "bulk.sql"
        self.script.write_text(BULK)
        self.contenders = [stack.enter_context(Stock(self.primary, scratch / "stock")),
                           stack.enter_context(OurRelay(self.primary, scratch / "relay"))]
        self.direct = Direct(self.primary)

    def turns(self, contenders=None):
        """(round, count, contender); in each round another one is first."""
        contenders = contenders or self.contenders
        for number in range(self.args.rounds):
            first = number % len(contenders)
            yield from product([number + 1], self.args.downstreams, contenders[first:] + contenders[:first])

    def record(self, **what):
        """Keep a run, and say so."""
        what["load_average"] = os.getloadavg()[0]
        self.runs.append({key: round(value, 5) if isinstance(value, float) else value for key, value in what.items()})
        print("  ".join(f"{key} {value}" for key, value in self.runs[-1].items()), flush=True)

    def make_backlog(self):
        """WAL that is there when others come for it, on both."""
        for one in self.contenders:
            one.start()
        self.primary.psql("SELECT pg_switch_wal()")
        self.start = parse_lsn(self.primary.lsn()) // (16 << 20) * (16 << 20)
        while parse_lsn(self.primary.lsn()) - self.start < self.args.megabytes << 20:
            self.primary.psql(BULK.replace("2000", "50000"), options="-c synchronous_commit=off")
        self.primary.psql("CHECKPOINT")
        for one in self.contenders:
            one.caught_up()
        self.end = parse_lsn(self.primary.value("SELECT pg_current_wal_flush_lsn()"))

    def backlog(self, number, count, contender, stalled=0):
        """All of it to so many; `stalled` more ask for it and read nothing."""
        with connected(contender.port, count + stalled) as downstreams:
            reading = downstreams[:count]
            before, ours, began = contender.look(), time.process_time(), time.monotonic()
            begin(downstreams, self.start)
            receive(reading, has(reading, self.end))
            seconds, ours = time.monotonic() - began, time.process_time() - ours
            sent = count * (self.end - self.start)
            found = dict(seconds=seconds, mb_per_s=sent / 1e6 / seconds, **contender.since(before, sent),
                         client_s_per_gb=ours / (sent / 1e9), kb_per_message=sent / 1e3 / sum(one.messages for one in reading), **contender.memory())
        return dict(round=number, downstreams=count + stalled, contender=contender.name, **found)

    def backlogs(self):
        """All of them."""
        for turn in self.turns():
            self.record(part="backlog", **self.backlog(*turn))

    def stalled(self):
        """The same, where one reads nothing; alone, for a second."""
        for number, count, contender in self.turns():
            if count > 1:
                self.record(part="stalled", **self.backlog(number, count - 1, contender, 1))
                continue
            with connected(contender.port, 1) as downstreams:
                begin(downstreams, self.start)
                before = contender.look()
                time.sleep(1)
                self.record(part="stalled", round=number, downstreams=1, contender=contender.name,
                            all_s_per_s=contender.since(before)["all_s_per_gb"], **contender.memory())

    def alone(self, contender):
        """Only this one is connected to the primary."""
        for one in self.contenders:
            if one is not contender and one.there.process:
                one.stop()
        if contender is not self.direct:
            if not contender.there.process:
                contender.start()
            contender.caught_up()

    def fresh(self):
        """Nothing in the table, nothing to be written: the same for each."""
        self.primary.psql("TRUNCATE bulk; TRUNCATE pgbench_history")
        self.primary.psql("CHECKPOINT")

    def live(self, load, number, count, contender):
        """A load, and those that receive it meanwhile."""
        self.fresh()
        self.alone(contender)
        start = parse_lsn(self.primary.value("SELECT pg_current_wal_flush_lsn()"))
        arguments = ["-f", self.script] if load == "bulk" else []
        over = {}
        with connected(contender.port, count) as downstreams:
            begin(downstreams, start)
            before, ours = contender.look(), time.process_time()
            process = self.primary.pgbench_start("-n", *LOADS[load], *arguments, "-j", 1, "-T", self.args.seconds)

            def wait():
                said, over["at"] = process.communicate()[0], time.monotonic()
                over["tps"] = float(re.search(r"^tps = ([\d.]+)", said, re.MULTILINE)[1])
                over["end"] = parse_lsn(self.primary.value("SELECT pg_current_wal_flush_lsn()"))
            waiting = threading.Thread(target=wait)
            waiting.start()
            receive(downstreams, lambda: "end" in over and has(downstreams, over["end"])())
            waiting.join()
            # Meanwhile all is replayed, and that belongs to the load.
            contender.caught_up()
            sent = count * (over["end"] - start)
            found = dict(tps=over["tps"], wal_mb_per_s=(over["end"] - start) / 1e6 / self.args.seconds,
                         late_ms=max(0.0, *(1000 * (one.moved - over["at"]) for one in downstreams)), **contender.since(before, sent),
                         client_s_per_gb=(time.process_time() - ours) / (sent / 1e9),
                         kb_per_message=sent / 1e3 / sum(one.messages for one in downstreams), **contender.memory())
        self.record(part="live", load=load, round=number, downstreams=count, contender=contender.name, **found)

    def lives(self):
        """All of them."""
        for load in self.args.loads:
            for turn in self.turns():
                self.live(load, *turn)

    def latency(self, number, count, contender):
        """One client at the primary, one at the contender as the last of `count`."""
        self.alone(contender)
        start = parse_lsn(self.primary.value("SELECT pg_current_wal_flush_lsn()"))
        context = multiprocessing.get_context("fork")
        ready, others = context.Event(), None
        if count > 1:
            others = context.Process(target=background, args=(contender.port, count - 1, start, ready), daemon=True)
            others.start()
            assert ready.wait(60)
        try:
            with connected(self.primary.port, 1, "near") as near, connected(contender.port, 1, "far") as far:
                begin(near + far, start)
                for one in near + far:
                    one.note_arrivals()
                process = self.primary.pgbench_start("-n", "-N", "-M", "prepared", "-c", 1, "-R", self.args.rate, "-T", self.args.seconds)
                gc.disable()
                receive(near + far, lambda: process.poll() is not None)
                gc.enable()
                said = process.communicate()[0]
        finally:
            if others:
                others.terminate()
                others.join()
        assert "tps" in said, said
        near, far = near[0].arrived, far[0].arrived
        # The first second is not counted: processes come, and caches fill.
        positions, begin_at = [position for position, _ in far], near[0][1] + min(10**9, self.args.seconds * 10**9 // 2)
        found = [(far[at][1] - when) / 1000 for position, when in near
                 if when > begin_at and (at := bisect_left(positions, position)) < len(far)]
        self.record(part="latency", round=number, downstreams=count, contender=contender.name, samples=len(found),
                    **quantiles(found), negative=sum(value < 0 for value in found))
        self.runs[-1]["us"] = [round(value) for value in found]

    def latencies(self):
        """All of them; `direct` alone, since it has no others beside it."""
        for number, count, contender in self.turns([self.direct, *self.contenders]):
            if contender is not self.direct or count == 1:
                self.latency(number, count, contender)

    def run(self):
        """All parts; false if somebody interrupts it."""
        parts = dict(backlog=self.backlogs, stalled=self.stalled, latency=self.latencies, live=self.lives)
        try:
            self.make_backlog()
            for part, measure in parts.items():
                if part in self.args.parts:
                    measure()
        except KeyboardInterrupt:
            return False
        return True


def quantiles(found):
    """Median, p95 and p99 of microseconds."""
    found = sorted(found)
    at = lambda share: found[min(len(found) - 1, int(share * len(found)))]      # noqa: E731
    return dict(p50_us=at(0.5), p95_us=at(0.95), p99_us=at(0.99))


# Of each part: title, and its columns as (figure, heading, form).
COST = [("senders_s_per_gb", "senders s/GB", ".3f"), ("all_s_per_gb", "all s/GB", ".3f")]
SIZE = ("kb_per_message", "kB each", ".1f")
MEMORY = [("senders_own_mb", "senders MB", ".1f"), ("own_mb", "own MB", ".1f"), ("memory_mb", "all MB", ".1f")]
COLUMNS = {
    "backlog": [("seconds", "seconds", ".2f"), ("mb_per_s", "MB/s", ".0f"), *COST, ("client_s_per_gb", "client s/GB", ".3f"), SIZE, *MEMORY],
    "stalled": [("seconds", "seconds", ".2f"), ("mb_per_s", "MB/s", ".0f"), *COST, ("all_s_per_s", "idle s/s", ".4f"), *MEMORY],
    "latency": [("p50_us", "p50 us", ".0f"), ("p95_us", "p95 us", ".0f"), ("p99_us", "p99 us", ".0f")],
    "live": [("tps", "commits/s", ".0f"), ("wal_mb_per_s", "WAL MB/s", ".1f"), ("late_ms", "late ms", ".0f"), *COST,
             ("client_s_per_gb", "client s/GB", ".3f"), SIZE, *MEMORY],
}
RATIOS = {"backlog": ["mb_per_s", "senders_s_per_gb", "all_s_per_gb"], "stalled": ["mb_per_s"], "latency": ["p50_us"],
          "live": ["wal_mb_per_s", "senders_s_per_gb", "all_s_per_gb"]}
TITLES = {
    "backlog": "a backlog, from its beginning to its end: MB/s to all together; processor of the senders and of all for each GB sent; memory",
    "stalled": "the same, one of them reads nothing; alone, what it costs a second that it does not",
    "latency": "how much later than a client at the primary, in microseconds",
    "live": "under load: WAL of the primary, how long after the load the last downstream has it all, processor for each GB sent, memory",
}


def table(runs):
    """Medians of the rounds, and the relay's of stock's: least and greatest of the rounds in parentheses."""
    lines = []
    for part, columns in COLUMNS.items():
        mine = [run for run in runs if run["part"] == part]
        if not mine:
            continue
        lines += [TITLES[part], f"{'':31}" + "".join(f"{heading:>{len(heading) + 3}}" for _, heading, _ in columns)]
        for key in dict.fromkeys((run.get("load", ""), run["downstreams"]) for run in mine):
            these = [run for run in mine if (run.get("load", ""), run["downstreams"]) == key]
            for name in sorted({run["contender"] for run in these}):
                own = [run for run in these if run["contender"] == name]
                line = f"{key[0]:<9}{key[1]:>3} downstreams  {name:<7}"
                for figure, heading, form in columns:
                    found = [run[figure] for run in own if figure in run]
                    line += f"{format(statistics.median(found), form) if found else '–':>{len(heading) + 3}}"
                lines.append(line + (f"   {sum(run['samples'] for run in own)} samples" if part == "latency" else ""))
            for figure in RATIOS[part]:
                rounds = {(run["round"], run["contender"]): run[figure] for run in these if figure in run}
                numbers = sorted({number for number, _ in rounds})
                pairs = [rounds[number, "relay"] / rounds[number, "stock"] for number in numbers
                         if (number, "relay") in rounds and rounds.get((number, "stock"))]
                if pairs:
                    ratio = statistics.median(value for (_, name), value in rounds.items() if name == "relay") / \
                        statistics.median(value for (_, name), value in rounds.items() if name == "stock")
                    lines.append(f"{'':24}relay/stock  {figure} {ratio:.2f} ({min(pairs):.2f}-{max(pairs):.2f})")
        lines.append("")
    return "\n".join(lines)


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.relay", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="of live")
    parser.add_argument("--downstreams", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="of each load")
    parser.add_argument("--megabytes", type=int, default=512, help="of the backlog; less than is kept, which is " + KEPT)
    parser.add_argument("--rate", type=int, default=200, help="commits a second, for latency")
    parser.add_argument("--scale", type=int, default=10, help="of pgbench")
    parser.add_argument("--binary-of", metavar="COMMIT", help="what the binary was built of, if not of this checkout")
    parser.add_argument("--smoke", action="store_true", help="all of it, small and once: shows that it works, no more")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-relay.json and the table in .txt")
    args = parser.parse_args(argv)
    if args.smoke:
        args.downstreams, args.rounds, args.seconds, args.megabytes, args.scale = [1, 2], 1, 1, 20, 1
    when, load_before = datetime.now(timezone.utc), os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        bench = Bench(Path(scratch), args, stack)
        complete, runs = bench.run(), bench.runs
    of = f"binary of {args.binary_of}" if args.binary_of else commit()
    result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=of, postgresql=install.version(),
                  command=" ".join(["python3 -m bench.relay", *map(nameless, argv)]), load_average_before=round(load_before[0], 2),
                  rounds=args.rounds, seconds=args.seconds, megabytes=args.megabytes, rate=args.rate, complete=complete, runs=runs)
    text = ("" if complete else "interrupted\n\n") + table(runs)
    print("\n" + text)
    if args.save:
        name, loads = f"{when:%Y-%m-%d}-relay", [run["load_average"] for run in runs]
        save(result, args.save / f"{name}.json")
        (args.save / f"{name}.txt").write_text(
            f"{result['machine']}; PostgreSQL {result['postgresql']}; {of}\n{result['command']}\n"
            f"{args.rounds} rounds; load average of the machine before it {load_before[0]:.1f}, meanwhile {min(loads):.1f}-{max(loads):.1f}, "
            f"which is also ours\n\n{text}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
