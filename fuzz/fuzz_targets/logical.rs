//! Any bytes as the messages of a logical slot.
#![no_main]

// The decoder's files without the rest of its crate, which brings a TLS library with it.
extern crate self as walrider_logical;

#[path = "../../crates/logical/tests/hostile/drive.rs"]
mod drive;
#[path = "../../crates/logical/src/kind.rs"]
mod kind;
#[allow(dead_code, reason = "the rest of the crate uses it")]
#[path = "../../crates/logical/src/message.rs"]
pub mod message;
#[path = "../../crates/logical/src/testing.rs"]
pub mod testing;
#[path = "../../crates/logical/src/tuple.rs"]
mod tuple;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::everything(bytes));
