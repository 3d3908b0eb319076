//! The table of resource managers, as far as pages go: how their records are replayed, which module redoes them, and what
//! may differ between two of their pages (`access/rmgrlist.h`). Numbers, names and descriptions are in
//! [`walrider_wal::rmgr`].

use walrider_layout::BlockNumber;
use walrider_layout::page::PageMut;
use walrider_wal::record::{BlockRef, Record};
use walrider_wal::rmgr::RmgrId;

use crate::{BlockRedo, RedoError, brin, btree, generic, gin, gist, hash, heap, heap2, mask, seq, spgist, vm, xlog};
use Class::{Global, Pages};
use Touch::Change;

/// Redoes one block of a record, once the outcome of the page is known (`rm_redo`).
pub type RedoFn = fn(&mut BlockRedo<'_, '_>) -> Result<(), RedoError>;

/// How a record is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// By changes of pages alone.
    Pages,
    /// Also, or only, in order with all other global records.
    Global,
    /// Not at all.
    Unsupported,
}

/// What a record does to the page of one of its block references, where it does not overwrite it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Changes it, if it exists.
    Change,
    /// Changes it, and takes one that is missing or cannot be read for zeros (`RBM_ZERO_ON_ERROR`).
    ChangeOrCreate,
    /// Only locks it: redo neither changes it nor looks at what it holds.
    Lock,
    /// Nothing: it need not even exist.
    Nothing,
}

macro_rules! rmgrs {
    (
        |$record:ident, $block:ident, $page:ident, $number:ident|
        $($id:ident $class:expr, $redo:expr, $mask:expr, $touch:expr, $clears:expr;)*
    ) => {
        /// How a record is replayed.
        #[inline]
        pub fn class_of($record: &Record<'_>) -> Class {
            match $record.header.rmgr {
                $(RmgrId::$id => $class,)*
                _ => Class::Unsupported,
            }
        }

        /// The redo routine of a resource manager whose records refer to blocks; `None` where Walrider has none.
        #[inline]
        pub fn redo_fn(rmgr: RmgrId) -> Option<RedoFn> {
            match rmgr {
                $(RmgrId::$id => $redo,)*
                _ => None,
            }
        }

        /// [`mask::mask_page`], for callers to whom the page, at this block number, must make sense.
        ///
        /// # Errors
        /// When header, line pointers or special space make no sense, as on a page that is all zeros.
        pub(crate) fn mask(rmgr: RmgrId, $page: &mut PageMut<'_>, $number: BlockNumber) -> Result<(), RedoError> {
            match rmgr {
                $(RmgrId::$id => $mask,)*
                _ => Ok(()),
            }
        }

        /// What a record does to the page of one of its block references, where it does not overwrite it.
        #[inline]
        pub fn touch($record: &Record<'_>, $block: &BlockRef<'_>) -> Touch {
            match $record.header.rmgr {
                $(RmgrId::$id => $touch,)*
                _ => Touch::Change,
            }
        }

        /// Whether [`vm::unregistered_clears`] has to be asked for pages beyond the record's block references.
        #[inline]
        pub fn may_clear($record: &Record<'_>) -> bool {
            match $record.header.rmgr {
                $(RmgrId::$id => $clears,)*
                _ => false,
            }
        }
    };
}

// How its records are replayed, redo of a block, mask of a page, what is done to a block's page, and whether to more pages.
rmgrs! {
    |record, block, page, number|
    XLOG       xlog::class(record),  Some(xlog::redo),    Ok(()),                    xlog::touch(record, block),  false;
    XACT       Global,               None,                Ok(()),                    Change,                      false;
    SMGR       Global,               None,                Ok(()),                    Change,                      false;
    CLOG       Global,               None,                Ok(()),                    Change,                      false;
    DBASE      Global,               None,                Ok(()),                    Change,                      false;
    TBLSPC     Global,               None,                Ok(()),                    Change,                      false;
    MULTIXACT  Global,               None,                Ok(()),                    Change,                      false;
    RELMAP     Global,               None,                Ok(()),                    Change,                      false;
    STANDBY    Global,               None,                Ok(()),                    Change,                      false;
    HEAP2      heap2::class(record), Some(heap2::redo),   heap::mask(page, number),  heap2::touch(record, block), vm::may_clear(record);
    HEAP       heap::class(record),  Some(heap::redo),    heap::mask(page, number),  Change,                      vm::may_clear(record);
    BTREE      Pages,                Some(btree::redo),   btree::mask(page),         Change,                      false;
    HASH       Pages,                Some(hash::redo),    hash::mask(page),          hash::touch(record, block),  false;
    GIN        Pages,                Some(gin::redo),     gin::mask(page),           Change,                      false;
    GIST       Pages,                Some(gist::redo),    gist::mask(page),          Change,                      false;
    SEQ        Pages,                Some(seq::redo),     mask::without_hints(page), Change,                      false;
    SPGIST     Pages,                Some(spgist::redo),  spgist::mask(page),        Change,                      false;
    BRIN       Pages,                Some(brin::redo),    brin::mask(page),          Change,                      false;
    COMMIT_TS  Global,               None,                Ok(()),                    Change,                      false;
    REPLORIGIN Global,               None,                Ok(()),                    Change,                      false;
    GENERIC    Pages,                Some(generic::redo), mask::without_hints(page), Change,                      false;
    LOGICALMSG Global,               None,                Ok(()),                    Change,                      false;
}

#[cfg(test)]
mod tests {
    use super::*;
    use walrider_layout::Major;

    #[test]
    fn every_resource_manager_with_a_name_has_a_row_and_no_other() {
        for rmgr in (0..=u8::MAX).map(RmgrId) {
            let mut record = Record::empty(Major::V18);
            record.header.rmgr = rmgr;
            let class = class_of(&record);
            assert_eq!(class == Class::Unsupported, rmgr.get().is_none(), "{rmgr}");
            assert!(class != Class::Pages || redo_fn(rmgr).is_some(), "{rmgr}");
        }
    }
}
