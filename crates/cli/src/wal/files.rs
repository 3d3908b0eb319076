//! Segment files by number: those of a directory that belong to its newest timeline's history, or the files named.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};

use walrider_datadir::wal_file::read_up_to;
use walrider_layout::history::{TimelineHistory, history_file_name};
use walrider_layout::wal::{SegmentSize, WalPageHeader};
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ};
use walrider_replay::source::PACKED;
use walrider_wal::decode::WalFormat;

use super::WalError;

/// A segment's file.
#[derive(Clone, Debug)]
struct Segment {
    path: PathBuf,
    timeline: TimelineId,
}

/// The WAL that there is.
pub struct WalFiles {
    format: WalFormat,
    segments: BTreeMap<u64, Segment>,
    open: RefCell<Option<(u64, File)>>,
}

impl WalFiles {
    /// Finds the WAL in one directory, or in the files named.
    pub fn find(sources: &[PathBuf]) -> Result<WalFiles, WalError> {
        let (files, histories) = match sources {
            [directory] if directory.is_dir() => list(directory)?,
            files => (files.to_vec(), Vec::new()),
        };
        if files.is_empty() {
            return Err(no_segments(&sources[0]));
        }
        let format = files.iter().find_map(|path| read_format(path).transpose()).transpose()?;
        let format = format.ok_or_else(|| WalError::NotWal(files[0].clone()))?;
        let size = format.segment_size;
        let mut all = Vec::new();
        for path in files {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let whole_name = name.strip_suffix(".partial").unwrap_or(&name);
            match size.parse_file_name(whole_name) {
                Some((timeline, segment)) => all.push((segment, name.len(), Segment { path, timeline })),
                None => return Err(WalError::NotASegmentName(path, size.bytes())),
            }
        }
        let newest = all.iter().map(|(_, _, segment)| segment.timeline).max().expect("not empty");
        let history = histories.iter().find(|path| path.ends_with(history_file_name(newest)));
        let history = match history {
            Some(path) => Some(read_history(path, newest)?),
            // Without a history file a directory's newest timeline stands alone; files that are named all count.
            None if !histories.is_empty() || sources[0].is_dir() => Some(TimelineHistory::alone(newest)),
            None => None,
        };
        if let Some(history) = &history {
            all.retain(|(number, _, segment)| {
                history.of_segment(*number, size).any(|entry| entry.timeline == segment.timeline)
            });
        }
        // Of several files of one segment the newest timeline's counts; a `.partial` one only if there is no other.
        all.sort_by_key(|(number, name_len, segment)| (*number, *name_len > 24, std::cmp::Reverse(segment.timeline)));
        let mut segments = BTreeMap::new();
        for (number, _, segment) in all {
            segments.entry(number).or_insert(segment);
        }
        Ok(WalFiles { format, segments, open: RefCell::default() })
    }

    /// What WAL pages are checked against.
    pub fn format(&self) -> &WalFormat {
        &self.format
    }

    /// Where the first segment begins.
    pub fn start(&self) -> Lsn {
        self.format.segment_size.start_of(*self.segments.first_key_value().expect("not empty").0)
    }

    /// Whether a segment that begins at `lsn` or later is there.
    pub fn goes_on_at(&self, lsn: Lsn) -> bool {
        let number = lsn.0.div_ceil(self.format.segment_size.bytes());
        self.segments.range(number..).next().is_some()
    }

    /// The timeline of the file that holds `lsn`, or of the newest one if none does.
    pub fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        let number = self.format.segment_size.segment_of(lsn);
        let segment = self.segments.get(&number).or_else(|| self.segments.values().next_back());
        segment.expect("not empty").timeline
    }

    /// The file that holds `lsn`, for messages.
    pub fn describe(&self, lsn: Lsn) -> String {
        let size = self.format.segment_size;
        match self.segments.get(&size.segment_of(lsn)) {
            Some(segment) => format!("file \"{}\", offset {}", segment.path.display(), size.offset_of(lsn)),
            None => format!("segment {}", size.file_name(self.timeline_at(lsn), size.segment_of(lsn))),
        }
    }

    /// Reads whole pages from the page at `from` on, as far as its segment has them. 0: there is nothing.
    pub fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, WalError> {
        let size = self.format.segment_size;
        let number = size.segment_of(from);
        let Some(segment) = self.segments.get(&number) else { return Ok(0) };
        let failed = |error| WalError::Io(segment.path.clone(), error);
        let mut open = self.open.borrow_mut();
        if open.as_ref().is_none_or(|(open, _)| *open != number) {
            *open = Some((number, File::open(&segment.path).map_err(failed)?));
        }
        let (_, file) = open.as_ref().expect("just opened");
        let offset = size.offset_of(from);
        let got = read_up_to(file, slices, offset, (size.bytes() - offset) as usize).map_err(failed)?;
        Ok(got - got % XLOG_BLCKSZ)
    }
}

/// The segments and the history files in a directory.
fn list(directory: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), WalError> {
    let failed = |error| WalError::Io(directory.to_owned(), error);
    let (mut segments, mut histories) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if is_segment_name(name.strip_suffix(".partial").unwrap_or(name)) {
            segments.push(entry.path());
        } else if name.len() == 16 && name.ends_with(".history") {
            histories.push(entry.path());
        }
    }
    segments.sort();
    Ok((segments, histories))
}

/// `IsXLogFileName` (`access/xlog_internal.h`).
fn is_segment_name(name: &str) -> bool {
    name.len() == 24 && name.bytes().all(|byte| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte))
}

/// Why a directory has no WAL for us.
fn no_segments(directory: &Path) -> WalError {
    let names = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let packed =
        names.filter(|path| path.extension().is_some_and(|ending| PACKED.iter().any(|known| ending == *known)));
    match packed.min() {
        Some(path) => WalError::Packed(path),
        None => WalError::NoSegments(directory.to_owned()),
    }
}

/// The version and segment size that a file's first page states; `None` if it states none, as a file that was made
/// ahead of its use.
fn read_format(path: &Path) -> Result<Option<WalFormat>, WalError> {
    let failed = |error| WalError::Io(path.to_owned(), error);
    let file = File::open(path).map_err(failed)?;
    let mut page = [0; XLOG_BLCKSZ];
    let got = read_up_to(&file, &mut [IoSliceMut::new(&mut page)], 0, XLOG_BLCKSZ).map_err(failed)?;
    let Some(header) = WalPageHeader::parse(&page[..got]) else { return Ok(None) };
    let Some(long) = header.long else { return Ok(None) };
    let Some(segment_size) = SegmentSize::new(long.segment_size) else { return Ok(None) };
    match Major::from_wal_magic(header.magic) {
        Some(major) => Ok(Some(WalFormat { major, segment_size, system_identifier: Some(long.system_identifier) })),
        None => Err(WalError::Version(path.to_owned(), header.magic)),
    }
}

fn read_history(path: &Path, timeline: TimelineId) -> Result<TimelineHistory, WalError> {
    let text = fs::read(path).map_err(|error| WalError::Io(path.to_owned(), error))?;
    TimelineHistory::parse(timeline, &String::from_utf8_lossy(&text))
        .map_err(|error| WalError::History(path.to_owned(), error))
}
