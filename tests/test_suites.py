"""PostgreSQL's own regression and isolation tests as load, in the first of the variants of tests.suites."""

from dataclasses import replace

from tests.suites import run
from tests.suites.variants import LITTLE, VARIANTS


def test_default_variant(work):
    """Every resource manager, as PostgreSQL's developers exercise it; `make test-suites` has more."""
    result = run.prove(replace(VARIANTS["default"], replays=(LITTLE,)), work)
    assert result["images_verified"] > 1_000_000
