"""The demo's report: one HTML page with its plots inside, nothing loaded from anywhere."""

from html import escape

STYLE = """
  :root { --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --ours: #1d6f8a; --stock: #b6bcc6; --good: #2f7d4f; --bad: #b3261e; }
  * { box-sizing: border-box }
  body { margin: 0; background: #fafaf9; color: var(--ink); font: 16px/1.55 system-ui, sans-serif }
  main { max-width: 54rem; margin: 3rem auto; padding: 0 1.5rem }
  h1 { font-size: 1.7rem; font-weight: 600; margin: 0 0 .3rem } h2 { font-size: 1.05rem; font-weight: 600; margin: 2.4rem 0 .7rem }
  p { margin: .4rem 0 } .soft { color: var(--soft) }
  .ratio { font-size: 3.4rem; font-weight: 600; line-height: 1.1; color: var(--ours); margin-top: 1.4rem }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
  th, td { text-align: left; padding: .45rem .6rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
  th { font-weight: 500; color: var(--soft) } td.number, th.number { text-align: right }
  .good { color: var(--good) } .bad { color: var(--bad); font-weight: 600 }
  svg { display: block; width: 100%; height: auto } svg text { font: 13px system-ui, sans-serif; fill: var(--ink) }
  svg text.soft { fill: var(--soft) }
"""


def bars(rows, unit, decimals):
    """Horizontal bars: (label, value, colour) from zero, each with its value beside it."""
    top = max(value for _, value, _ in rows) or 1
    height = 40 * len(rows) + 8
    parts = [f'<svg viewBox="0 0 760 {height}" role="img" aria-label="{escape(unit)}">']
    for number, (label, value, colour) in enumerate(rows):
        y, width = 40 * number + 6, max(2.0, 440 * value / top)
        parts.append(f'<text x="0" y="{y + 19}">{escape(label)}</text>'
                     f'<rect x="120" y="{y}" width="{width:.1f}" height="28" rx="2" fill="{colour}"/>'
                     f'<text x="{130 + width:.1f}" y="{y + 19}">{value:,.{decimals}f} {escape(unit)}</text>')
    return "".join(parts) + "</svg>"


def stage_bar(stages, total):
    """One bar split by stage, with a legend; the rest of the time is shown as such."""
    colours = ["#1d6f8a", "#5aa0b5", "#96c3cf", "#c9b47a", "#a5835a", "#8c8fa3", "#d3d7de"]
    named = [(name, value) for name, value in stages.items() if value > 0]
    whole = max(total, sum(value for _, value in named)) or 1
    x, parts, legend = 0.0, [], []
    for number, (name, value) in enumerate(named):
        width = 760 * value / whole
        colour = colours[number % len(colours)]
        parts.append(f'<rect x="{x:.1f}" y="4" width="{width:.1f}" height="28" fill="{colour}"/>')
        row, column = divmod(number, 3)
        legend.append(f'<rect x="{255 * column}" y="{46 + 24 * row}" width="11" height="11" fill="{colour}"/>'
                      f'<text x="{255 * column + 18}" y="{56 + 24 * row}">{escape(name)} {value:.2f} s</text>')
        x += width
    height = 56 + 24 * ((len(named) + 2) // 3)
    return f'<svg viewBox="0 0 760 {height}" role="img" aria-label="stages">' + "".join(parts + legend) + "</svg>"


def load_section(load):
    """One load: its ratio, what both sides took, and where our time goes."""
    runs = load["runs"]
    colours = {"PostgreSQL": "#b6bcc6", "Walrider": "#1d6f8a"}

    def plot(what):
        return bars([(name, run[what], colours[name]) for name, run in runs.items()], "s", 2)

    stages = runs["Walrider"]["stages"] or {}
    where = (f"<h2>Where Walrider's time goes</h2>{stage_bar(stages, runs['Walrider']['replay_seconds'])}" if stages else "")
    return f"""<section><p class="ratio">{load["ratio"]:.1f}×</p>
<p>{escape(load["name"])}: from the command to the first write.</p>
<p class="soft">{load["wal_bytes"] / 1e6:,.0f} MB of WAL, {load["records"]:,} records, {load["transactions"]:,} transactions;
{escape(load["about"])}.</p>
<h2>Command to first write</h2>{plot("seconds")}
<h2>Redo alone: {load["redo_ratio"]:.1f}×</h2>{plot("redo_seconds")}
{where}</section>"""


def page(facts):
    """The page as text."""
    good = all(passed for _, passed, _ in facts["checks"])
    checks = "".join(
        f'<tr><td class="{"good" if passed else "bad"}">{"passed" if passed else "FAILED"}</td><td>{escape(name)}</td>'
        f'<td class="soft">{escape(detail)}</td></tr>' for name, passed, detail in facts["checks"])
    sections = "".join(map(load_section, facts["loads"]))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Walrider: recovery beside PostgreSQL</title><style>{STYLE}</style></head><body><main>
<h1>The same backup, recovered twice</h1>
<p>{"Same backup, same WAL, same result, checked page by page." if good else
    '<span class="bad">The results differ: see the checks.</span>'}</p>
{sections}
<h2>Checks</h2><table>{checks}</table>
<h2>How</h2>
<p class="soft">Each side gets a copy of the same base backup, with recovery.signal, restore_command and a target, and recovers with
fsync on until a write is committed. PostgreSQL {escape(facts["postgresql"])} has hot_standby = off, 1 GB of shared buffers and no
restartpoint before the end; its redo time is from its own log. Medians of rounds in turn. {facts["cpus"]} CPUs,
{escape(facts["machine"])}. Seed {facts["seed"]}. Repeat it with <code>make demo</code>.</p>
</main></body></html>
"""


def write_report(directory, facts):
    """Write index.html; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "index.html"
    # Replaced, not overwritten: an earlier report may be another user's file.
    scratch = directory / "index.html.new"
    scratch.write_text(page(facts))
    return scratch.replace(target)
