"""Batches larger than memory: the same pages, each visited once; kills meanwhile; and what does not fit on the disk.

Not tried: terabytes; a disk that is lost while the temporary file is on it; power cuts (test_powercut.py has pages that pass through little
memory). `make soak-spill` does 200 rounds of kills.
"""

import os
import subprocess
from types import SimpleNamespace

import pytest

from tests.lab import walrider
from tests.lab.faults.shim import Disk
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, parse_lsn
from tests.lab.standby.standby import Walrider, clone, wait_position
from tests.lab.waiting import wait_for
from tests.lab.walrider import replay

ROUNDS = int(os.environ.get("WALRIDER_SPILL_ROUNDS", "4"))
# 80 MB of data, of which most pages are visited many times, far apart.
SETUP = """
CREATE TABLE t (id int PRIMARY KEY, n int, v text) WITH (fillfactor = 60);
INSERT INTO t SELECT g, 0, repeat('x', 600) FROM generate_series(1, 80000) g;
CREATE TABLE gone AS SELECT g FROM generate_series(1, 2000) g;
"""
STEPS = ["UPDATE t SET n = n + 1 WHERE hashint4(id + {n}) % 5 = 0",
         "INSERT INTO t SELECT g, 0, repeat('n', 300) FROM generate_series(100000 + 500 * {n}, 100400 + 500 * {n}) g",
         "DELETE FROM t WHERE hashint4(id) % 100 = {n}", "CREATE TABLE new_{n} AS SELECT g FROM generate_series(1, 3000) g"]
SETTINGS = "autovacuum = off\nmax_wal_size = 4GB\nfull_page_writes = off\n"
LITTLE = ("--memory", "16MB")


@pytest.fixture(scope="module")
def updated(scratch):
    """A backup of a table, and WAL that visits its pages again and again."""
    directory = scratch / "updated"
    directory.mkdir()
    with PgCluster.init(directory / "primary", directory / "archive", conf=SETTINGS) as server:
        server.start()
        server.psql(SETUP)
        backup = server.basebackup(directory / "backup")
        for number in range(15):
            for step in STEPS:
                server.psql(step.format(n=number))
        server.psql("DROP TABLE gone; VACUUM t")
        server.stop()
        server.complete_archive()
    final = server.controldata()["Latest checkpoint location"]
    recovery.discard(server.data_dir)
    recovery.stock_replay(backup, server.archive, directory / "stock", final)
    return SimpleNamespace(archive=server.archive, stock=directory / "stock", copy=lambda to: recovery.copy_backup(backup, to))


@pytest.mark.every_major
@pytest.mark.parametrize("memory", ["16MB", "1GB"])
def test_the_same_pages(variant, work, memory):
    """Of every load, with each batch as large as it can be."""
    ours = variant.copy(work / "ours")
    result = replay(ours, variant.archive, "--memory", memory, "--spill-always").expect()
    recovery.pin_tablespaces(ours)
    compare(ours, variant.stock)
    assert result.json["sweeps"] > 0 and (result.json["spilled_bytes"] > 0) == (memory == "16MB"), result.json


def test_worth_it(updated, work):
    """Where pages do not fit and are visited again and again, nobody needs to ask for it; where they fit, it is not done."""
    visits = {}
    for name, options, wanted in (("small", LITTLE, True), ("never", (*LITTLE, "--spill-size", "0"), False),
                                  ("large", ("--memory", "1GB"), False)):
        ours = updated.copy(work / name)
        result = replay(ours, updated.archive, *options).expect().json
        compare(ours, updated.stock)
        assert (result["sweeps"] > 0) == wanted, (name, result)
        assert not (ours / "base/pgsql_tmp").exists() or not os.listdir(ours / "base/pgsql_tmp")
        visits[name] = result["pages_read"]
    # So many more were read where it was forbidden.
    assert visits["never"] > 2 * visits["small"], visits


def test_little_room(updated, work):
    """What may be used of the disk ends a batch; the pages are the same."""
    ours = updated.copy(work / "ours")
    result = replay(ours, updated.archive, *LITTLE, "--spill-size", "8MB").expect().json
    compare(ours, updated.stock)
    assert result["sweeps"] > 1 and 0 < result["spilled_bytes"] <= 8 << 20, result


def test_no_room(updated, work):
    """A disk that has become full ends a batch as well."""
    room, ours = work / "room", updated.copy(work / "ours")
    room.mkdir()
    disk = Disk(work / "shim", room)
    disk.fill("all")
    result = replay(ours, updated.archive, *LITTLE, "--spill-dir", room, env=disk.environment()).expect().json
    compare(ours, updated.stock)
    assert result["sweeps"] > 1 and result["spilled_bytes"] == 0, result


def test_no_directory(updated, work):
    """It is told; without it all goes well."""
    ours = updated.copy(work / "ours")
    result = replay(ours, updated.archive, "--spill-dir", work / "missing")
    assert result.code == 1 and str(work / "missing") in result.stderr, result
    replay(ours, updated.archive).expect()
    compare(ours, updated.stock)


def test_killed(updated, work, rng):
    """At any moment, while WAL is put apart and while pages are written; then it is done again, with or without little memory."""
    whole = updated.copy(work / "whole")
    seconds = replay(whole, updated.archive, *LITTLE).expect().json["total_seconds"]
    recovery.discard(whole)
    killed = 0
    for number in range(ROUNDS):
        ours = updated.copy(work / f"round{number}")
        moment = rng.uniform(0.1, 1.1) * seconds
        process = walrider.start("replay", "--data-dir", ours, "--wal", updated.archive, *LITTLE, stdout=subprocess.DEVNULL)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            killed += 1
        finally:
            process.kill()
            process.communicate()
        replay(ours, updated.archive, *rng.choice([LITTLE, (*LITTLE, "--spill-size", "0"), ()])).expect()
        compare(ours, updated.stock)
        recovery.discard(ours)
    print(f"{ROUNDS} rounds, {killed} kills at work, a whole run takes {seconds:.2f} s")
    assert killed >= ROUNDS // 2


@pytest.fixture
def behind(primary, work):
    """A standby with little memory, and a primary that has done much since it was last there."""
    for setting in ("wal_keep_size = '1GB'", "max_wal_size = '4GB'", "full_page_writes = off", "autovacuum = off",
                    "synchronous_commit = local"):
        primary.psql(f"ALTER SYSTEM SET {setting}")
    primary.psql("SELECT pg_reload_conf()")
    primary.psql(SETUP)
    standby = Walrider(clone(primary, work / "ours"), *LITTLE)
    for number in range(8):
        for step in STEPS:
            primary.psql(step.format(n=number))
    return standby


def test_a_standby_far_behind(primary, behind):
    """It catches up by batches larger than memory, and replays what comes then one by one; its pages are the primary's."""
    with behind.start():
        wait_position(primary)
        swept = behind.status()["replay"]["sweeps"]
        assert swept > 0, behind.status()
        for _ in range(3):
            primary.psql("UPDATE t SET n = n + 1 WHERE id % 1000 = 0")
            wait_position(primary)
        assert behind.status()["replay"]["sweeps"] == swept, behind.status()
        primary.psql("VACUUM; CHECKPOINT")
        primary.stop()
        final = primary.controldata()["Latest checkpoint location"]
        wait_for(lambda: parse_lsn(behind.status()["positions"]["replayed"]["lsn"]) > parse_lsn(final), behind.status)
        behind.stop()
    found = walrider.walrider("compare", behind.data_dir, primary.data_dir).json
    # A primary's control file is another.
    assert found["differences"] == found["classes"]["control"] and found["pages"] > 10000, found


@pytest.mark.parametrize("how", ["stopped", "promoted"])
def test_a_standby_in_a_batch(primary, behind, how):
    """Told to stop or to end recovery while it puts WAL apart, it does what it has first; nothing is lost."""
    behind.data_dir.joinpath("walrider.pause").touch()
    with behind.start():
        wait_position(primary, stage="flush")
        assert behind.status()["replay"]["records"] == 0, behind.status()
        expected = primary.psql("SELECT count(*), sum(n) FROM t")
        behind.resume()
        if how == "stopped":
            behind.stop()
            behind.start()
            wait_position(primary)
        primary.kill()
        behind.promote()
        with behind.serve() as server:
            assert server.psql("SELECT count(*), sum(n) FROM t") == expected
