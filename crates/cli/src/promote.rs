//! `walrider promote`, `pause` and `resume`: what a running `walrider standby` is told through files in its directory and
//! signals, as pg_ctl tells PostgreSQL.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::values::parse_duration;

/// The file that asks for promotion (`PROMOTE_SIGNAL_FILE`, `access/xlog.h`).
const PROMOTE_FILE: &str = "promote";
/// The file while which replay is paused.
const PAUSE_FILE: &str = "walrider.pause";

/// Promote a running standby
///
/// `walrider standby` stops receiving, replays everything that it holds, and hands the directory over: to PostgreSQL, which
/// it starts if it was given --pg-ctl, or to you. The command returns when that is done.
#[derive(Args)]
pub struct PromoteArgs {
    /// The data directory
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
    /// How long to wait
    #[arg(short, long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    timeout: Duration,
    /// Do not wait
    #[arg(short = 'W', long)]
    no_wait: bool,
}

/// Tell a running standby to pause or resume replay
#[derive(Args)]
pub struct PauseArgs {
    /// The data directory
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
}

/// Runs `walrider promote`.
pub fn run(args: &PromoteArgs) -> ExitCode {
    finish(promote(&args.data_dir, (!args.no_wait).then_some(args.timeout)))
}

/// Runs `walrider pause`.
pub fn pause(args: &PauseArgs) -> ExitCode {
    finish(Running::find(&args.data_dir).and_then(|standby| {
        create(&args.data_dir.join(PAUSE_FILE))?;
        standby.signal(Signal::USR2)
    }))
}

/// Runs `walrider resume`.
pub fn resume(args: &PauseArgs) -> ExitCode {
    finish(Running::find(&args.data_dir).and_then(|standby| {
        remove(&args.data_dir.join(PAUSE_FILE))?;
        standby.signal(Signal::USR2)
    }))
}

fn finish(result: Result<(), ControlError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("walrider: {error}");
            ExitCode::from(1)
        }
    }
}

/// Why a standby could not be told, or did not do it.
#[derive(Debug, thiserror::Error)]
enum ControlError {
    #[error("could not {operation} \"{}\": {source}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("no walrider standby runs on \"{}\"", .0.display())]
    NotRunning(PathBuf),
    #[error(
        "PostgreSQL runs on \"{}\" (process {pid}), not walrider standby: use pg_ctl promote, or the functions \
         pg_wal_replay_pause() and pg_wal_replay_resume()", data_dir.display()
    )]
    Postgres { data_dir: PathBuf, pid: i32 },
    #[error("process {pid} has \"{}\", and is not walrider standby: \"{command}\"", data_dir.display())]
    Other { data_dir: PathBuf, pid: i32, command: String },
    #[error("lock file \"{}\" does not begin with a process id", .0.display())]
    Lock(PathBuf),
    #[error("could not signal process {pid}: {source}; run as the user that owns the data directory")]
    Signal { pid: i32, source: io::Error },
    #[error("the standby was not promoted within {} s; it goes on with that, see its log", .0.as_secs_f64())]
    Timeout(Duration),
    #[error("the standby ended without being promoted: {0}")]
    NotPromoted(String),
}

/// Asks for promotion; with a timeout, waits until it is done.
fn promote(data_dir: &Path, timeout: Option<Duration>) -> Result<(), ControlError> {
    let standby = Running::find(data_dir)?;
    let file = data_dir.join(PROMOTE_FILE);
    create(&file)?;
    if let Err(error) = standby.signal(Signal::USR1) {
        // So that the next start does not promote unasked.
        remove(&file)?;
        return Err(error);
    }
    let Some(timeout) = timeout else { return Ok(()) };
    if !standby.wait(timeout)? {
        return Err(ControlError::Timeout(timeout));
    }
    // A standby that is handed over is no standby any more, and has used up the request.
    if exists(&file)? || exists(&data_dir.join("standby.signal"))? {
        // It has left its reason there.
        let reason = fs::read_to_string(&file).ok().filter(|reason| !reason.is_empty());
        remove(&file)?;
        return Err(ControlError::NotPromoted(reason.unwrap_or_else(|| "see its log".to_owned())));
    }
    Ok(())
}

/// A `walrider standby` on a directory. Holds on to the process itself: not to its number, which another may get.
struct Running {
    pid: Pid,
    process: OwnedFd,
}

impl Running {
    /// The one whose lock file stands in the directory.
    fn find(data_dir: &Path) -> Result<Running, ControlError> {
        let path = data_dir.join("postmaster.pid");
        let not_running = || ControlError::NotRunning(data_dir.to_owned());
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_running()),
            other => other.map_err(|source| ControlError::Io { operation: "read", path: path.clone(), source })?,
        };
        let line = String::from_utf8_lossy(text.split(|&byte| byte == b'\n').next().unwrap_or_default()).into_owned();
        let stated: i32 = line.trim().parse().map_err(|_| ControlError::Lock(path.clone()))?;
        let pid = stated.checked_abs().and_then(Pid::from_raw).ok_or(ControlError::Lock(path))?;
        let number = pid.as_raw_pid();
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Err(not_running()),
            other => other.map_err(|error| ControlError::Signal { pid: number, source: error.into() })?,
        };
        // A postmaster's is positive; ours is negative, as a stand-alone backend's.
        if stated > 0 {
            return Err(ControlError::Postgres { data_dir: data_dir.to_owned(), pid: number });
        }
        // `walrider replay` has a lock as well, and would die of the signal.
        let command = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        if !is_standby(&command) {
            let words: Vec<_> = command.split(|&byte| byte == 0).take(2).map(String::from_utf8_lossy).collect();
            return Err(ControlError::Other { data_dir: data_dir.to_owned(), pid: number, command: words.join(" ") });
        }
        Ok(Running { pid, process })
    }

    fn signal(&self, signal: Signal) -> Result<(), ControlError> {
        pidfd_send_signal(&self.process, signal)
            .map_err(|error| ControlError::Signal { pid: self.pid.as_raw_pid(), source: error.into() })
    }

    /// Waits for the end of the process; false if the time is over first.
    fn wait(&self, timeout: Duration) -> Result<bool, ControlError> {
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&left)) {
                Ok(ended) => return Ok(ended > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ControlError::Signal { pid: self.pid.as_raw_pid(), source: error.into() }),
            }
        }
    }
}

/// Whether a command line, words ended by zeros, is that of `walrider standby`.
fn is_standby(command: &[u8]) -> bool {
    let mut words = command.split(|&byte| byte == 0);
    let program = words.next().and_then(|word| word.rsplit(|&byte| byte == b'/').next()).unwrap_or_default();
    program.starts_with(b"walrider") && words.next() == Some(b"standby")
}

fn create(path: &Path) -> Result<(), ControlError> {
    let created = File::create(path).map(drop);
    created.map_err(|source| ControlError::Io { operation: "create file", path: path.to_owned(), source })
}

fn remove(path: &Path) -> Result<(), ControlError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(ControlError::Io { operation: "remove file", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn exists(path: &Path) -> Result<bool, ControlError> {
    path.try_exists().map_err(|source| ControlError::Io { operation: "stat file", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use super::*;

    const TIME: Duration = Duration::from_secs(30);

    /// A process on a directory that looks like a standby and does `on_usr1` and `on_usr2`.
    struct Fake {
        dir: tempfile::TempDir,
        child: Child,
    }

    impl Fake {
        fn start(program: &str, subcommand: &str, on_usr1: &str, on_usr2: &str) -> Fake {
            let dir = tempfile::tempdir().unwrap();
            let script = format!(
                "trap '{on_usr1}' USR1\ntrap '{on_usr2}' USR2\ntouch ready\n\
                 i=0; while [ $i -lt 3000 ]; do sleep 0.02; i=$((i+1)); done\n"
            );
            fs::write(dir.path().join(subcommand), script).unwrap();
            fs::write(dir.path().join("standby.signal"), "").unwrap();
            let child = Command::new("/bin/sh").arg0(program).arg(subcommand).current_dir(dir.path()).spawn().unwrap();
            fs::write(dir.path().join("postmaster.pid"), format!("-{}\n{}\n", child.id(), dir.path().display()))
                .unwrap();
            let fake = Fake { dir, child };
            fake.wait_for("ready");
            fake
        }

        fn standby(on_usr1: &str, on_usr2: &str) -> Fake {
            Fake::start("/usr/bin/walrider", "standby", on_usr1, on_usr2)
        }

        fn has(&self, name: &str) -> bool {
            self.dir.path().join(name).exists()
        }

        fn wait_for(&self, name: &str) {
            let until = Instant::now() + TIME;
            while !self.has(name) {
                assert!(Instant::now() < until, "no {name}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn promoted() {
        let fake = Fake::standby("rm promote standby.signal; exit 0", "exit 9");
        promote(fake.dir.path(), Some(TIME)).unwrap();
        assert!(!fake.has("promote"));
    }

    #[test]
    fn ended_without() {
        let silent =
            ["exit 1", "rm promote; exit 1", "rm standby.signal; exit 1"].map(|on_usr1| (on_usr1, "see its log"));
        for (on_usr1, why) in silent.into_iter().chain([("printf told >promote; exit 1", "told")]) {
            let fake = Fake::standby(on_usr1, "exit 9");
            let error = promote(fake.dir.path(), Some(TIME)).unwrap_err();
            assert_eq!(error.to_string(), format!("the standby ended without being promoted: {why}"), "{on_usr1}");
            assert!(!fake.has("promote"), "the next start must not promote");
        }
    }

    #[test]
    fn it_takes_longer() {
        let fake = Fake::standby("touch told", "exit 9");
        let error = promote(fake.dir.path(), Some(Duration::from_millis(50))).unwrap_err();
        assert_eq!(error.to_string(), "the standby was not promoted within 0.05 s; it goes on with that, see its log");
        assert!(fake.has("promote"));
        fake.wait_for("told");
        promote(fake.dir.path(), None).unwrap();
    }

    #[test]
    fn paused_and_resumed() {
        let fake = Fake::standby("exit 9", "test -e walrider.pause && touch paused || touch resumed");
        let args = PauseArgs { data_dir: fake.dir.path().to_owned() };
        assert_eq!(pause(&args), ExitCode::SUCCESS);
        fake.wait_for("paused");
        assert_eq!(resume(&args), ExitCode::SUCCESS);
        fake.wait_for("resumed");
        assert_eq!(resume(&args), ExitCode::SUCCESS);
    }

    /// None of them may be sent a signal: it would end them.
    #[test]
    fn others_are_left_alone() {
        let error = |fake: &Fake| {
            let error = promote(fake.dir.path(), Some(TIME)).unwrap_err();
            assert!(!fake.has("promote") && !fake.has("told"), "{error}");
            error
        };
        let replay = Fake::start("walrider", "replay", "touch told", "exit 9");
        let text = error(&replay).to_string();
        assert!(text.contains("is not walrider standby: \"walrider replay\""), "{text}");
        let backend = Fake::start("postgres", "standby", "touch told", "exit 9");
        assert!(matches!(error(&backend), ControlError::Other { .. }));

        let fake = Fake::standby("touch told", "exit 9");
        let lock = fake.dir.path().join("postmaster.pid");
        fs::write(&lock, format!("{}\n", fake.child.id())).unwrap();
        assert!(matches!(error(&fake), ControlError::Postgres { .. }));
        for nonsense in ["", "x", "0\n", "-2147483648\n", "-\n"] {
            fs::write(&lock, nonsense).unwrap();
            assert!(matches!(error(&fake), ControlError::Lock(_)), "{nonsense:?}");
        }
        fs::remove_file(&lock).unwrap();
        assert!(matches!(error(&fake), ControlError::NotRunning(_)));
    }

    #[test]
    fn a_dead_process_is_no_standby() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("postmaster.pid"), format!("-{}\n", child.id())).unwrap();
        assert!(matches!(promote(dir.path(), None), Err(ControlError::NotRunning(_))));
        assert!(!dir.path().join(PROMOTE_FILE).exists());
    }
}
