//! What a base backup carries along: `backup_label`, where recovery begins, and `tablespace_map`, where
//! tablespaces are (`read_backup_label`, `read_tablespace_map`; `access/transam/xlogrecovery.c`, PostgreSQL 18).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use walrider_layout::{Lsn, Oid, TimelineId};

use crate::durable::{fsync_dir, read_file, rename, unlink_if_there};
use crate::error::{DataDirError, IoContext, Result};
use crate::held::shown;

/// Longest file that is read: a tablespace's path has at most 1,024 bytes, and nobody has a thousand of them.
const MAX_BYTES: u64 = 4 << 20;

/// The file `backup_label`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupLabel {
    /// START WAL LOCATION: where redo begins.
    pub start_lsn: Lsn,
    /// The timeline of that, from the name of the segment file.
    pub start_timeline: TimelineId,
    /// CHECKPOINT LOCATION: the checkpoint record to begin with.
    pub checkpoint: Lsn,
    /// BACKUP METHOD is "streamed": a BACKUP_END record must be passed before the directory is consistent.
    pub streamed: bool,
    /// BACKUP FROM is "standby": the directory is consistent at the `minRecoveryPoint` of its control file.
    pub from_standby: bool,
    /// START TIME, as written.
    pub start_time: Option<String>,
    /// LABEL.
    pub label: Option<String>,
}

impl BackupLabel {
    /// Reads the file's contents; the error says what is wrong with them.
    pub fn parse(text: &str) -> std::result::Result<BackupLabel, String> {
        let mut lines = text.split('\n');
        let mut required = |name: &str| {
            let line = lines.next().unwrap_or_default();
            line.strip_prefix(name)
                .and_then(|rest| rest.strip_prefix(": "))
                .ok_or_else(|| format!("expected \"{name}: …\", found \"{line}\""))
        };
        let start = required("START WAL LOCATION")?;
        let (start_lsn, start_timeline) = start_location(start)
            .ok_or_else(|| format!("expected \"START WAL LOCATION: LSN (file SEGMENT)\", found \"{start}\""))?;
        let checkpoint = required("CHECKPOINT LOCATION")?.parse::<Lsn>().map_err(|error| error.to_string())?;
        let mut label = BackupLabel {
            start_lsn,
            start_timeline,
            checkpoint,
            streamed: false,
            from_standby: false,
            start_time: None,
            label: None,
        };
        for line in lines {
            match line.split_once(": ") {
                Some(("BACKUP METHOD", method)) => label.streamed = method.trim() == "streamed",
                Some(("BACKUP FROM", from)) => label.from_standby = from.trim() == "standby",
                Some(("START TIME", time)) => label.start_time = Some(time.to_owned()),
                Some(("LABEL", text)) => label.label = Some(text.to_owned()),
                Some(("START TIMELINE", timeline)) if timeline.trim().parse() != Ok(start_timeline.0) => {
                    return Err(format!(
                        "START TIMELINE is {timeline}, but the segment file is of timeline {start_timeline}"
                    ));
                }
                _ => {}
            }
        }
        if start_lsn > checkpoint {
            return Err(format!("START WAL LOCATION {start_lsn} is past CHECKPOINT LOCATION {checkpoint}"));
        }
        Ok(label)
    }

    /// Reads the file, if the directory has one. That of an incremental backup is refused.
    pub fn read(data_dir: &Path) -> Result<Option<BackupLabel>> {
        let path = data_dir.join("backup_label");
        let Some(contents) = read_file(&path, MAX_BYTES)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&contents);
        if text.lines().any(|line| line.starts_with("INCREMENTAL FROM ")) {
            return Err(DataDirError::Refused(format!(
                "\"{}\" is an incremental backup, not a data directory: make one of it with pg_combinebackup",
                shown(data_dir).display()
            )));
        }
        BackupLabel::parse(&text).map(Some).map_err(|reason| DataDirError::corrupt(path, reason))
    }
}

/// Of the form `0/2000028 (file 000000010000000000000002)`.
fn start_location(text: &str) -> Option<(Lsn, TimelineId)> {
    let (lsn, file) = text.split_once(" (file ")?;
    let file = file.strip_suffix(')')?;
    let well_formed = file.len() == 24 && file.bytes().all(|byte| byte.is_ascii_hexdigit());
    let timeline = well_formed.then(|| u32::from_str_radix(&file[..8], 16).ok())??;
    Some((lsn.parse().ok()?, TimelineId(timeline)))
}

/// A tablespace of a backup: its number and where its files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedTablespace {
    /// The tablespace, and the name of the link in `pg_tblspc`.
    pub oid: Oid,
    /// What the link points to.
    pub path: PathBuf,
}

/// Reads the contents of `tablespace_map`: lines of number, one space, path, in which a backslash protects the
/// next byte. The error says what is wrong with them.
pub fn parse_tablespace_map(contents: &[u8]) -> std::result::Result<Vec<MappedTablespace>, String> {
    let mut tablespaces = Vec::new();
    let mut line = Vec::new();
    let mut protected = false;
    for &byte in contents {
        match byte {
            b'\n' | b'\r' if !protected => {
                if !line.is_empty() {
                    tablespaces.push(mapped_tablespace(&line)?);
                    line.clear();
                }
            }
            b'\\' if !protected => protected = true,
            _ => {
                line.push(byte);
                protected = false;
            }
        }
    }
    if !line.is_empty() || protected {
        return Err("its last line does not end".to_owned());
    }
    Ok(tablespaces)
}

fn mapped_tablespace(line: &[u8]) -> std::result::Result<MappedTablespace, String> {
    let mut parts = line.splitn(2, |&byte| byte == b' ');
    let oid = parts.next().and_then(|oid| std::str::from_utf8(oid).ok()?.parse::<Oid>().ok());
    match (oid, parts.next()) {
        (Some(oid), Some(path)) if oid != 0 && !path.is_empty() && !path.contains(&0) => {
            Ok(MappedTablespace { oid, path: OsString::from_vec(path.to_vec()).into() })
        }
        _ => Err(format!("expected a number, a space and a path, found \"{}\"", String::from_utf8_lossy(line))),
    }
}

/// Reads `tablespace_map`, if the directory has one.
pub fn read_tablespace_map(data_dir: &Path) -> Result<Option<Vec<MappedTablespace>>> {
    let path = data_dir.join("tablespace_map");
    let Some(contents) = read_file(&path, MAX_BYTES)? else { return Ok(None) };
    parse_tablespace_map(&contents).map(Some).map_err(|reason| DataDirError::corrupt(path, reason))
}

/// Makes the links in `pg_tblspc`, replacing those that are there (`InitWalRecovery`). Durable on return.
pub fn apply_tablespace_map(data_dir: &Path, tablespaces: &[MappedTablespace]) -> Result<()> {
    let links = data_dir.join("pg_tblspc");
    for tablespace in tablespaces {
        let link = links.join(tablespace.oid.to_string());
        remove_tablespace_link(&link)?;
        std::os::unix::fs::symlink(&tablespace.path, &link).context("create symbolic link", &link)?;
    }
    if tablespaces.is_empty() { Ok(()) } else { fsync_dir(&links) }
}

/// Removes a tablespace's link, or the empty directory that stands in its place; anything else is refused
/// (`remove_tablespace_symlink`, `commands/tablespace.c`).
pub(crate) fn remove_tablespace_link(link: &Path) -> Result<()> {
    let found = match fs::symlink_metadata(link) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.context("stat", link)?,
    };
    if found.is_dir() {
        fs::remove_dir(link).context("remove directory (is it empty?)", link)
    } else if found.is_symlink() {
        unlink_if_there(link).map(|_| ())
    } else {
        Err(DataDirError::Refused(format!(
            "\"{}\" should be the symbolic link of a tablespace, but is a file: move it away",
            shown(link).display()
        )))
    }
}

/// Moves `backup_label` and `tablespace_map` out of the way, durably, once `pg_control` holds what they said. A label
/// left behind would make PostgreSQL start over from the backup.
pub fn retire(data_dir: &Path) -> Result<()> {
    for name in ["backup_label", "tablespace_map"] {
        let path = data_dir.join(name);
        if path.try_exists().context("stat file", &path)? {
            rename(&path, &data_dir.join(format!("{name}.old")))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABEL: &str = "START WAL LOCATION: 0/2000028 (file 000000030000000000000002)\n\
        CHECKPOINT LOCATION: 0/2000080\nBACKUP METHOD: streamed\nBACKUP FROM: primary\n\
        START TIME: 2026-11-21 11:37:40 UTC\nLABEL: pg_basebackup base backup\nSTART TIMELINE: 3\n";

    #[test]
    fn a_label_as_pg_basebackup_writes_it() {
        let label = BackupLabel::parse(LABEL).unwrap();
        assert_eq!((label.start_lsn, label.checkpoint), (Lsn(0x200_0028), Lsn(0x200_0080)));
        assert_eq!(label.start_timeline, TimelineId(3));
        assert!(label.streamed && !label.from_standby);
        assert_eq!(label.label.as_deref(), Some("pg_basebackup base backup"));
        assert!(BackupLabel::parse(&LABEL.replace("primary", "standby")).unwrap().from_standby);
        let rewound = LABEL.replace("streamed", "pg_rewind").replace("LABEL: pg_basebackup base backup\n", "");
        assert!(!BackupLabel::parse(&rewound).unwrap().streamed);
    }

    #[test]
    fn a_damaged_label_is_an_error() {
        for (from, to) in [
            ("START WAL", "START"),
            ("0/2000028", "0-2000028"),
            ("000000030000000000000002", "0000000300000000"),
            ("000000030000000000000002", "ééééééé000002é"),
            (" (file", "(file"),
            ("CHECKPOINT LOCATION: 0/2000080", "CHECKPOINT LOCATION: x"),
            ("0/2000080", "0/1000080"),
            ("TIMELINE: 3", "TIMELINE: 2"),
        ] {
            assert!(BackupLabel::parse(&LABEL.replacen(from, to, 1)).is_err(), "{from} → {to}");
        }
        assert!(BackupLabel::parse("").is_err());
    }

    #[test]
    fn an_incremental_backup_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(BackupLabel::read(dir.path()).unwrap(), None);
        fs::write(dir.path().join("backup_label"), format!("{LABEL}INCREMENTAL FROM LSN: 0/1000000\n")).unwrap();
        assert!(BackupLabel::read(dir.path()).unwrap_err().to_string().contains("pg_combinebackup"));
    }

    #[test]
    fn a_map_makes_links() {
        let dir = tempfile::tempdir().unwrap();
        let links = dir.path().join("pg_tblspc");
        fs::create_dir_all(links.join("16400")).unwrap();
        std::os::unix::fs::symlink("/old", links.join("16401")).unwrap();
        let map = parse_tablespace_map(b"16400 /new\\\nline and \\\\slash\r\n16401  spaced\n").unwrap();
        apply_tablespace_map(dir.path(), &map).unwrap();
        assert_eq!(fs::read_link(links.join("16400")).unwrap(), Path::new("/new\nline and \\slash"));
        assert_eq!(fs::read_link(links.join("16401")).unwrap(), Path::new(" spaced"));
        fs::write(links.join("16402"), b"").unwrap();
        let file = [MappedTablespace { oid: 16402, path: "/x".into() }];
        assert!(apply_tablespace_map(dir.path(), &file).is_err());
        for bad in [&b"16400 /x"[..], b"16400\n", b"16400 \n", b"x /y\n", b"16400 /x\n\\", b" /x\n", b"1 /\0\n"] {
            assert!(parse_tablespace_map(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn both_are_retired() {
        let dir = tempfile::tempdir().unwrap();
        retire(dir.path()).unwrap();
        for name in ["backup_label", "backup_label.old", "tablespace_map"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        retire(dir.path()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("backup_label.old")).unwrap(), "backup_label");
        assert!(dir.path().join("tablespace_map.old").exists() && !dir.path().join("tablespace_map").exists());
    }
}
