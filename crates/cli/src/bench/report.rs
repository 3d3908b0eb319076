//! What came of an experiment, as a page that needs nothing else.

use std::fmt::Write;

use walrider_matrix::effects::Effects;
use walrider_matrix::figures::{Figure, Unit};
use walrider_matrix::fraction::Design;

use super::summary::Summary;
use super::text::{said, shown};

const STYLE: &str = include_str!("../style.css");
/// Of the plots alone.
const PLOTS: &str = "figure { overflow-x: auto; min-width: 0; } svg { max-width: 40rem; min-width: 26rem; } svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
svg line { stroke: var(--rule); } svg .range { stroke: var(--line); stroke-width: 2; } svg circle { fill: var(--line); }
svg circle.run { fill-opacity: .55; } pre { overflow-x: auto; margin: .25rem 0; } ul { margin: .25rem 0; padding-left: 1.2rem; }";
/// Of a plot, in its own units: its width, where names of factors and of levels begin, and where the scale does.
const WIDTH: f64 = 560.0;
const LEVELS: f64 = 150.0;
const SCALE: f64 = 250.0;
const ROW: f64 = 20.0;
/// So near, their labels would lie over each other.
const TICKS_APART: f64 = 50.0;

/// The page.
pub fn render(summary: &Summary<'_>, design: &Design) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>walrider bench</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<style>\n{STYLE}{PLOTS}\n</style>\n</head>\n<body>\n<header>\n<h1>walrider bench</h1>\n\
         <p class=\"soft\">{}</p>\n</header>\n<main>\n",
        escape(&summary.state())
    );
    page += &about(summary, design);
    for (figure, effects) in &summary.figures {
        page += &section(summary, figure, effects);
    }
    page += &runs(summary);
    page += &failures(summary);
    page + "</main>\n</body>\n</html>\n"
}

fn about(summary: &Summary<'_>, design: &Design) -> String {
    let (plan, machine) = (&summary.header.plan, &summary.header.machine);
    let mut said = vec![
        format!("Load: {}; {} sessions, {} s in each run.", plan.load, plan.clients, plan.seconds),
        format!(
            "{} combinations, each {} times, in the order of seed {}.",
            design.combinations.len(),
            plan.repeats,
            plan.seed
        ),
    ];
    if !plan.servers.is_empty() {
        said.push(format!("Servers: {}.", plan.servers.join(", ")));
    }
    for factor in &plan.factors {
        let levels: Vec<&str> = factor.levels.iter().map(|level| shown(level)).collect();
        let verb = if levels.len() > 1 { "is varied:" } else { "is" };
        said.push(format!("{} {verb} {}.", factor.name, levels.join(", ")));
    }
    let memory = machine.memory_bytes.map(|bytes| format!(", {}", Unit::Bytes.show(bytes as f64))).unwrap_or_default();
    let processor = if machine.processor.is_empty() { "processor" } else { &machine.processor };
    said.push(format!(
        "Machine of the load: {} × {processor}{memory}, {}; Walrider {}.",
        machine.cores, machine.system, summary.header.version
    ));
    said.extend(design.limits.iter().cloned());
    let items: String = said.iter().map(|said| format!("<li>{}</li>\n", escape(said))).collect();
    format!("<section>\n<h2>What was done</h2>\n<ul>\n{items}</ul>\n</section>\n")
}

fn section(summary: &Summary<'_>, figure: &Figure, effects: &Effects) -> String {
    let direction = if figure.more_is_better { "more is better" } else { "less is better" };
    let mean = figure.unit.show(effects.mean);
    let mut text = format!(
        "<section>\n<h2>{}</h2>\n<p>{mean} on average ({} runs); {direction}.</p>\n",
        figure.title, effects.runs
    );
    if !effects.factors.is_empty() {
        let rows = effects.factors.iter().flat_map(|factor| {
            let row = |level| vec![factor.factor.clone(), shown(level).to_owned()];
            factor
                .levels
                .iter()
                .map(move |level| [row(&level.level), vec![level.runs.to_string(), said(level)]].concat())
        });
        let caption = "What each level does beside the first of its factor";
        write!(
            text,
            "<div class=\"two\">\n{}{}</div>\n{}<p class=\"soft\">{}</p>\n",
            effect_plot(figure, effects),
            run_plot(summary, figure),
            table(caption, &["factor", "level", "runs", "figure multiplied by"], rows),
            escape(&Summary::certainty(effects))
        )
        .expect("a string takes all");
    }
    text + "</section>\n"
}

/// A row of a plot: factor, level, what is drawn.
type Row = (String, String, String);

/// Ratios and their intervals, on a logarithmic scale.
fn effect_plot(figure: &Figure, effects: &Effects) -> String {
    let levels = || effects.factors.iter().flat_map(|factor| factor.levels.iter().map(move |level| (factor, level)));
    let ends = levels()
        .flat_map(|(_, level)| [level.ratio, level.interval.map(|(low, _)| low), level.interval.map(|(_, high)| high)]);
    // An interval without bounds is drawn to the edge.
    let ends = ends.flatten().map(|ratio| ratio.clamp(0.01, 100.0).ln());
    let (low, high) = ends.fold((-0.05_f64, 0.05_f64), |(low, high), end| (low.min(end), high.max(end)));
    let at = |ratio: f64| SCALE + (ratio.clamp(0.01, 100.0).ln() - low) / (high - low) * (WIDTH - SCALE - 30.0) + 10.0;
    let rows = levels().map(|(factor, level)| {
        let range = level.interval.map(|(low, high)| {
            format!("<line class=\"range\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"-4\" y2=\"-4\"/>", at(low), at(high))
        });
        let dot = level.ratio.map(|ratio| format!("<circle cx=\"{:.1}\" cy=\"-4\" r=\"4\"/>", at(ratio)));
        let (name, shown) = (factor.factor.clone(), shown(&level.level).to_owned());
        (name, shown, [range, dot].into_iter().flatten().collect())
    });
    let mut ticks = vec![1.0];
    ticks.extend([low.exp(), high.exp()].into_iter().filter(|end| (at(*end) - at(1.0)).abs() > TICKS_APART));
    let ticks: Vec<_> = ticks.into_iter().map(|ratio| (at(ratio), format!("× {ratio:.2}"))).collect();
    plot(&format!("{}: effects and 95 % intervals, beside the first level", figure.title), rows.collect(), &ticks)
}

/// Each run by its levels, from zero on.
fn run_plot(summary: &Summary<'_>, figure: &Figure) -> String {
    let most = summary.values(figure).map(|(_, value)| value).fold(0.0, f64::max);
    let at = |value: f64| SCALE + if most > 0.0 { value / most } else { 0.0 } * (WIDTH - SCALE - 30.0);
    let rows = summary.varied().flat_map(|(number, factor)| {
        factor.levels.iter().enumerate().map(move |(level, name)| {
            let seen = summary.values(figure).filter(move |(run, _)| run.levels[number] == level);
            let dots =
                seen.map(|(_, value)| format!("<circle class=\"run\" cx=\"{:.1}\" cy=\"-4\" r=\"4\"/>", at(value)));
            (factor.name.clone(), shown(name).to_owned(), dots.collect())
        })
    });
    let ticks = [0.0, most].map(|value| (at(value), figure.unit.show(value)));
    plot(&format!("{}: each run", figure.title), rows.collect(), &ticks)
}

fn plot(caption: &str, rows: Vec<Row>, ticks: &[(f64, String)]) -> String {
    let height = ROW * (rows.len() as f64 + 1.5);
    let mut text = format!(
        "<figure><figcaption>{caption}</figcaption>\n<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{caption}\">\n"
    );
    for (x, label) in ticks {
        let (bottom, anchor) = (height - ROW, if *x > WIDTH - 60.0 { "end" } else { "middle" });
        text += &format!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{bottom}\"/>\
             <text class=\"soft\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{label}</text>\n",
            height - 4.0
        );
    }
    let mut before = String::new();
    for (nth, (factor, level, drawn)) in rows.into_iter().enumerate() {
        let name = if factor == before { "" } else { &factor };
        text += &format!(
            "<g transform=\"translate(0 {:.1})\"><text x=\"0\">{}</text><text x=\"{LEVELS}\">{}</text>{drawn}</g>\n",
            ROW * (nth as f64 + 0.9),
            escape(&shortened(name, 22)),
            escape(&shortened(&level, 14))
        );
        before = factor;
    }
    text + "</svg></figure>\n"
}

/// The end of what is too long: of a directory, the part that differs.
fn shortened(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        text.to_owned()
    } else {
        format!("…{}", text.chars().skip(count - most + 1).collect::<String>())
    }
}

fn runs(summary: &Summary<'_>) -> String {
    let varied: Vec<_> = summary.varied().collect();
    let mut heads = vec!["run"];
    heads.extend(varied.iter().map(|(_, factor)| factor.name.as_str()));
    heads.extend(summary.figures.iter().map(|(figure, _)| figure.title));
    heads.push("Lag at the end of the load");
    let rows = summary.outcomes().map(|(run, outcome)| {
        let mut cells = vec![run.number.to_string()];
        cells.extend(varied.iter().map(|(number, factor)| shown(&factor.levels[run.levels[*number]]).to_owned()));
        let value =
            |figure: &Figure| (figure.of)(outcome).map_or_else(|| "?".to_owned(), |value| figure.unit.show(value));
        cells.extend(summary.figures.iter().map(|(figure, _)| value(figure)));
        cells.push(outcome.lag_bytes.map_or_else(|| "?".to_owned(), |bytes| Unit::Bytes.show(bytes as f64)));
        cells
    });
    format!("<section>\n<h2>Runs</h2>\n{}</section>\n", table("In the order in which they were made", &heads, rows))
}

fn failures(summary: &Summary<'_>) -> String {
    let failed = summary.failed().map(|(done, failed)| {
        let (settings, message, log) = (Summary::settings(done), &failed.message, failed.log.join("\n"));
        let said = escape(&format!("Run {} ({settings}): {message}", done.run));
        format!("<p class=\"bad\">{said}</p>\n<pre>{}</pre>\n", escape(&log))
    });
    let failed: String = failed.collect();
    if failed.is_empty() { failed } else { format!("<section>\n<h2>Runs that failed</h2>\n{failed}</section>\n") }
}

fn table(caption: &str, heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let heads: String = heads.iter().map(|head| format!("<th scope=\"col\">{}</th>", escape(head))).collect();
    let cells = |cells: Vec<String>| {
        let cell = |(nth, text): (usize, &String)| match nth {
            0 => format!("<th scope=\"row\">{}</th>", escape(text)),
            _ => format!("<td>{}</td>", escape(text)),
        };
        format!("<tr>{}</tr>\n", cells.iter().enumerate().map(cell).collect::<String>())
    };
    format!(
        "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table><caption>{caption}</caption>\n\
         <thead><tr>{heads}</tr></thead>\n<tbody>\n{}</tbody></table></div>\n",
        rows.map(cells).collect::<String>()
    )
}

/// What others have said is text, never markup.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_markup() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
        assert_eq!(shortened("/usr/lib/postgresql/18/bin", 14), "…gresql/18/bin");
        assert_eq!(shortened("short", 14), "short");
    }
}
