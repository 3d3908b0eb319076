//! WAL pages, record headers and segment files (`access/xlog_internal.h`, `access/xlogrecord.h`; the same in
//! every supported major, except the magic number).

use crate::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::{Lsn, TimelineId, XLOG_BLCKSZ};

/// Bytes of a short WAL page header (`SizeOfXLogShortPHD`).
pub const SHORT_PAGE_HEADER_SIZE: usize = 24;
/// Bytes of the long header on the first page of a segment (`SizeOfXLogLongPHD`).
pub const LONG_PAGE_HEADER_SIZE: usize = 40;
/// Bytes of a record header (`SizeOfXLogRecord`).
pub const RECORD_HEADER_SIZE: usize = 24;
/// Longest record that PostgreSQL writes (`XLogRecordMaxSize`).
pub const RECORD_MAX_SIZE: usize = 1020 * 1024 * 1024;

/// `xlp_info`: the page begins with the continuation of a record.
pub const XLP_FIRST_IS_CONTRECORD: u16 = 0x0001;
/// `xlp_info`: the long header.
pub const XLP_LONG_HEADER: u16 = 0x0002;
/// `xlp_info`: images on this page are not needed by a backup; set unless one is running.
pub const XLP_BKP_REMOVABLE: u16 = 0x0004;
/// `xlp_info`: what should continue a record from the page before was lost, and is replaced.
pub const XLP_FIRST_IS_OVERWRITE_CONTRECORD: u16 = 0x0008;
/// `xlp_info`: all bits that are defined.
pub const XLP_ALL_FLAGS: u16 = 0x000F;

/// The header of a WAL page (`XLogPageHeaderData`, `XLogLongPageHeaderData`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalPageHeader {
    /// `xlp_magic`: tells the major version.
    pub magic: u16,
    /// `xlp_info`: the `XLP_…` flags.
    pub info: u16,
    /// `xlp_tli`: timeline of the first record on the page.
    pub timeline: TimelineId,
    /// `xlp_pageaddr`: position of the page itself.
    pub page_address: Lsn,
    /// `xlp_rem_len`: bytes still to come of a record that began on an earlier page.
    pub remaining_len: u32,
    /// What only the long header has.
    pub long: Option<LongHeader>,
}

/// What a long WAL page header adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongHeader {
    /// `xlp_sysid`: the cluster's system identifier.
    pub system_identifier: u64,
    /// `xlp_seg_size`, in bytes.
    pub segment_size: u32,
    /// `xlp_xlog_blcksz`, in bytes.
    pub page_size: u32,
}

impl WalPageHeader {
    /// Reads the header at the front of `page`; `None` if there are too few bytes.
    pub fn parse(page: &[u8]) -> Option<WalPageHeader> {
        if page.len() < SHORT_PAGE_HEADER_SIZE {
            return None;
        }
        let info = u16_at(page, 2);
        let long = info & XLP_LONG_HEADER != 0;
        if long && page.len() < LONG_PAGE_HEADER_SIZE {
            return None;
        }
        Some(WalPageHeader {
            magic: u16_at(page, 0),
            info,
            timeline: TimelineId(u32_at(page, 4)),
            page_address: Lsn(u64_at(page, 8)),
            remaining_len: u32_at(page, 16),
            long: long.then(|| LongHeader {
                system_identifier: u64_at(page, 24),
                segment_size: u32_at(page, 32),
                page_size: u32_at(page, 36),
            }),
        })
    }

    /// Appends the header as it stands on the page.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut bytes = [0; LONG_PAGE_HEADER_SIZE];
        put_u16(&mut bytes, 0, self.magic);
        put_u16(&mut bytes, 2, self.info);
        put_u32(&mut bytes, 4, self.timeline.0);
        put_u64(&mut bytes, 8, self.page_address.0);
        put_u32(&mut bytes, 16, self.remaining_len);
        if let Some(long) = &self.long {
            put_u64(&mut bytes, 24, long.system_identifier);
            put_u32(&mut bytes, 32, long.segment_size);
            put_u32(&mut bytes, 36, long.page_size);
        }
        out.extend_from_slice(&bytes[..self.size()]);
    }

    /// Bytes of this header (`XLogPageHeaderSize`).
    pub fn size(&self) -> usize {
        if self.long.is_some() { LONG_PAGE_HEADER_SIZE } else { SHORT_PAGE_HEADER_SIZE }
    }
}

/// The size of WAL segments: a power of two from 1 MB to 1 GB (`IsValidWalSegSize`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSize(u32);

impl Default for SegmentSize {
    fn default() -> Self {
        SegmentSize::DEFAULT
    }
}

impl SegmentSize {
    /// PostgreSQL's default, 16 MB.
    pub const DEFAULT: SegmentSize = SegmentSize(16 << 20);

    /// The size, if PostgreSQL allows it.
    pub fn new(bytes: u32) -> Option<SegmentSize> {
        (bytes.is_power_of_two() && (1 << 20..=1 << 30).contains(&bytes)).then_some(SegmentSize(bytes))
    }

    /// In bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.0)
    }

    /// The segment that holds the byte at `lsn` (`XLByteToSeg`).
    pub fn segment_of(self, lsn: Lsn) -> u64 {
        lsn.0 / self.bytes()
    }

    /// Where a segment begins.
    pub fn start_of(self, segment: u64) -> Lsn {
        Lsn(segment.saturating_mul(self.bytes()))
    }

    /// Distance of `lsn` from the beginning of its segment (`XLogSegmentOffset`).
    pub fn offset_of(self, lsn: Lsn) -> u64 {
        lsn.0 % self.bytes()
    }

    /// The file name of a segment (`XLogFileName`).
    ///
    /// ```
    /// use walrider_layout::{Lsn, TimelineId, wal::SegmentSize};
    /// let size = SegmentSize::DEFAULT;
    /// let segment = size.segment_of(Lsn(0x1_0200_0028));
    /// assert_eq!(size.file_name(TimelineId(3), segment), "000000030000000100000002");
    /// assert_eq!(size.parse_file_name("000000030000000100000002"), Some((TimelineId(3), segment)));
    /// assert_eq!(size.parse_file_name("00000003FFFFFFFF00000002"), None);
    /// ```
    pub fn file_name(self, timeline: TimelineId, segment: u64) -> String {
        let per_id = (1 << 32) / self.bytes();
        format!("{:08X}{:08X}{:08X}", timeline.0, segment / per_id, segment % per_id)
    }

    /// The timeline and segment that a file name states; `None` if it is not the name of a segment of this size, or lies past
    /// [`END_OF_POSITIONS`].
    pub fn parse_file_name(self, name: &str) -> Option<(TimelineId, u64)> {
        if !is_segment_name(name) {
            return None;
        }
        let part = |at: usize| u32::from_str_radix(&name[at..at + 8], 16).ok();
        let per_id = (1 << 32) / self.bytes();
        let low = u64::from(part(16)?);
        let segment = u64::from(part(8)?) * per_id + low;
        (low < per_id && self.start_of(segment) < END_OF_POSITIONS).then(|| Some((TimelineId(part(0)?), segment)))?
    }
}

/// No WAL is from here on, in the last 4 GB that 64 bits can name: so a record's length can be added to every position before. PostgreSQL
/// would need centuries to come here.
pub const END_OF_POSITIONS: Lsn = Lsn(u64::MAX - u32::MAX as u64);

/// Whether a file is named like a segment of any size (`IsXLogFileName`).
pub fn is_segment_name(name: &str) -> bool {
    name.len() == 24 && is_upper_hex(name)
}

/// Whether a text is made of the digits that PostgreSQL names WAL files with.
pub(crate) fn is_upper_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte))
}

/// Bytes of header on the WAL page at `page_address`: long on the first page of a segment, else short.
pub fn page_header_size(page_address: Lsn, segment_size: SegmentSize) -> usize {
    if segment_size.offset_of(page_address) == 0 { LONG_PAGE_HEADER_SIZE } else { SHORT_PAGE_HEADER_SIZE }
}

/// Beginning of the WAL page that holds the byte at `lsn`.
pub fn page_of(lsn: Lsn) -> Lsn {
    Lsn(lsn.0 - lsn.0 % XLOG_BLCKSZ as u64)
}
