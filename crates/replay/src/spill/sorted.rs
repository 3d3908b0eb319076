//! A spilled batch that can be asked for the ranges of blocks in any order: of what a partition holds, each range has its own
//! chunks. For whoever brings pages in an order of his own.

use rayon::prelude::*;
use rustc_hash::FxHashMap;

use super::entry::{self, EntryPlace, Operation};
use super::{Chunk, Spill, SpilledPartition, Store};
use crate::error::ReplayError;

/// Blocks of a range: what passes at once is a megabyte, and what a range gets should not be many times as much.
const BLOCKS: u32 = 128;

/// A range of blocks: the number of the fork, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRange {
    /// Number of the fork.
    pub fork: u32,
    /// Number of the range in it.
    pub number: u32,
}

impl BlockRange {
    /// The one with this block.
    pub fn of(fork: u32, block: u32) -> BlockRange {
        BlockRange { fork, number: block / BLOCKS }
    }

    /// The first block behind it.
    pub fn end(self) -> u32 {
        (self.number + 1).saturating_mul(BLOCKS)
    }
}

/// All of a batch.
pub struct Sorted {
    store: Store,
    /// In WAL order.
    ranges: FxHashMap<BlockRange, Vec<Chunk>>,
}

impl Spill {
    /// Puts the ranges of each partition apart.
    ///
    /// # Errors
    /// When the file cannot be read or written, for want of room, too.
    pub fn sorted(mut self) -> Result<Sorted, ReplayError> {
        self.close()?;
        let Spill { mut store, partitions, .. } = self;
        store.sorting = true;
        let store = store;
        let one = |(number, partition)| sort(SpilledPartition { number, partition, store: &store, next: 0 });
        let found: Vec<_> =
            partitions.into_par_iter().enumerate().with_max_len(1).map(one).collect::<Result<_, _>>()?;
        let mut ranges: FxHashMap<BlockRange, Vec<Chunk>> = FxHashMap::default();
        for (range, chunk) in found.into_iter().flatten() {
            ranges.entry(range).or_default().push(chunk);
        }
        Ok(Sorted { store, ranges })
    }
}

/// A partition's ranges, in WAL order.
fn sort(mut partition: SpilledPartition<'_>) -> Result<Vec<(BlockRange, Chunk)>, ReplayError> {
    let (mut bytes, mut sorted, mut scratch, mut chunks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    while partition.read(&mut bytes)? {
        let mut operations: Vec<(BlockRange, EntryPlace, Operation)> = Vec::new();
        entry::each(&bytes, |place, _, operation| {
            let range = BlockRange::of(operation.key.fork(), operation.key.block());
            operations.push((range, place, operation));
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
            chunks.push((of_range[0].0, partition.store.chunk(&sorted, &mut scratch)?));
        }
    }
    Ok(chunks)
}

impl Sorted {
    /// The ranges that there are.
    pub fn ranges(&self) -> impl Iterator<Item = BlockRange> {
        self.ranges.keys().copied()
    }

    /// Reads entries of a range into `bytes`, from its chunk number `next` on, as many as a thread works on at a time. False: there
    /// are no more.
    ///
    /// # Errors
    /// When they cannot be read, or are not what was written.
    pub fn read(&self, range: BlockRange, next: &mut usize, bytes: &mut Vec<u8>) -> Result<bool, ReplayError> {
        bytes.clear();
        for chunk in self.ranges.get(&range).into_iter().flatten().skip(*next) {
            if !bytes.is_empty() && bytes.len() + chunk.len as usize > self.store.settings.pass_bytes {
                break;
            }
            self.store.read(chunk, bytes)?;
            *next += 1;
        }
        Ok(!bytes.is_empty())
    }
}
