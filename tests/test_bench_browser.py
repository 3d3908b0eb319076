"""The report of `walrider bench` in Chromium: what is read on it, light, dark and on a phone.

WALRIDER_SCREENSHOTS names a directory for pictures (docs/img/bench-light.png is of bench/runs/, not of this). Not tried: other browsers.
"""

import json
import os
import re
from itertools import product
from pathlib import Path

from tests.lab.browser import Browser
from tests.lab.walrider import walrider

HOSTILE = "<img src=x onerror=alert(1)>"


def made(work):
    """The report of an experiment, as if made: wal_compression=zstd halves the WAL exactly, and one run has failed."""
    levels = {"wal_compression": ["off", "zstd"], "application_name": ["a", HOSTILE], "bindir": [str(work)]}
    plan = {"factors": [{"name": name, "levels": of} for name, of in levels.items()], "fraction": 1, "repeats": 2, "seed": 5,
            "load": "tables", "clients": 4, "seconds": 30.0, "servers": []}
    machine = {"system": "linux 6", "processor": "CPU", "cores": 2, "memory_bytes": 1 << 34}
    lines = [{"schema_version": 1, "version": "0", "started_at": "2026-11-25T00:00:00Z", "machine": machine, "plan": plan}]
    for number, (repeat, *settings) in enumerate(product((0, 1), *levels.values()), 1):
        noise = 1 + 0.02 * (number % 3)
        measured = {"operations": 1_000_000, "load_seconds": 30.0 * noise, "wal_bytes": 400_000_000 // (2 if "zstd" in settings else 1),
                    "primary_cpu_seconds": 20.0 * noise, "standby_cpu_seconds": 10.0, "replay_busy_seconds": 5.0 / noise,
                    "lag_bytes": 0, "catch_up_seconds": 0.01 * noise, "server_version": 180006}
        failed = {"message": "failed", "log": []}
        lines.append({"run": number, "repeat": repeat, "settings": dict(zip(levels, settings)), "started_at": "2026-11-25T00:00:00Z",
                      "outcome": measured if number < 8 else None, "failed": None if number < 8 else failed})
    path = work / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    vary = [word for name, of in levels.items() if name != "bindir" for word in ("--vary", f"{name}={','.join(of)}")]
    # The run that is left fails again: there is no initdb.
    return walrider("bench", "-o", path, "--resume", "--bindir", work, *vary), work / "results.html"


def keep(browser, work, name):
    """A picture of it."""
    directory = Path(os.environ.get("WALRIDER_SCREENSHOTS") or work)
    browser.screenshot(directory / f"{name}.png")
    assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def brightness(browser, what):
    """Of a colour of the page, 0 to 255."""
    colour = browser.evaluate(f"getComputedStyle(document.body).{what}")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_the_report(work):
    """Effects, intervals, each run and what failed are there; what others said is text; nothing is loaded from elsewhere."""
    said, report = made(work)
    assert said.code == 1 and "1 of 8 runs to do" in said.stderr and "initdb" in said.stderr, said.stderr
    for dark in (False, True):
        with Browser(dark=dark) as browser:
            browser.open(report.as_uri())
            text = browser.wait_text("walrider bench", "7 of 8 runs, 1 failed", "Runs that failed", "could not run", HOSTILE,
                                     "Rate of WAL", "× 0.500", "WAL for each operation", "400 B", "Speed of replay")
            assert re.search(r"95 % intervals with 3 degrees of freedom; runs with the same settings differ by \d\.\d %", text), text
            back, front = brightness(browser, "backgroundColor"), brightness(browser, "color")
            assert (back < 60 and front > 180) if dark else (back > 220 and front < 60)
            # Of each figure two plots; in that of runs a dot for each run and factor.
            assert browser.evaluate("document.querySelectorAll('svg[role=img][aria-label]').length") == 16
            assert browser.evaluate("document.querySelectorAll('svg')[1].querySelectorAll('circle').length") == 14
            assert browser.evaluate("""[...document.querySelectorAll('svg')].every((svg) => {
                const whole = svg.getBoundingClientRect();
                const boxes = [...svg.querySelectorAll('text, circle')].map((one) => one.getBoundingClientRect());
                const labels = [...svg.querySelectorAll('svg > text')].map((one) => one.getBoundingClientRect());
                return boxes.every((box) => box.left >= whole.left - 1 && box.right <= whole.right + 1)
                    && labels.every((a, nth) => labels.slice(nth + 1).every((b) => a.right < b.left || b.right < a.left));
            })""")
            assert browser.evaluate("""[...document.querySelectorAll('table')].every((table) => table.caption
                && table.querySelectorAll('thead th[scope=col]').length === table.rows[0].cells.length
                && [...table.tBodies[0].rows].every((row) => row.cells[0].scope === 'row'))""")
            assert browser.evaluate("document.querySelectorAll('img, script, link[rel=stylesheet]').length") == 0
            keep(browser, work, f"bench-{'dark' if dark else 'light'}")
            assert browser.errors == [] and set(browser.requests) <= {report.as_uri(), "data:,", "about:blank"}
    with Browser(width=390, height=844) as browser:
        browser.open(report.as_uri())
        browser.wait_text("Speed of replay")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        keep(browser, work, "bench-phone")
