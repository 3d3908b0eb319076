//! Which file a segment or a timeline's history is in (`XLogFileReadAnyTLI` in `access/transam/xlogrecovery.c`,
//! PostgreSQL 18).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

use walrider_datadir::DataDirError;
use walrider_datadir::descriptors::shares;
use walrider_datadir::held::shown;
use walrider_layout::history::{TimelineEntry, TimelineHistory, history_file_name};
use walrider_layout::wal::{SegmentSize, page_of};
use walrider_layout::{Lsn, TimelineId};

use crate::error::ReplayError;
use crate::restore::{Fetched, Refusal, Request, Runner};
use crate::source::{PACKED, Store};
use crate::upstream::Upstream;

/// Longest history file that is read: a line for each of ten thousand promotions.
const MAX_HISTORY_BYTES: u64 = 1 << 20;

/// A segment's file.
#[derive(Debug)]
pub struct Segment {
    /// `None` where too many files are open: it is opened again.
    file: Mutex<Option<Arc<File>>>,
    /// Where it is; of one that was fetched, the name that the archive has for it.
    pub path: PathBuf,
    pub timeline: TimelineId,
    /// The timeline was left on the page that begins here: what the file holds from there on is another history.
    pub limit: Option<Lsn>,
    /// A command delivered it.
    pub fetched: bool,
}

/// What was found of a segment.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its file.
    pub segment: Option<Arc<Segment>>,
    /// What `restore_command` said, if it was asked, and did not deliver the segment on any timeline.
    pub refusal: Option<Refusal>,
}

/// An open file.
struct Opened {
    file: File,
    path: PathBuf,
    fetched: bool,
}

/// Looks for files in all places, in the order in which they are tried.
pub struct Finder {
    pub places: Vec<Store>,
    pub size: SegmentSize,
    pub runner: Runner,
    /// The archive is still written: a segment that is too short is not complete yet, and not an error.
    pub growing: bool,
    /// Who brings WAL into `pg_wal`, the last of the places.
    pub upstream: Option<Arc<dyn Upstream>>,
    history: RwLock<Arc<TimelineHistory>>,
    /// Segments in directories that were opened, oldest first.
    kept: Mutex<VecDeque<Weak<Segment>>>,
    /// Where the last restartpoint begins: `%r`, what the archive must keep.
    restartpoint: AtomicU64,
}

impl Finder {
    /// Looks in `places`, for WAL of the timelines in `history`.
    pub fn new(places: Vec<Store>, size: SegmentSize, history: TimelineHistory) -> Finder {
        Finder {
            places,
            size,
            runner: Runner::new(size, 1),
            growing: false,
            upstream: None,
            history: RwLock::new(Arc::new(history)),
            kept: Mutex::default(),
            restartpoint: AtomicU64::new(0),
        }
    }

    /// The timelines that are read.
    pub fn history(&self) -> Arc<TimelineHistory> {
        self.history.read().expect("no panic while locked").clone()
    }

    /// Replaces them.
    pub fn set_history(&self, history: TimelineHistory) {
        *self.history.write().expect("no panic while locked") = Arc::new(history);
    }

    /// Recovery would now begin at `redo`.
    pub fn note_restartpoint(&self, redo: Lsn) {
        self.restartpoint.store(redo.0, Ordering::Relaxed);
    }

    /// Name of the segment where recovery would begin now.
    pub fn oldest(&self) -> String {
        let restartpoint = Lsn(self.restartpoint.load(Ordering::Relaxed));
        self.size.file_name(self.history().timeline_at(restartpoint), self.size.segment_of(restartpoint))
    }

    /// The places where segments are looked for now.
    fn places(&self) -> &[Store] {
        match &self.upstream {
            Some(upstream) if !upstream.uses_archives() => &self.places[self.places.len() - 1..],
            _ => &self.places,
        }
    }

    /// Whether looking for a segment means to run a command now.
    pub fn runs_commands_now(&self) -> bool {
        self.places().iter().any(|place| matches!(place, Store::RestoreCommand { .. }))
    }

    /// The command among the places, and the data directory that it runs in.
    pub fn command(&self) -> Option<(&str, &Path)> {
        self.places.iter().find_map(|place| match place {
            Store::RestoreCommand { command, data_dir } => Some((&**command, &**data_dir)),
            Store::Directory(_) => None,
        })
    }

    /// Free bytes where the command puts files; `None`: there is no command, or nobody can tell.
    pub fn free_bytes(&self) -> Option<u64> {
        let found = rustix::fs::statvfs(self.command()?.1.join("pg_wal")).ok()?;
        Some(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Says that the disk is full, if it has no room for a segment: then commands fail.
    pub fn full_disk(&self) -> Option<String> {
        let free = self.free_bytes().filter(|&free| free < self.size.bytes())?;
        Some(format!("only {free} bytes are free for it in pg_wal"))
    }

    /// The timeline of the last byte of a segment.
    pub fn timeline_of(&self, segment: u64) -> TimelineId {
        self.history().timeline_at(Lsn(self.size.start_of(segment + 1).0 - 1))
    }

    /// Path and contents of a timeline's history file, if it has one.
    pub fn history_file(&self, timeline: TimelineId) -> Result<Option<(PathBuf, Vec<u8>)>, ReplayError> {
        if timeline <= TimelineId(1) {
            return Ok(None);
        }
        let name = history_file_name(timeline);
        for place in &self.places {
            let Some(Opened { file, path, .. }) = self.find(place, &name, &mut None)? else { continue };
            let mut bytes = Vec::new();
            io::Read::read_to_end(&mut io::Read::take(file, MAX_HISTORY_BYTES), &mut bytes)
                .map_err(|error| DataDirError::io("read", &path, error))?;
            return Ok(Some((path, bytes)));
        }
        Ok(None)
    }

    /// Finds a file in a place. `refusal`: what a command said that did not deliver it.
    fn find(&self, place: &Store, name: &str, refusal: &mut Option<Refusal>) -> Result<Option<Opened>, ReplayError> {
        match place {
            Store::Directory(directory) => {
                let path = directory.join(name);
                match File::open(&path) {
                    Ok(file) => Ok(Some(Opened { file, path, fetched: false })),
                    Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(DataDirError::io("open", path, error).into()),
                }
            }
            Store::RestoreCommand { command, data_dir } => match self.fetch(command, data_dir, name)? {
                Fetched::There(file) => Ok(Some(Opened { file, path: name.into(), fetched: true })),
                Fetched::Refused(why) => {
                    // Of several timelines, the newest is the one that matters.
                    refusal.get_or_insert(why);
                    Ok(None)
                }
            },
        }
    }

    fn fetch(&self, command: &str, data_dir: &Path, name: &str) -> Result<Fetched, ReplayError> {
        self.runner.run(&Request { command, data_dir, name, oldest: &self.oldest(), growing: self.growing })
    }

    /// Asks the command for a file, only to see whether it delivers that; what it says if it does not.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn refuses(&self, name: &str) -> Result<Option<Refusal>, ReplayError> {
        let Some((command, data_dir)) = self.command() else { return Ok(None) };
        match self.fetch(command, data_dir, name)? {
            Fetched::There(_) => Ok(None),
            Fetched::Refused(refusal) => Ok(Some(refusal)),
        }
    }

    /// Finds the file of a segment: newest timeline first, each in all places.
    ///
    /// Of the timeline that others branched off from, within this segment, only the pages before that count: the branch
    /// has the rest in a file of its own, which may be yet to come.
    pub fn find_segment(&self, segment: u64) -> Result<Found, ReplayError> {
        let history = self.history();
        let candidates: Vec<&TimelineEntry> = history.of_segment(segment, self.size).collect();
        let mut refusal = None;
        for entry in &candidates {
            let Some(Opened { file, path, fetched }) = self.find_on(entry.timeline, segment, &mut refusal)? else {
                continue;
            };
            let limit = entry.end.map(page_of);
            let file = Mutex::new(Some(Arc::new(file)));
            let segment = Arc::new(Segment { file, path, timeline: entry.timeline, limit, fetched });
            self.keep(&segment);
            return Ok(Found { segment: Some(segment), refusal: refusal.filter(|_| !fetched) });
        }
        self.refuse_packed(&candidates, segment)?;
        Ok(Found { segment: None, refusal })
    }

    /// Counts a file that was opened. If there are too many, the oldest is closed: WAL is read from one end to the other. What was
    /// fetched has no name to be opened by; there is no more of it than is fetched ahead.
    fn keep(&self, segment: &Arc<Segment>) {
        if segment.fetched {
            return;
        }
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
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(&self, segment: &Arc<Segment>) -> Result<Option<Arc<File>>, ReplayError> {
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

    /// Finds the file of a segment on one timeline; a `.partial` one if there is no other, or if it has been written to
    /// since the other, which may be the copy that we left for PostgreSQL.
    fn find_on(
        &self,
        timeline: TimelineId,
        segment: u64,
        refusal: &mut Option<Refusal>,
    ) -> Result<Option<Opened>, ReplayError> {
        let name = self.size.file_name(timeline, segment);
        let mut whole = None;
        for place in self.places() {
            whole = self.find(place, &name, refusal)?;
            if whole.is_some() {
                break;
            }
        }
        if whole.as_ref().is_some_and(|whole| whole.fetched) {
            return Ok(whole);
        }
        let modified = |Opened { file, path, .. }: &Opened| {
            let time = file.metadata().and_then(|metadata| metadata.modified());
            time.map_err(|error| ReplayError::from(DataDirError::io("stat", path, error)))
        };
        for place in self.places().iter().filter(|place| matches!(place, Store::Directory(_))) {
            let Some(partial) = self.find(place, &format!("{name}.partial"), &mut None)? else { continue };
            match &whole {
                Some(whole) if modified(&partial)? <= modified(whole)? => {}
                _ => return Ok(Some(partial)),
            }
        }
        Ok(whole)
    }

    fn refuse_packed(&self, timelines: &[&TimelineEntry], segment: u64) -> Result<(), ReplayError> {
        for place in &self.places {
            let Store::Directory(directory) = place else { continue };
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
}
