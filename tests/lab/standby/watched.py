"""A primary with a load, and a standby of PostgreSQL's that answers queries: what the tests of lag watch."""

import threading
from contextlib import contextmanager

from tests.lab.server.cluster import PgCluster, copy_tree
from tests.lab.standby import standby
from tests.lab.standby.standby import Stock, wait_position, wait_streaming
from tests.lab.waiting import wait_for

NOBODY_WAITS = "synchronous_standby_names = ''\nautovacuum = off\n"
BATCH = "INSERT INTO t SELECT i, repeat(md5(i::text), 8) FROM generate_series(1, 400) i"


@contextmanager
def primary_of(template, work, conf=""):
    """A primary whose commits wait for no standby, with a table `t`."""
    server = PgCluster(copy_tree(template, work / "primary"))
    server.configure(NOBODY_WAITS + conf)
    with standby.start_primary(server, fsync="on"):
        server.psql("CREATE TABLE t (id int, v text)")
        yield server


@contextmanager
def load(server, sql=BATCH, pause=0.01):
    """Transactions one after the other, in a session of their own."""
    stop = threading.Event()

    def insert():
        with server.session() as session:
            while not stop.wait(pause):
                session.run(sql)

    thread = threading.Thread(target=insert)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def hot(primary, work, port=None, disk=None, name=standby.NAME, slot=None, **settings):
    """PostgreSQL's own standby, which answers queries."""
    data_dir = standby.clone(primary, work / f"standby-{name}" if name != standby.NAME else work / "standby", port, name, slot)
    with Stock(data_dir, disk, hot_standby="on", **settings).start() as follower:
        wait_streaming(primary, name)
        wait_for(lambda: follower.server.psql("SELECT 1", check=False) == [["1"]], follower.log_tail)
        yield follower


@contextmanager
def conflict(primary, follower):
    """A query on the standby holds a snapshot that replay of a vacuum has to wait for."""
    primary.psql(BATCH)
    wait_position(primary)
    with follower.server.session() as reader:
        reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.run("SELECT count(*) FROM t")
        primary.psql("DELETE FROM t")
        primary.psql("VACUUM (FREEZE, TRUNCATE off) t")
        yield


def scattered(primary):
    """Prepares a table of 10,000 pages; returns what changes a row on some of them, without images of the pages."""
    primary.psql("CREATE TABLE wide (id int PRIMARY KEY, v int, filler text) WITH (fillfactor = 50)")
    primary.psql("INSERT INTO wide SELECT i, 0, repeat('x', 1900) FROM generate_series(1, 20000) i")
    primary.psql("ALTER SYSTEM SET full_page_writes = off")
    primary.psql("SELECT pg_reload_conf()")
    primary.psql("CHECKPOINT")
    return "UPDATE wide SET v = v + 1 WHERE id IN (SELECT (random() * 20000)::int FROM generate_series(1, 100))"
