//! What `restore_command` delivers, one file at a time or several side by side (`RestoreArchivedFile` in
//! `access/transam/xlogarchive.c`, `wait_result_is_any_signal` in `common/wait_error.c`, PostgreSQL 18).

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use walrider_datadir::{DataDirError, command};
use walrider_layout::wal::SegmentSize;

use crate::driver::{Answer, Driver, FetchStats, Opened, Remote, Request, free_bytes};
use crate::error::StoreError;

/// Name of what `restore_command` fetches, below `pg_wal`; files of this name may be removed.
const FETCH_PREFIX: &str = "walrider.fetch.";

/// `restore_command` did not deliver a file, and nothing says that it could not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The command's line.
    pub command: String,
    /// The file that was asked for.
    pub file: String,
    /// The command's exit code; 0: it said that it had delivered the file, and had not.
    pub exit_code: i32,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { command, file, exit_code } = self;
        write!(formatter, "restore_command \"{command}\" for WAL file \"{file}\" ended with exit code {exit_code}")?;
        if *exit_code == 0 { write!(formatter, ", and there is no file") } else { Ok(()) }
    }
}

/// A `restore_command`, of which no more than a number run at once. What it fetches lies in `pg_wal` for a moment; the name is
/// gone once it is there, so that its space is free when it is closed, whatever happens to us.
pub struct RestoreCommand {
    command: String,
    data_dir: PathBuf,
    size: SegmentSize,
    jobs: usize,
    growing: bool,
    state: Mutex<State>,
    /// A command has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    running: usize,
    /// How many want to run alone.
    alone: usize,
    children: HashSet<Pid>,
    stops: bool,
    /// Number of the next file.
    next: u64,
    /// The WAL segment that was delivered last.
    delivered: Option<String>,
    stats: FetchStats,
}

impl RestoreCommand {
    /// A command with `%f`, `%p`, `%r` and `%%`, of which one runs at a time, in the data directory.
    pub fn new(command: impl Into<String>, data_dir: impl Into<PathBuf>, size: SegmentSize) -> RestoreCommand {
        RestoreCommand {
            command: command.into(),
            data_dir: data_dir.into(),
            size,
            jobs: 1,
            growing: false,
            state: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// Says how many may run at once.
    pub fn with_jobs(self, jobs: usize) -> RestoreCommand {
        RestoreCommand { jobs: jobs.max(1), ..self }
    }

    /// Says whether the archive is still written: then a segment that is too short is not complete yet, and not an error.
    pub fn growing(self, growing: bool) -> RestoreCommand {
        RestoreCommand { growing, ..self }
    }

    /// Runs the command. Exit code 0 without a file, or another code, means that the archive does not deliver it.
    ///
    /// Some commands do not go together: pgBackRest's asynchronous `archive-get` empties its spool of what another one waits for,
    /// until that gives up. So one that fails beside others, and does not say that there is no such file, is asked again
    /// alone; if it delivers then, no two run at once any more.
    ///
    /// # Errors
    /// A signal, or a code above 125 (the shell could not run it): that ends recovery, as in PostgreSQL. A file of the wrong
    /// size.
    fn run(&self, request: &Request<'_>) -> Result<Answer, StoreError> {
        let (answer, beside) = self.run_in_turn(request)?;
        match &answer {
            // The code that archives agree on.
            Answer::Missing(Some(refusal)) if beside && refusal.exit_code > 1 => {}
            _ => return Ok(answer),
        }
        self.state().alone += 1;
        let again = self.run_in_turn(request);
        let mut state = self.state();
        state.alone -= 1;
        state.stats.alone |= matches!(again, Ok((Answer::There(_), _)));
        drop(state);
        self.ended.notify_all();
        again.map(|(answer, _)| answer)
    }

    /// Runs the command once others leave room for it. Whether others may have run beside it.
    fn run_in_turn(&self, request: &Request<'_>) -> Result<(Answer, bool), StoreError> {
        let (number, beside) = self.take_turn()?;
        let started = Instant::now();
        let relative = format!("pg_wal/{FETCH_PREFIX}{number}");
        let path = self.data_dir.join(&relative);
        let result = self.run_into(request, &relative, &path);
        // Whatever came of it, and also if it left half a file.
        let removed = remove(&path);
        let mut state = self.state();
        state.running -= 1;
        state.stats.commands += started.elapsed();
        if matches!(result, Ok(Answer::There(_))) && self.size.parse_file_name(request.name).is_some() {
            state.stats.segments += 1;
            state.delivered = Some(request.name.to_owned());
        }
        drop(state);
        self.ended.notify_all();
        removed.and(result).map(|answer| (answer, beside))
    }

    /// Whether a command is to be asked again alone.
    #[cfg(test)]
    pub fn waits_alone(&self) -> bool {
        self.state().alone > 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    /// Most commands that may run now.
    fn limit(&self, state: &State) -> usize {
        if state.alone > 0 || state.stats.alone { 1 } else { self.jobs }
    }

    /// Waits until another command may run. The number of its file, and whether others may run beside it.
    fn take_turn(&self) -> Result<(u64, bool), StoreError> {
        let mut state = self
            .ended
            .wait_while(self.state(), |state| state.running >= self.limit(state) && !state.stops)
            .expect("no panic while locked");
        if state.stops {
            return Err(StoreError::Refused("WAL is not fetched any more: replay ends".into()));
        }
        state.running += 1;
        state.next += 1;
        Ok((state.next - 1, self.limit(&state) > 1))
    }

    fn run_into(&self, request: &Request<'_>, relative: &str, path: &Path) -> Result<Answer, StoreError> {
        remove(path)?;
        let values = [('f', request.name), ('p', relative), ('r', request.oldest)];
        let line = command::expand("restore_command", &self.command, &values).map_err(StoreError::Refused)?;
        let could_not_run = |error| StoreError::Refused(format!("could not run restore_command \"{line}\": {error}"));
        // A group of its own: what the shell starts ends with it.
        let child = command::shell(&self.data_dir, &line).process_group(0).spawn().map_err(could_not_run)?;
        let status = self.wait(child).map_err(could_not_run)?;
        if let Some(signal) = status.signal() {
            return Err(StoreError::Refused(format!("restore_command \"{line}\" was ended by signal {signal}")));
        }
        let exit_code = status.code().unwrap_or(0);
        if exit_code > 125 {
            return Err(StoreError::Refused(format!(
                "restore_command \"{line}\" could not be run, or was ended by a signal (exit code {exit_code}): correct \
                 it, and start again"
            )));
        }
        let refused = Answer::Missing(Some(Refusal { command: line, file: request.name.to_owned(), exit_code }));
        if exit_code != 0 {
            return Ok(refused);
        }
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(refused),
            Err(error) => return Err(DataDirError::io("open", path, error).into()),
        };
        let len = file.metadata().map_err(|error| DataDirError::io("stat", path, error))?.len();
        let expected = self.size.bytes();
        if self.size.parse_file_name(request.name).is_none() || len == expected {
            return Ok(Answer::There(Opened { file, path: request.name.into(), fetched: true }));
        }
        if self.growing && len < expected {
            return Ok(refused);
        }
        Err(StoreError::Corrupt(format!(
            "restore_command gave WAL file \"{}\" with {len} bytes instead of {expected}",
            request.name
        )))
    }

    /// Waits for a command, which [`Remote::stop`] may end meanwhile.
    fn wait(&self, mut child: Child) -> io::Result<ExitStatus> {
        if let Some(pid) = Pid::from_raw(child.id() as i32) {
            let mut state = self.state();
            state.children.insert(pid);
            if state.stops {
                let _ = kill_process_group(pid, Signal::TERM);
            }
            drop(state);
            // Not reaped yet: nobody else can get its number.
            let ended =
                rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT));
            self.state().children.remove(&pid);
            ended?;
        }
        child.wait()
    }
}

impl Driver for RestoreCommand {
    fn get(&self, request: &Request<'_>) -> Result<Answer, StoreError> {
        self.run(request)
    }

    fn remote(&self) -> Option<&dyn Remote> {
        Some(self)
    }
}

impl Remote for RestoreCommand {
    fn jobs(&self) -> usize {
        self.jobs
    }

    fn free_bytes(&self) -> Option<u64> {
        free_bytes(&self.data_dir.join("pg_wal"))
    }

    fn delivered(&self) -> Option<String> {
        self.state().delivered.clone()
    }

    /// Nobody knows here how long a reader waited.
    fn stats(&self) -> FetchStats {
        FetchStats { jobs: self.jobs, ..self.state().stats }
    }

    fn stop(&self) {
        let mut state = self.state();
        state.stops = true;
        for &child in &state.children {
            // It is not reaped as long as it is in the list: the number is its own. It may have ended.
            let _ = kill_process_group(child, Signal::TERM);
        }
        self.ended.notify_all();
    }
}

/// Removes what an earlier run fetched into a data directory's `pg_wal`, and did not get to remove.
///
/// # Errors
/// When `pg_wal` cannot be read, or a file not removed.
pub fn remove_old_fetches(data_dir: &Path) -> Result<(), StoreError> {
    let pg_wal = data_dir.join("pg_wal");
    let entries = fs::read_dir(&pg_wal).map_err(|error| DataDirError::io("open", &pg_wal, error))?;
    for entry in entries {
        let entry = entry.map_err(|error| DataDirError::io("read", &pg_wal, error))?;
        if entry.file_name().to_string_lossy().starts_with(FETCH_PREFIX) {
            fs::remove_file(entry.path()).map_err(|error| DataDirError::io("remove", entry.path(), error))?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(DataDirError::io("remove", path, error).into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The shell was ended, and what it had started went on: a promoted directory kept the half of a file that it wrote later.
    #[test]
    fn what_the_shell_has_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("pg_wal")).unwrap();
        let command = "sh -c 'echo $$ >pid.new; mv pid.new pid; exec sleep 600'; exit 1";
        let restore = RestoreCommand::new(command, dir.path(), SegmentSize::new(1 << 20).unwrap());
        let request = Request { name: "00000002.history", oldest: "" };
        let patience = Instant::now() + Duration::from_secs(60);
        let wait = |what: &dyn Fn() -> bool| {
            while !what() {
                assert!(Instant::now() < patience);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| restore.get(&request).unwrap_err());
            wait(&|| dir.path().join("pid").exists());
            restore.stop();
        });
        let pid = fs::read_to_string(dir.path().join("pid")).unwrap();
        let state = || fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // Nobody may be there to take note of its end.
        wait(&|| state().is_empty() || state().contains(") Z "));
    }
}
