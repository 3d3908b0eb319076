"""Commits at a level of synchronous_commit, each in the background: which of them are acknowledged, and which wait."""

import threading
import time

import psycopg

from tests.lab.loads.bank import connect
from tests.lab.standby.standby import replication

# Long enough that a commit which does not have to wait is surely back.
A_WHILE = 0.7
TABLE = "CREATE TABLE t (id serial PRIMARY KEY, v text)"


class Commit(threading.Thread):
    """A commit at a level, in the background; `done` once the client was told."""

    def __init__(self, server, level):
        super().__init__(daemon=True)
        self.server, self.level, self.seconds = server, level, None
        self.start()

    def run(self):
        """One row."""
        begun = time.monotonic()
        try:
            with connect(self.server, synchronous_commit=self.level) as connection:
                connection.execute("INSERT INTO t (v) VALUES (%s)", (self.level,))
        except psycopg.OperationalError:
            return      # the server ended; no answer
        self.seconds = time.monotonic() - begun

    @property
    def done(self):
        """Whether the client has its answer."""
        return self.seconds is not None

    def wait(self, timeout=30):
        """Wait for the answer; how long the commit took, in seconds."""
        self.join(timeout)
        assert self.done, f"{self.level} is not acknowledged after {timeout} s: {replication(self.server)}"
        return self.seconds


def expect(server, waiting, returning):
    """Commits at some levels return while those at others wait; returns the ones that wait."""
    held = [Commit(server, level) for level in waiting]
    for level in returning:
        for _ in range(3):
            Commit(server, level).wait()
    time.sleep(A_WHILE)
    early = {commit.level: commit.seconds for commit in held if commit.done}
    assert not early, f"told too early: {early}, {replication(server)}, now at {server.lsn()}"
    return held
