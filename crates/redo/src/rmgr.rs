//! The table of resource managers, as far as pages go: how their records are replayed, which module redoes them, and what
//! may differ between two of their pages (`access/rmgrlist.h`). Numbers, names and descriptions are in
//! [`walrider_wal::rmgr`].

use walrider_layout::BlockNumber;
use walrider_layout::page::PageMut;
use walrider_wal::record::{BlockRef, Record};
use walrider_wal::rmgr::RmgrId;

use crate::{BlockRedo, RedoError, brin, btree, generic, gin, gist, hash, heap, heap2, mask, seq, spgist, vm, xlog};

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
    ($($id:ident $class:path, $redo:expr, $mask:path, $touch:path, $more:path;)*) => {
        /// How a record is replayed.
        #[inline]
        pub fn class_of(record: &Record<'_>) -> Class {
            match record.header.rmgr {
                $(RmgrId::$id => $class(record),)*
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

        /// Blanks what a page may differ in without any record saying so (`rm_mask`); for callers to whom a page must make
        /// sense. See [`mask::mask_page`] for others.
        ///
        /// # Errors
        /// When header, line pointers or special space make no sense, as on a page that is all zeros.
        pub(crate) fn mask(rmgr: RmgrId, page: &mut PageMut<'_>, block: BlockNumber) -> Result<(), RedoError> {
            match rmgr {
                $(RmgrId::$id => $mask(page, block),)*
                _ => Ok(()),
            }
        }

        /// What a record does to the page of one of its block references, where it does not overwrite it.
        #[inline]
        pub fn touch(record: &Record<'_>, block: &BlockRef<'_>) -> Touch {
            match record.header.rmgr {
                $(RmgrId::$id => $touch(record, block),)*
                _ => Touch::Change,
            }
        }

        /// Whether [`vm::unregistered_clears`] has to be asked for pages beyond the record's block references.
        #[inline]
        pub(crate) fn may_clear(record: &Record<'_>) -> bool {
            match record.header.rmgr {
                $(RmgrId::$id => $more(record),)*
                _ => false,
            }
        }
    };
}

// A row for each: how its records are replayed, redo of a block, mask of a page, which block references do not just change
// their page, and whether there are pages beyond these.
rmgrs! {
    XLOG       xlog::class,  Some(xlog::redo),    mask::nothing,  xlog::touch,  never;
    XACT       global,       None,                mask::nothing,  change,       never;
    SMGR       global,       None,                mask::nothing,  change,       never;
    CLOG       global,       None,                mask::nothing,  change,       never;
    DBASE      global,       None,                mask::nothing,  change,       never;
    TBLSPC     global,       None,                mask::nothing,  change,       never;
    MULTIXACT  global,       None,                mask::nothing,  change,       never;
    RELMAP     global,       None,                mask::nothing,  change,       never;
    STANDBY    global,       None,                mask::nothing,  change,       never;
    HEAP2      heap2::class, Some(heap2::redo),   heap::mask,     heap2::touch, vm::may_clear;
    HEAP       heap::class,  Some(heap::redo),    heap::mask,     change,       vm::may_clear;
    BTREE      pages,        Some(btree::redo),   btree::mask,    change,       never;
    HASH       pages,        Some(hash::redo),    hash::mask,     hash::touch,  never;
    GIN        pages,        Some(gin::redo),     gin::mask,      change,       never;
    GIST       pages,        Some(gist::redo),    gist::mask,     change,       never;
    SEQ        pages,        Some(seq::redo),     mask::contents, change,       never;
    SPGIST     pages,        Some(spgist::redo),  spgist::mask,   change,       never;
    BRIN       pages,        Some(brin::redo),    brin::mask,     change,       never;
    COMMIT_TS  global,       None,                mask::nothing,  change,       never;
    REPLORIGIN global,       None,                mask::nothing,  change,       never;
    GENERIC    pages,        Some(generic::redo), mask::contents, change,       never;
    LOGICALMSG global,       None,                mask::nothing,  change,       never;
}

fn pages(_: &Record<'_>) -> Class {
    Class::Pages
}

fn global(_: &Record<'_>) -> Class {
    Class::Global
}

fn change(_: &Record<'_>, _: &BlockRef<'_>) -> Touch {
    Touch::Change
}

fn never(_: &Record<'_>) -> bool {
    false
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
