"""A long transaction of which nothing is published, under a short wal_receiver_timeout: how long the subscriber hears nothing.

    python3 -m bench.logical_long [--rows 10000000] [--timeout 3s] [--work-mem 64MB] [--save DIR]

The transaction is one INSERT, or the same rows in subtransactions of 5,000 rows each.  It is read from a slot of each plugin, with
streaming and without: without it is spilled to disk and read back.  wal_sender_timeout is as it is by default.

*Silence*: the longest time between two messages, seen by a client that asks for an answer four times a second, as a subscriber does
twice in its timeout.  *Subscriber*: whether a stock one with that wal_receiver_timeout stays connected until it has got past the
transaction, or how often it gave up; it is left alone after the third time.  Its worker wakes once a second and looks then whether
it has to give up or to ask (LogicalRepApplyLoop, worker.c): with 1s it gives up after any second without a message, and never asks.
"""

import argparse
import json
import socket
import struct
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

from bench.logical import PLUGINS, SETTINGS, TABLES, is_mark, trust
from bench.receive import Connection
from bench.replay import commit, machine, nameless
from tests.lab import install
from tests.lab.server.cluster import PgCluster
from tests.lab.waiting import wait_for

SHAPES = {"one": "INSERT INTO own SELECT i, 'x' FROM generate_series(1, {rows}) i",
          # An EXCEPTION clause is a subtransaction.
          "subtransactions": "DO $$ BEGIN FOR n IN 1..{rows} / 5000 LOOP BEGIN INSERT INTO own SELECT i, 'x' FROM generate_series(1, 5000) i; "
                             "EXCEPTION WHEN division_by_zero THEN END; END LOOP; END $$"}
GIVEN_UP = 3


def silence(server, slot, streaming):
    """Seconds: the longest without a message, and until the mark came."""
    connection = Connection(server, replication="database", database="postgres", application_name="listener")
    connection.send(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '4', streaming '{streaming}', publication_names 'p')")
    connection.until(b"W")
    done = threading.Event()

    def ask():
        while not done.wait(0.25):
            connection.socket.sendall(b"d" + struct.pack(">IcQQQQB", 38, b"r", 0, 0, 0, 0, 1))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    last, begun, longest, messages = time.monotonic(), time.monotonic(), 0, []
    while not is_mark(messages):
        kind, body = connection.message()
        assert kind == b"d", kind
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if body[:1] == b"w":
            messages = [*messages[-5:], body]
    seconds = time.monotonic() - begun
    done.set()
    asking.join()
    connection.socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: server.psql(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'") == [[""]], "slot free")
    return dict(silence_seconds=round(longest, 2), seconds=round(seconds, 1))


def subscribe(publisher, subscriber, slot, streaming):
    """A subscription of this slot; how often it gave up before it had got past the transaction."""
    end = publisher.value("SELECT pg_current_wal_flush_lsn()")
    before = len(subscriber.log_matches("terminating logical replication worker due to timeout"))
    gave_up = lambda: len(subscriber.log_matches("terminating logical replication worker due to timeout")) - before
    has_it = lambda: publisher.value(f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots WHERE slot_name = '{slot}'") == "t"
    begun = time.monotonic()
    subscriber.psql(f"CREATE SUBSCRIPTION {slot} CONNECTION '{publisher.dsn()}' PUBLICATION p WITH (create_slot = false, "
                    f"slot_name = {slot}, copy_data = false, streaming = {streaming})")
    wait_for(lambda: has_it() or gave_up() >= GIVEN_UP, "past the transaction, or given up", 900)
    seconds, passed, times = time.monotonic() - begun, has_it(), gave_up()
    subscriber.psql(f"ALTER SUBSCRIPTION {slot} DISABLE; ALTER SUBSCRIPTION {slot} SET (slot_name = NONE); DROP SUBSCRIPTION {slot}")
    wait_for(lambda: publisher.psql(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'") == [[""]], "slot free")
    return dict(stayed=passed and times == 0, passed=passed, gave_up=times, subscriber_seconds=round(seconds, 1))


def measure(scratch, args):
    """Each shape, read by each plugin with and without streaming."""
    settings = f"{SETTINGS}logical_decoding_work_mem = {args.work_mem}\nfsync = off\nmax_wal_size = 16GB\n"
    results = []
    with PgCluster.init(scratch / "publisher", conf=settings) as publisher, \
            PgCluster.init(scratch / "subscriber", conf=f"{SETTINGS}wal_receiver_timeout = {args.timeout}\n") as subscriber:
        publisher.start()
        subscriber.start()
        trust(publisher)
        publisher.psql(TABLES + "CREATE PUBLICATION p FOR TABLE shown, mark;")
        subscriber.psql(TABLES)
        for shape, statement in ((shape, SHAPES[shape]) for shape in args.shapes):
            slots = {(name, streaming): f"{name}_{streaming}" for streaming in ("off", "on") for name in PLUGINS}
            for (name, _), slot in slots.items():
                publisher.psql(f"SELECT pg_create_logical_replication_slot('{slot}', '{PLUGINS[name]}')")
            publisher.psql(f"TRUNCATE own; {statement.format(rows=args.rows)}; INSERT INTO mark VALUES (1)", timeout=1800)
            for (name, streaming), slot in slots.items():
                results.append(dict(shape=shape, plugin=name, streaming=streaming, **silence(publisher, slot, streaming),
                                    **subscribe(publisher, subscriber, slot, streaming)))
                print(results[-1], flush=True)
                publisher.psql(f"SELECT pg_drop_replication_slot('{slot}')")
    return results


def table(results):
    """The result, to read."""
    lines = ["| transaction | streaming | plugin | decoded in | longest silence | subscriber |", "|---|---|---|---|---|---|"]
    for found in results:
        verdict = "stayed" if found["stayed"] else f"gave up {found['gave_up']} times{'' if found['passed'] else ', and got no further'}"
        lines.append(f"| {found['shape']} | {found['streaming']} | {found['plugin']} | {found['seconds']:.1f} s "
                     f"| {found['silence_seconds']:.2f} s | {verdict} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.logical_long", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--timeout", default="3s", help="the subscriber's wal_receiver_timeout")
    parser.add_argument("--work-mem", default="64MB", help="the publisher's logical_decoding_work_mem")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the result there")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(Path(scratch), args)
    result = dict(when=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), commit=commit(),
                  postgresql=install.version(), command=" ".join(["python3 -m bench.logical_long", *map(nameless, argv or sys.argv[1:])]),
                  rows=args.rows, wal_receiver_timeout=args.timeout, logical_decoding_work_mem=args.work_mem, results=results)
    print(table(results))
    if args.save:
        file = args.save / f"{result['when'][:10]}-logical-long-{args.timeout}-{args.work_mem}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".txt").write_text(table(results))


if __name__ == "__main__":
    main()
