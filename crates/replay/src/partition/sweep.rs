//! One pass over the pages of a spilled partition, in file order: each is read once, gets all its changes, and is written.
//!
//! Pages that lie close together are read in one request, and written in one, with what lies between them: a device that allows
//! so many requests a second gives them for nothing. How close is close, [`Gaps`] finds out.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};
use walrider_datadir::DataDirError;
use walrider_datadir::behind::{Behind, Buffer, Handed, ToWrite};
use walrider_datadir::relation::RelationFiles;
use walrider_layout::page::PageMut;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, Lsn, PageBytes, RELSEG_SIZE, RelFileLocator};
use walrider_redo::{Change, Target, fsm, vm};
use walrider_wal::record::Record;

use super::cache::{accept, known_blocks};
use super::told::ToldPage;
use super::{FsmChange, FsmOp, LastFreeSpace, PageWork, Report, Shared};
use crate::cuts::{ForkCuts, Needless, Tail, TailChange};
use crate::error::{RedoFailure, ReplayError};
use crate::gaps::Gaps;
use crate::rels::{PageKey, RelFork};
use crate::spill::entry::{self, EntryPlace, Operation};

/// Most pages in a request.
const MOST_PAGES: usize = 128;

/// Requests that the system is asked to begin before they are needed.
const AHEAD: usize = 32;

/// Memory that an operation takes beside its entry.
pub const OPERATION_BYTES: usize = size_of::<Op>();

/// An operation on a page.
pub(super) struct Op {
    pub key: PageKey,
    /// Operations on one page are done in this order.
    pub order: u64,
    pub what: What,
}

pub(super) enum What {
    Redo(EntryPlace, Change),
    FreeSpace { slot: u16, category: u8 },
    Told(Box<ToldPage>),
    Tail(TailChange),
}

impl From<Tail> for Op {
    fn from(Tail { lsn, key, change }: Tail) -> Op {
        Op { key, order: lsn.0, what: What::Tail(change) }
    }
}

/// What some entries of a spilled partition ask for.
#[derive(Default)]
pub(super) struct Operations {
    /// Of pages that are none of free space maps.
    pub pages: Vec<Op>,
    /// Of pages of free space maps.
    pub maps: Vec<Op>,
    /// Entries about upper levels of free space maps that are truncated.
    upper: Vec<u8>,
    /// Forks that had so many blocks, as far as truncations have left them.
    pub cut: FxHashMap<u32, BlockNumber>,
}

/// What truncations do to pages of maps, in the order of the WAL, as far as it is not done.
pub(super) struct Tails(Vec<Tail>);

impl From<Vec<Tail>> for Tails {
    fn from(tails: Vec<Tail>) -> Tails {
        Tails(tails)
    }
}

impl Tails {
    /// Adds those that some of these operations come after; `all`: of the rest, too. Parts of a partition that has several runs are in the order of
    /// the WAL for each page, but not for all of them.
    pub fn add_to(&mut self, found: &mut Operations, all: bool) {
        let mut last: FxHashMap<PageKey, u64> = self.0.iter().map(|tail| (tail.key, 0)).collect();
        if last.is_empty() {
            return;
        }
        for op in &found.pages {
            if let Some(last) = last.get_mut(&op.key) {
                *last = op.order.max(*last);
            }
        }
        self.0.retain(|&tail| {
            let is_due = all || tail.lsn.0 < last[&tail.key];
            if is_due {
                let is_free_space = matches!(tail.change, TailChange::FreeSpaceMap(..));
                (if is_free_space { &mut found.maps } else { &mut found.pages }).push(tail.into());
            }
            !is_due
        });
    }
}

/// A page, and where its operations are.
pub(super) struct Visit {
    pub key: PageKey,
    pub ops: Range<usize>,
    /// Whether anything has to do with what the page holds, and whether that matters.
    pub used: bool,
    pub wanted: bool,
}

/// Pages that are read and written together.
struct Run {
    fork: Arc<RelFork>,
    visits: Range<usize>,
    /// Length of the fork's files.
    file_blocks: BlockNumber,
    first: BlockNumber,
    pages: usize,
    /// Which of its pages are read.
    read: Range<usize>,
}

/// The passes over a partition.
pub struct Sweep<'a> {
    shared: &'a Shared<'a>,
    /// What need not be done.
    needless: &'a Needless,
    tails: Tails,
    gaps: &'a Gaps,
    behind: Option<&'a Behind<'a, RunToWrite>>,
    /// What was handed on to there.
    handed: Handed,
    /// Pages that came into being behind the end of their files: the next pass finds them there.
    made: FxHashSet<PageKey>,
    /// For pages that are written right here.
    buffer: Buffer,
}

impl<'a> Sweep<'a> {
    /// Ready for pages to which truncations do `tails`, in the order of the WAL.
    pub fn new(shared: &'a Shared<'a>, needless: &'a Needless, tails: Vec<Tail>, gaps: &'a Gaps) -> Sweep<'a> {
        Sweep {
            shared,
            needless,
            tails: tails.into(),
            gaps,
            behind: None,
            handed: Handed::default(),
            made: FxHashSet::default(),
            buffer: Buffer::default(),
        }
    }

    /// Has pages handed on to there instead of writing them.
    pub fn write_behind(self, behind: &'a Behind<'a, RunToWrite>) -> Sweep<'a> {
        Sweep { behind: Some(behind), ..self }
    }

    /// Does operations that `bytes` ask for, entries of a spilled partition, on pages that are none of free space maps and that `which` picks. The
    /// memory of operations that are done, `ops`, is used again.
    pub(super) fn pass(
        &mut self,
        bytes: &[u8],
        ops: &mut Vec<Op>,
        which: impl Fn(PageKey) -> bool,
        report: &mut Report,
    ) {
        let mut found = self.operations_in(bytes, std::mem::take(ops));
        self.tails.add_to(&mut found, false);
        if let Err(error) = self.note(&mut found, report) {
            return report.fail(Lsn::INVALID, error);
        }
        found.pages.retain(|op| which(op.key));
        self.sweep(&mut found.pages, bytes, report);
        *ops = found.pages;
    }

    /// Does what truncations do to pages of maps behind all that was passed.
    pub(super) fn end(&mut self, report: &mut Report) {
        if !self.tails.0.is_empty() {
            let mut found = Operations::default();
            self.tails.add_to(&mut found, true);
            self.sweep(&mut found.pages, &[], report);
        }
    }

    /// Notes what is left of operations that were left out, or are put off.
    pub(super) fn note(&self, found: &mut Operations, report: &mut Report) -> Result<(), ReplayError> {
        report.upper.append(&mut found.upper);
        for (number, blocks) in found.cut.drain() {
            let fork = self.shared.rels.fork(number);
            if known_blocks(&fork, self.shared.files)? < blocks {
                fork.grow_to(blocks);
                report.grown.push(number);
            }
        }
        Ok(())
    }

    /// The operations in `bytes` that are to be done.
    pub(super) fn operations(&self, bytes: &[u8]) -> Operations {
        self.operations_in(bytes, Vec::new())
    }

    /// The same, in the memory of others that are done.
    pub(super) fn operations_in(&self, bytes: &[u8], mut pages: Vec<Op>) -> Operations {
        pages.clear();
        // Growing by doubling would take more than there is.
        pages.reserve_exact(entry::count(bytes));
        let mut found = Operations { pages, ..Operations::default() };
        entry::each(bytes, |place, end, operation| {
            self.operation(bytes, place, end, operation, &mut found);
        });
        found
    }

    #[inline]
    fn operation(&self, bytes: &[u8], place: EntryPlace, end: Lsn, operation: Operation, found: &mut Operations) {
        let Operation { key, change } = operation;
        if self.needless.is_dropped(key) {
            return;
        }
        let what = What::Redo(place, change);
        let fork = self.shared.rels.fork(key.fork()).fork;
        let cuts = self.needless.cuts_of(key.fork());
        if let Some(left) = cuts.map(|cuts| cuts.least_after(end)).filter(|&left| left <= key.block()) {
            // Maps have the length that truncations leave already. Of other forks, records make pages that they overwrite.
            let made = if matches!(change, Change::Overwrite(_)) && fork == ForkNumber::Main { left } else { 0 };
            let blocks = found.cut.entry(key.fork()).or_default();
            *blocks = made.max(*blocks);
            return;
        }
        match fork {
            ForkNumber::FreeSpaceMap if cuts.is_some() && fsm::is_upper(key.block()) => {
                entry::copy(&mut found.upper, bytes, place, operation);
            }
            ForkNumber::FreeSpaceMap => found.maps.push(Op { key, order: end.0, what }),
            ForkNumber::VisibilityMap => found.pages.push(Op { key, order: end.0, what }),
            _ => found.pages.push(Op { key, order: found.pages.len() as u64, what }),
        }
    }

    /// What redo of heap pages has told, as operations on pages of free space maps.
    pub(super) fn told(&self, told: Vec<FsmOp>, maps: &mut Vec<Op>) {
        for told in told.into_iter().filter(|told| !self.needless.is_dropped(told.key)) {
            let FsmChange::Set { slot, category } = told.change else { unreachable!("only redo of heap pages tells") };
            maps.push(Op { key: told.key, order: told.lsn.0, what: What::FreeSpace { slot, category } });
        }
    }

    /// Does operations, whose records are in `bytes`, page by page in file order.
    pub(super) fn sweep(&mut self, ops: &mut [Op], bytes: &[u8], report: &mut Report) {
        let visits = visits(ops);
        let started = Instant::now();
        let target = self.gaps.target();
        let runs = match self.runs(&visits, target.bytes) {
            Ok(runs) => runs,
            Err(error) => return report.fail(first_lsn(ops, bytes), error),
        };
        let mut asked = 0;
        for (nth, run) in runs.iter().enumerate() {
            if report.failure.is_some() {
                return;
            }
            while asked < runs.len().min(nth + AHEAD) {
                self.read_ahead(&runs[asked]);
                asked += 1;
            }
            let mut buffer = match self.behind_for(run) {
                Some(behind) => behind.buffer(run.pages),
                None if self.buffer.pages().is_empty() => Buffer::new(MOST_PAGES),
                None => std::mem::take(&mut self.buffer),
            };
            let pieces = self.work(run, buffer.pages_mut(), &visits, ops, bytes, report);
            if let Err(error) = self.write(run, buffer, pieces) {
                report.fail(first_lsn(&ops[visits[run.visits.start].ops.clone()], bytes), error.into());
            }
        }
        // The next pass may read the same pages.
        if let Err(error) = self.handed.wait() {
            report.fail(first_lsn(ops, bytes), error.into());
        }
        self.gaps.note(target, visits.len(), started.elapsed());
    }

    /// Puts pages together into requests of about `target` bytes.
    fn runs(&self, visits: &[Visit], target: usize) -> Result<Vec<Run>, ReplayError> {
        let gap = gap_for(visits, target);
        // What lies between pages of a map may be another partition's.
        let gap = |fork: &RelFork| if fork.fork == ForkNumber::FreeSpaceMap { 0 } else { gap };
        let mut runs: Vec<Run> = Vec::new();
        for (nth, visit) in visits.iter().enumerate() {
            let block = visit.key.block();
            if let Some(run) = runs.last_mut()
                && let before = visits[nth - 1].key
                && before.fork() == visit.key.fork()
                && block - before.block() - 1 <= gap(&run.fork)
                && ((block - run.first) as usize) < MOST_PAGES
                && block / RELSEG_SIZE == run.first / RELSEG_SIZE
            {
                run.visits.end = nth + 1;
                run.pages = (block - run.first) as usize + 1;
                continue;
            }
            let (fork, file_blocks) = match runs.last() {
                Some(run) if visits[nth - 1].key.fork() == visit.key.fork() => (run.fork.clone(), run.file_blocks),
                _ => {
                    let fork = self.shared.rels.fork(visit.key.fork());
                    let file_blocks = known_blocks(&fork, self.shared.files)?;
                    (fork, file_blocks)
                }
            };
            runs.push(Run { fork, visits: nth..nth + 1, file_blocks, first: block, pages: 1, read: 0..0 });
        }
        for run in &mut runs {
            let mut wanted = visits[run.visits.clone()]
                .iter()
                .filter(|visit| visit.wanted && self.exists(visit.key, run))
                .map(|visit| (visit.key.block() - run.first) as usize);
            if let Some(first) = wanted.next() {
                run.read = first..wanted.next_back().unwrap_or(first) + 1;
            }
        }
        Ok(runs)
    }

    /// Whether there is such a page in the files.
    fn exists(&self, key: PageKey, run: &Run) -> bool {
        key.block() < run.file_blocks || self.made.contains(&key)
    }

    fn read_ahead(&self, run: &Run) {
        if !run.read.is_empty() {
            let first = run.first + run.read.start as u32;
            self.shared.files.read_ahead(run.fork.rel, run.fork.fork, first, run.read.len() as u32);
        }
    }

    /// Who writes a run's pages, if it is not done right here: those of free space maps may be neighbours of other partitions' pages, and only
    /// one who writes them through the cache does not take back what another does to these.
    fn behind_for(&self, run: &Run) -> Option<&'a Behind<'a, RunToWrite>> {
        self.behind.filter(|_| run.fork.fork != ForkNumber::FreeSpaceMap)
    }

    /// Reads a run's pages and redoes their operations. Returns which have changed, with what lies between them.
    fn work(
        &mut self,
        run: &Run,
        pages: &mut [PageBytes],
        visits: &[Visit],
        ops: &[Op],
        bytes: &[u8],
        report: &mut Report,
    ) -> Vec<Range<usize>> {
        let (rel, fork) = (run.fork.rel, run.fork.fork);
        if !run.read.is_empty() {
            let began = Instant::now();
            let into = pages[run.read.clone()].as_flattened_mut();
            if let Err(error) = self.shared.files.read(rel, fork, run.first + run.read.start as u32, into) {
                report.fail(first_lsn(&ops[visits[run.visits.start].ops.clone()], bytes), error.into());
                return Vec::new();
            }
            if let Some(stages) = &report.stages {
                stages.note_read(began.elapsed());
            }
            report.pages_read += run.read.len() as u64;
        }
        // What is in the buffer of this page, and whether it is newer than what is in the file.
        let mut is_there = [false; MOST_PAGES];
        is_there[run.read.clone()].fill(true);
        let mut is_dirty = [false; MOST_PAGES];
        for visit in &visits[run.visits.clone()] {
            let at = (visit.key.block() - run.first) as usize;
            let mut page = PageAtWork {
                shared: self.shared,
                fork: &run.fork,
                cuts: self.needless.cuts_of(visit.key.fork()),
                visit,
                exists: visit.key.block() < run.file_blocks || self.made.contains(&visit.key),
                bytes: &mut pages[at],
            };
            if !visit.used {
                if !page.exists {
                    report.invalid.push(visit.key);
                }
                continue;
            }
            match page.redo(&ops[visit.ops.clone()], bytes, report) {
                Some(dirty) => is_dirty[at] = dirty,
                None => return Vec::new(),
            }
            is_there[at] |= is_dirty[at];
            if is_dirty[at] && visit.key.block() >= run.file_blocks {
                self.made.insert(visit.key);
            }
        }
        report.pages_evicted += is_dirty.iter().filter(|&&dirty| dirty).count() as u64;
        pieces(&is_there[..run.pages], &is_dirty[..run.pages])
    }

    /// Writes pieces of a run's pages, or hands them on.
    fn write(&mut self, run: &Run, buffer: Buffer, pieces: Vec<Range<usize>>) -> Result<(), DataDirError> {
        let (rel, fork, first) = (run.fork.rel, run.fork.fork, run.first);
        match self.behind_for(run) {
            Some(behind) if pieces.is_empty() => behind.give_back(buffer),
            Some(behind) => behind.write(RunToWrite { rel, fork, first, buffer, pieces }, &self.handed),
            None => {
                for piece in pieces {
                    let block = first + piece.start as u32;
                    let mut pages = [IoSlice::new(buffer.pages()[piece].as_flattened())];
                    self.shared.files.write(rel, fork, block, &mut pages)?;
                }
                self.buffer = buffer;
            }
        }
        Ok(())
    }
}

/// Pages of one segment file that are to be written.
pub struct RunToWrite {
    rel: RelFileLocator,
    fork: ForkNumber,
    /// The block of the buffer's first page.
    first: BlockNumber,
    buffer: Buffer,
    /// Which of its pages.
    pieces: Vec<Range<usize>>,
}

impl ToWrite for RunToWrite {
    type To = RelationFiles;

    fn write(&self, files: &RelationFiles) -> Result<(), DataDirError> {
        self.pieces.iter().try_for_each(|piece| {
            let pages = self.buffer.pages()[piece.clone()].as_flattened();
            files.write_through(self.rel, self.fork, self.first + piece.start as u32, pages)
        })
    }

    fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

/// The pages that have changed, and those between them that are there.
fn pieces(is_there: &[bool], is_dirty: &[bool]) -> Vec<Range<usize>> {
    let (mut pieces, mut at) = (Vec::new(), 0);
    while let Some(first) = is_dirty[at..].iter().position(|&dirty| dirty).map(|first| at + first) {
        let end = is_there[first..].iter().position(|&there| !there).map_or(is_there.len(), |end| first + end);
        let last = is_dirty[first..end].iter().rposition(|&dirty| dirty).map_or(first, |last| first + last);
        pieces.push(first..last + 1);
        at = end;
    }
    pieces
}

/// A page while its operations are redone.
pub(super) struct PageAtWork<'w, 'a> {
    pub shared: &'w Shared<'a>,
    pub fork: &'w RelFork,
    pub cuts: Option<&'a ForkCuts>,
    pub visit: &'w Visit,
    pub exists: bool,
    pub bytes: &'w mut PageBytes,
}

impl<'a> PageAtWork<'_, 'a> {
    /// Redoes operations. Whether the page has changed; `None` after a failure.
    pub fn redo(&mut self, ops: &[Op], entries: &[u8], report: &mut Report) -> Option<bool> {
        let (key, fork, settings) = (self.visit.key, self.fork, &self.shared.settings);
        if self.visit.wanted && !self.exists {
            self.bytes.fill(0);
        } else if self.visit.wanted
            && let Err(error) = accept(self.bytes, fork, key.block(), settings.checksums)
        {
            report.fail(first_lsn(ops, entries), error);
            return None;
        }
        let mut target = Target { bytes: self.bytes, exists: self.exists, dirty: false };
        let mut free_space = LastFreeSpace::<'a> { last: None, cuts: self.cuts };
        let mut record = Record::empty(settings.env.major);
        for op in ops {
            let (place, change) = match op.what {
                What::Redo(place, change) => (place, change),
                What::FreeSpace { slot, category } => {
                    fsm::record_free_space(&mut target, slot, category);
                    continue;
                }
                What::Told(ref told) => {
                    told.record(&mut target);
                    continue;
                }
                What::Tail(TailChange::VisibilityMap(blocks)) => {
                    vm::truncate_tail(&mut target, blocks);
                    continue;
                }
                What::Tail(TailChange::FreeSpaceMap(first_slot, nth)) => {
                    fsm::truncate_tail(&mut target, first_slot);
                    report.cleared.push((nth, fsm::reset_next_slot(&mut target)));
                    continue;
                }
            };
            entry::read(entries, place, &mut record);
            let free_space = &mut free_space;
            let mut work = PageWork { record: &record, fork, key, shared: self.shared, report, free_space };
            if let Err(error) = work.change(change, &mut target) {
                let failure = RedoFailure::new(&record, fork, key.block(), error);
                report.fail(record.lsn, ReplayError::Redo(failure));
                return None;
            }
        }
        let Target { exists, dirty, .. } = target;
        if exists && !self.exists {
            fork.grow_to(key.block() + 1);
            report.grown.push(key.fork());
        }
        if let Some((lsn, free)) = free_space.last {
            report.note_free_space(fork.free_space_map(self.shared.rels), lsn, free);
        }
        if dirty && settings.checksums {
            PageMut(self.bytes).update_checksum(key.block());
        }
        Some(dirty)
    }
}

/// Sorts operations, and tells their pages.
pub(super) fn visits(ops: &mut [Op]) -> Vec<Visit> {
    ops.sort_unstable_by_key(|op| (op.key, op.order));
    let mut visits = Vec::new();
    let mut at = 0;
    for ops in ops.chunk_by(|a, b| a.key == b.key) {
        let first_use = ops.iter().find(|op| !matches!(op.what, What::Redo(_, Change::Lock)));
        visits.push(Visit {
            key: ops[0].key,
            ops: at..at + ops.len(),
            used: first_use.is_some(),
            wanted: first_use.is_some_and(|op| !matches!(op.what, What::Redo(_, Change::Overwrite(_)))),
        });
        at += ops.len();
    }
    visits
}

/// The least distance at which pages are read together so that requests come to `target` bytes, on average.
fn gap_for(visits: &[Visit], target: usize) -> BlockNumber {
    let mut gaps = [0usize; MOST_PAGES];
    for pair in visits.windows(2) {
        let [before, next] = [pair[0].key, pair[1].key];
        let distance = next.block().wrapping_sub(before.block()) as usize;
        if before.fork() == next.fork() && (1..=MOST_PAGES).contains(&distance) {
            gaps[distance - 1] += 1;
        }
    }
    let (mut pages, mut requests) = (visits.len(), visits.len() - gaps[0]);
    let mut gap = 0;
    while gap + 1 < MOST_PAGES && pages * BLCKSZ < requests * target {
        gap += 1;
        requests -= gaps[gap];
        pages += gaps[gap] * gap;
    }
    gap as BlockNumber
}

fn first_lsn(ops: &[Op], entries: &[u8]) -> Lsn {
    let places = ops.iter().filter_map(|op| match op.what {
        What::Redo(place, _) => Some(place),
        What::FreeSpace { .. } | What::Told(_) | What::Tail(_) => None,
    });
    places.map(|place| entry::record(entries, place).0.lsn).min().unwrap_or(Lsn::INVALID)
}

#[cfg(test)]
mod tests;
