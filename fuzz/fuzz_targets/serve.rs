//! Any bytes as a client's first packet, its messages and replication commands.
#![no_main]

#[path = "../../crates/wire/tests/hostile/serve.rs"]
mod serve;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| serve::everything(bytes));
