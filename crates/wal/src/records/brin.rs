//! Records of BRIN indexes (`access/brin_xlog.h`, `access/rmgrdesc/brindesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;

use crate::record::Record;

/// Record type: the meta page begins.
pub const XLOG_BRIN_CREATE_INDEX: u8 = 0x00;
/// Record type: a tuple inserted.
pub const XLOG_BRIN_INSERT: u8 = 0x10;
/// Record type: a tuple replaced by one on another page.
pub const XLOG_BRIN_UPDATE: u8 = 0x20;
/// Record type: a tuple replaced on its page.
pub const XLOG_BRIN_SAMEPAGE_UPDATE: u8 = 0x30;
/// Record type: the map of ranges gets another page.
pub const XLOG_BRIN_REVMAP_EXTEND: u8 = 0x40;
/// Record type: a range is no longer summarized.
pub const XLOG_BRIN_DESUMMARIZE: u8 = 0x50;

/// The bits of the record type.
pub const XLOG_BRIN_OPMASK: u8 = 0x70;
/// With INSERT and UPDATE: the page is initialised.
pub const XLOG_BRIN_INIT_PAGE: u8 = 0x80;

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    const INSERT_INIT: u8 = XLOG_BRIN_INSERT | XLOG_BRIN_INIT_PAGE;
    const UPDATE_INIT: u8 = XLOG_BRIN_UPDATE | XLOG_BRIN_INIT_PAGE;
    match info & 0xF0 {
        XLOG_BRIN_CREATE_INDEX => Some("CREATE_INDEX"),
        XLOG_BRIN_INSERT => Some("INSERT"),
        INSERT_INIT => Some("INSERT+INIT"),
        XLOG_BRIN_UPDATE => Some("UPDATE"),
        UPDATE_INIT => Some("UPDATE+INIT"),
        XLOG_BRIN_SAMEPAGE_UPDATE => Some("SAMEPAGE_UPDATE"),
        XLOG_BRIN_REVMAP_EXTEND => Some("REVMAP_EXTEND"),
        XLOG_BRIN_DESUMMARIZE => Some("DESUMMARIZE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record.info() & XLOG_BRIN_OPMASK, Reader::new(record.main_data), out);
}

fn try_describe(operation: u8, mut data: Reader<'_>, out: &mut String) -> Option<()> {
    let _ = match operation {
        XLOG_BRIN_CREATE_INDEX => {
            let (range, version) = (data.u32()?, data.u16()?);
            write!(out, "v{version} pagesPerRange {range}")
        }
        XLOG_BRIN_INSERT => {
            let (block, range, offset) = (data.u32()?, data.u32()?, data.u16()?);
            write!(out, "heapBlk {block} pagesPerRange {range} offnum {offset}")
        }
        XLOG_BRIN_UPDATE => {
            let old = data.u16()?;
            data.take(2)?;
            let (block, range, new) = (data.u32()?, data.u32()?, data.u16()?);
            write!(out, "heapBlk {block} pagesPerRange {range} old offnum {old}, new offnum {new}")
        }
        XLOG_BRIN_SAMEPAGE_UPDATE => write!(out, "offnum {}", data.u16()?),
        XLOG_BRIN_REVMAP_EXTEND => write!(out, "targetBlk {}", data.u32()?),
        XLOG_BRIN_DESUMMARIZE => {
            let (range, block, offset) = (data.u32()?, data.u32()?, data.u16()?);
            write!(out, "pagesPerRange {range}, heapBlk {block}, page offset {offset}")
        }
        _ => Ok(()),
    };
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u32]| described(RmgrId::BRIN, info, &words(data.iter().copied()));
        assert_eq!(described(XLOG_BRIN_CREATE_INDEX, &[128, 1]), "v1 pagesPerRange 128");
        assert_eq!(
            described(XLOG_BRIN_INSERT | XLOG_BRIN_INIT_PAGE, &[9, 128, 3]),
            "heapBlk 9 pagesPerRange 128 offnum 3"
        );
        assert_eq!(
            described(XLOG_BRIN_UPDATE, &[2, 9, 128, 3]),
            "heapBlk 9 pagesPerRange 128 old offnum 2, new offnum 3"
        );
        assert_eq!(described(XLOG_BRIN_SAMEPAGE_UPDATE, &[2]), "offnum 2");
        assert_eq!(described(XLOG_BRIN_REVMAP_EXTEND, &[2]), "targetBlk 2");
        assert_eq!(described(XLOG_BRIN_DESUMMARIZE, &[128, 9, 3]), "pagesPerRange 128, heapBlk 9, page offset 3");
        assert_eq!(identify(0xA0), Some("UPDATE+INIT"));
        assert_eq!(identify(0xB0), None);
    }
}
