"""Pages of a relation's file, and their checksums (storage/checksum_impl.h)."""

import re
import struct

BLCKSZ = 8192
LANES, PRIME, MASK = 32, 16777619, 0xFFFFFFFF
CHECKSUM = struct.Struct("<H")
CHECKSUM_AT = 8
# What each lane begins with.
BEGIN = (
    0x5B1F36E9, 0xB8525960, 0x02AB50AA, 0x1DE66D2A, 0x79FF467A, 0x9BB9F8A3, 0x217E7CD2, 0x83E13D2C,
    0xF8D4474F, 0xE39EB970, 0x42C6AE16, 0x993216FA, 0x7B093B5D, 0x98DAFF3C, 0xF718902A, 0x0B1C9CDB,
    0xE58F764B, 0x187636BC, 0x5D7B3BB1, 0xE73DE7DE, 0x92BEC979, 0xCCA6C0B2, 0x304A0979, 0x85AA43D4,
    0x783125BB, 0x6CA8EAA2, 0xE407EAC6, 0x4B5CFC3E, 0x9FBF8C76, 0x15CA20BE, 0xF2CA9FD3, 0x959BD756)


def pages(file):
    """All whole pages of a file."""
    data = file.read_bytes()
    return [data[at:at + BLCKSZ] for at in range(0, len(data) - BLCKSZ + 1, BLCKSZ)]


def pages_past(data_dir, bound):
    """Pages of main forks whose LSN is past `bound`, as (file, block, LSN)."""
    found = []
    for path in sorted(data_dir.glob("base/*/*")):
        if not re.fullmatch(r"\d+(\.\d+)?", path.name):
            continue
        for block, page in enumerate(pages(path)):
            high, low = struct.unpack_from("<II", page)
            if high << 32 | low > bound:
                found.append((path.name, block, f"{high:X}/{low:X}"))
    return found


def checksum(page, block):
    """As it should be on this page in this place."""
    blank = page[:CHECKSUM_AT] + bytes(CHECKSUM.size) + page[CHECKSUM_AT + CHECKSUM.size:]
    words = struct.unpack(f"<{BLCKSZ // 4}I", blank) + (0,) * (2 * LANES)
    lanes = list(BEGIN)
    for at, word in enumerate(words):
        mixed = lanes[at % LANES] ^ word
        lanes[at % LANES] = mixed * PRIME & MASK ^ mixed >> 17
    folded = block
    for lane in lanes:
        folded ^= lane
    return folded % 0xFFFF + 1


def checks(page, block):
    """Whether the page carries the checksum that it should."""
    return CHECKSUM.unpack_from(page, CHECKSUM_AT)[0] == checksum(page, block)
