"""Recoveries: a copy of a backup rolled forward by stock PostgreSQL, the reference for ours.

Byte comparison needs three things of the stock server: hot_standby = off (a hot standby writes hint
bits), a WAL that ends with a shutdown checkpoint, and that this checkpoint record is replayed before
the server stops.  ShutdownXLOG makes a restartpoint, and CreateRestartPoint (xlog.c) flushes pages only
if the last replayed checkpoint record is newer than pg_control's; pages changed after that record are
flushed as well, but the directory then claims less than it holds.
"""

import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.lab.server.cluster import PgCluster, ServerError, controldata, copy_tree
from tests.lab.trash import throw_away
from tests.lab.walrider import walrider

REPLAY_SETTINGS = dict(hot_standby="off", shared_buffers="1GB", fsync="off", archive_mode="off",
                       max_wal_size="64GB", checkpoint_timeout="1h", bgwriter_lru_maxpages="0")
# A hot standby needs at least what the loads, one of them by a parameter change, set on the primary (CheckRequiredParameterValues).
SERVE_SETTINGS = dict(fsync="off", max_connections="80", max_worker_processes="10", max_prepared_transactions="60",
                      autovacuum="off")


@dataclass
class Timings:
    """What a stock recovery's log says."""

    start_lsn: str
    end_lsn: str
    redo_seconds: float
    total_seconds: float


def copy_backup(backup, data_dir):
    """A copy of a backup with tablespaces of its own."""
    data_dir = Path(data_dir)
    copy_tree(backup, data_dir)
    data_dir.chmod(0o700)
    for link in (data_dir / "pg_tblspc").iterdir():
        if link.is_symlink():
            own = Path(f"{data_dir}.tablespaces") / link.name
            own.parent.mkdir(exist_ok=True)
            copy_tree(os.readlink(link), own)
            link.unlink()
            link.symlink_to(own)
    return data_dir


def tablespace_links(fixture, data_dir):
    """Point the locations that the WAL names at directories of this recovery alone.

    CREATE TABLESPACE in the WAL names FIXTURE/links/NAME; `links` is a symbolic link, and whoever
    replays next gets an empty set of directories of its own behind it.
    """
    alias, own = Path(fixture) / "links", Path(f"{data_dir}.links")
    for name in ("outside", "dropped"):
        (own / name).mkdir(parents=True, exist_ok=True)
    point_links(alias, own)


def point_links(alias, target):
    """Replace a symbolic link in one step."""
    if not os.path.lexists(alias):
        return
    scratch = Path(f"{alias}.new")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.rename(alias)


def pin_tablespaces(data_dir):
    """Make the links in pg_tblspc point past `links`, so that two directories can be compared."""
    for link in (Path(data_dir) / "pg_tblspc").iterdir():
        if link.is_symlink():
            real = os.path.realpath(link)
            link.unlink()
            link.symlink_to(real)


def restore_settings(wal, target=None, inclusive=True, action=None, timeline="latest"):
    """Settings for a recovery; `target` is a (kind, value) pair such as ("lsn", "0/3000060")."""
    settings = [f"restore_command = 'cp {wal}/%f %p'", f"recovery_target_timeline = '{timeline}'"]
    if target:
        kind, value = target
        settings.append("recovery_target = 'immediate'" if kind == "immediate"
                        else f"recovery_target_{kind} = '{value}'")
        settings.append(f"recovery_target_inclusive = {'on' if inclusive else 'off'}")
    if action:
        settings.append(f"recovery_target_action = '{action}'")
    return "\n".join(settings)


def prepare(backup, wal, data_dir, fixture=None, signal="recovery.signal", **settings):
    """A data directory ready to recover: backup copied, signal file and settings written."""
    data_dir = copy_backup(backup, data_dir)
    if fixture:
        tablespace_links(fixture, data_dir)
    (data_dir / signal).touch()
    server = PgCluster(data_dir)
    server.configure("archive_mode = off", "postgresql.auto.conf")
    server.configure(restore_settings(wal, **settings), "postgresql.auto.conf")
    return server


def stock_replay(backup, wal, data_dir, final_checkpoint, fixture=None, progress=None, **settings):
    """Replay to and including the shutdown checkpoint at `final_checkpoint`, and stop there, flushed.

    recovery_target_lsn is compared with the start of a record (recoveryStopsAfter, xlogrecovery.c), so
    the target is the checkpoint record itself.  `recovery_target_action = shutdown` ends the server,
    and its shutdown restartpoint at that record writes every page.  Restartpoints on the way remove the WAL that was restored:
    the archive has it, and with consistency images it is several gigabytes.
    """
    server = prepare(backup, wal, data_dir, fixture, target=("lsn", final_checkpoint), action="shutdown")
    return finish_stock(server, final_checkpoint, progress, **{"wal_recycle": "off", "wal_keep_size": "0", "max_wal_size": "1GB", **settings})


def finish_stock(server, final_checkpoint, progress=None, timeout=1800, **settings):
    """Let a stock server run into its shutdown target; returns what its log says."""
    begun = time.monotonic()
    server.launch(**{**REPLAY_SETTINGS, "log_min_messages": "debug1", **settings})
    while server.process.poll() is None:
        if time.monotonic() - begun > timeout:
            server.kill()
            raise ServerError(f"stock recovery takes more than {timeout} s\n{server.log_tail()}")
        if progress:
            progress()
        time.sleep(0.02)
    server.wait_end()
    control = controldata(server.data_dir)
    if (control["Database cluster state"] != "shut down in recovery"
            or control["Latest checkpoint location"] != final_checkpoint):
        raise ServerError(f"stock recovery did not reach {final_checkpoint}: {control['Database cluster state']}, "
                          f"{control['Latest checkpoint location']}\n{server.log_tail()}")
    if server.data_dir.joinpath("pg_tblspc").exists():
        pin_tablespaces(server.data_dir)
    return timings(server, time.monotonic() - begun)


def take_over(data_dir, archive, final_checkpoint):
    """What a user does who gives up on us: start PostgreSQL on the directory."""
    control = controldata(data_dir)
    if control["Latest checkpoint location"] == final_checkpoint:
        # Killed in its last moments: nothing is left to replay, so no target to reach; at most to say that it has ended.
        if control["Database cluster state"] != "shut down in recovery":
            walrider("replay", "-D", data_dir, "--wal", archive).expect()
        pin_tablespaces(data_dir)
        return
    (data_dir / "recovery.signal").touch()
    server = PgCluster(data_dir)
    server.configure("archive_mode = off\n" + restore_settings(archive, target=("lsn", final_checkpoint), action="shutdown"),
                     "postgresql.auto.conf")
    with server:
        finish_stock(server, final_checkpoint)


def timings(server, total_seconds=0.0):
    """The redo time from the log's own timestamps."""
    stamp = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) UTC \[\d+\] "
    text = server.log.read_text(errors="replace")
    start = re.findall(stamp + r"LOG:  redo starts at ([0-9A-F/]+)", text)[-1]
    end = (re.findall(stamp + r"LOG:  redo done at ([0-9A-F/]+)", text)
           or re.findall(stamp + r"LOG:  recovery stopping (?:before|after) WAL location \(LSN\) \"([0-9A-F/]+)\"", text))[-1]
    when = [datetime.strptime(moment, "%Y-%m-%d %H:%M:%S.%f") for moment in (start[0], end[0])]
    return Timings(start[1], end[1], (when[1] - when[0]).total_seconds(), total_seconds)


def recover_and_promote(server, timeout=600, **settings):
    """Start a prepared directory, let it reach its target and promote; returns the LSN it ended at."""
    server.launch(**{**SERVE_SETTINGS, **settings})
    server.wait_ready(timeout)
    deadline = time.monotonic() + timeout
    while server.value("SELECT pg_is_in_recovery()") == "t":
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise ServerError(f"no end of recovery\n{server.log_tail()}")
        time.sleep(0.05)
    return stopped_at(server)


def stopped_at(server):
    """What the log says about the end of recovery: the stop line and the last replayed record."""
    text = server.log.read_text(errors="replace")
    stop = re.findall(r"LOG:  recovery stopping (.*)", text)
    done = re.findall(r"LOG:  redo done at ([0-9A-F/]+)", text)
    return dict(stop=stop[-1] if stop else None, redo_done=done[-1] if done else None)


def discard(*directories):
    """Give up data directories and what belongs to them."""
    for directory in directories:
        for path in (directory, f"{directory}.tablespaces", f"{directory}.links"):
            throw_away(path)
        Path(f"{directory}.log").unlink(missing_ok=True)
