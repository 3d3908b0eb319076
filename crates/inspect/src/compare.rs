//! Compares two stopped data directories: relations page by page under PostgreSQL's masks, the rest by what it is. `docs/compare.md` says what is compared, and why what may differ may.
//!
//! Nothing that recovery writes is passed over: whatever PostgreSQL itself does not keep equal is counted in a named
//! [`Class`].

mod classes;
mod files;
mod kind;
mod relation;
mod slru;
mod tally;
mod walk;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use walrider_datadir::directories::version_dir;
use walrider_layout::ForkNumber;
use walrider_layout::control::{CONTROL_FILE, ControlError, ControlFile, DbState};

pub use classes::{Class, ClassInfo, Counts};
use relation::Rules;
use slru::CommitTsLimits;
pub use tally::{Finding, Location, ReadError, Tally};
use walk::{Entry, Inventory, RelationFile, Role, Slru};

/// Threads at most: two files each, so that a disk still reads in long runs.
const MAX_JOBS: usize = 8;

/// How to compare.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// No masks: LSNs, checksums, hint bits and unused space count, too.
    pub strict: bool,
    /// Most differences that are kept in full.
    pub first: usize,
}

/// The result of a comparison.
#[derive(Debug)]
pub struct Report {
    /// Without masks.
    pub strict: bool,
    /// Relations compared.
    pub relations: u64,
    /// All findings.
    pub tally: Tally,
}

/// How far a comparison has got.
#[derive(Debug)]
pub struct Progress {
    /// Bytes of pages to read, in both directories.
    pub total_bytes: u64,
    done_bytes: AtomicU64,
    finished: AtomicBool,
}

impl Progress {
    /// Bytes read so far.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Whether there is nothing left to read.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// There is no control file.
    #[error("{} is not a data directory: it has no global/pg_control ({source})", dir.display())]
    NotADataDirectory {
        /// The directory.
        dir: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A server runs on it, or a program of ours.
    #[error("{} is in use by process {pid}: stop that server first", dir.display())]
    Running {
        /// The directory.
        dir: PathBuf,
        /// The process.
        pid: u64,
    },
    /// The control file was not accepted.
    #[error("{}: {source}", dir.display())]
    Control {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: ControlError,
    },
    /// A file could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// One side of the comparison.
struct Side<'a> {
    root: &'a Path,
    control: ControlFile,
    /// Name of its directory in each tablespace.
    version_dir: String,
    entries: Inventory,
}

impl<'a> Side<'a> {
    fn open(dir: &'a Path) -> Result<Side<'a>, CompareError> {
        let path = dir.join(CONTROL_FILE);
        let bytes = fs::read(&path).map_err(|source| match source.kind() {
            NotFound | NotADirectory => CompareError::NotADataDirectory { dir: dir.to_owned(), source },
            _ => CompareError::Read(ReadError { path, source }),
        })?;
        if let Some(pid) = running_server(dir) {
            return Err(CompareError::Running { dir: dir.to_owned(), pid });
        }
        let control =
            ControlFile::parse(&bytes).map_err(|source| CompareError::Control { dir: dir.to_owned(), source })?;
        let version_dir = version_dir(control.major, control.catalog_version);
        let entries = walk::inventory(dir, &version_dir).map_err(|(path, source)| ReadError { path, source })?;
        Ok(Side { root: dir, control, version_dir, entries })
    }

    /// What the entry of this name is, if it is here.
    fn role(&self, name: &str) -> Option<Role> {
        self.entries.get(name).map(|entry| walk::role(name, entry, &self.version_dir))
    }

    /// The file of this name, if it is here.
    fn file(&self, name: &str) -> Option<PathBuf> {
        matches!(self.entries.get(name), Some(Entry::File(_))).then(|| self.root.join(name))
    }

    fn bytes_of(&self, name: &str) -> u64 {
        match self.entries.get(name) {
            Some(Entry::File(bytes)) => *bytes,
            _ => 0,
        }
    }

    /// Whether recovery was the last to write here: pages have not been changed since without WAL.
    fn left_by_recovery(&self) -> bool {
        matches!(
            self.control.state,
            DbState::ShutDownInRecovery | DbState::InArchiveRecovery | DbState::InCrashRecovery
        )
    }

    /// Whether dropped relations may still have an empty first segment: a server of its own removes those at its next
    /// checkpoint (`mdunlink`), recovery at once.
    fn may_have_tombstones(&self) -> bool {
        matches!(self.control.state, DbState::InProduction | DbState::ShuttingDown)
    }
}

/// The process that runs on a data directory, from `postmaster.pid` (`CreateLockFile`): a negative number is one that is
/// not a postmaster, such as `walrider replay`. That another program has a dead postmaster's number is told by its
/// working directory, where that can be seen: a postmaster's is the data directory.
fn running_server(dir: &Path) -> Option<u64> {
    let text = fs::read_to_string(dir.join("postmaster.pid")).ok()?;
    let stated: i64 = text.lines().next()?.trim().parse().ok()?;
    let pid = stated.unsigned_abs();
    let process = Path::new("/proc").join(pid.to_string());
    if !process.exists() || pid == u64::from(std::process::id()) {
        return None;
    }
    match (fs::read_link(process.join("cwd")), fs::canonicalize(dir)) {
        (Ok(cwd), Ok(dir)) if stated > 0 && cwd != dir => None,
        _ => Some(pid),
    }
}

/// Something for one thread.
struct Task<'a> {
    name: &'a str,
    bytes: u64,
    work: Work,
}

enum Work {
    Relation(RelationFile),
    Slru(Slru, u64),
}

/// Compares two data directories. `watch` runs in a thread beside that, and should return once there is nothing left to read.
///
/// # Errors
/// What [`CompareError`] lists.
pub fn compare(dirs: [&Path; 2], how: How, watch: &(dyn Fn(&Progress) + Sync)) -> Result<Report, CompareError> {
    let sides = [Side::open(dirs[0])?, Side::open(dirs[1])?];
    let names: BTreeSet<&String> = sides[0].entries.keys().chain(sides[1].entries.keys()).collect();
    let mut comparison = Comparison::new(&sides, how);
    // Findings by name, so that the order does not depend on the threads.
    let mut findings: BTreeMap<&str, Tally> = BTreeMap::new();
    for name in names {
        let mut tally = comparison.tally();
        comparison.take(name, &mut tally)?;
        findings.insert(name, tally);
    }
    for (name, tally) in comparison.work_off(watch)? {
        findings.get_mut(name).expect("made above").append(tally);
    }
    let mut total = comparison.tally();
    for tally in findings.into_values() {
        total.append(tally);
    }
    Ok(Report { strict: how.strict, relations: comparison.relations.len() as u64, tally: total })
}

/// A comparison that is under way.
struct Comparison<'a> {
    sides: &'a [Side<'a>; 2],
    how: How,
    rules: Rules,
    limits: CommitTsLimits,
    /// Relations that have an init fork, in either directory: database directory and number.
    unlogged: HashSet<(String, u32)>,
    /// Both are one directory.
    same_root: bool,
    /// Relations that are compared.
    relations: HashSet<(String, u32)>,
    /// What is left for the threads.
    tasks: Vec<Task<'a>>,
}

impl<'a> Comparison<'a> {
    fn new(sides: &'a [Side<'a>; 2], how: How) -> Comparison<'a> {
        let hints_logged = sides.iter().any(|side| side.control.data_checksums() || side.control.wal_log_hints);
        let rules = Rules {
            strict: how.strict,
            checksums: [0, 1].map(|side| sides[side].control.data_checksums()),
            fsm_may_differ: hints_logged || !sides.iter().all(Side::left_by_recovery),
        };
        Comparison {
            sides,
            how,
            rules,
            limits: CommitTsLimits::of([&sides[0].control, &sides[1].control]),
            unlogged: unlogged_relations(sides),
            same_root: matches!(
                (fs::canonicalize(sides[0].root), fs::canonicalize(sides[1].root)), (Ok(a), Ok(b)) if a == b
            ),
            relations: HashSet::new(),
            tasks: Vec::new(),
        }
    }

    /// One that has found nothing yet.
    fn tally(&self) -> Tally {
        Tally::new(self.how.strict, self.how.first)
    }

    /// Compares what has this name, in either directory; pages are left to the threads.
    fn take(&mut self, name: &'a str, tally: &mut Tally) -> Result<(), ReadError> {
        let sides = self.sides;
        let entries = [0, 1].map(|side| sides[side].entries.get(name));
        let role = match [0, 1].map(|side| sides[side].role(name)) {
            [Some(a), Some(b)] if a != b => {
                // A file here, a directory there.
                let [a, b] = entries.map(show_entry);
                tally.find(Class::Directory, name, Location::default(), a, b);
                return Ok(());
            }
            [Some(role), _] | [_, Some(role)] => role,
            [None, None] => return Ok(()),
        };
        match role {
            Role::Directory => directory(entries, name, tally),
            Role::Tablespace => tablespace(entries, name, self.same_root, tally),
            Role::Counted(class) => tally.count(class),
            Role::Plain => {}
            Role::Relation(file) if self.is_reset(&file) => tally.count(Class::Unlogged),
            role => {
                tally.files += 1;
                self.take_file(name, role, tally)?;
            }
        }
        Ok(())
    }

    /// Whether a fork is made again from its init fork when the server starts.
    fn is_reset(&self, file: &RelationFile) -> bool {
        file.fork != ForkNumber::Init && self.unlogged.contains(&(file.directory.clone(), file.relation))
    }

    /// Compares a file that recovery keeps.
    fn take_file(&mut self, name: &'a str, role: Role, tally: &mut Tally) -> Result<(), ReadError> {
        let sides = self.sides;
        match role {
            Role::Relation(file) => {
                self.relations.insert((file.directory.clone(), file.relation));
                if presence(sides, name, &file, tally) {
                    self.leave(name, Work::Relation(file));
                }
            }
            Role::Slru(which, number) => {
                if let Some(pages) = lone_commit_ts(sides, name, which, number, self.limits)? {
                    (0..pages).for_each(|_| tally.count(Class::CommitTsBeforeOldest));
                } else if both(sides, name, tally).is_some() {
                    self.leave(name, Work::Slru(which, number));
                }
            }
            Role::Control => files::compare_control(name, &sides[0].control, &sides[1].control, tally),
            Role::Origins => {
                let paths = [0, 1].map(|side| sides[side].file(name));
                files::compare_origins(name, [paths[0].as_deref(), paths[1].as_deref()], tally)?;
            }
            Role::Bytes => {
                if let Some([a, b]) = both(sides, name, tally) {
                    files::compare_bytes(name, [&a, &b], tally)?;
                }
            }
            Role::Directory | Role::Tablespace | Role::Counted(_) | Role::Plain => {}
        }
        Ok(())
    }

    /// Leaves the pages of a file to the threads.
    fn leave(&mut self, name: &'a str, work: Work) {
        let bytes = self.sides[0].bytes_of(name) + self.sides[1].bytes_of(name);
        self.tasks.push(Task { name, bytes, work });
    }

    /// Works the tasks off on all cores, the largest first; findings by name.
    fn work_off(&mut self, watch: &(dyn Fn(&Progress) + Sync)) -> Result<Vec<(&'a str, Tally)>, ReadError> {
        self.tasks.sort_by_key(|task| std::cmp::Reverse(task.bytes));
        let progress = Progress {
            total_bytes: self.tasks.iter().map(|task| task.bytes).sum(),
            done_bytes: AtomicU64::new(0),
            finished: AtomicBool::new(false),
        };
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Ok(Vec::with_capacity(self.tasks.len())));
        let work = || {
            while let Some(task) = self.tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                let outcome = self.work(task, &progress.done_bytes);
                let mut results = results.lock().expect("no thread panicked");
                match (&mut *results, outcome) {
                    (Ok(done), Ok(tally)) => done.push((task.name, tally)),
                    (Ok(_), Err(error)) => *results = Err(error),
                    (Err(_), _) => return,
                }
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| watch(&progress));
            let jobs = thread::available_parallelism().map_or(1, usize::from).min(MAX_JOBS);
            let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
            for worker in workers {
                worker.join().expect("a worker does not panic");
            }
            progress.finished.store(true, Ordering::Relaxed);
        });
        results.into_inner().expect("no thread panicked")
    }

    /// What is found in the pages of a file.
    fn work(&self, task: &Task<'_>, done_bytes: &AtomicU64) -> Result<Tally, ReadError> {
        let mut tally = self.tally();
        let paths = [0, 1].map(|side| self.sides[side].file(task.name));
        let paths = [paths[0].as_deref(), paths[1].as_deref()];
        match &task.work {
            Work::Relation(file) => {
                relation::compare_segment(self.rules, task.name, file, paths, &mut tally, done_bytes)?;
            }
            Work::Slru(which, number) => {
                slru::compare_slru(*which, self.limits, *number, task.name, paths, &mut tally, done_bytes)?;
            }
        }
        Ok(tally)
    }
}

/// Relations that have an init fork, in either directory.
fn unlogged_relations(sides: &[Side<'_>; 2]) -> HashSet<(String, u32)> {
    let names = sides.iter().flat_map(|side| side.entries.keys().map(move |name| (side, name)));
    let inits = names.filter(|(_, name)| name.ends_with(ForkNumber::Init.suffix()));
    inits
        .filter_map(|(side, name)| match side.role(name)? {
            Role::Relation(file) => Some((file.directory, file.relation)),
            _ => None,
        })
        .collect()
}

/// Both files, if both are there; else the finding.
fn both(sides: &[Side<'_>; 2], name: &str, tally: &mut Tally) -> Option<[PathBuf; 2]> {
    let paths = [0, 1].map(|side| sides[side].file(name));
    match paths {
        [Some(a), Some(b)] => Some([a, b]),
        paths => {
            missing(Class::MissingFile, sides, name, paths, tally);
            None
        }
    }
}

fn missing(class: Class, sides: &[Side<'_>; 2], name: &str, paths: [Option<PathBuf>; 2], tally: &mut Tally) {
    let show = |side: usize| match paths[side] {
        Some(_) => format!("{} bytes", sides[side].bytes_of(name)),
        None => "absent".to_owned(),
    };
    tally.find(class, name, Location::default(), show(0), show(1));
}

/// The pages of a segment of commit timestamps that only one directory has, if nobody can read them.
fn lone_commit_ts(
    sides: &[Side<'_>; 2],
    name: &str,
    which: Slru,
    number: u64,
    limits: CommitTsLimits,
) -> Result<Option<u64>, ReadError> {
    let path = match [0, 1].map(|side| sides[side].file(name)) {
        [Some(path), None] | [None, Some(path)] if which == Slru::CommitTs => path,
        _ => return Ok(None),
    };
    let bytes = fs::read(&path).map_err(ReadError::at(&path))?;
    Ok(limits.pages_of_lone_segment(number, &bytes))
}

/// Decides on a relation file that only one directory has; whether its pages are to be compared.
///
/// A further segment (`mdtruncate` leaves an empty one, PostgreSQL does not miss it) and a map (read as if it were
/// zero) may be absent where the other is empty. The first segment of the data and of an init fork may not: it is what
/// says that the relation exists.
fn presence(sides: &[Side<'_>; 2], name: &str, file: &RelationFile, tally: &mut Tally) -> bool {
    let paths = [0, 1].map(|side| sides[side].file(name));
    let present = match paths {
        [Some(_), Some(_)] => return true,
        [Some(_), None] => 0,
        _ => 1,
    };
    let is_empty = sides[present].bytes_of(name) == 0;
    let is_map = matches!(file.fork, ForkNumber::FreeSpaceMap | ForkNumber::VisibilityMap);
    let is_tombstone = file.fork == ForkNumber::Main && is_empty && sides[present].may_have_tombstones();
    if !is_map && file.segment == 0 && !is_tombstone {
        missing(Class::MissingFile, sides, name, paths, tally);
        return false;
    }
    if is_empty {
        missing(Class::EmptyFile, sides, name, paths, tally);
    }
    !is_empty
}

/// A directory that must be there; where it leads is the administrator's affair.
fn directory(entries: [Option<&Entry>; 2], name: &str, tally: &mut Tally) {
    let is_there = |entry: Option<&Entry>| matches!(entry, Some(Entry::Directory | Entry::Link(_)));
    if !entries.map(is_there).contains(&false) {
        return;
    }
    tally.find(Class::Directory, name, Location::default(), show_entry(entries[0]), show_entry(entries[1]));
}

/// A tablespace must be there, and be two.
fn tablespace(entries: [Option<&Entry>; 2], name: &str, same_root: bool, tally: &mut Tally) {
    let class = match entries {
        [Some(Entry::Directory), Some(Entry::Directory)] => return,
        [Some(Entry::Link(a)), Some(Entry::Link(b))] if a == b && same_root => return,
        [Some(Entry::Link(a)), Some(Entry::Link(b))] if a == b => Class::TablespaceShared,
        [Some(Entry::Link(_) | Entry::Directory), Some(Entry::Link(_) | Entry::Directory)] => Class::TablespaceTarget,
        _ => Class::Directory,
    };
    tally.find(class, name, Location::default(), show_entry(entries[0]), show_entry(entries[1]));
}

fn show_entry(entry: Option<&Entry>) -> String {
    match entry {
        None => "absent".to_owned(),
        Some(Entry::File(bytes)) => format!("file of {bytes} bytes"),
        Some(Entry::Directory) => "directory".to_owned(),
        Some(Entry::Link(target)) => format!("link to {}", target.display()),
        Some(Entry::Special) => "link to nothing".to_owned(),
    }
}

#[cfg(test)]
mod tests;
