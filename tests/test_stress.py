"""Random work on every kind of index, with crashes of the primary: rounds as many as WALRIDER_STRESS_SECONDS allows.

WALRIDER_STRESS_ONLY=btree,gin confines it to some access methods, WALRIDER_STRESS_ROUND_SECONDS is the load of one round.
"""

import os

from tests.harness import stress
from tests.harness.stress_tables import METHODS

SECONDS = int(os.environ.get("WALRIDER_STRESS_SECONDS", "110"))
ROUND_SECONDS = int(os.environ.get("WALRIDER_STRESS_ROUND_SECONDS", "20"))
ONLY = tuple(os.environ.get("WALRIDER_STRESS_ONLY", ",".join(METHODS)).split(","))


def test_stress(tmp_path, rng):
    """Each round: equal to stock's replay, and PostgreSQL goes on with it; together they made every kind of change."""
    _, missing = stress.run_rounds(tmp_path, rng.randrange(10**6), SECONDS, ROUND_SECONDS, ONLY)
    assert missing == []
