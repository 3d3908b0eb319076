//! What is done beside the writer: three kinds of work, each by a thread of its own, or by the caller that steps through a spool
//! ([`crate::Spool::step`]).

use std::sync::{Condvar, Mutex};

use crate::early::{self, LogSync};
use crate::error::Result;
use crate::flusher::Flush;
use crate::prepare::{self, Unused};
use crate::state::{Preparation, SegmentId, Shared, State};

/// Who works beside the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker {
    /// Makes segments durable.
    Flusher,
    /// Makes entries of the early log durable.
    Logger,
    /// Prepares segments, and files of the early log.
    Preparer,
}

impl Worker {
    /// All of them.
    pub const ALL: [Worker; 3] = [Worker::Flusher, Worker::Logger, Worker::Preparer];

    pub(crate) fn thread_name(self) -> &'static str {
        ["spool-flush", "spool-early", "spool-prepare"][self as usize]
    }

    fn wakes(self, shared: &Shared) -> &Condvar {
        [&shared.flush, &shared.early_work, &shared.prepare][self as usize]
    }
}

/// What a step has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There was nothing to do.
    Idle,
    /// Work has begun: what it is to make durable is settled.
    Begun,
    /// The work that had begun is done.
    Done,
}

/// Something to do.
enum Job {
    Flush(Flush),
    Log(LogSync),
    Segment(SegmentId),
    LogFile,
}

/// What a worker finds to do, if anything.
fn next(worker: Worker, state: &mut State) -> Option<Job> {
    match worker {
        Worker::Flusher => Flush::next(state).map(Job::Flush),
        Worker::Logger => LogSync::next(state).map(Job::Log),
        Worker::Preparer if state.stop => None,
        Worker::Preparer => match state.preparation {
            Preparation::Wanted(id) => {
                state.preparation = Preparation::Working(id);
                Some(Job::Segment(id))
            }
            _ => state.early.lacks_spare().then_some(Job::LogFile),
        },
    }
}

impl Job {
    /// Does it. An error has been noted where it happened, and ends the worker.
    fn run(self, shared: &Shared, unused: &mut Unused) -> Result<()> {
        match self {
            Job::Flush(flush) => return flush.run(shared),
            Job::Log(sync) => return sync.run(shared),
            Job::Segment(id) => prepare::make_segment(shared, id, unused),
            Job::LogFile => early::make_spare(shared),
        }
        Ok(())
    }
}

/// A worker's thread: until the spool is dropped, and all is durable; or it fails.
pub(crate) fn run(shared: &Shared, worker: Worker) {
    let mut unused = Unused::default();
    loop {
        let mut state = shared.lock();
        let job = loop {
            if let Some(job) = next(worker, &mut state) {
                break job;
            }
            if state.stop || (state.failed.is_some() && worker != Worker::Preparer) {
                drop(state);
                unused.remove(shared);
                return;
            }
            state = shared.wait(worker.wakes(shared), state);
        };
        drop(state);
        if job.run(shared, &mut unused).is_err() {
            return;
        }
    }
}

/// The workers of a spool without threads.
#[derive(Default)]
pub(crate) struct Stepped {
    /// What each has begun.
    begun: Mutex<[Option<Job>; 3]>,
    unused: Mutex<Unused>,
}

impl Stepped {
    /// Has a worker begin something, or end what it has begun.
    pub fn step(&self, shared: &Shared, worker: Worker) -> Step {
        let begun = self.begun.lock().expect("no panic while locked")[worker as usize].take();
        if let Some(job) = begun {
            // An error has been noted where it happened.
            let _ = job.run(shared, &mut self.unused.lock().expect("no panic while locked"));
            return Step::Done;
        }
        let job = next(worker, &mut shared.lock());
        let step = if job.is_some() { Step::Begun } else { Step::Idle };
        self.begun.lock().expect("no panic while locked")[worker as usize] = job;
        step
    }

    /// Somebody waits: one step of a worker that has something to do.
    ///
    /// # Panics
    /// If nobody has: the wait would not end.
    pub fn step_any(&self, shared: &Shared) {
        let stepped = Worker::ALL.into_iter().any(|worker| self.step(shared, worker) != Step::Idle);
        assert!(stepped, "somebody waits for a spool that has nothing to do");
    }
}
