//! What is in a data directory, and what each file of it is (`storage/fd/reinit.c`, `common/relpath.c`,
//! `backup/basebackup.c`, PostgreSQL 17 and 18).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use walrider_datadir::relation::parse_file_name;
use walrider_layout::ForkNumber;

use super::classes::Class;

/// Deepest path of PostgreSQL is `pg_tblspc/OID/PG_x_y/OID/file`; deeper than this is not PostgreSQL's. Bounds the
/// walk where a link leads back up.
const MAX_DEPTH: usize = 8;

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A file of so many bytes, also behind a link.
    File(u64),
    /// A directory.
    Directory,
    /// A link to a directory, and where it leads.
    Link(PathBuf),
    /// Neither: a socket, a dangling link.
    Special,
}

/// Entries by path below the data directory, with `/` between names.
pub type Inventory = BTreeMap<String, Entry>;

/// Lists a data directory, through its links. `version_dir` is the name of its directory in each tablespace.
pub fn inventory(root: &Path, version_dir: &str) -> Result<Inventory, (PathBuf, io::Error)> {
    let mut found = Inventory::new();
    let mut pending = vec![(String::new(), 0)];
    while let Some((directory, depth)) = pending.pop() {
        let path = root.join(&directory);
        let failed = |error| (path.clone(), error);
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // PostgreSQL's names are ASCII; anything else ends in the class of foreign files under a readable name.
            let name = entry.file_name().to_string_lossy().into_owned();
            let relative = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            let is_link = entry.file_type().map_err(failed)?.is_symlink();
            let kind = match fs::metadata(entry.path()) {
                Ok(meta) if meta.is_dir() && is_link => Entry::Link(fs::read_link(entry.path()).map_err(failed)?),
                Ok(meta) if meta.is_dir() => Entry::Directory,
                Ok(meta) if meta.is_file() => Entry::File(meta.len()),
                Ok(_) => Entry::Special,
                Err(error) if error.kind() == io::ErrorKind::NotFound => Entry::Special,
                Err(error) => return Err((entry.path(), error)),
            };
            if matches!(kind, Entry::Directory | Entry::Link(_)) && depth < MAX_DEPTH && is_ours(&relative, version_dir)
            {
                pending.push((relative.clone(), depth + 1));
            }
            found.insert(relative, kind);
        }
    }
    Ok(found)
}

/// Whether a directory is looked into: a tablespace may hold directories of other majors.
fn is_ours(relative: &str, version_dir: &str) -> bool {
    match relative.split('/').collect::<Vec<_>>()[..] {
        ["pg_tblspc", _, name] => name == version_dir,
        _ => !relative.ends_with("lost+found"),
    }
}

/// A segment file of a relation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RelationFile {
    /// The directory of its database.
    pub directory: String,
    /// Number of the relation file.
    pub relation: u32,
    /// The fork.
    pub fork: ForkNumber,
    /// Number of the segment, from 0.
    pub segment: u32,
}

/// An SLRU, by what its pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slru {
    /// `pg_xact`: two bits a transaction.
    Xact,
    /// `pg_commit_ts`: a timestamp and an origin a transaction.
    CommitTs,
    /// `pg_multixact/offsets`: where a multixact's members begin.
    MultiXactOffsets,
    /// `pg_multixact/members`.
    MultiXactMembers,
}

/// What a path of a data directory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// A segment file of a relation.
    Relation(RelationFile),
    /// A segment of an SLRU, and its number.
    Slru(Slru, u64),
    /// `global/pg_control`.
    Control,
    /// `pg_logical/replorigin_checkpoint`.
    Origins,
    /// A file that must be the same, byte by byte.
    Bytes,
    /// A directory that must be there.
    Directory,
    /// The link of a tablespace, or its directory if it is in place.
    Tablespace,
    /// Not compared, only counted.
    Counted(Class),
    /// A directory that need not be there.
    Plain,
}

/// Tells what a path is; `version_dir` as in [`inventory`].
pub fn role(path: &str, entry: &Entry, version_dir: &str) -> Role {
    let names: Vec<&str> = path.split('/').collect();
    let is_directory = matches!(entry, Entry::Directory | Entry::Link(_));
    let numeric = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
    let tablespace_version = |name: &str| name == version_dir;
    let temporary = |name: &str| name.starts_with("pgsql_tmp");

    let by_content = match names[..] {
        ["base", name, ..] if temporary(name) => Role::Counted(Class::Temporary),
        ["pg_tblspc", _, version, name, ..] if tablespace_version(version) && temporary(name) => {
            Role::Counted(Class::Temporary)
        }
        ["global", "pg_control"] => Role::Control,
        ["base", database] if numeric(database) && is_directory => Role::Directory,
        // Also a link that leads nowhere.
        ["pg_tblspc", oid] if numeric(oid) && !matches!(entry, Entry::File(_)) => Role::Tablespace,
        ["pg_tblspc", _, version] if tablespace_version(version) && is_directory => Role::Directory,
        ["pg_tblspc", _, version, database] if tablespace_version(version) && numeric(database) && is_directory => {
            Role::Directory
        }
        ["global", name] => in_database(&names[..1], name),
        ["base", database, name] if numeric(database) => in_database(&names[..2], name),
        ["pg_tblspc", _, version, database, name] if tablespace_version(version) && numeric(database) => {
            in_database(&names[..4], name)
        }
        ["pg_xact", name] => slru(Slru::Xact, name),
        ["pg_commit_ts", name] => slru(Slru::CommitTs, name),
        ["pg_multixact", "offsets", name] => slru(Slru::MultiXactOffsets, name),
        ["pg_multixact", "members", name] => slru(Slru::MultiXactMembers, name),
        ["pg_twophase" | "PG_VERSION" | "backup_label" | "tablespace_map", ..] if !is_directory => Role::Bytes,
        ["pg_logical", "mappings", _] => Role::Bytes,
        ["pg_logical", "replorigin_checkpoint"] => Role::Origins,
        ["pg_logical", "snapshots", _, ..] => Role::Counted(Class::LogicalSnapshots),
        [
            "base" | "global" | "pg_commit_ts" | "pg_dynshmem" | "pg_logical" | "pg_multixact" | "pg_notify"
            | "pg_replslot" | "pg_serial" | "pg_snapshots" | "pg_stat" | "pg_stat_tmp" | "pg_subtrans" | "pg_tblspc"
            | "pg_twophase" | "pg_wal" | "pg_xact",
        ]
        | ["pg_multixact", "members" | "offsets"]
        | ["pg_logical", "mappings" | "snapshots"]
            if is_directory =>
        {
            Role::Directory
        }
        ["pg_wal", ..] => Role::Counted(Class::Wal),
        ["pg_subtrans", ..] => Role::Counted(Class::Subtrans),
        ["pg_notify", ..] => Role::Counted(Class::Notify),
        ["pg_serial", ..] => Role::Counted(Class::Serial),
        ["pg_snapshots", ..] => Role::Counted(Class::Snapshots),
        ["pg_dynshmem", ..] => Role::Counted(Class::Dynshmem),
        ["pg_stat" | "pg_stat_tmp", ..] => Role::Counted(Class::Stats),
        ["pg_replslot", ..] => Role::Counted(Class::ReplicationSlots),
        [name] if name.starts_with("postmaster.") => Role::Counted(Class::Postmaster),
        ["log" | "pg_log", ..] | ["current_logfiles"] => Role::Counted(Class::Log),
        ["backup_manifest" | "backup_label.old" | "tablespace_map.old"] => Role::Counted(Class::BackupRemains),
        ["recovery.signal" | "standby.signal"] => Role::Counted(Class::Signal),
        [.., name] if name.ends_with(".conf") => Role::Counted(Class::Config),
        [.., name] if name.ends_with(".log") => Role::Counted(Class::Log),
        _ => Role::Counted(Class::Other),
    };
    match by_content {
        Role::Directory | Role::Tablespace => by_content,
        // What is counted are files; a directory of a class has no content of its own.
        _ if is_directory => Role::Plain,
        _ => by_content,
    }
}

/// A name in the directory of a database.
fn in_database(directory: &[&str], name: &str) -> Role {
    if let Some((relation, fork, segment)) = parse_file_name(name) {
        return Role::Relation(RelationFile { directory: directory.join("/"), relation, fork, segment });
    }
    match name {
        "pg_filenode.map" | "PG_VERSION" => Role::Bytes,
        _ if name.starts_with("pg_internal.init") => Role::Counted(Class::RelcacheInit),
        _ if is_temporary_relation(name) => Role::Counted(Class::Temporary),
        _ => Role::Counted(Class::Other),
    }
}

/// `looks_like_temp_rel_name`: `t`, process, `_`, relation, then fork and segment.
fn is_temporary_relation(name: &str) -> bool {
    let Some((backend, relation)) = name.strip_prefix('t').and_then(|rest| rest.split_once('_')) else {
        return false;
    };
    !backend.is_empty() && backend.bytes().all(|b| b.is_ascii_digit()) && parse_file_name(relation).is_some()
}

/// A segment of an SLRU: 4 to 15 hexadecimal digits (`SlruCorrectSegmentFilenameLength`).
fn slru(which: Slru, name: &str) -> Role {
    let hex = (4..=15).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_digit() || (b'A'..=b'F').contains(&b));
    match u64::from_str_radix(name, 16) {
        Ok(number) if hex => Role::Slru(which, number),
        _ => Role::Counted(Class::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION_DIR: &str = "PG_17_202406281";

    fn file(path: &str) -> Role {
        role(path, &Entry::File(0), VERSION_DIR)
    }

    fn relation(directory: &str, relation: u32, fork: ForkNumber, segment: u32) -> Role {
        Role::Relation(RelationFile { directory: directory.into(), relation, fork, segment })
    }

    #[test]
    fn relation_files_are_told_by_name() {
        assert_eq!(file("base/5/16384"), relation("base/5", 16384, ForkNumber::Main, 0));
        assert_eq!(file("base/5/16384.12"), relation("base/5", 16384, ForkNumber::Main, 12));
        assert_eq!(file("global/1262_vm"), relation("global", 1262, ForkNumber::VisibilityMap, 0));
        let tablespace = format!("pg_tblspc/16400/{VERSION_DIR}/5");
        let map = relation(&tablespace, 17, ForkNumber::FreeSpaceMap, 1);
        assert_eq!(file(&format!("{tablespace}/17_fsm.1")), map);
        assert_eq!(file("pg_tblspc/16400/PG_18_202506291/5/17"), Role::Counted(Class::Other), "another version's");
        for path in ["base/5/0017", "base/5/17_x", "base/5/17.", "base/5/17.0", "base/5/99999999999", "base/5/17x"] {
            assert_eq!(file(path), Role::Counted(Class::Other), "{path}");
        }
        assert_eq!(file("base/5/t3_16384_fsm.1"), Role::Counted(Class::Temporary));
        assert_eq!(file("base/5/pg_internal.init.77"), Role::Counted(Class::RelcacheInit));
        assert_eq!(file("base/pgsql_tmp/pgsql_tmp1.0"), Role::Counted(Class::Temporary));
    }

    #[test]
    fn the_rest_of_a_data_directory_has_its_place() {
        assert_eq!(file("global/pg_control"), Role::Control);
        assert_eq!(file("pg_xact/00A1"), Role::Slru(Slru::Xact, 0xA1));
        assert_eq!(file("pg_multixact/members/14078"), Role::Slru(Slru::MultiXactMembers, 0x14078));
        assert_eq!(file("pg_xact/junk"), Role::Counted(Class::Other));
        assert_eq!(file("pg_twophase/0000000000000312"), Role::Bytes);
        assert_eq!(file("base/5/pg_filenode.map"), Role::Bytes);
        assert_eq!(file("backup_label"), Role::Bytes);
        assert_eq!(file("backup_label.old"), Role::Counted(Class::BackupRemains));
        assert_eq!(file("pg_wal/archive_status/x.done"), Role::Counted(Class::Wal));
        assert_eq!(file("conf.d/memory.conf"), Role::Counted(Class::Config));
        assert_eq!(role("base/5", &Entry::Directory, VERSION_DIR), Role::Directory);
        assert_eq!(role("pg_tblspc/16400", &Entry::Link("/x".into()), VERSION_DIR), Role::Tablespace);
        assert_eq!(role("pg_wal/archive_status", &Entry::Directory, VERSION_DIR), Role::Plain);
        assert_eq!(role("pg_replslot/one", &Entry::Directory, VERSION_DIR), Role::Plain);
    }
}
