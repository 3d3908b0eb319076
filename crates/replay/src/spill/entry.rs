//! How a record, and what it does to some pages, lies in a spilled partition: bytes in memory, or in a file of this process alone.

use walrider_layout::Lsn;
use walrider_layout::bytes::{u32_at, u64_at};
use walrider_redo::Change;
use walrider_wal::decode::Span;
use walrider_wal::record::{InvalidRecord, Record};
use walrider_wal::strip::{forget_links, strip_images};

use crate::rels::PageKey;

/// Before the record: where it begins, how far behind that it ends, how many operations follow it.
const HEADER: usize = 16;
/// An operation: the page, the kind of change, what it is about.
const OPERATION: usize = 16;
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

/// Where an entry lies in a spilled partition, in units of eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryPlace(u32);

/// Most bytes of a spilled partition that entries may lie in.
pub const MOST_BYTES: usize = (u32::MAX as usize) << 3;

/// Appends a record with what it does. Images of other pages are left out.
///
/// # Errors
/// When the record makes no sense.
pub fn put(out: &mut Vec<u8>, span: Span, record: &[u8], operations: &[Operation]) -> Result<(), InvalidRecord> {
    out.extend_from_slice(&span.lsn.0.to_le_bytes());
    out.extend_from_slice(&((span.end.0 - span.lsn.0) as u32).to_le_bytes());
    out.extend_from_slice(&(operations.len() as u32).to_le_bytes());
    let begin = out.len();
    if record.len() < LEAST_STRIPPED {
        out.extend_from_slice(record);
    } else {
        let names = |id| move |operation: &Operation| matches!(operation.change, Change::Block(known) | Change::Overwrite(known) if known == id);
        strip_images(record, |id| operations.iter().any(names(id)), out)?;
    }
    forget_links(&mut out[begin..]);
    out.resize(out.len().next_multiple_of(8), 0);
    for operation in operations {
        out.extend_from_slice(&operation.key.bits().to_le_bytes());
        let (kind, about) = match operation.change {
            Change::Block(id) => (0, id),
            Change::Overwrite(id) => (1, id),
            Change::Lock => (2, 0),
            Change::VmClear(nth) => (3, nth),
        };
        out.extend_from_slice(&[kind, about, 0, 0, 0, 0, 0, 0]);
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
        // A record begins with its length.
        let (len, count) = (u32_at(bytes, at + HEADER) as usize, u32_at(bytes, at + 12) as usize);
        at += HEADER + len.next_multiple_of(8) + count * OPERATION;
        operations += count;
    }
    operations
}

/// Hands `each` all operations of a spilled partition, with the end of the record that each is of.
pub fn each(bytes: &[u8], mut each: impl FnMut(EntryPlace, Lsn, Operation)) {
    let mut at = 0;
    while at < bytes.len() {
        let place = EntryPlace((at >> 3) as u32);
        let (Span { end, .. }, record) = self::record(bytes, place);
        let (len, count) = (record.len(), u32_at(bytes, at + 12));
        at += HEADER + len.next_multiple_of(8);
        for operation in bytes[at..at + count as usize * OPERATION].chunks_exact(OPERATION) {
            let about = operation[9];
            let change = match operation[8] {
                0 => Change::Block(about),
                1 => Change::Overwrite(about),
                2 => Change::Lock,
                _ => Change::VmClear(about),
            };
            each(place, end, Operation { key: PageKey::from_bits(u64_at(operation, 0)), change });
        }
        at += count as usize * OPERATION;
    }
}

/// Where the record of an entry is in the WAL, and its bytes.
pub fn record(bytes: &[u8], place: EntryPlace) -> (Span, &[u8]) {
    let at = (place.0 as usize) << 3;
    let lsn = u64_at(bytes, at);
    let end = lsn + u64::from(u32_at(bytes, at + 8));
    // A record begins with its length.
    let len = u32_at(bytes, at + HEADER) as usize;
    (Span { lsn: Lsn(lsn), end: Lsn(end) }, &bytes[at + HEADER..][..len])
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
