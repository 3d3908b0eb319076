//! What of an archive takes the place of what `pg_wal` has.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use walrider_datadir::wal_file::read_up_to;
use walrider_layout::{Lsn, TimelineId, XLOG_BLCKSZ};
use walrider_store::read::is_page;
use walrider_wal::decode::WalFormat;

/// Bytes that are compared at once.
const PIECE: usize = 1 << 20;

/// How the file of a segment in an archive stands to that of `pg_wal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// There is none in `pg_wal`, or what it has is worth less.
    Better,
    /// It is the same file: the archive is `pg_wal`.
    Itself,
    /// They have the same bytes.
    Same,
    /// `pg_wal` has more WAL.
    Worse,
    /// It is none of this segment, or of another cluster: replay says so.
    Foreign,
}

/// Compares them. What comes first in the one and not in the other decides: behind a hole, nothing counts.
///
/// # Errors
/// One cannot be read.
pub fn compare(archived: &File, pg_wal: &Path, name: &str, format: &WalFormat) -> io::Result<Standing> {
    let size = format.segment_size;
    let Some((timeline, segment)) = size.parse_file_name(name) else { return Ok(Standing::Foreign) };
    let begin = size.start_of(segment);
    if !has_page(archived, timeline, begin, 0, format)? {
        let is_begun = is_begun(pg_wal, name, format)?;
        return Ok(if is_begun { Standing::Worse } else { Standing::Foreign });
    }
    let here = match File::open(pg_wal.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Standing::Better),
        opened => opened?,
    };
    let inode = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
    if inode(archived)? == inode(&here)? {
        return Ok(Standing::Itself);
    }
    let (mut ours, mut theirs) = (vec![0; PIECE], vec![0; PIECE]);
    let (mut at, mut same) = (0, true);
    while at < size.bytes() {
        let wanted = PIECE.min((size.bytes() - at) as usize);
        for (file, into) in [(&here, &mut ours), (archived, &mut theirs)] {
            let read = read_up_to(file, &mut [IoSliceMut::new(&mut into[..wanted])], at, wanted)?;
            into[read..wanted].fill(0);
        }
        let pages = ours[..wanted].chunks_exact(XLOG_BLCKSZ).zip(theirs[..wanted].chunks_exact(XLOG_BLCKSZ));
        for (nth, (our, their)) in pages.enumerate().filter(|(_, (our, their))| our != their) {
            same = false;
            let page = Lsn(begin.0 + at + (nth * XLOG_BLCKSZ) as u64);
            let first = our.iter().zip(their).position(|(our, their)| our != their).unwrap_or_default();
            let ends = |page: &[u8]| page[first..].iter().all(|&byte| byte == 0);
            match (is_page(our, page, format, timeline), is_page(their, page, format, timeline)) {
                (true, false) => return Ok(Standing::Worse),
                (true, true) if ends(their) && !ends(our) => return Ok(Standing::Worse),
                (_, true) => return Ok(Standing::Better),
                // What an XLOG_SWITCH leaves, or is behind the end of WAL.
                (false, false) => {}
            }
        }
        at += wanted as u64;
    }
    Ok(if same { Standing::Same } else { Standing::Better })
}

/// Whether the last page of a segment in an archive is WAL: if not, it may not be complete, whatever its name and length say.
///
/// # Errors
/// It cannot be read.
pub fn is_full(archived: &File, name: &str, format: &WalFormat) -> io::Result<bool> {
    let size = format.segment_size;
    let last = size.bytes() - XLOG_BLCKSZ as u64;
    let Some((timeline, segment)) = size.parse_file_name(name) else { return Ok(false) };
    has_page(archived, timeline, size.start_of(segment), last, format)
}

/// Whether the first page of a segment in `pg_wal` is WAL of it: else it was made for the stream, or is an older one. One that is not there is
/// not begun.
///
/// # Errors
/// It cannot be read.
pub fn is_begun(pg_wal: &Path, name: &str, format: &WalFormat) -> io::Result<bool> {
    let size = format.segment_size;
    let Some((timeline, segment)) = size.parse_file_name(name) else { return Ok(false) };
    match File::open(pg_wal.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        opened => has_page(&opened?, timeline, size.start_of(segment), 0, format),
    }
}

/// Of the segment in which timelines before were left, their files that were ready for a stream and have none of it.
///
/// # Errors
/// One cannot be read.
pub fn useless(pg_wal: &Path, name: &str, format: &WalFormat) -> io::Result<Vec<String>> {
    let Some((timeline, segment)) = format.segment_size.parse_file_name(name) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for older in (1..timeline.0).map(|older| format.segment_size.file_name(TimelineId(older), segment)) {
        if pg_wal.join(&older).exists() && !is_begun(pg_wal, &older, format)? {
            found.push(older);
        }
    }
    Ok(found)
}

/// Whether a file of a timeline has WAL of the segment that begins at `begin` at this offset.
fn has_page(file: &File, timeline: TimelineId, begin: Lsn, offset: u64, format: &WalFormat) -> io::Result<bool> {
    let mut page = [0; XLOG_BLCKSZ];
    Ok(read_up_to(file, &mut [IoSliceMut::new(&mut page)], offset, XLOG_BLCKSZ)? == XLOG_BLCKSZ
        && is_page(&page, Lsn(begin.0 + offset), format, timeline))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use walrider_layout::Major;
    use walrider_layout::wal::SegmentSize;

    use super::*;

    const FORMAT: fn() -> WalFormat = || WalFormat {
        major: Major::V18,
        segment_size: SegmentSize::new(1 << 20).unwrap(),
        system_identifier: Some(77),
    };

    /// A segment of 1 MB, the third, with so many pages of WAL, filled with a byte.
    fn segment(pages: usize, fill: u8) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        for (nth, page) in bytes.chunks_exact_mut(XLOG_BLCKSZ).enumerate().take(pages) {
            page.fill(fill);
            let info: u16 = if nth == 0 { 2 } else { 0 };
            page[..2].copy_from_slice(&Major::V18.wal_magic().to_le_bytes());
            page[2..4].copy_from_slice(&info.to_le_bytes());
            page[4..8].copy_from_slice(&1u32.to_le_bytes());
            page[8..16].copy_from_slice(&((3u64 << 20) + (nth * XLOG_BLCKSZ) as u64).to_le_bytes());
            if nth == 0 {
                page[24..32].copy_from_slice(&77u64.to_le_bytes());
                page[32..36].copy_from_slice(&(1u32 << 20).to_le_bytes());
                page[36..40].copy_from_slice(&(XLOG_BLCKSZ as u32).to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn what_was_received_does_not_give_way_to_less() {
        let (archive, pg_wal) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let format = FORMAT();
        let name = format.segment_size.file_name(TimelineId(1), 3);
        let file = |bytes: &[u8]| {
            fs::write(archive.path().join(&name), bytes).unwrap();
            File::open(archive.path().join(&name)).unwrap()
        };
        let standing = |archived: &[u8], here: Option<&[u8]>| {
            match here {
                Some(here) => fs::write(pg_wal.path().join(&name), here).unwrap(),
                None => drop(fs::remove_file(pg_wal.path().join(&name))),
            }
            compare(&file(archived), pg_wal.path(), &name, &format).unwrap()
        };
        let (half, whole, zeros) = (segment(60, 7), segment(128, 7), vec![0; 1 << 20]);
        assert_eq!(standing(&whole, None), Standing::Better);
        assert_eq!(standing(&whole, Some(&half)), Standing::Better);
        assert_eq!(standing(&whole, Some(&zeros)), Standing::Better);
        assert_eq!(standing(&whole, Some(&whole)), Standing::Same);
        assert_eq!(standing(&half, Some(&whole)), Standing::Worse);
        assert_eq!(standing(&half[..300_000], Some(&half)), Standing::Worse);
        assert_eq!(standing(&zeros, Some(&half)), Standing::Worse);
        assert_eq!(standing(&zeros, Some(&zeros)), Standing::Foreign);
        // More and less of one page.
        let mut less = half.clone();
        less[59 * XLOG_BLCKSZ + 4000..].fill(0);
        assert_eq!((standing(&less, Some(&half)), standing(&half, Some(&less))), (Standing::Worse, Standing::Better));
        // A power failure has taken a page that was not promised: what is behind does not count.
        let mut holed = whole.clone();
        holed[20 * XLOG_BLCKSZ..21 * XLOG_BLCKSZ].fill(0);
        assert_eq!(standing(&half, Some(&holed)), Standing::Better);
        // An XLOG_SWITCH leaves zeros, and in a recycled segment what was there.
        let mut recycled = half.clone();
        recycled[60 * XLOG_BLCKSZ..].fill(9);
        assert_eq!(standing(&half, Some(&recycled)), Standing::Better);
        // Another cluster's.
        let mut foreign = whole.clone();
        foreign[24] = 78;
        assert_eq!(standing(&foreign, None), Standing::Foreign);
        assert_eq!(standing(&foreign, Some(&half)), Standing::Worse);
        let itself = File::open(pg_wal.path().join(&name)).unwrap();
        assert_eq!(compare(&itself, pg_wal.path(), &name, &format).unwrap(), Standing::Itself);
        assert!(is_begun(pg_wal.path(), &name, &format).unwrap());
        fs::write(pg_wal.path().join(&name), &zeros).unwrap();
        assert!(!is_begun(pg_wal.path(), &name, &format).unwrap());
        assert!(is_full(&file(&whole), &name, &format).unwrap() && !is_full(&file(&half), &name, &format).unwrap());
    }
}
