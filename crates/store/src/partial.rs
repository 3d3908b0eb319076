//! Which of two files of a segment has more WAL.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

use walrider_layout::bytes::u64_at;
use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, XLOG_BLCKSZ};

/// Whether a partial segment has WAL behind all that the file in `pg_wal` has, which may be the copy that we left for PostgreSQL. `start` is where
/// the segment begins. Where that cannot be told, as where a segment before has left its bytes behind the end, the answer is no: PostgreSQL reads
/// the other.
///
/// # Errors
/// Files that cannot be read.
pub fn has_more(partial: &File, whole: &File, start: Lsn, size: SegmentSize) -> io::Result<bool> {
    let (mut ours, mut theirs) = ([0; XLOG_BLCKSZ], [0; XLOG_BLCKSZ]);
    for at in (0..size.bytes()).step_by(XLOG_BLCKSZ) {
        for (file, page) in [(partial, &mut ours), (whole, &mut theirs)] {
            match file.read_exact_at(page, at) {
                // It ends before.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => page.fill(0),
                read => read?,
            }
        }
        let Some(differs) = ours.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs) else { continue };
        // `xlp_pageaddr`.
        let is_of_here = |page: &[u8]| u64_at(page, 8) == start.0 + at;
        let ends = !is_of_here(&theirs) || theirs[differs..].iter().all(|&byte| byte == 0);
        return Ok(is_of_here(&ours) && ends);
    }
    Ok(false)
}
