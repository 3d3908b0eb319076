"""Two majors side by side: each directory with WAL of its own, and clear words where they meet or where neither is."""

import shutil
from pathlib import Path

import pytest

from tests.lab import install
from tests.lab.server.cluster import PgCluster
from tests.lab.walrider import CORRUPT, DIFFERENT, replay, walrider

pytestmark = pytest.mark.every_major

FIRST_SEGMENT = "000000010000000000000001"
MAGIC = {"17": "D116", "18": "D118"}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """A new cluster of each major, cleanly stopped."""
    scratch = tmp_path_factory.mktemp("majors")
    with pytest.MonkeyPatch.context() as patch:
        for major in MAGIC:
            patch.setenv("WALRIDER_TEST_MAJOR", major)
            PgCluster.init(scratch / major)
    return {major: scratch / major for major in MAGIC}


@pytest.fixture
def data_dir(clusters, work):
    """A copy of the cluster of the major that the tests run on."""
    return Path(shutil.copytree(clusters[install.major()], work / "data"))


def other():
    """The other major."""
    return next(major for major in MAGIC if major != install.major())


def set_magic(segment, magic):
    """Make a segment one of another version, as far as its pages say."""
    contents = bytearray(segment.read_bytes())
    for page in range(0, len(contents), 8192):
        if any(contents[page:page + 2]):
            contents[page:page + 2] = int(magic, 16).to_bytes(2, "little")
    segment.write_bytes(contents)


def test_the_server_is_of_the_major(primary, server_major):
    """What the tests of a major find is found with its server."""
    assert primary.value("SHOW server_version").startswith(f"{server_major}.")


def test_wal_of_the_other_major(data_dir):
    """Both majors are named, and nothing is begun."""
    before = (data_dir / "global" / "pg_control").read_bytes()
    set_magic(data_dir / "pg_wal" / FIRST_SEGMENT, MAGIC[other()])
    (data_dir / "standby.signal").touch()       # without it, a cluster that was stopped cleanly needs no WAL
    result = replay(data_dir, data_dir / "pg_wal")
    assert result.code == 1, result
    assert f"{MAGIC[other()]} in WAL page header (that of PostgreSQL {other()})" in result.stderr, result.stderr
    assert f"expected {MAGIC[install.major()]} (that of PostgreSQL {install.major()})" in result.stderr
    assert (data_dir / "global" / "pg_control").read_bytes() == before


def test_control_file_of_the_other_major(clusters, data_dir):
    """PG_VERSION and pg_control must agree."""
    shutil.copy(clusters[other()] / "global" / "pg_control", data_dir / "global" / "pg_control")
    result = walrider("replay", "--data-dir", data_dir)
    assert result.code == 1, result
    assert f"it is of version {other()}, PG_VERSION of {install.major()}" in result.stderr


def test_directories_of_both(clusters):
    """They differ, in their version first of all."""
    result = walrider("compare", clusters["17"], clusters["18"])
    assert result.code == DIFFERENT, result
    assert result.json["first"][0]["file"] == "PG_VERSION"


@pytest.mark.parametrize("version", ["15", "16", "19"])
def test_no_other_directory(data_dir, version):
    """An unsupported version is named, and so are the supported ones."""
    (data_dir / "PG_VERSION").write_text(f"{version}\n")
    result = walrider("replay", "--data-dir", data_dir)
    assert result.code == 1, result
    assert f"is of PostgreSQL {version}; 17 and 18 are supported" in result.stderr


def test_no_other_control_file(data_dir):
    """That of 15 and 16 has version 1300."""
    control = data_dir / "global" / "pg_control"
    contents = control.read_bytes()
    control.write_bytes(contents[:8] + (1300).to_bytes(4, "little") + contents[12:])
    result = walrider("compare", data_dir, data_dir)
    assert result.code == 2, result
    assert "version 1300, which is not that of PostgreSQL 17 and 18" in result.stderr


def test_no_other_wal(data_dir):
    """WAL of an unknown version: its magic number, and the supported versions."""
    segment = data_dir / "pg_wal" / FIRST_SEGMENT
    set_magic(segment, "D113")
    for command in ("stats", "dump"):
        result = walrider("wal", command, segment)
        assert result.code == CORRUPT, result
        assert "magic number D113" in result.stderr and "PostgreSQL 17 and 18 are supported" in result.stderr
