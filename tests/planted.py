"""Do the simulator and the machine's model find bugs?  Plant some, one after the other, in a copy of the sources.

    python3 -m tests.planted [NAME ...]

Each is an edit of code that ships.  The simulator must fail within SECONDS for each of them, or the model, and pass for as long
without.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240

# Name: file below crates/, what stands there, what takes its place.
PLANTED = {
    "early WAL is taken for flushed": (
        "stream/src/intake.rs",
        "if self.early { wal_end } else { wal_end.max(self.received) }",
        "wal_end.max(self.received)"),
    "what is written is reported as flushed": (
        "stream/src/positions.rs",
        "flush: self.wal.held_durable, apply",
        "flush: self.wal.held, apply"),
    "the early log may have gaps": (
        "spool/src/decide.rs",
        "flushed < at && log.written == at",
        "flushed < at && log.written == at && at.0 % 3 == 0"),
    "nobody waits past what is written": (
        "spool/src/spool.rs",
        "let upto = upto.min(state.written);",
        "let upto = if upto > state.written { state.flushed } else { upto };"),
    "a new timeline's file begins with zeros": (
        "spool/src/prepare.rs",
        "if shared.partial || timeline <= TimelineId(1) {",
        "if timeline >= TimelineId(1) {"),
    "no archive is looked at while WAL streams in": (
        "store/src/find.rs",
        "Some(from) if self.size.segment_of(from) <= segment =>",
        "Some(_) =>"),
    "an fsync that failed is tried again": (
        "spool/src/flusher.rs",
        "unsynced.file.sync_data().map_err(",
        "unsynced.file.sync_data().or_else(|_| unsynced.file.sync_data()).map_err("),
    "a promotion does not wait for the receiver": (
        "standby/src/machine.rs",
        "self.wishes.promotes && self.link == Link::Down && self.stream.is_none() =>",
        "self.wishes.promotes =>"),
    "a promotion does not wait until all of pg_wal counts": (
        "standby/src/machine.rs",
        "self.link == Link::Down && self.stream.is_none() =>",
        "self.link == Link::Down =>"),
}
# Found by the machine's model; the others by the simulator.
BY_MODEL = {"a promotion does not wait for the receiver", "a promotion does not wait until all of pg_wal counts"}


def copy(into):
    """The sources, and what is built of them."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "crates", "Cargo.toml", "Cargo.lock"],
                           cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            # As of now: cargo takes what is older than its last build for built, and that may have had a bug in it.
            shutil.copyfile(ROOT / name, into / name)


def search(source, seconds, model):
    """Run seeds in a copy, or the model: what it fails with, if it does."""
    env = dict(os.environ, WALRIDER_FUZZ_SECONDS=str(seconds), WALRIDER_SEED="1",
               CARGO_TARGET_DIR=str(ROOT / "target" / "planted"), RUST_BACKTRACE="0")
    command = ["cargo", "test", "--locked", "--quiet", "--profile", "soak", "-p",
               *(["walrider-standby", "--test", "model"] if model else ["walrider-sim", "--test", "seeds"])]
    subprocess.run([*command, "--no-run"], cwd=source, env=env, check=True)
    ran = subprocess.run([*command, "--", "--nocapture"], cwd=source, env=env, capture_output=True, text=True)
    if ran.returncode == 0:
        return None
    failed = re.search(r'Unexpected "(.*)" counterexample' if model else r"failed: WALRIDER_SEED=(\d+)", ran.stderr)
    if not failed:
        sys.exit(ran.stdout + ran.stderr)
    if model:
        return failed[1]
    why = re.search(r"panicked at .*\n(.*(?:\n  (?:left|right).*)*)", ran.stderr)
    return f"seed {failed[1]}: " + (why[1].split("\n")[0] if why else "")


def main(names):
    """Plant each, and see whether it is found."""
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        copy(source)
        if found := search(source, SECONDS, False):
            sys.exit(f"nothing is planted yet: {found}")
        for name in names or PLANTED:
            file, old, new = PLANTED[name]
            path = source / "crates" / file
            text = path.read_text()
            if text.count(old) != 1:
                sys.exit(f"{name}: {file} has {text.count(old)} times: {old}")
            path.write_text(text.replace(old, new))
            begun = time.monotonic()
            found = search(source, SECONDS, name in BY_MODEL)
            path.write_text(text)
            missed += found is None
            print(f"{name}: " + (f"{time.monotonic() - begun:.0f} s, {found}" if found else "NOT FOUND"), flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(PLANTED)
    sys.exit(__doc__) if unknown else main(sys.argv[1:])
