//! Segments that replay has from elsewhere (`KeepFileRestoredFromArchive`, `access/transam/xlogarchive.c`, PostgreSQL 18).
//!
//! What has the name of a segment in `pg_wal` is WAL up to where replay stands: others are sent it, it is archived, and after a promotion
//! PostgreSQL takes it for such. Without a stream, it would be what was ready for one: a segment half received, zeros, or an older
//! segment under a new name.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::archive_status::forget;
use crate::error::{Result, SpoolError};
use crate::files::{read_all, write_all_at};
use crate::prepare::TEMPORARY_PREFIX;
use crate::spool::Spool;
use crate::state::{Preparation, Shared};

/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

impl Spool {
    /// Puts a segment that was found elsewhere in the place of what there is of it, durably; one that is not `complete` gets zeros behind its end, and
    /// no mark. False, and nothing is done: it is a complete one that has not all its bytes yet; the stream of just now brings it; or it lacks
    /// what was received of it.
    ///
    /// # Errors
    /// Trouble with files: the segment cannot be read to its end, or not be written. The spool goes on.
    pub fn keep_restored(&self, name: &str, contents: &File, complete: bool) -> Result<bool> {
        let shared = &*self.shared;
        shared.check()?;
        let Some(id) = shared.size.parse_file_name(name) else {
            return Err(SpoolError::Refused(format!("\"{name}\" is no segment of {} bytes", shared.size.bytes())));
        };
        let len = contents.metadata().map_err(|error| shared.error("stat what was restored for", name, error))?.len();
        if len > shared.size.bytes() || (complete && len < shared.size.bytes()) {
            return Ok(false);
        }
        let mut state = shared.lock();
        // Else what it prepares now would be another file than the one that the next writer finds.
        while !state.writer && matches!(state.preparation, Preparation::Working(_)) && state.failed.is_none() {
            state = shared.wait(&shared.prepared, state);
        }
        let segment_written = shared.size.segment_of(state.written);
        if state.writer && id.1 >= segment_written {
            return Ok(false);
        }
        if !state.writer {
            state.preparation = Preparation::Idle;
        }
        let received = if id == (state.timeline, segment_written) { shared.size.offset_of(state.written) } else { 0 };
        // The next writer waits for this.
        state.restoring += 1;
        let number = state.restored;
        state.restored += 1;
        drop(state);
        let kept = match agrees(shared, name, contents, received) {
            Ok(true) => keep(shared, name, contents, complete, number).map(|()| true),
            other => other,
        };
        shared.lock().restoring -= 1;
        shared.on_flushed.notify_all();
        kept
    }

    /// Removes the file of a segment of a timeline that was left, which is of no use, and its marks.
    ///
    /// # Errors
    /// Trouble with files.
    pub fn remove_segment(&self, name: &str) -> Result<()> {
        let shared = &*self.shared;
        shared.directory.remove(name).map_err(|error| shared.error("remove file", name, error))?;
        forget(&*shared.directory, name).map_err(|error| shared.error("remove the archive status of", name, error))?;
        shared.sync_directory()
    }
}

/// Whether the first bytes are those that the file has, so many.
fn agrees(shared: &Shared, name: &str, contents: &File, len: u64) -> Result<bool> {
    if len == 0 {
        return Ok(true);
    }
    let here = shared.directory.open(name).map_err(|error| shared.error("open file", name, error))?;
    let (mut ours, mut theirs) = (vec![0; PIECE], vec![0; PIECE]);
    let mut at = 0;
    while at < len {
        let wanted = PIECE.min((len - at) as usize);
        let ours = &mut ours[..wanted];
        let read = read_all(&*here, ours, at).map_err(|error| shared.error("read file", name, error))?;
        let theirs = &mut theirs[..read];
        if read < wanted || read_up_to(contents, theirs, at, name)? < read || ours != theirs {
            return Ok(false);
        }
        at += wanted as u64;
    }
    Ok(true)
}

/// Reads what there is at a place.
fn read_up_to(contents: &File, mut into: &mut [u8], mut at: u64, name: &str) -> Result<usize> {
    let before = into.len();
    while !into.is_empty() {
        match contents.read_at(into, at) {
            Ok(0) => break,
            Ok(read) => (into, at) = (&mut into[read..], at + read as u64),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(SpoolError::io("read restored segment", PathBuf::from(name), error)),
        }
    }
    Ok(before - into.len())
}

fn keep(shared: &Shared, name: &str, contents: &File, complete: bool, number: u64) -> Result<()> {
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
    if complete {
        shared.note_complete(name);
    }
    Ok(())
}

fn copy(shared: &Shared, contents: &File, name: &str, temporary: &str) -> Result<()> {
    let file = shared.directory.create(temporary).map_err(|error| shared.error("create file", temporary, error))?;
    let (mut at, mut piece) = (0, vec![0; PIECE.min(shared.size.bytes() as usize)]);
    while at < shared.size.bytes() {
        let read = read_up_to(contents, &mut piece, at, name)?;
        piece[read..].fill(0);
        write_all_at(&*file, &piece, at).map_err(|error| shared.error("write to file", temporary, error))?;
        at += piece.len() as u64;
    }
    file.sync_all().map_err(|error| shared.error("fsync file", temporary, error))
}
