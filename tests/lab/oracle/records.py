"""The table of record types, docs/records.md, and what is in some WAL, as pg_waldump and we tell it."""

from collections import Counter
from dataclasses import dataclass

from tests.lab.install import ROOT, program
from tests.lab.server.cluster import run
from tests.lab.walrider import walrider


@dataclass(frozen=True)
class RecordType:
    """A row of the table, as far as the tests of the load need it."""

    rmgr: str
    name: str
    maker: str      # a step of the mixed load, `mark`, or a test; empty: nobody writes it


def table():
    """The rows of docs/records.md; crates/wal/tests/record_types.rs holds its other columns against the code."""
    rows, rmgr = [], None
    for line in (ROOT / "docs" / "records.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("## "):
            rmgr = line.split(" ", 2)[2]
        elif len(cells) == 8 and (cells[1].startswith("0x") or cells[1] == "any"):
            rows.append(RecordType(rmgr, cells[2], cells[5].strip("`–")))
    return rows


def types_between(archive, start=None, end=None):
    """The (resource manager, type) pairs of the records between two positions."""
    limits = [f"--{name}={lsn}" for name, lsn in (("start", start), ("end", end)) if lsn]
    types = walrider("wal", "stats", archive, *limits).expect().json["types"]
    return {(entry["rmgr"], entry["type"]) for entry in types if entry["count"] > 0}


def types_by_step(archive, targets):
    """{step: pairs} of a mixed load's WAL, from the places it marked; `mark` for what the marks themselves wrote."""
    steps = {"mark": set()}
    for before, target in zip(targets, targets[1:]):
        steps[target["name"]] = types_between(archive, before["lsn"], target["ended"])
        steps["mark"] |= types_between(archive, target["ended"], target["lsn"])
    return steps


def timelines(archive):
    """The segments of each timeline."""
    segments = sorted(file for file in archive.iterdir() if len(file.name) == 24)
    return [[segment for segment in segments if segment.name.startswith(timeline)]
            for timeline in sorted({segment.name[:8] for segment in segments})]


def waldump(segments, *options):
    """What pg_waldump says of segments that follow one another. It fails at the end of the WAL, whatever it said."""
    return run([program("pg_waldump"), "-p", segments[0].parent, *options, segments[0].name, segments[-1].name],
               check=False).stdout


def waldump_types(archive):
    """What pg_waldump counts of each type, over all timelines: as the entries of `wal stats --json`."""
    totals = {}
    for segments in timelines(archive):
        for line in waldump(segments, "--stats=record").splitlines():
            words = line.replace("(", " ").replace(")", " ").split()
            if len(words) >= 9 and "/" in words[0]:
                total = totals.setdefault(tuple(words[0].split("/", 1)), Counter())
                for key, place in (("count", 1), ("record_bytes", 3), ("fpi_bytes", 5), ("total_bytes", 7)):
                    total[key] += int(words[place])
    return totals
