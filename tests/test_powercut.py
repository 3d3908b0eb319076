"""The power goes at any moment of a run: both the same command and stock PostgreSQL come to the same end from what is left.

A real run is recorded call by call, and images of what a disk may hold are made of it: tests/harness/powercut.py says by which
model.  Each image is continued twice, and each result compared with the reference, page by page.  A record depends on how the
threads ran; all else on the seed.  WALRIDER_POWER_KEEP names a directory that keeps the record and the image of a failure.
"""

import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.harness import recovery
from tests.harness.cluster import PgCluster, controldata, copy_tree, run
from tests.harness.install import program
from tests.harness.powercut import Recorder
from tests.harness.walrider import binary, compare, replay, walrider

IMAGES = int(os.environ.get("WALRIDER_POWER_IMAGES", "50"))
SEED = os.environ.get("WALRIDER_SEED", "1")
KEEP = os.environ.get("WALRIDER_POWER_KEEP")
# Of all images, what each kind of run has.
SHARES = dict(replay=12, restartpoints=12, promotion=12, spool=7, early=7)
ROOM = 1 << 30
CONF = """
shared_buffers = 16MB
max_wal_size = 256MB
checkpoint_timeout = 1h
wal_keep_size = 256MB
autovacuum = off
"""
# Recoveries of a small directory: no more memory, no more processes than it takes.
STOCK = dict(shared_buffers="16MB", max_connections="60", restart_after_crash="off")
SETUP = """
CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, filler text);
INSERT INTO accounts SELECT n, 0, repeat('f', 80) FROM generate_series(1, 4000) n;
CREATE TABLE history (id int, delta int, note text);
CREATE TABLE cut_off AS SELECT generate_series(1, 5000) AS id;
CREATE TABLE dropped (id int PRIMARY KEY, note text);
INSERT INTO dropped SELECT n, repeat('d', 100) FROM generate_series(1, 1000) n;
CREATE SEQUENCE counter;
"""
TRANSACTION = """
\\set id random(1, 4000)
\\set delta random(-500, 500)
BEGIN;
UPDATE accounts SET balance = balance + :delta WHERE id = :id;
INSERT INTO history VALUES (:id, :delta, repeat('h', 60));
END;
"""


def images(kind):
    """How many of this kind."""
    return max(1, IMAGES * SHARES[kind] // sum(SHARES.values()))


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A directory in memory, where there is room for it: what a disk would do with what is not synced is played here."""
    shared = Path("/dev/shm")
    in_memory = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > ROOM
    directory = Path(tempfile.mkdtemp(prefix="walrider-", dir=shared)) if in_memory else tmp_path_factory.mktemp("power")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Origin:
    """A primary's backup and its WAL since, with something of everything that is more than a page."""

    def __init__(self, directory):
        self.directory, self.archive = directory, directory / "archive"
        self.server = PgCluster.init(directory / "primary", self.archive, wal_segsize_mb=1, conf=CONF)
        with self.server as server:
            server.start()
            server.psql(SETUP)
            self.backup = server.basebackup(directory / "backup")
            (directory / "transaction").write_text(TRANSACTION)
            self.load(server)
            self.expected = self.contents(server)
            server.stop()
        self.server.complete_archive()
        self.final = controldata(self.server.data_dir)["Latest checkpoint location"]
        self.stock = directory / "stock"
        recovery.stock_replay(self.backup, self.archive, self.stock, self.final, **STOCK)

    def transactions(self, server, count, database="postgres"):
        """As pgbench does them."""
        server.pgbench("-n", "-f", self.directory / "transaction", "-t", count, "--random-seed", count, database=database)

    def load(self, server):
        """Restartpoints may be made at three checkpoints, two of them because a database was copied as files."""
        self.transactions(server, 400)
        server.psql("CREATE TABLE made (id int PRIMARY KEY); INSERT INTO made SELECT generate_series(1, 2000)")
        server.psql("TRUNCATE cut_off; INSERT INTO cut_off VALUES (1); DROP TABLE dropped")
        server.psql("BEGIN; INSERT INTO made VALUES (-1); PREPARE TRANSACTION 'early'")
        server.psql("BEGIN; INSERT INTO made VALUES (-2); PREPARE TRANSACTION 'ends'")
        server.psql("CREATE DATABASE copied STRATEGY file_copy")
        self.transactions(server, 200, "postgres")
        server.psql("CREATE TABLE there AS SELECT generate_series(1, 3000) AS id", "copied")
        server.psql("CREATE DATABASE gone STRATEGY file_copy")
        server.psql("COMMIT PREPARED 'ends'; DELETE FROM accounts WHERE id % 7 = 0; VACUUM accounts")
        server.psql("CHECKPOINT")
        self.transactions(server, 300)
        server.psql("DROP DATABASE gone; SELECT nextval('counter') FROM generate_series(1, 40)")
        server.psql("BEGIN; INSERT INTO made VALUES (-3); CREATE TABLE late (id int); PREPARE TRANSACTION 'late'")
        server.psql("CREATE TABLE newest (id int); DROP TABLE newest; TRUNCATE history")
        self.transactions(server, 100)

    def contents(self, server):
        """What a client sees."""
        return [server.psql(query) for query in (
            "SELECT id, balance FROM accounts ORDER BY id", "SELECT id, delta FROM history ORDER BY 1, 2",
            "SELECT gid FROM pg_prepared_xacts ORDER BY 1", "SELECT id FROM made ORDER BY 1", "SELECT datname FROM pg_database ORDER BY 1")]

    def copy(self, data_dir):
        """A copy of the backup, with the settings of a recovery that PostgreSQL needs as well."""
        copy_tree(self.backup, data_dir)
        data_dir.chmod(0o700)
        PgCluster(data_dir).configure("archive_mode = off", "postgresql.auto.conf")
        return data_dir


@pytest.fixture(scope="module")
def origin(memory):
    """One primary for all tests here."""
    (memory / "origin").mkdir()
    return Origin(memory / "origin")


def stock_finishes(origin, data_dir):
    """What a user does who gives up on us: start PostgreSQL on the directory."""
    if controldata(data_dir)["Latest checkpoint location"] == origin.final:
        return      # nothing is left to replay, so no target to reach
    (data_dir / "recovery.signal").touch()
    server = PgCluster(data_dir)
    server.configure(recovery.restore_settings(origin.archive, target=("lsn", origin.final), action="shutdown"), "postgresql.auto.conf")
    with server:
        recovery.finish_stock(server, origin.final, timeout=60, **STOCK)


class Images:
    """The images of one record, and what becomes of each."""

    def __init__(self, kind, record, memory):
        self.kind, self.record, self.memory = kind, record, memory
        print(f"{kind}: a record of {len(record.calls)} calls: {record.counts()}")

    def __iter__(self):
        """Pairs of a cut, and what makes a copy of the image."""
        for number in range(images(self.kind)):
            cut = self.record.choose(f"{SEED}/{self.kind}/{number}")
            try:
                yield cut, lambda name: self.record.image(cut, self.memory / name)
            finally:
                pass

    def check(self, continue_with):
        """Each image is continued in each way; `continue_with` is their names and what does it to a directory."""
        failed = []
        begun = time.monotonic()
        for number in range(images(self.kind)):
            cut = self.record.choose(f"{SEED}/{self.kind}/{number}")
            for name, proceed in continue_with.items():
                directory = self.record.image(cut, self.memory / f"{self.kind}-{name}")
                try:
                    proceed(directory, cut)
                except Exception as error:
                    failed.append(f"{cut}, continued by {name}: {error}")
                    print(failed[-1], flush=True)
                    self.keep(cut, f"{number}-{name}")
                recovery.discard(directory)
        print(f"{images(self.kind)} images, {time.monotonic() - begun:.1f} s")
        assert not failed, f"{len(failed)} of {images(self.kind)} images: " + "\n".join(failed)

    def keep(self, cut, name):
        """The record of a failure, and its image."""
        if KEEP:
            target = Path(KEEP) / f"{self.kind}-{name}"
            target.mkdir(parents=True)
            self.record.image(cut, target / "image")
            (target / "calls").write_text("\n".join(map(str, self.record.calls[:cut.step + 20])))


def record_replay(origin, memory, name, *options):
    """A replay that nobody disturbs."""
    recorder = Recorder(memory / f"{name}-recorder")
    data_dir = origin.copy(memory / name)
    run(recorder.command(data_dir, binary(), "replay", "-D", data_dir, "--wal", origin.archive, *options))
    return recorder.record(), data_dir


def test_replay(origin, memory):
    """`walrider replay`, with pages written to make room and restartpoints behind copied databases."""
    record, reference = record_replay(origin, memory, "replay")
    compare(reference, origin.stock)

    def ours(data_dir, cut):
        replay(data_dir, origin.archive).expect()
        compare(data_dir, origin.stock)

    def stock(data_dir, cut):
        stock_finishes(origin, data_dir)
        compare(data_dir, origin.stock)

    Images("replay", record, memory).check(dict(walrider=ours, stock=stock))
