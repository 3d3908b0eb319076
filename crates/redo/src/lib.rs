//! Redo: a WAL record and a page in, the changed page out; one module per resource manager, one row each in [`rmgr`].
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
pub mod rmgr;
pub mod seq;
pub mod special;
pub mod spgist;
pub mod touched;
pub mod vm;
pub mod xlog;

pub use block::{BlockRedo, Effects, Env, FreeSpace, Outcome, RedoError, Target, redo_block};
pub use touched::{Change, Touched, blocks_touched, maps_touched, pages_touched};
