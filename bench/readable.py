"""How fast a hot standby catches up: PostgreSQL alone, and with early redo by the extension.

    python3 -m bench.readable [--fixtures DIR] [--rounds N] [--loads LOAD...] [--size SHARE] [--readers N]

Every side is a hot standby that replays the same WAL from its own pg_wal, durable, its pages all in shared buffers.  The time is
from "consistent recovery state reached" to the last record.  hot_standby_feedback plays no part: the WAL is that of a primary that had
none, so that readers meet as many conflicts as there can be.  After the first round the directories are compared page by page.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from tests.lab import install
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import parse_lsn

from .loads import LOADS, make
from .measure import MB, link_wal
from .replay import FIXTURES, SMOKE_SIZE, commit, machine, nameless

EARLY = {"shared_preload_libraries": "walrider", "walrider.early_redo": "on"}
OURS = {f"{workers} worker{'s'[:workers != 1]}": {**EARLY, "walrider.redo_workers": str(workers)} for workers in (0, 1, 2)}
SIDES = {"no prefetch": {"recovery_prefetch": "off"}, "stock": {}, **OURS}
# Nothing else works, and no restartpoint.
SETTINGS = {"hot_standby": "on", "fsync": "on", "autovacuum": "off", "max_wal_size": "64GB", "checkpoint_timeout": "1h", "max_connections": "100",
            "max_prepared_transactions": "100", "max_worker_processes": "20", "log_min_messages": "log", "log_timezone": "UTC"}


def processor_seconds(pid):
    """What a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@contextmanager
def reading(server, sessions):
    """So many sessions look for all rows of the largest table, one snapshot after the other."""
    def read():
        with server.session() as session:
            table, = session.run("SELECT oid::regclass FROM pg_class WHERE relkind = 'r' ORDER BY relpages DESC LIMIT 1")
            while not stop.is_set():
                session.run(f"SELECT count(*) FROM {table}")

    stop = threading.Event()
    threads = [threading.Thread(target=read) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def catch_up(server, end, settings, readers=0, timeout=1800):
    """Start it; seconds from consistency to `end`, and what the startup process used."""
    server.start(**settings)
    deadline = time.monotonic() + timeout
    with reading(server, readers), server.session() as session:
        pid, = session.run("SELECT pid FROM pg_stat_activity WHERE backend_type = 'startup'")
        while True:
            replayed, now = session.run("SELECT pg_last_wal_replay_lsn()")[0], datetime.now(timezone.utc)
            if parse_lsn(replayed) > end:
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"error: no end after {timeout} s: {server.log_tail()}")
            time.sleep(0.01)
        used = processor_seconds(int(pid))
    began = server.log_matches(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) UTC \[\d+\] LOG:  consistent recovery state reached")[-1]
    began = datetime.strptime(began, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=timezone.utc)
    return dict(seconds=(now - began).total_seconds(), startup_seconds=used)


def rounds(name, fixture, info, args, scratch):
    """Every side in turn, so often."""
    end = parse_lsn(info["final_checkpoint"])
    buffers = f"{info['data_bytes'] * 5 // 4 // MB + 256}MB"
    runs = {side: [] for side in SIDES}
    for number in range(args.rounds):
        servers = {}
        for side, own in SIDES.items():
            server = recovery.prepare(fixture / "backup", fixture / "archive", scratch / side.replace(" ", "-"),
                                      signal="standby.signal")
            server.configure("restore_command = ''", "postgresql.auto.conf")
            link_wal(fixture, server.data_dir)
            servers[side] = server
            try:
                found = catch_up(server, end, {**SETTINGS, "shared_buffers": buffers, **own}, args.readers)
                if number == 0:
                    server.psql("CHECKPOINT")
                server.stop()
            finally:
                server.kill()
            if side in OURS:
                found["early"] = server.log_matches(r"walrider redid .*") + server.log_matches(r"DETAIL:  skipped .*")
            runs[side].append(found)
            print(f"{name} {number + 1}: {side:<20} {found['seconds']:6.2f} s, startup process {found['startup_seconds']:6.2f} s "
                  f"{' '.join(found.get('early', []))}", flush=True)
        if number == 0:
            for side in OURS:
                pages = compare(servers[side].data_dir, servers["stock"].data_dir)["pages"]
                print(f"{name}, {side}: the {pages} pages are stock's", flush=True)
        recovery.discard(*(server.data_dir for server in servers.values()))
    return runs


def table(results):
    """Medians, and ratios of them with the range of the pairs."""
    lines = [f"{'load':<14} {'WAL MB':>7}  " + "".join(f"{side:>13}" for side in SIDES) + "   over stock: "
             + ", ".join(OURS)]
    for name, (info, runs) in results.items():
        median = {side: statistics.median(run["seconds"] for run in found) for side, found in runs.items()}
        ratios = []
        for side in OURS:
            pairs = [stock["seconds"] / ours["seconds"] for stock, ours in zip(runs["stock"], runs[side])]
            ratios.append(f"{median['stock'] / median[side]:.2f}x ({min(pairs):.2f}-{max(pairs):.2f})")
        lines.append(f"{name:<14} {info['wal_bytes'] / 1e6:>7.0f}  " + "".join(f"{median[side]:>11.2f} s" for side in SIDES)
                     + "   " + ", ".join(ratios))
    return "\n".join(lines) + "\n"


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.readable", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=["pgbench", "hot", "bulk"], metavar="LOAD",
                        help=", ".join(LOADS))
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="directory that keeps the loads' WAL; made when missing")
    parser.add_argument("--size", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, default=0, help="sessions that read meanwhile")
    parser.add_argument("--smoke", action="store_true", help="one round of small fixtures")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-readable.json")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.size, args.fixtures = 1, SMOKE_SIZE, args.fixtures / "smoke"
    when = datetime.now(timezone.utc)
    results = {}
    for name in args.loads:
        info = make(args.fixtures / name, name, args.size)
        with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
            results[name] = info, rounds(name, args.fixtures / name, info, args, Path(scratch))
    text = table(results)
    print("\n" + text)
    if args.save:
        result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                      command=" ".join(["python3 -m bench.readable", *map(nameless, argv)]),
                      runs={name: runs for name, (_, runs) in results.items()})
        (args.save / f"{when:%Y-%m-%d}-readable.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.save / f"{when:%Y-%m-%d}-readable.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
