//! Files written so that a crash leaves the old contents or the new, never a mixture (`durable_rename`,
//! `durable_unlink`, `fsync_fname`, `SyncDataDirectory`; `storage/file/fd.c`).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::error::{DataDirError, IoContext, Result};

/// Makes the entries of a directory durable.
pub fn fsync_dir(path: &Path) -> Result<()> {
    let directory = File::open(path).context("open directory", path)?;
    match directory.sync_all() {
        // Some file systems cannot sync directories, and need not.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) || error.raw_os_error() == Some(libc::EBADF) => Ok(()),
        other => other.context("fsync directory", path),
    }
}

/// Makes the contents of a file durable.
pub fn fsync_file(path: &Path) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path).context("open file", path)?;
    file.sync_all().context("fsync file", path)
}

/// Makes the entry of `path` in its directory durable.
pub fn fsync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => fsync_dir(parent),
        _ => fsync_dir(Path::new(".")),
    }
}

/// Makes a directory, if it is not there, and those above it that are not, each with `mode` less the umask. Their entries are durable then.
pub fn create_dirs(path: &Path, mode: u32) -> Result<()> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(mode).create(path).context("create directory", path)?;
    // One that was there may have been made by a run that was interrupted before this.
    fsync_parent(path)?;
    missing.into_iter().skip(1).try_for_each(fsync_parent)
}

/// The name under which [`write_file`] prepares the new contents of `path`.
pub(crate) fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

/// Replaces a file: after a crash it has the old contents or the new. Returns when the new are durable. The
/// temporary file is the name with `.tmp` appended; one left over from a crash is overwritten.
pub fn write_file(path: &Path, contents: &[u8]) -> Result<()> {
    let temporary = temporary_name(path);
    let written = (|| {
        let mut file = File::create(&temporary).context("create file", &temporary)?;
        file.write_all(contents).context("write file", &temporary)?;
        file.sync_all().context("fsync file", &temporary)?;
        fs::rename(&temporary, path).context("rename a temporary file to", path)
    })();
    if written.is_err() {
        // The error that counts is the first one.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    fsync_parent(path)
}

/// Copies a file, replacing what has the new name at once; durable on return.
pub fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let temporary = temporary_name(to);
    fs::copy(from, &temporary).context("copy to file", &temporary)?;
    fsync_file(&temporary)?;
    fs::rename(&temporary, to).context("rename a temporary file to", to)?;
    fsync_parent(to)
}

/// Renames a file, replacing what has the new name; returns when that is durable (`durable_rename`).
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    fsync_file(from)?;
    fs::rename(from, to).context("rename a file to", to)?;
    fsync_file(to)?;
    fsync_parent(to)?;
    if from.parent() != to.parent() { fsync_parent(from) } else { Ok(()) }
}

/// Removes a file if it is there; returns when that is durable (`durable_unlink`). Says whether it was there.
pub fn unlink(path: &Path) -> Result<bool> {
    let removed = unlink_if_there(path)?;
    if removed {
        fsync_parent(path)?;
    }
    Ok(removed)
}

/// Removes a file if it is there, without waiting for the disk. Says whether it was there.
pub fn unlink_if_there(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context("remove file", path),
    }
}

/// Reads a small file that may be missing; one longer than `max_bytes` is refused, so that a damaged or
/// replaced file does not take all memory.
pub fn read_file(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("open file", path),
    };
    let mut contents = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut contents).context("read file", path)?;
    if contents.len() as u64 > max_bytes {
        return Err(DataDirError::corrupt(path, format!("it is longer than {max_bytes} bytes")));
    }
    Ok(Some(contents))
}

/// Entries of a directory, sorted, so that every run does the same in the same order. A missing directory
/// has none.
pub fn list_dir(path: &Path) -> Result<Vec<fs::DirEntry>> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).context("open directory", path),
    };
    let mut entries: Vec<fs::DirEntry> = entries.collect::<io::Result<_>>().context("read directory", path)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read_file(&path, 10).unwrap(), None);
        write_file(&path, b"one").unwrap();
        fs::write(temporary_name(&path), b"left over from a crash, longer").unwrap();
        write_file(&path, b"two").unwrap();
        assert_eq!(read_file(&path, 10).unwrap().unwrap(), b"two");
        assert!(!temporary_name(&path).exists());
        assert!(read_file(&path, 2).unwrap_err().is_corruption());
        rename(&path, &dir.path().join("other")).unwrap();
        assert!(unlink(&dir.path().join("other")).unwrap());
        assert!(!unlink(&dir.path().join("other")).unwrap());
    }

    #[test]
    fn an_error_names_operation_and_path() {
        let dir = tempfile::tempdir().unwrap();
        let text = write_file(&dir.path().join("missing/file"), b"").unwrap_err().to_string();
        assert!(text.starts_with("could not create file \"") && text.contains("missing/file.tmp"), "{text}");
    }
}
