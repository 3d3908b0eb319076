//! What a record does to files beyond what [`Globals`](super::Globals) keeps in memory. Decided here, done by the
//! engine, which knows when the page changes before it have been made.
//!
//! None of these can be taken back, so before the engine does one, `minRecoveryPoint` in `pg_control` must be at or
//! past the end of its record (`XLogFlush` in `smgr_redo` and `xact_redo_commit`, PostgreSQL 18): a server started on
//! the directory may then not stop before it.

use walrider_layout::control::CheckPoint;
use walrider_layout::{BlockNumber, ForkNumber, Lsn, Oid, RelFileLocator, TimelineId};

/// A checkpoint record: where a restartpoint may be made (`RecoveryRestartPoint`, `access/transam/xlog.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenCheckpoint {
    /// Where the record begins: what `pg_control` names.
    pub lsn: Lsn,
    /// One past its end: `minRecoveryPoint` must not be before.
    pub end: Lsn,
    /// Written by a server that stopped, or ended recovery.
    pub shutdown: bool,
    /// Its body.
    pub body: CheckPoint,
}

/// The directory of a database within a tablespace (`GetDatabasePath`, `common/relpath.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DatabaseDir {
    /// Tablespace.
    pub tablespace: Oid,
    /// Database.
    pub database: Oid,
}

/// A change to files, in the order of the WAL. "Ordered" says which changes of pages it must not be exchanged with;
/// among themselves all actions keep their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// `XLOG_SMGR_CREATE` (`smgr_redo`, `catalog/storage.c`): the fork exists, empty unless it did before. The parent
    /// directory is made if it is missing (`mdcreate` in recovery, `TablespaceCreateDbspace`).
    ///
    /// Ordered with drops of the same relation only: redo of a page makes a missing file anyway.
    CreateFork {
        /// The relation.
        rel: RelFileLocator,
        /// The fork.
        fork: ForkNumber,
    },
    /// Relations dropped by a commit, or created and then aborted (`xact_redo_commit`, `xact_redo_abort`,
    /// `access/transam/xact.c`; `DropRelationFiles`): all forks, all segments; pages known to be missing are forgotten.
    ///
    /// Ordered with every page of these relations: earlier changes need not be made at all, later ones are to a new
    /// relation of the same number and must not be lost.
    DropRelations(Vec<RelFileLocator>),
    /// `XLOG_SMGR_TRUNCATE` (`smgr_redo`): makes the main fork if it is missing; then, per flag, cuts it to `blocks`
    /// and free space map and visibility map to what that many heap blocks need, clearing the tail of the last page
    /// that stays, and brings the upper levels of the free space map up to date.
    ///
    /// Ordered with every page of this relation: earlier changes past the end need not be made, later ones extend it
    /// again; the tails of the maps are changes to pages.
    TruncateRelation {
        /// The relation.
        rel: RelFileLocator,
        /// Blocks of the main fork that stay.
        blocks: BlockNumber,
        /// `SMGR_TRUNCATE_HEAP` 1, `SMGR_TRUNCATE_VM` 2, `SMGR_TRUNCATE_FSM` 4.
        flags: u32,
    },
    /// `XLOG_DBASE_CREATE_FILE_COPY` (`dbase_redo`, `commands/dbcommands.c`): removes what is at the destination, and
    /// copies the source directory there. A missing source is taken as empty: it is dropped later in the WAL.
    ///
    /// Ordered with every page of both databases: all earlier changes to the source must be in its files, none of
    /// the later ones; earlier pages of the destination are void. A barrier.
    CopyDatabase {
        /// Copied from here.
        from: DatabaseDir,
        /// To here.
        to: DatabaseDir,
    },
    /// `XLOG_DBASE_CREATE_WAL_LOG` (`dbase_redo`, `CreateDirAndVersionFile`): the directory and its `PG_VERSION` exist.
    ///
    /// Not ordered with pages: those of the new database come later, and their files need the directory; there are no
    /// earlier ones unless a drop stands between.
    CreateDatabase(DatabaseDir),
    /// `XLOG_DBASE_DROP` (`dbase_redo`): removes the database's directory from each of these tablespaces; pages of it
    /// known to be missing are forgotten.
    ///
    /// Ordered with every page of this database, like [`Action::DropRelations`].
    DropDatabase {
        /// The database.
        database: Oid,
        /// Where it has a directory.
        tablespaces: Vec<Oid>,
    },
    /// `XLOG_TBLSPC_CREATE` (`tblspc_redo`, `commands/tablespace.c`): makes the version directory at the location, and
    /// the link `pg_tblspc/OID`, replacing an old one. With an empty location, `pg_tblspc/OID` is a directory itself.
    ///
    /// Ordered before later pages in this tablespace: they must go where the link points.
    CreateTablespace {
        /// The tablespace.
        tablespace: Oid,
        /// The absolute path, in the bytes of the record, or nothing.
        location: Vec<u8>,
    },
    /// `XLOG_TBLSPC_DROP` (`tblspc_redo`, `destroy_tablespace_directories`): removes the empty directories in it, then
    /// the version directory and the link. What is not empty is left, and that is not an error.
    ///
    /// Ordered after earlier pages and drops in this tablespace, or it would not be empty, or a file would come back.
    DropTablespace(Oid),
    /// `XLOG_RELMAP_UPDATE` (`relmap_redo`, `utils/cache/relmapper.c`): replaces the `pg_filenode.map` of the
    /// database, at once and durably.
    ///
    /// Not ordered with pages: redo never reads the map. Ordered with copies of the database, which copy it.
    UpdateRelmap {
        /// The database; the tablespace is `pg_global` and the database 0 for the map of shared relations.
        dir: DatabaseDir,
        /// The file as it is to be, its checksum included.
        map: Vec<u8>,
    },
    /// `XLOG_CHECKPOINT_SHUTDOWN` or `XLOG_CHECKPOINT_ONLINE` (`xlog_redo`): a restartpoint may be made here, unless
    /// pages are known to be missing.
    Checkpoint(SeenCheckpoint),
    /// `XLOG_CHECKPOINT_SHUTDOWN` or `XLOG_END_OF_RECOVERY` (`ApplyWalRecord`, `access/transam/xlogrecovery.c`): this
    /// record and all later ones are of a new timeline. The engine checks it against the history
    /// (`checkTimeLineSwitch`): the new one must be in it, branch off from `previous`, and not before `minRecoveryPoint`.
    /// Comes before [`Action::Checkpoint`] of the same record.
    SwitchTimeline {
        /// So far.
        from: TimelineId,
        /// From this record on.
        to: TimelineId,
        /// The timeline that `to` branched off from, as the record says; differs from `from` only in WAL that does
        /// not belong together.
        previous: TimelineId,
    },
    /// `XLOG_OVERWRITE_CONTRECORD` (`xlogrecovery_redo`): the record that began here was never finished. The engine
    /// checks that the reader has skipped just that one.
    OverwriteContrecord {
        /// Where the unfinished record began.
        overwritten: Lsn,
    },
    /// `XLOG_PARAMETER_CHANGE` (`xlog_redo`): the settings that [`Globals::apply_to`](super::Globals::apply_to) puts into
    /// the control file have changed.
    ///
    /// Not ordered with pages: redo looks at none of them (`wal_log_hints` in `heap_xlog_visible` is the standby's own
    /// setting, not this one). Stock rewrites `pg_control` at once; ours may wait until the next time it is written,
    /// because replay after a crash meets the record again.
    ParametersChanged,
    /// `XLOG_BACKUP_END` of the backup that this directory comes from (`ReachedEndOfBackup`): from here on the
    /// directory is consistent. The fields in the control file are cleared by
    /// [`Globals::apply_to`](super::Globals::apply_to), with `minRecoveryPoint` at or past this record.
    BackupEnded,
}
