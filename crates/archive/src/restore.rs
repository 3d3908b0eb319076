//! What `restore_command` does (`RestoreArchivedFile` in `access/transam/xlogarchive.c`, PostgreSQL 18).

use std::path::Path;
use std::time::{Duration, Instant};

use walrider_datadir::durable::read_file;
use walrider_layout::bytes::u64_at;
use walrider_layout::control::{CONTROL_FILE, ControlFile};
use walrider_layout::wal::SegmentSize;

use crate::archive::Archive;
use crate::error::Result;
use crate::name::{Kind, WalName};
use crate::spool::{Spool, deliver};

/// How long one waits for a segment that another process fetches, before one fetches it oneself.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often one looks whether it has come.
const INTERVAL: Duration = Duration::from_millis(2);

/// Whose WAL is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The system identifier.
    pub system_identifier: u64,
    /// How long its segments are, where this major's control file can be read.
    pub size: Option<SegmentSize>,
}

impl Cluster {
    /// The one whose `pg_wal` a file is to be restored into; `None`: it is no data directory's.
    pub fn of(to: &Path) -> Option<Cluster> {
        let data_dir = to.parent()?.parent()?;
        let bytes = read_file(&data_dir.join(CONTROL_FILE), 1 << 16).ok()??;
        // The identifier is the first field in every major (`ControlFileData`, `catalog/pg_control.h`).
        let system_identifier = (bytes.len() >= 8).then(|| u64_at(&bytes, 0))?;
        let size = ControlFile::parse(&bytes).ok().map(|control| control.segment_size);
        Some(Cluster { system_identifier, size })
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// The file is there; it had been fetched before.
    Spooled,
    /// The file is there; it was fetched now.
    Fetched,
    /// The archive does not have it.
    Missing,
}

/// What is asked for.
pub struct Request<'a> {
    /// Which file.
    pub name: &'a WalName,
    /// Where it is to be. What is there is replaced.
    pub to: &'a Path,
    /// Whose it has to be, if that is known.
    pub cluster: Option<Cluster>,
    /// Where segments are fetched to ahead.
    pub spool: Option<&'a Spool>,
    /// Starts the process that does so, for segments of this size.
    pub start: &'a dyn Fn(&Spool, SegmentSize),
}

impl Request<'_> {
    /// Fetches the file, or takes it out of the spool. It is whole, but not durable: PostgreSQL makes it so if it keeps it.
    ///
    /// # Errors
    /// As [`Archive::get`]; also when the file cannot be written, or is another cluster's. What is wrong with the spool alone is
    /// none: one can do without it.
    pub fn restore(&self, archive: impl FnOnce() -> Result<Archive>) -> Result<Restored> {
        let spool = self.spool.filter(|_| self.name.kind() == Kind::Segment);
        if let Some(spool) = spool
            && self.take(spool)
        {
            if let Some(size) = self.cluster.and_then(|cluster| cluster.size) {
                self.serve(spool, size);
            }
            return Ok(Restored::Spooled);
        }
        let archive = archive()?;
        let fetched = archive.get(self.name, &mut || {
            // What follows is fetched beside it.
            if let (Some(spool), Some(size)) = (spool, self.cluster.and_then(|cluster| cluster.size)) {
                self.serve(spool, size);
            }
        })?;
        let Some(fetched) = fetched else { return Ok(Restored::Missing) };
        if let Some(cluster) = self.cluster {
            fetched.is_of(cluster.system_identifier, self.name)?;
        }
        deliver(&fetched.contents, self.to)?;
        if let (Some(spool), Some(facts)) = (spool, fetched.facts) {
            self.serve(spool, facts.size);
        }
        Ok(Restored::Fetched)
    }

    /// Takes the file out of the spool, or waits until it comes.
    fn take(&self, spool: &Spool) -> bool {
        if spool.is_there() {
            // It is known what is wanted next, whatever comes of this.
            let _ = spool.note_position(self.name);
        }
        let began = Instant::now();
        while !spool.take(self.name, self.to).unwrap_or(false) {
            if !spool.is_coming(self.name) || began.elapsed() > PATIENCE {
                // It may have come just then.
                return spool.take(self.name, self.to).unwrap_or(false);
            }
            std::thread::sleep(INTERVAL);
        }
        true
    }

    /// Sees to it that what follows is fetched.
    fn serve(&self, spool: &Spool, size: SegmentSize) {
        if !spool.is_served() && spool.make().is_ok() && spool.note_position(self.name).is_ok() {
            (self.start)(spool, size);
        }
    }
}
