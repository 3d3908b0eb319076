//! The thread that makes WAL durable, as soon as there is any that is not (`XLogWalRcvFlush`, `XLogWalRcvClose`;
//! `replication/walreceiver.c`, PostgreSQL 18).

use std::time::Instant;

use walrider_layout::{Lsn, TimelineId};

use crate::error::Result;
use crate::state::{Shared, Unsynced};

/// Flushes until the spool is dropped, and then what is left; or until it fails.
pub(crate) fn run(shared: &Shared) {
    loop {
        let mut state = shared.lock();
        while state.failed.is_none() && !state.stop && state.flushed >= state.flush_due {
            state = shared.wait(&shared.flush, state);
        }
        if state.failed.is_some() || state.flushed == state.written {
            return;
        }
        let (timeline, written) = (state.timeline, state.written);
        let files: Vec<Unsynced> = state.unsynced.iter().cloned().collect();
        state.flushing = true;
        drop(state);
        let flushed = files.into_iter().try_for_each(|file| flush(shared, timeline, &file, written));
        shared.lock().flushing = false;
        shared.on_flushed.notify_all();
        if flushed.is_err() {
            // It has been noted where it happened.
            return;
        }
    }
}

/// Makes the part of `written` that lies in one file durable.
fn flush(shared: &Shared, timeline: TimelineId, unsynced: &Unsynced, written: Lsn) -> Result<()> {
    let (name, final_name) = shared.names_of((timeline, unsynced.segment));
    if unsynced.renamed {
        shared.sync_directory()?;
    }
    let begun = Instant::now();
    unsynced.file.sync_data().map_err(|error| shared.fail("fdatasync file", &name, error))?;
    shared.counters.fsync(begun.elapsed());

    let end = shared.size.start_of(unsynced.segment + 1);
    let complete = end <= written;
    let mut state = shared.lock();
    state.flushed = end.min(written);
    let held_durable = state.early.held_durable(state.flushed);
    state.positions();
    if complete {
        state.unsynced.pop_front();
        state.filing = Some(unsynced.segment);
    } else if let Some(first) = state.unsynced.front_mut() {
        first.renamed = false;
    }
    drop(state);
    shared.on_flushed.notify_all();
    shared.call_back(held_durable);

    if complete {
        if name != final_name {
            // The data is durable under the one name; the other must not be taken for complete before that.
            let renamed = shared.directory.rename(&name, &final_name);
            renamed.map_err(|error| shared.fail("rename to", &final_name, error))?;
            shared.sync_directory()?;
        }
        shared.note_complete(&final_name);
        shared.lock().filing = None;
    }
    Ok(())
}
