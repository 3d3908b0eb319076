//! Records of replication origins (`replication/origin.h`, `access/rmgrdesc/replorigindesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::Lsn;
use walrider_layout::bytes::Reader;

use crate::record::Record;

/// Record type: an origin's progress is set.
pub const XLOG_REPLORIGIN_SET: u8 = 0x00;
/// Record type: an origin goes.
pub const XLOG_REPLORIGIN_DROP: u8 = 0x10;

/// The data of [`XLOG_REPLORIGIN_SET`] (`xl_replorigin_set`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// `remote_lsn`: how far the origin's WAL has been applied.
    pub remote_lsn: Lsn,
    /// `node_id`.
    pub origin: u16,
    /// `force`: also if that is a step back.
    pub force: bool,
}

impl Set {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Set> {
        let mut reader = Reader::new(main_data);
        Some(Set { remote_lsn: Lsn(reader.u64()?), origin: reader.u16()?, force: reader.bool()? })
    }
}

/// The data of [`XLOG_REPLORIGIN_DROP`] (`xl_replorigin_drop`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drop {
    /// `node_id`.
    pub origin: u16,
}

impl Drop {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Drop> {
        Some(Drop { origin: Reader::new(main_data).u16()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_REPLORIGIN_SET => Some("SET"),
        XLOG_REPLORIGIN_DROP => Some("DROP"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        XLOG_REPLORIGIN_SET => {
            if let Some(Set { remote_lsn, origin, force }) = Set::parse(record.main_data) {
                let _ = write!(out, "set {origin}; lsn {remote_lsn}; force: {}", u8::from(force));
            }
        }
        XLOG_REPLORIGIN_DROP => {
            if let Some(drop) = Drop::parse(record.main_data) {
                let _ = write!(out, "drop {}", drop.origin);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::described;
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let set = [0x28, 0, 0, 0x0A, 1, 0, 0, 0, 3, 0, 1, 0, 0, 0, 0, 0];
        assert_eq!(described(RmgrId::REPLORIGIN, XLOG_REPLORIGIN_SET, &set), "set 3; lsn 1/A000028; force: 1");
        assert_eq!(described(RmgrId::REPLORIGIN, XLOG_REPLORIGIN_DROP, &[3, 0]), "drop 3");
    }
}
