//! Records and pages that nearly make sense, built from any bytes, through every redo routine.
#![no_main]

#[path = "../../crates/redo/tests/hostile/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::redo(bytes));
