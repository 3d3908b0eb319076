//! What came of an experiment, as text.

use walrider_matrix::effects::LevelEffect;

use super::summary::Summary;

/// For each figure a table.
pub fn render(summary: &Summary<'_>) -> String {
    let mut text = format!("{}\n", summary.state());
    for (figure, effects) in &summary.figures {
        let direction = if figure.more_is_better { "more is better" } else { "less is better" };
        text += &format!("\n{}: {} on average, {direction}\n", figure.title, figure.unit.show(effects.mean));
        let names = effects.factors.iter().map(|factor| factor.factor.chars().count());
        let names = names.max().unwrap_or(0);
        let levels = effects.factors.iter().flat_map(|factor| &factor.levels);
        let levels = levels.map(|level| shown(&level.level).chars().count()).max().unwrap_or(0);
        for factor in &effects.factors {
            for (nth, level) in factor.levels.iter().enumerate() {
                let name = if nth == 0 { factor.factor.as_str() } else { "" };
                text += &format!("  {name:names$}  {:levels$}  {}\n", shown(&level.level), said(level));
            }
        }
        if !effects.factors.is_empty() {
            text += &format!("  {}\n", Summary::certainty(effects));
        }
    }
    for (done, failed) in summary.failed() {
        let (run, settings) = (done.run, Summary::settings(done));
        text += &format!("\nrun {run} ({settings}) has failed: {}\n", failed.message);
        failed.log.iter().for_each(|line| text += &format!("  {line}\n"));
    }
    text
}

/// A level that can be seen.
pub fn shown(level: &str) -> &str {
    if level.is_empty() { "''" } else { level }
}

/// The ratio, and its interval.
pub fn said(level: &LevelEffect) -> String {
    match (level.ratio, level.interval) {
        (Some(ratio), Some((low, high))) => format!("× {ratio:.3}  ({low:.3} to {high:.3})"),
        (Some(1.0), None) => "1".to_owned(),
        (Some(ratio), None) => format!("× {ratio:.3}"),
        (None, _) if level.runs == 0 => "no run".to_owned(),
        (None, _) => "cannot be told".to_owned(),
    }
}
