//! Names of files in a backup, which somebody else has written: where they lead to, and whether what is there is of pages.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use walrider_datadir::relation::{SegmentFile, parse_file_name};
use walrider_layout::{DEFAULT_TABLESPACE_OID, GLOBAL_TABLESPACE_OID, Oid, RelFileLocator};

/// The longest name, in bytes (`MAXPGPATH`).
const MAX_NAME: usize = 1024;

/// The name of a file below the data directory, as a manifest has it; it leads nowhere else.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Vec<u8>);

impl Name {
    /// Checks one that an archive or a manifest has. `above`: the place that it is relative to.
    ///
    /// # Errors
    /// What is wrong with it, as the end of a sentence.
    pub fn parse(above: &str, text: &[u8]) -> Result<Name, String> {
        // Directories end in a slash; an archive that was packed again may begin with the directory itself.
        let text = text.strip_suffix(b"/").unwrap_or(text);
        let text = text.strip_prefix(b"./").unwrap_or(text);
        if text.is_empty() || text.contains(&0) || above.len() + text.len() > MAX_NAME {
            return Err("has a name that no file of a data directory has".to_owned());
        }
        if text.split(|&byte| byte == b'/').any(|part| matches!(part, b"" | b"." | b"..")) {
            return Err("has a name that leads out of the data directory, or could".to_owned());
        }
        Ok(Name([above.as_bytes(), text].concat()))
    }

    /// As it stands in a manifest.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its path below the data directory.
    pub fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// Whether a manifest does not vouch for it: WAL, the manifest itself, and what `pg_basebackup` and administrators write
    /// (`should_ignore_relpath`, `pg_verifybackup.c`).
    pub fn is_beside_the_manifest(&self) -> bool {
        let known =
            [b"backup_manifest".as_slice(), b"postgresql.auto.conf", b"recovery.signal", b"standby.signal", b"pg_wal"];
        known.contains(&self.0.as_slice()) || self.0.starts_with(b"pg_wal/")
    }

    /// Whether it is part of an incremental backup.
    pub fn is_incremental(&self) -> bool {
        self.path().file_name().is_some_and(|name| name.as_bytes().starts_with(b"INCREMENTAL."))
    }

    /// The segment of a relation's fork that it is of.
    pub fn segment(&self) -> Option<SegmentFile> {
        let text = std::str::from_utf8(&self.0).ok()?;
        let parts: Vec<&str> = text.split('/').collect();
        let oid = |text: &str| text.parse::<Oid>().ok().filter(|oid| *oid > 0 && oid.to_string() == text);
        let (tablespace, database, file) = match parts[..] {
            ["global", file] => (GLOBAL_TABLESPACE_OID, 0, file),
            ["base", database, file] => (DEFAULT_TABLESPACE_OID, oid(database)?, file),
            ["pg_tblspc", tablespace, version, database, file] if version.starts_with("PG_") => {
                (oid(tablespace)?, oid(database)?, file)
            }
            _ => return None,
        };
        let (relation, fork, segment) = parse_file_name(file)?;
        Some(SegmentFile { rel: RelFileLocator { tablespace, database, relation }, fork, segment })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&String::from_utf8_lossy(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use walrider_layout::ForkNumber;

    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for (text, name) in [("base/5/1259", "base/5/1259"), ("pg_wal/", "pg_wal"), ("./PG_VERSION", "PG_VERSION")] {
            assert_eq!(Name::parse("", text.as_bytes()).unwrap().to_string(), name);
        }
        for bad in ["", "/", "/etc/passwd", "..", "a/../../b", "a//b", "./", "a/.", "././a", "a\0b", &"x".repeat(1025)]
        {
            assert!(Name::parse("", bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert_eq!(Name::parse("pg_tblspc/7/", b"PG_18_1/5/2").unwrap().to_string(), "pg_tblspc/7/PG_18_1/5/2");
        assert!(Name::parse("pg_tblspc/7/", b"../8/x").is_err());
    }

    #[test]
    fn segments_of_relations() {
        let segment = |text: &str| Name::parse("", text.as_bytes()).unwrap().segment();
        let found = segment("pg_tblspc/16400/PG_18_202506291/5/16384_fsm.1").unwrap();
        let rel = RelFileLocator { tablespace: 16400, database: 5, relation: 16384 };
        assert_eq!(found, SegmentFile { rel, fork: ForkNumber::FreeSpaceMap, segment: 1 });
        assert_eq!(segment("base/5/16384").unwrap().rel.tablespace, DEFAULT_TABLESPACE_OID);
        assert_eq!(segment("global/1262").unwrap().rel.database, 0);
        for none in
            ["global/pg_control", "base/5/PG_VERSION", "base/05/1259", "pg_xact/0000", "base/5/t3_16390", "1259"]
        {
            assert_eq!(segment(none), None, "{none}");
        }
    }
}
