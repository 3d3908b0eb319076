"""Running the binary."""

import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass, field

from tests.lab.as_user import PROGRAM, ROOT

DONE, FAILED, USAGE, UNSUPPORTED, CORRUPT, DIFFERENT = 0, 1, 2, 3, 4, 5


def binary():
    """The binary under test."""
    return str(ROOT / PROGRAM)


@dataclass
class Result:
    """How a run ended."""

    command: list
    code: int
    json: dict
    stderr: str
    seconds: float
    stdout: str = field(repr=False, default="")

    def expect(self, code=DONE):
        """Raise unless it ended with this exit code."""
        if self.code != code:
            raise AssertionError(f"{' '.join(self.command)}\nexit {self.code}, expected {code}\n"
                                 f"{self.stdout[-2000:]}\n{self.stderr[-4000:]}")
        return self


def limit_open_files(most):
    """For this process and its children: soft and hard."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def walrider(*args, env=None, file_size_limit=None, open_files=None, timeout=900):
    """Run with `--json` where the subcommand has it, and parse what it prints."""
    command = [binary(), *map(str, args)]
    prints_json = args and args[0] in ("replay", "restore", "backup", "compare", "wal") and args[1:2] not in [("put",), ("get",), ("expire",)]
    if "--json" not in command and prints_json:
        command.append("--json")

    def limit():
        if file_size_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
        if open_files is not None:
            limit_open_files(open_files)

    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace",
                          env=dict(os.environ, **(env or {})), preexec_fn=limit)
    try:
        parsed = json.loads(done.stdout)
    except ValueError:
        parsed = {}
    return Result(command, done.returncode, parsed, done.stderr, time.monotonic() - begun, done.stdout)


def start(*args, stdout=subprocess.DEVNULL):
    """Start without waiting, for runs that are killed or followed."""
    return subprocess.Popen([binary(), *map(str, args)], stdout=stdout, stderr=subprocess.PIPE, text=True)


def replay(data_dir, wal, *args, **kwargs):
    """`walrider replay` of one directory."""
    return walrider("replay", "--data-dir", data_dir, "--wal", wal, *args, **kwargs)
