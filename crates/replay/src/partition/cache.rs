//! Pages of a partition between their files and memory: read, written back, and taken out where memory is short.

use std::io::IoSlice;
use std::ops::{Range, RangeInclusive};
use std::time::Instant;

use walrider_datadir::relation::{MAX_RUN, RelationFiles};
use walrider_layout::page::{Page, PageMut};
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, PageBytes, RELSEG_SIZE};
use walrider_redo::{Change, Target};

use super::{Part, Partition, Report, Shared, Slot};
use crate::error::ReplayError;
use crate::rels::{PageKey, RelFork};

impl Partition {
    /// Has the system read what [`Partition::load`] will read of `chunk`, places in `touched`, while other work is done.
    pub(super) fn read_ahead(&self, chunk: Range<usize>, shared: &Shared<'_>) {
        let mut run: Option<(PageKey, u32)> = None;
        let ask = |(first, count): (PageKey, u32)| {
            let fork = shared.rels.fork(first.fork());
            let blocks = fork.file_blocks().unwrap_or(0).saturating_sub(first.block()).min(count);
            if blocks > 0 {
                shared.files.read_ahead(fork.rel, fork.fork, first.block(), blocks);
            }
        };
        for &(key, number) in &self.touched[chunk] {
            let slot = &self.slots[number as usize];
            if slot.frame.is_some() || !self.wants_bytes(slot) {
                continue;
            }
            match &mut run {
                Some((first, count)) if PageKey::new(first.fork(), first.block().wrapping_add(*count)) == key => {
                    *count += 1
                }
                other => {
                    if let Some(run) = other.replace((key, 1)) {
                        ask(run);
                    }
                }
            }
        }
        run.into_iter().for_each(ask);
    }

    /// The first operation of the batch on a page that has to do with what the page holds; none if the batch only names it.
    ///
    /// With `full_page_writes`, a page that a power cut has torn is named before its first image at most: every other record
    /// after the last checkpoint that has to do with it comes behind one. Its checksum is wrong until then, which PostgreSQL
    /// takes for damage if such a record comes first.
    fn first_use(&self, slot: &Slot) -> Option<Change> {
        let mut changes = self.runs[slot.first as usize..][..slot.count as usize].iter().map(|op| op.change);
        changes.find(|change| *change != Change::Lock)
    }

    /// Whether what a page of the batch holds matters to its operations.
    fn wants_bytes(&self, slot: &Slot) -> bool {
        !matches!(self.first_use(slot), None | Some(Change::Overwrite(_)))
    }

    /// Gives the pages of `chunk`, places in `touched`, memory, and reads those whose contents matter.
    pub(super) fn load(&mut self, chunk: Range<usize>, parts: &[Part<'_>], shared: &Shared<'_>, report: &mut Report) {
        let slots = self.touched[chunk].iter().map(|&(_, slot)| slot);
        let absent = slots.filter(|&slot| self.slots[slot as usize].frame.is_none());
        let (needed, named): (Vec<u32>, Vec<u32>) =
            absent.partition(|&slot| self.first_use(&self.slots[slot as usize]).is_some());
        let reading: Vec<bool> = needed.iter().map(|&slot| self.wants_bytes(&self.slots[slot as usize])).collect();
        let first_lsn = |slot: &Slot| {
            let first = &self.runs[slot.first as usize];
            parts[first.part as usize].planned.stretch.span(first.place).lsn
        };
        let lsns: Vec<Lsn> = needed.iter().map(|&slot| first_lsn(&self.slots[slot as usize])).collect();
        for slot in named.iter().map(|&slot| &self.slots[slot as usize]) {
            match known_blocks(&shared.rels.fork(slot.key.fork()), shared.files) {
                Ok(blocks) if slot.key.block() < blocks => {}
                // PostgreSQL also misses one that is all zeros (`log_invalid_page`); here, the first that needs it does.
                Ok(_) => report.invalid.push(slot.key),
                Err(error) => report.fail(first_lsn(slot), error),
            }
        }
        self.bring_in(&needed, &reading, &lsns, shared, report);
    }

    /// Gives the slots in `needed`, which are in file order, memory, and reads those that `reading` says.
    pub(super) fn bring_in(
        &mut self,
        needed: &[u32],
        reading: &[bool],
        lsns: &[Lsn],
        shared: &Shared<'_>,
        report: &mut Report,
    ) {
        let mut at = 0;
        while at < needed.len() {
            let key = self.slots[needed[at] as usize].key;
            let fork = shared.rels.fork(key.fork());
            let blocks = match known_blocks(&fork, shared.files) {
                Ok(blocks) => blocks,
                Err(error) => {
                    report.fail(lsns[at], error);
                    return;
                }
            };
            let exists = key.block() < blocks;
            let mut run = 1;
            if exists && reading[at] {
                let room = (RELSEG_SIZE - key.block() % RELSEG_SIZE).min(blocks - key.block()) as usize;
                let follows = |run: usize| {
                    needed.get(at + run).is_some_and(|&slot| {
                        let next = self.slots[slot as usize].key;
                        next == PageKey::new(key.fork(), key.block().wrapping_add(run as u32)) && reading[at + run]
                    })
                };
                while run < MAX_RUN.min(room) && follows(run) {
                    run += 1;
                }
            }
            let reads = exists && reading[at];
            if reads {
                self.read_buffer.resize(run * BLCKSZ, 0);
                let began = Instant::now();
                if let Err(error) = shared.files.read(fork.rel, fork.fork, key.block(), &mut self.read_buffer) {
                    report.fail(lsns[at], error.into());
                    return;
                }
                if let Some(stages) = &report.stages {
                    stages.note_read(began.elapsed());
                }
                report.pages_read += run as u64;
            }
            for nth in 0..run {
                let frame = self.frames.take();
                let page = self.frames.page_mut(frame);
                let slot = &mut self.slots[needed[at + nth] as usize];
                if reads {
                    page.copy_from_slice(&self.read_buffer[nth * BLCKSZ..][..BLCKSZ]);
                    if let Err(error) = accept(page, &fork, slot.key.block(), shared.settings.checksums) {
                        report.fail(lsns[at + nth], error);
                    }
                } else if reading[at] {
                    page.fill(0);
                }
                // Else the first operation stores every byte of the page, whatever was in the frame.
                slot.frame = Some(frame);
                slot.exists = exists;
                slot.dirty = false;
                self.resident += 1;
            }
            at += run;
        }
    }

    /// The slots of dirty pages that `which` picks.
    fn dirty(&self, which: impl Fn(PageKey) -> bool) -> impl Iterator<Item = u32> {
        (0..self.slots.len() as u32).filter(move |&number| {
            let slot = &self.slots[number as usize];
            slot.dirty && slot.frame.is_some() && which(slot.key)
        })
    }

    /// Writes dirty pages that `which` picks to their files, in file order. Returns how many.
    pub fn write_back(&mut self, shared: &Shared<'_>, which: impl Fn(PageKey) -> bool) -> Result<u64, ReplayError> {
        let mut dirty: Vec<u32> = self.dirty(which).collect();
        dirty.sort_unstable_by_key(|&slot| self.slots[slot as usize].key);
        self.write_slots(&dirty, shared)?;
        Ok(dirty.len() as u64)
    }

    /// All dirty pages.
    pub fn all_dirty(&self) -> Vec<u32> {
        self.dirty(|_| true).collect()
    }

    /// Pages in these slots, which somebody is about to write, with their checksums, and their frames.
    pub fn ready_to_write(&mut self, slots: &[u32], shared: &Shared<'_>) -> Vec<(PageKey, u32)> {
        self.set_checksums(slots, shared);
        slots
            .iter()
            .map(|&number| &self.slots[number as usize])
            .map(|slot| (slot.key, slot.frame.expect("it is dirty")))
            .collect()
    }

    /// The bytes of a page that is ready to be written.
    pub fn frame(&self, frame: u32) -> &PageBytes {
        self.frames.page(frame)
    }

    /// All dirty pages are written.
    pub fn all_written(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.dirty = false);
    }

    /// Writes what was changed, and gives all memory back. Returns how many pages went.
    pub fn empty(&mut self, shared: &Shared<'_>) -> Result<u64, ReplayError> {
        self.write_back(shared, |_| true)?;
        let resident = self.resident as u64;
        for number in 0..self.slots.len() as u32 {
            if self.slots[number as usize].frame.is_some() {
                self.release(number);
            }
        }
        assert_eq!(self.resident, 0, "a page was counted twice");
        self.frames.clear();
        Ok(resident)
    }

    fn set_checksums(&mut self, numbers: &[u32], shared: &Shared<'_>) {
        if shared.settings.checksums {
            for &number in numbers {
                let slot = &mut self.slots[number as usize];
                let block = slot.key.block();
                let page = self.frames.page_mut(slot.frame.expect("only resident pages are written"));
                PageMut(page).update_checksum(block);
            }
        }
    }

    /// Writes pages, given in file order.
    fn write_slots(&mut self, numbers: &[u32], shared: &Shared<'_>) -> Result<(), ReplayError> {
        self.set_checksums(numbers, shared);
        let mut at = 0;
        while at < numbers.len() {
            let key = self.slots[numbers[at] as usize].key;
            let room = (RELSEG_SIZE - key.block() % RELSEG_SIZE) as usize;
            let follows = |run: usize| {
                numbers.get(at + run).is_some_and(|&slot| {
                    self.slots[slot as usize].key == PageKey::new(key.fork(), key.block().wrapping_add(run as u32))
                })
            };
            let mut run = 1;
            while run < MAX_RUN.min(room) && follows(run) {
                run += 1;
            }
            let fork = shared.rels.fork(key.fork());
            let page = |&number: &u32| {
                let frame = self.slots[number as usize].frame.expect("only resident pages are written");
                IoSlice::new(self.frames.page(frame))
            };
            let mut buffers: Vec<_> = numbers[at..at + run].iter().map(page).collect();
            shared.files.write(fork.rel, fork.fork, key.block(), &mut buffers)?;
            for &number in &numbers[at..at + run] {
                self.slots[number as usize].dirty = false;
            }
            at += run;
        }
        Ok(())
    }

    /// Takes pages out of memory, least recently used first, until `missing` more fit into `quota`; but none of `keys`, which the batch
    /// is at. What was changed is written. Returns how many went.
    pub(super) fn make_room(
        &mut self,
        keys: RangeInclusive<PageKey>,
        missing: usize,
        quota: usize,
        shared: &Shared<'_>,
    ) -> Result<usize, ReplayError> {
        let over = (self.resident + missing).saturating_sub(quota);
        if over == 0 {
            return Ok(0);
        }
        let batch = self.batch;
        // Those of the batch that are done are older than those that are to come.
        let age = |slot: &Slot| if slot.batch == batch && slot.key > *keys.end() { batch + 1 } else { slot.batch };
        let is_free = |slot: &Slot| slot.frame.is_some() && !(slot.batch == batch && keys.contains(&slot.key));
        let numbers = 0..self.slots.len() as u32;
        let mut old: Vec<u32> = numbers.filter(|&number| is_free(&self.slots[number as usize])).collect();
        // Some more than needed, so that this does not come with every chunk.
        let wanted = over + quota / 8;
        if old.len() > wanted {
            old.select_nth_unstable_by_key(wanted, |&number| age(&self.slots[number as usize]));
            old.truncate(wanted);
        }
        let mut dirty: Vec<u32> = old.iter().copied().filter(|&slot| self.slots[slot as usize].dirty).collect();
        dirty.sort_unstable_by_key(|&slot| self.slots[slot as usize].key);
        self.write_slots(&dirty, shared)?;
        for &number in &old {
            if age(&self.slots[number as usize]) > batch {
                self.release_frame(number);
            } else {
                self.release(number);
            }
        }
        Ok(old.len())
    }

    /// Gives back the memory of a page that the batch will come to.
    fn release_frame(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if let Some(frame) = slot.frame.take() {
            self.resident -= 1;
            self.frames.give_back(frame);
        }
        slot.dirty = false;
    }

    /// Takes the page in a slot out of memory, without writing it.
    pub fn release(&mut self, number: u32) {
        self.release_frame(number);
        let slot = &mut self.slots[number as usize];
        let known = self.index.remove(&slot.key);
        assert_eq!(known, Some(number), "the slot is free, or another has its page");
        slot.batch = 0;
        self.free_slots.push(number);
    }

    /// Forgets pages that `which` picks without writing them: their files were cut or removed.
    pub fn discard(&mut self, which: impl Fn(PageKey) -> bool) {
        for number in 0..self.slots.len() as u32 {
            let slot = &self.slots[number as usize];
            // A free slot's key may have been given to another slot.
            if self.index.get(&slot.key) == Some(&number) && which(slot.key) {
                self.release(number);
            }
        }
        self.touched.clear();
    }

    /// Lets `change` have a page that lies within its file, outside a batch; read from there if need be.
    pub fn with_page<R>(
        &mut self,
        key: PageKey,
        shared: &Shared<'_>,
        change: impl FnOnce(&mut Target<'_>) -> R,
    ) -> Result<R, ReplayError> {
        let number = self.slot_for(key);
        if self.slots[number as usize].frame.is_none() {
            let mut report = Report::default();
            self.bring_in(&[number], &[true], &[Lsn::INVALID], shared, &mut report);
            if let Some((_, error)) = report.failure {
                return Err(error);
            }
        }
        let slot = &mut self.slots[number as usize];
        let bytes = self.frames.page_mut(slot.frame.expect("just brought in"));
        let mut target = Target { bytes, exists: true, dirty: slot.dirty };
        let result = change(&mut target);
        (slot.exists, slot.dirty) = (true, target.dirty);
        Ok(result)
    }
}

/// Length of a fork, asked of its file the first time.
pub fn known_blocks(fork: &RelFork, files: &RelationFiles) -> Result<u32, ReplayError> {
    if let Some(blocks) = fork.file_blocks() {
        return Ok(blocks);
    }
    let blocks = match files.blocks(fork.rel, fork.fork)? {
        Some(blocks) => blocks,
        None => {
            // PostgreSQL creates what a record refers to (XLogReadBufferExtended).
            files.create(fork.rel, fork.fork)?;
            0
        }
    };
    Ok(fork.learn_blocks(blocks))
}

/// Takes a page that was read, if it is valid. A page of the two maps that is not becomes zeros, as they can be made again
/// (`RBM_ZERO_ON_ERROR`).
///
/// # Errors
/// Any other page that is not.
pub(super) fn accept(page: &mut PageBytes, fork: &RelFork, block: u32, checksums: bool) -> Result<(), ReplayError> {
    match Page(page).verify(block, checksums) {
        Err(_) if matches!(fork.fork, ForkNumber::FreeSpaceMap | ForkNumber::VisibilityMap) => {
            page.fill(0);
            Ok(())
        }
        verified => verified.map_err(|problem| ReplayError::bad_page(fork, block, problem.to_string())),
    }
}
