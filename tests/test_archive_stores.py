"""An archive in an object store of somebody else's making: moto's S3.  `test_archive.py` has faults, by a store of our own.

Not tried: Google Cloud Storage, Azure, TLS.
"""

import os
import subprocess
import sys
import urllib.request

import pytest

from tests.lab.server import tools
from tests.lab.server.cluster import PgCluster, free_port
from tests.lab.waiting import wait_for
from tests.lab.walrider import FAILED, binary, walrider

ROWS = 30_000


@pytest.fixture
def s3(work):
    """The environment for a store that has a bucket."""
    port = free_port()
    server = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with open(work / "moto.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-c", server], stdout=log, stderr=log,
                                   env=dict(os.environ, PYTHONPATH=str(tools.directory("moto") / "python")))

    def made():
        assert process.poll() is None, (work / "moto.log").read_text()
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
            return urllib.request.urlopen(request, timeout=30).status == 200
        except OSError:
            return False
    try:
        wait_for(made, lambda: (work / "moto.log").read_text())
        yield dict(AWS_ENDPOINT=f"http://127.0.0.1:{port}", AWS_ALLOW_HTTP="true", AWS_ACCESS_KEY_ID="key",
                   AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")
    finally:
        process.kill()
        process.wait()


def test_s3(work, s3):
    """A primary archives, once and for good; a backup is replayed from there and promoted; old segments expire."""
    place = "s3://bucket/main"
    server = PgCluster.init(work / "primary", wal_segsize_mb=1, conf="archive_mode = on\nautovacuum = off\nwal_keep_size = 64MB\n"
                            f"archive_command = '{binary()} wal put --archive {place} %p'\n")
    server.own_environment = s3
    with server:
        server.start()
        server.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        server.basebackup(work / "backup")
        server.psql(f"INSERT INTO t SELECT n, md5(n::text) FROM generate_series(1, {ROWS}) n")
        segment = server.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
        server.stop()
        assert "archive command failed" not in server.log.read_text()
    again = walrider("wal", "put", "--archive", place, server.data_dir / "pg_wal" / segment, env=s3)
    assert "was archived before" in again.expect().stderr
    with open(server.data_dir / "pg_wal" / segment, "r+b") as file:
        file.seek(500_000)
        file.write(b"another history")
    other = walrider("wal", "put", "--archive", place, server.data_dir / "pg_wal" / segment, env=s3)
    assert "with other contents" in other.expect(FAILED).stderr
    copy = PgCluster(work / "backup")
    copy.own_environment = s3
    copy.configure("archive_mode = off\n", "postgresql.auto.conf")
    assert walrider("replay", "-D", copy.data_dir, "--wal", place, "--promote", env=s3).expect().json["segments_fetched"] > 2
    with copy:
        copy.start()
        assert copy.psql("SELECT count(*), max(id) FROM t") == [[str(ROWS), str(ROWS)]]
    assert "0 removed" not in walrider("wal", "expire", "--archive", place, "--before", segment, env=s3).expect().stdout
    assert "0 removed" in walrider("wal", "expire", "--archive", place, "--before", segment, env=s3).expect().stdout


def put(s3, key, contents):
    """An object, by somebody else's upload."""
    request = urllib.request.Request(f"{s3['AWS_ENDPOINT']}/bucket/{key}", data=contents, method="PUT",
                                     headers={"Content-Type": "application/octet-stream"})
    assert urllib.request.urlopen(request, timeout=60).status == 200


def test_base_backup(work, s3):
    """A backup, and the WAL after it, both in the store: restored in parts, and rolled forward; nothing else is needed."""
    (work / "space").mkdir()
    server = PgCluster.init(work / "primary", wal_segsize_mb=1, conf="archive_mode = on\nautovacuum = off\n"
                            f"archive_command = '{binary()} wal put --archive s3://bucket/main %p'\n")
    server.own_environment = s3
    with server:
        server.start()
        server.psql(f"CREATE TABLESPACE s LOCATION '{work}/space'")
        server.psql("CREATE TABLE t TABLESPACE s AS SELECT n AS id, md5(n::text) AS v FROM generate_series(1, 1000) n")
        server.basebackup(work / "backup", "-Ft")
        server.psql(f"INSERT INTO t SELECT n, md5(n::text) FROM generate_series(1001, {ROWS}) n")
        server.stop()
    for file in (work / "backup").iterdir():
        put(s3, f"base/sunday/{file.name}", file.read_bytes())
    ours = PgCluster(work / "ours")
    ours.own_environment = s3
    arguments = ("--backup", "s3://bucket/base/sunday/", "--wal", "s3://bucket/main")
    result = walrider("restore", *arguments, "-D", ours.data_dir, "--tablespace-mapping", f"{work}/space={work}/ours.space", "--promote", env=s3)
    assert result.expect().json["backup"]["verified"] and result.json["segments_fetched"] > 2
    ours.configure("archive_mode = off\n", "postgresql.auto.conf")
    with ours:
        ours.start()
        assert ours.psql("SELECT count(*), max(id) FROM t") == [[str(ROWS), str(ROWS)]]
    walrider("backup", "roll", *arguments, "--out", work / "monday", "--format", "tar", env=s3).expect()
    assert {"base.tar", "backup_manifest"} < {file.name for file in (work / "monday").iterdir()}
