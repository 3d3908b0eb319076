"""The primary dies with a record half written at the end of a segment, and goes on behind it: each time a standby starts anew."""

import threading
import time

import psycopg

from tests.lab.faults.shim import Disk
from tests.lab.loads.bank import connect
from tests.lab.oracle import early
from tests.lab.server import early_primary
from tests.lab.server.cluster import PgCluster, copy_tree, format_lsn, parse_lsn
from tests.lab.standby import standby
from tests.lab.standby.standby import LOCALLY, wait_position, wait_streaming
from tests.lab.waiting import wait_for


def fill(server):
    """Rows until the primary is gone."""
    try:
        with connect(server, synchronous_commit="off") as connection:
            while True:
                connection.execute("INSERT INTO t SELECT repeat('n', 3000) FROM generate_series(1, 40)")
    except psycopg.OperationalError:
        pass


def is_stuck(server):
    """Whether nobody can insert WAL."""
    before = server.lsn()
    time.sleep(0.3)
    return server.lsn() == before


def test_two_records_overwritten_within_a_segment(primary_template, work, kind):
    """A segment that begins where one record was given up and ends where the next one was: both are passed over, each confirmed
    by its own XLOG_OVERWRITE_CONTRECORD. Both were once taken for the last one."""
    disk = Disk(work / "shim", "pg_wal/")
    with PgCluster(copy_tree(primary_template, work / "primary")) as server:
        # Nobody flushes but who finds the buffers full, and he once a segment is: there the held fsync stops them all.
        server.configure("wal_writer_delay = 10s\nwal_writer_flush_after = 1GB\n")
        server.own_environment = disk.environment()
        standby.start_primary(server)
        server.psql("CREATE TABLE t (v text); ALTER TABLE t ALTER v SET STORAGE plain", options=LOCALLY)
        with kind(standby.clone(server, work / "ours")).start() as follower:
            wait_streaming(server)
            for number in range(2):
                disk.hold_fsync()
                segment = early_primary.flushed(server) // early.SEGMENT
                writer = threading.Thread(target=fill, args=(server,))
                writer.start()
                wait_for(lambda: is_stuck(server), "nothing is written any more")
                server.kill()
                writer.join()
                disk.hold_fsync(False)
                standby.start_primary(server)
                checkpoint = parse_lsn(server.controldata()["Latest checkpoint location"])
                assert checkpoint // early.SEGMENT == segment + 1 and checkpoint % early.SEGMENT < 200, number
                wait_streaming(server)
                wait_position(server, format_lsn(early_primary.flushed(server)), stage="flush")
                follower.kill()
                follower.start()
                wait_streaming(server)
