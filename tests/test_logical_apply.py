"""`walrider logical apply`: what it applies is what the publisher has, whatever happens in between."""

import pytest

from tests.lab.logical import load
from tests.lab.logical.apply import Apply, assert_equal, make_publisher, make_target, publish
from tests.lab.server.cluster import PgCluster, copy_tree


@pytest.fixture(scope="module")
def templates(scratch):
    """A publisher with a slot and a target, stopped, both with the tables of the load."""
    publisher, target = make_publisher(scratch / "publisher"), make_target(scratch / "target")
    with publisher.start(), target.start():
        publisher.psql(load.PUBLISHER)
        target.psql(load.TARGET)
        publish(publisher)
        publisher.stop()
        target.stop()
    return publisher.data_dir, target.data_dir


@pytest.fixture
def pair(templates, work):
    """Both, running; they end with the test."""
    made = [PgCluster(copy_tree(data_dir, work / data_dir.name)) for data_dir in templates]
    with made[0].start(), made[1].start():
        yield made


@pytest.mark.every_major
def test_random_load(pair, work, rng):
    """All kinds of changes, of sessions side by side; both sides have the same rows in the end, and the transactions went through
    several sessions of the target."""
    publisher, target = pair
    with Apply(work, publisher, target).start() as apply:
        pgbench = load.run(publisher, work, rng, transactions=500)
        out = pgbench.communicate(timeout=120)
        assert pgbench.returncode == 0, out
        apply.wait_caught_up()
        status = apply.status()
        print(status)
        apply.stop()
    assert_equal(publisher, target, load.TABLES)
    assert status["transactions"] > 1000 and not any(status["conflicts"].values()), status
