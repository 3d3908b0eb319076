//! The status as metrics for Prometheus, in its text format 0.0.4. [`METRICS`] says what there is; names carry their unit.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::health;
use crate::process;
use crate::status::{Command, Spool, StandbyStatus, State};

/// A family of samples.
pub struct Metric {
    /// Without `walrider_`.
    pub name: &'static str,
    /// What it tells.
    pub help: &'static str,
    /// Its type, and where its value is.
    pub source: Source,
}

/// Where the values of a metric are. What is not known has no sample.
#[derive(Clone, Copy)]
pub enum Source {
    /// Only ever grows, until the process ends.
    Counter(fn(&StandbyStatus) -> f64),
    /// Any number.
    Gauge(fn(&StandbyStatus) -> Option<f64>),
    /// The same for each value of a label.
    Counters(&'static str, fn(&StandbyStatus) -> Vec<(String, f64)>),
    /// One number for each value of a label.
    Gauges(&'static str, fn(&StandbyStatus) -> Vec<(String, f64)>),
    /// The number 1, with labels that say who this is.
    Info(fn(&StandbyStatus) -> Vec<(&'static str, String)>),
    /// How long each fsync took.
    Fsyncs,
}

use Source::{Counter, Counters, Fsyncs, Gauge, Gauges, Info};

const fn metric(name: &'static str, help: &'static str, source: Source) -> Metric {
    Metric { name, help, source }
}

/// Every metric there is.
pub const METRICS: &[Metric] = &[
    metric("info", "What this process is: command, version, directory, cluster, primary.", Info(info)),
    metric(
        "start_time_seconds",
        "When the process began, in seconds since 1970.",
        Gauge(|s| Some(s.started_at.unix_seconds())),
    ),
    metric("state", "1 for the state that it is in, 0 for the others.", Gauges("state", states)),
    metric("paused", "1 while replay is paused.", Gauge(|s| flag(s.paused))),
    metric("consistent", "1 when the directory could be handed over.", Gauge(|s| flag(s.consistent))),
    metric("timeline", "The timeline received or replayed.", Gauge(|s| Some(s.timeline?.get().into()))),
    metric(
        "follows",
        "1 while WAL comes from where it should, as /health sees it.",
        Gauge(|s| flag(health::follows(s))),
    ),
    metric("connected", "1 while there is a connection to the primary.", Gauge(|s| flag(s.connected_since.is_some()))),
    metric("early", "1 while WAL comes before the primary has flushed it.", Gauge(|s| flag(s.early))),
    metric("turns_total", "How often PostgreSQL has had the directory, to be read.", Counter(|s| s.turns as f64)),
    metric("connections_total", "Connections made to the primary.", Counter(|s| s.connections as f64)),
    metric(
        "last_error_time_seconds",
        "When something last went wrong, in seconds since 1970.",
        Gauge(|s| Some(s.last_error.as_ref()?.time.unix_seconds())),
    ),
    metric(
        "horizon_bytes",
        "The primary's flush position as it last told it, in bytes from the beginning of WAL.",
        Gauge(|s| Some(s.horizon?.0 as f64)),
    ),
    metric(
        "position_bytes",
        "Where each stage stands, in bytes from the beginning of WAL.",
        Gauges("stage", positions),
    ),
    metric("behind_bytes", "How far each stage is behind the primary's flush position.", Gauges("stage", behind)),
    metric(
        "replay_lag_seconds",
        "How long ago the primary had more than what is replayed; 0 when all that it told of is replayed.",
        Gauge(|s| s.replay_lag_seconds),
    ),
    metric(
        "downstreams",
        "Those that a relay streams to.",
        Gauge(|s| {
            (s.command == Command::Relay).then(|| s.downstreams.iter().filter(|one| one.streaming).count() as f64)
        }),
    ),
    metric(
        "downstream_behind_bytes",
        "How far what each downstream has written is behind what the relay has.",
        Gauges("application_name", downstreams),
    ),
    metric("slot_retained_bytes", "WAL that each slot of a relay holds back.", Gauges("slot", slots)),
    metric("archived_total", "Files of WAL archived.", Counter(|s| s.archiver.archived_count as f64)),
    metric("archive_failures_total", "Attempts to archive that failed.", Counter(|s| s.archiver.failed_count as f64)),
    metric(
        "archive_given_up_total",
        "Segments that were given up, and are missing in the archive.",
        Counter(|s| s.archiver.given_up_count as f64),
    ),
    metric(
        "archive_ready",
        "Files that wait to be archived.",
        Gauge(|s| s.archiver.place.as_ref().map(|_| s.archiver.ready_count as f64)),
    ),
    metric(
        "archive_last_time_seconds",
        "When a file was last archived, in seconds since 1970.",
        Gauge(|s| Some(s.archiver.last_archived_time?.unix_seconds())),
    ),
    metric("silent_seconds", "Time since the primary was last heard.", Gauge(|s| s.silent_seconds)),
    metric(
        "transfer_seconds",
        "How long the primary's last message took, if the clocks agree.",
        Gauge(|s| s.transfer_seconds),
    ),
    metric("min_apply_delay_seconds", "recovery_min_apply_delay.", Gauge(|s| Some(s.min_apply_delay_seconds))),
    metric("replayed_records_total", "Records replayed.", Counter(|s| s.replay.records as f64)),
    metric(
        "replayed_transactions_total",
        "Transactions whose commit was replayed.",
        Counter(|s| s.replay.transactions as f64),
    ),
    metric("replayed_aborts_total", "Transactions whose rollback was replayed.", Counter(|s| s.replay.aborts as f64)),
    metric("pages_read_total", "Pages read from relation files.", Counter(|s| s.replay.pages_read as f64)),
    metric("pages_written_total", "Pages written to relation files.", Counter(|s| s.replay.pages_written as f64)),
    metric(
        "replay_sweeps_total",
        "Batches larger than memory that were replayed.",
        Counter(|s| s.replay.sweeps as f64),
    ),
    metric("restartpoints_total", "Restartpoints made.", Counter(|s| s.replay.restartpoints as f64)),
    metric(
        "replay_seconds_total",
        "Time of replay in each stage, those of waiting included.",
        Counters("stage", |s| s.replay.stages.clone().into_iter().collect()),
    ),
    metric("spool_written_bytes_total", "WAL written to the spool.", Counter(|s| s.spool.bytes as f64)),
    metric("spool_writes_total", "Calls that wrote WAL to the spool.", Counter(|s| s.spool.writes as f64)),
    metric(
        "spool_early_written_bytes_total",
        "WAL written before the primary had flushed it, in a log of its own.",
        Counter(|s| s.spool.early_bytes as f64),
    ),
    metric("spool_early_writes_total", "Calls that wrote it.", Counter(|s| s.spool.early_writes as f64)),
    metric("spool_write_seconds_total", "How long all these calls took.", Counter(|s| s.spool.write_seconds)),
    metric(
        "spool_segments_created_total",
        "Segments made ahead of their use.",
        Counter(|s| s.spool.segments_created as f64),
    ),
    metric(
        "spool_segments_recycled_total",
        "Segments renamed to future ones.",
        Counter(|s| s.spool.segments_recycled as f64),
    ),
    metric("spool_segments_removed_total", "Segments removed.", Counter(|s| s.spool.segments_removed as f64)),
    metric(
        "spool_segment_waits_total",
        "How often writing waited for its next segment.",
        Counter(|s| s.spool.segment_waits as f64),
    ),
    metric(
        "spool_segment_wait_seconds_total",
        "How long, until that or one before was durable.",
        Counter(|s| s.spool.segment_wait_seconds),
    ),
    metric("spool_fsync_seconds", "How long each fsync of the spool took.", Fsyncs),
];

fn flag(set: bool) -> Option<f64> {
    Some(if set { 1.0 } else { 0.0 })
}

fn info(status: &StandbyStatus) -> Vec<(&'static str, String)> {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    vec![
        ("command", status.command.to_string()),
        ("version", status.version.clone()),
        ("data_dir", status.data_dir.clone()),
        ("system_identifier", status.system_identifier.unwrap_or_default().to_string()),
        ("primary", text(&status.primary)),
        ("slot", text(&status.slot)),
        ("application_name", text(&status.application_name)),
    ]
}

/// A person who writes a rule by hand expects no spaces in a label.
fn states(status: &StandbyStatus) -> Vec<(String, f64)> {
    let value = |state| if state == status.state { 1.0 } else { 0.0 };
    State::ALL.map(|state| (state.to_string().replace(' ', "_"), value(state))).into()
}

fn positions(status: &StandbyStatus) -> Vec<(String, f64)> {
    let stages = status.positions.stages().into_iter();
    stages.filter_map(|(stage, position)| Some((stage.to_owned(), position.lsn?.0 as f64))).collect()
}

/// One sample for each name: of several, the last.
fn downstreams(status: &StandbyStatus) -> Vec<(String, f64)> {
    let behind =
        status.downstreams.iter().filter_map(|one| Some((one.application_name.clone(), one.behind_bytes? as f64)));
    behind.collect::<BTreeMap<_, _>>().into_iter().collect()
}

fn slots(status: &StandbyStatus) -> Vec<(String, f64)> {
    let end = status.positions.written.lsn.map_or(0, |lsn| lsn.0);
    let held = status.slots.iter().filter(|(_, slot)| !slot.lost);
    held.filter_map(|(name, slot)| Some((name.clone(), end.saturating_sub(slot.restart_lsn?.0) as f64))).collect()
}

fn behind(status: &StandbyStatus) -> Vec<(String, f64)> {
    let stages = status.positions.stages().into_iter();
    stages.filter_map(|(stage, position)| Some((stage.to_owned(), position.behind_bytes? as f64))).collect()
}

/// All metrics as text.
pub fn render(status: &StandbyStatus) -> String {
    let mut text = String::with_capacity(8192);
    for metric in METRICS {
        render_one(&mut text, metric, status);
    }
    process::render(&mut text);
    text
}

fn render_one(text: &mut String, metric: &Metric, status: &StandbyStatus) {
    let name = metric.name;
    let kind = match metric.source {
        Counter(_) | Counters(..) => "counter",
        Fsyncs => "histogram",
        Gauge(_) | Gauges(..) | Info(_) => "gauge",
    };
    let mut line = |rest: std::fmt::Arguments<'_>| writeln!(text, "{rest}").expect("a string takes all");
    line(format_args!("# HELP walrider_{name} {}", metric.help));
    line(format_args!("# TYPE walrider_{name} {kind}"));
    match metric.source {
        Counter(get) => line(format_args!("walrider_{name} {}", get(status))),
        Gauge(get) => {
            if let Some(value) = get(status) {
                line(format_args!("walrider_{name} {value}"));
            }
        }
        Counters(label, get) | Gauges(label, get) => {
            for (of, value) in get(status) {
                line(format_args!("walrider_{name}{{{label}=\"{}\"}} {value}", escaped(&of)));
            }
        }
        Info(get) => {
            let labels: Vec<String> =
                get(status).iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            line(format_args!("walrider_{name}{{{}}} 1", labels.join(",")));
        }
        Fsyncs => {
            let Spool { fsyncs, fsync_seconds, fsync_buckets, .. } = &status.spool;
            let mut below = 0;
            for (bound, count) in fsync_buckets {
                below += count;
                line(format_args!("walrider_{name}_bucket{{le=\"{bound}\"}} {below}"));
            }
            line(format_args!("walrider_{name}_bucket{{le=\"+Inf\"}} {fsyncs}"));
            line(format_args!("walrider_{name}_sum {fsync_seconds}"));
            line(format_args!("walrider_{name}_count {fsyncs}"));
        }
    }
}

/// A label's value, as the text format wants it.
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::status::tests::streaming;

    /// A reader of the text format that takes nothing but what the format allows: samples by name and labels.
    fn read(text: &str) -> BTreeMap<String, f64> {
        let is_name = |name: &str| {
            !name.starts_with(|c: char| c.is_ascii_digit())
                && !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        let (mut samples, mut families, mut helped) = (BTreeMap::new(), BTreeSet::new(), None);
        let (mut family, mut kind) = (String::new(), String::new());
        assert!(text.ends_with('\n'));
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(is_name(name) && !help.is_empty() && !help.contains('\\'), "{line}");
                assert!(families.insert(name.to_owned()), "{name} comes twice");
                helped = Some(name.to_owned());
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, of) = rest.split_once(' ').unwrap();
                assert_eq!(helped.take().as_deref(), Some(name), "TYPE follows HELP, once");
                assert!(["counter", "gauge", "histogram"].contains(&of), "{line}");
                assert_eq!(of == "counter", name.ends_with("_total"), "{name}");
                (family, kind) = (name.to_owned(), of.to_owned());
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                let suffix = name.strip_prefix(&family).expect("samples follow their TYPE");
                match kind.as_str() {
                    "histogram" => assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line}"),
                    _ => assert_eq!(suffix, "", "{line}"),
                }
                assert!(family.starts_with("walrider_") || family.starts_with("process_"), "{line}");
                if let Some(labels) = series.strip_prefix(name).filter(|labels| !labels.is_empty()) {
                    read_labels(labels.strip_prefix('{').unwrap().strip_suffix('}').unwrap(), &is_name);
                }
                let value: f64 = value.parse().unwrap();
                assert!(value.is_finite(), "{line}");
                assert!(samples.insert(series.to_owned(), value).is_none(), "{series} comes twice");
            }
        }
        samples
    }

    /// `name="value",…`, where a backslash stands before a backslash, a quote or an n.
    fn read_labels(mut rest: &str, is_name: &dyn Fn(&str) -> bool) {
        loop {
            let (name, after) = rest.split_once("=\"").unwrap();
            assert!(is_name(name), "{rest}");
            let mut escape = false;
            let end = after.find(|c: char| {
                if escape {
                    assert!(['\\', '"', 'n'].contains(&c), "{after}");
                }
                let ends = c == '"' && !escape;
                escape = c == '\\' && !escape;
                ends
            });
            rest = &after[end.expect("a closing quote") + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => return assert_eq!(rest, ""),
            }
        }
    }

    #[test]
    fn it_is_read_back() {
        let text = render(&streaming());
        let samples = read(&text);
        for (series, value) in [
            ("walrider_state{state=\"streaming\"}", 1.0),
            ("walrider_state{state=\"waiting_for_disk\"}", 0.0),
            ("walrider_early", 1.0),
            ("walrider_spool_early_writes_total", 1014.0),
            ("walrider_connections_total", 2.0),
            ("walrider_timeline", 3.0),
            ("walrider_position_bytes{stage=\"flushed\"}", 4_294_967_352.0),
            ("walrider_behind_bytes{stage=\"replayed\"}", 16.0),
            ("walrider_replay_lag_seconds", 2.0),
            ("walrider_start_time_seconds", 946_684_800.0),
            ("walrider_spool_written_bytes_total", 1007.0),
            ("walrider_spool_fsync_seconds_bucket{le=\"0.001\"}", 5.0),
            ("walrider_spool_fsync_seconds_bucket{le=\"0.01\"}", 8.0),
            ("walrider_spool_fsync_seconds_bucket{le=\"+Inf\"}", 9.0),
            ("walrider_spool_fsync_seconds_count", 9.0),
        ] {
            assert_eq!(samples.get(series), Some(&value), "{series}\n{text}");
        }
        assert!(text.contains("position_bytes{stage=\"flushed\"} 4294967352\n"), "whole numbers stay whole");
    }

    #[test]
    fn each_counter_has_its_own_metric() {
        let samples = read(&render(&streaming()));
        for wanted in 1001..=1012 {
            let of: Vec<_> = samples.iter().filter(|(_, value)| **value == f64::from(wanted)).collect();
            assert_eq!(of.len(), 1, "{wanted}: {of:?}");
        }
    }

    #[test]
    fn what_is_not_known_has_no_sample() {
        let samples = read(&render(&StandbyStatus::new()));
        for name in ["timeline", "horizon_bytes", "replay_lag_seconds", "last_error_time_seconds"] {
            assert!(!samples.contains_key(&format!("walrider_{name}")), "{name}");
        }
        assert!(!samples.keys().any(|series| series.starts_with("walrider_position_bytes")));
        assert_eq!((samples["walrider_connected"], samples["walrider_follows"]), (0.0, 0.0));
    }

    #[test]
    fn labels_cannot_break_out() {
        let status = StandbyStatus { slot: Some("a\"b\\c\nd\",x=\"".into()), ..streaming() };
        let text = render(&status);
        read(&text);
        assert!(text.contains(r#"slot="a\"b\\c\nd\",x=\"","#), "{text}");
    }

    /// The documentation names every metric, and no other.
    #[test]
    fn all_are_documented() {
        let words = include_str!("../../../docs/standby.md").split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let named: BTreeSet<&str> = words
            .filter_map(|word| word.strip_prefix("walrider_"))
            .map(|name| name.trim_end_matches("_bucket"))
            .collect();
        assert_eq!(named, METRICS.iter().map(|metric| metric.name).collect());
    }

    #[test]
    fn names_have_base_units() {
        for metric in METRICS {
            for unit in ["_ms", "_us", "_kb", "_mb", "_percent", "_lsn"] {
                assert!(!metric.name.ends_with(unit), "{}", metric.name);
            }
            assert!(metric.help.ends_with('.'), "{}", metric.name);
        }
    }
}
