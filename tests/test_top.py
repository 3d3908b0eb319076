"""`walrider top`: each cause of lag is made for real, and named first.

Not tried: servers before 17, a network that loses packets, standbys of standbys.
"""

import json
import os
import signal
import time

import pytest

from tests.lab import install
from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.standby import standby
from tests.lab.standby.standby import Walrider, wait_position, wait_streaming
from tests.lab.standby.watched import BATCH, conflict, hot, load, primary_of, scattered
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    with primary_of(primary_template, work) as server:
        yield server


def top(*servers, rounds=8, interval="500ms"):
    """The last of some views."""
    dsns = [server if isinstance(server, str) else server.dsn() for server in servers]
    result = walrider("top", "--batch", "--json", "-n", rounds, "-i", interval, *dsns, timeout=120).expect()
    return json.loads(result.stdout.splitlines()[-1])["view"]


def shown(view):
    """The only standby of a view."""
    (one,) = view["standbys"]
    return one


def test_a_standby_that_keeps_up(primary, work):
    """Its lag is small at each stage, and what it could do is more than what it does; at rest there is none."""
    with hot(primary, work) as follower:
        with load(primary):
            view = top(primary, follower.server)
        one = shown(view)
        assert (one["name"], one["state"], one["connected"]) == (standby.NAME, "streaming", True), one
        assert one["replay"]["seconds"] < 1 and view["wal_rate"] > 100_000, view
        speed = one["speed"]
        assert speed["rate"] > 100_000 and 0 <= speed["utilisation"] <= 1 and speed["cpu"] is not None, speed
        wait_position(primary)
        one = shown(top(primary, follower.server, rounds=2))
        assert [one[stage]["bytes"] for stage in ("sent", "write", "flush", "replay")] == [0, 0, 0, 0], one
        assert one["parts"] == [] and one["replay"]["seconds"] == 0


def test_the_network(primary, work):
    """A line that is too slow for the load."""
    with Proxy(primary.port) as proxy, hot(primary, work, proxy.port) as follower, load(primary):
        proxy.throttle(down=100_000)
        one = shown(top(primary, follower.server))
    assert one["parts"][0][0] == "network", one
    assert one["replay"]["seconds"] > 1 and one["speed"]["utilisation"] < 0.5, one


def test_the_primary_does_not_send(primary, work):
    """Its walsender is stopped: nothing comes any more, and it is not the network's fault."""
    with hot(primary, work) as follower, load(primary):
        sender = int(primary.value("SELECT pid FROM pg_stat_replication"))
        os.kill(sender, signal.SIGSTOP)
        try:
            one = shown(top(primary, follower.server))
        finally:
            os.kill(sender, signal.SIGCONT)
    assert one["parts"][0][0] == "not_sent", one


def test_fsync_of_the_standby(primary, work):
    """Its disk takes 300 ms for each fsync; nothing is received meanwhile, which looks like a slow network from the primary."""
    disk = Disk(work / "disk", work / "standby")
    with hot(primary, work, disk=disk) as follower, load(primary):
        disk.fsync_takes(300)
        one = shown(top(primary, follower.server))
    assert one["parts"][0][0] == "standby_fsync", one


def test_replay_that_is_stopped(primary, work):
    """The startup process does not run."""
    with hot(primary, work) as follower, load(primary):
        pid = int(follower.server.value("SELECT pid FROM pg_stat_activity WHERE backend_type = 'startup'"))
        os.kill(pid, signal.SIGSTOP)
        try:
            one = shown(top(primary, follower.server))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert one["parts"][0][0] == "stopped" and one["flush"]["seconds"] < 1 < one["replay"]["seconds"], one


def test_a_conflicting_query(primary, work):
    """A query holds a snapshot that replay of a vacuum has to wait for."""
    with hot(primary, work, max_standby_streaming_delay="-1", hot_standby_feedback="off") as follower:
        with conflict(primary, follower), load(primary):
            one = shown(top(primary, follower.server))
    assert one["parts"][0][0] == "conflict", one


def test_apply_delay(primary, work):
    """recovery_min_apply_delay is no trouble of replay."""
    with hot(primary, work, recovery_min_apply_delay="20s") as follower, load(primary):
        one = shown(top(primary, follower.server))
    assert one["parts"][0][0] == "apply_delay" and (one["speed"]["utilisation"] or 0) < 0.5, one


def test_replay_that_is_paused(primary, work):
    """pg_wal_replay_pause()"""
    with hot(primary, work) as follower, load(primary):
        follower.server.psql("SELECT pg_wal_replay_pause()")
        # Before 14, nobody tells a pause that is asked for from one that has begun.
        state = "pg_get_wal_replay_pause_state()" if int(install.major()) >= 14 else "CASE WHEN pg_is_wal_replay_paused() THEN 'paused' END"
        wait_for(lambda: follower.server.value(f"SELECT {state}") == "paused", "paused")
        one = shown(top(primary, follower.server))
    assert one["parts"][0][0] == "paused", one


def test_not_connected(primary, work):
    """Its lag grows, and is not shown as none."""
    with Proxy(primary.port) as proxy, hot(primary, work, proxy.port) as follower, load(primary):
        proxy.cut(refuse=True)
        wait_for(lambda: standby.replication(primary) is None, "the walsender's end")
        one = shown(top(primary, follower.server))
    assert (one["connected"], one["state"]) == (False, "not connected"), one
    assert one["replay"]["bytes"] > 0 and one["replay"]["seconds"] > 1 and one["parts"][0][0] == "not_connected", one


def test_a_server_that_hangs(primary, work):
    """The standby does not answer: that is said, and the primary is asked all the same."""
    with hot(primary, work) as follower, load(primary):
        with Proxy(follower.server.port) as proxy:
            proxy.silence()
            dsn = f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres"
            began = time.monotonic()
            view = top(primary, dsn, rounds=3)
            assert time.monotonic() - began < 20
    names = [one["name"] for one in view["standbys"]]
    assert names == [standby.NAME] and view["wal_rate"] > 0, view


def test_least_rights(primary, work):
    """pg_monitor is enough for all of it."""
    primary.psql("CREATE ROLE watcher LOGIN; GRANT pg_monitor TO watcher")
    with hot(primary, work) as follower, load(primary):
        wait_position(primary)
        dsns = [server.dsn().replace("user=postgres", "user=watcher") for server in (primary, follower.server)]
        assert all("watcher" in dsn for dsn in dsns)
        one = shown(top(*dsns))
    assert one["speed"]["utilisation"] is not None and one["sent"]["lsn"] is not None, one


@pytest.mark.from_major(17, "Walrider's own standbys are of 17 and 18")
def test_walrider_beside(primary, work):
    """`walrider standby` in the same columns, from its own status."""
    with Walrider(standby.clone(primary, work / "standby")).start() as follower:
        wait_streaming(primary)
        with load(primary):
            one = shown(top(primary, f"http://127.0.0.1:{follower.port}"))
            assert one["walrider"] and one["name"] == standby.NAME and one["replay"]["seconds"] < 2, one
            follower.pause()
            one = shown(top(primary, f"http://127.0.0.1:{follower.port}"))
    assert one["parts"][0][0] == "paused", one


def walrider_top(primary, follower, **options):
    """The view of a standby that is Walrider's."""
    return shown(top(primary, f"http://127.0.0.1:{follower.port}", **options))


@pytest.mark.from_major(17, "Walrider's own standbys are of 17 and 18")
@pytest.mark.parametrize("cause", ["network", "standby_fsync", "apply_delay", "paused", "replay_read"])
def test_what_holds_walrider_up(primary, work, cause):
    """The same causes, named first from its own status; and it says how fast it could be."""
    disk = Disk(work / "disk", work / "standby")
    options = ["--min-apply-delay", "20s"] if cause == "apply_delay" else []
    sql = scattered(primary) if cause == "replay_read" else BATCH
    with Proxy(primary.port) as proxy:
        data_dir = standby.clone(primary, work / "standby", proxy.port)
        with Walrider(data_dir, *options, disk=disk).start() as follower:
            wait_streaming(primary)
            match cause:
                case "network":
                    proxy.throttle(down=100_000)
                case "standby_fsync":
                    disk.fsync_takes(400)
                case "paused":
                    follower.pause()
                case "replay_read":
                    disk.reads_take(20)
            with load(primary, sql):
                one = walrider_top(primary, follower)
    assert one["walrider"] and one["parts"][0][0] == cause, json.dumps(one)
    busy = one["speed"]["utilisation"]
    assert busy > 0.5 if cause == "replay_read" else busy < 0.5, one
    if cause == "replay_read":
        assert one["replaying"]["read"] > 0.3 and one["speed"]["capacity"] < 1e6, one


@pytest.mark.from_major(17, "Walrider's own standbys are of 17 and 18")
def test_walrider_waits_for_its_archive(primary, work):
    """restore_command takes a second, and the primary cannot be reached."""
    archive = work / "archive"
    archive.mkdir()
    primary.configure(f"archive_mode = on\narchive_command = 'cp %p {archive}/%f'\n")
    primary.restart(listen_addresses="127.0.0.1")
    with Proxy(primary.port) as proxy:
        data_dir = standby.clone(primary, work / "standby", proxy.port)
        proxy.cut(refuse=True)
        command = ["--restore-command", f"sleep 1; cp {archive}/%f %p", "--fetch-jobs", "1"]
        with load(primary):
            with Walrider(data_dir, *command).start() as follower:
                one = walrider_top(primary, follower)
    assert "wal_fetch" in [part for part, _ in one["parts"][:2]] and one["replaying"]["fetch"] > 0.5, json.dumps(one)


def test_a_recording_says_the_same(primary, work):
    """`walrider explain-lag` of what was recorded, its last line cut off as by a kill."""
    recording = work / "recording"
    with hot(primary, work) as follower, load(primary):
        follower.server.psql("SELECT pg_wal_replay_pause()")
        dsns = [primary.dsn(), follower.server.dsn()]
        result = walrider("top", "--batch", "--json", "-n", 6, "-i", "500ms", "--record", recording, *dsns, timeout=60).expect()
    live = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(walrider("explain-lag", "--json", recording).expect().stdout) == live
    recording.write_bytes(recording.read_bytes()[:-100])
    said = walrider("explain-lag", recording).expect()
    assert "paused" in said.stdout and "passed over" in said.stderr
    assert "password" not in recording.read_text()
    recording.write_text("nothing\n")
    walrider("explain-lag", recording).expect(4)
