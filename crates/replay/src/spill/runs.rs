//! A spilled batch for pages that pass in the order of somebody else's files: a partition is read when its pages come.
//!
//! Of a fork, so many blocks that follow each other are a run, and a run has a partition of its own as long as there are any. What it
//! holds is sorted in memory while the pages of the run pass. Where that is too much for memory, or there are so many runs that
//! partitions have several, these are read, put apart by smaller ranges, and written once more.

use std::collections::BTreeMap;
use std::ops::Bound;

use rayon::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, RELSEG_SIZE};

use super::entry::{self, EntryPlace, Operation};
use super::{CHUNK_BYTES, Chunk, Spill, SpillPartition, SpillSettings, SpilledPartition, Store};
use crate::error::ReplayError;
use crate::rels::PageKey;

/// Blocks of the smallest range: what passes at once is a megabyte.
const LEAST_BLOCKS: u32 = 128;

/// Blocks of a run where nobody knows how many there are.
const USUAL_BLOCKS: u32 = 4096;

/// Most partitions, and fewest: one is for the maps.
const MOST_PARTITIONS: u64 = 1 << 14;
const LEAST_PARTITIONS: u64 = 16;

/// Most runs of a partition for each of which it is read. To sort it is to read it twice, and to write it.
const MOST_RUNS: usize = 3;

/// The partition of all free space maps, whose pages come last, and together.
const MAPS: usize = 0;

/// What stands for the run that they are.
const MAP_RUN: PageKey = PageKey::LAST;

/// Which run has which partition.
pub struct RunTable {
    /// Blocks of a run. No run has blocks of two files.
    blocks: u32,
    partitions: usize,
    /// By the first page of a run.
    numbers: FxHashMap<PageKey, usize>,
}

impl RunTable {
    /// For relations of so many bytes, 0 if that is not known. With their runs most partitions are taken; the others are for what
    /// becomes longer.
    fn new(relation_bytes: u64, partitions: usize) -> RunTable {
        let blocks = match relation_bytes / BLCKSZ as u64 * 8 / 5 / partitions as u64 {
            0 if relation_bytes == 0 => u64::from(USUAL_BLOCKS),
            blocks => blocks.next_multiple_of(u64::from(LEAST_BLOCKS)).max(u64::from(LEAST_BLOCKS)),
        };
        RunTable { blocks: blocks.min(u64::from(RELSEG_SIZE)) as u32, partitions, numbers: FxHashMap::default() }
    }

    /// The run of a page of such a fork, which is its first page.
    pub fn run_of(&self, key: PageKey, fork: ForkNumber) -> PageKey {
        match fork {
            ForkNumber::FreeSpaceMap => MAP_RUN,
            _ => PageKey::new(key.fork(), key.block() - key.block() % RELSEG_SIZE % self.blocks),
        }
    }

    /// The partition of a run. One that is new has the next one; when there are no more, they have several.
    pub fn number(&mut self, run: PageKey) -> usize {
        if run == MAP_RUN {
            return MAPS;
        }
        let next = MAPS + 1 + self.numbers.len() % (self.partitions - 1);
        *self.numbers.entry(run).or_insert(next)
    }

    /// The first block behind a run.
    fn end_of(&self, run: PageKey) -> BlockNumber {
        end_of(run, self.blocks)
    }
}

/// The first block behind a range of so many blocks, which ends with the file that it begins in.
fn end_of(first: PageKey, blocks: u32) -> BlockNumber {
    let first = first.block();
    let in_file = RELSEG_SIZE - first % RELSEG_SIZE;
    first.saturating_add(blocks.min(in_file))
}

/// Some blocks of a fork that follow each other in one file, and where the operations on their pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The first page.
    pub first: PageKey,
    /// The first block behind it.
    pub end: BlockNumber,
    /// Its partition, which may have others, too; `None`: there are no operations.
    partition: Option<usize>,
}

impl BlockRange {
    /// Whether it has this page.
    pub fn has(&self, key: PageKey) -> bool {
        self.first <= key && key < PageKey::new(self.first.fork(), self.end)
    }
}

/// All of a batch of runs.
pub struct Ranges {
    store: Store,
    /// In WAL order.
    partitions: Vec<Vec<Chunk>>,
    /// By the first page.
    ranges: BTreeMap<PageKey, BlockRange>,
    /// What was written once more.
    pub sorted_bytes: u64,
}

impl Spill {
    /// A batch of runs, for pages of relations that have so many bytes, as far as that is known.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn of_runs(settings: &SpillSettings, relation_bytes: u64) -> Result<Spill, ReplayError> {
        let settings = SpillSettings {
            // Of what is sorted, more and smaller pieces come.
            file_bytes: settings.file_bytes / 5 * 4,
            // More partitions are worth more than what is kept in memory of a batch that does not fit.
            memory_bytes: settings.memory_bytes / 4 * 3,
            gather_bytes: settings.gather_bytes / 2 * 3,
            ..settings.clone()
        };
        let partitions = (settings.gather_bytes / CHUNK_BYTES).clamp(LEAST_PARTITIONS, MOST_PARTITIONS) as usize;
        Spill::in_partitions(&settings, partitions, Some(RunTable::new(relation_bytes, partitions)))
    }

    /// The ranges that can be asked for. Partitions with too much are sorted.
    ///
    /// # Errors
    /// When the file cannot be read or written, for want of room, too.
    pub fn ranges(mut self) -> Result<Ranges, ReplayError> {
        self.close()?;
        let Spill { mut store, partitions, runs, .. } = self;
        store.sorting = true;
        let store = store;
        let runs = runs.expect("it was made of them");
        let mut runs_of: Vec<Vec<PageKey>> = vec![Vec::new(); partitions.len()];
        for (&run, &number) in &runs.numbers {
            runs_of[number].push(run);
        }
        let most = store.settings.most_at_once();
        let one = |(number, partition): (usize, SpillPartition)| {
            let bytes: usize = partition.chunks.iter().map(|chunk| chunk.len as usize).sum();
            // One of a single smallest range is read in parts, as that may be.
            let is_smallest = runs_of[number].len() == 1 && runs.blocks == LEAST_BLOCKS;
            let is_sorted = runs_of[number].len() > MOST_RUNS || (bytes > most && !is_smallest);
            match is_sorted && number != MAPS {
                // With what they become, these bytes are there twice, and more.
                true => sort(SpilledPartition { number, partition, store: &store, next: 0, most: most / 3 })
                    .map(Partition::Sorted),
                false => Ok(Partition::AsItIs(partition.chunks)),
            }
        };
        let found: Vec<Partition> =
            partitions.into_par_iter().enumerate().with_max_len(1).map(one).collect::<Result<_, _>>()?;
        let mut all = Ranges { store, partitions: Vec::new(), ranges: BTreeMap::new(), sorted_bytes: 0 };
        for (partition, of_it) in found.into_iter().zip(runs_of) {
            match partition {
                Partition::AsItIs(chunks) => {
                    let number = Some(all.partitions.len());
                    all.partitions.push(chunks);
                    let range = |first| BlockRange { first, end: runs.end_of(first), partition: number };
                    all.ranges.extend(of_it.into_iter().map(|first| (first, range(first))));
                }
                Partition::Sorted(chunks) => chunks.into_iter().for_each(|(first, chunk)| all.add_sorted(first, chunk)),
            }
        }
        Ok(all)
    }
}

/// What becomes of a partition.
enum Partition {
    AsItIs(Vec<Chunk>),
    /// By the first page of a smallest range.
    Sorted(Vec<(PageKey, Chunk)>),
}

/// Puts a partition's smallest ranges apart, each in WAL order.
fn sort(mut partition: SpilledPartition<'_>) -> Result<Vec<(PageKey, Chunk)>, ReplayError> {
    let (mut bytes, mut sorted, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
    while partition.read(&mut bytes)? {
        let mut operations: Vec<(PageKey, EntryPlace, Operation)> = Vec::new();
        entry::each(&bytes, |place, _, operation| {
            let Operation { key, .. } = operation;
            operations.push((PageKey::new(key.fork(), key.block() - key.block() % LEAST_BLOCKS), place, operation));
        });
        // Stable: operations on one page stay in their order.
        operations.sort_by_key(|&(range, place, _)| (range, place));
        for of_range in operations.chunk_by(|a, b| a.0 == b.0) {
            sorted.clear();
            for same in of_range.chunk_by(|a, b| a.1 == b.1) {
                let (span, record) = entry::record(&bytes, same[0].1);
                let operations: Vec<Operation> = same.iter().map(|&(_, _, operation)| operation).collect();
                entry::put(&mut sorted, span, record, &operations)
                    .map_err(|error| ReplayError::CorruptWal(format!("record at {}: {error}", span.lsn)))?;
            }
            chunks.push((of_range[0].0, partition.store.chunk(&sorted)?));
        }
    }
    Ok(chunks)
}

impl Ranges {
    fn add_sorted(&mut self, first: PageKey, chunk: Chunk) {
        self.sorted_bytes += chunk.stored.len();
        let next = self.partitions.len();
        let new = BlockRange { first, end: end_of(first, LEAST_BLOCKS), partition: Some(next) };
        let number = self.ranges.entry(first).or_insert(new).partition.expect("it has one");
        if number == next {
            self.partitions.push(Vec::new());
        }
        self.partitions[number].push(chunk);
    }

    /// The one with a page; where there is none, one without operations, up to the next.
    pub fn at(&self, key: PageKey) -> BlockRange {
        match self.ranges.range(..=key).next_back() {
            Some((_, range)) if range.has(key) => *range,
            _ => BlockRange {
                first: key,
                end: self.after(key).next().map_or(BlockNumber::MAX, |next| next.first.block()),
                partition: None,
            },
        }
    }

    /// The ranges with operations that follow a page in its fork.
    pub fn after(&self, key: PageKey) -> impl Iterator<Item = BlockRange> {
        let behind = self.ranges.range((Bound::Excluded(key), Bound::Unbounded));
        behind.map(|(_, range)| *range).take_while(move |range| range.first.fork() == key.fork())
    }

    /// Bytes of a range and others of its partition; more than a thread works on at a time if they come in several parts.
    pub fn bytes(&self, range: BlockRange) -> usize {
        let chunks = range.partition.map_or(&[][..], |number| &self.partitions[number]);
        chunks.iter().map(|chunk| chunk.len as usize).sum()
    }

    /// How many a thread works on at a time.
    pub fn most_at_once(&self) -> usize {
        self.store.settings.most_at_once()
    }

    /// The partitions with ranges that are not `done`, by their first pages.
    pub fn left(&self, done: &FxHashSet<PageKey>) -> Vec<usize> {
        let mut known = FxHashSet::default();
        let left = self.ranges.values().filter(|range| !done.contains(&range.first));
        left.filter_map(|range| range.partition).filter(|&number| known.insert(number)).collect()
    }

    /// Reads entries of a range and of others of its partition into `bytes`, from chunk number `next` on, as many as a thread works on at a
    /// time. False: there are no more. The next range in the file is read ahead.
    ///
    /// # Errors
    /// When they cannot be read, or are not what was written.
    pub fn read(&self, range: BlockRange, next: &mut usize, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        bytes.clear();
        let Some(number) = range.partition else { return Ok(false) };
        let after = self.after(range.first).next().and_then(|after| after.partition);
        if let Some(after) = after.filter(|_| *next == 0) {
            let chunks = &self.partitions[after];
            self.store.read_ahead(&chunks[..end_of_part(chunks, 0, self.store.settings.most_at_once())]);
        }
        self.read_partition(number, next, bytes)
    }

    /// The same for a partition.
    ///
    /// # Errors
    /// As [`Ranges::read`].
    pub fn read_partition(&self, number: usize, next: &mut usize, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        bytes.clear();
        self.read_on(number, next, bytes, self.store.settings.most_at_once())
    }

    /// Of pages, most bytes that are on their way to their files.
    pub fn write_bytes(&self) -> u64 {
        self.store.settings.write_bytes
    }

    /// The same for all free space maps.
    ///
    /// # Errors
    /// As [`Ranges::read`].
    pub fn read_maps(&self, next: &mut usize, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        self.read_partition(MAPS, next, bytes)
    }

    fn read_on(&self, number: usize, next: &mut usize, bytes: &mut Vec<u8>, most: usize) -> Result<bool, ReplayError> {
        let chunks = &self.partitions[number];
        let end = end_of_part(chunks, *next, most);
        self.store.read_ahead(&chunks[*next..end]);
        bytes.reserve_exact(chunks[*next..end].iter().map(|chunk| chunk.len as usize).sum());
        chunks[*next..end].iter().try_for_each(|chunk| self.store.read(chunk, bytes))?;
        *next = end;
        Ok(end < chunks.len())
    }
}

/// The end of those chunks that are read at once: `most` bytes, or one.
fn end_of_part(chunks: &[Chunk], first: usize, most: usize) -> usize {
    let (mut end, mut len) = (first, 0);
    while end < chunks.len() && (end == first || len + chunks[end].len as usize <= most) {
        len += chunks[end].len as usize;
        end += 1;
    }
    end
}

#[cfg(test)]
pub mod tests;
