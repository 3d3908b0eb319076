"""What a relay or a standby archives."""

import subprocess

from tests.lab.standby.relay import write
from tests.lab.waiting import wait_for
from tests.lab.walrider import binary


def switch(server):
    """All that was written is in whole segments; the last of them."""
    name = server.value("SELECT pg_walfile_name(pg_switch_wal())")
    write(server, 1)
    return name


def get(place, name, to, env=None):
    """A file of an archive; None: it has none."""
    done = subprocess.run([binary(), "wal", "get", "--archive", str(place), "--prefetch", "0", name, str(to)], env=env, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode in (0, 1), done
    return to.read_bytes() if done.returncode == 0 else None


def archiver(server):
    """What /status says of it."""
    return server.status()["archiver"]


def wait_archived(server, *names):
    """Wait until these are archived, in whatever order, and nothing waits to be."""
    wal = server.data_dir / "pg_wal" if (server.data_dir / "pg_wal").exists() else server.data_dir

    def none_waits():
        return all((wal / f"archive_status/{name}.done").exists() for name in names) and not archiver(server)["ready_count"]
    wait_for(none_waits, lambda: f"{names}: {archiver(server)}\n{server.log_tail()}")
