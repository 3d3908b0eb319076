//! The table of resource managers (`access/rmgrlist.h`; the same numbers in every supported major).

use std::fmt;

use crate::record::Record;
use crate::records;

/// Number of a resource manager (`RmgrId`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RmgrId(pub u8);

/// What is known about a resource manager.
pub struct Rmgr {
    /// The name that `pg_waldump` prints.
    pub name: &'static str,
    /// The name of a record type, from the resource manager's part of `xl_info`.
    pub identify: fn(u8) -> Option<&'static str>,
    /// Appends what a record says, as `pg_waldump` prints it; nothing if its data makes no sense.
    pub describe: fn(&Record<'_>, &mut String),
}

macro_rules! rmgrs {
    ($($number:literal $constant:ident $name:literal $module:ident;)*) => {
        impl RmgrId {
            $(#[doc = concat!("`", $name, "`")] pub const $constant: RmgrId = RmgrId($number);)*

            /// What is known about this resource manager; `None` for a custom one or an undefined number.
            pub fn get(self) -> Option<&'static Rmgr> {
                match self.0 {
                    $($number => Some(&Rmgr {
                        name: $name,
                        identify: records::$module::identify,
                        describe: records::$module::describe,
                    }),)*
                    _ => None,
                }
            }
        }
    };
}

rmgrs! {
    0 XLOG "XLOG" xlog;
    1 XACT "Transaction" xact;
    2 SMGR "Storage" smgr;
    3 CLOG "CLOG" clog;
    4 DBASE "Database" dbase;
    5 TBLSPC "Tablespace" tblspc;
    6 MULTIXACT "MultiXact" multixact;
    7 RELMAP "RelMap" relmap;
    8 STANDBY "Standby" standby;
    9 HEAP2 "Heap2" heap2;
    10 HEAP "Heap" heap;
    11 BTREE "Btree" btree;
    12 HASH "Hash" hash;
    13 GIN "Gin" gin;
    14 GIST "Gist" gist;
    15 SEQ "Sequence" seq;
    16 SPGIST "SPGist" spgist;
    17 BRIN "BRIN" brin;
    18 COMMIT_TS "CommitTs" commit_ts;
    19 REPLORIGIN "ReplicationOrigin" replorigin;
    20 GENERIC "Generic" generic;
    21 LOGICALMSG "LogicalMessage" logicalmsg;
}

impl RmgrId {
    /// Whether extensions may define this resource manager (`RmgrIdIsCustom`).
    pub fn is_custom(self) -> bool {
        self.0 >= 128
    }

    /// Whether a record may carry this number at all (`RmgrIdIsValid`).
    #[inline]
    pub fn is_valid(self) -> bool {
        self.0 <= RmgrId::LOGICALMSG.0 || self.is_custom()
    }
}

impl fmt::Display for RmgrId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Some(rmgr) => f.write_str(rmgr.name),
            None => write!(f, "custom{:03}", self.0),
        }
    }
}
