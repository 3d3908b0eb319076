//! Records of commit timestamps (`access/commit_ts.h`, `access/rmgrdesc/committsdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::TransactionId;
use walrider_layout::bytes::Reader;

use super::parts::parse_zero_page;
use crate::record::Record;

/// Record type: a page begins.
pub const COMMIT_TS_ZEROPAGE: u8 = 0x00;
/// Record type: what is too old to be asked for goes.
pub const COMMIT_TS_TRUNCATE: u8 = 0x10;

/// The data of [`COMMIT_TS_TRUNCATE`] (`xl_commit_ts_truncate`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate {
    /// `pageno`: the first page that is kept.
    pub page: i64,
    /// `oldestXid`: the first transaction that can still be asked for.
    pub oldest_xid: TransactionId,
}

impl Truncate {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Truncate> {
        let mut reader = Reader::new(main_data);
        Some(Truncate { page: reader.i64()?, oldest_xid: reader.u32()? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        COMMIT_TS_ZEROPAGE => Some("ZEROPAGE"),
        COMMIT_TS_TRUNCATE => Some("TRUNCATE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        COMMIT_TS_ZEROPAGE => {
            if let Some(page) = parse_zero_page(record.main_data) {
                let _ = write!(out, "{page}");
            }
        }
        COMMIT_TS_TRUNCATE => {
            if let Some(truncate) = Truncate::parse(record.main_data) {
                let _ = write!(out, "pageno {}, oldestXid {}", truncate.page, truncate.oldest_xid);
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
        assert_eq!(described(RmgrId::COMMIT_TS, COMMIT_TS_ZEROPAGE, &words([97, 0])), "97");
        assert_eq!(described(RmgrId::COMMIT_TS, COMMIT_TS_TRUNCATE, &words([4, 0, 3280])), "pageno 4, oldestXid 3280");
    }
}
