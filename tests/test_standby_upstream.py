"""What may be at the other end: a standby that is promoted, a primary that was one, another cluster, WAL that is gone."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.lab import install
from tests.lab.faults.proxy import Proxy
from tests.lab.loads.commit import TABLE, Commit
from tests.lab.server.cluster import PgCluster, ServerError, parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Walrider, clone, point, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import FAILED, binary, walrider

OTHER_MAJOR = "17" if install.major() == "18" else "18"


def rows(server):
    """The table."""
    return server.psql("SELECT id, v FROM t ORDER BY id")


def write(server, count=2000):
    """Rows that wait for nobody."""
    server.psql(f"INSERT INTO t (v) SELECT repeat('w', 100) FROM generate_series(1, {count})", options=LOCALLY)


def hot_standby(server, data_dir, name="middle", upstream=None):
    """A stock standby that others can stream from; a backup of `server`, streaming from there or from another."""
    upstream = upstream or server
    middle = PgCluster(clone(server, data_dir, upstream.port, name))
    start_primary(middle, hot_standby="on")
    wait_streaming(upstream, name)
    return middle


def promote(server):
    """Promote a stock hot standby."""
    server.psql("SELECT pg_promote()")
    wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", server.log_tail)


@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


def test_a_timeline_switch_upstream(table, work, kind):
    """It streams from a stock standby, which is promoted: it goes over to the new timeline, and is promoted in its turn."""
    with hot_standby(table, work / "middle") as middle:
        with kind(clone(table, work / "ours", middle.port)).start() as follower:
            wait_streaming(middle)
            write(table)
            wait_position(table, name="middle")
            wait_position(middle, middle.value("SELECT pg_last_wal_replay_lsn()"))
            table.kill()
            promote(middle)
            wait_streaming(middle)
            for level in ("remote_write", "on", "remote_apply"):
                Commit(middle, level).wait()
            assert (work / "ours" / "pg_wal" / "00000002.history").read_bytes() == \
                (work / "middle" / "pg_wal" / "00000002.history").read_bytes()
            expected = rows(middle)
            middle.kill()
            follower.promote()
            with follower.serve() as promoted:
                assert rows(promoted) == expected
                assert promoted.value("SELECT pg_walfile_name(pg_current_wal_lsn())").startswith("00000003")


def test_a_timeline_that_is_not_wanted(table, work):
    """With --timeline current it stays on its own when its upstream is promoted, and takes nothing of the other."""
    with hot_standby(table, work / "middle") as middle:
        with Walrider(clone(table, work / "ours", middle.port), "--timeline", "current").start() as follower:
            wait_streaming(middle)
            write(table)
            end = wait_position(table, name="middle")
            table.kill()
            promote(middle)
            write(middle)
            follower.wait_replayed(end)
            wait_for(lambda: "timeline 1" in follower.log_text(), follower.log_tail)
            time.sleep(2)
            row = standby.replication(middle)
            assert row is None or row["state"] != "streaming", row
            assert not list((work / "ours" / "pg_wal").glob("00000002????????????????"))
            switch = (work / "middle" / "pg_wal" / "00000002.history").read_text().split()[1]
            assert follower.position("replayed") <= parse_lsn(switch)
            lines = len(follower.log_text().splitlines())
            assert lines < 100, f"{lines} lines in the log of a few seconds\n{follower.log_tail()}"


def test_away_during_two_timeline_switches(table, work, kind):
    """It was stopped while its upstream became a primary, and the upstream of that one's standby too; it goes along."""
    with hot_standby(table, work / "middle") as middle, hot_standby(table, work / "third", "third", middle) as third:
        with kind(clone(table, work / "ours", middle.port)).start() as follower:
            wait_streaming(middle)
            write(table)
            wait_position(table, name="middle")
            follower.stop()
            write(table)
            wait_position(table, name="middle")
            table.kill()
            promote(middle)
            write(middle)
            wait_streaming(middle, "third")
            wait_position(middle, name="third")
            middle.kill()
            promote(third)
            write(third)
            point(follower.data_dir, third.port)
            follower.start()
            wait_streaming(third)
            Commit(third, "remote_apply").wait()
            for history in ("00000002.history", "00000003.history"):
                assert (work / "ours" / "pg_wal" / history).read_bytes() == (work / "third" / "pg_wal" / history).read_bytes()
            expected = rows(third)
            third.kill()
            follower.promote()
            with follower.serve() as promoted:
                assert rows(promoted) == expected


def test_a_primary_that_was_promoted(table, work, kind):
    """The backup is of timeline 2: its history is fetched, so that the next promotion takes number 3."""
    with hot_standby(table, work / "middle") as middle:
        write(table)
        wait_position(table, name="middle")
        table.kill()
        promote(middle)
        directory = clone(middle, work / "ours")
        (directory / "pg_wal" / "00000002.history").unlink(missing_ok=True)
        with kind(directory).start() as follower:
            wait_streaming(middle)
            Commit(middle, "remote_apply").wait()
            assert (directory / "pg_wal" / "00000002.history").exists()
            expected = rows(middle)
            middle.kill()
            follower.promote()
            with follower.serve() as promoted:
                assert rows(promoted) == expected
                assert promoted.value("SELECT pg_walfile_name(pg_current_wal_lsn())").startswith("00000003")


def test_an_upstream_that_is_behind(table, work, kind):
    """Its upstream is promoted before it has what we have replayed: it stays where it is and says so; nothing is undone."""
    with hot_standby(table, work / "middle") as middle:
        middle.psql("SELECT pg_wal_replay_pause()")
        with kind(clone(table, work / "ours")).start() as follower:
            wait_streaming(table)
            write(table)
            end = wait_position(table)
            follower.stop()
            middle.kill()
            # The middle one loses what it has received and not replayed, as if the network had been slow.
            for file in (work / "middle" / "pg_wal").iterdir():
                if file.is_file() and len(file.name) == 24 and int(file.name[8:], 16) > _segment(middle):
                    file.unlink()
            (work / "middle" / "postgresql.auto.conf").open("a").write("primary_conninfo = ''\n")
            start_primary(middle, hot_standby="on")
            promote(middle)
            assert parse_lsn(middle.value("SELECT redo_lsn FROM pg_control_checkpoint()")) < parse_lsn(end)
            point(follower.data_dir, middle.port)
            try:
                follower.start()
            except (AssertionError, ServerError):
                pass        # it may also refuse to start: it says why all the same
            wait_for(lambda: "new timeline 2" in follower.log_text() or "timeline 2" in follower.log_text(), follower.log_tail, 30)
            time.sleep(1)
            row = standby.replication(middle)
            assert row is None or row["state"] != "streaming", row


def _segment(server):
    """The number of the segment in which a stopped standby's replay stands, of 1 MB each."""
    redo = parse_lsn(server.controldata()["Latest checkpoint's REDO location"])
    least = parse_lsn(server.controldata()["Minimum recovery ending location"])
    at = max(redo, least)
    return (at >> 32) << 32 | (at & 0xFFFFFFFF) >> 20


def test_slots(table, work):
    """A slot is made on request, keeps the WAL while it is away, and its loss is told; it is made again on request."""
    directory = clone(table, work / "ours", slot="ours")
    with Walrider(directory, "--create-slot").start() as follower:
        wait_streaming(table)
        assert table.psql("SELECT slot_type, temporary, active FROM pg_replication_slots WHERE slot_name = 'ours'") \
            == [["physical", "f", "t"]]
        Commit(table, "remote_apply").wait()
        follower.stop()
        kept = parse_lsn(table.value("SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = 'ours'"))
        table.psql("ALTER SYSTEM SET wal_keep_size = 0", options=LOCALLY)
        table.psql("SELECT pg_reload_conf()")
        write(table, 30000)
        table.psql("CHECKPOINT")
        assert kept == parse_lsn(table.value("SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = 'ours'"))
        follower.start()
        wait_streaming(table)
        end = wait_position(table)
        wait_for(lambda: parse_lsn(table.value("SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = 'ours'"))
                 >= parse_lsn(end) - (1 << 20), "the slot moves on")
        follower.stop()
        table.psql("SELECT pg_drop_replication_slot('ours')")
    with Walrider(directory).start() as follower:
        wait_for(lambda: 'replication slot "ours" does not exist' in follower.log_text(), follower.log_tail, 20)
        assert 'replication slot "ours" does not exist' in str(follower.status()["last_error"])
        assert follower.get("/health")[0] == 503
        table.psql("SELECT pg_create_physical_replication_slot('ours')", options=LOCALLY)
        wait_streaming(table)
        Commit(table, "remote_apply").wait()


def test_a_slot_dropped_under_it(table, work):
    """The walsender is terminated and the slot dropped: with --create-slot it is made again, and nothing was lost."""
    with Walrider(clone(table, work / "ours", slot="ours"), "--create-slot").start() as follower:
        wait_streaming(table)
        # Stopped, it cannot connect again before the slot is gone.
        follower.send_signal(signal.SIGSTOP)
        table.psql("SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots; SELECT pg_drop_replication_slot('ours')")
        follower.send_signal(signal.SIGCONT)
        wait_streaming(table)
        assert table.psql("SELECT slot_name, active FROM pg_replication_slots") == [["ours", "t"]]
        Commit(table, "remote_apply").wait()
        assert follower.status()["connections"] == 2


def test_a_temporary_slot(table, work):
    """It lives as long as the connection."""
    with Walrider(clone(table, work / "ours"), "--temporary-slot").start():
        wait_streaming(table)
        found = table.psql("SELECT slot_name, temporary, active FROM pg_replication_slots")
        assert len(found) == 1 and found[0][1:] == ["t", "t"], found
        Commit(table, "remote_apply").wait()
    wait_for(lambda: table.psql("SELECT slot_name FROM pg_replication_slots") == [], "the slot is gone")


def refused(follower, *words):
    """Start one that cannot work: it ends or goes on trying, says why, and never streams. Returns its log."""
    try:
        follower.start()
    except (AssertionError, ServerError):
        pass
    wait_for(lambda: all(word in follower.log_text() for word in words), lambda: f"{words}\n{follower.log_tail()}", 30)
    return follower.log_text()


def wal_of(directory):
    """Names and contents of its segments."""
    return {file.name: file.read_bytes() for file in (directory / "pg_wal").iterdir() if len(file.name) == 24}


def test_another_cluster(table, work, kind):
    """A primary with another system identifier: not a byte of its WAL is taken."""
    directory = clone(table, work / "ours")
    with standby.make_primary(work / "other") as other:
        start_primary(other)
        other.psql(TABLE, options=LOCALLY)
        write(other, 30000)
        point(directory, other.port)
        before = wal_of(directory)
        with kind(directory) as follower:
            log = refused(follower, "database system identifier")
            for server in (table, other):
                assert server.controldata()["Database system identifier"] in log
            if kind is Walrider:
                # It never was the right one: nobody but the operator can set that right.
                assert follower.wait_end() == FAILED
            else:
                time.sleep(1)
            assert standby.replication(other) is None
            follower.kill()
        after = wal_of(directory)
        assert {name: after.get(name) for name in before} == before


def test_another_cluster_later(table, work):
    """Once it has streamed, it tries again: the wrong server behind the name may be replaced.  What comes again is counted."""
    directory, file = clone(table, work / "ours"), work / "standby.toml"
    file.write_text("retry_interval = '200ms'\n")
    with standby.make_primary(work / "other") as other, Walrider(directory, "--config", file) as follower:
        start_primary(other)
        follower.start()
        wait_streaming(table)

        def connect(port):
            file.write_text(f"retry_interval = '200ms'\nprimary = '{standby.conninfo(port)}'\n")
            follower.send_signal(signal.SIGHUP)
        connect(other.port)
        times = set()

        def tries():
            times.add(json.dumps((follower.status()["last_error"] or {}).get("time")))
            return len(times) > 5
        wait_for(tries, follower.log_tail)
        said = "ERROR:  could not receive data from the primary: the database system identifier of the primary is"
        assert follower.log_text().count(said) == 1, follower.log_tail()
        connect(table.port)
        wait_streaming(table)
        wait_for(lambda: re.search(r"system identifier .* \(repeated \d+ times in \d+ s\)", follower.log_text()), follower.log_tail)
        assert follower.log_text().count(said) == 2, follower.log_tail()
        Commit(table, "remote_apply").wait()


def test_another_major(table, work, monkeypatch):
    """A primary of another major is refused before anything is written."""
    directory = clone(table, work / "ours")
    before = wal_of(directory)
    own = install.major()
    monkeypatch.setenv("WALRIDER_TEST_MAJOR", OTHER_MAJOR)
    with standby.make_primary(work / "other") as other:
        start_primary(other)
        point(directory, other.port)
        with Walrider(directory) as follower:
            log = refused(follower, OTHER_MAJOR, own)
            assert "Traceback" not in log and "panicked" not in log
            assert follower.wait_end() == FAILED
            # A connection may be seen, is gone at once, and asks for nothing.
            wait_for(lambda: standby.replication(other) is None, "no connection", 5)
            assert other.value("SHOW log_replication_commands") == "on" and not other.log_matches("received replication command.*")
            follower.kill()
        other.kill()
    monkeypatch.undo()
    assert wal_of(directory) == before


def archived(work, template):
    """A primary with an archive that keeps no WAL for its standbys."""
    server = PgCluster(standby.cluster.copy_tree(template, work / "archived"), work / "archive")
    server.archive.mkdir()
    server.configure(f"wal_keep_size = 0\nmax_wal_size = 8MB\narchive_mode = on\narchive_command = '{server.archive_command()}'\n")
    return start_primary(server)


def leave_behind(server):
    """Write until the WAL of now is gone from pg_wal, and archived."""
    first = server.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
    for _ in range(3):
        write(server, 30000)
        server.switch_wal()
        server.psql("CHECKPOINT")
    wait_for(lambda: (server.archive / first).exists(), "the segment is archived")
    server.psql("CHECKPOINT")
    wait_for(lambda: not (server.data_dir / "pg_wal" / first).exists(), "the segment is removed")


def test_wal_that_is_gone(primary_template, work, kind):
    """Without an archive it says what is missing and goes on asking; with a restore_command it catches up, then streams."""
    with archived(work, primary_template) as server:
        server.psql(TABLE, options=LOCALLY)
        directory = clone(server, work / "ours")
        with kind(directory).start() as follower:
            wait_streaming(server)
            Commit(server, "remote_apply").wait()
            follower.stop()
            leave_behind(server)
            follower.start()
            wait_for(lambda: "has already been removed" in follower.log_text(), follower.log_tail, 30)
            if kind is Walrider:
                assert "has already been removed" in str(follower.status()["last_error"])
                assert follower.get("/health")[0] == 503
            follower.stop()
            with open(directory / "postgresql.auto.conf", "a") as conf:
                conf.write(f"restore_command = 'cp {server.archive}/%f %p'\n")
            follower.start()
            wait_streaming(server)
            Commit(server, "remote_apply").wait()
            # And once more, from the archive's WAL on.
            follower.stop()
            leave_behind(server)
            follower.start()
            wait_streaming(server)
            Commit(server, "remote_apply").wait()
            expected = rows(server)
            server.kill()
            follower.promote()
            with follower.serve() as promoted:
                assert rows(promoted) == expected


def test_archive_and_then_streaming_in_one_run(primary_template, work):
    """It loses the primary, which removes WAL meanwhile; without a restart it takes the archive and comes back to streaming."""
    with archived(work, primary_template) as server, Proxy(server.port) as network:
        server.psql(TABLE, options=LOCALLY)
        directory = clone(server, work / "ours", network.port)
        with Walrider(directory, "--restore-command", f"cp {server.archive}/%f %p", "--retry-interval", "500ms").start() as follower:
            wait_streaming(server)
            Commit(server, "remote_apply").wait()
            network.cut(refuse=True)
            leave_behind(server)
            network.restore()
            wait_streaming(server)
            Commit(server, "remote_apply").wait()
            assert follower.process.poll() is None


def test_the_primary_restarts(table, work, kind):
    """Cleanly and by crash, with its standby streaming: it comes back by itself each time."""
    with kind(clone(table, work / "ours")).start():
        wait_streaming(table)
        for mode in ("fast", "immediate", "kill"):
            write(table)
            if mode == "kill":
                table.kill()
            else:
                table.stop(mode)
            time.sleep(0.5)
            start_primary(table)
            wait_streaming(table)
            Commit(table, "remote_apply").wait()
            wait_position(table)


def test_no_primary_at_first(table, work, kind):
    """Started before its primary: it waits, and streams once that is there."""
    directory = clone(table, work / "ours")
    table.stop()
    with kind(directory).start():
        time.sleep(1)
        start_primary(table)
        wait_streaming(table)
        Commit(table, "remote_apply").wait()


def test_promoted_before_there_is_anything(table, work):
    """Nothing of the WAL that recovery begins with is there, and the primary is away: a promotion is refused with the reason, as
    PostgreSQL refuses it, and the directory can go on following."""
    directory = clone(table, work / "ours")
    for name in wal_of(directory):
        (directory / "pg_wal" / name).unlink()
    table.stop()
    with Walrider(directory) as follower:
        follower.spawn([binary(), "standby", "-D", directory])
        wait_for(lambda: "could not receive data from the primary" in follower.log_text(), follower.log_tail)
        said = walrider("promote", "-D", directory, "--timeout", "20s").expect(FAILED).stderr
        assert "ended without being promoted: there is nothing to promote yet: could not locate the checkpoint record" in said
        assert follower.wait_end() == FAILED
        assert "ERROR:  there is nothing to promote yet" in follower.log_text()
        assert not (directory / "promote").exists() and (directory / "standby.signal").exists()
        start_primary(table)
        follower.start()
        wait_streaming(table)
        Commit(table, "remote_apply").wait()


def test_two_on_one_directory(table, work):
    """The second is refused, also PostgreSQL itself, and the first does not notice."""
    directory = clone(table, work / "ours")
    with Walrider(directory).start():
        wait_streaming(table)
        with Walrider(directory) as second:
            refused(second, "postmaster.pid")
            assert second.wait_end() != 0
        env = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        done = subprocess.run([install.program("postgres"), "-D", directory, "-p", str(standby.free_port())], env=env, timeout=30,
                              capture_output=True, text=True)
        assert done.returncode != 0 and "postmaster.pid" in done.stderr, done.stderr
        Commit(table, "remote_apply").wait()


def test_promoted_by_mistake(table, work, kind):
    """Promoted and written to while its primary lives on: pg_rewind takes it back, and it follows again."""
    with kind(clone(table, work / "ours")).start() as follower:
        wait_streaming(table)
        Commit(table, "remote_apply").wait()
        follower.promote()
        with follower.serve() as promoted:
            write(promoted)
            promoted.psql("CREATE TABLE astray (id int)", options=LOCALLY)
            promoted.stop()
        write(table)
        standby.rewind(work / "ours", table)
        assert not (work / "ours" / "pg_wal" / "00000002.history").exists()
        with kind(work / "ours").start() as again:
            wait_streaming(table)
            Commit(table, "remote_apply").wait()
            expected = rows(table)
            table.kill()
            again.promote()
            with again.serve() as promoted:
                assert rows(promoted) == expected
                assert promoted.value("SELECT to_regclass('astray') IS NULL") == "t"
