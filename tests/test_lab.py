"""What the other tests stand on: nothing that was changed on its way is used, a seed repeats, ports are nobody else's, no test is
another's library."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.lab import headers, seed
from tests.lab.as_user import ROOT
from tests.lab.install import REQUIREMENTS
from tests.lab.server import cluster


def test_another_file_under_the_same_name_is_refused(work, monkeypatch, capsys):
    """What is known by its hash has to be that; what Debian has newly is said to be new. (pip does as much for wheels.)"""
    apt = object.__new__(headers.Apt)
    apt.directory = work
    file = work / "thing_1.deb"
    file.write_bytes(b"as it was")
    monkeypatch.setattr(headers, "KNOWN", {file.name: "0" * 64})
    with pytest.raises(headers.MissingSource, match="it is another file under the same name"):
        apt.one("*.deb")
    monkeypatch.setattr(headers, "KNOWN", {file.name: "369b74f2003ce39f5829ec7a2f84852b72b610d0312c8951d5d8f7316c9902ba"})
    assert apt.one("*.deb") == file and capsys.readouterr().err == ""
    monkeypatch.setattr(headers, "KNOWN", {})
    assert apt.one("*.deb") == file and "Debian has moved on" in capsys.readouterr().err


def test_every_package_is_pinned():
    """pip refuses a file of requirements where some have hashes and some have none; not one where none has."""
    for file in REQUIREMENTS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        names = [line for line in lines if not line.startswith("    --hash=sha256:")]
        assert names and all("==" in line and line.endswith(" \\") for line in names), file


def test_seed(monkeypatch):
    """Fixed, given, or new; a new one is handed down to what we start."""
    monkeypatch.setenv("WALRIDER_SEED", "")
    assert seed.seed() == seed.FIXED
    monkeypatch.setenv("WALRIDER_SEED", "4711")
    assert seed.seed() == 4711
    monkeypatch.setenv("WALRIDER_SEED", "random")
    drawn = seed.seed()
    assert os.environ["WALRIDER_SEED"] == str(drawn) and seed.seed() == drawn


def test_ports_are_reserved():
    """Another process of the tests cannot get a port that this one has, though nobody listens on it yet."""
    port = cluster.free_port()
    script = f"""if True:
        import random
        from tests.lab.server import cluster
        random.sample = lambda _population, _count: [{port}]
        cluster.free_port()"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "no free port" in done.stderr, done.stderr


def imports(path):
    """The dotted names that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def test_no_test_imports_another():
    """What two of them need is in the lab."""
    found = {path: set(imports(path)) for directory in ("tests", "bench") for path in (ROOT / directory).rglob("*.py")}
    assert "tests.lab.as_user.ROOT" in found[ROOT / "tests/test_lab.py"]
    assert [(path.name, name) for path, names in found.items() for name in names
            if any(part.startswith("test_") or part == "conftest" for part in name.split("."))] == []


def test_each_file_has_names_of_its_own_in_the_shared_directory():
    """Two files had their `publisher` in `scratch`, which outlives a file: each passed alone, and the second one failed where one worker
    ran both. Only names written out there are seen."""
    found = [(name, path.name) for path in (ROOT / "tests").glob("*.py") if path.name != "test_lab.py"
             for name in set(re.findall(r'\bscratch / "([^"]+)"', path.read_text()))]
    assert ("stream_publisher", "test_logical_stream.py") in found
    assert [file for file in found if [name for name, _ in found].count(file[0]) > 1] == []
