"""`walrider relay`, and stock servers downstream of it."""

import re
import socket
import struct
import subprocess
from pathlib import Path

from tests.lab import install
from tests.lab.server.cluster import PgCluster, format_lsn, free_port, parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.early_client import EarlyClient
from tests.lab.standby.standby import LOCALLY, Walrider, clone, conninfo, start_primary
from tests.lab.waiting import wait_for
from tests.lab.walrider import binary

LOOPBACK = '[[allow]]\nfrom = ["loopback"]\nmethod = "trust"\n'


class Relay(Walrider):
    """A relay of whoever listens on a port.  `serves` is the port that those downstream connect to."""

    def __init__(self, directory, upstream, *options, name=standby.NAME, access=LOOPBACK, serves=None, disk=None):
        super().__init__(directory, *options, disk=disk)
        self.upstream, self.name = upstream, name
        self.serves = serves or free_port()
        Path(directory).mkdir(exist_ok=True)
        self.access = Path(f"{directory}.access.toml")
        self.access.write_text(access)

    def conninfo(self):
        """Of whom it relays, a port or a whole connection string."""
        return self.upstream if isinstance(self.upstream, str) else conninfo(self.upstream, self.name)

    def launch(self, env=None):
        """Start, and return at once."""
        self.spawn([binary(), "relay", "-D", self.data_dir, "-d", self.conninfo(), "--http",
                    f"127.0.0.1:{self.port}", "--listen", f"127.0.0.1:{self.serves}", "--access", self.access,
                    "--status-interval", "1s", "--retry-interval", "200ms", *self.options],
                   env or (self.disk.environment() if self.disk else None))
        return self

    def start(self, timeout=60):
        """Start, and wait until it receives or tries to."""
        self.launch()

        def began():
            assert self.process.poll() is None, self.log_tail()
            try:
                return self.state() != "starting"
            except OSError:
                return None
        wait_for(began, self.log_tail, timeout)
        return self

    def downstream(self, name):
        """What /status says of one that is served; None while it is not there."""
        return next((one for one in self.status()["downstreams"] if one["application_name"] == name), None)

    def wait_downstream(self, name, timeout=60):
        """Wait until it streams."""
        wait_for(lambda: (self.downstream(name) or {}).get("streaming"), lambda: f"{name}: {self.status()}\n{self.log_tail()}", timeout)


    def memory(self):
        """Resident bytes."""
        return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())[1]) << 10

    def threads(self):
        """How many there are."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def slots(self):
        """What /status says of the slots."""
        return self.status()["slots"]

    def segments(self):
        """The numbers of the segments that are there, whole or in part, of 1 MB each."""
        names = (re.match(r"[0-9A-F]{8}([0-9A-F]{8})([0-9A-F]{8})(\.partial)?$", file.name) for file in self.data_dir.iterdir())
        return {(int(name[1], 16) << 12) + int(name[2], 16) for name in names if name}


def segment_of(lsn):
    """The number of the segment of 1 MB that has this position."""
    return parse_lsn(lsn) >> 20


def ask(relay, command, user="postgres", options="", check=True, psql=None):
    """Rows of a replication command."""
    done = subprocess.run([psql or install.program("psql"), "-XAtw", "-F", "|", "-d",
                           f"host=127.0.0.1 port={relay.serves} user={user} replication=true {options}", "-c", command],
                          capture_output=True, text=True, timeout=60)
    if check:
        assert done.returncode == 0, done.stderr
        return [line.split("|") for line in done.stdout.splitlines()]
    return done


class Raw(EarlyClient):
    """A client over TCP that says and reads no more than it is told to, also what no library would; who it is, it has yet to say."""

    def __init__(self, port, timeout=30):
        self._open(socket.create_connection(("127.0.0.1", port), timeout))

    def send(self, data):
        """Bytes as they are."""
        self.socket.sendall(data)
        return self

    def startup(self, **parameters):
        """The first packet, for physical replication."""
        self._startup(dict(dict(user="postgres", replication="true", application_name="raw"), **parameters))
        return self

    def message(self, tag, body=b""):
        """One, as the protocol frames it."""
        return self.send(frame(tag, body))

    def query(self, text):
        """A simple query; what it is answered is read by whoever wants to."""
        return self.message(b"Q", text.encode() + b"\0")

    def read(self):
        """The next message, an error too: its type and its body."""
        while not (message := self._take()):
            piece = self.socket.recv(1 << 16)
            if not piece:
                raise ConnectionError("the relay has closed the connection")
            self.buffer += piece
        return message

    def read_until(self, *wanted):
        """Messages up to the first of these types; that one."""
        while True:
            tag, body = self.read()
            if tag in wanted:
                return tag, body


class Client(Raw):
    """One that was let in, and streams."""

    def __init__(self, relay, user="postgres", name="client"):
        super().__init__(relay.serves, None)
        self.startup(user=user, application_name=name)._until_ready()

    def stream(self, start, timeline=1, slot=None):
        """START_REPLICATION; returns when the stream has begun."""
        slot = f"SLOT {slot} " if slot else ""
        self.query(f"START_REPLICATION {slot}PHYSICAL {format_lsn(start)} TIMELINE {timeline}")
        tag, body = self._next()
        assert tag == b"W", (tag, body)
        return self

    def wal(self, upto):
        """The WAL up to there, as it comes."""
        data = bytearray()
        while True:
            message = self.receive()
            assert message and message["kind"] in ("wal", "keepalive"), (message, len(data))
            if message["kind"] == "wal":
                data += message["data"]
                if message["start"] + len(message["data"]) >= upto:
                    return bytes(data)


def frame(tag, body=b""):
    """A message."""
    return tag + struct.pack(">I", len(body) + 4) + body


def hot_standby(primary, data_dir, relay, name, slot=None, **settings):
    """A stock hot standby, a backup of the primary, that streams from the relay."""
    server = PgCluster(clone(primary, data_dir, relay.serves, name, slot))
    start_primary(server, hot_standby="on", wal_receiver_status_interval="1s", **settings)
    relay.wait_downstream(name)
    return server


def rows(server):
    """The table."""
    return server.psql("SELECT id, v FROM t ORDER BY id")


def write(server, count=2000):
    """Rows that wait for nobody; where they end."""
    server.psql(f"INSERT INTO t (v) SELECT repeat('w', 100) FROM generate_series(1, {count})", options=LOCALLY)
    return server.wal_end()


def wait_replayed(server, lsn, timeout=60):
    """Wait until a hot standby has replayed up to there."""
    query = f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'"
    wait_for(lambda: server.value(query) == "t", lambda: f"{lsn}: {server.value('SELECT pg_last_wal_replay_lsn()')}\n{server.log_tail()}", timeout)


def segment(timeline, number, system=1, size=1 << 20, fill=b""):
    """Name and bytes of a segment that is one by its first page header, of PostgreSQL 18, and nothing else."""
    page = struct.pack("<HHIQI4xQII", 0xD118, 2, timeline, number * size, 0, system, size, 8192)
    return f"{timeline:08X}{0:08X}{number:08X}", page + fill * (size - len(page)) if fill else page + bytes(size - len(page))


def that_serves(data_dir, access, *options):
    """`walrider standby --listen`, not started; as a relay has it, `serves` is its port."""
    port = free_port()
    access.write_text(LOOPBACK)
    standby = Walrider(data_dir, "--listen", f"127.0.0.1:{port}", "--access", access, "--status-interval", "1s",
                       "--restartpoint-wal", "4MB", "--restartpoint-interval", "1s", "--wal-keep", "0", *options)
    standby.serves, standby.access = port, access
    return standby


def wait_downstream(server, name):
    """Wait until a standby streams from there."""
    is_there = lambda: any(one["application_name"] == name and one["streaming"] for one in server.status()["downstreams"])
    wait_for(is_there, lambda: f"{name}: {server.status()}\n{server.log_tail()}")


def behind(primary, data_dir, serving, name, slot=None):
    """A stock hot standby of the primary that streams from a Walrider standby."""
    server = PgCluster(clone(primary, data_dir, serving.serves, name, slot))
    start_primary(server, hot_standby="on", wal_receiver_status_interval="1s")
    wait_downstream(serving, name)
    return server
