//! What `apply` tells of itself.

use std::sync::atomic::Ordering;

use walrider_layout::Lsn;
use walrider_observe::apply::{ApplyPositions, ApplyState, ApplyStatus};
use walrider_observe::status::Time;

use crate::apply::Apply;
use crate::conflict::Kind;
use crate::counters::Counters;

impl Apply {
    /// A snapshot; does not wait for anybody.
    pub fn status(&self, version: &str, started_at: Time) -> ApplyStatus {
        let (progress, counters) = (self.progress(), &self.counters);
        let known = |lsn: u64| Some(Lsn(lsn)).filter(|lsn| lsn.0 > 0);
        let now = Time::now();
        // While there is nothing to apply, the publisher is told of more than was.
        let applied = known(Counters::get(&counters.applied).max(progress.flushed.0));
        let streaming = matches!(progress.state, ApplyState::Streaming | ApplyState::Paused);
        let received = known(progress.received.0).max(applied);
        let caught_up = progress.idle && streaming;
        let lag = received.zip(applied).map(|(received, applied)| received.0.saturating_sub(applied.0));
        let age = Time::from_timestamptz(counters.applied_time.load(Ordering::Relaxed))
            .map(|time| (now.unix_seconds() - time.unix_seconds()).max(0.0));
        // The last commit may be older than a quiet night.
        let behind = progress.was_idle.map(|time| time.elapsed().as_secs_f64());
        let age = age.map(|age| behind.map_or(age, |behind| age.min(behind)));
        let (source, target) = progress.peers.unzip();
        let conflict = |(kind, count): (Kind, &std::sync::atomic::AtomicU64)| (kind.name(), Counters::get(count));
        ApplyStatus {
            version: version.to_owned(),
            started_at,
            state: progress.state,
            source: source.filter(|_| streaming),
            target: target.filter(|_| streaming),
            slot: self.settings.slot.clone(),
            origin: self.settings.origin.clone(),
            positions: ApplyPositions { received, applied, flushed: known(progress.flushed.0) },
            lag_bytes: if caught_up { Some(0) } else { lag },
            lag_seconds: if caught_up { Some(0.0) } else { age },
            queued_transactions: progress.queued,
            waiting_batches: progress.waiting,
            executing_batches: progress.executing,
            transactions: Counters::get(&counters.transactions),
            changes: Counters::get(&counters.changes),
            batches: Counters::get(&counters.batches),
            retries: Counters::get(&counters.retries),
            gave_way: Counters::get(&counters.gave_way),
            conflicts: Kind::ALL.into_iter().zip(&counters.conflicts).map(conflict).collect(),
            spilled_bytes: Counters::get(&counters.spilled_bytes),
            connections: progress.connections,
            last_error: progress.last_error,
            ..ApplyStatus::new()
        }
    }
}
