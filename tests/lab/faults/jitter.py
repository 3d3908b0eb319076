"""Threads that are held up at random before system calls, by `jitter.c`: they meet in orders that are rare otherwise."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("jitter.c")


class Jitter:
    """The program, made in this directory."""

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self.program = directory / "jitter"
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(self.program), str(SOURCE)], check=True)

    def run(self, seed, *command):
        """Runs a command so; how it ended."""
        argv = [str(self.program), *map(str, command)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=900, env=dict(os.environ, JITTER_SEED=str(seed)))
