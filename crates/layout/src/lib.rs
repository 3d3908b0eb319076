//! PostgreSQL's on-disk bytes and the types that name places in them: LSN, timeline, page, WAL page,
//! control file, per major version.
//!
//! This crate never touches a file, socket, clock or thread, and knows no other crate of Walrider.

pub mod bytes;
pub mod checksum;
pub mod control;
pub mod history;
pub mod major;
pub mod page;
pub mod positions;
pub mod samples;
pub mod wal;
pub mod xid;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

pub use major::Major;

/// Size of a relation page in bytes (`BLCKSZ`); the only size that Walrider supports.
pub const BLCKSZ: usize = 8192;

/// Size of a WAL page in bytes (`XLOG_BLCKSZ`); the only size that Walrider supports.
pub const XLOG_BLCKSZ: usize = 8192;

/// Blocks in one segment file of a relation (`RELSEG_SIZE`): 1 GB.
pub const RELSEG_SIZE: u32 = 131_072;

/// Object identifier (`Oid`).
pub type Oid = u32;
/// Block number within a fork (`BlockNumber`).
pub type BlockNumber = u32;
/// Line pointer number within a page, starting at 1 (`OffsetNumber`).
pub type OffsetNumber = u16;
/// 32-bit transaction id (`TransactionId`), which wraps around.
pub type TransactionId = u32;
/// Multixact id (`MultiXactId`), which wraps around.
pub type MultiXactId = u32;

/// A page of a relation.
pub type PageBytes = [u8; BLCKSZ];

/// From 1970 to 2000, where PostgreSQL's time begins (`POSTGRES_EPOCH_JDATE`).
pub const POSTGRES_EPOCH: Duration = Duration::from_secs(946_684_800);

/// Rounds up to the alignment that PostgreSQL gives its data (`MAXALIGN`, 8 bytes).
///
/// ```
/// assert_eq!(walrider_layout::maxalign(13), 16);
/// assert_eq!(walrider_layout::maxalign(16), 16);
/// ```
pub const fn maxalign(len: usize) -> usize {
    (len + 7) & !7
}

/// A position in the write-ahead log, in bytes from its beginning (`XLogRecPtr`).
///
/// ```
/// use walrider_layout::Lsn;
/// let lsn: Lsn = "1/5A000028".parse().unwrap();
/// assert_eq!(lsn, Lsn(0x1_5A00_0028));
/// assert_eq!(lsn.to_string(), "1/5A000028");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// `InvalidXLogRecPtr`.
    pub const INVALID: Lsn = Lsn(0);

    /// Whether this is a position at all (zero is none).
    pub const fn is_valid(self) -> bool {
        self.0 != 0
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 as u32)
    }
}

/// The text is not of the form `XXXXXXXX/XXXXXXXX`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid LSN \"{0}\": expected two hexadecimal numbers, as in 16/B374D848")]
pub struct InvalidLsn(String);

impl FromStr for Lsn {
    type Err = InvalidLsn;

    fn from_str(text: &str) -> Result<Lsn, InvalidLsn> {
        let half = |digits: &str| {
            let hex = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            hex.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
        };
        text.split_once('/')
            .and_then(|(high, low)| Some(Lsn(half(high)? << 32 | half(low)?)))
            .ok_or_else(|| InvalidLsn(text.to_owned()))
    }
}

/// A timeline: a history of the cluster, from one promotion to the next (`TimeLineID`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimelineId(pub u32);

impl fmt::Display for TimelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A fork of a relation (`ForkNumber`, `common/relpath.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ForkNumber {
    /// The data itself.
    Main = 0,
    /// The free space map.
    FreeSpaceMap = 1,
    /// The visibility map.
    VisibilityMap = 2,
    /// What an unlogged relation is reset to after a crash.
    Init = 3,
}

impl ForkNumber {
    /// All forks, by number.
    pub const ALL: [ForkNumber; 4] =
        [ForkNumber::Main, ForkNumber::FreeSpaceMap, ForkNumber::VisibilityMap, ForkNumber::Init];

    /// The fork of this number, if there is one.
    #[inline]
    pub fn from_number(number: u8) -> Option<ForkNumber> {
        ForkNumber::ALL.get(usize::from(number)).copied()
    }

    /// The name in WAL descriptions (`forkNames`).
    pub fn name(self) -> &'static str {
        ["main", "fsm", "vm", "init"][self as usize]
    }

    /// What is appended to the file name of the relation.
    pub fn suffix(self) -> &'static str {
        ["", "_fsm", "_vm", "_init"][self as usize]
    }
}

/// Tablespace `pg_default`: the directory `base` (`DEFAULTTABLESPACE_OID`).
pub const DEFAULT_TABLESPACE_OID: Oid = 1663;
/// Tablespace `pg_global`: the directory `global` (`GLOBALTABLESPACE_OID`).
pub const GLOBAL_TABLESPACE_OID: Oid = 1664;

/// Where a relation's files are (`RelFileLocator`, `storage/relfilelocator.h`).
///
/// ```
/// use walrider_layout::{RelFileLocator, DEFAULT_TABLESPACE_OID};
/// let rel = RelFileLocator { tablespace: DEFAULT_TABLESPACE_OID, database: 5, relation: 16384 };
/// assert_eq!(rel.to_string(), "1663/5/16384");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelFileLocator {
    /// Tablespace (`spcOid`).
    pub tablespace: Oid,
    /// Database, 0 for shared relations (`dbOid`).
    pub database: Oid,
    /// File number (`relNumber`).
    pub relation: u32,
}

impl fmt::Display for RelFileLocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tablespace, self.database, self.relation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lsn_rejects_what_postgresql_rejects() {
        for text in ["", "0", "/", "1/", "/1", "1/2/3", "123456789/0", "0/123456789", "x/0", "+1/0", "1/ 2"] {
            assert!(text.parse::<Lsn>().is_err(), "{text}");
        }
    }
}
