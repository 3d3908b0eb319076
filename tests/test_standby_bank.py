"""The primary dies at a random moment, the standby takes over: no acknowledged commit is lost and none invented.

Two directories take turns. In every round clients transfer money on the primary, at all levels of synchronous_commit, in some
beside large transactions, or over a network that is slow or was just cut; the primary is killed, the standby promoted and
audited, and becomes the primary of the next round, with the old one as its standby, by pg_rewind or from a new backup. In some
rounds the standby is itself killed shortly before; or killed together with the primary and started again without one; or
PostgreSQL takes its directory over.
"""

import os
import random
import threading
import time

import psycopg
import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.loads.bank import Bank, connect
from tests.lab.seed import seed
from tests.lab.server.recovery import discard
from tests.lab.standby import standby

SEED = seed()
ROUNDS = int(os.environ.get("WALRIDER_STANDBY_ROUNDS", "20"))


class Round:
    """One round and its random choices; `story` says what they were."""

    def __init__(self, number, kind):
        self.kind, self.rng = kind, random.Random(f"{SEED}/{number}")
        choose = self.rng.choice
        self.death = choose(["kill", "kill", "immediate"])
        self.standby_end = choose(["lives", "lives", "lives", "killed with it", "killed before", "stock takes over"])
        self.promotion = choose(["command", "signal", "file"])
        self.rebuild = choose(["rewind", "rewind", "backup"])
        self.noise = choose(["alone", "alone", "with bulk"])
        self.network = choose(["direct", "direct", "delayed", "cut"])
        self.moment = self.rng.uniform(0.05, 0.8)
        self.story = f"round {number} of seed {SEED}: {self.noise}, {self.network}, {self.death} after {self.moment:.2f} s, " \
                     f"the standby {self.standby_end}, promoted by {self.promotion}, then {self.rebuild}"

    def make_noise(self, primary):
        """Large transactions, vacuum and checkpoints beside the transfers, until the primary is gone."""
        try:
            with connect(primary, synchronous_commit="off") as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS noise (v text)")
                while True:
                    connection.execute("INSERT INTO noise SELECT repeat('n', 300) FROM generate_series(1, 5000)")
                    connection.execute("DELETE FROM noise")
                    connection.execute("VACUUM noise")
                    connection.execute("CHECKPOINT")
        except psycopg.OperationalError:
            pass

    def disaster(self, primary, follower, bank, network):
        """Load, until the primary is gone; the clients' books are closed then."""
        bank.open(primary)
        if self.noise == "with bulk":
            threading.Thread(target=self.make_noise, args=(primary,), daemon=True).start()
        bank.wait_acknowledged(5)
        if self.network == "delayed":
            network.delay(up_ms=self.rng.uniform(0, 5), down_ms=self.rng.uniform(0, 5))
        elif self.network == "cut":
            network.cut()
        time.sleep(self.moment / 2)
        if self.standby_end == "killed before":
            follower.kill()
            follower.start()
            standby.wait_streaming(primary)
            bank.wait_acknowledged(len(bank.books.acknowledged) + 5)
        time.sleep(self.moment / 2)
        if self.standby_end in ("killed with it", "stock takes over") and self.rng.random() < 0.5:
            follower.kill()
            time.sleep(self.moment / 10)
        if self.death == "kill":
            primary.kill()
        else:
            primary.stop("immediate")
        if self.standby_end in ("killed with it", "stock takes over"):
            follower.kill()
        return bank.close()

    def take_over(self, follower):
        """The server that the standby becomes."""
        if self.standby_end == "stock takes over":
            follower = standby.Stock(follower.data_dir)
        if follower.process is None:
            follower.start()
        follower.promote(self.promotion)
        return follower.serve()

    def next_standby(self, old, new, scratch):
        """The old primary's directory, or a new one, as the standby of the new primary."""
        if self.rebuild == "rewind":
            return standby.rewind(old.data_dir, new)
        discard(old.data_dir)
        return standby.clone(new, scratch)


def test_no_acknowledged_commit_is_lost(primary, work, kind):
    """See above."""
    bank = Bank(SEED)
    bank.found(primary)
    # The noise writes 80 MB a second and has checkpoints; a standby without a slot that is started again is to find its WAL.
    primary.psql("ALTER SYSTEM SET wal_keep_size = '1GB'", options=standby.LOCALLY)
    primary.psql("SELECT pg_reload_conf()")
    directory, spare = standby.clone(primary, work / "b"), 0
    sums = dict(sent=0, acknowledged=0, open=0, there=0)
    for number in range(ROUNDS):
        chances = Round(number, kind)
        print(chances.story, end=": ", flush=True)
        try:
            with Proxy(primary.port) as network:
                standby.point(directory, primary.port if chances.network == "direct" else network.port)
                follower = kind(directory).start()
                standby.wait_streaming(primary)
                chances.disaster(primary, follower, bank, network)
                promoted = chances.take_over(follower)
            found = bank.audit(promoted)
        except BaseException:
            print(f"\nfailed in {chances.story}\n{follower.log_tail()}\n{primary.log_tail()}")
            raise
        for name, count in found.items():
            sums[name] += count
        print(found, flush=True)
        spare += 1
        directory = chances.next_standby(primary, promoted, work / f"spare{spare}")
        primary = promoted
    primary.kill()
    print(f"{ROUNDS} rounds: {sums}")
    assert sums["acknowledged"] >= 5 * ROUNDS


def test_the_audit_would_see_it(primary, work, kind):
    """The same with a standby that nobody waits for, and a slow network: the audit must find that commits were lost."""
    bank = Bank(SEED, levels=("on",))
    bank.found(primary)
    primary.psql("ALTER SYSTEM SET synchronous_standby_names = ''", options=standby.LOCALLY)
    primary.psql("SELECT pg_reload_conf()")
    with Proxy(primary.port) as network:
        with kind(standby.clone(primary, work / "b", network.port)).start() as follower:
            standby.wait_streaming(primary)
            bank.open(primary)
            bank.wait_acknowledged(5)
            standby.wait_position(primary)
            network.delay(up_ms=300, down_ms=300)
            bank.wait_acknowledged(len(bank.books.acknowledged) + 50)
            network.cut(refuse=True)
            primary.kill()
            bank.close()
            follower.promote()
            with follower.serve() as promoted, pytest.raises(AssertionError, match="acknowledged, but lost"):
                bank.audit(promoted)
