"""The mixed load: WAL that holds every record type Walrider replays, and what must come of it.

    python3 -m tests.lab.loads.load --out DIR       make a fixture: backup, archive, primary, info.json

A fixture directory holds
    backup/    pg_basebackup -X none, plain, of the primary before the load
    archive/   every WAL segment and history file, up to the shutdown checkpoint
    primary/   the primary, stopped cleanly
    links/     where the tablespaces' locations point to; see recovery.tablespace_links
    info.json  options, recovery targets, expected contents
"""

import argparse
import json
import random
import shutil
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from tests.lab.loads import load_brin, load_generic, load_gin, load_gist, load_hash, load_server, load_spgist, load_steps
from tests.lab.progress import Progress
from tests.lab.server.cluster import PgCluster

HASH_QUERY = """
    SELECT format('SELECT %L, count(*), coalesce(md5(string_agg(t::text, E''\\n'' ORDER BY t::text)), '''') FROM %I.%I t',
                  n.nspname || '.' || c.relname, n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'm') AND c.relpersistence = 'p'
      AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') ORDER BY 1"""
CATALOG_HASH = """
    SELECT 'pg_class', count(*), md5(string_agg(oid::text || relname || relkind::text, ',' ORDER BY oid)) FROM pg_class;
    SELECT 'pg_attribute', count(*), md5(string_agg(attrelid::text || attname || atttypid, ',' ORDER BY attrelid, attnum))
      FROM pg_attribute;
    SELECT 'pg_largeobject', count(*), md5(string_agg(md5(data), ',' ORDER BY loid, pageno)) FROM pg_largeobject"""


def contents(server):
    """{database: {table: [rows, md5 of the ordered rows]}} of everything permanent."""
    found = {}
    for (name,) in server.psql("SELECT datname FROM pg_database WHERE datallowconn ORDER BY 1"):
        queries = [row[0] for row in server.psql(HASH_QUERY, name)] + [CATALOG_HASH]
        settings = "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET extra_float_digits = 1;"
        rows = server.psql(settings + ";\n".join(queries), name)
        found[name] = {table: [int(count), digest] for table, count, digest in rows}
    return found


class MixedLoad:
    """One run of the load against one primary."""

    def __init__(self, directory, rows=20000, seconds=4, seed=1, settings="", checksums=True, wal_segsize_mb=16,
                 timeline_switch=True, crash=True, quiet=False):
        self.directory = Path(directory)
        self.rows, self.seconds, self.seed = rows, seconds, seed
        self.timeline_switch, self.crash = timeline_switch, crash
        self.options = dict(rows=rows, seconds=seconds, seed=seed, settings=settings, checksums=checksums,
                            wal_segsize_mb=wal_segsize_mb, timeline_switch=timeline_switch, crash=crash)
        self.random = random.Random(seed)
        self.alias = self.directory / "links"
        self.targets, self.left_open = [], []
        self.progress = Progress("mixed load", quiet=quiet)
        self.server = PgCluster.init(self.directory / "primary", self.directory / "archive", checksums=checksums,
                                     wal_segsize_mb=wal_segsize_mb, conf=load_server.SETTINGS + settings)

    # What the steps use

    def sql(self, text, database="postgres"):
        """Run a script in one session; `:rows` and `:seed` are its variables."""
        return self.server.psql(f"\\set rows {self.rows}\n\\set seed {self.seed}\n{text}", database)

    def script(self, name, text):
        """A pgbench script file."""
        path = self.directory / name
        path.write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
        return str(path)

    def make_location(self, *names):
        """Directories for tablespaces, behind the link that every recovery points at its own copy."""
        for name in names:
            (self.alias / name).mkdir(parents=True, exist_ok=True)

    def mark(self, name):
        """Where the step ended; a row, a restore point and everything a recovery target can be named by."""
        ended = self.server.lsn()
        xid = self.server.psql(f"INSERT INTO ledger VALUES ({len(self.targets) + 1}, '{name}') "
                               "RETURNING pg_current_xact_id()")[0][0]
        time.sleep(0.01)
        moment = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f+00")
        time.sleep(0.01)
        lsn = self.server.value(f"SELECT pg_create_restore_point('{name}')")
        committed = self.server.value(f"SELECT pg_xact_commit_timestamp('{xid}'::xid)")
        self.targets.append(dict(name=name, ended=ended, lsn=lsn, xid=int(xid), time=moment, commit_time=committed,
                                 ledger=len(self.targets) + 1))

    # The whole of it

    def steps(self):
        """The load in order: (name, function)."""
        steps = [(f.__name__, f) for f in (
            load_steps.transactions, load_steps.copy_and_toast, load_steps.hot_and_prune, load_steps.btree)]
        steps += [("checkpoint", lambda load: load.sql("CHECKPOINT"))]
        steps += [(f.__name__, f) for f in (
            load_hash.hash_indexes, load_gin.gin, load_gist.gist, load_spgist.spgist, load_brin.brin, load_generic.generic)]
        steps += [(f.__name__, f) for f in (
            load_steps.truncation, load_steps.locks, load_steps.upserts, load_steps.sequences_and_kinds,
            load_steps.prepared, load_steps.tablespaces, load_steps.databases, load_steps.catalogs,
            load_steps.oids, load_server.full_page_writes, load_steps.freeze)]
        steps += [(f.__name__, f) for f in (
            load_steps.origins_and_messages, load_server.parameters, load_steps.logical_level)]
        # Not earlier: a logical slot waits for every older transaction, prepared ones too.
        steps += [("leave_prepared_early", lambda load: load_steps.leave_prepared(load, "early"))]
        steps += [(f.__name__, f) for f in (load_server.backup_in_sql, load_server.commit_timestamps)]
        if self.crash:
            steps += [("crash_in_record", load_server.crash_in_record)]
        steps += [("concurrent", load_steps.concurrent)]
        if self.timeline_switch:
            steps += [("promoted", load_server.promote)]
        steps += [("leave_prepared_late", lambda load: load_steps.leave_prepared(load, "late"))]
        return steps

    def prepare(self):
        """Everything up to the base backup."""
        load_server.advance_counters(self.server.data_dir, self.options["wal_segsize_mb"])
        self.alias.symlink_to("primary_links")
        (self.directory / "primary_links").mkdir()
        self.server.start()
        load_steps.schema(self)
        self.make_location("before")
        self.sql(f"CREATE TABLESPACE before LOCATION '{self.alias / 'before'}'")
        self.sql("CREATE TABLE before_table (id int PRIMARY KEY, t text) TABLESPACE before; "
                 "INSERT INTO before_table SELECT g, 'b' FROM generate_series(1, 2000) g")

    def backup(self):
        """The base backup, its tablespaces beside it."""
        self.server.basebackup(self.directory / "backup", "-T",
                               f"{self.alias / 'before'}={self.directory / 'backup_links' / 'before'}")

    def run_steps(self):
        """Run all steps, marking the end of each."""
        steps = self.steps()
        self.mark("start")
        for number, (name, step) in enumerate(steps):
            self.progress.update(number, len(steps), name)
            step(self)
            self.mark(name)
        self.progress.done()

    def finish(self):
        """Stop cleanly, complete the archive, write info.json."""
        self.expected = contents(self.server)
        self.server.stop("fast")
        self.server.complete_archive()
        return write_info(self.directory, self.server, self.options, expected=self.expected,
                          targets=self.targets, left_open=self.left_open)

    def run(self):
        """All of it; returns info."""
        try:
            self.prepare()
            self.backup()
            self.run_steps()
            return self.finish()
        finally:
            self.server.kill()


def write_info(directory, server, options, **more):
    """info.json: what a recovery of this fixture must give."""
    control = server.controldata()
    info = dict(options=options, system_identifier=control["Database system identifier"],
                final_checkpoint=control["Latest checkpoint location"],
                timeline=int(control["Latest checkpoint's TimeLineID"]), **more)
    (Path(directory) / "info.json").write_text(json.dumps(info, indent=1))
    return info


def run_for(server, progress, scale, clients, seconds, seed):
    """pgbench for some seconds, with progress."""
    bench = server.pgbench_start("-n", "-c", clients, "-j", 2, "-T", seconds, f"--random-seed={seed}", "-s", scale)
    begun = time.monotonic()
    while bench.poll() is None:
        progress.update(min(time.monotonic() - begun, seconds), seconds, f"{clients} clients")
        time.sleep(0.2)
    said = bench.stdout.read()
    if bench.returncode != 0:
        raise RuntimeError(f"pgbench: {said}")
    return said


def main():
    """The command line; as root, run it through tests.lab.as_user."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.lab.loads.load", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="fixture directory to make (replaced if it exists)")
    parser.add_argument("--rows", type=int, default=20000, help="scale of the mixed load")
    parser.add_argument("--seconds", type=int, default=4, help="length of the concurrent part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-checksums", action="store_true")
    parser.add_argument("--wal-segsize", type=int, default=16, metavar="MB")
    parser.add_argument("--no-timeline-switch", action="store_true", help="stay on timeline 1")
    parser.add_argument("--no-crash", action="store_true", help="no crash inside a record")
    parser.add_argument("-c", "--setting", action="append", default=[], metavar="NAME=VALUE",
                        help="server setting, e.g. wal_consistency_checking=all")
    args = parser.parse_args()
    out = Path(args.out).absolute()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    settings = "".join("{} = '{}'\n".format(*setting.split("=", 1)) for setting in args.setting)
    info = MixedLoad(out, args.rows, args.seconds, args.seed, settings, not args.no_checksums, args.wal_segsize,
                     not args.no_timeline_switch, not args.no_crash).run()
    print(f"{out}: seed {args.seed}, ends with the checkpoint at {info['final_checkpoint']}", file=sys.stderr)


if __name__ == "__main__":
    main()
