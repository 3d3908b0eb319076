"""What a commit costs at each level of synchronous_commit, with Walrider, a stock standby or pg_receivewal at the other end.

    python3 -m bench.sync [--conditions 0/0/0,1/0/0] [--clients 1,8,32] [--seconds 5] [--rounds 3] [--sides SIDE...] [--save DIR]

One primary under `pgbench -N`, each side in turn its only standby, in an order that changes from round to round; a side is
stopped while it is not measured, so that it takes no processor from the one that is.  A condition is DELAY/STANDBY/PRIMARY: the
network's delay one way, and what each fsync of WAL takes longer on the standby and on the primary, all in ms.  The delay is made
by a proxy, 0 is without one; the fsync by a preloaded library that both sides and the primary have in every condition.

Latency is that of pgbench's whole transaction, as its log has it.  `off` and `local` do not depend on the other end and are
measured in conditions without delay alone.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from bench.commits import Field, Side, save
from bench.replay import commit, machine
from tests.lab import install
from tests.lab.loads.bank import PROMISING

SIDES = ("walrider", "stock", "pg_receivewal")
CONDITIONS = ["0/0/0", "1/0/0", "10/0/0", "0/3/0", "0/3/3", "1/3/3"]


class Bench(Field):
    """All of it against one primary."""

    def __init__(self, scratch, args, stack):
        super().__init__(scratch, stack, "wal_keep_size = 8GB\n")
        self.args, self.runs = args, []
        self.primary.pgbench("-i", "-s", str(args.scale), "-q")
        self.sides = [Side(name, self.primary, scratch / name, self.disks["standby"]) for name in args.sides]
        for side in self.sides:
            stack.enter_context(side.receiver)

    def warm_up(self):
        """A checkpoint, so that nobody has far to go after a restart; and, unmeasured, most of the page images that the first
        change of a page costs behind it."""
        self.primary.psql("CHECKPOINT")
        self.measure("off", 8)

    def measure(self, level, clients):
        """One run."""
        return self.pgbench(level, clients, self.args.seconds, ["-N", "-M", "prepared"])

    def side(self, side, condition, round_number):
        """Every level and number of clients with one side."""
        delay, slow_standby, slow_primary = (float(part) for part in condition.split("/"))
        self.slow(delay)
        side.start(self.port(delay))
        self.wait_for_standby(side.name)
        self.warm_up()
        side.wait()
        self.slow(delay, slow_standby, slow_primary)
        for clients in self.args.clients:
            for level in side.levels:
                if level not in PROMISING and delay:
                    continue
                found = dict(condition=condition, side=side.name, round=round_number, clients=clients, level=level,
                             **self.measure(level, clients))
                self.runs.append(found)
                print(f"{condition:>7} ms  {side.name:<13} {clients:>2} clients  {level:<12} {found['tps']:>8.0f} /s  "
                      f"p50 {found['p50_ms']:>7.2f}  p99 {found['p99_ms']:>7.2f} ms", flush=True)
        self.slow(delay)
        self.wait_for_standby("")
        side.receiver.stop()

    def run(self):
        """All conditions; in each round the sides begin with another one."""
        for condition in self.args.conditions:
            for number in range(self.args.rounds):
                first = number % len(self.sides)
                for side in self.sides[first:] + self.sides[:first]:
                    self.side(side, condition, number + 1)
        return self.runs


def table(runs):
    """Medians of the rounds."""
    sides = [side for side in SIDES if any(run["side"] == side for run in runs)]
    lines = [f"{'':31}" + "".join(f"{side:>26}" for side in sides),
             f"{'delay/standby/primary':<22}{'clients':>7}{'':2}" + "".join(f"{'':6}{'/s':>6}{'p50':>7}{'p99':>7}" for _ in sides)]
    keys = list(dict.fromkeys((run["condition"], run["clients"], run["level"]) for run in runs))
    for condition, clients, level in keys:
        line = f"{condition:>8} {level:<13}{clients:>7}{'':2}"
        for side in sides:
            mine = [run for run in runs if (run["condition"], run["clients"], run["level"], run["side"])
                    == (condition, clients, level, side)]
            if mine:
                middle = {name: statistics.median(run[name] for run in mine) for name in ("tps", "p50_ms", "p99_ms")}
                line += f"{'':6}{middle['tps']:>6.0f}{middle['p50_ms']:>7.2f}{middle['p99_ms']:>7.2f}"
            else:
                line += f"{'':5}{'–':>7}{'–':>7}{'–':>7}"
        lines.append(line)
    return "\n".join(lines)


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.sync", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--conditions", type=words, default=CONDITIONS, help=",".join(CONDITIONS))
    parser.add_argument("--clients", type=lambda text: [int(word) for word in words(text)], default=[1, 8, 32])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seconds", type=int, default=5, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=10, help="of pgbench")
    parser.add_argument("--smoke", action="store_true", help="a second of everything, small: shows that it works, no more")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-sync.json")
    args = parser.parse_args(argv)
    if args.smoke:
        args.conditions, args.clients, args.seconds, args.rounds, args.scale = ["0/0/0", "1/3/3"], [2], 1, 1, 1
    when = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        runs = Bench(Path(scratch), args, stack).run()
    result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                  command=" ".join(["python3 -m bench.sync", *argv]), seconds=args.seconds, scale=args.scale, runs=runs)
    print("\n" + table(runs))
    if args.save:
        save(result, args.save / f"{when:%Y-%m-%d}-sync.json")


if __name__ == "__main__":
    main(sys.argv[1:])
