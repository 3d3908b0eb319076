//! Which file a segment comes from, and what `restore_command` may do.

use std::io::IoSliceMut;

use std::time::Duration;

use super::*;
use crate::upstream::{News, Wanted};

const SEGMENT: u64 = 1 << 20;

fn size() -> SegmentSize {
    SegmentSize::new(SEGMENT as u32).unwrap()
}

/// A data directory with an empty `pg_wal`, and an archive beside it.
struct Dirs(tempfile::TempDir);

impl Dirs {
    fn new() -> Dirs {
        let dirs = Dirs(tempfile::tempdir().unwrap());
        fs::create_dir_all(dirs.data().join("pg_wal")).unwrap();
        fs::create_dir(dirs.archive()).unwrap();
        dirs
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }

    fn archive(&self) -> PathBuf {
        self.0.path().join("archive")
    }

    /// Puts a segment into the archive whose every byte is `mark`.
    fn put(&self, timeline: u32, number: u64, suffix: &str, mark: u8) {
        let name = size().file_name(TimelineId(timeline), number) + suffix;
        fs::write(self.archive().join(name), vec![mark; SEGMENT as usize]).unwrap();
    }

    fn reads_directory(&self, history: TimelineHistory) -> Source {
        Source::new(vec![Place::Directory(self.archive())], size(), history)
    }

    fn runs_command(&self, command: &str) -> Source {
        let command = command.replace("ARCHIVE", self.archive().to_str().unwrap());
        let place = Place::RestoreCommand { command, data_dir: self.data() };
        Source::new(vec![place], size(), TimelineHistory::alone(TimelineId(1)))
    }
}

/// First byte of a segment, if it is there.
fn mark(source: &Source, number: u64) -> Result<Option<u8>, ReplayError> {
    let mut page = [0; XLOG_BLCKSZ];
    let got = source.read(Lsn(number * SEGMENT), &mut [IoSliceMut::new(&mut page)])?;
    Ok((got > 0).then_some(page[0]))
}

fn branched() -> TimelineHistory {
    // Timeline 2 begins in the middle of segment 3.
    TimelineHistory::parse(TimelineId(2), "1\t0/380000\tx\n").unwrap()
}

#[test]
fn the_newest_timeline_that_has_a_segment_gives_it() {
    let dirs = Dirs::new();
    for number in 2..6 {
        dirs.put(1, number, "", 1);
    }
    dirs.put(2, 2, "", 2);
    dirs.put(2, 3, "", 2);
    let source = dirs.reads_directory(branched());
    assert_eq!(mark(&source, 2).unwrap(), Some(1), "timeline 2 had not begun");
    assert_eq!(mark(&source, 3).unwrap(), Some(2));
    assert_eq!(mark(&source, 4).unwrap(), None, "timeline 1 was left before");
    assert_eq!(source.timeline_at(Lsn(3 * SEGMENT)), TimelineId(2));
    assert!(source.has_segment(Lsn(3 * SEGMENT)).unwrap() && !source.has_segment(Lsn(4 * SEGMENT)).unwrap());
}

#[test]
fn a_timeline_counts_up_to_where_it_was_left() {
    let dirs = Dirs::new();
    dirs.put(1, 3, "", 1);
    let source = dirs.reads_directory(branched());
    let page_of_switch = 3 * SEGMENT + 0x8_0000;
    let read_four = |from: Lsn| {
        let mut pages = [[0; XLOG_BLCKSZ]; 4];
        source.read(from, &mut pages.each_mut().map(|page| IoSliceMut::new(page))).unwrap()
    };
    let before = Lsn(page_of_switch - 2 * XLOG_BLCKSZ as u64);
    assert_eq!(read_four(before), 2 * XLOG_BLCKSZ);
    assert_eq!(read_four(Lsn(page_of_switch)), 0, "timeline 2 has that, in a file to come");
    dirs.put(2, 3, "", 2);
    source.close_all();
    assert_eq!(read_four(Lsn(page_of_switch)), 4 * XLOG_BLCKSZ);
}

#[test]
fn a_partial_file_counts_where_there_is_no_whole_one_since() {
    let dirs = Dirs::new();
    dirs.put(1, 3, ".partial", 9);
    let alone = TimelineHistory::alone(TimelineId(1));
    let source = dirs.reads_directory(alone);
    assert_eq!(mark(&source, 3).unwrap(), Some(9));
    dirs.put(1, 3, "", 1);
    source.close_all();
    assert_eq!(mark(&source, 3).unwrap(), Some(1));
    // Our own copy in pg_wal stays behind, when the archive's file goes on growing.
    let partial = fs::File::open(dirs.archive().join(size().file_name(TimelineId(1), 3) + ".partial")).unwrap();
    partial.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(10)).unwrap();
    source.close_all();
    assert_eq!(mark(&source, 3).unwrap(), Some(9));
}

#[test]
fn what_was_not_there_is_found_once_it_is() {
    let dirs = Dirs::new();
    let source = dirs.reads_directory(TimelineHistory::alone(TimelineId(1)));
    assert_eq!(mark(&source, 7).unwrap(), None);
    dirs.put(1, 7, "", 7);
    assert_eq!(mark(&source, 7).unwrap(), None, "nothing is looked for twice in one round");
    source.close_all();
    assert_eq!(mark(&source, 7).unwrap(), Some(7));
}

/// A command that hands each file out once was run by two threads at once, and the second found nothing.
#[test]
fn threads_that_want_a_segment_share_one_fetch() {
    let dirs = Dirs::new();
    for number in 0..8 {
        dirs.put(1, number, "", number as u8 + 1);
    }
    let source = dirs.runs_command("sleep 0.02; mv ARCHIVE/%f %p");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for number in 0..8 {
                    assert_eq!(mark(&source, number).unwrap(), Some(number as u8 + 1));
                }
            });
        }
    });
    source.release_before(Lsn(7 * SEGMENT));
    assert_eq!(fs::read_dir(dirs.data().join("pg_wal")).unwrap().count(), 2, "only the last two are kept");
}

#[test]
fn packed_segments_are_refused_by_name() {
    let dirs = Dirs::new();
    dirs.put(1, 7, ".zst", 0);
    let error = mark(&dirs.reads_directory(TimelineHistory::alone(TimelineId(1))), 7).unwrap_err();
    assert!(error.to_string().contains("000000010000000000000007.zst"), "{error}");
}

#[test]
fn restore_command_fetches_and_leaves_nothing_behind() {
    let dirs = Dirs::new();
    dirs.put(1, 7, "", 7);
    let source = dirs.runs_command("cp ARCHIVE/%f %p && echo 'noise %r 100%%' >>log");
    source.note_restartpoint(Lsn(5 * SEGMENT + 40));
    assert_eq!(mark(&source, 7).unwrap(), Some(7));
    assert_eq!(mark(&source, 8).unwrap(), None, "cp fails: there is no more");
    source.close_all();
    assert_eq!(fs::read_to_string(dirs.data().join("log")).unwrap(), "noise 000000010000000000000005 100%\n");
    assert_eq!(fs::read_dir(dirs.data().join("pg_wal")).unwrap().count(), 0);
}

#[test]
fn a_command_that_cannot_run_is_not_the_end_of_wal() {
    let dirs = Dirs::new();
    for command in ["exit 126", "no-such-program-of-ours 2>/dev/null", "kill -9 $$"] {
        assert!(mark(&dirs.runs_command(command), 7).is_err(), "{command}");
    }
    for command in ["exit 1", "exit 125", "true"] {
        assert_eq!(mark(&dirs.runs_command(command), 7).unwrap(), None, "{command}");
    }
}

#[test]
fn a_fetched_segment_of_the_wrong_size_is_an_error_unless_it_grows() {
    let dirs = Dirs::new();
    assert!(mark(&dirs.runs_command("printf short >%p"), 7).unwrap_err().is_corruption());
    assert_eq!(mark(&dirs.runs_command("printf short >%p").growing(), 7).unwrap(), None);
}

#[test]
fn the_newest_timeline_is_the_last_without_a_gap() {
    let dirs = Dirs::new();
    for timeline in [2, 3, 5] {
        fs::write(dirs.archive().join(history_file_name(TimelineId(timeline))), "1\t0/380000\tx\n").unwrap();
    }
    let source = dirs.reads_directory(TimelineHistory::alone(TimelineId(1)));
    assert_eq!(source.newest_timeline(TimelineId(1)).unwrap(), TimelineId(3));
    assert_eq!(source.read_history(TimelineId(2)).unwrap(), branched());
    assert_eq!(source.read_history(TimelineId(4)).unwrap(), TimelineHistory::alone(TimelineId(4)));
    fs::write(dirs.archive().join("00000003.history"), "nonsense\n").unwrap();
    assert!(source.read_history(TimelineId(3)).unwrap_err().is_corruption());
}

/// WAL is visible up to there, and nothing else is known.
struct VisibleUpTo(Lsn);

impl Upstream for VisibleUpTo {
    fn admit(&self, _: &walrider_datadir::DataDir) -> Result<(), ReplayError> {
        unreachable!()
    }

    fn wanted(&self) -> Wanted {
        Wanted::Follow
    }
    fn wait(&self, _: Lsn, _: Lsn, _: TimelineId, _: &str) -> Result<News, ReplayError> {
        Ok(News::More)
    }
    fn release(&self, _: Lsn, _: TimelineId) -> Result<bool, ReplayError> {
        Ok(false)
    }
    fn sleep(&self, _: Duration) {}
    fn visible(&self) -> Lsn {
        self.0
    }
    fn uses_archives(&self) -> bool {
        false
    }
    fn min_apply_delay(&self) -> Duration {
        Duration::ZERO
    }
    fn ensure_durable(&self, _: Lsn) -> Result<(), ReplayError> {
        Ok(())
    }
    fn restartpoint(&self, _: Lsn, _: TimelineId) {}
}

#[test]
fn what_is_not_visible_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let size = SegmentSize::new(1 << 20).unwrap();
    fs::write(dir.path().join(size.file_name(TimelineId(1), 1)), vec![7; 1 << 20]).unwrap();
    let start = size.start_of(1);
    let read = |visible: u64| {
        let places = vec![Place::Directory("/nonexistent".into()), Place::Directory(dir.path().to_owned())];
        let source = Source::new(places, size, TimelineHistory::alone(TimelineId(1)))
            .brought_by(Some(Arc::new(VisibleUpTo(Lsn(start.0 + visible)))));
        let (mut first, mut second) = ([1; XLOG_BLCKSZ], [1; XLOG_BLCKSZ]);
        let got = source.read(start, &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)]).unwrap();
        let seen = [first, second].concat()[..got].iter().filter(|&&byte| byte == 7).count();
        (got, seen)
    };
    assert_eq!(read(0), (0, 0));
    assert_eq!(read(1), (XLOG_BLCKSZ, 1));
    assert_eq!(read(XLOG_BLCKSZ as u64), (XLOG_BLCKSZ, XLOG_BLCKSZ));
    assert_eq!(read(XLOG_BLCKSZ as u64 + 100), (2 * XLOG_BLCKSZ, XLOG_BLCKSZ + 100));
    assert_eq!(read(u64::MAX / 2), (2 * XLOG_BLCKSZ, 2 * XLOG_BLCKSZ));
}
