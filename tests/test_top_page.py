"""The page of `walrider top --listen`: over HTTP, and as a parser of HTML sees it; `test_top_browser.py` looks at it."""

import http.client
import json
import re
import signal
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest

from tests.lab.server.cluster import free_port
from tests.lab.standby.watched import hot, load, primary_of
from tests.lab.waiting import wait_for
from tests.lab.walrider import start, walrider


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    with primary_of(primary_template, work) as server:
        yield server


def get(port, path, method="GET"):
    """(status, headers, text)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


@contextmanager
def served(*args):
    """`walrider top --listen` without a terminal; its process, its port, and a function that gets the newest."""
    port = free_port()
    process = start("top", "--listen", f"127.0.0.1:{port}", "-i", "500ms", *args)

    def newest():
        try:
            return json.loads(get(port, "/view.json")[2])
        except ConnectionRefusedError:
            assert process.poll() is None, process.stderr.read()
            return {"view": None}
    try:
        wait_for(lambda: newest()["view"], "a view")
        yield process, port, newest
    finally:
        process.kill()
        process.wait()


class Page(HTMLParser):
    """What it refers to, its tags, and which are not closed."""

    VOID = {"meta", "link"}

    def __init__(self, text):
        super().__init__()
        self.refers, self.tags, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.refers += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def test_the_page_and_its_data(primary, work):
    """It loads nothing from elsewhere, may not, and its data is that of --batch --json with what was before."""
    with hot(primary, work) as follower, load(primary), served(primary.dsn(), follower.server.dsn()) as (process, port, newest):
        status, headers, text = get(port, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["Content-Security-Policy"] and "connect-src 'self'" in headers["Content-Security-Policy"]
        page = Page(text)
        assert page.open == [] and page.refers == ["data:,"], page.refers
        assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
        assert ("html", {"lang": "en"}) in page.tags and any(attrs.get("name") == "viewport" for _, attrs in page.tags)
        assert "prefers-color-scheme: dark" in text and "innerHTML" not in text
        wait_for(lambda: len([one for one in newest()["trend"]["wal_rate"] if one]) >= 3, "a line of rates")
        data = newest()
        (standby,) = data["view"]["standbys"]
        assert (data["schema_version"], data["interval_seconds"], standby["state"]) == (1, 0.5, "streaming")
        assert list(data["trend"]["standbys"]) == [f"{standby['name']} {standby['address']}"]
        assert get(port, "/status")[0] == 404 and get(port, "/view.json", "POST")[0] == 405
        status, headers, text = get(port, "/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        told = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        labels = f'standby="{standby["name"]}",address="{standby["address"]}"'
        assert told[f"walrider_top_connected{{{labels}}}"] == "1" and float(told["walrider_top_wal_bytes_per_second"]) > 0
        assert f'walrider_top_lag_seconds{{{labels},part="replay_cpu"}}' in told, text
        before = data["time"]
        wait_for(lambda: newest()["time"] > before, "a newer one")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0 and f"the page is at http://127.0.0.1:{port}/" in process.stderr.read()


def test_with_lines(primary):
    """--batch prints besides; a port that is taken is an error that says so."""
    with served("--batch", "--json", primary.dsn()) as (process, port, newest):
        assert newest()["view"]["standbys"] == []
        done = walrider("top", "--listen", f"127.0.0.1:{port}", primary.dsn()).expect(1)
        assert f"could not listen on \"127.0.0.1:{port}\"" in done.stderr
