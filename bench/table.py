"""What the runs of bench.replay amount to: medians with their range, ratios with their spread, and a table of them."""

import statistics

KEYS = ("redo_seconds", "total_seconds", "peak_memory_bytes", "group_peak_bytes", "read_bytes", "written_bytes",
        "user_seconds", "system_seconds")


def spread(values):
    """Median and range."""
    return dict(median=statistics.median(values), min=min(values), max=max(values))


def ratio(ones, others, key):
    """Of the medians, with the range of the pairs that ran in the same round."""
    pairs = [one[key] / other[key] for one, other in zip(ones, others)]
    return dict(ratio=statistics.median(run[key] for run in ones) / statistics.median(run[key] for run in others),
                min=min(pairs), max=max(pairs))


def summarize(runs, most_jobs):
    """Each side's figures, and the ratios that the goals are about."""
    ours, one = runs[f"walrider-{most_jobs}"], runs.get("walrider-1")
    sides = {side: {key: spread([run[key] for run in found]) for key in KEYS if key in found[0]}
             for side, found in runs.items()}
    stages = {name: statistics.median(run["stages"][name] for run in ours) for name in ours[0]["stages"]}
    ratios = dict(redo=ratio(runs["stock"], ours, "redo_seconds"), total=ratio(runs["stock"], ours, "total_seconds"),
                  durable_total=ratio(runs["stock-durable"], ours, "total_seconds"))
    if one and most_jobs > 1:
        ratios.update(one_job_redo=ratio(runs["stock"], one, "redo_seconds"), jobs=ratio(one, ours, "redo_seconds"))
    return dict(records=ours[0]["records"], transactions=ours[0]["transactions"], wal_bytes=ours[0]["wal_bytes"],
                sides=sides, stages=stages, ratios=ratios)


def seconds(value):
    """Median (min–max)."""
    return f"{value['median']:.2f} ({value['min']:.2f}–{value['max']:.2f})"


def times(value):
    """Ratio (min–max)."""
    return f"{value['ratio']:.1f}x ({value['min']:.1f}–{value['max']:.1f})"


def load_lines(name, found):
    """The table of one load."""
    summary = found["summary"]
    ratios, sides = summary["ratios"], summary["sides"]
    limited = f"; {found['memory'] >> 20} MB for pages on both sides" if found["memory"] else ""
    limited += f", {found['group'] >> 20} MB in all" if found["group"] else ""
    yield f"{name}: {found['about']}{limited}"
    yield (f"  {summary['wal_bytes'] / 1e6:,.0f} MB of WAL, {summary['records']:,} records, "
           f"{summary['transactions']:,} transactions")
    yield f"  {'':<15} {'redo s':<20} {'in all s':<20} {'cpu s':>6} {'memory MB':>10} {'read MB':>8} {'written MB':>11}"
    for side, values in sides.items():
        cpu = values["user_seconds"]["median"] + values["system_seconds"]["median"]
        yield (f"  {side:<15} {seconds(values['redo_seconds']):<20} {seconds(values['total_seconds']):<20} {cpu:6.2f} "
               f"{values['peak_memory_bytes']['max'] / 1e6:10,.0f} {values['read_bytes']['median'] / 1e6:8,.0f} "
               f"{values['written_bytes']['median'] / 1e6:11,.0f}")
    names = dict(redo="redo", total="in all", durable_total="in all, stock durable", one_job_redo="redo, one job",
                 jobs="second job")
    yield "  ratios: " + ", ".join(f"{names[key]} {times(value)}" for key, value in ratios.items())
    ours = list(sides.values())[1]
    rate = statistics.median(found["write_bytes_per_second"])
    waldump = statistics.median(found["waldump_seconds"])
    yield (f"  floors: pg_waldump decodes in {waldump:.2f} s; the device writes {rate / 1e6:,.0f} MB/s, our bytes in "
           f"{ours['written_bytes']['median'] / rate:.2f} s")
    if found["reads_per_second"]:
        reads = statistics.median(found["reads_per_second"])
        yield f"          it reads {reads:,.0f} random blocks/s, as many bytes as we read in " \
              f"{ours['read_bytes']['median'] / 8192 / reads:.2f} s"
    yield "  stages: " + ", ".join(f"{name} {value:.2f}" for name, value in summary["stages"].items() if value >= 0.005)


def table(result):
    """All loads, to be read."""
    lines = [f"{result['machine']}; PostgreSQL {result['postgresql']}; {result['commit']}", ""]
    for name, found in result["loads"].items():
        lines += [*load_lines(name, found), ""]
    return "\n".join(lines)
