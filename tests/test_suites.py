"""PostgreSQL's own regression and isolation tests as load, in the first of the variants of tests.suites."""

from dataclasses import replace

from tests.lab import install
from tests.suites import run
from tests.suites.variants import LITTLE, VARIANTS


def test_default_variant(work):
    """Every resource manager, as PostgreSQL's developers exercise it; `make test-suites` has more.

    With images compressed: else their WAL takes 11 GB of the disk, while other tests need as much.
    """
    result = run.prove(replace(VARIANTS["default"], replays=(LITTLE,), compression=install.compressions()[-1]), work)
    assert result["images_verified"] > 1_000_000
