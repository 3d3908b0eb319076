"""PostgreSQL's own suites, replayed by its hot standby with early redo and without: the pages are compared.

    python3 -m tests.suites.early [VARIANT ...]      as root through tests.lab.as_user; of tests.suites, "plain" and "contrib" without names
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tests.lab.standby import readable

from .run import Stages, run_suites
from .variants import VARIANTS

WORKERS = (1, 3)


def prove(variant, directory):
    """Raises at the first difference."""
    stage = Stages(variant.name)
    # What asks for consistency checks is never done early.
    load = run_suites(replace(variant, images=()), directory, stage)
    fixture = SimpleNamespace(backup=load.backup, archive=load.archive, directory=None, info=dict(final_checkpoint=load.final_checkpoint))
    with stage("stock"):
        stock = readable.catch_up(fixture, readable.prepare(fixture, directory / "stock"))
    for workers in WORKERS:
        with stage(f"early redo, {workers} workers") as note:
            ours = readable.prepare(fixture, directory / "ours")
            readable.catch_up(fixture, ours, **readable.EARLY, **{"walrider.redo_workers": workers})
            found = readable.summary(ours)
            note(f"{found['early']} of {found['records']} records early, in place {found['in place']}, held {found['held']}")
            assert found["early"] > 1000 and found["by workers"] > 100 and found["refused"] == 0, found
        with stage("compare") as note:
            note(f"{readable.compare(ours.data_dir, stock.data_dir)['pages']} pages")
        shutil.rmtree(directory / "ours")


def main(names):
    """The command line."""
    for name in names or ["plain", "contrib"]:
        with tempfile.TemporaryDirectory(prefix="suites-") as directory:
            prove(VARIANTS[name], Path(directory))
    print("no difference")


if __name__ == "__main__":
    main(sys.argv[1:])
