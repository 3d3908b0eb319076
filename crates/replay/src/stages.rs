//! Where the time of a replay goes. It is in one stage at each moment, and other threads may look.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What replay does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nothing but reading and decoding WAL.
    Load,
    /// Waiting for `restore_command`.
    Fetch,
    /// Records in order: transaction ends and all else that is global.
    Sequence,
    /// Grouping operations by page.
    Gather,
    /// Redoing pages; the next WAL is decoded meanwhile.
    Apply,
    /// Of applying, the share in which its threads read pages.
    Read,
    /// Putting a batch apart that is larger than memory; the next WAL is decoded meanwhile.
    Spill,
    /// Free space maps.
    Fsm,
    /// File actions: drops, truncations, databases.
    Actions,
    /// Writing pages.
    Write,
    /// Making them durable, SLRUs and the control file.
    Sync,
    /// There is no more WAL that may be replayed.
    Wait,
    /// `recovery_min_apply_delay`
    Delay,
    /// Paused.
    Pause,
}

impl Stage {
    /// In the order in which WAL passes them; those of waiting are last.
    pub const ALL: [Stage; 14] = [
        Stage::Load,
        Stage::Fetch,
        Stage::Sequence,
        Stage::Gather,
        Stage::Apply,
        Stage::Read,
        Stage::Spill,
        Stage::Fsm,
        Stage::Actions,
        Stage::Write,
        Stage::Sync,
        Stage::Wait,
        Stage::Delay,
        Stage::Pause,
    ];

    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Load => "load",
            Stage::Fetch => "fetch",
            Stage::Sequence => "sequence",
            Stage::Gather => "gather",
            Stage::Apply => "apply",
            Stage::Read => "read",
            Stage::Spill => "spill",
            Stage::Fsm => "fsm",
            Stage::Actions => "actions",
            Stage::Write => "write",
            Stage::Sync => "sync",
            Stage::Wait => "wait",
            Stage::Delay => "delay",
            Stage::Pause => "pause",
        }
    }
}

/// The time of each stage so far. Clones are the same ones.
#[derive(Clone, Debug, Default)]
pub struct Stages(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    times: Mutex<Times>,
    /// Nanoseconds in which threads have read pages, added up, since applying began.
    reads: AtomicU64,
}

#[derive(Debug, Default)]
struct Times {
    over: [Duration; Stage::ALL.len()],
    now: Option<Now>,
    /// What was told last: no time becomes less, although a part of applying may turn out to have been reading.
    told: [Duration; Stage::ALL.len()],
}

/// What has begun, when, and on how many threads.
#[derive(Clone, Copy, Debug)]
struct Now {
    stage: Stage,
    since: Instant,
    threads: u32,
}

impl Times {
    /// What has begun ends; `reads` is the time that one thread read.
    fn leave(&mut self, at: Instant, reads: Duration) {
        if let Some(now) = self.now.take() {
            let took = at - now.since;
            let reads = if now.stage == Stage::Apply { reads.min(took) } else { Duration::ZERO };
            self.over[now.stage as usize] += took - reads;
            self.over[Stage::Read as usize] += reads;
        }
    }
}

impl Stages {
    fn lock(&self) -> MutexGuard<'_, Times> {
        self.0.times.lock().expect("no panic while locked")
    }

    fn reads(&self) -> Duration {
        Duration::from_nanos(self.0.reads.load(Ordering::Relaxed))
    }

    /// Each stage with its time, with what is going on. None becomes less.
    pub fn times(&self) -> impl Iterator<Item = (Stage, Duration)> {
        let mut times = self.lock();
        let mut so_far = Times { over: times.over, now: times.now, told: times.told };
        so_far.leave(Instant::now(), self.reads() / times.now.map_or(1, |now| now.threads));
        for (told, so_far) in times.told.iter_mut().zip(so_far.over) {
            *told = so_far.max(*told);
        }
        let told = times.told;
        Stage::ALL.into_iter().map(move |stage| (stage, told[stage as usize]))
    }

    /// What is going on.
    pub fn now(&self) -> Option<Stage> {
        self.lock().now.map(|now| now.stage)
    }

    /// This stage begins; it ends with what is returned, and the one that it interrupts goes on.
    pub fn enter(&self, stage: Stage) -> Entered {
        self.enter_on(stage, 1)
    }

    /// The same on so many threads, which say what they read.
    pub fn enter_on(&self, stage: Stage, threads: usize) -> Entered {
        let at = Instant::now();
        let mut times = self.lock();
        let interrupted = times.now;
        times.leave(at, Duration::ZERO);
        self.0.reads.store(0, Ordering::Relaxed);
        times.now = Some(Now { stage, since: at, threads: threads.try_into().unwrap_or(1).max(1) });
        Entered { stages: self.clone(), interrupted }
    }

    /// One of the threads has read for so long.
    pub fn note_read(&self, time: Duration) {
        self.0.reads.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// A stage goes on until this is dropped.
#[must_use]
pub struct Entered {
    stages: Stages,
    interrupted: Option<Now>,
}

impl Entered {
    /// Its threads have worked for so long, added up: ends it, and what they read is the share of that.
    pub fn end(self, worked: Duration) {
        let at = Instant::now();
        let mut times = self.stages.lock();
        let took = times.now.map_or(Duration::ZERO, |now| at - now.since);
        let share = self.stages.reads().as_secs_f64() / worked.as_secs_f64();
        // Nothing of nothing is no number.
        times.leave(at, took.mul_f64(if share > 0.0 { share.min(1.0) } else { 0.0 }));
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let at = Instant::now();
        let mut times = self.stages.lock();
        times.leave(at, Duration::ZERO);
        times.now = self.interrupted.map(|interrupted| Now { since: at, ..interrupted });
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    fn time(stages: &Stages, wanted: Stage) -> Duration {
        stages.times().find(|(stage, _)| *stage == wanted).unwrap().1
    }

    /// No moment is counted twice, and none is lost.
    #[test]
    fn one_at_each_moment() {
        let (stages, began) = (Stages::default(), Instant::now());
        let outer = stages.enter(Stage::Write);
        sleep(Duration::from_millis(3));
        drop(stages.enter(Stage::Sync));
        let inner = stages.enter(Stage::Sync);
        assert_eq!(stages.now(), Some(Stage::Sync));
        sleep(Duration::from_millis(2));
        assert!(time(&stages, Stage::Sync) >= Duration::from_millis(2), "it is told while it goes on");
        drop(inner);
        assert_eq!(stages.now(), Some(Stage::Write));
        drop(outer);
        let all = began.elapsed();
        assert_eq!(stages.now(), None);
        let sum: Duration = stages.times().map(|(_, time)| time).sum();
        assert!(time(&stages, Stage::Write) >= Duration::from_millis(3) && sum <= all, "{sum:?} {all:?}");
    }

    /// Two threads, of which one reads all the time: half of it is reading, while it goes on and when it is over.
    #[test]
    fn a_share_of_applying_is_reading() {
        let stages = Stages::default();
        let apply = stages.enter_on(Stage::Apply, 2);
        sleep(Duration::from_millis(8));
        stages.note_read(Duration::from_millis(8));
        assert_eq!(time(&stages, Stage::Read), Duration::from_millis(4));
        apply.end(Duration::from_millis(16));
        let (apply, read) = (time(&stages, Stage::Apply), time(&stages, Stage::Read));
        assert!(read >= Duration::from_millis(4) && apply >= Duration::from_millis(4), "{apply:?} {read:?}");
        assert_eq!(stages.now(), None);
        // What was told is not taken back.
        drop(stages.enter(Stage::Wait));
        assert!(time(&stages, Stage::Read) >= read && time(&stages, Stage::Apply) >= apply);
    }
}
