"""What replay would take on more cores, from what one thread took.

    python3 -m bench.model RESULT.json [CORES...]

RESULT.json is what `walrider replay --jobs 1 --json` prints.  The model: batches are sequenced, and file actions done, by
one thread; all else is shared evenly, but no batch is applied faster than its longest partition, while loading of the next
goes on beside.  Memory bandwidth and the disk are left out, so it is a bound, not a forecast.
"""

import json
import sys
from pathlib import Path


def stages(result):
    """Seconds of one thread: those that stay serial, those that are shared, the longest partition."""
    times = result["stages"]
    serial = times["sequence"] + times["actions"]
    return serial, result["redo_seconds"] - serial, result["apply_longest_seconds"]


def seconds(result, cores):
    """Redo on so many cores."""
    serial, shared, longest = stages(result)
    return serial + max(shared / cores, longest)


def main():
    """The command line."""
    result = json.loads(Path(sys.argv[1]).read_text().splitlines()[-1])
    for cores in [int(word) for word in sys.argv[2:]] or [1, 2, 4, 8, 16, 32, 120]:
        took = seconds(result, cores)
        print(f"{cores:4} cores: {took:6.3f} s, {result['redo_seconds'] / took:5.1f}x one core")


if __name__ == "__main__":
    main()
