"""`walrider standby --readable`: a standby that Walrider and PostgreSQL replay in turns."""

import signal
from contextlib import suppress

from tests.lab import install, walrider
from tests.lab.server.cluster import free_port
from tests.lab.standby import standby
from tests.lab.waiting import wait_for


class Node(standby.Walrider):
    """One; its server is ours to stop as well."""

    def __init__(self, data_dir, sockets, *options, within="1MB", beyond="3MB", after="300ms", **settings):
        super().__init__(data_dir, "--readable", "--pg-ctl", install.program("pg_ctl"), "--local-conninfo", "user=postgres",
                         "--readable-within", within, "--catch-up-beyond", beyond, "--catch-up-after", after, *options)
        self.configure(port=free_port(), unix_socket_directories=sockets, listen_addresses="", fsync="on", shared_buffers="32MB", **settings)

    def configure(self, **settings):
        """Settings of its server."""
        with open(self.data_dir / "postgresql.auto.conf", "a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def reader(self, timeout=60):
        """The server, once it can be read."""
        self.wait_state("readable", timeout=timeout)
        return standby.adopt(self.data_dir)

    def logged(self, text, timeout=30):
        """Wait until the log has this text."""
        wait_for(lambda: text in self.log_text(), lambda: f"{text!r} in the log\n{self.log_tail()}", timeout)

    def kill_alone(self):
        """SIGKILL; PostgreSQL stays."""
        super().kill()

    def kill(self):
        """SIGKILL all of it."""
        super().kill()
        with suppress(FileNotFoundError, ProcessLookupError, ValueError, IndexError):
            standby.adopt(self.data_dir).kill()


def startup_process(server):
    """Who replays."""
    return int(server.value("SELECT pid FROM pg_stat_activity WHERE backend_type = 'startup'"))
