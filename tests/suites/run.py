"""One variant from initdb to the last check, with the time of each stage."""

import shutil
import sys
import time
from contextlib import contextmanager

from tests.lab import install
from tests.lab.server import recovery
from tests.lab.walrider import walrider

from . import proof, source
from .primary import Load, Primary


class Stages:
    """Says what is done and how long it took."""

    def __init__(self, name):
        self.name = name
        self.seconds = {}

    @contextmanager
    def __call__(self, stage):
        begun = time.monotonic()
        note = []
        yield note.append
        self.seconds[stage] = round(time.monotonic() - begun, 1)
        print(f"{self.name}: {stage:<28} {self.seconds[stage]:6.1f} s  {' '.join(map(str, note))}", file=sys.stderr,
              flush=True)


def run_suites(variant, directory, stage):
    """Run the variant's suites on a primary; returns their load."""
    primary = Primary(directory, variant)
    try:
        with stage("base backup"):
            primary.start()
        for suite in (*variant.suites, *(["contrib"] if variant.contrib else [])):
            with stage(suite) as note:
                passed, failed = primary.run(suite)
                note(f"{passed} tests passed" + (f", {failed} failed for a known reason" if failed else ""))
        with stage("contents and stop") as note:
            load = primary.finish()
            note(f"{load.wal_bytes() / 2 ** 20:.0f} MB of WAL")
    finally:
        primary.server.kill()
    shutil.rmtree(directory / "primary")
    return load


def prove(variant, directory, again=False):
    """Everything about one variant; raises at the first thing that is not as it must be.

    `again` takes the load, and the directory of stock PostgreSQL, that an earlier run left in the directory.
    """
    stage = Stages(variant.name)
    free = shutil.disk_usage(directory).free
    if not again and free < variant.disk_bytes():
        raise OSError(f"{variant.name} needs {variant.disk_bytes() >> 30} GB in {directory}: set TMPDIR")
    load = Load.read(directory) if again else run_suites(variant, directory, stage)
    types = walrider("wal", "stats", load.archive).expect().json["types"]
    stock, ours = directory / "stock", directory / "ours"
    if not again:
        with stage("stock replay") as note:
            timings = proof.stock_replay(load, stock)
            note(f"redo {timings.redo_seconds:.1f} s")
    for options in (*variant.replays, ("--verify-images",)):
        recovery.discard(ours, directory / "dumps-ours")
        with stage(f"replay {' '.join(options)}") as note:
            result = proof.our_replay(load, ours, *options)
            note(f"{result.json.get('images_verified', 0)} images verified")
        assert result.json.get("image_differences", 0) == 0, result.json
        with stage("compare") as note:
            compared = proof.compare_all(ours, stock)
            note(f"{compared['pages']} pages, {compared['files']} files; strict: {compared['strict'] or 'equal'}")
    with stage("stock takes over") as note:
        checked = proof.take_over(load, variant, ours, directory / "dumps-ours")
        note("sound: " + ", ".join(f"{count} {kind}" for kind, count in checked.items()))
    return dict(variant=variant.name, about=variant.about, postgresql=install.version(), tests_of=source.version(),
                suites=load.suites, wal_bytes=load.wal_bytes(), records=sum(entry["count"] for entry in types),
                record_types={f"{entry['rmgr']}/{entry['type']}": entry["count"] for entry in types if entry["count"]},
                images_verified=result.json.get("images_verified", 0), image_differences=0, **compared, checked=checked,
                seconds=stage.seconds)
