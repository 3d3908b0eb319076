"""pgBackRest as an operator uses it: full backup, compressed asynchronous archive, restore, Walrider, first write.

What it does not try: a repository elsewhere (ssh, TLS, S3), encryption, incremental backups and tablespaces; archiving that fails.
"""

import os
import re
import time

import pytest

from tests.lab.server import tools
from tests.lab.server.pgbackrest import Repository
from tests.lab.standby import standby
from tests.lab.walrider import walrider

COMPRESSIONS = os.environ.get("WALRIDER_TOOLS_COMPRESSIONS", "zst").split(",")


@pytest.fixture(scope="module", params=COMPRESSIONS)
def repository(request, tmp_path_factory):
    """One repository for all tests here."""
    made = Repository(tmp_path_factory.mktemp("pgbackrest"), request.param)
    with made.server:
        yield made.fill()


def rows(server):
    """What table t has: rows, and the one from behind the target."""
    return server.psql("SELECT count(*), count(*) FILTER (WHERE id = -1) FROM t")[0]


@pytest.mark.parametrize("ahead", [False, True], ids=["fetched_by_us", "asynchronous_get"])
def test_time(repository, work, ahead):
    """Restored to a time with promote: Walrider needs nothing but what pgBackRest left, PostgreSQL opens without redo. Where
    pgBackRest fetches ahead itself, one command at a time is enough, and more get into each other's way."""
    server = repository.restored(work / "data", "--type=time", f"--target={repository.target}", "--target-action=promote",
                                 config=repository.ahead if ahead else None)
    left = (server.data_dir / "postgresql.auto.conf").read_text()
    assert re.search(r"^restore_command = '.*pgbackrest.* archive-get ", left, re.M), left
    stored = [file.name for file in (repository.directory / "repo/archive").glob("**/0*") if len(file.name) > 64]
    assert stored and all(file.endswith((".zst", ".lz4", ".gz")) for file in stored), stored
    done = walrider("replay", "-D", server.data_dir, *(["--fetch-jobs", "1"] if ahead else [])).expect()
    assert done.json["records"] > 20000, done.json
    with server:
        server.start(archive_mode="off")
        server.psql("INSERT INTO t VALUES (0, 'first write')")
        assert rows(server) == ["20001", "0"]
        assert not server.log_matches("redo starts at"), server.log_tail()


@pytest.mark.skipif(not tools.LONG, reason="make test-tools runs it")
def test_time_is_stocks(repository, work):
    """What PostgreSQL itself makes of the same restore has the same rows."""
    options = ("--type=time", f"--target={repository.target}", "--target-action=promote")
    contents = []
    for name in ("ours", "stock"):
        server = repository.restored(work / name, *options)
        begun = time.monotonic()
        if name == "ours":
            walrider("replay", "-D", server.data_dir).expect()
        with server:
            server.start(archive_mode="off")
            standby.wait_for(lambda: server.value("SELECT pg_is_in_recovery()") == "f", server.log_tail)
            server.psql("INSERT INTO t VALUES (0, 'first write')")
            print(f"{name}: command to first write {time.monotonic() - begun:.2f} s")
            contents.append(server.value("SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM t"))
    assert contents[0] == contents[1]


def test_standby(repository, work):
    """--type=standby, and `walrider standby` catches up from the archive, then streams from the primary."""
    server, primary = repository.restored(work / "data", "--type=standby"), repository.server
    with open(server.data_dir / "postgresql.auto.conf", "a") as conf:
        conf.write(f"primary_conninfo = '{standby.conninfo(primary.port)}'\n")
    with standby.Walrider(server.data_dir).start() as ours:
        standby.wait_streaming(primary)
        primary.psql("CREATE TABLE IF NOT EXISTS later (id int); INSERT INTO later VALUES (1)")
        standby.wait_position(primary)
        ours.promote()
        with ours.serve() as promoted:
            assert promoted.value("SELECT count(*) FROM later") == "1"
            assert rows(promoted) == ["20001", "1"]
