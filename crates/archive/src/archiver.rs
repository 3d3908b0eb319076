//! Archives what a directory of WAL has marked `.ready`, as PostgreSQL's archiver does (`postmaster/pgarch.c`, PostgreSQL 18), several
//! files at once. What is archived is marked `.done`: WAL without that mark is not removed, so a restart forgets nothing.
//!
//! Left out is the segment in which a timeline was left: what it has, the next timeline's first segment has, too, and the server that
//! went on with it may archive another.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use walrider_datadir::DataDirError;
use walrider_datadir::durable::{list_dir, read_file, unlink_if_there};
use walrider_layout::history::{TimelineHistory, history_file_name, parse_history_file_name};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::archive::{Archive, Put};
use crate::error::{ArchiveError, Result};
use crate::frame::{MAX_CONTENTS, Packing};
use crate::name::{Kind, WalName};
use crate::place::Place;

/// Where the marks are.
const STATUS: &str = "archive_status";
/// How often to look for new ones.
const LOOK: Duration = Duration::from_secs(1);
/// First and longest pause when the place cannot be reached.
const AWAY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The same for a file that it does not take: somebody has to see to that.
const REFUSED: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(600));
/// Most bytes of segments in memory at once, each once more as it is packed.
const MAX_MEMORY: u64 = 256 << 20;

/// Where to archive, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiverSettings {
    /// Where to.
    pub place: Place,
    /// How segments are packed.
    pub packing: Packing,
    /// How many files at once.
    pub jobs: usize,
    /// Bytes of WAL that may wait to be archived; what is older is given up. `None`: no limit.
    pub max_keep: Option<u64>,
}

/// Where receiving stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The timeline that is received; zero before that has begun.
    pub timeline: TimelineId,
    /// The end of what is there.
    pub end: Lsn,
}

/// What was done, and what went wrong last.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Files archived, also those that were there.
    pub archived: u64,
    /// The last of them.
    pub last_archived: Option<(String, SystemTime)>,
    /// Attempts that failed.
    pub failed: u64,
    /// The last of them, and why.
    pub last_failed: Option<(String, SystemTime, String)>,
    /// Segments that were given up.
    pub given_up: u64,
    /// Files that wait to be archived.
    pub ready: u64,
}

/// Threads that archive, until this is dropped. What is being archived then is not waited for: it is whole in the archive, or not there.
pub struct Archiver(Arc<Inner>);

struct Inner {
    settings: ArchiverSettings,
    directory: PathBuf,
    size: SegmentSize,
    standing: Box<dyn Fn() -> Option<Standing> + Send + Sync>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: Queue,
    looked: Option<Instant>,
    told: Told,
    stops: bool,
}

/// Which file is next.
#[derive(Default)]
struct Queue {
    /// Those that are marked, in order.
    waiting: VecDeque<WalName>,
    begun: BTreeSet<String>,
    /// Those that failed: when each may be tried again, and how long that pause is.
    failed: BTreeMap<String, (Instant, Duration)>,
    /// The same of all of them.
    away: Option<(Instant, Duration)>,
}

impl Queue {
    /// These are marked now. Histories go first, as in PostgreSQL: a standby needs them to choose its way.
    fn found(&mut self, mut names: Vec<WalName>) {
        names.retain(|name| !self.begun.contains(name.as_str()));
        names.sort_by_key(|name| (!matches!(name.kind(), Kind::History(_)), name.as_str().get(8..).map(str::to_owned)));
        self.failed.retain(|failed, _| names.iter().any(|name| name.as_str() == failed));
        self.waiting = names.into();
    }

    fn next(&mut self, now: Instant) -> Option<WalName> {
        if self.away.is_some_and(|(until, _)| now < until) {
            return None;
        }
        let due = |name: &WalName| self.failed.get(name.as_str()).is_none_or(|(until, _)| *until <= now);
        let at = self.waiting.iter().position(due)?;
        let name = self.waiting.remove(at)?;
        self.begun.insert(name.as_str().to_owned());
        Some(name)
    }

    fn done(&mut self, name: &WalName) {
        self.begun.remove(name.as_str());
        self.failed.remove(name.as_str());
        self.away = None;
    }

    /// How long until it is tried again. `away`: it is not this file's fault; of several that find out together, the first counts.
    fn failed(&mut self, name: &WalName, away: bool, now: Instant) -> Option<Duration> {
        self.begun.remove(name.as_str());
        let longer = |before: Option<(Instant, Duration)>, (first, longest): (Duration, Duration)| {
            let pause = before.map_or(first, |(_, pause)| (2 * pause).min(longest));
            (now + pause, pause)
        };
        if !away {
            let before = self.failed.get(name.as_str()).copied();
            let again = longer(before, REFUSED);
            self.failed.insert(name.as_str().to_owned(), again);
            return Some(again.1);
        }
        if self.away.is_some_and(|(until, _)| now < until) {
            return None;
        }
        let again = longer(self.away, AWAY);
        self.away = Some(again);
        Some(again.1)
    }
}

/// What became of a file.
enum Outcome {
    Archived(Put),
    /// It is not one that is archived, or is not there any more.
    Passed,
}

impl Archiver {
    /// Archives from now on what is marked in a directory, which has segments of this size. It ends, too, once `standing` knows nothing.
    ///
    /// # Errors
    /// When the place cannot be one, or there are no threads.
    pub fn start(
        settings: ArchiverSettings,
        directory: &Path,
        size: SegmentSize,
        standing: Box<dyn Fn() -> Option<Standing> + Send + Sync>,
    ) -> Result<Archiver> {
        // What is wrong with the environment is known at once.
        let mut opened = Some(Archive::open(&settings.place)?);
        let jobs = settings.jobs.clamp(1, (MAX_MEMORY / size.bytes()).max(1) as usize);
        let directory = directory.to_owned();
        let inner = Inner { settings, directory, size, standing, state: Mutex::default(), changed: Condvar::new() };
        let archiver = Archiver(Arc::new(inner));
        for _ in 0..jobs {
            let (inner, opened) = (archiver.0.clone(), opened.take());
            let thread = thread::Builder::new().name("archiver".into()).spawn(move || inner.work(opened));
            thread.map_err(|error| ArchiveError::Refused(format!("could not start a thread to archive: {error}")))?;
        }
        Ok(archiver)
    }

    /// Where it archives.
    pub fn place(&self) -> &Place {
        &self.0.settings.place
    }

    /// How it stands.
    pub fn told(&self) -> Told {
        let state = self.0.lock();
        let ready = state.queue.waiting.len() + state.queue.begun.len();
        Told { ready: ready as u64, ..state.told.clone() }
    }
}

impl Drop for Archiver {
    fn drop(&mut self) {
        self.0.lock().stops = true;
        self.0.changed.notify_all();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    fn work(&self, mut opened: Option<Archive>) {
        let mut state = self.lock();
        while !state.stops {
            let now = Instant::now();
            if state.looked.is_none_or(|at| now.duration_since(at) >= LOOK) {
                let Some(standing) = (self.standing)() else { return };
                state.looked = Some(now);
                if let Err(error) = self.look(&mut state, standing) {
                    tracing::error!("could not look for WAL to archive: {error}");
                }
                self.changed.notify_all();
            }
            let Some(name) = state.queue.next(now) else {
                state = self.changed.wait_timeout(state, LOOK).expect("no panic while locked").0;
                continue;
            };
            drop(state);
            let outcome = self.archive(&name, &mut opened);
            state = self.lock();
            self.note(&mut state, &name, outcome);
        }
    }

    /// Looks for marks, and gives up what has waited for too much WAL.
    fn look(&self, state: &mut State, standing: Standing) -> Result<()> {
        let marks = list_dir(&self.directory.join(STATUS))?;
        let ready = marks.into_iter().filter_map(|mark| {
            let name = mark.file_name();
            WalName::parse(name.to_str()?.strip_suffix(".ready")?).filter(|name| name.kind() != Kind::Partial)
        });
        let mut names: Vec<WalName> = ready.collect();
        if let Some(most) = self.settings.max_keep {
            let limit = standing.end.0.saturating_sub(most);
            let is_old = |name: &WalName| {
                let segment = self.size.parse_file_name(name.as_str());
                segment.is_some_and(|(_, segment)| self.size.start_of(segment + 1).0 <= limit)
            };
            let begun = &state.queue.begun;
            let (old, rest) = names.into_iter().partition(|name| is_old(name) && !begun.contains(name.as_str()));
            names = rest;
            for name in old {
                self.mark_done(&name)?;
                state.told.given_up += 1;
                tracing::error!(
                    "\"{}\" is given up, and missing in the archive: more WAL waits than --archive-max-keep",
                    name.as_str()
                );
            }
        }
        state.queue.found(names);
        Ok(())
    }

    fn note(&self, state: &mut State, name: &WalName, outcome: Result<Outcome>) {
        let error = match outcome {
            Ok(outcome) => {
                if state.queue.away.is_some() {
                    tracing::info!("archiving goes on with \"{}\"", name.as_str());
                }
                state.queue.done(name);
                if let Outcome::Archived(put) = outcome {
                    tracing::debug!("archived \"{}\": {put:?}", name.as_str());
                    state.told.archived += 1;
                    state.told.last_archived = Some((name.as_str().to_owned(), SystemTime::now()));
                }
                return;
            }
            Err(error) => error,
        };
        let away = matches!(error, ArchiveError::Store { .. } | ArchiveError::File(_));
        state.told.failed += 1;
        state.told.last_failed = Some((name.as_str().to_owned(), SystemTime::now(), error.to_string()));
        match state.queue.failed(name, away, Instant::now()) {
            Some(pause) if away => {
                tracing::warn!("archiving waits for {} s: \"{}\": {error}", pause.as_secs(), name.as_str());
            }
            Some(_) => tracing::error!("\"{}\" is not archived, and stays: {error}", name.as_str()),
            None => {}
        }
    }

    /// Archives a file, and marks it.
    fn archive(&self, name: &WalName, opened: &mut Option<Archive>) -> Result<Outcome> {
        if !self.mark(name, "ready").exists() {
            return Ok(Outcome::Passed);
        }
        if self.is_left(name)? {
            self.mark_done(name)?;
            return Ok(Outcome::Passed);
        }
        let Some(contents) = read_file(&self.directory.join(name.as_str()), MAX_CONTENTS)? else {
            tracing::warn!("\"{}\" is marked to be archived, and is not there", name.as_str());
            unlink_if_there(&self.mark(name, "ready"))?;
            return Ok(Outcome::Passed);
        };
        let archive = match opened {
            Some(archive) => archive,
            None => opened.insert(Archive::open(&self.settings.place)?),
        };
        let put = archive.put(name, &contents, self.settings.packing)?;
        self.mark_done(name)?;
        Ok(Outcome::Archived(put))
    }

    /// Whether a timeline was left within this segment, which may lack what its old server has written.
    fn is_left(&self, name: &WalName) -> Result<bool> {
        let Some((timeline, segment)) = self.size.parse_file_name(name.as_str()) else { return Ok(false) };
        let current = match (self.standing)() {
            Some(Standing { timeline: current, .. }) if current != TimelineId(0) => current,
            // Nothing is received yet: the newest that is known.
            _ => {
                let files = list_dir(&self.directory)?;
                let histories = files.iter().filter_map(|file| parse_history_file_name(file.file_name().to_str()?));
                histories.max().unwrap_or(timeline)
            }
        };
        if current <= timeline {
            return Ok(false);
        }
        let path = self.directory.join(history_file_name(current));
        let refused = |why: String| ArchiveError::Refused(format!("{why} in \"{}\"", path.display()));
        let text = read_file(&path, MAX_CONTENTS)?.ok_or_else(|| refused("there is no history".into()))?;
        let history = TimelineHistory::parse(current, &String::from_utf8_lossy(&text));
        let left = history.map_err(|error| refused(error.to_string()))?.switch_point(timeline);
        Ok(left.is_some_and(|left| left < self.size.start_of(segment + 1)))
    }

    fn mark(&self, name: &WalName, mark: &str) -> PathBuf {
        self.directory.join(STATUS).join(format!("{}.{mark}", name.as_str()))
    }

    /// Not durable, as in PostgreSQL: at worst a file is archived once more.
    fn mark_done(&self, name: &WalName) -> Result<()> {
        let (ready, done) = (self.mark(name, "ready"), self.mark(name, "done"));
        Ok(fs::rename(&ready, done).map_err(|error| DataDirError::io("rename file", ready, error))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn name(text: &str) -> WalName {
        WalName::parse(text).unwrap()
    }

    fn queue(names: &[&str]) -> Queue {
        let mut queue = Queue::default();
        queue.found(names.iter().map(|text| name(text)).collect());
        queue
    }

    fn next(queue: &mut Queue, now: Instant) -> String {
        queue.next(now).map_or("none".into(), |name| name.as_str().into())
    }

    const A: &str = "000000010000000000000005";
    const B: &str = "000000010000000000000006";
    const C: &str = "000000020000000000000006";

    #[test]
    fn histories_first_then_in_order() {
        let mut queue = queue(&[C, B, "00000002.history", A]);
        let now = Instant::now();
        let order: Vec<String> = (0..5).map(|_| next(&mut queue, now)).collect();
        assert_eq!(order, ["00000002.history", A, C, B, "none"]);
        queue.found(vec![name(A), name(C)]);
        assert_eq!(next(&mut queue, now), "none", "they have begun");
    }

    #[test]
    fn what_is_refused_holds_up_nobody() {
        let mut queue = queue(&[A, B]);
        let now = Instant::now();
        assert_eq!(next(&mut queue, now), A);
        assert_eq!(queue.failed(&name(A), false, now), Some(REFUSED.0));
        queue.found(vec![name(A), name(B)]);
        assert_eq!(next(&mut queue, now), B);
        queue.done(&name(B));
        assert_eq!(next(&mut queue, now), "none");
        assert_eq!(next(&mut queue, now + REFUSED.0), A);
        assert_eq!(queue.failed(&name(A), false, now), Some(2 * REFUSED.0));
        for _ in 0..20 {
            queue.failed(&name(A), false, now);
        }
        assert_eq!(queue.failed(&name(A), false, now), Some(REFUSED.1));
    }

    #[test]
    fn a_place_that_is_away_is_asked_ever_less_often() {
        let mut queue = queue(&[A, B]);
        let now = Instant::now();
        assert_eq!((next(&mut queue, now), next(&mut queue, now)), (A.into(), B.into()));
        assert_eq!(queue.failed(&name(A), true, now), Some(AWAY.0));
        assert_eq!(queue.failed(&name(B), true, now), None, "that was known");
        queue.found(vec![name(A), name(B)]);
        assert_eq!(next(&mut queue, now), "none");
        let later = now + AWAY.0;
        assert_eq!(next(&mut queue, later), A);
        assert_eq!(queue.failed(&name(A), true, later), Some(2 * AWAY.0));
        queue.done(&name(A));
        assert_eq!(next(&mut queue, later), B, "it is back");
    }

    fn archiver(directory: &Path, max_keep: Option<u64>, standing: Standing) -> Inner {
        let archive = directory.join("archive");
        fs::create_dir_all(directory.join("wal").join(STATUS)).unwrap();
        fs::create_dir_all(&archive).unwrap();
        Inner {
            settings: ArchiverSettings { place: Place::Directory(archive), packing: Packing::Zstd, jobs: 1, max_keep },
            directory: directory.join("wal"),
            size: SegmentSize::new(testing::SIZE).unwrap(),
            standing: Box::new(move || Some(standing)),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    impl Inner {
        fn file(&self, file: &str, contents: &[u8]) {
            fs::write(self.directory.join(file), contents).unwrap();
            fs::write(self.mark(&name(file), "ready"), b"").unwrap();
        }

        fn has(&self, file: &str) -> bool {
            Archive::open(&self.settings.place).unwrap().get(&name(file), &mut || ()).unwrap().is_some()
        }
    }

    /// A timeline's last segment may be incomplete; one before it is not, and neither is any before the history is known.
    #[test]
    fn where_a_timeline_was_left() {
        let directory = tempfile::tempdir().unwrap();
        for timeline in [0, 2] {
            let standing = Standing { timeline: TimelineId(timeline), end: Lsn(0) };
            let inner = archiver(directory.path(), None, standing);
            assert_eq!(inner.is_left(&name(A)).is_err(), timeline == 2, "that there is no history is no answer");
            fs::write(inner.directory.join("00000002.history"), "1\t0/680000\tx\n").unwrap();
            assert!(inner.is_left(&name(B)).unwrap());
            assert!(!inner.is_left(&name(A)).unwrap() && !inner.is_left(&name(C)).unwrap());
            fs::remove_file(inner.directory.join("00000002.history")).unwrap();
        }
    }

    #[test]
    fn marks() {
        let directory = tempfile::tempdir().unwrap();
        let inner = archiver(directory.path(), Some(0), Standing { timeline: TimelineId(1), end: Lsn(0x60_0000) });
        inner.file(A, &testing::segment(1, 5, 77));
        inner.file(B, &testing::segment(1, 6, 77));
        fs::write(inner.mark(&name(C), "ready"), b"").unwrap();
        fs::write(inner.mark(&name("000000010000000000000007.partial"), "ready"), b"").unwrap();
        let mut state = State::default();
        inner.look(&mut state, (inner.standing)().unwrap()).unwrap();
        assert_eq!(state.told.given_up, 1);
        assert!(inner.mark(&name(A), "done").exists() && !inner.mark(&name(A), "ready").exists());
        let now = Instant::now();
        let order = [next(&mut state.queue, now), next(&mut state.queue, now), next(&mut state.queue, now)];
        assert_eq!(order, [B, C, "none"]);
        let mut opened = None;
        assert!(matches!(inner.archive(&name(B), &mut opened).unwrap(), Outcome::Archived(Put::Done)));
        assert!(inner.has(B) && inner.mark(&name(B), "done").exists());
        assert!(matches!(inner.archive(&name(C), &mut opened).unwrap(), Outcome::Passed));
        assert!(!inner.mark(&name(C), "ready").exists(), "there is no such file");
        inner.file(B, &testing::segment(1, 6, 77));
        assert!(matches!(inner.archive(&name(B), &mut opened).unwrap(), Outcome::Archived(Put::Again)));
        inner.file(B, &testing::segment(1, 6, 78));
        assert!(matches!(inner.archive(&name(B), &mut opened), Err(ArchiveError::Different { .. })));
        assert!(inner.mark(&name(B), "ready").exists());
    }
}
