//! A primary as far as a standby sees it: WAL that is inserted, flushed, sent, archived, lost in a crash; and the one that takes
//! its place on the next timeline.

use walrider_layout::history::history_file_name;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_seed::Random;
use walrider_standby::machine::{Failure, Task};
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::RecordBuilder;
use walrider_wal::testing::pages::WalBuilder;

/// `XLOG_NOOP`.
const NOOP: u8 = 0x20;
/// Segments of 1 MB.
pub const SEGMENT: u64 = 1 << 20;
/// Where all WAL begins.
pub const START: Lsn = Lsn(3 * SEGMENT);

/// The size of segments.
pub fn segment_size() -> SegmentSize {
    SegmentSize::new(SEGMENT as u32).expect("a size that there is")
}

/// A record: where it lies, and what tells it from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Where it begins.
    pub begin: Lsn,
    /// Where the next one may begin.
    pub end: Lsn,
    /// The first bytes of its data; zero for `XLOG_SWITCH`.
    pub id: u64,
}

/// What a primary says to who wants WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It comes, up to the end of the timeline, if that has ended.
    Streams(Option<Lsn>),
    /// The timeline ends there.
    Ended,
}

/// The primary.
#[derive(Clone)]
pub struct Primary {
    /// It runs.
    pub up: bool,
    /// It is gone for good.
    pub lost: bool,
    /// The timeline that is written.
    pub timeline: TimelineId,
    /// Those before, and where each was left.
    pub left: Vec<(TimelineId, Lsn)>,
    /// All that was inserted and is not lost.
    pub records: Vec<Known>,
    /// How many of them are flushed.
    flushed: usize,
    /// Segments before this position are gone, but from the archive.
    pub oldest: Lsn,
    /// What a standby made durable, and the primary has too: commits up to there were acknowledged.
    pub acknowledged: Lsn,
    /// Whole segments before this position are in the archive.
    pub archived: Lsn,
    /// What there was whenever some of it was lost.
    pub lost_histories: Vec<Vec<Known>>,
    wal: WalBuilder,
    next_id: u64,
}

impl Default for Primary {
    fn default() -> Primary {
        let mut primary = Primary {
            up: true,
            lost: false,
            timeline: TimelineId(1),
            left: Vec::new(),
            records: Vec::new(),
            flushed: 0,
            oldest: START,
            acknowledged: Lsn::INVALID,
            archived: START,
            lost_histories: Vec::new(),
            wal: WalBuilder::new(segment_size(), TimelineId(1), START),
            next_id: 1,
        };
        primary.insert(100);
        primary.flushed = 1;
        primary
    }
}

impl Primary {
    /// End of all that was inserted.
    pub fn inserted(&self) -> Lsn {
        self.end_of(self.records.len())
    }

    /// End of what is durable.
    pub fn flushed(&self) -> Lsn {
        self.end_of(self.flushed)
    }

    fn end_of(&self, records: usize) -> Lsn {
        self.records[records - 1].end
    }

    /// Inserts a record with so many bytes.
    pub fn insert(&mut self, len: usize) {
        let id = self.next_id;
        self.next_id += 1;
        let mut data = vec![id as u8; len.max(8)];
        data[..8].copy_from_slice(&id.to_le_bytes());
        let begin = self.wal.record(RecordBuilder::new(RmgrId::XLOG, NOOP).main_data(data));
        self.records.push(Known { begin, end: self.wal.position(), id });
    }

    /// Leaves the rest of the segment unused.
    pub fn switch(&mut self) {
        let begin = self.wal.switch();
        self.records.push(Known { begin, end: self.wal.position(), id: 0 });
    }

    /// Makes some of what was inserted durable.
    pub fn flush(&mut self, random: &mut Random) {
        let more = (self.records.len() - self.flushed) as u64;
        self.flushed += random.below(more + 1) as usize;
    }

    /// Makes all of it durable.
    pub fn flush_all(&mut self) {
        self.flushed = self.records.len();
    }

    /// A standby has made durable all up to there: commits that are durable here, too, are acknowledged.
    pub fn acknowledge(&mut self, heard: Lsn) {
        let commits = self.records[..self.flushed].partition_point(|record| record.end <= heard);
        if commits > 0 {
            self.acknowledged = self.acknowledged.max(self.end_of(commits));
        }
    }

    /// Crashes: of what was not flushed, some is left.
    pub fn crash(&mut self, random: &mut Random) {
        self.up = false;
        self.flush(random);
        self.keep(self.flushed);
    }

    /// Another server takes over, which has all up to `least` at least, and of the rest some that was flushed here.
    pub fn fail_over(&mut self, least: Lsn, random: &mut Random) {
        let from = self.records.partition_point(|record| record.end < least) + 1;
        let kept = from + random.below((self.flushed - from) as u64 + 1) as usize;
        self.keep(kept);
        self.left.push((self.timeline, self.inserted()));
        self.timeline = TimelineId(self.timeline.0 + 1);
        self.wal.set_timeline(self.timeline);
        self.up = true;
        self.insert(80);
        self.flushed = self.records.len();
    }

    fn keep(&mut self, records: usize) {
        if records < self.records.len() {
            self.lost_histories.push(self.records.clone());
        }
        self.records.truncate(records);
        self.flushed = records;
        self.wal.rewind(self.inserted(), self.records[records - 1].begin);
        assert!(self.acknowledged <= self.flushed(), "a primary keeps what it has acknowledged");
    }

    /// The record that begins there, if there is one.
    pub fn record_at(&self, begin: Lsn) -> Option<Known> {
        find(&self.records, begin)
    }

    /// WAL from one position to another, at most so much of it as there is.
    pub fn wal(&self, from: Lsn, to: Lsn) -> &[u8] {
        self.wal.slice(from, to.min(self.inserted()))
    }

    /// A whole segment as the archive gets it, and its name; on the timeline of its last byte.
    pub fn segment(&self, from: Lsn) -> (String, &[u8]) {
        let end = Lsn(from.0 + SEGMENT);
        let last = Lsn(end.0 - 1);
        let left = self.left.iter().find(|(_, at)| last < *at);
        let timeline = left.map_or(self.timeline, |(timeline, _)| *timeline);
        (segment_size().file_name(timeline, segment_size().segment_of(from)), self.wal.slice(from, end))
    }

    /// Name and contents of a timeline's history file.
    pub fn history(&self, timeline: TimelineId) -> (String, Vec<u8>) {
        let lines = self.left.iter().filter(|(left, _)| *left < timeline);
        let text: String =
            lines.map(|(left, at)| format!("{}\t{at}\tno recovery target specified\n", left.0)).collect();
        (history_file_name(timeline), text.into_bytes())
    }

    /// What it says to somebody who wants to stream (`StartReplication`, `walsender.c`).
    ///
    /// # Errors
    /// It does not have that WAL.
    pub fn answer(&self, task: Task) -> Result<Answer, Failure> {
        let end = match self.left.iter().find(|(timeline, _)| *timeline == task.timeline) {
            Some((_, left)) => Some(*left),
            None if task.timeline == self.timeline => None,
            None => return Err(Failure::MissingWal),
        };
        match end {
            Some(end) if task.start == end => Ok(Answer::Ended),
            _ if task.start > end.unwrap_or(self.flushed()) || task.start < self.oldest => Err(Failure::MissingWal),
            end => Ok(Answer::Streams(end)),
        }
    }
}

/// The record of a history that begins there.
pub fn find(records: &[Known], begin: Lsn) -> Option<Known> {
    records.binary_search_by_key(&begin, |record| record.begin).ok().map(|index| records[index])
}
