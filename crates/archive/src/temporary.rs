//! Files under names that are theirs until they are whole. Each is locked by who writes it: what a process left behind that is gone
//! can be told from what one still writes, and is removed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Result;
use walrider_datadir::DataDirError;

/// Numbers of those that this process makes.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A file that goes when it is dropped, unless it has got another name.
#[derive(Debug)]
pub struct Temporary {
    file: File,
    path: PathBuf,
    kept: bool,
}

impl Temporary {
    /// Makes one with contents, in a directory; its name begins so.
    ///
    /// # Errors
    /// When it cannot be made or written.
    pub fn write(directory: &Path, prefix: &str, contents: &[u8]) -> Result<Temporary> {
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = directory.join(format!("{prefix}{}.{number}", std::process::id()));
            let failed = |operation, error| DataDirError::io(operation, &path, error);
            let file = match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                // A process of the same number has it, or had, on another host or in another container.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                file => file.map_err(|error| failed("create", error))?,
            };
            // A file system without locks: then nobody sweeps either.
            let swept = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            let mut made = Temporary { file, path: path.clone(), kept: false };
            // Before it was locked, it looked like one that nobody writes.
            if swept || !made.is_there() {
                continue;
            }
            made.file.write_all(contents).map_err(|error| failed("write", error))?;
            return Ok(made);
        }
    }

    fn is_there(&self) -> bool {
        let ours = self.file.metadata().map(|found| (found.dev(), found.ino()));
        let there = fs::metadata(&self.path).map(|found| (found.dev(), found.ino()));
        matches!((ours, there), (Ok(ours), Ok(there)) if ours == there)
    }

    /// Its name.
    #[cfg(test)]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes its contents durable.
    ///
    /// # Errors
    /// When the system cannot.
    pub fn sync(&self) -> Result<()> {
        Ok(self.file.sync_all().map_err(|error| DataDirError::io("fsync", &self.path, error))?)
    }

    /// Gives it another name, replacing what has that.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn rename(mut self, to: &Path) -> Result<()> {
        fs::rename(&self.path, to).map_err(|error| DataDirError::io("rename a file to", to, error))?;
        self.kept = true;
        Ok(())
    }

    /// Gives it another name, unless something has that. Says whether it did.
    ///
    /// # Errors
    /// When it can be neither linked nor renamed.
    pub fn rename_to_new(mut self, to: &Path) -> Result<bool> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        use rustix::io::Errno;
        match renameat_with(CWD, &self.path, CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => {
                self.kept = true;
                Ok(true)
            }
            Err(Errno::EXIST) => Ok(false),
            // Not every file system can (NFS); all of those have hard links.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match fs::hard_link(&self.path, to) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(DataDirError::io("link a file to", to, error).into()),
            },
            Err(error) => Err(DataDirError::io("rename a file to", to, error.into()).into()),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens a file so that it can be locked: NFS locks for its writers alone what nobody else may have.
pub fn open_to_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Removes files whose names begin so, and that nobody writes any more. What cannot be removed is left: it is in nobody's way.
pub fn sweep(directory: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        let Ok(file) = open_to_lock(&entry.path()) else { continue };
        if file.try_lock().is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by a review: in containers each has process 1, and two that archived to one volume wrote into each other's file.
    #[test]
    fn what_another_host_writes_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let next = NEXT.load(Ordering::Relaxed);
        let others = (next..next + 3).map(|number| dir.path().join(format!("x.{}.{number}", std::process::id())));
        let others: Vec<_> = others.collect();
        others.iter().for_each(|path| fs::write(path, "another's").unwrap());
        let ours = Temporary::write(dir.path(), "x.", b"ours").unwrap();
        ours.rename(&dir.path().join("done")).unwrap();
        assert!(others.iter().all(|path| fs::read(path).unwrap() == b"another's"));
    }

    #[test]
    fn only_what_nobody_writes_is_swept() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.1.2"), "left behind").unwrap();
        fs::write(dir.path().join("other"), "not ours").unwrap();
        let busy = Temporary::write(dir.path(), "x.", b"new").unwrap();
        sweep(dir.path(), "x.");
        assert!(busy.path().exists() && dir.path().join("other").exists() && !dir.path().join("x.1.2").exists());
        assert!(!Temporary::write(dir.path(), "x.", b"1").unwrap().rename_to_new(&dir.path().join("other")).unwrap());
        assert_eq!(fs::read(dir.path().join("other")).unwrap(), b"not ours");
        busy.rename(&dir.path().join("other")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
