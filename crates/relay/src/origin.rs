//! What is served: the WAL of a spool's directory, by timeline and position.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use walrider_layout::history::{InvalidHistory, MAX_HISTORY_BYTES, TimelineHistory, history_file_name};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_spool::Spool;

use crate::backup::Replica;

/// Whose WAL it is, as the primary told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster's.
    pub system_identifier: u64,
    /// `server_version`, as in "18.6".
    pub server_version: String,
}

/// Where a timeline ends that is streamed, and which one follows.
pub type Left = (Lsn, TimelineId);

/// WAL of a spool, for those downstream.
pub struct Origin {
    identity: Identity,
    directory: PathBuf,
    size: SegmentSize,
    spool: Arc<Spool>,
    /// Segments that nobody needs are renamed and written again.
    recycles: bool,
    /// The furthest end on the newest timeline: a new connection to the primary has it written once more, from the beginning of a
    /// segment, but what is there stays the same.
    end: Mutex<(TimelineId, Lsn)>,
    replica: Option<Arc<dyn Replica>>,
}

/// Why some WAL cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OriginError {
    /// A file of the directory.
    #[error("could not {operation} \"{path}\": {source}")]
    Io {
        /// What was tried, as a verb.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A history file says what cannot be.
    #[error("invalid history file \"{path}\": {source}")]
    History {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: InvalidHistory,
    },
    /// A segment is shorter than a segment.
    #[error(
        "WAL file \"{path}\" has {len} bytes instead of {size}: remove it where the primary still has it, or put an intact copy there"
    )]
    Short {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The size of segments in bytes.
        size: u64,
    },
    /// The segment is gone, or never was here.
    #[error("requested WAL segment {0} has already been removed")]
    Removed(String),
}

impl Origin {
    /// The WAL of `spool`, which lies in `directory`. `end` is how far it is known to be good before the primary is connected: the end of
    /// the complete segments.
    /// `recycles`: segments that nobody needs are not removed, but renamed and written again.
    pub fn new(
        identity: Identity,
        directory: &Path,
        spool: Arc<Spool>,
        recycles: bool,
        end: (TimelineId, Lsn),
    ) -> Origin {
        let size = spool.segment_size();
        let directory = directory.to_owned();
        Origin { identity, directory, size, spool, recycles, end: Mutex::new(end), replica: None }
    }

    /// There is a data directory, too, of which base backups are served. The WAL is in its `pg_wal`.
    pub fn with_replica(self, replica: Arc<dyn Replica>) -> Origin {
        Origin { replica: Some(replica), ..self }
    }

    /// The data directory that the WAL is replayed into, if there is one.
    pub fn replica(&self) -> Option<&dyn Replica> {
        self.replica.as_deref()
    }

    /// The directory of the WAL.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether a file that is open may get other WAL.
    pub fn recycles(&self) -> bool {
        self.recycles
    }

    /// All of that is good, too: it was replayed. Whether that is news.
    pub fn reaches(&self, timeline: TimelineId, end: Lsn) -> bool {
        let before = self.end();
        let mut known = self.end.lock().expect("no panic while locked");
        let is_news = timeline > before.0 || (timeline == before.0 && end > before.1);
        if is_news {
            *known = (timeline, end).max(*known);
        }
        is_news
    }

    /// Whose WAL it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The spool.
    pub fn spool(&self) -> &Arc<Spool> {
        &self.spool
    }

    /// The size of segments.
    pub fn segment_size(&self) -> SegmentSize {
        self.size
    }

    /// The newest timeline, and the end of what may be served of it: all of that is durable on the primary.
    pub fn end(&self) -> (TimelineId, Lsn) {
        let (timeline, written) = self.spool.timeline_and_written();
        let mut end = self.end.lock().expect("no panic while locked");
        if timeline > end.0 || (timeline == end.0 && written > end.1) {
            *end = (timeline, written);
        }
        *end
    }

    /// A timeline's history file; `None` if there is none here.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn history_file(&self, timeline: TimelineId) -> Result<Option<Vec<u8>>, OriginError> {
        let path = self.directory.join(history_file_name(timeline));
        walrider_datadir::durable::read_file(&path, MAX_HISTORY_BYTES).map_err(|source| OriginError::Io {
            operation: "read file",
            path,
            source: io::Error::other(source),
        })
    }

    /// What led to a timeline. Without a history file, it alone.
    ///
    /// # Errors
    /// The file cannot be read, or is none.
    pub fn history(&self, timeline: TimelineId) -> Result<TimelineHistory, OriginError> {
        match self.history_file(timeline)? {
            None => Ok(TimelineHistory::alone(timeline)),
            Some(text) => TimelineHistory::parse(timeline, &String::from_utf8_lossy(&text)).map_err(|source| {
                OriginError::History { path: self.directory.join(history_file_name(timeline)), source }
            }),
        }
    }

    /// The file of the segment that has `lsn`, on `timeline`; of the segment in which that was `left`, the one of the timeline that follows, which
    /// has both (`WalSndSegmentOpen`, `walsender.c`, PostgreSQL 18), or else that of `timeline`. Replay that has a segment from an archive
    /// may have it of a later timeline, which it has not gone over to yet. Up to where that file has `timeline`, too.
    ///
    /// # Errors
    /// [`OriginError::Removed`], or trouble with the file.
    pub fn open_segment(&self, lsn: Lsn, timeline: TimelineId, left: Option<Left>) -> Result<(File, Lsn), OriginError> {
        let segment = self.size.segment_of(lsn);
        let next = match left {
            Some(left) => Some(left).filter(|(at, _)| self.size.segment_of(*at) == segment),
            None => self.follows_in_segment(timeline, lsn)?,
        };
        let name = |timeline| self.size.file_name(timeline, segment);
        let whole = (self.size.start_of(segment + 1), timeline);
        for (upto, timeline) in next.into_iter().chain([whole]) {
            if let Some(file) = self.open(&name(timeline))? {
                return Ok((file, upto));
            }
        }
        Err(OriginError::Removed(name(timeline)))
    }

    /// A segment's file of this name, or that name while it is not complete.
    fn open(&self, whole: &str) -> Result<Option<File>, OriginError> {
        // Between the first two looks it may get its final name.
        for name in [whole, &format!("{whole}.partial"), whole] {
            let path = self.directory.join(name);
            let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
            match opened {
                Ok((len, _)) if len < self.size.bytes() => {
                    return Err(OriginError::Short { path, len, size: self.size.bytes() });
                }
                Ok((_, file)) => return Ok(Some(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(OriginError::Io { operation: "open file", path, source }),
            }
        }
        Ok(None)
    }

    /// The newest timeline with a history that leaves `timeline` in this segment, behind `lsn`.
    fn follows_in_segment(&self, timeline: TimelineId, lsn: Lsn) -> Result<Option<Left>, OriginError> {
        let (mut found, mut next) = (None, TimelineId(timeline.0.saturating_add(1)));
        while self.history_file(next)?.is_some() {
            let left = self.history(next)?.switch_point(timeline);
            let in_segment = |at: &Lsn| *at > lsn && self.size.segment_of(*at) == self.size.segment_of(lsn);
            found = left.filter(in_segment).map(|at| (at, next)).or(found);
            next = TimelineId(next.0 + 1);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use walrider_spool::{ArchiveStatus, SpoolOptions};

    use super::*;

    /// Found by a review: while replay has a segment of the next timeline from an archive, and has not got to where that begins, more of it was sent
    /// as this timeline's.
    #[test]
    fn a_segment_of_the_next_timeline_has_this_one_up_to_where_that_begins() {
        let dir = tempfile::tempdir().unwrap();
        let size = SegmentSize::new(1 << 20).unwrap();
        for (timeline, fill) in [(1, 1_u8), (2, 2)] {
            let contents = vec![fill; size.bytes() as usize];
            std::fs::write(dir.path().join(size.file_name(TimelineId(timeline), 3)), contents).unwrap();
        }
        std::fs::write(dir.path().join("00000002.history"), "1\t0/304000\tno\n").unwrap();
        let spool = Spool::open(SpoolOptions {
            directory: dir.path().to_owned(),
            segment_size: size,
            archive_status: ArchiveStatus::None,
            partial: false,
            group_access: false,
            max_recycled: 0,
        });
        let identity = Identity { system_identifier: 1, server_version: "18.0".into() };
        let origin = Origin::new(identity, dir.path(), spool.unwrap(), true, (TimelineId(1), Lsn(0x38_0000)));
        let open = |lsn| {
            let (file, upto) = origin.open_segment(Lsn(lsn), TimelineId(1), None).unwrap();
            let mut first = [0];
            file.read_exact_at(&mut first, 0).unwrap();
            (first[0], upto)
        };
        assert_eq!(open(0x30_0000), (2, Lsn(0x30_4000)));
        assert_eq!(open(0x30_4000), (1, Lsn(0x40_0000)));
    }
}
