"""PostgreSQL's SQL tests: not ours, not in this repository, fetched from Debian's source package.

    python3 -m tests.suites.source          unpack what the suites need under .pg/source-MAJOR

PG_SOURCE=/path names an unpacked source tree of the same major to take them from instead.  What is taken:
the regression, isolation and subscription tests with their Perl modules, contrib, and regress.c, compiled against the server's headers.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.lab import headers, install
from tests.lab.as_user import run_fetched, scratch_directory
from tests.lab.headers import Apt, MissingSource

PARTS = ("src/test/regress", "src/test/isolation", "src/test/subscription", "src/test/perl", "contrib", "configure")
LIBRARIES = ("refint", "autoinc")           # of contrib/spi; up to 17 the regression tests expect them beside regress.so
# What a server of an earlier minor than the tests does not survive: statements that crash it or never end, a test that
# leaves catalogs which cannot be dumped.  server: (file, pattern of what is left out)
LEFT_OUT = {"17.10": (("src/test/regress/sql/sqljson.sql", r"^SELECT .*::sqljson_mystr .*\n"),
                      ("src/test/regress/sql/hash_part.sql", r"^SELECT .*VARIADIC NULL::.*\n"),
                      ("src/test/isolation/isolation_schedule", r"^test: ddl-dependency-locking\n"),
                      ("contrib/pg_surgery/sql/heap_surgery.sql", r"^select heap_force_kill\(\n\t'htab3'[^;]*;\n"))}
FORMAT = "3"                                # of the unpacked tree: another one is unpacked again


def tree():
    """The unpacked tree of the server's major."""
    return install.PG_DIR / f"source-{install.major()}"


def libraries():
    """The directory of regress.so, pg_regress's --dlpath."""
    return tree() / "lib"


def version(source=None):
    """The version of a source tree, such as "18.6"."""
    with open(Path(source or tree()) / "configure", errors="replace") as configure:
        return re.search(r"^PACKAGE_VERSION='(.*)'", configure.read(), re.M)[1]


def given(major):
    """PG_SOURCE, if it is of this major."""
    path = os.environ.get("PG_SOURCE")
    if not path:
        return None
    if not (Path(path) / "configure").exists():
        raise MissingSource(f"PG_SOURCE={path} is no PostgreSQL source tree")
    return Path(path) if version(path).split(".")[0] == major else None


def download(major, scratch):
    """The parts of Debian's source package, unpacked below `scratch`; returns the tree."""
    print(f"fetching the source of PostgreSQL {major}", file=sys.stderr)
    apt = Apt(scratch / "apt", major, "deb-src")
    apt("--download-only", "source", f"postgresql-{major}")
    with tarfile.open(apt.one(f"postgresql-{major}_*.orig.tar.*")) as archive:
        wanted = [member for member in archive if member.name.partition("/")[2].startswith(PARTS)]
        archive.extractall(scratch, members=wanted, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next(scratch.glob(f"postgresql-{major}.*"))


def compile_library(source, include, target):
    """regress.so: the C functions of the regression tests."""
    compiler = os.environ.get("CC", "cc")
    scratch = scratch_directory()
    shutil.copyfile(source / "src/test/regress/regress.c", scratch / "regress.c")
    run_fetched([compiler, "-O2", "-fPIC", "-shared", "-w", f"-I{include}", scratch / "regress.c", "-o", scratch / "regress.so"],
                check=True)
    shutil.copyfile(scratch / "regress.so", target)
    target.chmod(0o755)


def unpack(major, target):
    """Fill `target` from PG_SOURCE or Debian, renamed when complete."""
    with tempfile.TemporaryDirectory(dir=install.PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        source = given(major) or download(major, scratch)
        made = scratch / "made"
        for part in PARTS:
            copy = shutil.copytree if (source / part).is_dir() else shutil.copy2
            (made / part).parent.mkdir(parents=True, exist_ok=True)
            copy(source / part, made / part)
        for file, pattern in LEFT_OUT.get(install.version(), ()):
            (made / file).write_text(re.sub(pattern, "", (made / file).read_text(), flags=re.M))
        (made / "lib").mkdir()
        compile_library(source, headers.directory(major), made / "lib" / "regress.so")
        packaged = run_fetched([install.program("pg_config"), "--pkglibdir"])
        for name in LIBRARIES:
            library = Path(packaged.stdout.strip()) / f"{name}.so"
            if library.exists():
                shutil.copy2(library, made / "lib" / library.name)
        (made / ".stamp").write_text(stamp())
        subprocess.run(["chmod", "-R", "a+rX", made], check=True)     # the tests run as another user when root called
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


def program(name):
    """regress/pg_regress and its like: from the server's own build, PostgreSQL 18's where it came without."""
    for bindir in (install.bindir(), install.PG_DIR / "18" / "bin"):
        for lib in ("lib", "lib/postgresql", "../../lib"):
            path = bindir.parent / lib / "pgxs/src/test" / name
            if path.exists():
                return path
    raise install.MissingServer(f"no {name} beside {install.bindir()}")


def stamp():
    """What an unpacked tree was made for."""
    return f"{FORMAT} {install.version()} {platform.machine()}"


def fetch(needed=()):
    """Unpack the source of the server's major if it is not there, or is older than `needed` parts of it; two callers at once take
    turns."""
    install.PG_DIR.mkdir(exist_ok=True)
    with open(install.PG_DIR / ".lock-source", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = tree()
        there = (target / ".stamp").exists() and (target / ".stamp").read_text() == stamp()
        if not there or not all((target / part).exists() for part in needed):
            unpack(install.major(), target)
    return target


if __name__ == "__main__":
    try:
        fetch()
    except (MissingSource, install.MissingServer, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    print(f"tests of PostgreSQL {version()} in {tree()}")
