//! Redo of pages that pass: those of a base backup on their way into the data directory.

use std::sync::Mutex;

use rustc_hash::FxHashMap;
use walrider_datadir::relation::SegmentFile;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, RELSEG_SIZE};

use super::sweep::{Op, PageAtWork, Sweep, Visit, visits};
use super::{Report, Shared};
use crate::base::PassPages;
use crate::error::ReplayError;
use crate::gaps::Gaps;
use crate::spill::sorted::{BlockRange, Sorted};

/// What a range's pages get.
struct Loaded {
    range: BlockRange,
    bytes: Vec<u8>,
    ops: Vec<Op>,
    visits: Vec<Visit>,
}

/// A spilled batch that pages pass.
pub struct Passing<'a> {
    shared: &'a Shared<'a>,
    dropped: &'a [bool],
    sorted: Sorted,
    gaps: &'a Gaps,
    /// The range that each file is in.
    at_work: Mutex<FxHashMap<SegmentFile, Loaded>>,
    /// Where files that have passed end.
    ends: Mutex<FxHashMap<SegmentFile, BlockNumber>>,
    report: Mutex<Report>,
}

impl<'a> Passing<'a> {
    /// Nothing has passed yet. `dropped[fork]`: the fork is dropped in this batch.
    pub fn new(shared: &'a Shared<'a>, dropped: &'a [bool], sorted: Sorted, gaps: &'a Gaps) -> Passing<'a> {
        Passing {
            shared,
            dropped,
            sorted,
            gaps,
            at_work: Mutex::default(),
            ends: Mutex::default(),
            report: Mutex::default(),
        }
    }

    fn load(&self, range: BlockRange) -> Result<Loaded, ReplayError> {
        let (mut bytes, mut ops) = (Vec::new(), Vec::new());
        self.sorted.read(range, &mut bytes)?;
        self.sweep().operations(&bytes, &mut ops, &mut Vec::new());
        let visits = visits(&mut ops);
        Ok(Loaded { range, bytes, ops, visits })
    }

    fn sweep(&self) -> Sweep<'_> {
        Sweep::new(self.shared, self.dropped, self.gaps)
    }

    /// Does what is left when all has passed: pages that the files did not have, and the free space maps.
    pub fn finish(self) -> Report {
        let mut report = std::mem::take(&mut *self.report.lock().expect("no panic while locked"));
        let ends = std::mem::take(&mut *self.ends.lock().expect("no panic while locked"));
        let (mut map_bytes, mut maps) = (Vec::new(), Vec::new());
        let mut sweep = self.sweep();
        let mut ranges: Vec<BlockRange> = self.sorted.ranges().collect();
        ranges.sort_unstable();
        let mut bytes = Vec::new();
        for range in ranges {
            let fork = self.shared.rels.fork(range.fork);
            let has_passed = |block: BlockNumber| {
                let file = SegmentFile { rel: fork.rel, fork: fork.fork, segment: block / RELSEG_SIZE };
                ends.get(&file).is_some_and(|&end| block < end)
            };
            if let Err(error) = self.sorted.read(range, &mut bytes) {
                report.fail(Lsn::INVALID, error);
            }
            if report.failure.is_some() {
                return report;
            }
            if fork.fork == ForkNumber::FreeSpaceMap {
                map_bytes.extend_from_slice(&bytes);
            } else if !has_passed(range.end() - 1) {
                let mut ops = Vec::new();
                sweep.operations(&bytes, &mut ops, &mut Vec::new());
                ops.retain(|op| !has_passed(op.key.block()));
                sweep.sweep(ops, &bytes, &mut report);
            }
        }
        sweep.operations(&map_bytes, &mut Vec::new(), &mut maps);
        sweep.told(std::mem::take(&mut report.fsm), &mut maps);
        sweep.sweep(maps, &map_bytes, &mut report);
        report
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
        let mut loaded = self.at_work.lock().expect("no panic while locked").remove(&file);
        let mut report = Report::default();
        let mut block = first;
        while block < end {
            let range = BlockRange::of(number, block);
            let within = match loaded.take().filter(|loaded| loaded.range == range) {
                Some(within) => within,
                None => self.load(range)?,
            };
            let upto = end.min(range.end());
            let at = within.visits.partition_point(|visit| visit.key.block() < block);
            let visits = within.visits[at..].iter().take_while(|visit| visit.key.block() < upto);
            for visit in visits.filter(|visit| visit.used) {
                let bytes = &mut pages[(visit.key.block() - first) as usize];
                let mut page = PageAtWork { shared: self.shared, fork: &fork, visit, exists: true, bytes };
                report.pages_read += 1;
                page.redo(&within.ops[visit.ops.clone()], &within.bytes, &mut report);
            }
            block = upto;
            loaded = Some(within);
        }
        if let Some(loaded) = loaded {
            self.at_work.lock().expect("no panic while locked").insert(file, loaded);
        }
        if let Some((_, error)) = report.failure.take() {
            return Err(error);
        }
        self.report.lock().expect("no panic while locked").add(report);
        Ok(())
    }

    fn passed(&self, file: SegmentFile, end: BlockNumber) {
        self.at_work.lock().expect("no panic while locked").remove(&file);
        self.ends.lock().expect("no panic while locked").insert(file, end);
    }
}
