//! Programs of PostgreSQL's, and servers: started, waited for, and ended whatever happens.

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Result, RunError, Stop};

/// How often to look whether something has ended.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How long a server may take for an immediate shutdown.
const SHUTDOWN: Duration = Duration::from_secs(10);
/// Lines of a log that are kept: pgbench says some 15 after what went wrong.
const LAST_LINES: usize = 30;

/// A program of PostgreSQL's, of this directory or of the PATH, without settings of the environment for its connections.
pub fn postgres_program(bindir: Option<&Path>, name: &str) -> Command {
    let mut command = Command::new(bindir.map_or_else(|| PathBuf::from(name), |dir| dir.join(name)));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PG")) {
        command.env_remove(name);
    }
    command
}

/// A process that ends with its owner.
pub struct Running {
    child: Child,
    /// SIGKILL for one that has no processes of its own, SIGQUIT for a postmaster: an immediate shutdown.
    end_by: Signal,
    /// For messages.
    name: String,
}

impl Running {
    /// Starts it; what it says is appended to a log. A group of its own: Ctrl-C is for us alone.
    pub fn start(command: &mut Command, name: &str, log: &Path, end_by: Signal) -> Result<Running> {
        let open = || -> std::io::Result<(File, File)> {
            let file = OpenOptions::new().append(true).create(true).open(log)?;
            Ok((file.try_clone()?, file))
        };
        let (out, err) = open().map_err(RunError::io(format!("open \"{}\"", log.display())))?;
        let program = Path::new(command.get_program()).display().to_string();
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0).spawn();
        let child = child.map_err(RunError::io(format!("run \"{program}\"")))?;
        Ok(Running { child, end_by, name: name.to_owned() })
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(RunError::io(format!("wait for {}", self.name)))
    }

    /// An error if it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.ended()? {
            Some(status) => Err(RunError::failed(format!("{} has ended: {status}", self.name))),
            None => Ok(()),
        }
    }

    /// Waits until it has ended well.
    pub fn wait(mut self, timeout: Duration, goes_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let what = format!("{} to end", self.name);
        let status = wait_for(&what, timeout, goes_on, &mut || self.ended())?;
        if status.success() { Ok(()) } else { Err(RunError::failed(format!("{}: {status}", self.name))) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let Some(pid) = pid.filter(|_| matches!(self.child.try_wait(), Ok(None))) else { return };
        // It is there until it was waited for, and the id its own.
        let _ = kill_process(pid, self.end_by);
        let deadline = Instant::now() + SHUTDOWN;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(LOOK_INTERVAL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a program to its end. If it fails, the error has what it said last.
pub fn run(command: &mut Command, name: &str, log: &Path, timeout: Duration, stop: &Stop) -> Result<()> {
    let running = Running::start(command, name, log, Signal::KILL)?;
    running.wait(timeout, &mut || stop.check()).map_err(|error| error.with_log(|| last_lines(log)))
}

/// Waits until there is something, as long as nothing is wrong.
pub fn wait_for<T>(
    what: &str,
    timeout: Duration,
    goes_on: &mut dyn FnMut() -> Result<()>,
    look: &mut dyn FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        goes_on()?;
        if Instant::now() >= deadline {
            return Err(RunError::failed(format!("waited {} s for {what}", timeout.as_secs_f64())));
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

/// The end of a log.
pub fn last_lines(log: &Path) -> Vec<String> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(16 << 10)..]);
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Failed;

    #[test]
    fn a_program_that_fails_tells_what_it_said() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            run(&mut command, "sh", &log, Duration::from_millis(200), &Stop::default())
        };
        shell("true").unwrap();
        let Err(RunError::Failed(Failed { message, log })) = shell("echo one; echo two >&2; exit 3") else {
            panic!("it failed")
        };
        assert_eq!((message.as_str(), log), ("sh: exit status: 3", vec!["one".to_owned(), "two".to_owned()]));
        let Err(RunError::Failed(Failed { message, .. })) = shell("sleep 60") else { panic!("it takes too long") };
        assert_eq!(message, "waited 0.2 s for sh to end");
    }

    #[test]
    fn an_interrupt_is_heard_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let (log, stop) = (dir.path().join("log"), Stop::default());
        stop.0.store(true, std::sync::atomic::Ordering::Relaxed);
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$; exec sleep 60"]);
        let running = Running::start(&mut command, "sh", &log, Signal::QUIT).unwrap();
        let pid = running.pid();
        assert!(matches!(running.wait(Duration::from_secs(60), &mut || stop.check()), Err(RunError::Interrupted)));
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
