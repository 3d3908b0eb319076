"""A pgBackRest repository of a server of ours, all of it below one directory."""

import os

from tests.lab.server import tools
from tests.lab.server.cluster import PgCluster, run
from tests.lab.standby import standby

CONF = "autovacuum = off\ncheckpoint_timeout = 1h\nmax_wal_size = 1GB\narchive_mode = on\nsynchronous_standby_names = ''\n"


class Repository:
    """A server with a full backup in a repository, its archive compressed and asynchronous, and WAL behind the backup."""

    def __init__(self, directory, compress):
        self.directory = directory
        self.server = standby.make_primary(directory / "primary", CONF)
        self.config = directory / "pgbackrest.conf"
        self.config.write_text(self.configuration(compress, "[global:archive-push]"))
        self.ahead = directory / "ahead.conf"
        self.ahead.write_text(self.configuration(compress, "[global]"))

    def configuration(self, compress, asynchronous):
        """All of it below one directory; the section says whether archive-get is asynchronous, too."""
        for name in ("repo", "log", "lock", "spool"):
            (self.directory / name).mkdir(exist_ok=True)
        paths = "".join(f"{key}={self.directory / name}\n" for key, name in
                        (("repo1-path", "repo"), ("log-path", "log"), ("lock-path", "lock"), ("spool-path", "spool")))
        return (f"[global]\n{paths}compress-type={compress}\nprocess-max=2\nstart-fast=y\narchive-timeout=20\nrepo1-retention-full=1\nlog-level-console=warn\n"
                f"{asynchronous}\narchive-async=y\n[main]\npg1-path={self.server.data_dir}\npg1-port={self.server.port}\npg1-socket-path={self.server.sockets}\n"
                "pg1-user=postgres\n")

    def command(self, *args, config=None):
        """Run pgBackRest."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "PGBACKREST"))}
        return run([tools.program("pgbackrest"), f"--config={config or self.config}", "--stanza=main", *args], env=environment)

    def fill(self):
        """The backup, then rows up to a time, then one more behind it; everything archived."""
        server = standby.start_primary(self.server)
        server.psql("CREATE TABLE t (id int PRIMARY KEY, note text)")
        self.command("stanza-create")
        # Not before: after three failures the archiver waits for a minute.
        server.configure(f"archive_command = '{tools.program('pgbackrest')} --config={self.config} --stanza=main archive-push %p'")
        server.psql("SELECT pg_reload_conf()")
        self.command("--type=full", "backup")
        # pgBackRest knows a backup's end in whole seconds, and restores to none of these.
        ended = server.value("SELECT date_trunc('second', clock_timestamp()) + '2 s'")
        for first in range(1, 20001, 5000):
            server.psql(f"INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series({first}, {first + 4999}) n")
            server.switch_wal()
        standby.wait_for(lambda: server.value(f"SELECT clock_timestamp() > '{ended}'") == "t", "the backup's second is over")
        # Strictly between the commits, by the clock that stamps them.
        self.target = server.value("SELECT clock_timestamp()")
        server.psql("SELECT pg_sleep(0.01); INSERT INTO t VALUES (-1, 'behind the target')")
        segment = server.value("SELECT pg_walfile_name(pg_switch_wal())")
        archived = "SELECT last_archived_wal >= '{}' FROM pg_stat_archiver"
        standby.wait_for(lambda: server.value(archived.format(segment)) == "t", lambda: f"{segment} archived: {server.log_tail()}")
        return self

    def restored(self, data_dir, *options, config=None):
        """A directory as pgBackRest leaves it."""
        data_dir.mkdir(mode=0o700)
        self.command(f"--pg1-path={data_dir}", *options, "restore", config=config)
        return PgCluster(data_dir)
