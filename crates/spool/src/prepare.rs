//! Preparing segments before they are written (`XLogFileInitInternal`, `InstallXLogFileSegment`;
//! `access/transam/xlog.c`, PostgreSQL 18).

use std::io;
use std::sync::Arc;

use walrider_layout::TimelineId;
use walrider_layout::history::{MAX_HISTORY_BYTES, TimelineHistory, history_file_name};

use crate::error::{Result, SpoolError};
use crate::files::{SegmentFile, read_all, write_all_at};
use crate::state::{Preparation, Prepared, SegmentId, Shared};
use crate::stats::count;

/// Name of files in preparation. PostgreSQL removes what begins like this when it starts (`RemoveTempXlogFiles`), and so
/// do we.
pub(crate) const TEMPORARY_PREFIX: &str = "xlogtemp.";

/// Zeros that are written with one call.
const ZEROS: usize = 1 << 20;

/// The temporary file that was made last, and is perhaps not wanted any more. Gone, if it has been used.
#[derive(Default)]
pub(crate) struct Unused(Option<String>);

impl Unused {
    /// Nobody will use it.
    pub fn remove(&mut self, shared: &Shared) {
        remove(shared, self.0.take());
    }
}

/// Prepares a segment, and says so.
pub(crate) fn make_segment(shared: &Shared, id: SegmentId, unused: &mut Unused) {
    unused.remove(shared);
    let outcome = prepare(shared, id);
    let mut state = shared.lock();
    debug_assert!(matches!(state.preparation, Preparation::Working(at) if at == id), "only the preparer ends its work");
    state.preparation = match outcome {
        Ok(prepared) => {
            debug_assert!(prepared.temporary.is_none() || shared.partial, "else its name is durable already");
            unused.0.clone_from(&prepared.temporary);
            Preparation::Ready(prepared)
        }
        Err(error) => Preparation::Failed(error),
    };
    drop(state);
    shared.prepared.notify_all();
}

/// Removes a temporary file. One that stays means nothing, and goes when the directory is next opened.
fn remove(shared: &Shared, temporary: Option<String>) {
    if let Some(name) = temporary {
        let _ = shared.directory.remove(&name);
    }
}

/// Opens the file of a segment, making it first if it is not there. Its length and its name are durable then, but a
/// `.partial` one keeps a temporary name, so that nobody takes it for received.
fn prepare(shared: &Shared, id: SegmentId) -> Result<Prepared> {
    let directory = &*shared.directory;
    let (name, final_name) = shared.names_of(id);
    let exists = |name: &str| match directory.stat(name) {
        Ok(stat) => Ok(stat.is_some()),
        Err(error) => Err(shared.error("stat file", name, error)),
    };
    if shared.partial && !exists(&name)? && exists(&final_name)? {
        // Received again, from some point on; what is before stays.
        directory.rename(&final_name, &name).map_err(|error| shared.error("rename to", &name, error))?;
    }
    if exists(&name)? {
        return existing(shared, id, &name);
    }
    let temporary = format!("{TEMPORARY_PREFIX}walrider.{final_name}");
    let created = create(shared, &temporary).and_then(|file| begin(shared, id, &*file, &temporary).map(|()| file));
    let file = match created {
        Ok(file) => file,
        Err(error) => {
            remove(shared, Some(temporary));
            return Err(error);
        }
    };
    count(&shared.counters.segments_created, 1);
    if shared.partial {
        return Ok(Prepared { id, file, temporary: Some(temporary) });
    }
    {
        let _names = shared.names.lock().expect("no panic while locked");
        if exists(&name)? {
            // An old segment has been recycled to it meanwhile.
            remove(shared, Some(temporary));
            return existing(shared, id, &name);
        }
        if let Err(error) = directory.rename(&temporary, &name) {
            remove(shared, Some(temporary));
            return Err(shared.error("rename to", &name, error));
        }
    }
    shared.sync_directory()?;
    Ok(Prepared { id, file, temporary: None })
}

/// Opens a file that is there: of an earlier run, of PostgreSQL, or recycled. What it has stays; a short one is filled up.
fn existing(shared: &Shared, id: SegmentId, name: &str) -> Result<Prepared> {
    let file = shared.directory.open(name).map_err(|error| shared.error("open file", name, error))?;
    let len = file.size().map_err(|error| shared.error("stat file", name, error))?;
    let segment_size = shared.size.bytes();
    if len > segment_size {
        return Err(SpoolError::TooLong { path: shared.directory.path().join(name), len, segment_size });
    }
    if len < segment_size {
        fill(shared, &*file, len, name)?;
        // Unlike a temporary file it cannot be thrown away and made again.
        file.sync_all().map_err(|error| shared.fail("fsync file", name, error))?;
    }
    shared.sync_directory()?;
    Ok(Prepared { id, file, temporary: None })
}

/// Makes a file of zeros, as long as a segment, durable but for its name.
pub(crate) fn create(shared: &Shared, name: &str) -> Result<Arc<dyn SegmentFile>> {
    let file = shared.directory.create(name).map_err(|error| shared.error("create file", name, error))?;
    fill(shared, &*file, 0, name)?;
    file.sync_all().map_err(|error| shared.error("fsync file", name, error))?;
    Ok(file)
}

/// Writes into the file of a segment what the timelines before have of it, durably. Replay prefers the newest timeline's file, and
/// pages may be as far as the others went, which are of no use from the moment that it has its name. (PostgreSQL does this when
/// it ends recovery, `XLogInitNewTimeline`; a standby that is stopped before the stream has come so far cannot be promoted.)
fn begin(shared: &Shared, (timeline, segment): SegmentId, file: &dyn SegmentFile, name: &str) -> Result<()> {
    if shared.partial || timeline <= TimelineId(1) {
        return Ok(());
    }
    let Some(text) = contents(shared, &history_file_name(timeline), MAX_HISTORY_BYTES as usize)? else { return Ok(()) };
    // Replay says so if it makes no sense.
    let Ok(history) = TimelineHistory::parse(timeline, &String::from_utf8_lossy(&text)) else { return Ok(()) };
    for entry in history.of_segment(segment, shared.size) {
        let Some(left) = entry.end else { continue };
        let len = (left.0 - shared.size.start_of(segment).0).min(shared.size.bytes()) as usize;
        if let Some(bytes) = contents(shared, &shared.size.file_name(entry.timeline, segment), len)? {
            write_all_at(file, &bytes, 0).map_err(|error| shared.error("write to file", name, error))?;
            return file.sync_all().map_err(|error| shared.error("fsync file", name, error));
        }
    }
    Ok(())
}

/// The first bytes of a file, so many at most; `None` if it is not there.
fn contents(shared: &Shared, name: &str, len: usize) -> Result<Option<Vec<u8>>> {
    let file = match shared.directory.open(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| shared.error("open file", name, error))?,
    };
    let mut bytes = vec![0; len];
    let len = read_all(&*file, &mut bytes, 0).map_err(|error| shared.error("read file", name, error))?;
    bytes.truncate(len);
    Ok(Some(bytes))
}

/// Fills a file with zeros from `from` on. The space is then taken, and later only contents need be synced.
fn fill(shared: &Shared, file: &dyn SegmentFile, mut from: u64, name: &str) -> Result<()> {
    let zeros = vec![0; ZEROS];
    while from < shared.size.bytes() {
        if shared.lock().stop {
            return Err(shared.error("write to file", name, io::ErrorKind::Interrupted.into()));
        }
        let more = (shared.size.bytes() - from).min(ZEROS as u64);
        write_all_at(file, &zeros[..more as usize], from)
            .map_err(|error| shared.error("write to file", name, error))?;
        from += more;
    }
    Ok(())
}
