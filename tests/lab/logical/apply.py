"""A publisher, a target, and `walrider logical apply` between them."""

import json
import re
import signal
import urllib.error
import urllib.request
from contextlib import contextmanager

from tests.lab import walrider
from tests.lab.logical import load
from tests.lab.server.cluster import PgCluster, copy_tree, free_port, parse_lsn
from tests.lab.standby.standby import Standby
from tests.lab.waiting import wait_for

PUBLISHER = """
wal_level = logical
max_wal_senders = 12
max_replication_slots = 12
logical_decoding_work_mem = 64kB
autovacuum = off
shared_buffers = 32MB
max_wal_size = 2GB
"""
# Replication origins are bounded by the second before PostgreSQL 18, and by max_active_replication_origins from then on.
TARGET = """
wal_level = logical
max_replication_slots = 40
autovacuum = off
shared_buffers = 32MB
max_wal_size = 2GB
deadlock_timeout = 10s
"""
SLOT = "apply"


def make_publisher(data_dir, conf=""):
    """A publisher, not yet running."""
    server = PgCluster.init(data_dir, conf=PUBLISHER + conf)
    return server


def make_target(data_dir, conf=""):
    """A target, not yet running."""
    server = PgCluster.init(data_dir, conf=TARGET + conf)
    if "18" in (data_dir / "PG_VERSION").read_text():
        server.configure("max_active_replication_origins = 40")
    return server


def publish(server, tables="ALL TABLES", slot=SLOT, options="publish_via_partition_root = true", plugin="pgoutput", two_phase=True):
    """A publication `p` and a slot."""
    tables = tables if tables == "ALL TABLES" else f"TABLE {tables}"
    server.psql(f"CREATE PUBLICATION p FOR {tables} WITH ({options})")
    server.psql(f"SELECT pg_create_logical_replication_slot('{slot}', '{plugin}', false, {str(two_phase).lower()})")


def templates_of(publisher, target, ready=lambda publisher: None):
    """Both with the tables of the load, and stopped; `ready` does what else the publisher needs. Their directories."""
    with publisher.start(), target.start():
        publisher.psql(load.PUBLISHER)
        target.psql(load.TARGET)
        ready(publisher)
        publisher.stop()
        target.stop()
    return publisher.data_dir, target.data_dir


@contextmanager
def running(templates, work):
    """Copies of both, running."""
    made = [PgCluster(copy_tree(data_dir, work / data_dir.name)) for data_dir in templates]
    with made[0].start(), made[1].start():
        yield made


def contents(server, tables, database="postgres"):
    """All rows of all tables, sorted, as text."""
    rows = {}
    for table in tables:
        rows[table] = sorted("\t".join(row) for row in server.psql(f"SELECT t::text FROM {table} t", database))
    return rows


def assert_equal(publisher, target, tables, columns="*"):
    """Both have the same rows, and say which differ."""
    for table in tables:
        left, right = (sorted(row[0] for row in server.psql(f"SELECT t::text FROM (SELECT {columns} FROM {table}) t", ""
                       or "postgres")) for server in (publisher, target))
        if left != right:
            missing, more = [row for row in left if row not in right][:5], [row for row in right if row not in left][:5]
            raise AssertionError(f"{table}: {len(left)} rows and {len(right)}; the target lacks {missing} and has {more}")


class Apply(Standby):
    """The process."""

    def __init__(self, work, publisher, target, *options, name=SLOT, source=None, sink=None, publication="p"):
        super().__init__(work / f"apply-{name}")
        self.port = free_port()
        self.slot = name
        self.publisher, self.target = publisher, target
        self.command = [walrider.binary(), "logical", "apply", "--source", source or publisher.dsn(), "--target",
                        sink or target.dsn(), "-S", name, "-P", publication, "--http", f"127.0.0.1:{self.port}", *options]

    def start(self, *options):
        """Start it; returns at once."""
        return self.spawn([*self.command, *options])

    def run(self, *options, timeout=60):
        """Run until it ends by itself: exit code and log of this run."""
        before = len(self.log_text())
        self.spawn([*self.command, *options])
        return self.wait_end(timeout), self.log_text()[before:]

    def status(self):
        """/status, parsed; None while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status", timeout=10) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return None

    def metrics(self):
        """/metrics as a dict of series."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (re.split(r" (?=\S+$)", line) for line in lines if not line.startswith("#"))}

    def confirmed(self):
        """How far the publisher knows that everything is durable on the target."""
        return parse_lsn(self.publisher.value(
            f"SELECT coalesce(confirmed_flush_lsn, '0/0') FROM pg_replication_slots WHERE slot_name = '{self.slot}'"))

    def wait_caught_up(self, timeout=60):
        """Until all that is committed now is applied, durable and told."""
        end = parse_lsn(self.publisher.value("SELECT pg_current_wal_insert_lsn()"))
        # The publisher sends what it has flushed; an asynchronous end of WAL is flushed with this.
        self.publisher.psql("SELECT pg_logical_emit_message(true, 'walrider-test', '')")

        def there():
            assert self.process is None or self.process.poll() is None, f"ended\n{self.log_tail(40)}"
            return self.confirmed() >= end

        def state():
            sender = self.publisher.psql("SELECT r, pg_current_wal_flush_lsn() FROM pg_stat_replication r")
            slots = self.publisher.psql("SELECT s FROM pg_replication_slots s")
            return f"{self.status()}\nwanted {end:X}; {sender}; {slots}\n{self.log_tail(40)}"
        wait_for(there, state, timeout, every=0.05)

    def stop(self, number=signal.SIGINT, timeout=60):
        """Stop it cleanly."""
        super().stop(number, timeout)
