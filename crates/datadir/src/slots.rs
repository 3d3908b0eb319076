//! Replication slots in `pg_replslot`, as far as needed to tell logical from physical ones (`ReplicationSlotOnDisk`,
//! `RestoreSlotFromDisk`; `replication/slot.c`, `replication/slot.h`, PostgreSQL 18).

use std::path::Path;

use walrider_layout::bytes::{u32_at, u64_at};
use walrider_layout::{Lsn, Oid};

use crate::durable::{list_dir, read_file};
use crate::error::{DataDirError, IoContext, Result};

/// `SLOT_MAGIC`.
const MAGIC: u32 = 0x0105_1CA1;
/// `SLOT_VERSION`.
const VERSION: u32 = 5;
/// Magic number, checksum, version, length (`ReplicationSlotOnDiskConstantSize`).
const HEADER_SIZE: usize = 16;
/// `sizeof(ReplicationSlotPersistentData)`.
const DATA_SIZE: usize = 184;

/// A replication slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// The database of a logical slot, 0 for a physical one.
    pub database: Oid,
    /// PostgreSQL keeps it when it starts (`RS_PERSISTENT`).
    pub persistent: bool,
    /// The oldest WAL that it needs; [`Lsn::INVALID`] if it needs none, or has been invalidated.
    pub restart_lsn: Lsn,
}

impl Slot {
    /// Whether it is for logical decoding (`SlotIsLogical`).
    pub fn is_logical(&self) -> bool {
        self.database != 0
    }

    /// Reads the contents of a `state` file; the error says what is wrong with them.
    pub fn parse(name: &str, state: &[u8]) -> std::result::Result<Slot, String> {
        if state.len() != HEADER_SIZE + DATA_SIZE {
            return Err(format!("it has {} bytes, expected {}", state.len(), HEADER_SIZE + DATA_SIZE));
        }
        let (magic, checksum, version, len) = (u32_at(state, 0), u32_at(state, 4), u32_at(state, 8), u32_at(state, 12));
        if magic != MAGIC || version != VERSION || len as usize != DATA_SIZE {
            return Err(format!("magic number {magic:08X}, version {version}, length {len} are not those of a slot"));
        }
        let computed = crc_fast::crc32_iscsi(&state[8..]);
        if checksum != computed {
            return Err(format!("its checksum is {checksum:08X}, its contents give {computed:08X}"));
        }
        let data = &state[HEADER_SIZE..];
        Ok(Slot {
            name: name.to_owned(),
            database: u32_at(data, 64),
            persistent: u32_at(data, 68) == 0,
            restart_lsn: if u32_at(data, 88) == 0 { Lsn(u64_at(data, 80)) } else { Lsn::INVALID },
        })
    }
}

/// All slots of a data directory, by name. Leftovers that PostgreSQL removes when it starts are not among them.
pub fn read_slots(data_dir: &Path) -> Result<Vec<Slot>> {
    let mut slots = Vec::new();
    for entry in list_dir(&data_dir.join("pg_replslot"))? {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_dir = entry.file_type().context("stat", &entry.path())?.is_dir();
        if !is_dir || name.ends_with(".tmp") {
            continue;
        }
        let path = entry.path().join("state");
        let state = read_file(&path, 1 << 16)?.ok_or_else(|| DataDirError::corrupt(&path, "it is missing"))?;
        slots.push(Slot::parse(&name, &state).map_err(|reason| DataDirError::corrupt(path, reason))?);
    }
    slots.retain(|slot| slot.persistent);
    Ok(slots)
}

/// The names of the logical ones; `None` if there are none.
pub fn logical_slots(slots: &[Slot]) -> Option<String> {
    let names: Vec<&str> = slots.iter().filter(|slot| slot.is_logical()).map(|slot| slot.name.as_str()).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// Refuses a directory with logical slots: stock replay invalidates those that a record conflicts with, which needs to
/// look into them while replaying.
pub fn refuse_logical_slots(slots: &[Slot]) -> Result<()> {
    let Some(names) = logical_slots(slots) else { return Ok(()) };
    Err(DataDirError::Refused(format!(
        "the directory has logical replication slots ({names}), which only a running server can keep valid: drop them before, \
         or remove their directories in pg_replslot if they are not needed here, or let PostgreSQL replay"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::bytes::put_u32;

    fn state(database: Oid, persistency: u32) -> Vec<u8> {
        let mut state = vec![0; HEADER_SIZE + DATA_SIZE];
        for (at, value) in [(0, MAGIC), (8, VERSION), (12, DATA_SIZE as u32), (80, database), (84, persistency)] {
            put_u32(&mut state, at, value);
        }
        let crc = crc_fast::crc32_iscsi(&state[8..]);
        put_u32(&mut state, 4, crc);
        state
    }

    #[test]
    fn logical_slots_are_told_from_physical_ones() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_slots(dir.path()).unwrap(), []);
        let put = |name: &str, state: &[u8]| {
            std::fs::create_dir_all(dir.path().join("pg_replslot").join(name)).unwrap();
            std::fs::write(dir.path().join("pg_replslot").join(name).join("state"), state).unwrap();
        };
        put("physical", &state(0, 0));
        put("ephemeral", &state(5, 1));
        put("half.tmp", b"");
        refuse_logical_slots(&read_slots(dir.path()).unwrap()).unwrap();
        put("logical", &state(5, 0));
        let slots = read_slots(dir.path()).unwrap();
        let names: Vec<_> = slots.iter().map(|slot| (slot.name.as_str(), slot.is_logical())).collect();
        assert_eq!(names, [("logical", true), ("physical", false)]);
        assert!(refuse_logical_slots(&slots).unwrap_err().to_string().contains("(logical)"));
        put("bad", &state(5, 0)[1..]);
        assert!(read_slots(dir.path()).unwrap_err().is_corruption());
    }

    #[test]
    fn damage_is_found() {
        let good = state(0, 0);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Slot::parse("x", &bad).is_err(), "byte {at}");
        }
    }
}
