//! From records to page operations: which pages each record changes, sorted into partitions.

use walrider_layout::{ForkNumber, Lsn, Major, TransactionId};
use walrider_redo::rmgr::{Class, class_of, may_clear, redo_fn};
use walrider_redo::{Change, Touched, blocks_touched, maps_touched};
use walrider_wal::decode::{Found, Place, Stretch};
use walrider_wal::record::Record;

use crate::globals::PlainCommit;
use crate::rels::{PageKey, RelNumbers, RelTable};

/// Pages are spread over this many partitions; each is worked on by one thread at a time. More than there are
/// threads, so that a hot partition delays nobody.
pub const PARTITIONS: usize = 64;

/// The partition of a page.
#[inline]
pub fn partition_of(key: PageKey) -> usize {
    (key.spread() >> 58) as usize
}

const _: () = assert!(PARTITIONS == 1 << (64 - 58));

/// One record's change of one page.
#[derive(Clone, Copy, Debug)]
pub struct PageOp {
    /// The page.
    pub key: PageKey,
    /// Where the record is in its stretch.
    pub place: Place,
    /// The change.
    pub change: Change,
}

/// A record that ends replay before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Walrider has no redo for it.
    Unsupported,
    /// Its bytes make no sense although their CRC is right.
    Corrupt(String),
}

/// A record that is replayed in order with all others of its kind.
#[derive(Clone, Copy, Debug)]
pub struct Global {
    /// How many records of the stretch come before it.
    pub number: u32,
    /// The newest transaction id since the one before, 0 if there was none: every record advances the next one.
    pub newest_xid: TransactionId,
    /// It is such a commit.
    pub commit: Option<PlainCommit>,
}

/// What is to be done for the records of a stretch.
#[derive(Debug, Default)]
pub struct Plan {
    /// Changes of pages, by partition, in LSN order; without those of free space maps.
    pub ops: Vec<Vec<PageOp>>,
    /// Changes of pages of free space maps, in LSN order. They come after the heap pages they are told about.
    pub fsm_ops: Vec<PageOp>,
    /// Records that change more than pages, in LSN order.
    pub globals: Vec<Global>,
    /// The first record that ends replay.
    pub obstacle: Option<(u32, Obstacle)>,
    /// The newest transaction id behind the last of `globals`, 0 if there is none.
    pub newest_xid: TransactionId,
}

impl Plan {
    /// Begins again.
    pub fn reset(&mut self) {
        self.ops.resize_with(PARTITIONS, Vec::new);
        self.ops.iter_mut().for_each(Vec::clear);
        self.fsm_ops.clear();
        self.globals.clear();
        self.obstacle = None;
        self.newest_xid = 0;
    }

    /// How many changes there are of pages but those of free space maps.
    pub fn operations(&self) -> usize {
        self.ops.iter().map(Vec::len).sum()
    }

    /// Plans the next record, unless an earlier one ends replay.
    #[inline]
    pub fn take(&mut self, major: Major, found: &Found<'_>, table: &RelTable, numbers: &mut RelNumbers) {
        if self.obstacle.is_some() {
            return;
        }
        let mut record = Record::empty(major);
        let planned = record
            .read(found.bytes, found.span.lsn, found.span.end)
            .map_err(|error| Obstacle::Corrupt(error.to_string()))
            .and_then(|()| self.add(found, &record, table, numbers));
        if let Err(obstacle) = planned {
            self.obstacle = Some((found.number, obstacle));
        }
    }

    fn add(
        &mut self,
        found: &Found<'_>,
        record: &Record<'_>,
        table: &RelTable,
        numbers: &mut RelNumbers,
    ) -> Result<(), Obstacle> {
        let rmgr = record.header.rmgr;
        let xid = record.xid();
        // Compared modulo 2^31, as ids wrap around.
        if self.newest_xid == 0 || (xid != 0 && xid.wrapping_sub(self.newest_xid) as i32 > 0) {
            self.newest_xid = xid;
        }
        match class_of(record) {
            Class::Unsupported => return Err(Obstacle::Unsupported),
            Class::Pages => {}
            Class::Global => {
                let newest_xid = std::mem::take(&mut self.newest_xid);
                self.globals.push(Global { number: found.number, newest_xid, commit: PlainCommit::of(record) });
            }
        }
        if !record.blocks.is_empty() && redo_fn(rmgr).is_none() {
            return Err(Obstacle::Corrupt(format!("{rmgr} record with block references")));
        }
        for page in blocks_touched(record) {
            self.put(page, found.place, table, numbers);
        }
        if may_clear(record) {
            for page in maps_touched(record).map_err(|error| Obstacle::Corrupt(error.to_string()))? {
                self.put(page, found.place, table, numbers);
            }
        }
        Ok(())
    }

    // A call for each page would cost more than it does.
    #[inline(always)]
    fn put(&mut self, page: Touched, place: Place, table: &RelTable, numbers: &mut RelNumbers) {
        let key = PageKey::new(numbers.number(table, page.rel, page.fork), page.block);
        let op = PageOp { key, place, change: page.change };
        if page.fork == ForkNumber::FreeSpaceMap {
            self.fsm_ops.push(op);
        } else {
            self.ops[partition_of(key)].push(op);
        }
    }
}

/// A stretch with its plan, on its way through replay.
#[derive(Debug, Default)]
pub struct Planned {
    /// The records.
    pub stretch: Stretch,
    /// What they do.
    pub plan: Plan,
    /// So many records are replayed.
    pub done: u32,
}

impl Planned {
    /// Bytes of memory that it holds, used or not.
    pub fn held_bytes(&self) -> usize {
        let ops = self.plan.ops.iter().chain([&self.plan.fsm_ops]).map(Vec::capacity).sum::<usize>();
        self.stretch.held_bytes() + ops * size_of::<PageOp>() + self.plan.globals.capacity() * size_of::<Global>()
    }

    /// Where the record of this number ends.
    pub fn end_of(&self, number: u32) -> Lsn {
        self.stretch.span(self.stretch.place(number)).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_wal::decode::Span;
    use walrider_wal::record::BKPIMAGE_APPLY;
    use walrider_wal::records::{hash, xlog};
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    /// Such pages, of a free space map that was made without WAL, were taken for pages that the directory lacks.
    #[test]
    fn pages_with_hint_bits_but_without_an_image_are_not_touched() {
        let changes = |info| {
            let builder = RecordBuilder::new(RmgrId::XLOG, info);
            let bytes = builder
                .block(0, TEST_REL, ForkNumber::FreeSpaceMap, 2)
                .block(1, TEST_REL, ForkNumber::FreeSpaceMap, 0)
                .full_image(&[0; walrider_layout::BLCKSZ])
                .build();
            let mut plan = Plan::default();
            let found = Found { number: 0, span: Span::default(), place: Place::default(), bytes: &bytes };
            let record = RecordBuilder::parse(&bytes, Lsn(40));
            plan.add(&found, &record, &RelTable::default(), &mut RelNumbers::default()).unwrap();
            plan.fsm_ops.iter().map(|op| op.change).collect::<Vec<_>>()
        };
        assert_eq!(changes(xlog::XLOG_FPI_FOR_HINT), [Change::Overwrite(1)]);
        assert_eq!(changes(xlog::XLOG_FPI), [Change::Block(0), Change::Overwrite(1)]);
    }

    /// Such pages were read, and verified, and replay ended where a power cut had torn one that a later record brings.
    #[test]
    fn pages_that_are_only_locked_are_not_read() {
        let changes = |rmgr, info, image: Option<u8>| {
            let mut builder = RecordBuilder::new(rmgr, info).block(0, TEST_REL, ForkNumber::Main, 2);
            if let Some(image_info) = image {
                builder = builder.image(image_info, 0, 0, [0; walrider_layout::BLCKSZ]);
            }
            let bytes = builder.block(1, TEST_REL, ForkNumber::Main, 3).build();
            let mut plan = Plan::default();
            plan.reset();
            let found = Found { number: 0, span: Span::default(), place: Place::default(), bytes: &bytes };
            let record = RecordBuilder::parse(&bytes, Lsn(40));
            plan.add(&found, &record, &RelTable::default(), &mut RelNumbers::default()).unwrap();
            let mut ops: Vec<PageOp> = plan.ops.into_iter().flatten().collect();
            ops.sort_by_key(|op| op.key);
            ops.iter().map(|op| op.change).collect::<Vec<_>>()
        };
        for info in [hash::XLOG_HASH_DELETE, hash::XLOG_HASH_MOVE_PAGE_CONTENTS, hash::XLOG_HASH_SQUEEZE_PAGE] {
            assert_eq!(changes(RmgrId::HASH, info, None), [Change::Lock, Change::Block(1)]);
            assert_eq!(changes(RmgrId::HASH, info, Some(BKPIMAGE_APPLY)), [Change::Overwrite(0), Change::Block(1)]);
            // To be compared with.
            assert_eq!(changes(RmgrId::HASH, info, Some(0)), [Change::Block(0), Change::Block(1)]);
        }
        assert_eq!(changes(RmgrId::HASH, hash::XLOG_HASH_INSERT, None), [Change::Block(0), Change::Block(1)]);
        assert_eq!(changes(RmgrId::BTREE, hash::XLOG_HASH_DELETE, None), [Change::Block(0), Change::Block(1)]);
    }
}
