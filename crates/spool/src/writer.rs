//! The one writer of a spool.

use std::collections::VecDeque;
use std::sync::Arc;

use walrider_layout::{Lsn, TimelineId};

use crate::error::{Result, SpoolError};
use crate::files::write_all_at;
use crate::spool::Spool;
use crate::state::{MAX_UNSYNCED, Preparation, Prepared, SegmentId, Unsynced};
use crate::stats::count;

/// Appends WAL to a spool. There is one at a time; the next gets its place when it is dropped.
pub struct Writer {
    spool: Arc<Spool>,
    timeline: TimelineId,
    /// Equal to the spool's; nobody else moves it.
    written: Lsn,
    /// From the segment of `written` on, those that are open: at most one, unless a write across segments failed.
    open: VecDeque<Unsynced>,
}

impl Writer {
    /// `spool` has its positions set to `at`, and knows that there is a writer.
    pub(crate) fn new(spool: Arc<Spool>, timeline: TimelineId, at: Lsn) -> Writer {
        let writer = Writer { spool, timeline, written: at, open: VecDeque::new() };
        let segment = writer.spool.shared.size.segment_of(at);
        writer.prepare_ahead((timeline, segment));
        writer
    }

    /// Where the next byte belongs.
    pub fn written(&self) -> Lsn {
        self.written
    }

    /// Appends `bytes` at `at`, which must be [`Writer::written`]. When it returns, they are in the operating system, and
    /// every reader of the files sees them. It does not wait for an fsync (but see [`MAX_UNSYNCED`]); it waits for the next
    /// segment when that is not prepared yet.
    ///
    /// # Errors
    /// [`SpoolError::Gap`], [`SpoolError::Overlap`]; [`SpoolError::Full`]: try again later with the same; any other
    /// trouble with files. Positions do not move then, though bytes past `written` may have changed.
    pub fn write(&mut self, at: Lsn, bytes: &[u8]) -> Result<()> {
        let written = self.written;
        match at.cmp(&written) {
            std::cmp::Ordering::Greater => return Err(SpoolError::Gap { written, at }),
            std::cmp::Ordering::Less => return Err(SpoolError::Overlap { written, at }),
            std::cmp::Ordering::Equal => {}
        }
        self.spool.shared.check()?;
        let Some(end) = at.0.checked_add(bytes.len() as u64).map(Lsn) else {
            return Err(SpoolError::Refused(format!("WAL of {} bytes at {at} goes past the last LSN", bytes.len())));
        };
        let (mut position, mut rest) = (at, bytes);
        while !rest.is_empty() {
            let size = self.spool.shared.size;
            let room = usize::try_from(size.bytes() - size.offset_of(position)).unwrap_or(usize::MAX);
            let (piece, more) = rest.split_at(rest.len().min(room));
            let segment = size.segment_of(position);
            let index = self.open(segment)?;
            let shared = &self.spool.shared;
            let calls = write_all_at(&*self.open[index].file, piece, size.offset_of(position)).map_err(|error| {
                shared.error("write to WAL segment", &shared.names_of((self.timeline, segment)).0, error)
            })?;
            count(&shared.counters.writes, calls);
            position = Lsn(position.0 + piece.len() as u64);
            rest = more;
        }
        self.publish(end);
        Ok(())
    }

    /// Wakes those who wait for what was written ([`Spool::wait_written_beyond`]). Apart from writing, so that what cannot wait
    /// can be done first.
    pub fn announce(&self) {
        self.spool.shared.on_written.notify_all();
    }

    /// Lets the others see that `written` is `end`.
    fn publish(&mut self, end: Lsn) {
        let shared = &self.spool.shared;
        count(&shared.counters.bytes_written, end.0 - self.written.0);
        self.written = end;
        let mut state = shared.lock();
        for open in &mut self.open {
            if state.unsynced.back().is_none_or(|last| last.segment < open.segment) {
                state.unsynced.push_back(open.clone());
            }
            open.renamed = false;
        }
        state.written = end;
        drop(state);
        shared.flush.notify_one();
        let segment = shared.size.segment_of(end);
        self.open.retain(|open| open.segment >= segment);
    }

    /// Where in `self.open` the file of a segment is, which is one of them or the next.
    fn open(&mut self, segment: u64) -> Result<usize> {
        if let Some(index) = self.open.iter().position(|open| open.segment == segment) {
            return Ok(index);
        }
        let id = (self.timeline, segment);
        let prepared = self.take_prepared(id)?;
        let shared = &self.spool.shared;
        if let Some(temporary) = &prepared.temporary {
            let (name, _) = shared.names_of(id);
            shared.directory.rename(temporary, &name).map_err(|error| shared.error("rename to", &name, error))?;
        }
        self.open.push_back(Unsynced { segment, file: prepared.file, renamed: prepared.temporary.is_some() });
        self.prepare_ahead((self.timeline, segment + 1));
        Ok(self.open.len() - 1)
    }

    /// Takes the file of a segment from the thread that prepares it; waits if it is not there yet.
    fn take_prepared(&self, id: SegmentId) -> Result<Prepared> {
        let shared = &self.spool.shared;
        let mut state = shared.lock();
        while state.failed.is_none() && state.unsynced.len() >= MAX_UNSYNCED {
            state = shared.wait(&shared.on_flushed, state);
        }
        let mut waited = false;
        // An error counts if it came while we waited; an older one is reason to try again.
        let mut asked = false;
        loop {
            if let Some(failure) = state.failed.clone() {
                return Err(failure.into());
            }
            state.preparation = match std::mem::replace(&mut state.preparation, Preparation::Idle) {
                Preparation::Ready(prepared) if prepared.id == id => return Ok(prepared),
                Preparation::Failed(error) if asked => return Err(error),
                Preparation::Working(working) => {
                    asked = working == id;
                    Preparation::Working(working)
                }
                _ => {
                    asked = true;
                    shared.prepare.notify_one();
                    Preparation::Wanted(id)
                }
            };
            if !waited {
                waited = true;
                count(&shared.counters.segment_waits, 1);
            }
            state = shared.wait(&shared.prepared, state);
        }
    }

    /// Has a segment prepared while the one before is written.
    fn prepare_ahead(&self, id: SegmentId) {
        let shared = &self.spool.shared;
        let mut state = shared.lock();
        match &state.preparation {
            // One after the other; this one is asked for again when it is needed.
            Preparation::Working(_) => {}
            Preparation::Ready(prepared) if prepared.id == id => {}
            _ => {
                state.preparation = Preparation::Wanted(id);
                shared.prepare.notify_one();
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.spool.shared.lock().writer = false;
    }
}
