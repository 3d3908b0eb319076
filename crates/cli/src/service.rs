//! What every long run has around it: signals, the HTTP port, and the conversation with systemd (`sd_notify`(3)).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use walrider_datadir::descriptors::shares;
use walrider_observe::Observed;
use walrider_observe::http::{self, Handle, HttpError, Provider};

/// How often systemd is told how it goes.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// How often to look whether it is ready.
const READY_INTERVAL: Duration = Duration::from_millis(100);

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// SIGINT, SIGTERM: stop cleanly.
    Stop,
    /// SIGHUP: read the configuration again.
    Reload,
    /// SIGUSR1: promote.
    Promote,
    /// SIGUSR2: look which control files are there.
    Look,
}

/// Why the surroundings could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The port.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// Signals or threads.
    #[error("could not handle signals: {0}")]
    Signals(#[from] io::Error),
}

/// Handles signals, serves HTTP if there is an address, and tells systemd how it goes, all in threads of their own and
/// until the process ends. `act` is called for one signal after the other.
///
/// To be called before anybody can learn of this process: until then signals end it.
///
/// # Errors
/// If the port cannot be opened, or there are no threads to be had.
pub fn start<S: Observed>(
    http: Option<&str>,
    status: Provider<S>,
    mut act: impl FnMut(Wish) + Send + 'static,
) -> Result<Option<Handle>, ServiceError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2])?;
    let ready = Arc::new(AtomicBool::new(false));
    let is_ready = ready.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            let wish = match signal {
                SIGHUP => Wish::Reload,
                SIGUSR1 => Wish::Promote,
                SIGUSR2 => Wish::Look,
                _ => Wish::Stop,
            };
            let tell = is_ready.load(Ordering::Relaxed);
            match wish {
                Wish::Stop => notify(&[NotifyState::Stopping]),
                Wish::Reload if tell => begin_reload(),
                _ => {}
            }
            act(wish);
            if wish == Wish::Reload && tell {
                notify(&[NotifyState::Ready]);
            }
        }
    })?;
    if std::env::var_os("NOTIFY_SOCKET").is_some() {
        let status = status.clone();
        thread::Builder::new().name("notify".into()).spawn(move || report(&*status, &ready))?;
    }
    Ok(http.map(|address| http::serve(address, status, shares().connections)).transpose()?)
}

/// Tells systemd when it is ready, in a few words how it goes, and that it lives: the snapshot could be made.
///
/// Ready is what a server without hot standby calls so: recovery has begun (`process_pm_pmsignal`,
/// `postmaster/postmaster.c`, PostgreSQL 18). To catch up may take longer than systemd waits.
fn report<S: Observed>(status: &(dyn Fn() -> S + Send + Sync), ready: &AtomicBool) {
    let watchdog = sd_notify::watchdog_enabled();
    let interval = watchdog.map_or(STATUS_INTERVAL, |time| STATUS_INTERVAL.min(time / 2));
    let mut told = String::new();
    loop {
        let now = status();
        let words = now.summary();
        let mut news = Vec::new();
        if words != told {
            news.push(NotifyState::Status(&words));
        }
        if now.is_ready() && !ready.swap(true, Ordering::Relaxed) {
            news.push(NotifyState::Ready);
        }
        if watchdog.is_some() {
            news.push(NotifyState::Watchdog);
        }
        if !news.is_empty() {
            notify(&news);
        }
        told = words;
        let is_ready = ready.load(Ordering::Relaxed);
        thread::sleep(if is_ready { interval } else { READY_INTERVAL.min(interval) });
    }
}

/// `Type=notify-reload` wants to know when reloading began.
fn begin_reload() {
    match NotifyState::monotonic_usec_now() {
        Ok(time) => notify(&[NotifyState::Reloading, time]),
        Err(error) => tracing::warn!("could not read the clock: {error}"),
    }
}

/// Without systemd this does nothing.
fn notify(news: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(news) {
        tracing::debug!("could not notify systemd: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::process::{Child, Command, Stdio};
    use std::sync::mpsc;
    use std::time::Instant;

    use rustix::process::{Pid, Signal, kill_process};
    use walrider_layout::Lsn;
    use walrider_observe::status::{StandbyStatus, State};

    use super::*;

    /// Environment variable that makes [`child`] a service.
    const CHILD: &str = "WALRIDER_TEST_SERVICE";

    /// The process that the test below starts; as a test of its own it has nothing to do.
    #[test]
    fn child() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let begun = Instant::now();
        let status = move || {
            let state = if begun.elapsed() < Duration::from_millis(300) { State::Starting } else { State::Streaming };
            let mut status = StandbyStatus { state, primary: Some("db1:5432".into()), ..StandbyStatus::new() };
            status.connected_since = Some(status.time);
            status.positions.replayed.lsn = Some(Lsn(0x28));
            status
        };
        let (tell, told) = mpsc::channel();
        let _http = start(None, Arc::new(status), move |wish| tell.send(wish).unwrap()).unwrap();
        let mut wishes = Vec::new();
        while !wishes.contains(&Wish::Stop) {
            wishes.push(told.recv_timeout(Duration::from_secs(60)).unwrap());
        }
        assert_eq!(wishes, [Wish::Reload, Wish::Look, Wish::Promote, Wish::Stop]);
    }

    fn signal(child: &Child, signal: Signal) {
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    #[test]
    fn what_systemd_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "service::tests::child"])
            .env(CHILD, "1")
            .env("NOTIFY_SOCKET", &path)
            .env("WATCHDOG_USEC", "400000")
            .env_remove("WATCHDOG_PID")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let next = || {
            let mut bytes = [0; 4096];
            let len = socket.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..len]).into_owned()
        };
        // Skips what was repeated meanwhile.
        let until = |wanted: &str| {
            let mut seen = Vec::new();
            loop {
                let news = next();
                if news.contains(wanted) {
                    return (news, seen);
                }
                seen.push(news);
                assert!(seen.len() < 100, "no {wanted}: {seen:?}");
            }
        };
        let (ready, before) = until("READY=1");
        assert!(before[0].starts_with("STATUS=starting from db1:5432, replayed 0/28\n"), "{before:?}");
        assert!(ready.contains("STATUS=streaming from db1:5432"), "{ready}");
        assert_eq!(until("WATCHDOG=1").0, "WATCHDOG=1\n");
        signal(&child, Signal::HUP);
        let (reloading, _) = until("RELOADING=1");
        let time = reloading.trim().strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
        assert!(time.parse::<u64>().unwrap() > 0);
        assert_eq!(until("READY=1").0, "READY=1\n");
        // One after the other: two that wait at a time have no order.
        for wish in [Signal::USR2, Signal::USR1, Signal::TERM] {
            signal(&child, wish);
            thread::sleep(Duration::from_millis(200));
        }
        until("STOPPING=1");
        assert!(child.wait().unwrap().success());
    }
}
