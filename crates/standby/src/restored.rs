//! What of an archive takes the place of what `pg_wal` has.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use walrider_layout::XLOG_BLCKSZ;
use walrider_layout::wal::{SegmentSize, WalPageHeader};

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
    /// `pg_wal` has pages of WAL that it lacks.
    Worse,
    /// It is none of this segment: replay says so.
    Foreign,
}

/// Compares them.
///
/// # Errors
/// One cannot be read.
pub fn compare(archived: &File, pg_wal: &Path, name: &str, size: SegmentSize) -> io::Result<Standing> {
    let Some((_, segment)) = size.parse_file_name(name) else { return Ok(Standing::Foreign) };
    let start = size.start_of(segment).0;
    let mut first = [0; XLOG_BLCKSZ];
    if read_up_to(archived, &mut first, 0)? < XLOG_BLCKSZ || !is_page(&first, start) {
        return Ok(Standing::Foreign);
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
            let read = read_up_to(file, &mut into[..wanted], at)?;
            into[read..wanted].fill(0);
        }
        if ours[..wanted] != theirs[..wanted] {
            same = false;
            let pages = ours[..wanted].chunks_exact(XLOG_BLCKSZ).zip(theirs[..wanted].chunks_exact(XLOG_BLCKSZ));
            for (nth, (our, their)) in pages.enumerate() {
                let address = start + at + (nth * XLOG_BLCKSZ) as u64;
                if is_page(our, address) && !is_page(their, address) {
                    return Ok(Standing::Worse);
                }
            }
        }
        at += wanted as u64;
    }
    Ok(if same { Standing::Same } else { Standing::Better })
}

/// Whether the first page of a segment in `pg_wal` is WAL of it: else it was made for the stream, or is an older one.
///
/// # Errors
/// It cannot be read.
pub fn is_begun(pg_wal: &Path, name: &str, size: SegmentSize) -> io::Result<bool> {
    let Some((_, segment)) = size.parse_file_name(name) else { return Ok(true) };
    let mut first = [0; XLOG_BLCKSZ];
    let read = read_up_to(&File::open(pg_wal.join(name))?, &mut first, 0)?;
    Ok(is_page(&first[..read], size.start_of(segment).0))
}

fn is_page(page: &[u8], address: u64) -> bool {
    WalPageHeader::parse(page).is_some_and(|header| header.magic != 0 && header.page_address.0 == address)
}

fn read_up_to(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < into.len() {
        match file.read_at(&mut into[len..], at + len as u64) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A segment of 1 MB, the third, with so many pages of WAL, filled with a byte.
    fn segment(pages: usize, fill: u8) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        for (nth, page) in bytes.chunks_exact_mut(XLOG_BLCKSZ).enumerate().take(pages) {
            page.fill(fill);
            page[..2].copy_from_slice(&0xD118u16.to_le_bytes());
            page[2..4].fill(0);
            page[8..16].copy_from_slice(&((3u64 << 20) + (nth * XLOG_BLCKSZ) as u64).to_le_bytes());
        }
        bytes
    }

    #[test]
    fn what_was_received_does_not_give_way_to_less() {
        let (archive, pg_wal) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let size = SegmentSize::new(1 << 20).unwrap();
        let name = size.file_name(walrider_layout::TimelineId(1), 3);
        let standing = |archived: &[u8], here: Option<&[u8]>| {
            fs::write(archive.path().join(&name), archived).unwrap();
            match here {
                Some(here) => fs::write(pg_wal.path().join(&name), here).unwrap(),
                None => drop(fs::remove_file(pg_wal.path().join(&name))),
            }
            compare(&File::open(archive.path().join(&name)).unwrap(), pg_wal.path(), &name, size).unwrap()
        };
        let (half, whole, zeros) = (segment(60, 7), segment(128, 7), vec![0; 1 << 20]);
        assert_eq!(standing(&whole, None), Standing::Better);
        assert_eq!(standing(&whole, Some(&half)), Standing::Better);
        assert_eq!(standing(&whole, Some(&zeros)), Standing::Better);
        assert_eq!(standing(&whole, Some(&whole)), Standing::Same);
        assert_eq!(standing(&half, Some(&whole)), Standing::Worse);
        assert_eq!(standing(&half[..300_000], Some(&half)), Standing::Worse);
        assert_eq!(standing(&zeros, Some(&half)), Standing::Foreign);
        let itself = File::open(pg_wal.path().join(&name)).unwrap();
        assert_eq!(compare(&itself, pg_wal.path(), &name, size).unwrap(), Standing::Itself);
        assert!(is_begun(pg_wal.path(), &name, size).unwrap());
        fs::write(pg_wal.path().join(&name), &zeros).unwrap();
        assert!(!is_begun(pg_wal.path(), &name, size).unwrap());
    }
}
