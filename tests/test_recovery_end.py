"""Who ends recovery, `walrider replay` or PostgreSQL, and what PostgreSQL replays again when it starts."""

import re

import pytest

from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, controldata, copy_tree, parse_lsn, run
from tests.lab.walrider import FAILED, USAGE, binary, walrider

CONF = "autovacuum = off\ncheckpoint_timeout = 1h\nmax_wal_size = 1GB\n"


class Primary:
    """A backup, WAL with a restore point in it and no checkpoint behind, and the directory of the crash."""

    def __init__(self, directory):
        self.archive = directory / "archive"
        with PgCluster.init(directory / "primary", self.archive, wal_segsize_mb=1, conf=CONF) as server:
            server.start()
            server.psql("CREATE TABLE t (id int PRIMARY KEY, note text)")
            self.backup = server.basebackup(directory / "backup")
            server.psql("INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series(1, 10000) n")
            server.psql("SELECT pg_create_restore_point('here')")
            server.switch_wal()
            server.psql("INSERT INTO t VALUES (-1, 'behind the restore point')")
            server.stop("immediate")
            self.crashed = copy_tree(server.data_dir, directory / "crashed")
            server.start()
            server.stop()
            server.complete_archive()
        self.shut_down = controldata(server.data_dir)["Latest checkpoint location"]

    def prepared(self, data_dir, **settings):
        """A copy of the backup, its recovery configured as a restore tool does it."""
        return recovery.prepare(self.backup, self.archive, data_dir, **settings)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """One primary for all tests here."""
    return Primary(tmp_path_factory.mktemp("ends"))


def replay_configured(server, *options):
    """`walrider replay` with nothing but what the configuration says."""
    return walrider("replay", "-D", server.data_dir, *options)


def rows(server):
    """What table t has: rows, and the one from behind the restore point."""
    return server.psql("SELECT count(*), count(*) FILTER (WHERE id = -1) FROM t")[0]


def starts(server):
    """Start PostgreSQL; where its redo began, `None` if it had nothing to redo."""
    server.start(fsync="off")
    found = server.log_matches(r"redo starts at ([0-9A-F/]+)")
    return found[-1] if found else None


def test_the_configuration_promotes(origin, tmp_path):
    """With recovery_target_action = promote a server would end recovery at the target, and so do we: it opens at once."""
    server = origin.prepared(tmp_path / "data", target=("name", "here"), action="promote")
    result = replay_configured(server).expect()
    assert result.json["promoted"]["timeline"] == 2 and result.json["replayed_again_bytes"] == 0, result.json
    assert not (server.data_dir / "recovery.signal").exists()
    with server:
        assert starts(server) is None
        server.psql("INSERT INTO t VALUES (-2, 'first write')")
        assert rows(server) == ["10001", "0"]
    # Done again, there is nothing to do; and the target that is left in the configuration bothers nobody.
    assert replay_configured(server).json.get("promoted") is None


@pytest.mark.parametrize("action, options", [("pause", ()), ("shutdown", ()), (None, ()), ("promote", ("--no-promote",))])
def test_postgresql_ends_it(origin, tmp_path, action, options):
    """Else PostgreSQL goes on where it must, and we have said how much it replays again."""
    server = origin.prepared(tmp_path / "data", target=("name", "here"), action=action)
    result = replay_configured(server, *options).expect()
    assert result.json["promoted"] is None and (server.data_dir / "recovery.signal").exists()
    end, again = parse_lsn(result.json["end_lsn"]), result.json["replayed_again_bytes"]
    control = controldata(server.data_dir)
    assert again == end - parse_lsn(control["Latest checkpoint's REDO location"]) > 2_000_000
    if action == "shutdown":
        return
    with server:
        assert parse_lsn(starts(server)) == end - again
        assert rows(server) == ["10000", "0"]


def test_a_shutdown_checkpoint_is_the_target(origin, tmp_path):
    """PostgreSQL does not replay the shutdown checkpoint that it begins with: it never found the target that this was."""
    server = origin.prepared(tmp_path / "data", target=("lsn", origin.shut_down))
    replay_configured(server).expect()
    with server:
        starts(server)
        assert server.log_matches("recovery stopping after WAL location")
        assert rows(server) == ["10001", "1"]


def test_the_text_says_how_much(origin, tmp_path):
    """Who reads no JSON is told as well."""
    server = origin.prepared(tmp_path / "data", target=("name", "here"))
    command = [binary(), "replay", "-D", server.data_dir]
    assert re.search(r"PostgreSQL will replay [2-9]\.\d MB again", run(command).stdout)
    ended = run([*command, "--promote"]).stdout
    assert "Recovery has ended" in ended and "again" not in ended


def test_a_target_that_is_not_reached_promotes_nothing(origin, tmp_path):
    """The WAL ended before: something is missing, and a new timeline would cut it off for good."""
    server = origin.prepared(tmp_path / "data", target=("name", "nowhere"), action="promote")
    result = replay_configured(server).expect(FAILED)
    assert "before the configured recovery target was reached" in result.stderr
    assert (server.data_dir / "recovery.signal").exists()
    assert not list((server.data_dir / "pg_wal").glob("*.history"))


def test_crash_recovery_has_no_target(origin, tmp_path):
    """What an earlier recovery left in the configuration: a crashed primary goes to the end of its WAL, and stays what it is.

    We stopped at the old target, and PostgreSQL then went on to the end.
    """
    server = PgCluster(copy_tree(origin.crashed, tmp_path / "data"))
    server.configure(recovery.restore_settings(origin.archive, target=("name", "here"), action="promote"),
                     "postgresql.auto.conf")
    result = replay_configured(server).expect()
    assert result.json["end_reason"] == "end_of_wal" and result.json["promoted"] is None, result.json
    with server:
        starts(server)
        assert rows(server) == ["10001", "1"]
        assert server.controldata()["Latest checkpoint's TimeLineID"] == "1"


def test_usage(tmp_path):
    """Both at once make no sense."""
    assert walrider("replay", "-D", tmp_path, "--promote", "--no-promote").code == USAGE
