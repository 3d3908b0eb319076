//! Records of relation files (`catalog/storage_xlog.h`, `access/rmgrdesc/smgrdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};

use super::parts::{Item, RelPath};
use crate::record::Record;

/// Record type: a fork is made.
pub const XLOG_SMGR_CREATE: u8 = 0x10;
/// Record type: a relation is truncated.
pub const XLOG_SMGR_TRUNCATE: u8 = 0x20;

/// TRUNCATE: the main fork.
pub const SMGR_TRUNCATE_HEAP: u32 = 0x0001;
/// TRUNCATE: the visibility map.
pub const SMGR_TRUNCATE_VM: u32 = 0x0002;
/// TRUNCATE: the free space map.
pub const SMGR_TRUNCATE_FSM: u32 = 0x0004;

/// The data of [`XLOG_SMGR_CREATE`] (`xl_smgr_create`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Create {
    /// The relation.
    pub rel: RelFileLocator,
    /// `forkNum`.
    pub fork: ForkNumber,
}

impl Create {
    /// Reads the main data of a record; `None` if it is too short or there is no such fork.
    pub fn parse(main_data: &[u8]) -> Option<Create> {
        let mut reader = Reader::new(main_data);
        let rel = RelFileLocator::read(&reader.array::<12>()?);
        let fork = u8::try_from(reader.u32()?).ok()?;
        Some(Create { rel, fork: ForkNumber::from_number(fork)? })
    }
}

/// The data of [`XLOG_SMGR_TRUNCATE`] (`xl_smgr_truncate`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate {
    /// `blkno`: blocks of the main fork that stay.
    pub blocks: BlockNumber,
    /// The relation.
    pub rel: RelFileLocator,
    /// `flags`: `SMGR_TRUNCATE_…`.
    pub flags: u32,
}

impl Truncate {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Truncate> {
        let mut reader = Reader::new(main_data);
        let blocks = reader.u32()?;
        let rel = RelFileLocator::read(&reader.array::<12>()?);
        Some(Truncate { blocks, rel, flags: reader.u32()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_SMGR_CREATE => Some("CREATE"),
        XLOG_SMGR_TRUNCATE => Some("TRUNCATE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        XLOG_SMGR_CREATE => {
            if let Some(create) = Create::parse(record.main_data) {
                let _ = write!(out, "{}", RelPath(create.rel, create.fork, record.major));
            }
        }
        XLOG_SMGR_TRUNCATE => {
            if let Some(Truncate { blocks, rel, flags }) = Truncate::parse(record.main_data) {
                let path = RelPath(rel, ForkNumber::Main, record.major);
                let _ = write!(out, "{path} to {blocks} blocks flags {}", flags as i32);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u32]| described(RmgrId::SMGR, info, &words(data.iter().copied()));
        assert_eq!(described(XLOG_SMGR_CREATE, &[1663, 5, 16384, 3]), "base/5/16384_init");
        assert_eq!(described(XLOG_SMGR_CREATE, &[1663, 5, 16384, 4]), "");
        assert_eq!(described(XLOG_SMGR_CREATE, &[1663, 5, 16384, 256]), "");
        assert_eq!(described(XLOG_SMGR_TRUNCATE, &[9, 1663, 5, 16384, 7]), "base/5/16384 to 9 blocks flags 7");
    }
}
