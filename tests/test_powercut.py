"""The power goes at any moment of a run: both the same command and stock PostgreSQL come to the same end from what is left.

A real run is recorded call by call, and images of what a disk may hold are made of it: tests/lab/faults/powercut.py says by which
model.  Each image is continued twice, and each result compared with the reference, page by page.  A record depends on how the
threads ran; all else on the seed.  Backups in tar format, tablespaces and `walrider backup roll`: test_powercut_restore.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.lab.faults.images import SEED, Images
from tests.lab.faults.powercut import FSYNC, ORDERS, RENAME, TRUNCATE, Cut, Recorder
from tests.lab.install import program
from tests.lab.oracle import early
from tests.lab.oracle.compare import compare
from tests.lab.oracle.page import pages_past
from tests.lab.oracle.early import SEGMENT
from tests.lab.oracle.page import checks, pages
from tests.lab.server import early_primary, recovery
from tests.lab.server.backups import MARKER, kept_out
from tests.lab.server.cluster import PgCluster, controldata, copy_tree, format_lsn, free_port, parse_lsn, run
from tests.lab.standby import readable, standby
from tests.lab.waiting import wait_for
from tests.lab.walrider import DIFFERENT, binary, replay, walrider

KEPT_OUT = "walrider_was_interrupted"
CONF = """
shared_buffers = 16MB
wal_compression = pglz
max_wal_size = 256MB
checkpoint_timeout = 1h
wal_keep_size = 256MB
autovacuum = off
"""
# Recoveries of a small directory: no more memory, no more processes than it takes.
STOCK = dict(shared_buffers="16MB", max_connections="60", restart_after_crash="off")
# As the mixed streams want it: all WAL stays, nobody waits for the standby.
STREAM = CONF + "synchronous_standby_names = ''\nmax_prepared_transactions = 5\n"
SETUP = """
CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, filler text);
INSERT INTO accounts SELECT n, 0, repeat('f', 80) FROM generate_series(1, 4000) n;
CREATE TABLE history (id int, delta int, note text);
CREATE TABLE cut_off AS SELECT generate_series(1, 5000) AS id;
CREATE TABLE dropped (id int PRIMARY KEY, note text);
INSERT INTO dropped SELECT n, repeat('d', 100) FROM generate_series(1, 1000) n;
CREATE SEQUENCE counter;
CREATE TABLE wide AS SELECT n AS id, 0 AS changes, repeat('w', 800) AS filler FROM generate_series(1, 8000) n;
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
CREATE TABLE indexed (id int, words int[], at point, span int4range);
CREATE INDEX ON indexed USING gin (words);
CREATE INDEX ON indexed USING gist (at);
CREATE INDEX ON indexed USING spgist (span);
CREATE INDEX ON indexed USING brin (id);
"""
# Tables that become shorter and grow again, with their maps.  What upper levels of free space maps say then depends on an interruption
# (docs/crash-safety.md, step 13), so that runs which are compared strictly do without.
QUEUE = """
CREATE TABLE queue (id int PRIMARY KEY, note text);
INSERT INTO queue SELECT n, repeat('q', 100) FROM generate_series(1, 3000) n;
"""
SHORTER = ["DELETE FROM queue WHERE id > 1000", "VACUUM queue", "INSERT INTO queue SELECT n, repeat('r', 90) FROM generate_series(1001, 2000) n",
           "DELETE FROM wide WHERE id > 7000", "VACUUM wide", "INSERT INTO wide SELECT n, 0, repeat('v', 700) FROM generate_series(7001, 7400) n",
           "DELETE FROM queue", "VACUUM queue", "INSERT INTO queue SELECT n, repeat('s', 80) FROM generate_series(1, 1500) n"]
# More pages than fit into little memory, in little WAL.
WIDE = "UPDATE wide SET changes = changes + 1 WHERE id % 30 < 2"
INDEXED = "INSERT INTO indexed SELECT n, ARRAY[n % 7, n % 100], point(n % 50, n), int4range(n, n + 9) FROM generate_series(1, 600) n"

TRANSACTION = """
\\set id random(1, 4000)
\\set delta random(-500, 500)
BEGIN;
UPDATE accounts SET balance = balance + :delta WHERE id = :id;
INSERT INTO history VALUES (:id, :delta, repeat('h', 60));
END;
"""


class Origin:
    """A primary's backup and its WAL since, with something of everything that is more than a page."""

    def __init__(self, directory, shorter=False):
        directory.mkdir()
        self.directory, self.archive, self.shorter = directory, directory / "archive", shorter
        self.server = PgCluster.init(directory / "primary", self.archive, wal_segsize_mb=1, conf=CONF)
        with self.server as server:
            server.start()
            server.psql(SETUP + (QUEUE if shorter else ""))
            self.backup = server.basebackup(directory / "backup")
            (directory / "transaction").write_text(TRANSACTION)
            self.load(server)
            self.expected = self.contents(server)
            server.stop()
        self.server.complete_archive()
        self.final = controldata(self.server.data_dir)["Latest checkpoint location"]
        self.stock = directory / "stock"
        recovery.stock_replay(self.backup, self.archive, self.stock, self.final, **STOCK)

    def transactions(self, server, count, database="postgres"):
        """As pgbench does them."""
        server.pgbench("-n", "-f", self.directory / "transaction", "-t", count, "--random-seed", count, database=database)

    def shorten(self, server):
        """As long as nothing is prepared, VACUUM gives back what was deleted."""
        for command in SHORTER if self.shorter else ():
            server.psql(command)

    def load(self, server):
        """Restartpoints may be made at three checkpoints, two of them because a database was copied as files."""
        self.transactions(server, 400)
        self.shorten(server)
        server.psql(f"{INDEXED}; {WIDE}")
        self.shorten(server)
        server.psql("CREATE TABLE made (id int PRIMARY KEY); INSERT INTO made SELECT generate_series(1, 2000)")
        server.psql("TRUNCATE cut_off; INSERT INTO cut_off VALUES (1); DROP TABLE dropped")
        server.psql("BEGIN; INSERT INTO made VALUES (-1); PREPARE TRANSACTION 'early'")
        server.psql("BEGIN; INSERT INTO made VALUES (-2); PREPARE TRANSACTION 'ends'")
        server.psql("CREATE DATABASE logged STRATEGY wal_log")
        server.psql("CREATE DATABASE copied STRATEGY file_copy")
        self.transactions(server, 200)
        server.psql("CREATE TABLE there AS SELECT generate_series(1, 3000) AS id", "copied")
        server.psql("CREATE DATABASE gone STRATEGY file_copy")
        server.psql("CHECKPOINT")
        server.psql("COMMIT PREPARED 'ends'; DELETE FROM accounts WHERE id % 7 = 0; VACUUM accounts")
        server.psql("DELETE FROM indexed WHERE id % 3 = 0; VACUUM indexed; " + INDEXED)
        server.psql("CHECKPOINT")
        self.transactions(server, 300)
        server.psql("DROP DATABASE gone; SELECT nextval('counter') FROM generate_series(1, 40)")
        server.psql("BEGIN; INSERT INTO made VALUES (-3); CREATE TABLE late (id int); PREPARE TRANSACTION 'late'")
        server.psql("CHECKPOINT")
        server.psql(WIDE)
        server.psql("CREATE TABLE newest (id int); DROP TABLE newest; TRUNCATE history")
        self.transactions(server, 100)

    def contents(self, server):
        """What a client sees."""
        return [server.psql(query) for query in (
            "SELECT id, balance FROM accounts ORDER BY id", "SELECT id, delta FROM history ORDER BY 1, 2",
            "SELECT gid FROM pg_prepared_xacts ORDER BY 1", "SELECT id FROM made ORDER BY 1", "SELECT datname FROM pg_database ORDER BY 1")]

    def copy(self, data_dir):
        """A copy of the backup, with the settings of a recovery that PostgreSQL needs as well."""
        copy_tree(self.backup, data_dir)
        data_dir.chmod(0o700)
        PgCluster(data_dir).configure("archive_mode = off", "postgresql.auto.conf")
        return data_dir


@pytest.fixture(scope="module")
def origin(memory):
    """One primary for most tests here."""
    return Origin(memory / "origin")


@pytest.fixture(scope="module")
def shortened(memory):
    """Another, whose tables become shorter."""
    return Origin(memory / "shortened", shorter=True)


def let_stock_in(data_dir, again):
    """Where stock PostgreSQL is kept out, it says so, and `again`, the same command, goes before.

    That must be so where it would lose a transaction: of one that began behind the checkpoint which recovery begins at, the file is
    in pg_twophase already.  It means to remove it, misses it, and takes it for that of one that it has seen prepared
    (RemoveTwoPhaseFile, PrepareRedoAdd): docs/crash-safety.md.
    """
    if KEPT_OUT in (data_dir / "postgresql.auto.conf").read_text():
        server = PgCluster(data_dir).launch()
        assert server.wait_end() != 0 and KEPT_OUT in server.log_tail()
        again()
    next_xid = int(controldata(data_dir)["Latest checkpoint's NextXID"].split(":")[1])
    ahead = [file.name for file in (data_dir / "pg_twophase").iterdir() if len(file.name) == 16 and int(file.name, 16) >= next_xid]
    assert not ahead, f"PostgreSQL would lose what is prepared: {ahead} from {next_xid:X} on"


def remove_remains(data_dir):
    """What was being written when the power went, under a name that PostgreSQL does not read and leaves there."""
    for file in (data_dir / "pg_twophase").glob("*.tmp"):
        file.unlink()


def stock_finishes(origin, data_dir, again):
    """What a user does who gives up on us: start PostgreSQL on the directory."""
    let_stock_in(data_dir, again)
    if controldata(data_dir)["Latest checkpoint location"] != origin.final:     # else there is no target to reach any more
        (data_dir / "recovery.signal").touch()
        server = PgCluster(data_dir)
        server.configure(recovery.restore_settings(origin.archive, target=("lsn", origin.final), action="shutdown"), "postgresql.auto.conf")
        with server:
            recovery.finish_stock(server, origin.final, timeout=120, **STOCK)
        remove_remains(data_dir)
    compare(data_dir, origin.stock)


# Every call that changes files and that Python has, from several threads; the file `synced` is safe, the others are not.
CALLS = """
import os, threading
def write(name, data, flags=os.O_CREAT | os.O_RDWR, sync=False):
    file = os.open(name, flags, 0o600)
    os.write(file, data)
    if sync:
        os.fsync(file)
    os.close(file)
write("synced", b"s" * 9000, sync=True)
os.mkdir("below"); os.rmdir("below"); os.mkdir("there")
directory = os.open(".", os.O_RDONLY)
os.fsync(directory)
write("old", b"o" * 9000, os.O_RDWR)
write("appended", b"a" * 100, os.O_RDWR | os.O_APPEND)
write("new.tmp", b"n" * 9000, sync=True)
os.rename("new.tmp", "renamed")
file = os.open("calls", os.O_CREAT | os.O_RDWR, 0o600)
os.pwritev(file, [b"x" * 5000, b"y" * 5000], 3000); os.writev(file, [b"z", b"zz"]); os.pwrite(file, b"p", 20000)
os.posix_fallocate(file, 0, 50000); os.ftruncate(file, 40000); os.truncate("calls", 30000)
source = os.open("synced", os.O_RDONLY)
os.copy_file_range(source, file, 500); os.sendfile(file, source, 10, 300)
os.link("calls", "there/linked"); os.symlink("calls", "leads"); os.unlink("removed")
os.replace("there/linked", "there/again", src_dir_fd=directory)
os.fdatasync(file)
def many(number):
    for at in range(50):
        os.pwrite(file, bytes([number]) * 700, at * 500)
threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""


def test_the_recorder(tmp_path):
    """What it records is all there is, for each kind of call; what was synced is in every image, and what was not is in some,
    not in others, and torn."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    for name in ("old", "appended", "removed"):
        (data_dir / name).write_bytes(b"0" * 9000)
    recorder = Recorder(tmp_path / "recorder")
    run(recorder.command(data_dir, sys.executable, "-c", CALLS), cwd=data_dir)
    record = recorder.record()
    olds, renamed = set(), set()
    for number in range(100):
        cut = record.choose(f"recorder/{number}")
        cut.step = len(record.calls)
        image = record.image(cut, tmp_path / "image")
        assert (image / "synced").read_bytes() == b"s" * 9000 and (image / "there").is_dir() and not (image / "below").exists()
        olds.add((image / "old").read_bytes())
        renamed.add((image / "renamed").read_bytes() if (image / "renamed").exists() else None)
        shutil.rmtree(image)
    assert {b"o" * 9000, b"0" * 9000} < olds and all(len(old) == 9000 for old in olds)
    assert renamed == {None, b"n" * 9000}


def only_differ_in(wanted, data_dir, reference, *options):
    """What differs, all of it of this class."""
    found = walrider("compare", "--first", "1000", *options, data_dir, reference).json
    others = [row for row in found["first"] if row["class"] != wanted]
    assert found["pages"] > 0 and found["differences"] == len(found["first"]) and not others, (found["classes"], others[:10])
    return found["first"]


def torn_pages(image, files):
    """The pages of these files whose checksum is wrong.

    Of a free space map, such a page counts as zeros, for PostgreSQL as for us (fsm_readbuf, RBM_ZERO_ON_ERROR): it keeps what WAL
    says of it from here on, and nothing else.
    """
    return {(file, block) for file in files for block, page in enumerate(pages(image / file)) if any(page) and not checks(page, block)}


def record_replay(origin, memory, name, *options):
    """A replay that nobody disturbs."""
    recorder = Recorder(memory / f"{name}-recorder")
    data_dir = origin.copy(memory / name)
    done = run(recorder.command(data_dir, binary(), "replay", "--json", "-D", data_dir, "--wal", origin.archive, *options))
    record = recorder.record()
    record.said = json.loads(done.stdout)
    return record, data_dir


def test_replay(origin, memory):
    """`walrider replay`, with pages written to make room and restartpoints behind copied databases."""
    little = "--memory", "16MB"
    record, reference = record_replay(origin, memory, "replay", *little)
    compare(reference, origin.stock)
    assert record.said["pages_evicted"] > 500 and record.said["restartpoints"] >= 3, record.said

    def ours(data_dir, cut):
        replay(data_dir, origin.archive, *little).expect()
        compare(data_dir, origin.stock)
        differ = {(row["file"], row["block"]) for row in only_differ_in("fsm-hint", data_dir, reference, "--strict")}
        if differ:
            image = record.image(cut, memory / "torn")
            assert not differ - torn_pages(image, {file for file, _ in differ}), f"differ, and were whole: {differ}"
            shutil.rmtree(image)

    def stock(data_dir, cut):
        stock_finishes(origin, data_dir, lambda: ours(data_dir, cut))

    Images("replay", record, memory).check(dict(walrider=ours, stock=stock))


def test_put_apart(shortened, memory):
    """WAL that is put apart by what it is about, truncations with it: files are cut once, and each page is written once."""
    apart = "--memory", "16MB", "--spill-always"
    record, reference = record_replay(shortened, memory, "apart", *apart)
    compare(reference, shortened.stock)
    truncated = {call.a for call in record.calls if call.operation == TRUNCATE}
    assert record.said["sweeps"] >= 3 and len(truncated) >= 6, (record.said, len(truncated))

    def ours(data_dir, cut):
        replay(data_dir, shortened.archive, *apart).expect()
        compare(data_dir, shortened.stock)

    def stock(data_dir, cut):
        stock_finishes(shortened, data_dir, lambda: ours(data_dir, cut))

    Images("apart", record, memory).check(dict(walrider=ours, stock=stock))


def test_restore(shortened, memory):
    """`walrider restore`: until all pages of the single pass are durable no server starts, and `--start-over` begins again; then it is a
    directory in recovery."""
    directory = memory / "restore"
    directory.mkdir(mode=0o700)
    # Or relations might come early, when that is seen to be quicker: tests/test_powercut_restore.py has that.
    command = "restore", "--backup", shortened.backup, "--wal", shortened.archive, "--memory", "16MB", "--spill-always", "-D"
    recorder = Recorder(memory / "restore-recorder")
    said = json.loads(run(recorder.command(directory, binary(), *command, directory, "--json")).stdout)
    compare(directory, shortened.stock)
    assert said["sweeps"] >= 3 and said["unpacked_at_lsn"], said

    def again(data_dir):
        """Without what the interrupted run has left."""
        result = walrider(*command, data_dir)
        if result.code:
            assert "is not complete" in result.stderr and "--start-over" in result.stderr, result
            walrider(*command, data_dir, "--start-over").expect()

    def is_whole(data_dir):
        return (data_dir / "global/pg_control").exists() and not (data_dir / MARKER).exists()

    def ours(data_dir, cut):
        if is_whole(data_dir):
            replay(data_dir, shortened.archive).expect()
        else:
            again(data_dir)
        compare(data_dir, shortened.stock)
        assert not (data_dir / MARKER).exists()

    def stock(data_dir, cut):
        if not is_whole(data_dir):
            kept_out(data_dir)
            again(data_dir)
        PgCluster(data_dir).configure("archive_mode = off", "postgresql.auto.conf")
        stock_finishes(shortened, data_dir, lambda: ours(data_dir, cut))

    record = recorder.record()
    Images("restore", record, memory).check(dict(walrider=ours, stock=stock))
    done_is_durable(shortened, memory, record)


def done_is_durable(origin, memory, record):
    """A cut after the end changes nothing; where fsyncs of relations are left out, it does."""
    for order in ORDERS:
        cut = Cut("done", len(record.calls), len(record.calls), order, 512, False)
        compare(record.image(cut, memory / "image"), origin.stock)
        shutil.rmtree(memory / "image")
    record.forget_syncs("base")
    compared = walrider("compare", record.image(cut, memory / "image"), origin.stock)
    shutil.rmtree(memory / "image")
    assert compared.code == DIFFERENT and compared.json["differences"] > 10, "nobody would see that fsync is left out"


def test_done_is_durable(origin, memory):
    """Once `walrider replay` has said that it is done."""
    record, _ = record_replay(origin, memory, "done")
    done_is_durable(origin, memory, record)


def stand_by(origin, data_dir, wal, recorder=None):
    """`walrider standby` on an archive, a restartpoint whenever there can be one; stopped by whoever asked for it."""
    (data_dir / "standby.signal").touch()
    options = "--wal", wal, "--restartpoint-interval", "1ms", "--retry-interval", "100ms"
    return standby.Walrider(data_dir, *options, recorder=recorder).start()


def feed(origin, follower, wal):
    """WAL comes by and by: a restartpoint is made between two stretches of it."""
    begin = parse_lsn(re.search(r"START WAL LOCATION: (\S+)", (origin.backup / "backup_label").read_text())[1])
    end = parse_lsn(origin.final) + 1
    for segment in sorted(file for file in origin.archive.iterdir() if len(file.name) == 24):
        shutil.copy(segment, wal / "next")
        (wal / "next").rename(wal / segment.name)
        there = int(segment.name[16:], 16) * SEGMENT
        # A record may go on in the next segment.
        if there > begin:
            follower.wait_replayed(format_lsn(min(there + SEGMENT * 7 // 8, end)))
    follower.wait_replayed(format_lsn(end))


def test_restartpoints(origin, memory):
    """`walrider standby` on an archive, with a restartpoint after each segment that has a checkpoint."""
    recorder = Recorder(memory / "restartpoints-recorder")
    reference = origin.copy(memory / "restartpoints")
    fed = memory / "fed"
    fed.mkdir()
    with stand_by(origin, reference, fed, recorder) as follower:
        feed(origin, follower, fed)
        follower.stop()
    compare(reference, origin.stock)
    record = recorder.record()
    moves = sum(call.operation == RENAME and call.two == "pg_control" for call in record.calls)
    assert moves >= 12, f"pg_control was written {moves} times: hardly a restartpoint"

    def ours(data_dir, cut):
        with stand_by(origin, data_dir, origin.archive) as follower:
            follower.wait_replayed(format_lsn(parse_lsn(origin.final) + 1))
            follower.stop()
        compare(data_dir, origin.stock)

    def stock(data_dir, cut):
        stock_finishes(origin, data_dir, lambda: ours(data_dir, cut))

    Images("restartpoints", record, memory).check(dict(walrider=ours, stock=stock))


def same_but_for_remains(data_dir, reference):
    """What was dropped or cut off before a crash is there again for a while in replay after it, and PostgreSQL leaves some of that."""
    found = walrider("compare", "--first", "100000", data_dir, reference).json
    wrong = [row for row in found["first"] if row["b"] not in ("absent", "past the end")]
    assert found["pages"] > 0 and found["differences"] == len(found["first"]) and not wrong, wrong[:10]


@pytest.mark.from_major(18, "early redo knows 18.6 alone")
def test_early_redo(origin, memory):
    """PostgreSQL's hot standby, whose pages the extension changes ahead: none that a cut leaves is past minRecoveryPoint, and it comes to
    the same end from there, with early redo and without.  Of a new relation PostgreSQL makes the file durable, and not its name."""
    fixture = SimpleNamespace(info=dict(final_checkpoint=origin.final))
    # Few buffers, so that pages are written all the time.
    settings = {**readable.CATCH_UP, **readable.EARLY, "shared_buffers": "1MB", "bgwriter_delay": "10ms", "bgwriter_lru_maxpages": "1000",
                "io_method": "sync", "dynamic_shared_memory_type": "sysv", "walrider.redo_slice": "500", "walrider.redo_workers": "2",
                "fsync": "on"}
    reference = origin.copy(memory / "early_redo")
    (reference / "standby.signal").touch()
    server = PgCluster(reference)
    server.configure(recovery.restore_settings(origin.archive), "postgresql.auto.conf")
    recorder = Recorder(memory / "early_redo-recorder")
    options = {"port": server.port, "unix_socket_directories": server.sockets, "listen_addresses": "", **settings}
    command = [program("postgres"), "-D", reference, *(part for item in options.items() for part in ("-c", "=".join(map(str, item))))]
    with open(server.log, "a") as log, \
            subprocess.Popen(recorder.command(reference, *command), stdin=subprocess.DEVNULL, stdout=log, stderr=log) as traced:
        try:
            wait_for(lambda: server.psql("SELECT 1", check=False) == [["1"]], server.log_tail)
            wait_for(lambda: readable.has_caught_up(fixture, server) or server.psql("CHECKPOINT") and None, server.log_tail, timeout=300)
            server.psql("CHECKPOINT")
            traced.send_signal(signal.SIGINT)
            assert traced.wait(120) == 0, server.log_tail()
        finally:
            # With it goes what it traces.
            traced.kill()
    found = readable.summary(server)
    assert found["early"] > 1000 and found["by workers"] > 100, found
    same_but_for_remains(reference, origin.stock)

    def goes_on(**more):
        def proceed(data_dir, cut):
            # None before it has begun: the end of the backup has to be reached.
            bound = parse_lsn(controldata(data_dir)["Minimum recovery ending location"]) or 1 << 63
            assert not (past := pages_past(data_dir, bound)), f"past {format_lsn(bound)}: {past[:5]}"
            readable.catch_up(fixture, PgCluster(data_dir), **more)
            remove_remains(data_dir)
            same_but_for_remains(data_dir, origin.stock)
        return proceed

    Images("early_redo", recorder.record(), memory).check(dict(early=goes_on(**readable.EARLY), stock=goes_on()), journaled=True)


def test_promotion(origin, memory):
    """`walrider replay --promote`: the directory becomes a primary's, by us or by stock."""
    record, reference = record_replay(origin, memory, "promotion", "--promote")
    assert controldata(reference)["Latest checkpoint's TimeLineID"] == "2"

    def ours(data_dir, cut):
        replay(data_dir, origin.archive, "--promote").expect()
        control = controldata(data_dir)
        assert control["Database cluster state"] == "shut down" and control["Latest checkpoint's TimeLineID"] in "23", control
        only_differ_in("control", data_dir, reference)

    def stock(data_dir, cut):
        let_stock_in(data_dir, lambda: ours(data_dir, cut))
        server = PgCluster(data_dir)
        if controldata(data_dir)["Database cluster state"] != "shut down":
            (data_dir / "recovery.signal").touch()
        if (data_dir / "recovery.signal").exists():
            server.configure(recovery.restore_settings(origin.archive, action="promote"), "postgresql.auto.conf")
        with server:
            recovery.recover_and_promote(server, timeout=60, **STOCK)
            assert origin.contents(server) == origin.expected
            server.stop()
        remove_remains(data_dir)
        only_differ_in("control", data_dir, reference)

    Images("promotion", record, memory).check(dict(walrider=ours, stock=stock))


STATUS = re.compile(rb"d\0\0\0\x26r(.{8})(.{8})(.{8})", re.DOTALL)


def acknowledged(record, cut):
    """How far the primary was told, before the cut, that WAL is durable."""
    return max((int.from_bytes(flush, "big") for sent in record.sent(cut) for _, flush, _ in STATUS.findall(sent)), default=0)


def has_wal(data_dir, primary_wal, start, end):
    """WAL that was acknowledged is there, in a segment, `.partial` or not."""
    while start < end:
        upto = min(end, start // SEGMENT * SEGMENT + SEGMENT)
        name = early.segment_name(start)
        files = [data_dir / f"{name}{suffix}" for suffix in ("", ".partial") if (data_dir / f"{name}{suffix}").exists()]
        part = slice(start % SEGMENT, (upto - 1) % SEGMENT + 1)
        theirs = (primary_wal / name).read_bytes()[part]
        assert any(file.read_bytes()[part] == theirs for file in files), \
            f"acknowledged up to {format_lsn(end)}: {format_lsn(start)} to {format_lsn(upto)} is not in {[file.name for file in files]}"
        start = upto


class Stream:
    """A primary whose WAL is received while it works, then stopped, and started again without a change."""

    def __init__(self, directory, template):
        self.directory, self.reference = directory, directory / "reference"
        directory.mkdir()
        self.server = early_primary.make_primary(template, directory / "primary", STREAM)
        self.server.psql(SETUP)
        (directory / "transaction").write_text(TRANSACTION)

    def load(self):
        """A little of everything, over some segments."""
        transactions = "-n", "-f", self.directory / "transaction", "-c", "2"
        self.server.pgbench(*transactions, "-t", "150")
        self.server.psql("CREATE TABLE made AS SELECT generate_series(1, 3000) AS id; DROP TABLE dropped; TRUNCATE cut_off")
        self.server.psql("SELECT pg_switch_wal()")
        self.server.pgbench(*transactions, "-t", "100")
        self.server.psql("BEGIN; INSERT INTO made VALUES (-1); PREPARE TRANSACTION 'prepared'")
        self.server.psql("CHECKPOINT")
        self.server.pgbench(*transactions, "-t", "150")

    def end(self):
        """It stops, is copied, and goes on: whoever follows it has its pages then."""
        self.server.stop()
        self.final = parse_lsn(self.server.controldata()["Latest checkpoint location"])
        copy_tree(self.server.data_dir, self.reference)
        standby.start_primary(self.server)

    def caught_up(self, follower, data_dir):
        """A standby that has replayed all of it is stopped, and is the same."""
        standby.wait_position(self.server, format_lsn(self.final + 1))
        follower.stop()
        remove_remains(data_dir)
        early.same_pages(data_dir, self.reference)


@pytest.fixture
def stream(memory, primary_template):
    """A primary to receive from."""
    made = Stream(memory / "stream", primary_template)
    with made.server:
        yield made
    shutil.rmtree(made.directory)


def test_receive(stream, memory):
    """`walrider receive`: what it had acknowledged is there, and the same command completes the rest.

    pg_receivewal does not continue from every image: docs/spool.md, step 9.
    """
    directory = stream.directory / "received"
    directory.mkdir()
    recorder = Recorder(memory / "receive-recorder")
    command = binary(), "receive", "-d", standby.conninfo(stream.server.port), "-D", directory
    start = early_primary.flushed(stream.server) // SEGMENT * SEGMENT
    with standby.Standby(directory).spawn(recorder.command(directory, *command)) as receiver:
        standby.wait_streaming(stream.server)
        stream.load()
        stream.server.stop()
        receiver.stop()
    record = recorder.record()
    end = parse_lsn(stream.server.controldata()["Latest checkpoint location"])
    standby.start_primary(stream.server)
    wal = stream.server.data_dir / "pg_wal"

    def ours(data_dir, cut):
        has_wal(data_dir, wal, start, acknowledged(record, cut))
        begun = any(len(file.name.removesuffix(".partial")) == 24 for file in data_dir.iterdir())
        walrider(*command[1:-1], data_dir, "--endpos", format_lsn(end), "--no-loop").expect()
        # In an empty directory it begins where the primary is now.
        has_wal(data_dir, wal, start if begun else end // SEGMENT * SEGMENT, end)

    Images("receive", record, memory).check(dict(walrider=ours))
    # On a disk that syncs nothing, an acknowledgement is worth nothing: that is seen.
    record.calls = [call for call in record.calls if call.operation != FSYNC]
    at_end = Cut("nothing is synced", len(record.calls), len(record.calls), "journal", 512, False)
    with pytest.raises(AssertionError, match="acknowledged up to"):
        has_wal(record.image(at_end, memory / "image"), wal, start, acknowledged(record, at_end))


@pytest.mark.parametrize("kind", ["spool", "early"])
def test_standby(stream, memory, kind):
    """`walrider standby`: what it had acknowledged is there, and it follows the primary again, as stock does.

    Of the early log, that a promotion makes WAL of it: the primary is not there any more.
    """
    recorder = Recorder(memory / f"{kind}-recorder")
    ours = standby.clone(stream.server, stream.directory / "ours")
    options = "--early", dict(spool="off", early="on")[kind], "--retry-interval", "100ms", "--restartpoint-wal", "1MB"
    start = early_primary.flushed(stream.server)
    with standby.Walrider(ours, *options, recorder=recorder).start() as follower:
        standby.wait_streaming(stream.server)
        stream.server.disk.fsync_takes(dict(spool=0, early=5)[kind])
        stream.load()
        stream.server.disk.fsync_takes(0)
        stream.end()
        stream.caught_up(follower, ours)
    record = recorder.record()
    records = early.valid_records(stream.reference, start, memory)
    at_end = Cut("all is synced", len(record.calls), len(record.calls), "journal", 512, True)
    promised = acknowledged(record, at_end)
    assert any(start < record_end <= promised for _, record_end in records), "nothing was promised, so nothing would be checked"

    def follow(data_dir, cut):
        if kind == "spool":
            has_wal(data_dir / "pg_wal", stream.reference / "pg_wal", start, acknowledged(record, cut))
        with standby.Walrider(data_dir, *options).start() as follower:
            stream.caught_up(follower, data_dir)

    def stock(data_dir, cut):
        let_stock_in(data_dir, lambda: follow(data_dir, cut))
        with standby.Stock(data_dir, **STOCK).start() as follower:
            stream.caught_up(follower, data_dir)

    def promote(data_dir, cut):
        promised = acknowledged(record, cut)
        standby.point(data_dir, free_port())
        with standby.Walrider(data_dir, *options).start() as follower:
            follower.promote()
        history = (data_dir / "pg_wal" / "00000002.history").read_text()
        end = parse_lsn(history.split("\t")[1])
        assert end >= max((record_end for _, record_end in records if record_end <= promised), default=0), \
            f"acknowledged up to {format_lsn(promised)}, promoted at {format_lsn(end)}"

    Images(kind, record, memory).check(dict(walrider=follow, stock=stock, **(dict(promotion=promote) if kind == "early" else {})))
