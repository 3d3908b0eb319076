//! Which files are read, in which order, and how reading ends.

use std::fs;
use std::path::Path;

use std::ops::ControlFlow;

use walrider_layout::TimelineId;
use walrider_layout::wal::SegmentSize;
use walrider_wal::record::Record;
use walrider_wal::rmgr::RmgrId;
use walrider_wal::testing::RecordBuilder;
use walrider_wal::testing::pages::WalBuilder;

use super::*;

const SEGMENT: u64 = 1 << 20;

fn size() -> SegmentSize {
    SegmentSize::new(SEGMENT as u32).unwrap()
}

fn noop(len: usize) -> RecordBuilder {
    RecordBuilder::new(RmgrId::XLOG, 0x20).main_data(vec![7; len])
}

/// Three segments: records of 100,000 bytes, one after the other.
fn three_segments(directory: &Path) -> Vec<Lsn> {
    let mut wal = WalBuilder::new(size(), TimelineId(1), Lsn(SEGMENT));
    let lsns = (0..25).map(|_| wal.record(noop(100_000))).collect();
    for (name, bytes) in wal.files() {
        fs::write(directory.join(name), bytes).unwrap();
    }
    lsns
}

fn read(sources: &[PathBuf], start: Option<Lsn>, end: Option<Lsn>) -> Result<(Vec<Lsn>, Ended), WalError> {
    let mut lsns = Vec::new();
    let ended = each_record(sources, Range { start, end }, |record| -> Result<_, WalError> {
        lsns.push(record.lsn);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok((lsns, ended))
}

fn segment(number: u64) -> String {
    size().file_name(TimelineId(1), number)
}

#[test]
fn a_directory_is_read_from_its_first_segment_to_the_end_of_wal() {
    let dir = tempfile::tempdir().unwrap();
    let lsns = three_segments(dir.path());
    fs::write(dir.path().join("000000010000000000000001.00000028.backup"), "").unwrap();
    let (found, ended) = read(&[dir.path().into()], None, None).unwrap();
    assert_eq!(found, lsns);
    assert!(matches!(ended, Ended::EndOfWal { .. }));
}

#[test]
fn the_range_takes_whole_records_only() {
    let dir = tempfile::tempdir().unwrap();
    let lsns = three_segments(dir.path());
    let between = |start, end| read(&[dir.path().into()], Some(start), Some(end)).unwrap().0;
    assert_eq!(between(lsns[3], lsns[5]), lsns[3..5]);
    assert_eq!(between(Lsn(lsns[3].0 + 1), lsns[5]), lsns[4..5]);
    assert_eq!(between(lsns[3], Lsn(lsns[5].0 - 9)), lsns[3..4], "the last byte is missing");
    assert_eq!(between(lsns[12], lsns[13]), lsns[12..13]);
    let error = read(&[dir.path().into()], None, Some(Lsn(1 << 40))).unwrap_err();
    assert!(matches!(error, WalError::EndsEarly { .. }), "{error}");
}

#[test]
fn single_files_end_where_they_end() {
    let dir = tempfile::tempdir().unwrap();
    let lsns = three_segments(dir.path());
    let (found, ended) = read(&[dir.path().join(segment(2))], None, None).unwrap();
    let whole: Vec<Lsn> = lsns.iter().copied().filter(|lsn| lsn.0 / SEGMENT == 2).collect();
    assert_eq!(found, whole[..whole.len() - 1], "the last one goes on in the next file");
    assert!(matches!(ended, Ended::EndOfWal { why: Invalid::Incomplete, .. }));
}

#[test]
fn what_is_missing_or_damaged_is_told_from_the_end() {
    let dir = tempfile::tempdir().unwrap();
    three_segments(dir.path());
    let path = dir.path().join(segment(2));
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[500_000] ^= 1;
    fs::write(&path, &bad).unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::Damaged { why: Invalid::Crc, .. }), "{error}");
    fs::write(&path, &good[..300_000]).unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::Missing { .. }), "{error}");
    fs::remove_file(&path).unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::Missing { .. }), "{error}");
}

#[test]
fn the_newest_timeline_and_its_history_decide() {
    let dir = tempfile::tempdir().unwrap();
    let mut wal = WalBuilder::new(size(), TimelineId(1), Lsn(SEGMENT));
    let common: Vec<Lsn> = (0..12).map(|_| wal.record(noop(100_000))).collect();
    let switch = wal.position();
    // Timeline 1 goes on past the switch point; timeline 2 has that segment, too, up to there.
    let lost = wal.record(noop(10));
    for (name, bytes) in wal.files() {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let mut wal = WalBuilder::new(size(), TimelineId(1), Lsn(SEGMENT));
    for _ in &common {
        wal.record(noop(100_000));
    }
    wal.set_timeline(TimelineId(2));
    let ours = wal.record(noop(20));
    assert_eq!(ours, lost);
    let (name, bytes) = wal.files().pop().unwrap();
    assert_eq!(name, "000000020000000000000002");
    fs::write(dir.path().join(&name), bytes).unwrap();

    let (found, _) = read(&[dir.path().into()], None, None).unwrap();
    assert_eq!(found[..], [&common[11..], &[ours]].concat(), "without a history file only timeline 2 is known");
    fs::write(dir.path().join("00000002.history"), format!("1\t{switch}\tno reason\n")).unwrap();
    let mut lens = Vec::new();
    let take = |record: &Record<'_>| -> Result<_, WalError> {
        lens.push(record.main_data.len());
        Ok(ControlFlow::Continue(()))
    };
    each_record(&[dir.path().into()], Range { start: None, end: None }, take).unwrap();
    assert_eq!(lens, [&[100_000; 12][..], &[20]].concat());
}

/// All that there was of the newest timeline lay before the point where its history says that it began, and reading panicked.
#[test]
fn segments_that_the_history_leaves_out_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let mut wal = WalBuilder::new(size(), TimelineId(2), Lsn(SEGMENT));
    wal.record(noop(10));
    for (name, bytes) in wal.files() {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    fs::write(dir.path().join("00000002.history"), "1\t0/500000\tno reason\n").unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::NoSegments(_)), "{error}");
}

#[test]
fn partial_segments_are_a_last_resort() {
    let dir = tempfile::tempdir().unwrap();
    let lsns = three_segments(dir.path());
    let (whole, partial) = (dir.path().join(segment(3)), dir.path().join(segment(3) + ".partial"));
    fs::write(&partial, [0; 8192]).unwrap();
    assert_eq!(read(&[dir.path().into()], None, None).unwrap().0, lsns);
    fs::rename(&whole, &partial).unwrap();
    assert_eq!(read(&[dir.path().into()], None, None).unwrap().0, lsns);
}

#[test]
fn directories_without_wal_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::NoSegments(_)), "{error}");
    fs::write(dir.path().join(segment(1) + ".zst"), "").unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::Packed(_)), "{error}");
    fs::write(dir.path().join(segment(1)), [0; 8192]).unwrap();
    let error = read(&[dir.path().into()], None, None).unwrap_err();
    assert!(matches!(error, WalError::NotWal(_)), "{error}");
}
