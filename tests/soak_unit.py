"""Run the unit part of `make test` again and again, beside a load that keeps every core busy.

    python3 -m tests.soak_unit ROUNDS

The first round has the seed of `make test`, the others have new ones, unless WALRIDER_SEED names one for all.
"""

import multiprocessing
import os
import subprocess
import sys
import time

from tests.lab.as_user import ROOT


def spin(parent):
    """Keep a core busy as long as the parent lives."""
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def main(rounds):
    """Load, rounds, and an end of both."""
    command = ["cargo", "test", "--locked", "--workspace", "--quiet"]
    subprocess.run([*command, "--no-run"], cwd=ROOT, check=True)
    load = [multiprocessing.Process(target=spin, args=[os.getpid()], daemon=True) for _ in range(os.cpu_count())]
    for process in load:
        process.start()
    for number in range(rounds):
        begun, env = time.monotonic(), dict(os.environ)
        if number:
            env.setdefault("WALRIDER_SEED", "random")
        status = subprocess.run(command, cwd=ROOT, env=env).returncode
        print(f"round {number + 1} of {rounds}: {'failed' if status else 'passed'} after {time.monotonic() - begun:.0f} s", flush=True)
        if status:
            sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(int(sys.argv[1]))
