//! `walrider promote`, `pause` and `resume`: what a running `walrider standby` is told through files in its directory and
//! signals, as pg_ctl tells PostgreSQL.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use rustix::process::Signal;
use walrider_standby::{PAUSE_FILE, PROMOTE_FILE};

use crate::control::{WaitArgs, finish};
use crate::running::{ControlError, Kind, Running};

/// Promote a running standby
///
/// `walrider standby` stops receiving, replays everything that it holds, and hands the directory over: to PostgreSQL, which
/// it starts if it was given --pg-ctl, or to you. The command returns when that is done.
#[derive(Args)]
pub struct PromoteArgs {
    /// The data directory
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    data_dir: PathBuf,
    #[command(flatten)]
    wait: WaitArgs,
}

/// Tell a running standby something
#[derive(Args)]
pub struct TellArgs {
    /// The data directory (of reload, also that of walrider relay)
    #[arg(short = 'D', long, value_name = "DIR", env = "PGDATA")]
    pub data_dir: PathBuf,
}

/// Runs `walrider promote`.
pub fn run(args: &PromoteArgs) -> ExitCode {
    finish(promote(&args.data_dir, args.wait.timeout()))
}

/// Runs `walrider pause`.
pub fn pause(args: &TellArgs) -> ExitCode {
    finish(find(&args.data_dir).and_then(|standby| {
        create(&args.data_dir.join(PAUSE_FILE))?;
        standby.signal(Signal::USR2)
    }))
}

/// Runs `walrider resume`.
pub fn resume(args: &TellArgs) -> ExitCode {
    finish(find(&args.data_dir).and_then(|standby| {
        remove(&args.data_dir.join(PAUSE_FILE))?;
        standby.signal(Signal::USR2)
    }))
}

/// Asks for promotion; with a timeout, waits until it is done.
fn promote(data_dir: &Path, timeout: Option<Duration>) -> Result<(), ControlError> {
    let standby = find(data_dir)?;
    let file = data_dir.join(PROMOTE_FILE);
    create(&file)?;
    if let Err(error) = standby.signal(Signal::USR1) {
        // So that the next start does not promote unasked.
        remove(&file)?;
        return Err(error);
    }
    let Some(timeout) = timeout else { return Ok(()) };
    if !standby.wait(timeout)? {
        return Err(ControlError::NotYetPromoted(timeout));
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

/// The `walrider standby` on a directory; anybody else would die of the signals.
fn find(data_dir: &Path) -> Result<Running, ControlError> {
    Running::expect(data_dir, &[Kind::Standby], "standby")
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
    use std::time::Instant;

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
        let args = TellArgs { data_dir: fake.dir.path().to_owned() };
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
        assert!(matches!(error(&fake), ControlError::NotRunning { .. }));
    }

    #[test]
    fn a_dead_process_is_no_standby() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("postmaster.pid"), format!("-{}\n", child.id())).unwrap();
        assert!(matches!(promote(dir.path(), None), Err(ControlError::NotRunning { .. })));
        assert!(!dir.path().join(PROMOTE_FILE).exists());
    }
}
