//! Records without the images of pages that nobody asks for: what is kept of a record for the redo of some of its blocks.

use arrayvec::ArrayVec;
use walrider_layout::bytes::{Reader, put_u32};
use walrider_layout::wal::RECORD_HEADER_SIZE;

use crate::record::{
    BKPBLOCK_HAS_IMAGE, BKPBLOCK_SAME_REL, BKPIMAGE_COMPRESS_LZ4, BKPIMAGE_COMPRESS_PGLZ, BKPIMAGE_COMPRESS_ZSTD,
    BKPIMAGE_HAS_HOLE, BLOCK_ID_DATA_LONG, BLOCK_ID_DATA_SHORT, BLOCK_ID_ORIGIN, BLOCK_ID_TOPLEVEL_XID, InvalidRecord,
    MAX_BLOCK_ID,
};

/// Stored bytes of one block: image, kept or not, and data.
struct Stored {
    image: usize,
    kept: bool,
    data: usize,
}

/// Appends a record to `out` without the images of those blocks that `keep` does not pick. Redo of a block never looks at another
/// one's image, so redo of those that were picked stays the same. The CRC is not made new: nobody checks one twice.
///
/// # Errors
/// As [`crate::record::Record::read`]; `out` then ends with a part of the record.
pub fn strip_images(bytes: &[u8], keep: impl Fn(u8) -> bool, out: &mut Vec<u8>) -> Result<(), InvalidRecord> {
    const SHORT: InvalidRecord = InvalidRecord::TooShort;
    let begin = out.len();
    out.extend_from_slice(bytes.get(..RECORD_HEADER_SIZE).ok_or(SHORT)?);
    let mut reader = Reader::new(&bytes[RECORD_HEADER_SIZE..]);
    let mut stored: ArrayVec<Stored, { MAX_BLOCK_ID as usize + 1 }> = ArrayVec::new();
    let mut payload = 0;
    while reader.rest().len() > payload {
        let header = reader.rest();
        let id = reader.u8().ok_or(SHORT)?;
        if id > MAX_BLOCK_ID {
            // The origin, the top-level transaction, the length of the main data: they stay.
            let len = match id {
                BLOCK_ID_DATA_SHORT => 2,
                BLOCK_ID_ORIGIN => 3,
                BLOCK_ID_DATA_LONG | BLOCK_ID_TOPLEVEL_XID => 5,
                _ => return Err(InvalidRecord::UndefinedBlockId(id)),
            };
            out.extend_from_slice(header.get(..len).ok_or(SHORT)?);
            reader = Reader::new(&header[len..]);
            if matches!(id, BLOCK_ID_DATA_SHORT | BLOCK_ID_DATA_LONG) {
                break;
            }
            continue;
        }
        let (flags, data) = (reader.u8().ok_or(SHORT)?, usize::from(reader.u16().ok_or(SHORT)?));
        let has_image = flags & BKPBLOCK_HAS_IMAGE != 0;
        let kept = has_image && keep(id);
        out.extend_from_slice(&header[..4]);
        let mut image = 0;
        if has_image {
            let header = reader.rest();
            image = usize::from(reader.u16().ok_or(SHORT)?);
            let _hole_offset = reader.u16().ok_or(SHORT)?;
            let info = reader.u8().ok_or(SHORT)?;
            let compressed = info & (BKPIMAGE_COMPRESS_PGLZ | BKPIMAGE_COMPRESS_LZ4 | BKPIMAGE_COMPRESS_ZSTD) != 0;
            if compressed && info & BKPIMAGE_HAS_HOLE != 0 {
                reader.u16().ok_or(SHORT)?;
            }
            if kept {
                out.extend_from_slice(&header[..header.len() - reader.rest().len()]);
            } else {
                let at = out.len() - 3;
                out[at] &= !BKPBLOCK_HAS_IMAGE;
            }
        }
        let reference = if flags & BKPBLOCK_SAME_REL != 0 { 4 } else { 16 };
        out.extend_from_slice(reader.take(reference).ok_or(SHORT)?);
        payload += image + data;
        stored.try_push(Stored { image, kept, data }).map_err(|_| InvalidRecord::BlockOutOfOrder(id))?;
    }
    for block in &stored {
        let image = reader.take(block.image).ok_or(SHORT)?;
        if block.kept {
            out.extend_from_slice(image);
        }
        out.extend_from_slice(reader.take(block.data).ok_or(SHORT)?);
    }
    out.extend_from_slice(reader.rest());
    let len = out.len() - begin;
    put_u32(&mut out[begin..], 0, len as u32);
    Ok(())
}

#[cfg(test)]
mod tests {
    use walrider_layout::{BLCKSZ, ForkNumber, Lsn};

    use super::*;
    use crate::record::BKPIMAGE_APPLY;
    use crate::rmgr::RmgrId;
    use crate::testing::{RecordBuilder, TEST_REL};

    /// All but the images that were not picked is what it was.
    #[test]
    fn only_images_go() {
        let page = |byte| [byte; BLCKSZ];
        let bytes = RecordBuilder::new(RmgrId::HEAP, 0x20)
            .block(0, TEST_REL, ForkNumber::Main, 7)
            .image(BKPIMAGE_APPLY, 0, 0, page(1))
            .data(b"zero")
            .block(1, TEST_REL, ForkNumber::VisibilityMap, 0)
            .image(BKPIMAGE_APPLY, 0, 0, page(2))
            .block(2, TEST_REL, ForkNumber::Main, 9)
            .data(b"two")
            .main_data([5; 300])
            .build();
        let whole = RecordBuilder::parse(&bytes, Lsn(40));
        for picked in [0u8, 1, 2, 9] {
            let mut out = vec![1, 2, 3];
            strip_images(&bytes, |id| id == picked, &mut out).unwrap();
            let stripped = RecordBuilder::parse(&out[3..], Lsn(40));
            assert_eq!(stripped.main_data, whole.main_data);
            for (stripped, whole) in stripped.blocks.iter().zip(&whole.blocks) {
                let mut expected = *whole;
                if whole.id != picked {
                    expected.image = None;
                }
                assert_eq!(*stripped, expected);
            }
            assert_eq!(stripped.blocks.len(), 3);
        }
    }

    #[test]
    fn cut_records_are_errors() {
        let bytes = RecordBuilder::new(RmgrId::HEAP, 0)
            .block(0, TEST_REL, ForkNumber::Main, 7)
            .image(BKPIMAGE_APPLY, 0, 0, [3; BLCKSZ])
            .main_data(b"main")
            .build();
        for len in (0..60).chain([bytes.len() / 2]) {
            // Any answer will do, as long as there is one.
            let _ = strip_images(&bytes[..len], |_| false, &mut Vec::new());
        }
        assert_eq!(strip_images(&bytes[..10], |_| true, &mut Vec::new()), Err(InvalidRecord::TooShort));
    }
}
