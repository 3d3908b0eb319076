"""What a volume gives: how fast it is when nobody else uses it, and how fast it was while somebody did."""

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

from .measure import BLOCK, MB, memory_of

SECONDS = 2.0
FILE = 256 * MB
THREADS = 16


def probe(volume, limits):
    """Requests a second of one block at random, and bytes a second of 1 MB each in order, around the cache; empty without a device."""
    if not volume.can_limit:
        return {}
    path = volume.fresh(2 * FILE, limits[2] > 0) / "probe"
    with open(path, "wb") as file:
        for _ in range(FILE // MB):
            file.write(os.urandom(MB))
        os.fsync(file.fileno())
    volume.limit(*limits)
    found = {}
    for direction, call in (("read", os.preadv), ("write", os.pwritev)):
        flags = os.O_DIRECT | (os.O_RDONLY if direction == "read" else os.O_WRONLY)
        found[f"{direction}_requests_per_second"] = _rate(path, flags, call, BLOCK)
        found[f"{direction}_bytes_per_second"] = _rate(path, flags, call, MB) * MB
    volume.limit()
    path.unlink()
    return found


def _rate(path, flags, call, size):
    """Calls a second by some threads: each at random where it is a block, else all in order."""
    file = os.open(path, flags)
    until = time.monotonic() + SECONDS

    def work(number):
        buffer, chosen, done = mmap.mmap(-1, size), random.Random(number), 0
        while time.monotonic() < until:
            place = chosen.randrange(FILE // size) if size == BLOCK else (done * THREADS + number) % (FILE // size)
            call(file, [buffer], place * size)
            done += 1
        return done

    begun = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        done = sum(pool.map(work, range(THREADS)))
    os.close(file)
    return done / (time.monotonic() - begun)


class Watch:
    """What a run has had at most: memory of its processes, and requests and bytes within a second."""

    def __init__(self, volume):
        self.volume, self.memory, self.most = volume, 0, {}
        self.looked, self.counted, self.counts = 0.0, time.monotonic(), volume.counts()

    def __call__(self, *pids):
        """Look, ten times a second at most."""
        now = time.monotonic()
        if now - self.looked > 0.1:
            self.looked = now
            self.memory = max(self.memory, memory_of(pids))
        if now - self.counted > 1:
            counts = self.volume.counts()
            for key, value in counts.items():
                self.most[key] = max(self.most.get(key, 0), (value - self.counts[key]) / (now - self.counted))
            self.counted, self.counts = now, counts

    def found(self):
        """All of it."""
        return dict(watched_memory_bytes=self.memory, **{f"most_{key}_per_second": value for key, value in self.most.items()})
