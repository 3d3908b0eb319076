"""PostgreSQL's own hot standby with early redo: catching up, being killed meanwhile, and being read."""

import os
import signal
import time
from contextlib import ExitStack

from tests.lab.faults.proxy import Proxy
from tests.lab.oracle.compare import compare
from tests.lab.oracle.page import pages_past
from tests.lab.server import recovery
from tests.lab.server.cluster import controldata, parse_lsn
from tests.lab.standby import readers
from tests.lab.standby.standby import wait_position
from tests.lab.standby.watched import hot, primary_of
from tests.lab.waiting import wait_for
from tests.lab.walrider import walrider

# Early, however little WAL there is.
EARLY = {"shared_preload_libraries": "walrider", "walrider.early_redo": "on", "walrider.redo_least_wal": "0"}
# Nobody's question is cancelled for replay: it waits.
CATCH_UP = {**recovery.SERVE_SETTINGS, "hot_standby": "on", "max_standby_archive_delay": "-1", "max_standby_streaming_delay": "-1"}
# Readers hold replay up; so far behind, in bytes, the writers wait for it.
MOST_BEHIND = 512 << 20
# What PostgreSQL says when it writes a page that is past minRecoveryPoint, which it cannot raise that far.
PAST = "xlog min recovery request .* is past current point .*"
BEGINS = "walrider redoes pages early"
PRIMARY = "max_prepared_transactions = 20\nmax_connections = 60\nwal_keep_size = 4GB\nmax_wal_size = 1GB\n"


# Replay waits for whoever compares rows.
WAITS = {"max_standby_streaming_delay": "-1", "max_standby_archive_delay": "-1"}


def prepare(fixture, data_dir):
    """A standby of the archive's, ready to start."""
    return recovery.prepare(fixture.backup, fixture.archive, data_dir, fixture.directory, signal="standby.signal")


def has_caught_up(fixture, server):
    """Whether it has replayed all of the archive."""
    return parse_lsn(server.value("SELECT pg_last_wal_replay_lsn()")) > parse_lsn(fixture.info["final_checkpoint"])


def catch_up(fixture, server, **settings):
    """Start, replay all of the archive, write all pages by a restartpoint at the last record, and stop."""
    with server.start(**{**CATCH_UP, **settings}):
        wait_for(lambda: has_caught_up(fixture, server), server.log_tail, timeout=600)
        server.psql("CHECKPOINT")
        server.stop()
    assert controldata(server.data_dir)["Latest checkpoint location"] == fixture.info["final_checkpoint"]
    recovery.pin_tablespaces(server.data_dir)
    return server


def same_pages(fixture, work, **settings):
    """Catch up with and without early redo, compare; returns the server that had it."""
    stock = catch_up(fixture, prepare(fixture, work / "stock"))
    ours = catch_up(fixture, prepare(fixture, work / "early"), **{**EARLY, **settings})
    compare(ours.data_dir, stock.data_dir)
    return ours


def summary(server):
    """What the startup process said of early redo at its end."""
    early, records, slices = server.log_matches(r"walrider redid (\d+) of (\d+) records early, in (\d+) slices")[-1]
    rest = server.log_matches(r"DETAIL:  (skipped \d+, in place .*)")[-1]
    found = dict(part.rsplit(" ", 1) for part in rest.split(", "))
    return {"early": int(early), "records": int(records), "slices": int(slices), **{name: int(count) for name, count in found.items()}}


def counters(server):
    """What early redo did so far; the primary has the extension."""
    return server.json("SELECT to_json(r) FROM walrider.stat_redo r")


def processes(server, backend_type):
    """Their pids."""
    return [int(pid) for (pid,) in server.psql(f"SELECT pid FROM pg_stat_activity WHERE backend_type = '{backend_type}'")]


def killed(fixture, work, rounds, rng, **settings):
    """Kill it again and again while it catches up, or one process first, which has the server start over: no page on disk is past
    minRecoveryPoint, and in the end they are PostgreSQL's. Another one begins where it is there before so many rounds."""
    stock = catch_up(fixture, prepare(fixture, work / "stock"))
    # Few buffers, so that pages are written all the time.
    settings = {**EARLY, "shared_buffers": "2MB", "bgwriter_delay": "10ms", "walrider.redo_slice": "1000", "walrider.redo_workers": "2", **settings}
    kills = 0
    while kills < rounds:
        server = prepare(fixture, work / "early")
        kills += _kill_on_its_way(fixture, server, rounds - kills, rng, settings)
        print(f"{kills} kills", flush=True)
        catch_up(fixture, server, **settings)
        assert server.log_matches(BEGINS)
        # What was dropped or cut off before the crash is there again for a while in replay after it, and PostgreSQL leaves some of that.
        found = walrider("compare", "--json", "--first", 100000, server.data_dir, stock.data_dir).json
        wrong = [it for it in found["first"] if it["b"] not in ("absent", "past the end")]
        assert not wrong and len(found["first"]) == found["differences"], wrong[:5]
        recovery.discard(server.data_dir)


def _kill_on_its_way(fixture, server, rounds, rng, settings):
    """At most so often, until it has caught up; how often."""
    for number in range(1, rounds + 1):
        begun = len(server.log_matches(BEGINS)) if number > 1 else 0
        server.start(**{**CATCH_UP, **settings})
        # Killed before that, it would be PostgreSQL's own replay that is; and behind a long record it would never get past that.
        wait_for(lambda: len(server.log_matches(BEGINS)) > begun or has_caught_up(fixture, server), server.log_tail)
        time.sleep(rng.uniform(0, 0.25))
        done = has_caught_up(fixture, server)
        if (kind := rng.choice([None, "startup", "walrider redo worker", "walrider raiser"])) and (victims := processes(server, kind)):
            os.kill(rng.choice(victims), signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.1))
        server.kill()
        bound = parse_lsn(controldata(server.data_dir)["Minimum recovery ending location"])
        assert not (past := pages_past(server.data_dir, bound)), past[:5]
        assert not (past := server.log_matches(PAST)), past[:5]
        if done:
            break
    return number


def same_rows(primary, *others):
    """They have the same in the tables of `readers`."""
    for query in (readers.MONEY, readers.BRANCH, readers.DOCUMENT, "SELECT sum(hashtext(q::text)) FROM queue q"):
        assert len({server.value(query) for server in (primary, *others)}) == 1, query


def same_rows_behind(promoted, follower):
    """The same, of one that was promoted, and another that follows it. Transactions that the promotion has ended may have had tables locked. A
    standby keeps such locks until it is told what runs (`StandbyReleaseOldLocks`), which a checkpoint does. Before that, a question waits for
    such a lock, and replay of a prune for that question: for ever, where standbys wait for ever, in PostgreSQL's own replay, too."""
    promoted.psql("CHECKPOINT")
    wait_position(promoted, name="second")
    same_rows(promoted, follower)


def cascaded(template, work, seconds, seed):
    """A base backup of the standby is taken in the midst of early redo, and follows that standby with early redo of its own."""
    with primary_of(template, work, PRIMARY) as primary, ExitStack() as stack:
        primary.psql("CREATE EXTENSION walrider;" + readers.TABLES)
        follower = stack.enter_context(hot(primary, work, **EARLY))
        crowd = readers.Crowd(seed)
        readers.write(crowd, primary)
        crowd.add("hold back", follower.server, readers.hold_back(follower.server))
        with crowd:
            crowd.stop.wait(seconds)
            second = stack.enter_context(hot(follower.server, work, name="second", **EARLY))
            crowd.stop.wait(seconds)
        wait_for(lambda: follower.server.psql("SELECT pg_wal_replay_resume()", check=False), "an answer")
        wait_position(follower.server, wait_position(primary), name="second")
        same_rows(primary, follower.server, second.server)
        return counters(second.server)


def _write(server, seconds, seed):
    """All kinds of writers, for so long."""
    crowd = readers.Crowd(seed)
    readers.write(crowd, server)
    with crowd:
        crowd.stop.wait(seconds)


def promoted(template, work, seconds, seed):
    """One with a backlog is promoted, works that off by early redo, and another follows it onto the new timeline; returns what the other did.

    The WAL that is there ends with a whole record."""
    with primary_of(template, work, PRIMARY) as primary, ExitStack() as stack:
        primary.psql("CREATE EXTENSION walrider;" + readers.TABLES)
        first = stack.enter_context(hot(primary, work, **EARLY, **WAITS)).server
        second = stack.enter_context(hot(first, work, name="second", **EARLY, **WAITS)).server
        wait_position(primary)
        first.psql("SELECT pg_wal_replay_pause()")
        _write(primary, seconds, seed)
        primary.psql("CHECKPOINT")
        wait_position(primary, stage="flush")
        first.psql("SELECT pg_promote(wait => false)")
        wait_for(lambda: first.value("SELECT pg_is_in_recovery()") == "f", first.log_tail)
        same_rows(primary, first)
        _write(first, seconds, seed)
        wait_for(lambda: first.value("SELECT count(*) FROM pg_stat_replication") == "1", second.log_tail)
        same_rows_behind(first, second)
        assert second.value("SELECT received_tli FROM pg_stat_wal_receiver") == "2"
        assert first.value(readers.MONEY) == str(readers.ACCOUNTS * readers.START)
        wait_for(lambda: first.log_matches("walrider redid"), first.log_tail)
        assert summary(first)["early"] > 100, summary(first)
        return counters(second)


def promoted_within_a_record(template, work, seed, **settings):
    """One whose WAL ends within a record, at a segment's end, is promoted.  PostgreSQL 18.6 itself PANICs then as the standby that follows,
    because it looks for the record's first segment on the new timeline; started again, it has all.  Returns its last words, if there were any."""
    with primary_of(template, work, PRIMARY) as primary, Proxy(primary.port) as proxy, ExitStack() as stack:
        primary.psql("CREATE EXTENSION walrider;" + readers.TABLES)
        first = stack.enter_context(hot(primary, work, port=proxy.port, **settings, **WAITS)).server
        follower = stack.enter_context(hot(first, work, name="second", **settings, **WAITS))
        second = follower.server
        wait_position(primary)
        proxy.throttle(down=1_500_000)
        _write(primary, 4, seed)
        # So that there is something left to cut on any machine.
        primary.psql("CREATE TABLE ahead AS SELECT g, repeat(md5(g::text), 20) FROM generate_series(1, 30000) g")
        cut = _cut_within_a_record(proxy, first)
        wait_for(lambda: second.value("SELECT pg_last_wal_receive_lsn()") == cut, second.log_tail)
        first.psql("SELECT pg_promote(wait => false)")
        wait_for(lambda: first.value("SELECT pg_is_in_recovery()") == "f", first.log_tail)
        # Writers would wait for transactions that are prepared, and whose end did not come.
        first.psql("CREATE TABLE after AS SELECT g FROM generate_series(1, 100000) g")
        goes_on = f"SELECT pg_last_wal_replay_lsn() > '{cut}'"
        wait_for(lambda: second.log_matches("PANIC: ") or second.psql(goes_on, check=False) == [["t"]], second.log_tail)
        words = second.log_matches("PANIC:  (.*)")
        if words:
            follower.wait_end()
            follower.start()
        same_rows_behind(first, second)
        return words


def _cut_within_a_record(proxy, server):
    """Cut a standby's stream where a segment of 1 MB ends, and a record does not; where that is."""
    with server.session() as session:
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, server.log_tail()
            received, = session.run("SELECT pg_last_wal_receive_lsn()")
            if parse_lsn(received) % (1 << 20):
                continue
            proxy.cut(refuse=True)
            # What was under way comes, and what is whole is replayed.
            wait_for(lambda: not server.psql("SELECT pid FROM pg_stat_wal_receiver WHERE status = 'streaming'"), server.log_tail)
            time.sleep(0.5)
            last, replayed = session.run("SELECT pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()")[0].split("|")
            if last == received and parse_lsn(replayed) < parse_lsn(last):
                return last
            proxy.restore()
            wait_for(lambda: session.run("SELECT pg_last_wal_receive_lsn()") != [last], server.log_tail)


def watched(template, work, seconds, seed, **settings):
    """Readers look at a standby that works off one backlog after the other; returns what early redo did."""
    with primary_of(template, work, PRIMARY) as primary:
        primary.psql("CREATE EXTENSION walrider")
        if library := settings.get("shared_preload_libraries"):
            primary.psql(f"UPDATE pg_proc SET probin = '{library}' WHERE probin = '$libdir/walrider'")
        primary.psql(readers.TABLES)
        with hot(primary, work, **{**EARLY, **settings}) as follower:
            crowd = readers.Crowd(seed)
            backlog = readers.Backlog(MOST_BEHIND)
            crowd.add("backlog", primary, backlog.look)
            readers.write(crowd, primary, backlog.bounded)
            for number in range(3):
                crowd.add(f"look {number}", follower.server, readers.look)
            crowd.add("stay", follower.server, readers.stay)
            crowd.add("visit", follower.server, readers.visit(follower.server))
            crowd.add("hold back", follower.server, readers.hold_back(follower.server))
            with crowd:
                crowd.stop.wait(seconds)
            wait_for(lambda: follower.server.psql("SELECT pg_wal_replay_resume()", check=False), "an answer")
            # At worst it is behind by all that time.
            wait_position(primary, timeout=60 + seconds)
            same_rows(primary, follower.server)
            found = counters(follower.server)
        assert not follower.server.log_matches(f"PANIC|terminated by signal|{PAST}"), follower.log_tail()
    assert found["active"] and found["refused"] == 0, found
    return {**found, "looks": sum(count for name, count in crowd.counts.items() if name.startswith("look"))}
