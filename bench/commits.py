"""Commits that wait for somebody: one primary under pgbench, and the sides that it waits for, one at a time.

It compares nothing: bench.sync and bench.early say what with what.
"""

import json
import re
import tempfile
from pathlib import Path

from tests.lab import install
from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.loads.bank import LEVELS
from tests.lab.standby import standby

SETTINGS = """
max_connections = 100
shared_buffers = 512MB
max_wal_size = 8GB
min_wal_size = 1GB
autovacuum = off
log_replication_commands = off
synchronous_standby_names = ''
"""


class ReceiveWal(standby.Standby):
    """pg_receivewal --synchronous; it acknowledges no apply."""

    levels = tuple(level for level in LEVELS if level != "remote_apply")

    def __init__(self, directory, disk):
        super().__init__(directory)
        self.data_dir.mkdir(parents=True)
        self.disk, self.port = disk, None

    def start(self):
        """Receive from where the directory ends."""
        self.spawn([install.program("pg_receivewal"), "-D", self.data_dir, "--synchronous", "--no-loop",
                    "-d", standby.conninfo(self.port, "pg_receivewal")], self.disk.environment())
        return self


class Side:
    """One of those that are compared: a receiver, made of a new backup, and its name on the primary."""

    def __init__(self, name, primary, directory, disk, kind=None, arguments=(), connection=""):
        self.name, self.primary, self.connection = name, primary, connection
        if (kind or name) == "pg_receivewal":
            self.receiver, self.levels, self.stage = ReceiveWal(directory / "pg_wal", disk), ReceiveWal.levels, "flush"
        else:
            standby.clone(primary, directory, name=name)
            self.receiver = standby.KINDS[kind or name](directory, *arguments, disk=disk)
            self.levels, self.stage = LEVELS, "replay"

    def start(self, port):
        """Connect it to this port, and wait until it has all that it missed."""
        if isinstance(self.receiver, ReceiveWal):
            self.receiver.port = port
        else:
            standby.point(self.receiver.data_dir, port, self.name, options=self.connection)
        self.receiver.start()
        try:
            standby.wait_streaming(self.primary, self.name, 120)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.receiver.log_tail()}") from error
        self.wait(300)

    def wait(self, timeout=60):
        """Wait until the primary knows that it has everything."""
        standby.wait_position(self.primary, stage=self.stage, name=self.name, timeout=timeout)


class Field:
    """The primary, its network, and the disks of both ends."""

    def __init__(self, scratch, stack, settings):
        self.scratch = scratch
        self.disks = {name: Disk(scratch / f"shim-{name}", "pg_wal/") for name in ("primary", "standby")}
        self.primary = standby.make_primary(scratch / "primary", SETTINGS + settings, wal_segsize_mb=16)
        self.primary.own_environment = self.disks["primary"].environment()
        stack.enter_context(standby.start_primary(self.primary))
        self.network = stack.enter_context(Proxy(self.primary.port))

    def slow(self, delay_ms=0.0, standby_ms=0.0, primary_ms=0.0):
        """The network's delay one way, and what an fsync of WAL takes longer."""
        self.network.delay(up_ms=delay_ms, down_ms=delay_ms)
        self.disks["standby"].fsync_takes(standby_ms)
        self.disks["primary"].fsync_takes(primary_ms)

    def port(self, delay_ms):
        """Where a standby connects to: without delay there is no proxy in between."""
        return self.network.port if delay_ms else self.primary.port

    def wait_for_standby(self, name):
        """Make commits wait for this standby, and see that they do; '': for none."""
        self.primary.psql(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'", options=standby.LOCALLY)
        self.primary.psql("SELECT pg_reload_conf()")
        standby.wait_for(lambda: not name or standby.replication(self.primary, name)["sync_state"] == "sync", f"{name} is sync")

    def pgbench(self, level, clients, seconds, arguments):
        """One run: commits per second, and the latencies of pgbench's whole transaction in ms."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as logs:
            said = standby.run([install.program("pgbench"), *arguments, "-n", "-c", clients, "-j", min(clients, 2), "-T", seconds,
                                "-l", "--log-prefix", f"{logs}/log", "postgres"],
                               env=dict(self.primary.environment(), PGOPTIONS=f"-c synchronous_commit={level}")).stdout
            latencies = sorted(int(line.split()[2]) / 1000 for file in Path(logs).iterdir() for line in file.read_text().splitlines())
        at = lambda share: round(latencies[min(len(latencies) - 1, int(share * len(latencies)))], 3)
        return dict(tps=round(float(re.search(r"^tps = ([\d.]+)", said, re.MULTILINE)[1]), 1), commits=len(latencies),
                    p50_ms=at(0.5), p90_ms=at(0.9), p99_ms=at(0.99), max_ms=at(1))


def save(result, file):
    """Keep a result, a line for each of its runs: there are hundreds."""
    rows = ",\n  ".join(json.dumps(run) for run in result["runs"])
    head = json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1)
    file.write_text(head[:-2] + f',\n "runs": [\n  {rows}\n ]\n}}\n')
    json.loads(file.read_text())
    print(f"kept: {file.name}")
