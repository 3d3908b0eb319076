"""Whether two directories hold the same, under PostgreSQL's masks: `walrider compare`."""

import json
from pathlib import Path

from tests.lab.walrider import DONE, walrider


def compare(ours, theirs, *args):
    """`walrider compare`; raises with the first differences."""
    result = walrider("compare", Path(ours), Path(theirs), *args)
    if result.code != DONE:
        raise AssertionError(f"{ours} and {theirs} differ\n{json.dumps(result.json, indent=1)[:4000]}\n{result.stderr}")
    assert result.json["pages"] > 0 and result.json["differences"] == 0, result.json
    return result.json
