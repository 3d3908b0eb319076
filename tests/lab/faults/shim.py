"""A disk that is slow, stuck or full, and a clock that is wrong: `shim.c`, preloaded into one program, with switches that work while it runs."""

import os
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
SWITCHES = ("fsync_us", "fsync_hold", "full", "clock_s", "held", "read_us", "write_us", "data_write_us")


class Disk:
    """The disk as the programs see it that run with `environment()`; only files below `path` are touched."""

    def __init__(self, directory, path):
        self.control = Path(directory)
        self.control.mkdir(parents=True)
        self.path = path
        (self.control / "switches").write_bytes(bytes(8 * len(SWITCHES)))
        # Where it cannot be loaded the loader warns and goes on, with a disk that obeys nothing: it is built for each, here.
        self.library = self.control / "shim.so"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(self.library), str(SOURCE), "-ldl"], check=True)

    def environment(self):
        """To be added to a program's environment."""
        return dict(LD_PRELOAD=str(self.library), SHIM_CONTROL=str(self.control), SHIM_PATH=str(self.path))

    def kill_at(self, number):
        """As `environment()`, for a program that is killed before its fsync, rename or unlink of this number; 0: never, but
        they are noted."""
        if number == 0:
            (self.control / "calls").unlink(missing_ok=True)
        return dict(self.environment(), SHIM_KILL_AT=str(number))

    def kill_before(self, ending):
        """As `environment()`, for a program that is killed before its first such call for a path that ends so."""
        return dict(self.environment(), SHIM_KILL_BEFORE=ending)

    def calls(self):
        """The paths of all such calls that the last program made that was not to be killed, in their order."""
        return (self.control / "calls").read_text().splitlines()

    def _switch(self, name, value):
        """A field of `struct switches`."""
        with open(self.control / "switches", "r+b") as file:
            os.pwrite(file.fileno(), struct.pack("=q", value), SWITCHES.index(name) * 8)

    def fsync_takes(self, ms):
        """Milliseconds more for each fsync; 0: as it is."""
        self._switch("fsync_us", round(ms * 1000))

    def reads_take(self, ms):
        """Milliseconds more for each read of a relation."""
        self._switch("read_us", round(ms * 1000))

    def writes_take(self, ms):
        """Milliseconds more for each write of WAL."""
        self._switch("write_us", round(ms * 1000))

    def data_writes_take(self, ms):
        """Milliseconds more for each write of a relation."""
        self._switch("data_write_us", round(ms * 1000))

    def hold_fsync(self, held=True):
        """No fsync returns until it is let go."""
        self._switch("fsync_hold", int(held))

    def is_held(self):
        """Whether an fsync waits to be let go."""
        at = SWITCHES.index("held") * 8
        return struct.unpack_from("=q", (self.control / "switches").read_bytes(), at)[0] > 0

    def fill(self, what="all"):
        """No space: `all` writes fail, or those that need `new` space."""
        self._switch("full", dict(all=1, new=2)[what])

    def clear(self):
        """There is space again."""
        self._switch("full", 0)

    def set_clock(self, seconds):
        """What `gettimeofday` tells is ahead of the time by so many seconds, or behind."""
        self._switch("clock_s", seconds)
