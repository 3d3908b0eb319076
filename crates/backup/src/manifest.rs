//! `backup_manifest`: which files a backup has, and the WAL that it needs (`backup/backup_manifest.c`,
//! `common/checksum_helper.c`, PostgreSQL 18). Version 2.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use walrider_layout::history::TimelineHistory;
use walrider_layout::{Lsn, TimelineId};

use crate::checksum::{Checksums, Sum, hex};

/// Its name.
pub const MANIFEST: &str = "backup_manifest";
/// What stands around its own checksum, in its last line.
const CHECKSUM: (&[u8], &[u8]) = (b"\"Manifest-Checksum\": \"", b"\"}");

/// Bytes of it that are kept in memory; more are in a file without a name.
const IN_MEMORY: usize = 1 << 20;

/// What a manifest is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestWishes {
    /// Of files.
    pub checksums: Checksums,
    /// Names in hexadecimal digits always.
    pub force_encode: bool,
}

/// Why a manifest cannot be finished.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file that it is kept in.
    #[error("could not write to temporary file: {0}")]
    Io(#[from] io::Error),
    /// The history does not lead from where the backup begins to where it ends.
    #[error("start timeline {0} not found in history of timeline {1}")]
    History(TimelineId, TimelineId),
}

/// Verifies a manifest's own checksum, of all before its last line (`verify_manifest_checksum`).
///
/// # Errors
/// What is wrong, to end a sentence.
pub fn verify(contents: &[u8]) -> Result<(), String> {
    let whole = contents.strip_suffix(b"\n").unwrap_or(contents);
    let last = whole.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let says = whole[last..].strip_prefix(CHECKSUM.0).and_then(|rest| rest.strip_suffix(CHECKSUM.1));
    let says = says.ok_or("its last line is not that of its own checksum")?;
    let sum = hex(&Sha256::digest(&contents[..last]));
    match says.eq_ignore_ascii_case(sum.as_bytes()) {
        true => Ok(()),
        false => Err(format!("its checksum is {sum}, and it says {}", says.escape_ascii())),
    }
}

/// A manifest that is being written. Nobody knows how many files there will be, so what is long of it is in a file.
pub struct Manifest {
    wishes: ManifestWishes,
    out: tempfile::SpooledTempFile,
    sum: Sha256,
    len: u64,
    has_files: bool,
}

impl Manifest {
    /// Begins one. `directory`: where there is room for a file without a name.
    ///
    /// # Errors
    /// Those of the file.
    pub fn new(wishes: ManifestWishes, system_identifier: u64, directory: &Path) -> io::Result<Manifest> {
        let out = tempfile::spooled_tempfile_in(IN_MEMORY, directory);
        let mut manifest = Manifest { wishes, out, sum: Sha256::new(), len: 0, has_files: false };
        manifest.write(&format!(
            "{{ \"PostgreSQL-Backup-Manifest-Version\": 2,\n\"System-Identifier\": {system_identifier},\n\"Files\": ["
        ))?;
        Ok(manifest)
    }

    /// How files are checksummed.
    pub fn checksums(&self) -> Checksums {
        self.wishes.checksums
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.sum.update(text.as_bytes());
        self.write_unsummed(text)
    }

    fn write_unsummed(&mut self, text: &str) -> io::Result<()> {
        self.len += text.len() as u64;
        self.out.write_all(text.as_bytes())
    }

    /// A file, by its path below the data directory, with its length in bytes and the time of its last change in seconds since 1970.
    ///
    /// # Errors
    /// Those of the file that it is kept in.
    pub fn add(&mut self, path: &[u8], len: u64, mtime: i64, sum: Sum) -> io::Result<()> {
        let mut entry = String::from(if self.has_files { ",\n" } else { "\n" });
        self.has_files = true;
        match std::str::from_utf8(path).ok().filter(|_| !self.wishes.force_encode) {
            Some(path) => {
                let path = serde_json::to_string(path).unwrap_or_default();
                entry.push_str(&format!("{{ \"Path\": {path}, "));
            }
            None => entry.push_str(&format!("{{ \"Encoded-Path\": \"{}\", ", hex(path))),
        }
        entry.push_str(&format!("\"Size\": {len}, \"Last-Modified\": \"{} GMT\"", utc(mtime)));
        if let Some((algorithm, digits)) = sum.finish() {
            entry.push_str(&format!(", \"Checksum-Algorithm\": \"{algorithm}\", \"Checksum\": \"{digits}\""));
        }
        entry.push_str(" }");
        self.write(&entry)
    }

    /// The end: the WAL that recovery needs, on whatever timelines, and the manifest's own checksum. Returns what reads it from its
    /// beginning, and its length in bytes.
    ///
    /// # Errors
    /// The history does not lead from where the backup begins to where it ends; those of the file.
    pub fn finish(
        mut self,
        begin: (TimelineId, Lsn),
        end: (TimelineId, Lsn),
        history: &TimelineHistory,
    ) -> Result<(impl Read + use<>, u64), ManifestError> {
        let ranges = ranges(begin, end, history)?;
        let range = |(timeline, begin, end): &(TimelineId, Lsn, Lsn)| {
            format!("{{ \"Timeline\": {timeline}, \"Start-LSN\": \"{begin}\", \"End-LSN\": \"{end}\" }}")
        };
        let ranges = ranges.iter().map(range).collect::<Vec<_>>().join(",\n");
        let mut written = || {
            self.write(&format!("\n],\n\"WAL-Ranges\": [\n{ranges}\n],\n"))?;
            let sum = hex(&std::mem::take(&mut self.sum).finalize());
            self.write_unsummed(&format!("\"Manifest-Checksum\": \"{sum}\"}}\n"))?;
            self.out.seek(SeekFrom::Start(0)).map(|_| ())
        };
        written()?;
        Ok((self.out, self.len))
    }
}

/// Which WAL is needed, of which timelines, newest first (`AddWALInfoToBackupManifest`).
fn ranges(
    begin: (TimelineId, Lsn),
    end: (TimelineId, Lsn),
    history: &TimelineHistory,
) -> Result<Vec<(TimelineId, Lsn, Lsn)>, ManifestError> {
    let mut ranges = Vec::new();
    let mut upto = end.1;
    for entry in history.newest_first() {
        if entry.timeline > end.0 || entry.end.is_some_and(|left| left < begin.1) {
            continue;
        }
        if entry.timeline == begin.0 {
            ranges.push((entry.timeline, begin.1, upto));
            return Ok(ranges);
        }
        ranges.push((entry.timeline, entry.begin, upto));
        upto = entry.begin;
    }
    Err(ManifestError::History(begin.0, end.0))
}

/// A time in seconds since 1970, as `2026-11-26 12:00:00` in UTC.
pub fn utc(seconds: i64) -> String {
    let time = jiff::Timestamp::from_second(seconds).unwrap_or_default();
    time.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(checksums: Checksums) -> ManifestWishes {
        ManifestWishes { checksums, force_encode: false }
    }

    #[test]
    fn it_is_json_and_tells_its_own_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::new(wishes(Checksums::Crc32c), 7, dir.path()).unwrap();
        for (path, len) in [(b"base/1/\"".as_slice(), 3), (b"x\xFF", 0)] {
            manifest.add(path, len, 1_700_000_000, Sum::new(Checksums::Crc32c)).unwrap();
        }
        let history = TimelineHistory::parse(TimelineId(2), "1\t0/3000000\tx\n").unwrap();
        let (mut out, len) =
            manifest.finish((TimelineId(1), Lsn(0x2000028)), (TimelineId(2), Lsn(0x3000100)), &history).unwrap();
        let mut text = String::new();
        out.read_to_string(&mut text).unwrap();
        assert_eq!(text.len() as u64, len);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["Files"][0]["Path"], "base/1/\"");
        assert_eq!(json["Files"][0]["Last-Modified"], "2023-11-14 22:13:20 GMT");
        assert_eq!(json["Files"][1]["Encoded-Path"], "78ff");
        assert_eq!(json["WAL-Ranges"][0]["Start-LSN"], "0/3000000");
        assert_eq!(
            json["WAL-Ranges"][1],
            serde_json::json!({"Timeline": 1, "Start-LSN": "0/2000028", "End-LSN": "0/3000000"})
        );
        let (summed, _) = text.split_at(text.rfind("\"Manifest-Checksum\"").unwrap());
        assert_eq!(json["Manifest-Checksum"], hex(&Sha256::digest(summed)));
    }

    #[test]
    fn a_history_that_does_not_lead_there_is_refused() {
        let end = (TimelineId(2), Lsn(0x5000000));
        let begin = (TimelineId(1), Lsn(0x2000028));
        assert!(ranges(begin, end, &TimelineHistory::alone(TimelineId(2))).is_err());
        let same = (TimelineId(2), Lsn(0x2000028));
        let ranges = ranges(same, end, &TimelineHistory::alone(TimelineId(2))).unwrap();
        assert_eq!(ranges, [(TimelineId(2), same.1, end.1)]);
    }
}
