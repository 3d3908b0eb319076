//! Why replay fails.

use std::error::Error;

use walrider_datadir::DataDirError;
use walrider_layout::{BlockNumber, Lsn};
use walrider_redo::RedoError;
use walrider_store::StoreError;
use walrider_wal::record::Record;

use crate::globals::GlobalError;
use crate::rels::RelFork;

/// Redo of a record failed on a page.
#[derive(Debug, thiserror::Error)]
#[error("at {lsn}: redo of {record} failed on {page}: {source}")]
pub struct RedoFailure {
    /// Where the record begins.
    pub lsn: Lsn,
    /// Resource manager and record type.
    pub record: String,
    /// Relation, fork and block.
    pub page: String,
    /// What is wrong.
    pub source: RedoError,
}

impl RedoFailure {
    /// Tells what failed where.
    pub fn new(record: &Record<'_>, fork: &RelFork, block: BlockNumber, source: RedoError) -> RedoFailure {
        RedoFailure { lsn: record.lsn, record: type_name(record), page: page_name(fork, block), source }
    }
}

/// A page as messages name it.
pub fn page_name(fork: &RelFork, block: BlockNumber) -> String {
    format!("relation {}, fork {}, block {block}", fork.rel, fork.fork.name())
}

/// Resource manager and type of a record, as `pg_waldump` names them.
pub fn type_name(record: &Record<'_>) -> String {
    let rmgr = record.header.rmgr;
    match rmgr.get().and_then(|known| (known.identify)(record.header.info & !0x0F)) {
        Some(name) => format!("{rmgr}/{name}"),
        None => format!("{rmgr}/UNKNOWN ({:02X})", record.info()),
    }
}

/// Why replay fails. What was replayed before is kept where it can be, see docs/crash-safety.md.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A file of the data directory.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// A record does not fit the page it changes.
    #[error(transparent)]
    Redo(RedoFailure),
    /// A page of the directory is damaged.
    #[error("{page} is damaged: {problem}; restore the directory from a backup that is not")]
    BadPage {
        /// Relation, fork and block.
        page: String,
        /// What is wrong.
        problem: String,
    },
    /// WAL that is not valid although more follows, or that contradicts the directory.
    #[error("{0}")]
    CorruptWal(String),
    /// Anything that the user has to set right first.
    #[error("{0}")]
    Refused(String),
    /// The files of the base backup could not be had ([`crate::base::Base`]).
    #[error("{source}")]
    Base {
        /// Why.
        source: Box<dyn Error + Send + Sync>,
        /// The backup is damaged.
        damaged: bool,
    },
    /// Who brings WAL failed ([`crate::upstream::Upstream`]), and knows why.
    #[error(transparent)]
    Upstream(Box<dyn Error + Send + Sync>),
}

impl ReplayError {
    /// A page that does not pass verification.
    pub fn bad_page(fork: &RelFork, block: BlockNumber, problem: String) -> ReplayError {
        ReplayError::BadPage { page: page_name(fork, block), problem }
    }

    /// Redo of a record of global state failed: a file is at fault, or else the record.
    pub fn in_global(record: &Record<'_>, error: GlobalError) -> ReplayError {
        match error {
            GlobalError::DataDir(error) => ReplayError::DataDir(error),
            GlobalError::MinimalWal => ReplayError::Refused(format!("at {}: {error}", record.lsn)),
            other => ReplayError::CorruptWal(format!("at {}: redo of {}: {other}", record.lsn, type_name(record))),
        }
    }

    /// Where in the WAL it happened, if it was at a record.
    pub fn lsn(&self) -> Option<Lsn> {
        match self {
            ReplayError::Redo(failure) => Some(failure.lsn),
            _ => None,
        }
    }

    /// Whether the input is corrupt (exit code 4), not the circumstances (1).
    pub fn is_corruption(&self) -> bool {
        matches!(
            self,
            ReplayError::Redo(_)
                | ReplayError::BadPage { .. }
                | ReplayError::CorruptWal(_)
                | ReplayError::Base { damaged: true, .. }
        )
    }
}

impl From<StoreError> for ReplayError {
    fn from(error: StoreError) -> ReplayError {
        match error {
            StoreError::File(error) => ReplayError::DataDir(error),
            StoreError::Corrupt(why) => ReplayError::CorruptWal(why),
            StoreError::Refused(why) => ReplayError::Refused(why),
        }
    }
}

impl From<GlobalError> for ReplayError {
    /// Outside redo of a record, only files can be at fault.
    fn from(error: GlobalError) -> ReplayError {
        match error {
            GlobalError::DataDir(error) => ReplayError::DataDir(error),
            other => ReplayError::CorruptWal(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use walrider_layout::Major;
    use walrider_wal::record::RecordHeader;
    use walrider_wal::rmgr::RmgrId;

    use super::*;

    #[test]
    fn a_file_at_fault_is_not_corrupt_wal() {
        let header = RecordHeader { total_len: 24, xid: 7, prev: Lsn(0), info: 0, rmgr: RmgrId::CLOG, crc: 0 };
        let record = Record {
            major: Major::V18,
            lsn: Lsn(0x28),
            end: Lsn(0x40),
            header,
            origin: 0,
            toplevel_xid: 0,
            blocks: Default::default(),
            main_data: &[],
        };
        let file = DataDirError::io("read", "pg_xact/0000", std::io::ErrorKind::PermissionDenied.into());
        let error = ReplayError::in_global(&record, GlobalError::DataDir(file));
        assert!(matches!(error, ReplayError::DataDir(_)) && !error.is_corruption());
        let error = ReplayError::in_global(&record, GlobalError::DataLength("page"));
        assert!(error.is_corruption());
        assert!(error.to_string().starts_with("at 0/28: redo of CLOG/ZEROPAGE: "), "{error}");
    }
}
