"""How a stream of walrider.stream_wal() ends: with the server, with the standby, with a crash."""

import os
import signal
import time

import pytest

from tests.lab.server.cluster import parse_lsn
from tests.lab.server.early_server import (PAGE, PRELOAD, SYNC, check_bytes, disk, flushed, in_fsync, inserted, is_gone,
                                           make_server, preload, stat, template, wait_for, wal_files, walsender)
from tests.lab.standby.early_client import Follower


@pytest.mark.every_major
@pytest.mark.parametrize("mode", ["fast", "smart"])
def test_stop(make_server, preload, mode):
    """A stop under load: the standby gets the last record, the shutdown checkpoint, before the stream ends."""
    server = make_server(preload + SYNC)
    with Follower(server, flushed(server)) as follower:
        one = server.session()
        one.send("DO $$ BEGIN FOR i IN 1..2000 LOOP INSERT INTO t VALUES (i); COMMIT; END LOOP; END $$")
        follower.wait(lambda it: it.received > it.start_lsn + 20000, "the load")
        if mode == "smart":     # which waits for sessions
            one.wait()
            one.close()
        begun = time.monotonic()
        server.stop(mode, timeout=60)
        assert time.monotonic() - begun < 20
        follower.wait_end()
        assert follower.ended and follower.error is None
        assert follower.wal_end == follower.received
        checkpoint = parse_lsn(server.controldata()["Latest checkpoint location"])
        assert follower.start_lsn < checkpoint < follower.received <= checkpoint + 2 * PAGE
        check_bytes(server, follower, follower.received)
        assert server.log_matches("FATAL.*\n.*CALL walrider") == []
        one.close()


def test_stop_waits_for_the_standby(make_server, disk):
    """As long as it does not confirm, up to wal_sender_timeout."""
    server = make_server("wal_sender_timeout = 3s\n")
    with Follower(server, flushed(server)) as follower:
        follower.answer = lambda received, _wal_end: (received, follower.start_lsn, follower.start_lsn)
        server.psql("INSERT INTO t VALUES (1)")
        server.process.send_signal(signal.SIGINT)
        checkpoint = lambda: parse_lsn(server.controldata()["Latest checkpoint location"])
        wait_for(lambda: follower.received > checkpoint() > follower.start_lsn, "the shutdown checkpoint")
        time.sleep(1)
        assert server.process.poll() is None and not follower.ended
        follower.answer = Follower.everything
        server.stop(timeout=30)
        assert follower.wait_end().ended


def test_stop_with_a_silent_standby(make_server):
    """The server does not wait longer than wal_sender_timeout."""
    server = make_server("wal_sender_timeout = 2s\n")
    with Follower(server, flushed(server), answer=Follower.nothing) as follower:
        server.psql("INSERT INTO t VALUES (1)")
        begun = time.monotonic()
        server.stop(timeout=60)
        assert 1 < time.monotonic() - begun < 15
        assert not follower.wait_end().ended


def test_timeout(make_server):
    """Half of wal_sender_timeout: a question; all of it: the end. Who answers stays."""
    server = make_server("wal_sender_timeout = 2s\n")
    silent = Follower(server, flushed(server), answer=Follower.nothing, application_name="silent")
    with silent, Follower(server, flushed(server)) as follower:
        silent.wait_end()
        assert any(message.get("reply") for message in silent.messages)
        assert server.log_matches("terminating walsender process due to replication timeout")
        time.sleep(3)
        assert follower.is_alive() and server.psql("SELECT application_name FROM pg_stat_replication") == [["early"]]


def test_ends(make_server):
    """Terminated, cancelled, hung up on, ended by the standby: each ends the process and frees its slot."""
    server = make_server(PRELOAD)
    server.psql("SELECT pg_create_physical_replication_slot('early')")

    def begun():
        return Follower(server, flushed(server), slot="early"), walsender(server)

    def over(follower, pid):
        wait_for(lambda: is_gone(pid), "the process")
        follower.close()
        assert server.psql("SELECT active FROM pg_replication_slots") == [["f"]]
        assert server.psql("SELECT 1 FROM walrider.stat_early_stream") == []

    follower, pid = begun()
    server.psql(f"SELECT pg_terminate_backend({pid})")
    assert follower.wait_end().error.sqlstate == "57P01"
    over(follower, pid)

    follower, pid = begun()
    server.psql(f"SELECT pg_cancel_backend({pid})")
    assert follower.wait_end().error.sqlstate == "57014"
    over(follower, pid)

    # An error ends the process because of a setting of its own, which the file's does not replace.
    follower, pid = begun()
    server.psql("ALTER SYSTEM SET exit_on_error = off; ALTER SYSTEM SET walrider.early = off; SELECT pg_reload_conf()")
    wait_for(lambda: stat(server, "early") == ["f"], "the new settings")
    server.psql(f"SELECT pg_cancel_backend({pid})")
    assert follower.wait_end().error.sqlstate == "57014"
    over(follower, pid)

    follower, pid = begun()
    follower.close()
    over(follower, pid)

    follower, pid = begun()
    follower.client.copy_done()
    assert follower.wait_end().ended
    over(follower, pid)



def test_idle_with_the_postmaster(make_server):
    """The postmaster is killed: the sender does not outlive it."""
    server = make_server(PRELOAD)
    with Follower(server, flushed(server)) as follower:
        pid = walsender(server)
        server.process.kill()
        server.process.wait()
        wait_for(lambda: is_gone(pid), "the sender")
        follower.wait_end()
        server.kill()


@pytest.mark.every_major
@pytest.mark.parametrize("mode", ["immediate", "kill"])
def test_crash(make_server, disk, preload, mode):
    """What was sent ahead of the flush is lost and written anew; what was told to be flushed is not."""
    server = make_server(preload, disk)
    with Follower(server, flushed(server)) as follower, server.session() as one, server.session() as two:
        server.psql("INSERT INTO t VALUES (0)")
        disk.hold_fsync()
        one.send("INSERT INTO t VALUES (1, 'first')")
        if preload:
            follower.wait(lambda it: b"first" in it.wal, "a commit in its fsync")
        in_fsync(server, "first")
        two.send("INSERT INTO t VALUES (2, 'second')")
        if preload:
            follower.wait(lambda it: b"second" in it.wal, "a commit behind it")
        else:
            time.sleep(0.5)
        server.kill() if mode == "kill" else server.stop("immediate")
        follower.wait_end()
        lost, horizon = follower.received, follower.wal_end
    disk.hold_fsync(False)
    server.start()
    assert server.value("SELECT count(*) FROM t WHERE id = 2") == "0"
    with Follower(server, horizon) as again:
        server.psql("INSERT INTO t VALUES (3, 'third')")
        end = inserted(server)
        again.wait_flushed(end)
        check_bytes(server, again, end)
        assert bytes(follower.wal[:horizon - follower.start_lsn]) == wal_files(server, follower.start_lsn, horizon)
        if preload:
            assert lost > horizon
            assert bytes(follower.wal[horizon - follower.start_lsn:]) != bytes(again.wal[:lost - horizon])


def test_backend_crash(make_server, preload):
    """A backend dies: the postmaster makes shared memory anew, and streams work as before."""
    server = make_server(preload)
    with Follower(server, flushed(server)) as follower, server.session() as one:
        os.kill(int(one.run("SELECT pg_backend_pid()")[0]), signal.SIGKILL)
        follower.wait_end()

    def accepts():
        return server.psql("SELECT 1", check=False) == [["1"]]

    wait_for(accepts, "the restart")
    with Follower(server, flushed(server)) as follower:
        server.psql("INSERT INTO t VALUES (1)")
        follower.wait_flushed(inserted(server))
        assert len(server.psql("SELECT 1 FROM walrider.stat_early_stream")) == 1
