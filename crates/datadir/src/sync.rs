//! Many files made durable together, and copied together (`SyncDataDirectory`, `storage/file/fd.c`; `copydir`,
//! `storage/file/copydir.c`; PostgreSQL 18).
//!
//! A file system commits its journal for each new file that is made durable before the next is written. So all of them begin
//! to be written first, and then are waited for: of three hundred new files that took a third of the time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use rayon::prelude::*;

use crate::durable::{fsync_dir, fsync_file, list_dir, unlink_if_there};
use crate::error::{DataDirError, IoContext, Result};

/// More than processors, as they only wait.
const SYNCS_AT_A_TIME: usize = 16;

/// Makes many files durable: `start` has each of them begin, then `sync` waits for it.
///
/// # Errors
/// One of those of `sync`.
pub fn sync_side_by_side<T: Sync>(
    files: &[T],
    start: impl Fn(&T) + Sync + Send,
    sync: impl Fn(&T) -> Result<()> + Sync + Send,
) -> Result<()> {
    let (begun, synced) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Ends with the first error that it meets; the others go on, and their syncs do no harm.
    let work = || {
        while let Some(file) = files.get(begun.fetch_add(1, Ordering::Relaxed)) {
            start(file);
        }
        while let Some(file) = files.get(synced.fetch_add(1, Ordering::Relaxed)) {
            sync(file)?;
        }
        Ok(())
    };
    // Threads of their own, that only wait: those of a pool look for work all the time, and take processors from one another.
    thread::scope(|scope| {
        let others: Vec<_> = (1..SYNCS_AT_A_TIME.min(files.len()))
            .map_while(|_| thread::Builder::new().name("fsync".to_owned()).spawn_scoped(scope, work).ok())
            .collect();
        let own = work();
        let join = |other: thread::ScopedJoinHandle<'_, Result<()>>| {
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        others.into_iter().map(join).fold(own, Result::and)
    })
}

/// Removes many files side by side; those that are gone already are none. Freeing what they held waits for the disk, too.
///
/// # Errors
/// One of those that cannot be removed.
pub(crate) fn unlink_side_by_side(files: &[PathBuf]) -> Result<()> {
    sync_side_by_side(files, |_| (), |file| unlink_if_there(file).map(|_| ()))
}

/// Lets the system begin to write a file's contents, and does not wait: nothing is durable yet.
pub fn start_writeback(file: &File) {
    #[cfg(target_os = "linux")]
    #[allow(unsafe_code)]
    // Only a hint, whose result means nothing: what goes wrong, fsync tells.
    // SAFETY: the call takes numbers only, and the descriptor is open as long as `file` is borrowed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// A thread that lets the system begin to write files: where a device has enough to do, that waits for it.
#[derive(Debug)]
pub(crate) struct Writeback(Option<SyncSender<Arc<File>>>);

impl Writeback {
    /// Most files that wait for it, each of them open.
    const MOST_WAITING: usize = 16;

    /// Starts the thread, which ends with this.
    pub fn start() -> Writeback {
        let (sender, receiver) = sync_channel::<Arc<File>>(Writeback::MOST_WAITING);
        let work = move || receiver.into_iter().for_each(|file| start_writeback(&file));
        // Without it, and where too many wait, the system begins when it likes.
        Writeback(thread::Builder::new().name("writeback".to_owned()).spawn(work).ok().map(|_| sender))
    }

    /// Has the thread do so.
    pub fn begin(&self, file: Arc<File>) {
        if let Some(sender) = &self.0 {
            let _ = sender.try_send(file);
        }
    }
}

/// Copies files, side by side; the system has begun to write the copies on return.
///
/// # Errors
/// The first that cannot be copied.
pub(crate) fn copy_side_by_side(files: &[(PathBuf, PathBuf)]) -> Result<()> {
    files.par_iter().with_max_len(1).try_for_each(|(from, to)| copy_and_start(from, to).context("copy to file", to))
}

/// Copies one, with its mode, through one descriptor.
fn copy_and_start(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let permissions = source.metadata()?.permissions();
    let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(permissions.mode()).open(to)?;
    // The umask may have taken bits.
    copy.set_permissions(permissions)?;
    io::copy(&mut source, &mut copy)?;
    start_writeback(&copy);
    Ok(())
}

/// Everything below a directory that is to become durable: files, and then the directories that name them.
#[derive(Debug, Default)]
pub struct Tree {
    /// Plain files.
    pub files: Vec<PathBuf>,
    /// Directories, those inside before those around them.
    pub directories: Vec<PathBuf>,
}

impl Tree {
    /// Looks at a data directory, following no links but those that PostgreSQL follows: `pg_wal`, and the tablespaces in
    /// `pg_tblspc` (`SyncDataDirectory`).
    pub fn of(root: &Path) -> Result<Tree> {
        let mut tree = Tree::default();
        tree.add(root)?;
        let wal = root.join("pg_wal");
        if wal.is_symlink() {
            tree.add(&wal)?;
        }
        for entry in list_dir(&root.join("pg_tblspc"))? {
            if entry.path().is_symlink() {
                tree.add(&entry.path())?;
            }
        }
        Ok(tree)
    }

    fn add(&mut self, directory: &Path) -> Result<()> {
        for entry in list_dir(directory)? {
            let path = entry.path();
            let kind = entry.file_type().context("stat", &path)?;
            if kind.is_dir() {
                self.add(&path)?;
            } else if kind.is_file() {
                self.files.push(path);
            }
        }
        self.directories.push(directory.to_owned());
        Ok(())
    }

    /// Makes all of it durable: files, and then the directories that name them.
    ///
    /// # Errors
    /// What cannot be made durable.
    pub fn sync(&self) -> Result<()> {
        sync_side_by_side(
            &self.files,
            |file| File::open(file).iter().for_each(start_writeback),
            |file| fsync_own_file(file),
        )?;
        sync_side_by_side(&self.directories, |_| (), |directory| fsync_dir(directory))
    }
}

/// Makes the contents of a file durable, unless it is one that only root may touch (certificates), which is not ours to sync, or has
/// gone since it was listed: what `restore_command` delivers is in `pg_wal` for a moment.
fn fsync_own_file(path: &Path) -> Result<()> {
    match fsync_file(path) {
        Err(DataDirError::Io { operation: "open file", source, .. })
            if [io::ErrorKind::PermissionDenied, io::ErrorKind::NotFound].contains(&source.kind()) =>
        {
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_is_begun_and_waited_for_once_and_an_error_is_told() {
        let calls = |count: usize, bad: Option<usize>| {
            let (begun, synced) = ([const { AtomicUsize::new(0) }; 100], [const { AtomicUsize::new(0) }; 100]);
            let add = |calls: &[AtomicUsize], at: usize| calls[at].fetch_add(1, Ordering::Relaxed);
            let files = Vec::from_iter(0..count);
            let result = sync_side_by_side(
                &files,
                |&at| _ = add(&begun, at),
                |&at| {
                    add(&synced, at);
                    if Some(at) == bad { Err(DataDirError::corrupt("bad", "told")) } else { Ok(()) }
                },
            );
            let once = |calls: [AtomicUsize; 100]| calls.into_iter().take(count).all(|n| n.into_inner() == 1);
            (result.is_ok(), once(begun), once(synced))
        };
        for count in [0, 1, 2, 15, 16, 17, 100] {
            assert_eq!(calls(count, None), (true, true, true), "{count}");
        }
        for bad in [0, 50, 99] {
            assert!(!calls(100, Some(bad)).0, "{bad}");
        }
        assert!(!calls(1, Some(0)).0);
    }

    #[test]
    fn a_tree_has_what_is_behind_its_links() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(dir.path().join("base/5")).unwrap();
        fs::create_dir(dir.path().join("pg_tblspc")).unwrap();
        fs::write(dir.path().join("base/5/1"), b"x").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("pg_tblspc/16400")).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("pg_wal")).unwrap();
        fs::write(elsewhere.path().join("2"), b"x").unwrap();
        let tree = Tree::of(dir.path()).unwrap();
        assert_eq!(tree.files, ["base/5/1", "pg_wal/2", "pg_tblspc/16400/2"].map(|name| dir.path().join(name)));
        assert_eq!(tree.directories.len(), 6);
        // Fetched WAL goes again at any moment.
        fs::remove_file(dir.path().join("pg_wal/2")).unwrap();
        tree.files.iter().for_each(|file| fsync_own_file(file).unwrap());
    }
}
