"""`walrider doctor`: each rule finds what is made for real, and nothing where all is well.

Not tried: a hypervisor or auditd that makes system calls slow.  `make test-majors` runs these tests on 13 to 16.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
from contextlib import ExitStack, contextmanager

import pytest

from tests.lab import install
from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.server import tools
from tests.lab.standby import standby
from tests.lab.standby.standby import Walrider, wait_position, wait_streaming
from tests.lab.standby.watched import BATCH, conflict, hot, load, primary_of, scattered
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider

WRONG = 5


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    with primary_of(primary_template, work, "max_slot_wal_keep_size = 1GB\n") as server:
        yield server


def doctor(*servers, time="4s"):
    """The findings by rule, and the exit code."""
    dsns = [server if isinstance(server, str) else server.dsn() for server in servers]
    result = walrider("doctor", "--json", "--time", time, *dsns, timeout=120)
    assert result.code in (0, WRONG), result.stderr
    findings = json.loads(result.stdout)["findings"]
    assert (result.code == WRONG) == any(finding["severity"] != "notice" for finding in findings)
    assert all(finding["what"] and (finding["advice"] or not finding["evidence"]) for finding in findings)
    return {finding["rule"]: finding for finding in findings}


@pytest.mark.alone
def test_all_is_well(primary, work):
    """A primary and a standby with a moderate load: nothing is found, and the exit code says so. Beside other tests the disk may be slow."""
    with hot(primary, work) as follower, load(primary, "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 100) i", pause=0.05):
        wait_position(primary)
        # Before 14, sizes of files are looked up for each record, which is always told.
        always = {"file_sizes"} if int(install.major()) < 14 else set()
        assert set(doctor(primary, follower.server)) == always
        said = walrider("doctor", "--time", "2s", primary.dsn(), follower.server.dsn()).expect()
    assert ("Nothing is wrong" in said.stdout) == (not always)


@pytest.mark.parametrize("cause", ["network", "not_sent", "standby_fsync", "stopped", "paused", "apply_delay"])
def test_the_bottleneck(primary, work, cause):
    """What most of the lag is owed to is named, with the evidence."""
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(primary.port))
        disk = Disk(work / "disk", work / "standby")
        settings = {"recovery_min_apply_delay": "1min"} if cause == "apply_delay" else {}
        follower = stack.enter_context(hot(primary, work, proxy.port, disk, **settings))
        stack.enter_context(load(primary))
        pid = None
        match cause:
            case "network":
                proxy.throttle(down=100_000)
            case "standby_fsync":
                disk.fsync_takes(400)
            case "not_sent":
                pid = int(primary.value("SELECT pid FROM pg_stat_replication"))
            case "stopped":
                pid = int(follower.server.value("SELECT pid FROM pg_stat_activity WHERE backend_type = 'startup'"))
            case "paused":
                follower.server.psql("SELECT pg_wal_replay_pause()")
        if pid:
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        found = doctor(primary, follower.server, time="6s")
    finding = found[f"lag_{cause}"]
    assert finding["subject"] == standby.NAME and finding["evidence"], finding
    assert not [rule for rule in found if rule.startswith("lag_") and rule != f"lag_{cause}"], found
    assert (finding["severity"] == "notice") == (cause == "apply_delay")


def test_a_disk_that_is_slow_for_reads(primary, work):
    """Replay waits for pages. That it does not read ahead is said, where it does not."""
    sql = scattered(primary)
    disk = Disk(work / "disk", work / "standby")
    major = int(install.major())
    settings = {**({"recovery_prefetch": "off"} if major >= 15 else {}), **({"io_method": "sync"} if major >= 18 else {})}
    with hot(primary, work, disk=disk, shared_buffers="1MB", **settings) as follower, load(primary, sql):
        disk.reads_take(10)
        found = doctor(primary, follower.server, time="8s")
    assert "lag_replay_read" in found and ("recovery_prefetch" in found) == (major >= 15), found


def test_a_disk_that_is_slow_for_writes_of_data(primary, work):
    """Replay has to write a changed page before it can read another, as there is no room for both."""
    sql = scattered(primary)
    disk = Disk(work / "disk", work / "standby")
    with hot(primary, work, disk=disk, shared_buffers="1MB", bgwriter_lru_maxpages="0") as follower, load(primary, sql):
        disk.data_writes_take(10)
        found = doctor(primary, follower.server, time="8s")
    assert "lag_replay_write" in found, found


def test_a_disk_that_is_slow_for_writes_of_wal(primary, work):
    """The process that receives writes, most of the time."""
    disk = Disk(work / "disk", work / "standby")
    with hot(primary, work, disk=disk) as follower, load(primary):
        disk.writes_take(200)
        found = doctor(primary, follower.server, time="8s")
    assert "lag_standby_write" in found, found


def commits_at_once(primary):
    """The commit of a TRUNCATE waits for the disk, whatever synchronous_commit says."""
    primary.psql("ALTER SYSTEM SET fsync = off")
    primary.psql("SELECT pg_reload_conf()")


def with_a_backlog(primary, follower, repeated, counts):
    """The findings while replay works off what it was held back from; a machine that has done it before doctor has looked gets more."""
    commits_at_once(primary)
    for count in counts:
        follower.server.psql("SELECT pg_wal_replay_pause()")
        primary.psql(f"SET synchronous_commit = off; DO $$BEGIN FOR i IN 1..{count} LOOP {repeated}; COMMIT; END LOOP; END$$")
        wait_position(primary, stage="flush")
        end = primary.value("SELECT pg_current_wal_flush_lsn()")
        with load(primary):
            follower.server.psql("SELECT pg_wal_replay_resume()")
            found = doctor(primary, follower.server, time="3s")
        if follower.server.value(f"SELECT pg_last_wal_replay_lsn() < '{end}'") == "t":
            return found
        wait_position(primary)
    raise AssertionError(f"replayed before doctor had looked: {counts[-1]} times {repeated}")


def test_replay_at_its_limit(primary, work):
    """Replay computes: each TRUNCATE takes a look at every shared buffer, of which the standby has many."""
    with hot(primary, work, shared_buffers="2GB", fsync="off") as follower:
        found = with_a_backlog(primary, follower, "TRUNCATE t", (7_000, 20_000))
    assert "lag_replay_cpu" in found, found


@contextmanager
def fed(primary, follower):
    """The standby gets as much as it can replay, and no more: a tenth of a second is never behind."""
    commits_at_once(primary)
    stop = threading.Event()

    def feed():
        with primary.session(options="-c synchronous_commit=off") as writer, follower.server.session() as reader:
            while not stop.is_set():
                replayed, = reader.run("SELECT pg_last_wal_replay_lsn()")
                if writer.run(f"SELECT pg_current_wal_lsn() - '{replayed}'::pg_lsn < 20000") == ["t"]:
                    writer.run("DO $$BEGIN FOR i IN 1..50 LOOP TRUNCATE t; COMMIT; END LOOP; END$$")

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield
    finally:
        stop.set()
        feeder.join()


@pytest.mark.alone
def test_replay_that_nearly_falls_behind(primary, work):
    """It computes all the time, and is not late."""
    with hot(primary, work, shared_buffers="4GB", fsync="off") as follower, fed(primary, follower):
        found = doctor(primary, follower.server, time="5s")
    assert "falls behind above" in found["little_headroom"]["what"], found
    assert not [rule for rule in found if rule.startswith("lag_")], found
    assert "fsync = off" in found["unsafe_setting"]["evidence"], found


@pytest.mark.alone
def test_replay_that_is_mostly_system_calls(primary, work):
    """It makes and removes a file for each TRUNCATE, and has few buffers to look through; it waits for who asks, and cancels nobody."""
    with hot(primary, work, shared_buffers="16MB", fsync="off", max_standby_streaming_delay="-1") as follower:
        found = with_a_backlog(primary, follower, "TRUNCATE t", (32_000, 64_000))
    assert "system_calls" in found and "a second" in found["system_calls"]["evidence"][1], sorted(found)


@pytest.mark.from_major(17, "pgaudit is fetched for 17 and 18")
@pytest.mark.skipif(not tools.has("pgaudit"), reason="pgaudit could not be fetched: `make fetch-tools` says why")
def test_statements_that_are_audited(primary, work):
    """pgaudit is loaded, and writes to the log."""
    assert "pgaudit" not in doctor(primary, time="2s")
    primary.restart(listen_addresses="127.0.0.1", shared_preload_libraries=tools.library("pgaudit"), **{"pgaudit.log": "write"})
    primary.psql(BATCH)
    assert primary.log_matches("AUDIT: SESSION")
    assert doctor(primary, time="2s")["pgaudit"]["severity"] == "notice"


def test_conflicts(primary, work):
    """Replay waits for a query; then the query is cancelled."""
    with hot(primary, work, max_standby_streaming_delay="5s", hot_standby_feedback="off") as follower:
        with conflict(primary, follower), load(primary):
            found = doctor(primary, follower.server, time="8s")
    assert found["queries_cancelled"]["evidence"][0].startswith("1 for snapshot"), found


def test_not_connected_and_a_slot_that_nobody_uses(primary, work):
    """The standby cannot reach the primary; another's slot keeps WAL, up to a bound or without."""
    primary.psql("SELECT pg_create_physical_replication_slot('gone', true)")
    with Proxy(primary.port) as proxy, hot(primary, work, proxy.port) as follower:
        found = doctor(primary, follower.server, time="2s")
        assert "slot_unused" not in found and "not_connected" not in found, "it does not hold much"
        proxy.cut(refuse=True)
        primary.psql("CREATE TABLE large AS SELECT repeat(md5(i::text), 30) v FROM generate_series(1, 70000) i")
        found = doctor(primary, follower.server)
    assert found["not_connected"]["severity"] == "critical" and "slot_unused" in found, found
    assert "until the disk is full" not in found["slot_unused"]["what"], found
    primary.psql("ALTER SYSTEM SET max_slot_wal_keep_size = -1")
    primary.psql("SELECT pg_reload_conf()")
    assert "until the disk is full" in doctor(primary, time="2s")["slot_unused"]["what"]


def test_commits_that_wait_for_nobody(primary, work):
    """synchronous_standby_names names a standby that is not there."""
    with hot(primary, work) as follower, load(primary, "INSERT INTO t VALUES (1, 'waits')"):
        primary.psql("ALTER SYSTEM SET synchronous_standby_names = 'other'")
        primary.psql("SELECT pg_reload_conf()")
        try:
            # Commits wait once the checkpointer has read the file; the first ones may be before it.
            wait_for(lambda: primary.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'") == "1", "a wait")
            found = doctor(primary, follower.server, time="2s")
        finally:
            primary.psql("ALTER SYSTEM RESET synchronous_standby_names")
            primary.psql("SELECT pg_reload_conf()")
    assert found["no_synchronous_standby"]["severity"] == "critical", found


def test_a_slow_synchronous_standby(primary, work):
    """Commits wait for the standby's disk."""
    disk = Disk(work / "disk", work / "standby")
    with hot(primary, work, disk=disk) as follower:
        primary.psql(f"ALTER SYSTEM SET synchronous_standby_names = '{standby.NAME}'")
        primary.psql("SELECT pg_reload_conf()")
        disk.fsync_takes(150)
        with load(primary, "INSERT INTO t VALUES (1, 'x')"):
            found = doctor(primary, follower.server, time="5s")
        disk.fsync_takes(0)
    assert "synchronous_wait" in found and "no_synchronous_standby" not in found, found
    assert "slow_fsync" in found, found


def test_an_archiver_that_fails(primary, work):
    """archive_command says no."""
    primary.configure("archive_mode = on\narchive_command = 'false'\n")
    primary.restart(listen_addresses="127.0.0.1")
    primary.switch_wal()
    wait_for(lambda: primary.value("SELECT failed_count > 0 FROM pg_stat_archiver") == "t", "a failure")
    found = doctor(primary, time="2s")
    assert found["archiver_fails"]["severity"] == "critical" and "false" in "".join(found["archiver_fails"]["evidence"]), found


@pytest.mark.from_major(14, "pg_stat_wal")
def test_checkpoints_images_and_buffers(primary, work):
    """max_wal_size is too small for the load, so that most of its WAL is images, and wal_buffers for its rows."""
    primary.configure("max_wal_size = 4MB\nmin_wal_size = 2MB\nwal_buffers = 32kB\ncheckpoint_timeout = 1h\n")
    primary.restart(listen_addresses="127.0.0.1")
    primary.psql("CREATE TABLE wide AS SELECT i AS id, 0 AS n FROM generate_series(1, 200000) i; CREATE INDEX ON wide (id)")
    update = "UPDATE wide SET n = n + 1 WHERE id IN (SELECT (random() * 200000)::int FROM generate_series(1, 1500))"
    with load(primary, update), load(primary, BATCH):
        found = doctor(primary, time="8s")
    assert {"max_wal_size", "full_page_images", "wal_buffers"} <= found.keys(), found
    assert "requested checkpoints" in found["max_wal_size"]["evidence"][0]


def test_settings_that_lose_data(primary, work):
    """fsync and full_page_writes are off."""
    primary.restart(listen_addresses="127.0.0.1", fsync="off", full_page_writes="off")
    result = walrider("doctor", "--time", "2s", primary.dsn())
    result.expect(WRONG)
    assert "fsync is off" in result.stdout and "full_page_writes is off" in result.stdout, result.stdout


def test_a_slot_that_has_lost_its_wal(primary, work):
    """max_slot_wal_keep_size is less than what its standby misses."""
    primary.psql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'; ALTER SYSTEM SET wal_keep_size = 0")
    primary.psql("SELECT pg_reload_conf()")
    primary.psql("SELECT pg_create_physical_replication_slot('gone', true)")
    primary.psql("CREATE TABLE large AS SELECT repeat(md5(i::text), 30) v FROM generate_series(1, 10000) i")
    for _ in range(2):
        primary.psql("SELECT pg_switch_wal()")
        primary.psql("CHECKPOINT")
    wait_for(lambda: primary.value("SELECT wal_status FROM pg_replication_slots") == "lost", "a lost slot")
    found = doctor(primary, time="2s")
    assert found["slot_lost"]["severity"] == "warning" and "slot_unused" not in found, found


def test_one_end_alone(primary, work):
    """The primary alone does not tell why replay lags, the standby alone not how old what it has is; each is said."""
    with hot(primary, work) as follower, load(primary):
        follower.server.psql("SELECT pg_wal_replay_pause()")
        assert "name the standby" in doctor(primary, time="6s")["lag_replay"]["advice"]
        assert "no_primary" in doctor(follower.server, time="2s")


@pytest.mark.from_major(15, "the wait event RestoreCommand")
def test_wal_from_a_slow_archive(primary, work):
    """restore_command takes a second, and the primary cannot be reached."""
    archive = work / "archive"
    archive.mkdir()
    primary.configure(f"archive_mode = on\narchive_command = 'cp %p {archive}/%f'\n")
    primary.restart(listen_addresses="127.0.0.1")
    command = f"sleep 1; cp {archive}/%f %p"
    with Proxy(primary.port) as proxy, hot(primary, work, proxy.port, restore_command=command) as follower:
        proxy.cut(refuse=True)
        with load(primary):
            found = doctor(primary, follower.server, time="8s")
    assert "lag_wal_fetch" in found and "not_connected" in found, found


def test_rights_and_a_server_that_is_down(primary, work):
    """An ordinary user is told what it does not see; a server that does not answer is a finding, and no hang."""
    primary.psql("CREATE ROLE nobody LOGIN")
    found = doctor(primary.dsn().replace("user=postgres", "user=nobody"), "host=127.0.0.1 port=1 user=postgres", time="2s")
    assert found["rights"]["severity"] == "notice" and found["no_answer"]["severity"] == "warning", found


@pytest.mark.from_major(17, "Walrider's own standbys are of 17 and 18")
def test_walrider_and_a_recording(primary, work):
    """A paused standby of Walrider; and the same from a recording."""
    recording = work / "recording"
    with Walrider(standby.clone(primary, work / "standby")).start() as follower:
        wait_streaming(primary)
        follower.pause()
        servers = [primary.dsn(), f"http://127.0.0.1:{follower.port}"]
        with load(primary):
            walrider("top", "--batch", "-n", 6, "--record", recording, *servers, timeout=60).expect()
            assert "lag_paused" in doctor(*servers)
    result = walrider("doctor", "--json", "--recording", recording)
    result.expect(WRONG)
    assert [finding["rule"] for finding in json.loads(result.stdout)["findings"]] == ["lag_paused"], result.stdout


def test_a_host_that_is_audited(primary, work):
    """A process of that name is all that is looked for."""
    program = work / "auditd"
    shutil.copy(shutil.which("sleep"), program)
    with hot(primary, work) as follower, subprocess.Popen([program, "60"]) as audit:
        try:
            found = doctor(primary, follower.server, time="2s")
        finally:
            audit.kill()
    assert found["auditd"]["severity"] == "notice", found
