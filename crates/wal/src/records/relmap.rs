//! Records of relation maps (`utils/relmapper.h`, `access/rmgrdesc/relmapdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::Oid;
use walrider_layout::bytes::Reader;

use crate::record::Record;

/// Record type: a map is rewritten.
pub const XLOG_RELMAP_UPDATE: u8 = 0x00;

/// The data of [`XLOG_RELMAP_UPDATE`] (`xl_relmap_update`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update<'a> {
    /// `dbid`: the database, 0 for the map of shared relations.
    pub database: Oid,
    /// `tsid`: the database's tablespace, or `pg_global`.
    pub tablespace: Oid,
    /// `data`: the new contents of the file (`RelMapFile`).
    pub data: &'a [u8],
}

impl<'a> Update<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<Update<'a>> {
        let mut reader = Reader::new(main_data);
        let (database, tablespace) = (reader.u32()?, reader.u32()?);
        let len = usize::try_from(reader.i32()?).ok()?;
        Some(Update { database, tablespace, data: reader.take(len)? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    (info & 0xF0 == XLOG_RELMAP_UPDATE).then_some("UPDATE")
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    if record.info() == XLOG_RELMAP_UPDATE
        && let Some(Update { database, tablespace, data }) = Update::parse(record.main_data)
    {
        let _ = write!(out, "database {database} tablespace {tablespace} size {}", data.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let update = words([5, 1663, 8, 1, 2]);
        assert_eq!(described(RmgrId::RELMAP, XLOG_RELMAP_UPDATE, &update), "database 5 tablespace 1663 size 8");
        assert_eq!(described(RmgrId::RELMAP, XLOG_RELMAP_UPDATE, &update[..19]), "");
    }
}
