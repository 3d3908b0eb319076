"""`walrider bench`: runs on servers of its own and on given ones, what is measured, and what is left behind: nothing.

Not tried: servers before 17 (15 was, by hand), processes on another machine, pgaudit, disks that are full.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.lab import install
from tests.lab.standby import standby
from tests.lab.standby.standby import Walrider, wait_streaming
from tests.lab.standby.watched import hot, primary_of
from tests.lab.waiting import wait_for
from tests.lab.walrider import start, walrider

USAGE, REFUSED = 2, 1


@pytest.fixture
def primary(primary_template, work):
    """A primary whose commits wait for no standby."""
    with primary_of(primary_template, work) as server:
        yield server


class Bench:
    """One experiment: its file of results, and the directory that its servers are in."""

    def __init__(self, work, *options):
        self.output, self.servers = work / "results.jsonl", work / "servers"
        self.servers.mkdir(exist_ok=True)
        self.options = ["bench", "-o", self.output, "--bindir", install.bindir(), "--clients", "2", "--repeats", "1",
                        "--timeout", "60s", *options]

    def run(self, *more):
        """To its end; what --json prints is in `json`."""
        return walrider(*self.options, "--json", *more, timeout=120)

    def start(self, *more):
        """Without waiting."""
        return start(*self.options, *more)

    def lines(self):
        """What the file has: the header, and runs."""
        text = self.output.read_text() if self.output.exists() else ""
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def running(self):
        """Processes of its servers."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.servers) in (process / "cmdline").read_text(errors="replace"):
                    found.append(process.name)
            except OSError:
                pass
        return found

    def left_nothing(self):
        """Neither a process nor a file of a server."""
        return not self.running() and not list(self.servers.iterdir())


def own(work, *options):
    """On servers of its own, which do not wait for the disk."""
    return Bench(work, "--set", "fsync=off", "--work-dir", work / "servers", *options)


def test_a_matrix_interrupted_and_gone_on_with(work):
    """SIGINT in the middle of a run leaves nothing behind, and what was done is not done again."""
    bench = own(work, "--time", "2s", "--vary", "hot_standby=on,off", "--vary", "standby=stock,walrider")
    process = bench.start()
    wait_for(lambda: len(bench.lines()) == 2 and len(bench.running()) == 2, lambda: f"the second run: {bench.lines()}")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == REFUSED and "interrupted: --resume goes on" in said, said
    assert bench.left_nothing(), bench.running()
    before = bench.output.read_text()
    assert before.count("\n") == 2

    refused = bench.run()
    assert refused.code == REFUSED and "is there already: --resume goes on with it" in refused.stderr, refused.stderr
    other = bench.run("--resume", "--set", "commit_delay=1")
    assert other.code == REFUSED and "of another experiment: settings" in other.stderr, other.stderr
    assert bench.output.read_text() == before

    bench.output.write_text(before + '{"run":2,"repea')
    done = bench.run("--resume").expect()
    assert bench.output.read_text().startswith(before) and bench.left_nothing()
    _, *runs = bench.lines()
    assert sorted(run["run"] for run in runs) == [1, 2, 3, 4]
    seen = {(run["settings"]["hot_standby"], run["settings"]["standby"]) for run in runs}
    assert seen == {("on", "stock"), ("off", "stock"), ("on", "walrider"), ("off", "walrider")}
    for run in runs:
        measured = run["outcome"]
        assert measured["operations"] % 500 == 0 and measured["operations"] > 0, run
        assert 2 <= measured["load_seconds"] < 10, run
        # A row has a header, four values and an entry in the index: 64 characters are the largest part.
        assert 150 < measured["wal_bytes"] / measured["operations"] < 1500, run
        for key in ("primary_cpu_seconds", "standby_cpu_seconds", "replay_busy_seconds"):
            assert 0 < measured[key] < 2 * 60 * (os.cpu_count() or 1), (key, run)
        # Those that receive are not those that replay.
        assert measured["replay_busy_seconds"] < measured["standby_cpu_seconds"], run
        assert 0 < measured["catch_up_seconds"] < 60 and measured["lag_bytes"] is not None, run
    figures = {figure["key"]: figure["effects"] for figure in done.json["figures"]}
    assert len(figures) == 8 and done.json["succeeded"] == 4 and done.json["failed"] == []
    speed = figures["replay_bytes_per_busy_second"]
    assert speed["degrees_of_freedom"] == 0 and [factor["factor"] for factor in speed["factors"]] == ["hot_standby", "standby"]
    # By hand: the ratio of the geometric means of two runs each.
    rates = {key: run["outcome"]["wal_bytes"] / run["outcome"]["replay_busy_seconds"] for run in runs
             for key in [(run["settings"]["hot_standby"], run["settings"]["standby"])]}
    expected = (rates["on", "walrider"] * rates["off", "walrider"] / rates["on", "stock"] / rates["off", "stock"]) ** 0.5
    assert speed["factors"][1]["levels"][1]["ratio"] == pytest.approx(expected)
    assert "<svg" in bench.output.with_suffix(".html").read_text()


def test_two_majors(work):
    """Servers of two majors, each with its own programs: each run says which it was."""
    majors = [install.bindir(major) for major in install.MAJORS]
    bench = own(work, "--time", "1s", "--vary", f"bindir={majors[0]},{majors[1]}", "--set", "data_checksums=on")
    bench.run().expect()
    found = {run["settings"]["bindir"]: run["outcome"]["server_version"] // 10000 for run in bench.lines()[1:]}
    assert found == {str(path): int(major) for path, major in zip(majors, install.MAJORS)}
    assert bench.left_nothing()


def test_a_level_that_fails(work):
    """No standby follows a primary with wal_level = minimal: it is recorded with the server's words, and the other run is made."""
    bench = own(work, "--time", "1s", "--vary", "wal_level=replica,minimal", "--set", "standby=stock")
    said = walrider(*bench.options, timeout=120)
    assert said.code == REFUSED and "1 of 2 runs, 1 failed" in said.stdout and "minimal" in said.stderr, said.stdout
    failed, = [run for run in bench.lines()[1:] if run["failed"]]
    assert failed["settings"]["wal_level"] == "minimal" and failed["outcome"] is None
    assert "the primary has ended" in failed["failed"]["message"]
    assert any('WAL streaming' in line and 'requires "wal_level"' in line.replace("wal_level ", '"wal_level" ')
               for line in failed["failed"]["log"]), failed
    assert "requires" in bench.output.with_suffix(".html").read_text() and "requires" in said.stdout
    assert bench.left_nothing()
    again = bench.run("--resume")
    assert again.code == REFUSED and "1 of 2 runs to do" in again.stderr
    assert [bool(run["failed"]) for run in bench.lines()[1:]].count(True) == 2


def test_pgbench_and_scripts(work):
    """pgbench's own load, without a standby, whose figures are not known then; a script with tables of its own."""
    bench = own(work, "--time", "1s", "--load", "pgbench", "--scale", "1", "--set", "standby=none", "--set", "data_checksums=off")
    done = bench.run().expect()
    measured = bench.lines()[1]["outcome"]
    assert measured["operations"] > 10 and measured["wal_bytes"] > 10_000, measured
    assert measured["catch_up_seconds"] is measured["lag_bytes"] is measured["standby_cpu_seconds"] is None
    assert "replay_bytes_per_busy_second" not in {figure["key"] for figure in done.json["figures"]}

    (work / "init.sql").write_text("CREATE TABLE mine (n int);\n")
    (work / "script.sql").write_text("INSERT INTO mine VALUES (:client_id);\n")
    bench.output.unlink()
    bench = own(work, "--time", "1s", "--load", f"script={work / 'script.sql'}", "--init", work / "init.sql",
                "--vary", "synchronous_commit=off,remote_apply")
    bench.run().expect()
    done = {run["settings"]["synchronous_commit"]: run["outcome"]["operations"] for run in bench.lines()[1:]}
    # Commits that wait for a standby are fewer by far.
    assert 0 < done["remote_apply"] < done["off"], done
    (work / "script.sql").write_text("INSERT INTO nosuch VALUES (1);\n")
    bench.output.unlink()
    assert bench.run().code == REFUSED
    assert any('"nosuch" does not exist' in line for run in bench.lines()[1:] for line in run["failed"]["log"]), bench.lines()
    assert bench.left_nothing()


def auto_conf(server):
    """What ALTER SYSTEM has set; in which order is of no meaning where nothing is there twice."""
    return sorted((server.data_dir / "postgresql.auto.conf").read_text().splitlines())


def test_given_servers(primary, work):
    """Settings are changed only if that was allowed, and put back, also after an interrupt; the load's tables are dropped."""
    primary.psql("ALTER SYSTEM SET wal_compression = 'pglz'")
    primary.psql("SELECT pg_reload_conf()")
    with hot(primary, work) as follower:
        servers = [primary, follower.server]
        before = [auto_conf(server) for server in servers]
        given = "--primary", primary.dsn(), "--standby", follower.server.dsn()

        bench = Bench(work, *given, "--time", "1s", "--vary", "wal_compression=off,pglz", "--vary", "wal_writer_delay=10ms,200ms")
        refused = bench.run()
        assert refused.code == USAGE and "--change-settings" in refused.stderr, refused.stderr
        for name, why in [("wal_buffers=1MB,2MB", "restarted"), ("standby=stock,none", "no setting that"), ("nosuch=1,2", "does not know")]:
            refused = Bench(work, *given, "--vary", name, "--change-settings").run()
            assert refused.code == REFUSED and why in refused.stderr, refused.stderr
        assert not bench.output.exists() and [auto_conf(server) for server in servers] == before

        done = bench.run("--change-settings").expect()
        assert "wal_compression is changed by ALTER SYSTEM; it was set to 'pglz'" in done.stderr, done.stderr
        runs = bench.lines()[1:]
        assert len(runs) == 4 and all(run["outcome"]["replay_busy_seconds"] > 0 for run in runs), runs
        assert [auto_conf(server) for server in servers] == before
        assert primary.value("SHOW wal_compression") == "pglz" and primary.value("SHOW wal_writer_delay") == "200ms"
        assert primary.value("SELECT count(*) FROM pg_namespace WHERE nspname = 'walrider_bench'") == "0"

        bench.output.unlink()
        bench = Bench(work, *given, "--time", "30s", "--vary", "commit_delay=1,2", "--change-settings")
        process = bench.start()
        wait_for(lambda: all("commit_delay" in "".join(auto_conf(server)) for server in servers) and primary.value("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'INSERT%'") == "2", "the load")
        process.terminate()
        said = process.communicate(timeout=20)[1]
        assert process.returncode == REFUSED and "interrupted" in said, said
        assert [auto_conf(server) for server in servers] == before
        assert primary.value("SELECT count(*) FROM pg_namespace WHERE nspname = 'walrider_bench'") == "0"


def test_a_given_walrider(primary, work):
    """Only measured: nothing is varied, and the standby is a Walrider, by its HTTP."""
    with Walrider(standby.clone(primary, work / "standby")).start() as follower:
        wait_streaming(primary)
        bench = Bench(work, "--primary", primary.dsn(), "--standby", f"http://127.0.0.1:{follower.port}", "--time", "1s")
        done = bench.run().expect()
        measured = bench.lines()[1]["outcome"]
        assert measured["replay_busy_seconds"] > 0 and measured["catch_up_seconds"] > 0 and measured["lag_bytes"] is not None
        assert all(figure["effects"]["factors"] == [] for figure in done.json["figures"])


def test_a_fraction_is_that_of_the_seed(work):
    """Which combinations are tried depends on the seed alone, also when it is that of the file. No server is made: there is no initdb."""
    def tried(*options):
        bench = Bench(work, "--vary", "a=1,2,3", "--vary", "b=1,2,3,4", "--fraction", "1/2", "--set", f"bindir={work}", *options)
        said = bench.run()
        assert said.code == REFUSED and "6 of 12 combinations, chosen at random" in said.stderr, said.stderr
        return {(run["settings"]["a"], run["settings"]["b"]) for run in bench.lines()[1:]}

    seen = {}
    for seed in ("1", "2", "3"):
        seen[seed] = tried("--seed", seed)
        assert len(seen[seed]) == 6 and tried("--resume") == seen[seed]
        (work / "results.jsonl").unlink()
    assert seen["1"] != seen["2"] or seen["1"] != seen["3"]


def test_what_is_wrong_is_said(work):
    """Before anything is made."""
    for options, code, said in [
            (["--vary", "a=1,2", "--vary", "a=3"], USAGE, "a is named twice"),
            (["--vary", "standby=stock,ours"], USAGE, "not \"ours\""),
            (["--fraction", "2"], USAGE, "expected a fraction as in 1/2"),
            (["--vary", "a=1,2", "--vary", "b=1,2", "--fraction", "1/2"], USAGE, "cannot tell 2 factors apart"),
            (["--load", "script=/nosuch"], USAGE, "could not open \"/nosuch\""),
            (["--load", "other"], USAGE, "tables, pgbench or script=FILE"),
            (["--time", "500ms"], USAGE, "--time must be at least 1s"),
            (["--resume"], REFUSED, "could not open"),
            (["--report", work / "results.jsonl"], USAGE, "the same file"),
            (["--primary", "host=/nosuch user=x"], REFUSED, "connection to server")]:
        result = Bench(work, *options).run()
        assert result.code == code and said in result.stderr, (options, result.stderr)
        assert not (work / "results.jsonl").exists()
