//! The checksum of a relation page: 32 interleaved FNV-1a hashes (`storage/checksum_impl.h`, same in every
//! major since 9.3).

use crate::{BLCKSZ, BlockNumber, PageBytes};

const LANES: usize = 32;
const FNV_PRIME: u32 = 16_777_619;

/// Where each lane starts.
const SEEDS: [u32; LANES] = [
    0x5B1F36E9, 0xB8525960, 0x02AB50AA, 0x1DE66D2A, 0x79FF467A, 0x9BB9F8A3, 0x217E7CD2, 0x83E13D2C, 0xF8D4474F,
    0xE39EB970, 0x42C6AE16, 0x993216FA, 0x7B093B5D, 0x98DAFF3C, 0xF718902A, 0x0B1C9CDB, 0xE58F764B, 0x187636BC,
    0x5D7B3BB1, 0xE73DE7DE, 0x92BEC979, 0xCCA6C0B2, 0x304A0979, 0x85AA43D4, 0x783125BB, 0x6CA8EAA2, 0xE407EAC6,
    0x4B5CFC3E, 0x9FBF8C76, 0x15CA20BE, 0xF2CA9FD3, 0x959BD756,
];

/// The checksum that belongs into `pd_checksum` of a page that is not new, at block `block` of its fork
/// (counted over all segment files). The value that the page holds there now does not matter.
pub fn page_checksum(page: &PageBytes, block: BlockNumber) -> u16 {
    let mix = |sum: u32, value: u32| {
        let mixed = sum ^ value;
        mixed.wrapping_mul(FNV_PRIME) ^ (mixed >> 17)
    };
    let mut sums = SEEDS;
    for (row_number, row) in page.chunks_exact(LANES * 4).enumerate() {
        for (lane, (sum, word)) in sums.iter_mut().zip(row.chunks_exact(4)).enumerate() {
            let mut value = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            // pd_checksum, the lower half of the third word, counts as zero.
            if row_number == 0 && lane == 2 {
                value &= 0xFFFF_0000;
            }
            *sum = mix(*sum, value);
        }
    }
    for sum in &mut sums {
        *sum = mix(mix(*sum, 0), 0);
    }
    let folded = sums.iter().fold(0, |all, sum| all ^ sum) ^ block;
    (folded % 65_535 + 1) as u16
}

const _: () = assert!(BLCKSZ.is_multiple_of(LANES * 4));
