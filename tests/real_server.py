"""Run the tests of the crates that need a server: built by the caller, run as the tests' own user.

    python3 -m tests.real_server [CRATE]...
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

from tests.lab import as_user, install

CRATES, NAME = ("walrider-datadir", "walrider-session"), "real_server"


def build(crate):
    """Build a crate's test program, and return where it is."""
    made = subprocess.run(["cargo", "test", "--locked", "--quiet", "-p", crate, "--test", NAME, "--no-run",
                           "--message-format=json"], cwd=as_user.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in made.stdout.splitlines()]
    return next(message["executable"] for message in messages
                if message.get("executable") and message["target"]["name"] == NAME)


def main():
    """Build and launch one after the other; with `--run PROGRAM`, be what is launched."""
    if sys.argv[1:2] == ["--run"]:
        os.environ["PG_BINDIR"] = str(install.bindir())
        os.execv(sys.argv[2], [sys.argv[2], "--ignored"])
    user = as_user.find_user() if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="walrider-", dir=as_user.scratch_parent(user)) as scratch:
        os.chmod(scratch, 0o755)
        status = 0
        for crate in sys.argv[1:] or CRATES:
            program = shutil.copy(build(crate), scratch)    # from a directory that only the caller may be able to read
            status = as_user.run(["python3", "-m", "tests.real_server", "--run", program]) or status
        sys.exit(status)


if __name__ == "__main__":
    main()
