"""What walrider_pgoutput spares a logical subscriber of transactions of which nothing is published, beside pgoutput.

    python3 -m bench.logical [--transactions 1000] [--rounds 5] [--seconds 3] [--smoke] [--save DIR]

*Sent*: of each kind of transaction (plain; prepared, then committed; larger than logical_decoding_work_mem, and so streamed)
there are loads of which 0, 25, 50, 75 and 100 % change an unpublished table alone.  Each is read once from a slot of each plugin,
by a client that counts the payload of CopyData messages: 25 bytes of header and pgoutput's message, or 18 bytes of a keepalive.
The load is over when reading begins, so that nothing depends on time but the few keepalives of a sender that has caught up.
*Synchronous*: the same client is the standby that commits wait for, so that keepalives tell it of what was skipped.

Servers before 15 sent BEGIN and COMMIT of every plain transaction: what these would have sent is what pgoutput sent, and those
two for each empty one, with the sizes that they have for the others.  Those servers had no two-phase subscriptions.

*Latency*: pgbench changes the unpublished table, and each commit waits for a stock subscriber, whose slot is of the one plugin or
of the other in turn: medians of rounds of what pgbench's log says of whole transactions.  A prepared one waits twice, and one of
1,000 rows as well for its decoding.  fsync is on at both ends.

Not measured: networks, other subscribers than PostgreSQL's, what decoding costs the publisher.
"""

import argparse
import json
import statistics
import struct
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from bench.receive import Connection
from bench.replay import commit, machine, nameless
from tests.lab import install
from tests.lab.server.cluster import PgCluster, run
from tests.lab.waiting import wait_for

PLUGINS = {"pgoutput": "pgoutput", "ours": "walrider_pgoutput"}
SHARES = (0, 25, 50, 75, 100)
KINDS = ("plain", "prepared", "streamed")
SETTINGS = """
wal_level = logical
logical_decoding_work_mem = 64kB
max_wal_senders = 8
autovacuum = off
fsync = on
max_wal_size = 4GB
max_prepared_transactions = 50
wal_retrieve_retry_interval = 100ms
"""
TABLES = """
CREATE TABLE shown (id int, v text);
CREATE TABLE own (id int, v text);
CREATE TABLE mark (id int);
"""
HEADER = 25                     # XLogData: its letter, three times eight bytes
LARGE = 1000                    # rows of a streamed transaction
SCRIPTS = {"plain": "INSERT INTO own VALUES (1, repeat('y', 40));\n",
           "prepared": "\\set n random(1, 1000000000000)\nBEGIN;\nINSERT INTO own VALUES (1, repeat('y', 40));\n"
                       "PREPARE TRANSACTION 'g-:client_id-:n';\nCOMMIT PREPARED 'g-:client_id-:n';\n",
           "streamed": f"INSERT INTO own SELECT i, repeat('y', 40) FROM generate_series(1, {LARGE}) i;\n"}


def trust(server):
    """Let the server take the plugin, where it wants to be told."""
    if server.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'") == "1":
        server.psql(f"ALTER SYSTEM SET output_plugin_libraries = {', '.join(PLUGINS.values())}; SELECT pg_reload_conf()")


def write(server, kind, share, transactions):
    """So many, of which `share` percent change the unpublished table alone, evenly mixed; then the mark."""
    rows = LARGE if kind == "streamed" else 3
    statements, due = [], 0
    for number in range(transactions):
        due += share
        table, due = ("own", due - 100) if due >= 100 else ("shown", due)
        statements += ["BEGIN", f"INSERT INTO {table} SELECT i, repeat('x', 40) FROM generate_series(1, {rows}) i"]
        statements += [f"PREPARE TRANSACTION 'g{number}'", f"COMMIT PREPARED 'g{number}'"] if kind == "prepared" else ["COMMIT"]
    server.psql(";\n".join([*statements, "INSERT INTO mark VALUES (1)"]), options="-c synchronous_commit=local")


def read(server, slot, name):
    """All that a slot has, up to the mark: each message as it came, without CopyData's frame."""
    connection = Connection(server, replication="database", database="postgres", application_name=name)
    connection.send(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '4', streaming 'parallel', publication_names 'p')")
    connection.until(b"W")
    messages = []
    while not is_mark(messages):
        kind, body = connection.message()
        assert kind == b"d", kind
        messages.append(body)
    end, = struct.unpack_from(">Q", messages[-1], HEADER + 10)      # COMMIT: flags, its own position, its end
    # Confirmed, and the copy ended, which the server answers when it has taken that in.
    connection.socket.sendall(b"d" + struct.pack(">IcQQQQB", 38, b"r", end, end, end, 0, 0))
    connection.socket.sendall(b"c\0\0\0\4")
    connection.until(b"Z")
    connection.socket.close()
    return messages


def is_mark(messages):
    """Whether the last that came is the mark's transaction."""
    said = [message[HEADER:] for message in messages[-6:] if message[:1] == b"w"][-4:]
    return [message[:1] for message in said] == [b"B", b"R", b"I", b"C"] and b"\0mark\0" in said[1]


def count(messages):
    """What came, without the mark's transaction."""
    data = [message for message in messages if message[:1] == b"w"]
    data, (begin, *_, end) = data[:-4], data[-4:]
    keepalives = [message for message in messages if message[:1] == b"k"]
    return dict(messages=len(data), bytes=sum(map(len, data)), keepalives=len(keepalives),
                keepalive_bytes=sum(map(len, keepalives)), begin_and_commit_bytes=len(begin) + len(end))


def sent(server, transactions):
    """What each plugin sends of every load."""
    results = []
    for synchronous in (False, True):
        server.psql(f"ALTER SYSTEM SET synchronous_standby_names = '{'counter' if synchronous else ''}'; SELECT pg_reload_conf()",
                    options="-c synchronous_commit=local")
        for kind in KINDS:
            number = max(4, transactions // 25) // 4 * 4 if kind == "streamed" else transactions
            for share in SHARES:
                write(server, kind, share, number)
                result = dict(kind=kind, share=share, synchronous=synchronous, transactions=number)
                for name in PLUGINS:
                    result[name] = count(read(server, name, "counter"))
                if kind == "plain":
                    stock = result["pgoutput"]      # less its keepalives, which tell of what is skipped
                    result["before_15_bytes"] = stock["bytes"] + number * share // 100 * stock["begin_and_commit_bytes"]
                results.append(result)
    server.psql("ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf()", options="-c synchronous_commit=local")
    return results


class Latency:
    """Commits that wait for a subscriber."""

    def __init__(self, scratch, publisher):
        self.scratch, self.publisher = scratch, publisher
        self.subscriber = PgCluster.init(scratch / "subscriber", conf=SETTINGS).start()
        self.subscriber.psql(TABLES)
        for name in PLUGINS:
            self.subscriber.psql(
                f"CREATE SUBSCRIPTION {name} CONNECTION '{publisher.dsn()} application_name={name}' PUBLICATION p WITH (enabled = false, "
                f"create_slot = false, slot_name = {name}, copy_data = false, two_phase = true, streaming = parallel)")

    def connect(self, name):
        """Let commits wait for the subscription of this slot."""
        self.subscriber.psql(f"ALTER SUBSCRIPTION {name} ENABLE")
        self.publisher.psql(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'; SELECT pg_reload_conf()",
                            options="-c synchronous_commit=local")
        two_phases = f"SELECT subtwophasestate FROM pg_subscription WHERE subname = '{name}'"
        wait_for(lambda: self.subscriber.value(two_phases) == "e", "two phases")
        wait_for(lambda: self.publisher.psql("SELECT sync_state FROM pg_stat_replication") == [["sync"]], f"{name} is sync")
        caught_up = f"SELECT flush_lsn >= '{self.publisher.value('SELECT pg_current_wal_flush_lsn()')}' FROM pg_stat_replication"
        wait_for(lambda: self.publisher.value(caught_up) == "t", f"{name} has caught up")

    def disconnect(self, name):
        """Let them wait for nobody, and take it away."""
        self.publisher.psql("ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf()",
                            options="-c synchronous_commit=local")
        self.subscriber.psql(f"ALTER SUBSCRIPTION {name} DISABLE")
        wait_for(lambda: self.publisher.psql("SELECT pid FROM pg_stat_replication") == [], f"{name} is gone")

    def measure(self, kind, clients, seconds):
        """One run of pgbench."""
        script = self.scratch / f"{kind}.sql"
        script.write_text(SCRIPTS[kind])
        with tempfile.TemporaryDirectory(dir=self.scratch) as logs:
            run([install.program("pgbench"), "-n", "-c", str(clients), "-T", str(seconds), "-f", script, "-l",
                 "--log-prefix", f"{logs}/log", "postgres"], env=self.publisher.environment())
            lines = [line for file in Path(logs).iterdir() for line in file.read_text().splitlines()]
        latencies = sorted(int(line.split()[2]) / 1000 for line in lines)
        return dict(transactions=len(latencies), p50_ms=round(statistics.median(latencies), 3),
                    p99_ms=round(latencies[int(0.99 * len(latencies))], 3))

    def rounds(self, clients, seconds, rounds):
        """Each kind with each plugin, in an order that turns from round to round."""
        runs = []
        for number in range(rounds):
            for name in list(PLUGINS)[::1 if number % 2 == 0 else -1]:
                self.connect(name)
                for kind in KINDS:
                    runs.append(dict(kind=kind, plugin=name, round=number + 1, **self.measure(kind, clients, seconds)))
                self.disconnect(name)
        return runs


def measure(scratch, args):
    """All of it."""
    with PgCluster.init(scratch / "publisher", conf=SETTINGS) as publisher:
        publisher.start()
        trust(publisher)
        publisher.psql(TABLES + "CREATE PUBLICATION p FOR TABLE shown, mark;")
        for name, plugin in PLUGINS.items():
            publisher.psql(f"SELECT pg_create_logical_replication_slot('{name}', '{plugin}', false, true)")
        told = sent(publisher, args.transactions)
        latency = Latency(scratch, publisher)
        try:
            return told, latency.rounds(args.clients, args.seconds, args.rounds)
        finally:
            latency.subscriber.kill()


def less(ours, theirs):
    """How much less, in percent."""
    return f"{max(0, 100 * (theirs - ours) / theirs):.0f}"


def tables(told, runs):
    """The result, to read."""
    total = lambda counted: counted["bytes"] + counted["keepalive_bytes"]
    lines = ["| transactions | subscriber | of them empty | before 15 | pgoutput | ours | less than pgoutput | less than before 15 |",
             "|---|---|---|---|---|---|---|---|"]
    for result in told:
        stock, ours, before = result["pgoutput"], result["ours"], result.get("before_15_bytes")
        cell = lambda counted: f"{counted['messages']:,} + {counted['keepalives']:,}: {total(counted):,}"
        lines.append(f"| {result['transactions']:,} {result['kind']} | {'' if result['synchronous'] else 'a'}synchronous "
                     f"| {result['share']} % | {f'{before:,}' if before else ''} | {cell(stock)} | {cell(ours)} "
                     f"| {less(total(ours), total(stock))} % | {less(total(ours), before) + ' %' if before else ''} |")
    lines += ["", "Messages + keepalives: bytes of both.", "",
              "| pgbench's transaction, ms | pgoutput, median and 99 % | ours | rounds |", "|---|---|---|---|"]
    for kind in KINDS:
        at = lambda plugin, what: statistics.median(one[what] for one in runs if (one["kind"], one["plugin"]) == (kind, plugin))
        lines.append(f"| {kind} | {at('pgoutput', 'p50_ms'):.2f}, {at('pgoutput', 'p99_ms'):.2f} | {at('ours', 'p50_ms'):.2f}, "
                     f"{at('ours', 'p99_ms'):.2f} | {max(one['round'] for one in runs)} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.logical", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=1000, help="of each load; streamed ones are a 25th of them")
    parser.add_argument("--clients", type=int, default=4, help="of pgbench")
    parser.add_argument("--seconds", type=int, default=3, help="for each run of pgbench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small and once")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the result there")
    args = parser.parse_args(argv)
    if args.smoke:
        args.transactions, args.seconds, args.rounds = 40, 1, 1
    with tempfile.TemporaryDirectory() as scratch:
        told, runs = measure(Path(scratch), args)
    result = dict(when=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), commit=commit(),
                  postgresql=install.version(), command=" ".join(["python3 -m bench.logical", *map(nameless, argv or sys.argv[1:])]),
                  clients=args.clients, seconds=args.seconds, sent=told, latency=runs)
    text = tables(told, runs)
    print(text)
    if args.save:
        file = args.save / f"{result['when'][:10]}-logical.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".txt").write_text(text)
    return result


if __name__ == "__main__":
    main()
