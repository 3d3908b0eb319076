//! The control file `global/pg_control` and the body of checkpoint records (`catalog/pg_control.h`,
//! PostgreSQL 17 and 18).
//!
//! Both are C structs as the compiler laid them out on a little-endian 64-bit machine; the offsets below are
//! those of `offsetof`. The checkpoint is the same in both majors; the control file has a field more in 18, which moves
//! the two behind it.

use crate::bytes::{put_u32, put_u64, u32_at, u64_at};
use crate::wal::SegmentSize;
use crate::{BLCKSZ, Lsn, Major, MultiXactId, Oid, RELSEG_SIZE, TimelineId, TransactionId, XLOG_BLCKSZ};

/// Where a data directory has it (`XLOG_CONTROL_FILE`, `access/xlog_internal.h`).
pub const CONTROL_FILE: &str = "global/pg_control";
/// Size of the file in bytes (`PG_CONTROL_FILE_SIZE`).
pub const CONTROL_FILE_SIZE: usize = 8192;
/// Bytes of it that carry something (`sizeof(ControlFileData)`), the checksum included.
pub const CONTROL_DATA_SIZE: usize = 296;
/// Bytes of a checkpoint record's main data (`sizeof(CheckPoint)`).
pub const CHECKPOINT_SIZE: usize = 88;
/// Length of the authentication nonce (`MOCK_AUTH_NONCE_LEN`).
const NONCE_SIZE: usize = 32;

const FLOAT_FORMAT: f64 = 1_234_567.0;
const MAXIMUM_ALIGNOF: u32 = 8;
const NAMEDATALEN: u32 = 64;
const INDEX_MAX_KEYS: u32 = 32;
const TOAST_MAX_CHUNK_SIZE: u32 = 1996;
const LOBLKSIZE: u32 = 2048;

/// State of the cluster (`DBState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DbState {
    /// `DB_STARTUP`.
    Startup = 0,
    /// `DB_SHUTDOWNED`: stopped cleanly as a primary.
    ShutDown = 1,
    /// `DB_SHUTDOWNED_IN_RECOVERY`: stopped cleanly as a standby.
    ShutDownInRecovery = 2,
    /// `DB_SHUTDOWNING`.
    ShuttingDown = 3,
    /// `DB_IN_CRASH_RECOVERY`.
    InCrashRecovery = 4,
    /// `DB_IN_ARCHIVE_RECOVERY`.
    InArchiveRecovery = 5,
    /// `DB_IN_PRODUCTION`.
    InProduction = 6,
}

impl DbState {
    /// The state of this number, if there is one.
    pub fn from_number(number: u32) -> Option<DbState> {
        use DbState::*;
        [Startup, ShutDown, ShutDownInRecovery, ShuttingDown, InCrashRecovery, InArchiveRecovery, InProduction]
            .into_iter()
            .find(|&state| state as u32 == number)
    }

    /// What `pg_controldata` calls it.
    pub fn name(self) -> &'static str {
        match self {
            DbState::Startup => "starting up",
            DbState::ShutDown => "shut down",
            DbState::ShutDownInRecovery => "shut down in recovery",
            DbState::ShuttingDown => "shutting down",
            DbState::InCrashRecovery => "in crash recovery",
            DbState::InArchiveRecovery => "in archive recovery",
            DbState::InProduction => "in production",
        }
    }
}

/// Body of the records `CHECKPOINT_SHUTDOWN` and `CHECKPOINT_ONLINE` (`CheckPoint`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckPoint {
    /// Where redo begins.
    pub redo: Lsn,
    /// `ThisTimeLineID`.
    pub timeline: TimelineId,
    /// `PrevTimeLineID`: differs from `timeline` if the record begins a new one.
    pub previous_timeline: TimelineId,
    /// `fullPageWrites`.
    pub full_page_writes: bool,
    /// `wal_level`: 0 minimal, 1 replica, 2 logical.
    pub wal_level: u32,
    /// `nextXid`: epoch and transaction id.
    pub next_xid: u64,
    /// `nextOid`.
    pub next_oid: Oid,
    /// `nextMulti`.
    pub next_multi: MultiXactId,
    /// `nextMultiOffset`.
    pub next_multi_offset: u32,
    /// `oldestXid`: smallest `datfrozenxid`.
    pub oldest_xid: TransactionId,
    /// `oldestXidDB`: the database that has it.
    pub oldest_xid_db: Oid,
    /// `oldestMulti`: smallest `datminmxid`.
    pub oldest_multi: MultiXactId,
    /// `oldestMultiDB`: the database that has it.
    pub oldest_multi_db: Oid,
    /// `time`: seconds since 1970.
    pub time: i64,
    /// `oldestCommitTsXid`.
    pub oldest_commit_ts_xid: TransactionId,
    /// `newestCommitTsXid`.
    pub newest_commit_ts_xid: TransactionId,
    /// `oldestActiveXid`: 0 except in online checkpoints.
    pub oldest_active_xid: TransactionId,
    /// The bytes between the fields. PostgreSQL copies the struct whole, so they travel from the record into
    /// `pg_control`; kept, so that ours is the same file.
    pub padding: [u8; 11],
}

impl CheckPoint {
    /// Reads the main data of a checkpoint record; `None` if it does not have the size of one.
    pub fn parse(bytes: &[u8]) -> Option<CheckPoint> {
        let bytes: &[u8; CHECKPOINT_SIZE] = bytes.try_into().ok()?;
        let mut padding = [0; 11];
        padding[..3].copy_from_slice(&bytes[17..20]);
        padding[3..7].copy_from_slice(&bytes[60..64]);
        padding[7..].copy_from_slice(&bytes[84..]);
        Some(CheckPoint {
            redo: Lsn(u64_at(bytes, 0)),
            timeline: TimelineId(u32_at(bytes, 8)),
            previous_timeline: TimelineId(u32_at(bytes, 12)),
            full_page_writes: bytes[16] != 0,
            wal_level: u32_at(bytes, 20),
            next_xid: u64_at(bytes, 24),
            next_oid: u32_at(bytes, 32),
            next_multi: u32_at(bytes, 36),
            next_multi_offset: u32_at(bytes, 40),
            oldest_xid: u32_at(bytes, 44),
            oldest_xid_db: u32_at(bytes, 48),
            oldest_multi: u32_at(bytes, 52),
            oldest_multi_db: u32_at(bytes, 56),
            time: u64_at(bytes, 64) as i64,
            oldest_commit_ts_xid: u32_at(bytes, 72),
            newest_commit_ts_xid: u32_at(bytes, 76),
            oldest_active_xid: u32_at(bytes, 80),
            padding,
        })
    }

    /// The struct as it stands in the record and in `pg_control`.
    pub fn to_bytes(&self) -> [u8; CHECKPOINT_SIZE] {
        let mut bytes = [0; CHECKPOINT_SIZE];
        put_u64(&mut bytes, 0, self.redo.0);
        put_u32(&mut bytes, 8, self.timeline.0);
        put_u32(&mut bytes, 12, self.previous_timeline.0);
        bytes[16] = u8::from(self.full_page_writes);
        bytes[17..20].copy_from_slice(&self.padding[..3]);
        put_u32(&mut bytes, 20, self.wal_level);
        put_u64(&mut bytes, 24, self.next_xid);
        put_u32(&mut bytes, 32, self.next_oid);
        put_u32(&mut bytes, 36, self.next_multi);
        put_u32(&mut bytes, 40, self.next_multi_offset);
        put_u32(&mut bytes, 44, self.oldest_xid);
        put_u32(&mut bytes, 48, self.oldest_xid_db);
        put_u32(&mut bytes, 52, self.oldest_multi);
        put_u32(&mut bytes, 56, self.oldest_multi_db);
        bytes[60..64].copy_from_slice(&self.padding[3..7]);
        put_u64(&mut bytes, 64, self.time as u64);
        put_u32(&mut bytes, 72, self.oldest_commit_ts_xid);
        put_u32(&mut bytes, 76, self.newest_commit_ts_xid);
        put_u32(&mut bytes, 80, self.oldest_active_xid);
        bytes[84..].copy_from_slice(&self.padding[7..]);
        bytes
    }
}

/// The control file (`ControlFileData`). What every supported server must agree on (alignment, page sizes, …)
/// has no field: [`ControlFile::parse`] has checked it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlFile {
    /// From `pg_control_version`.
    pub major: Major,
    /// `system_identifier`: binds WAL to the cluster.
    pub system_identifier: u64,
    /// `catalog_version_no`.
    pub catalog_version: u32,
    /// `state`.
    pub state: DbState,
    /// `time`: when the file was written, in seconds since 1970.
    pub time: i64,
    /// `checkPoint`: position of the newest checkpoint record.
    pub checkpoint: Lsn,
    /// `checkPointCopy`: its body.
    pub checkpoint_copy: CheckPoint,
    /// `unloggedLSN`.
    pub unlogged_lsn: Lsn,
    /// `minRecoveryPoint`: recovery must get at least here; zero outside archive recovery.
    pub min_recovery_point: Lsn,
    /// `minRecoveryPointTLI`.
    pub min_recovery_point_timeline: TimelineId,
    /// `backupStartPoint`: redo position of the backup's checkpoint until the end of the backup is passed.
    pub backup_start_point: Lsn,
    /// `backupEndPoint`: end of a backup that was taken from a standby.
    pub backup_end_point: Lsn,
    /// `backupEndRequired`: a BACKUP_END record must be passed before starting up.
    pub backup_end_required: bool,
    /// `wal_level`: 0 minimal, 1 replica, 2 logical.
    pub wal_level: u32,
    /// `wal_log_hints`.
    pub wal_log_hints: bool,
    /// `MaxConnections`.
    pub max_connections: u32,
    /// `max_worker_processes`.
    pub max_worker_processes: u32,
    /// `max_wal_senders`.
    pub max_wal_senders: u32,
    /// `max_prepared_xacts`.
    pub max_prepared_xacts: u32,
    /// `max_locks_per_xact`.
    pub max_locks_per_xact: u32,
    /// `track_commit_timestamp`.
    pub track_commit_timestamp: bool,
    /// `xlog_seg_size`.
    pub segment_size: SegmentSize,
    /// `data_checksum_version`: 0 if pages carry no checksums.
    pub data_checksum_version: u32,
    /// `default_char_signedness`; since 18.
    pub default_char_signedness: Option<bool>,
    /// `mock_authentication_nonce`.
    pub mock_authentication_nonce: [u8; NONCE_SIZE],
}

/// Why a control file was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// Not even the struct fits.
    #[error(
        "pg_control is {found_bytes} bytes long, expected {CONTROL_FILE_SIZE}: it is damaged; take it from the \
         backup again"
    )]
    TooShort {
        /// Bytes that are there.
        found_bytes: usize,
    },
    /// Another major, or not a control file.
    #[error(
        "pg_control has version {found}, which is not that of PostgreSQL {supported}: use a Walrider that supports the \
         server that made this directory",
        supported = Major::SUPPORTED
    )]
    Version {
        /// What stands there.
        found: u32,
    },
    /// Made on a big-endian machine.
    #[error("pg_control was written with the other byte order: only directories of little-endian machines work")]
    ByteOrder,
    /// The checksum does not match.
    #[error(
        "pg_control has checksum {stored:08X}, but its contents give {computed:08X}: it is damaged; take it from \
         the backup again"
    )]
    Checksum {
        /// In the file.
        stored: u32,
        /// From the contents.
        computed: u32,
    },
    /// A build option of the server that we do not support.
    #[error(
        "the directory was made with {what} = {found}, but only {expected} is supported: such a server must be \
         replayed by itself"
    )]
    Incompatible {
        /// PostgreSQL's name for it.
        what: &'static str,
        /// In the file.
        found: u32,
        /// Supported.
        expected: u32,
    },
    /// Numbers are stored in another floating-point format.
    #[error("the directory was made on a machine with another floating-point format: replay it on such a machine")]
    FloatFormat,
    /// Not a size that a server could have written.
    #[error("pg_control has WAL segments of {found} bytes, expected a power of two from 1 MB to 1 GB")]
    SegmentSize {
        /// What stands there.
        found: u32,
    },
    /// No state of this number.
    #[error("pg_control has the unknown cluster state {found}")]
    State {
        /// What stands there.
        found: u32,
    },
}

impl ControlFile {
    /// Reads the file and checks, in PostgreSQL's order (`ReadControlFile`, `xlog.c`), that it is one, whole, and of
    /// a build that we support.
    pub fn parse(bytes: &[u8]) -> Result<ControlFile, ControlError> {
        let Some(data) = bytes.first_chunk::<CONTROL_DATA_SIZE>() else {
            return Err(ControlError::TooShort { found_bytes: bytes.len() });
        };
        let version = u32_at(data, 8);
        let Some(major) = Major::from_control_version(version) else {
            let swapped = Major::from_control_version(version.swap_bytes()).is_some();
            return Err(if swapped { ControlError::ByteOrder } else { ControlError::Version { found: version } });
        };
        let tail = Tail::of(major);
        let (stored, computed) = (u32_at(data, tail.crc), crc_fast::crc32_iscsi(&data[..tail.crc]));
        if stored != computed {
            return Err(ControlError::Checksum { stored, computed });
        }
        if f64::from_bits(u64_at(data, 208)) != FLOAT_FORMAT {
            return Err(ControlError::FloatFormat);
        }
        for (what, found, expected) in build_options(data) {
            if found != expected {
                return Err(ControlError::Incompatible { what, found, expected });
            }
        }
        let segment_size =
            SegmentSize::new(u32_at(data, 228)).ok_or(ControlError::SegmentSize { found: u32_at(data, 228) })?;
        let state = DbState::from_number(u32_at(data, 16)).ok_or(ControlError::State { found: u32_at(data, 16) })?;
        let mut mock_authentication_nonce = [0; NONCE_SIZE];
        mock_authentication_nonce.copy_from_slice(&data[tail.nonce..tail.nonce + NONCE_SIZE]);
        Ok(ControlFile {
            major,
            system_identifier: u64_at(data, 0),
            catalog_version: u32_at(data, 12),
            state,
            time: u64_at(data, 24) as i64,
            checkpoint: Lsn(u64_at(data, 32)),
            checkpoint_copy: CheckPoint::parse(&data[40..128]).expect("88 bytes"),
            unlogged_lsn: Lsn(u64_at(data, 128)),
            min_recovery_point: Lsn(u64_at(data, 136)),
            min_recovery_point_timeline: TimelineId(u32_at(data, 144)),
            backup_start_point: Lsn(u64_at(data, 152)),
            backup_end_point: Lsn(u64_at(data, 160)),
            backup_end_required: data[168] != 0,
            wal_level: u32_at(data, 172),
            wal_log_hints: data[176] != 0,
            max_connections: u32_at(data, 180),
            max_worker_processes: u32_at(data, 184),
            max_wal_senders: u32_at(data, 188),
            max_prepared_xacts: u32_at(data, 192),
            max_locks_per_xact: u32_at(data, 196),
            track_commit_timestamp: data[200] != 0,
            segment_size,
            data_checksum_version: u32_at(data, 252),
            default_char_signedness: tail.char_signedness.map(|at| data[at] != 0),
            mock_authentication_nonce,
        })
    }

    /// The whole file, checksum included.
    pub fn to_bytes(&self) -> [u8; CONTROL_FILE_SIZE] {
        let mut file = [0; CONTROL_FILE_SIZE];
        put_u64(&mut file, 0, self.system_identifier);
        put_u32(&mut file, 8, self.major.control_version());
        put_u32(&mut file, 12, self.catalog_version);
        put_u32(&mut file, 16, self.state as u32);
        put_u64(&mut file, 24, self.time as u64);
        put_u64(&mut file, 32, self.checkpoint.0);
        file[40..128].copy_from_slice(&self.checkpoint_copy.to_bytes());
        put_u64(&mut file, 128, self.unlogged_lsn.0);
        put_u64(&mut file, 136, self.min_recovery_point.0);
        put_u32(&mut file, 144, self.min_recovery_point_timeline.0);
        put_u64(&mut file, 152, self.backup_start_point.0);
        put_u64(&mut file, 160, self.backup_end_point.0);
        file[168] = u8::from(self.backup_end_required);
        put_u32(&mut file, 172, self.wal_level);
        file[176] = u8::from(self.wal_log_hints);
        put_u32(&mut file, 180, self.max_connections);
        put_u32(&mut file, 184, self.max_worker_processes);
        put_u32(&mut file, 188, self.max_wal_senders);
        put_u32(&mut file, 192, self.max_prepared_xacts);
        put_u32(&mut file, 196, self.max_locks_per_xact);
        file[200] = u8::from(self.track_commit_timestamp);
        put_u32(&mut file, 204, MAXIMUM_ALIGNOF);
        put_u64(&mut file, 208, FLOAT_FORMAT.to_bits());
        put_u32(&mut file, 216, BLCKSZ as u32);
        put_u32(&mut file, 220, RELSEG_SIZE);
        put_u32(&mut file, 224, XLOG_BLCKSZ as u32);
        put_u32(&mut file, 228, self.segment_size.bytes() as u32);
        put_u32(&mut file, 232, NAMEDATALEN);
        put_u32(&mut file, 236, INDEX_MAX_KEYS);
        put_u32(&mut file, 240, TOAST_MAX_CHUNK_SIZE);
        put_u32(&mut file, 244, LOBLKSIZE);
        file[248] = 1;
        put_u32(&mut file, 252, self.data_checksum_version);
        let tail = Tail::of(self.major);
        if let (Some(at), Some(signed)) = (tail.char_signedness, self.default_char_signedness) {
            file[at] = u8::from(signed);
        }
        file[tail.nonce..tail.nonce + NONCE_SIZE].copy_from_slice(&self.mock_authentication_nonce);
        let crc = crc_fast::crc32_iscsi(&file[..tail.crc]);
        put_u32(&mut file, tail.crc, crc);
        file
    }

    /// Whether pages of this cluster carry checksums (`DataChecksumsEnabled`).
    pub fn data_checksums(&self) -> bool {
        self.data_checksum_version > 0
    }
}

/// Where the fields behind `data_checksum_version` are: the first to differ between majors.
struct Tail {
    char_signedness: Option<usize>,
    nonce: usize,
    crc: usize,
}

impl Tail {
    fn of(major: Major) -> Tail {
        if major.format().control_has_char_signedness {
            Tail { char_signedness: Some(256), nonce: 257, crc: 292 }
        } else {
            Tail { char_signedness: None, nonce: 256, crc: 288 }
        }
    }
}

/// The options that a server is built with: name, value in the file, value that we support.
fn build_options(data: &[u8; CONTROL_DATA_SIZE]) -> [(&'static str, u32, u32); 9] {
    [
        ("MAXALIGN", u32_at(data, 204), MAXIMUM_ALIGNOF),
        ("BLCKSZ", u32_at(data, 216), BLCKSZ as u32),
        ("RELSEG_SIZE", u32_at(data, 220), RELSEG_SIZE),
        ("XLOG_BLCKSZ", u32_at(data, 224), XLOG_BLCKSZ as u32),
        ("NAMEDATALEN", u32_at(data, 232), NAMEDATALEN),
        ("INDEX_MAX_KEYS", u32_at(data, 236), INDEX_MAX_KEYS),
        ("TOAST_MAX_CHUNK_SIZE", u32_at(data, 240), TOAST_MAX_CHUNK_SIZE),
        ("LOBLKSIZE", u32_at(data, 244), LOBLKSIZE),
        ("USE_FLOAT8_BYVAL", u32::from(data[248]), 1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(major: Major) -> ControlFile {
        let body: Vec<u8> = (0..CHECKPOINT_SIZE as u8).map(|at| if at == 16 { 1 } else { at }).collect();
        ControlFile {
            major,
            system_identifier: 0x6900_0000_0000_0001,
            catalog_version: major.catalog_version(),
            state: DbState::ShutDownInRecovery,
            time: 1_700_000_000,
            checkpoint: Lsn(0x1_0000_0028),
            checkpoint_copy: CheckPoint::parse(&body).unwrap(),
            unlogged_lsn: Lsn(1000),
            min_recovery_point: Lsn(0x1_0000_0100),
            min_recovery_point_timeline: TimelineId(3),
            backup_start_point: Lsn(7),
            backup_end_point: Lsn(8),
            backup_end_required: true,
            wal_level: 1,
            wal_log_hints: true,
            max_connections: 100,
            max_worker_processes: 8,
            max_wal_senders: 10,
            max_prepared_xacts: 5,
            max_locks_per_xact: 64,
            track_commit_timestamp: true,
            segment_size: SegmentSize::new(1 << 20).unwrap(),
            data_checksum_version: 1,
            default_char_signedness: major.format().control_has_char_signedness.then_some(true),
            mock_authentication_nonce: [9; NONCE_SIZE],
        }
    }

    fn resealed(change: impl FnOnce(&mut [u8; CONTROL_FILE_SIZE])) -> [u8; CONTROL_FILE_SIZE] {
        let mut file = sample(Major::V18).to_bytes();
        change(&mut file);
        let crc = crc_fast::crc32_iscsi(&file[..292]);
        put_u32(&mut file, 292, crc);
        file
    }

    #[test]
    fn a_checkpoint_keeps_every_byte() {
        let body: Vec<u8> = (100..100 + CHECKPOINT_SIZE as u8).map(|at| if at == 116 { 1 } else { at }).collect();
        assert_eq!(CheckPoint::parse(&body).unwrap().to_bytes().as_slice(), body);
        assert_eq!(CheckPoint::parse(&body[1..]), None);
    }

    #[test]
    fn a_control_file_comes_back() {
        for major in Major::ALL {
            assert_eq!(ControlFile::parse(&sample(major).to_bytes()), Ok(sample(major)));
        }
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for major in Major::ALL {
            let file = sample(major).to_bytes();
            for bit in 0..(Tail::of(major).crc + 4) * 8 {
                let mut damaged = file;
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert!(ControlFile::parse(&damaged).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let parse = |change: fn(&mut [u8; CONTROL_FILE_SIZE])| ControlFile::parse(&resealed(change)).unwrap_err();
        assert_eq!(parse(|f| put_u32(f, 8, 1300)), ControlError::Version { found: 1300 });
        assert_eq!(parse(|f| put_u32(f, 8, 1800_u32.swap_bytes())), ControlError::ByteOrder);
        assert_eq!(parse(|f| put_u64(f, 208, 0)), ControlError::FloatFormat);
        assert_eq!(parse(|f| put_u32(f, 228, 3 << 20)), ControlError::SegmentSize { found: 3 << 20 });
        assert_eq!(parse(|f| put_u32(f, 16, 7)), ControlError::State { found: 7 });
        let other_pages = ControlError::Incompatible { what: "BLCKSZ", found: 4096, expected: 8192 };
        assert_eq!(parse(|f| put_u32(f, 216, 4096)), other_pages);
        assert_eq!(ControlFile::parse(&[0; 100]), Err(ControlError::TooShort { found_bytes: 100 }));
    }
}
