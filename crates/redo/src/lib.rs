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
