"""`walrider relay`: stock hot standbys, pg_receivewal, pg_basebackup and other relays behind one stream.

Not tried here: more than a few downstreams at once (bench/relay.py), networks that delay, unix sockets (there are none).
"""

import json
import re
import signal
import socket
import subprocess
import time

import pytest

from tests.lab import install
from tests.lab.certificates import certificate
from tests.lab.loads.commit import A_WHILE, TABLE, Commit
from tests.lab.server.cluster import PgCluster, free_port, parse_lsn, run
from tests.lab.standby import standby
from tests.lab.standby.early_client import Closed
from tests.lab.standby.relay import (LOOPBACK, Client, Relay, ask, behind, hot_standby, rows, segment, that_serves, wait_downstream, wait_replayed,
                                     write)
from tests.lab.standby.standby import LOCALLY, Walrider, clone, rewind, start_primary, wait_position, wait_streaming
from tests.lab.waiting import wait_for
from tests.lab.walrider import USAGE, binary, walrider


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


@pytest.mark.every_major
def test_two_hot_standbys(table, relay, work):
    """Both are read, the primary has one stream, and the files of the relay are the primary's."""
    with hot_standby(table, work / "a", relay, "a") as a, hot_standby(table, work / "b", relay, "b") as b:
        end = write(table, 30000)
        for server in (a, b):
            wait_replayed(server, end)
            assert rows(server) == rows(table)
        assert table.value("SELECT count(*) FROM pg_stat_replication") == "1"
        told = relay.downstream("a")
        assert told["slot"] is None and told["behind_bytes"] == 0 and told["address"] == "127.0.0.1", told
        table.psql("SELECT pg_switch_wal(); SELECT txid_current()", options=LOCALLY)
        wait_position(table, stage="flush")
        whole = [file for file in sorted(relay.data_dir.iterdir()) if re.fullmatch(r"[0-9A-F]{24}", file.name)]
        assert len(whole) > 2
        for file in whole:
            assert file.read_bytes() == (table.data_dir / "pg_wal" / file.name).read_bytes(), file.name


def test_what_it_says_of_itself(table, relay):
    """Commands as psql sends them, and errors with PostgreSQL's codes and words."""
    wait_position(table, stage="flush")
    system, timeline, position, database = ask(relay, "IDENTIFY_SYSTEM")[0]
    assert system == table.value("SELECT system_identifier FROM pg_control_system()")
    assert (timeline, database) == ("1", "") and re.fullmatch("[0-9A-F]+/[0-9A-F]+", position)
    assert ask(relay, "SHOW wal_segment_size") == [["1MB"]]
    assert ask(relay, "CREATE_REPLICATION_SLOT s PHYSICAL RESERVE_WAL") == [["s", "0/0", "", ""]]
    kind, restart, on = ask(relay, "READ_REPLICATION_SLOT s")[0]
    assert (kind, on) == ("physical", "1") and restart != ""
    assert ask(relay, "READ_REPLICATION_SLOT none") == [["", "", ""]]
    ask(relay, "DROP_REPLICATION_SLOT s")
    for command, said in {
        "DROP_REPLICATION_SLOT s": 'replication slot "s" does not exist',
        "SELECT 1": "cannot execute SQL commands in WAL sender for physical replication",
        "SHOW nonsense": 'unrecognized configuration parameter "nonsense"',
        "START_REPLICATION PHYSICAL FF/0": "is ahead of the WAL flush position of this server",
        "START_REPLICATION PHYSICAL 0/1000000 TIMELINE 7": "requested timeline 7 is not in this server's history",
        "START_REPLICATION SLOT x LOGICAL 0/0": "is not supported by a relay",
        "TIMELINE_HISTORY 9": 'could not open file "00000009.history"',
        "BASE_BACKUP": "is not supported by a relay",
        "CREATE_REPLICATION_SLOT \"A\" PHYSICAL": "is not valid",
        "IDENTIFY_SYSTEM nonsense": "syntax error",
    }.items():
        done = ask(relay, command, check=False)
        assert said in done.stderr, (command, done.stderr)
    done = subprocess.run([install.program("psql"), "-XAtw", "-d", f"host=127.0.0.1 port={relay.serves} user=postgres dbname=postgres",
                           "-c", "SELECT 1"], capture_output=True, text=True, timeout=60)
    assert "only physical replication connections are served here" in done.stderr


def test_which_of_several(table, relay):
    """To a client that wants one of several, the relay is a standby that is read (target_session_attrs)."""
    wait_position(table, stage="flush")
    ours, other = relay.serves, table.port
    for wanted, ports, expected in [("any", (ours, other), ours), ("read-write", (ours, other), other), ("primary", (ours, other), other),
                                    ("read-only", (other, ours), ours), ("standby", (other, ours), ours),
                                    ("prefer-standby", (other, ours), ours)]:
        done = run([install.program("psql"), "-XAtq", "-d", f"host=127.0.0.1,127.0.0.1 port={ports[0]},{ports[1]} user=postgres "
                    f"replication=true target_session_attrs={wanted}", "-c", "\\echo :PORT"])
        assert done.stdout.strip() == str(expected), wanted


@pytest.mark.every_major
def test_alter_a_slot(table, relay):
    """ALTER_REPLICATION_SLOT: a relay's slots are physical, and the answer is the primary's about one of its own, code and words."""
    wait_position(table, stage="flush")

    def said(port, command):
        done = subprocess.run([install.program("psql"), "-XAtw", "-v", "VERBOSITY=verbose", "-d",
                               f"host=127.0.0.1 port={port} user=postgres replication=true", "-c", command],
                              capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr.partition("\n")[0]

    for port in (table.port, relay.serves):
        assert said(port, "CREATE_REPLICATION_SLOT s PHYSICAL") == (0, "")
    for command, code in {
        "ALTER_REPLICATION_SLOT s (FAILOVER true)": "0A000",
        "ALTER_REPLICATION_SLOT s (FAILOVER)": "0A000",
        "ALTER_REPLICATION_SLOT none (FAILOVER)": "42704",
        "ALTER_REPLICATION_SLOT s (FAILOVER, FAILOVER false)": "42601",
        "ALTER_REPLICATION_SLOT s (FAILOVER maybe)": "42601",
        "ALTER_REPLICATION_SLOT s (nonsense)": "XX000",
    }.items():
        assert said(relay.serves, command) == said(table.port, command), command
        assert f"ERROR:  {code}: " in said(relay.serves, command)[1], command
    # It is nobody's after that.
    ask(relay, "DROP_REPLICATION_SLOT s")


def test_pg_receivewal_and_pg_basebackup(table, relay, work):
    """pg_receivewal with a slot gets the same files; pg_basebackup is told that there are no backups to be had."""
    (work / "wal").mkdir()
    source = ["-h", "127.0.0.1", "-p", relay.serves, "-U", "postgres"]
    # As --create-slot does it, which reserves nothing, and once more.
    run([install.program("pg_receivewal"), *source, "--create-slot", "-S", "later"])
    assert relay.status()["slots"]["later"]["restart_lsn"] is None
    ask(relay, "CREATE_REPLICATION_SLOT wal PHYSICAL (RESERVE_WAL)")
    end = write(table, 20000)
    # It ends only past that.
    write(table, 10)
    run([install.program("pg_receivewal"), *source, "-D", work / "wal", "-S", "wal", "-E", end, "--no-loop", "--synchronous"])
    whole = [file for file in sorted((work / "wal").iterdir()) if re.fullmatch(r"[0-9A-F]{24}", file.name)]
    assert len(whole) > 1
    for file in whole:
        assert file.read_bytes() == (table.data_dir / "pg_wal" / file.name).read_bytes(), file.name
    backup = ["-D", work / "backup", "-X", "stream", "-S", "wal", "-c", "fast"]
    done = subprocess.run([install.program("pg_basebackup"), *map(str, source), *map(str, backup)], capture_output=True, text=True, timeout=60)
    assert "a base backup is not supported by a relay" in done.stderr, done.stderr


@pytest.mark.every_major
def test_remote_apply_through_the_relay(table, work):
    """With --ack-apply a commit waits for a standby behind the relay that has applied it, and without one for ever."""
    with Relay(work / "relay", table.port, "--ack-apply", "ANY 1 (a, b)").start() as relay:
        wait_streaming(table)
        Commit(table, "on").wait()
        blocked = Commit(table, "remote_apply")
        time.sleep(A_WHILE)
        assert not blocked.done
        with hot_standby(table, work / "a", relay, "a") as a:
            blocked.wait()
            for number in range(20):
                Commit(table, "remote_apply").wait()
                assert rows(a) == rows(table), number
            a.psql("SELECT pg_wal_replay_pause()")
            blocked = Commit(table, "remote_apply")
            Commit(table, "on").wait()
            time.sleep(A_WHILE)
            assert not blocked.done
            a.psql("SELECT pg_wal_replay_resume()")
            blocked.wait()


def test_flush_on_downstreams(table, work):
    """With --ack-flush a commit waits until it is durable on both that are named; remote_write does not."""
    with Relay(work / "relay", table.port, "--ack-flush", "ALL (a, b)").start() as relay:
        wait_streaming(table)
        Commit(table, "remote_write").wait()
        blocked = Commit(table, "on")
        with hot_standby(table, work / "a", relay, "a"):
            time.sleep(A_WHILE)
            assert not blocked.done, "b is not there"
            with hot_standby(table, work / "b", relay, "b") as b:
                blocked.wait()
                Commit(table, "on").wait()
                b.kill()
                blocked = Commit(table, "on")
                time.sleep(A_WHILE)
                assert not blocked.done
                start_primary(b, hot_standby="on")
                blocked.wait()


def test_write_on_downstreams(table, work):
    """With --ack-write remote_write waits until another has written it, whether it is applied or not; `on` waits for the relay's own disk."""
    with Relay(work / "relay", table.port, "--ack-write", "ANY 1 (a)").start() as relay:
        wait_streaming(table)
        Commit(table, "on").wait()
        blocked = Commit(table, "remote_write")
        time.sleep(A_WHILE)
        assert not blocked.done, "a is not there"
        with hot_standby(table, work / "a", relay, "a") as a:
            blocked.wait()
            Commit(table, "remote_write").wait()
            a.psql("SELECT pg_wal_replay_pause()")
            Commit(table, "remote_write").wait()


def test_hot_standby_feedback(table, relay, work):
    """What a query on a standby needs holds back vacuum on the primary, until the standby is gone."""
    xmin = lambda: table.value("SELECT backend_xmin FROM pg_stat_replication")
    with hot_standby(table, work / "a", relay, "a", hot_standby_feedback="on") as a:
        with a.session() as session:
            session.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM t")
            wait_for(xmin, lambda: f"backend_xmin: {relay.status()}\n{a.log_tail()}")
            before = xmin()
            for _ in range(5):
                write(table, 1)
            time.sleep(2.5)
            assert xmin() == before, "it is still needed"
            session.run("COMMIT")
        wait_for(lambda: xmin() != before, lambda: f"another xmin than {before}")
        a.stop()
    wait_for(lambda: xmin() == "", lambda: f"no xmin: {xmin()}")


def test_a_slot_holds_wal_and_survives_a_kill(table, work):
    """A standby with a slot was away for long: its WAL is still there, also after the relay was killed; without a slot it is gone."""
    with Relay(work / "relay", table.port, "--wal-keep-size", "1MB").start() as relay:
        wait_streaming(table)
        for name in ("a", "b"):
            ask(relay, f"CREATE_REPLICATION_SLOT {name} PHYSICAL RESERVE_WAL")
        with hot_standby(table, work / "a", relay, "a", "a") as a, hot_standby(table, work / "b", relay, "b") as b:
            wait_replayed(a, write(table))
            assert relay.downstream("a")["slot"] == "a"
            assert "is active for PID" in ask(relay, "DROP_REPLICATION_SLOT a", check=False).stderr
            a.stop()
            b.stop()
            ask(relay, "DROP_REPLICATION_SLOT b")
            relay.kill()
            relay.start()
            wait_streaming(table)
            before = relay.status()["slots"]["a"]["restart_lsn"]
            for _ in range(5):
                write(table, 10000)
                table.psql("SELECT pg_switch_wal()", options=LOCALLY)
            end = write(table)
            wait_position(table, stage="flush")
            time.sleep(2.5)
            assert relay.status()["slots"]["a"]["restart_lsn"] == before
            relay.kill()
            relay.start()
            wait_streaming(table)
            start_primary(a, hot_standby="on")
            wait_replayed(a, end)
            assert rows(a) == rows(table)
            wait_for(lambda: relay.status()["slots"]["a"]["restart_lsn"] != before, "the slot moves")
            # Nobody needs the old segments any more.
            wait_for(lambda: len(list(relay.data_dir.glob("0*"))) <= 4, lambda: sorted(relay.data_dir.iterdir()))
            start_primary(b, hot_standby="on")
            wait_for(lambda: b.log_matches("requested WAL segment .* has already been removed"), b.log_tail)


def test_a_slot_is_given_up_at_its_limit(table, work):
    """--max-slot-wal-keep-size: a slot that holds back more is lost, and who comes with it is told so."""
    options = ("--wal-keep-size", "1MB", "--max-slot-wal-keep-size", "3MB")
    with Relay(work / "relay", table.port, *options).start() as relay:
        wait_streaming(table)
        ask(relay, "CREATE_REPLICATION_SLOT s PHYSICAL RESERVE_WAL")
        write(table, 60000)
        wait_for(lambda: relay.status()["slots"]["s"]["lost"], lambda: relay.status()["slots"])
        assert "is given up" in relay.log_text()
        done = ask(relay, "START_REPLICATION SLOT s PHYSICAL 0/3000000", check=False)
        assert 'can no longer access replication slot "s"' in done.stderr, done.stderr


@pytest.mark.every_major
def test_failover_downstream(table, relay, work):
    """The primary dies; a standby behind the relay is promoted; the relay, which is pointed at it, goes over to the new timeline, and so
    does the other standby, and the old primary after pg_rewind."""
    with hot_standby(table, work / "a", relay, "a") as a, hot_standby(table, work / "b", relay, "b") as b:
        end = write(table)
        for server in (a, b):
            wait_replayed(server, end)
        table.kill()
        # The relay serves on, what it has.
        time.sleep(1)
        assert relay.downstream("b")["streaming"]
        a.psql("ALTER SYSTEM SET synchronous_standby_names = ''")
        a.psql("SELECT pg_promote()")
        wait_for(lambda: a.value("SELECT pg_is_in_recovery()") == "f", a.log_tail)
        relay.stop(signal.SIGTERM)
        relay.upstream = a.port
        relay.start()
        wait_streaming(a)
        end = write(a)
        wait_replayed(b, end)
        assert rows(b) == rows(a)
        assert b.value("SELECT received_tli FROM pg_stat_wal_receiver") == "2"
        assert (relay.data_dir / "00000002.history").exists()
        assert ask(relay, "IDENTIFY_SYSTEM")[0][1] == "2"
        old = PgCluster(rewind(table.data_dir, a))
        standby.point(old.data_dir, relay.serves, "old")
        with start_primary(old, hot_standby="on"):
            relay.wait_downstream("old")
            wait_replayed(old, write(a))
            assert rows(old) == rows(a)


def test_a_timeline_switch_while_it_streams(table, work):
    """Its upstream is a standby that is promoted: the relay goes over without a restart, its standbys with it."""
    with PgCluster(clone(table, work / "middle")) as middle:
        start_primary(middle, hot_standby="on")
        wait_streaming(table)
        with Relay(work / "relay", middle.port, name="relay").start() as relay:
            wait_streaming(middle, "relay")
            with hot_standby(table, work / "a", relay, "a") as a:
                wait_replayed(a, write(table))
                table.kill()
                middle.psql("ALTER SYSTEM SET synchronous_standby_names = ''")
                middle.psql("SELECT pg_promote()")
                wait_for(lambda: middle.value("SELECT pg_is_in_recovery()") == "f", middle.log_tail)
                wait_streaming(middle, "relay")
                wait_replayed(a, write(middle))
                assert rows(a) == rows(middle)
                assert (a.data_dir / "pg_wal" / "00000002.history").exists()
                # One that begins on the old timeline is led over, too.
                start = ask(relay, "TIMELINE_HISTORY 2")
                assert start[0][0] == "00000002.history" and start[0][1].startswith("1\t")


def test_relays_in_a_row(table, relay, work):
    """Three relays, and a standby behind the last: what it tells reaches the primary."""
    with Relay(work / "second", relay.serves, "--ack-apply", "ANY 1 (*)", name="second").start() as second, \
            Relay(work / "third", second.serves, "--ack-apply", "ANY 1 (*)", name="third").start() as third:
        relay.wait_downstream("second")
        second.wait_downstream("third")
        with hot_standby(table, work / "a", third, "a") as a:
            end = write(table, 20000)
            wait_replayed(a, end)
            assert rows(a) == rows(table)
            wait_for(lambda: second.downstream("third")["replay_lsn"] is not None, second.status)


def test_the_primary_is_away_when_the_relay_starts(table, relay, work):
    """It serves what it had received before: a standby that lacks it gets it there."""
    with hot_standby(table, work / "a", relay, "a") as a:
        wait_replayed(a, write(table))
        a.stop()
        end = write(table, 30000)
        table.psql("SELECT pg_switch_wal()", options=LOCALLY)
        wait_position(table, stage="flush")
        relay.stop(signal.SIGTERM)
        table.kill()
        relay.start()
        start_primary(a, hot_standby="on")
        wait_replayed(a, end)
        assert a.value("SELECT count(*) FROM t") == "32000"


def test_another_cluster_is_refused(table, relay, work):
    """A relay's directory stays that of its cluster: before anything of another is written, it ends."""
    relay.stop(signal.SIGTERM)
    contents = lambda: {file.name: file.read_bytes() for file in relay.data_dir.iterdir() if not file.name.startswith("xlogtemp")}
    before = contents()
    with standby.make_primary(work / "other") as other:
        start_primary(other)
        relay.upstream = other.port
        assert relay.launch().wait_end() == 1
        assert "database system identifier of the primary" in relay.log_text(), relay.log_tail()
    after = contents()
    assert before == after, [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


SECRET = "SELECT rolpassword FROM pg_authid WHERE rolname = 'replicator'"


def test_who_is_served(table, work):
    """Nobody whom no rule allows; passwords as PostgreSQL keeps them; a reload counts for new connections."""
    table.psql("CREATE ROLE replicator REPLICATION LOGIN PASSWORD 'open-sesame'", options=LOCALLY)
    secret = table.value(SECRET)
    rules = f'[[allow]]\nfrom = ["loopback"]\nuser = ["replicator"]\nmethod = "scram-sha-256"\n[users]\nreplicator = "{secret}"\n'
    with Relay(work / "relay", table.port, access=rules).start() as relay:
        wait_streaming(table)
        assert ask(relay, "IDENTIFY_SYSTEM", "replicator", "password=open-sesame")[0][1] == "1"
        for user, password in (("replicator", "wrong"), ("postgres", "open-sesame"), ("nobody", "x")):
            done = ask(relay, "IDENTIFY_SYSTEM", user, f"password={password}", check=False)
            assert done.returncode and ("password authentication failed" in done.stderr or "no rule of the relay" in done.stderr), done.stderr
        assert "open-sesame" not in relay.log_text() and secret not in relay.log_text()
        # Nobody at all.
        relay.access.write_text("")
        walrider("reload", "-D", relay.data_dir).expect()
        wait_for(lambda: "it counts for new connections" in relay.log_text(), relay.log_tail)
        assert "no rule of the relay allows" in ask(relay, "IDENTIFY_SYSTEM", "replicator", "password=open-sesame", check=False).stderr
        # What makes no sense changes nothing.  The rules are read before the next are written: a reload that comes late would read those.
        relay.access.write_text(rules)
        walrider("reload", "-D", relay.data_dir).expect()
        wait_for(lambda: relay.log_text().count("it counts for new connections") == 2, relay.log_tail)
        relay.access.write_text('[[allow]]\nfrom = ["all"]\nmethod = "trust"\n')
        walrider("reload", "-D", relay.data_dir).expect()
        wait_for(lambda: "what was read before still counts" in relay.log_text(), relay.log_tail)
        assert ask(relay, "IDENTIFY_SYSTEM", "replicator", "password=open-sesame")[0][1] == "1"


@pytest.fixture
def certificates(work):
    """Of two authorities, and by the first of a relay and its clients; how the relay uses them."""
    for authority in ("ours", "theirs"):
        certificate(work, authority, f"Authority {authority}")
    certificate(work, "relay", "localhost", "ours", "subjectAltName=IP:127.0.0.1")
    certificate(work, "replicator", "replicator", "ours")
    certificate(work, "another", "another", "ours")
    certificate(work, "stranger", "replicator", "theirs")
    return "--tls-certificate", work / "relay.crt", "--tls-key", work / "relay.key"


def test_tls(table, work, certificates):
    """Encrypted, with channel binding; whoever comes without is refused where a rule says so.  Clients are the psql of 17 and another
    relay: the libpq that comes with 18 here has no TLS.
    """
    table.psql("CREATE ROLE replicator REPLICATION LOGIN PASSWORD 'open-sesame'", options=LOCALLY)
    rules = ('[[allow]]\nfrom = ["loopback"]\ntls = "require"\nmethod = "scram-sha-256"\n'
             f'[users]\nreplicator = "{table.value(SECRET)}"\n')
    with Relay(work / "relay", table.port, *certificates, access=rules).start() as relay:
        wait_streaming(table)
        done = ask(relay, "IDENTIFY_SYSTEM", "replicator", "password=open-sesame sslmode=disable", check=False)
        assert "no rule of the relay allows" in done.stderr and "no encryption" in done.stderr
        verified = f"password=open-sesame sslmode=verify-full sslrootcert={work / 'ours.crt'} channel_binding=require"
        assert ask(relay, "IDENTIFY_SYSTEM", "replicator", verified, psql=install.bindir("17") / "psql")[0][1] == "1"
        far = f"host=127.0.0.1 port={relay.serves} user=replicator application_name=second"
        (work / "received").mkdir()
        for password, authority, said in (("wrong", "ours", "password authentication failed"), ("open-sesame", "theirs", "certificate")):
            done = walrider("receive", "-D", work / "received", "-n", "-d", f"{far} {verified} password={password} sslrootcert={work / authority}.crt")
            assert done.code == 1 and said in done.stderr, done
        with Relay(work / "second", f"{far} {verified}", name="second").start() as second:
            relay.wait_downstream("second")
            with hot_standby(table, work / "a", second, "a") as a:
                end = write(table, 50000)
                wait_replayed(a, end)
                assert rows(a) == rows(table)


@pytest.mark.parametrize("rule", ['method = "cert"', 'method = "scram-sha-256"\nclientcert = "verify-full"'], ids=["alone", "and a password"])
def test_clients_certificates(table, work, certificates, rule):
    """A client has to show a certificate of the authority in --tls-client-ca, with its user's name."""
    table.psql("CREATE ROLE replicator REPLICATION LOGIN PASSWORD 'open-sesame'", options=LOCALLY)
    secret = table.value(SECRET)
    rules = f'[[allow]]\nfrom = ["loopback"]\ntls = "require"\n{rule}\n[users]\nreplicator = "{secret}"\nanother = "{secret}"\n'
    with Relay(work / "relay", table.port, *certificates, "--tls-client-ca", work / "ours.crt", access=rules).start() as relay:
        wait_streaming(table)

        def identify(name, user="replicator"):
            shown = f"sslcert={work / name}.crt sslkey={work / name}.key" if name else "sslcert=none"
            options = f"password=open-sesame sslmode=verify-full sslrootcert={work / 'ours.crt'} {shown}"
            return ask(relay, "IDENTIFY_SYSTEM", user, options, check=False, psql=install.bindir("17") / "psql")
        assert identify("replicator").returncode == 0, identify("replicator").stderr
        for name, user, said in ((None, "replicator", "certificate"), ("another", "replicator", "certificate"),
                                 ("stranger", "replicator", "unknown ca"), ("replicator", "another", "certificate")):
            done = identify(name, user)
            assert done.returncode != 0 and said in done.stderr, (name, user, done)
        upstream = f"host=127.0.0.1 port={relay.serves} user=replicator password=open-sesame application_name=second sslmode=verify-full"
        shown = f"sslrootcert={work / 'ours.crt'} sslcert={work / 'replicator.crt'} sslkey={work / 'replicator.key'}"
        with Relay(work / "second", f"{upstream} {shown}", name="second").start():
            relay.wait_downstream("second")


@pytest.mark.parametrize("access, said", [
    ("nonsense", "line 1"),
    ('[[allow]]\nfrom = ["all"]\nmethod = "trust"\n', "rule 1"),
    ('[[allow]]\nfrom = ["all"]\ntls = "require"\nmethod = "scram-sha-256"\n', "--tls-certificate"),
    ('[users]\na = "secret"\n', "SELECT rolpassword"),
])
def test_rules_that_cannot_be(work, access, said):
    """Said at the start, with exit code 2; no secret is shown."""
    (work / "relay").mkdir()
    (work / "rules").write_text(access)
    done = walrider("relay", "-D", work / "relay", "-d", "host=127.0.0.1 port=1", "--listen", "127.0.0.1:0", "--access", work / "rules")
    assert done.code == USAGE and said in done.stderr and "secret\"" not in done.stderr, done


def test_one_that_does_not_read_harms_nobody(table, relay, work):
    """A downstream that is stopped in the middle holds up neither the primary nor the others, and memory stays bounded."""
    with hot_standby(table, work / "a", relay, "a") as a, hot_standby(table, work / "b", relay, "b") as b:
        receiver = int(a.value("SELECT pid FROM pg_stat_wal_receiver"))
        subprocess.run(["kill", "-STOP", str(receiver)], check=True)
        try:
            before = relay.memory()
            for _ in range(5):
                end = write(table, 50000)
            wait_replayed(b, end)
            Commit(table, "on").wait()
            assert relay.memory() - before < 16 << 20
        finally:
            subprocess.run(["kill", "-CONT", str(receiver)], check=True)
        wait_replayed(a, end)
        assert rows(a) == rows(b)


def test_a_silent_client_gets_everything(table, work):
    """It once got what the socket took at a time, and the rest when it said something."""
    with Relay(work / "relay", table.port, "--sender-timeout", "0").start() as relay:
        wait_streaming(table)
        start = parse_lsn(ask(relay, "IDENTIFY_SYSTEM")[0][2]) >> 20 << 20
        end = parse_lsn(write(table, 200000))
        wait_position(table, stage="flush")
        with Client(relay) as client:
            assert len(client.stream(start).wal(end)) >= end - start


@pytest.mark.parametrize("kind", ["relay", "standby"])
def test_a_slot_of_the_primary_does_not_go_back(table, work, kind):
    """With --ack-flush the relay, or a standby that serves, tells the primary of what others have flushed, nothing at first.  A slot follows
    what it is told: it once went to 0/1, and a checkpoint of the primary then kept no WAL at all."""
    table.psql("ALTER SYSTEM SET wal_keep_size = 0; SELECT pg_reload_conf()", options=LOCALLY)
    at = lambda: parse_lsn(table.value("SELECT coalesce(restart_lsn, '0/0') FROM pg_replication_slots WHERE slot_name = 'relay'"))
    table.psql("SELECT pg_create_physical_replication_slot('relay', true)", options=LOCALLY)
    before = at()
    options = "--slot", "relay", "--create-slot", "--ack-flush", "ANY 1 (a)"
    relay = (Relay(work / "relay", table.port, *options, "--if-not-exists") if kind == "relay" else
             that_serves(clone(table, work / "serving"), work / "access.toml", *options))
    with relay.start():
        wait_streaming(table)
        Commit(table, "remote_write").wait()
        write(table, 30000)
        table.psql("CHECKPOINT", options=LOCALLY)
        wait_position(table, stage="write")
        assert at() >= before >> 20 << 20
        with behind(table, work / "a", relay, "a") as a:
            Commit(table, "on").wait()
            reached = at()
            a.stop()
        relay.kill()
        relay.start()
        wait_streaming(table)
        write(table, 30000)
        table.psql("CHECKPOINT", options=LOCALLY)
        assert at() >= reached >> 20 << 20
        table.restart("immediate", listen_addresses="127.0.0.1")
        wait_streaming(table)
        assert table.value("SELECT wal_status FROM pg_replication_slots WHERE slot_name = 'relay'") != "lost"


def test_walrider_standby_behind_a_relay(table, relay, work):
    """It asks for the early stream first, which a relay does not have."""
    with Walrider(clone(table, work / "ours", relay.serves)).start() as ours:
        relay.wait_downstream("walrider")
        ours.wait_replayed(write(table))
        assert not ours.status()["early"]


def known(directory, *segments, history=None):
    """A relay's directory as an earlier run left it."""
    directory.mkdir()
    identity = dict(system_identifier="1", server_version="18.0", wal_segment_size=1 << 20)
    (directory / "walrider.relay.json").write_text(json.dumps(identity))
    for name, data in segments:
        (directory / name).write_bytes(data)
    if history:
        (directory / "00000002.history").write_text(history)
    return directory


def test_an_old_timeline_ends_where_its_wal_is_known(work):
    """What a timeline was left with is not here yet, only the file of the next one, which was made ahead: its zeros are not sent."""
    name, data = segment(2, 3)
    directory = known(work / "relay", (name + ".partial", bytes(len(data))), segment(1, 2, fill=b"x"), history="1\t0/304000\tno\n")
    with Relay(directory, "host=127.0.0.1 port=1").start() as relay, Client(relay) as client:
        client.stream(0x200000)
        assert client.wal(0x300000) == segment(1, 2, fill=b"x")[1]
        client.status(0x300000, reply=True)
        assert client.receive()["kind"] == "keepalive"
        assert client.receive(A_WHILE) is None


def test_the_end_of_a_timeline(work):
    """CopyDone of both sides, the next timeline, and another command on the same connection; one that does not answer is given up."""
    segments = segment(1, 2), segment(1, 3), segment(2, 3), segment(2, 4)
    directory = known(work / "relay", *segments, history="1\t0/304000\tno\n")
    with Relay(directory, "host=127.0.0.1 port=1", "--sender-timeout", "1s").start() as relay:
        with Client(relay) as client:
            client.stream(0x300000)
            assert len(client.wal(0x304000)) == 0x4000
            assert client.receive()["tag"] == b"c"
            # In one packet with the next command.
            client._send(b"c")
            client._send(b"Q", b"IDENTIFY_SYSTEM\0")
            assert client._until_ready() == [["2", "0/304000"]]
            assert client._until_ready() == [["1", "2", "0/500000", None]]
        with Client(relay) as client:
            client.stream(0x300000).wal(0x304000)
            with pytest.raises(Closed):
                while client.receive(10):
                    pass


def test_what_is_said_last_counts(work):
    """A report, and the end of the connection right behind it."""
    directory = known(work / "relay", segment(1, 2), segment(1, 3))
    with Relay(directory, "host=127.0.0.1 port=1").start() as relay:
        ask(relay, "CREATE_REPLICATION_SLOT s PHYSICAL")
        with Client(relay) as client:
            client.stream(0x200000, slot="s").wal(0x400000)
            client.status(0x380000)
        wait_for(lambda: relay.status()["slots"]["s"]["restart_lsn"] == "0/380000", lambda: relay.status()["slots"])


def test_what_was_not_sent_is_not_acknowledged(work):
    """One on a timeline of its own tells of what it cannot have from here."""
    directory = known(work / "relay", segment(1, 2), segment(1, 3))
    with Relay(directory, "host=127.0.0.1 port=1").start() as relay, Client(relay) as client:
        client.stream(0x200000).wal(0x400000)
        client.status(0xFFFFFFFF0000)
        wait_for(lambda: relay.downstream("client")["flush_lsn"] == "0/400000", relay.status)


def test_who_asks_and_does_not_read(work):
    """Answers are not kept for one that does not read them."""
    history = "1\t0/304000\tno\n" + "# a line of some length that says nothing\n" * 20000
    directory = known(work / "relay", segment(2, 3), history=history)
    with Relay(directory, "host=127.0.0.1 port=1").start() as relay, Client(relay) as client:
        before = relay.memory()
        client.socket.settimeout(1)
        try:
            for _ in range(1500):
                client._send(b"Q", b"TIMELINE_HISTORY 2\0")
        except TimeoutError:
            pass
        time.sleep(2)
        assert relay.memory() - before < 64 << 20
        assert ask(relay, "IDENTIFY_SYSTEM")[0][1] == "2"


def test_those_who_say_nothing_keep_nobody_out(work):
    """Of one address so many connections at once may be without a name; when they are gone, others are let in again."""
    directory = known(work / "relay", segment(1, 2))
    with Relay(directory, "host=127.0.0.1 port=1", "--max-connections", "2").start() as relay:
        with Client(relay, name="a"), Client(relay, name="b"):
            assert "too many clients already" in ask(relay, "IDENTIFY_SYSTEM", check=False).stderr
        silent = [socket.create_connection(("127.0.0.1", relay.serves)) for _ in range(40)]
        wait_for(lambda: "do not say who they are" in relay.log_text(), relay.log_tail)
        for connection in silent:
            connection.close()
        wait_for(lambda: ask(relay, "IDENTIFY_SYSTEM", check=False).returncode == 0, relay.log_tail)


def test_one_relay_to_a_directory(work):
    """Slots are known to one process alone: another one that serves the same directory does not start."""
    directory = known(work / "relay", segment(1, 2))
    with Relay(directory, "host=127.0.0.1 port=1").start() as relay:
        done = walrider("relay", "-D", directory, "-d", "host=127.0.0.1 port=1", "--listen", "127.0.0.1:0", "--access", relay.access)
        assert done.code == 1 and "already" in done.stderr, done


def test_without_wal_it_says_so(work):
    """It knows whose WAL it will have, and has none."""
    with Relay(known(work / "relay"), "host=127.0.0.1 port=1").start() as relay:
        assert "the relay is starting up" in ask(relay, "IDENTIFY_SYSTEM", check=False).stderr


def test_help_names_what_it_needs():
    """Without an address or rules it does not start."""
    done = subprocess.run([binary(), "relay", "-D", "/tmp", "-d", ""], capture_output=True, text=True, timeout=30)
    assert done.returncode == USAGE and "--listen" in done.stderr and "--access" in done.stderr
    assert LOOPBACK


@pytest.fixture
def serving(table, work):
    """One, which streams."""
    with that_serves(clone(table, work / "serving"), work / "access.toml").start() as standby:
        wait_streaming(table)
        yield standby


def test_a_standby_serves(table, serving, work):
    """`walrider standby` replays, and serves a hot standby what it receives; slots keep WAL that its restartpoints would recycle."""
    ask(serving, "CREATE_REPLICATION_SLOT a PHYSICAL RESERVE_WAL")
    with behind(table, work / "a", serving, "a", "a") as a:
        wait_replayed(a, write(table, 20000))
        assert rows(a) == rows(table)
        a.stop()
        first = serving.status()["replay"]["restartpoints"]
        for _ in range(6):
            write(table, 20000)
            table.psql("CHECKPOINT", options=LOCALLY)
        end = write(table)
        wait_position(table)
        wait_for(lambda: serving.status()["replay"]["restartpoints"] > first + 1, serving.status)
        serving.kill()
        serving.start()
        wait_streaming(table)
        start_primary(a, hot_standby="on")
        wait_replayed(a, end)
        assert rows(a) == rows(table)
        moved = lambda: len(list((serving.data_dir / "pg_wal").glob("0*")))
        wait_for(lambda: serving.status()["slots"]["a"]["active"], serving.status)
        table.psql("CHECKPOINT", options=LOCALLY)
        write(table, 20000)
        table.psql("CHECKPOINT", options=LOCALLY)
        wait_replayed(a, write(table))
        assert rows(a) == rows(table)
        # A restartpoint is under way, perhaps for seconds.
        wait_for(lambda: moved() < 40, lambda: (moved(), serving.status()))


def test_without_a_slot_it_is_told_that_wal_is_gone(table, serving, work):
    """Segments are recycled under one that was away: it gets none of what is in them now."""
    with behind(table, work / "a", serving, "a") as a:
        wait_replayed(a, write(table, 2000))
        a.stop()
        for _ in range(12):
            write(table, 20000)
            table.psql("CHECKPOINT", options=LOCALLY)
        wait_position(table)
        first = serving.status()["replay"]["restartpoints"]
        wait_for(lambda: serving.status()["spool"]["segments_recycled"] > 4, lambda: (first, serving.status()["spool"]))
        start_primary(a, hot_standby="on")
        wait_for(lambda: a.log_matches("requested WAL segment .* has already been removed"), a.log_tail)


def test_a_standby_that_serves_is_promoted(table, serving, work):
    """Those downstream follow the server on its directory."""
    with behind(table, work / "a", serving, "a") as a:
        wait_replayed(a, write(table))
        table.kill()
        serving.promote()
        with serving.serve() as promoted:
            promoted.psql("ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf()")
            a.psql(f"ALTER SYSTEM SET primary_conninfo = '{standby.conninfo(promoted.port, 'a')}'; SELECT pg_reload_conf()")
            wait_streaming(promoted, "a")
            wait_replayed(a, write(promoted))
            assert rows(a) == rows(promoted)


def test_remote_apply_on_both(table, work):
    """With --ack-apply, remote_apply waits for Walrider's replay and for that of the standby behind it."""
    access, port = work / "access.toml", free_port()
    access.write_text(LOOPBACK)
    ours = Walrider(clone(table, work / "serving"), "--listen", f"127.0.0.1:{port}", "--access", access, "--ack-apply", "ANY 1 (a)")
    ours.serves = port
    with ours.start():
        wait_streaming(table)
        Commit(table, "on").wait()
        blocked = Commit(table, "remote_apply")
        time.sleep(A_WHILE)
        assert not blocked.done
        with behind(table, work / "a", ours, "a") as a:
            blocked.wait()
            for number in range(10):
                Commit(table, "remote_apply").wait()
                assert rows(a) == rows(table), number
