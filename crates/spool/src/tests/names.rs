//! Which files there are, under which names: recycled, removed, archived, `.partial`.

use std::fs;
use std::path::Path;

use walrider_layout::wal::SegmentSize;
use walrider_layout::{Lsn, TimelineId};

use super::{MB, ONE, name, options, wal};
use crate::{ArchiveStatus, Judgement, Removed, Spool, SpoolOptions, streaming_start};

const TWO: TimelineId = TimelineId(2);

/// The files of a directory, sorted, without those in preparation.
fn files(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("xlogtemp.") && name != "archive_status")
        .collect();
    names.sort();
    names
}

/// Segment files of one byte repeated, the number of the segment.
fn segments(directory: &Path, timeline: TimelineId, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        fs::write(directory.join(name(timeline, number)), vec![number as u8; MB as usize]).unwrap();
    }
}

#[test]
fn old_segments_become_future_ones() {
    let dir = tempfile::tempdir().unwrap();
    segments(dir.path(), ONE, 1..=6);
    segments(dir.path(), TWO, [5, 6, 7]);
    fs::write(dir.path().join(format!("{}.partial", name(ONE, 4))), b"").unwrap();
    fs::write(dir.path().join("00000002.history"), b"1\t0/500000\tno reason\n").unwrap();
    fs::write(dir.path().join("000000010000000000000001.00000028.backup"), b"").unwrap();
    std::os::unix::fs::symlink(dir.path().join(name(ONE, 6)), dir.path().join(name(ONE, 0))).unwrap();
    let spool = Spool::open(SpoolOptions { max_recycled: 3, ..options(dir.path()) }).unwrap();
    let mut writer = spool.start_at(TWO, Lsn(8 * MB)).unwrap();
    writer.write(Lsn(8 * MB), &vec![9; MB as usize / 2]).unwrap();
    spool.wait_flushed(Lsn(9 * MB)).unwrap();
    while !dir.path().join(name(TWO, 9)).exists() {
        std::thread::yield_now();
    }
    // Segment 9 is prepared; 10 and 11 may be kept ready besides. Of 0 (a link), 1 to 4 and 4.partial two are.
    let removed = spool.remove_before(Lsn(5 * MB + 100), TWO).unwrap();
    assert_eq!(removed, Removed { recycled: 2, removed: 4, not_archived: 0 });
    let left =
        [name(ONE, 5), name(ONE, 6), "000000010000000000000001.00000028.backup".into(), "00000002.history".into()];
    let mut left: Vec<String> = left.into_iter().chain((5..=11).map(|number| name(TWO, number))).collect();
    left.sort();
    assert_eq!(files(dir.path()), left);
    assert!(fs::read(dir.path().join(name(TWO, 10))).unwrap() == vec![1; MB as usize]);
    assert!(fs::read(dir.path().join(name(TWO, 11))).unwrap() == vec![2; MB as usize]);
    let stats = spool.stats();
    assert_eq!((stats.segments_recycled, stats.segments_removed), (2, 4));
    // Once more changes nothing; and what is received next goes into them.
    assert_eq!(spool.remove_before(Lsn(5 * MB + 100), TWO).unwrap(), Removed::default());
    let created = spool.stats().segments_created;
    writer.write(Lsn(8 * MB + MB / 2), &vec![9; 3 * MB as usize]).unwrap();
    drop((writer, spool));
    assert_eq!(created, 2, "8 and 9; what was recycled is not made again");
    let bytes = fs::read(dir.path().join(name(TWO, 11))).unwrap();
    assert!(bytes == [vec![9; MB as usize / 2], vec![2; MB as usize / 2]].concat());
}

#[test]
fn what_is_not_flushed_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    segments(dir.path(), ONE, 1..=4);
    let spool = Spool::open(options(dir.path())).unwrap();
    let mut writer = spool.start_at(ONE, Lsn(3 * MB)).unwrap();
    writer.write(Lsn(3 * MB), &[1]).unwrap();
    let removed = spool.remove_before(Lsn(100 * MB), ONE).unwrap();
    assert_eq!(removed, Removed { recycled: 0, removed: 2, not_archived: 0 });
    assert_eq!(files(dir.path()), [name(ONE, 3), name(ONE, 4)]);
}

#[test]
fn what_somebody_holds_stays() {
    let directory = tempfile::tempdir().unwrap();
    segments(directory.path(), ONE, 1..6);
    let spool = Spool::open(options(directory.path())).unwrap();
    let (first, second) = (spool.hold(Lsn(2 * MB + 5)), spool.hold(Lsn(4 * MB)));
    let remove = || spool.remove_before(Lsn(9 * MB), ONE).map(|gone| gone.removed + gone.recycled).unwrap();
    assert_eq!(remove(), 1);
    first.advance(Lsn(MB));
    assert_eq!(remove(), 0, "it does not go back");
    first.advance(Lsn(5 * MB));
    assert_eq!(remove(), 2);
    drop(second);
    assert_eq!(remove(), 1);
    drop(first);
    assert_eq!(remove(), 1);
}

#[test]
fn complete_segments_are_marked_for_the_archiver() {
    for (archive_status, marks) in [
        (ArchiveStatus::None, vec![]),
        (ArchiveStatus::Done, vec!["1.done", "2.done", "3.done", "h.done"]),
        (ArchiveStatus::Ready, vec!["1.done", "2.ready", "3.ready", "h.ready"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let spool = Spool::open(SpoolOptions { archive_status, ..options(dir.path()) }).unwrap();
        let status = |name: &str, ending: &str| dir.path().join(format!("archive_status/{name}.{ending}"));
        if archive_status != ArchiveStatus::None {
            // Received for the second time: one is archived, the other about to be.
            fs::write(status(&name(ONE, 1), "done"), b"").unwrap();
            fs::write(status(&name(ONE, 2), "ready"), b"").unwrap();
        }
        let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
        writer.write(Lsn(MB), &wal(MB, 4 * MB + 10)).unwrap();
        spool.write_history(TWO, b"1\t0/500000\tno reason\n").unwrap();
        drop((writer, spool));
        let history = "00000002.history".to_owned();
        let all = [("1", name(ONE, 1)), ("2", name(ONE, 2)), ("3", name(ONE, 3)), ("4", name(ONE, 4)), ("h", history)];
        let mut seen = Vec::new();
        for (short, name) in &all {
            for ending in ["done", "ready"] {
                if status(name, ending).exists() {
                    seen.push(format!("{short}.{ending}"));
                }
            }
        }
        assert_eq!(seen, marks, "{archive_status:?}");
    }
}

#[test]
fn the_last_segment_of_a_timeline_is_complete_when_the_next_begins() {
    let dir = tempfile::tempdir().unwrap();
    let spool = Spool::open(SpoolOptions { archive_status: ArchiveStatus::Ready, ..options(dir.path()) }).unwrap();
    let ready = |timeline| dir.path().join(format!("archive_status/{}.ready", name(timeline, 1))).exists();
    spool.start_at(ONE, Lsn(MB)).unwrap().write(Lsn(MB), &[1; 100]).unwrap();
    drop(spool.start_at(ONE, Lsn(MB + 100)).unwrap());
    assert!(!ready(ONE), "only the connection was lost");
    drop(spool.start_at(TWO, Lsn(MB)).unwrap());
    assert!(!ready(ONE), "an archive has led to the next one, and there may be more of this");
    let mut writer = spool.start_at(ONE, Lsn(MB + 100)).unwrap();
    writer.end_timeline();
    drop(writer);
    drop(spool.start_at(TWO, Lsn(MB)).unwrap());
    assert!(ready(ONE) && !ready(TWO));
}

/// Without a stream, replay goes on out of an archive, over what was ready to be written: half a segment, zeros, older ones.
#[test]
fn a_restored_segment_takes_the_place_of_what_was_ready_for_the_stream() {
    let (dir, archive) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let spool =
        Spool::open(SpoolOptions { archive_status: ArchiveStatus::Ready, max_recycled: 4, ..options(dir.path()) })
            .unwrap();
    let path = |timeline, number| dir.path().join(name(timeline, number));
    let ready = |timeline, number| dir.path().join(format!("archive_status/{}.ready", name(timeline, number))).exists();
    let keep = |timeline, number, bytes: &[u8], judgement: Judgement| {
        let path = archive.path().join(name(timeline, number));
        fs::write(&path, bytes).unwrap();
        let (file, mut asked) = (fs::File::open(path).unwrap(), false);
        let mut judge = || {
            asked = true;
            Ok(judgement.clone())
        };
        spool.keep_restored(&name(timeline, number), &file, &mut judge).unwrap();
        asked
    };
    let better = Judgement { replaces: true, complete: true, useless: Vec::new() };
    let restored =
        |timeline, number: u64| keep(timeline, number, &vec![100 + number as u8; MB as usize], better.clone());
    let mut writer = spool.start_at(ONE, Lsn(2 * MB)).unwrap();
    writer.write(Lsn(2 * MB), &[1; 100]).unwrap();
    assert!(!restored(ONE, 2) && !restored(ONE, 3), "they stream in");
    assert!(restored(ONE, 1), "that does not");
    drop(writer);
    segments(dir.path(), ONE, 4..=5);
    restored(ONE, 2);
    assert_eq!(fs::read(path(ONE, 2)).unwrap()[..100], [1; 100], "it lacks what was received");
    assert!(!ready(ONE, 2));
    keep(ONE, 2, &[1; 4096], Judgement { complete: false, ..better.clone() });
    assert!(!ready(ONE, 2));
    let second = fs::read(path(ONE, 2)).unwrap();
    assert!(second.len() == MB as usize && second[..4096] == [1; 4096] && second[4096..].iter().all(|&byte| byte == 0));
    for number in 3..=4 {
        assert!(restored(ONE, number));
        assert_eq!(fs::read(path(ONE, number)).unwrap(), vec![100 + number as u8; MB as usize]);
        assert!(ready(ONE, number));
    }
    let useless = vec![name(ONE, 5), name(ONE, 6)];
    keep(TWO, 5, &vec![105; MB as usize], Judgement { useless, ..better.clone() });
    assert!(ready(TWO, 5) && !path(ONE, 5).exists());
    // The stream goes on where it was left, in the file that is there now, and not in the one that was ready.
    let mut writer = spool.start_at(ONE, Lsn(2 * MB + 100)).unwrap();
    writer.write(Lsn(2 * MB + 100), &vec![9; MB as usize]).unwrap();
    drop(writer);
    spool.wait_flushed(spool.written()).unwrap();
    let (second, third) = (fs::read(path(ONE, 2)).unwrap(), fs::read(path(ONE, 3)).unwrap());
    assert_eq!((&second[..100], second[100]), (&[1; 100][..], 9));
    assert_eq!((third[99], third[100]), (9, 103));
    assert_eq!(files(dir.path()), [name(ONE, 1), name(ONE, 2), name(ONE, 3), name(ONE, 4), name(TWO, 5)]);
    // While there is no stream, a segment that nobody needs is not given a name ahead of it, and those behind it go as well.
    for file in fs::read_dir(dir.path().join("archive_status")).unwrap() {
        let ready = file.unwrap().path();
        fs::rename(&ready, ready.with_extension("done")).unwrap();
    }
    assert_eq!(spool.remove_before(Lsn(4 * MB), ONE).unwrap(), Removed { recycled: 0, removed: 3, not_archived: 0 });
}

#[test]
fn what_is_to_be_archived_stays_until_it_is() {
    let dir = tempfile::tempdir().unwrap();
    segments(dir.path(), ONE, 1..=4);
    let spool = Spool::open(SpoolOptions { archive_status: ArchiveStatus::Ready, ..options(dir.path()) }).unwrap();
    let status = |number, ending: &str| dir.path().join(format!("archive_status/{}.{ending}", name(ONE, number)));
    fs::write(status(1, "done"), b"").unwrap();
    fs::write(status(2, "ready"), b"").unwrap();
    let removed = spool.remove_before(Lsn(4 * MB), ONE).unwrap();
    assert_eq!(removed, Removed { recycled: 0, removed: 1, not_archived: 2 });
    assert!(!status(1, "done").exists(), "forgotten with its segment");
    assert!(status(3, "ready").exists(), "nobody had told the archiver");
    fs::rename(status(2, "ready"), status(2, "done")).unwrap();
    fs::rename(status(3, "ready"), status(3, "done")).unwrap();
    let removed = spool.remove_before(Lsn(4 * MB), ONE).unwrap();
    assert_eq!(removed, Removed { recycled: 0, removed: 2, not_archived: 0 });
    assert_eq!(fs::read_dir(dir.path().join("archive_status")).unwrap().count(), 0);
    // A standby that does not archive removes what a primary once meant to archive.
    let spool = {
        drop(spool);
        segments(dir.path(), ONE, [3]);
        fs::write(status(3, "ready"), b"").unwrap();
        Spool::open(SpoolOptions { archive_status: ArchiveStatus::Done, ..options(dir.path()) }).unwrap()
    };
    assert_eq!(spool.remove_before(Lsn(4 * MB), ONE).unwrap().removed, 1);
    assert!(!status(3, "ready").exists());
}

#[test]
fn an_incomplete_segment_is_partial() {
    let dir = tempfile::tempdir().unwrap();
    let partial = |number| format!("{}.partial", name(ONE, number));
    let open = || Spool::open(SpoolOptions { partial: true, ..options(dir.path()) }).unwrap();
    let bytes = wal(MB, 5 * MB);
    let spool = open();
    let mut writer = spool.start_at(ONE, Lsn(MB)).unwrap();
    writer.write(Lsn(MB), &bytes[..2 * MB as usize + 10]).unwrap();
    drop((writer, spool));
    assert_eq!(files(dir.path()), [name(ONE, 1), name(ONE, 2), partial(3)]);
    let size = options(dir.path()).segment_size;
    assert_eq!(streaming_start(dir.path(), size).unwrap(), Some((ONE, Lsn(3 * MB))));

    // Go on where it stood, in the middle; then receive a complete one again from its middle.
    let spool = open();
    let mut writer = spool.start_at(ONE, Lsn(3 * MB + 10)).unwrap();
    writer.write(Lsn(3 * MB + 10), &bytes[2 * MB as usize + 10..3 * MB as usize]).unwrap();
    drop(writer);
    let mut writer = spool.start_at(ONE, Lsn(2 * MB + 700)).unwrap();
    assert_eq!(files(dir.path())[0], name(ONE, 1));
    writer.write(Lsn(2 * MB + 700), &bytes[MB as usize + 700..MB as usize + 900]).unwrap();
    drop((writer, spool));
    // The third has not been touched, or only opened ahead.
    let left = files(dir.path());
    assert!(
        left == [name(ONE, 1), partial(2), name(ONE, 3)] || left == [name(ONE, 1), partial(2), partial(3)],
        "{left:?}"
    );
    assert_eq!(streaming_start(dir.path(), size).unwrap().map(|(_, lsn)| lsn.0 >= 2 * MB), Some(true));
    assert!(fs::read(dir.path().join(partial(2))).unwrap() == bytes[MB as usize..2 * MB as usize]);

    let spool = open();
    let mut writer = spool.start_at(ONE, Lsn(2 * MB)).unwrap();
    writer.write(Lsn(2 * MB), &bytes[MB as usize..]).unwrap();
    drop((writer, spool));
    assert_eq!(files(dir.path()), [1, 2, 3, 4].map(|number| name(ONE, number)));
    for number in 1..=4 {
        let expected = &bytes[(number as usize - 1) * MB as usize..][..MB as usize];
        assert!(fs::read(dir.path().join(name(ONE, number))).unwrap() == expected);
    }
    assert_eq!(streaming_start(dir.path(), size).unwrap(), Some((ONE, Lsn(5 * MB))));
}

#[test]
fn receiving_goes_on_past_what_is_complete() {
    let three = TimelineId(3);
    let at = |timeline, segment| Some((timeline, Lsn(segment * MB)));
    let partial = |timeline, segment| format!("{}.partial", name(timeline, segment));
    let packed = |timeline, segment, ending: &str| format!("{}{ending}", name(timeline, segment));
    for (whole, others, expected) in [
        (vec![], vec![], None),
        (vec![], vec!["00000002.history".into(), "readme".into(), "0000000100000000000000".into()], None),
        (vec![name(ONE, 4), name(ONE, 5)], vec![], at(ONE, 6)),
        (vec![name(ONE, 4)], vec![partial(ONE, 5)], at(ONE, 5)),
        (vec![name(ONE, 4)], vec![partial(ONE, 4)], at(ONE, 5)),
        (vec![], vec![partial(ONE, 5)], at(ONE, 5)),
        // A slow flush, and a crash: all but the last may have holes.
        (vec![name(ONE, 4)], vec![partial(ONE, 5), partial(ONE, 6), partial(ONE, 7)], at(ONE, 5)),
        // What was left of an old timeline does not count.
        (vec![name(ONE, 4), name(TWO, 5)], vec![partial(ONE, 5)], at(TWO, 6)),
        (vec![name(ONE, 4), name(TWO, 5)], vec![partial(ONE, 5), partial(TWO, 6)], at(TWO, 6)),
        (vec![name(three, 5), name(TWO, 5)], vec![], at(three, 6)),
        // Too short to be complete.
        (vec![name(ONE, 4)], vec![name(ONE, 5)], at(ONE, 5)),
        // Of pg_receivewal --compress.
        (vec![], vec![packed(ONE, 4, ".gz"), packed(ONE, 5, ".lz4")], at(ONE, 6)),
        (vec![], vec![packed(ONE, 4, ".gz"), packed(ONE, 5, ".gz.partial")], at(ONE, 5)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for name in &whole {
            fs::write(dir.path().join(name), vec![0; MB as usize]).unwrap();
        }
        for name in &others {
            fs::write(dir.path().join(name), b"some").unwrap();
        }
        let found = streaming_start(dir.path(), SegmentSize::new(MB as u32).unwrap()).unwrap();
        assert_eq!(found, expected, "{whole:?} {others:?}");
    }
}
