//! Whose turn it is: batches begin when what they depend on has committed, and commit in order.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What a worker does, as others may see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It has nothing to do.
    Idle,
    /// It waits until another batch has committed, before it begins.
    Waiting,
    /// It executes a batch, or commits it.
    Executing,
    /// It has executed a batch, and waits until it may commit.
    Executed,
}

/// A worker.
#[derive(Clone, Copy, Debug)]
pub struct Seat {
    /// What it does.
    pub phase: Phase,
    /// The batch that it has.
    pub batch: u64,
    /// Since when.
    pub since: Instant,
    /// Its backend's process id on the target.
    pub pid: i32,
    /// It is to roll back, and to execute its batch again when that is the oldest.
    pub give_way: bool,
}

#[derive(Debug)]
struct State {
    committed: u64,
    stop: bool,
    seats: Vec<Seat>,
}

/// What came of waiting for one's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Go on.
    Mine,
    /// Roll back first.
    GiveWay,
    /// All ends.
    Stop,
}

/// Shared by the workers.
#[derive(Debug)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

impl Turns {
    /// For so many workers.
    pub fn new(workers: usize) -> Turns {
        let seat = Seat { phase: Phase::Idle, batch: 0, since: Instant::now(), pid: 0, give_way: false };
        let state = State { committed: 0, stop: false, seats: vec![seat; workers] };
        Turns { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all waiting.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
    }

    /// The last batch that has committed.
    pub fn committed(&self) -> u64 {
        self.lock().committed
    }

    /// Whether a batch is the oldest that has not committed.
    pub fn is_oldest(&self, batch: u64) -> bool {
        self.lock().committed + 1 == batch
    }

    /// What the workers do.
    pub fn seats(&self) -> Vec<Seat> {
        self.lock().seats.clone()
    }

    /// A worker's backend.
    pub fn introduce(&self, worker: usize, pid: i32) {
        self.lock().seats[worker].pid = pid;
    }

    /// What a worker does now.
    pub fn enter(&self, worker: usize, phase: Phase, batch: u64) {
        let seat = &mut self.lock().seats[worker];
        // Who is to give way, and has just executed the last of it, learns that when it waits.
        let give_way = seat.give_way && phase == Phase::Executed && seat.batch == batch;
        *seat = Seat { phase, batch, since: Instant::now(), pid: seat.pid, give_way };
    }

    /// Waits until a batch may begin. `false`: all ends.
    pub fn wait_committed(&self, batch: u64) -> bool {
        let mut state = self.lock();
        while state.committed < batch && !state.stop {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.stop
    }

    /// Waits until all batches before this one have committed.
    pub fn wait_turn(&self, worker: usize, batch: u64) -> Turn {
        let mut state = self.lock();
        loop {
            if state.stop {
                return Turn::Stop;
            }
            if state.committed + 1 >= batch {
                return Turn::Mine;
            }
            if state.seats[worker].give_way {
                return Turn::GiveWay;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A batch has committed.
    pub fn commit(&self, batch: u64) {
        let mut state = self.lock();
        assert_eq!(state.committed + 1, batch, "batches commit in order");
        state.committed = batch;
        self.changed.notify_all();
    }

    /// Whether a worker was asked to give way.
    pub fn gives_way(&self, worker: usize) -> bool {
        self.lock().seats[worker].give_way
    }

    /// Asks the worker that has this batch to give way, unless it is the oldest. Returns whether it executes, so that its
    /// backend has to be told to cancel that.
    pub fn give_way(&self, worker: usize, batch: u64) -> bool {
        let mut state = self.lock();
        let oldest = state.committed + 1;
        let seat = &mut state.seats[worker];
        if seat.batch != batch || batch <= oldest || !matches!(seat.phase, Phase::Executing | Phase::Executed) {
            return false;
        }
        seat.give_way = true;
        let executing = seat.phase == Phase::Executing;
        self.changed.notify_all();
        executing
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn batches_commit_in_order_in_whatever_order_they_are_done() {
        let turns = Arc::new(Turns::new(4));
        let order = Arc::new(Mutex::new(Vec::new()));
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let (turns, order) = (turns.clone(), order.clone());
                thread::spawn(move || {
                    for batch in (1..=40).rev().filter(|batch| batch % 4 == worker as u64).rev() {
                        turns.enter(worker, Phase::Executed, batch);
                        assert_eq!(turns.wait_turn(worker, batch), Turn::Mine);
                        order.lock().unwrap().push(batch);
                        turns.commit(batch);
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        assert!(order.lock().unwrap().iter().copied().eq(1..=40));
    }

    #[test]
    fn only_who_is_not_the_oldest_gives_way() {
        let turns = Turns::new(2);
        turns.enter(0, Phase::Executing, 1);
        turns.enter(1, Phase::Executed, 2);
        assert!(!turns.give_way(0, 1));
        assert!(!turns.give_way(1, 3));
        assert!(!turns.give_way(1, 2));
        assert_eq!(turns.wait_turn(1, 2), Turn::GiveWay);
        turns.enter(1, Phase::Executing, 2);
        assert!(turns.give_way(1, 2));
        turns.commit(1);
        assert_eq!(turns.wait_turn(1, 2), Turn::Mine);
        turns.stop();
        assert_eq!((turns.wait_turn(1, 2), turns.wait_committed(9)), (Turn::Stop, false));
    }
}
