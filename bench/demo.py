"""`make demo`: two restored backups recovered by stock PostgreSQL and by Walrider, timed, compared and checked.

    python3 -m bench.demo --report DIR [--scale N] [--seconds N] [--seed N]

For pgbench's WAL and for that of the mixed load, each: the time from the command to the first write, with fsync on for both
sides; then both replay once more, and the directories are compared page by page, and ours is examined by PostgreSQL.  Exits 1
if anything differs.  Run it through tests.lab.as_user when root.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.lab import install
from tests.lab.loads import load, load_server
from tests.lab.oracle.records import waldump_types
from tests.lab.progress import Progress
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, ServerError, parse_lsn, run
from tests.lab.walrider import binary, walrider

from . import recover
from .report import write_report

BALANCES = """SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers),
                     (SELECT sum(bbalance) FROM pgbench_branches), (SELECT sum(delta) FROM pgbench_history)"""
SIDES = {"PostgreSQL": "PostgreSQL", "Walrider": "replay"}


def say(text=""):
    """A line of the demo's own output."""
    print(text, flush=True)


class Pgbench:
    """pgbench's WAL."""

    name = "pgbench"

    def __init__(self, directory, args):
        self.directory, self.args = directory, args
        self.server = PgCluster.init(directory / "primary", directory / "archive", conf=load_server.PGBENCH_SETTINGS)

    def make(self):
        """The primary: a base backup, pgbench, a clean stop; returns info and the WAL's length in bytes."""
        server, args = self.server.start(), self.args
        progress = Progress("primary: pgbench -i")
        progress.update(0, 1, f"scale {args.scale}")
        server.pgbench("-i", "-q", "-s", str(args.scale), "--no-vacuum")
        server.psql("VACUUM (ANALYZE)")
        progress.done(f"scale {args.scale}")
        server.basebackup(self.directory / "backup")
        start = parse_lsn(server.lsn())
        progress = Progress("primary: pgbench")
        said = load.run_for(server, progress, args.scale, args.clients, args.seconds, args.seed)
        progress.done(f"{args.clients} clients")
        self.about = (f"scale {args.scale}, {args.clients} clients, {args.seconds} s; the primary made "
                      f"{float(said.split('tps = ')[1].split()[0]):,.0f} transactions/s")
        self.balances = server.psql(BALANCES)[0]
        wal_bytes, expected = parse_lsn(server.lsn()) - start, load.contents(server)
        server.stop("fast")
        server.complete_archive()
        return load.write_info(self.directory, server, {}, expected=expected, left_open=[]), wal_bytes

    def examine(self, server, check):
        """What only this load can check."""
        balances = server.psql(BALANCES)[0]
        check("balances agree", len(set(balances)) == 1 and balances == self.balances, balances[0])


class Mixed:
    """The WAL of the mixed load: every record type, and much DDL."""

    name = "mixed"
    about = "every record type of all resource managers: DDL, indexes, databases, tablespaces, two-phase commit, a crash"

    def __init__(self, directory, args):
        settings = load_server.PGBENCH_SETTINGS
        self.load = load.MixedLoad(directory, rows=4000, seconds=3, seed=args.seed, settings=settings)
        self.server = self.load.server

    def make(self):
        """As above."""
        self.load.prepare()
        self.load.backup()
        start = parse_lsn(self.server.lsn())
        self.load.run_steps()
        wal_bytes = parse_lsn(self.server.lsn()) - start
        return self.load.finish(), wal_bytes

    def examine(self, server, check):
        """As above."""
        prepared = sorted(row[0] for row in server.psql("SELECT gid FROM pg_prepared_xacts"))
        check("prepared transactions are still open", prepared == sorted(self.info["left_open"]), ", ".join(prepared))


class Recoveries:
    """One load and what both sides make of it; every check is kept for the report."""

    def __init__(self, load_class, directory, args):
        self.directory = directory / load_class.name
        self.directory.mkdir()
        self.load = load_class(self.directory, args)
        self.name = self.load.name
        self.backup, self.archive = self.directory / "backup", self.directory / "archive"
        self.checks, self.runs = [], {}

    def check(self, name, good, detail=""):
        """Keep the outcome of one check and show it."""
        self.checks.append((f"{self.name}: {name}", bool(good), str(detail)))
        say(f"  {'ok    ' if good else 'FAILED'} {name}{': ' + str(detail) if detail else ''}")

    def record(self):
        """Make the WAL, and count its records and transactions with PostgreSQL's own pg_waldump."""
        try:
            self.info, self.wal_bytes = self.load.make()
        finally:
            self.load.server.kill()
        self.load.info = self.info
        types = waldump_types(self.archive)
        self.records = sum(entry["count"] for entry in types.values())
        self.transactions = sum(types[("Transaction", name)]["count"] for name in (
            "COMMIT", "ABORT", "COMMIT_PREPARED", "ABORT_PREPARED") if ("Transaction", name) in types)

    def measure(self, rounds):
        """From the command to the first write: the sides take turns; the median round of each counts.

        No directory is removed before all is done: for minutes ext4 gives no inode again that was removed, and looks at each
        of them whenever a file is made, which took both sides twice as long.
        """
        progress = Progress(f"{self.name}: first write")
        found = {name: [] for name in SIDES}
        for number in range(rounds):
            for name in sorted(SIDES, reverse=number % 2):
                progress.update(number, rounds, name)
                data_dir = self.directory / f"measured-{name}-{number}"
                server = recover.prepare(self.backup, self.archive, data_dir, ("checkpoint", self.info["final_checkpoint"]),
                                         fixture=self.directory)
                os.sync()
                with server:
                    wal = self.archive if name == "Walrider" else None
                    found[name].append(recover.recover(SIDES[name], server, wal, max_connections="80",
                                                       max_worker_processes="10", max_prepared_transactions="30"))
        progress.done(f"{rounds} rounds")
        for name, runs in found.items():
            self.runs[name] = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]

    def ratio(self, what):
        """How many times as fast as PostgreSQL."""
        return self.runs["PostgreSQL"][what] / max(self.runs["Walrider"][what], 1e-3)

    def prove(self):
        """Both replay to the shutdown checkpoint; page by page; PostgreSQL takes ours over and examines it."""
        progress = Progress(f"{self.name}: compare")
        progress.update(0, 1)
        stock, ours = self.directory / "stock", self.directory / "ours"
        recovery.stock_replay(self.backup, self.archive, stock, self.info["final_checkpoint"], fixture=self.directory)
        recovery.copy_backup(self.backup, ours)
        recovery.tablespace_links(self.directory, ours)
        walrider("replay", "--data-dir", ours, "--wal", self.archive).expect()
        recovery.pin_tablespaces(ours)
        result = walrider("compare", ours, stock)
        progress.done()
        self.check("every page equals stock's", result.code == 0 and result.json.get("differences") == 0,
                   f"{result.json.get('pages', 0)} pages of {result.json.get('relations', 0)} relations, "
                   f"{result.json.get('differences', '?')} differences")
        if result.code != 0:
            say(f"{result.stderr}{result.json.get('first', '')}")
        self.take_over(ours)

    def take_over(self, data_dir):
        """PostgreSQL started on our directory, promoted, and examined."""
        server = PgCluster(data_dir)
        server.configure("archive_mode = off", "postgresql.auto.conf")
        progress = Progress(f"{self.name}: PostgreSQL")
        with server:
            progress.update(0, 4, "start and promote")
            recovery.recover_and_promote(server)
            self.check("PostgreSQL starts on our directory and promotes", True)
            self.load.examine(server, self.check)
            progress.update(1, 4, "table contents")
            contents = load.contents(server)
            progress.update(2, 4, "pg_amcheck --heapallindexed")
            amcheck = run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--install-missing", "-j", "2"],
                          env=server.environment(), check=False)
            server.stop()
        progress.update(3, 4, "pg_checksums")
        checksums = run([install.program("pg_checksums"), "--check", "-D", data_dir], check=False)
        progress.done()
        tables = sum(len(found) for found in contents.values())
        wrong = [f"{name}.{table}" for name, found in self.info["expected"].items()
                 for table in found if contents.get(name, {}).get(table) != found[table]]
        rows = sum(count for found in contents.values() for count, _ in found.values())
        self.check("row counts and hashes are the primary's", contents == self.info["expected"],
                   f"{rows} rows, {tables} tables, {len(contents)} databases" + (f"; differ: {wrong[:5]}" if wrong else ""))
        self.check("pg_amcheck --heapallindexed, all databases", amcheck.returncode == 0,
                   f"{len(contents)} databases" if amcheck.returncode == 0 else (amcheck.stdout + amcheck.stderr)[:400])
        self.check("pg_checksums", checksums.returncode == 0, checksums.stderr.strip()[:400])

    def summary(self):
        """The figures, as text."""
        say(f"\n{self.name}: {self.wal_bytes / 1e6:.0f} MB of WAL, {self.records:,} records, {self.transactions:,} transactions")
        for title, what in (("command to first write", "seconds"), ("redo alone", "redo_seconds")):
            figures = ", ".join(f"{name} {run[what]:.2f} s" for name, run in self.runs.items())
            say(f"  {title:<23} {self.ratio(what):5.2f}x   ({figures})")
        stages = self.runs["Walrider"]["stages"] or {}
        say("  where ours goes         " + ", ".join(f"{name} {value:.2f} s" for name, value in stages.items() if value >= 0.005))


class Demo:
    """Both loads."""

    def __init__(self, directory, args):
        self.args = args
        self.recoveries = [Recoveries(load_class, directory, args) for load_class in (Pgbench, Mixed)]

    def run(self):
        """All of it; whether all is well."""
        for one in self.recoveries:
            one.record()
            one.measure(self.args.rounds)
            one.prove()
        for one in self.recoveries:
            one.summary()
        return all(good for _, good, _ in self.checks())

    def checks(self):
        """Those of both."""
        return [check for one in self.recoveries for check in one.checks]

    def facts(self):
        """For the report."""
        return dict(seed=self.args.seed, postgresql=install.version(), cpus=os.cpu_count(), machine=machine(), checks=self.checks(),
                    loads=[dict(name=one.name, about=one.load.about, wal_bytes=one.wal_bytes, records=one.records,
                                transactions=one.transactions, runs=one.runs, ratio=one.ratio("seconds"),
                                redo_ratio=one.ratio("redo_seconds")) for one in self.recoveries])


def machine():
    """Processor and memory, as far as the system tells."""
    try:
        model = next(line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {memory:.0f} GiB"


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.demo", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", required=True, help="directory for index.html")
    parser.add_argument("--scale", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not Path(binary()).exists():
        sys.exit(f"error: {binary()} does not exist: run `make build`")
    begun = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="demo-"))
    try:
        demo = Demo(directory, args)
        good = demo.run()
        page = write_report(Path(args.report), demo.facts())
        say(f"\nreport: {page.name} in demo-report/; {time.monotonic() - begun:.0f} s in all")
    except (ServerError, AssertionError, KeyError, OSError) as error:
        sys.exit(f"error: {error}")
    finally:
        if os.environ.get("WALRIDER_KEEP") == "1":
            print(f"kept: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
