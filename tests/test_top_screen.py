"""The screen of `walrider top` in a real terminal, of real servers.

Not tried: terminals other than tmux's; what each figure means is for test_top.py.
"""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.standby.watched import hot, load, primary_of
from tests.lab.terminal import Terminal
from tests.lab.waiting import wait_for
from tests.lab.walrider import binary, walrider


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    with primary_of(primary_template, work) as server:
        yield server


def top(*servers, **terminal):
    """The program in a terminal."""
    dsns = [server if isinstance(server, str) else server.dsn() for server in servers]
    return Terminal(binary(), "top", "-i", "500ms", *dsns, **terminal)


def test_what_is_on_it(primary, work):
    """Two standbys, one of them paused, one by the primary's word only: all of it, and the terminal as it was afterwards."""
    primary.psql("SELECT pg_create_physical_replication_slot('kept', true); SELECT pg_create_physical_replication_slot('unused', true)")
    with hot(primary, work, slot="kept") as follower, hot(primary, work, name="other"), load(primary):
        follower.server.psql("SELECT pg_wal_replay_pause()")
        wait_for(lambda: follower.server.value("SELECT pg_get_wal_replay_pause_state()") == "paused", "paused")
        with top(primary, follower.server, lines=45) as terminal:
            text = terminal.wait_text("walrider top", "WAL ", "at most", "records/s", "unused", "nobody", "kept", "note: other: not asked")
            assert re.search(r"^other +streaming +async", text, re.M), text
            # Chosen is the first; the other is below.
            assert "─ other: lag" in text, text
            terminal.keys("j")
            text = terminal.wait_text("─ walrider: lag", "paused", "100 %", "replays 0 B/s", "busy 0 %")
            assert re.search(r"replay +[0-9A-F]+/[0-9A-F]+ +\d+ .?B", text), text
            assert "\x1b[" in terminal.text(colours=True).replace("\x1b[7m", "").replace("\x1b[0m", ""), "colours"
            terminal.keys("k")
            terminal.wait_text("─ other: lag")
            terminal.keys("?")
            terminal.wait_text("hold the display")
            terminal.keys("?")
            terminal.keys("q")
            assert terminal.wait_end() == 0
            assert "walrider top" not in terminal.text() and terminal.asks("#{alternate_on}") == "0"


def test_holding_and_sizes(primary):
    """The display can be held; it follows the terminal's size, however small."""
    with load(primary), top(primary, columns=80, lines=24) as terminal:
        terminal.wait_text("no standby is connected", "WAL ", "flushed")
        terminal.keys("p")
        before = terminal.wait_text("HELD")
        with pytest.raises(AssertionError):
            wait_for(lambda: terminal.text() != before, "a change", timeout=2)
        terminal.keys("p")
        wait_for(lambda: terminal.text() != before, "a change")
        for columns, lines in ((10, 3), (200, 60), (80, 24)):
            terminal.resize(columns, lines)
            wait_for(lambda: terminal.asks("#{pane_width}") == str(columns), "the size")
            terminal.wait_text("q quit")
        terminal.wait_text("j/k standby")
        terminal.keys("C-c")
        assert terminal.wait_end() == 0


def in_a_shell(primary):
    """The program, started by a shell that goes on."""
    return Terminal("sh", "-c", f"{binary()} top '{primary.dsn()}'; echo code $?; exec cat")


def looks(terminal):
    """Whether it is on the alternate screen, and shows its cursor."""
    return terminal.asks("#{alternate_on}#{cursor_flag}")


@pytest.mark.parametrize("how", ["q", signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_it_leaves_the_terminal_as_it_was(primary, how):
    """Whatever ends it: the ordinary screen, a cursor, and what is typed is seen."""
    with in_a_shell(primary) as terminal:
        terminal.wait_text("no standby is connected")
        assert looks(terminal) == "10"
        if how == "q":
            terminal.keys(how)
        else:
            (child,) = Path(f"/proc/{terminal.pid()}/task/{terminal.pid()}/children").read_text().split()
            os.kill(int(child), how)
        text = terminal.wait_text("code 0")
        assert looks(terminal) == "01" and "walrider top" not in text, text
        terminal.keys("seen", "Enter")
        wait_for(lambda: terminal.text().count("seen") == 2, lambda: f"echo\n{terminal.text()}")


def test_a_terminal_that_is_gone(primary):
    """The terminal goes away, as when a connection is lost. It read on and on from what was left of it, at a core's cost, for ever."""
    with top(primary) as terminal:
        terminal.wait_text("no standby is connected")
        pid = terminal.pid()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the program", 10)


def test_no_color(primary):
    """NO_COLOR, and nothing is coloured; what is empty does not count."""
    coloured = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-7]|9[0-7]|38)[;m]")
    for value, expected in (("1", False), ("", True)):
        with load(primary), top(primary, env={"NO_COLOR": value}) as terminal:
            terminal.wait_text("WAL ", "at most", "█")
            assert bool(coloured.search(terminal.text(colours=True))) == expected, terminal.text(colours=True)


def test_disconnected_and_unreachable(primary, work):
    """A standby that lost its primary grows its lag; when the primary died, nobody knows; neither looks fine."""
    with Proxy(primary.port) as proxy, hot(primary, work, proxy.port) as follower, top(primary, follower.server) as terminal:
        terminal.wait_text("─ walrider: lag", "streaming")
        with load(primary):
            proxy.cut(refuse=True)
            text = terminal.wait_text("─ walrider: not connected; lag", "100 %")
            assert not re.search(r"lag >?0 |no lag", text) and re.search(r"^not connected +\d+.* 100 %", text, re.M), text
        primary.stop("immediate")
        text = terminal.wait_text("No such file", "─ walrider: unknown; lag ?", timeout=30)
        assert "no lag" not in text and "streaming" not in text, text


def test_without_a_terminal(primary):
    """It says what to do instead."""
    done = walrider("top", primary.dsn()).expect(2)
    assert "no terminal" in done.stderr and "--batch" in done.stderr and "--listen" in done.stderr
    done = subprocess.run([binary(), "top", "--json", primary.dsn()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--batch" in done.stderr


def test_slots_and_notes_as_text_and_json(primary, work):
    """--batch has them, too: without pg_monitor it says what is not seen."""
    primary.psql("CREATE ROLE nobody_much LOGIN; SELECT pg_create_physical_replication_slot('kept', true)")
    dsn = primary.dsn().replace("user=postgres", "user=nobody_much")
    with load(primary):
        view = json.loads(walrider("top", "--batch", "--json", "-n", 1, dsn).expect().stdout)["view"]
    (slot,) = view["slots"]
    assert (slot["name"], slot["active"], slot["wal_status"]) == ("kept", False, "reserved") and slot["held"] >= 0, slot
    assert any("GRANT pg_monitor" in note for note in view["notes"]), view
    text = walrider("top", "--batch", "-n", 1, dsn).expect().stdout
    assert "note: " in text and re.search(r"^kept +physical +nobody", text, re.M), text
