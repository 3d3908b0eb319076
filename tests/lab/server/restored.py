"""Backups in every format, with a tablespace, and `walrider restore` of one of them: interrupted, and gone on with until it is done.
"""

import os
import signal
import subprocess
from types import SimpleNamespace

from tests.lab import walrider
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.backups import MARKER, kept_out, pack_all
from tests.lab.server.cluster import PgCluster, controldata
from tests.lab.trash import throw_away
from tests.lab.waiting import wait_for
from tests.lab.walrider import FAILED

WHOLE = "replays what follows, hands over"
# Much less than there is WAL.
LITTLE = ("--memory", "16MB")
# What small backups are of, and what happens then, so many times.
SETUP = """
CREATE TABLE t (id int PRIMARY KEY, n int, v text) WITH (fillfactor = 60);
INSERT INTO t SELECT g, 0, repeat('x', 600) FROM generate_series(1, 3000) g;
CREATE TABLE b TABLESPACE s AS SELECT g AS id, 0 AS n FROM generate_series(1, 20000) g;
CREATE TABLE gone TABLESPACE s AS SELECT g FROM generate_series(1, 2000) g;
CREATE TABLE wide TABLESPACE s AS SELECT g AS id, repeat('w', 700) AS v FROM generate_series(1, 2000) g;
VACUUM wide;
"""
STEP = """
UPDATE t SET n = n + 1 WHERE hashint4(id + {n}) % 3 = 0;
UPDATE b SET n = n + 1 WHERE hashint4(id + {n}) % 3 = 0;
CREATE TABLE new_{n} TABLESPACE s AS SELECT g FROM generate_series(1, 1000) g;
DELETE FROM wide WHERE id > 1500 + 50 * {n}; VACUUM wide; INSERT INTO wide SELECT g, repeat('n', 700) FROM generate_series(1501, 1900) g;
"""
STEPS = 4
SUMS = "SELECT count(*), sum(hashtext(x::text)) FROM {} x"


def make_backups(directory, conf, setup, steps, tables, formats):
    """Backups of what `setup` makes, in a directory and in these formats of tar; the WAL of `steps`; and what stock PostgreSQL made of both."""
    directory.mkdir()
    (directory / "space").mkdir()
    with PgCluster.init(directory / "primary", directory / "wal", conf=conf) as server:
        server.start()
        server.psql(f"CREATE TABLESPACE s LOCATION '{directory}/space'")
        server.psql(setup)
        server.basebackup(directory / "plain", f"--tablespace-mapping={directory}/space={directory}/plain.space")
        server.basebackup(directory / "tar", "-Ft", wal="stream")
        for step in steps:
            server.psql(step)
        sums = {name: server.psql(SUMS.format(name)) for name in tables}
        server.stop()
        server.complete_archive()
        final = server.controldata()["Latest checkpoint location"]
    recovery.discard(server.data_dir)
    pack_all(directory, formats)
    recovery.stock_replay(directory / "plain", directory / "wal", directory / "stock", final)
    return SimpleNamespace(directory=directory, wal=directory / "wal", stock=directory / "stock", sums=sums, final=final)


class Restore:
    """One, of one of the backups, into directories of its own."""

    def __init__(self, backups, form, work, memory=LITTLE):
        self.backups, self.form, self.work, self.memory, self.said = backups, form, work, memory, []
        work.mkdir()
        self.ours, self.space = work / "ours", work / "space"
        old = backups.directory / ("plain.space" if form == "plain" else "space")
        self.command = ("restore", "--backup", backups.directory / form, "--wal", backups.wal, "-D", self.ours,
                        "--tablespace-mapping", f"{old}={self.space}", *memory)
        self.replay = ("replay", "-D", self.ours, "--wal", backups.wal, *memory)

    def killed_after(self, command, seconds):
        """Whether it was still at work, and what it did."""
        process = walrider.start(*command)
        try:
            process.wait(seconds)
            return False, None
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGSTOP)
            # Its threads stop a moment later.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            return True, self.phase(process.pid)
        finally:
            process.kill()
            process.communicate()

    def phase(self, pid=None):
        """How far it has come."""
        if not (self.ours / MARKER).exists():
            if not (self.ours / "PG_VERSION").exists():
                return "nothing"
            return "all pages are there" if self.has_line() else WHOLE
        if not (self.ours / "global/pg_control").exists():
            return "unpacks all but relations" if self.form != "gzip" else "unpacks"
        if self.form == "gzip" and not self.has_line():
            # It is unpacked at once, and what is left is to remove the markers.
            return WHOLE
        if not (self.space / MARKER).exists():
            return "between two markers"
        if any((self.ours / "base/5").glob("[0-9]*")):
            return "relations pass"
        return "puts WAL apart" if pid and spilled(pid) else "reads WAL"

    def has_line(self):
        """The one that keeps servers out."""
        return "walrider_was_interrupted" in (self.ours / "postgresql.auto.conf").read_text()

    def is_whole(self):
        """All is there and durable: a directory in recovery, or one that was handed over. No server starts on anything less."""
        if self.phase() == WHOLE:
            return True
        if self.ours.exists():
            kept_out(self.ours)
        return False

    def next_command(self, command):
        """What the operator does after a kill: the same command, and what it asks for. `None`: all is done."""
        result = walrider.walrider(*command)
        if result.code == 0:
            return None
        assert result.code == FAILED, result
        self.said.append(result.stderr)
        if "by hand" in result.stderr:
            assert str(self.space) in result.stderr and (self.ours / MARKER).exists(), result
            throw_away(self.space)
            return command
        if "is not complete" in result.stderr and "--start-over" in result.stderr:
            return (*self.command, "--start-over")
        assert "walrider replay" in result.stderr, result
        return self.replay

    def compare(self):
        """It is what stock PostgreSQL makes of it."""
        recovery.pin_tablespaces(self.ours)
        compare(self.ours, self.backups.stock)

    def opens(self):
        """PostgreSQL starts on it as it stands, ends what recovery is left, and has all rows."""
        with PgCluster(self.ours) as server:
            server.start(archive_mode="off", fsync="off", autovacuum="off")
            wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", server.log_tail)
            for name, rows in self.backups.sums.items():
                assert server.psql(SUMS.format(name)) == rows, name

    def reaches_the_end(self):
        """PostgreSQL, told where the WAL is and when to stop, ends the recovery."""
        if controldata(self.ours)["Latest checkpoint location"] == self.backups.final:
            return      # killed in its last moments: no target is left to reach
        (self.ours / "recovery.signal").touch()
        server = PgCluster(self.ours)
        server.configure(recovery.restore_settings(self.backups.wal, target=("lsn", self.backups.final), action="shutdown"),
                         "postgresql.auto.conf")
        with server:
            recovery.finish_stock(server, self.backups.final)


def spilled(pid):
    """Whether it has written to a file without a name."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{number}"
        if os.readlink(link).endswith("(deleted)") and os.stat(link).st_size > 0:
            return True
    return False
