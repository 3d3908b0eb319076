//! What is known of segments, and threads that fetch them ahead of who reads.
//!
//! Only what is fetched is worth that: files of directories are looked for by who needs them. The segment that is needed
//! next is fetched first. How far ahead is bounded by a window, by the disk, and by what the archive has: past a segment
//! that it does not deliver, nothing is asked for.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use walrider_datadir::descriptors::shares;

use crate::driver::Remote;
use crate::error::StoreError;
use crate::find::{Finder, Found};

/// Most bytes of segments that are fetched ahead.
const MAX_AHEAD_BYTES: u64 = 1 << 30;
/// Segments ahead that even few jobs may fetch: two batches of the default size. With two jobs and 300 ms a segment, four
/// segments ahead took 40 % longer than the commands themselves.
const LEAST_AHEAD: u64 = 16;

/// Looks segments up, each once until it is forgotten, for all that ask for it.
pub struct Fetcher {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    finder: Finder,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    segments: BTreeMap<u64, Lookup>,
    /// The first segment that is still to be read; unknown until reading has begun.
    position: Option<u64>,
    /// How many segments from there on are worth a try: one where the archive has just ended, and again more while it
    /// delivers.
    width: u64,
    /// Number of the next lookup.
    next: u64,
    stops: bool,
    /// How many wait for a segment, since when, and how long it has been in all.
    waiting: usize,
    since: Instant,
    waited: Duration,
    /// Hears when that begins and ends.
    on_wait: Option<OnWait>,
}

/// See [`crate::source::Source::on_wait`].
pub type OnWait = Box<dyn FnMut(bool) + Send>;

enum Lookup {
    /// Somebody waits for it.
    Wanted,
    /// Somebody looks for it; the number tells a lookup from one that was forgotten.
    Busy(u64),
    /// This is what was found.
    Known(Result<Found, StoreError>),
}

impl Fetcher {
    /// Looks with a finder.
    pub fn new(finder: Finder) -> Fetcher {
        let state = State {
            segments: BTreeMap::new(),
            position: None,
            width: u64::MAX,
            next: 0,
            stops: false,
            waiting: 0,
            since: Instant::now(),
            waited: Duration::ZERO,
            on_wait: None,
        };
        let shared = Arc::new(Shared { finder, state: Mutex::new(state), changed: Condvar::new() });
        Fetcher { shared, threads: Mutex::default() }
    }

    /// Who looks.
    pub fn finder(&self) -> &Finder {
        &self.shared.finder
    }

    /// Who looks, to be told how before anything is looked for.
    pub fn finder_mut(&mut self) -> &mut Finder {
        &mut Arc::get_mut(&mut self.shared).expect("no thread is started yet").finder
    }

    /// Who hears of waits.
    pub fn on_wait(&self, told: OnWait) {
        self.shared.state().on_wait = Some(told);
    }

    /// How long somebody waited for a segment.
    pub fn waited(&self) -> Duration {
        self.shared.state().waited
    }

    /// What is found of a segment; looks for it, or waits until another thread has.
    ///
    /// # Errors
    /// When looking failed. It is tried again for the next that asks.
    pub fn get(&self, segment: u64) -> Result<Found, StoreError> {
        let mut state = self.settle(segment)?;
        if let Some(found) = state.found(segment) {
            return Ok(found);
        }
        match state.segments.remove(&segment) {
            Some(Lookup::Known(Err(error))) => Err(error),
            _ => unreachable!("it is settled"),
        }
    }

    /// The same; an error stays for who asks next.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn look(&self, segment: u64) -> Result<Option<Found>, StoreError> {
        Ok(self.settle(segment)?.found(segment))
    }

    /// Returns once something is known of a segment.
    fn settle(&self, segment: u64) -> Result<MutexGuard<'_, State>, StoreError> {
        let shared = &*self.shared;
        let mut state = shared.state();
        loop {
            match state.segments.get(&segment) {
                Some(Lookup::Known(_)) => return Ok(state),
                Some(Lookup::Wanted | Lookup::Busy(_)) => state = shared.wait(state),
                None if shared.finder.fetches(segment) => {
                    state.segments.insert(segment, Lookup::Wanted);
                    drop(state);
                    let started = self.ensure_threads();
                    state = shared.state();
                    if started.is_err() {
                        // Nobody will look for it: who waits for it, too, tries for himself.
                        state.segments.retain(|_, lookup| !matches!(lookup, Lookup::Wanted));
                    }
                    shared.changed.notify_all();
                    started?;
                }
                None => state = shared.look_for(segment, state),
            }
        }
    }

    /// What is known of a segment.
    pub fn known(&self, segment: u64) -> Option<Found> {
        self.shared.state().found(segment)
    }

    /// The first segment from there on that somebody would have to wait for.
    pub fn known_up_to(&self, segment: u64) -> u64 {
        let state = self.shared.state();
        (segment..).find(|segment| !matches!(state.segments.get(segment), Some(Lookup::Known(_)))).unwrap_or(segment)
    }

    /// Segments before this one are not read any more: they are closed, and others fetched in their place. The one right
    /// before serves messages.
    pub fn move_to(&self, segment: u64) {
        let mut state = self.shared.state();
        state.position = Some(segment);
        let rest = state.segments.split_off(&segment.saturating_sub(1));
        let old = std::mem::replace(&mut state.segments, rest);
        drop(state);
        // Closing a file that has no name frees its space, which takes a while.
        drop(old);
        self.shared.changed.notify_all();
    }

    /// Forgets all segments, or those that `keep` does not want to keep; a lookup that is under way counts as none.
    pub fn retain(&self, keep: impl Fn(u64, Option<&Found>) -> bool) {
        self.shared.state().segments.retain(|&segment, lookup| match lookup {
            Lookup::Known(Ok(found)) => keep(segment, Some(found)),
            Lookup::Known(Err(_)) => false,
            Lookup::Wanted | Lookup::Busy(_) => keep(segment, None),
        });
        // The waiting thread asks again.
        self.shared.changed.notify_all();
    }

    /// Whether somebody waits for a segment that nobody has begun to fetch.
    #[cfg(test)]
    pub fn is_wanted(&self, segment: u64) -> bool {
        matches!(self.shared.state().segments.get(&segment), Some(Lookup::Wanted))
    }

    /// Whether nobody waits, and nothing is being fetched.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.shared.state().segments.values().all(|lookup| matches!(lookup, Lookup::Known(_)))
    }

    /// Starts the threads that fetch, once there is something for them to do: as many as can be, if that is one.
    fn ensure_threads(&self) -> Result<(), StoreError> {
        let mut threads = self.threads.lock().expect("no panic while locked");
        while threads.len() < self.shared.jobs().min(shares().wal) {
            let shared = self.shared.clone();
            match std::thread::Builder::new().name("fetch".to_owned()).spawn(move || shared.work()) {
                Ok(thread) => threads.push(thread),
                Err(_) if !threads.is_empty() => break,
                Err(error) => {
                    return Err(StoreError::Refused(format!("could not start a thread that fetches WAL: {error}")));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Fetcher {
    /// Ends what is being fetched, and the threads.
    fn drop(&mut self) {
        self.shared.state().stops = true;
        if let Some(remote) = self.shared.finder.remote() {
            remote.stop();
        }
        self.shared.changed.notify_all();
        for thread in self.threads.get_mut().expect("no panic while locked").drain(..) {
            thread.join().expect("no panic in a thread that fetches");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    fn jobs(&self) -> usize {
        self.finder.remote().map_or(1, Remote::jobs)
    }

    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if state.waiting == 0 {
            state.since = Instant::now();
            state.tell(true);
        }
        state.waiting += 1;
        state = self.changed.wait(state).expect("no panic while locked");
        state.waiting -= 1;
        if state.waiting == 0 {
            let waited = state.since.elapsed();
            state.waited += waited;
            state.tell(false);
        }
        state
    }

    /// Fetches, until nobody reads any more.
    fn work(&self) {
        let mut state = self.state();
        while !state.stops {
            let Some(segment) = self.choose(&state) else {
                state = self.changed.wait(state).expect("no panic while locked");
                continue;
            };
            state = self.look_for(segment, state);
        }
    }

    fn look_for<'a>(&'a self, segment: u64, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let number = state.begin(segment);
        drop(state);
        let found = self.finder.find_segment(segment);
        state = self.state();
        state.end(segment, number, found);
        self.changed.notify_all();
        state
    }

    /// The segment to fetch next: the first of those that somebody waits for and those before and ahead. Several stretches are
    /// read side by side, and the last of them is not needed first.
    fn choose(&self, state: &State) -> Option<u64> {
        let mut wanted = state.segments.iter().filter(|(_, lookup)| matches!(lookup, Lookup::Wanted));
        let wanted = wanted.next().map(|(&segment, _)| segment);
        let ahead = self.next_ahead(state, wanted).filter(|&ahead| wanted.is_none_or(|wanted| ahead < wanted));
        ahead.filter(|_| self.has_room(state)).or(wanted)
    }

    /// The first segment ahead that nothing is known of. All those before one that is wanted are ahead, however many.
    fn next_ahead(&self, state: &State, wanted: Option<u64>) -> Option<u64> {
        let position = state.position?;
        let upto = position.saturating_add(state.width.min(self.window())).max(wanted.unwrap_or(0));
        for segment in position..upto {
            match state.segments.get(&segment) {
                None => return Some(segment).filter(|&segment| self.finder.fetches(segment)),
                Some(Lookup::Known(Ok(found))) if found.segment.is_some() => {}
                // There is nothing past it before it is there.
                Some(Lookup::Known(_)) => return None,
                Some(Lookup::Wanted | Lookup::Busy(_)) => {}
            }
        }
        None
    }

    /// How many segments are fetched ahead: so many that no job stands still while a batch is applied, for which time none is
    /// read, and not more than memory is worth, or than may be open.
    fn window(&self) -> u64 {
        let most = (MAX_AHEAD_BYTES / self.finder.size.bytes()).min(shares().wal as u64);
        (4 * self.jobs() as u64).max(LEAST_AHEAD).min(most).max(1)
    }

    /// Whether the disk has room for one more ahead: half of what is free is left alone.
    fn has_room(&self, state: &State) -> bool {
        let busy = state.segments.values().filter(|lookup| matches!(lookup, Lookup::Busy(_))).count() as u64;
        let free = self.finder.remote().and_then(Remote::free_bytes);
        free.is_none_or(|free| free / 2 >= (busy + 1) * self.finder.size.bytes())
    }
}

impl State {
    /// Waiting begins, or is over.
    fn tell(&mut self, waits: bool) {
        if let Some(told) = &mut self.on_wait {
            told(waits);
        }
    }

    fn found(&self, segment: u64) -> Option<Found> {
        match self.segments.get(&segment) {
            Some(Lookup::Known(Ok(found))) => Some(found.clone()),
            _ => None,
        }
    }

    /// Notes that somebody looks for a segment.
    fn begin(&mut self, segment: u64) -> u64 {
        self.next += 1;
        self.segments.insert(segment, Lookup::Busy(self.next));
        self.next
    }

    /// Notes what was found, unless that was forgotten meanwhile.
    fn end(&mut self, segment: u64, number: u64, found: Result<Found, StoreError>) {
        if !matches!(self.segments.get(&segment), Some(Lookup::Busy(busy)) if *busy == number) {
            return;
        }
        match &found {
            Ok(Found { segment: Some(file), .. }) if file.fetched => {
                // One that was begun before the end of the archive was found is no news.
                let mut further = self.segments.range(segment..).map(|(_, lookup)| lookup);
                if !further.any(|lookup| matches!(lookup, Lookup::Known(Ok(found)) if found.segment.is_none())) {
                    self.width = self.width.saturating_mul(2);
                }
            }
            Ok(Found { refusal: None, .. }) => {}
            Ok(_) | Err(_) => self.width = 1,
        }
        self.segments.insert(segment, Lookup::Known(found));
    }
}
