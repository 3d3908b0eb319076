"""Recovery on volumes that limit requests, in less memory than the database has, by PostgreSQL and by Walrider in turn.

    python3 -m bench.volume [--size SHARE] [--volumes NAME...] [--wal TIMES...] [--images off on] [--rounds N] [--save DIR]

The data directory is on a volume of its own (bench.device); the WAL is elsewhere, as an archive is, and not limited.  Everything that a
side uses, the page cache included, is limited together (bench.cgroup).  Each run begins with an empty volume: the backup is copied onto
it, which is timed, it is mounted anew, and then recovered to a restore point and promoted, until PostgreSQL accepts connections.

    PostgreSQL      postgres with recovery_prefetch, maintenance_io_concurrency = 64 and a background writer that keeps up
    replay          walrider replay, and then postgres
    restore         walrider restore of the backup, which nobody has copied before, and then postgres
    restore-apart   the same with --spill-dir on another disk; only if asked for

Walrider's pages are durable by then, PostgreSQL's need not be.  What takes longer than --limit is stopped; told is the share of the WAL
that it got through.  After the first round both directories are compared, page by page.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from tests.lab import install, walrider
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, ServerError, copy_tree, parse_lsn

from . import measure, volume_load
from .cgroup import Group
from .device import Volume
from .measure import MB
from .replay import FIXTURES, SMOKE_SIZE, commit, machine, nameless
from .volume_probe import Watch, probe
from .volume_table import table

# Requests and bytes a second, and how many microseconds each takes.
VOLUMES = {"3000": (3_000, 125_000_000, 0), "16000": (16_000, 1_000_000_000, 0), "none": (0, 0, 0),
           "5ms": (16_000, 1_000_000_000, 5_000)}
MEMORY = 512 * MB       # for everything, at full size
LEAST_MEMORY = 128 * MB
# As recovery is configured with care: reads ahead, another process that writes, no restartpoint before the end. No segment is written
# over: the fixture has it, too.
SETTINGS = dict(recovery.REPLAY_SETTINGS, fsync="on", autovacuum="off", max_wal_senders="0", recovery_prefetch="on",
                maintenance_io_concurrency="64", bgwriter_lru_maxpages="1000", bgwriter_delay="10ms",
                log_startup_progress_interval="1s", wal_recycle="off")
# The files in which alone two directories may differ: their last checkpoints were made at different times, and behind other records.
MAY_DIFFER = {"global/pg_control", "pg_wal"}
READY = r"(?m)LOG:  database system is ready to accept connections$"
PROGRESS = r"LOG:  redo in progress, elapsed time: [\d.]+ s, current LSN: ([0-9A-F/]+)"


class Stopped(Exception):
    """A side took too long; how far it had replayed by then, as far as it has told."""

    def __init__(self, told):
        super().__init__(told)
        self.replayed = parse_lsn(told[-1]) if told else 0


class Recovery:
    """One directory to recover, and what it has."""

    def __init__(self, server, fixture, point, scratch, memory, limit):
        self.server, self.archive, self.backup, self.point = server, fixture / "archive", fixture / "backup", point
        self.scratch, self.memory = scratch, memory
        self.deadline = time.monotonic() + limit

    def ready(self, watch):
        """Start PostgreSQL, and wait until it accepts connections."""
        server = self.server
        server.launch(**dict(SETTINGS, shared_buffers=f"{self.memory // MB}MB"))
        while not server.log_matches(READY):
            watch(server.process.pid, *server.children())
            if server.process.poll() is not None:
                raise ServerError(f"the server ended\n{server.log_tail()}")
            if time.monotonic() > self.deadline:
                raise Stopped(server.log_matches(PROGRESS))
            time.sleep(0.02)


def postgresql(run, watch):
    """Stock recovery from pg_wal."""
    run.ready(watch)
    return dict(redo_seconds=recovery.timings(run.server).redo_seconds)


def replay(run, watch, *command):
    """walrider replay from the archive, and PostgreSQL on what it leaves."""
    begun = time.monotonic()
    with open(run.scratch / "said", "w+") as said:
        process = walrider.start(*command or ["replay"], "--data-dir", run.server.data_dir, "--wal", run.archive, "--jobs", os.cpu_count(),
                                 "--memory", f"{run.memory // MB}MB", "--json", "--positions", stdout=said)
        try:
            while process.poll() is None and time.monotonic() < run.deadline:
                watch(process.pid)
                time.sleep(0.02)
        finally:
            process.kill()
            complaint = process.communicate()[1]
        said.seek(0)
        lines = [json.loads(line) for line in said]
    if process.returncode == -9:
        raise Stopped([line["replayed_lsn"] for line in lines])
    if process.returncode != walrider.DONE:
        raise ServerError(f"walrider: exit {process.returncode}\n{complaint}")
    kept = {name: value for name, value in lines[-1].items() if not name.endswith(("lsn", "version", "written"))}
    kept.update(own_total_seconds=kept.pop("total_seconds"), replay_seconds=time.monotonic() - begun)
    run.server.configure("archive_mode = off", "postgresql.auto.conf")
    run.ready(watch)
    return kept


def restore(run, watch, *options):
    """walrider restore, from the backup to the same point, and PostgreSQL on what it leaves."""
    return replay(run, watch, "restore", "--backup", run.backup, "--target-name", run.point, "--promote", *options)


def restore_apart(run, watch):
    """The same with the temporary file on another disk, which is not limited."""
    return restore(run, watch, "--spill-dir", run.scratch)


SIDES = {"PostgreSQL": postgresql, "replay": replay, "restore": restore, "restore-apart": restore_apart}


class Bench:
    """One fixture, on every volume, with every amount of WAL."""

    def __init__(self, fixture, info, scratch, volume, args):
        self.fixture, self.info, self.scratch, self.volume, self.args = fixture, info, scratch, volume, args
        self.group = Group(args.memory * MB if args.memory else max(LEAST_MEMORY, int(MEMORY * args.size) // MB * MB))

    def conditions(self):
        """Every (volume, amount of WAL); where nothing can be limited, only what needs no limit."""
        return [(name, amount) for amount in self.args.wal for name in self.args.volumes
                if self.volume.can_limit or not any(VOLUMES[name])]

    def prepare(self, side, amount):
        """A server on a fresh copy of the backup, on the volume as it is limited now."""
        point = volume_load.restore_point(amount)
        if side.startswith("restore"):
            return PgCluster(self.volume.path / "data")
        server = recovery.prepare(self.fixture / "backup", self.fixture / "archive", self.volume.path / "data",
                                  target=("name", point), action="promote")
        self.volume.sync()
        if side == "PostgreSQL":
            # Segments beyond the target would be removed at the promotion.
            own, end = self.scratch / "pg_wal", parse_lsn(self.info["ends"][point])
            last = f"{1:08X}{end >> 32:08X}{(end & 0xFFFFFFFF) // (16 * MB):08X}"
            own.mkdir()
            for file in measure.segments(self.fixture / "archive"):
                if file.name <= last:
                    os.link(file, own / file.name)
            shutil.rmtree(server.data_dir / "pg_wal")
            (server.data_dir / "pg_wal").symlink_to(own)
            server.configure("restore_command = 'false'", "postgresql.auto.conf")
        return server

    def one(self, side, name, amount, kept):
        """One recovery; a copy of what has come of it in `kept`, if wanted."""
        found = dict(side=side, volume=name, wal=amount, images=self.info["images"])
        self.volume.fresh(self.info["grown_bytes"] * 2 + 3 * self.info["wal_bytes"][volume_load.restore_point(amount)] + 512 * MB,
                          VOLUMES[name][2] > 0)
        try:
            self.volume.limit(*VOLUMES[name])
            with self.group.entered({}):
                begun = time.monotonic()
                server = self.prepare(side, amount)
                found["unpack_seconds"] = time.monotonic() - begun
            self.volume.limit()
            self.volume.forget()
            measure.drop_cache(self.fixture / "archive")
            measure.drop_cache(self.fixture / "backup")
            if server.data_dir.exists():
                measure.drop_cache(server.data_dir)
            self.volume.limit(*VOLUMES[name])
            with self.group.entered(found), measure.usage(found), server:
                self.recover(side, server, amount, found)
                self.volume.limit()
                if found["finished"]:
                    server.stop("fast")
            if kept and found["finished"]:
                copy_tree(server.data_dir, kept)
        finally:
            self.volume.limit()
            recovery.discard(self.volume.path / "data")
            shutil.rmtree(self.scratch / "pg_wal", ignore_errors=True)
        return found

    def recover(self, side, server, amount, found):
        """The clock runs."""
        point, memory = volume_load.restore_point(amount), self.group.limit // 2
        run = Recovery(server, self.fixture, point, self.scratch, memory, self.args.limit)
        before, watch, begun = self.volume.counts(), Watch(self.volume), time.monotonic()
        try:
            found.update(SIDES[side](run, watch), finished=True)
        except Stopped as stopped:
            share = max(0, stopped.replayed - self.info["start"]) / self.info["wal_bytes"][point]
            found.update(finished=False, share=share)
        found.update(seconds=time.monotonic() - begun, load_average=os.getloadavg()[0])
        found.update({f"device_{key}": value - before[key] for key, value in self.volume.counts().items()}, **watch.found())

    def run(self, runs, save):
        """All rounds: the sides take turns, right after one another."""
        for number in range(self.args.rounds):
            for name, amount in self.conditions():
                of = {}
                for side in self.args.sides[number % 2:] + self.args.sides[:number % 2]:
                    kept = self.scratch / f"kept-{side}" if number == 0 else None
                    of[side] = self.one(side, name, amount, kept)
                    runs.append(of[side])
                    print(said(of[side]), flush=True)
                    save()
                if number == 0:
                    self.compare(of)
                    save()

    def compare(self, of):
        """The directories of those that finished with the first one's, page by page."""
        first, *others = [side for side in of if of[side]["finished"]] or [None]
        for side in others:
            of[side]["compared_pages"] = equal_pages(self.scratch / f"kept-{side}", self.scratch / f"kept-{first}")
            print(f"  {of[side]['compared_pages']} pages of {side} are those of {first}", flush=True)
        recovery.discard(*(self.scratch / f"kept-{side}" for side in of))


def equal_pages(ours, theirs):
    """How many pages two directories have; raises unless they hold the same."""
    result = walrider.walrider("compare", ours, theirs)
    differ = [found["file"] for found in result.json["first"]]
    if not set(differ) <= MAY_DIFFER or result.json["differences"] > len(differ) or not result.json["pages"]:
        raise AssertionError(f"{ours} and {theirs} differ\n{json.dumps(result.json, indent=1)[:4000]}\n{result.stderr}")
    return result.json["pages"]


def said(run):
    """A run in a line."""
    end = "" if run["finished"] else f", stopped after {run['share']:.1%} of the WAL"
    return (f"images {'on' if run['images'] else 'off'}, WAL {run['wal']:g} x, volume {run['volume']}: {run['side']} "
            f"{run['seconds']:.1f} s{end}")


def main(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.volume", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="directory that keeps the loads' WAL; made when missing")
    parser.add_argument("--size", type=float, default=1.0, help="share of 2.4 GB of data and 512 MB of memory")
    parser.add_argument("--memory", type=int, metavar="MB", help="for everything, in place of that")
    parser.add_argument("--volumes", nargs="+", choices=list(VOLUMES), default=list(VOLUMES), metavar="NAME", help=", ".join(VOLUMES))
    parser.add_argument("--wal", nargs="+", type=float, default=[0.1, 1, 4], metavar="TIMES", help="the database; default 0.1 1 4")
    parser.add_argument("--images", nargs="+", choices=["off", "on"], default=["off", "on"], help="full_page_writes")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["PostgreSQL", "replay", "restore"], metavar="SIDE", help=", ".join(SIDES))
    parser.add_argument("--limit", type=float, default=1200, metavar="SECONDS", help="what takes longer is stopped; default 1200")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="one round of a small fixture, without limits where there is no device")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep every run in DIR/DATE-volume.json, the table in .txt")
    parser.add_argument("--label", help="-LABEL in these names")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.size, args.fixtures, args.wal = 1, SMOKE_SIZE / 2, args.fixtures / "smoke", [0.2]
    args.fixtures.mkdir(parents=True, exist_ok=True)
    when = datetime.now(timezone.utc)
    result = dict(when=when.isoformat(timespec="seconds"), machine=machine(), commit=commit(), postgresql=install.version(),
                  command=" ".join(["python3 -m bench.volume", *map(nameless, argv)]), volumes={}, loads=[], runs=[])
    name = f"{when:%Y-%m-%d}-volume" + (f"-{args.label}" if args.label else "")

    def save():
        """After each run: all of them take hours."""
        if args.save:
            (args.save / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            (args.save / f"{name}.txt").write_text(table(result))

    with tempfile.TemporaryDirectory(dir=args.fixtures, prefix="run-") as scratch:
        volume = Volume(Path(scratch) / "volume")
        result["on"] = volume.about()
        result["volumes"] = {which: dict(limit=VOLUMES[which], **probe(volume, VOLUMES[which])) for which in args.volumes}
        for images in (which == "on" for which in args.images):
            fixture = args.fixtures / volume_load.name(images, args.size)
            info = volume_load.make(fixture, images, args.size, args.wal)
            before = {file: file.stat().st_mtime_ns for file in measure.segments(fixture / "archive")}
            bench = Bench(fixture, info, Path(scratch), volume, args)
            result["memory"], result["group"] = bench.group.limit, bench.group.path is not None
            result["loads"].append(info)
            bench.run(result["runs"], save)
            if before != {file: file.stat().st_mtime_ns for file in measure.segments(fixture / "archive")}:
                raise SystemExit(f"error: {fixture.name}: a recovery changed the fixture's WAL")
    print("\n" + table(result))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
