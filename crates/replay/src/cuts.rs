//! Truncations within a spilled batch, which goes on behind them.
//!
//! What records before a truncation do to blocks behind its end is needless, and such a block is as new for those after it. So
//! files are cut before any page of the batch is written, and what is needless is left out: then the pages that are left can be
//! redone in any order. With a truncation PostgreSQL clears tails of pages of both maps, and brings the upper levels of the free
//! space map up to date. What that does depends on how long the maps are just then, and redo of heap pages that is left out might
//! have made them longer. So a truncation is part of a batch only where nothing depends on that: the maps have their length
//! already before the batch.

use std::collections::{HashMap, HashSet};

use walrider_datadir::relation::RelationFiles;
use walrider_layout::page::Page;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, RelFileLocator};
use walrider_redo::fsm::FsmFork;
use walrider_redo::{Env, Target, fsm, vm};
use walrider_wal::records::smgr::{SMGR_TRUNCATE_FSM, SMGR_TRUNCATE_HEAP, SMGR_TRUNCATE_VM};

use crate::base::Base;
use crate::error::ReplayError;
use crate::partition::{Shared, known_blocks};
use crate::rels::{PageKey, RelTable};

/// What PostgreSQL always writes (`SMGR_TRUNCATE_ALL`).
const TRUNCATE_ALL: u32 = SMGR_TRUNCATE_HEAP | SMGR_TRUNCATE_VM | SMGR_TRUNCATE_FSM;

/// What tells how long the files of relations are before a batch, which no page in memory is newer than.
pub struct Lengths<'a> {
    /// The numbers of forks.
    pub rels: &'a RelTable,
    /// Files in the directory.
    pub files: &'a RelationFiles,
    /// Those that are not there yet.
    pub base: Option<&'a dyn Base>,
    /// What redo of the maps depends on.
    pub env: Env,
}

/// A truncation that is part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// End of its record.
    lsn: Lsn,
    rel: RelFileLocator,
    /// Blocks of the main fork that stay.
    blocks: BlockNumber,
    /// Whether there is a visibility map.
    has_vm: bool,
}

/// Of a relation, what is known of its maps behind the last truncation.
#[derive(Clone, Copy, Debug)]
struct Maps {
    /// At least so many blocks; `None` if that cannot be told.
    vm: Option<BlockNumber>,
    fsm: Option<BlockNumber>,
    /// Blocks of the heap that the last truncation of the batch has left, if there was one.
    heap: Option<BlockNumber>,
}

/// The truncations of a batch, in the order of the WAL.
#[derive(Default)]
pub struct Cuts {
    cuts: Vec<Cut>,
    maps: HashMap<RelFileLocator, Maps>,
}

impl Cuts {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.cuts.is_empty()
    }

    /// Takes a truncation, whose record ends at `lsn`, if what it does can be told now. False: it is to end the batch.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn take(
        &mut self,
        lsn: Lsn,
        rel: RelFileLocator,
        blocks: BlockNumber,
        flags: u32,
        lengths: &Lengths<'_>,
    ) -> Result<bool, ReplayError> {
        if flags & TRUNCATE_ALL != TRUNCATE_ALL {
            return Ok(false);
        }
        let mut maps = match self.maps.get(&rel) {
            Some(&maps) => maps,
            None => lengths.maps(rel)?,
        };
        // No record of the batch has to do with a map that has no number.
        let has_vm = maps.vm != Some(0) || lengths.rels.find(rel, ForkNumber::VisibilityMap).is_some();
        let vm_keep = vm::blocks_kept(blocks);
        if has_vm && maps.vm.is_none_or(|vm| vm < vm_keep) {
            return Ok(false);
        }
        let (fsm_keep, slot) = fsm::truncation(blocks);
        let is_certain = match (maps.fsm, maps.heap) {
            // Whether the map's first removed page is there, and so whether upper levels are brought up to date, does not matter
            // where they are.
            (Some(fsm), None) if fsm == fsm_keep => slot != 0 || lengths.upper_levels_agree(rel, blocks)?,
            (Some(fsm), None) => fsm > fsm_keep,
            (Some(fsm), Some(heap)) if fsm == fsm_keep => {
                heap <= blocks || lengths.upper_levels_are_settled(rel, blocks)?
            }
            // It removes the page on which an earlier one has cleared the tail, and whose largest value that has asked for.
            _ => false,
        };
        if is_certain {
            maps = Maps { vm: if has_vm { Some(vm_keep) } else { maps.vm }, fsm: Some(fsm_keep), heap: Some(blocks) };
            self.maps.insert(rel, maps);
            self.cuts.push(Cut { lsn, rel, blocks, has_vm });
        }
        Ok(is_certain)
    }
}

impl Lengths<'_> {
    fn maps(&self, rel: RelFileLocator) -> Result<Maps, ReplayError> {
        let blocks = |fork| match self.base {
            Some(base) => Ok::<_, ReplayError>(base.blocks(rel, fork)),
            None => Ok(Some(self.files.blocks(rel, fork)?.unwrap_or(0))),
        };
        Ok(Maps { vm: blocks(ForkNumber::VisibilityMap)?, fsm: blocks(ForkNumber::FreeSpaceMap)?, heap: None })
    }

    /// Whether the upper levels of a free space map say already that nothing is free from a heap block on, on whose page of the
    /// map it ends.
    fn upper_levels_agree(&self, rel: RelFileLocator, from: BlockNumber) -> Result<bool, ReplayError> {
        if self.base.is_some() {
            return Ok(false);
        }
        let blocks = self.files.blocks(rel, ForkNumber::FreeSpaceMap)?.unwrap_or(0);
        let mut look = Look { files: self.files, rel, blocks, differs: false };
        fsm::vacuum_range(&mut look, from, BlockNumber::MAX, &Env { hint_bits_are_logged: false, ..self.env })?;
        Ok(!look.differs)
    }

    /// Whether upper levels come to the same whatever the largest value was that the last truncation found on the page below: of what
    /// was there, this one removes some, which is left out. It brings them up to date itself; but a page that once had a value stays
    /// initialised, and is written, with where the next search begins. Where hint bits are logged, that is no reason to write it.
    fn upper_levels_are_settled(&self, rel: RelFileLocator, blocks: BlockNumber) -> Result<bool, ReplayError> {
        if self.env.hint_bits_are_logged || self.base.is_some() {
            return Ok(self.env.hint_bits_are_logged);
        }
        for block in fsm::blocks_above(blocks) {
            let mut bytes = [0; BLCKSZ];
            self.files.read(rel, ForkNumber::FreeSpaceMap, block, &mut bytes)?;
            if !fsm::is_settled(Page(&bytes)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A free space map in its file, which stays as it is.
struct Look<'a> {
    files: &'a RelationFiles,
    rel: RelFileLocator,
    blocks: BlockNumber,
    /// Whether something would have been changed.
    differs: bool,
}

impl FsmFork for Look<'_> {
    type Error = ReplayError;

    fn blocks(&mut self) -> Result<BlockNumber, ReplayError> {
        Ok(self.blocks)
    }

    fn page<R>(
        &mut self,
        block: BlockNumber,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<Option<R>, ReplayError> {
        if block >= self.blocks {
            return Ok(None);
        }
        let mut bytes = [0; BLCKSZ];
        self.files.read(self.rel, ForkNumber::FreeSpaceMap, block, &mut bytes)?;
        let mut target = Target { bytes: &mut bytes, exists: true, dirty: false };
        let result = change(&mut target);
        self.differs |= target.dirty;
        Ok(Some(result))
    }
}

/// The truncations of one fork.
#[derive(Debug)]
pub struct ForkCuts {
    /// In the order of the WAL: end of the record, and how many blocks it and the later ones leave.
    ends: Vec<(Lsn, BlockNumber)>,
}

impl ForkCuts {
    /// From truncations in the order of the WAL.
    pub fn new(mut cuts: Vec<(Lsn, BlockNumber)>) -> ForkCuts {
        assert!(cuts.is_sorted(), "a truncation is out of order");
        let mut least = BlockNumber::MAX;
        for (_, keep) in cuts.iter_mut().rev() {
            least = least.min(*keep);
            *keep = least;
        }
        ForkCuts { ends: cuts }
    }

    /// How many blocks all of them leave.
    pub fn least(&self) -> BlockNumber {
        self.ends.first().map_or(BlockNumber::MAX, |&(_, keep)| keep)
    }

    /// How many blocks those leave that come after a record that ends here.
    pub fn least_after(&self, lsn: Lsn) -> BlockNumber {
        self.next(lsn).map_or(BlockNumber::MAX, |(_, keep)| keep)
    }

    /// Whether one comes between two records that end here.
    pub fn is_between(&self, before: Lsn, after: Lsn) -> bool {
        self.next(before).is_some_and(|(end, _)| end < after)
    }

    fn next(&self, lsn: Lsn) -> Option<(Lsn, BlockNumber)> {
        self.ends.get(self.ends.partition_point(|&(end, _)| end <= lsn)).copied()
    }
}

/// What is done to the last page of a map that stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailChange {
    /// The visibility map of a heap of so many blocks.
    VisibilityMap(BlockNumber),
    /// The free space map, from this slot on; by the truncation of this number.
    FreeSpaceMap(u16, usize),
}

/// The same, with page and place in the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// End of the truncation's record.
    pub lsn: Lsn,
    /// The page.
    pub key: PageKey,
    /// The change.
    pub change: TailChange,
}

/// What must happen to the upper levels of a free space map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vacuum {
    /// Number of the truncation.
    pub nth: usize,
    /// End of its record.
    pub lsn: Lsn,
    /// Blocks of the heap that stay.
    pub blocks: BlockNumber,
    /// Number of the map's fork.
    pub map: u32,
}

/// What need not be done of a spilled batch, and what its truncations do to maps.
#[derive(Debug, Default)]
pub struct Needless {
    /// By number, which forks are dropped in the batch.
    dropped: Vec<bool>,
    /// By number, the truncations of forks.
    forks: Vec<Option<ForkCuts>>,
    tails: Vec<Tail>,
    vacuums: Vec<Vacuum>,
}

impl Needless {
    /// Of a batch with these truncations; `drops` are dropped in it, which are the forks `dropped` by number.
    pub fn new(cuts: &Cuts, drops: &HashSet<RelFileLocator>, dropped: Vec<bool>, rels: &RelTable) -> Needless {
        let mut needless = Needless { dropped, ..Needless::default() };
        let mut forks: HashMap<u32, Vec<(Lsn, BlockNumber)>> = HashMap::new();
        let stay = cuts.cuts.iter().enumerate().filter(|(_, cut)| !drops.contains(&cut.rel));
        for (nth, &Cut { lsn, rel, blocks, has_vm }) in stay {
            forks.entry(rels.number(rel, ForkNumber::Main)).or_default().push((lsn, blocks));
            if has_vm {
                let map = rels.number(rel, ForkNumber::VisibilityMap);
                forks.entry(map).or_default().push((lsn, vm::blocks_kept(blocks)));
                let change = TailChange::VisibilityMap(blocks);
                needless.tails.extend(vm::tail_block(blocks).map(|tail| Tail {
                    lsn,
                    key: PageKey::new(map, tail),
                    change,
                }));
            }
            let map = rels.number(rel, ForkNumber::FreeSpaceMap);
            let (keep, slot) = fsm::truncation(blocks);
            forks.entry(map).or_default().push((lsn, keep));
            if slot != 0 {
                let (key, change) = (PageKey::new(map, keep - 1), TailChange::FreeSpaceMap(slot, nth));
                needless.tails.push(Tail { lsn, key, change });
            }
            needless.vacuums.push(Vacuum { nth, lsn, blocks, map });
        }
        for (number, cuts) in forks {
            needless.forks.resize_with(needless.forks.len().max(number as usize + 1), || None);
            needless.forks[number as usize] = Some(ForkCuts::new(cuts));
        }
        let mut tails = std::mem::take(&mut needless.tails);
        tails.retain(|tail| !needless.is_cut(tail.key, tail.lsn));
        needless.tails = tails;
        needless
    }

    /// Whether nothing needs to be done to a page as its relation is dropped.
    pub fn is_dropped(&self, key: PageKey) -> bool {
        self.dropped.get(key.fork() as usize).copied().unwrap_or(false)
    }

    /// The truncations of a fork.
    pub fn cuts_of(&self, fork: u32) -> Option<&ForkCuts> {
        self.forks.get(fork as usize)?.as_ref()
    }

    /// Whether a later truncation removes what a record that ends here does to a page.
    pub fn is_cut(&self, key: PageKey, lsn: Lsn) -> bool {
        self.cuts_of(key.fork()).is_some_and(|cuts| cuts.least_after(lsn) <= key.block())
    }

    /// Whether a page is behind the end that some truncation leaves: what the file has there is nothing to the batch.
    pub fn is_behind(&self, key: PageKey) -> bool {
        self.cuts_of(key.fork()).is_some_and(|cuts| cuts.least() <= key.block())
    }

    /// What is done to pages that stay of maps, of those that `which` picks, in the order of the WAL.
    pub fn tails(&self, which: impl Fn(&Tail) -> bool) -> Vec<Tail> {
        self.tails.iter().filter(|tail| which(tail)).copied().collect()
    }

    /// What happens to upper levels of free space maps, in the order of the WAL.
    pub fn vacuums(&self) -> &[Vacuum] {
        &self.vacuums
    }

    /// Cuts files to what all truncations leave of them, before pages of the batch are written.
    ///
    /// # Errors
    /// When one cannot be cut.
    pub fn cut_files(&self, shared: &Shared<'_>) -> Result<(), ReplayError> {
        for (number, cuts) in (0..).zip(&self.forks) {
            let Some(cuts) = cuts else { continue };
            let fork = shared.rels.fork(number);
            // Maps are only touched where they exist; a main fork is made.
            if fork.fork != ForkNumber::Main && shared.files.blocks(fork.rel, fork.fork)?.is_none() {
                continue;
            }
            let blocks = known_blocks(&fork, shared.files)?;
            shared.files.truncate(fork.rel, fork.fork, cuts.least())?;
            if cuts.least() < blocks {
                fork.set_blocks(cuts.least());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
