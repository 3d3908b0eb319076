//! One partition of the pages: the cache that holds them, and the work of a batch on them.
//!
//! A partition is worked on by one thread at a time and shares nothing with the others. A batch goes through it in
//! steps: [`Partition::gather`] groups the batch's operations by page, [`Partition::load`] reads what is missing,
//! [`Partition::apply`] redoes each page's operations in LSN order while the page is in the processor's cache.

mod cache;
pub mod passing;
pub mod sweep;
mod told;
pub mod upper;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use cache::known_blocks;
use rustc_hash::FxHashMap;
use walrider_datadir::relation::RelationFiles;
use walrider_layout::bytes::prefetch;
use walrider_layout::{Lsn, Major};
use walrider_redo::{Change, Effects, Env, FreeSpace, Outcome, RedoError, Target, fsm, mask, redo_block, vm};
use walrider_wal::decode::Place;
use walrider_wal::record::Record;

use crate::cuts::ForkCuts;
use crate::error::{RedoFailure, ReplayError};
use crate::frames::Frames;
use crate::plan::{PageOp, Planned};
use crate::rels::{NEIGHBOURS, PageKey, RelFork, RelTable};
use crate::stages::Stages;

/// What all partitions share while a batch is worked on.
pub struct Shared<'a> {
    /// Forks by number.
    pub rels: &'a RelTable,
    /// Relation files.
    pub files: &'a RelationFiles,
    /// What the work depends on.
    pub settings: PageSettings,
}

/// What the work on pages depends on.
#[derive(Clone, Copy, Debug)]
pub struct PageSettings {
    /// Settings of the cluster that redo looks at.
    pub env: Env,
    /// Pages carry checksums.
    pub checksums: bool,
    /// Compare pages with `wal_consistency_checking` images.
    pub verify_images: bool,
}

/// The part of a planned stretch that belongs to a batch.
pub struct Part<'a> {
    /// The stretch.
    pub planned: &'a Planned,
    /// First record of the batch.
    pub from: u32,
    /// First record past the batch.
    pub upto: u32,
    /// Their places.
    places: [Place; 2],
}

impl<'a> Part<'a> {
    /// The records of `planned` from number `from` on, up to, not including, `upto`.
    pub fn new(planned: &'a Planned, from: u32, upto: u32) -> Part<'a> {
        Part { planned, from, upto, places: [from, upto].map(|number| planned.stretch.place(number)) }
    }

    /// The operations of the batch among `ops`, which are in LSN order.
    pub fn cut<'o>(&self, ops: &'o [PageOp]) -> &'o [PageOp] {
        let [from, upto] = self.places.map(|place| ops.partition_point(|op| op.place < place));
        &ops[from..upto]
    }
}

/// A change of the free space map page that a heap page's redo asks for, or a registered one.
#[derive(Clone, Copy, Debug)]
pub struct FsmOp {
    /// The page of the map.
    pub key: PageKey,
    /// End of the record: operations on one page are done in this order.
    pub lsn: Lsn,
    /// What to do.
    pub change: FsmChange,
}

/// What is done to a page of the free space map.
#[derive(Clone, Copy, Debug)]
pub enum FsmChange {
    /// Stores a category at a slot.
    Set {
        /// The slot.
        slot: u16,
        /// The category.
        category: u8,
    },
    /// Redo of a record's block reference.
    Redo {
        /// Place of the part in the batch.
        part: u32,
        /// Where the record is in its stretch.
        place: Place,
        /// The block reference.
        block: u8,
    },
}

/// A page that redo made and that does not equal the image in the WAL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageDifference {
    /// The record.
    pub lsn: Lsn,
    /// The record's resource manager and type, and the page.
    pub what: String,
    /// Where the first difference is.
    pub at: String,
}

/// What a partition tells about its work on a batch.
#[derive(Debug, Default)]
pub struct Report {
    /// Changes of free space maps that are to follow.
    pub fsm: Vec<FsmOp>,
    /// Of pages of free space maps whose tail a truncation has cleared: its number, and the largest value that they then had.
    pub cleared: Vec<(usize, u8)>,
    /// Entries of a spilled batch that are about upper levels of free space maps which truncations have to do with.
    pub upper: Vec<u8>,
    /// Forks that have become longer.
    pub grown: Vec<u32>,
    /// Slots of pages that something has passed over ([`Partition::passed_over`]).
    pub passed_over: Vec<u32>,
    /// Pages that a record expected and that did not exist or were all zeros.
    pub invalid: Vec<PageKey>,
    /// Images compared.
    pub images_verified: u64,
    /// The first of those that differed, and how many did.
    pub image_differences: Vec<ImageDifference>,
    /// How many images differed.
    pub image_difference_count: u64,
    /// Pages read from files.
    pub pages_read: u64,
    /// Pages taken out of memory to make room.
    pub pages_evicted: u64,
    /// How long the work took.
    pub took: Duration,
    /// Who wants to know how long pages are read.
    pub stages: Option<Stages>,
    /// The error with the smallest LSN.
    pub failure: Option<(Lsn, ReplayError)>,
}

impl Report {
    /// Notes an error at a record.
    pub fn fail(&mut self, lsn: Lsn, error: ReplayError) {
        if self.failure.as_ref().is_none_or(|(first, _)| lsn < *first) {
            self.failure = Some((lsn, error));
        }
    }

    /// Adds what another one tells.
    pub fn add(&mut self, other: Report) {
        self.fsm.extend(other.fsm);
        self.cleared.extend(other.cleared);
        self.upper.extend(other.upper);
        self.grown.extend(other.grown);
        self.invalid.extend(other.invalid);
        self.images_verified += other.images_verified;
        self.image_differences.extend(other.image_differences);
        self.image_difference_count += other.image_difference_count;
        self.pages_read += other.pages_read;
        self.pages_evicted += other.pages_evicted;
        self.took += other.took;
        if let Some((lsn, error)) = other.failure {
            self.fail(lsn, error);
        }
    }

    fn note_free_space(&mut self, map: u32, lsn: Lsn, free: FreeSpace) {
        let (block, slot) = fsm::location(free.block);
        let change = FsmChange::Set { slot, category: fsm::category(free.free_bytes) };
        self.fsm.push(FsmOp { key: PageKey::new(map, block), lsn, change });
    }
}

/// A page's free space as the batch's records said last, and the end of the record that said so.
///
/// What earlier ones said is overwritten: each entry of the map tells of one page, and those above it are made from these.
/// But a page of the map comes into being with the first entry that is not zero, and stays, even if that becomes zero.
/// And a truncation in between brings upper levels of the map up to date, for which it must be told all that was said before.
#[derive(Default)]
struct LastFreeSpace<'c> {
    last: Option<(Lsn, FreeSpace)>,
    cuts: Option<&'c ForkCuts>,
}

impl LastFreeSpace<'_> {
    /// Takes what a record says. Returns what the map must be told before.
    fn say(&mut self, lsn: Lsn, free: FreeSpace) -> Option<(Lsn, FreeSpace)> {
        let before = self.last.replace((lsn, free));
        before.filter(|(told, before)| {
            let becomes_zero = fsm::category(free.free_bytes) == 0 && fsm::category(before.free_bytes) != 0;
            becomes_zero || self.cuts.is_some_and(|cuts| cuts.is_between(*told, lsn))
        })
    }
}

/// Operations on a page with less WAL between them, in bytes, are one visit: they come of one transaction, or of few that fill
/// the page.
const BURST: u64 = 64 << 10;

/// What passes over neighbours has less WAL between them, in bytes: of eight images, and of what others do meanwhile.
const PASS: u64 = 1 << 20;

/// What some operations tell of those to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Pages.
    pub pages: usize,
    /// Of these, those that are not in memory.
    pub missing: usize,
    /// How often one of them was visited, after a pause.
    pub visits: usize,
}

impl Sample {
    /// How many pages there are, if each visit goes to any of them: of n pages, k visits meet n (1 - exp(-k / n)).
    pub fn working_set(&self) -> f64 {
        let (pages, visits) = (self.pages as f64, self.visits as f64);
        if self.visits <= self.pages {
            return if self.pages == 0 { 0.0 } else { f64::INFINITY };
        }
        let (mut low, mut high) = (pages, 1e3 * visits * visits);
        for _ in 0..60 {
            let middle = (low * high).sqrt();
            if middle * (1.0 - (-visits / middle).exp()) < pages { low = middle } else { high = middle }
        }
        low
    }
}

/// At most this many differing images are told one by one.
const DIFFERENCES_TOLD: usize = 20;

/// Pages that are read, and then worked on, in one go, while the next ones are on their way.
const CHUNK: usize = 256;

/// How many operations ahead records are fetched into the processor's cache.
const PREFETCH: usize = 6;

struct Slot {
    key: PageKey,
    /// Where its bytes are, if they are in memory.
    frame: Option<u32>,
    exists: bool,
    dirty: bool,
    /// The batch that last touched it.
    batch: u64,
    /// Its operations in this batch: where they begin in `runs`, and how many there are.
    first: u32,
    count: u32,
}

/// An operation on its way to its page.
#[derive(Clone, Copy)]
struct RunOp {
    part: u32,
    place: Place,
    change: Change,
}

/// Where a record is in a batch: within a part of it, in bytes of its WAL.
fn position(part: u32, place: Place) -> u64 {
    u64::from(part) << 32 | u64::from(place)
}

/// One partition: cached pages, and scratch space that is reused from batch to batch.
pub struct Partition {
    frames: Frames,
    index: FxHashMap<PageKey, u32>,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    resident: usize,
    batch: u64,
    /// Pages of this batch and their slots.
    touched: Vec<(PageKey, u32)>,
    visited: usize,
    slot_of_op: Vec<u32>,
    runs: Vec<RunOp>,
    /// Pages on their way from a file to their frames.
    read_buffer: Vec<u8>,
}

impl Partition {
    /// An empty one, whose memory comes `slab_pages` pages at a time.
    pub fn new(slab_pages: usize) -> Partition {
        Partition {
            frames: Frames::new(slab_pages),
            index: FxHashMap::default(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            resident: 0,
            batch: 0,
            touched: Vec::new(),
            visited: 0,
            slot_of_op: Vec::new(),
            runs: Vec::new(),
            read_buffer: Vec::new(),
        }
    }

    /// Pages that are held in memory.
    pub fn resident(&self) -> usize {
        self.resident
    }

    /// Bytes of memory that it holds, used or not, but for pages.
    pub fn held_bytes(&self) -> usize {
        // A hash table has a byte more for each entry, and more entries than it says, by a seventh.
        self.index.capacity() / 7 * 8 * (size_of::<(PageKey, u32)>() + 1)
            + self.slots.capacity() * size_of::<Slot>()
            + (self.free_slots.capacity() + self.slot_of_op.capacity()) * size_of::<u32>()
            + self.touched.capacity() * size_of::<(PageKey, u32)>()
            + self.runs.capacity() * size_of::<RunOp>()
            + self.read_buffer.capacity()
    }

    /// Operations of the last batch.
    pub fn operations(&self) -> usize {
        self.runs.len()
    }

    /// Bytes of memory for pages, used or not.
    pub fn frame_bytes(&self) -> usize {
        self.frames.bytes()
    }

    /// Pages that the last batch had something to do for.
    pub fn visited(&self) -> usize {
        self.visited
    }

    fn slot_for(&mut self, key: PageKey) -> u32 {
        if let Some(&slot) = self.index.get(&key) {
            return slot;
        }
        let slot = Slot { key, frame: None, exists: false, dirty: false, batch: 0, first: 0, count: 0 };
        let number = match self.free_slots.pop() {
            Some(number) => {
                self.slots[number as usize] = slot;
                number
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        self.index.insert(key, number);
        number
    }

    fn touch(&mut self, key: PageKey) -> u32 {
        let number = self.slot_for(key);
        let slot = &mut self.slots[number as usize];
        if slot.batch != self.batch {
            slot.batch = self.batch;
            slot.count = 0;
            self.touched.push((key, number));
        }
        number
    }

    /// Groups the batch's operations of this partition by page. `dropped[fork]`: the fork is dropped in this batch,
    /// so that nothing needs to be done to it. Returns how many pages must be brought into memory.
    pub fn gather(&mut self, number: usize, batch: u64, parts: &[Part<'_>], dropped: &[bool]) -> usize {
        assert!(self.batch < batch, "batch {batch} after {}", self.batch);
        self.batch = batch;
        self.touched.clear();
        self.slot_of_op.clear();
        let is_dropped = |key: PageKey| dropped.get(key.fork() as usize).copied().unwrap_or(false);
        let ops_of = |part: &Part<'_>| part.planned.plan.ops[number].len();
        self.slot_of_op.reserve(parts.iter().map(ops_of).sum());
        for part in parts {
            for op in part.cut(&part.planned.plan.ops[number]) {
                if is_dropped(op.key) {
                    continue;
                }
                let slot = self.touch(op.key);
                self.slots[slot as usize].count += 1;
                self.slot_of_op.push(slot);
            }
        }
        self.touched.sort_unstable();
        let mut first = 0;
        for &(_, slot) in &self.touched {
            let slot = &mut self.slots[slot as usize];
            slot.first = first;
            first += slot.count;
            slot.count = 0;
        }
        self.visited = self.touched.len();
        self.runs.clear();
        self.runs.resize(first as usize, RunOp { part: 0, place: Place::default(), change: Change::Block(0) });
        let mut slots = self.slot_of_op.iter();
        for (part_number, part) in (0..).zip(parts) {
            for op in part.cut(&part.planned.plan.ops[number]) {
                if is_dropped(op.key) {
                    continue;
                }
                let slot = &mut self.slots[*slots.next().expect("one for each operation") as usize];
                let at = (slot.first + slot.count) as usize;
                self.runs[at] = RunOp { part: part_number, place: op.place, change: op.change };
                slot.count += 1;
            }
        }
        self.touched.iter().filter(|&&(_, slot)| self.slots[slot as usize].frame.is_none()).count()
    }

    /// What the operations of `parts` on this partition's pages, it being the one of this number, tell of what is to come.
    pub fn sample(&self, parts: &[Part<'_>], number: usize) -> Sample {
        let mut last: FxHashMap<PageKey, u64> = FxHashMap::default();
        let mut sample = Sample::default();
        for (nth, part) in (0..).zip(parts) {
            for op in part.cut(&part.planned.plan.ops[number]) {
                let at = position(nth, op.place);
                match last.insert(op.key, at) {
                    Some(before) if at - before < BURST => {}
                    Some(_) => sample.visits += 1,
                    None => {
                        sample.visits += 1;
                        sample.pages += 1;
                        let slot = self.index.get(&op.key);
                        sample.missing +=
                            usize::from(slot.is_none_or(|&slot| self.slots[slot as usize].frame.is_none()));
                    }
                }
            }
        }
        sample
    }

    /// Redoes the batch's operations, page by page. At most `quota` pages are in memory at a time, if there is one.
    pub fn work(&mut self, parts: &[Part<'_>], shared: &Shared<'_>, quota: Option<usize>, report: &mut Report) {
        let step = quota.map_or(CHUNK, |quota| (quota / 2).clamp(1, CHUNK));
        let chunk_at = |from: usize, count: usize| from.min(count)..(from + step).min(count);
        let count = self.touched.len();
        let mut chunk = chunk_at(0, count);
        self.read_ahead(chunk.clone(), shared);
        while !chunk.is_empty() && report.failure.is_none() {
            let next = chunk_at(chunk.end, count);
            self.read_ahead(next.clone(), shared);
            if let Some(quota) = quota {
                let pages = &self.touched[chunk.clone()];
                let keys = pages[0].0..=pages[pages.len() - 1].0;
                let missing = pages.iter().filter(|&&(_, slot)| self.slots[slot as usize].frame.is_none()).count();
                match self.make_room(keys, missing, quota, shared) {
                    Ok(evicted) => report.pages_evicted += evicted as u64,
                    Err(error) => return report.fail(Lsn::INVALID, error),
                }
            }
            self.load(chunk.clone(), parts, shared, report);
            if report.failure.is_none() {
                self.apply(chunk, parts, shared, report);
            }
            chunk = next;
        }
        if quota.is_none() {
            report.passed_over = self.passed_over(parts, shared.settings.env.major);
        }
    }

    /// The slots of pages of the batch that something has passed over, as VACUUM does, or CREATE INDEX. Of such a page there is an
    /// image, close to those of its neighbours in the WAL. Where pages change at random, neighbours come far from each other.
    fn passed_over(&self, parts: &[Part<'_>], major: Major) -> Vec<u32> {
        let has_image = |op: &RunOp| {
            let Change::Overwrite(id) = op.change else { return false };
            let mut record = Record::empty(major);
            read_record(&mut record, &parts[op.part as usize], op.place);
            record.block(id).is_some_and(|block| block.image.is_some())
        };
        let ends = |&(_, slot): &(PageKey, u32)| {
            let Slot { first, count, .. } = self.slots[slot as usize];
            [first, first + count - 1].map(|at| self.runs[at as usize])
        };
        let is_passed_over = |pages: &&[(PageKey, u32)]| {
            let (mut begin, mut end) = (u64::MAX, 0);
            let is_near = |page| {
                let [first, last]: [RunOp; 2] = ends(page);
                (begin, end) = (begin.min(position(first.part, first.place)), end.max(position(last.part, last.place)));
                matches!(first.change, Change::Overwrite(_)) && end - begin < PASS
            };
            pages.len() == NEIGHBOURS && pages.iter().all(is_near) && pages.iter().all(|page| has_image(&ends(page)[0]))
        };
        let neighbours = self.touched.chunk_by(|a, b| a.0.neighbours() == b.0.neighbours());
        neighbours.filter(is_passed_over).flatten().map(|&(_, slot)| slot).collect()
    }

    /// Redoes the operations on the pages of `chunk`, places in `touched`.
    fn apply(&mut self, chunk: Range<usize>, parts: &[Part<'_>], shared: &Shared<'_>, report: &mut Report) {
        let mut current: Option<(u32, Arc<RelFork>)> = None;
        let mut record = Record::empty(shared.settings.env.major);
        for nth in chunk {
            let number = self.touched[nth].1;
            if let Some(frame) = self.touched.get(nth + 2).and_then(|&(_, later)| self.slots[later as usize].frame) {
                // All of it: most changes look at the header and at line pointers, and many move tuples.
                self.frames.page(frame).iter().step_by(64).for_each(prefetch);
            }
            let slot = &mut self.slots[number as usize];
            let (_, fork) = match &mut current {
                Some(known) if known.0 == slot.key.fork() => known,
                other => other.insert((slot.key.fork(), shared.rels.fork(slot.key.fork()))),
            };
            let Some(frame) = slot.frame else {
                // The batch only names it.
                self.release(number);
                continue;
            };
            let existed = slot.exists;
            let bytes = self.frames.page_mut(frame);
            let mut target = Target { bytes, exists: slot.exists, dirty: slot.dirty };
            let mut free_space = LastFreeSpace::default();
            for at in slot.first as usize..(slot.first + slot.count) as usize {
                // Records of a page lie far apart in the batch: have the next ones on their way.
                if let Some(next) = self.runs.get(at + PREFETCH) {
                    parts[next.part as usize].planned.stretch.prefetch(next.place);
                }
                let op = &self.runs[at];
                read_record(&mut record, &parts[op.part as usize], op.place);
                let mut work =
                    PageWork { record: &record, fork, key: slot.key, shared, report, free_space: &mut free_space };
                if let Err(error) = work.change(op.change, &mut target) {
                    let failure = RedoFailure::new(&record, fork, slot.key.block(), error);
                    report.fail(record.lsn, ReplayError::Redo(failure));
                    break;
                }
            }
            (slot.exists, slot.dirty) = (target.exists, target.dirty);
            if slot.exists && !existed {
                fork.grow_to(slot.key.block() + 1);
                report.grown.push(slot.key.fork());
            }
            if let Some((lsn, free)) = free_space.last {
                report.note_free_space(fork.free_space_map(shared.rels), lsn, free);
            }
        }
    }

    /// Applies changes of free space map pages, which are sorted by page and LSN. At most `quota` pages are in memory at a time, if there is one.
    pub fn apply_fsm(
        &mut self,
        batch: u64,
        ops: &[FsmOp],
        parts: &[Part<'_>],
        shared: &Shared<'_>,
        quota: Option<usize>,
        report: &mut Report,
    ) {
        self.batch = batch;
        self.touched.clear();
        for ops in ops.chunk_by(|a, b| a.key == b.key) {
            let key = ops[0].key;
            let number = self.touch(key);
            if self.slots[number as usize].frame.is_none() {
                match quota.map_or(Ok(0), |quota| self.make_room(key..=key, 1, quota, shared)) {
                    Ok(evicted) => report.pages_evicted += evicted as u64,
                    Err(error) => return report.fail(Lsn::INVALID, error),
                }
                self.bring_in(&[number], &[true], &[ops[0].lsn], shared, report);
            }
            let slot = &mut self.slots[number as usize];
            let fork = shared.rels.fork(slot.key.fork());
            let Some(frame) = slot.frame else { continue };
            let bytes = self.frames.page_mut(frame);
            let existed = slot.exists;
            let mut target = Target { bytes, exists: slot.exists, dirty: slot.dirty };
            for op in ops {
                match op.change {
                    FsmChange::Set { slot, category } => {
                        fsm::record_free_space(&mut target, slot, category);
                    }
                    FsmChange::Redo { part, place, block } => {
                        let mut record = Record::empty(shared.settings.env.major);
                        read_record(&mut record, &parts[part as usize], place);
                        let (fork, key, free_space) = (&*fork, slot.key, &mut LastFreeSpace::default());
                        let mut work = PageWork { record: &record, fork, key, shared, report, free_space };
                        if let Err(error) = work.change(Change::Block(block), &mut target) {
                            let failure = RedoFailure::new(&record, fork, slot.key.block(), error);
                            report.fail(record.lsn, ReplayError::Redo(failure));
                            break;
                        }
                    }
                }
            }
            (slot.exists, slot.dirty) = (target.exists, target.dirty);
            if slot.exists && !existed {
                fork.grow_to(slot.key.block() + 1);
                report.grown.push(slot.key.fork());
            }
        }
    }
}

/// The record at a place of a part; it was parsed once when it was planned.
#[inline]
fn read_record<'a>(record: &mut Record<'a>, part: &Part<'a>, place: Place) {
    part.planned.stretch.read(place, record).expect("parsed when it was planned");
}

/// One change of one page.
struct PageWork<'r, 'a> {
    record: &'r Record<'r>,
    fork: &'r RelFork,
    key: PageKey,
    shared: &'r Shared<'a>,
    report: &'r mut Report,
    free_space: &'r mut LastFreeSpace<'a>,
}

impl PageWork<'_, '_> {
    fn change(&mut self, change: Change, target: &mut Target<'_>) -> Result<(), RedoError> {
        let id = match change {
            Change::VmClear(nth) => {
                let clears = vm::unregistered_clears(self.record)?;
                let clear = clears.get(usize::from(nth)).ok_or(RedoError::BlockReference(0))?;
                vm::clear_unregistered(target, clear);
                return Ok(());
            }
            Change::Lock => {
                if !target.exists {
                    self.report.invalid.push(self.key);
                }
                return Ok(());
            }
            Change::Block(id) | Change::Overwrite(id) => id,
        };
        let block = self.record.block(id).ok_or(RedoError::BlockReference(id))?;
        let mut effects = Effects::default();
        let outcome = redo_block(self.record, block, target, &self.shared.settings.env, &mut effects)?;
        if outcome == Outcome::NotFound {
            self.report.invalid.push(self.key);
        }
        if let Some(free) = effects.free_space
            && let Some((lsn, before)) = self.free_space.say(self.record.end, free)
        {
            self.report.note_free_space(self.fork.free_space_map(self.shared.rels), lsn, before);
        }
        // One that is not there, or is all zeros, is on the list of those. Where replay begins again, it is from later on in the WAL,
        // and has no LSN to say so.
        if self.shared.settings.verify_images && outcome != Outcome::NotFound && block.image.is_some() {
            self.verify(block, target)?;
        }
        Ok(())
    }

    fn verify(&mut self, block: &walrider_wal::record::BlockRef<'_>, target: &Target<'_>) -> Result<(), RedoError> {
        let check = mask::check_image(self.record, block, target.bytes)?;
        if check == mask::ImageCheck::Unchecked {
            return Ok(());
        }
        self.report.images_verified += 1;
        let mask::ImageCheck::Different(offset, field) = check else { return Ok(()) };
        let difference = format!("{field} (offset {offset} of the page)");
        self.report.image_difference_count += 1;
        if self.report.image_differences.len() < DIFFERENCES_TOLD {
            let rmgr = self.record.header.rmgr;
            let name = rmgr.get().and_then(|known| (known.identify)(self.record.info())).unwrap_or("UNKNOWN");
            let what = format!("{rmgr}/{name} {} {} block {}", self.fork.rel, self.fork.fork.name(), block.block);
            self.report.image_differences.push(ImageDifference { lsn: self.record.lsn, what, at: difference });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use walrider_datadir::relation::RelationFiles;
    use walrider_layout::page::PageMut;
    use walrider_layout::{BLCKSZ, ForkNumber, Major, PageBytes, RelFileLocator};
    use walrider_wal::record::XLR_CHECK_CONSISTENCY;
    use walrider_wal::records::heap2::XLOG_HEAP2_VISIBLE;
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    use super::*;
    use crate::rels::RelTable;

    /// Replay was killed while it wrote a table that had been cut off and had grown again: pages in front of those that were written were
    /// zeros. When it began again, with `--verify-images`, it said that they differed from images of what they had been before the cut.
    #[test]
    fn a_page_that_is_not_there_has_no_image_to_equal() {
        let mut before = [0; BLCKSZ];
        PageMut(&mut before).init(0);
        PageMut(&mut before).set_lower(28);
        let bytes = RecordBuilder::new(RmgrId::HEAP2, XLOG_HEAP2_VISIBLE | XLR_CHECK_CONSISTENCY)
            .main_data([0, 0, 0, 0, 3])
            .block(0, TEST_REL, ForkNumber::VisibilityMap, 0)
            .block(1, TEST_REL, ForkNumber::Main, 7)
            .image(0, 0, 0, before)
            .build();
        let record = RecordBuilder::parse(&bytes, Lsn(800));
        let (dir, rels) = (tempfile::tempdir().unwrap(), RelTable::default());
        let files = RelationFiles::new(dir.path(), "PG_18_202506291", false);
        let env = Env { major: Major::V18, hint_bits_are_logged: false };
        let settings = PageSettings { env, checksums: false, verify_images: true };
        let shared = Shared { rels: &rels, files: &files, settings };
        let number = rels.number(TEST_REL, ForkNumber::Main);
        let verify = |page: &mut PageBytes| {
            let (mut report, free_space) = (Report::default(), &mut LastFreeSpace::default());
            let (fork, key) = (&*rels.fork(number), PageKey::new(number, 7));
            let mut target = Target { bytes: page, exists: true, dirty: false };
            let mut work = PageWork { record: &record, fork, key, shared: &shared, report: &mut report, free_space };
            work.change(Change::Block(1), &mut target).unwrap();
            (report.invalid, report.images_verified, report.image_difference_count)
        };
        assert_eq!(verify(&mut [0; BLCKSZ]), (vec![PageKey::new(number, 7)], 0, 0));
        assert_eq!(verify(&mut before.clone()), (vec![], 1, 0));
        PageMut(&mut before).set_lower(32);
        assert_eq!(verify(&mut before), (vec![], 1, 1));
    }

    /// A table was filled within one batch. PostgreSQL made pages of its free space map, with entries that became zero
    /// again; ours stayed empty, as only the zeros were told.
    #[test]
    fn free_space_that_went_to_zero_is_told_twice() {
        let rel = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };
        let free = |free_bytes| FreeSpace { rel, block: 7, free_bytes };
        let mut last = LastFreeSpace::default();
        assert_eq!(last.say(Lsn(8), free(0)), None);
        assert_eq!(last.say(Lsn(16), free(4000)), None);
        assert_eq!(last.say(Lsn(24), free(2000)), None);
        assert_eq!(last.say(Lsn(32), free(0)), Some((Lsn(24), free(2000))));
        assert_eq!(last.say(Lsn(40), free(0)), None);
        assert_eq!(last.last, Some((Lsn(40), free(0))));
    }

    /// Upper levels of the map get what was said before the truncation that brings them up to date.
    #[test]
    fn free_space_before_a_truncation_is_told() {
        let rel = RelFileLocator { tablespace: 1663, database: 5, relation: 16384 };
        let free = |free_bytes| FreeSpace { rel, block: 7, free_bytes };
        let cuts = ForkCuts::new(vec![(Lsn(20), 9)]);
        let mut last = LastFreeSpace { last: None, cuts: Some(&cuts) };
        assert_eq!(last.say(Lsn(8), free(4000)), None);
        assert_eq!(last.say(Lsn(16), free(3000)), None);
        assert_eq!(last.say(Lsn(24), free(2000)), Some((Lsn(16), free(3000))));
        assert_eq!(last.say(Lsn(32), free(1000)), None);
    }
}
