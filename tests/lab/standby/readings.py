"""Who reads the bank on hot standbys while it is at work: each snapshot must add up, and have what was promised to be seen."""

import threading

import psycopg

from tests.lab.loads.bank import ACCOUNTS, BALANCE, BOOKS, connect

SUMS = f"SELECT (SELECT sum(balance) FROM account), (SELECT count(*) FROM ledger), (SELECT count(*) FROM ({BOOKS}) wrong)"


class Readings(threading.Thread):
    """One reader of one standby, until it is told to stop.  `seen`, a function: ids that must be there by now."""

    def __init__(self, server, seen=None):
        super().__init__(daemon=True)
        self.server, self.seen, self.ends = server, seen, threading.Event()
        self.count, self.most, self.failure = 0, 0, None

    def run(self):
        """Snapshot after snapshot; one that is cancelled, because replay needs to go on, is none."""
        while not self.ends.is_set() and not self.failure:
            try:
                with connect(self.server) as connection:
                    while not self.ends.is_set() and not self.failure:
                        self.read(connection)
            except psycopg.OperationalError:
                self.ends.wait(0.1)
            except Exception as error:      # noqa: BLE001  told by `finish`
                self.failure = str(error)

    def read(self, connection):
        """One snapshot."""
        promised = list(self.seen()) if self.seen else []
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        money, transfers, wrong = connection.execute(SUMS).fetchone()
        there = connection.execute("SELECT count(*) FROM ledger WHERE id = ANY(%s)", (promised,)).fetchone()[0]
        connection.execute("COMMIT")
        if money != ACCOUNTS * BALANCE or wrong:
            self.failure = f"a snapshot has {money} in all, {wrong} accounts that the ledger does not explain"
        elif there != len(promised):
            self.failure = f"{len(promised) - there} of {len(promised)} transfers cannot be seen that were acknowledged as applied"
        elif transfers < self.most:
            self.failure = f"{self.most} transfers were there, and {transfers} later"
        self.count, self.most = self.count + 1, max(self.most, transfers)
        self.ends.wait(0.005)           # it is not about load

    def finish(self):
        """Stop, and raise what was wrong; how many snapshots were read."""
        self.ends.set()
        self.join(30)
        assert not self.is_alive(), "a reader hangs"
        assert not self.failure, self.failure
        return self.count
