"""Barman as an operator uses it: backup by pg_basebackup, archive in gzip, restore, Walrider, first write.

The other host of a remote restore is this one, and its ssh a script that runs the command here. What it does not try: WAL by
streaming, backups by rsync, incremental ones, tablespaces, encryption, the cloud; what a command that was ended leaves in
pg_wal.
"""

import gzip
import re

import pytest

from tests.lab.server.barman import Catalogue
from tests.lab.walrider import walrider


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    """One catalogue for all tests here; its server is gone when they restore."""
    made = Catalogue(tmp_path_factory.mktemp("barman"))
    with made.server:
        made.fill()
    return made


def first_write(server):
    """PostgreSQL opens without redo and takes a row. What table t has: rows of before, and the one from behind the target."""
    with server:
        server.start(archive_mode="off")
        server.psql("INSERT INTO t VALUES (0, 'first write')")
        assert not server.log_matches("redo starts at"), server.log_tail()
        return server.psql("SELECT count(*) FILTER (WHERE id > 0), count(*) FILTER (WHERE id = -1) FROM t")[0]


def left(server):
    """The restore_command that Barman left."""
    return re.search(r"^restore_command = '(.*)'$", (server.data_dir / "postgresql.auto.conf").read_text(), re.M)[1]


@pytest.mark.parametrize("get_wal", [False, True], ids=["copied", "get_wal"])
def test_time(catalogue, work, get_wal):
    """Restored to a time with promote: Walrider needs nothing but what Barman left, PostgreSQL opens without redo. WAL that was
    copied along is gone then: Barman's recovery_end_command removes it."""
    stored = [file for file in (catalogue.home / "main/wals").glob("*/*") if len(file.name) == 24]
    assert stored and all(len(gzip.decompress(file.read_bytes())) == 1 << 20 for file in stored), stored
    server = catalogue.restored(work / "data", "--get-wal" if get_wal else "--no-get-wal",
                                "--target-time", catalogue.target, "--target-action", "promote")
    copied = server.data_dir / "barman_wal"
    assert left(server) == ("barman get-wal -P main %f > %p" if get_wal else f"cp {copied}/%f %p")
    assert any(copied.glob("0*")) != get_wal
    done = walrider("replay", "-D", server.data_dir, env=catalogue.environment).expect()
    assert done.json["end_reason"] == "target" and done.json["records"] > 4000, done.json
    assert done.json["settings_written"] == {}
    assert copied.exists() == get_wal
    assert first_write(server) == ["4000", "0"]


def test_other_host(catalogue, work):
    """Restored to another host, and without a target: `barman-wal-restore` asks Barman's host, and that it fails behind the last
    segment is the end of the WAL, proven."""
    server = catalogue.restored(work / "data", "--get-wal", "--remote-ssh-command", "ssh postgres@db")
    assert re.fullmatch(r"barman-wal-restore -P -U \S+ \S+ main %f %p", left(server)), left(server)
    done = walrider("replay", "-D", server.data_dir, "--promote", "--fetch-jobs", "2", env=catalogue.environment).expect()
    assert done.json["end_reason"] == "end_of_wal" and "ended with exit code 1" in str(done.json["end_of_wal"]), done.json
    assert first_write(server) == ["4000", "1"]
