//! Records of BRIN indexes (`access/brin_xlog.h`, `access/rmgrdesc/brindesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;
use walrider_layout::{BlockNumber, OffsetNumber};

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

/// Main data of `CREATE_INDEX` (`xl_brin_createidx`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateIndex {
    /// Heap pages that one tuple summarizes.
    pub pages_per_range: BlockNumber,
    /// Version of the index format.
    pub version: u16,
}

impl CreateIndex {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<CreateIndex> {
        let mut reader = Reader::new(main_data);
        Some(CreateIndex { pages_per_range: reader.u32()?, version: reader.u16()? })
    }
}

/// Main data of `INSERT` (`xl_brin_insert`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insert {
    /// The first heap page of the range.
    pub heap_block: BlockNumber,
    /// Heap pages in a range.
    pub pages_per_range: BlockNumber,
    /// Line pointer of the new tuple.
    pub offset: OffsetNumber,
}

impl Insert {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Insert> {
        let mut reader = Reader::new(main_data);
        Some(Insert { heap_block: reader.u32()?, pages_per_range: reader.u32()?, offset: reader.u16()? })
    }
}

/// Main data of `UPDATE` (`xl_brin_update`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// Line pointer of the old tuple, on the old page.
    pub old_offset: OffsetNumber,
    /// The new tuple, as if inserted.
    pub insert: Insert,
}

impl Update {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Update> {
        let mut reader = Reader::new(main_data);
        let old_offset = reader.u16()?;
        reader.take(2)?;
        Some(Update { old_offset, insert: Insert::parse(reader.rest())? })
    }
}

/// Main data of `SAMEPAGE_UPDATE` (`xl_brin_samepage_update`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamepageUpdate {
    /// The tuple's line pointer.
    pub offset: OffsetNumber,
}

impl SamepageUpdate {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<SamepageUpdate> {
        Some(SamepageUpdate { offset: Reader::new(main_data).u16()? })
    }
}

/// Main data of `REVMAP_EXTEND` (`xl_brin_revmap_extend`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevmapExtend {
    /// The page that becomes the range map's last.
    pub target: BlockNumber,
}

impl RevmapExtend {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<RevmapExtend> {
        Some(RevmapExtend { target: Reader::new(main_data).u32()? })
    }
}

/// Main data of `DESUMMARIZE` (`xl_brin_desummarize`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desummarize {
    /// Heap pages in a range.
    pub pages_per_range: BlockNumber,
    /// The first heap page of the range.
    pub heap_block: BlockNumber,
    /// Line pointer of the range's tuple.
    pub offset: OffsetNumber,
}

impl Desummarize {
    /// Reads main data; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<Desummarize> {
        let mut reader = Reader::new(main_data);
        Some(Desummarize { pages_per_range: reader.u32()?, heap_block: reader.u32()?, offset: reader.u16()? })
    }
}

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
    let _ = try_describe(record.info() & XLOG_BRIN_OPMASK, record.main_data, out);
}

fn try_describe(operation: u8, data: &[u8], out: &mut String) -> Option<()> {
    let _ = match operation {
        XLOG_BRIN_CREATE_INDEX => {
            let CreateIndex { pages_per_range, version } = CreateIndex::parse(data)?;
            write!(out, "v{version} pagesPerRange {pages_per_range}")
        }
        XLOG_BRIN_INSERT => {
            let Insert { heap_block, pages_per_range, offset } = Insert::parse(data)?;
            write!(out, "heapBlk {heap_block} pagesPerRange {pages_per_range} offnum {offset}")
        }
        XLOG_BRIN_UPDATE => {
            let Update { old_offset: old, insert } = Update::parse(data)?;
            let Insert { heap_block, pages_per_range, offset: new } = insert;
            write!(out, "heapBlk {heap_block} pagesPerRange {pages_per_range} old offnum {old}, new offnum {new}")
        }
        XLOG_BRIN_SAMEPAGE_UPDATE => write!(out, "offnum {}", SamepageUpdate::parse(data)?.offset),
        XLOG_BRIN_REVMAP_EXTEND => write!(out, "targetBlk {}", RevmapExtend::parse(data)?.target),
        XLOG_BRIN_DESUMMARIZE => {
            let Desummarize { pages_per_range, heap_block, offset } = Desummarize::parse(data)?;
            write!(out, "pagesPerRange {pages_per_range}, heapBlk {heap_block}, page offset {offset}")
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
