//! Reading WAL by position, whatever it comes from.

use std::io::IoSliceMut;

use walrider_layout::wal::{SegmentSize, WalPageHeader, page_of};
use walrider_layout::{Lsn, TimelineId, XLOG_BLCKSZ};
use walrider_wal::decode::{Found, Status, Stretch, WalFormat, check_page_header};

use crate::error::StoreError;

/// WAL by position. Which file it is in, on which timeline, and how it is fetched, is the implementation's business.
pub trait ReadWal: Sync {
    /// Reads whole pages from the page at `from` on into the slices, as far as one segment file has them. Returns how
    /// many bytes. 0: there is nothing there (yet).
    ///
    /// # Errors
    /// When what is there cannot be read.
    fn read(&self, from: Lsn, slices: &mut [IoSliceMut<'_>]) -> Result<usize, StoreError>;

    /// The timeline of the file that holds `lsn`.
    fn timeline_at(&self, lsn: Lsn) -> TimelineId;

    /// The file that holds `lsn`, for messages.
    fn describe(&self, lsn: Lsn) -> String;

    /// Whether there is a file for the segment that holds `lsn`.
    ///
    /// # Errors
    /// When the source fails.
    fn has_segment(&self, lsn: Lsn) -> Result<bool, StoreError>;

    /// Whether there is WAL in a segment that comes after the one that holds `lsn`, as far as that can be told without asking an archive.
    ///
    /// # Errors
    /// When the source fails.
    fn goes_on_after(&self, _lsn: Lsn, _format: &WalFormat) -> Result<bool, StoreError> {
        Ok(false)
    }

    /// Reading before this position, from `from` on, does not mean to wait for a command.
    fn ready_up_to(&self, _from: Lsn) -> Lsn {
        Lsn(u64::MAX)
    }

    /// WAL before `lsn` will not be asked for again, but that from there on.
    fn release_before(&self, _lsn: Lsn) {}

    /// Recovery would now begin at `redo`: older WAL is not needed any more.
    fn note_restartpoint(&self, _redo: Lsn) {}
}

/// Fills a stretch, a piece of `piece` bytes first ([`Stretch::fill`]). `each` sees every record.
///
/// # Errors
/// When the source fails.
pub fn fill(
    stretch: &mut Stretch,
    source: &dyn ReadWal,
    format: &WalFormat,
    piece: u64,
    each: impl FnMut(&Found<'_>),
) -> Result<Status, StoreError> {
    let read = |from, slices: &mut [IoSliceMut<'_>]| source.read(from, slices);
    stretch.fill(format, piece, read, |lsn| source.timeline_at(lsn), each)
}

/// Whether the source has these bytes at a position, as far as it still has anything there. What `XLOG_SWITCH` leaves unused of a segment, zeros,
/// does not count: nobody reads it, and a power cut may have left what a file had there before.
///
/// # Errors
/// When the source fails.
pub fn agrees(source: &dyn ReadWal, size: SegmentSize, at: Lsn, bytes: &[u8]) -> Result<bool, StoreError> {
    let end = Lsn(at.0 + bytes.len() as u64);
    let mut pages = vec![0; 16 * XLOG_BLCKSZ];
    let mut next = at;
    while next < end {
        let page = page_of(next);
        // A slice for each page: those past the end of a segment are not read.
        let mut slices: Vec<_> = pages.chunks_mut(XLOG_BLCKSZ).map(IoSliceMut::new).collect();
        let upto = match source.read(page, &mut slices)? {
            0 => end.min(Lsn(page.0 + XLOG_BLCKSZ as u64)),
            got => {
                let upto = end.min(Lsn(page.0 + got as u64));
                let known = &bytes[(next.0 - at.0) as usize..(upto.0 - at.0) as usize];
                let read = &pages[(next.0 - page.0) as usize..(upto.0 - page.0) as usize];
                match known.iter().zip(read).position(|(known, read)| known != read) {
                    None => upto,
                    Some(differs) => {
                        let differs = next.0 + differs as u64;
                        let segment_end = size.start_of(size.segment_of(Lsn(differs)) + 1);
                        let unused = bytes.get((differs - at.0) as usize..(segment_end.0 - at.0) as usize);
                        if unused.is_none_or(|unused| unused.iter().any(|byte| *byte != 0)) {
                            return Ok(false);
                        }
                        segment_end
                    }
                }
            }
        };
        next = upto;
    }
    Ok(true)
}

/// Whether there is WAL at a page: a file that holds that page, and not something else, as one does that was made ahead.
///
/// # Errors
/// When the source fails.
pub fn has_page(source: &dyn ReadWal, format: &WalFormat, page: Lsn) -> Result<bool, StoreError> {
    let mut buffer = [0; XLOG_BLCKSZ];
    if !source.has_segment(page)? || source.read(page, &mut [IoSliceMut::new(&mut buffer)])? < XLOG_BLCKSZ {
        return Ok(false);
    }
    Ok(is_page(&buffer, page, format, source.timeline_at(page)))
}

/// Whether these bytes, from a file of a timeline, are the page at a position.
pub fn is_page(bytes: &[u8], page: Lsn, format: &WalFormat, timeline: TimelineId) -> bool {
    let header = WalPageHeader::parse(bytes);
    header.is_some_and(|header| check_page_header(&header, page, format, timeline).is_ok())
}

/// Whether WAL goes on past a page that is not valid, in its segment or at the beginning of a later one: then it is damaged there, or some is
/// missing, and it does not end.
///
/// # Errors
/// When the source fails.
pub fn goes_on_past(source: &dyn ReadWal, format: &WalFormat, page: Lsn) -> Result<bool, StoreError> {
    let size = format.segment_size;
    let segment_end = size.start_of(size.segment_of(page) + 1);
    let mut at = Lsn(page_of(page).0 + XLOG_BLCKSZ as u64);
    while at < segment_end && source.has_segment(page)? {
        if has_page(source, format, at)? {
            return Ok(true);
        }
        at = Lsn(at.0 + XLOG_BLCKSZ as u64);
    }
    Ok(has_page(source, format, segment_end)? || source.goes_on_after(segment_end, format)?)
}
