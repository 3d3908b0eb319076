//! Relation forks by small number, so that a page has a key of 64 bits.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

use rustc_hash::FxHashMap;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};

/// So many pages of a fork that lie side by side are of one partition.
pub const NEIGHBOURS: usize = 8;

/// A page: number of the fork of its relation, and block. Sorts in file order within a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(u64);

impl PageKey {
    /// Behind all others, and none.
    pub const LAST: PageKey = PageKey(u64::MAX);

    /// The page at `block` of the fork with this number.
    pub fn new(fork: u32, block: BlockNumber) -> PageKey {
        PageKey(u64::from(fork) << 32 | u64::from(block))
    }

    /// Number of the fork in the [`RelTable`].
    pub fn fork(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The block.
    pub fn block(self) -> BlockNumber {
        self.0 as u32
    }

    /// Both in one number, which sorts the same way.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// What [`PageKey::bits`] gave.
    pub fn from_bits(bits: u64) -> PageKey {
        PageKey(bits)
    }

    /// Which [`NEIGHBOURS`] it is one of.
    pub fn neighbours(self) -> u64 {
        self.0 / NEIGHBOURS as u64
    }

    /// Well spread bits, the same for neighbours, so that these stay together and are read and written in one go.
    pub fn spread(self) -> u64 {
        self.neighbours().wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

/// No length has been asked for yet. Not a length: block numbers end before it (`MaxBlockNumber`).
const UNKNOWN: u32 = u32::MAX;

/// A fork of a relation that some record refers to.
#[derive(Debug)]
pub struct RelFork {
    /// The relation.
    pub rel: RelFileLocator,
    /// The fork.
    pub fork: ForkNumber,
    /// Length in blocks of its files: pages behind need not be read. Constant while a batch is applied.
    file_blocks: AtomicU32,
    /// Length in blocks with what the batch at hand has added: `file_blocks <= blocks`.
    blocks: AtomicU32,
    /// Number of the relation's free space map, once it was asked for.
    free_space_map: OnceLock<u32>,
}

impl RelFork {
    /// Length of its files in blocks, if it is known.
    pub fn file_blocks(&self) -> Option<BlockNumber> {
        let blocks = self.file_blocks.load(Ordering::Acquire);
        (blocks != UNKNOWN).then_some(blocks)
    }

    /// Notes the length of its files in blocks, between batches: nobody else looks at it.
    pub fn set_blocks(&self, blocks: BlockNumber) {
        self.blocks.store(blocks, Ordering::Relaxed);
        self.file_blocks.store(blocks, Ordering::Release);
    }

    /// Notes the length of its files as it was asked for while a batch is applied. Another thread may have asked, too,
    /// and may have made the fork or its files longer since: only the first answer counts, and is returned. It is there
    /// for [`RelFork::grow_to`] before anyone is told that the length is known.
    pub fn learn_blocks(&self, blocks: BlockNumber) -> BlockNumber {
        let first = |length: &AtomicU32| {
            length
                .compare_exchange(UNKNOWN, blocks, Ordering::AcqRel, Ordering::Acquire)
                .map_or_else(|known| known, |_| blocks)
        };
        first(&self.blocks);
        first(&self.file_blocks)
    }

    /// The length is not known any more: the file was removed.
    pub fn forget_blocks(&self) {
        self.set_blocks(UNKNOWN);
    }

    /// A record has made the fork at least this long; its files follow at the end of the batch.
    pub fn grow_to(&self, blocks: BlockNumber) {
        debug_assert!(self.file_blocks().is_some());
        self.blocks.fetch_max(blocks, Ordering::Relaxed);
    }

    /// Number of the free space map of the relation, in the table that this fork is from.
    #[inline]
    pub fn free_space_map(&self, table: &RelTable) -> u32 {
        *self.free_space_map.get_or_init(|| table.number(self.rel, ForkNumber::FreeSpaceMap))
    }

    /// The length that the files must get, if they are shorter.
    pub fn wanted_blocks(&self) -> Option<BlockNumber> {
        let wanted = self.blocks.load(Ordering::Relaxed);
        self.file_blocks().filter(|&blocks| blocks < wanted).map(|_| wanted)
    }
}

/// All forks that records refer to, numbered from 0 in the order in which they were met.
#[derive(Debug, Default)]
pub struct RelTable {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    numbers: HashMap<(RelFileLocator, ForkNumber), u32>,
    forks: Vec<Arc<RelFork>>,
}

impl RelTable {
    /// The number of a fork, given out if it is new.
    pub fn number(&self, rel: RelFileLocator, fork: ForkNumber) -> u32 {
        if let Some(number) = self.find(rel, fork) {
            return number;
        }
        let mut inner = self.inner.write().expect("no panic while locked");
        let next = inner.forks.len() as u32;
        let number = *inner.numbers.entry((rel, fork)).or_insert(next);
        if number == next {
            inner.forks.push(Arc::new(RelFork {
                rel,
                fork,
                file_blocks: AtomicU32::new(UNKNOWN),
                blocks: AtomicU32::new(UNKNOWN),
                free_space_map: OnceLock::new(),
            }));
        }
        number
    }

    /// The number of a fork, if it has one.
    pub fn find(&self, rel: RelFileLocator, fork: ForkNumber) -> Option<u32> {
        self.inner.read().expect("no panic while locked").numbers.get(&(rel, fork)).copied()
    }

    /// The fork of a number that this table gave out.
    pub fn fork(&self, number: u32) -> Arc<RelFork> {
        self.inner.read().expect("no panic while locked").forks[number as usize].clone()
    }

    /// How many numbers were given out.
    pub fn len(&self) -> usize {
        self.inner.read().expect("no panic while locked").forks.len()
    }

    /// Whether no number was given out.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Numbers of the forks that `which` picks.
    pub fn select(&self, which: impl Fn(&RelFork) -> bool) -> Vec<u32> {
        let inner = self.inner.read().expect("no panic while locked");
        (0..).zip(&inner.forks).filter(|(_, fork)| which(fork)).map(|(number, _)| number).collect()
    }
}

/// How many forks are found without hashing.
const RECENT: usize = 128;

/// A thread's own view of a [`RelTable`]: no lock for forks it has met.
#[derive(Debug)]
pub struct RelNumbers {
    /// The last fork met of those that share a place here.
    recent: [Option<(RelFileLocator, ForkNumber, u32)>; RECENT],
    known: FxHashMap<(RelFileLocator, ForkNumber), u32>,
}

impl Default for RelNumbers {
    fn default() -> RelNumbers {
        RelNumbers { recent: [None; RECENT], known: FxHashMap::default() }
    }
}

impl RelNumbers {
    /// The number of a fork in `table`; always the same table.
    #[inline]
    pub fn number(&mut self, table: &RelTable, rel: RelFileLocator, fork: ForkNumber) -> u32 {
        let recent = &mut self.recent[(4 * rel.relation as usize + fork as usize) % RECENT];
        match *recent {
            Some((known_rel, known_fork, number)) if known_rel == rel && known_fork == fork => number,
            _ => {
                let number = *self.known.entry((rel, fork)).or_insert_with(|| table.number(rel, fork));
                *recent = Some((rel, fork, number));
                number
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two partitions ask for the length of one fork; the first goes on to make it longer before the second has noted
    /// what it was told. The growth must stay: else pages that are written behind the length are taken for missing.
    #[test]
    fn a_length_noted_late_does_not_undo_growth() {
        let table = RelTable::default();
        let rel = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };
        let fork = table.fork(table.number(rel, ForkNumber::Main));
        assert_eq!(fork.file_blocks(), None);
        assert_eq!(fork.learn_blocks(0), 0);
        fork.grow_to(34);
        assert_eq!(fork.learn_blocks(0), 0);
        fork.grow_to(32);
        assert_eq!((fork.file_blocks(), fork.wanted_blocks()), (Some(0), Some(34)));
    }

    /// One thread asked for the length of a table's files after another had written behind their end, where the blocks between were holes:
    /// it took those for pages that are there, and once it had made them, for missing. Restores with little memory ended with "WAL contains
    /// references to invalid pages" where all was well, one in thirty of those that were slowed down by a debugger.
    #[test]
    fn a_length_asked_late_does_not_count() {
        let table = RelTable::default();
        let fork = table
            .fork(table.number(RelFileLocator { tablespace: 1663, database: 5, relation: 16384 }, ForkNumber::Main));
        assert_eq!(fork.learn_blocks(96), 96);
        assert_eq!(fork.learn_blocks(150), 96);
        assert_eq!(fork.file_blocks(), Some(96));
    }
}
