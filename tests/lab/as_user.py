"""Run a command as an unprivileged user when root calls; PostgreSQL and Walrider refuse root.

    python3 -m tests.lab.as_user [--writable DIR]... -- COMMAND ...

The command runs in the checkout, or in a copy of the needed parts where that user cannot read the
checkout, with TMPDIR set to a new directory of its own that is removed afterwards.  COMMAND
`python3` means an interpreter which that user can run.
"""

import atexit
import functools
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The binary under test: in the checkout, or anywhere if the path is absolute.
PROGRAM = os.environ.get("WALRIDER", "target/release/walrider")
STAGED = ["tests", "bench", "docs", "extension", ".pg/17", ".pg/18", ".pg/headers-17", ".pg/source-17", ".pg/source-18",
          ".pg/python", ".pg/driver", ".pg/tools", ".pg/perl", "packaging", "Cargo.toml", "CHANGELOG.md", "LICENSE", "README.md",
          *([f".pg/{older}"] if (older := os.environ.get("WALRIDER_TEST_MAJOR", "18")) not in ("17", "18") else []),
          *([] if os.path.isabs(PROGRAM) else [PROGRAM])]
USER = "walrider-test"
# Of the directories that are removed when a run ends.
SCRATCH_PREFIX = "walrider-"


def find_user():
    """The passwd entry of `walrider-test`, made if need be; else of `nobody`."""
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        pass
    useradd = shutil.which("useradd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if useradd:
        made = subprocess.run(
            [useradd, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", USER],
            capture_output=True)
        if made.returncode == 0:
            return pwd.getpwnam(USER)
    return pwd.getpwnam("nobody")


def become(user):
    """Give up root for good: groups first, the user id last."""
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


def _succeeds(user, argv, cwd="/"):
    """Whether `argv` runs as `user`."""
    try:
        return subprocess.run(argv, cwd=cwd, capture_output=True, user=user.pw_uid, group=user.pw_gid,
                              extra_groups=[], env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
                              ).returncode == 0
    except OSError:
        return False


def find_python(user):
    """An interpreter that `user` can run: this one, or the system's."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if _succeeds(user, [python, "-c", "import encodings, subprocess, sys; assert sys.version_info >= (3, 10)"]):
            return python
    raise SystemExit(f"error: no python3 that user {user.pw_name} can run; install the system's python3")


def stage(user, scratch):
    """The directory to run in: the checkout if `user` can read it, else a copy of what is needed."""
    needed = [ROOT / part for part in STAGED if (ROOT / part).exists()]
    if all(_succeeds(user, ["test", "-r", str(path)]) for path in needed):
        return ROOT
    copy = Path(scratch) / "checkout"
    for path in needed:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True)
        else:
            shutil.copy2(path, target)
    subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(copy)], check=True)
    return copy


@functools.cache
def scratch_directory():
    """A directory of the tests' user, removed when this process ends."""
    user = find_user() if os.geteuid() == 0 else None
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=scratch_parent(user)))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    if user:
        scratch.chmod(0o755)
        give(scratch)
    return scratch


def give(path):
    """Make a directory and what is in it that user's, where root calls."""
    if os.geteuid() == 0:
        user = find_user()
        subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(path)], check=True)


@functools.cache
def within_reach(path):
    """A directory, or a copy where the tests' user cannot read it."""
    if os.geteuid() != 0 or not path.exists() or _succeeds(find_user(), ["test", "-r", str(path)]):
        return path
    copy = scratch_directory() / path.name
    shutil.copytree(path, copy, symlinks=True)
    give(copy)
    return copy


def run_fetched(argv, check=False, **options):
    """Run what was fetched under `.pg/`, or what that decides about: never as root. The output is captured, and names the
    directories as `argv` does."""
    parent = ROOT / ".pg"
    known = {}

    def reached(found):
        copy = known[found[0]] = str(within_reach(Path(found[0])))
        return copy
    argv = [re.sub(rf"{re.escape(str(parent))}/[^/\s]+", reached, str(part)) for part in argv]
    credentials = {}
    if os.geteuid() == 0:
        user = find_user()
        credentials = dict(user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd=options.pop("cwd", "/"))
    env = dict(os.environ, TMPDIR=str(scratch_directory()))
    done = subprocess.run(argv, capture_output=True, text=True, env=env, **credentials, **options)
    for name, copy in known.items():
        done.stdout = done.stdout.replace(copy, name)
    if check and done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return done


def environment(base, scratch, cwd):
    """The child's environment: nothing of the caller's PostgreSQL settings, its own TMPDIR."""
    env = {key: value for key, value in base.items() if not key.startswith("PG") or key == "PG_CONFIG"}
    python_path = [str(cwd), str(cwd / ".pg" / "python"), str(cwd / ".pg" / "driver")]
    env.update(TMPDIR=str(scratch), PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=":".join(python_path),
               PYTHONHASHSEED="0", LC_ALL="C.UTF-8", TZ="UTC")
    return env


def scratch_parent(user):
    """TMPDIR where `user` may write below it, else the system's."""
    wanted = tempfile.gettempdir()
    if user is None or _succeeds(user, ["test", "-x", wanted]):
        return wanted
    return "/tmp"


def refused_as_root(scratch):
    """How the binary answers root, for the one test that the tests' own user cannot make."""
    binary = ROOT / PROGRAM
    if not binary.exists():
        return {}
    empty = tempfile.mkdtemp(dir=scratch)
    done = subprocess.run([binary, "replay", "--data-dir", empty, "--wal", empty], capture_output=True, text=True)
    return {"WALRIDER_AS_ROOT": f"{done.returncode}:{done.stderr}"}


def run(command, writable=()):
    """Run `command` unprivileged and return its exit status; signals are passed on."""
    root = os.geteuid() == 0
    user = find_user() if root else None
    scratch = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=scratch_parent(user))
    cwd = ROOT
    credentials = {}
    if root:
        os.chmod(scratch, 0o755)
        os.chown(scratch, user.pw_uid, user.pw_gid)
        cwd = stage(user, scratch)
        credentials = dict(user=user.pw_uid, group=user.pw_gid, extra_groups=[])
    if command[0] == "python3":
        command = [find_python(user) if root else sys.executable, *command[1:]]
    env = environment(os.environ, scratch, cwd)
    if root:
        env.update(HOME=scratch, USER=user.pw_name, LOGNAME=user.pw_name)
    for directory in writable:
        path = Path(directory).resolve()
        path.mkdir(parents=True, exist_ok=True)
        if root:
            # With what it has, as it is given back: a result may take the place of an older one.
            subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(path)], check=True)
            if not _succeeds(user, ["test", "-w", str(path)]):  # below a directory it cannot enter
                mirror = Path(scratch) / path.name
                mirror.mkdir()
                os.chown(mirror, user.pw_uid, user.pw_gid)
                command = [str(mirror) if part == directory else part for part in command]
    if root:
        env.update(refused_as_root(scratch))
    try:
        child = subprocess.Popen(command, cwd=cwd, env=env, **credentials)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: child.send_signal(received))
        status = child.wait()
        for directory in writable:
            mirror = Path(scratch) / Path(directory).name
            if mirror.is_dir():
                shutil.copytree(mirror, directory, dirs_exist_ok=True)
            if root:
                subprocess.run(["chown", "-R", "0:0", str(directory)], check=True)
    finally:
        if os.environ.get("WALRIDER_KEEP") == "1":
            print(f"kept: {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return status if status >= 0 else 128 - status


def main(argv):
    """Parse by hand: everything after `--` belongs to the command."""
    writable = []
    while argv and argv[0] == "--writable":
        writable.append(argv[1])
        argv = argv[2:]
    if not argv or argv[0] != "--" or len(argv) < 2:
        raise SystemExit(__doc__)
    return run(argv[1:], writable)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
