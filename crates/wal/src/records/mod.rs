//! What records say: per resource manager the layout of their data, the names of their types and their description.

pub mod brin;
pub mod btree;
pub mod clog;
pub mod commit_ts;
pub mod dbase;
pub mod generic;
pub mod gin;
pub mod gist;
pub mod hash;
pub mod heap;
pub mod heap2;
pub mod logicalmsg;
pub mod multixact;
pub mod parts;
pub mod relmap;
pub mod replorigin;
pub mod seq;
pub mod smgr;
pub mod spgist;
pub mod standby;
pub mod tblspc;
pub mod xact;
pub mod xlog;
