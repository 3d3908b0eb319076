//! The pages' side of a batch: all partitions do their part of it, then the free space maps follow.

use std::collections::{BTreeSet, HashSet};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;
use walrider_datadir::relation::{RelationFiles, SegmentFile};
use walrider_layout::{BLCKSZ, ForkNumber, Lsn, RELSEG_SIZE, RelFileLocator};
use walrider_redo::{Change, Env, fsm};

use crate::base::Base;
use crate::batch::Batch;
use crate::cuts::Needless;
use crate::error::{ReplayError, page_name};
use crate::gaps::Gaps;
use crate::memory;
use crate::partition::passing::Passing;
use crate::partition::upper;
use crate::partition::{FsmChange, FsmOp, PageSettings, Part, Partition, Report, Shared};
use crate::plan::{PARTITIONS, partition_of};
use crate::rels::{PageKey, RelTable};
use crate::restartpoint::{Recovery, sync_relations};
use crate::shares::{MAX_SHORT_BATCH_BYTES, MemoryShares, Short, Taken};
use crate::spill::Spill;
use crate::stages::Stage;
use crate::stats::Stats;
use crate::worth::Visits;

/// Fewest pages that the cache may be limited to: a record has at most 33 blocks and as many maps.
const MIN_PAGES: usize = 512;

/// Most records in a batch that is applied by one thread: to wake others takes longer.
const SMALL_BATCH: u32 = 64;

/// What may come of a batch's pages is worth a look if it could fill this part of memory.
const WORTH_A_LOOK: u64 = 4;

/// Pages in one write. For larger ones the system takes memory in larger pieces: 256 pages at a time took three times as long, in a virtual
/// machine where memory that nobody had used before is dear.
const WRITE: usize = 8;

/// Most pages of a file that one thread writes before the device is told: 32 MB.
const WRITTEN_AT_ONCE: usize = 4096;

/// Fewest pages that a batch writes because something has passed over them: 8 MB. Who keeps up has fewer.
const WORTH_WRITING: usize = 1024;

/// Whether it is not worth while to share the work on a batch.
pub fn is_small(parts: &[Part<'_>]) -> bool {
    parts.iter().map(|part| part.upto - part.from).sum::<u32>() <= SMALL_BATCH
}

/// Bytes of the pages of all partitions, where one of them has so many: pages are spread over them so well that one tells of all.
fn bytes_in_all(pages_of_one: usize) -> u64 {
    (pages_of_one * PARTITIONS * BLCKSZ) as u64
}

/// Does some work on each item: side by side, or right here if it is small.
fn each<I: Send, T: Send>(items: Vec<I>, small: bool, work: impl Fn(I) -> T + Send + Sync) -> Vec<T> {
    match small {
        true => items.into_iter().map(work).collect(),
        false => items.into_par_iter().with_max_len(1).map(work).collect(),
    }
}

/// All pages in memory, and the files that they are of.
pub struct Pages<'a> {
    settings: PageSettings,
    files: &'a Arc<RelationFiles>,
    /// Threads that decode number forks meanwhile.
    rels: Arc<RelTable>,
    partitions: Vec<Partition>,
    /// Those that a record expected and that were not there; dropped or truncated later, or the WAL is at fault.
    invalid: BTreeSet<PageKey>,
    /// Number of the last batch.
    batch: u64,
    shares: MemoryShares,
    is_short: bool,
    /// Bytes for pages now.
    page_bytes: u64,
    short: Short,
    /// How large requests should be.
    gaps: Gaps,
    /// What visits have cost since they are not in memory.
    visits: Visits,
}

impl<'a> Pages<'a> {
    /// None yet.
    pub fn new(settings: PageSettings, files: &'a Arc<RelationFiles>, shares: MemoryShares) -> Pages<'a> {
        // Slabs of up to 4 MB, but small where memory is: each partition has one that is not full.
        let slab_pages = (shares.page_bytes as usize / BLCKSZ / PARTITIONS / 32).clamp(8, 512);
        let partitions = (0..PARTITIONS).map(|_| Partition::new(slab_pages)).collect();
        let (rels, invalid) = (Arc::default(), BTreeSet::new());
        Pages {
            settings,
            files,
            rels,
            partitions,
            invalid,
            batch: 0,
            shares,
            is_short: false,
            page_bytes: shares.page_bytes,
            short: Short::new(shares.all_bytes),
            gaps: Gaps::default(),
            visits: Visits::new(memory::limit().unwrap_or(0).saturating_sub(shares.all_bytes)),
        }
    }

    /// The numbers of forks.
    pub fn rels(&self) -> &Arc<RelTable> {
        &self.rels
    }

    /// The files.
    pub fn files(&self) -> &'a Arc<RelationFiles> {
        self.files
    }

    /// What redo depends on.
    pub fn env(&self) -> Env {
        self.settings.env
    }

    /// The pages of some batch did not fit into memory.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// How memory is shared.
    pub fn shares(&self) -> &MemoryShares {
        &self.shares
    }

    /// Most bytes of WAL in a batch.
    pub fn most_batch_bytes(&self) -> u64 {
        if self.is_short { MAX_SHORT_BATCH_BYTES } else { self.shares.batch_bytes }
    }

    /// What there is for batches and pages where memory is short.
    pub fn short(&self) -> Short {
        self.short
    }

    /// How many pages the last batch visited.
    pub fn visited(&self) -> usize {
        self.partitions.iter().map(Partition::visited).sum()
    }

    /// The first of the pages that records expected and that are missing without explanation.
    pub fn first_invalid(&self) -> Option<String> {
        self.invalid.first().map(|key| page_name(&self.rels.fork(key.fork()), key.block()))
    }

    /// The partitions, what they share, and which pages are missing.
    pub fn split(&mut self) -> (&mut [Partition], Shared<'_>, &mut BTreeSet<PageKey>) {
        let shared = Shared { rels: &self.rels, files: self.files, settings: self.settings };
        (&mut self.partitions, shared, &mut self.invalid)
    }

    /// Gives their memory back: from now on there is less for them. Returns how many were written. Here and wherever else pages are written,
    /// `minRecoveryPoint` covers `end` before, that of the last record that was applied.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn empty(&mut self, recovery: &mut Recovery, end: Lsn) -> Result<u64, ReplayError> {
        recovery.ensure_min_recovery_point(end)?;
        let (partitions, shared, _) = self.split();
        partitions
            .par_iter_mut()
            .with_max_len(1)
            .map(|partition| partition.empty(&shared))
            .try_reduce(|| 0, |a, b| Ok(a + b))
            .inspect(|_| memory::trim())
    }

    /// Has pages, which do not fit, keep to what the next batch leaves of the memory. It is `growth` times as large as the last one, whose WAL
    /// and plan hold `loaded` bytes. Returns how many went.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn share_with_batch(
        &mut self,
        loaded: usize,
        growth: f64,
        recovery: &mut Recovery,
        end: Lsn,
    ) -> Result<u64, ReplayError> {
        let sum = |of: fn(&Partition) -> usize| self.partitions.iter().map(of).sum();
        let (made, operations) = (sum(Partition::held_bytes), sum(Partition::operations));
        let frames = sum(Partition::frame_bytes);
        self.short.note(Taken { loaded, made, operations, frames }, memory::resident());
        let room = self.short.for_pages(growth);
        self.page_bytes = (room / 8 * 7).min(self.shares.page_bytes);
        // A frame that is free is not the system's.
        if frames as u64 > room { self.empty(recovery, end) } else { Ok(0) }
    }

    /// Writes those of some partitions that have changed; returns how many.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn write_back(&mut self, range: Range<usize>, recovery: &mut Recovery, end: Lsn) -> Result<u64, ReplayError> {
        recovery.ensure_min_recovery_point(end)?;
        let (partitions, shared, _) = self.split();
        let written =
            partitions[range].par_iter_mut().with_max_len(1).map(|partition| partition.write_back(&shared, |_| true));
        written.try_reduce(|| 0, |a, b| Ok(a + b))
    }

    /// Writes all that have changed, file by file, so that the device has something to do at once; returns how many.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn write_all(&mut self, recovery: &mut Recovery, end: Lsn) -> Result<u64, ReplayError> {
        recovery.ensure_min_recovery_point(end)?;
        let (partitions, shared, _) = self.split();
        let dirty: Vec<Vec<u32>> = partitions.par_iter().map(Partition::all_dirty).collect();
        let written = write(partitions, &dirty, &shared, |file| shared.files.start_writeback(file))?;
        partitions.iter_mut().for_each(Partition::all_written);
        Ok(written)
    }

    /// Writes pages that something has passed over, in these slots of each partition, and takes them out of memory: it will not come
    /// back to them soon, and the device has something to do meanwhile. Returns how many.
    fn write_passed_over(&mut self, slots: &[Vec<u32>]) -> Result<u64, ReplayError> {
        let (partitions, shared, _) = self.split();
        let written = write(partitions, slots, &shared, |file| shared.files.start_writeback_aside(file))?;
        for (partition, slots) in partitions.iter_mut().zip(slots) {
            slots.iter().for_each(|&slot| partition.release(slot));
        }
        Ok(written)
    }

    /// Writes upper levels of free space maps that have changed.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn write_upper_levels(&mut self, recovery: &mut Recovery, end: Lsn) -> Result<(), ReplayError> {
        recovery.ensure_min_recovery_point(end)?;
        let (partitions, shared, _) = self.split();
        let is_upper =
            |key: PageKey| fsm::is_upper(key.block()) && shared.rels.fork(key.fork()).fork == ForkNumber::FreeSpaceMap;
        partitions.iter_mut().try_for_each(|partition| partition.write_back(&shared, is_upper).map(drop))
    }

    /// By number, which forks these relations have.
    fn forks_of(&self, relations: &HashSet<RelFileLocator>) -> Vec<bool> {
        let mut found = vec![false; if relations.is_empty() { 0 } else { self.rels.len() }];
        for (rel, fork) in relations.iter().flat_map(|rel| ForkNumber::ALL.map(|fork| (*rel, fork))) {
            if let Some(number) = self.rels.find(rel, fork) {
                found[number as usize] = true;
            }
        }
        found
    }

    /// What need not be done of a batch that is larger than memory.
    pub fn needless(&self, batch: &Batch) -> Needless {
        Needless::new(&batch.cuts, &batch.drops, self.forks_of(&batch.drops), &self.rels)
    }

    /// Does a batch's page operations. `drops`: relations dropped in it. `end`: of its last record.
    ///
    /// # Errors
    /// What [`ReplayError`] lists.
    pub fn apply(
        &mut self,
        parts: &[Part<'_>],
        drops: &HashSet<RelFileLocator>,
        end: Lsn,
        recovery: &mut Recovery,
        stats: &mut Stats,
    ) -> Result<(), ReplayError> {
        let dropped = self.forks_of(drops);
        let gathering = stats.stages.enter(Stage::Gather);
        self.batch += 1;
        let batch = self.batch;
        let small = is_small(parts);
        let gather = |(number, partition): (usize, &mut Partition)| partition.gather(number, batch, parts, &dropped);
        let missing: usize = each(self.partitions.iter_mut().enumerate().collect(), small, gather).iter().sum();
        drop(gathering);
        let threads = if small { 1 } else { rayon::current_num_threads() };
        let began = Instant::now();
        let applying = stats.stages.enter_on(Stage::Apply, threads);
        let resident: usize = self.partitions.iter().map(Partition::resident).sum();
        let budget = ((self.page_bytes / BLCKSZ as u64) as usize).max(MIN_PAGES);
        let quota = (resident + missing > budget).then(|| (budget / PARTITIONS).max(1));
        if quota.is_some() {
            // Pages will be written before the batch is done, to make room for others of it.
            recovery.ensure_min_recovery_point(end)?;
            self.is_short = true;
        }
        let (partitions, shared, _) = self.split();
        let mut reports = each(partitions.iter_mut().collect(), small, |partition| {
            let (started, mut report) =
                (Instant::now(), Report { stages: Some(stats.stages.clone()), ..Report::default() });
            partition.work(parts, &shared, quota, &mut report);
            report.took = started.elapsed();
            report
        });
        applying.end(reports.iter().map(|report| report.took).sum());
        if quota.is_some() {
            let visited = self.visited();
            if self.visits.must_be_durable(visited) {
                sync_relations(self.files)?;
            }
            self.visits.note(visited, began.elapsed());
        }
        stats.apply_longest += reports.iter().map(|report| report.took).max().unwrap_or_default();
        let passed_over = reports.iter_mut().map(|report| std::mem::take(&mut report.passed_over)).collect::<Vec<_>>();
        let mut fsm_ops: Vec<Vec<FsmOp>> = vec![Vec::new(); PARTITIONS];
        registered_fsm_ops(parts, &mut fsm_ops);
        self.take_reports(reports, &mut fsm_ops, stats)?;
        // Before maps need room: what is taken out for them must not be among these slots.
        if passed_over.iter().map(Vec::len).sum::<usize>() >= WORTH_WRITING {
            let _write = stats.stages.enter(Stage::Write);
            recovery.ensure_min_recovery_point(end)?;
            stats.pages_written += self.write_passed_over(&passed_over)?;
        }
        let fsm = stats.stages.enter(Stage::Fsm);
        let is_dropped = |key: PageKey| dropped.get(key.fork() as usize).copied().unwrap_or(false);
        let maps: usize = each(fsm_ops.iter_mut().collect(), small, |ops| {
            ops.retain(|op| !is_dropped(op.key));
            ops.sort_unstable_by_key(|op| (op.key, op.lsn));
            ops.chunk_by(|a, b| a.key == b.key).count()
        })
        .into_iter()
        .sum();
        let resident: usize = self.partitions.iter().map(Partition::resident).sum();
        // VACUUM of many small tables comes to three pages of maps for each.
        let quota = (resident + maps > budget).then_some((budget / PARTITIONS).max(1));
        if quota.is_some() {
            recovery.ensure_min_recovery_point(end)?;
        }
        let (partitions, shared, _) = self.split();
        let reports = each(partitions.iter_mut().zip(&fsm_ops).collect(), small, |(partition, ops)| {
            let mut report = Report::default();
            partition.apply_fsm(batch, ops, parts, &shared, quota, &mut report);
            report
        });
        self.take_reports(reports, &mut fsm_ops, stats)?;
        drop(fsm);
        Ok(())
    }

    /// Whether a batch that has `parts`, of `wal` bytes, is worth being made larger than memory: its pages do not fit, or those
    /// that come up again and again will not; and visiting them costs more than putting the WAL apart, which is to write and read it
    /// once ([`Visits`]).
    pub fn is_worth_spilling(&self, parts: &[Part<'_>], wal: u64) -> bool {
        let budget = self.page_bytes / BLCKSZ as u64;
        let operations =
            |number: usize| parts.iter().map(|part| part.cut(&part.planned.plan.ops[number]).len()).sum::<usize>();
        let upper: usize = self.partitions.iter().map(Partition::resident).sum::<usize>()
            + (0..PARTITIONS).map(operations).sum::<usize>();
        if !self.is_short && (upper as u64) < budget / WORTH_A_LOOK {
            return false;
        }
        let sampled = self.partitions[0].sample(parts, 0);
        let all = |count: usize| (count * PARTITIONS) as u64;
        let does_not_fit = self.is_short
            || all(self.partitions[0].resident() + sampled.missing) > budget
            || sampled.working_set() * PARTITIONS as f64 > budget as f64;
        let visited = bytes_in_all(sampled.pages) as f64;
        does_not_fit && visited > self.visits.least(rayon::current_num_threads()) * wal as f64
    }

    /// Bytes of the pages that `parts` change.
    pub fn changed_bytes(&self, parts: &[Part<'_>]) -> u64 {
        bytes_in_all(self.partitions[0].sample(parts, 0).pages)
    }

    /// Does the page operations of a spilled batch that ends at `end`: of relations of a base backup, if there is one, on their way into
    /// the directory. No page is in memory, before and after.
    ///
    /// # Errors
    /// What [`ReplayError`] lists.
    pub fn sweep(
        &mut self,
        spill: Spill,
        base: Option<&dyn Base>,
        needless: &Needless,
        end: Lsn,
        recovery: &mut Recovery,
        stats: &mut Stats,
    ) -> Result<(), ReplayError> {
        recovery.ensure_min_recovery_point(end)?;
        self.invalid.retain(|&key| !needless.is_behind(key));
        let sorting = stats.stages.enter(Stage::Spill);
        let ranges = spill.ranges()?;
        stats.sorted_bytes += ranges.sorted_bytes;
        drop(sorting);
        let applying = stats.stages.enter_on(Stage::Apply, rayon::current_num_threads());
        let shared = Shared { rels: &self.rels, files: self.files, settings: self.settings };
        let passing = Passing::new(&shared, needless, ranges, &self.gaps)?;
        if let Some(base) = base {
            base.unpack(&passing)?;
        }
        let mut report = passing.finish(&stats.stages);
        if report.failure.is_none() {
            upper::bring_up_to_date(&shared, needless, &mut report)?;
        }
        applying.end(report.took);
        stats.request_bytes = self.gaps.best();
        self.take_reports(vec![report], &mut [], stats)
    }

    fn take_reports(
        &mut self,
        reports: Vec<Report>,
        fsm_ops: &mut [Vec<FsmOp>],
        stats: &mut Stats,
    ) -> Result<(), ReplayError> {
        let mut failure: Option<(Lsn, ReplayError)> = None;
        let mut grown = Vec::new();
        for report in reports {
            for op in report.fsm {
                fsm_ops[partition_of(op.key)].push(op);
            }
            self.invalid.extend(report.invalid);
            grown.extend(report.grown);
            stats.pages_read += report.pages_read;
            stats.pages_evicted += report.pages_evicted;
            stats.images_verified += report.images_verified;
            stats.image_difference_count += report.image_difference_count;
            stats.image_differences.extend(report.image_differences);
            if let Some((lsn, error)) = report.failure
                && failure.as_ref().is_none_or(|(first, _)| lsn < *first)
            {
                failure = Some((lsn, error));
            }
        }
        if let Some((_, error)) = failure {
            return Err(error);
        }
        grown.sort_unstable();
        grown.dedup();
        for number in grown {
            let fork = self.rels.fork(number);
            if let Some(blocks) = fork.wanted_blocks() {
                self.files.extend(fork.rel, fork.fork, blocks)?;
                fork.set_blocks(blocks);
            }
        }
        Ok(())
    }
}

/// Writes pages in these slots of each partition, file by file; `begin` hears of each file that the device can begin with. Returns how many.
fn write(
    partitions: &mut [Partition],
    slots: &[Vec<u32>],
    shared: &Shared<'_>,
    begin: impl Fn(SegmentFile) + Sync,
) -> Result<u64, ReplayError> {
    let of_each = partitions.par_iter_mut().zip(slots).with_max_len(1).enumerate();
    let ready = of_each.flat_map_iter(|(number, (partition, slots))| {
        partition.ready_to_write(slots, shared).into_iter().map(move |(key, frame)| (key, number, frame))
    });
    let mut ready: Vec<(PageKey, usize, u32)> = ready.collect();
    ready.par_sort_unstable();
    let page = |&(_, partition, frame): &(PageKey, usize, u32)| partitions[partition].frame(frame);
    let of_file = |(key, ..): &(PageKey, usize, u32)| (key.fork(), key.block() / RELSEG_SIZE);
    let chunks: Vec<_> =
        ready.chunk_by(|a, b| of_file(a) == of_file(b)).flat_map(|file| file.chunks(WRITTEN_AT_ONCE)).collect();
    chunks.into_par_iter().with_max_len(1).try_for_each(|chunk| {
        let fork = shared.rels.fork(chunk[0].0.fork());
        for run in chunk.chunk_by(|a, b| b.0.block() == a.0.block() + 1).flat_map(|run| run.chunks(WRITE)) {
            let mut buffers: Vec<_> = run.iter().map(|ready| IoSlice::new(page(ready))).collect();
            shared.files.write(fork.rel, fork.fork, run[0].0.block(), &mut buffers)?;
        }
        begin(SegmentFile { rel: fork.rel, fork: fork.fork, segment: chunk[0].0.block() / RELSEG_SIZE });
        Ok::<_, ReplayError>(())
    })?;
    Ok(ready.len() as u64)
}

/// Changes of free space maps that records name themselves.
fn registered_fsm_ops(parts: &[Part<'_>], fsm_ops: &mut [Vec<FsmOp>]) {
    for (number, part) in (0..).zip(parts) {
        for op in part.cut(&part.planned.plan.fsm_ops) {
            let (Change::Block(block) | Change::Overwrite(block)) = op.change else { continue };
            let lsn = part.planned.stretch.span(op.place).end;
            let change = FsmChange::Redo { part: number, place: op.place, block };
            fsm_ops[partition_of(op.key)].push(FsmOp { key: op.key, lsn, change });
        }
    }
}
