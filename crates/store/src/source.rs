//! WAL by position, from several places: which file a position is in, on which timeline, and whether there is more
//! (`WaitForWALToBecomeAvailable` in `access/transam/xlogrecovery.c`, PostgreSQL 18).

use std::fs::File;
use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Advice, fadvise};
use walrider_datadir::DataDirError;
use walrider_datadir::held::shown;
use walrider_datadir::wal_file::read_up_to;
use walrider_layout::history::TimelineHistory;
use walrider_layout::wal::{SegmentSize, page_of};
use walrider_layout::{Lsn, TimelineId, XLOG_BLCKSZ};

use walrider_wal::decode::WalFormat;

use crate::driver::{Driver, FetchStats, Remote};
use crate::error::StoreError;
use crate::fetch::Fetcher;
use crate::find::{Finder, Found, Segment};
use crate::read::{ReadWal, is_page};
use crate::restore::Refusal;

/// How far before a segment is read the system is asked to read it: while WAL that was read is worked on, the disk would have nothing to do.
const AHEAD: u64 = 8 << 20;

/// How much of that at once: Linux takes no more than a device's largest request (`force_page_cache_ra`, `mm/readahead.c`).
const AT_ONCE: u64 = 128 << 10;

/// WAL that comes into `pg_wal` while it is read.
pub trait Incoming: Send + Sync {
    /// Where the WAL that may be read ends (exclusive); what `pg_wal` has past it does not count.
    fn visible(&self) -> Lsn;

    /// From where on WAL streams in; archives are looked at for what is before, or for all if nothing does.
    fn streams_from(&self) -> Option<Lsn>;

    /// A segment was found in an archive, under its own name if it is `complete`: keeps it in `pg_wal`, in the place of what there is of it.
    ///
    /// # Errors
    /// It cannot be kept.
    fn keep_restored(&self, name: &str, contents: &File, complete: bool) -> Result<Kept, StoreError>;

    /// Recovery would now begin at `redo`, on this timeline: older WAL is not needed here any more.
    fn restartpoint(&self, redo: Lsn, timeline: TimelineId);
}

/// What became of a segment that was found in an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It is to be read where it was found.
    No,
    /// It is to be read in `pg_wal`, which has it now; or has what streams in.
    InPgWal,
}

/// What is past the end of WAL, once that was asked for again.
#[derive(Debug)]
pub enum End {
    /// Nothing: the WAL ends.
    Confirmed,
    /// More: it was not to be had a moment ago.
    GoesOn,
    /// Nobody knows, and why: the archive is out of reach.
    Unknown(String),
}

/// A segment, and its file for as long as it is read.
type Opened = (Arc<Segment>, Arc<File>);

/// All places, in the order in which they are tried.
pub struct Source {
    fetcher: Fetcher,
}

impl Source {
    /// Looks in `places`, for WAL of the timelines in `history`.
    pub fn new(places: Vec<Arc<dyn Driver>>, size: SegmentSize, history: TimelineHistory) -> Source {
        Source { fetcher: Fetcher::new(Finder::new(places, size, history)) }
    }

    /// Says who brings WAL into `pg_wal`, which is the last of the places.
    pub fn brought_by(mut self, incoming: Option<Arc<dyn Incoming>>) -> Source {
        self.fetcher.finder_mut().incoming = incoming;
        self
    }

    /// `told` is called with true when reading begins to wait for a command, and with false when it goes on.
    pub fn on_wait(&self, told: impl FnMut(bool) + Send + 'static) {
        self.fetcher.on_wait(Box::new(told));
    }

    fn finder(&self) -> &Finder {
        self.fetcher.finder()
    }

    fn size(&self) -> SegmentSize {
        self.finder().size
    }

    /// The timelines that are read.
    pub fn history(&self) -> Arc<TimelineHistory> {
        self.finder().history()
    }

    /// Replaces the timelines that are read.
    pub fn set_history(&self, history: TimelineHistory) {
        self.finder().set_history(history);
        self.close_all();
    }

    /// Closes all files: what was not there may be there now, or be longer.
    pub fn close_all(&self) {
        self.fetcher.retain(|_, _| false);
    }

    /// Forgets which files were not there: they may be there now, also that of a newer timeline than was found instead.
    pub fn forget_missing(&self) {
        self.fetcher.retain(|number, found| match found.map(|found| &found.segment) {
            Some(Some(segment)) => segment.timeline == self.finder().timeline_of(number),
            Some(None) => false,
            None => true,
        });
    }

    /// The timeline whose WAL is read at `lsn`, or would be if there were any. That of the file, which may be of a later timeline
    /// than the position: it has all that precedes in its segment. On a page where timelines part, the later one.
    pub fn timeline_needed(&self, lsn: Lsn) -> TimelineId {
        let page_end = Lsn(page_of(lsn).0 + XLOG_BLCKSZ as u64 - 1);
        self.timeline_at(lsn).max(self.history().timeline_at(page_end))
    }

    /// The history of a timeline (`readTimeLineHistory`): that of its file, or it alone if there is none.
    pub fn read_history(&self, timeline: TimelineId) -> Result<TimelineHistory, StoreError> {
        let Some((path, text)) = self.history_file(timeline)? else { return Ok(TimelineHistory::alone(timeline)) };
        TimelineHistory::parse(timeline, &String::from_utf8_lossy(&text)).map_err(|error| {
            StoreError::Corrupt(format!(
                "\"{}\" is no timeline history: {error}; remove that file: what has WAL of timeline {timeline}, the \
                     primary or an archive, has an intact one, or put that there",
                shown(&path).display()
            ))
        })
    }

    /// Whether a timeline has a history file (`existsTimeLineHistory`).
    pub fn has_history(&self, timeline: TimelineId) -> Result<bool, StoreError> {
        Ok(self.history_file(timeline)?.is_some())
    }

    /// The newest timeline from `from` on that has a history file, without gaps (`findNewestTimeLine`).
    pub fn newest_timeline(&self, from: TimelineId) -> Result<TimelineId, StoreError> {
        let mut newest = from;
        while self.has_history(TimelineId(newest.0 + 1))? {
            newest = TimelineId(newest.0 + 1);
        }
        Ok(newest)
    }

    /// An archive is out of reach, so that [`newest_timeline`](Source::newest_timeline), if asked last, may have missed some.
    pub fn is_unsure(&self) -> bool {
        self.finder().remote().is_some_and(Remote::is_unsure)
    }

    /// Path and contents of a timeline's history file, if it has one.
    ///
    /// # Errors
    /// When looking for it fails, or reading it.
    pub fn history_file(&self, timeline: TimelineId) -> Result<Option<(PathBuf, Vec<u8>)>, StoreError> {
        self.finder().history_file(timeline)
    }

    fn segment(&self, lsn: Lsn) -> Result<Option<Arc<Segment>>, StoreError> {
        Ok(self.fetcher.get(self.size().segment_of(lsn))?.segment)
    }

    /// The segment that holds a position, and its file.
    fn open_segment(&self, lsn: Lsn) -> Result<Option<Opened>, StoreError> {
        let number = self.size().segment_of(lsn);
        loop {
            let Some(segment) = self.segment(lsn)? else { return Ok(None) };
            if let Some(file) = self.finder().open(&segment)? {
                return Ok(Some((segment, file)));
            }
            self.fetcher.retain(|other, _| other != number);
        }
    }

    /// The `.partial` file that holds `lsn`, and its timeline, if there is no other one for that segment in a directory.
    pub fn partial_file(&self, lsn: Lsn) -> Result<Option<(PathBuf, TimelineId)>, StoreError> {
        if self.fetches() {
            return Ok(None);
        }
        let segment = self.segment(lsn)?;
        let is_partial = |path: &Path| path.extension().is_some_and(|extension| extension == "partial");
        Ok(segment.filter(|segment| is_partial(&segment.path)).map(|segment| (segment.path.clone(), segment.timeline)))
    }

    /// Whether looking for a file takes its time: it may have to be fetched.
    pub fn fetches(&self) -> bool {
        self.finder().remote().is_some()
    }

    /// The directories among the places.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.finder().places.iter().filter_map(|place| place.directory()).map(Path::to_owned).collect()
    }

    /// What fetching has cost so far.
    pub fn fetch_stats(&self) -> FetchStats {
        let stats = self.finder().remote().map(Remote::stats).unwrap_or_default();
        FetchStats { waited: self.fetcher.waited(), ..stats }
    }

    /// What `restore_command` said, if it was asked for the segment that holds `lsn`, and did not deliver it.
    pub fn refusal(&self, lsn: Lsn) -> Option<Refusal> {
        self.fetcher.known(self.size().segment_of(lsn))?.refusal
    }

    /// Makes sure that the WAL ends where there is none at `lsn`: a command fails also when the archive is out of reach. It is
    /// asked again for that segment, and for one that it has delivered before: only if it delivers that, it is the archive
    /// that does not have the other. `counts`: so much depends on it that a command which delivers nothing at all, neither
    /// now nor before, proves nothing.
    ///
    /// # Errors
    /// A command that cannot be run, or that was ended by a signal; a file of the wrong size.
    pub fn confirm_end(&self, lsn: Lsn, counts: bool) -> Result<End, StoreError> {
        let segment = self.size().segment_of(lsn);
        if !self.fetches() || self.fetcher.get(segment)?.refusal.is_none() {
            return Ok(End::Confirmed);
        }
        let (proof, again) = std::thread::scope(|scope| {
            let proof = scope.spawn(|| self.ask_for_what_was_there());
            self.fetcher.retain(|number, _| number != segment);
            let again = self.fetcher.get(segment);
            (proof.join().expect("no panic in a thread that fetches"), again)
        });
        if again?.refusal.is_none() {
            self.fetcher.retain(|number, _| number <= segment);
            return Ok(End::GoesOn);
        }
        let disk = || self.finder().full_disk().map_or(String::new(), |disk| format!(" ({disk})"));
        Ok(match proof? {
            Proof::Delivered => End::Confirmed,
            Proof::Refused(refusal) => End::Unknown(format!(
                "{refusal}, although it has delivered that file before{}: the archive is out of reach, which is not the end \
                 of the WAL",
                disk()
            )),
            Proof::None(_) if !counts => End::Confirmed,
            Proof::None(refusal) => End::Unknown(format!(
                "{refusal}, although recovery begins in that file{}: a restore_command that delivers nothing at all does not \
                 tell where the WAL ends. If there is no archive any more, name pg_wal with --wal",
                disk()
            )),
        })
    }

    /// Asks for the segment that was delivered last, or else for where recovery begins, and the one before.
    fn ask_for_what_was_there(&self) -> Result<Proof, StoreError> {
        let finder = self.finder();
        if let Some(delivered) = finder.remote().and_then(Remote::delivered) {
            return Ok(finder.refuses(&delivered)?.map_or(Proof::Delivered, Proof::Refused));
        }
        let oldest = finder.oldest();
        let Some(refusal) = finder.refuses(&oldest)? else { return Ok(Proof::Delivered) };
        let before = finder.size.parse_file_name(&oldest).filter(|(_, number)| *number > 0);
        if let Some((timeline, number)) = before
            && finder.refuses(&finder.size.file_name(timeline, number - 1))?.is_none()
        {
            return Ok(Proof::Delivered);
        }
        Ok(Proof::None(refusal))
    }
}

/// Whether an archive still delivers what it delivered before.
enum Proof {
    Delivered,
    Refused(Refusal),
    /// It has delivered nothing yet, and still does not.
    None(Refusal),
}

impl ReadWal for Source {
    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, StoreError> {
        let Some((segment, file)) = self.open_segment(from)? else { return Ok(0) };
        let offset = self.size().offset_of(from);
        let upto = self.size().start_of(self.size().segment_of(from) + 1);
        let visible = self.finder().incoming.as_ref().map_or(Lsn(u64::MAX), |incoming| incoming.visible());
        let upto = upto.min(segment.limit.unwrap_or(upto)).min(visible);
        let counts = upto.0.saturating_sub(from.0) as usize;
        // The last page of it, whole.
        let room = counts.next_multiple_of(XLOG_BLCKSZ);
        let got =
            read_up_to(&file, slices, offset, room).map_err(|error| DataDirError::io("read", &segment.path, error))?;
        blank(slices, counts.min(got)..got);
        read_ahead(&file, offset, got as u64);
        Ok(got - got % XLOG_BLCKSZ)
    }

    fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        // A reader of it is told what is wrong.
        match self.fetcher.look(self.size().segment_of(lsn)) {
            Ok(Some(Found { segment: Some(segment), .. })) => segment.timeline,
            _ => self.history().timeline_at(lsn),
        }
    }

    fn describe(&self, lsn: Lsn) -> String {
        let offset = self.size().offset_of(lsn);
        let known = self.fetcher.known(self.size().segment_of(lsn));
        let is_missing = known.as_ref().is_some_and(|found| found.segment.is_none());
        let (segment, refusal) = known.map_or((None, None), |found| (found.segment, found.refusal));
        let path = match segment {
            Some(segment) => shown(&segment.path).display().to_string(),
            None => self.size().file_name(self.history().timeline_at(lsn), self.size().segment_of(lsn)),
        };
        let why = refusal.map(|refusal| refusal.to_string()).or(is_missing.then(|| "there is no such file".to_owned()));
        let why = why.map_or(String::new(), |why| format!(" ({why})"));
        format!("WAL file \"{path}\", LSN {lsn}, offset {offset}{why}")
    }

    fn has_segment(&self, lsn: Lsn) -> Result<bool, StoreError> {
        Ok(self.segment(lsn)?.is_some())
    }

    fn goes_on_after(&self, lsn: Lsn, format: &WalFormat) -> Result<bool, StoreError> {
        // A command that fails now may deliver later: then it is the archive that has to be asked again (Source::confirm_end).
        if self.fetches() {
            return Ok(false);
        }
        for place in &self.finder().places {
            let (Some(directory), Some(listing)) = (place.directory(), place.list()?) else { continue };
            for name in &listing.segments {
                let known = self.size().parse_file_name(name.trim_end_matches(".partial"));
                let is_read = |(timeline, number): &(TimelineId, u64)| {
                    *number > self.size().segment_of(lsn) && *timeline == self.finder().timeline_of(*number)
                };
                let Some((timeline, number)) = known.filter(is_read) else { continue };
                if begins(&directory.join(name), self.size().start_of(number), format, timeline)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn ready_up_to(&self, from: Lsn) -> Lsn {
        let segment = self.size().segment_of(from);
        match self.finder().fetches(segment) {
            true => self.size().start_of(self.fetcher.known_up_to(segment)),
            false => Lsn(u64::MAX),
        }
    }

    fn release_before(&self, lsn: Lsn) {
        self.fetcher.move_to(self.size().segment_of(lsn));
    }

    fn note_restartpoint(&self, redo: Lsn) {
        self.finder().note_restartpoint(redo);
        if let Some(incoming) = &self.finder().incoming {
            incoming.restartpoint(redo, self.history().timeline_at(redo));
        }
    }
}

/// Whether a file has the beginning of this segment. In `pg_wal` there are files that are used again, of which only the name is of what is to come.
fn begins(path: &Path, begin: Lsn, format: &WalFormat, timeline: TimelineId) -> Result<bool, StoreError> {
    let failed = |error| DataDirError::io("read", path, error);
    let mut page = [0; XLOG_BLCKSZ];
    let got = match File::open(path) {
        // It was removed, or has another name by now.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        opened => {
            let file = opened.map_err(failed)?;
            read_up_to(&file, &mut [IoSliceMut::new(&mut page)], 0, XLOG_BLCKSZ).map_err(failed)?
        }
    };
    Ok(got == XLOG_BLCKSZ && is_page(&page, begin, format, timeline))
}

/// Has the system read what comes so far behind these bytes of a segment; at its beginning, all up to there.
fn read_ahead(file: &File, offset: u64, len: u64) {
    let range = if offset == 0 { len..AHEAD + len } else { offset + AHEAD..offset + AHEAD + len };
    for from in range.step_by(AT_ONCE as usize) {
        // A hint.
        let _ = fadvise(file, from, NonZeroU64::new(AT_ONCE), Advice::WillNeed);
    }
}

/// Zeroes a range of the bytes that the slices hold one after the other.
fn blank(slices: &mut [IoSliceMut<'_>], range: Range<usize>) {
    let mut begin = 0;
    for slice in slices {
        let end = begin + slice.len();
        let (from, upto) = (range.start.clamp(begin, end), range.end.clamp(begin, end));
        slice[from - begin..upto - begin].fill(0);
        begin = end;
    }
}

#[cfg(test)]
mod tests;
