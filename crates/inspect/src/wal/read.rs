//! One record after the other, from segment files.

use std::io::IoSliceMut;
use std::ops::ControlFlow;
use std::path::PathBuf;

use walrider_layout::wal::{END_OF_POSITIONS, RECORD_HEADER_SIZE, page_header_size, page_of};
use walrider_layout::{Lsn, XLOG_BLCKSZ, maxalign};
use walrider_store::read::{ReadWal, fill, goes_on_past};
use walrider_wal::decode::{Invalid, PIECE, Span, Status, Stretch, is_switch};
use walrider_wal::record::Record;

use super::WalError;
use super::files::WalFiles;

const PAGE: u64 = XLOG_BLCKSZ as u64;
/// Bytes that are read and decoded at once: the smallest segment, so that none lies across two files.
const WINDOW: u64 = 1 << 20;

/// How reading ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The caller wanted no more records, or they are past the end asked for.
    Enough,
    /// No valid record follows, and no other WAL either.
    EndOfWal {
        /// Where a record was expected.
        at: Lsn,
        /// Why there is none.
        why: Invalid,
    },
    /// The last file ends, and so does the last record.
    EndOfFiles {
        /// Where the next record would begin.
        at: Lsn,
    },
}

/// Which records are read: those that begin at or past `start` and end at or before `end`.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Inclusive; need not be where a record begins. Without, the beginning of the first segment.
    pub start: Option<Lsn>,
    /// Exclusive.
    pub end: Option<Lsn>,
}

/// Hands the records in one directory, or in the files named, to `take`, in order.
///
/// # Errors
/// What [`WalError`] lists, an end of the WAL before the end asked for among it; and those of `take`.
pub fn each_record<E: From<WalError>>(
    sources: &[PathBuf],
    range: Range,
    take: impl FnMut(&Record<'_>) -> Result<ControlFlow<()>, E>,
) -> Result<Ended, E> {
    let ended = read_files(&WalFiles::find(sources)?, range, take)?;
    match (range.end, &ended) {
        (Some(end), Ended::EndOfWal { at, .. }) => Err(WalError::EndsEarly { at: *at, end }.into()),
        (Some(end), Ended::EndOfFiles { at }) if *at < end => Err(WalError::EndsEarly { at: *at, end }.into()),
        _ => Ok(ended),
    }
}

fn read_files<E: From<WalError>>(
    files: &WalFiles,
    range: Range,
    mut take: impl FnMut(&Record<'_>) -> Result<ControlFlow<()>, E>,
) -> Result<Ended, E> {
    let start = range.start.unwrap_or(files.start()).min(END_OF_POSITIONS);
    let mut stretch = Stretch::new();
    let (mut next, mut exact, mut last) = (page_of(start), false, Lsn::INVALID);
    loop {
        let limit = Lsn((next.0 / WINDOW + 1) * WINDOW);
        stretch.reset(next, exact, limit, files.format().segment_size);
        let status = fill(&mut stretch, files, files.format(), PIECE, |_| {}).map_err(WalError::from)?;
        if let Err(why) = stretch.follows(last) {
            return Err(files.damaged(next, page_of(next), why).into());
        }
        for &place in stretch.places() {
            let (span, bytes) = (stretch.span(place), stretch.bytes(place));
            if range.end.is_some_and(|end| last_byte(files, span, bytes) > end) {
                return Ok(Ended::Enough);
            }
            last = span.lsn;
            let record = Record::parse(files.format().major, bytes, span.lsn, span.end)
                .map_err(|why| WalError::InvalidRecord(files.describe(span.lsn), span.lsn, why))?;
            if span.lsn >= start && take(&record)?.is_break() {
                return Ok(Ended::Enough);
            }
        }
        match status {
            // Nothing at all was there, not even for a look at the first page.
            Status::Complete { next: at } if at < limit => return Ok(files.ended(at, at, Invalid::Incomplete)?),
            Status::Complete { next: further } => {
                exact |= !stretch.places().is_empty();
                next = further;
                if range.end.is_some_and(|end| next >= end) {
                    return Ok(Ended::Enough);
                }
            }
            // There were no more pages.
            Status::NeedPages { upto } => {
                let at = stretch.position();
                // The record begins before the end asked for, but does not lie before it whole.
                if range.end.is_some_and(|end| at >= end || upto > end && !files.goes_on_at(stretch.filled())) {
                    return Ok(Ended::Enough);
                }
                return Ok(files.ended(at, stretch.filled(), Invalid::Incomplete)?);
            }
            Status::Invalid { at, page, why } => return Ok(files.ended(at, page, why)?),
        }
    }
}

/// One past the last byte of a record, before alignment. That is what `pg_waldump --end` goes by.
fn last_byte(files: &WalFiles, span: Span, bytes: &[u8]) -> Lsn {
    // After a switch the next record is in the next segment; the record itself is a bare header.
    if is_switch(bytes) {
        let page_end = page_of(span.lsn).0 + PAGE;
        let crosses = span.lsn.0 + RECORD_HEADER_SIZE as u64 > page_end;
        let header = if crosses { page_header_size(Lsn(page_end), files.format().segment_size) } else { 0 };
        return Lsn(span.lsn.0 + (RECORD_HEADER_SIZE + header) as u64);
    }
    Lsn(span.end.0 - (maxalign(bytes.len()) - bytes.len()) as u64)
}

impl WalFiles {
    fn damaged(&self, at: Lsn, page: Lsn, why: Invalid) -> WalError {
        WalError::Damaged { at, file: self.describe(page), why }
    }

    /// The WAL ends at `at` if no more of it follows past `page`; else it is damaged, or some is missing.
    fn ended(&self, at: Lsn, page: Lsn, why: Invalid) -> Result<Ended, WalError> {
        if self.goes_on_at(Lsn(page_of(page).0 + PAGE))
            && self.read(page_of(page), &mut [IoSliceMut::new(&mut [0; XLOG_BLCKSZ])])? == 0
        {
            return Err(WalError::Missing { at, what: self.describe(page) });
        }
        if goes_on_past(self, self.format(), page)? {
            return Err(self.damaged(at, page, why));
        }
        if at == page && why == Invalid::Incomplete {
            return Ok(Ended::EndOfFiles { at });
        }
        Ok(Ended::EndOfWal { at, why })
    }
}
