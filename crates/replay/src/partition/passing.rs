//! Redo of a spilled batch: of pages that pass, those of a base backup on their way into the data directory, and of those in its files.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

use rayon::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use walrider_datadir::behind::{Behind, with_write_behind};
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, PageBytes, RELSEG_SIZE};

use super::sweep::{Op, Operations, PageAtWork, RunToWrite, Sweep, Tails, Visit, What, visits};
use super::told::{MapRecords, Told};
use super::{Report, Shared};
use crate::base::PassPages;
use crate::cuts::{ForkCuts, Needless, Tail, TailChange};
use crate::error::ReplayError;
use crate::gaps::Gaps;
use crate::rels::{PageKey, RelFork};
use crate::spill::LastRead;
use crate::spill::entry::{self, Operation};
use crate::spill::runs::{BlockRange, Ranges};
use crate::stages::Stages;

/// Pages that a thread works on before it looks for others.
const PAGES_AT_ONCE: usize = 8;

const NO_PANIC: &str = "no panic while locked";

/// A spilled batch, which pages may pass.
pub struct Passing<'a> {
    shared: &'a Shared<'a>,
    needless: &'a Needless,
    ranges: Ranges,
    gaps: &'a Gaps,
    /// Of the files that pass just now, the ranges that they are at.
    at_work: Mutex<FxHashMap<SegmentFile, AtWork>>,
    passed: Mutex<Passed>,
    told: Mutex<Told>,
    /// Memory of ranges that are done: memory that is new to the process takes as long as redo.
    spare: Mutex<Vec<ReadPart>>,
}

/// What has passed.
#[derive(Default)]
struct Passed {
    /// Where files end: by the number of the fork, and of the segment.
    ends: FxHashMap<PageKey, BlockNumber>,
    /// The first pages of ranges for which nothing is left to do.
    done: FxHashSet<PageKey>,
    report: Report,
}

impl Passed {
    /// Whether a page has got all that is done to it.
    fn has(&self, key: PageKey, needless: &Needless) -> bool {
        let file = PageKey::new(key.fork(), key.block() / RELSEG_SIZE);
        !needless.is_behind(key) && self.ends.get(&file).is_some_and(|&end| key.block() < end)
    }
}

/// Entries that were read, and what is to be done.
#[derive(Default)]
struct ReadPart {
    bytes: Vec<u8>,
    ops: Vec<Op>,
    visits: Vec<Visit>,
}

/// A range whose pages pass.
struct AtWork {
    range: BlockRange,
    /// Chunks of it that are read, in how many parts, and whether these are all.
    next: usize,
    parts: usize,
    is_read: bool,
    tails: Tails,
    part: ReadPart,
    /// The last page of all parts.
    last: Option<PageKey>,
    /// Something is left out that others must be told of.
    is_cut: bool,
    /// Ranges that follow in the file, begun already.
    ahead: VecDeque<AtWork>,
}

impl<'a> Passing<'a> {
    /// Nothing has passed yet.
    ///
    /// # Errors
    /// When what is to be done to free space maps cannot be read.
    pub fn new(
        shared: &'a Shared<'a>,
        needless: &'a Needless,
        ranges: Ranges,
        gaps: &'a Gaps,
    ) -> Result<Passing<'a>, ReplayError> {
        let (at_work, passed, told, spare) = Default::default();
        let mut passing = Passing { shared, needless, ranges, gaps, at_work, passed, told, spare };
        let mut records = MapRecords::default();
        passing.each_of_maps(|found, _| {
            records.note(&found.maps);
            Ok(())
        })?;
        records.note(&passing.map_tails());
        passing.told = Mutex::new(Told::new(records));
        Ok(passing)
    }

    /// Passes over pages to which truncations do `tails`.
    fn sweep(&self, tails: Vec<Tail>) -> Sweep<'a> {
        Sweep::new(self.shared, self.needless, tails, self.gaps)
    }

    /// Begins with a range.
    fn begin(&self, range: BlockRange, fork: ForkNumber) -> Result<AtWork, ReplayError> {
        let tails = match fork {
            ForkNumber::VisibilityMap => self.needless.tails(|tail| range.has(tail.key)),
            _ => Vec::new(),
        };
        let mut at_work = AtWork {
            range,
            next: 0,
            parts: 0,
            is_read: false,
            tails: tails.into(),
            part: self.spare.lock().expect(NO_PANIC).pop().unwrap_or_default(),
            last: None,
            is_cut: false,
            ahead: VecDeque::new(),
        };
        self.read(&mut at_work)?;
        Ok(at_work)
    }

    /// Begins with the range that has a page, behind another one or at the first of its file.
    fn go_on(&self, before: Option<AtWork>, key: PageKey, fork: ForkNumber) -> Result<AtWork, ReplayError> {
        let mut ahead = VecDeque::new();
        if let Some(mut before) = before {
            ahead = std::mem::take(&mut before.ahead);
            self.give_up(before, key.block());
        }
        let next = ahead.front().is_some_and(|next| next.range.has(key)).then(|| ahead.pop_front()).flatten();
        let mut at_work = next.map_or_else(|| self.begin(self.ranges.at(key), fork), Ok)?;
        at_work.ahead = ahead;
        Ok(at_work)
    }

    /// Begins with ranges that follow in the same file, one for each thread, as far as a thread may hold all of them.
    fn look_ahead(&self, range: BlockRange, fork: ForkNumber) -> Result<VecDeque<AtWork>, ReplayError> {
        let file = |range: BlockRange| range.first.block() / RELSEG_SIZE;
        let mut room = self.ranges.most_at_once().saturating_sub(self.ranges.cost(range));
        let next: Vec<BlockRange> = (self.ranges.after(range.first).take(rayon::current_num_threads()))
            .take_while(|&next| {
                let fits = self.ranges.cost(next) <= room && file(next) == file(range);
                room = room.saturating_sub(self.ranges.cost(next));
                fits
            })
            .collect();
        let begun = next.into_par_iter().with_max_len(1).map(|next| self.begin(next, fork));
        Ok(begun.collect::<Result<Vec<AtWork>, ReplayError>>()?.into())
    }

    /// Redoes what one part does to pages from the block `first` on.
    fn redo(&self, part: &ReadPart, fork: &RelFork, first: BlockNumber, mut pages: &mut [PageBytes]) -> Vec<Report> {
        let ReadPart { visits, ops, bytes } = part;
        let from = visits.partition_point(|visit| visit.key.block() < first);
        let behind =
            visits.partition_point(|visit| visit.key.block() < first.saturating_add(pages.len() as BlockNumber));
        let (mut work, mut next) = (Vec::new(), first);
        for visit in visits[from..behind].iter().filter(|visit| visit.used) {
            let (page, behind) = pages[(visit.key.block() - next) as usize..].split_first_mut().expect("one of these");
            (pages, next) = (behind, visit.key.block() + 1);
            let cuts = self.needless.cuts_of(visit.key.fork());
            work.push(PageAtWork { shared: self.shared, fork, cuts, visit, exists: true, bytes: page });
        }
        let redone = work.par_chunks_mut(PAGES_AT_ONCE).map(|work| {
            let mut report = Report { pages_read: work.len() as u64, ..Report::default() };
            for page in work {
                page.redo(&ops[page.visit.ops.clone()], bytes, &mut report);
            }
            report
        });
        redone.collect()
    }

    /// Reads the next part of what is done to the pages of a range, if there is one.
    fn read(&self, at_work: &mut AtWork) -> Result<bool, ReplayError> {
        if at_work.is_read {
            return Ok(false);
        }
        let AtWork { range, next, part: ReadPart { bytes, ops, .. }, .. } = at_work;
        at_work.is_read = !self.ranges.read(*range, next, bytes)?;
        let mut found = self.sweep(Vec::new()).operations_in(bytes, std::mem::take(ops));
        at_work.tails.add_to(&mut found, at_work.is_read);
        found.pages.retain(|op| range.has(op.key));
        at_work.parts += 1;
        at_work.is_cut |= !found.cut.is_empty();
        at_work.part.visits = visits(&mut found.pages);
        at_work.part.ops = found.pages;
        at_work.last = at_work.last.max(at_work.part.visits.last().map(|visit| visit.key));
        Ok(true)
    }

    /// Pages of a range before the block `end` have passed, and no more of them will.
    fn give_up(&self, at_work: AtWork, end: BlockNumber) {
        let AtWork { range, is_read, last, is_cut, part, ahead, .. } = at_work;
        // Some are enough: they keep what the largest range took.
        let mut spare = self.spare.lock().expect(NO_PANIC);
        spare.extend(ahead.into_iter().map(|ahead| ahead.part).chain([part]));
        spare.truncate(rayon::current_num_threads());
        if is_read && !is_cut && last.is_none_or(|last| last.block() < end && !self.needless.is_behind(last)) {
            self.passed.lock().expect(NO_PANIC).done.insert(range.first);
        }
    }

    /// Hands `each` what is to be done to free space maps, in the order of the WAL, and the entries that it is from.
    fn each_of_maps(
        &self,
        mut each: impl FnMut(Operations, &[u8]) -> Result<(), ReplayError>,
    ) -> Result<(), ReplayError> {
        let (sweep, mut next, mut bytes) = (self.sweep(Vec::new()), 0, Vec::new());
        let mut is_more = true;
        while is_more {
            is_more = self.ranges.read_maps(&mut next, &mut bytes)?;
            each(sweep.operations(&bytes), &bytes)?;
        }
        Ok(())
    }

    /// What truncations do to free space maps that stay.
    fn map_tails(&self) -> Vec<Op> {
        let tails = self.needless.tails(|tail| matches!(tail.change, TailChange::FreeSpaceMap(..)));
        tails.into_iter().map(Op::from).collect()
    }

    /// Takes what redo told free space maps.
    fn take_told(&self, report: &mut Report) {
        self.told.lock().expect(NO_PANIC).take(std::mem::take(&mut report.fsm));
    }

    /// Does what is left when all has passed that does: pages that the files have, but did not have or no longer have when they passed,
    /// and the free space maps. What threads read is noted.
    pub fn finish(mut self, stages: &Stages) -> Report {
        let mut passed = std::mem::take(&mut *self.passed.lock().expect(NO_PANIC));
        let mut report = std::mem::take(&mut passed.report);
        let left = self.ranges.take_left(&passed.done);
        if let Err(error) = self.finish_ranges(left, &passed, stages, &mut report) {
            report.fail(Lsn::INVALID, error);
        }
        report
    }

    fn finish_ranges(
        &self,
        left: Vec<LastRead>,
        passed: &Passed,
        stages: &Stages,
        report: &mut Report,
    ) -> Result<(), ReplayError> {
        self.needless.cut_files(self.shared)?;
        let mut tails =
            self.ranges.by_partition(self.needless.tails(|tail| {
                matches!(tail.change, TailChange::VisibilityMap(_)) && !passed.has(tail.key, self.needless)
            }));
        let left: Vec<(Mutex<LastRead>, Vec<Tail>)> = left
            .into_iter()
            .map(|left| {
                let tails = tails.remove(&Some(left.number)).unwrap_or_default();
                (Mutex::new(left), tails)
            })
            .collect();
        // Nothing else is done to these pages.
        self.sweep(tails.into_values().flatten().collect()).end(report);
        let finish = |nth: usize, behind: &Behind<'_, RunToWrite>| {
            let (partition, tails) = &left[nth];
            // Somebody may be at it already.
            if let Some(Ok(next)) = left.get(nth + 1).map(|(next, _)| next.try_lock()) {
                self.ranges.read_ahead(&next);
            }
            let (started, mut report) = (Instant::now(), Report { stages: Some(stages.clone()), ..Report::default() });
            let mut partition = partition.lock().expect(NO_PANIC);
            if let Err(error) = self.finish_partition(&mut partition, tails.clone(), passed, behind, &mut report) {
                report.fail(Lsn::INVALID, error);
            }
            report.took = started.elapsed();
            report
        };
        let reports: Vec<Report> = with_write_behind(self.shared.files, self.ranges.write_bytes(), |behind| {
            (0..left.len()).into_par_iter().with_max_len(1).map(|nth| finish(nth, behind)).collect()
        });
        reports.into_iter().for_each(|other| report.add(other));
        self.spare.lock().expect(NO_PANIC).clear();
        if report.failure.is_none() {
            self.finish_maps(report)?;
        }
        Ok(())
    }

    /// Does all that is done to free space maps.
    fn finish_maps(&self, report: &mut Report) -> Result<(), ReplayError> {
        let (records, in_order, told) = std::mem::take(&mut *self.told.lock().expect(NO_PANIC)).into_parts();
        let (mut sweep, tails) = (self.sweep(Vec::new()), self.map_tails());
        let is_cut: FxHashSet<PageKey> = tails.iter().map(|op| op.key).collect();
        let mut kept = Vec::new();
        self.each_of_maps(|mut found, bytes| {
            sweep.note(&mut found, report)?;
            found.maps.retain(|op| !records.is_needless(op.key, Lsn(op.order)));
            // Of many images of a page, only the last is left, which most of them have. Together they may be more than memory.
            let keeps_order = |op: &Op| records.is_ordered(op.key) || is_cut.contains(&op.key);
            let (in_order, mut last): (Vec<Op>, Vec<Op>) = found.maps.into_iter().partition(keeps_order);
            for Op { key, what, .. } in in_order {
                let What::Redo(place, change) = what else { unreachable!("these are from records") };
                entry::copy(&mut kept, bytes, place, Operation { key, change });
            }
            sweep.sweep(&mut last, bytes, report);
            Ok(())
        })?;
        let mut maps = sweep.operations(&kept).maps;
        sweep.told(in_order, &mut maps);
        maps.extend(tails);
        maps.extend(told.filter(|op| !self.needless.is_dropped(op.key)));
        sweep.sweep(&mut maps, &kept, report);
        Ok(())
    }

    /// Does what is left of a partition. Between its pages that lie close together there are none of others: a range has as many blocks as
    /// a request.
    fn finish_partition(
        &self,
        partition: &mut LastRead,
        tails: Vec<Tail>,
        passed: &Passed,
        behind: &Behind<'_, RunToWrite>,
        report: &mut Report,
    ) -> Result<(), ReplayError> {
        let mut part = self.spare.lock().expect(NO_PANIC).pop().unwrap_or_default();
        let mut sweep = self.sweep(tails).write_behind(behind);
        while report.failure.is_none() && self.ranges.read_left(partition, &mut part.bytes)? {
            sweep.pass(&part.bytes, &mut part.ops, |key| !passed.has(key, self.needless), report);
            self.take_told(report);
        }
        sweep.end(report);
        self.spare.lock().expect(NO_PANIC).push(part);
        Ok(())
    }
}

impl PassPages for Passing<'_> {
    fn pass(&self, file: SegmentFile, first: BlockNumber, pages: &mut [u8]) -> Result<(), ReplayError> {
        let Some(number) = self.shared.rels.find(file.rel, file.fork) else { return Ok(()) };
        if file.fork == ForkNumber::FreeSpaceMap {
            // Its pages come after all those that tell it something.
            return Ok(());
        }
        let fork = self.shared.rels.fork(number);
        let (pages, _) = pages.as_chunks_mut::<BLCKSZ>();
        let cuts = self.needless.cuts_of(number);
        let least = cuts.map_or(BlockNumber::MAX, ForkCuts::least);
        let end = first.saturating_add(pages.len() as BlockNumber).min(least);
        let mut report = Report::default();
        let mut before = self.at_work.lock().expect(NO_PANIC).remove(&file);
        let mut block = first;
        while block < end {
            let key = PageKey::new(number, block);
            let mut at_work = match before.take() {
                Some(before) if before.range.has(key) && before.parts == 1 => before,
                before => self.go_on(before, key, fork.fork)?,
            };
            let upto = end.min(at_work.range.end);
            loop {
                let here = &mut pages[(block - first) as usize..(upto - first) as usize];
                let redo = || self.redo(&at_work.part, &fork, block, here);
                let look_ahead = || match at_work.ahead.is_empty() && at_work.is_read {
                    true => self.look_ahead(at_work.range, fork.fork),
                    false => Ok(VecDeque::new()),
                };
                let (redone, ahead) = rayon::join(redo, look_ahead);
                redone.into_iter().for_each(|redone| report.add(redone));
                at_work.ahead.append(&mut ahead?);
                if !self.read(&mut at_work)? {
                    break;
                }
            }
            before = Some(at_work);
            block = upto;
        }
        if let Some((_, error)) = report.failure.take() {
            return Err(error);
        }
        if let Some(at_work) = before {
            self.at_work.lock().expect(NO_PANIC).insert(file, at_work);
        }
        self.take_told(&mut report);
        self.passed.lock().expect(NO_PANIC).report.add(report);
        Ok(())
    }

    fn passed(&self, file: SegmentFile, end: BlockNumber) {
        let at_work = self.at_work.lock().expect(NO_PANIC).remove(&file);
        if let Some(at_work) = at_work {
            self.give_up(at_work, end);
        }
        if let Some(number) = self.shared.rels.find(file.rel, file.fork) {
            let file = PageKey::new(number, file.segment);
            self.passed.lock().expect(NO_PANIC).ends.insert(file, end);
        }
    }
}

#[cfg(test)]
mod tests;
