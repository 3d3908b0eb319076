"""WAL full of what is done to files: what that costs, and that a kill between two such steps does no harm."""

import random

from tests.lab.faults import shim
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, controldata, parse_lsn
from tests.lab.walrider import replay

TRUNCATIONS = 30
KILLS = 3
# Each round cuts a table's files in place, and leaves files of tables that come and go.
ROUND = """
INSERT INTO cut SELECT generate_series(1, 2000); DELETE FROM cut; VACUUM cut;
CREATE TABLE gone (t text); INSERT INTO gone VALUES ('gone'); DROP TABLE gone;
"""


class Files:
    """A backup, the WAL since, and what stock PostgreSQL makes of it."""

    def __init__(self, server, directory):
        self.backup, self.archive, self.stock = directory / "backup", server.archive, directory / "stock"
        with server:
            server.start()
            server.psql("CREATE TABLE cut (id int); CREATE TABLE rewritten AS SELECT generate_series(1, 1000) id")
            server.basebackup(self.backup)
            server.psql("INSERT INTO cut VALUES (0)")
            self.begin = server.lsn()
            for number in range(TRUNCATIONS):
                server.psql(ROUND)
                if number == TRUNCATIONS // 3:
                    server.psql("CREATE DATABASE copied STRATEGY file_copy")
                if number == TRUNCATIONS // 2:
                    self.middle = server.lsn()
            server.psql("VACUUM FULL rewritten; INSERT INTO rewritten VALUES (0)")
            server.psql("SELECT pg_create_restore_point('late')")
            server.stop()
        server.complete_archive()
        self.end = server.controldata()["Latest checkpoint location"]
        recovery.stock_replay(self.backup, self.archive, self.stock, self.end)

    def copy(self, data_dir):
        """The backup, ready to be replayed."""
        return recovery.copy_backup(self.backup, data_dir)

    def finish_with_stock(self, data_dir):
        """PostgreSQL goes on from what is there."""
        (data_dir / "recovery.signal").touch()
        server = PgCluster(data_dir)
        server.configure("archive_mode = off\n" + recovery.restore_settings(
            self.archive, target=("lsn", self.end), action="shutdown"), "postgresql.auto.conf")
        with server:
            recovery.finish_stock(server, self.end)


def reached(data_dir):
    """What PostgreSQL must replay before it lets anybody in."""
    return parse_lsn(controldata(data_dir)["Minimum recovery ending location"])


def test_files_are_cut_at_little_cost_and_killed_without_harm(small_primary, work):
    """Where it is known how far replay gets, the control file is not written for each truncation, but nobody stops before one that
    was done: killed at any step, W and P finish with stock's bytes. It is known without a target, and with an LSN, past which the
    control file never names anything; a name may come at any time.

    Not tried: a power cut, which loses what was not fsynced; and a standby, whose WAL may not be durable yet.
    """
    files, disk, rng = Files(small_primary, work), shim.Disk(work / "disk", work), random.Random(7)
    whole = files.copy(work / "whole")
    calls = {}
    for kind, target in ("lsn", files.end), ("name", "late"):
        replay(whole, files.archive, f"--target-{kind}", target, env=disk.kill_at(0)).expect()
        calls[kind] = len(disk.calls())
        recovery.discard(whole)
        files.copy(whole)
    replay(whole, files.archive, "--target-lsn", files.begin, env=disk.kill_at(0)).expect()
    begin = len(disk.calls())
    recovery.discard(whole)
    replay(files.copy(whole), files.archive, env=disk.kill_at(0)).expect()
    without = len(disk.calls())
    # Each time three: the new file, its rename, and the directory.
    assert calls["name"] - without > 3 * (TRUNCATIONS - 5), (calls, without)
    assert calls["lsn"] - without < 3 * 5, (calls, without)
    compare(whole, files.stock)

    behind = []
    for number, step in enumerate(rng.sample(range(begin - 10, without), KILLS)):
        ours = files.copy(work / f"round{number}")
        replay(ours, files.archive, env=disk.kill_at(step)).expect(-9)
        behind.append(reached(ours))
        if number % 2:
            files.finish_with_stock(ours)
        else:
            replay(ours, files.archive).expect()
        compare(ours, files.stock)
        recovery.discard(ours)

    for step in rng.sample(range(begin, begin + 3 * TRUNCATIONS // 2), 1):
        ours = files.copy(work / "target")
        replay(ours, files.archive, "--target-lsn", files.middle, env=disk.kill_at(step)).expect(-9)
        assert parse_lsn(files.begin) < reached(ours) <= parse_lsn(files.middle)
        assert replay(ours, files.archive, "--target-lsn", files.middle).expect().json["end_reason"] == "target"
        recovery.discard(ours)
    print(f"{begin} fsyncs, renames and removals to begin, {without} in all, with a target {calls}; killed with {behind}")
