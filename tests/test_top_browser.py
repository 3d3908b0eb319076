"""The page of `walrider top --listen` in Chromium: what is read on it, light, dark and on a phone.

WALRIDER_SCREENSHOTS names a directory for pictures (those of docs/img/ were made so). Not tried: other browsers.
"""

import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.browser import Browser
from tests.lab.server.cluster import free_port
from tests.lab.standby.watched import hot, load, primary_of
from tests.lab.waiting import wait_for
from tests.lab.walrider import start

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    with primary_of(primary_template, work) as server:
        yield server


@contextmanager
def served(*args):
    """Where the page is, and the process."""
    port = free_port()
    process = start("top", "--listen", f"127.0.0.1:{port}", "-i", "500ms", *args)
    try:
        yield f"http://127.0.0.1:{port}/", process
    finally:
        process.kill()
        process.wait()


def keep(browser, work, name):
    """A picture of it."""
    directory = Path(os.environ.get("WALRIDER_SCREENSHOTS") or work)
    browser.screenshot(directory / f"{name}.png")
    assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def colours(browser):
    """Background and text, as computed."""
    return browser.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")


def brightness(colour):
    """0 to 255."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_what_is_read_on_it(primary, work):
    """A standby that is paused and one by the primary's word only, in light and dark; it goes on, and says when it does not."""
    primary.psql("SELECT pg_create_physical_replication_slot('kept', true); SELECT pg_create_physical_replication_slot('unused', true)")
    primary.psql("CREATE EXTENSION pg_walinspect")
    over_tcp = lambda server: f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"
    with hot(primary, work, slot="kept") as follower, hot(primary, work, name="other"), load(primary, pause=0.2):
        follower.server.psql("SELECT pg_wal_replay_pause()")
        wait_for(lambda: follower.server.value("SELECT pg_get_wal_replay_pause_state()") == "paused", "paused")
        with served("--wal", over_tcp(primary), over_tcp(follower.server)) as (url, process):
            for dark in (False, True):
                with Browser(dark=dark) as browser:
                    browser.open(url)
                    text = browser.wait_text("Live, every 500 ms.", "walrider: lag", "other: lag", "paused", "unused", "not asked",
                                             "records/s", "What WAL is made of", "Heap/INSERT", "public.t")
                    assert re.search(r"WAL \d+ k?B/s, \d+ records/s", text), text
                    back, front = map(brightness, colours(browser))
                    assert (back < 60 and front > 180) if dark else (back > 220 and front < 60)
                    # Each table has headings of columns and rows, and a caption.
                    assert browser.evaluate("""[...document.querySelectorAll('table')].every((table) => table.caption
                        && table.querySelectorAll('thead th[scope=col]').length === table.rows[0].cells.length
                        && [...table.tBodies[0].rows].every((row) => row.cells[0].scope === 'row'))""")
                    before = browser.evaluate("document.querySelector('svg path').getAttribute('d')")
                    moved = lambda: browser.evaluate("document.querySelector('svg path').getAttribute('d')") != before
                    wait_for(moved, "a new figure")
                    if os.environ.get("WALRIDER_SCREENSHOTS"):
                        wait_for(lambda: browser.evaluate("fetch('/view.json').then(a => a.json()).then(a => a.trend.wal_rate.length)") > 60,
                                 "a history", timeout=60)
                        wait_for(lambda: browser.text() != text, "the display of it")
                    keep(browser, work, f"top-{'dark' if dark else 'light'}")
                    assert browser.errors == [] and set(browser.requests) <= {url, f"{url}view.json", "data:,", "about:blank"}
            with Browser(width=390, height=844) as browser:
                browser.open(url)
                browser.wait_text("Live, every 500 ms.", "walrider: lag")
                assert browser.evaluate("document.documentElement.scrollWidth") <= 390
                keep(browser, work, "top-phone")
                process.terminate()
                process.wait()
                assert "walrider: lag" in browser.wait_text("walrider top does not answer since")


def test_names_are_text(primary, work):
    """What a server says is never markup."""
    with hot(primary, work, name="plain"), served(primary.dsn()) as (url, _), Browser() as browser:
        browser.open(url)
        browser.wait_text("plain: lag")
        browser.evaluate(f"""(async () => {{
            const real = await (await fetch('/view.json')).json();
            real.view.standbys[0].name = {HOSTILE!r};
            real.view.notes = [{HOSTILE!r}];
            real.view.error = {HOSTILE!r};
            window.fetch = () => Promise.resolve({{ json: () => {{ real.time += 0.001; return real; }} }});
        }})()""")
        browser.wait_text(f"{HOSTILE}: lag")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0 and browser.errors == []
