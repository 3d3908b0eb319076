//! An archive in a directory.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use walrider_datadir::DataDirError;
use walrider_datadir::durable::{fsync_dir, fsync_file, list_dir, read_file, unlink};

use crate::archive::{Backend, Look, MAX_FILE, is_timeline};
use crate::error::Result;
use crate::name::WAL;
use crate::temporary::{Temporary, sweep};

/// Below `wal`: where files are until they are whole and durable.
const UNFINISHED: &str = "unfinished";

/// A directory with an archive in it.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// The one of this path.
    pub fn new(path: impl Into<PathBuf>) -> Directory {
        Directory(path.into())
    }

    /// Whether an archive is there, and not a directory of plain segments.
    ///
    /// # Errors
    /// When that cannot be told: what nobody may read is not plain.
    pub fn is_archive(path: &Path) -> Result<bool> {
        let wal = path.join(WAL);
        let failed = |error| DataDirError::io("open directory", &wal, error);
        let entries = match fs::read_dir(&wal) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(false),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            if is_timeline(&entry.file_name().to_string_lossy()) && entry.file_type().map_err(failed)?.is_dir() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a directory below, and those above it as far as the archive's own, which has to be there: it may be a mount point that
    /// nothing is mounted on. [`Backend::settle`] makes them durable.
    fn make(&self, relative: &Path) -> Result<()> {
        let mut path = self.0.clone();
        for part in relative.components() {
            path.push(part);
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(DataDirError::io("create directory", &path, error).into()),
            }
        }
        Ok(())
    }
}

impl Backend for Directory {
    fn read(&self, key: &str, found: &mut dyn FnMut()) -> Result<Option<Vec<u8>>> {
        let path = self.0.join(key);
        match File::open(&path) {
            Ok(_) => found(),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataDirError::io("open", path, error).into()),
        }
        Ok(read_file(&path, MAX_FILE)?)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        let path = self.0.join(key);
        fs::read_dir(&self.0).map_err(|error| DataDirError::io("open directory", &self.0, error))?;
        let unfinished = Path::new(WAL).join(UNFINISHED);
        self.make(&unfinished)?;
        self.make(Path::new(key).parent().unwrap_or(Path::new("")))?;
        let unfinished = self.0.join(unfinished);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        sweep(&unfinished, &format!("{name}."));
        let temporary = Temporary::write(&unfinished, &format!("{name}."), bytes)?;
        temporary.sync()?;
        let created = temporary.rename_to_new(&path)?;
        // Also of what was there: who made it may have come no further.
        self.settle(key)?;
        Ok(created)
    }

    fn settle(&self, key: &str) -> Result<()> {
        let path = self.0.join(key);
        fsync_file(&path)?;
        fsync_dir(path.parent().unwrap_or(&self.0))?;
        fsync_dir(&self.0.join(WAL))?;
        Ok(fsync_dir(&self.0)?)
    }

    fn which(&self, keys: &[String]) -> Result<Option<String>> {
        for key in keys {
            let path = self.0.join(key);
            match fs::metadata(&path) {
                Ok(_) => return Ok(Some(key.clone())),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(DataDirError::io("stat", path, error).into()),
            }
        }
        Ok(None)
    }

    fn look(&self, keys: &[String]) -> Result<Look> {
        if let Some(key) = self.which(keys)? {
            return Ok(Look::There(key));
        }
        let path = self.0.join(WAL);
        match fs::metadata(&path) {
            Ok(_) => Ok(Look::Missing),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Look::Empty),
            Err(error) => Err(DataDirError::io("stat", path, error).into()),
        }
    }

    fn directories(&self) -> Result<Vec<String>> {
        let entries = list_dir(&self.0.join(WAL))?;
        Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    fn list(&self, directory: &str) -> Result<Vec<String>> {
        let entries = list_dir(&self.0.join(WAL).join(directory))?;
        Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    fn remove(&self, keys: &[String]) -> Result<()> {
        for key in keys {
            unlink(&self.0.join(key))?;
        }
        Ok(())
    }

    fn shown(&self, key: &str) -> String {
        self.0.join(key).display().to_string()
    }
}
