//! `pg_logical/replorigin_checkpoint`: how far each replication origin has been applied (`CheckPointReplicationOrigin`,
//! `StartupReplicationOrigin`; `replication/logical/origin.c`, PostgreSQL 18).

use std::path::{Path, PathBuf};

use walrider_layout::Lsn;
use walrider_layout::bytes::Reader;

use crate::durable::{read_file, write_file};
use crate::error::{DataDirError, Result};

/// `REPLICATION_STATE_MAGIC`.
const MAGIC: u32 = 0x1257_DADE;
/// Bytes per origin (`ReplicationStateOnDisk`): its number, six bytes of padding, its position.
const ENTRY_SIZE: usize = 16;
/// There are 65,534 numbers of origins.
const MAX_BYTES: u64 = 8 + 65_536 * ENTRY_SIZE as u64;

fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("pg_logical").join("replorigin_checkpoint")
}

/// Number and remote position of each origin, in the order of the file. A missing file has none.
pub fn read(data_dir: &Path) -> Result<Vec<(u16, Lsn)>> {
    let path = path(data_dir);
    let Some(contents) = read_file(&path, MAX_BYTES)? else { return Ok(Vec::new()) };
    parse(&contents).map_err(|reason| DataDirError::corrupt(path, reason))
}

/// The same, of the bytes of the file.
///
/// # Errors
/// What is wrong with them.
pub fn parse(contents: &[u8]) -> std::result::Result<Vec<(u16, Lsn)>, String> {
    let Some((body, stored)) = contents.split_last_chunk::<4>() else {
        return Err(format!("it has only {} bytes", contents.len()));
    };
    let mut reader = Reader::new(body);
    match reader.u32() {
        Some(MAGIC) => {}
        other => return Err(format!("its magic number is {:08X}, expected {MAGIC:08X}", other.unwrap_or_default())),
    }
    let entries = reader.rest();
    if !entries.len().is_multiple_of(ENTRY_SIZE) {
        return Err(format!("{} bytes cannot be its length", contents.len()));
    }
    let (stored, computed) = (u32::from_le_bytes(*stored), crc_fast::crc32_iscsi(body));
    if stored != computed {
        return Err(format!("its checksum is {stored:08X}, its contents give {computed:08X}"));
    }
    let entry = |entry: &[u8]| {
        let mut reader = Reader::new(entry);
        let origin = reader.u16()?;
        reader.take(6)?;
        Some((origin, Lsn(reader.u64()?)))
    };
    Ok(entries.chunks_exact(ENTRY_SIZE).filter_map(entry).collect())
}

/// Replaces the file; durable on return.
pub fn write(data_dir: &Path, origins: impl IntoIterator<Item = (u16, Lsn)>) -> Result<()> {
    let mut contents = MAGIC.to_le_bytes().to_vec();
    for (origin, remote) in origins {
        contents.extend_from_slice(&u64::from(origin).to_le_bytes());
        contents.extend_from_slice(&remote.0.to_le_bytes());
    }
    let crc = crc_fast::crc32_iscsi(&contents);
    contents.extend_from_slice(&crc.to_le_bytes());
    write_file(&path(data_dir), &contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_come_back() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pg_logical")).unwrap();
        assert_eq!(read(dir.path()).unwrap(), []);
        write(dir.path(), []).unwrap();
        assert_eq!(read(dir.path()).unwrap(), []);
        let origins = [(2, Lsn(0x1_0000_0000)), (1, Lsn(5))];
        write(dir.path(), origins).unwrap();
        assert_eq!(read(dir.path()).unwrap(), origins);
        let good = std::fs::read(path(dir.path())).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(parse(&bad).is_err(), "byte {at}");
            assert!(parse(&good[..at]).is_err(), "{at} bytes");
        }
    }
}
