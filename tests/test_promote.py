"""`replay --promote`: what it leaves is what stock PostgreSQL leaves when it ends the same recovery, and starts at once."""

import re
import shutil
import time
from pathlib import Path

import pytest

from tests.harness import install, recovery
from tests.harness.cluster import PgCluster, controldata, copy_tree, format_lsn, parse_lsn, run
from tests.harness.walrider import CORRUPT, FAILED, USAGE, compare, replay, start, walrider

SEGMENT = 1 << 20
PAGE = 8192
CONF = """
shared_buffers = 32MB
max_wal_size = 64MB
checkpoint_timeout = 1h
autovacuum = off
track_commit_timestamp = on
wal_log_hints = on
"""
# What stock says of itself as it runs, and the clock.
OWN = {"Database cluster state", "pg_control last modified", "Time of latest checkpoint"}
# Made by hand, because xlp_sysid and the like must be those of the same cluster: all tests take copies of one primary.
SETUP = """
CREATE TABLE accounts (id int PRIMARY KEY, note text);
INSERT INTO accounts SELECT n, repeat('x', 100) FROM generate_series(1, 2000) n;
CREATE SEQUENCE counter;
CREATE UNLOGGED TABLE scratch (id serial PRIMARY KEY, note text);
CREATE UNLOGGED TABLE scratch_away (id int PRIMARY KEY) TABLESPACE away;
INSERT INTO scratch (note) SELECT 'lost' FROM generate_series(1, 500);
INSERT INTO scratch_away SELECT generate_series(1, 500);
"""


class Primary:
    """A primary in the middle of its life: a backup, and the WAL since, with something of everything that promotion ends."""

    def __init__(self, directory):
        self.directory = directory
        self.location = directory / "away"
        self.location.mkdir()
        self.archive = directory / "archive"
        self.server = PgCluster.init(directory / "primary", self.archive, wal_segsize_mb=1, conf=CONF)
        with self.server as server:
            server.start()
            server.psql(f"CREATE TABLESPACE away LOCATION '{self.location}'")
            server.psql(SETUP)
            self.backup = server.basebackup(directory / "backup", f"--tablespace-mapping={self.location}={directory}/mapped",
                                            wal="stream")
            self.load(server)
            self.end = server.lsn()
            self.expected = server.psql("SELECT * FROM accounts ORDER BY id")
            self.prepared = server.psql("SELECT gid FROM pg_prepared_xacts ORDER BY 1")
            server.stop("immediate")
        self.server.complete_archive()

    def load(self, server):
        """Commits, multixacts, prepared transactions before and after a checkpoint, unlogged tables made and dropped."""
        server.psql("BEGIN; INSERT INTO accounts VALUES (-1, 'early'); PREPARE TRANSACTION 'early'")
        server.psql("BEGIN; INSERT INTO accounts VALUES (-2, 'ends'); PREPARE TRANSACTION 'ends'")
        server.psql("CREATE UNLOGGED TABLE gone (id int); DROP TABLE gone")
        server.psql("SELECT nextval('counter') FROM generate_series(1, 50)")
        server.psql("CHECKPOINT")
        server.psql("UPDATE accounts SET note = 'after the checkpoint' WHERE id % 3 = 0")
        server.psql("CREATE UNLOGGED TABLE late (id serial PRIMARY KEY, note text); INSERT INTO late (note) VALUES ('lost')")
        server.psql("COMMIT PREPARED 'ends'")
        server.psql("BEGIN; INSERT INTO accounts VALUES (-3, 'late'); PREPARE TRANSACTION 'late'")
        with server.session() as one, server.session() as two:
            one.run("BEGIN; SELECT * FROM accounts WHERE id = 7 FOR SHARE")
            two.run("BEGIN; SELECT * FROM accounts WHERE id = 7 FOR SHARE")
            one.run("COMMIT")
            two.run("COMMIT")
        server.psql("CREATE TABLE newest (id int); INSERT INTO newest VALUES (1)")
        server.psql("SELECT pg_create_restore_point('here')")
        server.psql("INSERT INTO newest VALUES (2)")
        server.psql("SELECT nextval('counter')")

    def copy(self, data_dir, conf=""):
        """A copy of the backup whose WAL is archived beside it."""
        recovery.copy_backup(self.backup, data_dir)
        archived = Path(f"{data_dir}.archived")
        archived.mkdir()
        server = PgCluster(data_dir, archived)
        server.configure(f"archive_command = '{server.archive_command()}'\n{conf}")
        return server


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """One primary for all tests here."""
    return Primary(tmp_path_factory.mktemp("promote"))


def promote(server, wal, *options):
    """`replay --promote` of a directory."""
    result = replay(server.data_dir, wal, "--promote", *options).expect()
    assert result.json["promoted"], result.json
    return result.json


def stock_promotes(server, wal, *, stop="immediate", **settings):
    """Stock PostgreSQL ends the same recovery."""
    (server.data_dir / "recovery.signal").touch()
    server.configure(recovery.restore_settings(wal, **settings), "postgresql.auto.conf")
    recovery.recover_and_promote(server, recovery_target_action="promote", max_connections="60",
                                 max_worker_processes="8", max_prepared_transactions="20")
    server.stop(stop)
    return server


def wal_names(server):
    """What is in pg_wal, and what the archiver was told."""
    wal = server.data_dir / "pg_wal"
    return ({file.name for file in wal.iterdir() if file.is_file()},
            {file.name for file in (wal / "archive_status").iterdir()})


def check_starts_at_once(server, timeline=2):
    """PostgreSQL finds a clean shutdown on the new timeline: nothing is redone."""
    server.start()
    text = server.log.read_text()
    assert "database system was shut down at" in text and "redo starts" not in text, text
    assert server.value("SELECT timeline_id FROM pg_control_checkpoint()") == str(timeline)
    assert server.value("SELECT pg_is_in_recovery()") == "f"
    return server


def check_contents(origin, server):
    """All that the primary had, and all that it could do."""
    assert server.psql("SELECT * FROM accounts ORDER BY id") == origin.expected
    assert server.psql("SELECT gid FROM pg_prepared_xacts ORDER BY 1") == origin.prepared == [["early"], ["late"]]
    server.psql("COMMIT PREPARED 'early'; COMMIT PREPARED 'late'")
    assert server.psql("SELECT id FROM accounts WHERE id < 0 ORDER BY 1") == [["-3"], ["-2"], ["-1"]]
    assert int(server.value("SELECT nextval('counter')")) > 51
    assert server.value("SELECT nextval('late_id_seq')") == "1", "an unlogged sequence begins anew"
    for table in ("scratch", "scratch_away", "late"):
        assert server.value(f"SELECT count(*) FROM {table}") == "0", table
        server.psql(f"INSERT INTO {table} (id) VALUES (1); SELECT * FROM {table} WHERE id = 1")
    stamps = server.psql("SELECT count(*), count(pg_xact_commit_timestamp(xmin)) FROM newest")
    assert stamps == [["2", "2"]]
    server.psql("BEGIN; SELECT * FROM accounts WHERE id = 7 FOR SHARE; UPDATE accounts SET note = 'locked' WHERE id = 7; COMMIT")
    server.psql("".join(f"CREATE TABLE t{n} (id int PRIMARY KEY, note text);" for n in range(30)))
    assert server.value("SELECT count(*) = count(DISTINCT oid) FROM pg_class") == "t"
    server.psql("VACUUM FREEZE; CHECKPOINT")
    run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--install-missing"], env=server.environment())


def test_as_stock_promotes(origin, work):
    """Control file, WAL, files and their archive status beside those of stock PostgreSQL; then it serves."""
    stock = stock_promotes(origin.copy(work / "stock"), origin.archive)
    ours = origin.copy(work / "ours")
    promoted = promote(ours, origin.archive)["promoted"]
    theirs, control = controldata(stock.data_dir), controldata(ours.data_dir)
    assert control["Database cluster state"] == "shut down"
    assert {key for key in control if control[key] != theirs[key]} <= OWN, (control, theirs)
    name = control["Latest checkpoint's REDO WAL file"]
    assert name.startswith("00000002")
    history = "pg_wal/00000002.history"
    assert (ours.data_dir / history).read_bytes() == (stock.data_dir / history).read_bytes()
    end = parse_lsn(promoted["checkpoint_lsn"]) % SEGMENT + 120
    segments = [(server.data_dir / "pg_wal" / name).read_bytes()[:end] for server in (ours, stock)]
    differ = [at for at in range(end) if segments[0][at] != segments[1][at]]
    assert len(differ) <= 12, "only the time of the checkpoint and the checksum differ"
    assert (ours.data_dir / "pg_wal" / name).read_bytes()[end:].strip(b"\0") == b""
    dump = [run([install.program("pg_waldump"), "-p", server.data_dir / "pg_wal", "-t", "2",
                 "-s", promoted["checkpoint_lsn"], "-n", "1"]).stdout for server in (ours, stock)]
    assert dump[0] == dump[1] and "CHECKPOINT_SHUTDOWN" in dump[0]
    for signal in ("recovery.signal", "standby.signal", "backup_label"):
        assert not (ours.data_dir / signal).exists(), signal
    run([install.program("pg_checksums"), "--check", "-D", ours.data_dir])
    with check_starts_at_once(ours):
        check_contents(origin, ours)
