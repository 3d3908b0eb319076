"""PostgreSQL's sources and headers from Debian, where the server under `.pg/` came without.

    python3 -m tests.lab.headers [MAJOR]...          fetch the headers that are missing; without majors, all
"""

import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lab import install
from tests.lab.as_user import run_fetched

SUITES = {"17": "trixie", "18": "sid"}      # of Debian
# sha256 of the files as they were when this was written. Debian keeps no older ones beside a newer, so that one which is not
# named here is taken all the same, on the word of apt, which verifies the archive's signature, and said.
KNOWN = {
    "libipc-run-perl_20231003.0-2_all.deb": "5f12071d638763274feb77774aefbd2fa90b44427f5699578c1a485696273d75",
    "postgresql-18_18.6.orig.tar.bz2": "555610c24d53e4316da5b7d3fc25c279d96856d5e0e23ee308c328c5fa881d9f",
    "postgresql-server-dev-17_17.12-0+deb13u1_amd64.deb": "d524d6d8169ce6c5733ab6b91caacfcf1d750123628cc43122baf8a8459a0f61",
    "postgresql-server-dev-17_17.12-0+deb13u1_arm64.deb": "bbf515ea63f11c1b57a7ec26cb3027cdedfee7c8d3854921c933ea9686317ac8",
}
# What would ask for the headers of other libraries; with it goes the end of struct Port (libpq-be.h), nothing else.
FOREIGN = r"^#define (ENABLE_GSS|USE_OPENSSL) 1$"


class MissingSource(RuntimeError):
    """No PostgreSQL source to be had; the message says what to do."""


class Apt:
    """Debian's archive through this machine's apt, with lists of its own: the machine's are not touched."""

    def __init__(self, directory, major, kind):
        self.directory = Path(directory)
        if not shutil.which("apt-get"):
            raise MissingSource("PostgreSQL's sources and headers come from Debian, and there is no apt-get: set PG_SOURCE "
                                "to an unpacked PostgreSQL source tree for its tests, PG_CONFIG to a server with headers")
        keys = sorted(glob.glob("/usr/share/keyrings/debian-archive-keyring.*"))
        signed = f"[signed-by={keys[0]}] " if keys else ""
        for part in ("lists/partial", "cache/archives/partial"):
            (self.directory / part).mkdir(parents=True)
        (self.directory / "status").touch()
        (self.directory / "sources.list").write_text(f"{kind} {signed}{self._mirror()} {SUITES[major]} main\n")
        self.options = [f"-oDir::Etc::sourcelist={self.directory}/sources.list", "-oDir::Etc::sourceparts=/dev/null",
                        f"-oDir::State::lists={self.directory}/lists", f"-oDir::State::status={self.directory}/status",
                        f"-oDir::Cache={self.directory}/cache", "-oAPT::Sandbox::User=root",
                        "-oAcquire::Languages=none", "-oAcquire::Retries=3"]
        self("update")

    @staticmethod
    def _mirror():
        """Where this machine takes Debian from."""
        for name in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"):
            if os.path.exists(name):
                found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(http\S+/debian/?)(?:\s|$)", Path(name).read_text(), re.M)
                if found:
                    return found[1]
        return "http://deb.debian.org/debian"

    def __call__(self, *command):
        """One apt-get command; files arrive in the directory."""
        done = subprocess.run(["apt-get", "-qq", *self.options, *command], cwd=self.directory,
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise MissingSource(f"apt-get {' '.join(command)}: {done.stderr.strip()[-1000:]}")

    def one(self, pattern):
        """The file that came; refused if it is not what it was."""
        file = next(self.directory.glob(pattern))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if file.name not in KNOWN:
            print(f"{file.name}: Debian has moved on, and vouches for it alone (sha256 {digest})", file=sys.stderr)
        elif KNOWN[file.name] != digest:
            raise MissingSource(f"{file.name} has the sha256 {digest}, {KNOWN[file.name]} is expected: it is another file under "
                                "the same name; clear the cache of the mirror or proxy that it came from, and do not use it")
        return file


def directory(major):
    """The server's headers: its own, or Debian's of the same major, fetched once. A build makes some of them, so that the
    source alone does not do."""
    own = run_fetched([install.bindir(major) / "pg_config", "--includedir-server"])
    if own.returncode == 0 and (Path(own.stdout.strip()) / "postgres.h").exists():
        return Path(own.stdout.strip())
    target = install.PG_DIR / f"headers-{major}"
    if target.exists():
        return target / "server"
    with open(install.PG_DIR / ".lock-headers", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            fetch(major, target)
    return target / "server"


def fetch(major, target):
    """Unpack the headers, renamed when complete."""
    print(f"fetching the headers of PostgreSQL {major}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=install.PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        apt = Apt(scratch / "apt", major, "deb")
        apt("download", f"postgresql-server-dev-{major}")
        subprocess.run(["dpkg-deb", "-x", apt.one("*.deb"), scratch / "unpacked"], check=True)
        found = scratch / "unpacked" / "usr" / "include" / "postgresql" / major
        config = found / "server" / "pg_config.h"
        config.write_text(re.sub(FOREIGN, r"/* \g<0> */", config.read_text(), flags=re.M))
        subprocess.run(["chmod", "-R", "a+rX", found], check=True)
        found.rename(target)


if __name__ == "__main__":
    try:
        for wanted in sys.argv[1:] or install.MAJORS:
            print(f"headers of PostgreSQL {wanted} in {directory(wanted)}")
    except (MissingSource, install.MissingServer, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
