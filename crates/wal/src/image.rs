//! Full-page images: from the stored bytes back to the page (`RestoreBlockImage`, `access/transam/xlogreader.c`,
//! PostgreSQL 18).

use std::cell::RefCell;

use walrider_layout::{BLCKSZ, PageBytes};

use crate::pglz;
use crate::record::{BKPIMAGE_COMPRESS_LZ4, BKPIMAGE_COMPRESS_PGLZ, BKPIMAGE_COMPRESS_ZSTD, Image};

/// The image does not give a page.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The hole does not lie within the page.
    #[error("its hole of {1} bytes at {0} does not lie within the page")]
    Hole(u16, u16),
    /// The stored bytes and the hole are not a page together.
    #[error("it has {found} bytes, expected {expected}")]
    Length {
        /// Stored, or decompressed.
        found: usize,
        /// A page without the hole.
        expected: usize,
    },
    /// The compressed bytes do not make sense.
    #[error("it cannot be decompressed as {0}")]
    Corrupt(&'static str),
}

thread_local! {
    /// The decompressor's state, 150 KB: made once per thread, not once per image.
    static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Restores the page from its image; the hole becomes zeros.
///
/// # Errors
/// When the stored bytes, decompressed, are not exactly the page without its hole. The page is then undefined.
pub fn restore(image: &Image<'_>, page: &mut PageBytes) -> Result<(), ImageError> {
    let (hole_offset, hole_len) = (usize::from(image.hole_offset), usize::from(image.hole_len));
    if hole_offset + hole_len > BLCKSZ {
        return Err(ImageError::Hole(image.hole_offset, image.hole_len));
    }
    if !image.is_compressed() {
        return fill(image.bytes, hole_offset, hole_len, page);
    }
    // Never into the page itself: decompressors write past where they are, and a page in shared buffers has readers without a lock, of
    // visibility maps, and of tuples that they have pinned (RestoreBlockImage).
    let mut buffer = [0; BLCKSZ];
    let stored = &mut buffer[..BLCKSZ - hole_len];
    decompress(image, stored)?;
    fill(stored, hole_offset, hole_len, page)
}

/// Puts the bytes around the hole.
#[inline]
fn fill(stored: &[u8], hole_offset: usize, hole_len: usize, page: &mut PageBytes) -> Result<(), ImageError> {
    if stored.len() + hole_len != BLCKSZ {
        return Err(ImageError::Length { found: stored.len(), expected: BLCKSZ - hole_len });
    }
    let (before, behind) = stored.split_at(hole_offset);
    page[..hole_offset].copy_from_slice(before);
    page[hole_offset..hole_offset + hole_len].fill(0);
    page[hole_offset + hole_len..].copy_from_slice(behind);
    Ok(())
}

/// Decompresses into exactly all of `dest`. Should several methods be flagged, PostgreSQL takes them in this order.
fn decompress(image: &Image<'_>, dest: &mut [u8]) -> Result<(), ImageError> {
    let expected = dest.len();
    let found = if image.info & BKPIMAGE_COMPRESS_PGLZ != 0 {
        pglz::decompress(image.bytes, dest).map_err(|pglz::Corrupt| ImageError::Corrupt("pglz"))?;
        expected
    } else if image.info & BKPIMAGE_COMPRESS_LZ4 != 0 {
        lz4_flex::block::decompress_into(image.bytes, dest).map_err(|_| ImageError::Corrupt("lz4"))?
    } else {
        debug_assert_ne!(image.info & BKPIMAGE_COMPRESS_ZSTD, 0);
        unzstd(image.bytes, dest).ok_or(ImageError::Corrupt("zstd"))?
    };
    if found == expected { Ok(()) } else { Err(ImageError::Length { found, expected }) }
}

fn unzstd(source: &[u8], dest: &mut [u8]) -> Option<usize> {
    ZSTD.with_borrow_mut(|state| {
        let decompressor = match state {
            Some(decompressor) => decompressor,
            None => state.insert(zstd::bulk::Decompressor::new().ok()?),
        };
        decompressor.decompress_to_buffer(source, dest).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::BKPIMAGE_APPLY;

    /// A page that compresses well, with a hole of zeros from 400 to 8000.
    fn page_with_hole() -> PageBytes {
        let mut page = [0; BLCKSZ];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = if (400..8000).contains(&at) { 0 } else { (at / 16) as u8 | 1 };
        }
        page
    }

    fn restored(info: u8, hole: (u16, u16), bytes: &[u8]) -> Result<PageBytes, ImageError> {
        let mut page = [0xEE; BLCKSZ];
        let image = Image { info: info | BKPIMAGE_APPLY, hole_offset: hole.0, hole_len: hole.1, bytes };
        restore(&image, &mut page).map(|()| page)
    }

    /// As the compressor would leave it if it found nothing to copy.
    fn pglz_literals(bytes: &[u8]) -> Vec<u8> {
        bytes.chunks(8).flat_map(|chunk| [&[0], chunk].concat()).collect()
    }

    fn compressed(bytes: &[u8]) -> [(u8, Vec<u8>); 3] {
        [
            (BKPIMAGE_COMPRESS_PGLZ, pglz_literals(bytes)),
            (BKPIMAGE_COMPRESS_LZ4, lz4_flex::block::compress(bytes)),
            (BKPIMAGE_COMPRESS_ZSTD, zstd::bulk::compress(bytes, 3).unwrap()),
        ]
    }

    #[test]
    fn every_kind_of_image_gives_its_page() {
        let page = page_with_hole();
        let without_hole = [&page[..400], &page[8000..]].concat();
        assert_eq!(restored(0, (0, 0), &page), Ok(page));
        assert_eq!(restored(0, (400, 7600), &without_hole), Ok(page));
        for (method, bytes) in compressed(&page) {
            assert_eq!(restored(method, (0, 0), &bytes), Ok(page));
        }
        for (method, bytes) in compressed(&without_hole) {
            assert_eq!(restored(method, (400, 7600), &bytes), Ok(page));
        }
    }

    /// Made by the reference implementations of both formats (lz4 1.10, zstd 1.5.7, level 3) from the page without its
    /// hole.
    #[test]
    fn foreign_compressors_are_understood() {
        let lz4 = concat!(
            "1f0101000c1f0301000c1f0501000c1f0701000c1f0901000c1f0b01000c1f0d01000c1f0f01000c1f1101000c1f1301000c1f15",
            "01000c1f1701000c1b1901001ff501000c1ff701000c1ff901000c1ffb01000c1ffd01000c1fff01000750ffffffffff"
        );
        let zstd = concat!(
            "28b52ffd6050018d0100a00101030507090b0d0f1113151719f5f7f9fbfdff1310008d34d7b0469a6b5827cd35ac91e61ad64873",
            "0d6ba4b986896d"
        );
        for (method, hex) in [(BKPIMAGE_COMPRESS_LZ4, lz4), (BKPIMAGE_COMPRESS_ZSTD, zstd)] {
            let digits = hex.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
            let bytes: Vec<u8> = digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect();
            assert_eq!(restored(method, (400, 7600), &bytes), Ok(page_with_hole()));
        }
    }

    #[test]
    fn images_of_the_wrong_length_are_errors() {
        let page = page_with_hole();
        assert_eq!(restored(0, (0, 0), &page[1..]), Err(ImageError::Length { found: 8191, expected: 8192 }));
        assert_eq!(restored(0, (400, 7600), &page), Err(ImageError::Length { found: 8192, expected: 592 }));
        assert_eq!(restored(0, (8000, 200), &page), Err(ImageError::Hole(8000, 200)));
        for (method, bytes) in compressed(&page[..600]) {
            assert!(restored(method, (0, 0), &bytes).is_err(), "too short");
            assert!(restored(method, (400, 7600), &bytes).is_err(), "too long");
            assert!(restored(method, (0, 0), &bytes[..bytes.len() / 2]).is_err(), "cut off");
            assert!(restored(method, (0, 0), &[]).is_err(), "nothing");
        }
    }

    #[test]
    fn damaged_images_end_in_a_result() {
        let page = page_with_hole();
        for (method, bytes) in compressed(&page) {
            for at in 0..bytes.len().min(300) {
                for bit in 0..8 {
                    let mut damaged = bytes.clone();
                    damaged[at] ^= 1 << bit;
                    let _ = restored(method, (0, 0), &damaged);
                }
            }
        }
    }
}
