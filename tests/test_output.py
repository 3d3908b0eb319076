"""Nobody to read what it prints, or no room for it: what was done stays done, and the exit code says what is right."""

import os
import subprocess

import pytest

from tests.lab.server.cluster import PgCluster, controldata, copy_tree
from tests.lab.walrider import DONE, FAILED, binary


@pytest.fixture(scope="module")
def backup(scratch):
    """A base backup with its WAL."""
    with PgCluster.init(scratch / "output_primary", None) as server:
        server.start()
        server.psql("CREATE TABLE t AS SELECT generate_series(1, 1000) AS i")
        server.basebackup(scratch / "output_backup", wal="stream")
    return scratch / "output_backup"


def run(where, *args):
    """Run with a standard output that is full, or that its reader has closed; exit code and standard error."""
    if where == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        done = subprocess.run([binary(), *map(str, args)], stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(out)
    assert "panicked" not in done.stderr, done.stderr
    said = "could not write to the standard output: No space left on device"
    assert done.stderr.count(said) == (1 if where == "full" else 0), done.stderr
    assert done.returncode == (FAILED if where == "full" else DONE), (args, done)


@pytest.mark.parametrize("where", ["full", "closed"])
@pytest.mark.parametrize("form", [(), ("--json",), ("--positions",)], ids=lambda form: "".join(form) or "text")
def test_what_was_done_stays_done(backup, work, where, form):
    """A promotion ends recovery; it exited with 101 after that."""
    ours = copy_tree(backup, work / "ours")
    run(where, "replay", "-D", ours, "--promote", *form)
    control = controldata(ours)
    assert (control["Latest checkpoint's TimeLineID"], control["Database cluster state"]) == ("2", "shut down")


@pytest.mark.parametrize("where", ["full", "closed"])
def test_what_only_tells(backup, where):
    """Help, the version, a comparison."""
    for args in (["--help"], ["replay", "--help"], ["--version"], ["compare", backup, backup], ["compare", "--json", backup, backup]):
        run(where, *args)


def test_nobody_hears_complaints_either(work):
    """Standard error is full: the exit code is what it would be."""
    with open("/dev/full", "w") as full:
        for args, code in ([("replay", "-D", work / "nothing"), 1], [("standby", "-D", work / "nothing"), 1], [("fly",), 2]):
            done = subprocess.run([binary(), *map(str, args)], stdout=subprocess.DEVNULL, stderr=full, timeout=60)
            assert done.returncode == code, args
