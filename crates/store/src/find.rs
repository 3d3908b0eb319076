//! Which file a segment or a timeline's history is in (`XLogFileReadAnyTLI` in `access/transam/xlogrecovery.c`,
//! PostgreSQL 18).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

use walrider_datadir::DataDirError;
use walrider_datadir::descriptors::shares;
use walrider_datadir::held::shown;
use walrider_layout::history::{MAX_HISTORY_BYTES, TimelineEntry, TimelineHistory, history_file_name};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::directory::{PARTIAL, packed};
use crate::driver::{Answer, Driver, Opened, Remote, Request};
use crate::error::StoreError;
use crate::partial::has_more;
use crate::restore::Refusal;
use crate::source::{Incoming, Kept};

/// A segment's file.
#[derive(Debug)]
pub struct Segment {
    /// `None` where too many files are open: it is opened again.
    file: Mutex<Option<Arc<File>>>,
    /// Where it is; of one that was fetched, the name that the archive has for it.
    pub path: PathBuf,
    pub timeline: TimelineId,
    /// The timeline was left there: what the file holds from there on is another history.
    pub limit: Option<Lsn>,
    /// It was fetched, and has no name to be opened by again.
    pub fetched: bool,
}

/// What was found of a segment.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its file.
    pub segment: Option<Arc<Segment>>,
    /// What `restore_command` said, if it was asked, and did not deliver the segment on any timeline, or on none that branches off within it.
    pub refusal: Option<Refusal>,
}

/// A file, and the place where it was found.
type FoundIn<'a> = (Opened, &'a Arc<dyn Driver>);

/// Looks for files in all places, in the order in which they are tried.
pub struct Finder {
    pub places: Vec<Arc<dyn Driver>>,
    pub size: SegmentSize,
    /// Who brings WAL into `pg_wal`, the last of the places.
    pub incoming: Option<Arc<dyn Incoming>>,
    history: RwLock<Arc<TimelineHistory>>,
    /// Segments in directories that were opened, oldest first.
    kept: Mutex<VecDeque<Weak<Segment>>>,
    /// Where the last restartpoint begins: `%r`, what the archive must keep.
    restartpoint: AtomicU64,
}

impl Finder {
    /// Looks in `places`, for WAL of the timelines in `history`.
    pub fn new(places: Vec<Arc<dyn Driver>>, size: SegmentSize, history: TimelineHistory) -> Finder {
        Finder {
            places,
            size,
            incoming: None,
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

    /// The places where a segment is looked for now.
    fn places(&self, segment: u64) -> &[Arc<dyn Driver>] {
        let streams_from = self.incoming.as_ref().and_then(|incoming| incoming.streams_from());
        match streams_from {
            Some(from) if self.size.segment_of(from) <= segment => &self.places[self.places.len() - 1..],
            _ => &self.places,
        }
    }

    /// Whether looking for a segment takes its time now.
    pub fn fetches(&self, segment: u64) -> bool {
        self.places(segment).iter().any(|place| place.remote().is_some())
    }

    /// The place that files are fetched from, if one of them is.
    pub fn remote(&self) -> Option<&dyn Remote> {
        self.places.iter().find_map(|place| place.remote())
    }

    /// Says that the disk is full, if it has no room for a segment: then commands fail.
    pub fn full_disk(&self) -> Option<String> {
        let free = self.remote()?.free_bytes().filter(|&free| free < self.size.bytes())?;
        Some(format!("only {free} bytes are free for it in pg_wal"))
    }

    /// The timeline of the last byte of a segment.
    pub fn timeline_of(&self, segment: u64) -> TimelineId {
        self.history().timeline_at(Lsn(self.size.start_of(segment + 1).0 - 1))
    }

    /// Path and contents of a timeline's history file, if it has one.
    pub fn history_file(&self, timeline: TimelineId) -> Result<Option<(PathBuf, Vec<u8>)>, StoreError> {
        if timeline <= TimelineId(1) {
            return Ok(None);
        }
        let name = history_file_name(timeline);
        for place in &self.places {
            let Some(Opened { file, path, .. }) = self.find(&**place, &name, &mut None)? else { continue };
            let mut bytes = Vec::new();
            file.take(MAX_HISTORY_BYTES + 1)
                .read_to_end(&mut bytes)
                .map_err(|error| DataDirError::io("read", &path, error))?;
            if bytes.len() as u64 > MAX_HISTORY_BYTES {
                let reason = format!("it has more than {MAX_HISTORY_BYTES} bytes, and is no timeline history");
                return Err(DataDirError::corrupt(path, reason).into());
            }
            return Ok(Some((path, bytes)));
        }
        Ok(None)
    }

    /// Finds a file in a place. `refusal`: what was said where it was not delivered.
    fn find(
        &self,
        place: &dyn Driver,
        name: &str,
        refusal: &mut Option<Refusal>,
    ) -> Result<Option<Opened>, StoreError> {
        match place.get(&Request { name, oldest: &self.oldest() })? {
            Answer::There(opened) => Ok(Some(opened)),
            Answer::Missing(why) => {
                // Of several timelines, the newest is the one that matters.
                if refusal.is_none() {
                    *refusal = why;
                }
                Ok(None)
            }
        }
    }

    /// Fetches a file only to see whether it is delivered; what is said if it is not. `None`: who is asked for it answers.
    ///
    /// # Errors
    /// As [`Driver::get`].
    pub fn refuses(&self, name: &str) -> Result<Option<Refusal>, StoreError> {
        let Some(place) = self.places.iter().find(|place| place.remote().is_some()) else { return Ok(None) };
        let mut refusal = None;
        self.find(&**place, name, &mut refusal)?;
        Ok(refusal)
    }

    /// Finds the file of a segment: newest timeline first, each in all places.
    ///
    /// Of the timeline that others branched off from, within this segment, only what is before that counts: the branch has the
    /// rest in a file of its own, which may be yet to come.
    pub fn find_segment(&self, segment: u64) -> Result<Found, StoreError> {
        let history = self.history();
        let candidates: Vec<&TimelineEntry> = history.of_segment(segment, self.size).collect();
        let mut refusal = None;
        for entry in &candidates {
            let Some(Opened { file, path, fetched }) = self.find_on(entry.timeline, segment, &mut refusal)? else {
                continue;
            };
            let limit = entry.end;
            let file = Mutex::new(Some(Arc::new(file)));
            let segment = Arc::new(Segment { file, path, timeline: entry.timeline, limit, fetched });
            self.keep(&segment);
            // Where others branched off from it, it is the newer file that may be there after all.
            return Ok(Found { segment: Some(segment), refusal: refusal.filter(|_| !fetched || limit.is_some()) });
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
    pub fn open(&self, segment: &Arc<Segment>) -> Result<Option<Arc<File>>, StoreError> {
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

    /// Finds the file of a segment on one timeline. One of an archive is kept in `pg_wal` where something brings WAL there, and then read there.
    fn find_on(
        &self,
        timeline: TimelineId,
        segment: u64,
        refusal: &mut Option<Refusal>,
    ) -> Result<Option<Opened>, StoreError> {
        let name = self.size.file_name(timeline, segment);
        let Some((found, place)) = self.look(&name, segment, refusal)? else { return Ok(None) };
        match (&self.incoming, self.places.last()) {
            (Some(incoming), Some(pg_wal)) if !Arc::ptr_eq(place, pg_wal) => {
                let complete = found.path.extension().is_none_or(|extension| extension != &PARTIAL[1..]);
                match incoming.keep_restored(&name, &found.file, complete)? {
                    Kept::No => Ok(Some(found)),
                    Kept::InPgWal => {
                        let here = self.find(&**pg_wal, &name, &mut None)?;
                        Ok(here.map(|here| Opened { fetched: found.fetched, ..here }))
                    }
                }
            }
            _ => Ok(Some(found)),
        }
    }

    /// Finds a segment, and where; a `.partial` one if there is no other, or if it has more than the other in `pg_wal`, which may be the copy that we
    /// left for PostgreSQL.
    fn look(&self, name: &str, segment: u64, refusal: &mut Option<Refusal>) -> Result<Option<FoundIn<'_>>, StoreError> {
        let whole = self.look_for(name, segment, &|_| true, refusal)?;
        if whole.as_ref().is_some_and(|(whole, _)| whole.fetched) {
            return Ok(whole);
        }
        let has_more = |partial: &Opened, whole: &Opened| {
            has_more(&partial.file, &whole.file, self.size.start_of(segment), self.size)
                .map_err(|error| StoreError::from(DataDirError::io("read file", &partial.path, error)))
        };
        let is_directory = |place: &dyn Driver| place.remote().is_none();
        for place in self.places(segment).iter().filter(|place| is_directory(&***place)) {
            let Some(partial) = self.find(&**place, &format!("{name}{PARTIAL}"), &mut None)? else { continue };
            // What is kept in pg_wal is as old as the copy: who keeps it looks which has more.
            let is_pg_wal = |place: &Arc<dyn Driver>| self.places.last().is_some_and(|last| Arc::ptr_eq(last, place));
            let is_kept = |whole: &FoundIn<'_>| self.incoming.is_some() && is_pg_wal(whole.1) && !is_pg_wal(place);
            match &whole {
                // That of an archive has all: one that was left by a promotion ends before it (`XLogArchivePartial`).
                Some(whole) if !is_pg_wal(whole.1) => {}
                Some(whole) if !is_kept(whole) && !has_more(&partial, &whole.0)? => {}
                _ => return Ok(Some((partial, place))),
            }
        }
        // It may have got its final name between the two looks.
        if whole.is_none() {
            return self.look_for(name, segment, &is_directory, refusal);
        }
        Ok(whole)
    }

    /// Finds a segment under its final name, in the places that `which` picks.
    fn look_for(
        &self,
        name: &str,
        segment: u64,
        which: &dyn Fn(&dyn Driver) -> bool,
        refusal: &mut Option<Refusal>,
    ) -> Result<Option<FoundIn<'_>>, StoreError> {
        for place in self.places(segment).iter().filter(|place| which(&***place)) {
            if let Some(found) = self.find(&**place, name, refusal)? {
                return Ok(Some((found, place)));
            }
        }
        Ok(None)
    }

    fn refuse_packed(&self, timelines: &[&TimelineEntry], segment: u64) -> Result<(), StoreError> {
        for directory in self.places.iter().filter_map(|place| place.directory()) {
            for entry in timelines {
                if let Some(name) = packed(directory, &self.size.file_name(entry.timeline, segment)) {
                    return Err(StoreError::Refused(format!(
                        "\"{}/{name}\" is compressed: use a restore_command that unpacks it",
                        shown(directory).display()
                    )));
                }
            }
        }
        Ok(())
    }
}
