//! Which pages have which partition of a spilled batch, and what comes of a partition that memory has no room for.
//!
//! Of a fork, so many blocks that follow each other are a run, and a run has a partition of its own as long as there are any. What a
//! partition holds is sorted in memory, when its pages are worked on: as they pass, in the order of somebody else's files, or once all
//! is put apart. Where it is too much for memory, or pages pass and there are so many runs that partitions have many, it is read, put
//! apart by smaller ranges, and written once more.

use std::collections::BTreeMap;
use std::ops::Bound;

use rayon::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, RELSEG_SIZE};

use super::entry::{self, EntryPlace, Operation};
use super::packing::stop_packing;
use super::{Chunk, LEAST_CHUNK_BYTES, LastRead, Spill, SpillPartition, SpillSettings, Store, end_of_part};
use crate::cuts::Tail;
use crate::error::ReplayError;
use crate::memory;
use crate::rels::PageKey;

/// Blocks of the smallest range: a megabyte is what passes at once, and as much as a request.
const LEAST_BLOCKS: u32 = 128;

/// Blocks of a run of a base backup of which nobody knows how much it has.
const USUAL_BLOCKS: u32 = 4096;

/// Fewest partitions, and most: one is for the maps.
const LEAST_PARTITIONS: u64 = 64;
const MOST_PARTITIONS: u64 = 1 << 14;

/// Most runs of a partition for each of which it is read. To sort it is to read it twice, and to write it.
const MOST_RUNS: usize = 3;

/// Most times that the pages of a partition are read and written rather than it is sorted.
const MOST_PASSES: usize = 2;

/// The partition of all free space maps, whose pages come last, and together.
const MAPS: usize = 0;

/// What stands for the run that they are.
const MAP_RUN: PageKey = PageKey::LAST;

/// Which run has which partition.
pub struct RunTable {
    /// Blocks of a run. No run has blocks of two files.
    blocks: u32,
    /// Whether pages pass in an order of their own, so that a partition is read once for each of its runs.
    pages_pass: bool,
    partitions: usize,
    /// By the first page of a run.
    numbers: FxHashMap<PageKey, usize>,
}

impl RunTable {
    /// For a base backup whose relations have so many bytes, as far as that is known: with their runs most partitions are taken; the
    /// others are for what becomes longer.
    fn of_base(relation_bytes: u64, partitions: usize) -> RunTable {
        let blocks = match relation_bytes / BLCKSZ as u64 * 8 / 5 / partitions as u64 {
            0 if relation_bytes == 0 => u64::from(USUAL_BLOCKS),
            blocks => blocks.next_multiple_of(u64::from(LEAST_BLOCKS)).max(u64::from(LEAST_BLOCKS)),
        };
        RunTable {
            blocks: blocks.min(u64::from(RELSEG_SIZE)) as u32,
            pages_pass: true,
            ..RunTable::of_files(partitions)
        }
    }

    /// For files in the directory: partitions may have as many runs as there are, and the shorter these are, the more alike are partitions.
    fn of_files(partitions: usize) -> RunTable {
        RunTable { blocks: LEAST_BLOCKS, pages_pass: false, partitions, numbers: FxHashMap::default() }
    }

    /// How many partitions there are.
    pub fn partitions(&self) -> usize {
        self.partitions
    }

    /// Whether a partition with so many runs, which takes so much memory where there is `most`, is put apart by smaller ranges.
    fn is_sorted(&self, runs: usize, cost: usize, most: usize) -> bool {
        // One of a single smallest range is read in parts, as that may be.
        let is_smallest = runs == 1 && self.blocks == LEAST_BLOCKS;
        match self.pages_pass {
            true => runs > MOST_RUNS || (cost > most && !is_smallest),
            false => cost > MOST_PASSES * most,
        }
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
    /// A batch for files in the directory.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn of_files(settings: &SpillSettings) -> Result<Spill, ReplayError> {
        Spill::in_partitions(settings, RunTable::of_files(partitions(settings)))
    }

    /// A batch for pages of a base backup that pass; its relations have so many bytes, as far as that is known.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn of_base(settings: &SpillSettings, relation_bytes: u64) -> Result<Spill, ReplayError> {
        let settings = SpillSettings {
            // Of what is sorted, more and smaller pieces come.
            file_bytes: settings.file_bytes / 5 * 4,
            // More partitions are worth more than what is kept in memory of a batch that does not fit.
            memory_bytes: settings.memory_bytes / 4 * 3,
            gather_bytes: settings.gather_bytes / 2 * 3,
            ..settings.clone()
        };
        Spill::in_partitions(&settings, RunTable::of_base(relation_bytes, partitions(&settings)))
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
        let mut runs_of: Vec<Vec<PageKey>> = vec![Vec::new(); partitions.len()];
        for (&run, &number) in &runs.numbers {
            runs_of[number].push(run);
        }
        let most = store.settings.most_at_once();
        let one = |(number, SpillPartition { chunks, .. }): (usize, SpillPartition)| {
            let cost = chunks.iter().map(Chunk::cost).sum();
            match number != MAPS && runs.is_sorted(runs_of[number].len(), cost, most) {
                // With what they become, these bytes are there twice.
                true => sort(LastRead { number, chunks, next: 0 }, &store, most / 2).map(Partition::Sorted),
                false => Ok(Partition::AsItIs(chunks)),
            }
        };
        let found: Vec<Partition> =
            partitions.into_par_iter().enumerate().with_max_len(1).map(one).collect::<Result<_, _>>()?;
        rayon::broadcast(|_| stop_packing());
        memory::trim();
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

/// How many partitions there is room for.
fn partitions(settings: &SpillSettings) -> usize {
    (settings.gather_bytes / LEAST_CHUNK_BYTES).clamp(LEAST_PARTITIONS, MOST_PARTITIONS) as usize
}

/// What becomes of a partition.
enum Partition {
    AsItIs(Vec<Chunk>),
    /// By the first page of a smallest range.
    Sorted(Vec<(PageKey, Chunk)>),
}

/// Puts a partition's smallest ranges apart, each in WAL order.
fn sort(mut partition: LastRead, store: &Store, most: usize) -> Result<Vec<(PageKey, Chunk)>, ReplayError> {
    let (mut bytes, mut sorted, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
    let mut operations: Vec<(PageKey, EntryPlace, Operation)> = Vec::new();
    while partition.read(store, most, &mut bytes)? {
        operations.clear();
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
            let mut chunk = store.chunk(&sorted, of_range.len() as u32)?;
            if !store.has_room() {
                chunk = store.put_out(&[chunk])?;
            }
            chunks.push((of_range[0].0, chunk));
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

    /// Memory that a range and others of its partition take; more than a thread may have if they come in several parts.
    pub fn cost(&self, range: BlockRange) -> usize {
        let chunks = range.partition.map_or(&[][..], |number| &self.partitions[number]);
        chunks.iter().map(Chunk::cost).sum()
    }

    /// How much of that a thread may have.
    pub fn most_at_once(&self) -> usize {
        self.store.settings.most_at_once()
    }

    /// The partitions with ranges that are not `done`, by their first pages.
    pub fn left(&self, done: &FxHashSet<PageKey>) -> Vec<usize> {
        let mut known = FxHashSet::default();
        let left = self.ranges.values().filter(|range| !done.contains(&range.first));
        left.filter_map(|range| range.partition).filter(|&number| known.insert(number)).collect()
    }

    /// Takes these out.
    pub fn take_left(&mut self, done: &FxHashSet<PageKey>) -> Vec<LastRead> {
        let left = self.left(done).into_iter();
        left.map(|number| LastRead { number, chunks: std::mem::take(&mut self.partitions[number]), next: 0 }).collect()
    }

    /// Has the system read the beginning of one that was taken out.
    pub fn read_ahead(&self, left: &LastRead) {
        self.store.read_ahead(&left.chunks[..end_of_part(&left.chunks, 0, self.most_at_once())]);
    }

    /// Those of some changes of pages that truncations ask for which are in a partition, by its number; `None`: in none.
    pub fn by_partition(&self, tails: Vec<Tail>) -> FxHashMap<Option<usize>, Vec<Tail>> {
        let mut found: FxHashMap<Option<usize>, Vec<Tail>> = FxHashMap::default();
        for tail in tails {
            found.entry(self.at(tail.key).partition).or_default().push(tail);
        }
        found
    }

    /// Reads what comes next of one that was taken out.
    ///
    /// # Errors
    /// As [`Ranges::read`].
    pub fn read_left(&self, left: &mut LastRead, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        left.read(&self.store, self.most_at_once(), bytes)
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
            self.store.read_ahead(&chunks[..end_of_part(chunks, 0, self.most_at_once())]);
        }
        self.read_partition(number, next, bytes)
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

    fn read_partition(&self, number: usize, next: &mut usize, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        bytes.clear();
        let chunks = &self.partitions[number];
        let end = end_of_part(chunks, *next, self.most_at_once());
        self.store.read_ahead(&chunks[*next..end]);
        self.store.read(&chunks[*next..end], bytes)?;
        *next = end;
        Ok(end < chunks.len())
    }
}

#[cfg(test)]
pub mod tests;
