//! Major versions of PostgreSQL, and all that Walrider finds different between them: a table for each major, its rows
//! read off that major's source. What the rows mean for whom, and what was compared, is in `docs/majors.md`.

mod v17;
mod v18;

/// A major version of PostgreSQL. Everything that differs between majors is decided by this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Major {
    /// PostgreSQL 17.
    V17,
    /// PostgreSQL 18.
    V18,
}

/// What one major does in its own way.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// The version number as in `PG_VERSION`.
    pub number: u32,
    /// The magic number of WAL pages (`XLOG_PAGE_MAGIC`, `access/xlog_internal.h`).
    pub wal_magic: u16,
    /// The version of the control file (`PG_CONTROL_VERSION`, `catalog/pg_control.h`).
    pub control_version: u32,
    /// The catalog version of the released server (`CATALOG_VERSION_NO`, `catalog/catversion.h`); part of the name of
    /// directories in tablespaces.
    pub catalog_version: u32,
    /// The control file says whether `char` is signed (`default_char_signedness`, `catalog/pg_control.h`). Fields behind
    /// it move with it.
    pub control_has_char_signedness: bool,
    /// `HEAP_INPLACE` carries cache invalidations (`xl_heap_inplace`, `access/heapam_xlog.h`).
    pub inplace_has_invalidations: bool,
    /// Bytes of a dropped object's statistics in records of transactions (`xl_xact_stats_item`, `access/xact.h`).
    pub stats_item_size: usize,
    /// Redo of a B-tree's `VACUUM` clears the vacuum cycle (`btree_xlog_vacuum`, `access/nbtree/nbtxlog.c`).
    pub vacuum_clears_cycle_id: bool,
    /// An abbreviation of a time zone means what it means in the server's own (`DecodeTimezoneAbbrev`,
    /// `utils/adt/datetime.c`); else only a table of the server's installation counts, which we cannot see.
    pub session_zone_abbreviations: bool,
}

impl Major {
    /// Every major that Walrider supports, ascending.
    pub const ALL: [Major; 2] = [Major::V17, Major::V18];

    /// Their numbers, for messages.
    pub const SUPPORTED: &str = "17 and 18";

    /// What this major does in its own way.
    #[inline]
    pub const fn format(self) -> &'static Format {
        match self {
            Major::V17 => &v17::FORMAT,
            Major::V18 => &v18::FORMAT,
        }
    }

    fn find(is_it: impl Fn(&Format) -> bool) -> Option<Major> {
        Major::ALL.into_iter().find(|major| is_it(major.format()))
    }

    /// The version that calls itself this (`PG_VERSION`).
    pub fn from_number(number: u32) -> Option<Major> {
        Major::find(|format| format.number == number)
    }

    /// The version whose WAL pages carry this magic number.
    pub fn from_wal_magic(magic: u16) -> Option<Major> {
        Major::find(|format| format.wal_magic == magic)
    }

    /// The version whose control file carries this `pg_control_version`.
    pub fn from_control_version(version: u32) -> Option<Major> {
        Major::find(|format| format.control_version == version)
    }

    /// The version number as in `PG_VERSION`.
    pub const fn number(self) -> u32 {
        self.format().number
    }

    /// The magic number of WAL pages.
    pub const fn wal_magic(self) -> u16 {
        self.format().wal_magic
    }

    /// The version of the control file.
    pub const fn control_version(self) -> u32 {
        self.format().control_version
    }

    /// The catalog version of the released server.
    pub const fn catalog_version(self) -> u32 {
        self.format().catalog_version
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_major_is_found_by_what_it_writes() {
        for major in Major::ALL {
            assert_eq!(Major::from_number(major.number()), Some(major));
            assert_eq!(Major::from_wal_magic(major.wal_magic()), Some(major));
            assert_eq!(Major::from_control_version(major.control_version()), Some(major));
        }
        assert_eq!(Major::from_number(16), None);
        assert_eq!(Major::from_wal_magic(0), None);
        assert_eq!(Major::SUPPORTED, Major::ALL.map(|major| major.number().to_string()).join(" and "));
    }
}
