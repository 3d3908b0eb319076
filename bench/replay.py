"""Replay of pgbench's WAL, stock PostgreSQL and Walrider in turn, from the same backup.

    python3 -m bench.replay --rounds N [--fixture DIR] [--save FILE] [-- OPTIONS OF walrider replay]

Stock runs in its best case: everything in shared buffers, fsync off; its redo time is from "redo starts" to its stop.
Ours is durable; its redo time is from the first record to the last page change.  Both read the archive through
their own means: restore_command = 'cp ...' and a directory.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from tests.harness import install, load, recovery
from tests.harness.walrider import walrider

ROOT = Path(__file__).resolve().parents[1]


def machine():
    """What ran this, without its name."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()} {platform.release().split('-')[0]}"


def commit():
    """The commit that is measured."""
    done = subprocess.run(["git", "-c", f"safe.directory={ROOT}", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                          capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def run_stock(fixture, info, data_dir):
    """One stock recovery."""
    timings = recovery.stock_replay(fixture / "backup", fixture / "archive", data_dir, info["final_checkpoint"])
    recovery.discard(data_dir)
    return dict(redo_seconds=timings.redo_seconds, total_seconds=timings.total_seconds)


def run_ours(fixture, data_dir, options):
    """One replay by Walrider."""
    recovery.copy_backup(fixture / "backup", data_dir)
    result = walrider("replay", "--data-dir", data_dir, "--wal", fixture / "archive", *options).expect()
    recovery.discard(data_dir)
    return result.json


def summary(runs, key):
    """Median and range."""
    values = [run[key] for run in runs]
    return dict(median=statistics.median(values), min=min(values), max=max(values))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.replay", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixture", type=Path, help="made by tests.harness.load --kind pgbench; else one is made")
    parser.add_argument("--seconds", type=int, default=120, help="pgbench, where a fixture is made")
    parser.add_argument("--scale", type=int, default=50, help="pgbench, where a fixture is made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="keep the result in this file")
    parser.add_argument("options", nargs="*", help="options of walrider replay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fixture = args.fixture
        if not fixture:
            fixture = Path(scratch) / "pgbench"
            load.pgbench_fixture(fixture, scale=args.scale, seconds=args.seconds)
        info = json.loads((fixture / "info.json").read_text())
        stock, ours = [], []
        for number in range(args.rounds):
            stock.append(run_stock(fixture, info, Path(scratch) / "stock"))
            ours.append(run_ours(fixture, Path(scratch) / "ours", args.options))
            print(f"{number + 1}: PostgreSQL {stock[-1]['redo_seconds']:.2f} s redo, {stock[-1]['total_seconds']:.2f} s in "
                  f"all; Walrider {ours[-1]['redo_seconds']:.2f} s, {ours[-1]['total_seconds']:.2f} s", flush=True)
    result = dict(when=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), commit=commit(),
                  postgresql=install.version(), command=" ".join(["python3 -m bench.replay", *sys.argv[1:]]),
                  records=ours[0]["records"], transactions=ours[0]["transactions"], wal_bytes=ours[0]["wal_bytes"],
                  peak_memory_bytes=max(run["peak_memory_bytes"] for run in ours), stages=ours[-1]["stages"],
                  stock={key: summary(stock, key) for key in ("redo_seconds", "total_seconds")},
                  walrider={key: summary(ours, key) for key in ("redo_seconds", "total_seconds")})
    result["ratio"] = {key: result["stock"][key]["median"] / result["walrider"][key]["median"]
                       for key in ("redo_seconds", "total_seconds")}
    text = json.dumps(result, indent=1)
    print(text)
    if args.save:
        args.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
