"""What WAL that is sent before the primary has flushed it is worth: the early stream, beside stock's ways and beside itself.

    python3 -m bench.early [--conditions 0/0,10/3,async] [--loads small large] [--seconds 4] [--rounds 3] [--sides SIDE...]
                           [--standby-disk DIR] [--save DIR]

The sides are a stock standby, `pg_receivewal --synchronous`, and `walrider standby` behind our own sender twice: told to send
only what is flushed (walrider.early=off), and not.  Only one is there at a time; their order changes from round to round.  They
are made of new backups for each condition and load, and take turns of a few seconds, since the machine is another one after a
minute.  What `large` writes is too much for the others to catch up with: there each is made anew for its turn.

A condition is RTT/FSYNC or RTT/FSYNC/STANDBY: the network's round trip, and what each fsync of WAL takes longer on the primary,
and on the standby, in ms.  The delay is made by a proxy, 0 is without one; the fsync by a preloaded library that everybody has
in every condition.  Both ends share a disk, which the early stream asks for both fsyncs at once; --standby-disk gives the
standby one of its own, or memory, and then the condition's third number says what an fsync takes there.

`async` is another question: what an asynchronous load on the primary loses when somebody streams from it.  There the primary
and pgbench have one half of the processors and the standby the other, so that what the standby uses is not the primary's loss.
Runs with the side and without it, as side `none`, are pairs, one right after the other.

Loads: `small` is pgbench -N; `large` has transactions of about 36 kB of WAL, 80 rows of 8,000 bytes into one of 500 tables.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

from bench.commits import Field, Side, save
from bench.replay import commit, machine
from tests.lab import install
from tests.lab.loads.bank import PROMISING
from tests.lab.server import early_primary
from tests.lab.server.cluster import parse_lsn
from tests.lab.server.recovery import discard
from tests.lab.standby import standby

ASYNC = "async"
RTTS, FSYNCS = (0, 1, 10, 40), (0, 3, 10)
CONDITIONS = [f"{rtt}/{fsync}" for rtt, fsync in product(RTTS, FSYNCS)] + [ASYNC]
SIDES = dict(stock={}, pg_receivewal={},
             flushed=dict(kind="walrider", arguments=("--early", "on"), connection="-c walrider.early=off"),
             early=dict(kind="walrider", arguments=("--early", "on")))
NONE = "none"
# Of walrider.stat_early_stream.
COUNTERS = ("sent_bytes", "early_bytes", "buffers_bytes", "disk_bytes", "disk_reads", "wal_messages", "keepalives", "replies", "coalesced",
            "blocked", "sleeps", "polls", "commit_wakeups")
SETTINGS = "wal_keep_size = 256MB\ncheckpoint_timeout = 1h\n"
PRELOAD = "shared_preload_libraries = 'walrider'\n"

TABLES, ROWS, LENGTH = 500, 80, 8000
# Hexadecimal digits that do not repeat; pglz leaves of a value about as many bytes as this and a half more: 36 kB a transaction.
DIGITS = 256
# The values are compressed once, here, and stored again as they are: compression would be most of the primary's work.
LARGE_TABLES = f"""
CREATE TABLE filler AS
    SELECT substr(repeat(string_agg(md5(random()::text), ''), {LENGTH // DIGITS + 1}), 1, {LENGTH}) AS v
    FROM generate_series(1, {ROWS}) AS r, generate_series(1, {DIGITS // 32}) AS d GROUP BY r;
DO $$ BEGIN FOR t IN 1..{TABLES} LOOP EXECUTE format('CREATE TABLE large_%s (v text)', t); END LOOP; END $$;
"""
LARGE = f"\\set t random(1, {TABLES})\nINSERT INTO large_:t SELECT v FROM filler;\n"
EMPTY = f"DO $$ BEGIN EXECUTE (SELECT 'TRUNCATE ' || string_agg('large_' || t, ', ') FROM generate_series(1, {TABLES}) t); END $$;"
# What the first transaction in each table costs beside its rows: with a slow primary it was 2 kB of each in the first run that counts.
FIRST = f"DO $$ BEGIN FOR t IN 1..{TABLES} LOOP EXECUTE format('INSERT INTO large_%s SELECT v FROM filler', t); END LOOP; END $$"
# Of every page of the accounts and of their index the image that the first change behind a checkpoint costs.
IMAGES = "UPDATE pgbench_accounts SET filler = filler WHERE aid % 60 = 0"
CLIENTS = dict(small=16, large=32)


def children(pid):
    """The pids of a process's children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def processor_ms(pid, ended_children=False):
    """What a process has used of the processor; with what its children had that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15 if ended_children else 13])) * 1000 / os.sysconf("SC_CLK_TCK")


def io(pid):
    """/proc/PID/io."""
    return {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", Path(f"/proc/{pid}/io").read_text())}


def pin(pid, processors):
    """Give a process, its threads and its children these processors, as far as they have not ended meanwhile."""
    with suppress(FileNotFoundError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), processors)
    for child in children(pid):
        pin(child, processors)


class Observer:
    """Counters of both ends; what they have counted between two looks."""

    def __init__(self, primary, side):
        self.primary, self.side = primary, side

    def look(self):
        """All of them."""
        seen = dict(at=parse_lsn(self.primary.lsn()))
        postmaster = self.primary.process.pid
        if self.side:
            sender = standby.replication(self.primary, self.side.name)["pid"]
            seen.update(sender_ms=processor_ms(sender), sender_read=io(sender)["rchar"], writes=io(self.writer())["syscw"])
            if isinstance(self.side.receiver, standby.Walrider):
                spool = self.side.receiver.status()["spool"]
                seen.update(writes=spool["writes"], fsyncs=spool["fsyncs"])
                seen["view"] = early_primary.sender(self.primary, self.side.name)
        seen["primary_ms"] = processor_ms(postmaster, ended_children=True) + sum(map(processor_ms, children(postmaster)))
        return seen

    def writer(self):
        """The process at the other end that writes WAL."""
        receiver = self.side.receiver
        if not isinstance(receiver, standby.Stock):
            return receiver.process.pid
        named = lambda pid: Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return next(pid for pid in children(receiver.process.pid) if "walreceiver" in named(pid))

    @staticmethod
    def between(before, after, commits):
        """What a run took, per commit, and per MB (10^6 bytes) of WAL."""
        used = {name: after[name] - before[name] for name in after if name != "view"}
        wal = used["at"] / 1e6
        found = dict(wal_bytes_per_commit=round(used["at"] / commits), primary_ms_per_commit=round(used["primary_ms"] / commits, 4))
        if "sender_ms" in used:
            found.update(sender_ms_per_commit=round(used["sender_ms"] / commits, 4), sender_read_bytes=used["sender_read"],
                         writes_per_mb=round(used["writes"] / wal, 1))
        if "fsyncs" in used:
            found["fsyncs_per_mb"] = round(used["fsyncs"] / wal, 1)
            found["sender"] = {name: after["view"][name] - before["view"][name] for name in COUNTERS}
        return found


class Bench(Field):
    """All of it against one primary."""

    def __init__(self, scratch, args, stack):
        ours = {"flushed", "early"} & set(args.sides)
        super().__init__(scratch, stack, SETTINGS + (PRELOAD if ours else ""))
        self.args, self.runs = args, []
        self.standbys = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.standby_disk or scratch)))
        if ours:
            self.primary.psql("CREATE EXTENSION walrider")
        self.primary.psql(LARGE_TABLES)
        script = scratch / "large.sql"
        script.write_text(LARGE)
        self.loads = dict(small=["-N", "-M", "prepared"], large=["-f", script])

    def make(self, names, load, stack):
        """The tables as they were at first, sides made anew, and behind them page images, a transaction in each large table, and a run that does not count."""
        self.primary.pgbench("-i", "-s", self.args.scale, "-q")
        self.primary.psql(f"{EMPTY}; CHECKPOINT")
        sides = []
        for name in names:
            directory = self.standbys / name
            stack.callback(discard, directory)
            sides.append(Side(name, self.primary, directory, self.disks["standby"], **SIDES[name]))
            stack.enter_context(sides[-1].receiver)
        self.primary.psql(IMAGES, options="-c synchronous_commit=off")
        if load == "large":
            self.primary.psql(FIRST, options="-c synchronous_commit=off")
        self.measure("off", load, 1)
        return sides

    def measure(self, level, load, seconds):
        """One run of pgbench."""
        return self.pgbench(level, self.args.clients or CLIENTS[load], seconds, self.loads[load])

    def turn(self, side, condition, load, round_number):
        """Every level with one side."""
        rtt, fsync, standby_fsync = (*map(float, condition.split("/")), 0.0)[:3]
        self.slow(rtt / 2)
        side.start(self.port(rtt))
        self.wait_for_standby(side.name)
        self.slow(rtt / 2, standby_fsync, fsync)
        for level in PROMISING:
            if level in side.levels:
                side.wait()
                self.record(side, condition=condition, load=load, level=level, side=side.name, round=round_number)
        self.slow()
        self.wait_for_standby("")
        side.receiver.stop()

    def record(self, receiving, **what):
        """One run, with what both ends counted meanwhile; `receiving` is a side or None."""
        observer = Observer(self.primary, receiving)
        before = observer.look()
        found = self.measure(what["level"], what["load"], self.args.seconds)
        found.update(observer.between(before, observer.look(), found["commits"]))
        self.runs.append(dict(what, **found))
        print(f"{what['condition']:>7}  {what['load']:<5}  {what['level']:<12}  {what['side']:<13} {found['tps']:>7.0f} /s  "
              f"p50 {found['p50_ms']:>7.2f}  p99 {found['p99_ms']:>7.2f} ms  {found['wal_bytes_per_commit']:>6} bytes of WAL", flush=True)

    def pairs(self, side, load, round_number):
        """With the side and without it, in turn; which of the two is first changes."""
        with self.halves() as there:
            for pair in range(self.args.pairs):
                what = dict(condition=ASYNC, load=load, level="off", round=round_number, pair=pair, beside=side.name)
                for attached in (True, False) if pair % 2 else (False, True):
                    if attached and not side.receiver.process:
                        side.start(self.primary.port)
                    elif not attached and side.receiver.process:
                        side.receiver.stop()
                    if attached:
                        pin(side.receiver.process.pid, there)
                        side.wait()
                    self.record(side if attached else None, side=side.name if attached else NONE, **what)
            if side.receiver.process:
                side.receiver.stop()

    @contextmanager
    def halves(self):
        """The processors shared out: primary and pgbench have one half, the other is returned; and taken back."""
        every = sorted(os.sched_getaffinity(0))
        here, there = set(every[:len(every) // 2]) or set(every), set(every[len(every) // 2:])
        ours = (os.getpid(), self.primary.process.pid)
        for pid in ours:
            pin(pid, here)
        try:
            yield there
        finally:
            for pid in ours:
                pin(pid, set(every))

    def rounds(self, condition, load):
        """All sides in turn; in each round another one is the first."""
        names = self.args.sides
        together = condition != ASYNC and load != "large"
        with ExitStack() as stack:
            made = {side.name: side for side in self.make(names, load, stack)} if together else {}
            for number in range(self.args.rounds):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    with ExitStack() as alone:
                        side = made[name] if together else self.make([name], load, alone)[0]
                        if condition == ASYNC:
                            self.pairs(side, load, number + 1)
                        else:
                            self.turn(side, condition, load, number + 1)

    def run(self):
        """All conditions; false if somebody interrupts it."""
        try:
            for condition, load in product(self.args.conditions, self.args.loads):
                self.rounds(condition, load)
        except KeyboardInterrupt:
            return False
        return True


class Medians:
    """Of the rounds: `of(side)` for one condition, load and level."""

    def __init__(self, runs, condition, load, level):
        self.runs = [run for run in runs if (run["condition"], run["load"], run["level"]) == (condition, load, level)]

    def of(self, side, figure):
        """The median, None where there is none."""
        found = [run[figure] for run in self.runs if run["side"] == side and figure in run]
        return statistics.median(found) if found else None


def cost(runs):
    """What an asynchronous load keeps of its rate and takes of the processor beside each side: quartiles of the pairs."""
    pairs = {}
    for run in runs:
        if run["condition"] == ASYNC:
            at = pairs.setdefault((run["load"], run["beside"]), {}).setdefault((run["round"], run["pair"]), {})
            at[run["side"] == NONE] = run
    lines = []
    for (load, side), found in pairs.items():
        line = f"{load:<6}{side:<14}"
        for figure in ("tps", "primary_ms_per_commit"):
            ratios = [pair[False][figure] / pair[True][figure] for pair in found.values()]
            line += cells(statistics.quantiles(ratios, n=4, method="inclusive"), ((9, ".3f"),) * 3) + "   "
        lines.append(line + f"{len(found):>4}")
    title = f"{'':20}{'commits per second':>27}   {'processor per commit':>27}   pairs"
    return "\n".join(["with a sender, of what it is without: quartiles of the pairs", title, *lines]) if lines else ""


def beside_stock(runs):
    """Each side's rate of stock's in the same round, quartiles, where there are rounds enough for such."""
    rounds = {}
    for run in runs:
        if run["condition"] != ASYNC:
            key = f"{run['condition']:>8}  {run['load']:<6}{run['level']:<14}"
            rounds.setdefault(key, {}).setdefault(run["round"], {})[run["side"]] = run["tps"]
    lines = []
    for (key, found), side in product(rounds.items(), SIDES):
        ratios = [sides[side] / sides["stock"] for sides in found.values() if side != "stock" and {side, "stock"} <= set(sides)]
        if len(ratios) >= 4:
            line = cells(statistics.quantiles(ratios, n=4, method="inclusive"), ((9, ".3f"),) * 3)
            lines.append(f"{key}{side:<14}{line}{len(ratios):>6}")
    return "\n".join(["rate of stock's in the same round: quartiles of the rounds", *lines]) if lines else ""


def slower(runs):
    """What early reaches of the slower of the same round trip alone and the same fsync alone: all that is to be paid."""
    conditions = dict.fromkeys(run["condition"] for run in runs)
    rows = [(one, f"{one.split('/')[0]}/0", f"0/{one.split('/')[1]}") for one in conditions if one.count("/") == 1]
    rows = [row for row in rows if row[0] not in row[1:] and set(row[1:]) <= set(conditions)]
    lines = []
    for (both, way, flush), load in product(rows, dict.fromkeys(run["load"] for run in runs)):
        line = f"{both:>8}  {load:<6}"
        for level in PROMISING:
            rates = [Medians(runs, condition, load, level).of("early", "tps") for condition in (both, way, flush)]
            line += cells([rates[0] / min(rates[1:]) if all(rates) else None], ((14, ".2f"),))
        lines.append(line)
    title = "early's rate, of the lesser of those with this round trip alone and this fsync alone"
    return "\n".join([title, " " * 16 + "".join(f"{level:>14}" for level in PROMISING), *lines]) if lines else ""


def cells(values, shape):
    """One column; a dash for what is not known."""
    return "".join(f"{'–' if value is None else format(value, form):>{width}}" for value, (width, form) in zip(values, shape))


def table(runs):
    """What commits cost, and then what they took: medians of the rounds."""
    keys = list(dict.fromkeys((run["condition"], run["load"], run["level"]) for run in runs))
    sides = list(dict.fromkeys(run["side"] for run in sorted(runs, key=lambda run: [NONE, *SIDES].index(run["side"]))))
    title = lambda columns, width: f"{'rtt/fsync':<8}{'':22}" + "".join(f"{side:>{width}}" for side in columns)
    ratio = [("early", other) for other in ("stock", "flushed") if {"early", other} <= set(sides)]
    lines = ["commits per second, p50 and p99 in ms", title(sides, 25) + "".join(f"  /{other}" for _, other in ratio)]
    for key in keys:
        found = Medians(runs, *key)
        line = f"{key[0]:>8}  {key[1]:<6}{key[2]:<14}"
        for side in sides:
            line += cells([found.of(side, name) for name in ("tps", "p50_ms", "p99_ms")], ((9, ".0f"), (8, ".2f"), (8, ".2f")))
        for one, other in ratio:
            if found.of(one, "tps") and found.of(other, "tps"):
                line += f"{found.of(one, 'tps') / found.of(other, 'tps'):>{len(other) + 3}.2f}"
        lines.append(line)
    shape = ((8, ".2f"), (8, ".3f"), (9, ".1f"), (9, ".1f"), (8, ".1f"))
    lines += ["", "processor of the primary's processes and of the sender in ms per commit, WAL that the sender read from files in MB,",
              "the standby's write calls and fsyncs per MB of WAL", title([side for side in sides], 42)]
    for key in keys:
        found = Medians(runs, *key)
        line = f"{key[0]:>8}  {key[1]:<6}{key[2]:<14}"
        for side in sides:
            read = found.of(side, "sender_read_bytes")
            line += cells([found.of(side, "primary_ms_per_commit"), found.of(side, "sender_ms_per_commit"),
                           None if read is None else read / 1e6, found.of(side, "writes_per_mb"), found.of(side, "fsyncs_per_mb")], shape)
        lines.append(line)
    return "\n".join(lines)


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.early", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conditions", type=lambda text: text.split(","), default=CONDITIONS, help=",".join(CONDITIONS))
    parser.add_argument("--loads", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--clients", type=int, help=" and ".join(f"{count} for {load}" for load, count in CLIENTS.items()))
    parser.add_argument("--seconds", type=int, default=2, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5, help="of runs of async, in each round; two at least")
    parser.add_argument("--scale", type=int, default=10, help="of pgbench")
    parser.add_argument("--standby-disk", type=Path, metavar="DIR", help="a directory on another disk than that of TMPDIR")
    parser.add_argument("--smoke", action="store_true", help="a second of everything, small: shows that it works, no more")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-early.json and the table in .txt")
    args = parser.parse_args(argv)
    if args.smoke:
        args.clients, args.seconds, args.rounds, args.scale, args.pairs = 2, 1, 1, 1, 2
        args.conditions = ["4/3", ASYNC] if args.conditions is CONDITIONS else args.conditions
    when = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        bench = Bench(Path(scratch), args, stack)
        complete, runs = bench.run(), bench.runs
    result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                  command=" ".join(["python3 -m bench.early", *argv]), seconds=args.seconds, scale=args.scale,
                  clients={load: args.clients or CLIENTS[load] for load in args.loads}, complete=complete, runs=runs)
    text = "\n\n".join(filter(None, ["" if complete else "interrupted", table(runs), beside_stock(runs), slower(runs), cost(runs)]))
    print("\n" + text)
    if args.save:
        name = f"{when:%Y-%m-%d}-early"
        save(result, args.save / f"{name}.json")
        (args.save / f"{name}.txt").write_text(f"{result['machine']}; PostgreSQL {result['postgresql']}; {result['commit']}\n"
                                               f"{result['command']}\n\n{text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
