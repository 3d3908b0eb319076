//! The same view as metrics for Prometheus, in its text format 0.0.4. What is not known has no sample.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::json;
use walrider_lag::split::{Part, Standby, UNKNOWN, View};
use walrider_observe::metrics::escaped;

/// A name without `walrider_top_`, what it tells, and its samples: labels and values.
type Gauge = (&'static str, &'static str, Vec<(String, Option<f64>)>);

/// All of it.
pub fn render(view: &View) -> String {
    let mut text = String::new();
    for (name, help, samples) in gauges(view) {
        let mut line = |words: std::fmt::Arguments<'_>| writeln!(text, "{words}").expect("a string takes all");
        line(format_args!("# HELP walrider_top_{name} {help}"));
        line(format_args!("# TYPE walrider_top_{name} gauge"));
        for (labels, value) in samples {
            match value {
                Some(value) if value.is_infinite() => line(format_args!("walrider_top_{name}{labels} +Inf")),
                Some(value) => line(format_args!("walrider_top_{name}{labels} {value}")),
                None => {}
            }
        }
    }
    text
}

fn gauges(view: &View) -> Vec<Gauge> {
    let flag = |set: bool| Some(if set { 1.0 } else { 0.0 });
    // Two may have one name, and even come from one address, as those of pg_basebackup do; then the one that is farther behind counts.
    let mut standbys: BTreeMap<String, &Standby> = BTreeMap::new();
    for standby in &view.standbys {
        let behind = |standby: &Standby| (standby.replay.bytes, standby.flush.bytes);
        let known = standbys.entry(standby.key()).or_insert(standby);
        if behind(standby) > behind(known) {
            *known = standby;
        }
    }
    let labels_of = |standby: &Standby, more: &[(&str, &str)]| {
        labels(&[&[("standby", standby.name.as_str()), ("address", standby.address.as_str())], more].concat())
    };
    let each = |of: &dyn Fn(&Standby) -> Option<f64>| {
        standbys.values().map(|standby| (labels_of(standby, &[]), of(standby))).collect()
    };
    let stages = |of: &dyn Fn(&walrider_lag::split::Stage) -> Option<f64>| {
        let stages = |standby: &&Standby| {
            let Standby { sent, write, flush, replay, .. } = standby;
            [("sent", sent), ("write", write), ("flush", flush), ("replay", replay)]
                .map(|(stage, at)| (labels_of(standby, &[("stage", stage)]), of(at)))
        };
        standbys.values().flat_map(stages).collect()
    };
    let parts = |standby: &&Standby| {
        let known = !standby.parts.is_empty() || standby.replay.seconds == Some(0.0);
        Part::ALL.map(|part| {
            let found = standby.parts.iter().find(|(of, _)| *of == part).map_or(0.0, |(_, seconds)| *seconds);
            let part = json!(part);
            (labels_of(standby, &[("part", part.as_str().unwrap_or_default())]), known.then_some(found))
        })
    };
    let slots = |of: &dyn Fn(&walrider_lag::slots::SlotView) -> Option<f64>| {
        view.slots.iter().map(|slot| (labels(&[("slot", &slot.name), ("type", &slot.kind)]), of(slot))).collect()
    };
    vec![
        (
            "primary_answers",
            "1 while the primary answers.",
            vec![(labels(&[("primary", &view.primary)]), flag(view.error.is_none()))],
        ),
        ("wal_bytes_per_second", "WAL that the primary writes.", vec![(String::new(), view.wal_rate)]),
        (
            "connected",
            "1 while the primary has a walsender for the standby.",
            each(&|standby| flag(standby.connected).filter(|_| standby.state != UNKNOWN)),
        ),
        (
            "behind_bytes",
            "How far each stage of the standby is behind the primary's flush.",
            stages(&|stage| Some(stage.bytes? as f64)),
        ),
        (
            "behind_seconds",
            "How long ago the primary had flushed what the stage has now; of replay: the lag.",
            stages(&|stage| stage.seconds),
        ),
        ("lag_seconds", "What the lag of replay is made of.", standbys.values().flat_map(parts).collect()),
        ("replay_bytes_per_second", "WAL replayed.", each(&|standby| standby.speed.rate)),
        ("replay_utilisation", "Share of the time in which replay works.", each(&|standby| standby.speed.utilisation)),
        (
            "replay_capacity_bytes_per_second",
            "What it would replay if it worked all the time.",
            each(&|standby| standby.speed.capacity),
        ),
        ("catch_up_seconds", "How long until it has caught up.", each(&|standby| standby.speed.catch_up)),
        ("slot_held_bytes", "WAL that the slot keeps on the primary.", slots(&|slot| Some(slot.held? as f64))),
        ("slot_active", "1 while somebody uses the slot.", slots(&|slot| flag(slot.active))),
        (
            "slot_safe_bytes",
            "WAL that may yet be written before the slot may lose some.",
            slots(&|slot| Some(slot.safe_wal_size? as f64)),
        ),
        (
            "slot_lost",
            "1 if WAL is gone that the slot needs.",
            slots(&|slot| flag(slot.wal_status.as_deref() == Some("lost"))),
        ),
    ]
}

fn labels(labels: &[(&str, &str)]) -> String {
    let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    format!("{{{}}}", labels.join(","))
}

#[cfg(test)]
mod tests {
    use walrider_lag::split::Stage;

    use super::*;

    #[test]
    fn what_is_not_known_has_no_sample() {
        let mut standby =
            Standby { name: "a \"b\"".into(), address: "h:1".into(), connected: true, ..Standby::default() };
        standby.sent.bytes = Some(5);
        standby.speed.catch_up = Some(f64::INFINITY);
        let mut view = View { standbys: vec![standby], ..View::default() };
        let text = render(&view);
        let labels = "standby=\"a \\\"b\\\"\",address=\"h:1\"";
        for line in [
            format!("walrider_top_connected{{{labels}}} 1"),
            format!("walrider_top_behind_bytes{{{labels},stage=\"sent\"}} 5"),
            format!("walrider_top_catch_up_seconds{{{labels}}} +Inf"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert!(!text.contains("stage=\"replay\"") && !text.contains("part=") && !text.contains("NaN"), "{text}");
        view.standbys[0].replay = Stage { seconds: Some(2.0), ..Stage::default() };
        assert!(!render(&view).contains("part="), "nobody knows what it is made of");
        view.standbys[0].parts = vec![(Part::Network, 2.0)];
        let text = render(&view);
        assert!(text.contains("part=\"network\"} 2\n") && text.contains("part=\"replay_cpu\"} 0\n"), "{text}");
        // The primary does not answer: nobody knows whether it is connected.
        view.standbys[0].connected = false;
        view.standbys[0].state = UNKNOWN.into();
        assert!(!render(&view).lines().any(|line| line.starts_with("walrider_top_connected{")));
    }

    /// Prometheus takes one of two series with the same labels, and says so in its log alone.
    #[test]
    fn no_series_is_there_twice() {
        let standby = |address: &str, behind: u64| {
            let mut standby = Standby { name: "walreceiver".into(), address: address.into(), ..Standby::default() };
            standby.replay.bytes = Some(behind);
            standby
        };
        let view = View { standbys: vec![standby("a:1", 1), standby("b:1", 2), standby("a:1", 3)], ..View::default() };
        let text = render(&view);
        let mut series: Vec<_> =
            text.lines().filter(|line| !line.starts_with('#')).map(|line| line.rsplit_once(' ')).collect();
        let all = series.len();
        series.sort_unstable_by_key(|line| line.map(|(name, _)| name));
        series.dedup_by_key(|line| line.map(|(name, _)| name));
        assert_eq!(series.len(), all, "{text}");
        let farthest = "walrider_top_behind_bytes{standby=\"walreceiver\",address=\"a:1\",stage=\"replay\"} 3\n";
        assert!(text.contains(farthest), "{text}");
    }

    /// Who writes a rule looks there.
    #[test]
    fn all_are_documented() {
        let text = include_str!("../../../../docs/top.md");
        for (name, ..) in gauges(&View::default()) {
            assert!(text.contains(&format!("`walrider_top_{name}")), "{name}");
        }
    }
}
