"""A little of everything about the standby, for the major that `make test` runs in part."""

import pytest

from tests.lab.loads.bank import Bank
from tests.lab.seed import seed
from tests.lab.standby import standby
from tests.lab.standby.standby import Walrider, wait_position, wait_streaming

pytestmark = pytest.mark.every_major


def test_follow_fail_over_and_back(primary, work):
    """Twice: transfers at all levels, the primary dies, promotion, audit; the old primary is rewound and is the next standby."""
    bank = Bank(seed(), tellers=4)
    bank.found(primary)
    directory = standby.clone(primary, work / "b")
    for _ in range(2):
        with Walrider(directory).start() as follower:
            wait_streaming(primary)
            bank.open(primary)
            bank.wait_acknowledged(200)
            primary.kill()
            bank.close()
            follower.promote()
            promoted = follower.serve()
        print(bank.audit(promoted))
        directory, primary = standby.rewind(primary.data_dir, promoted), promoted
    with Walrider(directory).start() as follower:
        wait_streaming(primary)
        primary.psql("CREATE TABLE last AS SELECT generate_series(1, 10000)")
        wait_position(primary)
        follower.stop()
        follower.start()
        wait_streaming(primary)
        wait_position(primary)
    primary.kill()
