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
from tests.lab.server.cluster import PgCluster
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
