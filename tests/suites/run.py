"""One variant from initdb to the last check, with the time of each stage."""

import shutil
import sys
import time
from contextlib import contextmanager

from tests.harness import install, recovery
from tests.harness.walrider import walrider

from . import proof, source
from .primary import Primary


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


def load(variant, directory, stage):
    """Run the variant's suites; returns the stopped primary."""
    primary = Primary(directory, variant)
    try:
        with stage("base backup"):
            primary.start()
        for suite in variant.suites:
            with stage(suite) as note:
                note(counts(getattr(primary, suite)()))
        if variant.contrib:
            with stage("contrib") as note:
                for module in variant.contrib:
                    primary.contrib(module)
                note(f"{len(variant.contrib)} modules")
        with stage("contents and stop") as note:
            primary.finish()
            note(f"{primary.wal_bytes() / 2 ** 20:.0f} MB of WAL")
    finally:
        primary.server.kill()
    return primary


def counts(outcome):
    """Tests as a few words."""
    failed = f", {len(outcome.failed)} failed with a known reason" if outcome.failed else ""
    return f"{len(outcome.passed)} tests passed{failed}"


def prove(variant, directory):
    """Everything about one variant; raises at the first thing that is not as it must be."""
    stage = Stages(variant.name)
    primary = load(variant, directory, stage)
    types = walrider("wal", "stats", primary.archive).expect().json["types"]
    with stage("stock replay") as note:
        stock = directory / "stock"
        timings = proof.stock_replay(primary, stock)
        note(f"redo {timings.redo_seconds:.1f} s")
    ours = directory / "ours"
    compared = {}
    for options in (*variant.replays, ()):
        name = " ".join(options)
        recovery.discard(ours)
        with stage(f"replay {name or '--verify-images'}") as note:
            result = proof.our_replay(primary, ours, *(options or ("--verify-images",)))
            note(f"{result.json.get('images_verified', 0)} images verified")
        assert result.json.get("image_differences", 0) == 0, result.json
        with stage(f"compare {name}".strip()) as note:
            compared = proof.compare_all(ours, stock)
            note(f"{compared['pages']} pages, {compared['files']} files; strict: {compared['strict'] or 'equal'}")
    with stage("stock takes over"):
        proof.take_over(primary, variant, ours, directory / "dumps-ours")
    shutil.rmtree(directory / "primary")
    return dict(variant=variant.name, about=variant.about, postgresql=install.version(), tests_of=source.version(),
                suites={outcome.suite: dict(passed=len(outcome.passed), failed=outcome.failed)
                        for outcome in primary.outcomes},
                wal_bytes=primary.wal_bytes(),
                records=sum(entry["count"] for entry in types),
                record_types=sum(1 for entry in types if entry["count"]),
                images_verified=result.json.get("images_verified", 0), image_differences=0, **compared,
                seconds=stage.seconds)
