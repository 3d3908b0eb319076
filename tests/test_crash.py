"""Killed at any moment, continued with the same command or by stock PostgreSQL: no difference."""

import os
import time
from itertools import zip_longest

import pytest

from tests.lab.oracle.compare import compare
from tests.lab.oracle.page import pages
from tests.lab.server import recovery
from tests.lab.walrider import replay, start

ROUNDS = int(os.environ.get("WALRIDER_CRASH_ROUNDS", "5"))


def kill_after(fixture, data_dir, seconds, options=()):
    """SIGKILL a replay after some seconds; True if it was still at work."""
    process = start("replay", "--data-dir", data_dir, "--wal", fixture.archive, *options)
    time.sleep(seconds)
    alive = process.poll() is None
    process.kill()
    process.wait()
    process.stderr.close()
    return alive


@pytest.mark.parametrize("variant", ["plain", "passes"], indirect=True)
def test_killed_and_continued(variant, work, rng):
    """Rounds of one to three kills at random moments; every fourth round is finished by stock.

    Half of the time memory is short, so that pages are written all the time.
    """
    whole = variant.copy(work / "whole")
    begun = time.monotonic()
    replay(whole, variant.archive).expect()
    full_seconds = time.monotonic() - begun
    recovery.discard(whole)
    at_work = 0
    for number in range(ROUNDS):
        ours = variant.copy(work / f"round{number}")
        moments = [rng.uniform(0, full_seconds) for _ in range(rng.choice([1, 1, 2, 3]))]
        options = [rng.choice([(), ("--memory", "16MB")]) for _ in moments]
        killed = [kill_after(variant, ours, *kill) for kill in zip(moments, options)]
        at_work += sum(killed)
        if not killed[0]:       # the machine was busier when we measured
            full_seconds *= 0.8
        try:
            if number % 4 == 3 and all(killed):     # else it may be done, but for what the control file says
                recovery.take_over(ours, variant.archive, variant.info["final_checkpoint"])
            else:
                replay(ours, variant.archive).expect()
                recovery.pin_tablespaces(ours)
            compare(ours, variant.stock)
        except Exception as error:
            raise AssertionError(f"round {number}, killed after {moments} s of {full_seconds:.3f}, {options}: {error}") from error
        recovery.discard(ours)
    print(f"{ROUNDS} rounds, {at_work} kills at work, a whole run takes {full_seconds:.2f} s")
    assert at_work >= ROUNDS // 2


def test_a_killed_run_keeps_stock_away_or_consistent(plain, work):
    """Straight after a kill, without our help: stock PostgreSQL reaches the end by itself."""
    for seconds in (0.3, 0.15, 0.07, 0.03):
        ours = plain.copy(work / f"killed after {seconds}")
        if kill_after(plain, ours, seconds, ("--memory", "16MB")):
            break
    else:
        raise AssertionError("it was always done before")
    recovery.take_over(ours, plain.archive, plain.info["final_checkpoint"])
    compare(ours, plain.stock)


def test_what_was_passed_over_is_written(passes, work):
    """Pages of the table are written twice: when VACUUM has passed over them, and in the end. A power cut is not tried here: they are
    written in the way in which others make room (test_powercut.py)."""
    ours = passes.copy(work / "ours")
    done = replay(ours, passes.archive, "--memory", "1GB").expect().json
    recovery.pin_tablespaces(ours)
    compare(ours, passes.stock)

    def changed(path):
        before = passes.backup / path.relative_to(ours)
        return sum(a != b for a, b in zip_longest(pages(before) if before.exists() else (), pages(path)))
    in_the_end = sum(changed(path) for path in (ours / "base").glob("*/*") if path.name[0].isdigit())
    table = changed(ours / passes.info["file"])
    assert table > 3000 and done["pages_written"] > in_the_end + table // 2, (done["pages_written"], in_the_end, table)
