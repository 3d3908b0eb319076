"""Primaries for tests of walrider.stream_wal(), with the extension: `make extension` has to have installed it. Fixtures, and questions."""

import os
import re

import pytest

from tests.lab import install
from tests.lab.faults.shim import Disk
from tests.lab.server.cluster import PgCluster, copy_tree, format_lsn, parse_lsn, run
from tests.lab.waiting import wait_for

PAGE, SEGMENT = 8192, 1 << 20
SETTINGS = """
fsync = on
max_wal_senders = 6
wal_keep_size = 2GB
max_wal_size = 2GB
checkpoint_timeout = 1h
autovacuum = off
shared_buffers = 32MB
log_replication_commands = on
"""
PRELOAD = "shared_preload_libraries = 'walrider'\n"
SYNC = "synchronous_standby_names = 'early'\n"
LOCAL = "-c synchronous_commit=local"

@pytest.fixture(scope="session")
def template(scratch):
    """As initdb leaves it, with the extension."""
    if (scratch / "early").exists():        # each module that imports this has a fixture of its own
        return scratch / "early"
    server = PgCluster.init(scratch / "early", wal_segsize_mb=1, conf=SETTINGS)
    with server.start():
        server.psql("CREATE EXTENSION walrider; CREATE TABLE t (id int PRIMARY KEY, filler text)")
        server.stop()
    return server.data_dir


@pytest.fixture
def make_server(template, work):
    """Makes primaries of the template; they end with the test."""
    made = []

    def make(conf="", disk=None, start=True):
        server = PgCluster(copy_tree(template, work / f"server{len(made)}"))
        made.append(server)
        server.configure(conf)
        if disk:
            server.own_environment = disk.environment()
        return server.start() if start else server

    yield make
    for server in made:
        server.kill()


@pytest.fixture(params=[False, True], ids=["loaded", "preloaded"])
def preload(request):
    """The library as the first sender finds it, or in every backend."""
    return PRELOAD if request.param else ""


@pytest.fixture
def disk(work):
    """Slows down fsync of WAL."""
    return Disk(work / "disk", "pg_wal")


def flushed(server):
    return parse_lsn(server.value("SELECT pg_current_wal_flush_lsn()"))


def inserted(server):
    return parse_lsn(server.wal_end())


def stat(server, columns, pid=None):
    """Columns of the view, of the only stream."""
    return server.psql(f"SELECT {columns} FROM walrider.stat_early_stream" + (f" WHERE pid = {pid}" if pid else ""))[0]


def in_fsync(server, query):
    """A statement's commit is being flushed: what is inserted from now on is not part of that."""
    wait_for(lambda: server.psql(f"SELECT 1 FROM pg_stat_activity WHERE wait_event = 'WalSync' AND query LIKE '%{query}%' "
                                 "AND pid <> pg_backend_pid()"), "the fsync")


def walsender(server):
    return int(stat(server, "pid")[0])


def wal_files(server, start, end, timeline=1):
    """The primary's WAL between two positions, from its files."""
    data = bytearray()
    for number in range(start // SEGMENT, (end - 1) // SEGMENT + 1):
        name = f"{timeline:08X}{number * SEGMENT >> 32:08X}{number % ((1 << 32) // SEGMENT):08X}"
        data += (server.data_dir / "pg_wal" / name).read_bytes()
    offset = start % SEGMENT
    return bytes(data[offset:offset + end - start])


def record_starts(server, start, end, *options):
    """Where the records begin, of those that these options of pg_waldump are for."""
    out = run([install.program("pg_waldump"), "-p", server.data_dir / "pg_wal", "-s", format_lsn(start),
               "-e", format_lsn(end), *options]).stdout
    return {parse_lsn(lsn) for lsn in re.findall(r" lsn: ([0-9A-F]+/[0-9A-F]+),", out)}


def check_bytes(server, follower, end):
    """What came is what the files have, in pieces that end where they may."""
    assert bytes(follower.wal[:end - follower.start_lsn]) == wal_files(server, follower.start_lsn, end)
    starts = record_starts(server, follower.start_lsn, end) | {follower.received, end}
    for message in follower.messages:
        if message["kind"] == "wal":
            assert message["length"] <= 16 * PAGE
            stop = message["start"] + message["length"]
            assert stop % PAGE == 0 or stop in starts or stop >= end, f"a record is split at {format_lsn(stop)}"


def load(server):
    """Small and large transactions, bulk, switches and a checkpoint."""
    clients = [server.session() for _ in range(4)]
    for step in range(20):
        for number, client in enumerate(clients):
            client.send(f"INSERT INTO t VALUES ({step * 10 + number}, repeat('x', {step * 300}))")
        if step % 7 == 3:
            server.psql("SELECT pg_switch_wal()")
        if step == 10:
            server.psql("CREATE TABLE IF NOT EXISTS bulk AS SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 20000) i; CHECKPOINT")
    for client in clients:
        client.wait()
        client.close()


def is_gone(pid):
    return not os.path.exists(f"/proc/{pid}")
