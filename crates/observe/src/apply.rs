//! The status of `walrider logical apply` at one moment: each key of `/status`, and the metrics made of it. What is not known is
//! null.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;
use walrider_layout::Lsn;

use crate::health::Limits;
use crate::status::{SCHEMA_VERSION, Time, text};
use crate::{Observed, process};

/// What it is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ApplyState {
    /// Between two connections.
    #[default]
    Connecting,
    /// Receiving and applying.
    Streaming,
    /// Connected, and told to begin nothing.
    Paused,
    /// Stopped cleanly.
    Stopped,
    /// Stopped by an error.
    Failed,
}

impl ApplyState {
    const ALL: [ApplyState; 5] =
        [ApplyState::Connecting, ApplyState::Streaming, ApplyState::Paused, ApplyState::Stopped, ApplyState::Failed];

    fn name(self) -> &'static str {
        match self {
            ApplyState::Connecting => "connecting",
            ApplyState::Streaming => "streaming",
            ApplyState::Paused => "paused",
            ApplyState::Stopped => "stopped",
            ApplyState::Failed => "failed",
        }
    }
}

/// Where it stands, in positions of the publisher: `flushed <= applied <= received`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ApplyPositions {
    /// Up to where the publisher has sent, or decoded.
    #[serde(with = "text")]
    pub received: Option<Lsn>,
    /// End of the last transaction that was applied.
    #[serde(with = "text")]
    pub applied: Option<Lsn>,
    /// Up to where everything is durable on the target, and told to the publisher.
    #[serde(with = "text")]
    pub flushed: Option<Lsn>,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ApplyStatus {
    /// Raised when a key goes, or means something else.
    pub schema_version: u32,
    /// Always `logical apply`.
    pub command: &'static str,
    /// Walrider's version.
    pub version: String,
    /// When this was made.
    pub time: Time,
    /// When the process began.
    pub started_at: Time,
    /// What it is doing.
    pub state: ApplyState,
    /// Host and port of the publisher, while connected.
    pub source: Option<String>,
    /// The same of the target.
    pub target: Option<String>,
    /// The slot.
    pub slot: String,
    /// The name of the replication origins.
    pub origin: String,
    /// Where it stands.
    pub positions: ApplyPositions,
    /// Bytes of WAL from `applied` to `received`; 0 when everything is applied.
    pub lag_bytes: Option<u64>,
    /// Age of the last commit that was applied; 0 when everything is.
    pub lag_seconds: Option<f64>,
    /// Transactions that were read and wait to be applied.
    pub queued_transactions: u64,
    /// Batches that wait for others that they depend on.
    pub waiting_batches: u64,
    /// Batches that are executed, or wait for their turn to commit.
    pub executing_batches: u64,
    /// Transactions of the publisher that were applied.
    pub transactions: u64,
    /// Their changes.
    pub changes: u64,
    /// Transactions of the target that applied them.
    pub batches: u64,
    /// How often one was rolled back, to be executed again.
    pub retries: u64,
    /// How often one was, because an older one waited for its locks.
    pub gave_way: u64,
    /// Conflicts, by PostgreSQL's names for them.
    pub conflicts: BTreeMap<&'static str, u64>,
    /// Bytes of large transactions written to files.
    pub spilled_bytes: u64,
    /// Connections made.
    pub connections: u64,
    /// Why it last had to connect again.
    pub last_error: Option<String>,
}

impl ApplyStatus {
    /// Nothing is known yet.
    pub fn new() -> ApplyStatus {
        ApplyStatus {
            schema_version: SCHEMA_VERSION,
            command: "logical apply",
            time: Time::now(),
            ..ApplyStatus::default()
        }
    }
}

/// Name, help, and values by label; what is not known has none.
type Metric = (&'static str, &'static str, fn(&ApplyStatus) -> Vec<(String, f64)>);

fn one(value: f64) -> Vec<(String, f64)> {
    vec![(String::new(), value)]
}

fn some(value: Option<f64>) -> Vec<(String, f64)> {
    value.map_or(Vec::new(), one)
}

/// Every metric of `walrider logical apply`; each name begins with `walrider_logical_`.
pub const METRICS: &[Metric] = &[
    ("state", "1 for the state that it is in, 0 for the others.", |s| {
        let flag = |state: ApplyState| if state == s.state { 1.0 } else { 0.0 };
        ApplyState::ALL.map(|state| (format!("{{state=\"{}\"}}", state.name()), flag(state))).into()
    }),
    ("start_time_seconds", "When the process began, in seconds since 1970.", |s| one(s.started_at.unix_seconds())),
    ("position_bytes", "Where each stage stands, in bytes from the beginning of the publisher's WAL.", |s| {
        let of = |stage: &str, lsn: Option<Lsn>| Some((format!("{{stage=\"{stage}\"}}"), lsn?.0 as f64));
        let positions = &s.positions;
        let all = [("received", positions.received), ("applied", positions.applied), ("flushed", positions.flushed)];
        all.into_iter().filter_map(|(stage, lsn)| of(stage, lsn)).collect()
    }),
    ("lag_bytes", "WAL that was received and is not applied.", |s| some(s.lag_bytes.map(|lag| lag as f64))),
    ("lag_seconds", "Age of the last commit applied; 0 when everything is applied.", |s| some(s.lag_seconds)),
    ("queued_transactions", "Transactions that wait to be applied.", |s| one(s.queued_transactions as f64)),
    ("waiting_batches", "Batches that wait for others.", |s| one(s.waiting_batches as f64)),
    ("executing_batches", "Batches that are executed.", |s| one(s.executing_batches as f64)),
    ("transactions_total", "Transactions applied.", |s| one(s.transactions as f64)),
    ("changes_total", "Changes applied.", |s| one(s.changes as f64)),
    ("batches_total", "Transactions of the target that applied them.", |s| one(s.batches as f64)),
    ("retries_total", "Batches rolled back to be executed again.", |s| one(s.retries as f64)),
    ("gave_way_total", "Batches that gave way to an older one.", |s| one(s.gave_way as f64)),
    ("conflicts_total", "Conflicts, by kind.", |s| {
        s.conflicts.iter().map(|(kind, count)| (format!("{{kind=\"{kind}\"}}"), *count as f64)).collect()
    }),
    ("spilled_bytes_total", "Bytes of large transactions written to files.", |s| one(s.spilled_bytes as f64)),
    ("connections_total", "Connections made.", |s| one(s.connections as f64)),
];

impl Observed for ApplyStatus {
    fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("it has no keys but text")
    }

    fn metrics(&self) -> String {
        let mut out = String::new();
        for (name, help, values) in METRICS {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let head = writeln!(out, "# HELP walrider_logical_{name} {help}\n# TYPE walrider_logical_{name} {kind}");
            head.expect("a string takes all");
            for (labels, value) in values(self) {
                writeln!(out, "walrider_logical_{name}{labels} {value}").expect("a string takes all");
            }
        }
        process::render(&mut out);
        out
    }

    fn health(&self, limits: &Limits) -> Result<(), String> {
        if !matches!(self.state, ApplyState::Streaming | ApplyState::Paused) {
            let because = self.last_error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
            return Err(format!("{}{because}", self.state.name()));
        }
        if let Some(limit) = limits.max_lag_bytes {
            match self.lag_bytes {
                Some(lag) if lag <= limit => {}
                Some(lag) => return Err(format!("{lag} bytes behind, more than {limit}")),
                None => return Err("how far it is behind is not known yet".into()),
            }
        }
        if let Some(limit) = limits.max_lag_seconds {
            match self.lag_seconds {
                Some(lag) if lag <= limit => {}
                Some(lag) => return Err(format!("{lag:.1} s behind, more than {limit}")),
                None => return Err("how many seconds it is behind is not known yet".into()),
            }
        }
        Ok(())
    }

    fn is_ready(&self) -> bool {
        self.connections > 0
    }

    fn summary(&self) -> String {
        let mut words = self.state.name().to_owned();
        if let Some(source) = &self.source {
            words += &format!(" from {source}");
        }
        if let Some(applied) = self.positions.applied {
            words += &format!(", applied {applied}");
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streaming() -> ApplyStatus {
        ApplyStatus {
            state: ApplyState::Streaming,
            lag_bytes: Some(10),
            positions: ApplyPositions { applied: Some(Lsn(0x28)), ..ApplyPositions::default() },
            conflicts: BTreeMap::from([("update_missing", 3)]),
            retries: 7,
            ..ApplyStatus::new()
        }
    }

    #[test]
    fn health_has_limits() {
        let limits = |query: &str| Limits::parse(query).unwrap();
        assert_eq!(streaming().health(&limits("max_lag_bytes=10")), Ok(()));
        assert_eq!(streaming().health(&limits("max_lag_bytes=9")), Err("10 bytes behind, more than 9".into()));
        assert!(streaming().health(&limits("max_lag_seconds=9")).is_err());
        let failed = ApplyStatus { state: ApplyState::Connecting, last_error: Some("gone".into()), ..streaming() };
        assert_eq!(failed.health(&limits("")), Err("connecting: gone".into()));
    }

    #[test]
    fn metrics_and_status_say_the_same() {
        let text = streaming().metrics();
        for line in [
            "walrider_logical_state{state=\"streaming\"} 1",
            "walrider_logical_state{state=\"failed\"} 0",
            "walrider_logical_position_bytes{stage=\"applied\"} 40",
            "walrider_logical_conflicts_total{kind=\"update_missing\"} 3",
            "walrider_logical_retries_total 7",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("stage=\"received\""));
        assert_eq!(streaming().to_json()["positions"]["applied"], "0/28");
        assert_eq!(streaming().to_json()["conflicts"]["update_missing"], 3);
    }
}
