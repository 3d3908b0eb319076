//! A manifest that is read: which files a backup must have, and what they must be (`common/parse_manifest.c`, PostgreSQL 18).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Deserialize;
use walrider_datadir::relation::SegmentFile;
use walrider_layout::ForkNumber;

use crate::checksum::{Checksums, Sum};
use crate::error::{BackupError, Result};
use crate::manifest::{MANIFEST, verify};
use crate::name::Name;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(rename = "PostgreSQL-Backup-Manifest-Version")]
    version: u32,
    #[serde(rename = "System-Identifier")]
    system_identifier: Option<u64>,
    #[serde(rename = "Files")]
    files: Vec<File>,
    #[serde(rename = "WAL-Ranges")]
    _wal: serde::de::IgnoredAny,
    #[serde(rename = "Manifest-Checksum")]
    _checksum: serde::de::IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "Path")]
    path: Option<String>,
    #[serde(rename = "Encoded-Path")]
    encoded: Option<String>,
    #[serde(rename = "Size")]
    size: u64,
    #[serde(rename = "Last-Modified")]
    _modified: Option<serde::de::IgnoredAny>,
    #[serde(rename = "Checksum-Algorithm")]
    algorithm: Option<String>,
    #[serde(rename = "Checksum")]
    checksum: Option<String>,
}

/// What a file must be.
#[derive(Debug)]
pub(crate) struct Expected {
    pub size: u64,
    checksums: Checksums,
    digits: String,
    seen: AtomicBool,
}

impl Expected {
    /// A checksum to be made while the file is read.
    pub fn sum(&self) -> Sum {
        Sum::new(self.checksums)
    }

    /// Compares it at the end; the error ends a sentence.
    pub fn compare(&self, sum: Sum) -> std::result::Result<(), String> {
        match sum.finish() {
            Some((name, digits)) if !digits.eq_ignore_ascii_case(&self.digits) => Err(format!(
                "is damaged: its {name} is {digits}, and {MANIFEST} says {}. Take another backup, or an intact copy of this one",
                self.digits
            )),
            _ => Ok(()),
        }
    }
}

/// A manifest.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// Of the cluster; manifests of PostgreSQL 16 and older do not say.
    pub system_identifier: Option<u64>,
    files: HashMap<Name, Expected>,
}

impl Inventory {
    /// Reads one, and verifies its own checksum.
    pub fn parse(contents: &[u8]) -> Result<Inventory> {
        let damaged = |reason: String| BackupError::damaged(MANIFEST, format!("is damaged: {reason}"));
        verify(contents).map_err(damaged)?;
        let document: Document = serde_json::from_slice(contents).map_err(|error| damaged(error.to_string()))?;
        if !(1..=2).contains(&document.version) {
            return Err(BackupError::Refused(format!(
                "{MANIFEST} is of version {}; versions 1 and 2 are known",
                document.version
            )));
        }
        let mut files = HashMap::with_capacity(document.files.len());
        for file in document.files {
            let path = match (file.path, file.encoded) {
                (Some(path), None) => path.into_bytes(),
                (None, Some(digits)) => {
                    unhex(&digits).ok_or_else(|| damaged(format!("\"{digits}\" is no encoded path")))?
                }
                _ => return Err(damaged("a file has no path, or two".to_owned())),
            };
            let name = Name::parse("", &path)
                .map_err(|why| damaged(format!("\"{}\" {why}", String::from_utf8_lossy(&path))))?;
            if name.is_incremental() {
                return Err(incremental());
            }
            let algorithm = file.algorithm.unwrap_or_else(|| Checksums::None.name().to_owned());
            let checksums = Checksums::parse(&algorithm)
                .ok_or_else(|| damaged(format!("checksum algorithm \"{algorithm}\" of \"{name}\" is not known")))?;
            if (checksums == Checksums::None) != file.checksum.is_none() {
                return Err(damaged(format!("\"{name}\" has a checksum without algorithm, or the other way round")));
            }
            let digits = file.checksum.unwrap_or_default();
            let expected = Expected { size: file.size, checksums, digits, seen: AtomicBool::new(false) };
            if files.insert(name.clone(), expected).is_some() {
                return Err(damaged(format!("\"{name}\" stands there twice")));
            }
        }
        Ok(Inventory { system_identifier: document.system_identifier, files })
    }

    /// A file was found. What it must be; `None`: the manifest does not vouch for it.
    pub fn expect(&self, name: &Name) -> Result<Option<&Expected>> {
        if name.is_beside_the_manifest() {
            return Ok(None);
        }
        let expected = self.files.get(name).ok_or_else(|| {
            BackupError::damaged(name.to_string(), format!("does not belong to it: it is not in {MANIFEST}"))
        })?;
        match expected.seen.swap(true, Ordering::Relaxed) {
            true => Err(BackupError::damaged(name.to_string(), "is there twice")),
            false => Ok(Some(expected)),
        }
    }

    /// How long the segment files of relations' maps are, in bytes.
    pub fn maps(&self) -> HashMap<SegmentFile, u64> {
        let is_map = |file: &SegmentFile| matches!(file.fork, ForkNumber::FreeSpaceMap | ForkNumber::VisibilityMap);
        let segments = self.files.iter().filter_map(|(name, expected)| Some((name.segment()?, expected.size)));
        segments.filter(|(file, _)| is_map(file)).collect()
    }

    /// Whether there are files whose names begin so.
    pub fn has_below(&self, above: &str) -> bool {
        self.files.keys().any(|name| name.as_bytes().starts_with(above.as_bytes()))
    }

    /// How long all files of relations are.
    pub fn relation_bytes(&self) -> u64 {
        let relations = self.files.iter().filter(|(name, _)| name.segment().is_some());
        relations.fold(0, |sum, (_, expected)| sum.saturating_add(expected.size))
    }

    /// All files were seen.
    pub fn check_complete(&self) -> Result<()> {
        let is_missing = |(name, expected): &(&Name, &Expected)| {
            !expected.seen.load(Ordering::Relaxed) && !name.is_beside_the_manifest()
        };
        let mut missing: Vec<&Name> = self.files.iter().filter(is_missing).map(|(name, _)| name).collect();
        missing.sort();
        match missing[..] {
            [] => Ok(()),
            [name] => Err(BackupError::damaged(name.to_string(), format!("is missing: it is in {MANIFEST}"))),
            [name, ..] => Err(BackupError::damaged(
                name.to_string(),
                format!("is missing, and {} more: they are in {MANIFEST}", missing.len() - 1),
            )),
        }
    }
}

/// What is said of incremental backups.
pub(crate) fn incremental() -> BackupError {
    BackupError::Refused(
        "it is an incremental backup: combine it with those that it builds on (pg_combinebackup), and name the result"
            .to_owned(),
    )
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let bytes = digits.as_bytes();
    if !bytes.len().is_multiple_of(2) || !bytes.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    (0..bytes.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use walrider_layout::history::TimelineHistory;
    use walrider_layout::{Lsn, TimelineId};

    use super::*;
    use crate::manifest::{Manifest, ManifestWishes};

    fn written(files: &[(&[u8], &[u8])], checksums: Checksums) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::new(ManifestWishes { checksums, force_encode: false }, 7, dir.path()).unwrap();
        for (name, contents) in files {
            let mut sum = Sum::new(checksums);
            sum.update(contents);
            manifest.add(name, contents.len() as u64, 0, sum).unwrap();
        }
        let at = |lsn| (TimelineId(1), Lsn(lsn));
        let (mut out, _) = manifest.finish(at(1 << 24), at(2 << 24), &TimelineHistory::alone(TimelineId(1))).unwrap();
        let mut text = Vec::new();
        out.read_to_end(&mut text).unwrap();
        text
    }

    fn name(text: &str) -> Name {
        Name::parse("", text.as_bytes()).unwrap()
    }

    #[test]
    fn what_we_write_we_read() {
        for checksums in [Checksums::None, Checksums::Crc32c, Checksums::Sha224, Checksums::Sha512] {
            let text = written(&[(b"base/1/2", b"abc"), (b"odd\xFF", b""), (b"pg_wal/x", b"")], checksums);
            let inventory = Inventory::parse(&text).unwrap();
            assert_eq!(inventory.system_identifier, Some(7));
            let expected = inventory.expect(&name("base/1/2")).unwrap().unwrap();
            let mut sum = expected.sum();
            sum.update(b"abc");
            expected.compare(sum).unwrap();
            let mut sum = expected.sum();
            sum.update(b"abd");
            assert_eq!(expected.compare(sum).is_err(), checksums != Checksums::None);
            assert!(inventory.expect(&name("base/1/2")).unwrap_err().to_string().contains("twice"));
            assert!(inventory.expect(&name("base/1/3")).unwrap_err().to_string().contains("not in backup_manifest"));
            assert!(inventory.expect(&name("pg_wal/y")).unwrap().is_none());
            assert!(inventory.check_complete().unwrap_err().to_string().contains("is missing"));
            inventory.expect(&Name::parse("", b"odd\xFF").unwrap()).unwrap();
            inventory.check_complete().unwrap();
        }
    }

    #[test]
    fn a_damaged_one_is_refused() {
        let text = written(&[(b"base/1/2", b"abc")], Checksums::Crc32c);
        for at in 0..text.len() {
            let mut damaged = text.clone();
            damaged[at] ^= 1;
            // What the newline at the very end is does not matter.
            assert!(Inventory::parse(&damaged).is_err() || at + 1 == text.len(), "byte {at}");
            assert!(Inventory::parse(&text[..at]).is_err() || at + 1 == text.len(), "{at} bytes");
        }
        for bad in ["a/../b", "INCREMENTAL.1259"] {
            let text = written(&[(bad.as_bytes(), b"")], Checksums::None);
            assert!(Inventory::parse(&text).is_err(), "{bad}");
        }
        assert!(Inventory::parse(&written(&[(b"a", b""), (b"a", b"")], Checksums::None)).is_err());
        let incremental = written(&[(b"base/1/INCREMENTAL.2", b"")], Checksums::None);
        assert!(Inventory::parse(&incremental).unwrap_err().to_string().contains("pg_combinebackup"));
    }
}
