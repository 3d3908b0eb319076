//! The spool on a real directory; its modules: on one in memory, which is slow, breaks, and crashes.

mod broken;
mod crash;
mod early;
mod names;
mod slow;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};
use walrider_seed::Random;

use crate::testing::Model;
use crate::{Spool, SpoolError, SpoolOptions, Writer};

const MB: u64 = 1 << 20;
const ONE: TimelineId = TimelineId(1);

fn options(directory: &Path) -> SpoolOptions {
    let segment_size = SegmentSize::new(MB as u32).unwrap();
    SpoolOptions { directory: directory.to_owned(), segment_size, ..SpoolOptions::default() }
}

fn on(model: &Model, options: SpoolOptions) -> Arc<Spool> {
    Spool::open_in(Arc::new(model.clone()), options).unwrap()
}

/// The name of a segment of 1 MB.
fn name(timeline: TimelineId, segment: u64) -> String {
    SegmentSize::new(MB as u32).unwrap().file_name(timeline, segment)
}

/// WAL from `start` to `end`: on each page its own address, where PostgreSQL has it; else anything but zeros.
fn wal(start: u64, end: u64) -> Vec<u8> {
    let mut random = Random(7);
    let mut bytes: Vec<u8> = (start..end).map(|_| random.number() as u8 | 1).collect();
    for page in (start.next_multiple_of(8192)..end).step_by(8192) {
        let at = (page - start) as usize + 8;
        if let Some(address) = bytes.get_mut(at..at + 8) {
            address.copy_from_slice(&page.to_le_bytes());
        }
    }
    bytes
}

/// Writes `bytes`, which begin at `start`, from the writer's position to `end`, in messages of random sizes.
fn write_to(writer: &mut Writer, bytes: &[u8], start: u64, end: u64, most: u64, random: &mut Random) {
    while writer.written().0 < end {
        let at = writer.written().0;
        let to = end.min(at + 1 + random.below(most));
        writer.write(Lsn(at), &bytes[(at - start) as usize..(to - start) as usize]).unwrap();
    }
}

#[test]
fn segments_hold_what_was_written_and_nothing_else() {
    let mut random = Random::printed();
    let dir = tempfile::tempdir().unwrap();
    let spool = Spool::open(options(dir.path())).unwrap();
    // By position; what is not in it is zero.
    let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut at = 5 * MB;
    for _ in 0..6 {
        let mut writer = spool.start_at(ONE, Lsn(at)).unwrap();
        assert_eq!((spool.written(), spool.flushed(), spool.timeline()), (Lsn(at), Lsn(at), ONE));
        let end = at + random.below(5 * MB / 2);
        let bytes = wal(at, end);
        let most = [300, 9_000, 200_000, 3_000_000][random.below(4) as usize];
        write_to(&mut writer, &bytes, at, end, most, &mut random);
        assert_eq!(spool.written(), Lsn(end));
        model.insert(at, bytes);
        // Begin again where this ended, or in the middle of it.
        at = end - if random.one_in(2) { 0 } else { random.below(end - at + 1) };
    }
    let stats = spool.stats();
    assert!(stats.fsyncs > 0 && stats.fsync_buckets.iter().sum::<u64>() == stats.fsyncs, "{stats:?}");
    assert_eq!(stats.bytes_written, model.values().map(|bytes| bytes.len() as u64).sum::<u64>());
    drop(spool);
    let end = model.iter().map(|(at, bytes)| at + bytes.len() as u64).max().unwrap();
    let mut expected = vec![0; (end - 5 * MB).next_multiple_of(MB) as usize];
    for (at, bytes) in model {
        expected[(at - 5 * MB) as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    for (segment, expected) in (5..).zip(expected.chunks(MB as usize)) {
        assert!(fs::read(dir.path().join(name(ONE, segment))).unwrap() == expected, "segment {segment}");
    }
}

#[test]
fn what_a_file_has_stays() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(name(ONE, 3)), vec![7; MB as usize]).unwrap();
    // A short one is filled up with zeros.
    fs::write(dir.path().join(name(ONE, 4)), vec![8; 5000]).unwrap();
    fs::write(dir.path().join("xlogtemp.1"), b"left over").unwrap();
    let spool = Spool::open(options(dir.path())).unwrap();
    assert!(!dir.path().join("xlogtemp.1").exists());
    let mut writer = spool.start_at(ONE, Lsn(3 * MB + 100)).unwrap();
    writer.write(Lsn(3 * MB + 100), &[1; 50]).unwrap();
    drop(writer);
    let mut writer = spool.start_at(ONE, Lsn(4 * MB + 5000)).unwrap();
    writer.write(Lsn(4 * MB + 5000), &[2; 50]).unwrap();
    drop((writer, spool));
    let read = |segment| fs::read(dir.path().join(name(ONE, segment))).unwrap();
    assert_eq!(read(3)[..200], [vec![7; 100], vec![1; 50], vec![7; 50]].concat());
    assert!(read(3)[200..] == vec![7; MB as usize - 200]);
    assert_eq!(read(4)[..5100], [vec![8; 5000], vec![2; 50], vec![0; 50]].concat());
    assert_eq!(read(4).len() as u64, MB);
}

#[test]
fn segments_of_every_size_are_made() {
    for shift in [20, 24, 26] {
        let dir = tempfile::tempdir().unwrap();
        let segment_size = SegmentSize::new(1 << shift).unwrap();
        let spool = Spool::open(SpoolOptions { segment_size, ..options(dir.path()) }).unwrap();
        let boundary = Lsn(3 << shift);
        let mut writer = spool.start_at(ONE, Lsn(boundary.0 - 10)).unwrap();
        writer.write(Lsn(boundary.0 - 10), &[1; 30]).unwrap();
        drop((writer, spool));
        for (segment, range, ones) in [(2, (1 << shift) - 10..1 << shift, 10), (3, 0..20, 20)] {
            let bytes = fs::read(dir.path().join(segment_size.file_name(ONE, segment))).unwrap();
            assert_eq!(bytes.len(), 1 << shift);
            assert_eq!(bytes[range], vec![1; ones]);
        }
    }
}

#[test]
fn new_files_may_be_read_by_those_who_should() {
    for (group_access, mode, directory_mode) in [(false, 0o600, 0o700), (true, 0o640, 0o750)] {
        let dir = tempfile::tempdir().unwrap();
        let archive_status = crate::ArchiveStatus::Done;
        let spool = Spool::open(SpoolOptions { group_access, archive_status, ..options(dir.path()) }).unwrap();
        let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
        writer.write(Lsn(MB), &vec![1; MB as usize + 1]).unwrap();
        spool.write_history(TimelineId(2), b"1\t0/3000000\tno reason\n").unwrap();
        drop((writer, spool));
        let mode_of = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o7777;
        let done = format!("archive_status/{}.done", name(ONE, 1));
        for file in [&name(ONE, 1), &name(ONE, 2), "00000002.history", &done] {
            assert_eq!(mode_of(file), mode, "{file}");
        }
        assert_eq!(mode_of("archive_status"), directory_mode);
    }
}

#[test]
fn bytes_out_of_order_are_refused_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let spool = Spool::open(options(dir.path())).unwrap();
    assert!(matches!(spool.start_at(TimelineId(0), Lsn(MB)), Err(SpoolError::Refused(_))));
    assert!(matches!(spool.start_at(ONE, Lsn::INVALID), Err(SpoolError::Refused(_))));
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    let second = spool.start_at(ONE, Lsn(MB)).err().unwrap();
    assert_eq!(second.to_string(), "WAL has a writer already");
    writer.write(Lsn(MB), &[1; 100]).unwrap();
    let gap = writer.write(Lsn(MB + 101), &[2]).unwrap_err();
    assert_eq!(gap.to_string(), "WAL from 0/100064 to 0/100065 is missing");
    let overlap = writer.write(Lsn(MB + 99), &[2]).unwrap_err();
    assert_eq!(overlap.to_string(), "WAL from 0/100063 to 0/100064 is already written");
    writer.write(Lsn(MB + 100), &[]).unwrap();
    assert_eq!((writer.written(), spool.written()), (Lsn(MB + 100), Lsn(MB + 100)));
    drop(writer);
    let mut writer = spool.start_at(ONE, Lsn(u64::MAX - 1)).unwrap();
    assert!(matches!(writer.write(Lsn(u64::MAX - 1), &[1; 2]), Err(SpoolError::Refused(_))));
}

#[test]
fn a_file_too_long_for_a_segment_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(name(ONE, 1)), vec![7; MB as usize + 1]).unwrap();
    let spool = Spool::open(options(dir.path())).unwrap();
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    let error = writer.write(Lsn(MB), &[1]).unwrap_err().to_string();
    assert!(error.ends_with("has 1048577 bytes, more than the 1048576 of a segment: move it away"), "{error}");
    assert!(fs::read(dir.path().join(name(ONE, 1))).unwrap() == vec![7; MB as usize + 1]);
}

#[test]
fn a_directory_that_is_not_there_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = Spool::open(options(&dir.path().join("missing"))).err().unwrap().to_string();
    assert!(error.starts_with("could not read directory \""), "{error}");
}

#[test]
fn waiting_ends_with_wal_or_on_demand_or_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let spool = Spool::open(options(dir.path())).unwrap();
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    assert_eq!(spool.wait_written_beyond(Lsn(MB), spool.wakes(), Duration::from_millis(1)), Lsn(MB));
    // Without an end in time, so that it hangs if nobody tells.
    let waiting = |beyond| {
        let spool = spool.clone();
        thread::spawn(move || spool.wait_written_beyond(Lsn(beyond), spool.wakes(), Duration::MAX))
    };
    let one = waiting(MB);
    writer.write(Lsn(MB), &[1]).unwrap();
    writer.announce();
    assert_eq!(one.join().unwrap(), Lsn(MB + 1));
    let two = waiting(MB + 1);
    while !two.is_finished() {
        spool.notify_all();
        thread::yield_now();
    }
    assert_eq!(two.join().unwrap(), Lsn(MB + 1));
    // Nothing that is not yet written is waited for.
    spool.wait_flushed(Lsn(9 * MB)).unwrap();
    assert_eq!(spool.flushed(), Lsn(MB + 1));
}
