"""Kills of `walrider restore` at any moment of its single pass, and disks that become full in it; then what docs/restore.md tells the
operator to do, until it is done.

What must never be: a directory that PostgreSQL starts on, and that is not what its own recovery makes of the backup and the WAL.
Not tried: power cuts (test_powercut.py and test_powercut_restore.py have them); kills of PostgreSQL, when it ends the recovery. `make soak-restore` does 200 rounds.
"""

import os
import re
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.lab import walrider
from tests.lab.faults.shim import Disk
from tests.lab.server import recovery
from tests.lab.server.backups import FORMATS, MARKER
from tests.lab.server.restored import LITTLE, Restore, make_backups
from tests.lab.trash import throw_away
from tests.lab.walrider import FAILED

ROUNDS = int(os.environ.get("WALRIDER_RESTORE_ROUNDS", "2"))
# So much that relations come early, and the rest of the WAL is replayed in memory, on a disk that takes some 700 MB/s or more: on another one
# the pass ends as with little memory. Where they came is printed.
AMPLE = ("--memory", "512MB")
SETUP = """
CREATE TABLE t (id int PRIMARY KEY, n int, v text) WITH (fillfactor = 60);
INSERT INTO t SELECT g, 0, repeat('x', 600) FROM generate_series(1, 15000) g;
CREATE TABLE b TABLESPACE s AS SELECT g AS id, 0 AS n FROM generate_series(1, 60000) g;
CREATE TABLE gone TABLESPACE s AS SELECT g FROM generate_series(1, 2000) g;
CREATE TABLE short AS SELECT g, repeat('s', 200) AS v FROM generate_series(1, 5000) g;
CREATE TABLE wide TABLESPACE s AS SELECT g AS id, repeat('w', 700) AS v FROM generate_series(1, 4600) g;
CREATE TABLE queue AS SELECT g AS id, repeat('q', 200) AS v FROM generate_series(1, 4000) g;
VACUUM wide; VACUUM queue;
"""
STEP = """
UPDATE t SET n = n + 1 WHERE hashint4(id + {n}) % 3 = 0;
UPDATE b SET n = n + 1 WHERE hashint4(id + {n}) % 3 = 0;
INSERT INTO t SELECT g, 0, repeat('n', 300) FROM generate_series(100000 + 500 * {n}, 100400 + 500 * {n}) g;
DELETE FROM t WHERE hashint4(id) % 100 = {n};
CREATE TABLE new_{n} TABLESPACE s AS SELECT g FROM generate_series(1, 3000) g;
DELETE FROM wide WHERE id > 4200 + 20 * {n}; VACUUM wide; UPDATE wide SET v = 'after {n}' WHERE id % 70 = {n};
INSERT INTO wide SELECT g, repeat('n', 700) FROM generate_series(4201 + 20 * {n}, 4500) g;
DELETE FROM queue; VACUUM queue; INSERT INTO queue SELECT g, repeat('r', 200) FROM generate_series(1, 1000 + 100 * {n}) g;
"""
STEPS = 8
# Of them, so many come in the single pass, with truncations of two tables each; what follows ends it: a table of which nothing is known
# becomes shorter.
PASS_STEPS = 6
END_OF_PASS = "DELETE FROM short WHERE g > 100; VACUUM (TRUNCATE) short"
TABLES = ("t", "b", "short", "wide", "queue", f"new_{STEPS - 1}")
# The calls of `calls` that are no fsync of one of a thousand files.
STEPS_OF_ITS_OWN = re.compile(f"{MARKER}|pg_control|postgresql.auto.conf|backup_label|PG_VERSION|pg_wal|pg_tblspc|pg_xact|(ours|space)$")


@pytest.fixture(scope="module")
def backups(scratch):
    """A backup in each format, WAL larger than memory, and what stock PostgreSQL made of both."""
    # With images: without, PostgreSQL 18.6 does not survive a kill of its own recovery behind the truncation of a visibility map. Records
    # name the map's page since then, which it misses when it comes to them again ("WAL contains references to invalid pages").
    conf = "autovacuum = off\nmax_wal_size = 4GB\n"
    steps = [STEP.format(n=number) for number in range(STEPS)]
    steps[PASS_STEPS - 1] += f"DROP TABLE gone; {END_OF_PASS}"
    return make_backups(scratch / "k", conf, SETUP, steps, TABLES, FORMATS[:ROUNDS])


def measured(restore):
    """How long a whole one takes, and which calls of it are worth a kill."""
    disk = Disk(restore.work / "shim", restore.work)
    begun = time.monotonic()
    result = walrider.walrider(*restore.command, env=disk.kill_at(0)).expect()
    seconds = time.monotonic() - begun
    if restore.memory == AMPLE:
        assert restore.form == "gzip" or (result.json["write_bytes_per_second"] > 0 and result.json["unpacked_at_lsn"]), result.json
        assert restore.form == "gzip" or result.json["pages_read"] > 0, result.json
    else:
        assert restore.form == "gzip" or (1 < result.json["sweeps"] < STEPS and result.json["spilled_bytes"] > 0), result.json
    paths = disk.calls()
    recovery.discard(restore.ours, restore.space)
    calls = [number for number, path in enumerate(paths, 1) if STEPS_OF_ITS_OWN.search(path)]
    return SimpleNamespace(seconds=seconds, paths=paths, calls=calls, disk=disk, came=result.json["unpacked_at_lsn"])


def one_round(restore, whole, rng):
    """Kills, and what comes after; returns what was killed when, and what ended it."""
    command, kills = restore.command, []
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.5:
            killed, phase = restore.killed_after(command, rng.uniform(0.01, 1.05) * whole.seconds)
        else:
            code = walrider.walrider(*command, env=whole.disk.kill_at(rng.choice(whole.calls))).code
            killed, phase = code == -signal.SIGKILL, restore.phase()
        if not killed:
            break
        kills.append(phase)
        # Another kill meets the command that is due now.
        if restore.is_whole():
            command = restore.replay
        elif (restore.ours / MARKER).exists():
            command = (*restore.command, "--start-over")
    ends = ["walrider", *(["PostgreSQL"] if restore.is_whole() else [])]
    if restore.is_whole() and (restore.ours / "recovery.signal").exists():
        # Replay has begun, so that the directory knows where WAL is.
        ends.append("PostgreSQL as it stands")
    end = rng.choice(ends)
    if end == "PostgreSQL":
        restore.reaches_the_end()
    elif end == "walrider":
        command = restore.command
        while command:
            assert len(restore.said) < 4, restore.said
            end, command = command[0], restore.next_command(command)
        assert not (restore.ours / MARKER).exists() and not (restore.space / MARKER).exists()
    if end != "PostgreSQL as it stands":
        restore.compare()
    if end != "PostgreSQL":
        restore.opens()
    return kills, end


def test_start_over(backups, work):
    """The control file is the first to go: a stop meanwhile has left a directory without the line that keeps servers out, but
    with a control file. And when the tablespace, but not the data directory, has lost its marker, it is the operator who empties it."""
    # Relations do not come sooner in one run than in another.
    restore = Restore(backups, "tar", work / "restore", (*LITTLE, "--spill-always"))
    whole = measured(restore)
    unmarked = len(whole.paths) - whole.paths[::-1].index(str(restore.space / MARKER))
    assert walrider.walrider(*restore.command, env=whole.disk.kill_at(unmarked)).code == -signal.SIGKILL
    assert restore.phase() == "relations pass"
    walrider.walrider(*restore.command, "--start-over", env=whole.disk.kill_at(0)).expect()
    assert whole.disk.calls()[0] == str(restore.ours / "global/pg_control")
    restore.compare()
    recovery.discard(restore.ours, restore.space)
    assert walrider.walrider(*restore.command, env=whole.disk.kill_at(unmarked + 1)).code == -signal.SIGKILL
    assert restore.phase() == "between two markers" and not restore.is_whole()
    again = walrider.walrider(*restore.command, "--start-over").expect(FAILED)
    assert str(restore.space) in again.stderr and "by hand" in again.stderr and any(restore.space.iterdir())
    throw_away(restore.space)
    walrider.walrider(*restore.command, "--start-over").expect()
    restore.compare()


def test_no_room_for_relations(backups, work):
    """It says what to do; no server starts on what is there; when there is room, the same command does it."""
    restore = Restore(backups, "tar", work / "restore")
    # A catalogue's, which comes when WAL has been put apart.
    disk = Disk(work / "shim", "/base/5/1249")
    disk.fill("all")
    result = walrider.walrider(*restore.command, env=disk.environment()).expect(FAILED)
    for said in ("/base/5/1249", "No space left on device", "free some space", f'"{restore.ours}" is not complete: --start-over'):
        assert said in result.stderr, result.stderr
    assert restore.phase() == "relations pass" and not restore.is_whole()
    disk.clear()
    assert "--start-over" in walrider.walrider(*restore.command, env=disk.environment()).expect(FAILED).stderr
    walrider.walrider(*restore.command, "--start-over", env=disk.environment()).expect()
    restore.compare()


@pytest.mark.parametrize("memory", (LITTLE, AMPLE), ids=lambda memory: memory[1])
def test_no_room_for_wal(backups, work, memory):
    """What did not fit into the temporary file is replayed when relations are there. Where that file only asks how quick the device is,
    pages are written once."""
    restore = Restore(backups, "tar", work / "restore", memory)
    disk = Disk(work / "shim", "/base/pgsql_tmp/")
    disk.fill("all")
    result = walrider.walrider(*restore.command, env=disk.environment()).expect().json
    assert result["spilled_bytes"] == 0 and (result["write_bytes_per_second"] == 1 if memory == AMPLE else result["sweeps"] > 2), result
    restore.compare()


def test_killed(backups, work, rng):
    """At any moment, once or several times. PostgreSQL is kept out until all is there; what comes of it is what it makes itself."""
    whole, phases, ends = {}, Counter(), Counter()
    for number in range(ROUNDS):
        form, memory = how = FORMATS[number % len(FORMATS)], (LITTLE, AMPLE)[number % 2]
        if how not in whole:
            whole[how] = measured(Restore(backups, form, work / f"whole{number}", memory))
        restore = Restore(backups, form, work / f"round{number}", memory)
        try:
            kills, end = one_round(restore, whole[how], rng)
        except BaseException as error:
            error.add_note(f"round {number}, {how}")
            raise
        phases.update(kills)
        ends[end] += 1
        throw_away(restore.work)
    print(f"\n{ROUNDS} rounds, {phases.total()} kills at work; a whole run takes "
          + ", ".join(f"{one.seconds:.2f} s ({form}, {memory[1]}, relations at {one.came})" for (form, memory), one in whole.items()))
    print("killed while it", *(f"{count:5} {phase}" for phase, count in phases.most_common()), sep="\n")
    print("ended by", *(f"{count:5} {end}" for end, count in ends.most_common()), sep="\n")
    assert phases.total() >= ROUNDS // 2
