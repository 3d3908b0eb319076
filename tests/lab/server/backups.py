"""Base backups: what PostgreSQL's own program says of them, and how they are unpacked without us."""

import subprocess

from tests.lab import install
from tests.lab.server.cluster import run


def verify(backup, *options):
    """pg_verifybackup."""
    done = subprocess.run([str(part) for part in (install.program("pg_verifybackup"), *options, backup)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def extract(archive, target):
    """Unpack an archive into a directory."""
    target.mkdir(exist_ok=True)
    run(["tar", "-xf", archive, "-C", target])
    target.chmod(0o700)
    return target
