//! A standby from end to end in one thread, in a world that a seed makes: the disk loses and tears what was not synced, and fills up;
//! the network delays and cuts; primaries crash with WAL that they had sent, and others take their place on the next timeline;
//! power goes at any call of the disk; in some worlds an fsync is none although it reports success. The clock is simulated, and a seed gives the same run every time.
//!
//! What runs is what ships: [`walrider_standby::machine`] decides, [`walrider_stream::intake`] and
//! [`walrider_stream::positions`] receive and report, [`walrider_spool`] stores, [`walrider_store`] finds and reads,
//! [`walrider_replay::load`] checks and decodes. What stands in: connections and threads ([`standby`]), redo itself (records are
//! compared with those of the [`primary`] instead of being applied), the data directory (a control file of three fields).
//!
//! What [`world`] asserts, besides the assertions of the code itself:
//!
//! 1. Following, only what the primary has made durable is replayed, and it is that byte for byte.
//! 2. What was reported as flushed, and acknowledged, is there after any crash, and in what is promoted.
//! 3. What is promoted is what a primary once had.
//! 4. A directory can always be recovered to where its pages are.
//! 5. Once nothing fails any more, the standby catches up.
//!
//! Where an fsync was none, 2 and 4 cannot hold.

pub mod primary;
pub mod standby;
pub mod world;
