"""Which directories `walrider standby` takes up, and that it changes nothing in those that it refuses."""

import hashlib
import os
from pathlib import Path

import pytest

from tests.lab.server.cluster import PgCluster, free_port
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Walrider, wait_position, wait_streaming
from tests.lab.walrider import FAILED, walrider


def contents(directory):
    """Every entry below a directory: its mode and, of files, a hash of the bytes."""
    def of(path):
        kind = path.lstat().st_mode
        return kind, hashlib.sha256(path.read_bytes()).digest() if path.is_file() else None
    return {str(path.relative_to(directory)): of(path) for path in Path(directory).rglob("*")}


def refused(directory, *options, say):
    """It is refused, with these words, and the directory is untouched."""
    before = contents(directory)
    said = walrider("standby", "-D", directory, *options, timeout=30).expect(FAILED).stderr
    assert all(word in said for word in say), said
    after = contents(directory)
    assert before == after, [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def follows(primary, directory, *options):
    """It follows, and stops."""
    with Walrider(directory, *options).start() as follower:
        wait_streaming(primary)
        primary.psql("SELECT pg_logical_emit_message(true, '', 'x')")
        wait_position(primary)
        assert (directory / "standby.signal").exists()
        follower.stop()


def test_a_promoted_directory_is_a_primarys(primary, work):
    """The next boot must not make the new primary a standby of the old one, which may be back by then; nor with the flag, since
    both have gone on; and pg_rewind takes it back."""
    directory = standby.clone(primary, work / "ours")
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        follower.promote()
    with PgCluster(directory) as server:
        standby.start_primary(server).psql("CREATE TABLE gone_on ()", options=LOCALLY)
        server.stop()
    refused(directory, say=["has no standby.signal", '"shut down", timeline 2', "pg_rewind"])
    primary.psql("CREATE TABLE also_here ()", options=LOCALLY)
    refused(directory, "--make-standby", say=["highest timeline 1 of the primary is behind recovery timeline 2"])
    # The other way round: the old primary does not become a standby of the new one either.
    primary.stop()
    with PgCluster(directory) as server:
        standby.start_primary(server)
        refused(primary.data_dir, "--primary", standby.conninfo(server.port), say=["has no standby.signal"])
        refused(primary.data_dir, "--make-standby", "--primary", standby.conninfo(server.port),
                say=["not in the history of the primary's timeline 2"])


def test_another_clusters_directory(primary, primary_template, work):
    """Neither with the flag nor with standby.signal."""
    with PgCluster.init(work / "other", wal_segsize_mb=1, conf=standby.PRIMARY) as other:
        standby.start_primary(other)
        directory = other.basebackup(work / "ours", wal="stream")
    to = ("--primary", standby.conninfo(primary.port))
    refused(directory, *to, say=["is a base backup without standby.signal", "--make-standby"])
    refused(directory, *to, "--make-standby", "--create-slot", "--slot", "s", say=["database system identifier"])
    (directory / "standby.signal").touch()
    refused(directory, *to, "--create-slot", "--slot", "s", say=["database system identifier"])
    assert primary.value("SELECT count(*) FROM pg_replication_slots") == "0"


@pytest.mark.parametrize("wal", ["none", "stream"])
def test_a_base_backup_is_made_a_standby(primary, work, wal):
    """With the flag, once the primary has said who it is; without the flag from then on."""
    directory = primary.basebackup(work / "ours", wal=wal)
    to = ("--primary", standby.conninfo(primary.port))
    nobody = ("--primary", standby.conninfo(free_port()))
    refused(directory, *nobody, "--make-standby", say=["Connection refused"])
    (directory / "recovery.signal").touch()
    refused(directory, *to, say=["has recovery.signal", "--make-standby"])
    os.unlink(directory / "recovery.signal")
    follows(primary, directory, *to, "--make-standby")
    follows(primary, directory, *to)


def test_a_standby_begins_without_its_primary(primary, work):
    """Nobody to ask: it replays what it has, as PostgreSQL does, and follows when there is somebody."""
    directory = standby.clone(primary, work / "ours")
    primary.stop()
    with Walrider(directory).start() as follower:
        follower.wait_state("connecting")
        assert "could not be asked who it is" in follower.log_text()
        standby.start_primary(primary)
        wait_streaming(primary)


def test_nothing_to_replay(primary, work):
    """All was replayed before, and the primary is gone: it says where it stands, and is consistent. It said that it stood nowhere."""
    directory = standby.clone(primary, work / "ours")
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        primary.stop()
        end = primary.controldata()["Latest checkpoint location"]
        follower.wait_replayed(end)
        follower.stop()
    with Walrider(directory).start() as follower:
        follower.wait_replayed(end)
        assert follower.status()["consistent"]
        follower.stop()
