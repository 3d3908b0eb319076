"""--follow: WAL that is still being written, and what may happen to its directory meanwhile."""

import shutil
import subprocess
import time

from tests.lab.faults.archive import archive_of_links, middle_segment, own
from tests.lab.install import program
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster
from tests.lab.standby.follower import Follower
from tests.lab.walrider import CORRUPT

SMALL = "wal_keep_size = 1GB\n"


def made_by(server):
    """End of what the primary has written and flushed."""
    return server.value("SELECT pg_current_wal_flush_lsn()")


def test_follow_pg_receivewal(work):
    """Commit by commit, in .partial segments that get their names when they are full."""
    wal = work / "wal"
    wal.mkdir()
    with PgCluster.init(work / "primary", wal_segsize_mb=1, conf=SMALL) as server:
        server.start()
        receiver = subprocess.Popen([program("pg_receivewal"), "-D", wal, "--synchronous", "--no-loop"], env=server.environment(),
                                    stderr=subprocess.DEVNULL)
        try:
            while not list(wal.iterdir()):
                time.sleep(0.01)
            server.basebackup(work / "backup")
            recovery.copy_backup(work / "backup", work / "ours")
            server.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
            with Follower(work / "ours", wal) as follower:
                for number in range(30):
                    server.psql(f"INSERT INTO t VALUES ({number}, 'one by one')")
                    follower.wait_for(made_by(server))
                assert wal.stat().st_ino in follower.watches(), "it waits for changes of the directory"
                before = len(list(wal.iterdir()))
                for part in range(10):
                    server.psql(f"INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series({part * 3000 + 1000}, "
                                f"{part * 3000 + 3999}) g; UPDATE t SET v = 'y' WHERE id % 7 = {part % 7}")
                    follower.wait_for(made_by(server))
                assert len(list(wal.iterdir())) > before + 3
                server.stop()
                final = server.controldata()["Latest checkpoint location"]
                follower.wait_behind(final)
                result = follower.end()
        finally:
            receiver.kill()
            receiver.wait()
    assert (result["checkpoint_lsn"], result["end_reason"]) == (final, "interrupted")
    for partial in wal.glob("*.partial"):
        partial.rename(partial.with_suffix(""))
    recovery.stock_replay(work / "backup", wal, work / "stock", final)
    compare(work / "ours", work / "stock")


def test_follow_the_pg_wal_of_a_primary(small_primary, work):
    """Its segments are used again: what stands behind the end is WAL of long ago."""
    server = small_primary.start()
    server.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    server.basebackup(work / "backup")
    recovery.copy_backup(work / "backup", work / "ours")
    with Follower(work / "ours", server.data_dir / "pg_wal") as follower:
        for part in range(6):
            server.psql(f"INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series({part * 9000}, "
                        f"{part * 9000 + 8999}) g")
            follower.wait_for(made_by(server))
            server.psql("CHECKPOINT")
        server.psql("UPDATE t SET v = 'the last'")
        follower.wait_for(made_by(server))
        server.stop()
        final = server.controldata()["Latest checkpoint location"]
        follower.wait_behind(final)
        assert follower.end()["checkpoint_lsn"] == final
    server.complete_archive()
    recovery.stock_replay(work / "backup", server.archive, work / "stock", final)
    compare(work / "ours", work / "stock")


def test_follow_a_directory_that_is_replaced(plain, work):
    """Mounted anew, or restored: the path counts."""
    archive, segments = work / "archive", plain.segments()
    shutil.copytree(plain.archive, archive, ignore=lambda _, names: [file.name for file in segments[3:]])
    ours = plain.copy(work / "ours", action="shutdown")
    with Follower(ours, archive, "--target-lsn", plain.info["final_checkpoint"]) as follower:
        while archive.stat().st_ino not in follower.watches():
            time.sleep(0.01)
        archive.rename(work / "away")
        shutil.copytree(plain.archive, archive)
        _, said = follower.process.communicate(timeout=120)
        assert follower.process.returncode == 0, said
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_follow_a_promotion(small_primary, work):
    """A standby is promoted: its timeline is gone over to, as a standby of PostgreSQL does."""
    server = small_primary.start()
    server.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    server.basebackup(work / "backup")
    recovery.copy_backup(work / "backup", work / "ours")
    with Follower(work / "ours", server.archive) as follower:
        server.psql("INSERT INTO t SELECT g, 'first' FROM generate_series(1, 2000) g")
        lsn = made_by(server)
        server.switch_wal()
        follower.wait_for(lsn)
        server.psql("UPDATE t SET v = 'second' WHERE id % 3 = 0")
        server.stop()
        server.complete_archive()
        promoted = recovery.prepare(work / "backup", server.archive, work / "promoted")
        promoted.archive = server.archive
        promoted.configure("archive_mode = on", "postgresql.auto.conf")
        with promoted:
            recovery.recover_and_promote(promoted)
            promoted.psql("UPDATE t SET v = 'third' WHERE id % 5 = 0")
            lsn = made_by(promoted)
            promoted.switch_wal()
            follower.wait_for(lsn)
            promoted.psql("DELETE FROM t WHERE id % 7 = 0")
            promoted.stop()
            final = promoted.controldata()["Latest checkpoint location"]
        promoted.complete_archive()
        follower.wait_behind(final)
        result = follower.end()
    assert (result["timeline"], result["checkpoint_lsn"]) == (2, final)
    recovery.stock_replay(work / "backup", server.archive, work / "stock", final)
    compare(work / "ours", work / "stock")


def test_follow_into_damage(plain, work):
    """What is being written may look damaged for a moment; what stays so is."""
    archive = archive_of_links(plain, work / "archive")
    segment = own(archive / middle_segment(plain))
    whole = segment.read_bytes()
    half = len(whole) // 2 // 8192 * 8192
    segment.write_bytes(whole[:half] + bytes(8192) + whole[half + 8192:])
    with Follower(plain.copy(work / "ours"), archive) as follower:
        _, said = follower.process.communicate(timeout=60)
        assert follower.process.returncode == CORRUPT and segment.name in said
    ours = plain.copy(work / "again", action="shutdown")
    with Follower(ours, archive, "--target-lsn", plain.info["final_checkpoint"]) as follower:
        while not follower.said():
            time.sleep(0.01)
        with segment.open("r+b") as file:
            file.seek(half)
            file.write(whole[half:half + 8192])
        _, said = follower.process.communicate(timeout=120)
        assert follower.process.returncode == 0, said
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)
