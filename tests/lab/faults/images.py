"""Images of what a disk may hold after a power cut (powercut.py), each continued in each way that there is.

WALRIDER_POWER_IMAGES is how many there are in all; WALRIDER_POWER_KEEP names a directory that keeps the record and the image of a
failure."""

import os
import re
import time
from pathlib import Path

from tests.lab.seed import seed
from tests.lab.server import recovery

IMAGES = int(os.environ.get("WALRIDER_POWER_IMAGES", "60"))
SEED = seed()
KEEP = os.environ.get("WALRIDER_POWER_KEEP")
# Of all images, what each kind of run has.
SHARES = dict(replay=11, apart=8, restore=8, restartpoints=11, promotion=11, receive=4, spool=4, early=5, early_redo=4,
              restore_tar=3, restore_early=3, roll_plain=2, roll_tar=2)
# More than Linux ever gives (PID_MAX_LIMIT).
NO_PROCESS = (1 << 22) + 1


def images(kind):
    """How many of this kind."""
    return max(1, IMAGES * SHARES[kind] // sum(SHARES.values()))


def bury(directory):
    """Whoever had a data directory here is dead: its number in postmaster.pid is one that no process has, or some day another one would."""
    for lock_file in Path(directory).rglob("postmaster.pid"):
        lock_file.write_text(re.sub(r"^(-?)\d+", rf"\g<1>{NO_PROCESS}", lock_file.read_text()))


class Images:
    """The images of one record, and what becomes of each."""

    def __init__(self, kind, record, memory):
        self.kind, self.record, self.memory = kind, record, memory
        print(f"{kind}: a record of {len(record.calls)} calls: {record.counts()}")

    def check(self, continue_with, journaled=False, at=None):
        """Each image is continued in each way; `continue_with` is their names and what does it to a directory.  `at`: where each has to
        lie, since it has its own path in it."""
        failed = []
        begun = time.monotonic()
        for number in range(images(self.kind)):
            cut = self.record.choose(f"{SEED}/{self.kind}/{number}", journaled)
            for name, proceed in continue_with.items():
                directory = self.record.image(cut, at or self.memory / f"{self.kind}-{name}")
                bury(directory)
                try:
                    proceed(directory, cut)
                except Exception as error:
                    failed.append(f"{cut}, continued by {name}: {error}")
                    print(failed[-1], flush=True)
                    self.keep(cut, f"{number}-{name}")
                recovery.discard(directory)
        print(f"{images(self.kind)} images, {time.monotonic() - begun:.1f} s")
        assert not failed, f"{len(failed)} of {images(self.kind)} images: " + "\n".join(failed)

    def keep(self, cut, name):
        """The record of a failure, and its image."""
        if KEEP:
            target = Path(KEEP) / f"{self.kind}-{name}"
            target.mkdir(parents=True)
            self.record.image(cut, target / "image")
            (target / "calls").write_text("\n".join(map(str, self.record.calls[:cut.step + 20])))
