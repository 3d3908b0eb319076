//! Segments that replay has from elsewhere (`KeepFileRestoredFromArchive`, `access/transam/xlogarchive.c`, PostgreSQL 18).
//!
//! What has the name of a segment in `pg_wal` is WAL up to where replay stands: others are sent it, it is archived, and after a promotion
//! PostgreSQL takes it for such. Without a stream, it would be what was ready for one: a segment half received, zeros, or an older
//! segment under a new name.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use crate::archive_status::forget;
use crate::error::{Result, SpoolError};
use crate::files::{read_all, write_all_at};
use crate::prepare::TEMPORARY_PREFIX;
use crate::spool::Spool;
use crate::state::{Preparation, Shared};

/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// What is to become of a segment that was found elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// It takes the place of what there is.
    pub replaces: bool,
    /// It is complete: noted for the archiver.
    pub complete: bool,
    /// Segments of timelines before that are no use any more.
    pub useless: Vec<String>,
}

impl Spool {
    /// Puts a segment that was found elsewhere in the place of what there is of it, durably, if `judge` says so, who compares them while nobody writes
    /// there; zeros follow where it is too short. Nothing is done while the stream brings it, or will, and where it lacks what this run
    /// has received of it. False: nothing was looked at, as a writer is there that brings it, or would.
    ///
    /// # Errors
    /// Trouble with files, and what `judge` fails with. The spool goes on.
    pub fn keep_restored(
        &self,
        name: &str,
        contents: &File,
        judge: &mut dyn FnMut() -> io::Result<Judgement>,
    ) -> Result<bool> {
        let shared = &*self.shared;
        shared.check()?;
        let Some(id) = shared.size.parse_file_name(name) else {
            return Err(SpoolError::Refused(format!("\"{name}\" is no segment of {} bytes", shared.size.bytes())));
        };
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
        let kept = judge()
            .map_err(|error| shared.error("compare WAL segment", name, error))
            .and_then(|judgement| keep(shared, name, contents, &judgement, received, number));
        shared.lock().restoring -= 1;
        shared.on_flushed.notify_all();
        kept.map(|()| true)
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
        let archived = read_all(contents, theirs, at).map_err(|error| unreadable(name, error))?;
        if read < wanted || archived < read || ours != theirs {
            return Ok(false);
        }
        at += wanted as u64;
    }
    Ok(true)
}

fn keep(shared: &Shared, name: &str, contents: &File, judgement: &Judgement, received: u64, number: u64) -> Result<()> {
    let directory = &*shared.directory;
    if judgement.replaces {
        if !agrees(shared, name, contents, received)? {
            return Ok(());
        }
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
    }
    if judgement.complete {
        shared.note_complete(name);
    }
    for useless in &judgement.useless {
        match directory.remove(useless) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(shared.error("remove file", useless, error));
            }
            _ => {}
        }
        forget(directory, useless).map_err(|error| shared.error("remove the archive status of", useless, error))?;
    }
    if judgement.useless.is_empty() { Ok(()) } else { shared.sync_directory() }
}

fn copy(shared: &Shared, contents: &File, name: &str, temporary: &str) -> Result<()> {
    let file = shared.directory.create(temporary).map_err(|error| shared.error("create file", temporary, error))?;
    let (mut at, mut piece) = (0, vec![0; PIECE.min(shared.size.bytes() as usize)]);
    while at < shared.size.bytes() {
        let read = read_all(contents, &mut piece, at).map_err(|error| unreadable(name, error))?;
        piece[read..].fill(0);
        write_all_at(&*file, &piece, at).map_err(|error| shared.error("write to file", temporary, error))?;
        at += piece.len() as u64;
    }
    file.sync_all().map_err(|error| shared.error("fsync file", temporary, error))
}

fn unreadable(name: &str, error: io::Error) -> SpoolError {
    SpoolError::io("read restored segment", PathBuf::from(name), error)
}
