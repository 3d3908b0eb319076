//! Where WAL comes from: directories and `restore_command` (`XLogFileReadAnyTLI` in
//! `access/transam/xlogrecovery.c`, `RestoreArchivedFile` in `access/transam/xlogarchive.c`, PostgreSQL 18).

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, ErrorKind, IoSliceMut};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

use walrider_datadir::DataDirError;
use walrider_datadir::descriptors::shares;
use walrider_datadir::held::shown;
use walrider_datadir::wal_file::read_up_to;
use walrider_layout::history::{TimelineEntry, TimelineHistory, history_file_name};
use walrider_layout::wal::{SegmentSize, page_of};
use walrider_layout::{Lsn, TimelineId, XLOG_BLCKSZ};

use crate::command;
use crate::error::ReplayError;
use crate::load::ReadWal;
use crate::upstream::Upstream;

/// Longest history file that is read: a line for each of ten thousand promotions.
const MAX_HISTORY_BYTES: u64 = 1 << 20;

/// Endings of files in WAL archives that some tool has packed.
pub const PACKED: [&str; 7] = ["gz", "lz4", "zst", "bz2", "xz", "br", "lzo"];

/// A place to look for WAL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory of segment files: an archive, or `pg_wal`.
    Directory(PathBuf),
    /// A `restore_command`; what it fetches goes to `into` for a while.
    RestoreCommand {
        /// The command, with `%f`, `%p`, `%r` and `%%`.
        command: String,
        /// The data directory: the command runs there, and its `pg_wal` takes what is fetched.
        data_dir: PathBuf,
    },
}

/// A file that was found.
#[derive(Debug)]
struct Segment {
    /// `None` where too many files are open: it is opened again.
    file: Mutex<Option<Arc<File>>>,
    path: PathBuf,
    timeline: TimelineId,
    /// The timeline was left on the page that begins here: what the file holds from there on is another history.
    limit: Option<Lsn>,
    /// Fetched: removed when it is closed.
    temporary: bool,
}

/// What was found of a segment; nothing yet, while one thread looks and others wait for it.
type Lookup = Mutex<Option<Option<Arc<Segment>>>>;

/// A segment, and its file for as long as it is read.
type Opened = (Arc<Segment>, Arc<File>);

impl Drop for Segment {
    fn drop(&mut self) {
        if self.temporary {
            // It is in our way at worst; the next fetch replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// All places, in the order in which they are tried.
pub struct Source {
    places: Vec<Place>,
    size: SegmentSize,
    history: RwLock<Arc<TimelineHistory>>,
    /// What is known of segments, until it is released: no file is looked for, or fetched, twice.
    open: Mutex<HashMap<u64, Arc<Lookup>>>,
    /// Those of them that were opened, oldest first.
    kept: Mutex<VecDeque<Weak<Segment>>>,
    /// The segment where the last restartpoint begins: `%r`, what the archive must keep.
    restartpoint: AtomicU64,
    /// Number of the next fetch, so that several can run side by side.
    fetches: AtomicU64,
    /// The archive is still written: a segment that is too short is not complete yet, and not an error.
    growing: bool,
    /// Who brings WAL into `pg_wal`, the last of the places.
    upstream: Option<Arc<dyn Upstream>>,
}

impl Source {
    /// Looks in `places`, for WAL of the timelines in `history`.
    pub fn new(places: Vec<Place>, size: SegmentSize, history: TimelineHistory) -> Source {
        Source {
            places,
            size,
            history: RwLock::new(Arc::new(history)),
            open: Mutex::default(),
            kept: Mutex::default(),
            restartpoint: AtomicU64::new(0),
            fetches: AtomicU64::new(0),
            growing: false,
            upstream: None,
        }
    }

    /// Says that archives are still written while we read.
    pub fn growing(mut self) -> Source {
        self.growing = true;
        self
    }

    /// Says who brings WAL into `pg_wal`, which is the last of the places.
    pub fn brought_by(mut self, upstream: Option<Arc<dyn Upstream>>) -> Source {
        self.growing |= upstream.is_some();
        self.upstream = upstream;
        self
    }

    /// The places where segments are looked for now.
    fn places(&self) -> &[Place] {
        match &self.upstream {
            Some(upstream) if !upstream.uses_archives() => &self.places[self.places.len() - 1..],
            _ => &self.places,
        }
    }

    /// The timelines that are read.
    pub fn history(&self) -> Arc<TimelineHistory> {
        self.history.read().expect("no panic while locked").clone()
    }

    /// Replaces the timelines that are read.
    pub fn set_history(&self, history: TimelineHistory) {
        *self.history.write().expect("no panic while locked") = Arc::new(history);
        self.close_all();
    }

    /// Closes all files: what was not there may be there now, or be longer.
    pub fn close_all(&self) {
        self.open.lock().expect("no panic while locked").clear();
    }

    /// Forgets which files were not there: they may be there now, also that of a newer timeline than was found instead.
    pub fn forget_missing(&self) {
        let history = self.history();
        let is_found = |segment: u64, lookup: &Arc<Lookup>| match &*lookup.lock().expect("no panic while locked") {
            Some(Some(found)) => found.timeline == history.timeline_at(Lsn(self.size.start_of(segment + 1).0 - 1)),
            Some(None) => false,
            None => true,
        };
        self.open.lock().expect("no panic while locked").retain(|&segment, lookup| is_found(segment, lookup));
    }

    /// The history of a timeline (`readTimeLineHistory`): that of its file, or it alone if there is none.
    pub fn read_history(&self, timeline: TimelineId) -> Result<TimelineHistory, ReplayError> {
        let Some((path, text)) = self.history_file(timeline)? else { return Ok(TimelineHistory::alone(timeline)) };
        TimelineHistory::parse(timeline, &String::from_utf8_lossy(&text))
            .map_err(|error| ReplayError::CorruptWal(format!("file \"{}\": {error}", shown(&path).display())))
    }

    /// Whether a timeline has a history file (`existsTimeLineHistory`).
    pub fn has_history(&self, timeline: TimelineId) -> Result<bool, ReplayError> {
        Ok(self.history_file(timeline)?.is_some())
    }

    /// The newest timeline from `from` on that has a history file, without gaps (`findNewestTimeLine`).
    pub fn newest_timeline(&self, from: TimelineId) -> Result<TimelineId, ReplayError> {
        let mut newest = from;
        while self.has_history(TimelineId(newest.0 + 1))? {
            newest = TimelineId(newest.0 + 1);
        }
        Ok(newest)
    }

    /// Path and contents of a timeline's history file, if it has one.
    pub(crate) fn history_file(&self, timeline: TimelineId) -> Result<Option<(PathBuf, Vec<u8>)>, ReplayError> {
        if timeline <= TimelineId(1) {
            return Ok(None);
        }
        let name = history_file_name(timeline);
        for place in &self.places {
            let Some((file, path, temporary)) = self.find(place, &name)? else { continue };
            let mut bytes = Vec::new();
            io::Read::read_to_end(&mut io::Read::take(file, MAX_HISTORY_BYTES), &mut bytes)
                .map_err(|error| DataDirError::io("read", &path, error))?;
            if temporary {
                let _ = fs::remove_file(&path);
            }
            return Ok(Some((path, bytes)));
        }
        Ok(None)
    }

    /// Finds a file in a place; true: it is ours to remove.
    fn find(&self, place: &Place, name: &str) -> Result<Option<(File, PathBuf, bool)>, ReplayError> {
        match place {
            Place::Directory(directory) => {
                let path = directory.join(name);
                match File::open(&path) {
                    Ok(file) => Ok(Some((file, path, false))),
                    Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(DataDirError::io("open", path, error).into()),
                }
            }
            Place::RestoreCommand { command, data_dir } => self.fetch(command, data_dir, name),
        }
    }

    /// Runs `restore_command` for a file. Exit code 0 without a file, or another code, means that the archive does not
    /// have it; a signal or a code above 125 (the shell could not run it) ends recovery.
    fn fetch(&self, command: &str, data_dir: &Path, name: &str) -> Result<Option<(File, PathBuf, bool)>, ReplayError> {
        let number = self.fetches.fetch_add(1, Ordering::Relaxed);
        let relative = format!("pg_wal/{FETCH_PREFIX}{number}");
        let path = data_dir.join(&relative);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(DataDirError::io("remove", path, error).into());
            }
            _ => {}
        }
        let restartpoint = Lsn(self.restartpoint.load(Ordering::Relaxed));
        let oldest = self.size.file_name(self.history().timeline_at(restartpoint), self.size.segment_of(restartpoint));
        let values = [('f', name), ('p', relative.as_str()), ('r', oldest.as_str())];
        let line = command::expand("restore_command", command, &values).map_err(ReplayError::Refused)?;
        let status = command::shell(data_dir, &line)
            .status()
            .map_err(|error| ReplayError::Refused(format!("could not run restore_command \"{line}\": {error}")))?;
        if let Some(signal) = status.signal() {
            return Err(ReplayError::Refused(format!("restore_command \"{line}\" was ended by signal {signal}")));
        }
        if status.code().is_some_and(|code| code > 125) {
            return Err(ReplayError::Refused(format!(
                "restore_command \"{line}\" could not be run ({status}): correct it, and start again"
            )));
        }
        if !status.success() {
            let _ = fs::remove_file(&path);
            return Ok(None);
        }
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataDirError::io("open", path, error).into()),
        };
        let len = file.metadata().map_err(|error| DataDirError::io("stat", &path, error))?.len();
        let expected = self.size.bytes();
        if self.size.parse_file_name(name).is_some() && len != expected {
            let _ = fs::remove_file(&path);
            if self.growing && len < expected {
                return Ok(None);
            }
            return Err(ReplayError::CorruptWal(format!(
                "restore_command gave WAL file \"{name}\" with {len} bytes instead of {expected}"
            )));
        }
        Ok(Some((file, path, true)))
    }

    /// Finds the file of a segment: newest timeline first, each in all places.
    ///
    /// Of the timeline that others branched off from, within this segment, only the pages before that count: the branch
    /// has the rest in a file of its own, which may be yet to come.
    fn find_segment(&self, segment: u64) -> Result<Option<Segment>, ReplayError> {
        let history = self.history();
        let candidates: Vec<TimelineEntry> = history
            .newest_first()
            .filter(|entry| segment >= self.size.segment_of(entry.begin))
            .filter(|entry| entry.end.is_none_or(|end| segment <= self.size.segment_of(end)))
            .copied()
            .collect();
        for entry in &candidates {
            if let Some((file, path, temporary)) = self.find_on(entry.timeline, segment)? {
                let limit = entry.end.map(page_of);
                let file = Mutex::new(Some(Arc::new(file)));
                return Ok(Some(Segment { file, path, timeline: entry.timeline, limit, temporary }));
            }
        }
        self.refuse_packed(&candidates, segment)?;
        Ok(None)
    }

    /// Finds the file of a segment on one timeline; a `.partial` one if there is no other, or if it has been written to
    /// since the other, which may be the copy that we left for PostgreSQL.
    fn find_on(&self, timeline: TimelineId, segment: u64) -> Result<Option<(File, PathBuf, bool)>, ReplayError> {
        let name = self.size.file_name(timeline, segment);
        let mut whole = None;
        for place in self.places() {
            whole = self.find(place, &name)?;
            if whole.is_some() {
                break;
            }
        }
        if let Some((_, _, true)) = whole {
            return Ok(whole);
        }
        let modified = |found: &(File, PathBuf, bool)| {
            let (file, path, _) = found;
            let time = file.metadata().and_then(|metadata| metadata.modified());
            time.map_err(|error| ReplayError::from(DataDirError::io("stat", path, error)))
        };
        for place in self.places().iter().filter(|place| matches!(place, Place::Directory(_))) {
            let Some(partial) = self.find(place, &format!("{name}.partial"))? else { continue };
            match &whole {
                Some(whole) if modified(&partial)? <= modified(whole)? => {}
                _ => return Ok(Some(partial)),
            }
        }
        Ok(whole)
    }

    fn refuse_packed(&self, timelines: &[TimelineEntry], segment: u64) -> Result<(), ReplayError> {
        for place in &self.places {
            let Place::Directory(directory) = place else { continue };
            for entry in timelines {
                let name = self.size.file_name(entry.timeline, segment);
                if let Some(ending) = PACKED.iter().find(|ending| directory.join(format!("{name}.{ending}")).exists()) {
                    return Err(ReplayError::Refused(format!(
                        "\"{}/{name}.{ending}\" is compressed: use a restore_command that unpacks it",
                        shown(directory).display()
                    )));
                }
            }
        }
        Ok(())
    }

    fn segment(&self, segment: u64) -> Result<Option<Arc<Segment>>, ReplayError> {
        let lookup = self.open.lock().expect("no panic while locked").entry(segment).or_default().clone();
        let mut found = lookup.lock().expect("no panic while locked");
        if found.is_none() {
            let looked_for = self.find_segment(segment)?.map(Arc::new);
            if let Some(segment) = &looked_for {
                self.keep(segment);
            }
            *found = Some(looked_for);
        }
        Ok(found.as_ref().expect("just looked").clone())
    }

    /// Counts a file that was opened. If there are too many, the oldest is closed: WAL is read from one end to the other.
    fn keep(&self, segment: &Arc<Segment>) {
        let mut kept = self.kept.lock().expect("no panic while locked");
        kept.retain(|segment| segment.strong_count() > 0);
        while kept.len() >= shares().wal {
            if let Some(oldest) = kept.pop_front().and_then(|oldest| oldest.upgrade()) {
                oldest.file.lock().expect("no panic while locked").take();
            }
        }
        kept.push_back(Arc::downgrade(segment));
    }

    /// The file of a segment. One that was closed is opened again; `None`: it has got another name meanwhile.
    fn file_of(&self, segment: &Arc<Segment>) -> Result<Option<Arc<File>>, ReplayError> {
        let open = segment.file.lock().expect("no panic while locked").clone();
        if open.is_some() {
            return Ok(open);
        }
        let file = match File::open(&segment.path) {
            Ok(file) => Arc::new(file),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataDirError::io("open", &segment.path, error).into()),
        };
        *segment.file.lock().expect("no panic while locked") = Some(file.clone());
        self.keep(segment);
        Ok(Some(file))
    }

    /// The segment that holds a position, and its file.
    fn open_segment(&self, lsn: Lsn) -> Result<Option<Opened>, ReplayError> {
        let number = self.size.segment_of(lsn);
        loop {
            let Some(segment) = self.segment(number)? else { return Ok(None) };
            if let Some(file) = self.file_of(&segment)? {
                return Ok(Some((segment, file)));
            }
            self.open.lock().expect("no panic while locked").remove(&number);
        }
    }

    /// The `.partial` file that holds `lsn`, and its timeline, if there is no other one for that segment in a directory.
    pub fn partial_file(&self, lsn: Lsn) -> Result<Option<(PathBuf, TimelineId)>, ReplayError> {
        if self.runs_commands() {
            return Ok(None);
        }
        let segment = self.segment(self.size.segment_of(lsn))?;
        let is_partial = |path: &Path| path.extension().is_some_and(|extension| extension == "partial");
        Ok(segment.filter(|segment| is_partial(&segment.path)).map(|segment| (segment.path.clone(), segment.timeline)))
    }

    /// Whether looking for a file means to run a command.
    pub fn runs_commands(&self) -> bool {
        self.places.iter().any(|place| matches!(place, Place::RestoreCommand { .. }))
    }

    /// The directories among the places.
    pub fn directories(&self) -> Vec<PathBuf> {
        let directory = |place: &Place| match place {
            Place::Directory(path) => Some(path.clone()),
            Place::RestoreCommand { .. } => None,
        };
        self.places.iter().filter_map(directory).collect()
    }

    fn known(&self, lsn: Lsn) -> Option<Arc<Segment>> {
        let lookup = self.open.lock().expect("no panic while locked").get(&self.size.segment_of(lsn))?.clone();
        let found = lookup.lock().expect("no panic while locked").clone();
        found.flatten()
    }
}

/// Name of what `restore_command` fetches, below `pg_wal`; files of this name may be removed.
pub const FETCH_PREFIX: &str = "walrider.fetch.";

impl ReadWal for Source {
    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, ReplayError> {
        let Some((segment, file)) = self.open_segment(from)? else { return Ok(0) };
        let offset = self.size.offset_of(from);
        let upto = self.size.start_of(self.size.segment_of(from) + 1);
        let upto = segment.limit.map_or(upto, |limit| limit.min(upto));
        let room = upto.0.saturating_sub(from.0) as usize;
        let visible =
            self.upstream.as_ref().map_or(room, |upstream| upstream.visible().0.saturating_sub(from.0) as usize);
        // The last page that is visible, whole.
        let room = room.min(visible.next_multiple_of(XLOG_BLCKSZ));
        let got =
            read_up_to(&file, slices, offset, room).map_err(|error| DataDirError::io("read", &segment.path, error))?;
        blank(slices, visible.min(got)..got);
        Ok(got - got % XLOG_BLCKSZ)
    }

    fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        match self.segment(self.size.segment_of(lsn)) {
            Ok(Some(segment)) => segment.timeline,
            _ => self.history().timeline_at(lsn),
        }
    }

    fn describe(&self, lsn: Lsn) -> String {
        let offset = self.size.offset_of(lsn);
        let path = match self.known(lsn) {
            Some(segment) => shown(&segment.path).display().to_string(),
            None => self.size.file_name(self.history().timeline_at(lsn), self.size.segment_of(lsn)),
        };
        format!("WAL file \"{path}\", LSN {lsn}, offset {offset}")
    }

    fn has_segment(&self, lsn: Lsn) -> Result<bool, ReplayError> {
        Ok(self.segment(self.size.segment_of(lsn))?.is_some())
    }

    fn release_before(&self, lsn: Lsn) {
        // The one before serves messages.
        let oldest = self.size.segment_of(lsn).saturating_sub(1);
        self.open.lock().expect("no panic while locked").retain(|&segment, _| segment >= oldest);
    }

    fn note_restartpoint(&self, redo: Lsn) {
        self.restartpoint.store(redo.0, Ordering::Relaxed);
        if let Some(upstream) = &self.upstream {
            upstream.restartpoint(redo, self.history().timeline_at(redo));
        }
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
