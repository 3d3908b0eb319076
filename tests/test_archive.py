"""`walrider wal put` and `get`: an archive in a directory or an object store, segments fetched ahead, and what may go wrong."""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lab.faults.objects import ObjectStore
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, controldata
from tests.lab.walrider import CORRUPT, FAILED, binary, walrider

TROUBLE = 200
LOG_OF_RESTORE = "restored log file"


def wal(*args, env=None, **kwargs):
    """Run `walrider wal`."""
    return subprocess.run([binary(), "wal", *map(str, args)], capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, **(env or {})), **kwargs)


def quoted(*words):
    """A command line, quoted for a setting."""
    return " ".join(shlex.quote(str(word)) for word in words).replace("'", "''")


class Archived:
    """A primary that archived into two places, and its backup."""

    def __init__(self, directory):
        self.store = ObjectStore()
        self.directory, self.backup = directory / "archive", directory / "backup"
        self.directory.mkdir()
        self.places = dict(directory=str(self.directory), objects=self.store.url("main"))
        put = " && ".join(f"{quoted(binary(), 'wal', 'put', '--archive', place)} %p" for place in self.places.values())
        server = PgCluster.init(directory / "primary", wal_segsize_mb=1,
                                conf=f"archive_mode = on\narchive_command = '{put}'\nautovacuum = off\n")
        server.own_environment = self.store.environment
        with server:
            server.start()
            server.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
            server.basebackup(self.backup)
            for first in range(0, 200_000, 20_000):
                server.psql(f"INSERT INTO t SELECT n, md5(n::text) FROM generate_series({first + 1}, {first + 20_000}) n")
            self.expected = server.psql("SELECT count(*), sum(id) FROM t")
            # Which switches to another segment, and archives the last.
            server.stop()
            self.log = server.log.read_text()
        self.identifier = int(controldata(server.data_dir)["Database system identifier"])
        self.objects = dict(self.store.objects)
        self.segments = sorted(key.split("/")[-1][:24] for key in self.objects if key.endswith(".zst"))

    def key(self, segment):
        """Where a segment lies in the object store."""
        return f"main/wal/{segment[:8]}/{segment}.zst"

    def command(self, place, *options):
        """A `restore_command` for one of the places."""
        words = (binary(), "wal", "get", "--archive", self.places[place], "--idle", "4", *options)
        return f"{quoted(*words)} %f %p"

    def copy(self, data_dir, place, *options):
        """A server that is to recover from there."""
        server = PgCluster(recovery.copy_backup(self.backup, data_dir))
        server.own_environment = self.store.environment
        server.configure(f"archive_mode = off\nhot_standby = off\nrestore_command = '{self.command(place, *options)}'\n", "postgresql.auto.conf")
        (data_dir / "recovery.signal").touch()
        return server

    def check(self, server):
        """It has all that the primary had."""
        assert server.value("SELECT pg_is_in_recovery()") == "f"
        assert server.psql("SELECT count(*), sum(id) FROM t") == self.expected

    def recover(self, server):
        """Recover, and check; how long it took."""
        with server:
            began = time.monotonic()
            server.start()
            took = time.monotonic() - began
            self.check(server)
            assert LOG_OF_RESTORE in server.log.read_text()
        return took

    def data_dir(self, path):
        """A directory that a file can be restored into as into this cluster's."""
        (path / "global").mkdir(parents=True)
        (path / "pg_wal").mkdir()
        (path / "global/pg_control").write_bytes((self.backup / "global/pg_control").read_bytes())
        return path


@pytest.fixture(scope="module")
def archived(tmp_path_factory, server_major):
    """One for all tests of a major here."""
    return Archived(tmp_path_factory.mktemp("archived"))


@pytest.fixture(autouse=True)
def as_it_was(archived):
    """Faults end with the test."""
    yield
    archived.store.objects = dict(archived.objects)
    archived.store.delay, archived.store.status, archived.store.most = 0.0, None, 0
    archived.store.requests.clear()


def processes(part):
    """Processes that fetch ahead for this directory."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "ahead" in words and any(str(part) in word for word in words):
                found[int(path.parent.name)] = words
    return found


def wait_until(what, timeout=30):
    """Wait until something is so."""
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.every_major
@pytest.mark.parametrize("place", ["directory", "objects"])
def test_what_is_archived_is_restored(archived, work, place):
    """All segments come back, most of them fetched ahead; then the process ends, and nothing of it is left."""
    assert "archive command failed" not in archived.log
    server = archived.copy(work / "ours", place)
    archived.recover(server)
    assert "00000002.history" not in [path.name for path in archived.directory.glob("wal/*")]
    wait_until(lambda: not processes(server.data_dir))
    assert not (server.data_dir / "pg_wal/walrider.ahead").exists()
    assert not list((server.data_dir / "pg_wal").glob("*.walrider.*"))
    if place == "objects":
        assert {len(archived.store.asked("GET", segment)) for segment in archived.segments[5:-1]} == {1}


@pytest.mark.alone
def test_delays_are_hidden(archived, work):
    """100 ms a request: a segment at a time, recovery waits for each; fetched ahead, for hardly any."""
    archived.store.delay = 0.1
    alone = archived.recover(archived.copy(work / "alone", "objects", "--prefetch", "0"))
    assert archived.store.most == 1
    ahead = archived.recover(archived.copy(work / "ahead", "objects", "--prefetch", "16"))
    print(f"{len(archived.segments)} segments: {alone:.1f} s one at a time, {ahead:.1f} s ahead, {archived.store.most} at once")
    assert archived.store.most >= 4
    assert alone - ahead > 0.05 * len(archived.segments)


def test_walrider_replays_from_it(archived, work):
    """`walrider replay` runs the same command, several at once."""
    archived.store.delay = 0.05
    server = archived.copy(work / "ours", "objects")
    done = subprocess.run([binary(), "replay", "-D", server.data_dir, "--promote"], capture_output=True, text=True,
                          env=dict(os.environ, **archived.store.environment), timeout=120)
    assert done.returncode == 0, done.stderr
    with server:
        server.start()
        archived.check(server)


def replayed(archived, data_dir, place, *options):
    """`walrider replay --wal` of a copy of the backup without a `restore_command`."""
    server = PgCluster(recovery.copy_backup(archived.backup, data_dir))
    server.own_environment = archived.store.environment
    server.configure("archive_mode = off\nhot_standby = off\n", "postgresql.auto.conf")
    return server, walrider("replay", "-D", data_dir, "--wal", archived.places[place], *options, env=archived.store.environment)


@pytest.mark.parametrize("place", ["directory", "objects"])
def test_replay_reads_it_itself(archived, work, place):
    """Several segments at once, without a command; to the end, and to a point from which PostgreSQL goes on by itself."""
    archived.store.delay = 0.05
    server, result = replayed(archived, work / "ours", place, "--promote")
    assert result.expect().json["segments_fetched"] >= len(archived.segments) - 10
    if place == "objects":
        assert archived.store.most >= 4
    with server:
        server.start()
        archived.check(server)
    server, result = replayed(archived, work / "half", place)
    assert result.expect().json["promoted"] is None
    assert "wal get --archive" in (work / "half/postgresql.auto.conf").read_text()
    with server:
        server.start()
        archived.check(server)
        assert LOG_OF_RESTORE in server.log.read_text()
    assert not list(work.glob("*/pg_wal/walrider.fetch*"))


def test_replay_tells_what_is_wrong(archived, work):
    """Damage, an outage, a place without an archive: none of them is the end of the WAL."""
    archived.store.flip(archived.key(archived.segments[-5]), 5000)
    _, result = replayed(archived, work / "damaged", "objects", "--promote")
    assert "is damaged" in result.expect(CORRUPT).stderr
    archived.store.objects = {}
    _, result = replayed(archived, work / "empty", "objects", "--promote")
    assert "there is no archive at" in result.expect(FAILED).stderr
    archived.store.status = 403
    _, result = replayed(archived, work / "refused", "objects", "--promote")
    assert "403" in result.expect(FAILED).stderr


def test_damage_stops_recovery(archived, work):
    """A bit that flips in the middle of a segment is found; PostgreSQL stops there, and does not open."""
    segment = archived.segments[-5]
    archived.store.flip(archived.key(segment), 5000)
    server = archived.copy(work / "ours", "objects")
    with server:
        server.launch()
        assert server.wait_end() != 0
        log = server.log.read_text()
    assert f"{segment}.zst\" is damaged" in log and f"exit code {TROUBLE}" in log, log[-2000:]
    assert "archive recovery complete" not in log
    archived.store.objects = dict(archived.objects)
    archived.recover(server)


@pytest.mark.parametrize("status", [403, 404])
def test_an_outage_is_not_the_end(archived, work, status):
    """A store that refuses, or that has lost the bucket, halfway: recovery stops, and goes on when it is back."""
    server = archived.copy(work / "ours", "objects", "--prefetch", "2")
    with server:
        server.launch()
        wait_until(lambda: server.log.exists() and archived.segments[8] in server.log.read_text())
        archived.store.status = status
        assert server.wait_end() != 0
        log = server.log.read_text()
    assert f"exit code {TROUBLE}" in log and "archive recovery complete" not in log, log[-2000:]
    archived.store.status = None
    archived.recover(server)


def test_exit_codes(archived, work):
    """1 is what the archive does not have; anything else that goes wrong must not look like the end of the WAL."""
    data_dir = archived.data_dir(work / "data")
    to, place = data_dir / "pg_wal/RECOVERYXLOG", archived.places["directory"]
    first = archived.segments[0]
    assert wal("get", "--archive", place, "--prefetch", "0", first, to).returncode == 0
    assert to.stat().st_size == 1 << 20
    to.unlink()
    for name in ("00000009.history", "0000000100000000000FFFFF"):
        assert wal("get", "--archive", place, name, to).returncode == 1
    (work / "empty").mkdir()
    other = archived.data_dir(work / "other")
    with open(other / "global/pg_control", "r+b") as control:
        control.write(b"12345678")
    for args, said in [(["--archive", work / "empty", first, to], "there is no archive"),
                       (["--archive", work / "nowhere", first, to], "there is no archive"),
                       (["--archive", "relative", first, to], "absolute path"),
                       (["--archive", "s3://bucket/main", "--no-such", first, to], "unexpected argument"),
                       (["--archive", place, to, first], "is no file to restore"),
                       (["--archive", place, first, work / "no/where"], "could not"),
                       ([], "--archive"),
                       (["--archive", place, first, other / "pg_wal/RECOVERYXLOG"], "another cluster")]:
        done = wal("get", *args)
        assert done.returncode == TROUBLE and said in done.stderr, (args, done)
    assert not to.exists() and not list(other.glob("pg_wal/*"))
    done = wal("get", "--archive", "s3://elsewhere/main", first, to, env=archived.store.environment)
    assert done.returncode == TROUBLE, "there is no such bucket"


@pytest.mark.parametrize("place", ["directory", "objects"])
def test_nothing_is_replaced(archived, work, place):
    """The same again is success, as after a crash; other contents under the name are an error, and so is what is no segment."""
    env, segment = archived.store.environment, archived.segments[3]
    path = work / segment
    assert wal("get", "--archive", archived.places[place], segment, path, env=env).returncode == 0
    for compression in ("zstd", "lz4", "none"):
        done = wal("put", "--archive", archived.places[place], "--compression", compression, path, env=env)
        assert done.returncode == 0 and "was archived before" in done.stderr, done
    with open(path, "r+b") as file:
        file.seek(777_777)
        file.write(b"another history")
    done = wal("put", "--archive", archived.places[place], path, env=env)
    assert done.returncode == FAILED and "with other contents" in done.stderr, done
    path.rename(work / archived.segments[4])
    done = wal("put", "--archive", archived.places[place], work / archived.segments[4], env=env)
    assert done.returncode == FAILED and "its name says" in done.stderr, done
    assert archived.store.objects == archived.objects


@pytest.mark.parametrize("place", ["directory", "objects"])
def test_put_is_killed(archived, work, place):
    """Whenever it is, the archive has the whole file or none, and the same command succeeds."""
    env, segment = archived.store.environment, archived.segments[3]
    source = work / segment
    assert wal("get", "--archive", archived.places[place], segment, source, env=env).returncode == 0
    archived.store.delay, killed = 0.01, 0
    for number in range(25):
        target = work / f"target{number}"
        target.mkdir()
        url = str(target) if place == "directory" else archived.store.url(f"target{number}")
        put = subprocess.Popen([binary(), "wal", "put", "--archive", url, source], env=dict(os.environ, **env),
                               stderr=subprocess.DEVNULL)
        time.sleep(number * (0.001 if place == "directory" else 0.004))
        put.kill()
        killed += put.wait() == -signal.SIGKILL
        done = wal("get", "--archive", url, segment, work / "got", env=env)
        assert done.returncode in (0, 1) or "there is no archive" in done.stderr, done
        assert wal("put", "--archive", url, source, env=env).returncode == 0
        assert wal("get", "--archive", url, segment, work / "got", env=env).returncode == 0
        assert (work / "got").read_bytes() == source.read_bytes()
        assert not list(target.glob("wal/unfinished/*"))
    assert killed > 3, killed


def test_whoever_fetches_is_killed(archived, work):
    """Killed again and again, the command and the process behind it: nothing is handed out that is not whole."""
    archived.store.delay = 0.02
    data_dir = archived.data_dir(work / "data")
    to = data_dir / "pg_wal/RECOVERYXLOG"
    env = dict(os.environ, **archived.store.environment)
    command = [binary(), "wal", "get", "--archive", archived.places["objects"], "--idle", "2"]
    for number, segment in enumerate(archived.segments):
        get = subprocess.Popen([*command, segment, str(to)], env=env, stderr=subprocess.PIPE, text=True)
        time.sleep((number % 12) * 0.005)
        if number % 2:
            get.kill()
        else:
            for pid in processes(data_dir):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        get.communicate()
        if number % 2:
            assert not to.exists() or to.stat().st_size == 1 << 20
            done = wal("get", *command[3:], segment, to, env=env)
            assert done.returncode == 0, done
        else:
            assert get.returncode == 0
        expected = archived.directory / f"wal/{segment[:8]}/{segment}.zst"
        assert wal("get", "--archive", archived.directory, segment, work / "whole").returncode == 0 and expected.exists()
        assert to.read_bytes() == (work / "whole").read_bytes()
        to.unlink()
    assert wal("get", *command[3:], archived.segments[-1], to, env=env).returncode == 0
    to.unlink()
    wait_until(lambda: not processes(data_dir))
    assert not list((data_dir / "pg_wal").glob("*")), "the last removes what those left that were killed"


def test_two_at_once(archived, work):
    """Two servers' commands, and two of one server: each gets every segment, whole."""
    archived.store.delay = 0.02
    env = dict(os.environ, **archived.store.environment)
    data_dir, spool = archived.data_dir(work / "data"), work / "spool"
    command = [binary(), "wal", "get", "--archive", archived.places["objects"], "--idle", "2", "--spool-dir", str(spool)]
    for segment in archived.segments:
        pair = [subprocess.Popen([*command, segment, str(data_dir / f"pg_wal/to{number}")], env=env) for number in (1, 2)]
        assert [get.wait(60) for get in pair] == [0, 0]
        assert (data_dir / "pg_wal/to1").read_bytes() == (data_dir / "pg_wal/to2").read_bytes()
    wait_until(lambda: not processes(spool))
    assert not spool.exists()


def test_a_spool_is_of_one_archive_and_cluster(archived, work):
    """What lies in a spool that others use too is handed to nobody else, and what was changed there to nobody at all."""
    data_dir, spool = archived.data_dir(work / "data"), work / "spool"
    to = data_dir / "pg_wal/RECOVERYXLOG"

    def get(place, segment):
        return wal("get", "--archive", place, "--spool-dir", spool, "--idle", "3", segment, to, env=archived.store.environment)

    assert get(archived.places["directory"], archived.segments[0]).returncode == 0
    mine = wait_for_segments(spool, 8)
    for path in mine:
        with open(path, "r+b") as file:
            file.seek(100_000)
            file.write(b"changed")
    assert get(archived.places["directory"], archived.segments[1]).returncode == 0
    assert b"changed" not in to.read_bytes()
    (work / "empty/wal").mkdir(parents=True)
    assert get(work / "empty", archived.segments[2]).returncode == 1
    assert get(archived.places["objects"], archived.segments[2]).returncode == 0
    assert b"changed" not in to.read_bytes() and len(list(spool.iterdir())) == 2


def wait_for_segments(spool, count):
    """Segments in a spool, once there are so many."""
    wait_until(lambda: len(list(spool.glob("*/*-*"))) >= count)
    return list(spool.glob("*/*-*"))


def test_what_backups_need_stays(archived, work):
    """--keep-backups: the segments of the newest backup stay, in whatever form it was taken; what cannot be told removes nothing."""
    env, backups = archived.store.environment, work / "backups"
    backups.mkdir()

    def expire(*options):
        return wal("expire", "--archive", archived.places["objects"], "--keep-backups", "1", "--backups", backups, *options, env=env)

    assert expire().returncode == FAILED, "there is no backup"
    shutil.copytree(archived.backup, backups / "plain")
    first = re.search(r"\(file (\w+)\)", (archived.backup / "backup_label").read_text())[1]
    done = expire("--dry-run")
    assert done.returncode == 0 and f'segments from "{first}" on stay' in done.stderr, done
    assert archived.store.objects == archived.objects
    # The same as tar files, of a backup that began later.
    later = archived.segments[archived.segments.index(first) + 3]
    (backups / "tar").mkdir()
    (backups / "tar/base.tar.gz").touch()
    done = expire()
    assert done.returncode == FAILED and "is being taken" in done.stderr and archived.store.objects == archived.objects, done
    *lines, _ = (archived.backup / "backup_manifest").read_text().splitlines(keepends=True)
    manifest = re.sub(r'"Start-LSN": "[^"]*"', f'"Start-LSN": "0/{int(later[16:], 16) << 20:X}"', "".join(lines))
    (backups / "tar/backup_manifest").write_text(manifest + '"Manifest-Checksum": "0"}\n')
    done = expire()
    assert done.returncode == FAILED and "it is damaged" in done.stderr and archived.store.objects == archived.objects, done
    checksum = hashlib.sha256(manifest.encode()).hexdigest()
    (backups / "tar/backup_manifest").write_text(manifest + f'"Manifest-Checksum": "{checksum}"}}\n')
    # One that is under way begins before.
    (backups / "plain/backup_manifest").rename(work / "manifest")
    assert f'segments from "{first}" on stay' in expire("--dry-run").stderr
    (work / "manifest").rename(backups / "plain/backup_manifest")
    done = expire()
    assert done.returncode == 0, done
    left = sorted(key.split("/")[-1][:24] for key in archived.store.objects if key.endswith(".zst"))
    assert left == archived.segments[archived.segments.index(later):]


def test_old_segments_expire(archived):
    """As pg_archivecleanup: what is before a segment goes."""
    env, before = archived.store.environment, archived.segments[6]
    assert wal("expire", "--archive", archived.places["objects"], "--before", before, "--dry-run", env=env).stdout.endswith("would be removed\n")
    assert archived.store.objects == archived.objects
    assert wal("expire", "--archive", archived.places["objects"], "--before", before, env=env).returncode == 0
    left = sorted(key.split("/")[-1][:24] for key in archived.store.objects if key.endswith(".zst"))
    assert left == archived.segments[6:]
