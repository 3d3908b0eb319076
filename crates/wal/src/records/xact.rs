//! Records of transactions (`access/xact.h`, `access/rmgrdesc/xactdesc.c`, PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::bytes::{Reader, u32_at, u64_at};
use walrider_layout::{ForkNumber, Lsn, Major, Oid, RelFileLocator, TransactionId};

use super::parts::{Invalidation, Item, Items, RelPath, Timestamp, c_string, describe_invalidations, push_text};
use crate::record::Record;

/// Record type: a transaction commits.
pub const XLOG_XACT_COMMIT: u8 = 0x00;
/// Record type: a transaction is prepared for a later commit.
pub const XLOG_XACT_PREPARE: u8 = 0x10;
/// Record type: a transaction aborts.
pub const XLOG_XACT_ABORT: u8 = 0x20;
/// Record type: a prepared transaction commits.
pub const XLOG_XACT_COMMIT_PREPARED: u8 = 0x30;
/// Record type: a prepared transaction aborts.
pub const XLOG_XACT_ABORT_PREPARED: u8 = 0x40;
/// Record type: which transaction subtransactions belong to.
pub const XLOG_XACT_ASSIGNMENT: u8 = 0x50;
/// Record type: caches are out of date, for logical decoding only.
pub const XLOG_XACT_INVALIDATIONS: u8 = 0x60;

/// The bits of the record type.
pub const XLOG_XACT_OPMASK: u8 = 0x70;
/// `xl_info`: there is an `xinfo`.
pub const XLOG_XACT_HAS_INFO: u8 = 0x80;

const XACT_XINFO_HAS_DBINFO: u32 = 1 << 0;
const XACT_XINFO_HAS_SUBXACTS: u32 = 1 << 1;
const XACT_XINFO_HAS_RELFILELOCATORS: u32 = 1 << 2;
const XACT_XINFO_HAS_INVALS: u32 = 1 << 3;
const XACT_XINFO_HAS_TWOPHASE: u32 = 1 << 4;
const XACT_XINFO_HAS_GID: u32 = 1 << 7;
const XACT_XINFO_HAS_DROPPED_STATS: u32 = 1 << 8;

/// `xinfo`: the transaction came from a replication origin.
pub const XACT_XINFO_HAS_ORIGIN: u32 = 1 << 5;
/// `xinfo`: the transaction held exclusive locks on tables.
pub const XACT_XINFO_HAS_AE_LOCKS: u32 = 1 << 6;
/// `xinfo`: the primary waits until standbys have applied the commit.
pub const XACT_COMPLETION_APPLY_FEEDBACK: u32 = 1 << 29;
/// `xinfo`: `pg_internal.init` is out of date.
pub const XACT_COMPLETION_UPDATE_RELCACHE_FILE: u32 = 1 << 30;
/// `xinfo`: the commit was not to be asynchronous.
pub const XACT_COMPLETION_FORCE_SYNC_COMMIT: u32 = 1 << 31;

/// Statistics that go with what was dropped (`xl_xact_stats_item`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DroppedStats {
    /// `kind` of object (`PgStat_Kind`).
    pub kind: i32,
    /// `dboid`.
    pub database: Oid,
    /// `objid_hi`, `objid_lo`; `objoid` before 18.
    pub object: u64,
}

impl Item for DroppedStats {
    const SIZE: usize = 16;

    fn read(bytes: &[u8]) -> DroppedStats {
        let object = if bytes.len() < Self::SIZE { u32_at(bytes, 8).into() } else { u64_at(bytes, 8) };
        DroppedStats { kind: u32_at(bytes, 0) as i32, database: u32_at(bytes, 4), object }
    }
}

impl DroppedStats {
    fn take<'a>(reader: &mut Reader<'a>, count: i32, major: Major) -> Option<Items<'a, DroppedStats>> {
        Items::take_sized(reader, count, major.format().stats_item_size)
    }
}

/// Where a transaction came from (`xl_xact_origin`). Which origin that is, the record's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// `origin_lsn`: end of its commit, there.
    pub lsn: Lsn,
    /// `origin_timestamp`: when it committed there, in microseconds since 2000-01-01 UTC.
    pub time: i64,
}

/// A prepared transaction that is now ended (`xl_xact_twophase`, and its GID).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoPhase<'a> {
    /// The transaction. The record's own header has none.
    pub xid: TransactionId,
    /// Its name, without the zero; empty if the record does not state it (below `wal_level = logical`).
    pub gid: &'a [u8],
}

/// The data of [`XLOG_XACT_COMMIT`] and [`XLOG_XACT_COMMIT_PREPARED`] (`xl_xact_commit` and what follows it;
/// `ParseCommitRecord`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit<'a> {
    /// `xact_time`: in microseconds since 2000-01-01 UTC.
    pub time: i64,
    /// Flags `XACT_XINFO_…` and `XACT_COMPLETION_…`.
    pub xinfo: u32,
    /// `dbId`, 0 if not stated.
    pub database: Oid,
    /// `tsId`: the database's tablespace, 0 if not stated.
    pub tablespace: Oid,
    /// Subtransactions that commit with it.
    pub subxacts: Items<'a, TransactionId>,
    /// Relations that are dropped.
    pub dropped_rels: Items<'a, RelFileLocator>,
    /// Statistics that are dropped.
    pub dropped_stats: Items<'a, DroppedStats>,
    /// Caches that are out of date; none in an abort.
    pub invalidations: Items<'a, Invalidation>,
    /// The prepared transaction that this ends.
    pub twophase: Option<TwoPhase<'a>>,
    /// Where the transaction came from.
    pub origin: Option<Origin>,
}

/// The data of [`XLOG_XACT_ABORT`] and [`XLOG_XACT_ABORT_PREPARED`] (`xl_xact_abort` and what follows it;
/// `ParseAbortRecord`): as a commit's, without invalidations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort<'a>(Commit<'a>);

impl<'a> std::ops::Deref for Abort<'a> {
    type Target = Commit<'a>;

    fn deref(&self) -> &Commit<'a> {
        &self.0
    }
}

impl<'a> Commit<'a> {
    /// Reads the main data of a record with this `xl_info`; `None` if it is too short.
    pub fn parse(major: Major, info: u8, main_data: &'a [u8]) -> Option<Commit<'a>> {
        Commit::parse_parts(major, info, main_data, XACT_XINFO_HAS_INVALS)
    }

    /// `pg_internal.init` is out of date (`XactCompletionRelcacheInitFileInval`).
    pub fn relcache_init_file(&self) -> bool {
        self.xinfo & XACT_COMPLETION_UPDATE_RELCACHE_FILE != 0
    }

    #[inline]
    fn parse_parts(major: Major, info: u8, main_data: &'a [u8], invals: u32) -> Option<Commit<'a>> {
        let mut reader = Reader::new(main_data);
        let mut parsed = Commit {
            time: reader.i64()?,
            xinfo: 0,
            database: 0,
            tablespace: 0,
            subxacts: Items::default(),
            dropped_rels: Items::default(),
            dropped_stats: Items::default(),
            invalidations: Items::default(),
            twophase: None,
            origin: None,
        };
        if info & XLOG_XACT_HAS_INFO == 0 {
            return Some(parsed);
        }
        let xinfo = reader.u32()?;
        parsed.xinfo = xinfo;
        if xinfo & XACT_XINFO_HAS_DBINFO != 0 {
            parsed.database = reader.u32()?;
            parsed.tablespace = reader.u32()?;
        }
        if xinfo & XACT_XINFO_HAS_SUBXACTS != 0 {
            parsed.subxacts = counted(&mut reader)?;
        }
        if xinfo & XACT_XINFO_HAS_RELFILELOCATORS != 0 {
            parsed.dropped_rels = counted(&mut reader)?;
        }
        if xinfo & XACT_XINFO_HAS_DROPPED_STATS != 0 {
            let count = reader.i32()?;
            parsed.dropped_stats = DroppedStats::take(&mut reader, count, major)?;
        }
        if xinfo & invals != 0 {
            parsed.invalidations = counted(&mut reader)?;
        }
        if xinfo & XACT_XINFO_HAS_TWOPHASE != 0 {
            let xid = reader.u32()?;
            let mut gid: &[u8] = &[];
            if xinfo & XACT_XINFO_HAS_GID != 0 {
                gid = c_string(reader.rest())?;
                reader.take(gid.len() + 1)?;
            }
            parsed.twophase = Some(TwoPhase { xid, gid });
        }
        if xinfo & XACT_XINFO_HAS_ORIGIN != 0 {
            parsed.origin = Some(Origin { lsn: Lsn(reader.u64()?), time: reader.i64()? });
        }
        Some(parsed)
    }
}

impl<'a> Abort<'a> {
    /// Reads the main data of a record with this `xl_info`; `None` if it is too short.
    pub fn parse(major: Major, info: u8, main_data: &'a [u8]) -> Option<Abort<'a>> {
        Commit::parse_parts(major, info, main_data, 0).map(Abort)
    }
}

/// An array behind its number of elements.
fn counted<'a, T: Item>(reader: &mut Reader<'a>) -> Option<Items<'a, T>> {
    let count = reader.i32()?;
    Items::take(reader, count)
}

/// The transaction that a record of this resource manager ends, and when, in microseconds since 2000-01-01 UTC; `None`
/// if it ends none (`recoveryStopsBefore`, `access/transam/xlogrecovery.c`).
pub fn transaction_end(record: &Record<'_>) -> Option<(TransactionId, i64)> {
    let (major, info) = (record.major, record.header.info);
    let end = match info & XLOG_XACT_OPMASK {
        XLOG_XACT_COMMIT | XLOG_XACT_COMMIT_PREPARED => Commit::parse(major, info, record.main_data)?,
        XLOG_XACT_ABORT | XLOG_XACT_ABORT_PREPARED => *Abort::parse(major, info, record.main_data)?,
        _ => return None,
    };
    let xid = match info & XLOG_XACT_OPMASK {
        XLOG_XACT_COMMIT | XLOG_XACT_ABORT => record.xid(),
        _ => end.twophase.map_or(0, |twophase| twophase.xid),
    };
    Some((xid, end.time))
}

/// When the transaction was committed whose commit a record is, prepared ones included.
pub fn commit_time(record: &Record<'_>) -> Option<i64> {
    let is_commit = matches!(record.header.info & XLOG_XACT_OPMASK, XLOG_XACT_COMMIT | XLOG_XACT_COMMIT_PREPARED);
    if is_commit { transaction_end(record).map(|(_, time)| time) } else { None }
}

/// `magic` in the data of [`XLOG_XACT_PREPARE`] (`TWOPHASE_MAGIC`, `access/transam/twophase.c`).
pub const TWOPHASE_MAGIC: u32 = 0x57F9_4534;

/// The data of [`XLOG_XACT_PREPARE`] (`xl_xact_prepare` and what follows it; `ParsePrepareRecord`). With a checksum
/// behind it, it is also the contents of the file in `pg_twophase`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepare<'a> {
    /// `magic`: [`TWOPHASE_MAGIC`].
    pub magic: u32,
    /// `total_len`: length of the file, its checksum included.
    pub total_len: u32,
    /// `xid`: the transaction.
    pub xid: TransactionId,
    /// `database` it was in.
    pub database: Oid,
    /// `prepared_at`: in microseconds since 2000-01-01 UTC.
    pub prepared_at: i64,
    /// `owner`: the user.
    pub owner: Oid,
    /// `initfileinval`: its commit puts `pg_internal.init` out of date.
    pub relcache_init_file: bool,
    /// `origin_lsn`: end of the record at its origin.
    pub origin_lsn: Lsn,
    /// `origin_timestamp`: when it was prepared at its origin.
    pub origin_time: i64,
    /// Its name, without the zero.
    pub gid: &'a [u8],
    /// Its subtransactions.
    pub subxacts: Items<'a, TransactionId>,
    /// Relations that its commit drops.
    pub commit_rels: Items<'a, RelFileLocator>,
    /// Relations that its abort drops.
    pub abort_rels: Items<'a, RelFileLocator>,
    /// Statistics that its commit drops.
    pub commit_stats: Items<'a, DroppedStats>,
    /// Statistics that its abort drops.
    pub abort_stats: Items<'a, DroppedStats>,
    /// Caches that its commit puts out of date.
    pub invalidations: Items<'a, Invalidation>,
    /// What is left: records of locks and the like, with an end mark.
    pub rest: &'a [u8],
}

impl<'a> Prepare<'a> {
    /// Reads the main data of a record, or the contents of a file; `None` if it is too short.
    pub fn parse(major: Major, main_data: &'a [u8]) -> Option<Prepare<'a>> {
        let mut reader = Reader::new(main_data);
        let (magic, total_len, xid, database) = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?);
        let (prepared_at, owner) = (reader.i64()?, reader.u32()?);
        let subxacts = reader.i32()?;
        let (commit_rels, abort_rels) = (reader.i32()?, reader.i32()?);
        let (commit_stats, abort_stats) = (reader.i32()?, reader.i32()?);
        let invalidations = reader.i32()?;
        let relcache_init_file = reader.bool()?;
        reader.take(1)?;
        let gid_len = usize::from(reader.u16()?);
        let (origin_lsn, origin_time) = (Lsn(reader.u64()?), reader.i64()?);
        let gid = reader.take(gid_len.next_multiple_of(8))?;
        Some(Prepare {
            magic,
            total_len,
            xid,
            database,
            prepared_at,
            owner,
            relcache_init_file,
            origin_lsn,
            origin_time,
            gid: c_string(&gid[..gid_len])?,
            subxacts: Items::take_aligned(&mut reader, subxacts)?,
            commit_rels: Items::take_aligned(&mut reader, commit_rels)?,
            abort_rels: Items::take_aligned(&mut reader, abort_rels)?,
            commit_stats: DroppedStats::take(&mut reader, commit_stats, major)?.aligned(&mut reader)?,
            abort_stats: DroppedStats::take(&mut reader, abort_stats, major)?.aligned(&mut reader)?,
            invalidations: Items::take_aligned(&mut reader, invalidations)?,
            rest: reader.rest(),
        })
    }
}

/// The data of [`XLOG_XACT_ASSIGNMENT`] (`xl_xact_assignment`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment<'a> {
    /// `xtop`: the transaction.
    pub toplevel_xid: TransactionId,
    /// `xsub`: subtransactions of it.
    pub subxacts: Items<'a, TransactionId>,
}

impl<'a> Assignment<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<Assignment<'a>> {
        let mut reader = Reader::new(main_data);
        Some(Assignment { toplevel_xid: reader.u32()?, subxacts: counted(&mut reader)? })
    }
}

/// Reads the main data of [`XLOG_XACT_INVALIDATIONS`] (`xl_xact_invals`); `None` if it is too short.
pub fn parse_invalidations(main_data: &[u8]) -> Option<Items<'_, Invalidation>> {
    counted(&mut Reader::new(main_data))
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & XLOG_XACT_OPMASK {
        XLOG_XACT_COMMIT => Some("COMMIT"),
        XLOG_XACT_PREPARE => Some("PREPARE"),
        XLOG_XACT_ABORT => Some("ABORT"),
        XLOG_XACT_COMMIT_PREPARED => Some("COMMIT_PREPARED"),
        XLOG_XACT_ABORT_PREPARED => Some("ABORT_PREPARED"),
        XLOG_XACT_ASSIGNMENT => Some("ASSIGNMENT"),
        XLOG_XACT_INVALIDATIONS => Some("INVALIDATION"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    let (major, info, data) = (record.major, record.header.info, record.main_data);
    match info & XLOG_XACT_OPMASK {
        XLOG_XACT_COMMIT | XLOG_XACT_COMMIT_PREPARED => {
            if let Some(commit) = Commit::parse(major, info, data) {
                describe_commit(&commit, record, out);
            }
        }
        XLOG_XACT_ABORT | XLOG_XACT_ABORT_PREPARED => {
            if let Some(abort) = Abort::parse(major, info, data) {
                describe_front(&abort, major, out);
                describe_origin(abort.origin, record.origin, out);
                describe_stats("", &abort.dropped_stats, out);
            }
        }
        XLOG_XACT_PREPARE => {
            if let Some(prepare) = Prepare::parse(major, data) {
                describe_prepare(&prepare, record, out);
            }
        }
        XLOG_XACT_ASSIGNMENT => {
            if let Some(Assignment { toplevel_xid, subxacts }) = Assignment::parse(data) {
                let _ = write!(out, "xtop {toplevel_xid}: subxacts:");
                describe_xids(&subxacts, out);
            }
        }
        XLOG_XACT_INVALIDATIONS => {
            describe_invalidations(&parse_invalidations(data).unwrap_or_default(), 0, 0, false, out);
        }
        _ => {}
    }
}

/// What commits and aborts begin with.
fn describe_front(end: &Commit<'_>, major: Major, out: &mut String) {
    if let Some(TwoPhase { xid: xid @ 1.., .. }) = end.twophase {
        let _ = write!(out, "{xid}: ");
    }
    let _ = write!(out, "{}", Timestamp(end.time));
    describe_rels("rels", &end.dropped_rels, major, out);
    describe_subxacts(&end.subxacts, out);
}

fn describe_commit(commit: &Commit<'_>, record: &Record<'_>, out: &mut String) {
    describe_front(commit, record.major, out);
    describe_stats("", &commit.dropped_stats, out);
    let Commit { database, tablespace, invalidations, .. } = commit;
    describe_invalidations(invalidations, *database, *tablespace, commit.relcache_init_file(), out);
    if commit.xinfo & XACT_COMPLETION_APPLY_FEEDBACK != 0 {
        out.push_str("; apply_feedback");
    }
    if commit.xinfo & XACT_COMPLETION_FORCE_SYNC_COMMIT != 0 {
        out.push_str("; sync");
    }
    describe_origin(commit.origin, record.origin, out);
}

fn describe_prepare(prepare: &Prepare<'_>, record: &Record<'_>, out: &mut String) {
    out.push_str("gid ");
    push_text(prepare.gid, out);
    let _ = write!(out, ": {}", Timestamp(prepare.prepared_at));
    describe_rels("rels(commit)", &prepare.commit_rels, record.major, out);
    describe_rels("rels(abort)", &prepare.abort_rels, record.major, out);
    describe_stats("commit ", &prepare.commit_stats, out);
    describe_stats("abort ", &prepare.abort_stats, out);
    describe_subxacts(&prepare.subxacts, out);
    // The record does not say the tablespace; pg_waldump writes 0.
    describe_invalidations(&prepare.invalidations, prepare.database, 0, prepare.relcache_init_file, out);
    let from = Origin { lsn: prepare.origin_lsn, time: prepare.origin_time };
    describe_origin((record.origin != 0).then_some(from), record.origin, out);
}

fn describe_rels(label: &str, rels: &Items<'_, RelFileLocator>, major: Major, out: &mut String) {
    if !rels.is_empty() {
        let _ = write!(out, "; {label}:");
        for rel in rels.iter() {
            let _ = write!(out, " {}", RelPath(rel, ForkNumber::Main, major));
        }
    }
}

fn describe_subxacts(subxacts: &Items<'_, TransactionId>, out: &mut String) {
    if !subxacts.is_empty() {
        out.push_str("; subxacts:");
        describe_xids(subxacts, out);
    }
}

fn describe_xids(xids: &Items<'_, TransactionId>, out: &mut String) {
    for xid in xids.iter() {
        let _ = write!(out, " {xid}");
    }
}

fn describe_stats(label: &str, stats: &Items<'_, DroppedStats>, out: &mut String) {
    if !stats.is_empty() {
        let _ = write!(out, "; {label}dropped stats:");
        for DroppedStats { kind, database, object } in stats.iter() {
            let _ = write!(out, " {kind}/{database}/{object}");
        }
    }
}

fn describe_origin(from: Option<Origin>, origin: u16, out: &mut String) {
    if let Some(Origin { lsn, time }) = from {
        let _ = write!(out, "; origin: node {origin}, lsn {lsn}, at {}", Timestamp(time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, described_from, words};
    use crate::rmgr::RmgrId;
    use crate::testing::RecordBuilder;

    const NOON: [u32; 2] = [43_200_000_000_u64 as u32, (43_200_000_000_u64 >> 32) as u32];

    fn full_commit() -> Vec<u8> {
        let flags = 0x1FF & !XACT_XINFO_HAS_AE_LOCKS | XACT_COMPLETION_UPDATE_RELCACHE_FILE | 1 << 31;
        let mut data = words(NOON);
        data.extend(words([flags, 5, 1663, 2, 741, 742, 1, 1663, 5, 16384, 1, 2, 5, 16384, 1]));
        data.extend(words([1, 0xFE, 5, 1259, 0, 739]));
        data.extend(b"name\0");
        data.extend(words([0x28, 1, 0, 0]));
        data
    }

    #[test]
    fn a_commit_with_every_part_is_read() {
        let data = full_commit();
        let commit = Commit::parse(Major::V18, XLOG_XACT_COMMIT_PREPARED | XLOG_XACT_HAS_INFO, &data).unwrap();
        assert_eq!((commit.time, commit.database, commit.tablespace), (43_200_000_000, 5, 1663));
        assert_eq!(commit.subxacts.iter().collect::<Vec<_>>(), [741, 742]);
        assert_eq!(commit.dropped_rels.iter().next().unwrap().to_string(), "1663/5/16384");
        assert_eq!(commit.twophase, Some(TwoPhase { xid: 739, gid: b"name" }));
        assert_eq!(commit.origin, Some(Origin { lsn: Lsn(0x1_0000_0028), time: 0 }));
        assert_eq!(
            described_from(RmgrId::XACT, XLOG_XACT_COMMIT_PREPARED | XLOG_XACT_HAS_INFO, 3, &data),
            "739: 2000-01-01 12:00:00.000000 UTC; rels: base/5/16384; subxacts: 741 742; \
             dropped stats: 2/5/4294983680; relcache init file inval dbid 5 tsid 1663; inval msgs: relcache 1259; \
             sync; origin: node 3, lsn 1/28, at 2000-01-01 00:00:00.000000 UTC"
        );
        for len in 0..data.len() {
            assert_eq!(Commit::parse(Major::V18, XLOG_XACT_HAS_INFO, &data[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn without_the_flag_there_is_only_a_time() {
        let data = words(NOON);
        let commit = Commit::parse(Major::V18, XLOG_XACT_COMMIT, &data).unwrap();
        assert_eq!((commit.time, commit.xinfo, commit.twophase), (43_200_000_000, 0, None));
        assert_eq!(described(RmgrId::XACT, XLOG_XACT_ABORT, &data), "2000-01-01 12:00:00.000000 UTC");
    }

    #[test]
    fn an_abort_has_no_invalidations() {
        // The flag must not make the reader take what follows for messages.
        let data = [&words(NOON)[..], &words([XACT_XINFO_HAS_INVALS | XACT_XINFO_HAS_TWOPHASE, 739])].concat();
        let abort = Abort::parse(Major::V18, XLOG_XACT_HAS_INFO, &data).unwrap();
        assert_eq!(abort.twophase.unwrap().xid, 739);
        assert!(abort.invalidations.is_empty());
    }

    #[test]
    fn the_end_of_a_prepared_transaction_is_not_its_own_transaction() {
        let data = full_commit();
        let bytes = RecordBuilder::new(RmgrId::XACT, 0xB0).xid(0).main_data(&data).build();
        assert_eq!(transaction_end(&RecordBuilder::parse(&bytes, Lsn(40))), Some((739, 43_200_000_000)));
        let bytes = RecordBuilder::new(RmgrId::XACT, 0x80).xid(800).main_data(&data).build();
        assert_eq!(transaction_end(&RecordBuilder::parse(&bytes, Lsn(40))), Some((800, 43_200_000_000)));
        let bytes = RecordBuilder::new(RmgrId::XACT, XLOG_XACT_PREPARE).xid(800).main_data(&data).build();
        assert_eq!(transaction_end(&RecordBuilder::parse(&bytes, Lsn(40))), None);
    }

    #[test]
    fn the_parts_of_a_prepare_are_aligned() {
        let mut data = words([TWOPHASE_MAGIC, 200, 740, 5, NOON[0], NOON[1], 10, 1, 1, 0, 0, 1, 1]);
        data.extend([1, 0, 4, 0]);
        data.extend(words([0, 0, 0, 0]));
        data.extend(b"gid\0\0\0\0\0");
        data.extend(words([741, 0]));
        data.extend(words([1663, 5, 16384, 0]));
        data.extend(words([2, 5, 16384, 0]));
        data.extend(words([55, 5, 0, 0]));
        data.extend(b"rest");
        let prepare = Prepare::parse(Major::V18, &data).unwrap();
        assert_eq!((prepare.xid, prepare.gid, prepare.rest), (740, &b"gid"[..], &b"rest"[..]));
        assert_eq!(
            described(RmgrId::XACT, XLOG_XACT_PREPARE, &data),
            "gid gid: 2000-01-01 12:00:00.000000 UTC; rels(commit): base/5/16384; abort dropped stats: 2/5/16384; \
             subxacts: 741; relcache init file inval dbid 5 tsid 0; inval msgs: catcache 55"
        );
        for len in 0..data.len() - 4 {
            assert_eq!(Prepare::parse(Major::V18, &data[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn before_18_statistics_have_short_names() {
        let flags = XACT_XINFO_HAS_DROPPED_STATS | XACT_XINFO_HAS_TWOPHASE;
        let data = [&words(NOON)[..], &words([flags, 2, 2, 5, 16384, 1, 0, 7, 739])].concat();
        let commit = Commit::parse(Major::V17, XLOG_XACT_HAS_INFO, &data).unwrap();
        let stats: Vec<_> = commit.dropped_stats.iter().map(|item| (item.kind, item.database, item.object)).collect();
        assert_eq!(stats, [(2, 5, 16384), (1, 0, 7)]);
        assert_eq!(commit.twophase.unwrap().xid, 739);
        assert_eq!(Commit::parse(Major::V18, XLOG_XACT_HAS_INFO, &data), None);
    }

    #[test]
    fn assignments_name_both_sides() {
        assert_eq!(
            described(RmgrId::XACT, XLOG_XACT_ASSIGNMENT, &words([740, 2, 741, 742])),
            "xtop 740: subxacts: 741 742"
        );
    }
}
