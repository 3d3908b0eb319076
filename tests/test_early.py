"""`walrider standby --early` on a primary with the extension: the primary's own WAL, each level its own stage, nothing visible
that the primary has not flushed, and stock streaming where there is no extension.
"""

import re
import threading

import pytest

from tests.lab.faults.proxy import Proxy
from tests.lab.faults.shim import Disk
from tests.lab.loads.bank import PROMISING, Bank
from tests.lab.loads.commit import TABLE, Commit, expect
from tests.lab.oracle import early
from tests.lab.server import early_primary
from tests.lab.server.cluster import PgCluster, copy_tree, format_lsn, parse_lsn
from tests.lab.server.early_primary import EARLY
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, Walrider, wait_position, wait_streaming
from tests.lab.waiting import wait_for

pytestmark = pytest.mark.every_major

# Less than the primary keeps, so that all of it can be compared.
BULK = "INSERT INTO t (v) SELECT repeat(md5(g::text), 8) FROM generate_series(1, {}) g"


@pytest.fixture
def server(primary_template, work, request):
    """A primary with the extension and a table, and with the settings that a test is given."""
    with early_primary.make_primary(primary_template, work / "early", getattr(request, "param", "")) as server:
        server.psql(TABLE, options=LOCALLY)
        yield server


def load(server, seconds=1):
    """Transfers at all levels, beside WAL that nobody waits for."""
    bank = Bank(seconds)
    bank.found(server)
    bank.open(server)
    for _ in range(3):
        server.psql(BULK.format(3000), options="-c synchronous_commit=off")
        bank.wait_acknowledged(len(bank.books.acknowledged) + 20)
    bank.close()
    server.psql("DROP TABLE account, ledger", options=LOCALLY)


def bulk(server):
    """COPY, an index, an update of every row."""
    server.psql(f"CREATE TABLE b AS SELECT g, repeat(md5(g::text), 8) AS v FROM generate_series(1, 15000) g; "
                "CREATE INDEX ON b (v); UPDATE b SET g = g + 1; DROP TABLE b", options=LOCALLY)


def switch(server):
    """Segments that end early."""
    for number in range(10):
        server.psql(f"SELECT pg_switch_wal(); INSERT INTO t (v) VALUES ('{number}')", options=LOCALLY)


def crash(server):
    """The primary dies under load, with WAL that it has not flushed, and comes back."""
    server.disk.fsync_takes(20)
    writer = threading.Thread(target=lambda: server.psql("; ".join([BULK.format(200)] * 1000), check=False,
                                                         options="-c synchronous_commit=off"))
    writer.start()
    begun = parse_lsn(server.lsn())
    wait_for(lambda: parse_lsn(server.lsn()) > begun + (2 << 20), "two segments more")
    server.kill()
    writer.join()
    server.disk.fsync_takes(0)
    standby.start_primary(server)


@pytest.mark.parametrize("server", ["", "wal_buffers = 64kB\n", "shared_preload_libraries = 'walrider'\n"], indirect=True,
                         ids=["default", "small-buffers", "preloaded"])
def test_the_same_bytes(server, work):
    """After each kind of load the WAL is the primary's; at the end the directory is."""
    with Walrider(standby.clone(server, work / "ours"), *EARLY).start() as follower:
        wait_streaming(server)
        assert follower.status()["early"] is True
        wait_for(lambda: standby.replication(server)["sync_state"] == "sync", "its first reply", 20)
        for step in (load, bulk, switch, crash, load):
            begun = early_primary.flushed(server)
            step(server)
            wait_streaming(server)
            follower.wait_replayed(format_lsn(early_primary.flushed(server)))
            size = early.same_wal(server, follower.data_dir, begun)
            print(f"{step.__name__}: {size / 1e6:.1f} MB of WAL, "
                  f"{ {name: value for name, value in early_primary.sender(server).items() if name.endswith('bytes')} }")
        assert follower.status()["early"] is True
        # A sequence's WAL is ahead of it by the values that it may hand out without WAL.
        server.psql("SELECT setval('t_id_seq', last_value) FROM t_id_seq", options=LOCALLY)
        server.stop()
        final = parse_lsn(server.controldata()["Latest checkpoint location"])
        follower.wait_replayed(format_lsn(final + 1))
        follower.stop()
        early.same_wal(server, follower.data_dir, final, final + 32)
        early.same_pages(follower.data_dir, server.data_dir)


def test_each_level_waits_for_its_stage_alone(server, work):
    """As with stock streaming: a stuck fsync of the standby, a pause, a silent network; and an fsync of the primary's that
    is stuck holds all commits, however much the standby has."""
    disk = Disk(work / "shim", "pg_wal/")
    with Proxy(server.port) as network:
        with Walrider(standby.clone(server, work / "ours", network.port), *EARLY, disk=disk).start() as follower:
            wait_streaming(server)
            for level in PROMISING:
                Commit(server, level).wait()
            disk.hold_fsync()
            held = expect(server, ("on", "remote_apply"), ("off", "local", "remote_write"))
            row = standby.replication(server)
            assert parse_lsn(row["flush_lsn"]) < parse_lsn(row["write_lsn"]), row
            disk.hold_fsync(False)
            for commit in held:
                commit.wait()
            follower.pause()
            held = expect(server, ("remote_apply",), ("off", "local", "remote_write", "on"))
            follower.resume()
            held[0].wait()
            network.silence()
            held = expect(server, PROMISING, ("off", "local"))
            network.restore()
            for commit in held:
                commit.wait()
            server.disk.hold_fsync()
            held = expect(server, ("local", *PROMISING), ("off",))
            flushed = early_primary.flushed(server)
            wait_for(lambda: follower.position("flushed") > flushed, lambda: f"ahead of the primary: {follower.status()}", 20)
            assert follower.position("replayed") <= flushed
            server.disk.hold_fsync(False)
            for commit in held:
                commit.wait()
            assert early_primary.sender(server)["early_bytes"] > 0


def look(server, data_dir, start, work):
    """No reader meets a record in this pg_wal that the primary has not flushed; how many it meets."""
    records = early.valid_records(data_dir, start, work)
    flushed = early_primary.flushed(server)
    behind = [(format_lsn(begin), format_lsn(end)) for begin, end in records if end > flushed]
    assert not behind, f"valid behind {format_lsn(flushed)}, where the primary has flushed: {behind}"
    return len(records)


def by_hand(directory, target):
    """A stock hot standby on a copy of a directory, with nobody to stream from."""
    copy_tree(directory, target)
    (target / "postmaster.pid").unlink(missing_ok=True)
    follower = PgCluster(target)
    follower.configure("primary_conninfo = ''\nhot_standby = on\nsynchronous_standby_names = ''\n", "postgresql.auto.conf")
    return follower


def test_nothing_behind_the_horizon_is_visible(server, work, rng):
    """While the primary's fsync is stuck its WAL is at the standby, and nowhere that a reader looks: not pg_waldump, not a stock
    server on a copy of the directory, not after SIGKILL."""
    with Walrider(standby.clone(server, work / "ours"), *EARLY).start() as follower:
        wait_streaming(server)
        Commit(server, "remote_apply").wait()
        server.psql("CHECKPOINT")       # whoever begins in this directory begins near here, once it has replayed it
        start = parse_lsn(wait_position(server))
        assert look(server, follower.data_dir, start - 200, work) > 0, "the reader sees what is flushed"
        server.disk.hold_fsync()
        commits = [Commit(server, "on") for _ in range(4)]
        server.psql("INSERT INTO t (v) SELECT 'hidden' FROM generate_series(1, 3000)", options="-c synchronous_commit=off")
        commits += [Commit(server, "on") for _ in range(4)]
        flushed = early_primary.flushed(server)
        wait_for(lambda: follower.position("flushed") > flushed + 100_000, lambda: f"WAL ahead: {follower.status()}", 20)
        status = follower.status()
        assert status["early"] is True and parse_lsn(status["horizon"]) <= flushed, status
        look(server, follower.data_dir, start - 200, work)
        follower.kill()
        look(server, follower.data_dir, start - 200, work)
        with by_hand(follower.data_dir, work / "by-hand").start() as reader:
            wait_for(lambda: parse_lsn(reader.value("SELECT pg_last_wal_replay_lsn()")) >= start, "all that is flushed")
            assert reader.value("SELECT count(*) FROM t WHERE v = 'hidden'") == "0"
            assert parse_lsn(reader.value("SELECT pg_last_wal_replay_lsn()")) <= flushed
            assert int(reader.value("SELECT count(*) FROM t")) > 0
        follower.start()
        wait_streaming(server)
        assert early_primary.flushed(server) == flushed and not any(commit.done for commit in commits)
        look(server, follower.data_dir, start - 200, work)
        server.disk.hold_fsync(False)
        for commit in commits:
            commit.wait()
        wait_position(server)
        early.same_wal(server, follower.data_dir, start)


def test_nothing_behind_the_horizon_is_visible_under_load(server, work, rng):
    """The same at any moment, with an fsync that takes its time."""
    server.disk.fsync_takes(30)
    bank = Bank(rng.random())
    bank.found(server)
    with Walrider(standby.clone(server, work / "ours"), *EARLY).start() as follower:
        wait_streaming(server)
        bank.open(server)
        writer = threading.Thread(target=lambda: server.psql("; SELECT pg_sleep(0.002); ".join([BULK.format(20)] * 100_000),
                                                             check=False, options="-c synchronous_commit=off"), daemon=True)
        writer.start()
        seen = 0
        for number in range(12):
            start = (early_primary.flushed(server) // early.SEGMENT - 1) * early.SEGMENT      # the standby has that one
            bank.wait_acknowledged(len(bank.books.acknowledged) + rng.randrange(1, 30))
            if number % 3 == 2:
                follower.kill()
            seen += look(server, follower.data_dir, start, work)
            if number % 3 == 2:
                follower.start()
                wait_streaming(server)
        assert seen > 100 and early_primary.sender(server)["early_bytes"] > 0
        server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ~ '^(INSERT INTO t|SELECT pg_sleep)'")
        writer.join()
        bank.close()
        server.kill()
        follower.promote()
        with follower.serve() as promoted:
            bank.audit(promoted)


def test_without_the_extension(primary, work):
    """`auto` streams what is flushed, and says why; `on` is an error that says what to do; `off` does not ask."""
    primary.psql(TABLE, options=LOCALLY)
    directory = standby.clone(primary, work / "ours")
    for option, said in (("auto", True), ("off", False)):
        with Walrider(directory, "--early", option).start() as follower:
            wait_streaming(primary)
            Commit(primary, "remote_apply").wait()
            assert follower.status()["early"] is False
            assert bool(re.search(r"no early stream .*extension", follower.log_text())) is said, follower.log_tail()
            follower.stop()
            follower.log.unlink()
    follower = Walrider(directory, "--early", "on")
    try:
        follower.start()
        wait_for(lambda: "CREATE EXTENSION walrider" in follower.log_text(), lambda: f"a refusal\n{follower.log_tail()}", 20)
        assert follower.state() != "streaming" and not standby.replication(primary)
    finally:
        follower.kill()


def test_auto_takes_it_up(server, work):
    """`auto`, the default, uses the extension where it is; one that is made later is used from the next connection on."""
    server.psql("DROP EXTENSION walrider", options=LOCALLY)
    with Walrider(standby.clone(server, work / "ours")).start() as follower:
        wait_streaming(server)
        assert follower.status()["early"] is False
        server.psql("CREATE EXTENSION walrider", options=LOCALLY)
        server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        wait_for(lambda: follower.status()["early"], lambda: f"early\n{follower.log_tail()}", 20)
        wait_streaming(server)
        for level in PROMISING:
            Commit(server, level).wait()
        assert early_primary.sender(server)["sent_bytes"] > 0


def test_only_what_is_flushed(server, work):
    """walrider.early = off, set for the connection: our sender, and nothing ahead."""
    with Walrider(standby.clone(server, work / "ours", options="-c walrider.early=off"), *EARLY).start() as follower:
        wait_streaming(server)
        load(server)
        wait_position(server)
        found = early_primary.sender(server)
        assert found["early"] is False and found["early_bytes"] == 0 and found["sent_bytes"] > 0, found


def test_privileges(server, work):
    """A role that may stream and not CALL: `auto` streams what is flushed."""
    server.psql("CREATE ROLE plain LOGIN REPLICATION", options=LOCALLY)
    directory = standby.clone(server, work / "ours")
    with open(directory / "postgresql.auto.conf", "a") as conf:
        conf.write(f"primary_conninfo = 'host=127.0.0.1 port={server.port} user=plain application_name=walrider'\n")
    with Walrider(directory).start() as follower:
        wait_streaming(server)
        Commit(server, "remote_apply").wait()
        assert follower.status()["early"] is False
        assert "permission denied" in follower.log_text(), follower.log_tail()
        server.psql("GRANT EXECUTE ON PROCEDURE walrider.stream_wal TO plain", options=LOCALLY)
        server.psql("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        wait_for(lambda: follower.status()["early"], lambda: f"early\n{follower.log_tail()}", 20)
        wait_streaming(server)
        Commit(server, "remote_apply").wait()
