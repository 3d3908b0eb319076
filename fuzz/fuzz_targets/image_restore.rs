//! Any bytes as a full-page image, plain or compressed.
#![no_main]

#[path = "../../crates/redo/tests/hostile/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::image(bytes));
