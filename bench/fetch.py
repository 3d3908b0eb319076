"""Recovery from an archive that takes its time: a restore_command that sleeps and then copies, stock and ours in turn.

    python3 -m bench.fetch [--fixture DIR] [--latencies 0,50,100,300] [--fetch-jobs 8] [--save DIR]

Both recover the same backup to the last record of its archive, with the same command, and stop there, flushed: the time is
that from start to end.  Beside them stand ours from a directory, which fetches nothing, and what fetching takes at least:
segments x latency / jobs.  `excess` is ours over the larger of that and of ours with a command that does not sleep.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from tests.harness import install, recovery
from tests.harness.walrider import compare, walrider

from . import measure
from .loads import make
from .replay import FIXTURES, commit, machine, nameless

LOAD = "pgbench"


class Bench:
    """One fixture, measured."""

    def __init__(self, fixture, info, scratch, jobs):
        self.fixture, self.scratch, self.jobs = fixture, scratch, jobs
        self.final, self.archive = info["final_checkpoint"], fixture / "archive"
        start = (fixture / "backup" / "backup_label").read_text().split("(file ")[1][:24]
        self.segments = sum(1 for file in measure.segments(self.archive) if len(file.name) == 24 and file.name >= start)
        self.buffers = (info["data_bytes"] * 5 // 4 // measure.MB + 256) * measure.MB

    def prepare(self, name, latency):
        """A copy of the backup whose restore_command takes so many milliseconds longer than cp."""
        server = recovery.prepare(self.fixture / "backup", self.archive, self.scratch / name, signal="standby.signal",
                                  target=("lsn", self.final), action="shutdown")
        sleep = f"sleep {latency / 1000}; " if latency else ""
        server.configure(f"restore_command = '{sleep}cp {self.archive}/%f %p 2>/dev/null'", "postgresql.auto.conf")
        os.sync()
        return server

    def stock(self, latency):
        """Stock PostgreSQL, without fsync and with all in shared buffers."""
        server = self.prepare("stock", latency)
        found = recovery.finish_stock(server, self.final, fsync="off", shared_buffers=f"{self.buffers // measure.MB}MB",
                                      **measure.STOCK_SETTINGS)
        return dict(total_seconds=found.total_seconds, redo_seconds=found.redo_seconds)

    def ours(self, latency, *options):
        """Walrider, durable."""
        server = self.prepare("ours", latency)
        found = walrider("replay", "-D", server.data_dir, *options).expect()
        return dict(total_seconds=found.seconds, **{name: found.json[name] for name in (
            "redo_seconds", "fetch_seconds", "fetch_wait_seconds", "segments_fetched", "stages")})

    def round(self, latencies):
        """Every side once for each latency."""
        result = dict(directory=self.ours(0, "--wal", self.archive), latencies={})
        recovery.discard(self.scratch / "ours")
        for latency in latencies:
            found = dict(stock=self.stock(latency), ours=self.ours(latency, "--fetch-jobs", self.jobs),
                         least_seconds=self.segments * latency / 1000 / self.jobs)
            compare(self.scratch / "ours", self.scratch / "stock")
            recovery.discard(self.scratch / "ours", self.scratch / "stock")
            result["latencies"][latency] = found
            ours = found["ours"]
            print(f"{latency:4} ms: stock {found['stock']['total_seconds']:6.2f} s, ours {ours['total_seconds']:6.2f} s, of these "
                  f"redo {ours['redo_seconds']:.2f}, waiting {ours['fetch_wait_seconds']:.2f}", flush=True)
        return result


def table(result):
    """What was found, for people."""
    bare = min(found["latencies"][min(found["latencies"])]["ours"]["redo_seconds"] for found in result["rounds"])
    lines = [f"{result['segments']} segments, {result['fetch_jobs']} at once; from a directory "
             f"{min(found['directory']['redo_seconds'] for found in result['rounds']):.2f} s of redo", "",
             "| latency | stock, in all | ours, in all | ratio | ours, redo | least: segments x latency / jobs | excess |",
             "|---|---|---|---|---|---|---|"]
    for latency in result["rounds"][0]["latencies"]:
        runs = [found["latencies"][latency] for found in result["rounds"]]
        stock, ours, redo = (sorted(run[side][key] for run in runs)[len(runs) // 2] for side, key in (
            ("stock", "total_seconds"), ("ours", "total_seconds"), ("ours", "redo_seconds")))
        least = runs[0]["least_seconds"]
        lines.append(f"| {latency} ms | {stock:.2f} s | {ours:.2f} s | {stock / ours:.1f} | {redo:.2f} s | {least:.2f} s | "
                     f"{redo / max(least, bare) - 1:.0%} |")
    return "\n".join(lines)


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.fetch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixture", type=Path, default=FIXTURES / LOAD, help="pgbench's WAL as bench.replay keeps it; made when missing")
    parser.add_argument("--latencies", type=lambda text: [int(word) for word in text.split(",")], default=[0, 50, 100, 300])
    parser.add_argument("--fetch-jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-fetch.json")
    args = parser.parse_args(argv)
    known = args.fixture / "info.json"
    info = json.loads(known.read_text()) if known.exists() else make(args.fixture, LOAD)
    when = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory(prefix="fetch-") as scratch:
        bench = Bench(args.fixture, info, Path(scratch), args.fetch_jobs)
        result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                      command=" ".join(["python3 -m bench.fetch", *map(nameless, argv)]), segments=bench.segments,
                      fetch_jobs=args.fetch_jobs, rounds=[bench.round(args.latencies) for _ in range(args.rounds)])
    print("\n" + table(result))
    if args.save:
        file = args.save / f"{when:%Y-%m-%d}-fetch.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"kept: {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
