//! Redo of everything that is not a page of a relation: transaction status, commit timestamps, multixacts, prepared
//! transactions, replication origins, counters and settings.
//!
//! One lane hands over every record of the managers XLOG, Transaction, Storage, CLOG, Database, Tablespace, MultiXact,
//! RelMap, Standby, CommitTs, ReplicationOrigin and LogicalMessage, and Heap2's REWRITE, in LSN order. What is state is
//! kept here and reaches the disk with a restartpoint; what changes relation files or directories is handed back as
//! [`Action`]s. Nothing here knows a page of a relation, a thread or the control file on disk.
//!
//! Heap's INPLACE and the invalidations of commits need nothing: they would remove `pg_internal.init` files, which are all
//! removed at the beginning (`RelationCacheInitFileRemove`) and which no backend makes while we replay.

mod action;
mod clog;
mod commit_ts;
mod decoding;
mod files;

mod multixact;
mod origins;
mod pages;
mod prepared;
mod restartpoint;
mod xact;
mod xid;
mod xlog;

pub use action::{Action, DatabaseDir, SeenCheckpoint};
pub use clog::XidStatus;
pub use prepared::{Prepared, State as PreparedState};
pub use walrider_wal::records::xlog::ParameterChange;
pub use xact::PlainCommit;
pub use xid::NextXid;
pub use xlog::BackupState;

use std::path::{Path, PathBuf};

use walrider_datadir::DataDirError;
use walrider_datadir::slru::Slru;
use walrider_datadir::twophase::TwoPhaseFiles;
use walrider_layout::control::ControlFile;
use walrider_layout::{Lsn, MultiXactId, Oid, TimelineId, TransactionId};
use walrider_wal::record::Record;
use walrider_wal::records::heap::XLOG_HEAP_OPMASK;
use walrider_wal::records::heap2::XLOG_HEAP2_REWRITE;
use walrider_wal::rmgr::RmgrId;

use clog::Clog;
use commit_ts::CommitTs;
use multixact::MultiXacts;
use origins::Origins;
use prepared::PreparedTransactions;

/// Pages of one SLRU in memory, 8 MB: PostgreSQL takes as much at most by itself (`SimpleLruAutotuneBuffers`). A page
/// of `pg_xact` serves 32,768 transactions, one of `pg_commit_ts` 819.
const SLRU_PAGES: usize = 1024;
/// Changed pages of one SLRU that should be written before they must be, to make room.
const DIRTY_PAGES: usize = SLRU_PAGES * 3 / 4;

/// A record of global state cannot be redone. The caller knows the LSN and the resource manager.
#[derive(Debug, thiserror::Error)]
pub enum GlobalError {
    /// The resource manager does not have this record type, or we do not know it.
    #[error("no redo for this record type (info 0x{0:02X})")]
    UnknownType(u8),
    /// The record's data ends too early or goes on too long.
    #[error("record data does not have the length that its contents require ({0})")]
    DataLength(&'static str),
    /// The record's contents are inconsistent.
    #[error("record is inconsistent: {0}")]
    CorruptRecord(&'static str),
    /// No id leads to this page.
    #[error("record is inconsistent: page {0} cannot exist")]
    PageNumber(i64),
    /// A checkpoint of another timeline than the one being replayed.
    #[error("checkpoint record is of timeline {found}, expected {expected}: this WAL does not belong together")]
    Timeline {
        /// In the record.
        found: TimelineId,
        /// Being replayed.
        expected: TimelineId,
    },
    /// A stop of the primary before the end of the backup.
    #[error(
        "the server was stopped before the base backup that starts at {0} had ended: the backup cannot be made \
         consistent; take another one"
    )]
    BackupCanceled(Lsn),
    /// From there on tables may have been filled without WAL (`CheckRequiredParameterValues`, xlog.c).
    #[error(
        "WAL was generated with wal_level = minimal, and lacks what went into files only: recovery from an archive cannot go on; \
         restore the backup again with a target before, or one that was taken after wal_level was raised again"
    )]
    MinimalWal,
    /// A file could not be read or written.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
}

/// `WAL_LEVEL_MINIMAL` (`access/xlog.h`).
pub const WAL_LEVEL_MINIMAL: u32 = 0;

/// A page number from a record, which must be one that an id leads to.
fn page_number(page: i64, last: u64) -> Result<u64, GlobalError> {
    u64::try_from(page).ok().filter(|&page| page <= last).ok_or(GlobalError::PageNumber(page))
}

/// The state that replay keeps of everything that is not a page of a relation.
pub struct Globals {
    root: PathBuf,
    clog: Clog,
    commit_ts: CommitTs,
    multixacts: MultiXacts,
    prepared: PreparedTransactions,
    twophase_files: TwoPhaseFiles,
    origins: Origins,
    next_xid: NextXid,
    next_oid: Oid,
    /// The oldest transaction id that may be in a table (`oldestXid`), and the database that has it.
    oldest_xid: (TransactionId, Oid),
    timeline: TimelineId,
    latest_checkpoint: Option<SeenCheckpoint>,
    parameters: ParameterChange,
    backup: BackupState,
    full_page_writes: bool,
    /// Where the last record begins that turned that off (`lastFpwDisableRecPtr`).
    full_page_writes_off: Option<Lsn>,
    archive_recovery: bool,
}

impl Globals {
    /// Begins where PostgreSQL's recovery does before the first record (`StartupXLOG`: `StartupCLOG`,
    /// `StartupMultiXact`, `StartupCommitTs`, `StartupReplicationOrigin`, `restoreTwoPhaseData`). `control` is the control
    /// file as it is to be for this recovery: checkpoint and backup fields taken from `backup_label`, if there is one;
    /// `timeline` is the one of the checkpoint record. `archive_recovery` is what a signal file, or a recovery from an
    /// archive, asks for (`ArchiveRecoveryRequested`). Changes no file.
    ///
    /// # Errors
    /// A file that cannot be read, or that is damaged.
    pub fn open(root: &Path, control: &ControlFile, archive_recovery: bool) -> Result<Globals, GlobalError> {
        let checkpoint = &control.checkpoint_copy;
        let slru = |directory: &str| Slru::new(root.join(directory), SLRU_PAGES);
        let next_xid = NextXid(checkpoint.next_xid);
        let clog = Clog::start(slru("pg_xact"), next_xid.xid());
        let multixacts = MultiXacts::start(slru("pg_multixact/offsets"), slru("pg_multixact/members"), checkpoint);
        let commit_ts = CommitTs::start(slru("pg_commit_ts"), control.track_commit_timestamp, checkpoint)?;
        let mut globals = Globals {
            root: root.to_owned(),
            clog,
            commit_ts,
            multixacts,
            prepared: PreparedTransactions::default(),
            twophase_files: TwoPhaseFiles::new(root),
            origins: Origins::default(),
            next_xid,
            next_oid: checkpoint.next_oid,
            oldest_xid: (checkpoint.oldest_xid, checkpoint.oldest_xid_db),
            timeline: checkpoint.timeline,
            latest_checkpoint: None,
            parameters: xlog::parameters_of(control),
            backup: BackupState::from_control(control),
            full_page_writes: checkpoint.full_page_writes,
            full_page_writes_off: None,
            archive_recovery,
        };
        globals.restore_files(control.major)?;
        Ok(globals)
    }

    /// Redoes one record. What is state is done when this returns; the actions are for the caller to do, in order.
    ///
    /// Every record moves the next transaction id, also those that are not handed over here: see
    /// [`Globals::advance_next_xid`].
    ///
    /// # Errors
    /// What [`GlobalError`] lists. A record that could not be read has changed nothing but the next transaction id.
    pub fn redo(&mut self, record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
        self.next_xid.advance_past(record.xid());
        if let Some(commit) = PlainCommit::of(record) {
            self.commit(&commit)?;
            return Ok(Vec::new());
        }
        let info = record.info();
        let unknown = Err(GlobalError::UnknownType(record.header.info));
        match record.header.rmgr {
            RmgrId::XLOG => self.redo_xlog(record),
            RmgrId::XACT => self.redo_xact(record),
            RmgrId::SMGR => files::redo_smgr(record),
            RmgrId::DBASE => files::redo_dbase(record),
            RmgrId::TBLSPC => files::redo_tblspc(record),
            RmgrId::RELMAP => files::redo_relmap(record),
            RmgrId::CLOG => self.redo_clog(record),
            RmgrId::COMMIT_TS => self.redo_commit_ts(record),
            RmgrId::MULTIXACT => self.redo_multixact(record),
            RmgrId::REPLORIGIN => self.redo_replorigin(record),
            RmgrId::HEAP2 if info & XLOG_HEAP_OPMASK == XLOG_HEAP2_REWRITE => {
                decoding::redo_rewrite(&self.root, record)?;
                Ok(Vec::new())
            }
            // Of these, nothing is needed without hot standby (`standby_redo`), or ever (`logicalmsg_redo`); but only of
            // the types that are known.
            RmgrId::STANDBY | RmgrId::LOGICALMSG | RmgrId::HEAP | RmgrId::HEAP2 => {
                let known = record.header.rmgr.get().is_some_and(|rmgr| (rmgr.identify)(record.header.info).is_some());
                if known { Ok(Vec::new()) } else { unknown }
            }
            _ => unknown,
        }
    }

    /// Moves the next transaction id past one that a record names (`AdvanceNextFullTransactionIdPastXid` in
    /// `ApplyWalRecord`): to be called for every record that is not handed to [`Globals::redo`], or for the newest of
    /// them, before the next that is.
    #[inline]
    pub fn advance_next_xid(&mut self, xid: TransactionId) {
        self.next_xid.advance_past(xid);
    }

    /// The next transaction id, as far as WAL tells.
    pub fn next_xid(&self) -> NextXid {
        self.next_xid
    }

    /// The next object id.
    pub fn next_oid(&self) -> Oid {
        self.next_oid
    }

    /// The next multixact id, and where its members will begin.
    pub fn next_multi(&self) -> (MultiXactId, u32) {
        (self.multixacts.next_multi, self.multixacts.next_offset)
    }

    /// The timeline of the last record.
    pub fn timeline(&self) -> TimelineId {
        self.timeline
    }

    /// The last checkpoint record that was redone; `None` if there was none.
    pub fn latest_checkpoint(&self) -> Option<&SeenCheckpoint> {
        self.latest_checkpoint.as_ref()
    }

    /// The transactions that are prepared, by id.
    pub fn prepared(&self) -> impl Iterator<Item = &Prepared> {
        self.prepared.iter()
    }

    /// The primary's settings.
    pub fn parameters(&self) -> &ParameterChange {
        &self.parameters
    }

    /// Whether the primary writes full-page images (`lastFullPageWrites`).
    pub fn full_page_writes(&self) -> bool {
        self.full_page_writes
    }

    /// Where the last record of those redone begins that says that it does not any more, if one did.
    pub fn full_page_writes_off(&self) -> Option<Lsn> {
        self.full_page_writes_off
    }

    /// Status of a transaction, as the two bits in `pg_xact` say; `None` if it has not ended.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn xid_status(&mut self, xid: TransactionId) -> Result<Option<XidStatus>, GlobalError> {
        Ok(match self.clog.get(xid)? {
            1 => Some(XidStatus::Committed),
            2 => Some(XidStatus::Aborted),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests;
