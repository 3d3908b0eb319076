//! The one writer of a spool.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use walrider_layout::{Lsn, TimelineId};

use crate::decide::{self, Parts};
use crate::early::MAX_ENTRY;
use crate::error::Result;
use crate::files::write_all_at;
use crate::spool::Spool;
use crate::state::{Preparation, Prepared, SegmentId, State, Unsynced, max_unsynced};
use crate::stats::{count, count_time};
use crate::tail::Tail;

/// Appends WAL to a spool. There is one at a time; the next gets its place when it is dropped.
pub struct Writer {
    spool: Arc<Spool>,
    timeline: TimelineId,
    /// Equal to the spool's; nobody else moves it.
    written: Lsn,
    /// The same.
    held: Lsn,
    /// What `written` was when it was last announced.
    announced: Lsn,
    /// What is held of `written..`, from this session up to `held`, and from earlier ones.
    tail: Tail,
    /// From the segment of `written` on, those that are open: at most one, unless a write across segments failed.
    open: VecDeque<Unsynced>,
    /// For entries of the early log.
    entry: Vec<u8>,
}

impl Writer {
    /// `spool` has its positions set to `at`, and knows that there is a writer.
    pub(crate) fn new(spool: Arc<Spool>, timeline: TimelineId, at: Lsn, tail: Tail) -> Writer {
        let (open, entry) = (VecDeque::new(), Vec::new());
        let writer = Writer { spool, timeline, written: at, held: at, announced: at, tail, open, entry };
        let segment = writer.spool.shared.size.segment_of(at);
        writer.prepare_ahead((timeline, segment));
        writer
    }

    /// End of what is in segments.
    pub fn written(&self) -> Lsn {
        self.written
    }

    /// Where the next byte belongs.
    pub fn held(&self) -> Lsn {
        self.held
    }

    /// Appends `bytes` at `at`, which must be [`Writer::held`]. When it returns, they are in the operating system, and
    /// every reader of the files sees them. It does not wait for an fsync (but see [`max_unsynced`]); it waits for the next
    /// segment when that is not prepared yet.
    ///
    /// # Errors
    /// [`Gap`](crate::SpoolError::Gap), [`Overlap`](crate::SpoolError::Overlap), [`Full`](crate::SpoolError::Full): try
    /// again later, with what lies past [`Writer::held`]; any other trouble with files. Bytes past the positions may have
    /// changed.
    pub fn write(&mut self, at: Lsn, bytes: &[u8]) -> Result<()> {
        self.write_ahead(at, bytes, Lsn(u64::MAX))
    }

    /// The same where the primary has flushed its WAL up to `horizon` only. What lies past gets into the early log, which
    /// nobody reads, and into segments once a later call has a horizon past it; `bytes` may be empty.
    ///
    /// Where `bytes` differ from what is held from an earlier session, the primary has lost what it had sent then: the rest
    /// of that is gone, durably, before anything takes its place.
    ///
    /// # Errors
    /// Those of [`Writer::write`].
    pub fn write_ahead(&mut self, at: Lsn, bytes: &[u8], horizon: Lsn) -> Result<()> {
        let end = decide::end_of(self.held, at, bytes.len())?;
        self.spool.shared.check()?;
        if let Some(from) = decide::taken_back(&self.tail, at, bytes, horizon) {
            self.discard(from)?;
        }
        let (log, flushed) = {
            let state = self.spool.shared.lock();
            (state.early.ends, state.flushed)
        };
        let Parts { before, known, settled } = decide::parts(&self.tail, (at, end), horizon, &log, flushed);
        let piece = |from: Lsn, to: Lsn| &bytes[(from.0 - at.0) as usize..(to.0 - at.0) as usize];
        self.append(at, piece(at, before))?;
        self.hold(known);
        if settled > known {
            self.advance(horizon)?;
            self.append(known, piece(known, settled))?;
        }
        if settled < end {
            self.replace_older()?;
        }
        for piece in piece(settled, end).chunks(MAX_ENTRY) {
            self.spool.shared.append_early(self.timeline, self.held, piece, &mut self.entry)?;
            self.tail.extend(self.held, piece);
            self.hold(Lsn(self.held.0 + piece.len() as u64));
        }
        self.advance(horizon)
    }

    /// WAL of this timeline is about to be held, past all that can be the same as what is held of an earlier one: that goes, once what
    /// has come instead is durable.
    fn replace_older(&mut self) -> Result<()> {
        let older = |state: &State| state.tail.0 < self.timeline && !state.tail.1.is_empty();
        if older(&self.spool.shared.lock()) {
            self.spool.wait_flushed(self.written)?;
            self.spool.shared.lock().tail = Default::default();
        }
        Ok(())
    }

    /// What is held gets into segments, as far as it came in this session and lies before the horizon.
    fn advance(&mut self, horizon: Lsn) -> Result<()> {
        let upto = decide::settles(self.written, self.held, horizon);
        if upto > self.written {
            let tail = std::mem::take(&mut self.tail);
            let appended = self.append(self.written, tail.slice(self.written, upto));
            self.tail = tail;
            appended?;
        }
        self.tail.forget_before(self.written);
        Ok(())
    }

    /// All of this timeline was received: the primary has ended it here.
    pub fn end_timeline(&mut self) {
        self.spool.shared.lock().timeline_ended = true;
    }

    /// What is held from there on is worth nothing; durable on return.
    fn discard(&mut self, from: Lsn) -> Result<()> {
        if from < self.tail.end() && !self.tail.is_empty() {
            self.spool.shared.truncate_early(self.timeline, from, &mut self.entry)?;
            self.tail.truncate(from);
        }
        Ok(())
    }

    /// Appends to segments.
    fn append(&mut self, at: Lsn, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (mut position, mut rest) = (at, bytes);
        while !rest.is_empty() {
            let size = self.spool.shared.size;
            let room = usize::try_from(size.bytes() - size.offset_of(position)).unwrap_or(usize::MAX);
            let (piece, more) = rest.split_at(rest.len().min(room));
            let segment = size.segment_of(position);
            let index = self.open(segment)?;
            let (shared, began) = (&self.spool.shared, Instant::now());
            let calls = write_all_at(&*self.open[index].file, piece, size.offset_of(position)).map_err(|error| {
                shared.error("write to WAL segment", &shared.names_of((self.timeline, segment)).0, error)
            })?;
            count(&shared.counters.writes, calls);
            count_time(&shared.counters.write_micros, began);
            position = Lsn(position.0 + piece.len() as u64);
            rest = more;
        }
        self.publish(position);
        Ok(())
    }

    /// Lets the others see that all up to `end` has come.
    fn hold(&mut self, end: Lsn) {
        debug_assert!(self.held <= end);
        if self.held == end {
            return;
        }
        self.held = end;
        let mut state = self.spool.shared.lock();
        state.held = end;
        state.positions();
    }

    /// Wakes those who wait for what was written ([`Spool::wait_written_beyond`]). Apart from writing, so that what cannot wait
    /// can be done first. Nobody is woken for nothing.
    pub fn announce(&mut self) {
        if self.announced < self.written {
            self.announced = self.written;
            self.spool.shared.on_written.notify_all();
            let callbacks = self.spool.shared.written_callbacks.lock().expect("no panic while locked");
            callbacks.iter().for_each(|callback| callback());
        }
    }

    /// Lets the others see that `written` is `end`.
    fn publish(&mut self, end: Lsn) {
        let shared = &self.spool.shared;
        count(&shared.counters.bytes_written, end.0 - self.written.0);
        (self.written, self.held) = (end, self.held.max(end));
        let mut state = shared.lock();
        for open in &mut self.open {
            if state.unsynced.back().is_none_or(|last| last.segment < open.segment) {
                state.unsynced.push_back(open.clone());
            }
            open.renamed = false;
        }
        // What the early log has need not be durable twice at once; but a segment that is complete is filed.
        let segment = shared.size.segment_of(end);
        if segment != shared.size.segment_of(state.written) || !state.early.ends.covers(state.written, end) {
            state.flush_due = end;
        }
        (state.written, state.held) = (end, state.held.max(end));
        state.positions();
        let due = state.flush_due == end;
        drop(state);
        if due {
            shared.flush.notify_one();
        }
        self.open.retain(|open| open.segment >= segment);
    }

    /// Where in `self.open` the file of a segment is, which is one of them or the next.
    fn open(&mut self, segment: u64) -> Result<usize> {
        if let Some(index) = self.open.iter().position(|open| open.segment == segment) {
            return Ok(index);
        }
        let id = (self.timeline, segment);
        let shared = &self.spool.shared;
        let prepared = self.take_prepared(id);
        shared.counters.segment_wait().end();
        let prepared = prepared?;
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
        while state.failed.is_none() && state.unsynced.len() >= max_unsynced() {
            shared.flush_all(&mut state);
            shared.counters.segment_wait().begin();
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
                shared.counters.segment_wait().begin();
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
        let mut state = self.spool.shared.lock();
        state.writer = false;
        // What is held of another timeline counts as long as this one has not come so far.
        let (held_on, held) = &state.tail;
        if *held_on == self.timeline || held.is_empty() || (*held_on < self.timeline && held.end() <= self.written) {
            state.tail = (self.timeline, std::mem::take(&mut self.tail));
        }
    }
}
