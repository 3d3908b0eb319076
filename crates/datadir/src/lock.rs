//! The interlock between servers on one data directory: `postmaster.pid`, as PostgreSQL keeps it
//! (`CreateLockFile`, `checkDataDir`; `utils/init/miscinit.c`; line numbers: `utils/pidfile.h`).
//!
//! A stock server refuses to start while the process whose id stands there lives; so do we. The exception is its own:
//! it takes a file that names its parent, or the parent of pg_ctl, for a leftover. So the holder of the lock must not
//! start a server as its own child.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, getpid, getppid, test_kill_process};

use crate::durable::{fsync_dir, list_dir, read_file, unlink_if_there};
use crate::error::{DataDirError, IoContext, Result};
use crate::held::shown;

/// The file's name.
const LOCK_FILE: &str = "postmaster.pid";
/// Longest lock file that is read, in bytes.
const MAX_LOCK_FILE: u64 = 1 << 16;
/// Bound of the retries against others that create the file at the same moment.
const MAX_TRIES: u32 = 100;

/// Refuses to go on where PostgreSQL would: as root, as another user than the owner, and in a directory that
/// others may enter (`checkDataDir`). Sets the process's umask to what the directory's mode allows, so that
/// new files get PostgreSQL's modes: 0600 and 0700, or 0640 and 0750.
pub fn check_ownership(data_dir: &Path) -> Result<()> {
    let name = shown(data_dir);
    let shown = name.display();
    if !data_dir.try_exists().context("stat data directory", data_dir)? {
        return Err(DataDirError::Refused(format!("data directory \"{shown}\" does not exist")));
    }
    let found = fs::metadata(data_dir).context("stat data directory", data_dir)?;
    if !found.is_dir() {
        return Err(DataDirError::Refused(format!("\"{shown}\" is not a directory: name a PostgreSQL data directory")));
    }
    refuse_root()?;
    if found.uid() != geteuid().as_raw() {
        return Err(DataDirError::Refused(format!(
            "data directory \"{shown}\" belongs to user id {}, but this process runs as {}: run as the owner",
            found.uid(),
            geteuid().as_raw()
        )));
    }
    if found.mode() & 0o027 != 0 {
        return Err(DataDirError::Refused(format!(
            "data directory \"{shown}\" has mode {:04o}, which PostgreSQL refuses: make it 0700 or 0750",
            found.mode() & 0o7777
        )));
    }
    let group_may_read = found.mode() & 0o050 == 0o050;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(if group_may_read { 0o027 } else { 0o077 }));
    Ok(())
}

/// Refuses to go on as root, as PostgreSQL does.
pub fn refuse_root() -> Result<()> {
    match geteuid().is_root() {
        true => Err(DataDirError::Refused(
            "cannot be run as root: run as the user that owns the data directory (for instance with \"sudo -u \
             postgres\")"
                .to_owned(),
        )),
        false => Ok(()),
    }
}

/// Our `postmaster.pid`; removed when dropped.
#[derive(Debug)]
pub struct DataDirLock {
    path: PathBuf,
    /// What is in it.
    contents: Vec<u8>,
    /// The directory, locked for as long as this lives.
    directory: File,
}

impl DataDirLock {
    /// Takes the directory: refuses if a live process has it, replaces the file of a dead one.
    ///
    /// The process id is written negative, as a stand-alone backend does, so that `pg_ctl stop` and the like do not
    /// take us for a postmaster. The file appears with its contents, whole: an empty one, as a kill between making and
    /// writing it would leave, keeps everybody out until somebody removes it by hand.
    pub fn acquire(data_dir: &Path) -> Result<DataDirLock> {
        let path = data_dir.join(LOCK_FILE);
        let directory = lock_directory(data_dir, &path)?;
        let prepared = data_dir.join(format!("{PREPARED}{}", getpid().as_raw_pid()));
        for _ in 0..MAX_TRIES {
            let contents = prepare(&prepared, data_dir)?;
            let linked = fs::hard_link(&prepared, &path);
            unlink_if_there(&prepared)?;
            match linked {
                Ok(()) => {
                    let lock = DataDirLock { path, contents, directory };
                    remove_prepared(data_dir)?;
                    fsync_dir(data_dir)?;
                    lock.recheck()?;
                    return Ok(lock);
                }
                // The latter: somebody else has just got the lock, and cleaned up.
                Err(error) if [io::ErrorKind::AlreadyExists, io::ErrorKind::NotFound].contains(&error.kind()) => {}
                Err(error) => return Err(error).context("create lock file", &path),
            }
            // It may be gone by now: then try again.
            if let Some(contents) = read_file(&path, MAX_LOCK_FILE)? {
                refuse_if_in_use(&path, &contents, data_dir)?;
                #[cfg(test)]
                tests::before_unlink();
                unlink_if_there(&path)?;
            }
        }
        Err(DataDirError::Refused(format!(
            "lock file \"{}\" comes back each time it is removed: stop what else is being started on this directory",
            shown(&path).display()
        )))
    }

    /// Errors if the file is not ours any more (`RecheckDataDirLockFile`): then somebody else may have the directory, and
    /// nothing more must be written.
    pub fn recheck(&self) -> Result<()> {
        let found = read_file(&self.path, MAX_LOCK_FILE)?;
        if found.as_ref() == Some(&self.contents) {
            return Ok(());
        }
        let text = String::from_utf8_lossy(found.as_deref().unwrap_or_default()).into_owned();
        let whose = match found {
            None => "is gone".to_owned(),
            Some(_) => format!("names process {} now", text.lines().next().unwrap_or_default().trim_start_matches('-')),
        };
        Err(DataDirError::Refused(format!(
            "lock file \"{}\" {whose}: this process does not have the directory any more, and has stopped writing. If nobody \
             else has, try again",
            shown(&self.path).display()
        )))
    }
}

/// Locks the directory itself against others of us: of two that find the file of a dead process, one gets on. PostgreSQL does
/// not take part, and has the same race with itself: see [`DataDirLock::recheck`].
fn lock_directory(data_dir: &Path, lock_file: &Path) -> Result<File> {
    let directory = File::open(data_dir).context("open directory", data_dir)?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(directory),
        Err(Errno::WOULDBLOCK) => {
            if let Some(contents) = read_file(lock_file, MAX_LOCK_FILE)? {
                refuse_if_in_use(lock_file, &contents, data_dir)?;
            }
            Err(DataDirError::Refused(format!(
                "another Walrider is just starting or ending on data directory \"{}\": try again",
                shown(data_dir).display()
            )))
        }
        // Some file systems lock no directories (NFS), or nothing.
        Err(Errno::BADF | Errno::NOLCK | Errno::NOTSUP | Errno::INVAL | Errno::NOSYS) => Ok(directory),
        Err(error) => Err(error).context("lock directory", data_dir),
    }
}

/// Name of a lock file that is being prepared, without the process id at its end.
const PREPARED: &str = "postmaster.pid.walrider.";

/// Writes a lock file under another name. Returns what is in it.
fn prepare(path: &Path, data_dir: &Path) -> Result<Vec<u8>> {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let full_path = fs::canonicalize(data_dir).context("resolve", data_dir)?;
    // Process id, directory, start time, port, socket directory, listen address.
    let lines = format!("-{}\n{}\n{started}\n0\n\n\n", getpid().as_raw_pid(), full_path.display());
    let mut options = OpenOptions::new();
    let mut file =
        options.write(true).create(true).truncate(true).mode(0o640).open(path).context("create lock file", path)?;
    file.write_all(lines.as_bytes()).context("write lock file", path)?;
    file.sync_all().context("fsync lock file", path)?;
    Ok(lines.into_bytes())
}

/// Removes what processes that were killed while they prepared a lock file have left.
fn remove_prepared(data_dir: &Path) -> Result<()> {
    for entry in list_dir(data_dir)? {
        if entry.file_name().as_encoded_bytes().starts_with(PREPARED.as_bytes()) {
            unlink_if_there(&entry.path())?;
        }
    }
    Ok(())
}

impl Drop for DataDirLock {
    fn drop(&mut self) {
        // One that is not ours stays. There is nobody to tell about a failure: the next one to start finds a dead process.
        if self.recheck().is_ok() {
            let _ = fs::remove_file(&self.path);
        }
        // A child that has not called exec yet has a copy of the descriptor.
        let _ = flock(&self.directory, FlockOperation::Unlock);
    }
}

/// What `postmaster.pid` says; what is not there yet is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockFile {
    /// Who has the directory; negative: not a postmaster.
    pub pid: i32,
    /// When it took it.
    pub since: Option<SystemTime>,
    /// The port of a postmaster.
    pub port: String,
    /// The directory of its socket.
    pub socket_dir: String,
    /// The first address that it listens on.
    pub listen_address: String,
    /// What it is doing: `ready` once it takes connections.
    pub status: String,
}

impl LockFile {
    /// `None`: it does not begin with a process id.
    ///
    /// ```
    /// use walrider_datadir::lock::LockFile;
    /// let text = "4711\n/data\n1795678824\n5432\n/tmp\nlocalhost\n  1  2\nready   \n";
    /// let file = LockFile::parse(text).unwrap();
    /// assert_eq!((file.pid, &*file.port, &*file.socket_dir, &*file.status), (4711, "5432", "/tmp", "ready"));
    /// assert_eq!(LockFile::parse("x"), None);
    /// ```
    pub fn parse(text: &str) -> Option<LockFile> {
        let line = |number| text.lines().nth(number).unwrap_or_default().trim();
        let pid: i32 = line(0).parse().ok()?;
        Pid::from_raw(pid.checked_abs()?)?;
        let since = line(2).parse().ok().map(Duration::from_secs);
        Some(LockFile {
            pid,
            since: since.and_then(|since| UNIX_EPOCH.checked_add(since)),
            port: line(3).to_owned(),
            socket_dir: line(4).to_owned(),
            listen_address: line(5).to_owned(),
            status: line(7).to_owned(),
        })
    }

    /// That of the server which runs on a directory, if one does.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn of_server(data_dir: &Path) -> Result<Option<LockFile>> {
        let text = read_file(&data_dir.join(LOCK_FILE), MAX_LOCK_FILE)?;
        let file = text.and_then(|text| LockFile::parse(&String::from_utf8_lossy(&text)));
        // The number may be another's by now; a postmaster works in its data directory.
        let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
        let works_there =
            |pid| identity(Path::new(&format!("/proc/{pid}/cwd"))).is_some_and(|cwd| Some(cwd) == identity(data_dir));
        Ok(file.filter(|file| file.pid > 0 && works_there(file.pid)))
    }
}

/// Errors while somebody has the directory: a live process, or what a server that was killed has left behind.
///
/// # Errors
/// [`DataDirError::Refused`] then; others if the file cannot be read, or makes no sense.
pub fn check_free(data_dir: &Path) -> Result<()> {
    let path = data_dir.join(LOCK_FILE);
    match read_file(&path, MAX_LOCK_FILE)? {
        Some(contents) => refuse_if_in_use(&path, &contents, data_dir),
        None => Ok(()),
    }
}

/// Errors unless the owner of an existing lock file is dead.
fn refuse_if_in_use(path: &Path, contents: &[u8], data_dir: &Path) -> Result<()> {
    let (data_dir, path_shown) = (&shown(data_dir), shown(path));
    let shown = path_shown.display();
    let text = String::from_utf8_lossy(contents);
    let mut lines = text.lines();
    if contents.is_empty() {
        return Err(DataDirError::Refused(format!(
            "lock file \"{shown}\" is empty: another server is starting, or crashed while starting; if none is \
             running, remove the file"
        )));
    }
    let stated = lines.next().and_then(|line| line.trim().parse::<i32>().ok());
    let Some(pid) = stated.and_then(i32::checked_abs).and_then(Pid::from_raw) else {
        return Err(DataDirError::corrupt(path, "its first line is not a process id; if no server runs, remove it"));
    };
    // Our own id, or that of the shell that started us, can only be an accident after a reboot; so can one of our threads'.
    if pid != getpid() && Some(pid) != getppid() && !is_our_thread(pid) {
        match test_kill_process(pid) {
            // No such process, or one of another user, who cannot have made a file in this directory.
            Err(Errno::SRCH | Errno::PERM) => {}
            _ => {
                // Of a negative one pg_ctl says only that it cannot stop it.
                let stop = if stated < Some(0) { "walrider stop" } else { "pg_ctl stop" };
                return Err(DataDirError::Refused(format!(
                    "data directory \"{}\" is in use by process {pid} (lock file \"{shown}\"): stop that first, with \
                     {stop} -D \"{}\"",
                    data_dir.display(),
                    data_dir.display(),
                    pid = pid.as_raw_pid()
                )));
            }
        }
    }
    // Line 7. A postmaster that was killed may have left backends behind that still write.
    let Some((key, id)) = lines.nth(5).and_then(shared_memory_id) else { return Ok(()) };
    if shared_memory_in_use(key, id) {
        return Err(DataDirError::Refused(format!(
            "processes of a crashed server still use data directory \"{}\" (shared memory key {key}, id {id}): end \
             them first",
            data_dir.display()
        )));
    }
    Ok(())
}

/// `kill` finds threads as well, by numbers that the machine has given to processes before.
fn is_our_thread(pid: Pid) -> bool {
    Path::new("/proc/self/task").join(pid.as_raw_pid().to_string()).exists()
}

fn shared_memory_id(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_ascii_whitespace().map(|word| word.parse().ok());
    Some((words.next()??, words.next()??))
}

/// Whether a System V segment has processes attached (`PGSharedMemoryIsInUse`). Without Linux's list of segments
/// we cannot tell, and say yes: what is at stake is two writers on one directory.
fn shared_memory_in_use(key: u64, id: u64) -> bool {
    match fs::read_to_string("/proc/sysvipc/shm") {
        Ok(list) => list.lines().skip(1).any(|line| segment_is_attached(line, key, id)),
        Err(_) => true,
    }
}

/// Columns: key, shmid, perms, size, cpid, lpid, nattch, … The key is printed signed.
fn segment_is_attached(line: &str, key: u64, id: u64) -> bool {
    let column: Vec<&str> = line.split_ascii_whitespace().collect();
    let number = |at: usize| column.get(at).and_then(|text| text.parse::<i64>().ok());
    let same_key = number(0).is_some_and(|found| found as u32 == key as u32);
    same_key && number(1) == i64::try_from(id).ok() && number(6).is_some_and(|attached| attached > 0)
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use super::*;

    /// Environment variable of a process that the test below starts: where it meets the others.
    const RACE: &str = "WALRIDER_TEST_RACE";

    /// In a race, waits until all who run have read the stale file.
    pub(super) fn before_unlink() {
        let Some(dir) = std::env::var_os(RACE).map(PathBuf::from) else { return };
        let count = || fs::read_dir(&dir).unwrap().filter(|e| e.as_ref().unwrap().file_name() != "data").count();
        fs::write(dir.join(format!("read.{}", std::process::id())), "").unwrap();
        let until = Instant::now() + Duration::from_millis(300);
        while count() < 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        // One of them is quick, the others unlink what it has made.
        if fs::File::create_new(dir.join("first")).is_err() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A process of the race; as a test of its own it has nothing to do.
    #[test]
    fn racer() {
        let Some(dir) = std::env::var_os(RACE).map(PathBuf::from) else { return };
        let held = DataDirLock::acquire(&dir.join("data"));
        // All have decided before the first of them lets go.
        println!("{}", if held.is_ok() { "HELD" } else { "REFUSED" });
        let mut end = String::new();
        io::stdin().read_line(&mut end).unwrap();
    }

    /// Both found the file of a dead process; the second removed that of the first, and both had the directory.
    #[test]
    fn of_several_starters_one_wins() {
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        for round in 0..10 {
            let dir = tempfile::tempdir().unwrap();
            let data = dir.path().join("data");
            fs::create_dir(&data).unwrap();
            fs::write(data.join("postmaster.pid"), format!("{}\n/data\n1\n5432\n/tmp\n*\n", dead.id())).unwrap();
            let start = || {
                std::process::Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "lock::tests::racer", "--nocapture"])
                    .env(RACE, dir.path())
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap()
            };
            let mut racers: Vec<_> = (0..2 + round % 2).map(|_| start()).collect();
            let mut said = Vec::new();
            for racer in &mut racers {
                let lines = io::BufReader::new(racer.stdout.as_mut().unwrap()).lines();
                let word =
                    lines.map(|line| line.unwrap()).find(|line| line.ends_with("HELD") || line.ends_with("REFUSED"));
                said.push(word.unwrap().ends_with("HELD"));
            }
            for mut racer in racers {
                drop(racer.stdin.take());
                racer.wait().unwrap();
            }
            assert_eq!(said.iter().filter(|&&held| held).count(), 1, "round {round}");
            assert!(!data.join("postmaster.pid").exists());
        }
    }

    #[test]
    fn a_lock_that_somebody_took_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postmaster.pid");
        let lock = DataDirLock::acquire(dir.path()).unwrap();
        lock.recheck().unwrap();
        fs::remove_file(&path).unwrap();
        assert!(lock.recheck().unwrap_err().to_string().contains("is gone"));
        fs::write(&path, "4711\n/data\n").unwrap();
        assert!(lock.recheck().unwrap_err().to_string().contains("names process 4711 now"));
        drop(lock);
        assert!(path.exists(), "it is not ours");
    }

    fn acquire_with(contents: &str) -> (tempfile::TempDir, Result<DataDirLock>) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("postmaster.pid"), contents).unwrap();
        let lock = DataDirLock::acquire(dir.path());
        (dir, lock)
    }

    #[test]
    fn it_is_written_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("postmaster.pid");
        let lock = DataDirLock::acquire(dir.path()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&format!("-{}\n", std::process::id())), "{text}");
        assert_eq!(text.lines().count(), 6);
        drop(lock);
        assert!(!path.exists());
    }

    /// A kill between making and writing the file left it empty, and nobody could start any more.
    #[test]
    fn it_appears_with_its_contents() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("postmaster.pid.walrider.12345"), "").unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    if let Ok(text) = fs::read_to_string(dir.path().join("postmaster.pid")) {
                        assert_eq!(text.lines().count(), 6, "{text}");
                    }
                }
            });
            for _ in 0..200 {
                drop(DataDirLock::acquire(dir.path()).unwrap());
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_dead_process_is_replaced() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (_dir, lock) = acquire_with(&format!("{}\n/data\n1\n5432\n/tmp\n*\n", child.id()));
        lock.unwrap();
    }

    #[test]
    fn a_live_process_is_respected() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        for sign in ["", "-"] {
            let (dir, lock) = acquire_with(&format!("{sign}{}\n", child.id()));
            let text = lock.unwrap_err().to_string();
            assert!(text.contains(&format!("process {}", child.id())), "{text}");
            let program = if sign.is_empty() { "pg_ctl" } else { "walrider" };
            assert!(text.contains(&format!("with {program} stop -D ")), "{text}");
            assert!(dir.path().join("postmaster.pid").exists());
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// After a reboot, the number of the process that died can be that of a thread of ours, as in a small container.
    #[test]
    fn a_thread_of_ours_is_no_other_process() {
        std::thread::spawn(|| {
            let thread = fs::read_link("/proc/thread-self").unwrap();
            let thread = thread.file_name().unwrap().to_str().unwrap();
            assert_ne!(thread, std::process::id().to_string());
            let (_dir, lock) = acquire_with(&format!("-{thread}\n/data\n1\n0\n\n\n"));
            lock.unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn nonsense_is_not_removed() {
        for contents in ["", "abc\n", "0\n", "-2147483648\n", "99999999999999\n"] {
            assert!(acquire_with(contents).1.is_err(), "{contents:?}");
        }
    }

    #[test]
    fn attached_segments_are_seen() {
        let line = "  -12345          7   600    56  100  100      2  1000  1000  1000  1000  1 1 1 0 0";
        assert!(segment_is_attached(line, u64::from(-12345_i32 as u32), 7));
        assert!(!segment_is_attached(line, u64::from(-12345_i32 as u32), 8));
        assert!(!segment_is_attached(&line.replace("  2  ", "  0  "), u64::from(-12345_i32 as u32), 7));
        assert_eq!(shared_memory_id("  5432001    163840"), Some((5_432_001, 163_840)));
    }
}
