//! The pages of one SLRU between two restartpoints: what [`Slru`] keeps, and three things that replay adds.
//!
//! - The page used last is at hand without a lookup: a commit is one byte changed.
//! - Segments are removed only by the restartpoint. Stock removes them as it meets the record; but a server that restarts from
//!   the old checkpoint, with a target before that record, still needs them.
//! - Pages that changed since they were last written are counted. A page that makes room for another is written then,
//!   and if nobody has moved `minRecoveryPoint` before, a server could be started at a point where the commits on it have
//!   not happened. So the engine asks [`Globals::wants_flush`](super::Globals::wants_flush) once in a while.

use std::collections::BTreeSet;

use walrider_datadir::DataDirError;
use walrider_datadir::slru::{PAGES_PER_SEGMENT, Slru};
use walrider_layout::{BLCKSZ, PageBytes};

/// Number of no page.
const NONE: u64 = u64::MAX;

/// The pages of an SLRU, as replay sees them.
pub(super) struct Pages {
    slru: Slru,
    /// The page used last, and its bytes, which are newer than those in `slru` if `hot_dirty`.
    hot: u64,
    hot_bytes: Box<PageBytes>,
    hot_dirty: bool,
    /// Changed since the last flush.
    dirty: BTreeSet<u64>,
    /// Segments that are removed as far as replay is concerned.
    doomed: BTreeSet<u64>,
}

impl Pages {
    pub(super) fn new(slru: Slru) -> Pages {
        Pages {
            slru,
            hot: NONE,
            hot_bytes: Box::new([0; BLCKSZ]),
            hot_dirty: false,
            dirty: BTreeSet::new(),
            doomed: BTreeSet::new(),
        }
    }

    /// The page. See [`Slru::page`] for one that is not there.
    #[inline]
    pub(super) fn page(&mut self, page: u64) -> Result<&PageBytes, DataDirError> {
        if page != self.hot {
            self.switch_to(page)?;
        }
        Ok(&self.hot_bytes)
    }

    /// The page, to be changed.
    #[inline]
    pub(super) fn page_mut(&mut self, page: u64) -> Result<&mut PageBytes, DataDirError> {
        if page != self.hot {
            self.switch_to(page)?;
        }
        self.hot_dirty = true;
        Ok(&mut self.hot_bytes)
    }

    #[cold]
    fn switch_to(&mut self, page: u64) -> Result<(), DataDirError> {
        self.put_back()?;
        self.hot = NONE;
        self.remove_if_doomed(page)?;
        self.hot_bytes.copy_from_slice(self.slru.page(page)?);
        self.hot = page;
        Ok(())
    }

    fn put_back(&mut self) -> Result<(), DataDirError> {
        if self.hot_dirty {
            self.slru.page_mut(self.hot)?.copy_from_slice(&self.hot_bytes[..]);
            self.dirty.insert(self.hot);
            self.hot_dirty = false;
        }
        Ok(())
    }

    /// A removed segment is used again, having gone round all numbers, or because commit timestamps are back on: what was
    /// in it must not shine through.
    fn remove_if_doomed(&mut self, page: u64) -> Result<(), DataDirError> {
        let segment = page / PAGES_PER_SEGMENT;
        if !self.doomed.is_empty() && self.doomed.remove(&segment) {
            self.slru.remove_segment(segment)?;
            self.dirty.retain(|page| page / PAGES_PER_SEGMENT != segment);
        }
        Ok(())
    }

    /// Makes the page one of zeros.
    pub(super) fn zero_page(&mut self, page: u64) -> Result<(), DataDirError> {
        self.put_back()?;
        self.hot = NONE;
        self.remove_if_doomed(page)?;
        self.slru.zero_page(page)?;
        self.dirty.insert(page);
        Ok(())
    }

    /// Whether the page exists, in memory or in a file.
    pub(super) fn exists(&mut self, page: u64) -> Result<bool, DataDirError> {
        self.put_back()?;
        if self.doomed.contains(&(page / PAGES_PER_SEGMENT)) { Ok(false) } else { self.slru.exists(page) }
    }

    /// Removes the segments before the one with page `cutoff` (`SlruMayDeleteSegment`).
    pub(super) fn truncate(&mut self, cutoff: u64, precedes: impl Fn(u64, u64) -> bool) -> Result<(), DataDirError> {
        self.remove_segments(|segment| {
            let first = segment * PAGES_PER_SEGMENT;
            precedes(first, cutoff) && precedes(first + PAGES_PER_SEGMENT - 1, cutoff)
        })
    }

    /// Removes the segments of these numbers.
    pub(super) fn remove_segments(&mut self, goes: impl Fn(u64) -> bool) -> Result<(), DataDirError> {
        self.put_back()?;
        self.hot = NONE;
        let unwritten = self.dirty.iter().map(|page| page / PAGES_PER_SEGMENT);
        self.doomed.extend(self.slru.segments()?.into_iter().chain(unwritten).filter(|&segment| goes(segment)));
        Ok(())
    }

    /// How many pages changed since the last flush; the one at hand may be missing.
    pub(super) fn dirty_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Writes all changes, so that none of them need be written to make room.
    pub(super) fn flush(&mut self) -> Result<(), DataDirError> {
        self.put_back()?;
        self.slru.flush()?;
        self.dirty.clear();
        Ok(())
    }

    /// Writes all changes, removes what is to be removed, and makes it all durable.
    pub(super) fn sync(&mut self) -> Result<(), DataDirError> {
        self.put_back()?;
        while let Some(segment) = self.doomed.pop_first() {
            self.slru.remove_segment(segment)?;
        }
        self.slru.sync()?;
        self.dirty.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> (tempfile::TempDir, Pages) {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::new(Slru::new(dir.path(), 4));
        (dir, pages)
    }

    #[test]
    fn changes_survive_switching_eviction_and_sync() {
        let (dir, mut pages) = pages();
        for page in 0..50 {
            pages.zero_page(page).unwrap();
            pages.page_mut(page).unwrap()[3] = page as u8;
        }
        assert_eq!(pages.page(7).unwrap()[3], 7);
        assert_eq!(pages.dirty_pages(), 50);
        pages.flush().unwrap();
        assert_eq!(pages.dirty_pages(), 0);
        pages.page_mut(7).unwrap()[3] = 77;
        pages.sync().unwrap();
        let mut again = Pages::new(Slru::new(dir.path(), 4));
        assert_eq!(again.page(7).unwrap()[3], 77);
        assert_eq!(again.page(49).unwrap()[3], 49);
    }

    #[test]
    fn segments_are_removed_by_the_restartpoint() {
        let (dir, mut pages) = pages();
        pages.page_mut(5).unwrap()[0] = 1;
        pages.sync().unwrap();
        pages.page_mut(40).unwrap()[0] = 1;
        pages.page_mut(70).unwrap()[0] = 1;
        pages.truncate(64, |page, cutoff| page < cutoff).unwrap();
        assert!(dir.path().join("0000").exists(), "still needed if we crash");
        assert!(!pages.exists(5).unwrap() && !pages.exists(40).unwrap() && pages.exists(70).unwrap());
        pages.sync().unwrap();
        assert!(!dir.path().join("0000").exists());
        assert!(!dir.path().join("0001").exists(), "removed before it was ever written");
        assert!(dir.path().join("0002").exists());
    }

    #[test]
    fn a_removed_segment_that_is_used_again_begins_with_zeros() {
        let (_dir, mut pages) = pages();
        pages.page_mut(5).unwrap()[0] = 1;
        pages.page_mut(6).unwrap()[0] = 1;
        pages.sync().unwrap();
        pages.remove_segments(|_| true).unwrap();
        assert_eq!(pages.page(5).unwrap()[0], 0);
        pages.page_mut(5).unwrap()[1] = 2;
        pages.sync().unwrap();
        assert_eq!(pages.page(5).unwrap()[..2], [0, 2]);
        assert!(!pages.exists(6).unwrap());
    }
}
