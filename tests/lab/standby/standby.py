"""Standbys: Walrider's, and PostgreSQL's as its oracle, with the same methods; and primaries for them.

Both are made of a base backup with `primary_conninfo` in the directory's own configuration, as `pg_basebackup -R` leaves it.
"""

import json
import os
import select
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from tests.lab import install, walrider
from tests.lab.server import cluster
from tests.lab.server.cluster import PgCluster, ServerError, format_lsn, free_port, parse_lsn, run
from tests.lab.waiting import wait_for

NAME = "walrider"
# fsync is on: that a commit waits for its own flush is part of the timing under test.  Nobody commits without a standby.
PRIMARY = f"""
fsync = on
max_wal_senders = 10
shared_buffers = 32MB
wal_keep_size = 64MB
max_wal_size = 128MB
min_wal_size = 8MB
checkpoint_timeout = 30min
wal_receiver_status_interval = 1s
wal_retrieve_retry_interval = 200ms
synchronous_standby_names = '{NAME}'
log_replication_commands = on
"""
LOCALLY = "-c synchronous_commit=local"


def make_primary(data_dir, conf="", wal_segsize_mb=1, archive=None):
    """A primary on 127.0.0.1, not yet running; `start_primary` starts it."""
    return PgCluster.init(data_dir, archive, wal_segsize_mb=wal_segsize_mb, conf=PRIMARY + conf)


def start_primary(server, **settings):
    """Start a server so that standbys reach it over TCP."""
    return server.start(listen_addresses="127.0.0.1", **settings)


def conninfo(port, name=NAME, options=""):
    """What a standby connects with; `options` are for the server, as in PGOPTIONS."""
    return f"host=127.0.0.1 port={port} user=postgres application_name={name}" + (f" options='{options}'" if options else "")


def point(data_dir, port, name=NAME, slot=None, options=""):
    """Make a directory that of a standby of whoever listens on this port."""
    data_dir = Path(data_dir)
    (data_dir / "standby.signal").touch()
    (data_dir / "recovery.signal").unlink(missing_ok=True)
    quoted = conninfo(port, name, options).replace("'", "''")
    with open(data_dir / "postgresql.auto.conf", "a") as conf:
        conf.write(f"primary_conninfo = '{quoted}'\nprimary_slot_name = '{slot or ''}'\n")


def clone(server, data_dir, port=None, name=NAME, slot=None, options=""):
    """A base backup that follows `server`, through `port` if that is given."""
    server.basebackup(data_dir, wal="stream")
    point(data_dir, port or server.port, name, slot, options)
    return Path(data_dir)


REPLICATION = """
SELECT to_json(r) FROM (
    SELECT pid, application_name, state, sync_state, sent_lsn::text, write_lsn::text, flush_lsn::text, replay_lsn::text,
           extract(epoch FROM write_lag) AS write_lag, extract(epoch FROM flush_lag) AS flush_lag,
           extract(epoch FROM replay_lag) AS replay_lag, extract(epoch FROM now() - reply_time) AS reply_age
    FROM pg_stat_replication WHERE application_name = '{}') r
"""


def replication(server, name=NAME):
    """The primary's row of pg_stat_replication about a standby, None without one; of several, whose connections are not all
    known to be gone, one that streams."""
    rows = [json.loads(row) for row, in server.psql(REPLICATION.format(name))]
    return max(rows, key=lambda row: row["state"] == "streaming", default=None)


def asked(server, name):
    """As `replication`; None, too, if the server is itself a standby, and cancelled the question because it was in replay's way."""
    try:
        return replication(server, name)
    except ServerError as error:
        if "conflict with recovery" not in str(error):
            raise
        return None


def wait_streaming(server, name=NAME, timeout=60):
    """Wait until the primary says that the standby streams."""
    def streams():
        row = asked(server, name)
        return row if row and row["state"] == "streaming" else None
    return wait_for(streams, lambda: f"{name} streams: {asked(server, name)}", timeout)


def wait_position(server, lsn=None, stage="replay", name=NAME, timeout=60):
    """Wait until the primary knows that the standby has written, flushed or replayed up to there, or to its end."""
    lsn = parse_lsn(lsn or server.wal_end())

    def is_there():
        row = asked(server, name)
        return row and row[f"{stage}_lsn"] and parse_lsn(row[f"{stage}_lsn"]) >= lsn
    wait_for(is_there, lambda: f"{stage} {format_lsn(lsn)}: {asked(server, name)}", timeout)
    return format_lsn(lsn)


class Adopted:
    """A process that is not our child, as PgCluster wants one: watched through a pidfd, so that its pid is not another's."""

    def __init__(self, pid):
        self.pid, self.handle, self.returncode = pid, os.pidfd_open(pid), None

    def poll(self):
        """0 once it has ended; who reaped it knows its real status."""
        if self.returncode is None and select.select([self.handle], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def _ended(self):
        os.close(self.handle)
        self.returncode = 0

    def wait(self, timeout=None):
        """Wait for its end."""
        if self.returncode is None:
            if not select.select([self.handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._ended()
        return self.returncode

    def send_signal(self, number):
        """As Popen has it."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.handle, number)

    def kill(self):
        """As Popen has it."""
        self.send_signal(signal.SIGKILL)


def adopt(data_dir):
    """The server that somebody else started on a directory, to be asked and stopped by us."""
    lines = (Path(data_dir) / "postmaster.pid").read_text().splitlines()
    server = PgCluster(data_dir)
    server.port, server.sockets = int(lines[3]), lines[4]
    server.process = Adopted(int(lines[0]))
    cluster._running.add(server)
    return server


class Standby:
    """What both kinds have in common."""

    def __init__(self, data_dir):
        self.data_dir = Path(data_dir)
        self.log = Path(f"{data_dir}.standby.log")
        self.process = None

    def log_text(self):
        """What it has logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines=20):
        """The end of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def spawn(self, command, env=None, open_files=None):
        """Start, with the log as output."""
        def prepare():
            cluster._quit_with_parent()
            if open_files is not None:
                walrider.limit_open_files(open_files)

        assert self.process is None, "already running"
        with open(self.log, "a") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=dict(os.environ, **(env or {})), preexec_fn=prepare)
        cluster._running.add(self)
        return self

    def wait_end(self, timeout=60):
        """Wait until it ends by itself; its exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.log_tail()}")
        self._gone()
        return status

    def send_signal(self, number):
        """Send it a signal."""
        self.process.send_signal(number)

    def stop(self, number=signal.SIGINT, timeout=60):
        """Stop it cleanly."""
        self.send_signal(number)
        status = self.wait_end(timeout)
        assert status == 0, f"exit {status}\n{self.log_tail()}"

    def kill(self):
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._gone()

    def _gone(self):
        self.process = None
        cluster._running.discard(self)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.kill()

    def serve(self, timeout=60):
        """Start PostgreSQL on the directory that was left, and wait until it can be written to."""
        server = PgCluster(self.data_dir)
        start_primary(server, fsync="on")
        wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", lambda: f"writable\n{server.log_tail()}", timeout)
        return server


class Walrider(Standby):
    """`walrider standby`; a `recorder` records what it does to the directory."""

    def __init__(self, data_dir, *options, disk=None, open_files=None, recorder=None):
        super().__init__(data_dir)
        self.options, self.disk, self.open_files, self.recorder = options, disk, open_files, recorder
        self.port = free_port()

    def start(self, timeout=60):
        """Start, and wait until it has taken the directory over."""
        command = [walrider.binary(), "standby", "-D", self.data_dir, "--http", f"127.0.0.1:{self.port}", *self.options]
        self.spawn(self.recorder.command(self.data_dir, *command) if self.recorder else command,
                   self.disk.environment() if self.disk else None, self.open_files)

        def began():
            if self.process.poll() is not None:
                raise AssertionError(f"walrider standby ended with {self.process.returncode}\n{self.log_tail()}")
            try:
                return self.state() != "starting"
            except (urllib.error.URLError, ConnectionError):
                return None
        wait_for(began, lambda: f"more than starting\n{self.log_tail()}", timeout)
        return self

    def get(self, path):
        """(status code, text) of one page."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self):
        """/status, parsed."""
        code, text = self.get("/status")
        assert code == 200, (code, text)
        return json.loads(text)

    def state(self):
        """Its own word for what it is doing."""
        return self.status()["state"]

    def wait_state(self, *wanted, timeout=60):
        """Wait until it says that it is in one of these states."""
        wait_for(lambda: self.state() in wanted, lambda: f"{wanted}: {self.status()}\n{self.log_tail()}", timeout)

    def position(self, which):
        """One of its positions as an integer: received, written, flushed, replayed; 0 while it is not known."""
        return parse_lsn(self.status()["positions"][which]["lsn"] or "0/0")

    def wait_replayed(self, lsn, timeout=60):
        """Wait until it says itself that it has replayed up to there."""
        wait_for(lambda: self.position("replayed") >= parse_lsn(lsn), lambda: f"{lsn}: {self.status()}", timeout)

    def promote(self, how="command", timeout=60):
        """Promote it by `command`, by a `signal` or by a `file`; returns when it has handed over."""
        if how == "command":
            said = walrider.walrider("promote", "-D", self.data_dir, "--timeout", f"{timeout}s", timeout=timeout + 10)
            assert said.code == walrider.DONE, f"exit {said.code}: {said.stdout}{said.stderr}\n{self.log_tail()}"
        elif how == "signal":
            self.send_signal(signal.SIGUSR1)
        else:
            (self.data_dir / "promote").touch()
        status = self.wait_end(timeout)
        assert status == 0, f"exit {status}\n{self.log_tail()}"

    def pause(self):
        """Stop replaying; receiving goes on."""
        walrider.walrider("pause", "-D", self.data_dir).expect()

    def resume(self):
        """Go on replaying."""
        walrider.walrider("resume", "-D", self.data_dir).expect()


class Stock(Standby):
    """PostgreSQL with hot_standby = off."""

    def __init__(self, data_dir, disk=None, **settings):
        super().__init__(data_dir)
        self.server, self.disk, self.settings = PgCluster(data_dir), disk, settings
        self.log = self.server.log

    def start(self, timeout=60):
        """Start, and wait until it says that it is a standby."""
        options = {"port": self.server.port, "unix_socket_directories": self.server.sockets, "listen_addresses": "127.0.0.1",
                   "hot_standby": "off", **self.settings}
        command = [install.program("postgres"), "-D", self.data_dir]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        self.spawn(command, self.disk.environment() if self.disk else None)

        def is_standby():
            if self.process.poll() is not None:
                raise ServerError(f"the standby ended at start\n{self.log_tail()}")
            try:
                lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
            except FileNotFoundError:
                return False
            return len(lines) >= 8 and lines[0] == str(self.process.pid) and lines[7].strip() in ("standby", "ready")
        wait_for(is_standby, lambda: self.log_tail(), timeout)
        return self

    def kill(self):
        """SIGKILL all of it."""
        if self.process is not None:
            self.server.process = self.process
            self.server.kill()
            self._gone()

    def promote(self, how="command", timeout=60):
        """Promote it; it becomes a server by itself, which `serve` returns."""
        run([install.program("pg_ctl"), "promote", "-D", self.data_dir, "-t", timeout])

    def serve(self, timeout=60):
        """The server that it became."""
        self.server.process, self.process = self.process, None
        cluster._running.discard(self)
        cluster._running.add(self.server)
        # One without hot standby accepts nobody for a moment more.
        in_recovery = lambda: self.server.psql("SELECT pg_is_in_recovery()", check=False)
        wait_for(lambda: in_recovery() == [["f"]], lambda: self.server.log_tail(), timeout)
        return self.server


def rewind(old, new, name=NAME):
    """pg_rewind: make a standby of `new` of the directory of `old`, which was killed."""
    run([install.program("pg_rewind"), "-D", old, f"--source-server={new.dsn()}", "--no-sync"], env=new.environment())
    point(old, new.port, name)
    return Path(old)


KINDS = dict(walrider=Walrider, stock=Stock)
