//! Values of options, as `postgresql.conf` writes them.

use std::time::Duration;

use serde::{Deserialize, Deserializer};
use walrider_datadir::config::{Unit, parse_number};
use walrider_datadir::descriptors::most_threads;
use walrider_datadir::recovery_settings::TargetTimeline;
use walrider_layout::TimelineId;
use walrider_replay::memory;
use walrider_standby::EarlyMode;

/// How many `restore_command`s run at once where nobody says.
pub const DEFAULT_FETCH_JOBS: u16 = 8;
/// Most of them.
pub const MAX_FETCH_JOBS: i64 = 256;

/// A time with its unit, as in `10s` or `500ms`, up to 24 days as in PostgreSQL. Zero needs no unit; anything else does:
/// the settings that these options stand for count seconds here and milliseconds there.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if text != "0" && (number.len() == text.len() || number.bytes().any(|byte| byte.is_ascii_alphabetic())) {
        return Err("expected a time with its unit, as in 10s: us, ms, s, min, h or d".into());
    }
    let milliseconds = parse_number(text, Unit::Milliseconds).and_then(|number| u32::try_from(number).ok());
    milliseconds
        .filter(|&number| number <= i32::MAX as u32)
        .map(|number| Duration::from_millis(number.into()))
        .ok_or_else(|| "expected a time of at most 24d, as in 10s: us, ms, s, min, h or d".into())
}

/// A size in bytes, or with kB, MB, GB or TB, in powers of 1,024.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "kB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        "TB" => 1 << 40,
        unit => return Err(format!("\"{unit}\" is not a unit: use kB, MB, GB or TB")),
    };
    let size = digits.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    size.ok_or_else(|| "expected a size, as in 512MB".into())
}

/// A size for memory: at least what replay needs.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    parse_size(text)
        .and_then(|size| if size >= 16 << 20 { Ok(size) } else { Err("expected a size of at least 16MB".into()) })
}

/// `latest`, `current` or a number (`recovery_target_timeline`).
pub fn parse_timeline(text: &str) -> Result<TargetTimeline, String> {
    match text {
        "latest" => Ok(TargetTimeline::Latest),
        "current" => Ok(TargetTimeline::Current),
        number => match number.parse() {
            Ok(number) if number > 0 => Ok(TargetTimeline::Number(TimelineId(number))),
            _ => Err("expected \"latest\", \"current\" or a number".into()),
        },
    }
}

/// Whether WAL is taken before the primary has flushed it.
pub fn parse_early(text: &str) -> Result<EarlyMode, String> {
    match text {
        "auto" => Ok(EarlyMode::Auto),
        "on" => Ok(EarlyMode::On),
        "off" => Ok(EarlyMode::Off),
        _ => Err("expected \"auto\", \"on\" or \"off\"".into()),
    }
}

/// A name as the primary accepts it (`ReplicationSlotValidateName`, `replication/slot.c`, PostgreSQL 18); empty for none.
pub fn parse_slot(name: &str) -> Result<String, String> {
    let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if name.len() >= 64 {
        return Err("a slot's name has at most 63 characters".into());
    }
    if !name.bytes().all(valid) {
        return Err("a slot's name has only lower case letters, digits and the underscore".into());
    }
    Ok(name.to_owned())
}

/// Threads where the user names no number.
pub fn default_jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(most_threads())
}

/// Memory in bytes where the user names none: a quarter of what the process may have; of a gigabyte where the system does not tell.
pub fn default_memory() -> u64 {
    memory::limit().unwrap_or(1 << 30) / 4
}

/// A value of the file: text as on the command line, or a number.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text or a number")]
enum Scalar {
    Text(String),
    Number(u64),
}

/// Reads it with a parser of the command line.
pub fn parsed<'de, D, T>(deserializer: D, parse: fn(&str) -> Result<T, String>) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
{
    let text = match Scalar::deserialize(deserializer)? {
        Scalar::Text(text) => text,
        Scalar::Number(number) => number.to_string(),
    };
    parse(&text).map(Some).map_err(serde::de::Error::custom)
}

/// [`parse_duration`] for `#[serde(deserialize_with)]`.
pub fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    parsed(deserializer, parse_duration)
}

/// [`parse_size`] for `#[serde(deserialize_with)]`.
pub fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    parsed(deserializer, parse_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, milliseconds) in
            [("0", 0), ("0s", 0), ("10s", 10_000), ("1.5 min", 90_000), ("500us", 0), ("24d", 2_073_600_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for bad in ["", "10", "1.5", "s", "-1s", "0x1d", "25d", "1 week", "1e300s", "ten s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("0", 0), ("7", 7), ("2kB", 2048), ("1 GB", 1 << 30), ("1TB", 1 << 40)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "MB", "-1", "1 mb", "1KB", "99999999TB", "1.5GB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_memory("16MB"), Ok(16 << 20));
        assert_eq!(parse_memory("15MB"), Err("expected a size of at least 16MB".into()));
    }

    #[test]
    fn slots() {
        for good in ["", "a", "node_1", &"x".repeat(63)] {
            assert_eq!(parse_slot(good).as_deref(), Ok(good));
        }
        for bad in ["A", "a-b", "a b", "ä", &"x".repeat(64)] {
            assert!(parse_slot(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn timelines() {
        assert_eq!(parse_timeline("3"), Ok(TargetTimeline::Number(TimelineId(3))));
        assert!(parse_timeline("0").is_err() && parse_timeline("Latest").is_err());
    }
}
