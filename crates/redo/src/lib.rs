//! Redo: a WAL record and a page in, the changed page out; one module per resource manager.
//!
//! This crate never touches a file, socket, clock or thread, and never sees more than one page of a record at a
//! time: a record that changes three pages is redone by three calls, which may be far apart, or on three cores.

pub mod block;
pub mod brin;
pub mod btree;
pub mod fsm;
pub mod generic;
pub mod gin;
pub mod gist;
pub mod hash;
pub mod heap;
pub mod heap2;
pub mod heap_tuple;
pub mod index_tuple;
pub mod items;
pub mod mask;
pub mod seq;
pub mod special;
pub mod spgist;
pub mod vm;
pub mod xlog;

pub use block::{BlockRedo, Effects, Env, FreeSpace, Outcome, RedoError, Target, redo_block};

use walrider_wal::record::{BlockRef, Record};
use walrider_wal::rmgr::RmgrId;

/// Redoes one block of a record, once the outcome of the page is known.
pub type RedoFn = fn(&mut BlockRedo<'_, '_>) -> Result<(), RedoError>;

/// The redo routine of a resource manager whose records refer to blocks; `None` where Walrider has none.
pub fn redo_fn(rmgr: RmgrId) -> Option<RedoFn> {
    match rmgr {
        RmgrId::XLOG => Some(xlog::redo),
        RmgrId::HEAP => Some(heap::redo),
        RmgrId::HEAP2 => Some(heap2::redo),
        RmgrId::BTREE => Some(btree::redo),
        RmgrId::HASH => Some(hash::redo),
        RmgrId::GIN => Some(gin::redo),
        RmgrId::GIST => Some(gist::redo),
        RmgrId::SEQ => Some(seq::redo),
        RmgrId::SPGIST => Some(spgist::redo),
        RmgrId::BRIN => Some(brin::redo),
        RmgrId::GENERIC => Some(generic::redo),
        _ => None,
    }
}

/// Whether a record names a page only to lock it: redo neither changes it nor looks at what it holds, and it comes without an
/// image.
///
/// These are the pages that PostgreSQL registers with `REGBUF_NO_IMAGE` and `REGBUF_NO_CHANGE`: block 0 of three hash records
/// (`access/hash/hash.c`, `hashovfl.c`, PostgreSQL 18; the same in 17). No other record does that with page checksums; without
/// them, nobody verifies the heap page of `XLOG_HEAP2_VISIBLE`. An image may be there for `wal_consistency_checking`, which
/// looks at the page.
#[inline]
pub fn only_locks(record: &Record<'_>, block: &BlockRef<'_>) -> bool {
    record.header.rmgr == RmgrId::HASH && block.image.is_none() && !block.will_init && hash::names_bucket(record, block)
}
