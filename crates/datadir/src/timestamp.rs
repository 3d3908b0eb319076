//! Times as people write them for `recovery_target_time`, in the ISO form that PostgreSQL itself prints
//! (`check_recovery_target_time`, `access/transam/xlogrecovery.c`; `utils/adt/datetime.c`, PostgreSQL 18).
//!
//! A wrong guess would end recovery at the wrong moment, so what is not certain is refused.

use jiff::civil;
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};
use walrider_layout::POSTGRES_EPOCH;

const EPOCH_MICROSECONDS: i64 = POSTGRES_EPOCH.as_micros() as i64;

/// A time in microseconds since 2000-01-01 00:00 UTC (`TimestampTz`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimestampTz(pub i64);

impl From<std::time::SystemTime> for TimestampTz {
    /// Times out of range are the last, or the first, that there is.
    fn from(time: std::time::SystemTime) -> TimestampTz {
        let since_1970 = match time.duration_since(std::time::UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |micros| -micros),
        };
        TimestampTz(since_1970.saturating_sub(EPOCH_MICROSECONDS))
    }
}

impl std::fmt::Display for TimestampTz {
    /// As PostgreSQL prints it in UTC.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.show(&TimeZone::UTC))
    }
}

impl TimestampTz {
    /// As PostgreSQL prints it where `timezone` is set to this; in UTC if the zone is not known (`timestamptz_to_str`).
    pub fn in_zone(self, zone: &str) -> String {
        self.show(&named_zone(zone).unwrap_or(TimeZone::UTC))
    }

    fn show(self, zone: &TimeZone) -> String {
        let Ok(time) = jiff::Timestamp::from_microsecond(self.0.saturating_add(EPOCH_MICROSECONDS)) else {
            return format!("{} microseconds after 2000-01-01 00:00:00+00", self.0);
        };
        let shown = time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S%.f").to_string();
        let offset = zone.to_offset(time).seconds();
        let (hours, minutes, seconds) = (offset.abs() / 3600, offset.abs() / 60 % 60, offset.abs() % 60);
        // As short as it can be (`EncodeTimezone`).
        let rest = match (minutes, seconds) {
            (0, 0) => String::new(),
            (_, 0) => format!(":{minutes:02}"),
            _ => format!(":{minutes:02}:{seconds:02}"),
        };
        format!("{}{}{hours:02}{rest}", shown.trim_end_matches('.'), if offset < 0 { '-' } else { '+' })
    }
}

/// Reads `2026-11-21 11:42:26.5+01`, with a `T` for the space if you like; seconds, fraction, time of day and zone
/// may be missing. The zone is an offset (`+01`, `-0330`, `+05:30:15`), `Z`, `UTC`, a name such as `Europe/Rome`, or, if
/// `abbreviations` says so, the abbreviation that `session_zone` has at that moment. Without one it is in `session_zone`,
/// the server's setting `timezone`. The error says what is expected.
///
/// ```
/// use walrider_datadir::timestamp::parse_timestamptz;
/// let time = parse_timestamptz("2000-01-01 02:00:00.000001+02", "UTC", true).unwrap();
/// assert_eq!(time.0, 1);
/// assert_eq!(time.to_string(), "2000-01-01 00:00:00.000001+00");
/// ```
pub fn parse_timestamptz(text: &str, session_zone: &str, abbreviations: bool) -> Result<TimestampTz, String> {
    const EXPECTED: &str = "write a time like 2026-11-21 11:42:26+00";
    let trimmed = text.trim();
    let (date, rest) = trimmed.split_at(trimmed.find([' ', 'T', 't']).unwrap_or(trimmed.len()));
    let date = parse_date(date).ok_or(EXPECTED)?;
    let rest = rest.trim_start_matches([' ', 'T', 't']);
    let is_time = |c: char| c.is_ascii_digit() || matches!(c, ':' | '.');
    let (time, zone) = rest.split_at(rest.find(|c| !is_time(c)).unwrap_or(rest.len()));
    let (time, extra_days) =
        if rest.is_empty() { (civil::Time::midnight(), 0) } else { parse_time(time).ok_or(EXPECTED)? };
    let date = date.checked_add(jiff::Span::new().days(extra_days)).map_err(|_| "the time is out of range")?;
    let local = date.to_datetime(time);

    let session =
        || named_zone(session_zone).ok_or_else(|| format!("time zone \"{session_zone}\" is not known: {EXPECTED}"));
    let zone = zone.trim();
    let offset = if zone.is_empty() {
        offset_in(&session()?, local)
    } else if zone.starts_with(['+', '-']) {
        parse_offset(zone).ok_or_else(|| format!("\"{zone}\" is not an offset from UTC: {EXPECTED}"))?
    } else if ["z", "utc", "gmt", "zulu"].contains(&zone.to_ascii_lowercase().as_str()) {
        Offset::UTC
    } else if let Some(named) = zone.contains('/').then(|| named_zone(zone)).flatten() {
        offset_in(&named, local)
    } else {
        // What the log shows: an abbreviation of the server's own zone.
        let session = session()?;
        let offset = offset_in(&session, local);
        let at = offset.to_timestamp(local).map_err(|_| "the time is out of range")?;
        if !abbreviations || !session.to_offset_info(at).abbreviation().eq_ignore_ascii_case(zone) {
            return Err(format!("time zone \"{zone}\" is not certain: {EXPECTED}"));
        }
        offset
    };
    let time = offset.to_timestamp(local).map_err(|_| "the time is out of range")?;
    Ok(TimestampTz(time.as_microsecond() - EPOCH_MICROSECONDS))
}

fn digits(text: &str, len: std::ops::RangeInclusive<usize>) -> Option<i32> {
    (len.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

fn parse_date(text: &str) -> Option<civil::Date> {
    let mut parts = text.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let (year, month, day) = (digits(year, 4..=4)?, digits(month, 1..=2)?, digits(day, 1..=2)?);
    civil::Date::new(year as i16, month as i8, day as i8).ok()
}

/// Time of day, and days to add: PostgreSQL takes 24:00:00, and 60 seconds. Digits past the sixth are rounded.
fn parse_time(text: &str) -> Option<(civil::Time, i32)> {
    let mut parts = text.split(':');
    let (hour, minute) = (digits(parts.next()?, 1..=2)?, digits(parts.next()?, 2..=2)?);
    let (second, fraction) = match parts.next() {
        Some(second) => second.split_once('.').unwrap_or((second, "")),
        None => ("00", ""),
    };
    let second = digits(second, 2..=2)?;
    if parts.next().is_some() || fraction.len() > 30 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let microseconds = (format!("0.{fraction}0").parse::<f64>().ok()? * 1e6).round_ties_even() as i64;
    let total = i64::from(hour * 3600 + minute * 60 + second) * 1_000_000 + microseconds;
    const DAY: i64 = 86_400_000_000;
    if minute > 59 || second > 60 || total > DAY {
        return None;
    }
    let nanoseconds = total % DAY * 1000;
    let time = civil::Time::midnight().checked_add(jiff::SignedDuration::from_nanos(nanoseconds)).ok()?;
    Some((time, i32::from(total == DAY)))
}

/// `+HH`, `+HHMM`, `+HH:MM`, `+HH:MM:SS` (`DecodeTimezone`).
fn parse_offset(text: &str) -> Option<Offset> {
    let (sign, rest) = (if text.starts_with('-') { -1 } else { 1 }, &text[1..]);
    let parts: Vec<&str> = rest.split(':').collect();
    let (hours, minutes, seconds) = match parts[..] {
        [hours] if hours.len() <= 2 => (digits(hours, 1..=2)?, 0, 0),
        [both] if both.is_ascii() && both.len() <= 4 => {
            let (hours, minutes) = both.split_at(both.len() - 2);
            (digits(hours, 1..=2)?, digits(minutes, 2..=2)?, 0)
        }
        [hours, minutes] => (digits(hours, 1..=2)?, digits(minutes, 2..=2)?, 0),
        [hours, minutes, seconds] => (digits(hours, 1..=2)?, digits(minutes, 2..=2)?, digits(seconds, 2..=2)?),
        _ => return None,
    };
    let in_range = hours <= 15 && minutes < 60 && seconds < 60;
    in_range.then(|| Offset::from_seconds(sign * (hours * 3600 + minutes * 60 + seconds)).ok())?
}

fn named_zone(name: &str) -> Option<TimeZone> {
    if ["utc", "gmt", "z"].contains(&name.to_ascii_lowercase().as_str()) {
        return Some(TimeZone::UTC);
    }
    TimeZone::get(name).ok()
}

/// The offset at a local time. Where the clock jumps forward the one before counts, where it is set back the one
/// after (`DetermineTimeZoneOffset`).
fn offset_in(zone: &TimeZone, local: civil::DateTime) -> Offset {
    match zone.to_ambiguous_timestamp(local).offset() {
        AmbiguousOffset::Unambiguous { offset } => offset,
        AmbiguousOffset::Gap { before, .. } => before,
        AmbiguousOffset::Fold { after, .. } => after,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utc(text: &str) -> String {
        parse_timestamptz(text, "Europe/Rome", true).map_or_else(|error| error, |time| time.to_string())
    }

    #[test]
    fn times_are_shown_where_the_server_is() {
        let time = TimestampTz(500_000);
        for (zone, shown) in [
            ("Europe/Rome", "2000-01-01 01:00:00.5+01"),
            ("America/St_Johns", "1999-12-31 20:30:00.5-03:30"),
            ("nowhere", "2000-01-01 00:00:00.5+00"),
        ] {
            assert_eq!(time.in_zone(zone), shown);
        }
        assert_eq!(
            TimestampTz(-5_000_000_000_000_000_000).in_zone("UTC").split_once(' ').unwrap().1,
            "microseconds after 2000-01-01 00:00:00+00"
        );
    }

    #[test]
    fn the_forms_that_postgresql_prints() {
        for (text, expected) in [
            ("2026-11-21 11:42:26.123456+01", "2026-11-21 10:42:26.123456+00"),
            ("2026-11-21T11:42:26Z", "2026-11-21 11:42:26+00"),
            ("2026-11-21 11:42:26 UTC", "2026-11-21 11:42:26+00"),
            ("2026-11-21 11:42:26.5 CET", "2026-11-21 10:42:26.5+00"),
            ("2026-07-21 11:42:26 CEST", "2026-07-21 09:42:26+00"),
            ("2026-11-21 11:42:26", "2026-11-21 10:42:26+00"),
            ("2026-11-21 11:42", "2026-11-21 10:42:00+00"),
            ("2026-11-21", "2026-11-20 23:00:00+00"),
            ("2026-11-21 11:42:26 America/New_York", "2026-11-21 16:42:26+00"),
            ("2026-11-21 11:42:26-0330", "2026-11-21 15:12:26+00"),
            ("2026-11-21 11:42:26+05:30:15", "2026-11-21 06:12:11+00"),
            ("2026-12-31 24:00:00+00", "2027-01-01 00:00:00+00"),
            ("2026-12-31 23:59:60+00", "2027-01-01 00:00:00+00"),
            ("2026-11-21 11:42:26.1234567+00", "2026-11-21 11:42:26.123457+00"),
            // The clock jumps from 2 to 3, and is set back from 3 to 2.
            ("2026-03-29 02:30:00", "2026-03-29 01:30:00+00"),
            ("2026-10-25 02:30:00", "2026-10-25 01:30:00+00"),
            ("1999-12-31 23:59:59+00", "1999-12-31 23:59:59+00"),
        ] {
            assert_eq!(utc(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_certain_is_refused() {
        for text in [
            "",
            "now",
            "today",
            "tomorrow",
            "yesterday",
            "epoch",
            "infinity",
            "21.11.2026 11:42",
            "11/21/2026",
            "2026-13-01",
            "2026-02-30",
            "2026-11-21 25:00",
            "2026-11-21 11:60",
            "2026-11-21 24:00:01",
            "2026-11-21 11:42:26 IST",
            "2026-11-21 11:42:26 CEST",
            "2026-11-21 11:42:26+é1",
            "2026-11-21 11:42:26+99",
            "2026-11-21 11:42:26 PM",
            "2026-11-21 11:42:26 UTC BC",
            "9999-12-31 24:00:00+00",
        ] {
            assert!(parse_timestamptz(text, "Europe/Rome", true).is_err(), "{text}");
        }
        assert!(parse_timestamptz("2026-11-21 11:42", "Mars/Olympus", true).is_err());
        assert!(parse_timestamptz("2026-11-21 11:42:26 CET", "Europe/Rome", false).is_err());
    }
}
