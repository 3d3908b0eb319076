//! From WAL pages to records: checks page headers, joins records that cross pages, checks every CRC and the chain
//! of records (`XLogDecodeNextRecord`, `XLogReaderValidatePageHeader`, `ValidXLogRecord` in
//! `access/transam/xlogreader.c`, PostgreSQL 18).
//!
//! A [`Stretch`] is some WAL in memory. Whoever owns the source fills it with pages and calls
//! [`Stretch::decode`], which says when a record needs more of them. Stretches that follow one another can be
//! decoded side by side: each finds its first record by itself, and [`Stretch::follows`] checks the seam.

use walrider_layout::bytes::prefetch;
use walrider_layout::wal::{
    RECORD_HEADER_SIZE, RECORD_MAX_SIZE, SHORT_PAGE_HEADER_SIZE, SegmentSize, WalPageHeader, XLP_ALL_FLAGS,
    XLP_FIRST_IS_CONTRECORD, XLP_FIRST_IS_OVERWRITE_CONTRECORD, page_header_size, page_of,
};
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ, maxalign};

use crate::record::{RecordHeader, crc_is_valid};
use crate::rmgr::RmgrId;

const PAGE: u64 = XLOG_BLCKSZ as u64;

/// `XLOG_SWITCH` (`catalog/pg_control.h`): the rest of the segment is not used.
const XLOG_SWITCH: u8 = 0x40;

/// What WAL pages are checked against.
#[derive(Clone, Copy, Debug)]
pub struct WalFormat {
    /// Tells the magic number.
    pub major: Major,
    /// The size of segments.
    pub segment_size: SegmentSize,
    /// The cluster's identifier; `None` accepts any.
    pub system_identifier: Option<u64>,
}

/// Why the WAL is not valid from some position on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Another version, or not WAL at all.
    #[error("invalid magic number {found:04X} in WAL page header{}, expected {:04X}{}", of_major(*.found),
        expected.wal_magic(), of_major(expected.wal_magic()))]
    Magic {
        /// What stands there.
        found: u16,
        /// The version at hand.
        expected: Major,
    },
    /// Undefined flags.
    #[error("invalid info bits {0:04X} in WAL page header")]
    PageInfo(u16),
    /// The first page of a segment has the long header, no other has.
    #[error("WAL page header has the wrong length for its place in the segment")]
    HeaderLength,
    /// The WAL belongs to another cluster.
    #[error("WAL file is from a database system with identifier {found}, expected {expected}")]
    SystemIdentifier {
        /// The identifier in the WAL.
        found: u64,
        /// The cluster's.
        expected: u64,
    },
    /// The segment size in the header is not the cluster's.
    #[error("WAL page header states segment size {0}, which is not the cluster's")]
    SegmentSize(u32),
    /// The WAL page size in the header is not 8192.
    #[error("WAL page header states page size {0}, expected 8192")]
    PageSize(u32),
    /// The page is from another place: an old, recycled segment.
    #[error("unexpected page address {0} in WAL page header")]
    PageAddress(Lsn),
    /// The page is from a later timeline than its file.
    #[error("unexpected timeline {0} in WAL page header")]
    Timeline(TimelineId),
    /// A record is expected where a page says that one continues.
    #[error("a record continues here, but none was begun")]
    UnexpectedContinuation,
    /// A record continues, but the page says that none does.
    #[error("the record at {0} does not continue on the next page")]
    NoContinuation(Lsn),
    /// A record continues with another length.
    #[error("the record at {0} continues with a length of {1} bytes, expected {2}")]
    ContinuationLength(Lsn, u32, u32),
    /// `xl_tot_len` is impossible (often zero: the end of WAL).
    #[error("invalid record length {0}: at least 24 bytes expected")]
    RecordLength(u32),
    /// No such resource manager.
    #[error("invalid resource manager id {0}")]
    Rmgr(u8),
    /// The chain of records is broken.
    #[error("record refers to {found} as the previous record, expected {expected}")]
    PrevLink {
        /// `xl_prev` of the record.
        found: Lsn,
        /// Where the previous record begins.
        expected: Lsn,
    },
    /// The record's bytes are not what was written.
    #[error("incorrect resource manager data checksum (CRC-32C) in record")]
    Crc,
    /// The source ends within the record.
    #[error("the record is not complete: WAL ends before it does")]
    Incomplete,
}

/// Which version writes this magic number, for a message.
fn of_major(magic: u16) -> String {
    Major::from_wal_magic(magic).map_or_else(String::new, |major| format!(" (that of PostgreSQL {})", major.number()))
}

/// What [`Stretch::decode`] came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// All records that begin in the stretch are there; the next one begins at `next` or at the first byte behind
    /// the page header there.
    Complete {
        /// Where to go on.
        next: Lsn,
    },
    /// A record that begins in the stretch goes on behind it: append pages up to `upto` and call again. If there
    /// are none, the WAL ends at [`Stretch::position`].
    NeedPages {
        /// First position that is not needed yet.
        upto: Lsn,
    },
    /// There is no valid record at `at`.
    Invalid {
        /// Where a record was expected.
        at: Lsn,
        /// The page that is to blame: the one with `at`, or one on which its record continues.
        page: Lsn,
        /// Why.
        why: Invalid,
    },
}

/// Where a decoded record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where the record begins.
    pub lsn: Lsn,
    /// Where the next record may begin (`EndRecPtr`).
    pub end: Lsn,
    at: usize,
    len: u32,
}

/// Marks a position in `joined` instead of `pages`.
const JOINED: usize = 1 << (usize::BITS - 1);

/// A stretch of WAL in memory and the records that begin in it. Reused from stretch to stretch, it allocates nothing.
#[derive(Debug, Default)]
pub struct Stretch {
    /// Position of the first page.
    start: Lsn,
    /// Records that begin here or later belong to the next stretch.
    limit: Lsn,
    /// Room for pages, of which the first `filled_bytes` are there.
    pages: Vec<u8>,
    filled_bytes: usize,
    /// Records that cross pages, joined.
    joined: Vec<u8>,
    spans: Vec<Span>,
    /// Where decoding goes on; not valid before the first record was found.
    position: Lsn,
    /// Where the first record begins, finished or not, or the page that it begins on.
    begins_at: Option<Lsn>,
    first_prev: Lsn,
    /// Pages before this position have a valid header.
    checked: Lsn,
    /// Where the last record begins whose continuation was never written.
    overwritten: Option<Lsn>,
}

impl Stretch {
    /// An empty stretch.
    pub fn new() -> Stretch {
        Stretch::default()
    }

    /// Begins anew at the page of `from`. Records are taken from `from` on if `exact`, else from the first record
    /// that begins at or behind it; up to, not including, those that begin at `limit`.
    pub fn reset(&mut self, from: Lsn, exact: bool, limit: Lsn) {
        self.start = page_of(from);
        self.limit = limit;
        self.filled_bytes = 0;
        self.joined.clear();
        self.spans.clear();
        self.position = if exact { from } else { self.start };
        self.begins_at = exact.then_some(from);
        self.first_prev = Lsn::INVALID;
        self.checked = self.start;
        self.overwritten = None;
    }

    /// The buffer behind the pages that are there, for `len` more bytes: read WAL from [`Stretch::filled`] on into
    /// it, then [`Stretch::truncate_to`] what was really read.
    pub fn extend(&mut self, len: usize) -> &mut [u8] {
        let old = self.filled_bytes;
        self.filled_bytes = old + len;
        // Bytes from an earlier use are about to be overwritten: no need to clear them.
        if self.pages.len() < self.filled_bytes {
            self.pages.resize(self.filled_bytes, 0);
        }
        &mut self.pages[old..self.filled_bytes]
    }

    /// Position behind the pages that are there.
    pub fn filled(&self) -> Lsn {
        Lsn(self.start.0 + self.filled_bytes as u64)
    }

    /// Forgets what was appended at or behind `upto`.
    pub fn truncate_to(&mut self, upto: Lsn) {
        self.filled_bytes = self.filled_bytes.min(upto.0.saturating_sub(self.start.0) as usize);
        self.checked = self.checked.min(page_of(upto));
    }

    /// Where the next record is expected.
    pub fn position(&self) -> Lsn {
        self.position
    }

    /// Position of the first page.
    pub fn start(&self) -> Lsn {
        self.start
    }

    /// Records that begin here or later belong to the next stretch.
    pub fn limit(&self) -> Lsn {
        self.limit
    }

    /// Where the first record of this stretch begins, finished or not, or the page that it begins on; `None` before
    /// decoding, and where no record begins.
    pub fn begins_at(&self) -> Option<Lsn> {
        self.begins_at
    }

    /// Where the last record begins that was passed over because its continuation was never written.
    pub fn overwritten(&self) -> Option<Lsn> {
        self.overwritten
    }

    /// The records, in order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The bytes of a record of this stretch.
    #[inline]
    pub fn bytes(&self, span: &Span) -> &[u8] {
        let len = span.len as usize;
        if span.at & JOINED != 0 {
            let at = span.at & !JOINED;
            &self.joined[at..at + len]
        } else {
            &self.pages[span.at..span.at + len]
        }
    }

    /// Has the processor fetch what [`Stretch::prefetch_record`] will need.
    #[inline]
    pub fn prefetch_span(&self, number: u32) {
        if let Some(span) = self.spans.get(number as usize) {
            prefetch(span);
        }
    }

    /// Has the processor fetch the first bytes of a record, which will be parsed soon.
    #[inline]
    pub fn prefetch_record(&self, number: u32) {
        if let Some(span) = self.spans.get(number as usize) {
            let bytes = self.bytes(span);
            prefetch(&bytes[0]);
            if let Some(byte) = bytes.get(64) {
                prefetch(byte);
            }
        }
    }

    /// Whether the first record of this stretch may follow a record that begins at `last` (none known:
    /// not checked).
    ///
    /// # Errors
    /// [`Invalid::PrevLink`].
    pub fn follows(&self, last: Lsn) -> Result<(), Invalid> {
        if !self.spans.is_empty() && last.is_valid() && self.first_prev != last {
            return Err(Invalid::PrevLink { found: self.first_prev, expected: last });
        }
        Ok(())
    }

    /// Decodes as many records as the pages allow.
    pub fn decode(&mut self, format: &WalFormat, timeline: TimelineId) -> Status {
        if self.begins_at.is_none() {
            match self.find_first(format, timeline) {
                Ok(true) => {}
                Ok(false) => return Status::Complete { next: self.filled() },
                Err((page, why)) => return Status::Invalid { at: self.position, page, why },
            }
        }
        loop {
            if self.position >= self.limit {
                return Status::Complete { next: self.position };
            }
            match self.next_record(format, timeline) {
                Ok(None) => {}
                Ok(Some(upto)) => return Status::NeedPages { upto },
                Err((page, why)) => return Status::Invalid { at: self.position, page, why },
            }
        }
    }

    /// Passes over the rest of a record that began before this stretch. False: it covers all pages.
    fn find_first(&mut self, format: &WalFormat, timeline: TimelineId) -> Result<bool, (Lsn, Invalid)> {
        loop {
            let page = self.position;
            if page >= self.filled() || page >= self.limit {
                return Ok(false);
            }
            let header = self.page_header(page, format, timeline)?;
            let room = XLOG_BLCKSZ - header.size();
            let rest = maxalign(header.remaining_len as usize);
            if header.info & XLP_FIRST_IS_CONTRECORD == 0 {
                self.position = Lsn(page.0 + header.size() as u64);
            } else if rest < room {
                self.position = Lsn(page.0 + (header.size() + rest) as u64);
            } else {
                self.position = Lsn(page.0 + PAGE);
                continue;
            }
            self.begins_at = Some(self.position);
            return Ok(true);
        }
    }

    /// Decodes the record at `position` and moves behind it. `Some`: pages up to there are needed first.
    fn next_record(&mut self, format: &WalFormat, timeline: TimelineId) -> Result<Option<Lsn>, (Lsn, Invalid)> {
        let mut lsn = self.position;
        let page = page_of(lsn);
        if page.0 + PAGE > self.filled().0 {
            return Ok(Some(Lsn(page.0 + PAGE)));
        }
        if page >= self.checked {
            let header = self.page_header(page, format, timeline)?;
            self.checked = Lsn(page.0 + PAGE);
            let continues = header.info & XLP_FIRST_IS_CONTRECORD != 0;
            if continues && lsn.0 <= page.0 + header.size() as u64 {
                return Err((page, Invalid::UnexpectedContinuation));
            }
        }
        let header_size = page_header_size(page, format.segment_size) as u64;
        if lsn == page {
            lsn = Lsn(page.0 + header_size);
            self.position = lsn;
        } else if lsn.0 < page.0 + header_size {
            return Err((page, Invalid::UnexpectedContinuation));
        }
        let at = (lsn.0 - self.start.0) as usize;
        let room = (page.0 + PAGE - lsn.0) as usize;
        // Records are aligned to 8 bytes, so the length always lies whole on the page.
        let total_len = u32::from_le_bytes(self.pages[at..at + 4].try_into().expect("four bytes"));
        let len = total_len as usize;
        if !(RECORD_HEADER_SIZE..=RECORD_MAX_SIZE).contains(&len) {
            return Err((page, Invalid::RecordLength(total_len)));
        }
        // A header that is whole on the page is checked before its length is believed.
        if room >= RECORD_HEADER_SIZE {
            self.check_header(at, page)?;
        }
        let (span_at, mut end) = if len <= room {
            (at, Lsn(lsn.0 + maxalign(len) as u64))
        } else {
            match self.join(lsn, at, room, len, format, timeline)? {
                Joined::Record(span_at, end) => (span_at, end),
                Joined::NeedPages(upto) => return Ok(Some(upto)),
                Joined::Overwritten(page) => {
                    self.overwritten = Some(lsn);
                    self.position = page;
                    return Ok(None);
                }
            }
        };
        let mut span = Span { lsn, end, at: span_at, len: total_len };
        let bytes = self.bytes(&span);
        if !crc_is_valid(bytes) {
            self.forget_joined(span_at);
            return Err((page, Invalid::Crc));
        }
        let header = RecordHeader::parse(bytes).expect("the length was checked");
        if header.rmgr == RmgrId::XLOG && header.rmgr_info() == XLOG_SWITCH {
            let size = format.segment_size.bytes();
            end = Lsn(end.0.div_ceil(size) * size);
            span.end = end;
        }
        if self.spans.is_empty() {
            self.first_prev = header.prev;
        }
        self.spans.push(span);
        self.position = end;
        Ok(None)
    }

    /// Joins a record that goes on behind its page, checking each page on the way.
    fn join(
        &mut self,
        lsn: Lsn,
        at: usize,
        room: usize,
        len: usize,
        format: &WalFormat,
        timeline: TimelineId,
    ) -> Result<Joined, (Lsn, Invalid)> {
        let joined_at = self.joined.len();
        self.joined.extend_from_slice(&self.pages[at..at + room]);
        let mut page = page_of(lsn);
        let result = loop {
            page = Lsn(page.0 + PAGE);
            let got = self.joined.len() - joined_at;
            if page.0 + PAGE > self.filled().0 {
                // A length that stands in an unchecked header is not worth more than one page.
                let wanted = if got < RECORD_HEADER_SIZE { 1 } else { len - got };
                let pages = wanted.div_ceil(XLOG_BLCKSZ - SHORT_PAGE_HEADER_SIZE) as u64;
                break Ok(Joined::NeedPages(Lsn(page.0 + pages * PAGE)));
            }
            let header = match self.page_header(page, format, timeline) {
                Ok(header) => header,
                Err(why) => break Err(why),
            };
            if header.info & XLP_FIRST_IS_OVERWRITE_CONTRECORD != 0 {
                break Ok(Joined::Overwritten(page));
            }
            let rest = (len - got) as u32;
            if header.info & XLP_FIRST_IS_CONTRECORD == 0 {
                break Err((page, Invalid::NoContinuation(lsn)));
            }
            if header.remaining_len != rest {
                break Err((page, Invalid::ContinuationLength(lsn, header.remaining_len, rest)));
            }
            let from = (page.0 - self.start.0) as usize + header.size();
            let take = (len - got).min(XLOG_BLCKSZ - header.size());
            self.joined.extend_from_slice(&self.pages[from..from + take]);
            if got < RECORD_HEADER_SIZE && got + take >= RECORD_HEADER_SIZE {
                // The header was cut in two; now it can be checked before more pages are asked for.
                let whole = RecordHeader::parse(&self.joined[joined_at..]).expect("24 bytes");
                if let Err(why) = self.check_links(&whole) {
                    break Err((page, why));
                }
            }
            if got + take == len {
                self.checked = self.checked.max(Lsn(page.0 + PAGE));
                let end = Lsn(page.0 + (header.size() + maxalign(take)) as u64);
                return Ok(Joined::Record(joined_at | JOINED, end));
            }
        };
        self.joined.truncate(joined_at);
        result
    }

    fn forget_joined(&mut self, span_at: usize) {
        if span_at & JOINED != 0 {
            self.joined.truncate(span_at & !JOINED);
        }
    }

    fn check_header(&self, at: usize, page: Lsn) -> Result<(), (Lsn, Invalid)> {
        let header = RecordHeader::parse(&self.pages[at..]).expect("the room was checked");
        self.check_links(&header).map_err(|why| (page, why))
    }

    /// `ValidXLogRecordHeader`.
    fn check_links(&self, header: &RecordHeader) -> Result<(), Invalid> {
        if !header.rmgr.is_valid() {
            return Err(Invalid::Rmgr(header.rmgr.0));
        }
        match self.spans.last() {
            Some(last) if header.prev != last.lsn => Err(Invalid::PrevLink { found: header.prev, expected: last.lsn }),
            // The first record of the stretch: at least it refers backwards.
            None if header.prev >= self.position => {
                Err(Invalid::PrevLink { found: header.prev, expected: self.position })
            }
            _ => Ok(()),
        }
    }

    /// Reads and checks a page header (`XLogReaderValidatePageHeader`).
    fn page_header(
        &self,
        page: Lsn,
        format: &WalFormat,
        timeline: TimelineId,
    ) -> Result<WalPageHeader, (Lsn, Invalid)> {
        let at = (page.0 - self.start.0) as usize;
        let bytes = self.pages[..self.filled_bytes].get(at..).unwrap_or(&[]);
        let header = WalPageHeader::parse(bytes).ok_or((page, Invalid::Incomplete))?;
        check_page_header(&header, page, format, timeline).map_err(|why| (page, why))?;
        Ok(header)
    }
}

/// What became of a record that goes on behind its page.
enum Joined {
    /// It is whole: its place and its end.
    Record(usize, Lsn),
    /// Pages up to there are needed.
    NeedPages(Lsn),
    /// Its continuation was never written; decoding goes on at this page.
    Overwritten(Lsn),
}

/// Checks a page header against its place (`XLogReaderValidatePageHeader`).
///
/// # Errors
/// The first thing that is wrong.
pub fn check_page_header(
    header: &WalPageHeader,
    page: Lsn,
    format: &WalFormat,
    timeline: TimelineId,
) -> Result<(), Invalid> {
    if header.magic != format.major.wal_magic() {
        return Err(Invalid::Magic { found: header.magic, expected: format.major });
    }
    if header.info & !XLP_ALL_FLAGS != 0 {
        return Err(Invalid::PageInfo(header.info));
    }
    if header.size() != page_header_size(page, format.segment_size) {
        return Err(Invalid::HeaderLength);
    }
    if let Some(long) = &header.long {
        match format.system_identifier {
            Some(expected) if expected != long.system_identifier => {
                return Err(Invalid::SystemIdentifier { found: long.system_identifier, expected });
            }
            _ => {}
        }
        if u64::from(long.segment_size) != format.segment_size.bytes() {
            return Err(Invalid::SegmentSize(long.segment_size));
        }
        if long.page_size != XLOG_BLCKSZ as u32 {
            return Err(Invalid::PageSize(long.page_size));
        }
    }
    if header.page_address != page {
        return Err(Invalid::PageAddress(header.page_address));
    }
    if header.timeline > timeline {
        return Err(Invalid::Timeline(header.timeline));
    }
    Ok(())
}
