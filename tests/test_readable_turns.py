"""`walrider standby --readable`: Walrider catches up, PostgreSQL is read, and the directory changes hands as it falls behind.

Not tried: power cuts while it changes hands, archives alone (it needs a primary), systemd itself.
"""

import os
import re
import signal
import time

import pytest

from tests.lab.install import program
from tests.lab.server.cluster import PgCluster, controldata, copy_tree, parse_lsn, run
from tests.lab.standby import standby, watched
from tests.lab.standby.node import Node, startup_process
from tests.lab.standby.standby import wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import DONE, FAILED, USAGE, walrider

KEEPS = "wal_keep_size = 1GB\nmax_wal_size = 1GB\n"
SUMS = "SELECT count(*), sum(hashtext(v)::bigint) FROM t"


def burst(primary, batches=80):
    """About so many times 130 kB of WAL."""
    primary.psql(f"DO $$BEGIN FOR number IN 1..{batches} LOOP {watched.BATCH}; COMMIT; END LOOP; END$$")


@pytest.fixture
def primary(primary_template, work):
    with watched.primary_of(primary_template, work, KEEPS) as server:
        yield server


@pytest.fixture
def node(primary, work):
    """One on a base backup of the primary, not yet started."""
    with Node(standby.clone(primary, work / "node"), primary.sockets) as made:
        yield made


@pytest.mark.every_major
def test_caught_up_and_read(primary, node):
    """Far behind at its start; then PostgreSQL answers, and walrider's commands work as if nobody else had the directory."""
    burst(primary)
    node.start()
    server = node.reader()
    wait_streaming(primary)
    assert server.psql(SUMS) == primary.psql(SUMS)
    primary.psql("CREATE TABLE later AS SELECT 1 AS id")
    wait_position(primary)
    assert server.value("SELECT id FROM later") == "1"

    wait_for(lambda: node.status()["connected_since"], lambda: node.status())
    status = node.status()
    assert (status["state"], status["turns"], status["paused"], status["consistent"]) == ("readable", 1, False, True), status
    assert status["primary"] == f"127.0.0.1:{primary.port}" and status["timeline"] == 1
    node.wait_replayed(primary.wal_end())
    assert node.get("/health?max_lag_bytes=100000")[0] == 200
    metrics = node.get("/metrics")[1]
    assert 'walrider_state{state="readable"} 1' in metrics and "walrider_turns_total 1" in metrics

    told = walrider("status", "-D", node.data_dir, "--json").expect().json
    assert (told["process"]["pid"], told["process"]["command"]) == (node.process.pid, "standby") and told["status"]["state"] == "readable"
    node.pause()
    wait_for(lambda: server.value("SELECT pg_is_wal_replay_paused()") == "t", node.log_tail)
    wait_for(lambda: node.status()["paused"], node.log_tail)
    assert node.get("/health") == (503, "replay is paused\n")
    node.resume()
    wait_for(lambda: server.value("SELECT pg_is_wal_replay_paused()") == "f", node.log_tail)
    node.configure(work_mem="5MB")
    walrider("reload", "-D", node.data_dir).expect()
    wait_for(lambda: server.value("SHOW work_mem") == "5MB", node.log_tail)

    walrider("stop", "-D", node.data_dir).expect()
    assert node.wait_end() == DONE and not (node.data_dir / "postmaster.pid").exists()
    node.start()
    assert node.reader().psql(SUMS) == primary.psql(SUMS)


def test_it_falls_behind(primary, node):
    """Replay of PostgreSQL's stands still while WAL comes in, as at a load that it cannot follow: Walrider takes over, and gives back."""
    node.start()
    server = node.reader()
    wait_streaming(primary)
    pid = startup_process(server)
    os.kill(pid, signal.SIGSTOP)
    burst(primary)
    node.logged("is stopped: Walrider catches up")
    # The server ends when its replay does.
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: node.status()["turns"] == 2, lambda: f"{node.status()}\n{node.log_tail()}", 60)
    assert node.reader().psql(SUMS) == primary.psql(SUMS)


def test_it_has_a_logical_slot(primary, node):
    """One that was made in PostgreSQL's turn, which Walrider could not keep valid: PostgreSQL keeps the directory though it is far behind, and
    gets it back when it has crashed. Found by a review: Walrider stopped it, refused the directory, and ended."""
    primary.configure("wal_level = logical", "postgresql.auto.conf")
    primary.stop()
    standby.start_primary(primary)
    node.configure(wal_level="logical")
    node.start()
    server = node.reader()
    wait_streaming(primary)
    with server.session() as session:
        session.send("SELECT pg_create_logical_replication_slot('logical', 'pgoutput')")
        # It waits for one of these.
        for _ in range(20):
            primary.psql("SELECT pg_log_standby_snapshot()")
            time.sleep(0.1)
        session.wait()
    pid = startup_process(server)
    os.kill(pid, signal.SIGSTOP)
    burst(primary)
    node.logged("and keeps the directory: it has logical replication slots (logical)")
    os.kill(pid, signal.SIGCONT)
    wait_position(primary)
    assert server.psql(SUMS) == primary.psql(SUMS) and node.status()["turns"] == 1
    server.kill()
    node.logged("PostgreSQL gets the directory at once: it has logical replication slots (logical)")
    wait_for(lambda: node.status()["turns"] == 2, lambda: f"{node.status()}\n{node.log_tail()}", 60)
    wait_streaming(primary)
    assert node.reader().psql(SUMS) == primary.psql(SUMS)


def test_wal_for_slots_of_its_server(primary, work):
    """What a slot needs that somebody has on PostgreSQL stays while Walrider has the directory. max_slot_wal_keep_size is not tried."""
    options = ("--restartpoint-wal", "1MB", "--restartpoint-interval", "1s")
    # Walrider's turn lasts as long as the load, so that there is a restartpoint.
    with Node(standby.clone(primary, work / "node"), primary.sockets, *options, within="1kB", wal_keep_size="0").start() as node:
        server = node.reader()
        wait_streaming(primary)
        server.psql("SELECT pg_create_physical_replication_slot('needs', true)")
        needed = parse_lsn(server.value("SELECT restart_lsn FROM pg_replication_slots")) >> 20
        pid = startup_process(server)
        os.kill(pid, signal.SIGSTOP)
        burst(primary)
        node.logged("is stopped: Walrider catches up")
        with watched.load(primary, watched.BATCH, pause=0):
            os.kill(pid, signal.SIGCONT)

            def restartpoint():
                primary.psql("CHECKPOINT")
                redo = re.findall("restartpoint complete: recovery begins at ([0-9A-F/]+)", node.log_text())
                return redo and parse_lsn(redo[-1]) >> 20 > needed + 1
            wait_for(restartpoint, node.log_tail, every=0.3)
        wait_for(lambda: node.status()["turns"] == 2, lambda: f"{node.status()}\n{node.log_tail()}", 60)
        there = {file.name for file in (node.data_dir / "pg_wal").iterdir()}
        assert f"{1:08X}{needed >> 12:08X}{needed & 0xFFF:08X}" in there, (needed, sorted(there))
        assert node.reader().value("SELECT wal_status FROM pg_replication_slots") in ("reserved", "extended")


def test_a_query_that_replay_waits_for_is_no_lag(primary, work):
    """It waits as long as max_standby_streaming_delay says: the query is not ended for a turn of Walrider's."""
    with Node(standby.clone(primary, work / "node"), primary.sockets, max_standby_streaming_delay="-1").start() as node:
        server = node.reader()
        primary.psql(watched.BATCH)
        wait_position(primary)
        with server.session() as reader:
            reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ")
            assert reader.run("SELECT count(*) > 0 FROM t") == ["t"]
            primary.psql("DELETE FROM t WHERE id % 2 = 0")
            primary.psql("VACUUM t")
            burst(primary)
            wait_position(primary, stage="flush")
            # Longer than its patience, and than the least that a turn lasts.
            time.sleep(4)
            behind = node.status()["positions"]["replayed"]["behind_bytes"]
            assert behind > 3 << 20 and node.status()["turns"] == 1, node.status()
            assert reader.run("SELECT count(*) > 0 FROM t; COMMIT") == ["t"]
        wait_position(primary)
        assert server.psql(SUMS) == primary.psql(SUMS) and node.status()["turns"] == 1


def test_killed(primary, node):
    """PostgreSQL: Walrider goes on, and gives it back after a while.  Walrider: PostgreSQL goes on, and has a Walrider again."""
    node.start()
    server = node.reader()
    wait_streaming(primary)
    burst(primary, 3)
    server.kill()
    node.logged("PostgreSQL has crashed, or was killed")
    burst(primary, 3)
    wait_for(lambda: node.status()["turns"] == 2, lambda: f"{node.status()}\n{node.log_tail()}", 60)
    server = node.reader()
    wait_position(primary)
    assert server.psql(SUMS) == primary.psql(SUMS)
    assert "was killed" in node.status()["last_error"]["message"]

    node.kill_alone()
    burst(primary, 3)
    wait_position(primary)
    assert server.psql(SUMS) == primary.psql(SUMS)
    node.start()
    node.wait_state("readable")
    assert server.value("SELECT pg_is_in_recovery()") == "t"
    node.stop()
    assert server.process.poll() is not None


@pytest.mark.parametrize("how", ["walrider", "pg_ctl"])
def test_promoted(primary, node, how):
    """By either's command: PostgreSQL stays, and can be written to."""
    node.start()
    server = node.reader()
    wait_streaming(primary)
    burst(primary, 3)
    wait_position(primary)
    sums = primary.psql(SUMS)
    primary.kill()
    if how == "walrider":
        node.promote()
    else:
        run([program("pg_ctl"), "promote", "-D", node.data_dir])
        assert node.wait_end() == DONE
    assert server.psql(SUMS) == sums
    server.psql("INSERT INTO t VALUES (1, 'new')")
    assert not (node.data_dir / "promote").exists()


@pytest.mark.parametrize("pauses", [False, True])
def test_promoted_under_a_service_manager(primary, node, monkeypatch, pauses):
    """Such a one kills what a service leaves behind: PostgreSQL is stopped cleanly, in whichever turn, and starts as a primary."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(node.data_dir / "nobody"))
    if pauses:
        (node.data_dir / "walrider.pause").touch()
    node.start()
    node.wait_state("paused" if pauses else "readable")
    wait_streaming(primary)
    burst(primary, 3)
    wait_position(primary, stage="flush")
    sums = primary.psql(SUMS)
    primary.kill()
    node.promote()
    assert not (node.data_dir / "postmaster.pid").exists()
    assert controldata(node.data_dir)["Database cluster state"] == "shut down"
    with PgCluster(node.data_dir).start() as server:
        assert server.psql(SUMS) == sums and server.value("SELECT pg_is_in_recovery()") == "f"


def test_promoted_in_walriders_turn(primary, node):
    """It is paused, so that PostgreSQL does not get it."""
    (node.data_dir / "walrider.pause").touch()
    node.start()
    wait_streaming(primary)
    burst(primary, 3)
    wait_position(primary, stage="flush")
    sums = primary.psql(SUMS)
    assert node.status()["turns"] == 0 and node.state() == "paused"
    primary.kill()
    node.promote()
    server = standby.adopt(node.data_dir)
    assert server.psql(SUMS) == sums
    server.psql("INSERT INTO t VALUES (1, 'new')")


def test_a_primary_is_left_alone(primary, node):
    """A server that has been promoted is nobody's to stop; nor does a second Walrider watch the same server."""
    node.start()
    server = node.reader()
    second = walrider("standby", *node.options, "-D", node.data_dir).expect(FAILED).stderr
    assert "another walrider standby --readable has the directory" in second
    node.kill_alone()
    server.psql("SELECT pg_promote()")
    said = walrider("standby", *node.options, "-D", node.data_dir).expect(FAILED).stderr
    assert "there is no standby.signal" in said
    assert server.value("SELECT pg_is_in_recovery()") == "f"


def test_the_primary_is_away(primary, node):
    """A standby that is started meanwhile can be read all the same, and follows when it is back."""
    burst(primary, 3)
    node.start()
    node.reader()
    node.stop()
    sums = primary.psql(SUMS)
    primary.stop()
    node.start()
    server = node.reader()
    assert server.psql(SUMS) == sums and node.status()["connected_since"] is None
    assert node.get("/health") == (503, "readable, but nothing is received\n")
    standby.start_primary(primary)
    burst(primary, 3)
    wait_position(primary)
    assert server.psql(SUMS) == primary.psql(SUMS)


def test_one_name(primary, work):
    """The primary knows it by one name, whoever has the directory: PostgreSQL's, where none is given."""
    data_dir = standby.clone(primary, work / "node", name="walreceiver")
    conninfo = standby.conninfo(primary.port).replace(f" application_name={standby.NAME}", "")
    with open(data_dir / "postgresql.auto.conf", "a") as conf:
        conf.write(f"primary_conninfo = '{conninfo}'\n")
    (data_dir / "walrider.pause").touch()
    with Node(data_dir, primary.sockets).start() as node:
        wait_streaming(primary, "walreceiver")
        assert node.status()["application_name"] == "walreceiver" and node.status()["turns"] == 0
        node.resume()
        node.reader()
        wait_streaming(primary, "walreceiver")
        assert node.status()["application_name"] == "walreceiver"


def test_stopped_by_somebody_else(primary, node):
    """Who stops PostgreSQL wants it stopped."""
    node.start()
    node.reader()
    run([program("pg_ctl"), "stop", "-m", "fast", "-D", node.data_dir])
    assert node.wait_end() == DONE
    node.logged("PostgreSQL was stopped, and not by Walrider")


def test_a_server_that_does_not_start(primary, node):
    """Walrider goes on to follow, says why, and tries again."""
    node.configure(max_wal_senders="nonsense")
    node.start()
    node.logged("could not start PostgreSQL, Walrider goes on")
    burst(primary, 3)
    wait_position(primary)
    assert "could not start PostgreSQL" in node.status()["last_error"]["message"]
    node.configure(max_wal_senders="10")
    wait_for(lambda: node.status()["turns"] == 2, lambda: f"{node.status()}\n{node.log_tail()}", 60)
    assert node.reader().psql(SUMS) == primary.psql(SUMS)


@pytest.mark.parametrize("options, setting, text", [
    ((), "", "readable needs pg_ctl"),
    (("--pg-ctl", "/x", "--min-apply-delay", "1s"), "", "never be near the end"),
    (("--pg-ctl", "/x"), "recovery_min_apply_delay = 1s", "never be near the end"),
    (("--pg-ctl", "/x", "--early", "on"), "", "does not read what the primary has not flushed"),
    (("--pg-ctl", "/x"), "hot_standby = off", "needs hot_standby = on"),
    (("--pg-ctl", "/x", "--primary", "host=x"), "primary_conninfo = ''", "needs primary_conninfo in the directory's"),
    (("--pg-ctl", "/x", "--readable-within", "1GB"), "", "readable_within to be less than catch_up_beyond"),
    (("--pg-ctl", "/x", "--catch-up-after", "0s"), "", "catch_up_after to be more than 0"),
    (("--pg-ctl", "/x", "--slot", "s1"), "", "and slot says otherwise"),
    (("--pg-ctl", "/x", "--primary", "host=x"), "", "and primary says otherwise"),
    (("--pg-ctl", "/x", "--local-conninfo", "colour=red"), "", "invalid connection option"),
])
def test_what_it_refuses(primary_template, work, options, setting, text):
    """Before it touches the directory."""
    server = PgCluster(copy_tree(primary_template, work / "node"))
    standby.point(server.data_dir, 1)
    server.configure(setting, "postgresql.auto.conf")
    said = walrider("standby", "-D", server.data_dir, "--readable", *options).expect(USAGE).stderr
    assert text in said, said
