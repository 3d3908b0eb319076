//! Records of tablespaces (`commands/tablespace.h`, `access/rmgrdesc/tblspcdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::Oid;
use walrider_layout::bytes::Reader;

use super::parts::{c_string, push_text};
use crate::record::Record;

/// Record type: a tablespace is made.
pub const XLOG_TBLSPC_CREATE: u8 = 0x00;
/// Record type: a tablespace goes.
pub const XLOG_TBLSPC_DROP: u8 = 0x10;

/// The data of [`XLOG_TBLSPC_CREATE`] (`xl_tblspc_create_rec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Create<'a> {
    /// `ts_id`.
    pub tablespace: Oid,
    /// `ts_path`, without the zero: where its link points; empty if it lies within the data directory.
    pub path: &'a [u8],
}

impl<'a> Create<'a> {
    /// Reads the main data of a record; `None` if it is too short or the path does not end.
    pub fn parse(main_data: &'a [u8]) -> Option<Create<'a>> {
        let mut reader = Reader::new(main_data);
        Some(Create { tablespace: reader.u32()?, path: c_string(reader.rest())? })
    }
}

/// The data of [`XLOG_TBLSPC_DROP`] (`xl_tblspc_drop_rec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drop {
    /// `ts_id`.
    pub tablespace: Oid,
}

impl Drop {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Drop> {
        Some(Drop { tablespace: Reader::new(main_data).u32()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_TBLSPC_CREATE => Some("CREATE"),
        XLOG_TBLSPC_DROP => Some("DROP"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        XLOG_TBLSPC_CREATE => {
            if let Some(create) = Create::parse(record.main_data) {
                let _ = write!(out, "{} \"", create.tablespace);
                push_text(create.path, out);
                out.push('"');
            }
        }
        XLOG_TBLSPC_DROP => {
            if let Some(drop) = Drop::parse(record.main_data) {
                let _ = write!(out, "{}", drop.tablespace);
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
        let create = [&words([16400])[..], b"/space/a\0"].concat();
        assert_eq!(described(RmgrId::TBLSPC, XLOG_TBLSPC_CREATE, &create), "16400 \"/space/a\"");
        assert_eq!(described(RmgrId::TBLSPC, XLOG_TBLSPC_CREATE, &create[..12]), "", "the path does not end");
        assert_eq!(described(RmgrId::TBLSPC, XLOG_TBLSPC_DROP, &words([16400])), "16400");
    }
}
