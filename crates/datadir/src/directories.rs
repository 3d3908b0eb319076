//! Directories of databases and tablespaces, as replay makes and removes them (`dbase_redo`, `commands/dbcommands.c`;
//! `tblspc_redo`, `commands/tablespace.c`; `copydir`, `storage/file/copydir.c`; PostgreSQL 18).
//!
//! Nothing here waits for pages in memory: the caller has written what a copy must see, and forgotten what a drop
//! makes void. A database that was made or copied is durable with the next restartpoint, as its relations are; everything
//! else on return.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use walrider_layout::{DEFAULT_TABLESPACE_OID, GLOBAL_TABLESPACE_OID, Major, Oid, RelFileLocator};

use crate::backup_label::remove_tablespace_link;
use crate::durable::{create_dirs, fsync_dir, fsync_parent, list_dir, unlink_if_there};
use crate::error::{DataDirError, IoContext, Result};
use crate::relation::{RelationFiles, SegmentFile, database_dir, parse_file_name};
use crate::sync::{copy_side_by_side, unlink_side_by_side};

/// What to do about a tablespace's directory that should be there and is not (`recovery_create_dbdir`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Make a plain one: a later record drops the tablespace, and the directory has only gone ahead of it. Until
    /// the directory is consistent, or where `allow_in_place_tablespaces` is on.
    Create,
    /// That is an error.
    Refuse,
}

/// The directories of one data directory.
#[derive(Clone, Debug)]
pub struct Directories {
    root: PathBuf,
    major: Major,
    version_dir: String,
    /// Where new tablespaces go instead of their locations.
    new_tablespaces: Option<PathBuf>,
}

/// Name of the directory in each tablespace that keeps major versions apart (`TABLESPACE_VERSION_DIRECTORY`).
///
/// ```
/// use walrider_datadir::directories::version_dir;
/// use walrider_layout::Major;
/// assert_eq!(version_dir(Major::V18, Major::V18.catalog_version()), "PG_18_202506291");
/// ```
pub fn version_dir(major: Major, catalog_version: u32) -> String {
    format!("PG_{}_{catalog_version}", major.number())
}

impl Directories {
    /// Those of the data directory `root`, made by this version.
    pub fn new(root: &Path, major: Major, catalog_version: u32) -> Directories {
        let version_dir = version_dir(major, catalog_version);
        Directories { root: root.to_owned(), major, version_dir, new_tablespaces: None }
    }

    /// Puts tablespaces that are made below this directory, by number, and not where they say: [`named_location`] knows that.
    pub fn with_new_tablespaces(self, directory: Option<PathBuf>) -> Directories {
        Directories { new_tablespaces: directory, ..self }
    }

    /// The directory of a database within a tablespace.
    pub fn database(&self, tablespace: Oid, database: Oid) -> PathBuf {
        self.root.join(database_dir(tablespace, database, &self.version_dir))
    }

    fn link(&self, tablespace: Oid) -> PathBuf {
        self.root.join("pg_tblspc").join(tablespace.to_string())
    }

    /// `XLOG_DBASE_CREATE_WAL_LOG`: the directory and its `PG_VERSION` exist (`CreateDirAndVersionFile`). They are durable with
    /// the next [`RelationFiles::take_made`].
    pub fn create_database(
        &self,
        tablespace: Oid,
        database: Oid,
        missing: Missing,
        relations: &RelationFiles,
    ) -> Result<()> {
        let directory = self.database(tablespace, database);
        self.ensure_parent(tablespace, &directory, missing)?;
        make_dir(&directory)?;
        let version = directory.join("PG_VERSION");
        fs::write(&version, format!("{}\n", self.major.number())).context("write file", &version)?;
        relations.mark_made([version.as_path()], directory.ancestors().take(2));
        Ok(())
    }

    /// `XLOG_DBASE_CREATE_FILE_COPY`: the target is the source's files, whatever it was before; directories in the
    /// source are not copied. A source that is not there counts as empty. The copies are durable with the next
    /// [`RelationFiles::take_unsynced`] and [`RelationFiles::take_made`].
    pub fn copy_database(
        &self,
        from: (Oid, Oid),
        to: (Oid, Oid),
        missing: Missing,
        relations: &RelationFiles,
    ) -> Result<()> {
        let (source, target) = (self.database(from.0, from.1), self.database(to.0, to.1));
        if source == target || to.0 == GLOBAL_TABLESPACE_OID {
            return Err(DataDirError::corrupt(&target, "a record copies a database to where it must not be"));
        }
        remove_tree(&target)?;
        self.ensure_parent(to.0, &target, missing)?;
        if !exists(&source)? {
            self.refuse_missing(from.0, &source, missing)?;
            create_dirs(&source, 0o777)?;
        }
        make_dir(&target)?;
        let mut copies = Vec::new();
        for entry in list_dir(&source)? {
            if entry.file_type().context("stat", &entry.path())?.is_file() {
                copies.push((entry.path(), target.join(entry.file_name())));
            }
        }
        copy_side_by_side(&copies)?;
        for (_, copy) in &copies {
            match copy.file_name().and_then(OsStr::to_str).and_then(parse_file_name) {
                Some((relation, fork, segment)) => {
                    let rel = RelFileLocator { tablespace: to.0, database: to.1, relation };
                    relations.mark_unsynced(SegmentFile { rel, fork, segment });
                }
                None => relations.mark_made([copy.as_path()], []),
            }
        }
        relations.mark_made([], target.ancestors().take(2));
        Ok(())
    }

    /// `XLOG_DBASE_DROP`: the database's directories are gone from these tablespaces.
    pub fn drop_database(&self, database: Oid, tablespaces: &[Oid]) -> Result<()> {
        for &tablespace in tablespaces {
            if tablespace == GLOBAL_TABLESPACE_OID {
                return Err(DataDirError::corrupt(&self.root, "a record drops a database from pg_global"));
            }
            let directory = self.database(tablespace, database);
            if exists(&directory)? {
                remove_tree(&directory)?;
                fsync_parent(&directory)?;
            }
        }
        Ok(())
    }

    /// `XLOG_TBLSPC_CREATE`: the version directory at `location`, and the link to that; or with an empty location both
    /// in `pg_tblspc` itself (`create_tablespace_directories`).
    pub fn create_tablespace(&self, tablespace: Oid, location: &[u8]) -> Result<()> {
        let link = self.link(tablespace);
        let location = if location.is_empty() {
            make_dir(&link)?;
            link.clone()
        } else {
            let location = Path::new(OsStr::from_bytes(location));
            if !location.is_absolute() || location.as_os_str().as_bytes().contains(&0) {
                return Err(DataDirError::corrupt(&link, "a record links it to what is not an absolute path"));
            }
            match (fs::read_link(&link), &self.new_tablespaces) {
                // It was made before, or a backup that has it was put elsewhere (--tablespace-mapping): there are its files.
                (Ok(_), _) => {
                    self.adopt_location(&link)?;
                    link.clone()
                }
                (Err(_), Some(directory)) => put_elsewhere(directory, tablespace, location)?,
                (Err(_), None) => {
                    self.refuse_files_of_others(location)?;
                    self.adopt_location(location)?;
                    location.to_owned()
                }
            }
        };
        // First the link: by that we know what is there as ours.
        if location != link {
            remove_tablespace_link(&link)?;
            std::os::unix::fs::symlink(&location, &link).context("create symbolic link", &link)?;
        }
        fsync_parent(&link)?;
        make_dir(&location.join(&self.version_dir))?;
        fsync_dir(&location)
    }

    /// Where a tablespace is made there may be one of another server: of the primary, on its own host. PostgreSQL would go on, and
    /// overwrite it, or remove it with a later record. Ours is a location that we link to: the link is made before the directory.
    fn refuse_files_of_others(&self, location: &Path) -> Result<()> {
        let version_dir = location.join(&self.version_dir);
        if !exists(&version_dir)? {
            return Ok(());
        }
        let links = list_dir(&self.root.join("pg_tblspc"))?;
        if links.iter().any(|link| fs::read_link(link.path()).is_ok_and(|known| known == location)) {
            return Ok(());
        }
        Err(DataDirError::Refused(format!(
            "\"{}\" is there, and the WAL makes a tablespace there: another server, as the primary on this host, may have its files in it, and \
             they would be overwritten; if it is what an earlier run or a server that is gone has left, move it away, and try again",
            version_dir.display()
        )))
    }

    /// Gives the location of a tablespace the mode of the data directory, which fails if it is not ours.
    fn adopt_location(&self, location: &Path) -> Result<()> {
        let mode =
            if self.root.metadata().context("stat", &self.root)?.mode() & 0o050 == 0o050 { 0o750 } else { 0o700 };
        match fs::set_permissions(location, fs::Permissions::from_mode(mode)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(DataDirError::Refused(format!(
                "directory \"{}\" of a tablespace does not exist: create it, owned by this user, and try again",
                location.display()
            ))),
            other => other.context("set permissions of tablespace directory", location),
        }
    }

    /// `XLOG_TBLSPC_DROP`: removes what is empty of the tablespace. Says whether all of it is gone; what is not empty
    /// stays, as with PostgreSQL (`destroy_tablespace_directories`).
    pub fn drop_tablespace(&self, tablespace: Oid) -> Result<bool> {
        let link = self.link(tablespace);
        let version_dir = link.join(&self.version_dir);
        for entry in list_dir(&version_dir)? {
            remove_if_empty(&entry.path())?;
        }
        if !remove_if_empty(&version_dir)? {
            return Ok(false);
        }
        match fs::symlink_metadata(&link) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            found if found.as_ref().is_ok_and(fs::Metadata::is_symlink) => {
                // The version directory is gone from where the link leads to.
                fsync_dir(&link).or_else(|error| if exists(&link)? { Err(error) } else { Ok(()) })?;
                unlink_if_there(&link)?;
            }
            found if found.as_ref().is_ok_and(fs::Metadata::is_dir) => {
                if !remove_if_empty(&link)? {
                    return Ok(false);
                }
            }
            found => return found.map(|_| false).context("stat", &link),
        }
        fsync_parent(&link)?;
        Ok(true)
    }

    /// Tablespaces are links. A directory in the place of one was made for records of a tablespace that a later one drops; what is left when
    /// the directory is consistent has no more than those records say: its link was lost (`CheckTablespaceDirectory`,
    /// `access/transam/xlogrecovery.c`).
    ///
    /// # Errors
    /// There is one.
    pub fn refuse_tablespaces_without_links(&self) -> Result<()> {
        for entry in list_dir(&self.root.join("pg_tblspc"))? {
            if is_number(&entry.file_name()) && !entry.file_type().context("stat", &entry.path())?.is_symlink() {
                return Err(DataDirError::corrupt(
                    entry.path(),
                    "the WAL has changes of a tablespace that has no symbolic link there: the link was lost, or tablespace_map; restore the backup with \
                     all its tablespaces, or set allow_in_place_tablespaces = on if this is what is meant",
                ));
            }
        }
        Ok(())
    }

    /// Removes every `pg_internal.init`: the caches of the catalogs, which replay makes wrong
    /// (`RelationCacheInitFileRemove`, `utils/cache/relcache.c`).
    pub fn remove_relation_caches(&self) -> Result<()> {
        const CACHE: &str = "pg_internal.init";
        unlink_if_there(&self.root.join("global").join(CACHE))?;
        for database in self.databases()? {
            unlink_if_there(&database.join(CACHE))?;
        }
        Ok(())
    }

    /// The directories of all databases, in all tablespaces but `pg_global`.
    pub fn databases(&self) -> Result<Vec<PathBuf>> {
        let mut parents = vec![self.root.join("base")];
        for link in list_dir(&self.root.join("pg_tblspc"))? {
            if is_number(&link.file_name()) {
                parents.push(link.path().join(&self.version_dir));
            }
        }
        let mut databases = Vec::new();
        for parent in parents {
            let numbered = list_dir(&parent)?.into_iter().filter(|database| is_number(&database.file_name()));
            databases.extend(numbered.map(|database| database.path()));
        }
        Ok(databases)
    }

    /// The directory that a database's is made in exists, or is made (`recovery_create_dbdir`).
    fn ensure_parent(&self, tablespace: Oid, directory: &Path, missing: Missing) -> Result<()> {
        let parent = directory.parent().unwrap_or(&self.root);
        if exists(parent)? {
            return Ok(());
        }
        self.refuse_missing(tablespace, parent, missing)?;
        create_dirs(parent, 0o777)
    }

    fn refuse_missing(&self, tablespace: Oid, path: &Path, missing: Missing) -> Result<()> {
        let in_base = matches!(tablespace, DEFAULT_TABLESPACE_OID | GLOBAL_TABLESPACE_OID);
        let top = self.root.join(if in_base { "base" } else { "pg_tblspc" });
        // Without these it is no data directory (any more).
        if !exists(&top)? {
            return Err(DataDirError::corrupt(top, "the directory is missing"));
        }
        match missing {
            Missing::Create => Ok(()),
            Missing::Refuse => Err(DataDirError::corrupt(path, "the directory is missing")),
        }
    }
}

/// Makes a directory for a tablespace that is not to be at its location, and a link beside it that leads there.
fn put_elsewhere(directory: &Path, tablespace: Oid, location: &Path) -> Result<PathBuf> {
    let place = directory.join(tablespace.to_string());
    create_dirs(&place, 0o700)?;
    let link = place.with_extension(LOCATION);
    unlink_if_there(&link)?;
    std::os::unix::fs::symlink(location, &link).context("create symbolic link", &link)?;
    Ok(place)
}

/// What the name of that link ends in.
const LOCATION: &str = "location";

/// Where a tablespace would be that was put at `place` by [`Directories::with_new_tablespaces`]; `None` if it was not.
pub fn named_location(place: &Path) -> Option<PathBuf> {
    fs::read_link(place.with_extension(LOCATION)).ok()
}

fn is_number(name: &OsStr) -> bool {
    !name.is_empty() && name.as_bytes().iter().all(u8::is_ascii_digit)
}

fn exists(path: &Path) -> Result<bool> {
    path.try_exists().context("stat", path)
}

/// Makes a directory, unless it is there.
fn make_dir(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other.context("create directory", path),
    }
}

/// Removes a directory with all that is in it, if it is there; links are removed, not followed.
fn remove_tree(path: &Path) -> Result<()> {
    let mut files = Vec::new();
    for entry in list_dir(path)? {
        if entry.file_type().context("stat", &entry.path())?.is_file() {
            files.push(entry.path());
        }
    }
    unlink_side_by_side(&files)?;
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.context("remove directory", path),
    }
}

/// Removes an empty directory, if it is there; says whether it is gone.
fn remove_if_empty(path: &Path) -> Result<bool> {
    match fs::remove_dir(path) {
        Ok(()) => Ok(true),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound => Ok(true),
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory => Ok(false),
            _ => Err(error).context("remove directory", path),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relation::Made;

    const SPACE: Oid = 20_000;

    fn data_dir() -> (tempfile::TempDir, Directories) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["base/5/pgsql_tmp", "global", "pg_tblspc"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let directories = Directories::new(dir.path(), Major::V18, Major::V18.catalog_version());
        (dir, directories)
    }

    fn relations(dir: &tempfile::TempDir) -> RelationFiles {
        RelationFiles::new(dir.path(), "PG_18_202506291", false)
    }

    fn copy(dir: &tempfile::TempDir, from: (Oid, Oid), to: (Oid, Oid), missing: Missing) -> Result<RelationFiles> {
        let files = relations(dir);
        Directories::new(dir.path(), Major::V18, Major::V18.catalog_version())
            .copy_database(from, to, missing, &files)?;
        Ok(files)
    }

    /// What a restartpoint must make durable besides relations, below the directory.
    fn made(dir: &tempfile::TempDir, files: &RelationFiles) -> [Vec<String>; 2] {
        let made = files.take_made();
        let below = |path: PathBuf| path.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned();
        [made.files, made.directories].map(|paths| paths.into_iter().map(below).collect())
    }

    #[test]
    fn a_database_is_created_copied_and_dropped() {
        let (dir, directories) = data_dir();
        let files = relations(&dir);
        for _ in 0..2 {
            directories.create_database(DEFAULT_TABLESPACE_OID, 16384, Missing::Refuse, &files).unwrap();
        }
        assert_eq!(fs::read_to_string(dir.path().join("base/16384/PG_VERSION")).unwrap(), "18\n");
        let database = ["base", "base/16384"].map(str::to_owned).to_vec();
        assert_eq!(made(&dir, &files), [vec!["base/16384/PG_VERSION".to_owned()], database.clone()]);
        assert_eq!(files.take_made(), Made::default(), "once");
        fs::write(dir.path().join("base/5/2600_vm.1"), b"page").unwrap();
        fs::write(dir.path().join("base/5/pg_filenode.map"), b"map").unwrap();
        fs::write(dir.path().join("base/16384/old"), b"").unwrap();
        let pair = |database| (DEFAULT_TABLESPACE_OID, database);
        let files = copy(&dir, pair(5), pair(16384), Missing::Refuse).unwrap();
        let rel = RelFileLocator { tablespace: DEFAULT_TABLESPACE_OID, database: 16384, relation: 2600 };
        let fork = walrider_layout::ForkNumber::VisibilityMap;
        assert_eq!(files.take_unsynced(), [SegmentFile { rel, fork, segment: 1 }]);
        assert_eq!(made(&dir, &files), [vec!["base/16384/pg_filenode.map".to_owned()], database]);
        let names: Vec<_> = list_dir(&dir.path().join("base/16384")).unwrap().iter().map(|e| e.file_name()).collect();
        assert_eq!(names, ["2600_vm.1", "pg_filenode.map"]);
        copy(&dir, pair(404), pair(16385), Missing::Create).unwrap();
        assert!(dir.path().join("base/404").is_dir() && dir.path().join("base/16385").is_dir());
        assert!(copy(&dir, pair(405), pair(16386), Missing::Refuse).is_err());
        assert!(copy(&dir, pair(5), pair(5), Missing::Create).is_err());
        assert!(dir.path().join("base/5/2600_vm.1").exists());
        directories.drop_database(16384, &[DEFAULT_TABLESPACE_OID, SPACE]).unwrap();
        assert!(!dir.path().join("base/16384").exists());
        assert!(directories.drop_database(0, &[GLOBAL_TABLESPACE_OID]).is_err());
    }

    #[test]
    fn a_tablespace_is_created_and_dropped() {
        let (dir, directories) = data_dir();
        let (elsewhere, files) = (tempfile::tempdir().unwrap(), relations(&dir));
        let location = elsewhere.path().as_os_str().as_bytes();
        let link = dir.path().join("pg_tblspc/20000");
        fs::create_dir(&link).unwrap();
        for _ in 0..2 {
            directories.create_tablespace(SPACE, location).unwrap();
        }
        assert_eq!(fs::read_link(&link).unwrap(), elsewhere.path());
        directories.create_database(SPACE, 5, Missing::Refuse, &files).unwrap();
        let database = elsewhere.path().join("PG_18_202506291/5");
        assert!(database.join("PG_VERSION").exists());
        fs::write(database.join("pg_internal.init"), b"").unwrap();
        fs::write(dir.path().join("base/5/pg_internal.init"), b"").unwrap();
        directories.remove_relation_caches().unwrap();
        assert!(!database.join("pg_internal.init").exists() && !dir.path().join("base/5/pg_internal.init").exists());
        assert!(!directories.drop_tablespace(SPACE).unwrap(), "a database is still in it");
        directories.drop_database(5, &[SPACE]).unwrap();
        assert!(directories.drop_tablespace(SPACE).unwrap());
        assert!(fs::symlink_metadata(&link).is_err() && list_dir(elsewhere.path()).unwrap().is_empty());
        assert!(directories.drop_tablespace(SPACE).unwrap());
    }

    #[test]
    fn nothing_is_made_above_base_and_pg_tblspc() {
        let (dir, directories) = data_dir();
        let files = relations(&dir);
        fs::rename(dir.path().join("base"), dir.path().join("away")).unwrap();
        fs::remove_dir(dir.path().join("pg_tblspc")).unwrap();
        for tablespace in [DEFAULT_TABLESPACE_OID, SPACE] {
            assert!(directories.create_database(tablespace, 7, Missing::Create, &files).unwrap_err().is_corruption());
            assert!(copy(&dir, (tablespace, 5), (tablespace, 7), Missing::Create).is_err());
        }
        assert!(!dir.path().join("base").exists() && !dir.path().join("pg_tblspc").exists());
    }

    #[test]
    fn in_place_and_dangling_tablespaces() {
        let (dir, directories) = data_dir();
        let files = relations(&dir);
        directories.create_tablespace(SPACE, b"").unwrap();
        assert!(dir.path().join("pg_tblspc/20000/PG_18_202506291").is_dir());
        assert!(directories.drop_tablespace(SPACE).unwrap());
        assert!(!dir.path().join("pg_tblspc/20000").exists());
        std::os::unix::fs::symlink("/nonexistent/place", dir.path().join("pg_tblspc/20001")).unwrap();
        assert!(directories.drop_tablespace(20_001).unwrap());
        assert!(directories.create_database(SPACE, 7, Missing::Refuse, &files).unwrap_err().is_corruption());
        directories.create_database(SPACE, 7, Missing::Create, &files).unwrap();
        assert!(directories.create_tablespace(SPACE, b"relative").is_err());
        let missing = directories.create_tablespace(SPACE, b"/nonexistent/place").unwrap_err();
        assert!(missing.to_string().contains("create it"), "{missing}");
    }
}
