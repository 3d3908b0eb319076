//! `pg_filenode.map`: which files the catalogs are in that nothing else can say it of (`utils/cache/relmapper.c`,
//! PostgreSQL 18). One in `global`, one in each database.

use std::path::Path;

use walrider_layout::Oid;
use walrider_layout::bytes::{put_u32, u32_at};

use crate::durable::{read_file, write_file};
use crate::error::{DataDirError, Result};

/// Bytes of the file, and of the map in a RELMAP record (`sizeof(RelMapFile)`).
pub const RELMAP_SIZE: usize = 524;
const FILE_NAME: &str = "pg_filenode.map";
/// `RELMAPPER_FILEMAGIC`.
const MAGIC: u32 = 0x59_2717;
/// Mappings of a `pg_filenode.map` (`MAX_MAPPINGS`).
pub const MAX_MAPPINGS: u32 = 64;
const CRC_AT: usize = RELMAP_SIZE - 4;

/// Checks what PostgreSQL checks, and returns the mappings: catalog, file number.
pub fn parse(map: &[u8]) -> std::result::Result<Vec<(Oid, u32)>, String> {
    if map.len() != RELMAP_SIZE {
        return Err(format!("it has {} bytes, expected {RELMAP_SIZE}", map.len()));
    }
    let (magic, count) = (u32_at(map, 0), u32_at(map, 4));
    if magic != MAGIC {
        return Err(format!("its magic number is {magic:08X}, expected {MAGIC:08X}"));
    }
    if count > MAX_MAPPINGS {
        return Err(format!("it states {count} mappings; there are at most {MAX_MAPPINGS}"));
    }
    let (stored, computed) = (u32_at(map, CRC_AT), crc_fast::crc32_iscsi(&map[..CRC_AT]));
    if stored != computed {
        return Err(format!("its checksum is {stored:08X}, its contents give {computed:08X}"));
    }
    Ok((0..count as usize).map(|nth| (u32_at(map, 8 + nth * 8), u32_at(map, 12 + nth * 8))).collect())
}

/// Reads the map in a database's directory, or in `global`.
pub fn read(directory: &Path) -> Result<Vec<(Oid, u32)>> {
    let path = directory.join(FILE_NAME);
    let map = read_file(&path, RELMAP_SIZE as u64)?.ok_or_else(|| DataDirError::corrupt(&path, "it is missing"))?;
    parse(&map).map_err(|reason| DataDirError::corrupt(path, reason))
}

/// Replaces the map in a database's directory, or in `global`, by that of a RELMAP record, with magic number and
/// checksum as they must be; durable on return (`write_relmap_file`).
pub fn write(directory: &Path, map: &[u8]) -> Result<()> {
    let path = directory.join(FILE_NAME);
    let mut file: [u8; RELMAP_SIZE] = map.try_into().map_err(|_| {
        DataDirError::corrupt(&path, format!("a record replaces it by {} bytes, expected {RELMAP_SIZE}", map.len()))
    })?;
    if u32_at(&file, 4) > MAX_MAPPINGS {
        return Err(DataDirError::corrupt(&path, "a record replaces it by one with too many mappings"));
    }
    put_u32(&mut file, 0, MAGIC);
    let crc = crc_fast::crc32_iscsi(&file[..CRC_AT]);
    put_u32(&mut file, CRC_AT, crc);
    write_file(&path, &file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path()).is_err());
        let mut map = [0; RELMAP_SIZE];
        put_u32(&mut map, 4, 2);
        put_u32(&mut map, 8, 1259);
        put_u32(&mut map, 12, 16384);
        write(dir.path(), &map).unwrap();
        assert_eq!(read(dir.path()).unwrap(), [(1259, 16384), (0, 0)]);
        let good = std::fs::read(dir.path().join(FILE_NAME)).unwrap();
        assert_eq!(good.len(), RELMAP_SIZE);
        for at in 0..RELMAP_SIZE {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            assert!(parse(&bad).is_err(), "byte {at}");
        }
        put_u32(&mut map, 4, 65);
        assert!(write(dir.path(), &map).is_err());
        assert!(write(dir.path(), &map[1..]).is_err());
    }
}
