//! Which pages a record touches, told from the record alone.

use arrayvec::ArrayVec;
use walrider_layout::{BlockNumber, ForkNumber, RelFileLocator};
use walrider_wal::record::Record;

use crate::rmgr::{Touch, may_clear, touch};
use crate::{RedoError, vm};

/// What a record does to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Redo of the block reference with this id.
    Block(u8),
    /// The same, where an image or the record itself gives every byte of the page: what it held before does not matter.
    Overwrite(u8),
    /// None: the record names the page only to lock it ([`Touch::Lock`]).
    Lock,
    /// One of [`vm::unregistered_clears`], by its place there.
    VmClear(u8),
}

/// A page that a record touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The relation.
    pub rel: RelFileLocator,
    /// Its fork.
    pub fork: ForkNumber,
    /// The page.
    pub block: BlockNumber,
    /// What happens to it.
    pub change: Change,
}

/// The pages that a record touches, in the order in which they are to be changed; one page may come twice.
///
/// Not among them: pages of the free space map, of which only redo of a heap page tells ([`crate::Effects`]), unless the
/// record refers to one; and what global records do to files ([`crate::rmgr::Class::Global`]), cut tails of maps included.
/// Of a resource manager without redo, they are the record's block references.
///
/// # Errors
/// As [`vm::unregistered_clears`].
pub fn pages_touched(record: &Record<'_>) -> Result<impl Iterator<Item = Touched>, RedoError> {
    let maps = if may_clear(record) { maps_touched(record)? } else { ArrayVec::new() };
    Ok(blocks_touched(record).chain(maps))
}

/// Of [`pages_touched`], those that the record refers to.
#[inline]
pub fn blocks_touched(record: &Record<'_>) -> impl Iterator<Item = Touched> {
    record.blocks.iter().filter_map(|block| {
        let change = match touch(record, block) {
            Touch::Nothing => return None,
            _ if block.will_init || block.image_applies() => Change::Overwrite(block.id),
            Touch::Lock => Change::Lock,
            Touch::Change | Touch::ChangeOrCreate => Change::Block(block.id),
        };
        Some(Touched { rel: block.rel, fork: block.fork, block: block.block, change })
    })
}

/// Of [`pages_touched`], those that the record does not refer to; none but where [`may_clear`] says so.
///
/// # Errors
/// As [`vm::unregistered_clears`].
pub fn maps_touched(record: &Record<'_>) -> Result<ArrayVec<Touched, 2>, RedoError> {
    let touched = |(nth, clear): (u8, &vm::VmClear)| {
        let (fork, block) = (ForkNumber::VisibilityMap, vm::map_block(clear.heap_block));
        Touched { rel: clear.rel, fork, block, change: Change::VmClear(nth) }
    };
    Ok((0..).zip(&vm::unregistered_clears(record)?).map(touched).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::Lsn;
    use walrider_wal::records::heap::XLOG_HEAP_DELETE;
    use walrider_wal::rmgr::RmgrId;
    use walrider_wal::testing::{RecordBuilder, TEST_REL};

    #[test]
    fn a_map_page_that_the_record_does_not_refer_to_is_touched_too() {
        let touched = |flags| {
            let builder = RecordBuilder::new(RmgrId::HEAP, XLOG_HEAP_DELETE).main_data([0, 0, 0, 0, 0, 0, 0, flags]);
            let bytes = builder.block(0, TEST_REL, ForkNumber::Main, 70_000).build();
            pages_touched(&RecordBuilder::parse(&bytes, Lsn(40))).unwrap().collect::<Vec<_>>()
        };
        let heap = Touched { rel: TEST_REL, fork: ForkNumber::Main, block: 70_000, change: Change::Block(0) };
        let fork = ForkNumber::VisibilityMap;
        assert_eq!(touched(0), [heap]);
        assert_eq!(touched(1), [heap, Touched { rel: TEST_REL, fork, block: 2, change: Change::VmClear(0) }]);
    }
}
