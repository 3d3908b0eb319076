//! Which batches may be executed side by side.
//!
//! Batches are numbered from 1 in the publisher's order, and commit in that order. So all that one may have to wait for is that
//! another has committed, and with it all before: a single number.

use crate::hashed::Hashed;

/// What is read or written, hashed. That two things have one hash costs time, nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The thing.
    pub hash: u64,
    /// Whether it is changed.
    pub write: bool,
}

/// Batches that have accessed a thing, zero for none.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    read: u64,
    write: u64,
}

/// What was accessed by batches that have not committed.
#[derive(Debug, Default)]
pub struct Schedule {
    last: Hashed<Last>,
    committed: u64,
    /// Size of `last` at which those that have committed are forgotten.
    forget_at: usize,
}

/// Entries that are kept without looking whether they are still of use.
const LEAST_ENTRIES: usize = 10_000;

impl Schedule {
    /// Before the first batch.
    pub fn new() -> Schedule {
        Schedule { forget_at: LEAST_ENTRIES, ..Schedule::default() }
    }

    /// All batches up to this one have committed.
    pub fn committed(&mut self, batch: u64) {
        debug_assert!(batch >= self.committed, "batches commit in order");
        self.committed = batch;
    }

    /// The batch that has to have committed before something with these accesses begins; zero for none.
    pub fn begins_after(&self, accesses: &[Access]) -> u64 {
        let of = |access: &Access| match self.last.get(&access.hash) {
            None => 0,
            Some(last) if access.write => last.read.max(last.write),
            Some(last) => last.write,
        };
        let after = accesses.iter().map(of).max().unwrap_or(0);
        if after > self.committed { after } else { 0 }
    }

    /// Batch `batch` has these accesses; it is the newest.
    pub fn add(&mut self, batch: u64, accesses: &[Access]) {
        debug_assert!(batch > self.committed, "it has not committed");
        for access in accesses {
            let last = self.last.entry(access.hash).or_default();
            let of = if access.write { &mut last.write } else { &mut last.read };
            debug_assert!(*of <= batch, "batches are added in order");
            *of = batch;
        }
        if self.last.len() > self.forget_at {
            let committed = self.committed;
            self.last.retain(|_, last| last.read.max(last.write) > committed);
            self.forget_at = (2 * self.last.len()).max(LEAST_ENTRIES);
        }
    }
}

#[cfg(test)]
mod tests {
    use walrider_seed::Random;

    use super::*;

    /// Adds `plus` to what is read of all `from`, and writes it to `to`.
    #[derive(Clone, Debug)]
    struct Step {
        from: Vec<usize>,
        to: usize,
        plus: u64,
    }

    fn run(steps: &[Step], values: &mut [u64]) {
        for step in steps {
            let sum = step.from.iter().fold(step.plus, |sum, &at| sum.wrapping_mul(31).wrapping_add(values[at]));
            values[step.to] = sum;
        }
    }

    fn accesses(steps: &[Step]) -> Vec<Access> {
        let reads = steps.iter().flat_map(|step| step.from.iter().map(|&at| Access { hash: at as u64, write: false }));
        let writes = steps.iter().map(|step| Access { hash: step.to as u64, write: true });
        reads.chain(writes).collect()
    }

    /// Batches are executed in any order that the schedule allows, each at one moment between its beginning and its commit; what
    /// comes out is what they do one after the other. Nothing is promised of batches that see one another half done.
    #[test]
    fn any_order_that_is_allowed_gives_the_same() {
        let mut side_by_side = 0_u64;
        walrider_seed::rounds(300, |seed| {
            let mut rng = Random(seed);
            let things = 2 + rng.below(30) as usize;
            let batches: Vec<Vec<Step>> = (0..40)
                .map(|_| {
                    let step = |rng: &mut Random| Step {
                        from: (0..rng.below(3)).map(|_| rng.below(things as u64) as usize).collect(),
                        to: rng.below(things as u64) as usize,
                        plus: rng.below(1000),
                    };
                    (0..1 + rng.below(3)).map(|_| step(&mut rng)).collect()
                })
                .collect();
            let mut expected = vec![0; things];
            batches.iter().for_each(|steps| run(steps, &mut expected));

            let (mut schedule, mut values) = (Schedule::new(), vec![0; things]);
            schedule.forget_at = rng.below(20) as usize;
            // Added and not committed, in order: when it may begin, and whether it was executed.
            let mut open: Vec<(u64, u64, bool)> = Vec::new();
            let (mut added, mut committed) = (0, 0);
            while committed < batches.len() as u64 {
                match rng.below(3) {
                    0 if added < batches.len() as u64 && open.len() < 8 => {
                        let accesses = accesses(&batches[added as usize]);
                        added += 1;
                        open.push((added, schedule.begins_after(&accesses), false));
                        schedule.add(added, &accesses);
                    }
                    1 if !open.is_empty() => {
                        let at = rng.below(open.len() as u64) as usize;
                        let (batch, after, executed) = open[at];
                        if !executed && after <= committed {
                            side_by_side += u64::from(at > 0);
                            run(&batches[batch as usize - 1], &mut values);
                            open[at].2 = true;
                        }
                    }
                    _ if open.first().is_some_and(|first| first.2) => {
                        committed = open.remove(0).0;
                        schedule.committed(committed);
                    }
                    _ => (),
                }
            }
            assert_eq!(values, expected);
        });
        assert!(side_by_side > 500, "nothing was executed out of order: {side_by_side}");
    }

    #[test]
    fn readers_do_not_wait_for_readers() {
        let (read, write) = (Access { hash: 1, write: false }, Access { hash: 1, write: true });
        let mut schedule = Schedule::new();
        schedule.add(1, &[read]);
        assert_eq!((schedule.begins_after(&[read]), schedule.begins_after(&[write])), (0, 1));
        schedule.add(2, &[write]);
        assert_eq!((schedule.begins_after(&[read]), schedule.begins_after(&[])), (2, 0));
        schedule.committed(2);
        assert_eq!(schedule.begins_after(&[write]), 0);
    }
}
