"""What is around a restore: the primary on the same host, recoveries that were before, an archive with gaps or with WAL of others, a standby.

Not tried: object stores with gaps, a standby that is restored beside its primary.
"""

import shutil

import pytest

from tests.lab.server import recovery
from tests.lab.server.backups import extract, verify
from tests.lab.server.cluster import PgCluster
from tests.lab.waiting import wait_for
from tests.lab.walrider import CORRUPT, FAILED, USAGE, walrider

ROWS = "SELECT concat_ws('|', count(*), min(v), max(v)) FROM t"


@pytest.fixture
def primary(work):
    """A primary that archives, and a backup of it."""
    with PgCluster.init(work / "primary", work / "wal", wal_segsize_mb=1, conf="autovacuum = off\nwal_keep_size = 0\n") as server:
        server.start()
        server.psql("CREATE TABLE t AS SELECT g AS id, 'before' AS v FROM generate_series(1, 1000) g")
        server.basebackup(work / "old", "-Ft")
        yield server


def test_the_primary_has_a_tablespace_that_the_wal_makes(primary, work):
    """A backup was rolled forward on the primary's host: the tablespace that was made after it was "restored" over the primary's own, whose
    rows were old ones then. PostgreSQL does so, too."""
    (work / "space").mkdir()
    primary.psql(f"CREATE TABLESPACE s LOCATION '{work}/space'")
    primary.psql("ALTER TABLE t SET TABLESPACE s; UPDATE t SET v = 'first'")
    primary.psql("SELECT pg_create_restore_point('first')")
    primary.psql("UPDATE t SET v = 'second'; INSERT INTO t SELECT g, 'second' FROM generate_series(1001, 20000) g; CHECKPOINT")
    primary.stop()
    primary.complete_archive()
    primary.start()
    first = ["--backup", work / "old", "--wal", work / "wal", "--target-name", "first"]
    for command in [("backup", "roll", *first, "--out", work / "plain"), ("restore", *first, "-D", work / "ours")]:
        result = walrider(*command)
        assert result.code == FAILED and f'{work}/space/PG_' in result.stderr and "another server" in result.stderr, result
    assert not any((work / name).exists() for name in ("plain", "plain.rolling"))
    # Archives have it, and it need not be at its place before they are restored.
    walrider("backup", "roll", *first, "--out", work / "new", "--format", "tar").expect()
    assert not (work / "new.rolling").exists()
    primary.restart("immediate")
    assert primary.value(ROWS) == "20000|second|second"
    primary.stop()
    # Where that is mapped to it stays, although the WAL of the new backup makes it once more.
    walrider("restore", "--backup", work / "new", "--wal", work / "wal", "-D", work / "again", "--target-name", "first", "--promote",
             "--tablespace-mapping", f"{work}/space={work}/there").expect()
    assert list((work / "there").glob("PG_*/*/*"))
    rolled = PgCluster(work / "again")
    rolled.configure("archive_mode = off", "postgresql.auto.conf")
    with rolled:
        rolled.start()
        assert rolled.value(ROWS) == "1000|first|first"


def test_targets_of_an_earlier_recovery(primary, work):
    """Recovery had ended at a target, which stayed in postgresql.auto.conf. Backups of the new primary had it, too, and could neither be
    restored nor rolled forward, with a target or without."""
    primary.psql("UPDATE t SET v = 'first'")
    primary.psql("SELECT pg_create_restore_point('first')")
    primary.psql("UPDATE t SET v = 'second'")
    primary.stop()
    primary.complete_archive()
    walrider("restore", "--backup", work / "old", "--wal", work / "wal", "-D", work / "next", "--target-name", "first", "--promote").expect()
    assert "recovery_target" not in (work / "next/postgresql.auto.conf").read_text()
    again = PgCluster(work / "next", work / "wal")
    # As others leave it.
    again.configure("recovery_target_lsn = '0/1800000'\nrecovery_target_inclusive = off\nrecovery_target_timeline = 'current'\n"
                    "recovery_target_action = 'shutdown'", "postgresql.auto.conf")
    with again:
        again.start()
        assert again.value(ROWS) == "1000|first|first"
        again.basebackup(work / "backup", "-Ft")
        again.psql("UPDATE t SET v = 'third'")
        again.psql("SELECT pg_create_restore_point('third')")
        again.psql("UPDATE t SET v = 'fourth'")
        again.stop()
        again.complete_archive()
    from_backup = ["--backup", work / "backup", "--wal", work / "wal"]
    walrider("backup", "roll", *from_backup, "--target-name", "third", "--out", work / "rolled").expect()
    verify(work / "rolled")
    walrider("backup", "roll", *from_backup, "--out", work / "new", "--format", "tar").expect()
    for name, options, rows in [("third", ["--target-name", "third", "--promote"], "third"), ("end", ["--promote"], "fourth"),
                                ("by_postgresql", ["--target-name", "third"], "third")]:
        walrider("restore", *from_backup, "-D", work / name, *options).expect()
        server = PgCluster(work / name)
        server.configure("archive_mode = off\nrecovery_target_action = promote", "postgresql.auto.conf")
        with server:
            server.start()
            assert server.value(ROWS) == f"1000|{rows}|{rows}", name


def test_another_target_than_before(primary, work):
    """The target of a run that failed is in postgresql.auto.conf: that of the next is taken instead."""
    primary.psql("UPDATE t SET v = 'first'")
    primary.psql("SELECT pg_create_restore_point('first')")
    primary.psql("UPDATE t SET v = 'second'")
    primary.stop()
    primary.complete_archive()
    failed = walrider("restore", "--backup", work / "old", "--wal", work / "wal", "-D", work / "ours", "--target-lsn", "F/0", "--promote")
    assert failed.code == FAILED, failed
    ended = walrider("replay", "-D", work / "ours", "--wal", work / "wal", "--target-name", "first", "--promote")
    # It had gone too far by then; but what is wrong with it is not that there are two targets.
    assert ended.code == FAILED and "before the configured recovery target was reached" in ended.stderr, ended
    assert "recovery_target_lsn = ''" in (work / "ours/postgresql.auto.conf").read_text()


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_gap_in_the_archive(primary, work, missing):
    """WAL that is missing, and goes on later, is no end: with two segments missing, recovery ended there, and nobody was told."""
    for _ in range(8):
        primary.psql("UPDATE t SET v = 'next'")
        primary.switch_wal()
    primary.stop()
    primary.complete_archive()
    segments = sorted(path for path in (work / "wal").iterdir() if len(path.name) == 24)
    for gone in segments[-4 - missing:-4]:
        gone.unlink()
    arguments = ["--backup", work / "old", "--wal", work / "wal"]
    for command in [("restore", *arguments, "-D", work / "ours", "--promote"), ("backup", "roll", *arguments, "--out", work / "new")]:
        result = walrider(*command)
        assert result.code == CORRUPT and segments[-4 - missing].name in result.stderr, result
    assert not (work / "new").exists()


def test_wal_of_another_cluster(primary, work):
    """A segment of another cluster ended recovery, as if there was no more WAL."""
    primary.psql("UPDATE t SET v = 'next'")
    primary.switch_wal()
    primary.stop()
    primary.complete_archive()
    last = max(path for path in (work / "wal").iterdir() if len(path.name) == 24)
    with PgCluster.init(work / "other", wal_segsize_mb=1) as other:
        shutil.copy(next((other.data_dir / "pg_wal").glob("0*")), last)
    result = walrider("restore", "--backup", work / "old", "--wal", work / "wal", "-D", work / "ours", "--promote")
    assert result.code == CORRUPT and "system" in result.stderr and last.name in result.stderr, result


@pytest.mark.every_major
def test_immediate_with_a_backup_of_a_standby(primary, work):
    """Its end is a position, and no record tells of it. Replay went on to the end of a batch, or of the WAL."""
    primary.basebackup(work / "standby", "-R")
    standby = PgCluster(work / "standby")
    standby.configure("archive_mode = off", "postgresql.auto.conf")
    with standby:
        standby.start()
        primary.psql("UPDATE t SET v = 'first'; CHECKPOINT")
        end = primary.lsn()
        standby.psql(f"DO $$ BEGIN WHILE pg_last_wal_replay_lsn() < '{end}' LOOP PERFORM pg_sleep(0.01); END LOOP; END $$")
        standby.psql("CHECKPOINT")
        standby.basebackup(work / "backup")
    for number in range(20):
        primary.psql(f"INSERT INTO t VALUES ({number}, 'later')")
    primary.stop()
    primary.complete_archive()
    stock = recovery.prepare(work / "backup", work / "wal", work / "stock", target=("immediate", "immediate"), action="promote")
    (work / "stock/standby.signal").unlink(missing_ok=True)
    stock.configure("archive_mode = off", "postgresql.auto.conf")
    with stock:
        stock.start()
        stock.psql("DO $$ BEGIN WHILE pg_is_in_recovery() LOOP PERFORM pg_sleep(0.01); END LOOP; END $$")
        rows = stock.value(ROWS)
    walrider("restore", "--backup", work / "backup", "--wal", work / "wal", "-D", work / "ours", "--target-immediate", "--promote").expect()
    ours = PgCluster(work / "ours")
    ours.configure("archive_mode = off", "postgresql.auto.conf")
    with ours:
        ours.start()
        assert ours.value(ROWS) == rows


def test_a_new_place_in_the_backup(primary, work):
    """It became part of what was read. And a backup is not written to an object store, though one is read from there."""
    primary.basebackup(work / "plain")
    arguments = ["--backup", work / "plain", "--wal", work / "wal"]
    for command in [("restore", *arguments, "-D", work / "plain/base/ours"), ("backup", "roll", *arguments, "--out", work / "plain/new")]:
        result = walrider(*command)
        assert result.code == FAILED and "is in the backup" in result.stderr, result
    assert not any((work / "plain" / name).exists() for name in ("base/ours", "new", "new.rolling"))
    result = walrider("backup", "roll", *arguments, "--out", "s3://bucket/new")
    assert result.code == USAGE and "object stores" in result.stderr, result


@pytest.mark.every_major
def test_wal_level_was_minimal_for_a_while(primary, work):
    """What was filled then is not in the WAL: replay went on, and a table was empty. PostgreSQL refuses to go on from there."""
    primary.psql("SELECT pg_create_restore_point('before')")
    primary.restart()
    for level, senders, archives in [("minimal", 0, "off"), ("replica", 10, "on")]:
        primary.configure(f"wal_level = {level}\nmax_wal_senders = {senders}\narchive_mode = {archives}\nwal_skip_threshold = 0")
        primary.restart()
        primary.psql(f"BEGIN; CREATE TABLE {level} AS SELECT g FROM generate_series(1, 10000) g; COMMIT")
    primary.stop()
    primary.complete_archive()
    arguments = ["restore", "--backup", work / "old", "--wal", work / "wal"]
    result = walrider(*arguments, "-D", work / "ours", "--promote")
    assert result.code == FAILED and "wal_level = minimal" in result.stderr, result
    walrider(*arguments, "-D", work / "before", "--target-name", "before", "--promote").expect()
    stock = recovery.prepare(primary_backup(work), work / "wal", work / "stock")
    with stock:
        # It may let somebody in before it comes to that.
        stock.launch()
        wait_for(lambda: stock.log_matches("wal_level=minimal|wal_level=.minimal"), "stock PostgreSQL to refuse")


def primary_backup(work):
    """The backup as PostgreSQL takes it."""
    return extract(work / "old/base.tar", work / "by_hand")


def test_a_link_is_lost(primary, work):
    """Pages with images came into a directory in its place, and the rest of the tablespace was zeros. PostgreSQL panics once it is consistent."""
    (work / "s").mkdir()
    primary.psql(f"CREATE TABLESPACE s LOCATION '{work}/s'")
    primary.psql("CREATE TABLE far TABLESPACE s AS SELECT g AS id, repeat('x', 900) AS v FROM generate_series(1, 100) g")
    primary.basebackup(work / "plain", f"--tablespace-mapping={work}/s={work}/t")
    primary.psql("UPDATE far SET v = 'new' WHERE id = 50")
    primary.stop()
    primary.complete_archive()
    (work / "plain/tablespace_map").unlink(missing_ok=True)
    for link in (work / "plain/pg_tblspc").iterdir():
        link.unlink()
    (work / "plain/recovery.signal").touch()
    result = walrider("replay", "-D", work / "plain", "--wal", work / "wal", "--promote")
    assert result.code == FAILED and "has no symbolic link" in result.stderr, result


def test_promoted_by_a_later_run(primary, work):
    """The target of the run before is done with, too."""
    primary.psql("UPDATE t SET v = 'first'")
    primary.psql("SELECT pg_create_restore_point('first')")
    primary.psql("UPDATE t SET v = 'second'")
    primary.stop()
    primary.complete_archive()
    walrider("restore", "--backup", work / "old", "--wal", work / "wal", "-D", work / "ours", "--target-name", "first").expect()
    assert "recovery_target_name" in (work / "ours/postgresql.auto.conf").read_text()
    walrider("replay", "-D", work / "ours", "--wal", work / "wal", "--promote").expect()
    assert "recovery_target" not in (work / "ours/postgresql.auto.conf").read_text()
    ours = PgCluster(work / "ours")
    ours.configure("archive_mode = off", "postgresql.auto.conf")
    with ours:
        ours.start()
        assert ours.value(ROWS) == "1000|first|first"
