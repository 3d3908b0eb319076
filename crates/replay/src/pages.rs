//! The pages' side of a batch: all partitions do their part of it, then the free space maps follow.

use std::collections::BTreeSet;
use std::time::Instant;

use rayon::prelude::*;
use walrider_layout::Lsn;
use walrider_redo::Change;

use crate::error::ReplayError;
use crate::partition::{FsmChange, FsmOp, Part, Partition, Report, Shared};
use crate::plan::{PARTITIONS, partition_of};
use crate::rels::PageKey;
use crate::restartpoint::Recovery;
use crate::stats::Stats;

/// Most records in a batch that is applied by one thread: to wake others takes longer.
const SMALL_BATCH: u32 = 64;

/// Whether it is not worth while to share the work on a batch.
pub fn is_small(parts: &[Part<'_>]) -> bool {
    parts.iter().map(|part| part.upto - part.from).sum::<u32>() <= SMALL_BATCH
}

/// Does some work on each item: side by side, or right here if it is small.
fn each<I: Send, T: Send>(items: Vec<I>, small: bool, work: impl Fn(I) -> T + Send + Sync) -> Vec<T> {
    match small {
        true => items.into_iter().map(work).collect(),
        false => items.into_par_iter().map(work).collect(),
    }
}

/// The pages' side of the engine, while a batch is applied.
pub struct Pages<'e> {
    /// All of them.
    pub partitions: &'e mut [Partition],
    /// What they share.
    pub shared: Shared<'e>,
    /// Most pages in memory.
    pub budget: usize,
    /// There was a batch for whose pages that was too little.
    pub is_short: &'e mut bool,
    /// Number of the last batch.
    pub batch: &'e mut u64,
    /// Pages that a record expected and that were not there.
    pub invalid: &'e mut BTreeSet<PageKey>,
    /// Counters.
    pub stats: &'e mut Stats,
    /// Where the directory stands.
    pub recovery: &'e mut Recovery,
}

impl Pages<'_> {
    /// Does a batch's page operations. `dropped[fork]`: the fork is dropped in it. `end`: of its last record.
    ///
    /// # Errors
    /// What [`ReplayError`] lists.
    pub fn apply(&mut self, parts: &[Part<'_>], dropped: &[bool], end: Lsn) -> Result<(), ReplayError> {
        let started = Instant::now();
        *self.batch += 1;
        let batch = *self.batch;
        let small = is_small(parts);
        let gather = |(number, partition): (usize, &mut Partition)| partition.gather(number, batch, parts, dropped);
        let missing: usize = each(self.partitions.iter_mut().enumerate().collect(), small, gather).iter().sum();
        self.stats.gather += started.elapsed();
        let started = Instant::now();
        let resident: usize = self.partitions.iter().map(Partition::resident).sum();
        let quota = (resident + missing > self.budget).then(|| (self.budget / PARTITIONS).max(1));
        if quota.is_some() {
            // Pages will be written before the batch is done, to make room for others of it.
            self.recovery.ensure_min_recovery_point(end)?;
            *self.is_short = true;
        }
        let shared = &self.shared;
        let reports = each(self.partitions.iter_mut().collect(), small, |partition| {
            let (started, mut report) = (Instant::now(), Report::default());
            partition.work(parts, shared, quota, &mut report);
            report.took = started.elapsed();
            report
        });
        self.stats.apply += started.elapsed();
        self.stats.apply_longest += reports.iter().map(|report| report.took).max().unwrap_or_default();
        let started = Instant::now();
        let mut fsm_ops: Vec<Vec<FsmOp>> = vec![Vec::new(); PARTITIONS];
        self.registered_fsm_ops(parts, &mut fsm_ops);
        self.take_reports(reports, &mut fsm_ops)?;
        let is_dropped = |key: PageKey| dropped.get(key.fork() as usize).copied().unwrap_or(false);
        let shared = &self.shared;
        let reports = each(self.partitions.iter_mut().zip(&mut fsm_ops).collect(), small, |(partition, ops)| {
            let mut report = Report::default();
            ops.retain(|op| !is_dropped(op.key));
            ops.sort_unstable_by_key(|op| (op.key, op.lsn));
            partition.apply_fsm(batch, ops, parts, shared, &mut report);
            report
        });
        self.take_reports(reports, &mut fsm_ops)?;
        self.stats.fsm += started.elapsed();
        Ok(())
    }

    fn registered_fsm_ops(&self, parts: &[Part<'_>], fsm_ops: &mut [Vec<FsmOp>]) {
        for (number, part) in (0..).zip(parts) {
            for op in part.cut(&part.planned.plan.fsm_ops) {
                let (Change::Block(block) | Change::Overwrite(block)) = op.change else { continue };
                let lsn = part.planned.stretch.span(op.place).end;
                let change = FsmChange::Redo { part: number, place: op.place, block };
                fsm_ops[partition_of(op.key)].push(FsmOp { key: op.key, lsn, change });
            }
        }
    }

    fn take_reports(&mut self, reports: Vec<Report>, fsm_ops: &mut [Vec<FsmOp>]) -> Result<(), ReplayError> {
        let mut failure: Option<(Lsn, ReplayError)> = None;
        let mut grown = Vec::new();
        for report in reports {
            for op in report.fsm {
                fsm_ops[partition_of(op.key)].push(op);
            }
            self.invalid.extend(report.invalid);
            grown.extend(report.grown);
            self.stats.pages_read += report.pages_read;
            self.stats.pages_evicted += report.pages_evicted;
            self.stats.images_verified += report.images_verified;
            self.stats.image_difference_count += report.image_difference_count;
            self.stats.image_differences.extend(report.image_differences);
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
            let fork = self.shared.rels.fork(number);
            if let Some(blocks) = fork.wanted_blocks() {
                self.shared.files.extend(fork.rel, fork.fork, blocks)?;
                fork.set_blocks(blocks);
            }
        }
        Ok(())
    }
}
