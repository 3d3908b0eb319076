"""`replay --promote`: what it leaves is what stock PostgreSQL leaves when it ends the same recovery, and starts at once."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.lab import install
from tests.lab.faults import shim
from tests.lab.loads import load
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, controldata, copy_tree, parse_lsn, run
from tests.lab.waiting import wait_for
from tests.lab.walrider import FAILED, USAGE, replay, walrider

ROUNDS = int(os.environ.get("WALRIDER_PROMOTE_ROUNDS", "12"))

SEGMENT = 1 << 20
PAGE = 8192
CONF = """
shared_buffers = 32MB
max_wal_size = 64MB
checkpoint_timeout = 1h
autovacuum = off
track_commit_timestamp = on
wal_log_hints = on
"""
# What stock says of itself as it runs, and the clock.
OWN = {"Database cluster state", "pg_control last modified", "Time of latest checkpoint"}
SETUP = """
CREATE TABLE accounts (id int PRIMARY KEY, note text);
INSERT INTO accounts SELECT n, repeat('x', 100) FROM generate_series(1, 2000) n;
CREATE SEQUENCE counter;
CREATE UNLOGGED TABLE scratch (id serial PRIMARY KEY, note text);
CREATE UNLOGGED TABLE scratch_away (id int PRIMARY KEY) TABLESPACE away;
INSERT INTO scratch (note) SELECT 'lost' FROM generate_series(1, 500);
INSERT INTO scratch_away SELECT generate_series(1, 500);
"""


# Where recovery ends, in bytes before the end of a page (False) or a segment (True): there the checkpoint record of 114 bytes
# begins.  It fits, or goes on behind the boundary, whole or by its last bytes, or begins behind it.
BOUNDARIES = [(within, before) for within in (False, True) for before in (0, 8, 24, 64, 112, 120, 128)]


def record_ends(server):
    """Makes records that end just there; returns where they begin, the target of a recovery that ends behind them."""
    ends = {}
    for segment, before in BOUNDARIES:
        ends[segment, before] = server.message_up_to(SEGMENT if segment else PAGE, before)
    ends["crosses a page"] = server.message_up_to(PAGE, PAGE - 512)
    ends["crosses a segment"] = server.message_up_to(SEGMENT, SEGMENT - 512)
    server.psql("SELECT pg_logical_emit_message(false, 'p', 'x')")
    ends["switch"] = server.lsn()
    server.switch_wal()
    server.psql("SELECT pg_logical_emit_message(false, 'p', 'x', true)")
    return ends


class Primary:
    """A primary in the middle of its life: a backup, and the WAL since, with something of everything that promotion ends."""

    def __init__(self, directory):
        self.directory = directory
        self.location = directory / "away"
        self.location.mkdir()
        self.archive = directory / "archive"
        self.server = PgCluster.init(directory / "primary", self.archive, wal_segsize_mb=1, conf=CONF)
        with self.server as server:
            server.start()
            server.psql(f"CREATE TABLESPACE away LOCATION '{self.location}'")
            server.psql(SETUP)
            self.backup = server.basebackup(directory / "backup", f"--tablespace-mapping={self.location}={directory}/mapped",
                                            wal="stream")
            self.begin = server.lsn()
            self.load(server)
            self.ends = record_ends(server)
            self.expected = server.psql("SELECT * FROM accounts ORDER BY id")
            self.prepared = server.psql("SELECT gid FROM pg_prepared_xacts ORDER BY 1")
            server.stop("immediate")
        self.server.complete_archive()
        self.last = max(file.name for file in self.archive.iterdir() if len(file.name) == 24)

    def load(self, server):
        """Commits, multixacts, prepared transactions before and after a checkpoint, unlogged tables made and dropped."""
        server.psql("BEGIN; INSERT INTO accounts VALUES (-1, 'early'); PREPARE TRANSACTION 'early'")
        server.psql("BEGIN; INSERT INTO accounts VALUES (-2, 'ends'); PREPARE TRANSACTION 'ends'")
        server.psql("CREATE UNLOGGED TABLE gone (id int); DROP TABLE gone")
        server.psql("SELECT nextval('counter') FROM generate_series(1, 50)")
        server.psql("CHECKPOINT")
        server.psql("UPDATE accounts SET note = 'after the checkpoint' WHERE id % 3 = 0")
        server.psql("CREATE UNLOGGED TABLE late (id serial PRIMARY KEY, note text); INSERT INTO late (note) VALUES ('lost')")
        server.psql("COMMIT PREPARED 'ends'")
        server.switch_wal()
        server.psql("BEGIN; INSERT INTO accounts VALUES (-3, 'late'); PREPARE TRANSACTION 'late'")
        with server.session() as one, server.session() as two:
            one.run("BEGIN; SELECT * FROM accounts WHERE id = 7 FOR SHARE")
            two.run("BEGIN; SELECT * FROM accounts WHERE id = 7 FOR SHARE")
            one.run("COMMIT")
            two.run("COMMIT")
        server.psql("CREATE TABLE newest (id int); INSERT INTO newest VALUES (1)")
        server.psql("SELECT pg_create_restore_point('here')")
        self.switch = server.value("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")
        xid = server.psql("BEGIN; INSERT INTO newest VALUES (3); SELECT txid_current(); COMMIT")[-1][0]
        self.target = dict(xid=xid, time=server.value(f"SELECT pg_xact_commit_timestamp('{xid}'::xid)"))
        server.psql("INSERT INTO newest VALUES (2)")
        server.psql("SELECT nextval('counter')")

    def copy(self, data_dir, conf=""):
        """A copy of the backup whose WAL is archived beside it."""
        recovery.copy_backup(self.backup, data_dir)
        archived = Path(f"{data_dir}.archived")
        archived.mkdir()
        server = PgCluster(data_dir, archived)
        server.configure(f"archive_command = '{server.archive_command()}'\n{conf}")
        return server


@pytest.fixture(scope="module")
def origin(tmp_path_factory, server_major):
    """One primary for all tests here."""
    return Primary(tmp_path_factory.mktemp("promote"))


def promote(server, wal, *options):
    """`replay --promote` of a directory."""
    result = replay(server.data_dir, wal, "--promote", *options).expect()
    assert result.json["promoted"], result.json
    return result.json


def stock_promotes(server, wal, **target):
    """Stock PostgreSQL ends the same recovery."""
    (server.data_dir / "recovery.signal").touch()
    server.configure(recovery.restore_settings(wal, **target), "postgresql.auto.conf")
    recovery.recover_and_promote(server, recovery_target_action="promote", hot_standby="off", max_connections="60",
                                 max_worker_processes="8", max_prepared_transactions="20")
    server.stop("immediate")
    return server


def check_starts_at_once(server, timeline=2):
    """PostgreSQL finds a clean shutdown on the new timeline: nothing is redone."""
    server.start()
    text = server.log.read_text()
    assert "database system was shut down at" in text and "redo starts" not in text, text
    assert server.value("SELECT timeline_id FROM pg_control_checkpoint()") == str(timeline)
    assert server.value("SELECT pg_is_in_recovery()") == "f"
    return server


def check_contents(origin, server):
    """All that the primary had, and all that it could do."""
    assert server.psql("SELECT * FROM accounts ORDER BY id") == origin.expected
    assert server.psql("SELECT gid FROM pg_prepared_xacts ORDER BY 1") == origin.prepared == [["early"], ["late"]]
    server.psql("COMMIT PREPARED 'early'; COMMIT PREPARED 'late'")
    assert server.psql("SELECT id FROM accounts WHERE id < 0 ORDER BY 1") == [["-3"], ["-2"], ["-1"]]
    assert int(server.value("SELECT nextval('counter')")) > 51
    assert server.value("SELECT nextval('late_id_seq')") == "1", "an unlogged sequence begins anew"
    for table in ("scratch", "scratch_away", "late"):
        assert server.value(f"SELECT count(*) FROM {table}") == "0", table
        server.psql(f"INSERT INTO {table} (id) VALUES (1); SELECT * FROM {table} WHERE id = 1")
    stamps = server.psql("SELECT count(*), count(pg_xact_commit_timestamp(xmin)) FROM newest")
    assert stamps == [["3", "3"]]
    server.psql("BEGIN; SELECT * FROM accounts WHERE id = 7 FOR SHARE; UPDATE accounts SET note = 'locked' WHERE id = 7; COMMIT")
    server.psql("".join(f"CREATE TABLE t{n} (id int PRIMARY KEY, note text);" for n in range(30)))
    assert server.value("SELECT count(*) = count(DISTINCT oid) FROM pg_class") == "t"
    server.psql("VACUUM FREEZE; CHECKPOINT")
    run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--install-missing"], env=server.environment())


def segment_name(timeline, lsn):
    """The file of the segment that this position is in."""
    return f"{timeline:08X}{lsn >> 32:08X}{(lsn & 0xFFFFFFFF) // SEGMENT:08X}"


def new_segment(server, json):
    """The new timeline's first segment, up to the end of its first record if that does not go on in the next one."""
    checkpoint = parse_lsn(json["promoted"]["checkpoint_lsn"])
    switch = parse_lsn(json["promoted"]["switch_lsn"])
    name = segment_name(json["promoted"]["timeline"], switch)
    end = min(checkpoint % SEGMENT + 120 + (24 if checkpoint % PAGE + 120 > PAGE else 0), SEGMENT)
    return (server.data_dir / "pg_wal" / name).read_bytes()[:end]


def check_wal(ours, stock, json):
    """Byte for byte, but for the time of the checkpoint and the checksum; and pg_waldump reads it."""
    mine, theirs = new_segment(ours, json), new_segment(stock, json)
    differ = [at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    assert len(differ) <= 12, differ
    timeline = json["promoted"]["timeline"]
    lsn = json["promoted"]["checkpoint_lsn"]
    files = sorted({segment_name(timeline, parse_lsn(lsn) + at) for at in (0, 113)})
    # Without files, it takes the size of segments from any that it finds first, prepared ones without a header included.
    dump = [run([install.program("pg_waldump"), "-p", server.data_dir / "pg_wal", "-s", lsn, "-n", "1",
                 *files]).stdout for server in (ours, stock)]
    assert dump[0] == dump[1] and "CHECKPOINT_SHUTDOWN" in dump[0]
    history = f"pg_wal/{timeline:08X}.history"
    assert (ours.data_dir / history).read_bytes() == (stock.data_dir / history).read_bytes()


def check_control(ours, stock):
    """What must differ: the state, because the other one runs; and the time."""
    theirs, control = controldata(stock.data_dir), controldata(ours.data_dir)
    assert control["Database cluster state"] == "shut down"
    assert {key for key in control if control[key] != theirs[key]} <= OWN, (control, theirs)


@pytest.mark.every_major
def test_as_stock_promotes(origin, work):
    """Control file, WAL and files beside those of stock PostgreSQL; then it serves."""
    stock = stock_promotes(origin.copy(work / "stock"), origin.archive)
    ours = origin.copy(work / "ours")
    json = promote(ours, origin.archive)
    check_control(ours, stock)
    check_wal(ours, stock, json)
    assert not any((ours.data_dir / name).exists() for name in ("recovery.signal", "standby.signal", "backup_label"))
    compared = walrider("compare", ours.data_dir, stock.data_dir).json
    differ = {(file["file"], file["field"]) for file in compared["first"]}
    assert differ <= {("global/pg_control", field) for field in ("state", "checkPointCopy.time")}, compared
    assert compared["relations"] > 500 and compared["differences"] == len(differ) and "other" not in compared["classes"]
    run([install.program("pg_checksums"), "--check", "-D", ours.data_dir])
    with check_starts_at_once(ours):
        check_contents(origin, ours)
        ours.stop()
    with ours:
        ours.start()


@pytest.mark.parametrize("end", [*BOUNDARIES, "crosses a page", "crosses a segment", "switch"], ids=str)
def test_wherever_wal_ends(origin, work, end):
    """At, before and behind the ends of pages and segments, the same bytes as stock writes."""
    lsn = origin.ends[end]
    ours, stock = origin.copy(work / "ours"), origin.copy(work / "stock")
    json = promote(ours, origin.archive, "--target-lsn", lsn)
    if isinstance(end, tuple):
        unit, before = SEGMENT if end[0] else PAGE, end[1]
        assert -parse_lsn(json["promoted"]["switch_lsn"]) % unit == before
    stock_promotes(stock, origin.archive, target=("lsn", lsn))
    check_control(ours, stock)
    check_wal(ours, stock, json)
    with check_starts_at_once(ours):
        ours.psql("INSERT INTO accounts VALUES (-100, 'new'); CHECKPOINT")
        ours.stop("immediate")
    with ours:
        ours.start()
        assert ours.value("SELECT count(*) FROM accounts WHERE id = -100") == "1"


@pytest.mark.parametrize("kind, inclusive", [("name", True), ("time", True), ("time", False), ("xid", True), ("xid", False),
                                             ("lsn", False), ("immediate", True)])
def test_targets(origin, work, kind, inclusive):
    """The history file says why, in PostgreSQL's words."""
    value = {"name": "here", "immediate": None, **origin.target}.get(kind)
    if kind == "lsn":
        value = origin.ends["switch"]
    ours, stock = origin.copy(work / "ours"), origin.copy(work / "stock")
    options = ["--target-immediate"] if kind == "immediate" else [f"--target-{kind}", value]
    json = promote(ours, origin.archive, *options, *([] if inclusive else ["--target-exclusive"]))
    assert json["end_reason"] == "target"
    stock_promotes(stock, origin.archive, target=(kind, value), inclusive=inclusive)
    check_control(ours, stock)
    check_wal(ours, stock, json)
    with check_starts_at_once(ours):
        pass


def test_after_a_mixed_load(plain, work):
    """Counters and limits after everything that changes them, on the third timeline; contents as on the primary."""
    stock = recovery.prepare(plain.backup, plain.archive, work / "stock", plain.directory)
    recovery.recover_and_promote(stock, recovery_target_action="promote", hot_standby="off")
    stock.stop("immediate")
    recovery.pin_tablespaces(stock.data_dir)
    ours = PgCluster(plain.copy(work / "ours"))
    ours.configure("archive_mode = off", "postgresql.auto.conf")
    json = promote(ours, plain.archive)
    assert json["promoted"]["timeline"] == plain.info["timeline"] + 1
    recovery.pin_tablespaces(ours.data_dir)
    theirs, control = controldata(stock.data_dir), controldata(ours.data_dir)
    differ = {key for key in control if control[key] != theirs[key]}
    # The server's own settings, which it logged after its checkpoint.
    assert {key for key in differ if not key.endswith(" setting")} <= OWN, (control, theirs)
    compared = walrider("compare", ours.data_dir, stock.data_dir).json
    assert {file["file"] for file in compared["first"]} == {"global/pg_control"}, compared
    with ours:
        ours.launch(**recovery.SERVE_SETTINGS)
        ours.wait_ready()
        assert "redo starts" not in ours.log.read_text()
        assert load.contents(ours) == plain.info["expected"]
        run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--no-dependent-toast", "--install-missing"],
            env=ours.environment())


def test_a_target_before_the_last_switch(origin, work):
    """The newest timeline is 2, but recovery stops before that began: timeline 3 branches off timeline 1, and stock agrees."""
    first = origin.copy(work / "first")
    promote(first, origin.archive)
    both = Path(shutil.copytree(origin.archive, work / "both"))
    with first:
        first.start()
        first.switch_wal()
        first.stop()
    first.archive = both
    first.complete_archive()
    ours, stock = origin.copy(work / "ours"), origin.copy(work / "stock")
    lsn = origin.ends["crosses a page"]
    json = promote(ours, both, "--target-lsn", lsn)
    assert json["promoted"]["timeline"] == 3
    stock_promotes(stock, both, target=("lsn", lsn))
    check_control(ours, stock)
    check_wal(ours, stock, json)
    with check_starts_at_once(ours, timeline=3):
        ours.psql("CREATE TABLE third (id int); CHECKPOINT")
        ours.stop()
    # What the history says is read the same way again.
    (ours.data_dir / "recovery.signal").touch()
    ours.configure("recovery_target_lsn = ''", "postgresql.auto.conf")
    again = promote(ours, ours.data_dir / "pg_wal", "--target-timeline", "3")
    assert again["promoted"]["timeline"] == 4


def test_what_is_archived(origin, work):
    """The history, and the last segment of the old timeline as .partial, as stock does it; nothing else of the old one stays."""
    names = []
    for kind in ("ours", "stock"):
        server = origin.copy(work / kind, "archive_timeout = 0")
        for segment in origin.archive.iterdir():
            shutil.copy(segment, server.data_dir / "pg_wal" / segment.name)
        last = server.data_dir / "pg_wal" / origin.last
        (last.parent / (origin.last[:-1] + "F")).write_bytes(last.read_bytes())     # behind the end
        if kind == "ours":
            promote(server, server.data_dir / "pg_wal")
            status = {file.name for file in (last.parent / "archive_status").iterdir()}
            assert {"00000002.history.ready", f"{origin.last}.partial.ready"} <= status
            with check_starts_at_once(server):
                wait_for(lambda: (server.archive / f"{origin.last}.partial").exists(), "the old segment is archived")
                server.stop("immediate")
        else:
            server.archive.joinpath("nothing").mkdir()
            stock_promotes(server, server.archive / "nothing")
        # Older segments, stock recycles with its first checkpoint.
        names.append({file.name for file in last.parent.iterdir() if file.name.startswith("00000001")
                      and file.name >= origin.last or "history" in file.name})
    assert names[0] == names[1] == {f"{origin.last}.partial", "00000002.history"}


def test_others_follow_and_the_old_primary_rewinds(origin, work):
    """A stock standby from the old timeline's backup switches over; pg_rewind makes the old primary one, too."""
    old = PgCluster(copy_tree(origin.server.data_dir, work / "old"))
    with old:
        old.start(archive_mode="off")
        old.psql("CREATE TABLE diverged AS SELECT generate_series(1, 1000) AS id; CHECKPOINT")
        old.stop()
    ours = origin.copy(work / "ours", "wal_keep_size = 64MB")
    promote(ours, origin.archive)
    with check_starts_at_once(ours):
        ours.psql("INSERT INTO accounts VALUES (-200, 'on the new timeline')")
        old.configure(recovery.restore_settings(origin.archive), "postgresql.auto.conf")
        run([install.program("pg_rewind"), "-D", old.data_dir, "--source-server", ours.dsn(), "--no-sync", "-c"],
            env=ours.environment())
        backup = PgCluster(recovery.copy_backup(origin.backup, work / "backup"))
        for standby in (old, backup):
            (standby.data_dir / "standby.signal").touch()
            standby.configure(f"primary_conninfo = '{ours.dsn()}'\narchive_mode = off\n"
                              + recovery.restore_settings(origin.archive), "postgresql.auto.conf")
            with standby:
                standby.start()
                wait_for(lambda: standby.value("SELECT count(*) FROM accounts WHERE id = -200") == "1",
                         standby.log_tail)
                assert standby.value("SELECT to_regclass('diverged') IS NULL") == "t"


def test_the_end_command(origin, work):
    """Run in the data directory, with %r; its failure is told; what is no placeholder is refused before anything is done."""
    ours = origin.copy(work / "ours", "recovery_end_command = 'echo %%%r > ended; exit 3'")
    result = replay(ours.data_dir, origin.archive, "--promote").expect()
    assert "recovery_end_command" in result.stderr and "exit status: 3" in result.stderr
    assert (ours.data_dir / "ended").read_text().startswith("%00000002")
    with check_starts_at_once(ours):
        pass
    other = origin.copy(work / "other", "recovery_end_command = 'echo %f'")
    result = replay(other.data_dir, origin.archive, "--promote").expect(FAILED)
    assert "only %r and %% are placeholders" in result.stderr
    assert not (other.data_dir / "pg_wal" / "00000002.history").exists()


def test_what_is_not_promoted(origin, work):
    """A run that follows; a target that is not reached; a server that crashed, whose end nobody knows."""
    assert replay(work, origin.archive, "--promote", "--follow").code == USAGE
    ours = origin.copy(work / "ours")
    result = replay(ours.data_dir, origin.archive, "--promote", "--target-name", "nowhere").expect(FAILED)
    assert "before the configured recovery target was reached" in result.stderr
    assert controldata(ours.data_dir)["Database cluster state"] == "shut down in recovery"
    crashed = copy_tree(origin.server.data_dir, work / "crashed")
    assert "is of a server that crashed" in walrider("replay", "-D", crashed, "--promote").expect(FAILED).stderr


def test_promoting_twice_changes_nothing(origin, work):
    """Until a server has written there, it is the same promotion, whatever of it was done."""
    ours = origin.copy(work / "ours")
    first = promote(ours, origin.archive)["promoted"]
    (ours.data_dir / "standby.signal").touch()      # as if stopped before it was removed
    before = controldata(ours.data_dir)
    assert promote(ours, origin.archive)["promoted"] == first
    assert controldata(ours.data_dir) == before
    with check_starts_at_once(ours):
        ours.stop()
    third = promote(ours, ours.data_dir / "pg_wal")["promoted"]
    assert third["timeline"] == 3
    with ours:
        ours.start()
        assert ours.psql("SELECT * FROM accounts ORDER BY id") == origin.expected


def is_kept_out(server):
    """Whether PostgreSQL refuses to start, and says who must run first."""
    if "walrider_was_interrupted" not in (server.data_dir / "postgresql.auto.conf").read_text():
        return False
    server.launch()
    assert server.wait_end(60) != 0
    assert 'unrecognized configuration parameter "walrider_was_interrupted__run_the_same_walrider_command_again"' \
        in server.log_tail()
    return True


def finish(server, wal, options, stock):
    """Stock PostgreSQL, or the same command, makes a primary of what a kill has left; which of them."""
    kept_out = is_kept_out(server)
    if kept_out or not stock:
        promote(server, wal, *options)
        assert not is_kept_out(server)
        check_starts_at_once(server, timeline=int(controldata(server.data_dir)["Latest checkpoint's TimeLineID"]))
        return "ours, stock is kept out" if kept_out else "ours"
    recovery.recover_and_promote(server, max_connections="60", recovery_target_action="promote")
    return "stock"


def test_killed_at_any_step(origin, work, rng):
    """Before any of its last fsyncs, renames and removals: the same command, or stock, makes a primary of what is left."""
    disk = shim.Disk(work / "disk", work)
    whole = origin.copy(work / "whole")
    plain = origin.copy(work / "plain")
    replay(plain.data_dir, origin.archive, env=disk.kill_at(0)).expect()
    without = len(disk.calls())
    replay(whole.data_dir, origin.archive, "--promote", env=disk.kill_at(0)).expect()
    last = len(disk.calls())
    steps = range(without - 10, last + 1)
    chosen = sorted(rng.sample(steps, min(ROUNDS, len(steps))))
    print(f"{without} calls without promotion, {last} with; killed at {chosen}")
    left = []
    for number, step in enumerate(chosen, rng.choice([0, 1])):
        ours = origin.copy(work / f"round{step}")
        result = replay(ours.data_dir, origin.archive, "--promote", env=disk.kill_at(step))
        if result.code == 0:        # threads: one call less than before
            assert step >= steps[-1] - 3, (step, steps)
        state = controldata(ours.data_dir)["Database cluster state"]
        signals = [ours.data_dir / name for name in ("recovery.signal", "standby.signal") if (ours.data_dir / name).exists()]
        assert signals or state == "shut down", "without a signal file it is a primary's"
        left.append((step, state, finish(ours, origin.archive, (), number % 2 == 0)))
        with ours:
            check_contents(origin, ours)
        shutil.rmtree(ours.data_dir)
    print(left)
    assert any(state == "shut down in recovery" for _, state, _ in left), left


# Where recovery ends, and the timeline it follows.
KILLED = [("here", "latest"), ("here", "current"), ("here", "1"), ("boundary", "latest"), ("time", "latest"), ("xid", "latest"), (None, None)]


@pytest.mark.parametrize("end, timeline", KILLED, ids=str)
def test_killed_with_a_transaction_prepared_in_the_last_segment(origin, work, rng, end, timeline):
    """Before whatever a promotion does to history, segments, prepared transactions, control file and signals: stock finishes,
    or is kept out, and the same command does; what was prepared just before can be committed.

    With a target, for each way to name the timeline; where a segment ends; a time, and before a transaction, which recovery once passed when it
    followed the timeline that it had begun; without a target, where WAL ends in this segment. By default in the two places that count, at the
    beginning, and in another one.  What power loss takes with it is not tried here.
    """
    wal = work / "archive"
    wal.mkdir()
    for file in origin.archive.iterdir():
        if end or file.name <= origin.switch:
            os.link(file, wal / file.name)
    options = dict(here=["--target-name", "here"], boundary=["--target-lsn", origin.ends[True, 0]],
                   time=["--target-time", origin.target["time"]], xid=["--target-xid", origin.target["xid"], "--target-exclusive"]).get(end, [])
    options += ["--target-timeline", timeline] if timeline else []
    disk = shim.Disk(work / "disk", work)
    begun = origin.copy(work / "begun")
    replay(begun.data_dir, wal, *options).expect()
    whole = PgCluster(copy_tree(begun.data_dir, work / "whole"))
    replay(whole.data_dir, wal, "--promote", *options, env=disk.kill_at(0)).expect()
    # The program goes through a descriptor; fsync tells where that leads.
    calls = [re.sub(rf"/proc/self/fd/\d+/|{whole.data_dir}/", "", call) for call in disk.calls()]
    first = next(at for at, path in enumerate(calls) if "xlogtemp" in path)
    behind_history = next(at for at, path in enumerate(calls) if "00000002.history" in path and ".tmp" not in path) + 3
    at_control = len(calls) - calls[::-1].index("global/pg_control")
    # Each is the moment before the call.
    steps = range(first + 1, len(calls) + 1)
    chosen = steps if ROUNDS >= len(steps) else sorted({steps[0], behind_history, at_control, rng.choice(steps)})
    finished = []
    for step in chosen:
        ours = PgCluster(copy_tree(begun.data_dir, work / f"round{step}"))
        replay(ours.data_dir, wal, "--promote", *options, env=disk.kill_at(step))
        try:
            by = finish(ours, wal, options, stock=True)
            with ours:
                assert ours.psql("SELECT gid FROM pg_prepared_xacts ORDER BY 1") == origin.prepared
                ours.psql("COMMIT PREPARED 'early'; COMMIT PREPARED 'late'")
                assert ours.psql("SELECT id FROM accounts WHERE id < 0 ORDER BY 1") == [["-3"], ["-2"], ["-1"]]
        except Exception as error:
            raise AssertionError(f"killed before {step} of {first}..{len(calls)}, {calls[step - 1]}: {error}") from error
        finished.append((step, calls[step - 1], by))
        shutil.rmtree(ours.data_dir)
    print(*finished, sep="\n")
    assert {by for _, _, by in finished} == {"stock", "ours, stock is kept out"}, finished


def test_killed_in_a_restartpoint_with_the_file_of_a_prepared_transaction(origin, work):
    """The file is there, the control file is that of before: stock is kept out, and the same command goes on."""
    disk = shim.Disk(work / "disk", work)
    ours = origin.copy(work / "ours")
    # Handed over once: then it does not begin by making the whole directory durable.
    replay(ours.data_dir, origin.archive, "--target-lsn", origin.begin).expect()
    options = ["--target-lsn", origin.ends["switch"]]
    assert replay(ours.data_dir, origin.archive, *options, env=disk.kill_before("/pg_twophase")).code == -9
    assert len(list((ours.data_dir / "pg_twophase").iterdir())) == 1
    assert is_kept_out(ours)
    replay(ours.data_dir, origin.archive, *options).expect()
    assert not is_kept_out(ours)
    recovery.recover_and_promote(ours, max_connections="60", recovery_target_action="promote")
    with ours:
        check_contents(origin, ours)
