//! Records of the heap's second resource manager: what `access/heapam_xlog.h` lays out for `RM_HEAP2_ID`, and its
//! description (`access/rmgrdesc/heapdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::{Reader, u16_at, u32_at};
use walrider_layout::{BlockNumber, OffsetNumber, RelFileLocator, TransactionId};

use super::heap::{Lock, XLOG_HEAP_INIT_PAGE, XLOG_HEAP_OPMASK, describe_array};
use super::parts::{Item, true_false};
use crate::record::Record;

/// Record type: mappings of a rewritten table, for logical decoding.
pub const XLOG_HEAP2_REWRITE: u8 = 0x00;
/// Record type: a page pruned by a reader.
pub const XLOG_HEAP2_PRUNE_ON_ACCESS: u8 = 0x10;
/// Record type: a page pruned and frozen by VACUUM's first pass.
pub const XLOG_HEAP2_PRUNE_VACUUM_SCAN: u8 = 0x20;
/// Record type: dead line pointers removed by VACUUM's second pass.
pub const XLOG_HEAP2_PRUNE_VACUUM_CLEANUP: u8 = 0x30;
/// Record type: bits set in the visibility map.
pub const XLOG_HEAP2_VISIBLE: u8 = 0x40;
/// Record type: several tuples inserted.
pub const XLOG_HEAP2_MULTI_INSERT: u8 = 0x50;
/// Record type: a later version of a tuple locked.
pub const XLOG_HEAP2_LOCK_UPDATED: u8 = 0x60;
/// Record type: command ids, for logical decoding.
pub const XLOG_HEAP2_NEW_CID: u8 = 0x70;

/// PRUNE: the relation is a catalog, as far as logical decoding is concerned.
pub const XLHP_IS_CATALOG_REL: u8 = 1 << 1;
/// PRUNE: tuples are moved.
pub const XLHP_CLEANUP_LOCK: u8 = 1 << 2;
/// PRUNE: a conflict horizon follows the flags.
pub const XLHP_HAS_CONFLICT_HORIZON: u8 = 1 << 3;
/// PRUNE: the block data has freeze plans.
pub const XLHP_HAS_FREEZE_PLANS: u8 = 1 << 4;
/// PRUNE: the block data has redirections.
pub const XLHP_HAS_REDIRECTIONS: u8 = 1 << 5;
/// PRUNE: the block data has line pointers that are now dead.
pub const XLHP_HAS_DEAD_ITEMS: u8 = 1 << 6;
/// PRUNE: the block data has line pointers that are now unused.
pub const XLHP_HAS_NOW_UNUSED_ITEMS: u8 = 1 << 7;

/// Freeze plan: xvac becomes the frozen transaction id.
pub const XLH_FREEZE_XVAC: u8 = 0x02;
/// Freeze plan: xvac becomes invalid.
pub const XLH_INVALID_XVAC: u8 = 0x04;

/// VISIBLE: block reference of the visibility map page.
pub const VISIBLE_BLKREF_VM: u8 = 0;
/// VISIBLE: block reference of the heap page.
pub const VISIBLE_BLKREF_HEAP: u8 = 1;

/// What the PRUNE records say (`xl_heap_prune`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prune {
    /// `XLHP_…`.
    pub flags: u8,
    /// The newest transaction id removed or frozen.
    pub conflict_horizon: Option<TransactionId>,
}

impl Prune {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &[u8]) -> Option<Prune> {
        let mut reader = Reader::new(main);
        // The reason, which nobody reads.
        reader.u8()?;
        let flags = reader.u8()?;
        let has_horizon = flags & XLHP_HAS_CONFLICT_HORIZON != 0;
        Some(Prune { flags, conflict_horizon: if has_horizon { Some(reader.u32()?) } else { None } })
    }

    /// Whether line pointers change, and with them free space.
    #[inline]
    pub fn changes_items(&self) -> bool {
        self.flags & (XLHP_HAS_REDIRECTIONS | XLHP_HAS_DEAD_ITEMS | XLHP_HAS_NOW_UNUSED_ITEMS) != 0
    }
}

/// The block data of a PRUNE record (`heap_xlog_deserialize_prune_and_freeze`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneItems<'a> {
    /// Freeze plans, see [`FreezePlan::read`].
    pub plans: &'a [[u8; FREEZE_PLAN_SIZE]],
    /// Pairs of line pointer numbers: which is redirected, and to which; see [`pair`].
    pub redirected: &'a [[u8; 4]],
    /// Line pointers that become dead.
    pub dead: &'a [[u8; 2]],
    /// Line pointers that become unused.
    pub unused: &'a [[u8; 2]],
    /// What follows: the line pointers that the freeze plans speak of, one plan's after the other's.
    pub freeze: &'a [[u8; 2]],
}

/// Takes `count` items of `N` bytes.
#[inline]
fn take_items<'a, const N: usize>(reader: &mut Reader<'a>, count: u16) -> Option<&'a [[u8; N]]> {
    Some(reader.take(usize::from(count) * N)?.as_chunks().0)
}

impl<'a> PruneItems<'a> {
    /// Reads the block data under a record's flags; `None` if it is too short, or ends in half an item.
    #[inline]
    pub fn parse(data: &'a [u8], flags: u8) -> Option<PruneItems<'a>> {
        let mut reader = Reader::new(data);
        let mut items = PruneItems { plans: &[], redirected: &[], dead: &[], unused: &[], freeze: &[] };
        if flags & XLHP_HAS_FREEZE_PLANS != 0 {
            let count = reader.u16()?;
            reader.take(2)?;
            items.plans = take_items(&mut reader, count)?;
        }
        if flags & XLHP_HAS_REDIRECTIONS != 0 {
            let count = reader.u16()?;
            items.redirected = take_items(&mut reader, count)?;
        }
        if flags & XLHP_HAS_DEAD_ITEMS != 0 {
            let count = reader.u16()?;
            items.dead = take_items(&mut reader, count)?;
        }
        if flags & XLHP_HAS_NOW_UNUSED_ITEMS != 0 {
            let count = reader.u16()?;
            items.unused = take_items(&mut reader, count)?;
        }
        let (freeze, half) = reader.rest().as_chunks();
        items.freeze = freeze;
        half.is_empty().then_some(items)
    }
}

/// Two line pointer numbers of a redirection.
#[inline]
pub fn pair(bytes: &[u8; 4]) -> (OffsetNumber, OffsetNumber) {
    (u16_at(bytes, 0), u16_at(bytes, 2))
}

/// Bytes of a freeze plan (`sizeof(xlhp_freeze_plan)`).
pub const FREEZE_PLAN_SIZE: usize = 12;

/// What becomes of the headers of some tuples (`xlhp_freeze_plan`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreezePlan {
    /// The new xmax.
    pub xmax: TransactionId,
    /// The new `t_infomask2`.
    pub infomask2: u16,
    /// The new `t_infomask`.
    pub infomask: u16,
    /// `XLH_FREEZE_XVAC`, `XLH_INVALID_XVAC`.
    pub flags: u8,
    /// To how many of [`PruneItems::freeze`] it applies.
    pub tuples: u16,
}

impl FreezePlan {
    /// Reads one.
    #[inline]
    pub fn read(bytes: &[u8; FREEZE_PLAN_SIZE]) -> FreezePlan {
        FreezePlan {
            xmax: u32_at(bytes, 0),
            infomask2: u16_at(bytes, 4),
            infomask: u16_at(bytes, 6),
            flags: bytes[8],
            tuples: u16_at(bytes, 10),
        }
    }
}

/// What VISIBLE says (`xl_heap_visible`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// The newest xmin on the page.
    pub conflict_horizon: TransactionId,
    /// The bits to set, and 4 for a catalog relation.
    pub flags: u8,
}

impl Visible {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &[u8]) -> Option<Visible> {
        let main: &[u8; 5] = main.first_chunk()?;
        Some(Visible { conflict_horizon: u32_at(main, 0), flags: main[4] })
    }
}

/// What MULTI_INSERT says (`xl_heap_multi_insert`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiInsert<'a> {
    /// `XLH_INSERT_…`.
    pub flags: u8,
    /// How many tuples.
    pub tuples: u16,
    /// Their line pointer numbers; none where the page is initialised, and they count from 1.
    pub numbers: &'a [[u8; 2]],
}

impl<'a> MultiInsert<'a> {
    /// Reads the main data; `None` if it is too short.
    #[inline]
    pub fn parse(main: &'a [u8], page_is_initialised: bool) -> Option<MultiInsert<'a>> {
        let (fixed, rest) = main.split_first_chunk::<4>()?;
        let tuples = u16_at(fixed, 2);
        let numbers = if page_is_initialised { &[] } else { rest.as_chunks().0.get(..usize::from(tuples))? };
        Some(MultiInsert { flags: fixed[0], tuples, numbers })
    }
}

/// The header before each tuple in the block data of MULTI_INSERT (`xl_multi_insert_tuple`); it begins at an even
/// offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiInsertTuple<'a> {
    /// `t_infomask2`.
    pub infomask2: u16,
    /// `t_infomask`.
    pub infomask: u16,
    /// `t_hoff`.
    pub hoff: u8,
    /// The tuple from behind its fixed header on.
    pub data: &'a [u8],
}

impl<'a> MultiInsertTuple<'a> {
    /// Reads the tuple that begins at or right behind `at`, and where it ends; `None` if `data` is too short.
    #[inline]
    pub fn read(data: &'a [u8], at: usize) -> Option<(MultiInsertTuple<'a>, usize)> {
        let begin = at + at % 2;
        let (fixed, rest) = data.get(begin..)?.split_first_chunk::<7>()?;
        let len = usize::from(u16_at(fixed, 0));
        let tuple = MultiInsertTuple {
            infomask2: u16_at(fixed, 2),
            infomask: u16_at(fixed, 4),
            hoff: fixed[6],
            data: rest.get(..len)?,
        };
        Some((tuple, begin + 7 + len))
    }
}

/// What NEW_CID says (`xl_heap_new_cid`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewCid {
    /// The top-level transaction.
    pub top_xid: TransactionId,
    /// Command that made the tuple.
    pub cmin: u32,
    /// Command that removed it.
    pub cmax: u32,
    /// Combo command id.
    pub combo: u32,
    /// The relation.
    pub rel: RelFileLocator,
    /// The tuple's block.
    pub block: BlockNumber,
    /// The tuple's line pointer.
    pub number: OffsetNumber,
}

impl NewCid {
    /// Reads the main data; `None` if it is too short.
    pub fn parse(main: &[u8]) -> Option<NewCid> {
        let mut reader = Reader::new(main);
        Some(NewCid {
            top_xid: reader.u32()?,
            cmin: reader.u32()?,
            cmax: reader.u32()?,
            combo: reader.u32()?,
            rel: RelFileLocator::read(&reader.array::<12>()?),
            // A block number in a tuple identifier is stored as two halves, high first.
            block: u32::from(reader.u16()?) << 16 | u32::from(reader.u16()?),
            number: reader.u16()?,
        })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    Some(match info & 0xF0 {
        XLOG_HEAP2_PRUNE_ON_ACCESS => "PRUNE_ON_ACCESS",
        XLOG_HEAP2_PRUNE_VACUUM_SCAN => "PRUNE_VACUUM_SCAN",
        XLOG_HEAP2_PRUNE_VACUUM_CLEANUP => "PRUNE_VACUUM_CLEANUP",
        XLOG_HEAP2_VISIBLE => "VISIBLE",
        XLOG_HEAP2_MULTI_INSERT => "MULTI_INSERT",
        0xD0 => "MULTI_INSERT+INIT",
        XLOG_HEAP2_LOCK_UPDATED => "LOCK_UPDATED",
        XLOG_HEAP2_NEW_CID => "NEW_CID",
        XLOG_HEAP2_REWRITE => "REWRITE",
        _ => return None,
    })
}

/// Appends what the record says (`heap2_desc`).
pub fn describe(record: &Record<'_>, out: &mut String) {
    let _ = try_describe(record, out);
}

fn try_describe(record: &Record<'_>, out: &mut String) -> Option<()> {
    let main = record.main_data;
    let block_data = record.block(0).filter(|block| block.has_data).map(|block| block.data);
    // Writing to a string cannot fail.
    match record.info() & XLOG_HEAP_OPMASK {
        XLOG_HEAP2_PRUNE_ON_ACCESS | XLOG_HEAP2_PRUNE_VACUUM_SCAN | XLOG_HEAP2_PRUNE_VACUUM_CLEANUP => {
            let prune = Prune::parse(main)?;
            if let Some(horizon) = prune.conflict_horizon {
                let _ = write!(out, "snapshotConflictHorizon: {horizon}");
            }
            let catalog = true_false(prune.flags & XLHP_IS_CATALOG_REL != 0);
            // PostgreSQL begins with the comma too where there is no horizon.
            let _ = write!(out, ", isCatalogRel: {catalog}");
            if let Some(data) = block_data {
                describe_prune_items(&PruneItems::parse(data, prune.flags)?, out);
            }
        }
        XLOG_HEAP2_VISIBLE => {
            let visible = Visible::parse(main)?;
            let Visible { conflict_horizon, flags } = visible;
            let _ = write!(out, "snapshotConflictHorizon: {conflict_horizon}, flags: 0x{flags:02X}");
        }
        XLOG_HEAP2_MULTI_INSERT => {
            let insert = MultiInsert::parse(main, record.info() & XLOG_HEAP_INIT_PAGE != 0)?;
            let _ = write!(out, "ntuples: {}, flags: 0x{:02X}", insert.tuples, insert.flags);
            if block_data.is_some() && record.info() & XLOG_HEAP_INIT_PAGE == 0 {
                out.push_str(", offsets:");
                describe_array(insert.numbers, out, describe_number);
            }
        }
        XLOG_HEAP2_LOCK_UPDATED => Lock::parse(main)?.describe(out),
        XLOG_HEAP2_NEW_CID => {
            let NewCid { cmin, cmax, combo, rel, block, number, .. } = NewCid::parse(main)?;
            let _ = write!(out, "rel: {rel}, tid: {block}/{number}, cmin: {cmin}, cmax: {cmax}, combo: {combo}");
        }
        _ => {}
    }
    Some(())
}

fn describe_number(number: &[u8; 2], out: &mut String) {
    let _ = write!(out, "{}", u16::from_le_bytes(*number));
}

fn describe_prune_items(items: &PruneItems<'_>, out: &mut String) {
    let PruneItems { plans, redirected, dead, unused, mut freeze } = *items;
    let (nplans, nredirected, ndead, nunused) = (plans.len(), redirected.len(), dead.len(), unused.len());
    let _ = write!(out, ", nplans: {nplans}, nredirected: {nredirected}, ndead: {ndead}, nunused: {nunused}");
    if !plans.is_empty() {
        out.push_str(", plans:");
        describe_array(plans, out, |plan, out| {
            let FreezePlan { xmax, infomask2, infomask, tuples, .. } = FreezePlan::read(plan);
            let _ = write!(out, "{{ xmax: {xmax}, infomask: {infomask}, infomask2: {infomask2}, ntuples: {tuples}");
            out.push_str(", offsets:");
            let (numbers, rest) = freeze.split_at(freeze.len().min(tuples.into()));
            freeze = rest;
            describe_array(numbers, out, describe_number);
            out.push_str(" }");
        });
    }
    if !redirected.is_empty() {
        out.push_str(", redirected:");
        describe_array(redirected, out, |redirection, out| {
            let (from, to) = pair(redirection);
            let _ = write!(out, "{from}->{to}");
        });
    }
    if !dead.is_empty() {
        out.push_str(", dead:");
        describe_array(dead, out, describe_number);
    }
    if !unused.is_empty() {
        out.push_str(", unused:");
        describe_array(unused, out, describe_number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rmgr::RmgrId;
    use crate::testing::{RecordBuilder, TEST_REL};
    use walrider_layout::{ForkNumber, Lsn};

    fn described(info: u8, main: &[u8], data: &[u8]) -> String {
        let bytes = RecordBuilder::new(RmgrId::HEAP2, info)
            .main_data(main)
            .block(0, TEST_REL, ForkNumber::Main, 3)
            .data(data)
            .build();
        let mut out = String::new();
        describe(&RecordBuilder::parse(&bytes, Lsn(40)), &mut out);
        out
    }

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let mut data = vec![1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0x0B, 0, 0, 2, 0];
        data.extend([1, 0, 4, 0, 5, 0]);
        data.extend([2, 0, 6, 0, 7, 0]);
        data.extend([1, 0, 8, 0]);
        data.extend([5, 0, 9, 0]);
        assert_eq!(
            described(XLOG_HEAP2_PRUNE_VACUUM_SCAN, &[1, 0xF8, 0xE7, 2, 0, 0], &data),
            "snapshotConflictHorizon: 743, isCatalogRel: F, nplans: 1, nredirected: 1, ndead: 2, nunused: 1, \
             plans: [{ xmax: 0, infomask: 2816, infomask2: 3, ntuples: 2, offsets: [5, 9] }], \
             redirected: [4->5], dead: [6, 7], unused: [8]"
        );
        assert_eq!(described(XLOG_HEAP2_PRUNE_VACUUM_CLEANUP, &[2, 0], &[]), ", isCatalogRel: F");
        assert_eq!(
            described(XLOG_HEAP2_VISIBLE, &[0xE7, 2, 0, 0, 3], &[]),
            "snapshotConflictHorizon: 743, flags: 0x03"
        );
        assert_eq!(
            described(XLOG_HEAP2_MULTI_INSERT, &[2, 0, 2, 0, 7, 0, 8, 0], &[1]),
            "ntuples: 2, flags: 0x02, offsets: [7, 8]"
        );
        assert_eq!(described(XLOG_HEAP2_MULTI_INSERT | 0x80, &[2, 0, 2, 0], &[1]), "ntuples: 2, flags: 0x02");
        let mut cid = vec![];
        for field in [9u32, 1, 2, 3, 1663, 5, 1259] {
            cid.extend(field.to_le_bytes());
        }
        cid.extend([1, 0, 2, 0, 4, 0]);
        assert_eq!(
            described(XLOG_HEAP2_NEW_CID, &cid, &[]),
            "rel: 1663/5/1259, tid: 65538/4, cmin: 1, cmax: 2, combo: 3"
        );
    }

    #[test]
    fn short_data_is_no_prune() {
        let data = [1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0x0B, 0, 0, 2, 0, 1, 0, 4, 0, 5, 0];
        let flags = XLHP_HAS_FREEZE_PLANS | XLHP_HAS_REDIRECTIONS;
        assert!(PruneItems::parse(&data, flags).is_some());
        for len in 0..data.len() {
            assert_eq!(PruneItems::parse(&data[..len], flags), None, "{len}");
        }
    }
}
