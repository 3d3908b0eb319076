//! From WAL pages to records: checks page headers, joins records that cross pages, checks every CRC and the chain
//! of records (`XLogDecodeNextRecord`, `XLogReaderValidatePageHeader`, `ValidXLogRecord` in
//! `access/transam/xlogreader.c`, PostgreSQL 18).
//!
//! A [`Stretch`] is some WAL in memory. The owner of the source fills it with pages and calls
//! [`Stretch::decode`], which says when a record needs more of them. Stretches that follow one another can be
//! decoded side by side: each finds its first record by itself, and [`Stretch::follows`] checks the seam.
//!
//! Page headers are kept apart from what is between them, from the moment they are read: so each record lies in one
//! piece, however many pages it crosses, and none is ever copied.

use std::io::IoSliceMut;

use walrider_layout::bytes::{prefetch, u32_at};
use walrider_layout::wal::{
    LONG_PAGE_HEADER_SIZE, RECORD_HEADER_SIZE, RECORD_MAX_SIZE, SHORT_PAGE_HEADER_SIZE, SegmentSize, WalPageHeader,
    XLP_ALL_FLAGS, XLP_FIRST_IS_CONTRECORD, XLP_FIRST_IS_OVERWRITE_CONTRECORD, page_header_size, page_of,
};
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ, maxalign};

use crate::record::{InvalidRecord, Record, RecordHeader, crc_is_valid};
use crate::records::xlog::XLOG_SWITCH;
use crate::rmgr::RmgrId;

const PAGE: u64 = XLOG_BLCKSZ as u64;

/// WAL is read in pieces of so many bytes at most, which stay in the processor's cache until they are decoded and planned.
pub const PIECE: u64 = 256 << 10;

/// Bytes of a page behind a short header.
const SHORT_BODY: u64 = PAGE - SHORT_PAGE_HEADER_SIZE as u64;

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
    /// All records that begin in the stretch are there; the next one begins at `next` or at the first byte past
    /// the page header there.
    Complete {
        /// Where to go on.
        next: Lsn,
    },
    /// A record that begins in the stretch goes on past it: append pages up to `upto` and call again. If there
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

/// Where a record lies in the WAL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Where the record begins.
    pub lsn: Lsn,
    /// Where the next record may begin (`EndRecPtr`).
    pub end: Lsn,
}

/// Where a record of a stretch begins in memory: all that a caller that notes millions of records needs to keep. Grows from
/// record to record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(u32);

impl From<Place> for u64 {
    /// In bytes of what lies between page headers, from the beginning of the stretch.
    fn from(place: Place) -> u64 {
        place.0.into()
    }
}

impl Place {
    /// Past all records of a stretch.
    pub const END: Place = Place(u32::MAX);
}

/// A record that was just decoded.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// How many records of the stretch came before.
    pub number: u32,
    /// Where it is in memory.
    pub place: Place,
    /// Where it is in the WAL.
    pub span: Span,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// What a stretch may hold at most: places of records have 32 bits.
const MAX_BYTES: usize = u32::MAX as usize - XLOG_BLCKSZ;

const _: () = assert!(RECORD_MAX_SIZE < MAX_BYTES / 2);

/// The page that decoding is on, whose header is valid. The default one holds no position.
#[derive(Debug)]
struct CurrentPage {
    lsn: Lsn,
    /// Behind its header.
    first: Lsn,
    /// Where in `bodies` that is.
    at: usize,
}

impl Default for CurrentPage {
    fn default() -> CurrentPage {
        CurrentPage { lsn: Lsn(u64::MAX - PAGE), first: Lsn(u64::MAX), at: 0 }
    }
}

/// A stretch of WAL in memory and the records that begin in it. Reused from stretch to stretch, it allocates nothing.
#[derive(Debug, Default)]
pub struct Stretch {
    /// Position of the first page.
    start: Lsn,
    /// Records that begin here or later belong to the next stretch.
    limit: Lsn,
    segment_size: SegmentSize,
    /// Room for what pages hold behind their headers, one page's behind the other's.
    bodies: Vec<u8>,
    /// Room for their headers.
    headers: Vec<[u8; LONG_PAGE_HEADER_SIZE]>,
    /// How many pages are there.
    filled_pages: usize,
    places: Vec<Place>,
    /// Where the last record of `places` begins.
    last: Lsn,
    page: CurrentPage,
    /// Where decoding goes on; not valid before the first record was found.
    position: Lsn,
    /// Where the first record begins, finished or not, or the page that it begins on.
    begins_at: Option<Lsn>,
    first_prev: Lsn,
    /// Pages before this position have a valid header.
    checked: Lsn,
    /// Where the records begin whose continuation was never written; at most one on a page.
    overwritten: Vec<Lsn>,
}

impl Stretch {
    /// An empty stretch.
    pub fn new() -> Stretch {
        Stretch::default()
    }

    /// Bytes of memory that it holds, used or not.
    pub fn held_bytes(&self) -> usize {
        self.bodies.capacity()
            + self.headers.capacity() * LONG_PAGE_HEADER_SIZE
            + self.places.capacity() * size_of::<Place>()
            + self.overwritten.capacity() * size_of::<Lsn>()
    }

    /// Begins again at the page of `from`. Records are taken from `from` on if `exact`, else from the first record
    /// that begins at or past it; up to, not including, those that begin at `limit`.
    pub fn reset(&mut self, from: Lsn, exact: bool, limit: Lsn, segment_size: SegmentSize) {
        self.start = page_of(from);
        self.limit = limit;
        self.segment_size = segment_size;
        self.filled_pages = 0;
        self.places.clear();
        self.last = Lsn::INVALID;
        self.page = CurrentPage::default();
        self.position = if exact { from } else { self.start };
        self.begins_at = exact.then_some(from);
        self.first_prev = Lsn::INVALID;
        self.checked = self.start;
        self.overwritten.clear();
    }

    /// Room for `pages` more pages behind those that are there: a slice for each page's header and one for the rest of
    /// it. Read WAL from [`Stretch::filled`] on into them, then [`Stretch::filled_up_to`] what was really read.
    pub fn room(&mut self, pages: usize) -> Vec<IoSliceMut<'_>> {
        let from = self.filled();
        let begin = self.body_at(from);
        let end = self.body_at(Lsn(from.0 + pages as u64 * PAGE));
        // Bytes from an earlier use are about to be overwritten: no need to clear them.
        if self.bodies.len() < end {
            // All that the stretch is expected to need at once, with a page for the end of its last record.
            let expected = self.body_at(Lsn(self.limit.0.next_multiple_of(PAGE) + PAGE)).max(end);
            self.bodies.reserve_exact(expected - self.bodies.len());
            self.bodies.resize(end, 0);
        }
        if self.headers.len() < self.filled_pages + pages {
            self.headers.resize(self.filled_pages + pages, [0; LONG_PAGE_HEADER_SIZE]);
        }
        let mut rest = &mut self.bodies[begin..end];
        let mut slices = Vec::with_capacity(2 * pages);
        for (nth, header) in (0..).zip(&mut self.headers[self.filled_pages..][..pages]) {
            let header_size = page_header_size(Lsn(from.0 + nth * PAGE), self.segment_size);
            let (body, behind) = rest.split_at_mut(XLOG_BLCKSZ - header_size);
            rest = behind;
            slices.push(IoSliceMut::new(&mut header[..header_size]));
            slices.push(IoSliceMut::new(body));
        }
        slices
    }

    /// Position past the pages that are there.
    pub fn filled(&self) -> Lsn {
        Lsn(self.start.0 + self.filled_pages as u64 * PAGE)
    }

    /// The pages before `upto` are there; what is left of one that `upto` cuts does not count.
    pub fn filled_up_to(&mut self, upto: Lsn) {
        self.filled_pages = (upto.0.saturating_sub(self.start.0) / PAGE) as usize;
        self.checked = self.checked.min(self.filled());
    }

    /// Where in `bodies` a page begins.
    fn body_at(&self, page: Lsn) -> usize {
        self.body_of((page.0 - self.start.0) / PAGE)
    }

    /// The same for the page of this number, counted from `start`. Headers are left out, and that of the first page of
    /// a segment is longer.
    #[inline]
    fn body_of(&self, number: u64) -> usize {
        let pages_per_segment = self.segment_size.bytes() / PAGE;
        let segments_before = |page: u64| (page + pages_per_segment - 1) >> pages_per_segment.trailing_zeros();
        let first = self.start.0 / PAGE;
        let long = segments_before(first + number) - segments_before(first);
        (number * SHORT_BODY - long * (LONG_PAGE_HEADER_SIZE - SHORT_PAGE_HEADER_SIZE) as u64) as usize
    }

    /// Position in the WAL of a byte in `bodies`, and how many more there are of its page.
    #[inline]
    fn position_of(&self, at: usize) -> (Lsn, usize) {
        let mut number = at as u64 / SHORT_BODY;
        let mut next = self.body_of(number + 1);
        while next <= at {
            number += 1;
            next = self.body_of(number + 1);
        }
        (Lsn(self.start.0 + (number + 1) * PAGE - (next - at) as u64), next - at)
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

    /// Where the records begin that were passed over because their continuation was never written, in order.
    pub fn overwritten(&self) -> &[Lsn] {
        &self.overwritten
    }

    /// Where the last record begins, if there is one.
    pub fn last(&self) -> Option<Lsn> {
        (!self.places.is_empty()).then_some(self.last)
    }

    /// Where the records are, in order.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The place of the record of this number, or one past all records.
    pub fn place(&self, number: u32) -> Place {
        self.places.get(number as usize).copied().unwrap_or(Place::END)
    }

    /// The bytes of the record at a place of this stretch.
    #[inline]
    pub fn bytes(&self, place: Place) -> &[u8] {
        let bytes = &self.bodies[place.0 as usize..];
        &bytes[..u32_at(bytes, 0) as usize]
    }

    /// Where the record at a place is in the WAL.
    #[inline]
    pub fn span(&self, place: Place) -> Span {
        let Span { lsn, end } = self.used(place);
        Span { lsn, end: if is_switch(self.bytes(place)) { self.segment_end(end) } else { end } }
    }

    /// The same without the rest of the segment, which an `XLOG_SWITCH` leaves unused.
    #[inline]
    pub fn used(&self, place: Place) -> Span {
        let len = maxalign(self.bytes(place).len());
        let (lsn, room) = self.position_of(place.0 as usize);
        let mut end = Lsn(lsn.0 + len as u64);
        if len > room {
            // Past its last byte, even if that is the end of a page.
            end = Lsn(self.position_of(place.0 as usize + len - 1).0.0 + 1);
        }
        Span { lsn, end }
    }

    /// Takes apart the record at a place.
    ///
    /// # Errors
    /// As [`Record::read`].
    #[inline]
    pub fn read<'a>(&'a self, place: Place, record: &mut Record<'a>) -> Result<(), InvalidRecord> {
        let span = self.span(place);
        record.read(self.bytes(place), span.lsn, span.end)
    }

    /// Has the processor fetch the first bytes of a record, which will be taken apart soon.
    #[inline]
    pub fn prefetch(&self, place: Place) {
        let bytes = &self.bodies[place.0 as usize..];
        for line in [0, 64] {
            if let Some(byte) = bytes.get(line) {
                prefetch(byte);
            }
        }
    }

    /// Where the segment ends that `end`, the end of a record, is in.
    fn segment_end(&self, end: Lsn) -> Lsn {
        Lsn(end.0.next_multiple_of(self.segment_size.bytes()))
    }

    /// Whether the first record of this stretch may follow a record that begins at `last` (none known:
    /// not checked).
    ///
    /// # Errors
    /// [`Invalid::PrevLink`].
    pub fn follows(&self, last: Lsn) -> Result<(), Invalid> {
        if !self.places.is_empty() && last.is_valid() && self.first_prev != last {
            return Err(Invalid::PrevLink { found: self.first_prev, expected: last });
        }
        Ok(())
    }

    /// Reads what this stretch needs, and decodes it on the way, as [`Stretch::decode_each`]: a piece of `piece` bytes first, then
    /// larger ones, up to [`PIECE`]. `read` reads whole pages from a position on, as far as it has them, and returns how many
    /// bytes; `timeline_at` knows the timeline of the file that holds a position. WAL that is neither invalid nor complete up to
    /// the limit is all that there was.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn fill<E>(
        &mut self,
        format: &WalFormat,
        mut piece: u64,
        mut read: impl FnMut(Lsn, &mut [IoSliceMut<'_>]) -> Result<usize, E>,
        timeline_at: impl Fn(Lsn) -> TimelineId,
        mut each: impl FnMut(&Found<'_>),
    ) -> Result<Status, E> {
        let limit = Lsn(self.limit.0.next_multiple_of(PAGE));
        let mut upto = limit.min(Lsn(self.start.0 + piece));
        let mut timeline = timeline_at(self.start);
        loop {
            while self.filled() < upto {
                let from = self.filled();
                let pages = (upto.0 - from.0).min(PIECE) / PAGE;
                match read(from, &mut self.room(pages as usize))? {
                    0 => break,
                    got => self.filled_up_to(Lsn(from.0 + got as u64)),
                }
            }
            let short = self.filled() < upto;
            // A record that goes on in the next segment may do so on the next timeline.
            timeline = timeline.max(timeline_at(Lsn(self.filled().0.saturating_sub(1))));
            piece = (2 * piece).min(PIECE);
            let further = limit.min(Lsn(upto.0 + piece));
            upto = match self.decode_each(format, timeline, &mut each) {
                Status::Complete { next } if !short && next < self.limit => further,
                // What one record needs, or one piece more.
                Status::NeedPages { upto: more } if !short => more.max(further),
                status => return Ok(status),
            };
        }
    }

    /// Decodes as many records as the pages allow.
    pub fn decode(&mut self, format: &WalFormat, timeline: TimelineId) -> Status {
        self.decode_each(format, timeline, |_| {})
    }

    /// As [`Stretch::decode`], and shows each record as soon as its CRC was found right, while its bytes are in the
    /// processor's cache.
    pub fn decode_each(
        &mut self,
        format: &WalFormat,
        timeline: TimelineId,
        mut each: impl FnMut(&Found<'_>),
    ) -> Status {
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
            match self.next_record(format, timeline, &mut each) {
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

    /// Makes the page of `position` the current one. `Some`: pages up to there are needed first.
    #[cold]
    fn enter_page(&mut self, format: &WalFormat, timeline: TimelineId) -> Result<Option<Lsn>, (Lsn, Invalid)> {
        let page = page_of(self.position);
        if page.0 + PAGE > self.filled().0 {
            return Ok(Some(Lsn(page.0 + PAGE)));
        }
        let first = Lsn(page.0 + page_header_size(page, self.segment_size) as u64);
        if page >= self.checked {
            let header = self.page_header(page, format, timeline)?;
            self.checked = Lsn(page.0 + PAGE);
            let continues = header.info & XLP_FIRST_IS_CONTRECORD != 0;
            if continues && self.position <= first {
                return Err((page, Invalid::UnexpectedContinuation));
            }
        }
        if self.position == page {
            self.position = first;
        } else if self.position < first {
            return Err((page, Invalid::UnexpectedContinuation));
        }
        self.page = CurrentPage { lsn: page, first, at: self.body_at(page) };
        Ok(None)
    }

    /// Decodes the record at `position` and moves past it. `Some`: pages up to there are needed first.
    #[inline]
    fn next_record(
        &mut self,
        format: &WalFormat,
        timeline: TimelineId,
        each: &mut impl FnMut(&Found<'_>),
    ) -> Result<Option<Lsn>, (Lsn, Invalid)> {
        if self.position.0.wrapping_sub(self.page.first.0) >= PAGE - (self.page.first.0 - self.page.lsn.0)
            && let Some(upto) = self.enter_page(format, timeline)?
        {
            return Ok(Some(upto));
        }
        let CurrentPage { lsn: page, first, at } = self.page;
        let lsn = self.position;
        let at = at + (lsn.0 - first.0) as usize;
        let room = (page.0 + PAGE - lsn.0) as usize;
        // Records are aligned to 8 bytes, so the length always lies whole on the page.
        let total_len = u32_at(&self.bodies, at);
        let len = total_len as usize;
        if !(RECORD_HEADER_SIZE..=RECORD_MAX_SIZE).contains(&len) {
            return Err((page, Invalid::RecordLength(total_len)));
        }
        // A header that is whole on the page is checked before its length is believed.
        if room >= RECORD_HEADER_SIZE {
            self.check_header(at, page)?;
        }
        let mut end = if len <= room {
            Lsn(lsn.0 + maxalign(len) as u64)
        } else {
            match self.continuation(lsn, at, room, len, format, timeline)? {
                Continuation::Ends(end) => end,
                Continuation::NeedPages(upto) => return Ok(Some(upto)),
                Continuation::Overwritten(page) => {
                    self.overwritten.push(lsn);
                    self.position = page;
                    return Ok(None);
                }
            }
        };
        let bytes = &self.bodies[at..at + len];
        if !crc_is_valid(bytes) {
            return Err((page, Invalid::Crc));
        }
        if is_switch(bytes) {
            end = self.segment_end(end);
        }
        if self.places.is_empty() {
            self.first_prev = RecordHeader::parse(bytes).expect("the length was checked").prev;
        }
        let place = Place(at as u32);
        each(&Found { number: self.places.len() as u32, place, span: Span { lsn, end }, bytes });
        self.places.push(place);
        self.last = lsn;
        self.position = end;
        Ok(None)
    }

    /// Where a record ends that goes on past its page, each page on the way checked.
    fn continuation(
        &mut self,
        lsn: Lsn,
        at: usize,
        room: usize,
        len: usize,
        format: &WalFormat,
        timeline: TimelineId,
    ) -> Result<Continuation, (Lsn, Invalid)> {
        let mut page = page_of(lsn);
        let mut got = room;
        loop {
            page = Lsn(page.0 + PAGE);
            if page.0 + PAGE > self.filled().0 {
                // The length is worth more than one page once the header is checked, and the first page that goes on agrees.
                let believed = got >= RECORD_HEADER_SIZE && got > room;
                let wanted = if believed { len - got } else { 1 };
                let pages = wanted.div_ceil(XLOG_BLCKSZ - SHORT_PAGE_HEADER_SIZE) as u64;
                return Ok(Continuation::NeedPages(Lsn(page.0 + pages * PAGE)));
            }
            let header = self.page_header(page, format, timeline)?;
            if header.info & XLP_FIRST_IS_OVERWRITE_CONTRECORD != 0 {
                return Ok(Continuation::Overwritten(page));
            }
            let rest = (len - got) as u32;
            if header.info & XLP_FIRST_IS_CONTRECORD == 0 {
                return Err((page, Invalid::NoContinuation(lsn)));
            }
            if header.remaining_len != rest {
                return Err((page, Invalid::ContinuationLength(lsn, header.remaining_len, rest)));
            }
            let take = (len - got).min(XLOG_BLCKSZ - header.size());
            if got < RECORD_HEADER_SIZE && got + take >= RECORD_HEADER_SIZE {
                // The header was cut in two; it can be checked before more pages are asked for.
                self.check_header(at, page)?;
            }
            got += take;
            if got == len {
                self.checked = self.checked.max(Lsn(page.0 + PAGE));
                return Ok(Continuation::Ends(Lsn(page.0 + (header.size() + maxalign(take)) as u64)));
            }
        }
    }

    #[inline]
    fn check_header(&self, at: usize, page: Lsn) -> Result<(), (Lsn, Invalid)> {
        let header = RecordHeader::parse(&self.bodies[at..]).expect("the room was checked");
        self.check_links(&header).map_err(|why| (page, why))
    }

    /// `ValidXLogRecordHeader`.
    fn check_links(&self, header: &RecordHeader) -> Result<(), Invalid> {
        if !header.rmgr.is_valid() {
            return Err(Invalid::Rmgr(header.rmgr.0));
        }
        let expected = self.last;
        if !self.places.is_empty() {
            if header.prev != expected {
                return Err(Invalid::PrevLink { found: header.prev, expected });
            }
        } else if header.prev >= self.position {
            // The first record of the stretch: at least it refers backwards.
            return Err(Invalid::PrevLink { found: header.prev, expected: self.position });
        }
        Ok(())
    }

    /// Reads and checks a page header (`XLogReaderValidatePageHeader`).
    fn page_header(
        &self,
        page: Lsn,
        format: &WalFormat,
        timeline: TimelineId,
    ) -> Result<WalPageHeader, (Lsn, Invalid)> {
        let number = ((page.0 - self.start.0) / PAGE) as usize;
        let bytes = self.headers[..self.filled_pages].get(number).ok_or((page, Invalid::Incomplete))?;
        let header = WalPageHeader::parse(bytes).ok_or((page, Invalid::Incomplete))?;
        check_page_header(&header, page, format, timeline).map_err(|why| (page, why))?;
        Ok(header)
    }
}

/// Whether a record is an `XLOG_SWITCH`: the rest of its segment is not used.
#[inline]
pub fn is_switch(bytes: &[u8]) -> bool {
    RecordHeader::parse(bytes).is_some_and(|header| header.rmgr == RmgrId::XLOG && header.rmgr_info() == XLOG_SWITCH)
}

/// What became of a record that goes on past its page.
enum Continuation {
    /// It is whole, and ends there.
    Ends(Lsn),
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
