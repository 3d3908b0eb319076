//! How a file lies in an archive: a header of ours, then the contents, packed or not.
//!
//! The header is a skippable frame, which the formats of zstd and LZ4 share (RFC 8878, 3.1.2; `lz4_Frame_format.md`): `zstd -d`
//! and `lz4 -d` unpack such a file without Walrider. All numbers are little-endian:
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `184D2A57`: a skippable frame |
//! | 4 | 4 | its length without these 8 bytes: 36 |
//! | 8 | 8 | `WALRIDER` |
//! | 16 | 2 | version: 1 |
//! | 18 | 2 | packing: 0 none, 1 zstd, 2 LZ4 |
//! | 20 | 8 | bytes of the contents |
//! | 28 | 8 | bytes that follow the header |
//! | 36 | 4 | CRC-32C of the contents |
//! | 40 | 4 | CRC-32C of the bytes before it |

use std::io::{self, Read, Write};

use crc_fast::crc32_iscsi;
use walrider_layout::bytes::{u16_at, u32_at, u64_at};

/// Bytes of the header.
pub const HEADER_SIZE: usize = 44;
/// Most bytes of contents: PostgreSQL's largest segment.
pub const MAX_CONTENTS: u64 = 1 << 30;

const SKIPPABLE: u32 = 0x184D_2A57;
const MAGIC: &[u8; 8] = b"WALRIDER";
const VERSION: u16 = 1;
/// What zstd does by itself: a segment of 16 MB takes about a tenth of a second.
const ZSTD_LEVEL: i32 = 3;

/// How contents are packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// With zstd.
    #[default]
    Zstd,
    /// With LZ4, which takes less time and packs less.
    Lz4,
    /// Not at all.
    Raw,
}

impl Packing {
    /// All there are, the likeliest first.
    pub const ALL: [Packing; 3] = [Packing::Zstd, Packing::Lz4, Packing::Raw];

    /// What names of segments end in.
    pub fn ending(self) -> &'static str {
        match self {
            Packing::Zstd => "zst",
            Packing::Lz4 => "lz4",
            Packing::Raw => "raw",
        }
    }

    fn number(self) -> u16 {
        match self {
            Packing::Raw => 0,
            Packing::Zstd => 1,
            Packing::Lz4 => 2,
        }
    }
}

/// The CRC-32C that headers carry.
pub fn checksum(contents: &[u8]) -> u32 {
    crc32_iscsi(contents)
}

/// Packs contents, with a header in front.
///
/// # Errors
/// When there is no memory for it.
pub fn pack(contents: &[u8], packing: Packing) -> io::Result<Vec<u8>> {
    let mut out = vec![0; HEADER_SIZE];
    match packing {
        Packing::Raw => out.extend_from_slice(contents),
        Packing::Zstd => out.append(&mut zstd::bulk::compress(contents, ZSTD_LEVEL)?),
        Packing::Lz4 => {
            let mut encoder = lz4_flex::frame::FrameEncoder::new(out);
            encoder.write_all(contents)?;
            out = encoder.finish().map_err(io::Error::other)?;
        }
    }
    let packed = (out.len() - HEADER_SIZE) as u64;
    let mut header = Vec::with_capacity(HEADER_SIZE);
    header.extend_from_slice(&SKIPPABLE.to_le_bytes());
    header.extend_from_slice(&(HEADER_SIZE as u32 - 8).to_le_bytes());
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&packing.number().to_le_bytes());
    header.extend_from_slice(&(contents.len() as u64).to_le_bytes());
    header.extend_from_slice(&packed.to_le_bytes());
    header.extend_from_slice(&checksum(contents).to_le_bytes());
    header.extend_from_slice(&checksum(&header).to_le_bytes());
    out[..HEADER_SIZE].copy_from_slice(&header);
    Ok(out)
}

/// The contents, which are what [`pack`] was given.
///
/// # Errors
/// What is wrong with them. Contents that are returned are those that were packed.
pub fn unpack(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let Some((header, packed)) = bytes.split_at_checked(HEADER_SIZE) else {
        return Err(format!("it has {} bytes, and its header {HEADER_SIZE}", bytes.len()));
    };
    if &header[8..16] != MAGIC || u32_at(header, 0) != SKIPPABLE {
        return Err("it does not begin as what Walrider archives".into());
    }
    if u32_at(header, 40) != checksum(&header[..40]) {
        return Err("the checksum of its header does not match".into());
    }
    if u16_at(header, 16) != VERSION {
        return Err(format!("it has version {}, and this Walrider reads {VERSION}", u16_at(header, 16)));
    }
    let (size, expected) = (u64_at(header, 20), u64_at(header, 28));
    if size > MAX_CONTENTS {
        return Err(format!("its contents are said to have {size} bytes"));
    }
    if packed.len() as u64 != expected {
        return Err(format!("{} bytes follow its header instead of {expected}", packed.len()));
    }
    let size = size as usize;
    let contents = match u16_at(header, 18) {
        0 => Ok(packed.to_vec()),
        1 => zstd::bulk::decompress(packed, size),
        2 => {
            let mut contents = Vec::with_capacity(size);
            let decoder = lz4_flex::frame::FrameDecoder::new(packed);
            decoder.take(size as u64 + 1).read_to_end(&mut contents).map(|_| contents)
        }
        other => return Err(format!("it is packed in a way that this Walrider does not know ({other})")),
    };
    let contents = contents.map_err(|error| format!("it does not unpack: {error}"))?;
    if contents.len() != size {
        return Err(format!("it unpacks to {} bytes instead of {size}", contents.len()));
    }
    if checksum(&contents) != u32_at(header, 36) {
        return Err("the checksum of its contents does not match".into());
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents() -> Vec<u8> {
        (0..600u32).flat_map(|number| (number / 7).to_le_bytes()).collect()
    }

    #[test]
    fn what_is_packed_unpacks() {
        for packing in Packing::ALL {
            for contents in [Vec::new(), contents()] {
                assert_eq!(unpack(&pack(&contents, packing).unwrap()).unwrap(), contents, "{packing:?}");
            }
        }
    }

    /// Of a bit that flips, either it is told, or the contents are the same: the formats have bits that mean nothing.
    #[test]
    fn damage_is_found() {
        for packing in Packing::ALL {
            let good = pack(&contents(), packing).unwrap();
            let mut told = 0;
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                match unpack(&bad) {
                    Ok(read) => assert!(bit >= HEADER_SIZE * 8 && read == contents(), "{packing:?}: bit {bit}"),
                    Err(_) => told += 1,
                }
            }
            assert!(told > good.len() * 8 - 64, "{packing:?}: {told} of {}", good.len() * 8);
            for len in [0, 43, 44, good.len() - 1] {
                assert!(unpack(&good[..len]).is_err(), "{packing:?}: {len}");
            }
            assert!(unpack(&[&good[..], b"x"].concat()).is_err());
        }
    }

    /// Other programs skip the header.
    #[test]
    fn zstd_alone_unpacks_it() {
        let packed = pack(&contents(), Packing::Zstd).unwrap();
        assert_eq!(zstd::stream::decode_all(&packed[..]).unwrap(), contents());
    }
}
