//! The pages of an SLRU: `pg_xact`, `pg_commit_ts`, `pg_multixact/offsets`, `pg_multixact/members`
//! (`access/transam/slru.c`, PostgreSQL 18).
//!
//! What the bits on the pages mean, and which pages precede which, is decided by the caller.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use walrider_layout::{BLCKSZ, PageBytes};

use crate::durable::{fsync_dir, list_dir, unlink_if_there};
use crate::error::{DataDirError, IoContext, Result};

/// Pages in a segment file (`SLRU_PAGES_PER_SEGMENT`, `access/slru.h`).
pub const PAGES_PER_SEGMENT: u64 = 32;
/// Segment numbers end here: names have at most six digits (`SlruFileName`).
const LAST_SEGMENT: u64 = 0xFF_FFFF;

struct CachedPage {
    bytes: Box<PageBytes>,
    dirty: bool,
    /// When it was last asked for, on the cache's own clock.
    used: u64,
}

/// One SLRU. Changes stay in memory until [`Slru::flush`], or until the page must make room for another; they
/// are durable after [`Slru::sync`]. Removal of segments is done at once.
pub struct Slru {
    directory: PathBuf,
    pages: BTreeMap<u64, CachedPage>,
    capacity: usize,
    clock: u64,
    /// Segments written, and not yet made durable.
    unsynced: BTreeSet<u64>,
    /// A segment file was made or removed, and the directory not yet made durable.
    directory_changed: bool,
    /// The file of the last read or write: neighbouring pages follow each other.
    open: Option<(u64, File)>,
}

impl Slru {
    /// The SLRU in `directory`, with room in memory for `capacity` pages of 8 kB (at least one). Touches no file.
    pub fn new(directory: impl Into<PathBuf>, capacity: usize) -> Slru {
        Slru {
            directory: directory.into(),
            pages: BTreeMap::new(),
            capacity: capacity.max(1),
            clock: 0,
            unsynced: BTreeSet::new(),
            directory_changed: false,
            open: None,
        }
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The page, from memory or disk. One in a segment file that does not exist reads as zeros, since recovery may
    /// begin before a truncation that has already removed it; one past the end of an existing file is an error
    /// (`SlruPhysicalReadPage`, in recovery).
    pub fn page(&mut self, page: u64) -> Result<&PageBytes> {
        Ok(&self.cached(page)?.bytes)
    }

    /// The page, to be changed.
    pub fn page_mut(&mut self, page: u64) -> Result<&mut PageBytes> {
        let cached = self.cached(page)?;
        cached.dirty = true;
        Ok(&mut cached.bytes)
    }

    /// Makes the page one of zeros, whatever it was (`SimpleLruZeroPage`).
    pub fn zero_page(&mut self, page: u64) -> Result<&mut PageBytes> {
        self.check_number(page)?;
        if !self.pages.contains_key(&page) {
            self.make_room()?;
        }
        self.clock += 1;
        let fresh = CachedPage { bytes: Box::new([0; BLCKSZ]), dirty: true, used: self.clock };
        self.pages.insert(page, fresh);
        Ok(&mut self.pages.get_mut(&page).expect("just put there").bytes)
    }

    /// Whether the page exists, in memory and not yet written, or in a file
    /// (`SimpleLruDoesPhysicalPageExist`, after `SimpleLruWriteAll`).
    pub fn exists(&mut self, page: u64) -> Result<bool> {
        if self.pages.get(&page).is_some_and(|cached| cached.dirty) {
            return Ok(true);
        }
        self.check_number(page)?;
        let path = self.segment_path(page / PAGES_PER_SEGMENT);
        let dirty_after = |cached: (&u64, &CachedPage)| cached.1.dirty;
        let segment_end = (page / PAGES_PER_SEGMENT + 1) * PAGES_PER_SEGMENT;
        // Writing a later page of the segment makes the earlier ones exist, as holes.
        if self.pages.range(page..segment_end).any(dirty_after) {
            return Ok(true);
        }
        match path.metadata() {
            Ok(found) => Ok(found.len() >= (page % PAGES_PER_SEGMENT + 1) * BLCKSZ as u64),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).context("stat file", &path),
        }
    }

    /// Removes every segment whose first and last page both precede `cutoff`, and forgets all pages that do
    /// (`SimpleLruTruncate`, `SlruMayDeleteSegment`). The caller has checked that the newest page does not precede it.
    pub fn truncate(&mut self, cutoff: u64, precedes: impl Fn(u64, u64) -> bool) -> Result<()> {
        let goes = |segment: u64| {
            let first = segment * PAGES_PER_SEGMENT;
            precedes(first, cutoff) && precedes(first + PAGES_PER_SEGMENT - 1, cutoff)
        };
        let old: Vec<u64> = self.pages.keys().copied().filter(|&page| precedes(page, cutoff)).collect();
        for page in old {
            if !goes(page / PAGES_PER_SEGMENT) {
                self.write_page(page)?;
            }
            self.pages.remove(&page);
        }
        for segment in self.segments()? {
            if goes(segment) {
                self.remove_segment(segment)?;
            }
        }
        Ok(())
    }

    /// Removes a segment, if it is there, and its pages from memory (`SlruDeleteSegment`).
    pub fn remove_segment(&mut self, segment: u64) -> Result<()> {
        self.check_number(segment.saturating_mul(PAGES_PER_SEGMENT))?;
        let first = segment * PAGES_PER_SEGMENT;
        self.pages.retain(|&page, _| !(first..first + PAGES_PER_SEGMENT).contains(&page));
        self.open = self.open.take().filter(|&(open, _)| open != segment);
        self.unsynced.remove(&segment);
        if unlink_if_there(&self.segment_path(segment))? {
            self.directory_changed = true;
        }
        Ok(())
    }

    /// Numbers of the segments that are on disk, ascending (`SlruScanDirectory`).
    pub fn segments(&self) -> Result<Vec<u64>> {
        let entries = list_dir(&self.directory)?;
        let mut numbers: Vec<u64> =
            entries.iter().filter_map(|entry| segment_number(entry.file_name().to_str()?)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        Ok(numbers)
    }

    /// Writes all changes to their files, in the order of the pages (`SimpleLruWriteAll`).
    pub fn flush(&mut self) -> Result<()> {
        let dirty: Vec<u64> = self.pages.iter().filter(|(_, page)| page.dirty).map(|(&number, _)| number).collect();
        for page in dirty {
            self.write_page(page)?;
        }
        Ok(())
    }

    /// Writes all changes, and makes them and everything written before durable.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        // A failed fsync may not fail again, and yet nothing be durable: the set is left as it was, and the caller
        // must give up.
        for &segment in &self.unsynced {
            crate::durable::fsync_file(&self.segment_path(segment))?;
        }
        self.unsynced.clear();
        assert!(self.pages.values().all(|page| !page.dirty), "durable, but for a page that was not written");
        if std::mem::take(&mut self.directory_changed) {
            fsync_dir(&self.directory)?;
        }
        Ok(())
    }

    /// Name of a segment file (`SlruFileName`, short names).
    fn segment_path(&self, segment: u64) -> PathBuf {
        self.directory.join(format!("{segment:04X}"))
    }

    fn check_number(&self, page: u64) -> Result<()> {
        if page / PAGES_PER_SEGMENT <= LAST_SEGMENT {
            return Ok(());
        }
        Err(DataDirError::corrupt(&self.directory, format!("page {page} cannot exist in it")))
    }

    fn cached(&mut self, page: u64) -> Result<&mut CachedPage> {
        if !self.pages.contains_key(&page) {
            self.check_number(page)?;
            self.make_room()?;
            let bytes = self.read_page(page)?;
            self.pages.insert(page, CachedPage { bytes, dirty: false, used: 0 });
        }
        self.clock += 1;
        let cached = self.pages.get_mut(&page).expect("just put there");
        cached.used = self.clock;
        Ok(cached)
    }

    /// Writes back and drops the page that was not asked for longest, if memory is full.
    fn make_room(&mut self) -> Result<()> {
        if self.pages.len() >= self.capacity {
            let oldest = self.pages.iter().min_by_key(|(_, page)| page.used).map(|(&number, _)| number);
            if let Some(page) = oldest {
                self.write_page(page)?;
                self.pages.remove(&page);
            }
        }
        assert!(self.pages.len() < self.capacity, "no room for a page");
        Ok(())
    }

    fn read_page(&mut self, page: u64) -> Result<Box<PageBytes>> {
        let (segment, at) = (page / PAGES_PER_SEGMENT, page % PAGES_PER_SEGMENT * BLCKSZ as u64);
        let path = self.segment_path(segment);
        let mut bytes = Box::new([0; BLCKSZ]);
        let Some(file) = self.open_segment(segment, false)? else { return Ok(bytes) };
        match file.read_exact_at(&mut bytes[..], at) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(DataDirError::corrupt(path, format!("it ends before the page at byte {at}")))
            }
            Err(error) => Err(error).context("read file", &path),
        }
    }

    /// Writes the page if it is in memory and dirty.
    fn write_page(&mut self, page: u64) -> Result<()> {
        if !self.pages.get(&page).is_some_and(|cached| cached.dirty) {
            return Ok(());
        }
        let (segment, at) = (page / PAGES_PER_SEGMENT, page % PAGES_PER_SEGMENT * BLCKSZ as u64);
        let path = self.segment_path(segment);
        self.unsynced.insert(segment);
        self.open_segment(segment, true)?;
        let cached = self.pages.get_mut(&page).expect("checked above");
        let (_, file) = self.open.as_ref().expect("just opened");
        file.write_all_at(&cached.bytes[..], at).context("write file", &path)?;
        cached.dirty = false;
        Ok(())
    }

    fn open_segment(&mut self, segment: u64, create: bool) -> Result<Option<&File>> {
        if self.open.as_ref().is_none_or(|&(open, _)| open != segment) {
            let path = self.segment_path(segment);
            let existing = OpenOptions::new().read(true).write(true).open(&path);
            let file = match existing {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    if !create {
                        return Ok(None);
                    }
                    self.directory_changed = true;
                    let options = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
                    options.context("create file", &path)?
                }
                other => other.context("open file", &path)?,
            };
            self.open = Some((segment, file));
        }
        Ok(self.open.as_ref().map(|(_, file)| file))
    }
}

/// The number in the name of a segment file; `None` for other files (`SlruCorrectSegmentFilenameLength`).
fn segment_number(name: &str) -> Option<u64> {
    let upper_hex = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
    let well_formed = (4..=6).contains(&name.len()) && name.bytes().all(upper_hex);
    well_formed.then(|| u64::from_str_radix(name, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_capacity(capacity: usize) -> (tempfile::TempDir, Slru) {
        let dir = tempfile::tempdir().unwrap();
        let slru = Slru::new(dir.path(), capacity);
        (dir, slru)
    }

    #[test]
    fn more_pages_than_memory() {
        let (dir, mut slru) = with_capacity(3);
        for page in 0..100 {
            slru.zero_page(page).unwrap()[0] = page as u8 + 1;
        }
        for page in (0..100).rev() {
            assert_eq!(slru.page(page).unwrap()[0], page as u8 + 1);
            slru.page_mut(page).unwrap()[1] = 7;
        }
        slru.sync().unwrap();
        assert!(slru.unsynced.is_empty());
        assert_eq!(slru.segments().unwrap(), [0, 1, 2, 3]);
        assert_eq!(dir.path().join("0003").metadata().unwrap().len(), 4 * BLCKSZ as u64);
        let mut again = Slru::new(dir.path(), 1);
        for page in 0..100 {
            assert_eq!(again.page(page).unwrap()[..2], [page as u8 + 1, 7]);
        }
    }

    #[test]
    fn a_missing_file_is_zeros_a_short_one_is_an_error() {
        let (dir, mut slru) = with_capacity(4);
        assert_eq!(slru.page(1000).unwrap(), &[0; BLCKSZ]);
        assert!(!slru.exists(1000).unwrap());
        std::fs::write(dir.path().join("0000"), vec![1; BLCKSZ + 5]).unwrap();
        assert_eq!(slru.page(0).unwrap()[0], 1);
        assert!(slru.exists(0).unwrap() && !slru.exists(1).unwrap());
        assert!(slru.page(1).unwrap_err().is_corruption());
        assert!(slru.page(u64::MAX).unwrap_err().is_corruption());
        assert!(slru.remove_segment(u64::MAX).is_err());
    }

    #[test]
    fn a_page_in_memory_exists() {
        let (_dir, mut slru) = with_capacity(4);
        slru.zero_page(34).unwrap();
        assert!(slru.exists(34).unwrap() && slru.exists(33).unwrap());
        assert!(!slru.exists(31).unwrap() && !slru.exists(35).unwrap());
        slru.flush().unwrap();
        assert!(slru.exists(34).unwrap() && slru.exists(33).unwrap() && !slru.exists(35).unwrap());
    }

    #[test]
    fn truncation_keeps_the_segment_of_the_cutoff() {
        let (dir, mut slru) = with_capacity(8);
        for page in [0, 40, 64, 70, 90] {
            slru.zero_page(page).unwrap()[0] = 9;
        }
        slru.flush().unwrap();
        slru.page_mut(0).unwrap()[0] = 1;
        slru.page_mut(64).unwrap()[0] = 1;
        std::fs::write(dir.path().join("readme"), b"").unwrap();
        slru.truncate(70, |page, cutoff| page < cutoff).unwrap();
        slru.sync().unwrap();
        assert_eq!(slru.segments().unwrap(), [2]);
        assert_eq!(slru.page(64).unwrap()[0], 1, "a change before the cutoff, in a segment that stays, is kept");
        assert_eq!(slru.page(0).unwrap()[0], 0);
        assert!(dir.path().join("readme").exists());
    }

    #[test]
    fn names_of_segments() {
        let names = ["0000", "FFFF", "1FFFF", "FFFFFF", "0", "00a0", "1000000", "0001.tmp"];
        let numbers: Vec<_> = names.iter().map(|name| segment_number(name)).collect();
        let some = [Some(0), Some(0xFFFF), Some(0x1_FFFF), Some(0xFF_FFFF)];
        assert_eq!(numbers[..4], some);
        assert!(numbers[4..].iter().all(Option::is_none));
    }
}
