"""PostgreSQL's tests of logical replication (src/test/subscription), with walrider_pgoutput in pgoutput's place.

    python3 -m tests.suites.subscription --fetch         what they need: Perl's IPC::Run, under .pg/perl where Perl has none
    python3 -m tests.suites.subscription [--stock] [--jobs N] [--save FILE] [NAME ...]

They are Perl, and most subscriptions in them create their slots themselves, which name pgoutput.  So they run on a copy of the
installation: there pgoutput.so is our library, byte for byte but for the name under which it loads the server's own, which is
beside it.  Where a test counts on empty transactions being sent, EXPECTED says what it has to find instead, and why.  What fails
is run again on a copy that is not changed: what fails there too says nothing of the plugin.

Not tried: collations of ICU where the server has none (012), other plugins than pgoutput.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from bench.replay import commit, machine
from tests.lab import install
from tests.lab.headers import Apt, MissingSource

from . import source

PERL = install.PG_DIR / "perl"
STOCK, STAND_IN = b"$libdir/pgoutput\0", b"$libdir/stockput\0"      # of the same length: one takes the other's place
TIMEOUT = 900
# Where a test counts on the subscriber being sent what is empty: (file, what it says, what it has to say with our plugin, why).
EXPECTED = (
    ("021_twophase.pl", "qq(2), 'transaction is prepared on subscriber'", "qq(1), 'transaction is prepared on subscriber'",
     "two subscriptions, one of which does not have the table: only the other is sent the prepared transaction"),
    ("018_stream_subxact_abort.pl", "INSERT INTO test_tab_2 values(1);\n\tROLLBACK;",
     "INSERT INTO test_tab_2 values(1);\n\tSELECT pg_logical_emit_message(false, '', '', true), pg_sleep(1);\n\tROLLBACK;",
     "a transaction that is rolled back before its first change is decoded is not sent: it is flushed, and stays open until then"),
)


def fetch():
    """IPC::Run from Debian; it is Perl alone, so that any version of Perl takes it."""
    source.fetch(("src/test/subscription", "src/test/perl"))
    if PERL.exists() or subprocess.run(["perl", "-MIPC::Run", "-e", "1"], capture_output=True).returncode == 0:
        return
    with tempfile.TemporaryDirectory(dir=install.PG_DIR, prefix="fetch-") as scratch:
        scratch = Path(scratch)
        apt = Apt(scratch / "apt", "17", "deb")
        apt("download", "libipc-run-perl")
        subprocess.run(["dpkg-deb", "-x", apt.one("*.deb"), scratch / "unpacked"], check=True)
        made = scratch / "unpacked" / "usr" / "share" / "perl5"
        subprocess.run(["chmod", "-R", "a+rX", made], check=True)
        made.rename(PERL)


def ask(*argv):
    """What a program prints."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def copy_of_server(target, ours):
    """The installation again; `ours`: with our plugin as pgoutput. Returns the directory of its programs."""
    fetched = install.PG_DIR / install.major()
    if not install.bindir().is_relative_to(fetched):
        raise install.MissingServer("PG_CONFIG names a server that may not work from another place: leave it out")
    shutil.copytree(fetched, target, symlinks=True)
    libraries = Path(ask(target / "bin" / "pg_config", "--pkglibdir"))
    assert libraries.is_relative_to(target), libraries
    if ours:
        plugin = (libraries / "walrider_pgoutput.so").read_bytes()
        assert plugin.count(STOCK) == 1, "the plugin names pgoutput's library once"
        (libraries / "pgoutput.so").rename(libraries / f"{STAND_IN[8:-1].decode()}.so")
        (libraries / "pgoutput.so").write_bytes(plugin.replace(STOCK, STAND_IN))
    return target / "bin"


def environment(bindir, scratch):
    """What `make check` gives these tests."""
    tree = source.tree()
    path = [str(tree / "src/test/perl"), *([str(PERL)] if PERL.exists() else [])]
    icu = "no" if "--without-icu" in ask(bindir / "pg_config", "--configure") else "yes"
    return dict(os.environ, PATH=f"{bindir}:{os.environ['PATH']}", PERL5LIB=":".join(path), with_icu=icu, top_builddir=str(scratch),
                PG_REGRESS=str(source.program("regress/pg_regress")), PG_TEST_PORT_DIR=str(scratch), TESTDATADIR=str(scratch / "data"),
                TESTLOGDIR=str(scratch / "log"))


def as_expected(file, scratch):
    """The file with what is expected of our plugin; and why that differs."""
    text, reasons = file.read_text(), []
    for name, says, has_to_say, why in EXPECTED:
        if name == file.name:
            assert text.count(says) == 1, f"{name} does not say once: {says}"
            text = text.replace(says, has_to_say)
            reasons.append(why)
    if not reasons:
        return file, reasons
    changed = scratch / file.name
    changed.write_text(text)
    return changed, reasons


def run(file, bindir, scratch, ours):
    """One file: what its TAP says, and how long it took."""
    scratch.mkdir(parents=True)
    file, reasons = as_expected(file, scratch) if ours else (file, [])
    begun = time.monotonic()
    try:
        done = subprocess.run(["perl", str(file)], env=environment(bindir, scratch), cwd=scratch, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        status, said, complaints = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status, said, complaints = None, (late.stdout or b"").decode(errors="replace"), f"not done after {TIMEOUT} s"
    failed = re.findall(r"^not ok \d+ - (.*)", said, re.MULTILINE)
    plan = re.search(r"^1\.\.(\d+)(?: # SKIP (.*))?", said, re.MULTILINE)
    passed = len(re.findall(r"^ok \d+", said, re.MULTILINE))
    complete = status == 0 and plan is not None and passed == int(plan[1]) and not failed
    result = dict(file=file.name, passed=passed, failed=failed, complete=complete, seconds=round(time.monotonic() - begun, 1))
    if reasons:
        result["differs"] = reasons
    if plan and plan[2]:
        result["skipped"] = plan[2]
    if complete:
        shutil.rmtree(scratch)
    else:
        result["said"] = "\n".join(line for line in said.splitlines() if not line.startswith("ok "))[-1000:] + complaints[-2000:]
    return result


def run_all(files, bindir, scratch, jobs, ours):
    """Each file's result; they are said as they come."""
    def one(file):
        result = run(file, bindir, scratch / file.stem, ours)
        word = "skipped: " + result["skipped"] if "skipped" in result else "passed" if result["complete"] else "FAILED"
        said = "; ".join([f"{file.name:<36} {result['passed']:4} {word} {result['seconds']:6.1f} s", *result.get("differs", ())])
        print(said, flush=True)
        return result
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, files))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.suites.subscription", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="files, by how their names begin; without, all")
    parser.add_argument("--fetch", action="store_true", help="fetch what is missing")
    parser.add_argument("--stock", action="store_true", help="with pgoutput itself")
    parser.add_argument("--jobs", type=int, default=1, help="so many side by side")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the result, as JSON")
    args = parser.parse_args()
    if args.fetch:
        try:
            fetch()
        except (MissingSource, install.MissingServer, subprocess.CalledProcessError) as error:
            sys.exit(f"error: {error}")
        return 0
    files = sorted((source.tree() / "src/test/subscription/t").glob("*.pl"))
    files = [file for file in files if not args.names or file.name.startswith(tuple(args.names))]
    assert files, f"no test begins with {args.names}"
    scratch = Path(tempfile.mkdtemp(prefix="subscription-"))
    results = run_all(files, copy_of_server(scratch / "server", not args.stock), scratch / "run", args.jobs, not args.stock)
    failed = [file for file, result in zip(files, results) if not result["complete"]]
    again = []
    if failed and not args.stock:
        print("with pgoutput:", flush=True)
        again = run_all(failed, copy_of_server(scratch / "stock", False), scratch / "again", args.jobs, False)
    for result in (*results, *again):
        if not result["complete"]:
            print(f"\n{result['file']}: {'; '.join(result['failed']) or 'ended early'}\n{result['said']}")
    print(f"{sum(result['passed'] for result in results)} checks passed in {len(files)} files, {len(failed)} files failed, "
          f"{sum(not result['complete'] for result in again)} of these with pgoutput too; PostgreSQL {install.version()}")
    if args.save:
        told = dict(when=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), commit=commit(),
                    postgresql=install.version(), tests_of=source.version(),
                    command="make test-subscription",
                    plugin="pgoutput" if args.stock else "walrider_pgoutput", files=results, failed_with_pgoutput_too=again)
        args.save.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
