"""The output plugin walrider_pgoutput: what it sends is what pgoutput sends, less what is empty; and stock subscribers live on it."""

import os
import re
import time

import pytest

from tests.lab.oracle.pgoutput import Trimmed
from tests.lab.server.cluster import PgCluster, ServerError, copy_tree

PLUGIN = "walrider_pgoutput"
SETTINGS = """
wal_level = logical
max_wal_senders = 8
max_connections = 40
logical_decoding_work_mem = 64kB
autovacuum = off
shared_buffers = 32MB
max_wal_size = 2GB
max_logical_replication_workers = 8
wal_retrieve_retry_interval = 100ms
"""
TABLES = """
CREATE TABLE t (id int PRIMARY KEY, v text);
CREATE TABLE parted (id int, k int, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
CREATE TABLE parted_0 PARTITION OF parted FOR VALUES IN (0);
CREATE TABLE own (id serial, v text);
"""
# Protocol, options besides it, whether the slot knows of two phases.
PROTOCOLS = {1: ((), False), 2: (("streaming", "on"), False), 3: (("streaming", "on"), True), 4: (("streaming", "parallel"), True)}


@pytest.fixture(scope="module")
def template(scratch):
    """As initdb leaves it, with the tables; a module's own."""
    server = PgCluster.init(scratch / "logical", conf=SETTINGS)
    if "WALRIDER_PLUGIN_DIR" in os.environ:
        server.configure(f"dynamic_library_path = '{os.environ['WALRIDER_PLUGIN_DIR']}:$libdir'")
    with server.start():
        if server.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "1":
            server.psql(f"ALTER SYSTEM SET output_plugin_libraries = 'pgoutput', '{PLUGIN}'")
        server.psql(TABLES)
        server.stop()
    return server.data_dir


@pytest.fixture
def make_server(template, work):
    """Makes servers of the template; they end with the test."""
    made = []

    def make(name, conf=""):
        server = PgCluster(copy_tree(template, work / name))
        made.append(server)
        server.configure(conf)
        return server.start()

    yield make
    for server in made:
        server.kill()


def wait_for(condition, what, timeout=60):
    """Poll until it holds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)
    return value


# The same messages, less the empty ones

class Load:
    """Transactions at random, interleaved, of a few sessions."""

    def __init__(self, server, rng, sessions):
        self.server, self.rng, self.sessions = server, rng, sessions
        self.next_id, self.prepared, self.busy = 0, [], {}

    def change(self):
        """A statement, which may be for a published table, and may be large."""
        self.next_id += 1000
        first, rows = self.next_id, self.rng.choice((1, 1, 3, 300))
        return self.rng.choice((
            f"INSERT INTO t SELECT i, repeat('x', 300) FROM generate_series({first}, {first + rows - 1}) i",
            f"INSERT INTO parted SELECT i, 0 FROM generate_series({first}, {first + rows - 1}) i",
            f"UPDATE t SET v = 'u{first}' WHERE id IN (SELECT id FROM t WHERE v LIKE 'x%' AND id % 1000 = 0 "
            "ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)",
            *[f"INSERT INTO own (v) SELECT repeat('y', 300) FROM generate_series(1, {rows})"] * 5,
            f"CREATE TABLE made_{first} (id int)",
            f"SELECT pg_logical_emit_message(true, 'p', '{first}')",
            f"SELECT pg_logical_emit_message(false, 'p', '{first}')"))

    def steps(self):
        """A transaction's statements; one at a time is run."""
        yield "BEGIN"
        for number in range(self.rng.choice((0, 1, 1, 2, 3))):
            if self.rng.random() < 0.4:
                yield f"SAVEPOINT s{number}"
                yield self.change()
                yield f"SAVEPOINT deeper{number}"
                yield self.change()
                yield self.rng.choice((f"ROLLBACK TO s{number}", f"ROLLBACK TO deeper{number}", f"RELEASE s{number}"))
            else:
                yield self.change()
        if self.rng.random() < 0.5:
            gid = f"g{self.next_id}_{self.rng.random()}"
            yield f"PREPARE TRANSACTION '{gid}'"
            self.prepared.append(gid)
        else:
            yield self.rng.choice(("COMMIT", "COMMIT", "ROLLBACK"))

    def run(self, steps):
        """So many statements."""
        for _ in range(steps):
            if self.prepared and self.rng.random() < 0.1:
                gid = self.prepared.pop(self.rng.randrange(len(self.prepared)))
                self.server.psql(f"{self.rng.choice(('COMMIT', 'COMMIT', 'ROLLBACK'))} PREPARED '{gid}'")
            session = self.rng.choice(self.sessions)
            step = next(self.busy.setdefault(session, self.steps()), None)
            if step is None:
                del self.busy[session]
            else:
                session.run(step)
            if len(self.prepared) > 15:
                self.server.psql(f"COMMIT PREPARED '{self.prepared.pop(0)}'")


def take(server, slot, protocol, *, verb="get", publication="p"):
    """A decoding session: what it sends, as bytes."""
    options = ("proto_version", str(protocol), "publication_names", publication, "messages", "true", *PROTOCOLS[protocol][0])
    options = ", ".join(f"'{option}'" for option in options)
    rows = server.psql(f"SELECT encode(data, 'hex') FROM pg_logical_slot_{verb}_binary_changes('{slot}', NULL, NULL, {options})")
    return [bytes.fromhex(row[0]) for row in rows]


def make_slots(server):
    """A slot of each plugin for each protocol, by protocol."""
    slots = {protocol: (f"stock_{protocol}", f"ours_{protocol}") for protocol in PROTOCOLS}
    server.psql("".join(f"SELECT pg_create_logical_replication_slot('{slot}', '{plugin}', false, {PROTOCOLS[protocol][1]});"
                        for protocol, pair in slots.items() for slot, plugin in zip(pair, ("pgoutput", PLUGIN))))
    return slots


@pytest.mark.every_major
@pytest.mark.parametrize("mode", ["buffered", "immediate"])
def test_messages(make_server, rng, mode):
    """Sessions begin and end anywhere: each sends what pgoutput would, without what is empty, to the byte."""
    server = make_server("publisher", f"debug_logical_replication_streaming = {mode}")
    server.psql("CREATE PUBLICATION p FOR TABLE t, parted")
    slots = make_slots(server)
    reference = {protocol: Trimmed() for protocol in slots}
    counts = {protocol: [0, 0] for protocol in slots}
    with server.session() as one, server.session() as two, server.session() as three:
        load = Load(server, rng, [one, two, three])
        for _ in range(8):
            load.run(40)
            server.psql("INSERT INTO own (v) VALUES ('flushed')")       # so that both see the same end of WAL
            for protocol, (stock, ours) in slots.items():
                sent, got = take(server, stock, protocol), take(server, ours, protocol)
                wanted = reference[protocol].session(sent)
                assert got == wanted, f"protocol {protocol}"
                counts[protocol][0] += len(sent)
                counts[protocol][1] += len(got)
    assert all(got <= sent for sent, got in counts.values())
    assert counts[1][0] == counts[1][1] and counts[4][1] < counts[4][0], counts


@pytest.mark.every_major
def test_nothing_published(make_server):
    """Not a message, of any kind of transaction; pgoutput's are counted."""
    server = make_server("publisher")
    server.psql("CREATE PUBLICATION p FOR TABLE t")
    slots = make_slots(server)
    for number in range(10):
        server.psql(f"""
            INSERT INTO own (v) VALUES ('plain');
            BEGIN; INSERT INTO own (v) VALUES ('prepared'); PREPARE TRANSACTION 'c{number}'; COMMIT PREPARED 'c{number}';
            BEGIN; CREATE TABLE made{number} (i int); PREPARE TRANSACTION 'd{number}'; ROLLBACK PREPARED 'd{number}';
            BEGIN; INSERT INTO own (v) SELECT repeat('s', 300) FROM generate_series(1, 1000); COMMIT;
            BEGIN; INSERT INTO own (v) SELECT repeat('s', 300) FROM generate_series(1, 1000);
            SAVEPOINT a; INSERT INTO own (v) SELECT repeat('a', 300) FROM generate_series(1, 1000); ROLLBACK TO a;
            PREPARE TRANSACTION 'p{number}'; COMMIT PREPARED 'p{number}';""")
    counts = {protocol: [len(take(server, slot, protocol, verb="peek")) for slot in pair] for protocol, pair in slots.items()}
    print(counts)
    assert all(ours == 0 for _, ours in counts.values()) and counts[3][0] > 100
