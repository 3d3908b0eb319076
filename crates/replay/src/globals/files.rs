//! Records that change relation files and directories: relations, databases, tablespaces, relation maps. Only read here;
//! the engine does what they say (`smgr_redo`, `dbase_redo`, `tblspc_redo`, `relmap_redo`, PostgreSQL 18).

use walrider_datadir::relmap::RELMAP_SIZE;
use walrider_layout::{GLOBAL_TABLESPACE_OID, Oid};
use walrider_wal::record::Record;
use walrider_wal::records::{dbase, relmap, smgr, tblspc};

use super::GlobalError;
use super::action::{Action, DatabaseDir};

/// Longest path, with its end (`MAXPGPATH`).
const MAX_PATH_BYTES: usize = 1024;

/// `smgr_redo` (`catalog/storage.c`).
pub(super) fn redo_smgr(record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
    Ok(vec![match record.info() {
        smgr::XLOG_SMGR_CREATE => {
            let create = smgr::Create::parse(record.main_data).ok_or(GlobalError::DataLength("fork creation"))?;
            Action::CreateFork { rel: create.rel, fork: create.fork }
        }
        smgr::XLOG_SMGR_TRUNCATE => {
            let parsed = smgr::Truncate::parse(record.main_data);
            let smgr::Truncate { rel, blocks, flags } = parsed.ok_or(GlobalError::DataLength("truncation"))?;
            Action::TruncateRelation { rel, blocks, flags }
        }
        _ => return Err(GlobalError::UnknownType(record.header.info)),
    }])
}

/// A directory that belongs to one database, never that of the shared relations.
fn database_dir(tablespace: Oid, database: Oid) -> Result<DatabaseDir, GlobalError> {
    if tablespace == GLOBAL_TABLESPACE_OID || tablespace == 0 || database == 0 {
        return Err(GlobalError::CorruptRecord("a database must have a number, and a tablespace of its own"));
    }
    Ok(DatabaseDir { tablespace, database })
}

/// `dbase_redo` (`commands/dbcommands.c`).
pub(super) fn redo_dbase(record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
    let data = record.main_data;
    Ok(vec![match record.info() {
        dbase::XLOG_DBASE_CREATE_FILE_COPY => {
            let copy = dbase::CreateFileCopy::parse(data).ok_or(GlobalError::DataLength("database copy"))?;
            Action::CopyDatabase {
                from: database_dir(copy.source_tablespace, copy.source_database)?,
                to: database_dir(copy.tablespace, copy.database)?,
            }
        }
        dbase::XLOG_DBASE_CREATE_WAL_LOG => {
            let create = dbase::CreateWalLog::parse(data).ok_or(GlobalError::DataLength("database creation"))?;
            Action::CreateDatabase(database_dir(create.tablespace, create.database)?)
        }
        dbase::XLOG_DBASE_DROP => {
            let drop = dbase::Drop::parse(data).ok_or(GlobalError::DataLength("database drop"))?;
            for tablespace in drop.tablespaces.iter() {
                database_dir(tablespace, drop.database)?;
            }
            Action::DropDatabase { database: drop.database, tablespaces: drop.tablespaces.iter().collect() }
        }
        _ => return Err(GlobalError::UnknownType(record.header.info)),
    }])
}

/// `tblspc_redo` (`commands/tablespace.c`).
pub(super) fn redo_tblspc(record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
    Ok(vec![match record.info() {
        tblspc::XLOG_TBLSPC_CREATE => {
            let create =
                tblspc::Create::parse(record.main_data).ok_or(GlobalError::DataLength("tablespace creation"))?;
            let location = create.path;
            if !(location.is_empty() || location.starts_with(b"/")) || location.len() >= MAX_PATH_BYTES {
                return Err(GlobalError::CorruptRecord("the location of a tablespace is not an absolute path"));
            }
            Action::CreateTablespace { tablespace: create.tablespace, location: location.to_vec() }
        }
        tblspc::XLOG_TBLSPC_DROP => {
            let drop = tblspc::Drop::parse(record.main_data).ok_or(GlobalError::DataLength("tablespace drop"))?;
            Action::DropTablespace(drop.tablespace)
        }
        _ => return Err(GlobalError::UnknownType(record.header.info)),
    }])
}

/// `relmap_redo` (`utils/cache/relmapper.c`).
pub(super) fn redo_relmap(record: &Record<'_>) -> Result<Vec<Action>, GlobalError> {
    if record.info() != relmap::XLOG_RELMAP_UPDATE {
        return Err(GlobalError::UnknownType(record.header.info));
    }
    let relmap::Update { database, tablespace, data } =
        relmap::Update::parse(record.main_data).ok_or(GlobalError::DataLength("relation map"))?;
    if data.len() != RELMAP_SIZE {
        return Err(GlobalError::DataLength("relation map"));
    }
    let dir = match (tablespace, database) {
        (GLOBAL_TABLESPACE_OID, 0) => DatabaseDir { tablespace, database },
        _ => database_dir(tablespace, database)?,
    };
    Ok(vec![Action::UpdateRelmap { dir, map: data.to_vec() }])
}
