"""A relay whose primary, standbys, slots, disk or own life fail: what its standbys need is there, it says what is wrong, and goes on.

Many of these are cases of PostgreSQL's own tests of recovery (src/test/recovery: cascading, slots, timeline switches) that a relay has to do
with.  Not tried: machines that lose power, disks that return errors other than that they are full, logical slots (there are none).
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest

from tests.lab import install
from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.loads.bank import Bank
from tests.lab.loads.commit import A_WHILE, TABLE, Commit
from tests.lab.oracle.compare import compare
from tests.lab.seed import seed
from tests.lab.server.cluster import PgCluster, format_lsn, parse_lsn, run
from tests.lab.standby.relay import Relay, ask, hot_standby, rows, segment_of, wait_replayed, write
from tests.lab.standby.standby import LOCALLY, clone, conninfo, point, rewind, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for

SEED = seed()
KILLS = int(os.environ.get("WALRIDER_RELAY_KILLS", "6"))


@pytest.fixture
def table(primary):
    """The primary with a table."""
    primary.psql(TABLE, options=LOCALLY)
    return primary


@pytest.fixture
def relay(table, work):
    """A relay of the primary, which streams."""
    with Relay(work / "relay", table.port).start() as relay:
        wait_streaming(table)
        yield relay


def bulk(server, megabytes):
    """WAL that means nothing; where it ends."""
    server.psql(f"SELECT pg_logical_emit_message(false, 'bulk', repeat('b', 1 << 20)) FROM generate_series(1, {megabytes})", options=LOCALLY)
    server.psql("SELECT pg_switch_wal(); SELECT txid_current()", options=LOCALLY)
    return server.wal_end()


def follow(server, port, name, slot=""):
    """Point a running standby at whoever listens there, by a reload."""
    server.psql(f"ALTER SYSTEM SET primary_conninfo = '{conninfo(port, name)}'")
    server.psql(f"ALTER SYSTEM SET primary_slot_name = '{slot}'")
    server.psql("SELECT pg_reload_conf()")


def promote(server):
    """pg_ctl promote, of one whose commits wait for nobody then."""
    server.psql("ALTER SYSTEM SET synchronous_standby_names = ''")
    server.psql("SELECT pg_reload_conf()")
    run([install.program("pg_ctl"), "promote", "-D", server.data_dir, "-t", 60])
    wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", server.log_tail)


def logged(server, text, times=1):
    """Wait until a server's log has it so often."""
    wait_for(lambda: len(server.log_matches(re.escape(text))) >= times, lambda: f"{text!r}\n{server.log_tail()}")


@contextmanager
def halted(pid):
    """A process that is stopped meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def receiver(server):
    """The pid of a standby's walreceiver."""
    return int(server.value("SELECT pid FROM pg_stat_wal_receiver"))


def same_pages(primary, *standbys):
    """The primary ends; all standbys have replayed its last checkpoint, and have the same pages."""
    primary.stop(timeout=30)
    final = format_lsn(parse_lsn(primary.controldata()["Latest checkpoint location"]) + 1)
    for one in standbys:
        wait_replayed(one, final)
        one.stop(timeout=30)
    for one in standbys[1:]:
        compare(standbys[0].data_dir, one.data_dir)


# Timelines, and who follows whom.

def test_moved_to_the_relay_and_back(table, relay, work, rng):
    """A standby goes from the primary to the relay and back, by reloads under load, with slots of the same name on both sides; nothing is
    missing, and each side's slot is free when it has gone."""
    table.psql("SELECT pg_create_physical_replication_slot('s', true)", options=LOCALLY)
    ask(relay, "CREATE_REPLICATION_SLOT s PHYSICAL RESERVE_WAL")
    with hot_standby(table, work / "a", relay, "a", "s") as a:
        for _ in range(3):
            write(table, rng.randrange(1, 20000))
            follow(a, table.port, "a", "s")
            write(table, rng.randrange(1, 20000))
            wait_streaming(table, "a")
            wait_for(lambda: not relay.slots()["s"]["active"] and relay.downstream("a") is None, relay.status)
            follow(a, relay.serves, "a", "s")
            end = write(table, rng.randrange(1, 20000))
            relay.wait_downstream("a")
            wait_replayed(a, end)
            assert relay.slots()["s"]["active"]
            wait_for(lambda: table.value("SELECT active FROM pg_replication_slots") == "f", "the primary's slot is free")
        assert rows(a) == rows(table)
        assert not a.log_matches("(ERROR|FATAL):  could not"), a.log_tail()


def test_the_middle_is_promoted_while_all_goes_on(table, relay, work):
    """Primary, relay, standby m, standby s behind that, and standby b on the relay: m is promoted by pg_ctl while it streams.  s goes with it;
    relay and b stay with the primary; and m comes back behind the relay, by pg_rewind."""
    with hot_standby(table, work / "m", relay, "m") as m, hot_standby(table, work / "b", relay, "b") as b:
        with PgCluster(clone(table, work / "s", m.port, "s")) as s:
            start_primary(s, hot_standby="on")
            wait_streaming(m, "s")
            wait_replayed(s, write(table))
            promote(m)
            m.psql("INSERT INTO t (v) VALUES ('only here')")
            wait_replayed(s, m.wal_end())
            assert rows(s) == rows(m)
            wait_replayed(b, write(table))
            assert rows(b) == rows(table) and ask(relay, "IDENTIFY_SYSTEM")[0][1] == "1"
            assert relay.downstream("m") is None
            # The relay is no way to another timeline: it is told in words.
            s.stop()
            point(s.data_dir, relay.serves, "s")
            start_primary(s, hot_standby="on")
            logged(s, "highest timeline 1 of the primary is behind recovery timeline 2")
        m.kill()
        with start_primary(PgCluster(m.data_dir)) as again:       # pg_rewind wants to see its end
            again.stop()
        rewind(m.data_dir, table)
        point(m.data_dir, relay.serves, "m")
        with start_primary(PgCluster(m.data_dir), hot_standby="on") as back:
            relay.wait_downstream("m")
            wait_replayed(back, write(table))
            assert rows(back) == rows(table)
            same_pages(table, b, back)


def test_the_history_file_comes_early_or_late(table, relay, work):
    """A new standby with a backup of timeline 1, and of its archive nothing but the history file of timeline 2, of which the relay does not
    know yet: it waits for the relay, and goes on once that has followed.  One that knows nothing of timeline 2 gets the file from the
    relay."""
    with hot_standby(table, work / "a", relay, "a") as a:
        backups = {}
        for name in ("early", "late"):
            table.basebackup(work / name, wal="none")
            point(work / name, relay.serves, name)
            backups[name] = PgCluster(work / name)
        wait_replayed(a, write(table, 20000))
        table.kill()
        promote(a)
        write(a)
        archive = work / "archive"
        archive.mkdir()
        shutil.copy(a.data_dir / "pg_wal" / "00000002.history", archive)
        backups["early"].configure(f"restore_command = 'cp {archive}/%f %p'", "postgresql.auto.conf")
        with backups["early"] as early, backups["late"] as late:
            for server in (early, late):
                start_primary(server, hot_standby="on")
            # What the relay has of timeline 1 comes, and no more can.
            for server in (early, late):
                wait_for(lambda: server.value("SELECT count(*) FROM t") == "20000", server.log_tail)
            assert early.log_matches('restored log file "00000002.history" from archive')
            time.sleep(1)
            assert relay.downstream("late")["streaming"]
            relay.kill()
            relay.upstream = a.port
            relay.start()
            end = write(a)
            for server in (early, late):
                wait_replayed(server, end)
                assert rows(server) == rows(a)
            assert (late.data_dir / "pg_wal" / "00000002.history").exists()


def test_prepared_transactions(table, relay, work):
    """One is prepared before the primary dies, with subtransactions: the promoted standby commits it, the other gets that through the relay;
    one that is prepared on the new primary is there on the standby, which is promoted in turn."""
    with hot_standby(table, work / "a", relay, "a") as a, hot_standby(table, work / "b", relay, "b") as b:
        table.psql("BEGIN; INSERT INTO t (v) VALUES ('x'); SAVEPOINT s; INSERT INTO t (v) VALUES ('y'); PREPARE TRANSACTION 'first'",
                   options=LOCALLY)
        for server in (a, b):
            wait_replayed(server, table.wal_end())
        table.kill()
        promote(a)
        relay.kill()
        relay.upstream = a.port
        relay.start()
        a.psql("COMMIT PREPARED 'first'; BEGIN; INSERT INTO t (v) VALUES ('z'); PREPARE TRANSACTION 'second'")
        wait_replayed(b, a.wal_end())
        assert [v for _, v in rows(b)] == ["x", "y"]
        a.kill()
        promote(b)
        b.psql("COMMIT PREPARED 'second'")
        assert [v for _, v in rows(b)] == ["x", "y", "z"]


@pytest.mark.parametrize("how", ["restarted", "running"])
def test_more_than_the_new_primary_has(table, work, how):
    """The standby that is promoted has less than the relay: the relay, started again or running all along, ends with exit status 1 and an
    error that names the position, serves nothing that never was part of the new timeline to those who follow it, and works with an empty
    directory."""
    with Relay(work / "relay", table.port, "--ack-flush", "ANY 1 (a)").start() as relay, Proxy(relay.serves) as network:
        wait_streaming(table)
        with start_primary(PgCluster(clone(table, work / "a", network.port, "a")), hot_standby="on") as a:
            relay.wait_downstream("a")
            wait_replayed(a, write(table))
            ports = f"{table.port},{a.port}"
            if how == "running":
                relay.kill()
                relay.upstream = f"host=127.0.0.1,127.0.0.1 port={ports} user=postgres application_name=walrider target_session_attrs=read-write"
                relay.start()
                wait_streaming(table)
                relay.wait_downstream("a")
            network.cut(refuse=True)
            end = bulk(table, 3)
            wait_for(lambda: parse_lsn(relay.status()["positions"]["written"]["lsn"] or "0/0") >= parse_lsn(end), relay.status)
            table.kill()
            promote(a)
            write(a)
            if how == "restarted":
                relay.kill()
                relay.upstream = a.port
                relay.launch()
            assert relay.wait_end() == 1
            last = relay.log_text().splitlines()[-1]
            print(last)
            assert "not in this server's history" in last and "ERROR" in last, relay.log_tail()
            for file in relay.data_dir.iterdir():
                file.unlink()
            relay.upstream = a.port
            relay.options = ()
            relay.start()
            wait_streaming(a)
            with hot_standby(a, work / "b", relay, "b") as b:
                wait_replayed(b, write(a))
                assert rows(b) == rows(a)


def test_more_within_the_last_segment(table, work):
    """The relay has more than the new primary, but only in the segment in which that left the timeline, and is started again: it takes the
    new timeline, and what it had beyond is served to nobody."""
    with Relay(work / "relay", table.port).start() as relay, Proxy(relay.serves) as network:
        wait_streaming(table)
        with start_primary(PgCluster(clone(table, work / "a", network.port, "a")), hot_standby="on") as a:
            relay.wait_downstream("a")
            with hot_standby(table, work / "b", relay, "b") as b:
                end = write(table, 10)      # the base backup has begun a segment
                for server in (a, b):
                    wait_replayed(server, end)
                b.stop()
                network.cut(refuse=True)
                table.psql("INSERT INTO t (v) VALUES ('never')", options=LOCALLY)
                wait_position(table, stage="flush")
                table.kill()
                promote(a)
                relay.kill()
                relay.upstream = a.port
                relay.start()
                wait_streaming(a)
                start_primary(b, hot_standby="on")
                left = parse_lsn((a.data_dir / "pg_wal" / "00000002.history").read_text().split("\t")[1])
                assert left % (1 << 20), "no test of anything"
                wait_replayed(b, write(a))
                assert rows(b) == rows(a) and ["never"] not in b.psql("SELECT v FROM t")


def test_the_first_of_two_relays_is_killed(table, relay, work):
    """Its directory's last segment is served only when it was received again, and the primary is away: the relay behind it waits for that, and
    goes on, as a standby does."""
    with Relay(work / "second", relay.serves, name="second").start() as second:
        relay.wait_downstream("second")
        with hot_standby(table, work / "a", second, "a") as a:
            wait_replayed(a, write(table, 20000))
            table.stop("immediate")
            relay.kill()
            relay.start()
            time.sleep(1.5)
            start_primary(table)
            end = write(table)
            wait_streaming(table)
            wait_for(lambda: second.process.poll() is not None or relay.downstream("second"), relay.status)
            assert second.process.poll() is None, second.log_tail()
            wait_replayed(a, end)
            assert rows(a) == rows(table)


def test_a_standby_is_ahead_by_an_archive(table, work):
    """The relay is cut off, and a standby behind it that starts again gets ahead of it out of an archive: it waits, and streams once the relay has
    that, too."""
    archive = work / "archive"
    archive.mkdir()
    settings = dict(hot_standby="on", wal_receiver_status_interval="1s", restore_command=f"cp '{archive}'/%f %p")
    with Proxy(table.port) as network, Relay(work / "relay", network.port).start() as relay:
        wait_streaming(table)
        with hot_standby(table, work / "a", relay, "a", restore_command=settings["restore_command"]) as a:
            wait_replayed(a, write(table))
            network.cut(refuse=True)
            a.stop()
            first = table.value("SELECT pg_walfile_name(pg_current_wal_lsn())")
            end = write(table)
            last = table.value("SELECT pg_walfile_name(pg_switch_wal())")
            for file in (table.data_dir / "pg_wal").iterdir():
                if re.fullmatch("[0-9A-F]{24}", file.name) and first <= file.name <= last:
                    shutil.copy(file, archive)
            start_primary(a, **settings)
            wait_replayed(a, end)
            assert relay.position("written") < parse_lsn(end)
            # It asks the relay meanwhile.
            time.sleep(1)
            network.restore()
            relay.wait_downstream("a")
            wait_replayed(a, write(table))
            assert rows(a) == rows(table)


def test_the_primary_is_restarted(table, relay, work, rng):
    """Immediate shutdowns under load while standbys stream: all go on by themselves, and have the same pages in the end."""
    bank = Bank(rng.randrange(1 << 30), levels=("on", "off"))
    bank.found(table)
    with hot_standby(table, work / "a", relay, "a") as a, hot_standby(table, work / "b", relay, "b") as b:
        for _ in range(4):
            bank.open(table)
            bank.wait_acknowledged(20)
            time.sleep(rng.uniform(0, 0.3))
            table.stop("immediate")
            bank.close()
            assert relay.downstream("a")["streaming"], "it stays, and gets what there is"
            start_primary(table)
            wait_streaming(table)
            bank.audit(table)
        end = table.wal_end()
        for server in (a, b):
            wait_replayed(server, end)
            assert server.value("SELECT sum(balance) FROM account") == "50000"
        same_pages(table, a, b)


def test_files_that_come_and_go(table, relay, work):
    """Databases and tablespaces are made and dropped while a standby behind the relay is killed and starts again: it replays over what is
    gone."""
    in_place = dict(allow_in_place_tablespaces="on")
    with hot_standby(table, work / "a", relay, "a", **in_place) as a, hot_standby(table, work / "b", relay, "b", **in_place) as b:
        place = "SET allow_in_place_tablespaces = on; CREATE TABLESPACE {0} LOCATION ''"
        for number in range(2):
            table.psql(place.format(f"one{number}"), options=LOCALLY)
            table.psql(place.format(f"two{number}"), options=LOCALLY)
            table.psql(f"CREATE DATABASE d{number} TABLESPACE one{number} STRATEGY file_copy", options=LOCALLY)
            table.psql("CHECKPOINT")
            wait_replayed(a, table.wal_end())
            a.kill()
            table.psql(f"ALTER DATABASE d{number} SET TABLESPACE two{number}", options=LOCALLY)
            table.psql(f"CREATE DATABASE e{number} TEMPLATE d{number}", options=LOCALLY)
            table.psql(f"DROP DATABASE d{number}", options=LOCALLY)
            table.psql(f"DROP DATABASE e{number}", options=LOCALLY)
            table.psql(f"DROP TABLESPACE one{number}", options=LOCALLY)
            table.psql(f"DROP TABLESPACE two{number}", options=LOCALLY)
            start_primary(a, hot_standby="on", **in_place)
            wait_replayed(a, table.wal_end())
        wait_replayed(b, table.wal_end())
        same_pages(table, a, b)


def test_the_primary_ends_while_a_named_standby_is_away(table, work):
    """A walsender ends when all is acknowledged as durable.  --ack-flush names one that is away: the primary waits, until the relay is stopped."""
    with Relay(work / "relay", table.port, "--ack-flush", "ALL (a)").start() as relay:
        wait_streaming(table)
        write(table)
        table.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            table.process.wait(2)
        relay.stop(signal.SIGTERM)
        table.wait_end(30)


def test_one_that_came_back_counts_once(table, work):
    """Commits wait for a and b, and b is away.  a's connection is dead without the relay knowing, and a has another one: that is one standby, not
    two."""
    with Relay(work / "relay", table.port, "--ack-flush", "ALL (a, b)").start() as relay, Proxy(relay.serves) as network:
        wait_streaming(table)
        with start_primary(PgCluster(clone(table, work / "a", network.port, "a")), hot_standby="on") as a:
            relay.wait_downstream("a")
            write(table)
            held = Commit(table, "on")
            wait_replayed(a, table.wal_end())
            wait_for(lambda: parse_lsn(relay.downstream("a")["flush_lsn"] or "0/0") >= parse_lsn(table.wal_end()), relay.status)
            network.silence()
            follow(a, relay.serves, "a")
            wait_for(lambda: len([one for one in relay.status()["downstreams"] if one["streaming"]]) == 2, relay.status)
            write(table)
            time.sleep(3)
            assert not held.done, f"b is not there: {relay.status()['downstreams']}"


def test_who_is_on_another_timeline_does_not_count(table, work):
    """A standby has more of the old timeline than the new primary: it can never follow, and no commit of the new timeline may be acknowledged on
    the word of its old positions."""
    with Relay(work / "relay", table.port).start() as relay, Proxy(relay.serves) as network:
        wait_streaming(table)
        with start_primary(PgCluster(clone(table, work / "a", network.port, "a")), hot_standby="on") as a:
            relay.wait_downstream("a")
            with hot_standby(table, work / "b", relay, "b") as b:
                end = write(table, 10)
                for server in (a, b):
                    wait_replayed(server, end)
                network.cut(refuse=True)
                wait_replayed(b, write(table, 2000))
                table.kill()
                relay.kill()
                run([install.program("pg_ctl"), "promote", "-D", a.data_dir, "-t", 60])
                wait_for(lambda: a.value("SELECT pg_is_in_recovery()") == "f", a.log_tail)
                relay.upstream, relay.options = a.port, ("--ack-flush", "ANY 1 (b)")
                relay.start()
                wait_streaming(a)
                logged(b, "forked off current database system timeline 1 before current recovery point")
                held = Commit(a, "on")
                time.sleep(3)       # it comes back again and again
                beyond = parse_lsn(b.value("SELECT pg_last_wal_replay_lsn()"))
                left = parse_lsn((a.data_dir / "pg_wal" / "00000002.history").read_text().split("\t")[1])
                assert left % (1 << 20) and left < parse_lsn(a.wal_end()) < beyond, "no test of anything"
                assert not held.done, f"acknowledged, but on no standby: {relay.status()['downstreams']}"


# Slots.

def test_a_slot_that_is_not_there(table, relay, work):
    """A standby names a slot that the relay has not: its log says so, and once the slot is made, it streams."""
    with PgCluster(clone(table, work / "a", relay.serves, "a", "wanted")) as a:
        start_primary(a, hot_standby="on")
        logged(a, 'replication slot "wanted" does not exist', 2)
        assert relay.downstream("a") is None or not relay.downstream("a")["streaming"]
        ask(relay, "CREATE_REPLICATION_SLOT wanted PHYSICAL")
        relay.wait_downstream("a")
        assert relay.downstream("a")["slot"] == "wanted"
        wait_replayed(a, write(table))
        wait_for(lambda: relay.slots()["wanted"]["restart_lsn"], relay.slots)
        # Two with one slot: the second is told who has it, and gets it when that is gone.
        with PgCluster(clone(table, work / "b", relay.serves, "b", "wanted")) as b:
            start_primary(b, hot_standby="on")
            logged(b, f'replication slot "wanted" is active for PID {relay.downstream("a")["pid"]}')
            a.kill()
            relay.wait_downstream("b")
            wait_replayed(b, write(table))


def test_temporary_slots(table, work):
    """wal_receiver_create_temp_slot: the slot is there while the standby streams, holds WAL for one that does not read, and goes with the
    connection; it is in no file, so that none is left when the relay is killed."""
    with Relay(work / "relay", table.port, "--wal-keep-size", "1MB").start() as relay:
        wait_streaming(table)
        with hot_standby(table, work / "a", relay, "a", wal_receiver_create_temp_slot="on") as a:
            wait_replayed(a, write(table))
            [(name, slot)] = relay.slots().items()
            assert name.startswith("pg_walreceiver_") and slot["temporary"] and slot["active"]
            with halted(receiver(a)):
                end = bulk(table, 6)
                wait_position(table, stage="flush")
                time.sleep(2.5)     # WAL is removed once a second
                needed = segment_of(relay.slots()[name]["restart_lsn"])
                assert needed in relay.segments(), (needed, relay.segments())
                assert needed < max(relay.segments()) - 4, "no test of anything"
            wait_replayed(a, end)
            relay.kill()
            assert "pg_walreceiver" not in (relay.data_dir / "walrider.slots.json").read_text()
            relay.start()
            relay.wait_downstream("a")
            assert len(relay.slots()) == 1
            a.kill()
            wait_for(lambda: not relay.slots(), relay.slots)


def die_with_us():
    """In a child."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)       # PR_SET_PDEATHSIG


def answers(relay):
    """Whether it listens."""
    return ask(relay, "IDENTIFY_SYSTEM", check=False).returncode == 0


class Puller:
    """pg_receivewal with a slot, started and ended at will; what it has must go on without a gap."""

    def __init__(self, relay, directory, slot):
        self.relay, self.directory, self.slot, self.process = relay, directory, slot, None
        directory.mkdir()

    def begin(self):
        """Start it."""
        for file in self.directory.glob("*.partial"):
            if file.stat().st_size not in (0, 1 << 20):
                file.unlink()       # killed while it made the file, which it then refuses
        self.process = subprocess.Popen(
            [install.program("pg_receivewal"), "-h", "127.0.0.1", "-p", str(self.relay.serves), "-U", "postgres", "-D", self.directory, "-S",
             self.slot, "--synchronous", "-s", "1"], stdout=subprocess.DEVNULL, stderr=open(f"{self.directory}.log", "a"),
            preexec_fn=die_with_us)

    def end(self):
        """SIGKILL it."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def said(self):
        """Its log."""
        return open(f"{self.directory}.log").read()


@pytest.mark.parametrize("how", ["at a moment", "at a step"])
def test_slots_never_need_what_is_gone(table, work, rng, how):
    """WAL streams by, as little as can be is kept, downstreams with slots come and go, and the relay is killed at random moments, or before an
    fsync, a rename or a removal: what a slot needs by its file is there each time, and who comes with it gets all of it."""
    disk = Disk(work / "shim", str(work / "relay"))
    print("seed", SEED)
    with Relay(work / "relay", table.port, "--wal-keep-size", "1MB", disk=disk).start() as relay:
        wait_streaming(table)
        pullers = [Puller(relay, work / name, name) for name in ("p", "q", "idle")]
        for one in pullers:
            ask(relay, f"CREATE_REPLICATION_SLOT {one.slot} PHYSICAL RESERVE_WAL")
        try:
            for number in range(KILLS):
                if how == "at a step":
                    relay.stop(signal.SIGTERM)
                    step = rng.randrange(1, rng.choice([20, 200]))
                    relay.launch(disk.kill_at(step))
                    wait_for(lambda: relay.process.poll() is not None or answers(relay), relay.log_tail)
                # pg_receivewal itself would come back after five seconds only.
                for one in pullers:
                    one.end()
                    if rng.random() < 0.8 and not (one.slot == "idle" and KILLS // 2 <= number < KILLS // 2 + 2):
                        one.begin()
                for _ in range(rng.randrange(1, 4)):
                    bulk(table, rng.randrange(1, 4))
                    time.sleep(rng.uniform(0, 0.9))
                if how == "at a step":
                    wait_for(lambda: relay.process.poll() is not None or bulk(table, 1) is None, f"the relay gets to step {step}", 90, 0.2)
                relay.kill()
                slots = json.loads((relay.data_dir / "walrider.slots.json").read_text())
                here = relay.segments()
                for name, slot in slots.items():
                    needed = segment_of(slot["restart_lsn"])
                    missing = set(range(needed, max(here) + 1)) - here
                    assert not missing, f"kill {number}: {name} needs {slot['restart_lsn']}, segment {needed}, there is {sorted(here)}"
                relay.start()
                wait_streaming(table)
                if number % 3 == 2:         # all catch up, so that WAL goes and the next kill finds the slots elsewhere
                    before = max(relay.segments())
                    for one in pullers:
                        one.end()
                        one.begin()
                    bulk(table, 3)
                    wait_for(lambda: min(relay.segments()) >= before,
                             lambda: f"{relay.slots()} {relay.segments()} {[(one.slot, one.said()[-500:]) for one in pullers]}")
            for one in pullers:
                one.end()
                one.begin()
            end = bulk(table, 1)
            wait_position(table, stage="flush")
            wait_for(lambda: all(segment_of(slot["restart_lsn"]) >= segment_of(end) for slot in relay.slots().values()), relay.slots)
        finally:
            for one in pullers:
                one.end()
        for one in pullers:
            assert "removed" not in one.said() and "no longer" not in one.said(), one.said()
            numbers = sorted(int(file.name[8:16], 16) << 12 | int(file.name[16:24], 16) for file in one.directory.iterdir())
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"{one.slot}: {numbers}"
            for file in one.directory.iterdir():
                theirs = table.data_dir / "pg_wal" / file.name
                if len(file.name) == 24 and theirs.exists():
                    assert file.read_bytes() == theirs.read_bytes(), file.name


def test_a_slot_is_lost_while_it_streams(table, work):
    """--max-slot-wal-keep-size is reached by a standby that streams, but does not read: the slot is given up, WAL goes, the standby is told what
    is gone, and then that its slot is lost; the other one goes on.  With a new slot it would be a new standby: without, it is told still."""
    options = ("--wal-keep-size", "1MB", "--max-slot-wal-keep-size", "4MB")
    with Relay(work / "relay", table.port, *options).start() as relay:
        wait_streaming(table)
        for name in ("a", "b"):
            ask(relay, f"CREATE_REPLICATION_SLOT {name} PHYSICAL RESERVE_WAL")
        with hot_standby(table, work / "a", relay, "a", "a") as a, hot_standby(table, work / "b", relay, "b", "b") as b:
            wait_replayed(a, write(table))
            with halted(receiver(a)):
                for _ in range(8):
                    end = bulk(table, 4)
                    wait_replayed(b, end)
                wait_for(lambda: relay.slots()["a"]["lost"], relay.slots)
                assert 'slot "a" is given up' in relay.log_text()
                time.sleep(2.5)
                assert len(relay.segments()) < 12, relay.segments()
            logged(a, "has already been removed")
            logged(a, 'can no longer access replication slot "a"')
            assert not relay.slots()["b"]["lost"] and relay.downstream("b")["streaming"]
            wait_replayed(b, write(table))
            assert rows(b) == rows(table)
            relay.kill()
            relay.start()
            assert relay.slots()["a"]["lost"] and not relay.slots()["b"]["lost"]
            ask(relay, "DROP_REPLICATION_SLOT a")


def test_a_slot_whose_wal_is_kept_anyway_is_not_lost(table, work):
    """max_slot_wal_keep_size, in PostgreSQL, gives up a slot when WAL that it needs is removed, and wal_keep_size keeps that for longer."""
    with Relay(work / "relay", table.port, "--wal-keep-size", "64MB", "--max-slot-wal-keep-size", "3MB").start() as relay:
        wait_streaming(table)
        ask(relay, "CREATE_REPLICATION_SLOT s PHYSICAL RESERVE_WAL")
        begins = segment_of(relay.slots()["s"]["restart_lsn"])
        bulk(table, 6)
        wait_position(table, stage="flush")
        time.sleep(2.5)
        assert begins in relay.segments(), "no test of anything"
        assert not relay.slots()["s"]["lost"]


# Silence, and the disk.

@pytest.mark.parametrize("busy", [True, False])
def test_a_standby_that_is_halted_is_given_up(table, work, busy):
    """SIGSTOP for its walreceiver, with WAL on its way and without: after --sender-timeout the relay has let it go, with its slot and with what
    its queries needed; awake again it comes back by itself."""
    with Relay(work / "relay", table.port, "--sender-timeout", "2s").start() as relay:
        wait_streaming(table)
        ask(relay, "CREATE_REPLICATION_SLOT a PHYSICAL RESERVE_WAL")
        with hot_standby(table, work / "a", relay, "a", "a", hot_standby_feedback="on") as a, hot_standby(table, work / "b", relay, "b") as b:
            wait_replayed(a, write(table))
            wait_for(lambda: table.value("SELECT backend_xmin FROM pg_stat_replication"), "feedback")
            with halted(receiver(a)):
                begun = time.monotonic()
                if busy:
                    for _ in range(3):
                        wait_replayed(b, bulk(table, 8))
                wait_for(lambda: relay.downstream("a") is None, relay.status, timeout=20)
                assert time.monotonic() - begun > 1.5, "it had no time to answer"
                assert not relay.slots()["a"]["active"]
                wait_for(lambda: table.value("SELECT backend_xmin FROM pg_stat_replication") == "", "no feedback of one that is gone")
                assert relay.downstream("b")["streaming"]
            relay.wait_downstream("a")
            wait_replayed(a, write(table))
            assert rows(a) == rows(table)
        assert "timeout expired" in relay.log_text()


@pytest.mark.parametrize("what", ["all", "new"])
def test_the_disk_is_full(table, work, what):
    """The relay says so and waits; standbys stay and have what there is; a slot that cannot be saved is refused and is not there; with space
    everything goes on by itself."""
    disk = Disk(work / "shim", str(work / "relay") + "/")
    with Relay(work / "relay", table.port, disk=disk).start() as relay:
        wait_streaming(table)
        with hot_standby(table, work / "a", relay, "a") as a:
            for _ in range(2):
                wait_replayed(a, write(table))
                disk.fill(what)
                bulk(table, 3)
                relay.wait_state("waiting for disk")
                assert relay.get("/health")[0] == 503
                held = Commit(table, "on")
                done = ask(relay, "CREATE_REPLICATION_SLOT s PHYSICAL", check=False)
                assert "could not save replication slots" in done.stderr and "No space left" in done.stderr, done.stderr
                assert relay.slots() == {} and relay.downstream("a")["streaming"]
                time.sleep(A_WHILE)
                assert not held.done and relay.process.poll() is None
                disk.clear()
                held.wait()
                wait_replayed(a, table.wal_end())
                assert rows(a) == rows(table)
        assert "No space left on device" in relay.log_text()


def test_the_disk_is_full_of_what_slots_need(table, work):
    """No space for the slots' file: nothing is removed, since a crash would lead back to what the file says; and with space it is."""
    disk = Disk(work / "shim", "walrider.slots")
    with Relay(work / "relay", table.port, "--wal-keep-size", "1MB", disk=disk).start() as relay:
        wait_streaming(table)
        ask(relay, "CREATE_REPLICATION_SLOT a PHYSICAL RESERVE_WAL")
        with hot_standby(table, work / "a", relay, "a", "a") as a:
            wait_replayed(a, write(table))
            time.sleep(1.5)
            disk.fill()
            before = json.loads((relay.data_dir / "walrider.slots.json").read_text())["a"]["restart_lsn"]
            wait_replayed(a, bulk(table, 6))
            time.sleep(2.5)
            assert segment_of(before) in relay.segments(), relay.segments()
            assert "could not save replication slots" in relay.log_text()
            disk.clear()
            wait_for(lambda: segment_of(before) not in relay.segments(), lambda: relay.segments())
