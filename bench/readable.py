"""How fast a hot standby catches up: PostgreSQL alone, and with early redo by the extension.

    python3 -m bench.readable [--fixtures DIR] [--rounds N] [--loads LOAD...] [--sides SIDE...] [--size SHARE] [--readers N] [--busy N]
                              [--delay US]

Every side is a hot standby that replays the same WAL from its own pg_wal, durable, its pages all in shared buffers.  The time is
from "consistent recovery state reached" to the last record.  After the first round the directories are compared page by page.

Readers count rows of the largest table, few or many, one snapshot after the other.  The WAL is that of a primary without hot_standby_feedback,
so that they meet as many conflicts as there can be: replay waits CONFLICT_DELAY for them (counted from when it opened the segment that it
is in), and cancels them.  They come again.  With feedback: bench.readable_live.

On a device of its own (bench.device), each of whose requests takes the delay, nothing of the data directory is cached when the server starts.

Busy processes want all the processor time that they can get, so that workers have to wait for theirs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from tests.lab import install
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import parse_lsn
from tests.lab.standby.readers import Crowd

from .device import Volume
from .loads import LOADS, REGRESSION, make, make_regression
from .measure import MB, link_wal, touch_memory
from .replay import FIXTURES, SMOKE_SIZE, commit, machine, nameless

EARLY = {"shared_preload_libraries": "walrider", "walrider.early_redo": "on"}
OURS = {f"{workers}-worker{'s'[:workers != 1]}": {**EARLY, "walrider.redo_workers": str(workers)} for workers in (0, 1, 2)}
SIDES = {"no-prefetch": {"recovery_prefetch": "off"}, "stock": {}, **OURS}
# What is waited for a reader: by PostgreSQL's 30 s nothing but waiting would be measured.
CONFLICT_DELAY = "100ms"
# Of a reader between two questions, in seconds.
PAUSE = 0.05
# Nothing else works, and no restartpoint.
SETTINGS = {"hot_standby": "on", "fsync": "on", "autovacuum": "off", "max_wal_size": "64GB", "checkpoint_timeout": "1h", "max_connections": "100",
            "max_prepared_transactions": "100", "max_worker_processes": "20", "log_min_messages": "log", "log_timezone": "UTC",
            "max_standby_archive_delay": CONFLICT_DELAY, "max_standby_streaming_delay": CONFLICT_DELAY}


def processor_seconds(pid):
    """What a process has used."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def count_rows(connection, rng):
    """Few or many of the largest table, in a snapshot.  Somebody whose question was cancelled waits before asking again."""
    time.sleep(PAUSE)
    table, = connection.execute("SELECT oid::regclass FROM pg_class WHERE relkind = 'r' ORDER BY relpages DESC LIMIT 1").fetchone()
    connection.execute(f"SELECT count(*) FROM (SELECT FROM {table} LIMIT {rng.choice([1000, 1000000])}) s")


def reading(server, sessions):
    """So many sessions that count rows; one whose question or connection is cancelled comes again."""
    crowd = Crowd(0)
    for number in range(sessions):
        crowd.add(f"reader {number}", server, count_rows)
    return crowd


def watching(server):
    """A session that `replayed` asks.  It is one for replication, of no database: replay would wait for the snapshots of another."""
    return server.session("postgres replication=true")


def replayed(session):
    """How far replay is, on a standby that receives nothing."""
    return parse_lsn(session.run("IDENTIFY_SYSTEM")[0].split("|")[2])


def processes(server, kind):
    """Their pids: "startup" or "walrider redo worker"."""
    return [pid for pid in server.children() if f": {kind} ".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def catch_up(server, end, settings, readers=0, timeout=1800):
    """Start it; seconds from consistency to `end`, and what the startup process and the workers used."""
    server.start(**settings)
    deadline = time.monotonic() + timeout
    startup, = processes(server, "startup")
    with reading(server, readers) as crowd, watching(server) as session:
        while True:
            at, now = replayed(session), datetime.now(timezone.utc)
            if at > end:
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"error: no end after {timeout} s: {server.log_tail()}")
            time.sleep(0.005)
        used = processor_seconds(startup)
        used_by_workers = sum(map(processor_seconds, processes(server, "walrider redo worker")))
    began = server.log_matches(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) UTC \[\d+\] LOG:  consistent recovery state reached")[-1]
    began = datetime.strptime(began, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=timezone.utc)
    return dict(seconds=(now - began).total_seconds(), startup_seconds=used, worker_seconds=used_by_workers,
                reads=sum(crowd.counts.values()), conflicts=sum(crowd.conflicts.values()))


@contextmanager
def busy(processes):
    """So many that count for ever."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def rounds(name, fixture, info, args, volume):
    """Every side in turn, so often."""
    if args.delay and not volume.can_limit:
        raise SystemExit("error: --delay needs a device: python3 -m bench.device -- ...")
    sides = {side: SIDES[side] for side in args.sides}
    scratch = volume.fresh(2 * len(sides) * (info["data_bytes"] + info["wal_bytes"]) + 1024 * MB, delays=True)
    end = parse_lsn(info["final_checkpoint"])
    buffers = f"{info['data_bytes'] * 5 // 4 // MB + 256}MB"
    runs = {side: [] for side in sides}
    for number in range(args.rounds):
        servers = {}
        for side, own in sides.items():
            server = recovery.prepare(fixture / "backup", fixture / "archive", scratch / side, signal="standby.signal")
            server.configure("restore_command = ''", "postgresql.auto.conf")
            link_wal(fixture, server.data_dir)
            servers[side] = server
            volume.forget()
            touch_memory(info)
            volume.limit(microseconds=args.delay)
            try:
                with busy(args.busy):
                    found = catch_up(server, end, {**SETTINGS, "shared_buffers": buffers, **own}, args.readers)
                volume.limit()
                if number == 0:
                    server.psql("CHECKPOINT")
                server.stop()
            finally:
                server.kill()
            if side in OURS:
                found["early"] = server.log_matches(r"walrider redid .*") + server.log_matches(r"DETAIL:  skipped .*")
            runs[side].append(found)
            print(f"{name} {number + 1}: {side:<20} {found['seconds']:7.3f} s, startup process {found['startup_seconds']:7.3f} s, workers {found['worker_seconds']:7.3f} s "
                  f"{' '.join(found.get('early', []))}", flush=True)
        if number == 0:
            for side in ours(sides):
                pages = compare(servers[side].data_dir, servers["stock"].data_dir)["pages"]
                print(f"{name}, {side}: the {pages} pages are stock's", flush=True)
        recovery.discard(*(server.data_dir for server in servers.values()))
    return runs


def ours(sides):
    """Those with early redo."""
    return [side for side in sides if side in OURS]


def told(found):
    """What readers had on one side."""
    answers = sum(run["reads"] for run in found) / sum(run["seconds"] for run in found)
    return f"{answers:.0f}, {statistics.mean(run['conflicts'] for run in found):.1f}"


def table(results, sides, readers=0):
    """Medians, and ratios of them with the range of the pairs."""
    lines = [f"{'load':<14} {'WAL MB':>7}  " + "".join(f"{side:>13}" for side in sides) + "   over stock: "
             + ", ".join(ours(sides))]
    for name, (info, runs) in results.items():
        median = {side: statistics.median(run["seconds"] for run in found) for side, found in runs.items()}
        ratios = []
        for side in ours(sides):
            pairs = [stock["seconds"] / early["seconds"] for stock, early in zip(runs["stock"], runs[side])]
            ratios.append(f"{median['stock'] / median[side]:.2f}x ({min(pairs):.2f}-{max(pairs):.2f})")
        lines.append(f"{name:<14} {info['wal_bytes'] / 1e6:>7.0f}  " + "".join(f"{median[side]:>11.3f} s" for side in sides)
                     + "   " + ", ".join(ratios))
    if readers:
        lines += ["", f"{readers} readers; answers a second, and conflicts (a round, on average):"]
        for name, (_, runs) in results.items():
            lines.append(f"{name:<23} " + "".join(f"{told(found):>13}" for found in runs.values()))
    return "\n".join(lines) + "\n"


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.readable", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    loads = [*LOADS, REGRESSION]
    parser.add_argument("--loads", nargs="+", choices=loads, default=["pgbench", "hot", "bulk"], metavar="LOAD", help=", ".join(loads))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE",
                        help=", ".join(SIDES) + "; all if not named, and stock always")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="directory that keeps the loads' WAL; made when missing")
    parser.add_argument("--size", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, default=0, help="sessions that read meanwhile")
    parser.add_argument("--busy", type=int, default=0, help="processes that want processors meanwhile")
    parser.add_argument("--delay", type=int, default=0, metavar="US", help="each request of the device takes so long")
    parser.add_argument("--smoke", action="store_true", help="one round of small fixtures")
    parser.add_argument("--save", type=Path, metavar="DIR",
                        help="keep every run in DIR/DATE-readable.json; -readers, -busy, -delay stand before the dot if they were given")
    args = parser.parse_args(argv)
    args.sides = [side for side in SIDES if side in {"stock", *args.sides}]
    if args.smoke:
        args.rounds, args.size, args.fixtures = 1, SMOKE_SIZE, args.fixtures / "smoke"
    when = datetime.now(timezone.utc)
    results = {}
    for name in args.loads:
        fixture = args.fixtures / name
        info = make_regression(fixture) if name == REGRESSION else make(fixture, name, args.size)
        with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
            results[name] = info, rounds(name, fixture, info, args, Volume(scratch))
    text = table(results, args.sides, args.readers)
    print("\n" + text)
    if args.save:
        result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                      command=" ".join(["python3 -m bench.readable", *map(nameless, argv)]),
                      runs={name: runs for name, (_, runs) in results.items()})
        name = f"{when:%Y-%m-%d}-readable" + ("-readers" if args.readers else "") + ("-busy" if args.busy else "") + ("-delay" if args.delay else "")
        (args.save / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.save / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
