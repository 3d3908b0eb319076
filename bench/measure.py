"""One replay by either side, measured from outside: times, memory, bytes to and from the device, processor.

Both start from a copy of the same base backup, with the WAL in its pg_wal.
"""

import mmap
import os
import random
import re
import resource
import shutil
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from tests.lab.server import recovery
from tests.lab.walrider import replay

MB = 1 << 20
BLOCK = 8192
# Whatever helps stock: no fsync, no hot standby (REPLAY_SETTINGS), a quiet log, no process that redo does not need.
STOCK_SETTINGS = dict(log_min_messages="log", autovacuum="off", max_wal_senders="0", huge_pages="try")

# Where the buffers do not hold all pages: reads ahead, and another process that writes, so that redo need not.
STOCK_SETTINGS_LIMITED = dict(maintenance_io_concurrency="64", bgwriter_lru_maxpages="1000", bgwriter_delay="10ms")


def memory(bytes_at_full_size, size):
    """The memory for pages that goes with a load of this size; 0 is no limit."""
    return bytes_at_full_size and max(16 * MB, int(bytes_at_full_size * size) // MB * MB)


def segments(directory):
    """The WAL segments and history files of a directory, in order."""
    return sorted(file for file in Path(directory).iterdir() if re.fullmatch(r"[0-9A-F]{24}|[0-9A-F]{8}\.history", file.name))


def link_wal(fixture, data_dir):
    """The archive's files in pg_wal; neither side changes a segment, so that a link is as good as a copy, on the same device."""
    take = os.link if fixture.stat().st_dev == data_dir.stat().st_dev else shutil.copyfile
    for file in segments(fixture / "archive"):
        take(file, data_dir / "pg_wal" / file.name)


def drop_cache(directory):
    """Forget what the kernel has cached of a directory's files; they must have been synced."""
    for parent, _, names in os.walk(directory):
        for name in names:
            file = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def touch_memory(info):
    """Use as much memory as a side does that replays this load, at most what is free, and give it back, so that what runs next gets memory that is
    there: a directory's files in the system's cache and in memory of its own, WAL, and a gigabyte for processes.

    The host of a virtual machine may take back what its guest does not use for some seconds.  The first touch then costs several times as
    much, and what a side pays would depend on what the side before it left."""
    free = re.search(r"MemFree:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    size = 1024 * MB + 3 * (info.get("data_bytes", 0) + info["wal_bytes"])
    pages = min(size, (int(free[1]) << 10) * 9 // 10) // mmap.PAGESIZE
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory[::mmap.PAGESIZE] = b"\1" * pages


def _io():
    """What this process and the children that it has waited for read from and wrote to the device."""
    return dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())


@contextmanager
def usage(into):
    """Add to `into` what the children inside the block used."""
    io, cpu = _io(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    io_after, cpu_after = _io(), resource.getrusage(resource.RUSAGE_CHILDREN)
    into.update(read_bytes=int(io_after["read_bytes"]) - int(io["read_bytes"]),
                written_bytes=int(io_after["write_bytes"]) - int(io["write_bytes"]),
                user_seconds=cpu_after.ru_utime - cpu.ru_utime, system_seconds=cpu_after.ru_stime - cpu.ru_stime)


def memory_of(pids):
    """What processes have alone, and the shared memory that was touched."""
    alone = shared = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        rss = {name: int(size) << 10 for name, size in re.findall(r"(Rss\w+):\s+(\d+) kB", status)}
        alone += rss.get("RssAnon", 0)
        shared = max(shared, rss.get("RssShmem", 0))
    return alone + shared


class PeakMemory:
    """The most memory that a server's processes had."""

    def __init__(self, server):
        self.server, self.peak, self.next = server, 0, 0.0

    def __call__(self):
        """Look, ten times a second at most."""
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + 0.1
        self.peak = max(self.peak, memory_of([self.server.process.pid, *self.server.children()]))


class Stock:
    """A stock recovery from its own pg_wal, to and including the shutdown checkpoint, where it stops, flushed.

    A standby without restore_command or primary_conninfo looks into pg_wal alone, and unlike crash recovery it can be told
    to stop at the last record.
    """

    def __init__(self, data_dir, buffers, limited, durable):
        self.data_dir = data_dir
        self.settings = dict(STOCK_SETTINGS, **(STOCK_SETTINGS_LIMITED if limited else {}),
                             shared_buffers=f"{buffers // MB}MB", fsync="on" if durable else "off")

    def prepare(self, fixture, info):
        """The directory, ready to start."""
        self.final_checkpoint = info["final_checkpoint"]
        self.server = recovery.prepare(fixture / "backup", fixture / "archive", self.data_dir, signal="standby.signal",
                                       target=("lsn", self.final_checkpoint), action="shutdown")
        self.server.configure("restore_command = ''", "postgresql.auto.conf")
        link_wal(fixture, self.data_dir)

    def run(self, group):
        """The recovery; what it took."""
        found, peak = {}, PeakMemory(self.server)
        with usage(found), group.entered(found):
            began = datetime.now(timezone.utc)
            redo = recovery.finish_stock(self.server, self.final_checkpoint, peak, **self.settings)
        ended = re.findall(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) UTC \[\d+\] LOG:  database system is shut down",
                           self.server.log.read_text(errors="replace"))[-1]
        total = datetime.strptime(ended, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=timezone.utc) - began
        return dict(found, redo_seconds=redo.redo_seconds, total_seconds=total.total_seconds(), peak_memory_bytes=peak.peak)


class Ours:
    """A replay by Walrider from the directory's own pg_wal; it is durable when it ends."""

    KEPT = ("redo_seconds", "peak_memory_bytes", "records", "transactions", "wal_bytes", "stages", "pages_read",
            "pages_written", "pages_evicted")

    def __init__(self, data_dir, jobs, memory, options):
        self.data_dir = data_dir
        self.options = ["--jobs", jobs, *(["--memory", f"{memory // MB}MB"] if memory else []), *options]

    def prepare(self, fixture, _info):
        """The directory, ready to start."""
        recovery.copy_backup(fixture / "backup", self.data_dir)
        link_wal(fixture, self.data_dir)

    def run(self, group):
        """The replay; what it took."""
        found = {}
        with usage(found), group.entered(found):
            result = replay(self.data_dir, self.data_dir / "pg_wal", *self.options).expect()
        return dict(found, total_seconds=result.seconds, own_total_seconds=result.json["total_seconds"],
                    **{name: result.json[name] for name in self.KEPT})


def timed(work):
    """Seconds that it takes."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def write_rate(directory, size):
    """Bytes per second that the device takes: so many written in order, 128 blocks at a time, and fsync."""
    path, block = directory / "write-rate", os.urandom(128 * BLOCK)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        begun = time.monotonic()
        for offset in range(0, size, len(block)):
            os.pwrite(file, block, offset)
        os.fsync(file)
        return size / (time.monotonic() - begun)
    finally:
        os.close(file)
        path.unlink()


def read_rate(directory, count, ahead=128):
    """Blocks per second that the device gives: single blocks of uncached files, at random, so many asked for ahead."""
    drop_cache(directory)
    big = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size >= MB]
    files = [(os.open(path, os.O_RDONLY), path.stat().st_size // BLOCK) for path in big]
    for file, _ in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    seeded = random.Random(1)
    chosen = [(file, seeded.randrange(blocks) * BLOCK)
              for file, blocks in seeded.choices(files, [blocks for _, blocks in files], k=count)]
    try:
        begun = time.monotonic()
        for number, (file, offset) in enumerate(chosen):
            for wanted, place in chosen[number + ahead:number + ahead + 1] if number else chosen[:ahead + 1]:
                os.posix_fadvise(wanted, place, BLOCK, os.POSIX_FADV_WILLNEED)
            os.pread(file, BLOCK, offset)
        return count / (time.monotonic() - begun)
    finally:
        for file, _ in files:
            os.close(file)
