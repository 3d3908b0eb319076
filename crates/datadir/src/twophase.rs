//! Files of prepared transactions in `pg_twophase` (`access/transam/twophase.c`, PostgreSQL 18): the main data of the
//! PREPARE record and its checksum, under the 64-bit transaction id in 16 hexadecimal digits.

use std::path::{Path, PathBuf};

use walrider_layout::TransactionId;
use walrider_layout::bytes::u32_at;

use crate::durable::{list_dir, read_file, unlink, write_file};
use crate::error::{DataDirError, Result};

/// `TWOPHASE_MAGIC`.
const MAGIC: u32 = 0x57F9_4534;
/// Header, the record that ends the list, checksum: no file is shorter (`ReadTwoPhaseFile`).
const MIN_BYTES: usize = 72 + 8 + 4;
/// No file is longer (`MaxAllocSize`).
const MAX_BYTES: u64 = 0x3FFF_FFFF;

/// The files of one data directory.
#[derive(Clone, Debug)]
pub struct TwoPhaseFiles {
    directory: PathBuf,
}

impl TwoPhaseFiles {
    /// Those of the data directory `data_dir`.
    pub fn new(data_dir: &Path) -> TwoPhaseFiles {
        TwoPhaseFiles { directory: data_dir.join("pg_twophase") }
    }

    fn path(&self, full_xid: u64) -> PathBuf {
        self.directory.join(format!("{full_xid:016X}"))
    }

    /// The 64-bit ids of all files that are there, ascending (`restoreTwoPhaseData`).
    pub fn list(&self) -> Result<Vec<u64>> {
        let full_xid = |name: &str| {
            let upper_hex = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
            let ours = name.len() == 16 && name.bytes().all(upper_hex);
            ours.then(|| u64::from_str_radix(name, 16).ok()).flatten()
        };
        Ok(list_dir(&self.directory)?.iter().filter_map(|entry| full_xid(entry.file_name().to_str()?)).collect())
    }

    /// The contents of a file without the checksum: the main data of the PREPARE record. Everything that
    /// PostgreSQL checks has been checked.
    pub fn read(&self, full_xid: u64) -> Result<Vec<u8>> {
        let path = self.path(full_xid);
        let corrupt = |reason: String| DataDirError::corrupt(&path, reason);
        let mut contents = read_file(&path, MAX_BYTES)?.ok_or_else(|| corrupt("it is missing".to_owned()))?;
        let len = contents.len();
        if len < MIN_BYTES || !(len - 4).is_multiple_of(8) {
            return Err(corrupt(format!("{len} bytes cannot be its length")));
        }
        let (stored, computed) = (u32_at(&contents, len - 4), crc_fast::crc32_iscsi(&contents[..len - 4]));
        if stored != computed {
            return Err(corrupt(format!("its checksum is {stored:08X}, its contents give {computed:08X}")));
        }
        contents.truncate(len - 4);
        check_state(full_xid, &contents).map_err(corrupt)?;
        Ok(contents)
    }

    /// Writes the file of a transaction from the main data of its PREPARE record; durable on return
    /// (`RecreateTwoPhaseFile`, but a crash leaves no half of one).
    pub fn write(&self, full_xid: u64, state: &[u8]) -> Result<()> {
        let path = self.path(full_xid);
        check_state(full_xid, state).map_err(|reason| DataDirError::corrupt(&path, reason))?;
        let mut contents = Vec::with_capacity(state.len() + 4);
        contents.extend_from_slice(state);
        contents.extend_from_slice(&crc_fast::crc32_iscsi(state).to_le_bytes());
        write_file(&path, &contents)
    }

    /// Removes the file of a transaction, if it is there; durable on return.
    pub fn remove(&self, full_xid: u64) -> Result<bool> {
        unlink(&self.path(full_xid))
    }
}

/// Whether the state has the right magic number, states its own length with the checksum, and is of this
/// transaction (`TwoPhaseFileHeader`, which is `xl_xact_prepare`).
fn check_state(full_xid: u64, state: &[u8]) -> std::result::Result<(), String> {
    if state.len() < MIN_BYTES - 4 {
        return Err(format!("{} bytes of state are too few", state.len()));
    }
    let (magic, total_len, xid) = (u32_at(state, 0), u32_at(state, 4), u32_at(state, 8));
    if magic != MAGIC {
        return Err(format!("its magic number is {magic:08X}, expected {MAGIC:08X}"));
    }
    if u64::from(total_len) != state.len() as u64 + 4 {
        return Err(format!("it states a length of {total_len} bytes, but has {}", state.len() + 4));
    }
    if xid != full_xid as TransactionId {
        return Err(format!("it is of transaction {xid}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::bytes::put_u32;

    fn state(xid: u32) -> Vec<u8> {
        let mut state = vec![0; 96];
        put_u32(&mut state, 0, MAGIC);
        put_u32(&mut state, 4, 100);
        put_u32(&mut state, 8, xid);
        state
    }

    #[test]
    fn a_file_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pg_twophase")).unwrap();
        let files = TwoPhaseFiles::new(dir.path());
        let full_xid = 3 << 32 | 700;
        files.write(full_xid, &state(700)).unwrap();
        std::fs::write(dir.path().join("pg_twophase/000000030000ffff"), b"").unwrap();
        assert!(dir.path().join("pg_twophase/00000003000002BC").exists());
        assert_eq!(files.list().unwrap(), [full_xid]);
        assert_eq!(files.read(full_xid).unwrap(), state(700));
        assert!(files.remove(full_xid).unwrap());
        assert!(files.read(full_xid).is_err());
        assert!(!files.remove(full_xid).unwrap());
    }

    #[test]
    fn damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pg_twophase")).unwrap();
        let files = TwoPhaseFiles::new(dir.path());
        assert!(files.write(701, &state(700)).is_err());
        assert!(files.write(700, &[0; 10]).is_err());
        files.write(700, &state(700)).unwrap();
        let path = dir.path().join("pg_twophase/00000000000002BC");
        let good = std::fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, bad).unwrap();
            assert!(files.read(700).unwrap_err().is_corruption(), "bit {bit}");
        }
        for len in [0, 3, 50, good.len() - 1] {
            std::fs::write(&path, &good[..len]).unwrap();
            assert!(files.read(700).is_err(), "{len} bytes");
        }
    }
}
