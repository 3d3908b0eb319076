"""Make the packages that can be made on this machine: docs/install.md says what each is.

    python3 packaging/build.py [--into DIR] [KIND]...

Without KIND, each of deb, rpm, static, pgxn, extension-deb and crates; what is left out, and why, is printed.  A kind that is
named must succeed.  `static-gnu` is made only when it is named.  The maintainer of the packages is DEBFULLNAME and DEBEMAIL,
as for Debian's own tools.
"""

import argparse
import calendar
import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.utils import formatdate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = ROOT / "extension"
HERE = ROOT / "packaging"
MACHINE = platform.machine()
MAJORS = ("17", "18")
SUMMARY = "parallel WAL replay and live standbys for PostgreSQL"
DESCRIPTION = ["Walrider replays PostgreSQL's write-ahead log onto a data directory, on all",
               "cores, and hands the directory to PostgreSQL: point-in-time recovery and live",
               "standbys, for PostgreSQL 17 and 18."]
# What differs between the systems: where the unit finds the directory and the server, and zsh its completions.
LAYOUTS = {
    "deb": {"DATA_DIR": "/var/lib/postgresql/%I", "SERVER": "postgresql@%i.service",
            "OPTIONS": " --config-file /etc/postgresql/%I/postgresql.conf", "ZSH": "vendor-completions"},
    "rpm": {"DATA_DIR": "/var/lib/pgsql/%i/data", "SERVER": "postgresql-%i.service", "OPTIONS": "", "ZSH": "site-functions"},
}
COMPLETIONS = {"bash": "bash-completion/completions/walrider", "zsh": "zsh/@ZSH@/_walrider",
               "fish": "fish/vendor_completions.d/walrider.fish"}
RELOAD = "#!/bin/sh\nset -e\nif [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi\n"


class LeftOut(Exception):
    """What this machine lacks for a package."""


def run(*argv, **options):
    """A command whose failure ends this."""
    return subprocess.run([str(part) for part in argv], check=True, **options)


def need(program, package):
    """Raise unless `program` is there."""
    if not shutil.which(program):
        raise LeftOut(f"there is no {program} (Debian: {package})")


def version():
    """The workspace's version."""
    return re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]


def released():
    """When CHANGELOG.md says that this version is from, in seconds; all files in packages are as old."""
    date = re.search(rf"^## \[{re.escape(version())}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    if not date:
        raise SystemExit(f"error: CHANGELOG.md has no heading \"## [{version()}] - YYYY-MM-DD\"")
    return calendar.timegm(time.strptime(date[1], "%Y-%m-%d"))


def maintainer():
    """Who answers for the packages."""
    return f"{os.environ.get('DEBFULLNAME', 'Walrider contributors')} <{os.environ.get('DEBEMAIL', 'walrider@packages.invalid')}>"


def write(path, text, mode=0o644):
    """A file with its directories; compressed if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    path.chmod(mode)


def fill(text, values):
    """A template, each @NAME@ replaced."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def licenses():
    """The licences of the crates that the binary is made of: most of them want to be passed on with it."""
    need("cargo", "cargo")
    tree = run("cargo", "tree", "--locked", "-p", "walrider-cli", "-e", "normal", "--prefix", "none", "-f", "{p}", "--target",
               "all", cwd=ROOT, capture_output=True, text=True).stdout
    used = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    packages = json.loads(run("cargo", "metadata", "--locked", "--format-version", "1", cwd=ROOT, capture_output=True,
                              text=True).stdout)["packages"]
    parts = []
    for crate in sorted(packages, key=lambda crate: (crate["name"], crate["version"])):
        if crate["source"] is None or (crate["name"], "v" + crate["version"]) not in used:
            continue
        parts.append(f"==== {crate['name']} {crate['version']}: {crate['license'] or crate['license_file']}\n")
        files = Path(crate["manifest_path"]).parent.iterdir()
        parts += [path.read_text(errors="replace") for path in sorted(files)
                  if path.is_file() and re.match(r"(?i)licen[sc]e|copying|copyright|notice", path.name)]
    return "\n".join(parts)


def stage(prefix, options, binary, layout="rpm"):
    """The program and what belongs to it, below `prefix`, which is /usr or a directory of its own."""
    program = prefix / "bin" / "walrider"
    program.parent.mkdir(parents=True)
    run("strip", "-o", program, binary)
    program.chmod(0o755)
    with tempfile.TemporaryDirectory() as pages:
        run(binary, "man", pages)
        for page in Path(pages).iterdir():
            write(prefix / "share/man/man1" / f"{page.name}.gz", page.read_bytes())
    for shell, place in COMPLETIONS.items():
        write(prefix / "share" / fill(place, LAYOUTS[layout]), run(binary, "completions", shell, capture_output=True).stdout)
    doc = prefix / "share/doc/walrider"
    docs = [path for place in ("*.md", "decisions/*.md", "img/*") for path in sorted((ROOT / "docs").glob(place))]
    for path in [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "ARCHITECTURE.md")), *docs]:
        write(doc / path.relative_to(ROOT), path.read_bytes())
    for example in ("standby.toml", "prometheus/walrider-alerts.yml", "grafana/walrider.json"):
        write(doc / "examples" / Path(example).name, (HERE / example).read_bytes())
    third = options.third_party.read_text() if options.third_party else licenses()
    write(doc / "third-party-licenses.txt.gz", third)


def stage_system(kind, root, options):
    """The same as a system has it, with the unit of this kind of system."""
    stage(root / "usr", options, options.binary, kind)
    unit = fill((HERE / "walrider-standby@.service.in").read_text(), LAYOUTS[kind])
    write(root / "usr/lib/systemd/system/walrider-standby@.service", unit)
    (root / "etc/walrider").mkdir(parents=True)


def deb(options, scratch):
    """The program for Debian and Ubuntu, with postgresql-common's directories in the unit."""
    need("dpkg-deb", "dpkg")
    root = scratch / "deb"
    stage_system("deb", root, options)
    doc = root / "usr/share/doc/walrider"
    write(doc / "copyright", (ROOT / "LICENSE").read_bytes())
    write(doc / "changelog.Debian.gz", f"walrider ({version()}-1) unstable; urgency=medium\n\n  * CHANGELOG.md has it.\n\n"
          f" -- {maintainer()}  {formatdate(released())}\n")
    # What the binary asks of the C library. The regular expression may find too much, never too little.
    glibc = max(tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", options.binary.read_bytes()))
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    architecture = run("dpkg", "--print-architecture", capture_output=True, text=True).stdout.strip()
    control = [f"Package: walrider\nVersion: {version()}-1\nArchitecture: {architecture}\nMaintainer: {maintainer()}",
               f"Installed-Size: {size}\nDepends: libc6 (>= {glibc[0]}.{glibc[1]}), libgcc-s1\nSuggests: postgresql",
               f"Section: database\nPriority: optional\nDescription: {SUMMARY}", *(f" {line}" for line in DESCRIPTION), ""]
    write(root / "DEBIAN/control", "\n".join(control))
    for script in ("postinst", "postrm"):
        write(root / "DEBIAN" / script, RELOAD, 0o755)
    package = options.into / f"walrider_{version()}-1_{architecture}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, package, stdout=subprocess.DEVNULL)
    return [package]


def rpm(options, scratch):
    """The program for Red Hat's family, with the directories of PostgreSQL's own packages in the unit."""
    need("rpmbuild", "rpm")
    root = scratch / "rpm"
    stage_system("rpm", root, options)
    write(root / "usr/share/licenses/walrider/LICENSE", (ROOT / "LICENSE").read_bytes())
    spec = scratch / "walrider.spec"
    write(spec, fill((HERE / "walrider.spec").read_text(), {"VERSION": version(), "SUMMARY": SUMMARY, "STAGE": str(root),
                                                            "PACKAGER": maintainer(), "DESCRIPTION": "\n".join(DESCRIPTION)}))
    made = scratch / "rpms"
    run("rpmbuild", "-bb", "--quiet", "--define", f"_topdir {scratch / 'rpmbuild'}", "--define", f"_rpmdir {made}", "--define",
        "clamp_mtime_to_source_date_epoch 1", "--define", "use_source_date_epoch_as_buildtime 1",
        "--define", "_buildhost localhost", spec)
    return [Path(shutil.copy2(path, options.into)) for path in made.rglob("*.rpm")]


def static_tarball(options, scratch, target, **environment):
    """One binary without shared libraries, and what belongs to it, as a tarball."""
    run("cargo", "build", "--release", "--locked", "--target", target, "-p", "walrider-cli", cwd=ROOT,
        env=dict(os.environ, RUSTFLAGS="-C target-feature=+crt-static", **environment))
    name = f"walrider-{version()}-{target}"
    built = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / target / "release/walrider"
    if "INTERP" in run("readelf", "--program-headers", built, capture_output=True, text=True).stdout:
        raise SystemExit(f"error: {built} is not static: it names a dynamic linker")
    stage(scratch / name, options, built)
    write(scratch / name / "LICENSE", (ROOT / "LICENSE").read_bytes())
    package = options.into / f"{name}.tar.gz"

    def plain(info):
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mtime = released()
        return info

    with tarfile.open(package, "w:gz") as tar:
        tar.add(scratch / name, name, filter=plain)
    return [package]


def static(options, scratch):
    """A static build with musl: runs on any Linux of this machine's kind."""
    need("cargo", "cargo")
    need("musl-gcc", "musl-tools")
    target = f"{MACHINE}-unknown-linux-musl"
    sysroot = run("rustc", "--print", "sysroot", cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not (Path(sysroot) / "lib/rustlib" / target / "lib").is_dir():
        raise LeftOut(f"Rust's library for {target} is not installed: rustup target add {target}")
    return static_tarball(options, scratch, target, **{f"CC_{target.replace('-', '_')}": "musl-gcc"})


def static_gnu(options, scratch):
    """A static build with glibc; names are then resolved by libraries of the very glibc that it was linked with."""
    need("cargo", "cargo")
    return static_tarball(options, scratch, f"{MACHINE}-unknown-linux-gnu")


def extension_sources():
    """What the extension is built of and tested with, without what a build has left."""
    return [path for path in sorted(EXTENSION.rglob("*")) if path.is_file()
            and path.suffix in ("", ".c", ".h", ".sql", ".control", ".out", ".json") and not path.name.startswith(".")
            and not {"debian", "results", "tmp_check", "regression.out"} & set(path.relative_to(EXTENSION).parts)]


def pgxn(options, _scratch):
    """The extension as PGXN takes it: a zip with META.json and the sources."""
    meta = json.loads((EXTENSION / "META.json").read_text())
    name = f"{meta['name']}-{meta['version']}"
    package = options.into / f"{name}.zip"
    files = [(path, path.relative_to(EXTENSION)) for path in extension_sources()]
    files += [(ROOT / "LICENSE", "LICENSE"), (ROOT / "docs/early-stream.md", meta["provides"]["walrider"]["docfile"])]
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, place in files:
            info = zipfile.ZipInfo(f"{name}/{place}", time.gmtime(released())[:6])
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return [package]


def extension_deb(options, scratch):
    """postgresql-17-walrider and postgresql-18-walrider, of those servers whose headers are here."""
    need("dpkg-buildpackage", "dpkg-dev")
    need("dh", "debhelper")
    need("pg_buildext", "postgresql-common")
    majors = [major for major in MAJORS if Path(f"/usr/lib/postgresql/{major}/lib/pgxs/src/makefiles/pgxs.mk").exists()]
    if not majors:
        raise LeftOut("neither postgresql-server-dev-17 nor postgresql-server-dev-18 is installed (apt.postgresql.org has them)")
    source = scratch / "extension" / f"postgresql-walrider-{version()}"
    for path in [*extension_sources(), *(EXTENSION / "debian").rglob("*")]:
        if path.is_file():
            (source / path.relative_to(EXTENSION)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, source / path.relative_to(EXTENSION))
    env = dict(os.environ, PG_SUPPORTED_VERSIONS="\n".join(majors))
    run("pg_buildext", "updatecontrol", cwd=source, env=env)
    # -d: postgresql-server-dev-all asks for every major; the ones above are here.
    run("dpkg-buildpackage", "-b", "-d", "-us", "-uc", cwd=source, env=env)
    return [Path(shutil.copy2(path, options.into)) for path in sorted(source.parent.glob("*-walrider_*.deb"))]


def crates(options, scratch):
    """What `cargo publish --workspace` would upload."""
    need("cargo", "cargo")
    run("cargo", "package", "--workspace", "--locked", "--no-verify", "--allow-dirty", "--quiet", "--target-dir",
        scratch / "crates", cwd=ROOT)
    return [Path(shutil.copy2(path, options.into)) for path in sorted((scratch / "crates/package").glob("*.crate"))]


KINDS = {"deb": deb, "rpm": rpm, "static": static, "pgxn": pgxn, "extension-deb": extension_deb, "crates": crates}
ON_REQUEST = {"static-gnu": static_gnu}


def main():
    """Make what is asked for and say what was made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "target/packages", help="where the packages go")
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/walrider", help="the program to pack")
    parser.add_argument("--third-party", type=Path, metavar="FILE", help="the licences of the crates; cargo is asked without")
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[[], *KINDS, *ON_REQUEST],
                        help=", ".join([*KINDS, *ON_REQUEST]))
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    options.into, options.binary = options.into.resolve(), options.binary.resolve()
    os.environ["SOURCE_DATE_EPOCH"] = str(released())
    os.umask(0o022)
    missing = 0
    for kind in options.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="packages-") as scratch:
            try:
                for package in (KINDS | ON_REQUEST)[kind](options, Path(scratch)):
                    print(f"{kind}: {package.name}, {package.stat().st_size // 1024} kB", flush=True)
            except LeftOut as reason:
                print(f"{kind}: left out: {reason}", flush=True)
                missing += 1
            except subprocess.CalledProcessError as error:
                sys.exit(f"error: {kind}: {error}")
    return 1 if options.kinds and missing else 0


if __name__ == "__main__":
    sys.exit(main())
