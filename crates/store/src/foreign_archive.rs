//! A directory named as WAL that is the repository of a backup tool: its segments lie deeper, and most are packed, so that all one
//! would hear is that the first is missing.

use std::fs;
use std::path::Path;

use walrider_datadir::DataDirError;

use crate::error::StoreError;

/// Most entries that are looked at of one directory.
const MAX_ENTRIES: usize = 10_000;

/// A tool, and the `restore_command` that reads its repository.
struct Tool {
    name: &'static str,
    command: &'static str,
}

const PGBACKREST: Tool = Tool { name: "pgBackRest", command: "pgbackrest --stanza=STANZA archive-get %f \"%p\"" };
const BARMAN: Tool = Tool { name: "Barman", command: "barman-wal-restore BARMAN_HOST SERVER %f %p" };
const WAL_G: Tool = Tool { name: "WAL-G", command: "wal-g wal-fetch %f %p" };

/// Refuses a tool's repository, and says with which command its WAL is had.
///
/// # Errors
/// [`StoreError::Refused`] if it is one, or if there is no such directory.
pub fn refuse(wal: &Path) -> Result<(), StoreError> {
    let Some(tool) = recognise(wal).map_err(|error| DataDirError::io("read directory", wal, error))? else {
        return Ok(());
    };
    Err(StoreError::Refused(format!(
        "\"{}\" is a repository of {}, not a directory of WAL segments: leave --wal out, and set restore_command = '{}'",
        wal.display(),
        tool.name,
        tool.command
    )))
}

/// Whether a directory has segments, also partial or packed ones, or histories, by their names.
///
/// # Errors
/// When it cannot be read.
pub fn has_wal(directory: &Path) -> Result<bool, DataDirError> {
    let failed = |error| DataDirError::io("read directory", directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if name.get(..24).is_some_and(|name| is_hex(name, 24)) || name.ends_with(".history") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Refuses a directory without any WAL: an archive that is not mounted looks so, and a backup that brings WAL along would be promoted
/// without all that was archived after it.
///
/// # Errors
/// [`StoreError::Refused`] if there is none, or no such directory.
pub fn refuse_empty(wal: &Path) -> Result<(), StoreError> {
    if has_wal(wal)? {
        return Ok(());
    }
    Err(StoreError::Refused(format!(
        "\"{}\" has no WAL: is the archive mounted, and is this the directory of its segments? Leave --wal out where the backup has all that is wanted",
        wal.display()
    )))
}

/// Which tool's it is, by names alone. A directory that has a segment of its own is nobody's.
fn recognise(wal: &Path) -> std::io::Result<Option<Tool>> {
    let mut found = None;
    for entry in fs::read_dir(wal)?.take(MAX_ENTRIES) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_hex(&name, 24) {
            return Ok(None);
        }
        let below = || names(&entry.path());
        let tool = match name.as_str() {
            // archive/STANZA, and what is in there: a directory for each version and cluster, as 18-1.
            "archive.info" | "archive.info.copy" => Some(PGBACKREST),
            name if is_archive_id(name) => Some(PGBACKREST),
            // A repository's own, or archive/: the stanzas are one or two levels below.
            "archive" if below().iter().any(|stanza| entry.path().join(stanza).join("archive.info").exists()) => {
                Some(PGBACKREST)
            }
            // Below 18-1: a directory for each 256 segments, whose files end in a checksum.
            name if is_hex(name, 16) => match below().iter().any(|file| is_checksummed(file)) {
                true => Some(PGBACKREST),
                false => Some(BARMAN),
            },
            // Barman's SERVER/wals, with its catalogue, and SERVER.
            "xlog.db" => Some(BARMAN),
            "wals" if entry.path().join("xlog.db").exists() => Some(BARMAN),
            name if is_checksummed(name) => Some(PGBACKREST),
            "wal_005" | "basebackups_005" => Some(WAL_G),
            _ if entry.path().join("archive.info").exists() => Some(PGBACKREST),
            _ => None,
        };
        found = found.or(tool);
    }
    Ok(found)
}

/// Names in a directory; none if it is none.
fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.take(MAX_ENTRIES).flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn is_hex(name: &str, len: usize) -> bool {
    name.len() == len && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// `18-1`: version and number of the cluster.
fn is_archive_id(name: &str) -> bool {
    let number = |text: &str| text.parse::<u8>().is_ok();
    name.split_once('-')
        .is_some_and(|(version, id)| number(version.strip_prefix("9.").unwrap_or(version)) && number(id))
}

/// A segment, a hyphen, its SHA-1, and how it is packed.
fn is_checksummed(name: &str) -> bool {
    let Some((segment, rest)) = name.split_once('-') else { return false };
    is_hex(segment, 24) && rest.get(..40).is_some_and(|sum| is_hex(sum, 40))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: &str = "000000010000000000000001";

    fn said(files: &[&str]) -> String {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        refuse(dir.path()).map_or_else(|error| error.to_string(), |()| "WAL".into())
    }

    /// Found by a review: a backup with WAL of its own was promoted where the archive was not mounted.
    #[test]
    fn what_is_not_mounted_is_no_archive() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("README"), "").unwrap();
        assert!(refuse_empty(dir.path()).unwrap_err().to_string().contains("has no WAL"));
        for name in [SEGMENT, "000000010000000000000001.partial", "000000010000000000000001.gz", "00000002.history"] {
            fs::write(dir.path().join(name), "").unwrap();
            refuse_empty(dir.path()).unwrap();
            fs::remove_file(dir.path().join(name)).unwrap();
        }
    }

    #[test]
    fn repositories_are_recognised() {
        let packed = format!("18-1/0000000100000000/{SEGMENT}-{}.gz", "ab".repeat(20));
        for (files, tool, command) in [
            (vec![format!("archive/main/{packed}"), "archive/main/archive.info".into()], "pgBackRest", "archive-get"),
            (vec![format!("main/{packed}"), "main/archive.info".into()], "pgBackRest", "archive-get"),
            (vec![packed.clone(), "archive.info".into()], "pgBackRest", "archive-get"),
            (vec![packed.clone()], "pgBackRest", "archive-get"),
            (vec![packed["18-1/".len()..].to_owned()], "pgBackRest", "archive-get"),
            (vec![packed["18-1/0000000100000000/".len()..].to_owned()], "pgBackRest", "archive-get"),
            (vec![format!("0000000100000000/{SEGMENT}"), "xlog.db".into()], "Barman", "barman-wal-restore"),
            (vec![format!("wals/0000000100000000/{SEGMENT}"), "wals/xlog.db".into()], "Barman", "barman-wal-restore"),
            (vec![format!("wal_005/{SEGMENT}.lz4")], "WAL-G", "wal-fetch"),
        ] {
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            let text = said(&files);
            assert!(
                text.contains(&format!("is a repository of {tool},")) && text.contains(command),
                "{files:?}: {text}"
            );
        }
    }

    #[test]
    fn directories_of_wal_are_not() {
        let partial = format!("{SEGMENT}.partial");
        for files in [
            &[][..],
            &[SEGMENT, "18-1/x"],
            &[&partial],
            &["00000002.history"],
            &["archive/x", "lost+found/y", "2026-11/z"],
        ] {
            assert_eq!(said(files), "WAL", "{files:?}");
        }
        let none = refuse(Path::new("/does/not/exist")).unwrap_err().to_string();
        assert!(none.contains("could not read directory \"/does/not/exist\": No such file"), "{none}");
    }
}
