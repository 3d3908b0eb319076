//! Where receiving into a directory goes on (`FindStreamingStart`, `pg_receivewal.c`, PostgreSQL 18).

use std::path::Path;

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::error::{Result, SpoolError};
use crate::files::{Directory, Disk};
use crate::state::SegmentId;

/// Endings of segments that `pg_receivewal --compress` has written; it gives such a name to complete ones only.
const COMPRESSED: [&str; 2] = [".gz", ".lz4"];

/// The timeline and position at which receiving into a directory of complete and `.partial` segments goes on: past the
/// newest complete segment, or at the beginning of the first of the `.partial` ones that follow it; `None` if the directory
/// has none. Files that are too short for a complete segment are passed over.
///
/// Unlike PostgreSQL's program we may leave several `.partial` segments, when the flush of the first was slow, and all but
/// the last may have holes after a power loss: so the first of them counts.
///
/// # Errors
/// The directory cannot be read.
pub fn streaming_start(directory: &Path, size: SegmentSize) -> Result<Option<(TimelineId, Lsn)>> {
    find(&Disk::new(directory.to_owned(), false), size)
}

pub(crate) fn find(directory: &dyn Directory, size: SegmentSize) -> Result<Option<(TimelineId, Lsn)>> {
    let error = |operation, name: &str, source| SpoolError::io(operation, directory.path().join(name), source);
    let (mut complete, mut partial): (Vec<SegmentId>, Vec<SegmentId>) = (Vec::new(), Vec::new());
    for name in directory.names().map_err(|source| error("read directory", "", source))? {
        if let Some(id) = size.parse_file_name(&name) {
            let stat = directory.stat(&name).map_err(|source| error("stat file", &name, source))?;
            complete.extend(stat.filter(|stat| stat.len == size.bytes()).map(|_| id));
        } else if let Some(name) = name.strip_suffix(".partial") {
            let name = COMPRESSED.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name);
            partial.extend(size.parse_file_name(name));
        } else if let Some(name) = COMPRESSED.iter().find_map(|ending| name.strip_suffix(ending)) {
            complete.extend(size.parse_file_name(name));
        }
    }
    let newest = |ids: &[SegmentId]| ids.iter().copied().max_by_key(|&(timeline, segment)| (segment, timeline));
    let next = |(timeline, segment): SegmentId| (timeline, segment + 1);
    let (timeline, segment) = match (newest(&complete), newest(&partial)) {
        (None, None) => return Ok(None),
        (Some(complete), None) => next(complete),
        (Some((timeline, segment)), Some(last)) if (segment, timeline) >= (last.1, last.0) => next((timeline, segment)),
        (_, Some((timeline, mut segment))) => {
            let only_partial = |id| partial.contains(&id) && !complete.contains(&id);
            while segment.checked_sub(1).is_some_and(|before| only_partial((timeline, before))) {
                segment -= 1;
            }
            (timeline, segment)
        }
    };
    Ok(Some((timeline, size.start_of(segment))))
}
