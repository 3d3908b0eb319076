//! A directory that stays the same one whatever becomes of its name.
//!
//! A server changes into its data directory and uses relative paths from there (`ChangeToDataDir`,
//! `utils/init/miscinit.c`, PostgreSQL 18). A library must not do that, and of a program all other relative paths would
//! change. So paths go through a descriptor instead: `/proc/self/fd/N` is the directory itself, not its name.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{DataDirError, IoContext, Result};

/// Where the descriptors of a process are (`proc_pid_fd`(5)).
const DESCRIPTORS: &str = "/proc/self/fd";

/// An open directory. Paths below [`HeldDir::path`] lead into it as long as this, or a copy, lives.
#[derive(Clone, Debug)]
pub struct HeldDir {
    path: PathBuf,
    _directory: Arc<File>,
}

impl HeldDir {
    /// Opens a directory.
    ///
    /// # Errors
    /// If it cannot be opened, or `/proc` is not there.
    pub fn open(path: &Path) -> Result<HeldDir> {
        let directory = File::open(path).context("open directory", path)?;
        let held = Path::new(DESCRIPTORS).join(directory.as_raw_fd().to_string());
        if !held.metadata().is_ok_and(|found| found.is_dir()) {
            return Err(DataDirError::Refused(format!(
                "\"{}\" does not lead to directory \"{}\": /proc must be mounted",
                held.display(),
                path.display()
            )));
        }
        Ok(HeldDir { path: held, _directory: Arc::new(directory) })
    }

    /// The way to it, for this process only. [`shown`] has its name.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A path as others know it, for messages and for other programs: where what it begins with is held, with the name that it
/// has now.
pub fn shown(path: &Path) -> PathBuf {
    let Ok(below) = path.strip_prefix(DESCRIPTORS) else { return path.to_owned() };
    let mut parts = below.components();
    let name = parts.next().and_then(|number| fs::read_link(Path::new(DESCRIPTORS).join(number)).ok());
    match name {
        Some(name) if parts.as_path().as_os_str().is_empty() => name,
        Some(name) => name.join(parts.as_path()),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_same_under_another_name() {
        let parent = tempfile::tempdir().unwrap();
        let parent = fs::canonicalize(parent.path()).unwrap();
        let (old, new) = (parent.join("q"), parent.join("q2"));
        fs::create_dir(&old).unwrap();
        let held = HeldDir::open(&old).unwrap();
        assert_eq!(shown(held.path()), old);
        fs::rename(&old, &new).unwrap();
        fs::create_dir(&old).unwrap();
        fs::write(held.path().join("file"), "x").unwrap();
        assert!(new.join("file").exists() && !old.join("file").exists());
        assert_eq!(shown(&held.path().join("base/5")), new.join("base/5"));
        assert_eq!(shown(Path::new("relative")), Path::new("relative"));
        let error = DataDirError::io("open", held.path().join("none"), std::io::Error::other("it is not")).to_string();
        assert!(error.contains(&format!("\"{}\"", new.join("none").display())), "{error}");
        assert!(HeldDir::open(&new.join("file")).is_err() && HeldDir::open(&new.join("none")).is_err());
    }
}
