"""The benchmark, small; `make bench-smoke` has all loads."""

import json

from bench import replay, sync
from tests.harness.bank import LEVELS


def test_smoke(tmp_path, capsys):
    """The figures mean nothing here, but all of them are there, and the pages are equal."""
    saved = tmp_path / "runs"
    saved.mkdir()
    loads = ["btree", "bigger"]
    replay.main(["--smoke", "--loads", *loads, "--fixtures", str(tmp_path / "fixtures"), "--save", str(saved)])
    said = capsys.readouterr().out
    result = json.loads(next(saved.iterdir()).read_text())
    assert list(result["loads"]) == loads
    for name, found in result["loads"].items():
        assert said.count(f"\n{name}: --jobs") == 2, said
        assert set(found["runs"]) == {"stock", "stock-durable", "walrider-1", "walrider-2"}
        assert found["summary"]["records"] > 0 and found["summary"]["ratios"]["redo"]["ratio"] > 0


def test_sync_smoke(tmp_path, capsys):
    """Every side has its figures at every level that it knows."""
    sync.main(["--smoke", "--save", str(tmp_path)])
    result = json.loads(next(tmp_path.iterdir()).read_text())
    seen = {(run["side"], run["level"]) for run in result["runs"] if run["condition"] == "0/0/0"}
    assert seen == {(side, level) for side in sync.SIDES for level in LEVELS} - {("pg_receivewal", "remote_apply")}
    for run in result["runs"]:
        assert run["commits"] > 0 and 0 < run["p50_ms"] <= run["p99_ms"], run
    slow = [run for run in result["runs"] if run["condition"] == "1/3/3" and run["level"] == "on"]
    assert len(slow) == 3 and all(run["p50_ms"] > 3 for run in slow), slow
    assert "pg_receivewal" in capsys.readouterr().out
