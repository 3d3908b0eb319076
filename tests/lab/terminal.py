"""A terminal that is typed into and looked at: tmux, with a server of its own."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.lab.waiting import wait_for


class Terminal:
    """A command in a terminal of this size; gone at the end, with the command."""

    def __init__(self, *command, columns=100, lines=40, env=None):
        self.directory = tempfile.mkdtemp(prefix="t-")
        self.command, self.size, self.env = [str(part) for part in command], (columns, lines), env or {}

    def __enter__(self):
        columns, lines = self.size
        given = [part for name, value in self.env.items() for part in ("-e", f"{name}={value}")]
        # The pane outlives the command, so that what it left can be seen.
        options = Path(self.directory) / "options"
        options.write_text("set -g remain-on-exit on\nset -g status off\nset -g escape-time 0\n")
        self.tmux("-f", options, "new-session", "-d", "-x", columns, "-y", lines, *given, "--", *self.command)
        return self

    def __exit__(self, *_exception):
        self.tmux("kill-server", check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def tmux(self, *args, check=True):
        """One command of tmux; what it prints."""
        command = ["tmux", "-u", "-S", f"{self.directory}/s", *map(str, args)]
        env = {**{key: value for key, value in os.environ.items() if key not in ("TMUX", "NO_COLOR")}, "TERM": "xterm-256color"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def keys(self, *names):
        """Press these, by tmux's names."""
        self.tmux("send-keys", *names)

    def text(self, colours=False):
        """What can be read; with escape sequences for colours on request."""
        return self.tmux("capture-pane", "-p", *(["-e"] if colours else []))

    def asks(self, format):
        """What tmux knows of the pane, as `#{pane_dead_status}`."""
        return self.tmux("display-message", "-p", format).strip()

    def wait_text(self, *words, timeout=30):
        """Wait until all of these can be read at once; what can be."""
        def found():
            text = self.text()
            return text if all(word in text for word in words) else None
        return wait_for(found, lambda: f"{words} in\n{self.text()}", timeout, every=0.1)

    def wait_end(self, timeout=30):
        """Wait until the command has ended; its exit status, or the signal's number, negative."""
        def ended():
            status = self.asks("#{?pane_dead_signal,-#{pane_dead_signal},#{pane_dead_status}}")
            if not status and self.asks("#{pane_dead}") == "1":
                # tmux (3.3a) may miss that it has a child to wait for, while it writes utmp; this has it look.
                os.kill(int(self.asks("#{pid}")), signal.SIGCHLD)
            return status
        return int(wait_for(ended, lambda: f"the end\n{self.text()}", timeout, every=0.1))

    def resize(self, columns, lines):
        """Make it another size."""
        self.tmux("resize-window", "-x", columns, "-y", lines)

    def pid(self):
        """Of the command."""
        return int(self.asks("#{pane_pid}"))
