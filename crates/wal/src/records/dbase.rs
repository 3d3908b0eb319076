//! Records of databases being made and dropped (`commands/dbcommands_xlog.h`, `access/rmgrdesc/dbasedesc.c`,
//! PostgreSQL 18).

use std::fmt::Write as _;

use walrider_layout::Oid;
use walrider_layout::bytes::Reader;

use super::parts::Items;
use crate::record::Record;

/// Record type: a database's directory is copied, file by file.
pub const XLOG_DBASE_CREATE_FILE_COPY: u8 = 0x00;
/// Record type: a database's directory is made; its pages follow in the WAL.
pub const XLOG_DBASE_CREATE_WAL_LOG: u8 = 0x10;
/// Record type: a database's directories go.
pub const XLOG_DBASE_DROP: u8 = 0x20;

/// The data of [`XLOG_DBASE_CREATE_FILE_COPY`] (`xl_dbase_create_file_copy_rec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateFileCopy {
    /// `db_id`: the new database.
    pub database: Oid,
    /// `tablespace_id`: where the copy goes.
    pub tablespace: Oid,
    /// `src_db_id`: the database that is copied.
    pub source_database: Oid,
    /// `src_tablespace_id`: where it is copied from.
    pub source_tablespace: Oid,
}

impl CreateFileCopy {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<CreateFileCopy> {
        let mut reader = Reader::new(main_data);
        Some(CreateFileCopy {
            database: reader.u32()?,
            tablespace: reader.u32()?,
            source_database: reader.u32()?,
            source_tablespace: reader.u32()?,
        })
    }
}

/// The data of [`XLOG_DBASE_CREATE_WAL_LOG`] (`xl_dbase_create_wal_log_rec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateWalLog {
    /// `db_id`: the new database.
    pub database: Oid,
    /// `tablespace_id`: where its directory is.
    pub tablespace: Oid,
}

impl CreateWalLog {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &[u8]) -> Option<CreateWalLog> {
        let mut reader = Reader::new(main_data);
        Some(CreateWalLog { database: reader.u32()?, tablespace: reader.u32()? })
    }
}

/// The data of [`XLOG_DBASE_DROP`] (`xl_dbase_drop_rec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drop<'a> {
    /// `db_id`: the database.
    pub database: Oid,
    /// `tablespace_ids`: where it has directories.
    pub tablespaces: Items<'a, Oid>,
}

impl<'a> Drop<'a> {
    /// Reads the main data of a record; `None` if it is too short.
    pub fn parse(main_data: &'a [u8]) -> Option<Drop<'a>> {
        let mut reader = Reader::new(main_data);
        let database = reader.u32()?;
        let count = reader.i32()?;
        Some(Drop { database, tablespaces: Items::take(&mut reader, count)? })
    }
}

/// The name of a record type.
pub fn identify(info: u8) -> Option<&'static str> {
    match info & 0xF0 {
        XLOG_DBASE_CREATE_FILE_COPY => Some("CREATE_FILE_COPY"),
        XLOG_DBASE_CREATE_WAL_LOG => Some("CREATE_WAL_LOG"),
        XLOG_DBASE_DROP => Some("DROP"),
        _ => None,
    }
}

/// Appends what the record says.
pub fn describe(record: &Record<'_>, out: &mut String) {
    match record.info() {
        XLOG_DBASE_CREATE_FILE_COPY => {
            if let Some(copy) = CreateFileCopy::parse(record.main_data) {
                let CreateFileCopy { database, tablespace, source_database, source_tablespace } = copy;
                let _ = write!(out, "copy dir {source_tablespace}/{source_database} to {tablespace}/{database}");
            }
        }
        XLOG_DBASE_CREATE_WAL_LOG => {
            if let Some(create) = CreateWalLog::parse(record.main_data) {
                let _ = write!(out, "create dir {}/{}", create.tablespace, create.database);
            }
        }
        XLOG_DBASE_DROP => {
            if let Some(drop) = Drop::parse(record.main_data) {
                out.push_str("dir");
                for tablespace in drop.tablespaces.iter() {
                    let _ = write!(out, " {tablespace}/{}", drop.database);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::parts::tests::{described, words};
    use crate::rmgr::RmgrId;

    #[test]
    fn descriptions_read_like_those_of_pg_waldump() {
        let described = |info, data: &[u32]| described(RmgrId::DBASE, info, &words(data.iter().copied()));
        assert_eq!(described(XLOG_DBASE_CREATE_FILE_COPY, &[9, 1663, 4, 1664]), "copy dir 1664/4 to 1663/9");
        assert_eq!(described(XLOG_DBASE_CREATE_WAL_LOG, &[9, 1663]), "create dir 1663/9");
        assert_eq!(described(XLOG_DBASE_DROP, &[9, 2, 1663, 16400]), "dir 1663/9 16400/9");
        assert_eq!(described(XLOG_DBASE_DROP, &[9, 3, 1663, 16400]), "");
    }
}
