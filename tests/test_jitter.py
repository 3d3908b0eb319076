"""Restores and replays whose threads are held up at random come to what PostgreSQL makes of them.

Two threads on two processors meet in few orders. One asked for the length of a file after another had made it longer, in one restore of
thirty, and only of those that a recorder slowed down: "WAL contains references to invalid pages", where all was well. Most races need luck
here, too: `make soak-jitter` does 300 rounds. Not tried: more threads than there are processors, and threads that meet between system calls.
"""

import os

import pytest

from tests.lab.faults.jitter import Jitter
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.restored import LITTLE, SETUP, STEP, STEPS, Restore, make_backups
from tests.lab.trash import throw_away
from tests.lab.walrider import binary

ROUNDS = int(os.environ.get("WALRIDER_JITTER_ROUNDS", "4"))
# All at once, relations early, and with little memory, where pages are visited again and again or their changes are put apart.
MEMORY = ((), ("--memory", "64MB"), LITTLE, (*LITTLE, "--spill-always"), (*LITTLE, "--spill-size", "0"))


@pytest.fixture(scope="module")
def backups(memory):
    """In a directory and in tar format."""
    conf = "autovacuum = off\nshared_buffers = 16MB\nmax_wal_size = 4GB\n"
    steps = [*(STEP.format(n=number) for number in range(STEPS)), "DROP TABLE gone"]
    return make_backups(memory / "b", conf, SETUP, steps, ("t", "b", "wide", "new_0"), formats=())


def test_held_up(backups, memory, rng):
    """Restores in their single pass, and replays of a directory."""
    jitter = Jitter(memory / "jitter")
    for number in range(ROUNDS):
        form, options, seed = rng.choice(("plain", "tar", "directory")), rng.choice(MEMORY), rng.getrandbits(32)
        restore = Restore(backups, "plain" if form == "directory" else form, memory / f"round{number}", options)
        command = restore.command
        if form == "directory":
            recovery.copy_backup(backups.directory / "plain", restore.ours)
            command = restore.replay
        how = number, form, options, f"JITTER_SEED={seed}"
        done = jitter.run(seed, binary(), *command)
        assert done.returncode == 0, (how, done)
        try:
            recovery.pin_tablespaces(restore.ours)
            compare(restore.ours, backups.stock)
        except AssertionError as error:
            raise AssertionError(how) from error
        throw_away(restore.work)
