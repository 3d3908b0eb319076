"""The runs of bench.volume, to be read."""

import statistics


def key(run):
    """What is run at the same condition."""
    return run["images"], run["wal"], run["volume"]


def seconds(runs):
    """Median of what finished; what was stopped tells how far it came."""
    if all(run["finished"] for run in runs):
        return f"{statistics.median(run['seconds'] for run in runs):.1f}"
    stopped = max((run for run in runs if not run["finished"]), key=lambda run: run["share"])
    return f"> {stopped['seconds']:.0f}, at {stopped['share']:.1%}"


def estimated(runs):
    """Seconds, where a stopped run goes on as it went."""
    return statistics.median(run["seconds"] / (1 if run["finished"] else max(run["share"], 1e-6)) for run in runs)


def times(runs, others):
    """How many times as fast the others are; at least, where one was stopped."""
    ratio = estimated(runs) / estimated(others)
    return f"{ratio:.1f}x" if all(run["finished"] for run in [*runs, *others]) else f"about {ratio:.0f}x"


def rate(limit):
    """A limit in words."""
    requests, size, *microseconds = limit
    text = f"{requests:,} requests/s and {size / 1e6:,.0f} MB/s" if requests else "no limit"
    return text + (f", {microseconds[0] / 1000:g} ms each" if any(microseconds) else "")


def volume_lines(result):
    """What each volume was seen to give."""
    for name, found in result["volumes"].items():
        text = f"volume {name}: {rate(found['limit'])}"
        if "read_requests_per_second" in found:
            text += "; seen " + ", ".join(
                f"{found[f'{way}_requests_per_second']:,.0f}/s and {found[f'{way}_bytes_per_second'] / 1e6:,.0f} MB/s {doing}"
                for way, doing in (("read", "reading"), ("write", "writing")))
        yield text


# Heading, width, and of all runs the median (or the most) of a figure in a unit.
COLUMNS = [
    ("unpack s", 9, "unpack_seconds", 1, "median"),
    ("reads k", 8, "device_read_requests", 1e3, "median"),
    ("MB", 7, "device_read_bytes", 1e6, "median"),
    ("writes k", 9, "device_write_requests", 1e3, "median"),
    ("MB", 7, "device_write_bytes", 1e6, "median"),
    ("| most reads/s", 15, "most_read_requests_per_second", 1, "most"),
    ("MB/s", 6, "most_read_bytes_per_second", 1e6, "most"),
    ("writes/s", 9, "most_write_requests_per_second", 1, "most"),
    ("MB/s", 6, "most_write_bytes_per_second", 1e6, "most"),
    ("cpu s", 6, "cpu_seconds", 1, "median"),
    ("memory MB", 10, "watched_memory_bytes", 1e6, "most"),
]


def figure(runs, name, unit, which):
    """One of the columns; runs without such a figure have none."""
    # Of a server that was killed nobody knows what its processes took.
    known = [dict(run, cpu_seconds=run["user_seconds"] + run["system_seconds"]) if run["finished"] else run for run in runs]
    values = [run[name] / unit for run in known if name in run]
    if not values:
        return "-"
    value = statistics.median(values) if which == "median" else max(values)
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def line(at, side, runs, stock):
    """One side at one condition."""
    images, wal, volume = at
    ratio = times(stock, runs) if stock and stock is not runs else ""
    figures = " ".join(f"{figure(runs, *of):>{width}}" for _, width, *of in COLUMNS)
    return f"{'on' if images else 'off':<7} {wal:>4g}x {volume:<7} {side:<11} {seconds(runs):<16} {ratio:<10} {figures}"


def table(result):
    """All of it."""
    limited = f"{result['memory'] >> 20} MB for everything" if result.get("group") else "memory not limited"
    lines = [f"{result['machine']}; PostgreSQL {result['postgresql']}; {result['commit']}; {result['command']}",
             f"data directory: {result['on']}; {limited}", *volume_lines(result)]
    for load in result["loads"]:
        sizes = ", ".join(f"{size / 1e6:,.0f}" for size in load["wal_bytes"].values())
        lines.append(f"{'images' if load['images'] else 'no images'}: {load['data_bytes'] / 1e6:,.0f} MB of data, "
                     f"{load['grown_bytes'] / 1e6:,.0f} at the end; WAL {sizes} MB")
    headings = " ".join(f"{heading:>{width}}" for heading, width, *_ in COLUMNS)
    lines += ["", f"{'images':<7} {'WAL':>5} {'volume':<7} {'side':<11} {'seconds':<16} {'times':<10} {headings}"]
    for at in dict.fromkeys(map(key, result["runs"])):
        of = {}
        for run in result["runs"]:
            if key(run) == at:
                of.setdefault(run["side"], []).append(run)
        lines += [line(at, side, runs, of.get("PostgreSQL")) for side, runs in of.items()]
    return "\n".join(lines) + "\n"
