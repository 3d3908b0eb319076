"""The benchmark, small; `make bench-smoke` has all loads."""

import json

from bench import early, logical, relay, replay, sync, volume
from tests.lab.loads.bank import LEVELS, PROMISING


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


def test_early_smoke(tmp_path, capsys):
    """The early side is told at every level, of both loads; what its sender counted adds up."""
    early.main(["--smoke", "--conditions", "4/3", "--sides", "early", "--save", str(tmp_path)])
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert {(run["load"], run["level"]) for run in result["runs"]} == {(load, level) for load in early.CLIENTS for level in PROMISING}
    for run in result["runs"]:
        sender = run["sender"]
        assert run["commits"] > 0 and run["p50_ms"] > 3 and run["primary_ms_per_commit"] > 0 and run["fsyncs_per_mb"] > 0, run
        assert 0 < sender["early_bytes"] <= sender["sent_bytes"] == sender["buffers_bytes"] + sender["disk_bytes"], run
        if run["load"] == "large":
            assert 34_000 < run["wal_bytes_per_commit"] < 38_000, run
    assert "early" in capsys.readouterr().out and next(tmp_path.glob("*.txt")).read_text().count("large") == 6


def test_logical_smoke(tmp_path, capsys):
    """Both plugins send the same where all is published; ours nothing where nothing is; the sizes are those of the protocol.

    What a commit waits is looked at for being there alone."""
    result = logical.main(["--smoke", "--save", str(tmp_path)])
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["sent"] == result["sent"]
    assert len(result["sent"]) == 2 * len(logical.KINDS) * len(logical.SHARES)
    for sent in result["sent"]:
        stock, ours = sent["pgoutput"], sent["ours"]
        assert stock["begin_and_commit_bytes"] == 97, sent
        if sent["kind"] == "plain" or sent["share"] == 0:
            assert (ours["messages"], ours["bytes"]) == (stock["messages"], stock["bytes"]), sent
        else:
            assert ours["bytes"] < stock["bytes"] and ours["messages"] < stock["messages"], sent
        if sent["share"] == 100:
            assert ours["messages"] == 0 and ours["keepalives"] >= (sent["transactions"] if sent["synchronous"] else 0), sent
        if sent["kind"] == "plain":
            assert sent["before_15_bytes"] - stock["bytes"] == 97 * sent["transactions"] * sent["share"] // 100, sent
    assert {(run["kind"], run["plugin"]) for run in result["latency"]} == {(kind, name) for kind in logical.KINDS for name in logical.PLUGINS}
    assert all(run["transactions"] > 0 for run in result["latency"])
    assert "pgoutput" in capsys.readouterr().out


def test_relay_smoke(tmp_path, capsys):
    """Both send all of it on, in every part and to each number of downstreams; senders take a part of all."""
    result = relay.main(["--smoke", "--loads", "bulk", "--save", str(tmp_path)])
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["runs"] == result["runs"]
    seen = {(run["part"], run["downstreams"], run["contender"]) for run in result["runs"]}
    assert seen == {(part, count, name) for part in relay.PARTS for count in (1, 2) for name in ("relay", "stock")} | {("latency", 1, "direct")}
    for run in result["runs"]:
        if run["part"] == "latency":
            assert run["samples"] > 10 and run["p50_us"] <= run["p95_us"] <= run["p99_us"], run
        elif run["part"] != "stalled" or run["downstreams"] > 1:
            assert run["own_mb"] > 0 and run["senders_s_per_gb"] > 0, run
    assert "relay/stock" in capsys.readouterr().out and "downstreams  relay" in next(tmp_path.glob("*.txt")).read_text()


def test_volume_smoke(tmp_path, capsys):
    """Without a device nothing is limited, but both sides recover to the same pages; what is stopped tells how far it came."""
    given = ["--smoke", "--images", "off", "--sides", *volume.SIDES, "--fixtures", str(tmp_path / "fixtures"), "--save", str(tmp_path)]
    result = volume.main(given)
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["runs"] == result["runs"]
    assert [(run["side"], run["finished"]) for run in result["runs"]] == [(side, True) for side in volume.SIDES]
    assert all(run["compared_pages"] > 0 and run["records"] > 0 for run in result["runs"] if run["side"] == "replay")
    assert "replay" in next(tmp_path.glob("*.txt")).read_text() and "pages of replay are those of PostgreSQL" in capsys.readouterr().out
    stopped = volume.main([*given, "--limit", "0"])["runs"]
    assert all(not run["finished"] and 0 <= run["share"] < 1 for run in stopped), stopped
