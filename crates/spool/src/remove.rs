//! WAL that is not needed any more (`RemoveOldXlogFiles`, `RemoveXlogFile`; `access/transam/xlog.c`, PostgreSQL 18).

use std::sync::Arc;

use walrider_layout::{Lsn, TimelineId};

use crate::archive_status::forget;
use crate::error::Result;
use crate::spool::Spool;
use crate::state::{SegmentId, Shared};
use crate::stats::count;

/// What became of the segments that were not needed any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Renamed to future segments.
    pub recycled: u64,
    /// Removed.
    pub removed: u64,
    /// Kept, because they are not archived yet.
    pub not_archived: u64,
}

/// Somebody needs WAL from a position on, until this is dropped.
pub struct Hold {
    shared: Arc<Shared>,
    number: u64,
}

impl Hold {
    /// What precedes is not needed any more. A hold does not go back: that may be gone.
    pub fn advance(&self, from: Lsn) {
        let mut holds = self.shared.holds.lock().expect("no panic while locked");
        let held = holds.get_mut(&self.number).expect("there as long as this is");
        *held = from.max(*held);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.shared.holds.lock().expect("no panic while locked").remove(&self.number);
    }
}

impl Spool {
    /// Keeps WAL from `from` on, as far as there is any.
    pub fn hold(&self, from: Lsn) -> Hold {
        let mut holds = self.shared.holds.lock().expect("no panic while locked");
        let number = holds.last_key_value().map_or(0, |(last, _)| last + 1);
        holds.insert(number, from);
        Hold { shared: self.shared.clone(), number }
    }

    /// WAL before `keep_from` is not needed any more by the caller, and goes unless somebody else [holds](Spool::hold) it: whole older segments, on whatever timeline, are renamed to future
    /// segments of `timeline`, as many as may be kept ready, or else removed. What is not flushed, or not yet under its final name, always stays.
    /// Durable on return.
    ///
    /// # Errors
    /// Trouble with files; what was not reached is done at the next call.
    pub fn remove_before(&self, keep_from: Lsn, timeline: TimelineId) -> Result<Removed> {
        let shared = &*self.shared;
        shared.check()?;
        let (written, flushed, filing, writer) = {
            let state = shared.lock();
            (state.written, state.flushed, state.filing, state.writer)
        };
        let held = shared.holds.lock().expect("no panic while locked").values().copied().min();
        // Without a stream, replay goes on out of an archive, and needs nothing of what was received before.
        let is_received = writer || flushed != written;
        let keep = if flushed.is_valid() && is_received { keep_from.min(flushed) } else { keep_from };
        let keep = held.map_or(keep, |held| held.min(keep));
        let keep = shared.size.segment_of(keep).min(filing.unwrap_or(u64::MAX));
        let names = shared.directory.names().map_err(|error| shared.error("read directory", "", error))?;
        let mut old: Vec<(SegmentId, &String)> =
            names.iter().filter_map(|name| shared.segment_of_name(name).map(|id| (id, name))).collect();
        old.retain(|((_, segment), _)| *segment < keep);
        old.sort_by_key(|((timeline, segment), name)| (*segment, *timeline, *name));

        // Recycled ones follow the segment that is written. Without a stream, replay may be ahead of that.
        let first = shared.size.segment_of(written.max(keep_from)) + 1;
        debug_assert!(flushed <= written && keep < first.max(1), "no segment gets the name of one that is needed");
        let recycles = writer && !shared.partial;
        let mut free = first..first.saturating_add(if recycles { shared.max_recycled } else { 0 });
        let mut removed = Removed::default();
        let outcome = old.into_iter().try_for_each(|(id, name)| {
            let whole = shared.size.file_name(id.0, id.1);
            // What a timeline's end has left incomplete is not archived: the next one's first segment has it, too.
            let incomplete = shared.partial && *name != whole;
            let may_remove = || shared.archive_status.may_remove(&*shared.directory, name);
            let may_remove = if incomplete { Ok(true) } else { may_remove() };
            if !may_remove.map_err(|error| shared.error("look at the archive status of", name, error))? {
                removed.not_archived += 1;
                return Ok(());
            }
            if *name == whole && recycle(shared, name, timeline, &mut free)? {
                removed.recycled += 1;
                count(&shared.counters.segments_recycled, 1);
            } else {
                shared.directory.remove(name).map_err(|error| shared.error("remove file", name, error))?;
                removed.removed += 1;
                count(&shared.counters.segments_removed, 1);
            }
            forget(&*shared.directory, name).map_err(|error| shared.error("remove the archive status of", name, error))
        });
        if removed.recycled + removed.removed > 0 {
            shared.sync_directory()?;
        }
        outcome.map(|()| removed)
    }
}

/// Renames a segment to the first free future one (`InstallXLogFileSegment`). Only whole, regular files: a link may lead
/// to an archive.
fn recycle(shared: &Shared, name: &str, timeline: TimelineId, free: &mut std::ops::Range<u64>) -> Result<bool> {
    let directory = &*shared.directory;
    let stat = |name: &str| directory.stat(name).map_err(|error| shared.error("stat file", name, error));
    if free.is_empty() || !stat(name)?.is_some_and(|stat| stat.regular && stat.len == shared.size.bytes()) {
        return Ok(false);
    }
    let _names = shared.names.lock().expect("no panic while locked");
    for segment in free {
        let future = shared.size.file_name(timeline, segment);
        if stat(&future)?.is_none() {
            directory.rename(name, &future).map_err(|error| shared.error("rename to", &future, error))?;
            return Ok(true);
        }
    }
    Ok(false)
}
