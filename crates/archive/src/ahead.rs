//! A process that fetches segments before they are asked for, into a spool, as long as somebody asks.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use walrider_layout::TimelineId;
use walrider_layout::wal::SegmentSize;
use walrider_store::driver::free_bytes;

use crate::archive::Archive;
use crate::error::Result;
use crate::name::WalName;
use crate::spool::Spool;

/// Most bytes of segments that are in memory at once.
const MAX_MEMORY: u64 = 256 << 20;
/// How often the position is looked at: a call of `restore_command` takes longer.
const INTERVAL: Duration = Duration::from_millis(2);
/// The same, while nobody asks.
const QUIET: Duration = Duration::from_millis(50);

/// What is fetched, and how.
#[derive(Clone, Debug)]
pub struct Ahead {
    /// Where to.
    pub spool: Spool,
    /// How long the cluster's segments are.
    pub size: SegmentSize,
    /// How many segments behind the one that was asked for last.
    pub window: u64,
    /// How many at once.
    pub jobs: usize,
    /// After how long without a request it ends, and empties the spool.
    pub idle: Duration,
}

struct State {
    timeline: TimelineId,
    /// The segment that was asked for last.
    position: u64,
    /// Those that were fetched, or are being fetched.
    begun: BTreeSet<u64>,
    /// The first that the archive did not deliver.
    end: Option<u64>,
    stops: bool,
}

impl State {
    /// Somebody asked for a segment. Several may ask side by side, so that it can be one before the last.
    fn move_to(&mut self, timeline: TimelineId, segment: u64, window: u64) {
        let behind = segment < self.position && self.position - segment <= window;
        if timeline == self.timeline && behind {
            return;
        }
        if timeline != self.timeline || segment < self.position {
            self.begun.clear();
        }
        (self.timeline, self.position, self.end) = (timeline, segment, None);
        self.begun = self.begun.split_off(&segment);
    }

    /// The segment to fetch next.
    fn choose(&self, window: u64) -> Option<u64> {
        let upto = self.position.saturating_add(window).min(self.end.unwrap_or(u64::MAX).saturating_sub(1));
        (self.position + 1..=upto).find(|segment| !self.begun.contains(segment))
    }
}

impl Ahead {
    /// Fetches until nobody asks any more. Returns at once if another process does.
    ///
    /// # Errors
    /// When the spool cannot be read or written. An archive that fails is none: who asks for the segment will hear of it.
    pub fn run(&self, archive: impl Fn() -> Result<Archive> + Sync) -> Result<()> {
        let Some(_lock) = self.lock()? else { return Ok(()) };
        let position = self.spool.position();
        let Some((timeline, position)) = position.and_then(|name| self.size.parse_file_name(name.as_str())) else {
            return Ok(());
        };
        self.clean(timeline, position, true)?;
        let state = State { timeline, position, begun: BTreeSet::new(), end: None, stops: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let most = (MAX_MEMORY / self.size.bytes()).max(1) as usize;
        let result = std::thread::scope(|scope| {
            for _ in 0..self.jobs.clamp(1, most) {
                scope.spawn(|| self.work(&state, &changed, &archive));
            }
            let result = self.watch(&state, &changed);
            lock(&state).stops = true;
            changed.notify_all();
            result
        });
        self.spool.remove()?;
        result
    }

    /// Locks the spool. Who only looks whether it is locked has a lock for a moment.
    fn lock(&self) -> Result<Option<File>> {
        for _ in 0..5 {
            if let Some(file) = self.spool.lock()? {
                return Ok(Some(file));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(None)
    }

    /// Follows who asks, until nobody does.
    fn watch(&self, state: &Mutex<State>, changed: &Condvar) -> Result<()> {
        let mut asked = Instant::now();
        let mut last = self.spool.position();
        while asked.elapsed() < self.idle {
            std::thread::sleep(if asked.elapsed() < Duration::from_secs(2) { INTERVAL } else { QUIET });
            let position = self.spool.position();
            if position.is_none() {
                // The spool was removed.
                return Ok(());
            }
            if position == last {
                continue;
            }
            asked = Instant::now();
            if let Some((timeline, segment)) =
                position.as_ref().and_then(|name| self.size.parse_file_name(name.as_str()))
            {
                let mut state = lock(state);
                state.move_to(timeline, segment, self.window);
                let (timeline, position) = (state.timeline, state.position);
                drop(state);
                changed.notify_all();
                self.clean(timeline, position, false)?;
            }
            last = position;
        }
        Ok(())
    }

    /// Removes what is not in the window. Others that ask side by side may be behind.
    fn clean(&self, timeline: TimelineId, position: u64, parts: bool) -> Result<()> {
        let window = position.saturating_sub(self.window)..=position.saturating_add(self.window);
        let keep = |name: &WalName| match self.size.parse_file_name(name.as_str()) {
            Some((of, segment)) => of == timeline && window.contains(&segment),
            None => false,
        };
        self.spool.clean(keep, parts)
    }

    fn work(&self, state: &Mutex<State>, changed: &Condvar, archive: &impl Fn() -> Result<Archive>) {
        // One each, made when it is needed: its connections are its own.
        let mut opened = None;
        let mut guard = lock(state);
        while !guard.stops {
            let Some(segment) = guard.choose(self.window).filter(|_| self.has_room()) else {
                guard = changed.wait_timeout(guard, Duration::from_millis(500)).expect("no panic while locked").0;
                continue;
            };
            guard.begun.insert(segment);
            let timeline = guard.timeline;
            drop(guard);
            let fetched = self.fetch(timeline, segment, &mut opened, archive);
            guard = lock(state);
            if !matches!(fetched, Ok(true)) && guard.timeline == timeline {
                // Nothing is asked for behind it until somebody goes on.
                guard.begun.remove(&segment);
                guard.end = Some(guard.end.unwrap_or(segment).min(segment));
            }
        }
    }

    /// Fetches a segment. `false`: it is not there.
    fn fetch(
        &self,
        timeline: TimelineId,
        segment: u64,
        opened: &mut Option<Archive>,
        archive: &impl Fn() -> Result<Archive>,
    ) -> Result<bool> {
        let Some(name) = WalName::parse(&self.size.file_name(timeline, segment)) else { return Ok(false) };
        if self.spool.holds(&name)? {
            return Ok(true);
        }
        let coming = self.spool.announce(&name)?;
        let archive = match opened {
            Some(archive) => archive,
            None => opened.insert(archive()?),
        };
        let Some(fetched) = archive.get(&name, &mut || ())? else { return Ok(false) };
        fetched.is_of(self.spool.system_identifier(), &name)?;
        self.spool.add(&name, &fetched, coming)?;
        Ok(true)
    }

    /// Whether the disk has room for one more from each job: half of what is free is left alone.
    fn has_room(&self) -> bool {
        free_bytes(self.spool.path()).is_some_and(|free| free / 2 >= self.jobs as u64 * self.size.bytes())
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no panic while locked")
}
