"""The load of bench.volume: random simple updates of pgbench's table, with so much WAL for each byte of the database.

A fixture holds backup/, archive/ and info.json.  Its WAL has a restore point wherever an amount is reached, so that one fixture serves
for all amounts.  It is made by a procedure, not by pgbench, which would take an hour for 15 million transactions.
"""

import itertools
import json
import math
import shutil
import threading
import time

from tests.lab.loads import load_server
from tests.lab.server.cluster import PgCluster, parse_lsn

from .loads import pgbench_tables

SCALE = 160     # 2.4 GB
ROWS = 100_000
CLIENTS = 2
GOLDEN_RATIO = (5 ** 0.5 - 1) / 2     # whose multiples never come back, modulo one
SETTINGS = """autovacuum = off
wal_keep_size = 0
shared_buffers = 3GB
full_page_writes = {images}
"""
# pgbench's simple-update, with a commit for each: the WAL is what pgbench's is, no statement travels.
PROCEDURE = """
    CREATE PROCEDURE simple_updates(times int, total int) LANGUAGE plpgsql AS $$
      DECLARE chosen int; delta int;
      BEGIN
        FOR i IN 1..times LOOP
          chosen := 1 + floor(random() * total);
          delta := floor(random() * 10000) - 5000;
          UPDATE pgbench_accounts SET abalance = abalance + delta WHERE aid = chosen;
          INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (1 + chosen % 10, 1, chosen, delta, now());
          COMMIT;
        END LOOP;
      END $$"""


def name(images, size):
    """Of a fixture's directory."""
    return f"volume-{'images' if images else 'plain'}-{size:g}"


def restore_point(amount):
    """Of the place where the WAL has so many times the bytes of the database."""
    return f"wal-{amount:g}"


def seed(batch, client):
    """For setseed(): one of its own for each batch of each client, or they would update the same rows over and over."""
    return (batch * CLIENTS + client) * GOLDEN_RATIO % 1


def updates(server, batch, transactions, rows):
    """So many transactions by each of the clients, and an end to failures that would go unseen in a thread."""
    failed = []

    def client(number):
        try:
            server.psql(f"SELECT setseed({seed(batch, number)}); CALL simple_updates({transactions}, {rows})")
        except Exception as error:      # told to whoever waits
            failed.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def write_wal(server, until, rows, batches):
    """Updates until the WAL has reached this position; returns how many transactions. `batches` gives each batch its number."""
    done, each = 0, 200
    while (at := parse_lsn(server.lsn())) < until:
        updates(server, next(batches), each, rows)
        done += each * CLIENTS
        # So many more as the rest seems to need, in steps that do not overshoot.
        grown = (parse_lsn(server.lsn()) - at) / (each * CLIENTS)
        each = max(50, min(50_000, int((until - parse_lsn(server.lsn())) / grown / CLIENTS / 2)))
    return done


def spread(server, rows, transactions):
    """How many rows were updated; about as many as random updates reach, or the fixture is not what it says."""
    updated = int(server.value("SELECT count(DISTINCT aid) FROM pgbench_history"))
    expected = rows * (1 - math.exp(-transactions / rows))
    if updated < 0.95 * expected:
        raise RuntimeError(f"{transactions} random updates reached {updated} of {rows} rows; {expected:.0f} are to be expected")
    return updated


def make(directory, images, size, amounts):
    """Make the fixture, unless it is there with these amounts of WAL; returns its info."""
    known = directory / "info.json"
    if known.exists():
        info = json.loads(known.read_text())
        # Before the rows were counted, updates came back to the same ones.
        if "updated_rows" in info and {restore_point(amount) for amount in amounts} <= set(info["wal_bytes"]):
            return info
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    server = PgCluster.init(directory / "primary", directory / "archive",
                            conf=load_server.PGBENCH_SETTINGS + SETTINGS.format(images="on" if images else "off"))
    scale = max(1, round(SCALE * size))
    begun = time.monotonic()
    try:
        server.start()
        pgbench_tables(scale)(server, 1.0, 0)
        server.psql(PROCEDURE)
        server.basebackup(directory / "backup")
        data_bytes = int(server.value("SELECT sum(pg_database_size(oid)) FROM pg_database"))
        start, transactions, wal_bytes, ends = parse_lsn(server.lsn()), 0, {}, {}
        batches = itertools.count()
        # A checkpoint after each full amount, as a server makes them: the images come again.
        for amount in sorted({*amounts, *range(1, int(max(amounts)) + 1)}):
            transactions += write_wal(server, start + int(amount * data_bytes), scale * ROWS, batches)
            if amount in amounts:
                point = restore_point(amount)
                server.psql(f"SELECT pg_create_restore_point('{point}')")
                ends[point] = server.wal_end()
                wal_bytes[point] = parse_lsn(ends[point]) - start
            if amount == int(amount):
                server.psql("CHECKPOINT")
        grown = int(server.value("SELECT sum(pg_database_size(oid)) FROM pg_database"))
        updated = spread(server, scale * ROWS, transactions)
        server.stop("fast")
        server.complete_archive()
    finally:
        server.kill()
    # What filled the tables is as much as the database.
    first = (directory / "backup" / "backup_label").read_text().split("(file ")[1][:24]
    for segment in (directory / "archive").iterdir():
        if segment.name < first:
            segment.unlink()
    info = dict(images=images, size=size, data_bytes=data_bytes, grown_bytes=grown, transactions=transactions, updated_rows=updated,
                start=start, ends=ends, wal_bytes=wal_bytes)
    known.write_text(json.dumps(info, indent=1) + "\n")
    shutil.rmtree(directory / "primary")
    print(f"{directory.name}: {wal_bytes} of WAL over {data_bytes / 1e6:.0f} MB of data, {transactions} transactions, "
          f"{updated} rows updated, made in {time.monotonic() - begun:.0f} s", flush=True)
    return info
