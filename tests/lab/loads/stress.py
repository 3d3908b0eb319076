"""The stress: random work on every kind of index, with vacuum, checkpoints and crashes; replayed, compared, taken over.

    python3 -m tests.lab.loads.stress [--seed N] [--seconds S] [--rounds N] [--only btree,gin]
    python3 -m tests.lab.loads.stress --again DIR       replay and compare what a failed round has left

The seed decides the server's settings, every value and every choice; how sessions interleave it cannot.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.lab import install
from tests.lab.loads import load, stress_load
from tests.lab.loads.stress_tables import EXCLUSION, EXTENSIONS, METHODS
from tests.lab.oracle import stress_checks
from tests.lab.oracle.compare import compare
from tests.lab.seed import seed
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, ServerError
from tests.lab.walrider import replay, start, walrider

ALWAYS = """
autovacuum_naptime = 1s
autovacuum_vacuum_cost_delay = 0
autovacuum_vacuum_threshold = 50
autovacuum_vacuum_scale_factor = 0.02
autovacuum_vacuum_insert_threshold = 200
deadlock_timeout = 50ms
allow_in_place_tablespaces = on
max_prepared_transactions = 60
max_replication_slots = 4
jit = off
"""
WAL_LIMIT_BYTES = 1200 << 20    # of one round; consistency images make it grow by tens of megabytes a second
# Not "all", for PostgreSQL 18.6's own replay ends with "inconsistent page found" at records whose image is not what redo
# makes.  Hash/DELETE: hashbucketcleanup (hash.c) registers the primary bucket page, of which it has a pin but no lock, as not
# changed; its image may hold a tuple whose record comes later.  Gist/DELETE: redo sets F_TUPLES_DELETED
# (gistRedoDeleteRecord, gistxlog.c), gistprunepage (gist.c) does not, gist_mask does not mask it.  So where GiST has images,
# no index scan may mark its tuples dead, which is what makes such records.
IMAGES = ("heap", "heap2", "btree", "gin", "spgist", "brin", "sequence", "generic")
# With full_page_writes = off there is no BRIN: after a crash brin_xlog_insert_update (brin_xlog.c) asks for the block number of
# a page of an index dropped since, which is not there, and PostgreSQL's startup process ends with a segmentation fault.
CRASHES = ("kill", "immediate", "backend")
KEPT = "/var/tmp/walrider-stress"


def choose_environment(rng):
    """The server's settings for a round, and what initdb decides."""
    images = rng.choice(["", "", ",".join(IMAGES), ",".join((*IMAGES, "gist"))])
    segment_mb = rng.choice([1, 4, 16, 64])
    settings = {
        "wal_consistency_checking": images,
        "wal_compression": rng.choice(install.compressions()),
        "wal_log_hints": rng.choice(["on", "off"]),
        # Off, a page that was truncated away and is zero again is not found by redo, which is well; but then the check
        # of images reads it nevertheless and fails on it (verifyBackupPageConsistency, xlogrecovery.c; bufmask.c).
        "full_page_writes": "on" if images else rng.choice(["on", "off"]),
        "wal_level": rng.choice(["replica", "logical"]),
        "max_wal_size": f"{max(rng.choice([32, 64, 200, 1000]), 4 * segment_mb)}MB",
        "min_wal_size": f"{2 * segment_mb}MB",
        "checkpoint_timeout": rng.choice(["30s", "10min"]),
        "checkpoint_completion_target": rng.choice(["0.1", "0.9"]),
        "autovacuum": rng.choice(["on", "on", "off"]),
        "shared_buffers": rng.choice(["4MB", "32MB", "128MB"]),
        "maintenance_work_mem": rng.choice(["1MB", "16MB", "64MB"]),
        "synchronous_commit": rng.choice(["on", "off"]),
        "track_commit_timestamp": rng.choice(["on", "off"]),
        "vacuum_freeze_min_age": rng.choice(["0", "500", "50000000"]),
        "vacuum_freeze_table_age": rng.choice(["1000", "150000000"]),
        "gin_pending_list_limit": rng.choice(["64kB", "4MB"]),
        "default_toast_compression": "pglz",
    }
    return dict(settings=settings, checksums=rng.random() < 0.6, wal_segsize_mb=segment_mb)


def choose_legs(rng, seconds):
    """How the time is divided: [(seconds, how it ends)]; the last one ends in peace."""
    count = rng.choice([2, 3, 3, 4])
    shares = [rng.uniform(0.5, 1.5) for _ in range(count)]
    ends = [rng.choice(["kill", "kill", "immediate", "backend", "fast"]) for _ in range(count - 1)] + ["calm"]
    return [(seconds * share / sum(shares), end) for share, end in zip(shares, ends)]


class Round:
    """One server, its load, and the proof."""

    def __init__(self, directory, seed, seconds=25, methods=METHODS):
        self.directory, self.seed = Path(directory), seed
        self.rng = random.Random(seed)
        self.environment = choose_environment(self.rng)
        self.legs = choose_legs(self.rng, seconds)
        if self.environment["settings"]["full_page_writes"] == "off" and any(end in CRASHES for _, end in self.legs):
            methods = [method for method in methods if method != "brin"]    # see CRASHES
        self.methods = tuple(methods)
        self.backup_at = self.rng.choice([None, self.rng.uniform(0.2, 0.6)])     # a share of the first leg
        self.images = self.environment["settings"]["wal_consistency_checking"]
        self.kills_in_gist = "gist" not in self.images
        self.tables = [table for table in stress_checks.chosen_tables(self.methods)
                       if self.kills_in_gist or table.name != EXCLUSION.name]
        self.log = []
        self.note(f"seed {seed}: {json.dumps(self.environment)}")
        self.note(f"legs {[(round(s, 1), end) for s, end in self.legs]}, backup "
                  f"{'before the load' if self.backup_at is None else f'at {self.backup_at:.0%} of the first'}")

    def note(self, text):
        """Say it now if asked to, and keep it for a failure."""
        self.log.append(f"{time.strftime('%H:%M:%S')} {text}")
        if os.environ.get("WALRIDER_VERBOSE") == "1":
            print(self.log[-1], file=sys.stderr)

    def run(self, proof):
        """All of it; returns what was counted."""
        self.directory.mkdir(parents=True)
        conf = ALWAYS + "".join(f"{name} = '{value}'\n" for name, value in self.environment["settings"].items())
        self.server = PgCluster.init(self.directory / "primary", self.directory / "archive", conf=conf,
                                     checksums=self.environment["checksums"],
                                     wal_segsize_mb=self.environment["wal_segsize_mb"])
        try:
            self.prepare()
            for number, (seconds, end) in enumerate(self.legs):
                self.leg(number, seconds, end)
            info = self.finish()
        finally:
            self.server.kill()
        return proof(self.directory, info, self.rng, self.note)

    def prepare(self):
        """Tables with some rows, in two databases; perhaps the backup."""
        self.prepared = itertools.count()
        server = self.server.start(archive_mode="off", wal_consistency_checking="", wal_compression="off")
        server.psql("CREATE TABLESPACE stress_space LOCATION ''")
        script = "".join(f"CREATE EXTENSION {name};\n" for name in EXTENSIONS) + "CREATE SEQUENCE stress_sequence;\n"
        for table in self.tables:
            script += table.create() + table.insert(1, table.rows // 2, self.seed) + ";\n"
        server.psql(script + "VACUUM (ANALYZE)")
        for table in self.tables:
            server.psql(f"COPY (SELECT {table.expressions('g', 7)} FROM generate_series(1, {table.rows}) g) "
                        f"TO '{self.directory / table.name}.copy'")
        server.psql("CREATE DATABASE other TEMPLATE postgres STRATEGY wal_log")
        server.restart()
        self.scripts = {}
        for table in self.tables:
            for name, (weight, text) in stress_load.scripts(table, self.directory / f"{table.name}.copy").items():
                self.scripts[name] = weight
                (self.directory / f"{name}.sql").write_text(text + "\n")
        if self.backup_at is None:
            server.basebackup(self.directory / "backup")
        self.note(f"prepared, {server.lsn()}")

    def weights(self):
        """Each leg has its own taste: some of the scripts, some of them often."""
        chosen = {name: max(1, int(10 * weight * self.rng.choice([0.3, 1, 1, 3]))) for name, weight in self.scripts.items()
                  if self.rng.random() < 0.6}
        return chosen or {name: 1 for name in self.scripts}

    def clients(self, database, count, seconds, images):
        """pgbench clients; large changes only without images, which would be most of the WAL and of the time."""
        weights = self.weights()
        if self.images and images:
            weights = {name: weight for name, weight in weights.items() if not name.endswith(stress_load.LARGE)}
        elif self.images:
            database = f"dbname={database} options='-c wal_consistency_checking='"
        variables = {"least": 0 if self.kills_in_gist else 1}
        return stress_load.Clients(self.server, database, self.directory, weights, count, seconds, variables,
                                   self.rng.randrange(10**9))

    def leg(self, number, seconds, end):
        """Clients and maintenance for some seconds, then the end."""
        server, length = self.server, int(seconds) + 120
        clients = [self.clients("postgres", 3, length, True), self.clients("postgres", 2, length, False),
                   self.clients("other", 1, length, self.rng.random() < 0.5)]
        works = [stress_load.Maintenance(server, self.tables, random.Random(self.rng.random()), self.prepared)
                 for _ in range(2)]
        for thread in works:
            thread.start()
        begun, crashed = time.monotonic(), end in CRASHES
        try:
            backup_after = seconds * self.backup_at if number == 0 and self.backup_at is not None else None
            while time.monotonic() - begun < seconds and self.wal_bytes() < WAL_LIMIT_BYTES:
                time.sleep(0.1)
                if any(client.process.poll() is not None for client in clients):
                    break
                if backup_after is not None and time.monotonic() - begun > backup_after:
                    server.basebackup(self.directory / "backup")
                    self.note("backup taken")
                    backup_after = None
            if backup_after is not None:
                server.basebackup(self.directory / "backup")
            if crashed:
                for thread in works:
                    thread.crashing = True
                self.crash(end)
            for thread in works:
                thread.halt.set()
            if not crashed:
                for client in clients:
                    client.end()
            for client in clients:
                client.wait(crashed)
        finally:
            for thread in works:
                thread.halt.set()
                thread.join(150)
        errors = [error for thread in works for error in thread.errors]
        if errors:
            raise ServerError("maintenance failed:\n" + "\n".join(errors[:5]))
        if end == "fast":
            server.restart("fast")
        elif crashed:
            self.come_back(end)
        if end != "calm":
            self.finish_evacuations()
        done = {name: sum(thread.done.get(name, 0) for thread in works) for thread in works for name in thread.done}
        self.note(f"leg {number} ended: {end}, {server.lsn()}, {done}")

    def crash(self, how):
        """The server dies, or one of its backends does and takes the others with it."""
        if how == "kill":
            self.server.kill()
        elif how == "immediate":
            self.server.stop("immediate")
        else:
            pid = self.server.value("SELECT pid FROM pg_stat_activity WHERE application_name = 'pgbench' LIMIT 1")
            os.kill(int(pid), signal.SIGKILL)

    def come_back(self, how):
        """Until it answers again."""
        deadline = time.monotonic() + 120
        while True:
            try:
                if self.server.process is None:
                    self.server.start()
                self.server.psql("SELECT 1")
                return
            except ServerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def finish_evacuations(self):
        """Or an insert could go on for good."""
        for index in stress_load.finish_evacuations(self.server):
            self.note(f"half evacuated, made anew: {index}")

    def wal_bytes(self):
        """What the archive holds."""
        return sum(file.stat().st_size for file in os.scandir(self.directory / "archive") if len(file.name) == 24)

    def finish(self):
        """The calm end: what must not be missing, prepared transactions left open, a clean stop, the archive complete."""
        server = self.server
        server.psql("ALTER SYSTEM SET autovacuum = off; SELECT pg_reload_conf()")
        patience, deadline = 2, time.monotonic() + 60
        while server.value("SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type IN "
                           "('client backend', 'autovacuum launcher', 'autovacuum worker')") != "0":
            time.sleep(0.1)     # a snapshot of theirs would keep rows from being dead to all
            if time.monotonic() > deadline:
                # A backend whose client is gone may go on in one INSERT for good; half_evacuated knows a reason.
                patience, deadline = patience - 1, time.monotonic() + 60
                if not patience:
                    raise ServerError(f"backends do not end\n{server.log_tail()}")
                self.note("a backend did not end: crash")
                server.kill()
                server.start()
        self.finish_evacuations()
        stress_load.leave_prepared(server, self.tables, "ended")
        stress_load.resolve_all(server)     # they would keep REINDEX waiting
        for table in self.tables:
            begun = time.monotonic()
            kill = table.method == "hash" or table.method == "gist" and self.kills_in_gist
            for statement in stress_load.finale(table, kill):
                server.psql(statement, options="-c lock_timeout=60s -c wal_consistency_checking=")
            self.note(f"finale of {table.name}: {time.monotonic() - begun:.1f} s")
        stress_load.lock_old_version(server)
        stress_load.leave_prepared(server, self.tables, "left")
        expected = load.contents(server)
        left_open = sorted(row[0] for row in server.psql("SELECT gid FROM pg_prepared_xacts"))
        server.stop("fast")
        server.complete_archive()
        self.note(f"stopped, {self.wal_bytes() >> 20} MB of WAL")
        return load.write_info(self.directory, server, dict(self.environment, seed=self.seed), expected=expected,
                               left_open=left_open, tables=[table.name for table in self.tables],
                               methods=stress_checks.methods_of(self.tables), log=self.log)


def replay_ours(directory, info, rng, note):
    """Our replay with options from the seed, sometimes killed and begun again; no image may differ."""
    ours = recovery.copy_backup(directory / "backup", directory / "ours")
    options = ["--jobs", rng.choice([1, 2, 3, 8])]
    options += ["--memory", rng.choice(["16MB", "32MB", "128MB"])] if rng.random() < 0.7 else []
    options += ["--spill-always"] if rng.random() < 0.5 else []
    if info["options"]["settings"]["wal_consistency_checking"]:
        options += ["--verify-images"]
    moments = [rng.uniform(0.05, 4) for _ in range(rng.choice([0, 0, 1, 2]))]
    killed = []
    for moment in moments:
        process = start("replay", "--data-dir", ours, "--wal", directory / "archive", *options)
        time.sleep(moment)
        killed.append(process.poll() is None)
        process.kill()
        process.wait()
        process.stderr.close()
    result = replay(ours, directory / "archive", *options).expect()
    note(f"replayed with {' '.join(map(str, options))}, killed after {[round(m, 2) for m in moments]} ({killed}): "
         f"{result.seconds:.1f} s, {result.json.get('images_verified')} images")
    assert result.json["image_differences"] == 0, result.json
    assert result.json["checkpoint_lsn"] == info["final_checkpoint"], result.json
    recovery.pin_tablespaces(ours)
    return ours, any(killed)


def prove(directory, info, rng, note=print):
    """Both replays, their comparison, the hand-over; returns the counts of record types."""
    directory = Path(directory)
    types = walrider("wal", "stats", directory / "archive").expect().json["types"]
    stock = directory / "stock"
    seen = recovery.stock_replay(directory / "backup", directory / "archive", stock, info["final_checkpoint"])
    note(f"stock replay from {seen.start_lsn} to {seen.end_lsn}: {seen.redo_seconds:.1f} s")
    ours, interrupted = replay_ours(directory, info, rng, note)
    if interrupted and info["options"]["settings"]["full_page_writes"] == "off":
        pages = stress_checks.compare_interrupted(ours, stock)
    else:
        pages = compare(ours, stock)["pages"]
        stress_checks.compare_strictly(ours, stock, info)
    note(f"{pages} pages equal")
    checked = stress_checks.hand_over(ours, directory / "archive", info, rng)
    note(f"taken over, {checked} index queries agree")
    return {f"{entry['rmgr']}/{entry['type']}": entry["count"] for entry in types if entry["count"]}


def keep(directory, number_of_kept=3):
    """Move a failed round to where it stays; the oldest beyond a few go."""
    kept = Path(os.environ.get("WALRIDER_STRESS_KEEP") or KEPT)
    kept.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.sql", "*.copy"):
        for script in directory.glob(pattern):
            script.unlink()
    target = kept / f"{directory.name}-{time.strftime('%H%M%S')}"
    shutil.rmtree(directory / "primary", ignore_errors=True)
    shutil.move(directory, target)
    for old in sorted(kept.iterdir(), key=lambda path: path.stat().st_mtime)[:-number_of_kept]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def run_round(parent, seed, seconds, methods=METHODS, proof=prove):
    """One round, and the proof of it; a failure tells the seed and where its WAL is."""
    directory = Path(parent) / f"seed-{seed}"
    this = Round(directory, seed, seconds, methods)
    try:
        counts = this.run(proof)
        expected = stress_checks.expected(this.methods) - (set() if this.kills_in_gist else {"Gist/DELETE"})
    except BaseException as error:
        said = "\n".join(this.log)
        where = keep(directory) if directory.exists() else "nowhere"
        raise AssertionError(f"stress with seed {seed} failed: {error}\n{said}\n"
                             f"kept: {where}; again: python3 -m tests.lab.loads.stress --again {where}") from error
    shutil.rmtree(directory, ignore_errors=True)
    return counts, expected


def run_rounds(parent, seed, total_seconds, round_seconds=25, methods=METHODS, rounds=None, tell=print):
    """Rounds of seeds derived from one, as many as the time allows; returns how many records of each type they made,
    and which types they should have made and did not."""
    begun, sums, expected = time.monotonic(), {}, set()
    for number in itertools.count():
        spent = time.monotonic() - begun
        if number and (spent * (number + 1) / number > total_seconds if rounds is None else number >= rounds):
            break
        this_seed = seed + number
        tell(f"round {number + 1}: seed {this_seed}")
        counts, wanted = run_round(parent, this_seed, round_seconds, methods)
        expected |= wanted
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
        tell(f"round {number + 1}: seed {this_seed} passed after {time.monotonic() - begun:.0f} s, "
             f"{sum(counts.values())} records")
    return sums, sorted(expected - set(sums))


def main():
    """The command line; as root, run it through tests.lab.as_user."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.lab.loads.stress", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=seed())
    parser.add_argument("--seconds", type=int, default=25, help="of load in a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(METHODS), help="access methods")
    parser.add_argument("--again", metavar="DIR")
    args = parser.parse_args()
    if args.again:
        directory = Path(args.again)
        recovery.discard(directory / "stock", directory / "ours")
        info = json.loads((directory / "info.json").read_text())
        print(prove(directory, info, random.Random(info["options"]["seed"])))
        return
    print(f"seed {args.seed}")
    parent = os.environ.get("TMPDIR", "/tmp")
    sums, missing = run_rounds(parent, args.seed, 0, args.seconds, args.only.split(","), args.rounds)
    print(json.dumps(sums), f"missing: {missing}")


if __name__ == "__main__":
    main()
