"""Fixtures shared by the end-to-end tests: loads, and the stock recovery that is their reference; and which tests run beside which."""

import fcntl
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import install
from tests.lab.loads import load, load_server
from tests.lab.seed import seed
from tests.lab.server import recovery, tools
from tests.lab.server.cluster import PgCluster, controldata, copy_tree
from tests.lab.standby import standby
from tests.lab.trash import throw_away
from tests.lab.walrider import binary

SEED = seed()
NEEDS_TLS = "test_standby_tls.py"
# What tests run on: all on the first, those of `every_major` on the others as well.  WALRIDER_TEST_MAJOR names the only one.
MAJORS = [chosen] if (chosen := os.environ.get("WALRIDER_TEST_MAJOR")) else sorted(install.MAJORS, reverse=True)
# With pytest-xdist, tests that share one of these, or in a file one of those, go to the same worker, which makes it once.
SHARED = ("plain", "mixed", "mixed_small", "passes")
SHARED_IN_FILE = ("origin", "clusters", "archived", "repository", "catalogue", "unpacked", "many", "backup")
# What takes longest begins first, so that no worker waits long for the last.
FIRST = ("test_suites.py", "test_early_crash.py", "test_standby_bank.py", "test_stress.py", "plain", "mixed", "mixed_small", "rest")
# What tests of power cuts need.
MEMORY_ROOM = 1 << 30
# Bytes of the disk without which a test is not begun: what fails for want of them says little of why. A whole run needs some 16 GB.
DISK_ROOM = 1 << 30
TURNS = "WALRIDER_TURNS"
# What a test cannot do without, where it is not fetched by us but the machine's own.
PROGRAMS = {"test_top_screen.py": "tmux", "test_top_browser.py": "chromium", "test_bench_browser.py": "chromium"}


@dataclass
class Fixture:
    """A load on disk and the directory stock PostgreSQL made of it."""

    directory: Path
    info: dict
    stock: Path = None

    @property
    def backup(self):
        return self.directory / "backup"

    @property
    def archive(self):
        return self.directory / "archive"

    def copy(self, data_dir, action=None):
        """A copy of the backup to recover, its tablespaces its own; `action`, what a server does at the target."""
        recovery.copy_backup(self.backup, data_dir)
        if action:
            PgCluster(data_dir).configure(f"recovery_target_action = '{action}'", "postgresql.auto.conf")
        self.point(data_dir)
        return data_dir

    def point(self, data_dir):
        """Make the WAL's tablespace locations those of this directory."""
        recovery.tablespace_links(self.directory, data_dir)

    def target(self, name):
        """One of the marked places."""
        return next(target for target in self.info["targets"] if target["name"] == name)

    def segments(self):
        """The archived segments in order."""
        return sorted(file for file in self.archive.iterdir() if len(file.name) == 24)


def pytest_report_header(config):
    others = "".join(f"; {install.version(other)} in part" for other in MAJORS[1:])
    without_tls = f"; without TLS, {NEEDS_TLS} is left to PostgreSQL 17" if leaves_tls_out() else ""
    return [f"seed: {SEED} (WALRIDER_SEED={SEED} repeats the random choices)",
            f"PostgreSQL: {install.version()}{others}{without_tls}", f"walrider: {binary()}", disk_left(), *tools_left_out(), *programs_left_out()]


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(disk_left())


def disk_left():
    """Whether a run failed for want of space."""
    return f"free on the disk of {tempfile.gettempdir()}: {shutil.disk_usage(tempfile.gettempdir()).free >> 20} MB"


def tools_left_out():
    """A line for each file whose tool could not be fetched here."""
    return [f"LEFT OUT: {file}, there is no {tool} under .pg/tools: `make fetch-tools` says why"
            for file, tool in tools.TESTS.items() if not tools.has(tool)]


def programs_left_out():
    """A line for each file whose program this machine does not have."""
    return [f"LEFT OUT: {file}, there is no {program} on this machine"
            for file, program in PROGRAMS.items() if not shutil.which(program)]


def leaves_tls_out():
    """The server for 18 may be one without TLS; that for 17 has it, or its tests fail."""
    return install.major() != "17" and not install.has_tls()


def pytest_configure(config):
    for marker in ("alone: no other test runs meanwhile; it looks at how soon or how often something happens",
                   "every_major: it also runs on the other PostgreSQL, in the same session",
                   "from_major(major, why): what it looks at came with this one"):
        config.addinivalue_line("markers", marker)
    if TURNS not in os.environ:     # else of a worker, as of the process that started it
        handle, os.environ[TURNS] = tempfile.mkstemp(prefix="turns-")
        os.close(handle)


def pytest_generate_tests(metafunc):
    """Each test once for each of its majors; the first is not part of its name, so that its random choices are the same without."""
    majors = MAJORS if metafunc.definition.get_closest_marker("every_major") else MAJORS[:1]
    metafunc.parametrize("server_major", majors, indirect=True, scope="session", ids=[pytest.HIDDEN_PARAM, *majors[1:]])


def pytest_runtest_setup(item):
    """`make test-majors` runs tests of what looks at servers on older ones, too."""
    for marker in item.iter_markers("from_major"):
        major, why = marker.args
        if int(install.major()) < major:
            pytest.skip(f"from {major} on: {why}")


def group(item):
    """The tests that go to one worker, by name; None: alone is as good."""
    if item.get_closest_marker("alone"):
        return "alone"
    major = item.callspec.params["server_major"]
    wanted = {item.callspec.params.get("variant")}.union(item.fixturenames)
    if item.path.name == "test_suites.py" or "mixed" in wanted:
        return "mixed"      # Each has 7 to 12 GB on the disk for a while: one after the other, of both majors.
    name = next((name for name in SHARED if name in wanted), None) or \
        next((f"{name} of {item.path.stem}" for name in SHARED_IN_FILE if name in wanted), None)
    return name if major == MAJORS[0] else f"{name or 'rest'} on {major}"


def order(item):
    """Where a test comes: what is long first, at last those that want to be alone."""
    wanted = group(item) or ""
    name = next((name for name in (item.path.name, wanted.partition(" on ")[0]) if name in FIRST), None)
    return wanted == "alone", FIRST.index(name) if name else len(FIRST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    files = {file for file, tool in tools.TESTS.items() if not tools.has(tool)}
    files |= {file for file, program in PROGRAMS.items() if not shutil.which(program)}
    without_tls = leaves_tls_out()
    if left_out := [item for item in items if item.path.name in files
                    or without_tls and item.path.name == NEEDS_TLS and item.callspec.params["server_major"] == MAJORS[0]]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if name := group(item):
                item.add_marker(pytest.mark.xdist_group(name))
    yield       # pytest puts the tests of a major together
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with open(os.environ[TURNS]) as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def pytest_runtest_setup():
    if shutil.disk_usage(tempfile.gettempdir()).free < DISK_ROOM:
        pytest.fail(f"the disk is full: {disk_left()}", pytrace=False)


def pytest_sessionstart(session):
    if not Path(binary()).exists():
        pytest.exit(f"{binary()} does not exist: run `make build`", returncode=2)


@pytest.fixture
def rng(request):
    """A test's random choices: the same for the same seed, whichever tests ran before."""
    return random.Random(f"{SEED}/{request.node.name}")


@pytest.fixture(scope="session", autouse=True)
def server_major(request):
    """The PostgreSQL that a test runs on. What outlives a test and has a server of it depends on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALRIDER_TEST_MAJOR", request.param)
        yield request.param


@pytest.fixture(scope="session")
def scratch(server_major):
    """A directory for the tests on a major. Its name is short: that of a tablespace below it must fit into a tar header (99 bytes)."""
    with tempfile.TemporaryDirectory(prefix="w-") as directory:
        yield Path(directory)


@pytest.fixture
def work(tmp_path):
    """A directory for one test, given up with what it holds: data directories are large."""
    yield tmp_path
    if os.environ.get("WALRIDER_KEEP") != "1":
        throw_away(tmp_path)


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A directory in memory, where there is room for it: what a disk would do with what is not synced is played there."""
    shared = Path("/dev/shm")
    in_memory = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > MEMORY_ROOM
    directory = Path(tempfile.mkdtemp(prefix="walrider-", dir=shared)) if in_memory else tmp_path_factory.mktemp("power")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def make(directory, **options):
    """Run a mixed load and the stock recovery of it."""
    directory.mkdir()
    info = load.MixedLoad(directory, seed=SEED, quiet=True, **options).run()
    fixture = Fixture(directory, info, directory / "stock")
    if os.environ.get("WALRIDER_KEEP") != "1":
        throw_away(directory / "primary")       # It has all of the WAL once more.
    recovery.stock_replay(fixture.backup, fixture.archive, fixture.stock, info["final_checkpoint"], fixture=directory)
    return fixture


@pytest.fixture(scope="session")
def mixed(scratch, server_major):
    """The mixed load with every page image in the WAL; less of everything on what is tested beside another major."""
    rows, seconds = (4000, 3) if server_major == MAJORS[0] else (1500, 1)
    return make(scratch / "mixed", rows=rows, seconds=seconds, settings="wal_consistency_checking = all\n")


@pytest.fixture(scope="session")
def mixed_small(scratch):
    """The mixed load without consistency images, in pglz, on 1 MB segments and no checksums."""
    return make(scratch / "mixed_small", rows=3000, seconds=2, settings="wal_compression = pglz\n", checksums=False,
                wal_segsize_mb=1)


@pytest.fixture(scope="session")
def plain(scratch):
    """The mixed load as a default server writes it, images in zstd or lz4 if it can; quick to replay many times."""
    best = install.compressions()[-1]
    return make(scratch / "plain", rows=3000, seconds=2,
                settings=f"wal_compression = {best}\n" if best in ("lz4", "zstd") else "")


@pytest.fixture(scope="session")
def passes(scratch):
    """VACUUM passes over a table, 30 MB, and leaves images, CREATE INDEX makes some; then all pages of the table change, without images."""
    directory = scratch / "passes"
    with PgCluster.init(directory / "primary", directory / "archive", conf="autovacuum = off\nmax_wal_size = 4GB\n") as server:
        server.start()
        server.psql("CREATE TABLE old AS SELECT g AS id, md5(g::text) || repeat('o', 150) AS t FROM generate_series(1, 150000) g")
        server.basebackup(directory / "backup")
        for command in ("VACUUM (FREEZE) old", "CREATE INDEX ON old (t)", "CREATE INDEX ON old (id)",
                        "UPDATE old SET id = -id WHERE id % 20 = 0", "DELETE FROM old WHERE id % 20 = 1", "VACUUM old"):
            server.psql(command)
        file = server.psql("SELECT pg_relation_filepath('old')")[0][0]
        server.stop()
    server.complete_archive()
    info = {"final_checkpoint": controldata(server.data_dir)["Latest checkpoint location"], "file": file}
    fixture = Fixture(directory, info, directory / "stock")
    recovery.stock_replay(fixture.backup, fixture.archive, fixture.stock, info["final_checkpoint"])
    return fixture


@pytest.fixture(params=["mixed", "mixed_small", "plain"])
def variant(request):
    """Each of the loads in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def small_primary(work):
    """A little primary with an archive, for tests that need a server of a particular kind."""
    with PgCluster.init(work / "small", work / "small_archive",
                        conf=load_server.SETTINGS.replace("wal_keep_size = 4GB", "wal_keep_size = 0")) as server:
        yield server


def dump_json(value):
    """For assertion messages."""
    return json.dumps(value, indent=1, default=str)[:4000]


@pytest.fixture(scope="session")
def primary_template(scratch):
    """A primary for standbys as initdb leaves it, on segments of 1 MB: each test starts from a copy."""
    return standby.make_primary(scratch / "template").data_dir


@pytest.fixture
def primary(primary_template, work):
    """A running primary whose commits wait for a standby named `walrider`."""
    with PgCluster(copy_tree(primary_template, work / "primary")) as server:
        yield standby.start_primary(server)


@pytest.fixture(params=(os.environ.get("WALRIDER_STANDBY_KINDS") or "walrider").split(","))
def kind(request):
    """The kinds of standby that a test runs with; WALRIDER_STANDBY_KINDS=walrider,stock adds the oracle."""
    return standby.KINDS[request.param]
