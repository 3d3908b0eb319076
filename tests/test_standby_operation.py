"""Operating `walrider standby`: configuration, signals, systemd, logs, what it tells over HTTP, and what it refuses."""

import json
import os
import signal
import socket
import time
from datetime import datetime

import pytest

from tests.lab.faults.shim import Disk
from tests.lab.server.cluster import controldata
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Walrider, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import DONE, FAILED, USAGE, binary, walrider

NOT_RUNNING, NO_DIRECTORY = 3, 4        # of pg_ctl status


@pytest.fixture
def directory(primary, work):
    """A base backup that follows the primary."""
    return standby.clone(primary, work / "ours")


def logged(follower, text, timeout=30):
    """Wait until the log has this text."""
    wait_for(lambda: text in follower.log_text(), lambda: f"{text!r} in the log\n{follower.log_tail()}", timeout)


def samples(text):
    """Samples of Prometheus' text format, by name and labels."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len({series for series, _ in lines}) == len(lines)
    return {series: float(value) for series, value in lines}


def test_what_it_tells(primary, directory):
    """/status, /metrics and /health agree with the primary, and notice when it goes."""
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        primary.psql("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")
        end = wait_position(primary)
        follower.wait_replayed(end)
        status = follower.status()
        assert status["state"] == "streaming" and not status["paused"] and status["consistent"], status
        assert (status["pid"], status["command"]) == (follower.process.pid, "standby")
        assert status["system_identifier"] == primary.value("SELECT system_identifier FROM pg_control_system()")
        assert status["timeline"] == 1 and status["connections"] == 1
        assert status["primary"] == f"127.0.0.1:{primary.port}" and status["application_name"] == standby.NAME
        assert status["replay"]["transactions"] > 0 and status["spool"]["fsyncs"] > 0
        assert status["positions"]["checkpoint_redo"]["lsn"]
        wait_for(lambda: follower.status()["replay_lag_seconds"] == 0, lambda: follower.status())
        now = datetime.now().timestamp()
        for key, oldest in [("started_at", 120), ("connected_since", 120), ("last_message_received", 60), ("replayed_commit", 60)]:
            assert -1 < now - datetime.fromisoformat(status[key]).timestamp() < oldest, (key, status)

        code, text = follower.get("/metrics")
        metrics = samples(text)
        assert code == 200 and metrics['walrider_state{state="streaming"}'] == 1 and metrics["walrider_connected"] == 1
        assert metrics['walrider_position_bytes{stage="replayed"}'] >= follower_lsn(status, "replayed")
        assert metrics["walrider_spool_fsync_seconds_count"] >= status["spool"]["fsyncs"]
        assert metrics["process_resident_memory_bytes"] > 1e6 and metrics["process_open_fds"] > 3

        assert follower.get("/health") == (200, "ok\n")
        assert follower.get("/health?max_lag_bytes=0&max_lag_seconds=1")[0] == 200
        assert follower.get("/health?lag=1")[0] == 400
        assert follower.get("/nothing")[0] == 404

        follower.pause()
        wait_for(lambda: follower.get("/health")[0] == 503, "unhealthy while paused")
        assert "paused" in follower.get("/health")[1]
        primary.psql("INSERT INTO t SELECT generate_series(1, 1000)", options=LOCALLY)
        wait_position(primary, stage="flush")
        wait_for(lambda: follower.status()["replay_lag_seconds"] > 0, lambda: follower.status())
        status = follower.status()
        assert status["paused"] and status["positions"]["replayed"]["behind_bytes"] > status["positions"]["flushed"]["behind_bytes"]
        follower.resume()
        wait_for(lambda: follower.get("/health")[0] == 200, "healthy again")

        primary.kill()
        wait_for(lambda: follower.get("/health")[0] == 503, "unhealthy without the primary")
        status = follower.status()
        assert status["state"] == "connecting" and status["connected_since"] is None and status["last_error"]["message"]
        assert samples(follower.get("/metrics")[1])["walrider_connected"] == 0
        start_primary(primary)
        wait_for(lambda: follower.get("/health")[0] == 200, "healthy when it is back")
        assert follower.status()["connections"] >= 2


def follower_lsn(status, stage):
    """A position as a number."""
    return standby.parse_lsn(status["positions"][stage]["lsn"])


def test_the_file_and_what_sighup_changes(primary, directory, work):
    """Options come from the file; SIGHUP takes up what may change, says what may not, and keeps what is right."""
    file = work / "standby.toml"
    file.write_text(f"min_apply_delay = '1h'\nlog_format = 'json'\njobs = 1\nconfig_file = '{directory}/postgresql.conf'\n")
    with Walrider(directory, "--config", file).start() as follower:
        wait_streaming(primary)
        assert follower.status()["min_apply_delay_seconds"] == 3600
        primary.psql("CREATE TABLE t (id int)", options=LOCALLY)
        end = wait_position(primary, stage="flush")
        time.sleep(1)
        behind = follower.status()["positions"]["replayed"]["behind_bytes"]
        assert behind > 0, "the commit is held back"

        for wrong in ("no_such_key = 1\n", "min_apply_delay = 5\n", "primary = 'password=secret\n"):
            file.write_text("\n" + wrong)
            follower.send_signal(signal.SIGHUP)
            logged(follower, f"{file}:2: ")
            follower.log.write_text("")
        assert follower.status()["min_apply_delay_seconds"] == 3600

        file.write_text("min_apply_delay = '0'\njobs = 2\nlog_level = 'debug'\n")
        follower.send_signal(signal.SIGHUP)
        for name in ("jobs", "log_format"):
            logged(follower, f'\\"{name}\\" cannot be changed without restarting')
        wait_position(primary, end)
        lines = [json.loads(line) for line in follower.log_text().splitlines() if line.strip("\0")]
        assert all({"timestamp", "level", "message"} <= line.keys() for line in lines), lines
        assert "secret" not in follower.log_text()

        # The directory's own configuration counts as well.
        with open(directory / "postgresql.auto.conf", "a") as conf:
            conf.write("recovery_min_apply_delay = '2min'\n")
        file.write_text("")
        follower.send_signal(signal.SIGHUP)
        wait_for(lambda: follower.status()["min_apply_delay_seconds"] == 120, lambda: follower.status())
        follower.stop(signal.SIGTERM)


def test_restartpoints(primary, directory, work):
    """Made while it follows, by volume: recovery begins later, old WAL goes or is used again, the archive is cleaned up, and
    a standby that is killed in the middle of it goes on."""
    with open(directory / "postgresql.conf", "a") as conf:
        conf.write(f"archive_cleanup_command = 'echo %r >> {work}/cleaned'\n")
    primary.psql("CREATE TABLE r (id serial PRIMARY KEY, filler text)", options=LOCALLY)
    with Walrider(directory, "--restartpoint-wal", "2MB", "--wal-keep", "0MB") as follower:
        for number in range(12):
            if follower.process is None:
                follower.start()
                wait_streaming(primary)
            primary.psql("INSERT INTO r (filler) SELECT repeat('x', 200) FROM generate_series(1, 10000); CHECKPOINT",
                         options=LOCALLY)
            wait_position(primary)
            if number % 4 == 3:
                follower.kill()
        follower.start()
        wait_streaming(primary)
        before = follower.status()["positions"]["checkpoint_redo"]["lsn"]

        def moved():
            primary.psql("INSERT INTO r (filler) SELECT repeat('x', 200) FROM generate_series(1, 10000); CHECKPOINT",
                         options=LOCALLY)
            return follower.status()["positions"]["checkpoint_redo"]["lsn"] != before
        wait_for(moved, lambda: f"a restartpoint\n{follower.log_tail()}", every=0.1)
        wait_for(lambda: (work / "cleaned").exists(), "the archive is cleaned up")
        assert "restartpoint complete" in follower.log_text()
        oldest = (work / "cleaned").read_text().split()[-1]
        segments = sorted(file.name for file in (directory / "pg_wal").iterdir() if len(file.name) == 24)
        assert segments[0] >= oldest, (oldest, segments)
        assert controldata(directory)["Database cluster state"] == "in archive recovery"
        follower.promote()
        with follower.serve() as server:
            count = primary.value("SELECT count(*) FROM r")
            assert server.value("SELECT count(*) FROM r") == count
            assert server.value("SET enable_seqscan = off; SELECT count(*) FROM r WHERE id > 0") == count


def test_a_restartpoint_while_nothing_comes(primary, directory):
    """It is made, and told, although no more WAL follows the checkpoint: the primary's only process that writes by itself is halted.  It
    was told with the next WAL, a quarter of a minute later or never."""
    writer, = primary.psql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'background writer'")[0]
    with Walrider(directory, "--restartpoint-interval", "1s").start() as follower:
        wait_streaming(primary)
        os.kill(int(writer), signal.SIGSTOP)
        try:
            primary.psql("CHECKPOINT")
            end = wait_position(primary)
            wait_for(lambda: follower.status()["replay"]["restartpoints"] == 1, follower.status)
            assert primary.wal_end() == end
        finally:
            os.kill(int(writer), signal.SIGCONT)


def test_a_stop_does_not_undo_a_promotion(primary, directory, work):
    """SIGTERM while the directory is handed over: whether to promote was asked before.  It was asked once more behind the last
    restartpoint, and the directory stayed a standby's, although nothing more was received."""
    disk = Disk(work / "shim", directory / "global")
    with Walrider(directory, disk=disk).start() as follower:
        wait_streaming(primary)
        primary.psql("CREATE TABLE newest (id int)")
        wait_position(primary, stage="flush")
        wait_position(primary)
        disk.hold_fsync()
        follower.send_signal(signal.SIGUSR1)
        wait_for(disk.is_held, lambda: f"the control file is written\n{follower.log_tail()}")
        follower.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        disk.hold_fsync(False)
        assert follower.wait_end() == DONE
        assert "promoted: selected new timeline ID" in follower.log_text(), follower.log_tail()
    assert not (directory / "standby.signal").exists()


def test_a_new_connection_string_is_taken_up(primary, directory, work):
    """SIGHUP with another application_name: a new connection, under that name."""
    file = work / "standby.toml"
    file.write_text("")
    with Walrider(directory, "--config", file).start() as follower:
        wait_streaming(primary)
        file.write_text(f"primary = '{standby.conninfo(primary.port, 'another')}'\n")
        follower.send_signal(signal.SIGHUP)
        wait_streaming(primary, "another")
        wait_for(lambda: standby.replication(primary) is None, "the old connection is gone")
        assert follower.status()["application_name"] == "another"


def test_systemd(primary, directory, work):
    """READY once recovery has begun, RELOADING and READY around a reload, STOPPING at the end, and the watchdog is fed."""
    path = work / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(30)
        os.environ.update(NOTIFY_SOCKET=str(path), WATCHDOG_USEC="1000000")
        try:
            follower = Walrider(directory).start()
        finally:
            del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]

        def until(wanted):
            seen = []
            while not seen or wanted not in seen[-1]:
                seen.append(manager.recv(65536).decode().splitlines())
            return seen

        with follower:
            until("READY=1")
            wait_streaming(primary)
            while not any(line.startswith("STATUS=streaming") for line in until("WATCHDOG=1")[-1]):
                pass
            follower.send_signal(signal.SIGHUP)
            reloading = until("RELOADING=1")[-1]
            assert 0 < int(reloading[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
            until("READY=1")
            follower.send_signal(signal.SIGTERM)
            until("STOPPING=1")
            assert follower.wait_end() == DONE


def test_log_lines_are_like_the_servers(primary, directory):
    """Time, process, severity; the first one says what begins."""
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        follower.stop()
        lines = follower.log_text().splitlines()
        assert 'LOG:  starting walrider standby 0.' in lines[0]
        assert f'data directory "{directory}", primary 127.0.0.1:{primary.port} as "{standby.NAME}", no slot, early stream' in lines[0]
        for line in lines:
            if not line.startswith("\t"):
                date, clock, zone, process, severity = line.split()[:5]
                datetime.fromisoformat(f"{date} {clock}")
                assert (zone, process) == ("UTC", lines[0].split()[3]) and severity in ("LOG:", "WARNING:", "ERROR:"), line


def test_status_stop_reload(primary, directory, work):
    """What runs and how far it is, then what the directory is; SIGHUP; stopped, with the directory handed over; and what
    pg_ctl says of the lock is not what we advise."""
    def status(code=DONE, data_dir=directory):
        return walrider("status", "-D", data_dir, "--json").expect(code).json

    found = status(NOT_RUNNING)
    assert (found["running"], found["process"], found["directory"]["role"]) == (False, None, "standby")
    assert status(NO_DIRECTORY, work / "nothing")["error"] and status(NO_DIRECTORY, work)["error"]
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        end = wait_position(primary)
        found = status()
        assert found["running"] and (found["process"]["pid"], found["process"]["command"]) == (follower.process.pid, "standby")
        assert -1 < datetime.now().timestamp() - datetime.fromisoformat(found["process"]["since"]).timestamp() < 60
        assert found["status"]["state"] == "streaming"
        assert standby.parse_lsn(found["status"]["positions"]["replayed"]["lsn"]) >= standby.parse_lsn(end)
        text = walrider("status", "-D", directory).expect().stdout
        assert "walrider standby runs on" in text and "state: streaming" in text and "replayed: " in text, text
        assert "walrider stop -D" in walrider("standby", "-D", directory).expect(FAILED).stderr
        walrider("reload", "-D", directory).expect()
        logged(follower, "received SIGHUP")
        said = walrider("stop", "-D", directory, "-t", "60s").expect()
        assert said.stdout.endswith(" done\nwalrider standby stopped\n"), said.stdout
        assert follower.wait_end(0) == DONE and not (directory / "postmaster.pid").exists()
    assert status(NOT_RUNNING)["directory"]["state"] == "shut down in recovery"
    assert "no walrider standby, replay, receive or relay runs" in walrider("stop", "-D", directory).expect(FAILED).stderr
    assert "use pg_ctl" in walrider("stop", "-D", primary.data_dir).expect(FAILED).stderr
    assert status(NOT_RUNNING, primary.data_dir)["process"]["command"] == "postgres"


def test_stop_waits_no_longer_than_it_is_told(directory):
    """One that cannot end, and one that was killed."""
    with Walrider(directory).start() as follower:
        follower.send_signal(signal.SIGSTOP)
        said = walrider("stop", "-D", directory, "--timeout", "100ms").expect(FAILED).stderr
        assert "did not stop within 0.1 s" in said
        follower.kill()
    assert (directory / "postmaster.pid").exists()
    assert walrider("status", "-D", directory).expect(NOT_RUNNING).stdout.startswith("nothing runs on")


def test_receive_is_found_too(primary, work):
    """It has no lock file: by its command line."""
    wal = work / "wal"
    wal.mkdir()
    with standby.Standby(wal) as receiver:
        receiver.spawn([binary(), "receive", "-d", standby.conninfo(primary.port), "-D", wal])
        wait_streaming(primary)
        found = walrider("status", "-D", wal, "--json").expect().json
        assert (found["process"]["pid"], found["process"]["command"]) == (receiver.process.pid, "receive")
        walrider("stop", "-D", wal).expect()
        assert receiver.wait_end(1) == DONE


def test_a_promote_file_that_is_left_over(primary, directory):
    """What is there when it starts asks for nothing, whatever the clocks said when it was made; what comes later does."""
    left = directory / "promote"
    left.write_text("why there was no promotion")
    os.utime(left, (time.time() + 86400,) * 2)
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        wait_for(lambda: not left.exists(), "it is removed")
        assert follower.process.poll() is None
        # As by hand: made long ago, by a clock that was behind.
        left.touch()
        os.utime(left, (1, 1))
        assert follower.wait_end(30) == DONE, follower.log_tail()
    assert (directory / "pg_wal/00000002.history").exists()


def test_feedback_that_a_slot_has_kept(primary, directory):
    """A stock standby has left what its queries needed in the slot. Nobody reads here: it goes, or VACUUM on the primary would wait for it for
    as long as Walrider follows."""
    primary.psql("SELECT pg_create_physical_replication_slot('one', true)")
    xmin = "SELECT xmin FROM pg_replication_slots"
    with standby.Stock(directory, hot_standby="on", hot_standby_feedback="on", primary_slot_name="one", wal_receiver_status_interval="1s").start():
        wait_for(lambda: primary.value(xmin) != "", "the slot has it")
    with Walrider(directory, "--slot", "one", "--status-interval", "1s").start():
        wait_streaming(primary)
        wait_for(lambda: primary.value(xmin) == "", "it is gone", timeout=40)


def test_configuration_elsewhere(primary, directory, work):
    """As in Debian's packages: `--config-file` says where; what is in it counts, of a standby, a replay and a promotion."""
    (work / "etc").mkdir()
    conf = (directory / "postgresql.conf").rename(work / "etc/postgresql.conf")
    said = walrider("standby", "-D", directory).expect(FAILED).stderr
    assert "postgresql.conf" in said and "--config-file" in said, said
    with open(conf, "a") as file:
        file.write("\nrecovery_min_apply_delay = '2s'\n")
    with Walrider(directory, "--config-file", conf).start() as follower:
        wait_streaming(primary)
        assert follower.status()["min_apply_delay_seconds"] == 2
        follower.stop()
    said = walrider("replay", "-D", directory).expect(FAILED).stderr
    assert "--config-file" in said, said
    walrider("replay", "-D", directory, "--config-file", conf, "--promote").expect()
    assert controldata(directory)["Database cluster state"] == "shut down"


def test_who_cannot_be_told(primary, directory, work):
    """promote, pause and resume touch nothing but a running standby of ours."""
    for command in ("promote", "pause", "resume"):
        for data_dir, why in [(directory, "no walrider standby runs"), (primary.data_dir, "PostgreSQL runs on"),
                              (work / "nothing", "no walrider standby runs")]:
            assert why in walrider(command, "-D", data_dir).expect(FAILED).stderr
            assert not list(data_dir.glob("promote")) + list(data_dir.glob("walrider.pause"))
    assert primary.value("SELECT 1") == "1"


def test_refusals(primary, directory, work):
    """What is wrong is said before anything is touched."""
    file = work / "standby.toml"

    def refused(*args, code=FAILED, command="standby"):
        return walrider(command, *args).expect(code).stderr

    file.write_text("a = 1")
    assert f"{file}:1: unknown field `a`" in refused("-D", directory, "--config", file, code=USAGE)
    assert "could not read" in refused("-D", directory, "--config", work / "none.toml")
    assert "nothing says where WAL comes from" in refused("-D", directory, "--primary", "", code=USAGE)
    assert "create_slot needs the name of a slot" in refused("-D", directory, "--create-slot", code=USAGE)
    for bad, why in [("host=h colour=red", "invalid connection option \"colour\""), ("host", "missing \"=\""),
                     ("host=h port=x", "invalid port number"), ("hostaddr=1.2.3", "could not parse network address"),
                     ("host=h service=nosuch password=s3cret", "service \"nosuch\" not found")]:
        for said in (refused("-D", directory, "--primary", bad, code=USAGE),
                     refused("-D", work / "received", "-d", bad, code=USAGE, command="receive")):
            assert why in said and "s3cret" not in said, said
    assert "could not listen on" in refused("-D", directory, "--http", f"127.0.0.1:{primary.port}")
    assert f'data directory "{work / "nothing"}" does not exist' in refused("-D", work / "nothing")
    (work / "other").mkdir()
    assert "is not a PostgreSQL data directory" in refused("-D", work / "other")
    refused("-D", directory, "--status-interval", "10", code=USAGE)
    refused("-D", directory, "--slot", "Not-a-slot", code=USAGE)
    refused("-D", directory, "--wal", "x", "--restore-command", "y", code=USAGE)
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        assert "in use by process" in refused("-D", directory)
        assert follower.state() == "streaming"
