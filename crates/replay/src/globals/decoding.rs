//! Files that logical decoding leaves behind: `pg_logical/mappings` and `pg_logical/snapshots`
//! (`access/heap/rewriteheap.c`, `replication/logical/snapbuild.c`, PostgreSQL 18).
//!
//! Without a logical slot nobody reads them, and a directory with one is refused. They are still written and removed
//! as PostgreSQL does, so that the directories are the same.

use std::path::Path;

use walrider_datadir::mappings::{self, MAPPING_SIZE, MappingFile};
use walrider_datadir::{DataDirError, durable};
use walrider_layout::Lsn;
use walrider_layout::bytes::Reader;
use walrider_wal::record::Record;

use super::GlobalError;

/// `XLOG_HEAP2_REWRITE`: appends to the file of one transaction's rewrite of one catalog (`heap_xlog_logical_rewrite`).
/// Whatever is past the offset is from before a crash.
pub(super) fn redo_rewrite(root: &Path, record: &Record<'_>) -> Result<(), GlobalError> {
    let (file, offset, data) = parse_rewrite(record).ok_or(GlobalError::DataLength("heap rewrite mapping"))?;
    Ok(mappings::append(root, &file, offset, data)?)
}

/// `xl_heap_rewrite_mapping` (`access/heapam_xlog.h`): the file, where to write, the mappings.
fn parse_rewrite<'a>(record: &Record<'a>) -> Option<(MappingFile, u64, &'a [u8])> {
    let mut reader = Reader::new(record.main_data);
    let (mapped_xid, database, relation, _padding) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?);
    let (offset, count, _padding, start) = (reader.u64()?, reader.u32()?, reader.u32()?, Lsn(reader.u64()?));
    let file = MappingFile { database, relation, start, mapped_xid, rewrite_xid: record.xid() };
    Some((file, offset, reader.take((count as usize).checked_mul(MAPPING_SIZE)?)?))
}

/// Removes all of them, as a restartpoint does where there is no logical slot (`CheckPointSnapBuild`,
/// `CheckPointLogicalRewriteHeap`).
pub(super) fn checkpoint(root: &Path) -> Result<(), DataDirError> {
    remove_files(&root.join("pg_logical/snapshots"), is_snapshot)?;
    remove_files(&root.join("pg_logical/mappings"), |name| name.starts_with("map-"))
}

/// Whether this is the name of a snapshot, or of one half written: `HI-LO.snap`, then anything.
fn is_snapshot(name: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let lsn = name.split_once(".snap").and_then(|(lsn, _)| lsn.split_once('-'));
    lsn.is_some_and(|(high, low)| hex(high) && hex(low))
}

fn remove_files(directory: &Path, is_ours: impl Fn(&str) -> bool) -> Result<(), DataDirError> {
    let mut removed = false;
    for entry in durable::list_dir(directory)? {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(&is_ours) {
            removed |= durable::unlink_if_there(&entry.path())?;
        }
    }
    if removed { durable::fsync_dir(directory) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restartpoint_leaves_only_what_is_not_decodings() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["snapshots/0-15A9F28.snap", "snapshots/0-1.snap.77.tmp", "mappings/map-5-4ef-0_1-2-3"];
        let kept = ["snapshots/readme", "mappings/readme"];
        for part in ["snapshots", "mappings"] {
            std::fs::create_dir_all(dir.path().join("pg_logical").join(part)).unwrap();
        }
        for name in names.iter().chain(&kept) {
            std::fs::write(dir.path().join("pg_logical").join(name), b"").unwrap();
        }
        checkpoint(dir.path()).unwrap();
        let exists = |name: &&str| dir.path().join("pg_logical").join(name).exists();
        assert!(!names.iter().any(exists) && kept.iter().all(exists));
    }
}
