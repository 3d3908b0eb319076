//! `pg_logical/mappings`: where rows went when a catalog was rewritten, for logical decoding
//! (`heap_xlog_logical_rewrite`, `CheckPointLogicalRewriteHeap`; `access/heap/rewriteheap.c`, PostgreSQL 18).

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use walrider_layout::{Lsn, Oid, TransactionId};

use crate::error::{DataDirError, IoContext, Result};

/// Bytes per mapping (`LogicalRewriteMappingData`).
pub const MAPPING_SIZE: usize = 36;

/// Which file a REWRITE record writes to (`LOGICAL_REWRITE_FORMAT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingFile {
    /// The database, 0 for shared catalogs (`mapped_db`).
    pub database: Oid,
    /// The catalog (`mapped_rel`).
    pub relation: Oid,
    /// Where the rewrite began (`start_lsn`).
    pub start: Lsn,
    /// The transaction that might need to see the rows (`mapped_xid`).
    pub mapped_xid: TransactionId,
    /// The transaction that rewrites: that of the record.
    pub rewrite_xid: TransactionId,
}

impl MappingFile {
    /// Its name.
    pub fn name(&self) -> String {
        format!(
            "map-{:x}-{:x}-{:X}_{:X}-{:x}-{:x}",
            self.database,
            self.relation,
            self.start.0 >> 32,
            self.start.0 as u32,
            self.mapped_xid,
            self.rewrite_xid
        )
    }
}

/// Cuts the file to `offset` and appends the mappings. Nothing becomes durable: without logical slots the next restartpoint
/// removes the file, and until then replay writes it again.
pub fn append(data_dir: &Path, file: &MappingFile, offset: u64, mappings: &[u8]) -> Result<()> {
    let path = data_dir.join("pg_logical").join("mappings").join(file.name());
    if i64::try_from(offset).is_err() || !mappings.len().is_multiple_of(MAPPING_SIZE) {
        return Err(DataDirError::corrupt(path, format!("a record writes {} bytes at {offset}", mappings.len())));
    }
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let handle = opened.context("create file", &path)?;
    handle.set_len(offset).context("truncate file", &path)?;
    handle.write_all_at(mappings, offset).context("write file", &path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_record_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("pg_logical/mappings")).unwrap();
        let (start, mapped_xid) = (Lsn(0x1_0A00_0028), 0x2F);
        let file = MappingFile { database: 5, relation: 1259, start, mapped_xid, rewrite_xid: 0x30 };
        append(dir.path(), &file, 0, &[1; 72]).unwrap();
        append(dir.path(), &file, 72, &[2; 36]).unwrap();
        append(dir.path(), &file, 72, &[2; 36]).unwrap();
        let written = std::fs::read(dir.path().join("pg_logical/mappings/map-5-4eb-1_A000028-2f-30")).unwrap();
        assert_eq!((written.len(), written[71], written[72]), (108, 1, 2));
        assert!(append(dir.path(), &file, u64::MAX, &[]).is_err());
        assert!(append(dir.path(), &file, 0, &[0; 5]).is_err());
    }
}
