//! A view as plain text, a table as `psql` would print it.

use std::fmt::Write;

use walrider_lag::slots::SlotView;
use walrider_lag::split::{Stage, Standby, View};
use walrider_lag::words::bytes;

/// What [`row`] has.
pub const COLUMNS: [&str; 11] =
    ["standby", "state", "sync", "sent", "write", "flush", "replay", "lag", "replays", "could", "caught up in"];
/// What [`slot`] has.
pub const SLOT_COLUMNS: [&str; 6] = ["slot", "kind", "used by", "holds", "status", "may yet hold"];

/// The whole of it, lines that end.
pub fn render(view: &View) -> String {
    let mut text = String::new();
    let mut line = |words: std::fmt::Arguments<'_>| writeln!(text, "{words}").expect("a string takes all");
    let primary = if view.primary.is_empty() { "no primary" } else { &view.primary };
    line(format_args!("{primary}  {}", rates(view)));
    if let Some(error) = &view.error {
        line(format_args!("  {error}"));
    }
    content(view).iter().for_each(|words| line(format_args!("  {words}")));
    let rows: Vec<[String; 11]> = view.standbys.iter().map(row).collect();
    let (head, lines) = table(COLUMNS, &rows);
    line(format_args!("{head}"));
    for (standby, row) in view.standbys.iter().zip(&lines) {
        line(format_args!("{row}"));
        if !standby.parts.is_empty() {
            let parts: Vec<String> =
                standby.parts.iter().map(|(part, seconds)| format!("{} {}", part.name(), duration(*seconds))).collect();
            line(format_args!("  lag: {}", parts.join(", ")));
        }
        if let Some(error) = &standby.error {
            line(format_args!("  {error}"));
        }
    }
    if !view.slots.is_empty() {
        let rows: Vec<[String; 6]> = view.slots.iter().map(slot).collect();
        let (head, lines) = table(SLOT_COLUMNS, &rows);
        line(format_args!("{head}"));
        lines.iter().for_each(|row| line(format_args!("{row}")));
    }
    view.notes.iter().for_each(|note| line(format_args!("note: {note}")));
    text
}

/// The heading and the rows of a table, each column as wide as its longest word.
fn table<const N: usize>(columns: [&str; N], rows: &[[String; N]]) -> (String, Vec<String>) {
    let widths: Vec<usize> = (0..N)
        .map(|nth| rows.iter().map(|row| row[nth].chars().count()).chain([columns[nth].len()]).max().unwrap_or(0))
        .collect();
    let joined = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let lines = rows.iter().map(|row| joined(&mut row.iter().map(String::as_str))).collect();
    (joined(&mut columns.into_iter()), lines)
}

/// What is said of the primary's WAL, in one line.
pub fn rates(view: &View) -> String {
    let mut words = Vec::new();
    words.extend(view.flushed.map(|lsn| format!("flushed {lsn}")));
    words.extend(view.wal_rate.map(|rate| format!("WAL {}/s", bytes(rate))));
    words.extend(view.record_rate.map(|rate| format!("{rate:.0} records/s")));
    words.extend(view.fpi_rate.map(|rate| format!("{rate:.0} full-page images/s")));
    words.extend(view.commit_rate.map(|rate| format!("{rate:.0} transactions/s")));
    words.join(", ")
}

/// What WAL is made of, in a line or two.
pub fn content(view: &View) -> Vec<String> {
    let Some(wal) = &view.wal else { return Vec::new() };
    let share = |part: u64, whole: u64| format!("{:.0} %", part as f64 / whole.max(1) as f64 * 100.0);
    let kinds = wal.kinds.iter().map(|kind| format!("{} {}", kind.name, share(kind.bytes, wal.bytes)));
    let images = std::iter::once(format!("full-page images {}", share(wal.image_bytes, wal.bytes)));
    let all = images.chain(kinds).collect::<Vec<_>>().join(", ");
    let mut lines = vec![format!("the last {} of WAL: {all}", bytes(wal.bytes as f64))];
    if !wal.relations.is_empty() {
        let relations = wal.relations.iter().map(|at| format!("{} {}", at.name, share(at.bytes, wal.block_bytes)));
        lines.push(format!("of its newest blocks: {}", relations.collect::<Vec<_>>().join(", ")));
    }
    lines
}

/// A line about how replay goes.
pub fn speed(standby: &Standby) -> String {
    let speed = &standby.speed;
    let Some(rate) = speed.rate else {
        return if standby.asked { "the speed of replay is not known yet" } else { "" }.to_owned();
    };
    let mut words = format!("replays {}/s", bytes(rate));
    let mut add = |more: std::fmt::Arguments<'_>| words.write_fmt(more).expect("a string takes all");
    if let Some(busy) = speed.utilisation {
        add(format_args!(", busy {:.0} % of the time", busy * 100.0));
    }
    if let Some(cpu) = speed.cpu {
        add(format_args!(", {:.0} % of a core", cpu * 100.0));
    }
    if let Some(capacity) = speed.capacity {
        add(format_args!("; falls behind above {}/s", bytes(capacity)));
    }
    match speed.catch_up {
        Some(0.0) | None => {}
        Some(seconds) if seconds.is_finite() => add(format_args!("; caught up in {}", duration(seconds))),
        Some(_) => add(format_args!("; never catches up at this rate of WAL")),
    }
    words
}

/// A slot in words.
pub fn slot(slot: &SlotView) -> [String; 6] {
    [
        slot.name.clone(),
        slot.kind.clone(),
        slot.used_by.clone().unwrap_or(if slot.active { "?" } else { "nobody" }.into()),
        slot.held.map_or("nothing".to_owned(), |held| bytes(held as f64)),
        slot.wal_status.clone().unwrap_or_default(),
        match (slot.safe_wal_size, slot.wal_status.as_deref()) {
            (Some(size), _) => bytes(size.max(0) as f64),
            (None, Some("lost")) | (None, None) => String::new(),
            (None, Some(_)) => "any amount".to_owned(),
        },
    ]
}

/// A standby in words.
pub fn row(standby: &Standby) -> [String; 11] {
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
