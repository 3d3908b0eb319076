"""Whose directory it is: its name, its lock and its parts may go while somebody works on it."""

import hashlib
import os
import signal

import pytest

from tests.lab.server.cluster import controldata, copy_tree
from tests.lab.standby.follower import Follower
from tests.lab.standby.standby import LOCALLY, Walrider, clone, wait_position
from tests.lab.walrider import FAILED

MORE = "CREATE TABLE {0} AS SELECT g, md5(g::text) FROM generate_series(1, 5000) g; CHECKPOINT; SELECT pg_switch_wal()"


def contents(directory):
    """Everything in a directory: names, and sums of files."""
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
            for path in directory.rglob("*")}


@pytest.fixture
def followed(small_primary, work):
    """A primary, its backup, and a follower of its archive that has caught up."""
    small_primary.start()
    backup = small_primary.basebackup(work / "backup")
    small_primary.psql(MORE.format("one"))
    with Follower(copy_tree(backup, work / "q"), small_primary.archive) as follower:
        follower.wait_for(made_before(small_primary))
        yield small_primary, backup, follower


def made_before(server):
    """End of what the last switch of segments has left to the archive."""
    return server.value("SELECT pg_current_wal_flush_lsn() - mod(pg_current_wal_flush_lsn() - '0/0', 16 * 1024 * 1024)")


def test_moved_under_a_follower(followed, work):
    """It goes on in the directory, not in another one that has its name now."""
    server, backup, follower = followed
    (work / "q").rename(work / "q2")
    copy_tree(backup, work / "q")
    before = contents(work / "q")
    server.psql(MORE.format("two"))
    follower.wait_for(made_before(server))
    assert follower.end()["end_reason"] == "interrupted"
    assert contents(work / "q") == before
    left = controldata(work / "q2")
    assert left["Database cluster state"] == "shut down in recovery"
    relation = server.value("SELECT pg_relation_filepath('two')")
    assert (work / "q2" / relation).exists() and not (work / "q2" / "postmaster.pid").exists()


def test_moved_under_a_standby(primary, work):
    """The same with WAL that streams in."""
    directory = clone(primary, work / "q")
    backup = copy_tree(directory, work / "backup")
    with Walrider(directory) as standby:
        standby.start()
        primary.psql("CREATE TABLE one AS SELECT g FROM generate_series(1, 5000) g", options=LOCALLY)
        wait_position(primary)
        directory.rename(work / "q2")
        copy_tree(backup, directory)
        before = contents(directory)
        primary.psql("CREATE TABLE two AS SELECT g FROM generate_series(1, 5000) g; CHECKPOINT", options=LOCALLY)
        wait_position(primary)
        assert standby.status()["data_dir"] == str(work / "q2")
        standby.send_signal(signal.SIGHUP)
        standby.stop()
    assert contents(directory) == before
    relation = primary.value("SELECT pg_relation_filepath('two')")
    assert (work / "q2" / relation).stat().st_size == 5000 // 226 * 8192 + 8192


@pytest.mark.parametrize("file", ["gone", "replaced"])
def test_lock_taken_away(followed, work, file):
    """Before pg_control is written, the lock file is looked at."""
    server, _, follower = followed
    lock, control = work / "q" / "postmaster.pid", work / "q" / "global" / "pg_control"
    lock.unlink()
    if file == "replaced":
        lock.write_text(f"{os.getpid()}\n{work}/q\n")
    before = control.read_bytes()
    server.psql(MORE.format("two"))
    _, said = follower.process.communicate(timeout=60)      # a file is made: that moves minRecoveryPoint
    assert follower.process.returncode == FAILED
    assert ("is gone" if file == "gone" else f"names process {os.getpid()} now") in said, said
    assert control.read_bytes() == before
    assert lock.exists() == (file == "replaced")


def test_base_is_gone(followed, work):
    """What PostgreSQL does not make again is an error."""
    server, _, follower = followed
    (work / "q" / "base").rename(work / "base")
    server.psql(MORE.format("two"))
    follower.process.wait(60)
    assert follower.process.returncode != 0
    assert "base/" in follower.process.stderr.read()
    assert not (work / "q" / "base").exists()
