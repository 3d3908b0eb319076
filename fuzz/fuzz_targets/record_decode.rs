//! Any bytes as a WAL record: taken apart, described, and redone on an empty page.
#![no_main]

#[path = "../../crates/redo/tests/hostile/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    drive::record(bytes);
    // Nearly all bytes fail on the total length, which everything else hangs on.
    let mut bytes = bytes.to_vec();
    let len = bytes.len() as u32;
    if let Some(total_len) = bytes.first_chunk_mut() {
        *total_len = len.to_le_bytes();
        drive::record(&bytes);
    }
});
