//! Segments for tests.

use walrider_layout::wal::{LongHeader, WalPageHeader, XLP_LONG_HEADER};
use walrider_layout::{Lsn, TimelineId};

/// Bytes of the segments here.
pub const SIZE: u32 = 1 << 20;

/// A segment that has a header, and contents that tell it from others.
pub fn segment(timeline: u32, segment: u64, system_identifier: u64) -> Vec<u8> {
    let long = LongHeader { system_identifier, segment_size: SIZE, page_size: 8192 };
    let header = WalPageHeader {
        magic: 0xD118,
        info: XLP_LONG_HEADER,
        timeline: TimelineId(timeline),
        page_address: Lsn(segment * u64::from(SIZE)),
        remaining_len: 0,
        long: Some(long),
    };
    let mut contents = Vec::new();
    header.write(&mut contents);
    contents.resize(SIZE as usize, segment as u8);
    contents
}
