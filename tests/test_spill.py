"""Batches larger than memory: the same pages, each visited once; and what does not fit on the disk.

Not tried: terabytes; a disk that is lost while the temporary file is on it.
"""

import pytest

from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.walrider import replay


@pytest.mark.every_major
@pytest.mark.parametrize("memory", ["16MB", "1GB"])
def test_the_same_pages(variant, work, memory):
    """Of every load, with each batch as large as it can be."""
    ours = variant.copy(work / "ours")
    result = replay(ours, variant.archive, "--memory", memory, "--spill-always").expect()
    recovery.pin_tablespaces(ours)
    compare(ours, variant.stock)
    assert result.json["sweeps"] > 0 and (result.json["spilled_bytes"] > 0) == (memory == "16MB"), result.json
