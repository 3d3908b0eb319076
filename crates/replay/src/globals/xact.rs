//! Records of transactions (`xact_redo` in `access/transam/xact.c`, PostgreSQL 18), and of what knows about
//! transactions: `pg_xact`, `pg_commit_ts`, `pg_multixact`, replication origins.

use walrider_layout::bytes::u64_at;
use walrider_layout::xid::precedes;
use walrider_layout::{Major, TransactionId};
use walrider_wal::record::Record;

use walrider_wal::records::parts::parse_zero_page;
use walrider_wal::records::xact::{self, Abort, Commit, Prepare};
use walrider_wal::records::{clog, commit_ts, multixact, replorigin};
use walrider_wal::rmgr::RmgrId;

use super::action::Action;
use super::clog::XidStatus;
use super::{GlobalError, Globals};

/// A commit that says nothing but its time: `XLOG_XACT_COMMIT` without `XLOG_XACT_HAS_INFO`. Nearly every record that is
/// replayed in order is one, so that it is read where it is decoded, and redone from this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainCommit {
    /// The transaction.
    pub xid: TransactionId,
    /// When it was committed.
    pub time: i64,
    /// Replication origin, 0 if none.
    pub origin: u16,
}

impl PlainCommit {
    /// What a record says, if it is one.
    #[inline]
    pub fn of(record: &Record<'_>) -> Option<PlainCommit> {
        let plain = record.header.rmgr == RmgrId::XACT && record.info() == xact::XLOG_XACT_COMMIT;
        (plain && record.main_data.len() == 8 && record.xid() != 0).then(|| PlainCommit {
            xid: record.xid(),
            time: u64_at(record.main_data, 0) as i64,
            origin: record.origin,
        })
    }
}

/// The identifier in the state of a prepared transaction, of a record or a file, and the newest of its transactions' ids.
pub(super) fn prepared_gid(major: Major, state: &[u8]) -> Result<(Vec<u8>, TransactionId), GlobalError> {
    let prepare = Prepare::parse(major, state).ok_or(GlobalError::DataLength("prepared transaction"))?;
    Ok((prepare.gid.to_vec(), newest_of(prepare.xid, prepare.subxacts.iter())))
}

/// The newest of these.
fn newest_of(xid: TransactionId, subxacts: impl Iterator<Item = TransactionId>) -> TransactionId {
    subxacts.fold(xid, |newest, subxid| if precedes(newest, subxid) { subxid } else { newest })
}

impl Globals {
    /// Redoes a commit that says nothing but its time (`xact_redo_commit`).
    ///
    /// # Errors
    /// As [`Globals::redo`].
    #[inline]
    pub fn commit(&mut self, commit: &PlainCommit) -> Result<(), GlobalError> {
        self.next_xid.advance_past(commit.xid);
        self.clog.set(commit.xid, XidStatus::Committed)?;
        if self.commit_ts.is_active() {
            self.commit_ts.set(commit.xid, commit.time, commit.origin)?;
        }
        Ok(())
    }

    /// `xact_redo`.
    pub(super) fn redo_xact(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        let info = record.header.info;
        match info & xact::XLOG_XACT_OPMASK {
            xact::XLOG_XACT_COMMIT | xact::XLOG_XACT_COMMIT_PREPARED => {
                let commit =
                    Commit::parse(record.major, info, record.main_data).ok_or(GlobalError::DataLength("commit"))?;
                self.end_transaction(record, &commit, XidStatus::Committed)
            }
            xact::XLOG_XACT_ABORT | xact::XLOG_XACT_ABORT_PREPARED => {
                let abort =
                    Abort::parse(record.major, info, record.main_data).ok_or(GlobalError::DataLength("abort"))?;
                self.end_transaction(record, &abort, XidStatus::Aborted)
            }
            xact::XLOG_XACT_PREPARE => self.prepare(record),
            // Which subtransactions belong where matters to snapshots only, and invalidations to decoding.
            xact::XLOG_XACT_ASSIGNMENT | xact::XLOG_XACT_INVALIDATIONS => Ok(Vec::new()),
            _ => Err(GlobalError::UnknownType(info)),
        }
    }

    /// `xact_redo_commit`, `xact_redo_abort`; an abort may also be that of a subtransaction alone.
    fn end_transaction(
        &mut self,
        record: &Record<'_>,
        end: &Commit<'_>,
        status: XidStatus,
    ) -> Result<Vec<Action>, GlobalError> {
        let op = record.info() & xact::XLOG_XACT_OPMASK;
        let prepared = matches!(op, xact::XLOG_XACT_COMMIT_PREPARED | xact::XLOG_XACT_ABORT_PREPARED);
        let xid = if prepared { end.twophase.map_or(0, |twophase| twophase.xid) } else { record.xid() };
        if xid == 0 {
            return Err(GlobalError::CorruptRecord("the end of a transaction without saying which"));
        }
        self.next_xid.advance_past(newest_of(xid, end.subxacts.iter()));
        if status == XidStatus::Committed && self.commit_ts.is_active() {
            let time = end.origin.map_or(end.time, |origin| origin.time);
            for xid in std::iter::once(xid).chain(end.subxacts.iter()) {
                self.commit_ts.set(xid, time, record.origin)?;
            }
        }
        for xid in std::iter::once(xid).chain(end.subxacts.iter()) {
            self.clog.set(xid, status)?;
        }
        if let Some(origin) = end.origin {
            self.origins.advance(record.origin, origin.lsn, false);
        }
        if prepared {
            self.prepared.finish(xid);
        }
        if end.dropped_rels.is_empty() {
            return Ok(Vec::new());
        }
        Ok(vec![Action::DropRelations(end.dropped_rels.iter().collect())])
    }

    /// `XLOG_XACT_PREPARE` (`PrepareRedoAdd`, `access/transam/twophase.c`).
    fn prepare(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        let data = record.main_data;
        let prepare = Prepare::parse(record.major, data).ok_or(GlobalError::DataLength("prepared transaction"))?;
        // The file must be one that PostgreSQL accepts (`ReadTwoPhaseFile`).
        let whole = u64::from(prepare.total_len) == data.len() as u64 + 4 && data.len().is_multiple_of(8);
        if prepare.magic != xact::TWOPHASE_MAGIC || !whole {
            return Err(GlobalError::CorruptRecord(
                "the state of a prepared transaction has the wrong magic or length",
            ));
        }
        if prepare.xid != record.xid() {
            return Err(GlobalError::CorruptRecord("a transaction prepares another one"));
        }
        let full_xid = self.next_xid.full(prepare.xid);
        let newest = newest_of(prepare.xid, prepare.subxacts.iter());
        if self.prepared.prepare(full_xid, prepare.gid, newest, record.end, data) {
            self.origins.advance(record.origin, prepare.origin_lsn, false);
        }
        Ok(Vec::new())
    }

    /// `clog_redo` (`access/transam/clog.c`).
    pub(super) fn redo_clog(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        match record.info() {
            clog::CLOG_ZEROPAGE => {
                let page = parse_zero_page(record.main_data).ok_or(GlobalError::DataLength("page"))?;
                self.clog.zero_page(page)?;
            }
            clog::CLOG_TRUNCATE => {
                let truncate = clog::Truncate::parse(record.main_data).ok_or(GlobalError::DataLength("truncation"))?;
                self.clog.truncate(truncate.page)?;
            }
            _ => return Err(GlobalError::UnknownType(record.header.info)),
        }
        Ok(Vec::new())
    }

    /// `commit_ts_redo` (`access/transam/commit_ts.c`).
    pub(super) fn redo_commit_ts(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        match record.info() {
            commit_ts::COMMIT_TS_ZEROPAGE => {
                let page = parse_zero_page(record.main_data).ok_or(GlobalError::DataLength("page"))?;
                self.commit_ts.zero_page(page)?;
            }
            commit_ts::COMMIT_TS_TRUNCATE => {
                let truncate = commit_ts::Truncate::parse(record.main_data);
                let truncate = truncate.ok_or(GlobalError::DataLength("truncation"))?;
                self.commit_ts.truncate(truncate.page, truncate.oldest_xid)?;
            }
            _ => return Err(GlobalError::UnknownType(record.header.info)),
        }
        Ok(Vec::new())
    }

    /// `multixact_redo` (`access/transam/multixact.c`).
    pub(super) fn redo_multixact(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        let (info, data) = (record.info(), record.main_data);
        match info {
            multixact::XLOG_MULTIXACT_ZERO_OFF_PAGE | multixact::XLOG_MULTIXACT_ZERO_MEM_PAGE => {
                let page = parse_zero_page(data).ok_or(GlobalError::DataLength("page"))?;
                match info {
                    multixact::XLOG_MULTIXACT_ZERO_OFF_PAGE => self.multixacts.zero_offsets_page(page)?,
                    _ => self.multixacts.zero_members_page(page)?,
                }
            }
            multixact::XLOG_MULTIXACT_CREATE_ID => {
                let create = multixact::CreateId::parse(data).ok_or(GlobalError::DataLength("multixact"))?;
                self.multixacts.create(create.multi, create.offset, create.members.iter())?;
                let newer = |newest: TransactionId, xid| if precedes(newest, xid) { xid } else { newest };
                let newest = create.members.iter().map(|member| member.xid).fold(record.xid(), newer);
                self.next_xid.advance_past(newest);
            }
            multixact::XLOG_MULTIXACT_TRUNCATE_ID => {
                let truncate = multixact::Truncate::parse(data).ok_or(GlobalError::DataLength("truncation"))?;
                self.multixacts.oldest = (truncate.offsets_end, truncate.oldest_multi_db);
                self.multixacts.truncate(truncate.members_start, truncate.members_end, truncate.offsets_end)?;
            }
            _ => return Err(GlobalError::UnknownType(record.header.info)),
        }
        Ok(Vec::new())
    }

    /// `replorigin_redo` (`replication/logical/origin.c`).
    pub(super) fn redo_replorigin(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        match record.info() {
            replorigin::XLOG_REPLORIGIN_SET => {
                let set = replorigin::Set::parse(record.main_data).ok_or(GlobalError::DataLength("origin"))?;
                self.origins.advance(set.origin, set.remote_lsn, set.force);
            }
            replorigin::XLOG_REPLORIGIN_DROP => {
                let drop = replorigin::Drop::parse(record.main_data).ok_or(GlobalError::DataLength("origin"))?;
                self.origins.remove(drop.origin);
            }
            _ => return Err(GlobalError::UnknownType(record.header.info)),
        }
        Ok(Vec::new())
    }
}
