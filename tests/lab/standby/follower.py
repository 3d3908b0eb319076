"""`walrider replay --follow`: what it says, and what it watches."""

import json
import re
import signal
import time
from pathlib import Path

from tests.lab.server.cluster import format_lsn, parse_lsn
from tests.lab.walrider import start


class Follower:
    """`walrider replay --follow` on a directory of its own."""

    def __init__(self, data_dir, wal, *args):
        self.data_dir = data_dir
        self.output = Path(f"{data_dir}.positions")
        self.process = start("replay", "--data-dir", data_dir, "--wal", wal, "--follow", "--positions", "--json", *args,
                             stdout=self.output.open("w"))

    def said(self):
        """What it has printed, line by line."""
        lines = self.output.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, end, timeout=60):
        """Wait until all records up to there are replayed."""
        deadline = time.monotonic() + timeout
        while True:
            stands_at = [said["replayed_lsn"] for said in self.said() if "replayed_lsn" in said][-1:]
            if stands_at and parse_lsn(stands_at[0]) >= parse_lsn(end):
                return
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline, f"at {stands_at}, not at {end}"
            time.sleep(0.002)

    def wait_behind(self, checkpoint):
        """Wait until the checkpoint record that begins there is replayed."""
        self.wait_for(format_lsn(parse_lsn(checkpoint) + 1))

    def watches(self):
        """The inodes of the directories that it watches."""
        found = set()
        for path in Path(f"/proc/{self.process.pid}/fdinfo").iterdir():
            try:
                found.update(re.findall(r"^inotify .*\bino:([0-9a-f]+)", path.read_text(), re.MULTILINE))
            except FileNotFoundError:
                pass    # closed meanwhile
        return {int(inode, 16) for inode in found}

    def end(self):
        """SIGTERM; what it says last."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return self.said()[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
