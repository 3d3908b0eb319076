"""The tools around PostgreSQL that Walrider has to get on with, unpacked under `.pg/tools/`: pgBackRest, Barman with rsync, Patroni
with etcd; pgaudit, a library for the servers of both majors; and moto, a stand-in for Amazon S3.

    python3 -m tests.lab.server.tools [TOOL]...          fetch what is missing; without tools, all

What is compiled is Debian's, whose signature apt checks, with the libraries it was built for: nothing is installed, nothing runs
here while it is fetched.  What is Python's comes from PyPI, each file by its hash.  Where they cannot be had (no apt, no
network), `fetch` says so and goes on: the tests that need them are left out, and say so (`conftest.py`).
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lab import install
from tests.lab.headers import Apt, MissingSource

TOOLS = install.PG_DIR / "tools"
DEBIAN_OF = "17"            # the major whose Debian (headers.SUITES) the packages are from: the stable one
LIBRARIES = ("libc6 libgcc-s1 libpq5 libssh2-1t64 libssl3t64 libxml2 libyaml-0-2 libzstd1 liblz4-1 zlib1g libbz2-1.0 liblzma5 "
             "libgssapi-krb5-2 libkrb5-3 libk5crypto3 libcom-err2 libkrb5support0 libldap2 libsasl2-2 libkeyutils1")
PACKAGES = {"pgbackrest": ["pgbackrest", *LIBRARIES.split()],
            "barman": ["rsync", *"libacl1 libc6 liblz4-1 libpopt0 libssl3t64 libxxhash0 libzstd1 zlib1g".split()],
            "patroni": ["etcd-server", "python3-etcd"],
            "moto": [],
            "pgaudit": ["postgresql-17-pgaudit", "postgresql-18-pgaudit"]}
# What is not of the stable Debian.
SUITE_OF = {"postgresql-18-pgaudit": "18"}
WRAPPED = {"pgbackrest": "pgbackrest", "barman": "rsync"}       # the program that comes with its libraries
# Each with the SHA-256 of every file that may come: x86-64, for what is compiled Python 3.9 to 3.13.
DATEUTIL = {
    "python-dateutil==2.9.0.post0": (
        "a8b2bc7bffae282281c8140a97d3aa9c14da0b136dfe83f850eea9a5f7470427",),
    "six==1.17.0": (
        "4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274",),
}
WEB = {
    "pyyaml==6.0.3": (
        "0150219816b6a1fa26fb4699fb7daa9caf09eb1999f3b70fb6e786805e80375a",
        "0f29edc409a6392443abf94b9cf89ce99889a1dd5376d94316ae5145dfedd5d6",
        "9c7708761fccb9397fe64bbc0395abcae8c4bf7b0eac081e12b809bf47700d0b",
        "b8bb0864c5a28024fac8a632c443c87c5aa6f215c0b126c449ae1a150412f31d",
        "ba1cc08a7ccde2d2ec775841541641e4548226580ab850948cbfda66a1befcdc",),
    "urllib3==2.8.0": (
        "0cf3cae568d36aa9576b28dfb35f11328f1cb974ca7647d9475ebb86c75ac6e3",),
}
WHEELS = {"patroni": {
    "patroni==4.1.5": (
        "7aad8c1539e6c51c269a8005169dd54ddc7668437b7900fa6099d7894e224c84",),
    "dnspython==2.9.2": (
        "af15f7d385a6ae2fb35a796fde2138004c8c42c7389090e2addc83e3b3340fd8",),
    "psutil==7.2.2": (
        "076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9",),
    **DATEUTIL,
    **WEB,
}, "barman": {
    "barman==3.19.1": (
        "0a6a9e1babf97687732d8b2a3eb79ea95d55246a5257b9433865cb6e755221c0",),
    "psycopg2-binary==2.9.12": (
        "718e1fc18edf573b02cb8aea868de8d8d33f99ce9620206aa9144b67b0985e94",
        "c5ee5213445dd45312459029b8c4c0a695461eb517b753d2582315bd07995f5e",
        "e4e184b1fb6072bf05388aa41c697e1b2d01b3473f107e7ec44f186a32cfd0b8",
        "9fe06d93e72f1c048e731a2e3e7854a5bfaa58fc736068df90b352cefe66f03f",
        "c41321a14dd74aceb6a9a643b9253a334521babfa763fa873e33d89cfa122fb5",),
    **DATEUTIL,
}, "moto": {
    "moto==5.2.1": (
        "19d2fbd6e613aa5b4e364c52cd5d3cea371643a0f4210689a703227bd2924c5c",),
    "boto3==1.44.8": (
        "099caf21553bbbfef118904aa02fadb8776a534704cf00bede0ed9f29a4da88e",),
    "botocore==1.44.8": (
        "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",),
    "jmespath==1.1.0": (
        "a5663118de4908c91729bea0acadca56526eb2698e83de10cd116ae0f4e97c64",),
    "s3transfer==0.19.3": (
        "24eb7535804306355e31c952a90022bf5b2f9d760f9a11062c7493a217c08553",),
    "requests==2.34.2": (
        "2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0",),
    "certifi==2026.10.19.post1": (
        "1324c476b4811eff41a8bc2122cd0bbd4d9c7234c725446d99ab1612b3a7fdd2",),
    "idna==3.20": (
        "ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c",),
    "responses==0.26.3": (
        "74474f799334ac4f37d93b6437ecc3bb1bb5c77a8d31780a338643be2dce0af8",),
    "xmltodict==1.0.4": (
        "a4a00d300b0e1c59fc2bfccb53d7b2e88c32f200df138a0dd2229f842497026a",),
    "werkzeug==3.1.9": (
        "6392e50c78460ba618e5b21f08a71f59c99ce99cdc6cf6e3dd7e6ccca8754fab",),
    "flask==3.1.3": (
        "f4bcbefc124291925f1a26446da31a5178f9483862233b23c0c96a20701f670c",),
    "flask-cors==6.0.5": (
        "68fcf75693e961f3af26683b23c4b9a8fb6b64de17d20d0c37b95e8de7ab2ed8",),
    "click==8.5.1": (
        "8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37",),
    "itsdangerous==2.2.0": (
        "c6242fc49e35958c8b15141343aa660db5fc54d4f13a1db01a3f5891b98700ef",),
    "jinja2==3.1.6": (
        "85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67",),
    "blinker==1.9.0": (
        "ba0efaa9080b619ff2f3459d1d500c57bddea4a6b424b60a91141db6fd2f08bc",),
    "pycparser==3.12": (
        "a076f3f489b39b43ed13563a1dafe42447445bec2e294154ec5c57fcdda4c85e",),
    "markupsafe==3.0.4": (
        "d1aca03ede943eb80ab3d63bb082c84b7aab85ea83bd0fd0c200260945fb49d9",
        "6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808",
        "8e124f974786f831d6043728e38296969d3579db8896fe004682f5758e613581",
        "434139499bb20b502ed3baa1f169e618f924a97e7a777fea1a49446d80106cf6",),
    "cffi==2.1.1": (
        "194cffa889098ced9976c3fc6340305e43f6303657d298da55366907c05c22d6",
        "34e261f78cb6ceaaa36f42f2613f4380d94d9c759a9c73c769ee6e0247364632",
        "c1453022f490d2459a11819d83ad1d586e9ff65a12ac3e705ffebd46d3685dcf",
        "a931079504ecc49efed7744c476a5c343a92fabf66dec2db95edb1b2fdc770e2",),
    "cryptography==50.0.2": (
        "9dab55f57c74c3cad24c323bacbbd04be4705ba6eb0d92e920b1fc4837ed5079",
        "1981f1db4630889b9ef7803fadef12b056f428cb6b85c27ba57b774793b6093c",),
    **WEB,
    **DATEUTIL,
}}
TESTS = {"test_pgbackrest.py": "pgbackrest", "test_barman.py": "barman", "test_patroni.py": "patroni", "test_archive_stores.py": "moto"}      # who needs which
LONG = os.environ.get("WALRIDER_TOOLS_LONG") == "1"         # the long tests, too: make test-tools
FORMAT = "1"                # of what is under `.pg/tools`: another one is fetched again
WRAPPER = """#!/bin/sh
# With its own C library: that of the machine may be older. It starts itself again by the name that it was called by.
here=$(dirname "$(readlink -f "$0")")
exec "$here/{loader}" --library-path "$here/{libraries}" --argv0 "$here/{name}" "$here/root/usr/bin/{name}" "$@"
"""


def directory(tool):
    """Where a tool is, or would be."""
    return TOOLS / tool


def has(tool):
    """Whether it was fetched."""
    stamp = directory(tool) / ".stamp"
    return stamp.exists() and stamp.read_text() == wanted(tool)


def program(tool, name=None):
    """The path of a tool's program."""
    found = directory(tool) / (name or tool)
    return str(found if found.exists() else directory(tool) / "root" / "usr" / "bin" / name)


def library(tool):
    """The path of a tool that servers load, for the major that the tests run on."""
    return str(directory(tool) / "root" / "usr/lib/postgresql" / install.major() / "lib" / f"{tool}.so")


def wanted(tool):
    """What the unpacked tool was made of; another one is fetched again."""
    return " ".join([FORMAT, *PACKAGES.get(tool, ()), *WHEELS.get(tool, ())])


def wrap(made, name):
    """A script beside `root` that runs a program with the libraries that came with it."""
    loader = next((made / "root").glob("usr/lib*/ld-linux*.so.*")).relative_to(made)
    libraries = next((made / "root").glob("usr/lib/*-linux-gnu*/libc.so.6")).parent.relative_to(made)
    script = made / name
    script.write_text(WRAPPER.format(loader=loader, libraries=libraries, name=name))
    script.chmod(0o755)


def unpack(tool, target):
    """Fill `target`, renamed when complete."""
    print(f"fetching {tool}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=install.PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        made = scratch / "made"
        (made / "root").mkdir(parents=True)
        for suite in sorted({SUITE_OF.get(name, DEBIAN_OF) for name in PACKAGES[tool]}):
            apt = Apt(scratch / f"apt-{suite}", suite, "deb")
            apt("download", *(name for name in PACKAGES[tool] if SUITE_OF.get(name, DEBIAN_OF) == suite))
            for package in sorted(apt.directory.glob("*.deb")):
                subprocess.run(["dpkg-deb", "-x", package, made / "root"], check=True)
        for part in ("usr/share", "etc", "var", "usr/sbin"):
            shutil.rmtree(made / "root" / part, ignore_errors=True)
        if tool in WRAPPED:
            wrap(made, WRAPPED[tool])
        if tool in WHEELS:
            requirements = scratch / "requirements"
            requirements.write_text("".join(name + "".join(f" --hash=sha256:{digest}" for digest in digests) + "\n"
                                            for name, digests in WHEELS[tool].items()))
            install._pip("install", "--no-deps", "--only-binary=:all:", "--require-hashes", "--target", str(made / "python"),
                         "--python-version", install.python_version(), "--requirement", str(requirements))
        if tool == "patroni":
            (made / "root" / "usr/lib/python3/dist-packages/etcd").rename(made / "python" / "etcd")
        (made / ".stamp").write_text(wanted(tool))
        subprocess.run(["chmod", "-R", "a+rX", made], check=True)     # the tests run as another user when root called
        TOOLS.mkdir(exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


def fetch(names):
    """Unpack what is missing; two callers at once take turns. Returns what could not be had, with the reasons."""
    install.PG_DIR.mkdir(exist_ok=True)
    missing = {}
    with open(install.PG_DIR / ".lock-tools", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for tool in names:
            try:
                if not has(tool):
                    unpack(tool, directory(tool))
            except (MissingSource, install.MissingServer, subprocess.CalledProcessError, OSError, StopIteration) as error:
                missing[tool] = error
    return missing


if __name__ == "__main__":
    for tool, error in fetch(sys.argv[1:] or PACKAGES).items():
        print(f"{tool} cannot be had here, its tests will be left out: {error}", file=sys.stderr)
