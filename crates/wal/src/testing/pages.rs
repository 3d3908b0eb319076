//! For tests: lays records out on WAL pages, as `CopyXLogRecordToWAL` (`access/transam/xlog.c`) does.

use walrider_layout::wal::{
    LongHeader, SegmentSize, WalPageHeader, XLP_FIRST_IS_CONTRECORD, XLP_FIRST_IS_OVERWRITE_CONTRECORD, XLP_LONG_HEADER,
};
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ};

use super::RecordBuilder;
use crate::rmgr::RmgrId;

const PAGE: u64 = XLOG_BLCKSZ as u64;

/// WAL being written.
///
/// ```
/// use walrider_layout::{Lsn, TimelineId, wal::SegmentSize};
/// use walrider_wal::rmgr::RmgrId;
/// use walrider_wal::testing::{RecordBuilder, pages::WalBuilder};
/// let size = SegmentSize::new(1 << 20).unwrap();
/// let mut wal = WalBuilder::new(size, TimelineId(1), Lsn(3 << 20));
/// let lsn = wal.record(RecordBuilder::new(RmgrId::XLOG, 0x20).main_data([0; 10_000]));
/// assert_eq!(lsn, Lsn((3 << 20) + 40));
/// assert_eq!(wal.bytes().len(), 2 * 8192);
/// ```
#[derive(Clone)]
pub struct WalBuilder {
    size: SegmentSize,
    timeline: TimelineId,
    start: Lsn,
    bytes: Vec<u8>,
    at: Lsn,
    prev: Lsn,
}

impl WalBuilder {
    /// The `xlp_sysid` of all WAL made here.
    pub const SYSTEM_IDENTIFIER: u64 = 0x1122_3344_5566_7788;

    /// Begins at a segment's beginning.
    pub fn new(size: SegmentSize, timeline: TimelineId, start: Lsn) -> WalBuilder {
        assert_eq!(size.offset_of(start), 0);
        WalBuilder { size, timeline, start, bytes: Vec::new(), at: start, prev: Lsn(start.0 - 1) }
    }

    /// Pages that begin from here on are of this timeline.
    pub fn set_timeline(&mut self, timeline: TimelineId) {
        self.timeline = timeline;
    }

    /// Where the next record begins, or the page that it begins on.
    pub fn position(&self) -> Lsn {
        self.at
    }

    /// Forgets all from `to` on, where a record ended; the one before that begins at `prev`.
    pub fn rewind(&mut self, to: Lsn, prev: Lsn) {
        self.bytes.truncate((to.0 - self.start.0) as usize);
        (self.at, self.prev) = (to, prev);
    }

    /// What there is from one position to another.
    pub fn slice(&self, from: Lsn, to: Lsn) -> &[u8] {
        &self.bytes[(from.0 - self.start.0) as usize..(to.0 - self.start.0) as usize]
    }

    /// Appends a record; says where it begins.
    pub fn record(&mut self, record: RecordBuilder) -> Lsn {
        let (lsn, bytes) = self.begin(record);
        self.write(&bytes);
        self.align();
        self.prev = lsn;
        lsn
    }

    /// Appends a record of which only what lies on its first page was written before a crash; the next page overwrites
    /// its continuation.
    pub fn cut_record(&mut self, record: RecordBuilder) -> Lsn {
        let (lsn, bytes) = self.begin(record);
        let room = (PAGE - self.at.0 % PAGE) as usize;
        assert!(room < bytes.len(), "the record must cross a page");
        self.append(&bytes[..room]);
        self.page_header(0, XLP_FIRST_IS_OVERWRITE_CONTRECORD);
        lsn
    }

    /// Appends `XLOG_SWITCH`; the next record begins the next segment.
    pub fn switch(&mut self) -> Lsn {
        let lsn = self.record(RecordBuilder::new(RmgrId::XLOG, 0x40));
        // Of the one that it ends in, which may be the next (`ReserveXLogSwitch`).
        let segment_end = self.size.start_of(self.size.segment_of(Lsn(self.at.0 - 1)) + 1);
        while self.at < segment_end {
            let room = PAGE - self.at.0 % PAGE;
            if room == PAGE {
                self.page_header(0, 0);
            } else {
                self.append(&vec![0; room as usize]);
            }
        }
        lsn
    }

    /// All pages, the last one filled with zeros.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes.resize(bytes.len().next_multiple_of(XLOG_BLCKSZ), 0);
        bytes
    }

    /// The pages cut into segment files, the last one filled with zeros: name and contents.
    pub fn files(&self) -> Vec<(String, Vec<u8>)> {
        let first = self.size.segment_of(self.start);
        let chunks = self.bytes.chunks(self.size.bytes() as usize);
        let named = (first..).zip(chunks).map(|(number, chunk)| {
            let mut bytes = chunk.to_vec();
            bytes.resize(self.size.bytes() as usize, 0);
            (self.size.file_name(self.timeline, number), bytes)
        });
        named.collect()
    }

    fn begin(&mut self, record: RecordBuilder) -> (Lsn, Vec<u8>) {
        if self.at.0.is_multiple_of(PAGE) {
            self.page_header(0, 0);
        }
        (self.at, record.prev(self.prev).build())
    }

    fn write(&mut self, mut rest: &[u8]) {
        while !rest.is_empty() {
            if self.at.0.is_multiple_of(PAGE) {
                self.page_header(rest.len() as u32, XLP_FIRST_IS_CONTRECORD);
            }
            let room = (PAGE - self.at.0 % PAGE) as usize;
            let (now, later) = rest.split_at(room.min(rest.len()));
            self.append(now);
            rest = later;
        }
    }

    fn align(&mut self) {
        let padding = self.at.0.next_multiple_of(8) - self.at.0;
        self.append(&vec![0; padding as usize]);
    }

    fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.at = Lsn(self.at.0 + bytes.len() as u64);
    }

    fn page_header(&mut self, remaining_len: u32, flags: u16) {
        let long = self.size.offset_of(self.at) == 0;
        let mut header = Vec::new();
        WalPageHeader {
            magic: Major::V18.wal_magic(),
            info: flags | if long { XLP_LONG_HEADER } else { 0 },
            timeline: self.timeline,
            page_address: self.at,
            remaining_len,
            long: long.then_some(LongHeader {
                system_identifier: Self::SYSTEM_IDENTIFIER,
                segment_size: self.size.bytes() as u32,
                page_size: XLOG_BLCKSZ as u32,
            }),
        }
        .write(&mut header);
        self.append(&header);
    }
}
