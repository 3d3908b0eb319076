//! Whole comparisons of small directories made here.

use super::*;
use walrider_layout::bytes::put_u64;
use walrider_layout::control::{CHECKPOINT_SIZE, CheckPoint};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{BLCKSZ, Lsn, Major, TimelineId};

const HOW: How = How { strict: false, first: 20 };

/// Two data directories, removed when dropped.
struct Pair {
    root: PathBuf,
}

impl Pair {
    fn new(test: &str) -> Pair {
        let root = std::env::temp_dir().join(format!("walrider-compare-{}-{test}", std::process::id()));
        let pair = Pair { root };
        for side in ["a", "b"] {
            for dir in ["base/5", "global", "pg_xact", "pg_multixact/offsets", "pg_logical", "pg_tblspc", "pg_wal"] {
                fs::create_dir_all(pair.root.join(side).join(dir)).unwrap();
            }
        }
        pair.both("global/pg_control", &control().to_bytes());
        pair.both("PG_VERSION", b"18\n");
        pair.both("base/5/16384", &[0; BLCKSZ]);
        pair.both("pg_xact/0000", &[0x55; BLCKSZ]);
        pair
    }

    fn one(&self, side: &str, name: &str, bytes: &[u8]) {
        fs::write(self.root.join(side).join(name), bytes).unwrap();
    }

    fn both(&self, name: &str, bytes: &[u8]) {
        self.one("a", name, bytes);
        self.one("b", name, bytes);
    }

    fn try_compare(&self, names: [&str; 2], how: How) -> Result<Report, CompareError> {
        let dirs = names.map(|name| self.root.join(name));
        compare([&dirs[0], &dirs[1]], how, &|_| {})
    }

    fn compare(&self) -> Report {
        self.try_compare(["a", "b"], HOW).unwrap()
    }

    fn compare_strictly(&self) -> Report {
        self.try_compare(["a", "b"], How { strict: true, ..HOW }).unwrap()
    }

    /// Differences, and findings of a class.
    fn found(&self, class: Class) -> (u64, u64) {
        let report = self.compare();
        (report.tally.differences(), report.tally.of(class))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn control() -> ControlFile {
    ControlFile {
        major: Major::V18,
        system_identifier: 1,
        catalog_version: Major::V18.catalog_version(),
        state: DbState::ShutDownInRecovery,
        time: 1_700_000_000,
        checkpoint: Lsn(0x28),
        checkpoint_copy: CheckPoint::parse(&[0; CHECKPOINT_SIZE]).unwrap(),
        unlogged_lsn: Lsn(1000),
        min_recovery_point: Lsn(0x100),
        min_recovery_point_timeline: TimelineId(1),
        backup_start_point: Lsn(0),
        backup_end_point: Lsn(0),
        backup_end_required: false,
        wal_level: 1,
        wal_log_hints: false,
        max_connections: 100,
        max_worker_processes: 8,
        max_wal_senders: 10,
        max_prepared_xacts: 0,
        max_locks_per_xact: 64,
        track_commit_timestamp: false,
        segment_size: SegmentSize::new(16 << 20).unwrap(),
        data_checksum_version: 0,
        default_char_signedness: Some(true),
        mock_authentication_nonce: [0; 32],
    }
}

#[test]
fn equal_directories_are_equal() {
    let pair = Pair::new("equal");
    let report = pair.compare();
    assert_eq!(report.tally.differences(), 0, "{:?}", report.tally.first);
    assert_eq!((report.relations, report.tally.pages, report.tally.files), (1, 1, 4));
}

#[test]
fn a_relation_that_one_has_is_missing_even_if_it_is_empty() {
    let pair = Pair::new("missing");
    pair.one("a", "base/5/16390", &[]);
    assert_eq!(pair.found(Class::MissingFile), (1, 1));
    // A crashed server keeps the first segment of a dropped relation until its next checkpoint.
    pair.one("a", "global/pg_control", &ControlFile { state: DbState::InProduction, ..control() }.to_bytes());
    assert_eq!(pair.found(Class::EmptyFile).1, 1);
}

#[test]
fn empty_segments_and_maps_may_be_absent() {
    let pair = Pair::new("empty");
    pair.one("a", "base/5/16384.1", &[]);
    pair.one("b", "base/5/16384_vm", &[]);
    pair.one("b", "base/5/16384_fsm", &[0; BLCKSZ]);
    let report = pair.compare();
    assert_eq!(report.tally.differences(), 0, "{:?}", report.tally.first);
    assert_eq!((report.tally.of(Class::EmptyFile), report.tally.of(Class::TrailingZero)), (2, 1));
    let strict = pair.compare_strictly();
    assert_eq!(strict.tally.differences(), 3);
}

#[test]
fn blocks_count_over_all_segments() {
    let pair = Pair::new("segments");
    pair.one("a", "base/5/16384.2", &[0; BLCKSZ]);
    pair.one("b", "base/5/16384.2", &[1; BLCKSZ]);
    let report = pair.compare();
    assert_eq!(report.tally.first[0].block, Some(2 * 131_072));
    assert_eq!((report.relations, report.tally.differences()), (1, 1));
}

#[test]
fn unlogged_relations_are_compared_by_their_init_fork() {
    let pair = Pair::new("unlogged");
    pair.both("base/5/16400_init", &[]);
    pair.one("a", "base/5/16400", &[7; BLCKSZ]);
    pair.one("a", "base/5/16400_vm", &[7; BLCKSZ]);
    assert_eq!(pair.found(Class::Unlogged), (0, 2));
    fs::remove_file(pair.root.join("b/base/5/16400_init")).unwrap();
    assert_eq!(pair.found(Class::MissingFile), (1, 1));
}

#[test]
fn transaction_states_are_compared_page_by_page() {
    let pair = Pair::new("slru");
    let mut bytes = vec![0x55; 2 * BLCKSZ];
    bytes[BLCKSZ..].fill(0);
    pair.one("b", "pg_xact/0000", &bytes);
    assert_eq!(pair.found(Class::SlruTrailingZero), (0, 1));
    bytes[5] = 0x95;
    pair.one("b", "pg_xact/0000", &bytes);
    let report = pair.compare();
    assert_eq!((report.tally.differences(), report.tally.of(Class::SlruTrailingZero)), (1, 1));
    assert_eq!(report.tally.first[0].field, "state of transaction 23");
    pair.one("a", "pg_xact/0001", &[0; BLCKSZ]);
    assert_eq!(pair.found(Class::MissingFile), (2, 1));
}

/// As left behind where `track_commit_timestamp` was off in between: transactions from 1000 on can be read.
#[test]
fn commit_timestamps_that_nobody_can_read_may_differ() {
    let pair = Pair::new("commit-ts");
    let with_oldest = |oldest: u32| {
        let checkpoint = CheckPoint { oldest_commit_ts_xid: oldest, next_xid: 1000, ..control().checkpoint_copy };
        pair.both("global/pg_control", &ControlFile { checkpoint_copy: checkpoint, ..control() }.to_bytes());
    };
    for side in ["a", "b"] {
        fs::create_dir(pair.root.join(side).join("pg_commit_ts")).unwrap();
    }
    with_oldest(1000);
    pair.one("a", "pg_commit_ts/0000", &[0; 2 * BLCKSZ]);
    let mut bytes = vec![0; 2 * BLCKSZ];
    bytes[70] = 1;
    // Transaction 999: page 1 begins with 819.
    bytes[BLCKSZ + 1809] = 1;
    pair.one("b", "pg_commit_ts/0000", &bytes);
    assert_eq!(pair.found(Class::CommitTsBeforeOldest), (0, 2));
    let strict = pair.compare_strictly();
    assert_eq!(strict.tally.differences(), 0, "{:?}", strict.tally.first);

    // The first that can be read, on a page that also has others.
    bytes[BLCKSZ + 1810] = 1;
    pair.one("b", "pg_commit_ts/0000", &bytes);
    let report = pair.compare();
    assert_eq!((report.tally.of(Class::Slru), report.tally.of(Class::CommitTsBeforeOldest)), (1, 1));
    let first = &report.tally.first[0];
    assert_eq!((first.field.as_str(), first.offset), ("commit timestamp of transaction 1000", Some(1810)));

    // The limit of a single side is not enough.
    let older = CheckPoint { oldest_commit_ts_xid: 5, next_xid: 1000, ..control().checkpoint_copy };
    pair.one("a", "global/pg_control", &ControlFile { checkpoint_copy: older, ..control() }.to_bytes());
    assert_eq!(pair.found(Class::Slru).1, 2);

    // A file that one lacks, with tracking on, and off.
    with_oldest(1000);
    bytes[BLCKSZ + 1810] = 0;
    pair.one("b", "pg_commit_ts/0000", &bytes);
    fs::remove_file(pair.root.join("a/pg_commit_ts/0000")).unwrap();
    assert_eq!(pair.found(Class::MissingFile), (1, 1));
    with_oldest(0);
    assert_eq!(pair.found(Class::CommitTsBeforeOldest), (0, 2));
    bytes[BLCKSZ + 1810] = 1;
    pair.one("b", "pg_commit_ts/0000", &bytes);
    assert_eq!(pair.found(Class::MissingFile), (1, 1));
}

#[test]
fn the_control_file_is_compared_by_field() {
    let pair = Pair::new("control");
    pair.one("b", "global/pg_control", &ControlFile { time: 7, ..control() }.to_bytes());
    assert_eq!(pair.found(Class::ControlTime), (0, 1));
    pair.one("b", "global/pg_control", &ControlFile { min_recovery_point: Lsn(0x200), ..control() }.to_bytes());
    let report = pair.compare();
    let first = &report.tally.first[0];
    assert_eq!((first.field.as_str(), first.a.as_str(), first.b.as_str()), ("minRecoveryPoint", "0/100", "0/200"));
    assert_eq!(report.tally.differences(), 1);
}

#[test]
fn what_recovery_does_not_make_is_counted_only() {
    let pair = Pair::new("counted");
    pair.one("a", "pg_wal/000000010000000000000001", b"wal");
    pair.one("a", "postgresql.conf", b"");
    pair.one("b", "backup_label.old", b"");
    pair.one("b", "base/5/pg_internal.init", b"");
    let report = pair.compare();
    assert_eq!(report.tally.differences(), 0, "{:?}", report.tally.first);
    for class in [Class::Wal, Class::Config, Class::BackupRemains, Class::RelcacheInit] {
        assert_eq!(report.tally.of(class), 1);
    }
    // A label left behind makes PostgreSQL start over from the backup.
    pair.one("b", "backup_label", b"START WAL LOCATION");
    assert_eq!(pair.found(Class::MissingFile), (1, 1));
}

#[test]
fn databases_and_tablespaces_must_be_there() {
    let pair = Pair::new("directories");
    fs::create_dir(pair.root.join("a/base/6")).unwrap();
    assert_eq!(pair.found(Class::Directory), (1, 1));
    fs::create_dir(pair.root.join("b/base/6")).unwrap();
    for side in ["a", "b"] {
        let target = pair.root.join(format!("space-{side}"));
        fs::create_dir_all(target.join("PG_18_202506291/5")).unwrap();
        fs::write(target.join("PG_18_202506291/5/16500"), side.repeat(BLCKSZ)).unwrap();
        fs::create_dir_all(target.join("PG_17_202406281/5")).unwrap();
        std::os::unix::fs::symlink(&target, pair.root.join(side).join("pg_tblspc/16499")).unwrap();
    }
    let report = pair.compare();
    assert_eq!(report.tally.of(Class::TablespaceTarget), 1);
    assert_eq!(report.tally.first[0].file, "pg_tblspc/16499/PG_18_202506291/5/16500");
    assert_eq!(report.tally.differences(), 1);
    let link = pair.root.join("b/pg_tblspc/16499");
    fs::remove_file(&link).unwrap();
    assert_eq!(pair.compare().tally.of(Class::Directory), 3);
    // One place for both: nothing has been compared.
    std::os::unix::fs::symlink(pair.root.join("space-a"), &link).unwrap();
    assert_eq!(pair.found(Class::TablespaceShared), (1, 1));
    assert_eq!(pair.try_compare(["a", "a"], HOW).unwrap().tally.differences(), 0);
}

#[test]
fn the_first_differences_are_kept() {
    let pair = Pair::new("first");
    pair.one("b", "base/5/16384", &[1; BLCKSZ]);
    pair.one("b", "PG_VERSION", b"17\n");
    let Report { tally, .. } = pair.try_compare(["a", "b"], How { first: 1, ..HOW }).unwrap();
    assert_eq!((tally.differences(), tally.of(Class::Page), tally.of(Class::File)), (2, 1, 1));
    let [first] = &tally.first[..] else { panic!("{:?}", tally.first) };
    assert_eq!((first.file.as_str(), first.a.as_str()), ("PG_VERSION", "380a"));
}

#[test]
fn who_watches_learns_how_much_was_read() {
    let pair = Pair::new("progress");
    let (total, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let watch = |progress: &Progress| {
        while !progress.is_finished() {
            thread::yield_now();
        }
        total.store(progress.total_bytes, Ordering::Relaxed);
        done.store(progress.done_bytes(), Ordering::Relaxed);
    };
    compare([&pair.root.join("a"), &pair.root.join("b")], HOW, &watch).unwrap();
    // A relation and a segment of pg_xact, in both.
    assert_eq!((total.into_inner(), done.into_inner()), (4 * BLCKSZ as u64, 4 * BLCKSZ as u64));
}

#[test]
fn only_stopped_data_directories_are_compared() {
    let pair = Pair::new("usage");
    let compare = |b| pair.try_compare(["a", b], HOW);
    assert!(matches!(compare(""), Err(CompareError::NotADataDirectory { .. })));
    // The parent of this process lives, whatever it is; a negative number need not be a postmaster.
    let parent = std::os::unix::process::parent_id();
    pair.one("b", "postmaster.pid", format!("-{parent}\n").as_bytes());
    assert!(matches!(compare("b"), Err(CompareError::Running { pid, .. }) if pid == u64::from(parent)));
    // As a postmaster's, the number is stale: that process does not work in the directory.
    pair.one("b", "postmaster.pid", b"4194999\n");
    assert_eq!(compare("b").unwrap().tally.differences(), 0);
    let mut damaged = control().to_bytes();
    put_u64(&mut damaged, 0, 99);
    pair.one("b", "global/pg_control", &damaged);
    assert!(matches!(compare("b"), Err(CompareError::Control { source: ControlError::Checksum { .. }, .. })));
}
