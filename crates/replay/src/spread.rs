//! A restartpoint that is made while replay goes on: pages are written a few partitions at a time between batches, then made
//! durable by a thread of their own. What is replayed meanwhile does no harm: recovery begins at the checkpoint that was
//! the newest when writing began, and all that was replayed before it began is written.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use walrider_datadir::DataDirError;
use walrider_datadir::relation::RelationFiles;

use crate::error::ReplayError;
use crate::globals::SeenCheckpoint;
use crate::plan::PARTITIONS;
use crate::restartpoint::sync_one_by_one;

/// Partitions that are written between two batches.
const STEP: usize = 2;

/// One that is under way.
pub struct Spread {
    /// Where recovery will begin.
    pub checkpoint: SeenCheckpoint,
    /// The first partition that is not written yet.
    next: usize,
    syncing: Option<JoinHandle<Result<(), ReplayError>>>,
}

/// What is to be done next.
pub enum Step {
    /// These partitions' pages are to be written.
    Write(Range<usize>),
    /// All is written and being made durable.
    Wait,
    /// All is durable.
    Done,
}

impl Spread {
    /// One that begins here.
    pub fn new(checkpoint: SeenCheckpoint) -> Spread {
        Spread { checkpoint, next: 0, syncing: None }
    }

    /// The next step.
    ///
    /// # Errors
    /// When something could not be made durable.
    pub fn step(&mut self, files: &Arc<RelationFiles>) -> Result<Step, ReplayError> {
        if self.next < PARTITIONS {
            let partitions = self.next..(self.next + STEP).min(PARTITIONS);
            self.next = partitions.end;
            return Ok(Step::Write(partitions));
        }
        match &self.syncing {
            None => {
                let files = files.clone();
                let thread =
                    std::thread::Builder::new().name("fsync".to_owned()).spawn(move || sync_one_by_one(&files));
                self.syncing =
                    Some(thread.map_err(|error| DataDirError::io("start a thread to fsync", "files", error))?);
                Ok(Step::Wait)
            }
            Some(thread) if !thread.is_finished() => Ok(Step::Wait),
            Some(_) => {
                assert_eq!(self.next, PARTITIONS, "made durable before all was written");
                self.join().map(|()| Step::Done)
            }
        }
    }

    /// Waits for what is being made durable.
    ///
    /// # Errors
    /// When it could not be.
    pub fn join(&mut self) -> Result<(), ReplayError> {
        match self.syncing.take() {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }
}
