//! The records of one batch, and what is to be done for them after their pages.

use std::collections::{HashSet, VecDeque};

use walrider_layout::{Lsn, RelFileLocator};

use crate::cuts::Cuts;
use crate::engine::Stop;
use crate::globals::Action;
use crate::partition::Part;
use crate::plan::Planned;

/// The records of one batch.
#[derive(Default)]
pub struct Batch {
    /// For stretches from the front of the queue on: first record past the batch.
    pub upto: Vec<u32>,
    /// Relations dropped in it.
    pub drops: HashSet<RelFileLocator>,
    /// Relations truncated in it, if it is one that may be larger than memory; others end with a truncation.
    pub cuts: Cuts,
    /// Done after its pages, in order.
    pub actions: Vec<Action>,
    /// The last plain commit of the stretch that is being sequenced.
    pub last_commit: Option<u32>,
    /// It ends here whatever follows: pages must not be exchanged with those of later records.
    pub ends: bool,
    /// Replay stops after it.
    pub stop: Option<Stop>,
}

impl Batch {
    /// Files a drop. What it drops need not be made before.
    pub fn drop_relations(&mut self, rels: Vec<RelFileLocator>) {
        let gone: HashSet<RelFileLocator> = rels.iter().copied().collect();
        self.actions.retain(|action| !matches!(action, Action::CreateFork { rel, .. } if gone.contains(rel)));
        self.drops.extend(gone);
        self.actions.push(Action::DropRelations(rels));
    }

    /// Its records.
    pub fn parts<'q>(&self, queue: &'q VecDeque<Planned>) -> Vec<Part<'q>> {
        queue.iter().zip(&self.upto).map(|(planned, &upto)| Part::new(planned, planned.done, upto)).collect()
    }

    /// Where its last record ends.
    pub fn end(&self, queue: &VecDeque<Planned>) -> Option<Lsn> {
        let ends = queue.iter().zip(&self.upto).filter(|(_, upto)| **upto > 0);
        ends.map(|(planned, &upto)| planned.end_of(upto - 1)).max()
    }
}

/// Where the last of the loaded records ends that replay can get to; one that ends past `limit` is none.
pub fn loaded_end(queue: &VecDeque<Planned>, limit: Lsn) -> Option<Lsn> {
    let mut end = None;
    for planned in queue {
        let places = planned.stretch.places();
        let obstacle = planned.plan.obstacle.as_ref().map_or(places.len(), |(number, _)| *number as usize);
        let upto = places[..obstacle].partition_point(|&place| planned.stretch.span(place).end <= limit);
        if upto > 0 {
            end = Some(planned.end_of(upto as u32 - 1));
        }
        if upto < places.len() {
            break;
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use walrider_layout::ForkNumber;

    use super::*;

    /// Its files were made, only to be removed right after.
    #[test]
    fn what_is_dropped_is_not_made_before() {
        let rel = |relation| RelFileLocator { tablespace: 1663, database: 5, relation };
        let create = |relation| Action::CreateFork { rel: rel(relation), fork: ForkNumber::Main };
        let mut batch = Batch { actions: vec![create(1), create(2), create(3)], ..Batch::default() };
        batch.drop_relations(vec![rel(1), rel(3), rel(4)]);
        batch.actions.push(create(5));
        batch.drop_relations(vec![rel(2)]);
        let (first, second) = (vec![rel(1), rel(3), rel(4)], vec![rel(2)]);
        assert_eq!(batch.actions, [Action::DropRelations(first), create(5), Action::DropRelations(second)]);
        assert_eq!(batch.drops.len(), 4);
    }
}
