"""How long after its arrival a commit is replayed, while a primary is being written to.

    python3 -m bench.follow [--rates 200,1000,5000] [--seconds 20] [--save FILE] [-- OPTIONS OF walrider replay]

pgbench commits at a given rate; we receive the WAL as pg_receivewal does, over the replication protocol into
preallocated .partial segments, and note the time just before each write: that is the arrival of all commits in it.
`walrider replay --follow --positions` replays that directory and says when it stood where.  Latency is from the
arrival of a commit's last byte to the first position at or behind its end, each commit counted.  With --receiver
pg_receivewal the real program writes, and the arrival is when this process, woken by inotify as well, has read the commit's
page: a little late, by as much as such a wake-up takes.
"""

import argparse
import bisect
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from bench.receive import Observer, Receiver
from bench.replay import commit, machine
from tests.lab import install
from tests.lab.server.cluster import PgCluster, parse_lsn
from tests.lab.waiting import wait_for
from tests.lab.walrider import start, walrider

CLIENTS = 4


def cpu_seconds(pid):
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def positions(path):
    """(LSN, time) as walrider printed them."""
    lines = (line.split() for line in path.read_text().splitlines() if line.startswith(tuple("0123456789ABCDEF")))
    return [(parse_lsn(lsn), float(at)) for lsn, at in lines]


def commits(wal, first):
    """Ends of commit records from a position on."""
    listing = walrider("wal", "dump", wal, "--rmgr", "Transaction", "--start", first).stdout
    records = (json.loads(line) for line in listing.splitlines())
    return [parse_lsn(record["end_lsn"]) for record in records if record["type"].startswith("COMMIT")]


def measure(load, seconds, pid):
    """Run a load; its time span, and the processor time of `pid` in it."""
    before, begun = cpu_seconds(pid), time.time()
    tps = load(seconds)
    ended = time.time()
    return dict(begun=begun, ended=ended, tps=tps, cpu=(cpu_seconds(pid) - before) / (ended - begun))


def latencies(ends, arrived, replayed, phase):
    """Milliseconds from arrival to replay of the commits that arrived in a phase."""
    arrived_lsns, replayed_lsns = [lsn for lsn, _ in arrived], [lsn for lsn, _ in replayed]
    found = []
    for end in ends:
        came, done = bisect.bisect_left(arrived_lsns, end), bisect.bisect_left(replayed_lsns, end)
        if came < len(arrived) and phase["begun"] <= arrived[came][1] < phase["ended"]:
            found.append(1000 * (replayed[done][1] - arrived[came][1]))
    return sorted(found)


def percentiles(values):
    """What is reported of a distribution."""
    at = lambda share: round(values[min(len(values) - 1, int(share * len(values)))], 3)
    return dict(commits=len(values), p50_ms=round(statistics.median(values), 3), p90_ms=at(0.90), p99_ms=at(0.99),
                p999_ms=at(0.999), max_ms=round(values[-1], 3))


def run(scratch, args):
    """All rates against one primary; a result for each."""
    wal = scratch / "wal"
    wal.mkdir()
    with PgCluster.init(scratch / "primary", conf="max_wal_size = 8GB\nwal_sender_timeout = 0\nwal_keep_size = 1GB\n") as server:
        server.start()
        server.pgbench("-i", "-s", str(args.scale), "-q")
        receiver = (Observer if args.receiver == "pg_receivewal" else Receiver)(server, wal)
        server.basebackup(scratch / "ours")
        first = server.lsn()
        printed = scratch / "positions"
        follower = start("replay", "--data-dir", scratch / "ours", "--wal", wal, "--follow", "--positions", *args.options,
                         stdout=printed.open("w"))
        stands_at = lambda: (positions(printed) or [(0, 0)])[-1][0]
        flushed = lambda: parse_lsn(server.value("SELECT pg_current_wal_flush_lsn()"))
        caught_up = lambda: wait_for(lambda: follower.poll() is not None or stands_at() >= flushed(), "replay of all that was flushed")

        def load(rate):
            def at_rate(seconds):
                said = server.pgbench("-N", "-n", "-c", str(CLIENTS), "-j", "2", "-R", str(rate), "-T", str(seconds))
                return next(float(line.split()[2]) for line in said.splitlines() if line.startswith("tps"))
            return at_rate

        try:
            caught_up()
            phases = {}
            for rate in args.rates:
                phases[rate] = measure(load(rate), args.seconds, follower.pid)
                caught_up()
            idle = measure(lambda seconds: time.sleep(seconds), args.seconds / 2, follower.pid)
            follower.send_signal(signal.SIGTERM)
            _, said = follower.communicate(timeout=60)
            assert follower.returncode == 0, said
        finally:
            follower.kill()
            follower.wait()
        receiver.stop()
    ends, arrived, replayed = commits(wal, first), receiver.arrived, positions(printed)
    rates = [dict(rate=rate, tps=round(phase["tps"]), cpu_share=round(phase["cpu"], 4),
                  **percentiles(latencies(ends, arrived, replayed, phase))) for rate, phase in phases.items()]
    return dict(rates=rates, idle_cpu_share=round(idle["cpu"], 5))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.follow", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=lambda text: [int(rate) for rate in text.split(",")], default=[200, 1000, 5000],
                        help="commits a second")
    parser.add_argument("--seconds", type=int, default=20, help="for each rate")
    parser.add_argument("--scale", type=int, default=10, help="of pgbench")
    parser.add_argument("--receiver", choices=["own", "pg_receivewal"], default="own")
    parser.add_argument("--save", type=Path, help="keep the result in this file")
    parser.add_argument("options", nargs="*", help="options of walrider replay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measured = run(Path(scratch), args)
    result = dict(when=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), commit=commit(),
                  postgresql=install.version(), command=" ".join(["python3 -m bench.follow", *sys.argv[1:]]), **measured)
    text = json.dumps(result, indent=1)
    print(text)
    if args.save:
        args.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
