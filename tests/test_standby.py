"""`walrider standby` on a stock primary: what it acknowledges and when, how it is paused, stopped and promoted.

With WALRIDER_STANDBY_KINDS=walrider,stock the tests that take `kind` run with PostgreSQL's own standby as well.
"""

import json
import re
import signal
import time

import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.install import program
from tests.lab.loads.bank import LEVELS, PROMISING, connect
from tests.lab.loads.commit import A_WHILE, TABLE, Commit, expect
from tests.lab.oracle.compare import compare
from tests.lab.server.cluster import format_lsn, parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.standby import KINDS, LOCALLY, Walrider, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider

@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


@pytest.fixture
def follower(table, work, kind):
    """A standby that streams."""
    with kind(standby.clone(table, work / "ours")).start() as follower:
        wait_streaming(table)
        yield follower


def test_every_level(table, follower):
    """Commits at every level return, and the primary shows the standby as it shows its own."""
    row = wait_streaming(table)
    assert (row["application_name"], row["sync_state"]) == (standby.NAME, "sync")
    for level in LEVELS:
        with connect(table, synchronous_commit=level) as connection:
            for number in range(30):
                connection.execute("INSERT INTO t (v) VALUES (%s)", (f"{level} {number}",))
    # The load goes on until a row of the view shows every lag: they are of the last reply, and an idle stream has none.
    with connect(table, synchronous_commit="remote_apply") as connection:
        def shows_lags():
            connection.execute("INSERT INTO t (v) VALUES ('lags')")
            found = standby.replication(table)
            return found if None not in (found["write_lag"], found["flush_lag"], found["replay_lag"]) else None
        row = wait_for(shows_lags, lambda: f"lags: {standby.replication(table)}", 20)
    assert 0 <= row["write_lag"] <= row["flush_lag"] <= row["replay_lag"] < 5, row
    assert row["reply_age"] < 5
    end = parse_lsn(table.wal_end())
    for stage in ("write", "flush", "replay"):
        wait_position(table, format_lsn(end), stage)
    row = standby.replication(table)
    order = [parse_lsn(row[f"{stage}_lsn"]) for stage in ("replay", "flush", "write", "sent")]
    assert order == sorted(order) and row["state"] == "streaming" and row["sync_state"] == "sync", row
    assert order[-1] <= parse_lsn(table.lsn())
    # At rest the lags go away, as with a stock standby: two replies that everything is applied.
    wait_for(lambda: standby.replication(table)["replay_lag"] is None, lambda: f"no lag: {standby.replication(table)}", 30)


@pytest.mark.parametrize("unit", [8192, 1 << 20], ids=["page", "segment"])
def test_a_record_ends_where_its_page_does(table, follower, unit):
    """It is replayed, and that is all there is to wait for: the server's insert position is behind the next page's header, and a
    test that waited for a standby to get there waited for the next record."""
    for _ in range(3):
        begin = table.message_up_to(unit, 0)
        assert parse_lsn(begin) < parse_lsn(wait_position(table, timeout=10))


def test_each_level_waits_for_its_stage_alone(table, work):
    """A stuck fsync holds `on` and not `remote_write`; a pause holds `remote_apply` and not `on`; a silent network all three."""
    disk = Disk(work / "shim", "pg_wal/")
    with Proxy(table.port) as network:
        with Walrider(standby.clone(table, work / "ours", network.port), disk=disk).start() as follower:
            wait_streaming(table)
            for level in PROMISING:     # the first waits until its segment has been made, with an fsync
                Commit(table, level).wait()
            disk.hold_fsync()
            held = expect(table, ("on", "remote_apply"), ("off", "local", "remote_write"))
            row = standby.replication(table)
            assert parse_lsn(row["flush_lsn"]) < parse_lsn(row["write_lsn"]), row
            disk.hold_fsync(False)
            for commit in held:
                commit.wait()
            follower.pause()
            held = expect(table, ("remote_apply",), ("off", "local", "remote_write", "on"))
            follower.resume()
            held[0].wait()
            network.silence()
            held = expect(table, PROMISING, ("off", "local"))
            network.restore()
            for commit in held:
                commit.wait()


def test_an_apply_is_told_at_once(table, follower):
    """`remote_apply` costs little more than `on`: replay's progress is told when a commit waits for it, not at the interval."""
    def median(level):
        with connect(table, synchronous_commit=level) as connection:
            times = []
            for _ in range(100):
                begun = time.perf_counter()
                connection.execute("INSERT INTO t (v) VALUES ('timed')")
                times.append(time.perf_counter() - begun)
        return sorted(times)[50]
    flushed, applied = median("on"), median("remote_apply")
    print(f"on {flushed * 1000:.2f} ms, remote_apply {applied * 1000:.2f} ms")
    assert applied < flushed + 0.5, "the interval is 10 s"


def test_replay_shows_soon_though_nobody_waits(table, work):
    """With `on` alone, a quiet link and an interval of 10 s, the primary still learns within moments what is replayed."""
    with Walrider(standby.clone(table, work / "ours"), "--status-interval", "10s").start():
        wait_streaming(table)
        for _ in range(5):
            Commit(table, "on").wait()
            wait_position(table, stage="replay", timeout=5)
            time.sleep(0.2)


@pytest.mark.parametrize("how", ["command", "signal", "file"])
def test_promote(table, work, kind, how):
    """The directory is handed over with everything in it; the old primary is rewound and follows."""
    with kind(standby.clone(table, work / "ours")).start() as follower:
        wait_streaming(table)
        for level in LEVELS:
            Commit(table, level).wait()
        table.psql("INSERT INTO t (v) SELECT 'many' FROM generate_series(1, 20000)")
        rows = table.psql("SELECT id, v FROM t ORDER BY id")
        wait_position(table)
        table.kill()
        begun = time.monotonic()
        follower.promote(how)
        with follower.serve() as promoted:
            seconds = time.monotonic() - begun
            print(f"promoted by {how}: writable after {seconds:.2f} s")
            assert seconds < 10, "2 s are the goal, on a machine that does nothing else"
            assert promoted.psql("SELECT id, v FROM t ORDER BY id") == rows
            assert promoted.value("SELECT pg_walfile_name(pg_current_wal_lsn())").startswith("00000002")
            assert (work / "ours" / "pg_wal" / "00000002.history").exists()
            standby.rewind(table.data_dir, promoted)
            with kind(table.data_dir).start():
                wait_streaming(promoted)
                Commit(promoted, "remote_apply").wait()
                wait_position(promoted)


def test_promote_starts_postgresql(table, work):
    """With --pg-ctl the server is there when `walrider promote` returns."""
    directory = standby.clone(table, work / "ours")
    (work / "sockets").mkdir()
    port = standby.free_port()
    with open(directory / "postgresql.auto.conf", "a") as conf:
        conf.write(f"port = {port}\nunix_socket_directories = '{table.sockets}'\nlisten_addresses = ''\n")
    with Walrider(directory, "--pg-ctl", program("pg_ctl")).start() as follower:
        wait_streaming(table)
        Commit(table, "remote_apply").wait()
        rows = table.psql("SELECT id, v FROM t ORDER BY id")
        table.kill()
        begun = time.monotonic()
        follower.promote()
        with standby.adopt(directory) as promoted:
            promoted.psql("INSERT INTO t (v) VALUES ('new')", options=LOCALLY)
            print(f"written to after {time.monotonic() - begun:.2f} s")
            assert promoted.psql("SELECT id, v FROM t ORDER BY id")[:-1] == rows


def test_promote_without_a_primary(table, work, kind):
    """Stopped, its primary gone, started again: it is promoted from what it has."""
    with kind(standby.clone(table, work / "ours")).start() as follower:
        wait_streaming(table)
        Commit(table, "remote_apply").wait()
        rows = table.psql("SELECT id, v FROM t ORDER BY id")
        follower.stop()
        table.kill()
        follower.start()
        follower.promote()
        with follower.serve() as promoted:
            assert promoted.psql("SELECT id, v FROM t ORDER BY id") == rows


def test_pause_and_resume(table, follower, kind):
    """Paused, it receives and flushes and replays nothing; started anew, it is still paused, and receives; resumed, it catches up."""
    if kind is not Walrider:
        pytest.skip("pg_wal_replay_pause needs a hot standby")
    follower.pause()
    follower.wait_state("paused")
    before = follower.position("replayed")
    table.psql("INSERT INTO t (v) SELECT 'paused' FROM generate_series(1, 30000)")
    end = wait_position(table, stage="flush")
    assert follower.position("replayed") == before < parse_lsn(end)
    follower.stop()
    follower.start()
    follower.wait_state("paused")
    table.psql("INSERT INTO t (v) SELECT 'paused' FROM generate_series(1, 1000)")
    end = wait_position(table, stage="flush")
    time.sleep(A_WHILE)
    assert follower.position("replayed") <= before
    follower.resume()
    wait_position(table, end)
    follower.wait_state("streaming")


def test_apply_delay(table, work, kind):
    """recovery_min_apply_delay holds commits back, and nothing else."""
    directory = standby.clone(table, work / "ours")
    with open(directory / "postgresql.auto.conf", "a") as conf:
        conf.write("recovery_min_apply_delay = '2s'\n")
    with kind(directory).start():
        wait_streaming(table)
        Commit(table, "on").wait(1.5)
        waited = Commit(table, "remote_apply").wait()
        assert 1.9 < waited < 10, waited


def test_the_same_as_stock(table, work):
    """Stopped at the same shutdown checkpoint, its directory is that of a stock standby, page by page."""
    directories = dict(walrider=standby.clone(table, work / "walrider"), stock=standby.clone(table, work / "stock", name="stock"))
    followers = [KINDS[name](directory).start() for name, directory in directories.items()]
    try:
        for name in directories:
            wait_streaming(table, name)
        table.pgbench("-i", "-s", "2", "-q")
        table.pgbench("-c", "4", "-T", "4", "-n")
        table.psql("CREATE INDEX ON t (v); VACUUM; DROP TABLE pgbench_branches; CHECKPOINT; INSERT INTO t (v) VALUES ('last')")
        table.stop()
        final = table.controldata()["Latest checkpoint location"]
        # The primary ends only when both have everything; that it is replayed, the directories say once they are stopped.
        followers[0].wait_replayed(format_lsn(parse_lsn(final) + 1))
        time.sleep(1)
        for follower in followers:
            follower.stop()
    finally:
        for follower in followers:
            follower.kill()
    for directory in directories.values():
        control = standby.cluster.controldata(directory)
        assert control["Latest checkpoint location"] == final, control
        assert control["Database cluster state"] == "shut down in recovery"
    compare(*directories.values())


def test_status_health_and_metrics(table, follower, kind):
    """What operators and load balancers see."""
    if kind is not Walrider:
        pytest.skip("has none")
    Commit(table, "remote_apply").wait()
    end = parse_lsn(table.wal_end())
    follower.wait_replayed(format_lsn(end))
    found = follower.status()
    assert found["state"] == "streaming" and found["timeline"] == 1 and found["connections"] == 1
    assert str(found["system_identifier"]) == table.controldata()["Database system identifier"]
    order = [follower.position(name) for name in ("replayed", "flushed", "written", "received")]
    assert order == sorted(order) and order[0] >= end
    assert found["primary"] == f"127.0.0.1:{table.port}"
    code, text = follower.get("/health")
    assert code == 200, text
    code, text = follower.get("/metrics")
    assert code == 200
    values = dict(re.findall(r"^(walrider_\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", text, re.MULTILINE))
    assert len(values) > 10 and any(float(value) >= end for name, value in values.items()), values
    assert follower.get("/other")[0] == 404
    table.kill()
    wait_for(lambda: follower.get("/health")[0] == 503, lambda: follower.get("/health"), 20)
    assert follower.status()["last_error"]


def test_reload(table, work):
    """SIGHUP: another way to the primary is taken at once, without a restart."""
    directory = standby.clone(table, work / "ours")
    with Proxy(table.port) as network, Walrider(directory).start() as follower:
        wait_streaming(table)
        standby.point(directory, network.port)
        follower.send_signal(signal.SIGHUP)
        wait_for(lambda: network.state()["connections"] == 1, lambda: f"a connection\n{follower.log_tail()}", 20)
        wait_streaming(table)
        Commit(table, "remote_apply").wait()


def test_passwords_are_secret(table, work):
    """SCRAM with a password of the connection string: not in the log, not in the process title, not in the status."""
    secret = "open-sesame-'17"
    table.psql("CREATE ROLE replicator LOGIN REPLICATION PASSWORD 'open-sesame-''17'", options=LOCALLY)
    hba = table.data_dir / "pg_hba.conf"
    hba.write_text("host replication replicator 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
    table.psql("SELECT pg_reload_conf()")
    directory = standby.clone(table, work / "ours")
    quoted = secret.replace("'", "\\'").replace("\\", "\\\\").replace("'", "''")      # of libpq, then of the configuration
    with open(directory / "postgresql.auto.conf", "a") as conf:
        conf.write(f"primary_conninfo = 'host=127.0.0.1 port={table.port} user=replicator application_name=walrider "
                   f"password=''{quoted}'''\n")
    with Walrider(directory, "--log-level", "debug").start() as follower:
        wait_streaming(table)
        with open(f"/proc/{follower.process.pid}/cmdline") as cmdline:
            title = cmdline.read()
        said = title + json.dumps(follower.status()) + follower.get("/metrics")[1] + follower.log_text()
        assert "open-sesame" not in said
        table.psql("ALTER ROLE replicator PASSWORD 'another'", options=LOCALLY)
        table.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        wait_for(lambda: "password authentication failed" in follower.log_text(), follower.log_tail, 30)
        assert "open-sesame" not in json.dumps(follower.status()) + follower.log_text()


def test_receive(table, work):
    """`walrider receive` in the place of `pg_receivewal --synchronous`: it acknowledges write and flush, and its files are
    the primary's."""
    wal = work / "wal"
    wal.mkdir()
    receiver = standby.Standby(wal)
    command = ["receive", "-d", standby.conninfo(table.port), "-D", wal, "--slot", "receiver", "--create-slot", "--if-not-exists"]
    with receiver.spawn([standby.walrider.binary(), *command]):
        wait_streaming(table)
        for level in ("remote_write", "on"):
            Commit(table, level).wait()
        held = expect(table, ("remote_apply",), ("remote_write", "on"))
        table.psql("INSERT INTO t (v) SELECT repeat('x', 100) FROM generate_series(1, 30000)")
        assert table.value("SELECT active FROM pg_replication_slots WHERE slot_name = 'receiver'") == "t"
        receiver.kill()
        blocked = Commit(table, "on")
        time.sleep(A_WHILE)
        assert not blocked.done
        receiver.spawn([standby.walrider.binary(), *command])
        blocked.wait()
        table.psql("SELECT pg_switch_wal(); SELECT txid_current()", options=LOCALLY)
        wait_position(table, stage="flush")
        receiver.stop()
        table.psql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        held[0].wait()
    whole = [file for file in sorted(wal.iterdir()) if re.fullmatch(r"[0-9A-F]{24}", file.name)]
    assert len(whole) > 2
    for file in whole:
        assert file.read_bytes() == (table.data_dir / "pg_wal" / file.name).read_bytes(), file.name
    assert walrider("wal", "stats", wal).code == 0
