"""`make demo`: the same WAL replayed by stock PostgreSQL and by Walrider, compared and checked.

    python3 -m bench.demo --report DIR [--scale N] [--seconds N] [--seed N]

Exits 1 if anything differs.  Run it through tests.harness.as_user when root.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import install, load, load_server, recovery
from tests.harness.cluster import PgCluster, ServerError, parse_lsn, run
from tests.harness.progress import Progress
from tests.harness.records import waldump_types
from tests.harness.walrider import binary, walrider

from .report import write_report

BALANCES = """SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers),
                     (SELECT sum(bbalance) FROM pgbench_branches), (SELECT sum(delta) FROM pgbench_history)"""


class Demo:
    """The run, in order; every check is kept for the report."""

    def __init__(self, directory, scale, clients, seconds, seed):
        self.directory = Path(directory)
        self.scale, self.clients, self.seconds, self.seed = scale, clients, seconds, seed
        self.checks = []
        self.runs = []

    def say(self, text=""):
        """A line of the demo's own output."""
        print(text, flush=True)

    def check(self, name, good, detail=""):
        """Keep the outcome of one check and show it."""
        self.checks.append((name, bool(good), str(detail)))
        self.say(f"  {'ok    ' if good else 'FAILED'} {name}{': ' + str(detail) if detail else ''}")
        return good

    def record(self):
        """The primary: a base backup, pgbench, the mixed load, a clean stop."""
        settings = load_server.PGBENCH_SETTINGS
        self.mixed = load.MixedLoad(self.directory, rows=4000, seconds=3, seed=self.seed, settings=settings)
        self.mixed.prepare()
        server = self.mixed.server
        progress = Progress("primary: pgbench -i")
        progress.update(0, 1, f"scale {self.scale}")
        server.pgbench("-i", "-q", "-s", str(self.scale), "--no-vacuum")
        server.psql("VACUUM (ANALYZE)")
        progress.done(f"scale {self.scale}")
        progress = Progress("base backup")
        progress.update(0, 1)
        self.mixed.backup()
        progress.done()
        start = parse_lsn(server.lsn())
        progress = Progress("primary: pgbench")
        said = load.run_for(server, progress, self.scale, self.clients, self.seconds, self.seed)
        progress.done(f"{self.clients} clients")
        self.primary_tps = float(said.split("tps = ")[1].split()[0])
        self.mixed.run_steps()
        self.balances = server.psql(BALANCES)[0]
        self.wal_bytes = parse_lsn(server.lsn()) - start
        self.info = self.mixed.finish()
        self.final = self.info["final_checkpoint"]
        self.archive = self.directory / "archive"
        # Another recovery owns the tablespaces' locations from now on.
        shutil.rmtree(self.directory / "primary")

    def count_transactions(self):
        """Commits and aborts in the WAL, by PostgreSQL's own pg_waldump; the same figure serves both sides."""
        types = waldump_types(self.archive)
        self.records = sum(entry["count"] for entry in types.values())
        self.transactions = sum(types[("Transaction", name)]["count"] for name in (
            "COMMIT", "ABORT", "COMMIT_PREPARED", "ABORT_PREPARED") if ("Transaction", name) in types)

    def add_run(self, name, seconds, total):
        """One side's figures."""
        self.runs.append(dict(name=name, redo_seconds=seconds, total_seconds=total,
                              transactions_per_second=self.transactions / seconds,
                              mb_per_second=self.wal_bytes / seconds / 1e6))

    def replay_stock(self):
        """Stock PostgreSQL, with everything in shared buffers and no fsync: its best case."""
        progress = Progress("replay: PostgreSQL")
        begun = time.monotonic()
        self.stock = self.directory / "stock"
        timings = recovery.stock_replay(self.directory / "backup", self.archive, self.stock, self.final,
                                        fixture=self.directory,
                                        progress=lambda: progress.update(0, 1, f"{time.monotonic() - begun:.0f} s"))
        progress.done()
        self.add_run("PostgreSQL", timings.redo_seconds, timings.total_seconds)

    def replay_ours(self):
        """Walrider, from the same backup and WAL."""
        progress = Progress("replay: Walrider")
        progress.update(0, 1)
        self.ours = recovery.copy_backup(self.directory / "backup", self.directory / "ours")
        recovery.tablespace_links(self.directory, self.ours)
        result = walrider("replay", "--data-dir", self.ours, "--wal", self.archive)
        progress.done()
        if result.code != 0:
            raise ServerError(f"walrider replay: exit {result.code}\n{result.stderr}")
        recovery.pin_tablespaces(self.ours)
        self.result = result.json
        self.add_run("Walrider", result.json["redo_seconds"], result.seconds)

    def compare(self):
        """Page by page."""
        result = walrider("compare", self.ours, self.stock)
        self.check("every page equals stock's", result.code == 0 and result.json.get("differences") == 0,
                   f"{result.json.get('pages', 0)} pages of {result.json.get('relations', 0)} relations, "
                   f"{result.json.get('differences', '?')} differences")
        if result.code != 0:
            self.say(f"{result.stderr}{result.json.get('first', '')}")

    def take_over(self):
        """PostgreSQL started on our directory, promoted, and examined."""
        server = PgCluster(self.ours)
        server.configure("archive_mode = off\n" + recovery.restore_settings(self.archive), "postgresql.auto.conf")
        (self.ours / "recovery.signal").touch()
        progress = Progress("PostgreSQL on our files")
        with server:
            progress.update(0, 5, "start and promote")
            recovery.recover_and_promote(server)
            progress.update(1, 5, "balances")
            balances = server.psql(BALANCES)[0]
            progress.update(2, 5, "table contents")
            contents = load.contents(server)
            prepared = sorted(row[0] for row in server.psql("SELECT gid FROM pg_prepared_xacts"))
            progress.update(3, 5, "pg_amcheck --heapallindexed")
            amcheck = run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--install-missing", "-j", "2"],
                          env=server.environment(), check=False)
            server.stop()
        progress.update(4, 5, "pg_checksums")
        checksums = run([install.program("pg_checksums"), "--check", "-D", self.ours], check=False)
        progress.done()
        self.check("PostgreSQL starts on our directory and promotes", True)
        self.check("balances agree", len(set(balances)) == 1 and balances == self.balances, balances[0])
        tables = sum(len(found) for found in contents.values())
        wrong = [f"{name}.{table}" for name, found in self.info["expected"].items()
                 for table in found if contents.get(name, {}).get(table) != found[table]]
        rows = sum(count for found in contents.values() for count, _ in found.values())
        self.check("row counts and hashes are the primary's", contents == self.info["expected"],
                   f"{rows} rows, {tables} tables, {len(contents)} databases" + (f"; differ: {wrong[:5]}" if wrong else ""))
        self.check("prepared transactions are still open", prepared == sorted(self.info["left_open"]), ", ".join(prepared))
        self.check("pg_amcheck --heapallindexed, all databases", amcheck.returncode == 0,
                   f"{len(contents)} databases" if amcheck.returncode == 0 else (amcheck.stdout + amcheck.stderr)[:400])
        self.check("pg_checksums", checksums.returncode == 0, checksums.stderr.strip()[:400])

    def summary(self):
        """The figures, as text; returns whether all is well."""
        stock, ours = self.runs
        self.ratio = stock["redo_seconds"] / ours["redo_seconds"]
        self.say(f"\n{self.wal_bytes / 1e6:.0f} MB of WAL, {self.records:,} records, {self.transactions:,} transactions"
                 f" (the primary made {self.primary_tps:,.0f} pgbench transactions/s)")
        for side in self.runs:
            self.say(f"  {side['name']:<11} {side['redo_seconds']:7.2f} s redo {side['transactions_per_second']:12,.0f} "
                     f"transactions/s {side['mb_per_second']:8.0f} MB/s   ({side['total_seconds']:.2f} s in all)")
        self.say(f"  ratio       {self.ratio:7.2f}x\n")
        stages = self.result.get("stages", {})
        if stages:
            self.say("  where ours goes: " + ", ".join(f"{name} {value:.2f} s" for name, value in stages.items()))
        return all(good for _, good, _ in self.checks)

    def facts(self):
        """For the report."""
        return dict(scale=self.scale, clients=self.clients, seconds=self.seconds, seed=self.seed,
                    postgresql=install.version(), cpus=os.cpu_count(), machine=machine(), wal_bytes=self.wal_bytes,
                    records=self.records, transactions=self.transactions, primary_tps=self.primary_tps,
                    runs=self.runs, ratio=self.ratio, checks=self.checks, result=self.result)

    def run(self):
        """All of it."""
        try:
            self.record()
            self.count_transactions()
            self.replay_stock()
            self.replay_ours()
            self.compare()
            self.take_over()
            return self.summary()
        finally:
            self.mixed.server.kill()


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
    parser.add_argument("--seconds", type=int, default=45)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not Path(binary()).exists():
        sys.exit(f"error: {binary()} does not exist: run `make build`")
    begun = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="demo-"))
    demo = Demo(directory, args.scale, args.clients, args.seconds, args.seed)
    try:
        good = demo.run()
        page = write_report(Path(args.report), demo.facts())
        demo.say(f"\nreport: {page.name} in demo-report/; {time.monotonic() - begun:.0f} s in all")
    except (ServerError, KeyError, OSError) as error:
        sys.exit(f"error: {error}")
    finally:
        if os.environ.get("WALRIDER_KEEP") == "1":
            print(f"kept: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
