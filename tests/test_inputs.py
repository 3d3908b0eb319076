"""The shapes in which WAL and backups come: partial segments, growing archives, tar backups, large relations."""

import shutil
import tarfile
import time
from pathlib import Path

from tests.lab.faults.archive import archive_of_links
from tests.lab.install import program
from tests.lab.loads import load
from tests.lab.oracle import records
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, run
from tests.lab.walrider import replay, start, walrider


def test_partial_segment(plain, work):
    """The last segment as pg_receivewal leaves it."""
    last = plain.segments()[-1]
    archive = archive_of_links(plain, work / "archive", skip=[last.name])
    (archive / f"{last.name}.partial").symlink_to(last)
    ours = plain.copy(work / "ours")
    result = replay(ours, archive).expect()
    assert result.json["checkpoint_lsn"] == plain.info["final_checkpoint"]
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_follow_a_growing_archive(plain, work):
    """--follow waits for segments, and ends at its target."""
    archive = work / "archive"
    archive.mkdir()
    for history in plain.archive.glob("*.history"):
        (archive / history.name).symlink_to(history)
    segments = plain.segments()
    for segment in segments[:3]:
        (archive / segment.name).symlink_to(segment)
    ours = plain.copy(work / "ours", action="shutdown")
    process = start("replay", "--data-dir", ours, "--wal", archive, "--follow",
                    "--target-lsn", plain.info["final_checkpoint"])
    try:
        for segment in segments[3:]:
            scratch = archive / "incoming"
            scratch.symlink_to(segment)
            scratch.rename(archive / segment.name)
            time.sleep(0.15)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.wait()
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_tar_backup_with_tablespace_map(small_primary, work):
    """Unpacked by hand: the links are in tablespace_map, and pg_tblspc is empty."""
    server = small_primary.start()
    (work / "space").mkdir()
    server.psql(f"CREATE TABLESPACE space LOCATION '{work / 'space'}'")
    server.psql("CREATE TABLE t (id int PRIMARY KEY, v text) TABLESPACE space; "
                "INSERT INTO t SELECT g, 'before' FROM generate_series(1, 5000) g")
    server.basebackup(work / "tars", "-F", "t")
    server.psql("UPDATE t SET v = 'after' WHERE id % 2 = 0; CHECKPOINT; DELETE FROM t WHERE id % 5 = 0")
    expected = load.contents(server)
    server.stop()
    server.complete_archive()
    final = server.controldata()["Latest checkpoint location"]
    unpacked = {}
    for name in ("ours", "stock"):
        data_dir = work / name
        data_dir.mkdir(mode=0o700)
        for tar in (work / "tars").glob("*.tar"):
            target = data_dir if tar.stem == "base" else Path(f"{data_dir}.tablespaces") / tar.stem
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(tar) as archive:
                archive.extractall(target)
        table = (data_dir / "tablespace_map").read_text()
        oid = table.split()[0]
        (data_dir / "tablespace_map").write_text(f"{oid} {data_dir}.tablespaces/{oid}\n")
        for link in (data_dir / "pg_tblspc").iterdir():
            link.unlink()
        unpacked[name] = data_dir
    reference = PgCluster(unpacked["stock"])
    reference.configure("archive_mode = off\n" + recovery.restore_settings(
        server.archive, target=("lsn", final), action="shutdown"), "postgresql.auto.conf")
    (unpacked["stock"] / "recovery.signal").touch()
    with reference:
        recovery.finish_stock(reference, final)
    replay(unpacked["ours"], server.archive).expect()
    assert (unpacked["ours"] / "tablespace_map.old").exists()
    compare(unpacked["ours"], unpacked["stock"])
    taker = PgCluster(unpacked["ours"])
    taker.configure("archive_mode = off", "postgresql.auto.conf")
    with taker:
        recovery.recover_and_promote(taker)
        assert load.contents(taker) == expected


def test_backup_that_carries_its_wal(small_primary, work):
    """pg_basebackup -X fetch: without an archive, pg_wal is the source."""
    server = small_primary.start()
    server.psql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 1000)")
    server.basebackup(work / "ours", wal="fetch")
    result = replay(work / "ours", work / "ours" / "pg_wal").expect()
    assert result.json["end_reason"] == "end_of_wal"
    taker = PgCluster(work / "ours")
    taker.configure("archive_mode = off", "postgresql.auto.conf")
    with taker:
        recovery.recover_and_promote(taker)
        assert taker.value("SELECT count(*) FROM t") == "1000"


def test_crashed_primary(small_primary, work):
    """A primary that crashed: no option, no signal file, its own pg_wal, as crash recovery would."""
    server = small_primary.start()
    server.psql("CREATE TABLE t (id int PRIMARY KEY, v text); CHECKPOINT; "
                "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 20000) g")
    expected = load.contents(server)
    server.kill()
    shutil.copytree(server.data_dir, work / "ours", symlinks=True)
    walrider("replay", "--data-dir", work / "ours").expect()
    taker = PgCluster(work / "ours")
    taker.configure("archive_mode = off", "postgresql.auto.conf")
    with taker:
        taker.start()
        assert load.contents(taker) == expected


def test_minimal_wal(work):
    """A crashed primary with wal_level = minimal: new relations are not logged, but synced by their commit.

    Every other record type that PostgreSQL writes is in the mixed load; ASSIGN_LSN is made only here, where a GiST
    index that is not logged needs positions of its own.
    """
    server = PgCluster.init(work / "primary", conf="wal_level = minimal\nmax_wal_senders = 0\nautovacuum = off\n"
                            "wal_skip_threshold = 0\nwal_consistency_checking = all\n")
    with server:
        server.start()
        server.psql("CREATE TABLE kept (id int PRIMARY KEY, at point); CREATE INDEX kept_at ON kept USING gist (at); "
                    "CREATE TABLE emptied (id int); INSERT INTO emptied SELECT generate_series(1, 1000); CHECKPOINT")
        begin = server.lsn()
        server.psql("""
            INSERT INTO kept SELECT g, point(g % 10, g / 10) FROM generate_series(1, 5000) g;
            BEGIN; CREATE TABLE fresh (id int PRIMARY KEY, at point); CREATE INDEX fresh_at ON fresh USING gist (at);
            INSERT INTO fresh SELECT g, point(g % 10, g / 10) FROM generate_series(1, 5000) g; COMMIT;
            UPDATE fresh SET at = point(0, 0) WHERE id % 3 = 0;
            BEGIN; TRUNCATE emptied; INSERT INTO emptied SELECT generate_series(1, 500); COMMIT;
            INSERT INTO emptied VALUES (501);
        """)
        expected = load.contents(server)
        server.kill()
    assert ("Gist", "ASSIGN_LSN") in records.types_between(server.data_dir / "pg_wal", begin)
    ours = work / "ours"
    shutil.copytree(server.data_dir, ours, symlinks=True)
    walrider("replay", "--data-dir", ours, "--verify-images").expect()
    with server:
        server.start()
        server.stop()
    # Stock has made a checkpoint at the end, which crash recovery leaves to whoever takes the directory over from us.
    result = walrider("compare", ours, server.data_dir).json
    assert {first["class"] for first in result["first"]} == {"control", "slru"}, result
    assert len(result["first"]) == result["differences"] and result["pages"] > 0
    with PgCluster(ours) as taker:
        taker.start()
        assert load.contents(taker) == expected


def test_relation_over_one_gigabyte(small_primary, work):
    """Two segment files: grown, changed across the boundary, truncated below it, and grown again.

    At fillfactor 10 one short row fills a page, so a gigabyte of relation costs little WAL.
    """
    server = small_primary
    server.configure("max_wal_size = 8GB\nautovacuum = off")
    server.start()
    server.psql("CREATE TABLE big (id int, t text) WITH (fillfactor = 10); ALTER TABLE big ALTER t SET STORAGE PLAIN; "
                "CREATE INDEX big_id ON big (id)")
    server.basebackup(work / "backup")
    server.psql("INSERT INTO big SELECT g, repeat('x', 700) FROM generate_series(1, 134000) g")
    assert int(server.value("SELECT pg_relation_size('big')")) > 1 << 30
    server.psql("UPDATE big SET t = 'y' WHERE id BETWEEN 131000 AND 131200; CHECKPOINT; "
                "UPDATE big SET t = 'z' WHERE id % 1000 = 0; DELETE FROM big WHERE id > 130000; VACUUM big")
    assert int(server.value("SELECT pg_relation_size('big')")) < 1 << 30
    server.psql("INSERT INTO big SELECT g, repeat('w', 700) FROM generate_series(200001, 202500) g")
    expected = server.psql("SELECT count(*), sum(id), md5(string_agg(md5(t), '' ORDER BY id)) FROM big")
    node = server.value("SELECT pg_relation_filepath('big')")
    server.stop()
    server.complete_archive()
    final = server.controldata()["Latest checkpoint location"]
    shutil.rmtree(server.data_dir)
    recovery.stock_replay(work / "backup", server.archive, work / "stock", final)
    ours = recovery.copy_backup(work / "backup", work / "ours")
    replay(ours, server.archive, "--memory", "128MB").expect()
    assert (ours / f"{node}.1").stat().st_size == (work / "stock" / f"{node}.1").stat().st_size > 0
    compare(ours, work / "stock")
    run([program("pg_checksums"), "--check", "-D", ours])
    taker = PgCluster(ours)
    taker.configure("archive_mode = off", "postgresql.auto.conf")
    with taker:
        recovery.recover_and_promote(taker)
        assert taker.psql("SELECT count(*), sum(id), md5(string_agg(md5(t), '' ORDER BY id)) FROM big") == expected
