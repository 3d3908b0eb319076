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
import json
import re
import statistics
import sys
import tempfile
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from bench.replay import commit, machine
from tests.harness import install, standby
from tests.harness.bank import LEVELS, PROMISING
from tests.harness.proxy import Proxy
from tests.harness.shim import Disk

SIDES = ("walrider", "stock", "pg_receivewal")
CONDITIONS = ["0/0/0", "1/0/0", "10/0/0", "0/3/0", "0/3/3", "1/3/3"]
SETTINGS = """
max_connections = 100
shared_buffers = 512MB
wal_keep_size = 8GB
max_wal_size = 8GB
min_wal_size = 1GB
autovacuum = off
log_replication_commands = off
synchronous_standby_names = ''
"""


class ReceiveWal(standby.Standby):
    """pg_receivewal --synchronous; it acknowledges no apply."""

    levels = tuple(level for level in LEVELS if level != "remote_apply")

    def __init__(self, directory, disk):
        super().__init__(directory)
        self.data_dir.mkdir(parents=True)
        self.disk, self.port = disk, None

    def start(self):
        """Receive from where the directory ends."""
        self.spawn([install.program("pg_receivewal"), "-D", self.data_dir, "--synchronous", "--no-loop",
                    "-d", standby.conninfo(self.port, "pg_receivewal")], self.disk.environment())
        return self


class Side:
    """One of those that are compared."""

    def __init__(self, name, primary, scratch, disk):
        self.name, self.primary = name, primary
        if name == "pg_receivewal":
            self.receiver, self.levels, self.stage = ReceiveWal(scratch / name / "pg_wal", disk), ReceiveWal.levels, "flush"
        else:
            directory = standby.clone(primary, scratch / name, name=name)
            self.receiver, self.levels, self.stage = standby.KINDS[name](directory, disk=disk), LEVELS, "replay"

    def start(self, port):
        """Connect it to this port, and wait until it has all that it missed."""
        if self.name == "pg_receivewal":
            self.receiver.port = port
        else:
            standby.point(self.receiver.data_dir, port, self.name)
        self.receiver.start()
        try:
            standby.wait_streaming(self.primary, self.name, 120)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.receiver.log_tail()}") from error
        standby.wait_position(self.primary, stage=self.stage, name=self.name, timeout=300)


class Bench:
    """All of it against one primary."""

    def __init__(self, scratch, args, stack):
        self.scratch, self.args, self.runs = scratch, args, []
        self.disks = {name: Disk(scratch / f"shim-{name}", "pg_wal/") for name in ("primary", "standby")}
        self.primary = standby.make_primary(scratch / "primary", SETTINGS, wal_segsize_mb=16)
        self.primary.own_environment = self.disks["primary"].environment()
        stack.enter_context(standby.start_primary(self.primary))
        self.primary.pgbench("-i", "-s", str(args.scale), "-q")
        self.sides = [Side(name, self.primary, scratch, self.disks["standby"]) for name in args.sides]
        for side in self.sides:
            stack.enter_context(side.receiver)
        self.network = stack.enter_context(Proxy(self.primary.port))

    def wait_for_standby(self, name):
        """Make commits wait for this standby, and see that they do."""
        self.primary.psql(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'", options=standby.LOCALLY)
        self.primary.psql("SELECT pg_reload_conf()")
        standby.wait_for(lambda: not name or standby.replication(self.primary, name)["sync_state"] == "sync", f"{name} is sync")

    def warm_up(self):
        """A checkpoint, so that nobody has far to go after a restart; and, unmeasured, most of the page images that the first
        change of a page costs behind it."""
        self.primary.psql("CHECKPOINT")
        self.pgbench("off", 8)

    def pgbench(self, level, clients):
        """One run: commits per second, and the latencies in ms."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as logs:
            said = standby.run([install.program("pgbench"), "-N", "-n", "-M", "prepared", "-c", clients, "-j", min(clients, 2),
                                "-T", self.args.seconds, "-l", "--log-prefix", f"{logs}/log", "postgres"],
                               env=dict(self.primary.environment(), PGOPTIONS=f"-c synchronous_commit={level}")).stdout
            latencies = sorted(int(line.split()[2]) / 1000 for file in Path(logs).iterdir() for line in file.read_text().splitlines())
        at = lambda share: round(latencies[min(len(latencies) - 1, int(share * len(latencies)))], 3)
        return dict(tps=round(float(re.search(r"^tps = ([\d.]+)", said, re.MULTILINE)[1]), 1), commits=len(latencies),
                    p50_ms=at(0.5), p90_ms=at(0.9), p99_ms=at(0.99), max_ms=at(1))

    def side(self, side, condition, round_number):
        """Every level and number of clients with one side."""
        delay, slow_standby, slow_primary = (float(part) for part in condition.split("/"))
        self.network.delay(up_ms=delay, down_ms=delay)
        self.disks["standby"].fsync_takes(0)
        self.disks["primary"].fsync_takes(0)
        side.start(self.network.port if delay else self.primary.port)
        self.wait_for_standby(side.name)
        self.warm_up()
        standby.wait_position(self.primary, stage=side.stage, name=side.name)
        self.disks["standby"].fsync_takes(slow_standby)
        self.disks["primary"].fsync_takes(slow_primary)
        for clients in self.args.clients:
            for level in side.levels:
                if level not in PROMISING and delay:
                    continue
                found = dict(condition=condition, side=side.name, round=round_number, clients=clients, level=level,
                             **self.pgbench(level, clients))
                self.runs.append(found)
                print(f"{condition:>7} ms  {side.name:<13} {clients:>2} clients  {level:<12} {found['tps']:>8.0f} /s  "
                      f"p50 {found['p50_ms']:>7.2f}  p99 {found['p99_ms']:>7.2f} ms", flush=True)
        self.disks["standby"].fsync_takes(0)
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
        file = args.save / f"{when:%Y-%m-%d}-sync.json"
        # A line for each run: hundreds of them.
        rows = ",\n  ".join(json.dumps(run) for run in result.pop("runs"))
        file.write_text(json.dumps(result, indent=1)[:-2] + f',\n "runs": [\n  {rows}\n ]\n}}\n')
        json.loads(file.read_text())
        print(f"kept: {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
