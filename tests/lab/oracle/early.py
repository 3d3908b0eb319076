"""Whether a standby has the primary's WAL and pages byte by byte, and how far a reader of its WAL gets."""

import re
import shutil
from pathlib import Path

from tests.lab.install import program
from tests.lab.server.cluster import format_lsn, parse_lsn, run
from tests.lab.server.early_primary import flushed
from tests.lab.standby import standby
from tests.lab.walrider import walrider

SEGMENT, PAGE = 1 << 20, 8192       # of standby.make_primary
# Of the control file, what a primary and its standby differ in.
OWN = ("state", "minRecoveryPoint", "minRecoveryPointTLI")


def segment_name(lsn, timeline=1):
    """The file that a position lies in."""
    per_id = (1 << 32) // SEGMENT
    return f"{timeline:08X}{lsn // SEGMENT // per_id:08X}{lsn // SEGMENT % per_id:08X}"


def wal(data_dir, start, end, timeline=1):
    """The bytes of a range, from pg_wal."""
    found = bytearray()
    while start < end:
        upto = min(end, start // SEGMENT * SEGMENT + SEGMENT)
        with open(Path(data_dir) / "pg_wal" / segment_name(start, timeline), "rb") as file:
            file.seek(start % SEGMENT)
            part = file.read(upto - start)
        assert len(part) == upto - start, f"{file.name} is short"
        found += part
        start = upto
    return bytes(found)


def first_difference(ours, theirs, start):
    """Where two ranges that begin at `start` differ; None where they do not."""
    if ours == theirs:
        return None
    at = next((number for number, (one, other) in enumerate(zip(ours, theirs)) if one != other), min(len(ours), len(theirs)))
    return format_lsn(start + at)


def same_wal(server, data_dir, start, end=None, timeout=20):
    """Wait until the standby's pg_wal has from `start` on what the primary's has, to its flush position."""
    end = end or flushed(server)
    theirs = wal(server.data_dir, start, end)

    def difference():
        try:
            return first_difference(wal(data_dir, start, end), theirs, start)
        except FileNotFoundError as error:
            return str(error)
    standby.wait_for(lambda: not difference(), lambda: f"same WAL from {format_lsn(start)} to {format_lsn(end)}: {difference()}",
                     timeout)
    return end - start


def same_pages(ours, primary):
    """Compare a stopped standby with its stopped primary: they are the same but for what a standby's control file says of itself."""
    found = walrider("compare", ours, primary).json
    mine = [row for row in found["first"] if row["class"] == "control" and row["field"] in OWN]
    others = [row for row in found["first"] if row not in mine]
    assert found["pages"] > 0 and found["differences"] == len(mine), (found["classes"], others)


def end_of_record(start, length):
    """Where a record of this length ends, with the page headers within it."""
    at = start
    while length > (room := PAGE - at % PAGE):
        length -= room
        at += room
        at += 40 if at % SEGMENT == 0 else 24
    return at + length


def valid_records(data_dir, start, scratch):
    """The (start, end) of the records that a reader of this directory's pg_wal meets, from a position on: pg_waldump's word."""
    copy = Path(scratch) / "wal-copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for file in sorted((Path(data_dir) / "pg_wal").iterdir()):
        if re.fullmatch(r"[0-9A-F]{24}", file.name) and file.name >= segment_name(start):
            shutil.copy(file, copy)
    said = run([program("pg_waldump"), "-p", copy, "-s", format_lsn(start)], check=False)
    found = [(parse_lsn(lsn), end_of_record(parse_lsn(lsn), int(length))) for length, lsn in
             re.findall(r"len \(rec/tot\): +\d+/ *(\d+), .*? lsn: ([0-9A-F]+/[0-9A-F]+),", said.stdout)]
    # It ends with an error where the WAL ends: anything else would be a reader that never looked.
    assert found or "could not find a valid record" in said.stderr or "invalid" in said.stderr, said.stderr
    return found
