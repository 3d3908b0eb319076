"""The output plugin walrider_pgoutput: what it sends is what pgoutput sends, less what is empty; and stock subscribers live on it."""

import os
import re
import time

import pytest

from tests.lab.faults.cutter import Cutter
from tests.lab.oracle.pgoutput import Lasting, Trimmed, undescribed, without_descriptions
from tests.lab.install import program
from tests.lab.server.cluster import PgCluster, ServerError, copy_tree, run
from tests.lab.waiting import wait_for

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
# Of the messages behind which a connection is cut, every so many; 1 in a soak.
BOUNDARY_STEP = int(os.environ.get("WALRIDER_BOUNDARY_STEP", "9"))
# Protocol, options besides it, whether the slot knows of two phases.
PROTOCOLS = {1: ((), False), 2: (("streaming", "on"), False), 3: (("streaming", "on"), True), 4: (("streaming", "parallel"), True)}


@pytest.fixture(scope="module")
def template(scratch):
    """As initdb leaves it, with the tables; a module's own."""
    server = PgCluster.init(scratch / "logical", conf=SETTINGS)
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


# The same messages, less the empty ones

class Load:
    """Transactions at random, interleaved, of a few sessions."""

    def __init__(self, server, rng, sessions, rollbacks):
        self.server, self.rng, self.sessions, self.rollbacks = server, rng, sessions, rollbacks
        self.ends = ("COMMIT", "COMMIT", "ROLLBACK") if rollbacks else ("COMMIT",)
        self.marks = ("ROLLBACK TO s{0}", "ROLLBACK TO deeper{0}", "RELEASE s{0}") if rollbacks else ("RELEASE s{0}",)
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
            # pgoutput does not say of which subtransaction a message is.
            f"SELECT pg_logical_emit_message({'false' if self.rollbacks else 'true'}, 'p', '{first}')",
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
                yield self.rng.choice(self.marks).format(number)
            else:
                yield self.change()
        if self.rng.random() < 0.5:
            gid = f"g{self.next_id}_{self.rng.random()}"
            yield f"PREPARE TRANSACTION '{gid}'"
            self.prepared.append(gid)
        else:
            yield self.rng.choice(self.ends)

    def run(self, steps):
        """So many statements."""
        for _ in range(steps):
            if self.prepared and self.rng.random() < 0.1:
                gid = self.prepared.pop(self.rng.randrange(len(self.prepared)))
                self.server.psql(f"{self.rng.choice(self.ends)} PREPARED '{gid}'")
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
@pytest.mark.parametrize("mode, rollbacks", [("buffered", True), ("immediate", False), ("immediate", True)])
def test_messages(make_server, rng, mode, rollbacks):
    """Sessions begin and end anywhere: each sends what pgoutput would, to the byte, without what is empty.

    An earlier PREPARE is judged with empty caches: relations are described again, and an abort may be seen earlier."""
    server = make_server("publisher", f"debug_logical_replication_streaming = {mode}")
    server.psql("CREATE PUBLICATION p FOR TABLE t, parted")
    slots = make_slots(server)
    reference = {protocol: Trimmed() for protocol in slots}
    lasts = {protocol: (Lasting(), Lasting()) for protocol in slots}
    counts = {protocol: [0, 0] for protocol in slots}
    with server.session() as one, server.session() as two, server.session() as three:
        load = Load(server, rng, [one, two, three], rollbacks)
        for _ in range(6):
            load.run(40)
            server.psql("INSERT INTO own (v) VALUES ('flushed')")       # so that both see the same end of WAL
            for protocol, (stock, ours) in slots.items():
                sent, got = take(server, stock, protocol), take(server, ours, protocol)
                wanted = reference[protocol].session(sent)
                if rollbacks:
                    wanted, found = (lasting.session(messages) for lasting, messages in zip(lasts[protocol], (wanted, got)))
                    assert found == wanted, f"protocol {protocol}"
                else:
                    assert without_descriptions(got) == without_descriptions(wanted), f"protocol {protocol}"
                    assert not undescribed(got), f"protocol {protocol}"
                counts[protocol][0] += len(sent)
                counts[protocol][1] += len(got)
    assert all(got <= sent for sent, got in counts.values())
    assert counts[4][1] < counts[4][0], counts


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
    sent = {protocol: [take(server, slot, protocol, verb="peek") for slot in pair] for protocol, pair in slots.items()}
    counts = {protocol: (len(stock), sum(map(len, stock)), len(ours)) for protocol, (stock, ours) in sent.items()}
    print("messages and bytes of pgoutput, messages of ours:", counts)
    assert all(ours == 0 for _, _, ours in counts.values()) and counts[3][0] > 100


def test_a_publication_that_changes_beside(make_server):
    """A publication gets a table, or loses it, between a transaction's change of that table and its PREPARE; then the walsender goes. What
    was sent of it, and what is sent of its end, must fit together: a prepared transaction stayed on the subscriber for ever."""
    server = make_server("publisher")
    server.psql(f"CREATE PUBLICATION p FOR TABLE parted; SELECT pg_create_logical_replication_slot('s', '{PLUGIN}', false, true)")
    found = []
    for number, change in enumerate(("ADD", "DROP", "ADD")):
        with server.session() as one:
            one.run("BEGIN")
            one.run("INSERT INTO own (v) VALUES ('before')")
            server.psql(f"ALTER PUBLICATION p {change} TABLE own")
            server.psql("INSERT INTO own (v) VALUES ('beside')")
            one.run(f"PREPARE TRANSACTION 'x{number}'")
        prepared = bytes(message[0] for message in take(server, "s", 3))
        server.psql(f"COMMIT PREPARED 'x{number}'")
        ended = bytes(message[0] for message in take(server, "s", 3))
        found.append((b"P" in prepared, b"K" in ended))
    assert all(was_sent == ends for was_sent, ends in found), found


# Stock subscribers

class Pair:
    """A publisher and a subscriber, both stock but for the plugin."""

    def __init__(self, make_server, publisher="", subscriber="", streaming="parallel", through=None):
        self.publisher = make_server("publisher", publisher)
        self.publisher.psql("CREATE PUBLICATION p FOR TABLE t, parted;"
                            f"SELECT pg_create_logical_replication_slot('s', '{PLUGIN}', false, true)")
        self.subscriber = make_server("subscriber", subscriber)
        dsn = through(self.publisher) if through else self.publisher.dsn()
        self.subscriber.psql(f"CREATE SUBSCRIPTION s CONNECTION '{dsn} application_name=s' PUBLICATION p WITH "
                             f"(create_slot = false, slot_name = 's', copy_data = false, two_phase = true, streaming = {streaming})")
        wait_for(lambda: self.subscriber.value("SELECT subtwophasestate FROM pg_subscription") == "e", "two phases")
        self.wait()

    def wait(self, timeout=30):
        """Until the subscriber has all that is flushed."""
        end = self.publisher.value("INSERT INTO own (v) VALUES ('end'); SELECT pg_current_wal_flush_lsn()")
        wait_for(lambda: self.publisher.value(f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots") == "t",
                 lambda: self.subscriber.log_tail(), timeout)

    def check(self):
        """Both have the same, and nothing went wrong on the way."""
        self.wait()
        for table in ("t", "parted"):
            ask = f"SELECT count(*), md5(string_agg(x::text, ',' ORDER BY x::text)) FROM {table} x"
            assert self.publisher.psql(ask) == self.subscriber.psql(ask), table
        assert not self.subscriber.log_matches(r"ERROR: .*(?:does not exist|relation map|protocol).*")
        assert self.subscriber.psql("SELECT gid FROM pg_prepared_xacts") == []


def prepare(server, kind, rows, first):
    """A prepared transaction: its name says what is in it."""
    published = f"INSERT INTO t SELECT i, repeat('x', 300) FROM generate_series({first}, {first + rows - 1}) i;"
    own = f"INSERT INTO own (v) SELECT repeat('y', 300) FROM generate_series(1, {rows});"
    body = {"published": published, "own": own, "both": own + published, "undone": f"{own} SAVEPOINT a; {published} ROLLBACK TO a;"}
    server.psql(f"BEGIN; {body[kind]} PREPARE TRANSACTION '{kind}_{first}'")
    return f"{kind}_{first}"


@pytest.mark.every_major
def test_restarts(make_server):
    """Prepared before a restart, ended after it; streamed across it; both servers stop in every way."""
    pair = Pair(make_server)
    first, publisher = 0, pair.publisher
    for mode, restarted in (("fast", publisher), ("immediate", publisher), ("immediate", pair.subscriber)):
        names = []
        for kind in ("published", "own", "both", "undone"):
            for rows in (1, 1000):      # small, and streamed or spilled
                first += 10_000
                names.append(prepare(publisher, kind, rows, first))
        pair.wait()
        with publisher.session() as unfinished:
            unfinished.run("BEGIN")
            unfinished.run("INSERT INTO own (v) SELECT repeat('y', 300) FROM generate_series(1, 1000)")
            restarted.restart(mode)
        # More than logical_decoding_work_mem, while the earlier ones still wait.
        publisher.psql(f"INSERT INTO t SELECT i, repeat('z', 300) FROM generate_series({first + 5000}, {first + 5999}) i")
        pair.wait()
        publisher.psql("".join(f"{'ROLLBACK' if number % 5 == 4 else 'COMMIT'} PREPARED '{name}';" for number, name in enumerate(names)))
        pair.check()


@pytest.mark.every_major
def test_set_publication(make_server):
    """What was prepared is judged by what the subscriber had subscribed to then, also after further restarts."""
    pair = Pair(make_server)
    publisher = pair.publisher
    publisher.psql("CREATE PUBLICATION q FOR TABLE own")
    pair.subscriber.psql("ALTER SUBSCRIPTION s SET PUBLICATION p, q WITH (refresh = false)")
    pair.subscriber.psql("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = false)")
    pair.subscriber.psql("ALTER SUBSCRIPTION s SET PUBLICATION p WITH (refresh = false)")
    pair.wait()
    first = 0

    def prepare_some():
        nonlocal first
        names = []
        for kind in ("published", "own", "both"):
            for rows in (1, 1000):
                first += 10_000
                names.append(prepare(publisher, kind, rows, first))
        pair.wait()
        return names

    def finish(names):
        publisher.psql("".join(f"COMMIT PREPARED '{name}';" for name in names))
        pair.wait()

    for publication in ("q", "p"):
        before = prepare_some()
        pair.subscriber.psql(f"ALTER SUBSCRIPTION s SET PUBLICATION {publication} WITH (refresh = false)")
        pair.wait()
        publisher.restart("immediate")
        pair.wait()
        finish(before[::2])
        publisher.restart("fast")
        pair.wait()
        finish(before[1::2])
        assert not pair.subscriber.log_matches(r"ERROR: .*does not exist")
        assert pair.subscriber.psql("SELECT gid FROM pg_prepared_xacts") == []
    # What was prepared while p was subscribed to came from t, the rest from own.
    assert pair.subscriber.value("SELECT count(*) FROM t") == str(2 * 1001)
    assert int(pair.subscriber.value("SELECT count(*) FROM own")) >= 2 * 1001


@pytest.mark.every_major
def test_load(make_server, rng):
    """The random load, while both servers are killed."""
    pair = Pair(make_server)
    for restarted in (pair.publisher, pair.subscriber, None):
        with pair.publisher.session() as one, pair.publisher.session() as two, pair.publisher.session() as three:
            load = Load(pair.publisher, rng, [one, two, three], True)
            load.next_id = int(pair.publisher.value("SELECT 1000 + greatest(max(id), 0) / 1000 * 1000 FROM (SELECT id FROM t UNION ALL "
                                                    "SELECT id FROM parted UNION ALL SELECT 0) _(id)")) + 1_000_000
            load.run(150)
        if restarted:
            restarted.restart("immediate")
        pair.publisher.psql("".join(f"COMMIT PREPARED '{gid}';" for gid in load.prepared))
        pair.check()


def every_kind(first):
    """A transaction of every kind, with ids from `first` on: published or not, whole or rolled back in part, committed, or prepared and
    ended later, with published ones in between."""
    published, own = "INSERT INTO t VALUES ({0}, repeat('x', 50));", "INSERT INTO own (v) VALUES ('{0}');"
    bodies = (own, published + "INSERT INTO parted VALUES ({0}, 0);", own + published, f"{own} SAVEPOINT a; {published} ROLLBACK TO a;",
              published + own + "SAVEPOINT a; UPDATE t SET v = 'u' WHERE id = {0}; ROLLBACK TO a;")
    waiting = []
    for body in bodies:
        for end in ("COMMIT PREPARED", "ROLLBACK PREPARED"):
            yield f"BEGIN; {body} PREPARE TRANSACTION '{{0}}';".format(first)
            waiting.append(f"{end} '{first}';")
            first += 2
        yield f"BEGIN; {body} COMMIT;".format(first + 1)
        yield from waiting[:-2]
        del waiting[:-2]
    yield from waiting


@pytest.mark.every_major
@pytest.mark.parametrize("mode, streaming", [("buffered", "off"), ("immediate", "on"), ("immediate", "parallel")])
def test_boundaries(make_server, mode, streaming):
    """The connection is lost right behind every message of the stream, for transactions of every kind: nothing is lost or done twice.

    In `make test` behind every ninth, from another one on each time that the load is repeated."""
    cutters, cut = [], 0

    def through(publisher):
        cutters.append(Cutter(publisher))
        return f"host=127.0.0.1 port={cutters[0].port} user=postgres dbname=postgres sslmode=disable gssencmode=disable"

    pair = Pair(make_server, f"debug_logical_replication_streaming = {mode}", "", streaming, through)
    try:
        number = 1
        while True:
            cutters[0].arm(number)
            pair.publisher.psql("\n".join(every_kind(number * 1000)))
            pair.check()
            if not cutters[0].disarm():
                break
            cut, number = cut + 1, number + BOUNDARY_STEP
    finally:
        for cutter in cutters:
            cutter.close()
    print(f"cut behind {cut} messages, the last of them number {number - BOUNDARY_STEP}")
    assert number > 30, number


def test_synchronous(make_server):
    """A commit waits for the subscriber; where nothing is published, it waits no longer."""
    pair = Pair(make_server)
    pair.publisher.psql("ALTER SYSTEM SET synchronous_standby_names = 's'; SELECT pg_reload_conf()")
    wait_for(lambda: pair.publisher.value("SELECT sync_state FROM pg_stat_replication") == "sync", "synchronous")
    with pair.publisher.session() as session:
        began = time.monotonic()
        for number in range(20):
            session.run("BEGIN")
            session.run(f"INSERT INTO own (v) SELECT repeat('y', 300) FROM generate_series(1, {1000 if number % 4 == 0 else 1})")
            session.run(f"PREPARE TRANSACTION 'g{number}'")
            session.run(f"{'ROLLBACK' if number % 5 == 0 else 'COMMIT'} PREPARED 'g{number}'")
            session.run("INSERT INTO own (v) SELECT repeat('y', 300) FROM generate_series(1, 1000)")
        took = time.monotonic() - began
    assert took < 10, took      # some ms for each wait; without keepalives, seconds
    pair.check()


def test_long(make_server):
    """A transaction of which nothing is published is decoded for longer than the subscriber waits for a message."""
    pair = Pair(make_server, "wal_sender_timeout = 1h", "wal_receiver_timeout = 1s", "off")
    pair.publisher.psql("ALTER PUBLICATION p SET TABLE t WHERE (md5(repeat(v, 300)) = 'never'), parted;"
                        "ALTER TABLE t REPLICA IDENTITY FULL")
    pair.wait()
    pid = pair.publisher.value("SELECT pid FROM pg_stat_replication")
    began = time.monotonic()
    pair.publisher.psql("INSERT INTO t SELECT i, repeat('x', 300) FROM generate_series(1, 15000) i")
    pair.wait()
    took = time.monotonic() - began
    print(f"decoded in {took:.1f} s")
    assert took > 1.5
    assert pair.publisher.value("SELECT pid FROM pg_stat_replication") == pid
    assert not pair.subscriber.log_matches("timeout")


def test_damaged_file(make_server):
    """The plugin's file is damaged: it says so, and goes on."""
    server = make_server("publisher")
    server.psql(f"CREATE PUBLICATION p FOR TABLE t; SELECT pg_create_logical_replication_slot('s', '{PLUGIN}', false, true)")
    file = server.data_dir / "pg_replslot" / "s" / PLUGIN

    def subscriber():
        """Asks as one, which what looks at the slot with SQL is not, and writes the file."""
        run([program("pg_recvlogical"), "-d", server.dsn(), "-S", "s", "--start", "-f", "/dev/null", "-o", "proto_version=3", "-o",
             "publication_names=p", "-o", "streaming=on", "-E", server.value("SELECT pg_current_wal_flush_lsn()")])

    subscriber()
    for damage in (lambda content: content[:-1], lambda content: b"", lambda content: b"x" + content[1:]):
        assert take(server, "s", 3) == []
        file.write_bytes(damage(file.read_bytes()))
        server.psql("INSERT INTO own (v) VALUES ('on')")
        assert take(server, "s", 3) == [] and f'file "pg_replslot/s/{PLUGIN}" is damaged' in server.log_tail()
        server.log.write_text("")
        subscriber()
        server.log.write_text("")
    server.psql("SELECT pg_drop_replication_slot('s')")
    assert not file.exists()


# What to set

def test_not_trusted(make_server):
    """Where the server wants output plugins to be named, it says so, and so do we of pgoutput."""
    server = make_server("publisher")
    create = "SELECT pg_create_logical_replication_slot('s', 'walrider_pgoutput')"
    if server.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "0":
        pytest.skip("this server takes any library")
    server.psql("ALTER SYSTEM RESET output_plugin_libraries; SELECT pg_reload_conf()")
    with pytest.raises(ServerError, match='(?s)walrider_pgoutput" may not be used.*add it to "output_plugin_libraries"'):
        server.psql(create)
    server.psql(f"ALTER SYSTEM SET output_plugin_libraries = '{PLUGIN}'; SELECT pg_reload_conf()")
    with server.session() as session:
        session.send(create)
        said = " ".join(session.wait())
    assert re.search("subscriptions cannot copy their tables.*Set output_plugin_libraries = 'pgoutput, walrider_pgoutput'", said)
