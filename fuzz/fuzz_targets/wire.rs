//! Any bytes as messages of a server or a standby, connection strings, service and password files.
#![no_main]

#[path = "../../crates/wire/tests/hostile/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::everything(bytes));
