"""A memory limit for both sides alike: a control group that root makes and the bench's own user enters.

    python3 -m bench.cgroup -- COMMAND ...     run COMMAND with such a group, where the machine allows one

The page cache counts as well, so that a limited side cannot keep in it what it may not keep itself.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from tests.lab.as_user import find_user

VARIABLE = "WALRIDER_BENCH_CGROUP"
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))     # version 1, version 2
LIMIT = ("memory.limit_in_bytes", "memory.max")
PEAK = ("memory.max_usage_in_bytes", "memory.peak")


class Group:
    """The group that a replay runs in; without one, nothing is limited."""

    def __init__(self, limit=0):
        self.limit = limit
        self.path = Path(os.environ[VARIABLE]) if limit and VARIABLE in os.environ else None

    @contextmanager
    def entered(self, into):
        """Children started inside the block are limited together; adds the peak to `into`."""
        if self.path is None:
            yield
            return
        limited = self.path / "limited"
        limited.mkdir()
        try:
            _existing(limited, LIMIT).write_text(str(self.limit))
            (limited / "cgroup.procs").write_text(str(os.getpid()))
            try:
                yield
            finally:
                (self.path / "rest" / "cgroup.procs").write_text(str(os.getpid()))
            into["group_peak_bytes"] = int(_existing(limited, PEAK).read_text())
        finally:
            limited.rmdir()


def _existing(directory, names):
    """The one of these files that this version of control groups has."""
    return next(directory / name for name in names if (directory / name).exists())


def make(user):
    """A group for `user`, with `rest` for whatever is not measured; None where the machine allows none."""
    for root in ROOTS:
        path = root / f"walrider-bench-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        if any((path / name).exists() for name in LIMIT):
            control = path / "cgroup.subtree_control"
            if control.exists():
                control.write_text("+memory")
            (path / "rest").mkdir()
            for owned in (path, path / "cgroup.procs", path / "rest" / "cgroup.procs"):
                os.chown(owned, user.pw_uid, user.pw_gid)
            return path
        path.rmdir()
    return None


def main(command):
    """Run a command, with a group if root calls."""
    path = make(find_user()) if os.geteuid() == 0 else None
    if path is None:
        print("no memory control group here: loads larger than memory are limited by their settings alone", file=sys.stderr)
        return subprocess.run(command).returncode

    def enter():
        (path / "rest" / "cgroup.procs").write_text(str(os.getpid()))

    child = subprocess.Popen(command, env=dict(os.environ, **{VARIABLE: str(path)}), preexec_fn=enter)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    try:
        return child.wait()
    finally:
        (path / "rest").rmdir()
        path.rmdir()


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "--":
        sys.exit(__doc__)
    sys.exit(main(sys.argv[2:]))
