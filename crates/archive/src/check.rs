//! Whether a file is what its name says.

use walrider_layout::wal::{SegmentSize, WalPageHeader};

use crate::name::WalName;

/// What a segment says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentFacts {
    /// The cluster's system identifier.
    pub system_identifier: u64,
    /// How long the cluster's segments are.
    pub size: SegmentSize,
    /// Its number.
    pub segment: u64,
}

/// The upper byte of all magic numbers that WAL pages have had since 2013 (`XLOG_PAGE_MAGIC`): which major has written a
/// segment is nothing to an archive.
const MAGIC: u16 = 0xD1;

/// Checks the size and the first page header of a segment against its name.
///
/// # Errors
/// What does not match.
pub fn segment(name: &WalName, contents: &[u8]) -> Result<SegmentFacts, String> {
    let size = u32::try_from(contents.len()).ok().and_then(SegmentSize::new);
    let size = size.ok_or_else(|| format!("no segment has {} bytes", contents.len()))?;
    let header = WalPageHeader::parse(contents).filter(|header| header.magic >> 8 == MAGIC);
    let header = header.ok_or("it does not begin with the header of a WAL page")?;
    let long = header.long.ok_or("its first page has no long header")?;
    if u64::from(long.segment_size) != size.bytes() {
        return Err(format!("it has {} bytes, and its header says {}", size.bytes(), long.segment_size));
    }
    let (timeline, segment) = size
        .parse_file_name(name.as_str().get(..24).unwrap_or_default())
        .ok_or_else(|| format!("no segment of {} bytes has this name", size.bytes()))?;
    let (begins, expected) = (header.page_address, size.start_of(segment));
    if begins != expected {
        return Err(format!("it begins at {begins}, and its name says {expected}"));
    }
    // The first segment of a timeline begins with a copy of what its parent has written.
    if header.timeline > timeline {
        return Err(format!("it is of timeline {}, and its name says {}", header.timeline.0, timeline.0));
    }
    Ok(SegmentFacts { system_identifier: long.system_identifier, size, segment })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn check(name: &str, contents: &[u8]) -> Result<SegmentFacts, String> {
        segment(&WalName::parse(name).unwrap(), contents)
    }

    #[test]
    fn segments_are_what_their_names_say() {
        let good = testing::segment(2, 5, 77);
        let facts = check("000000020000000000000005", &good).unwrap();
        assert_eq!((facts.system_identifier, facts.segment), (77, 5));
        assert!(check("000000030000000000000005", &good).is_ok(), "a timeline begins with what its parent wrote");
        assert!(check("000000020000000000000005.partial", &good).is_ok());
        assert!(check("000000010000000000000005", &good).unwrap_err().contains("timeline 2"));
        assert!(check("000000020000000000000006", &good).unwrap_err().contains("it begins at 0/500000"));
        assert!(check("000000020000000000000005", &good[..4096]).unwrap_err().contains("4096 bytes"));
        assert!(check("000000020000000000000005", &vec![0; 1 << 20]).unwrap_err().contains("header"));
        assert!(check("000000020000000000000005", &[&good[..], &good[..]].concat()).is_err());
    }
}
