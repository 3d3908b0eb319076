//! What of a data directory belongs into a backup (`sendDir`, `sendTablespace`, `do_pg_backup_start`; `backup/basebackup.c`,
//! `access/transam/xlog.c`, PostgreSQL 18), and what of ours does not.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use walrider_datadir::DataDirError;
use walrider_datadir::held::shown;
use walrider_datadir::relation::parse_file_name;
use walrider_layout::control::CONTROL_FILE;
use walrider_layout::{ForkNumber, Oid};

/// Directories that a server empties when it starts (`excludeDirContents`).
const EMPTY: [&str; 7] =
    ["pg_stat_tmp", "pg_replslot", "pg_dynshmem", "pg_notify", "pg_serial", "pg_snapshots", "pg_subtrans"];
/// Files of a running server, or of another backup (`excludeFiles`).
const LEFT_OUT: [&str; 7] = [
    "postgresql.auto.conf.tmp",
    "current_logfiles.tmp",
    "backup_label",
    "tablespace_map",
    "backup_manifest",
    "postmaster.pid",
    "postmaster.opts",
];
/// What begins so: temporary files, and the caches of the catalogs with theirs.
const LEFT_OUT_PREFIXES: [&str; 2] = ["pgsql_tmp", "pg_internal.init"];
/// Files that tell this standby something, at the top of its directory; and what Walrider is about to rename.
const OURS: [&str; 3] = ["promote", "pg_control.tmp", "pg_filenode.map.tmp"];
/// What Walrider's own files at the top of the directory begin with. `postmaster.pid` is made under such a name.
const OUR_PREFIXES: [&str; 2] = ["walrider.", "postmaster.pid."];

/// A tablespace beside the data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tablespace {
    /// Its number.
    pub oid: Oid,
    /// Where it is, as the link says; of one in `pg_tblspc` itself that directory, below the data directory.
    pub location: Vec<u8>,
    /// Where it is, for us.
    path: PathBuf,
    /// Its place below the data directory, if it has one there.
    below: Option<Vec<u8>>,
    /// It is a link.
    pub is_link: bool,
}

/// All tablespaces, by number.
///
/// # Errors
/// `pg_tblspc` cannot be read.
pub fn tablespaces(root: &Path) -> Result<Vec<Tablespace>, DataDirError> {
    let links = root.join("pg_tblspc");
    let name_of_root = shown(root);
    let mut tablespaces = Vec::new();
    for name in names(&links)? {
        let number = name.to_str().and_then(|text| text.parse::<Oid>().ok().filter(|oid| oid.to_string() == text));
        let Some(oid) = number.filter(|&oid| oid > 0) else { continue };
        let path = links.join(&name);
        let Some(found) = stat(&path)? else { continue };
        if found.is_symlink() {
            let target = fs::read_link(&path).map_err(|error| failed("read symbolic link", &path, error))?;
            let below = target.strip_prefix(&name_of_root).ok().map(|below| below.as_os_str().as_bytes().to_vec());
            let location = target.into_os_string().into_vec();
            tablespaces.push(Tablespace { oid, location, path, below, is_link: true });
        } else if found.is_dir() {
            let location = format!("pg_tblspc/{oid}").into_bytes();
            tablespaces.push(Tablespace { oid, below: Some(location.clone()), location, path, is_link: false });
        }
    }
    tablespaces.sort_by_key(|tablespace| tablespace.oid);
    Ok(tablespaces)
}

/// The names in a directory, sorted; none if it is gone.
fn names(directory: &Path) -> Result<Vec<OsString>, DataDirError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|error| failed("open directory", directory, error))?,
    };
    let mut names: Vec<OsString> = entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<io::Result<_>>()
        .map_err(|error| failed("read directory", directory, error))?;
    names.sort();
    Ok(names)
}

/// What is there, without following a link; `None` if it is gone.
fn stat(path: &Path) -> Result<Option<Metadata>, DataDirError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some).map_err(|error| failed("stat file or directory", path, error)),
    }
}

fn failed(operation: &'static str, path: &Path, error: io::Error) -> DataDirError {
    DataDirError::io(operation, path, error)
}

/// Something that belongs into an archive.
pub struct Found<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// Its name in the archive.
    pub name: &'a [u8],
    /// What it looked like.
    pub metadata: &'a Metadata,
    /// What it is.
    pub kind: Kind,
}

/// Kinds of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory, or what stands for one.
    Directory,
    /// A link to there.
    Link(Vec<u8>),
    /// A file.
    File,
    /// Of a relation, the segment of this number.
    Relation(u32),
    /// A socket or the like, which belongs into none.
    Special,
}

/// A data directory.
pub struct Tree<'a> {
    /// Where it is.
    pub root: &'a Path,
    /// The directory in each tablespace, as in `PG_18_202506291`.
    pub version_dir: &'a str,
    /// Of which there are archives.
    pub tablespaces: &'a [Tablespace],
    /// Links to tablespaces belong into the archive.
    pub links: bool,
    /// Transactions from here on, by their 64-bit ids, began after the WAL that recovery begins with. The files of those that
    /// are prepared stay out: the WAL makes them, and PostgreSQL would take such a file for the better one, but forget the
    /// transaction (docs/crash-safety.md, step 21).
    pub next_xid: u64,
}

/// Is told what there is.
type Visit<'v, E> = dyn FnMut(Found<'_>) -> Result<(), E> + 'v;

impl Tree<'_> {
    /// Goes through what belongs into the data directory's archive, but for `global/pg_control`, which comes last.
    ///
    /// # Errors
    /// What cannot be read; those of `visit`.
    pub fn visit<E: From<DataDirError>>(&self, visit: &mut Visit<'_, E>) -> Result<(), E> {
        self.visit_directory(self.root, b"", visit)
    }

    /// Goes through what belongs into a tablespace's archive.
    ///
    /// # Errors
    /// What cannot be read; those of `visit`.
    pub fn visit_tablespace<E: From<DataDirError>>(
        &self,
        tablespace: &Tablespace,
        visit: &mut Visit<'_, E>,
    ) -> Result<(), E> {
        let path = tablespace.path.join(self.version_dir);
        let name = self.version_dir.as_bytes();
        // It may be dropped by now.
        let Some(metadata) = stat(&path)? else { return Ok(()) };
        visit(Found { path: &path, name, metadata: &metadata, kind: Kind::Directory })?;
        self.visit_directory(&path, name, visit)
    }

    fn visit_directory<E: From<DataDirError>>(
        &self,
        directory: &Path,
        below: &[u8],
        visit: &mut Visit<'_, E>,
    ) -> Result<(), E> {
        let names = names(directory)?;
        let place = Place::of(below, self.version_dir);
        let relation = |name: &OsString| name.to_str().and_then(parse_file_name).filter(|_| place.has_relations());
        let is_init = |name: &OsString| relation(name).filter(|&(_, fork, _)| fork == ForkNumber::Init);
        let unlogged: HashSet<Oid> = names.iter().filter_map(is_init).map(|(oid, ..)| oid).collect();
        for file_name in &names {
            let relation = relation(file_name);
            let is_unlogged =
                relation.is_some_and(|(oid, fork, _)| fork != ForkNumber::Init && unlogged.contains(&oid));
            if is_unlogged || self.is_left_out(place, &file_name.to_string_lossy()) {
                continue;
            }
            let path = directory.join(file_name);
            let name = match below {
                b"" => file_name.as_bytes().to_vec(),
                below => [below, b"/", file_name.as_bytes()].concat(),
            };
            if name == CONTROL_FILE.as_bytes() {
                continue;
            }
            let Some(metadata) = stat(&path)? else { continue };
            let found = |metadata, kind| Found { path: &path, name: &name, metadata, kind };
            if EMPTY.iter().any(|known| *file_name == **known) {
                visit(found(&followed(&path, metadata), Kind::Directory))?;
            } else if name == b"pg_wal" {
                let metadata = followed(&path, metadata);
                visit(found(&metadata, Kind::Directory))?;
                for name in [b"pg_wal/archive_status".as_slice(), b"pg_wal/summaries"] {
                    visit(Found { name, ..found(&metadata, Kind::Directory) })?;
                }
            } else if metadata.is_symlink() && place == Place::Tablespaces {
                let target = fs::read_link(&path).map_err(|error| failed("read symbolic link", &path, error))?;
                visit(found(&metadata, Kind::Link(target.into_os_string().into_vec())))?;
            } else if metadata.is_dir() {
                visit(found(&metadata, Kind::Directory))?;
                let has_archive = self.tablespaces.iter().any(|one| one.below.as_deref() == Some(&name));
                if !has_archive && (self.links || name != b"pg_tblspc") {
                    self.visit_directory(&path, &name, visit)?;
                }
            } else if metadata.is_file() {
                let kind = relation.map_or(Kind::File, |(_, _, segment)| Kind::Relation(segment));
                visit(found(&metadata, kind))?;
            } else {
                visit(found(&metadata, Kind::Special))?;
            }
        }
        Ok(())
    }

    fn is_left_out(&self, place: Place, name: &str) -> bool {
        if LEFT_OUT.contains(&name) || LEFT_OUT_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            return true;
        }
        match place {
            Place::Top => OURS.contains(&name) || OUR_PREFIXES.iter().any(|prefix| name.starts_with(prefix)),
            Place::Global => OURS.contains(&name),
            Place::Database => OURS.contains(&name) || is_temporary(name),
            Place::TwoPhase => match u64::from_str_radix(name, 16) {
                Ok(xid) => xid >= self.next_xid,
                // About to be renamed.
                Err(_) => name.ends_with(".tmp"),
            },
            Place::Tablespaces | Place::Other => false,
        }
    }
}

/// Directories that are treated apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Top,
    Global,
    Database,
    Tablespaces,
    TwoPhase,
    Other,
}

impl Place {
    fn of(name: &[u8], version_dir: &str) -> Place {
        let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        match name {
            b"" => Place::Top,
            b"global" => Place::Global,
            b"pg_tblspc" => Place::Tablespaces,
            b"pg_twophase" => Place::TwoPhase,
            name => {
                let parents = [b"base".as_slice(), version_dir.as_bytes()];
                let number = parents.iter().find_map(|parent| name.strip_prefix(*parent)?.strip_prefix(b"/"));
                if number.is_some_and(is_number) { Place::Database } else { Place::Other }
            }
        }
    }

    fn has_relations(self) -> bool {
        matches!(self, Place::Global | Place::Database)
    }
}

/// Whether a file's name is that of a temporary relation (`looks_like_temp_rel_name`, `storage/file/fd.c`).
fn is_temporary(name: &str) -> bool {
    let rest = name.strip_prefix('t').and_then(|rest| rest.split_once('_'));
    rest.is_some_and(|(backend, file)| {
        !backend.is_empty() && backend.bytes().all(|byte| byte.is_ascii_digit()) && parse_file_name(file).is_some()
    })
}

/// Of a link, what it leads to: it is sent as a directory.
fn followed(path: &Path, metadata: Metadata) -> Metadata {
    if metadata.is_symlink() { fs::metadata(path).unwrap_or(metadata) } else { metadata }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "PG_18_202506291";

    fn put(root: &Path, files: &[&str]) {
        for file in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match file.ends_with('/') {
                true => fs::create_dir_all(&path).unwrap(),
                false => fs::write(&path, "x").unwrap(),
            }
        }
    }

    fn visited(tree: &Tree<'_>, tablespace: Option<&Tablespace>) -> Vec<String> {
        let mut seen = Vec::new();
        let mut visit = |found: Found<'_>| {
            let name = String::from_utf8_lossy(found.name).into_owned();
            seen.push(match found.kind {
                Kind::Directory => format!("{name}/"),
                Kind::Link(_) => format!("{name}@"),
                Kind::Relation(segment) => format!("{name}#{segment}"),
                Kind::File => name,
                Kind::Special => format!("{name}?"),
            });
            Ok::<(), DataDirError>(())
        };
        match tablespace {
            None => tree.visit(&mut visit),
            Some(tablespace) => tree.visit_tablespace(tablespace, &mut visit),
        }
        .unwrap();
        seen
    }

    #[test]
    fn what_belongs_into_it() {
        let (dir, space) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = dir.path();
        put(
            root,
            &[
                "PG_VERSION",
                "backup_label.old",
                "backup_manifest",
                "postmaster.opts",
                "postmaster.pid",
                "postmaster.pid.walrider.7",
                "postgresql.auto.conf",
                "postgresql.auto.conf.tmp",
                "promote",
                "standby.signal",
                "walrider.pause",
                "walrider.slots.json",
                "base/5/1259",
                "base/5/1259.1",
                "base/5/1259_fsm",
                "base/5/16384",
                "base/5/16384_init",
                "base/5/16384_vm.1",
                "base/5/pg_filenode.map",
                "base/5/pg_filenode.map.tmp",
                "base/5/pg_internal.init.7",
                "base/5/t3_16390",
                "base/5/t3_16390_fsm.1",
                "base/pgsql_tmp/x",
                "global/1262",
                "global/pg_control",
                "global/pg_control.tmp",
                "pg_replslot/s/state",
                "pg_stat/pgstat.stat",
                "pg_subtrans/0000",
                "pg_twophase/00000001000002BC",
                "pg_twophase/00000001000002BD",
                "pg_twophase/00000001000002BC.tmp",
                "pg_wal/000000010000000000000001",
                "pg_wal/walrider.early.1",
                "pg_tblspc/",
            ],
        );
        put(space.path(), &[&format!("{VERSION}/5/2600"), &format!("{VERSION}/pgsql_tmp/x"), "PG_17_202406281/5/1"]);
        std::os::unix::fs::symlink(space.path(), root.join("pg_tblspc/20000")).unwrap();
        put(root, &[&format!("pg_tblspc/20001/{VERSION}/5/7"), "pg_tblspc/notes"]);
        let tablespaces = tablespaces(root).unwrap();
        assert_eq!(
            tablespaces.iter().map(|one| (one.oid, one.is_link)).collect::<Vec<_>>(),
            [(20000, true), (20001, false)]
        );
        assert_eq!(tablespaces[1].location, b"pg_tblspc/20001");
        let tree =
            |links| Tree { root, version_dir: VERSION, tablespaces: &tablespaces, links, next_xid: 1 << 32 | 0x2BD };
        assert_eq!(
            visited(&tree(true), None),
            [
                "PG_VERSION",
                "backup_label.old",
                "base/",
                "base/5/",
                "base/5/1259#0",
                "base/5/1259.1#1",
                "base/5/1259_fsm#0",
                "base/5/16384_init#0",
                "base/5/pg_filenode.map",
                "global/",
                "global/1262#0",
                "pg_replslot/",
                "pg_stat/",
                "pg_stat/pgstat.stat",
                "pg_subtrans/",
                "pg_tblspc/",
                "pg_tblspc/20000@",
                "pg_tblspc/20001/",
                "pg_tblspc/notes",
                "pg_twophase/",
                "pg_twophase/00000001000002BC",
                "pg_wal/",
                "pg_wal/archive_status/",
                "pg_wal/summaries/",
                "postgresql.auto.conf",
                "standby.signal",
            ]
        );
        let without = visited(&tree(false), None);
        assert!(without.contains(&"pg_tblspc/".to_owned()) && !without.contains(&"pg_tblspc/20000@".to_owned()));
        let files = [format!("{VERSION}/"), format!("{VERSION}/5/"), format!("{VERSION}/5/2600#0")];
        assert_eq!(visited(&tree(true), Some(&tablespaces[0])), files);
        assert_eq!(visited(&tree(true), Some(&tablespaces[1])).last().unwrap(), &format!("{VERSION}/5/7#0"));
    }

    #[test]
    fn names_of_temporary_relations() {
        for name in ["t3_16390", "t12_1_fsm", "t0_9.1"] {
            assert!(is_temporary(name), "{name}");
        }
        for name in ["t_1", "t3_", "t3_x", "3_1", "t3", "tx_1", "16390"] {
            assert!(!is_temporary(name), "{name}");
        }
    }
}
