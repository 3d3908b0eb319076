"""The benchmark, small; `make bench-smoke` has all loads."""

import json

from bench import replay


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
