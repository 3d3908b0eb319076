"""`restore_command`: fetched ahead, several at once; and an archive that fails is not the end of the WAL."""

import shlex

import pytest

from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, controldata, parse_lsn
from tests.lab.walrider import FAILED, walrider



class Archived:
    """A primary's backup, and an archive with all its WAL, which a command reads; files in `switches` make that fail."""

    def __init__(self, directory):
        self.archive, self.backup = directory / "archive", directory / "backup"
        server = PgCluster.init(directory / "primary", self.archive, wal_segsize_mb=1, conf="autovacuum = off\n")
        with server:
            server.start()
            server.psql("CREATE TABLE t (id int PRIMARY KEY, v text)")
            server.basebackup(self.backup)
            for first in range(0, 80_000, 20_000):
                server.psql(f"INSERT INTO t SELECT n, md5(n::text) FROM generate_series({first + 1}, {first + 20_000}) n")
            server.switch_wal()
            self.expected = server.psql("SELECT count(*), sum(id) FROM t")
            server.stop()
        server.complete_archive()
        self.final = controldata(server.data_dir)["Latest checkpoint location"]
        self.segments = sorted(file.name for file in self.archive.iterdir() if len(file.name) == 24)

    def copy(self, data_dir, command, conf=""):
        """A directory that is to recover with a command; `ARCHIVE` and `DIR` in it stand for directories."""
        command = command.replace("ARCHIVE", shlex.quote(str(self.archive))).replace("DIR", shlex.quote(str(data_dir)))
        server = PgCluster(recovery.copy_backup(self.backup, data_dir))
        server.configure("archive_mode = off\nrestore_command = '{}'\n{}".format(command.replace("'", "''"), conf),
                         "postgresql.auto.conf")
        (data_dir / "recovery.signal").touch()
        return server

    def check(self, server):
        """It has all that the primary had."""
        with server:
            server.start()
            assert server.value("SELECT pg_is_in_recovery()") == "f"
            assert server.psql("SELECT count(*), sum(id) FROM t") == self.expected


@pytest.fixture(scope="module")
def archived(tmp_path_factory):
    """One for all tests here."""
    return Archived(tmp_path_factory.mktemp("archived"))


def fetches(server):
    """What is left of what was fetched."""
    return list((server.data_dir / "pg_wal").glob("walrider.fetch.*"))




@pytest.mark.parametrize("target", [False, True])
def test_an_outage_is_not_the_end(archived, work, target):
    """The archive is gone from some segment on: nothing is promoted, and the same command goes on once it is back.

    It fails for all files then, also for those that it delivered before: that is what tells an outage.  An archive that
    lacks just the newest files cannot be told from one that ends there, and is not tried.
    """
    # No segment behind it is fetched before it.
    last = archived.segments[6]
    server = archived.copy(work / "ours", "echo %f >>asked; test -e down && test -e late && { echo 'no route' >&2; exit 3; }; "
                           f"test %f = {last} && touch late; cp ARCHIVE/%f %p 2>/dev/null")
    (server.data_dir / "down").touch()
    options = ["--promote", *(["--target-lsn", archived.final] if target else [])]
    result = walrider("replay", "-D", server.data_dir, "--fetch-jobs", "1", *options).expect(FAILED)
    assert "archive is out of reach" in result.stderr and "ended with exit code 3" in result.stderr
    assert "no route" in result.stderr, "what the command prints is shown"
    assert result.json["end_reason"] == "archive_out_of_reach" and result.json["promoted"] is None
    end = result.json["end_of_wal"]
    assert end["exit_code"] == 3 and end["file"] == archived.segments[7] and "asked" in end["command"], end
    control = controldata(server.data_dir)
    assert control["Database cluster state"] == "shut down in recovery"
    assert parse_lsn(result.json["end_lsn"]) > parse_lsn(control["Latest checkpoint's REDO location"])
    assert not list((server.data_dir / "pg_wal").glob("*.history")) and not fetches(server)
    (server.data_dir / "down").unlink()
    result = walrider("replay", "-D", server.data_dir, *options).expect()
    assert result.json["promoted"]["timeline"] == 2
    assert result.json["promoted"]["switch_lsn"] == result.json["end_lsn"]
    assert parse_lsn(result.json["end_lsn"]) > parse_lsn(archived.final)
    archived.check(server)


def test_the_true_end(archived, work):
    """The command and its exit code are told, each segment is asked for once, and nothing is left behind."""
    missing = archived.segments[-1]
    server = archived.copy(work / "ours", f"echo %f >>asked; test %f != {missing} && cp ARCHIVE/%f %p 2>/dev/null")
    result = walrider("replay", "-D", server.data_dir, "--promote").expect()
    assert result.json["end_of_wal"]["file"] == missing
    assert result.json["end_of_wal"]["exit_code"] == 1 and f"for WAL file \"{missing}\" ended with exit code 1" in \
        result.json["end_of_wal"]["why"]
    assert result.json["segments_fetched"] >= len(archived.segments) - 2
    asked = (server.data_dir / "asked").read_text().split()
    again = {name for name in asked if asked.count(name) > 1}
    # At the end: whether the archive still has no more, and still delivers; and the last segment goes into the new timeline.
    assert missing in again and len(again - {missing, "00000002.history"}) <= 2, again
    assert len([name for name in set(asked) if len(name) == 24 and name > missing]) <= 8
    assert not fetches(server)
    archived.check(server)


def test_a_command_that_delivers_nothing(archived, work):
    """What pg_wal has is replayed; but that WAL ends there is not proven, and so nothing is promoted."""
    server = archived.copy(work / "ours", "exit 2")
    for name in archived.segments:
        (server.data_dir / "pg_wal" / name).write_bytes((archived.archive / name).read_bytes())
    result = walrider("replay", "-D", server.data_dir, "--promote").expect(FAILED)
    assert "delivers nothing at all" in result.stderr and "--wal" in result.stderr
    walrider("replay", "-D", server.data_dir).expect()
    result = walrider("replay", "-D", server.data_dir, "--promote", "--wal", server.data_dir / "pg_wal").expect()
    assert result.json["promoted"]
    archived.check(server)


def test_many_at_once(archived, work):
    """As many commands run at once as --fetch-jobs says, ahead of replay, and no more."""
    server = archived.copy(work / "ours", "echo b %f >>log; sleep 0.05; cp ARCHIVE/%f %p 2>/dev/null; code=$?; "
                           "echo e %f >>log; exit $code")
    result = walrider("replay", "-D", server.data_dir, "--fetch-jobs", "4", "-j", "2").expect()
    running, most = set(), 0
    for line in (server.data_dir / "log").read_text().splitlines():
        what, name = line.split()
        running = running | {name} if what == "b" else running - {name}
        most = max(most, len(running))
    assert most == 4 == result.json["fetch_jobs"], most
    # What is asked for past the end of the archive is given up when replay ends, and nothing of it is left.
    assert all(name > archived.segments[-1] for name in running) and not fetches(server), running
    assert result.json["fetch_wait_seconds"] > 0 and result.json["fetch_seconds"] > 0.05 * len(archived.segments) * 0.5
