"""Random work on every kind of index, with crashes of the primary: one round, or as many as WALRIDER_STRESS_SECONDS allows.

WALRIDER_STRESS_ONLY=btree,gin confines it to some access methods, WALRIDER_STRESS_ROUND_SECONDS is the load of one round.
"""

import os

import pytest

from tests.lab.loads import stress, stress_load
from tests.lab.loads.stress_tables import METHODS
from tests.lab.server.cluster import PgCluster, ServerError

SECONDS = int(os.environ.get("WALRIDER_STRESS_SECONDS", "0"))
ROUND_SECONDS = int(os.environ.get("WALRIDER_STRESS_ROUND_SECONDS", "20"))
ONLY = tuple(os.environ.get("WALRIDER_STRESS_ONLY", ",".join(METHODS)).split(","))


def test_stress(tmp_path, rng):
    """Each round: equal to stock's replay, and PostgreSQL goes on with it; together they made every kind of change."""
    _, missing = stress.run_rounds(tmp_path, rng.randrange(10**6), SECONDS, ROUND_SECONDS, ONLY)
    assert missing == []


def test_half_evacuated(work):
    """An evacuation of a BRIN page that a crash has ended: the stress knows the inserts that never end by it, and ends it."""
    page = 8192
    with PgCluster.init(work / "primary", checksums=False).start() as server:
        server.psql("""CREATE EXTENSION pageinspect;
            CREATE TABLE one (n int, filler text) WITH (fillfactor = 50);
            INSERT INTO one SELECT i, repeat('x', 1900) FROM generate_series(1, 20) i;
            CREATE INDEX one_n ON one USING brin (n) WITH (pages_per_range = 1);
            CREATE DATABASE other TEMPLATE postgres""")
        insert = "SET statement_timeout = '2s'; INSERT INTO one SELECT -n, '' FROM one"
        server.psql(insert)
        assert stress_load.half_evacuated(server) == []
        index = server.data_dir / server.value("SELECT pg_relation_filepath('one_n')")
        server.stop()
        with open(index, "r+b") as file:
            file.seek(2 * page + page - 4)      # behind the metapage and the range map
            assert file.read(4) == b"\0\0\x93\xf0"
            file.seek(-4, os.SEEK_CUR)
            file.write(b"\1")
        server.start()
        assert stress_load.half_evacuated(server) == [["one", "one_n"]]
        with pytest.raises(ServerError, match="canceling statement due to statement timeout"):
            server.psql(insert.replace("-n", "-2 * n"))
        assert stress_load.finish_evacuations(server) == [("postgres", "one_n")]
        assert stress_load.half_evacuated(server) == []
        server.psql(insert.replace("-n", "-2 * n"))
