//! Records of GIN indexes (`access/ginxlog.h`, `access/rmgrdesc/gindesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;

use super::parts::true_false;
use crate::record::Record;

/// Record type: a posting tree begins.
pub const XLOG_GIN_CREATE_PTREE: u8 = 0x10;
/// Record type: an insertion that splits nothing.
pub const XLOG_GIN_INSERT: u8 = 0x20;
/// Record type: a page split.
pub const XLOG_GIN_SPLIT: u8 = 0x30;
/// Record type: a page of the entry tree vacuumed.
pub const XLOG_GIN_VACUUM_PAGE: u8 = 0x40;
/// Record type: a page of a posting tree deleted.
pub const XLOG_GIN_DELETE_PAGE: u8 = 0x50;
/// Record type: the meta page updated.
pub const XLOG_GIN_UPDATE_META_PAGE: u8 = 0x60;
/// Record type: a page of the pending list begins.
pub const XLOG_GIN_INSERT_LISTPAGE: u8 = 0x70;
/// Record type: pages of the pending list deleted.
pub const XLOG_GIN_DELETE_LISTPAGE: u8 = 0x80;
/// Record type: a leaf of a posting tree vacuumed.
pub const XLOG_GIN_VACUUM_DATA_LEAF_PAGE: u8 = 0x90;

const GIN_INSERT_ISDATA: u16 = 0x01;
const GIN_INSERT_ISLEAF: u16 = 0x02;
const GIN_SPLIT_ROOT: u16 = 0x04;

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_GIN_CREATE_PTREE => Some("CREATE_PTREE"),
        XLOG_GIN_INSERT => Some("INSERT"),
        XLOG_GIN_SPLIT => Some("SPLIT"),
        XLOG_GIN_VACUUM_PAGE => Some("VACUUM_PAGE"),
        XLOG_GIN_VACUUM_DATA_LEAF_PAGE => Some("VACUUM_DATA_LEAF_PAGE"),
        XLOG_GIN_DELETE_PAGE => Some("DELETE_PAGE"),
        XLOG_GIN_UPDATE_META_PAGE => Some("UPDATE_META_PAGE"),
        XLOG_GIN_INSERT_LISTPAGE => Some("INSERT_LISTPAGE"),
        XLOG_GIN_DELETE_LISTPAGE => Some("DELETE_LISTPAGE"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record, out);
}

fn try_describe(record: &Record<'_>, out: &mut String) -> Option<()> {
    let mut data = Reader::new(record.main_data);
    match record.info() {
        XLOG_GIN_INSERT => {
            let flags = data.u16()?;
            describe_kind("", flags, out);
            if flags & GIN_INSERT_ISLEAF == 0 {
                let (left, right) = (block_id(&mut data)?, block_id(&mut data)?);
                let _ = write!(out, " children: {left}/{right}");
            }
            let Some(mut block) = data_unless_image(record, out)? else { return Some(()) };
            if flags & GIN_INSERT_ISDATA == 0 {
                block.take(2)?;
                let _ = write!(out, " isdelete: {}", true_false(block.bool()?));
            } else if flags & GIN_INSERT_ISLEAF != 0 {
                describe_recompression(block, out)?;
            } else {
                block.take(2)?;
                let (child, key_block, key_offset) = (block_id(&mut block)?, block_id(&mut block)?, block.u16()?);
                let _ = write!(out, " pitem: {child}-{key_block}/{key_offset}");
            }
        }
        XLOG_GIN_SPLIT => {
            data.take(24)?;
            let flags = data.u16()?;
            let _ = write!(out, "isrootsplit: {}", true_false(flags & GIN_SPLIT_ROOT != 0));
            describe_kind(" ", flags, out);
        }
        XLOG_GIN_VACUUM_DATA_LEAF_PAGE => {
            if let Some(block) = data_unless_image(record, out)? {
                describe_recompression(block, out)?;
            }
        }
        XLOG_GIN_DELETE_LISTPAGE => {
            // GinMetaPageData comes first.
            data.take(56)?;
            let _ = write!(out, "ndeleted: {}", data.i32()?);
        }
        _ => {}
    }
    Some(())
}

fn describe_kind(before: &str, flags: u16, out: &mut String) {
    let (data, leaf) = (true_false(flags & GIN_INSERT_ISDATA != 0), true_false(flags & GIN_INSERT_ISLEAF != 0));
    let _ = write!(out, "{before}isdata: {data} isleaf: {leaf}");
}

/// The data of the first block, or nothing but a word if it has an image.
fn data_unless_image<'a>(record: &Record<'a>, out: &mut String) -> Option<Option<Reader<'a>>> {
    let block = record.block(0)?;
    match block.image {
        Some(image) if image.apply() => out.push_str(" (full page image)"),
        Some(_) => out.push_str(" (full page image, for WAL verification)"),
        None => return Some(Some(Reader::new(block.data))),
    }
    Some(None)
}

/// A block number in two halves, the upper one first (`BlockIdData`, `storage/block.h`).
fn block_id(reader: &mut Reader<'_>) -> Option<u32> {
    let high = reader.u16()?;
    Some(u32::from(high) << 16 | u32::from(reader.u16()?))
}

/// What happens to the segments of a leaf (`ginxlogRecompressDataLeaf`).
fn describe_recompression(mut data: Reader<'_>, out: &mut String) -> Option<()> {
    let actions = data.u16()?;
    let _ = write!(out, " {actions} segments:");
    for _ in 0..actions {
        let (segment, action) = (data.u8()?, data.u8()?);
        let _ = match action {
            1 => write!(out, " {segment} (delete)"),
            2 | 3 => {
                // A posting list: its first item, the length of the rest, and that, aligned to 2.
                data.take(6)?;
                let len = usize::from(data.u16()?);
                data.take(len.next_multiple_of(2))?;
                write!(out, " {segment} ({})", if action == 2 { "insert" } else { "replace" })
            }
            4 => {
                let items = data.u16()?;
                data.take(usize::from(items) * 6)?;
                write!(out, " {segment} (add {items} items)")
            }
            _ => {
                let _ = write!(out, " {segment} unknown action {action} ???");
                return None;
            }
        };
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::{RecordBuilder, TEST_REL};
    use walrider_layout::{ForkNumber, Lsn};

    fn described(info: u8, main: &[u8], block: &[u8]) -> String {
        let builder = RecordBuilder::new(RmgrId::GIN, info).main_data(main);
        let bytes = builder.block(0, TEST_REL, ForkNumber::Main, 7).data(block).build();
        let mut out = String::new();
        describe(&RecordBuilder::parse(&bytes, Lsn(40)), &mut out);
        out
    }

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        assert_eq!(described(XLOG_GIN_INSERT, &[2, 0], &[1, 0, 1, 0]), "isdata: F isleaf: T isdelete: T");
        let internal = [5, 0, 0, 0, 9, 0, 0, 0, 7, 0, 3, 0];
        assert_eq!(
            described(XLOG_GIN_INSERT, &[1, 0, 1, 0, 2, 0, 0, 0, 3, 0], &internal),
            "isdata: T isleaf: F children: 65538/3 pitem: 9-7/3"
        );
        let mut leaf = vec![4, 0, 0, 1, 1, 2];
        leaf.extend([0, 0, 9, 0, 1, 0, 3, 0, 1, 2, 3, 0]);
        leaf.extend([2, 4, 2, 0]);
        leaf.extend([0; 12]);
        leaf.extend([3, 9]);
        assert_eq!(
            described(XLOG_GIN_VACUUM_DATA_LEAF_PAGE, &[], &leaf),
            " 4 segments: 0 (delete) 1 (insert) 2 (add 2 items) 3 unknown action 9 ???"
        );
        let split = [&[0; 24][..], &[6, 0]].concat();
        assert_eq!(described(XLOG_GIN_SPLIT, &split, &[]), "isrootsplit: T isdata: F isleaf: T");
        let deleted = [&[0; 56][..], &[3, 0, 0, 0]].concat();
        assert_eq!(described(XLOG_GIN_DELETE_LISTPAGE, &deleted, &[]), "ndeleted: 3");
    }
}
