"""A plot of bench.volume's runs: seconds against the amount of WAL, for each way to recover.

    python3 -m bench.plot FILE.json... --out docs/img/restore-volume.svg [--volumes 3000 16000] [--images off]

A panel for each volume, with and without images.  Both axes are logarithmic.  A hollow point was stopped: it stands where the run would
have ended, going on as it went.  The dotted line is the time that the volume takes to give the database once, in order.
"""

import argparse
import json
import math
from html import escape
from pathlib import Path

from .volume_table import estimated, key, rate

# The first three of what is compared; whatever else there is takes the others.
COLOURS = ["#8a919e", "#1d6f8a", "#c4722a", "#2f7d4f", "#6b4a9b"]
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2937 } .soft { fill: #6b7280; font-size: 12px } .grid { stroke: #e5e7eb }
.floor { stroke: #6b7280; stroke-dasharray: 2 4 } path { fill: none; stroke-width: 2 } .page { fill: #ffffff }"""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 380, 300, 62, 40, 20, 46


class Scale:
    """A logarithmic axis from a decade to a decade."""

    def __init__(self, values, begin, end):
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.high = max(self.high, self.low + 1)
        self.begin, self.end = begin, end

    def __call__(self, value):
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self):
        """Whole decades."""
        return [10.0 ** power for power in range(self.low, self.high + 1)]


def points(results):
    """{(images, volume): {side: [(bytes of WAL, seconds, whether all of them finished)]}}, and the floors {(images, volume): seconds}."""
    found, floors = {}, {}
    for result in results:
        of, sizes = {}, {load["images"]: load for load in result["loads"]}
        for run in result["runs"]:
            of.setdefault((*key(run), run["side"]), []).append(run)
        for (images, wal, volume, side), runs in of.items():
            load, (_, bandwidth, *_) = sizes[images], result["volumes"][volume]["limit"]
            place = found.setdefault((images, volume), {}).setdefault(side, [])
            place.append((load["wal_bytes"][f"wal-{wal:g}"], estimated(runs), all(run["finished"] for run in runs)))
            if bandwidth:
                floors[images, volume] = load["data_bytes"] / bandwidth
    return found, floors


def panel(at, sides, floor, limit, colours, left, top):
    """One volume, as lines of SVG."""
    images, _ = at
    every = [point for line in sides.values() for point in line]
    across = Scale([size / 1e9 for size, *_ in every], left + LEFT, left + WIDTH - RIGHT)
    up = Scale([seconds for _, seconds, _ in every] + ([floor] if floor else []), top + HEIGHT - BOTTOM, top + TOP)
    yield f'<text x="{left + LEFT}" y="{top + 18}">{escape(rate(limit))}</text>'
    yield f'<text class="soft" x="{left + LEFT}" y="{top + 33}">full-page images {"on" if images else "off"}</text>'
    for tick in up.ticks():
        yield f'<line class="grid" x1="{across.begin}" x2="{across.end}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        yield f'<text class="soft" text-anchor="end" x="{across.begin - 8}" y="{up(tick) + 4:.1f}">{tick:,g} s</text>'
    for tick in across.ticks():
        yield f'<line class="grid" y1="{up.begin}" y2="{up.end}" x1="{across(tick):.1f}" x2="{across(tick):.1f}"/>'
        yield f'<text class="soft" text-anchor="middle" x="{across(tick):.1f}" y="{up.begin + 18}">{tick:g} GB</text>'
    yield f'<text class="soft" text-anchor="middle" x="{(across.begin + across.end) / 2}" y="{up.begin + 36}">WAL</text>'
    if floor:
        yield f'<line class="floor" x1="{across.begin}" x2="{across.end}" y1="{up(floor):.1f}" y2="{up(floor):.1f}"/>'
    for side, line in sides.items():
        line, colour = sorted(line), colours[side]
        places = [(across(size / 1e9), up(seconds), finished) for size, seconds, finished in line]
        yield f'<path stroke="{colour}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)}"/>'
        for x, y, finished in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}" stroke-width="2" fill="{colour if finished else "#ffffff"}"/>'


def plot(results, volumes=None, images=None):
    """The picture."""
    found, floors = points(results)
    limits = {name: volume["limit"] for result in results for name, volume in result["volumes"].items()}
    wanted = [at for at in found if (not volumes or at[1] in volumes) and (not images or ("on" if at[0] else "off") in images)]
    rows = sorted({at[0] for at in wanted})
    columns = [name for name in limits if any(at[1] == name for at in wanted)]
    sides = list(dict.fromkeys(side for at in wanted for side in found[at]))
    colours = dict(zip(sides, COLOURS))
    width, height = WIDTH * len(columns), HEIGHT * len(rows) + 30
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="recovery by amount of WAL">',
             f"<style>{STYLE}</style>", f'<rect class="page" width="{width}" height="{height}"/>']
    for number, side in enumerate(sides):
        x = LEFT + 130 * number
        lines.append(f'<circle cx="{x}" cy="16" r="5" fill="{colours[side]}"/><text x="{x + 11}" y="20">{escape(side)}</text>')
    for at in wanted:
        left, top = WIDTH * columns.index(at[1]), 30 + HEIGHT * rows.index(at[0])
        lines += panel(at, found[at], floors.get(at), limits[at[1]], colours, left, top)
    return "\n".join([*lines, "</svg>"]) + "\n"


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE.json", help="what bench.volume saved; several are drawn together")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--volumes", nargs="+")
    parser.add_argument("--images", nargs="+", choices=["off", "on"])
    args = parser.parse_args()
    args.out.write_text(plot([json.loads(file.read_text()) for file in args.results], args.volumes, args.images))


if __name__ == "__main__":
    main()
