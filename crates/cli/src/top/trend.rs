//! What was shown before, for sparklines.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use walrider_lag::split::View;

/// Rounds that are remembered.
pub const MOST: usize = 300;

/// One number a round, the newest last; none where it was not known.
pub type Line = VecDeque<Option<f64>>;

/// How numbers of a standby went.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StandbyTrend {
    /// Bytes a second that were replayed.
    pub replay_rate: Line,
    /// Seconds.
    pub lag_seconds: Line,
}

/// How numbers went.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Trend {
    /// Bytes of WAL a second.
    pub wal_rate: Line,
    /// By [`Standby::key`](walrider_lag::split::Standby::key).
    pub standbys: BTreeMap<String, StandbyTrend>,
}

impl Trend {
    /// Adds a round. Standbys that have been gone for all of it are forgotten.
    pub fn note(&mut self, view: &View) {
        push(&mut self.wal_rate, view.wal_rate.filter(|_| view.error.is_none()));
        for standby in &view.standbys {
            self.standbys.entry(standby.key()).or_default();
        }
        self.standbys.retain(|name, trend| {
            let standby = view.standbys.iter().find(|standby| standby.key() == *name);
            push(&mut trend.replay_rate, standby.and_then(|standby| standby.speed.rate));
            push(&mut trend.lag_seconds, standby.and_then(|standby| standby.replay.seconds));
            standby.is_some() || trend.lag_seconds.iter().chain(&trend.replay_rate).any(Option::is_some)
        });
    }
}

fn push(line: &mut Line, value: Option<f64>) {
    if line.len() == MOST {
        line.pop_front();
    }
    line.push_back(value);
}

#[cfg(test)]
mod tests {
    use walrider_lag::split::Standby;

    use super::*;

    #[test]
    fn it_is_bounded_and_forgets() {
        let mut standby = Standby { name: "s".into(), ..Standby::default() };
        standby.replay.seconds = Some(2.0);
        let with = View { wal_rate: Some(1.0), standbys: vec![standby], ..View::default() };
        let mut trend = Trend::default();
        (0..MOST + 10).for_each(|_| trend.note(&with));
        assert_eq!((trend.wal_rate.len(), trend.standbys["s "].lag_seconds.len()), (MOST, MOST));
        trend.note(&View { error: Some("gone".into()), ..with });
        assert_eq!((trend.wal_rate.back(), trend.wal_rate.front()), (Some(&None), Some(&Some(1.0))));
        (0..MOST).for_each(|_| trend.note(&View::default()));
        assert!(trend.standbys.is_empty());
    }
}
