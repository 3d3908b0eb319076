"""walrider.stream_wal() on real primaries, driven by a raw socket: what is sent, when, and what the server makes of the answers."""

import re
import time

import pytest

from tests.lab import extension, install
from tests.lab.server.cluster import PgCluster, ServerError, parse_lsn, run
from tests.lab.server.early_server import (LOCAL, PRELOAD, SYNC, check_bytes, disk, flushed, in_fsync, inserted, is_gone, load,
                                           make_server, preload, record_starts, stat, template, wait_for, wal_files, walsender)
from tests.lab.standby.early_client import Closed, EarlyClient, Follower, Refused
from tests.suites import source


# What is sent

@pytest.mark.every_major
@pytest.mark.parametrize("conf", ["", "wal_buffers = 64kB\n", "walrider.early = off\n"], ids=["default", "small_buffers", "off"])
def test_bytes(make_server, preload, conf):
    server = make_server(preload + SYNC + conf)
    with Follower(server, flushed(server)) as follower:
        load(server)
        end = inserted(server)
        follower.wait_flushed(end)
        received = len(follower.wal)
        assert received > 10 << 20 and stat(server, "early") == ["f" if "off" in conf else "t"]
        # Each byte was read once; between two looks at the counters there may be a message.
        wait_for(lambda: stat(server, f"sent_bytes = buffers_bytes + disk_bytes AND sent_bytes >= {received}") == ["t"], "the sum")
        server.psql("SET synchronous_commit = local; SELECT pg_switch_wal()")
        follower.wait_flushed(end)
        check_bytes(server, follower, end)
        if "off" in conf:
            assert int(stat(server, "early_bytes")[0]) == 0
            assert all(m["start"] + m["length"] <= m["wal_end"] for m in follower.messages if m["kind"] == "wal")


@pytest.mark.every_major
def test_before_flush(make_server, disk):
    """With fsync stuck, WAL comes all the same, and says how far it is flushed."""
    server = make_server(PRELOAD, disk)
    with Follower(server, flushed(server)) as follower, server.session() as one, server.session() as two:
        wait_for(lambda: follower.wal_end >= follower.start_lsn, "the first keepalive")
        counters = "max_ahead_bytes, early_bytes, disk_bytes"
        stat(server, counters)      # whoever looks first at catalogs writes WAL: hints
        one.run("INSERT INTO t VALUES (0)")
        follower.wait_flushed(flushed(server))
        # On a slow machine what came before the stream may have left the buffers.
        _, before, read_before = map(int, stat(server, counters))
        horizon = flushed(server)
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        follower.wait(lambda it: b"first" in it.wal, "a commit in its fsync")
        two.send("INSERT INTO t VALUES (2, 'second')")
        follower.wait(lambda it: b"second" in it.wal, "a commit behind it")
        assert flushed(server) == horizon == follower.wal_end < follower.received
        ahead, early, from_disk = map(int, stat(server, counters))
        assert ahead >= early - before == follower.received - horizon and from_disk == read_before

        disk.hold_fsync(False)
        one.wait(), two.wait()
        # It is there already: keepalives say that it is flushed.
        follower.wait_flushed(inserted(server))
        assert any(message["kind"] == "keepalive" and message["wal_end"] > horizon for message in follower.messages)


def test_before_flush_unless_off(make_server, disk):
    """The connection's own setting."""
    server = make_server(PRELOAD, disk)
    with Follower(server, flushed(server), options="-c walrider.early=off") as follower, server.session() as one:
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        time.sleep(0.5)
        assert b"first" not in follower.wal
        # A setting of the connection outranks the file's.
        server.psql("ALTER SYSTEM SET walrider.early = on; SELECT pg_reload_conf()", options="-c synchronous_commit=off")
        time.sleep(0.3)
        assert stat(server, "early") == ["f"] and b"first" not in follower.wal
        disk.hold_fsync(False)
        one.wait()
        follower.wait(lambda it: b"first" in it.wal, "the commit")


def test_unknown_server(make_server, disk, work):
    """Where the insert position is not found: a warning, and flushed WAL only."""
    library = work / "blind.so"
    extension.build(install.major(), cflags="-DWALRIDER_BLIND", into=library)
    server = make_server("", disk)
    server.psql(f"CREATE OR REPLACE PROCEDURE walrider.stream_wal(start pg_lsn, timeline int, slot name DEFAULT NULL) "
                f"AS '{library}', 'walrider_stream_wal' LANGUAGE C")
    with Follower(server, flushed(server)) as follower, server.session() as one:
        assert [notice.message for notice in follower.client.notices] == ["WAL cannot be sent before it is flushed"]
        load(server)
        end = inserted(server)
        check_bytes(server, follower.wait_flushed(end), end)
        assert all(m["start"] + m["length"] <= m["wal_end"] for m in follower.messages if m["kind"] == "wal")
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1000, 'last')")
        time.sleep(0.5)
        assert b"last" not in follower.wal
        disk.hold_fsync(False)
        follower.wait(lambda it: b"last" in it.wal, "the commit")


def test_reload(make_server, disk):
    """A changed setting counts at once, for a stream that has none of its own."""
    server = make_server(PRELOAD + "walrider.early = off\n", disk)
    with Follower(server, flushed(server)) as follower, server.session() as one:
        server.psql("ALTER SYSTEM SET walrider.early = on; SELECT pg_reload_conf()")
        wait_for(lambda: stat(server, "early") == ["t"], "the new setting")
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        follower.wait(lambda it: b"first" in it.wal, "a commit in its fsync")
        disk.hold_fsync(False)


def test_max_ahead(make_server, disk):
    """Never more than that is behind the flush position."""
    server = make_server(PRELOAD + "walrider.max_ahead = 256kB\nwal_buffers = 4MB\n", disk)
    server.psql("CREATE TABLE bulk (filler text); ALTER TABLE bulk ALTER filler SET STORAGE EXTERNAL")
    with Follower(server, flushed(server)) as follower, server.session() as one, server.session() as two:
        server.psql("CHECKPOINT")
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        follower.wait(lambda it: b"first" in it.wal, "a commit in its fsync")
        two.send("INSERT INTO bulk SELECT repeat('z', 8000) FROM generate_series(1, 100)")
        horizon = flushed(server)
        follower.wait(lambda it: it.received > horizon + (200 << 10), "what is allowed")
        time.sleep(0.5)
        assert horizon + (200 << 10) < follower.received <= horizon + (256 << 10)
        disk.hold_fsync(False)
        one.wait(), two.wait()
        end = inserted(server)
        check_bytes(server, follower.wait_flushed(end), end)


@pytest.mark.alone
@pytest.mark.parametrize("quick, interval_us, once", [(True, 500, True), (False, 500, False), (False, 10000, True)],
                         ids=["quick", "slow", "often"])
def test_pace(make_server, disk, work, quick, interval_us, once):
    """A standby that confirms before a flush is over hears once in each; another one as soon as there is something, unless
    flushes come as often as we would look."""
    server = make_server(f"{PRELOAD}walrider.poll_interval = {interval_us}\n", disk)
    server.psql("CREATE TABLE u (client int)")
    script = work / "commit.sql"
    script.write_text("INSERT INTO u VALUES (:client_id)")
    start = flushed(server)
    with Follower(server, start, answer=None if quick else lambda received, _wal_end: (received, start, start)) as follower:
        disk.fsync_takes(15)
        server.pgbench("-n", "-f", script, "-c", 8, "-T", 5)
        end = time.monotonic() - 2
        messages = [message for message in follower.messages if message["at"] > end]
        flushes = len({message["wal_end"] for message in messages})
        assert flushes > 40
        assert (len(messages) < 1.3 * flushes) if once else (len(messages) > 1.6 * flushes), (len(messages), flushes)


def rest(server, within=3):
    """The sender looks for nothing for a second, and begins that soon; its count of looks."""
    deadline = time.monotonic() + within
    while True:
        looked, = stat(server, "polls")
        time.sleep(1)
        if stat(server, "polls") == [looked]:
            return int(looked)
        assert time.monotonic() < deadline, "it still looks for WAL"


@pytest.mark.alone
def test_the_clock_is_set_back(make_server, disk, work, preload):
    """By an hour, in the midst of commits: flushes are told as before, WAL still comes before them, and no lag is negative.
    Just behind the last commit: an idle sender still ceases to look for WAL."""
    server = make_server(preload, disk)
    server.psql("CREATE TABLE u (client int)")
    script = work / "commit.sql"
    script.write_text("INSERT INTO u VALUES (:client_id)")
    disk.fsync_takes(20)
    with Follower(server, flushed(server)) as follower:
        server.pgbench("-n", "-f", script, "-c", 8, "-T", 2)
        began = time.time()
        disk.set_clock(-3600)
        assert abs(float(server.value("SELECT extract(epoch FROM clock_timestamp())")) - began + 3600) < 60, "it is set back"
        server.pgbench("-n", "-f", script, "-c", 8, "-T", 2)
        lags = server.psql("SELECT coalesce(least(write_lag, flush_lag, replay_lag), '0') >= '0' FROM pg_stat_replication")
        assert lags == [["t"]]
        since = [message for message in follower.messages if message["at"] > time.monotonic() - 2]
        told = sorted(min(message["at"] for message in since if message["wal_end"] == end)
                      for end in {message["wal_end"] for message in since})
        assert len(told) > 20 and max(after - before for before, after in zip(told, told[1:])) < 1
        assert sum(message["kind"] == "wal" and message["start"] + message["length"] > message["wal_end"] for message in since) > 10
        stat(server, "polls")       # whoever looks first at catalogs writes WAL: hints
        server.psql("INSERT INTO t VALUES (1)")
        disk.set_clock(-7200)
        rest(server)


def came(server, follower, start):
    """When the WAL of the only end of a transaction behind `start` came."""
    record, = record_starts(server, start, inserted(server), "-r", "Transaction")
    follower.wait(lambda it: it.received > record, "the commit")
    wal = [message for message in follower.messages if message["kind"] == "wal"]
    return next(message["at"] for message in wal if message["start"] + message["length"] > record)


@pytest.mark.alone
def test_wakes_for_a_commit(make_server, disk, preload):
    """A commit out of the blue: preloaded it is sent before its flush, otherwise when that is done."""
    server = make_server(preload, disk)
    with Follower(server, flushed(server)) as follower, server.session() as one:
        one.run("SELECT 1")
        stat(server, "polls")       # whoever looks first at catalogs writes WAL: hints
        before = rest(server)
        disk.fsync_takes(1000)
        start, begun = inserted(server), time.monotonic()
        one.run("INSERT INTO t VALUES (1)")
        disk.fsync_takes(0)
        took = came(server, follower, start) - begun
        assert (took < 0.8) if preload else (took >= 0.8), took
        assert (int(stat(server, "commit_wakeups")[0]) > 0) == bool(preload)
        assert rest(server) - before < 10_000


@pytest.mark.alone
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_wakes_for_a_prepared_transaction(make_server, disk, end):
    """As for a commit."""
    server = make_server(PRELOAD + "max_prepared_transactions = 1\n", disk)
    server.psql("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'first'")
    with Follower(server, flushed(server)) as follower, server.session() as one:
        one.run("SELECT 1")
        time.sleep(0.5)
        disk.fsync_takes(1000)
        start, begun = inserted(server), time.monotonic()
        one.run(f"{end} PREPARED 'first'")
        disk.fsync_takes(0)
        took = came(server, follower, start) - begun
        assert took < 0.8, took


def test_several(make_server, preload):
    """Senders do not disturb each other; one of them hears of flushed WAL only."""
    server = make_server(preload)
    start = flushed(server)
    followers = [Follower(server, start, application_name=f"f{number}",
                          options="-c walrider.early=off" if number == 2 else "") for number in range(4)]
    try:
        load(server)
        end = inserted(server)
        for follower in followers:
            check_bytes(server, follower.wait_flushed(end), end)
        rows = server.psql("SELECT application_name, early, sent_lsn FROM walrider.stat_early_stream ORDER BY 1")
        assert [row[:2] for row in rows] == [["f0", "t"], ["f1", "t"], ["f2", "f"], ["f3", "t"]]
    finally:
        for follower in followers:
            follower.close()
    wait_for(lambda: not server.psql("SELECT 1 FROM walrider.stat_early_stream"), "the streams end")


def test_slow_reader(make_server):
    """A standby that does not read blocks nobody, and gets everything later, from the files."""
    server = make_server()
    start = flushed(server)
    with EarlyClient(server) as client:
        client.stream(start)
        load(server)
        end = inserted(server)
        server.switch_wal()     # flushes, or the files might not have the last of it
        pid = walsender(server)
        blocked, sent = stat(server, "blocked, sent_bytes")
        assert int(blocked) > 0 and int(sent) < 5 << 20
        assert int(re.search(r"RssAnon:\s+(\d+)", open(f"/proc/{pid}/status").read())[1]) < 20000
        wal = bytearray()
        while len(wal) < end - start:
            message = client.receive()
            if message["kind"] == "wal":
                assert message["start"] == start + len(wal)
                wal += message["data"]
        assert bytes(wal[:end - start]) == wal_files(server, start, end)
        assert int(stat(server, "disk_bytes")[0]) > 5 << 20


def test_many_questions(make_server):
    """A standby that asks and does not listen: the answers do not pile up."""
    server = make_server()
    with EarlyClient(server) as client:
        client.stream(flushed(server))
        load(server)
        pid = walsender(server)
        for _ in range(200_000):
            client.status(1, reply=True)
        wait_for(lambda: int(stat(server, "replies")[0]) == 200_000, "the replies")
        assert int(stat(server, "keepalives")[0]) < 1000
        assert int(re.search(r"RssAnon:\s+(\d+)", open(f"/proc/{pid}/status").read())[1]) < 20000
        # It ends the stream, and still does not listen: the server gives it wal_sender_timeout.
        server.psql("ALTER SYSTEM SET wal_sender_timeout = '1s'; SELECT pg_reload_conf()")
        client.copy_done()
        wait_for(lambda: is_gone(pid), "the process")


# What the answers do

LEVELS = {"remote_write": 0, "on": 1, "remote_apply": 2}


@pytest.mark.every_major
@pytest.mark.parametrize("level", LEVELS)
def test_synchronous(make_server, preload, level):
    """Each level waits for its own position."""
    server = make_server(preload + SYNC)

    def without(position):
        def answer(received, wal_end):
            positions = list(Follower.everything(received, wal_end))
            for later in range(position, 3):
                positions[later] = start
            return positions
        return answer

    start = flushed(server)
    with Follower(server, start, answer=without(LEVELS[level])) as follower, \
            server.session(options=f"-c synchronous_commit={level}") as one:
        server.psql("SELECT 1")
        wait_for(lambda: server.psql("SELECT state, sync_state FROM pg_stat_replication") == [["streaming", "sync"]], "sync")
        one.send("INSERT INTO t VALUES (1, 'first')")
        wait_for(lambda: server.psql("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"), "the wait")
        time.sleep(0.3)
        assert server.psql("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        follower.answer = without(LEVELS[level] + 1)
        follower.client.status(*follower.answer(follower.received, follower.wal_end))
        one.wait()
        begun = time.monotonic()
        for number in range(2, 52):
            one.run(f"INSERT INTO t VALUES ({number})")
        assert time.monotonic() - begun < 30


def test_synchronous_waits_for_the_local_flush(make_server, disk):
    """An acknowledged commit is durable here, however early the standby has it."""
    server = make_server(PRELOAD + SYNC, disk)
    with Follower(server, flushed(server)) as follower, server.session() as one:
        follower.answer = lambda received, _wal_end: (received, received, received)
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        follower.wait(lambda it: b"first" in it.wal, "a commit in its fsync")
        wait_for(lambda: server.psql("SELECT flush_lsn > pg_current_wal_flush_lsn() FROM pg_stat_replication") == [["t"]], "the answer")
        time.sleep(0.3)
        in_fsync(server, "first")
        assert server.value("SELECT count(*) FROM t") == "0"
        disk.hold_fsync(False)
        one.wait()
        assert server.value("SELECT count(*) FROM t") == "1"


def test_promoted_after_the_connection_was_made(make_server):
    """A standby of this server counts as synchronous, though the connection found a standby here."""
    server = make_server(SYNC, start=False)
    (server.data_dir / "standby.signal").touch()
    server.start()
    with EarlyClient(server) as client:
        with pytest.raises(Refused, match="recovery is in progress"):
            client.stream(0)
        server.psql("SELECT pg_promote()", options=LOCAL)
        start = flushed(server)
        client.stream(start, timeline=2).status(start)
        wait_for(lambda: server.value("SELECT flush_lsn FROM pg_stat_replication") != "", "the answer")
        assert server.value("SELECT sync_state FROM pg_stat_replication") == "sync"


def test_confirms_only_what_was_sent(make_server):
    """A standby cannot release commits whose WAL it was not sent."""
    server = make_server(SYNC)
    start = flushed(server)
    with Follower(server, start, answer=lambda *_: (1 << 60,) * 3) as follower, server.session(options=LOCAL) as one:
        one.run("INSERT INTO t VALUES (1)")
        follower.wait_flushed(inserted(server))
        wait_for(lambda: server.psql("SELECT write_lsn = sent_lsn, flush_lsn = sent_lsn, replay_lsn = sent_lsn "
                                     "FROM pg_stat_replication") == [["t", "t", "t"]], "the positions")


def test_slot(make_server, disk):
    """The slot never goes past what this server has flushed, whatever the standby has; and stays a segment, and what may be sent ahead,
    behind what both have: the standby may have that in its early log alone, and ask for it again."""
    server = make_server(PRELOAD, disk)
    server.psql("SELECT pg_create_physical_replication_slot('early', true)")
    slot = "SELECT active_pid, restart_lsn FROM pg_replication_slots"
    segment = int(server.value("SELECT setting FROM pg_settings WHERE name = 'wal_segment_size'"))
    reserved, stays = server.psql(slot)[0][1], segment + (16 << 20)
    with Follower(server, flushed(server), slot="early") as follower, server.session() as one:
        follower.answer = lambda received, _wal_end: (received, received, received)
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        follower.wait(lambda it: b"first" in it.wal, "a commit in its fsync")
        wait_for(lambda: server.psql("SELECT flush_lsn > pg_current_wal_flush_lsn() FROM pg_stat_replication") == [["t"]], "the answer")
        assert server.psql(slot) == [[str(walsender(server)), reserved]]
        # What the standby has confirmed already counts as soon as it is flushed here, without another word of it.
        confirmed = parse_lsn(server.value("SELECT flush_lsn FROM pg_stat_replication"))
        follower.answer = Follower.nothing
        disk.hold_fsync(False)
        one.wait()
        follower.answer = lambda received, _wal_end: (received, received, received)
        one.run("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(2, 60000) g")
        end = flushed(server)
        assert end - confirmed > stays
        wait_for(lambda: parse_lsn(server.psql(slot)[0][1]) >= end - stays, "the slot")
        assert parse_lsn(server.psql(slot)[0][1]) <= flushed(server) - stays
        with pytest.raises(Refused, match="is active for PID") as refused:
            with EarlyClient(server) as other:
                other.stream(confirmed, slot="early")
        assert refused.value.sqlstate == "55006"
    wait_for(lambda: server.psql(slot)[0][0] == "", "the release")


def test_slot_that_logical_walsenders_wait_for(make_server):
    """One of synchronized_standby_slots follows what the standby has at once: what is decoded for failover slots waits for it. Found by a
    review: on a quiet server they waited for ever."""
    server = make_server(PRELOAD + "wal_level = logical\nsynchronized_standby_slots = 'early'\n")
    server.psql("SELECT pg_create_physical_replication_slot('early', true)")
    server.psql("SELECT pg_create_logical_replication_slot('logical', 'test_decoding', failover => true)")
    with Follower(server, flushed(server), slot="early") as follower:
        follower.answer = lambda received, _wal_end: (received, received, received)
        server.psql("INSERT INTO t VALUES (1, 'one')")
        found = server.psql("SELECT data FROM pg_logical_slot_get_changes('logical', NULL, NULL)", options="-c statement_timeout=10s")
        assert any("one" in row[0] for row in found), found


def test_feedback(make_server):
    """hot_standby_feedback: in the slot, or in the process."""
    server = make_server()
    server.psql("SELECT pg_create_physical_replication_slot('early', true)")
    xid = int(server.value("SELECT txid_current()"))
    for slot, where in (("early", "SELECT xmin FROM pg_replication_slots"),
                        (None, "SELECT backend_xmin FROM pg_stat_replication")):
        with Follower(server, flushed(server), slot=slot) as follower:
            assert server.value(where) == ""
            follower.client.feedback(xid - 1)
            wait_for(lambda: server.value(where) == str(xid - 1), "the xmin")
            follower.client.feedback(xid + 1000)        # of the future: not meant
            follower.client.feedback(xid - 1, epoch=7)
            time.sleep(0.2)
            assert server.value(where) == str(xid - 1)
            follower.client.feedback(0)
            wait_for(lambda: server.value(where) == "", "no xmin")
        wait_for(lambda: not server.psql("SELECT 1 FROM pg_stat_replication"), "the end")


def test_feedback_counts_in_every_database(make_server):
    """The connection is to one database, the standby has them all."""
    server = make_server()
    server.psql("CREATE DATABASE other")
    server.psql("CREATE TABLE t AS SELECT 1 AS i", "other")
    xid = int(server.value("SELECT txid_current()"))
    kept = "pg_relation_size('t') > 0"
    with Follower(server, flushed(server)) as follower:
        follower.client.feedback(xid)
        wait_for(lambda: server.value("SELECT backend_xmin FROM pg_stat_replication") == str(xid), "the xmin")
        server.psql("DELETE FROM t", "other")
        server.psql("VACUUM t", "other")
        assert server.value(f"SELECT {kept}", "other") == "t"
        follower.client.feedback(0)
        wait_for(lambda: server.value("SELECT backend_xmin FROM pg_stat_replication") == "", "no xmin")
        server.psql("VACUUM t", "other")
        assert server.value(f"SELECT {kept}", "other") == "f"


def test_lag(make_server):
    """The lag columns: of what is late, growing while nothing comes, gone when nothing is to come."""
    server = make_server()
    lags = "SELECT extract(epoch FROM write_lag), extract(epoch FROM flush_lag), extract(epoch FROM replay_lag) FROM pg_stat_replication"
    start = flushed(server)
    with Follower(server, start) as follower:
        follower.answer = lambda received, _wal_end: (received, start, start)
        server.psql("INSERT INTO t VALUES (1)")
        follower.wait_flushed(inserted(server))
        time.sleep(0.5)
        follower.client.status(follower.received, start, start)
        wait_for(lambda: float(server.psql(lags)[0][1] or 0) > 0.4, "a lag")
        write, flush, replay = map(float, server.psql(lags)[0])
        assert write < 0.4 < flush <= 2 and 0.4 < replay <= 2
        follower.answer = Follower.everything
        for _ in range(3):
            follower.client.status(follower.received)
        wait_for(lambda: server.psql(lags) == [["", "", ""]], "no lag")


def test_lag_beside_one_that_grows(make_server):
    """More was sent than there is room for, and none of it flushed: what is written has its lag all the same."""
    server = make_server("fsync = off\n")
    start = flushed(server)
    with Follower(server, start) as follower, server.session() as one:
        follower.answer = lambda received, _wal_end: (received, start, start)
        deadline = time.monotonic() + 60
        while int(stat(server, "wal_messages")[0]) < 8192 + 100:
            assert time.monotonic() < deadline
            one.run("DO $$ BEGIN FOR i IN 1..1000 LOOP PERFORM pg_logical_emit_message(true, '', ''); COMMIT; PERFORM pg_sleep(0.0002); END LOOP; END $$")
        written = follower.wait_flushed(inserted(server)).received
        follower.answer = lambda *_: (written, start, start)
        one.run("INSERT INTO t VALUES (1)")
        follower.wait_flushed(inserted(server))
        time.sleep(0.5)
        follower.client.status(follower.received, start, start)
        lags = "SELECT extract(epoch FROM write_lag), extract(epoch FROM flush_lag) FROM pg_stat_replication"
        wait_for(lambda: float(server.psql(lags)[0][0] or 0) > 0.4, "the lag of what is written")
        write, flush = map(float, server.psql(lags)[0])
        assert write < flush


def test_holds_nothing_up(make_server):
    """No snapshot, no lock: VACUUM removes, an index is made concurrently, and catalogs may change."""
    server = make_server(PRELOAD)
    with Follower(server, flushed(server)) as follower:
        pid = walsender(server)
        server.psql("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 1000) i; DELETE FROM t")
        assert server.psql(f"SELECT backend_xmin, backend_xid, xact_start, state FROM pg_stat_activity WHERE pid = {pid}") \
            == [["", "", "", "active"]]
        assert server.psql(f"SELECT 1 FROM pg_locks WHERE pid = {pid}") == []
        server.psql("VACUUM t", timeout=30)
        assert server.value("SELECT pg_relation_size('t')") == "0"
        server.psql("CREATE INDEX CONCURRENTLY ON t (filler); DROP INDEX CONCURRENTLY t_filler_idx", timeout=30)
        # Enough invalidation messages that every idle backend is asked to catch up.
        server.psql("DO $$ BEGIN FOR i IN 1..800 LOOP CREATE TEMP TABLE gone (a int, b text); DROP TABLE gone; END LOOP; END $$")
        server.psql("INSERT INTO t VALUES (1)")
        follower.wait_flushed(inserted(server))
        assert server.psql(f"SELECT 1 FROM pg_locks WHERE pid = {pid}") == []


# Who may, and what is refused

def refused(server, sqlstate, message, start=None, **connection):
    """The call is refused; the connection can be used afterwards."""
    arguments = {key: connection.pop(key) for key in ("timeline", "slot") if key in connection}
    with EarlyClient(server, **connection) as client:
        with pytest.raises(Refused, match=message) as error:
            client.stream(flushed(server) if start is None else start, **arguments)
        assert error.value.sqlstate == sqlstate, error.value
        assert client.query("SELECT 1") == [["1"]]


def test_privileges(make_server):
    server = make_server()
    server.psql("CREATE ROLE nobody LOGIN; CREATE ROLE standby LOGIN REPLICATION; CREATE ROLE other LOGIN;"
                "GRANT EXECUTE ON PROCEDURE walrider.stream_wal TO other")
    refused(server, "42501", "permission denied for procedure stream_wal", user="standby")
    refused(server, "55000", "can only be called on a replication connection", user="other", replication="")
    refused(server, "55000", "can only be called on a replication connection", replication="")
    with pytest.raises(Refused, match="permission denied to start WAL sender"):
        EarlyClient(server, user="other")
    with EarlyClient(server) as client:
        client.query("SET ROLE other")
        with pytest.raises(Refused, match="permission denied to stream WAL") as error:
            client.stream(flushed(server))
        assert error.value.sqlstate == "42501"

    server.psql("GRANT EXECUTE ON PROCEDURE walrider.stream_wal TO standby")
    with Follower(server, flushed(server), user="standby") as follower:
        server.psql("INSERT INTO t VALUES (1)")
        follower.wait_flushed(inserted(server))
        assert server.psql("SET ROLE pg_read_all_stats; SELECT usename FROM walrider.stat_early_stream") == [["standby"]]
        with pytest.raises(ServerError, match="permission denied"):
            server.psql("SET ROLE nobody; SELECT * FROM walrider.stat_early_stream")


def test_refusals(make_server, work):
    server = make_server()
    server.psql("SELECT pg_create_physical_replication_slot('physical')")
    now = flushed(server)
    refused(server, "XX000", "requested starting point .* is ahead of the WAL flush position", start=now + (1 << 30))
    refused(server, "XX000", "requested timeline 2 is not in this server's history", timeline=2)
    refused(server, "XX000", "requested timeline -1 is not in this server's history|4294967295", timeline=-1)
    refused(server, "42704", 'replication slot "none" does not exist', slot="none")
    for sql, sqlstate in (("BEGIN; CALL walrider.stream_wal('0/1', 1)", "25001"),
                          ("SELECT 1; CALL walrider.stream_wal('0/1', 1)", "25001"),
                          ("DO $$ BEGIN CALL walrider.stream_wal(NULL, 1); END $$", "22004"),
                          ("CALL walrider.stream_wal('0/1', NULL)", "22004")):
        with EarlyClient(server) as client:
            with pytest.raises(Refused) as error:
                client.query(sql)
            assert error.value.sqlstate == sqlstate, (sql, error.value)

    # WAL that is gone: as START_REPLICATION says it.
    server.configure("wal_keep_size = 0\nmax_wal_size = 2MB\nmin_wal_size = 2MB\n")
    server.restart()
    for _ in range(5):
        server.psql("INSERT INTO t SELECT i FROM generate_series(1, 20000) i; DELETE FROM t; SELECT pg_switch_wal(); CHECKPOINT")
    refused(server, "58P01", "requested WAL segment [0-9A-F]{24} has already been removed", start=now)

    # A standby has nothing that is not flushed; when promoted, its old timeline is not its to send any more.
    server.basebackup(work / "standby", wal="stream")
    with PgCluster(work / "standby") as standby:
        (standby.data_dir / "standby.signal").touch()
        standby.configure(f"primary_conninfo = 'host={server.sockets} port={server.port} user=postgres'")
        standby.start()
        with EarlyClient(standby) as client:
            with pytest.raises(Refused, match="recovery is in progress") as error:
                client.stream(now)
            assert error.value.sqlstate == "55000"
        standby.psql("SELECT pg_promote()")
        refused(standby, "55000", "timeline 1 is not the current timeline 2", timeline=1)
        with Follower(standby, flushed(standby), timeline=2) as follower:
            standby.psql("INSERT INTO t VALUES (1)")
            follower.wait_flushed(inserted(standby))


def test_logical_slot_is_refused(make_server):
    server = make_server("wal_level = logical\n")
    server.psql("SELECT pg_create_logical_replication_slot('logical', 'pgoutput')")
    refused(server, "55000", "cannot use a logical replication slot for physical replication", slot="logical")
    assert server.psql("SELECT active FROM pg_replication_slots") == [["f"]]


def test_second_try(make_server):
    """A connection that was refused, more than once, can still stream."""
    server = make_server()
    server.psql("SELECT pg_create_physical_replication_slot('early')")
    with EarlyClient(server) as client:
        for slot in ("none", "none", "neither"):
            with pytest.raises(Refused, match="does not exist"):
                client.stream(flushed(server), slot=slot)
            assert server.psql("SELECT 1 FROM walrider.stat_early_stream") == []
        client.stream(flushed(server), slot="early")
        assert client.receive()["kind"] in ("keepalive", "wal")
        assert len(server.psql("SELECT 1 FROM walrider.stat_early_stream")) == 1
    wait_for(lambda: not server.psql("SELECT 1 FROM walrider.stat_early_stream"), "the end")
    with EarlyClient(server) as client:
        for _ in range(2):
            with pytest.raises(Refused):
                client.stream(flushed(server), slot="none")
    wait_for(lambda: not server.psql("SELECT 1 FROM pg_stat_activity WHERE backend_type = 'walsender'"), "the end")
    assert server.log_matches("was terminated by signal") == []


def test_nonsense_from_the_standby(make_server):
    """It ends the connection, and nothing else."""
    server = make_server()
    for tag, body in ((b"d", b"r"), (b"d", b"?"), (b"d", b""), (b"Q", b"SELECT 1\0"), (b"d", b"h\0\0"), (b"d", b"r" * 200_000)):
        client = EarlyClient(server).stream(flushed(server))
        client._send(tag, body)
        with pytest.raises((Closed, Refused)):
            while client.receive(10):
                pass
        client.close()
    wait_for(lambda: not server.psql("SELECT 1 FROM pg_stat_replication"), "all gone")
    assert server.log_matches("was terminated by signal") == []


def test_log(make_server):
    """What log_replication_commands and a synchronous standby leave in the log."""
    server = make_server(SYNC)
    with Follower(server, flushed(server)) as follower:
        follower.wait_flushed(follower.start_lsn)
        wait_for(lambda: server.log_matches('standby "early" is now a synchronous standby'), "sync")
    assert server.log_matches("LOG:  received replication command: CALL walrider.stream_wal")


@pytest.mark.every_major
def test_regression(make_server, work):
    """The extension's own regression tests, as `make installcheck` runs them."""
    server = make_server()
    server.psql("DROP EXTENSION walrider")
    done = run([source.program("regress/pg_regress"), "--bindir", install.bindir(), "--inputdir", install.ROOT / "extension/test",
                "--outputdir", work, "--host", server.sockets, "--port", server.port, "--user", "postgres", "walrider"],
               check=False, env=server.environment())
    differences = work / "regression.diffs"
    assert done.returncode == 0, done.stdout + (differences.read_text() if differences.exists() else "")
