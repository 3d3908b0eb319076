"""A PostgreSQL server of our own: made, started, asked and stopped, whatever happens in between."""

import atexit
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from tests.lab.install import major, program

PR_SET_PDEATHSIG = 1
IPC_RMID = 0
_running = set()
_reserved = deque(maxlen=300)      # sockets; a test that began so many servers ago is over


class ServerError(RuntimeError):
    """A server did not do what was asked; the message carries the end of its log."""


def _stop_everything():
    for server in list(_running):
        server.kill()


atexit.register(_stop_everything)


def _exit_on_signal(number, _frame):
    raise SystemExit(128 + number)


signal.signal(signal.SIGTERM, _exit_on_signal)
signal.signal(signal.SIGHUP, _exit_on_signal)

_libc = ctypes.CDLL(None, use_errno=True)


def _quit_with_parent():
    """In the child: an immediate shutdown if the test process vanishes without a word."""
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)


def _wait_state(pid, states, timeout=60):
    """Wait until a process is in one of these states of /proc/PID/stat, or gone."""
    deadline = time.monotonic() + timeout
    with suppress(FileNotFoundError, ProcessLookupError):
        while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in states:
            assert time.monotonic() < deadline, f"process {pid} is in state {state}, not one of {states}"
            time.sleep(0.001)


def _dynamic_shared_memory(pid):
    """The files of PostgreSQL's dynamic shared memory that a process has mapped."""
    try:
        return set(map(Path, re.findall(r"/dev/shm/PostgreSQL\.\d+", Path(f"/proc/{pid}/maps").read_text())))
    except (FileNotFoundError, ProcessLookupError):
        return set()


def free_port():
    """A TCP port that nobody listens on, ours for long; it also names the socket file.

    It is below those that the system gives to connections, and a socket in the abstract namespace reserves it: tests run side
    by side, and a server that is started again wants its port back.
    """
    for port in random.sample(range(15_000, 32_000), 1000):
        reserved, probe = socket.socket(socket.AF_UNIX), socket.socket()
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            reserved.bind(f"\0walrider-test-port-{port}")
        except OSError:
            reserved.close()
            continue
        finally:
            probe.close()
        _reserved.append(reserved)
        return port
    raise ServerError("no free port between 15000 and 32000")


def socket_directory():
    """A directory short enough for a unix socket (107 bytes), removed at exit."""
    parent = tempfile.gettempdir()
    path = tempfile.mkdtemp(prefix="s-", dir=parent if len(parent) < 60 else "/tmp")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def run(argv, check=True, **kwargs):
    """Run a program with its output captured; failing, raise with what it said."""
    done = subprocess.run([str(part) for part in argv], capture_output=True, text=True, **kwargs)
    if check and done.returncode != 0:
        raise ServerError(f"{' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def parse_lsn(text):
    """"16/B374D848" as an integer."""
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(value):
    """An integer as PostgreSQL writes an LSN."""
    return f"{value >> 32:X}/{value & 0xFFFFFFFF:X}"


def controldata(data_dir):
    """pg_controldata's lines as a dict."""
    out = run([program("pg_controldata"), "-D", data_dir], env=dict(os.environ, LC_ALL="C")).stdout
    return {key.strip(): value.strip() for key, value in
            (line.split(":", 1) for line in out.splitlines() if ":" in line)}


def copy_tree(source, target):
    """Copy a data directory: links kept, files reflinked where the file system can."""
    run(["cp", "-a", "--reflink=auto", f"{source}/.", target] if Path(target).is_dir()
        else ["cp", "-a", "--reflink=auto", source, target])
    return Path(target)


class Session:
    """One psql process whose statements are sent one by one: for locks held across other sessions."""

    MARK = "walrider-session-mark"

    def __init__(self, server, database="postgres", options=""):
        self.process = subprocess.Popen(
            [program("psql"), "-XAtq", "-v", "ON_ERROR_STOP=0", "-d", server.dsn(database)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=dict(server.environment(), PGOPTIONS=options))

    def send(self, sql):
        """Send without waiting; `wait` collects."""
        self.process.stdin.write(f"{sql.rstrip().rstrip(';')};\n")
        self.process.stdin.flush()

    def wait(self):
        """Wait for all that was sent; returns the lines it printed."""
        self.process.stdin.write(f"\\echo {self.MARK}\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line.strip() == self.MARK:
                return lines
            lines.append(line.rstrip("\n"))
        raise ServerError("psql ended: " + "\n".join(lines))

    def run(self, sql):
        """Send, wait, and raise if the server answered with an error."""
        self.send(sql)
        lines = self.wait()
        if any(line.startswith("ERROR:") for line in lines):
            raise ServerError(f"{sql}\n" + "\n".join(lines))
        return lines

    def close(self):
        """End the session; an open transaction is rolled back."""
        try:
            self.process.stdin.close()
            self.process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()


class PgCluster:
    """A data directory and the postmaster we start on it."""

    def __init__(self, data_dir, wal_archive=None):
        self.data_dir = Path(data_dir)
        self.archive = Path(wal_archive) if wal_archive else None
        self.log = self.data_dir.parent / f"{self.data_dir.name}.log"
        self.port = free_port()
        self.sockets = socket_directory()
        self.process = None
        self.own_environment = {}       # of the postmaster alone, added to ours

    # Making one

    @classmethod
    def init(cls, data_dir, wal_archive=None, checksums=True, wal_segsize_mb=16, conf=""):
        """initdb, and the settings every test server has: durable enough to crash, otherwise quick."""
        self = cls(data_dir, wal_archive)
        argv = [program("initdb"), "-D", data_dir, "-U", "postgres", "-A", "trust", "--no-sync", "--no-locale",
                "-E", "UTF8", f"--wal-segsize={wal_segsize_mb}"]
        if checksums:
            argv.append("--data-checksums")
        elif major() != "17":       # the default there, and no option turns them off
            argv.append("--no-data-checksums")
        run(argv)
        settings = ["max_wal_senders = 4", "max_connections = 60", "shared_buffers = 128MB",
                    "log_checkpoints = on", "log_line_prefix = '%m [%p] '", "log_timezone = 'UTC'",
                    "timezone = 'UTC'", "max_prepared_transactions = 20", "fsync = off"]
        if self.archive:
            self.archive.mkdir(exist_ok=True)
            settings += ["archive_mode = on", "archive_command = '" + self.archive_command() + "'"]
        self.configure("\n".join(settings) + "\n" + conf)
        return self

    def archive_command(self):
        """Never overwrite a segment, never leave half of one, and agree to the same one after a crash."""
        there = f"{self.archive}/%f"
        return f"cmp -s %p {there} || (test ! -f {there} && cp %p {there}.tmp && mv {there}.tmp {there})"

    def configure(self, text, file="postgresql.conf"):
        """Append settings; the last one counts."""
        with open(self.data_dir / file, "a") as conf:
            conf.write(text.rstrip("\n") + "\n")

    # Running it

    def environment(self):
        """The client's environment: nothing inherited from the caller's PostgreSQL variables."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        env.update(PGHOST=self.sockets, PGPORT=str(self.port), PGUSER="postgres")
        return env

    def dsn(self, database="postgres"):
        """A connection string for libpq programs."""
        return f"host={self.sockets} port={self.port} user=postgres dbname={database}"

    def launch(self, **settings):
        """Start the postmaster as our child and return at once."""
        assert self.process is None, "already running"
        options = {"port": self.port, "unix_socket_directories": self.sockets, "listen_addresses": "", **settings}
        argv = [program("postgres"), "-D", str(self.data_dir)]
        for name, value in options.items():
            argv += ["-c", f"{name}={value}"]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=dict(os.environ, **self.own_environment), preexec_fn=_quit_with_parent)
        _running.add(self)
        return self

    def start(self, timeout=120, **settings):
        """Start and wait until it accepts connections."""
        self.launch(**settings)
        return self.wait_ready(timeout)

    def wait_ready(self, timeout=120):
        """Wait for the postmaster's own word in postmaster.pid, as pg_ctl does."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self._gone()
                raise ServerError(f"the server ended at start\n{self.log_tail()}")
            try:
                lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
            except FileNotFoundError:
                lines = []
            if len(lines) >= 8 and lines[0] == str(self.process.pid) and lines[7].strip() == "ready":
                return self
            time.sleep(0.02)
        self.kill()
        raise ServerError(f"not ready after {timeout} s\n{self.log_tail()}")

    def stop(self, mode="fast", timeout=300):
        """Stop it: `smart`, `fast` or `immediate`."""
        if self.process is None:
            return
        number = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode]
        self.process.send_signal(number)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"no {mode} shutdown within {timeout} s\n{self.log_tail()}")
        self._gone()

    def kill(self):
        """SIGKILL all of it; returns when nobody is left who could write into the directory."""
        if self.process is None:
            return
        # Stopped, the postmaster starts nobody whom we would miss.
        self.process.send_signal(signal.SIGSTOP)
        _wait_state(self.process.pid, "TZ")
        children = self.children()
        segments = set().union(*map(_dynamic_shared_memory, [self.process.pid, *children]))
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for pid in children:
            _wait_state(pid, "Z")
        self._gone()
        self._forget(segments)

    def _forget(self, segments):
        """Remove what a server that was killed leaves behind, or a machine that runs servers for days has no shared memory."""
        for segment in segments:
            segment.unlink(missing_ok=True)
        lock_file = self.data_dir / "postmaster.pid"
        with suppress(FileNotFoundError):
            lines = lock_file.read_text().splitlines()
            if len(lines) >= 7 and len(fields := lines[6].split()) == 2:
                _libc.shmctl(int(fields[1]), IPC_RMID, None)
            lock_file.unlink()

    def children(self):
        """The pids of the postmaster's direct children."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
            return [int(pid) for pid in text.split()]
        except OSError:
            return []

    def wait_end(self, timeout=600):
        """Wait until the server ends by itself; returns its exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"still running after {timeout} s\n{self.log_tail()}")
        self._gone()
        return status

    def _gone(self):
        self.process = None
        _running.discard(self)

    def restart(self, mode="fast", **settings):
        """Stop and start."""
        self.stop(mode)
        return self.start(**settings)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.kill()

    # Asking it

    def psql(self, sql, database="postgres", options="", check=True, timeout=None):
        """Run SQL with `psql -XAtq`; returns its rows as lists of strings."""
        done = run([program("psql"), "-XAtq", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-d", self.dsn(database)],
                   input=sql, env=dict(self.environment(), PGOPTIONS=options), check=False, timeout=timeout)
        if check and done.returncode != 0:
            raise ServerError(f"psql: {done.stderr}\nin: {sql[:2000]}")
        return [line.split("\t") for line in done.stdout.splitlines()]

    def value(self, sql, database="postgres"):
        """The single value a query returns."""
        return self.psql(sql, database)[0][0]

    def json(self, sql, database="postgres"):
        """The single JSON value a query returns."""
        return json.loads(self.value(sql, database))

    def session(self, database="postgres", options=""):
        """A session that stays open."""
        return Session(self, database, options)

    def log_tail(self, lines=30):
        """The end of the server's log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def log_matches(self, pattern):
        """All matches of a pattern in the server's log."""
        return re.findall(pattern, self.log.read_text(errors="replace"))

    # WAL and backups

    def lsn(self):
        """The insert position: where the next record begins."""
        return self.value("SELECT pg_current_wal_insert_lsn()")

    def wal_end(self):
        """Where the last record ends. The next begins there, unless that is where a page begins: then its header lies between,
        and nothing of it is written, sent or replayed before that record."""
        at, segment = parse_lsn(self.lsn()), int(self.value("SELECT pg_size_bytes(current_setting('wal_segment_size'))"))
        return format_lsn(at - (40 if at % segment == 40 else 24 if at % 8192 == 24 else 0))

    def message_up_to(self, unit, before):
        """A record that ends so many bytes before the end of a `unit` of WAL, a page or a segment; where it begins."""
        page_size, segment = 8192, int(self.value("SELECT pg_size_bytes(current_setting('wal_segment_size'))"))
        for _ in range(20):
            begin = parse_lsn(self.lsn())
            end = (begin + 200 + before + unit - 1) // unit * unit - before
            pages = range((begin // page_size + 1) * page_size, end, page_size)
            headers = sum(40 if page % segment == 0 else 24 for page in pages)
            # Its header, that of its data, those of the message and its prefix.
            text = end - begin - headers - 24 - 24 - 2
            text -= 5 if text > 300 else 2
            if text > 255 - 26 and text < 300:      # the form of its header would depend on its length
                self.psql("SELECT pg_logical_emit_message(false, 'p', 'x')")
                continue
            got = self.value(f"SELECT pg_logical_emit_message(false, 'p', repeat('m', {text}), true)")
            if parse_lsn(got) == end:
                return format_lsn(begin)
        raise AssertionError(f"something else writes WAL all the time: {self.log_tail()}")

    def switch_wal(self):
        """Finish the segment, so that it is archived."""
        return self.value("SELECT pg_switch_wal()")

    def basebackup(self, target, *args, wal="none"):
        """pg_basebackup, plain; `wal` is none, stream or fetch."""
        run([program("pg_basebackup"), "-D", target, "-X", wal, "-c", "fast", "--no-sync", *args],
            env=self.environment())
        return Path(target)

    def controldata(self):
        """pg_controldata of this directory."""
        return controldata(self.data_dir)

    def complete_archive(self):
        """After a stop: add what pg_wal has and the archive lacks, so that the archive holds all WAL."""
        assert self.process is None, "stop the server first"
        for file in sorted((self.data_dir / "pg_wal").iterdir()):
            if re.fullmatch(r"[0-9A-F]{24}|[0-9A-F]{8}\.history", file.name):
                target = self.archive / file.name
                if not target.exists() and self._is_used(file):
                    shutil.copy2(file, target)

    @staticmethod
    def _is_used(segment):
        """A recycled or preallocated segment is named ahead of its contents: look at its page header."""
        if segment.suffix == ".history":
            return True
        with open(segment, "rb") as handle:
            header = handle.read(40)
        segment_size = int.from_bytes(header[32:36], "little")
        if not segment_size:
            return False
        high, low = int(segment.name[8:16], 16), int(segment.name[16:24], 16)
        start = (high << 32) + low * segment_size
        return int.from_bytes(header[8:16], "little") == start and \
            int.from_bytes(header[4:8], "little") == int(segment.name[:8], 16)

    def pgbench_start(self, *args, database="postgres"):
        """pgbench in the background; returns its Popen."""
        return subprocess.Popen([program("pgbench"), *map(str, args), database], env=self.environment(),
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def pgbench(self, *args, database="postgres"):
        """Run pgbench and return what it said."""
        return run([program("pgbench"), *args, database], env=self.environment()).stdout
