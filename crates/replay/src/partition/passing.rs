//! Redo of pages that pass: those of a base backup on their way into the data directory.

use std::sync::Mutex;

use rustc_hash::FxHashMap;
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, RELSEG_SIZE};

use super::sweep::{PageAtWork, Sweep, visits};
use super::{Report, Shared};
use crate::base::PassPages;
use crate::error::ReplayError;
use crate::gaps::Gaps;
use crate::spill::sorted::{BlockRange, Sorted};

/// A spilled batch that pages pass.
pub struct Passing<'a> {
    shared: &'a Shared<'a>,
    dropped: &'a [bool],
    sorted: Sorted,
    gaps: &'a Gaps,
    /// Where files that have passed end.
    ends: Mutex<FxHashMap<SegmentFile, BlockNumber>>,
    report: Mutex<Report>,
}

impl<'a> Passing<'a> {
    /// Nothing has passed yet. `dropped[fork]`: the fork is dropped in this batch.
    pub fn new(shared: &'a Shared<'a>, dropped: &'a [bool], sorted: Sorted, gaps: &'a Gaps) -> Passing<'a> {
        Passing { shared, dropped, sorted, gaps, ends: Mutex::default(), report: Mutex::default() }
    }

    fn sweep(&self) -> Sweep<'_> {
        Sweep::new(self.shared, self.dropped, self.gaps)
    }

    /// Does what is left when all has passed: pages that the files did not have, and the free space maps.
    pub fn finish(self) -> Report {
        let mut report = std::mem::take(&mut *self.report.lock().expect("no panic while locked"));
        if let Err(error) = self.finish_ranges(&mut report) {
            report.fail(Lsn::INVALID, error);
        }
        report
    }

    fn finish_ranges(&self, report: &mut Report) -> Result<(), ReplayError> {
        let ends = std::mem::take(&mut *self.ends.lock().expect("no panic while locked"));
        let (mut bytes, mut map_bytes, mut maps) = (Vec::new(), Vec::new(), Vec::new());
        let mut sweep = self.sweep();
        let mut ranges: Vec<BlockRange> = self.sorted.ranges().collect();
        ranges.sort_unstable();
        for range in ranges {
            let fork = self.shared.rels.fork(range.fork);
            let has_passed = |block: BlockNumber| {
                let file = SegmentFile { rel: fork.rel, fork: fork.fork, segment: block / RELSEG_SIZE };
                ends.get(&file).is_some_and(|&end| block < end)
            };
            if has_passed(range.end() - 1) {
                continue;
            }
            let mut next = 0;
            while report.failure.is_none() && self.sorted.read(range, &mut next, &mut bytes)? {
                if fork.fork == ForkNumber::FreeSpaceMap {
                    map_bytes.extend_from_slice(&bytes);
                    continue;
                }
                let mut ops = Vec::new();
                sweep.operations(&bytes, &mut ops, &mut Vec::new());
                ops.retain(|op| !has_passed(op.key.block()));
                sweep.sweep(ops, &bytes, report);
            }
        }
        sweep.operations(&map_bytes, &mut Vec::new(), &mut maps);
        sweep.told(std::mem::take(&mut report.fsm), &mut maps);
        if report.failure.is_none() {
            sweep.sweep(maps, &map_bytes, report);
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
        let end = first + pages.len() as BlockNumber;
        let (sweep, mut report, mut bytes) = (self.sweep(), Report::default(), Vec::new());
        let mut block = first;
        while block < end {
            let range = BlockRange::of(number, block);
            let upto = end.min(range.end());
            let mut next = 0;
            while self.sorted.read(range, &mut next, &mut bytes)? {
                let mut ops = Vec::new();
                sweep.operations(&bytes, &mut ops, &mut Vec::new());
                ops.retain(|op| (block..upto).contains(&op.key.block()));
                for visit in visits(&mut ops).iter().filter(|visit| visit.used) {
                    let page = &mut pages[(visit.key.block() - first) as usize];
                    let mut work = PageAtWork { shared: self.shared, fork: &fork, visit, exists: true, bytes: page };
                    report.pages_read += 1;
                    work.redo(&ops[visit.ops.clone()], &bytes, &mut report);
                }
            }
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
