//! Files that logical decoding leaves behind: `pg_logical/mappings` and `pg_logical/snapshots`
//! (`access/heap/rewriteheap.c`, `replication/logical/snapbuild.c`, PostgreSQL 18).
//!
//! Without a logical slot nobody reads them, and a directory with one is refused. They are still written and removed
//! as PostgreSQL does, so that the directories are the same.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use walrider_datadir::{DataDirError, durable};
use walrider_layout::bytes::Reader;
use walrider_wal::record::Record;

use super::GlobalError;

const MAPPINGS_DIR: &str = "pg_logical/mappings";
const SNAPSHOTS_DIR: &str = "pg_logical/snapshots";
/// Bytes of a mapping (`LogicalRewriteMappingData`): two relations, two tuple ids.
const MAPPING_SIZE: usize = 36;

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> GlobalError {
    DataDirError::Io { operation, path: path.to_owned(), source }.into()
}

/// `XLOG_HEAP2_REWRITE`: appends to the file of one transaction's rewrite of one catalog (`heap_xlog_logical_rewrite`).
/// Whatever is past the offset is from before a crash.
pub(super) fn redo_rewrite(root: &Path, record: &Record<'_>) -> Result<(), GlobalError> {
    let write = || -> Option<(PathBuf, u64, &[u8])> {
        let mut reader = Reader::new(record.main_data);
        let (mapped_xid, database, relation, _) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?);
        let offset = u64::try_from(reader.i64()?).ok()?;
        let (mappings, _, start) = (reader.u32()?, reader.u32()?, reader.u64()?);
        let data = reader.take((mappings as usize).checked_mul(MAPPING_SIZE)?)?;
        // `LOGICAL_REWRITE_FORMAT`
        let (high, low, xid) = (start >> 32, start as u32, record.xid());
        let name = format!("map-{database:x}-{relation:x}-{high:X}_{low:X}-{mapped_xid:x}-{xid:x}");
        Some((root.join(MAPPINGS_DIR).join(name), offset, data))
    };
    let (path, offset, data) = write().ok_or(GlobalError::DataLength("heap rewrite mapping"))?;
    let open = || OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file: File = open().map_err(|error| io_error("create file", &path, error))?;
    file.set_len(offset).map_err(|error| io_error("truncate file", &path, error))?;
    file.write_all_at(data, offset).map_err(|error| io_error("write file", &path, error))?;
    file.sync_all().map_err(|error| io_error("fsync file", &path, error))
}

/// Removes all of them, as a restartpoint does where there is no logical slot (`CheckPointSnapBuild`,
/// `CheckPointLogicalRewriteHeap`).
pub(super) fn checkpoint(root: &Path) -> Result<(), GlobalError> {
    let is_snapshot = |name: &str| {
        let hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let lsn = name.split_once(".snap").map(|(lsn, _)| lsn);
        lsn.and_then(|lsn| lsn.split_once('-')).is_some_and(|(high, low)| hex(high) && hex(low))
    };
    remove_files(&root.join(SNAPSHOTS_DIR), is_snapshot)?;
    remove_files(&root.join(MAPPINGS_DIR), |name| name.starts_with("map-"))
}

fn remove_files(dir: &Path, is_ours: impl Fn(&str) -> bool) -> Result<(), GlobalError> {
    let mut removed = false;
    for entry in durable::list_dir(dir)? {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(&is_ours) {
            fs::remove_file(entry.path()).map_err(|error| io_error("remove file", &entry.path(), error))?;
            removed = true;
        }
    }
    if removed { Ok(durable::fsync_dir(dir)?) } else { Ok(()) }
}
