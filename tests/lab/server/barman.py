"""A Barman catalogue of a server of ours, all of it below one directory."""

import os
import pwd
import sys

from tests.lab import install
from tests.lab.server import tools
from tests.lab.server.cluster import PgCluster, run
from tests.lab.standby import standby

CONF = "autovacuum = off\ncheckpoint_timeout = 1h\nmax_wal_size = 1GB\nsynchronous_standby_names = ''\n"
# What installations put on the PATH. The ssh is none: it leaves out its options and the host, and runs the command here.
SCRIPTS = {"barman": "PYTHONPATH={python} exec {interpreter} -c 'from barman.cli import main; main()' --config {config} \"$@\"",
           "barman-wal-restore": "PYTHONPATH={python} exec {interpreter} -m barman.clients.walrestore \"$@\"",
           "rsync": "exec {rsync} \"$@\"",
           "ssh": "while case $1 in *@*) false;; esac; do shift; done; shift; exec sh -c \"$*\""}


class Catalogue:
    """A server with a backup by streaming in Barman's catalogue, its archive in gzip, and WAL behind the backup."""

    def __init__(self, directory):
        self.directory, self.home, self.programs = directory, directory / "barman", directory / "bin"
        incoming = self.home / "main" / "incoming"
        incoming.mkdir(parents=True)
        self.programs.mkdir()
        # Its archive_command copies under another name first: Barman takes what is there, but for *.tmp.
        self.server = standby.make_primary(directory / "primary", CONF, archive=incoming)
        config = directory / "barman.conf"
        config.write_text(self.configuration())
        for name, text in SCRIPTS.items():
            script = self.programs / name
            script.write_text("#!/bin/sh\n" + text.format(python=tools.directory("barman") / "python", interpreter=sys.executable,
                                                          config=config, rsync=tools.program("barman", "rsync")) + "\n")
            script.chmod(0o755)
        # The settings that Barman leaves name programs without their directories.
        self.environment = {"PATH": f"{self.programs}:{os.environ['PATH']}"}

    def configuration(self):
        """Backups by pg_basebackup, WAL by archive_command into Barman's own directory; no ssh."""
        conninfo = standby.conninfo(self.server.port, "barman")
        user = pwd.getpwuid(os.getuid()).pw_name
        return (f"[barman]\nbarman_home = {self.home}\nbarman_lock_directory = {self.home}\nbarman_user = {user}\n"
                f"log_file = {self.directory / 'barman.log'}\n"
                f"[main]\ndescription = ours\nconninfo = {conninfo} dbname=postgres\nstreaming_conninfo = {conninfo}\n"
                f"backup_method = postgres\narchiver = on\ncompression = gzip\nimmediate_checkpoint = on\n"
                f"path_prefix = {tools.directory('barman')}:{install.bindir()}\n")

    def command(self, *args):
        """Run Barman."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")} | self.environment
        return run([self.programs / "barman", *args], env=environment)

    def archived(self):
        """All WAL up to here is in Barman's archive."""
        server = self.server
        segment = server.value("SELECT pg_walfile_name(pg_switch_wal())")
        archived = "SELECT last_archived_wal >= '{}' FROM pg_stat_archiver"
        standby.wait_for(lambda: server.value(archived.format(segment)) == "t",
                         lambda: f"{segment} archived: {server.log_tail()}")
        self.command("archive-wal", "main")

    def fill(self):
        """The backup, then rows up to a time, then one more behind it; everything archived."""
        server = standby.start_primary(self.server)
        server.psql("CREATE TABLE t (id int PRIMARY KEY, note text)")
        self.archived()
        self.command("backup", "main")
        server.psql("INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series(1, 4000) n")
        # Strictly between the commits, by the clock that stamps them.
        self.target = server.value("SELECT clock_timestamp()")
        server.psql("SELECT pg_sleep(0.01); INSERT INTO t VALUES (-1, 'behind the target')")
        self.archived()
        return self

    def restored(self, data_dir, *options):
        """A directory as Barman leaves it."""
        self.command("restore", *options, "main", "auto", data_dir)
        return PgCluster(data_dir)
