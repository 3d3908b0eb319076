//! Figures for people.

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
