"""`walrider logical stream`: what it prints is what was done, it goes on after any crash, and its counts are those of the slot.

Not tried here: other encodings than UTF-8, publishers under load for hours, slots on a standby.
"""

import json
import re
import signal
import subprocess
import time
from collections import Counter
from datetime import datetime

import pytest

from tests.lab.server.cluster import PgCluster
from tests.lab.waiting import wait_for
from tests.lab.walrider import binary, walrider

PLUGINS = ("pgoutput", "walrider_pgoutput")
STREAMING = {1: "off", 2: "on", 3: "on", 4: "parallel"}
ENDS = ("commit", "prepare", "commit_prepared", "rollback_prepared", "stream_commit", "stream_prepare")
LISTEN = {"listen_addresses": "127.0.0.1"}
SETTINGS = """
wal_level = logical
max_wal_senders = 20
max_replication_slots = 40
max_prepared_transactions = 8
logical_decoding_work_mem = 64kB
autovacuum = off
shared_buffers = 32MB
"""
TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE DOMAIN age AS int;
CREATE TABLE t (id int PRIMARY KEY, v text);
CREATE TABLE kinds (id int8 PRIMARY KEY, b bool, n numeric, f float8, d age, m mood, a int[], j jsonb, x text);
CREATE TABLE whole (a int, b text);
ALTER TABLE whole REPLICA IDENTITY FULL;
ALTER TABLE kinds ALTER x SET STORAGE EXTERNAL;
CREATE TABLE own (id int);
CREATE PUBLICATION p FOR TABLE t, kinds, whole;
"""


@pytest.fixture(scope="module")
def origin(scratch):
    """A publisher with the tables."""
    server = PgCluster.init(scratch / "stream_publisher", conf=SETTINGS)
    with server.start(**LISTEN):
        if server.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "1":
            server.psql(f"ALTER SYSTEM SET output_plugin_libraries = 'pgoutput', 'test_decoding', '{PLUGINS[1]}'")
            server.psql("SELECT pg_reload_conf()")
        server.psql(TABLES)
        yield server


@pytest.fixture
def publisher(origin):
    """The same with its tables empty; slots made in a test end with it."""
    origin.psql("TRUNCATE t, kinds, whole, own")
    yield origin
    origin.psql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")


@pytest.fixture
def begin():
    """Starts the program; what still runs when the test ends is killed."""
    begun = []

    def begin(*args, **options):
        begun.append(subprocess.Popen([binary(), *args], **options))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def make_slot(server, name, plugin="pgoutput", two_phase=False):
    """A slot that decodes what follows."""
    server.psql(f"SELECT pg_create_logical_replication_slot('{name}', '{plugin}', false, {str(two_phase).lower()})")


def here(server):
    """A position that all committed so far is before, and that the slots will get past."""
    end = server.value("SELECT pg_current_wal_insert_lsn()")
    server.psql("SELECT pg_log_standby_snapshot()")
    return end


def arguments(server, slot, *options):
    """A command line for it."""
    return ["logical", "stream", "-d", server.dsn(), "-S", slot, *options]


def stream(server, slot, *options, protocol=4):
    """The lines of all that was committed so far."""
    result = walrider(*arguments(server, slot, "-P", "p", "--no-loop", "-E", here(server), "--protocol", str(protocol), *options),
                      timeout=120).expect()
    return [json.loads(line) for line in result.stdout.splitlines()]


def transactions(lines):
    """What a reader makes of the lines: the changes of each transaction that was committed or prepared, in that order."""
    done, parts, xid = [], {}, None
    for line in lines:
        kind = line["kind"]
        if kind in ("begin", "begin_prepare") or kind == "stream_start" and line["first"]:
            parts[line["xid"]] = []
        if kind in ("begin", "begin_prepare", "stream_start"):
            xid = line["xid"]
        elif kind in ("insert", "update", "delete", "truncate", "message") and "xid" in line:
            assert line["xid"] == xid
            parts[xid].append(line)
        elif kind in ("commit", "prepare", "stream_commit", "stream_prepare"):
            done.append((line["xid"], parts.pop(line["xid"])))
            xid = None
        elif kind == "stream_abort":
            kept = [part for part in parts[line["xid"]] if part.get("subxid", line["xid"]) != line["subxid"]]
            parts[line["xid"]] = [] if line["xid"] == line["subxid"] else kept
        elif kind in ("stream_stop", "interrupted"):
            assert line["xid"] == xid
            xid = None
    return done


def decoded(server, slot):
    """The same of a slot of test_decoding, as (operation, table)."""
    done = []
    for (text,) in server.psql(f"SELECT data FROM pg_logical_slot_get_changes('{slot}', NULL, NULL, 'include-xids', 'true')"):
        if begun := re.match(r"BEGIN (\d+)$", text):
            done.append((int(begun[1]), []))
        elif change := re.match(r"table public\.(\w+(?:, public\.\w+)*): (\w+):", text):
            done[-1][1].append((change[2].lower(), change[1].replace("public.", "")))
    return [(xid, [change for change in changes if change[1] != "own"]) for xid, changes in done]


def in_brief(changes):
    """As (operation, table)."""
    return [(line["kind"], ", ".join(table["table"] for table in line.get("tables", [line]))) for line in changes
            if line["kind"] != "message"]


WORK = (
    "INSERT INTO t VALUES (1, 'one'), (2, NULL), (3, E'line\\n\"quoted\" \\\\ é')",
    "INSERT INTO kinds VALUES (1, true, 1.50, 'NaN', 7, 'ok', '{1,2}', '{\"k\": 1}', repeat('x', 3000)), "
    "(2, false, -12345678901234567890.5, 1e300, NULL, NULL, NULL, NULL, NULL)",
    "UPDATE kinds SET b = NULL WHERE id = 1",
    "UPDATE t SET id = 10 WHERE id = 1",
    "UPDATE t SET v = 'same key' WHERE id = 2",
    "INSERT INTO whole VALUES (1, 'a'), (2, 'b')",
    "UPDATE whole SET b = 'c' WHERE a = 1",
    "DELETE FROM whole WHERE a = 2",
    "DELETE FROM t WHERE id = 3",
    "INSERT INTO own VALUES (1)",
    "BEGIN; INSERT INTO t SELECT i, repeat('y', 200) FROM generate_series(100, 1099) i; SAVEPOINT s; "
    "INSERT INTO t SELECT i, repeat('z', 200) FROM generate_series(2000, 2999) i; ROLLBACK TO s; "
    "DELETE FROM t WHERE id = 100; SELECT pg_logical_emit_message(true, 'in', 'side'); COMMIT",
    "BEGIN; INSERT INTO t SELECT i, repeat('y', 200) FROM generate_series(5000, 5999) i; ROLLBACK",
    "BEGIN; INSERT INTO own SELECT generate_series(1, 3000); COMMIT",
    "BEGIN; INSERT INTO t VALUES (20, 'prepared'); PREPARE TRANSACTION 'a ''gid'''",
    "COMMIT PREPARED 'a ''gid'''",
    "BEGIN; INSERT INTO t VALUES (21, 'prepared'); PREPARE TRANSACTION 'b'",
    "ROLLBACK PREPARED 'b'",
    "SELECT pg_logical_emit_message(false, 'out', 'side')",
    "TRUNCATE t, whole RESTART IDENTITY CASCADE",
)


def do_everything(server):
    """Every kind of change, in every kind of transaction."""
    session = server.session()
    for statements in WORK:
        for statement in statements.split("; "):
            session.run(statement)
    session.close()


@pytest.mark.every_major
def test_every_kind(publisher):
    """Both plugins in all protocols: the same transactions as test_decoding's, with the values that SQL gave them."""
    make_slot(publisher, "reference", "test_decoding")
    cases = [(plugin, protocol) for plugin in PLUGINS for protocol in STREAMING]
    for plugin, protocol in cases:
        make_slot(publisher, f"s_{plugin}_{protocol}", plugin, protocol >= 3)
    do_everything(publisher)
    expected = decoded(publisher, "reference")
    assert sum(len(changes) for _, changes in expected) > 1000
    for plugin, protocol in cases:
        lines = stream(publisher, f"s_{plugin}_{protocol}", "--streaming", STREAMING[protocol], "--messages", protocol=protocol)
        kinds = Counter(line["kind"] for line in lines)
        done = transactions(lines)
        rolled_back = {line["xid"] for line in lines if line["kind"] == "rollback_prepared"}
        briefly = {xid: in_brief(changes) for xid, changes in done if in_brief(changes) and xid not in rolled_back}
        assert briefly == {xid: changes for xid, changes in expected if changes}, (plugin, protocol)
        assert (kinds["stream_commit"] > 0, kinds["prepare"] > 0, len(rolled_back)) == (
            protocol >= 2, protocol >= 3, int(protocol >= 3)), kinds
        check_values(lines)
        assert stream(publisher, f"s_{plugin}_{protocol}", protocol=protocol) == [], "it was confirmed"


def check_values(lines):
    """The rows of `WORK`."""
    of = {(kind, table): [line for line in lines if (line["kind"], line.get("table")) == (kind, table)]
          for kind in ("insert", "update", "delete", "relation") for table in ("t", "kinds", "whole")}
    assert [line["new"] for line in of["insert", "t"][:3]] == [
        {"id": 1, "v": "one"}, {"id": 2, "v": None}, {"id": 3, "v": 'line\n"quoted" \\ é'}]
    row = of["insert", "kinds"][0]["new"]
    assert row.pop("x") == "x" * 3000
    assert row == {"id": 1, "b": True, "n": 1.5, "f": "NaN", "d": 7, "m": "ok", "a": "{1,2}", "j": '{"k": 1}'}
    assert of["insert", "kinds"][1]["new"]["f"] == 1e300
    assert of["update", "kinds"][0]["unchanged"] == ["x"]
    assert of["update", "kinds"][0]["new"] == {**row, "b": None}
    assert (of["update", "t"][0]["key"], of["update", "t"][0]["new"]) == ({"id": 1}, {"id": 10, "v": "one"})
    assert "key" not in of["update", "t"][1] and "old" not in of["update", "t"][1]
    assert (of["update", "whole"][0]["old"], of["update", "whole"][0]["new"]) == ({"a": 1, "b": "a"}, {"a": 1, "b": "c"})
    assert of["delete", "whole"][0]["old"] == {"a": 2, "b": "b"}
    assert of["delete", "t"][0]["key"] == {"id": 3}
    types = {column["name"]: column["type"] for column in of["relation", "kinds"][0]["columns"]}
    assert types == {"id": "int8", "b": "bool", "n": "numeric", "f": "float8", "d": "int4", "m": "public.mood", "a": "int4[]",
                     "j": "jsonb", "x": "text"}
    assert [column["name"] for column in of["relation", "t"][0]["columns"] if column["key"]] == ["id"]
    truncate = [line for line in lines if line["kind"] == "truncate"]
    assert [(line["cascade"], line["restart_identity"]) for line in truncate] == [(True, True)]
    messages = [line for line in lines if line["kind"] == "message"]
    assert [(line["prefix"], line["content"], line["transactional"]) for line in messages] == [
        ("in", "side", True), ("out", "side", False)]
    assert {line["gid"] for line in lines if "gid" in line} <= {"a 'gid'", "b"}
    times = [line["commit_time"] for line in lines if line["kind"] in ("commit", "stream_commit")]
    # Zeros at the end of a fraction are left out.
    assert times == sorted(times, key=datetime.fromisoformat) and re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+Z", times[0])


def test_from_a_position(publisher):
    """What was committed before --startpos is not wanted; a slot that is further on begins where it is."""
    make_slot(publisher, "s")
    positions = []
    for number in range(3):
        positions.append(here(publisher))
        publisher.psql(f"INSERT INTO t VALUES ({number})")
    ids = lambda *options: [line["new"]["id"] for line in stream(publisher, "s", *options) if line["kind"] == "insert"]
    assert ids("--startpos", positions[1]) == [1, 2]
    assert ids("--startpos", positions[0]) == [], "the slot has moved past them"


@pytest.mark.every_major
@pytest.mark.parametrize("streaming", ["off", "on"])
def test_kill_and_resume(publisher, begin, work, rng, streaming):
    """Killed again and again while three sessions write: in the file each committed row is there once, in commit order."""
    make_slot(publisher, "s", two_phase=True)
    file = work / "changes"
    command = arguments(publisher, "s", "-P", "p", "--streaming", streaming, "-f", str(file), "--retry-interval", "50ms")
    sessions, number, killed = [publisher.session() for _ in range(3)], 0, 0
    for _ in range(12):
        running = begin(*command)
        deadline = time.monotonic() + rng.uniform(0.05, 0.5)
        while time.monotonic() < deadline:
            for session in sessions:
                rows = rng.choice((1, 1, 2, 250))
                ends = rng.choice(("COMMIT", "COMMIT", "ROLLBACK", f"PREPARE TRANSACTION 'g{number}'; COMMIT PREPARED 'g{number}'"))
                first, number = number, number + rows
                session.send(f"BEGIN; INSERT INTO t SELECT i, repeat('x', 300) FROM generate_series({first}, {number - 1}) i; {ends}")
            for session in sessions:
                session.wait()
            time.sleep(0.02)
        running.kill()
        running.wait(30)
        killed += running.returncode == -signal.SIGKILL
    for session in sessions:
        session.close()
    walrider(*command, "-E", here(publisher), timeout=120).expect()
    assert killed == 12
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["kind"] == "stream" and lines[0]["slot"] == "s"
    done = transactions(lines[1:])
    rows = [line["new"]["id"] for _, changes in done for line in changes]
    in_table = [int(row[0]) for row in publisher.psql("SELECT id FROM t ORDER BY id")]
    assert len(rows) == len(set(rows)) and sorted(rows) == in_table and len(rows) > 1000
    ends = [line["end_lsn"] for line in lines if line["kind"] in ENDS]
    assert len(ends) == len(set(ends)) and ends == sorted(ends, key=lambda lsn: [int(part, 16) for part in lsn.split("/")])


def test_a_full_disk(publisher, work):
    """It ends with what to look at; with space again, the file goes on, whole."""
    make_slot(publisher, "s")
    for number in range(100):
        publisher.psql(f"INSERT INTO t VALUES ({number}, repeat('x', 1000))")
    command = arguments(publisher, "s", "-P", "p", "-f", work / "changes", "-E", here(publisher))
    refused = walrider(*command, file_size_limit=50_000, timeout=30).expect(1)
    assert f'could not write file "{work}/changes"' in refused.stderr
    walrider(*command, timeout=30).expect()
    lines = [json.loads(line) for line in (work / "changes").read_text().splitlines()]
    assert [line["new"]["id"] for line in lines if line["kind"] == "insert"] == list(range(100))
    # And nobody writes into a file that is another slot's.
    make_slot(publisher, "other")
    refused = walrider(*arguments(publisher, "other", "-P", "p", "-f", work / "changes"), timeout=30).expect(1)
    assert 'has the changes of slot "s" of database "postgres"' in refused.stderr


def test_a_restart_of_the_publisher_is_survived(publisher, begin, work):
    """The connection is lost, and made again; nothing is lost or twice."""
    make_slot(publisher, "s")
    file = work / "changes"
    running = begin(*arguments(publisher, "s", "-P", "p", "-f", str(file), "--retry-interval", "50ms"),
                    stderr=subprocess.PIPE, text=True)
    for mode in ("fast", "immediate"):
        wait_for(lambda: publisher.value("SELECT active FROM pg_replication_slots") == "t", "a stream")
        publisher.psql(f"INSERT INTO t SELECT coalesce(max(id), 0) + 1, '{mode}' FROM t")
        publisher.restart(mode, **LISTEN)
    publisher.psql("INSERT INTO t SELECT max(id) + 1, 'last' FROM t")
    wait_for(lambda: "last" in file.read_text(), "the last row")
    wait_for(lambda: publisher.value("SELECT confirmed_flush_lsn >= pg_current_wal_lsn() FROM pg_replication_slots") == "t", "confirmed")
    running.send_signal(signal.SIGTERM)
    log = running.communicate(timeout=30)[1]
    assert running.returncode == 0, log
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["new"]["id"] for line in lines if line["kind"] == "insert"] == [1, 2, 3]


@pytest.mark.every_major
@pytest.mark.parametrize("plugin", PLUGINS)
def test_counts_are_those_of_the_slot(publisher, plugin):
    """Messages and bytes by kind are what pg_logical_slot_peek_binary_changes has, and empty transactions are told apart."""
    names = {"B": "BEGIN", "C": "COMMIT", "O": "ORIGIN", "R": "RELATION", "Y": "TYPE", "I": "INSERT", "U": "UPDATE", "D": "DELETE",
             "T": "TRUNCATE", "M": "MESSAGE", "b": "BEGIN PREPARE", "P": "PREPARE", "K": "COMMIT PREPARED",
             "r": "ROLLBACK PREPARED", "S": "STREAM START", "E": "STREAM STOP", "c": "STREAM COMMIT", "A": "STREAM ABORT",
             "p": "STREAM PREPARE"}
    for protocol in STREAMING:
        make_slot(publisher, f"s{protocol}", plugin, protocol >= 3)
    do_everything(publisher)
    for protocol, streaming in STREAMING.items():
        options = f"'proto_version', '{protocol}', 'publication_names', 'p', 'messages', 'true', 'streaming', '{streaming}'"
        rows = publisher.psql("SELECT chr(get_byte(data, 0)), count(*), sum(length(data)) FROM "
                              f"pg_logical_slot_peek_binary_changes('s{protocol}', NULL, NULL, {options}) GROUP BY 1")
        expected = {names[kind]: {"count": int(count), "bytes": int(size)} for kind, count, size in rows}
        measured = stream(publisher, f"s{protocol}", "--measure", "--json", "--messages", "--streaming", streaming, "--peek",
                          protocol=protocol)[-1]
        assert measured["final"] and measured["messages"] == expected, protocol
        assert measured["total"] == {"count": sum(kind["count"] for kind in expected.values()),
                                     "bytes": sum(kind["bytes"] for kind in expected.values())}
        empty = {sort: counts["empty"] for sort, counts in measured["transactions"].items() if sort != "streamed_aborted"}
        # pgoutput sends the transaction that has only rows of a table which is not published, if it is streamed.
        assert empty == {"plain": 0, "prepared": 0, "streamed": int(protocol > 1 and plugin == "pgoutput")}
        # A transaction that was rolled back before it is decoded may not be sent at all.
        aborted = publisher.value("SELECT count(*) FROM pg_logical_slot_peek_binary_changes("
                                  f"'s{protocol}', NULL, NULL, {options}) WHERE get_byte(data, 0) = ascii('A') "
                                  "AND substr(data, 2, 4) = substr(data, 6, 4)")
        assert measured["transactions"]["streamed_aborted"]["count"] == int(aborted)
        assert measured["transactions"]["prepared"]["count"] == (2 if protocol >= 3 else 0)
        assert measured["lag_bytes"] < 1000 and measured["delay_seconds"]["max"] > 0
    table = walrider(*arguments(publisher, "s1", "-P", "p", "--no-loop", "-E", here(publisher), "--measure", "--protocol", "1"))
    table.expect()
    assert re.search(r"^INSERT +\d+ +\d+$", table.stdout, re.M) and re.search(r"\d+ messages \(\S+/s\)", table.stdout)


def test_it_counts_at_intervals(publisher, begin):
    """Each interval has its own rates; the last line is the whole."""
    make_slot(publisher, "s")
    running = begin(*arguments(publisher, "s", "-P", "p", "--measure", "--json", "--interval", "100ms"),
                    stdout=subprocess.PIPE, text=True)
    first = json.loads(running.stdout.readline())
    assert not first["final"] and first["total"] == {"count": 0, "bytes": 0}
    publisher.psql("INSERT INTO t VALUES (1, 'x')")
    counted = next(line for line in map(json.loads, running.stdout) if line["rows"])
    assert counted["rates"]["messages"] > 0
    running.send_signal(signal.SIGINT)
    rest = [json.loads(line) for line in running.stdout]
    assert running.wait(30) == 0 and rest[-1]["final"] and rest[-1]["rows"] == 1
    assert publisher.value("SELECT confirmed_flush_lsn >= pg_current_wal_lsn() FROM pg_replication_slots") == "t"


@pytest.mark.every_major
def test_what_cannot_be_streamed_is_refused(publisher, begin):
    """Each with a message of its own, at once, and without a change of the slot."""
    make_slot(publisher, "logical")
    make_slot(publisher, "two_phases", two_phase=True)
    make_slot(publisher, "other_plugin", "test_decoding")
    publisher.psql("SELECT pg_create_physical_replication_slot('physical')")
    publisher.psql("DROP DATABASE IF EXISTS other")
    publisher.psql("CREATE DATABASE other")
    publisher.psql("SELECT pg_create_logical_replication_slot('elsewhere', 'pgoutput')", "other")
    for slot, options, part in (
            ("missing", (), 'slot "missing" does not exist'),
            ("physical", (), 'slot "physical" is a physical one'),
            ("other_plugin", (), 'output plugin "test_decoding"'),
            ("elsewhere", (), 'belongs to database "other", not to "postgres": connect with dbname=other'),
            ("two_phases", ("--protocol", "2"), "needs protocol 3"),
            ("logical", ("-P", "nosuch"), 'publication "nosuch" does not exist in database "postgres"'),
            ("logical", ("--create-slot",), 'replication slot "logical" already exists'),
            ("logical", ("--protocol", "1", "--streaming", "on"), "needs --protocol 2"),
            ("logical", ("--protocol", "5"), "expected a number from 1 to 4")):
        # It would connect again, if that could help.
        refused = walrider(*arguments(publisher, slot, "-P", "p", *options), timeout=30)
        assert refused.code in (1, 2) and part in refused.stderr, (slot, refused.stderr)
    before = publisher.psql("SELECT slot_name, confirmed_flush_lsn, two_phase FROM pg_replication_slots ORDER BY 1")
    user = begin(*arguments(publisher, "logical", "-P", "p", "--peek"))
    pid = wait_for(lambda: publisher.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'logical'"), "a user")
    refused = walrider(*arguments(publisher, "logical", "-P", "p", "--no-loop"), timeout=30)
    assert refused.code == 1 and f"in use by process {pid} of the publisher" in refused.stderr
    user.terminate()
    assert user.wait(30) == 0
    assert before == publisher.psql("SELECT slot_name, confirmed_flush_lsn, two_phase FROM pg_replication_slots ORDER BY 1")


def test_slots_are_made_and_dropped(publisher):
    """With what is asked for; and what to do where the server does not trust the plugin is said."""
    def slots():
        return publisher.psql("SELECT slot_name, plugin, two_phase FROM pg_replication_slots")

    walrider(*arguments(publisher, "made", "--create-slot", "--plugin", PLUGINS[1], "-t")).expect()
    assert slots() == [["made", PLUGINS[1], "t"]]
    walrider(*arguments(publisher, "made", "--create-slot", "--if-not-exists")).expect()
    walrider(*arguments(publisher, "made", "--drop-slot")).expect()
    assert not slots()
    assert "does not exist" in walrider(*arguments(publisher, "made", "--drop-slot")).expect(1).stderr
    if publisher.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "1":
        trusted = publisher.value("SHOW output_plugin_libraries")
        publisher.psql("ALTER SYSTEM SET output_plugin_libraries = 'pgoutput'")
        publisher.psql("SELECT pg_reload_conf()")
        refused = walrider(*arguments(publisher, "made", "--create-slot", "--plugin", PLUGINS[1])).expect(1)
        assert "add it to output_plugin_libraries" in refused.stderr
        publisher.psql(f"ALTER SYSTEM SET output_plugin_libraries = {trusted}")
        publisher.psql("SELECT pg_reload_conf()")


def test_a_reader_that_goes_ends_it(publisher, begin):
    """Cleanly, whether something is written or not; and what it did not read comes again."""
    make_slot(publisher, "s")
    for _ in range(2):
        running = begin(*arguments(publisher, "s", "-P", "p"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        publisher.psql("INSERT INTO t SELECT coalesce(max(id), 0) + 1, 'x' FROM t")
        assert json.loads(running.stdout.readline())["kind"] == "begin"
        running.stdout.close()
        assert running.wait(30) == 0, running.stderr.read()
        running.stderr.close()


def test_a_reader_that_is_stuck_keeps_nobody(publisher, begin):
    """While a pipe takes nothing, the publisher is answered, and SIGTERM ends it."""
    publisher.psql("ALTER SYSTEM SET wal_sender_timeout = '1s'")
    publisher.psql("SELECT pg_reload_conf()")
    make_slot(publisher, "s")
    publisher.psql("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i")
    running = begin(*arguments(publisher, "s", "-P", "p", "-s", "200ms"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: publisher.value("SELECT active FROM pg_replication_slots") == "t", "a stream")
        time.sleep(2.5)
        assert publisher.value("SELECT active FROM pg_replication_slots") == "t"
        running.terminate()
        assert running.wait(30) == 0
        assert publisher.value("SELECT confirmed_flush_lsn < pg_current_wal_lsn() FROM pg_replication_slots") == "t"
    finally:
        running.kill()
        running.communicate()
        publisher.psql("ALTER SYSTEM RESET wal_sender_timeout")
        publisher.psql("SELECT pg_reload_conf()")


def test_passwords(publisher):
    """SCRAM, as for any client."""
    publisher.psql("CREATE ROLE reader LOGIN REPLICATION PASSWORD 'pass word'")
    hba = publisher.data_dir / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text("host postgres reader 127.0.0.1/32 scram-sha-256\n" + before)
    publisher.psql("SELECT pg_reload_conf()")
    try:
        make_slot(publisher, "s")
        publisher.psql("INSERT INTO t VALUES (1, 'x')")
        tcp = f"host=127.0.0.1 port={publisher.port} dbname=postgres user=reader require_auth=scram-sha-256"
        options = ("-S", "s", "-P", "p", "--no-loop", "-E", here(publisher))
        assert "password" in walrider("logical", "stream", "-d", tcp, *options).expect(1).stderr
        lines = walrider("logical", "stream", "-d", tcp, *options, env={"PGPASSWORD": "pass word"}).expect().stdout
        assert '"new":{"id":1,"v":"x"}' in lines
    finally:
        hba.write_text(before)
        publisher.psql("DROP ROLE reader")
