"""The table of record types, docs/records.md, and what pg_waldump counts."""

from dataclasses import dataclass

from .install import ROOT
from .walrider import walrider


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


def waldump_types(text):
    """`pg_waldump --stats=record` as the list that `wal stats --json` gives under "types"."""
    types = []
    for line in text.splitlines():
        words = line.replace("(", " ").replace(")", " ").split()
        if len(words) >= 9 and "/" in words[0]:
            name, kind = words[0].split("/", 1)
            types.append({"rmgr": name, "type": kind, "count": int(words[1]), "record_bytes": int(words[3]),
                          "fpi_bytes": int(words[5]), "total_bytes": int(words[7])})
    return types
