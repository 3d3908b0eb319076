"""Run every libFuzzer target of `fuzz/`, with a stable toolchain.

    python3 -m tests.fuzz --runs N [TARGET]...           each so often, from nothing: the same inputs for the same seed
    python3 -m tests.fuzz --seconds N [TARGET]...        each for a share of the time, from all that earlier runs have found

cargo-fuzz would want a nightly compiler for its sanitizers; safe Rust needs only the coverage
counters, which these flags give.  A crash leaves its input under fuzz/artifacts/TARGET.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab.seed import seed

FUZZ = Path(__file__).resolve().parents[1] / "fuzz"
COVERAGE = ["-Cpasses=sancov-module", "-Cllvm-args=-sanitizer-coverage-level=4",
            "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters", "-Cllvm-args=-sanitizer-coverage-pc-table",
            "-Cllvm-args=-sanitizer-coverage-trace-compares", "-Cdebug-assertions", "-Ccodegen-units=1"]


def targets():
    """The names of the fuzz targets."""
    return sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))


def build():
    """Build them all, apart from the ordinary build; returns the directory of the programs."""
    host = next(line.split()[1] for line in subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True)
                .stdout.splitlines() if line.startswith("host:"))
    env = dict(os.environ, RUSTFLAGS=" ".join(["--cfg", "fuzzing", *COVERAGE]))
    subprocess.run(["cargo", "build", "--locked", "--release", "--quiet", "--bins", "--manifest-path", str(FUZZ / "Cargo.toml"),
                    "--target", host, "--target-dir", str(FUZZ / "target")], env=env, check=True)
    return FUZZ / "target" / host / "release"


def fuzz(programs, name, options, kept):
    """Run a target, from nothing or from the corpus that is kept."""
    for part in ("corpus", "artifacts"):
        (FUZZ / part / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as nothing:
        return subprocess.run([str(programs / name), str(FUZZ / "corpus" / name) if kept else nothing, *options, "-timeout=60",
                               "-rss_limit_mb=2048", "-verbosity=0", f"-artifact_prefix={FUZZ / 'artifacts' / name}/"],
                              capture_output=True, text=True, errors="replace")


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--runs", type=int, help="of each target")
    length.add_argument("--seconds", type=int, help="for all targets together")
    parser.add_argument("target", nargs="*")
    args = parser.parse_args()
    chosen = args.target or targets()
    if not chosen:
        sys.exit(f"error: no fuzz targets in {FUZZ}")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        # `cargo test` has tried the same decoders with random bytes; libFuzzer itself is C++.
        sys.exit("error: libFuzzer needs a C++ compiler")
    programs = build()
    options = [f"-runs={args.runs}" if args.runs else f"-max_total_time={max(1, args.seconds // len(chosen))}", f"-seed={seed()}"]
    failed = 0
    # As many at a time as there are cores, where each has a number of runs; a share of the time is of one that is alone.
    with ThreadPoolExecutor(os.cpu_count() if args.runs else 1) as pool:
        for name, done in zip(chosen, pool.map(lambda name: fuzz(programs, name, options, not args.runs), chosen)):
            print(f"fuzz {name}: {'ok' if done.returncode == 0 else 'FAILED'}, {options[0][1:]}, seed {seed()}", flush=True)
            if done.returncode != 0:
                print(done.stderr[-3000:], file=sys.stderr)
                failed += 1
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
