//! Who works on a directory: found by its lock file, or, for `walrider receive` and `relay`, which have none, among all processes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use walrider_datadir::lock::LockFile;

use crate::{Cli, Command};

/// Longest command line that is read, in bytes.
const MAX_COMMAND_LINE: u64 = 1 << 20;

/// Why a process could not be found or told, or did not do it.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A file of the directory.
    #[error("could not {operation} \"{}\": {source}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nobody.
    #[error("no walrider {wanted} runs on \"{}\"", directory.display())]
    NotRunning {
        /// Who should.
        wanted: &'static str,
        /// Where.
        directory: PathBuf,
    },
    /// A server.
    #[error(
        "PostgreSQL runs on \"{}\" (process {pid}), not walrider: use pg_ctl, or the functions pg_wal_replay_pause() and \
         pg_wal_replay_resume()", data_dir.display()
    )]
    Postgres {
        /// The directory.
        data_dir: PathBuf,
        /// The server.
        pid: i32,
    },
    /// Somebody who cannot do that.
    #[error("process {pid} has \"{}\", and is not walrider {wanted}: \"{command}\"", data_dir.display())]
    Other {
        /// The directory.
        data_dir: PathBuf,
        /// Who has it.
        pid: i32,
        /// What it should be.
        wanted: &'static str,
        /// The first words of its command line.
        command: String,
    },
    /// Nobody who applies.
    #[error("no walrider logical apply with slot \"{slot}\" runs on this machine, as far as this user may see")]
    NotApplying {
        /// The slot.
        slot: String,
    },
    /// More than one.
    #[error("several processes apply a slot \"{slot}\" ({pids}): say which with --origin, or send the signal yourself")]
    SeveralApply {
        /// The slot.
        slot: String,
        /// Their ids.
        pids: String,
    },
    /// The lock file makes no sense.
    #[error("lock file \"{}\" does not begin with a process id", .0.display())]
    Lock(PathBuf),
    /// It cannot be told.
    #[error("could not signal process {pid}: {source}; run as the user that owns the data directory")]
    Signal {
        /// Whom.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// Not promoted yet.
    #[error("the standby was not promoted within {} s; it goes on with that, see its log", .0.as_secs_f64())]
    NotYetPromoted(Duration),
    /// Never promoted.
    #[error("the standby ended without being promoted: {0}")]
    NotPromoted(String),
    /// Not stopped yet.
    #[error("walrider {command} did not stop within {} s; it goes on with that, see its log", timeout.as_secs_f64())]
    NotYetStopped {
        /// Who.
        command: &'static str,
        /// How long was waited.
        timeout: Duration,
    },
    /// Killed, or crashed.
    #[error(
        "walrider {0} has ended, and its lock file is still there: it was killed, or crashed; see its log. The same command, or \
         PostgreSQL, goes on with the directory"
    )]
    NotHandedOver(&'static str),
}

/// What somebody is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `walrider standby`.
    Standby,
    /// `walrider replay`.
    Replay,
    /// `walrider receive`.
    Receive,
    /// `walrider relay`.
    Relay,
    /// `walrider logical apply`.
    LogicalApply,
    /// A server.
    Postgres,
    /// A stand-alone backend, or a stranger that has got the number of somebody dead.
    Other,
}

impl Kind {
    /// On the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Standby => "standby",
            Kind::Replay => "replay",
            Kind::Receive => "receive",
            Kind::Relay => "relay",
            Kind::LogicalApply => "logical apply",
            Kind::Postgres => "postgres",
            Kind::Other => "other",
        }
    }
}

/// A process on a directory. Holds on to the process itself: not to its number, which another may get.
pub struct Running {
    pub kind: Kind,
    pid: Pid,
    process: OwnedFd,
    /// Words of its command line.
    words: Vec<String>,
    /// When it took the directory, where the lock file says so.
    pub since: Option<SystemTime>,
}

impl Running {
    /// The process that has the directory, by the lock file. One that lets PostgreSQL have it meanwhile (`standby --readable`) keeps it open,
    /// and one that receives into it names it on its command line.
    pub fn find(directory: &Path) -> Result<Option<Running>, ControlError> {
        match Running::of_lock(directory)? {
            // Between two turns nobody has the lock file.
            None => Ok(Running::lending(directory).or_else(|| Running::receiving(directory))),
            Some(server) if server.kind == Kind::Postgres => Ok(Some(Running::lending(directory).unwrap_or(server))),
            found => Ok(found),
        }
    }

    /// One of these kinds; anybody else, and nobody, is an error that says so. `wanted` is for that.
    pub fn expect(directory: &Path, kinds: &[Kind], wanted: &'static str) -> Result<Running, ControlError> {
        let found = Running::find(directory)?;
        let running = found.ok_or_else(|| ControlError::NotRunning { wanted, directory: directory.to_owned() })?;
        let (data_dir, pid) = (directory.to_owned(), running.pid());
        match running.kind {
            kind if kinds.contains(&kind) => Ok(running),
            Kind::Postgres => Err(ControlError::Postgres { data_dir, pid }),
            _ => Err(ControlError::Other {
                data_dir,
                pid,
                wanted,
                command: running.words[..running.words.len().min(2)].join(" "),
            }),
        }
    }

    fn of_lock(data_dir: &Path) -> Result<Option<Running>, ControlError> {
        let path = data_dir.join("postmaster.pid");
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|source| ControlError::Io { operation: "read", path: path.clone(), source })?,
        };
        let file = LockFile::parse(&String::from_utf8_lossy(&text)).ok_or(ControlError::Lock(path))?;
        let pid = Pid::from_raw(file.pid.abs()).expect("a lock file has a process id");
        let Some(mut running) = Running::open(pid)? else { return Ok(None) };
        running.since = file.since;
        // A postmaster's is positive; ours is negative, as a stand-alone backend's.
        if file.pid > 0 {
            running.kind = Kind::Postgres;
        }
        Ok(Some(running))
    }

    /// A `walrider receive` or `relay` that puts WAL there.
    fn receiving(directory: &Path) -> Option<Running> {
        let directory = fs::canonicalize(directory).ok()?;
        let receives = |running: &Running| {
            let path = match running.command() {
                Some(Command::Receive(args)) => running.path(args.upstream.directory()),
                Some(Command::Relay(args)) => running.path(args.upstream.directory()),
                _ => return false,
            };
            fs::canonicalize(path).is_ok_and(|path| path == directory)
        };
        [Kind::Receive, Kind::Relay].into_iter().find_map(|kind| Running::all(kind).ok()?.find(receives))
    }

    /// A `walrider standby` that has the directory open.
    fn lending(directory: &Path) -> Option<Running> {
        let directory = fs::canonicalize(directory).ok()?;
        let has_open = |running: &Running| {
            let Ok(mut files) = fs::read_dir(format!("/proc/{}/fd", running.pid())) else { return false };
            files.any(|file| file.is_ok_and(|file| fs::read_link(file.path()).is_ok_and(|path| path == directory)))
        };
        Running::all(Kind::Standby).ok()?.find(has_open)
    }

    /// All processes of a kind, of any user.
    pub fn all(kind: Kind) -> Result<impl Iterator<Item = Running>, ControlError> {
        let path = PathBuf::from("/proc");
        let failed = |source| ControlError::Io { operation: "read", path: path.clone(), source };
        let entries = fs::read_dir(&path).map_err(failed)?;
        let processes = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        // Those that end meanwhile, and those of others, are none of ours.
        let open = |pid| Running::open(Pid::from_raw(pid)?).ok().flatten();
        Ok(processes.filter_map(open).filter(move |running| running.kind == kind))
    }

    /// `None`: it has ended.
    fn open(pid: Pid) -> Result<Option<Running>, ControlError> {
        let number = pid.as_raw_pid();
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            other => other.map_err(|error| ControlError::Signal { pid: number, source: error.into() })?,
        };
        let mut bytes = Vec::new();
        // That of another user, or of one that has just ended, cannot be read: a stranger's.
        let _ = File::open(format!("/proc/{number}/cmdline"))
            .and_then(|file| file.take(MAX_COMMAND_LINE).read_to_end(&mut bytes));
        let text = String::from_utf8_lossy(&bytes);
        let words: Vec<String> = text.trim_end_matches('\0').split('\0').map(str::to_owned).collect();
        Ok(Some(Running { kind: kind_of(&words), pid, process, words, since: None }))
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    /// What it was told on its command line, as this program understands it.
    pub fn command(&self) -> Option<Command> {
        Some(Cli::try_parse_from(&self.words).ok()?.command)
    }

    /// A path of its command line, as seen from here.
    pub fn path(&self, path: &Path) -> PathBuf {
        match fs::read_link(format!("/proc/{}/cwd", self.pid())) {
            Ok(cwd) => cwd.join(path),
            Err(_) => path.to_owned(),
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<(), ControlError> {
        pidfd_send_signal(&self.process, signal)
            .map_err(|error| ControlError::Signal { pid: self.pid(), source: error.into() })
    }

    /// Waits for the end of the process; false if the time is over first.
    pub fn wait(&self, timeout: Duration) -> Result<bool, ControlError> {
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&left)) {
                Ok(ended) => return Ok(ended > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ControlError::Signal { pid: self.pid(), source: error.into() }),
            }
        }
    }
}

/// What a command line is of.
fn kind_of(words: &[String]) -> Kind {
    let program = words.first().and_then(|word| word.rsplit('/').next()).unwrap_or_default();
    match words.get(1).map(String::as_str) {
        _ if !program.starts_with("walrider") => Kind::Other,
        Some("standby") => Kind::Standby,
        Some("replay") => Kind::Replay,
        Some("receive") => Kind::Receive,
        Some("relay") => Kind::Relay,
        Some("logical") if words.get(2).map(String::as_str) == Some("apply") => Kind::LogicalApply,
        _ => Kind::Other,
    }
}
