//! Upper levels of free space maps that truncations within a spilled batch bring up to date: when all else of the batch is done,
//! in the order of the WAL, with what records themselves do to these pages.

use std::collections::BTreeMap;
use std::io::IoSlice;

use rustc_hash::FxHashMap;
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, BlockNumber, Lsn, PageBytes};
use walrider_redo::fsm::{self, FsmFork};
use walrider_redo::{Change, Target};

use super::cache::{accept, known_blocks};
use super::sweep::{Op, PageAtWork, Visit, What};
use super::{Report, Shared};
use crate::cuts::Needless;
use crate::error::ReplayError;
use crate::rels::RelFork;
use crate::spill::entry;

/// Does what truncations do to upper levels. `report` has what the batch's other pages came to, and learns what these do.
///
/// # Errors
/// When a page cannot be read or written.
pub fn bring_up_to_date(shared: &Shared<'_>, needless: &Needless, report: &mut Report) -> Result<(), ReplayError> {
    let cleared: FxHashMap<usize, u8> = report.cleared.drain(..).collect();
    let entries = std::mem::take(&mut report.upper);
    // By map, what happens to it, by the place in the WAL.
    let mut maps: BTreeMap<u32, Vec<(Lsn, Event)>> = BTreeMap::new();
    for vacuum in needless.vacuums() {
        let event = Event::Vacuum { blocks: vacuum.blocks, largest: cleared.get(&vacuum.nth).copied() };
        maps.entry(vacuum.map).or_default().push((vacuum.lsn, event));
    }
    entry::each(&entries, |place, end, operation| {
        let op = Op { key: operation.key, order: end.0, what: What::Redo(place, operation.change) };
        maps.entry(operation.key.fork()).or_default().push((end, Event::Redo(op)));
    });
    for (number, mut events) in maps {
        events.sort_by_key(|&(lsn, _)| lsn);
        let fork = shared.rels.fork(number);
        let file_blocks = known_blocks(&fork, shared.files)?;
        let mut map = UpperLevels { shared, fork: &fork, file_blocks, pages: BTreeMap::new(), leaf: None };
        for (_, event) in events {
            match event {
                Event::Vacuum { blocks, largest } => {
                    map.leaf = largest.map(|largest| (fsm::location(blocks).0, largest));
                    fsm::vacuum_range(&mut map, blocks, BlockNumber::MAX, &shared.settings.env)?;
                }
                Event::Redo(op) => map.redo(op, &entries, report)?,
            }
        }
        map.write()?;
    }
    Ok(())
}

enum Event {
    /// A truncation has left so many blocks of the heap, and `largest` as the largest value of the last page of the lowest level, if
    /// it has cleared that page's tail.
    Vacuum {
        blocks: BlockNumber,
        largest: Option<u8>,
    },
    Redo(Op),
}

struct Held {
    bytes: Box<PageBytes>,
    exists: bool,
    dirty: bool,
}

/// The upper levels of one map. Of the lowest level there is only one page, and of that only its largest value.
struct UpperLevels<'u, 'a> {
    shared: &'u Shared<'a>,
    fork: &'u RelFork,
    file_blocks: BlockNumber,
    pages: BTreeMap<BlockNumber, Held>,
    leaf: Option<(BlockNumber, u8)>,
}

impl UpperLevels<'_, '_> {
    fn held(&mut self, block: BlockNumber) -> Result<&mut Held, ReplayError> {
        if !self.pages.contains_key(&block) {
            let (mut bytes, exists) = (Box::new([0; BLCKSZ]), block < self.file_blocks);
            if exists {
                self.shared.files.read(self.fork.rel, self.fork.fork, block, &mut bytes[..])?;
                accept(&mut bytes, self.fork, block, self.shared.settings.checksums)?;
            }
            self.pages.insert(block, Held { bytes, exists, dirty: false });
        }
        Ok(self.pages.get_mut(&block).expect("just put there"))
    }

    fn redo(&mut self, op: Op, entries: &[u8], report: &mut Report) -> Result<(), ReplayError> {
        let (shared, fork, key) = (self.shared, self.fork, op.key);
        let wanted = !matches!(op.what, What::Redo(_, Change::Overwrite(_)));
        let visit = Visit { key, ops: 0..1, used: true, wanted };
        let held = self.held(key.block())?;
        let mut page =
            PageAtWork { shared, fork, cuts: None, visit: &visit, exists: held.exists, bytes: &mut held.bytes };
        if let Some(dirty) = page.redo(&[op], entries, report) {
            held.exists |= dirty;
            held.dirty |= dirty;
        }
        Ok(())
    }

    fn write(self) -> Result<(), ReplayError> {
        for (block, held) in self.pages.iter().filter(|(_, held)| held.dirty) {
            let mut buffers = [IoSlice::new(&held.bytes[..])];
            self.shared.files.write(self.fork.rel, self.fork.fork, *block, &mut buffers)?;
        }
        Ok(())
    }
}

impl FsmFork for UpperLevels<'_, '_> {
    type Error = ReplayError;

    fn blocks(&mut self) -> Result<BlockNumber, ReplayError> {
        Ok(self.file_blocks)
    }

    fn page<R>(
        &mut self,
        block: BlockNumber,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<Option<R>, ReplayError> {
        if let Some((_, largest)) = self.leaf.filter(|&(leaf, _)| leaf == block) {
            let mut bytes = fsm::page_with(largest);
            return Ok(Some(change(&mut Target { bytes: &mut bytes, exists: true, dirty: false })));
        }
        if block >= self.file_blocks {
            return Ok(None);
        }
        debug_assert!(fsm::is_upper(block), "page {block} is of the lowest level");
        let checksums = self.shared.settings.checksums;
        let held = self.held(block)?;
        let mut target = Target { bytes: &mut held.bytes, exists: true, dirty: held.dirty };
        let result = change(&mut target);
        held.dirty = target.dirty;
        if checksums {
            PageMut(&mut held.bytes).update_checksum(block);
        }
        Ok(Some(result))
    }
}

#[cfg(test)]
mod tests;
