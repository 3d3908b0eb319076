"""A bank: transfers between accounts, each with an id of its own, and exact books of what was promised to whom.

An id is *acknowledged* when its COMMIT came back without a warning, at a level of synchronous_commit that waits for the
standby; *open* when it may or may not have committed: the connection broke after COMMIT was sent, the wait for the standby was
cancelled, or the level promises nothing about the standby; *refused* when it failed before COMMIT was sent.
"""

import random
import threading
import time
from dataclasses import dataclass, field

import psycopg

ACCOUNTS = 50
BALANCE = 1000
PROMISING = ("remote_write", "on", "remote_apply")
LEVELS = ("off", "local", *PROMISING)

SCHEMA = f"""
CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO account SELECT g, {BALANCE} FROM generate_series(1, {ACCOUNTS}) g;
CREATE TABLE ledger (id bigint PRIMARY KEY, round int NOT NULL, source int NOT NULL, target int NOT NULL, amount int NOT NULL);
"""
BOOKS = f"""
SELECT a.id, a.balance, {BALANCE} + coalesce(i.amount, 0) - coalesce(o.amount, 0) AS due FROM account a
LEFT JOIN (SELECT target, sum(amount) AS amount FROM ledger GROUP BY 1) i ON i.target = a.id
LEFT JOIN (SELECT source, sum(amount) AS amount FROM ledger GROUP BY 1) o ON o.source = a.id
WHERE a.balance <> {BALANCE} + coalesce(i.amount, 0) - coalesce(o.amount, 0)
"""


def connect(server, **settings):
    """A connection in autocommit mode, each statement its own; `settings` are the server's."""
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    return psycopg.connect(host=server.sockets, port=server.port, user="postgres", dbname="postgres", autocommit=True,
                           options=options, connect_timeout=10)


@dataclass
class Books:
    """What happened to the ids of one round."""

    sent: set = field(default_factory=set)
    acknowledged: dict = field(default_factory=dict)    # id: level
    refused: set = field(default_factory=set)
    latencies: list = field(default_factory=list)       # (level, seconds that COMMIT took) of the acknowledged

    @property
    def open(self):
        """Those that may or may not have committed."""
        return self.sent - self.acknowledged.keys() - self.refused


class Teller(threading.Thread):
    """One client: transfers until it is told to stop or its connection ends."""

    def __init__(self, bank, server, books, seed, levels, round_number, number):
        super().__init__(daemon=True)
        self.bank, self.server, self.books, self.levels, self.round = bank, server, books, levels, round_number
        self.rng = random.Random(seed)
        self.next = (round_number << 40) | (number << 32)
        self.failure = None

    def run(self):
        """The work."""
        try:
            with connect(self.server) as connection:
                warnings = []
                connection.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
                while not self.bank.closing.is_set() and not connection.closed:
                    self.transfer(connection, warnings)
        except psycopg.OperationalError:
            pass        # the primary is gone, or does not let us in any more
        except Exception as error:      # noqa: BLE001  a defect of the test: told by `Bank.close`
            self.failure = error

    def transfer(self, connection, warnings):
        """One transfer, written into the books."""
        number, self.next = self.next, self.next + 1
        source, target = self.rng.sample(range(1, ACCOUNTS + 1), 2)
        amount, level = self.rng.randrange(1, 100), self.rng.choice(self.levels)
        moves = sorted([(source, -amount), (target, amount)])       # in order: no deadlocks
        warnings.clear()
        self.books.sent.add(number)
        try:
            connection.execute(f"BEGIN; SET LOCAL synchronous_commit = {level}")
            for account, change in moves:
                connection.execute("UPDATE account SET balance = balance + %s WHERE id = %s", (change, account))
            connection.execute("INSERT INTO ledger VALUES (%s, %s, %s, %s, %s)", (number, self.round, source, target, amount))
        except psycopg.Error:
            self.books.refused.add(number)
            if connection.closed:
                raise
            connection.execute("ROLLBACK")
            return
        begun = time.perf_counter()
        done = connection.execute("COMMIT").statusmessage       # whatever goes wrong here leaves the id open
        if level in PROMISING and done == "COMMIT" and not warnings:
            self.books.latencies.append((level, time.perf_counter() - begun))
            self.books.acknowledged[number] = level


class Bank:
    """Rounds of transfers, on one primary after another."""

    def __init__(self, seed, tellers=6, levels=LEVELS):
        self.seed, self.count, self.levels = seed, tellers, levels
        self.round, self.settled = 0, 0
        self.tellers, self.books, self.closing = [], Books(), threading.Event()

    def found(self, server):
        """The tables, empty; nobody waits for a standby."""
        server.psql(SCHEMA, options="-c synchronous_commit=local")

    def open(self, server):
        """Let the tellers begin."""
        self.round += 1
        self.books = Books()
        self.closing.clear()
        self.tellers = [Teller(self, server, self.books, f"{self.seed}/{self.round}/{number}", self.levels, self.round, number)
                        for number in range(self.count)]
        for teller in self.tellers:
            teller.start()

    def close(self, timeout=60):
        """Wait for them; the books of the round."""
        self.closing.set()
        for teller in self.tellers:
            teller.join(timeout)
            assert not teller.is_alive(), "a client still waits for its commit"
            if teller.failure:
                raise teller.failure
        return self.books

    def wait_acknowledged(self, count, timeout=60):
        """Wait until at least so many were acknowledged in this round."""
        deadline = time.monotonic() + timeout
        while len(self.books.acknowledged) < count:
            assert time.monotonic() < deadline, f"{len(self.books.acknowledged)} acknowledged of {len(self.books.sent)} sent"
            time.sleep(0.005)

    def audit(self, server):
        """Nothing promised is missing, nothing is there that was not sent, and the accounts say what the ledger says."""
        with connect(server) as connection:
            rows = connection.execute("SELECT id FROM ledger WHERE round = %s", (self.round,)).fetchall()
            older = connection.execute("SELECT count(*) FROM ledger WHERE round < %s", (self.round,)).fetchone()[0]
            newer = connection.execute("SELECT count(*) FROM ledger WHERE round > %s", (self.round,)).fetchone()[0]
            wrong = connection.execute(BOOKS).fetchall()
            money = connection.execute("SELECT sum(balance) FROM account").fetchone()[0]
        there = {number for number, in rows}
        lost = {number: level for number, level in self.books.acknowledged.items() if number not in there}
        assert not lost, f"acknowledged, but lost: {lost}"
        invented = there - self.books.sent
        assert not invented, f"never sent: {invented}"
        refused = there & self.books.refused
        assert not refused, f"refused, but there: {refused}"
        assert (older, newer) == (self.settled, 0), f"earlier rounds left {self.settled} transfers, {older} are there"
        assert not wrong, f"accounts that the ledger does not explain (id, balance, due): {wrong}"
        assert money == ACCOUNTS * BALANCE
        self.settled += len(there)
        return dict(sent=len(self.books.sent), acknowledged=len(self.books.acknowledged), open=len(self.books.open),
                    there=len(there))
