"""From the command to the first write: a restored backup is recovered and opened, by PostgreSQL alone and by Walrider.

    python3 -m bench.recover [--fixtures DIR] [--rounds N] [--load LOAD] [--latency SECONDS,...] [--save DIR]

Every side gets a fresh copy of the backup, configured as a restore tool leaves it: recovery.signal, restore_command, a target
and recovery_target_action = promote.  The clock starts with the first command and stops when the server has committed a
write.  Both sides run with fsync on; PostgreSQL has everything in shared buffers and makes no restartpoint before the end.

    PostgreSQL      postgres
    replay          walrider replay, which ends recovery itself, then postgres
    handed over     walrider replay --no-promote, then postgres, which ends recovery

The target is right before or right behind the last checkpoint record: the only one since the backup.  WAL comes from a directory
(PostgreSQL copies it with cp) or through a restore_command that takes so much longer for each file.  A second table says what
these commands let redo take at least: its own time with a command that does not sleep, or segments x latency / jobs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from tests.lab import install, walrider
from tests.lab.server import recovery
from tests.lab.server.cluster import ServerError

from .loads import LOADS, REGRESSION, make, make_regression
from .replay import FIXTURES, SMOKE_SIZE, commit, machine, nameless

SETTINGS = {**recovery.REPLAY_SETTINGS, "fsync": "on", "autovacuum": "off", "checkpoint_timeout": "1h"}
SIDES = ("PostgreSQL", "replay", "handed over")
ENDS = {"checkpoint": "a checkpoint at the end", "no checkpoint": "no checkpoint since the backup"}


def first_write(server, timeout=1800, **settings):
    """Start PostgreSQL and wait until it has committed a write."""
    server.launch(**{**SETTINGS, **settings})
    server.wait_ready(timeout)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return server.psql("CREATE TABLE first_write ()")
        except ServerError:
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def prepare(backup, archive, data_dir, end, latency=0.0, fixture=None):
    """A restored backup; `end` is one of ENDS and the LSN of the last checkpoint record."""
    which, checkpoint = end
    server = recovery.prepare(backup, archive, data_dir, fixture, target=("lsn", checkpoint), action="promote",
                              inclusive=which == "checkpoint")
    if latency:
        server.configure(f"restore_command = 'sleep {latency}; cp {archive}/%f %p'", "postgresql.auto.conf")
    return server


def recover(side, server, wal=None, options=(), **settings):
    """One recovery by one side; seconds until its first write, of replay alone, and what replay said."""
    begun = time.monotonic()
    said = {}
    if side != "PostgreSQL":
        arguments = [*(["--wal", wal] if wal else []), *(["--no-promote"] if side == "handed over" else []), *options]
        said = walrider.walrider("replay", "--data-dir", server.data_dir, *arguments).expect().json
    replayed = time.monotonic()
    first_write(server, **settings)
    seconds = time.monotonic() - begun
    redo = said["redo_seconds"] if said else recovery.timings(server).redo_seconds
    fetched = {name: value for name, value in said.items() if name.startswith("fetch_") or name == "segments_fetched"}
    return dict(seconds=seconds, replay_seconds=replayed - begun, redo_seconds=redo,
                again_bytes=said.get("replayed_again_bytes"), stages=said.get("stages"), **fetched)


class Bench:
    """One fixture, recovered from each source to each end."""

    def __init__(self, fixture, info, scratch, args):
        self.fixture, self.info, self.scratch, self.args = fixture, info, scratch, args
        data = info.get("data_bytes") or 2 * sum(file.stat().st_size for file in fixture.glob("backup/base/*/*"))
        self.buffers = f"{(data * 5 // 4 >> 20) + 256}MB"

    def one(self, side, which, latency):
        """One recovery, and all its traces removed."""
        server = prepare(self.fixture / "backup", self.fixture / "archive", self.scratch / "data",
                         (which, self.info["final_checkpoint"]), latency or 0.0)
        os.sync()
        wal = self.fixture / "archive" if latency is None else None
        try:
            return recover(side, server, wal, ["--fetch-jobs", self.args.fetch_jobs], shared_buffers=self.buffers)
        finally:
            server.kill()
            recovery.discard(server.data_dir)

    def run(self):
        """All rounds: the sides take turns, right after one another."""
        runs = []
        for latency in [None, *self.args.latency]:
            for which in ENDS:
                for number in range(self.args.rounds):
                    for side in SIDES[number % 3:] + SIDES[:number % 3]:
                        found = self.one(side, which, latency)
                        runs.append(dict(side=side, end=which, latency=latency, **found))
                        print(f"{source(latency):<22} {which:<14} {side:<12} {found['seconds']:6.2f} s", flush=True)
        return runs


def source(latency):
    """Where WAL comes from, in words."""
    return "a directory" if latency is None else f"cp, and {1000 * latency:.0f} ms a file"


def table(runs):
    """Medians, and how many times as fast."""
    lines = ["| WAL from | the last checkpoint | PostgreSQL | replay | | handed over | |", "|---|---|---|---|---|---|---|"]
    for latency in dict.fromkeys(run["latency"] for run in runs):
        for which, words in ENDS.items():
            of = {side: statistics.median(run["seconds"] for run in runs if (run["side"], run["end"], run["latency"]) ==
                                          (side, which, latency)) for side in SIDES}
            ratio = {side: of["PostgreSQL"] / of[side] for side in SIDES}
            lines.append(f"| {source(latency)} | {words} | {of['PostgreSQL']:.1f} s | {of['replay']:.1f} s | {ratio['replay']:.1f} | "
                         f"{of['handed over']:.1f} s | {ratio['handed over']:.1f} |")
    return "\n".join(lines)


def fetching(runs, jobs):
    """What the commands cost redo, where it ends recovery."""
    bare, lines = None, []
    for latency in sorted({run["latency"] for run in runs} - {None}):
        of = [run for run in runs if run["side"] == "replay" and run["latency"] == latency]
        redo, segments = statistics.median(run["redo_seconds"] for run in of), max(run["segments_fetched"] for run in of)
        bare = redo if bare is None else bare
        least = max(bare, segments * latency / jobs)
        lines.append(f"| {1000 * latency:.0f} ms | {segments} | {redo:.2f} s | {least:.2f} s | {redo / least - 1:.0%} |")
    return "\n".join([f"| latency, {jobs} at once | segments | redo | at least | excess |", "|---|---|---|---|---|", *lines])


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.recover", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="directory that keeps the loads' WAL; made when missing")
    parser.add_argument("--load", choices=[*LOADS, REGRESSION], default="pgbench")
    parser.add_argument("--size", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=lambda text: [float(word) for word in text.split(",")], default=[0.0, 0.05],
                        help="what restore_command takes longer for each file; default 0,0.05")
    parser.add_argument("--fetch-jobs", type=int, default=8, metavar="N", help="of walrider replay")
    parser.add_argument("--smoke", action="store_true", help="one round of a small fixture")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-recover.json")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.size, args.fixtures = 1, SMOKE_SIZE, args.fixtures / "smoke"
    args.fixtures.mkdir(parents=True, exist_ok=True)
    when = datetime.now(timezone.utc)
    fixture = args.fixtures / args.load
    info = make_regression(fixture) if args.load == REGRESSION else make(fixture, args.load, args.size)
    with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
        runs = Bench(fixture, info, Path(scratch), args).run()
    text = table(runs) + ("\n\n" + fetching(runs, args.fetch_jobs) if args.latency else "") + "\n"
    print("\n" + text)
    if args.save:
        result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(),
                      postgresql=install.version(), command=" ".join(["python3 -m bench.recover", *map(nameless, argv)]),
                      load=args.load, wal_bytes=info.get("wal_bytes"), runs=runs)
        name = f"{when:%Y-%m-%d}-recover" + ("" if args.load == "pgbench" else f"-{args.load}")
        (args.save / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.save / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
