"""The loads whose WAL is replayed, each kept as a fixture: backup/, archive/, info.json, as tests.lab.loads.load has them.

    python3 -m bench.loads --fixtures DIR [--size SHARE] LOAD...     make what is missing

Between the base backup and the end there is no checkpoint: only the first change of a page leaves an image.
"""

import argparse
import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.lab.loads import load, load_server
from tests.lab.server.cluster import PgCluster, parse_lsn
from tests.suites.run import Stages, run_suites
from tests.suites.variants import VARIANTS

from . import index_loads

MB = 1 << 20
REGRESSION = "regression"
CLIENTS = 8


@dataclass(frozen=True)
class Load:
    """Steps before and after the base backup; a step is a function of the server, the size and its own number."""

    about: str
    before: tuple
    after: tuple
    settings: str = "autovacuum = off\n"
    memory: int = 0     # what pages may take on both sides; 0: all that they want


def sql(text):
    """A step in SQL; `:size` is the share of the full size, `:number` tells a repeated step from the others."""
    return lambda server, size, number: server.psql(f"\\set size {size}\n\\set number {number}\n{text}")


def pgbench(transactions, *options, script=None):
    """A step of so many transactions by pgbench, of a script or what its options say."""
    def step(server, size, number):
        own = []
        if script:
            file = server.data_dir.parent / "script.sql"
            file.write_text(script)
            own = ["-f", str(file)]
        each = max(1, round(transactions * size / CLIENTS))
        server.pgbench("-n", "-c", str(CLIENTS), "-j", "2", "-t", str(each), f"--random-seed={number + 1}", *options, *own)
    return step


def pgbench_tables(scale):
    """pgbench's tables, vacuumed."""
    def step(server, size, _number):
        server.pgbench("-i", "-q", "-s", str(max(1, round(scale * size))), "--no-vacuum")
        server.psql("VACUUM (FREEZE, ANALYZE)")
    return step


HOT_TABLE = sql("""
    CREATE TABLE hot (id int PRIMARY KEY, n bigint NOT NULL, changed timestamptz NOT NULL, note text);
    INSERT INTO hot SELECT g, 0, now(), repeat('x', 40) FROM generate_series(1, 400) g;
    CREATE PROCEDURE bump(times int) LANGUAGE plpgsql AS $$
      DECLARE chosen int;
      BEGIN
        FOR i IN 1..times LOOP
          chosen := 1 + floor(random() * 400);
          UPDATE hot SET n = n + 1, changed = clock_timestamp() WHERE id = chosen;
          COMMIT;
        END LOOP;
      END $$;
    VACUUM (ANALYZE)""")
ROWS = """SELECT g, md5(g::text), (random() * 1e9)::bigint, now(), repeat(md5((g % 1000)::text), 2)
          FROM generate_series(1, ({} * :size)::int) g"""
BULK_TABLES = sql(f"""
    CREATE TABLE old (id bigint, t text, r bigint, at timestamptz, note text);
    CREATE TABLE new (LIKE old);
    INSERT INTO old {ROWS.format(2_000_000)}""")
BULK_COPY = sql(f"""
    \\set file `echo $PGHOST`/rows
    COPY ({ROWS.format(1_000_000)}) TO :'file';
    COPY new FROM :'file';
    COPY (SELECT 1) TO :'file'""")

LOADS = {
    "pgbench": Load("pgbench at scale 50, 1.6 M transactions", (pgbench_tables(50),),
                    (pgbench(160_000, "-b", "tpcb-like"),) * 10, settings=""),
    "simple": Load("pgbench's simple-update at scale 50, 1.6 M transactions", (pgbench_tables(50),),
                   (pgbench(160_000, "-b", "simple-update"),) * 10, settings=""),
    "hot": Load("updates of 400 rows, 5 M transactions", (HOT_TABLE,),
                (pgbench(500, script="CALL bump(1000)\n"),) * 10),
    "bigger": Load("pgbench's simple-update at scale 150 in 256 MB, no full-page images", (pgbench_tables(150),),
                   (pgbench(60_000, "-b", "simple-update"),) * 10, memory=256 * MB,
                   settings="autovacuum = off\nfull_page_writes = off\nshared_buffers = 3GB\n"),
    "bulk": Load("VACUUM FREEZE of a table with images, COPY, CREATE INDEX, VACUUM FREEZE", (BULK_TABLES,),
                 (sql("VACUUM FREEZE old"),) + (BULK_COPY,) * 4 +
                 tuple(sql(f"CREATE INDEX ON new ({column})") for column in ("id", "t", "r", "at")) +
                 (sql("VACUUM FREEZE new"),)),
} | {name: Load(about, (sql(before),), tuple(map(sql, rounds))) for name, (about, before, rounds) in index_loads.LOADS.items()}


def make(directory, name, size=1.0):
    """Make a load's fixture in a directory, unless it is there in this size; returns its info."""
    known = directory / "info.json"
    if known.exists():
        info = json.loads(known.read_text())
        if info["options"].get("size", size) == size:
            return info
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    chosen = LOADS[name]
    server = PgCluster.init(directory / "primary", directory / "archive",
                            conf=load_server.PGBENCH_SETTINGS + chosen.settings)
    try:
        server.start()
        for number, step in enumerate(chosen.before):
            step(server, size, number)
        server.basebackup(directory / "backup")
        start = parse_lsn(server.lsn())
        begun = time.monotonic()
        for number, step in enumerate(chosen.after):
            step(server, size, number)
        seconds = time.monotonic() - begun
        wal_bytes = parse_lsn(server.lsn()) - start
        data_bytes = int(server.value("SELECT sum(pg_database_size(oid)) FROM pg_database"))
        server.stop("fast")
        server.complete_archive()
    finally:
        server.kill()
    info = load.write_info(directory, server, dict(load=name, size=size, about=chosen.about, settings=chosen.settings),
                           targets=[], left_open=[], wal_bytes=wal_bytes, data_bytes=data_bytes)
    shutil.rmtree(directory / "primary")
    print(f"{name}: {wal_bytes / 1e6:.0f} MB of WAL over {data_bytes / 1e6:.0f} MB of data in {seconds:.0f} s", flush=True)
    return info


def make_regression(directory):
    """The WAL of PostgreSQL's own regression tests, as a default server writes it: mostly DDL. As above, in one size."""
    known = directory / "info.json"
    if known.exists():
        return json.loads(known.read_text())
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    found = run_suites(replace(VARIANTS["plain"], suites=("regression",)), directory, Stages(REGRESSION))
    # No page has less than its own size in WAL.
    info = dict(final_checkpoint=found.final_checkpoint, wal_bytes=found.wal_bytes(), data_bytes=found.wal_bytes())
    known.write_text(json.dumps(info, indent=1) + "\n")
    return info


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.loads", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="+", choices=list(LOADS), metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--fixtures", type=Path, required=True)
    parser.add_argument("--size", type=float, default=1.0, help="share of the full size")
    args = parser.parse_args()
    for name in args.loads:
        make(args.fixtures.absolute() / name, name, args.size)


if __name__ == "__main__":
    main()
