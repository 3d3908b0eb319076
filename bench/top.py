"""What `walrider top` costs servers: processor time of its session on a primary and on a standby, as a share of a core.

    python3 -m bench.top [--seconds N] [--save DIRECTORY]

A primary of PostgreSQL 18 with one standby and eight clients of pgbench, asked every second; without --wal and with it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.lab import install
from tests.lab.server.cluster import PgCluster, format_lsn
from tests.lab.server.cluster import parse_lsn
from tests.lab.standby import standby, watched
from tests.lab.waiting import wait_for
from tests.lab.walrider import start


def spent(pid):
    """Processor time of a process so far in seconds (`/proc/PID/schedstat`, which counts nanoseconds)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(primary, follower, seconds, *args):
    """Shares of a core."""
    of = "SELECT pid FROM pg_stat_activity WHERE application_name = 'walrider top'"
    program = start("top", "--batch", "--json", "-i", "1s", *args, primary.dsn(), follower.server.dsn())
    try:
        sessions = {name: int(wait_for(lambda: server.psql(of), "the session")[0][0])
                    for name, server in (("primary", primary), ("standby", follower.server))}
        time.sleep(15)      # past the first answers
        everything = lambda: {name: spent(pid) for name, pid in sessions.items()}
        began, before, wal = time.monotonic(), everything(), parse_lsn(primary.lsn())
        time.sleep(seconds)
        after, elapsed = everything(), time.monotonic() - began
        assert program.poll() is None, program.stderr.read()
        return {"wal_bytes_per_second": round((parse_lsn(primary.lsn()) - wal) / elapsed),
                **{f"{name}_share_of_a_core": round((after[name] - before[name]) / elapsed, 5) for name in before}}
    finally:
        program.kill()
        program.wait()


def main():
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="w-") as work:
        work = Path(work)
        template = standby.make_primary(work / "template", wal_segsize_mb=4).data_dir
        with watched.primary_of(template, work) as primary, watched.hot(primary, work) as follower:
            primary.psql("CREATE EXTENSION pg_walinspect")
            primary.pgbench("-i", "-s", "10", "-q")
            load = primary.pgbench_start("-c", "8", "-j", "2", "-R", "300", "-T", str(10 * args.seconds))
            try:
                result = {"server": install.version(), "seconds": args.seconds, "interval_seconds": 1,
                          "plain": measure(primary, follower, args.seconds), "wal": measure(primary, follower, args.seconds, "--wal")}
            finally:
                load.kill()
                load.wait()
    print(json.dumps(result, indent=1))
    if args.save:
        (args.save / f"{time.strftime('%Y-%m-%d')}-top.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
