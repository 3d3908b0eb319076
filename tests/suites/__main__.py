"""PostgreSQL's own suites, replayed by us and by stock PostgreSQL, everything compared.

    python3 -m tests.suites [--list] [--save FILE] [--work DIR] [VARIANT ...]      as root through tests.lab.as_user

Without names every variant that the server at hand can run.  --work keeps the WAL and the directories of a variant.
"""

import argparse
import json
import shutil
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from bench.replay import commit, machine

from .run import prove
from .variants import VARIANTS


def save(file, result):
    """Put a variant's result among those in the file, in the place of an earlier one."""
    told = json.loads(file.read_text()) if file.exists() else {}
    earlier = [variant for variant in told.get("variants", []) if variant["variant"] != result["variant"]]
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    told = dict(command="make test-suites", machine=machine(),
                variants=[*earlier, dict(when=when, commit=commit(), **result)])
    new = file.with_suffix(".new")      # the old one may be somebody else's, the directory is ours (as_user)
    new.write_text(json.dumps(told, indent=1) + "\n")
    new.rename(file)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.suites", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="names of variants; see --list")
    parser.add_argument("--list", action="store_true", help="say which variants there are")
    parser.add_argument("--save", metavar="FILE", help="add the results there, as JSON")
    parser.add_argument("--work", metavar="DIR", help="work there, and keep what a variant that fails leaves")
    parser.add_argument("--again", action="store_true",
                        help="replay and compare what a variant that failed has left in --work")
    args = parser.parse_args()
    if args.list:
        for variant in VARIANTS.values():
            print(f"{variant.name:<20} {variant.about}{'' if variant.runs_here() else ' (not with this server)'}")
        return 0
    unknown = sorted(set(args.variants) - set(VARIANTS))
    if unknown:
        parser.error(f"unknown variant: {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    wanted = args.variants or [name for name, variant in VARIANTS.items() if variant.runs_here()]
    work = Path(args.work or tempfile.mkdtemp(prefix="suites-"))
    for name in wanted:
        directory = work / name
        if not args.again:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        result = prove(VARIANTS[name], directory, args.again)
        shutil.rmtree(directory)
        if args.save:
            save(Path(args.save), result)
    if not args.work:
        shutil.rmtree(work)
    print(f"{len(wanted)} variants: no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
