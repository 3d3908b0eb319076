//! What is measured in a run, and the figures that are made of it.

use serde::{Deserialize, Serialize};

/// What was measured. Times are in seconds; what is not known is `None`: of processes on another machine, or of a standby that is not
/// there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Rows inserted, or transactions done.
    pub operations: u64,
    /// How long the load took.
    pub load_seconds: f64,
    /// WAL that was inserted meanwhile.
    pub wal_bytes: u64,
    /// Processor time of all processes of the primary while the load ran.
    pub primary_cpu_seconds: Option<f64>,
    /// Processor time of all processes of the standby until it had caught up.
    pub standby_cpu_seconds: Option<f64>,
    /// How long the process that replays was busy until then: its processor time, and its waits for disks as far as the system counts
    /// them. Of Walrider, the sum over the threads that replay.
    pub replay_busy_seconds: Option<f64>,
    /// WAL that was not replayed when the load ended, as far as the primary knew.
    pub lag_bytes: Option<u64>,
    /// From the end of the load until all of it was replayed.
    pub catch_up_seconds: Option<f64>,
    /// `server_version_num` of the primary.
    pub server_version: u32,
}

/// How a figure is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number a second.
    PerSecond,
    /// Bytes.
    Bytes,
    /// Bytes a second.
    BytesPerSecond,
    /// Seconds.
    Seconds,
}

impl Unit {
    /// For people.
    pub fn show(self, value: f64) -> String {
        let scaled = |units: [&str; 4], mut value: f64, step: f64| {
            let mut unit = 0;
            while value >= 0.9995 * step && unit + 1 < units.len() {
                value /= step;
                unit += 1;
            }
            let digits = if value >= 99.95 {
                0
            } else if value >= 9.995 {
                1
            } else {
                2
            };
            format!("{value:.digits$}{}", units[unit])
        };
        match self {
            Unit::PerSecond => scaled(["/s", "k/s", "M/s", "G/s"], value, 1000.0),
            Unit::Bytes => scaled([" B", " kB", " MB", " GB"], value, 1024.0),
            Unit::BytesPerSecond => scaled([" B/s", " kB/s", " MB/s", " GB/s"], value, 1024.0),
            Unit::Seconds => scaled([" µs", " ms", " s", "000 s"], value * 1e6, 1000.0),
        }
    }
}

/// One figure of a run.
pub struct Figure {
    /// Its key in JSON.
    pub key: &'static str,
    /// What it is.
    pub title: &'static str,
    /// How it is shown.
    pub unit: Unit,
    /// Whether more is better.
    pub more_is_better: bool,
    /// Its value, in seconds, bytes or a number.
    pub of: fn(&Outcome) -> Option<f64>,
}

/// All of them. Those of work are for each operation: a setting that slows the load down does not look cheap by that.
pub const FIGURES: &[Figure] = &[
    Figure {
        key: "operations_per_second",
        title: "Load",
        unit: Unit::PerSecond,
        more_is_better: true,
        of: |run| ratio(run.operations as f64, run.load_seconds),
    },
    Figure {
        key: "wal_bytes_per_second",
        title: "Rate of WAL",
        unit: Unit::BytesPerSecond,
        more_is_better: false,
        of: |run| ratio(run.wal_bytes as f64, run.load_seconds),
    },
    Figure {
        key: "wal_bytes_per_operation",
        title: "WAL for each operation",
        unit: Unit::Bytes,
        more_is_better: false,
        of: |run| each(run, run.wal_bytes as f64),
    },
    Figure {
        key: "primary_cpu_per_operation",
        title: "CPU of the primary for each operation",
        unit: Unit::Seconds,
        more_is_better: false,
        of: |run| each(run, run.primary_cpu_seconds?),
    },
    Figure {
        key: "standby_cpu_per_operation",
        title: "CPU of the standby for each operation",
        unit: Unit::Seconds,
        more_is_better: false,
        of: |run| each(run, run.standby_cpu_seconds?),
    },
    Figure {
        key: "replay_busy_per_operation",
        title: "Busy time of replay for each operation",
        unit: Unit::Seconds,
        more_is_better: false,
        of: |run| each(run, run.replay_busy_seconds?),
    },
    Figure {
        key: "replay_bytes_per_busy_second",
        title: "Speed of replay: WAL by its busy time",
        unit: Unit::BytesPerSecond,
        more_is_better: true,
        of: |run| ratio(run.wal_bytes as f64, run.replay_busy_seconds?),
    },
    Figure {
        key: "catch_up_seconds",
        title: "Time to catch up when the load has ended",
        unit: Unit::Seconds,
        more_is_better: false,
        of: |run| run.catch_up_seconds,
    },
];

fn each(run: &Outcome, amount: f64) -> Option<f64> {
    ratio(amount, run.operations as f64)
}

/// Nothing by nothing is nothing to speak of.
fn ratio(amount: f64, by: f64) -> Option<f64> {
    Some(amount / by).filter(|ratio| ratio.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_run() {
        let run = Outcome {
            operations: 1000,
            load_seconds: 4.0,
            wal_bytes: 8_000_000,
            primary_cpu_seconds: Some(2.0),
            standby_cpu_seconds: Some(1.0),
            replay_busy_seconds: Some(0.5),
            lag_bytes: Some(0),
            catch_up_seconds: Some(0.25),
            server_version: 180_006,
        };
        let values = |run: &Outcome| FIGURES.iter().map(|figure| (figure.of)(run)).collect::<Vec<_>>();
        assert_eq!(values(&run), [250.0, 2e6, 8000.0, 0.002, 0.001, 0.0005, 1.6e7, 0.25].map(Some));
        assert_eq!(values(&Outcome::default()), vec![None; 8]);
    }

    #[test]
    fn units() {
        for (unit, value, shown) in [
            (Unit::PerSecond, 999.4, "999/s"),
            (Unit::PerSecond, 999.6, "1.00k/s"),
            (Unit::PerSecond, 45_321.0, "45.3k/s"),
            (Unit::Bytes, 1023.0, "1023 B"),
            (Unit::Bytes, 1536.0, "1.50 kB"),
            (Unit::BytesPerSecond, 160.0 * 1048576.0, "160 MB/s"),
            (Unit::Seconds, 0.000_012_34, "12.3 µs"),
            (Unit::Seconds, 0.5, "500 ms"),
            (Unit::Seconds, 95.0, "95.0 s"),
        ] {
            assert_eq!(unit.show(value), shown);
        }
    }
}
