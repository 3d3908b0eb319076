//! Waiting until files in some directories change (`inotify(7)`), instead of looking again and again.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Woken {
    /// Its time was over, or a signal came.
    Timeout,
    /// Files were written to; no name has come, gone or changed.
    Written,
    /// Names have come, gone or changed, or may have.
    Renamed,
}

/// Directories under watch.
///
/// Changes that are made elsewhere, on a file system that several machines mount, and writes through a name in another
/// directory are not seen: a caller that waits has to look itself from time to time.
#[derive(Debug)]
pub struct Watch {
    /// `None`: the system gives us none, and a wait is a sleep.
    inotify: Option<OwnedFd>,
    directories: Vec<PathBuf>,
    /// A watch stays with its directory; the path may lead to another one by now. In the order of the paths.
    watched: Vec<Option<i32>>,
}

impl Watch {
    /// Watches directories, from now on.
    pub fn new(directories: Vec<PathBuf>) -> Watch {
        let inotify = match directories.is_empty() {
            true => None,
            false => inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok(),
        };
        let mut watch = Watch { inotify, watched: vec![None; directories.len()], directories };
        watch.renew();
        watch
    }

    /// Watches what the paths lead to now. True: that is not what was watched before.
    fn renew(&mut self) -> bool {
        let Some(inotify) = &self.inotify else { return false };
        let what = WatchFlags::MODIFY
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let now: Vec<Option<i32>> =
            self.directories.iter().map(|path| inotify::add_watch(inotify, path, what).ok()).collect();
        for old in self.watched.iter().flatten().filter(|old| !now.contains(&Some(**old))) {
            // It has gone by itself if its directory has.
            let _ = inotify::remove_watch(inotify, *old);
        }
        let changed = now != self.watched;
        self.watched = now;
        changed
    }

    /// Waits for a change since the last wait, at most for a time.
    pub fn wait(&mut self, timeout: Duration) -> Woken {
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        // Interrupted or not: what there is to read tells.
        let _ = match &self.inotify {
            Some(inotify) => poll(&mut [PollFd::new(inotify, PollFlags::IN)], Some(&timeout)),
            None => poll(&mut [], Some(&timeout)),
        };
        match self.take_events() {
            // Its directory may have been replaced without a change in it.
            Woken::Timeout | Woken::Renamed if self.renew() => Woken::Renamed,
            woken => woken,
        }
    }

    fn take_events(&self) -> Woken {
        let Some(inotify) = &self.inotify else { return Woken::Timeout };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(inotify, &mut buffer);
        let mut woken = Woken::Timeout;
        while let Ok(event) = reader.next() {
            let written = event.events() == ReadFlags::MODIFY;
            woken = woken.max(if written { Woken::Written } else { Woken::Renamed });
        }
        woken
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const NONE: Duration = Duration::ZERO;

    #[test]
    fn tells_writes_from_names() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut watch = Watch::new(vec![directory.path().to_owned()]);
        assert_eq!(watch.wait(NONE), Woken::Timeout);
        let mut file = fs::File::create(&path).unwrap();
        assert_eq!(watch.wait(LONG), Woken::Renamed);
        file.write_all(b"1").unwrap();
        assert_eq!(watch.wait(LONG), Woken::Written);
        assert_eq!(watch.wait(NONE), Woken::Timeout);
        fs::rename(&path, directory.path().join("other")).unwrap();
        file.write_all(b"2").unwrap();
        assert_eq!(watch.wait(LONG), Woken::Renamed);
    }

    #[test]
    fn goes_over_to_the_directory_that_has_the_name_now() {
        let parent = tempfile::tempdir().unwrap();
        let (path, away) = (parent.path().join("wal"), parent.path().join("away"));
        let mut watch = Watch::new(vec![path.clone()]);
        fs::create_dir(&path).unwrap();
        assert_eq!(watch.wait(NONE), Woken::Renamed, "it came into being");
        fs::rename(&path, &away).unwrap();
        assert_eq!(watch.wait(LONG), Woken::Renamed);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "1").unwrap();
        assert_eq!(watch.wait(NONE), Woken::Renamed);
        fs::write(away.join("file"), "2").unwrap();
        while watch.wait(NONE) != Woken::Timeout {}
        fs::write(away.join("file"), "3").unwrap();
        assert_eq!(watch.wait(NONE), Woken::Timeout, "that one is not of interest any more");
    }

    #[test]
    fn sleeps_where_there_is_nothing_to_watch() {
        let begun = std::time::Instant::now();
        assert_eq!(Watch::new(Vec::new()).wait(Duration::from_millis(20)), Woken::Timeout);
        assert!(begun.elapsed() >= Duration::from_millis(20));
    }
}
