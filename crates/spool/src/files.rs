//! The files below a spool: [`Disk`], and what else can stand in for it.
//!
//! All that a spool does to the world goes through here, so that tests can stop it, fail it and crash it at each step.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use walrider_datadir::DataDirError;
use walrider_datadir::durable::fsync_dir;

/// What is at a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Length in bytes.
    pub len: u64,
    /// A file, not a link to one or anything else.
    pub regular: bool,
}

/// A directory of WAL. Names are relative to it; one may begin with `archive_status/`.
///
/// All errors are what the operating system says.
pub trait Directory: Send + Sync {
    /// Where it is, for messages.
    fn path(&self) -> &Path;
    /// Opens a file that exists, for writing.
    fn open(&self, name: &str) -> io::Result<Arc<dyn SegmentFile>>;
    /// Makes an empty file, in the place of one of this name.
    fn create(&self, name: &str) -> io::Result<Arc<dyn SegmentFile>>;
    /// Gives a file another name, in the place of one that has it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file. One that is not there is an error.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// What is at a name, `None` if nothing is.
    fn stat(&self, name: &str) -> io::Result<Option<Stat>>;
    /// The names in the directory itself, sorted; those that are not UTF-8 are left out.
    fn names(&self) -> io::Result<Vec<String>>;
    /// Makes the names in the directory itself durable.
    fn sync(&self) -> io::Result<()>;
}

/// An open file.
pub trait SegmentFile: Send + Sync {
    /// Reads some bytes at `offset` into `buffer`; says how many, zero at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes some of `bytes` at `offset`; says how many.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Length in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Makes its contents durable (`fdatasync`).
    fn sync_data(&self) -> io::Result<()>;
    /// Makes its contents, length and times durable (`fsync`).
    fn sync_all(&self) -> io::Result<()>;
}

/// A directory of the operating system.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    group_access: bool,
}

impl Disk {
    /// A directory that exists. Files get mode 0600, with `group_access` 0640 (`pg_file_create_mode`).
    pub fn new(path: PathBuf, group_access: bool) -> Disk {
        Disk { path, group_access }
    }

    /// Makes the subdirectory `name` unless it exists.
    pub(crate) fn make_directory(&self, name: &str) -> io::Result<()> {
        let path = self.path.join(name);
        match fs::create_dir(&path) {
            Ok(()) => fs::set_permissions(&path, Permissions::from_mode(if self.group_access { 0o750 } else { 0o700 })),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Directory for Disk {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn SegmentFile>> {
        Ok(Arc::new(OpenOptions::new().read(true).write(true).open(self.path.join(name))?))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn SegmentFile>> {
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        if self.group_access {
            // Said again, because the process's umask may have taken the bit away.
            file.set_permissions(Permissions::from_mode(0o640))?;
        }
        Ok(Arc::new(file))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn stat(&self, name: &str) -> io::Result<Option<Stat>> {
        match fs::symlink_metadata(self.path.join(name)) {
            Ok(metadata) => Ok(Some(Stat { len: metadata.len(), regular: metadata.is_file() })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn sync(&self) -> io::Result<()> {
        fsync_dir(&self.path).map_err(|error| match error {
            DataDirError::Io { source, .. } => source,
            other => io::Error::other(other),
        })
    }
}

impl SegmentFile for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }
}

/// Writes all of `bytes` at `offset`; says with how many calls. A call that writes nothing means that the disk is full, as
/// in PostgreSQL (`XLogWalRcvWrite`).
pub(crate) fn write_all_at(file: &dyn SegmentFile, mut bytes: &[u8], mut offset: u64) -> io::Result<u64> {
    let mut calls = 0;
    while !bytes.is_empty() {
        calls += 1;
        match file.write_at(bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::StorageFull.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(calls)
}

/// Fills `into` from `offset` on as far as the file goes; says how far.
pub(crate) fn read_all(file: &dyn SegmentFile, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < into.len() {
        match file.read_at(&mut into[len..], offset + len as u64) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}
