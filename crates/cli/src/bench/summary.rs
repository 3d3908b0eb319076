//! What came of an experiment, for all that show it.

use serde_json::{Value, json};
use walrider_matrix::effects::{Effects, effects};
use walrider_matrix::figures::{FIGURES, Figure, Outcome};
use walrider_matrix::fraction::Design;
use walrider_matrix::plan::{Factor, Run};
use walrider_matrix::results::{Done, Failed, Header, Results, SCHEMA_VERSION};

use super::text::shown;

/// What came of it so far.
pub struct Summary<'a> {
    /// The experiment.
    pub header: &'a Header,
    /// All runs in their order, with what came of them if they were made.
    pub runs: Vec<(&'a Run, Option<&'a Done>)>,
    /// Figures that there are, and what the factors do to them.
    pub figures: Vec<(&'static Figure, Effects)>,
}

impl<'a> Summary<'a> {
    /// Of the runs that there are.
    pub fn new(results: &'a Results, runs: &'a [Run]) -> Summary<'a> {
        let runs: Vec<_> = runs.iter().map(|run| (run, results.of(run))).collect();
        let mut summary = Summary { header: &results.header, runs, figures: Vec::new() };
        summary.figures = FIGURES
            .iter()
            .filter_map(|figure| {
                let seen = summary.values(figure).map(|(run, value)| (run.levels.clone(), value)).collect::<Vec<_>>();
                Some((figure, effects(&results.header.plan.factors, &seen)?))
            })
            .collect();
        summary
    }

    /// Runs that have figures.
    pub fn outcomes(&self) -> impl Iterator<Item = (&'a Run, &'a Outcome)> {
        self.runs.iter().filter_map(|(run, done)| Some((*run, (*done)?.outcome.as_ref()?)))
    }

    /// Runs that have this figure.
    pub fn values(&self, figure: &Figure) -> impl Iterator<Item = (&'a Run, f64)> {
        self.outcomes().filter_map(|(run, outcome)| Some((run, (figure.of)(outcome)?)))
    }

    /// Runs that failed, and why.
    pub fn failed(&self) -> impl Iterator<Item = (&'a Done, &'a Failed)> {
        self.runs.iter().filter_map(|(_, done)| Some(((*done)?, (*done)?.failed.as_ref()?)))
    }

    /// The settings of a run, for people.
    pub fn settings(done: &Done) -> String {
        let settings = done.settings.iter().map(|(name, value)| format!("{name}={}", shown(value)));
        settings.collect::<Vec<_>>().join(" ")
    }

    /// Whether all runs were made, and none has failed.
    pub fn is_complete(&self) -> bool {
        self.outcomes().count() == self.runs.len()
    }

    /// The factors that are varied, each with its number.
    pub fn varied(&self) -> impl Iterator<Item = (usize, &'a Factor)> {
        self.header.plan.factors.iter().enumerate().filter(|(_, factor)| factor.levels.len() > 1)
    }

    /// What was made, in a sentence.
    pub fn state(&self) -> String {
        let (done, failed) = (self.outcomes().count(), self.failed().count());
        let left = self.runs.len() - done - failed;
        let mut words = format!("{done} of {} runs", self.runs.len());
        if failed > 0 {
            words += &format!(", {failed} failed");
        }
        if left > 0 {
            words += &format!(", {left} not made");
        }
        words + &format!("; an operation is a {}.", self.header.plan.load.operation())
    }

    /// How sure the ratios of a figure are, in words.
    pub fn certainty(effects: &Effects) -> String {
        let Some(noise) = effects.noise else {
            return "No intervals: no combination was tried twice.".to_owned();
        };
        let mut words = format!(
            "95 % intervals with {} degrees of freedom; runs with the same settings differ by {:.1} %.",
            effects.degrees_of_freedom,
            (noise - 1.0) * 100.0
        );
        if effects.independence.is_some_and(|p| p < 0.05) {
            words += " The factors do not act independently: what one does depends on others, so read the runs, too.";
        }
        words
    }

    /// All of it; what `--json` prints.
    pub fn to_json(&self, design: &Design) -> Value {
        let figures = self.figures.iter().map(|(figure, effects)| {
            json!({"key": figure.key, "title": figure.title, "more_is_better": figure.more_is_better, "effects": effects})
        });
        json!({
            "schema_version": SCHEMA_VERSION,
            "plan": self.header.plan,
            "limits": design.limits,
            "runs": self.runs.len(),
            "succeeded": self.outcomes().count(),
            "failed": self.failed().map(|(done, _)| done).collect::<Vec<_>>(),
            "figures": figures.collect::<Vec<_>>(),
        })
    }
}
