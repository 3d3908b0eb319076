"""The power goes at any moment of `walrider restore` of a backup in tar format with a tablespace, and of `walrider backup roll`: no server
starts on anything less than the whole, and the same commands come to what PostgreSQL makes of it.

As test_powercut.py, which has restore of a directory.  Not tried: archives that are packed, and restore from an object store, which are
other ways to the same files; a cut in the second run as well.
"""

import json

import pytest

from tests.lab.faults.images import Images
from tests.lab.faults.powercut import ORDERS, Cut, Recorder
from tests.lab.server import recovery
from tests.lab.server.backups import MARKER, verify
from tests.lab.server.cluster import run
from tests.lab.server.restored import LITTLE, SETUP, STEP, STEPS, Restore, make_backups
from tests.lab.trash import throw_away
from tests.lab.walrider import binary, walrider

# So much that relations may come before all WAL is put apart, and the rest of it is replayed in memory: it depends on how quick the disk is.
AMPLE = ("--memory", "512MB")


@pytest.fixture(scope="module")
def backups(memory):
    """In a directory and in tar format."""
    steps = [STEP.format(n=number) for number in range(STEPS)]
    steps[1] += "SELECT pg_create_restore_point('half');"
    steps.append("DROP TABLE gone")
    conf = "autovacuum = off\nshared_buffers = 16MB\nmax_wal_size = 4GB\n"
    return make_backups(memory / "b", conf, SETUP, steps, ("t", "b", "wide", "new_0"), formats=())


def record(directory, memory, *command):
    """What a command did that has all it makes below this directory, which is empty at first; and what it said."""
    recorder = Recorder(memory / f"{directory.name}-recorder")
    said = run(recorder.command(directory, binary(), *command, "--json")).stdout
    return recorder.record(), json.loads(said)


def at_the_end(record):
    """Cuts when it has said that it is done."""
    return [Cut("done", len(record.calls), len(record.calls), order, 512, False) for order in ORDERS]


@pytest.mark.parametrize("kind, options", [("restore_tar", LITTLE), ("restore_early", AMPLE)])
def test_restore(backups, memory, kind, options):
    """The new directory and its tablespace become whole together, or no server starts."""
    restore = Restore(backups, "tar", memory / kind, options)
    recorded, said = record(restore.work, memory, *restore.command)
    assert said["unpacked_at_lsn"] and said["sweeps"] > 0, said
    restore.compare()
    throw_away(restore.work)

    def ours(directory, cut):
        command = restore.replay if restore.is_whole() else restore.command
        for _ in range(4):
            if command:
                command = restore.next_command(command)
        assert command is None, restore.said
        assert not (restore.ours / MARKER).exists() and not (restore.space / MARKER).exists()
        restore.compare()

    def stock(directory, cut):
        if restore.is_whole():
            restore.reaches_the_end()
            restore.compare()
        else:
            ours(directory, cut)
            restore.opens()

    Images(kind, recorded, memory).check(dict(walrider=ours, stock=stock), at=restore.work)
    for cut in at_the_end(recorded):
        recorded.image(cut, restore.work)
        restore.compare()
        throw_away(restore.work)


@pytest.mark.parametrize("form", ["plain", "tar"])
def test_roll(backups, memory, form):
    """What has the name of the new backup is one, every byte of it; it is made in a directory beside it."""
    top = memory / f"roll_{form}"
    top.mkdir()
    new, old = top / "new", backups.directory / form
    spaces = ("--tablespace-mapping", f"{old}.space={top}/space") if form == "plain" else ("--format", "tar")
    command = "backup", "roll", "--backup", old, "--wal", backups.wal, "--out", new, "--target-name", "half", *LITTLE, *spaces
    recorded, said = record(top, memory, *command)
    throw_away(top)

    def is_a_backup():
        if form == "plain":
            verify(new)
        of = top / "space" if form == "plain" else backups.directory / "space"
        restored = Restore(backups, form, memory / f"of_{form}")
        walrider("restore", "--backup", new, "--wal", backups.wal, "-D", restored.ours, "--tablespace-mapping",
                 f"{of}={restored.space}").expect()
        restored.compare()
        throw_away(restored.work)

    def ours(directory, cut):
        if not new.exists():
            go_on(command)
            assert not (top / "new.rolling").exists()
        is_a_backup()

    def go_on(command):
        """As the operator is told. A tablespace that has lost its marker is the operator's to empty."""
        for _ in range(4):
            result = walrider(*command)
            if result.code == 0:
                return
            if "by hand" in result.stderr or f'"{top / "space"}" is not empty' in result.stderr:
                throw_away(top / "space")
            else:
                assert "--start-over" in result.stderr, result
                command = *command, "--start-over"
        raise AssertionError(result)

    Images(f"roll_{form}", recorded, memory).check(dict(walrider=ours), at=top)
    for cut in at_the_end(recorded):
        recorded.image(cut, top)
        assert new.exists()
        is_a_backup()
        throw_away(top)
