"""How fast a backlog is applied: `walrider logical apply` beside PostgreSQL's own subscriber.

    python3 -m bench.logical_apply [--loads tpcb,wide,hot,long] [--rounds 3] [--size 1.0] [--jobs 4] [--conditions direct,latency]
                                   [--live SECONDS] [--save DIR]

The load is over before anybody reads it.  Every run has a slot of its own, made before the load, and a fresh copy of the target.
Measured: from the start of the subscriber until the load's last transaction is visible on the target; the processor time of the
target's processes and Walrider's together, and the publisher's.  Contenders take turns in each round; the figures are medians.

*Native*: a subscription with streaming = off, or parallel.  *Latency*: one millisecond for a round trip, in front of the target for
Walrider, and in front of the publisher for the subscriber, which is part of the target.  fsync is on, commits of the target are
asynchronous for both, as is native's default.  *Live*: pgbench with two clients goes on meanwhile, as fast as it can; measured is how
long after its end the target has the last transaction.

Not measured: many tables, more cores than this machine has.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from bench.replay import commit, machine
from tests.lab import walrider
from tests.lab.faults.proxy import Proxy
from tests.lab.server.cluster import PgCluster, copy_tree, run
from tests.lab.install import program

SETTINGS = """
wal_level = logical
fsync = on
autovacuum = off
shared_buffers = 256MB
max_wal_size = 8GB
max_replication_slots = 60
max_wal_senders = 20
max_connections = 100
wal_retrieve_retry_interval = 100ms
"""
COLUMNS = 20
WIDE = "CREATE TABLE wide (id bigint PRIMARY KEY, " + ", ".join(f"c{n} text" for n in range(COLUMNS)) + ");"
TABLES = WIDE + """
CREATE SEQUENCE wide_id;
CREATE TABLE hot (id int PRIMARY KEY, n bigint);
CREATE TABLE long (id bigint PRIMARY KEY, v text, n int);
CREATE TABLE mark (id int PRIMARY KEY);
INSERT INTO hot VALUES (1, 0);
"""
SCRIPTS = {
    "wide": "INSERT INTO wide SELECT nextval('wide_id'), " + ", ".join(["repeat('x', 20)"] * COLUMNS) + " FROM generate_series(1, 5);\n",
    "hot": "UPDATE hot SET n = n + 1 WHERE id = 1;\n",
}
# Transactions at size 1; of `long`, rows of each of its four transactions.
SIZES = dict(tpcb=40_000, wide=20_000, hot=40_000, long=100_000)
SUMS = ("SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT count(*) FROM pgbench_history), (SELECT count(*) FROM wide), "
        "(SELECT n FROM hot), (SELECT count(*) FROM long WHERE n = 1)")
CONTENDERS = ("native off", "native parallel", "walrider")


def write(server, load, size):
    """Run a load; returns the rows that it changes."""
    count = max(4, int(SIZES[load] * size))
    if load == "long":
        for number in range(2):
            server.psql(f"INSERT INTO long SELECT i, md5(i::text), 0 FROM generate_series({number * count}, {number * count + count - 1}) i")
            server.psql(f"UPDATE long SET n = n + 1 WHERE id >= {number * count}")
        rows = 4 * count
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(SCRIPTS.get(load, ""))
            file.flush()
            script = ["-f", file.name] if load in SCRIPTS else []
            server.pgbench("-n", "-c", 4, "-j", 2, "-t", count // 4, *script)
        rows = count * dict(tpcb=4, wide=5, hot=1)[load]
    server.psql("INSERT INTO mark VALUES (1)")
    return rows


def wait_marked(target):
    """Until the load's last transaction is there."""
    target.psql("DO $$ BEGIN WHILE NOT EXISTS (SELECT FROM mark) LOOP PERFORM pg_sleep(0.005); END LOOP; END $$", timeout=900)


def reaped(server):
    """Seconds of processor of the server's processes that have ended, its walsenders among them."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def cpu():
    """Seconds of processor of all children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def applying(publisher, target, contender, slot, jobs, far_port=None):
    """A subscriber that applies the slot to the target; it ends, and what it was with it.  `far_port` leads to the server that is far."""
    if contender == "walrider":
        source, sink = (f"host=127.0.0.1 port={port} user=postgres dbname=postgres" for port in (publisher.port, far_port or target.port))
        process = subprocess.Popen([walrider.binary(), "logical", "apply", "--source", source, "--target", sink, "-S", slot,
                                    "-P", "p", "--jobs", str(jobs), "--log-level", "warn"])
        yield
        process.terminate()
        process.wait(60)
    else:
        source = f"host=127.0.0.1 port={far_port or publisher.port} user=postgres dbname=postgres"
        streaming = contender.split()[1]
        target.psql(f"CREATE SUBSCRIPTION s CONNECTION '{source}' PUBLICATION p WITH (create_slot = false, copy_data = false, "
                    f"slot_name = '{slot}', streaming = {streaming})")
        yield
        target.psql("ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s")


def apply_once(publisher, template, contender, slot, latency, scratch, jobs):
    """One run: seconds, and the processor time of both programs."""
    target = PgCluster(copy_tree(template, scratch / "target"))
    before, sent = cpu(), reaped(publisher)
    with target.start(listen_addresses="127.0.0.1"), Proxy(target.port if contender == "walrider" else publisher.port) as proxy:
        if latency:
            proxy.delay(up_ms=0.5, down_ms=0.5)
        begun = time.monotonic()
        with applying(publisher, target, contender, slot, jobs, proxy.port if latency else None):
            wait_marked(target)
            seconds = time.monotonic() - begun
        sums = target.psql(SUMS)[0]
        target.stop()
    run(["rm", "-rf", scratch / "target"])
    return dict(seconds=seconds, cpu_seconds=cpu() - before, publisher_cpu_seconds=reaped(publisher) - sent), sums


def live_once(template, contender, scratch, args):
    """A load of pgbench that goes on meanwhile, as fast as it can: transactions, and how long after its end the target has the last."""
    publisher, target = (PgCluster(copy_tree(template, scratch / name)) for name in ("publisher", "target"))
    with publisher.start(listen_addresses="127.0.0.1"), target.start(listen_addresses="127.0.0.1"):
        publisher.psql("CREATE PUBLICATION p FOR ALL TABLES")
        publisher.psql("SELECT pg_create_logical_replication_slot('live', 'pgoutput')")
        with applying(publisher, target, contender, "live", args.jobs):
            time.sleep(1)
            publisher.pgbench("-n", "-c", 2, "-j", 1, "-T", args.live)
            publisher.psql("INSERT INTO mark VALUES (1)")
            ended = time.monotonic()
            wait_marked(target)
            lag = time.monotonic() - ended
        transactions = int(publisher.value("SELECT count(*) FROM pgbench_history"))
        assert target.psql(SUMS) == publisher.psql(SUMS), contender
        target.stop()
        publisher.stop()
    run(["rm", "-rf", scratch / "publisher", scratch / "target"])
    return dict(transactions=transactions, lag_seconds=lag)


def measure_live(args, scratch):
    """Rounds of that, in turn."""
    with PgCluster.init(scratch / "template", conf=SETTINGS).start() as server:
        run([program("pgbench"), "-i", "-q", "-s", str(args.scale), "postgres"], env=server.environment())
        server.psql(TABLES)
        server.stop()
    found = {contender: [] for contender in args.contenders.split(",")}
    for _ in range(args.rounds):
        for contender, done in found.items():
            done.append(live_once(server.data_dir, contender, scratch, args))
            print(f"live {contender}: {done[-1]['transactions'] / args.live:.0f} transactions/s, {done[-1]['lag_seconds']:.2f} s behind at its end",
                  flush=True)
    return [dict(contender=contender, results=done) for contender, done in found.items()]


def measure(load, args, scratch):
    """All rounds of a load, in every condition."""
    publisher = PgCluster.init(scratch / f"publisher-{load}", conf=SETTINGS)
    conditions = args.conditions.split(",")
    runs = {(condition, contender): [] for condition in conditions for contender in args.contenders.split(",")}
    with publisher.start(listen_addresses="127.0.0.1"):
        run([program("pgbench"), "-i", "-q", "-s", str(args.scale), "postgres"], env=publisher.environment())
        publisher.psql(TABLES)
        publisher.psql("CHECKPOINT")
        publisher.stop()
        template = copy_tree(publisher.data_dir, scratch / f"target-{load}")
        publisher.start(listen_addresses="127.0.0.1")
        publisher.psql("CREATE PUBLICATION p FOR ALL TABLES")
        slots = [f"s{number}" for number in range(args.rounds * len(runs))]
        for slot in slots:
            publisher.psql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        rows = write(publisher, load, args.size)
        expected = None
        for number in range(args.rounds):
            for (condition, contender), done in runs.items():
                result, sums = apply_once(publisher, template, contender, slots.pop(), condition == "latency", scratch, args.jobs)
                expected = expected or sums
                assert sums == expected, f"{contender}: {sums}, not {expected}"
                done.append(result)
                print(f"{load} {condition} {contender}: {result['seconds']:.2f} s, {rows / result['seconds']:.0f} rows/s, "
                      f"cpu {result['cpu_seconds']:.2f} s, the publisher's {result['publisher_cpu_seconds']:.2f} s", flush=True)
        publisher.stop()
    run(["rm", "-rf", publisher.data_dir, template])
    return dict(load=load, rows=rows, runs=[dict(condition=condition, contender=contender, results=done)
                                            for (condition, contender), done in runs.items()])


def live_table(live, seconds):
    """Medians, as Markdown."""
    lines = ["| subscriber | transactions/s of the load | seconds behind at its end |", "|---|---|---|"]
    for one in live:
        rate, lag = (statistics.median(run[what] for run in one["results"]) for what in ("transactions", "lag_seconds"))
        lines.append(f"| {one['contender']} | {rate / seconds:.0f} | {lag:.2f} |")
    return "\n".join(lines)


def table(results):
    """Medians, as Markdown."""
    lines = ["| load | condition | subscriber | seconds | rows/s | processor s | publisher's | against native off |", "|---|---|---|---|---|---|---|---|"]
    for result in results:
        median = {(r["condition"], r["contender"]): statistics.median(one["seconds"] for one in r["results"]) for r in result["runs"]}
        for r in result["runs"]:
            seconds = median[r["condition"], r["contender"]]
            base = median.get((r["condition"], "native off"))
            ratio = f"{base / seconds:.2f}" if base else ""
            used, sent = (statistics.median(one[what] for one in r["results"]) for what in ("cpu_seconds", "publisher_cpu_seconds"))
            lines.append(f"| {result['load']} | {r['condition']} | {r['contender']} | {seconds:.2f} | {result['rows'] / seconds:.0f} | "
                         f"{used:.2f} | {sent:.2f} | {ratio} |")
    return "\n".join(lines)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", default=",".join(SIZES))
    parser.add_argument("--conditions", default="direct,latency")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, default=1.0)
    parser.add_argument("--scale", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--live", type=int, default=10, metavar="SECONDS", help="of a load that goes on meanwhile; 0: none")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.smoke:
        args.size, args.rounds, args.scale, args.live = 0.005, 1, 1, 1
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        results = [measure(load, args, Path(scratch)) for load in filter(None, args.loads.split(","))]
        live = measure_live(args, Path(scratch)) if args.live else []
    print(table(results))
    print(f"\n{live_table(live, args.live)}")
    if args.save:
        kept = dict(what="logical_apply", date=datetime.now(timezone.utc).isoformat(), machine=machine(), commit=commit(),
                    rounds=args.rounds, size=args.size, jobs=args.jobs, results=results, live=live, live_seconds=args.live)
        path = args.save / f"{datetime.now(timezone.utc):%Y-%m-%d}-logical-apply.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
