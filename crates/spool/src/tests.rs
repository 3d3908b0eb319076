//! The spool against a model, on a real directory.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use crate::{Spool, SpoolOptions};

const MB: u64 = 1 << 20;

fn options(directory: &std::path::Path) -> SpoolOptions {
    SpoolOptions {
        directory: directory.to_owned(),
        segment_size: SegmentSize::new(MB as u32).unwrap(),
        ..SpoolOptions::default()
    }
}

#[test]
fn wal_across_segments_is_written_and_flushed() {
    let dir = tempfile::tempdir().unwrap();
    let spool: Arc<Spool> = Spool::open(options(dir.path())).unwrap();
    let mut writer = spool.start_at(TimelineId(1), Lsn(5 * MB)).unwrap();
    let bytes: Vec<u8> = (0..3 * MB + 100).map(|at| (at % 251) as u8).collect();
    writer.write(Lsn(5 * MB), &bytes).unwrap();
    spool.wait_flushed(Lsn(8 * MB + 100)).unwrap();
    assert_eq!(spool.flushed(), Lsn(8 * MB + 100));
    assert_eq!(spool.wait_written_beyond(Lsn(8 * MB), Duration::ZERO), Lsn(8 * MB + 100));
    drop(writer);
    drop(spool);
    let read: Vec<u8> =
        (5..9).flat_map(|n| fs::read(dir.path().join(format!("0000000100000000{n:08X}"))).unwrap()).collect();
    assert!(read[..bytes.len()] == bytes);
}
