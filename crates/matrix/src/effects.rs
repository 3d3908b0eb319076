//! What the levels of factors do to a figure: main effects by least squares, with intervals where repeats tell how much it varies by
//! itself.
//!
//! The model is of logarithms: each level multiplies the figure by something, whatever the other factors' levels. The noise is what
//! runs with the same settings differ by, and nothing else; without repeats there is none, and no interval.

use std::collections::BTreeMap;

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, FisherSnedecor, StudentsT};

use crate::plan::Factor;

/// Of the intervals.
pub const CONFIDENCE: f64 = 0.95;
/// Below this share of a column that the columns before leave of it, it is none of its own.
const LEAST_PIVOT: f64 = 1e-9;

/// A level beside the first of its factor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LevelEffect {
    /// The level.
    pub level: String,
    /// Runs with it that have the figure.
    pub runs: usize,
    /// By what it multiplies the figure of the first level; 1 for the first. `None`: there was no run, or it cannot be told.
    pub ratio: Option<f64>,
    /// The 95 % interval of the ratio.
    pub interval: Option<(f64, f64)>,
}

/// What a factor does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FactorEffect {
    /// Its name.
    pub factor: String,
    /// Its levels; the first is what the others are compared with.
    pub levels: Vec<LevelEffect>,
}

/// What the factors do to one figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effects {
    /// Runs that have the figure.
    pub runs: usize,
    /// Their geometric mean.
    pub mean: f64,
    /// Degrees of freedom of the noise: runs less combinations. Zero: no combination was repeated, and there is no interval.
    pub degrees_of_freedom: usize,
    /// By what a run typically differs from another with the same settings: 1.03 is 3 %.
    pub noise: Option<f64>,
    /// How likely the combinations would differ from the model by as much as they do if they were just noise. Small: the factors do
    /// not act independently of each other.
    pub independence: Option<f64>,
    /// Those that are varied.
    pub factors: Vec<FactorEffect>,
}

/// A column of the model: a level that is not the first of its factor among those that have runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Column {
    factor: usize,
    level: usize,
}

/// The linear model over some runs.
pub struct Model<'a> {
    factors: &'a [Factor],
    columns: Vec<Column>,
    /// For each run the number of the level of each factor.
    runs: Vec<&'a [usize]>,
}

/// What least squares make of it.
#[derive(Debug)]
struct Fit {
    /// The mean where all levels are the first, then one for each column.
    coefficients: Vec<f64>,
    /// Of each its variance in units of that of the noise.
    variances: Vec<f64>,
    /// Sum of the squares of what is left.
    left: f64,
}

impl<'a> Model<'a> {
    /// Over these runs: for each factor the number of its level. A level without a run has no column.
    pub fn new(factors: &'a [Factor], runs: &'a [Vec<usize>]) -> Model<'a> {
        Model::over(factors, runs.iter().map(Vec::as_slice).collect())
    }

    fn over(factors: &'a [Factor], runs: Vec<&'a [usize]>) -> Model<'a> {
        let columns = factors.iter().enumerate().flat_map(|(factor, of)| {
            let seen = |level: &usize| runs.iter().any(|levels| levels[factor] == *level);
            (0..of.levels.len()).filter(seen).skip(1).map(move |level| Column { factor, level }).collect::<Vec<_>>()
        });
        Model { factors, columns: columns.collect(), runs }
    }

    /// The row of a run: 1, then whether it has each column's level.
    fn row(&self, levels: &[usize]) -> Vec<f64> {
        let has = |column: &Column| if levels[column.factor] == column.level { 1.0 } else { 0.0 };
        [1.0].into_iter().chain(self.columns.iter().map(has)).collect()
    }

    /// The inverse of the information matrix X'X, and the logarithm of its determinant; `None` where it has no inverse. Gauss and Jordan,
    /// without pivoting: it is symmetric and not negative.
    fn inverse(&self) -> Option<(Vec<Vec<f64>>, f64)> {
        let size = 1 + self.columns.len();
        let mut matrix = vec![vec![0.0; 2 * size]; size];
        for levels in &self.runs {
            let row = self.row(levels);
            for (i, j) in (0..size).flat_map(|i| (0..size).map(move |j| (i, j))) {
                matrix[i][j] += row[i] * row[j];
            }
        }
        let diagonal: Vec<f64> = (0..size).map(|i| matrix[i][i]).collect();
        (0..size).for_each(|i| matrix[i][size + i] = 1.0);
        let mut determinant = 0.0;
        for i in 0..size {
            let pivot = matrix[i][i];
            if pivot <= LEAST_PIVOT * diagonal[i].max(1.0) {
                return None;
            }
            determinant += pivot.ln();
            matrix[i].iter_mut().for_each(|value| *value /= pivot);
            let of_pivot = matrix[i].clone();
            for (_, row) in matrix.iter_mut().enumerate().filter(|(at, _)| *at != i) {
                let times = row[i];
                row.iter_mut().zip(&of_pivot).for_each(|(value, pivot)| *value -= times * pivot);
            }
        }
        Some((matrix.into_iter().map(|row| row[size..].to_vec()).collect(), determinant))
    }

    /// How sharply the runs tell the levels apart, for comparison with other runs of the same number; `None` where they do not.
    pub fn sharpness(&self) -> Option<f64> {
        let all = self.factors.iter().map(|factor| factor.levels.len() - 1).sum();
        if self.columns.len() < all { None } else { self.inverse().map(|(_, determinant)| determinant) }
    }

    /// The two levels of different factors that most often come together, or never do, and their correlation; `None` where all are
    /// independent.
    pub fn most_alike(&self) -> Option<(String, String, f64)> {
        let count = self.runs.len() as f64;
        let share = |of: &dyn Fn(&[usize]) -> bool| self.runs.iter().filter(|levels| of(levels)).count() as f64 / count;
        let of = |column: Column| move |levels: &[usize]| levels[column.factor] == column.level;
        let every = self
            .factors
            .iter()
            .enumerate()
            .flat_map(|(factor, of)| (0..of.levels.len()).map(move |level| Column { factor, level }));
        let every: Vec<Column> = every.collect();
        let pairs = every.iter().flat_map(|a| every.iter().filter(|b| a.factor < b.factor).map(move |b| (*a, *b)));
        let correlated = pairs.filter_map(|(a, b)| {
            let (p, q, both) = (share(&of(a)), share(&of(b)), share(&|levels| of(a)(levels) && of(b)(levels)));
            let spread = (p * (1.0 - p) * q * (1.0 - q)).sqrt();
            (spread > 0.0).then(|| (a, b, (both - p * q) / spread))
        });
        let (a, b, correlation) = correlated.max_by(|a, b| a.2.abs().total_cmp(&b.2.abs()))?;
        let name = |column: Column| {
            let factor = &self.factors[column.factor];
            format!("{}={}", factor.name, factor.levels[column.level])
        };
        (correlation.abs() > LEAST_PIVOT).then(|| (name(a), name(b), correlation))
    }

    fn fit(&self, values: &[f64]) -> Option<Fit> {
        let (inverse, _) = self.inverse()?;
        let rows: Vec<Vec<f64>> = self.runs.iter().map(|levels| self.row(levels)).collect();
        let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let moments: Vec<f64> =
            (0..inverse.len()).map(|at| rows.iter().zip(values).map(|(row, value)| row[at] * value).sum()).collect();
        let coefficients: Vec<f64> = inverse.iter().map(|row| product(row, &moments)).collect();
        let left = rows.iter().zip(values).map(|(row, value)| (value - product(row, &coefficients)).powi(2)).sum();
        let variances = (0..inverse.len()).map(|at| inverse[at][at]).collect();
        Some(Fit { coefficients, variances, left })
    }
}

/// What repeats of the same levels differ by: the sum of squares about their means, its degrees of freedom, and the number of
/// combinations.
fn noise(runs: &[&[usize]], values: &[f64]) -> (f64, usize, usize) {
    let mut groups: BTreeMap<&[usize], Vec<f64>> = BTreeMap::new();
    runs.iter().zip(values).for_each(|(levels, value)| groups.entry(levels).or_default().push(*value));
    let squares = groups.values().map(|group| {
        let mean = group.iter().sum::<f64>() / group.len() as f64;
        group.iter().map(|value| (value - mean).powi(2)).sum::<f64>()
    });
    (squares.sum(), runs.len() - groups.len(), groups.len())
}

/// What the factors do to a figure, from the runs that have it: for each factor the number of its level, and the figure, above zero.
/// `None` where there is no run.
pub fn effects(factors: &[Factor], observations: &[(Vec<usize>, f64)]) -> Option<Effects> {
    let seen: Vec<&(Vec<usize>, f64)> =
        observations.iter().filter(|(_, value)| *value > 0.0 && value.is_finite()).collect();
    let values: Vec<f64> = seen.iter().map(|(_, value)| value.ln()).collect();
    let runs: Vec<&[usize]> = seen.iter().map(|(levels, _)| levels.as_slice()).collect();
    if runs.is_empty() {
        return None;
    }
    let (squares, freedom, combinations) = noise(&runs, &values);
    let model = Model::over(factors, runs.clone());
    let fit = model.fit(&values);
    let variance = (freedom > 0).then(|| squares / freedom as f64);
    let effect = |factor: usize, level: usize| {
        let has = |at: usize| runs.iter().filter(|levels| levels[factor] == at).count();
        let column = model.columns.iter().position(|column| *column == Column { factor, level });
        let (ratio, interval) = match (column, &fit) {
            _ if level == 0 && has(0) > 0 => (Some(1.0), None),
            (Some(column), Some(fit)) if has(0) > 0 => {
                let (estimate, unit) = (fit.coefficients[1 + column], fit.variances[1 + column]);
                let half = variance.and_then(|variance| Some(quantile(freedom)? * (variance * unit).sqrt()));
                (Some(estimate.exp()), half.map(|half| ((estimate - half).exp(), (estimate + half).exp())))
            }
            _ => (None, None),
        };
        LevelEffect { level: factors[factor].levels[level].clone(), runs: has(level), ratio, interval }
    };
    let varied = (0..factors.len()).filter(|&at| factors[at].levels.len() > 1);
    let independence = fit.as_ref().zip(variance).and_then(|(fit, variance)| {
        let more = combinations.checked_sub(fit.coefficients.len()).filter(|&more| more > 0)?;
        let ratio = (fit.left - squares).max(0.0) / more as f64 / variance;
        let distribution = FisherSnedecor::new(more as f64, freedom as f64).ok()?;
        ratio.is_finite().then(|| 1.0 - distribution.cdf(ratio))
    });
    Some(Effects {
        runs: runs.len(),
        mean: (values.iter().sum::<f64>() / values.len() as f64).exp(),
        degrees_of_freedom: freedom,
        noise: variance.map(|variance| variance.sqrt().exp()),
        independence,
        factors: varied
            .map(|factor| FactorEffect {
                factor: factors[factor].name.clone(),
                levels: (0..factors[factor].levels.len()).map(|level| effect(factor, level)).collect(),
            })
            .collect(),
    })
}

/// Of Student's t on both sides: what lies outside has 5 %.
fn quantile(freedom: usize) -> Option<f64> {
    let distribution = StudentsT::new(0.0, 1.0, freedom as f64).ok()?;
    Some(distribution.inverse_cdf((1.0 + CONFIDENCE) / 2.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    fn near(a: f64, b: f64, within: f64) {
        assert!((a - b).abs() <= within, "{a} is not {b}");
    }

    /// The yield of a chemical process at two concentrations of the reactant and two amounts of the catalyst, three times each
    /// (Montgomery, "Design and Analysis of Experiments", section 6.2).
    fn process() -> Vec<(Vec<usize>, f64)> {
        let cells = [
            ([0, 0], [28., 25., 27.]),
            ([1, 0], [36., 32., 32.]),
            ([0, 1], [18., 19., 23.]),
            ([1, 1], [31., 30., 29.]),
        ];
        cells.iter().flat_map(|(levels, values)| values.map(|value| (levels.to_vec(), value))).collect()
    }

    /// The book has: effects 8.33 and -5.00, interaction 1.67; sums of squares 208.33, 75.00, 8.33, and 31.34 of the error with 8 degrees of
    /// freedom; F of the interaction 2.13, its P-value 0.1826 (by integration of Student's t, which is F's root here, 0.18278). The interval of an effect is t(0.025, 8) = 2.306 times
    /// sqrt(3.92 * (1/6 + 1/6)).
    #[test]
    fn a_textbook_example() {
        // The figure is the exponential of the book's, a tenth of it: effects on its logarithm are a tenth of the book's.
        let observations: Vec<_> =
            process().into_iter().map(|(levels, value)| (levels, (value / 10.0).exp())).collect();
        let effects = effects(&plan(&["a=-,+", "b=-,+"], 1, 3).factors, &observations).unwrap();
        assert_eq!((effects.runs, effects.degrees_of_freedom), (12, 8));
        near(effects.mean.ln() * 10.0, 27.5, 1e-9);
        near((effects.noise.unwrap().ln() * 10.0).powi(2), 3.92, 0.005);
        near(effects.independence.unwrap(), 0.182_78, 0.000_01);
        for (factor, expected) in [(0, 8.33), (1, -5.0)] {
            let [low, high] = &effects.factors[factor].levels[..] else { panic!("two levels") };
            assert_eq!((low.ratio, low.interval, low.runs, high.runs), (Some(1.0), None, 6, 6));
            near(high.ratio.unwrap().ln() * 10.0, expected, 0.005);
            let (from, to) = high.interval.unwrap();
            near((to.ln() - from.ln()) * 10.0 / 2.0, 2.306 * (3.9167_f64 / 3.0).sqrt(), 0.001);
            near((to.ln() + from.ln()) * 10.0 / 2.0, expected, 0.005);
        }
    }

    /// Quantiles as in every table of Student's t.
    #[test]
    fn quantiles() {
        for (freedom, expected) in [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (30, 2.042), (120, 1.980)] {
            near(quantile(freedom).unwrap(), expected, 0.0005);
        }
    }

    /// Figures that are exact products come out as such, although runs are missing; and by hand: levels 1, 2 and 4 times, and 3 times.
    #[test]
    fn products_are_found_where_runs_are_missing() {
        let factors = plan(&["a=x,y,z", "b=off,on"], 1, 1).factors;
        let observations: Vec<_> = [[0, 0], [0, 1], [1, 0], [2, 1]]
            .iter()
            .map(|&[a, b]| (vec![a, b], [1., 2., 4.][a] * [5., 15.][b]))
            .collect();
        let effects = effects(&factors, &observations).unwrap();
        let ratios =
            |factor: usize| effects.factors[factor].levels.iter().map(|level| level.ratio.unwrap()).collect::<Vec<_>>();
        ratios(0).iter().zip([1.0, 2.0, 4.0]).for_each(|(ratio, expected)| near(*ratio, expected, 1e-9));
        ratios(1).iter().zip([1.0, 3.0]).for_each(|(ratio, expected)| near(*ratio, expected, 1e-9));
    }

    #[test]
    fn without_repeats_there_is_no_interval() {
        let factors = plan(&["a=x,y", "b=x,y"], 1, 1).factors;
        let observations = [([0, 0], 1.0), ([0, 1], 2.1), ([1, 0], 3.0), ([1, 1], 5.0)];
        let effects = effects(&factors, &observations.map(|(levels, value)| (levels.to_vec(), value))).unwrap();
        assert_eq!((effects.degrees_of_freedom, effects.noise, effects.independence), (0, None, None));
        assert!(effects.factors.iter().flat_map(|factor| &factor.levels).all(|level| level.interval.is_none()));
        near(effects.factors[0].levels[1].ratio.unwrap(), (3.0_f64 * 5.0 / 2.1).sqrt(), 1e-9);
    }

    #[test]
    fn what_cannot_be_told_is_not() {
        let factors = plan(&["a=x,y,z", "b=x,y"], 1, 1).factors;
        let ratios = |observations: &[([usize; 2], f64)]| {
            let observations: Vec<_> = observations.iter().map(|(levels, value)| (levels.to_vec(), *value)).collect();
            let effects = effects(&factors, &observations)?;
            let rounded = |level: &LevelEffect| level.ratio.map(|ratio| (ratio * 1e6).round() / 1e6);
            Some(
                effects
                    .factors
                    .iter()
                    .map(|factor| factor.levels.iter().map(rounded).collect())
                    .collect::<Vec<Vec<_>>>(),
            )
        };
        // Zero has no logarithm.
        assert_eq!(ratios(&[([0, 0], 0.0), ([1, 1], f64::NAN)]), None);
        // No run with a=z; and where all of a=y have b=y and nobody else has, neither is told from the other.
        assert_eq!(
            ratios(&[([0, 0], 2.0), ([1, 1], 4.0)]),
            Some(vec![vec![Some(1.0), None, None], vec![Some(1.0), None]])
        );
        // Nothing is compared with a first level that has no run.
        assert_eq!(ratios(&[([1, 0], 2.0), ([1, 1], 4.0)]), Some(vec![vec![None; 3], vec![Some(1.0), Some(2.0)]]));
        assert_eq!(
            ratios(&[([0, 0], 2.0), ([2, 0], 4.0)]),
            Some(vec![vec![Some(1.0), None, Some(2.0)], vec![Some(1.0), None]])
        );
    }
}
