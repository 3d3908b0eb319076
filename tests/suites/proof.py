"""What must hold of Walrider's replay of a primary's WAL: the same bytes as stock PostgreSQL's, and a server that is
the primary's equal."""

import difflib
import itertools
import re
from collections import Counter
from pathlib import Path

from tests.lab import install
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, run
from tests.lab.walrider import replay, walrider

from .primary import LEFT_OPEN, databases, dump

# What `walrider compare --strict` may find: docs/compare.md says why stock PostgreSQL differs from itself there.
STRICT_CLASSES = {"fsm-hint"}

UNLOGGED = """
SELECT format('SELECT %L FROM %s HAVING count(*) > 0', oid::regclass, oid::regclass) FROM pg_class
WHERE relpersistence = 'u' AND relkind IN ('r', 'm')"""
TABLES = """FROM pg_class c JOIN pg_am a ON a.oid = c.relam AND a.amhandler = 'heap_tableam_handler'::regproc
WHERE c.relkind IN ('r', 'm', 't') AND c.relpersistence = 'p'"""
VISIBLE = f"SELECT c.oid::regclass, t.* FROM (SELECT c.oid {TABLES}) c, pg_check_visible(c.oid) t"
FROZEN = f"SELECT c.oid::regclass, t.* FROM (SELECT c.oid {TABLES}) c, pg_check_frozen(c.oid) t"
GIN = """SELECT gin_index_check(c.oid) FROM pg_class c JOIN pg_am a ON a.oid = c.relam
WHERE a.amname = 'gin' AND c.relkind = 'i' AND c.relpersistence = 'p'"""


def stock_replay(load, data_dir):
    """The reference: stock PostgreSQL to and including the shutdown checkpoint; returns its timings."""
    server = recovery.prepare(load.backup, load.archive, data_dir, target=("lsn", load.final_checkpoint),
                              action="shutdown")
    server.configure(f"restore_command = 'ln {load.archive}/%f %p'", "postgresql.auto.conf")     # see SETTINGS
    return recovery.finish_stock(server, load.final_checkpoint)


def our_replay(load, data_dir, *options):
    """Walrider's replay of the whole WAL; returns its result."""
    recovery.copy_backup(load.backup, data_dir)
    result = replay(data_dir, load.archive, *options, timeout=3600).expect()
    assert result.json["end_reason"] == "end_of_wal", result.json
    assert result.json["checkpoint_lsn"] == load.final_checkpoint, result.json
    return result


def compare_all(ours, stock):
    """Equal under PostgreSQL's masks, and bit for bit but for what stock PostgreSQL itself does not determine."""
    masked = compare(ours, stock)
    strict = walrider("compare", ours, stock, "--strict").json
    counted = {name: count for name, count in strict["classes"].items() if name in STRICT_CLASSES}
    assert strict["differences"] == sum(counted.values()), \
        f"strict: {[entry for entry in strict['first'] if entry['class'] not in STRICT_CLASSES] or strict['classes']}"
    return dict(pages=masked["pages"], files=masked["files"], relations=masked["relations"], strict=counted)


def take_over(load, variant, ours, directory):
    """Stock PostgreSQL starts on our directory, is promoted, and finds it sound and with the primary's contents."""
    ours = Path(ours)
    if variant.checksums:
        run([install.program("pg_checksums"), "--check", "-D", ours])
    server = PgCluster(ours)
    server.configure(recovery.restore_settings(load.archive) + "\narchive_mode = off\nautovacuum = off\n",
                     "postgresql.auto.conf")
    (ours / "recovery.signal").touch()
    with server:
        recovery.recover_and_promote(server)
        same_contents(load.dumps, dump(server, directory))
        assert_unlogged_empty(server)
        finish_prepared(server)
        checked = check_relations(server)
        server.psql("INSERT INTO pending SELECT g, 'after' FROM generate_series(5001, 6000) g; VACUUM; CHECKPOINT",
                    LEFT_OPEN)
        server.stop("fast")
    return checked


def same_contents(expected, found):
    """Two dumps, byte for byte."""
    names = sorted(file.name for file in expected.iterdir())
    assert names == sorted(file.name for file in found.iterdir())
    for name in names:
        if (expected / name).read_bytes() != (found / name).read_bytes():
            lines = [(directory / name).read_text(errors="replace").splitlines() for directory in (expected, found)]
            shown = itertools.islice(difflib.unified_diff(*lines, "primary", "ours", lineterm="", n=1), 60)
            raise AssertionError(f"{name} differs\n" + "\n".join(line[:300] for line in shown))


def assert_unlogged_empty(server):
    """The rows of unlogged tables are gone, and the tables can be read."""
    for database in databases(server):
        queries = [row[0] for row in server.psql(UNLOGGED, database)]
        found = server.psql(";\n".join(queries), database) if queries else []
        assert found == [], (database, found)


def finish_prepared(server):
    """Both prepared transactions are there, and can be committed and rolled back."""
    assert sorted(row[0] for row in server.psql("SELECT gid FROM pg_prepared_xacts")) == ["first", "second"]
    server.psql("COMMIT PREPARED 'first'; ROLLBACK PREPARED 'second'", LEFT_OPEN)
    assert server.psql("SELECT count(*), count(*) FILTER (WHERE t = 'updated'), max(id) FROM pending", LEFT_OPEN) == [
        ["1000", "20", "1000"]]


def check_relations(server):
    """amcheck, and the visibility map against the tables; returns how many relations amcheck went through."""
    said = run([install.program("pg_amcheck"), "--all", "--heapallindexed", "--parent-check", "--install-missing",
                "--verbose", "-j", "2"], env=server.environment())
    checked = Counter(re.findall(r"checking (heap table|btree index) ", said.stdout + said.stderr))
    assert checked["heap table"] > 0 and checked["btree index"] > 0, said.stderr[-2000:]
    for database in databases(server):
        server.psql("CREATE EXTENSION IF NOT EXISTS pg_visibility", database)
        for query in (VISIBLE, FROZEN):
            found = server.psql(query, database)
            assert found == [], (database, query, found[:20])
        if int(install.major()) >= 18:
            checked["gin index"] += len(server.psql(GIN, database))
    return dict(checked)
