//! Segments that replay has from elsewhere (`KeepFileRestoredFromArchive`, `access/transam/xlogarchive.c`, PostgreSQL 18).
//!
//! What has the name of a segment in `pg_wal` is WAL up to where replay stands: others are sent it, it is archived, and after a promotion
//! PostgreSQL takes it for such. Without a stream, it would be what was ready for one: a segment half received, zeros, or an older
//! segment under a new name.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use walrider_layout::TimelineId;

use crate::archive_status::forget;
use crate::error::{Result, SpoolError};
use crate::files::write_all_at;
use crate::prepare::TEMPORARY_PREFIX;
use crate::spool::Spool;
use crate::state::{Preparation, SegmentId, Shared};

/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

impl Spool {
    /// Puts a segment that was found elsewhere in the place of what there is of it, durably. False, and nothing is done: it is not whole yet, or
    /// the stream of just now brings it.
    ///
    /// # Errors
    /// Trouble with files: the segment cannot be read to its end, or not be written. The spool goes on.
    pub fn keep_restored(&self, name: &str, contents: &File) -> Result<bool> {
        let shared = &*self.shared;
        shared.check()?;
        let Some((_, segment)) = shared.size.parse_file_name(name) else {
            return Err(SpoolError::Refused(format!("\"{name}\" is no segment of {} bytes", shared.size.bytes())));
        };
        let len = contents.metadata().map_err(|error| shared.error("stat what was restored for", name, error))?.len();
        if len != shared.size.bytes() {
            return Ok(false);
        }
        let mut state = shared.lock();
        while matches!(state.preparation, Preparation::Working(_)) {
            state = shared.wait(&shared.prepared, state);
        }
        if state.writer && segment >= shared.size.segment_of(state.written) {
            return Ok(false);
        }
        // The next writer waits for this, and has its segments prepared once more.
        state.restoring += 1;
        let number = state.restored;
        state.restored += 1;
        drop(state);
        let kept = keep(shared, name, contents, number);
        shared.lock().restoring -= 1;
        shared.on_flushed.notify_all();
        kept.map(|()| true)
    }
}

fn keep(shared: &Shared, name: &str, contents: &File, number: u64) -> Result<()> {
    let directory = &*shared.directory;
    let temporary = format!("{TEMPORARY_PREFIX}walrider.restored.{number}");
    let copied = copy(shared, contents, name, &temporary).and_then(|()| {
        let _names = shared.names.lock().expect("no panic while locked");
        directory.rename(&temporary, name).map_err(|error| shared.error("rename to", name, error))
    });
    if let Err(error) = copied {
        // One that stays means nothing, and goes when the directory is next opened.
        let _ = directory.remove(&temporary);
        return Err(error);
    }
    shared.sync_directory()?;
    shared.note_complete(name);
    remove_older(shared, name)
}

/// Removes what timelines before have of a segment: this one has all of it that counts.
fn remove_older(shared: &Shared, name: &str) -> Result<()> {
    let Some((timeline, segment)) = shared.segment_of_name(name).filter(|&(timeline, _)| timeline > TimelineId(1))
    else {
        return Ok(());
    };
    let names = shared.directory.names().map_err(|error| shared.error("read directory", "", error))?;
    let is_older = |id: SegmentId| id.1 == segment && id.0 < timeline;
    for older in names.iter().filter(|older| shared.segment_of_name(older).is_some_and(is_older)) {
        shared.directory.remove(older).map_err(|error| shared.error("remove file", older, error))?;
        forget(&*shared.directory, older)
            .map_err(|error| shared.error("remove the archive status of", older, error))?;
    }
    shared.sync_directory()
}

fn copy(shared: &Shared, contents: &File, name: &str, temporary: &str) -> Result<()> {
    let file = shared.directory.create(temporary).map_err(|error| shared.error("create file", temporary, error))?;
    let (mut at, mut piece) = (0, vec![0; PIECE.min(shared.size.bytes() as usize)]);
    while at < shared.size.bytes() {
        let error = |error| SpoolError::io("read restored segment", PathBuf::from(name), error);
        contents.read_exact_at(&mut piece, at).map_err(error)?;
        write_all_at(&*file, &piece, at).map_err(|error| shared.error("write to file", temporary, error))?;
        at += piece.len() as u64;
    }
    file.sync_all().map_err(|error| shared.error("fsync file", temporary, error))
}
