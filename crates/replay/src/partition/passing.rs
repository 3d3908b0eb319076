//! Redo of pages that pass: those of a base backup on their way into the data directory.

use std::sync::Mutex;

use rustc_hash::FxHashMap;
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, RELSEG_SIZE};

use super::sweep::{Op, Operations, PageAtWork, Sweep, Tails, visits};
use super::{Report, Shared};
use crate::base::PassPages;
use crate::cuts::{ForkCuts, Needless, TailChange};
use crate::error::ReplayError;
use crate::gaps::Gaps;
use crate::rels::PageKey;
use crate::spill::sorted::{BlockRange, Sorted};

/// A spilled batch that pages pass.
pub struct Passing<'a> {
    shared: &'a Shared<'a>,
    needless: &'a Needless,
    sorted: Sorted,
    gaps: &'a Gaps,
    /// Where files that have passed end.
    ends: Mutex<FxHashMap<SegmentFile, BlockNumber>>,
    report: Mutex<Report>,
}

impl<'a> Passing<'a> {
    /// Nothing has passed yet.
    pub fn new(shared: &'a Shared<'a>, needless: &'a Needless, sorted: Sorted, gaps: &'a Gaps) -> Passing<'a> {
        Passing { shared, needless, sorted, gaps, ends: Mutex::default(), report: Mutex::default() }
    }

    fn sweep(&self) -> Sweep<'a> {
        Sweep::new(self.shared, self.needless, Vec::new(), self.gaps)
    }

    /// Does what is left when all has passed: pages that the files did not have, or no longer have, and the free space maps.
    pub fn finish(self) -> Report {
        let mut report = std::mem::take(&mut *self.report.lock().expect("no panic while locked"));
        if let Err(error) = self.finish_ranges(&mut report) {
            report.fail(Lsn::INVALID, error);
        }
        report
    }

    fn finish_ranges(&self, report: &mut Report) -> Result<(), ReplayError> {
        let ends = std::mem::take(&mut *self.ends.lock().expect("no panic while locked"));
        self.needless.cut_files(self.shared)?;
        let (mut bytes, mut map_bytes) = (Vec::new(), Vec::new());
        let mut sweep = self.sweep();
        let mut ranges: Vec<BlockRange> = self.sorted.ranges().collect();
        ranges.sort_unstable();
        for range in ranges {
            let fork = self.shared.rels.fork(range.fork);
            let has_passed = |block: BlockNumber| {
                let file = SegmentFile { rel: fork.rel, fork: fork.fork, segment: block / RELSEG_SIZE };
                let is_behind = self.needless.is_behind(PageKey::new(range.fork, block));
                !is_behind && ends.get(&file).is_some_and(|&end| block < end)
            };
            if fork.fork != ForkNumber::FreeSpaceMap && has_passed(range.end() - 1) {
                continue;
            }
            let mut next = 0;
            while report.failure.is_none() && self.sorted.read(range, &mut next, &mut bytes)? {
                if fork.fork == ForkNumber::FreeSpaceMap {
                    map_bytes.extend_from_slice(&bytes);
                    continue;
                }
                let mut found = sweep.operations(&bytes);
                sweep.note(&mut found, report)?;
                found.pages.retain(|op| !has_passed(op.key.block()));
                sweep.sweep(found.pages, &bytes, report);
            }
        }
        let mut found = sweep.operations(&map_bytes);
        sweep.note(&mut found, report)?;
        sweep.told(std::mem::take(&mut report.fsm), &mut found.maps);
        let tails = self.needless.tails(|tail| matches!(tail.change, TailChange::FreeSpaceMap(..)));
        found.maps.extend(tails.into_iter().map(Op::from));
        if report.failure.is_none() {
            sweep.sweep(found.maps, &map_bytes, report);
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
        let (sweep, mut report, mut bytes) = (self.sweep(), Report::default(), Vec::new());
        let mut redo = |mut ops: Vec<Op>, bytes: &[u8]| {
            for visit in visits(&mut ops).iter().filter(|visit| visit.used) {
                let page = &mut pages[(visit.key.block() - first) as usize];
                let mut work = PageAtWork { shared: self.shared, fork: &fork, cuts, visit, exists: true, bytes: page };
                report.pages_read += 1;
                work.redo(&ops[visit.ops.clone()], bytes, &mut report);
            }
        };
        let mut block = first;
        while block < end {
            let range = BlockRange::of(number, block);
            let upto = end.min(range.end());
            let is_here = |key: PageKey| key.fork() == number && (block..upto).contains(&key.block());
            let mut tails = Tails::from(match fork.fork {
                ForkNumber::VisibilityMap => self.needless.tails(|tail| is_here(tail.key)),
                _ => Vec::new(),
            });
            let mut next = 0;
            while self.sorted.read(range, &mut next, &mut bytes)? {
                let mut found = sweep.operations(&bytes);
                tails.add_before(found.end, &mut found);
                found.pages.retain(|op| is_here(op.key));
                redo(found.pages, &bytes);
            }
            let mut rest = Operations::default();
            tails.add_before(Lsn(u64::MAX), &mut rest);
            redo(rest.pages, &[]);
            block = upto;
        }
        if let Some((_, error)) = report.failure.take() {
            return Err(error);
        }
        self.report.lock().expect("no panic while locked").add(report);
        Ok(())
    }

    fn passed(&self, file: SegmentFile, end: BlockNumber) {
        self.ends.lock().expect("no panic while locked").insert(file, end);
    }
}
