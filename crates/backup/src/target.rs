//! The directories that a backup is unpacked into, until they are complete.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf, absolute};

use rustix::fs::{FlockOperation, flock};
use walrider_datadir::backup_label::MappedTablespace;
use walrider_datadir::config::{RESTORING, is_half_restored};
use walrider_datadir::durable::{create_dirs, fsync_dir, list_dir, unlink};
use walrider_datadir::lock::{check_ownership, refuse_root};
use walrider_layout::control::CONTROL_FILE;

use crate::error::{BackupError, IoContext, Result, quoted};

/// The file that says that a directory is not complete. It is in the data directory, and in each tablespace.
pub(crate) const MARKER: &str = RESTORING;

/// Where tablespaces go.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// From where one was to where it is to be.
    pub pairs: Vec<(PathBuf, PathBuf)>,
    /// Where those are put that are not among them, by number; without, where they were.
    pub others: Option<PathBuf>,
}

impl Mapping {
    /// Where this one goes.
    pub(crate) fn of(&self, tablespace: &MappedTablespace) -> PathBuf {
        match (self.pairs.iter().find(|(old, _)| *old == tablespace.path), &self.others) {
            (Some((_, new)), _) => new.clone(),
            (None, Some(others)) => others.join(tablespace.oid.to_string()),
            (None, None) => tablespace.path.clone(),
        }
    }

    /// A pair for a tablespace that there is none of is a mistake.
    pub(crate) fn check(&self, tablespaces: &[MappedTablespace]) -> Result<()> {
        let unknown = self.pairs.iter().find(|(old, _)| !tablespaces.iter().any(|one| one.path == *old));
        match unknown {
            Some((old, _)) => Err(BackupError::Refused(format!(
                "the backup has no tablespace at {}, which --tablespace-mapping names{}",
                quoted(old),
                if tablespaces.is_empty() { "; it has none at all".to_owned() } else { known(tablespaces) }
            ))),
            None => Ok(()),
        }
    }
}

fn known(tablespaces: &[MappedTablespace]) -> String {
    let known: Vec<String> = tablespaces.iter().map(|one| quoted(&one.path)).collect();
    format!("; there are {}", known.join(", "))
}

/// The directories, ours alone.
#[derive(Debug)]
pub(crate) struct Target {
    pub root: PathBuf,
    pub dir_mode: u32,
    pub file_mode: u32,
    /// The data directory and the tablespaces.
    places: Vec<PathBuf>,
    /// Locked as long as this lives.
    _locks: Vec<File>,
}

impl Target {
    /// Makes them, with links from the one to the others. All must be absent or empty; with `start_over` may have what an
    /// earlier call left that did not get to its end.
    pub fn begin(
        root: &Path,
        tablespaces: &[MappedTablespace],
        mapping: &Mapping,
        group_access: bool,
        start_over: bool,
    ) -> Result<Target> {
        refuse_root()?;
        mapping.check(tablespaces)?;
        let (dir_mode, file_mode) = if group_access { (0o750, 0o640) } else { (0o700, 0o600) };
        let root = absolute(root).context("find directory", root)?;
        let locations: Vec<PathBuf> = tablespaces.iter().map(|one| mapping.of(one)).collect();
        check_locations(&root, &locations)?;
        let places: Vec<PathBuf> = [root.clone()].into_iter().chain(locations.iter().cloned()).collect();
        // Before anything is made or removed: one that is not empty spoils all.
        let mut states: Vec<State> = Vec::new();
        for place in &places {
            let is_of_left_over = states.first() == Some(&State::LeftOver);
            states.push(state(place, start_over, is_of_left_over)?);
        }
        let mut locks = Vec::new();
        for (place, state) in places.iter().zip(states) {
            locks.push(take(place, state, dir_mode)?);
            // As whom, and the umask.
            check_ownership(place)?;
        }
        let target = Target { root, dir_mode, file_mode, places, _locks: locks };
        target.directory(Path::new("pg_tblspc"))?;
        for (tablespace, location) in tablespaces.iter().zip(&locations) {
            let link = target.root.join("pg_tblspc").join(tablespace.oid.to_string());
            symlink(location, &link).context("create symbolic link", &link)?;
        }
        Ok(target)
    }

    /// Makes a directory, and those around it, unless they are there.
    pub fn directory(&self, below: &Path) -> Result<()> {
        let path = self.root.join(below);
        match DirBuilder::new().mode(self.dir_mode).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let parent = below.parent().filter(|parent| !parent.as_os_str().is_empty());
                self.directory(parent.ok_or(error).context("create directory", &path)?)?;
                self.directory(below)
            }
            other => other.context("create directory", &path),
        }
    }

    /// Makes a file that is not there yet.
    pub fn file(&self, below: &Path) -> Result<File> {
        let path = self.root.join(below);
        let create = || OpenOptions::new().write(true).create_new(true).mode(self.file_mode).open(&path);
        match (create(), below.parent()) {
            (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => {
                self.directory(parent)?;
                create()
            }
            (other, _) => other,
        }
        .context("create file", &path)
    }

    /// All but the control file is there, and durable: from now on nobody empties the tablespaces.
    pub fn end_tablespaces(&self) -> Result<()> {
        self.places[1..].iter().try_for_each(|place| Ok(unlink(&place.join(MARKER)).map(drop)?))
    }

    /// The data directory is complete.
    pub fn end(self) -> Result<()> {
        Ok(unlink(&self.root.join(MARKER)).map(drop)?)
    }
}

/// Tablespaces are beside the data directory, and beside one another.
fn check_locations(root: &Path, locations: &[PathBuf]) -> Result<()> {
    for (at, location) in locations.iter().enumerate() {
        let is_plain = location.is_absolute() && absolute(location).is_ok_and(|path| path == *location);
        let has_dots = location.components().any(|part| part == std::path::Component::ParentDir);
        if !is_plain || has_dots {
            return Err(BackupError::Refused(format!(
                "a tablespace cannot be at {}: that is no absolute path; name another with --tablespace-mapping",
                quoted(location)
            )));
        }
        let others = locations[at + 1..].iter().map(PathBuf::as_path).chain([root]);
        if let Some(other) = others.into_iter().find(|other| other.starts_with(location) || location.starts_with(other))
        {
            return Err(BackupError::Refused(format!(
                "a tablespace cannot be at {}, as {} is used, too: name another place with --tablespace-mapping",
                quoted(location),
                quoted(other)
            )));
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Empty,
    LeftOver,
}

/// What is there; anything that is not ours is refused. `is_of_left_over`: it is a tablespace, and the data directory a left-over.
fn state(place: &Path, start_over: bool, is_of_left_over: bool) -> Result<State> {
    let shown = quoted(place);
    match fs::metadata(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(State::Absent),
        Ok(found) if !found.is_dir() => return Err(BackupError::Refused(format!("{shown} is no directory"))),
        other => other.context("stat directory", place)?,
    };
    let entries = list_dir(place)?;
    let has = |name: &str| entries.iter().any(|entry| entry.file_name() == name);
    let is_marked = is_half_restored(place)?;
    if entries.is_empty() {
        Ok(State::Empty)
    } else if is_marked && start_over {
        Ok(State::LeftOver)
    } else if is_marked {
        Err(BackupError::Refused(format!(
            "{shown} is not complete: a restore into it was interrupted. With --start-over, what it has left there is \
             removed, and all begins again"
        )))
    } else {
        let whole = if has("PG_VERSION") {
            ". It is a data directory: if the backup was unpacked into it and replay did not get to its end, go on with \
             walrider replay"
        } else if is_of_left_over {
            ". Nothing in it says that it is what the interrupted restore has left: a restore that was about to be complete has \
             removed that. If it is so, remove what is in it by hand"
        } else {
            "; a tablespace goes elsewhere with --tablespace-mapping"
        };
        Err(BackupError::Refused(format!("{shown} is not empty: name a directory that is, or is not there yet{whole}")))
    }
}

/// Makes a directory, or empties it, with the marker in it; locked.
fn take(place: &Path, state: State, mode: u32) -> Result<File> {
    if state == State::Absent {
        create_dirs(place, 0o700)?;
    }
    fs::set_permissions(place, Permissions::from_mode(mode)).context("set permissions of directory", place)?;
    let is_left_over = state == State::LeftOver;
    let path = place.join(MARKER);
    let text = "walrider restore was interrupted, or is still at work: this directory is not complete.\n";
    let marker = OpenOptions::new().write(true).create(!is_left_over).truncate(false).mode(0o600).open(&path);
    let marker = marker.context("create file", &path)?;
    let another = || {
        BackupError::Refused(format!("another walrider restore is at work on {}, or was a moment ago", quoted(place)))
    };
    flock(&marker, FlockOperation::NonBlockingLockExclusive).map_err(|_| another())?;
    // The one that had the lock may have come to its end since we looked.
    let is_as_it_was = match is_left_over {
        true => is_half_restored(place)?,
        false => list_dir(place)?.iter().all(|entry| entry.file_name() == MARKER),
    };
    if !is_as_it_was {
        return Err(another());
    }
    // First: without it no server starts, and all know what the directory is, whatever else is gone when this is interrupted.
    unlink(&place.join(CONTROL_FILE))?;
    for entry in list_dir(place)?.into_iter().filter(|entry| entry.file_name() != MARKER) {
        let path = entry.path();
        let is_dir = entry.file_type().context("stat", &path)?.is_dir();
        if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.context("remove", &path)?;
    }
    io::Write::write_all(&mut &marker, text.as_bytes()).context("write file", &path)?;
    marker.sync_all().context("fsync file", &path)?;
    fsync_dir(place)?;
    Ok(marker)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_says_that_it_is_incomplete_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("a/b");
        let states = |place: &Path| [false, true].map(|start_over| state(place, start_over, false).ok());
        assert_eq!(states(&place), [Some(State::Absent); 2]);
        fs::create_dir_all(&place).unwrap();
        assert_eq!(states(&place), [Some(State::Empty); 2]);
        fs::write(place.join("PG_VERSION"), "18\n").unwrap();
        assert_eq!(states(&place), [None; 2]);
        assert!(!state(&place, true, true).unwrap_err().to_string().contains("by hand"));
        fs::rename(place.join("PG_VERSION"), place.join("PG_18")).unwrap();
        assert!(state(&place, true, true).unwrap_err().to_string().contains("by hand"));
        fs::rename(place.join("PG_18"), place.join("PG_VERSION")).unwrap();
        fs::write(place.join(MARKER), "").unwrap();
        assert_eq!(states(&place), [None, Some(State::LeftOver)]);
        // It was complete, and perhaps a server has run on it.
        fs::create_dir(place.join("global")).unwrap();
        fs::write(place.join(CONTROL_FILE), "").unwrap();
        assert_eq!(states(&place), [None; 2]);
        assert_eq!(states(&place.join("PG_VERSION")), [None; 2]);
        fs::remove_file(place.join(CONTROL_FILE)).unwrap();
        drop(take(&place, State::LeftOver, 0o700).unwrap());
        assert_eq!(list_dir(&place).unwrap().len(), 1);
        let lock = take(&place, State::LeftOver, 0o700).unwrap();
        assert!(take(&place, State::LeftOver, 0o700).unwrap_err().to_string().contains("at work"));
        drop(lock);
        // Another one has come to its end, and put something there, since we looked.
        fs::write(place.join("PG_VERSION"), "18\n").unwrap();
        assert!(take(&place, State::Empty, 0o700).is_err());
        fs::remove_file(place.join(MARKER)).unwrap();
        assert!(take(&place, State::LeftOver, 0o700).is_err());
        assert!(place.join("PG_VERSION").exists());
    }

    #[test]
    fn tablespaces_are_beside_all_else() {
        let check = |locations: &[&str]| {
            check_locations(Path::new("/data"), &locations.iter().map(PathBuf::from).collect::<Vec<_>>())
        };
        check(&["/a", "/b", "/data2"]).unwrap();
        for bad in [
            &["a"][..],
            &["/a/../data"],
            &["/data"],
            &["/data/pg_tblspc/x"],
            &["/"],
            &["/a", "/a/b"],
            &["/a", "/a"],
            &[""],
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
