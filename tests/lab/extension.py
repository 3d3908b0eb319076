"""The extension, which is the early stream and an output plugin, built with PGXS and installed into the servers under `.pg/`.

    python3 -m tests.lab.extension [MAJOR]...        build and install where the sources have changed; without majors, all

It writes into the server's directories, which the user that the tests run as cannot: `make extension` calls it.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lab import headers, install
from tests.lab.as_user import give, run_fetched, scratch_directory

SOURCE = install.ROOT / "extension"
LIBRARIES = ("walrider", "walrider_pgoutput")
# The engine's redo for C, which `make build` makes.
REDO_LIB = install.ROOT / "target" / "release" / "libwalrider_redo_c.a"
REDO_HEADER = install.ROOT / "crates" / "redo-c" / "include" / "walrider_redo.h"


def sources():
    """What the library and the scripts are made of."""
    return [SOURCE / "Makefile", SOURCE / "walrider.control", *sorted(SOURCE.glob("walrider--*.sql")),
            *sorted((SOURCE / "src").iterdir())]


def stamp(major):
    """What an installed library was made of."""
    digest = hashlib.sha256(install.version(major).encode())
    for path in [*sources(), REDO_HEADER, REDO_LIB]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def pg_config(major, what):
    """A directory of the server's."""
    return Path(run_fetched([install.bindir(major) / "pg_config", what], check=True).stdout.strip())


def library(major, name="walrider"):
    """Where a library is installed."""
    return pg_config(major, "--pkglibdir") / f"{name}.so"


def make(major, directory, cflags=None):
    """`make` in a copy of the sources, with the server's own PGXS, or PostgreSQL 18's where it came without. PGXS was fetched:
    root has the tests' user build, and installs itself."""
    include = headers.directory(major)
    pgxs_of = major if pg_config(major, "--pgxs").exists() else install.DEFAULT
    argv = ["make", "-s", "-C", directory, f"REDO_LIB={REDO_LIB.name}", "REDO_INCLUDE=.", f"PG_CONFIG={install.bindir(pgxs_of) / 'pg_config'}",
            f"includedir_server={include}", f"pkglibdir={pg_config(major, '--pkglibdir')}", "with_llvm=no"]
    if cflags:
        argv.append(f"COPT={cflags}")
    run_fetched(argv, check=True)


def build(major, cflags=None, into=None):
    """Build; install into the server, or only copy the early stream's library to `into`."""
    with tempfile.TemporaryDirectory(prefix="extension-", dir=scratch_directory()) as scratch:
        scratch = Path(scratch)
        for path in sources():
            target = scratch / path.relative_to(SOURCE)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(path, target)
        for path in (REDO_HEADER, REDO_LIB):
            shutil.copy2(path, scratch)
        give(scratch)
        make(major, scratch, cflags)
        if into:
            shutil.copyfile(scratch / f"{LIBRARIES[0]}.so", into)
            return
        for name in LIBRARIES:
            _install(scratch / f"{name}.so", library(major, name), 0o755)
        for path in (SOURCE / "walrider.control", *SOURCE.glob("walrider--*.sql")):
            _install(path, pg_config(major, "--sharedir") / "extension" / path.name, 0o644)


def _install(source, target, mode):
    """Put a file in its place, in one step."""
    scratch = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, scratch)
    scratch.chmod(mode)
    scratch.rename(target)


def install_into(major):
    """Build and install for this major if the sources have changed; two callers at once take turns."""
    with open(install.PG_DIR / ".lock-extension", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark, wanted = library(major).with_suffix(".stamp"), stamp(major)
        if mark.exists() and mark.read_text() == wanted and all(library(major, name).exists() for name in LIBRARIES):
            return
        print(f"building the extension for PostgreSQL {install.version(major)}", file=sys.stderr)
        mark.unlink(missing_ok=True)
        build(major)
        mark.write_text(wanted)


if __name__ == "__main__":
    try:
        for wanted in sys.argv[1:] or install.MAJORS:
            install_into(wanted)
    except (install.MissingServer, headers.MissingSource, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
