//! Whole records against a small directory.

use std::fs;

use walrider_layout::bytes::{put_u32, put_u64};
use walrider_layout::control::{CheckPoint, ControlFile, DbState};
use walrider_layout::wal::SegmentSize;
use walrider_layout::{BLCKSZ, ForkNumber, Major, RelFileLocator};
use walrider_wal::record::RecordHeader;

use super::*;

const NEXT_XID: u64 = 7 << 32 | 1000;

/// A directory with what recovery needs, and the state over it.
struct Cluster {
    dir: tempfile::TempDir,
    control: ControlFile,
    globals: Globals,
    lsn: u64,
}

fn control() -> ControlFile {
    let checkpoint = CheckPoint {
        redo: Lsn(0x1000),
        timeline: TimelineId(1),
        previous_timeline: TimelineId(1),
        next_xid: NEXT_XID,
        next_oid: 20_000,
        next_multi: 1,
        next_multi_offset: 1,
        oldest_xid: 3,
        oldest_multi: 1,
        ..CheckPoint::default()
    };
    ControlFile {
        major: Major::V18,
        system_identifier: 1,
        catalog_version: Major::V18.catalog_version(),
        state: DbState::InArchiveRecovery,
        time: 0,
        checkpoint: Lsn(0x1000),
        checkpoint_copy: checkpoint,
        unlogged_lsn: Lsn(1000),
        min_recovery_point: Lsn(0),
        min_recovery_point_timeline: TimelineId(1),
        backup_start_point: Lsn(0),
        backup_end_point: Lsn(0),
        backup_end_required: false,
        wal_level: 1,
        wal_log_hints: false,
        max_connections: 100,
        max_worker_processes: 8,
        max_wal_senders: 10,
        max_prepared_xacts: 10,
        max_locks_per_xact: 64,
        track_commit_timestamp: false,
        segment_size: SegmentSize::DEFAULT,
        data_checksum_version: 1,
        default_char_signedness: Some(true),
        mock_authentication_nonce: [0; 32],
    }
}

fn record(lsn: u64, rmgr: RmgrId, info: u8, xid: TransactionId, main_data: &[u8]) -> Record<'_> {
    Record {
        major: Major::V18,
        lsn: Lsn(lsn),
        end: Lsn(lsn + 0x100),
        header: RecordHeader { total_len: 24, xid, prev: Lsn(0), info, rmgr, crc: 0 },
        origin: 0,
        toplevel_xid: 0,
        blocks: Default::default(),
        main_data,
    }
}

impl Cluster {
    fn new() -> Cluster {
        Cluster::with(control())
    }

    fn with(control: ControlFile) -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        for directory in
            ["pg_xact", "pg_commit_ts", "pg_multixact/offsets", "pg_multixact/members", "pg_twophase", "pg_logical"]
        {
            fs::create_dir_all(dir.path().join(directory)).unwrap();
        }
        fs::write(dir.path().join("pg_xact/0000"), [0; BLCKSZ]).unwrap();
        let globals = Globals::open(dir.path(), &control, true).unwrap();
        Cluster { dir, control, globals, lsn: 0x2000 }
    }

    /// As after a crash: what was not made durable is gone.
    fn reopen(self) -> Cluster {
        let globals = Globals::open(self.dir.path(), &self.control, true).unwrap();
        Cluster { globals, ..self }
    }

    fn redo(&mut self, rmgr: RmgrId, info: u8, xid: TransactionId, data: &[u8]) -> Result<Vec<Action>, GlobalError> {
        self.lsn += 0x100;
        self.globals.redo(&record(self.lsn, rmgr, info, xid, data))
    }

    fn done(&mut self, rmgr: RmgrId, info: u8, xid: TransactionId, data: &[u8]) {
        assert_eq!(self.redo(rmgr, info, xid, data).unwrap(), []);
    }

    fn restartpoint(&mut self, redo: u64) {
        let body = CheckPoint { redo: Lsn(redo), ..self.control.checkpoint_copy };
        let checkpoint = SeenCheckpoint { lsn: Lsn(self.lsn), end: Lsn(self.lsn), shutdown: false, body };
        self.globals.checkpoint(&checkpoint).unwrap();
        self.globals.checkpoint_prepared(&checkpoint).unwrap();
    }

    fn status(&mut self, xid: TransactionId) -> Option<XidStatus> {
        self.globals.xid_status(xid).unwrap()
    }

    fn twophase_files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path().join("pg_twophase")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Numbers, one after the other, as in the C structs.
fn bytes(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// The main data of a PREPARE record, without anything in it.
fn prepare(xid: TransactionId, gid: &str) -> Vec<u8> {
    let gid_len = gid.len() + 1;
    let mut data = vec![0; 72 + walrider_layout::maxalign(gid_len) + 8];
    let total = data.len() as u32 + 4;
    put_u32(&mut data, 0, 0x57F9_4534);
    put_u32(&mut data, 4, total);
    put_u32(&mut data, 8, xid);
    data[54] = gid_len as u8;
    put_u64(&mut data, 56, 0x77);
    data[72..72 + gid.len()].copy_from_slice(gid.as_bytes());
    data
}

const COMMIT: u8 = 0x00;
const PREPARE: u8 = 0x10;
const ABORT: u8 = 0x20;
const COMMIT_PREPARED: u8 = 0x30;
const HAS_INFO: u8 = 0x80;

#[test]
fn a_plain_commit_sets_its_bits_and_moves_the_next_id() {
    let mut cluster = Cluster::new();
    cluster.done(RmgrId::XACT, COMMIT, 1005, &[0; 8]);
    assert_eq!(cluster.status(1005), Some(XidStatus::Committed));
    assert_eq!(cluster.status(1004), None);
    assert_eq!(cluster.globals.next_xid().0, 7 << 32 | 1006);
    cluster.done(RmgrId::XACT, ABORT, 1004, &[0; 8]);
    assert_eq!(cluster.status(1004), Some(XidStatus::Aborted));
}

#[test]
fn a_commit_with_subtransactions_relations_and_origin() {
    let mut cluster = Cluster::new();
    cluster.globals.advance_next_xid(1100);
    // xact_time; xinfo: subxacts, relations, origin; then those.
    let mut data = vec![9; 8];
    data.extend(bytes(&[1 << 1 | 1 << 2 | 1 << 5, 2, 1101, 1102, 1, 1663, 5, 16_384]));
    data.extend(0xABCDu64.to_le_bytes());
    data.extend(77i64.to_le_bytes());
    cluster.lsn += 0x100;
    let mut commit = record(cluster.lsn, RmgrId::XACT, COMMIT | HAS_INFO, 1100, &data);
    commit.origin = 3;
    let actions = cluster.globals.redo(&commit).unwrap();
    let rel = RelFileLocator { tablespace: 1663, database: 5, relation: 16_384 };
    assert_eq!(actions, [Action::DropRelations(vec![rel])]);
    for xid in [1100, 1101, 1102] {
        assert_eq!(cluster.status(xid), Some(XidStatus::Committed), "{xid}");
    }
    assert_eq!(cluster.globals.next_xid().xid(), 1103);
    cluster.restartpoint(0);
    let file = fs::read(cluster.dir.path().join("pg_logical/replorigin_checkpoint")).unwrap();
    assert_eq!(file.len(), 24);
    assert_eq!(file[4..20], [3, 0, 0, 0, 0, 0, 0, 0, 0xCD, 0xAB, 0, 0, 0, 0, 0, 0]);
    for len in 0..data.len() {
        let mut short = record(cluster.lsn, RmgrId::XACT, COMMIT | HAS_INFO, 1100, &data[..len]);
        short.origin = 3;
        assert!(cluster.globals.redo(&short).is_err(), "{len} bytes");
    }
}

#[test]
fn commit_timestamps_follow_the_parameter() {
    let mut cluster = Cluster::new();
    let parameters = |track: bool| {
        let mut data = bytes(&[200, 9, 11, 12, 70, 2]);
        data.extend([1, u8::from(track), 0, 0]);
        data
    };
    cluster.done(RmgrId::XACT, COMMIT, 1001, &[5; 8]);
    let actions = cluster.redo(RmgrId::XLOG, 0x60, 0, &parameters(true)).unwrap();
    assert_eq!(actions, [Action::ParametersChanged]);
    cluster.done(RmgrId::XACT, COMMIT, 1002, &[6; 8]);
    cluster.restartpoint(0);
    let file = fs::read(cluster.dir.path().join("pg_commit_ts/0000")).unwrap();
    assert_eq!(file.len(), 2 * BLCKSZ);
    let at = BLCKSZ + (1001 - 819) * 10;
    assert_eq!(file[at..at + 20], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 6, 6, 0, 0]);
    let mut control = cluster.control.clone();
    cluster.globals.apply_to(&mut control);
    assert!(control.track_commit_timestamp && control.wal_log_hints);
    assert_eq!((control.max_connections, control.max_locks_per_xact, control.wal_level), (200, 70, 2));
    cluster.redo(RmgrId::XLOG, 0x60, 0, &parameters(false)).unwrap();
    cluster.restartpoint(0);
    assert!(!cluster.dir.path().join("pg_commit_ts/0000").exists());
}

/// Its id is in no other record. It was handed out once more after a promotion.
#[test]
fn recovery_ends_past_the_subtransactions_of_what_is_prepared() {
    let mut data = prepare(1003, "sub");
    put_u32(&mut data, 28, 1);
    let at = 72 + 8;
    data.splice(at..at, bytes(&[1007, 0]));
    let total = data.len() as u32 + 4;
    put_u32(&mut data, 4, total);
    let mut cluster = Cluster::new();
    cluster.done(RmgrId::XACT, PREPARE, 1003, &data);
    assert_eq!(cluster.globals.next_xid().0, 7 << 32 | 1004, "as in PostgreSQL's recovery");
    let next = |cluster: &Cluster| cluster.globals.end_of_recovery(Lsn(cluster.lsn), TimelineId(2), 0).next_xid;
    assert_eq!(next(&cluster), 7 << 32 | 1008);
    cluster.restartpoint(u64::MAX);
    cluster.control.checkpoint_copy.next_xid = 7 << 32 | 1004;
    assert_eq!(next(&cluster.reopen()), 7 << 32 | 1008, "from its file");
}

#[test]
fn prepared_transactions_across_restartpoints_and_a_crash() {
    let mut cluster = Cluster::new();
    cluster.done(RmgrId::XACT, PREPARE, 1003, &prepare(1003, "first"));
    let redo = cluster.lsn + 0x100;
    cluster.done(RmgrId::XACT, PREPARE, 1004, &prepare(1004, "second"));
    assert_eq!(
        cluster.globals.prepared().map(|prepared| &prepared.gid[..]).collect::<Vec<_>>(),
        [b"first", &b"second"[..]]
    );
    cluster.restartpoint(redo);
    assert_eq!(cluster.twophase_files(), ["00000007000003EB"]);
    let file = fs::read(cluster.dir.path().join("pg_twophase/00000007000003EB")).unwrap();
    assert_eq!(file[..file.len() - 4], prepare(1003, "first"));

    // Began again at a checkpoint whose next id is before it: the file goes, the PREPARE is still to come.
    let mut cluster = cluster.reopen();
    assert_eq!(cluster.globals.prepared().count(), 0);
    cluster.globals.remove_stale_files().unwrap();
    assert_eq!(cluster.twophase_files(), [""; 0]);
    cluster.done(RmgrId::XACT, PREPARE, 1003, &prepare(1003, "first"));
    let checkpoint = |cluster: &Cluster| SeenCheckpoint {
        lsn: Lsn(u64::MAX),
        end: Lsn(u64::MAX),
        shutdown: false,
        body: CheckPoint { redo: Lsn(u64::MAX), ..cluster.control.checkpoint_copy },
    };
    let future = |cluster: &Cluster, next| cluster.globals.writes_future_files(&checkpoint(cluster), next);
    assert!(future(&cluster, 7 << 32 | 1003) && !future(&cluster, 7 << 32 | 1004));
    cluster.restartpoint(u64::MAX);
    assert!(!future(&cluster, 7 << 32 | 1003), "has its file");

    cluster.control.checkpoint_copy.next_xid = 7 << 32 | 1004;
    let mut cluster = cluster.reopen();
    assert_eq!(cluster.globals.prepared().count(), 1, "restored from its file");
    cluster.done(RmgrId::XACT, PREPARE, 1003, &prepare(1003, "first"));
    let mut data = vec![0; 8];
    data.extend(bytes(&[1 << 4, 1003]));
    cluster.done(RmgrId::XACT, COMMIT_PREPARED | HAS_INFO, 0, &data);
    assert_eq!(cluster.status(1003), Some(XidStatus::Committed));
    assert_eq!(cluster.twophase_files().len(), 1, "until the restartpoint");
    cluster.globals.flush().unwrap();

    // Its commit reached pg_xact, and then we crashed.
    let mut cluster = cluster.reopen();
    assert_eq!(cluster.globals.prepared().count(), 0);
    cluster.restartpoint(u64::MAX);
    assert_eq!(cluster.twophase_files(), [""; 0]);
}

#[test]
fn checkpoints_and_timelines() {
    let mut cluster = Cluster::new();
    let mut body = control().checkpoint_copy;
    body.next_xid = NEXT_XID - 500;
    cluster.lsn = 0x4000;
    let actions = cluster.redo(RmgrId::XLOG, 0x10, 0, &body.to_bytes()).unwrap();
    let seen = SeenCheckpoint { lsn: Lsn(0x4100), end: Lsn(0x4200), shutdown: false, body };
    assert_eq!(actions, [Action::Checkpoint(seen)]);
    assert_eq!(cluster.globals.next_xid().0, NEXT_XID, "an online checkpoint only moves it forward");
    body.timeline = TimelineId(2);
    assert!(matches!(cluster.redo(RmgrId::XLOG, 0x10, 0, &body.to_bytes()), Err(GlobalError::Timeline { .. })));
    let actions = cluster.redo(RmgrId::XLOG, 0x00, 0, &body.to_bytes()).unwrap();
    let (from, to) = (TimelineId(1), TimelineId(2));
    assert_eq!(actions[0], Action::SwitchTimeline { from, to, previous: from });
    assert_eq!(cluster.globals.next_xid().0, NEXT_XID - 500, "a shutdown checkpoint is believed");
    assert_eq!(cluster.globals.latest_checkpoint().unwrap().body.timeline, to);
    let mut end_of_recovery = vec![0; 8];
    end_of_recovery.extend(bytes(&[3, 2, 1, 0]));
    let actions = cluster.redo(RmgrId::XLOG, 0x90, 0, &end_of_recovery).unwrap();
    assert_eq!(actions, [Action::SwitchTimeline { from: to, to: TimelineId(3), previous: to }]);
}

#[test]
fn the_end_of_a_backup() {
    let mut control = control();
    control.backup_start_point = Lsn(0x1000);
    control.backup_end_required = true;
    let mut cluster = Cluster::with(control);
    cluster.done(RmgrId::XLOG, 0x50, 0, &0x900u64.to_le_bytes());
    assert!(cluster.globals.backup().is_open(), "the end of another backup");
    let shutdown = control_checkpoint();
    assert!(matches!(cluster.redo(RmgrId::XLOG, 0x00, 0, &shutdown), Err(GlobalError::BackupCanceled(Lsn(0x1000)))));
    assert_eq!(cluster.redo(RmgrId::XLOG, 0x50, 0, &0x1000u64.to_le_bytes()).unwrap(), [Action::BackupEnded]);
    assert!(!cluster.globals.backup().is_open());

    let mut control = super::tests::control();
    control.backup_start_point = Lsn(0x1000);
    control.backup_end_point = Lsn(0x3000);
    let mut cluster = Cluster::with(control);
    assert!(!cluster.globals.passed(Lsn(0x2FFF)));
    assert!(cluster.globals.passed(Lsn(0x3000)) && !cluster.globals.backup().is_open());
}

fn control_checkpoint() -> Vec<u8> {
    control().checkpoint_copy.to_bytes().to_vec()
}

#[test]
fn files_and_directories_are_handed_back() {
    let mut cluster = Cluster::new();
    let rel = RelFileLocator { tablespace: 1663, database: 5, relation: 16_384 };
    let create = bytes(&[1663, 5, 16_384, 3]);
    assert_eq!(
        cluster.redo(RmgrId::SMGR, 0x10, 0, &create).unwrap(),
        [Action::CreateFork { rel, fork: ForkNumber::Init }]
    );
    let truncate = bytes(&[10, 1663, 5, 16_384, 7]);
    assert_eq!(
        cluster.redo(RmgrId::SMGR, 0x20, 0, &truncate).unwrap(),
        [Action::TruncateRelation { rel, blocks: 10, flags: 7 }]
    );
    let copied = cluster.redo(RmgrId::DBASE, 0x00, 0, &bytes(&[6, 1663, 1, 1663])).unwrap();
    let dir = |database| DatabaseDir { tablespace: 1663, database };
    assert_eq!(copied, [Action::CopyDatabase { from: dir(1), to: dir(6) }]);
    assert_eq!(cluster.redo(RmgrId::DBASE, 0x10, 0, &bytes(&[7, 1663])).unwrap(), [Action::CreateDatabase(dir(7))]);
    let dropped = cluster.redo(RmgrId::DBASE, 0x20, 0, &bytes(&[6, 2, 1663, 20_000])).unwrap();
    assert_eq!(dropped, [Action::DropDatabase { database: 6, tablespaces: vec![1663, 20_000] }]);
    let global = cluster.redo(RmgrId::DBASE, 0x20, 0, &bytes(&[6, 1, 1664]));
    assert!(matches!(global, Err(GlobalError::CorruptRecord(_))), "it would remove the shared relations");
    let mut create = bytes(&[20_000]);
    create.extend(b"/mnt/fast\0");
    let location = b"/mnt/fast".to_vec();
    let created = cluster.redo(RmgrId::TBLSPC, 0x00, 0, &create).unwrap();
    assert_eq!(created, [Action::CreateTablespace { tablespace: 20_000, location }]);
    assert_eq!(cluster.redo(RmgrId::TBLSPC, 0x10, 0, &bytes(&[20_000])).unwrap(), [Action::DropTablespace(20_000)]);
    let mut update = bytes(&[5, 1663, 524]);
    update.extend([7; 524]);
    let map = vec![7; 524];
    assert_eq!(cluster.redo(RmgrId::RELMAP, 0x00, 0, &update).unwrap(), [Action::UpdateRelmap { dir: dir(5), map }]);
}

#[test]
fn any_bytes_are_a_record_or_an_error() {
    let mut cluster = Cluster::new();
    let mut random = 0x2545_F491_4F6C_DD1Du64;
    let rmgrs = [
        RmgrId::XLOG,
        RmgrId::XACT,
        RmgrId::SMGR,
        RmgrId::CLOG,
        RmgrId::DBASE,
        RmgrId::TBLSPC,
        RmgrId::MULTIXACT,
        RmgrId::RELMAP,
        RmgrId::STANDBY,
        RmgrId::COMMIT_TS,
        RmgrId::REPLORIGIN,
        RmgrId::LOGICALMSG,
        RmgrId::HEAP2,
    ];
    for round in 0..30_000u32 {
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let len = (next() % 120) as usize;
        // Small numbers make sense more often.
        let small = round % 2 == 0;
        let data: Vec<u8> = (0..len).map(|_| if small && next() % 4 != 0 { 0 } else { next() as u8 }).collect();
        let rmgr = rmgrs[round as usize % rmgrs.len()];
        let info = next() as u8 & 0xF0;
        let xid = if small { 1000 + (next() % 50) as u32 } else { next() as u32 };
        let _ = cluster.redo(rmgr, info, xid, &data);
    }
}
