"""Replay of the same WAL by stock PostgreSQL and by Walrider, in turn, from the same backups.

    python3 -m bench.replay [--fixtures DIR] [--rounds N] [--jobs 1,2] [--loads LOAD...] [-- OPTIONS OF walrider replay]

Stock runs in its best case: everything in shared buffers, fsync off, the WAL in pg_wal; its redo time is from "redo starts"
to its stop, its whole time from start to "is shut down".  It runs durable as well, for the whole time alone.  Ours is always
durable; its redo time is from the first record to the last page change, its whole time that of the process.

After the first round the directories are compared page by page; a difference fails the benchmark.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from tests.lab import install
from tests.lab.oracle.compare import compare
from tests.lab.oracle.records import timelines, waldump
from tests.lab.server import recovery

from . import measure
from .cgroup import Group
from .loads import LOADS, make
from .table import summarize, table

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = Path("/var/tmp/walrider-bench")
SMOKE_SIZE = 0.02
# What a limited process needs beside its pages: WAL buffers, hash tables, the page cache of what it reads and writes.
BESIDE_PAGES = 256 * measure.MB


def machine():
    """What ran this, without its name."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()} {platform.release().split('-')[0]}"


def commit():
    """The commit that is measured."""
    done = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "describe", "--always", "--dirty", "--exclude=*"],
                          cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def nameless(word):
    """A word of the command line, without the directories of this machine."""
    return re.sub(r"/[^=]*/", "", word)


class Bench:
    """One load, measured."""

    def __init__(self, name, fixture, info, scratch, args):
        self.name, self.fixture, self.info, self.scratch, self.args = name, fixture, info, scratch, args
        self.size = info["options"].get("size", 1.0)
        self.memory = measure.memory(LOADS[name].memory, self.size)
        self.group = Group(self.memory + BESIDE_PAGES if self.memory else 0)
        data_bytes = info.get("data_bytes") or 2 * sum(file.stat().st_size for file in fixture.glob("backup/base/*/*"))
        self.buffers = self.memory or (data_bytes * 5 // 4 // measure.MB + 256) * measure.MB
        self.most_jobs = max(args.jobs)
        self.runs = {}
        self.floors = dict(waldump_seconds=[], write_bytes_per_second=[], reads_per_second=[])

    def sides(self):
        """{name: side} in the order in which they take turns: what is compared runs side by side."""
        def stock(name, durable):
            return measure.Stock(self.scratch / name, self.buffers, bool(self.memory), durable)

        def ours(jobs):
            return measure.Ours(self.scratch / f"walrider-{jobs}", jobs, self.memory, self.args.options)

        fewer = [jobs for jobs in self.args.jobs if jobs != self.most_jobs]
        return {"stock": stock("stock", False), f"walrider-{self.most_jobs}": ours(self.most_jobs),
                "stock-durable": stock("stock-durable", True), **{f"walrider-{jobs}": ours(jobs) for jobs in fewer}}

    def round(self, number):
        """The device and the floor, then every side once; all in one go, so that they met the same machine."""
        sides = self.sides()
        for side in sides.values():
            side.prepare(self.fixture, self.info)
        os.sync()
        self.floors["waldump_seconds"].append(measure.timed(self.decode))
        self.floors["write_bytes_per_second"].append(measure.write_rate(self.scratch, int(self.size * (1 << 30))))
        if self.memory:
            self.floors["reads_per_second"].append(measure.read_rate(self.scratch / "stock", int(self.size * 20000)))
        for name, side in sides.items():
            # What the one before left to write is not this one's.
            os.sync()
            if self.memory:
                measure.drop_cache(side.data_dir)
            measure.touch_memory(self.info)
            found = side.run(self.group)
            self.runs.setdefault(name, []).append(found)
            print(f"{self.name} {number + 1}: {name:<13} {found['redo_seconds']:6.2f} s redo, "
                  f"{found['total_seconds']:6.2f} s in all", flush=True)
        if number == 0:
            self.compare()
        recovery.discard(*(side.data_dir for side in sides.values()))

    def compare(self):
        """Our directories with stock's, page by page."""
        for jobs in self.args.jobs:
            found = compare(self.scratch / f"walrider-{jobs}", self.scratch / "stock")
            print(f"{self.name}: --jobs {jobs} gives the {found['pages']} pages that stock has", flush=True)

    def decode(self):
        """The same WAL through pg_waldump, which decodes it on one core."""
        start = (self.fixture / "backup" / "backup_label").read_text().split("(file ")[1][:24]
        waldump([file for file in timelines(self.fixture / "archive")[0] if file.name >= start], "--stats")

    def run(self):
        """All rounds; what was found."""
        before = {file: file.stat().st_mtime_ns for file in measure.segments(self.fixture / "archive")}
        for number in range(self.args.rounds):
            self.round(number)
        if before != {file: file.stat().st_mtime_ns for file in measure.segments(self.fixture / "archive")}:
            raise SystemExit(f"error: {self.name}: a replay changed the fixture's WAL")
        return dict(about=LOADS[self.name].about, fixture=self.info["options"], shared_buffers=self.buffers, memory=self.memory,
                    group=self.group.limit if self.group.path else 0, **self.floors, runs=self.runs,
                    summary=summarize(self.runs, self.most_jobs))


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.replay", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="directory that keeps the loads' WAL; made when missing")
    parser.add_argument("--fixture", action="append", default=[], metavar="LOAD=DIR", help="a fixture from elsewhere")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--smoke", action="store_true", help="one round of small fixtures")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-replay.json")
    parser.add_argument("options", nargs="*", help="options of walrider replay, after --")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.fixtures = 1, args.fixtures / "smoke"
    elsewhere = {name: Path(directory) for name, directory in (given.split("=", 1) for given in args.fixture)}
    args.fixtures.mkdir(parents=True, exist_ok=True)
    when = datetime.now(timezone.utc)
    result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                  command=" ".join(["python3 -m bench.replay", *map(nameless, argv)]), loads={})
    for name in args.loads:
        fixture = elsewhere.get(name, args.fixtures / name)
        info = (json.loads((fixture / "info.json").read_text()) if name in elsewhere
                else make(fixture, name, SMOKE_SIZE if args.smoke else 1.0))
        # Beside the fixtures, not in TMPDIR: the WAL is linked, and both must be on one file system.
        with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
            result["loads"][name] = Bench(name, fixture, info, Path(scratch), args).run()
    print("\n" + table(result))
    if args.save:
        which = "" if set(args.loads) == set(LOADS) else "-" + "-".join(args.loads)
        file = args.save / f"{when:%Y-%m-%d}-replay{which}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"kept: {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
