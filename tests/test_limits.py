"""Few open files allowed, and many to work on."""

import pytest

from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster
from tests.lab.standby.standby import LOCALLY, Walrider, clone, wait_position
from tests.lab.walrider import FAILED, replay, walrider

FEW = 64
TABLES = 450        # of four files each: heap, TOAST table and its index, primary key
MAKE = f"""DO $$BEGIN FOR i IN 1..{TABLES} LOOP
    EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY, t text)', i);
    EXECUTE format('INSERT INTO t%s SELECT g, repeat(md5(g::text), 3) FROM generate_series(1, 20) g', i);
END LOOP; END$$"""
CHANGE = f"""DO $$BEGIN FOR i IN 1..{TABLES} LOOP
    EXECUTE format('UPDATE t%s SET t = (SELECT string_agg(md5(g::text), '''') FROM generate_series(1, 150) g) WHERE id = 3', i);
END LOOP; END$$"""
CONF = "autovacuum = off\nmax_locks_per_transaction = 500\nmax_wal_size = 10GB\n"


@pytest.fixture(scope="module")
def many(scratch):
    """A backup, and WAL behind one checkpoint: 1,800 files made, most of them changed in one batch, in more than a hundred segments."""
    directory = scratch / "many"
    directory.mkdir()
    with PgCluster.init(directory / "primary", directory / "archive", wal_segsize_mb=1, conf=CONF) as server:
        server.start()
        server.basebackup(directory / "backup")
        server.psql(MAKE)
        server.psql(CHANGE)
        server.psql("SELECT pg_logical_emit_message(false, 'p', 'm'); SELECT pg_switch_wal();\n" * (FEW + 10))
        made = int(server.value("SELECT count(*) FROM pg_class WHERE relfilenode >= 16384"))
        assert made > 1500, made
        server.stop()
        server.complete_archive()
    replay(recovery.copy_backup(directory / "backup", directory / "reference"), directory / "archive").expect()
    return directory


@pytest.mark.parametrize("how", ["directory", "restore_command"])
def test_replay(many, work, how):
    """The files that it keeps open, of relations and of WAL, are fewer than it may have."""
    ours = recovery.copy_backup(many / "backup", work / "ours")
    if how == "directory":
        replay(ours, many / "archive", open_files=FEW).expect()
    else:
        server = PgCluster(ours)
        server.configure(recovery.restore_settings(many / "archive"), "postgresql.auto.conf")
        (ours / "recovery.signal").touch()
        walrider("replay", "-D", ours, open_files=FEW).expect()
    compare(ours, many / "reference")


def test_too_few(many, work):
    """It says so before it touches anything."""
    ours = recovery.copy_backup(many / "backup", work / "ours")
    before = {path: path.stat().st_mtime_ns for path in ours.rglob("*")}
    result = replay(ours, many / "archive", "--jobs", 9, open_files=FEW).expect(FAILED)
    assert "64 files may be open, and 9 threads need 66: raise the limit (ulimit -n" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in ours.rglob("*")} == before


def test_standby(primary, work):
    """One that receives, replays, makes restartpoints and is asked how it goes; and that may then be promoted."""
    directory = clone(primary, work / "standby")
    with Walrider(directory, "--restartpoint-wal", "8MB", open_files=FEW) as standby:
        standby.start()
        primary.psql(MAKE.replace(f"1..{TABLES}", "1..120"), options=LOCALLY)
        primary.psql("CHECKPOINT")
        primary.psql(CHANGE.replace(f"1..{TABLES}", "1..120"), options=LOCALLY)
        primary.psql("CHECKPOINT")
        wait_position(primary)
        assert standby.status()["state"] == "streaming"
        standby.promote()
        assert "open files" not in standby.log_text()
