//! A view as plain text, a table as `psql` would print it.

use std::fmt::Write;

use walrider_lag::split::{Stage, Standby, View};

/// The whole of it, lines that end.
pub fn render(view: &View) -> String {
    let mut text = String::new();
    let mut line = |words: std::fmt::Arguments<'_>| writeln!(text, "{words}").expect("a string takes all");
    let primary = if view.primary.is_empty() { "no primary" } else { &view.primary };
    line(format_args!("{primary}  {}", rates(view)));
    if let Some(error) = &view.error {
        line(format_args!("  {error}"));
    }
    let columns =
        ["standby", "state", "sync", "sent", "write", "flush", "replay", "lag", "replays", "could", "caught up in"];
    let rows: Vec<[String; 11]> = view.standbys.iter().map(row).collect();
    let widths: Vec<usize> = (0..columns.len())
        .map(|nth| rows.iter().map(|row| row[nth].chars().count()).chain([columns[nth].len()]).max().unwrap_or(0))
        .collect();
    let joined = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    line(format_args!("{}", joined(&mut columns.into_iter())));
    for (standby, row) in view.standbys.iter().zip(&rows) {
        line(format_args!("{}", joined(&mut row.iter().map(String::as_str))));
        if !standby.parts.is_empty() {
            let parts: Vec<String> =
                standby.parts.iter().map(|(part, seconds)| format!("{} {}", part.name(), duration(*seconds))).collect();
            line(format_args!("  lag: {}", parts.join(", ")));
        }
        if let Some(error) = &standby.error {
            line(format_args!("  {error}"));
        }
    }
    text
}

fn rates(view: &View) -> String {
    let mut words = Vec::new();
    words.extend(view.flushed.map(|lsn| format!("flushed {lsn}")));
    words.extend(view.wal_rate.map(|rate| format!("WAL {}/s", bytes(rate))));
    words.extend(view.record_rate.map(|rate| format!("{rate:.0} records/s")));
    words.extend(view.fpi_rate.map(|rate| format!("{rate:.0} full-page images/s")));
    words.extend(view.commit_rate.map(|rate| format!("{rate:.0} transactions/s")));
    words.join(", ")
}

fn row(standby: &Standby) -> [String; 11] {
    let gap = |stage: &Stage| stage.bytes.map_or("?".to_owned(), |behind| bytes(behind as f64));
    let speed = &standby.speed;
    let rate = |rate: Option<f64>| rate.map_or(String::new(), |rate| format!("{}/s", bytes(rate)));
    [
        standby.name.clone(),
        standby.state.clone(),
        standby.sync_state.clone().unwrap_or_default(),
        gap(&standby.sent),
        gap(&standby.write),
        gap(&standby.flush),
        gap(&standby.replay),
        lag(&standby.replay),
        rate(speed.rate),
        rate(speed.capacity),
        speed
            .catch_up
            .map_or(String::new(), |seconds| if seconds.is_finite() { duration(seconds) } else { "never".into() }),
    ]
}

/// Lag in time.
pub fn lag(stage: &Stage) -> String {
    match stage.seconds {
        Some(seconds) => format!("{}{}", if stage.at_least { ">" } else { "" }, duration(seconds)),
        None => "?".into(),
    }
}

/// A number of bytes in three digits or four, with its unit.
pub fn bytes(count: f64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let (mut count, mut unit) = (count, 0);
    while count >= 9999.5 && unit + 1 < units.len() {
        count /= 1024.0;
        unit += 1;
    }
    format!("{count:.0} {}", units[unit])
}

/// A time in two units at the most.
pub fn duration(seconds: f64) -> String {
    match seconds {
        _ if !seconds.is_finite() => "never".to_owned(),
        ..0.0005 => "0".to_owned(),
        ..1.0 => format!("{:.0} ms", seconds * 1e3),
        ..100.0 => format!("{seconds:.1} s"),
        ..6000.0 => format!("{:.0} min {:02.0} s", (seconds / 60.0).floor(), seconds % 60.0),
        _ => format!("{:.0} h {:02.0} min", (seconds / 3600.0).floor(), (seconds % 3600.0 / 60.0).floor()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown: Vec<String> = [0.0, 9999.0, 10_240.0, 3e9, 1e18].map(bytes).to_vec();
        assert_eq!(shown, ["0 B", "9999 B", "10 kB", "2861 MB", "888 PB"]);
        let shown: Vec<String> = [0.0, 0.0123, 1.26, 61.0, 125.0, 7384.0, f64::INFINITY].map(duration).to_vec();
        assert_eq!(shown, ["0", "12 ms", "1.3 s", "61.0 s", "2 min 05 s", "2 h 03 min", "never"]);
    }
}
