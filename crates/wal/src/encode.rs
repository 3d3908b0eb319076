//! WAL that Walrider writes itself: the record that ends recovery, and the pages that it lies on (`XLogRecordAssemble` in
//! `access/transam/xloginsert.c`; `AdvanceXLInsertBuffer`, `CopyXLogRecordToWAL`, `CreateCheckPoint` in
//! `access/transam/xlog.c`, PostgreSQL 17 and 18).

use walrider_layout::bytes::{put_u32, put_u64};
use walrider_layout::control::{CHECKPOINT_SIZE, CheckPoint};
use walrider_layout::wal::{
    LongHeader, RECORD_HEADER_SIZE, SegmentSize, WalPageHeader, XLP_BKP_REMOVABLE, XLP_FIRST_IS_CONTRECORD,
    XLP_LONG_HEADER, page_header_size,
};
use walrider_layout::{Lsn, Major, TimelineId, XLOG_BLCKSZ, maxalign};

use crate::crc::record_crc;
use crate::records::xlog::XLOG_CHECKPOINT_SHUTDOWN;
use crate::rmgr::RmgrId;

const PAGE: u64 = XLOG_BLCKSZ as u64;
/// Main data of up to 255 bytes follows (`XLR_BLOCK_ID_DATA_SHORT`).
const BLOCK_ID_DATA_SHORT: u8 = 255;

/// What pages of WAL say that are written now.
#[derive(Clone, Copy, Debug)]
pub struct PageFormat {
    /// Tells the magic number.
    pub major: Major,
    /// The size of segments.
    pub segment_size: SegmentSize,
    /// The cluster's identifier.
    pub system_identifier: u64,
    /// The timeline.
    pub timeline: TimelineId,
}

/// The record of a checkpoint at shutdown, or at the end of recovery. `prev`: where the record before begins.
pub fn checkpoint_shutdown(prev: Lsn, checkpoint: &CheckPoint) -> Vec<u8> {
    let mut header = [0; RECORD_HEADER_SIZE];
    let mut body = vec![BLOCK_ID_DATA_SHORT, CHECKPOINT_SIZE as u8];
    body.extend_from_slice(&checkpoint.to_bytes());
    put_u32(&mut header, 0, (RECORD_HEADER_SIZE + body.len()) as u32);
    put_u64(&mut header, 8, prev.0);
    header[16] = XLOG_CHECKPOINT_SHUTDOWN;
    header[17] = RmgrId::XLOG.0;
    let crc = record_crc(&header, &body);
    put_u32(&mut header, 20, crc);
    [&header[..], &body].concat()
}

/// Where the next record begins, when the last one ends at `end`: right there, or past the header of the page that
/// begins there.
pub fn next_record(end: Lsn, segment_size: SegmentSize) -> Lsn {
    let header = if end.0.is_multiple_of(PAGE) { page_header_size(end, segment_size) } else { 0 };
    Lsn(end.0 + header as u64)
}

/// What WAL holds from `end` on, where the record before ends, up to the end of `record`, headers of pages and the
/// alignment of the next record included.
///
/// ```
/// use walrider_layout::wal::SegmentSize;
/// use walrider_layout::{Lsn, Major, TimelineId};
/// use walrider_wal::encode::{PageFormat, append};
/// let format = PageFormat {
///     major: Major::V18,
///     segment_size: SegmentSize::DEFAULT,
///     system_identifier: 1,
///     timeline: TimelineId(2),
/// };
/// assert_eq!(append(&[7; 114], Lsn(0x100_0028), &format).len(), 120);
/// assert_eq!(append(&[7; 114], Lsn(0x100_1FF8), &format).len(), 120 + 24, "a page begins within");
/// assert_eq!(append(&[7; 114], Lsn(0x200_0000), &format).len(), 40 + 120, "a segment begins there");
/// ```
pub fn append(record: &[u8], end: Lsn, format: &PageFormat) -> Vec<u8> {
    let mut padded = record.to_vec();
    padded.resize(maxalign(record.len()), 0);
    let mut out = Vec::new();
    let mut done = 0;
    while done < padded.len() {
        let at = Lsn(end.0 + out.len() as u64);
        if at.0.is_multiple_of(PAGE) {
            // The alignment does not count. It never begins a page: pages and their headers are aligned, too.
            let remaining_len = if done > 0 { record.len() - done } else { 0 };
            page_header(at, remaining_len as u32, format).write(&mut out);
        }
        let room = PAGE - (end.0 + out.len() as u64) % PAGE;
        let upto = padded.len().min(done + room as usize);
        out.extend_from_slice(&padded[done..upto]);
        done = upto;
    }
    out
}

/// The header of the page at `at`, which begins with `remaining_len` bytes of a record from before.
fn page_header(at: Lsn, remaining_len: u32, format: &PageFormat) -> WalPageHeader {
    let long = (format.segment_size.offset_of(at) == 0).then_some(LongHeader {
        system_identifier: format.system_identifier,
        segment_size: format.segment_size.bytes() as u32,
        page_size: XLOG_BLCKSZ as u32,
    });
    let continues = if remaining_len > 0 { XLP_FIRST_IS_CONTRECORD } else { 0 };
    WalPageHeader {
        magic: format.major.wal_magic(),
        info: XLP_BKP_REMOVABLE | continues | if long.is_some() { XLP_LONG_HEADER } else { 0 },
        timeline: format.timeline,
        page_address: at,
        remaining_len,
        long,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::decode::{Status, Stretch, WalFormat};
    use crate::record::Record;
    use crate::testing::RecordBuilder;
    use crate::testing::pages::WalBuilder;

    const START: Lsn = Lsn(5 << 20);

    /// WAL of one record that ends at `target`.
    fn wal_up_to(target: Lsn, size: SegmentSize) -> WalBuilder {
        let mut wal = WalBuilder::new(size, TimelineId(1), START);
        let bytes = target.0 - START.0;
        let headers = 40 + 24 * ((bytes - 1) / PAGE);
        // The record's header, and that of long data.
        wal.record(RecordBuilder::new(RmgrId::XLOG, 0x20).main_data(vec![7; (bytes - headers) as usize - 29]));
        assert_eq!(wal.position(), target);
        wal
    }

    #[test]
    fn a_checkpoint_is_decoded_wherever_it_begins() {
        let size = SegmentSize::new(1 << 20).unwrap();
        let system_identifier = WalBuilder::SYSTEM_IDENTIFIER;
        let format = PageFormat { major: Major::V18, segment_size: size, system_identifier, timeline: TimelineId(2) };
        let wal_format =
            WalFormat { major: Major::V18, segment_size: size, system_identifier: Some(system_identifier) };
        for (boundary, before) in
            [2 * PAGE, 1 << 20].into_iter().flat_map(|to| (0..=160).step_by(8).map(move |before| (to, before)))
        {
            let end = Lsn(START.0 + boundary - before);
            let begins = next_record(end, size);
            let checkpoint = CheckPoint { redo: begins, timeline: TimelineId(2), ..CheckPoint::default() };
            let mut bytes = wal_up_to(end, size).bytes();
            bytes.truncate((end.0 - START.0) as usize);
            bytes.extend(append(&checkpoint_shutdown(Lsn(START.0 + 40), &checkpoint), end, &format));
            let past = Lsn(START.0 + bytes.len() as u64);
            bytes.resize(bytes.len().next_multiple_of(XLOG_BLCKSZ), 0);

            let mut stretch = Stretch::new();
            stretch.reset(Lsn(START.0 + 40), true, Lsn(begins.0 + 1), size);
            let got = (&bytes[..]).read_vectored(&mut stretch.room(bytes.len() / XLOG_BLCKSZ)).unwrap();
            assert_eq!(got, bytes.len());
            stretch.filled_up_to(Lsn(START.0 + got as u64));
            let status = stretch.decode(&wal_format, TimelineId(2));
            assert_eq!(status, Status::Complete { next: past }, "{before} bytes before {boundary}");
            let place = stretch.place(1);
            let span = stretch.span(place);
            assert_eq!((span.lsn, span.end), (begins, past));
            let record = Record::parse(Major::V18, stretch.bytes(place), span.lsn, span.end).unwrap();
            assert_eq!(CheckPoint::parse(record.main_data), Some(checkpoint));
        }
    }
}
