//! Any bytes as the messages of a logical slot.
#![no_main]

#[path = "../../crates/logical/tests/hostile/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::everything(bytes));
