//! What the end of recovery changes in `pg_wal`: the first segment of the new timeline, its history file, what the old
//! one leaves, and what the archiver is told (`XLogInitNewTimeline`, `RemoveNonParentXlogFiles`,
//! `CleanupAfterArchiveRecovery` in `access/transam/xlog.c`, `writeTimeLineHistory` in `access/transam/timeline.c`,
//! `access/transam/xlogarchive.c`; PostgreSQL 18).

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write, copy, repeat};
use std::path::{Path, PathBuf};

use walrider_layout::history::history_file_name;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::durable::{fsync_dir, list_dir, read_file, rename, unlink_if_there, write_file};
use crate::error::{IoContext, Result};

/// How the names of files begin that hold WAL which the primary has not flushed (the spool's early log).
pub const EARLY_PREFIX: &str = "walrider.early.";
/// Files of this name are removed by a server that starts (`RemoveTempXlogFiles`).
const TEMPORARY: &str = "xlogtemp.walrider";
/// The timeline that an end of recovery begins.
const BEGINS: &str = "walrider.begins";
/// A number, in bytes.
const MAX_BEGINS: u64 = 16;
/// Files are compared in pieces of so many bytes.
const COMPARED_BYTES: u64 = 1 << 18;
/// Files are written in pieces of so many bytes.
const WRITTEN_BYTES: usize = 1 << 18;

/// `pg_wal` of a data directory.
#[derive(Clone, Debug)]
pub struct WalDir {
    path: PathBuf,
    size: SegmentSize,
}

impl WalDir {
    /// That of this data directory.
    pub fn new(data_dir: &Path, size: SegmentSize) -> WalDir {
        WalDir { path: data_dir.join("pg_wal"), size }
    }

    /// The size of its segments.
    pub fn segment_size(&self) -> SegmentSize {
        self.size
    }

    fn segment_path(&self, timeline: TimelineId, segment: u64) -> PathBuf {
        self.path.join(self.size.file_name(timeline, segment))
    }

    fn status(&self, name: &str, status: &str) -> PathBuf {
        self.path.join("archive_status").join(format!("{name}.{status}"))
    }

    /// `XLogArchiveCleanup`.
    fn forget_status(&self, name: &str) -> Result<()> {
        for status in ["done", "ready"] {
            unlink_if_there(&self.status(name, status))?;
        }
        Ok(())
    }

    /// Says that a file is to be archived, or is. Not fsynced, as in PostgreSQL.
    fn note(&self, name: &str, status: &str) -> Result<()> {
        let path = self.status(name, status);
        // A server makes it when it starts (`ValidateXLOGDirectoryStructure`).
        fs::create_dir_all(self.path.join("archive_status")).context("create directory", &path)?;
        File::create(&path).map(drop).context("create archive status file", &path)
    }

    /// All segments that are there, by timeline and number.
    fn segments(&self) -> Result<Vec<(TimelineId, u64)>> {
        let names = list_dir(&self.path)?;
        Ok(names.iter().filter_map(|entry| self.size.parse_file_name(entry.file_name().to_str()?)).collect())
    }

    fn remove(&self, timeline: TimelineId, segment: u64) -> Result<()> {
        unlink_if_there(&self.segment_path(timeline, segment))?;
        self.forget_status(&self.size.file_name(timeline, segment))
    }

    /// Removes the segments of a timeline that has no history file: what an earlier promotion left that did not get that
    /// far.
    pub fn remove_timeline(&self, timeline: TimelineId) -> Result<()> {
        for (_, segment) in self.segments()?.into_iter().filter(|(of, _)| *of == timeline) {
            self.remove(timeline, segment)?;
        }
        Ok(())
    }

    /// Notes durably that a timeline begins, which `pg_control` does not tell yet.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn note_beginning(&self, timeline: TimelineId) -> Result<()> {
        write_file(&self.path.join(BEGINS), timeline.0.to_string().as_bytes())
    }

    /// What [`note_beginning`](WalDir::note_beginning) noted counts no more.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn forget_beginning(&self) -> Result<()> {
        unlink_if_there(&self.path.join(BEGINS)).map(drop)
    }

    /// Takes back a timeline that an end of recovery began, and that never was the directory's, which is on `current`: recovery would follow it, past the
    /// target that it was to end at.
    ///
    /// # Errors
    /// Files that cannot be read or removed.
    pub fn undo_beginning(&self, current: TimelineId) -> Result<()> {
        let Some(noted) = read_file(&self.path.join(BEGINS), MAX_BEGINS)? else { return Ok(()) };
        let noted = std::str::from_utf8(&noted).ok().and_then(|text| text.parse().ok()).map(TimelineId);
        if let Some(timeline) = noted.filter(|timeline| *timeline > current) {
            let name = history_file_name(timeline);
            unlink_if_there(&self.path.join(&name))?;
            fsync_dir(&self.path)?;
            self.forget_status(&name)?;
            self.remove_timeline(timeline)?;
        }
        self.forget_beginning()
    }

    /// Makes a segment of what `contents` gives, up to its size, zeros behind that. When this returns it is there, whole and
    /// durable; before, it has another name.
    ///
    /// # Errors
    /// Contents that cannot be read, a file that cannot be written.
    pub fn make_segment(&self, timeline: TimelineId, segment: u64, contents: &mut dyn Read) -> Result<()> {
        let (path, temporary) = (self.segment_path(timeline, segment), self.path.join(TEMPORARY));
        let written = (|| {
            let file = File::create(&temporary).context("create file", &temporary)?;
            let mut file = BufWriter::with_capacity(WRITTEN_BYTES, file);
            // Zeros are written, not skipped: the server is to find room when it writes there (`wal_init_zero`).
            let mut whole = contents.chain(repeat(0)).take(self.size.bytes());
            let written = copy(&mut whole, &mut file).context("write file", &temporary)?;
            assert_eq!(written, self.size.bytes(), "a segment has one size");
            file.flush().context("write file", &temporary)?;
            file.get_ref().sync_all().context("fsync file", &temporary)?;
            fs::rename(&temporary, &path).context("rename a temporary file to", &path)
        })();
        if written.is_err() {
            // The error that counts is the first one.
            let _ = fs::remove_file(&temporary);
        }
        written?;
        fsync_dir(&self.path)?;
        self.forget_status(&self.size.file_name(timeline, segment))
    }

    /// Has a segment of an old timeline that was read from somewhere else (`KeepFileRestoredFromArchive`): if the file that is
    /// there does not begin with `needed`, or none is, it is made of `contents`.
    pub fn keep_segment(
        &self,
        timeline: TimelineId,
        segment: u64,
        needed: &mut dyn Read,
        contents: &mut dyn Read,
    ) -> Result<()> {
        let path = self.segment_path(timeline, segment);
        if path.try_exists().context("stat file", &path)? && begins_with(&path, needed).context("read file", &path)? {
            return Ok(());
        }
        self.make_segment(timeline, segment, contents)?;
        self.note(&self.size.file_name(timeline, segment), "done")
    }

    /// Writes a timeline's history file; durable on return.
    pub fn write_history(&self, timeline: TimelineId, contents: &[u8], archive: bool) -> Result<()> {
        let name = history_file_name(timeline);
        write_file(&self.path.join(&name), contents)?;
        if archive { self.note(&name, "ready") } else { Ok(()) }
    }

    /// Keeps the history file of a timeline that leads here, from an archive, for standbys that ask for it
    /// (`restoreTimeLineHistoryFiles`, `KeepFileRestoredFromArchive`).
    pub fn keep_history(&self, timeline: TimelineId, contents: &[u8]) -> Result<()> {
        let name = history_file_name(timeline);
        let path = self.path.join(&name);
        if path.try_exists().context("stat file", &path)? {
            return Ok(());
        }
        write_file(&path, contents)?;
        self.note(&name, "done")
    }

    /// Removes segments of other timelines behind the one that was left at `switch_point`, unless they wait to be archived
    /// (`RemoveNonParentXlogFiles`).
    pub fn remove_non_parent(&self, switch_point: Lsn, timeline: TimelineId) -> Result<()> {
        let last = self.size.segment_of(Lsn(switch_point.0.saturating_sub(1)));
        for (of, segment) in self.segments()? {
            let ready = self.status(&self.size.file_name(of, segment), "ready");
            if of < timeline && segment > last && !ready.try_exists().context("stat file", &ready)? {
                self.remove(of, segment)?;
            }
        }
        Ok(())
    }

    /// Removes segments before that of `redo` which lead nowhere, as one behind them is missing; unless they wait to be archived. A base
    /// backup brings them. PostgreSQL's checkpoints would keep them, and all that comes later, for the WAL summarizer, which would wait for ever
    /// for what is missing (`GetOldestUnsummarizedLSN`, `postmaster/walsummarizer.c`; `KeepLogSeg`, `access/transam/xlog.c`).
    pub fn remove_before_gap(&self, redo: Lsn) -> Result<()> {
        let segments = self.segments()?;
        let numbers: HashSet<u64> = segments.iter().map(|(_, segment)| *segment).collect();
        let needed = self.size.segment_of(redo);
        let gap = (0..=needed).rev().find(|segment| !numbers.contains(segment));
        for (of, segment) in segments.into_iter().filter(|(_, segment)| Some(*segment) < gap) {
            let ready = self.status(&self.size.file_name(of, segment), "ready");
            if !ready.try_exists().context("stat file", &ready)? {
                self.remove(of, segment)?;
            }
        }
        Ok(())
    }

    /// The segment within which a timeline was left will not be completed here: gives it the ending `.partial`, to be
    /// archived under that name; not if it is complete, which an archive status says (`CleanupAfterArchiveRecovery`).
    pub fn archive_partial(&self, switch_point: Lsn, timeline: TimelineId) -> Result<()> {
        let path = self.segment_path(timeline, self.size.segment_of(switch_point));
        let name = self.size.file_name(timeline, self.size.segment_of(switch_point));
        let there = |path: &Path| path.try_exists().context("stat file", path);
        let complete = there(&self.status(&name, "done"))? || there(&self.status(&name, "ready"))?;
        if self.size.offset_of(switch_point) == 0 || complete || !there(&path)? {
            return Ok(());
        }
        let partial = format!("{name}.partial");
        self.forget_status(&partial)?;
        rename(&path, &self.path.join(&partial))?;
        self.note(&partial, "ready")
    }
}

/// Whether a file begins with what `needed` gives.
fn begins_with(path: &Path, needed: &mut dyn Read) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let (mut wanted, mut found) = (Vec::new(), Vec::new());
    loop {
        wanted.clear();
        found.clear();
        Read::take(&mut *needed, COMPARED_BYTES).read_to_end(&mut wanted)?;
        Read::by_ref(&mut file).take(wanted.len() as u64).read_to_end(&mut found)?;
        if wanted.is_empty() || wanted != found {
            return Ok(wanted == found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEGABYTE: u64 = 1 << 20;

    fn wal_dir() -> (tempfile::TempDir, WalDir) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("pg_wal/archive_status")).unwrap();
        let wal_dir = WalDir::new(dir.path(), SegmentSize::new(MEGABYTE as u32).unwrap());
        (dir, wal_dir)
    }

    fn names(dir: &tempfile::TempDir, below: &str) -> Vec<String> {
        let entries = list_dir(&dir.path().join("pg_wal").join(below)).unwrap();
        let files = entries.iter().filter(|entry| entry.file_type().unwrap().is_file());
        files.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_segment_is_whole_or_not_there() {
        let (dir, wal_dir) = wal_dir();
        wal_dir.note("000000020000000000000005", "ready").unwrap();
        wal_dir.make_segment(TimelineId(2), 5, &mut &b"wal"[..]).unwrap();
        let contents = fs::read(dir.path().join("pg_wal/000000020000000000000005")).unwrap();
        assert_eq!((contents.len() as u64, &contents[..5]), (MEGABYTE, &b"wal\0\0"[..]));
        assert!(names(&dir, "archive_status").is_empty());
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::UnexpectedEof.into())
            }
        }
        assert!(wal_dir.make_segment(TimelineId(2), 6, &mut Broken).is_err());
        assert_eq!(names(&dir, "."), ["000000020000000000000005"]);
        wal_dir.make_segment(TimelineId(3), 5, &mut &b""[..]).unwrap();
        wal_dir.remove_timeline(TimelineId(2)).unwrap();
        assert_eq!(names(&dir, "."), ["000000030000000000000005"]);
    }

    #[test]
    fn a_segment_that_was_read_elsewhere_is_kept() {
        let (dir, wal_dir) = wal_dir();
        let path = dir.path().join("pg_wal/000000010000000000000005");
        let keep = |needed: &[u8]| {
            wal_dir.keep_segment(TimelineId(1), 5, &mut &needed[..], &mut &b"wal and more"[..]).unwrap();
            (fs::read(&path).unwrap().len() as u64, names(&dir, "archive_status"))
        };
        let done = vec!["000000010000000000000005.done".to_owned()];
        assert_eq!(keep(b"wal"), (MEGABYTE, done.clone()));
        wal_dir.forget_status("000000010000000000000005").unwrap();
        assert_eq!(keep(b"wal"), (MEGABYTE, vec![]), "is as it was");
        fs::write(&path, "wa").unwrap();
        assert_eq!(keep(b"wal"), (MEGABYTE, done), "was too short");
        assert!(fs::read(&path).unwrap().starts_with(b"wal and more\0"));
    }

    #[test]
    fn what_the_old_timeline_leaves() {
        let (dir, wal_dir) = wal_dir();
        let switch_point = Lsn(5 * MEGABYTE + 8);
        for name in ["000000010000000000000004", "000000010000000000000005", "000000010000000000000006"] {
            fs::write(dir.path().join("pg_wal").join(name), "").unwrap();
        }
        fs::write(dir.path().join("pg_wal/000000010000000000000007"), "").unwrap();
        fs::write(dir.path().join("pg_wal/000000020000000000000006"), "").unwrap();
        wal_dir.note("000000010000000000000006", "done").unwrap();
        wal_dir.note("000000010000000000000007", "ready").unwrap();
        for _ in 0..2 {
            wal_dir.remove_non_parent(switch_point, TimelineId(2)).unwrap();
            wal_dir.archive_partial(switch_point, TimelineId(1)).unwrap();
            assert_eq!(
                names(&dir, "."),
                [
                    "000000010000000000000004",
                    "000000010000000000000005.partial",
                    "000000010000000000000007",
                    "000000020000000000000006"
                ]
            );
            let status = names(&dir, "archive_status");
            assert_eq!(status, ["000000010000000000000005.partial.ready", "000000010000000000000007.ready"]);
        }
    }

    #[test]
    fn what_leads_nowhere_goes() {
        let (dir, wal_dir) = wal_dir();
        let segment = |number: u64| format!("00000001000000000000000{number}");
        let left = |redo: u64| {
            for number in [1, 2, 3, 5, 6] {
                fs::write(dir.path().join("pg_wal").join(segment(number)), "").unwrap();
            }
            wal_dir.note(&segment(2), "ready").unwrap();
            wal_dir.remove_before_gap(Lsn(redo * MEGABYTE + 8)).unwrap();
            names(&dir, ".")
        };
        assert_eq!(left(2), [1, 2, 3, 5, 6].map(segment), "the gap is behind it");
        assert_eq!(left(4), [2, 5, 6].map(segment), "it is what is missing");
        assert_eq!(left(6), [2, 5, 6].map(segment));
    }

    #[test]
    fn complete_segments_are_not_partial() {
        let (dir, wal_dir) = wal_dir();
        fs::write(dir.path().join("pg_wal/000000010000000000000005"), "").unwrap();
        wal_dir.archive_partial(Lsn(5 * MEGABYTE), TimelineId(1)).unwrap();
        wal_dir.note("000000010000000000000005", "done").unwrap();
        wal_dir.archive_partial(Lsn(5 * MEGABYTE + 8), TimelineId(1)).unwrap();
        assert_eq!(names(&dir, "."), ["000000010000000000000005"]);
        wal_dir.remove_non_parent(Lsn(5 * MEGABYTE), TimelineId(2)).unwrap();
        assert!(names(&dir, ".").is_empty(), "the switch point is its first byte: the segment before is the last");
    }

    #[test]
    fn history_files() {
        let (dir, wal_dir) = wal_dir();
        wal_dir.write_history(TimelineId(2), b"two", false).unwrap();
        wal_dir.keep_history(TimelineId(2), b"other").unwrap();
        wal_dir.keep_history(TimelineId(3), b"three").unwrap();
        wal_dir.write_history(TimelineId(4), b"four", true).unwrap();
        assert_eq!(names(&dir, "archive_status"), ["00000003.history.done", "00000004.history.ready"]);
        assert_eq!(fs::read(dir.path().join("pg_wal/00000002.history")).unwrap(), b"two");
    }
}
