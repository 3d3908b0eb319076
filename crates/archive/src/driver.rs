//! Replay's way to an archive: it asks for several segments at once, ahead of who reads them ([`walrider_store::source`]).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use walrider_datadir::DataDirError;
use walrider_store::StoreError;
use walrider_store::driver::{Answer, Driver, FetchStats, Opened, Remote, Request, free_bytes};

use crate::archive::Archive;
use crate::error::{ArchiveError, Result};
use crate::name::WalName;
use crate::place::Place;
use crate::restore::Cluster;

/// Name of what is fetched, below `pg_wal`, for a moment: as what a `restore_command` fetches, so that the next replay removes what
/// a crash has left.
const PREFIX: &str = "walrider.fetch.archive.";

/// An archive that is read by position.
pub struct ArchiveDriver {
    place: Place,
    pg_wal: PathBuf,
    cluster: Option<Cluster>,
    jobs: usize,
    /// A place that is out of reach, or has nothing yet, is asked again later: who asks has another source, or time.
    waits: bool,
    state: Mutex<State>,
}

/// How often it is said that it is out of reach.
const COMPLAIN: Duration = Duration::from_secs(60);
/// How long one may be silent that who asks does not wait for, before it is taken for out of reach.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// An error that takes so long is none that the place answers.
const SLOW: Duration = Duration::from_secs(1);
/// How long it is not asked again then: replay asks for several files before it gives up, and a standby connects no sooner.
const LEFT_ALONE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct State {
    /// Those that nobody uses now: each is used by one thread at a time, with connections of its own.
    idle: Vec<Archive>,
    stops: bool,
    complained: Option<Instant>,
    /// Until then it is not asked, and everything counts as missing.
    silent_until: Option<Instant>,
    /// What was asked for last was taken for missing, and may be there.
    unsure: bool,
    next: u64,
    delivered: Option<String>,
    stats: FetchStats,
}

impl ArchiveDriver {
    /// The archive at a place, for a cluster's `pg_wal`; so many requests at once are worth making.
    ///
    /// # Errors
    /// When the environment lacks something, or has something wrong.
    pub fn new(place: Place, pg_wal: impl Into<PathBuf>, jobs: usize) -> Result<ArchiveDriver> {
        let pg_wal = pg_wal.into();
        // What is wrong with the environment is said at once.
        Archive::open(&place)?;
        let state = State::default();
        let cluster = Cluster::of(&pg_wal.join("x"));
        Ok(ArchiveDriver { place, pg_wal, cluster, jobs: jobs.max(1), waits: false, state: Mutex::new(state) })
    }

    /// For a standby: what cannot be had now is taken for missing, and said.
    pub fn waiting(self, waits: bool) -> ArchiveDriver {
        ArchiveDriver { waits, ..self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    fn fetch(&self, name: &WalName) -> Result<Option<Opened>> {
        let mut state = self.state();
        if state.stops {
            return Err(ArchiveError::Refused("WAL is not fetched any more: replay ends".into()));
        }
        state.next += 1;
        let number = state.next;
        let idle = state.idle.pop();
        drop(state);
        let answers = self.waits.then_some(ANSWERS_WITHIN);
        let archive = idle.map_or_else(|| Archive::answering_within(&self.place, answers), Ok)?;
        let fetched = archive.get(name, &mut || ());
        self.state().idle.push(archive);
        let Some(fetched) = fetched? else { return Ok(None) };
        if let Some(cluster) = self.cluster {
            fetched.is_of(cluster.system_identifier, name)?;
        }
        let path = self.pg_wal.join(format!("{PREFIX}{number}"));
        let failed = |operation, error| DataDirError::io(operation, &path, error);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let mut file = file.map_err(|error| failed("create", error))?;
        let written = file.write_all(&fetched.contents);
        // Its space is free once it is closed.
        fs::remove_file(&path).map_err(|error| failed("remove", error))?;
        written.map_err(|error| failed("write", error))?;
        Ok(Some(Opened { file, path: name.as_str().into(), fetched: true }))
    }
}

impl Driver for ArchiveDriver {
    fn get(&self, request: &Request<'_>) -> std::result::Result<Answer, StoreError> {
        let Some(name) = WalName::parse(request.name) else { return Ok(Answer::Missing(None)) };
        let began = Instant::now();
        if self.state().silent_until.is_some_and(|until| began < until) {
            return Ok(Answer::Missing(None));
        }
        let fetched = self.fetch(&name);
        let mut state = self.state();
        state.stats.commands += began.elapsed();
        state.unsure = false;
        match fetched {
            Ok(Some(opened)) => {
                if name.is_wal() {
                    state.stats.segments += 1;
                    state.delivered = Some(request.name.to_owned());
                }
                Ok(Answer::There(opened))
            }
            // An archive that cannot be asked is an error: that it has no such file is certain.
            Ok(None) => Ok(Answer::Missing(None)),
            Err(error @ (ArchiveError::Store { .. } | ArchiveError::Empty { .. } | ArchiveError::File(_)))
                if self.waits && !state.stops =>
            {
                state.unsure = true;
                // One that refuses at once may have others.
                if began.elapsed() >= SLOW {
                    state.silent_until = Some(Instant::now() + LEFT_ALONE);
                }
                if state.complained.is_none_or(|at| at.elapsed() >= COMPLAIN) {
                    state.complained = Some(Instant::now());
                    tracing::warn!("the archive is out of reach, and asked again: {error}");
                }
                Ok(Answer::Missing(None))
            }
            Err(ArchiveError::File(error)) => Err(error.into()),
            Err(error @ ArchiveError::Damaged { .. }) => Err(StoreError::Corrupt(error.to_string())),
            Err(error) => Err(StoreError::Refused(error.to_string())),
        }
    }

    fn remote(&self) -> Option<&dyn Remote> {
        Some(self)
    }
}

impl Remote for ArchiveDriver {
    fn jobs(&self) -> usize {
        self.jobs
    }

    fn free_bytes(&self) -> Option<u64> {
        free_bytes(&self.pg_wal)
    }

    fn delivered(&self) -> Option<String> {
        self.state().delivered.clone()
    }

    fn is_unsure(&self) -> bool {
        self.state().unsure
    }

    fn stats(&self) -> FetchStats {
        FetchStats { jobs: self.jobs, ..self.state().stats }
    }

    /// Requests that are under way come to their end, which their timeout bounds.
    fn stop(&self) {
        self.state().stops = true;
    }
}
