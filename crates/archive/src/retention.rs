//! Which WAL the base backups need that are kept: those of `pg_basebackup`, in a directory for each, plain or as tar files, with
//! their `backup_manifest` (`backup/backup_manifest.c`, PostgreSQL 18).

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use walrider_backup::manifest::{MANIFEST, verify};
use walrider_datadir::DataDirError;
use walrider_datadir::backup_label::BackupLabel;
use walrider_datadir::durable::{list_dir, read_file};
use walrider_layout::{Lsn, TimelineId};

use crate::check::SegmentFacts;
use crate::error::{ArchiveError, Result};
use crate::name::WalName;

const LABEL: &str = "backup_label";
/// Longest manifest that is read: some four million files.
const MAX_MANIFEST: u64 = 1 << 30;
/// Longest label.
const MAX_LABEL: u64 = 4 << 20;

/// A base backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    /// Its directory.
    pub path: PathBuf,
    /// The timeline that it begins on.
    pub timeline: TimelineId,
    /// Where its recovery begins.
    pub start: Lsn,
    /// The cluster's system identifier, if it tells.
    pub system_identifier: Option<u64>,
    /// It has a manifest, which is written last.
    pub whole: bool,
}

/// What a manifest says that counts here.
#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "System-Identifier")]
    system_identifier: Option<u64>,
    #[serde(rename = "WAL-Ranges")]
    ranges: Vec<Range>,
}

#[derive(Deserialize)]
struct Range {
    #[serde(rename = "Timeline")]
    timeline: u32,
    #[serde(rename = "Start-LSN")]
    start: String,
}

impl Backup {
    /// The backup in a directory, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or where it begins cannot be told.
    fn read(path: &Path) -> Result<Option<Backup>> {
        let refused = |name: &str, why: String| {
            ArchiveError::Refused(format!("\"{}\" does not tell where it begins: {why}", path.join(name).display()))
        };
        if let Some(bytes) = read_file(&path.join(MANIFEST), MAX_MANIFEST)? {
            verify(&bytes).map_err(|why| refused(MANIFEST, format!("it is damaged: {why}")))?;
            let manifest: Manifest =
                serde_json::from_slice(&bytes).map_err(|error| refused(MANIFEST, error.to_string()))?;
            let mut starts = Vec::new();
            for Range { timeline, start } in manifest.ranges {
                let start: Lsn = start.parse().map_err(|_| refused(MANIFEST, format!("\"{start}\" is no position")))?;
                starts.push((start, TimelineId(timeline)));
            }
            let first = starts.into_iter().min().ok_or_else(|| refused(MANIFEST, "it has no WAL-Ranges".into()))?;
            let (start, timeline) = first;
            let system_identifier = manifest.system_identifier;
            return Ok(Some(Backup { path: path.to_owned(), timeline, start, system_identifier, whole: true }));
        }
        if let Some(bytes) = read_file(&path.join(LABEL), MAX_LABEL)? {
            let label = BackupLabel::parse(&String::from_utf8_lossy(&bytes)).map_err(|why| refused(LABEL, why))?;
            let (timeline, start) = (label.start_timeline, label.start_lsn);
            return Ok(Some(Backup { path: path.to_owned(), timeline, start, system_identifier: None, whole: false }));
        }
        let looks_like_one = |entry: &fs::DirEntry| {
            let name = entry.file_name();
            name.to_str().is_some_and(|name| name.starts_with("base.tar") || name.starts_with(MANIFEST))
        };
        match list_dir(path)?.iter().any(looks_like_one) {
            true => Err(refused(
                "",
                "it is being taken, or was given up, or has no backup_manifest; wait for it, or move it elsewhere"
                    .into(),
            )),
            false => Ok(None),
        }
    }
}

/// The backups that directories have, the newest first: each in a directory of its own. Whatever else is there is none.
///
/// # Errors
/// A directory cannot be read, or of a backup in it nothing can be told.
pub fn backups(directories: &[PathBuf]) -> Result<Vec<Backup>> {
    let mut found = Vec::new();
    for directory in directories {
        if Backup::read(directory)?.is_some() {
            return Err(ArchiveError::Refused(format!(
                "\"{}\" is a backup itself: name the directory that has the backups",
                directory.display()
            )));
        }
        for entry in list_dir(directory)? {
            // Through links, too: a backup may be on another disk.
            let kind = fs::metadata(entry.path());
            if kind.map_err(|error| DataDirError::io("stat", entry.path(), error))?.is_dir() {
                found.extend(Backup::read(&entry.path())?);
            }
        }
    }
    found.sort_by_key(|backup| std::cmp::Reverse((backup.timeline, backup.start)));
    Ok(found)
}

/// Of these, the newest first, which stay: `count` that are whole, and those newer or not whole, which may be under way. The rest needs no
/// WAL.
pub fn kept(backups: &[Backup], count: usize) -> Vec<&Backup> {
    let mut whole = 0;
    let stays = |backup: &&Backup| {
        whole += usize::from(backup.whole);
        !backup.whole || whole <= count
    };
    backups.iter().filter(stays).collect()
}

/// The first segment that backups need of an archive whose segments are such; those before it may go.
///
/// # Errors
/// None of them is whole, or one is another cluster's.
pub fn first_segment(kept: &[&Backup], archive: SegmentFacts) -> Result<WalName> {
    if !kept.iter().any(|backup| backup.whole) {
        return Err(ArchiveError::Refused("there is no backup with a backup_manifest: nothing is removed".into()));
    }
    if let Some(other) = kept.iter().find(|one| one.system_identifier.is_some_and(|id| id != archive.system_identifier))
    {
        return Err(ArchiveError::Refused(format!(
            "\"{}\" is a backup of another cluster than the archive's: their system identifiers are {} and {}",
            other.path.display(),
            other.system_identifier.unwrap_or_default(),
            archive.system_identifier
        )));
    }
    let oldest = kept.iter().min_by_key(|backup| backup.start).expect("one is whole");
    let name = archive.size.file_name(oldest.timeline, archive.size.segment_of(oldest.start));
    WalName::parse(&name).ok_or_else(|| ArchiveError::Refused(format!("\"{name}\" is no segment")))
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};
    use walrider_layout::wal::SegmentSize;

    use super::*;

    fn manifest(directory: &Path, name: &str, timeline: u32, start: &str) {
        fs::create_dir_all(directory.join(name)).unwrap();
        let text = format!(
            r#"{{ "PostgreSQL-Backup-Manifest-Version": 2, "System-Identifier": 77, "Files": [{{ "Path": "x" }}],
            "WAL-Ranges": [{{ "Timeline": {timeline}, "Start-LSN": "{start}", "End-LSN": "FF/0" }}],"#
        );
        fs::write(directory.join(name).join(MANIFEST), sealed(&text)).unwrap();
    }

    /// With its own checksum.
    fn sealed(text: &str) -> String {
        let sum = Sha256::digest(format!("{text}\n")).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("{text}\n\"Manifest-Checksum\": \"{sum}\"}}\n")
    }

    /// One flipped digit, and WAL was removed that the backup needs.
    #[test]
    fn a_damaged_manifest_removes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        manifest(directory.path(), "a", 1, "0/2000028");
        let path = directory.path().join("a").join(MANIFEST);
        let text = fs::read_to_string(&path).unwrap().replace("0/2000028", "0/6000028");
        fs::write(path, text).unwrap();
        assert!(first(directory.path(), 1).unwrap_err().contains("its checksum is"));
    }

    const FACTS: SegmentFacts = SegmentFacts { system_identifier: 77, size: SegmentSize::DEFAULT, segment: 0 };

    fn first(directory: &Path, count: usize) -> std::result::Result<String, String> {
        let backups = backups(&[directory.to_owned()]).map_err(|error| error.to_string())?;
        let first = first_segment(&kept(&backups, count), FACTS).map_err(|error| error.to_string())?;
        Ok(first.as_str().to_owned())
    }

    #[test]
    fn the_oldest_that_is_kept_counts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert!(first(path, 1).unwrap_err().contains("no backup"));
        manifest(path, "a", 1, "0/2000028");
        manifest(path, "b", 1, "0/5000028");
        manifest(path, "c", 2, "0/4000028");
        fs::create_dir(path.join("lost+found")).unwrap();
        fs::write(path.join("notes"), "").unwrap();
        assert_eq!(first(path, 1).unwrap(), "000000020000000000000004", "the newest is that of the newest timeline");
        assert_eq!(first(path, 2).unwrap(), "000000020000000000000004", "which needs more than the one before");
        assert_eq!(first(path, 3).unwrap(), "000000010000000000000002");
        assert_eq!(first(path, 9).unwrap(), "000000010000000000000002");
        // One that is being taken is kept, and counts for none.
        fs::create_dir(path.join("d")).unwrap();
        let label = "START WAL LOCATION: 0/3000028 (file 000000010000000000000003)\nCHECKPOINT LOCATION: 0/3000080\n";
        fs::write(path.join("d").join(LABEL), label).unwrap();
        assert_eq!(first(path, 1).unwrap(), "000000010000000000000003");
        assert!(first(&path.join("a"), 1).unwrap_err().contains("is a backup itself"));
    }

    #[test]
    fn what_cannot_be_told_is_refused() {
        for (file, contents, said) in [
            ("base.tar.gz", "", "is being taken"),
            ("backup_manifest.tmp", "", "is being taken"),
            (MANIFEST, "{ \"WAL-Ranges\": [", "its last line"),
            (MANIFEST, &sealed("{ \"WAL-Ranges\": ["), "expected"),
            (MANIFEST, &sealed("{ \"WAL-Ranges\": [],"), "no WAL-Ranges"),
            (MANIFEST, &sealed("{ \"WAL-Ranges\": [{ \"Timeline\": 1, \"Start-LSN\": \"x\" }],"), "no position"),
            (LABEL, "x", "START WAL LOCATION"),
        ] {
            let directory = tempfile::tempdir().unwrap();
            manifest(directory.path(), "a", 1, "0/2000028");
            fs::create_dir(directory.path().join("b")).unwrap();
            fs::write(directory.path().join("b").join(file), contents).unwrap();
            assert!(first(directory.path(), 1).unwrap_err().contains(said), "{file} {contents}");
        }
        let directory = tempfile::tempdir().unwrap();
        manifest(directory.path(), "a", 1, "0/2000028");
        let backups = backups(&[directory.path().to_owned()]).unwrap();
        let other = SegmentFacts { system_identifier: 78, ..FACTS };
        assert!(first_segment(&kept(&backups, 1), other).unwrap_err().to_string().contains("another cluster"));
    }
}
