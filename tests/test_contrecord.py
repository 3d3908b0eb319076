"""The primary dies with a record half written at the end of a segment, and goes on behind it: each time a standby starts anew."""

import threading

import psycopg

from tests.harness import early, standby
from tests.harness.bank import connect
from tests.harness.cluster import PgCluster, copy_tree, parse_lsn
from tests.harness.shim import Disk
from tests.harness.standby import LOCALLY, wait_for, wait_position, wait_streaming


def fill(server):
    """Rows until the primary is gone."""
    try:
        with connect(server, synchronous_commit="off") as connection:
            while True:
                connection.execute("INSERT INTO t SELECT repeat('n', 3000) FROM generate_series(1, 40)")
    except psycopg.OperationalError:
        pass


def test_two_records_overwritten_within_a_segment(primary_template, work, kind):
    """A segment that begins where one record was given up and ends where the next one was: both are passed over, each confirmed
    by its own XLOG_OVERWRITE_CONTRECORD. Both were once taken for the last one."""
    disk = Disk(work / "shim", "pg_wal/")
    with PgCluster(copy_tree(primary_template, work / "primary")) as server:
        server.own_environment = disk.environment()
        standby.start_primary(server)
        server.psql("CREATE TABLE t (v text); ALTER TABLE t ALTER v SET STORAGE plain", options=LOCALLY)
        with kind(standby.clone(server, work / "ours")).start() as follower:
            wait_streaming(server)
            for number in range(2):
                wait_position(server)
                # A segment that is full is flushed before the next one is written to.
                disk.hold_fsync()
                segment = early.flushed(server) // early.SEGMENT
                writer = threading.Thread(target=fill, args=(server,))
                writer.start()
                wait_for(lambda: parse_lsn(server.lsn()) // early.SEGMENT > segment, "the next segment")
                server.kill()
                writer.join()
                disk.hold_fsync(False)
                standby.start_primary(server)
                checkpoint = parse_lsn(server.controldata()["Latest checkpoint location"])
                assert checkpoint // early.SEGMENT == segment + 1 and checkpoint % early.SEGMENT < 200, number
                wait_streaming(server)
                wait_position(server)
                follower.kill()
                follower.start()
