//! What a primary may say of timelines: how far it may be ahead, which history files it may send, which timeline may follow.
//! The connection is the caller's.

use walrider_layout::history::{MAX_HISTORY_BYTES, TimelineHistory, history_file_name};
use walrider_layout::{Lsn, TimelineId};
use walrider_spool::SpoolError;

use crate::error::{BadHistory, ReceiveError};

/// Most timelines that a primary may be ahead: each is a promotion, and a history file to ask for.
pub(crate) const MAX_TIMELINES: u32 = 1000;

/// Stores the history files from one timeline to `newest`, the primary's: asks for those that `has` does not know, and checks
/// each before it is stored. The newest comes first, so that a primary that is not on the timeline that it names is asked
/// once. Those beside the way to it are wanted too: without them there would be a gap, and the newest timeline is looked for
/// number by number (`findNewestTimeLine`).
///
/// # Errors
/// The primary is on an older timeline or absurdly far ahead, or sends something else; and what `ask` and `store` fail with.
pub fn fetch(
    from: TimelineId,
    newest: TimelineId,
    has: impl Fn(&str) -> bool,
    mut ask: impl FnMut(TimelineId) -> Result<(String, Vec<u8>), ReceiveError>,
    mut store: impl FnMut(TimelineId, &[u8]) -> Result<(), SpoolError>,
) -> Result<(), ReceiveError> {
    if newest < from {
        return Err(ReceiveError::OldTimeline { primary: newest, standby: from });
    }
    if newest.0 - from.0 > MAX_TIMELINES {
        return Err(ReceiveError::TooManyTimelines { primary: newest, standby: from });
    }
    for timeline in (from.0.max(2)..=newest.0).rev().map(TimelineId) {
        if !has(&history_file_name(timeline)) {
            let (name, contents) = ask(timeline)?;
            check_history(timeline, &name, &contents).map_err(|why| ReceiveError::BadHistory { timeline, why })?;
            store(timeline, &contents)?;
        }
    }
    Ok(())
}

/// Checks what a primary says at the end of `timeline`, whose stream ended at `ended`, about the one that follows
/// (`ReceiveXlogStream`, `bin/pg_basebackup/receivelog.c`).
///
/// # Errors
/// It is not newer, or begins where nothing was received.
pub fn check_next(timeline: TimelineId, ended: Lsn, (next, begins): (TimelineId, Lsn)) -> Result<(), ReceiveError> {
    if next <= timeline || begins > ended {
        return Err(ReceiveError::NextTimeline { timeline, ended, next, begins });
    }
    Ok(())
}

/// Whether it is what recovery can read, and leads to the timeline (`readTimeLineHistory`): once stored, it is read at every
/// start.
fn check_history(timeline: TimelineId, name: &str, contents: &[u8]) -> Result<(), BadHistory> {
    let expected = history_file_name(timeline);
    if name != expected {
        return Err(BadHistory::Name { name: name.to_owned(), expected });
    }
    if contents.len() as u64 > MAX_HISTORY_BYTES {
        return Err(BadHistory::TooLong(contents.len()));
    }
    match TimelineHistory::parse(timeline, &String::from_utf8_lossy(contents))?.parent() {
        Some(_) => Ok(()),
        None => Err(BadHistory::NoParent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and text of a timeline's history file.
    type HistoryFile = fn(u32) -> (String, Vec<u8>);
    type Stored = (TimelineId, Vec<u8>);

    /// What is fetched and stored from a primary that is on `newest`, and has this name and text for every history file that is
    /// asked for; and how often it was asked.
    fn histories(from: u32, newest: u32, file: HistoryFile, has: &str) -> (Result<Vec<Stored>, ReceiveError>, u32) {
        let (mut stored, mut asked) = (Vec::new(), 0);
        let ask = |timeline: TimelineId| {
            asked += 1;
            Ok(file(timeline.0))
        };
        let store = |timeline, contents: &[u8]| {
            stored.push((timeline, contents.to_vec()));
            Ok(())
        };
        let fetched = fetch(TimelineId(from), TimelineId(newest), |name| name == has, ask, store);
        (fetched.map(|()| stored), asked)
    }

    /// As every server has them: each timeline branched off from the one before.
    fn in_a_row(timeline: u32) -> (String, Vec<u8>) {
        let lines =
            (1..timeline).map(|parent| format!("{parent}\t0/{:X}\tno recovery target specified\n", parent << 24));
        (format!("{timeline:08X}.history"), lines.collect::<String>().into_bytes())
    }

    #[test]
    fn a_history_file_is_one() {
        let cases: [(HistoryFile, &str); 9] = [
            (|n| (in_a_row(n).0, b"#\n".repeat(1 << 20)), "it has 2097152 bytes, more than 1048576"),
            (|n| (in_a_row(n).0, (0..=255).rev().collect()), "line 1: expected a numeric timeline ID"),
            (
                |n| (in_a_row(n).0, b"1\tnowhere\tx\n".to_vec()),
                "line 1: expected a write-ahead log switchpoint location",
            ),
            (
                |n| (in_a_row(n).0, b"1\t0/300\tx\n2\n".to_vec()),
                "line 2: expected a write-ahead log switchpoint location",
            ),
            (|n| (in_a_row(n).0, b"2\t0/400\tx\n1\t0/300\tx\n".to_vec()), "line 2: timeline IDs must be in increasing"),
            (|n| (in_a_row(n).0, in_a_row(n + 1).1), "must be less than child timeline's ID"),
            (|n| (in_a_row(n).0, Vec::new()), "does not say which timeline this one branched off from"),
            (
                |n| (in_a_row(n).0, b"1\t0/300\t".iter().copied().chain([b'x'; 5000]).collect()),
                "line 1: the line is too long",
            ),
            (|n| ("../../x".into(), in_a_row(n).1), "calls it \"../../x\" instead of \"00000003.history\""),
        ];
        for (file, expected) in cases {
            let error = histories(3, 3, file, "").0.unwrap_err();
            assert!(matches!(error, ReceiveError::BadHistory { timeline: TimelineId(3), .. }), "{error}");
            assert!(error.to_string().contains(expected), "{expected}: {error}");
        }
        let (found, asked) = histories(2, 5, in_a_row, "00000003.history");
        let expected = [5, 4, 2].map(|timeline| (TimelineId(timeline), in_a_row(timeline).1));
        assert_eq!((found.unwrap(), asked), (expected.to_vec(), 3));
    }

    #[test]
    fn timelines_have_a_bound() {
        // Nothing is asked of a server that is where nobody can be.
        for (primary, from) in [(u32::MAX, 1), (1002, 1), (u32::MAX, 0)] {
            let (fetched, asked) = histories(from, primary, in_a_row, "");
            assert!(matches!(fetched, Err(ReceiveError::TooManyTimelines { .. })), "{fetched:?}");
            assert_eq!(asked, 0);
        }
        // One that has no history to show is asked once.
        let (fetched, asked) = histories(1, 900, |n| (in_a_row(n).0, b"nonsense".to_vec()), "");
        assert!(matches!(fetched, Err(ReceiveError::BadHistory { timeline: TimelineId(900), .. })), "{fetched:?}");
        assert_eq!(asked, 1);
        // And what is said to follow leads on, without a gap.
        let check = |timeline, next, at| check_next(TimelineId(timeline), Lsn(0x300_0000), (TimelineId(next), Lsn(at)));
        assert!(check(1, 2, 0x300_0000).is_ok() && check(1, 900, 0x2FF_FFFF).is_ok());
        for (timeline, next, at) in [(1, 1, 0), (2, 1, 0), (2, 0, 0), (1, 2, 0x300_0001)] {
            assert!(matches!(check(timeline, next, at), Err(ReceiveError::NextTimeline { .. })));
        }
    }
}
