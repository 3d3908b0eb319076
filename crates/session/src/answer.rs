//! What the answers of a walsender say.

use walrider_layout::{Lsn, TimelineId};

use crate::{ConnectError, Result};

/// A row: values as text, `None` for null.
pub(crate) type Row = Vec<Option<Vec<u8>>>;

/// A column as text.
pub(crate) fn text(row: &[Option<Vec<u8>>], at: usize) -> Option<&str> {
    std::str::from_utf8(row.get(at)?.as_deref()?).ok()
}

pub(crate) fn unexpected_answer(what: &str) -> ConnectError {
    ConnectError::Protocol(format!("invalid response from primary server: {what}"))
}

/// The result at the end of a stream: no row, or one of the next timeline and its start (`StartReplication`).
pub(crate) fn next_timeline(rows: &[Row]) -> Result<Option<(TimelineId, Lsn)>> {
    let next = |row: &[Option<Vec<u8>>]| Some((TimelineId(text(row, 0)?.parse().ok()?), text(row, 1)?.parse().ok()?));
    match rows {
        [] => Ok(None),
        [row] => match next(row) {
            Some(next) => Ok(Some(next)),
            None => Err(unexpected_answer("unexpected result set after end-of-streaming")),
        },
        _ => Err(unexpected_answer("unexpected result set after end-of-streaming")),
    }
}

/// "18.6 (Debian 18.6-1)", "19beta1" as PQserverVersion has them.
pub(crate) fn version_number(text: &str) -> Option<u32> {
    let number = |text: &str| -> Option<u32> {
        text.get(..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))?.parse().ok()
    };
    let (major, minor) = text.split_once('.').unwrap_or((text, ""));
    number(major)?.checked_mul(10_000)?.checked_add(number(minor).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbered_as_in_libpq() {
        for (text, number) in [("18.6", 180_006), ("17.11 (Debian 17.11-1)", 170_011), ("19beta1", 190_000)] {
            assert_eq!(version_number(text), Some(number));
        }
        assert_eq!(version_number("devel"), None);
        assert_eq!(version_number("99999999999.1"), None);
    }

    #[test]
    fn the_next_timeline_is_a_row_or_none() {
        let row = |a: &str, b: &str| vec![Some(a.as_bytes().to_vec()), Some(b.as_bytes().to_vec())];
        assert_eq!(next_timeline(&[]).unwrap(), None);
        assert_eq!(next_timeline(&[row("2", "0/3000000")]).unwrap(), Some((TimelineId(2), Lsn(0x300_0000))));
        for bad in [vec![row("x", "0/3")], vec![row("2", "3")], vec![vec![]], vec![row("2", "0/3"); 2]] {
            assert!(next_timeline(&bad).is_err());
        }
    }
}
