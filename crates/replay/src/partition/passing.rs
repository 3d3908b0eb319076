//! Redo of pages that pass: those of a base backup on their way into the data directory.

use std::sync::Mutex;

use rayon::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use walrider_datadir::behind::{Behind, with_write_behind};
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, RELSEG_SIZE};

use super::sweep::{Op, Operations, PageAtWork, RunToWrite, Sweep, Tails, Visit, What, visits};
use super::told::{MapRecords, Told};
use super::{Report, Shared};
use crate::base::PassPages;
use crate::cuts::{ForkCuts, Needless, TailChange};
use crate::error::ReplayError;
use crate::gaps::Gaps;
use crate::rels::PageKey;
use crate::spill::entry::{self, Operation};
use crate::spill::runs::{BlockRange, Ranges};

/// A spilled batch that pages pass.
pub struct Passing<'a> {
    shared: &'a Shared<'a>,
    needless: &'a Needless,
    ranges: Ranges,
    gaps: &'a Gaps,
    /// Of the files that pass just now, the ranges that they are at.
    at_work: Mutex<FxHashMap<SegmentFile, AtWork>>,
    passed: Mutex<Passed>,
    told: Mutex<Told>,
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

/// A range whose pages pass.
struct AtWork {
    range: BlockRange,
    /// Chunks of it that are read, in how many parts, and whether these are all.
    next: usize,
    parts: usize,
    is_read: bool,
    tails: Tails,
    /// Of the part that was read last, entries and what is to be done.
    bytes: Vec<u8>,
    ops: Vec<Op>,
    visits: Vec<Visit>,
    /// The last page of all parts.
    last: Option<PageKey>,
    /// Something is left out that others must be told of.
    is_cut: bool,
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
        let (at_work, passed, told) = Default::default();
        let mut passing = Passing { shared, needless, ranges, gaps, at_work, passed, told };
        let mut records = MapRecords::default();
        passing.each_of_maps(|found, _| {
            records.note(&found.maps);
            Ok(())
        })?;
        records.note(&passing.map_tails());
        passing.told = Mutex::new(Told::new(records));
        Ok(passing)
    }

    fn sweep(&self) -> Sweep<'a> {
        Sweep::new(self.shared, self.needless, Vec::new(), self.gaps)
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
            bytes: Vec::new(),
            ops: Vec::new(),
            visits: Vec::new(),
            last: None,
            is_cut: false,
        };
        self.read(&mut at_work)?;
        Ok(at_work)
    }

    /// Reads the next part of what is done to the pages of a range, if there is one.
    fn read(&self, at_work: &mut AtWork) -> Result<bool, ReplayError> {
        if at_work.is_read {
            return Ok(false);
        }
        let AtWork { range, next, bytes, .. } = at_work;
        at_work.is_read = !self.ranges.read(*range, next, bytes)?;
        let mut found = self.sweep().operations(bytes);
        let before = if at_work.is_read { Lsn(u64::MAX) } else { found.end };
        at_work.tails.add_before(before, &mut found);
        found.pages.retain(|op| range.has(op.key));
        at_work.parts += 1;
        at_work.is_cut |= !found.cut.is_empty();
        at_work.visits = visits(&mut found.pages);
        at_work.ops = found.pages;
        at_work.last = at_work.last.max(at_work.visits.last().map(|visit| visit.key));
        Ok(true)
    }

    /// Pages of a range before the block `end` have passed, and no more of them will.
    fn give_up(&self, at_work: AtWork, end: BlockNumber) {
        let AtWork { range, is_read, last, is_cut, .. } = at_work;
        if is_read && !is_cut && last.is_none_or(|last| last.block() < end && !self.needless.is_behind(last)) {
            self.passed.lock().expect("no panic while locked").done.insert(range.first);
        }
    }

    /// Hands `each` what is to be done to free space maps, in the order of the WAL, and the entries that it is from.
    fn each_of_maps(
        &self,
        mut each: impl FnMut(Operations, &[u8]) -> Result<(), ReplayError>,
    ) -> Result<(), ReplayError> {
        let (sweep, mut next, mut bytes) = (self.sweep(), 0, Vec::new());
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
        self.told.lock().expect("no panic while locked").take(std::mem::take(&mut report.fsm));
    }

    /// Does what is left when all has passed: pages that the files did not have, or no longer have, and the free space maps.
    pub fn finish(self) -> Report {
        let mut passed = std::mem::take(&mut *self.passed.lock().expect("no panic while locked"));
        let mut report = std::mem::take(&mut passed.report);
        if let Err(error) = self.finish_ranges(&passed, &mut report) {
            report.fail(Lsn::INVALID, error);
        }
        report
    }

    fn finish_ranges(&self, passed: &Passed, report: &mut Report) -> Result<(), ReplayError> {
        self.needless.cut_files(self.shared)?;
        let left = self.ranges.left(&passed.done);
        let finish = |number, behind: &Behind<'_, RunToWrite>| {
            let mut report = Report::default();
            if let Err(error) = self.finish_partition(number, passed, behind, &mut report) {
                report.fail(Lsn::INVALID, error);
            }
            report
        };
        let reports: Vec<Report> = with_write_behind(self.shared.files, self.ranges.write_bytes(), |behind| {
            left.into_par_iter().with_max_len(1).map(|number| finish(number, behind)).collect()
        });
        reports.into_iter().for_each(|other| report.add(other));
        if report.failure.is_none() {
            self.finish_maps(report)?;
        }
        Ok(())
    }

    /// Does all that is done to free space maps.
    fn finish_maps(&self, report: &mut Report) -> Result<(), ReplayError> {
        let (records, in_order, told) =
            std::mem::take(&mut *self.told.lock().expect("no panic while locked")).into_parts();
        let mut sweep = self.sweep();
        // Of many images of a page, only the last is kept in memory.
        let mut kept = Vec::new();
        self.each_of_maps(|mut found, bytes| {
            sweep.note(&mut found, report)?;
            for &Op { key, order, ref what } in &found.maps {
                if let &What::Redo(place, change) = what
                    && !records.is_needless(key, Lsn(order))
                {
                    entry::copy(&mut kept, bytes, place, Operation { key, change });
                }
            }
            Ok(())
        })?;
        let mut maps = sweep.operations(&kept).maps;
        sweep.told(in_order, &mut maps);
        maps.extend(self.map_tails());
        maps.extend(told.filter(|op| !self.needless.is_dropped(op.key)));
        sweep.sweep(maps, &kept, report);
        Ok(())
    }

    /// Does what is left of a partition. Between its pages that lie close together there are none of others: a range has as many blocks as
    /// a request.
    fn finish_partition(
        &self,
        number: usize,
        passed: &Passed,
        behind: &Behind<'_, RunToWrite>,
        report: &mut Report,
    ) -> Result<(), ReplayError> {
        let has_passed = |key: PageKey| {
            let file = PageKey::new(key.fork(), key.block() / RELSEG_SIZE);
            !self.needless.is_behind(key) && passed.ends.get(&file).is_some_and(|&end| key.block() < end)
        };
        let (mut next, mut bytes, mut sweep) = (0, Vec::new(), self.sweep().write_behind(behind));
        let mut is_more = true;
        while is_more && report.failure.is_none() {
            is_more = self.ranges.read_partition(number, &mut next, &mut bytes)?;
            let mut found = sweep.operations(&bytes);
            sweep.note(&mut found, report)?;
            found.pages.retain(|op| !has_passed(op.key));
            sweep.sweep(found.pages, &bytes, report);
            self.take_told(report);
        }
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
        let end = (first + pages.len() as BlockNumber).min(least);
        let mut report = Report::default();
        let mut before = self.at_work.lock().expect("no panic while locked").remove(&file);
        let mut block = first;
        while block < end {
            let key = PageKey::new(number, block);
            let mut at_work = match before.take() {
                Some(before) if before.range.has(key) && before.parts == 1 => before,
                before => {
                    if let Some(before) = before {
                        self.give_up(before, block);
                    }
                    self.begin(self.ranges.at(key), fork.fork)?
                }
            };
            let upto = end.min(at_work.range.end);
            loop {
                let AtWork { visits, ops, bytes, .. } = &at_work;
                let from = visits.partition_point(|visit| visit.key < key);
                let behind = visits.partition_point(|visit| visit.key.block() < upto);
                for visit in visits[from..behind].iter().filter(|visit| visit.used) {
                    let page = &mut pages[(visit.key.block() - first) as usize];
                    let mut work =
                        PageAtWork { shared: self.shared, fork: &fork, cuts, visit, exists: true, bytes: page };
                    report.pages_read += 1;
                    work.redo(&ops[visit.ops.clone()], bytes, &mut report);
                }
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
            self.at_work.lock().expect("no panic while locked").insert(file, at_work);
        }
        self.take_told(&mut report);
        self.passed.lock().expect("no panic while locked").report.add(report);
        Ok(())
    }

    fn passed(&self, file: SegmentFile, end: BlockNumber) {
        let at_work = self.at_work.lock().expect("no panic while locked").remove(&file);
        if let Some(at_work) = at_work {
            self.give_up(at_work, end);
        }
        if let Some(number) = self.shared.rels.find(file.rel, file.fork) {
            let file = PageKey::new(number, file.segment);
            self.passed.lock().expect("no panic while locked").ends.insert(file, end);
        }
    }
}

#[cfg(test)]
mod tests;
