//! Making WAL durable, as soon as there is any that is not (`XLogWalRcvFlush`, `XLogWalRcvClose`;
//! `replication/walreceiver.c`, PostgreSQL 18).

use std::time::Instant;

use walrider_layout::{Lsn, TimelineId};

use crate::error::Result;
use crate::state::{Shared, State, Unsynced};

/// All that was written at a moment.
pub(crate) struct Flush {
    timeline: TimelineId,
    written: Lsn,
    files: Vec<Unsynced>,
}

impl Flush {
    /// What is to be made durable now, if anything: what somebody waits for, and in the end the rest.
    pub fn next(state: &mut State) -> Option<Flush> {
        let due = state.flushed < state.flush_due || state.stop;
        if state.failed.is_some() || state.flushing || !due || state.flushed == state.written {
            return None;
        }
        state.flushing = true;
        let files = state.unsynced.iter().cloned().collect();
        Some(Flush { timeline: state.timeline, written: state.written, files })
    }

    /// Makes it durable.
    pub fn run(self, shared: &Shared) -> Result<()> {
        let Flush { timeline, written, files } = self;
        let flushed = files.into_iter().try_for_each(|file| flush(shared, timeline, &file, written));
        shared.lock().flushing = false;
        shared.on_flushed.notify_all();
        flushed
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
    if complete && name != final_name {
        // The data is durable under the one name; the other must not be taken for complete before that. Nor may the end be told as flushed before the
        // other is durable (`close_walfile`, `pg_basebackup/receivelog.c`): after a crash the segment begins again, which the primary then keeps for nobody.
        let renamed = shared.directory.rename(&name, &final_name);
        renamed.map_err(|error| shared.fail("rename to", &final_name, error))?;
        shared.sync_directory()?;
    }
    let mut state = shared.lock();
    state.flushed = end.min(written);
    let held_durable = state.early.ends.held_durable(state.flushed);
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
        shared.note_complete(&final_name);
        shared.lock().filing = None;
    }
    Ok(())
}
