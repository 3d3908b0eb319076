//! Which segments are archived: empty files in `archive_status` (`access/transam/xlogarchive.c`, PostgreSQL 18).
//!
//! They are not fsynced, as in PostgreSQL: at worst a segment is archived a second time.

use std::io;

use crate::files::Directory;

/// What is noted of a segment, or history file, that is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArchiveStatus {
    /// Nothing.
    #[default]
    None,
    /// `.done`, so that it is not archived after a promotion: a standby whose `archive_mode` is not `always`
    /// (`XLogArchiveForceDone`).
    Done,
    /// `.ready`, so that it is archived: `archive_mode = always` (`XLogArchiveNotify`). It is kept until it is `.done`.
    Ready,
}

fn done(name: &str) -> String {
    format!("archive_status/{name}.done")
}

fn ready(name: &str) -> String {
    format!("archive_status/{name}.ready")
}

impl ArchiveStatus {
    /// Notes that a file is complete. One that is archived already stays so: it has come a second time, after a
    /// reconnection.
    pub(crate) fn note_complete(self, directory: &dyn Directory, name: &str) -> io::Result<()> {
        if self == ArchiveStatus::None || directory.stat(&done(name))?.is_some() {
            return Ok(());
        }
        match self {
            ArchiveStatus::Done if directory.stat(&ready(name))?.is_some() => {
                directory.rename(&ready(name), &done(name))
            }
            ArchiveStatus::Done => directory.create(&done(name)).map(drop),
            _ => directory.create(&ready(name)).map(drop),
        }
    }

    /// Whether a file may be removed (`XLogArchiveCheckDone`). Marks it for the archiver if nobody has.
    pub(crate) fn may_remove(self, directory: &dyn Directory, name: &str) -> io::Result<bool> {
        if self != ArchiveStatus::Ready || directory.stat(&done(name))?.is_some() {
            return Ok(true);
        }
        if directory.stat(&ready(name))?.is_none() {
            // The archiver may have finished between the two looks.
            if directory.stat(&done(name))?.is_some() {
                return Ok(true);
            }
            directory.create(&ready(name))?;
        }
        Ok(false)
    }
}

/// Forgets a file that is gone (`XLogArchiveCleanup`).
pub(crate) fn forget(directory: &dyn Directory, name: &str) -> io::Result<()> {
    for status in [ready(name), done(name)] {
        match directory.remove(&status) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
