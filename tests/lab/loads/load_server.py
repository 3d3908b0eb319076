"""The mixed load's steps that stop, crash, promote or configure the server."""

import time

from tests.lab.install import program
from tests.lab.server.cluster import format_lsn, parse_lsn, run

SETTINGS = """
wal_level = replica
track_commit_timestamp = on
autovacuum = off
max_wal_size = 4GB
checkpoint_timeout = 1h
wal_keep_size = 4GB
max_replication_slots = 10
allow_in_place_tablespaces = on
"""
PGBENCH_SETTINGS = """
max_wal_size = 32GB
checkpoint_timeout = 1h
shared_buffers = 1GB
synchronous_commit = off
wal_keep_size = 32GB
"""
FIRST_XID = 3 << 20         # the first of a pg_xact segment: PostgreSQL makes its page when it is assigned
FIRST_MULTIXACT = 2 << 16   # the first of a pg_multixact/offsets segment


def advance_counters(data_dir, wal_segsize_mb):
    """Before the first start: counters away from zero, WAL just before its first 4 GiB boundary."""
    segments_per_id = 4096 // wal_segsize_mb
    run([program("pg_resetwal"), "-D", data_dir, "-x", FIRST_XID, "-m", f"{FIRST_MULTIXACT},1",
         "-l", f"{1:08X}{0:08X}{segments_per_id - max(2, 64 // wal_segsize_mb):08X}"])


def full_page_writes(load):
    """Full-page writes turned off and on again, with changes in between."""
    server = load.server
    for value in ("off", "on"):
        load.sql(f"ALTER SYSTEM SET full_page_writes = {value}")
        load.sql("SELECT pg_reload_conf()")
        time.sleep(0.2)
        load.sql("CHECKPOINT")
        server.psql("UPDATE base SET k = k + 1 WHERE id % 10 = 1; UPDATE locked SET v = v + 1")
        # Hints on pages of a free space map that only the primary has.
        load.sql(f"""
            CREATE TABLE recycled_{value} (id int PRIMARY KEY);
            INSERT INTO recycled_{value} SELECT generate_series(1, 3000); DELETE FROM recycled_{value};
            VACUUM recycled_{value}; SELECT pg_current_xact_id(); SELECT pg_current_xact_id();
            VACUUM recycled_{value};
        """)


def parameters(load):
    """A restart with other values of everything PARAMETER_CHANGE carries."""
    load.sql("ALTER SYSTEM SET max_connections = 70")
    load.sql("ALTER SYSTEM SET max_worker_processes = 9")
    load.sql("ALTER SYSTEM SET max_prepared_transactions = 25")
    load.sql("ALTER SYSTEM SET wal_log_hints = on")
    load.sql("ALTER SYSTEM SET wal_level = logical")
    load.server.restart("fast")
    load.sql("UPDATE base SET k = k - 1 WHERE id % 20 = 1")


def commit_timestamps(load):
    """track_commit_timestamp off, and on again."""
    for value in ("off", "on"):
        load.sql(f"ALTER SYSTEM SET track_commit_timestamp = {value}")
        load.server.restart("fast")
        load.sql("CALL burn_xids(50)")
        load.sql("UPDATE base SET k = k + 2 WHERE id % 30 = 1")


def backup_in_sql(load):
    """A second backup taken while the load runs: its end record concerns us nothing."""
    with load.server.session() as session:
        session.run("SELECT pg_backup_start('second', true)")
        session.run("INSERT INTO base VALUES (-400, 1, 'during a backup')")
        session.run("SELECT pg_backup_stop(false)")
    load.switch_segment = load.server.switch_wal()


def crash_in_record(load):
    """An immediate stop inside a record that crosses pages: recovery leaves OVERWRITE_CONTRECORD."""
    server = load.server
    for attempt in range(20):
        before = parse_lsn(server.lsn())
        load.sql(f"INSERT INTO base VALUES ({-500 - attempt}, 1, 'before a crash')")
        with server.session() as writer:
            writer.send("SELECT pg_logical_emit_message(false, 'walrider', repeat('crash ', 20000000))")
            deadline = time.monotonic() + 20
            while parse_lsn(server.value("SELECT pg_current_wal_lsn()")) < before + (24 << 20):
                if time.monotonic() > deadline:
                    break
            server.stop("immediate")
        server.start()
        end = server.lsn()
        dump = run([program("pg_waldump"), "-p", server.data_dir / "pg_wal", "-r", "XLOG",
                    "-s", format_lsn(before), "-e", end], check=False).stdout
        if "OVERWRITE_CONTRECORD" in dump:
            return
    raise RuntimeError("no crash left an incomplete record")


def promote(load):
    """The primary becomes a standby of its own archive and is promoted: timeline 2."""
    server = load.server
    server.stop("fast")
    server.configure("restore_command = 'false'", "postgresql.auto.conf")
    (server.data_dir / "standby.signal").touch()
    server.start()
    server.psql("SELECT pg_promote()")
    load.sql("UPDATE base SET k = k + 3 WHERE id % 40 = 1; ALTER SYSTEM RESET restore_command")
