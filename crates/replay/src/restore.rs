//! Runs `restore_command`, for one file at a time and several side by side (`RestoreArchivedFile` in
//! `access/transam/xlogarchive.c`, `wait_result_is_any_signal` in `common/wait_error.c`, PostgreSQL 18).

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use walrider_datadir::DataDirError;
use walrider_layout::wal::SegmentSize;

use crate::command;
use crate::error::ReplayError;

/// Name of what `restore_command` fetches, below `pg_wal`; files of this name may be removed.
pub const FETCH_PREFIX: &str = "walrider.fetch.";

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

/// What came of a request.
#[derive(Debug)]
pub enum Fetched {
    /// The file; its name is gone already, so that its space is free once it is closed, whatever happens to us.
    There(File),
    /// The archive did not deliver it.
    Refused(Refusal),
}

/// What fetching cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct FetchStats {
    /// Most commands at once.
    pub jobs: usize,
    /// One failed beside others and not alone: since then they run one at a time.
    pub alone: bool,
    /// WAL segments that were delivered.
    pub segments: u64,
    /// How long commands ran, added up over all that ran side by side.
    pub commands: Duration,
    /// How long replay had to wait for a segment.
    pub waited: Duration,
}

/// What is to be fetched, and as what.
pub struct Request<'a> {
    /// `restore_command`.
    pub command: &'a str,
    /// The data directory: the command runs there, and its `pg_wal` takes what is fetched for a moment.
    pub data_dir: &'a Path,
    /// `%f`.
    pub name: &'a str,
    /// `%r`.
    pub oldest: &'a str,
    /// The archive is still written: a segment that is too short is not complete yet, and not an error.
    pub growing: bool,
}

/// Runs commands, no more than a number of them at once.
pub struct Runner {
    size: SegmentSize,
    jobs: usize,
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

impl Runner {
    /// At most `jobs` at once.
    pub fn new(size: SegmentSize, jobs: usize) -> Runner {
        Runner { size, jobs: jobs.max(1), state: Mutex::default(), ended: Condvar::new() }
    }

    /// Most commands at once.
    pub fn jobs(&self) -> usize {
        self.jobs
    }

    /// What it has cost so far; nobody knows here how long replay waited.
    pub fn stats(&self) -> FetchStats {
        FetchStats { jobs: self.jobs, ..self.state().stats }
    }

    /// The WAL segment that was delivered last.
    pub fn delivered(&self) -> Option<String> {
        self.state().delivered.clone()
    }

    /// Ends the commands that run, and lets no other begin.
    pub fn stop(&self) {
        let mut state = self.state();
        state.stops = true;
        for &child in &state.children {
            // It is not reaped as long as it is in the list: the number is its own. It may have ended.
            let _ = kill_process_group(child, Signal::TERM);
        }
        self.ended.notify_all();
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
    pub fn run(&self, request: &Request<'_>) -> Result<Fetched, ReplayError> {
        let (fetched, beside) = self.run_in_turn(request)?;
        match &fetched {
            // The code that archives agree on.
            Fetched::Refused(refusal) if beside && refusal.exit_code > 1 => {}
            _ => return Ok(fetched),
        }
        self.state().alone += 1;
        let again = self.run_in_turn(request);
        let mut state = self.state();
        state.alone -= 1;
        state.stats.alone |= matches!(again, Ok((Fetched::There(_), _)));
        drop(state);
        self.ended.notify_all();
        again.map(|(fetched, _)| fetched)
    }

    /// Runs the command once others leave room for it. Whether others may have run beside it.
    fn run_in_turn(&self, request: &Request<'_>) -> Result<(Fetched, bool), ReplayError> {
        let (number, beside) = self.take_turn()?;
        let started = Instant::now();
        let relative = format!("pg_wal/{FETCH_PREFIX}{number}");
        let path = request.data_dir.join(&relative);
        let result = self.run_into(request, &relative, &path);
        // Whatever came of it, and also if it left half a file.
        let removed = remove(&path);
        let mut state = self.state();
        state.running -= 1;
        state.stats.commands += started.elapsed();
        if matches!(result, Ok(Fetched::There(_))) && self.size.parse_file_name(request.name).is_some() {
            state.stats.segments += 1;
            state.delivered = Some(request.name.to_owned());
        }
        drop(state);
        self.ended.notify_all();
        removed.and(result).map(|fetched| (fetched, beside))
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
    fn take_turn(&self) -> Result<(u64, bool), ReplayError> {
        let mut state = self
            .ended
            .wait_while(self.state(), |state| state.running >= self.limit(state) && !state.stops)
            .expect("no panic while locked");
        if state.stops {
            return Err(ReplayError::Refused("WAL is not fetched any more: replay ends".into()));
        }
        state.running += 1;
        state.next += 1;
        Ok((state.next - 1, self.limit(&state) > 1))
    }

    fn run_into(&self, request: &Request<'_>, relative: &str, path: &Path) -> Result<Fetched, ReplayError> {
        remove(path)?;
        let values = [('f', request.name), ('p', relative), ('r', request.oldest)];
        let line = command::expand("restore_command", request.command, &values).map_err(ReplayError::Refused)?;
        let could_not_run = |error| ReplayError::Refused(format!("could not run restore_command \"{line}\": {error}"));
        // A group of its own: what the shell starts ends with it.
        let child = command::shell(request.data_dir, &line).process_group(0).spawn().map_err(could_not_run)?;
        let status = self.wait(child).map_err(could_not_run)?;
        if let Some(signal) = status.signal() {
            return Err(ReplayError::Refused(format!("restore_command \"{line}\" was ended by signal {signal}")));
        }
        let exit_code = status.code().unwrap_or(0);
        if exit_code > 125 {
            return Err(ReplayError::Refused(format!(
                "restore_command \"{line}\" could not be run, or was ended by a signal (exit code {exit_code}): correct \
                 it, and start again"
            )));
        }
        let refused = Fetched::Refused(Refusal { command: line, file: request.name.to_owned(), exit_code });
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
            return Ok(Fetched::There(file));
        }
        if request.growing && len < expected {
            return Ok(refused);
        }
        Err(ReplayError::CorruptWal(format!(
            "restore_command gave WAL file \"{}\" with {len} bytes instead of {expected}",
            request.name
        )))
    }

    /// Waits for a command, which [`Runner::stop`] may end meanwhile.
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

fn remove(path: &Path) -> Result<(), ReplayError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(DataDirError::io("remove", path, error).into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shell was ended, and what it had started went on: a promoted directory kept the half of a file that it wrote later.
    #[test]
    fn what_the_shell_has_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("pg_wal")).unwrap();
        let runner = Runner::new(SegmentSize::new(1 << 20).unwrap(), 1);
        let command = "sh -c 'echo $$ >pid.new; mv pid.new pid; exec sleep 600'; exit 1";
        let request = Request { command, data_dir: dir.path(), name: "00000002.history", oldest: "", growing: false };
        let patience = Instant::now() + Duration::from_secs(60);
        let wait = |what: &dyn Fn() -> bool| {
            while !what() {
                assert!(Instant::now() < patience);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| runner.run(&request).unwrap_err());
            wait(&|| dir.path().join("pid").exists());
            runner.stop();
        });
        let pid = fs::read_to_string(dir.path().join("pid")).unwrap();
        let state = || fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // Nobody may be there to take note of its end.
        wait(&|| state().is_empty() || state().contains(") Z "));
    }
}
