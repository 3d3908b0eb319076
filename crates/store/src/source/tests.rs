//! Which file a segment comes from, and what `restore_command` may do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use walrider_layout::history::history_file_name;

use super::*;
use crate::directory::Directory;
use crate::find::Finder;
use crate::read::agrees;
use crate::restore::RestoreCommand;

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
        Source::new(vec![Arc::new(Directory::new(self.archive()))], size(), history)
    }

    fn command(&self, command: &str) -> RestoreCommand {
        RestoreCommand::new(command.replace("ARCHIVE", self.archive().to_str().unwrap()), self.data(), size())
    }

    fn runs_command(&self, command: &str) -> Source {
        reads_place(Arc::new(self.command(command)))
    }
}

fn reads_place(place: Arc<dyn Driver>) -> Source {
    Source::new(vec![place], size(), TimelineHistory::alone(TimelineId(1)))
}

/// First byte of a segment, if it is there.
fn mark(source: &Source, number: u64) -> Result<Option<u8>, StoreError> {
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

/// A segment 3 whose first pages are of here, and begin with `mark`s.
fn pages(marks: &[u8]) -> Vec<u8> {
    let mut contents = vec![0; SEGMENT as usize];
    for (number, (mark, page)) in marks.iter().zip(contents.chunks_mut(XLOG_BLCKSZ)).enumerate() {
        page[8..16].copy_from_slice(&(3 * SEGMENT + (number * XLOG_BLCKSZ) as u64).to_le_bytes());
        page[0] = *mark;
    }
    contents
}

/// Found by a review: a copy of another host's `.partial` was newer than the segment that a standby had received more of, and was copied over it.
#[test]
fn a_partial_file_counts_where_it_has_more() {
    let dirs = Dirs::new();
    let name = size().file_name(TimelineId(1), 3);
    let put =
        |suffix: &str, contents: Vec<u8>| fs::write(dirs.archive().join(name.clone() + suffix), contents).unwrap();
    let source = dirs.reads_directory(TimelineHistory::alone(TimelineId(1)));
    let second = |source: &Source| {
        source.close_all();
        let mut page = [0; XLOG_BLCKSZ];
        source.read(Lsn(3 * SEGMENT + XLOG_BLCKSZ as u64), &mut [IoSliceMut::new(&mut page)]).unwrap();
        page[0]
    };
    put(".partial", pages(&[1, 9]));
    assert_eq!(second(&source), 9, "there is no other");
    put("", pages(&[1, 9, 3]));
    put(".partial", pages(&[1]));
    assert_eq!(second(&source), 9, "it is newer, and has less");
    // Our own copy in pg_wal stays behind, when the archive's file goes on growing.
    put("", pages(&[1]));
    put(".partial", pages(&[1, 9]));
    assert_eq!(second(&source), 9);
    // Within a page, too; and where an older segment has left its bytes, nobody knows.
    let (mut shorter, mut longer, mut recycled) = (pages(&[1, 2]), pages(&[1, 2]), pages(&[1, 2]));
    longer[XLOG_BLCKSZ + 100] = 7;
    put("", shorter.clone());
    put(".partial", longer.clone());
    assert_eq!(source_byte(&dirs, 100), 7);
    recycled[XLOG_BLCKSZ + 200] = 5;
    put("", recycled);
    assert_eq!(source_byte(&dirs, 100), 0);
    shorter[XLOG_BLCKSZ..].fill(6);
    put("", shorter);
    assert_eq!(source_byte(&dirs, 100), 7, "its second page is an older segment's");
}

/// A byte of the second page of segment 3.
fn source_byte(dirs: &Dirs, at: usize) -> u8 {
    let mut page = [0; XLOG_BLCKSZ];
    let source = dirs.reads_directory(TimelineHistory::alone(TimelineId(1)));
    source.read(Lsn(3 * SEGMENT + XLOG_BLCKSZ as u64), &mut [IoSliceMut::new(&mut page)]).unwrap();
    page[at]
}

/// Found by a review: a primary that went on after its standby's promotion archives the whole segment, and the standby archives, later, the part of it
/// that it had. WAL ended there, though there was more.
#[test]
fn a_partial_file_in_an_archive_does_not_hide_the_whole_one() {
    let dirs = Dirs::new();
    dirs.put(1, 3, "", 1);
    dirs.put(1, 3, ".partial", 9);
    let partial = fs::File::open(dirs.archive().join(size().file_name(TimelineId(1), 3) + ".partial")).unwrap();
    partial.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(10)).unwrap();
    let places: Vec<Arc<dyn Driver>> =
        vec![Arc::new(Directory::new(dirs.archive())), Arc::new(Directory::new(dirs.data().join("pg_wal")))];
    let source = Source::new(places, size(), TimelineHistory::alone(TimelineId(1)));
    assert_eq!(mark(&source, 3).unwrap(), Some(1));
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
    assert_eq!(fs::read_dir(dirs.data().join("pg_wal")).unwrap().count(), 0, "what is open needs no name");
}

/// Waits for what threads and commands do.
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Dirs {
    /// A command that notes when it begins and ends, and waits in between until there is a file `open` in the data directory.
    fn gated(&self, jobs: usize) -> Source {
        let command = "echo b %f >>log; until test -e open; do sleep 0.01; done; cp ARCHIVE/%f %p 2>/dev/null; \
                       code=$?; echo e %f >>log; exit $code";
        reads_place(Arc::new(self.command(command).with_jobs(jobs)))
    }

    fn open_gate(&self) {
        fs::write(self.data().join("open"), "").unwrap();
    }

    /// The segments that commands began to fetch, in this order; how many ran at once at most; how many have ended.
    fn log(&self) -> (Vec<u64>, usize, usize) {
        let log = fs::read_to_string(self.data().join("log")).unwrap_or_default();
        let (mut begun, mut ended, mut most) = (Vec::new(), 0, 0);
        for line in log.lines() {
            match line.split_once(' ').unwrap() {
                ("b", name) => begun.push(size().parse_file_name(name).unwrap().1),
                _ => ended += 1,
            }
            most = most.max(begun.len() - ended);
        }
        (begun, most, ended)
    }

    fn has_no_fetches(&self) -> bool {
        fs::read_dir(self.data().join("pg_wal")).unwrap().count() == 0
    }
}

/// Sixteen are fetched ahead of the one that is read, four at a time, in order, each once. How long that takes is not tried.
#[test]
fn segments_are_fetched_ahead_in_order_within_bounds() {
    let dirs = Dirs::new();
    for number in 0..30 {
        dirs.put(1, number, "", number as u8 + 1);
    }
    let source = dirs.gated(4);
    std::thread::scope(|scope| {
        source.release_before(Lsn(0));
        let first = scope.spawn(|| mark(&source, 0).unwrap());
        wait_for("four run at once", || dirs.log().0.len() == 4);
        dirs.open_gate();
        assert_eq!(first.join().unwrap(), Some(1));
    });
    wait_for("a window of sixteen", || dirs.log().2 == 16);
    wait_for("they are known", || source.ready_up_to(Lsn(0)) == Lsn(16 * SEGMENT));
    assert_eq!(dirs.log().0.iter().copied().collect::<BTreeSet<_>>(), (0..16).collect());
    for number in 0..30 {
        source.release_before(Lsn(number * SEGMENT));
        assert_eq!(mark(&source, number).unwrap(), Some(number as u8 + 1));
        let furthest = dirs.log().0.into_iter().max().unwrap();
        assert!(furthest < number + 16, "{furthest} at {number}");
    }
    assert_eq!(mark(&source, 30).unwrap(), None);
    let (begun, most, _) = dirs.log();
    assert_eq!(most, 4);
    for (nth, number) in begun.iter().enumerate() {
        // A shell may be slow to begin, but the window does not move past it.
        assert!(nth.abs_diff(*number as usize) <= 16, "not in order: {begun:?}");
    }
    let mut asked = BTreeMap::new();
    begun.iter().for_each(|number| *asked.entry(number).or_insert(0) += 1);
    assert!(asked.values().all(|&times| times == 1), "{begun:?}");
    // What ran beside the one that was missing.
    assert!(asked.len() <= 34, "{begun:?}");
    let stats = source.fetch_stats();
    assert_eq!((stats.jobs, stats.segments), (4, 30));
    drop(source);
    assert!(dirs.has_no_fetches());
}

/// Threads that read in several places at once do not change the order; before, the segment of the second came second.
#[test]
fn what_is_needed_next_is_fetched_first() {
    let dirs = Dirs::new();
    for number in 0..8 {
        dirs.put(1, number, "", 1);
    }
    let source = dirs.gated(1);
    source.release_before(Lsn(0));
    std::thread::scope(|scope| {
        scope.spawn(|| mark(&source, 0).unwrap());
        wait_for("the first is fetched", || dirs.log().0.len() == 1);
        scope.spawn(|| mark(&source, 5).unwrap());
        wait_for("another is wanted", || source.fetcher.is_wanted(5));
        dirs.open_gate();
    });
    // More may have been begun ahead since.
    assert_eq!(dirs.log().0[..6], [0, 1, 2, 3, 4, 5]);
}

/// As an asynchronous `pgbackrest archive-get`: of two at once, one gives up. Replay took that for the end of the archive.
#[test]
fn commands_that_do_not_go_together_run_alone() {
    let dirs = Dirs::new();
    for number in 0..12 {
        dirs.put(1, number, "", number as u8 + 1);
    }
    let command = "mkdir busy 2>/dev/null || exit 82; until test -e open; do sleep 0.01; done; \
                   cp ARCHIVE/%f %p 2>/dev/null; code=$?; rmdir busy; exit $code";
    let command = Arc::new(dirs.command(command).with_jobs(4));
    let source = reads_place(command.clone());
    std::thread::scope(|scope| {
        source.release_before(Lsn(0));
        scope.spawn(|| assert_eq!(mark(&source, 0).unwrap(), Some(1)));
        wait_for("others wait to run alone", || command.waits_alone());
        dirs.open_gate();
    });
    for number in 0..12 {
        source.release_before(Lsn(number * SEGMENT));
        assert_eq!(mark(&source, number).unwrap(), Some(number as u8 + 1), "segment {number}");
    }
    assert!(source.fetch_stats().alone);
    assert_eq!(mark(&source, 12).unwrap(), None, "the end");
    assert!(matches!(source.confirm_end(Lsn(12 * SEGMENT), true), Ok(End::Confirmed)));
}

/// The command fails for a moment for the file of the newer timeline, and delivers the older one's, which ends where that branches off.
/// That was taken for the end of the WAL, and a promotion left out all of the newer timeline.
#[test]
fn an_older_timeline_is_not_the_end_of_the_newer_one() {
    let dirs = Dirs::new();
    dirs.put(1, 0, "", 1);
    dirs.put(1, 1, "", 2);
    dirs.put(2, 1, "", 3);
    let down = dirs.data().join("down");
    let command = dirs.command("case %f in 00000002*) test ! -e down || exit 1;; esac; cp ARCHIVE/%f %p 2>/dev/null");
    let source = reads_place(Arc::new(command));
    let switch = Lsn(SEGMENT + SEGMENT / 2);
    source.set_history(TimelineHistory::parse(TimelineId(2), &format!("1\t{switch}\tpromoted\n")).unwrap());
    fs::write(&down, "").unwrap();
    assert_eq!(mark(&source, 0).unwrap(), Some(1));
    assert_eq!(mark(&source, 1).unwrap(), Some(2));
    fs::remove_file(&down).unwrap();
    assert!(matches!(source.confirm_end(switch, true).unwrap(), End::GoesOn));
    assert_eq!(mark(&source, 1).unwrap(), Some(3));
}

/// As in following: each time around, there is one command for the segment that is missing, and none for those behind it.
#[test]
fn an_archive_that_has_ended_is_asked_for_one_segment() {
    let dirs = Dirs::new();
    dirs.open_gate();
    dirs.put(1, 0, "", 1);
    let source = dirs.gated(4);
    source.release_before(Lsn(0));
    assert_eq!(mark(&source, 0).unwrap(), Some(1));
    source.release_before(Lsn(SEGMENT));
    assert_eq!(mark(&source, 1).unwrap(), None);
    wait_for("what ran beside it ends", || source.fetcher.is_idle());
    for round in 0..5 {
        let before = dirs.log().0.len();
        source.close_all();
        source.release_before(Lsn(SEGMENT));
        assert_eq!(mark(&source, 1).unwrap(), None);
        assert!(source.fetcher.is_idle());
        assert_eq!(dirs.log().0[before..], [1], "round {round}");
    }
    for number in 1..12 {
        dirs.put(1, number, "", 1);
    }
    source.close_all();
    for number in 1..12 {
        source.release_before(Lsn(number * SEGMENT));
        assert_eq!(mark(&source, number).unwrap(), Some(1));
    }
}

/// One at a time is one at a time, for any caller and any file.
#[test]
fn one_fetch_job_runs_one_command() {
    let dirs = Dirs::new();
    dirs.open_gate();
    for number in 0..6 {
        dirs.put(1, number, "", 1);
    }
    let source = dirs.gated(1);
    source.release_before(Lsn(0));
    std::thread::scope(|scope| {
        for number in 0..6 {
            let source = &source;
            scope.spawn(move || assert_eq!(mark(source, number).unwrap(), Some(1)));
        }
    });
    assert!(matches!(source.confirm_end(Lsn(6 * SEGMENT), true).unwrap(), End::Confirmed));
    assert_eq!(dirs.log().1, 1);
}

#[test]
fn nothing_is_left_of_a_command_that_hangs() {
    let dirs = Dirs::new();
    let command = Arc::new(dirs.command("echo x >%p; echo >>started; exec sleep 600").with_jobs(3));
    let source = reads_place(command.clone());
    source.release_before(Lsn(0));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| mark(&source, 0));
        wait_for("three hang", || fs::read_to_string(dirs.data().join("started")).is_ok_and(|text| text.len() == 3));
        command.stop();
        let error = waits.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("was ended by signal 15"), "{error}");
    });
    drop(source);
    assert!(dirs.has_no_fetches());
}

/// The archive fails from one moment on, comes back, and gets one segment more.
#[test]
fn an_outage_is_not_the_end() {
    let dirs = Dirs::new();
    for number in 0..3 {
        dirs.put(1, number, "", 1);
    }
    let down = dirs.data().join("down");
    let command = dirs.command("test ! -e down && cp ARCHIVE/%f %p 2>/dev/null").with_jobs(2);
    let source = reads_place(Arc::new(command));
    source.release_before(Lsn(0));
    for number in 0..3 {
        source.release_before(Lsn(number * SEGMENT));
        assert_eq!(mark(&source, number).unwrap(), Some(1));
    }
    let end = Lsn(3 * SEGMENT);
    fs::write(&down, "").unwrap();
    assert_eq!(mark(&source, 3).unwrap(), None);
    for counts in [true, false] {
        let End::Unknown(why) = source.confirm_end(end, counts).unwrap() else { panic!("the archive is down") };
        assert!(why.contains(" ended with exit code 1, although it has delivered that file before"), "{why}");
    }
    assert!(source.describe(end).contains("for WAL file \"000000010000000000000003\" ended with exit code 1)"));
    assert_eq!(source.refusal(end).unwrap().exit_code, 1);
    fs::remove_file(&down).unwrap();
    assert!(matches!(source.confirm_end(end, true).unwrap(), End::Confirmed));
    dirs.put(1, 3, "", 4);
    assert!(matches!(source.confirm_end(end, true).unwrap(), End::GoesOn));
    assert_eq!(mark(&source, 3).unwrap(), Some(4));
    assert!(matches!(source.confirm_end(end, true).unwrap(), End::Confirmed), "the segment is there: it ends within");
}

/// A file of `pg_wal`, which may be an old one, does not hide that the archive did not answer.
#[test]
fn what_pg_wal_has_does_not_hide_an_outage() {
    let dirs = Dirs::new();
    dirs.put(1, 2, "", 1);
    let pg_wal = dirs.data().join("pg_wal");
    fs::write(pg_wal.join("000000010000000000000003"), vec![9; SEGMENT as usize]).unwrap();
    let command = dirs.command("test ! -e down && cp ARCHIVE/%f %p");
    let places: Vec<Arc<dyn Driver>> = vec![Arc::new(command), Arc::new(Directory::new(pg_wal))];
    let source = Source::new(places, size(), TimelineHistory::alone(TimelineId(1)));
    assert_eq!(mark(&source, 2).unwrap(), Some(1));
    fs::write(dirs.data().join("down"), "").unwrap();
    assert_eq!(mark(&source, 3).unwrap(), Some(9));
    assert!(matches!(source.confirm_end(Lsn(3 * SEGMENT), false).unwrap(), End::Unknown(_)));
    fs::remove_file(dirs.data().join("down")).unwrap();
    assert!(matches!(source.confirm_end(Lsn(3 * SEGMENT), true).unwrap(), End::Confirmed));
}

#[test]
fn a_command_that_never_delivers_proves_nothing() {
    let dirs = Dirs::new();
    let source = dirs.runs_command("exit 3");
    source.note_restartpoint(Lsn(5 * SEGMENT));
    assert_eq!(mark(&source, 6).unwrap(), None);
    assert!(matches!(source.confirm_end(Lsn(6 * SEGMENT), false).unwrap(), End::Confirmed));
    let End::Unknown(why) = source.confirm_end(Lsn(6 * SEGMENT), true).unwrap() else { panic!("nothing is proven") };
    assert!(why.contains("\"000000010000000000000005\" ended with exit code 3"), "{why}");
    // The segment before the one where recovery begins is enough of a proof.
    dirs.put(1, 4, "", 1);
    let source = dirs.runs_command("cp ARCHIVE/%f %p 2>/dev/null");
    source.note_restartpoint(Lsn(5 * SEGMENT));
    assert!(matches!(source.confirm_end(Lsn(6 * SEGMENT), true).unwrap(), End::Confirmed));
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
    assert!(source.describe(Lsn(7 * SEGMENT)).starts_with("WAL file \"000000010000000000000007\", LSN 0/700000"));
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
    assert!(matches!(mark(&dirs.runs_command("printf short >%p"), 7), Err(StoreError::Corrupt(_))));
    let growing = dirs.command("printf short >%p").growing(true);
    assert_eq!(mark(&reads_place(Arc::new(growing)), 7).unwrap(), None);
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
    let error = source.read_history(TimelineId(3)).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt(_)));
    assert!(error.to_string().contains("00000003.history\" is no timeline history: syntax error"), "{error}");
    assert!(error.to_string().contains("remove that file"), "{error}");
}

/// WAL is visible up to there, and nothing else is known.
struct VisibleUpTo(Lsn, Option<Lsn>);

impl Incoming for VisibleUpTo {
    fn visible(&self) -> Lsn {
        self.0
    }
    fn streams_from(&self) -> Option<Lsn> {
        self.1
    }
    fn keep_restored(&self, _: &str, _: &fs::File, _: bool) -> Result<Kept, StoreError> {
        Ok(Kept::No)
    }
    fn restartpoint(&self, _: Lsn, _: TimelineId) {}
}

/// A primary that was promoted before, and is a standby again, has a `.partial` segment in `pg_wal`: what the archive has of it came later.
#[test]
fn an_old_partial_segment_in_pg_wal_does_not_hide_the_archive() {
    let (archive, pg_wal) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let size = SegmentSize::new(1 << 20).unwrap();
    let name = size.file_name(TimelineId(1), 1);
    fs::write(pg_wal.path().join(format!("{name}.partial")), vec![7; 1 << 20]).unwrap();
    fs::write(archive.path().join(&name), vec![8; 1 << 20]).unwrap();
    let places: Vec<Arc<dyn Driver>> =
        vec![Arc::new(Directory::new(archive.path())), Arc::new(Directory::new(pg_wal.path()))];
    let mut finder = Finder::new(places, size, TimelineHistory::alone(TimelineId(1)));
    finder.incoming = Some(Arc::new(VisibleUpTo(Lsn(u64::MAX), None)));
    let found = finder.find_segment(1).unwrap().segment.unwrap();
    assert_eq!(found.path, archive.path().join(name));
}

#[test]
fn what_is_not_visible_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let size = SegmentSize::new(1 << 20).unwrap();
    fs::write(dir.path().join(size.file_name(TimelineId(1), 1)), vec![7; 1 << 20]).unwrap();
    let start = size.start_of(1);
    let read = |visible: u64| {
        let places: Vec<Arc<dyn Driver>> =
            vec![Arc::new(Directory::new("/nonexistent")), Arc::new(Directory::new(dir.path()))];
        let source = Source::new(places, size, TimelineHistory::alone(TimelineId(1)))
            .brought_by(Some(Arc::new(VisibleUpTo(Lsn(start.0 + visible), Some(Lsn(1 << 20))))));
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

/// A record began in a segment of the archive, and what follows was streamed: replay never found its beginning again.
#[test]
fn archives_are_looked_at_for_what_precedes_the_stream() {
    let dirs = Dirs::new();
    dirs.put(1, 0, "", 7);
    dirs.put(1, 1, "", 7);
    let pg_wal = dirs.data().join("pg_wal");
    fs::write(pg_wal.join(size().file_name(TimelineId(1), 1)), vec![9; SEGMENT as usize]).unwrap();
    let places: Vec<Arc<dyn Driver>> = vec![Arc::new(Directory::new(dirs.archive())), Arc::new(Directory::new(pg_wal))];
    let source = Source::new(places, size(), TimelineHistory::alone(TimelineId(1)))
        .brought_by(Some(Arc::new(VisibleUpTo(Lsn(2 * SEGMENT), Some(Lsn(1 << 20))))));
    assert_eq!((mark(&source, 0).unwrap(), mark(&source, 1).unwrap()), (Some(7), Some(9)));
}

/// The file of the next timeline is there up to a page of the one before, because its stream was cut. More of the old one was
/// asked for, and would have come into the other file, which is not read.
#[test]
fn more_is_needed_of_the_file_that_is_read() {
    let dirs = Dirs::new();
    let source = dirs.reads_directory(branched());
    let before = Lsn(branched().switch_point(TimelineId(1)).unwrap().0 - 2 * XLOG_BLCKSZ as u64);
    assert_eq!(source.timeline_needed(before), TimelineId(1));
    dirs.put(2, size().segment_of(before), "", 7);
    source.close_all();
    assert_eq!(source.timeline_needed(before), TimelineId(2));
}

#[test]
fn wal_that_is_gone_is_not_compared() {
    let dirs = Dirs::new();
    dirs.put(1, 2, "", 7);
    let source = dirs.reads_directory(TimelineHistory::alone(TimelineId(1)));
    let same = |at: u64, bytes: &[u8]| agrees(&source, size(), Lsn(at), bytes).unwrap();
    assert!(same(2 * SEGMENT + 5, &[7; 300_000]));
    assert!(!same(2 * SEGMENT + 5, &[[7; 9].as_slice(), &[8]].concat()));
    // What precedes and follows is not there.
    assert!(same(2 * SEGMENT - 3, &[[1; 3].as_slice(), &[7; 20_000]].concat()));
    assert!(!same(2 * SEGMENT - 3, &[[1; 3].as_slice(), &[8]].concat()));
    assert!(same(3 * SEGMENT - 1, &[7, 1]));
    // A switch leaves the rest of a segment unused: zeros, where a power cut has left what the file had before.
    assert!(same(3 * SEGMENT - 20_000, &[[7; 2000].as_slice(), &[0; 18_000], &[1; 5]].concat()));
    assert!(!same(3 * SEGMENT - 20_000, &[[7; 2000].as_slice(), &[0; 17_999], &[1; 5]].concat()));
    assert!(!same(3 * SEGMENT - 20_000, &[[7; 2000].as_slice(), &[0; 17_999]].concat()));
}
