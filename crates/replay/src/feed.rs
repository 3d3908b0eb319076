//! The engine's supply of WAL: stretches that are decoded and planned, and why there is no more.

use std::collections::VecDeque;

use walrider_layout::Lsn;
use walrider_store::read::{ReadWal, goes_on_past};
use walrider_wal::decode::{Invalid, Place, Stretch};

use crate::engine::Stop;
use crate::error::ReplayError;
use crate::load::{Ending, Loader};
use crate::memory;
use crate::plan::Planned;
use crate::rels::RelTable;
use crate::shares::Short;
use crate::stages::Stage;
use crate::stats::Stats;

/// Most WAL in the first batch, in bytes.
const FIRST_BATCH_BYTES: u64 = 16 << 20;

/// So many stretches are loaded before somebody looks at how much memory they take.
const LOADED_AT_ONCE: usize = 8;

/// Loads stretches, and keeps those that are not replayed yet.
pub struct Feed<'a> {
    /// Where WAL comes from.
    pub source: &'a dyn ReadWal,
    /// Decodes and plans it.
    pub loader: Loader,
    /// What is not replayed yet, in order.
    pub queue: VecDeque<Planned>,
    /// How many stretches there are to a batch.
    pub stretches: usize,
    window_bytes: u64,
    /// Where memory is short, what there is for a batch.
    pub room: Option<Short>,
    /// Where the WAL was found to end: nothing of it from there on.
    pub needed: Lsn,
    /// Whether to look, at the end of valid WAL, if it goes on past that, and is damaged there.
    pub looks_past: bool,
}

impl<'a> Feed<'a> {
    /// Nothing is loaded yet. `window_bytes` of WAL are a stretch, at most `batch_bytes` a batch.
    pub fn new(source: &'a dyn ReadWal, loader: Loader, window_bytes: u64, batch_bytes: u64) -> Feed<'a> {
        let window_bytes = window_bytes.min(loader.format().segment_size.bytes());
        let stretches = (batch_bytes.min(FIRST_BATCH_BYTES) / window_bytes).max(1) as usize;
        let needed = loader.position();
        Feed { source, loader, queue: VecDeque::new(), stretches, window_bytes, room: None, needed, looks_past: true }
    }

    /// Bytes of WAL in one stretch.
    pub fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    /// Loads a batch if there is nothing left; false: there is no more.
    pub fn fill(&mut self, rels: &RelTable, stats: &mut Stats) -> bool {
        if self.queue.is_empty() {
            let _load = stats.stages.enter(Stage::Load);
            match self.room {
                None => self.queue.extend(self.loader.load(self.stretches, self.source, rels)),
                Some(room) => self.fill_room(room, rels),
            }
        }
        !self.queue.is_empty()
    }

    /// Loads a batch, or as much of one as there is memory for. What is left of it is the next batch.
    fn fill_room(&mut self, room: Short, rels: &RelTable) {
        let takes = |planned: &Planned| planned.held_bytes() + planned.plan.operations() * room.operation();
        let mut taken = 0;
        while self.queue.len() < self.stretches && (self.queue.is_empty() || taken < room.for_batch()) {
            let count = LOADED_AT_ONCE.min(self.stretches - self.queue.len());
            let loaded = self.loader.load(count, self.source, rels);
            if loaded.is_empty() {
                return;
            }
            taken += loaded.iter().map(takes).sum::<usize>() as u64;
            self.queue.extend(loaded);
        }
        self.stretches = self.queue.len();
        self.loader.drop_spare();
        memory::trim();
    }

    /// Why the loader has no more.
    ///
    /// # Errors
    /// When reading failed.
    pub fn ending(&mut self, archive_recovery: bool) -> Result<Stop, ReplayError> {
        match self.loader.take_ending() {
            Some(Ending::Ends { at, page, why }) => {
                // The file to look at is the one where the record should go on.
                self.needed = page.max(at);
                let file = self.source.describe(self.needed);
                // After a crash, pages past the end may have got to the disk although ones before them did not.
                let looks = self.looks_past && archive_recovery;
                // WAL of another cluster is no end of this one's.
                let is_foreign = archive_recovery && matches!(why, Invalid::SystemIdentifier { .. });
                if is_foreign || looks && goes_on_past(self.source, self.loader.format(), page)? {
                    return Ok(Stop::Corrupt { lsn: at, why: format!("{file}: {why}") });
                }
                Ok(Stop::EndOfWal { why: format!("{file}: {why}") })
            }
            Some(Ending::Failed(error)) => Err(error),
            Some(Ending::Goes(at)) => {
                self.needed = at;
                Ok(Stop::EndOfWal { why: format!("no WAL from {at} on") })
            }
            None => Ok(Stop::EndOfWal { why: "no more WAL".into() }),
        }
    }

    /// Larger batches visit each page less often, but need memory of their own: they grow as long as one visits more bytes of
    /// pages than it has of WAL.
    /// `visited_bytes`: of pages, by the last one.
    pub fn size_batches(&mut self, visited_bytes: u64, most_bytes: u64) {
        if visited_bytes > self.stretches as u64 * self.window_bytes {
            self.stretches *= 2;
        }
        self.limit_batches(most_bytes);
    }

    /// From now on batches are of at most so many bytes of WAL, until [`Feed::size_batches`] lets them grow. Whether they were larger.
    pub fn limit_batches(&mut self, most_bytes: u64) -> bool {
        let most = (most_bytes / self.window_bytes).max(1) as usize;
        let were_larger = self.stretches > most;
        self.stretches = self.stretches.min(most);
        were_larger
    }

    /// Forgets the records of a batch; `behind` hears of the last one in each stretch, and how many there were.
    pub fn retire(&mut self, upto: &[u32], mut behind: impl FnMut(&Stretch, Place, u32)) {
        let mut ends = false;
        for &upto in upto {
            assert!(!ends, "only the last part of a batch leaves records for the next one");
            let planned = self.queue.front_mut().expect("one stretch for each part");
            assert!(planned.done <= upto, "{upto} records, of which {} are replayed", planned.done);
            if upto > planned.done {
                behind(&planned.stretch, planned.stretch.place(upto - 1), upto - planned.done);
                planned.done = upto;
            }
            if planned.done as usize == planned.stretch.places().len() {
                let planned = self.queue.pop_front().expect("not empty");
                if self.loader.spare() < self.stretches {
                    self.loader.recycle(planned);
                }
            } else {
                ends = true;
            }
        }
    }
}
