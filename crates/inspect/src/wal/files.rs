//! Segment files by number: those of a directory that belong to its newest timeline's history, or the files named.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use walrider_datadir::DataDirError;
use walrider_datadir::wal_file::read_up_to;
use walrider_layout::history::{TimelineHistory, history_file_name};
use walrider_layout::wal::{SegmentSize, WalPageHeader};
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ};
use walrider_store::StoreError;
use walrider_store::directory::{Directory, PARTIAL, is_packed};
use walrider_store::driver::{Driver, Listing};
use walrider_store::read::ReadWal;
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
    open: Mutex<Option<(u64, File)>>,
}

impl WalFiles {
    /// Finds the WAL in one directory, or in the files named.
    pub fn find(sources: &[PathBuf]) -> Result<WalFiles, WalError> {
        let (files, histories) = match sources {
            [directory] if directory.is_dir() => {
                let Listing { segments, histories } = Directory::new(directory).list()?.unwrap_or_default();
                (segments.iter().map(|name| directory.join(name)).collect(), Some(histories))
            }
            files => (files.to_vec(), None),
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
            let (whole, partial) = name.strip_suffix(PARTIAL).map_or((&*name, false), |whole| (whole, true));
            match size.parse_file_name(whole) {
                Some((timeline, segment)) => all.push((segment, partial, Segment { path, timeline })),
                None => return Err(WalError::NotASegmentName(path, size.bytes())),
            }
        }
        let newest = all.iter().map(|(_, _, segment)| segment.timeline).max().expect("not empty");
        let history = match histories {
            Some(histories) if histories.contains(&newest) => {
                Some(read_history(&sources[0].join(history_file_name(newest)), newest)?)
            }
            // Without a history file a directory's newest timeline stands alone; files that are named all count.
            Some(_) => Some(TimelineHistory::alone(newest)),
            None => None,
        };
        if let Some(history) = &history {
            all.retain(|(number, _, segment)| {
                history.of_segment(*number, size).any(|entry| entry.timeline == segment.timeline)
            });
        }
        // Of several files of one segment the newest timeline's counts; a `.partial` one only if there is no other. (Recovery also
        // takes a `.partial` one that was written to since the other, which may be a copy of it.)
        all.sort_by_key(|(number, partial, segment)| (*number, *partial, std::cmp::Reverse(segment.timeline)));
        let mut segments = BTreeMap::new();
        for (number, _, segment) in all {
            segments.entry(number).or_insert(segment);
        }
        if segments.is_empty() {
            return Err(WalError::NoSegments(sources[0].clone()));
        }
        Ok(WalFiles { format, segments, open: Mutex::default() })
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
}

impl ReadWal for WalFiles {
    /// Where no file holds `lsn`, that of the last one.
    fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        let number = self.format.segment_size.segment_of(lsn);
        let segment = self.segments.get(&number).or_else(|| self.segments.values().next_back());
        segment.expect("not empty").timeline
    }

    fn describe(&self, lsn: Lsn) -> String {
        let size = self.format.segment_size;
        match self.segments.get(&size.segment_of(lsn)) {
            Some(segment) => format!("file \"{}\", offset {}", segment.path.display(), size.offset_of(lsn)),
            None => format!("segment {}", size.file_name(self.timeline_at(lsn), size.segment_of(lsn))),
        }
    }

    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, StoreError> {
        let size = self.format.segment_size;
        let number = size.segment_of(from);
        let Some(segment) = self.segments.get(&number) else { return Ok(0) };
        let failed = |operation| move |error| DataDirError::io(operation, &segment.path, error);
        let mut open = self.open.lock().expect("no panic while locked");
        if open.as_ref().is_none_or(|(open, _)| *open != number) {
            *open = Some((number, File::open(&segment.path).map_err(failed("open"))?));
        }
        let (_, file) = open.as_ref().expect("just opened");
        let offset = size.offset_of(from);
        let got = read_up_to(file, slices, offset, (size.bytes() - offset) as usize).map_err(failed("read"))?;
        Ok(got - got % XLOG_BLCKSZ)
    }

    fn has_segment(&self, lsn: Lsn) -> Result<bool, StoreError> {
        Ok(self.segments.contains_key(&self.format.segment_size.segment_of(lsn)))
    }
}

/// Why a directory has no WAL for us.
fn no_segments(directory: &Path) -> WalError {
    let names = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    match names.filter(|path| is_packed(path)).min() {
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
