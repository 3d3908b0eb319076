//! How a record, and what it does to some pages, lies in a spilled partition: bytes in memory, or in a file of this process alone.

use walrider_layout::Lsn;
use walrider_layout::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use walrider_layout::wal::RECORD_HEADER_SIZE;
use walrider_redo::Change;
use walrider_wal::decode::Span;
use walrider_wal::record::{InvalidRecord, Record};
use walrider_wal::strip::strip_images;

use crate::rels::PageKey;

// Nobody asks a record that was decoded for the one before it and for its CRC: what must be known of it lies in these fields of
// `XLogRecord` (`access/xlogrecord.h`).
/// In the place of `xl_prev`: where the record begins.
const BEGIN: usize = 8;
/// In the padding: how many operations follow the record, which names 33 blocks at most.
const COUNT: usize = 18;
/// In the place of `xl_crc`: how far behind its begin the record ends.
const SPAN: usize = 20;

/// An operation: the page, the kind of change, what it is about.
const OPERATION: usize = 12;
/// Records and operations begin at multiples of it.
const UNIT: usize = 4;
/// Shorter records hold no image that is worth leaving out.
const LEAST_STRIPPED: usize = 512;

/// What a record does to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The page.
    pub key: PageKey,
    /// The change.
    pub change: Change,
}

/// Where an entry lies in a spilled partition, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryPlace(u32);

/// Most bytes of a spilled partition that entries may lie in.
pub const MOST_BYTES: usize = u32::MAX as usize * UNIT;

/// Appends a record with what it does. Images of other pages are left out.
///
/// # Errors
/// When the record makes no sense.
pub fn put(out: &mut Vec<u8>, span: Span, record: &[u8], operations: &[Operation]) -> Result<(), InvalidRecord> {
    let begin = out.len();
    if record.len() < LEAST_STRIPPED {
        out.extend_from_slice(record);
    } else {
        let names = |id| move |operation: &Operation| matches!(operation.change, Change::Block(known) | Change::Overwrite(known) if known == id);
        strip_images(record, |id| operations.iter().any(names(id)), out)?;
    }
    let header = out[begin..].first_chunk_mut::<RECORD_HEADER_SIZE>().ok_or(InvalidRecord::TooShort)?;
    put_u64(header, BEGIN, span.lsn.0);
    put_u16(header, COUNT, operations.len() as u16);
    put_u32(header, SPAN, (span.end.0 - span.lsn.0) as u32);
    out.resize(out.len().next_multiple_of(UNIT), 0);
    for operation in operations {
        out.extend_from_slice(&operation.key.bits().to_le_bytes());
        let (kind, about) = match operation.change {
            Change::Block(id) => (0, id),
            Change::Overwrite(id) => (1, id),
            Change::Lock => (2, 0),
            Change::VmClear(nth) => (3, nth),
        };
        out.extend_from_slice(&[kind, about, 0, 0]);
    }
    Ok(())
}

/// Appends a record that lies in `bytes`, with one of the things that it does.
pub fn copy(out: &mut Vec<u8>, bytes: &[u8], place: EntryPlace, operation: Operation) {
    let (span, record) = record(bytes, place);
    put(out, span, record, &[operation]).expect("it was put once");
}

/// How many operations there are in a spilled partition.
pub fn count(bytes: &[u8]) -> usize {
    let (mut at, mut operations) = (0, 0);
    while at < bytes.len() {
        let count = usize::from(u16_at(bytes, at + COUNT));
        at += record_at(bytes, at).len().next_multiple_of(UNIT) + count * OPERATION;
        operations += count;
    }
    operations
}

/// Hands `each` all operations of a spilled partition, with the end of the record that each is of.
pub fn each(bytes: &[u8], mut each: impl FnMut(EntryPlace, Lsn, Operation)) {
    let mut at = 0;
    while at < bytes.len() {
        let place = EntryPlace((at / UNIT) as u32);
        let (Span { end, .. }, record) = self::record(bytes, place);
        let count = usize::from(u16_at(record, COUNT));
        at += record.len().next_multiple_of(UNIT);
        for operation in bytes[at..at + count * OPERATION].chunks_exact(OPERATION) {
            let about = operation[9];
            let change = match operation[8] {
                0 => Change::Block(about),
                1 => Change::Overwrite(about),
                2 => Change::Lock,
                _ => Change::VmClear(about),
            };
            each(place, end, Operation { key: PageKey::from_bits(u64_at(operation, 0)), change });
        }
        at += count * OPERATION;
    }
}

/// A record begins with its length.
fn record_at(bytes: &[u8], at: usize) -> &[u8] {
    &bytes[at..][..u32_at(bytes, at) as usize]
}

/// Where the record of an entry is in the WAL, and its bytes.
pub fn record(bytes: &[u8], place: EntryPlace) -> (Span, &[u8]) {
    let record = record_at(bytes, place.0 as usize * UNIT);
    let lsn = u64_at(record, BEGIN);
    (Span { lsn: Lsn(lsn), end: Lsn(lsn + u64::from(u32_at(record, SPAN))) }, record)
}

/// Reads the record of an entry.
#[inline]
pub fn read<'a>(bytes: &'a [u8], place: EntryPlace, record: &mut Record<'a>) {
    let (span, bytes) = self::record(bytes, place);
    record.read(bytes, span.lsn, span.end).expect("parsed when it was planned");
}

#[cfg(test)]
mod tests {
    use walrider_layout::{BLCKSZ, ForkNumber, Major};
    use walrider_wal::record::BKPIMAGE_APPLY;
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    use super::*;

    #[test]
    fn what_was_put_comes_back() {
        let short = RecordBuilder::new(RmgrId::HEAP, 0).block(0, TEST_REL, ForkNumber::Main, 3).data(b"abcde").build();
        let page = [7; BLCKSZ];
        let long = RecordBuilder::new(RmgrId::HEAP, 0x20)
            .block(0, TEST_REL, ForkNumber::Main, 3)
            .image(BKPIMAGE_APPLY, 0, 0, page)
            .block(1, TEST_REL, ForkNumber::Main, 4)
            .image(BKPIMAGE_APPLY, 0, 0, page)
            .build();
        let op = |block, change| Operation { key: PageKey::new(5, block), change };
        let all =
            [op(3, Change::Block(0)), op(3, Change::VmClear(1)), op(9, Change::Lock), op(4, Change::Overwrite(1))];
        let span = |lsn| Span { lsn: Lsn(lsn), end: Lsn(lsn + 8) };
        let mut bytes = Vec::new();
        put(&mut bytes, span(40), &short, &all[..3]).unwrap();
        put(&mut bytes, span(80), &long, &all[3..]).unwrap();
        assert!(bytes.len() < 2 * BLCKSZ, "one image is left out");
        let mut found = Vec::new();
        each(&bytes, |place, end, operation| found.push((place, end, operation)));
        assert_eq!(count(&bytes), all.len());
        assert_eq!(found.iter().map(|found| found.2).collect::<Vec<_>>(), all);
        assert_eq!(found.iter().map(|found| found.1.0).collect::<Vec<_>>(), [48, 48, 48, 88]);
        let mut record = Record::empty(Major::V18);
        read(&bytes, found[0].0, &mut record);
        assert_eq!((record.lsn, record.blocks[0].data), (Lsn(40), &b"abcde"[..]));
        read(&bytes, found[3].0, &mut record);
        assert!(record.block(0).unwrap().image.is_none() && record.block(1).unwrap().image_applies());
        assert_eq!(super::record(&bytes, found[3].0).0, span(80));
    }
}
