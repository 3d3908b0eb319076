//! What is to be done: the factors with their levels, the runs, and their order.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::fraction::{self, Design};

/// Which standby: see [`STANDBYS`].
pub const STANDBY: &str = "standby";
/// `on` or `off`, as initdb makes the cluster.
pub const DATA_CHECKSUMS: &str = "data_checksums";
/// The directory of the server's programs.
pub const BINDIR: &str = "bindir";
/// PostgreSQL's own, `walrider standby`, or none.
pub const STANDBYS: [&str; 3] = ["stock", "walrider", "none"];

/// Most combinations of levels: who wants more has made a mistake.
const MAX_COMBINATIONS: usize = 4096;

/// What is varied: a setting of PostgreSQL's by its name, or [`STANDBY`], [`DATA_CHECKSUMS`], [`BINDIR`]. With one level, it is the same
/// in all runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Factor {
    /// Its name.
    pub name: String,
    /// At least one, no two alike. All others are compared with the first.
    pub levels: Vec<String>,
}

impl Factor {
    /// `NAME=LEVEL,LEVEL`, or `NAME=LEVEL|LEVEL` where a level has commas itself.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Factor, String> {
        let (name, levels) = text.split_once('=').ok_or("expected NAME=LEVEL,LEVEL")?;
        let separator = if levels.contains('|') { '|' } else { ',' };
        Factor::new(name, levels.split(separator))
    }

    /// `NAME=VALUE`, in all runs the same.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn fixed(text: &str) -> Result<Factor, String> {
        let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
        Factor::new(name, [value])
    }

    fn new<'a>(name: &str, levels: impl IntoIterator<Item = &'a str>) -> Result<Factor, String> {
        let name = name.trim().to_ascii_lowercase();
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.';
        if name.is_empty() || !name.bytes().all(is_name) {
            return Err(format!("\"{name}\" is no name of a setting"));
        }
        let levels: Vec<String> = levels.into_iter().map(|level| level.trim().to_owned()).collect();
        let known: &[&str] = match name.as_str() {
            STANDBY => &STANDBYS,
            DATA_CHECKSUMS => &["on", "off"],
            _ => &[],
        };
        if let Some(level) = levels.iter().find(|level| !known.is_empty() && !known.contains(&level.as_str())) {
            return Err(format!("{name} is {}, not \"{level}\"", known.join(" or ")));
        }
        if let Some(level) =
            levels.iter().enumerate().find_map(|(at, level)| levels[..at].contains(level).then_some(level))
        {
            return Err(format!("{name} has \"{level}\" twice"));
        }
        if levels.iter().any(|level| level.chars().any(char::is_control)) {
            return Err(format!("a level of {name} has a control character"));
        }
        Ok(Factor { name, levels })
    }

    /// Whether it is no setting of PostgreSQL's configuration.
    pub fn is_special(&self) -> bool {
        [STANDBY, DATA_CHECKSUMS, BINDIR].contains(&self.name.as_str())
    }
}

/// What is done on the primary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    /// Five partitioned tables with a primary key of time and number; each session inserts rows with prepared statements, and commits
    /// every 500.
    Tables,
    /// pgbench's own, on tables of this scale.
    Pgbench {
        /// As of `pgbench --scale`.
        scale: u32,
    },
    /// A script for pgbench.
    Script {
        /// The script.
        file: PathBuf,
        /// SQL for psql that makes what the script needs.
        init: Option<PathBuf>,
    },
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Load::Tables => write!(f, "inserts into five partitioned tables, 500 rows a commit"),
            Load::Pgbench { scale } => write!(f, "pgbench, scale {scale}"),
            Load::Script { file, .. } => write!(f, "pgbench -f \"{}\"", file.display()),
        }
    }
}

impl Load {
    /// What one operation is.
    pub fn operation(&self) -> &'static str {
        if *self == Load::Tables { "row" } else { "transaction" }
    }
}

/// All that makes two experiments the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What is varied, and what is fixed.
    pub factors: Vec<Factor>,
    /// Of all combinations, one of so many is tried.
    pub fraction: u32,
    /// How often each is.
    pub repeats: u32,
    /// Of the order, and of a fraction that is chosen.
    pub seed: u64,
    /// What is done.
    pub load: Load,
    /// By how many sessions at once.
    pub clients: u16,
    /// For how long in each run, in seconds.
    pub seconds: f64,
    /// Given servers, as messages name them; none: on servers that are made and thrown away.
    pub servers: Vec<String>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// In the order in which they are made, from 1.
    pub number: usize,
    /// How often its combination was there before.
    pub repeat: u32,
    /// For each factor the number of its level.
    pub levels: Vec<usize>,
}

impl Plan {
    /// What is varied.
    pub fn varied(&self) -> Vec<Factor> {
        self.factors.iter().filter(|factor| factor.levels.len() > 1).cloned().collect()
    }

    /// The combinations that are tried, each once, and what they cannot tell apart.
    ///
    /// # Errors
    /// If there are too many, or the fraction is too small for the factors.
    pub fn design(&self) -> Result<Design, String> {
        for (at, factor) in self.factors.iter().enumerate() {
            if self.factors[..at].iter().any(|other| other.name == factor.name) {
                return Err(format!("{} is named twice", factor.name));
            }
        }
        let total = self.factors.iter().try_fold(1_usize, |total, factor| total.checked_mul(factor.levels.len()));
        if total.is_none_or(|total| total > MAX_COMBINATIONS) {
            return Err(format!("there are more than {MAX_COMBINATIONS} combinations"));
        }
        fraction::design(&self.factors, self.fraction, self.seed)
    }

    /// The runs in their order: in each repeat all combinations, shuffled, so that what drifts on the machine looks like no factor.
    pub fn runs(&self, design: &Design) -> Vec<Run> {
        let mut random = fastrand::Rng::with_seed(self.seed);
        let mut runs = Vec::new();
        for repeat in 0..self.repeats {
            let mut order = design.combinations.clone();
            random.shuffle(&mut order);
            runs.extend(order.into_iter().map(|levels| Run { number: 0, repeat, levels }));
        }
        runs.iter_mut().zip(1..).for_each(|(run, number)| run.number = number);
        runs
    }

    /// The settings of a run, by name.
    pub fn settings(&self, run: &Run) -> Vec<(String, String)> {
        let level = |(factor, &level): (&Factor, &usize)| (factor.name.clone(), factor.levels[level].clone());
        self.factors.iter().zip(&run.levels).map(level).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A plan over factors of these levels, as `a=1,2`.
    pub fn plan(factors: &[&str], fraction: u32, repeats: u32) -> Plan {
        Plan {
            factors: factors.iter().map(|factor| Factor::parse(factor).unwrap()).collect(),
            fraction,
            repeats,
            seed: 7,
            load: Load::Tables,
            clients: 1,
            seconds: 1.0,
            servers: Vec::new(),
        }
    }

    #[test]
    fn factors_are_read() {
        let factor = |name: &str, levels: &[&str]| Factor {
            name: name.into(),
            levels: levels.iter().map(|&level| level.into()).collect(),
        };
        assert_eq!(Factor::parse("WAL_compression=off, lz4"), Ok(factor("wal_compression", &["off", "lz4"])));
        assert_eq!(Factor::parse("a.b=|x,y"), Ok(factor("a.b", &["", "x,y"])));
        assert_eq!(Factor::fixed("a=x,y=z"), Ok(factor("a", &["x,y=z"])));
        for (bad, said) in [
            ("a", "expected NAME=LEVEL,LEVEL"),
            ("=x", "no name"),
            ("a b=x", "no name"),
            ("a=x,y,x", "twice"),
            ("standby=stock,ours", "stock or walrider or none, not \"ours\""),
            ("data_checksums=yes", "on or off"),
            ("a=x\ny", "control character"),
        ] {
            assert!(Factor::parse(bad).unwrap_err().contains(said), "{bad}");
        }
    }

    #[test]
    fn all_combinations_are_tried_in_each_repeat_in_an_order_of_the_seed() {
        let plan = plan(&["a=1,2,3", "fixed=x", "b=on,off"], 1, 2);
        let runs = plan.runs(&plan.design().unwrap());
        assert_eq!(runs.iter().map(|run| run.number).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
        for (repeat, half) in [(0, &runs[..6]), (1, &runs[6..])] {
            let mut levels: Vec<_> = half.iter().map(|run| run.levels.clone()).collect();
            levels.sort();
            assert_eq!(levels, [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1], [2, 0, 0], [2, 0, 1]]);
            assert!(half.iter().all(|run| run.repeat == repeat));
        }
        let order = |seed| Plan { seed, ..plan.clone() }.runs(&plan.design().unwrap());
        assert_eq!(order(7), runs);
        assert!((8..20).any(|seed| order(seed) != runs));
        let settings = plan.settings(&Run { number: 1, repeat: 0, levels: vec![2, 0, 1] });
        assert_eq!(settings, [("a", "3"), ("fixed", "x"), ("b", "off")].map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(plan(&["a=1,2", "A=3"], 1, 1).design().unwrap_err(), "a is named twice");
        let many: Vec<String> = (0..13).map(|nth| format!("f{nth}=1,2")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(plan(&many, 1, 1).design().unwrap_err().contains("more than 4096"));
    }
}
