//! Segments that were fetched before they were asked for, in a directory.
//!
//! | name | what |
//! |---|---|
//! | `SEGMENT-CHECKSUM` | a whole segment; the checksum is that of its contents |
//! | `SEGMENT.part` | one that is being fetched |
//! | `position` | name of the segment that was asked for last |
//! | `lock` | locked by the process that fetches |
//!
//! Nothing here need be durable: what is not whole is not taken, and is fetched again.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, checksum as crc};
use walrider_datadir::DataDirError;
use walrider_datadir::durable::{list_dir, unlink_if_there};

use crate::archive::Fetched;
use crate::check;
use crate::error::{ArchiveError, Result};
use crate::frame::{MAX_CONTENTS, checksum};
use crate::name::{Kind, WalName};
use crate::place::Place;
use crate::temporary::{Temporary, open_to_lock, sweep};

const LOCK: &str = "lock";
const POSITION: &str = "position";
const PART: &str = ".part";

/// A spool of one cluster's segments from one archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spool {
    base: PathBuf,
    path: PathBuf,
    system_identifier: u64,
}

impl Spool {
    /// The one below `base` of this archive and cluster. It need not be there.
    pub fn of(base: &Path, place: &Place, system_identifier: u64) -> Spool {
        let key = crc(CrcAlgorithm::Crc64Nvme, place.identity().as_bytes());
        let path = base.join(format!("{key:016x}-{system_identifier}"));
        Spool { base: base.to_owned(), path, system_identifier }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The cluster.
    pub fn system_identifier(&self) -> u64 {
        self.system_identifier
    }

    /// Makes its directory.
    ///
    /// # Errors
    /// When that fails, or when it is another user's: then its contents are not to be trusted.
    pub fn make(&self) -> Result<()> {
        for path in [&self.base, &self.path] {
            match DirBuilder::new().mode(0o700).create(path) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(DataDirError::io("create directory", path, error).into()),
            }
        }
        self.check_owner()
    }

    fn check_owner(&self) -> Result<()> {
        let found = fs::symlink_metadata(&self.path).map_err(|error| DataDirError::io("stat", &self.path, error))?;
        if found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        Err(ArchiveError::Refused(format!("\"{}\" is not a directory of this user", self.path.display())))
    }

    /// Whether it is there, and is ours.
    pub fn is_there(&self) -> bool {
        self.check_owner().is_ok()
    }

    /// Locks it, to fetch into it; `None`: another process does.
    ///
    /// # Errors
    /// When it cannot be locked.
    pub fn lock(&self) -> Result<Option<File>> {
        let path = self.path.join(LOCK);
        let failed = |operation, error| DataDirError::io(operation, &path, error);
        loop {
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            let file = file.map_err(|error| failed("create", error))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(failed("lock", error).into()),
            }
            // Who had it before may have removed it just then.
            let ours = file.metadata().map_err(|error| failed("stat", error))?.ino();
            if fs::metadata(&path).is_ok_and(|found| found.ino() == ours) {
                return Ok(Some(file));
            }
        }
    }

    /// Whether a process fetches into it.
    pub fn is_served(&self) -> bool {
        let Ok(file) = File::open(self.path.join(LOCK)) else { return false };
        matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
    }

    /// Notes which segment was asked for.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn note_position(&self, name: &WalName) -> Result<()> {
        Temporary::write(&self.path, "position.", name.as_str().as_bytes())?.rename(&self.path.join(POSITION))
    }

    /// The segment that was asked for last; `None`: none was, or the spool is gone.
    pub fn position(&self) -> Option<WalName> {
        let mut text = String::new();
        File::open(self.path.join(POSITION)).ok()?.take(100).read_to_string(&mut text).ok()?;
        WalName::parse(&text).filter(|name| name.kind() == Kind::Segment)
    }

    /// Whether a segment is being fetched.
    pub fn is_coming(&self, name: &WalName) -> bool {
        self.part(name).exists() && self.is_served()
    }

    fn part(&self, name: &WalName) -> PathBuf {
        self.path.join(format!("{}{PART}", name.as_str()))
    }

    /// Says that a segment is being fetched, until what is returned is dropped.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn announce(&self, name: &WalName) -> Result<Coming> {
        let path = self.part(name);
        File::create(&path).map_err(|error| DataDirError::io("create", &path, error))?;
        Ok(Coming { path })
    }

    /// Adds a segment.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn add(&self, name: &WalName, fetched: &Fetched, coming: Coming) -> Result<()> {
        let failed = |operation, error| DataDirError::io(operation, &coming.path, error);
        fs::write(&coming.path, &fetched.contents).map_err(|error| failed("write", error))?;
        let path = self.path.join(format!("{}-{:08x}", name.as_str(), fetched.checksum));
        fs::rename(&coming.path, &path).map_err(|error| failed("rename", error))?;
        Ok(())
    }

    /// What it holds: names, checksums and paths, sorted.
    fn entries(&self) -> Result<Vec<(WalName, u32, PathBuf)>> {
        let entries = list_dir(&self.path)?;
        let parse = |entry: fs::DirEntry| {
            let file = entry.file_name().into_string().ok()?;
            let (name, sum) = file.split_once('-')?;
            Some((WalName::parse(name)?, u32::from_str_radix(sum, 16).ok()?, entry.path()))
        };
        Ok(entries.into_iter().filter_map(parse).collect())
    }

    /// Whether it holds a segment.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn holds(&self, name: &WalName) -> Result<bool> {
        Ok(self.entries()?.iter().any(|(held, _, _)| held == name))
    }

    /// Moves a segment out of the spool to where it was asked for, unless it is not there or not as it was fetched. Whether it
    /// did.
    ///
    /// # Errors
    /// When it is there, and cannot be moved.
    pub fn take(&self, name: &WalName, to: &Path) -> Result<bool> {
        if !self.is_there() {
            return Ok(false);
        }
        for (held, sum, path) in self.entries()? {
            if held != *name {
                continue;
            }
            let mut contents = Vec::new();
            let read = open_to_lock(&path).and_then(|file| {
                // Two that ask for the same: one has it, the other fetches.
                file.try_lock().map_err(|_| ErrorKind::WouldBlock)?;
                (&file).take(MAX_CONTENTS).read_to_end(&mut contents)?;
                Ok(file)
            });
            // Held until it has its new name.
            let Ok(_file) = read else { continue };
            let whole = checksum(&contents) == sum
                && check::segment(name, &contents).is_ok_and(|facts| facts.system_identifier == self.system_identifier);
            if !whole {
                unlink_if_there(&path)?;
                continue;
            }
            match fs::rename(&path, to) {
                Ok(()) => return Ok(true),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) if error.kind() == ErrorKind::CrossesDevices => {
                    deliver(&contents, to)?;
                    unlink_if_there(&path)?;
                    return Ok(true);
                }
                Err(error) => return Err(DataDirError::io("rename a file to", to, error).into()),
            }
        }
        Ok(false)
    }

    /// Removes what an earlier process left unfinished, and segments that `keep` does not want to keep. To be called by who
    /// holds the lock.
    ///
    /// # Errors
    /// When it cannot be read, or a segment not removed.
    pub fn clean(&self, keep: impl Fn(&WalName) -> bool, parts: bool) -> Result<()> {
        sweep(&self.path, "position.");
        for (name, _, path) in self.entries()? {
            if !keep(&name) {
                unlink_if_there(&path)?;
            }
        }
        if parts {
            for entry in list_dir(&self.path)? {
                if entry.file_name().to_string_lossy().ends_with(PART) {
                    unlink_if_there(&entry.path())?;
                }
            }
        }
        Ok(())
    }

    /// Removes all of it. To be called by who holds the lock.
    ///
    /// # Errors
    /// When it cannot be read, or a file not removed.
    pub fn remove(&self) -> Result<()> {
        self.clean(|_| false, true)?;
        unlink_if_there(&self.path.join(POSITION))?;
        unlink_if_there(&self.path.join(LOCK))?;
        // Others may be in there, who make it again if they need to.
        let _ = fs::remove_dir(&self.path);
        let _ = fs::remove_dir(&self.base);
        Ok(())
    }
}

/// A segment that is being fetched.
#[derive(Debug)]
pub struct Coming {
    path: PathBuf,
}

impl Drop for Coming {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes a file to where it was asked for: it is there whole, or not at all.
///
/// # Errors
/// When it cannot be written.
pub fn deliver(contents: &[u8], to: &Path) -> Result<()> {
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let prefix = format!("{}.walrider.", to.file_name().unwrap_or_default().to_string_lossy());
    sweep(directory, &prefix);
    Temporary::write(directory, &prefix, contents)?.rename(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::segment;

    fn name(number: u64) -> WalName {
        WalName::parse(&format!("0000000100000000{number:08X}")).unwrap()
    }

    fn fetched(contents: Vec<u8>) -> Fetched {
        Fetched { checksum: checksum(&contents), contents, facts: None }
    }

    fn spool(dir: &Path) -> Spool {
        let spool = Spool::of(&dir.join("spool"), &Place::parse("/archive").unwrap(), 77);
        spool.make().unwrap();
        spool
    }

    fn add(spool: &Spool, number: u64, contents: Vec<u8>) {
        spool.add(&name(number), &fetched(contents), spool.announce(&name(number)).unwrap()).unwrap();
    }

    #[test]
    fn what_is_added_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let (spool, to) = (spool(dir.path()), dir.path().join("to"));
        add(&spool, 5, segment(1, 5, 77));
        assert!(spool.holds(&name(5)).unwrap() && !spool.holds(&name(6)).unwrap());
        assert!(spool.take(&name(5), &to).unwrap());
        assert_eq!(fs::read(&to).unwrap(), segment(1, 5, 77));
        assert!(!spool.take(&name(5), &to).unwrap());
    }

    #[test]
    fn what_is_not_as_it_was_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (spool, to) = (spool(dir.path()), dir.path().join("to"));
        add(&spool, 5, segment(1, 5, 77));
        let (_, _, path) = spool.entries().unwrap().remove(0);
        let mut contents = fs::read(&path).unwrap();
        contents[777_777] ^= 4;
        fs::write(&path, contents).unwrap();
        add(&spool, 6, segment(1, 6, 78));
        for number in [5, 6] {
            assert!(!spool.take(&name(number), &to).unwrap() && !to.exists());
            assert!(!spool.holds(&name(number)).unwrap(), "it is removed");
        }
    }

    #[test]
    fn archives_and_clusters_have_their_own() {
        let spool = |place: &str, system| Spool::of(Path::new("/s"), &Place::parse(place).unwrap(), system).path;
        assert_eq!(spool("/a", 1), spool("file:///a", 1));
        assert_ne!(spool("/a", 1), spool("/b", 1));
        assert_ne!(spool("/a", 1), spool("/a", 2));
    }

    #[test]
    fn one_process_fetches() {
        let dir = tempfile::tempdir().unwrap();
        let spool = spool(dir.path());
        assert!(!spool.is_served());
        let lock = spool.lock().unwrap().unwrap();
        assert!(spool.is_served() && spool.lock().unwrap().is_none());
        let coming = spool.announce(&name(9)).unwrap();
        assert!(spool.is_coming(&name(9)) && !spool.is_coming(&name(8)));
        drop(lock);
        assert!(!spool.is_coming(&name(9)), "who fetched it is gone");
        drop(coming);
        spool.remove().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(!spool.take(&name(9), &dir.path().join("to")).unwrap());
    }
}
