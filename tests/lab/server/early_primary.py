"""A primary with the extension, and what it says of its early stream."""

from tests.lab.faults.shim import Disk
from tests.lab.server.cluster import PgCluster, copy_tree, parse_lsn
from tests.lab.standby import standby

EARLY = ("--early", "on")        # the options of a standby of it
# Room for WAL that a slow fsync holds up, and all of it for a standby that takes long to start.
SETTINGS = "wal_buffers = 16MB\nwal_keep_size = 1GB\n"
SENDER = "SELECT to_json(s) FROM walrider.stat_early_stream s WHERE application_name = '{}'"


def make_primary(template, data_dir, conf=""):
    """A copy of a primary as initdb left it, running, with the extension; its `disk` can be slow."""
    server = PgCluster(copy_tree(template, data_dir))
    server.configure(SETTINGS + conf)
    server.disk = Disk(f"{data_dir}-shim", "pg_wal/")
    server.own_environment = server.disk.environment()
    standby.start_primary(server)
    server.psql("CREATE EXTENSION walrider", options=standby.LOCALLY)
    return server


def sender(server, name=standby.NAME):
    """What the primary counts of an early stream."""
    return server.json(SENDER.format(name))


def flushed(server):
    """The primary's flush position."""
    return parse_lsn(server.value("SELECT pg_current_wal_flush_lsn()"))
