//! What a place of WAL files can do. A driver knows files by their names; which of them a position is in, and on which
//! timeline, is decided in one place for all drivers ([`crate::source`]).

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use walrider_layout::TimelineId;

use crate::error::StoreError;
use crate::restore::Refusal;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The file's name, as in `pg_wal`.
    pub name: &'a str,
    /// The oldest segment that recovery needs: an archive may remove those before it (`%r`).
    pub oldest: &'a str,
}

/// A file that was found.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: File,
    /// Where it is; of one that was fetched, the name that the archive has for it.
    pub path: PathBuf,
    /// It was fetched: it has no name to be opened by again, and its space is free once it is closed.
    pub fetched: bool,
}

/// What came of a request.
#[derive(Debug)]
pub enum Answer {
    /// The file.
    There(Opened),
    /// There is no such file; or it was not delivered, and why, which need not mean that there is none.
    Missing(Option<Refusal>),
}

/// What a place has, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Segments, sorted; also those that end in `.partial`.
    pub segments: Vec<String>,
    /// Timelines that have a history file.
    pub histories: Vec<TimelineId>,
}

/// A place of WAL files.
pub trait Driver: Send + Sync {
    /// Looks for a file.
    ///
    /// # Errors
    /// When it is there and cannot be opened, or when looking failed in a way that trying again does not cure.
    fn get(&self, request: &Request<'_>) -> Result<Answer, StoreError>;

    /// What is there; `None`: it cannot tell.
    ///
    /// # Errors
    /// When it cannot be read.
    fn list(&self) -> Result<Option<Listing>, StoreError> {
        Ok(None)
    }

    /// The directory that this is, where files come, grow and go by themselves.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Where asking takes its time: what is worth to know then.
    fn remote(&self) -> Option<&dyn Remote> {
        None
    }
}

/// Bytes that are free for others than root where a directory lies; `None` if the system does not say.
pub fn free_bytes(directory: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(directory).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

/// A place that files are fetched from: it is asked for segments ahead of who reads them, from several threads.
pub trait Remote {
    /// How many requests are worth making at once; at least 1.
    fn jobs(&self) -> usize;

    /// Free bytes where files are put; `None`: nobody can tell.
    fn free_bytes(&self) -> Option<u64>;

    /// The segment that was delivered last.
    fn delivered(&self) -> Option<String>;

    /// What it was asked for last it could not be asked, and it was taken for missing.
    fn is_unsure(&self) -> bool {
        false
    }

    /// What it has cost so far.
    fn stats(&self) -> FetchStats;

    /// Ends the requests that are under way, with an error, and lets no other begin.
    fn stop(&self);
}

/// What fetching cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct FetchStats {
    /// Most requests at once.
    pub jobs: usize,
    /// One failed beside others and not alone: since then they run one at a time.
    pub alone: bool,
    /// WAL segments that were delivered.
    pub segments: u64,
    /// How long requests took, added up over all that ran side by side.
    pub commands: Duration,
    /// How long a reader had to wait for a segment.
    pub waited: Duration,
}
