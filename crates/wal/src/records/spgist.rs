//! Records of SP-GiST indexes (`access/spgxlog.h`, `access/rmgrdesc/spgdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::Reader;

use super::parts::true_false;
use crate::record::Record;

/// Record type: a leaf tuple added.
pub const XLOG_SPGIST_ADD_LEAF: u8 = 0x10;
/// Record type: leaf tuples moved to another page.
pub const XLOG_SPGIST_MOVE_LEAFS: u8 = 0x20;
/// Record type: a node added to an inner tuple.
pub const XLOG_SPGIST_ADD_NODE: u8 = 0x30;
/// Record type: an inner tuple split.
pub const XLOG_SPGIST_SPLIT_TUPLE: u8 = 0x40;
/// Record type: leaf tuples replaced by an inner tuple.
pub const XLOG_SPGIST_PICKSPLIT: u8 = 0x50;
/// Record type: a leaf page vacuumed.
pub const XLOG_SPGIST_VACUUM_LEAF: u8 = 0x60;
/// Record type: a root that is a leaf vacuumed.
pub const XLOG_SPGIST_VACUUM_ROOT: u8 = 0x70;
/// Record type: redirections cleared.
pub const XLOG_SPGIST_VACUUM_REDIRECT: u8 = 0x80;

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_SPGIST_ADD_LEAF => Some("ADD_LEAF"),
        XLOG_SPGIST_MOVE_LEAFS => Some("MOVE_LEAFS"),
        XLOG_SPGIST_ADD_NODE => Some("ADD_NODE"),
        XLOG_SPGIST_SPLIT_TUPLE => Some("SPLIT_TUPLE"),
        XLOG_SPGIST_PICKSPLIT => Some("PICKSPLIT"),
        XLOG_SPGIST_VACUUM_LEAF => Some("VACUUM_LEAF"),
        XLOG_SPGIST_VACUUM_ROOT => Some("VACUUM_ROOT"),
        XLOG_SPGIST_VACUUM_REDIRECT => Some("VACUUM_REDIRECT"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record.info(), Reader::new(record.main_data), out);
}

fn try_describe(info: u8, mut data: Reader<'_>, out: &mut String) -> Option<()> {
    let _ = match info {
        XLOG_SPGIST_ADD_LEAF => {
            let flags = [(data.bool()?, " (newpage)"), (data.bool()?, " (nulls)")];
            let (leaf, head, parent, node) = (data.u16()?, data.u16()?, data.u16()?, data.u16()?);
            let _ = write!(out, "off: {leaf}, headoff: {head}, parentoff: {parent}, nodeI: {node}");
            push_flags(&flags, out)
        }
        XLOG_SPGIST_MOVE_LEAFS => {
            let moves = data.u16()?;
            let flags = [(data.bool()?, " (newpage)"), (data.bool()?, " (replacedead)"), (data.bool()?, " (nulls)")];
            data.take(1)?;
            let (parent, node) = (data.u16()?, data.u16()?);
            let _ = write!(out, "nmoves: {moves}, parentoff: {parent}, nodeI: {node}");
            push_flags(&flags, out)
        }
        XLOG_SPGIST_ADD_NODE => {
            let (offset, new_offset, new_page) = (data.u16()?, data.u16()?, data.bool()?);
            let (parent_block, parent, node) = (data.u8()? as i8, data.u16()?, data.u16()?);
            let _ = write!(
                out,
                "off: {offset}, newoff: {new_offset}, parentBlk: {parent_block}, parentoff: {parent}, nodeI: {node}"
            );
            push_flags(&[(new_page, " (newpage)")], out)
        }
        XLOG_SPGIST_SPLIT_TUPLE => {
            let _ = write!(out, "prefixoff: {}, postfixoff: {}", data.u16()?, data.u16()?);
            push_flags(&[(data.bool()?, " (newpage)"), (data.bool()?, " (same)")], out)
        }
        XLOG_SPGIST_PICKSPLIT => {
            let root = data.bool()?;
            data.take(1)?;
            let (delete, insert) = (data.u16()?, data.u16()?);
            data.take(2)?;
            let inner = data.u16()?;
            data.take(1)?;
            let (nulls, inner_is_parent) = (data.bool()?, data.bool()?);
            data.take(1)?;
            let (parent, node) = (data.u16()?, data.u16()?);
            let _ = write!(
                out,
                "ndelete: {delete}, ninsert: {insert}, inneroff: {inner}, parentoff: {parent}, nodeI: {node}"
            );
            let flags = [(inner_is_parent, " (innerIsParent)"), (nulls, " (nulls)"), (root, " (isRootSplit)")];
            push_flags(&flags, out)
        }
        XLOG_SPGIST_VACUUM_LEAF => {
            let (dead, placeholders, moves, chain) = (data.u16()?, data.u16()?, data.u16()?, data.u16()?);
            write!(out, "ndead: {dead}, nplaceholder: {placeholders}, nmove: {moves}, nchain: {chain}")
        }
        XLOG_SPGIST_VACUUM_ROOT => write!(out, "ndelete: {}", data.u16()?),
        XLOG_SPGIST_VACUUM_REDIRECT => {
            let (placeholders, first, horizon) = (data.u16()?, data.u16()?, data.u32()?);
            let catalog = true_false(data.bool()?);
            write!(
                out,
                "ntoplaceholder: {placeholders}, firstplaceholder: {first}, snapshotConflictHorizon: {horizon}, \
                 isCatalogRel: {catalog}"
            )
        }
        _ => Ok(()),
    };
    Some(())
}

fn push_flags(flags: &[(bool, &str)], out: &mut String) -> std::fmt::Result {
    flags.iter().filter(|(set, _)| *set).try_for_each(|(_, text)| out.write_str(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::described;
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u8]| described(RmgrId::SPGIST, info, data);
        assert_eq!(
            described(XLOG_SPGIST_ADD_LEAF, &[1, 1, 2, 0, 3, 0, 4, 0, 5, 0]),
            "off: 2, headoff: 3, parentoff: 4, nodeI: 5 (newpage) (nulls)"
        );
        assert_eq!(
            described(XLOG_SPGIST_MOVE_LEAFS, &[1, 0, 0, 1, 0, 9, 2, 0, 3, 0]),
            "nmoves: 1, parentoff: 2, nodeI: 3 (replacedead)"
        );
        assert_eq!(
            described(XLOG_SPGIST_ADD_NODE, &[1, 0, 2, 0, 0, 0xFF, 3, 0, 4, 0]),
            "off: 1, newoff: 2, parentBlk: -1, parentoff: 3, nodeI: 4"
        );
        assert_eq!(
            described(XLOG_SPGIST_PICKSPLIT, &[1, 9, 2, 0, 3, 0, 9, 9, 4, 0, 9, 1, 1, 9, 5, 0, 6, 0]),
            "ndelete: 2, ninsert: 3, inneroff: 4, parentoff: 5, nodeI: 6 (innerIsParent) (nulls) (isRootSplit)"
        );
        assert_eq!(described(XLOG_SPGIST_SPLIT_TUPLE, &[1, 0, 2, 0, 0, 1]), "prefixoff: 1, postfixoff: 2 (same)");
        assert_eq!(
            described(XLOG_SPGIST_VACUUM_REDIRECT, &[1, 0, 2, 0, 3, 0, 0, 0, 0]),
            "ntoplaceholder: 1, firstplaceholder: 2, snapshotConflictHorizon: 3, isCatalogRel: F"
        );
    }
}
