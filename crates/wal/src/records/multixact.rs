//! Records of multixacts (`access/multixact.h`, `access/rmgrdesc/mxactdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::{Reader, u32_at};
use walrider_layout::{MultiXactId, Oid, TransactionId};

use super::parts::{Item, Items, parse_zero_page};
use crate::record::Record;

/// Record type: a page of offsets begins.
pub const XLOG_MULTIXACT_ZERO_OFF_PAGE: u8 = 0x00;
/// Record type: a page of members begins.
pub const XLOG_MULTIXACT_ZERO_MEM_PAGE: u8 = 0x10;
/// Record type: a multixact is made.
pub const XLOG_MULTIXACT_CREATE_ID: u8 = 0x20;
/// Record type: what is too old to be asked for goes.
pub const XLOG_MULTIXACT_TRUNCATE_ID: u8 = 0x30;

/// A member of a multixact (`MultiXactMember`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The transaction.
    pub xid: TransactionId,
    /// `status`: what it does with the row (`MultiXactStatus`), 0 to 5 in WAL that makes sense.
    pub status: u32,
}

impl Item for Member {
    const SIZE: usize = 8;

    fn read(bytes: &[u8]) -> Member {
        Member { xid: u32_at(bytes, 0), status: u32_at(bytes, 4) }
    }
}

/// The data of [`XLOG_MULTIXACT_CREATE_ID`] (`xl_multixact_create`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateId<'a> {
    /// `mid`: the new multixact.
    pub multi: MultiXactId,
    /// `moff`: where its members begin.
    pub offset: u32,
    /// Its members.
    pub members: Items<'a, Member>,
}

impl<'a> CreateId<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<CreateId<'a>> {
        let mut reader = Reader::new(main_data);
        let (multi, offset, count) = (reader.u32()?, reader.u32()?, reader.i32()?);
        Some(CreateId { multi, offset, members: Items::take(&mut reader, count)? })
    }
}

/// The data of [`XLOG_MULTIXACT_TRUNCATE_ID`] (`xl_multixact_truncate`). Ends are exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncate {
    /// `oldestMultiDB`: the database that the rest is kept for.
    pub oldest_multi_db: Oid,
    /// `startTruncOff`: the first multixact that goes.
    pub offsets_start: MultiXactId,
    /// `endTruncOff`: the first one that stays.
    pub offsets_end: MultiXactId,
    /// `startTruncMemb`: the first member that goes.
    pub members_start: u32,
    /// `endTruncMemb`: the first one that stays.
    pub members_end: u32,
}

impl Truncate {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Truncate> {
        let mut reader = Reader::new(main_data);
        Some(Truncate {
            oldest_multi_db: reader.u32()?,
            offsets_start: reader.u32()?,
            offsets_end: reader.u32()?,
            members_start: reader.u32()?,
            members_end: reader.u32()?,
        })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_MULTIXACT_ZERO_OFF_PAGE => Some("ZERO_OFF_PAGE"),
        XLOG_MULTIXACT_ZERO_MEM_PAGE => Some("ZERO_MEM_PAGE"),
        XLOG_MULTIXACT_CREATE_ID => Some("CREATE_ID"),
        XLOG_MULTIXACT_TRUNCATE_ID => Some("TRUNCATE_ID"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        XLOG_MULTIXACT_ZERO_OFF_PAGE | XLOG_MULTIXACT_ZERO_MEM_PAGE => {
            if let Some(page) = parse_zero_page(record.main_data) {
                let _ = write!(out, "{page}");
            }
        }
        XLOG_MULTIXACT_CREATE_ID => {
            if let Some(CreateId { multi, offset, members }) = CreateId::parse(record.main_data) {
                let _ = write!(out, "{multi} offset {offset} nmembers {}: ", members.len());
                for member in members.iter() {
                    let status = match member.status {
                        0 => "keysh",
                        1 => "sh",
                        2 => "fornokeyupd",
                        3 => "forupd",
                        4 => "nokeyupd",
                        5 => "upd",
                        _ => "unk",
                    };
                    let _ = write!(out, "{} ({status}) ", member.xid);
                }
            }
        }
        XLOG_MULTIXACT_TRUNCATE_ID => {
            if let Some(truncate) = Truncate::parse(record.main_data) {
                let Truncate { offsets_start, offsets_end, members_start, members_end, .. } = truncate;
                let _ =
                    write!(out, "offsets [{offsets_start}, {offsets_end}), members [{members_start}, {members_end})");
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
        let described = |info, data: &[u32]| described(RmgrId::MULTIXACT, info, &words(data.iter().copied()));
        assert_eq!(described(XLOG_MULTIXACT_ZERO_MEM_PAGE, &[8, 0]), "8");
        assert_eq!(
            described(XLOG_MULTIXACT_CREATE_ID, &[7, 12, 2, 740, 1, 741, 9]),
            "7 offset 12 nmembers 2: 740 (sh) 741 (unk) "
        );
        assert_eq!(described(XLOG_MULTIXACT_CREATE_ID, &[7, 12, 2, 740, 1, 741]), "");
        assert_eq!(described(XLOG_MULTIXACT_TRUNCATE_ID, &[1, 2, 3, 4, 5]), "offsets [2, 3), members [4, 5)");
    }
}
