"""The bank behind a relay: primary, relay, two hot standbys; everything between them fails, the primary dies, a standby takes over.

In each round clients transfer money with commits that wait, through the relay, for the standbys.  Meanwhile connections are cut,
delayed and stopped, walreceivers and the relay are halted, the relay is killed and started again.  Then the primary dies, in some rounds
the relay with it; one standby is promoted, the relay follows it, and the other standby the relay.  Nothing acknowledged is missing, every
snapshot on the standbys adds up, and both directories hold the same pages.

Not tried: a standby that is killed (test_standby_bank.py), machines that lose power, more than one relay.
"""

import os
import random
import signal
import time

import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.loads.bank import Bank, connect
from tests.lab.seed import seed
from tests.lab.server.cluster import PgCluster, format_lsn, parse_lsn
from tests.lab.standby.readings import Readings
from tests.lab.standby.relay import Relay, ask, wait_replayed
from tests.lab.standby.standby import LOCALLY, clone, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider

SEED = seed()
ROUNDS = int(os.environ.get("WALRIDER_RELAY_ROUNDS", "4"))
SECONDS = float(os.environ.get("WALRIDER_RELAY_SECONDS", "2.5"))
# Level, option, whom a commit waits for.
PROMISES = [("remote_apply", "--ack-apply", "ALL (a, b)"), ("on", "--ack-flush", "ALL (a, b)"),
            ("remote_apply", "--ack-apply", "ANY 1 (a, b)"), ("on", "--ack-flush", "ANY 1 (a, b)")]


class Round:
    """One round and its random choices; `story` says what they were."""

    def __init__(self, number):
        self.number, self.rng = number, random.Random(f"{SEED}/relay/{number}")
        self.level, self.option, self.whom = PROMISES[number % len(PROMISES)]
        self.slots = self.rng.random() < 0.5
        self.relay_end = self.rng.choice(["lives", "lives", "killed with it"])
        self.drained = self.relay_end == "lives" and self.rng.random() < 0.5
        self.ahead = not self.drained and self.rng.random() < 0.5
        self.story = f"round {number} of seed {SEED}: {self.level} with {self.option} \"{self.whom}\", " \
                     f"{'slots' if self.slots else 'no slots'}, the relay {self.relay_end}, " \
                     f"{'the standbys get the rest first' if self.drained else 'the standbys are cut off'}" \
                     f"{' long before' if self.ahead else ''}"
        self.done = []


class Chain:
    """Primary, relay and standbys a and b, a proxy between each two."""

    def __init__(self, primary, work, chances):
        self.primary, self.chances, self.rng = primary, chances, chances.rng
        self.up = Proxy(primary.port)
        self.relay = Relay(work / "relay", self.up.port, chances.option, chances.whom, "--receiver-timeout", "2s", "--sender-timeout", "2s",
                           *(("--wal-keep-size", "1MB") if chances.slots else ()))
        self.relay.start()
        wait_streaming(primary)
        self.down, self.standbys = {}, {}
        for name in ("a", "b"):
            if chances.slots:
                ask(self.relay, f"CREATE_REPLICATION_SLOT {name} PHYSICAL RESERVE_WAL")
            self.down[name] = Proxy(self.relay.serves)
            server = PgCluster(clone(primary, work / name, self.down[name].port, name, name if chances.slots else None))
            self.standbys[name] = start_primary(server, hot_standby="on", wal_receiver_status_interval="1s", wal_receiver_timeout="2s",
                                                max_standby_streaming_delay="1s")
            self.relay.wait_downstream(name)
        # The relay's own words for where to go: whoever can be written to.
        ports = ",".join(str(port) for port in (self.up.port, *(server.port for server in self.standbys.values())))
        self.relay.upstream = f"host=127.0.0.1,127.0.0.1,127.0.0.1 port={ports} user=postgres application_name=walrider " \
                              "target_session_attrs=read-write connect_timeout=5"
        self.relay.kill()
        self.relay.start()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        for proxy in (self.up, *self.down.values()):
            proxy.close()
        for one in (*self.standbys.values(), self.relay, self.primary):
            one.kill()

    def fail(self):
        """Something happens, and is over."""
        rng = self.rng
        name = rng.choice(["up", "up", "a", "b"])
        proxy = self.up if name == "up" else self.down[name]
        what = rng.choice(["cut", "cut", "delay", "silence", "refuse", "halt the relay", "halt a receiver", "kill the relay"])
        pause = rng.uniform(0.05, 0.4)
        self.chances.done.append(f"{what} ({name})" if what in ("cut", "delay", "silence", "refuse") else what)
        if what == "cut":
            proxy.cut()
        elif what == "delay":
            proxy.delay(up_ms=rng.uniform(0, 20), down_ms=rng.uniform(0, 20))
            time.sleep(pause)
            proxy.delay()
        elif what == "silence":
            proxy.silence()
            time.sleep(rng.choice([pause, pause, 3]))     # beyond the timeouts, sometimes
            proxy.restore()
        elif what == "refuse":
            proxy.cut(refuse=True)
            time.sleep(pause)
            proxy.restore()
        elif what == "halt the relay":
            self.relay.send_signal(signal.SIGSTOP)
            time.sleep(pause)
            self.relay.send_signal(signal.SIGCONT)
        elif what == "halt a receiver":
            self.halt_receiver(rng.choice(["a", "b"]), pause)
        else:
            self.relay.kill()
            time.sleep(rng.choice([0, pause]))
            self.relay.start()
        time.sleep(rng.uniform(0, 0.2))

    def halt_receiver(self, name, pause):
        """SIGSTOP for a while, if there is one now."""
        rows = self.standbys[name].psql("SELECT pid FROM pg_stat_wal_receiver")
        try:
            for pid, in rows:
                os.kill(int(pid), signal.SIGSTOP)
            time.sleep(pause)
            for pid, in rows:
                os.kill(int(pid), signal.SIGCONT)
        except ProcessLookupError:
            pass            # it ended by itself

    def positions(self):
        """How far each standby is: what it has durably, or has replayed."""
        query = "SELECT greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn())"
        return {name: server.value(query) for name, server in self.standbys.items()}

    def take_over(self):
        """The primary is gone: names of the standby that was promoted and of the other."""
        if self.chances.relay_end == "killed with it":
            self.relay.kill()
        elif self.chances.drained:
            has = self.relay.status()["positions"]["written"]["lsn"]
            for server in self.standbys.values():
                wait_replayed(server, has)
        for proxy in self.down.values():
            proxy.cut(refuse=True)
        for server in self.standbys.values():
            wait_for(lambda: server.psql("SELECT 1 FROM pg_stat_wal_receiver") == [], server.log_tail)
        # Who is further has what either was acknowledged for.
        positions = self.positions()
        chosen = max(positions, key=lambda name: parse_lsn(positions[name]))
        if self.chances.whom.startswith("ALL") and self.chances.drained:
            chosen = self.rng.choice(list(positions))
        other = "b" if chosen == "a" else "a"
        self.standbys[chosen].psql("SELECT pg_promote()")
        return chosen, other

    def follow(self, promoted):
        """The relay goes over to the promoted standby; one that has more says so, ends, and goes on with an empty directory."""
        relay = self.relay
        if relay.process is None:
            relay.launch()
        begun = time.monotonic()
        while True:
            row = promoted.psql("SELECT state FROM pg_stat_replication WHERE application_name = 'walrider'")
            if row == [["streaming"]]:
                return False
            if relay.process.poll() is not None:
                break
            assert time.monotonic() < begun + 60, relay.log_tail()
            time.sleep(0.05)
        status = relay.wait_end()
        last = relay.log_text().splitlines()[-1]
        assert status == 1 and "not in this server's history" in last, (status, relay.log_tail())
        for file in relay.data_dir.iterdir():
            file.unlink()
        relay.start()
        wait_streaming(promoted)
        if self.chances.slots:
            for name in ("a", "b"):
                ask(relay, f"CREATE_REPLICATION_SLOT {name} PHYSICAL RESERVE_WAL")
        return True


@pytest.mark.parametrize("number", range(ROUNDS))
def test_nothing_is_lost_behind_a_relay(primary, work, number):
    """See above."""
    chances = Round(number)
    print(chances.story, flush=True)
    bank = Bank(f"{SEED}/{number}", tellers=4, levels=(chances.level, "off"))
    bank.found(primary)
    primary.psql("ALTER SYSTEM SET wal_keep_size = '1GB'", options=LOCALLY)
    primary.psql("SELECT pg_reload_conf()")
    with Chain(primary, work, chances) as chain:
        try:
            one_round(chain, bank)
        except BaseException:
            print(f"\nfailed in {chances.story}: {', '.join(chances.done)}\n{chain.relay.log_tail(60)}")
            print(*(f"{name}: {server.log_tail()}" for name, server in chain.standbys.items()), sep="\n")
            raise


def one_round(chain, bank):
    """Load and faults, the end of the primary, and what comes after it."""
    chances, primary, relay = chain.chances, chain.primary, chain.relay
    acknowledged = None
    if chances.option == "--ack-apply" and chances.whom.startswith("ALL"):
        acknowledged = lambda: [number for number, level in list(bank.books.acknowledged.items()) if level == chances.level]
    readers = [Readings(server, acknowledged) for server in chain.standbys.values()]
    bank.open(primary)
    for reader in readers:
        reader.start()
    bank.wait_acknowledged(5)
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        if chances.rng.random() < 0.2:
            with connect(primary, synchronous_commit="off") as connection:
                connection.execute("SELECT pg_logical_emit_message(false, 'bulk', repeat('b', 2000000))")
        chain.fail()
    # Whatever has happened: it goes on by itself.
    bank.wait_acknowledged(len(bank.books.acknowledged) + 20)
    time.sleep(chances.rng.uniform(0, 0.2))
    if chances.ahead:
        for proxy in chain.down.values():
            proxy.cut(refuse=True)
        end = primary.psql("SELECT pg_logical_emit_message(false, 'bulk', repeat('b', 3000000), true)", options=LOCALLY)[0][0]
        wait_position(primary, end, "write")
    primary.kill()
    books = bank.close()
    chosen, left = chain.take_over()
    promoted, other = chain.standbys[chosen], chain.standbys[left]
    snapshots = [reader.finish() for reader in readers]
    assert min(snapshots) > 3, snapshots
    found = bank.audit(promoted)
    has_ended = chain.follow(promoted)
    assert has_ended or not chances.ahead
    if has_ended:
        # An empty one has WAL from where the new primary is now; what a standby may lack from before comes from an archive.
        other.psql(f"ALTER SYSTEM SET restore_command = 'cp {promoted.data_dir}/pg_wal/%f %p'")
        other.psql("SELECT pg_reload_conf()")
    # Not earlier: the relay serves what it has of the old timeline, until it knows of the new one.
    for proxy in chain.down.values():
        proxy.restore()
    promoted.psql("CREATE TABLE later AS SELECT g FROM generate_series(1, 10000) g", options=LOCALLY)
    wait_replayed(other, promoted.wal_end())
    bank.settled = 0
    assert bank.audit(other) == found
    assert other.value("SELECT received_tli FROM pg_stat_wal_receiver") == "2"
    assert relay.downstream(left)["streaming"]
    # Of two that are named one is left: the end of a server waits for what the relay acknowledges, too.
    relay.kill()
    relay.options = relay.options[2:]
    relay.start()
    relay.wait_downstream(left)
    wait_streaming(promoted)
    same_pages(promoted, other)
    print(f"{found}, {len(books.latencies)} waited; {snapshots} snapshots; "
          f"{'the relay had more, ended, was emptied; ' if has_ended else ''}{', '.join(chances.done)}", flush=True)
    assert found["acknowledged"] >= 25


def same_pages(primary, standby):
    """Stop both; the standby has replayed the other's last checkpoint, and has the same pages."""
    primary.stop(timeout=30)
    final = primary.controldata()["Latest checkpoint location"]
    wait_replayed(standby, format_lsn(parse_lsn(final) + 1))
    standby.stop(timeout=30)
    found = walrider("compare", primary.data_dir, standby.data_dir).json
    differ = {(one["file"], one["field"]) for one in found["first"]}
    assert found["pages"] > 0 and found["differences"] == len(found["first"]) == len(differ), found
    assert differ <= {("global/pg_control", field) for field in ("state", "minRecoveryPoint", "minRecoveryPointTLI")}, found


def test_the_audit_would_see_it(primary, work):
    """The same with commits that wait for the relay alone, which dies with the primary while the standbys are far behind: the audit must find
    that acknowledged transfers are lost."""
    bank = Bank(SEED, levels=("on",))
    bank.found(primary)
    with Relay(work / "relay", primary.port).start() as relay, Proxy(relay.serves) as down:
        wait_streaming(primary)
        with start_primary(PgCluster(clone(primary, work / "a", down.port, "a")), hot_standby="on") as a:
            relay.wait_downstream("a")
            bank.open(primary)
            bank.wait_acknowledged(5)
            down.delay(down_ms=1000)
            bank.wait_acknowledged(len(bank.books.acknowledged) + 50)
            down.cut(refuse=True)
            primary.kill()
            relay.kill()
            bank.close()
            a.psql("SELECT pg_promote()")
            with pytest.raises(AssertionError, match="acknowledged, but lost"):
                bank.audit(a)
