//! Timeline history: which timelines lead to one, and where each branched off
//! (`access/transam/timeline.c`, PostgreSQL 18).

use crate::wal::{SegmentSize, is_upper_hex};
use crate::{Lsn, TimelineId};

/// One timeline of a history, and the part of the WAL that counts of it: `begin` ≤ position < `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelineEntry {
    /// The timeline.
    pub timeline: TimelineId,
    /// Where it branched off from the one before; zero for the first.
    pub begin: Lsn,
    /// Where the next one branches off; `None` for the last.
    pub end: Option<Lsn>,
}

/// The longest line that PostgreSQL reads as one, in bytes without its end: the rest would be a line of its own
/// (`readTimeLineHistory` has a buffer of `MAXPGPATH`).
const LONGEST_LINE: usize = 1023;

/// The timelines that lead to one, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineHistory(Vec<TimelineEntry>);

/// A history file that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("syntax error in history file, line {line}: {problem}")]
pub struct InvalidHistory {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub problem: &'static str,
}

impl TimelineHistory {
    /// The history of a timeline that has no file: it alone.
    pub fn alone(timeline: TimelineId) -> TimelineHistory {
        TimelineHistory(vec![TimelineEntry { timeline, begin: Lsn::INVALID, end: None }])
    }

    /// Reads the history file of `timeline` (`readTimeLineHistory`): lines of timeline, switch point and reason,
    /// oldest first; `#` begins a comment.
    ///
    /// ```
    /// use walrider_layout::{Lsn, TimelineId, history::TimelineHistory};
    /// let history = TimelineHistory::parse(TimelineId(3), "1\t0/3000000\tno recovery target\n2\t0/5000000\tx\n").unwrap();
    /// assert_eq!(history.timeline_at(Lsn(0x2FFFFFF)), TimelineId(1));
    /// assert_eq!(history.timeline_at(Lsn(0x3000000)), TimelineId(2));
    /// assert_eq!(history.timeline_at(Lsn(0x9000000)), TimelineId(3));
    /// assert_eq!(history.switch_point(TimelineId(2)), Some(Lsn(0x5000000)));
    /// ```
    ///
    /// # Errors
    /// A line without a timeline or a switch point, one that is too long, or timelines that do not ascend.
    pub fn parse(timeline: TimelineId, text: &str) -> Result<TimelineHistory, InvalidHistory> {
        let mut entries: Vec<TimelineEntry> = Vec::new();
        let mut begin = Lsn::INVALID;
        for (line, text) in (1..).zip(text.lines()) {
            if text.len() > LONGEST_LINE {
                return Err(InvalidHistory { line, problem: "the line is too long" });
            }
            let text = text.trim_start();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let invalid = |problem| InvalidHistory { line, problem };
            let mut fields = text.split_whitespace();
            let number = fields.next().and_then(|field| field.parse().ok()).map(TimelineId);
            let number = number.ok_or_else(|| invalid("expected a numeric timeline ID"))?;
            let end: Lsn = fields
                .next()
                .and_then(|field| field.parse().ok())
                .ok_or_else(|| invalid("expected a write-ahead log switchpoint location"))?;
            if entries.last().is_some_and(|last| last.timeline >= number) {
                return Err(invalid("timeline IDs must be in increasing sequence"));
            }
            if number >= timeline {
                return Err(invalid("timeline IDs must be less than child timeline's ID"));
            }
            entries.push(TimelineEntry { timeline: number, begin, end: Some(end) });
            begin = end;
        }
        entries.push(TimelineEntry { timeline, begin, end: None });
        // A recovery that stopped at a target before its parent began names the parent all the same (`writeTimeLineHistory`):
        // what counts of the timelines before ends there, too.
        let mut bound = begin;
        for entry in entries.iter_mut().rev().skip(1) {
            bound = bound.min(entry.end.unwrap_or(bound));
            (entry.begin, entry.end) = (entry.begin.min(bound), Some(bound));
        }
        Ok(TimelineHistory(entries))
    }

    /// The timelines, newest first.
    pub fn newest_first(&self) -> impl Iterator<Item = &TimelineEntry> {
        self.0.iter().rev()
    }

    /// The timelines that have WAL in a segment, newest first.
    pub fn of_segment(&self, segment: u64, size: SegmentSize) -> impl Iterator<Item = &TimelineEntry> {
        self.newest_first().filter(move |entry| {
            let last = entry.end.map_or(u64::MAX, |end| size.segment_of(end));
            (size.segment_of(entry.begin)..=last).contains(&segment)
        })
    }

    /// The timeline that this is the history of.
    pub fn target(&self) -> TimelineId {
        self.0.last().expect("never empty").timeline
    }

    /// The timeline that the last branched off from; `None` if no other leads to it.
    pub fn parent(&self) -> Option<TimelineId> {
        self.0.iter().rev().nth(1).map(|entry| entry.timeline)
    }

    /// `tliInHistory`.
    pub fn contains(&self, timeline: TimelineId) -> bool {
        self.0.iter().any(|entry| entry.timeline == timeline)
    }

    /// The timeline of the byte at `lsn` (`tliOfPointInHistory`).
    pub fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        let at = self.0.partition_point(|entry| entry.end.is_some_and(|end| end <= lsn));
        self.0[at.min(self.0.len() - 1)].timeline
    }

    /// Where a timeline was left; `None` if it is the last, or not in the history (`tliSwitchPoint`).
    pub fn switch_point(&self, timeline: TimelineId) -> Option<Lsn> {
        self.0.iter().find(|entry| entry.timeline == timeline).and_then(|entry| entry.end)
    }
}

/// Longest history file that is read or kept, in bytes: a line for each of ten thousand promotions.
pub const MAX_HISTORY_BYTES: u64 = 1 << 20;

/// The name of a timeline's history file (`TLHistoryFileName`).
pub fn history_file_name(timeline: TimelineId) -> String {
    format!("{:08X}.history", timeline.0)
}

/// The timeline whose history file has this name; `None` if it is not the name of one (`IsTLHistoryFileName`).
pub fn parse_history_file_name(name: &str) -> Option<TimelineId> {
    let number = name.strip_suffix(".history").filter(|number| number.len() == 8 && is_upper_hex(number))?;
    u32::from_str_radix(number, 16).ok().map(TimelineId)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TimelineHistory, InvalidHistory> {
        TimelineHistory::parse(TimelineId(5), text)
    }

    #[test]
    fn timelines_may_be_skipped_and_comments_stand_anywhere() {
        let history = parse("# made by hand\n1\t0/3000000\tno recovery target specified\n\n  4 1/0\n#\n").unwrap();
        let newest_first: Vec<u32> = history.newest_first().map(|entry| entry.timeline.0).collect();
        assert_eq!(newest_first, [5, 4, 1]);
        assert_eq!(history.target(), TimelineId(5));
        assert!(history.contains(TimelineId(4)) && !history.contains(TimelineId(2)));
        assert_eq!(history.timeline_at(Lsn(0xFFFF_FFFF)), TimelineId(4));
        assert_eq!(history.timeline_at(Lsn(0x1_0000_0000)), TimelineId(5), "the switch point is of the new one");
        assert_eq!(history.switch_point(TimelineId(1)), Some(Lsn(0x300_0000)));
        assert_eq!(history.switch_point(TimelineId(5)), None);
        assert_eq!(history.switch_point(TimelineId(2)), None);
    }

    #[test]
    fn a_timeline_may_branch_off_before_its_parent_began() {
        let history =
            TimelineHistory::parse(TimelineId(4), "1\t0/A000\tx\n2\t0/C000\tx\n3\t0/B000\tbefore LSN 0/B000\n")
                .unwrap();
        let timelines = [0x9FFF, 0xA000, 0xAFFF, 0xB000, 0xC000].map(|lsn| history.timeline_at(Lsn(lsn)).0);
        assert_eq!(timelines, [1, 2, 2, 4, 4]);
        assert_eq!(history.switch_point(TimelineId(2)), Some(Lsn(0xB000)));
    }

    #[test]
    fn without_a_file_there_is_one_timeline() {
        let history = TimelineHistory::alone(TimelineId(3));
        assert_eq!((history.timeline_at(Lsn(0)), history.parent()), (TimelineId(3), None));
        assert_eq!(history, TimelineHistory::parse(TimelineId(3), "").unwrap());
    }

    #[test]
    fn what_postgresql_refuses_is_refused() {
        let line = |text| parse(text).unwrap_err().line;
        assert_eq!(line("x\t0/1\n"), 1);
        assert_eq!(line("1\t0/1\n2\n"), 2);
        assert_eq!(line("1\t0/1\n2\tnowhere\n"), 2);
        assert_eq!(line("2\t0/1\n2\t0/2\n"), 2);
        assert_eq!(line("# the child itself\n5\t0/1\n"), 2);
        let long = |len: usize| format!("1\t0/1\t{}\n2\t0/2\tx\n", "r".repeat(len - 6));
        assert_eq!(parse(&long(1023)).unwrap().parent(), Some(TimelineId(2)));
        assert_eq!(line(&long(1024)), 1);
    }

    #[test]
    fn history_files_are_named_in_hexadecimal() {
        assert_eq!(history_file_name(TimelineId(0x1A)), "0000001A.history");
        assert_eq!(parse_history_file_name("0000001A.history"), Some(TimelineId(0x1A)));
        for other in ["0000001a.history", "1A.history", "+000001A.history", "0000001A.history.ready", "0000001A"] {
            assert_eq!(parse_history_file_name(other), None, "{other}");
        }
    }
}
