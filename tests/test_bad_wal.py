"""Damaged WAL: an error with LSN and file, a directory that both of us can continue from."""

import re

import pytest

from tests.lab.faults.archive import archive_of_links, middle_segment, own
from tests.lab.install import program
from tests.lab.oracle.compare import compare
from tests.lab.server import recovery
from tests.lab.server.cluster import PgCluster, parse_lsn, run
from tests.lab.walrider import CORRUPT, DONE, FAILED, UNSUPPORTED, replay

LSN = re.compile(r"\b[0-9A-F]+/[0-9A-F]+\b")


def record_in(archive, segment):
    """(LSN, total length) of some large enough record that starts in a segment."""
    out = run([program("pg_waldump"), "-p", archive, archive / segment], check=False).stdout
    found = [(match[2], int(match[1])) for match in re.finditer(
        r"len \(rec/tot\):\s+\d+/\s*(\d+), tx:\s+\d+, lsn: ([0-9A-F/]+)", out) if 60 < int(match[1]) < 6000]
    assert found, segment
    return found[len(found) // 2]


def check_both_finish(fixture, work, ours):
    """From what we left: the same command finishes, and so does stock."""
    other = work / "finished_by_stock"
    run(["cp", "-a", ours, other])
    for link in (other / "pg_tblspc").iterdir():    # links of its own, with the state they have now
        if link.is_symlink():
            mine = work / "stock_spaces" / link.name
            mine.parent.mkdir(exist_ok=True)
            run(["cp", "-a", f"{link.resolve()}/.", mine] if mine.exists() else ["cp", "-a", link.resolve(), mine])
            link.unlink()
            link.symlink_to(mine)
    replay(ours, fixture.archive).expect()
    recovery.pin_tablespaces(ours)
    compare(ours, fixture.stock)
    fixture.point(other)
    server = PgCluster(other)
    server.configure("archive_mode = off\n" + recovery.restore_settings(
        fixture.archive, target=("lsn", fixture.info["final_checkpoint"]), action="shutdown"), "postgresql.auto.conf")
    (other / "recovery.signal").touch()
    with server:
        recovery.finish_stock(server, fixture.info["final_checkpoint"])
    compare(other, fixture.stock)


def test_bit_flip(plain, work, rng):
    """One flipped bit inside a record: its CRC tells, we name it."""
    archive = archive_of_links(plain, work / "archive")
    name = middle_segment(plain)
    lsn, length = record_in(plain.archive, name)
    path = own(archive / name)
    data = bytearray(path.read_bytes())
    offset = int(lsn.split("/")[1], 16) % len(data) + rng.randrange(24, length)
    data[offset] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    ours = plain.copy(work / "ours")
    result = replay(ours, archive)
    assert result.code == CORRUPT, (lsn, offset, result)
    assert name in result.stderr and LSN.search(result.stderr), result.stderr
    assert "panicked" not in result.stderr
    check_both_finish(plain, work, ours)


def crc32c(data):
    """CRC-32C as WAL records carry it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("rmgr, info, named", [(1, 0x70, "Transaction"), (128, 0x00, "custom128")],
                         ids=["unknown type", "custom manager"])
def test_unsupported_record(plain, work, rmgr, info, named):
    """A valid record that we have no redo for: a clean stop before it, not damage, and PostgreSQL may do the rest.

    One is of a manager that we have and of a type that nobody knows (XLOG_XACT_OPMASK), one of an extension's manager.
    """
    archive = archive_of_links(plain, work / "archive")
    name = middle_segment(plain)
    out = run([program("pg_waldump"), "-p", archive, "-r", "Transaction", archive / name], check=False).stdout
    found = re.findall(r"len \(rec/tot\):\s+\d+/\s*(\d+), tx:\s+\d+, lsn: ([0-9A-F]+/([0-9A-F]+)).*desc: COMMIT ",
                       out)
    found = [(int(length), lsn, int(low, 16)) for length, lsn, low in found]
    length, lsn, at = next(record for record in found if record[2] % 8192 + record[0] <= 8192)
    path = own(archive / name)
    data = bytearray(path.read_bytes())
    at %= len(data)
    record = data[at:at + length]
    record[16:18] = record[16] | info, rmgr     # xl_info, xl_rmid
    record[20:24] = crc32c(record[24:] + record[:20]).to_bytes(4, "little")
    data[at:at + length] = record
    path.write_bytes(data)
    ours = plain.copy(work / "ours")
    result = replay(ours, archive)
    assert result.code == UNSUPPORTED, (lsn, result)
    assert result.json["end_reason"] == "unsupported"
    assert parse_lsn(result.json["end_lsn"]) == parse_lsn(lsn), result.json
    assert named in result.stderr and LSN.search(result.stderr), result.stderr
    check_both_finish(plain, work, ours)


@pytest.mark.parametrize("kept", [0, 1000, 8192 * 3 + 5, 8192 * 700])
def test_truncated_segment(plain, work, kept):
    """A segment file that is too short, with more WAL behind it."""
    archive = archive_of_links(plain, work / "archive")
    name = middle_segment(plain)
    with open(own(archive / name), "r+b") as file:
        file.truncate(kept)
    ours = plain.copy(work / "ours")
    result = replay(ours, archive)
    assert result.code == CORRUPT, result
    assert name in result.stderr, result.stderr
    assert "panicked" not in result.stderr
    if kept == 1000:
        check_both_finish(plain, work, ours)


def test_missing_segment(plain, work):
    """A gap: later segments are there, this one is not."""
    archive = archive_of_links(plain, work / "archive")
    name = middle_segment(plain)
    (archive / name).unlink()
    ours = plain.copy(work / "ours")
    result = replay(ours, archive)
    assert result.code in (FAILED, CORRUPT), result
    assert name in result.stderr, result.stderr
    check_both_finish(plain, work, ours)


@pytest.mark.parametrize("round_", range(8))
def test_random_damage(plain, work, rng, round_):
    """Bytes overwritten anywhere: an error, never a panic, and the WAL replaced, the end. In the last segment it may be the end before them, and
    nothing where nobody reads them."""
    archive = archive_of_links(plain, work / "archive")
    path = own(archive / rng.choice(plain.segments()).name)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 10, 1000])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    ours = plain.copy(work / "ours")
    result = replay(ours, archive)
    assert result.code in (DONE, FAILED, CORRUPT), result
    assert "panicked" not in result.stderr, result.stderr
    whole = replay(ours, plain.archive).expect()
    if result.code == DONE and path.name != plain.segments()[-1].name:
        assert result.json["end_lsn"] == whole.json["end_lsn"], (path.name, result)
    recovery.pin_tablespaces(ours)
    compare(ours, plain.stock)


def test_missing_history(plain, work):
    """Timeline 2 cannot be found without its history: we end on timeline 1 or say so."""
    archive = archive_of_links(plain, work / "archive")
    (archive / "00000002.history").unlink()
    ours = plain.copy(work / "ours")
    result = replay(ours, archive, "--target-timeline", "2")
    assert result.code in (FAILED, CORRUPT)
    assert "history" in result.stderr
