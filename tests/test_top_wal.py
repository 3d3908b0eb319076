"""`walrider top --wal`: what WAL is made of, by pg_walinspect, and what is said where that cannot be had."""

import json

import pytest

from tests.lab.standby.watched import load, primary_of
from tests.lab.walrider import walrider


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    # What was looked at is looked at once more.
    with primary_of(primary_template, work, "wal_keep_size = 1GB\n") as server:
        yield server


def top(dsn, *args, interval="500ms"):
    """The second view: the first had something to look at for the first time."""
    done = walrider("top", "--batch", "--json", "-n", 2, "-i", interval, *args, dsn, timeout=60).expect()
    return json.loads(done.stdout.splitlines()[-1])["view"]


def test_what_wal_is_made_of(primary):
    """Inserts into one table, and full-page images after a checkpoint: as pg_walinspect itself says of the same stretch."""
    primary.psql("CREATE EXTENSION pg_walinspect")
    primary.psql("CREATE TABLE pages AS SELECT i, repeat('x', 500) FROM generate_series(1, 5000) i")
    with load(primary, "CHECKPOINT; UPDATE pages SET i = i WHERE i % 50 = 0; INSERT INTO t SELECT i, 'v' FROM generate_series(1, 200) i"):
        wal = top(primary.dsn(), "--wal", interval="4s")["wal"]
    assert wal["unseen"] is None and wal["bytes"] > 0 and wal["image_bytes"] > 0, wal
    names = [kind["name"] for kind in wal["kinds"]]
    assert "Heap/INSERT" in names and any("UPDATE" in name for name in names), names
    assert [kind["bytes"] for kind in wal["kinds"]] == sorted((kind["bytes"] for kind in wal["kinds"]), reverse=True)
    told = primary.json(f"""SELECT jsonb_agg(k) FROM (SELECT "resource_manager/record_type" AS name, count AS records,
        combined_size AS bytes, fpi_size AS image_bytes FROM pg_get_wal_stats('{wal["from"]}', '{wal["to"]}', true)) k""")
    assert all(kind in told for kind in wal["kinds"]), (wal["kinds"], told)
    assert wal["bytes"] == sum(kind["bytes"] for kind in told)
    relations = {at["name"]: at["bytes"] for at in wal["relations"]}
    assert relations.keys() >= {"public.pages", "public.t"}, relations
    assert sum(relations.values()) <= wal["block_bytes"]


def test_as_text(primary):
    """In two lines under the primary's."""
    primary.psql("CREATE EXTENSION pg_walinspect")
    with load(primary):
        said = walrider("top", "--batch", "-n", 3, "-i", "500ms", "--wal", primary.dsn(), timeout=60).expect().stdout
    last = said.split("\n\n")[-2]
    assert " of WAL: full-page images " in last and "Heap/INSERT " in last and "public.t " in last, said


def test_what_is_missing_is_said(primary):
    """No extension, or no right: what to do; and without --wal nobody asks."""
    note = lambda view: [words for words in view["notes"] if "WAL is made of" in words]
    with load(primary):
        view = top(primary.dsn(), "--wal")
        assert view["wal"] is None and "CREATE EXTENSION pg_walinspect" in note(view)[0], view
        view = top(primary.dsn())
        assert view["wal"] is None and note(view) == [], view
        primary.psql("CREATE EXTENSION pg_walinspect; CREATE ROLE watcher LOGIN; GRANT pg_monitor TO watcher")
        watcher = primary.dsn().replace("user=postgres", "user=watcher")
        (said,) = note(top(watcher, "--wal"))
        command = said[said.index("GRANT"):said.index(" would")].replace("this user", "watcher")
        primary.psql(command)
        view = top(watcher, "--wal")
        assert note(view) == [] and view["wal"]["bytes"] > 0, view


def test_an_answer_that_takes_too_long(primary):
    """The server ends the question after 5 s; that is said, and the session goes on."""
    primary.psql("""CREATE EXTENSION pg_walinspect;
        ALTER EXTENSION pg_walinspect DROP FUNCTION pg_get_wal_stats;
        DROP FUNCTION pg_get_wal_stats;
        CREATE FUNCTION pg_get_wal_stats(pg_lsn, pg_lsn, boolean, OUT "resource_manager/record_type" text, OUT count bigint,
            OUT combined_size bigint, OUT fpi_size bigint) RETURNS SETOF record LANGUAGE sql AS 'SELECT $$x$$, 1, 1, 1 FROM pg_sleep(60)'""")
    with load(primary):
        done = walrider("top", "--batch", "--json", "-n", 8, "-i", "2s", "--wal", primary.dsn(), timeout=60).expect()
    views = [json.loads(line)["view"] for line in done.stdout.splitlines()]
    assert any("statement timeout" in words for words in views[-1]["notes"]), views[-1]
    assert not any("timeout expired" in words for view in views for words in view["notes"]), views
    assert views[-1]["wal_rate"] > 0, views[-1]


def test_names_of_a_database_in_latin1(primary):
    """A relation's name comes as UTF-8, whatever the database keeps it in."""
    primary.psql("CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C'")
    utf8 = "-c client_encoding=UTF8"
    primary.psql("CREATE EXTENSION pg_walinspect; CREATE TABLE größe (i int, v text)", "latin", utf8)
    with primary.session("latin", utf8) as session:
        session.send("""DO $$ BEGIN FOR i IN 1..40 LOOP
            INSERT INTO größe VALUES (i, repeat('x', 500)); COMMIT; PERFORM pg_sleep(0.05); END LOOP; END $$""")
        wal = top(primary.dsn("latin"), "--wal", interval="1s")["wal"]
        session.wait()
    assert 'public."größe"' in [at["name"] for at in wal["relations"]], wal
