//! Records of the commit log (`access/clog.h`, `access/rmgrdesc/clogdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{Oid, TransactionId};

use super::parts::parse_zero_page;
use crate::record::Record;

/// Record type: a page begins.
pub const CLOG_ZEROPAGE: u8 = 0x00;
/// Record type: what is too old to be asked for goes.
pub const CLOG_TRUNCATE: u8 = 0x10;

/// The data of [`CLOG_TRUNCATE`] (`xl_clog_truncate`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate {
    /// `pageno`: the first page that is kept.
    pub page: i64,
    /// `oldestXact`: the first transaction that can still be asked for.
    pub oldest_xid: TransactionId,
    /// `oldestXactDb`: the database that it is kept for.
    pub oldest_xid_db: Oid,
}

impl Truncate {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Truncate> {
        let mut reader = Reader::new(main_data);
        Some(Truncate { page: reader.i64()?, oldest_xid: reader.u32()?, oldest_xid_db: reader.u32()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        CLOG_ZEROPAGE => Some("ZEROPAGE"),
        CLOG_TRUNCATE => Some("TRUNCATE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        CLOG_ZEROPAGE => {
            if let Some(page) = parse_zero_page(record.main_data) {
                let _ = write!(out, "page {page}");
            }
        }
        CLOG_TRUNCATE => {
            if let Some(truncate) = Truncate::parse(record.main_data) {
                let _ = write!(out, "page {}; oldestXact {}", truncate.page, truncate.oldest_xid);
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
        assert_eq!(described(RmgrId::CLOG, CLOG_ZEROPAGE, &words([97, 0])), "page 97");
        assert_eq!(described(RmgrId::CLOG, CLOG_TRUNCATE, &words([4, 0, 131_080, 5])), "page 4; oldestXact 131080");
    }
}
