"""How far behind a hot standby is while WAL comes in, and what commits wait for it: PostgreSQL alone, and with early redo.

    python3 -m bench.readable_live [--fixtures DIR] [--rounds N] [--loads LOAD...] [--size SHARE] [--pace FACTOR] [--readers N]
                                   [--feedback on off] [--save DIR]

*Paced*: the WAL of a load, recorded before, appears in the standby's pg_wal segment by segment, at FACTOR times the speed at which
PostgreSQL has just been seen to replay it.  Measured: bytes that are there and not replayed, at most and on average, and how long after the
last segment all is replayed; with pgbench's SELECTs on the standby meanwhile, if there are readers.

*Commits*: a primary on the same machine under pgbench, four clients whose commits wait until the standby has applied them.  With --feedback
a session counts rows of the largest table there meanwhile, as in bench.readable, with hot_standby_feedback as named; without feedback it
meets conflicts, for which replay waits as long as in bench.readable.

Not measured: a primary that writes more than PostgreSQL can replay; on two cores it does not have the processors for that.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from tests.lab import install
from tests.lab.server import recovery
from tests.lab.server.cluster import parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.standby import Stock, wait_streaming
from tests.lab.waiting import wait_for

from .loads import LOADS, make
from .measure import MB, link_wal, segments
from .readable import CONFLICT_DELAY, EARLY, SETTINGS, catch_up, reading, replayed, watching
from .replay import FIXTURES, commit, machine, nameless

SIDES = {"stock": {}, "1 worker": {**EARLY, "walrider.redo_workers": "1"}}
PRIMARY = "shared_buffers = 256MB\nmax_wal_size = 8GB\nmin_wal_size = 1GB\nautovacuum = off\nmax_connections = 100\nsynchronous_standby_names = ''\n"
SEGMENT = 16 * MB
CLIENTS = 4


def prepared(fixture, data_dir):
    """A standby with no WAL but what its backup needs to begin."""
    server = recovery.prepare(fixture / "backup", fixture / "archive", data_dir, signal="standby.signal")
    server.configure("restore_command = ''", "postgresql.auto.conf")
    return server


def speed(fixture, info, settings, scratch):
    """Bytes a second at which PostgreSQL replays it when all of it is there."""
    server = prepared(fixture, scratch / "speed")
    link_wal(fixture, server.data_dir)
    end = parse_lsn(info["final_checkpoint"])
    try:
        seconds = catch_up(server, end, settings)["seconds"]
        server.stop()
    finally:
        server.kill()
    recovery.discard(server.data_dir)
    return info["wal_bytes"] / seconds


def paced(fixture, info, settings, pace, readers, data_dir):
    """Replay WAL that comes at so many bytes a second."""
    server = prepared(fixture, data_dir)
    files, end = segments(fixture / "archive"), parse_lsn(info["final_checkpoint"])
    wal = [file for file in files if not file.name.endswith(".history")]

    def show(file):
        os.link(file, server.data_dir / "pg_wal" / file.name)
        return min(end, (int(file.name[8:16], 16) << 32) + (int(file.name[16:], 16) + 1) * SEGMENT)

    for file in set(files) - set(wal):
        show(file)
    behind, waiting = [], iter(wal)
    with ExitStack() as stack:
        stack.callback(server.kill)
        show(next(waiting))
        server.launch(**settings, wal_retrieve_retry_interval="5ms")
        while not server.log_matches("consistent recovery state reached"):
            if (file := next(waiting, None)) is None:
                raise SystemExit(f"error: not consistent with all WAL\n{server.log_tail()}")
            there = show(file)
            time.sleep(0.05)
        server.wait_ready(60)
        if readers:
            reader = server.pgbench_start("-n", "-S", "-c", readers, "-T", 600)
            stack.callback(reader.wait)
            stack.callback(reader.terminate)
        session = stack.enter_context(watching(server))
        wait_for(lambda: replayed(session) >= there - SEGMENT, server.log_tail, timeout=60)
        began = time.monotonic()
        for number, file in enumerate(waiting, 1):
            while time.monotonic() < began + number * SEGMENT / pace:
                behind.append(max(0, there - replayed(session)))
                time.sleep(0.01)
            there = show(file)
        last = time.monotonic()
        wait_for(lambda: replayed(session) >= end, server.log_tail, timeout=600)
        after = time.monotonic() - last
    recovery.discard(server.data_dir)
    return dict(seconds_after=after, behind_most=max(behind), behind_average=statistics.mean(behind))


def commits(primary, name, settings, seconds, work, feedback=None):
    """pgbench whose commits wait for this standby: milliseconds of a transaction, and what a reader there had, where feedback is on or off."""
    directory = standby.clone(primary, work / name.replace(" ", "-"), name=name.replace(" ", ""))
    with Stock(directory, hot_standby="on", fsync="on", hot_standby_feedback=feedback or "off", wal_receiver_status_interval="1s",
               max_standby_streaming_delay=CONFLICT_DELAY, **settings).start() as follower:
        wait_streaming(primary, name.replace(" ", ""))
        primary.psql(f"ALTER SYSTEM SET synchronous_standby_names = '\"{name.replace(' ', '')}\"'")
        primary.psql("ALTER SYSTEM SET synchronous_commit = remote_apply")
        primary.psql("SELECT pg_reload_conf()")
        time.sleep(0.5)
        with reading(follower.server, 1 if feedback else 0) as crowd:
            said = primary.pgbench("-n", "-c", str(CLIENTS), "-j", "2", "-T", str(seconds))
        primary.psql("ALTER SYSTEM RESET ALL", options="-c synchronous_commit=local")
        primary.psql("SELECT pg_reload_conf()", options="-c synchronous_commit=local")
    recovery.discard(directory)
    return dict(side=name, feedback=feedback, milliseconds=float(re.search(r"latency average = ([\d.]+) ms", said).group(1)),
                reads=sum(crowd.counts.values()), conflicts=sum(crowd.conflicts.values()))


def waited(runs, side, feedback, seconds):
    """What `commits` has found on one side, in words."""
    these = [run for run in runs if (run["side"], run["feedback"]) == (side, feedback)]
    found = [run["milliseconds"] for run in these]
    line = (f"remote_apply, {CLIENTS} clients  {side:<9} {statistics.median(found):.2f} ms a transaction "
            f"({min(found):.2f}-{max(found):.2f})")
    if feedback:
        line += (f"; feedback {feedback}, a reader: {sum(run['reads'] for run in these) / seconds / len(these):.0f} answers a second, "
                 f"{statistics.mean(run['conflicts'] for run in these):.1f} conflicts a round")
    return line


def shown(found):
    """What `paced` has found, in words."""
    return (f"at most {found['behind_most'] / 1e6:>5.0f} MB behind, on average {found['behind_average'] / 1e6:>5.0f}; "
            f"all replayed {found['seconds_after']:.2f} s after the last segment")


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.readable_live", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="*", choices=list(LOADS), default=["pgbench", "btree"], metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="directory that keeps the loads' WAL; made when missing")
    parser.add_argument("--size", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=1.3, help="times PostgreSQL's own speed")
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1], help="sessions that read meanwhile, one figure after the other")
    parser.add_argument("--seconds", type=int, default=10, help="of pgbench, for commits; 0: none")
    parser.add_argument("--feedback", nargs="+", choices=["on", "off"], help="have a session read on the standby of `commits`, so")
    parser.add_argument("--save", type=Path, metavar="DIR",
                        help="keep every run in DIR/DATE-readable-live.json, with feedback DATE-readable-feedback.json")
    args = parser.parse_args(argv)
    when, runs, lines = datetime.now(timezone.utc), [], []
    for name in args.loads:
        info = make(args.fixtures / name, name, args.size)
        fixture = args.fixtures / name
        # A session of pgbench's that is cancelled does not come again: replay waits for it as long as PostgreSQL does by itself.
        settings = {**SETTINGS, "max_standby_archive_delay": "30s", "shared_buffers": f"{info['data_bytes'] * 5 // 4 // MB + 256}MB"}
        with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
            for number in range(args.rounds):
                own = speed(fixture, info, settings, Path(scratch))
                for readers in args.readers:
                    for side, more in SIDES.items():
                        found = paced(fixture, info, {**settings, **more}, args.pace * own, readers, Path(scratch) / "paced")
                        runs.append(dict(load=name, round=number, side=side, readers=readers, speed=own, **found))
                        print(f"{name}, {readers} readers, {side}, {args.pace * own / 1e6:.0f} MB/s: {shown(found)}", flush=True)
        for readers in args.readers:
            for side in SIDES:
                these = [run for run in runs if (run["load"], run["side"], run["readers"]) == (name, side, readers)]
                median = {key: statistics.median(run[key] for run in these) for key in ("behind_most", "behind_average", "seconds_after")}
                lines.append(f"{name:<10} {readers} readers  {side:<9} {shown(median)}")
    if args.seconds:
        with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
            work, found = Path(scratch), []
            with standby.make_primary(work / "primary", PRIMARY, wal_segsize_mb=16) as primary:
                standby.start_primary(primary)
                primary.pgbench("-i", "-q", "-s", "10")
                for _ in range(args.rounds):
                    for feedback in args.feedback or [None]:
                        for side, settings in SIDES.items():
                            found.append(commits(primary, side, settings, args.seconds, work, feedback))
                            print(f"remote_apply: {found[-1]}", flush=True)
        lines += [waited(found, side, feedback, args.seconds) for feedback in args.feedback or [None] for side in SIDES]
        runs.append(dict(commits=found))
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    if args.save:
        result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                      command=" ".join(["python3 -m bench.readable_live", *map(nameless, argv)]), runs=runs)
        name = f"{when:%Y-%m-%d}-readable-{'feedback' if args.feedback else 'live'}"
        (args.save / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.save / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
