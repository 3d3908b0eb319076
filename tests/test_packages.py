"""The packages: what `make packages` makes of the binary under test can be unpacked and used.

Not tried: installing them as a package manager does, starting the unit, the static builds, the container file, building the
extension's Debian packages (they need a server's headers below /usr/lib/postgresql), and the licences of the crates, for which
cargo is needed.
"""

import gzip
import json
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.lab.install import ROOT
from tests.lab.walrider import binary

VERSION = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
EXTENSION = ROOT / "extension"


def run(*argv, **options):
    """Output of a command that must succeed."""
    done = subprocess.run([str(part) for part in argv], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(into, *kinds):
    """The packages of these kinds."""
    third = into / "third-party"
    third.write_text("licences\n")
    print(run(sys.executable, ROOT / "packaging/build.py", "--into", into / "out", "--binary", binary(), "--third-party", third,
              *kinds))
    return sorted((into / "out").iterdir())


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The deb and its files."""
    scratch = tmp_path_factory.mktemp("deb")
    package, = build(scratch, "deb")
    run("dpkg-deb", "--extract", package, scratch / "root")
    return package, scratch / "root"


def test_deb(unpacked):
    package, root = unpacked
    fields = dict(line.split(": ", 1) for line in run("dpkg-deb", "--field", package).splitlines() if line[:1].strip())
    assert fields["Package"] == "walrider" and fields["Version"] == f"{VERSION}-1"
    assert re.fullmatch(r"libc6 \(>= 2\.\d+\), libgcc-s1", fields["Depends"])
    owners = {line.split()[1] for line in run("dpkg-deb", "--contents", package).splitlines()}
    assert owners == {"root/root"}
    assert run(root / "usr/bin/walrider", "--version") == f"walrider {VERSION}\n"
    share = root / "usr/share"
    for place in ("bash-completion/completions/walrider", "zsh/vendor-completions/_walrider",
                  "fish/vendor_completions.d/walrider.fish"):
        assert "standby" in (share / place).read_text(), place
    for place in ("copyright", "README.md", "CHANGELOG.md", "docs/install.md", "examples/standby.toml",
                  "examples/walrider-alerts.yml", "examples/walrider.json", "third-party-licenses.txt.gz"):
        assert (share / "doc/walrider" / place).stat().st_size > 0, place
    assert (root / "etc/walrider").is_dir()


def test_the_same_twice(unpacked, work):
    again, = build(work, "deb")
    assert again.read_bytes() == unpacked[0].read_bytes()


def test_man_pages(unpacked):
    """Every command that `--help` shows has a page, and the formatters that are here find nothing wrong with it."""
    _, root = unpacked
    pages = root / "usr/share/man/man1"
    listing = run(root / "usr/bin/walrider", "--help").split("Commands:\n")[1].split("\n\n")[0]
    commands = set(re.findall(r"^  ([a-z]\S*)", listing, re.M)) - {"help"}
    assert {"replay", "standby"} <= commands
    for name in ["walrider", *(f"walrider-{command}" for command in commands)]:
        page = pages / f"{name}.1.gz"
        assert f".TH {name} 1" in gzip.decompress(page.read_bytes()).decode(), name
        if shutil.which("man"):
            done = subprocess.run(["man", "--warnings", "-l", str(page)], capture_output=True, text=True,
                                  env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "100"})
            assert done.returncode == 0 and not done.stderr, f"{name}: {done.stderr}"
            assert "SYNOPSIS" in done.stdout


def test_unit(unpacked, work):
    """systemd takes the unit, with the program where the package was unpacked; and what it starts takes these options."""
    _, root = unpacked
    text = (root / "usr/lib/systemd/system/walrider-standby@.service").read_text()
    assert "@" not in text.replace("postgresql@%i.service", ""), "every place of the template is filled"
    for name in ("data-dir", "config-file", "config"):
        assert f"--{name} " in text and f"--{name} " in run(root / "usr/bin/walrider", "standby", "--help")
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze to check the unit")
    unit = work / "walrider-standby@18-main.service"
    unit.write_text(text.replace("/usr/bin/walrider", str(root / "usr/bin/walrider")))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    # A setting that it does not know is only a warning; it may have some about other units.
    assert done.returncode == 0 and unit.name not in done.stderr, done.stderr


def test_rpm(work):
    if not shutil.which("rpmbuild"):
        pytest.skip("there is no rpmbuild")
    package, = build(work, "rpm")
    assert run("rpm", "-qp", "--queryformat", "%{NAME} %{VERSION} %{LICENSE}", package) == f"walrider {VERSION} PostgreSQL"
    files = run("rpm", "-qpl", package).splitlines()
    assert {"/usr/bin/walrider", "/usr/share/man/man1/walrider.1.gz", "/usr/share/licenses/walrider/LICENSE",
            "/usr/lib/systemd/system/walrider-standby@.service"} <= set(files)
    assert "libc.so.6" in run("rpm", "-qp", "--requires", package)


def test_pgxn(work):
    """META.json has what PGXN's specification 1.0.0 requires; the zip has what `make` needs, as the control file says it."""
    package, = build(work, "pgxn")
    meta = json.loads((EXTENSION / "META.json").read_text())
    assert {"name", "version", "abstract", "maintainer", "license", "provides", "meta-spec"} <= set(meta)
    semantic = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
    control = dict(re.findall(r"^(\w+) = '?(.*?)'?$", (EXTENSION / "walrider.control").read_text(), re.M))
    provided = meta["provides"]["walrider"]
    assert meta["version"] == VERSION and semantic.fullmatch(VERSION) and meta["meta-spec"]["version"] == "1.0.0"
    assert meta["license"] == "postgresql" and meta["release_status"] in ("stable", "testing", "unstable")
    assert provided["version"] == control["default_version"] + ".0" and semantic.fullmatch(provided["version"])
    with zipfile.ZipFile(package) as archive:
        assert all(name.startswith(f"walrider-{VERSION}/") for name in archive.namelist())
        names = {name.split("/", 1)[1] for name in archive.namelist()}
    sources = {str(path.relative_to(EXTENSION)) for path in (EXTENSION / "src").iterdir() if path.suffix in (".c", ".h")}
    assert {"META.json", "Makefile", "walrider.control", "LICENSE", provided["file"], provided["docfile"]} | sources <= names
    assert not [name for name in names if name.endswith((".o", ".so")) or name.startswith("debian")]


def test_versions_agree():
    """One version everywhere."""
    dependencies = re.findall(r'^walrider-\w+ = \{ version = "(.+?)", path', (ROOT / "Cargo.toml").read_text(), re.M)
    assert set(dependencies) == {VERSION} and len(dependencies) >= 10
    assert (EXTENSION / "debian/changelog").read_text().startswith(f"postgresql-walrider ({VERSION})")
    assert re.search(rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f"walrider:{VERSION} " in (ROOT / "packaging/Containerfile").read_text()
    source, package = (EXTENSION / "debian/control.in").read_text().rstrip("\n").split("\n\n")
    wanted = [source, *(package.replace("PGVERSION", major) for major in ("17", "18"))]
    assert (EXTENSION / "debian/control").read_text() == "\n\n".join(wanted) + "\n"


def test_what_is_missing_is_said(work):
    """Without its tools a kind that is named fails, and says why."""
    done = subprocess.run([sys.executable, ROOT / "packaging/build.py", "--into", work / "out", "rpm"], capture_output=True, text=True,
                          env={"PATH": str(work)})
    assert done.returncode == 1 and "rpm: left out: there is no rpmbuild (Debian: rpm)" in done.stdout, done
